// Histograms of durations, and those of the stages that every request's work is made of.
//
// Buckets are fixed, 50 µs to 60 s, so that adding is one search among 19 bounds and two relaxed atomic additions.
// A reader may see the count of a duration before its part of the sum.
//
//   const uint64_t began = qkv_stage_now();
//   ... work ...
//   qkv_stage_add(QKV_STAGE_ENCODE, began);
//
// Threads: any.
#ifndef QKV_ENGINE_BASE_HISTOGRAM_H
#define QKV_ENGINE_BASE_HISTOGRAM_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

enum { QKV_HISTOGRAM_BOUNDS = 19 };
// Upper bounds of the buckets, in ascending order; the last bucket, behind them, has none.
extern const uint64_t qkv_histogram_bounds_ns[QKV_HISTOGRAM_BOUNDS];

typedef struct qkv_histogram {  // zeros: empty
  _Atomic uint64_t counts[QKV_HISTOGRAM_BOUNDS + 1];
  _Atomic uint64_t sum_ns;
} qkv_histogram;

void qkv_histogram_add(qkv_histogram *histogram, uint64_t ns);

// What a histogram held at one moment.
typedef struct qkv_histogram_view {
  uint64_t counts[QKV_HISTOGRAM_BOUNDS + 1];  // of each bucket alone
  uint64_t count;                             // of all
  uint64_t sum_ns;
} qkv_histogram_view;
void qkv_histogram_read(const qkv_histogram *histogram, qkv_histogram_view *view);

// The stages, of the whole process.
typedef enum qkv_stage {
  QKV_STAGE_QUEUE,    // a job that a client waits for: until a thread of the executor takes it
  QKV_STAGE_ENCODE,   // a page: its rows become codes
  QKV_STAGE_ATTEND,   // the attention of a request's items over the layers that they have locked
  QKV_STAGE_RESTORE,  // cold pages that a request needs: read from the SSD into memory
  QKV_STAGE_GPU,      // a call of kernels on a GPU: from its start until its results are there
  QKV_STAGE_UPLOAD,   // a range of pages: from memory to a GPU
  QKV_STAGE_COUNT
} qkv_stage;

uint64_t qkv_stage_now(void);  // ns on the monotonic clock
void qkv_stage_add(qkv_stage stage, uint64_t began_ns);
const qkv_histogram *qkv_stage_histogram(qkv_stage stage);

#endif
