// TWIN(name): the kernel variant that a file is compiled for. `qkvi_encode` is qkvi_encode_avx2, qkvi_encode_avx512
// or qkvi_encode_avx512_vnni.
#ifndef QKV_ENGINE_KERNEL_X86_TWINS_H
#define QKV_ENGINE_KERNEL_X86_TWINS_H

#include "engine/base/cpu.h"
#include "engine/kernel/kernel.h"

#if defined(__AVX512VNNI__)
#define TWIN(name) name##_avx512_vnni
#define TWIN_NAME "avx512-vnni"
#define TWIN_NEEDS (QKV_CPU_AVX2 | QKV_CPU_FMA | QKV_CPU_AVX512 | QKV_CPU_VNNI | QKV_CPU_VBMI)
#elif defined(__AVX512F__)
#define TWIN(name) name##_avx512
#define TWIN_NAME "avx512"
#define TWIN_NEEDS (QKV_CPU_AVX2 | QKV_CPU_FMA | QKV_CPU_AVX512)
#else
#define TWIN(name) name##_avx2
#define TWIN_NAME "avx2"
#define TWIN_NEEDS (QKV_CPU_AVX2 | QKV_CPU_FMA | QKV_CPU_F16C)
#endif

QKV_DECLARE_ENCODE(TWIN(qkvi_encode));
QKV_DECLARE_ENCODE_ROWS(TWIN(qkvi_encode_rows));
QKV_DECLARE_LOAD_ROWS(TWIN(qkvi_load_rows));
QKV_DECLARE_HADAMARD(TWIN(qkvi_hadamard_forward));
QKV_DECLARE_HADAMARD(TWIN(qkvi_hadamard_inverse));
QKV_DECLARE_DENSE(TWIN(qkvi_multiply));
QKV_DECLARE_DENSE(TWIN(qkvi_combine));
QKV_DECLARE_MULTIPLY_INTEGER(TWIN(qkvi_multiply_integer));
QKV_DECLARE_ADD_WAVES(TWIN(qkvi_add_waves));
QKV_DECLARE_SCORE_COLUMNS(TWIN(qkvi_score_columns));
QKV_DECLARE_ADD_PRODUCTS(TWIN(qkvi_add_products));
QKV_DECLARE_SUM_LEVELS(TWIN(qkvi_sum_levels));
QKV_DECLARE_ADD_ANCHORS(TWIN(qkvi_add_anchors));
QKV_DECLARE_PREPARE(TWIN(qkvi_prepare));
QKV_DECLARE_SCORES_INTEGER(TWIN(qkvi_scores_integer));
QKV_DECLARE_PEAKS(TWIN(qkvi_peaks));
QKV_DECLARE_WEIGH_INTEGER(TWIN(qkvi_weigh_integer));
QKV_DECLARE_ACCUMULATE_INTEGER(TWIN(qkvi_accumulate_integer));
QKV_DECLARE_SCORE_OUTLIERS(TWIN(qkvi_score_outliers));
QKV_DECLARE_WEIGH_OUTLIERS(TWIN(qkvi_weigh_outliers));
QKV_DECLARE_MIX(TWIN(qkvi_mix));
QKV_DECLARE_SCALE_FACTORS(TWIN(qkvi_scale_factors));
QKV_DECLARE_SUM_ENTRIES(TWIN(qkvi_sum_entries));

#endif
