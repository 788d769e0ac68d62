// libqkv against the real daemon.
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <cmocka.h>

#include "client/c/qkv.h"
#include "engine/base/status.h"
#include "engine/codec/codec.h"
#include "tests/client/c/calls.h"
#include "tests/server/fixture.h"

enum { LAYERS = 2, KV_HEADS = 2, Q_HEADS = 4, KEY_DIM = 16, VALUE_DIM = 24, TOKENS = 200 };

static fixture_daemon *qkvd;
static qkv_client *client;
static float k[TOKENS][KV_HEADS][KEY_DIM], v[TOKENS][KV_HEADS][VALUE_DIM], q[TOKENS][Q_HEADS][KEY_DIM];

// Multiples of 1/128 in [-2, 2): exact in fp16, too.
static void fill(float *out, size_t count, uint32_t seed) {
  for (size_t i = 0; i < count; i++) {
    seed = seed * 1664525u + 1013904223u;
    out[i] = (float)((int)(seed >> 23) - 256) / 128;
  }
}

static const qkv_client_model exact_model = {.name = "exact",
                                             .layers = LAYERS,
                                             .kv_heads = KV_HEADS,
                                             .q_heads = Q_HEADS,
                                             .key_dim = KEY_DIM,
                                             .value_dim = VALUE_DIM,
                                             .dtype = QKV_CLIENT_FP16,
                                             .policy = &(qkv_client_policy){.recent_window = 4096}};

static int setup(void **state) {
  (void)state;
  qkv_call_error error = {0};
  qkvd = fixture_start(NULL);
  ok(qkv_client_connect(qkvd->unix_address, NULL, &client, &error), &error);
  ok(qkv_client_register_model(client, &exact_model, &error), &error);
  fill(&k[0][0][0], sizeof k / 4, 1);
  fill(&v[0][0][0], sizeof v / 4, 2);
  fill(&q[0][0][0], sizeof q / 4, 3);
  return 0;
}

static int teardown(void **state) {
  (void)state;
  qkv_client_close(&client);
  assert_int_equal(fixture_stop(&qkvd, SIGTERM, 20000), 0);
  return 0;
}

static int open_session(void **state) {
  (void)state;
  qkv_call_error error = {0};
  ok(qkv_client_open_session(client, &(qkv_session_options){.session = "s", .model = "exact"}, &error), &error);
  return 0;
}

static int close_session(void **state) {
  (void)state;
  qkv_call_error error = {0};
  ok(qkv_client_close_session(client, "s", NULL, &error), &error);
  return 0;
}

// ---- items over the rows above ----

static qkv_client_item rows(uint32_t layer, size_t first, size_t count) {
  return (qkv_client_item){
      .session = "s",
      .layer = layer,
      .position = first,
      .k = {QKV_CLIENT_FP32, 3, {(int64_t)count, KV_HEADS, KEY_DIM}, {0}, k[first], count * sizeof k[0]},
      .v = {QKV_CLIENT_FP32, 3, {(int64_t)count, KV_HEADS, VALUE_DIM}, {0}, v[first], count * sizeof v[0]},
  };
}

static qkv_client_tensor queries(size_t first, size_t count) {
  return (qkv_client_tensor){QKV_CLIENT_FP32,    3, {(int64_t)count, Q_HEADS, KEY_DIM}, {0}, q[first],
                             count * sizeof q[0]};
}

// Attention in double of query head `head` at position `at` over positions up to its own.
static void check_attention(size_t at, size_t head, const float *out, float lse) {
  double largest = -INFINITY, sum = 0, scores[TOKENS], expected[VALUE_DIM] = {0};
  size_t kv_head = head / (Q_HEADS / KV_HEADS);
  for (size_t t = 0; t <= at; t++) {
    scores[t] = 0;
    for (size_t i = 0; i < KEY_DIM; i++) scores[t] += (double)q[at][head][i] * k[t][kv_head][i];
    scores[t] /= sqrt(KEY_DIM);
    if (scores[t] > largest) largest = scores[t];
  }
  for (size_t t = 0; t <= at; t++) {
    double weight = exp(scores[t] - largest);
    sum += weight;
    for (size_t i = 0; i < VALUE_DIM; i++) expected[i] += weight * v[t][kv_head][i];
  }
  assert_true(fabs(lse - (largest + log(sum))) < 1e-4);
  for (size_t i = 0; i < VALUE_DIM; i++) assert_true(fabs(out[i] - expected[i] / sum) < 1e-4);
}

