// Attention as statistics: the weights of some of the queries, added to the pages' averages.
//
// Attend's own passes are left alone. Of a request that is due (ema.h) the last block of queries meets the coded
// pages once more, now that the log of the softmax's denominator is known: exp(score - LSE) is the weight itself.
// That reads the keys alone, for one block of QKV_QUERY_BLOCK rows in sample_every: 58 % of an attend more for
// one in 16, so 3.6 % on average (ema_test prints it), and as long as the attend itself over 32768 tokens, which come
// from memory twice (`qkv-bench step`, p99 against p50; 3.3 times as long before pages were fetched ahead).
//
// Requests for a part of the pages are not counted: their weights are shares of that part.
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cache/attend_internal.h"
#include "engine/cache/layer_internal.h"
#include "engine/kernel/kernel.h"

enum { AHEAD = 2 };  // pages that are being prefetched

typedef struct sample {
  const qkv_attend *request;
  qkv_ema_step step;
} sample;

typedef struct sample_batch {
  size_t count;
  size_t heads_max, ranges_max;  // of the request that has most
  float *sums;  // [count][ranges_max][heads_max]: weights of a range's tokens; NULL: there is no memory
  sample samples[];
} sample_batch;

// The mean weight of each of a page's tokens over the block's rows.
static void mean_weights(const qkvi_head_task *task, qkvi_row_block *block, const qkv_page_entry *entry,
                         const float *lse, float mean[QKV_PAGE_TOKENS]) {
  const qkv_kernels *kernels = qkv_kernels_get();
  const size_t rows = block->queries.count;
  entry->coder->codec->scores(entry->coder, entry->page, task->kv_head, &block->queries, block->scores);
  qkvi_attend_cap(task, block, block->scores);
  memset(mean, 0, QKV_PAGE_TOKENS * sizeof *mean);
  for (size_t row = 0; row < rows; row++) {
    float *scores = block->scores + row * QKVI_TILE_TOKENS;
    const size_t first = qkvi_attend_slot(block->begin[row], entry->position, entry->tokens);
    const size_t last = qkvi_attend_slot(block->end[row], entry->position, entry->tokens);
    if (first >= last || lse[row] == -INFINITY) continue;
    qkvi_attend_mask(scores, first, last);
    (void)kernels->weigh(scores, lse[row]);
    for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) mean[t] += scores[t];
  }
  for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) mean[t] /= (float)rows;
}

static float mean_square(const qkvi_head_task *task, const qkv_query_block *queries) {
  const size_t n = queries->count * task->model->key_dim;
  float sum = 0;
  for (size_t i = 0; i < n; i++) sum += queries->rows[i] * queries->rows[i];
  return sum / (float)n;
}

// One KV head and one range of a sample's layer. Returns the sum of the mean weights.
static float sample_range(const sample *due, uint16_t kv_head, size_t range) {
  float sum = 0;
  _Alignas(64) qkvi_row_block block;
  const qkv_layer *layer = due->request->layer;
  const qkvi_head_task task = qkvi_attend_task(due->request, kv_head);
  const size_t rows = qkvi_attend_rows(due->request);
  float lse[QKV_QUERY_BLOCK] = {0}, mean[QKV_PAGE_TOKENS];
  size_t i, end;
  const size_t first = rows < QKV_QUERY_BLOCK ? 0 : rows - QKV_QUERY_BLOCK;
  qkvi_attend_load(&task, &block, first, rows - first);
  for (size_t row = 0; row < block.queries.count; row++) {
    lse[row] = due->request->lse[qkvi_attend_output_row(&task, first + row)];
  }
  if (range == 0) qkv_ema_clock_add_size(layer->clock, kv_head, &due->step, mean_square(&task, &block.queries));
  qkv_layer_range(layer, range, &i, &end);
  const qkv_coder *coder = layer->ranges[range].range->coder;
  coder->codec->query(coder, kv_head, &block.queries);
  for (; i < end && qkvi_layer_span(layer, i).begin < block.end_max; i++) {
    if (qkvi_layer_span(layer, i).end <= block.begin_min) continue;
    const qkv_page_entry *entry = qkv_layer_page(layer, i);
    qkvi_attend_fetch(layer, &block, 0, i + AHEAD, QKV_K);
    qkvi_attend_fetch_directory(layer, kv_head, i + QKVI_DIRECTORY_AHEAD);
    const qkv_ema *next = i + AHEAD < end ? qkv_layer_ema(layer, i + AHEAD) : NULL;
    if (next != NULL) qkv_ema_fetch(next, task.model->kv_heads, kv_head);
    mean_weights(&task, &block, entry, lse, mean);
    qkv_ema *ema = qkvi_layer_need_ema(layer, i);
    if (ema != NULL) qkv_ema_add(ema, layer->clock, kv_head, &due->step, mean);
    for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) sum += mean[t];
  }
  return sum;
}

