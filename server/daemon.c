#include "server/daemon.h"
#include "engine/base/clock.h"

#include <assert.h>
#include <inttypes.h>
#include <jansson.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/base/cpu.h"
#include "server/auth/identity.h"
#include "server/handlers/block.h"
#include "server/handlers/handlers.h"
#include "server/http/http.h"
#include "server/lifetime.h"
#include "server/residency/fold.h"
#include "server/rpc/inspect.h"
#include "server/service.h"

enum { BLOCKING_THREADS = 16 };  // of each half, of which one tenant has 8; their jobs mostly wait

int64_t qkv_daemon_uptime_ms(const qkv_daemon *daemon) {
  return qkv_now_ms() - daemon->started_ms;
}

// ---- Metrics ----

static void count_began(void *context) {
  qkv_daemon *daemon = context;
  qkv_metric_add(&daemon->metrics[QKV_METRIC_CALLS], 1);
  qkv_metric_add(&daemon->metrics[QKV_METRIC_CALLS_RUNNING], 1);
}

static qkv_metric_id outcome(qkv_status status) {
  switch (status) {
    case QKV_OK:
      return QKV_METRIC_CALLS_OK;
    case QKV_CANCELLED:
    case QKV_DEADLINE_EXCEEDED:
      return QKV_METRIC_CALLS_CANCELLED;
    case QKV_INVALID_ARGUMENT:
      return QKV_METRIC_CALLS_BAD_REQUEST;
    case QKV_NOT_FOUND:
    case QKV_ALREADY_EXISTS:
    case QKV_FAILED_PRECONDITION:
    case QKV_UNIMPLEMENTED:
      return QKV_METRIC_CALLS_REFUSED;
    case QKV_PERMISSION_DENIED:
    case QKV_UNAUTHENTICATED:
      return QKV_METRIC_CALLS_DENIED;
    case QKV_RESOURCE_EXHAUSTED:
      return QKV_METRIC_CALLS_EXHAUSTED;
    case QKV_UNAVAILABLE:
      return QKV_METRIC_CALLS_UNAVAILABLE;
    case QKV_INTERNAL:
    case QKV_DATA_LOSS:
      break;
  }
  return QKV_METRIC_CALLS_FAILED;
}

static void count_ended(void *context, qkv_status status) {
  qkv_daemon *daemon = context;
  qkv_metric_add(&daemon->metrics[QKV_METRIC_CALLS_RUNNING], -1);
  qkv_metric_add(&daemon->metrics[outcome(status)], 1);
}

static void count_timed(void *context, const qkv_rpc_method *method, const char *tenant, qkv_status status,
                        uint64_t ns) {
  qkv_daemon *daemon = context;
  qkvi_observed_call(&daemon->observed, method, tenant, status, ns);
}

static bool is_refusal(qkv_status status) {
  return status == QKV_UNAUTHENTICATED || status == QKV_PERMISSION_DENIED;
}

// GetStatus is called by monitors.
static bool is_audited(const qkv_rpc_report *report) {
  static const char admin[] = "/qkv.v1.Admin/";
  if (strncmp(report->method, admin, sizeof admin - 1) != 0) return false;
  return strcmp(report->method + sizeof admin - 1, "GetStatus") != 0;
}

static void audit_call(const qkv_daemon *daemon, const qkv_rpc_report *report, const char *peer) {
  qkvi_audit_write(daemon->audit, &(qkvi_audit_line){.refused = is_refusal(report->status),
                                                     .call = report->number,
                                                     .method = report->method,
                                                     .tenant = report->tenant,
                                                     .peer = peer,
                                                     .traceparent = report->traceparent,
                                                     .status = report->status,
                                                     .reason = report->reason});
}

static double ms_of(uint64_t ns) {
  return (double)ns * 1e-6;
}

static const char *or_null(const char *text) {
  return text[0] == '\0' ? NULL : text;
}

// Of a stream that goes on: one of its messages.
static void log_slow(const qkv_rpc_report *report, const char *peer) {
  qkv_log(QKV_LOG_WARN, report->step ? "slow step" : "slow call",
          "{s:s, s:I, s:s, s:s, s:s*, s:s*, s:s, s:f, s:f, s:f, s:f, s:f}", "call", report->method, "number",
          (json_int_t)report->number, "peer", peer, "tenant", report->tenant, "session", or_null(report->session),
          "traceparent", or_null(report->traceparent), "status", qkv_status_name(report->status), "ms",
          ms_of(report->ns), "message_ms", ms_of(report->message_ns), "quota_ms", ms_of(report->quota_ns), "queue_ms",
          ms_of(report->queue_ns), "work_ms",
          ms_of(report->ns - report->message_ns - report->quota_ns - report->queue_ns));
}

static void log_failed(const qkv_rpc_report *report, const char *peer) {
  qkv_log(QKV_LOG_DEBUG, "call failed", "{s:s, s:I, s:s, s:s, s:s*, s:s*, s:s, s:s}", "call", report->method,
          "number", (json_int_t)report->number, "peer", peer, "tenant", report->tenant, "session",
          or_null(report->session), "traceparent", or_null(report->traceparent), "status",
          qkv_status_name(report->status), "reason", report->reason);
}

