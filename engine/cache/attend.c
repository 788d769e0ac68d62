#include "engine/cache/attend.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/kernel/kernel.h"

// A task takes the (query, head) rows of its KV head in blocks. A block is attended twice, over the exact tail
// and over the pages, each with running softmax statistics of its own, and the two partial results are merged
// as everywhere by their statistics: so the pages' sums stay in code space until the end. The pages are taken in
// ranges of RANGE_PAGES, counted from the layer's first, each range with statistics of its own, merged in order.
// Where a run has too few heads for the pool, ranges become tasks and the merge follows; the arithmetic is the same
// in both cases, so that numbers depend neither on the threads nor on what else is in the batch.
//
// The positions that a query sees are one interval, whatever the options.

#define TILE_TOKENS QKV_PAGE_TOKENS  // tokens whose scores are taken at once
#define TILE_WIDTH 64                // coordinates of exact keys that are transposed at once
#define RANGE_PAGES 64               // 4096 tokens
#define LANES 16                     // sums kept side by side, so that the compiler can vectorize without reordering

typedef struct head_task {
  const qkv_attend *request;
  const qkv_layer *layer;
  const qkv_model *model;
  qkv_page_shape shape;
  uint16_t kv_head;
  size_t group;  // query heads of a KV head
  float scale, soft_cap;
} head_task;

// Running softmax over tiles.
typedef struct partial_sums {
  size_t rows;
  float *sums[QKV_QUERY_BLOCK];   // [value_dim] each: of exp(score - peak) * v
  float peak[QKV_QUERY_BLOCK];    // -inf while nothing was visible
  double total[QKV_QUERY_BLOCK];  // sum of exp(score - peak)
} partial_sums;

// About 400 KB of stack at the widest rows. Rows are dense, so narrow ones touch little of it.
typedef struct query_block {
  size_t first, rows;                                     // of query * group + head in the group
  uint64_t begin[QKV_QUERY_BLOCK], end[QKV_QUERY_BLOCK];  // positions that a row sees
  uint64_t begin_min, end_max;
  float queries[QKV_QUERY_BLOCK * QKV_DIM_MAX];  // [rows][key_dim], times the scale
  float scores[QKV_QUERY_BLOCK * TILE_TOKENS];   // [rows][TILE_TOKENS]; weights once folded
  float sums[QKV_QUERY_BLOCK * QKV_DIM_MAX];     // [rows][value_dim], of the pages; the tail's are in `out`
  float part[QKV_QUERY_BLOCK * QKV_DIM_MAX];     // the same of one range
} query_block;

// ---- What a query sees ----

static uint64_t window_of(const qkv_attend *request) {
  uint64_t asked = request->options.sliding_window;
  return asked != 0 ? asked : request->layer->config.model->sliding_window;
}

static int64_t stand_of(const qkv_attend *request, uint64_t query) {
  return (int64_t)request->position + request->options.causal_offset + (int64_t)query;
}

// [*begin, *end); empty where begin >= end.
static void visible(const qkv_attend *request, uint64_t query, uint64_t *begin, uint64_t *end) {
  const qkv_layer *layer = request->layer;
  const qkv_attend_options *options = &request->options;
  *begin = layer->config.first_position;
  *end = layer->length;
  if (options->begin > *begin) *begin = options->begin;
  if (options->end != 0 && options->end < *end) *end = options->end;
  if (options->not_causal) return;

  int64_t stand = stand_of(request, query);
  uint64_t seen = stand < 0 ? 0 : (uint64_t)stand + 1;
  uint64_t window = window_of(request);
  if (seen < *end) *end = seen;
  if (window != 0 && seen > window && seen - window > *begin) *begin = seen - window;
}

// ---- Folding a tile of scores into a partial result ----

static void cap_scores(const head_task *task, const query_block *block, float *scores) {
  if (task->soft_cap == 0) return;
  for (size_t i = 0; i < block->rows * TILE_TOKENS; i++) {
    scores[i] = task->soft_cap * tanhf(scores[i] / task->soft_cap);
  }
}

// Only slots [first, last) of a row's tile are seen.
static void mask(float *scores, size_t first, size_t last) {
  for (size_t t = 0; t < first; t++) scores[t] = -INFINITY;
  for (size_t t = last; t < TILE_TOKENS; t++) scores[t] = -INFINITY;
}

