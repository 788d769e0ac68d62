// Measures the processor time of this process, the least of several repeats, with the rungs in turn, so that other
// processes disturb it as little as possible. All data is in the cache.
#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "engine/base/cpu.h"
#include "engine/base/tensor.h"
#include "tests/checkkern/checkkern.h"

enum { REPEATS = 60, QUERIES_MAX = 8, RUNGS_MAX = 8 };
#define REPEAT_NS 1e5

// One kernel on one page.
typedef struct workload {
  const struct kernel_bench *kernel;
  page_part page;
  unsigned tier;
  size_t n;      // queries
  size_t bytes;  // that GB/s count: codes and gains; of encode and decode the rows as fp16
  float *rows, *queries, *scores, *sums, *turned, *matrix;
  float peaks[QUERIES_MAX], totals[QUERIES_MAX];
  uint8_t *gains, *codes;
  uint16_t *halves;  // the rows
  float errors[QKV_PAGE_TOKENS];
  qkv_integer_buffers *buffer;
  qkv_integer_queries integer_queries;
  qkv_integer_weights *integer_weights;
  qkv_dense dense;
  qkv_slot_turns turns;
  uint16_t pairs[QKV_DIM_MAX / 2];
  void *dense_memory;
  qkv_layouts *layouts;
} workload;

// What is measured.
typedef struct kernel_bench {
  const char *name;
  qkv_part part;
  bool attends;    // queries, codes
  unsigned parts;  // of the integer ones
  void (*run)(workload *w, const qkv_kernels *kernels);
} kernel_bench;

static void run_scores(workload *w, const qkv_kernels *kernels) {
  kernels->scores(&w->page.codes, w->queries, w->n, w->scores);
}

static void run_accumulate(workload *w, const qkv_kernels *kernels) {
  kernels->accumulate(&w->page.codes, w->scores, w->n, w->sums);
}

static void run_scores_integer(workload *w, const qkv_kernels *kernels) {
  kernels->scores_integer(&w->page.codes, &w->integer_queries, w->layouts, (qkv_ahead){0}, w->scores);
}

static void run_accumulate_integer(workload *w, const qkv_kernels *kernels) {
  kernels->accumulate_integer(&w->page.codes, w->integer_weights, w->layouts, (qkv_ahead){0}, w->sums);
}

static void run_softmax(workload *w, const qkv_kernels *kernels) {
  for (size_t i = 0; i < w->n; i++) {
    float *scores = w->scores + i * QKV_PAGE_TOKENS;
    const float peak = kernels->largest(w->rows + i * QKV_PAGE_TOKENS);
    memcpy(scores, w->rows + i * QKV_PAGE_TOKENS, QKV_PAGE_TOKENS * sizeof *scores);
    w->totals[i] = (float)kernels->weigh(scores, peak);
  }
}

static void run_softmax_integer(workload *w, const qkv_kernels *kernels) {
  kernels->peaks(w->rows, w->n, w->peaks);
  kernels->weigh_integer(w->rows, w->peaks, w->n, w->page.codes.gains, w->kernel->parts, w->integer_weights,
                         w->totals);
}

static void run_prepare(workload *w, const qkv_kernels *kernels) {
  kernels->prepare(w->queries, w->n, w->page.schedule.dim, w->kernel->parts == 1 ? QKVI_LIMIT_1 : QKVI_LIMIT_2,
                   &w->integer_queries);
}

static void run_encode(workload *w, const qkv_kernels *kernels) {
  kernels->encode(w->page.part, &w->page.schedule, w->tier, NULL, w->rows, w->gains, w->codes, w->errors);
}

static void run_encode_weighted(workload *w, const qkv_kernels *kernels) {
  kernels->encode(w->page.part, &w->page.schedule, w->tier, qkvi_weights_alike, w->rows, w->gains, w->codes,
                  w->errors);
}

// Rows of fp16.
static void run_encode_rows(workload *w, const qkv_kernels *kernels) {
  const size_t bytes = w->page.schedule.dim * sizeof(uint16_t);
  const qkv_rows rows = {.dtype = QKV_FP16, .data = (const uint8_t *)w->halves, .stride = bytes, .bytes = bytes};
  float errors[QKV_PAGE_TOKENS], squares[QKV_PAGE_TOKENS];
  kernels->encode_rows(w->page.part, &w->page.schedule, w->tier, &rows, QKV_PAGE_TOKENS, w->gains, w->codes, errors,
                       squares);
}

static void run_decode(workload *w, const qkv_kernels *kernels) {
  kernels->decode(w->page.part, &w->page.codes, w->rows);
}

