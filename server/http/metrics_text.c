// /metrics: the table of metrics, histograms, and what tenants and models hold, in Prometheus' text format.
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/daemon.h"
#include "server/http/http.h"
#include "server/tenants/metrics.h"

#define TYPE "text/plain; version=0.0.4; charset=utf-8"

static const char *const stage_names[QKV_STAGE_COUNT] = {
    [QKV_STAGE_QUEUE] = "queue",     [QKV_STAGE_ENCODE] = "encode", [QKV_STAGE_ATTEND] = "attend",
    [QKV_STAGE_RESTORE] = "restore", [QKV_STAGE_GPU] = "gpu",       [QKV_STAGE_UPLOAD] = "upload"};

static void put_head(FILE *out, const char *name, const char *type, const char *help) {
  fprintf(out, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

static void put_table(FILE *out, const qkv_daemon *daemon) {
  for (size_t i = 0; i < QKV_METRIC_COUNT; i++) {
    const qkv_metric *metric = &qkv_metric_table[i];
    put_head(out, metric->name, metric->kind == QKV_COUNTER ? "counter" : "gauge", metric->help);
    fprintf(out, "%s %" PRId64 "\n", metric->name, qkv_metric_read(&daemon->metrics[i]));
  }
}

// `labels`: "method=\"Attend\"".
static void put_histogram(FILE *out, const char *name, const char *labels, const qkv_histogram *histogram) {
  qkv_histogram_view view;
  uint64_t sum = 0;
  qkv_histogram_read(histogram, &view);
  for (size_t i = 0; i < QKV_HISTOGRAM_BOUNDS; i++) {
    sum += view.counts[i];
    fprintf(out, "%s_bucket{%s,le=\"%g\"} %" PRIu64 "\n", name, labels, (double)qkv_histogram_bounds_ns[i] / 1e9,
            sum);
  }
  fprintf(out, "%s_bucket{%s,le=\"+Inf\"} %" PRIu64 "\n", name, labels, view.count);
  fprintf(out, "%s_sum{%s} %.9g\n%s_count{%s} %" PRIu64 "\n", name, labels, (double)view.sum_ns / 1e9, name, labels,
          view.count);
}

static void put_stages(FILE *out) {
  char labels[64];
  put_head(out, "qkvd_stage_seconds", "histogram",
           "What requests' work consists of: jobs waiting for a thread, a page being coded, attention of a request, "
           "pages brought back from the SSD for a request.");
  for (size_t i = 0; i < QKV_STAGE_COUNT; i++) {
    (void)snprintf(labels, sizeof labels, "stage=\"%s\"", stage_names[i]);
    put_histogram(out, "qkvd_stage_seconds", labels, qkv_stage_histogram((qkv_stage)i));
  }
}

static int method_labels(char *labels, size_t bytes, const qkvi_observed_method *method) {
  return snprintf(labels, bytes, "service=\"%.*s\",method=\"%s\"", (int)method->service_bytes, method->service,
                  method->name);
}

static void put_methods(FILE *out, const qkvi_observed *observed) {
  char labels[256];
  put_head(out, "qkvd_call_seconds", "histogram",
           "Time from a call's arrival to its status; of streams the whole stream.");
  for (size_t i = 0; i < observed->method_count; i++) {
    (void)method_labels(labels, sizeof labels, &observed->methods[i]);
    put_histogram(out, "qkvd_call_seconds", labels, &observed->methods[i].seconds);
  }
  put_head(out, "qkvd_method_calls_total", "counter", "Calls that have ended, by method and status; none: no row.");
  for (size_t i = 0; i < observed->method_count; i++) {
    const qkvi_observed_method *method = &observed->methods[i];
    (void)method_labels(labels, sizeof labels, method);
    for (int code = 0; code < QKVI_STATUS_CODES; code++) {
      const uint64_t count = atomic_load_explicit(&method->ended[code], memory_order_relaxed);
      if (count == 0) continue;
      fprintf(out, "qkvd_method_calls_total{%s,code=\"%s\"} %" PRIu64 "\n", labels, qkv_status_name((qkv_status)code),
              count);
    }
  }
}

// ---- GPUs ----

enum { GPU_UP, GPU_BYTES, GPU_LIMIT, GPU_RANGES, GPU_SESSIONS, GPU_GAUGES };
static const struct gpu_metric {
  const char *name, *help;
} gpu_gauges[GPU_GAUGES] = {
    [GPU_UP] = {"qkvd_gpu_device_up", "1 while the GPU is used."},
    [GPU_BYTES] = {"qkvd_gpu_device_bytes", "Its memory that is in use."},
    [GPU_LIMIT] = {"qkvd_gpu_device_limit_bytes", "gpu-memory."},
    [GPU_RANGES] = {"qkvd_gpu_device_ranges", "Ranges of up to 64 pages of which it has copies."},
    [GPU_SESSIONS] = {"qkvd_gpu_device_sessions", "Sessions whose layers are on it."},
};

static uint64_t gpu_gauge(const qkvi_gpu_stats *stats, size_t gauge) {
  const uint64_t values[GPU_GAUGES] = {[GPU_UP] = !stats->down,
                                       [GPU_BYTES] = stats->bytes,
                                       [GPU_LIMIT] = stats->bytes_limit,
                                       [GPU_RANGES] = stats->ranges,
                                       [GPU_SESSIONS] = stats->sessions};
  return values[gauge];
}

// qkvd_gpu_X_total of all GPUs is qkvd_gpu_device_X_total of each.
static void put_gpu_counter(FILE *out, const qkvi_gpu_stats *stats, size_t count, size_t counter) {
  const qkv_metric *metric = &qkv_metric_table[QKV_METRIC_GPU_HITS + counter];
  char name[64];
  (void)snprintf(name, sizeof name, "qkvd_gpu_device_%s", metric->name + strlen("qkvd_gpu_"));
  put_head(out, name, "counter", metric->help);
  for (size_t i = 0; i < count; i++)
    fprintf(out, "%s{gpu=\"%s\"} %" PRId64 "\n", name, stats[i].device, stats[i].counts[counter]);
}

static void put_gpus(FILE *out, const qkvi_gpus *gpus) {
  qkvi_gpu_stats stats[QKVI_GPUS_MAX];
  const size_t count = qkvi_gpus_count(gpus);
  for (size_t i = 0; i < count; i++) stats[i] = qkvi_gpu_read(qkvi_gpus_at(gpus, i));
  for (size_t g = 0; count > 0 && g < GPU_GAUGES; g++) {
    put_head(out, gpu_gauges[g].name, "gauge", gpu_gauges[g].help);
    for (size_t i = 0; i < count; i++)
      fprintf(out, "%s{gpu=\"%s\"} %" PRIu64 "\n", gpu_gauges[g].name, stats[i].device, gpu_gauge(&stats[i], g));
  }
  for (size_t counter = 0; count > 0 && counter < QKVI_GPU_COUNTERS; counter++)
    put_gpu_counter(out, stats, count, counter);
}

// ---- Tenants and models ----

// The i-th row, and "other" behind the last one.
static const qkvi_label *row_of(const qkvi_labels *labels, size_t i, size_t count) {
  return &labels->rows[i == count ? labels->max : i];
}

static void put_tenant_calls(FILE *out, const qkvi_labels *tenants) {
  const size_t count = qkvi_labels_count(tenants);
  char labels[QKVI_LABEL_NAME_MAX + 16];
  qkv_histogram_view view;
  put_head(out, "qkvd_tenant_calls_total", "counter", "Calls of a tenant that have ended.");
  for (size_t i = 0; i <= count; i++) {
    const qkvi_label *row = row_of(tenants, i, count);
    qkv_histogram_read(&row->seconds, &view);
    fprintf(out, "qkvd_tenant_calls_total{tenant=\"%s\"} %" PRIu64 "\n", row->name, view.count);
  }
  put_head(out, "qkvd_tenant_failed_calls_total", "counter", "Of these, calls that were not answered OK.");
  for (size_t i = 0; i <= count; i++) {
    const qkvi_label *row = row_of(tenants, i, count);
    fprintf(out, "qkvd_tenant_failed_calls_total{tenant=\"%s\"} %" PRIu64 "\n", row->name,
            atomic_load_explicit(&row->failed, memory_order_relaxed));
  }
  put_head(out, "qkvd_tenant_call_seconds", "histogram",
           "Time from the arrival of a tenant's call to its status; of streams the whole stream.");
  for (size_t i = 0; i <= count; i++) {
    const qkvi_label *row = row_of(tenants, i, count);
    (void)snprintf(labels, sizeof labels, "tenant=\"%s\"", row->name);
    put_histogram(out, "qkvd_tenant_call_seconds", labels, &row->seconds);
  }
}

// Rows of the labels, and behind them the sum of the others. The caller frees it.
static qkvi_usage_row *fold(qkvi_labels *labels, const qkvi_usage_row *rows, size_t count) {
  qkvi_usage_row *folded = calloc(labels->max + 1, sizeof *folded);
  if (folded == NULL) abort();
  for (size_t i = 0; i < count; i++) {
    qkvi_usage_row *to = &folded[qkvi_labels_find(labels, rows[i].name, true) - labels->rows];
    to->sessions += rows[i].sessions;
    to->tokens += rows[i].tokens;
    to->memory_bytes += rows[i].memory_bytes;
    to->storage_bytes += rows[i].storage_bytes;
  }
  return folded;
}

static const struct usage_metric {
  const char *suffix, *help;
  size_t offset;
} usage_metrics[] = {
    {"sessions", "Sessions open.", offsetof(qkvi_usage_row, sessions)},
    {"tokens", "Tokens of the longest layer of each session.", offsetof(qkvi_usage_row, tokens)},
    {"memory_bytes", "Bytes in memory; pages that sessions share count for each.",
     offsetof(qkvi_usage_row, memory_bytes)},
    {"storage_bytes", "Bytes of pages on the SSD, before they are packed.", offsetof(qkvi_usage_row, storage_bytes)},
};

// `tenant="..."`, and of a model `model="...",tenant="..."`: that of the others is "other" in both.
static void put_labels(FILE *out, const char *label, const char *name) {
  const char *comma = strchr(name, ',');
  if (comma == NULL) {
    fprintf(out, "{%s=\"%s\"", label, name);
    fputs(strcmp(label, "model") == 0 ? ",tenant=\"other\"}" : "}", out);
  } else {
    fprintf(out, "{model=\"%s\",tenant=\"%.*s\"}", comma + 1, (int)(comma - name), name);
  }
}

static void put_usage(FILE *out, qkvi_labels *labels, const char *label, const qkvi_usage_row *rows, size_t count) {
  qkvi_usage_row *folded = fold(labels, rows, count);
  const size_t known = qkvi_labels_count(labels);
  for (size_t m = 0; m < sizeof usage_metrics / sizeof *usage_metrics; m++) {
    char name[64];
    (void)snprintf(name, sizeof name, "qkvd_%s_%s", label, usage_metrics[m].suffix);
    put_head(out, name, "gauge", usage_metrics[m].help);
    for (size_t i = 0; i <= known; i++) {
      const size_t at = i == known ? labels->max : i;
      uint64_t value;
      memcpy(&value, (const char *)&folded[at] + usage_metrics[m].offset, sizeof value);
      fputs(name, out);
      put_labels(out, label, labels->rows[at].name);
      fprintf(out, " %" PRIu64 "\n", value);
    }
  }
  free(folded);
}

void qkvi_http_metrics(qkv_daemon *daemon, qkvi_usage_cache *cache, qkvi_http_answer *answer) {
  qkvi_usage usage;
  FILE *out = open_memstream(&answer->body, &answer->length);
  if (out == NULL) abort();
  qkv_daemon_update_gauges(daemon);
  put_table(out, daemon);
  put_head(out, "qkvd_build_info", "gauge", "1, with the version.");
  fprintf(out, "qkvd_build_info{version=\"%s\"} 1\n", QKV_VERSION);
  put_head(out, "qkvd_ready", "gauge", "1 while /health/ready says so.");
  fprintf(out, "qkvd_ready %d\n", qkvi_http_is_ready(daemon, NULL));
  put_stages(out);
  put_gpus(out, daemon->gpus);
  put_methods(out, &daemon->observed);
  qkvi_usage_read(cache, daemon->store, &usage);
  put_usage(out, &daemon->observed.tenants, "tenant", usage.tenants, usage.tenant_count);
  put_usage(out, &daemon->observed.models, "model", usage.models, usage.model_count);
  put_tenant_calls(out, &daemon->observed.tenants);
  qkvi_tenant_metrics(out, daemon);
  qkvi_usage_free(&usage);
  if (fclose(out) != 0) abort();
  answer->type = TYPE;
}
