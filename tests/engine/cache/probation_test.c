// Calibrations on probation: whatever the traffic, what a store's models learn from it does not make attention worse
// than the data-free code at the same bits.
#include "engine/cache/probation.h"
#include "engine/cache/store.h"
#include "tests/engine/cache/fixture.h"

#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

enum { LAYERS = 2, HEADS = 2, GROUP = 2, DIM = 32, TOKENS = 512, PIECE = 64, LEARN = 2048, FED = 8 };

#define WORSE 1.1     // than data-free, that nothing may be
#define NOTHING 1e-3  // an error that is too small to compare

// ---- Traffic ----

typedef enum traffic {
  STRUCTURED,      // what a calibration is good for
  OTHERS,          // the same, in other directions
  EQUAL,           // all rows are one row, after RoPE
  REPEATED,        // one token: equal before RoPE
  ONE_DEAD,        // a head of zeros
  LARGE,           // rows of 1e4
  SINKS,           // a first token that nearly all attention goes to, whose rows are unlike the others
  NOISE,           // without structure
  STARTING_HEADS,  // a head that is structured first and noise later
} traffic;

typedef struct stream {
  sequence rows;
  float *queries;  // [tokens][q_heads][key_dim], after RoPE
} stream;

static void fill_row(float *row, const float *noise, traffic kind) {
  // Some directions of the kind's own.
  uint64_t state = kind == OTHERS ? 77 : 5;
  float mean[DIM], first[DIM], second[DIM];
  for (size_t i = 0; i < DIM; i++) {
    mean[i] = 2 * random_normal(&state);
    first[i] = random_normal(&state);
    second[i] = random_normal(&state);
  }
  for (size_t i = 0; i < DIM; i++) {
    row[i] = mean[i] + noise[0] * first[i] + noise[1] * second[i] + 0.05f * noise[i];
  }
}

static void shape_token(traffic kind, uint64_t token, uint32_t head, float *k, float *v, float *q) {
  const bool plain = kind == NOISE || (kind == STARTING_HEADS && head == 1);
  float noise[3][DIM];
  memcpy(noise[0], k, sizeof noise[0]);
  memcpy(noise[1], v, sizeof noise[1]);
  memcpy(noise[2], q, sizeof noise[2]);
  if (!plain) {
    fill_row(k, noise[0], kind);
    fill_row(v, noise[1], kind);
    // Queries look for the first direction, and not much for the mean.
    for (size_t i = 0; i < DIM; i++) q[i] = 0.5f * noise[2][i] + 0.1f * k[i];
  }
  if (kind == SINKS) {
    for (size_t i = 0; i < DIM; i++) {
      q[i] = 0.4f * noise[2][i] + (i % 4 == 0 ? 1.5f : 0);
      if (token != 0) continue;
      k[i] = i % 4 == 0 ? 6.0f : -(float)(i % 3);
      v[i] = 0.02f * noise[1][i];
    }
  }
  if (kind == ONE_DEAD && head == 1) memset(k, 0, DIM * sizeof *k);
  if (kind == ONE_DEAD && head == 1) memset(v, 0, DIM * sizeof *v);
  for (size_t i = 0; i < DIM && kind == LARGE; i++) {
    k[i] = fmaxf(fminf(k[i] * 2000, 10000), -10000);
    v[i] = fmaxf(fminf(v[i] * 2000, 10000), -10000);
    q[i] *= 1e-3f;
  }
  if (kind == EQUAL || kind == REPEATED) {
    for (size_t i = 0; i < DIM; i++) {
      k[i] = (float)(i % 5) - 1.5f;
      v[i] = (float)(i % 7) - 2.5f;
    }
  }
}

