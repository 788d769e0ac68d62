// gpu/attend or gpu/rows on a GPU, by the CUDA driver found at run time, and then times of attention: on_device.sh.
// Exit status 77: there is no GPU, or the program was built without nvcc.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/cache/device_image.h"
#include "engine/cache/device_rows.h"
#include "engine/codec/codec.h"
#include "engine/codec/embedded_internal.h"
#include "engine/codec/page.h"
#include "engine/kernel/simt/image.h"
#include "storage/gpu/driver.h"
#include "tests/engine/cache/fixture.h"
#include "tests/gpu/launch.h"

enum { REPEATS = 20, AREA_BYTES = 64 << 20 };

static qkv_cuda_driver cuda;
static qkv_cuda_module module;
static qkv_cuda_stream stream;
static qkv_cuda_event events[2];

// Memory of the device, filled from below by a copy on the host of the same layout.
static qkv_cuda_memory area;
static uint8_t *copy;
static size_t filled;
static void *results;  // mapped
static qkv_cuda_memory results_at;

static void must(int result, const char *what) {
  if (result == QKV_CUDA_SUCCESS) return;
  fprintf(stderr, "on_device: %s: %s\n", what, qkv_cuda_result_name(&cuda, result));
  exit(1);
}
#define MUST(call) must(cuda.call, #call)

static void wait(void) {
  int result;
  MUST(EventRecord(events[1], stream));
  while ((result = cuda.EventQuery(events[1])) == QKV_CUDA_NOT_READY) {
  }
  must(result, "EventQuery");
}

static bool open_device(void) {
  qkv_error error = {0};
  qkv_cuda_context context;
  size_t bytes;
  char name[64] = "";
  int count = 0, device;
  const void *image = qkv_simt_image(&bytes);
  if (getenv("QKV_ON_DEVICE_IMAGE") != NULL) image = "";  // a driver for tests has kernels of its own
  if (image == NULL) return printf("skipped: built without nvcc\n"), false;
  if (qkv_cuda_load(&cuda, &error) != QKV_OK) return printf("skipped: %s\n", error.text), false;
  MUST(DeviceGetCount(&count));
  if (count == 0) return printf("skipped: there is no GPU\n"), false;
  MUST(DeviceGet(&device, 0));
  MUST(DeviceGetName(name, sizeof name, device));
  MUST(DevicePrimaryCtxRetain(&context, device));
  MUST(CtxSetCurrent(context));
  MUST(ModuleLoadData(&module, image));
  MUST(StreamCreate(&stream, QKV_CUDA_STREAM_NON_BLOCKING));
  for (size_t i = 0; i < 2; i++) MUST(EventCreate(&events[i], 0));
  printf("device: %s\n", name);
  return true;
}

bool launch_begin(int argc, char **argv, uint64_t *first_seed) {
  *first_seed = argc > 1 ? strtoull(argv[1], NULL, 10) : (uint64_t)time(NULL);
  if (!open_device()) return false;
  printf("seed: %llu\n", (unsigned long long)*first_seed);
  copy = malloc(AREA_BYTES);
  if (copy == NULL) exit(1);
  MUST(MemAlloc(&area, AREA_BYTES));
  MUST(MemHostAlloc(&results, AREA_BYTES, QKV_CUDA_HOST_MAPPED));
  MUST(MemHostGetDevicePointer(&results_at, results, 0));
  return true;
}

// Bytes of the area, as the device knows them; NULL leaves what lies there.
static void *put(const void *from, size_t bytes) {
  const size_t at = (filled + 127) / 128 * 128;
  if (at + bytes > AREA_BYTES) {
    fprintf(stderr, "on_device: the area of %d bytes is full\n", AREA_BYTES);
    exit(1);
  }
  if (from != NULL) memcpy(copy + at, from, bytes);
  filled = at + bytes;
  return (void *)(uintptr_t)(area + at);
}

static void run(const char *name, unsigned shared_bytes, unsigned blocks, unsigned threads, const void *args,
                size_t bytes) {
  qkv_cuda_function function;
  void *extra[] = {QKV_CUDA_ARGUMENTS, (void *)(uintptr_t)args, QKV_CUDA_ARGUMENT_BYTES, &bytes,
                   QKV_CUDA_ARGUMENTS_END};
  MUST(ModuleGetFunction(&function, module, name));
  if (shared_bytes > 0) MUST(FuncSetAttribute(function, QKV_CUDA_FUNCTION_SHARED_MAX, (int)shared_bytes));
  MUST(LaunchKernel(function, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, NULL, extra));
}

