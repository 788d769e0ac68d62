// OpenSession, CloseSession, GetSession, ListSessions, Truncate.
//
// Those that may take long, because they free much, go through all sessions or wait for a layer, are jobs of the
// compute pool.
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cache/session_spill.h"
#include "server/contract.h"
#include "server/control.h"
#include "server/daemon.h"
#include "server/handlers.h"
#include "server/jobs.h"

enum { OPEN_ROOM = 1 << 18 };  // more than a session takes without rows

#define PAGE_SIZE_MAX 1000

// The session's lengths, as many as its model has layers; the caller frees them.
static uint64_t *read_info(qkv_session *session, qkv_session_info *info) {
  uint64_t *lengths = calloc(qkv_session_model(session)->layers, sizeof *lengths);
  if (lengths == NULL) abort();
  qkv_session_read_info(session, info, lengths);
  return lengths;
}

// ---- OpenSession ----

// What the contract has and this daemon does not serve yet.
static qkv_status check_served(const Qkv__V1__OpenSessionRequest *request, qkv_error *error) {
  unsigned durability = (unsigned)request->durability;
  if (durability > QKV__V1__DURABILITY__DURABILITY_SYNC)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "durability is %d, known are 0 to 3", (int)durability);
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

static qkv_status read_config(const qkv_daemon *daemon, const Qkv__V1__OpenSessionRequest *request,
                              qkv_session_config *config, qkv_error *error) {
  const char *tenant = request->tenant[0] == '\0' ? "default" : request->tenant;
  unsigned purpose = (unsigned)request->purpose;
  QKV_TRY(qkv_name_check(request->session, "session", error));
  QKV_TRY(qkv_name_check(request->model, "model", error));
  QKV_TRY(qkv_name_check(tenant, "tenant", error));
  if (purpose > QKV_PURPOSE_FETCH)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "purpose is %d, known are 1 (attend) and 2 (fetch)", (int)purpose);
  QKV_TRY(check_served(request, error));
  *config = (qkv_session_config){.purpose = purpose == 0 ? QKV_PURPOSE_ATTEND : (qkv_purpose)purpose,
                                 .first_position = request->first_position,
                                 .durability = request->durability == QKV__V1__DURABILITY__DURABILITY_UNSPECIFIED
                                                   ? qkv_server_options_durability(daemon->options)
                                                   : (qkv_durability)request->durability,
                                 .max_attention_error = request->max_attention_error,
                                 .ttl_ms = request->ttl_ms};
  (void)snprintf(config->name, sizeof config->name, "%s", request->session);
  (void)snprintf(config->tenant, sizeof config->tenant, "%s", tenant);
  QKV_TRY(read_tiers(daemon->options, request, config, error));
  return qkvi_policy_read(request->policy, &config->policy, error);
}

static qkv_status open_session(const qkv_daemon *daemon, const Qkv__V1__OpenSessionRequest *request,
                               qkv_session **session, qkv_error *error) {
  qkv_session_config config;
  QKV_TRY(read_config(daemon, request, &config, error));
  qkv_server_options_keep_out(daemon->options, config.tenant, &config.policy);
  QKV_TRY(qkvi_spill_enlist(daemon->spill, &config, error));
  qkv_error refused = {0};
  qkv_status status = qkv_store_open(daemon->store, &config, request->model, session, &refused);
  // Memory may be full to the last byte with what can leave it. (Or there are too many sessions, which is said then.)
  uint64_t room = 0;
  if (status == QKV_RESOURCE_EXHAUSTED && daemon->spill != NULL &&
      qkvi_spill_claim(daemon->spill, OPEN_ROOM, 0, &room, NULL) == QKV_OK) {
    refused = (qkv_error){0};
    config.room = &room;
    status = qkv_store_open(daemon->store, &config, request->model, session, &refused);
    qkvi_spill_unclaim(daemon->spill, &room);
  }
  if (status != QKV_OK) return qkv_fail(error, status, "%s", refused.text);
  if (config.backing == NULL || qkvi_spill_opened(daemon->spill, *session, error) == QKV_OK) return QKV_OK;
  uint64_t freed;
  (void)qkv_store_close_session(daemon->store, *session, &freed, NULL);
  qkv_session_unref(session);
  return error->status;
}

