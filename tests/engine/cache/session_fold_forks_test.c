// Folding of sessions that share pages with others (trunk.h).
#include "engine/cache/trunk.h"

#include <unistd.h>

#include "engine/cache/session_internal.h"
#include "tests/engine/cache/fold_scene.h"

enum { SHARED = 192 };  // three pages of four

// ---- Forks ----

static qkv_session *make_fork(scene *s, const char *name, uint64_t id, uint64_t position) {
  qkv_session *fork = NULL;
  qkv_session_config config = *qkv_session_config_of(s->session);
  config.name = name;
  config.id = id;
  const uint64_t positions[LAYERS] = {position, position, position, position};
  assert_int_equal(qkv_store_fork(s->store, s->session, &config, positions, &fork, NULL), QKV_OK);
  return fork;
}

static void close_session(const scene *s, qkv_session **session) {
  uint64_t freed;
  assert_int_equal(qkv_store_close_session(s->store, *session, &freed, NULL), QKV_OK);
  qkv_session_unref(session);
}

// All of it is durable and in memory.
static void setup_warm(scene *s) {
  setup(s);
  assert_int_equal(qkv_session_seal(s->session, NULL), QKV_OK);
  assert_true(qkv_session_settle(s->session));
}

static uint64_t used(const scene *s) {
  return qkv_arena_read(qkv_store_arena(s->store)).bytes_used;
}

static void validate(qkv_session *session) {
  for (uint32_t i = 0; i < LAYERS; i++) {
    const qkv_layer *layer;
    assert_int_equal(qkv_session_read(session, i, &layer, NULL), QKV_OK);
    const char *reason = qkv_layer_validate(layer);
    if (reason != NULL) fail_msg("%s", reason);
    qkv_session_read_done(session, i);
  }
}

static void unfold(qkv_session *session) {
  assert_true(qkv_session_is_folded(session));
  assert_int_equal(qkv_session_unfold(session, NULL, NULL), QKV_OK);
  assert_false(qkv_session_is_folded(session));
  validate(session);
}

static const qkv_page_range *range_of(const qkv_session *session, uint32_t layer, size_t range) {
  assert_true(range < layer_at(session, layer)->layer.range_count);
  return layer_at(session, layer)->layer.ranges[range].range;
}

// The number of the page's record in a layer.
static uint64_t record_at(const qkv_session *session, uint32_t layer, size_t page) {
  return qkvi_layer_peek(&layer_at(session, layer)->layer, page).record;
}

static qkv_session_info info_of(qkv_session *session) {
  qkv_session_info info;
  qkv_session_read_info(session, &info, NULL);
  return info;
}

// Rows of other values than the scene's, from `begin` on, in all layers, sealed and durable.
static void append_other(qkv_session *session, uint64_t begin, uint64_t tokens) {
  row_pair pair;
  sequence rows = make_sequence(qkv_session_model(session), begin + tokens, 9);
  make_pair(&pair, &rows, begin, begin + tokens, QKV_FP16);
  for (uint32_t layer = 0; layer < LAYERS; layer++) {
    uint64_t appended, length;
    assert_int_equal(
        qkv_session_append(session, layer, begin, &pair.k.tensor, &pair.v.tensor, false, &appended, &length, NULL),
        QKV_OK);
  }
  free_pair(&pair);
  free_sequence(&rows);
  assert_int_equal(qkv_session_seal(session, NULL), QKV_OK);
  assert_true(qkv_session_settle(session));
}

// ---- Tests ----

