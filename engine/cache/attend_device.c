// Ranges of a batch that a device computes (device.h).
//
// A job is a range of a request, a KV head, and as many rows as a kernel takes. Calls are filled with the jobs of all
// requests, as long as these want the same kernel. A range counts as computed once all of its jobs are.
//
//   input    ranges [jobs_max] | merges [jobs_max] | turns [jobs_max] of calibrated shapes |
//            queries of a request, seen tokens of its jobs | of the next ...
//   scratch  partial results of a job's runs [8], of calibrated shapes turned queries of its pages | of the next ...
//   output   partial results of jobs [jobs_max]
#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cache/attend_internal.h"
#include "engine/cache/device_image.h"
#include "engine/codec/embedded_internal.h"

enum { CALLS_MAX = 16, ALIGN = 16 };

_Static_assert((int)QKV_SIMT_RUN_PAGES == (int)QKVI_RUN_PAGES, "runs");
_Static_assert((int)QKV_SIMT_RANGE_PAGES == (int)QKV_RANGE_PAGES, "ranges");

typedef struct held_range {
  qkv_device *device;
  qkv_device_copy *copy;
  uint64_t pages;       // address of the list
  size_t place, range;  // of the request in the batch, and of the range in its layer
  uint32_t first, end;  // pages of the range
  bool whole;           // all rows see all tokens
  size_t missing;       // results of rows and KV heads; SIZE_MAX: nothing has been asked for yet
} held_range;

typedef struct device_job {
  held_range *held;
  uint16_t kv_head;
  uint16_t first_row, rows;  // of the request's
} device_job;

typedef struct filled_call {
  qkv_device *device;
  qkv_device_call call;
  const qkv_simt_shape *shape;
  bool submitted;
  size_t place;              // of the request whose queries are in it last
  size_t queries;            // offset of these
  size_t filled, scratch;    // bytes of the input and of the scratch memory
  uint32_t count, jobs_max;  // jobs
  device_job *jobs;
} filled_call;

struct qkvi_device_work {
  const qkv_attend *requests;
  size_t count;
  bool **taken;  // [count]: flags by the range, from the first that the request sees; NULL: none is
  held_range *held;
  size_t held_count, held_capacity;
  filled_call calls[CALLS_MAX];
  size_t call_count;
};

// ---- Which ranges ----

bool qkvi_device_may(const qkv_attend *request) {
  return request->layer->config.device != NULL && !request->host_only &&
         request->options.precision != QKV_PRECISION_FP32 && qkvi_attend_rows(request) <= QKV_QUERY_BLOCK;
}

// What the rows of a request see, as qkvi_attend_add() has it in a block.
typedef struct visible_span {
  uint64_t begin_min, end_max, begin_max, end_min;
} visible_span;

static visible_span span_of(const qkv_attend *request) {
  visible_span span = {.begin_min = UINT64_MAX, .end_min = UINT64_MAX};
  for (uint64_t query = 0; query < (uint64_t)request->q.dims[0]; query++) {
    uint64_t begin, end;
    qkvi_attend_visible(request, query, &begin, &end);
    if (begin > span.begin_max) span.begin_max = begin;
    if (end < span.end_min) span.end_min = end;
    if (begin >= end) continue;
    if (begin < span.begin_min) span.begin_min = begin;
    if (end > span.end_max) span.end_max = end;
  }
  return span;
}

// The pages of a range that take part, as qkvi_attend_range() finds them. False: none, or not all that are before the
// last one have 64 tokens.
static bool find_pages(const qkv_attend *request, size_t range, const visible_span *span, held_range *found) {
  const qkv_layer *layer = request->layer;
  size_t begin, end, first = qkv_layer_page_at(layer, span->begin_min);
  qkv_layer_range(layer, range, &begin, &end);
  if (first < begin) first = begin;
  while (end > first && qkvi_layer_span(layer, end - 1).begin >= span->end_max) end--;
  if (first >= end) return false;
  const qkvi_page_span last = qkvi_layer_span(layer, end - 1);
  if (last.begin - qkvi_layer_span(layer, begin).begin != (end - 1 - begin) * QKV_PAGE_TOKENS) return false;
  found->range = range;
  found->first = (uint32_t)(first - begin);
  found->end = (uint32_t)(end - begin);
  found->whole = last.end - last.begin == QKV_PAGE_TOKENS && span->end_min >= last.end &&
                 span->begin_max <= qkvi_layer_span(layer, first).begin;
  return true;
}

