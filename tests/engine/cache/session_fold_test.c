#include "tests/engine/cache/fold_scene.h"

// ---- Tests ----

static void test_what_it_has_comes_back(void **unused) {
  (void)unused;
  scene s;
  uint64_t before[LAYERS * 8], after[LAYERS * 8], durable[LAYERS];
  uint32_t ids[TOKENS];
  size_t before_count, after_count;
  setup(&s);
  sink(&s);
  read_pages(&s, before, &before_count);
  const uint64_t ssd = ssd_bytes(&s), used = qkv_arena_read(qkv_store_arena(s.store)).bytes_used;
  assert_true(qkv_store_fold(s.store, s.session));
  assert_true(qkv_session_is_folded(s.session));
  // All that it takes of the arena is its name and some 100 bytes, but for what it has alike with others.
  const uint64_t kind = qkvi_session_kind_cost(&s.session->kind->config);
  assert_true(qkv_arena_read(qkv_store_arena(s.store)).bytes_used <= 128 + kind);
  assert_int_equal(qkv_session_fixed_bytes(s.session), qkv_arena_read(qkv_store_arena(s.store)).bytes_used - kind);
  assert_true(sums(&s).folded == 1 && sums(&s).folded_pages == before_count);
  assert_int_equal(ssd_bytes(&s), ssd);
  assert_int_equal(qkv_session_length(s.session), TOKENS);
  qkv_session_read_durable(s.session, durable);
  assert_int_equal(durable[LAYERS - 1], TOKENS);
  assert_int_equal(qkv_session_tokens_cold(s.session), LAYERS * TOKENS);
  // Its place in the index of prefixes.
  qkv_session *found = NULL;
  uint64_t pages;
  const qkv_prefix_hash root = qkv_session_root(s.session);
  assert_int_equal(qkv_store_match(s.store, &root, s.ids, TOKENS, &found, &pages, 1), 1);
  assert_true(found == s.session && pages == TOKENS / QKV_PREFIX_PAGE);
  qkv_session_unref(&found);
  assert_true(qkv_session_is_folded(s.session));
  qkv_prefix_hash hashes[8], chain = root;
  assert_int_equal(qkv_session_indexed_hashes(s.session, hashes, 8), TOKENS / QKV_PREFIX_PAGE);
  for (size_t page = 0; page < TOKENS / QKV_PREFIX_PAGE; page++) {
    chain = qkv_prefix_next(&chain, s.ids + page * QKV_PREFIX_PAGE);
    assert_true(qkv_prefix_hash_equal(&hashes[page], &chain));
  }
  assert_int_equal(qkv_session_indexed_hashes(s.session, hashes, 1), 1);
  check_token_pages(&s, s.session, TOKENS / QKV_PREFIX_PAGE);
  assert_true(qkv_session_is_folded(s.session));
  assert_int_equal(s.backing.records[FOLDED].state, QKV_RECORD_WRITTEN);
  // A use.
  assert_int_equal(qkv_session_tokens_read(qkv_session_tokens_of(s.session), 0, ids, TOKENS), TOKENS);
  assert_memory_equal(ids, s.ids, sizeof ids);
  assert_false(qkv_session_is_folded(s.session));
  assert_int_equal(s.backing.records[FOLDED].state, QKV_RECORD_GONE);
  check_token_pages(&s, s.session, TOKENS / QKV_PREFIX_PAGE);
  read_pages(&s, after, &after_count);
  assert_int_equal(after_count, before_count);
  assert_memory_equal(after, before, before_count * sizeof *before);
  assert_int_equal(ssd_bytes(&s), ssd);
  assert_true(sums(&s).folded == 0 && sums(&s).folded_pages == 0 && sums(&s).unfolded == 1);
  assert_true(qkv_arena_read(qkv_store_arena(s.store)).bytes_used < used);  // averages of attention are gone
  assert_true(qkv_store_fold(s.store, s.session));                          // and again
  assert_int_equal(ssd_bytes(&s), ssd);
  teardown(&s);
}

// Truncated pages, with rows behind them: positions and valid tokens are as they were.
static void test_short_pages(void **unused) {
  (void)unused;
  scene s;
  row_pair pair;
  uint64_t appended, length;
  setup(&s);
  assert_int_equal(qkv_session_truncate(s.session, 100, NULL, 0, NULL), QKV_OK);
  make_pair(&pair, &s.rows, 100, 170, QKV_FP16);
  for (uint32_t layer = 0; layer < LAYERS; layer++)
    assert_int_equal(
        qkv_session_append(s.session, layer, 100, &pair.k.tensor, &pair.v.tensor, false, &appended, &length, NULL),
        QKV_OK);
  free_pair(&pair);
  sink(&s);
  qkv_missing_page before[8], after[8];
  const size_t count = qkv_session_missing(s.session, 1, 0, 0, false, before, 8);
  assert_true(qkv_store_fold(s.store, s.session));
  assert_int_equal(qkv_session_missing(s.session, 1, 0, 0, false, after, 8), count);
  for (size_t i = 0; i < count; i++) {
    assert_int_equal(after[i].position, before[i].position);
    assert_int_equal(after[i].record, before[i].record);
    assert_int_equal(after[i].bytes, before[i].bytes);
  }
  assert_int_equal(qkv_session_tokens_length(qkv_session_tokens_of(s.session)), 100);
  teardown(&s);
}

