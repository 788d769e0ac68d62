// OpenSession.
#include "server/handlers/open_session.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/auth/identity.h"
#include "server/evict.h"
#include "server/handlers/contract.h"
#include "server/handlers/control.h"
#include "server/handlers/handlers.h"
#include "server/handlers/jobs.h"
#include "server/handlers/open_prefix.h"
#include "server/handlers/prefixes.h"
#include "server/handlers/token_ids.h"
#include "server/residency/accounts.h"

enum { OPEN_RESERVATION = 1 << 18 };  // at least what a session takes without rows
enum { SMALL_REQUEST_MAX = 4096 };    // bytes of an OpenSession that is parsed inline

// Fields of the contract that this daemon does not serve yet.
static qkv_status check_served(const Qkv__V1__OpenSessionRequest *request, qkv_error *error) {
  unsigned durability = (unsigned)request->durability;
  if (durability > QKV__V1__DURABILITY__DURABILITY_SYNC)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "durability is %d, known are 0 to 3", (int)durability);
  return QKV_OK;
}

static qkv_status check_salt(const Qkv__V1__OpenSessionRequest *request, qkv_error *error) {
  if (request->salt.len <= QKV_PREFIX_SALT_MAX) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "salt is %zu bytes, at most %d", request->salt.len,
                  QKV_PREFIX_SALT_MAX);
}

static qkv_status check_prefix(const Qkv__V1__OpenSessionRequest *request, qkv_error *error) {
  if (request->n_prefix_token_ids > 0 && request->first_position > 0)
    return qkv_fail(error, QKV_INVALID_ARGUMENT,
                    "prefix_token_ids is set, which begins at 0, and first_position is %" PRIu64,
                    request->first_position);
  return QKV_OK;
}

static qkv_status read_tiers(const qkv_server_options *options, const Qkv__V1__OpenSessionRequest *request,
                             qkv_session_config *config, qkv_error *error) {
  const bool said = request->tier_bits_set_case == QKV__V1__OPEN_SESSION_REQUEST__TIER_BITS_SET_TIER_BITS;
  config->ema = (qkv_ema_options){.alpha = options->ema_alpha, .sample_every = (uint32_t)options->ema_every};
  config->keep_full = options->keep_full;
  if (request->keep_full_set_case == QKV__V1__OPEN_SESSION_REQUEST__KEEP_FULL_SET_KEEP_FULL)
    config->keep_full = request->keep_full != 0;
  config->tier_bits = said ? request->tier_bits : options->tier_bits;
  if (config->tier_bits == 0 || qkv_codec_at(0)->bits_valid(config->tier_bits)) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "tier_bits is %g, allowed are 0 and multiples of %g up to %d",
                  config->tier_bits, 1.0 / QKV_TIER_BIT, QKV_DEPTH_MAX);
}

// Whether the codec of a session that is fetched may be the archive codec, of whose pages no planes can be dropped:
// nothing asks for that, and where memory runs short its pages go to the SSD, or it is closed.
static bool may_archive(const qkv_daemon *daemon, const qkv_session_config *config) {
  return config->purpose == QKV_PURPOSE_FETCH && config->tier_bits == 0 && !config->keep_full &&
         config->max_attention_error == 0 && daemon->options->tier_thresholds == NULL &&
         (config->evictable || config->durability != QKV_DURABILITY_MEMORY);
}

qkv_status qkvi_open_config(const qkv_rpc_call *call, const Qkv__V1__OpenSessionRequest *request,
                            qkv_session_config *config, qkv_error *error) {
  const qkv_daemon *daemon = qkv_rpc_context(call);
  const char *tenant = NULL;
  unsigned purpose = (unsigned)request->purpose;
  QKV_TRY(qkv_name_check(request->session, "session", error));
  QKV_TRY(qkv_name_check(request->model, "model", error));
  QKV_TRY(qkvi_request_tenant(call, request->tenant, &tenant, error));
  if (purpose > QKV_PURPOSE_FETCH)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "purpose is %d, known are 1 (attend) and 2 (fetch)", (int)purpose);
  QKV_TRY(check_served(request, error));
  QKV_TRY(check_salt(request, error));
  QKV_TRY(check_prefix(request, error));
  *config =
      (qkv_session_config){.purpose = purpose == 0 ? QKV_PURPOSE_ATTEND : (qkv_purpose)purpose,
                           .first_position = request->first_position,
                           .durability = request->durability == QKV__V1__DURABILITY__DURABILITY_UNSPECIFIED
                                             ? qkv_server_options_durability(daemon->options)
                                             : (qkv_durability)request->durability,
                           .max_attention_error = request->max_attention_error,
                           .ttl_ms = request->ttl_ms,
                           .root = qkv_prefix_root(tenant, request->model, request->salt.data, request->salt.len)};
  config->name = request->session;
  config->tenant = tenant;
  QKV_TRY(
      qkvi_retention_read(request->retention, qkv_server_options_evict(daemon->options), &config->evictable, error));
  QKV_TRY(read_tiers(daemon->options, request, config, error));
  config->archived = may_archive(daemon, config);
  QKV_TRY(qkvi_policy_read(request->policy, &config->policy, error));
  qkv_server_options_keep_out(daemon->options, config->tenant, &config->policy);
  return QKV_OK;
}

