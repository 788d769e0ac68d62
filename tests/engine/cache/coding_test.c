// How layers are coded for a policy and a purpose, and which sessions share a coding.
#include "engine/cache/coding.h"

#include <pthread.h>

#include "engine/base/clock.h"
#include "tests/engine/cache/fixture.h"

static qkv_model turning_model(double theta) {
  qkv_model model = {.name = "turning",
                     .layers = 3,
                     .kv_heads = 2,
                     .q_heads = 4,
                     .key_dim = 64,
                     .value_dim = 32,
                     .dtype = QKV_FP16,
                     .rope = {.theta = theta},
                     .policy = QKV_POLICY_UNSET};
  assert_int_equal(qkv_model_resolve(&model, NULL), QKV_OK);
  return model;
}

static void test_what_is_alike_is_shared(void **state) {
  (void)state;
  const qkv_model model = turning_model(10000), other_model = turning_model(10000);
  const qkv_policy policy = test_policy(4, 2.5, 8), other_policy = test_policy(4, 2.625, 8);
  qkv_coding *coding = qkv_coding_get(&model, &policy, QKV_PURPOSE_ATTEND, NULL);
  qkv_coding *again = qkv_coding_get(&model, &policy, QKV_PURPOSE_ATTEND, NULL);
  qkv_coding *third = qkv_coding_ref(coding);
  qkv_policy elsewhere = policy;  // differs in fields that coders do not use
  elsewhere.recent_window = 500;
  elsewhere.learn = elsewhere.learn_said = true;
  qkv_coding *alike = qkv_coding_get(&model, &elsewhere, QKV_PURPOSE_ATTEND, NULL);
  assert_ptr_equal(coding, alike);
  qkv_coding_unref(&alike);
  qkv_coding *others[] = {qkv_coding_get(&model, &policy, QKV_PURPOSE_FETCH, NULL),
                          qkv_coding_get(&model, &other_policy, QKV_PURPOSE_ATTEND, NULL),
                          qkv_coding_get(&other_model, &policy, QKV_PURPOSE_ATTEND, NULL)};
  assert_ptr_equal(coding, again);
  assert_ptr_equal(coding, third);
  for (size_t i = 0; i < 3; i++) {
    assert_ptr_not_equal(coding, others[i]);
    qkv_coding_unref(&others[i]);
    assert_null(others[i]);
  }
  qkv_coding_unref(&coding);
  qkv_coding_unref(&again);
  qkv_coding_unref(&again);
  // One reference is left: it is the same one still.
  const qkv_coder *coder = qkv_coding_layer(third, 2);
  coding = qkv_coding_get(&model, &policy, QKV_PURPOSE_ATTEND, NULL);
  assert_ptr_equal(coding, third);
  assert_ptr_equal(coder, qkv_coding_layer(coding, 2));
  qkv_coding_unref(&coding);
  qkv_coding_unref(&third);
}

// What is reserved for coders before they are made is enough, and not far above what they take.
static void test_cost_of_every_codec(void **state) {
  (void)state;
  for (int turning = 0; turning < 2; turning++) {
    qkv_model model = turning_model(turning ? 10000 : 0);
    model.layers = 3;
    model.kv_heads = model.q_heads = 40;
    for (size_t i = 0; qkv_codec_at(i) != NULL; i++) {
      const qkv_codec *codec = qkv_codec_at(i);
      if (codec->needs_rope && !turning) continue;
      qkv_policy policy = test_policy(4, 4, 8);
      policy.codec = codec;
      policy.bits_k = policy.bits_v = qkv_codec_bits_default(codec);
      for (qkv_purpose purpose = QKV_PURPOSE_ATTEND; purpose <= QKV_PURPOSE_FETCH; purpose++) {
        const uint64_t cost = qkv_coding_cost(&model, &policy, purpose, NULL), before = qkv_coding_bytes_held();
        qkv_coding *coding = qkv_coding_get(&model, &policy, purpose, NULL);
        const uint64_t made = qkv_coding_bytes_held() - before;
        qkv_coding_unref(&coding);
        if (made > cost || cost > made + made / 2 + 4096)
          fail_msg("%s: %llu bytes, its cost is %llu", codec->name, (unsigned long long)made,
                   (unsigned long long)cost);
      }
    }
  }
}

static double time_gets(const qkv_model *model, const qkv_policy *policy) {
  enum { TRIES = 20, GETS = 100 };
  double least = INFINITY;
  for (int i = 0; i < TRIES; i++) {
    const double begin = qkv_now_s();
    for (int j = 0; j < GETS; j++) {
      qkv_coding *coding = qkv_coding_get(model, policy, QKV_PURPOSE_ATTEND, NULL);
      qkv_coding_unref(&coding);
    }
    least = fmin(least, qkv_now_s() - begin);
  }
  return least;
}

