#include "tests/engine/cache/fixture.h"

static qkv_model valid_model(void) {
  return (qkv_model){.name = "tiny",
                     .layers = 6,
                     .kv_heads = 2,
                     .q_heads = 8,
                     .key_dim = 64,
                     .value_dim = 64,
                     .dtype = QKV_FP16,
                     .rope = {.theta = 10000},
                     .policy = QKV_POLICY_UNSET};
}

static void refused(const qkv_model *model, const char *text) {
  qkv_model copy = *model;
  qkv_error error = {0};
  assert_int_equal(qkv_model_resolve(&copy, &error), QKV_INVALID_ARGUMENT);
  assert_string_equal(error.text, text);
  assert_int_equal(qkv_model_resolve(&copy, NULL), QKV_INVALID_ARGUMENT);
}

#define REFUSED(change, text)        \
  do {                               \
    qkv_model model = valid_model(); \
    model.change;                    \
    refused(&model, text);           \
  } while (0)

static void test_defaults(void **state) {
  (void)state;
  qkv_model model = valid_model();
  assert_int_equal(qkv_model_resolve(&model, NULL), QKV_OK);
  assert_true(model.scale == 0.125);
  assert_int_equal(model.rope.width, 64);
  qkv_model again = model;
  assert_int_equal(qkv_model_resolve(&again, NULL), QKV_OK);
  assert_true(qkv_model_equal(&model, &again));
}

// A field that nothing reads does not make the same model another one.
static void test_unused_rope_fields(void **state) {
  (void)state;
  qkv_model plain = valid_model(), noisy = valid_model();
  noisy.rope.factor = NAN;
  noisy.rope.beta_fast = 3;
  assert_int_equal(qkv_model_resolve(&plain, NULL), QKV_OK);
  assert_int_equal(qkv_model_resolve(&noisy, NULL), QKV_OK);
  assert_true(qkv_model_equal(&plain, &noisy));
  plain.rope = (qkv_rope){0};
  noisy.rope = (qkv_rope){.theta = 0, .width = 5};
  assert_int_equal(qkv_model_resolve(&noisy, NULL), QKV_OK);
  assert_true(qkv_model_equal(&plain, &noisy));
}

static void test_geometry_limits(void **state) {
  (void)state;
  REFUSED(layers = 0, "model.layers is 0, allowed are 1 to 1024");
  REFUSED(layers = 1025, "model.layers is 1025, allowed are 1 to 1024");
  REFUSED(kv_heads = 0, "model.kv_heads is 0, allowed are 1 to 1024");
  REFUSED(q_heads = 7, "model.q_heads is 7, must be a multiple of kv_heads 2");
  REFUSED(q_heads = 65538, "model.q_heads is 65538, allowed are 1 to 65536");
  REFUSED(key_dim = 0, "model.key_dim is 0, allowed are multiples of 8 from 8 to 1024");
  REFUSED(key_dim = 65, "model.key_dim is 65, allowed are multiples of 8 from 8 to 1024");
  REFUSED(value_dim = 1032, "model.value_dim is 1032, allowed are multiples of 8 from 8 to 1024");
  REFUSED(dtype = QKV_DTYPE_NONE, "model.dtype is 0, known are 1 (fp32), 2 (fp16) and 3 (bf16)");
  REFUSED(dtype = (qkv_dtype)7, "model.dtype is 7, known are 1 (fp32), 2 (fp16) and 3 (bf16)");
}

static void test_number_limits(void **state) {
  (void)state;
  REFUSED(scale = NAN, "model.scale is nan");
  REFUSED(scale = -1, "model.scale is -1, allowed are 0 and 1e-06 to 1e+06");
  REFUSED(scale = INFINITY, "model.scale is inf, allowed are 0 and 1e-06 to 1e+06");
  REFUSED(soft_cap = 1e9, "model.soft_cap is 1e+09, allowed are 0 and 1e-06 to 1e+06");
  REFUSED(rope.width = 130, "model.rope.width is 130, at most key_dim 64");
}

static void test_names(void **state) {
  (void)state;
  REFUSED(name[0] = '\0', "model.name is empty");
  REFUSED(name[1] = ' ', "model.name has byte 0x20 at 1, allowed are letters, digits and ._:/@-");
  qkv_error error = {0};
  char name[QKV_NAME_MAX + 2];
  memset(name, 'a', sizeof name);
  name[QKV_NAME_MAX + 1] = '\0';
  assert_int_equal(qkv_name_check(name, "session", &error), QKV_INVALID_ARGUMENT);
  assert_string_equal(error.text, "session is longer than 128 characters");
  name[QKV_NAME_MAX] = '\0';
  assert_int_equal(qkv_name_check(name, "session", NULL), QKV_OK);
  assert_int_equal(qkv_name_check("aZ09._:/@-", "session", NULL), QKV_OK);
}

