#include "client/bench/forks.h"

#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>

#include "engine/cache/store.h"

enum { CHUNK = 2048 };  // tokens of an append

typedef struct scene {
  qkv_store *store;
  const qkv_model *model;
  uint16_t *rows;  // fp16 of a chunk, keys and then values
} scene;

static void must(qkv_status status, const qkv_error *error) {
  if (status == QKV_OK) return;
  fprintf(stderr, "qkv-bench: %s\n", error->text);
  abort();
}

static uint64_t held(const scene *s) {
  return qkv_arena_read(qkv_store_arena(s->store)).bytes_used + mallinfo2().uordblks;
}

static void setup(scene *s, uint32_t layers, uint32_t kv_heads, uint32_t dim) {
  const qkv_store_config config = {
      .memory_budget = UINT64_C(1) << 35,
      .models_max = 1,
      .sessions_max = 4096,
      .policy = {.codec = qkv_codec_by_id(QKV_CODEC_EMBEDDED), .bits_k = 4, .bits_v = 4, .recent_window = 128}};
  const qkv_model model = {.name = "share",
                           .layers = layers,
                           .kv_heads = kv_heads,
                           .q_heads = kv_heads,
                           .key_dim = dim,
                           .value_dim = dim,
                           .dtype = QKV_FP16,
                           .policy = QKV_POLICY_UNSET};
  qkv_error error = {0};
  s->store = qkv_store_create(&config);
  must(qkv_store_register_model(s->store, &model, &s->model, &error), &error);
  s->rows = qkv_bench_rows((size_t)2 * CHUNK * kv_heads * dim * sizeof *s->rows, 1);
}

static void teardown(scene *s) {
  free(s->rows);
  qkv_store_destroy(&s->store);
}

static qkv_session *open_session(const scene *s, const char *name) {
  qkv_session_config config = {.tenant = "default", .purpose = QKV_PURPOSE_ATTEND, .policy = QKV_POLICY_UNSET};
  qkv_session *session = NULL;
  qkv_error error = {0};
  config.name = name;
  must(qkv_store_open(s->store, &config, s->model->name, &session, &error), &error);
  return session;
}

static void close_session(const scene *s, qkv_session **session) {
  uint64_t freed;
  qkv_error error = {0};
  must(qkv_store_close_session(s->store, *session, &freed, &error), &error);
  qkv_session_unref(session);
}

static void append(const scene *s, qkv_session *session, uint64_t position, uint64_t tokens) {
  const qkv_model *model = s->model;
  const size_t bytes = (size_t)CHUNK * model->kv_heads * model->key_dim * sizeof *s->rows;
  for (uint64_t end = position + tokens; position < end; position += CHUNK) {
    const int64_t count = end - position < CHUNK ? (int64_t)(end - position) : CHUNK;
    for (uint32_t layer = 0; layer < model->layers; layer++) {
      qkv_segment segments[2];
      qkv_tensor parts[2];
      for (int part = 0; part < 2; part++) {
        segments[part] = (qkv_segment){.data = (const uint8_t *)s->rows + (size_t)part * bytes, .length = bytes};
        parts[part] =
            qkv_tensor_dense(QKV_FP16, 3, (int64_t[]){count, model->kv_heads, model->key_dim}, &segments[part]);
      }
      uint64_t appended, length;
      qkv_error error = {0};
      must(qkv_session_append(session, layer, position, &parts[0], &parts[1], false, &appended, &length, &error),
           &error);
    }
  }
}

static qkv_session *fork_session(const scene *s, qkv_session *parent, const char *name, uint64_t position) {
  qkv_session_config config = *qkv_session_config_of(parent);
  qkv_session *fork = NULL;
  qkv_error error = {0};
  uint64_t positions[64];
  config.name = name;
  for (uint32_t i = 0; i < s->model->layers; i++) positions[i] = position;
  must(qkv_store_fork(s->store, parent, &config, positions, &fork, &error), &error);
  return fork;
}

// ---- What is measured ----

static double idle_bytes(void) {
  enum { SESSIONS = 1000 };
  scene s;
  char name[32];
  setup(&s, 32, 8, 128);
  qkv_session *first = open_session(&s, "first");  // what all share
  const uint64_t before = held(&s);
  for (int i = 0; i < SESSIONS; i++) {
    (void)snprintf(name, sizeof name, "s%d", i);
    qkv_session *session = open_session(&s, name);
    qkv_session_unref(&session);
  }
  const double bytes = (double)(held(&s) - before) / SESSIONS;
  qkv_session_unref(&first);
  teardown(&s);
  return bytes;
}

static void time_forks(json_t *result) {
  enum { TOKENS = 131072, FORKS = 201, BEHIND = 256 };
  scene s;
  qkv_samples us = {0}, bytes = {0};
  setup(&s, 32, 1, 64);
  qkv_session *parent = open_session(&s, "parent");
  append(&s, parent, 0, TOKENS + BEHIND);  // so that all of the first are in pages
  for (int i = 0; i < FORKS; i++) {
    const uint64_t before = held(&s);
    const double begin = qkv_bench_now();
    qkv_session *fork = fork_session(&s, parent, "fork", TOKENS);
    qkv_samples_add(&us, 1e6 * (qkv_bench_now() - begin));
    qkv_samples_add(&bytes, (double)(held(&s) - before));
    close_session(&s, &fork);
  }
  json_object_set_new(result, "fork_us_p50", json_real(qkv_samples_quantile(&us, 0.5)));
  json_object_set_new(result, "fork_us_p99", json_real(qkv_samples_quantile(&us, 0.99)));
  json_object_set_new(result, "fork_bytes", json_real(qkv_samples_quantile(&bytes, 0.5)));
  qkv_samples_free(&us);
  qkv_samples_free(&bytes);
  qkv_session_unref(&parent);
  teardown(&s);
}

static double memory_ratio(void) {
  enum { PREFIX = 32768, OWN = 512, FORKS = 1000 };
  scene s;
  char name[32];
  setup(&s, 2, 8, 128);
  uint64_t before = held(&s);
  qkv_session *alone = open_session(&s, "alone");
  append(&s, alone, 0, OWN);
  const double own = (double)(held(&s) - before);
  before = held(&s);
  qkv_session *parent = open_session(&s, "parent");
  append(&s, parent, 0, PREFIX);
  const double prefix = (double)(held(&s) - before);
  for (int i = 0; i < FORKS; i++) {
    (void)snprintf(name, sizeof name, "fork%d", i);
    qkv_session *fork = fork_session(&s, parent, name, PREFIX);
    append(&s, fork, PREFIX, OWN);
    qkv_session_unref(&fork);
  }
  const double all = (double)(held(&s) - before);
  qkv_session_unref(&alone);
  qkv_session_unref(&parent);
  teardown(&s);
  return all / (prefix + FORKS * own);
}

void qkvi_bench_forks(json_t *result) {
  json_object_set_new(result, "idle_session_bytes", json_real(idle_bytes()));
  time_forks(result);
  json_object_set_new(result, "memory_ratio", json_real(memory_ratio()));
}
