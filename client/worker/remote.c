#include "client/worker/remote.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

struct qkvi_remote {
  qkvi_kv kv;
  qkv_client *client;
  const qkvi_lm *lm;
  char session[129];
  qkv_client_attend_options options;
  qkv_decode *stream;  // opened by the first step
  qkvi_samples *attend_us;
};

qkv_status qkvi_remote_failed(const qkv_call_error *call, qkv_error *error) {
  return qkv_fail(error, (qkv_status)call->code, "%s", call->text);
}

void qkvi_remote_name(const char *program, char name[QKVI_REMOTE_NAME_MAX]) {
  uint64_t random = 0;
  if (getrandom(&random, sizeof random, 0) != (ssize_t)sizeof random) abort();
  snprintf(name, QKVI_REMOTE_NAME_MAX, "%s-%ld-%016" PRIx64, program, (long)getpid(), random);
}

static qkv_client_tensor tensor_of(const float *data, int64_t tokens, int64_t heads, int64_t dim) {
  return (qkv_client_tensor){.dtype = QKV_CLIENT_FP32,
                             .rank = 3,
                             .dims = {tokens, heads, dim},
                             .data = data,
                             .bytes = (size_t)(tokens * heads * dim) * sizeof(float)};
}

static qkv_client_item item_of(const qkvi_remote *remote, const qkvi_kv_rows *rows, bool append, bool attend) {
  const qkvi_lm *lm = remote->lm;
  qkv_client_item item = {
      .session = remote->session, .layer = (uint32_t)rows->layer, .position = (uint64_t)rows->position};
  if (append) {
    item.k = tensor_of(rows->k, rows->tokens, lm->kv_heads, lm->head_dim);
    item.v = tensor_of(rows->v, rows->tokens, lm->kv_heads, lm->head_dim);
  }
  if (attend) {
    item.q = tensor_of(rows->q, rows->tokens, lm->q_heads, lm->head_dim);
    item.options = &remote->options;
  }
  return item;
}

// Copies an item's answer and gives its memory back. `lse` may be NULL.
static qkv_status take_result(const qkvi_remote *remote, const qkvi_kv_rows *rows, qkv_client_result *result,
                              float *out, float *lse, qkv_error *error) {
  size_t heads = (size_t)(rows->tokens * remote->lm->q_heads);
  size_t values = heads * (size_t)remote->lm->head_dim;
  qkv_status status = QKV_OK;
  if (result->code != 0) {
    status = qkv_fail(error, (qkv_status)result->code, "%s", result->text);
  } else if (result->out_count != values || result->lse_count != heads) {
    status = qkv_fail(error, QKV_INTERNAL, "the daemon answered %zu values and %zu logs where %zu and %zu are due",
                      result->out_count, result->lse_count, values, heads);
  } else {
    memcpy(out, result->out, values * sizeof(float));
    if (lse != NULL) memcpy(lse, result->lse, heads * sizeof(float));
  }
  qkv_client_results_free(result, 1);
  return status;
}

static void measured(qkvi_remote *remote, double begin_us) {
  if (remote->attend_us != NULL) qkvi_samples_add(remote->attend_us, qkvi_now_us() - begin_us);
}

static qkv_status step(qkvi_kv *kv, const qkvi_kv_rows *rows, float *out, qkv_error *error) {
  qkvi_remote *remote = (qkvi_remote *)kv;
  qkv_call_error call = {0};
  if (remote->stream == NULL && qkv_decode_open(remote->client, &remote->stream, &call) != 0) {
    return qkvi_remote_failed(&call, error);
  }
  qkv_client_item item = item_of(remote, rows, true, true);
  qkv_client_result result = {0};
  double begin_us = qkvi_now_us();
  if (qkv_decode_step(remote->stream, &item, 1, &result, &call) != 0) return qkvi_remote_failed(&call, error);
  measured(remote, begin_us);
  return take_result(remote, rows, &result, out, NULL, error);
}

