#include "client/bench/recode.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { PAGE_ALIGN = 64 };

// One head's rows of a page go to where they belong among all heads' rows.
static void scatter(const float *rows, uint64_t tokens, size_t heads, size_t head, size_t dim, float *out) {
  for (uint64_t t = 0; t < tokens; t++) memcpy(out + (t * heads + head) * dim, rows + t * dim, dim * sizeof *out);
}

static void decode(const qkv_coder *coder, const void *page, uint64_t tokens, float *k_out, float *v_out) {
  float rows[QKV_PAGE_TOKENS * QKV_DIM_MAX];
  for (uint16_t head = 0; head < coder->kv_heads; head++) {
    coder->codec->decode(coder, page, head, QKV_K, false, rows);
    scatter(rows, tokens, coder->kv_heads, head, coder->key_dim, k_out);
    coder->codec->decode(coder, page, head, QKV_V, false, rows);
    scatter(rows, tokens, coder->kv_heads, head, coder->value_dim, v_out);
  }
}

static void compare(const float *exact, const float *coded, uint64_t rows, size_t dim, qkv_part part,
                    qkvi_recoded *sums) {
  for (uint64_t row = 0; row < rows; row++) {
    const float *x = exact + row * dim, *y = coded + row * dim;
    double error = 0, xx = 0, yy = 0, xy = 0;
    for (size_t i = 0; i < dim; i++) {
      const double miss = (double)x[i] - (double)y[i];
      error += miss * miss;
      xx += (double)x[i] * (double)x[i];
      yy += (double)y[i] * (double)y[i];
      xy += (double)x[i] * (double)y[i];
    }
    sums->error[part] += error;
    sums->square[part] += xx;
    if (xx == 0) continue;
    sums->rows[part]++;
    if (yy > 0) sums->cosine[part] += xy / sqrt(xx * yy);
  }
}

static void round_rows(qkv_dtype dtype, const float *rows, size_t count, float *out) {
  const size_t bytes = count * qkv_dtype_size(dtype);
  void *narrow = malloc(bytes);
  if (narrow == NULL) abort();
  qkv_from_float(dtype, rows, narrow, count);
  qkv_to_float(dtype, narrow, out, count);
  free(narrow);
}

// Rows of the codec exact: no pages.
static void keep(const qkv_coder *coder, qkv_dtype dtype, uint64_t tokens, const float *k, const float *v,
                 float *k_out, float *v_out, qkvi_recoded *sums) {
  const size_t k_count = tokens * coder->kv_heads * coder->key_dim;
  const size_t v_count = tokens * coder->kv_heads * coder->value_dim;
  round_rows(dtype, k, k_count, k_out);
  round_rows(dtype, v, v_count, v_out);
  sums->bytes += (k_count + v_count) * qkv_dtype_size(dtype);
}

// What the coding of one page needs.
typedef struct recode_scratch {
  void *page;
  float *k, *v;  // rounded rows
} recode_scratch;

static void *memory(size_t bytes) {
  void *block = aligned_alloc(PAGE_ALIGN, (bytes + PAGE_ALIGN - 1) / PAGE_ALIGN * PAGE_ALIGN);
  if (block == NULL) abort();
  return block;
}

static void code(const qkv_coder *coder, qkv_dtype dtype, uint64_t position, uint64_t tokens, const float *k,
                 const float *v, float *k_out, float *v_out, qkvi_recoded *sums) {
  const size_t k_row = (size_t)coder->kv_heads * coder->key_dim, v_row = (size_t)coder->kv_heads * coder->value_dim;
  const size_t capacity = coder->codec->page_bytes_max(coder);
  const recode_scratch scratch = {.page = memory(capacity),
                                  .k = memory(QKV_PAGE_TOKENS * k_row * sizeof *k),
                                  .v = memory(QKV_PAGE_TOKENS * v_row * sizeof *v)};
  for (uint64_t at = 0; at < tokens; at += QKV_PAGE_TOKENS) {
    const uint64_t left = tokens - at, n = left < QKV_PAGE_TOKENS ? left : QKV_PAGE_TOKENS;
    round_rows(dtype, k + at * k_row, n * k_row, scratch.k);
    round_rows(dtype, v + at * v_row, n * v_row, scratch.v);
    const size_t bytes =
        coder->codec->encode(coder, position + at, (uint32_t)n, QKV_FP32, scratch.k, scratch.v, NULL, scratch.page);
    assert(bytes <= capacity);
    sums->bytes += bytes;
    decode(coder, scratch.page, n, k_out + at * k_row, v_out + at * v_row);
  }
  free(scratch.page);
  free(scratch.k);
  free(scratch.v);
}

void qkvi_recode(const qkv_coder *coder, qkv_dtype dtype, uint64_t position, uint64_t tokens, const float *k,
                 const float *v, float *k_out, float *v_out, qkvi_recoded *sums) {
  if (qkv_codec_is_exact(coder->codec)) {
    keep(coder, dtype, tokens, k, v, k_out, v_out, sums);
  } else {
    code(coder, dtype, position, tokens, k, v, k_out, v_out, sums);
  }
  qkvi_recoded_compare(coder->kv_heads, coder->key_dim, coder->value_dim, tokens, k, v, k_out, v_out, sums);
}

void qkvi_recoded_compare(uint32_t kv_heads, size_t key_dim, size_t value_dim, uint64_t tokens, const float *k,
                          const float *v, const float *k_out, const float *v_out, qkvi_recoded *sums) {
  sums->coordinates += tokens * kv_heads * (key_dim + value_dim);
  compare(k, k_out, tokens * kv_heads, key_dim, QKV_K, sums);
  compare(v, v_out, tokens * kv_heads, value_dim, QKV_V, sums);
}

double qkvi_recoded_error(const qkvi_recoded *sums, qkv_part part) {
  return sums->square[part] > 0 ? sums->error[part] / sums->square[part] : 0;
}

double qkvi_recoded_cosine(const qkvi_recoded *sums, qkv_part part) {
  return sums->rows[part] > 0 ? sums->cosine[part] / (double)sums->rows[part] : 0;
}
