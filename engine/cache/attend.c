#include "engine/cache/attend.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/yield.h"
#include "engine/cache/attend_internal.h"
#include "engine/kernel/kernel.h"

// A task takes the (query, head) rows of its KV head in blocks. A block is attended twice, over the exact tail
// and over the pages, each with running softmax statistics of its own, and the two partial results are merged
// as everywhere by their statistics: so the pages' sums stay in code space until the end, or until pages of another
// coder follow. The pages are taken in runs of up to 8 within the layer's ranges, each with statistics of its own,
// which are merged in order to those of ranges, and these to those of all pages.
// Where a run has too few heads for the pool, ranges become tasks and the merge follows; the arithmetic is the same
// in both cases, so that numbers depend neither on the threads nor on what else is in the batch.
//
// The positions that a query sees are one interval, whatever the options.

// ---- What a query sees ----

uint64_t qkvi_attend_window(const qkv_attend *request) {
  uint64_t asked = request->options.sliding_window;
  return asked != 0 ? asked : qkv_model_window(request->layer->config.model, request->layer->config.layer);
}

int64_t qkvi_attend_stand(const qkv_attend *request, uint64_t query) {
  return (int64_t)request->position + request->options.causal_offset + (int64_t)query;
}

void qkvi_attend_visible(const qkv_attend *request, uint64_t query, uint64_t *begin, uint64_t *end) {
  const qkv_layer *layer = request->layer;
  const qkv_attend_options *options = &request->options;
  *begin = layer->config.first_position;
  *end = layer->length;
  if (options->begin > *begin) *begin = options->begin;
  if (options->end != 0 && options->end < *end) *end = options->end;
  if (options->not_causal) return;

  int64_t stand = qkvi_attend_stand(request, query);
  uint64_t seen = stand < 0 ? 0 : (uint64_t)stand + 1;
  uint64_t window = qkvi_attend_window(request);
  if (seen < *end) *end = seen;
  if (window != 0 && seen > window && seen - window > *begin) *begin = seen - window;
}

// ---- The pages ----

void qkvi_attend_range(const qkvi_head_task *task, qkvi_row_block *block, size_t range, float *sums,
                       qkvi_partial *partial) {
  const qkv_layer *layer = task->layer;
  size_t begin, end, seen = qkv_layer_page_at(layer, block->begin_min);
  qkv_layer_range(layer, range, &begin, &end);
  qkvi_attend_runs(task, block, begin, begin < seen ? seen : begin, end, sums, partial);
}

const qkv_coder *qkvi_attend_coder(const qkv_layer *layer, size_t range) {
  assert(range < layer->range_count);
  return layer->ranges[range].range->coder;
}

// The ranges [*first, *end) that hold the pages of positions [begin, end); none where they are all in the tail.
static void ranges_of(const qkv_layer *layer, uint64_t begin, uint64_t end, size_t *first, size_t *range_end) {
  *first = *range_end = 0;
  if (begin >= end || begin >= layer->sealed) return;
  uint64_t last = end < layer->sealed ? end - 1 : layer->sealed - 1;
  *first = qkv_layer_range_of(layer, qkv_layer_page_at(layer, begin));
  *range_end = qkv_layer_range_of(layer, qkv_layer_page_at(layer, last)) + 1;
}

// ---- Blocks ----

// Where the block's row goes in out and lse, in rows.
size_t qkvi_attend_output_row(const qkvi_head_task *task, size_t flat) {
  size_t query = flat / task->group, head = task->kv_head * task->group + flat % task->group;
  return query * task->model->q_heads + head;
}

void qkvi_attend_clear(qkvi_row_block *block, qkv_precision precision) {
  block->queries.count = 0;
  block->queries.precision = precision;
  block->begin_min = block->end_min = UINT64_MAX;
  block->begin_max = block->end_max = 0;
}

