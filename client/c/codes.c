#include "client/c/codes.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/c/message.h"
#include "proto/parameters.h"

// Codes that a client keeps: a session has one for each calibration that its pages are coded with.
enum { CODES_MAX = 8 };

typedef struct kept_code {
  uint8_t *key;  // the model, the session's policy and purpose, packed
  size_t key_bytes;
  const qkv_calibration *calibration;  // NULL: data-free
  const qkv_page_code *code;
} kept_code;

struct qkvi_kept_codes {
  size_t count;
  kept_code rows[CODES_MAX];  // the one used last is the last
};

// ---- Messages as the engine's structs ----

void qkvi_policy_of_message(const Qkv__V1__CodecPolicy *from, qkv_policy *to) {
  *to = QKV_POLICY_UNSET;
  if (from == NULL) return;
  to->codec = qkv_codec_by_name(from->codec);
  to->codec_v = from->codec_v[0] == '\0' ? NULL : qkv_codec_by_name(from->codec_v);
  const char *of;
  const qkv_parameter *parameter;
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    const qkv_codec *codec = qkv_policy_codec(to, part);
    for (size_t i = 0; (parameter = qkv_codec_parameter(codec, i, &of)) != NULL; i++) {
      const uint32_t value = qkv_parameters_read(&from->base, of, parameter->name);
      to->parameters[part][i] = value == parameter->fallback ? 0 : value;
    }
  }
  to->bits_k = from->bits_k;
  to->bits_v = from->bits_v;
  if (from->recent_window_set_case == QKV__V1__CODEC_POLICY__RECENT_WINDOW_SET_RECENT_WINDOW)
    to->recent_window = from->recent_window;
  if (from->sink_tokens_set_case == QKV__V1__CODEC_POLICY__SINK_TOKENS_SET_SINK_TOKENS)
    to->sink_tokens = from->sink_tokens;
  to->gqa_said = from->gqa_compensation_set_case == QKV__V1__CODEC_POLICY__GQA_COMPENSATION_SET_GQA_COMPENSATION;
  to->gqa_compensation = to->gqa_said && from->gqa_compensation;
  to->anchor_said = qkv_anchor_parse(from->anchor, &to->anchor.kind);
  to->anchor.every = from->anchor_every;
  to->anchor.threshold = (float)from->anchor_threshold;
  to->low_rank_said = qkv_low_rank_parse(from->low_rank, &to->low_rank.mode);
  to->low_rank.rank = (uint8_t)(from->rank <= QKV_RANK_MAX ? from->rank : 0);
}

qkv_rope qkvi_rope_of_message(const Qkv__V1__Rope *from) {
  if (from == NULL || from->theta == 0) return (qkv_rope){0};
  return (qkv_rope){.theta = from->theta,
                    .width = from->width,
                    .interleaved = from->pairing == QKV__V1__ROPE__PAIRING__PAIRING_INTERLEAVED,
                    .scaling = (qkv_rope_scaling)from->scaling,
                    .factor = from->factor,
                    .original_max_position = from->original_max_position,
                    .low_freq_factor = from->low_freq_factor,
                    .high_freq_factor = from->high_freq_factor,
                    .beta_fast = from->beta_fast,
                    .beta_slow = from->beta_slow,
                    .attention_factor = from->attention_factor};
}

// The caller frees model->overrides, whatever comes back.
static qkv_status read_model(const Qkv__V1__Model *from, qkv_model *to, qkv_error *error) {
  *to = (qkv_model){.layers = from->layers,
                    .kv_heads = from->kv_heads,
                    .q_heads = from->q_heads,
                    .key_dim = from->key_dim,
                    .value_dim = from->value_dim,
                    .dtype = (qkv_dtype)from->dtype,
                    .rope = qkvi_rope_of_message(from->rope),
                    .scale = from->scale,
                    .sliding_window = from->sliding_window,
                    .soft_cap = from->soft_cap};
  (void)snprintf(to->name, sizeof to->name, "%s", from->name);
  qkvi_policy_of_message(from->policy, &to->policy);
  to->overrides = calloc(from->n_overrides + 1, sizeof *to->overrides);
  assert(to->overrides != NULL);
  for (size_t i = 0; i < from->n_overrides; i++) {
    const Qkv__V1__LayerOverride *override = from->overrides[i];
    to->overrides[to->override_count++] = (qkv_layer_override){
        .layer = override->layer, .sliding_window = override->sliding_window, .soft_cap = override->soft_cap};
    qkvi_policy_of_message(override->policy, &to->overrides[i].policy);
  }
  if (qkv_dtype_size(to->dtype) == 0)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "dtype is %d, known are 1 to 3", (int)to->dtype);
  return qkv_model_resolve(to, error);
}