static size_t slot_of(uint64_t position, uint64_t tile_position, size_t tokens) {
  if (position <= tile_position) return 0;
  uint64_t slot = position - tile_position;
  return slot < tokens ? (size_t)slot : tokens;
}

// The scores of a tile whose first token stands at `position` and of which `tokens` are valid: masks them,
// moves the statistics on and leaves the weights. False where no row sees anything of the tile.
static bool fold(const head_task *task, query_block *block, partial_sums *partial, uint64_t position, size_t tokens) {
  bool any = false;
  size_t dim = task->model->value_dim;
  const qkv_kernels *kernels = qkv_kernels_get();
  cap_scores(task, block, block->scores);
  for (size_t row = 0; row < block->rows; row++) {
    float *scores = block->scores + row * TILE_TOKENS;
    size_t first = slot_of(block->begin[row], position, tokens), last = slot_of(block->end[row], position, tokens);
    if (first >= last) {
      memset(scores, 0, TILE_TOKENS * sizeof *scores);
      continue;
    }
    any = true;
    mask(scores, first, last);
    float largest = kernels->largest(scores);
    if (largest > partial->peak[row]) {
      float decay = qkv_exp_negative(partial->peak[row] - largest);
      float *sums = partial->sums[row];
      for (size_t i = 0; i < dim; i++) sums[i] *= decay;
      partial->total[row] *= (double)decay;
      partial->peak[row] = largest;
    }
    partial->total[row] += kernels->weigh(scores, partial->peak[row]);
  }
  return any;
}

// ---- The exact tail ----

// A tile's tokens up to whole lanes.
static size_t lanes_of(size_t tokens) {
  return (tokens + LANES - 1) / LANES * LANES;
}

// keys [TILE_WIDTH][TILE_TOKENS]: coordinates [c, c + width) of a tile's keys, transposed; zeros fill the lanes.
static void transpose_keys(const head_task *task, uint64_t position, size_t tokens, size_t c, size_t width,
                           float *keys) {
  qkv_dtype dtype = task->model->dtype;
  float part[TILE_WIDTH];
  for (size_t i = 0; i < width; i++) {
    for (size_t t = tokens; t < lanes_of(tokens); t++) keys[i * TILE_TOKENS + t] = 0;
  }
  for (size_t t = 0; t < tokens; t++) {
    const uint8_t *row = qkv_layer_exact_row(task->layer, QKV_K, position + t, task->kv_head);
    qkv_to_float(dtype, row + c * qkv_dtype_size(dtype), part, width);
    for (size_t i = 0; i < width; i++) keys[i * TILE_TOKENS + t] = part[i];
  }
}

// scores[tokens, up to whole lanes] += query[width] . keys[width][TILE_TOKENS], over coordinates in order.
static void add_scores(const float *query, const float *keys, size_t width, size_t tokens, float *scores) {
  for (size_t t = 0; t < tokens; t += LANES) {
    float lanes[LANES];
    memcpy(lanes, scores + t, sizeof lanes);
    for (size_t c = 0; c < width; c++) {
      for (size_t i = 0; i < LANES; i++) lanes[i] += query[c] * keys[c * TILE_TOKENS + t + i];
    }
    memcpy(scores + t, lanes, sizeof lanes);
  }
}

static void score_exact(const head_task *task, query_block *block, uint64_t position, size_t tokens) {
  float keys[TILE_WIDTH * TILE_TOKENS];
  size_t dim = task->model->key_dim;
  memset(block->scores, 0, block->rows * TILE_TOKENS * sizeof *block->scores);
  for (size_t c = 0; c < dim; c += TILE_WIDTH) {
    size_t width = dim - c < TILE_WIDTH ? dim - c : TILE_WIDTH;
    transpose_keys(task, position, tokens, c, width, keys);
    for (size_t row = 0; row < block->rows; row++) {
      add_scores(block->queries + row * dim + c, keys, width, tokens, block->scores + row * TILE_TOKENS);
    }
  }
}

