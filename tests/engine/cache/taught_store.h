// A store whose model is taught by rows in which there is something to learn.
#ifndef QKV_TESTS_ENGINE_CACHE_TAUGHT_STORE_H
#define QKV_TESTS_ENGINE_CACHE_TAUGHT_STORE_H

#include "engine/cache/store.h"
#include "tests/engine/cache/fixture.h"

enum { LAYERS = 2, HEADS = 2, GROUP = 2, DIM = 16, TOKENS = 512, FIRST = 256 };

// `archive_codec`, `own` (the model's policy): may be NULL.
static inline qkv_store *make_store_of(uint64_t budget, uint64_t tokens, const qkv_codec *archive_codec,
                                       const qkv_policy *own, qkv_layer_override *overrides, uint32_t count,
                                       const qkv_model **model) {
  const qkv_store_config config = {.memory_budget = budget,
                                   .models_max = 4,
                                   .sessions_max = 16,
                                   .policy = {.codec = qkv_codec_by_id(QKV_CODEC_EMBEDDED),
                                              .bits_k = 2,
                                              .bits_v = 2,
                                              .learn_said = true,
                                              .learn = true},
                                   .calibrate_tokens = tokens,
                                   .archive_codec = archive_codec};
  const qkv_model said = {.name = "pupil",
                          .layers = LAYERS,
                          .kv_heads = HEADS,
                          .q_heads = HEADS * GROUP,
                          .key_dim = DIM,
                          .value_dim = DIM,
                          .dtype = QKV_FP32,
                          .rope = {.theta = 100},
                          .policy = own != NULL ? *own : QKV_POLICY_UNSET,
                          .overrides = overrides,
                          .override_count = count};
  qkv_store *store = qkv_store_create(&config);
  assert_int_equal(qkv_store_register_model(store, &said, model, NULL), QKV_OK);
  return store;
}

static inline qkv_store *make_store_with(uint64_t budget, uint64_t tokens, qkv_layer_override *overrides,
                                         uint32_t count, const qkv_model **model) {
  return make_store_of(budget, tokens, NULL, NULL, overrides, count, model);
}

static inline qkv_store *make_store(uint64_t budget, uint64_t tokens, const qkv_model **model) {
  return make_store_with(budget, tokens, NULL, 0, model);
}

static inline qkv_session *open_session_of(qkv_store *store, const char *tenant, const char *name, bool said,
                                           bool learn) {
  qkv_session_config config = {.purpose = QKV_PURPOSE_ATTEND, .policy = QKV_POLICY_UNSET};
  config.tenant = tenant;
  config.name = name;
  config.policy.learn_said = said;
  config.policy.learn = learn;
  qkv_session *session = NULL;
  qkv_error error = {0};
  if (qkv_store_open(store, &config, "pupil", &session, &error) != QKV_OK) fail_msg("%s", error.text);
  return session;
}

static inline qkv_session *open_session(qkv_store *store, const char *name, bool learn) {
  return open_session_of(store, "default", name, true, learn);
}

// Keys: a constant vector, turned by RoPE, and a little in two directions; values in three directions.
static inline sequence structured_rows(const qkv_model *model, uint64_t tokens, uint64_t seed) {
  sequence rows = make_sequence(model, tokens, seed);
  for (uint64_t t = 0; t < tokens; t++) {
    for (uint32_t head = 0; head < HEADS; head++) {
      float *k = rows.k + (t * HEADS + head) * DIM, *v = rows.v + (t * HEADS + head) * DIM;
      const float a = k[0], b = k[1], c = v[0], d = v[1], e = v[2];
      for (size_t i = 0; i < DIM; i++) {
        k[i] = 3.0f * (float)(i % 3) + a * (float)(i % 2) + b * 0.5f;
        v[i] = c * (float)(i % 2) + d * (float)(i % 3 == 0) + e * 0.25f;
      }
      qkv_rope_forward(&model->rope, k, t);
    }
  }
  return rows;
}

static inline void append_all(qkv_session *session, const sequence *rows, uint64_t begin, uint64_t end) {
  row_pair pair;
  uint64_t appended, length;
  qkv_error error = {0};
  make_pair(&pair, rows, begin, end, QKV_FP32);
  for (uint32_t layer = 0; layer < LAYERS; layer++) {
    qkv_status status =
        qkv_session_append(session, layer, begin, &pair.k.tensor, &pair.v.tensor, false, &appended, &length, &error);
    if (status != QKV_OK) fail_msg("%s", error.text);
  }
  free_pair(&pair);
}

static inline void count_runs(void *context, const qkv_model *model, const qkv_learner_outcome *outcome) {
  assert_string_equal(model->name, "pupil");
  if (outcome->end == QKV_LEARNER_FAILED) fail_msg("%s", outcome->error_text.text);
  *(int *)context += outcome->end == QKV_LEARNER_ACCEPTED;
}

static inline void feed(qkv_store *store, const sequence *rows) {
  uint64_t freed;
  qkv_session *session = open_session(store, "fed", true);
  append_all(session, rows, 0, TOKENS);
  qkv_session_unref(&session);
  assert_int_equal(qkv_store_close(store, "default", "fed", &freed, NULL), QKV_OK);
}

#endif
