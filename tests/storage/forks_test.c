// Sessions that inherit records: the content of each view, the lifetime of records, and what a restart finds.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/storage/fixture.h"

enum { SIZE = 3000, PAGES = 4 };

// ---- Asking ----

static void reopen(scene *on) {
  scene_close(on);
  scene_open(on);
}

// Tokens of a record that the last opening reported as one of `session`'s view; 0: not reported. Asserts that it was
// reported once.
static uint32_t told(const scene *on, uint64_t session, uint64_t record) {
  uint32_t tokens = 0;
  for (size_t i = 0; i < on->record_count; i++) {
    if (on->records[i].record != record || on->records[i].meta.session != session) continue;
    assert_int_equal(tokens, 0);
    tokens = on->records[i].meta.tokens;
  }
  return tokens;
}

static size_t told_of(const scene *on, uint64_t session) {
  size_t count = 0;
  for (size_t i = 0; i < on->record_count; i++) count += on->records[i].meta.session == session ? 1 : 0;
  return count;
}

static bool is_told_session(const scene *on, uint64_t session) {
  for (size_t i = 0; i < on->entry_count; i++) {
    if (on->entries[i].session == session) return true;
  }
  return false;
}

static bool is_there(scene *on, uint64_t record) {
  uint8_t buffer[SIZE];
  const qkv_status status = scene_read(on, record, buffer, SIZE);
  assert_true(status == QKV_OK || status == QKV_NOT_FOUND);
  return status == QKV_OK;
}

// PAGES records of 64 tokens, of one layer.
static void put_pages(scene *on, uint64_t session, uint32_t layer, uint64_t records[PAGES]) {
  for (uint64_t i = 0; i < PAGES; i++) records[i] = scene_put(on, session, layer, 64 * i, SIZE);
}

static void check_pages(const scene *on, uint64_t session, const uint64_t records[PAGES],
                        const uint32_t tokens[PAGES]) {
  for (size_t i = 0; i < PAGES; i++) assert_int_equal(told(on, session, records[i]), tokens[i]);
}

// ---- Views ----

static void a_fork_has_what_lies_below_its_positions(void **state) {
  scene *on = *state;
  scene_open(on);
  const uint64_t parent = scene_session(on);
  uint64_t records[3][PAGES];
  for (uint32_t layer = 0; layer < 3; layer++) put_pages(on, parent, layer, records[layer]);
  const uint64_t child = scene_fork(on, parent, (const uint64_t[]){100, 1000}, 2, NULL);
  const uint64_t own = scene_put(on, child, 0, 100, SIZE);
  for (int round = 0; round < 2; round++) {
    reopen(on);
    check_pages(on, child, records[0], (const uint32_t[]){64, 36, 0, 0});
    check_pages(on, child, records[1], (const uint32_t[]){64, 64, 64, 64});
    check_pages(on, child, records[2], (const uint32_t[]){0, 0, 0, 0});
    for (size_t i = 0; i < 3; i++) check_pages(on, parent, records[i], (const uint32_t[]){64, 64, 64, 64});
    assert_int_equal(told(on, child, own), 64);
    assert_int_equal(told_of(on, child), 7);
    assert_int_equal(told_of(on, parent), 12);
    assert_int_equal(scene_stats(on).records, 13);
    // By session, layer, position.
    for (size_t i = 1; i < on->record_count; i++) {
      const qkv_record_meta *one = &on->records[i - 1].meta, *next = &on->records[i].meta;
      assert_true(one->session < next->session || one->layer < next->layer || one->position < next->position);
    }
    assert_int_equal(on->entry_count, 2);
    assert_int_equal(on->entries[1].kind, QKV_JOURNAL_SESSION_FORK);
    assert_int_equal(on->entries[1].session, child);
    assert_int_equal(on->entries[1].parent, parent);
    assert_int_equal(on->entries[1].layers, 2);
    assert_int_equal(on->positions[1][0], 100);
    assert_int_equal(on->positions[1][1], 1000);
    assert_int_equal(on->entries[1].bytes, 4);
    assert_memory_equal(on->texts[1], "fork", 4);
  }
  scene_check(on, parent, records[1][3], 192, SIZE);
}