static void run_hadamard(workload *w, const qkv_kernels *kernels) {
  kernels->hadamard_forward(w->rows, QKV_PAGE_TOKENS, w->page.schedule.dim);
}

static void run_multiply(workload *w, const qkv_kernels *kernels) {
  memcpy(w->turned, w->rows, QKV_PAGE_TOKENS * w->page.schedule.dim * sizeof *w->rows);
  kernels->multiply(w->matrix, w->page.schedule.dim, w->page.schedule.dim, w->turned, QKV_PAGE_TOKENS);
}

static void run_combine(workload *w, const qkv_kernels *kernels) {
  memcpy(w->turned, w->rows, QKV_PAGE_TOKENS * w->page.schedule.dim * sizeof *w->rows);
  kernels->combine(w->matrix, w->page.schedule.dim, w->page.schedule.dim, w->turned, QKV_PAGE_TOKENS);
}

static void run_multiply_integer(workload *w, const qkv_kernels *kernels) {
  memcpy(w->turned, w->rows, QKV_PAGE_TOKENS * w->page.schedule.dim * sizeof *w->rows);
  kernels->multiply_integer(&w->dense, w->page.schedule.dim, qkvi_weights_alike, NULL, w->turned, QKV_PAGE_TOKENS);
}

static void run_turn(workload *w, const qkv_kernels *kernels) {
  kernels->multiply_integer(&w->dense, w->page.schedule.dim, NULL, NULL, w->queries, w->n);
}

static void run_waves(workload *w, const qkv_kernels *kernels) {
  kernels->add_waves(&w->turns, w->pairs, w->turns.pairs, w->queries, w->n, w->scores);
}

static qkv_row_turns row_turns(const workload *w) {
  const size_t pairs = w->page.schedule.dim / 2;
  return (qkv_row_turns){pairs, 1, pairs, {w->matrix, w->matrix}, {w->turns.cosines, w->turns.sines}};
}

static void run_turn_rows(workload *w, const qkv_kernels *kernels) {
  const qkv_row_turns turns = row_turns(w);
  memcpy(w->turned, w->rows, QKV_PAGE_TOKENS * w->page.schedule.dim * sizeof *w->rows);
  kernels->turn_rows(&turns, true, QKV_PAGE_TOKENS, w->page.schedule.dim, w->turned);
}

static void run_frame_rows(workload *w, const qkv_kernels *kernels) {
  const qkv_row_turns turns = row_turns(w);
  memcpy(w->turned, w->rows, QKV_PAGE_TOKENS * w->page.schedule.dim * sizeof *w->rows);
  kernels->frame_rows(&turns, w->matrix, w->matrix, false, QKV_PAGE_TOKENS, w->page.schedule.dim, w->turned);
}

// Of a sixth of all inputs, as a page has them on average: of pages alone, and of two pages, which are kept.
static void run_levels(workload *w, const qkv_kernels *kernels) {
  const size_t dim = w->page.schedule.dim, pairs = dim / 2, first = pairs - dim / 12;
  const qkv_pair_turns turns = {w->matrix, w->matrix};
  const qkv_walk_queries queries = {w->n, dim, pairs, w->queries, w->matrix, w->matrix};
  const qkv_walk_level levels[] = {{pairs - dim / 48, pairs, turns, turns, (int32_t *)w->turned},
                                   {first, pairs - dim / 48, turns, turns, NULL}};
  kernels->sum_levels(&w->dense, dim, &queries, levels, 2, (const int32_t *)w->turned, w->sums);
}

// A fifth of all pairs have waves.
static void run_anchors(workload *w, const qkv_kernels *kernels) {
  const size_t pairs = w->page.schedule.dim / 2;
  const qkv_page_waves waves = {.pairs = pairs,
                                .stride = pairs,
                                .fast = pairs / 5,
                                .cosines = w->matrix,
                                .sines = w->matrix,
                                .ends = {pairs, pairs * 2 / 3, pairs / 2, pairs / 3},
                                .even = w->matrix,
                                .odd = w->matrix};
  const qkv_pair_turns turns = {w->matrix, w->matrix};
  kernels->add_anchors(&waves, turns, turns, w->queries, w->n, w->matrix, w->scores);
}

// Two rows of a page.
static qkv_outliers two_outliers(const workload *w) {
  static const uint8_t slots[] = {5, 40}, scales[2 * sizeof(float)] = {0};
  return (qkv_outliers){2, w->page.schedule.dim, slots, scales, w->codes};
}

static void run_score_outliers(workload *w, const qkv_kernels *kernels) {
  const qkv_outliers two = two_outliers(w);
  kernels->score_outliers(&two, w->queries, w->n, w->scores);
}