static size_t ranges_of(const qkv_layer *layer) {
  return layer->range_count;
}

static void sample_index(void *context, size_t index, size_t worker) {
  (void)worker;
  const sample_batch *batch = context;
  const size_t kv_head = index % batch->heads_max, range = index / batch->heads_max % batch->ranges_max;
  const sample *due = &batch->samples[index / batch->ranges_max / batch->heads_max];
  const qkv_layer *layer = due->request->layer;
  if (kv_head >= layer->config.model->kv_heads || range >= ranges_of(layer)) return;
  const float sum = sample_range(due, (uint16_t)kv_head, range);
  if (batch->sums != NULL) batch->sums[index] = sum;
}

// The attention of ranges as wholes, by which a device chooses those that it has copies of.
static void add_ranges(const sample_batch *batch, size_t index) {
  const sample *due = &batch->samples[index];
  const qkv_layer *layer = due->request->layer;
  const uint32_t heads = layer->config.model->kv_heads;
  for (size_t range = 0; range < ranges_of(layer); range++) {
    qkv_ema_table *emas = atomic_load_explicit(&layer->ranges[range].emas, memory_order_acquire);
    const float *sums = batch->sums + (index * batch->ranges_max + range) * batch->heads_max;
    float sum = 0;
    for (uint32_t h = 0; h < heads; h++) sum += sums[h];
    // What has been sampled is never 0.
    if (emas != NULL)
      qkv_ema_clock_average(layer->clock, &emas->attention, &due->step, fmaxf(sum / (float)heads, FLT_MIN));
  }
}

static bool is_whole(const qkv_attend *request) {
  const qkv_attend_options *options = &request->options;
  const qkv_layer *layer = request->layer;
  return options->begin <= layer->config.first_position && (options->end == 0 || options->end >= layer->sealed);
}

// Counts a request. Whether it is due; then fills `due`.
static bool count_request(const qkv_attend *request, sample *due) {
  const qkv_layer *layer = request->layer;
  if (layer->clock == NULL || layer->page_count == 0 || request->continues || !is_whole(request)) return false;
  const uint64_t own = (uint64_t)request->q.dims[0], queries = own + request->earlier;
  const uint64_t blocks = (qkvi_attend_rows(request) / own * queries + QKV_QUERY_BLOCK - 1) / QKV_QUERY_BLOCK;
  due->request = request;
  if (!qkv_ema_clock_count(layer->clock, queries, blocks, &due->step)) return false;
  // What has been stopped may have no LSE.
  return request->stopped == NULL || !request->stopped(request->stopped_context);
}

static void add_sample(sample_batch *batch, const sample *due) {
  const qkv_layer *layer = due->request->layer;
  const size_t heads = layer->config.model->kv_heads, ranges = ranges_of(layer);
  batch->samples[batch->count++] = *due;
  if (heads > batch->heads_max) batch->heads_max = heads;
  if (ranges > batch->ranges_max) batch->ranges_max = ranges;
}

void qkvi_attend_sample(qkv_pool *pool, const qkv_attend *requests, size_t count) {
  sample_batch *batch = NULL;
  for (size_t i = 0; i < count; i++) {
    sample due;
    if (!count_request(&requests[i], &due)) continue;
    if (batch == NULL) batch = calloc(1, sizeof *batch + (count - i) * sizeof(sample));
    if (batch == NULL) return;  // a statistic less
    add_sample(batch, &due);
  }
  if (batch == NULL) return;
  const size_t tasks = batch->count * batch->heads_max * batch->ranges_max;
  batch->sums = calloc(tasks > 0 ? tasks : 1, sizeof *batch->sums);
  if (pool != NULL) qkv_pool_loop(pool, tasks, sample_index, batch);
  for (size_t i = 0; pool == NULL && i < tasks; i++) sample_index(batch, i, 0);
  for (size_t i = 0; batch->sums != NULL && i < batch->count; i++) add_ranges(batch, i);
  free(batch->sums);
  free(batch);
}