static void reply_opened(qkv_rpc_call *call, qkv_session *session) {
  qkv_session_info info;
  qkvi_session_message parts;
  Qkv__V1__OpenSessionResponse response = QKV__V1__OPEN_SESSION_RESPONSE__INIT;
  uint64_t *lengths = read_info(session, &info);
  qkvi_session_write(&info, lengths, &parts);
  response.info = &parts.info;
  qkvi_control_reply(call, &response.base);
  free(lengths);
}

static void open_now(qkv_rpc_call *call, const Qkv__V1__OpenSessionRequest *request) {
  qkv_error error = {0};
  qkv_session *session = NULL;
  if (open_session(qkv_rpc_context(call), request, &session, &error) != QKV_OK)
    return qkvi_control_fail(call, &error);
  reply_opened(call, session);
  qkv_session_unref(&session);
}

static void open_job(void *context) {
  qkv_rpc_call *call = context;
  if (qkvi_job_wanted(call)) open_now(call, qkv_rpc_state(call));
}

// One that goes into the journal waits for the disk.
static void on_open_session(qkv_rpc_call *call, qkv_bytes message) {
  const qkv_daemon *daemon = qkv_rpc_context(call);
  if (daemon->spill != NULL)
    return qkvi_request_job(call, message, &qkv__v1__open_session_request__descriptor, qkvi_session_patience(call),
                            open_job);
  qkv_error error = {0};
  Qkv__V1__OpenSessionRequest *request =
      qkvi_control_unpack(message, &qkv__v1__open_session_request__descriptor, &error);
  if (request == NULL) return qkvi_control_fail(call, &error);
  open_now(call, request);
  qkvi_control_free(request);
}

// ---- CloseSession ----

static uint64_t held_bytes(qkv_session *session) {
  qkv_session_info info;
  qkv_session_read_info(session, &info, NULL);
  return info.usage.bytes_coded + info.usage.bytes_exact + info.usage.bytes_beside;
}

// To the SSD, as a whole.
static qkv_status sink(const qkv_daemon *daemon, qkv_session *session, uint64_t *bytes_freed, qkv_error *error) {
  if (qkv_session_config_of(session)->backing == NULL)
    return qkv_fail(error, QKV_FAILED_PRECONDITION, "keep is set, the session %s is in memory alone",
                    qkv_session_name(session));
  const uint64_t before = held_bytes(session);
  QKV_TRY(qkv_session_seal(session, error));
  QKV_TRY(qkvi_spill_sync(daemon->spill, session, error));
  (void)qkv_session_evict(session, UINT64_MAX, true);
  const uint64_t after = held_bytes(session);
  *bytes_freed = before > after ? before - after : 0;
  return QKV_OK;
}

static qkv_status close_session(const qkv_daemon *daemon, const Qkv__V1__CloseSessionRequest *request,
                                uint64_t *bytes_freed, qkv_error *error) {
  qkv_session *session = NULL;
  QKV_TRY(qkvi_request_session(daemon, request->session, &session, error));
  qkv_status status;
  if (request->keep) {
    status = sink(daemon, session, bytes_freed, error);
  } else {
    status = qkv_store_close_session(daemon->store, session, bytes_freed, error);
    if (status == QKV_OK) status = qkvi_spill_closed(daemon->spill, session, error);
  }
  qkv_session_unref(&session);
  return status;
}

static void close_job(void *context) {
  qkv_rpc_call *call = context;
  qkv_error error = {0};
  Qkv__V1__CloseSessionResponse response = QKV__V1__CLOSE_SESSION_RESPONSE__INIT;
  if (!qkvi_job_wanted(call)) return;
  if (close_session(qkv_rpc_context(call), qkv_rpc_state(call), &response.bytes_freed, &error) != QKV_OK)
    return qkvi_control_fail(call, &error);
  qkvi_control_reply(call, &response.base);
}

static void on_close_session(qkv_rpc_call *call, qkv_bytes message) {
  qkvi_request_job(call, message, &qkv__v1__close_session_request__descriptor, qkvi_session_patience(call),
                   close_job);
}

