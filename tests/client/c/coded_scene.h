// A daemon with a small RoPE model, sessions of every kind of page in it, and rows fetched both ways: what the tests
// of coded pages share.
#ifndef TESTS_CLIENT_C_CODED_SCENE_H
#define TESTS_CLIENT_C_CODED_SCENE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "client/c/qkv.h"
#include "engine/codec/calibrate.h"
#include "tests/client/c/calls.h"
#include "tests/server/fixture.h"

enum { LAYERS = 2, KV_HEADS = 2, Q_HEADS = 4, KEY_DIM = 16, VALUE_DIM = 24, TOKENS = 400 };
enum { K_ROW = KV_HEADS * KEY_DIM, V_ROW = KV_HEADS * VALUE_DIM };

static float scene_k[LAYERS][TOKENS][K_ROW], scene_v[LAYERS][TOKENS][V_ROW];

// Multiples of 1/128 in [-2, 2), so exact in fp16; the first coordinates vary most.
static inline void scene_fill(void) {
  uint32_t seed = 7;
  float *rows[] = {&scene_k[0][0][0], &scene_v[0][0][0]};
  const size_t counts[] = {sizeof scene_k / 4, sizeof scene_v / 4}, dims[] = {KEY_DIM, VALUE_DIM};
  for (int part = 0; part < 2; part++) {
    for (size_t i = 0; i < counts[part]; i++) {
      seed = seed * 1664525u + 1013904223u;
      const int range = i % dims[part] < 8 ? 256 : 32;
      rows[part][i] = (float)((int)(seed >> 16) % range - range / 2) / 128;
    }
  }
}

static inline qkv_client_model scene_model(const char *name) {
  static const qkv_client_policy policy = {.bits_k = 3, .bits_v = 3, .recent_window = 30, .self_calibration = -1};
  return (qkv_client_model){.name = name,
                            .layers = LAYERS,
                            .kv_heads = KV_HEADS,
                            .q_heads = Q_HEADS,
                            .key_dim = KEY_DIM,
                            .value_dim = VALUE_DIM,
                            .dtype = QKV_CLIENT_FP16,
                            .rope = {.theta = 10000},
                            .policy = &policy};
}

// Of the model, from rows that `seed` tells.
static inline const qkv_calibration *scene_calibrate(uint32_t seed) {
  qkv_calibration_shape shape = {.layers = LAYERS,
                                 .kv_heads = KV_HEADS,
                                 .q_heads = Q_HEADS,
                                 .key_dim = KEY_DIM,
                                 .value_dim = VALUE_DIM,
                                 .rope = {.theta = 10000}};
  assert_int_equal(qkv_rope_resolve(&shape.rope, KEY_DIM, NULL), QKV_OK);
  qkv_moments *moments = qkv_moments_create(&shape);
  float *k = malloc(sizeof scene_k[0]), *v = malloc(sizeof scene_v[0]);
  assert_non_null(k);
  assert_non_null(v);
  for (uint32_t layer = 0; layer < LAYERS; layer++) {
    for (size_t i = 0; i < sizeof scene_k[0] / 4; i++) k[i] = (&scene_k[layer][0][0])[i] * (float)(1 + i % seed);
    for (size_t i = 0; i < sizeof scene_v[0] / 4; i++) v[i] = (&scene_v[layer][0][0])[i] * (float)(1 + i % seed);
    qkv_moments_add(moments, layer, 0, TOKENS, k, v, true);
  }
  qkv_calibration *calibration = NULL;
  assert_int_equal(qkv_calibrate(moments, &QKV_CALIBRATE_DEFAULTS, &calibration, NULL), QKV_OK);
  qkv_moments_destroy(&moments);
  free(k);
  free(v);
  return calibration;
}

// Registers the model "m" with a calibration that is used at once.
static inline void scene_calibrated(qkv_client *client, const qkv_calibration *calibration) {
  qkv_call_error error = {0};
  qkv_client_model model = scene_model("m");
  model.calibration = qkv_calibration_bytes(calibration, &model.calibration_bytes);
  model.calibration_trusted = true;
  ok(qkv_client_register_model(client, &model, &error), &error);
}