static void accumulate_exact(const head_task *task, const query_block *block, uint64_t position, size_t tokens,
                             partial_sums *partial) {
  float value[QKV_DIM_MAX];
  size_t dim = task->model->value_dim;
  for (size_t t = 0; t < tokens; t++) {
    qkv_to_float(task->model->dtype, qkv_layer_exact_row(task->layer, QKV_V, position + t, task->kv_head), value,
                 dim);
    for (size_t row = 0; row < block->rows; row++) {
      float weight = block->scores[row * TILE_TOKENS + t];
      float *sums = partial->sums[row];
      for (size_t i = 0; i < dim; i++) sums[i] += weight * value[i];
    }
  }
}

// Tiles begin at whole blocks, so that a row's sums do not depend on what other rows of its block see.
static void attend_tail(const head_task *task, query_block *block, partial_sums *partial) {
  const qkv_layer *layer = task->layer;
  uint64_t begin = block->begin_min > layer->sealed ? block->begin_min : layer->sealed;
  uint64_t position = layer->sealed + (begin - layer->sealed) / TILE_TOKENS * TILE_TOKENS;
  for (; position < block->end_max; position += TILE_TOKENS) {
    size_t tokens = layer->length - position < TILE_TOKENS ? (size_t)(layer->length - position) : TILE_TOKENS;
    score_exact(task, block, position, tokens);
    if (fold(task, block, partial, position, tokens)) accumulate_exact(task, block, position, tokens, partial);
  }
}

// ---- The pages ----

static void start_row(partial_sums *partial, size_t row, float *sums, size_t dim) {
  memset(sums, 0, dim * sizeof *sums);
  partial->sums[row] = sums;
  partial->peak[row] = -INFINITY;
  partial->total[row] = 0;
}

// sums [rows][dim]
static void start_rows(partial_sums *partial, size_t rows, float *sums, size_t dim) {
  for (size_t row = 0; row < rows; row++) start_row(partial, row, sums + row * dim, dim);
  partial->rows = rows;
}

// What the block sees of one range. Queries and sums [rows][value_dim] are in code space.
static void attend_range(const head_task *task, query_block *block, size_t range, float *sums,
                         partial_sums *partial) {
  const qkv_layer *layer = task->layer;
  const qkv_codec *codec = layer->config.policy.codec;
  size_t dim = task->model->value_dim;
  start_rows(partial, block->rows, sums, dim);
  size_t i = qkv_layer_page_at(layer, block->begin_min), end = (range + 1) * RANGE_PAGES;
  if (i < range * RANGE_PAGES) i = range * RANGE_PAGES;
  for (; i < end && i < layer->page_count && layer->pages[i].position < block->end_max; i++) {
    const qkv_page_entry *entry = &layer->pages[i];
    codec->scores(entry->page, task->kv_head, block->queries, block->rows, block->scores);
    if (fold(task, block, partial, entry->position, entry->tokens)) {
      codec->accumulate(entry->page, task->kv_head, block->scores, block->rows, sums);
    }
  }
}

// `partial` becomes that of both; its sums stay where they are.
static void merge_partial(partial_sums *partial, const partial_sums *other, size_t dim) {
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
  *first = qkv_layer_page_at(layer, begin) / RANGE_PAGES;
  *range_end = qkv_layer_page_at(layer, last) / RANGE_PAGES + 1;
}

// ---- Blocks ----

// Where the block's row goes in out and lse, in rows.
static size_t output_row(const head_task *task, size_t flat) {
  size_t query = flat / task->group, head = task->kv_head * task->group + flat % task->group;
  return query * task->model->q_heads + head;
}

static void load_block(const head_task *task, query_block *block) {
  const qkv_attend *request = task->request;
  bool rotate = request->q_before_rope && task->model->rope.theta != 0;
  block->begin_min = UINT64_MAX;
  block->end_max = 0;
  for (size_t row = 0; row < block->rows; row++) {
    size_t query = (block->first + row) / task->group;
    size_t head = task->kv_head * task->group + (block->first + row) % task->group;
    float *out = block->queries + row * task->model->key_dim;
    qkv_tensor_row(&request->q, (int64_t)query, (int64_t)head, out);
    if (rotate) qkv_rope_forward(&task->model->rope, out, (uint64_t)stand_of(request, query));
    for (size_t i = 0; i < task->model->key_dim; i++) out[i] *= task->scale;

    visible(request, query, &block->begin[row], &block->end[row]);
    if (block->begin[row] >= block->end[row]) continue;
    if (block->begin[row] < block->begin_min) block->begin_min = block->begin[row];
    if (block->end[row] > block->end_max) block->end_max = block->end[row];
  }
}