// Memory may be full to the last byte with evictable sessions, or with sessions that may be closed.
static qkv_status open_on_account(const qkv_rpc_call *call, qkv_account *account, qkv_session_config *config,
                                  const char *model, qkvi_waits waits, qkv_session **session, qkv_error *error) {
  qkv_daemon *daemon = qkv_rpc_context(call);
  qkv_error refused = {0};
  uint64_t headroom = 0, cost = OPEN_RESERVATION;
  qkv_status status = qkv_store_open(daemon->store, config, model, session, &refused);
  if (status == QKV_RESOURCE_EXHAUSTED && (waits & QKVI_WAIT_MEMORY) == 0) return QKV_UNAVAILABLE;
  if (status == QKV_RESOURCE_EXHAUSTED) cost += qkv_store_coders_cost(daemon->store, config, model);
  if (status == QKV_RESOURCE_EXHAUSTED && daemon->residency != NULL &&
      qkvi_account_headroom(daemon->residency, call, account, cost, 0, NULL) == QKV_OK &&
      qkvi_budget_reserve(daemon->residency, call, cost, 0, &headroom, NULL) == QKV_OK) {
    refused = (qkv_error){0};
    config->headroom = &headroom;
    status = qkv_store_open(daemon->store, config, model, session, &refused);
    config->headroom = NULL;
    qkvi_budget_unreserve(daemon->residency, &headroom);
  }
  for (int i = 0; i < QKVI_EVICT_TRIES && status == QKV_RESOURCE_EXHAUSTED; i++) {
    if (!qkvi_evict(daemon, account, NULL, cost)) break;
    refused = (qkv_error){0};
    status = qkv_store_open(daemon->store, config, model, session, &refused);
  }
  return status == QKV_OK ? QKV_OK : qkv_fail(error, status, "%s", refused.text);
}

static qkv_status open_in_memory(const qkv_rpc_call *call, qkv_session_config *config, const char *model,
                                 qkvi_waits waits, qkv_session **session, qkv_error *error) {
  const qkv_daemon *daemon = qkv_rpc_context(call);
  qkv_account *account = qkv_accounts_join(qkv_store_accounts(daemon->store), config->tenant);
  const qkv_status status = open_on_account(call, account, config, model, waits, session, error);
  qkv_account_unref(&account);
  return status;
}

qkv_status qkvi_open_empty(const qkv_rpc_call *call, qkv_session_config *config, const char *model, qkvi_waits waits,
                           qkv_session **session, qkv_error *error) {
  const qkv_daemon *daemon = qkv_rpc_context(call);
  QKV_TRY(qkvi_catalogue_enlist(daemon->residency, config, error));
  QKV_TRY(open_in_memory(call, config, model, waits, session, error));
  if (config->staged || config->backing == NULL ||
      qkvi_catalogue_opened(daemon->residency, *session, error) == QKV_OK)
    return QKV_OK;
  uint64_t freed;
  (void)qkv_store_close_session(daemon->store, *session, &freed, NULL);
  qkv_session_unref(session);
  return error->status;
}

static qkv_status open_session(qkv_rpc_call *call, const Qkv__V1__OpenSessionRequest *request, qkvi_waits waits,
                               qkv_session **session, uint64_t *matched, qkv_error *error) {
  qkv_daemon *daemon = qkv_rpc_context(call);
  qkv_session_config config;
  QKV_TRY(qkvi_open_config(call, request, &config, error));
  if (request->n_prefix_token_ids > 0)
    *matched = qkvi_open_prefix(call, &config, request->model, request->prefix_token_ids, request->n_prefix_token_ids,
                                session);
  if (*matched == 0) return qkvi_open_empty(call, &config, request->model, waits, session, error);
  qkv_metric_add(&daemon->metrics[QKV_METRIC_FORKS], 1);
  qkv_metric_add(&daemon->metrics[QKV_METRIC_PREFIX_TOKENS_OPENED], (int64_t)*matched);
  return QKV_OK;
}