static void test_when_it_is_not_folded(void **unused) {
  (void)unused;
  scene s;
  setup(&s);
  assert_false(qkv_store_fold(s.store, s.session));  // it is in memory
  sink(&s);
  qkv_session *other = qkv_session_ref(s.session);
  assert_false(qkv_store_fold(s.store, s.session));  // another thread has it
  qkv_session_unref(&other);
  qkv_session_set_pinned(s.session, true);
  assert_false(qkv_store_fold(s.store, s.session));
  qkv_session_set_pinned(s.session, false);
  s.backing.failed = true;
  assert_false(qkv_store_fold(s.store, s.session));  // the tier takes nothing
  assert_int_equal(qkv_session_length(s.session), TOKENS);
  s.backing.failed = false;
  assert_true(qkv_store_fold(s.store, s.session));
  assert_false(qkv_store_fold(s.store, s.session));
  teardown(&s);
}

// Nothing of a record that is wrong does any harm: it is refused, or changes what a checksum would have caught.
static void test_records_that_are_wrong(void **unused) {
  (void)unused;
  scene s;
  qkv_error error = {0};
  size_t refused = 0;
  qkv_prefix_hash hashes[8];
  uint32_t ids[8 * QKV_PREFIX_PAGE];
  setup(&s);
  sink(&s);
  assert_true(qkv_store_fold(s.store, s.session));
  double_record *record = &s.backing.records[FOLDED];
  for (uint32_t at = 0; at < record->bytes; at++) {
    const uint8_t was = ((uint8_t *)record->page)[at];
    ((uint8_t *)record->page)[at] ^= at % 2 == 0 ? 0x81 : 0xff;
    assert_true(qkv_session_read_pages(s.session, 0, 7, hashes, ids) <= TOKENS / QKV_PREFIX_PAGE);
    const qkv_status status = qkv_session_unfold(s.session, NULL, &error);
    assert_true(status == QKV_OK || status == QKV_DATA_LOSS);
    refused += status == QKV_DATA_LOSS;
    if (status == QKV_OK) assert_true(qkv_store_fold(s.store, s.session));
    if (status == QKV_OK) continue;
    assert_true(qkv_session_is_folded(s.session));
    ((uint8_t *)record->page)[at] = was;
  }
  assert_true(refused > 40);  // the header at least
  assert_string_equal(error.text, "session a: its folded layers are damaged");
  record->state = QKV_RECORD_GONE;
  assert_int_equal(qkv_session_read_pages(s.session, 0, 7, hashes, ids), 0);
  error = (qkv_error){0};
  const qkv_layer *layer;
  assert_int_equal(qkv_session_read(s.session, 0, &layer, &error), QKV_DATA_LOSS);
  assert_string_equal(error.text, "session a: its folded layers are gone");
  assert_int_equal(qkv_session_truncate(s.session, 10, NULL, 0, NULL), QKV_DATA_LOSS);
  assert_int_equal(qkv_session_length(s.session), TOKENS);
  assert_int_equal(qkv_session_missing(s.session, 0, 0, 0, false, &(qkv_missing_page){0}, 1), 0);
  uint64_t freed;
  assert_int_equal(qkv_store_close_session(s.store, s.session, &freed, NULL), QKV_OK);
  assert_int_equal(sums(&s).folded, 1);
  qkv_session_unref(&s.session);
  assert_int_equal(sums(&s).folded, 0);
  teardown(&s);
}

// Another thread has a reference by now, and no layers are needed for any of this.
static void use_it(scene *s) {
  uint64_t durable[LAYERS], lengths[LAYERS], pages;
  qkv_session *named = NULL, *found = NULL;
  qkv_session_info info;
  qkv_prefix_hash hashes[8];
  assert_int_equal(qkv_store_session(s->store, "default", "a", &named, NULL), QKV_OK);
  assert_ptr_equal(named, s->session);
  qkv_session_touch(named);
  qkv_session_set_ttl(named, 1 << 20);
  qkv_session_read_info(named, &info, lengths);
  qkv_session_read_durable(named, durable);
  for (uint32_t i = 0; i < LAYERS; i++) assert_true(lengths[i] == TOKENS && durable[i] == TOKENS);
  assert_true(info.usage.tokens_cold == LAYERS * TOKENS && info.usage.bytes_stored == ssd_bytes(s));
  assert_true(info.config.ttl_ms == 1 << 20 && info.config.id == 77);
  assert_string_equal(info.config.name, "a");
  const qkv_prefix_hash root = qkv_session_root(named);
  assert_int_equal(qkv_store_match(s->store, &root, s->ids, TOKENS, &found, &pages, 1), 1);
  assert_int_equal(pages, TOKENS / QKV_PREFIX_PAGE);
  qkv_session_unref(&found);
  assert_int_equal(qkv_session_indexed_hashes(named, hashes, 8), TOKENS / QKV_PREFIX_PAGE);
  assert_int_equal(qkv_session_evict(named, UINT64_MAX, true), 0);
  assert_true(qkv_session_settle(named));
  qkv_session_tiers_looked(named);
  assert_int_equal(qkv_session_calibrations(named, 0, &(const qkv_calibration *){NULL}, 1), 0);
  qkv_session_unref(&named);
}