// A page that the parent had in memory when it was forked, and writes later.
static void what_the_parent_puts_later_is_inherited(void **state) {
  scene *on = *state;
  scene_open(on);
  const uint64_t parent = scene_session(on);
  const uint64_t child = scene_fork(on, parent, (const uint64_t[]){128, 128}, 2, NULL);
  uint64_t later[PAGES];
  put_pages(on, parent, 0, later);
  assert_int_equal(scene_truncate(on, parent, 0, 0), QKV_OK);
  uint64_t behind[PAGES], other[PAGES];
  put_pages(on, parent, 0, behind);
  put_pages(on, parent, 1, other);
  for (int round = 0; round < 2; round++) {
    reopen(on);
    check_pages(on, child, later, (const uint32_t[]){64, 64, 0, 0});
    check_pages(on, child, behind, (const uint32_t[]){0, 0, 0, 0});
    check_pages(on, child, other, (const uint32_t[]){64, 64, 0, 0});
    check_pages(on, parent, later, (const uint32_t[]){0, 0, 0, 0});
    check_pages(on, parent, behind, (const uint32_t[]){64, 64, 64, 64});
    assert_int_equal(scene_stats(on).records, 10);
  }
}

// The journal keeps a cut that a later one supersedes for the parent, as the child was forked in between.
static void cuts_before_the_fork_concern_it(void **state) {
  scene *on = *state;
  scene_open(on);
  const uint64_t parent = scene_session(on);
  uint64_t records[PAGES];
  put_pages(on, parent, 0, records);
  assert_int_equal(scene_truncate(on, parent, 0, 150), QKV_OK);
  assert_int_equal(scene_truncate(on, parent, 0, 100), QKV_OK);
  const uint64_t child = scene_fork(on, parent, (const uint64_t[]){256}, 1, NULL);
  const uint64_t again = scene_put(on, parent, 0, 100, SIZE);
  assert_int_equal(scene_truncate(on, parent, QKV_LAYER_ALL, 50), QKV_OK);
  assert_false(is_there(on, records[2]));
  for (int round = 0; round < 3; round++) {
    reopen(on);
    check_pages(on, child, records, (const uint32_t[]){64, 36, 0, 0});
    check_pages(on, parent, records, (const uint32_t[]){50, 0, 0, 0});
    assert_int_equal(told(on, child, again), 64);  // put before the second cut, below the child's position
    assert_int_equal(told(on, parent, again), 0);
    size_t cuts = 0;
    for (size_t i = 0; i < on->entry_count; i++) cuts += on->entries[i].kind == QKV_JOURNAL_SESSION_TRUNCATE ? 1 : 0;
    assert_int_equal(cuts, 2);
  }
}

static void a_cut_behind_the_fork_parts_the_two(void **state) {
  scene *on = *state;
  scene_open(on);
  const uint64_t parent = scene_session(on);
  uint64_t records[PAGES];
  put_pages(on, parent, 0, records);
  const uint64_t child = scene_fork(on, parent, (const uint64_t[]){256}, 1, NULL);
  assert_int_equal(scene_truncate(on, parent, 0, 100), QKV_OK);
  // The same page with other rows from 100 on: of this record the child may have the rows below.
  const uint64_t again = scene_put(on, parent, 0, 64, SIZE), next = scene_put(on, parent, 0, 128, SIZE);
  assert_int_equal(scene_truncate(on, parent, 0, 120), QKV_OK);
  const uint64_t last = scene_put(on, parent, 0, 128, SIZE);
  const uint64_t younger = scene_fork(on, parent, (const uint64_t[]){256}, 1, NULL);
  for (int round = 0; round < 2; round++) {
    assert_true(is_there(on, records[3]));
    assert_false(is_there(on, next));
    reopen(on);
    check_pages(on, child, records, (const uint32_t[]){64, 64, 64, 64});
    assert_int_equal(told_of(on, child), PAGES);
    for (int i = 0; i < 2; i++) {
      const uint64_t session = i == 0 ? parent : younger;
      assert_int_equal(told(on, session, records[0]), 64);
      assert_int_equal(told(on, session, again), 56);
      assert_int_equal(told(on, session, last), 64);
      assert_int_equal(told_of(on, session), 3);
    }
  }
  // Without its own record the child has that much of the parent's.
  qkv_storage_drop(on->storage, records[1]);
  assert_int_equal(scene_close_session(on, parent), QKV_OK);
  assert_true(is_there(on, again) && is_there(on, last));
  assert_int_equal(scene_close_session(on, younger), QKV_OK);
  assert_true(is_there(on, again));
  assert_false(is_there(on, last));
}