static void reply_opened(qkv_rpc_call *call, qkv_session *session, uint64_t matched) {
  qkv_session_info info;
  qkvi_session_message parts;
  Qkv__V1__OpenSessionResponse response = QKV__V1__OPEN_SESSION_RESPONSE__INIT;
  uint64_t *lengths = calloc(qkv_session_model(session)->layers, sizeof *lengths);
  if (lengths == NULL) abort();
  qkv_session_read_info(session, &info, lengths);
  qkvi_session_write(&info, lengths, &parts);
  response.info = &parts.info;
  response.matched_tokens = matched;
  qkvi_control_reply(call, &response.base);
  free(lengths);
}

// False, with nothing done, where it would have to wait for more.
static bool open_now(qkv_rpc_call *call, const Qkv__V1__OpenSessionRequest *request, qkvi_waits waits) {
  qkv_error error = {0};
  qkv_session *session = NULL;
  uint64_t matched = 0;
  const qkv_status status = open_session(call, request, waits, &session, &matched, &error);
  if (status == QKV_UNAVAILABLE && error.status == QKV_OK) return false;
  if (status == QKV_OK) {
    reply_opened(call, session, matched);
    qkv_session_unref(&session);
  } else {
    qkvi_control_fail(call, &error);
  }
  return true;
}

// The ids are counted before they are unpacked.
static qkv_status check_ids(qkv_bytes message, qkv_error *error) {
  enum { PREFIX_TOKEN_IDS = 13 };
  qkvi_token_ids ids = {.message = message, .field = PREFIX_TOKEN_IDS};
  qkv_wire_reader reader;
  qkv_wire_field field;
  bool more = true;
  qkv_wire_reader_init(&reader, message);
  for (;;) {
    QKV_TRY(qkv_wire_next(&reader, &field, &more, error));
    if (!more) break;
    if (field.number != PREFIX_TOKEN_IDS) continue;
    qkv_error invalid = {0};
    if (qkvi_token_ids_count(&ids, &field, &invalid, error) != QKV_OK)
      return qkv_error_prefix(error, "prefix_token_ids: ");
    if (invalid.status != QKV_OK) return qkv_fail(error, invalid.status, "prefix_%s", invalid.text);
  }
  if (ids.count <= QKVI_PREFIX_IDS_MAX) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "prefix_token_ids has %" PRIu64 " entries, at most %d", ids.count,
                  QKVI_PREFIX_IDS_MAX);
}

static Qkv__V1__OpenSessionRequest *unpack_open(qkv_bytes message, qkv_error *error) {
  if (check_ids(message, error) != QKV_OK) return NULL;
  return qkvi_control_unpack_large(message, &qkv__v1__open_session_request__descriptor, error);
}

// A prefix is forked from a session that another call may append to.
enum { JOB_WAITS = QKVI_WAIT_LAYERS | QKVI_WAIT_ROWS | QKVI_WAIT_MEMORY };

typedef struct open_call {
  qkv_rpc_call *call;
  qkv_bytes message;
} open_call;

static void open_job(void *context) {
  const open_call *open = context;
  qkv_error error = {0};
  if (!qkvi_job_wanted(open->call)) return;
  Qkv__V1__OpenSessionRequest *request = unpack_open(open->message, &error);
  if (request == NULL) return qkvi_control_fail(open->call, &error);
  (void)open_now(open->call, request, JOB_WAITS);
  qkvi_control_free(request);
}

// False where that may take long, or wait: a session that is journaled waits for the disk, one with a prefix for
// layers, and one for which there is no place or no memory closes others.
static bool open_at_once(qkv_rpc_call *call, qkv_bytes message) {
  const qkv_daemon *daemon = qkv_rpc_context(call);
  qkv_error error = {0};
  const bool full = qkv_store_sessions(daemon->store) >= (size_t)daemon->options->limit_sessions;
  if (daemon->residency != NULL || full || message.length > SMALL_REQUEST_MAX) return false;
  Qkv__V1__OpenSessionRequest *request = unpack_open(message, &error);
  if (request == NULL) {
    qkvi_control_fail(call, &error);
    return true;
  }
  const bool done = request->n_prefix_token_ids == 0 && open_now(call, request, 0);
  qkvi_control_free(request);
  return done;
}

static void on_open_session(qkv_rpc_call *call, qkv_bytes message) {
  if (open_at_once(call, message)) return;
  open_call *open = calloc(1, sizeof *open);
  if (open == NULL) abort();
  *open = (open_call){.call = call, .message = message};
  qkv_rpc_set_state(call, open);
  qkvi_job_submit(call, qkvi_session_waits(call) | JOB_WAITS, open_job, open);
}

const qkv_rpc_method qkvi_open_session_methods[] = {
    {.path = "/qkv.v1.KvCache/OpenSession", .message = on_open_session, .destroy = free}, {0}};
