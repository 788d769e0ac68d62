// Every served method of KvCache (Fetch and the counters: kv_fetch_test.c) against the real daemon, and its numbers
// against the engine in this process.
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/server/kv.h"

#include <cmocka.h>

static fixture_daemon *daemon_process;
static fixture_client *client;

static int start(void **state) {
  (void)state;
  kv_start(NULL, &daemon_process, &client);
  return 0;
}

static int stop(void **state) {
  (void)state;
  kv_stop(&daemon_process, &client);
  return 0;
}

// ---- Models ----

static void models_are_registered_found_and_listed(void **state) {
  (void)state;
  kv_register(client);  // the same again is acknowledged
  Qkv__V1__GetModelRequest get = QKV__V1__GET_MODEL_REQUEST__INIT;
  get.name = (char *)"m";
  kv_open(client, "of-m");
  fixture_result result = kv_call(client, KV_METHOD("GetModel"), &get.base);
  Qkv__V1__GetModelResponse *got = qkv__v1__get_model_response__unpack(NULL, result.length, result.data);
  assert_non_null(got);
  assert_int_equal(got->sessions, 1);
  assert_string_equal(got->model->name, "m");
  assert_int_equal(got->model->value_dim, KV_VALUE_DIM);
  assert_true(got->model->scale == 0.25);  // 1/sqrt(16), filled in
  assert_int_equal(got->model->rope->width, KV_KEY_DIM);
  assert_string_equal(got->model->policy->codec, "embedded");
  assert_true(got->model->policy->bits_k == 4);
  assert_int_equal(got->model->policy->recent_window, KV_WINDOW);
  qkv__v1__get_model_response__free_unpacked(got, NULL);
  fixture_free(&result);
  kv_close(client, "of-m");

  Qkv__V1__ListModelsRequest list = QKV__V1__LIST_MODELS_REQUEST__INIT;
  result = kv_call(client, KV_METHOD("ListModels"), &list.base);
  Qkv__V1__ListModelsResponse *listed = qkv__v1__list_models_response__unpack(NULL, result.length, result.data);
  assert_non_null(listed);
  assert_int_equal(listed->n_models, 1);
  assert_string_equal(listed->models[0]->model->name, "m");
  assert_int_equal(listed->models[0]->sessions, 0);
  qkv__v1__list_models_response__free_unpacked(listed, NULL);
  fixture_free(&result);
}

// ---- Sessions ----

static void a_session_reports_what_it_is(void **state) {
  (void)state;
  Qkv__V1__CodecPolicy policy = QKV__V1__CODEC_POLICY__INIT;
  policy.bits_k = 3;
  Qkv__V1__OpenSessionRequest request = QKV__V1__OPEN_SESSION_REQUEST__INIT;
  fixture_set_tenant(client, "team");
  kv_register(client);
  request.session = (char *)"team/chat:1";
  request.model = (char *)"m";
  request.tenant = (char *)"team";
  request.purpose = QKV__V1__PURPOSE__PURPOSE_FETCH;
  request.policy = &policy;
  request.first_position = 100;
  fixture_result result = kv_call(client, KV_METHOD("OpenSession"), &request.base);
  assert_string_equal(result.text, "");
  Qkv__V1__OpenSessionResponse *opened = qkv__v1__open_session_response__unpack(NULL, result.length, result.data);
  assert_non_null(opened);
  const Qkv__V1__SessionInfo *info = opened->info;
  assert_string_equal(info->session, "team/chat:1");
  assert_string_equal(info->model, "m");
  assert_string_equal(info->tenant, "team");
  assert_string_equal(info->model_tenant, "team");
  assert_int_equal(info->purpose, QKV__V1__PURPOSE__PURPOSE_FETCH);
  assert_int_equal(info->durability, QKV__V1__DURABILITY__DURABILITY_MEMORY);
  assert_true(info->policy->bits_k == 3 && info->policy->bits_v == 4);
  assert_int_equal(info->policy->recent_window, KV_WINDOW);
  assert_int_equal(info->first_position, 100);
  assert_int_equal(info->n_lengths, KV_LAYERS);
  for (size_t i = 0; i < KV_LAYERS; i++) assert_int_equal(info->lengths[i], 100);
  assert_true(info->created_unix_ms > 1600000000000);
  qkv__v1__open_session_response__free_unpacked(opened, NULL);
  fixture_free(&result);

  // 200 tokens in layer 1: the window stays exact, the rest of whole pages is coded.
  const kv_item item = {.session = "team/chat:1", .layer = 1, .position = 100, .tokens = 200, .seed = 1};
  assert_int_equal(kv_append(client, &item, 1, NULL), QKV_OK);
  Qkv__V1__SessionInfo *now = kv_info(client, "team/chat:1");
  const uint64_t coordinates = KV_HEADS * (KV_KEY_DIM + KV_VALUE_DIM);
  assert_int_equal(now->lengths[0], 100);
  assert_int_equal(now->lengths[1], 300);
  assert_int_equal(now->tokens_coded, 128);
  assert_int_equal(now->tokens_exact, 72);
  assert_int_equal(now->bytes_fp16, 200 * coordinates * 2);
  assert_true(now->bytes_coded > 0 && now->bytes_exact >= 72 * coordinates * 2);
  assert_true(now->bits_per_coordinate == 8.0 * (double)now->bytes_coded / (double)(128 * coordinates));
  qkv__v1__session_info__free_unpacked(now, NULL);
  kv_close(client, "team/chat:1");
  fixture_set_tenant(client, NULL);
}

