// The codec table: one const row for each way to code a page; and the coder: what the pages of one layer are coded
// by.
//
// A codec turns up to 64 rows of K and V per head into a page and answers attention on it without decoding:
//
//   score_t  = q . x_t            query(), once per attend and coder; scores(), per page
//   out      = sum_t a_t x_t      accumulate(), per page; output(), once per attend and coder
//
// Everything is plain float and deterministic: the scalar reference kernels define the numbers. Codec ids are written
// into pages and never reused; 0 is that of exact rows, which are in no page.
//
// Threads: all functions are pure.
#ifndef QKV_ENGINE_CODEC_CODEC_H
#define QKV_ENGINE_CODEC_CODEC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/pool.h"
#include "engine/base/tensor.h"
#include "engine/codec/anchor.h"
#include "engine/codec/low_rank.h"
#include "engine/codec/page.h"
#include "engine/codec/phases.h"
#include "engine/codec/precision.h"
#include "engine/codec/rebuild.h"
#include "engine/codec/transform.h"
#include "engine/codec/walk.h"
#include "engine/kernel/integer.h"

// Pages that one call of weigh takes at most.
#define QKV_PAGES_TOGETHER 8

typedef struct qkv_codec qkv_codec;
typedef struct qkv_head_tiers qkv_head_tiers;  // narrow.h

typedef struct qkv_head_coder {
  const qkv_transform *transforms[2];  // by qkv_part
  const qkv_schedule *schedules[2];    // theirs
  uint8_t tiers[2];                    // what rows are coded with
  float query_limit;                   // that integers need (precision.h); 0: the most
  uint8_t weight_bytes;                // the same; 0: two
  const qkv_rebuild *rebuild;          // archive frame; NULL: keys become rows before they are attended
  // A row whose squared error, as encoding weighs it, is above limit * its squared length is kept as an outlier
  // (outliers.h), and so is one that errs far more than the page's other rows. 0: none is.
  float outlier_limits[2];
  float error_scales[2];       // weighted squared error that counts as much as 1 of a row as attended
  const float *outlier_steps;  // [value_dim], of values; NULL: all 1
  const float *heavy;          // [key_dim], what keys of heavy hitters are told by (heavy.h); NULL: none is
  float heavy_least;           // score that they are above
} qkv_head_coder;

// How the pages of one layer are coded under one calibration. Immutable; whoever holds pages keeps their coder alive
// (engine/cache/coding.h).
typedef struct qkv_coder {
  const qkv_codec *codec;
  uint32_t layer;
  uint16_t kv_heads;
  uint16_t key_dim, value_dim;
  uint8_t tier_k, tier_v;         // the budget; heads may have more or less
  qkv_frame frame;                // of the keys
  uint32_t calibration;           // version; 0: data-free
  uint32_t sinks;                 // rows at positions below are kept as outliers, whatever their error
  const qkv_phases *phases;       // of models with RoPE
  qkv_low_rank_options low_rank;  // of keys and values
  qkv_anchor_options anchors[2];  // by qkv_part
  const qkv_head_coder *heads;    // [kv_heads]
} qkv_coder;

// The data-free transform of a row width.
const qkv_transform *qkv_transform_uniform(uint16_t dim);

// Up to QKV_QUERY_BLOCK queries of one KV head, ready for the pages of one coder.
typedef struct qkv_query_block {
  qkv_integer_room room;
  qkv_integer_queries integers;  // of `codes`, in `room`
  size_t count;
  qkv_layouts layouts;  // cleared by the caller before the first page
  // Brought into the cache while the i-th page of a call is worked on: codes of a page to be attended soon. query()
  // sets NULL: none.
  struct {
    const void *page;
    qkv_part part;
  } ahead[QKV_PAGES_TOGETHER];
  qkv_phases_walk walk;  // frames that are turned back by the page
  qkv_precision precision;
  // The most of a query's numbers and the bytes of weights where arithmetic is in integers (kernel/integer.h); 0: in
  // floats.
  float query_limit;
  unsigned weight_bytes;
  float shares[QKV_QUERY_BLOCK];                             // what every score gets
  _Alignas(64) float rows[QKV_QUERY_BLOCK * QKV_DIM_MAX];    // [count][key_dim], as attended, times the scale
  _Alignas(64) float codes[QKV_QUERY_BLOCK * QKV_DIM_MAX];   // [count][key_dim], in code space
  _Alignas(64) float turned[QKV_QUERY_BLOCK * QKV_DIM_MAX];  // attend frame: turned back by the page's centre
  qkv_walk blocks;  // attend frame, where keys are turned back to blocks of pages
} qkv_query_block;

