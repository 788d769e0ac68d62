// Names that metrics have as values of a label, tenants and models, up to a maximum: later ones are counted as
// "other", so that clients cannot create any number of time series.
//
// A name stays in the table as long as the process runs, because a counter must not fall.
//
// Threads: any. Lookups are lock-free.
#ifndef QKV_SERVER_HTTP_LABELS_H
#define QKV_SERVER_HTTP_LABELS_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/histogram.h"
#include "engine/base/name.h"

enum { QKVI_LABELS_MAX = 1024 };  // of an option
enum { QKVI_LABEL_NAME_MAX = 2 * QKV_NAME_MAX + 1 };

typedef struct qkvi_label {
  char name[QKVI_LABEL_NAME_MAX + 1];  // of a tenant; of a model "TENANT,NAME", as names have no comma
  uint64_t hash;
  qkv_histogram seconds;    // of calls, of tenants
  _Atomic uint64_t failed;  // of these
} qkvi_label;

typedef struct qkvi_labels {
  pthread_mutex_t lock;  // adding
  _Atomic size_t count;  // released after the label is written
  size_t max;            // names; the row behind them is "other"
  qkvi_label *rows;      // [max + 1]
} qkvi_labels;

// Writes the name of a model's row to text[QKVI_LABEL_NAME_MAX + 1].
void qkvi_label_of_model(const char *tenant, const char *model, char *text);

void qkvi_labels_init(qkvi_labels *labels, size_t max);
void qkvi_labels_deinit(qkvi_labels *labels);
// The name's row, which is added where it is missing, `may_add` is set and the table is not full; else that of
// "other".
qkvi_label *qkvi_labels_find(qkvi_labels *labels, const char *name, bool may_add);
static inline size_t qkvi_labels_count(const qkvi_labels *labels) {
  return atomic_load_explicit(&labels->count, memory_order_acquire);
}

#endif
