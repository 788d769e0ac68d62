// Scores into partial results: tiles of the exact tail one by one, pages some at once.
#include <assert.h>
#include <math.h>
#include <string.h>

#include "engine/cache/attend_internal.h"
#include "engine/kernel/kernel.h"

// ---- Partial results ----

void qkvi_attend_start_row(qkvi_partial *partial, size_t row, float *sums, size_t dim) {
  memset(sums, 0, dim * sizeof *sums);
  partial->sums[row] = sums;
  partial->peak[row] = -INFINITY;
  partial->total[row] = 0;
}

void qkvi_attend_start(qkvi_partial *partial, size_t rows, float *sums, size_t dim) {
  for (size_t row = 0; row < rows; row++) qkvi_attend_start_row(partial, row, sums + row * dim, dim);
  partial->rows = rows;
}

// exp(peak - most), most >= peak.
static float share_of(float peak, float most) {
  return peak == most ? 1 : qkv_exp_negative(peak - most);
}

void qkvi_attend_merge(qkvi_partial *partial, const qkvi_partial *other, size_t dim) {
  assert(partial->rows == other->rows);
  for (size_t row = 0; row < other->rows; row++) {
    if (other->peak[row] == -INFINITY) continue;
    const float most = partial->peak[row] > other->peak[row] ? partial->peak[row] : other->peak[row];
    const float share = share_of(partial->peak[row], most), other_share = share_of(other->peak[row], most);
    float *sums = partial->sums[row];
    const float *other_sums = other->sums[row];
    for (size_t i = 0; i < dim; i++) sums[i] = sums[i] * share + other_sums[i] * other_share;
    partial->total[row] = (double)share * partial->total[row] + (double)other_share * other->total[row];
    partial->peak[row] = most;
  }
}

// ---- A tile ----

void qkvi_attend_cap(const qkvi_head_task *task, const qkvi_row_block *block, float *scores) {
  if (task->soft_cap == 0) return;
  qkv_soft_cap(scores, block->queries.count * QKVI_TILE_TOKENS, task->soft_cap);
}

// Only slots [first, last) of a row's tile are seen.
void qkvi_attend_mask(float *scores, size_t first, size_t last) {
  for (size_t t = 0; t < first; t++) scores[t] = -INFINITY;
  for (size_t t = last; t < QKVI_TILE_TOKENS; t++) scores[t] = -INFINITY;
}

size_t qkvi_attend_slot(uint64_t position, uint64_t tile_position, size_t tokens) {
  if (position <= tile_position) return 0;
  uint64_t slot = position - tile_position;
  return slot < tokens ? (size_t)slot : tokens;
}

// A row's statistics with a tile's largest score among them. Weights may be above 1 as long as none is above
// e^`slack`: peaks that rise a little at a time would have the sums multiplied by factors again and again.
#define PEAK_SLACK 8.0f
static void raise_peak(const qkvi_head_task *task, qkvi_partial *partial, size_t row, float largest, float slack) {
  const float before = partial->peak[row];
  if (largest <= before + slack) return;
  const float decay = before == -INFINITY ? 0 : qkv_exp_negative(before - largest);
  float *sums = partial->sums[row];
  for (size_t i = 0; i < task->model->value_dim; i++) sums[i] *= decay;
  partial->total[row] *= (double)decay;
  partial->peak[row] = largest;
}

// Masks a row's scores; false where it sees nothing of the tile.
static bool mask_row(const qkvi_row_block *block, size_t row, uint64_t position, size_t tokens, float *scores) {
  size_t first = qkvi_attend_slot(block->begin[row], position, tokens),
         last = qkvi_attend_slot(block->end[row], position, tokens);
  if (first < last) {
    qkvi_attend_mask(scores, first, last);
    return true;
  }
  memset(scores, 0, QKVI_TILE_TOKENS * sizeof *scores);
  return false;
}

// Masks a row's scores and updates its statistics; false where it sees nothing of the tile.
static bool see(const qkvi_head_task *task, qkvi_row_block *block, qkvi_partial *partial, size_t row,
                uint64_t position, size_t tokens) {
  if (!mask_row(block, row, position, tokens, block->scores + row * QKVI_TILE_TOKENS)) return false;
  raise_peak(task, partial, row, qkv_kernels_get()->largest(block->scores + row * QKVI_TILE_TOKENS), 0);
  return true;
}

