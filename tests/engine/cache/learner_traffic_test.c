// Learning beneath traffic: what comes while a calibration is made or tried, and what fails then.
#include "engine/cache/learner_internal.h"
#include "tests/engine/cache/taught_store.h"

#include <pthread.h>

// A calibration, learnt from these rows.
static const qkv_calibration *learnt_from(uint64_t seed) {
  const qkv_model *model;
  int runs = 0;
  qkv_store *store = make_store(64 << 20, FIRST, &model);
  sequence rows = structured_rows(model, TOKENS, seed);
  feed(store, &rows);
  assert_true(qkv_store_learn(store, NULL, count_runs, &runs));
  const qkv_calibration *learnt = qkv_calibration_slot_get(model->calibration);
  assert_non_null(learnt);
  free_sequence(&rows);
  qkv_store_destroy(&store);
  return learnt;
}

// A trial of the calibration in force that failed is repeated, each time after twice as many pages.
static void test_a_trial_that_failed_is_due_again(void **state) {
  (void)state;
  enum { PAGES = LAYERS * TOKENS / QKV_PAGE_TOKENS };  // of one that is fed
  const qkv_model *model;
  int runs = 0;
  qkv_learner_outcome outcome;
  const qkv_calibration *learnt = learnt_from(20);
  qkv_store *store = make_store(64 << 20, FIRST, &model);
  sequence rows = structured_rows(model, TOKENS, 20);
  assert_int_equal(qkv_model_calibrate(model, learnt, QKV_CALIBRATION_STORED, false, NULL), QKV_OK);
  for (int i = 0; i < 8; i++) feed(store, &rows);  // until there has been no query for long enough
  assert_true(qkv_learner_due(model->learner));
  for (int after = 64; after <= 256; after *= 2) {
    atomic_store(&model->learner->stopped, true);
    qkv_learner_run(model->learner, &outcome);
    assert_int_equal(outcome.end, QKV_LEARNER_FAILED);
    atomic_store(&model->learner->stopped, false);
    for (int fed = 0; fed < after / PAGES; fed++) {
      assert_false(qkv_learner_due(model->learner));
      feed(store, &rows);
    }
    assert_true(qkv_learner_due(model->learner));
  }
  assert_true(qkv_store_learn(store, NULL, count_runs, &runs));
  assert_int_equal(runs, 1);
  assert_false(qkv_learner_due(model->learner));
  assert_int_equal(qkv_store_read_stats(store).learning_bytes, 0);
  free_sequence(&rows);
  qkv_calibration_unref(&learnt);
  qkv_store_destroy(&store);
}

typedef struct feeding {
  qkv_store *store;
  const sequence *rows;
  _Atomic bool stop;
} feeding;

static void *feed_on(void *context) {
  feeding *on = context;
  while (!atomic_load(&on->stop)) feed(on->store, on->rows);
  return NULL;
}

// Traffic does not take the sample from under a trial of the calibration in force.
static void test_trials_beneath_traffic(void **state) {
  (void)state;
  enum { TRIALS = 20 };
  const qkv_model *model;
  const qkv_calibration *learnt = learnt_from(21);
  qkv_store *store = make_store(64 << 20, FIRST, &model);
  sequence rows = structured_rows(model, TOKENS, 21);
  feeding on = {.store = store, .rows = &rows};
  pthread_t feeds;
  assert_int_equal(qkv_model_calibrate(model, learnt, QKV_CALIBRATION_STORED, false, NULL), QKV_OK);
  assert_int_equal(pthread_create(&feeds, NULL, feed_on, &on), 0);
  for (int runs = 0; runs < TRIALS;) {
    if (qkv_store_learn(store, NULL, count_runs, &runs)) qkvi_learner_retry(model->learner);
  }
  atomic_store(&on.stop, true);
  assert_int_equal(pthread_join(feeds, NULL), 0);
  free_sequence(&rows);
  qkv_calibration_unref(&learnt);
  qkv_store_destroy(&store);
}

static void *learn(void *context) {
  int runs = 0;
  (void)qkv_store_learn(context, NULL, count_runs, &runs);
  return NULL;
}