static void note_visible(const qkv_attend *request, uint64_t query, qkvi_row_block *block, size_t row) {
  qkvi_attend_visible(request, query, &block->begin[row], &block->end[row]);
  if (block->begin[row] > block->begin_max) block->begin_max = block->begin[row];
  if (block->end[row] < block->end_min) block->end_min = block->end[row];
  if (block->begin[row] >= block->end[row]) return;
  if (block->begin[row] < block->begin_min) block->begin_min = block->begin[row];
  if (block->end[row] > block->end_max) block->end_max = block->end[row];
}

void qkvi_attend_add(const qkvi_head_task *task, qkvi_row_block *block, size_t first, size_t rows) {
  const qkv_attend *request = task->request;
  const bool rotate = request->q_before_rope && task->model->rope.theta != 0;
  qkv_rope_turns turns;
  assert(rows <= QKV_QUERY_BLOCK - block->queries.count);
  for (size_t i = 0; i < rows; i++) {
    const size_t row = block->queries.count + i, query = (first + i) / task->group;
    const size_t head = task->kv_head * task->group + (first + i) % task->group;
    float *out = block->queries.rows + row * task->model->key_dim;
    qkv_tensor_row(&request->q, (int64_t)query, (int64_t)head, out);
    if (rotate && (i == 0 || head % task->group == 0)) {  // the heads of a query are at one position
      qkv_rope_find_turns(&task->model->rope, (uint64_t)qkvi_attend_stand(request, query), &turns);
    }
    if (rotate) qkv_rope_turn(&task->model->rope, &turns, out);
    for (size_t c = 0; c < task->model->key_dim; c++) out[c] *= task->scale;
    note_visible(request, query, block, row);
  }
  block->queries.count += rows;
}

void qkvi_attend_load(const qkvi_head_task *task, qkvi_row_block *block, size_t first, size_t rows) {
  qkvi_attend_clear(block, task->request->options.precision);
  qkvi_attend_add(task, block, first, rows);
}

// out and LSE of a row from its two parts, either of which may be empty.
static void merge_row(const qkvi_head_task *task, size_t at, size_t row, const qkvi_partial *tail,
                      const qkvi_partial *pages) {
  size_t dim = task->model->value_dim;
  float *out = tail->sums[row], *lse = task->request->lse + at;
  const float *sums = pages->sums[row];
  float peak = tail->peak[row] > pages->peak[row] ? tail->peak[row] : pages->peak[row];
  if (peak == -INFINITY) {
    *lse = -INFINITY;
    return;
  }
  double tail_share = (double)qkv_exp_negative(tail->peak[row] - peak);
  double pages_share = (double)qkv_exp_negative(pages->peak[row] - peak);
  double total = tail_share * tail->total[row] + pages_share * pages->total[row];
  float tail_factor = (float)(tail_share / total), pages_factor = (float)(pages_share / total);
  for (size_t i = 0; i < dim; i++) out[i] = out[i] * tail_factor + sums[i] * pages_factor;
  *lse = (float)((double)peak + log(total));
}

// The pages' sums so far leave code space and join the tail's, whose partial result this becomes.
static void leave_coder(const qkvi_head_task *task, const qkv_coder *coder, qkvi_row_block *block,
                        const qkvi_partial *pages, qkvi_partial *tail) {
  coder->codec->output(coder, task->kv_head, block->sums, pages->total, pages->rows);
  qkvi_attend_merge(tail, pages, task->model->value_dim);
}

// A range's partial result: what a task has left, or `own`, computed here. `ready`: the coder that the block's
// queries are ready for.
static const qkvi_partial *partial_of(const qkvi_head_task *task, qkvi_row_block *block, size_t range,
                                      const qkvi_head_ranges *ranges, const qkv_coder **ready, qkvi_partial *own) {
  if (ranges != NULL && ranges->computed[range - ranges->first]) return &ranges->partials[range - ranges->first];
  const qkv_coder *coder = qkvi_attend_coder(task->layer, range);
  if (coder != *ready) coder->codec->query(coder, task->kv_head, &block->queries);
  *ready = coder;
  qkvi_attend_range(task, block, range, block->part, own);
  return own;
}