// Of the request's queries to the pages.
static float attention_of(const qkv_attend *request, const held_range *found, const visible_span *span) {
  const qkv_ema_table *emas = atomic_load_explicit(&request->layer->ranges[found->range].emas, memory_order_acquire);
  const float sampled = emas == NULL ? 0 : qkv_ema_average(&emas->attention);
  const float part =
      (float)((found->end - found->first) * QKV_PAGE_TOKENS) / (float)(span->end_max - span->begin_min);
  return (float)request->q.dims[0] * (sampled > 0 ? sampled : fminf(part, 1));
}

static bool hold(qkvi_device_work *work, const held_range *found, float attention) {
  if (work->held_count == work->held_capacity) {
    const size_t capacity = work->held_capacity == 0 ? 64 : 2 * work->held_capacity;
    held_range *larger = realloc(work->held, capacity * sizeof *larger);
    if (larger == NULL) return false;
    work->held = larger;
    work->held_capacity = capacity;
  }
  const qkv_layer *layer = work->requests[found->place].layer;
  qkv_page_range *range = layer->ranges[found->range].range;
  size_t begin, end;
  qkv_layer_range(layer, found->range, &begin, &end);
  const qkv_device_pages pages = {.range = range,
                                  .first = found->first,
                                  .end = found->end,
                                  .grows = found->range + 1 == layer->range_count && end - begin < QKV_RANGE_PAGES,
                                  .attention = attention};
  held_range *held = &work->held[work->held_count];
  *held = *found;
  held->device = layer->config.device;
  atomic_store_explicit(&range->device, held->device, memory_order_relaxed);
  held->pages = held->device->hold(held->device, &pages, &held->copy);
  work->held_count += held->pages != 0;
  return held->pages != 0;
}

static void find_ranges(qkvi_device_work *work, size_t place) {
  const qkv_attend *request = &work->requests[place];
  size_t first, end;
  if (!qkvi_device_may(request) || qkvi_attend_stopped(request)) return;
  const visible_span span = span_of(request);
  qkvi_attend_ranges(request, &first, &end);
  for (size_t range = first; range < end; range++) {
    held_range found = {.place = place, .missing = SIZE_MAX};
    if (!qkv_device_takes_coder(qkvi_attend_coder(request->layer, range))) continue;
    if (!find_pages(request, range, &span, &found)) continue;
    if (!hold(work, &found, attention_of(request, &found, &span))) continue;
    if (work->taken[place] == NULL) work->taken[place] = calloc(end - first, sizeof(bool));
    if (work->taken[place] == NULL) abort();
    work->taken[place][range - first] = true;
  }
}

qkvi_device_work *qkvi_device_find(const qkv_attend *requests, size_t count) {
  size_t may = 0;
  for (size_t i = 0; i < count; i++) may += qkvi_device_may(&requests[i]);
  if (may == 0) return NULL;
  qkvi_device_work *work = calloc(1, sizeof *work);
  if (work == NULL) return NULL;
  *work = (qkvi_device_work){.requests = requests, .count = count, .taken = calloc(count, sizeof *work->taken)};
  for (size_t i = 0; work->taken != NULL && i < count; i++) find_ranges(work, i);
  if (work->held_count == 0) qkvi_device_clear(&work);
  return work;
}

const bool *const *qkvi_device_taken(const qkvi_device_work *work) {
  return work == NULL ? NULL : (const bool *const *)work->taken;
}

// ---- Queries ----

// Those of all KV heads of a request, in blocks of as many rows as the kernel takes.
typedef struct device_queries {
  const qkv_simt_shape *shape;
  qkv_device_layout layout;                               // of copies of the coder's ranges
  size_t blocks, rows;                                    // of a KV head
  float soft_cap;                                         // of scores; 0: none
  size_t bytes;                                           // of all of them
  uint8_t *data;                                          // [kv_heads][blocks][qkv_simt_query_bytes]
  uint64_t begin[QKV_QUERY_BLOCK], end[QKV_QUERY_BLOCK];  // positions that a row sees
} device_queries;

