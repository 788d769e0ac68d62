// Fork: a new session that shares another one's pages (engine/cache/session.h).
#include "server/handlers/forks.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "qkv/v1/kv_cache.pb-c.h"
#include "server/daemon.h"
#include "server/evict.h"
#include "server/handlers/contract.h"
#include "server/handlers/control.h"
#include "server/handlers/handlers.h"
#include "server/handlers/jobs.h"
#include "server/residency/accounts.h"
#include "server/residency/fold.h"
#include "server/residency/residency.h"

// Where each layer is forked: at `position`, or with 0 at its end.
static qkv_status read_positions(qkv_session *parent, uint64_t position, uint64_t *positions, qkv_error *error) {
  const uint64_t first = qkv_session_config_of(parent)->first_position;
  qkv_session_info info;
  qkv_session_read_info(parent, &info, positions);
  if (position == 0) return QKV_OK;
  if (position < first)
    return qkv_fail(error, QKV_FAILED_PRECONDITION,
                    "position is %" PRIu64 ", the session's first position is %" PRIu64, position, first);
  for (uint32_t i = 0; i < info.model->layers; i++) {
    if (positions[i] < position)
      return qkv_fail(error, QKV_FAILED_PRECONDITION, "position is %" PRIu64 ", layer %" PRIu32 " ends at %" PRIu64,
                      position, i, positions[i]);
    positions[i] = position;
  }
  return QKV_OK;
}

static void name_fork(qkv_session *parent, const char *name, qkv_session_config *config) {
  qkv_session_info info;
  qkv_session_read_info(parent, &info, NULL);
  *config = info.config;
  config->pinned = false;
  config->whole = 0;
  config->backing = NULL;
  config->name = name;
}

// Memory may be full to the last byte with evictable sessions.
static qkv_status fork_in_memory(const qkv_rpc_call *call, qkv_session *parent, qkv_session_config *config,
                                 const uint64_t *positions, qkv_session **child, qkv_error *error) {
  const qkv_daemon *daemon = qkv_rpc_context(call);
  qkv_error refused = {0};
  uint64_t reservation = 0;
  const uint64_t cost = qkv_session_fork_cost(config, qkv_session_model(parent));
  qkv_status status = qkv_store_fork(daemon->store, parent, config, positions, child, &refused);
  if (status == QKV_RESOURCE_EXHAUSTED && daemon->residency != NULL &&
      qkvi_account_headroom(daemon->residency, call, qkv_session_account(parent), cost, 0, NULL) == QKV_OK &&
      qkvi_budget_reserve(daemon->residency, call, cost, 0, &reservation, NULL) == QKV_OK) {
    refused = (qkv_error){0};
    config->headroom = &reservation;
    status = qkv_store_fork(daemon->store, parent, config, positions, child, &refused);
    config->headroom = NULL;
    qkvi_budget_unreserve(daemon->residency, &reservation);
  }
  for (int i = 0; i < QKVI_EVICT_TRIES && status == QKV_RESOURCE_EXHAUSTED; i++) {
    if (!qkvi_evict(qkv_rpc_context(call), qkv_session_account(parent), parent, cost)) break;
    refused = (qkv_error){0};
    status = qkv_store_fork(daemon->store, parent, config, positions, child, &refused);
  }
  return status == QKV_OK ? QKV_OK : qkv_fail(error, status, "%s", refused.text);
}

void qkvi_fork_undo(const qkv_daemon *daemon, qkv_session **child) {
  uint64_t freed;
  qkv_error ignored = {0};
  if (qkv_store_close_session(daemon->store, *child, &freed, &ignored) == QKV_OK)
    (void)qkvi_catalogue_closed(daemon->residency, *child, &ignored);
  qkv_session_unref(child);
}

