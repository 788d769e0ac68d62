// CloseSession, GetSession, ListSessions, Truncate.
//
// Operations that may take long, because they free much, walk all sessions or wait for a layer, are jobs of the
// compute pool.
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cache/session_fold.h"
#include "engine/cache/session_spill.h"
#include "server/auth/identity.h"
#include "server/daemon.h"
#include "server/handlers/contract.h"
#include "server/handlers/control.h"
#include "server/handlers/handlers.h"
#include "server/handlers/jobs.h"

#define PAGE_SIZE_MAX 1000

enum { IDS_AT_ONCE = 1 << 18 };  // token ids that GetSession gives

// The session's lengths, as many as its model has layers; the caller frees them.
static uint64_t *read_info(qkv_session *session, qkv_session_info *info) {
  uint64_t *lengths = calloc(qkv_session_model(session)->layers, sizeof *lengths);
  if (lengths == NULL) abort();
  qkv_session_read_info(session, info, lengths);
  return lengths;
}

// ---- CloseSession ----

static uint64_t held_bytes(qkv_session *session) {
  qkv_session_info info;
  qkv_session_read_info(session, &info, NULL);
  return info.usage.bytes_coded + info.usage.bytes_exact + info.usage.bytes_overhead;
}

// Writes the session to the SSD, as a whole.
static qkv_status sink(const qkv_rpc_call *call, qkv_session *session, uint64_t *bytes_freed, qkv_error *error) {
  const qkv_daemon *daemon = qkv_rpc_context(call);
  if (qkv_session_config_of(session)->backing == NULL)
    return qkv_fail(error, QKV_FAILED_PRECONDITION, "keep is set, the session %s is in memory alone",
                    qkv_session_name(session));
  const uint64_t before = held_bytes(session);
  QKV_TRY(qkv_session_seal(session, error));
  QKV_TRY(qkvi_write_back_sync(daemon->residency, call, session, error));
  (void)qkv_session_evict(session, UINT64_MAX, true);
  const uint64_t after = held_bytes(session);
  *bytes_freed = before > after ? before - after : 0;
  return QKV_OK;
}

static qkv_status close_session(qkv_rpc_call *call, const Qkv__V1__CloseSessionRequest *request,
                                uint64_t *bytes_freed, qkv_error *error) {
  const qkv_daemon *daemon = qkv_rpc_context(call);
  qkv_session *session = NULL;
  QKV_TRY(qkvi_request_session(call, request->session, &session, error));
  qkv_status status;
  if (request->keep) {
    status = sink(call, session, bytes_freed, error);
  } else {
    status = qkv_store_close_session(daemon->store, session, bytes_freed, error);
    if (status == QKV_OK) status = qkvi_catalogue_closed(daemon->residency, session, error);
  }
  qkv_session_unref(&session);
  return status;
}

static void close_job(void *context) {
  qkv_rpc_call *call = context;
  qkv_error error = {0};
  Qkv__V1__CloseSessionResponse response = QKV__V1__CLOSE_SESSION_RESPONSE__INIT;
  if (!qkvi_job_wanted(call)) return;
  if (close_session(call, qkv_rpc_state(call), &response.bytes_freed, &error) != QKV_OK)
    return qkvi_control_fail(call, &error);
  qkvi_control_reply(call, &response.base);
}

static void on_close_session(qkv_rpc_call *call, qkv_bytes message) {
  qkvi_request_job(call, message, &qkv__v1__close_session_request__descriptor, qkvi_session_waits(call), close_job);
}

// ---- GetSession ----

static qkv_status check_ids_range(const Qkv__V1__TokenRange *range, qkv_error *error) {
  if (range == NULL || range->end == 0 || range->begin <= range->end) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "token_ids.begin is %" PRIu64 ", token_ids.end is %" PRIu64,
                  range->begin, range->end);
}