static Qkv__V1__ListSessionsResponse *list_sessions(Qkv__V1__ListSessionsRequest *request) {
  fixture_result result = kv_call(client, KV_METHOD("ListSessions"), &request->base);
  assert_string_equal(result.text, "");
  Qkv__V1__ListSessionsResponse *listed = qkv__v1__list_sessions_response__unpack(NULL, result.length, result.data);
  assert_non_null(listed);
  fixture_free(&result);
  return listed;
}

static void sessions_are_listed_in_pages_by_name(void **state) {
  (void)state;
  char name[32];
  fixture_set_tenant(client, "fifth");
  kv_register(client);
  fixture_set_tenant(client, NULL);
  for (int i = 0; i < 25; i++) {
    (void)snprintf(name, sizeof name, "list/%02d", 24 - i);
    Qkv__V1__OpenSessionRequest open = QKV__V1__OPEN_SESSION_REQUEST__INIT;
    open.session = name;
    open.model = (char *)"m";
    open.tenant = (char *)(i % 5 == 0 ? "fifth" : "");
    fixture_result opened = kv_call(client, KV_METHOD("OpenSession"), &open.base);
    assert_int_equal(opened.status, QKV_OK);
    fixture_free(&opened);
  }
  kv_open(client, "other");

  Qkv__V1__ListSessionsRequest request = QKV__V1__LIST_SESSIONS_REQUEST__INIT;
  char token[32] = "";
  int seen = 0;
  request.prefix = (char *)"list/";
  request.page_size = 10;
  do {
    request.page_token = token;
    Qkv__V1__ListSessionsResponse *page = list_sessions(&request);
    for (size_t i = 0; i < page->n_sessions; i++, seen++) {
      (void)snprintf(name, sizeof name, "list/%02d", seen);
      assert_string_equal(page->sessions[i]->session, name);
      assert_int_equal(page->sessions[i]->n_lengths, 0);
    }
    (void)snprintf(token, sizeof token, "%s", page->next_page_token);
    qkv__v1__list_sessions_response__free_unpacked(page, NULL);
  } while (token[0] != '\0');
  assert_int_equal(seen, 25);

  request.page_token = (char *)"";
  request.page_size = 2;
  request.tenant = (char *)"fifth";
  Qkv__V1__ListSessionsResponse *page = list_sessions(&request);
  assert_int_equal(page->n_sessions, 2);
  assert_string_equal(page->sessions[0]->session, "list/04");
  assert_string_equal(page->sessions[1]->session, "list/09");
  assert_string_equal(page->next_page_token, "list/09");
  qkv__v1__list_sessions_response__free_unpacked(page, NULL);
  request.tenant = (char *)"";
  request.model = (char *)"none";
  page = list_sessions(&request);
  assert_int_equal(page->n_sessions, 0);
  assert_string_equal(page->next_page_token, "");
  qkv__v1__list_sessions_response__free_unpacked(page, NULL);

  for (int i = 0; i < 25; i++) {
    (void)snprintf(name, sizeof name, "list/%02d", i);
    fixture_set_tenant(client, (24 - i) % 5 == 0 ? "fifth" : NULL);
    kv_close(client, name);
  }
  fixture_set_tenant(client, NULL);
  kv_close(client, "other");
}