// ---- Sessions ----

qkv_code qkvi_coded_session_get(qkv_client *client, const char *session, qkvi_coded_session *out,
                                qkv_call_error *error) {
  Qkv__V1__GetSessionRequest request = QKV__V1__GET_SESSION_REQUEST__INIT;
  Qkv__V1__GetModelRequest of_model = QKV__V1__GET_MODEL_REQUEST__INIT;
  ProtobufCMessage *answer = NULL;
  *out = (qkvi_coded_session){0};
  request.session = (char *)(uintptr_t)session;
  qkv_code code = qkv_client_call_message(client, "/qkv.v1.KvCache/GetSession", &request.base,
                                          &qkv__v1__session_info__descriptor, &answer, error);
  if (code != QKV_OK) return code;
  out->info = (Qkv__V1__SessionInfo *)answer;
  of_model.name = out->info->model;
  code = qkv_client_call_message(client, "/qkv.v1.KvCache/GetModel", &of_model.base,
                                 &qkv__v1__get_model_response__descriptor, &answer, error);
  out->model = (Qkv__V1__GetModelResponse *)answer;
  if (code == QKV_OK && (out->model->model == NULL || out->info->policy == NULL))
    code = qkvi_fail(error, QKV_INTERNAL, "the daemon does not describe model %s", out->info->model);
  if (code != QKV_OK) qkvi_coded_session_free(out);
  return code;
}

void qkvi_coded_session_free(qkvi_coded_session *session) {
  if (session->info != NULL) qkv__v1__session_info__free_unpacked(session->info, NULL);
  if (session->model != NULL) qkv__v1__get_model_response__free_unpacked(session->model, NULL);
  *session = (qkvi_coded_session){0};
}

// ---- Calibrations ----

typedef struct arriving {
  uint8_t *bytes;
  size_t count, capacity;
} arriving;

static bool take_bytes(void *context, const void *data, size_t bytes) {
  arriving *all = context;
  if (bytes > QKV_CALIBRATION_BYTES_MAX - all->count) return false;
  if (all->count + bytes > all->capacity) {
    all->capacity = 2 * (all->count + bytes);
    all->bytes = realloc(all->bytes, all->capacity);
    assert(all->bytes != NULL);
  }
  memcpy(all->bytes + all->count, data, bytes);
  all->count += bytes;
  return true;
}

static qkv_code get_calibration(qkv_client *client, const char *model, uint32_t version,
                                const qkv_calibration **calibration, qkv_call_error *error) {
  arriving all = {0};
  qkv_error reason = {0};
  qkv_calibration *read = NULL;
  qkv_code code = qkv_client_get_calibration_version(client, model, version, take_bytes, &all, error);
  if (code == QKV_OK && qkv_calibration_read(all.bytes, all.count, &read, &reason) != QKV_OK)
    code = qkvi_fail(error, (qkv_code)reason.status, "calibration %08" PRIx32 " of model %s: %s", version, model,
                     reason.text);
  free(all.bytes);
  *calibration = read;
  return code;
}

// ---- Codes ----

static uint32_t version_of(const kept_code *row) {
  return row->calibration == NULL ? 0 : qkv_calibration_version(row->calibration);
}

static uint64_t hash_of(const kept_code *row) {
  return row->calibration == NULL ? 0 : qkv_calibration_hash(row->calibration);
}

static void forget(kept_code *row) {
  qkv_page_code_unref(&row->code);
  qkv_calibration_unref(&row->calibration);
  free(row->key);
}

void qkvi_codes_free(qkv_client *client) {
  for (size_t i = 0; client->codes != NULL && i < client->codes->count; i++) forget(&client->codes->rows[i]);
  free(client->codes);
  client->codes = NULL;
}

