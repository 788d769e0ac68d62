// The codec table: one const row for each way to code a page.
//
// A codec turns 64 rows of K and V per head into a page and answers attention on it without decoding:
//
//   score_t  = scale * gain_t * (A^-T q) . c(code_t)         query(), once per attend; scores(), per page
//   out      = A^-1 sum_t (a_t * gain_t) c(code_t)           accumulate(), per page; output(), once per attend
//
// with A its (linear) transform. Everything is plain float and deterministic: the scalar reference kernels
// define the numbers. Ids are written into pages and never reused; 0 means "no codec" (exact rows).
//
// Threads: all functions are pure.
#ifndef QKV_ENGINE_CODEC_CODEC_H
#define QKV_ENGINE_CODEC_CODEC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/codec/page.h"

// Queries that one call of scores or accumulate takes at most: bounds every scratch.
#define QKV_QUERY_BLOCK 32

typedef struct qkv_codec {
  uint8_t id;
  const char *name;
  // Allowed code bits per coordinate.
  bool (*bits_valid)(double bits);
  // Bytes of a page of this shape.
  size_t (*page_bytes)(const qkv_page_shape *shape);
  // Codes `tokens` (1..64) rows: k is [tokens][kv_heads][key_dim], v is [tokens][kv_heads][value_dim], dense
  // and finite, |x| <= QKV_ROW_MAX. Fills the whole image (page_bytes(shape), 64-byte aligned) and seals it.
  // The missing slots of a short page are coded as zero rows.
  void (*encode)(const qkv_page_shape *shape, uint32_t layer, uint64_t position, uint32_t tokens, const float *k,
                 const float *v, void *image);
  // queries [n][key_dim] in place, from model space to code space.
  void (*query)(const qkv_page_shape *shape, uint32_t layer, uint16_t kv_head, float *queries, size_t n);
  // scores[n][64] = queries[n][key_dim] . k_t, n <= QKV_QUERY_BLOCK, `queries` in code space.
  void (*scores)(const void *page, uint16_t kv_head, const float *queries, size_t n, float *scores);
  // sums[n][value_dim] += weights[n][64] . v_t, in code space.
  void (*accumulate)(const void *page, uint16_t kv_head, const float *weights, size_t n, float *sums);
  // sums [n][value_dim] in place, from code space to model space.
  void (*output)(const qkv_page_shape *shape, uint32_t layer, uint16_t kv_head, float *sums, size_t n);
  // One head's rows [tokens][key_dim or value_dim] in token order, tokens = the header's.
  void (*decode)(const void *page, uint16_t kv_head, qkv_part part, float *rows);
  // How many of one head's rows [tokens][key_dim or value_dim] are, one after the other, what encode would write at
  // tokens first, first + 1, ... of the page: how a repeated append is told from a different one.
  uint32_t (*rows_match)(const void *page, uint16_t kv_head, qkv_part part, uint32_t first, uint32_t tokens,
                         const float *rows);
  // DATA_LOSS with the reason unless the image may be read.
  qkv_status (*validate)(const void *image, size_t bytes, qkv_error *error);
  // Largest relative squared error of a row, averaged over random rows: the bound the tests hold it to. For rows
  // whose RMS the gain byte can represent (page.h): below about 1.6e-5 the error grows, up to 1 for a zero row.
  double (*error_bound)(double bits);
} qkv_codec;

#define QKV_ROW_MAX 32768.0f
#define QKV_CODEC_EMBEDDED 1

// NULL if there is none.
const qkv_codec *qkv_codec_by_id(uint8_t id);
const qkv_codec *qkv_codec_by_name(const char *name);
// Rows of the table, for lists: NULL beyond the end.
const qkv_codec *qkv_codec_at(size_t row);

#endif