static void closing_gives_the_memory_back(void **state) {
  (void)state;
  double before = kv_metric(client, "qkvd_kv_bytes");
  kv_open(client, "c");
  const kv_item item = {.session = "c", .tokens = 300, .seed = 2};
  assert_int_equal(kv_append(client, &item, 1, NULL), QKV_OK);
  assert_true(kv_metric(client, "qkvd_kv_bytes") > before);
  Qkv__V1__CloseSessionRequest request = QKV__V1__CLOSE_SESSION_REQUEST__INIT;
  request.session = (char *)"c";
  fixture_result result = kv_call(client, KV_METHOD("CloseSession"), &request.base);
  Qkv__V1__CloseSessionResponse *closed = qkv__v1__close_session_response__unpack(NULL, result.length, result.data);
  assert_non_null(closed);
  assert_true(closed->bytes_freed > 0);
  qkv__v1__close_session_response__free_unpacked(closed, NULL);
  fixture_free(&result);
  assert_true(kv_metric(client, "qkvd_kv_bytes") == before);
}

// ---- Append ----

static void append_streams_and_acknowledges_again(void **state) {
  (void)state;
  kv_open(client, "a");
  for (int round = 0; round < 2; round++) {
    fixture_stream *stream = fixture_open(client, KV_METHOD("Append"), FIXTURE_PATIENCE_MS);
    for (uint64_t message = 0; message < 4; message++) {
      kv_item items[KV_LAYERS];
      for (uint32_t layer = 0; layer < KV_LAYERS; layer++)
        items[layer] = (kv_item){.session = "a", .layer = layer, .position = message * 50, .tokens = 50, .seed = 3};
      uint8_t *bytes = NULL;
      size_t length = kv_pack(items, KV_LAYERS, 0, &bytes);
      assert_true(fixture_send(stream, bytes, length));
      free(bytes);
    }
    fixture_half_close(stream);
    uint8_t *answer = NULL;
    size_t length = 0;
    assert_true(fixture_receive(stream, &answer, &length));
    fixture_result result = fixture_finish(&stream);
    assert_string_equal(result.text, "");
    Qkv__V1__AppendResponse *response = qkv__v1__append_response__unpack(NULL, length, answer);
    assert_non_null(response);
    assert_int_equal(response->items, 4 * KV_LAYERS);
    assert_int_equal(response->tokens, round == 0 ? 200 * KV_LAYERS : 0);  // held already, the second time
    qkv__v1__append_response__free_unpacked(response, NULL);
    free(answer);
    for (uint32_t layer = 0; layer < KV_LAYERS; layer++) assert_int_equal(kv_length(client, "a", layer), 200);
  }
  kv_close(client, "a");
}

// Large enough for the compute pool.
static void a_large_append_is_the_same_as_small_ones(void **state) {
  (void)state;
  kv_open(client, "big");
  kv_reference reference = kv_reference_open("big");
  const kv_item large = {.session = "big", .tokens = 1500, .seed = 4};
  assert_int_equal(kv_append(client, &large, 1, NULL), QKV_OK);
  for (uint64_t at = 0; at < 1500; at += 100) {
    const kv_item small = {.session = "big", .position = at, .tokens = 100, .seed = 4};
    kv_reference_append(&reference, &small);
  }
  const kv_item query = {.session = "big", .position = 1500, .queries = 3, .seed = 5};
  Qkv__V1__AttendResponse *response = NULL;
  assert_int_equal(kv_attend(client, &query, 1, &response, NULL), QKV_OK);
  kv_same_attend(&reference, &query, response->results[0]);
  assert_int_equal(response->results[0]->length, 1500);
  qkv__v1__attend_response__free_unpacked(response, NULL);
  kv_reference_close(&reference);
  kv_close(client, "big");
}

// ---- Attend ----

