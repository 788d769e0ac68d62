// Self-calibration: what a store's models learn from the sessions that are opened with them.
#include "engine/cache/holdout.h"
#include "engine/cache/learner_internal.h"
#include "engine/codec/calibration_internal.h"
#include "tests/engine/cache/taught_store.h"
#include "tests/engine/cache/used_session.h"

#include <pthread.h>

// The relative squared error of positions [begin, end) as they are decoded, and the version of their last page.
static double error_of(qkv_session *session, const sequence *rows, uint64_t begin, uint64_t end, uint32_t *version) {
  const qkv_layer *layer;
  assert_int_equal(qkv_session_read(session, 1, &layer, NULL), QKV_OK);
  assert_valid(layer);
  double error = 0, norm = 0;
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    const size_t count = (size_t)(end - begin) * HEADS * DIM;
    const float *exact = (part == QKV_K ? rows->k : rows->v) + begin * HEADS * DIM;
    float *decoded = malloc(count * sizeof *decoded);
    assert_non_null(decoded);
    qkv_layer_rows(layer, part, begin, end - begin, false, decoded);
    for (size_t i = 0; i < count; i++) {
      error += square((double)decoded[i] - (double)exact[i]);
      norm += square((double)exact[i]);
    }
    free(decoded);
  }
  const qkv_page_header *header = qkv_layer_page(layer, qkv_layer_page_at(layer, end - 1))->page;
  *version = header->calibration;
  qkv_session_read_done(session, 1);
  return error / norm;
}

static void test_pages_to_come_are_calibrated(void **state) {
  (void)state;
  const qkv_model *model;
  int runs = 0;
  uint32_t before, after;
  qkv_store *store = make_store(64 << 20, FIRST, &model);
  qkv_session *session = open_session(store, "s", true);
  sequence rows = structured_rows(model, TOKENS, 7);
  append_all(session, &rows, 0, FIRST - QKV_PAGE_TOKENS);
  assert_false(qkv_store_learn(store, NULL, count_runs, &runs));
  append_all(session, &rows, FIRST - QKV_PAGE_TOKENS, FIRST);
  assert_int_equal(qkv_calibration_slot_version(model->calibration), 0);
  assert_true(qkv_store_learn(store, NULL, count_runs, &runs));
  assert_int_equal(runs, 1);
  assert_false(qkv_store_learn(store, NULL, count_runs, &runs));  // not before four times as many
  append_all(session, &rows, FIRST, TOKENS);

  const double data_free = error_of(session, &rows, 0, FIRST, &before);
  const double calibrated = error_of(session, &rows, FIRST, TOKENS, &after);
  assert_int_equal(before, 0);
  assert_int_equal(after, qkv_calibration_slot_version(model->calibration));
  assert_true(after != 0);
  if (!(calibrated < data_free / 2)) fail_msg("%g calibrated, %g before", calibrated, data_free);
  const qkv_learner_stats stats = qkv_learner_read(model->learner);
  assert_int_equal(stats.runs, 1);
  assert_int_equal(stats.tokens, TOKENS);
  free_sequence(&rows);
  qkv_session_unref(&session);
  qkv_store_destroy(&store);
}

// The error of pages that are coded by what was learnt, after `planted` rows of each page that taught were outliers.
static double error_after(size_t planted, double times) {
  const qkv_model *model;
  int runs = 0;
  uint32_t version;
  naive_random random = {3};
  qkv_store *store = make_store(64 << 20, FIRST, &model);
  qkv_session *session = open_session(store, "s", true);
  sequence rows = structured_rows(model, TOKENS, 7);
  for (uint64_t page = 0; page < FIRST / QKV_PAGE_TOKENS; page++) {
    for (size_t i = 0; i < planted; i++) {
      const size_t at = (page * QKV_PAGE_TOKENS + naive_below(&random, QKV_PAGE_TOKENS)) * HEADS * DIM;
      for (size_t c = 0; c < HEADS * DIM; c++) {
        rows.k[at + c] = (float)(6 * times * naive_gaussian(&random));
        rows.v[at + c] = (float)(times * naive_gaussian(&random));
      }
    }
  }
  append_all(session, &rows, 0, FIRST);
  assert_true(qkv_store_learn(store, NULL, count_runs, &runs));
  assert_int_equal(runs, 1);
  append_all(session, &rows, FIRST, TOKENS);
  const double error = error_of(session, &rows, FIRST, TOKENS, &version);
  assert_true(version != 0);
  free_sequence(&rows);
  qkv_session_unref(&session);
  qkv_store_destroy(&store);
  return error;
}