struct qkv_codec {
  uint8_t id;
  const char *name;
  // Allowed code bits per coordinate.
  bool (*bits_valid)(double bits);
  // Most bytes that a page takes.
  size_t (*page_bytes_max)(const qkv_coder *coder);
  // Codes `tokens` (1..64) rows from `position` on: k is [tokens][kv_heads][key_dim], as attended (after RoPE), v is
  // [tokens][kv_heads][value_dim], of type `dtype`, dense and finite, |x| <= QKV_ROW_MAX. Fills the whole image
  // (64-byte aligned, with room for page_bytes_max) and seals it. The missing slots of a short page are coded as zero
  // rows. Idle threads of `pool` (NULL: none) take heads off the caller. Returns the bytes of the image.
  size_t (*encode)(const qkv_coder *coder, uint64_t position, uint32_t tokens, qkv_dtype dtype, const void *k,
                   const void *v, qkv_pool *pool, void *image);
  // Fills the rest of a block whose `count`, `rows` and `precision` are set and whose `layouts` are cleared.
  void (*query)(const qkv_coder *coder, uint16_t kv_head, qkv_query_block *queries);
  // scores[count][64] = q . k_t. `queries` keeps notes from page to page; pages in order of position are fastest.
  void (*scores)(const qkv_coder *coder, const void *page, uint16_t kv_head, qkv_query_block *queries, float *scores);
  // sums[n][value_dim] += weights[n][64] . v_t, in code space.
  void (*accumulate)(const qkv_coder *coder, const void *page, uint16_t kv_head, const float *weights, size_t n,
                     float *sums);
  // The same of up to QKV_PAGES_TOGETHER pages, one after the other, from scores [pages][count][64] and their peaks
  // [pages][count], in integers where `queries` say so: weights are exp(score - peak), totals [pages][count] get
  // their sums. Returns how many pages are done: those before the first whose values are not taken in integers.
  size_t (*weigh)(const qkv_coder *coder, const void *const *pages, size_t page_count, uint16_t kv_head,
                  qkv_query_block *queries, const float *scores, const float *peaks, float *totals, float *sums);
  // sums [n][value_dim] in place, from code space to model space; totals[n], the sums of all weights.
  void (*output)(const qkv_coder *coder, uint16_t kv_head, float *sums, const double *totals, size_t n);
  // One head's rows [tokens][key_dim or value_dim] in token order, tokens = the header's; keys as attended, or as
  // they are before RoPE.
  void (*decode)(const qkv_coder *coder, const void *page, uint16_t kv_head, qkv_part part, bool before_rope,
                 float *rows);
  // How many of one head's rows [tokens][key_dim or value_dim] are, one after the other, what encode would write at
  // tokens first, first + 1, ... of the page: how a repeated append is told from a different one.
  uint32_t (*rows_match)(const qkv_coder *coder, const void *page, uint16_t kv_head, qkv_part part, uint32_t first,
                         uint32_t tokens, const float *rows);
  // Fills `image` (64-byte aligned, with room for as much as the page has) with the page at the lower of its tiers
  // and the wanted ones, heads [kv_heads], as far as it can be cut (narrow.h), and seals it. Returns the bytes of the
  // image.
  size_t (*narrow)(const qkv_coder *coder, const void *page, const qkv_head_tiers *heads, void *image);
  // DATA_LOSS with the reason unless the image may be read as one of the coder's.
  qkv_status (*validate)(const qkv_coder *coder, const void *image, size_t bytes, qkv_error *error);
  // Largest relative squared error of a row in the data-free code, averaged over random rows: the bound the tests
  // hold it to. For rows whose RMS the gain byte can represent (page.h): below about 1.6e-5 the error grows, up to 1
  // for a zero row.
  double (*error_bound)(double bits);
};

// Whether rows stay as they are: the codec "exact", id 0, which has no other function than bits_valid.
static inline bool qkv_codec_is_exact(const qkv_codec *codec) {
  return codec->id == 0;
}

#define QKV_ROW_MAX 32768.0f
#define QKV_CODEC_EMBEDDED 1

// NULL if there is none.
const qkv_codec *qkv_codec_by_id(uint8_t id);
const qkv_codec *qkv_codec_by_name(const char *name);
// Rows of the table, for lists: NULL beyond the end.
const qkv_codec *qkv_codec_at(size_t row);

#endif