// The requested ids, which the caller frees; NULL: none.
static uint32_t *read_ids(qkv_session *session, const Qkv__V1__TokenRange *range, size_t *count) {
  size_t max = IDS_AT_ONCE;
  *count = 0;
  if (range == NULL) return NULL;
  if (range->end != 0 && range->end - range->begin < max) max = (size_t)(range->end - range->begin);
  qkv_session_tokens *tokens = qkv_session_tokens_of(session);
  if (tokens == NULL) return NULL;
  uint32_t *ids = malloc(IDS_AT_ONCE * sizeof *ids);
  if (ids == NULL) abort();
  *count = qkv_session_tokens_read(tokens, range->begin, ids, max);
  return ids;
}

static void reply_session(qkv_rpc_call *call, qkv_session *session, const Qkv__V1__TokenRange *range) {
  qkv_session_info info;
  qkvi_session_message parts;
  uint64_t *lengths = read_info(session, &info);
  uint64_t *durable = calloc(info.model->layers, sizeof *durable);
  if (durable == NULL) abort();
  qkv_session_read_durable(session, durable);
  qkvi_session_write(&info, lengths, &parts);
  parts.info.durable = durable;
  parts.info.n_durable = info.config.backing != NULL ? info.model->layers : 0;
  parts.info.token_ids = read_ids(session, range, &parts.info.n_token_ids);
  qkvi_control_reply_counted(call, &parts.info.base);
  free(parts.info.token_ids);
  free(durable);
  free(lengths);
}

// Token ids of a session that is folded.
static void get_job(void *context) {
  qkv_rpc_call *call = context;
  const Qkv__V1__GetSessionRequest *request = qkv_rpc_state(call);
  qkv_error error = {0};
  qkv_session *session = NULL;
  if (!qkvi_job_wanted(call)) return;
  if (qkvi_request_layers(call, request->session, &session, &error) != QKV_OK) return qkvi_control_fail(call, &error);
  reply_session(call, session, request->token_ids);
  qkv_session_unref(&session);
}

static void on_get_session(qkv_rpc_call *call, qkv_bytes message) {
  qkv_error error = {0};
  qkv_session *session = NULL;
  Qkv__V1__GetSessionRequest *request =
      qkvi_control_unpack_here(message, &qkv__v1__get_session_request__descriptor, &error);
  if (request == NULL) return qkvi_control_fail(call, &error);
  qkv_rpc_set_state(call, request);
  qkv_status status = check_ids_range(request->token_ids, &error);
  if (status == QKV_OK) status = qkvi_request_session(call, request->session, &session, &error);
  if (status != QKV_OK) return qkvi_control_fail(call, &error);
  const bool waits = request->token_ids != NULL && qkv_session_is_folded(session);
  if (!waits) reply_session(call, session, request->token_ids);
  qkv_session_unref(&session);
  if (waits) qkvi_job_submit(call, qkvi_session_waits(call), get_job, call);
}

// ---- ListSessions ----

typedef struct session_page {
  qkv_session *sessions[PAGE_SIZE_MAX + 1];  // references
  size_t count;
  qkv_store_place last;  // behind which the page begins, then: of the page
  bool more;             // behind it
} session_page;

static bool wanted(const void *context, const qkv_session *session) {
  const Qkv__V1__ListSessionsRequest *request = context;
  if (qkv_session_is_staged(session)) return false;
  return request->model[0] == '\0' || strcmp(request->model, qkv_session_model(session)->name) == 0;
}

static void fill_page(qkv_store *store, const Qkv__V1__ListSessionsRequest *request, const char *tenant, size_t size,
                      session_page *page) {
  const qkv_store_filter filter = {.tenant = tenant[0] == '\0' ? NULL : tenant,
                                   .prefix = request->prefix,
                                   .after = &page->last,
                                   .wanted = wanted,
                                   .context = request};
  page->count = qkv_store_list(store, &filter, page->sessions, size + 1);
  page->more = page->count > size;
  if (page->more) qkv_session_unref(&page->sessions[--page->count]);
  if (page->count > 0) page->last = qkv_store_place_of(page->sessions[page->count - 1]);
}

