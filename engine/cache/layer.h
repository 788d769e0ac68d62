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
// Pages are coded by the layer's coder. It can change at any time; pages that are there keep theirs. Pages come in
// *ranges* of up to QKV_RANGE_PAGES, each of one coder: what attention is split by.
//
// Memory is the arena's: every byte is reserved before anything changes, so an append that does not fit
// changes nothing.
//
// Where attention is counted (ema.h), every page has its averages beside it. A page's image may be exchanged for one
// at other tiers (retier.h); with keep_full the one that was coded first stays, and with it the way back. With a
// backing, pages are put there when they are sealed, and their images may leave memory (layer_spill.h).
//
// Threads: not safe; session.h holds the lock. Readers (attend, rows) may run together.
#ifndef QKV_ENGINE_CACHE_LAYER_H
#define QKV_ENGINE_CACHE_LAYER_H

#include <stdatomic.h>
#include <stdint.h>

#include "engine/base/arena.h"
#include "engine/base/tensor.h"
#include "engine/cache/backing.h"
#include "engine/cache/ema.h"
#include "engine/cache/model.h"
#include "engine/cache/quality.h"

// Positions end here: RoPE computes in double, which counts exactly no further.
#define QKV_POSITION_MAX ((uint64_t)1 << 53)

#define QKV_RANGE_PAGES 64  // 4096 tokens

// Fixed for a layer's life; the pointers are borrowed.
typedef struct qkv_layer_config {
  const qkv_model *model;
  qkv_policy policy;  // merged
  uint32_t layer;
  uint64_t first_position;
  qkv_arena *arena;
  qkv_ema_options ema;
  bool keep_full;              // a page that goes to lower tiers stays beside in full
  qkv_quality *quality;        // judges pages that are sealed, which may lower their tiers; NULL: none does
  const qkv_backing *backing;  // NULL: memory is all there is
  uint64_t session;            // as the backing knows it
  qkv_pool *pool;              // helps who stands back to encode; NULL: nobody does
} qkv_layer_config;

typedef struct qkv_page_entry {
  const void *page;        // image, owned; NULL: cold, there is only the record
  const qkv_coder *coder;  // what it is coded by
  uint32_t bytes;          // of the image, or, where that is cold, of the record's
  uint32_t tokens;         // valid ones
  uint64_t position;       // of its first token
  uint32_t range;          // that it belongs to; ascending without gaps from 0
  bool lost;               // planes have been dropped and not kept in memory
  bool record_lost;        // nor has the record got them
  uint32_t full_bytes;     // of the next
  const void *full;        // the page as it was coded, owned; NULL: `page` is the most that is held
  uint32_t record_bytes;   // of the page as the backing has it
  uint64_t record;         // its number there; 0: it has none
  qkv_ema *ema;            // owned; NULL: attention is not counted
  uint64_t serial;         // of the image: another one, another number, in the layer's whole life
} qkv_page_entry;

// 64 tokens' exact rows: K [64][kv_heads][key_dim], then V [64][kv_heads][value_dim], in the model's dtype.
typedef struct qkv_layer {
  qkv_layer_config config;
  const qkv_coder *coder;  // of the pages to come
  uint64_t sealed;         // positions below are in pages
  uint64_t length;         // the next position
  qkv_page_entry *pages;
  size_t page_count, page_capacity;
  uint64_t bytes_coded;   // of the pages, as the arena counts them
  uint64_t bytes_beside;  // of full pages and averages, likewise
  uint64_t bytes_stored;  // of the records
  uint64_t tokens_cold;
  size_t saved;    // pages below have been given to the backing
  size_t settled;  // and are durable
  uint64_t next_serial;
  qkv_ema_clock *clock;  // NULL: attention is not counted
  qkv_page_watch watch;
  void **tail;  // exact blocks of 64 tokens from `sealed` on
  size_t tail_count, tail_capacity;
  uint64_t *room;  // of whoever has the layer (arena.h), for what is appended or comes back; NULL: none
  const _Atomic unsigned *waiting;  // threads that wait for the layer; NULL: nobody does
} qkv_layer;

// Coders outlive the layer.
void qkv_layer_init(qkv_layer *layer, const qkv_layer_config *config, const qkv_coder *coder);
void qkv_layer_deinit(qkv_layer *layer);  // frees everything

// Appends k [tokens, kv_heads, key_dim] and v [tokens, kv_heads, value_dim] at `position`; both have passed
// qkv_tensor_check. Rows that are held already must match (qkv_codec.rows_match for sealed ones). Rows before
// RoPE are rotated to their positions. `*appended` gets the tokens that are new.
// Errors, all without any change: INVALID_ARGUMENT (shape; "k[3, 0, 17] is nan"; |x| > QKV_ROW_MAX, after
// RoPE too; QKV_POSITION_MAX),
// ALREADY_EXISTS (differs from what is held, names the position), FAILED_PRECONDITION ("position is 70, the
// expected position is 64"), RESOURCE_EXHAUSTED (the arena's), UNAVAILABLE (rows are held in a cold page).
qkv_status qkv_layer_append(qkv_layer *layer, uint64_t position, const qkv_tensor *k, const qkv_tensor *v,
                            bool before_rope, uint64_t *appended, qkv_error *error);

// All exact rows become pages, the last one a short one: for what is to leave memory or to survive the process. Takes
// no memory, as rows of usual sizes are larger than their codes; where they are not, RESOURCE_EXHAUSTED (the
// arena's), and what was sealed until then stays so. Rows of an exact codec stay as they are.
qkv_status qkv_layer_seal(qkv_layer *layer, qkv_error *error);

// Drops positions >= `position`; does nothing beyond the length.
void qkv_layer_truncate(qkv_layer *layer, uint64_t position);

// Decoded rows of one part: out [tokens][kv_heads][dim] floats for positions [begin, begin + tokens), which
// must be held, and in memory (asserted). A page is decoded whole, however few of its tokens are asked.
void qkv_layer_rows(const qkv_layer *layer, qkv_part part, uint64_t begin, uint64_t tokens, bool before_rope,
                    float *out);

// For readers: the first page that ends beyond `position` (page_count: none); a range's pages, [*first, *end), of a
// range that is there (asserted); and one head's exact row, in the model's dtype, at a position that is in the tail
// (asserted).
size_t qkv_layer_page_at(const qkv_layer *layer, uint64_t position);
void qkv_layer_range(const qkv_layer *layer, size_t range, size_t *first, size_t *end);
const void *qkv_layer_exact_row(const qkv_layer *layer, qkv_part part, uint64_t position, uint32_t kv_head);

typedef struct qkv_layer_usage {
  uint64_t tokens_coded, tokens_exact;
  uint64_t bytes_coded, bytes_exact;  // as the arena counts them
  uint64_t bytes_beside;              // full pages that are kept, averages of attention; likewise
  uint64_t tokens_cold;               // of tokens_coded: those that are only on the SSD
  uint64_t bytes_stored;              // of pages on the SSD, before they are packed there
  qkv_quality_stats quality;          // zeros without a contract
  qkv_page_watch watch;               // of pages that were measured when sealed (learner.h)
} qkv_layer_usage;

qkv_layer_usage qkv_layer_read_usage(const qkv_layer *layer);
// Positions below survive the process.
uint64_t qkv_layer_durable(const qkv_layer *layer);

// NULL, or the invariant that does not hold.
const char *qkv_layer_validate(const qkv_layer *layer);

#endif