static void test_outliers_teach_nothing(void **state) {
  (void)state;
  const double plain = error_after(0, 0);
  static const double times[] = {3, 30, 1000};
  for (size_t i = 0; i < sizeof times / sizeof times[0]; i++) {
    const double bent = error_after(3, times[i]);
    if (bent > 1.1 * plain) fail_msg("%g after outliers of %g times, %g without", bent, times[i], plain);
  }
}

static void test_sessions_may_keep_out(void **state) {
  (void)state;
  const qkv_model *model;
  int runs = 0;
  qkv_store *store = make_store(64 << 20, FIRST, &model);
  qkv_session *session = open_session(store, "s", false);
  sequence rows = structured_rows(model, TOKENS, 8);
  append_all(session, &rows, 0, TOKENS);
  assert_int_equal(qkv_learner_read(model->learner).tokens, 0);
  assert_false(qkv_store_learn(store, NULL, count_runs, &runs));
  free_sequence(&rows);
  qkv_session_unref(&session);
  qkv_store_destroy(&store);
}

// Also where the layers' overrides say that they teach.
static void test_tenants_opt_in_to_teaching_a_shared_model(void **state) {
  (void)state;
  const struct {
    const char *tenant;
    bool said, learn, teaches;
  } cases[] = {{"default", false, false, true},
               {"default", true, false, false},
               {"a", false, false, false},
               {"a", true, false, false},
               {"a", true, true, true}};
  qkv_layer_override overrides[LAYERS];
  for (uint32_t i = 0; i < LAYERS; i++) {
    overrides[i] = (qkv_layer_override){.layer = i, .policy = QKV_POLICY_UNSET};
    overrides[i].policy.learn_said = overrides[i].policy.learn = true;
  }
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const qkv_model *model;
    qkv_store *store = make_store_with(64 << 20, FIRST, overrides, LAYERS, &model);
    qkv_store_share_model(store, model);
    qkv_session *session = open_session_of(store, cases[i].tenant, "s", cases[i].said, cases[i].learn);
    sequence rows = structured_rows(model, TOKENS, 8);
    append_all(session, &rows, 0, TOKENS);
    assert_int_equal(qkv_learner_read(model->learner).tokens, cases[i].teaches ? TOKENS : 0);
    free_sequence(&rows);
    qkv_session_unref(&session);
    qkv_store_destroy(&store);
  }
}

static void test_models_of_one_name_learn_separately(void **state) {
  (void)state;
  const qkv_model *models[2];
  int runs = 0;
  qkv_store *store = make_store(64 << 20, FIRST, &models[0]);
  qkv_model other = *models[0];
  (void)snprintf(other.tenant, sizeof other.tenant, "a");
  assert_int_equal(qkv_store_register_model(store, &other, &models[1], NULL), QKV_OK);
  sequence rows = structured_rows(models[0], TOKENS, 8);
  qkv_session *session = open_session_of(store, "a", "s", false, false);
  append_all(session, &rows, 0, TOKENS);
  assert_int_equal(qkv_learner_read(models[0]->learner).tokens, 0);
  assert_true(qkv_store_learn(store, NULL, count_runs, &runs));
  assert_int_equal(qkv_calibration_slot_version(models[0]->calibration), 0);
  assert_int_not_equal(qkv_calibration_slot_version(models[1]->calibration), 0);
  qkv_session *own = open_session(store, "s", true);
  append_all(own, &rows, 0, TOKENS);
  assert_true(qkv_store_learn(store, NULL, count_runs, &runs));
  assert_int_equal(runs, 2);
  assert_int_not_equal(qkv_calibration_slot_version(models[0]->calibration), 0);
  free_sequence(&rows);
  qkv_session_unref(&session);
  qkv_session_unref(&own);
  qkv_store_destroy(&store);
}