static void log_call(void *context, const qkv_rpc_report *report) {
  const qkv_daemon *daemon = context;
  const uint64_t slow_ns = (uint64_t)daemon->options->slow_call * 1000000;
  const bool failed = report->status != QKV_OK && qkv_log_wants(QKV_LOG_DEBUG);
  const bool slow = slow_ns > 0 && (!report->stream || report->step) && report->ns >= slow_ns;
  const bool audited = daemon->audit != NULL && (is_refusal(report->status) || is_audited(report));
  char peer[256];
  if (!failed && !slow && !audited) return;
  qkv_rpc_report_peer(report, peer, sizeof peer);
  if (audited) audit_call(daemon, report, peer);
  if (failed) log_failed(report, peer);
  if (slow) log_slow(report, peer);
}

static void update_storage(qkv_daemon *daemon) {
  qkv_storage_stats stats;
  qkv_storage_read_stats(qkvi_residency_storage(daemon->residency), &stats);
  qkv_metric_set(&daemon->metrics[QKV_METRIC_STORAGE_RECORDS], (int64_t)stats.records);
  qkv_metric_set(&daemon->metrics[QKV_METRIC_STORAGE_SEGMENTS], (int64_t)stats.segments);
  qkv_metric_set(&daemon->metrics[QKV_METRIC_STORAGE_LIVE_BYTES], (int64_t)stats.live_bytes);
  qkv_metric_set(&daemon->metrics[QKV_METRIC_STORAGE_DEAD_BYTES], (int64_t)stats.dead_bytes);
  qkv_metric_set(&daemon->metrics[QKV_METRIC_STORAGE_DIRTY_BYTES], (int64_t)stats.dirty_bytes);
  qkv_metric_set(&daemon->metrics[QKV_METRIC_STORAGE_UNREAD_SEGMENTS], (int64_t)stats.unread_segments);
  qkv_metric_set(&daemon->metrics[QKV_METRIC_STORAGE_BAD_RECORDS], (int64_t)(stats.bad_records + stats.read_errors));
}

// Of all models, and how many have any.
typedef struct calibration_sums {
  double gains, errors, data_free;
  int tried, watched;
} calibration_sums;

static bool add_calibration(void *context, const qkv_model *model, size_t sessions) {
  calibration_sums *sums = context;
  qkv_calibration_state state;
  (void)sessions;
  if (model->learner == NULL) return true;
  qkv_learner_read_state(model->learner, &state);
  if (state.tried && state.error > 0) {
    sums->gains += state.data_free / state.error;
    sums->tried++;
  }
  if (state.watch.measures > 0) {
    sums->errors += qkv_page_watch_error(&state.watch);
    sums->data_free += qkv_page_watch_data_free(&state.watch);
    sums->watched++;
  }
  return true;
}

static void update_calibrations(qkv_daemon *daemon) {
  calibration_sums sums = {0};
  qkv_store_each_model(daemon->store, NULL, add_calibration, &sums);
  const double tried = sums.tried > 0 ? sums.tried : 1, watched = sums.watched > 0 ? sums.watched : 1;
  qkv_metric_set(&daemon->metrics[QKV_METRIC_CALIBRATION_GAIN], (int64_t)(sums.gains / tried * 1e3));
  qkv_metric_set(&daemon->metrics[QKV_METRIC_WATCHED_ERROR], (int64_t)(sums.errors / watched * 1e6));
  qkv_metric_set(&daemon->metrics[QKV_METRIC_WATCHED_DATA_FREE], (int64_t)(sums.data_free / watched * 1e6));
}

static void update_prefix_gauges(qkv_daemon *daemon) {
  const qkv_prefix_stats stats = qkv_prefix_index_read(qkv_store_prefixes(daemon->store));
  qkv_metric_set(&daemon->metrics[QKV_METRIC_PREFIX_PAGES], (int64_t)stats.pages);
  qkv_metric_set(&daemon->metrics[QKV_METRIC_PREFIX_BYTES], (int64_t)stats.bytes);
  qkv_metric_set(&daemon->metrics[QKV_METRIC_PREFIX_REFUSED], (int64_t)stats.refused);
}

static void update_gpu(qkv_daemon *daemon) {
  uint64_t down = daemon->gpus == NULL && daemon->options->gpu_memory > 0, bytes = 0, ranges = 0;
  for (size_t i = 0; i < qkvi_gpus_count(daemon->gpus); i++) {
    const qkvi_gpu_stats stats = qkvi_gpu_read(qkvi_gpus_at(daemon->gpus, i));
    down += stats.down;
    bytes += stats.bytes;
    ranges += stats.ranges;
  }
  qkv_metric_set(&daemon->metrics[QKV_METRIC_GPU_DOWN], (int64_t)down);
  qkv_metric_set(&daemon->metrics[QKV_METRIC_GPU_BYTES], (int64_t)bytes);
  qkv_metric_set(&daemon->metrics[QKV_METRIC_GPU_RANGES], (int64_t)ranges);
}