static void make_key(const qkvi_coded_session *session, kept_code *row) {
  const size_t model = qkv__v1__model__get_packed_size(session->model->model);
  const size_t policy = qkv__v1__codec_policy__get_packed_size(session->info->policy);
  row->key_bytes = model + policy + 1;
  row->key = malloc(row->key_bytes);
  assert(row->key != NULL);
  (void)qkv__v1__model__pack(session->model->model, row->key);
  (void)qkv__v1__codec_policy__pack(session->info->policy, row->key + model);
  row->key[model + policy] = session->info->purpose == QKV__V1__PURPOSE__PURPOSE_FETCH;
}

// The last row gets it, where it is kept.
static bool find_kept(qkvi_kept_codes *codes, const kept_code *wanted, uint32_t version, uint64_t hash) {
  for (size_t i = 0; i < codes->count; i++) {
    kept_code row = codes->rows[i];
    if (row.key_bytes != wanted->key_bytes || memcmp(row.key, wanted->key, row.key_bytes) != 0 ||
        version_of(&row) != version || (hash != 0 && hash_of(&row) != hash))
      continue;
    for (; i + 1 < codes->count; i++) codes->rows[i] = codes->rows[i + 1];
    codes->rows[i] = row;
    return true;
  }
  return false;
}

// A calibration that another code is made of.
static const qkv_calibration *shared_calibration(const qkvi_kept_codes *codes, uint32_t version, uint64_t hash) {
  for (size_t i = 0; i < codes->count; i++) {
    if (hash != 0 && version_of(&codes->rows[i]) == version && hash_of(&codes->rows[i]) == hash)
      return qkv_calibration_ref(codes->rows[i].calibration);
  }
  return NULL;
}

static qkv_code make_code(const qkvi_coded_session *session, kept_code *row, qkv_call_error *error) {
  qkv_error reason = {0};
  qkv_model model;
  qkv_policy policy;
  const qkv_purpose purpose =
      session->info->purpose == QKV__V1__PURPOSE__PURPOSE_FETCH ? QKV_PURPOSE_FETCH : QKV_PURPOSE_ATTEND;
  qkvi_policy_of_message(session->info->policy, &policy);
  qkv_status status = read_model(session->model->model, &model, &reason);
  if (status == QKV_OK)
    status = qkv_page_code_create(&model, &policy, purpose, row->calibration, &row->code, &reason);
  free(model.overrides);
  if (status == QKV_OK) return QKV_OK;
  return qkvi_fail(error, QKV_INTERNAL, "the daemon's session %s cannot be decoded here: %s", session->info->session,
                   reason.text);
}

static qkv_code make_row(qkv_client *client, const qkvi_coded_session *session, uint32_t version, uint64_t hash,
                         kept_code *row, qkv_call_error *error) {
  const char *model = session->info->model;
  if (version != 0) row->calibration = shared_calibration(client->codes, version, hash);
  qkv_code code = QKV_OK;
  if (version != 0 && row->calibration == NULL)
    code = get_calibration(client, model, version, &row->calibration, error);
  if (code == QKV_OK && hash != 0 && hash_of(row) != hash)
    code = qkvi_fail(error, QKV_DATA_LOSS,
                     "calibration %08" PRIx32 " of model %s has other content than its pages say", version, model);
  return code == QKV_OK ? make_code(session, row, error) : code;
}

qkv_code qkvi_code_find(qkv_client *client, const qkvi_coded_session *session, uint32_t version, uint64_t hash,
                        const qkv_page_code **code, uint64_t *found_hash, qkv_call_error *error) {
  kept_code row = {0};
  if (client->codes == NULL) client->codes = calloc(1, sizeof *client->codes);
  assert(client->codes != NULL);
  qkvi_kept_codes *codes = client->codes;
  make_key(session, &row);
  if (find_kept(codes, &row, version, hash)) {
    forget(&row);
  } else {
    const qkv_code failed = make_row(client, session, version, hash, &row, error);
    if (failed != QKV_OK) {
      forget(&row);
      return failed;
    }
    if (codes->count == CODES_MAX) {
      forget(&codes->rows[0]);
      for (size_t i = 1; i < CODES_MAX; i++) codes->rows[i - 1] = codes->rows[i];
      codes->count--;
    }
    codes->rows[codes->count++] = row;
  }
  *code = codes->rows[codes->count - 1].code;
  if (found_hash != NULL) *found_hash = hash_of(&codes->rows[codes->count - 1]);
  return QKV_OK;
}
