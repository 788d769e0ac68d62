// What the files of attention share: attend_batch.c makes tasks of a batch of requests, attend_device.c has ranges
// computed by a device, attend_share.c finds the ranges that several requests have, attend.c runs requests over
// pages, attend_fold.c masks a tile's scores and does the running softmax, attend_tail.c takes the exact tail,
// attend_check.c refuses what is out of limits, attend_turn.c cuts long requests, attend_sample.c counts attention.
#ifndef QKV_ENGINE_CACHE_ATTEND_INTERNAL_H
#define QKV_ENGINE_CACHE_ATTEND_INTERNAL_H

#include "engine/cache/attend.h"

#define QKVI_TILE_TOKENS QKV_PAGE_TOKENS  // tokens whose scores are taken at once

// Softmax statistics are accumulated over the pages of a *run*: pages of one range whose index in it differs in the
// last three bits only. The partial results of runs, and those of ranges, are merged in order. A run is short enough
// to be one task of a GPU, and its pages are given by the range alone, so that a result has the same bits on every
// device. With 8 pages merging costs about 1 % of the time, with 4 about 2 %.
#define QKVI_RUN_PAGES 8

typedef struct qkvi_head_task {
  const qkv_attend *request;
  const qkv_layer *layer;
  const qkv_model *model;
  uint16_t kv_head;
  size_t group;  // query heads of a KV head
  float scale, soft_cap;
} qkvi_head_task;

// Running softmax over tiles.
typedef struct qkvi_partial {
  size_t rows;
  float *sums[QKV_QUERY_BLOCK];   // [value_dim] each: of exp(score - peak) * v
  float peak[QKV_QUERY_BLOCK];    // -inf while nothing was visible
  double total[QKV_QUERY_BLOCK];  // sum of exp(score - peak)
} qkvi_partial;

// About 700 KB of stack at the widest rows. Rows are dense, so narrow ones touch little of it.
typedef struct qkvi_row_block {
  uint64_t begin[QKV_QUERY_BLOCK], end[QKV_QUERY_BLOCK];  // positions that a row sees
  uint64_t begin_min, end_max;                            // what any row sees
  uint64_t begin_max, end_min;                            // what all see
  qkv_query_block queries;                                // their count is the block's
  float scores[QKV_QUERY_BLOCK * QKVI_TILE_TOKENS];       // [rows][QKVI_TILE_TOKENS]; weights once folded
  float sums[QKV_QUERY_BLOCK * QKV_DIM_MAX];              // [rows][value_dim], of the pages; the tail's are in `out`
  float part[QKV_QUERY_BLOCK * QKV_DIM_MAX];              // sums of one range
  float run[QKV_QUERY_BLOCK * QKV_DIM_MAX];               // sums of one run
} qkvi_row_block;

// With 131072 tokens in pages scattered over memory, four query heads take a quarter of the time when the codes of
// later pages are prefetched. Their offsets are read from the page's directory, which is prefetched earlier still.
enum { QKVI_DIRECTORY_AHEAD = QKV_PAGES_TOGETHER };

// Does not read the page itself, which would stall. Inlined: gcc drops calls of functions that do nothing but
// prefetch.
__attribute__((always_inline)) static inline void qkvi_attend_fetch_directory(const qkv_layer *layer,
                                                                              uint16_t kv_head, size_t i) {
  const uint8_t *page = i >= layer->page_count ? NULL : qkvi_layer_image(layer, i);
  if (page == NULL) return;
  __builtin_prefetch(page);
  __builtin_prefetch(page + sizeof(qkv_page_header) + kv_head * sizeof(qkv_page_directory));
}

// What is prefetched while the `place`th page of a call is worked on. Pages of the next range are among it, though
// that may be another thread's.
static inline void qkvi_attend_fetch(const qkv_layer *layer, qkvi_row_block *block, size_t place, size_t i,
                                     qkv_part part) {
  block->queries.ahead[place].page = i < layer->page_count ? qkvi_layer_image(layer, i) : NULL;
  block->queries.ahead[place].part = part;
}

