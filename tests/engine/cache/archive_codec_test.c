// The archive codec: which sessions get it, and that calibrations are tried with it.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
// cmocka wants the above first
#include <cmocka.h>

#include "engine/cache/session_spill.h"
#include "tests/engine/cache/taught_store.h"

static qkv_store *make_archive(const char *codec, qkv_layer_override *overrides, const qkv_policy *own,
                               const qkv_model **model) {
  return make_store_of(64 << 20, FIRST, codec != NULL ? qkv_codec_by_name(codec) : NULL, own, overrides,
                       overrides != NULL, model);
}

// Of an archived session to be fetched, but for what is changed; the session stays open where `out` is not NULL.
static const char *codec_of(qkv_store *store, void (*change)(qkv_session_config *config), qkv_session **out) {
  qkv_session_config config = {.purpose = QKV_PURPOSE_FETCH, .policy = QKV_POLICY_UNSET, .archived = true};
  qkv_session *session = NULL;
  qkv_error error = {0};
  uint64_t freed;
  config.tenant = "default";
  config.name = "archive";
  if (change != NULL) change(&config);
  if (qkv_store_open(store, &config, "pupil", &session, &error) != QKV_OK) fail_msg("%s", error.text);
  const char *name = qkv_session_config_of(session)->policy.codec->name;
  if (out != NULL) {
    *out = session;
    return name;
  }
  qkv_session_unref(&session);
  assert_int_equal(qkv_store_close(store, "default", "archive", &freed, NULL), QKV_OK);
  return name;
}

static void teach(qkv_store *store, const qkv_model *model) {
  int runs = 0;
  sequence rows = structured_rows(model, TOKENS, 7);
  feed(store, &rows);
  assert_true(qkv_store_learn(store, NULL, count_runs, &runs));
  assert_int_equal(runs, 1);
  assert_int_not_equal(qkv_calibration_slot_version(model->calibration), 0);
  free_sequence(&rows);
}

static void attended(qkv_session_config *config) {
  config->purpose = QKV_PURPOSE_ATTEND;
}

static void with_tiers(qkv_session_config *config) {
  config->archived = false;
}

static void named(qkv_session_config *config) {
  config->policy.codec = qkv_codec_by_id(QKV_CODEC_EMBEDDED);
}

static void anchored(qkv_session_config *config) {
  config->policy.anchor_said = true;
  config->policy.anchor.kind = QKV_ANCHOR_MEAN;
}

static void factored(qkv_session_config *config) {
  config->policy.low_rank_said = true;
  config->policy.low_rank.mode = QKV_LOW_RANK_PREDICTOR;
}

static void with_few_bits(qkv_session_config *config) {
  config->policy.bits_v = 0.5;
}

static void with_bits(qkv_session_config *config) {
  config->policy.bits_k = 3.125;
}

static void sessions_that_are_fetched_under_a_calibration_have_it(void **state) {
  (void)state;
  void (*const others[])(qkv_session_config *) = {attended, with_tiers, named, anchored, factored, with_few_bits};
  const qkv_model *model;
  qkv_session *session;
  qkv_store *store = make_archive("ecsq", NULL, NULL, &model);
  assert_string_equal(codec_of(store, NULL, NULL), "embedded");  // data-free
  teach(store, model);
  for (size_t i = 0; i < sizeof others / sizeof *others; i++)
    assert_string_equal(codec_of(store, others[i], NULL), "embedded");
  assert_string_equal(codec_of(store, with_bits, NULL), "ecsq");
  assert_string_equal(codec_of(store, NULL, &session), "ecsq");
  // Its pages are made with the calibration.
  sequence rows = structured_rows(model, TOKENS, 8);
  append_all(session, &rows, 0, TOKENS);
  qkv_session_info info;
  uint64_t lengths[LAYERS];
  qkv_session_read_info(session, &info, lengths);
  assert_int_equal(info.usage.tokens_coded, LAYERS * TOKENS);
  free_sequence(&rows);
  qkv_session_unref(&session);
  // It is data-free from now on.
  qkv_calibration_slot_set(model->calibration, NULL);
  uint64_t freed;
  assert_int_equal(qkv_store_close(store, "default", "archive", &freed, NULL), QKV_OK);
  assert_string_equal(codec_of(store, NULL, NULL), "embedded");
  qkv_store_destroy(&store);
}

