#include "server/gpu/attention.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>

#include "server/gpu/internal.h"

enum { REFRESHED_MAX = 256 };  // by a look

double qkvi_gpu_attention_add(double before, float attention, int64_t now_ms, int64_t half_life_ms) {
  if (!(attention > 0)) return before;
  const double more = log2((double)attention) + (double)now_ms / (double)half_life_ms;
  const double larger = fmax(before, more), smaller = fmin(before, more);
  return larger + log2(1 + exp2(smaller - larger));
}

double qkvi_gpu_attention_by_page(double attention, uint32_t pages) {
  return attention - log2(pages);
}

static double value_of(const struct qkv_device_copy *copy) {
  return qkvi_gpu_attention_by_page(copy->attention, copy->pages);
}

// ---- The heap ----

static void put(qkvi_gpu_ranks *ranks, size_t place, qkvi_gpu_rank item) {
  ranks->items[place] = item;
  item.copy->place = place;
}

static void sift_up(qkvi_gpu_ranks *ranks, size_t place, qkvi_gpu_rank item) {
  while (place > 0 && ranks->items[(place - 1) / 2].value > item.value) {
    put(ranks, place, ranks->items[(place - 1) / 2]);
    place = (place - 1) / 2;
  }
  put(ranks, place, item);
}

static void sift_down(qkvi_gpu_ranks *ranks, size_t place, qkvi_gpu_rank item) {
  for (;;) {
    size_t child = 2 * place + 1;
    if (child >= ranks->count) break;
    if (child + 1 < ranks->count && ranks->items[child + 1].value < ranks->items[child].value) child++;
    if (ranks->items[child].value >= item.value) break;
    put(ranks, place, ranks->items[child]);
    place = child;
  }
  put(ranks, place, item);
}

void qkvi_gpu_ranks_add(qkvi_gpu_ranks *ranks, struct qkv_device_copy *copy) {
  if (ranks->count == ranks->capacity) {
    ranks->capacity = ranks->capacity == 0 ? 64 : 2 * ranks->capacity;
    ranks->items = realloc(ranks->items, ranks->capacity * sizeof *ranks->items);
    if (ranks->items == NULL) abort();
  }
  sift_up(ranks, ranks->count++, (qkvi_gpu_rank){value_of(copy), copy});
}

void qkvi_gpu_ranks_remove(qkvi_gpu_ranks *ranks, struct qkv_device_copy *copy) {
  const size_t place = copy->place;
  assert(place < ranks->count && ranks->items[place].copy == copy);
  const qkvi_gpu_rank last = ranks->items[--ranks->count];
  if (place == ranks->count) return;
  if (place > 0 && ranks->items[(place - 1) / 2].value > last.value) {
    sift_up(ranks, place, last);
  } else {
    sift_down(ranks, place, last);
  }
}

struct qkv_device_copy *qkvi_gpu_ranks_least(qkvi_gpu_ranks *ranks, double *value) {
  for (size_t i = 0; i < REFRESHED_MAX && ranks->count > 0; i++) {
    qkvi_gpu_rank top = ranks->items[0];
    *value = value_of(top.copy);
    if (*value <= top.value) return top.copy;
    top.value = *value;
    sift_down(ranks, 0, top);
  }
  return NULL;
}
