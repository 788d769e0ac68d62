// Processor time of this process, the least of several repeats, the rungs in turn: what other processes do shows as
// little as it can. Everything is in the cache.
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "engine/base/cpu.h"
#include "tests/checkkern/checkkern.h"

enum { REPEATS = 9, QUERIES_MAX = 8, RUNGS_MAX = 8 };
#define REPEAT_NS 2e6

// One kernel on one page.
typedef struct workload {
  const char *kernel;
  page_part page;
  unsigned tier;
  size_t n;      // queries
  size_t bytes;  // that GB/s count: codes and gains; of encode and decode the rows as fp16
  float *rows, *queries, *scores, *sums;
  uint8_t *gains, *codes;
} workload;

static void run_once(const workload *w, const qkv_kernels *kernels) {
  switch (w->kernel[0]) {
    case 's':
      kernels->scores(&w->page.codes, w->queries, w->n, w->scores);
      break;
    case 'a':
      kernels->accumulate(&w->page.codes, w->scores, w->n, w->sums);
      break;
    case 'e':
      kernels->encode(w->page.part, &w->page.schedule, w->tier, NULL, w->rows, w->gains, w->codes);
      break;
    default:
      kernels->decode(w->page.part, &w->page.codes, w->rows);
  }
}

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

static double time_once(const workload *w, const qkv_kernels *kernels, size_t calls) {
  const double start = now();
  for (size_t i = 0; i < calls; i++) run_once(w, kernels);
  return (now() - start) / (double)calls;
}

static float *floats(size_t n) {
  float *all = calloc(n, sizeof *all);
  assert(all != NULL);
  return all;
}

static void workload_init(workload *w, const char *kernel, qkv_part part, uint16_t dim, unsigned tier, size_t n) {
  naive_random random = {2};
  qkv_schedule schedule;
  qkv_schedule_uniform(&schedule, dim);
  const uint8_t tiers[QKV_PAGE_GROUPS] = {(uint8_t)tier, (uint8_t)tier, (uint8_t)tier, (uint8_t)tier};
  *w = (workload){.kernel = kernel, .tier = tier, .n = n};
  page_part_init(&w->page, &random, part, &schedule, tiers);
  w->rows = floats((size_t)QKV_PAGE_TOKENS * dim);
  w->queries = floats((size_t)QUERIES_MAX * dim);
  w->scores = floats((size_t)QUERIES_MAX * QKV_PAGE_TOKENS);
  w->sums = floats((size_t)QUERIES_MAX * dim);
  w->gains = malloc(QKV_PAGE_TOKENS);
  const size_t code_bytes = QKV_PAGE_GROUPS * qkv_schedule_group_bytes(&schedule, tier);
  w->codes = malloc(code_bytes);
  assert(w->gains != NULL && w->codes != NULL);
  fill_input(&random, INPUT_GAUSSIAN, w->queries, (size_t)QUERIES_MAX * dim);
  fill_input(&random, INPUT_GAUSSIAN, w->scores, (size_t)QUERIES_MAX * QKV_PAGE_TOKENS);
  fill_rows(&random, INPUT_GAUSSIAN, w->rows, dim);
  w->bytes = n > 0 ? code_bytes + QKV_PAGE_TOKENS : (size_t)2 * QKV_PAGE_TOKENS * dim;
}

static void workload_deinit(workload *w) {
  page_part_deinit(&w->page);
  free(w->rows);
  free(w->queries);
  free(w->scores);
  free(w->sums);
  free(w->gains);
  free(w->codes);
}

static void measure(uint32_t cpu_flags, const char *kernel, qkv_part part, uint16_t dim, unsigned tier, size_t n) {
  workload w;
  workload_init(&w, kernel, part, dim, tier, n);
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
    printf("%-10s %s %5u %4u %2zu  %-9s %9.0f %8zu %7.2f %7.1f\n", kernel, part == QKV_K ? "K" : "V", dim, tier, n,
           rungs[i]->name, least[i], w.bytes, (double)w.bytes / least[i], least[0] / least[i]);
  }
  workload_deinit(&w);
}

void bench(uint32_t cpu_flags) {
  static const uint16_t dims[] = {64, 128};
  static const unsigned tiers[] = {4, 2, 1, 3, 8};
  static const size_t counts[] = {1, 4, 8};
  printf("kernel  part   dim tier  n  rung      ns a page    bytes    GB/s   times the reference\n");
  for (size_t d = 0; d < sizeof dims / sizeof *dims; d++) {
    for (size_t t = 0; t < sizeof tiers / sizeof *tiers; t++) {
      for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        measure(cpu_flags, "scores", QKV_K, dims[d], tiers[t], counts[i]);
        measure(cpu_flags, "accumulate", QKV_V, dims[d], tiers[t], counts[i]);
      }
      for (qkv_part part = QKV_K; part <= QKV_V; part++) {
        measure(cpu_flags, "decode", part, dims[d], tiers[t], 0);
        measure(cpu_flags, "encode", part, dims[d], tiers[t], 0);
      }
    }
  }
}