static stream make_stream(const qkv_model *model, traffic kind, uint64_t seed) {
  stream made = {.rows = make_sequence(model, TOKENS, seed),
                 .queries = random_floats(seed + 2, (size_t)TOKENS * HEADS * GROUP * DIM)};
  for (uint64_t t = 0; t < TOKENS; t++) {
    for (uint32_t head = 0; head < HEADS; head++) {
      float *k = made.rows.k + (t * HEADS + head) * DIM, *v = made.rows.v + (t * HEADS + head) * DIM;
      for (uint32_t g = 0; g < GROUP; g++) {
        float *q = made.queries + ((t * HEADS + head) * GROUP + g) * DIM, k_copy[DIM], v_copy[DIM];
        memcpy(k_copy, k, sizeof k_copy);
        memcpy(v_copy, v, sizeof v_copy);
        shape_token(kind, t, head, g + 1 < GROUP ? k_copy : k, g + 1 < GROUP ? v_copy : v, q);
        qkv_rope_forward(&model->rope, q, t);
      }
      if (kind != EQUAL) qkv_rope_forward(&model->rope, k, t);
    }
  }
  round_to(model->dtype, made.rows.k, (size_t)TOKENS * HEADS * DIM);
  round_to(model->dtype, made.rows.v, (size_t)TOKENS * HEADS * DIM);
  return made;
}

static void free_stream(stream *made) {
  free_sequence(&made->rows);
  free(made->queries);
}

// ---- Stores and sessions ----

static qkv_store *make_store_of(const qkv_codec *codec, double bits, uint64_t tokens, const qkv_model **model) {
  const qkv_store_config config = {
      .memory_budget = 64 << 20,
      .models_max = 4,
      .sessions_max = 16,
      .policy = {.codec = codec, .bits_k = bits, .bits_v = bits, .learn_said = true, .learn = true},
      .calibrate_tokens = tokens,
      .archive_codec = qkv_codec_by_name("ecsq")};
  const qkv_model said = {.name = "odd",
                          .layers = LAYERS,
                          .kv_heads = HEADS,
                          .q_heads = HEADS * GROUP,
                          .key_dim = DIM,
                          .value_dim = DIM,
                          .dtype = QKV_FP16,
                          .rope = {.theta = 10000},
                          .policy = QKV_POLICY_UNSET};
  qkv_store *store = qkv_store_create(&config);
  assert_int_equal(qkv_store_register_model(store, &said, model, NULL), QKV_OK);
  return store;
}

static qkv_store *make_store(double bits, uint64_t tokens, const qkv_model **model) {
  return make_store_of(qkv_codec_by_id(QKV_CODEC_EMBEDDED), bits, tokens, model);
}

// To be fetched: by the archive codec, unless another one is named.
static qkv_session *open_session_of(qkv_store *store, const char *name, qkv_purpose purpose, const qkv_codec *codec,
                                    const qkv_codec *codec_v) {
  qkv_session_config config = {.tenant = "default", .purpose = purpose, .policy = QKV_POLICY_UNSET, .archived = true};
  config.name = name;
  config.policy.codec = codec;
  config.policy.codec_v = codec_v;
  qkv_session *session = NULL;
  qkv_error error = {0};
  if (qkv_store_open(store, &config, "odd", &session, &error) != QKV_OK) fail_msg("%s", error.text);
  return session;
}

static qkv_session *open_session(qkv_store *store, const char *name, qkv_purpose purpose, bool exact) {
  return open_session_of(store, name, purpose, exact ? qkv_codec_by_name("exact") : NULL, NULL);
}

static void close_session(qkv_store *store, qkv_session **session, const char *name) {
  uint64_t freed;
  qkv_session_unref(session);
  assert_int_equal(qkv_store_close(store, "default", name, &freed, NULL), QKV_OK);
}

static void append_piece(qkv_session *session, uint32_t layer, const stream *rows, uint64_t begin, uint64_t end) {
  row_pair pair;
  uint64_t appended, length;
  qkv_error error = {0};
  make_pair(&pair, &rows->rows, begin, end, QKV_FP32);
  if (qkv_session_append(session, layer, begin, &pair.k.tensor, &pair.v.tensor, false, &appended, &length, &error) !=
      QKV_OK)
    fail_msg("%s", error.text);
  free_pair(&pair);
}

