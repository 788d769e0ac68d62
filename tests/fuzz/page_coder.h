// The coders of the page target and of its seeds.
#ifndef QKV_TESTS_FUZZ_PAGE_CODER_H
#define QKV_TESTS_FUZZ_PAGE_CODER_H

#include "tests/engine/codec/coder.h"

#define FUZZ_PAGE_CODERS 7

// Whose encoder keeps the first rows and long ones as outliers.
static inline const qkv_coder *fuzz_outlier_coder(qkv_coder *coder) {
  coder_keep_outliers(coder, 1, 3);
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
    default:
      return coders[index] =
                 fuzz_outlier_coder(coder_create_dense(&random, 2, 16, 16, 2.5, 2, QKV_FRAME_ARCHIVE, &rope));
  }
}

#endif