// Learning that starts over while a calibration is made, as at a drift, waits for the tokens of the first one.
static void test_a_start_over_beneath_a_run(void **state) {
  (void)state;
  enum { ROUNDS = 20 };
  const qkv_model *model;
  for (int round = 0; round < ROUNDS; round++) {
    qkv_store *store = make_store(64 << 20, FIRST, &model);
    sequence rows = structured_rows(model, TOKENS, 22);
    qkv_learner *learner = model->learner;
    pthread_mutex_t *lock = &learner->layers[LAYERS - 1].lock;
    pthread_t learns;
    feed(store, &rows);
    assert_int_equal(pthread_create(&learns, NULL, learn, store), 0);
    for (bool studied = false; !studied && qkv_learner_read(learner).runs == 0;) {
      assert_int_equal(pthread_mutex_lock(lock), 0);
      studied = learner->studied != NULL;
      assert_int_equal(pthread_mutex_unlock(lock), 0);
    }
    qkvi_learner_start_over(learner);
    assert_int_equal(pthread_join(learns, NULL), 0);
    assert_int_equal(qkv_learner_read(learner).runs, 1);
    assert_int_equal(atomic_load(&learner->due_at), FIRST);
    assert_true(atomic_load(&learner->fresh));
    free_sequence(&rows);
    qkv_store_destroy(&store);
  }
}

// Of a page whose rows are not finite.
static void test_an_error_that_is_not_finite(void **state) {
  (void)state;
  enum { ROWS = QKV_PAGE_TOKENS * HEADS * DIM };
  const qkv_model *model;
  static float k[ROWS], v[ROWS];
  qkv_store *store = make_store(64 << 20, FIRST, &model);
  qkv_coding *coding = qkv_coding_get(model, &model->policy, QKV_PURPOSE_ATTEND, NULL);
  const qkv_coder *coder = qkv_coding_layer(coding, 0);
  void *image = aligned_alloc(64, (coder->codec->page_bytes_max(coder) + 63) / 64 * 64);
  qkv_page_watch seen = {0};
  assert_non_null(image);
  for (size_t i = 0; i < ROWS; i++) k[i] = v[i] = (float)(i % 7) - 3;
  (void)coder->codec->encode(coder, 0, QKV_PAGE_TOKENS, QKV_FP32, k, v, NULL, image);
  for (int i = 0; i < 2 * QKV_LEARNER_WATCH_EVERY; i++) {
    for (size_t head = 0; head < HEADS; head++) k[head * DIM] = i < QKV_LEARNER_WATCH_EVERY ? 0 : INFINITY;
    qkv_learner_page(model->learner, 0, 0, QKV_PAGE_TOKENS, k, v, coder, image, &seen);
  }
  const double error = qkv_learner_read(model->learner).error;
  assert_true(error > 0 && error < 1);
  free(image);
  qkv_coding_unref(&coding);
  qkv_store_destroy(&store);
}

// While a calibration is made sessions go on to teach, and then one is brought, so that the moments are forgotten.
static void test_moments_are_forgotten_beneath_a_run(void **state) {
  (void)state;
  enum { ROUNDS = 20 };
  const qkv_model *model;
  qkv_store *first = make_store(64 << 20, FIRST, &model);
  sequence others = structured_rows(model, TOKENS, 15), rows = structured_rows(model, TOKENS, 16);
  feed(first, &others);
  (void)learn(first);
  const qkv_calibration *brought = qkv_calibration_slot_get(model->calibration);
  assert_non_null(brought);
  for (int round = 0; round < ROUNDS; round++) {
    pthread_t learns;
    qkv_store *store = make_store(64 << 20, FIRST, &model);
    feed(store, &rows);
    assert_int_equal(pthread_create(&learns, NULL, learn, store), 0);
    if (round % 2 == 0) feed(store, &rows);
    assert_int_equal(qkv_model_calibrate(model, brought, QKV_CALIBRATION_REGISTERED, true, NULL), QKV_OK);
    feed(store, &rows);
    assert_int_equal(qkv_store_read_stats(store).learning_bytes, 0);
    assert_int_equal(pthread_join(learns, NULL), 0);
    assert_int_equal(qkv_store_read_stats(store).memory.bytes_reserved, 0);
    assert_int_equal(qkv_calibration_slot_version(model->calibration), qkv_calibration_version(brought));
    qkv_store_destroy(&store);
  }
  qkv_calibration_unref(&brought);
  free_sequence(&others);
  free_sequence(&rows);
  qkv_store_destroy(&first);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_a_trial_that_failed_is_due_again),    cmocka_unit_test(test_trials_beneath_traffic),
      cmocka_unit_test(test_a_start_over_beneath_a_run),          cmocka_unit_test(test_an_error_that_is_not_finite),
      cmocka_unit_test(test_moments_are_forgotten_beneath_a_run),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