static void run_attend(const qkv_simt_shape *shape, const qkv_simt_attend_args *args) {
  run(shape->name, shape->shared_bytes, args->count * QKV_SIMT_RANGE_RUNS / QKV_SIMT_WARPS, QKV_SIMT_WARPS * 32, args,
      sizeof *args);
}

// A range whose pages, queries and partials lie in the area.
static qkv_simt_range put_range(const qkv_simt_shape *shape, const qkv_simt_range *range, size_t copies) {
  const size_t partials = QKV_SIMT_RANGE_RUNS * (size_t)QKV_SIMT_PARTIAL_BYTES(shape->dim, shape->rows);
  const uint8_t *pages[QKV_SIMT_RANGE_PAGES] = {NULL};
  qkv_simt_range made = *range;
  const size_t before = shape->turn != NULL ? QKV_SIMT_TURN_BYTES((size_t)shape->dim) : 0;  // turns, or anything
  for (uint32_t i = range->first; i < range->end; i++) {
    const qkv_page_header *header = (const qkv_page_header *)(const void *)range->pages[i];
    pages[i] = (const uint8_t *)put(range->pages[i] - before, before + header->bytes) + before;
  }
  made.pages = put(pages, sizeof pages);
  made.queries = put(range->queries, qkv_simt_query_bytes(shape));
  if (range->seen != NULL) made.seen = put(range->seen, (size_t)shape->rows * 2 * sizeof *range->seen);
  made.partials = put(NULL, copies * partials);
  return made;
}

// The tables that a calibrated range has, and memory for its turned queries.
static qkv_simt_turn put_turn(const qkv_simt_shape *shape, const qkv_simt_turn *turn, qkv_simt_range *range) {
  const size_t dim = shape->dim;
  const qkv_simt_frame *frame = (const qkv_simt_frame *)(const void *)turn->frame;
  qkv_simt_turn made = *turn;
  made.queries = range->queries;
  made.head = put(turn->head, QKV_SIMT_HEAD_BYTES(dim, frame != NULL));
  made.pages = range->pages;
  if (frame != NULL) made.frame = put(turn->frame, QKV_SIMT_FRAME_BYTES(frame->stride, frame->fast));
  made.turned = put(NULL, QKV_SIMT_RANGE_PAGES * QKV_SIMT_TURNED_BYTES(dim));
  range->turned = made.turned;
  range->steps = (const float *)(const void *)made.head;
  return made;
}

static void run_turn(const qkv_simt_shape *shape, const qkv_simt_turn_args *args) {
  run(shape->turn, QKV_SIMT_TURN_SHARED_BYTES(shape->dim), args->count * QKV_SIMT_TURN_BLOCKS, QKV_SIMT_WARPS * 32,
      args, sizeof *args);
}

void launch_attend(const launch_work *work) {
  const size_t bytes = QKV_SIMT_PARTIAL_BYTES(work->shape->dim, work->shape->rows);
  qkv_simt_range ranges[32];
  qkv_simt_merge merges[32];
  qkv_simt_turn turns[32];
  if (work->count > 32) exit(1);
  filled = 0;
  const qkv_simt_tables *tables = put(work->tables, sizeof *work->tables);
  for (uint32_t i = 0; i < work->count; i++) {
    ranges[i] = put_range(work->shape, &work->ranges[i], 1);
    if (work->shape->turn != NULL) turns[i] = put_turn(work->shape, &work->turns[i], &ranges[i]);
    merges[i] = (qkv_simt_merge){.partials = ranges[i].partials,
                                 .out = (uint8_t *)(uintptr_t)(results_at + i * bytes),
                                 .first = work->merges[i].first,
                                 .end = work->merges[i].end};
  }
  const qkv_simt_attend_args attend = {
      .ranges = put(ranges, work->count * sizeof *ranges), .tables = tables, .count = work->count};
  const qkv_simt_merge_args merge = {.merges = put(merges, work->count * sizeof *merges),
                                     .count = work->count,
                                     .dim = work->shape->dim,
                                     .rows = work->shape->rows};
  qkv_simt_turn_args turn = {.count = work->count};
  if (work->shape->turn != NULL) turn.turns = put(turns, work->count * sizeof *turns);
  MUST(MemcpyHtoDAsync(area, copy, filled, stream));
  if (work->shape->turn != NULL) run_turn(work->shape, &turn);
  run_attend(work->shape, &attend);
  run("qkv_simt_merge_partials", 0, merge.count, QKV_SIMT_MERGE_THREADS, &merge, sizeof merge);
  wait();
  for (uint32_t i = 0; i < work->count; i++) memcpy(work->merges[i].out, (uint8_t *)results + i * bytes, bytes);
}