static const qkv_simt_shape *shape_of(const qkv_coder *coder, const qkvi_embedded_queries *own, size_t rows) {
  if (qkv_device_layout_of(coder).expanded) return qkv_simt_shape_calibrated(coder->key_dim);
  return qkv_simt_shape_for(coder->key_dim, own->integers.parts, own->weight_bytes, (unsigned)rows);
}

void qkvi_device_queries(const qkv_coder *coder, const qkv_query_block *block, size_t first, size_t count,
                         uint8_t *out) {
  const qkvi_embedded_queries *own = (const qkvi_embedded_queries *)(const void *)block->own;
  const qkv_walk *walk = &own->blocks;
  const size_t dim = coder->key_dim;
  const bool turns = qkv_embedded(coder)->frame == QKV_FRAME_ATTEND;
  qkv_simt_frame_queries head = {.query_limit = own->query_limit,
                                 .weight_limit = own->weight_bytes == 1 ? 255.0f : 65535.0f};
  uint8_t *behind;
  for (size_t i = 0; turns && i < count; i++) {
    head.factors[i] = walk->factors[first + i];
    head.scales[i] = walk->scales[first + i];
    head.shares[i] = walk->shares[first + i];
  }
  qkv_simt_frame_queries_fill(&head, block->rows + first * dim, count, dim, out, &behind);
  if (!turns) {
    qkv_simt_turned_fill(&own->integers, own->shares, first, count, behind);
    memcpy(behind + QKV_SIMT_TURNED_BYTES(dim), own->codes + first * dim, count * dim * sizeof *own->codes);
    return;
  }
  const size_t each = 2 * qkv_phases_waves(walk->phases)->stride;
  memcpy(behind, walk->products + first * each, count * each * sizeof *walk->products);
}

static bool add_head(const qkvi_head_task *task, const qkv_coder *coder, device_queries *queries) {
  _Alignas(64) qkvi_row_block block;
  qkvi_attend_load(task, &block, 0, queries->rows);
  coder->codec->query(coder, task->kv_head, &block.queries);
  const qkvi_embedded_queries *own = qkvi_own(&block.queries);
  const qkv_simt_shape *shape = shape_of(coder, own, queries->rows);
  if (shape == NULL || (queries->shape != NULL && queries->shape != shape)) return false;
  const size_t bytes = qkv_simt_query_bytes(shape);
  if (queries->shape == NULL) {
    queries->shape = shape;
    queries->layout = qkv_device_layout_of(coder);
    queries->blocks = (queries->rows + shape->rows - 1) / shape->rows;
    queries->bytes = queries->blocks * task->model->kv_heads * bytes;
    queries->data = malloc(queries->bytes);
    memcpy(queries->begin, block.begin, sizeof queries->begin);
    memcpy(queries->end, block.end, sizeof queries->end);
  }
  if (queries->data == NULL) return false;
  for (size_t b = 0; b < queries->blocks; b++) {
    const size_t first = b * shape->rows, left = queries->rows - first;
    const size_t count = left < shape->rows ? left : shape->rows;
    uint8_t *out = queries->data + (task->kv_head * queries->blocks + b) * bytes;
    if (shape->turn != NULL) {
      qkvi_device_queries(coder, &block.queries, first, count, out);
    } else {
      qkv_simt_queries_fill(shape, &own->integers, block.queries.rows, first, count, out);
    }
  }
  return true;
}

// False: no kernel takes them.
static bool make_queries(const qkv_attend *request, const qkv_coder *coder, device_queries *queries) {
  *queries = (device_queries){.rows = qkvi_attend_rows(request), .soft_cap = qkvi_attend_task(request, 0).soft_cap};
  for (uint16_t h = 0; h < coder->kv_heads; h++) {
    const qkvi_head_task task = qkvi_attend_task(request, h);
    if (add_head(&task, coder, queries)) continue;
    free(queries->data);
    return false;
  }
  return true;
}

