// Match: the session that holds the longest prefix of a prompt.
#include "server/handlers/prefixes.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cache/session_fold.h"
#include "engine/cache/session_spill.h"
#include "qkv/v1/kv_cache.pb-c.h"
#include "server/auth/identity.h"
#include "server/daemon.h"
#include "server/handlers/control.h"
#include "server/handlers/handlers.h"
#include "server/handlers/jobs.h"
#include "server/handlers/token_ids.h"
#include "server/residency/restore.h"

enum { PAGE = QKV_PREFIX_PAGE, PAGES_AT_ONCE = 256 };

// ---- The request ----

typedef struct match_request {
  char model[QKV_NAME_MAX + 1], tenant[QKV_NAME_MAX + 1];
  uint8_t salt[QKV_PREFIX_SALT_MAX];
  size_t salt_bytes;
  qkvi_token_ids ids;
} match_request;

static qkv_status read_salt(match_request *request, const qkv_wire_field *field, qkv_error *error) {
  if (field->type != QKV_WIRE_BYTES)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "salt has wire type %d, expected %d", (int)field->type,
                    (int)QKV_WIRE_BYTES);
  if (field->bytes.length > sizeof request->salt)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "salt is %zu bytes, at most %d", field->bytes.length,
                    QKV_PREFIX_SALT_MAX);
  request->salt_bytes = field->bytes.length;
  qkv_bytes_copy(field->bytes, 0, field->bytes.length, request->salt);
  return QKV_OK;
}

static qkv_status read_field(match_request *request, const qkv_wire_field *field, qkv_error *error) {
  enum { MODEL = 1, TENANT, TOKEN_IDS, SALT };
  qkv_error invalid = {0};
  switch (field->number) {
    case MODEL:
      return qkv_wire_string(field, "model", request->model, sizeof request->model, error);
    case TENANT:
      return qkv_wire_string(field, "tenant", request->tenant, sizeof request->tenant, error);
    case TOKEN_IDS:
      request->ids.field = TOKEN_IDS;
      if (qkvi_token_ids_count(&request->ids, field, &invalid, error) != QKV_OK)
        return qkv_error_prefix(error, "token_ids: ");
      return invalid.status == QKV_OK ? QKV_OK : qkv_fail(error, invalid.status, "%s", invalid.text);
    case SALT:
      return read_salt(request, field, error);
    default:
      return QKV_OK;
  }
}

static qkv_status read_request(qkv_bytes message, match_request *request, qkv_error *error) {
  qkv_wire_reader reader;
  qkv_wire_field field;
  bool more = true;
  memset(request, 0, sizeof *request);
  request->ids.message = message;
  qkv_wire_reader_init(&reader, message);
  for (;;) {
    QKV_TRY(qkv_wire_next(&reader, &field, &more, error));
    if (!more) break;
    QKV_TRY(read_field(request, &field, error));
  }
  if (request->ids.count > QKVI_PREFIX_IDS_MAX)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "token_ids has %" PRIu64 " entries, at most %d", request->ids.count,
                    QKVI_PREFIX_IDS_MAX);
  return qkv_name_check(request->model, "model", error);
}

// ---- One session ----

// Marks the pages of a layer that are not in memory. Returns their bytes.
static uint64_t mark_missing(qkv_session *session, uint32_t layer, uint64_t tokens, bool *cold) {
  qkv_missing_page pages[PAGES_AT_ONCE];
  size_t count = PAGES_AT_ONCE;
  uint64_t bytes = 0;
  for (uint64_t begin = 0; count == PAGES_AT_ONCE && begin < tokens;) {
    count = qkv_session_missing(session, layer, begin, tokens, false, pages, PAGES_AT_ONCE);
    for (size_t i = 0; i < count; i++) {
      if (pages[i].position < begin) continue;  // the last one of before
      bytes += pages[i].bytes;
      cold[pages[i].position / PAGE] = true;
    }
    if (count > 0) begin = pages[count - 1].position + 1;
  }
  return bytes;
}

uint64_t qkvi_prefix_mark_cold(qkv_session *session, uint64_t tokens, bool *cold) {
  uint64_t missing = 0;
  for (uint32_t i = 0; i < qkv_session_model(session)->layers; i++) {
    uint64_t bytes;
    if (qkv_session_cold(session, i, &bytes) > 0) missing += mark_missing(session, i, tokens, cold);
  }
  return missing;
}

static void look_at_cold(qkvi_held_prefix *held) {
  const uint64_t pages = held->tokens / PAGE;
  bool *cold = calloc(pages + 1, sizeof *cold);
  if (cold == NULL) abort();
  held->bytes_missing = qkvi_prefix_mark_cold(held->session, held->tokens, cold);
  for (uint64_t i = 0; i < pages; i++) held->tokens_cold += cold[i] ? PAGE : 0;
  free(cold);
}

// Of a session that is folded what other sessions share is in memory at most: the bytes of the rest are those of as
// many tokens, as layers differ little.
static void look_at_folded(qkvi_held_prefix *held, uint64_t length) {
  const uint64_t end = qkv_session_folded_held(held->session) / PAGE * PAGE;
  held->tokens_cold = held->tokens > end ? held->tokens - end : 0;
  held->bytes_missing =
      (uint64_t)((double)qkv_session_bytes_stored(held->session) * (double)held->tokens_cold / (double)length);
}

