// A store over a tier in memory, with one session that may be folded.
#ifndef QKV_TESTS_ENGINE_CACHE_FOLD_SCENE_H
#define QKV_TESTS_ENGINE_CACHE_FOLD_SCENE_H

#include <stdatomic.h>

#include "engine/cache/session_fold.h"
#include "engine/cache/session_retier.h"
#include "engine/cache/session_spill.h"
#include "engine/cache/session_state.h"
#include "engine/cache/store.h"
#include "tests/engine/cache/backing_double.h"

enum { LAYERS = 4, TOKENS = 200, FIRST_ID = 77, FOLDS = 8, FOLDED = DOUBLE_RECORDS - 1 };

typedef struct scene {
  sequence rows;
  backing_double backing;
  qkv_model model;
  qkv_store *store;
  qkv_session *session;
  uint32_t ids[TOKENS];
} scene;

// ---- A tier that keeps a record of each folded session, by its id ----

static inline uint64_t fold_of(uint64_t session) {
  assert_true(session >= FIRST_ID && session < FIRST_ID + FOLDS);
  return FOLDED - (session - FIRST_ID);
}

// What another thread would do while the record is being written; NULL: nothing.
static void (*while_folding)(scene *s);
static scene *while_folded;

static inline uint64_t put_fold(void *context, uint64_t session, const void *bytes, uint64_t count,
                                const _Atomic bool *stop) {
  backing_double *made = context;
  double_record *record = &made->records[fold_of(session)];
  (void)stop;
  if (while_folding != NULL) while_folding(while_folded);
  if (made->failed) return 0;
  free(record->page);
  *record = (double_record){
      .page = malloc(count), .bytes = (uint32_t)count, .session = session, .state = QKV_RECORD_WRITTEN};
  assert_non_null(record->page);
  memcpy(record->page, bytes, count);
  return fold_of(session);
}

static inline qkv_status read_fold(void *context, uint64_t session, uint64_t *number, uint8_t **bytes,
                                   uint64_t *count, qkv_error *error) {
  const double_record *record = &((const backing_double *)context)->records[fold_of(session)];
  if (record->state == QKV_RECORD_GONE) return qkv_fail(error, QKV_NOT_FOUND, "no record");
  *number = fold_of(session);
  *count = record->bytes;
  *bytes = malloc(*count);
  assert_non_null(*bytes);
  memcpy(*bytes, record->page, *count);
  return QKV_OK;
}

// ---- A session ----

static inline void append_all(scene *s) {
  row_pair pair;
  uint64_t reserved;
  qkv_session_tokens *tokens = qkv_session_tokens_of(s->session);
  make_pair(&pair, &s->rows, 0, TOKENS, QKV_FP16);
  for (uint32_t layer = 0; layer < LAYERS; layer++) {
    uint64_t appended, length;
    assert_int_equal(
        qkv_session_append(s->session, layer, 0, &pair.k.tensor, &pair.v.tensor, false, &appended, &length, NULL),
        QKV_OK);
  }
  free_pair(&pair);
  reserved = qkv_session_tokens_cost(tokens, 0, TOKENS);
  assert_int_equal(qkv_arena_reserve(tokens->config.arena, reserved, NULL), QKV_OK);
  qkv_session_tokens_keep(tokens, qkv_session_tokens_cuts(tokens), 0, s->ids, TOKENS, &reserved);
  qkv_arena_unreserve(tokens->config.arena, reserved);
}

static inline void sink(scene *s) {
  assert_int_equal(qkv_session_seal(s->session, NULL), QKV_OK);
  assert_true(qkv_session_settle(s->session));
  (void)qkv_session_evict(s->session, UINT64_MAX, true);
}

static inline void setup(scene *s) {
  memset(s, 0, sizeof *s);
  s->model = test_model(1, 2, 16, 8, QKV_FP16);
  s->rows = make_sequence(&s->model, TOKENS, 1);
  double_init(&s->backing);
  s->backing.backing.put_fold = put_fold;
  s->backing.backing.read_fold = read_fold;
  s->store = qkv_store_create(&(qkv_store_config){.memory_budget = 1 << 24,
                                                  .models_max = 1,
                                                  .sessions_max = FOLDS,
                                                  .prefixes_max = 100,
                                                  .policy = test_policy(4, 4, 8)});
  assert_int_equal(qkv_store_register_model(s->store, &s->model, NULL, NULL), QKV_OK);
  const qkv_session_config config = {.name = "a",
                                     .tenant = "default",
                                     .purpose = QKV_PURPOSE_ATTEND,
                                     .policy = test_policy(4, 4, 8),
                                     .ema = {.alpha = 0.9, .sample_every = 1},
                                     .durability = QKV_DURABILITY_ASYNC,
                                     .backing = &s->backing.backing,
                                     .id = FIRST_ID};
  qkv_error error = {0};
  if (qkv_store_open(s->store, &config, s->model.name, &s->session, &error) != QKV_OK) fail_msg("%s", error.text);
  for (uint32_t i = 0; i < TOKENS; i++) s->ids[i] = 3 * i;
  append_all(s);
}

static inline void teardown(scene *s) {
  qkv_session_unref(&s->session);
  qkv_store_destroy(&s->store);
  free_sequence(&s->rows);
  double_deinit(&s->backing);
  for (int i = 0; i < FOLDS; i++) free(s->backing.records[FOLDED - i].page);
}

static inline uint64_t ssd_bytes(const scene *s) {
  return qkv_account_read(qkv_session_account(s->session)).ssd_bytes;
}

static inline qkv_recency_sums sums(const scene *s) {
  return qkv_recency_read_sums(qkv_store_recency(s->store));
}

// The records of all pages, in order.
static inline void read_pages(const scene *s, uint64_t records[LAYERS * 8], size_t *count) {
  *count = 0;
  for (uint32_t i = 0; i < LAYERS; i++) {
    qkv_missing_page pages[8];
    const size_t found = qkv_session_missing(s->session, i, 0, 0, false, pages, 8);
    for (size_t page = 0; page < found; page++) records[(*count)++] = pages[page].record;
  }
}

// Whether its pages of token ids from each number on, so many at once, are the scene's first `pages`.
static inline void check_token_pages(const scene *s, qkv_session *session, size_t pages) {
  for (size_t first = 0; first <= pages + 1; first++) {
    for (size_t max = 1; max <= pages + 1; max++) {
      qkv_prefix_hash hashes[8], chain = qkv_session_root(session);
      uint32_t ids[TOKENS + QKV_PREFIX_PAGE];
      const size_t left = first < pages ? pages - first : 0, count = left < max ? left : max;
      assert_int_equal(qkv_session_read_pages(session, first, max, hashes, ids), count);
      for (size_t page = 0; count > 0 && page < first + count; page++) {
        if (page == first) assert_true(qkv_prefix_hash_equal(&hashes[0], &chain));
        chain = qkv_prefix_next(&chain, s->ids + page * QKV_PREFIX_PAGE);
        if (page >= first) assert_true(qkv_prefix_hash_equal(&hashes[page - first + 1], &chain));
        if (page >= first)
          assert_memory_equal(ids + (page - first) * QKV_PREFIX_PAGE, s->ids + page * QKV_PREFIX_PAGE,
                              QKV_PREFIX_PAGE * sizeof *ids);
      }
    }
  }
}

#endif