static void run_weigh_outliers(workload *w, const qkv_kernels *kernels) {
  const qkv_outliers two = two_outliers(w);
  kernels->weigh_outliers(&two, w->matrix, w->scores, w->peaks, w->n, w->sums);
}

static void run_columns(workload *w, const qkv_kernels *kernels) {
  kernels->score_columns(w->rows, w->page.schedule.dim, w->turned, &w->turns, w->queries, w->n, w->scores);
}

static void run_group_sums(workload *w, const qkv_kernels *kernels) {
  double squares, steps;
  kernels->sums(w->rows, QKV_PAGE_TOKENS, w->page.schedule.dim, qkvi_weights_alike, w->turned, &squares, &steps);
}

static void run_subtract(workload *w, const qkv_kernels *kernels) {
  kernels->subtract(w->rows, QKV_PAGE_TOKENS, w->page.schedule.dim, w->rows, w->turned);
}

// Conversions select their own instructions: none with the reference, else all that the machine has.
static void convert(workload *w, const qkv_kernels *kernels, qkv_dtype dtype, bool in) {
  const size_t n = (size_t)QKV_PAGE_TOKENS * w->page.schedule.dim;
  qkv_tensor_setup(kernels->needs == 0 ? 0 : UINT32_MAX);
  if (in) {
    qkv_to_float(dtype, w->turned, w->rows, n);
  } else {
    qkv_from_float(dtype, w->rows, w->turned, n);
  }
}

static void run_from_fp16(workload *w, const qkv_kernels *kernels) {
  convert(w, kernels, QKV_FP16, true);
}

static void run_to_fp16(workload *w, const qkv_kernels *kernels) {
  convert(w, kernels, QKV_FP16, false);
}

static void run_from_bf16(workload *w, const qkv_kernels *kernels) {
  convert(w, kernels, QKV_BF16, true);
}

static void run_to_bf16(workload *w, const qkv_kernels *kernels) {
  convert(w, kernels, QKV_BF16, false);
}

static const kernel_bench kernels_measured[] = {
    {"scores", QKV_K, true, 1, run_scores},
    {"scores q1", QKV_K, true, 1, run_scores_integer},
    {"scores q2", QKV_K, true, 2, run_scores_integer},
    {"softmax", QKV_V, true, 1, run_softmax},
    {"softmax w1", QKV_V, true, 1, run_softmax_integer},
    {"softmax w2", QKV_V, true, 2, run_softmax_integer},
    {"sums", QKV_V, true, 1, run_accumulate},
    {"sums w1", QKV_V, true, 1, run_accumulate_integer},
    {"sums w2", QKV_V, true, 2, run_accumulate_integer},
    {"prepare q1", QKV_K, true, 1, run_prepare},
    {"prepare q2", QKV_K, true, 2, run_prepare},
    {"encode K", QKV_K, false, 0, run_encode},
    {"encode V", QKV_V, false, 0, run_encode},
    {"encode_rows K", QKV_K, false, 0, run_encode_rows},
    {"encode_rows V", QKV_V, false, 0, run_encode_rows},
    {"decode K", QKV_K, false, 0, run_decode},
    {"decode V", QKV_V, false, 0, run_decode},
    {"weighted K", QKV_K, false, 0, run_encode_weighted},
    {"hadamard", QKV_K, false, 0, run_hadamard},
    {"multiply", QKV_K, false, 0, run_multiply},
    {"combine", QKV_K, false, 0, run_combine},
    {"multiply 16", QKV_K, false, 0, run_multiply_integer},
    {"turn 16", QKV_K, true, 1, run_turn},
    {"waves", QKV_K, true, 1, run_waves},
    {"turn_rows", QKV_K, false, 0, run_turn_rows},
    {"frame_rows", QKV_K, false, 0, run_frame_rows},
    {"columns", QKV_K, true, 1, run_columns},
    {"levels", QKV_K, true, 1, run_levels},
    {"anchors", QKV_K, true, 1, run_anchors},
    {"outlier K", QKV_K, true, 1, run_score_outliers},
    {"outlier V", QKV_V, true, 1, run_weigh_outliers},
    {"group sums", QKV_K, false, 0, run_group_sums},
    {"subtract", QKV_K, false, 0, run_subtract},
    {"from fp16", QKV_K, false, 0, run_from_fp16},
    {"to fp16", QKV_K, false, 0, run_to_fp16},
    {"from bf16", QKV_K, false, 0, run_from_bf16},
    {"to bf16", QKV_K, false, 0, run_to_bf16},
};

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

