// Metrics: one table of counters and gauges.
//
// A program lists its metrics in an X-macro (server/metrics.h), which gives an enum of indexes and the rows
// below. Updates are relaxed atomics: exact sums, no order. Names follow Prometheus: base units, `_total` on
// counters, `_bytes`, `_seconds`.
#ifndef QKV_ENGINE_BASE_METRIC_H
#define QKV_ENGINE_BASE_METRIC_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

typedef enum qkv_metric_kind { QKV_COUNTER, QKV_GAUGE } qkv_metric_kind;

typedef struct qkv_metric {
  const char *name;  // "qkvd_append_tokens_total"
  qkv_metric_kind kind;
  const char *help;  // one sentence
} qkv_metric;

typedef struct qkv_metric_value {
  _Atomic int64_t value;
} qkv_metric_value;

static inline void qkv_metric_add(qkv_metric_value *metric, int64_t delta) {
  atomic_fetch_add_explicit(&metric->value, delta, memory_order_relaxed);
}
static inline void qkv_metric_set(qkv_metric_value *metric, int64_t value) {
  atomic_store_explicit(&metric->value, value, memory_order_relaxed);
}
static inline int64_t qkv_metric_read(const qkv_metric_value *metric) {
  return atomic_load_explicit(&metric->value, memory_order_relaxed);
}

#endif