void qkv_daemon_update_gauges(qkv_daemon *daemon) {
  update_prefix_gauges(daemon);
  qkv_metric_set(&daemon->metrics[QKV_METRIC_CONNECTIONS], (int64_t)qkv_rpc_server_connections(daemon->rpc));
  qkv_metric_set(&daemon->metrics[QKV_METRIC_CONNECTIONS_REFUSED],
                 (int64_t)qkv_rpc_server_connections_refused(daemon->rpc));
  qkv_metric_set(&daemon->metrics[QKV_METRIC_CONNECTIONS_CLOSED_HEADERS],
                 (int64_t)qkvi_inspect_closed(QKVI_HTTP2_HEADER_BLOCK));
  qkv_metric_set(&daemon->metrics[QKV_METRIC_CONNECTIONS_CLOSED_FRAMES],
                 (int64_t)qkvi_inspect_closed(QKVI_HTTP2_CONTROL_FRAMES));
  qkv_metric_set(&daemon->metrics[QKV_METRIC_CONNECTION_PAUSES], (int64_t)qkvi_inspect_pauses());
  qkv_metric_set(&daemon->metrics[QKV_METRIC_CONNECTIONS_CLOSED_MESSAGES],
                 (int64_t)qkvi_inspect_closed(QKVI_HTTP2_REQUEST_BYTES));
  qkv_metric_set(&daemon->metrics[QKV_METRIC_CALLS_SILENT], (int64_t)qkv_rpc_server_silent_ended(daemon->rpc));
  qkv_metric_set(&daemon->metrics[QKV_METRIC_CALLS_STALLED], (int64_t)qkv_rpc_server_stalled_ended(daemon->rpc));
  qkv_store_stats stats = qkv_store_read_stats(daemon->store);
  qkv_metric_set(&daemon->metrics[QKV_METRIC_MODELS], (int64_t)stats.models);
  qkv_metric_set(&daemon->metrics[QKV_METRIC_SESSIONS], (int64_t)stats.sessions);
  qkv_metric_set(&daemon->metrics[QKV_METRIC_KV_BYTES], (int64_t)stats.memory.bytes_used);
  qkv_metric_set(&daemon->metrics[QKV_METRIC_KV_RESERVED_BYTES], (int64_t)stats.memory.bytes_reserved);
  qkv_metric_set(&daemon->metrics[QKV_METRIC_KV_RESIDENT_BYTES], (int64_t)stats.heap.bytes_resident);
  qkv_metric_set(&daemon->metrics[QKV_METRIC_KV_SPLIT_PAGES], (int64_t)stats.heap.tiles_split);
  qkv_metric_set(&daemon->metrics[QKV_METRIC_KV_HUGE_PAGES],
                 qkv_heap_is_huge(qkv_arena_heap(qkv_store_arena(daemon->store))));
  qkv_metric_set(&daemon->metrics[QKV_METRIC_KV_LIMIT_BYTES], (int64_t)stats.memory.bytes_max);
  qkv_metric_set(&daemon->metrics[QKV_METRIC_KV_ALLOWED_BYTES], (int64_t)stats.memory.bytes_limit);
  qkv_metric_set(&daemon->metrics[QKV_METRIC_OTHER_BYTES], qkvi_memory_overhead(daemon->store));
  qkv_metric_set(&daemon->metrics[QKV_METRIC_LEARNING_BYTES], (int64_t)stats.learning_bytes);
  qkv_metric_set(&daemon->metrics[QKV_METRIC_CALIBRATION_BYTES], (int64_t)stats.calibration_bytes);
  qkv_metric_set(&daemon->metrics[QKV_METRIC_QUEUE_JOBS], (int64_t)qkv_executor_waiting(daemon->executor));
  qkv_metric_set(&daemon->metrics[QKV_METRIC_JOB_THREADS], (int64_t)qkv_executor_threads(daemon->executor));
  qkv_metric_set(&daemon->metrics[QKV_METRIC_REQUEST_BYTES], (int64_t)qkvi_inspect_held());
  qkv_metric_set(&daemon->metrics[QKV_METRIC_RESPONSE_BYTES], (int64_t)qkvi_block_bytes());
  const qkv_quality_stats quality = qkv_quality_totals();
  qkv_metric_set(&daemon->metrics[QKV_METRIC_CONTRACT_PAGES], (int64_t)quality.pages);
  qkv_metric_set(&daemon->metrics[QKV_METRIC_CONTRACT_MISSED], (int64_t)quality.missed);
  qkv_metric_set(&daemon->metrics[QKV_METRIC_CONTRACT_ERROR], (int64_t)(qkv_quality_error(&quality) * 1e6));
  update_calibrations(daemon);
  update_gpu(daemon);
  if (daemon->residency != NULL) update_storage(daemon);
  qkv_metric_set(&daemon->metrics[QKV_METRIC_RSS_BYTES], qkvi_memory_resident());
  if (daemon->tls != NULL)
    qkv_metric_set(&daemon->metrics[QKV_METRIC_CERTIFICATE_EXPIRES], qkvi_tls_expires(daemon->tls));
  qkv_metric_set(&daemon->metrics[QKV_METRIC_UPTIME], qkv_daemon_uptime_ms(daemon) / 1000);
}