// out and LSE of a row from its two parts, whose statistics may be those of nothing.
static void merge_row(const head_task *task, size_t at, size_t row, const partial_sums *tail,
                      const partial_sums *pages) {
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
  const partial_sums *partials;
} head_ranges;

// `ranges` NULL: none has been computed yet.
static void attend_block(const head_task *task, size_t first, size_t rows, const head_ranges *ranges) {
  _Alignas(64) query_block block;
  const qkv_layer *layer = task->layer;
  const qkv_codec *codec = layer->config.policy.codec;
  size_t dim = task->model->value_dim, range, range_end;
  partial_sums tail, pages, own;
  block.first = first;
  block.rows = rows;
  load_block(task, &block);
  for (size_t row = 0; row < rows; row++) {
    start_row(&tail, row, task->request->out + output_row(task, first + row) * dim, dim);
  }
  tail.rows = rows;
  start_rows(&pages, rows, block.sums, dim);
  if (block.end_max > layer->sealed) attend_tail(task, &block, &tail);
  ranges_of(layer, block.begin_min, block.end_max, &range, &range_end);
  if (range < range_end) {
    if (ranges == NULL) codec->query(&task->shape, layer->config.layer, task->kv_head, block.queries, rows);
    for (; range < range_end; range++) {
      if (ranges == NULL) attend_range(task, &block, range, block.part, &own);
      merge_partial(&pages, ranges == NULL ? &own : &ranges->partials[range - ranges->first], dim);
    }
    codec->output(&task->shape, layer->config.layer, task->kv_head, block.sums, rows);
  }
  for (size_t row = 0; row < rows; row++) merge_row(task, output_row(task, first + row), row, &tail, &pages);
}

static head_task task_of(const qkv_attend *request, uint16_t kv_head) {
  const qkv_model *model = request->layer->config.model;
  const qkv_attend_options *options = &request->options;
  return (head_task){.request = request,
                     .layer = request->layer,
                     .model = model,
                     .shape = qkv_layer_shape(request->layer),
                     .kv_head = kv_head,
                     .group = model->q_heads / model->kv_heads,
                     .scale = (float)(options->scale != 0 ? options->scale : model->scale),
                     .soft_cap = (float)(options->soft_cap != 0 ? options->soft_cap : model->soft_cap)};
}

// (Query, head) rows of one KV head.
static size_t rows_of(const qkv_attend *request) {
  const qkv_model *model = request->layer->config.model;
  assert(model->kv_heads > 0);
  return (size_t)request->q.dims[0] * (model->q_heads / model->kv_heads);
}

static bool is_stopped(const qkv_attend *request) {
  return request->stopped != NULL && request->stopped(request->stopped_context);
}

static void attend_head(const qkv_attend *request, uint16_t kv_head, const head_ranges *ranges) {
  head_task task = task_of(request, kv_head);
  size_t rows = rows_of(request);
  assert(ranges == NULL || rows <= QKV_QUERY_BLOCK);
  for (size_t first = 0; first < rows && !is_stopped(request); first += QKV_QUERY_BLOCK) {
    attend_block(&task, first, rows - first < QKV_QUERY_BLOCK ? rows - first : QKV_QUERY_BLOCK, ranges);
  }
}

// One range for a head's only block.
static void attend_head_range(const qkv_attend *request, uint16_t kv_head, size_t range, float *sums,
                              partial_sums *partial) {
  _Alignas(64) query_block block;
  head_task task = task_of(request, kv_head);
  const qkv_layer *layer = request->layer;
  block.first = 0;
  block.rows = rows_of(request);
  load_block(&task, &block);
  layer->config.policy.codec->query(&task.shape, layer->config.layer, kv_head, block.queries, block.rows);
  attend_range(&task, &block, range, sums, partial);
}

// ---- Batches ----

#define TASKS_A_THREAD 4  // a run with fewer heads than that is split into ranges
#define SPLIT_BYTES_MAX ((size_t)64 << 20)