// The last `queries` of the tokens below `end`; out [queries][q_heads][DIM].
static void attend(qkv_session *session, uint32_t layer, const stream *rows, uint64_t end, uint64_t queries,
                   float *out) {
  const qkv_layer *locked;
  test_tensor q;
  float *lse = malloc(queries * HEADS * GROUP * sizeof *lse);
  assert_non_null(lse);
  make_tensor(&q, QKV_FP32, rows->queries + (end - queries) * HEADS * GROUP * DIM, (int64_t)queries, HEADS * GROUP,
              DIM);
  assert_int_equal(qkv_session_read(session, layer, &locked, NULL), QKV_OK);
  const qkv_attend request = {.layer = locked, .position = end - queries, .q = q.tensor, .out = out, .lse = lse};
  assert_int_equal(qkv_attend_check(&request, NULL), QKV_OK);
  qkv_attend_run(NULL, &request, 1);
  qkv_session_read_done(session, layer);
  free_tensor(&q);
  free(lse);
}

// A sequence as a model's loop feeds it: rows, then their queries.
static void feed(qkv_session *session, const stream *rows) {
  float out[8 * HEADS * GROUP * DIM];
  for (uint64_t begin = 0; begin < TOKENS; begin += PIECE) {
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
      append_piece(session, layer, rows, begin, begin + PIECE);
      attend(session, layer, rows, begin + PIECE, 8, out);
    }
  }
}

typedef struct ends {
  int accepted, refused, withdrawn;
  qkv_learner_outcome last;
} ends;

static void note_end(void *context, const qkv_model *model, const qkv_learner_outcome *outcome) {
  ends *all = context;
  (void)model;
  if (outcome->end == QKV_LEARNER_FAILED) fail_msg("%s", outcome->error_text.text);
  all->accepted += outcome->end == QKV_LEARNER_ACCEPTED;
  all->refused += outcome->end == QKV_LEARNER_REFUSED;
  all->withdrawn += outcome->end == QKV_LEARNER_WITHDRAWN;
  if (outcome->end != QKV_LEARNER_NOTHING) all->last = *outcome;
}

static void teach(qkv_store *store, const qkv_model *model, traffic kind, int sessions, uint64_t seed, ends *seen) {
  for (int i = 0; i < sessions; i++) {
    stream rows = make_stream(model, kind, seed + 10 * (uint64_t)i);
    qkv_session *session = open_session(store, "fed", QKV_PURPOSE_ATTEND, false);
    feed(session, &rows);
    close_session(store, &session, "fed");
    free_stream(&rows);
    (void)qkv_store_learn(store, NULL, note_end, seen);
  }
}

// ---- The error of attention ----

// The relative error of outputs at the end of a sequence of this traffic, of the store's sessions.
static double error_of(qkv_store *store, const qkv_model *model, traffic kind, qkv_purpose purpose, uint64_t seed) {
  enum { QUERIES = 16 };
  static float exact[QUERIES * HEADS * GROUP * DIM], coded[QUERIES * HEADS * GROUP * DIM];
  double missed = 0, squares = 0;
  for (uint64_t round = 0; round < 4; round++) {
    stream rows = make_stream(model, kind, seed + 1000 * round);
    qkv_session *plain = open_session(store, "exact", purpose, true);
    qkv_session *session = open_session(store, "coded", purpose, false);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
      append_piece(plain, layer, &rows, 0, TOKENS);
      append_piece(session, layer, &rows, 0, TOKENS);
      attend(plain, layer, &rows, TOKENS, QUERIES, exact);
      attend(session, layer, &rows, TOKENS, QUERIES, coded);
      for (size_t i = 0; i < sizeof exact / sizeof *exact; i++) {
        missed += square((double)coded[i] - (double)exact[i]);
        squares += square((double)exact[i]);
      }
    }
    close_session(store, &plain, "exact");
    close_session(store, &session, "coded");
    free_stream(&rows);
  }
  return sqrt(missed / squares);
}

