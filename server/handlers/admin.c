// Admin.GetStatus, Admin.Drain.
#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "engine/base/cpu.h"
#include "engine/kernel/kernel.h"
#include "qkv/v1/admin.pb-c.h"
#include "server/daemon.h"
#include "server/handlers/control.h"
#include "server/handlers/handlers.h"

#define OPTION_TEXT_MAX 1024

// The response's repeated fields: arrays of messages, and of the pointers that protobuf-c wants.
typedef struct status_parts {
  Qkv__V1__Metric metrics[QKV_METRIC_COUNT];
  Qkv__V1__Metric *metric_pointers[QKV_METRIC_COUNT];
  size_t option_count;
  Qkv__V1__OptionValue *options;
  Qkv__V1__OptionValue **option_pointers;
  char (*option_texts)[OPTION_TEXT_MAX];
  Qkv__V1__GpuStatus *gpus;
  Qkv__V1__GpuStatus **gpu_pointers;
  qkvi_gpu_stats *gpu_stats;
  char **addresses;
  char cpu[256];  // the kernels' name and flags
} status_parts;

static void *allocate(size_t count, size_t size) {
  void *memory = calloc(count, size);
  assert(memory != NULL);
  return memory;
}

static const char *source_text(qkv_option_source source) {
  static const char *const texts[] = {"default", "file", "environment", "flag"};
  return texts[source];
}

static void put_metrics(qkv_daemon *daemon, status_parts *parts, Qkv__V1__GetStatusResponse *response) {
  qkv_daemon_update_gauges(daemon);
  for (size_t i = 0; i < QKV_METRIC_COUNT; i++) {
    Qkv__V1__Metric *metric = &parts->metrics[i];
    qkv__v1__metric__init(metric);
    metric->name = (char *)qkv_metric_table[i].name;
    metric->help = (char *)qkv_metric_table[i].help;
    metric->type = (char *)(qkv_metric_table[i].kind == QKV_COUNTER ? "counter" : "gauge");
    metric->value = (double)qkv_metric_read(&daemon->metrics[i]);
    parts->metric_pointers[i] = metric;
  }
  response->n_metrics = QKV_METRIC_COUNT;
  response->metrics = parts->metric_pointers;
  response->rss_bytes = (uint64_t)qkv_metric_read(&daemon->metrics[QKV_METRIC_RSS_BYTES]);
}

static uint64_t count_of(const qkvi_gpu_stats *stats, qkv_metric_id metric) {
  return (uint64_t)stats->counts[metric - QKV_METRIC_GPU_HITS];
}

static void put_gpus(const qkv_daemon *daemon, status_parts *parts, Qkv__V1__GetStatusResponse *response) {
  const size_t count = qkvi_gpus_count(daemon->gpus);
  if (count == 0) return;
  parts->gpus = allocate(count, sizeof *parts->gpus);
  parts->gpu_pointers = allocate(count, sizeof(void *));
  parts->gpu_stats = allocate(count, sizeof *parts->gpu_stats);
  for (size_t i = 0; i < count; i++) {
    qkvi_gpu_stats *stats = &parts->gpu_stats[i];
    Qkv__V1__GpuStatus *gpu = &parts->gpus[i];
    *stats = qkvi_gpu_read(qkvi_gpus_at(daemon->gpus, i));
    qkv__v1__gpu_status__init(gpu);
    gpu->device = (char *)stats->device;
    gpu->name = stats->name;
    gpu->uuid = stats->uuid;
    gpu->up = !stats->down;
    gpu->reason = stats->down ? stats->reason : (char *)"";
    gpu->bytes = stats->bytes;
    gpu->bytes_limit = stats->bytes_limit;
    gpu->ranges = stats->ranges;
    gpu->sessions = stats->sessions;
    gpu->hits = count_of(stats, QKV_METRIC_GPU_HITS);
    gpu->misses = count_of(stats, QKV_METRIC_GPU_MISSES);
    gpu->failures = count_of(stats, QKV_METRIC_GPU_FAILURES);
    gpu->less_attended = count_of(stats, QKV_METRIC_GPU_LESS_ATTENDED);
    parts->gpu_pointers[i] = gpu;
  }
  response->n_gpus = count;
  response->gpus = parts->gpu_pointers;
}

static void put_options(const qkv_daemon *daemon, status_parts *parts, Qkv__V1__GetStatusResponse *response) {
  size_t count = qkv_server_option_count;
  parts->options = allocate(count, sizeof(*parts->options));
  parts->option_pointers = allocate(count, sizeof(void *));
  parts->option_texts = allocate(count, sizeof(*parts->option_texts));
  for (size_t i = 0; i < count; i++) {
    const char *name = qkv_server_option_table[i].name;
    qkv_options_text(daemon->option_set, i, parts->option_texts[i], OPTION_TEXT_MAX);
    qkv__v1__option_value__init(&parts->options[i]);
    parts->options[i].name = (char *)name;
    parts->options[i].value = parts->option_texts[i];
    parts->options[i].source = (char *)source_text(qkv_options_source(daemon->option_set, name));
    parts->option_pointers[i] = &parts->options[i];
  }
  response->n_options = count;
  response->options = parts->option_pointers;
}