static inline qkv_client_item scene_item(const char *session, uint32_t layer, size_t begin, size_t end) {
  const int64_t n = (int64_t)(end - begin);
  return (qkv_client_item){
      .session = session,
      .layer = layer,
      .position = begin,
      .k = {QKV_CLIENT_FP32, 3, {n, KV_HEADS, KEY_DIM}, {0}, scene_k[layer][begin], (size_t)n * K_ROW * 4},
      .v = {QKV_CLIENT_FP32, 3, {n, KV_HEADS, VALUE_DIM}, {0}, scene_v[layer][begin], (size_t)n * V_ROW * 4}};
}

// Appends positions [begin, end) of all layers.
static inline void scene_append(qkv_client *client, const char *session, size_t begin, size_t end) {
  qkv_call_error error = {0};
  for (uint32_t layer = 0; layer < LAYERS; layer++) {
    const qkv_client_item item = scene_item(session, layer, begin, end);
    ok(qkv_client_append(client, &item, 1, NULL, &error), &error);
  }
}

// Rows of one layer, as they arrived, with what was not written left at 0xee.
typedef struct scene_rows {
  uint8_t k[TOKENS * K_ROW * 4], v[TOKENS * V_ROW * 4];
  uint64_t position, tokens;
} scene_rows;

static inline bool scene_take(void *context, const qkv_client_rows *rows) {
  scene_rows *to = context;
  const size_t k_row = rows->k.bytes / (size_t)rows->k.dims[0], v_row = rows->v.bytes / (size_t)rows->v.dims[0];
  if (to->tokens == 0) to->position = rows->position;
  memcpy(to->k + to->tokens * k_row, rows->k.data, rows->k.bytes);
  memcpy(to->v + to->tokens * v_row, rows->v.data, rows->v.bytes);
  to->tokens += (uint64_t)rows->k.dims[0];
  return true;
}

// Both ways give the same bits, of all layers.
static inline void scene_same_rows(qkv_client *client, const qkv_client_fetch *asked, unsigned threads) {
  static const uint32_t layers[LAYERS] = {0, 1};
  qkv_call_error error = {0};
  scene_rows *expected = calloc(LAYERS, sizeof *expected), *got = calloc(LAYERS, sizeof *got);
  assert_non_null(expected);
  assert_non_null(got);
  memset(expected, 0xee, LAYERS * sizeof *expected);
  memset(got, 0xee, LAYERS * sizeof *got);
  qkv_client_layer_rows to[LAYERS];
  for (uint32_t layer = 0; layer < LAYERS; layer++) {
    qkv_client_fetch request = *asked;
    request.layers = &layer;
    request.layer_count = 1;
    expected[layer].tokens = 0;
    ok(qkv_client_fetch_rows(client, &request, scene_take, &expected[layer], &error), &error);
    to[layer] = (qkv_client_layer_rows){.k = got[layer].k, .v = got[layer].v, .capacity = TOKENS};
  }
  qkv_client_fetch request = *asked;
  request.layers = layers;
  request.layer_count = LAYERS;
  ok(qkv_client_fetch_decoded(client, &request, threads, to, &error), &error);
  for (uint32_t layer = 0; layer < LAYERS; layer++) {
    assert_int_equal(to[layer].tokens, expected[layer].tokens);
    assert_true(to[layer].tokens > 0);
    assert_int_equal(to[layer].position, expected[layer].position);
    assert_memory_equal(got[layer].k, expected[layer].k, sizeof got[layer].k);
    assert_memory_equal(got[layer].v, expected[layer].v, sizeof got[layer].v);
  }
  free(expected);
  free(got);
}

// In every form that pages can be asked in.
static inline void scene_same_forms(qkv_client *client, const char *session) {
  static const uint64_t ranges[][2] = {{0, 0}, {0, 64}, {70, 200}, {65, 66}, {300, 0}, {10, TOKENS}};
  for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++) {
    for (int form = 0; form < 8; form++) {
      const qkv_client_fetch request = {.session = session,
                                        .begin = ranges[i][0],
                                        .end = ranges[i][1],
                                        .dtype = form % 4,
                                        .before_rope = form >= 4,
                                        .chunk_tokens = form == 2   ? 1
                                                        : form == 5 ? 130
                                                                    : 0};
      scene_same_rows(client, &request, form % 3);
    }
  }
}

#endif