// The parent keeps its pages in memory; the fork has them again, the same.
static void test_a_fork_is_folded(void **unused) {
  (void)unused;
  scene s;
  setup_warm(&s);
  const uint64_t ssd = ssd_bytes(&s);
  qkv_session *fork = make_fork(&s, "b", FIRST_ID + 1, SHARED);
  const uint64_t with_fork = used(&s), records = record_at(fork, 2, 1);
  const qkv_page_range *range = range_of(fork, 2, 0);
  const qkv_session_info before = info_of(fork);
  assert_int_equal(before.usage.tokens_cold, 0);
  const qkv_session_info parent = info_of(s.session);  // which publishes that all of it is shared
  assert_int_equal(parent.usage.bytes_shared, parent.usage.bytes_coded);
  assert_true(qkv_store_fold(s.store, fork));
  assert_true(qkv_session_may_fold(s.session));
  assert_false(qkv_store_fold(s.store, s.session));  // its pages are in memory for it alone by now
  assert_true(used(&s) < with_fork - LAYERS * sizeof(locked_layer));
  assert_int_equal(ssd_bytes(&s), ssd);
  assert_true(sums(&s).folded == 1 && sums(&s).folded_pages == 0);
  assert_int_equal(s.backing.records[FOLDED - 1].bytes, 40 + 40 * LAYERS);  // neither pages nor ids
  const qkv_session_info folded = info_of(fork);
  assert_int_equal(folded.usage.tokens_coded, before.usage.tokens_coded);
  assert_int_equal(folded.usage.tokens_cold, 0);
  assert_int_equal(folded.usage.bytes_coded, before.usage.bytes_coded);
  assert_int_equal(folded.usage.bytes_shared, before.usage.bytes_coded);
  assert_int_equal(folded.usage.bytes_stored, before.usage.bytes_stored);
  assert_int_equal(info_of(s.session).usage.bytes_shared, 0);
  assert_int_equal(qkv_session_folded_held(fork), SHARED);
  assert_false(qkv_session_has_cold(fork));
  uint64_t bytes;
  assert_int_equal(qkv_session_cold(fork, 1, &bytes), 0);
  check_token_pages(&s, fork, SHARED / QKV_PREFIX_PAGE);
  unfold(fork);
  assert_int_equal(used(&s), with_fork);
  assert_ptr_equal(range_of(fork, 2, 0), range);
  assert_ptr_equal(range_of(s.session, 2, 0), range);
  assert_int_equal(atomic_load(&range->layers), 2);
  assert_true(atomic_load(&range->trunks) == 0 && range->reaches == NULL);
  assert_int_equal(record_at(fork, 2, 1), records);
  assert_int_equal(qkv_session_length(fork), SHARED);
  uint32_t ids[SHARED];
  assert_int_equal(qkv_session_tokens_read(qkv_session_tokens_of(fork), 0, ids, SHARED), SHARED);
  assert_memory_equal(ids, s.ids, sizeof ids);
  assert_int_equal(info_of(fork).usage.bytes_shared, before.usage.bytes_coded);
  assert_int_equal(ssd_bytes(&s), ssd);
  qkv_session_unref(&fork);
  teardown(&s);
}

// Many forks at one position have one trunk, those at another one another.
static void test_forks_have_trunks_together(void **unused) {
  (void)unused;
  scene s;
  qkv_session *forks[5];
  const char *const names[] = {"b", "c", "d", "e", "f"};
  setup_warm(&s);
  const uint64_t alone = used(&s);
  for (int i = 0; i < 5; i++) forks[i] = make_fork(&s, names[i], FIRST_ID + 1 + (uint64_t)i, i < 3 ? SHARED : 64);
  for (int i = 0; i < 5; i++) assert_true(qkv_store_fold(s.store, forks[i]));
  const qkv_page_range *range = range_of(s.session, 1, 0);
  assert_true(atomic_load(&range->layers) == 3 && atomic_load(&range->trunks) == 2 &&
              qkvi_range_trunk_pages(range) == 3);
  assert_true(used(&s) <= alone + 5 * 128);
  for (int i = 1; i < 5; i++)  // what they keep is one where it is equal
    assert_int_equal(atomic_load(&forks[i]->state) == atomic_load(&forks[i - 1]->state), i != 3);
  unfold(forks[1]);
  unfold(forks[4]);
  assert_true(atomic_load(&range->layers) == 5 && atomic_load(&range->trunks) == 2);
  assert_int_equal(qkv_session_length(forks[4]), 64);
  for (int i = 0; i < 5; i++) close_session(&s, &forks[i]);
  assert_true(atomic_load(&range->layers) == 1 && atomic_load(&range->trunks) == 0);
  assert_int_equal(used(&s), alone);
  teardown(&s);
}

