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
// Pages are coded by the layer's coder. It can change at any time; existing pages keep theirs. Pages lie in *ranges*
// of one coder each (page_range.h). A layer that is forked from another one shares its ranges and its exact blocks,
// copy on write. What either appends then begins a range of its own; a layer has at most 8 ranges and one for every
// 32 pages that way.
//
// Memory is the arena's: every byte is reserved before anything changes, so an append that does not fit
// changes nothing.
//
// Where attention is counted (ema.h), every page has averages next to it. A page's image may be exchanged for one at
// other tiers (retier.h); with keep_full the one that was coded first is kept, so that dropped planes can be
// restored. With a backing, pages are put there when they are sealed, and their images may leave memory
// (layer_spill.h).
//
// Threads: not safe; session.h holds the lock. Readers (attend, rows) may run together.
#ifndef QKV_ENGINE_CACHE_LAYER_H
#define QKV_ENGINE_CACHE_LAYER_H

#include <stdatomic.h>
#include <stdint.h>

#include "engine/base/arena.h"
#include "engine/base/tensor.h"
#include "engine/cache/backing.h"
#include "engine/cache/device.h"
#include "engine/cache/ema.h"
#include "engine/cache/model.h"
#include "engine/cache/page_range.h"
#include "engine/cache/quality.h"
#include "engine/cache/session_tokens.h"

// Positions end here: RoPE computes in double, which counts exactly no further.
#define QKV_POSITION_MAX ((uint64_t)1 << 53)

// Fixed for a layer's life; the pointers are borrowed.
typedef struct qkv_layer_config {
  const qkv_model *model;
  qkv_policy policy;  // merged
  uint32_t layer;
  uint64_t first_position;
  qkv_arena *arena;
  qkv_ema_options ema;
  bool keep_full;              // a page that goes to lower tiers is kept in full, too
  qkv_quality *quality;        // selects the tiers of pages that are sealed; NULL: nothing does
  const qkv_backing *backing;  // NULL: memory is all there is
  uint64_t session;            // as the backing knows it
  qkv_session_tokens *tokens;  // whose pages' hashes go to the backing with those of the layer; NULL: none do
  qkv_pool *pool;              // helps yielding threads to encode; NULL: none does
  qkv_device *device;          // that attends ranges of which it has copies, and outlives the layer; NULL: none
} qkv_layer_config;

// The attention that a range's pages receive in one layer; entries are made when there is something to count.
typedef struct qkv_ema_table {
  _Atomic uint32_t count;      // of the next that are not NULL
  _Atomic uint32_t attention;  // of all of them, averaged over queries and heads, as a float; 0: not sampled yet
  _Atomic(qkv_ema *) pages[QKV_RANGE_PAGES];
} qkv_ema_table;

typedef struct qkv_range_slot {
  qkv_page_range *range;          // perhaps shared with other layers
  size_t first;                   // index of its first page in the layer
  bool kept;                      // this layer is one of its keepers
  _Atomic(qkv_ema_table *) emas;  // of this layer alone; NULL: nothing has been counted
} qkv_range_slot;

// An exact block that layers share (layer_tail.c); NULL in the block of one layer alone.
typedef struct qkv_block_share qkv_block_share;

// 64 tokens' exact rows: K [64][kv_heads][key_dim], then V [64][kv_heads][value_dim], in the model's dtype.
typedef struct qkv_tail_block {
  void *rows;
  qkv_block_share *share;
} qkv_tail_block;

// Exact rows that the backing has (layer_rows.c): positions [begin, end).
typedef struct qkv_saved_rows {
  uint64_t record;
  uint64_t begin, end;
  bool shared;  // sessions that are forked from this one need the record, or the one that this one is forked from
} qkv_saved_rows;

// Token ids of rows that are being appended, which the session keeps once it has the rows (session_tokens.h).
typedef struct qkv_row_ids {
  uint64_t position;
  size_t count;
  const uint32_t *ids;
} qkv_row_ids;

// How the thread that changes a layer's rows locks a layer that others read. One thread at a time changes what rows a
// layer has, its coder and its tail: it appends, truncates, seals or forks. It writes the layer between `enter` and
// `leave`, and reads pages, which others may write, between `look` and `looked`. In between others may do both.
typedef struct qkv_layer_access qkv_layer_access;
struct qkv_layer_access {
  void (*enter)(const qkv_layer_access *access);
  void (*leave)(const qkv_layer_access *access, bool last);  // the change is complete
  void (*look)(const qkv_layer_access *access);
  void (*looked)(const qkv_layer_access *access);
  const qkv_row_encoder *encoder;  // of the rows that it appends, where a device has them; NULL: it has not
};