// Folded or not: it has the use's time to live, and expires by it.
static void test_uses_while_it_is_folded(void **unused) {
  (void)unused;
  scene s;
  for (int refused = 0; refused <= 1; refused++) {
    setup(&s);
    sink(&s);
    s.backing.failed = refused == 1;
    while_folding = use_it;
    while_folded = &s;
    assert_int_equal(qkv_store_fold(s.store, s.session), !refused);
    while_folding = NULL;
    use_it(&s);
    qkv_recency *recency = qkv_store_recency(s.store);
    qkv_recency_begin(recency, QKV_RECENCY_EXPIRING);
    qkv_session *next = qkv_recency_next(recency, QKV_RECENCY_EXPIRING);
    assert_ptr_equal(next, s.session);
    qkv_session_unref(&next);
    qkv_recency_end(recency, QKV_RECENCY_EXPIRING);
    qkv_recency_begin(recency, QKV_RECENCY_SUNK);
    next = qkv_recency_next(recency, QKV_RECENCY_SUNK);
    assert_ptr_equal(next, refused ? s.session : NULL);  // it is tried again
    qkv_session_unref(&next);
    qkv_recency_end(recency, QKV_RECENCY_SUNK);
    assert_int_equal(qkv_session_is_folded(s.session), !refused);
    teardown(&s);
  }
}

static void close_it(scene *s) {
  uint64_t freed;
  assert_int_equal(qkv_store_close(s->store, "default", "a", &freed, NULL), QKV_OK);
}

// It is not matched any more, folded or not, nor after its layers were made again.
static void test_a_close_while_it_is_folded(void **unused) {
  (void)unused;
  scene s;
  for (int refused = 0; refused <= 1; refused++) {
    setup(&s);
    sink(&s);
    s.backing.failed = refused == 1;
    while_folding = close_it;
    while_folded = &s;
    assert_int_equal(qkv_store_fold(s.store, s.session), !refused);
    while_folding = NULL;
    qkv_session *found = NULL;
    uint64_t pages;
    const qkv_prefix_hash root = qkv_session_root(s.session);
    for (int unfolded = 0; unfolded <= 1; unfolded++) {
      assert_int_equal(qkv_store_match(s.store, &root, s.ids, TOKENS, &found, &pages, 1), 0);
      assert_int_equal(qkv_prefix_index_read(qkv_store_prefixes(s.store)).holders, 0);
      assert_int_equal(qkv_session_unfold(s.session, NULL, NULL), QKV_OK);
    }
    assert_int_equal(qkv_session_tokens_length(qkv_session_tokens_of(s.session)), TOKENS);
    assert_int_equal(qkv_session_truncate(s.session, 0, NULL, 0, NULL), QKV_OK);
    append_all(&s);  // and what follows is not indexed
    assert_int_equal(qkv_prefix_index_read(qkv_store_prefixes(s.store)).holders, 0);
    teardown(&s);
  }
}

static void test_no_memory_for_the_layers(void **unused) {
  (void)unused;
  scene s;
  qkv_error error = {0};
  const qkv_layer *layer;
  setup(&s);
  sink(&s);
  assert_true(qkv_store_fold(s.store, s.session));
  qkv_arena *arena = qkv_store_arena(s.store);
  uint64_t taken = (1 << 24) - qkv_arena_read(arena).bytes_used;
  assert_int_equal(qkv_arena_reserve(arena, taken, NULL), QKV_OK);
  assert_int_equal(qkv_session_read(s.session, 0, &layer, &error), QKV_RESOURCE_EXHAUSTED);
  assert_true(qkv_session_is_folded(s.session));
  qkv_arena_unreserve(arena, taken);
  assert_int_equal(qkv_session_read(s.session, 0, &layer, NULL), QKV_OK);
  assert_int_equal(layer->length, TOKENS);
  assert_null(qkv_layer_validate(layer));
  qkv_session_read_done(s.session, 0);
  teardown(&s);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_what_it_has_comes_back),   cmocka_unit_test(test_short_pages),
      cmocka_unit_test(test_when_it_is_not_folded),    cmocka_unit_test(test_records_that_are_wrong),
      cmocka_unit_test(test_uses_while_it_is_folded),  cmocka_unit_test(test_a_close_while_it_is_folded),
      cmocka_unit_test(test_no_memory_for_the_layers),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