static void check_result(const qkv_client_result *result, size_t first, size_t count) {
  assert_int_equal(result->code, 0);
  assert_int_equal(result->lse_count, count * Q_HEADS);
  assert_int_equal(result->out_count, count * Q_HEADS * VALUE_DIM);
  for (size_t i = 0; i < count * Q_HEADS; i++) {
    check_attention(first + i / Q_HEADS, i % Q_HEADS, result->out + i * VALUE_DIM, result->lse[i]);
  }
}

// ---- models and sessions ----

static void test_models(void **state) {
  (void)state;
  qkv_call_error error = {0};
  ok(qkv_client_register_model(client, &exact_model, &error), &error);
  qkv_client_model other = exact_model;
  other.layers++;
  assert_int_equal(qkv_client_register_model(client, &other, &error), QKV_ALREADY_EXISTS);
  other.name = "no good name!";
  assert_int_equal(qkv_client_register_model(client, &other, NULL), QKV_INVALID_ARGUMENT);
}

static void test_sessions(void **state) {
  (void)state;
  qkv_call_error error = {0};
  qkv_client *own = NULL;
  qkv_client_policy policy = {.bits_k = 2, .bits_v = 3, .recent_window = 7};
  ok(qkv_client_connect(qkvd->unix_address, &(qkv_client_options){.tenant = "t"}, &own, &error), &error);
  ok(qkv_client_register_model(own, &exact_model, &error), &error);
  qkv_session_options options = {
      .session = "info", .model = "exact", .purpose = 2, .policy = &policy, .first_position = 100};
  ok(qkv_client_open_session(own, &options, &error), &error);
  assert_int_equal(qkv_client_open_session(own, &options, &error), QKV_ALREADY_EXISTS);
  assert_non_null(strstr(error.text, "info"));

  qkv_client_session_info info;
  ok(qkv_client_get_session(own, "info", &info, &error), &error);
  assert_string_equal(info.session, "info");
  assert_string_equal(info.model, "exact");
  assert_string_equal(info.tenant, "t");
  assert_int_equal(info.purpose, 2);
  assert_true(info.bits_k == 2 && info.bits_v == 3);
  assert_int_equal(info.recent_window, 7);
  assert_int_equal(info.first_position, 100);
  assert_int_equal(info.layers, LAYERS);
  assert_int_equal(info.lengths[1], 100);
  assert_true(info.created_unix_ms > 1600000000000);
  qkv_free(info.lengths);

  uint64_t freed = 1;
  ok(qkv_client_close_session(own, "info", &freed, &error), &error);
  assert_int_equal(qkv_client_close_session(own, "info", &freed, &error), QKV_NOT_FOUND);
  assert_int_equal(qkv_client_get_session(own, "info", &info, &error), QKV_NOT_FOUND);
  assert_null(info.lengths);
  const struct {
    qkv_client_policy policy;
    const char *wrong;
  } policies[] = {
      {{.codec = "turboquant", .codec_v = "kivi", .turboquant_rotation = 2, .kivi_q_group_size = 64}, ""},
      {{.codec = "kivi", .kivi_q_group_size = 48}, "kivi.q_group_size is 48"},
      {{.codec = "turboquant", .turboquant_ip_rotation = 1}, "turboquant-ip is there"},
      {{.codec = "polarquant", .polarquant_row_norms = 3}, "polarquant.row_norms is 3"},
      {{.codec = "turboquant-outliers-delta", .turboquant_outliers_n_out = 12}, "turboquant_outliers.n_out is 12"},
      {{.codec = "turboquant-ip-outliers", .turboquant_ip_outliers_n_out = 12}, "turboquant_ip_outliers.n_out is 12"},
      {{.codec = "kivi-delta", .delta_stage_anchor_every = 7}, "delta_stage.anchor_every is 7"},
      {{.codec = "int8-delta", .delta_stage_anchor_threshold = 1000001}, "delta_stage.anchor_threshold is 1000001"},
      {{.codec = "polarquant-low-rank", .low_rank_stage_rank = 17}, "low_rank_stage.rank is 17"}};
  for (size_t i = 0; i < sizeof policies / sizeof *policies; i++) {
    options.policy = &policies[i].policy;
    assert_int_equal(qkv_client_open_session(own, &options, &error), i == 0 ? QKV_OK : QKV_INVALID_ARGUMENT);
    assert_non_null(strstr(error.text, policies[i].wrong));
  }
  ok(qkv_client_close_session(own, "info", &freed, &error), &error);
  options.policy = NULL;
  options.model = "nobody";
  assert_int_equal(qkv_client_open_session(own, &options, &error), QKV_NOT_FOUND);
  assert_non_null(strstr(error.text, "nobody"));
  qkv_client_close(&own);
}