// Bytes that a job's rows span.
static size_t span_of(const qkv_simt_decode *job) {
  return (job->end - job->first) * (size_t)job->stride;
}

void launch_decode(const launch_decode_work *work) {
  qkv_simt_decode jobs[64];
  size_t at = 0;
  if (work->count > 64) exit(1);
  filled = 0;
  for (uint32_t i = 0; i < work->count; i++) {
    const qkv_simt_decode *job = &work->jobs[i];
    const size_t pairs = job->code->pairs;
    jobs[i] = *job;
    jobs[i].page = put(job->page, ((const qkv_page_header *)(const void *)job->page)->bytes);
    jobs[i].code = put(job->code, work->code_bytes[i]);
    if (job->turns != NULL) jobs[i].turns = put(job->turns, QKV_SIMT_ROW_TURNS * pairs * sizeof(float));
    if (job->slots != NULL) jobs[i].slots = put(job->slots, 2 * QKV_PAGE_TOKENS * pairs * sizeof(float));
    if (at + span_of(job) > AREA_BYTES) exit(1);
    memcpy((uint8_t *)results + at, job->out, span_of(job));
    jobs[i].out = (uint8_t *)(uintptr_t)(results_at + at);
    at += span_of(job);
  }
  const qkv_simt_decode_args args = {.jobs = put(jobs, work->count * sizeof *jobs),
                                     .tables = put(work->tables, sizeof *work->tables),
                                     .count = work->count};
  MUST(MemcpyHtoDAsync(area, copy, filled, stream));
  run("qkv_simt_decode_rows", QKV_SIMT_ROWS_SHARED_BYTES(work->dim), work->count, QKV_SIMT_ROWS_THREADS(work->dim),
      &args, sizeof args);
  wait();
  at = 0;
  for (uint32_t i = 0; i < work->count; at += span_of(&work->jobs[i]), i++)
    memcpy(work->jobs[i].out, (uint8_t *)results + at, span_of(&work->jobs[i]));
}

static size_t encoded_bytes(const qkv_simt_encode *job) {
  return sizeof *job->out + QKV_PAGE_GROUPS * (size_t)job->code->bytes[job->part][job->tier];
}

void launch_encode(const launch_encode_work *work) {
  qkv_simt_encode jobs[64];
  size_t at = 0;
  if (work->count > 64) exit(1);
  filled = 0;
  for (uint32_t i = 0; i < work->count; i++) {
    const qkv_simt_encode *job = &work->jobs[i];
    jobs[i] = *job;
    jobs[i].rows = put(job->rows, job->tokens * job->stride);
    jobs[i].code = put(job->code, work->code_bytes[i]);
    const size_t pairs = job->code->pairs;
    if (job->turns != NULL) jobs[i].turns = put(job->turns, QKV_SIMT_ROW_TURNS * pairs * sizeof(float));
    if (job->slots != NULL) jobs[i].slots = put(job->slots, 2 * QKV_PAGE_TOKENS * pairs * sizeof(float));
    if (at + encoded_bytes(job) > AREA_BYTES) exit(1);
    jobs[i].out = (qkv_simt_encoded *)(uintptr_t)(results_at + at);
    at += (encoded_bytes(job) + 15) / 16 * 16;
  }
  const qkv_simt_encode_args args = {.jobs = put(jobs, work->count * sizeof *jobs),
                                     .tables = put(work->tables, sizeof *work->tables),
                                     .count = work->count};
  MUST(MemcpyHtoDAsync(area, copy, filled, stream));
  run("qkv_simt_encode_rows", QKV_SIMT_ENCODE_SHARED_BYTES(work->dim), work->count, QKV_SIMT_ROWS_THREADS(work->dim),
      &args, sizeof args);
  wait();
  at = 0;
  for (uint32_t i = 0; i < work->count; at += (encoded_bytes(&work->jobs[i]) + 15) / 16 * 16, i++)
    memcpy(work->jobs[i].out, (uint8_t *)results + at, encoded_bytes(&work->jobs[i]));
}