static void expect_not_worse(qkv_store *store, double bits, traffic kind, uint64_t seed, const char *what) {
  const qkv_model *model, *other;
  qkv_store *data_free = make_store(bits, 0, &other);
  assert_int_equal(qkv_store_model(store, "default", "odd", &model, NULL), QKV_OK);
  for (qkv_purpose purpose = QKV_PURPOSE_ATTEND; purpose <= QKV_PURPOSE_FETCH; purpose++) {
    const double ours = error_of(store, model, kind, purpose, seed);
    const double theirs = error_of(data_free, other, kind, purpose, seed);
    print_message("%s, %g bits, purpose %d: %.4g, data-free %.4g\n", what, bits, (int)purpose, ours, theirs);
    if (ours > NOTHING && ours > WORSE * theirs)
      fail_msg("%s at %g bits: %g, data-free %g", what, bits, ours, theirs);
  }
  qkv_store_destroy(&data_free);
}

static void learn_and_compare(traffic kind, const char *what, bool must_be_used) {
  static const double bits[] = {2, 4};
  for (size_t i = 0; i < sizeof bits / sizeof *bits; i++) {
    const qkv_model *model;
    ends seen = {0};
    qkv_store *store = make_store(bits[i], LEARN, &model);
    teach(store, model, kind, FED, 1, &seen);
    assert_true(seen.accepted + seen.refused >= 1);
    qkv_calibration_state state;
    qkv_learner_read_state(model->learner, &state);
    print_message("%s, %g bits: %d accepted, %d refused, %u of %u parts fell back; %.3g, data-free %.3g; %s\n", what,
                  bits[i], seen.accepted, seen.refused, state.dropped, state.parts, state.error, state.data_free,
                  seen.last.text);
    if (must_be_used) assert_true(state.version != 0 && state.dropped == 0);
    assert_int_equal(state.version, qkv_calibration_slot_version(model->calibration));
    expect_not_worse(store, bits[i], kind, 100000, what);
    qkv_store_destroy(&store);
  }
}

static void test_structure_is_learnt(void **state) {
  (void)state;
  learn_and_compare(STRUCTURED, "structured", true);
}

static void test_equal_rows(void **state) {
  (void)state;
  learn_and_compare(EQUAL, "equal rows", false);
}

static void test_a_repeated_token(void **state) {
  (void)state;
  learn_and_compare(REPEATED, "a repeated token", false);
}

static void test_a_dead_head(void **state) {
  (void)state;
  learn_and_compare(ONE_DEAD, "a dead head", false);
}

static void test_large_rows(void **state) {
  (void)state;
  learn_and_compare(LARGE, "rows of 1e4", false);
}

static void test_sinks(void **state) {
  (void)state;
  learn_and_compare(SINKS, "sinks", false);
}

static void test_noise(void **state) {
  (void)state;
  learn_and_compare(NOISE, "noise", false);
}

// Traffic that changes after a calibration has been learnt: it is noticed within some pages.
static void test_a_sudden_change(void **state) {
  (void)state;
  static const traffic kinds[] = {OTHERS, NOISE, SINKS, LARGE, EQUAL, REPEATED, ONE_DEAD, STARTING_HEADS};
  for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
    const qkv_model *model;
    ends seen = {0};
    char what[64];
    qkv_store *store = make_store(2, LEARN, &model);
    teach(store, model, STRUCTURED, FED, 1, &seen);
    assert_int_equal(seen.accepted, 1);
    teach(store, model, kinds[i], 4, 5000, &seen);
    (void)snprintf(what, sizeof what, "after a change to %d (%d withdrawn, %d accepted)", (int)kinds[i],
                   seen.withdrawn, seen.accepted);
    expect_not_worse(store, 2, kinds[i], 200000, what);
    qkv_store_destroy(&store);
  }
}

// ---- Other codecs ----

#ifdef QKV_SANITIZED
enum { CODECS_APART = 3 };  // several times as slow
#else
enum { CODECS_APART = 1 };
#endif

