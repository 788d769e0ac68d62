// The server: completion queues with a thread each, accepting calls, draining.
//
// Every queue has one slot armed in which gRPC puts the next call, whatever its path. The slot is armed again before
// the call is handled. The limit on calls is ours: slots do not limit anything.
#include <assert.h>
#include <grpc/grpc_security.h>
#include <grpc/support/log.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/base/histogram.h"
#include "engine/base/log.h"
#include "server/rpc/http2_streams.h"
#include "server/rpc/inspect.h"
#include "server/rpc/internal.h"

#define METADATA_BYTES_MAX (16 * 1024)
// A connection has as many calls as this and twice calls_max at once; gRPC's clients let further ones wait, and a
// client that does not is disconnected.
#define STREAMS_MORE 100
// Of messages that have begun to arrive and are not whole, on all connections.
#define REQUEST_BYTES_MIN (INT64_C(256) << 20)
#define REQUEST_MESSAGES 4
// As many of these as messages that have arrived as a whole and are not served yet may have bytes.
#define ARRIVED_TIMES 2
// That a client may send on a stream before they are read.
#define AHEAD_BYTES (256 * 1024)
#define FRAME_BYTES_MAX (4 * 1024 * 1024)
#define HANDSHAKE_MS 10000  // of TLS, and until the client's HTTP/2 settings have come
#define SOCKET_MODE 0660
// How long connections without calls get to end in order.
#define GOODBYE_MS 50

typedef struct accept_slot {
  qkvi_rpc_op op;
  qkv_rpc_server *server;
  grpc_completion_queue *queue;
  pthread_t thread;
  grpc_call *call;
  grpc_call_details details;
  grpc_metadata_array metadata;
} accept_slot;

typedef struct method_row {
  const qkv_rpc_method *method;
} method_row;

typedef struct stop_op {
  qkvi_rpc_op op;
  qkv_rpc_server *server;
} stop_op;

struct qkv_rpc_server {
  grpc_server *grpc;
  grpc_resource_quota *quota;
  method_row *methods;  // by path
  size_t method_count;
  qkvi_rpc_listener *listeners;
  size_t listener_count;
  accept_slot *slots;  // one for each queue
  size_t slot_count;
  qkvi_rpc_limits *limits;
  qkvi_rpc_connections *connections;
  qkvi_rpc_delays *delays;
  qkvi_identity_rules rules;
  qkvi_tls_port tls_port;
  void *context;
  void (*began)(void *context);
  void (*ended)(void *context, qkv_status status);
  void (*timed)(void *context, const qkv_rpc_method *method, const char *tenant, qkv_status status, uint64_t ns);
  void (*reported)(void *context, const qkv_rpc_report *report);
  _Atomic uint64_t numbers;  // of calls
  stop_op stop;

  _Atomic bool draining;
  pthread_mutex_t lock;
  pthread_cond_t changed;
  size_t calls;        // not freed yet
  size_t slots_armed;  // that gRPC owns
  bool stopped;        // gRPC accepts no more
};

// ---- Methods ----

static int compare_methods(const void *a, const void *b) {
  return strcmp(((const method_row *)a)->method->path, ((const method_row *)b)->method->path);
}

static int compare_path(const void *key, const void *row) {
  const grpc_slice *path = key;
  const char *name = ((const method_row *)row)->method->path;
  size_t length = GRPC_SLICE_LENGTH(*path), name_length = strlen(name);
  int order = memcmp(GRPC_SLICE_START_PTR(*path), name, length < name_length ? length : name_length);
  return order != 0 ? order : (length > name_length) - (length < name_length);
}

// Visits every method of every table; `rows`, where not NULL, gets them. Returns how many.
static size_t collect_methods(const qkv_rpc_method *const *tables, method_row *rows) {
  size_t count = 0;
  for (size_t i = 0; tables[i] != NULL; i++) {
    for (const qkv_rpc_method *method = tables[i]; method->path != NULL; method++, count++) {
      if (rows != NULL) rows[count].method = method;
    }
  }
  return count;
}