// Nothing stays in memory for folded sessions alone, and what is not theirs is dropped.
static void test_the_parent_closes(void **unused) {
  (void)unused;
  scene s;
  setup_warm(&s);
  const uint64_t stored = info_of(s.session).usage.bytes_stored;
  qkv_session *fork = make_fork(&s, "b", FIRST_ID + 1, SHARED);
  const uint64_t records[] = {record_at(fork, 3, 0), record_at(fork, 3, 2)};
  assert_true(qkv_store_fold(s.store, fork));
  const qkv_page_range *range = range_of(s.session, 3, 0);
  const uint64_t fork_stored = info_of(fork).usage.bytes_stored;
  assert_int_equal(ssd_bytes(&s), stored);
  qkv_session_detach(s.session);
  uint64_t freed;
  assert_int_equal(qkv_store_close_session(s.store, s.session, &freed, NULL), QKV_OK);
  qkv_session_unref(&s.session);
  s.session = fork;
  assert_true(range->packed != NULL && range->count == 3 && atomic_load(&range->bytes_coded) == 0);
  assert_int_equal(ssd_bytes(&s), fork_stored);
  assert_int_equal(info_of(fork).usage.tokens_cold, LAYERS * SHARED);
  assert_int_equal(qkv_session_folded_held(fork), 0);
  // Its name, what sessions have alike, and the ids that it has of the parent.
  assert_true(used(&s) <= 128 + qkvi_session_kind_cost(&fork->kind->config) + 3 * 320);
  unfold(fork);
  assert_int_equal(ssd_bytes(&s), fork_stored);
  assert_int_equal(record_at(fork, 3, 0), records[0]);
  assert_int_equal(record_at(fork, 3, 2), records[1]);
  assert_int_equal(info_of(fork).usage.tokens_cold, LAYERS * SHARED);
  uint32_t ids[SHARED];
  assert_int_equal(qkv_session_tokens_read(qkv_session_tokens_of(fork), 0, ids, SHARED), SHARED);
  assert_memory_equal(ids, s.ids, sizeof ids);
  assert_true(qkv_store_fold(s.store, fork));  // alone now
  assert_int_equal(sums(&s).folded_pages, LAYERS * 3);
  assert_int_equal(ssd_bytes(&s), fork_stored);
  teardown(&s);
}

static void test_the_fork_closes(void **unused) {
  (void)unused;
  scene s;
  setup_warm(&s);
  const uint64_t before = used(&s), ssd = ssd_bytes(&s);
  qkv_session *fork = make_fork(&s, "b", FIRST_ID + 1, SHARED);
  assert_true(qkv_store_fold(s.store, fork));
  close_session(&s, &fork);
  assert_true(used(&s) == before && ssd_bytes(&s) == ssd);
  assert_int_equal(atomic_load(&range_of(s.session, 0, 0)->layers), 1);
  assert_int_equal(info_of(s.session).usage.tokens_cold, 0);
  validate(s.session);
  teardown(&s);
}

