// A page of a codec of parts, and what is in it.
#ifndef QKV_TESTS_ENGINE_CODEC_CODED_PAGE_H
#define QKV_TESTS_ENGINE_CODEC_CODED_PAGE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
// cmocka wants the above first
#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "engine/codec/codec.h"
#include "tests/engine/codec/naive.h"

enum { HEADS = 2 };

// A codec's page of one layer, and what is in it.
typedef struct coded {
  const qkv_coder *coder;
  void *made;
  qkv_policy policy;
  uint32_t tokens;
  float *k, *v;  // [tokens][HEADS][dim]
  uint8_t *image;
  size_t bytes;
} coded;

typedef struct way {
  const char *k, *v;  // v NULL: the same
  double bits_k, bits_v;
  uint32_t parameter;  // the first of both; 0: the default
} way;

static inline void *allocate(size_t bytes) {
  void *made = aligned_alloc(64, (bytes + 127) / 64 * 64);
  assert_non_null(made);
  return made;
}

static inline void setup_with(coded *page, const way *as, const uint32_t parameters[QKV_PARAMETERS_MAX],
                              uint16_t key_dim, uint16_t value_dim, const qkv_rope *rope) {
  const qkv_rope none = {0};
  *page = (coded){.policy = QKV_POLICY_UNSET};
  page->policy.codec = qkv_codec_by_name(as->k);
  page->policy.codec_v = as->v == NULL ? NULL : qkv_codec_by_name(as->v);
  page->policy.bits_k = as->bits_k;
  page->policy.bits_v = as->bits_v;
  for (qkv_part part = QKV_K; part <= QKV_V; part++)
    memcpy(page->policy.parameters[part], parameters, sizeof page->policy.parameters[part]);
  const qkv_coder_spec spec = {.layers = 1,
                               .kv_heads = HEADS,
                               .q_heads = HEADS,
                               .key_dim = key_dim,
                               .value_dim = value_dim,
                               .rope = rope == NULL ? &none : rope,
                               .policies = &page->policy,
                               .purpose = QKV_PURPOSE_ATTEND};
  uint64_t bytes = 0;
  page->made = page->policy.codec->create(&spec, &page->coder, &bytes);
  assert_true(bytes > 0);
}

static inline void setup(coded *page, const way *as, uint16_t key_dim, uint16_t value_dim, const qkv_rope *rope) {
  setup_with(page, as, (uint32_t[QKV_PARAMETERS_MAX]){as->parameter}, key_dim, value_dim, rope);
}

typedef void fill_fn(naive_random *random, float *row, size_t dim);

static inline void gaussian(naive_random *random, float *row, size_t dim) {
  for (size_t c = 0; c < dim; c++) row[c] = (float)naive_gaussian(random);
}

// Whole numbers, from which every machine makes the same bytes.
static inline void whole(naive_random *random, float *row, size_t dim) {
  for (size_t c = 0; c < dim; c++) row[c] = (float)naive_below(random, 2001) - 1000;
}

// A channel in eight is far from 0 and large, as those of keys are.
static inline void outlier_channels(naive_random *random, float *row, size_t dim) {
  gaussian(random, row, dim);
  for (size_t c = 0; c < dim; c += 8) row[c] = 20 + 10 * row[c];
}

static inline void encode(coded *page, naive_random *random, uint32_t tokens, fill_fn *fill) {
  const size_t kd = page->coder->key_dim, vd = page->coder->value_dim;
  page->tokens = tokens;
  page->k = allocate(tokens * HEADS * kd * sizeof *page->k);
  page->v = allocate(tokens * HEADS * vd * sizeof *page->v);
  for (size_t i = 0; i < (size_t)tokens * HEADS; i++) {
    fill(random, page->k + i * kd, kd);
    fill(random, page->v + i * vd, vd);
  }
  page->image = allocate(page->coder->codec->page_bytes_max(page->coder));
  page->bytes = page->coder->codec->encode(page->coder, 640, tokens, QKV_FP32, page->k, page->v, NULL, page->image);
}

static inline void release(coded *page) {
  free(page->k);
  free(page->v);
  free(page->image);
  page->policy.codec->destroy(page->made);
}

static inline size_t dim_of(const coded *page, qkv_part part) {
  return part == QKV_K ? page->coder->key_dim : page->coder->value_dim;
}

static inline const float *row_of(const coded *page, qkv_part part, size_t t, size_t head) {
  return (part == QKV_K ? page->k : page->v) + (t * HEADS + head) * dim_of(page, part);
}

// Squared error relative to squares, of all heads.
static inline double error_of(const coded *page, qkv_part part) {
  const size_t dim = dim_of(page, part);
  float *rows = allocate(QKV_PAGE_TOKENS * dim * sizeof *rows);
  double error = 0, square = 0;
  for (uint16_t h = 0; h < HEADS; h++) {
    page->coder->codec->decode(page->coder, page->image, h, part, false, rows);
    for (size_t t = 0; t < page->tokens; t++) {
      const float *exact = row_of(page, part, t, h);
      for (size_t c = 0; c < dim; c++) {
        const double off = (double)exact[c] - (double)rows[t * dim + c];
        error += off * off;
        square += (double)exact[c] * (double)exact[c];
      }
    }
  }
  free(rows);
  return error / square;
}

#endif