// ---- Calls ----

static size_t aligned(size_t bytes) {
  return (bytes + ALIGN - 1) / ALIGN * ALIGN;
}

static void *pointer(uint64_t address) {
  return (void *)(uintptr_t)address;
}

static size_t merges_at(const filled_call *to) {
  return aligned(to->jobs_max * sizeof(qkv_simt_range));
}

static size_t turns_at(const filled_call *to) {
  return merges_at(to) + aligned(to->jobs_max * sizeof(qkv_simt_merge));
}

static size_t turns_bytes(const filled_call *to) {
  return to->shape->turn == NULL ? 0 : aligned(to->jobs_max * sizeof(qkv_simt_turn));
}

static void submit(filled_call *to) {
  const uint64_t input = to->call.input_address;
  const qkv_device_kernels kernels = {
      .turn = {.turns = pointer(input + turns_at(to)), .count = to->count},
      .attend = {.ranges = pointer(input), .tables = pointer(to->call.tables_address), .count = to->count},
      .merge = {.merges = pointer(input + merges_at(to)),
                .count = to->count,
                .dim = to->shape->dim,
                .rows = to->shape->rows}};
  if (to->count == 0 || to->submitted) return;
  to->submitted = to->device->submit(to->device, &to->call, to->shape, &kernels);
}

// As many jobs as there is memory for results, and half of the input for what describes them.
static uint32_t most_jobs(const qkv_device_call *call, const qkv_simt_shape *shape) {
  size_t most = call->output_bytes / QKV_SIMT_PARTIAL_BYTES(shape->dim, shape->rows);
  const size_t entries =
      call->input_bytes / 2 / (sizeof(qkv_simt_range) + sizeof(qkv_simt_merge) + sizeof(qkv_simt_turn));
  return (uint32_t)(entries < most ? entries : most);
}

static filled_call *next_call(qkvi_device_work *work, qkv_device *device, const qkv_simt_shape *shape) {
  if (work->call_count > 0) submit(&work->calls[work->call_count - 1]);
  if (work->call_count == CALLS_MAX) return NULL;
  filled_call *to = &work->calls[work->call_count];
  *to = (filled_call){.device = device, .shape = shape, .place = SIZE_MAX};
  if (!device->begin(device, &to->call)) return NULL;
  to->jobs_max = most_jobs(&to->call, shape);
  to->jobs = malloc((to->jobs_max + 1) * sizeof *to->jobs);
  to->filled = turns_at(to) + turns_bytes(to);
  work->call_count++;
  return to->jobs == NULL ? NULL : to;
}

static size_t seen_bytes(const device_queries *queries) {
  return aligned(queries->shape->rows * 2 * sizeof(uint16_t));
}

// Of each of a range's jobs.
static size_t scratch_bytes(const held_range *held, const qkv_simt_shape *shape) {
  const size_t turned = shape->turn == NULL ? 0 : QKV_SIMT_TURNED_BYTES((size_t)shape->dim);
  return aligned(QKV_SIMT_RANGE_RUNS * QKV_SIMT_PARTIAL_BYTES((size_t)shape->dim, shape->rows) +
                 (held->end - held->first) * turned);
}

static bool fits(const filled_call *to, const held_range *held, const device_queries *queries, size_t jobs) {
  if (to->device != held->device || to->shape != queries->shape || to->submitted) return false;
  const size_t more = (to->place == held->place ? 0 : queries->bytes) + queries->blocks * seen_bytes(queries);
  return to->count + jobs <= to->jobs_max && to->filled + more <= to->call.input_bytes &&
         to->scratch + jobs * scratch_bytes(held, to->shape) <= to->call.scratch_bytes;
}

// A call that has memory for all jobs of a range; NULL: there is none.
static filled_call *call_for(qkvi_device_work *work, const held_range *held, const device_queries *queries,
                             size_t jobs) {
  filled_call *last = work->call_count > 0 ? &work->calls[work->call_count - 1] : NULL;
  if (last != NULL && fits(last, held, queries, jobs)) return last;
  filled_call *next = next_call(work, held->device, queries->shape);
  return next != NULL && fits(next, held, queries, jobs) ? next : NULL;
}