// A query's position, the sliding window in force, and the positions that the query sees: [*begin, *end), empty where
// begin >= end.
int64_t qkvi_attend_stand(const qkv_attend *request, uint64_t query);
uint64_t qkvi_attend_window(const qkv_attend *request);
void qkvi_attend_visible(const qkv_attend *request, uint64_t query, uint64_t *begin, uint64_t *end);

// The scores of a tile whose first token stands at `position` and of which `tokens` are valid: masks them, updates
// the softmax statistics and replaces the scores by weights. False where no row sees anything of the tile.
bool qkvi_attend_fold(const qkvi_head_task *task, qkvi_row_block *block, qkvi_partial *partial, uint64_t position,
                      size_t tokens);

// Empty partial results: `sums` [rows][value_dim], or of one row [value_dim], become the partial's, and are zeroed.
void qkvi_attend_start_row(qkvi_partial *partial, size_t row, float *sums, size_t dim);
void qkvi_attend_start(qkvi_partial *partial, size_t rows, float *sums, size_t dim);
// `partial` becomes the merged one; its sums stay where they are.
void qkvi_attend_merge(qkvi_partial *partial, const qkvi_partial *other, size_t dim);

// The partial result of the pages [first, end) of a range, which begins with page `range`, as far as the block sees
// them. Its queries are ready for their coder; `sums` [rows][value_dim], in code space, become the partial's.
void qkvi_attend_runs(const qkvi_head_task *task, qkvi_row_block *block, size_t range, size_t first, size_t end,
                      float *sums, qkvi_partial *partial);

// The parts of a fold: soft cap on all scores of a tile; -inf outside of slots [first, last); the slot at a position,
// at most `tokens`.
void qkvi_attend_cap(const qkvi_head_task *task, const qkvi_row_block *block, float *scores);
void qkvi_attend_mask(float *scores, size_t first, size_t last);
size_t qkvi_attend_slot(uint64_t position, uint64_t tile_position, size_t tokens);

// (Query, head) rows of one KV head, counted as query * group + head in the group; and the row of out and lse that
// one of them is written to.
qkvi_head_task qkvi_attend_task(const qkv_attend *request, uint16_t kv_head);
size_t qkvi_attend_rows(const qkv_attend *request);
size_t qkvi_attend_output_row(const qkvi_head_task *task, size_t flat);

// A block without rows; rows [first, first + rows) of a request's KV head behind those that a block has, rotated and
// scaled; and a block of those alone. Rows of several requests may be in one block where KV head, model, precision
// and soft cap are the same: what a row gets has the same bits whatever the others are.
void qkvi_attend_clear(qkvi_row_block *block, qkv_precision precision);
void qkvi_attend_add(const qkvi_head_task *task, qkvi_row_block *block, size_t first, size_t rows);
void qkvi_attend_load(const qkvi_head_task *task, qkvi_row_block *block, size_t first, size_t rows);

// The ranges [*first, *end) of pages that a request sees something of; the coder of one; and its partial result for a
// block whose queries are ready for that coder. `sums` [rows][value_dim], in code space, become the partial's.
void qkvi_attend_ranges(const qkv_attend *request, size_t *first, size_t *end);
const qkv_coder *qkvi_attend_coder(const qkv_layer *layer, size_t range);
void qkvi_attend_range(const qkvi_head_task *task, qkvi_row_block *block, size_t range, float *sums,
                       qkvi_partial *partial);

bool qkvi_attend_stopped(const qkv_attend *request);

// What tasks have computed of a head's only block: partial results of ranges from `first` on.
typedef struct qkvi_head_ranges {
  size_t first;
  const bool *computed;  // false: the range has no partial result yet
  const qkvi_partial *partials;
} qkvi_head_ranges;