static void a_cut_of_the_child_is_its_own(void **state) {
  scene *on = *state;
  scene_open(on);
  const uint64_t parent = scene_session(on);
  uint64_t records[PAGES];
  put_pages(on, parent, 0, records);
  const uint64_t child = scene_fork(on, parent, (const uint64_t[]){256}, 1, NULL);
  assert_int_equal(scene_truncate(on, child, 0, 100), QKV_OK);
  const uint64_t own = scene_put(on, child, 0, 64, SIZE);
  const uint64_t late = scene_put(on, parent, 0, 192, SIZE);  // rows that the child has cut do not come back
  for (int round = 0; round < 2; round++) {
    reopen(on);
    check_pages(on, parent, records, (const uint32_t[]){64, 64, 64, 0});
    assert_int_equal(told(on, parent, late), 64);
    assert_int_equal(told(on, child, records[0]), 64);
    assert_int_equal(told(on, child, own), 64);
    assert_int_equal(told_of(on, child), 2);
  }
  // The parent's page at 64 counts with the 36 tokens of before the cut once the child's own is gone.
  assert_int_equal(scene_close_session(on, parent), QKV_OK);
  assert_false(is_there(on, late));
  assert_true(is_there(on, records[1]));
  assert_false(is_there(on, records[2]));
  qkv_storage_drop(on->storage, own);
  scene_sync(on);
  qkv_record_info info;
  assert_int_equal(qkv_storage_find(on->storage, records[1], &info), QKV_OK);
  assert_int_equal(info.meta.tokens, 36);
}

// Two heirs that reach equally far, with a cut between their forks: they need different records.
static void heirs_of_other_times_do_not_stand_in(void **state) {
  scene *on = *state;
  scene_open(on);
  for (int round = 0; round < 2; round++) {
    const uint64_t parent = scene_session(on), position = 256;
    uint64_t old[PAGES], young[PAGES];
    put_pages(on, parent, 0, old);
    const uint64_t elder = scene_fork(on, parent, &position, 1, NULL);
    assert_int_equal(scene_truncate(on, parent, 0, 64), QKV_OK);
    for (uint64_t i = 1; i < PAGES; i++) young[i] = scene_put(on, parent, 0, 64 * i, SIZE);
    const uint64_t younger = scene_fork(on, parent, &position, 1, NULL);
    if (round == 1) assert_int_equal(scene_close_session(on, parent), QKV_OK);
    for (size_t i = 1; i < PAGES; i++) assert_true(is_there(on, old[i]) && is_there(on, young[i]));
    assert_int_equal(scene_close_session(on, round == 0 ? elder : younger), QKV_OK);
    for (size_t i = 1; i < PAGES; i++) {
      assert_int_equal(is_there(on, old[i]), round == 1);
      assert_int_equal(is_there(on, young[i]), round == 0);
    }
    assert_true(is_there(on, old[0]));
    assert_int_equal(scene_close_session(on, round == 0 ? younger : elder), QKV_OK);
    if (round == 0) assert_int_equal(scene_close_session(on, parent), QKV_OK);
    assert_int_equal(scene_stats(on).records, 0);
  }
}

// Also where it has fewer tokens: a session's own record belongs to its own history.
static void an_own_record_wins(void **state) {
  scene *on = *state;
  scene_open(on);
  const uint64_t parent = scene_session(on), position = 256;
  const uint64_t inherited = scene_put(on, parent, 0, 0, SIZE), child = scene_fork(on, parent, &position, 1, NULL);
  const uint64_t grandchild = scene_fork(on, child, &position, 1, NULL);
  uint64_t own = 0;
  const qkv_record_meta meta = {.session = child, .tokens = 10, .kind = 1};
  assert_int_equal(scene_put_status(on, &meta, SIZE, true, &own), QKV_OK);
  reopen(on);
  assert_int_equal(on->record_count, 3);
  assert_int_equal(told(on, parent, inherited), 64);
  assert_int_equal(told(on, child, own), 10);
  assert_int_equal(told(on, grandchild, inherited), 64);
}