// The ranges of one request that are tasks of their own: [first, first + count) for every KV head.
typedef struct split {
  size_t first, count;     // count 0: not split
  partial_sums *partials;  // [kv_heads][count]
  float *sums;             // [kv_heads][count][rows][value_dim]
} split;

typedef struct attend_batch {
  const qkv_attend *requests;
  size_t count;
  size_t heads_max;   // KV heads of the request that has most
  size_t ranges_max;  // ranges of the one that is split most
  split *splits;      // [count], then all partials, then all sums; NULL: nothing is split
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

static void attend_range_index(void *context, size_t index, size_t worker) {
  (void)worker;
  const attend_batch *batch = context;
  size_t range = index % batch->ranges_max, kv_head = index / batch->ranges_max % batch->heads_max;
  size_t place = index / batch->ranges_max / batch->heads_max;
  const qkv_attend *request = &batch->requests[place];
  const qkv_model *model = request->layer->config.model;
  const split *ranges = &batch->splits[place];
  if (kv_head >= model->kv_heads || range >= ranges->count || is_stopped(request)) return;
  size_t at = kv_head * ranges->count + range;
  attend_head_range(request, (uint16_t)kv_head, ranges->first + range,
                    ranges->sums + at * rows_of(request) * model->value_dim, &ranges->partials[at]);
}

// Only requests of one block are split: larger ones have work enough, and their partial results would take room.
static split plan_split(const qkv_attend *request) {
  uint64_t begin, end, unused;
  split plan = {0};
  if (rows_of(request) > QKV_QUERY_BLOCK) return plan;
  visible(request, 0, &begin, &unused);
  visible(request, (uint64_t)request->q.dims[0] - 1, &unused, &end);
  ranges_of(request->layer, begin, end, &plan.first, &plan.count);
  plan.count -= plan.first;
  if (plan.count < 2) plan.count = 0;
  return plan;
}

// Plans the splits of all requests, in one block of memory. Leaves `splits` NULL where nothing is to be split, or
// where that would take too much.
static void split_batch(attend_batch *batch) {
  size_t partials = 0, floats = 0;
  for (size_t i = 0; i < batch->count; i++) {
    const qkv_model *model = batch->requests[i].layer->config.model;
    split plan = plan_split(&batch->requests[i]);
    partials += plan.count * model->kv_heads;
    floats += plan.count * model->kv_heads * rows_of(&batch->requests[i]) * model->value_dim;
    if (plan.count > batch->ranges_max) batch->ranges_max = plan.count;
  }
  size_t bytes = batch->count * sizeof(split) + partials * sizeof(partial_sums) + floats * sizeof(float);
  if (partials == 0 || bytes > SPLIT_BYTES_MAX) return;
  batch->splits = malloc(bytes);
  if (batch->splits == NULL) return;
  partial_sums *next_partial = (partial_sums *)(batch->splits + batch->count);
  float *next_sums = (float *)(next_partial + partials);
  for (size_t i = 0; i < batch->count; i++) {
    const qkv_model *model = batch->requests[i].layer->config.model;
    split plan = plan_split(&batch->requests[i]);
    plan.partials = next_partial;
    plan.sums = next_sums;
    next_partial += plan.count * model->kv_heads;
    next_sums += plan.count * model->kv_heads * rows_of(&batch->requests[i]) * model->value_dim;
    batch->splits[i] = plan;
  }
}

void qkv_attend_run(qkv_pool *pool, const qkv_attend *requests, size_t count) {
  attend_batch batch = {.requests = requests, .count = count};
  for (size_t i = 0; i < count; i++) {
    size_t heads = requests[i].layer->config.model->kv_heads;
    if (heads > batch.heads_max) batch.heads_max = heads;
  }
  size_t tasks = count * batch.heads_max;
  if (pool == NULL) {
    for (size_t i = 0; i < tasks; i++) attend_index(&batch, i, 0);
    return;
  }
  size_t width = qkv_pool_width(pool);
  if (width > 1 && tasks < TASKS_A_THREAD * width) split_batch(&batch);
  if (batch.splits != NULL) qkv_pool_loop(pool, tasks * batch.ranges_max, attend_range_index, &batch);
  qkv_pool_loop(pool, tasks, attend_index, &batch);
  free(batch.splits);
}

uint64_t qkv_attend_cost(const qkv_attend *request) {
  const qkv_layer *layer = request->layer;
  const qkv_model *model = layer->config.model;
  uint64_t queries = (uint64_t)request->q.dims[0], begin, end, unused;
  visible(request, 0, &begin, &unused);
  visible(request, queries - 1, &unused, &end);
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

// ---- Checks ----

static qkv_status check_options(const qkv_attend *request, qkv_error *error) {
  const qkv_attend_options *options = &request->options;
  QKV_TRY(qkv_factor_check("options.scale", options->scale, error));
  QKV_TRY(qkv_factor_check("options.soft_cap", options->soft_cap, error));
  if (options->end != 0 && options->begin > options->end) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "options.range.begin is %" PRIu64 ", at most range.end %" PRIu64,
                    options->begin, options->end);
  }
  if (options->not_causal && window_of(request) != 0) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "options.not_causal excludes a sliding window");
  }
  return QKV_OK;
}