// ---- append and attend ----

static void test_append_and_attend(void **state) {
  (void)state;
  qkv_call_error error = {0};
  uint64_t appended = 0;
  qkv_client_item both[2] = {rows(0, 0, 150), rows(1, 0, TOKENS)};
  ok(qkv_client_append(client, both, 2, &appended, &error), &error);
  assert_int_equal(appended, 350);
  // The same again is acknowledged; what is new of it counts.
  both[0] = rows(0, 100, 100);
  ok(qkv_client_append(client, both, 2, &appended, &error), &error);
  assert_int_equal(appended, 50);
  qkv_client_item gap = rows(0, 0, 1);
  gap.position = TOKENS + 7;
  assert_int_equal(qkv_client_append(client, &gap, 1, &appended, &error), QKV_FAILED_PRECONDITION);
  assert_int_equal(appended, 0);
  assert_non_null(strstr(error.text, "items[0].position"));

  qkv_client_item ask = {.session = "s", .layer = 1, .position = 160, .q = queries(160, 33)};
  qkv_client_result result;
  ok(qkv_client_attend(client, &ask, 1, &result, &error), &error);
  assert_int_equal(result.length, TOKENS);
  check_result(&result, 160, 33);
  qkv_client_results_free(&result, 1);
}

static void test_items_fail_one_by_one(void **state) {
  (void)state;
  qkv_call_error error = {0};
  qkv_client_item items[3] = {rows(0, 0, 10), rows(1, 0, 20), rows(1, 0, 1)};
  items[0].position = 5;
  items[1].q = queries(0, 20);
  items[2].layer = LAYERS;
  qkv_client_result results[3];
  ok(qkv_client_attend(client, items, 3, results, &error), &error);
  assert_int_equal(results[0].code, QKV_FAILED_PRECONDITION);
  assert_non_null(strstr(results[0].text, "position"));
  assert_null(results[0].out);
  check_result(&results[1], 0, 20);
  assert_int_equal(results[1].length, 20);
  assert_int_equal(results[2].code, QKV_INVALID_ARGUMENT);
  qkv_client_results_free(results, 3);
  // One item alone is the call.
  assert_int_equal(qkv_client_attend(client, items, 1, results, &error), QKV_FAILED_PRECONDITION);
  assert_int_equal(results[0].code, QKV_FAILED_PRECONDITION);
  assert_string_equal(results[0].text, error.text);
}

static void test_options_reach_the_daemon(void **state) {
  (void)state;
  qkv_call_error error = {0};
  qkv_client_item all = rows(0, 0, TOKENS);
  ok(qkv_client_append(client, &all, 1, NULL, &error), &error);
  // A window of 1 leaves a query its own position: the output is that value row, the LSE its score.
  qkv_client_attend_options options = {.sliding_window = 1, .scale = 1};
  qkv_client_item ask = {.session = "s", .position = 50, .q = queries(50, 1), .options = &options};
  qkv_client_result result;
  ok(qkv_client_attend(client, &ask, 1, &result, &error), &error);
  double score = 0;
  for (int i = 0; i < KEY_DIM; i++) score += (double)q[50][0][i] * k[50][0][i];
  assert_true(fabs(result.lse[0] - score) < 1e-4);
  for (int i = 0; i < VALUE_DIM; i++) assert_true(fabsf(result.out[i] - v[50][0][i]) < 1e-5f);
  qkv_client_results_free(&result, 1);
  // Nothing in the range: zeros and minus infinity.
  options = (qkv_client_attend_options){.begin = 51};
  ok(qkv_client_attend(client, &ask, 1, &result, &error), &error);
  assert_true(isinf(result.lse[0]) && result.lse[0] < 0 && result.out[0] == 0);
  qkv_client_results_free(&result, 1);
}

