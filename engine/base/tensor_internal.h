// Conversions of halves by the processor. Each does whole eights, with the bits that tensor.c's own code gives, and
// returns how many elements it did: none where it was not built for this processor family.
#ifndef QKV_ENGINE_BASE_TENSOR_INTERNAL_H
#define QKV_ENGINE_BASE_TENSOR_INTERNAL_H

#include <stddef.h>
#include <stdint.h>

size_t qkvi_halves_to_floats_f16c(const uint8_t *in, uint8_t *out, size_t n);
size_t qkvi_floats_to_halves_f16c(const uint8_t *in, uint8_t *out, size_t n);

#endif
