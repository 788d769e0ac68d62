// HasSessions: which of many sessions are open.
#include <inttypes.h>
#include <stdlib.h>

#include "engine/cache/session_spill.h"
#include "qkv/v1/kv_cache.pb-c.h"
#include "server/auth/identity.h"
#include "server/daemon.h"
#include "server/handlers/control.h"
#include "server/handlers/handlers.h"
#include "server/handlers/jobs.h"

// Names that are looked up under one lock of the store.
enum { NAMES_AT_ONCE = 256 };

static qkv_status check_names(const Qkv__V1__HasSessionsRequest *request, qkv_error *error) {
  if (request->n_sessions > QKVI_NAMES_MAX)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "sessions has %zu entries, at most %d", request->n_sessions,
                    QKVI_NAMES_MAX);
  for (size_t i = 0; i < request->n_sessions; i++) {
    if (qkv_name_check(request->sessions[i], "the name", error) != QKV_OK)
      return qkv_error_prefix(error, "sessions[%zu]: ", i);
  }
  return QKV_OK;
}

typedef struct answer {
  Qkv__V1__HasSessionsResponse__Presence *presence;
  uint64_t *tokens;
  int64_t found;
} answer;

static void look_at(const Qkv__V1__HasSessionsRequest *request, qkv_session *session, size_t i, answer *out) {
  out->presence[i] = qkv_session_has_cold(session) ? QKV__V1__HAS_SESSIONS_RESPONSE__PRESENCE__PRESENCE_SSD
                                                   : QKV__V1__HAS_SESSIONS_RESPONSE__PRESENCE__PRESENCE_MEMORY;
  if (request->tokens) out->tokens[i] = qkv_session_length(session) - qkv_session_config_of(session)->first_position;
  if (request->touch) qkv_session_touch(session);
  out->found++;
}

static void look_up(const qkv_rpc_call *call, const Qkv__V1__HasSessionsRequest *request, answer *out) {
  const qkv_daemon *daemon = qkv_rpc_context(call);
  qkv_session *sessions[NAMES_AT_ONCE];
  for (size_t first = 0; first < request->n_sessions; first += NAMES_AT_ONCE) {
    const size_t left = request->n_sessions - first, count = left < NAMES_AT_ONCE ? left : NAMES_AT_ONCE;
    qkv_store_find(daemon->store, qkvi_call_tenant(call), (const char *const *)request->sessions + first, count,
                   sessions);
    if (request->tokens) qkv_session_prefetch_lengths(sessions, count);
    for (size_t i = 0; i < count; i++) {
      if (sessions[i] == NULL) continue;
      look_at(request, sessions[i], first + i, out);
      qkv_session_unref(&sessions[i]);
    }
  }
}

static void has_job(void *context) {
  qkv_rpc_call *call = context;
  qkv_daemon *daemon = qkv_rpc_context(call);
  const Qkv__V1__HasSessionsRequest *request = qkv_rpc_state(call);
  qkv_error error = {0};
  if (!qkvi_job_wanted(call)) return;
  if (check_names(request, &error) != QKV_OK) return qkvi_control_fail(call, &error);
  const size_t count = request->n_sessions;
  answer out = {.presence = calloc(count + 1, sizeof *out.presence), .tokens = calloc(count + 1, sizeof *out.tokens)};
  if (out.presence == NULL || out.tokens == NULL) abort();
  look_up(call, request, &out);
  qkv_metric_add(&daemon->metrics[QKV_METRIC_LOOKUP_NAMES], (int64_t)count);
  qkv_metric_add(&daemon->metrics[QKV_METRIC_LOOKUP_HITS], out.found);
  Qkv__V1__HasSessionsResponse response = QKV__V1__HAS_SESSIONS_RESPONSE__INIT;
  response.presence = out.presence;
  response.n_presence = count;
  response.tokens = out.tokens;
  response.n_tokens = request->tokens ? count : 0;
  qkvi_control_reply_counted(call, &response.base);
  free(out.presence);
  free(out.tokens);
}

static void on_has_sessions(qkv_rpc_call *call, qkv_bytes message) {
  qkvi_request_job(call, message, &qkv__v1__has_sessions_request__descriptor, QKVI_WAIT_LAYERS, has_job);
}

const qkv_rpc_method qkvi_lookup_methods[] = {
    {.path = "/qkv.v1.KvCache/HasSessions", .message = on_has_sessions, .destroy = qkvi_control_free}, {0}};
