// How layers are coded for a policy and a purpose, and who shares it.
#include "engine/cache/coding.h"

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
    assert_int_equal(coder->tier_k, 33);
    assert_int_equal(coder->tier_v, 20);
    assert_int_equal(coder->calibration, 0);
    for (size_t h = 0; h < 2; h++) {
      assert_ptr_equal(coder->heads[h].transforms[QKV_K], qkv_transform_uniform(64));
      assert_ptr_equal(coder->heads[h].schedules[QKV_V], qkv_transform_uniform(32)->schedule);
      assert_int_equal(coder->heads[h].tiers[QKV_K], 33);
      assert_int_equal(coder->heads[h].tiers[QKV_V], 20);
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
    assert_int_equal(coder->frame, cases[i].frame);
    assert_int_equal(coder->phases != NULL, cases[i].theta != 0);
    qkv_coding_unref(&coding);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_what_is_alike_is_shared),
      cmocka_unit_test(test_coders_are_as_the_policy_says),
      cmocka_unit_test(test_frames),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