// ---- Life ----

static size_t compute_threads(const qkv_server_options *options) {
  return (size_t)(options->threads > 0 ? options->threads : qkv_cpu_count());
}

static void read_call_quota(void *context, const char *tenant, qkvi_call_quota *quota) {
  qkv_daemon *daemon = context;
  qkv_quota of;
  bool by_default;
  qkvi_quotas_get(daemon->quotas, tenant, &of, &by_default);
  *quota = (qkvi_call_quota){.calls = (uint64_t)of.calls,
                             .bytes_per_second = (uint64_t)of.bytes_per_second,
                             .rows_per_second = (uint64_t)of.rows_per_second,
                             .weight = (uint32_t)(of.weight > 0 ? of.weight : QKV_WEIGHT_DEFAULT)};
}

static void read_account_limits(void *context, const char *tenant, qkv_account_limits *limits) {
  qkv_daemon *daemon = context;
  qkv_quota of;
  bool by_default;
  if (!atomic_load(&daemon->quotas_bind)) return;
  qkvi_quotas_get(daemon->quotas, tenant, &of, &by_default);
  *limits = (qkv_account_limits){.host_bytes = (uint64_t)of.host_bytes,
                                 .host_guaranteed = (uint64_t)of.host_bytes_guaranteed,
                                 .ssd_bytes = (uint64_t)of.ssd_bytes,
                                 .ssd_guaranteed = (uint64_t)of.ssd_bytes_guaranteed,
                                 .gpu_bytes = (uint64_t)of.gpu_bytes,
                                 .sessions = (uint64_t)of.sessions};
}

void qkv_daemon_apply_quotas(qkv_daemon *daemon) {
  qkv_accounts_refresh(qkv_store_accounts(daemon->store));
  qkv_rpc_server_refresh_quotas(daemon->rpc);
}

static qkv_status read_quotas(qkv_daemon *daemon, qkv_error *error) {
  const qkv_server_options *options = daemon->options;
  char path[PATH_MAX];
  const bool own = options->quota_file == NULL && options->data_dir != NULL, bound = options->auth_file != NULL;
  if (own) (void)snprintf(path, sizeof path, "%s/quotas", options->data_dir);
  const qkvi_quotas_config config = {
      .path = own ? path : options->quota_file,
      .may_be_missing = own,
      .host_bytes = (uint64_t)options->memory_budget,
      .ssd_bytes = (uint64_t)options->storage_budget,
      .sessions = bound ? qkv_server_options_tenant_part(options, options->limit_sessions) : 0,
      .models = bound ? qkv_server_options_tenant_part(options, options->limit_models) : 0};
  return qkvi_quotas_create(&config, &daemon->quotas, error);
}

static qkv_status start_rpc(qkv_daemon *daemon, qkv_error *error) {
  static const qkv_rpc_method *const methods[] = {
      qkvi_models_methods,        qkvi_calibration_methods, qkvi_open_session_methods, qkvi_sessions_methods,
      qkvi_forks_methods,         qkvi_append_methods,      qkvi_attend_methods,       qkvi_fetch_methods,
      qkvi_tiers_methods,         qkvi_lifetime_methods,    qkvi_lookup_methods,       qkvi_prefixes_methods,
      qkvi_watch_methods,         qkvi_put_objects_methods, qkvi_get_objects_methods,  qkvi_objects_methods,
      qkvi_shared_memory_methods, qkvi_admin_methods,       qkvi_compare_methods,      qkvi_storage_methods,
      qkvi_quota_methods,         qkvi_health_methods,      qkvi_reflection_methods,   NULL,
  };
  const qkv_server_options *options = daemon->options;
  const char *anonymous = options->allow_anonymous != NULL ? options->allow_anonymous : "";
  const bool all = strcmp(anonymous, "all") == 0;
  const qkv_rpc_config config = {
      .listen = options->listen.items,
      .listen_count = options->listen.count,
      .socket_mode = qkv_server_options_listen_mode(options),
      .tls = daemon->tls,
      .auth = daemon->auth,
      .anonymous = all,
      .anonymous_unix = strcmp(anonymous, "unix") == 0,
      .open = all || options->tls_client_ca != NULL,
      .threads = (size_t)options->rpc_threads,
      .message_bytes_max = options->limit_message,
      .calls_max = (size_t)options->limit_calls,
      .control_calls_max = (size_t)options->limit_control_calls,
      .connection_calls_max = (size_t)options->limit_connection_calls,
      .tenant_calls_max = (size_t)options->limit_tenant_calls,
      .connections_max = (size_t)options->limit_connections,
      .peer_connections_max = (size_t)options->limit_peer_connections,
      .control_frames_s = (uint64_t)options->limit_control_frames,
      .first_message_ms = options->limit_first_message,
      .unread_ms = options->limit_unread_response,
      .idle_ms = options->limit_idle_stream,
      .quota = read_call_quota,
      .methods = methods,
      .context = daemon,
      .began = count_began,
      .ended = count_ended,
      .timed = count_timed,
      .reported = log_call,
  };
  qkvi_observed_init(&daemon->observed, methods, (size_t)options->limit_metric_labels);
  return qkv_rpc_server_create(&config, &daemon->rpc, error);
}

