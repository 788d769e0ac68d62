// What the tests of the SSD tier in this process share: a store over a directory, sessions of rows, and what they
// hold.
#ifndef QKV_TESTS_SERVER_SPILL_FIXTURE_H
#define QKV_TESTS_SERVER_SPILL_FIXTURE_H

#include <unistd.h>

#include "engine/cache/session_spill.h"
#include "server/metrics.h"
#include "server/residency/internal.h"
#include "server/residency/restore.h"
#include "tests/engine/cache/fixture.h"

enum { LAYERS = 4, TOKENS = 1024 };

typedef struct scene {
  char directory[64];
  qkv_model model;
  sequence rows[2];
  qkv_server_options values;
  qkv_options *options;
  qkv_metric_value metrics[QKV_METRIC_COUNT];
  qkv_store *store;
  qkvi_residency *residency;
} scene;

// All decoded rows of a session's layers.
typedef struct content {
  uint64_t length;
  float *rows[LAYERS][2];
} content;

// ---- Life ----

static inline void start(scene *s) {
  qkv_error error = {0};
  memset(s->metrics, 0, sizeof s->metrics);
  s->store = qkv_store_create(&(qkv_store_config){.memory_budget = (uint64_t)s->values.memory_budget,
                                                  .models_max = 4,
                                                  .sessions_max = 100,
                                                  .policy = qkv_server_options_policy(&s->values)});
  if (qkvi_residency_create(&s->values, s->store, NULL, s->metrics, &s->residency, &error) != QKV_OK)
    fail_msg("%s", error.text);
  if (qkv_store_register_model(s->store, &s->model, NULL, &error) != QKV_OK) fail_msg("%s", error.text);
}

static inline void stop(scene *s) {
  qkvi_residency_finish(s->residency, 60000);
  qkvi_residency_destroy(&s->residency);
  qkv_store_destroy(&s->store);
}

static inline void restart(scene *s) {
  stop(s);
  start(s);
}

static inline void setup_with(scene *s, const char *io, const char *budget) {
  snprintf(s->directory, sizeof s->directory, "spill-%d-%s", (int)getpid(), io);
  const char *arguments[] = {
      "qkvd", "--listen",        "unix:unused", "--data-dir",        s->directory, "--storage-io",
      io,     "--memory-budget", budget,        "--storage-segment", "1MiB",       "--storage-compact-rate",
      "0"};
  qkv_error error = {0};
  if (qkv_server_options_read(sizeof arguments / sizeof *arguments, (char **)(uintptr_t)arguments, &s->values,
                              &s->options, &error) != QKV_OK)
    fail_msg("%s", error.text);
  s->model = test_model(2, 2, 32, 16, QKV_FP16);
  for (int i = 0; i < 2; i++) s->rows[i] = make_sequence(&s->model, TOKENS, 7 + 10 * (uint64_t)i);
  start(s);
}

static inline void setup(scene *s, const char *io) {
  setup_with(s, io, "16MiB");
}

static inline void teardown(scene *s) {
  char command[128];
  stop(s);
  qkv_options_destroy(&s->options);
  for (int i = 0; i < 2; i++) free_sequence(&s->rows[i]);
  snprintf(command, sizeof command, "rm -r %s", s->directory);
  assert_int_equal(system(command), 0);  // NOLINT(cert-env33-c)
}

static inline qkv_session *open_session(const scene *s, const char *name, qkv_durability durability) {
  qkv_error error = {0};
  qkv_session *session = NULL;
  qkv_session_config config = {.tenant = "default",
                               .purpose = QKV_PURPOSE_ATTEND,
                               .policy = {.recent_window = 0, .bits_k = 4, .bits_v = 3},
                               .ema = {.alpha = 0.9, .sample_every = 1},
                               .durability = durability};
  config.name = name;
  qkv_status status = qkvi_catalogue_enlist(s->residency, &config, &error);
  if (status == QKV_OK) status = qkv_store_open(s->store, &config, "tiny", &session, &error);
  if (status == QKV_OK) status = qkvi_catalogue_opened(s->residency, session, &error);
  if (status != QKV_OK) fail_msg("%s", error.text);
  return session;
}

// A fork of what the session has below `end`, in memory and in the journal. By one thread at a time, as it asserts.
static inline qkv_session *fork_session(const scene *s, qkv_session *parent, const char *name, uint64_t end) {
  const uint64_t positions[LAYERS] = {end, end, end, end};
  qkvi_catalogue_fork fork;
  qkv_session *child = NULL;
  qkv_error error = {0};
  qkv_session_config config = *qkv_session_config_of(parent);
  config.name = name;
  config.parent_truncations = qkv_session_truncations(parent);
  assert_int_equal(qkvi_catalogue_enlist(s->residency, &config, NULL), QKV_OK);
  assert_int_equal(qkvi_catalogue_fork_begin(s->residency, parent, &config, positions, &fork, NULL), QKV_OK);
  if (qkv_store_fork(s->store, parent, &config, positions, &child, &error) != QKV_OK) fail_msg("%s", error.text);
  assert_int_equal(qkvi_catalogue_fork_done(&fork, child, NULL), QKV_OK);
  return child;
}