// What was brought is not replaced by what is learnt.
static void test_a_given_calibration_stays(void **state) {
  (void)state;
  const qkv_model *model;
  int runs = 0;
  qkv_store *store = make_store(64 << 20, FIRST, &model);
  qkv_session *session = open_session(store, "s", true);
  sequence rows = structured_rows(model, TOKENS, 9);
  append_all(session, &rows, 0, FIRST);
  assert_true(qkv_store_learn(store, NULL, count_runs, &runs));
  const qkv_calibration *learnt = qkv_calibration_slot_get(model->calibration);

  const qkv_model *other;
  qkv_store *second = make_store(64 << 20, FIRST, &other);
  assert_int_equal(qkv_model_calibrate(other, learnt, QKV_CALIBRATION_REGISTERED, true, NULL), QKV_OK);
  qkv_session *taught = open_session(second, "s", true);
  append_all(taught, &rows, 0, TOKENS);
  assert_int_equal(qkv_learner_read(other->learner).tokens, 0);  // no calibration would use it
  assert_int_equal(qkv_learner_read(other->learner).bytes, 0);
  assert_false(qkv_store_learn(second, NULL, count_runs, &runs));
  assert_int_equal(qkv_calibration_slot_version(other->calibration), qkv_calibration_version(learnt));

  qkv_calibration_unref(&learnt);
  free_sequence(&rows);
  qkv_session_unref(&session);
  qkv_session_unref(&taught);
  qkv_store_destroy(&store);
  qkv_store_destroy(&second);
}

// Moments and queries are paid from the budget; where it is short of that, nothing is learnt.
static void test_no_headroom_to_learn(void **state) {
  (void)state;
  enum { QUERIES = LAYERS * QKV_HOLDOUT_QUERIES * HEADS * GROUP * DIM * sizeof(float) };
  const qkv_model *model;
  qkv_store *store = make_store(64 << 20, FIRST, &model);
  const qkv_calibration_shape shape = qkv_model_calibration_shape(model);
  const uint64_t moments = qkv_moments_bytes(&shape);
  const float query[HEADS * GROUP * DIM] = {1};
  for (uint64_t headroom = QUERIES + moments - 64; headroom <= QUERIES + moments; headroom += 64) {
    qkv_arena *arena = qkv_arena_create("memory-budget", headroom);
    qkv_calibration_slot *slot = qkv_calibration_slot_create();
    const bool teaches[LAYERS] = {true, true}, has = headroom == QUERIES + moments;
    qkv_learner *learner = qkv_learner_create(&(qkv_learner_config){
        .model = model, .teaches = teaches, .samples = true, .tokens = FIRST, .slot = slot, .arena = arena});
    qkv_learner_outcome outcome;
    for (int i = 0; i < 2; i++) qkv_learner_queries(learner, 0, 5, query, false);  // one is held out
    assert_int_equal(qkv_arena_read(arena).bytes_reserved, has ? headroom : QUERIES);
    qkv_learner_run(learner, &outcome);  // of no rows
    assert_int_equal(outcome.end, has ? QKV_LEARNER_FAILED : QKV_LEARNER_NOTHING);
    assert_int_equal(outcome.error_text.status, has ? QKV_FAILED_PRECONDITION : QKV_OK);
    qkv_learner_destroy(&learner);
    assert_int_equal(qkv_arena_read(arena).bytes_reserved, 0);
    qkv_calibration_slot_destroy(&slot);
    qkv_arena_destroy(&arena);
  }
  qkv_store_destroy(&store);
}

// Layers that stay exact have no pages, and those that the model keeps out, or gives a codec that uses no
// calibration, teach nothing: none of them is waited for.
static void test_only_teachers_are_waited_for(void **state) {
  (void)state;
  static const char *const codecs[] = {"exact", "int8", NULL};
  for (size_t way = 0; way < sizeof codecs / sizeof *codecs; way++) {
    const qkv_model *model;
    int runs = 0;
    uint32_t version;
    qkv_layer_override override = {.layer = 0, .policy = QKV_POLICY_UNSET};
    if (codecs[way] != NULL) override.policy.codec = qkv_codec_by_name(codecs[way]);
    override.policy.learn_said = codecs[way] == NULL;
    qkv_store *store = make_store_with(64 << 20, FIRST, &override, 1, &model);
    qkv_session *session = open_session(store, "s", true);
    sequence rows = structured_rows(model, TOKENS, 10);
    append_all(session, &rows, 0, FIRST);
    assert_int_equal(qkv_learner_read(model->learner).tokens, FIRST);
    assert_true(qkv_store_learn(store, NULL, count_runs, &runs));
    assert_int_equal(runs, 1);
    append_all(session, &rows, FIRST, TOKENS);
    assert_true(error_of(session, &rows, FIRST, TOKENS, &version) < error_of(session, &rows, 0, FIRST, &version) / 2);
    free_sequence(&rows);
    qkv_session_unref(&session);
    qkv_store_destroy(&store);
  }
  const qkv_model *model;
  qkv_layer_override all[LAYERS] = {{.layer = 0, .policy = QKV_POLICY_UNSET},
                                    {.layer = 1, .policy = QKV_POLICY_UNSET}};
  for (size_t i = 0; i < LAYERS; i++) all[i].policy.codec = qkv_codec_by_name("exact");
  qkv_store *store = make_store_with(64 << 20, FIRST, all, LAYERS, &model);
  assert_null(model->learner);
  assert_false(qkv_store_learn(store, NULL, count_runs, NULL));
  qkv_store_destroy(&store);
}