// A token is the name of the last session; where those of all tenants are listed, it is followed by "," and its
// tenant.
static qkv_status read_token(const char *token, qkv_store_place *place, qkv_error *error) {
  const char *comma = strchr(token, ',');
  const size_t name_bytes = comma == NULL ? strlen(token) : (size_t)(comma - token);
  *place = (qkv_store_place){.name = ""};
  if (token[0] == '\0') return QKV_OK;
  if (name_bytes > QKV_NAME_MAX) return qkv_name_check(token, "page_token", error);
  memcpy(place->name, token, name_bytes);
  QKV_TRY(qkv_name_check(place->name, "page_token", error));
  if (comma == NULL) return QKV_OK;
  QKV_TRY(qkv_name_check(comma + 1, "page_token's tenant", error));
  (void)snprintf(place->tenant, sizeof place->tenant, "%s", comma + 1);
  return QKV_OK;
}

static void write_token(const session_page *page, const char *tenant, char *token, size_t bytes) {
  const char *of = tenant[0] == '\0' ? page->last.tenant : "";
  token[0] = '\0';
  if (page->more) (void)snprintf(token, bytes, "%s%s%s", page->last.name, of[0] == '\0' ? "" : ",", of);
}

static qkv_status check_list(const Qkv__V1__ListSessionsRequest *request, qkv_error *error) {
  if (request->page_size <= PAGE_SIZE_MAX) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "page_size is %" PRIu32 ", at most %d", request->page_size,
                  PAGE_SIZE_MAX);
}

static void reply_page(qkv_rpc_call *call, session_page *page, const char *tenant) {
  char token[sizeof page->last];
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
  write_token(page, tenant, token, sizeof token);
  response.next_page_token = token;
  qkvi_control_reply_counted(call, &response.base);
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
  session_page page;
  const char *tenant = NULL;
  qkv_status status = check_list(request, &error);
  if (status == QKV_OK) status = qkvi_asked_tenant(call, request->tenant, &tenant, &error);
  if (status == QKV_OK) status = read_token(request->page_token, &page.last, &error);
  if (status != QKV_OK) return qkvi_control_fail(call, &error);
  fill_page(daemon->store, request, tenant, request->page_size == 0 ? PAGE_SIZE_MAX : request->page_size, &page);
  reply_page(call, &page, tenant);
}

static void on_list_sessions(qkv_rpc_call *call, qkv_bytes message) {
  qkvi_request_job(call, message, &qkv__v1__list_sessions_request__descriptor, qkvi_session_waits(call), list_job);
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
  qkv_status status = qkvi_request_layers(call, request->session, &session, &error);
  if (status == QKV_OK && qkvi_catalogue_is_unconfirmed(daemon->residency, session))
    status = qkvi_catalogue_tie(daemon->residency, call, session, &error);
  if (status == QKV_OK) status = truncate_session(session, request, &error);
  if (status == QKV_OK) status = qkvi_write_back_truncated(daemon->residency, call, session, &error);
  if (status == QKV_OK)
    reply_lengths(call, session);
  else
    qkvi_control_fail(call, &error);
  if (session != NULL) qkv_session_unref(&session);
}

static void on_truncate(qkv_rpc_call *call, qkv_bytes message) {
  qkvi_request_job(call, message, &qkv__v1__truncate_request__descriptor, qkvi_session_waits(call) | QKVI_WAIT_ROWS,
                   truncate_job);
}

const qkv_rpc_method qkvi_sessions_methods[] = {
    {.path = "/qkv.v1.KvCache/CloseSession", .message = on_close_session, .destroy = qkvi_control_free},
    {.path = "/qkv.v1.KvCache/GetSession", .message = on_get_session, .destroy = qkvi_control_free},
    {.path = "/qkv.v1.KvCache/ListSessions", .message = on_list_sessions, .destroy = qkvi_control_free},
    {.path = "/qkv.v1.KvCache/Truncate", .message = on_truncate, .destroy = qkvi_control_free},
    {0}};
