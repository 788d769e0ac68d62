// Conversions of halves by the processor, where it has QKVI_CPU_HALVES. Each does whole eights, with the bits that
// tensor.c's own code gives, and returns how many elements it did: none where it was not built for this processor
// family.
#ifndef QKV_ENGINE_BASE_TENSOR_INTERNAL_H
#define QKV_ENGINE_BASE_TENSOR_INTERNAL_H

#include <stddef.h>
#include <stdint.h>

#include "engine/base/cpu.h"

#if defined(__aarch64__)
#define QKVI_CPU_HALVES QKV_CPU_NEON
#else
#define QKVI_CPU_HALVES QKV_CPU_F16C
#endif

size_t qkvi_halves_to_floats(const uint8_t *in, uint8_t *out, size_t n);
size_t qkvi_floats_to_halves(const uint8_t *in, uint8_t *out, size_t n);

#endif