// The parent's rows are other ones from there on, and the fork has what it had.
static void test_the_parent_is_cut_and_goes_on(void **unused) {
  (void)unused;
  scene s;
  uint64_t before[4];
  for (int evicted = 0; evicted <= 1; evicted++) {
    setup_warm(&s);
    qkv_session *fork = make_fork(&s, "b", FIRST_ID + 1, SHARED);
    for (size_t page = 0; page < 3; page++) before[page] = record_at(fork, 1, page);
    const uint64_t stored = info_of(fork).usage.bytes_stored;
    assert_true(qkv_store_fold(s.store, fork));
    assert_int_equal(qkv_session_truncate(s.session, 70, NULL, 0, NULL), QKV_OK);
    if (evicted) (void)qkv_session_evict(s.session, UINT64_MAX, true);
    append_other(s.session, 70, 100);
    validate(s.session);
    if (evicted) (void)qkv_session_evict(s.session, UINT64_MAX, true);
    // Pages that the parent has not any more leave memory, too.
    if (evicted) assert_int_equal(info_of(fork).usage.tokens_cold, LAYERS * SHARED);
    unfold(fork);
    assert_int_equal(qkv_session_length(fork), SHARED);
    for (size_t page = 0; page < 3; page++) assert_int_equal(record_at(fork, 1, page), before[page]);
    assert_int_equal(info_of(fork).usage.bytes_stored, stored);
    assert_int_equal(qkv_session_length(s.session), 170);
    assert_int_not_equal(record_at(s.session, 1, 2), before[2]);
    qkv_session_unref(&fork);
    teardown(&s);
  }
}

// Token ids of which the trunk has the first page, and the record those that the fork has appended.
static void test_token_ids_of_both(void **unused) {
  (void)unused;
  scene s;
  enum { OWN = TOKENS - 64 };
  setup_warm(&s);
  qkv_session *fork = make_fork(&s, "b", FIRST_ID + 1, 64);
  append_other(fork, 64, OWN);
  qkv_session_tokens *tokens = qkv_session_tokens_of(fork);
  uint64_t reserved = qkv_session_tokens_cost(tokens, 64, OWN);
  assert_int_equal(qkv_arena_reserve(tokens->config.arena, reserved, NULL), QKV_OK);
  qkv_session_tokens_keep(tokens, qkv_session_tokens_cuts(tokens), 64, s.ids + 64, OWN, &reserved);
  qkv_arena_unreserve(tokens->config.arena, reserved);
  check_token_pages(&s, fork, 3);
  assert_true(qkv_session_evict(fork, UINT64_MAX, true) > 0);
  assert_true(qkv_store_fold(s.store, fork));
  assert_int_equal(qkvi_trunk_token_pages(qkvi_session_trunk(atomic_load(&fork->state))), 1);
  check_token_pages(&s, fork, 3);
  assert_true(qkv_session_is_folded(fork));
  unfold(fork);
  check_token_pages(&s, fork, 3);
  qkv_session_unref(&fork);
  teardown(&s);
}

// Evicted and brought back for both.
static void test_eviction_and_return(void **unused) {
  (void)unused;
  scene s;
  setup_warm(&s);
  qkv_session *fork = make_fork(&s, "b", FIRST_ID + 1, SHARED);
  (void)usleep(2000);
  validate(fork);  // later than its parent: a use that counts while the fork is in memory
  assert_int_equal(qkv_session_evict(s.session, UINT64_MAX, true), 0);
  assert_true(qkv_store_fold(s.store, fork));
  assert_true(qkv_session_evict(s.session, UINT64_MAX, true) > 0);
  assert_int_equal(info_of(fork).usage.tokens_cold, LAYERS * SHARED);
  assert_int_equal(qkv_session_folded_held(fork), 0);
  qkv_missing_page page;
  assert_int_equal(qkv_session_missing(s.session, 2, 0, 0, false, &page, 1), 1);
  size_t failed;
  void *image = qkv_arena_alloc_overhead(qkvi_session_arena(s.session), page.bytes);
  memcpy(image, s.backing.records[page.record].page, page.bytes);
  assert_int_equal(qkv_session_restore(s.session, 2, NULL, &page, &image, 1, &failed, NULL), QKV_OK);
  assert_int_equal(info_of(fork).usage.tokens_cold, LAYERS * SHARED - 64);
  uint64_t bytes;
  assert_int_equal(qkv_session_cold(fork, 2, &bytes), SHARED - 64);
  unfold(fork);
  assert_int_equal(info_of(fork).usage.tokens_cold, LAYERS * SHARED - 64);
  assert_int_equal(info_of(fork).usage.bytes_shared, info_of(fork).usage.bytes_coded);
  qkv_session_unref(&fork);
  teardown(&s);
}