// ---- Times ----
//
// One layer of 131072 tokens and 8 KV heads of 128, four query heads each: 32 ranges of 64 pages of any codes;
// expanded ones as encoded from random rows.

enum { TIMED_RANGES = 32, TIMED_HEADS = 8, TIMED_DIM = 128, TIMED_JOBS = TIMED_RANGES * TIMED_HEADS };

static uint64_t random_state = 88172645463325252u;
static uint8_t any_byte(void) {
  random_state = random_state * 6364136223846793005u + 1442695040888963407u;
  return (uint8_t)(random_state >> 56);
}

static void fill_page(uint8_t *page, const qkv_head_layout *heads, uint64_t position) {
  const qkv_page_header header = {.tokens = QKV_PAGE_TOKENS,
                                  .kv_heads = TIMED_HEADS,
                                  .key_dim = TIMED_DIM,
                                  .value_dim = TIMED_DIM,
                                  .position = position};
  const size_t bytes = qkv_page_bytes(heads, TIMED_HEADS);
  qkv_page_format(page, &header, heads);
  for (uint16_t h = 0; h < TIMED_HEADS; h++) {
    const size_t begin = qkv_page_entry_of(page, h)->offset;
    const size_t end = h + 1 < TIMED_HEADS ? qkv_page_entry_of(page, (uint16_t)(h + 1))->offset : bytes;
    for (size_t i = begin; i < end; i++)
      page[i] = i < begin + (size_t)2 * QKV_PAGE_TOKENS ? 120 + any_byte() % 16 : any_byte();
  }
}

// us of a launch, the mean of REPEATS after one that warms up.
static double time_launches(void (*launch)(const void *context), const void *context) {
  float ms = 0;
  launch(context);
  wait();
  MUST(EventRecord(events[0], stream));
  for (int i = 0; i < REPEATS; i++) launch(context);
  wait();
  MUST(EventElapsedTime(&ms, events[0], events[1]));
  return (double)ms * 1000 / REPEATS;
}

typedef struct timed {
  const qkv_simt_shape *shape;
  qkv_simt_attend_args args;
  qkv_cuda_memory from, to;
  size_t bytes;
} timed;

static void launch_timed(const void *context) {
  const timed *t = context;
  run_attend(t->shape, &t->args);
}

static void launch_copy(const void *context) {
  const timed *t = context;
  MUST(MemcpyDtoDAsync(t->to, t->from, t->bytes, stream));
}

static uint8_t *make_pages(unsigned bits, size_t *bytes) {
  static qkv_schedule schedule;
  qkv_head_layout heads[TIMED_HEADS] = {0};
  qkv_schedule_uniform(&schedule, TIMED_DIM);
  for (size_t h = 0; h < TIMED_HEADS; h++) {
    heads[h].schedules[QKV_K] = heads[h].schedules[QKV_V] = &schedule;
    memset(heads[h].tiers, (int)(8 * bits), sizeof heads[h].tiers);
  }
  *bytes = qkv_page_bytes(heads, TIMED_HEADS);
  uint8_t *pages = aligned_alloc(64, QKV_SIMT_RANGE_PAGES * *bytes);
  if (pages == NULL) exit(1);
  for (size_t i = 0; i < QKV_SIMT_RANGE_PAGES; i++) fill_page(pages + i * *bytes, heads, i * QKV_PAGE_TOKENS);
  return pages;
}