// Bit for bit, for lengths around the page and the window, one and many queries, inline and on the pool.
static void attend_equals_the_engine(void **state) {
  (void)state;
  const size_t lengths[] = {1, 63, 64, 65, 127, 128, 129, 400};
  kv_open(client, "e");
  kv_reference reference = kv_reference_open("e");
  uint64_t held = 0;
  for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
    const kv_item rows = {.session = "e", .position = held, .tokens = lengths[i] - held, .seed = 6};
    assert_int_equal(kv_append(client, &rows, 1, NULL), QKV_OK);
    kv_reference_append(&reference, &rows);
    held = lengths[i];
    const size_t queries[] = {1, 7, 33};
    for (size_t j = 0; j < 3; j++) {
      const kv_item query = {.session = "e", .position = held, .queries = queries[j], .seed = 7};
      Qkv__V1__AttendResponse *response = NULL;
      assert_int_equal(kv_attend(client, &query, 1, &response, NULL), QKV_OK);
      kv_same_attend(&reference, &query, response->results[0]);
      qkv__v1__attend_response__free_unpacked(response, NULL);
    }
  }
  kv_reference_close(&reference);
  kv_close(client, "e");
}

static void an_empty_layer_gives_zeros_and_minus_infinity(void **state) {
  (void)state;
  kv_open(client, "none");
  const kv_item query = {.session = "none", .queries = 2, .seed = 8};
  Qkv__V1__AttendResponse *response = NULL;
  assert_int_equal(kv_attend(client, &query, 1, &response, NULL), QKV_OK);
  const Qkv__V1__AttendResult *result = response->results[0];
  const float *out = (const float *)(const void *)result->out->data.data;
  for (size_t i = 0; i < result->out->data.len / 4; i++) assert_true(out[i] == 0);
  for (size_t i = 0; i < result->lse->data.len / 4; i++) {
    float lse;
    memcpy(&lse, result->lse->data.data + 4 * i, 4);
    assert_true(lse == -__builtin_inff());
  }
  qkv__v1__attend_response__free_unpacked(response, NULL);
  kv_close(client, "none");
}

// Many items of a batch: several sessions, the same layer twice, rows alone, rows and queries, and bad ones.
static void a_batch_answers_item_by_item(void **state) {
  (void)state;
  kv_open(client, "b1");
  kv_open(client, "b2");
  kv_reference twin1 = kv_reference_open("b1"), twin2 = kv_reference_open("b2");
  const kv_item fill[] = {{.session = "b1", .tokens = 100, .seed = 9}, {.session = "b2", .tokens = 90, .seed = 10}};
  assert_int_equal(kv_append(client, fill, 2, NULL), QKV_OK);
  kv_reference_append(&twin1, &fill[0]);
  kv_reference_append(&twin2, &fill[1]);
  const kv_item items[] = {
      {.session = "b2", .position = 90, .tokens = 2, .queries = 2, .seed = 10},  // rows and queries
      {.session = "b1", .position = 100, .queries = 1, .seed = 11},
      {.session = "nobody", .queries = 1},
      {.session = "b1", .position = 100, .queries = 4, .seed = 12},  // the same layer again
      {.session = "b1", .layer = 2, .tokens = 5, .seed = 13},        // rows alone
      {.session = "b2", .layer = 1, .position = 7, .tokens = 1},     // a gap
      {.session = "b1", .layer = KV_LAYERS, .queries = 1},           // an unknown layer
  };
  Qkv__V1__AttendResponse *response = NULL;
  assert_int_equal(kv_attend(client, items, 7, &response, NULL), QKV_OK);
  kv_reference_append(&twin2, &items[0]);
  kv_same_attend(&twin2, &items[0], response->results[0]);
  assert_int_equal(response->results[0]->length, 92);
  kv_same_attend(&twin1, &items[1], response->results[1]);
  kv_same_attend(&twin1, &items[3], response->results[3]);
  assert_int_equal(response->results[2]->status->code, QKV_NOT_FOUND);
  assert_string_equal(response->results[2]->status->message, "items[2]: no session nobody");
  assert_null(response->results[2]->out);
  assert_int_equal(response->results[4]->status->code, QKV_OK);
  assert_int_equal(response->results[4]->length, 5);
  assert_null(response->results[4]->out);
  assert_int_equal(response->results[5]->status->code, QKV_FAILED_PRECONDITION);
  assert_string_equal(response->results[5]->status->message, "items[5].position is 7, the expected position is 0");
  assert_int_equal(response->results[6]->status->code, QKV_INVALID_ARGUMENT);
  assert_string_equal(response->results[6]->status->message, "items[6].layer is 3, the model m has 3 layers");
  qkv__v1__attend_response__free_unpacked(response, NULL);

  // Where all fail, the call fails as the first.
  const kv_item bad[] = {items[5], items[2]};
  char text[FIXTURE_TEXT_MAX];
  assert_int_equal(kv_attend(client, bad, 2, &response, text), QKV_FAILED_PRECONDITION);
  assert_string_equal(text, "items[0].position is 7, the expected position is 0");
  kv_reference_close(&twin1);
  kv_reference_close(&twin2);
  kv_close(client, "b1");
  kv_close(client, "b2");
}