static double time_once(workload *w, const qkv_kernels *kernels, size_t calls) {
  const double start = now();
  for (size_t i = 0; i < calls; i++) w->kernel->run(w, kernels);
  return (now() - start) / (double)calls;
}

static void *zeroed(size_t bytes) {
  void *all = aligned_alloc(64, (bytes + 63) / 64 * 64);
  assert(all != NULL);
  return memset(all, 0, bytes);
}

static void workload_init(workload *w, const kernel_bench *kernel, const qkv_schedule *schedule,
                          const uint8_t tiers[QKV_PAGE_GROUPS], size_t n) {
  naive_random random = {2};
  const size_t dim = schedule->dim, rows = QKV_PAGE_TOKENS * dim;
  *w = (workload){.kernel = kernel, .tier = tiers[0], .n = n};
  page_part_init(&w->page, &random, kernel->part, schedule, tiers);
  w->rows = zeroed(rows * sizeof(float));
  w->turned = zeroed(rows * sizeof(float));
  w->matrix = zeroed(dim * dim * sizeof(float));
  w->queries = zeroed(QUERIES_MAX * dim * sizeof(float));
  w->scores = zeroed(QUERIES_MAX * QKV_PAGE_TOKENS * sizeof(float));
  w->sums = zeroed(QUERIES_MAX * dim * sizeof(float));
  w->gains = zeroed(QKV_PAGE_TOKENS);
  size_t code_bytes = 0;
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) code_bytes += qkv_schedule_group_bytes(schedule, tiers[g]);
  w->codes = zeroed(code_bytes);
  w->buffer = zeroed(sizeof *w->buffer);
  w->integer_queries = qkvi_integer_queries_in(w->buffer);
  w->integer_weights = zeroed(sizeof *w->integer_weights);
  w->layouts = zeroed(sizeof *w->layouts);
  fill_input(&random, INPUT_GAUSSIAN, w->queries, QUERIES_MAX * dim);
  fill_input(&random, INPUT_GAUSSIAN, w->scores, (size_t)QUERIES_MAX * QKV_PAGE_TOKENS);
  fill_rows(&random, INPUT_GAUSSIAN, w->rows, dim);
  w->halves = zeroed(rows * sizeof *w->halves);
  qkv_from_float(QKV_FP16, w->rows, w->halves, rows);
  fill_input(&random, INPUT_GAUSSIAN, w->matrix, dim * dim);
  w->dense_memory = zeroed(qkv_dense_bytes(dim, dim));
  w->dense = qkv_dense_in(w->dense_memory, w->matrix, dim, dim);
  w->turns = (qkv_slot_turns){
      .pairs = dim / 2, .step = 1, .apart = dim / 2, .cosines = w->matrix, .sines = w->matrix + dim * dim / 2};
  for (size_t i = 0; i < dim / 2; i++) w->pairs[i] = (uint16_t)i;
  w->bytes = kernel->attends ? code_bytes + QKV_PAGE_TOKENS : 2 * rows;
  if (!kernel->attends) return;
  const qkv_kernels *reference = qkv_kernels_at(0);
  reference->prepare(w->queries, n, (uint16_t)dim, kernel->parts == 1 ? QKVI_LIMIT_1 : QKVI_LIMIT_2,
                     &w->integer_queries);
  reference->peaks(w->scores, n, w->peaks);
  reference->weigh_integer(w->scores, w->peaks, n, w->page.codes.gains, kernel->parts, w->integer_weights, w->totals);
}

static void workload_deinit(workload *w) {
  page_part_deinit(&w->page);
  free(w->rows);
  free(w->turned);
  free(w->matrix);
  free(w->dense_memory);
  free(w->queries);
  free(w->scores);
  free(w->sums);
  free(w->gains);
  free(w->codes);
  free(w->halves);
  free(w->buffer);
  free(w->integer_weights);
  free(w->layouts);
}