// A decode loop, step by step the same as one request over all.
static void test_decode_stream(void **state) {
  (void)state;
  qkv_call_error error = {0};
  qkv_decode *stream = NULL;
  ok(qkv_decode_open(client, &stream, &error), &error);
  for (size_t i = 0; i < TOKENS; i++) {
    qkv_client_item items[LAYERS] = {rows(0, i, 1), rows(1, i, 1)};
    qkv_client_result results[LAYERS];
    items[0].q = items[1].q = queries(i, 1);
    ok(qkv_decode_step(stream, items, LAYERS, results, &error), &error);
    check_result(&results[0], i, 1);
    check_result(&results[1], i, 1);
    qkv_client_results_free(results, LAYERS);
  }
  // A step that fails does not end the stream, nor does another call while it is open.
  qkv_client_item unknown = rows(0, 0, 1);
  qkv_client_result result;
  unknown.session = "nobody";
  (void)qkv_decode_step(stream, &unknown, 1, &result, &error);
  assert_int_equal(result.code, QKV_NOT_FOUND);
  qkv_client_item ask = {.session = "s", .position = 5, .q = queries(5, 1)};
  ok(qkv_client_attend(client, &ask, 1, &result, &error), &error);
  qkv_client_results_free(&result, 1);
  ok(qkv_decode_step(stream, &ask, 1, &result, &error), &error);
  check_result(&result, 5, 1);
  qkv_client_results_free(&result, 1);
  ok(qkv_decode_close(&stream, &error), &error);
}

// ---- fetch ----

typedef struct fetched {
  float k[TOKENS][KV_HEADS][KEY_DIM], v[TOKENS][KV_HEADS][VALUE_DIM];
  size_t tokens, responses;
} fetched;

static bool keep_rows(void *context, const qkv_client_rows *got) {
  fetched *all = context;
  assert_int_equal(got->position, all->tokens);
  assert_int_equal(got->k.dims[0], got->v.dims[0]);
  assert_int_equal(got->k.bytes, (size_t)got->k.dims[0] * sizeof all->k[0]);
  memcpy(all->k[all->tokens], got->k.data, got->k.bytes);
  memcpy(all->v[all->tokens], got->v.data, got->v.bytes);
  all->tokens += (size_t)got->k.dims[0];
  all->responses++;
  return true;
}

static fetched *fetch(const char *session, uint32_t layer, uint32_t chunk) {
  qkv_call_error error = {0};
  fetched *all = calloc(1, sizeof *all);
  assert_non_null(all);
  qkv_client_fetch request = {
      .session = session, .layers = &layer, .layer_count = 1, .dtype = QKV_CLIENT_FP32, .chunk_tokens = chunk};
  ok(qkv_client_fetch_rows(client, &request, keep_rows, all, &error), &error);
  return all;
}

static void test_fetch_exact_rows(void **state) {
  (void)state;
  qkv_call_error error = {0};
  qkv_client_item all = rows(1, 0, TOKENS);
  ok(qkv_client_append(client, &all, 1, NULL, &error), &error);
  fetched *got = fetch("s", 1, 64);
  assert_int_equal(got->tokens, TOKENS);
  assert_true(got->responses >= 4);
  assert_memory_equal(got->k, k, sizeof k);
  assert_memory_equal(got->v, v, sizeof v);
  free(got);
}

static void test_fetch_into(void **state) {
  (void)state;
  qkv_call_error error = {0};
  const uint32_t layers[] = {0, 1}, turned[] = {1, 0};
  static float got_k[2][TOKENS * KV_HEADS * KEY_DIM], got_v[2][TOKENS * KV_HEADS * VALUE_DIM];
  const qkv_client_item all[2] = {rows(0, 0, TOKENS - 1), rows(1, 0, TOKENS)};
  ok(qkv_client_append(client, all, 2, NULL, &error), &error);
  qkv_client_layer_memory memory[2] = {0};
  for (int i = 0; i < 2; i++) {
    memory[i].k = (qkv_client_memory){.data = got_k[i], .bytes = sizeof k};
    memory[i].v = (qkv_client_memory){.data = got_v[i], .bytes = sizeof v};
  }
  qkv_client_fetch request = {
      .session = "s", .layers = layers, .layer_count = 2, .begin = 20, .dtype = QKV_CLIENT_FP32, .chunk_tokens = 7};
  ok(qkv_client_fetch_into(client, &request, memory, &error), &error);
  for (int i = 0; i < 2; i++) {
    const size_t tokens = TOKENS - 21 + (size_t)i;
    assert_int_equal(memory[i].position, 20);
    assert_int_equal(memory[i].tokens, tokens);
    assert_int_equal(memory[i].k.dtype, QKV_CLIENT_FP32);
    assert_int_equal(memory[i].k.heads, KV_HEADS);
    assert_int_equal(memory[i].v.dim, VALUE_DIM);
    assert_memory_equal(got_k[i], k[20], tokens * sizeof k[0]);
    assert_memory_equal(got_v[i], v[20], tokens * sizeof v[0]);
  }
  // Values alone, of which none are wanted.
  request.part = 2;
  memory[0].v.data = NULL;
  ok(qkv_client_fetch_into(client, &request, memory, &error), &error);
  assert_int_equal(memory[0].tokens, TOKENS - 21);
  // A byte too small.
  request.part = 0;
  memory[1].k.bytes = (TOKENS - 20) * sizeof k[0] - 1;
  assert_int_equal(qkv_client_fetch_into(client, &request, memory, &error), 3);
  assert_non_null(strstr(error.text, "layer 1: bytes of the memory for rows are "));
  assert_int_equal(memory[0].tokens, 0);
  request.layers = turned;
  assert_int_equal(qkv_client_fetch_into(client, &request, memory, &error), 3);
  assert_string_equal(error.text, "layers[1] is 0, must be above layers[0], 1");
  request.layers = layers;
  request.heads_first = true;
  assert_int_equal(qkv_client_fetch_into(client, &request, memory, &error), 3);
  assert_string_equal(error.text, "heads_first is set, rows in memory are tokens first");
}