static void an_item_that_failed_has_no_length(void **state) {
  (void)state;
  kv_open(client, "gap");
  const kv_item items[] = {{.session = "gap", .tokens = 5, .seed = 1},
                           {.session = "gap", .position = 9, .tokens = 1, .seed = 1}};
  Qkv__V1__AttendResponse *response = NULL;
  assert_int_equal(kv_attend(client, items, 2, &response, NULL), QKV_OK);
  assert_int_equal(response->results[0]->length, 5);
  assert_int_equal(response->results[1]->status->code, QKV_FAILED_PRECONDITION);
  assert_int_equal(response->results[1]->length, 0);
  qkv__v1__attend_response__free_unpacked(response, NULL);
  kv_close(client, "gap");
}

static void out_can_be_half(void **state) {
  (void)state;
  kv_open(client, "h");
  const kv_item both = {.session = "h", .tokens = 80, .queries = 5, .seed = 14};
  Qkv__V1__AttendResponse *wide = NULL;
  assert_int_equal(kv_attend(client, &both, 1, &wide, NULL), QKV_OK);
  const Qkv__V1__AttendResult *expected = wide->results[0];
  size_t count = expected->out->data.len / 4;
  for (qkv_dtype dtype = QKV_FP16; dtype <= QKV_BF16; dtype++) {
    const kv_item query = {.session = "h", .queries = 5, .seed = 14};
    uint8_t *bytes = NULL;
    size_t length = kv_pack(&query, 1, 99, &bytes);
    bytes = realloc(bytes, length + 2);
    bytes[length++] = 0x18;  // out_dtype
    bytes[length++] = (uint8_t)dtype;
    fixture_result result = fixture_call(client, KV_METHOD("Attend"), bytes, length, FIXTURE_PATIENCE_MS);
    free(bytes);
    assert_string_equal(result.text, "");
    Qkv__V1__AttendResponse *narrow = qkv__v1__attend_response__unpack(NULL, result.length, result.data);
    assert_non_null(narrow);
    assert_int_equal(narrow->id, 99);
    const Qkv__V1__AttendResult *got = narrow->results[0];
    assert_int_equal(got->out->dtype, dtype);
    assert_int_equal(got->out->data.len, count * 2);
    uint8_t *converted = malloc(count * 2);
    float *out = malloc(count * 4);
    memcpy(out, expected->out->data.data, count * 4);
    qkv_from_float(dtype, out, converted, count);
    assert_memory_equal(got->out->data.data, converted, count * 2);
    assert_memory_equal(got->lse->data.data, expected->lse->data.data, expected->lse->data.len);
    free(out);
    free(converted);
    qkv__v1__attend_response__free_unpacked(narrow, NULL);
    fixture_free(&result);
  }
  qkv__v1__attend_response__free_unpacked(wide, NULL);
  kv_close(client, "h");
}

// 200 steps of a decode loop on one stream, each bit for bit the engine's; a bad step in between does not end it.
static void decode_answers_every_step_in_order(void **state) {
  (void)state;
  kv_open(client, "d");
  kv_reference reference = kv_reference_open("d");
  fixture_stream *stream = fixture_open(client, KV_METHOD("Decode"), FIXTURE_PATIENCE_MS);
  for (uint64_t step = 0; step < 200; step++) {
    const kv_item item = {.session = "d", .position = step, .tokens = 1, .queries = 1, .seed = 15};
    const kv_item gap = {.session = "d", .position = step + 5, .tokens = 1, .queries = 1, .seed = 15};
    bool bad = step % 50 == 49;
    uint8_t *bytes = NULL;
    for (int sent = bad ? 0 : 1; sent < 2; sent++) {
      size_t length = kv_pack(sent == 0 ? &gap : &item, 1, step * 2 + (uint64_t)sent, &bytes);
      assert_true(fixture_send(stream, bytes, length));
      free(bytes);
      assert_true(fixture_receive(stream, &bytes, &length));
      Qkv__V1__AttendResponse *response = qkv__v1__attend_response__unpack(NULL, length, bytes);
      assert_non_null(response);
      free(bytes);
      assert_int_equal(response->id, step * 2 + (uint64_t)sent);
      assert_int_equal(response->n_results, 1);
      if (sent == 0) {
        assert_int_equal(response->results[0]->status->code, QKV_FAILED_PRECONDITION);
      } else {
        kv_reference_append(&reference, &item);
        kv_same_attend(&reference, &item, response->results[0]);
        assert_int_equal(response->results[0]->length, step + 1);
      }
      qkv__v1__attend_response__free_unpacked(response, NULL);
    }
  }
  fixture_half_close(stream);
  uint8_t *nothing = NULL;
  size_t length = 0;
  assert_false(fixture_receive(stream, &nothing, &length));
  fixture_result result = fixture_finish(&stream);
  assert_int_equal(result.status, QKV_OK);
  kv_reference_close(&reference);
  kv_close(client, "d");
}