// All rows of a KV head; `ranges` NULL: no task has computed anything of them.
void qkvi_attend_head(const qkv_attend *request, uint16_t kv_head, const qkvi_head_ranges *ranges);

// All of `count` requests, but for what is counted and learnt.
void qkvi_attend_batch(qkv_pool *pool, const qkv_attend *requests, size_t count);

// Ranges of pages that several requests of a batch have and see whole. They become *groups*: requests of at most
// QKVI_SHARE_ROWS rows of a KV head together, and consecutive ranges. A request is in one group at most for each of
// its ranges.
//
//   request A   [ range 0 ][ range 1 ][ range 2 ]      groups: A, B and C over ranges 0 and 1
//   request B   [ range 0 ][ range 1 ][ range 2 ][ ]           A and B over range 2
//   request C   [ range 0 ][ range 1 ][ ]
typedef struct qkvi_share_group {
  size_t first, count;    // ranges [first, first + count), of every member's layer
  const size_t *members;  // [member_count], requests by their place in the batch, ascending
  size_t member_count;    // 2 at least
} qkvi_share_group;

typedef struct qkvi_sharing {
  qkvi_share_group *groups;  // by `first`
  size_t count;              // 0: nothing is shared
  size_t *members;           // of all groups
} qkvi_sharing;

#define QKVI_SHARE_ROWS QKV_QUERY_BLOCK

// Whether a request sees a range whole that other layers have, too, and has few enough rows.
bool qkvi_share_may(const qkv_attend *request);
// Finds the groups, of at most `members_max` requests. Ranges that `taken` (NULL: none) has flags for, as
// qkvi_device_taken() gives them, are left out. Where there is no memory for that, nothing is shared.
void qkvi_share_find(const qkv_attend *requests, size_t count, size_t members_max, const bool *const *taken,
                     qkvi_sharing *sharing);
void qkvi_share_clear(qkvi_sharing *sharing);

// Ranges of a batch that a device computes (attend_device.c). First they are found, which holds their copies; then
// the device starts, and what it has computed is waited for. Clearing releases the copies.
typedef struct qkvi_device_work qkvi_device_work;

// Where results go: the memory of a request's partial result of a range and KV head, and of its sums
// [rows][value_dim]; and what has all of them.
typedef struct qkvi_device_results {
  qkvi_partial *(*slot)(void *context, size_t place, uint16_t kv_head, size_t range, float **sums);
  void (*computed)(void *context, size_t place, size_t range);
  void *context;
} qkvi_device_results;

// Whether a device may compute ranges of a request; those of a batch that have copies (NULL: none has); and which
// they are: [count], NULL or flags by the range, from the first one on that the request sees.
bool qkvi_device_may(const qkv_attend *request);
qkvi_device_work *qkvi_device_find(const qkv_attend *requests, size_t count);
const bool *const *qkvi_device_taken(const qkvi_device_work *work);
void qkvi_device_start(qkvi_device_work *work);
// Rows [first, first + count) of a block whose queries are ready for their coder, which is calibrated, as kernels
// take them: `out` [QKV_SIMT_FRAME_QUERY_BYTES(key_dim)].
void qkvi_device_queries(const qkv_coder *coder, const qkv_query_block *block, size_t first, size_t count,
                         uint8_t *out);
void qkvi_device_finish(qkvi_device_work *work, const qkvi_device_results *results);
void qkvi_device_clear(qkvi_device_work **work);

// Counts the requests, which have run, on their layers' clocks, and adds those that are due to the averages.
void qkvi_attend_sample(qkv_pool *pool, const qkv_attend *requests, size_t count);

// One request on the caller's thread, which is neither counted nor learnt from.
void qkvi_attend_quietly(const qkv_attend *request);

// Attends to what the block sees of the exact tail.
void qkvi_attend_tail(const qkvi_head_task *task, qkvi_row_block *block, qkvi_partial *partial);

#endif