static uint8_t *make_expanded_pages(double bits, size_t *bytes) {
  qkv_coder *coder = coder_create(TIMED_HEADS, TIMED_DIM, TIMED_DIM, bits, bits, QKV_FRAME_PLAIN, NULL);
  float *rows = random_floats(1, (size_t)QKV_PAGE_TOKENS * TIMED_HEADS * TIMED_DIM);
  void *image = aligned_alloc(64, (coder->codec->page_bytes_max(coder) + 63) / 64 * 64);
  if (image == NULL) exit(1);
  coder->codec->encode(coder, 0, QKV_PAGE_TOKENS, QKV_FP32, rows, rows, NULL, image);
  *bytes = qkv_device_page_bytes(coder, image);
  uint8_t *pages = aligned_alloc(64, QKV_SIMT_RANGE_PAGES * *bytes);
  if (pages == NULL || !qkv_device_takes_image(coder, image)) exit(1);
  for (size_t i = 0; i < QKV_SIMT_RANGE_PAGES; i++) qkv_device_fill_page(coder, image, pages + i * *bytes);
  free(image);
  free(rows);
  coder_destroy(coder);
  return pages;
}

// Any numbers, of one byte each or of two; of an expanded shape a block that is turned already.
static void put_timed_queries(const qkv_simt_shape *shape, qkv_simt_range *range) {
  const size_t columns = (size_t)QKV_SIMT_COLUMNS * TIMED_DIM;
  uint8_t queries[QKV_SIMT_FRAME_QUERY_BYTES(TIMED_DIM)] = {0}, turned[QKV_SIMT_TURNED_BYTES(TIMED_DIM)] = {0};
  float steps[TIMED_DIM];
  uint8_t *bytes = shape->turn == NULL ? queries : turned + sizeof(float) * QKV_SIMT_FRAME_ROWS * QKV_PAGE_TOKENS;
  for (size_t i = 0; i < columns; i++) bytes[i] = any_byte();
  const size_t scales = shape->turn == NULL ? 40 * TIMED_DIM : columns;
  for (size_t i = 0; i < QKV_SIMT_FRAME_ROWS; i++)
    memcpy(bytes + scales + i * sizeof(float), &(float){1e-6f}, sizeof(float));
  for (size_t c = 0; c < TIMED_DIM; c++) steps[c] = 1;
  if (shape->turn != NULL)
    memcpy(queries, &(qkv_simt_frame_queries){.weight_limit = 65535.0f}, sizeof(qkv_simt_frame_queries));
  range->queries = put(queries, qkv_simt_query_bytes(shape));
  range->turned = put(turned, sizeof turned);
  range->steps = put(steps, sizeof steps);
}

// Fills `t` with `ranges` copies of 64 pages of `bytes` each, which it puts into memory of its own and frees.
static void make_timed(timed *t, const qkv_simt_tables *tables, uint8_t *pages, size_t bytes, uint32_t ranges) {
  static qkv_simt_range jobs[TIMED_JOBS];
  qkv_simt_range queries = {0};
  t->bytes = (size_t)ranges * QKV_SIMT_RANGE_PAGES * bytes;
  MUST(MemAlloc(&t->from, t->bytes));
  MUST(MemAlloc(&t->to, t->bytes));
  filled = 0;
  put_timed_queries(t->shape, &queries);
  for (size_t r = 0; r < ranges; r++) {
    uint64_t addresses[QKV_SIMT_RANGE_PAGES];
    const size_t offset = r * QKV_SIMT_RANGE_PAGES * bytes;
    MUST(MemcpyHtoDAsync(t->from + offset, pages, QKV_SIMT_RANGE_PAGES * bytes, stream));
    for (size_t i = 0; i < QKV_SIMT_RANGE_PAGES; i++) addresses[i] = t->from + offset + i * bytes;
    const void *list = put(addresses, sizeof addresses);
    for (uint32_t h = 0; h < TIMED_HEADS; h++)
      jobs[r * TIMED_HEADS + h] = (qkv_simt_range){
          .pages = list,
          .queries = queries.queries,
          .partials = put(NULL, QKV_SIMT_RANGE_RUNS * (size_t)QKV_SIMT_PARTIAL_BYTES(TIMED_DIM, t->shape->rows)),
          .end = QKV_SIMT_RANGE_PAGES,
          .kv_head = h,
          .turned = queries.turned,
          .steps = queries.steps};
  }
  t->args = (qkv_simt_attend_args){
      .ranges = put(jobs, sizeof jobs), .tables = put(tables, sizeof *tables), .count = ranges * TIMED_HEADS};
  MUST(MemcpyHtoDAsync(area, copy, filled, stream));
  wait();
  free(pages);
}