// ---- GetSession ----

static void on_get_session(qkv_rpc_call *call, qkv_bytes message) {
  qkv_error error = {0};
  qkv_session *session = NULL;
  Qkv__V1__GetSessionRequest *request =
      qkvi_control_unpack(message, &qkv__v1__get_session_request__descriptor, &error);
  if (request == NULL) return qkvi_control_fail(call, &error);
  qkv_status status = qkvi_request_session(qkv_rpc_context(call), request->session, &session, &error);
  qkvi_control_free(request);
  if (status != QKV_OK) return qkvi_control_fail(call, &error);

  qkv_session_info info;
  qkvi_session_message parts;
  uint64_t *lengths = read_info(session, &info);
  uint64_t *durable = calloc(info.model->layers, sizeof *durable);
  if (durable == NULL) abort();
  qkv_session_read_durable(session, durable);
  qkvi_session_write(&info, lengths, &parts);
  parts.info.durable = durable;
  parts.info.n_durable = info.config.backing != NULL ? info.model->layers : 0;
  qkvi_control_reply(call, &parts.info.base);
  free(durable);
  free(lengths);
  qkv_session_unref(&session);
}

// ---- ListSessions ----

typedef struct session_page {
  qkv_session *sessions[PAGE_SIZE_MAX];  // references
  size_t count;
  char next[QKV_NAME_MAX + 1];  // name of the last one looked at; "" at the end
} session_page;

static bool wanted(const Qkv__V1__ListSessionsRequest *request, qkv_session *session) {
  qkv_session_info info;
  if (request->model[0] != '\0' && strcmp(request->model, qkv_session_model(session)->name) != 0) return false;
  if (request->tenant[0] == '\0') return true;
  qkv_session_read_info(session, &info, NULL);
  return strcmp(request->tenant, info.config.tenant) == 0;
}

// Keeps what is wanted of `listed` until the page is full. Returns how many were looked at; all references of the
// others are given back.
static size_t take_wanted(const Qkv__V1__ListSessionsRequest *request, qkv_session **listed, size_t count,
                          size_t size, session_page *page) {
  size_t looked = 0;
  for (; looked < count && page->count < size; looked++) {
    (void)snprintf(page->next, sizeof page->next, "%s", qkv_session_name(listed[looked]));
    if (!wanted(request, listed[looked])) continue;
    page->sessions[page->count++] = listed[looked];
    listed[looked] = NULL;
  }
  for (size_t i = 0; i < count; i++) {
    if (listed[i] != NULL) qkv_session_unref(&listed[i]);
  }
  return looked;
}

// Filters what the store lists, until the page is full or there is no more. The store sorts all its sessions for
// every list, so one takes them all, unless some are opened meanwhile.
static void fill_page(qkv_store *store, const Qkv__V1__ListSessionsRequest *request, size_t size,
                      session_page *page) {
  const size_t room = qkv_store_read_stats(store).sessions + 1;
  qkv_session **listed = calloc(room, sizeof *listed);
  if (listed == NULL) abort();
  (void)snprintf(page->next, sizeof page->next, "%s", request->page_token);
  page->count = 0;
  size_t count, looked;
  do {
    count = qkv_store_list(store, request->prefix, page->next, listed, room);
    looked = take_wanted(request, listed, count, size, page);
  } while (looked == room);
  if (looked == count) page->next[0] = '\0';
  free(listed);
}

static qkv_status check_list(const Qkv__V1__ListSessionsRequest *request, qkv_error *error) {
  if (request->page_size > PAGE_SIZE_MAX)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "page_size is %" PRIu32 ", at most %d", request->page_size,
                    PAGE_SIZE_MAX);
  if (request->page_token[0] != '\0') QKV_TRY(qkv_name_check(request->page_token, "page_token", error));
  return QKV_OK;
}