static bool may_learn(void *context, const qkv_model *model, uint64_t bytes) {
  assert_string_equal(model->name, "pupil");
  *(uint64_t *)context = bytes;
  return false;
}

static void never(void *context, const qkv_model *model, const qkv_learner_outcome *outcome) {
  (void)context;
  (void)model;
  (void)outcome;
  fail();
}

// One that may not be made now is asked about again, and takes no more than was said.
static void test_it_is_asked_first(void **state) {
  (void)state;
  const qkv_model *model;
  int runs = 0;
  uint64_t bytes = 0;
  qkv_store *store = make_store(64 << 20, FIRST, &model);
  qkv_session *session = open_session(store, "s", true);
  sequence rows = structured_rows(model, TOKENS, 17);
  append_all(session, &rows, 0, FIRST);
  for (int i = 0; i < 2; i++) assert_false(qkv_store_learn(store, may_learn, never, &bytes));
  assert_int_equal(qkv_calibration_bytes_held(), 0);
  assert_true(qkv_store_learn(store, NULL, count_runs, &runs));
  assert_int_equal(runs, 1);
  assert_in_range(qkv_calibration_bytes_held(), bytes / 2, bytes);
  free_sequence(&rows);
  qkv_session_unref(&session);
  qkv_store_destroy(&store);
}

static void test_learning_stops(void **state) {
  (void)state;
  const qkv_model *model;
  int runs = 0;
  qkv_learner_outcome outcome;
  qkv_store *store = make_store(64 << 20, FIRST, &model);
  qkv_session *session = open_session(store, "s", true);
  sequence rows = structured_rows(model, TOKENS, 11);
  append_all(session, &rows, 0, FIRST);
  assert_true(qkv_learner_due(model->learner));
  qkv_store_stop_learning(store);
  assert_false(qkv_store_learn(store, NULL, count_runs, &runs));
  qkv_learner_run(model->learner, &outcome);  // as one that ran would find it
  assert_int_equal(outcome.end, QKV_LEARNER_FAILED);
  assert_int_equal(outcome.error_text.status, QKV_CANCELLED);
  assert_int_equal(qkv_calibration_slot_version(model->calibration), 0);
  free_sequence(&rows);
  qkv_session_unref(&session);
  qkv_store_destroy(&store);
}

// The moments are there as long as a calibration is to follow; other rows, which are coded worse, bring them back.
static void test_a_drift_is_learnt_from(void **state) {
  (void)state;
  enum { FEW = 64, MOST = 400 };  // sessions, 16 pages each; every 16th page is measured
  const qkv_model *model;
  int runs = 0, fed = 0;
  qkv_store *store = make_store(64 << 20, FEW, &model);
  sequence rows = structured_rows(model, TOKENS, 12), others = make_sequence(model, TOKENS, 13);
  for (; runs < QKV_LEARNER_RUNS; fed++) {
    assert_true(fed < MOST);
    feed(store, &rows);
    if (runs < QKV_LEARNER_RUNS - 1) assert_true(qkv_store_read_stats(store).learning_bytes > 0);
    (void)qkv_store_learn(store, NULL, count_runs, &runs);
  }
  for (fed = 0; fed < 80; fed++) feed(store, &rows);  // until the error has settled
  assert_int_equal(qkv_store_read_stats(store).learning_bytes, 0);
  assert_int_equal(qkv_store_read_stats(store).memory.bytes_reserved, 0);
  assert_false(qkv_store_learn(store, NULL, count_runs, &runs));
  const uint32_t version = qkv_calibration_slot_version(model->calibration);
  const double before = qkv_learner_read(model->learner).error;

  // Another one is made, which may be refused, as these rows are noise, and the one before is withdrawn.
  for (fed = 0; qkv_learner_read(model->learner).runs == QKV_LEARNER_RUNS; fed++) {
    assert_true(fed < MOST);
    feed(store, &others);
    (void)qkv_store_learn(store, NULL, count_runs, &runs);
  }
  assert_int_equal(qkv_learner_read(model->learner).runs, QKV_LEARNER_RUNS + 1);
  (void)qkv_store_learn(store, NULL, count_runs, &runs);
  assert_true(qkv_learner_read(model->learner).error > before);
  assert_true(qkv_calibration_slot_version(model->calibration) != version);
  free_sequence(&rows);
  free_sequence(&others);
  qkv_store_destroy(&store);
}