bool qkvi_attend_fold(const qkvi_head_task *task, qkvi_row_block *block, qkvi_partial *partial, uint64_t position,
                      size_t tokens) {
  bool any = false;
  const qkv_kernels *kernels = qkv_kernels_get();
  qkvi_attend_cap(task, block, block->scores);
  for (size_t row = 0; row < block->queries.count; row++) {
    if (!see(task, block, partial, row, position, tokens)) continue;
    any = true;
    partial->total[row] += kernels->weigh(block->scores + row * QKVI_TILE_TOKENS, partial->peak[row]);
  }
  return any;
}

// ---- Some pages at once ----

// Consecutive pages of a range: all their scores are computed, then all their weights, then the sums, so that memory
// latency of one page overlaps work on others. The numbers are those of one page after the other.
typedef struct page_run {
  size_t first, count;             // in the layer
  size_t ahead;                    // that many keys or values of pages are on their way
  bool sees[QKV_QUERY_BLOCK];      // [page][row]
  float largest[QKV_QUERY_BLOCK];  // of the scores [page][row]
} page_run;

// Pages that the scores have space for.
static size_t pages_together(size_t rows) {
  const size_t most = QKV_QUERY_BLOCK / rows;
  return most < QKV_PAGES_TOGETHER ? most : QKV_PAGES_TOGETHER;
}

// All keys of a run are worked on, then all values, then the keys of the next. The page `ahead` of the step is
// prefetched meanwhile, as the `place`th of a call: as far ahead as memory latency needs.
static void fetch_ahead(const qkvi_head_task *task, qkvi_row_block *block, const page_run *run, size_t step,
                        size_t place) {
  const size_t next = step + run->ahead, count = run->count;
  const qkv_part part = next >= count && next < 2 * count ? QKV_V : QKV_K;
  qkvi_attend_fetch(task->layer, block, place, run->first + next - (next < count ? 0 : count), part);
}

static size_t steps_ahead(const qkvi_head_task *task, const page_run *run) {
  enum { FAR = 8192 };  // bytes
  const size_t step = qkv_layer_page(task->layer, run->first)->bytes / (2 * task->model->kv_heads),
               steps = FAR / (step + 1) + 1;
  return steps < run->count ? steps : run->count;
}

static void score_run(const qkvi_head_task *task, qkvi_row_block *block, page_run *run) {
  const qkv_layer *layer = task->layer;
  const size_t rows = block->queries.count;
  for (size_t p = 0; p < run->count; p++) {
    const qkv_page_entry *entry = qkv_layer_page(layer, run->first + p);
    float *scores = block->scores + p * rows * QKVI_TILE_TOKENS;
    fetch_ahead(task, block, run, p, 0);
    entry->coder->codec->scores(entry->coder, entry->page, task->kv_head, &block->queries, scores);
    qkvi_attend_cap(task, block, scores);
    const bool whole = entry->tokens == QKVI_TILE_TOKENS && block->begin_max <= entry->position &&
                       block->end_min >= entry->position + QKVI_TILE_TOKENS;
    for (size_t row = 0; row < rows; row++) {
      run->sees[p * rows + row] =
          whole || mask_row(block, row, entry->position, entry->tokens, scores + row * QKVI_TILE_TOKENS);
    }
  }
  qkv_kernels_get()->peaks(block->scores, run->count * rows, run->largest);
}

// Whether a page's scores are within the peaks.
static bool within(const page_run *run, const qkvi_partial *partial, size_t p) {
  for (size_t i = p * partial->rows; i < (p + 1) * partial->rows; i++) {
    if (run->sees[i] && run->largest[i] > partial->peak[i % partial->rows] + PEAK_SLACK) return false;
  }
  return true;
}