static uint16_t relative(uint64_t position, uint64_t begin, uint64_t end) {
  if (position > end) position = end;
  return (uint16_t)(position > begin ? position - begin : 0);
}

// What each row of a block sees of the range, in tokens from its begin on. Rows that are missing see nothing.
static void put_seen(const qkvi_device_work *work, const held_range *held, const device_queries *queries,
                     size_t block, uint16_t *seen) {
  const qkv_layer *layer = work->requests[held->place].layer;
  size_t first, end;
  qkv_layer_range(layer, held->range, &first, &end);
  const uint64_t begin = qkvi_layer_span(layer, first).begin;
  const uint64_t limit = qkvi_layer_span(layer, first + held->end - 1).end;
  for (size_t i = 0; i < queries->shape->rows; i++) {
    const size_t row = block * queries->shape->rows + i;
    seen[2 * i] = row < queries->rows ? relative(queries->begin[row], begin, limit) : 0;
    seen[2 * i + 1] = row < queries->rows ? relative(queries->end[row], begin, limit) : 0;
  }
}

// Of a calibrated shape: what turns the job's queries, to `turned`.
static void add_turn(filled_call *to, const held_range *held, const device_queries *queries, uint64_t turned,
                     qkv_simt_range *range) {
  const qkv_device_layout *layout = &queries->layout;
  const uint32_t step = layout->turns || layout->anchored ? QKV_SIMT_TURNED_BYTES(to->shape->dim) : 0;
  uint8_t *head = pointer(held->pages + layout->heads + range->kv_head * layout->head_bytes);
  qkv_simt_turn *turn = (qkv_simt_turn *)(void *)(to->call.input + turns_at(to)) + to->count;
  range->turned = pointer(turned - (uint64_t)held->first * step);
  range->turned_step = step;
  range->steps = (const float *)(const void *)head;
  *turn = (qkv_simt_turn){.queries = range->queries,
                          .frame = layout->turns ? pointer(held->pages + layout->frame) : NULL,
                          .head = head,
                          .pages = range->pages,
                          .turned = pointer((uintptr_t)range->turned),
                          .first = held->first,
                          .end = held->end,
                          .kv_head = range->kv_head,
                          .anchored = layout->anchored};
}

static void add_job(filled_call *to, const held_range *held, const device_queries *queries, const device_job *job,
                    uint64_t seen) {
  const qkv_simt_shape *shape = queries->shape;
  const size_t partial = QKV_SIMT_PARTIAL_BYTES(shape->dim, shape->rows);
  const size_t block = job->kv_head * queries->blocks + job->first_row / shape->rows;
  qkv_simt_range *range = (qkv_simt_range *)(void *)to->call.input + to->count;
  qkv_simt_merge *merge = (qkv_simt_merge *)(void *)(to->call.input + merges_at(to)) + to->count;
  const uint64_t scratch = to->call.scratch_address + to->scratch;
  uint8_t *runs = pointer(scratch);
  *range =
      (qkv_simt_range){.pages = pointer(held->pages),
                       .queries = pointer(to->call.input_address + to->queries + block * qkv_simt_query_bytes(shape)),
                       .seen = held->whole ? NULL : pointer(seen),
                       .partials = runs,
                       .first = held->first,
                       .end = held->end,
                       .kv_head = job->kv_head,
                       .soft_cap = queries->soft_cap};
  *merge = (qkv_simt_merge){.partials = runs,
                            .out = pointer(to->call.output_address + to->count * partial),
                            .first = held->first / QKV_SIMT_RUN_PAGES,
                            .end = (held->end - 1) / QKV_SIMT_RUN_PAGES + 1};
  if (shape->turn != NULL) add_turn(to, held, queries, scratch + QKV_SIMT_RANGE_RUNS * partial, range);
  to->scratch += scratch_bytes(held, shape);
  to->jobs[to->count++] = *job;
}

