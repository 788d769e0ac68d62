#include "tests/server/kv.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "qkv/v1/admin.pb-c.h"

static const size_t part_heads[] = {KV_HEADS, KV_HEADS, KV_Q_HEADS};
static const size_t part_dim[] = {KV_KEY_DIM, KV_VALUE_DIM, KV_KEY_DIM};

// ---- A daemon and a client ----

void kv_start(const char *const *arguments, fixture_daemon **daemon, fixture_client **client) {
  *daemon = fixture_start(arguments);
  *client = fixture_connect((*daemon)->unix_address);
  kv_register(*client);
}

void kv_stop(fixture_daemon **daemon, fixture_client **client) {
  fixture_disconnect(client);
  assert_int_equal(fixture_stop(daemon, SIGTERM, 30000), 0);
}

void kv_wait_idle(fixture_client *client) {
  int64_t until = fixture_now_ms() + FIXTURE_PATIENCE_MS;
  while (kv_metric(client, "qkvd_calls_running") > 1) {
    assert_true(fixture_now_ms() < until);
    fixture_sleep_ms(5);
  }
}

// ---- Calls ----

fixture_result kv_call(fixture_client *client, const char *method, const ProtobufCMessage *request) {
  size_t length = protobuf_c_message_get_packed_size(request);
  uint8_t *bytes = malloc(length + 1);
  assert_non_null(bytes);
  protobuf_c_message_pack(request, bytes);
  fixture_result result = fixture_call(client, method, bytes, length, FIXTURE_PATIENCE_MS);
  free(bytes);
  return result;
}

static void expect_ok(fixture_client *client, const char *method, const ProtobufCMessage *request) {
  fixture_result result = kv_call(client, method, request);
  assert_string_equal(result.text, "");
  assert_int_equal(result.status, QKV_OK);
  fixture_free(&result);
}

void kv_register(fixture_client *client) {
  Qkv__V1__Rope rope = QKV__V1__ROPE__INIT;
  rope.theta = 10000;
  Qkv__V1__CodecPolicy policy = QKV__V1__CODEC_POLICY__INIT;
  policy.recent_window_set_case = QKV__V1__CODEC_POLICY__RECENT_WINDOW_SET_RECENT_WINDOW;
  policy.recent_window = KV_WINDOW;
  Qkv__V1__Model model = QKV__V1__MODEL__INIT;
  model.name = (char *)"m";
  model.layers = KV_LAYERS;
  model.kv_heads = KV_HEADS;
  model.q_heads = KV_Q_HEADS;
  model.key_dim = KV_KEY_DIM;
  model.value_dim = KV_VALUE_DIM;
  model.dtype = QKV__V1__DTYPE__DTYPE_FP16;
  model.rope = &rope;
  model.policy = &policy;
  Qkv__V1__RegisterModelRequest request = QKV__V1__REGISTER_MODEL_REQUEST__INIT;
  request.model = &model;
  expect_ok(client, KV_METHOD("RegisterModel"), &request.base);
}

qkv_model kv_model(void) {
  return (qkv_model){.name = "m",
                     .layers = KV_LAYERS,
                     .kv_heads = KV_HEADS,
                     .q_heads = KV_Q_HEADS,
                     .key_dim = KV_KEY_DIM,
                     .value_dim = KV_VALUE_DIM,
                     .dtype = QKV_FP16,
                     .rope = {.theta = 10000},
                     .policy = {.recent_window = KV_WINDOW, .sink_tokens = -1}};
}

void kv_open(fixture_client *client, const char *session) {
  kv_open_for(client, session, QKV_PURPOSE_ATTEND);
}

void kv_open_for(fixture_client *client, const char *session, qkv_purpose purpose) {
  Qkv__V1__OpenSessionRequest request = QKV__V1__OPEN_SESSION_REQUEST__INIT;
  request.purpose = (Qkv__V1__Purpose)purpose;
  request.session = (char *)session;
  request.model = (char *)"m";
  expect_ok(client, KV_METHOD("OpenSession"), &request.base);
}