static qkv_status read_access(qkv_daemon *daemon, qkv_error *error) {
  const qkv_server_options *options = daemon->options;
  const qkvi_jwt_config jwt = {.keys = options->jwks,
                               .issuer = options->jwt_issuer,
                               .audience = options->jwt_audience,
                               .accepted = &daemon->metrics[QKV_METRIC_JWT_ACCEPTED],
                               .refused = &daemon->metrics[QKV_METRIC_JWT_REFUSED]};
  if (options->jwks != NULL && qkvi_jwt_create(&jwt, &daemon->jwt, error) != QKV_OK)
    return qkv_error_prefix(error, "jwks: ");
  if (options->auth_file != NULL) QKV_TRY(qkvi_auth_create(options->auth_file, daemon->jwt, &daemon->auth, error));
  if (options->tls_cert == NULL) return QKV_OK;
  return qkvi_tls_create(options->tls_cert, options->tls_key, options->tls_client_ca, &daemon->tls, error);
}

// A reason that stays the same is logged once.
static void log_reload(const char *what, bool changed, qkv_status status, const qkv_error *error, qkv_error *told) {
  if (!changed) return;
  if (status == QKV_OK) qkv_log(QKV_LOG_INFO, "read anew", "{s:s}", "what", what);
  if (status != QKV_OK && strcmp(told->text, error->text) != 0)
    qkv_log(QKV_LOG_WARN, "not read anew, what was known stays", "{s:s, s:s}", "what", what, "reason", error->text);
  *told = status == QKV_OK ? (qkv_error){0} : *error;
}

void qkv_daemon_reload(qkv_daemon *daemon, bool always) {
  qkv_error of_auth = {0}, of_tls = {0}, of_quotas = {0}, of_jwt = {0};
  bool changed = false;
  if (always) memset(daemon->reload_told, 0, sizeof daemon->reload_told);
  if (daemon->auth != NULL) {
    const qkv_status status = qkvi_auth_reload(daemon->auth, always, &changed, &of_auth);
    log_reload("auth-file", changed, status, &of_auth, &daemon->reload_told[0]);
  }
  if (daemon->jwt != NULL) {
    const qkv_status status = qkvi_jwt_reload(daemon->jwt, always, &changed, &of_jwt);
    log_reload("jwks", changed, status, &of_jwt, &daemon->reload_told[3]);
  }
  qkv_error of_audit = {0};
  if (always && daemon->audit != NULL && qkvi_audit_reopen(daemon->audit, &of_audit) != QKV_OK)
    qkv_log(QKV_LOG_WARN, "audit-log was not opened again", "{s:s}", "reason", of_audit.text);
  const qkv_status quotas = qkvi_quotas_reload(daemon->quotas, always, &changed, &of_quotas);
  log_reload("quota-file", changed, quotas, &of_quotas, &daemon->reload_told[2]);
  if (changed) qkv_daemon_apply_quotas(daemon);
  if (daemon->tls != NULL) {
    const qkv_status status = qkvi_tls_reload(daemon->tls, always, &changed, &of_tls);
    log_reload("tls-cert, tls-key and tls-client-ca", changed, status, &of_tls, &daemon->reload_told[1]);
  }
}

static qkv_status start_shared_memory(qkv_daemon *daemon, qkv_error *error) {
  qkv_metric_value *const counters[QKVI_REGION_COUNTERS] = {
      [QKVI_REGION_COUNT] = &daemon->metrics[QKV_METRIC_CLIENT_SHM_REGIONS],
      [QKVI_REGION_BYTES] = &daemon->metrics[QKV_METRIC_CLIENT_SHM_BYTES],
      [QKVI_REGION_ON_GPU] = &daemon->metrics[QKV_METRIC_CLIENT_SHM_CUDA_REGIONS],
      [QKVI_REGION_READ] = &daemon->metrics[QKV_METRIC_CLIENT_SHM_READ],
      [QKVI_REGION_WRITTEN] = &daemon->metrics[QKV_METRIC_CLIENT_SHM_WRITTEN],
      [QKVI_REGION_LOST] = &daemon->metrics[QKV_METRIC_CLIENT_SHM_LOST],
  };
  const qkv_server_options *options = daemon->options;
  daemon->regions = qkvi_regions_create((size_t)options->limit_client_shm,
                                        (size_t)qkv_server_options_tenant_part(options, options->limit_client_shm),
                                        2 * (size_t)options->limit_message, daemon->gpus, counters);
  const qkvi_passed_config passed = {.address = options->shm_listen,
                                     .mode = qkv_server_options_listen_mode(options),
                                     .waiting = &daemon->metrics[QKV_METRIC_CLIENT_SHM_DESCRIPTORS],
                                     .accepted = &daemon->metrics[QKV_METRIC_CLIENT_SHM_PASSED],
                                     .refused = &daemon->metrics[QKV_METRIC_CLIENT_SHM_PASSED_REFUSED]};
  return options->shm_listen != NULL ? qkvi_passed_create(&passed, &daemon->passed, error) : QKV_OK;
}