static void measure(uint32_t cpu_flags, const kernel_bench *kernel, const qkv_schedule *schedule, const char *name,
                    const uint8_t tiers[QKV_PAGE_GROUPS], size_t n) {
  workload w;
  workload_init(&w, kernel, schedule, tiers, n);
  const qkv_kernels *rungs[RUNGS_MAX];
  double least[RUNGS_MAX];
  size_t calls[RUNGS_MAX], count = 0;
  for (size_t row = 0; qkv_kernels_at(row) != NULL && count < RUNGS_MAX; row++) {
    if ((qkv_kernels_at(row)->needs & ~cpu_flags) != 0) continue;
    rungs[count] = qkv_kernels_at(row);
    least[count] = time_once(&w, rungs[count], 3);
    calls[count] = 1 + (size_t)(REPEAT_NS / least[count]);
    count++;
  }
  for (int repeat = 0; repeat < REPEATS; repeat++) {
    for (size_t i = 0; i < count; i++) {
      const double time = time_once(&w, rungs[i], calls[i]);
      if (time < least[i]) least[i] = time;
    }
  }
  for (size_t i = 0; i < count; i++) {
    printf("%-11s %5u %-10s %2zu  %-11s %9.0f %8zu %7.2f %7.1f\n", kernel->name, schedule->dim, name, n,
           rungs[i]->name, least[i], w.bytes, (double)w.bytes / least[i], least[0] / least[i]);
  }
  workload_deinit(&w);
}

static void measure_counts(uint32_t cpu_flags, const char *filter, const qkv_schedule *schedule, const char *name,
                           const uint8_t tiers[QKV_PAGE_GROUPS]) {
  static const size_t counts[] = {1, 4, 8};
  for (size_t k = 0; k < sizeof kernels_measured / sizeof *kernels_measured; k++) {
    const kernel_bench *kernel = &kernels_measured[k];
    if (filter != NULL && strncmp(kernel->name, filter, strlen(filter)) != 0) continue;
    if (kernel->attends) {
      for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        measure(cpu_flags, kernel, schedule, name, tiers, counts[i]);
      }
    } else if (tiers[0] == tiers[QKV_PAGE_GROUPS - 1]) {
      measure(cpu_flags, kernel, schedule, name, tiers, 0);
    }
  }
}

// As a calibration gives them out where variances fall by e^8 over a row, six bits at most as long as there are
// others: bands of 16, or of 8 in narrow rows.
static void skewed_schedule(qkv_schedule *schedule, uint16_t dim) {
  const unsigned band = dim < 128 ? 8 : 16, bands = dim / band;
  unsigned depths[QKV_DIM_MAX / QKV_BAND] = {0};
  memset(schedule, 0, sizeof *schedule);
  schedule->dim = dim;
  for (unsigned tier = 0, given = 0; tier <= QKV_TIER_MAX; tier++) {
    for (; given < tier * dim / (QKV_TIER_BIT * band); given++) {
      unsigned best = 0;
      double most = -9;
      for (unsigned b = 0; b < bands; b++) {
        const double gain = depths[b] < 6 ? exp(-8.0 * b / bands) * exp2(-2.0 * depths[b]) : -1.0 * depths[b];
        if (gain > most && depths[b] < QKV_DEPTH_MAX && (b == 0 || depths[b] < depths[b - 1])) best = b, most = gain;
      }
      depths[best]++;
    }
    schedule->reach[tier][0] = dim;
    for (unsigned b = 0; b < bands; b++) {
      for (unsigned depth = 1; depth <= depths[b]; depth++) schedule->reach[tier][depth] = (uint16_t)((b + 1) * band);
    }
  }
  qkv_schedule_finish(schedule);
  assert(qkv_schedule_validate(schedule) == NULL);
}

static void measure_mix(uint32_t cpu_flags, const char *filter, const qkv_schedule *schedule, const char *bits,
                        const char *name) {
  uint8_t tiers[QKV_PAGE_GROUPS];
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) tiers[g] = (uint8_t)((bits[g] - '0') * QKV_TIER_BIT);
  measure_counts(cpu_flags, filter, schedule, name, tiers);
}

void bench(uint32_t cpu_flags, const char *filter) {
  static const uint16_t dims[] = {128, 64};
  static const char *const mixes[] = {"4444", "2222", "1111", "3333", "6666",
                                      "8888", "4422", "4321", "4222"};  // bits
  static const char *const skewed[][2] = {{"4444", "4 skewed"}, {"3333", "3 skewed"}, {"2222", "2 skewed"}};
  printf("kernel        dim bits        n  rung        ns a page    bytes    GB/s   times the reference\n");
  for (size_t d = 0; d < sizeof dims / sizeof *dims; d++) {
    qkv_schedule schedule;
    qkv_schedule_uniform(&schedule, dims[d]);
    for (size_t i = 0; i < sizeof mixes / sizeof *mixes; i++) {
      measure_mix(cpu_flags, filter, &schedule, mixes[i], mixes[i]);
    }
    skewed_schedule(&schedule, dims[d]);
    for (size_t i = 0; i < sizeof skewed / sizeof *skewed; i++) {
      measure_mix(cpu_flags, filter, &schedule, skewed[i][0], skewed[i][1]);
    }
  }
}
