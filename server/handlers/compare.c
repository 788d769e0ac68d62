// Admin.Compare: codecs compared on a session's own rows. Each codec is a separate job of bulk work, so that other
// jobs run in between; one call at a time, so that there is one sample.
#include <stdatomic.h>
#include <stdlib.h>

#include "engine/cache/compare.h"
#include "qkv/v1/admin.pb-c.h"
#include "server/handlers/control.h"
#include "server/handlers/handlers.h"
#include "server/handlers/jobs.h"

typedef struct comparison_call {
  Qkv__V1__CompareRequest *request;
  qkv_daemon *daemon;
  qkv_comparer *comparer;  // NULL before the first job
  bool running;            // this is the one call
} comparison_call;

static void reply(qkv_rpc_call *call, const qkv_comparison *found) {
  Qkv__V1__CompareResponse response = QKV__V1__COMPARE_RESPONSE__INIT;
  Qkv__V1__ComparedCodec rows[QKV_COMPARE_ROWS_MAX], *pointers[QKV_COMPARE_ROWS_MAX];
  for (size_t i = 0; i < found->count; i++) {
    const qkv_compared *from = &found->rows[i];
    qkv__v1__compared_codec__init(&rows[i]);
    rows[i].codec = (char *)from->codec->name;
    rows[i].bits = from->bits;
    rows[i].calibrated = from->calibrated;
    rows[i].bytes_per_token = from->bytes;
    rows[i].bits_per_coordinate = from->coordinate;
    rows[i].attention_error = from->error;
    pointers[i] = &rows[i];
  }
  response.layers = found->layers;
  response.tokens = found->tokens;
  response.tokens_exact = found->exact;
  response.n_codecs = found->count;
  response.codecs = pointers;
  qkvi_control_reply(call, &response.base);
}

static qkv_status begin(qkv_rpc_call *call, comparison_call *state, qkv_error *error) {
  qkv_session *session = NULL;
  QKV_TRY(qkvi_request_layers(call, state->request->session, &session, error));
  qkv_status status = QKV_OK;
  bool idle = false;
  state->running = atomic_compare_exchange_strong(&state->daemon->comparing, &idle, true);
  if (state->running) {
    status = qkv_comparer_create(session, &state->comparer, error);
  } else {
    status = qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "another comparison runs; ask again when it has ended");
  }
  qkv_session_unref(&session);
  return status;
}

static void compare_job(void *context) {
  qkv_rpc_call *call = context;
  comparison_call *state = qkv_rpc_state(call);
  qkv_error error = {0};
  if (!qkvi_job_wanted(call)) return;
  if (state->comparer == NULL && begin(call, state, &error) != QKV_OK) return qkvi_control_fail(call, &error);
  if (!qkv_comparer_step(state->comparer)) {
    qkv_metric_add(&state->daemon->metrics[QKV_METRIC_COMPARISONS], 1);
    return reply(call, qkv_comparer_found(state->comparer));
  }
  if (qkvi_job_try(call, QKV_WORK_BULK, compare_job, call, &error) != QKV_OK) qkvi_control_fail(call, &error);
}

static void on_compare(qkv_rpc_call *call, qkv_bytes message) {
  qkv_error error = {0};
  Qkv__V1__CompareRequest *request = qkvi_control_unpack_here(message, &qkv__v1__compare_request__descriptor, &error);
  if (request == NULL) return qkvi_control_fail(call, &error);
  comparison_call *state = calloc(1, sizeof *state);
  if (state == NULL) abort();
  *state = (comparison_call){.request = request, .daemon = qkv_rpc_context(call)};
  qkv_rpc_set_state(call, state);
  const qkv_work first = qkvi_work_of(qkvi_session_waits(call), true);
  if (qkvi_job_try(call, first, compare_job, call, &error) != QKV_OK) qkvi_control_fail(call, &error);
}

static void destroy(void *context) {
  comparison_call *state = context;
  if (state == NULL) return;
  qkv_comparer_destroy(&state->comparer);
  if (state->running) atomic_store(&state->daemon->comparing, false);
  qkvi_control_free(state->request);
  free(state);
}

const qkv_rpc_method qkvi_compare_methods[] = {
    {.path = "/qkv.v1.Admin/Compare", .message = on_compare, .destroy = destroy}, {0}};