static void forks_of_forks_inherit(void **state) {
  scene *on = *state;
  scene_open(on);
  const uint64_t first = scene_session(on);
  uint64_t records[PAGES], more[PAGES];
  put_pages(on, first, 0, records);
  const uint64_t second = scene_fork(on, first, (const uint64_t[]){200}, 1, NULL);
  assert_int_equal(scene_truncate(on, second, 0, 130), QKV_OK);
  for (uint64_t i = 0; i < PAGES; i++) more[i] = scene_put(on, second, 0, 130 + 64 * i, SIZE);
  const uint64_t third = scene_fork(on, second, (const uint64_t[]){300, 500}, 2, NULL);
  assert_int_equal(scene_truncate(on, second, 0, 10), QKV_OK);  // behind the fork
  for (int round = 0; round < 4; round++) {
    if (round == 2) assert_int_equal(scene_close_session(on, first), QKV_OK);
    if (round == 3) assert_int_equal(scene_close_session(on, second), QKV_OK);
    assert_int_equal(is_there(on, records[0]), true);
    assert_int_equal(is_there(on, records[2]), true);
    assert_int_equal(is_there(on, records[3]), round < 2);
    assert_false(is_there(on, more[3]));  // begins behind 300
    reopen(on);
    check_pages(on, third, records, (const uint32_t[]){64, 64, 2, 0});
    check_pages(on, third, more, (const uint32_t[]){64, 64, 42, 0});
    check_pages(on, second, records, (const uint32_t[]){round < 3 ? 10 : 0, 0, 0, 0});
    assert_int_equal(told_of(on, first), round < 2 ? PAGES : 0);
    assert_int_equal(is_told_session(on, first), round < 2);
    assert_int_equal(is_told_session(on, second), round < 3);
  }
  assert_int_equal(scene_close_session(on, third), QKV_OK);
  assert_int_equal(scene_stats(on).records, 0);
  reopen(on);
  assert_int_equal(on->entry_count, 0);
  assert_int_equal(scene_stats(on).segments, 0);
}

// ---- Life ----

// A tree of four sessions is closed in every order, with and without a restart after every step: a record exists as
// long as a view has it.
static void close_in_order(scene *on, const size_t order[4], bool restarts) {
  // 0 ─► 1 ─► 2, 0 ─► 3; session i has one record of its own behind what it inherits, at 64 i.
  static const size_t parents[4] = {0, 0, 1, 0};
  uint64_t sessions[4], records[4];
  bool needed[4][4] = {{true}, {true, true}, {true, true, true}, {true, false, false, true}};
  bool closed[4] = {false};
  for (size_t i = 0; i < 4; i++) {
    const uint64_t position = 64 * i;
    sessions[i] = i == 0 ? scene_session(on) : scene_fork(on, sessions[parents[i]], &position, 1, NULL);
    records[i] = scene_put(on, sessions[i], 0, 64 * i, SIZE);
  }
  for (size_t step = 0; step < 4; step++) {
    closed[order[step]] = true;
    assert_int_equal(scene_close_session(on, sessions[order[step]]), QKV_OK);
    if (restarts) reopen(on);
    for (size_t record = 0; record < 4; record++) {
      bool wanted = false;
      for (size_t i = 0; i < 4; i++) {
        wanted = wanted || (!closed[i] && needed[i][record]);
        if (restarts) assert_int_equal(told(on, sessions[i], records[record]) > 0, !closed[i] && needed[i][record]);
      }
      assert_int_equal(is_there(on, records[record]), wanted);
    }
  }
  assert_int_equal(scene_stats(on).records, 0);
}

