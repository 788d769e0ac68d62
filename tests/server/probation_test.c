// Calibrations on probation, through a daemon: new ones wait for traffic, are accepted or refused, and what a daemon
// learns from unusual traffic does not make attention worse than without calibration.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/codec/calibrate.h"
#include "tests/server/kv.h"

#include <cmocka.h>

enum { TOKENS = 512, PIECE = 128, QUERIES = 16, LEARN = 512 };

// ---- Rows ----

typedef enum traffic { STRUCTURED, OTHERS, SINKS, EQUAL, DEAD } traffic;

// About N(0, 1), of a place.
static float noise(uint64_t place) {
  double sum = 0;
  for (uint64_t i = 0; i < 4; i++) {
    uint64_t z = (place * 4 + i + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    sum += (double)((z ^ (z >> 31)) >> 11) * 0x1p-53;
  }
  return (float)((sum - 2) * sqrt(3));
}

static float value_of(traffic kind, kv_part part, uint64_t seed, uint64_t token, size_t head, size_t i) {
  const uint64_t place = ((seed * 3 + (uint64_t)part) * 100000 + token) * 64 + head * 32;
  const uint64_t own = kind == OTHERS ? 700000000 : 600000000;
  const float small = 0.1f * noise(place + i);
  if (part == KV_Q) return noise(place + i) + (kind == SINKS && i % 4 == 0 ? 1.5f : 0);
  if (kind == EQUAL) return (float)(i % 5) - 1.5f;
  if (kind == DEAD && head == 1) return 0;
  if (kind == SINKS && token == 0) return part == KV_K ? (i % 4 == 0 ? 6.0f : -1.0f) : small;
  return 2 * noise(own + i) + noise(place + 30) * noise(own + 100 + i) + noise(place + 31) * noise(own + 200 + i) +
         small;
}

// Rows of `tokens` from `position` on: [tokens][heads][dim].
static float *make_rows(traffic kind, kv_part part, uint64_t seed, uint64_t position, size_t tokens) {
  const size_t heads = part == KV_Q ? KV_Q_HEADS : KV_HEADS, dim = part == KV_V ? KV_VALUE_DIM : KV_KEY_DIM;
  float *rows = calloc(tokens * heads * dim, sizeof *rows);
  assert_non_null(rows);
  for (size_t at = 0; at < tokens * heads * dim; at++) {
    rows[at] = value_of(kind, part, seed, position + at / dim / heads, at / dim % heads, at % dim);
  }
  return rows;
}

static Qkv__V1__Tensor tensor_of(int64_t dims[3], const float *rows, size_t tokens, kv_part part) {
  Qkv__V1__Tensor tensor = QKV__V1__TENSOR__INIT;
  dims[0] = (int64_t)tokens;
  dims[1] = part == KV_Q ? KV_Q_HEADS : KV_HEADS;
  dims[2] = part == KV_V ? KV_VALUE_DIM : KV_KEY_DIM;
  tensor.dtype = QKV__V1__DTYPE__DTYPE_FP32;
  tensor.n_dims = 3;
  tensor.dims = dims;
  tensor.data.data = (uint8_t *)(uintptr_t)rows;
  tensor.data.len = (size_t)(dims[0] * dims[1] * dims[2]) * sizeof *rows;
  return tensor;
}

// Keys and queries go before RoPE.
static void append(fixture_client *client, const char *session, traffic kind, uint64_t seed, uint64_t position) {
  float *k = make_rows(kind, KV_K, seed, position, PIECE), *v = make_rows(kind, KV_V, seed, position, PIECE);
  int64_t dims[2][3];
  Qkv__V1__Tensor tensors[] = {tensor_of(dims[0], k, PIECE, KV_K), tensor_of(dims[1], v, PIECE, KV_V)};
  for (uint32_t layer = 0; layer < KV_LAYERS; layer++) {
    Qkv__V1__Item item = QKV__V1__ITEM__INIT, *items[] = {&item};
    item.session = (char *)(uintptr_t)session;
    item.layer = layer;
    item.position = position;
    item.k = &tensors[0];
    item.v = &tensors[1];
    item.k_rope = QKV__V1__ROPE_FORM__ROPE_FORM_BEFORE;
    Qkv__V1__AppendRequest request = QKV__V1__APPEND_REQUEST__INIT;
    request.n_items = 1;
    request.items = items;
    fixture_result result = kv_call(client, KV_METHOD("Append"), &request.base);
    assert_string_equal(result.text, "");
    fixture_free(&result);
  }
  free(k);
  free(v);
}

// Of layer 0, at `position`; out [QUERIES][KV_Q_HEADS][KV_VALUE_DIM] where it is not NULL.
static void attend(fixture_client *client, const char *session, traffic kind, uint64_t seed, uint64_t position,
                   float *out) {
  float *q = make_rows(kind, KV_Q, seed, position, QUERIES);
  int64_t dims[3];
  Qkv__V1__Tensor tensor = tensor_of(dims, q, QUERIES, KV_Q);
  for (uint32_t layer = 0; layer < KV_LAYERS; layer++) {
    Qkv__V1__Item item = QKV__V1__ITEM__INIT, *items[] = {&item};
    item.session = (char *)(uintptr_t)session;
    item.layer = layer;
    item.position = position;
    item.q = &tensor;
    item.q_rope = QKV__V1__ROPE_FORM__ROPE_FORM_BEFORE;
    Qkv__V1__AttendRequest request = QKV__V1__ATTEND_REQUEST__INIT;
    request.n_items = 1;
    request.items = items;
    fixture_result result = kv_call(client, KV_METHOD("Attend"), &request.base);
    assert_string_equal(result.text, "");
    Qkv__V1__AttendResponse *response = qkv__v1__attend_response__unpack(NULL, result.length, result.data);
    assert_non_null(response);
    const ProtobufCBinaryData *data = &response->results[0]->out->data;
    assert_int_equal(data->len, (size_t)QUERIES * KV_Q_HEADS * KV_VALUE_DIM * sizeof *out);
    if (out != NULL && layer == 0) memcpy(out, data->data, data->len);
    qkv__v1__attend_response__free_unpacked(response, NULL);
    fixture_free(&result);
  }
  free(q);
}

static void feed(fixture_client *client, const char *session, traffic kind, uint64_t seed) {
  kv_open(client, session);
  for (uint64_t position = 0; position < TOKENS; position += PIECE) {
    append(client, session, kind, seed, position);
    attend(client, session, kind, seed, position + PIECE - QUERIES, NULL);
  }
}

// ---- Calibrations ----

static const qkv_calibration *learn_here(traffic kind) {
  qkv_model model = kv_model();
  assert_int_equal(qkv_model_resolve(&model, NULL), QKV_OK);
  const qkv_calibration_shape shape = qkv_model_calibration_shape(&model);
  qkv_moments *moments = qkv_moments_create(&shape);
  float *k = make_rows(kind, KV_K, 99, 1, TOKENS), *v = make_rows(kind, KV_V, 99, 1, TOKENS);
  for (uint32_t layer = 0; layer < KV_LAYERS; layer++) qkv_moments_add(moments, layer, 1, TOKENS, k, v, true);
  qkv_calibration *made = NULL;
  assert_int_equal(qkv_calibrate(moments, &QKV_CALIBRATE_DEFAULTS, &made, NULL), QKV_OK);
  qkv_moments_destroy(&moments);
  free(k);
  free(v);
  return made;
}

// The model "m" again, with a calibration.
static void bring(fixture_client *client, const qkv_calibration *calibration, bool trusted) {
  Qkv__V1__GetModelRequest ask = QKV__V1__GET_MODEL_REQUEST__INIT;
  ask.name = (char *)"m";
  fixture_result result = kv_call(client, KV_METHOD("GetModel"), &ask.base);
  Qkv__V1__GetModelResponse *known = qkv__v1__get_model_response__unpack(NULL, result.length, result.data);
  assert_non_null(known);
  fixture_free(&result);
  Qkv__V1__RegisterModelRequest request = QKV__V1__REGISTER_MODEL_REQUEST__INIT;
  request.model = known->model;
  known->model->calibration.data =
      (uint8_t *)(uintptr_t)qkv_calibration_bytes(calibration, &known->model->calibration.len);
  known->model->calibration_trusted = trusted;
  result = kv_call(client, KV_METHOD("RegisterModel"), &request.base);
  assert_string_equal(result.text, "");
  fixture_free(&result);
  known->model->calibration = (ProtobufCBinaryData){0};
  qkv__v1__get_model_response__free_unpacked(known, NULL);
}

static Qkv__V1__GetModelResponse *get_model(fixture_client *client) {
  Qkv__V1__GetModelRequest request = QKV__V1__GET_MODEL_REQUEST__INIT;
  request.name = (char *)"m";
  fixture_result result = kv_call(client, KV_METHOD("GetModel"), &request.base);
  Qkv__V1__GetModelResponse *response = qkv__v1__get_model_response__unpack(NULL, result.length, result.data);
  assert_non_null(response);
  assert_non_null(response->calibration);
  fixture_free(&result);
  return response;
}

// Waits until this metric has at least this value.
static void wait_for(fixture_client *client, const char *metric, double value) {
  const int64_t until = fixture_now_ms() + FIXTURE_PATIENCE_MS;
  while (kv_metric(client, metric) < value) {
    if (fixture_now_ms() > until) fail_msg("%s is %g", metric, kv_metric(client, metric));
    fixture_sleep_ms(20);
  }
}

// ---- Brought ----

static void a_good_one_is_used_once_it_was_tried(void **state) {
  (void)state;
  fixture_daemon *daemon;
  fixture_client *client;
  const qkv_calibration *ours = learn_here(STRUCTURED);
  kv_start((const char *[]){"--calibrate-tokens=0", "--bits-k=2", "--bits-v=2", NULL}, &daemon, &client);
  bring(client, ours, false);
  Qkv__V1__GetModelResponse *model = get_model(client);
  assert_int_equal(model->calibration->source, QKV__V1__CALIBRATION_STATE__SOURCE__SOURCE_NONE);
  assert_int_equal(model->calibration->version, 0);
  assert_int_equal(model->calibration->on_trial, qkv_calibration_version(ours));
  qkv__v1__get_model_response__free_unpacked(model, NULL);

  feed(client, "s", STRUCTURED, 1);
  wait_for(client, "qkvd_calibration_gain_thousandths", 1500);
  model = get_model(client);
  const Qkv__V1__CalibrationState *now = model->calibration;
  assert_int_equal(now->source, QKV__V1__CALIBRATION_STATE__SOURCE__SOURCE_REGISTERED);
  assert_int_equal(now->on_trial, 0);
  assert_true(now->tried && !now->trusted && now->since_unix_ms > 0 && now->tokens == TOKENS);
  assert_true(now->attention_error > 0 && now->attention_error < now->attention_error_data_free);
  assert_int_equal(now->parts, 3 * KV_LAYERS * KV_HEADS);
  assert_int_equal(now->refused, 0);
  assert_false(now->archive_refused);
  assert_string_equal(now->rope_doubt, "");
  const uint32_t version = now->version;
  assert_true(version != 0);

  bring(client, ours, false);  // again: nothing changes
  feed(client, "t", STRUCTURED, 2);
  Qkv__V1__SessionInfo *info = kv_info(client, "t");
  assert_int_equal(info->calibration, version);
  assert_true(info->calibration_since_unix_ms == now->since_unix_ms);
  assert_true(info->watched_error > 0 && info->watched_error < info->watched_error_data_free);
  qkv__v1__session_info__free_unpacked(info, NULL);
  qkv__v1__get_model_response__free_unpacked(model, NULL);
  kv_stop(&daemon, &client);
  qkv_calibration_unref(&ours);
}

// The codec has 1.5 bits for 2: it errs more with a calibration than what sessions have without. All else is as
// usual.
static void an_archive_codec_that_is_worse_is_refused_alone(void **state) {
  (void)state;
  fixture_daemon *daemon;
  fixture_client *client;
  const qkv_calibration *ours = learn_here(STRUCTURED);
  kv_start((const char *[]){"--calibrate-tokens=0", "--bits-k=2", "--bits-v=2", "--archive-codec=turboquant-outliers",
                            NULL},
           &daemon, &client);
  bring(client, ours, false);
  feed(client, "s", STRUCTURED, 1);
  wait_for(client, "qkvd_archive_codecs_refused_total", 1);
  Qkv__V1__GetModelResponse *model = get_model(client);
  const Qkv__V1__CalibrationState *now = model->calibration;
  assert_true(now->version != 0 && now->archive_refused && now->refused == 0 && now->tried);
  assert_true(now->attention_error > 0 && now->attention_error < now->attention_error_data_free);
  assert_true(kv_metric(client, "qkvd_calibrations_refused_total") == 0);
  qkv__v1__get_model_response__free_unpacked(model, NULL);
  kv_stop(&daemon, &client);
  qkv_calibration_unref(&ours);
}

static void one_that_does_not_fit_is_refused(void **state) {
  (void)state;
  fixture_daemon *daemon;
  fixture_client *client;
  const qkv_calibration *ours = learn_here(OTHERS);
  kv_start((const char *[]){"--calibrate-tokens=0", "--bits-k=2", "--bits-v=2", NULL}, &daemon, &client);
  bring(client, ours, false);
  feed(client, "s", STRUCTURED, 1);
  wait_for(client, "qkvd_calibrations_refused_total", 1);
  Qkv__V1__GetModelResponse *model = get_model(client);
  assert_int_equal(model->calibration->version, 0);
  assert_int_equal(model->calibration->on_trial, 0);
  assert_int_equal(model->calibration->refused, 1);
  assert_non_null(strstr(model->calibration->refusal, "was refused: layer "));
  qkv__v1__get_model_response__free_unpacked(model, NULL);
  bring(client, ours, false);  // is not tried again
  model = get_model(client);
  assert_int_equal(model->calibration->on_trial, 0);
  qkv__v1__get_model_response__free_unpacked(model, NULL);
  kv_stop(&daemon, &client);
  qkv_calibration_unref(&ours);
}

static void a_trusted_one_is_used_at_once(void **state) {
  (void)state;
  fixture_daemon *daemon;
  fixture_client *client;
  const qkv_calibration *ours = learn_here(OTHERS);
  kv_start((const char *[]){"--calibrate-tokens=0", "--bits-k=2", "--bits-v=2", NULL}, &daemon, &client);
  bring(client, ours, true);
  for (uint64_t seed = 1; seed < 4; seed++) {
    char name[8];
    (void)snprintf(name, sizeof name, "s%d", (int)seed);
    feed(client, name, STRUCTURED, seed);
    Qkv__V1__GetModelResponse *model = get_model(client);
    assert_int_equal(model->calibration->version, qkv_calibration_version(ours));
    assert_true(model->calibration->trusted && !model->calibration->tried);
    qkv__v1__get_model_response__free_unpacked(model, NULL);
  }
  assert_true(kv_metric(client, "qkvd_calibrations_withdrawn_total") == 0);
  kv_stop(&daemon, &client);
  qkv_calibration_unref(&ours);
}

// ---- Learnt ----

// Softmax attention of layer 0's rows, whose keys and queries are rotated here; out as attend's.
static void attend_exactly(traffic kind, uint64_t seed, double *out) {
  qkv_model model = kv_model();
  assert_int_equal(qkv_model_resolve(&model, NULL), QKV_OK);
  float *k = make_rows(kind, KV_K, seed, 0, TOKENS), *v = make_rows(kind, KV_V, seed, 0, TOKENS);
  float *q = make_rows(kind, KV_Q, seed, TOKENS - QUERIES, QUERIES);
  static double weights[TOKENS];
  for (size_t i = 0; i < (size_t)TOKENS * KV_HEADS; i++)
    qkv_rope_forward(&model.rope, k + i * KV_KEY_DIM, i / KV_HEADS);
  for (size_t row = 0; row < (size_t)QUERIES * KV_Q_HEADS; row++) {
    const size_t last = TOKENS - QUERIES + row / KV_Q_HEADS, head = row % KV_Q_HEADS / (KV_Q_HEADS / KV_HEADS);
    float *query = q + row * KV_KEY_DIM;
    double total = 0;
    qkv_rope_forward(&model.rope, query, last);
    for (size_t t = 0; t <= last; t++) {
      double score = 0;
      for (size_t i = 0; i < KV_KEY_DIM; i++)
        score += (double)query[i] * (double)k[(t * KV_HEADS + head) * KV_KEY_DIM + i];
      total += weights[t] = exp(score * model.scale);
    }
    for (size_t i = 0; i < KV_VALUE_DIM; i++) {
      double sum = 0;
      for (size_t t = 0; t <= last; t++) sum += weights[t] * (double)v[(t * KV_HEADS + head) * KV_VALUE_DIM + i];
      out[row * KV_VALUE_DIM + i] = sum / total;
    }
  }
  free(k);
  free(v);
  free(q);
}

static double error_of(fixture_client *client, const char *prefix, traffic kind) {
  static float coded[QUERIES * KV_Q_HEADS * KV_VALUE_DIM];
  static double exact[QUERIES * KV_Q_HEADS * KV_VALUE_DIM];
  double missed = 0, squares = 0;
  for (uint64_t seed = 1000; seed < 1004; seed++) {
    char name[32];
    (void)snprintf(name, sizeof name, "%s%d", prefix, (int)seed);
    kv_open(client, name);
    for (uint64_t position = 0; position < TOKENS; position += PIECE) append(client, name, kind, seed, position);
    attend(client, name, kind, seed, TOKENS - QUERIES, coded);
    attend_exactly(kind, seed, exact);
    for (size_t i = 0; i < sizeof coded / sizeof *coded; i++) {
      missed += ((double)coded[i] - exact[i]) * ((double)coded[i] - exact[i]);
      squares += exact[i] * exact[i];
    }
    kv_close(client, name);
  }
  return sqrt(missed / squares);
}

static void odd_traffic_does_not_make_it_worse(void **state) {
  (void)state;
  static const struct {
    traffic kind;
    const char *name;
  } rows[] = {{STRUCTURED, "structured"}, {SINKS, "sinks"}, {EQUAL, "equal"}, {DEAD, "dead"}};
  fixture_daemon *without;
  fixture_client *client;
  kv_start((const char *[]){"--calibrate-tokens=0", "--bits-k=2", "--bits-v=2", NULL}, &without, &client);
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    fixture_daemon *learns;
    fixture_client *to;
    char tokens[64], name[32];
    (void)snprintf(tokens, sizeof tokens, "--calibrate-tokens=%d", LEARN);
    kv_start((const char *[]){tokens, "--bits-k=2", "--bits-v=2", NULL}, &learns, &to);
    for (uint64_t seed = 1; seed < 4; seed++) {
      (void)snprintf(name, sizeof name, "fed%d", (int)seed);
      feed(to, name, rows[i].kind, seed);
    }
    const int64_t until = fixture_now_ms() + FIXTURE_PATIENCE_MS;
    while (kv_metric(to, "qkvd_calibrations_total") + kv_metric(to, "qkvd_calibrations_refused_total") < 1) {
      if (fixture_now_ms() > until) fail_msg("nothing has been tried");
      fixture_sleep_ms(20);
    }
    feed(to, "more", rows[i].kind, 4);  // of what is in force now
    const double ours = error_of(to, rows[i].name, rows[i].kind),
                 theirs = error_of(client, rows[i].name, rows[i].kind);
    print_message("%s: %.4g, data-free %.4g\n", rows[i].name, ours, theirs);
    if (ours > 1.1 * theirs && ours > 1e-3) fail_msg("%s: %g, data-free %g", rows[i].name, ours, theirs);
    kv_stop(&learns, &to);
  }
  kv_stop(&without, &client);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(a_good_one_is_used_once_it_was_tried),
      cmocka_unit_test(an_archive_codec_that_is_worse_is_refused_alone),
      cmocka_unit_test(one_that_does_not_fit_is_refused),
      cmocka_unit_test(a_trusted_one_is_used_at_once),
      cmocka_unit_test(odd_traffic_does_not_make_it_worse),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
