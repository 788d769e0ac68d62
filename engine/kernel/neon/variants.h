// VARIANT(name): the kernel variant that a file is compiled for. `qkvi_combine` is qkvi_combine_neon or
// qkvi_combine_neon_dotprod.
#ifndef QKV_ENGINE_KERNEL_NEON_VARIANTS_H
#define QKV_ENGINE_KERNEL_NEON_VARIANTS_H

#include "engine/base/cpu.h"
#include "engine/kernel/kernel.h"

#if defined(__ARM_FEATURE_DOTPROD)
#define VARIANT(name) name##_neon_dotprod
#define VARIANT_NAME "neon-dotprod"
#define VARIANT_NEEDS (QKV_CPU_NEON | QKV_CPU_DOTPROD)
#else
#define VARIANT(name) name##_neon
#define VARIANT_NAME "neon"
#define VARIANT_NEEDS QKV_CPU_NEON
#endif

QKV_DECLARE_ENCODE(VARIANT(qkvi_encode));
QKV_DECLARE_DENSE(VARIANT(qkvi_multiply));
QKV_DECLARE_DENSE(VARIANT(qkvi_combine));
QKV_DECLARE_MULTIPLY_INTEGER(VARIANT(qkvi_multiply_integer));
QKV_DECLARE_SCORES_INTEGER(VARIANT(qkvi_scores_integer));
QKV_DECLARE_ACCUMULATE_INTEGER(VARIANT(qkvi_accumulate_integer));

#endif