// ---- Truncate ----

static void truncate_drops_and_appends_go_on(void **state) {
  (void)state;
  kv_open(client, "t");
  kv_reference reference = kv_reference_open("t");
  for (uint32_t layer = 0; layer < KV_LAYERS; layer++) {
    const kv_item item = {.session = "t", .layer = layer, .tokens = 200, .seed = 17};
    assert_int_equal(kv_append(client, &item, 1, NULL), QKV_OK);
  }
  Qkv__V1__TruncateRequest request = QKV__V1__TRUNCATE_REQUEST__INIT;
  uint32_t layers[] = {1};
  request.session = (char *)"t";
  request.position = 90;
  request.layers = layers;
  request.n_layers = 1;
  fixture_result result = kv_call(client, KV_METHOD("Truncate"), &request.base);
  Qkv__V1__TruncateResponse *response = qkv__v1__truncate_response__unpack(NULL, result.length, result.data);
  assert_non_null(response);
  assert_int_equal(response->n_lengths, KV_LAYERS);
  assert_int_equal(response->lengths[0], 200);
  assert_int_equal(response->lengths[1], 90);
  qkv__v1__truncate_response__free_unpacked(response, NULL);
  fixture_free(&result);

  // Other rows may be appended now, and attend sees them.
  const kv_item rows = {.session = "t", .layer = 1, .tokens = 200, .seed = 17};
  const kv_item more = {.session = "t", .layer = 1, .position = 90, .tokens = 20, .queries = 2, .seed = 18};
  kv_reference_append(&reference, &rows);
  assert_int_equal(qkv_session_truncate(reference.session, 90, layers, 1, NULL), QKV_OK);
  kv_reference_append(&reference, &more);
  Qkv__V1__AttendResponse *attended = NULL;
  assert_int_equal(kv_attend(client, &more, 1, &attended, NULL), QKV_OK);
  kv_same_attend(&reference, &more, attended->results[0]);
  qkv__v1__attend_response__free_unpacked(attended, NULL);

  request.n_layers = 0;
  request.position = 1000;  // beyond the length: nothing changes
  result = kv_call(client, KV_METHOD("Truncate"), &request.base);
  assert_int_equal(result.status, QKV_OK);
  fixture_free(&result);
  assert_int_equal(kv_length(client, "t", 0), 200);
  assert_int_equal(kv_length(client, "t", 1), 110);
  kv_reference_close(&reference);
  kv_close(client, "t");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(models_are_registered_found_and_listed),
      cmocka_unit_test(a_session_reports_what_it_is),
      cmocka_unit_test(sessions_are_listed_in_pages_by_name),
      cmocka_unit_test(closing_gives_the_memory_back),
      cmocka_unit_test(append_streams_and_acknowledges_again),
      cmocka_unit_test(a_large_append_is_the_same_as_small_ones),
      cmocka_unit_test(attend_equals_the_engine),
      cmocka_unit_test(an_empty_layer_gives_zeros_and_minus_infinity),
      cmocka_unit_test(a_batch_answers_item_by_item),
      cmocka_unit_test(an_item_that_failed_has_no_length),
      cmocka_unit_test(out_can_be_half),
      cmocka_unit_test(decode_answers_every_step_in_order),
      cmocka_unit_test(truncate_drops_and_appends_go_on),
  };
  return cmocka_run_group_tests(tests, start, stop);
}
