#include "server/http/labels.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#define OTHER "other"

void qkvi_label_of_model(const char *tenant, const char *model, char *text) {
  (void)snprintf(text, QKVI_LABEL_NAME_MAX + 1, "%s,%s", tenant, model);
}

void qkvi_labels_init(qkvi_labels *labels, size_t max) {
  labels->max = max;
  labels->rows = calloc(max + 1, sizeof *labels->rows);
  if (labels->rows == NULL) abort();
  memcpy(labels->rows[max].name, OTHER, sizeof OTHER);
  atomic_init(&labels->count, 0);
  const int failed = pthread_mutex_init(&labels->lock, NULL);
  assert(failed == 0);
  (void)failed;
}

void qkvi_labels_deinit(qkvi_labels *labels) {
  (void)pthread_mutex_destroy(&labels->lock);
  free(labels->rows);
  labels->rows = NULL;
}

static qkvi_label *look(const qkvi_labels *labels, size_t count, uint64_t hash, const char *name) {
  for (size_t i = 0; i < count; i++) {
    if (labels->rows[i].hash == hash && strcmp(labels->rows[i].name, name) == 0) return &labels->rows[i];
  }
  return NULL;
}

// A tenant with this very name shares its row with the others.
static bool is_other(const char *name) {
  return strcmp(name, OTHER) == 0;
}

static qkvi_label *add(qkvi_labels *labels, uint64_t hash, const char *name) {
  pthread_mutex_lock(&labels->lock);
  const size_t count = atomic_load_explicit(&labels->count, memory_order_relaxed);
  qkvi_label *row = look(labels, count, hash, name);
  if (row == NULL && count < labels->max) {
    row = &labels->rows[count];
    row->hash = hash;
    (void)snprintf(row->name, sizeof row->name, "%s", name);
    atomic_store_explicit(&labels->count, count + 1, memory_order_release);
  }
  pthread_mutex_unlock(&labels->lock);
  return row;
}

qkvi_label *qkvi_labels_find(qkvi_labels *labels, const char *name, bool may_add) {
  const uint64_t hash = XXH3_64bits(name, strlen(name));
  const size_t count = qkvi_labels_count(labels);
  qkvi_label *row = look(labels, count, hash, name);
  if (row == NULL && may_add && count < labels->max && !is_other(name)) row = add(labels, hash, name);
  return row != NULL ? row : &labels->rows[labels->max];
}