// Sessions of very many policies make no others look for their codings.
static void test_many_codings(void **state) {
  (void)state;
  enum { OTHERS = 4096 };
  const qkv_model model = turning_model(0), crowded = turning_model(0);
  const qkv_policy policy = test_policy(4, 4, 8);
  static qkv_coding *others[OTHERS];
  qkv_coding *coding = qkv_coding_get(&model, &policy, QKV_PURPOSE_ATTEND, NULL);
  const double alone = time_gets(&model, &policy);
  for (int i = 0; i < OTHERS; i++) {
    const qkv_policy other = test_policy((1 + i % 64) / 8.0, (1 + i / 64) / 8.0, 8);
    others[i] = qkv_coding_get(&crowded, &other, QKV_PURPOSE_ATTEND, NULL);
  }
  const double among = time_gets(&model, &policy);
  for (int i = 0; i < OTHERS; i++) qkv_coding_unref(&others[i]);
  qkv_coding_unref(&coding);
  if (among > 20 * alone) fail_msg("alone %g s, among %d others %g", alone, OTHERS, among);
}

typedef struct getter {
  const qkv_model *model;
  qkv_policy policy;
  pthread_barrier_t *start;
  qkv_coding *got;
} getter;

static void *get_coding(void *context) {
  getter *own = context;
  (void)pthread_barrier_wait(own->start);
  own->got = qkv_coding_get(own->model, &own->policy, QKV_PURPOSE_ATTEND, NULL);
  return NULL;
}

// Codings are made without the lock: of several that are made at once one stays.
static void test_threads_share_one(void **state) {
  (void)state;
  enum { THREADS = 4 };
  const qkv_model model = turning_model(10000);
  const uint64_t before = qkv_coding_bytes_held();
  qkv_policy policy = test_policy(4, 2, 8);
  policy.codec = qkv_codec_by_name("pq");
  pthread_barrier_t start;
  pthread_t threads[THREADS];
  getter getters[THREADS];
  assert_int_equal(pthread_barrier_init(&start, NULL, THREADS), 0);
  for (size_t i = 0; i < THREADS; i++) {
    getters[i] = (getter){.model = &model, .policy = policy, .start = &start};
    assert_int_equal(pthread_create(&threads[i], NULL, get_coding, &getters[i]), 0);
  }
  for (size_t i = 0; i < THREADS; i++) assert_int_equal(pthread_join(threads[i], NULL), 0);
  (void)pthread_barrier_destroy(&start);
  const uint64_t one = qkv_coding_bytes_held() - before;
  for (size_t i = 0; i < THREADS; i++) {
    assert_ptr_equal(getters[i].got, getters[0].got);
    if (i > 0) assert_int_equal(qkv_coding_bytes_held() - before, one);
  }
  for (size_t i = 0; i < THREADS; i++) qkv_coding_unref(&getters[i].got);
  assert_int_equal(qkv_coding_bytes_held(), before);
}

static void test_coders_are_as_the_policy_says(void **state) {
  (void)state;
  const qkv_model model = turning_model(10000);
  const qkv_policy policy = test_policy(4.125, 2.5, 8);
  qkv_coding *coding = qkv_coding_get(&model, &policy, QKV_PURPOSE_ATTEND, NULL);
  for (uint32_t layer = 0; layer < 3; layer++) {
    const qkv_coder *coder = qkv_coding_layer(coding, layer);
    assert_ptr_equal(coder->codec, policy.codec);
    assert_int_equal(coder->layer, layer);
    assert_int_equal(coder->kv_heads, 2);
    assert_int_equal(coder->key_dim, 64);
    assert_int_equal(coder->value_dim, 32);
    assert_int_equal(qkv_embedded(coder)->tier_k, 33);
    assert_int_equal(qkv_embedded(coder)->tier_v, 20);
    assert_int_equal(coder->calibration, 0);
    for (size_t h = 0; h < 2; h++) {
      assert_ptr_equal(qkv_embedded(coder)->heads[h].transforms[QKV_K], qkv_transform_uniform(64));
      assert_ptr_equal(qkv_embedded(coder)->heads[h].schedules[QKV_V], qkv_transform_uniform(32)->schedule);
      assert_int_equal(qkv_embedded(coder)->heads[h].tiers[QKV_K], 33);
      assert_int_equal(qkv_embedded(coder)->heads[h].tiers[QKV_V], 20);
    }
  }
  qkv_coding_unref(&coding);
}