static void index_methods(qkv_rpc_server *server, const qkv_rpc_method *const *tables) {
  server->method_count = collect_methods(tables, NULL);
  server->methods = calloc(server->method_count + 1, sizeof(*server->methods));
  assert(server->methods != NULL);
  collect_methods(tables, server->methods);
  qsort(server->methods, server->method_count, sizeof(*server->methods), compare_methods);
}

static const qkv_rpc_method *find_method(const qkv_rpc_server *server, const grpc_slice *path) {
  const method_row *row =
      bsearch(path, server->methods, server->method_count, sizeof(*server->methods), compare_path);
  return row == NULL ? NULL : row->method;
}

// ---- Accepting ----

static void arm(accept_slot *slot) {
  grpc_call_details_init(&slot->details);
  grpc_metadata_array_init(&slot->metadata);
  grpc_call_error result = grpc_server_request_call(slot->server->grpc, &slot->call, &slot->details, &slot->metadata,
                                                    slot->queue, slot->queue, slot);
  assert(result == GRPC_CALL_OK);
  (void)result;
}

static void disarm(accept_slot *slot) {
  grpc_call_details_destroy(&slot->details);
  grpc_metadata_array_destroy(&slot->metadata);
}

static void count(qkv_rpc_server *server, size_t *counter, int change) {
  pthread_mutex_lock(&server->lock);
  *counter += (size_t)change;
  pthread_cond_broadcast(&server->changed);
  pthread_mutex_unlock(&server->lock);
}

// A call that is not refused counts as running.
static qkv_status admit(qkv_rpc_server *server, const grpc_slice *path, bool known, qkv_error *error) {
  pthread_mutex_lock(&server->lock);  // the draining thread sets its flag first, then counts the calls
  const bool draining = atomic_load_explicit(&server->draining, memory_order_acquire);
  if (known && !draining) server->calls++;
  pthread_mutex_unlock(&server->lock);
  if (draining) return qkv_fail(error, QKV_UNAVAILABLE, "draining: the daemon is about to stop");
  if (known) return QKV_OK;
  size_t length = GRPC_SLICE_LENGTH(*path);
  return qkv_fail(error, QKV_UNIMPLEMENTED, "no method %.*s", (int)(length < 200 ? length : 200),
                  (const char *)GRPC_SLICE_START_PTR(*path));
}

// Cancelled, not answered: gRPC queues the status and forgets the call, however many calls its client makes without
// reading, and stops reading itself where those are too many.
static void refuse(qkv_rpc_server *server, const qkv_rpc_method *method, grpc_call *call,
                   const qkvi_identity *identity, const qkv_error *error) {
  const qkv_rpc_report report = {.method = method == NULL ? "" : method->path,
                                 .tenant = identity->tenant,
                                 .traceparent = identity->traceparent,
                                 .session = "",
                                 .status = error->status,
                                 .reason = error->text,
                                 .grpc = call};
  qkvi_rpc_server_ended(server, error->status);
  if (server->reported != NULL) server->reported(server->context, &report);
  (void)grpc_call_cancel_with_status(call, (grpc_status_code)error->status, error->text, NULL);
  grpc_call_unref(call);
}

static void accept_done(qkvi_rpc_op *op, bool ok) {
  accept_slot *slot = (accept_slot *)op;
  qkv_rpc_server *server = slot->server;
  if (!ok) {  // stopped
    disarm(slot);
    count(server, &server->slots_armed, -1);
    return;
  }
  const qkv_rpc_method *method = find_method(server, &slot->details.method);
  qkv_error error = {0};
  if (server->began != NULL) server->began(server->context);
  qkvi_identity identity;
  bool admitted = qkvi_identity_read(&server->rules, slot->call, method != NULL ? method->path : "", &slot->metadata,
                                     &identity, &error) == QKV_OK &&
                  admit(server, &slot->details.method, method != NULL, &error) == QKV_OK;
  grpc_call *const grpc = slot->call;
  qkv_rpc_call *call = NULL;
  if (admitted) {
    admitted = qkvi_rpc_call_create(server, method, grpc, &identity, slot->details.deadline, &call, &error) == QKV_OK;
    if (!admitted) count(server, &server->calls, -1);
  }
  disarm(slot);
  arm(slot);
  if (admitted) {
    qkvi_rpc_call_start(call);
  } else {
    refuse(server, method, grpc, &identity, &error);
  }
}