static qkv_status register_model(qkv_client *client, const qkvi_lm *lm, const qkvi_remote_options *options,
                                 qkv_error *error) {
  const qkv_client_model model = {.name = lm->name,
                                  .layers = (uint32_t)lm->layers,
                                  .kv_heads = (uint32_t)lm->kv_heads,
                                  .q_heads = (uint32_t)lm->q_heads,
                                  .key_dim = (uint32_t)lm->head_dim,
                                  .value_dim = (uint32_t)lm->head_dim,
                                  .dtype = QKV_CLIENT_FP16,
                                  .rope = {.theta = lm->rope_theta},
                                  .calibration = options->calibration,
                                  .calibration_bytes = options->calibration_bytes,
                                  .calibration_trusted = true};  // it is what is to be measured
  qkv_call_error call = {0};
  if (qkv_client_register_model(client, &model, &call) != 0) return qkvi_remote_failed(&call, error);
  return QKV_OK;
}

static qkv_status open_session(qkv_client *client, const qkvi_lm *lm, const qkvi_remote_options *options,
                               qkv_error *error) {
  const qkv_client_policy policy = {.codec = options->codec,
                                    .codec_v = options->codec_v,
                                    .bits_k = options->bits_k,
                                    .bits_v = options->bits_v,
                                    .recent_window = options->recent_window,
                                    .anchor = options->anchor};
  const qkv_session_options session = {.session = options->session,
                                       .model = lm->name,
                                       .purpose = options->purpose,
                                       .policy = &policy,
                                       .max_attention_error = options->max_attention_error,
                                       .durability = options->durability};
  qkv_call_error call = {0};
  if (qkv_client_open_session(client, &session, &call) != 0) return qkvi_remote_failed(&call, error);
  return QKV_OK;
}

qkv_status qkvi_remote_open(qkv_client *client, const qkvi_lm *lm, const qkvi_remote_options *options,
                            qkvi_remote **remote, qkv_error *error) {
  *remote = NULL;
  if (strlen(options->session) >= sizeof((*remote)->session)) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "the session's name is longer than %zu bytes",
                    sizeof((*remote)->session) - 1);
  }
  QKV_TRY(register_model(client, lm, options, error));
  QKV_TRY(open_session(client, lm, options, error));
  qkvi_remote *opened = calloc(1, sizeof(*opened));
  if (opened == NULL) abort();
  opened->kv.step = step;
  opened->client = client;
  opened->lm = lm;
  opened->options.precision = options->precision;
  memcpy(opened->session, options->session, strlen(options->session) + 1);
  *remote = opened;
  return QKV_OK;
}

qkv_status qkvi_remote_close(qkvi_remote **remote, bool keep, qkv_error *error) {
  if (*remote == NULL) return QKV_OK;
  qkvi_remote *closed = *remote;
  *remote = NULL;
  qkv_status status = QKV_OK;
  qkv_call_error call = {0};
  if (closed->stream != NULL && qkv_decode_close(&closed->stream, &call) != 0) {
    status = qkvi_remote_failed(&call, error);
  }
  if (!keep && qkv_client_close_session(closed->client, closed->session, NULL, &call) != 0 && status == QKV_OK) {
    status = qkvi_remote_failed(&call, error);
  }
  free(closed);
  return status;
}

qkvi_kv *qkvi_remote_kv(qkvi_remote *remote) {
  return &remote->kv;
}

qkv_status qkvi_remote_append(qkvi_remote *remote, const qkvi_kv_rows *rows, qkv_error *error) {
  qkv_client_item item = item_of(remote, rows, true, false);
  qkv_call_error call = {0};
  if (qkv_client_append(remote->client, &item, 1, NULL, &call) != 0) return qkvi_remote_failed(&call, error);
  return QKV_OK;
}