// The journaled fork and the fork in memory are the same only if the parent is not truncated in between.
static qkv_status fork_once(const qkv_rpc_call *call, qkv_session *parent, qkv_session_config *config,
                            const uint64_t *positions, qkv_session **child, qkv_error *error) {
  const qkv_daemon *daemon = qkv_rpc_context(call);
  qkvi_catalogue_fork fork;
  qkv_error lost = {0};
  config->parent_truncations = qkv_session_truncations(parent);
  QKV_TRY(qkvi_catalogue_enlist(daemon->residency, config, error));
  QKV_TRY(qkvi_catalogue_fork_begin(daemon->residency, parent, config, positions, &fork, error));
  const qkv_status status = fork_in_memory(call, parent, config, positions, child, error);
  const qkv_status written = qkvi_catalogue_fork_done(&fork, status == QKV_OK ? *child : NULL, &lost);
  if (status != QKV_OK || written == QKV_OK) return status;
  qkvi_fork_undo(daemon, child);
  return qkv_fail(error, written, "%s", lost.text);
}

qkv_status qkvi_fork(const qkv_rpc_call *call, qkv_session *parent, qkv_session_config *config,
                     const uint64_t *positions, qkv_session **child, qkv_error *error) {
  enum { TRIES = 4 };
  const qkv_daemon *daemon = qkv_rpc_context(call);
  qkvi_waits waits = QKVI_WAIT_LAYERS | QKVI_WAIT_DISK;
  QKV_TRY(qkvi_unfold(daemon->residency, call, parent, &waits, error));
  if (qkvi_catalogue_is_unconfirmed(daemon->residency, parent))
    QKV_TRY(qkvi_catalogue_tie(daemon->residency, call, parent, error));
  qkv_status status = QKV_UNAVAILABLE;
  for (int i = 0; i < TRIES && status == QKV_UNAVAILABLE; i++) {
    const uint64_t truncations = qkv_session_truncations(parent);
    *error = (qkv_error){0};
    status = fork_once(call, parent, config, positions, child, error);
    if (truncations == qkv_session_truncations(parent)) break;
  }
  return status;
}

static qkv_status fork_session(const qkv_rpc_call *call, qkv_session *parent, const Qkv__V1__ForkRequest *request,
                               qkv_session **child, qkv_error *error) {
  QKV_TRY(qkv_name_check(request->fork, "fork", error));
  uint64_t *positions = calloc(qkv_session_model(parent)->layers, sizeof *positions);
  if (positions == NULL) abort();
  qkv_session_config config;
  name_fork(parent, request->fork, &config);
  qkv_status status = read_positions(parent, request->position, positions, error);
  if (status == QKV_OK) status = qkvi_fork(call, parent, &config, positions, child, error);
  free(positions);
  return status;
}

static void reply_forked(qkv_rpc_call *call, qkv_session *child) {
  qkv_session_info info;
  qkvi_session_message parts;
  Qkv__V1__ForkResponse response = QKV__V1__FORK_RESPONSE__INIT;
  uint64_t *lengths = calloc(qkv_session_model(child)->layers, sizeof *lengths);
  if (lengths == NULL) abort();
  qkv_session_read_info(child, &info, lengths);
  qkvi_session_write(&info, lengths, &parts);
  response.info = &parts.info;
  qkvi_control_reply(call, &response.base);
  free(lengths);
}

static void fork_job(void *context) {
  qkv_rpc_call *call = context;
  qkv_daemon *daemon = qkv_rpc_context(call);
  const Qkv__V1__ForkRequest *request = qkv_rpc_state(call);
  qkv_error error = {0};
  qkv_session *parent = NULL, *child = NULL;
  if (!qkvi_job_wanted(call)) return;
  qkv_status status = qkvi_request_layers(call, request->session, &parent, &error);
  if (status == QKV_OK) status = fork_session(call, parent, request, &child, &error);
  if (status == QKV_OK) {
    qkv_metric_add(&daemon->metrics[QKV_METRIC_FORKS], 1);
    reply_forked(call, child);
  } else {
    qkvi_control_fail(call, &error);
  }
  if (child != NULL) qkv_session_unref(&child);
  if (parent != NULL) qkv_session_unref(&parent);
}

static void on_fork(qkv_rpc_call *call, qkv_bytes message) {
  qkvi_request_job(call, message, &qkv__v1__fork_request__descriptor, qkvi_session_waits(call) | QKVI_WAIT_ROWS,
                   fork_job);
}

const qkv_rpc_method qkvi_forks_methods[] = {
    {.path = "/qkv.v1.KvCache/Fork", .message = on_fork, .destroy = qkvi_control_free}, {0}};
