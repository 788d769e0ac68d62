// The coders of the page target and of its seeds.
#ifndef QKV_TESTS_FUZZ_PAGE_CODER_H
#define QKV_TESTS_FUZZ_PAGE_CODER_H

#include "tests/engine/codec/coder.h"

#define FUZZ_PAGE_CODERS 23

// Whose encoder keeps the first rows and long ones as outliers.
static inline const qkv_coder *fuzz_outlier_coder(qkv_coder *coder) {
  coder_keep_outliers(coder, 1, 3);
  return coder;
}

// Of a codec of parts, with another one for values.
static inline const qkv_coder *fuzz_parts_coder(const char *k, const char *v, double bits_k, double bits_v) {
  const qkv_rope rope = {.theta = 10000, .width = 16};
  const qkv_policy policy = {
      .codec = qkv_codec_by_name(k), .codec_v = qkv_codec_by_name(v), .bits_k = bits_k, .bits_v = bits_v};
  const qkv_coder_spec spec = {.layers = 1,
                               .kv_heads = 2,
                               .q_heads = 2,
                               .key_dim = 16,
                               .value_dim = 24,
                               .rope = &rope,
                               .policies = &policy,
                               .purpose = QKV_PURPOSE_ATTEND};
  const qkv_coder *coder = NULL;
  uint64_t bytes = 0;
  static void *made[16];  // that no leak is found
  for (size_t i = 0; i < sizeof made / sizeof *made; i++) {
    if (made[i] != NULL) continue;
    made[i] = policy.codec->create(&spec, &coder, &bytes);
    break;
  }
  return coder;
}

// A coder of its own for every index, made once.
static inline const qkv_coder *fuzz_page_coder(size_t index) {
  static const qkv_coder *coders[FUZZ_PAGE_CODERS];
  const qkv_rope rope = {.theta = 10000, .width = 16};
  naive_random random = {index};
  if (coders[index] != NULL) return coders[index];
  switch (index) {
    case 0:
      return coders[index] = coder_create(1, 16, 8, 2, 3, QKV_FRAME_PLAIN, NULL);
    case 1:
      return coders[index] = coder_create(2, 8, 8, 4.125, 0.5, QKV_FRAME_PLAIN, NULL);
    case 2:
      return coders[index] = coder_create(1, 24, 40, 8, 8, QKV_FRAME_ARCHIVE, &rope);
    case 3:
      return coders[index] = coder_create_dense(&random, 3, 16, 16, 2.5, 2, QKV_FRAME_ARCHIVE, &rope);
    case 4:
      return coders[index] = coder_create_dense(&random, 2, 24, 16, 3, 1.625, QKV_FRAME_ATTEND, &rope);
    case 5:
      return coders[index] = fuzz_outlier_coder(coder_create(2, 16, 8, 2, 2, QKV_FRAME_PLAIN, NULL));
    case 7:
      return coders[index] = fuzz_parts_coder("kivi", "turboquant", 4, 3);
    case 8:
      return coders[index] = fuzz_parts_coder("turboquant", "kivi", 5, 2);
    case 9:
      return coders[index] = fuzz_parts_coder("polarquant", "running-u8", 2, 8);
    case 10:
      return coders[index] = fuzz_parts_coder("running-u8", "polarquant", 8, 3);
    case 11:
      return coders[index] = fuzz_parts_coder("turboquant-ip", "turboquant-ip", 3, 2);
    case 12:
      return coders[index] = fuzz_parts_coder("pq", "pq", 4, 1);
    case 13:
      return coders[index] = fuzz_parts_coder("int8", "kivi", 8, 3);
    case 14:
      return coders[index] = fuzz_parts_coder("commvq", "commvq", 2, 1);
    case 15:
      return coders[index] = fuzz_parts_coder("turboquant-ip-outliers", "turboquant-outliers", 3, 2);
    case 16:
      return coders[index] = fuzz_parts_coder("turboquant-low-rank", "kivi-low-rank", 2, 3);
    case 17:
      return coders[index] = fuzz_parts_coder("turboquant-delta", "int8-delta", 2, 8);
    case 18:
      return coders[index] = fuzz_parts_coder("polarquant-low-rank", "int8-low-rank", 3, 8);
    case 19:
      return coders[index] = fuzz_parts_coder("kivi-delta", "polarquant-delta", 2, 3);
    case 20:
      return coders[index] = fuzz_parts_coder("turboquant-outliers-delta", "running-u8-low-rank", 3, 8);
    case 21:
      return coders[index] = fuzz_parts_coder("ecsq", "ecsq", 2.5, 2);
    case 22:
      return coders[index] = fuzz_parts_coder("ecsq", "kivi", 3, 2);
    default:
      return coders[index] =
                 fuzz_outlier_coder(coder_create_dense(&random, 2, 16, 16, 2.5, 2, QKV_FRAME_ARCHIVE, &rope));
  }
}

#endif