void kv_close(fixture_client *client, const char *session) {
  Qkv__V1__CloseSessionRequest request = QKV__V1__CLOSE_SESSION_REQUEST__INIT;
  request.session = (char *)session;
  expect_ok(client, KV_METHOD("CloseSession"), &request.base);
}

Qkv__V1__SessionInfo *kv_info(fixture_client *client, const char *session) {
  Qkv__V1__GetSessionRequest request = QKV__V1__GET_SESSION_REQUEST__INIT;
  request.session = (char *)session;
  fixture_result result = kv_call(client, KV_METHOD("GetSession"), &request.base);
  assert_string_equal(result.text, "");
  Qkv__V1__SessionInfo *info = qkv__v1__session_info__unpack(NULL, result.length, result.data);
  assert_non_null(info);
  fixture_free(&result);
  return info;
}

uint64_t kv_length(fixture_client *client, const char *session, uint32_t layer) {
  Qkv__V1__SessionInfo *info = kv_info(client, session);
  assert_true(layer < info->n_lengths);
  uint64_t length = info->lengths[layer];
  qkv__v1__session_info__free_unpacked(info, NULL);
  return length;
}

double kv_metric(fixture_client *client, const char *name) {
  Qkv__V1__GetStatusRequest request = QKV__V1__GET_STATUS_REQUEST__INIT;
  fixture_result result = kv_call(client, "/qkv.v1.Admin/GetStatus", &request.base);
  Qkv__V1__GetStatusResponse *status = qkv__v1__get_status_response__unpack(NULL, result.length, result.data);
  assert_non_null(status);
  double value = -1;
  for (size_t i = 0; i < status->n_metrics; i++) {
    if (strcmp(status->metrics[i]->name, name) == 0) value = status->metrics[i]->value;
  }
  assert_true(value >= 0);
  qkv__v1__get_status_response__free_unpacked(status, NULL);
  fixture_free(&result);
  return value;
}

// ---- Rows and items ----