static void a_record_lives_as_long_as_a_view_has_it(void **state) {
  scene *on = *state;
  scene_open(on);
  for (size_t code = 0; code < 256; code++) {
    const size_t order[4] = {code & 3, code >> 2 & 3, code >> 4 & 3, code >> 6};
    unsigned seen = 0;
    for (size_t i = 0; i < 4; i++) seen |= 1u << order[i];
    if (seen != 15) continue;  // no order
    close_in_order(on, order, false);
    if (code % 3 == 0) close_in_order(on, order, true);
  }
}

// A page that is shared, and written when its session is closed already.
static void a_closed_parent_takes_what_heirs_need(void **state) {
  scene *on = *state;
  scene_open(on);
  const uint64_t parent = scene_session(on), child = scene_fork(on, parent, (const uint64_t[]){100}, 1, NULL);
  assert_int_equal(scene_close_session(on, parent), QKV_OK);
  const uint64_t needed = scene_put(on, parent, 0, 64, SIZE);
  const qkv_record_meta behind = {.session = parent, .position = 128, .tokens = 64},
                        other = {.session = parent, .layer = 1, .tokens = 64};
  uint64_t record;
  assert_int_equal(scene_put_status(on, &behind, SIZE, true, &record), QKV_CANCELLED);
  assert_int_equal(scene_put_status(on, &other, SIZE, true, &record), QKV_CANCELLED);
  reopen(on);
  assert_int_equal(told(on, child, needed), 36);
  assert_int_equal(on->record_count, 1);
  assert_int_equal(scene_close_session(on, child), QKV_OK);
  assert_false(is_there(on, needed));
}

static void the_longest_heir_decides(void **state) {
  scene *on = *state;
  scene_open(on);
  const uint64_t parent = scene_session(on);
  uint64_t records[PAGES], heirs[PAGES + 1];
  put_pages(on, parent, 0, records);
  for (uint64_t i = 0; i <= PAGES; i++) heirs[i] = scene_fork(on, parent, &(uint64_t){64 * i}, 1, NULL);
  assert_int_equal(scene_close_session(on, parent), QKV_OK);
  for (size_t i = 0; i < PAGES; i++) assert_true(is_there(on, records[i]));
  assert_int_equal(scene_truncate(on, heirs[PAGES], 0, 190), QKV_OK);
  assert_false(is_there(on, records[3]));
  assert_int_equal(scene_close_session(on, heirs[0]), QKV_OK);
  assert_int_equal(scene_close_session(on, heirs[PAGES]), QKV_OK);
  assert_true(is_there(on, records[2]));
  reopen(on);
  assert_int_equal(scene_close_session(on, heirs[2]), QKV_OK);
  assert_true(is_there(on, records[2]));
  assert_int_equal(scene_close_session(on, heirs[3]), QKV_OK);
  assert_true(is_there(on, records[0]));
  assert_false(is_there(on, records[1]));
  assert_int_equal(scene_close_session(on, heirs[1]), QKV_OK);
  assert_int_equal(scene_stats(on).records, 0);
}

// ---- Limits ----

static void wrong_forks_are_refused(void **state) {
  scene *on = *state;
  scene_open(on);
  const uint64_t parent = scene_session(on), position = 64;
  qkv_error error = {0};
  qkv_status status;
  assert_int_equal(qkv_storage_session_fork(on->storage, 7, parent, &position, 0, NULL, 0, NULL, NULL, &error),
                   QKV_INVALID_ARGUMENT);
  assert_non_null(strstr(error.text, "fork.layers is 0, allowed are 1 to 65536"));
  error = (qkv_error){0};
  assert_int_equal(qkv_storage_session_fork(on->storage, 7, parent, &position, 1, NULL, QKV_JOURNAL_PAYLOAD_MAX, NULL,
                                            NULL, &error),
                   QKV_INVALID_ARGUMENT);
  assert_non_null(strstr(error.text, "fork.bytes is 1073741824, at most 1073741800"));
  assert_int_equal(qkv_storage_journal(on->storage, QKV_JOURNAL_SESSION_FORK, 7, NULL, 0, NULL, NULL, NULL),
                   QKV_INVALID_ARGUMENT);
  (void)scene_fork(on, 12345, &position, 1, &status);
  assert_int_equal(status, QKV_FAILED_PRECONDITION);
  assert_int_equal(scene_close_session(on, parent), QKV_OK);
  (void)scene_fork(on, parent, &position, 1, &status);
  assert_int_equal(status, QKV_FAILED_PRECONDITION);
  reopen(on);
  assert_int_equal(on->entry_count, 0);
}

