#include "server/kept_calibrations.h"

#include "engine/cache/coding.h"
#include "tests/client/c/coded_scene.h"

enum { COUNT = 10 };

typedef struct scene {
  qkv_model model;
  const qkv_calibration *made[COUNT];
  size_t bytes;  // of each
} scene;

static void setup_scene(scene *s) {
  scene_fill();
  s->model = (qkv_model){.name = "m",
                         .layers = LAYERS,
                         .kv_heads = KV_HEADS,
                         .q_heads = Q_HEADS,
                         .key_dim = KEY_DIM,
                         .value_dim = VALUE_DIM,
                         .dtype = QKV_FP16,
                         .rope = {.theta = 10000},
                         .policy = QKV_POLICY_UNSET,
                         .calibration = qkv_calibration_slot_create()};
  assert_int_equal(qkv_model_resolve(&s->model, NULL), QKV_OK);
  for (uint32_t i = 0; i < COUNT; i++) s->made[i] = scene_calibrate(i + 2);
  (void)qkv_calibration_bytes(s->made[0], &s->bytes);
}

static void teardown_scene(scene *s) {
  for (size_t i = 0; i < COUNT; i++) qkv_calibration_unref(&s->made[i]);
  qkv_calibration_slot_destroy(&s->model.calibration);
}

static bool is_kept(qkvi_kept_calibrations *kept, const scene *s, size_t i) {
  const qkv_calibration *found = qkvi_kept_find(kept, &s->model, qkv_calibration_version(s->made[i]));
  const bool same = found == s->made[i];
  assert_true(found == NULL || same);
  qkv_calibration_unref(&found);
  return same;
}

static void put_of(qkvi_kept_calibrations *kept, const char *tenant, const scene *s, size_t i) {
  qkv_error error = {0};
  if (qkvi_kept_put(kept, tenant, &s->model, s->made[i], &error) != QKV_OK) fail_msg("%s", error.text);
}

static void put(qkvi_kept_calibrations *kept, const scene *s, size_t i) {
  put_of(kept, "a", s, i);
}

static void the_last_eight_stay(void **state) {
  (void)state;
  scene s;
  setup_scene(&s);
  qkvi_kept_calibrations *kept = qkvi_kept_create(UINT64_MAX);
  for (size_t i = 0; i < 8; i++) put(kept, &s, i);
  put(kept, &s, 0);  // the newest now
  put(kept, &s, 8);
  assert_true(is_kept(kept, &s, 0));
  assert_false(is_kept(kept, &s, 1));
  for (size_t i = 2; i < 9; i++) assert_true(is_kept(kept, &s, i));
  qkv_model other = s.model;
  assert_null(qkvi_kept_find(kept, &other, qkv_calibration_version(s.made[3])));
  qkvi_kept_destroy(&kept);
  teardown_scene(&s);
}

static void bytes_are_bounded(void **state) {
  (void)state;
  scene s;
  setup_scene(&s);
  qkvi_kept_calibrations *kept = qkvi_kept_create(3 * s.bytes);
  for (size_t i = 0; i < 4; i++) put(kept, &s, i);
  assert_false(is_kept(kept, &s, 0));
  for (size_t i = 1; i < 4; i++) assert_true(is_kept(kept, &s, i));
  qkvi_kept_destroy(&kept);
  kept = qkvi_kept_create(s.bytes - 1);
  qkv_error error = {0};
  assert_int_equal(qkvi_kept_put(kept, "a", &s.model, s.made[0], &error), QKV_RESOURCE_EXHAUSTED);
  assert_non_null(strstr(error.text, "an eighth of memory-budget"));
  assert_false(is_kept(kept, &s, 0));
  qkvi_kept_destroy(&kept);
  teardown_scene(&s);
}

// Neither by number nor by bytes do tenants push out what others have who have less.
static void tenants_keep_their_own(void **state) {
  (void)state;
  scene s;
  setup_scene(&s);
  qkvi_kept_calibrations *kept = qkvi_kept_create(UINT64_MAX);
  put_of(kept, "b", &s, 0);
  for (size_t i = 1; i < 10; i++) put_of(kept, "a", &s, i);
  assert_true(is_kept(kept, &s, 0));
  assert_false(is_kept(kept, &s, 1));
  for (size_t i = 2; i < 10; i++) assert_true(is_kept(kept, &s, i));
  qkvi_kept_destroy(&kept);

  kept = qkvi_kept_create(4 * s.bytes);
  put_of(kept, "b", &s, 0);
  for (size_t i = 1; i < 6; i++) put_of(kept, "a", &s, i);
  assert_true(is_kept(kept, &s, 0));
  for (size_t i = 1; i < 6; i++) assert_true(is_kept(kept, &s, i) == (i >= 3));
  put_of(kept, "b", &s, 6);  // a has more
  assert_true(is_kept(kept, &s, 0) && is_kept(kept, &s, 4) && is_kept(kept, &s, 5) && is_kept(kept, &s, 6));
  assert_false(is_kept(kept, &s, 3));
  put_of(kept, "b", &s, 7);  // b would have the most
  assert_true(is_kept(kept, &s, 4) && is_kept(kept, &s, 5) && is_kept(kept, &s, 6) && is_kept(kept, &s, 7));
  assert_false(is_kept(kept, &s, 0));
  qkvi_kept_destroy(&kept);

  kept = qkvi_kept_create(2 * s.bytes);
  qkv_error error = {0};
  put_of(kept, "a", &s, 0);
  put_of(kept, "b", &s, 1);
  assert_int_equal(qkvi_kept_put(kept, "c", &s.model, s.made[2], &error), QKV_RESOURCE_EXHAUSTED);
  assert_non_null(strstr(error.text, "no other tenant has more of them than c would have"));
  assert_true(is_kept(kept, &s, 0) && is_kept(kept, &s, 1));
  // Two tenants that give the same calibration keep one each.
  put_of(kept, "b", &s, 0);
  assert_true(is_kept(kept, &s, 0));
  assert_false(is_kept(kept, &s, 1));
  put_of(kept, "a", &s, 2);
  assert_true(is_kept(kept, &s, 0) && is_kept(kept, &s, 2));
  qkvi_kept_destroy(&kept);
  teardown_scene(&s);
}

// Calibrations of sessions' pages, and those in force, are found without being kept.
static void others_are_found(void **state) {
  (void)state;
  scene s;
  setup_scene(&s);
  qkvi_kept_calibrations *kept = qkvi_kept_create(UINT64_MAX);
  qkv_policy policy = QKV_POLICY_UNSET;
  policy.codec = qkv_codec_by_id(QKV_CODEC_EMBEDDED);
  policy.bits_k = policy.bits_v = 3;
  qkv_coding *coding = qkv_coding_get(&s.model, &policy, QKV_PURPOSE_FETCH, s.made[5]);
  assert_true(is_kept(kept, &s, 5));
  qkv_coding_unref(&coding);
  assert_false(is_kept(kept, &s, 5));
  qkv_calibration_slot_set(s.model.calibration, s.made[6]);
  assert_true(is_kept(kept, &s, 6));
  qkv_calibration_slot_set(s.model.calibration, NULL);
  assert_false(is_kept(kept, &s, 6));
  qkvi_kept_destroy(&kept);
  teardown_scene(&s);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(the_last_eight_stay),
      cmocka_unit_test(bytes_are_bounded),
      cmocka_unit_test(tenants_keep_their_own),
      cmocka_unit_test(others_are_found),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