// Learns with `codec` as the model's own or, of a model that is coded as usual, a session's.
static void learn_with(const qkv_codec *own, const qkv_codec *codec, const qkv_codec *codec_v, const char *what) {
  const qkv_model *model;
  ends seen = {0};
  qkv_calibration_state state;
  qkv_store *store = make_store_of(own, own->bits_valid(2) ? 2 : qkv_codec_bits_default(own), LEARN, &model);
  for (qkv_purpose purpose = QKV_PURPOSE_ATTEND; purpose <= QKV_PURPOSE_FETCH && codec != NULL; purpose++) {
    qkv_session *session = open_session_of(store, "other", purpose, codec, codec_v);
    close_session(store, &session, "other");
  }
  teach(store, model, STRUCTURED, FED, 1, &seen);
  qkv_learner_read_state(model->learner, &state);
  print_message("%s: %d accepted, %d refused, %u of %u parts fell back; %.3g, data-free %.3g; %s\n", what,
                seen.accepted, seen.refused, state.dropped, state.parts, state.error, state.data_free,
                seen.last.text);
  assert_int_equal(seen.accepted, own->calibrated ? 1 : 0);
  assert_int_equal(seen.refused, 0);
  // Codes that are made without a calibration have no say.
  if (codec == NULL || !codec->calibrated) assert_true(own->part != NULL || state.dropped == 0);
  qkv_store_destroy(&store);
}

static void test_rungs_have_bits_of_their_codecs(void **state) {
  (void)state;
  for (size_t k = 0; qkv_codec_at(k) != NULL; k++) {
    for (size_t v = 0; qkv_codec_at(v) != NULL; v++) {
      qkv_policy policy = QKV_POLICY_UNSET;
      policy.codec = qkv_codec_at(k);
      policy.codec_v = v != k ? qkv_codec_at(v) : NULL;
      policy.bits_k = qkv_codec_bits_default(qkv_codec_at(k));
      policy.bits_v = qkv_codec_bits_default(qkv_codec_at(v));
      if (qkv_policy_check(&policy, NULL) != QKV_OK) continue;
      qkv_kind kinds[QKV_PROBATION_RUNGS + 1];
      qkv_error error = {0};
      qkv_probation_rungs(&policy, kinds);
      kinds[QKV_PROBATION_RUNGS] = qkv_probation_kind(&policy, QKV_PURPOSE_ATTEND);
      for (size_t i = 0; i < QKV_PROBATION_RUNGS + 1; i++) {
        if (qkv_policy_check(&kinds[i].policy, &error) != QKV_OK) fail_msg("kind %zu: %s", i, error.text);
      }
    }
  }
}

static size_t codec_count(void) {
  size_t count = 0;
  while (qkv_codec_at(count) != NULL) count++;
  return count;
}

static void test_models_of_other_codecs(void **state) {
  (void)state;
  for (size_t row = 0; row < codec_count(); row += CODECS_APART) {
    if (!qkv_codec_is_exact(qkv_codec_at(row))) learn_with(qkv_codec_at(row), NULL, NULL, qkv_codec_at(row)->name);
  }
}

static void test_sessions_of_other_codecs(void **state) {
  (void)state;
  const qkv_codec *usual = qkv_codec_by_id(QKV_CODEC_EMBEDDED), *pq = qkv_codec_by_name("pq"),
                  *kivi = qkv_codec_by_name("kivi");
  char what[64];
  for (size_t row = 0; row < codec_count(); row += CODECS_APART) {
    (void)snprintf(what, sizeof what, "a session of %s", qkv_codec_at(row)->name);
    learn_with(usual, qkv_codec_at(row), NULL, what);
  }
  learn_with(usual, pq, kivi, "a session of pq and kivi");
  learn_with(usual, kivi, pq, "a session of kivi and pq");
}

// ---- All at once ----

typedef struct crowd {
  qkv_store *store;
  const qkv_model *model;
  _Atomic int next;
  _Atomic bool over;
} crowd;