typedef struct qkv_layer {
  qkv_layer_config config;
  const qkv_coder *coder;  // of the pages to come
  uint64_t sealed;         // positions below are in pages
  uint64_t length;         // the next position
  uint64_t forked_to;      // positions below are another session's, too, by fork: the backing is told of cuts there
  // Pages by ranges. What the layer has of its last range may be less than that holds.
  qkv_range_slot *ranges;
  size_t range_count, range_capacity;
  size_t page_count;
  size_t saved;          // pages below have been given to the backing
  size_t settled;        // and are durable
  qkv_ema_clock *clock;  // NULL: attention is not counted
  qkv_page_watch watch;
  qkv_tail_block *tail;  // exact blocks of 64 tokens from `sealed` on
  size_t tail_count, tail_capacity;
  // Records of exact rows in ascending order; the first `rows_settled` of them are durable.
  qkv_saved_rows *saved_rows;
  size_t saved_rows_count, saved_rows_capacity, rows_settled;
  uint32_t cuts;              // truncations that have dropped rows
  bool pinned;                // its ranges are pinned; false only for a session's layer that no thread has locked
  uint64_t *append_headroom;  // a reservation (arena.h) of the thread that appends; NULL: none
  const qkv_layer_access *access;   // of the thread that changes the rows; NULL: it has the layer to itself
  struct qkvi_page_offers *offers;  // for pages to come, while they are appended (session_share.h); NULL: none
  const _Atomic unsigned *waiting;  // threads that wait for the layer; NULL: no thread does
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
// Of these errors those of shapes and positions, before memory is freed for an append. k NULL: without shapes.
qkv_status qkv_layer_append_check(const qkv_layer *layer, uint64_t position, const qkv_tensor *k, const qkv_tensor *v,
                                  qkv_error *error);

// All exact rows become pages, the last one a short one: before rows leave memory, or to survive the process. Takes
// no memory, as rows of usual sizes are larger than their codes; where they are not, RESOURCE_EXHAUSTED (the
// arena's), and what was sealed until then stays so. Rows of an exact codec stay as they are.
qkv_status qkv_layer_seal(qkv_layer *layer, qkv_error *error);
// The same for the first pages of them, at most so many.
qkv_status qkv_layer_seal_pages(qkv_layer *layer, size_t pages, qkv_error *error);

// `layer` is a new one of the same model, policy, purpose and first position (asserted); it gets all that `parent`
// has below `position`, shared. Pages that end behind it keep fewer valid tokens. Takes no memory of the arena. With
// `parent` locked for reading, one fork of it at a time.
void qkv_layer_fork(qkv_layer *layer, const qkv_layer *parent, uint64_t position);

// Drops positions >= `position`; does nothing beyond the length. The backing is told where it may have any of them.
void qkv_layer_truncate(qkv_layer *layer, uint64_t position);
// Whether it may, and the same for a caller that tells the backing itself, for several layers at once.
bool qkv_layer_cut_is_needed(const qkv_layer *layer, uint64_t position);
void qkv_layer_truncate_untold(qkv_layer *layer, uint64_t position);

// Decoded rows of one part: out [tokens][kv_heads][dim] floats for positions [begin, begin + tokens), which
// must be held, and in memory (asserted). A page is decoded whole, however few of its tokens are wanted.
void qkv_layer_rows(const qkv_layer *layer, qkv_part part, uint64_t begin, uint64_t tokens, bool before_rope,
                    float *out);

// The range of a page, and the page, of an index below page_count.
size_t qkvi_layer_find_range(const qkv_layer *layer, size_t page);
static inline size_t qkv_layer_range_of(const qkv_layer *layer, size_t page) {
  // No range has more than QKV_RANGE_PAGES, and hardly one less.
  const size_t guess = page / QKV_RANGE_PAGES;
  if (guess + 1 == layer->range_count || layer->ranges[guess + 1].first > page) return guess;
  return qkvi_layer_find_range(layer, page);
}
static inline qkv_page_entry *qkv_layer_page(const qkv_layer *layer, size_t index) {
  const qkv_range_slot *slot = &layer->ranges[qkv_layer_range_of(layer, index)];
  return &qkvi_range_entries(slot->range)[index - slot->first];
}
// For a page that may be cold, without unpacking its range: its positions; its image, or NULL; the whole entry.
static inline qkvi_page_span qkvi_layer_span(const qkv_layer *layer, size_t index) {
  const qkv_range_slot *slot = &layer->ranges[qkv_layer_range_of(layer, index)];
  return qkvi_range_span(slot->range, (uint32_t)(index - slot->first));
}
static inline const void *qkvi_layer_image(const qkv_layer *layer, size_t index) {
  const qkv_range_slot *slot = &layer->ranges[qkv_layer_range_of(layer, index)];
  const qkv_page_entry *pages = atomic_load_explicit(&slot->range->pages, memory_order_acquire);
  return pages == NULL ? NULL : pages[index - slot->first].page;
}
static inline qkv_page_entry qkvi_layer_peek(const qkv_layer *layer, size_t index) {
  const qkv_range_slot *slot = &layer->ranges[qkv_layer_range_of(layer, index)];
  return qkvi_range_peek(slot->range, (uint32_t)(index - slot->first));
}
// Its averages; NULL: nothing has been counted.
qkv_ema *qkv_layer_ema(const qkv_layer *layer, size_t index);

// For readers: the first page that ends beyond `position` (page_count: none); the pages [*first, *end) of a range,
// which exists (asserted); and one head's exact row, in the model's dtype, at a position that is in the tail
// (asserted).
size_t qkv_layer_page_at(const qkv_layer *layer, uint64_t position);
void qkv_layer_range(const qkv_layer *layer, size_t range, size_t *first, size_t *end);
const void *qkv_layer_exact_row(const qkv_layer *layer, qkv_part part, uint64_t position, uint32_t kv_head);

typedef struct qkv_layer_usage {
  uint64_t tokens_coded, tokens_exact;
  uint64_t bytes_coded, bytes_exact;  // as the arena counts them
  uint64_t bytes_overhead;            // full pages that are kept, averages of attention; likewise
  uint64_t bytes_shared;              // of bytes_coded: in ranges that other layers in memory have, too
  uint64_t tokens_cold;               // of tokens_coded: those that are only on the SSD
  uint64_t bytes_stored;              // of pages on the SSD, before they are packed there
  qkv_quality_stats quality;          // zeros without a contract
  qkv_page_watch watch;               // of pages that were measured when sealed (learner.h)
} qkv_layer_usage;

qkv_layer_usage qkv_layer_read_usage(const qkv_layer *layer);
// Positions below survive the process: durable pages, and behind them durable records of exact rows.
uint64_t qkv_layer_durable(const qkv_layer *layer);

// NULL, or the invariant that does not hold.
const char *qkv_layer_validate(const qkv_layer *layer);

#endif