static void reply_page(qkv_rpc_call *call, session_page *page) {
  qkvi_session_message *parts = calloc(page->count + 1, sizeof *parts);
  qkv_session_info *infos = calloc(page->count + 1, sizeof *infos);
  Qkv__V1__SessionInfo **rows = calloc(page->count + 1, sizeof *rows);
  if (parts == NULL || infos == NULL || rows == NULL) abort();
  for (size_t i = 0; i < page->count; i++) {
    qkv_session_read_info(page->sessions[i], &infos[i], NULL);
    qkvi_session_write(&infos[i], NULL, &parts[i]);
    rows[i] = &parts[i].info;
  }
  Qkv__V1__ListSessionsResponse response = QKV__V1__LIST_SESSIONS_RESPONSE__INIT;
  response.n_sessions = page->count;
  response.sessions = rows;
  response.next_page_token = page->next;
  qkvi_control_reply(call, &response.base);
  for (size_t i = 0; i < page->count; i++) qkv_session_unref(&page->sessions[i]);
  free(rows);
  free(infos);
  free(parts);
}

static void list_job(void *context) {
  qkv_rpc_call *call = context;
  const qkv_daemon *daemon = qkv_rpc_context(call);
  const Qkv__V1__ListSessionsRequest *request = qkv_rpc_state(call);
  qkv_error error = {0};
  if (!qkvi_job_wanted(call)) return;
  if (check_list(request, &error) != QKV_OK) return qkvi_control_fail(call, &error);
  session_page page;
  fill_page(daemon->store, request, request->page_size == 0 ? PAGE_SIZE_MAX : request->page_size, &page);
  reply_page(call, &page);
}

static void on_list_sessions(qkv_rpc_call *call, qkv_bytes message) {
  qkvi_request_job(call, message, &qkv__v1__list_sessions_request__descriptor, qkvi_session_patience(call), list_job);
}

// ---- Truncate ----

static qkv_status truncate_session(qkv_session *session, const Qkv__V1__TruncateRequest *request, qkv_error *error) {
  const qkv_model *model = qkv_session_model(session);
  if (request->n_layers > model->layers)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "layers has %zu entries, the model %s has %" PRIu32 " layers",
                    request->n_layers, model->name, model->layers);
  return qkv_session_truncate(session, request->position, request->layers, request->n_layers, error);
}

static void reply_lengths(qkv_rpc_call *call, qkv_session *session) {
  qkv_session_info info;
  Qkv__V1__TruncateResponse response = QKV__V1__TRUNCATE_RESPONSE__INIT;
  uint64_t *lengths = read_info(session, &info);
  response.n_lengths = info.model->layers;
  response.lengths = lengths;
  qkvi_control_reply(call, &response.base);
  free(lengths);
}

static void truncate_job(void *context) {
  qkv_rpc_call *call = context;
  const qkv_daemon *daemon = qkv_rpc_context(call);
  const Qkv__V1__TruncateRequest *request = qkv_rpc_state(call);
  qkv_error error = {0};
  qkv_session *session = NULL;
  if (!qkvi_job_wanted(call)) return;
  qkv_status status = qkvi_request_session(daemon, request->session, &session, &error);
  if (status == QKV_OK && qkvi_spill_is_loose(daemon->spill, session))
    status = qkvi_spill_tie(daemon->spill, session, &error);
  if (status == QKV_OK) status = truncate_session(session, request, &error);
  if (status == QKV_OK) status = qkvi_spill_truncated(daemon->spill, session, &error);
  if (status == QKV_OK)
    reply_lengths(call, session);
  else
    qkvi_control_fail(call, &error);
  if (session != NULL) qkv_session_unref(&session);
}

static void on_truncate(qkv_rpc_call *call, qkv_bytes message) {
  qkvi_request_job(call, message, &qkv__v1__truncate_request__descriptor, qkvi_session_patience(call), truncate_job);
}

const qkv_rpc_method qkvi_sessions_methods[] = {
    {.path = "/qkv.v1.KvCache/OpenSession", .message = on_open_session, .destroy = qkvi_control_free},
    {.path = "/qkv.v1.KvCache/CloseSession", .message = on_close_session, .destroy = qkvi_control_free},
    {.path = "/qkv.v1.KvCache/GetSession", .message = on_get_session},
    {.path = "/qkv.v1.KvCache/ListSessions", .message = on_list_sessions, .destroy = qkvi_control_free},
    {.path = "/qkv.v1.KvCache/Truncate", .message = on_truncate, .destroy = qkvi_control_free},
    {0}};
