// How much attention ranges get, and which of those that are resident gets least.
//
// What is counted of a range halves with each half-life. It is kept as the logarithm (to the base 2) of
//
//   sum over attends of  attention x 2^(time / half-life)
//
// which only attends change: the order of two ranges that get none stays, whatever the time. Ranges are compared by
// the page, as that is what their memory is taken for. Per second: the sum x 2^-(now / half-life) x ln 2 / half-life.
//
//   ranks   a binary heap of the resident ones. Their values only grow, and the heap has those of when it looked
//   last:
//           an attend changes nothing in it, and a look at the least brings those that are out of date to their
//           places
//
// Threads: one at a time.
#ifndef QKV_SERVER_GPU_ATTENTION_H
#define QKV_SERVER_GPU_ATTENTION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct qkv_device_copy;

#define QKVI_GPU_NO_ATTENTION (-1e300)

typedef struct qkvi_gpu_rank {
  double value;  // by the page, as of some time
  struct qkv_device_copy *copy;
} qkvi_gpu_rank;

typedef struct qkvi_gpu_ranks {
  size_t count, capacity;
  qkvi_gpu_rank *items;  // freed by the owner
} qkvi_gpu_ranks;

// `attention` more, now.
double qkvi_gpu_attention_add(double before, float attention, int64_t now_ms, int64_t half_life_ms);
double qkvi_gpu_attention_by_page(double attention, uint32_t pages);

// The copy has pages, and changes its number of pages while it is not in the heap alone.
void qkvi_gpu_ranks_add(qkvi_gpu_ranks *ranks, struct qkv_device_copy *copy);
void qkvi_gpu_ranks_remove(qkvi_gpu_ranks *ranks, struct qkv_device_copy *copy);
// The one that gets least, and its value; NULL: there is none, or it is not known yet, as many have been attended
// since the last look.
struct qkv_device_copy *qkvi_gpu_ranks_least(qkvi_gpu_ranks *ranks, double *value);

#endif
