// Names of the twin that a file is compiled for: `qkvi_encode` is qkvi_encode_avx2 or qkvi_encode_avx512.
#ifndef QKV_ENGINE_KERNEL_X86_TWINS_H
#define QKV_ENGINE_KERNEL_X86_TWINS_H

#include "engine/base/cpu.h"
#include "engine/kernel/kernel.h"

#if defined(__AVX512F__)
#define TWIN(name) name##_avx512
#define TWIN_NAME "avx512"
#define TWIN_NEEDS (QKV_CPU_AVX2 | QKV_CPU_AVX512)
#else
#define TWIN(name) name##_avx2
#define TWIN_NAME "avx2"
#define TWIN_NEEDS QKV_CPU_AVX2
#endif

QKV_DECLARE_ENCODE(TWIN(qkvi_encode));

#endif