// Rows of one request take limit-message at most.
static uint64_t area_bytes(const qkv_server_options *options) {
  const uint64_t part = (uint64_t)options->gpu_memory / QKVI_GPU_AREA_PART, most = (uint64_t)options->limit_message;
  if (!options->allow_client_shm) return 0;
  return part < most ? part : most;
}

static qkv_status start_gpus(qkv_daemon *daemon, qkv_error *error) {
  const qkv_server_options *options = daemon->options;
  const qkvi_gpu_config config = {.memory_bytes = (uint64_t)options->gpu_memory,
                                  .kernels = options->gpu_kernels,
                                  .admit_attends = QKVI_GPU_ADMIT_ATTENDS,
                                  .half_life_ms = QKVI_GPU_HALF_LIFE_MS,
                                  .retry_ms = QKVI_GPU_RETRY_MS,
                                  .area_bytes = area_bytes(options),
                                  .metrics = daemon->metrics};
  return options->gpu_memory > 0 ? qkvi_gpus_create(&config, &options->gpu_devices, &daemon->gpus, error) : QKV_OK;
}

static qkv_status start(qkv_daemon *daemon, qkv_error *error) {
  const qkv_server_options *options = daemon->options;
  QKV_TRY(read_access(daemon, error));
  QKV_TRY(read_quotas(daemon, error));
  if (daemon->options->audit_log != NULL)
    QKV_TRY(qkvi_audit_create(daemon->options->audit_log, &daemon->audit, error));
  QKV_TRY(qkvi_calibrations_load(&options->calibration, &daemon->calibrations, error));
  daemon->kept = qkvi_kept_create((uint64_t)options->memory_budget / 8);
  const qkv_executor_config executor = {.threads = compute_threads(options),
                                        .blocking_max = BLOCKING_THREADS,
                                        .queue_max = (size_t)options->limit_queue,
                                        .bulk_nice = QKV_DAEMON_BULK_NICE,
                                        .pinned = options->pin_threads};
  QKV_TRY(qkv_executor_create(&executor, &daemon->executor, error));
  QKV_TRY(start_gpus(daemon, error));
  const qkv_store_config store = {
      .memory_budget = (uint64_t)options->memory_budget,
      .heap = qkv_server_options_heap(options),
      .models_max = (size_t)options->limit_models,
      .sessions_max = (size_t)options->limit_sessions,
      .policy = qkv_server_options_policy(options),
      .calibrate_tokens = (uint64_t)options->calibrate_tokens,
      .prefixes_max = (uint64_t)options->limit_prefixes,
      .prefixes_tenant_max = (uint64_t)qkv_server_options_tenant_part(options, options->limit_prefixes),
      .limits = read_account_limits,
      .limits_context = daemon,
      .retier_all = options->tier_thresholds != NULL,
      .archive_codec = qkv_server_options_archive_codec(options),
      .choose_device = daemon->gpus != NULL ? qkvi_gpus_choose : NULL,
      .devices = daemon->gpus,
      .pool = qkv_executor_pool(daemon->executor, QKV_WORK_BULK),
  };
  daemon->store = qkv_store_create(&store);
  daemon->watch = qkvi_watch_hub_create(
      daemon->store, daemon->executor, daemon->metrics, (size_t)options->limit_watchers,
      (size_t)qkv_server_options_tenant_part(options, options->limit_watchers), options->data_dir != NULL);
  qkv_log(QKV_LOG_INFO, "memory", "{s:I, s:s, s:s, s:I}", "budget", (json_int_t)options->memory_budget, "pages",
          qkv_heap_pages_text(qkv_arena_heap(qkv_store_arena(daemon->store))), "numa", options->numa, "nodes",
          (json_int_t)qkv_heap_numa_nodes());
  daemon->objects = qkvi_objects_create(daemon->store, options, daemon->metrics);
  QKV_TRY(qkvi_residency_create(options, daemon->store, daemon->objects, daemon->metrics, &daemon->residency, error));
  atomic_store(&daemon->quotas_bind, true);
  qkv_accounts_refresh(qkv_store_accounts(daemon->store));
  daemon->retierer = qkvi_retierer_create(daemon->store, daemon->residency, options);
  if (options->allow_client_shm) QKV_TRY(start_shared_memory(daemon, error));
  return start_rpc(daemon, error);
}