// Of the range that both have, the fork sees one page of four. The parent is folded while the others are in memory.
static void test_pages_of_the_parent_alone(void **unused) {
  (void)unused;
  scene s;
  for (int unfolded = 0; unfolded <= 1; unfolded++) {
    setup_warm(&s);
    qkv_session *fork = make_fork(&s, "b", FIRST_ID + 1, 64);
    const uint64_t fork_stored = info_of(fork).usage.bytes_stored;
    (void)qkv_session_evict(fork, UINT64_MAX, true);
    (void)info_of(s.session);  // which publishes that all of it is shared
    assert_true(qkv_store_fold(s.store, s.session));
    const qkv_page_range *range = range_of(fork, 1, 0);
    assert_true(atomic_load(&range->bytes_coded) > 0);
    assert_true(qkv_store_fold(s.store, fork));
    assert_true(range->packed != NULL && atomic_load(&range->bytes_coded) == 0 && range->count == 4);
    if (unfolded) unfold(fork);
    close_session(&s, &s.session);
    s.session = fork;
    assert_int_equal(range->count, unfolded ? 4 : 1);
    if (unfolded) assert_true(qkv_store_fold(s.store, fork));  // whose record has its page: there is no trunk
    assert_int_equal(ssd_bytes(&s), fork_stored);
    unfold(fork);
    teardown(&s);
  }
}

// Own pages behind shared ones are in the record; they are not folded while they are in memory.
static void test_rows_of_its_own(void **unused) {
  (void)unused;
  scene s;
  uint64_t before[5];
  setup_warm(&s);
  qkv_session *fork = make_fork(&s, "b", FIRST_ID + 1, 150);
  append_other(fork, 150, 80);
  assert_false(qkv_store_fold(s.store, fork));
  (void)usleep(2000);
  validate(s.session);  // which uses what is shared later than the fork
  (void)qkv_session_evict(fork, UINT64_MAX, true);
  const uint64_t ssd = ssd_bytes(&s), pages = layer_at(fork, 0)->layer.page_count;
  assert_int_equal(pages, 5);  // two, what is left of the third, and two more
  for (size_t page = 0; page < pages; page++) before[page] = record_at(fork, 0, page);
  const qkv_session_info held = info_of(fork);
  assert_true(held.usage.tokens_cold > 0 && held.usage.tokens_cold < LAYERS * 230);
  assert_true(qkv_store_fold(s.store, fork));
  assert_int_equal(ssd_bytes(&s), ssd);
  assert_int_equal(info_of(fork).usage.tokens_cold, held.usage.tokens_cold);
  assert_true(sums(&s).folded_pages > 0 && sums(&s).folded_pages < LAYERS * pages);
  unfold(fork);
  for (size_t page = 0; page < pages; page++) assert_int_equal(record_at(fork, 0, page), before[page]);
  assert_int_equal(qkv_session_length(fork), 230);
  assert_int_equal(ssd_bytes(&s), ssd);
  close_session(&s, &fork);
  teardown(&s);
}

static bool is_listed(const scene *s, const qkv_session *session, qkv_recency_list list) {
  qkv_recency *recency = qkv_store_recency(s->store);
  bool found = false;
  qkv_recency_begin(recency, list);
  for (qkv_session *next; (next = qkv_recency_next(recency, list)) != NULL;) {
    found |= next == session;
    qkv_session_unref(&next);
  }
  qkv_recency_end(recency, list);
  return found;
}

