// Rows through a coder and back: what the pages of a session make of them, how many bytes the pages are, and how far
// the rows that come out are from those that went in.
#ifndef QKV_CLIENT_BENCH_RECODE_H
#define QKV_CLIENT_BENCH_RECODE_H

#include <stdint.h>

#include "engine/base/tensor.h"
#include "engine/codec/codec.h"

// Sums over the rows of one layer; index: qkv_part.
typedef struct qkvi_recoded {
  uint64_t bytes;        // of the whole page images
  uint64_t coordinates;  // of keys and values
  double error[2];       // squared
  double square[2];      // of the exact rows
  double cosine[2];      // between a row and what came out
  uint64_t rows[2];      // that are not zero
} qkvi_recoded;

// Codes `tokens` rows from `position` on as pages of 64 (the last one may be short) and decodes them again; keys as
// attended, both ways. k [tokens][kv_heads][key_dim] and v [tokens][kv_heads][value_dim], dense; `k_out` and `v_out`
// are alike and get the rows that a reader of the pages has. Rows are rounded to `dtype` before they are coded, as a
// session does whose model has it; they are compared unrounded. With the codec exact that is all. Adds to *sums.
void qkvi_recode(const qkv_coder *coder, qkv_dtype dtype, uint64_t position, uint64_t tokens, const float *k,
                 const float *v, float *k_out, float *v_out, qkvi_recoded *sums);

// Adds what `tokens` rows that were coded are from those that went in, and their number; not bytes.
void qkvi_recoded_compare(uint32_t kv_heads, size_t key_dim, size_t value_dim, uint64_t tokens, const float *k,
                          const float *v, const float *k_out, const float *v_out, qkvi_recoded *sums);

// Relative squared error of one part, and the mean cosine.
double qkvi_recoded_error(const qkvi_recoded *sums, qkv_part part);
double qkvi_recoded_cosine(const qkvi_recoded *sums, qkv_part part);

#endif