// A calibration that is being computed is counted as part of memory-budget, so that pages leave before it exists.
// Once it does, it is resident in addition to the pages, and their limit follows.
typedef struct learning {
  qkv_daemon *daemon;
  uint64_t bytes;  // of memory-budget
  bool waits;      // one of those that are due
} learning;

static bool may_learn(void *context, const qkv_model *model, uint64_t bytes) {
  learning *on = context;
  qkv_daemon *daemon = on->daemon;
  qkv_arena *arena = qkv_store_arena(daemon->store);
  qkv_error error = {0};
  uint64_t headroom = 0;
  bool has = qkvi_memory_has_headroom(daemon->store, bytes);
  if (has && daemon->residency != NULL) {
    has = qkvi_budget_reserve(daemon->residency, NULL, bytes, 0, &headroom, &error) == QKV_OK;
  } else if (has) {
    has = qkv_arena_reserve(arena, bytes, &error) == QKV_OK;
  }
  on->waits |= !has;
  if (!has && qkv_metric_read(&daemon->metrics[QKV_METRIC_CALIBRATIONS_WAITING]) == 0)
    qkv_log(QKV_LOG_WARN, "a calibration waits, memory-budget has no headroom for it", "{s:s, s:s*, s:I}", "model",
            model->name, "tenant", qkvi_tenant_to_log(model->tenant), "bytes", (json_int_t)bytes);
  if (!has) return false;
  atomic_store(&daemon->memory.expects, true);
  qkv_arena_move_elsewhere(arena, bytes);
  on->bytes = bytes;
  return true;
}

static void log_verdict(const qkv_model *model, const qkv_learner_outcome *outcome) {
  static const char *const sources[] = {"none", "learnt", "registered", "file", "stored"};
  const bool accepted = outcome->end == QKV_LEARNER_ACCEPTED;
  char version[9];
  (void)snprintf(version, sizeof version, "%08" PRIx32, outcome->version);
  if (outcome->end == QKV_LEARNER_WITHDRAWN) {
    qkv_log(QKV_LOG_WARN, "a calibration was withdrawn, pages to come are data-free", "{s:s, s:s*, s:s, s:s}",
            "model", model->name, "tenant", qkvi_tenant_to_log(model->tenant), "version", version, "reason",
            outcome->text);
    return;
  }
  qkv_log(accepted ? QKV_LOG_INFO : QKV_LOG_WARN, accepted ? "calibrated" : "a calibration was refused",
          "{s:s, s:s*, s:s, s:s, s:I, s:f, s:f, s:I, s:I, s:s}", "model", model->name, "tenant",
          qkvi_tenant_to_log(model->tenant), "version", version, "source", sources[outcome->source], "tokens",
          (json_int_t)outcome->tokens, "attention_error", outcome->error, "data_free", outcome->data_free, "parts",
          (json_int_t)outcome->parts, "parts_data_free", (json_int_t)outcome->dropped, "worst", outcome->text);
  if (accepted && outcome->archive_refused)
    qkv_log(QKV_LOG_WARN, "the archive codec was refused, sessions to be fetched are opened with the codec of others",
            "{s:s, s:s*, s:s, s:s, s:f, s:f}", "model", model->name, "tenant", qkvi_tenant_to_log(model->tenant),
            "version", version, "codec", model->archive_codec != NULL ? model->archive_codec->name : "none",
            "attention_error", outcome->archive_error, "data_free", outcome->archive_data_free);
}

static void calibrated(void *context, const qkv_model *model, const qkv_learner_outcome *outcome) {
  const learning *on = context;
  qkv_daemon *daemon = on->daemon;
  qkv_arena_unreserve_elsewhere(qkv_store_arena(daemon->store), on->bytes);
  atomic_store(&daemon->memory.expects, false);
  qkvi_memory_lower(daemon->store);
  if (outcome->rope[0] != '\0')
    qkv_log(QKV_LOG_WARN, "the model's RoPE may be wrong", "{s:s, s:s*, s:s}", "model", model->name, "tenant",
            qkvi_tenant_to_log(model->tenant), "reason", outcome->rope);
  if (outcome->end == QKV_LEARNER_FAILED && outcome->error_text.status != QKV_CANCELLED)
    qkv_log(QKV_LOG_WARN, "calibration failed", "{s:s, s:s*, s:s}", "model", model->name, "tenant",
            qkvi_tenant_to_log(model->tenant), "reason", outcome->error_text.text);
  if (outcome->end == QKV_LEARNER_NOTHING || outcome->end == QKV_LEARNER_FAILED) return;
  const bool learnt = outcome->end == QKV_LEARNER_ACCEPTED && outcome->made;
  qkv_metric_add(&daemon->metrics[QKV_METRIC_CALIBRATIONS], learnt);
  qkv_metric_add(&daemon->metrics[QKV_METRIC_CALIBRATIONS_REFUSED], outcome->end == QKV_LEARNER_REFUSED);
  qkv_metric_add(&daemon->metrics[QKV_METRIC_ARCHIVE_CODECS_REFUSED],
                 outcome->end == QKV_LEARNER_ACCEPTED && outcome->archive_refused);
  qkv_metric_add(&daemon->metrics[QKV_METRIC_CALIBRATIONS_WITHDRAWN], outcome->end == QKV_LEARNER_WITHDRAWN);
  log_verdict(model, outcome);
}