static void *feed_some(void *context) {
  crowd *all = context;
  const int me = atomic_fetch_add(&all->next, 1);
  for (int round = 0; round < 6; round++) {
    char name[32];
    (void)snprintf(name, sizeof name, "fed%d", me);
    stream rows = make_stream(all->model, round < 4 ? STRUCTURED : OTHERS, (uint64_t)(me * 100 + round));
    qkv_session *session =
        open_session(all->store, name, round % 2 == 0 ? QKV_PURPOSE_ATTEND : QKV_PURPOSE_FETCH, false);
    feed(session, &rows);
    qkv_session_info info;
    qkv_session_read_info(session, &info, NULL);
    close_session(all->store, &session, name);
    free_stream(&rows);
  }
  return NULL;
}

// What is held out may be begun anew beneath a trial.
static void note_any(void *context, const qkv_model *model, const qkv_learner_outcome *outcome) {
  if (outcome->end == QKV_LEARNER_FAILED && outcome->error_text.status == QKV_FAILED_PRECONDITION) return;
  note_end(context, model, outcome);
}

static void *learn_on(void *context) {
  crowd *all = context;
  ends seen = {0};
  while (!atomic_load(&all->over)) (void)qkv_store_learn(all->store, NULL, note_any, &seen);
  return NULL;
}

// Sessions are fed while calibrations are made, tried, brought and withdrawn.
static void test_all_at_once(void **state) {
  (void)state;
  enum { FEEDERS = 3, BROUGHT = 2 };
  const qkv_model *model;
  ends seen = {0};
  const qkv_calibration *brought[BROUGHT];
  pthread_t feeders[FEEDERS], learner;
  for (size_t i = 0; i < BROUGHT; i++) {
    qkv_store *store = make_store(2, LEARN, &model);
    teach(store, model, i == 0 ? STRUCTURED : OTHERS, FED, 1, &seen);
    brought[i] = qkv_calibration_slot_get(model->calibration);
    assert_non_null(brought[i]);
    qkv_store_destroy(&store);
  }
  crowd all = {.store = make_store(2, 512, &model)};
  all.model = model;
  assert_int_equal(pthread_create(&learner, NULL, learn_on, &all), 0);
  for (size_t i = 0; i < FEEDERS; i++) assert_int_equal(pthread_create(&feeders[i], NULL, feed_some, &all), 0);
  for (int round = 0; round < 40; round++) {
    qkv_calibration_state now;
    qkv_learner_read_state(model->learner, &now);
    assert_true(now.version == 0 || now.source != QKV_CALIBRATION_NONE);
    (void)qkv_store_read_stats(all.store);
    if (round % 8 == 7) {
      assert_int_equal(qkv_model_calibrate(model, brought[round / 8 % BROUGHT], QKV_CALIBRATION_REGISTERED,
                                           round % 16 == 15, NULL),
                       QKV_OK);
    }
    (void)nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
  }
  for (size_t i = 0; i < FEEDERS; i++) assert_int_equal(pthread_join(feeders[i], NULL), 0);
  atomic_store(&all.over, true);
  assert_int_equal(pthread_join(learner, NULL), 0);
  qkv_store_destroy(&all.store);
  for (size_t i = 0; i < BROUGHT; i++) qkv_calibration_unref(&brought[i]);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_structure_is_learnt),
      cmocka_unit_test(test_equal_rows),
      cmocka_unit_test(test_a_repeated_token),
      cmocka_unit_test(test_a_dead_head),
      cmocka_unit_test(test_large_rows),
      cmocka_unit_test(test_sinks),
      cmocka_unit_test(test_noise),
      cmocka_unit_test(test_a_sudden_change),
      cmocka_unit_test(test_rungs_have_bits_of_their_codecs),
      cmocka_unit_test(test_models_of_other_codecs),
      cmocka_unit_test(test_sessions_of_other_codecs),
      cmocka_unit_test(test_all_at_once),
  };
#ifdef __SANITIZE_THREAD__
  cmocka_set_test_filter("test_all_at_once");  // the others have one thread, and take minutes
#endif
  return cmocka_run_group_tests(tests, NULL, NULL);
}