static void attend_pages(const qkvi_head_task *task, qkvi_row_block *block, const qkvi_head_ranges *ranges,
                         qkvi_partial *pages, qkvi_partial *tail) {
  const qkv_layer *layer = task->layer;
  const qkv_coder *coder = NULL, *ready = NULL;
  size_t dim = task->model->value_dim, range, range_end;
  qkvi_partial own;
  qkvi_attend_start(pages, tail->rows, block->sums, dim);
  ranges_of(layer, block->begin_min, block->end_max, &range, &range_end);
  for (; range < range_end; range++) {
    const qkv_coder *next = qkvi_attend_coder(layer, range);
    if (coder != NULL && next != coder) {
      leave_coder(task, coder, block, pages, tail);
      qkvi_attend_start(pages, tail->rows, block->sums, dim);
    }
    coder = next;
    qkvi_attend_merge(pages, partial_of(task, block, range, ranges, &ready, &own), dim);
  }
  if (coder != NULL) coder->codec->output(coder, task->kv_head, block->sums, pages->total, pages->rows);
}

static void attend_block(const qkvi_head_task *task, size_t first, size_t rows, const qkvi_head_ranges *ranges) {
  _Alignas(64) qkvi_row_block block;
  const qkv_layer *layer = task->layer;
  size_t dim = task->model->value_dim;
  qkvi_partial tail, pages;
  qkvi_attend_load(task, &block, first, rows);
  for (size_t row = 0; row < rows; row++) {
    float *out = task->request->out + qkvi_attend_output_row(task, first + row) * dim;
    qkvi_attend_start_row(&tail, row, out, dim);
  }
  tail.rows = rows;
  if (block.end_max > layer->sealed) qkvi_attend_tail(task, &block, &tail);
  attend_pages(task, &block, ranges, &pages, &tail);
  for (size_t row = 0; row < rows; row++)
    merge_row(task, qkvi_attend_output_row(task, first + row), row, &tail, &pages);
}

qkvi_head_task qkvi_attend_task(const qkv_attend *request, uint16_t kv_head) {
  const qkv_model *model = request->layer->config.model;
  const qkv_attend_options *options = &request->options;
  return (qkvi_head_task){
      .request = request,
      .layer = request->layer,
      .model = model,
      .kv_head = kv_head,
      .group = model->q_heads / model->kv_heads,
      .scale = (float)(options->scale != 0 ? options->scale : model->scale),
      .soft_cap =
          (float)(options->soft_cap != 0 ? options->soft_cap : qkv_model_cap(model, request->layer->config.layer))};
}

// (Query, head) rows of one KV head.
size_t qkvi_attend_rows(const qkv_attend *request) {
  const qkv_model *model = request->layer->config.model;
  assert(model->kv_heads > 0);
  return (size_t)request->q.dims[0] * (model->q_heads / model->kv_heads);
}

bool qkvi_attend_stopped(const qkv_attend *request) {
  return request->stopped != NULL && request->stopped(request->stopped_context);
}

void qkvi_attend_head(const qkv_attend *request, uint16_t kv_head, const qkvi_head_ranges *ranges) {
  qkvi_head_task task = qkvi_attend_task(request, kv_head);
  size_t rows = qkvi_attend_rows(request);
  assert(ranges == NULL || rows <= QKV_QUERY_BLOCK);
  for (size_t first = 0; first < rows && !qkvi_attend_stopped(request); first += QKV_QUERY_BLOCK) {
    attend_block(&task, first, rows - first < QKV_QUERY_BLOCK ? rows - first : QKV_QUERY_BLOCK, ranges);
  }
}

void qkvi_attend_ranges(const qkv_attend *request, size_t *first, size_t *end) {
  uint64_t begin, end_position, unused;
  qkvi_attend_visible(request, 0, &begin, &unused);
  qkvi_attend_visible(request, (uint64_t)request->q.dims[0] - 1, &unused, &end_position);
  ranges_of(request->layer, begin, end_position, first, end);
}

