#include "engine/cache/attend.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/precedence.h"
#include "engine/cache/attend_internal.h"
#include "engine/kernel/kernel.h"

// A task takes the (query, head) rows of its KV head in blocks. A block is attended twice, over the exact tail
// and over the pages, each with running softmax statistics of its own, and the two partial results are merged
// as everywhere by their statistics: so the pages' sums stay in code space until the end, or until pages of another
// coder follow. The pages are taken in the layer's ranges, each with statistics of its own, merged in order.
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

static void start_row(qkvi_partial *partial, size_t row, float *sums, size_t dim) {
  memset(sums, 0, dim * sizeof *sums);
  partial->sums[row] = sums;
  partial->peak[row] = -INFINITY;
  partial->total[row] = 0;
}

// sums [rows][dim]
static void start_rows(qkvi_partial *partial, size_t rows, float *sums, size_t dim) {
  for (size_t row = 0; row < rows; row++) start_row(partial, row, sums + row * dim, dim);
  partial->rows = rows;
}

// What the block sees of one range; its queries are ready for that range's coder. Sums [rows][value_dim] are in code
// space.
static void attend_range(const qkvi_head_task *task, qkvi_row_block *block, size_t range, float *sums,
                         qkvi_partial *partial) {
  const qkv_layer *layer = task->layer;
  size_t i, end, seen = qkv_layer_page_at(layer, block->begin_min);
  start_rows(partial, block->queries.count, sums, task->model->value_dim);
  qkv_layer_range(layer, range, &i, &end);
  if (i < seen) i = seen;
  qkvi_attend_runs(task, block, i, end, sums, partial);
}

static const qkv_coder *coder_of(const qkv_layer *layer, size_t range) {
  size_t first, end;
  qkv_layer_range(layer, range, &first, &end);
  return layer->pages[first].coder;
}

// `partial` becomes that of both; its sums stay where they are.
static void merge_partial(qkvi_partial *partial, const qkvi_partial *other, size_t dim) {
  assert(partial->rows == other->rows);
  for (size_t row = 0; row < other->rows; row++) {
    if (other->peak[row] == -INFINITY) continue;
    float peak = partial->peak[row] > other->peak[row] ? partial->peak[row] : other->peak[row];
    double share = exp((double)partial->peak[row] - (double)peak);
    double other_share = exp((double)other->peak[row] - (double)peak);
    float *sums = partial->sums[row];
    const float *other_sums = other->sums[row];
    for (size_t i = 0; i < dim; i++) sums[i] = sums[i] * (float)share + other_sums[i] * (float)other_share;
    partial->total[row] = share * partial->total[row] + other_share * other->total[row];
    partial->peak[row] = peak;
  }
}

// The ranges [*first, *end) that hold the pages of positions [begin, end); none where they are all in the tail.
static void ranges_of(const qkv_layer *layer, uint64_t begin, uint64_t end, size_t *first, size_t *range_end) {
  *first = *range_end = 0;
  if (begin >= end || begin >= layer->sealed) return;
  uint64_t last = end < layer->sealed ? end - 1 : layer->sealed - 1;
  *first = layer->pages[qkv_layer_page_at(layer, begin)].range;
  *range_end = (size_t)layer->pages[qkv_layer_page_at(layer, last)].range + 1;
}

// ---- Blocks ----

// Where the block's row goes in out and lse, in rows.
size_t qkvi_attend_output_row(const qkvi_head_task *task, size_t flat) {
  size_t query = flat / task->group, head = task->kv_head * task->group + flat % task->group;
  return query * task->model->q_heads + head;
}