static qkvi_held_prefix look_at(qkv_session *session, uint64_t pages) {
  const uint64_t length = qkv_session_length(session) / PAGE * PAGE;
  qkvi_held_prefix held = {.session = session, .tokens = length < pages * PAGE ? length : pages * PAGE};
  if (held.tokens > 0 && qkv_session_is_folded(session)) {
    look_at_folded(&held, length);
  } else if (held.tokens > 0 && qkv_session_has_cold(session)) {
    look_at_cold(&held);
  }
  return held;
}

// ---- The best of several ----

static bool is_better(const qkvi_held_prefix *a, const qkvi_held_prefix *b) {
  if (a->tokens != b->tokens) return a->tokens > b->tokens;
  return a->tokens > 0 && a->tokens_cold < b->tokens_cold;
}

qkvi_held_prefix qkvi_prefix_find(const qkv_daemon *daemon, const qkv_prefix_hash *root, const uint32_t *ids,
                                  size_t count, bool (*suits)(const void *context, qkv_session *session),
                                  const void *context) {
  qkv_session *sessions[QKV_STORE_MATCH_MAX];
  uint64_t pages[QKV_STORE_MATCH_MAX];
  qkvi_held_prefix best = {0};
  const size_t found = qkv_store_match(daemon->store, root, ids, count, sessions, pages, QKV_STORE_MATCH_MAX);
  for (size_t i = 0; i < found; i++) {
    // Those that follow share no more pages.
    const bool enough = best.tokens >= pages[i] * PAGE && best.tokens_cold == 0;
    const bool passed_over = enough || (suits != NULL && !suits(context, sessions[i]));
    const qkvi_held_prefix held = passed_over ? (qkvi_held_prefix){0} : look_at(sessions[i], pages[i]);
    if (is_better(&held, &best)) {
      if (best.session != NULL) qkv_session_unref(&best.session);
      best = held;
    } else {
      qkv_session_unref(&sessions[i]);
    }
  }
  return best;
}

static void count_match(qkv_daemon *daemon, uint64_t asked, uint64_t matched) {
  qkv_metric_add(&daemon->metrics[QKV_METRIC_PREFIX_MATCHES], 1);
  qkv_metric_add(&daemon->metrics[QKV_METRIC_PREFIX_MATCH_HITS], matched > 0);
  qkv_metric_add(&daemon->metrics[QKV_METRIC_PREFIX_TOKENS_ASKED], (int64_t)asked);
  qkv_metric_add(&daemon->metrics[QKV_METRIC_PREFIX_TOKENS_MATCHED], (int64_t)matched);
}

// ---- The call ----

typedef struct match_call {
  qkv_rpc_call *call;
  qkv_bytes message;
} match_call;

static void reply(qkv_rpc_call *call, qkv_prefix_hash root, const qkvi_held_prefix *best) {
  const qkv_daemon *daemon = qkv_rpc_context(call);
  Qkv__V1__MatchResponse response = QKV__V1__MATCH_RESPONSE__INIT;
  if (best->session != NULL) response.session = (char *)qkv_session_name(best->session);
  response.tokens = best->tokens;
  response.tokens_on_ssd = best->tokens_cold;
  response.tokens_in_memory = best->tokens - best->tokens_cold;
  response.restore_ms = best->bytes_missing == 0 ? 0 : qkvi_restore_ms(daemon->residency, best->bytes_missing);
  response.prefix_root = (ProtobufCBinaryData){.len = sizeof root, .data = (uint8_t *)&root};
  qkvi_control_reply(call, &response.base);
}

static void match_job(void *context) {
  const match_call *match = context;
  qkv_rpc_call *call = match->call;
  qkv_daemon *daemon = qkv_rpc_context(call);
  qkv_error error = {0};
  match_request request;
  const qkv_model *model;
  const char *tenant = NULL;
  if (!qkvi_job_wanted(call)) return;
  qkv_status status = read_request(match->message, &request, &error);
  if (status == QKV_OK) status = qkvi_request_tenant(call, request.tenant, &tenant, &error);
  if (status == QKV_OK) status = qkv_store_model(daemon->store, tenant, request.model, &model, &error);
  if (status != QKV_OK) return qkvi_control_fail(call, &error);
  uint32_t *ids = malloc((size_t)request.ids.count * sizeof *ids + 1);
  if (ids == NULL) abort();
  qkvi_token_ids_read(&request.ids, ids);
  const qkv_prefix_hash root = qkv_prefix_root(tenant, request.model, request.salt, request.salt_bytes);
  qkvi_held_prefix best = qkvi_prefix_find(daemon, &root, ids, (size_t)request.ids.count, NULL, NULL);
  count_match(daemon, request.ids.count, best.tokens);
  free(ids);
  reply(call, root, &best);
  if (best.session != NULL) qkv_session_unref(&best.session);
}

static void on_match(qkv_rpc_call *call, qkv_bytes message) {
  match_call *match = calloc(1, sizeof *match);
  if (match == NULL) abort();
  *match = (match_call){.call = call, .message = message};
  qkv_rpc_set_state(call, match);
  qkvi_job_submit(call, QKVI_WAIT_LAYERS, match_job, match);
}

const qkv_rpc_method qkvi_prefixes_methods[] = {
    {.path = "/qkv.v1.KvCache/Match", .message = on_match, .destroy = free}, {0}};