static uint32_t mix(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

void kv_rows(uint32_t seed, uint32_t layer, kv_part part, uint64_t position, size_t tokens, float *out) {
  size_t row = part_heads[part] * part_dim[part];
  for (size_t i = 0; i < tokens * row; i++) {
    uint32_t where = (uint32_t)((position + i / row) * row + i % row);
    out[i] = (float)((int)(mix(where ^ mix(seed * 31 + layer * 7 + (uint32_t)part)) % 512) - 256) / 128;
  }
}

static float *make_rows(const kv_item *item, kv_part part, size_t tokens, size_t *bytes) {
  size_t count = tokens * part_heads[part] * part_dim[part];
  float *rows = malloc(count * sizeof *rows + 1);
  assert_non_null(rows);
  kv_rows(item->seed, item->layer, part, item->position, tokens, rows);
  *bytes = count * sizeof *rows;
  return rows;
}

typedef struct message_tensor {
  Qkv__V1__Tensor message;
  int64_t dims[3];
} message_tensor;

static Qkv__V1__Tensor *make_tensor(const kv_item *item, kv_part part, size_t tokens, message_tensor *tensor) {
  size_t bytes = 0;
  qkv__v1__tensor__init(&tensor->message);
  tensor->dims[0] = (int64_t)tokens;
  tensor->dims[1] = (int64_t)part_heads[part];
  tensor->dims[2] = (int64_t)part_dim[part];
  tensor->message.dtype = QKV__V1__DTYPE__DTYPE_FP32;
  tensor->message.n_dims = 3;
  tensor->message.dims = tensor->dims;
  tensor->message.data.data = (uint8_t *)make_rows(item, part, tokens, &bytes);
  tensor->message.data.len = bytes;
  return &tensor->message;
}

size_t kv_pack(const kv_item *items, size_t count, uint64_t id, uint8_t **bytes) {
  Qkv__V1__AttendRequest request = QKV__V1__ATTEND_REQUEST__INIT;
  Qkv__V1__Item *messages = calloc(count + 1, sizeof *messages);
  Qkv__V1__Item **pointers = calloc(count + 1, sizeof *pointers);
  message_tensor(*tensors)[3] = calloc(count + 1, sizeof *tensors);
  assert_true(messages != NULL && pointers != NULL && tensors != NULL);
  for (size_t i = 0; i < count; i++) {
    Qkv__V1__Item *message = pointers[i] = &messages[i];
    qkv__v1__item__init(message);
    message->session = (char *)items[i].session;
    message->layer = items[i].layer;
    message->position = items[i].position;
    message->options = items[i].options;
    if (items[i].before_rope) message->k_rope = message->q_rope = QKV__V1__ROPE_FORM__ROPE_FORM_BEFORE;
    if (items[i].tokens > 0) {
      message->k = make_tensor(&items[i], KV_K, items[i].tokens, &tensors[i][KV_K]);
      message->v = make_tensor(&items[i], KV_V, items[i].tokens, &tensors[i][KV_V]);
    }
    if (items[i].queries > 0) message->q = make_tensor(&items[i], KV_Q, items[i].queries, &tensors[i][KV_Q]);
  }
  request.n_items = count;
  request.items = pointers;
  request.id = id;
  *bytes = malloc(qkv__v1__attend_request__get_packed_size(&request) + 1);
  assert_non_null(*bytes);
  size_t length = qkv__v1__attend_request__pack(&request, *bytes);
  for (size_t i = 0; i < count; i++) {
    for (size_t part = 0; part < 3; part++) free(tensors[i][part].message.data.data);
  }
  free(tensors);
  free(pointers);
  free(messages);
  return length;
}

static void give_text(const fixture_result *result, char *text) {
  if (text != NULL) memcpy(text, result->text, sizeof result->text);
}

int kv_append(fixture_client *client, const kv_item *items, size_t count, char *text) {
  uint8_t *bytes = NULL;
  size_t length = kv_pack(items, count, 0, &bytes);
  fixture_result result = fixture_call(client, KV_METHOD("Append"), bytes, length, FIXTURE_PATIENCE_MS);
  give_text(&result, text);
  free(bytes);
  fixture_free(&result);
  return result.status;
}

int kv_attend(fixture_client *client, const kv_item *items, size_t count, Qkv__V1__AttendResponse **response,
              char *text) {
  uint8_t *bytes = NULL;
  size_t length = kv_pack(items, count, 0, &bytes);
  fixture_result result = fixture_call(client, KV_METHOD("Attend"), bytes, length, FIXTURE_PATIENCE_MS);
  give_text(&result, text);
  *response = NULL;
  if (result.status == QKV_OK) {
    *response = qkv__v1__attend_response__unpack(NULL, result.length, result.data);
    assert_non_null(*response);
    assert_int_equal((*response)->n_results, count);
  }
  free(bytes);
  fixture_free(&result);
  return result.status;
}

// ---- The reference session ----

kv_reference kv_reference_open(const char *session) {
  return kv_reference_open_for(session, QKV_PURPOSE_ATTEND);
}

kv_reference kv_reference_open_for(const char *session, qkv_purpose purpose) {
  const qkv_store_config config = {.memory_budget = (uint64_t)1 << 30,
                                   .models_max = 1,
                                   .sessions_max = 1,
                                   .policy = {.codec = qkv_codec_by_id(QKV_CODEC_EMBEDDED),
                                              .bits_k = 4,
                                              .bits_v = 4,
                                              .recent_window = KV_WINDOW,
                                              .sink_tokens = 4,
                                              .anchor_said = true}};
  kv_reference reference = {.store = qkv_store_create(&config)};
  qkv_model model = kv_model();
  qkv_session_config open = {.purpose = purpose, .tenant = "default", .policy = QKV_POLICY_UNSET};
  open.name = session;
  qkv_error error = {0};
  qkv_status status = qkv_store_register_model(reference.store, &model, NULL, &error);
  if (status == QKV_OK) status = qkv_store_open(reference.store, &open, "m", &reference.session, &error);
  assert_string_equal(error.text, "");
  assert_int_equal(status, QKV_OK);
  return reference;
}

void kv_reference_close(kv_reference *reference) {
  qkv_session_unref(&reference->session);
  qkv_store_destroy(&reference->store);
}

static qkv_tensor dense(kv_part part, size_t tokens, const qkv_segment *segment) {
  const int64_t dims[3] = {(int64_t)tokens, (int64_t)part_heads[part], (int64_t)part_dim[part]};
  return qkv_tensor_dense(QKV_FP32, 3, dims, segment);
}

void kv_reference_append(kv_reference *reference, const kv_item *item) {
  uint64_t appended = 0, length = 0;
  size_t k_bytes = 0, v_bytes = 0;
  float *k = make_rows(item, KV_K, item->tokens, &k_bytes), *v = make_rows(item, KV_V, item->tokens, &v_bytes);
  const qkv_segment k_segment = {.data = (uint8_t *)k, .length = k_bytes},
                    v_segment = {.data = (uint8_t *)v, .length = v_bytes};
  const qkv_tensor k_rows = dense(KV_K, item->tokens, &k_segment), v_rows = dense(KV_V, item->tokens, &v_segment);
  qkv_error error = {0};
  qkv_status status = qkv_session_append(reference->session, item->layer, item->position, &k_rows, &v_rows,
                                         item->before_rope, &appended, &length, &error);
  assert_string_equal(error.text, "");
  assert_int_equal(status, QKV_OK);
  free(k);
  free(v);
}

void kv_reference_attend(kv_reference *reference, const kv_item *item, float *out, float *lse) {
  size_t q_bytes = 0;
  float *q = make_rows(item, KV_Q, item->queries, &q_bytes);
  const qkv_segment segment = {.data = (uint8_t *)q, .length = q_bytes};
  qkv_attend attend = {.position = item->position,
                       .q = dense(KV_Q, item->queries, &segment),
                       .q_before_rope = item->before_rope,
                       .out = out,
                       .lse = lse};
  qkv_error error = {0};
  assert_int_equal(qkv_session_read(reference->session, item->layer, &attend.layer, &error), QKV_OK);
  assert_int_equal(qkv_attend_check(&attend, &error), QKV_OK);
  qkv_attend_run(NULL, &attend, 1);
  qkv_session_read_done(reference->session, item->layer);
  free(q);
}

void kv_same_attend(kv_reference *reference, const kv_item *item, const Qkv__V1__AttendResult *result) {
  size_t lse_count = item->queries * KV_Q_HEADS, out_count = lse_count * KV_VALUE_DIM;
  float *out = malloc(out_count * sizeof *out), *lse = malloc(lse_count * sizeof *lse);
  assert_true(out != NULL && lse != NULL);
  kv_reference_attend(reference, item, out, lse);
  assert_int_equal(result->status->code, QKV_OK);
  assert_int_equal(result->out->n_dims, 3);
  assert_int_equal(result->out->dims[0], item->queries);
  assert_int_equal(result->out->dims[1], KV_Q_HEADS);
  assert_int_equal(result->out->dims[2], KV_VALUE_DIM);
  assert_int_equal(result->lse->n_dims, 2);
  assert_int_equal(result->lse->dtype, QKV__V1__DTYPE__DTYPE_FP32);
  assert_int_equal(result->out->data.len, out_count * sizeof *out);
  assert_int_equal(result->lse->data.len, lse_count * sizeof *lse);
  assert_memory_equal(result->out->data.data, out, out_count * sizeof *out);
  assert_memory_equal(result->lse->data.data, lse, lse_count * sizeof *lse);
  free(out);
  free(lse);
}