// Without a calibration there is nothing to take off in the attend frame: rows are coded as attended.
static void test_frames(void **state) {
  (void)state;
  static const struct {
    double theta;
    qkv_purpose purpose;
    qkv_frame frame;
  } cases[] = {{10000, QKV_PURPOSE_ATTEND, QKV_FRAME_PLAIN},
               {10000, QKV_PURPOSE_FETCH, QKV_FRAME_ARCHIVE},
               {0, QKV_PURPOSE_ATTEND, QKV_FRAME_PLAIN},
               {0, QKV_PURPOSE_FETCH, QKV_FRAME_PLAIN}};
  const qkv_policy policy = test_policy(4, 4, 8);
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    const qkv_model model = turning_model(cases[i].theta);
    qkv_coding *coding = qkv_coding_get(&model, &policy, cases[i].purpose, NULL);
    const qkv_coder *coder = qkv_coding_layer(coding, 0);
    assert_int_equal(qkv_embedded(coder)->frame, cases[i].frame);
    assert_int_equal(qkv_embedded(coder)->phases != NULL, cases[i].theta != 0);
    qkv_coding_unref(&coding);
  }
}

// Layers with a policy of their own, whatever the session says.
static void test_overrides(void **state) {
  (void)state;
  qkv_layer_override overrides[] = {
      {.layer = 0, .sliding_window = 128, .policy = {.bits_k = 8, .recent_window = -1}},
      {.layer = 2, .soft_cap = 30, .policy = {.codec = qkv_codec_by_name("exact"), .recent_window = 16}}};
  qkv_model model = turning_model(10000);
  model.overrides = overrides;
  model.override_count = 2;
  assert_int_equal(qkv_model_resolve(&model, NULL), QKV_OK);
  const qkv_policy policy = test_policy(4, 2.5, 8);
  qkv_coding *coding = qkv_coding_get(&model, &policy, QKV_PURPOSE_ATTEND, NULL);
  const uint8_t tiers_k[] = {64, 32};
  for (uint32_t layer = 0; layer < 3; layer++) {
    const qkv_coder *coder = qkv_coding_layer(coding, layer);
    assert_int_equal(qkv_codec_is_exact(coder->codec), layer == 2);
    if (layer == 2) continue;
    assert_int_equal(qkv_embedded(coder)->tier_k, tiers_k[layer]);
    assert_int_equal(qkv_embedded(coder)->tier_v, 20);
  }
  qkv_coding_unref(&coding);
  assert_int_equal(qkv_model_window(&model, 0), 128);
  assert_int_equal(qkv_model_window(&model, 1), 0);
  assert_true(qkv_model_cap(&model, 2) == 30 && qkv_model_cap(&model, 0) == 0);
  assert_int_equal(qkv_model_policy(&model, 2, &policy).recent_window, 16);
  assert_int_equal(qkv_model_policy(&model, 0, &policy).recent_window, 8);
}

// ceil(log4 g) bits more for g query heads on a KV head, up to 8.
static void test_gqa_compensation(void **state) {
  (void)state;
  const struct {
    uint32_t group;
    double more;
  } cases[] = {{1, 0}, {2, 1}, {4, 1}, {5, 2}, {16, 2}, {17, 3}, {64, 3}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    qkv_model model = turning_model(0);
    model.q_heads = model.kv_heads * cases[i].group;
    qkv_policy policy = test_policy(2.5, 7, 0);
    policy.gqa_said = policy.gqa_compensation = true;
    qkv_coding *coding = qkv_coding_get(&model, &policy, QKV_PURPOSE_ATTEND, NULL);
    const qkv_coder *coder = qkv_coding_layer(coding, 1);
    assert_int_equal(qkv_embedded(coder)->tier_k, (int)((2.5 + cases[i].more) * QKV_TIER_BIT));
    assert_int_equal(qkv_embedded(coder)->tier_v, cases[i].more == 0 ? 56 : 64);
    assert_int_equal(qkv_embedded(coder)->heads[1].tiers[QKV_K], qkv_embedded(coder)->tier_k);
    qkv_coding_unref(&coding);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_what_is_alike_is_shared),
      cmocka_unit_test(test_cost_of_every_codec),
      cmocka_unit_test(test_many_codings),
      cmocka_unit_test(test_threads_share_one),
      cmocka_unit_test(test_coders_are_as_the_policy_says),
      cmocka_unit_test(test_frames),
      cmocka_unit_test(test_overrides),
      cmocka_unit_test(test_gqa_compensation),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