// In integers, where the block asks for them and the pages can. `count` pages from the p-th on, all within the peaks.
static size_t weigh_run(const qkvi_head_task *task, qkvi_row_block *block, qkvi_partial *partial, const page_run *run,
                        size_t p, size_t count, float *sums) {
  enum { UNSEEN_PEAK = 1000000000 };  // gives weight 0 to a row that sees nothing
  const qkv_page_entry *entries = qkv_layer_page(task->layer, run->first + p);  // of one range
  if (entries->coder->codec->weigh == NULL) return 0;
  const size_t rows = partial->rows;
  const bool *sees = run->sees + p * rows;
  const void *pages[QKV_PAGES_TOGETHER];
  float peaks[QKV_QUERY_BLOCK], totals[QKV_QUERY_BLOCK];
  for (size_t i = 0; i < count; i++) {
    pages[i] = entries[i].page;
    fetch_ahead(task, block, run, run->count + p + i, i);
    for (size_t row = 0; row < rows; row++)
      peaks[i * rows + row] = sees[i * rows + row] ? partial->peak[row] : UNSEEN_PEAK;
  }
  const size_t done = entries->coder->codec->weigh(entries->coder, pages, count, task->kv_head, &block->queries,
                                                   block->scores + p * rows * QKVI_TILE_TOKENS, peaks, totals, sums);
  for (size_t i = 0; i < done; i++) {
    for (size_t row = 0; row < rows; row++)
      partial->total[row] += sees[i * rows + row] ? (double)totals[i * rows + row] : 0;
  }
  return done;
}

// In floats: the p-th page.
static void weigh_page(const qkvi_head_task *task, const qkvi_row_block *block, qkvi_partial *partial,
                       const page_run *run, size_t p, float *scores, float *sums) {
  const qkv_page_entry *entry = qkv_layer_page(task->layer, run->first + p);
  for (size_t row = 0; row < partial->rows; row++) {
    if (!run->sees[p * partial->rows + row]) continue;
    raise_peak(task, partial, row, run->largest[p * partial->rows + row], 0);
    partial->total[row] += qkv_kernels_get()->weigh(scores + row * QKVI_TILE_TOKENS, partial->peak[row]);
  }
  entry->coder->codec->accumulate(entry->coder, entry->page, task->kv_head, scores, block->queries.count, sums);
}

static void fold_run(const qkvi_head_task *task, qkvi_row_block *block, qkvi_partial *partial, const page_run *run,
                     float *sums) {
  const size_t rows = partial->rows;
  for (size_t p = 0, done; p < run->count; p += done) {
    size_t count = 1;
    for (size_t row = 0; row < rows; row++) {
      if (run->sees[p * rows + row]) raise_peak(task, partial, row, run->largest[p * rows + row], PEAK_SLACK);
    }
    while (p + count < run->count && within(run, partial, p + count)) count++;
    done = weigh_run(task, block, partial, run, p, count, sums);
    if (done > 0) continue;
    weigh_page(task, block, partial, run, p, block->scores + p * rows * QKVI_TILE_TOKENS, sums);
    done = 1;
  }
}

// The pages [first, end) with statistics of their own.
static void attend_run(const qkvi_head_task *task, qkvi_row_block *block, size_t first, size_t end, float *sums,
                       qkvi_partial *partial) {
  const qkv_layer *layer = task->layer;
  const size_t most = pages_together(block->queries.count);
  qkvi_attend_start(partial, block->queries.count, sums, task->model->value_dim);
  for (page_run run = {.first = first}; run.first < end; run.first += run.count) {
    run.count = end - run.first < most ? end - run.first : most;
    for (size_t i = 0; i < run.count; i++)
      qkvi_attend_fetch_directory(layer, task->kv_head, run.first + i + QKVI_DIRECTORY_AHEAD);
    run.ahead = steps_ahead(task, &run);
    score_run(task, block, &run);
    fold_run(task, block, partial, &run, sums);
  }
}

void qkvi_attend_runs(const qkvi_head_task *task, qkvi_row_block *block, size_t range, size_t first, size_t end,
                      float *sums, qkvi_partial *partial) {
  const qkv_layer *layer = task->layer;
  const size_t begin = first;
  qkvi_partial own;
  while (end > first && qkvi_layer_span(layer, end - 1).begin >= block->end_max) end--;
  for (size_t i = 0; i < QKVI_DIRECTORY_AHEAD; i++) qkvi_attend_fetch_directory(layer, task->kv_head, first + i);
  if (first == end) return qkvi_attend_start(partial, block->queries.count, sums, task->model->value_dim);
  for (size_t next; first < end; first = next) {
    next = range + (first - range) / QKVI_RUN_PAGES * QKVI_RUN_PAGES + QKVI_RUN_PAGES;
    if (next > end) next = end;
    if (first == begin) {
      attend_run(task, block, first, next, sums, partial);
    } else {
      attend_run(task, block, first, next, block->run, &own);
      qkvi_attend_merge(partial, &own, task->model->value_dim);
    }
  }
}