static void models_that_say_otherwise_do_not(void **state) {
  (void)state;
  qkv_layer_override few = {.layer = 1, .policy = QKV_POLICY_UNSET};
  qkv_layer_override mean = {.layer = 1, .policy = QKV_POLICY_UNSET};
  qkv_layer_override exact = {.layer = 1, .policy = QKV_POLICY_UNSET};
  qkv_policy named_policy = QKV_POLICY_UNSET;
  few.policy.bits_k = 0.5;
  mean.policy.anchor_said = true;
  mean.policy.anchor.kind = QKV_ANCHOR_MEAN;
  exact.policy.codec = qkv_codec_by_name("kivi");
  exact.policy.bits_k = exact.policy.bits_v = 4;
  exact.policy.learn_said = exact.policy.learn = true;
  named_policy.codec = qkv_codec_by_id(QKV_CODEC_EMBEDDED);
  const struct {
    const char *archive;
    qkv_layer_override *override;
    const qkv_policy *own;
    const char *codec;
  } rows[] = {{NULL, NULL, NULL, "embedded"},
              {"ecsq", &few, NULL, "embedded"},
              {"ecsq", &mean, NULL, "embedded"},
              {"ecsq", NULL, &named_policy, "embedded"},
              {"ecsq", &exact, NULL, "ecsq"}};
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    const qkv_model *model;
    qkv_store *store = make_archive(rows[i].archive, rows[i].override, rows[i].own, &model);
    teach(store, model);
    assert_string_equal(codec_of(store, NULL, NULL), rows[i].codec);
    qkv_store_destroy(&store);
  }
}

static void note_outcome(void *context, const qkv_model *model, const qkv_learner_outcome *outcome) {
  (void)model;
  assert_int_equal(outcome->end, QKV_LEARNER_ACCEPTED);
  assert_false(outcome->archive_refused);
  *(qkv_learner_outcome *)context = *outcome;
}

// Before a session has it. What others are worth is another figure.
static void calibrations_are_tried_with_it(void **state) {
  (void)state;
  const char *const codecs[] = {NULL, "ecsq"};
  qkv_learner_outcome outcomes[2];
  for (size_t i = 0; i < 2; i++) {
    const qkv_model *model;
    qkv_store *store = make_archive(codecs[i], NULL, NULL, &model);
    sequence rows = structured_rows(model, TOKENS, 7);
    feed(store, &rows);
    assert_true(qkv_store_learn(store, NULL, note_outcome, &outcomes[i]));
    free_sequence(&rows);
    qkv_store_destroy(&store);
  }
  assert_true(outcomes[0].archive_error == 0 && outcomes[0].archive_data_free == 0);
  assert_true(outcomes[1].error == outcomes[0].error && outcomes[1].data_free == outcomes[0].data_free);
  // It errs less than embedded does.
  assert_true(outcomes[1].archive_error > 0 && outcomes[1].archive_error < outcomes[1].error);
  assert_true(outcomes[1].archive_data_free > outcomes[1].archive_error);
}

static void keep_outcome(void *context, const qkv_model *model, const qkv_learner_outcome *outcome) {
  (void)model;
  *(qkv_learner_outcome *)context = *outcome;
}

static qkv_calibration_state state_of(const qkv_model *model) {
  qkv_calibration_state state;
  qkv_learner_read_state(model->learner, &state);
  return state;
}