static double relative_error(const float *is, const float *should, size_t count) {
  double error = 0, power = 0;
  for (size_t i = 0; i < count; i++) {
    error += ((double)is[i] - should[i]) * ((double)is[i] - should[i]);
    power += (double)should[i] * should[i];
  }
  return error / power;
}

// Sealed pages within the codec's bound, what comes after them exact.
static void test_fetch_coded_rows(void **state) {
  (void)state;
  qkv_call_error error = {0};
  qkv_client_policy policy = {.bits_k = 4, .bits_v = 2, .recent_window = 0};
  qkv_session_options options = {.session = "coded", .model = "exact", .policy = &policy};
  ok(qkv_client_open_session(client, &options, &error), &error);
  qkv_client_item all = rows(0, 0, TOKENS);
  all.session = "coded";
  ok(qkv_client_append(client, &all, 1, NULL, &error), &error);
  fetched *got = fetch("coded", 0, 0);
  enum { SEALED = TOKENS / 64 * 64 };
  const qkv_codec *codec = qkv_codec_by_name("embedded");
  double k_error = relative_error(got->k[0][0], k[0][0], (size_t)SEALED * KV_HEADS * KEY_DIM);
  double v_error = relative_error(got->v[0][0], v[0][0], (size_t)SEALED * KV_HEADS * VALUE_DIM);
  assert_true(k_error > 0 && k_error < codec->error_bound(4));
  assert_true(v_error > k_error && v_error < codec->error_bound(2));
  assert_memory_equal(got->k[SEALED], k[SEALED], (TOKENS - SEALED) * sizeof k[0]);
  free(got);
  ok(qkv_client_close_session(client, "coded", NULL, &error), &error);
}

// From a larger cache of the caller's: with strides, packed, and dense are the same rows.
static void test_strided_rows(void **state) {
  (void)state;
  qkv_call_error error = {0};
  static const int spreads[] = {1, 2, 9};
  for (size_t i = 0; i < 3; i++) {
    size_t spread = (size_t)spreads[i];
    float(*wide_k)[KV_HEADS][KEY_DIM] = calloc(TOKENS * spread, sizeof *wide_k);
    float(*wide_v)[KV_HEADS][VALUE_DIM] = calloc(TOKENS * spread, sizeof *wide_v);
    assert_true(wide_k != NULL && wide_v != NULL);
    for (size_t t = 0; t < TOKENS; t++) {
      memcpy(wide_k[t * spread], k[t], sizeof k[0]);
      memcpy(wide_v[t * spread], v[t], sizeof v[0]);
    }
    qkv_client_item item = {
        .session = "s",
        .k = {QKV_CLIENT_FP32, 3, {TOKENS, KV_HEADS, KEY_DIM}, {0}, wide_k, TOKENS * spread * sizeof *wide_k},
        .v = {QKV_CLIENT_FP32, 3, {TOKENS, KV_HEADS, VALUE_DIM}, {0}, wide_v, TOKENS * spread * sizeof *wide_v}};
    const int64_t k_strides[3] = {(int64_t)(spread * sizeof k[0]), sizeof k[0][0], sizeof(float)};
    const int64_t v_strides[3] = {(int64_t)(spread * sizeof v[0]), sizeof v[0][0], sizeof(float)};
    memcpy(item.k.strides, k_strides, sizeof k_strides);
    memcpy(item.v.strides, v_strides, sizeof v_strides);
    ok(qkv_client_append(client, &item, 1, NULL, &error), &error);
    free(wide_k);
    free(wide_v);
    fetched *got = fetch("s", 0, 0);
    assert_memory_equal(got->k, k, sizeof k);
    assert_memory_equal(got->v, v, sizeof v);
    free(got);
    ok(qkv_client_truncate(client, "s", 0, &error), &error);
  }
}