static void put_addresses(const qkv_daemon *daemon, status_parts *parts, Qkv__V1__GetStatusResponse *response) {
  size_t count = daemon->options->listen.count;
  parts->addresses = allocate(count, sizeof(char *));
  for (size_t i = 0; i < count; i++) parts->addresses[i] = (char *)qkv_rpc_server_address(daemon->rpc, i);
  response->n_listen = count;
  response->listen = parts->addresses;
}

static void put_store(const qkv_daemon *daemon, Qkv__V1__GetStatusResponse *response) {
  qkv_store_stats stats = qkv_store_read_stats(daemon->store);
  response->models = stats.models;
  response->sessions = stats.sessions;
  response->kv_bytes = stats.memory.bytes_used;
  response->kv_bytes_limit = stats.memory.bytes_max;
  response->kv_bytes_available = stats.memory.bytes_limit;
  response->overhead_bytes = (uint64_t)qkvi_memory_overhead(daemon->store);
  response->learning_bytes = stats.learning_bytes;
  response->calibration_bytes = stats.calibration_bytes;
}

static void put_cpu(status_parts *parts, Qkv__V1__GetStatusResponse *response) {
  const qkv_kernels *kernels = qkv_kernels_get();
  char flags[128];
  qkv_cpu_text(kernels->needs, flags, sizeof(flags));
  (void)snprintf(parts->cpu, sizeof(parts->cpu), "%s: %s", kernels->name, flags);
  response->cpu = parts->cpu;
}

static void on_get_status(qkv_rpc_call *call, qkv_bytes message) {
  qkv_daemon *daemon = qkv_rpc_context(call);
  qkv_error error = {0};
  void *request = qkvi_control_unpack_here(message, &qkv__v1__get_status_request__descriptor, &error);
  if (request == NULL) {
    qkvi_control_fail(call, &error);
    return;
  }
  qkvi_control_free(request);

  status_parts *parts = allocate(1, sizeof(*parts));
  Qkv__V1__GetStatusResponse response = QKV__V1__GET_STATUS_RESPONSE__INIT;
  response.version = (char *)QKV_VERSION;
  response.state = (char *)(atomic_load(&daemon->draining) ? "draining" : "serving");
  response.uptime_ms = (uint64_t)qkv_daemon_uptime_ms(daemon);
  put_cpu(parts, &response);
  put_store(daemon, &response);
  put_metrics(daemon, parts, &response);
  put_gpus(daemon, parts, &response);
  put_options(daemon, parts, &response);
  put_addresses(daemon, parts, &response);
  qkvi_control_reply(call, &response.base);
  free(parts->gpus);
  free(parts->gpu_pointers);
  free(parts->gpu_stats);
  free(parts->options);
  free(parts->option_pointers);
  free(parts->option_texts);
  free(parts->addresses);
  free(parts);
}

// ---- Drain ----

static qkv_status check_time(const char *field, uint64_t ms, uint64_t most, qkv_error *error) {
  if (ms <= most) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s is %" PRIu64 ", at most %" PRIu64, field, ms, most);
}

static qkv_status drain(const qkv_daemon *daemon, const Qkv__V1__DrainRequest *request, qkv_error *error) {
  enum { GRACE_MAX_MS = 3600000, NOTICE_MAX_MS = 600000 };  // by the options
  const qkv_server_options *options = daemon->options;
  QKV_TRY(check_time("grace_ms", request->grace_ms, GRACE_MAX_MS, error));
  QKV_TRY(check_time("notice_ms", request->notice_ms, NOTICE_MAX_MS, error));
  qkvi_drain_fn *const ask = atomic_load_explicit(&daemon->drain_asked, memory_order_acquire);
  if (ask == NULL)
    return qkv_fail(error, QKV_FAILED_PRECONDITION, "this daemon is part of a process that does not end with it");
  ask(daemon->drain_context, request->notice_ms > 0 ? (int64_t)request->notice_ms : options->drain_notice,
      request->grace_ms > 0 ? (int64_t)request->grace_ms : options->drain_grace);
  return QKV_OK;
}

static void on_drain(qkv_rpc_call *call, qkv_bytes message) {
  qkv_error error = {0};
  Qkv__V1__DrainRequest *request = qkvi_control_unpack_here(message, &qkv__v1__drain_request__descriptor, &error);
  if (request == NULL) return qkvi_control_fail(call, &error);
  const qkv_status status = drain(qkv_rpc_context(call), request, &error);
  qkvi_control_free(request);
  if (status != QKV_OK) return qkvi_control_fail(call, &error);
  Qkv__V1__DrainResponse response = QKV__V1__DRAIN_RESPONSE__INIT;
  qkvi_control_reply(call, &response.base);
}

const qkv_rpc_method qkvi_admin_methods[] = {
    {.path = "/qkv.v1.Admin/GetStatus", .message = on_get_status},
    {.path = "/qkv.v1.Admin/Drain", .message = on_drain},
    {0},
};