void qkv_daemon_learn(qkv_daemon *daemon) {
  learning on = {.daemon = daemon};
  (void)qkv_store_learn(daemon->store, may_learn, calibrated, &on);
  qkv_metric_set(&daemon->metrics[QKV_METRIC_CALIBRATIONS_WAITING], on.waits);
}

bool qkv_daemon_retier(qkv_daemon *daemon) {
  qkv_retier_report report = {0};
  qkvi_lifetime_expire(daemon);
  const bool more = qkvi_retierer_step(daemon->retierer, &report);
  const bool more_folds = qkvi_fold_step(daemon->residency, daemon->options->fold_after);
  qkv_metric_add(&daemon->metrics[QKV_METRIC_TIER_PAGES], (int64_t)report.pages);
  qkv_metric_add(&daemon->metrics[QKV_METRIC_TIER_BYTES_FREED], (int64_t)report.bytes_freed);
  qkv_metric_set(&daemon->metrics[QKV_METRIC_TIER_WIDTH], qkvi_retierer_millibits(daemon->retierer));
  return more || more_folds;
}

void qkv_daemon_keep_memory(qkv_daemon *daemon) {
  qkvi_memory_lower(daemon->store);
}

void qkv_daemon_tend(qkv_daemon *daemon) {
  qkv_rpc_server_tend(daemon->rpc);
  qkvi_memory_tend(&daemon->memory, daemon->store);
  if (daemon->regions != NULL) qkvi_buffers_tend(qkvi_regions_buffers(daemon->regions), qkv_now_ms());
}

qkv_status qkv_daemon_create(const qkv_server_options *options, const qkv_options *option_set, qkv_daemon **out,
                             qkv_error *error) {
  qkv_daemon *daemon = calloc(1, sizeof(*daemon));
  assert(daemon != NULL);
  daemon->options = options;
  daemon->option_set = option_set;
  daemon->started_ms = qkv_now_ms();
  atomic_init(&daemon->draining, false);
  qkv_health_init(&daemon->health);
  const int failed = pthread_mutex_init(&daemon->evicting, NULL);
  assert(failed == 0);
  qkv_status status = start(daemon, error);
  if (status != QKV_OK) {
    qkv_daemon_destroy(&daemon);
    return status;
  }
  status = qkvi_http_create(daemon, &daemon->http, error);
  if (status == QKV_OK) status = qkv_service_check_taken(error);
  if (status != QKV_OK) {
    qkv_rpc_server_drain(daemon->rpc, 0);
    qkv_daemon_destroy(&daemon);
    return status;
  }
  *out = daemon;
  return QKV_OK;
}

static void wait_ms(int64_t ms) {
  struct timespec left = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
  while (nanosleep(&left, &left) != 0) continue;
}

void qkv_daemon_drain(qkv_daemon *daemon, int64_t notice_ms, int64_t grace_ms) {
  atomic_store(&daemon->draining, true);
  qkv_store_stop_learning(daemon->store);
  qkv_health_drain(&daemon->health);
  wait_ms(notice_ms);
  qkvi_watch_hub_drain(daemon->watch);
  qkv_rpc_server_drain(daemon->rpc, grace_ms);
  if (daemon->residency != NULL) qkvi_residency_finish(daemon->residency, QKV_DAEMON_FINISH_MS);
}

void qkv_daemon_destroy(qkv_daemon **daemon) {
  qkv_daemon *old = *daemon;
  if (old == NULL) return;
  *daemon = NULL;
  qkvi_http_destroy(&old->http);
  qkv_rpc_server_destroy(&old->rpc);
  qkvi_auth_destroy(&old->auth);
  qkvi_jwt_destroy(&old->jwt);
  qkvi_tls_destroy(&old->tls);
  qkv_executor_destroy(&old->executor);
  qkvi_watch_hub_stop(old->watch);
  qkvi_residency_destroy(&old->residency);
  qkvi_objects_destroy(&old->objects);
  qkvi_passed_destroy(&old->passed);
  qkvi_regions_destroy(&old->regions);
  qkvi_kept_destroy(&old->kept);  // what it has counts for accounts of the store
  if (old->store != NULL) qkv_store_destroy(&old->store);
  qkvi_gpus_destroy(&old->gpus);
  qkvi_quotas_destroy(&old->quotas);
  qkvi_audit_destroy(&old->audit);
  qkvi_watch_hub_destroy(&old->watch);
  qkvi_retierer_destroy(&old->retierer);
  qkvi_calibrations_destroy(&old->calibrations);
  qkvi_observed_deinit(&old->observed);
  qkv_health_deinit(&old->health);
  (void)pthread_mutex_destroy(&old->evicting);
  free(old);
}