static bool heads_first(void *context, const qkv_client_rows *got) {
  (void)context;
  assert_int_equal(got->position, 20);
  assert_int_equal(got->k.rank, 0);
  assert_int_equal(got->v.dtype, QKV_CLIENT_FP16);
  assert_int_equal(got->v.dims[0], KV_HEADS);
  assert_int_equal(got->v.dims[1], 10);
  assert_int_equal(got->v.dims[2], VALUE_DIM);
  assert_int_equal(got->v.bytes, KV_HEADS * 10 * VALUE_DIM * 2);
  return true;
}

static void test_fetch_request(void **state) {
  (void)state;
  qkv_call_error error = {0};
  qkv_client_item all = rows(0, 0, TOKENS);
  ok(qkv_client_append(client, &all, 1, NULL, &error), &error);
  qkv_client_fetch request = {.session = "s",
                              .layers = (const uint32_t[]){0},
                              .layer_count = 1,
                              .begin = 20,
                              .end = 30,
                              .heads_first = true,
                              .part = 2};
  ok(qkv_client_fetch_rows(client, &request, heads_first, NULL, &error), &error);
  request.session = "nobody";
  assert_int_equal(qkv_client_fetch_rows(client, &request, heads_first, NULL, &error), QKV_NOT_FOUND);
}

static void test_truncate(void **state) {
  (void)state;
  qkv_call_error error = {0};
  qkv_client_session_info info;
  qkv_client_item all[2] = {rows(0, 0, TOKENS), rows(1, 0, 50)};
  ok(qkv_client_append(client, all, 2, NULL, &error), &error);
  ok(qkv_client_truncate(client, "s", 100, &error), &error);
  ok(qkv_client_get_session(client, "s", &info, &error), &error);
  assert_int_equal(info.lengths[0], 100);
  assert_int_equal(info.lengths[1], 50);
  qkv_free(info.lengths);
  assert_int_equal(qkv_client_truncate(client, "nobody", 0, &error), QKV_NOT_FOUND);
}

static void test_match(void **state) {
  (void)state;
  qkv_call_error error = {0};
  qkv_client_match match;
  uint32_t ids[TOKENS];
  for (uint32_t i = 0; i < TOKENS; i++) ids[i] = 70000 + i;
  const qkv_session_options options = {.session = "salted", .model = "exact", .salt = "x", .salt_bytes = 1};
  ok(qkv_client_open_session(client, &options, &error), &error);
  qkv_client_item all[2] = {rows(0, 0, 100), rows(1, 0, 70)};
  all[0].session = all[1].session = "salted";
  all[1].token_ids = ids;
  all[0].token_ids = ids;
  ok(qkv_client_append(client, all, 2, NULL, &error), &error);
  qkv_client_prompt prompt = {
      .model = "exact", .token_ids = ids, .token_count = TOKENS, .salt = "x", .salt_bytes = 1};
  ok(qkv_client_match_prefix(client, &prompt, &match, &error), &error);
  assert_string_equal(match.session, "salted");
  assert_int_equal(match.tokens, 64);
  assert_int_equal(match.tokens_in_memory, 64);
  assert_int_equal(match.tokens_on_ssd, 0);
  assert_true(match.restore_ms == 0);
  uint64_t matched = 7;
  qkv_session_options prefixed = options;
  prefixed.session = "prefixed";
  prefixed.prefix_token_ids = ids;
  prefixed.prefix_token_count = TOKENS;
  prefixed.matched_tokens = &matched;
  ok(qkv_client_open_session(client, &prefixed, &error), &error);
  assert_int_equal(matched, 64);
  assert_int_equal(qkv_client_open_session(client, &prefixed, &error), QKV_ALREADY_EXISTS);
  assert_int_equal(matched, 0);
  ok(qkv_client_close_session(client, "prefixed", NULL, &error), &error);
  prompt.salt_bytes = 0;
  ok(qkv_client_match_prefix(client, &prompt, &match, &error), &error);
  assert_string_equal(match.session, "");
  assert_int_equal(match.tokens, 0);
  prompt.model = "nobody";
  assert_int_equal(qkv_client_match_prefix(client, &prompt, &match, &error), QKV_NOT_FOUND);
  ok(qkv_client_close_session(client, "salted", NULL, &error), &error);
}