qkv_status qkvi_remote_attend(qkvi_remote *remote, const qkvi_kv_rows *rows, float *out, float *lse,
                              qkv_error *error) {
  qkv_client_item item = item_of(remote, rows, false, true);
  qkv_client_result result = {0};
  qkv_call_error call = {0};
  double begin_us = qkvi_now_us();
  if (qkv_client_attend(remote->client, &item, 1, &result, &call) != 0) return qkvi_remote_failed(&call, error);
  measured(remote, begin_us);
  return take_result(remote, rows, &result, out, lse, error);
}

// Where fetched rows are compared.
typedef struct comparison {
  const qkvi_kv_rows *rows;
  int64_t width;  // of a token's rows
  int64_t tokens;
  double *error, *square;
} comparison;

static void compare_part(const comparison *to, int part, const float *rows, const qkv_client_rows *fetched) {
  const qkv_client_tensor *tensor = part == 0 ? &fetched->k : &fetched->v;
  const int64_t count = tensor->dims[0] * to->width;
  const float *exact = rows + ((int64_t)fetched->position - to->rows->position) * to->width;
  const uint8_t *at = tensor->data;
  for (int64_t i = 0; i < count; i++) {
    float coded;
    memcpy(&coded, at + (size_t)i * sizeof coded, sizeof coded);
    const double difference = (double)exact[i] - (double)coded;
    to->error[part] += difference * difference;
    to->square[part] += (double)exact[i] * (double)exact[i];
  }
}

static bool compare_rows(void *context, const qkv_client_rows *fetched) {
  comparison *to = context;
  const int64_t tokens = fetched->k.dims[0], end = (int64_t)fetched->position + tokens;
  if ((int64_t)fetched->position < to->rows->position || end > to->rows->position + to->rows->tokens ||
      fetched->v.dims[0] != tokens) {
    return false;
  }
  compare_part(to, 0, to->rows->k, fetched);
  compare_part(to, 1, to->rows->v, fetched);
  to->tokens += tokens;
  return true;
}

qkv_status qkvi_remote_compare(qkvi_remote *remote, const qkvi_kv_rows *rows, double error[2], double square[2],
                               qkv_error *why) {
  const uint32_t layer = (uint32_t)rows->layer;
  const qkv_client_fetch request = {.session = remote->session,
                                    .layers = &layer,
                                    .layer_count = 1,
                                    .begin = (uint64_t)rows->position,
                                    .end = (uint64_t)(rows->position + rows->tokens),
                                    .dtype = QKV_CLIENT_FP32};
  comparison to = {
      .rows = rows, .width = remote->lm->kv_heads * remote->lm->head_dim, .error = error, .square = square};
  qkv_call_error call = {0};
  if (qkv_client_fetch_rows(remote->client, &request, compare_rows, &to, &call) != 0) {
    return qkvi_remote_failed(&call, why);
  }
  if (to.tokens == rows->tokens) return QKV_OK;
  return qkv_fail(why, QKV_INTERNAL, "the daemon sent %" PRId64 " tokens where %" PRId64 " are due", to.tokens,
                  rows->tokens);
}

qkv_status qkvi_remote_demote(qkvi_remote *remote, double bits, bool even, qkv_error *error) {
  const qkv_client_scope all = {.session = remote->session};
  qkv_call_error call = {0};
  if (qkv_client_demote(remote->client, &all, bits, even, NULL, &call) == 0) return QKV_OK;
  return qkvi_remote_failed(&call, error);
}

qkv_status qkvi_remote_info(qkvi_remote *remote, qkv_client_session_info *info, qkv_error *error) {
  qkv_call_error call = {0};
  if (qkv_client_get_session(remote->client, remote->session, info, &call) != 0) {
    return qkvi_remote_failed(&call, error);
  }
  qkv_free(info->lengths);
  info->lengths = info->durable = NULL;
  return QKV_OK;
}

void qkvi_remote_measure(qkvi_remote *remote, qkvi_samples *attend_us) {
  remote->attend_us = attend_us;
}