static qkv_status check_positions(const qkv_attend *request, qkv_error *error) {
  int64_t offset = request->options.causal_offset, limit = (int64_t)QKV_POSITION_MAX;
  if (request->position > QKV_POSITION_MAX) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "position is %" PRIu64 ", positions end at %" PRIu64,
                    request->position, QKV_POSITION_MAX);
  }
  if (offset > limit || offset < -limit) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT,
                    "options.causal_offset is %" PRId64 ", allowed are -%" PRId64 " to %" PRId64, offset, limit,
                    limit);
  }
  if (request->q.dims[0] > limit || stand_of(request, (uint64_t)request->q.dims[0]) > limit) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT,
                    "position is %" PRIu64 ", with causal_offset %" PRId64 " for %" PRId64
                    " queries, positions end at %" PRId64,
                    request->position, offset, request->q.dims[0], limit);
  }
  if (request->q_before_rope && stand_of(request, 0) < 0) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT,
                    "options.causal_offset is %" PRId64 ", which rotates query 0 to a position below 0", offset);
  }
  return QKV_OK;
}

static qkv_status check_shape(const qkv_attend *request, qkv_error *error) {
  const qkv_model *model = request->layer->config.model;
  const qkv_tensor *q = &request->q;
  assert(q->rank == 3);
  if (q->dims[1] != model->q_heads) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "q.dims[1] is %" PRId64 ", the model %s has %" PRIu32 " q_heads",
                    q->dims[1], model->name, model->q_heads);
  }
  if (q->dims[2] != model->key_dim) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "q.dims[2] is %" PRId64 ", the model %s has key_dim %" PRIu32,
                    q->dims[2], model->name, model->key_dim);
  }
  return QKV_OK;
}

static qkv_status check_query(const qkv_attend *request, int64_t query, int64_t head, qkv_error *error) {
  float row[QKV_DIM_MAX];
  size_t dim = request->layer->config.model->key_dim;
  int outside = 0;
  qkv_tensor_row(&request->q, query, head, row);
  for (size_t i = 0; i < dim; i++) outside |= !(fabsf(row[i]) <= QKV_ROW_MAX);
  if (outside == 0) return QKV_OK;
  size_t i = 0;
  while (fabsf(row[i]) <= QKV_ROW_MAX) i++;
  if (!isfinite(row[i])) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "q[%" PRId64 ", %" PRId64 ", %zu] is %s", query, head, i,
                    isnan(row[i]) ? "nan" : "inf");
  }
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "q[%" PRId64 ", %" PRId64 ", %zu] is %g, allowed are -%g to %g", query,
                  head, i, (double)row[i], (double)QKV_ROW_MAX, (double)QKV_ROW_MAX);
}

qkv_status qkv_attend_check(const qkv_attend *request, qkv_error *error) {
  QKV_TRY(check_shape(request, error));
  QKV_TRY(check_options(request, error));
  QKV_TRY(check_positions(request, error));
  for (int64_t query = 0; query < request->q.dims[0]; query++) {
    for (int64_t head = 0; head < request->q.dims[1]; head++) QKV_TRY(check_query(request, query, head, error));
  }
  return QKV_OK;
}
