// TWIN(name): the kernel variant that a file is compiled for. `qkvi_combine` is qkvi_combine_neon or
// qkvi_combine_neon_dotprod.
#ifndef QKV_ENGINE_KERNEL_NEON_TWINS_H
#define QKV_ENGINE_KERNEL_NEON_TWINS_H

#include "engine/base/cpu.h"
#include "engine/kernel/kernel.h"

#if defined(__ARM_FEATURE_DOTPROD)
#define TWIN(name) name##_neon_dotprod
#define TWIN_NAME "neon-dotprod"
#define TWIN_NEEDS (QKV_CPU_NEON | QKV_CPU_DOTPROD)
#else
#define TWIN(name) name##_neon
#define TWIN_NAME "neon"
#define TWIN_NEEDS QKV_CPU_NEON
#endif

QKV_DECLARE_ENCODE(TWIN(qkvi_encode));
QKV_DECLARE_DENSE(TWIN(qkvi_multiply));
QKV_DECLARE_DENSE(TWIN(qkvi_combine));
QKV_DECLARE_MULTIPLY_INTEGER(TWIN(qkvi_multiply_integer));
QKV_DECLARE_SCORES_INTEGER(TWIN(qkvi_scores_integer));
QKV_DECLARE_ACCUMULATE_INTEGER(TWIN(qkvi_accumulate_integer));

#endif
