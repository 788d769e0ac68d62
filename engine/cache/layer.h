// One layer of one session: the tokens' rows, coded pages first, then the exact tail.
//
//   position   first          sealed                        length
//              | page | page | page |  exact rows ...........|
//                                   |<- recent window + open page ->|
//
// Rows are appended to the tail in the model's dtype. A page is sealed (coded, made immutable) once its 64
// tokens are complete and all of them lie below `length - recent_window`. Truncation into a sealed page keeps
// the page and lowers the count of its tokens that are valid; later rows start a new page, so pages begin
// anywhere and hold 1 to 64 tokens.
//
// Memory is the arena's: every byte is reserved before anything changes, so an append that does not fit
// changes nothing.
//
// Threads: not safe; session.h holds the lock. Readers (attend, rows) may run together.
#ifndef QKV_ENGINE_CACHE_LAYER_H
#define QKV_ENGINE_CACHE_LAYER_H

#include <stdint.h>

#include "engine/base/arena.h"
#include "engine/base/tensor.h"
#include "engine/cache/model.h"

// Positions end here: RoPE computes in double, which counts exactly no further.
#define QKV_POSITION_MAX ((uint64_t)1 << 53)

// Fixed for a layer's life; the pointers are borrowed.
typedef struct qkv_layer_config {
  const qkv_model *model;
  qkv_policy policy;  // merged
  uint32_t layer;
  uint64_t first_position;
  qkv_arena *arena;
} qkv_layer_config;

typedef struct qkv_page_entry {
  const void *page;   // image, owned
  uint32_t bytes;     // of the image
  uint32_t tokens;    // valid ones
  uint64_t position;  // of its first token
} qkv_page_entry;

// 64 tokens' exact rows: K [64][kv_heads][key_dim], then V [64][kv_heads][value_dim], in the model's dtype.
typedef struct qkv_layer {
  qkv_layer_config config;
  uint64_t sealed;  // positions below are in pages
  uint64_t length;  // the next position
  qkv_page_entry *pages;
  size_t page_count, page_capacity;
  uint64_t bytes_coded;  // of the pages, as the arena counts them
  void **tail;           // exact blocks of 64 tokens from `sealed` on
  size_t tail_count, tail_capacity;
} qkv_layer;

void qkv_layer_init(qkv_layer *layer, const qkv_layer_config *config);
void qkv_layer_deinit(qkv_layer *layer);  // frees everything

// Appends k [tokens, kv_heads, key_dim] and v [tokens, kv_heads, value_dim] at `position`; both have passed
// qkv_tensor_check. Rows that are held already must match (qkv_codec.rows_match for sealed ones). Rows before
// RoPE are rotated to their positions. `*appended` gets the tokens that are new.
// Errors, all without any change: INVALID_ARGUMENT (shape; "k[3, 0, 17] is nan"; |x| > QKV_ROW_MAX, after
// RoPE too; QKV_POSITION_MAX),
// ALREADY_EXISTS (differs from what is held, names the position), FAILED_PRECONDITION ("position is 70, the
// expected position is 64"), RESOURCE_EXHAUSTED (the arena's).
qkv_status qkv_layer_append(qkv_layer *layer, uint64_t position, const qkv_tensor *k, const qkv_tensor *v,
                            bool before_rope, uint64_t *appended, qkv_error *error);

// Drops positions >= `position`; does nothing beyond the length.
void qkv_layer_truncate(qkv_layer *layer, uint64_t position);

// Decoded rows of one part: out [tokens][kv_heads][dim] floats for positions [begin, begin + tokens), which
// must be held (asserted). A page is decoded whole, however few of its tokens are asked.
void qkv_layer_rows(const qkv_layer *layer, qkv_part part, uint64_t begin, uint64_t tokens, bool before_rope,
                    float *out);

// For readers: how pages are coded; the first page that ends beyond `position` (page_count: none); and one
// head's exact row, in the model's dtype, at a position that is in the tail (asserted).
qkv_page_shape qkv_layer_shape(const qkv_layer *layer);
size_t qkv_layer_page_at(const qkv_layer *layer, uint64_t position);
const void *qkv_layer_exact_row(const qkv_layer *layer, qkv_part part, uint64_t position, uint32_t kv_head);

typedef struct qkv_layer_usage {
  uint64_t tokens_coded, tokens_exact;
  uint64_t bytes_coded, bytes_exact;  // as the arena counts them
} qkv_layer_usage;

qkv_layer_usage qkv_layer_read_usage(const qkv_layer *layer);

// NULL, or the invariant that does not hold.
const char *qkv_layer_validate(const qkv_layer *layer);

#endif