// ---- connections ----

static void test_tcp(void **state) {
  (void)state;
  qkv_call_error error = {0};
  qkv_client *other = NULL;
  qkv_client_session_info info;
  ok(qkv_client_connect(qkvd->tcp_address, NULL, &other, &error), &error);
  ok(qkv_client_get_session(other, "s", &info, &error), &error);
  qkv_free(info.lengths);
  qkv_client_close(&other);
  assert_null(other);
  qkv_client_close(&other);
}

static void test_nobody_answers(void **state) {
  (void)state;
  qkv_call_error error = {0};
  qkv_client_options options = {.timeout_ms = 60000, .connect_timeout_ms = 50};
  qkv_client *nobody = (qkv_client *)&options;
  assert_int_equal(qkv_client_connect("unix:/no/such/socket", &options, &nobody, &error), QKV_UNAVAILABLE);
  assert_null(nobody);
  assert_string_equal(error.text,
                      "nobody answers at unix:/no/such/socket: No such file or directory; is qkvd running there?");
  assert_int_equal(qkv_client_connect("somewhere", &options, &nobody, &error), QKV_INVALID_ARGUMENT);
  assert_string_equal(error.text, "target \"somewhere\" is neither unix:PATH nor HOST:PORT");
  nobody = (qkv_client *)&options;
  assert_int_equal(qkv_client_connect(NULL, &options, &nobody, &error), QKV_INVALID_ARGUMENT);
  assert_null(nobody);
  assert_string_equal(error.text, "target is NULL");
}

static void test_endless_patience(void **state) {
  (void)state;
  qkv_call_error error = {0};
  qkv_client *patient = NULL;
  ok(qkv_client_connect(qkvd->unix_address, &(qkv_client_options){.timeout_ms = INT64_MAX}, &patient, &error),
     &error);
  ok(qkv_client_register_model(patient, &exact_model, &error), &error);
  qkv_client_close(&patient);
}

// A response that is larger than the client takes.
static void test_message_limit(void **state) {
  (void)state;
  qkv_call_error error = {0};
  qkv_client *small = NULL;
  qkv_client_options options = {.message_bytes_max = 4096};
  ok(qkv_client_connect(qkvd->unix_address, &options, &small, &error), &error);
  qkv_client_item all = rows(0, 0, TOKENS);
  ok(qkv_client_append(small, &all, 1, NULL, &error), &error);
  qkv_client_item ask = {.session = "s", .q = queries(0, TOKENS)};
  qkv_client_result result;
  assert_int_equal(qkv_client_attend(small, &ask, 1, &result, &error), QKV_RESOURCE_EXHAUSTED);
  assert_non_null(strstr(error.text, "larger than max"));
  qkv_client_close(&small);
}

// The daemon stops reading in the middle of a large message. The call ends in time all the same, and what was
// lent to it is the caller's again at once: here it is unmapped.
static void test_daemon_that_stops_reading(void **state) {
  (void)state;
  enum { MANY = 200000 };
  qkv_call_error error = {0};
  qkv_client *hasty = NULL;
  qkv_client_options options = {.timeout_ms = 600000, .connect_timeout_ms = 20000};
  ok(qkv_client_connect(qkvd->unix_address, &options, &hasty, &error), &error);
  qkv_client_set_timeout(hasty, 300);
  size_t bytes = (size_t)MANY * KV_HEADS * VALUE_DIM * 4;
  void *data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  assert_true(data != MAP_FAILED);
  qkv_client_item item = {.session = "s",
                          .k = {QKV_CLIENT_FP32, 3, {MANY, KV_HEADS, KEY_DIM}, {0}, data, bytes},
                          .v = {QKV_CLIENT_FP32, 3, {MANY, KV_HEADS, VALUE_DIM}, {0}, data, bytes}};
  assert_int_equal(kill(qkvd->pid, SIGSTOP), 0);
  int64_t begin = fixture_now_ms();
  qkv_code code = qkv_client_append(hasty, &item, 1, NULL, &error);
  int64_t took = fixture_now_ms() - begin;
  assert_int_equal(munmap(data, bytes), 0);
  assert_int_equal(kill(qkvd->pid, SIGCONT), 0);
  assert_int_equal(code, QKV_DEADLINE_EXCEEDED);
  assert_string_equal(error.text, "no answer to /qkv.v1.KvCache/Append within 300 ms");
  assert_true(took >= 250);
  qkv_client_close(&hasty);
  qkv_client_session_info info;
  ok(qkv_client_get_session(client, "s", &info, &error), &error);
  qkv_free(info.lengths);
}

