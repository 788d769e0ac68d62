// What is held out of traffic: which pages and queries, and that they are what came.
#include "engine/cache/holdout.h"
#include "tests/engine/cache/fixture.h"

enum { LAYERS = 3, HEADS = 2, GROUP = 2, DIM = 16, VALUE = 24 };

static qkv_holdout *make_holdout(void) {
  const bool teaches[LAYERS] = {true, false, true};
  qkv_holdout_shape shape = {.layers = LAYERS,
                             .kv_heads = HEADS,
                             .q_heads = HEADS * GROUP,
                             .key_dim = DIM,
                             .value_dim = VALUE,
                             .dtype = QKV_FP16,
                             .rope = {.theta = 10000}};
  assert_int_equal(qkv_rope_resolve(&shape.rope, DIM, NULL), QKV_OK);
  return qkv_holdout_create(&shape, teaches);
}

// Rows that tell which page they are of.
static void fill(float *rows, size_t count, uint64_t page) {
  for (size_t i = 0; i < count; i++) rows[i] = (float)page + (float)(i % 7) / 8;
}

static bool offer(qkv_holdout *holdout, uint32_t layer, uint64_t position) {
  static float k[QKV_PAGE_TOKENS * HEADS * DIM], v[QKV_PAGE_TOKENS * HEADS * VALUE];
  fill(k, sizeof k / sizeof *k, position / QKV_PAGE_TOKENS);
  fill(v, sizeof v / sizeof *v, position / QKV_PAGE_TOKENS);
  return qkv_holdout_page(holdout, layer, position, k, v);
}

static void test_pages(void **state) {
  (void)state;
  enum { OFFERED = 400 };
  qkv_holdout *holdout = make_holdout();
  size_t taken = 0;
  const size_t block = QKV_PAGE_TOKENS * HEADS * (DIM + VALUE) * 2;
  assert_int_equal(qkv_holdout_page_bytes(holdout), 2 * QKV_HOLDOUT_PAGES * block);
  assert_false(qkv_holdout_ready(holdout, 0, 0));
  assert_true(qkv_holdout_ready(holdout, 1, 0));  // does not teach
  qkv_holdout_begin_pages(holdout);
  for (uint64_t page = 0; page < OFFERED; page++) {
    taken += offer(holdout, 2, page * QKV_PAGE_TOKENS);
    if (page == 0) assert_false(qkv_holdout_ready(holdout, 2, 0));
    if (page == 1) assert_true(qkv_holdout_ready(holdout, 2, 0));
    if (page == 1) assert_false(qkv_holdout_ready(holdout, 2, 8));  // has no queries
  }
  assert_true(qkv_holdout_ready(holdout, 2, 8));
  assert_in_range(taken, QKV_HOLDOUT_PAGES, OFFERED / 8);  // the others teach
  qkv_held held;
  qkv_holdout_copy(holdout, 2, &held);
  assert_int_equal(held.pages, QKV_HOLDOUT_PAGES);
  assert_int_equal(held.tokens, 0);
  assert_int_equal(held.positions[0], 0);
  assert_true(held.positions[1] != held.positions[2]);
  for (size_t i = 0; i < held.pages; i++) {
    const float page = (float)(held.positions[i] / QKV_PAGE_TOKENS);
    assert_true(held.k[i * QKV_PAGE_TOKENS * HEADS * DIM] == page);
    assert_true(held.v[(i + 1) * QKV_PAGE_TOKENS * HEADS * VALUE - 1] >= page);
  }
  qkv_held_clear(&held);
  qkv_holdout_copy(holdout, 0, &held);
  assert_true(held.teaches && held.pages == 0);
  qkv_held_clear(&held);
  qkv_holdout_begin_pages(holdout);  // anew
  assert_false(qkv_holdout_ready(holdout, 2, 0));
  qkv_holdout_drop_pages(holdout);
  qkv_holdout_destroy(&holdout);
  assert_null(holdout);
}

// A sequence's first tokens are waited for, but not for ever.
static void test_first_tokens(void **state) {
  (void)state;
  qkv_holdout *holdout = make_holdout();
  qkv_holdout_begin_pages(holdout);
  for (uint64_t page = 1; page < QKV_HOLDOUT_PATIENCE; page++) {
    (void)offer(holdout, 0, page * QKV_PAGE_TOKENS);
    assert_false(qkv_holdout_ready(holdout, 0, 0));
  }
  (void)offer(holdout, 0, 7 * QKV_PAGE_TOKENS);
  assert_true(qkv_holdout_ready(holdout, 0, 0));
  assert_true(offer(holdout, 0, 0));  // has its place
  qkv_holdout_destroy(&holdout);
}

static void test_queries(void **state) {
  (void)state;
  enum { OFFERED = 3 * QKV_HOLDOUT_QUERIES * QKV_HOLDOUT_QUERY_EVERY };
  float q[HEADS * GROUP * DIM], head[QKV_HOLDOUT_QUERIES * GROUP * DIM];
  uint64_t stands[QKV_HOLDOUT_QUERIES];
  qkv_holdout *holdout = make_holdout();
  assert_int_equal(qkv_holdout_head_queries(holdout, 0, 1, head, stands), 0);
  qkv_holdout_begin_queries(holdout);
  for (uint64_t i = 0; i < OFFERED; i++) {
    fill(q, sizeof q / sizeof *q, i);
    assert_int_equal(qkv_holdout_query(holdout, 0, 1000 + i, q, false), i % QKV_HOLDOUT_QUERY_EVERY == 0);
  }
  qkv_held held;
  qkv_holdout_copy(holdout, 0, &held);
  assert_int_equal(held.tokens, QKV_HOLDOUT_QUERIES);
  uint64_t sum = 0;
  for (size_t i = 0; i < held.tokens; i++) {
    sum += held.stands[i] - 1000;
    assert_true(held.queries[i * HEADS * GROUP * DIM] == (float)(held.stands[i] - 1000));
  }
  assert_true(sum > QKV_HOLDOUT_QUERIES * OFFERED / 2);  // most of the first ones have gone
  assert_int_equal(qkv_holdout_head_queries(holdout, 0, 1, head, stands), QKV_HOLDOUT_QUERIES);
  assert_memory_equal(head, held.queries + (size_t)GROUP * DIM, (size_t)GROUP * DIM * sizeof *head);
  assert_memory_equal(stands, held.stands, sizeof stands);
  qkv_held_clear(&held);

  // Those from before RoPE are turned to where they stand.
  qkv_rope rope = {.theta = 10000};
  assert_int_equal(qkv_rope_resolve(&rope, DIM, NULL), QKV_OK);
  fill(q, sizeof q / sizeof *q, 3);
  assert_true(qkv_holdout_query(holdout, 2, 77, q, true));
  qkv_rope_forward(&rope, q, 77);
  assert_int_equal(qkv_holdout_head_queries(holdout, 2, 0, head, stands), 1);
  assert_memory_equal(head, q, DIM * sizeof *q);
  qkv_holdout_begin_queries(holdout);  // anew
  assert_int_equal(qkv_holdout_head_queries(holdout, 2, 0, head, stands), 0);
  qkv_holdout_destroy(&holdout);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_pages),
      cmocka_unit_test(test_first_tokens),
      cmocka_unit_test(test_queries),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