static void *run_queue(void *context) {
  grpc_completion_queue *queue = context;
  for (;;) {
    grpc_event event = grpc_completion_queue_next(queue, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
    if (event.type == GRPC_QUEUE_SHUTDOWN) return NULL;
    qkvi_rpc_op *op = event.tag;
    op->done(op, event.success != 0);
  }
}

qkvi_rpc_limits *qkvi_rpc_server_limits(const qkv_rpc_server *server) {
  return server->limits;
}

qkvi_rpc_delays *qkvi_rpc_server_delays(const qkv_rpc_server *server) {
  return server->delays;
}

void *qkvi_rpc_server_context(const qkv_rpc_server *server) {
  return server->context;
}

void qkvi_rpc_server_ended(qkv_rpc_server *server, qkv_status status) {
  if (server->ended != NULL) server->ended(server->context, status);
}

void qkvi_rpc_server_timed(const qkv_rpc_call *call, qkv_status status) {
  const qkv_rpc_server *server = call->server;
  if (server->timed == NULL) return;
  server->timed(server->context, call->method, qkvi_call_tenant(call), status, qkv_stage_now() - call->began_ns);
}

static qkv_rpc_report report_of(const qkv_rpc_call *call) {
  return (qkv_rpc_report){.number = call->number,
                          .method = call->method->path,
                          .tenant = qkvi_call_tenant(call),
                          .traceparent = call->identity.traceparent,
                          .session = call->session,
                          .reason = "",
                          .stream = call->method->end != NULL || call->method->sent != NULL,
                          .quota_ns = call->quota_ns,
                          .queue_ns = call->queue_ns,
                          .grpc = call->grpc};
}

void qkvi_rpc_server_report(const qkv_rpc_call *call, qkv_status status, const char *reason) {
  const qkv_rpc_server *server = call->server;
  if (server->reported == NULL) return;
  qkv_rpc_report report = report_of(call);
  report.status = status;
  report.reason = reason;
  report.ns = qkv_stage_now() - call->began_ns;
  report.message_ns = call->message_ns;
  server->reported(server->context, &report);
}

void qkvi_rpc_server_step(const qkv_rpc_call *call) {
  const qkv_rpc_server *server = call->server;
  if (server->reported == NULL) return;
  qkv_rpc_report report = report_of(call);
  report.step = true;
  report.ns = qkv_stage_now() - call->step_ns;
  server->reported(server->context, &report);
}

void qkv_rpc_report_peer(const qkv_rpc_report *report, char *text, size_t bytes) {
  qkvi_peer_write(report->grpc, text, bytes);
}

uint64_t qkvi_rpc_server_number(qkv_rpc_server *server) {
  return atomic_fetch_add_explicit(&server->numbers, 1, memory_order_relaxed) + 1;
}

void qkvi_rpc_server_call_gone(qkv_rpc_server *server) {
  count(server, &server->calls, -1);
}

// ---- Start ----

// Log lines of gRPC (errors, unless GRPC_VERBOSITY says otherwise) go to our log. They are warnings: mostly errors of
// a client.
static void log_grpc(gpr_log_func_args *line) {
  qkv_log_level level = line->severity == GPR_LOG_SEVERITY_ERROR ? QKV_LOG_WARN : QKV_LOG_DEBUG;
  qkv_log(level, "grpc", "{s:s}", "text", line->message);
}

static grpc_arg integer_arg(const char *key, int64_t value) {
  return (grpc_arg){
      .type = GRPC_ARG_INTEGER, .key = (char *)key, .value.integer = (int)(value < INT32_MAX ? value : INT32_MAX)};
}

static int64_t request_bytes_max(const qkv_rpc_config *config) {
  const int64_t bytes = REQUEST_MESSAGES * config->message_bytes_max;
  return bytes < REQUEST_BYTES_MIN ? REQUEST_BYTES_MIN : bytes;
}

// No more than are followed on a connection (http2_streams.h).
static int64_t streams_max(const qkv_rpc_config *config) {
  const int64_t wanted = 2 * (int64_t)config->calls_max + STREAMS_MORE;
  return wanted < QKVI_HTTP2_STREAMS_MAX ? wanted : QKVI_HTTP2_STREAMS_MAX;
}

static void create_grpc_server(qkv_rpc_server *server, const qkv_rpc_config *config) {
  server->quota = grpc_resource_quota_create("qkvd");
  // As much again for those of connections that are being closed, what messages that are whole may have, and what
  // clients send ahead: gRPC, which ends any stream or idle connection when this is full, is not to be the first.
  grpc_resource_quota_resize(server->quota, (2 + ARRIVED_TIMES) * (size_t)request_bytes_max(config) +
                                                (config->calls_max + config->control_calls_max) * AHEAD_BYTES);
  grpc_arg args[] = {
      integer_arg(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, config->message_bytes_max),
      integer_arg(GRPC_ARG_MAX_SEND_MESSAGE_LENGTH, -1),
      integer_arg(GRPC_ARG_MAX_CONCURRENT_STREAMS, streams_max(config)),
      integer_arg(GRPC_ARG_MAX_METADATA_SIZE, METADATA_BYTES_MAX),
      // gRPC would inflate a message before it looks at its size.
      integer_arg(GRPC_COMPRESSION_CHANNEL_ENABLED_ALGORITHMS_BITSET, 1 << GRPC_COMPRESS_NONE),
      integer_arg(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0),
      integer_arg(GRPC_ARG_KEEPALIVE_TIME_MS, INT32_MAX),  // never: listen.c
      integer_arg(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1),
      // Any number: gRPC takes 20 µs for each one too many, inspect.h bounds them for less.
      integer_arg(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0),
      integer_arg(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, HANDSHAKE_MS),
      // gRPC would let a client send 4 MiB ahead on each stream, which nothing counts until they are read. For a
      // message that is being read it opens the window to its end.
      integer_arg(GRPC_ARG_HTTP2_BDP_PROBE, 0),
      integer_arg(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, FRAME_BYTES_MAX),
      integer_arg(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, AHEAD_BYTES),
      qkvi_tls_port_argument(&server->tls_port),
      {.type = GRPC_ARG_POINTER,
       .key = (char *)GRPC_ARG_RESOURCE_QUOTA,
       .value.pointer = {.p = server->quota, .vtable = grpc_resource_quota_arg_vtable()}},
  };
  grpc_channel_args channel_args = {.num_args = sizeof(args) / sizeof(args[0]), .args = args};
  server->grpc = grpc_server_create(&channel_args, NULL);
}

static void stop_done(qkvi_rpc_op *op, bool ok) {
  (void)ok;
  qkv_rpc_server *server = ((stop_op *)op)->server;
  pthread_mutex_lock(&server->lock);
  server->stopped = true;
  pthread_cond_broadcast(&server->changed);
  pthread_mutex_unlock(&server->lock);
}

static void create_queues(qkv_rpc_server *server, size_t threads) {
  server->slots = calloc(threads, sizeof(*server->slots));
  assert(server->slots != NULL);
  server->slot_count = threads;
  for (size_t i = 0; i < threads; i++) {
    server->slots[i].op.done = accept_done;
    server->slots[i].server = server;
    server->slots[i].queue = grpc_completion_queue_create_for_next(NULL);
    grpc_server_register_completion_queue(server->grpc, server->slots[i].queue, NULL);
  }
}

static void start_threads(qkv_rpc_server *server) {
  for (size_t i = 0; i < server->slot_count; i++) {
    int failed = pthread_create(&server->slots[i].thread, NULL, run_queue, server->slots[i].queue);
    assert(failed == 0);
    (void)failed;
    pthread_setname_np(server->slots[i].thread, "qkvd-rpc");
  }
}

static qkv_status listen_all(qkv_rpc_server *server, const qkv_rpc_config *config, qkv_error *error) {
  server->listeners = calloc(config->listen_count, sizeof(*server->listeners));
  assert(server->listeners != NULL);
  const qkvi_rpc_listen_config listen = {.mode = config->socket_mode != 0 ? config->socket_mode : SOCKET_MODE,
                                         .tls = config->tls != NULL ? &server->tls_port : NULL,
                                         .connections = server->connections,
                                         .open = config->open || config->auth != NULL};
  if (config->tls != NULL) QKV_TRY(qkvi_tls_add_port(server->grpc, config->tls, &server->tls_port, error));
  for (size_t i = 0; i < config->listen_count; i++) {
    QKV_TRY(qkvi_rpc_listen(server->grpc, config->listen[i], &listen, &server->listeners[i], error));
    server->listener_count++;
  }
  return QKV_OK;
}

qkv_status qkv_rpc_server_create(const qkv_rpc_config *config, qkv_rpc_server **out, qkv_error *error) {
  assert(config->listen_count > 0 && config->threads > 0 && config->calls_max > 0);
  gpr_set_log_function(log_grpc);
  grpc_init();
  qkv_rpc_server *server = calloc(1, sizeof(*server));
  assert(server != NULL);
  const qkvi_rpc_limits_config limits = {.calls_max = config->calls_max,
                                         .control_max = config->control_calls_max,
                                         .connection_max = config->connection_calls_max,
                                         .tenant_max = config->tenant_calls_max,
                                         .first_message_ms = config->first_message_ms,
                                         .unread_ms = config->unread_ms,
                                         .idle_ms = config->idle_ms,
                                         .arrived_max = ARRIVED_TIMES * (uint64_t)request_bytes_max(config),
                                         .quota = config->quota,
                                         .quota_context = config->context};
  qkvi_inspect_setup(config->control_frames_s, (uint64_t)request_bytes_max(config));
  server->limits = qkvi_rpc_limits_create(&limits);
  server->connections = qkvi_rpc_connections_create(config->connections_max, config->peer_connections_max);
  server->delays = qkvi_rpc_delays_create();
  server->rules = (qkvi_identity_rules){
      .auth = config->auth, .anonymous_unix = config->anonymous_unix, .anonymous = config->anonymous};
  server->context = config->context;
  server->began = config->began;
  server->ended = config->ended;
  server->timed = config->timed;
  server->reported = config->reported;
  server->stop = (stop_op){.op.done = stop_done, .server = server};
  atomic_init(&server->draining, false);
  pthread_mutex_init(&server->lock, NULL);
  pthread_condattr_t attributes;
  pthread_condattr_init(&attributes);
  pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
  pthread_cond_init(&server->changed, &attributes);
  pthread_condattr_destroy(&attributes);
  index_methods(server, config->methods);
  create_grpc_server(server, config);
  create_queues(server, config->threads);

  qkv_status status = listen_all(server, config, error);
  *out = server;  // calls may come before this function returns
  if (status == QKV_OK) {
    grpc_server_start(server->grpc);
    for (size_t i = 0; i < server->slot_count; i++) arm(&server->slots[i]);
    server->slots_armed = server->slot_count;
    for (size_t i = 0; i < server->listener_count; i++) qkvi_rpc_accept(&server->listeners[i]);
  }
  start_threads(server);
  if (status != QKV_OK) {
    qkv_rpc_server_drain(server, 0);
    qkv_rpc_server_destroy(out);
  }
  return status;
}

const char *qkv_rpc_server_address(const qkv_rpc_server *server, size_t listen) {
  assert(listen < server->listener_count);
  return server->listeners[listen].address;
}

void qkv_rpc_server_tend(qkv_rpc_server *server) {
  qkvi_rpc_limits_tend(server->limits);
}

uint64_t qkv_rpc_server_silent_ended(qkv_rpc_server *server) {
  return qkvi_rpc_limits_silent_ended(server->limits);
}

uint64_t qkv_rpc_server_stalled_ended(qkv_rpc_server *server) {
  return qkvi_rpc_limits_stalled_ended(server->limits);
}

size_t qkv_rpc_server_connections(qkv_rpc_server *server) {
  return qkvi_rpc_connections_open(server->connections);
}

uint64_t qkv_rpc_server_connections_refused(qkv_rpc_server *server) {
  return qkvi_rpc_connections_refused(server->connections);
}

// ---- Stop ----

// Waits until no call is left (and, with `all`, nothing at all) or `wait_ms` have passed; < 0: for ever.
static bool wait_idle(qkv_rpc_server *server, bool all, int64_t wait_ms) {
  struct timespec until;
  clock_gettime(CLOCK_MONOTONIC, &until);
  until.tv_sec += wait_ms / 1000;
  until.tv_nsec += wait_ms % 1000 * 1000000;
  if (until.tv_nsec >= 1000000000) {
    until.tv_sec++;
    until.tv_nsec -= 1000000000;
  }
  pthread_mutex_lock(&server->lock);
  bool idle, late = false;
  while (!(idle = server->calls == 0 && (!all || (server->stopped && server->slots_armed == 0))) && !late) {
    if (wait_ms < 0) {
      pthread_cond_wait(&server->changed, &server->lock);
    } else {
      late = pthread_cond_timedwait(&server->changed, &server->lock, &until) != 0;
    }
  }
  pthread_mutex_unlock(&server->lock);
  return idle;
}

// Connections that are not accepted yet wait for the next process where the service manager holds all sockets.
static bool has_successor(const qkv_rpc_server *server) {
  for (size_t i = 0; i < server->listener_count; i++) {
    if (!server->listeners[i].passed) return false;
  }
  return server->listener_count > 0;
}

static void stop_listening(qkv_rpc_server *server) {
  for (size_t i = 0; i < server->listener_count; i++) qkvi_rpc_accept_done(&server->listeners[i]);
  grpc_server_shutdown_and_notify(server->grpc, server->slots[0].queue, &server->stop);
}

void qkv_rpc_server_drain(qkv_rpc_server *server, int64_t grace_ms) {
  // Clients are told to connect anew (GOAWAY), and their calls wait, before a call is refused.
  const bool at_once = has_successor(server);
  if (at_once) stop_listening(server);
  atomic_store_explicit(&server->draining, true, memory_order_release);
  bool finished = wait_idle(server, false, grace_ms);
  if (!at_once) stop_listening(server);
  // An idle client may leave its connection unread for long, so it is disconnected, too.
  if (!finished || !wait_idle(server, true, GOODBYE_MS)) grpc_server_cancel_all_calls(server->grpc);
  wait_idle(server, true, -1);
}

void qkv_rpc_server_destroy(qkv_rpc_server **server) {
  qkv_rpc_server *old = *server;
  if (old == NULL) return;
  *server = NULL;
  assert(old->stopped && old->calls == 0);
  for (size_t i = 0; i < old->slot_count; i++) grpc_completion_queue_shutdown(old->slots[i].queue);
  for (size_t i = 0; i < old->slot_count; i++) pthread_join(old->slots[i].thread, NULL);
  grpc_server_destroy(old->grpc);
  for (size_t i = 0; i < old->slot_count; i++) grpc_completion_queue_destroy(old->slots[i].queue);
  grpc_resource_quota_unref(old->quota);
  for (size_t i = 0; i < old->listener_count; i++) qkvi_rpc_unlisten(&old->listeners[i]);
  qkvi_rpc_delays_destroy(&old->delays);
  qkvi_rpc_limits_destroy(&old->limits);
  qkvi_rpc_connections_destroy(&old->connections);
  pthread_cond_destroy(&old->changed);
  pthread_mutex_destroy(&old->lock);
  free(old->listeners);
  free(old->slots);
  free(old->methods);
  free(old);
  grpc_shutdown();
}

void qkv_rpc_server_refresh_quotas(qkv_rpc_server *server) {
  qkvi_rpc_limits_refresh(server->limits);
}

qkvi_call_usage qkv_rpc_server_usage(const qkv_rpc_server *server, const char *tenant) {
  return qkvi_rpc_limits_usage(server->limits, tenant);
}

void qkv_rpc_server_each_tenant(const qkv_rpc_server *server, void (*fn)(void *context, const char *tenant),
                                void *context) {
  qkvi_rpc_limits_each(server->limits, fn, context);
}