// Each is forked from the one before, which is closed then: only the last one is reported, and has the first one's
// record.
static void a_chain_of_forks_has_an_end(void **state) {
  scene *on = *state;
  scene_open(on);
  const uint64_t first = scene_session(on), record = scene_put(on, first, 0, 0, SIZE);
  uint64_t last = first;
  for (unsigned i = 0; i < QKV_FORK_DEPTH_MAX; i++) {
    const uint64_t next = qkv_storage_session_number(on->storage), position = 64;
    assert_int_equal(qkv_storage_session_fork(on->storage, next, last, &position, 1, "fork", 4, NULL, NULL, NULL),
                     QKV_OK);
    qkv_storage_session_close(on->storage, last, NULL, NULL);
    last = next;
  }
  for (int round = 0; round < 2; round++) {
    qkv_status status;
    (void)scene_fork(on, last, (const uint64_t[]){64}, 1, &status);
    assert_int_equal(status, QKV_RESOURCE_EXHAUSTED);
    reopen(on);
    assert_int_equal(on->entry_count, 1);
    assert_int_equal(on->record_count, 1);
    assert_int_equal(told(on, last, record), 64);
  }
  assert_int_equal(scene_close_session(on, last), QKV_OK);
  reopen(on);
  assert_int_equal(scene_stats(on).segments, 0);
}

// ---- The journal ----

static unsigned version_of_journal(const scene *on) {
  char path[128];
  scene_file(on, "journal.qkv", path);
  FILE *file = fopen(path, "rb");
  assert_non_null(file);
  uint8_t bytes[10];
  assert_int_equal(fread(bytes, 1, sizeof bytes, file), sizeof bytes);
  assert_int_equal(fclose(file), 0);
  return bytes[8] + 256u * bytes[9];
}

// A daemon that does not know forks does not open a journal that has any; without any it still does.
static void only_a_journal_with_forks_is_of_version_2(void **state) {
  scene *on = *state;
  scene_open(on);
  const uint64_t parent = scene_session(on), position = 64;
  scene_close(on);
  assert_int_equal(version_of_journal(on), 1);
  scene_open(on);
  const uint64_t child = scene_fork(on, parent, &position, 1, NULL);
  assert_int_equal(version_of_journal(on), 2);
  reopen(on);
  assert_int_equal(version_of_journal(on), 2);
  assert_int_equal(scene_close_session(on, child), QKV_OK);
  reopen(on);
  assert_int_equal(version_of_journal(on), 1);
  assert_int_equal(on->entry_count, 1);
}

// Its parents are closed when the journal is rewritten while the storage runs.
static void a_journal_written_anew_keeps_ghosts(void **state) {
  enum { LARGE = 3 << 20, LAYERS = 1000 };  // positions of several blocks
  scene *on = *state;
  scene_open(on);
  const uint64_t first = scene_session(on), noted = scene_session(on);
  uint64_t records[PAGES];
  put_pages(on, first, LAYERS - 1, records);
  assert_int_equal(scene_truncate(on, first, QKV_LAYER_ALL, 200), QKV_OK);
  uint64_t positions[LAYERS];
  for (size_t i = 0; i < LAYERS; i++) positions[i] = 1000;
  const uint64_t second = scene_fork(on, first, positions, LAYERS, NULL);
  assert_int_equal(scene_truncate(on, first, QKV_LAYER_ALL, 100), QKV_OK);
  const uint64_t third = scene_fork(on, second, positions, LAYERS, NULL);
  assert_int_equal(scene_close_session(on, first), QKV_OK);
  assert_int_equal(scene_close_session(on, second), QKV_OK);
  char *note = calloc(1, LARGE);
  assert_non_null(note);
  for (int i = 0; i < 5; i++)
    assert_int_equal(qkv_storage_journal(on->storage, QKV_JOURNAL_SESSION_NOTE, noted, note, LARGE, NULL, NULL, NULL),
                     QKV_OK);
  free(note);
  scene_sync(on);
  assert_int_equal(scene_close_session(on, noted), QKV_OK);
  assert_true(scene_stats(on).journal_bytes < 4 * (uint64_t)LARGE);
  for (int round = 0; round < 2; round++) {
    reopen(on);
    assert_int_equal(on->entry_count, 1);
    check_pages(on, third, records, (const uint32_t[]){64, 64, 64, 8});
    assert_int_equal(told_of(on, third), PAGES);
  }
}