void qkvi_attend_load(const qkvi_head_task *task, qkvi_row_block *block) {
  const qkv_attend *request = task->request;
  bool rotate = request->q_before_rope && task->model->rope.theta != 0;
  block->queries.precision = request->options.precision;
  if (block->queries.precision != QKV_PRECISION_FP32) qkvi_layouts_clear(&block->queries.layouts);
  block->begin_min = block->end_min = UINT64_MAX;
  block->begin_max = block->end_max = 0;
  qkv_rope_turns turns;
  for (size_t row = 0; row < block->queries.count; row++) {
    size_t query = (block->first + row) / task->group;
    size_t head = task->kv_head * task->group + (block->first + row) % task->group;
    float *out = block->queries.rows + row * task->model->key_dim;
    qkv_tensor_row(&request->q, (int64_t)query, (int64_t)head, out);
    if (rotate && (row == 0 || head % task->group == 0)) {  // the heads of a query are at one position
      qkv_rope_find_turns(&task->model->rope, (uint64_t)qkvi_attend_stand(request, query), &turns);
    }
    if (rotate) qkv_rope_turn(&task->model->rope, &turns, out);
    for (size_t i = 0; i < task->model->key_dim; i++) out[i] *= task->scale;

    qkvi_attend_visible(request, query, &block->begin[row], &block->end[row]);
    if (block->begin[row] > block->begin_max) block->begin_max = block->begin[row];
    if (block->end[row] < block->end_min) block->end_min = block->end[row];
    if (block->begin[row] >= block->end[row]) continue;
    if (block->begin[row] < block->begin_min) block->begin_min = block->begin[row];
    if (block->end[row] > block->end_max) block->end_max = block->end[row];
  }
}

// out and LSE of a row from its two parts, whose statistics may be those of nothing.
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
  double tail_share = exp((double)tail->peak[row] - (double)peak);
  double pages_share = exp((double)pages->peak[row] - (double)peak);
  double total = tail_share * tail->total[row] + pages_share * pages->total[row];
  float tail_factor = (float)(tail_share / total), pages_factor = (float)(pages_share / total);
  for (size_t i = 0; i < dim; i++) out[i] = out[i] * tail_factor + sums[i] * pages_factor;
  *lse = (float)((double)peak + log(total));
}

// The ranges' partial results of a head's only block: `partials` of ranges from `first` on.
typedef struct head_ranges {
  size_t first;
  const qkvi_partial *partials;
} head_ranges;

// The pages' sums so far leave code space and join the tail's, whose partial result this becomes.
static void leave_coder(const qkvi_head_task *task, const qkv_coder *coder, qkvi_row_block *block,
                        const qkvi_partial *pages, qkvi_partial *tail) {
  coder->codec->output(coder, task->kv_head, block->sums, pages->total, pages->rows);
  merge_partial(tail, pages, task->model->value_dim);
}

// `ranges` NULL: none has been computed yet.
static void attend_pages(const qkvi_head_task *task, qkvi_row_block *block, const head_ranges *ranges,
                         qkvi_partial *pages, qkvi_partial *tail) {
  const qkv_layer *layer = task->layer;
  const qkv_coder *coder = NULL;
  size_t dim = task->model->value_dim, range, range_end;
  qkvi_partial own;
  start_rows(pages, tail->rows, block->sums, dim);
  ranges_of(layer, block->begin_min, block->end_max, &range, &range_end);
  for (; range < range_end; range++) {
    const qkv_coder *next = coder_of(layer, range);
    if (next != coder) {
      if (coder != NULL) {
        leave_coder(task, coder, block, pages, tail);
        start_rows(pages, tail->rows, block->sums, dim);
      }
      coder = next;
      if (ranges == NULL) coder->codec->query(coder, task->kv_head, &block->queries);
    }
    if (ranges == NULL) attend_range(task, block, range, block->part, &own);
    merge_partial(pages, ranges == NULL ? &own : &ranges->partials[range - ranges->first], dim);
  }
  if (coder != NULL) coder->codec->output(coder, task->kv_head, block->sums, pages->total, pages->rows);
}

