#include "engine/base/histogram.h"

#include <time.h>

#define US UINT64_C(1000)
#define MS (1000 * US)
#define S (1000 * MS)

const uint64_t qkv_histogram_bounds_ns[QKV_HISTOGRAM_BOUNDS] = {
    50 * US,  100 * US, 200 * US, 500 * US, 1 * MS, 2 * MS, 5 * MS, 10 * MS, 20 * MS, 50 * MS,
    100 * MS, 200 * MS, 500 * MS, 1 * S,    2 * S,  5 * S,  10 * S, 30 * S,  60 * S};

static qkv_histogram stages[QKV_STAGE_COUNT];

void qkv_histogram_add(qkv_histogram *histogram, uint64_t ns) {
  size_t bucket = 0;
  while (bucket < QKV_HISTOGRAM_BOUNDS && ns > qkv_histogram_bounds_ns[bucket]) bucket++;
  atomic_fetch_add_explicit(&histogram->counts[bucket], 1, memory_order_relaxed);
  atomic_fetch_add_explicit(&histogram->sum_ns, ns, memory_order_relaxed);
}

void qkv_histogram_read(const qkv_histogram *histogram, qkv_histogram_view *view) {
  view->count = 0;
  for (size_t i = 0; i <= QKV_HISTOGRAM_BOUNDS; i++) {
    view->counts[i] = atomic_load_explicit(&histogram->counts[i], memory_order_relaxed);
    view->count += view->counts[i];
  }
  view->sum_ns = atomic_load_explicit(&histogram->sum_ns, memory_order_relaxed);
}

uint64_t qkv_stage_now(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * S + (uint64_t)now.tv_nsec;
}

void qkv_stage_add(qkv_stage stage, uint64_t began_ns) {
  qkv_histogram_add(&stages[stage], qkv_stage_now() - began_ns);
}

const qkv_histogram *qkv_stage_histogram(qkv_stage stage) {
  return &stages[stage];
}
