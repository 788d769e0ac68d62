#include "server/http/observed.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

static size_t each_method(const qkv_rpc_method *const *tables, qkvi_observed_method *out) {
  size_t count = 0;
  for (size_t i = 0; tables[i] != NULL; i++) {
    for (const qkv_rpc_method *method = tables[i]; method->path != NULL; method++, count++) {
      if (out == NULL) continue;
      const char *slash = strrchr(method->path, '/');
      assert(slash != NULL && slash > method->path);
      out[count].method = method;
      out[count].name = slash + 1;
      out[count].service = method->path + 1;
      out[count].service_bytes = (size_t)(slash - method->path) - 1;
    }
  }
  return count;
}

void qkvi_observed_init(qkvi_observed *observed, const qkv_rpc_method *const *tables, size_t labels_max) {
  observed->method_count = each_method(tables, NULL);
  observed->methods = calloc(observed->method_count + 1, sizeof *observed->methods);
  if (observed->methods == NULL) abort();
  (void)each_method(tables, observed->methods);
  qkvi_labels_init(&observed->tenants, labels_max);
  qkvi_labels_init(&observed->models, labels_max);
}

void qkvi_observed_deinit(qkvi_observed *observed) {
  if (observed->methods == NULL) return;
  qkvi_labels_deinit(&observed->tenants);
  qkvi_labels_deinit(&observed->models);
  free(observed->methods);
  observed->methods = NULL;
}

// A row of a table stays where it is, and there are some fifty.
static qkvi_observed_method *find(const qkvi_observed *observed, const qkv_rpc_method *method) {
  for (size_t i = 0; i < observed->method_count; i++) {
    if (observed->methods[i].method == method) return &observed->methods[i];
  }
  return NULL;
}

void qkvi_observed_call(qkvi_observed *observed, const qkv_rpc_method *method, const char *tenant, qkv_status status,
                        uint64_t ns) {
  qkvi_observed_method *row = find(observed, method);
  assert(row != NULL && (size_t)status < QKVI_STATUS_CODES);
  qkv_histogram_add(&row->seconds, ns);
  atomic_fetch_add_explicit(&row->ended[status], 1, memory_order_relaxed);
  qkvi_label *label = qkvi_labels_find(&observed->tenants, tenant, status == QKV_OK);
  qkv_histogram_add(&label->seconds, ns);
  atomic_fetch_add_explicit(&label->failed, status != QKV_OK, memory_order_relaxed);
}
