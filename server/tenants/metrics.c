#include "server/tenants/metrics.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "server/tenants/usage.h"

typedef uint64_t value_fn(const qkvi_tenant_usage *usage);

#define X(id, from)                                           \
  static uint64_t used_##id(const qkvi_tenant_usage *usage) { \
    return usage->from;                                       \
  }
X(host_bytes, host_bytes)
X(ssd_bytes, ssd_bytes)
X(gpu_bytes, gpu_bytes)
X(sessions, sessions)
X(models, models)
X(calls, calls.calls)
X(message_bytes, calls.bytes)
X(rows, calls.rows)
X(refused, calls.refused)
#undef X

#define X(id)                                                 \
  static uint64_t most_##id(const qkvi_tenant_usage *usage) { \
    return (uint64_t)usage->quota.id;                         \
  }
X(host_bytes)
X(ssd_bytes)
X(gpu_bytes)
X(sessions)
X(models)
X(calls)
#undef X

static const struct {
  const char *name;
  value_fn *used, *most;
} resources[] = {{"host_bytes", used_host_bytes, most_host_bytes},
                 {"ssd_bytes", used_ssd_bytes, most_ssd_bytes},
                 {"gpu_bytes", used_gpu_bytes, most_gpu_bytes},
                 {"sessions", used_sessions, most_sessions},
                 {"models", used_models, most_models},
                 {"calls", used_calls, most_calls}};
enum { RESOURCES = sizeof resources / sizeof *resources };

typedef struct listing {
  FILE *out;
  const qkvi_labels *labels;
  const qkvi_tenant_usage *rows;
  size_t count;
} listing;

static bool has_label(const listing *all, size_t row) {
  return qkvi_labels_find((qkvi_labels *)all->labels, all->rows[row].quota.tenant, false) !=
         &all->labels->rows[all->labels->max];
}

static void put_line(const listing *all, const char *name, const char *tenant, const char *resource, uint64_t value) {
  if (resource != NULL) {
    fprintf(all->out, "%s{tenant=\"%s\",resource=\"%s\"} %" PRIu64 "\n", name, tenant, resource, value);
  } else {
    fprintf(all->out, "%s{tenant=\"%s\"} %" PRIu64 "\n", name, tenant, value);
  }
}

static void put_used(const listing *all, const char *name, const char *resource, value_fn *used) {
  uint64_t other = 0;
  bool any = false;
  for (size_t i = 0; i < all->count; i++) {
    const uint64_t value = used(&all->rows[i]);
    if (has_label(all, i)) {
      put_line(all, name, all->rows[i].quota.tenant, resource, value);
    } else {
      other += value;
      any = true;
    }
  }
  if (any) put_line(all, name, "other", resource, other);
}

static void put_head(FILE *out, const char *name, const char *type, const char *help) {
  fprintf(out, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

void qkvi_tenant_metrics(FILE *out, qkv_daemon *daemon) {
  qkvi_tenant_usage *rows = NULL;
  listing all = {.out = out, .labels = &daemon->observed.tenants};
  all.count = qkvi_tenant_usage_list(daemon, "", SIZE_MAX, &rows);
  all.rows = rows;
  put_head(out, "qkvd_tenant_quota_used", "gauge", "What a tenant takes of what a quota may limit.");
  for (size_t r = 0; r < RESOURCES; r++)
    put_used(&all, "qkvd_tenant_quota_used", resources[r].name, resources[r].used);
  put_head(out, "qkvd_tenant_quota_limit", "gauge", "What its quota says; no row: it says nothing.");
  for (size_t r = 0; r < RESOURCES; r++) {
    for (size_t i = 0; i < all.count; i++) {
      const uint64_t most = resources[r].most(&rows[i]);
      if (most > 0 && has_label(&all, i))
        put_line(&all, "qkvd_tenant_quota_limit", rows[i].quota.tenant, resources[r].name, most);
    }
  }
  put_head(out, "qkvd_tenant_message_bytes_total", "counter", "Bytes of a tenant's messages, both ways.");
  put_used(&all, "qkvd_tenant_message_bytes_total", NULL, used_message_bytes);
  put_head(out, "qkvd_tenant_rows_total", "counter", "Rows that a tenant has appended: tokens of a layer.");
  put_used(&all, "qkvd_tenant_rows_total", NULL, used_rows);
  put_head(out, "qkvd_tenant_quota_refused_total", "counter",
           "Calls of a tenant that were refused for a limit of calls, or a rate of its quota.");
  put_used(&all, "qkvd_tenant_quota_refused_total", NULL, used_refused);
  free(rows);
}