// One that could not be made is due again once as many tokens have come as the first one takes; not at once, and not
// as late as one that follows one that was made.
static void test_one_that_failed_is_due_again(void **state) {
  (void)state;
  const qkv_model *model;
  int runs = 0;
  qkv_learner_outcome outcome;
  qkv_store *store = make_store(64 << 20, FIRST, &model);
  qkv_session *session = open_session(store, "s", true);
  sequence rows = structured_rows(model, TOKENS, 18);
  append_all(session, &rows, 0, FIRST);
  assert_true(qkv_learner_due(model->learner));
  qkv_learner_stop(model->learner);
  qkv_learner_run(model->learner, &outcome);
  assert_int_equal(outcome.end, QKV_LEARNER_FAILED);
  atomic_store(&model->learner->stopped, false);
  assert_int_equal(qkv_learner_read(model->learner).tokens, FIRST);
  assert_false(qkv_learner_due(model->learner));
  append_all(session, &rows, FIRST, TOKENS - QKV_PAGE_TOKENS);
  assert_false(qkv_learner_due(model->learner));
  append_all(session, &rows, TOKENS - QKV_PAGE_TOKENS, TOKENS);
  assert_true(qkv_learner_due(model->learner));
  assert_true(qkv_store_learn(store, NULL, count_runs, &runs));
  assert_int_equal(runs, 1);
  free_sequence(&rows);
  qkv_session_unref(&session);
  qkv_store_destroy(&store);
}

typedef struct watching {
  qkv_learner *learner;
  _Atomic bool stop, lost;
} watching;

// Whether the learner ever takes nothing more, though another calibration is to follow.
static void *watch(void *context) {
  watching *on = context;
  while (!atomic_load(&on->stop)) {
    if (!qkvi_learner_wants(on->learner)) atomic_store(&on->lost, true);
  }
  return NULL;
}

// Its own calibration is not taken for a brought one at any moment while the next one takes its place.
static void test_its_own_is_not_taken_for_brought(void **state) {
  (void)state;
  enum { FEW = 64, ROUNDS = 20, MOST = 400 };
  const qkv_model *model;
  for (int round = 0; round < ROUNDS; round++) {
    int runs = 0, fed = 0;
    qkv_store *store = make_store(64 << 20, FEW, &model);
    sequence rows = structured_rows(model, TOKENS, 19);
    watching on = {.learner = model->learner};
    pthread_t watches;
    assert_int_equal(pthread_create(&watches, NULL, watch, &on), 0);
    for (; runs < QKV_LEARNER_RUNS - 1; fed++) {
      assert_true(fed < MOST);
      feed(store, &rows);
      (void)qkv_store_learn(store, NULL, count_runs, &runs);
    }
    atomic_store(&on.stop, true);
    assert_int_equal(pthread_join(watches, NULL), 0);
    assert_false(atomic_load(&on.lost));
    free_sequence(&rows);
    qkv_store_destroy(&store);
  }
}

