#include "engine/cache/layer_coded.h"

#include "engine/cache/page_code.h"
#include "tests/engine/cache/fixture.h"

// Two layers of the same coder: one that codes rows, and one that gets its pages.
typedef struct scene {
  qkv_model model;
  qkv_policy policy;
  qkv_arena *arena;
  sequence rows;
  qkv_layer from, to;
} scene;

static void setup_scene(scene *s, uint64_t tokens) {
  s->model = test_model(2, 2, 16, 8, QKV_FP16);
  s->policy = test_policy(3, 2, 8);
  s->arena = qkv_arena_create("memory-budget", (uint64_t)1 << 24);
  s->rows = make_sequence(&s->model, tokens, 1);
  init_layer(&s->from, &s->model, s->policy, 5, s->arena);
  const qkv_layer_config config = test_layer_config(&s->model, s->policy, 5, s->arena);
  qkv_layer_init(&s->to, &config, s->from.coder);
  must_append(&s->from, &s->rows, 0, tokens);
}

static void teardown_scene(scene *s) {
  qkv_layer_deinit(&s->to);
  deinit_layer(&s->from);
  assert_int_equal(qkv_arena_read(s->arena).bytes_used, 0);
  assert_int_equal(qkv_arena_read(s->arena).bytes_reserved, 0);
  qkv_arena_destroy(&s->arena);
  free_sequence(&s->rows);
}

enum { PAGES = 200 };

static size_t all_pages(const qkv_layer *layer, qkv_coded_page *pages) {
  return qkv_layer_coded_pages(layer, 0, UINT64_MAX, UINT64_MAX, pages, PAGES);
}

static void test_pages_arrive_as_they_were(void **state) {
  (void)state;
  scene s;
  qkv_coded_page pages[PAGES];
  uint64_t appended = 0;
  setup_scene(&s, 64 * 70 + 40);  // more than a range
  qkv_layer_truncate(&s.from, 5 + 64 * 69 + 30);
  must_append(&s.from, &s.rows, 64 * 69 + 30, 64 * 70 + 40);
  const size_t count = all_pages(&s.from, pages);
  assert_int_equal(count, 71);
  assert_int_equal(pages[69].tokens, 30);
  for (size_t i = 0; i < count; i += 10) {
    const size_t n = count - i < 10 ? count - i : 10;
    qkv_error error = {0};
    if (qkv_layer_append_pages(&s.to, pages + i, n, &appended, &error) != QKV_OK) fail_msg("%s", error.text);
    assert_valid(&s.to);
  }
  // The tail as rows.
  must_append(&s.to, &s.rows, s.to.length - 5, 64 * 70 + 40);
  assert_valid(&s.to);
  assert_same_state(&s.from, &s.to);
  assert_int_equal(qkv_layer_read_usage(&s.from).bytes_coded, qkv_layer_read_usage(&s.to).bytes_coded);
  for (size_t i = 0; i < count; i++) assert_int_equal(qkv_layer_range_of(&s.from, i), qkv_layer_range_of(&s.to, i));
  teardown_scene(&s);
}

static void test_pages_follow_pages_only(void **state) {
  (void)state;
  scene s;
  qkv_coded_page pages[PAGES];
  uint64_t appended = 0;
  qkv_error error = {0};
  setup_scene(&s, 192);
  qkv_layer_truncate(&s.from, 5 + 74);
  must_append(&s.from, &s.rows, 74, 192);
  assert_int_equal(all_pages(&s.from, pages), 3);
  assert_int_equal(pages[2].position, 5 + 74);
  assert_int_equal(qkv_layer_append_pages(&s.to, pages, 1, &appended, &error), QKV_OK);
  must_append(&s.to, &s.rows, 64, 74);
  assert_int_equal(qkv_layer_append_pages(&s.to, pages + 2, 1, &appended, &error), QKV_FAILED_PRECONDITION);
  assert_non_null(strstr(error.text, "rows from position 69 on are exact and pages follow pages only"));
  assert_int_equal(s.to.length, 5 + 74);
  must_append(&s.to, &s.rows, 74, 192);
  assert_valid(&s.to);
  teardown_scene(&s);
}

static void test_which_pages_are_given(void **state) {
  (void)state;
  scene s;
  qkv_coded_page pages[PAGES];
  setup_scene(&s, 400);
  const uint32_t bytes = qkv_layer_page(&s.from, 0)->bytes;
  assert_int_equal(qkv_layer_coded_pages(&s.from, 5, 6, UINT64_MAX, pages, PAGES), 1);
  assert_int_equal(qkv_layer_coded_pages(&s.from, 68, 70, UINT64_MAX, pages, PAGES), 2);
  assert_int_equal(pages[0].position, 5);
  assert_int_equal(pages[1].position, 69);
  assert_int_equal(qkv_layer_coded_pages(&s.from, 70, 400, 1, pages, PAGES), 1);
  assert_int_equal(pages[0].position, 69);
  assert_in_range(qkv_layer_coded_pages(&s.from, 5, 400, 3 * (uint64_t)bytes + 64, pages, PAGES), 2, 4);
  assert_int_equal(qkv_layer_coded_pages(&s.from, 5, 400, UINT64_MAX, pages, 2), 2);
  assert_int_equal(qkv_layer_coded_pages(&s.from, s.from.sealed, UINT64_MAX, UINT64_MAX, pages, PAGES), 0);
  teardown_scene(&s);
}