static void test_policy_limits(void **state) {
  (void)state;
  REFUSED(policy.bits_k = 0.3, "model.policy.bits_k is 0.3, allowed are multiples of 0.125 up to 8");
  REFUSED(policy.bits_v = 8.125, "model.policy.bits_v is 8.125, allowed are multiples of 0.125 up to 8");
  REFUSED(policy.bits_v = -1, "model.policy.bits_v is -1, allowed are multiples of 0.125 up to 8");
  REFUSED(policy.bits_k = NAN, "model.policy.bits_k is nan, allowed are multiples of 0.125 up to 8");
  REFUSED(policy.recent_window = 1048577, "model.policy.recent_window is 1048577, allowed are 0 to 1048576");
  REFUSED(policy.anchor.every = 65, "model.policy.anchor_every is 65, allowed are 0 to 64");
  REFUSED(policy.anchor.threshold = NAN, "model.policy.anchor_threshold is nan, allowed are 0 to 1e+06");
  REFUSED(policy.low_rank.rank = 17, "model.policy.rank is 17, allowed are 0 to 16");
  qkv_policy unset = QKV_POLICY_UNSET;
  assert_int_equal(qkv_policy_check(&unset, NULL), QKV_OK);
  for (int eighths = 1; eighths <= 64; eighths++) {
    const qkv_policy policy = test_policy(eighths / 8.0, (65 - eighths) / 8.0, 0);
    assert_int_equal(qkv_policy_check(&policy, NULL), QKV_OK);
  }
}

static void expect_overrides_refused(qkv_layer_override *overrides, uint32_t count, const char *text) {
  qkv_model model = valid_model();
  qkv_error error = {0};
  model.overrides = overrides;
  model.override_count = count;
  assert_int_equal(qkv_model_resolve(&model, &error), QKV_INVALID_ARGUMENT);
  assert_string_equal(error.text, text);
}

static void test_override_limits(void **state) {
  (void)state;
  qkv_layer_override overrides[2] = {{.layer = 1, .policy = QKV_POLICY_UNSET},
                                     {.layer = 1, .policy = QKV_POLICY_UNSET}};
  const uint32_t layers = valid_model().layers;
  char text[128];
  expect_overrides_refused(overrides, 2, "model.overrides[1].layer is 1, they must be in ascending order");
  overrides[1].layer = layers;
  (void)snprintf(text, sizeof text, "model.overrides[1].layer is %u, the model has %u layers", layers, layers);
  expect_overrides_refused(overrides, 2, text);
  overrides[0].policy.bits_v = 9;
  expect_overrides_refused(overrides, 1,
                           "model.overrides[0].policy.bits_v is 9, allowed are multiples of 0.125 up to 8");
  overrides[0] = (qkv_layer_override){.soft_cap = -1, .policy = QKV_POLICY_UNSET};
  expect_overrides_refused(overrides, 1, "model.overrides.soft_cap is -1, allowed are 0 and 1e-06 to 1e+06");
}

static void test_policy_merge(void **state) {
  (void)state;
  qkv_policy fallback = test_policy(4, 2, 64);
  qkv_policy policy = QKV_POLICY_UNSET;
  policy.bits_k = 3;
  policy.recent_window = 0;
  qkv_policy_merge(&policy, &fallback);
  assert_ptr_equal(policy.codec, fallback.codec);
  assert_true(policy.bits_k == 3 && policy.bits_v == 2);
  assert_int_equal(policy.recent_window, 0);
  // Bits that the codec does not have are not taken from the next level.
  policy = QKV_POLICY_UNSET;
  policy.codec = qkv_codec_by_name("commvq");
  qkv_policy_merge(&policy, &fallback);
  assert_true(policy.bits_k == 2 && policy.bits_v == 2);
  policy = QKV_POLICY_UNSET;
  policy.codec = qkv_codec_by_name("kivi");
  policy.codec_v = qkv_codec_by_name("int8");
  qkv_policy_merge(&policy, &fallback);
  assert_true(policy.bits_k == 4 && policy.bits_v == 8);
}

#define DIFFERS(change)                            \
  do {                                             \
    qkv_model other = model;                       \
    other.change;                                  \
    assert_false(qkv_model_equal(&model, &other)); \
  } while (0)

static void test_equality_sees_every_field(void **state) {
  (void)state;
  qkv_model model = valid_model();
  DIFFERS(name[0] = 'T');
  DIFFERS(layers = 7);
  DIFFERS(kv_heads = 4);
  DIFFERS(q_heads = 4);
  DIFFERS(key_dim = 128);
  DIFFERS(value_dim = 128);
  DIFFERS(dtype = QKV_BF16);
  DIFFERS(rope.theta = 20000);
  DIFFERS(rope.width = 32);
  DIFFERS(rope.interleaved = true);
  DIFFERS(rope.scaling = QKV_ROPE_LINEAR);
  DIFFERS(rope.factor = 2);
  DIFFERS(rope.original_max_position = 2);
  DIFFERS(rope.low_freq_factor = 2);
  DIFFERS(rope.high_freq_factor = 2);
  DIFFERS(rope.beta_fast = 2);
  DIFFERS(rope.beta_slow = 2);
  DIFFERS(rope.attention_factor = 2);
  DIFFERS(scale = 2);
  DIFFERS(sliding_window = 2);
  DIFFERS(soft_cap = 2);
  DIFFERS(policy.bits_k = 2);
  DIFFERS(policy.bits_v = 2);
  DIFFERS(policy.codec = qkv_codec_by_id(QKV_CODEC_EMBEDDED));
  DIFFERS(policy.recent_window = 2);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_defaults),
      cmocka_unit_test(test_unused_rope_fields),
      cmocka_unit_test(test_geometry_limits),
      cmocka_unit_test(test_number_limits),
      cmocka_unit_test(test_names),
      cmocka_unit_test(test_policy_limits),
      cmocka_unit_test(test_override_limits),
      cmocka_unit_test(test_policy_merge),
      cmocka_unit_test(test_equality_sees_every_field),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
