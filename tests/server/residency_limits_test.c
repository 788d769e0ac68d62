// The SSD tier's parts of memory-budget, and requests beyond them.
#include "tests/server/residency_fixture.h"

#include "engine/base/clock.h"

static void test_windows_of_many(void **unused) {
  (void)unused;
  scene s;
  setup(&s, "auto");
  const uint64_t first = qkvi_restore_window(s.residency, 0);
  uint64_t taken = 0;
  assert_true(first > 0 && 2 * first <= qkvi_budget_limit(s.residency) / 64);
  for (int i = 0; i < 100; i++) {
    const uint64_t next = qkvi_restore_window(s.residency, taken);
    assert_true(next <= first && taken + next <= 2 * first);
    taken += next;
  }
  assert_int_equal(qkvi_restore_window(s.residency, 2 * first), 0);
  teardown(&s);
}

// Pages are evicted where their limit is lowered, though no thread asks for memory. A request beyond the limit is
// refused at once, not after seconds.
static void test_a_lower_limit(void **unused) {
  (void)unused;
  scene s;
  setup(&s, "auto");
  qkv_arena *arena = qkv_store_arena(s.store);
  content wanted = in_memory(&s, TOKENS);
  qkv_session *session = open_session(&s, "s", QKV_DURABILITY_ASYNC);
  assert_int_equal(append(&s, session, 0, 0, TOKENS), QKV_OK);
  assert_int_equal(qkv_session_seal(session, NULL), QKV_OK);
  qkv_session_info info;
  qkv_session_read_info(session, &info, NULL);
  const uint64_t pages = info.usage.bytes_coded, limit = qkvi_budget_taken(s.residency) - pages / 2;
  uint64_t headroom = 0;
  qkv_error error = {0};
  qkv_arena_set_limit(arena, limit);
  assert_int_equal(qkvi_budget_limit(s.residency), limit);
  for (int i = 0; i < 3000 && qkvi_budget_taken(s.residency) > limit; i++) usleep(10000);
  assert_true(qkvi_budget_taken(s.residency) <= limit);
  const int64_t begin = qkv_now_ms();
  assert_int_equal(qkvi_budget_reserve(s.residency, NULL, limit + 1, 0, &headroom, &error), QKV_RESOURCE_EXHAUSTED);
  assert_true(qkv_now_ms() - begin < 5000);
  assert_non_null(strstr(error.text, "memory-budget is 16777216 bytes"));
  assert_non_null(strstr(error.text, "for memory outside pages"));
  assert_int_equal(qkvi_budget_reserve(s.residency, NULL, pages / 4, 0, &headroom, &error), QKV_OK);
  assert_true(qkvi_budget_taken(s.residency) <= limit);
  qkvi_budget_unreserve(s.residency, &headroom);
  qkv_arena_set_limit(arena, UINT64_MAX);
  assert_same(&s, "s", &wanted);
  free_content(&wanted);
  qkv_session_unref(&session);
  teardown(&s);
}

// Records that are larger than a segment are refused and say nothing about the disk: other sessions' pages become
// durable.
static void test_what_no_segment_takes(void **unused) {
  (void)unused;
  scene s;
  setup(&s, "auto");
  const uint64_t most = qkv_storage_record_bytes_max(s.residency->storage);
  qkv_session *session = open_session(&s, "s", QKV_DURABILITY_SYNC);
  const uint64_t id = qkv_session_id(session);
  const qkv_backing *table = qkv_session_config_of(session)->backing;
  const qkv_record_meta meta = {.session = id, .tokens = 64};
  _Atomic bool stop = false;
  uint8_t *bytes = calloc(most + 1, 1);
  assert_true(bytes != NULL && most < 1 << 20);
  assert_int_equal(table->put_fold(table->context, id, bytes, most + 1, &stop), 0);
  assert_int_equal(qkvi_write_back_put(table->context, &meta, &(qkvi_payload){.copy = bytes}, most + 1), 0);
  assert_int_equal(qkv_metric_read(&s.metrics[QKV_METRIC_SPILL_DEGRADED]), 0);
  assert_false(qkvi_write_back_rests(s.residency));
  assert_int_equal(append(&s, session, 0, 0, TOKENS), QKV_OK);
  sync_all(&s, session);
  assert_int_equal(qkv_metric_read(&s.metrics[QKV_METRIC_SPILL_FAILED]), 0);
  qkv_session_unref(&session);
  teardown(&s);
}

// Of exact rows as many are put as fit into a record.
static void test_rows_that_no_segment_takes(void **unused) {
  (void)unused;
  scene s;
  setup(&s, "auto");
  qkv_session *session = open_session(&s, "s", QKV_DURABILITY_SYNC);
  const uint64_t id = qkv_session_id(session);
  const qkv_backing *table = qkv_session_config_of(session)->backing;
  const qkv_model wide = test_model(32, 32, 128, 128, QKV_FP32);
  const size_t token_bytes = 32 * 128 * sizeof(float);
  float *rows = calloc(QKV_PAGE_TOKENS, token_bytes);
  assert_non_null(rows);
  uint32_t tokens = QKV_PAGE_TOKENS;
  assert_true(2 * tokens * token_bytes > qkv_storage_record_bytes_max(s.residency->storage));
  assert_int_not_equal(table->put_rows(table->context, id, &wide, 0, 0, &tokens, rows, rows, NULL), 0);
  assert_in_range(tokens, 1, QKV_PAGE_TOKENS - 1);
  free(rows);
  qkv_session_unref(&session);
  teardown(&s);
}

int main(void) {
  qkv_log_setup(stderr, QKV_LOG_ERROR);
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_windows_of_many),
      cmocka_unit_test(test_a_lower_limit),
      cmocka_unit_test(test_what_no_segment_takes),
      cmocka_unit_test(test_rows_that_no_segment_takes),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