// Whatever is refused leaves the layer and the arena as they were.
static void test_a_full_budget_changes_nothing(void **state) {
  (void)state;
  scene s;
  qkv_coded_page pages[PAGES];
  uint64_t appended = 1;
  setup_scene(&s, 400);
  const size_t count = all_pages(&s.from, pages);
  const uint64_t used = qkv_arena_read(s.arena).bytes_used;
  qkv_arena_set_limit(s.arena, used + (count - 1) * qkv_arena_cost(pages[0].bytes));
  qkv_error error = {0};
  assert_int_equal(qkv_layer_append_pages(&s.to, pages, count, &appended, &error), QKV_RESOURCE_EXHAUSTED);
  assert_non_null(strstr(error.text, "memory-budget"));
  assert_int_equal(appended, 0);
  assert_int_equal(s.to.page_count, 0);
  assert_int_equal(s.to.length, 5);
  assert_int_equal(qkv_arena_read(s.arena).bytes_used, used);
  assert_int_equal(qkv_arena_read(s.arena).bytes_reserved, 0);
  assert_valid(&s.to);
  teardown_scene(&s);
}

// ---- Outside a daemon ----

static void test_page_code(void **state) {
  (void)state;
  qkv_model model = test_model(2, 2, 16, 8, QKV_BF16);
  const qkv_policy policy = test_policy(3, 2, 0);
  const qkv_page_code *code = NULL;
  qkv_error error = {0};
  if (qkv_page_code_create(&model, &policy, QKV_PURPOSE_ATTEND, NULL, &code, &error) != QKV_OK)
    fail_msg("%s", error.text);
  sequence rows = make_sequence(&model, 64, 3);
  row_pair pair;
  make_pair(&pair, &rows, 0, 64, QKV_FP32);
  const size_t most = qkv_page_code_bytes_max(code, 1);
  uint8_t *image = aligned_alloc(64, (most + 127) / 64 * 64), *shifted = malloc(most + 1);
  size_t bytes = 0;
  assert_int_equal(qkv_page_code_encode(code, 1, 128, &pair.k.tensor, &pair.v.tensor, false, image, &bytes, &error),
                   QKV_OK);
  assert_in_range(bytes, 64, most);

  // Some of its tokens, from any alignment.
  static float k[64][2][16], v[64][2][8], some[10][2][16];
  qkv_page_rows all = {.tokens = 64, .dtype = QKV_FP32, .k = k, .v = v};
  assert_int_equal(qkv_page_code_decode(code, 1, image, bytes, &all, &error), QKV_OK);
  memcpy(shifted + 1, image, bytes);
  const qkv_page_rows few = {.first = 50, .tokens = 10, .dtype = QKV_FP32, .k = some};
  assert_int_equal(qkv_page_code_decode(code, 1, shifted + 1, bytes, &few, &error), QKV_OK);
  assert_memory_equal(some, k[50], sizeof some);
  double distance = 0, size = 0;
  for (size_t i = 0; i < sizeof k / 4; i++) {
    distance += square((double)(&k[0][0][0])[i] - (double)rows.k[i]);
    size += square((double)rows.k[i]);
  }
  assert_true(distance < 0.05 * size);

  // What is refused.
  assert_int_equal(qkv_page_code_decode(code, 2, image, bytes, &all, &error), QKV_DATA_LOSS);
  assert_int_equal(qkv_page_code_decode(code, 4, image, bytes, &all, &error), QKV_INVALID_ARGUMENT);
  assert_int_equal(qkv_page_code_decode(code, 1, image, bytes - 1, &all, &error), QKV_DATA_LOSS);
  all.first = UINT32_MAX;
  assert_int_equal(qkv_page_code_decode(code, 1, image, bytes, &all, &error), QKV_INVALID_ARGUMENT);
  image[200] ^= 1;
  all.first = 0;
  assert_int_equal(qkv_page_code_decode(code, 1, image, bytes, &all, &error), QKV_DATA_LOSS);
  ((float *)pair.k.segment.data)[37] = NAN;
  error = (qkv_error){0};
  assert_int_equal(qkv_page_code_encode(code, 1, 0, &pair.k.tensor, &pair.v.tensor, false, image, &bytes, &error),
                   QKV_INVALID_ARGUMENT);
  assert_non_null(strstr(error.text, "k[1, 0, 5] is "));
  pair.k.tensor.dims[0] = 65;
  assert_int_equal(qkv_page_code_encode(code, 1, 0, &pair.k.tensor, &pair.v.tensor, false, image, &bytes, &error),
                   QKV_INVALID_ARGUMENT);
  qkv_policy unset = QKV_POLICY_UNSET;
  const qkv_page_code *none = code;
  assert_int_equal(qkv_page_code_create(&model, &unset, QKV_PURPOSE_ATTEND, NULL, &none, &error),
                   QKV_INVALID_ARGUMENT);
  assert_null(none);
  free(image);
  free(shifted);
  free_pair(&pair);
  free_sequence(&rows);
  // The last one who holds it frees it.
  const qkv_page_code *other = qkv_page_code_ref(code);
  qkv_page_code_unref(&other);
  assert_null(other);
  assert_int_equal(qkv_page_code_layers(code), 4);
  assert_null(qkv_page_code_calibration(code));
  qkv_page_code_unref(&code);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_pages_arrive_as_they_were),
      cmocka_unit_test(test_pages_follow_pages_only),
      cmocka_unit_test(test_which_pages_are_given),
      cmocka_unit_test(test_a_full_budget_changes_nothing),
      cmocka_unit_test(test_page_code),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