// Codings that no page is coded by any more are dropped.
static void test_codings_go(void **state) {
  (void)state;
  const qkv_model *model;
  int runs = 0;
  qkv_store *store = make_store(64 << 20, FIRST, &model);
  qkv_session *session = open_session(store, "s", true), *empty = open_session(store, "empty", true);
  sequence rows = structured_rows(model, TOKENS, 14);
  use_session(session);
  use_session(empty);
  const uint64_t one = qkv_coding_bytes_held();  // both have the same
  assert_true(one > 0);
  assert_int_equal(qkv_store_read_stats(store).calibration_bytes, one);
  append_all(session, &rows, 0, FIRST);
  assert_true(qkv_store_learn(store, NULL, count_runs, &runs));
  assert_true(qkv_calibration_bytes_held() > 0);
  assert_int_equal(qkv_coding_bytes_held(), one);
  append_all(session, &rows, FIRST, TOKENS);  // has pages of both
  append_all(empty, &rows, 0, QKV_PAGE_TOKENS);
  const uint64_t calibrated = qkv_coding_bytes_held() - one;  // which has more to keep
  assert_true(calibrated >= one && calibrated < 2 * one);
  assert_int_equal(qkv_session_truncate(session, 0, NULL, 0, NULL), QKV_OK);
  assert_int_equal(qkv_coding_bytes_held(), calibrated);
  append_all(session, &rows, 0, TOKENS);
  assert_int_equal(qkv_coding_bytes_held(), calibrated);
  free_sequence(&rows);
  qkv_session_unref(&session);
  qkv_session_unref(&empty);
  qkv_store_destroy(&store);
  assert_int_equal(qkv_coding_bytes_held(), 0);
  assert_int_equal(qkv_calibration_bytes_held(), 0);
}

// Codebooks for what the model's layers and its sessions are coded with; not for others.
static void test_sections_are_learnt(void **state) {
  (void)state;
  const qkv_model *model;
  int runs = 0;
  qkv_layer_override override = {.layer = 0, .policy = QKV_POLICY_UNSET};
  override.policy.codec = qkv_codec_by_name("pq");
  override.policy.bits_k = override.policy.bits_v = 2;
  qkv_store *store = make_store_with(64 << 20, FIRST, &override, 1, &model);
  const uint64_t before = qkv_learner_cost(model->learner);
  qkv_policy policy = model->policy;
  policy.codec = override.policy.codec;
  policy.bits_k = policy.bits_v = 1;
  qkv_learner_note_kind(model->learner, &policy, QKV_PURPOSE_ATTEND);
  policy.codec = qkv_codec_by_name("commvq");
  policy.bits_k = 2;
  qkv_learner_note_kind(model->learner, &policy, QKV_PURPOSE_ATTEND);
  const uint64_t coordinates = (uint64_t)LAYERS * HEADS * DIM;
  const uint64_t sections = 64 + 512 * 2 * coordinates + 64 + 2 * 64 * coordinates;
  assert_int_equal(qkv_learner_cost(model->learner) - before, sections + sections / 4);
  sequence rows = structured_rows(model, TOKENS, 21);
  feed(store, &rows);
  assert_true(qkv_store_learn(store, NULL, count_runs, &runs));
  assert_int_equal(runs, 1);
  const qkv_calibration *learnt = qkv_calibration_slot_get(model->calibration);
  assert_non_null(qkvi_calibration_section(learnt, override.policy.codec->id, 1, LAYERS - 1, HEADS - 1));
  assert_non_null(qkvi_calibration_section(learnt, override.policy.codec->id, 2, 0, 0));
  assert_null(qkvi_calibration_section(learnt, override.policy.codec->id, 4, 0, 0));
  assert_non_null(qkvi_calibration_section(learnt, policy.codec->id, 2, LAYERS - 1, HEADS - 1));
  assert_null(qkvi_calibration_section(learnt, policy.codec->id, 1, 0, 0));
  qkv_calibration_unref(&learnt);
  free_sequence(&rows);
  qkv_store_destroy(&store);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_pages_to_come_are_calibrated),
      cmocka_unit_test(test_outliers_teach_nothing),
      cmocka_unit_test(test_sessions_may_keep_out),
      cmocka_unit_test(test_tenants_opt_in_to_teaching_a_shared_model),
      cmocka_unit_test(test_models_of_one_name_learn_separately),
      cmocka_unit_test(test_a_given_calibration_stays),
      cmocka_unit_test(test_no_headroom_to_learn),
      cmocka_unit_test(test_only_teachers_are_waited_for),
      cmocka_unit_test(test_learning_stops),
      cmocka_unit_test(test_it_is_asked_first),
      cmocka_unit_test(test_a_drift_is_learnt_from),
      cmocka_unit_test(test_one_that_failed_is_due_again),
      cmocka_unit_test(test_its_own_is_not_taken_for_brought),
      cmocka_unit_test(test_sections_are_learnt),
      cmocka_unit_test(test_codings_go),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