static inline qkv_session *find_session(const scene *s, const char *name) {
  qkv_session *session = NULL;
  assert_int_equal(qkv_store_session(s->store, "default", name, &session, NULL), QKV_OK);
  return session;
}

// Tokens [begin, end) of one of the sequences, to all layers.
static inline qkv_status append(const scene *s, qkv_session *session, int which, uint64_t begin, uint64_t end) {
  row_pair pair;
  qkv_status status = QKV_OK;
  make_pair(&pair, &s->rows[which], begin, end, QKV_FP16);
  for (uint32_t layer = 0; layer < LAYERS && status == QKV_OK; layer++) {
    uint64_t appended, length;
    status =
        qkv_session_append(session, layer, begin, &pair.k.tensor, &pair.v.tensor, false, &appended, &length, NULL);
  }
  free_pair(&pair);
  return status;
}

static inline void sync_all(const scene *s, qkv_session *session) {
  qkv_error error = {0};
  if (qkvi_write_back_sync(s->residency, NULL, session, &error) != QKV_OK) fail_msg("%s", error.text);
}

static inline void close_session(const scene *s, qkv_session **session) {
  uint64_t freed;
  qkv_error error = {0};
  assert_int_equal(qkv_store_close_session(s->store, *session, &freed, NULL), QKV_OK);
  if (qkvi_catalogue_closed(s->residency, *session, &error) != QKV_OK) fail_msg("%s", error.text);
  qkv_session_unref(session);
}

// ---- Rows ----

static inline void read_content(qkv_session *session, content *out) {
  for (uint32_t i = 0; i < LAYERS; i++) {
    const qkv_layer *layer;
    assert_int_equal(qkv_session_read(session, i, &layer, NULL), QKV_OK);
    out->length = layer->length;
    for (qkv_part part = QKV_K; part <= QKV_V; part++) out->rows[i][part] = decoded_rows(layer, part);
    qkv_session_read_done(session, i);
  }
}

static inline void free_content(content *at) {
  for (uint32_t i = 0; i < LAYERS; i++) {
    free(at->rows[i][0]);
    free(at->rows[i][1]);
  }
}

static inline size_t part_bytes(const scene *s, const content *at, int part) {
  return at->length * s->model.kv_heads * (part == QKV_K ? s->model.key_dim : s->model.value_dim) * sizeof(float);
}

// Restores a whole layer; false where its content is wrong. Also called outside of the main thread, so it asserts
// nothing.
static inline bool same_layer(const scene *s, qkv_session *session, uint32_t at, const content *wanted) {
  const qkv_layer *layer;
  const qkvi_wanted wanted_layer = {.session = session, .layer = at};
  if (qkvi_restore(s->residency, &wanted_layer, NULL, NULL) != QKV_OK) return false;
  bool same = true;
  if (qkv_session_read(session, at, &layer, NULL) == QKV_OK) {
    same = layer->length == wanted->length && qkv_layer_holds(layer, 0, layer->length);
    for (int part = QKV_K; part <= QKV_V && same; part++) {
      float *rows = decoded_rows(layer, (qkv_part)part);
      same = memcmp(rows, wanted->rows[at][part], part_bytes(s, wanted, part)) == 0;
      free(rows);
    }
    qkv_session_read_done(session, at);
  }
  qkvi_budget_release(s->residency, session, at);
  return same;
}

static inline void assert_same(const scene *s, const char *name, const content *wanted) {
  qkv_session *session = find_session(s, name);
  for (uint32_t i = 0; i < LAYERS; i++) assert_true(same_layer(s, session, i, wanted));
  qkv_session_unref(&session);
}

// The content of a session in memory alone after the same operations; sealed, as a stop seals.
static inline content in_memory(const scene *s, uint64_t cut_at) {
  content made;
  qkv_session *session = open_session(s, "memory", QKV_DURABILITY_MEMORY);
  assert_int_equal(append(s, session, 0, 0, TOKENS), QKV_OK);
  if (cut_at < TOKENS) {
    assert_int_equal(qkv_session_truncate(session, cut_at, NULL, 0, NULL), QKV_OK);
    assert_int_equal(append(s, session, 1, cut_at, TOKENS), QKV_OK);
  }
  assert_int_equal(qkv_session_seal(session, NULL), QKV_OK);
  read_content(session, &made);
  close_session(s, &session);
  return made;
}

#endif