// ---- What is learnt from queries ----

// A token's queries [q_heads][key_dim] as they are attended, times the scale. False: they stand before position 0.
static bool load_token(const qkv_attend *request, uint64_t query, float *rows) {
  const qkv_model *model = request->layer->config.model;
  const qkvi_head_task task = qkvi_attend_task(request, 0);
  const int64_t stand = qkvi_attend_stand(request, query);
  if (stand < 0) return false;
  for (uint32_t head = 0; head < model->q_heads; head++) {
    float *row = rows + (size_t)head * model->key_dim;
    qkv_tensor_row(&request->q, (int64_t)query, head, row);
    if (request->q_before_rope && model->rope.theta != 0) qkv_rope_forward(&model->rope, row, (uint64_t)stand);
    for (size_t i = 0; i < model->key_dim; i++) row[i] *= task.scale;
  }
  return true;
}

// Some of the queries of a request, evenly spread, teach the model's calibration.
static void teach(const qkv_attend *request) {
  const qkv_model *model = request->layer->config.model;
  const uint32_t layer = request->layer->config.layer;
  if (model->learner == NULL || !request->layer->config.policy.learn) return;
  if (!request->layer->coder->codec->calibrated) return;
  const uint64_t queries = (uint64_t)request->q.dims[0];
  uint64_t wanted = qkv_learner_wants_queries(model->learner, layer);
  if (wanted > queries) wanted = queries;
  if (wanted == 0 || qkvi_attend_stand(request, 0) < 0) return;
  float *rows = malloc((size_t)model->q_heads * model->key_dim * sizeof *rows);
  if (rows == NULL) return;
  for (uint64_t i = 0; i < wanted; i++) {
    const uint64_t query = i * queries / wanted;
    for (uint32_t head = 0; head < model->q_heads; head++) {
      qkv_tensor_row(&request->q, (int64_t)query, head, rows + (size_t)head * model->key_dim);
    }
    qkv_learner_queries(model->learner, layer, (uint64_t)qkvi_attend_stand(request, query), rows,
                        request->q_before_rope);
  }
  free(rows);
}

// Some of a request's queries select the tiers of pages to come (quality.h): the last ones, evenly spaced over a
// page's tokens at most.
static void show(const qkv_attend *request) {
  enum { MOST = 2 * QKV_QUALITY_TOKENS };
  const qkv_model *model = request->layer->config.model;
  qkv_quality *quality = request->layer->config.quality;
  if (quality == NULL || request->shown || !qkv_quality_wants(quality)) return;
  float *rows = malloc((size_t)model->q_heads * model->key_dim * sizeof *rows);
  if (rows == NULL) return;
  const uint64_t queries = (uint64_t)request->q.dims[0], span = queries < QKV_PAGE_TOKENS ? queries : QKV_PAGE_TOKENS;
  const uint64_t count = span < MOST ? span : MOST;
  for (uint64_t i = count; i-- > 0;) {
    const uint64_t query = queries - 1 - i * span / count;
    if (load_token(request, query, rows)) {
      qkv_quality_query(quality, (uint64_t)qkvi_attend_stand(request, query), rows);
    }
  }
  free(rows);
}

void qkvi_attend_quietly(const qkv_attend *request) {
  qkvi_attend_batch(NULL, request, 1);
}

void qkv_attend_show(qkv_attend *request) {
  show(request);
  request->shown = true;
}

void qkv_attend_run(qkv_pool *pool, const qkv_attend *requests, size_t count) {
  const int threads = pool == NULL ? 1 : (int)qkv_pool_width(pool);
  qkv_yield_urgent_begin(threads);
  for (size_t i = 0; i < count; i++) {
    teach(&requests[i]);
    show(&requests[i]);
  }
  qkvi_attend_batch(pool, requests, count);
  qkvi_attend_sample(pool, requests, count);
  qkv_yield_urgent_end(threads);
}