static void attend_block(const qkvi_head_task *task, size_t first, size_t rows, const head_ranges *ranges) {
  _Alignas(64) qkvi_row_block block;
  const qkv_layer *layer = task->layer;
  size_t dim = task->model->value_dim;
  qkvi_partial tail, pages;
  block.first = first;
  block.queries.count = rows;
  qkvi_attend_load(task, &block);
  for (size_t row = 0; row < rows; row++) {
    start_row(&tail, row, task->request->out + qkvi_attend_output_row(task, first + row) * dim, dim);
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

static bool is_stopped(const qkv_attend *request) {
  return request->stopped != NULL && request->stopped(request->stopped_context);
}

static void attend_head(const qkv_attend *request, uint16_t kv_head, const head_ranges *ranges) {
  qkvi_head_task task = qkvi_attend_task(request, kv_head);
  size_t rows = qkvi_attend_rows(request);
  assert(ranges == NULL || rows <= QKV_QUERY_BLOCK);
  for (size_t first = 0; first < rows && !is_stopped(request); first += QKV_QUERY_BLOCK) {
    attend_block(&task, first, rows - first < QKV_QUERY_BLOCK ? rows - first : QKV_QUERY_BLOCK, ranges);
  }
}

// Some ranges for a head's only block: sums [ranges][rows][value_dim], partials [ranges].
static void attend_head_ranges(const qkv_attend *request, uint16_t kv_head, size_t first, size_t end, float *sums,
                               qkvi_partial *partials) {
  _Alignas(64) qkvi_row_block block;
  const qkvi_head_task task = qkvi_attend_task(request, kv_head);
  const size_t rows = qkvi_attend_rows(request);
  const qkv_coder *coder = NULL;
  block.first = 0;
  block.queries.count = rows;
  qkvi_attend_load(&task, &block);
  for (size_t range = first; range < end && !is_stopped(request); range++) {
    const qkv_coder *next = coder_of(request->layer, range);
    if (next != coder) next->codec->query(next, kv_head, &block.queries);
    coder = next;
    attend_range(&task, &block, range, sums + (range - first) * rows * task.model->value_dim,
                 &partials[range - first]);
  }
}

// ---- Batches ----

// Ranges become tasks of their own for two reasons, and those of all heads follow each other:
//
// Threads that others keep from running do not have the last word where each has some tasks.
//
// A page has all heads, so a head after the other goes through the same memory as often as there are heads. Beyond
// some hundred megabytes every round finds the tables of addresses fallen out of the caches. At 1048576 tokens, one
// thread and four query heads 64 ns a token instead of 83 with one or two ranges a task, 77 with 16; at one query
// head 53 instead of
// 80. A task costs about a microsecond, 6 % of a range's time.
#define TASKS_A_THREAD 16
#define RANGES_FAR 32
#define RANGES_TOGETHER 2
#define SPLIT_BYTES_MAX ((size_t)64 << 20)  // of partial results at once

// The ranges of one request that are tasks of their own: [first, first + count) for every KV head, `each` a task.
typedef struct split {
  size_t first, count;     // count 0: not split
  size_t each;             // ranges of a task, the last one may have less
  qkvi_partial *partials;  // [kv_heads][count]
  float *sums;             // [kv_heads][count][rows][value_dim]
} split;

typedef struct split_task {
  size_t place, first;  // in the batch, and in the split's ranges
  uint16_t kv_head;
} split_task;

typedef struct attend_batch {
  const qkv_attend *requests;
  size_t count;
  size_t heads_max;   // KV heads of the request that has most
  size_t task_count;  // of split requests
  split *splits;      // [count], then all tasks, all partials and all sums; NULL: nothing is split
  split_task *tasks;
} attend_batch;

static void attend_index(void *context, size_t index, size_t worker) {
  (void)worker;
  const attend_batch *batch = context;
  const qkv_attend *request = &batch->requests[index / batch->heads_max];
  size_t kv_head = index % batch->heads_max;
  if (kv_head >= request->layer->config.model->kv_heads) return;
  const split *ranges = batch->splits != NULL ? &batch->splits[index / batch->heads_max] : NULL;
  if (ranges == NULL || ranges->count == 0) return attend_head(request, (uint16_t)kv_head, NULL);
  attend_head(request, (uint16_t)kv_head,
              &(head_ranges){.first = ranges->first, .partials = ranges->partials + kv_head * ranges->count});
}

static void attend_split_index(void *context, size_t index, size_t worker) {
  (void)worker;
  const attend_batch *batch = context;
  const split_task *task = &batch->tasks[index];
  const qkv_attend *request = &batch->requests[task->place];
  const split *ranges = &batch->splits[task->place];
  const size_t end = task->first + ranges->each < ranges->count ? task->first + ranges->each : ranges->count;
  const size_t at = task->kv_head * ranges->count + task->first;
  attend_head_ranges(request, task->kv_head, ranges->first + task->first, ranges->first + end,
                     ranges->sums + at * qkvi_attend_rows(request) * request->layer->config.model->value_dim,
                     &ranges->partials[at]);
}

// The ranges that a head's task has.
static split ranges_seen(const qkv_attend *request) {
  uint64_t begin, end, unused;
  split plan = {0};
  qkvi_attend_visible(request, 0, &begin, &unused);
  qkvi_attend_visible(request, (uint64_t)request->q.dims[0] - 1, &unused, &end);
  ranges_of(request->layer, begin, end, &plan.first, &plan.count);
  plan.count -= plan.first;
  return plan;
}

// Only requests of one block are split: larger ones have work enough, and their partial results would take room.
static split plan_split(const qkv_attend *request, size_t each) {
  split plan = ranges_seen(request);
  plan.each = plan.count >= RANGES_FAR && each > RANGES_TOGETHER ? RANGES_TOGETHER : each;
  if (plan.count <= plan.each || qkvi_attend_rows(request) > QKV_QUERY_BLOCK) plan.count = 0;
  return plan;
}

// Room for a partial result of every range and head, and for as many tasks.
static size_t split_bytes(const qkv_attend *request, const split *plan) {
  const qkv_model *model = request->layer->config.model;
  return plan->count * model->kv_heads *
         (sizeof(split_task) + sizeof(qkvi_partial) + qkvi_attend_rows(request) * model->value_dim * sizeof(float));
}

static void add_tasks(attend_batch *batch, size_t place) {
  const split *plan = &batch->splits[place];
  const size_t heads = batch->requests[place].layer->config.model->kv_heads;
  for (size_t first = 0; first < plan->count; first += plan->each) {
    for (size_t head = 0; head < heads; head++)
      batch->tasks[batch->task_count++] = (split_task){.place = place, .first = first, .kv_head = (uint16_t)head};
  }
}

// Plans the splits of a batch, whose partial results take `bytes`, in one block of memory. Leaves `splits` NULL where
// there is none.
static void split_batch(attend_batch *batch, size_t each, size_t bytes) {
  batch->splits = malloc(batch->count * sizeof(split) + bytes);
  if (batch->splits == NULL) return;
  size_t partials = 0;
  for (size_t i = 0; i < batch->count; i++) {
    batch->splits[i] = plan_split(&batch->requests[i], each);
    partials += batch->splits[i].count * batch->requests[i].layer->config.model->kv_heads;
  }
  batch->tasks = (split_task *)(batch->splits + batch->count);
  qkvi_partial *next_partial = (qkvi_partial *)(batch->tasks + partials);
  float *next_sums = (float *)(next_partial + partials);
  for (size_t i = 0; i < batch->count; i++) {
    const qkv_model *model = batch->requests[i].layer->config.model;
    batch->splits[i].partials = next_partial;
    batch->splits[i].sums = next_sums;
    next_partial += batch->splits[i].count * model->kv_heads;
    next_sums += batch->splits[i].count * model->kv_heads * qkvi_attend_rows(&batch->requests[i]) * model->value_dim;
    add_tasks(batch, i);
  }
}

// The first requests, as many as partial results have room for; one that is too large for that is not split.
static attend_batch first_batch(const qkv_attend *requests, size_t count, size_t each) {
  attend_batch batch = {.requests = requests};
  size_t bytes = 0;
  for (; batch.count < count; batch.count++) {
    const split plan = plan_split(&requests[batch.count], each);
    const size_t more = split_bytes(&requests[batch.count], &plan);
    if (batch.count > 0 && bytes + more > SPLIT_BYTES_MAX) break;
    bytes += more;
    const size_t heads = requests[batch.count].layer->config.model->kv_heads;
    if (heads > batch.heads_max) batch.heads_max = heads;
  }
  if (bytes > 0 && bytes <= SPLIT_BYTES_MAX) split_batch(&batch, each, bytes);
  return batch;
}

static void run_loop(qkv_pool *pool, size_t count, qkv_loop_fn *run, void *context) {
  if (pool != NULL) return qkv_pool_loop(pool, count, run, context);
  for (size_t i = 0; i < count; i++) run(context, i, 0);
}

// Ranges that a task should have, for threads to be busy to the end.
static size_t ranges_each(const qkv_pool *pool, const qkv_attend *requests, size_t count) {
  const size_t width = pool == NULL ? 1 : qkv_pool_width(pool);
  size_t all = 0;
  if (width == 1) return SIZE_MAX;
  for (size_t i = 0; i < count; i++)
    all += ranges_seen(&requests[i]).count * requests[i].layer->config.model->kv_heads;
  return (all + TASKS_A_THREAD * width - 1) / (TASKS_A_THREAD * width);
}

static void run_batch(qkv_pool *pool, const qkv_attend *requests, size_t count) {
  const size_t each = ranges_each(pool, requests, count);
  for (size_t first = 0; first < count;) {
    attend_batch batch = first_batch(requests + first, count - first, each);
    if (batch.splits != NULL) run_loop(pool, batch.task_count, attend_split_index, &batch);
    run_loop(pool, batch.count * batch.heads_max, attend_index, &batch);
    free(batch.splits);
    first += batch.count;
  }
}

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

// Some of the queries of a request are what pages to come are judged by: the last ones, evenly spaced over a page's
// tokens at most.
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
  run_batch(NULL, request, 1);
}

void qkv_attend_show(qkv_attend *request) {
  show(request);
  request->shown = true;
}

void qkv_attend_run(qkv_pool *pool, const qkv_attend *requests, size_t count) {
  const int threads = pool == NULL ? 1 : (int)qkv_pool_width(pool);
  qkv_precedence_begin(threads);
  for (size_t i = 0; i < count; i++) {
    teach(&requests[i]);
    show(&requests[i]);
  }
  run_batch(pool, requests, count);
  qkvi_attend_sample(pool, requests, count);
  qkv_precedence_end(threads);
}

uint64_t qkv_attend_cost(const qkv_attend *request) {
  const qkv_layer *layer = request->layer;
  const qkv_model *model = layer->config.model;
  uint64_t queries = (uint64_t)request->q.dims[0], begin, end, unused;
  qkvi_attend_visible(request, 0, &begin, &unused);
  qkvi_attend_visible(request, queries - 1, &unused, &end);
  if (begin >= end) return 0;
  uint64_t bytes = 0;
  for (size_t i = qkv_layer_page_at(layer, begin); i < layer->page_count; i++) {
    if (layer->pages[i].position >= end) break;
    bytes += layer->pages[i].bytes;
  }
  if (end > layer->sealed) {
    uint64_t exact = end - (begin > layer->sealed ? begin : layer->sealed);
    bytes += exact * model->kv_heads * (model->key_dim + model->value_dim) * qkv_dtype_size(model->dtype);
  }
  uint64_t rows = queries * (model->q_heads / model->kv_heads);
  return bytes * ((rows + QKV_QUERY_BLOCK - 1) / QKV_QUERY_BLOCK);
}