static void print_times(const qkv_simt_shape *shape, const qkv_simt_tables *tables, double bits, uint8_t *pages,
                        size_t bytes, uint32_t ranges) {
  timed t = {.shape = shape};
  make_timed(&t, tables, pages, bytes, ranges);
  const double us = time_launches(launch_timed, &t), copied = time_launches(launch_copy, &t);
  printf("%s,%g,%zu,%.1f,%.0f,%.0f\n", shape->name, bits, t.bytes, us, (double)t.bytes / us / 1000,
         2 * (double)t.bytes / copied / 1000);
  MUST(MemFree(t.from));
  MUST(MemFree(t.to));
}

// ---- Times of rows ----
//
// 64 pages of 8 KV heads of 128, keys and values: to rows of fp16, and from such rows to codes.

enum { ROW_PAGES = 64, ROW_JOBS = ROW_PAGES * TIMED_HEADS * 2, ROW_BYTES = 2 * TIMED_DIM };

typedef struct timed_rows {
  qkv_simt_decode_args decode;
  qkv_simt_encode_args encode;
} timed_rows;

static void launch_timed_decode(const void *context) {
  const timed_rows *t = context;
  run("qkv_simt_decode_rows", QKV_SIMT_ROWS_SHARED_BYTES(TIMED_DIM), t->decode.count,
      QKV_SIMT_ROWS_THREADS(TIMED_DIM), &t->decode, sizeof t->decode);
}

static void launch_timed_encode(const void *context) {
  const timed_rows *t = context;
  run("qkv_simt_encode_rows", QKV_SIMT_ENCODE_SHARED_BYTES(TIMED_DIM), t->encode.count,
      QKV_SIMT_ROWS_THREADS(TIMED_DIM), &t->encode, sizeof t->encode);
}

// Codes of the coder's heads, of both parts.
static const void *put_codes(const qkv_coder *coder, uint16_t head, qkv_part part, bool encodes) {
  const size_t bytes =
      encodes ? qkv_device_encoder_bytes(coder, head, part) : qkv_device_code_bytes(coder, head, part);
  void *code = aligned_alloc(16, bytes);
  if (code == NULL) exit(1);
  if (encodes)
    qkv_device_fill_encoder(coder, head, part, code);
  else
    qkv_device_fill_code(coder, head, part, code);
  const void *at = put(code, bytes);
  free(code);
  return at;
}

static void make_timed_rows(timed_rows *t, const qkv_coder *coder, size_t jobs, qkv_cuda_memory rows) {
  static qkv_simt_decode decode[ROW_JOBS];
  static qkv_simt_encode encode[ROW_JOBS];
  static qkv_simt_encode_tables tables;
  const qkv_head_coder *heads = qkv_embedded(coder)->heads;
  const size_t stride = (size_t)TIMED_HEADS * ROW_BYTES, page_rows = QKV_PAGE_TOKENS * stride;
  float *numbers = random_floats(1, (size_t)QKV_PAGE_TOKENS * TIMED_HEADS * TIMED_DIM);
  uint8_t *image = aligned_alloc(64, (coder->codec->page_bytes_max(coder) + 63) / 64 * 64);
  if (image == NULL) exit(1);
  (void)coder->codec->encode(coder, 0, QKV_PAGE_TOKENS, QKV_FP32, numbers, numbers, NULL, image);
  filled = 0;
  qkv_simt_encode_tables_fill(&tables);
  const void *page = put(image, ((const qkv_page_header *)(const void *)image)->bytes);
  const void *tables_at = put(&tables, sizeof tables);
  for (size_t i = 0; i < jobs; i++) {
    const uint16_t head = (uint16_t)(i / 2 % TIMED_HEADS);
    const qkv_part part = (qkv_part)(i % 2);
    uint8_t *at =
        (uint8_t *)(uintptr_t)(rows + i / 2 / TIMED_HEADS * 2 * page_rows + part * page_rows + head * ROW_BYTES);
    const void *code = i < 2 * TIMED_HEADS ? put_codes(coder, head, part, false) : decode[i % (2 * TIMED_HEADS)].code;
    const void *encoder =
        i < 2 * TIMED_HEADS ? put_codes(coder, head, part, true) : encode[i % (2 * TIMED_HEADS)].code;
    decode[i] = (qkv_simt_decode){.page = page,
                                  .code = code,
                                  .out = at,
                                  .stride = stride,
                                  .kv_head = head,
                                  .part = part,
                                  .end = QKV_PAGE_TOKENS,
                                  .dtype = QKV_FP16};
    encode[i] = (qkv_simt_encode){.rows = at,
                                  .stride = stride,
                                  .code = encoder,
                                  .tokens = QKV_PAGE_TOKENS,
                                  .tier = heads[head].tiers[part],
                                  .part = part,
                                  .dtype = QKV_FP16};
    const size_t coded = sizeof(qkv_simt_encoded) + QKV_PAGE_TOKENS * TIMED_DIM;
    encode[i].out = i < 64 ? put(NULL, coded) : encode[i % 64].out;
  }
  t->decode = (qkv_simt_decode_args){
      .jobs = put(decode, jobs * sizeof *decode), .tables = tables_at, .count = (uint32_t)jobs};
  t->encode = (qkv_simt_encode_args){
      .jobs = put(encode, jobs * sizeof *encode), .tables = tables_at, .count = (uint32_t)jobs};
  MUST(MemcpyHtoDAsync(area, copy, filled, stream));
  wait();
  free(image);
  free(numbers);
}