// All that have the pages are folded; who comes back first has them with who comes back next.
static void test_all_are_folded(void **unused) {
  (void)unused;
  scene s;
  setup_warm(&s);
  const uint64_t ssd = ssd_bytes(&s);
  qkv_session *fork = make_fork(&s, "b", FIRST_ID + 1, SHARED);
  assert_true(qkv_store_fold(s.store, fork));
  (void)qkv_session_evict(s.session, UINT64_MAX, true);
  assert_true(qkv_store_fold(s.store, s.session));
  assert_int_equal(ssd_bytes(&s), ssd);
  assert_int_equal(sums(&s).folded, 2);
  unfold(s.session);
  unfold(fork);
  assert_ptr_equal(range_of(fork, 0, 0), range_of(s.session, 0, 0));
  assert_true(is_listed(&s, fork, QKV_RECENCY_CODED));  // the parent may bring its pages back
  assert_int_equal(ssd_bytes(&s), ssd);
  assert_int_equal(qkv_session_length(s.session), TOKENS);
  assert_true(qkv_store_fold(s.store, fork));
  assert_true(qkv_store_fold(s.store, s.session));
  close_session(&s, &fork);
  unfold(s.session);
  assert_int_equal(ssd_bytes(&s), ssd);
  teardown(&s);
}

// The others leave while its record is being written; the record does not have what they shared.
static void close_parent(scene *s) {
  uint64_t freed;
  assert_int_equal(qkv_store_close(s->store, "default", "a", &freed, NULL), QKV_OK);
  qkv_session_unref(&s->session);
}

static void test_the_parent_closes_meanwhile(void **unused) {
  (void)unused;
  scene s;
  for (int refused = 0; refused <= 1; refused++) {
    setup_warm(&s);
    qkv_session *fork = make_fork(&s, "b", FIRST_ID + 1, SHARED);
    s.backing.failed = refused == 1;
    while_folding = close_parent;
    while_folded = &s;
    assert_int_equal(qkv_store_fold(s.store, fork), !refused);
    while_folding = NULL;
    s.backing.failed = false;
    s.session = fork;
    if (!refused) unfold(fork);
    validate(fork);
    assert_int_equal(info_of(fork).usage.tokens_cold, refused ? 0 : LAYERS * SHARED);
    if (!refused) assert_int_equal(ssd_bytes(&s), info_of(fork).usage.bytes_stored);
    teardown(&s);
  }
}

static void test_records_that_are_wrong(void **unused) {
  (void)unused;
  scene s;
  size_t refused = 0;
  setup_warm(&s);
  qkv_session *fork = make_fork(&s, "b", FIRST_ID + 1, 150);
  append_other(fork, 150, 80);
  (void)qkv_session_evict(fork, UINT64_MAX, true);
  assert_true(qkv_store_fold(s.store, fork));
  double_record *record = &s.backing.records[FOLDED - 1];
  for (uint32_t at = 0; at < record->bytes; at++) {
    const uint8_t was = ((uint8_t *)record->page)[at];
    ((uint8_t *)record->page)[at] ^= at % 2 == 0 ? 0x81 : 0xff;
    const qkv_status status = qkv_session_unfold(fork, NULL, NULL);
    refused += status == QKV_DATA_LOSS;
    if (status == QKV_OK) assert_true(qkv_store_fold(s.store, fork));
    if (status == QKV_OK) continue;
    assert_int_equal(status, QKV_DATA_LOSS);
    assert_true(qkv_session_is_folded(fork));
    ((uint8_t *)record->page)[at] = was;
  }
  assert_true(refused > 40);
  qkv_session_unref(&fork);
  teardown(&s);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_a_fork_is_folded),
      cmocka_unit_test(test_forks_have_trunks_together),
      cmocka_unit_test(test_the_parent_closes),
      cmocka_unit_test(test_the_fork_closes),
      cmocka_unit_test(test_the_parent_is_cut_and_goes_on),
      cmocka_unit_test(test_token_ids_of_both),
      cmocka_unit_test(test_eviction_and_return),
      cmocka_unit_test(test_rows_of_its_own),
      cmocka_unit_test(test_pages_of_the_parent_alone),
      cmocka_unit_test(test_all_are_folded),
      cmocka_unit_test(test_the_parent_closes_meanwhile),
      cmocka_unit_test(test_records_that_are_wrong),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