static void test_daemon_that_dies(void **state) {
  (void)state;
  qkv_call_error error = {0};
  qkv_client *left = NULL;
  qkv_client_session_info info;
  fixture_daemon *mortal = fixture_start(NULL);
  ok(qkv_client_connect(mortal->tcp_address, NULL, &left, &error), &error);
  assert_int_equal(fixture_stop(&mortal, SIGKILL, 20000), -1);
  assert_int_equal(qkv_client_get_session(left, "s", &info, &error), QKV_UNAVAILABLE);
  assert_non_null(strstr(error.text, "Connection refused; is qkvd running there?"));
  qkv_client_close(&left);
}

// A daemon that dies under a call: the error says which one.
static void test_daemon_that_dies_under_a_call(void **state) {
  (void)state;
  qkv_call_error error = {0};
  qkv_client *left = NULL;
  qkv_decode *stream = NULL;
  fixture_daemon *mortal = fixture_start(NULL);
  char address[sizeof mortal->unix_address], expected[sizeof address + 64];
  snprintf(address, sizeof address, "%s", mortal->unix_address);
  snprintf(expected, sizeof expected, "the connection to %s is gone: ", address);
  ok(qkv_client_connect(address, NULL, &left, &error), &error);
  ok(qkv_decode_open(left, &stream, &error), &error);
  qkv_client_item ask = {.session = "none", .q = queries(0, 1)};
  qkv_client_result result;
  ok(qkv_decode_step(stream, &ask, 1, &result, &error), &error);
  assert_int_equal(result.code, QKV_NOT_FOUND);
  qkv_client_results_free(&result, 1);
  assert_int_equal(fixture_stop(&mortal, SIGKILL, 20000), -1);
  for (int i = 0; i < 2; i++) {
    assert_int_equal(qkv_decode_step(stream, &ask, 1, &result, &error), QKV_UNAVAILABLE);
    assert_ptr_equal(strstr(error.text, expected), error.text);  // gRPC's words follow
    assert_true(strlen(error.text) > strlen(expected));
    assert_string_equal(result.text, error.text);
  }
  assert_int_equal(qkv_decode_close(&stream, &error), QKV_UNAVAILABLE);
  qkv_client_close(&left);
}

// The example of the README, which uses the shared library.
static void test_example(void **state) {
  (void)state;
  char command[512], printed[256] = "";
  snprintf(command, sizeof command, "%s %s 2>&1", EXAMPLE_PATH, qkvd->tcp_address);
  FILE *pipe = popen(command, "r");  // NOLINT(cert-env33-c): both are ours
  assert_non_null(pipe);
  printed[fread(printed, 1, sizeof printed - 1, pipe)] = '\0';
  assert_int_equal(pclose(pipe), 0);
  assert_string_equal(printed, "[1, 8, 64] length 100\n");
}

#define WITH_SESSION(test) cmocka_unit_test_setup_teardown(test, open_session, close_session)

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_models),
      cmocka_unit_test(test_sessions),
      WITH_SESSION(test_append_and_attend),
      WITH_SESSION(test_items_fail_one_by_one),
      WITH_SESSION(test_options_reach_the_daemon),
      WITH_SESSION(test_decode_stream),
      WITH_SESSION(test_fetch_exact_rows),
      WITH_SESSION(test_fetch_into),
      cmocka_unit_test(test_fetch_coded_rows),
      WITH_SESSION(test_strided_rows),
      WITH_SESSION(test_fetch_request),
      WITH_SESSION(test_truncate),
      cmocka_unit_test(test_match),
      WITH_SESSION(test_tcp),
      cmocka_unit_test(test_nobody_answers),
      cmocka_unit_test(test_endless_patience),
      WITH_SESSION(test_message_limit),
      WITH_SESSION(test_daemon_that_stops_reading),
      cmocka_unit_test(test_daemon_that_dies),
      cmocka_unit_test(test_daemon_that_dies_under_a_call),
      cmocka_unit_test(test_example),
  };
  return cmocka_run_group_tests(tests, setup, teardown);
}