// A codec whose 2 bits are 1.5 on average errs more with the calibration than what sessions have without: it alone is
// refused, and sessions to be fetched have embedded, with the calibration.
static void one_that_is_worse_is_refused_alone(void **state) {
  (void)state;
  const qkv_model *model;
  qkv_session *session;
  qkv_learner_outcome outcome = {0};
  qkv_store *store = make_archive("turboquant-outliers", NULL, NULL, &model);
  sequence rows = structured_rows(model, TOKENS, 7);
  feed(store, &rows);
  assert_true(qkv_store_learn(store, NULL, keep_outcome, &outcome));
  assert_int_equal(outcome.end, QKV_LEARNER_ACCEPTED);
  assert_true(outcome.archive_refused && outcome.archive_error > outcome.archive_data_free);
  assert_true(outcome.error < outcome.data_free && outcome.dropped == 0);
  const qkv_calibration_state now = state_of(model);
  assert_true(now.version != 0 && now.archive_refused && now.refused == 0);
  assert_string_equal(codec_of(store, attended, NULL), "embedded");
  assert_string_equal(codec_of(store, NULL, &session), "embedded");
  append_all(session, &rows, 0, TOKENS);
  const qkv_calibration *made = NULL;
  assert_int_equal(qkv_session_calibrations(session, 0, &made, 1), 1);
  assert_int_equal(qkv_calibration_version(made), now.version);
  qkv_calibration_unref(&made);
  qkv_session_unref(&session);
  free_sequence(&rows);
  qkv_store_destroy(&store);
}

// A calibration says so itself, so that it is so after a restart, too, before any trial.
static void it_stays_refused_where_the_calibration_is_brought_again(void **state) {
  (void)state;
  const qkv_model *model, *other;
  qkv_store *store = make_archive("ecsq", NULL, NULL, &model), *next = make_archive("ecsq", NULL, NULL, &other);
  teach(store, model);
  assert_string_equal(codec_of(store, NULL, NULL), "ecsq");
  assert_false(state_of(model).archive_refused);
  const qkv_calibration *learnt = qkv_calibration_slot_get(model->calibration);
  qkv_calibration *refused = NULL, *read = NULL;
  assert_int_equal(qkv_calibration_refuse_archive(&learnt, &refused, NULL), QKV_OK);
  size_t size;
  const void *bytes = qkv_calibration_bytes(refused, &size);
  qkv_error error = {0};
  if (qkv_calibration_read(bytes, size, &read, &error) != QKV_OK) fail_msg("%s", error.text);
  assert_true(qkv_calibration_archive_refused(read));
  assert_int_equal(qkv_model_calibrate(other, read, QKV_CALIBRATION_STORED, false, NULL), QKV_OK);
  assert_int_equal(state_of(other).version, qkv_calibration_version(refused));
  assert_true(state_of(other).archive_refused);
  assert_string_equal(codec_of(next, NULL, NULL), "embedded");
  // A trial in which the archive codec does well does not take it back.
  qkv_learner_outcome outcome = {0};
  sequence rows = structured_rows(other, TOKENS, 9);
  feed(next, &rows);
  assert_true(qkv_store_learn(next, NULL, keep_outcome, &outcome));
  assert_int_equal(outcome.end, QKV_LEARNER_ACCEPTED);
  assert_false(outcome.archive_refused);
  assert_true(state_of(other).archive_refused && state_of(other).tried);
  assert_string_equal(codec_of(next, NULL, NULL), "embedded");
  free_sequence(&rows);
  const qkv_calibration *made = refused, *brought = read;
  qkv_calibration_unref(&made);
  qkv_calibration_unref(&brought);
  qkv_store_destroy(&store);
  qkv_store_destroy(&next);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(sessions_that_are_fetched_under_a_calibration_have_it),
      cmocka_unit_test(models_that_say_otherwise_do_not),
      cmocka_unit_test(calibrations_are_tried_with_it),
      cmocka_unit_test(one_that_is_worse_is_refused_alone),
      cmocka_unit_test(it_stays_refused_where_the_calibration_is_brought_again),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