// Bytes of the rows, and of a copy as large.
static void print_row_times(double bits, bool calibrated, size_t pages) {
  naive_random random = {1};
  const size_t jobs = pages * TIMED_HEADS * 2, bytes = jobs * QKV_PAGE_TOKENS * ROW_BYTES;
  timed_rows t;
  timed c = {.bytes = bytes};
  qkv_coder *coder =
      calibrated ? coder_create_dense(&random, TIMED_HEADS, TIMED_DIM, TIMED_DIM, bits, bits, QKV_FRAME_PLAIN, NULL)
                 : coder_create(TIMED_HEADS, TIMED_DIM, TIMED_DIM, bits, bits, QKV_FRAME_PLAIN, NULL);
  MUST(MemAlloc(&c.from, bytes));
  MUST(MemAlloc(&c.to, bytes));
  make_timed_rows(&t, coder, jobs, c.from);
  const double decode = time_launches(launch_timed_decode, &t), encode = time_launches(launch_timed_encode, &t);
  const double copied = 2 * (double)bytes / time_launches(launch_copy, &c) / 1000;
  const char *kind = calibrated ? "calibrated" : "data-free";
  printf("decode_rows %s,%g,%zu,%.1f,%.0f,%.0f\n", kind, bits, bytes, decode, (double)bytes / decode / 1000, copied);
  printf("encode_rows %s,%g,%zu,%.1f,%.0f,%.0f\n", kind, bits, bytes, encode, (double)bytes / encode / 1000, copied);
  MUST(MemFree(c.from));
  MUST(MemFree(c.to));
  coder_destroy(coder);
}

int launch_end(void) {
  qkv_simt_tables tables;
  const char *times = getenv("QKV_ON_DEVICE_TIMES");
  if (times == NULL) return 0;
  const long asked = strtol(times, NULL, 10);
  const uint32_t ranges = asked > 0 && asked < TIMED_RANGES ? (uint32_t)asked : TIMED_RANGES;
  qkv_simt_tables_fill(&tables);
  printf("kernel,bits,bytes,us,gb_per_s,copy_gb_per_s\n");
  for (unsigned bits = 1; bits <= 4; bits++) {
    for (unsigned parts = 1; parts <= 2; parts++) {
      size_t bytes;
      uint8_t *pages = make_pages(bits, &bytes);
      print_times(qkv_simt_shape_for(TIMED_DIM, parts, 1, 4), &tables, bits, pages, bytes, ranges);
    }
  }
  static const double expanded[] = {1.5, 2.5, 3.5, 4.5};
  for (size_t i = 0; i < sizeof expanded / sizeof *expanded; i++) {
    size_t bytes;
    uint8_t *pages = make_expanded_pages(expanded[i], &bytes);
    print_times(qkv_simt_shape_calibrated(TIMED_DIM), &tables, expanded[i], pages, bytes, ranges);
  }
  const size_t pages = (size_t)ROW_PAGES / TIMED_RANGES * ranges;
  print_row_times(2, false, pages);
  print_row_times(4, false, pages);
  print_row_times(4, true, pages);
  return 0;
}