// A session that the caller drops at the opening is closed; its heirs keep what they had, after later restarts, too.
static void heirs_of_what_is_let_go_stay(void **state) {
  scene *on = *state;
  scene_open(on);
  const uint64_t parent = scene_session(on);
  uint64_t records[PAGES];
  put_pages(on, parent, 0, records);
  const uint64_t child = scene_fork(on, parent, (const uint64_t[]){128}, 1, NULL);
  on->refused = parent;
  reopen(on);
  on->refused = 0;
  for (int round = 0; round < 3; round++) {
    assert_int_equal(told_of(on, parent), 0);
    check_pages(on, child, records, (const uint32_t[]){64, 64, 0, 0});
    assert_true(is_there(on, records[1]));
    assert_false(is_there(on, records[2]));
    reopen(on);
    assert_int_equal(on->entry_count, 1);
  }
  on->refused = child;
  reopen(on);
  assert_int_equal(on->record_count, 0);
  assert_int_equal(scene_stats(on).segments, 0);
  reopen(on);
  assert_int_equal(on->entry_count, 0);
}

// A durable entry is lost: it may have cut the parent before the fork, so both are given up. A fork of a session that
// was opened behind it stays.
static void heirs_of_what_is_in_doubt_are_given_up(void **state) {
  scene *on = *state;
  scene_open(on);
  const uint64_t parent = scene_session(on), position = 64;
  const uint64_t record = scene_put(on, parent, 0, 0, SIZE);
  (void)scene_fork(on, parent, &position, 1, NULL);  // the journal is rewritten for it
  assert_int_equal(scene_truncate(on, parent, 0, 32), QKV_OK);
  const uint64_t doubtful = scene_fork(on, parent, &position, 1, NULL), sound = scene_session(on);
  const uint64_t kept = scene_put(on, sound, 0, 0, SIZE), child = scene_fork(on, sound, &position, 1, NULL);
  scene_close(on);
  char path[128];
  scene_file(on, "journal.qkv", path);
  scene_damage(path, 4 * 4096 + 20);  // the cut, behind two headers, an opening and a fork
  scene_open(on);
  assert_int_equal(scene_stats(on).bad_entries, 1);
  assert_int_equal(scene_stats(on).sessions_given_up, 3);
  assert_false(is_told_session(on, parent) || is_told_session(on, doubtful));
  assert_false(is_there(on, record));
  assert_int_equal(told(on, sound, kept), 64);
  assert_int_equal(told(on, child, kept), 64);
  assert_int_equal(on->record_count, 2);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      BOTH(a_fork_has_what_lies_below_its_positions),
      BOTH(what_the_parent_puts_later_is_inherited),
      BOTH(cuts_before_the_fork_concern_it),
      BOTH(a_cut_behind_the_fork_parts_the_two),
      BOTH(a_cut_of_the_child_is_its_own),
      BOTH(heirs_of_other_times_do_not_stand_in),
      BOTH(an_own_record_wins),
      BOTH(forks_of_forks_inherit),
      BOTH(a_record_lives_as_long_as_a_view_has_it),
      BOTH(a_closed_parent_takes_what_heirs_need),
      BOTH(the_longest_heir_decides),
      BOTH(wrong_forks_are_refused),
      BOTH(a_chain_of_forks_has_an_end),
      BOTH(only_a_journal_with_forks_is_of_version_2),
      BOTH(a_journal_written_anew_keeps_ghosts),
      BOTH(heirs_of_what_is_let_go_stay),
      BOTH(heirs_of_what_is_in_doubt_are_given_up),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