// Its results stay missing where there is no call for it.
static void add_range(qkvi_device_work *work, held_range *held, const device_queries *queries) {
  assert(queries->shape != NULL);
  const size_t heads = work->requests[held->place].layer->config.model->kv_heads;
  const size_t rows = queries->shape->rows;
  held->missing = heads * queries->blocks;
  filled_call *to = call_for(work, held, queries, held->missing);
  if (to == NULL) return;
  if (to->place != held->place) {
    memcpy(to->call.input + to->filled, queries->data, queries->bytes);
    to->place = held->place;
    to->queries = to->filled;
    to->filled += aligned(queries->bytes);
  }
  for (size_t b = 0; b < queries->blocks; b++) {
    const size_t left = queries->rows - b * rows;
    put_seen(work, held, queries, b, (uint16_t *)(void *)(to->call.input + to->filled));
    for (size_t h = 0; h < heads; h++) {
      const device_job job = {.held = held,
                              .kv_head = (uint16_t)h,
                              .first_row = (uint16_t)(b * rows),
                              .rows = (uint16_t)(left < rows ? left : rows)};
      add_job(to, held, queries, &job, to->call.input_address + to->filled);
    }
    to->filled += seen_bytes(queries);
  }
}

// The ranges of one request that have one coder, from the `first` held one on. Returns the next.
static size_t add_request(qkvi_device_work *work, size_t first) {
  const size_t place = work->held[first].place;
  const qkv_attend *request = &work->requests[place];
  const qkv_coder *coder = qkvi_attend_coder(request->layer, work->held[first].range);
  device_queries queries;
  size_t end = first;
  const bool has = make_queries(request, coder, &queries);
  for (; end < work->held_count && work->held[end].place == place &&
         qkvi_attend_coder(request->layer, work->held[end].range) == coder;
       end++) {
    if (has) add_range(work, &work->held[end], &queries);
  }
  // Queries of another coder are others.
  if (work->call_count > 0) work->calls[work->call_count - 1].place = SIZE_MAX;
  if (has) free(queries.data);
  return end;
}

void qkvi_device_start(qkvi_device_work *work) {
  for (size_t next = 0; next < work->held_count;) next = add_request(work, next);
  if (work->call_count > 0) submit(&work->calls[work->call_count - 1]);
}

// ---- Results ----

static void take_job(const qkvi_device_work *work, const filled_call *call, size_t index,
                     const qkvi_device_results *results) {
  const device_job *job = &call->jobs[index];
  const unsigned dim = call->shape->dim;
  const uint8_t *from = call->call.output + index * QKV_SIMT_PARTIAL_BYTES(dim, call->shape->rows);
  float *sums;
  qkvi_partial *to = results->slot(results->context, job->held->place, job->kv_head, job->held->range, &sums);
  to->rows = qkvi_attend_rows(&work->requests[job->held->place]);
  for (unsigned i = 0; i < job->rows; i++) {
    const size_t row = job->first_row + i;
    const float *of = qkv_simt_partial_row(call->shape, from, i, &to->peak[row], &to->total[row]);
    to->sums[row] = memcpy(sums + row * dim, of, dim * sizeof *of);
  }
  assert(job->held->missing > 0);
  job->held->missing--;
}

void qkvi_device_finish(qkvi_device_work *work, const qkvi_device_results *results) {
  for (size_t i = 0; i < work->call_count; i++) {
    filled_call *call = &work->calls[i];
    if (!call->submitted || !call->device->wait(call->device, &call->call)) continue;
    for (size_t n = 0; n < call->count; n++) take_job(work, call, n, results);
  }
  for (size_t i = 0; i < work->held_count; i++) {
    const held_range *held = &work->held[i];
    if (held->missing == 0) results->computed(results->context, held->place, held->range);
  }
}

void qkvi_device_clear(qkvi_device_work **work) {
  qkvi_device_work *old = *work;
  if (old == NULL) return;
  *work = NULL;
  for (size_t i = 0; i < old->call_count; i++) {
    old->calls[i].device->end(old->calls[i].device, &old->calls[i].call);
    free(old->calls[i].jobs);
  }
  for (size_t i = 0; i < old->held_count; i++) old->held[i].device->release(old->held[i].device, old->held[i].copy);
  for (size_t i = 0; old->taken != NULL && i < old->count; i++) free(old->taken[i]);
  free(old->taken);
  free(old->held);
  free(old);
}
