// VARIANT(name): the kernel variant that a file is compiled for. `qkvi_encode` is qkvi_encode_avx2,
// qkvi_encode_avx512 or qkvi_encode_avx512_vnni.
#ifndef QKV_ENGINE_KERNEL_X86_VARIANTS_H
#define QKV_ENGINE_KERNEL_X86_VARIANTS_H

#include "engine/base/cpu.h"
#include "engine/kernel/kernel.h"

#if defined(__AVX512VNNI__)
#define VARIANT(name) name##_avx512_vnni
#define VARIANT_NAME "avx512-vnni"
#define VARIANT_NEEDS (QKV_CPU_AVX2 | QKV_CPU_FMA | QKV_CPU_AVX512 | QKV_CPU_VNNI | QKV_CPU_VBMI)
#elif defined(__AVX512F__)
#define VARIANT(name) name##_avx512
#define VARIANT_NAME "avx512"
#define VARIANT_NEEDS (QKV_CPU_AVX2 | QKV_CPU_FMA | QKV_CPU_AVX512)
#else
#define VARIANT(name) name##_avx2
#define VARIANT_NAME "avx2"
#define VARIANT_NEEDS (QKV_CPU_AVX2 | QKV_CPU_FMA | QKV_CPU_F16C)
#endif

QKV_DECLARE_ENCODE(VARIANT(qkvi_encode));
QKV_DECLARE_ENCODE_ROWS(VARIANT(qkvi_encode_rows));
QKV_DECLARE_LOAD_ROWS(VARIANT(qkvi_load_rows));
QKV_DECLARE_HADAMARD(VARIANT(qkvi_hadamard_forward));
QKV_DECLARE_HADAMARD(VARIANT(qkvi_hadamard_inverse));
QKV_DECLARE_DENSE(VARIANT(qkvi_multiply));
QKV_DECLARE_DENSE(VARIANT(qkvi_combine));
QKV_DECLARE_MULTIPLY_INTEGER(VARIANT(qkvi_multiply_integer));
QKV_DECLARE_ADD_WAVES(VARIANT(qkvi_add_waves));
QKV_DECLARE_SCORE_COLUMNS(VARIANT(qkvi_score_columns));
QKV_DECLARE_TURN_ROWS(VARIANT(qkvi_turn_rows));
QKV_DECLARE_FRAME_ROWS(VARIANT(qkvi_frame_rows));
QKV_DECLARE_ADD_PRODUCTS(VARIANT(qkvi_add_products));
QKV_DECLARE_SUM_LEVELS(VARIANT(qkvi_sum_levels));
QKV_DECLARE_ADD_ANCHORS(VARIANT(qkvi_add_anchors));
QKV_DECLARE_PREPARE(VARIANT(qkvi_prepare));
QKV_DECLARE_SCORES_INTEGER(VARIANT(qkvi_scores_integer));
QKV_DECLARE_PEAKS(VARIANT(qkvi_peaks));
QKV_DECLARE_WEIGH_INTEGER(VARIANT(qkvi_weigh_integer));
QKV_DECLARE_ACCUMULATE_INTEGER(VARIANT(qkvi_accumulate_integer));
QKV_DECLARE_SCORE_OUTLIERS(VARIANT(qkvi_score_outliers));
QKV_DECLARE_WEIGH_OUTLIERS(VARIANT(qkvi_weigh_outliers));
QKV_DECLARE_MIX(VARIANT(qkvi_mix));
QKV_DECLARE_MIX(VARIANT(qkvi_mix_integer));
QKV_DECLARE_SCALE_FACTORS(VARIANT(qkvi_scale_factors));
QKV_DECLARE_SUM_ENTRIES(VARIANT(qkvi_sum_entries));
QKV_DECLARE_NEAREST_POINTS(VARIANT(qkvi_nearest_points));
QKV_DECLARE_SUM_LOOK_UPS(VARIANT(qkvi_sum_look_ups));
QKV_DECLARE_WEIGH_POINTS(VARIANT(qkvi_weigh_points));

#endif
