// The index of records: lookups, and its memory.
#include "storage/index.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <malloc.h>
#include <string.h>

enum { INDEX_RECORDS = 5000, INDEX_SESSIONS = 7 };

// The expected entry of a record: numbers and positions beyond 32 bits, and each field up to its limit.
static qkvi_entry entry_for(uint64_t record, uint64_t salt) {
  const uint64_t x = record * 0x9e3779b97f4a7c15 + salt;
  return (qkvi_entry){.record = record,
                      .session = record % INDEX_SESSIONS,
                      .position = record % 3 == 0 ? UINT64_MAX - 64 - record : 64 * record,
                      .offset = (x >> 40 & 0xffffff) * 4096,
                      .extent = 4096 * (1 + (x >> 11) % 262145),
                      .raw_bytes = 1 + (uint32_t)(x >> 13 & 0x3fffffff),
                      .segment = x >> 17 & 0xffffff,
                      .layer = x >> 23 & 0xffff,
                      .tokens = 1 + (x >> 7) % QKV_RECORD_TOKENS_MAX,
                      .kind = x >> 5 & 15};
}

static void assert_same_entry(const qkvi_entry *a, const qkvi_entry *b) {
  assert_true(a->record == b->record && a->session == b->session && a->position == b->position &&
              a->offset == b->offset && a->extent == b->extent && a->raw_bytes == b->raw_bytes &&
              a->segment == b->segment && a->layer == b->layer && a->tokens == b->tokens && a->kind == b->kind);
}

static uint64_t number_of(uint64_t i) {
  return (1 + i % 3) << 40 | (i + 1);
}

// All walks see exactly what `model` (record 0: not there) has.
static void check_index(const qkvi_index *index, const qkvi_entry *model) {
  size_t count = 0, seen = 0, placed = 0;
  qkvi_entry entry;
  for (size_t i = 0; i < INDEX_RECORDS; i++) {
    assert_int_equal(qkvi_index_find(index, number_of(i), &entry), model[i].record != 0);
    if (model[i].record == 0) continue;
    assert_same_entry(&entry, &model[i]);
    count++;
  }
  assert_int_equal(qkvi_index_records(index), count);
  for (uint64_t session = 0; session < INDEX_SESSIONS; session++) {
    qkvi_index_walk walk;
    qkvi_index_walk_init(index, session, &walk);
    for (; qkvi_index_walk_next(index, &walk, &entry); seen++) {
      assert_int_equal(entry.session, session);
      assert_same_entry(&entry, &model[(entry.record & UINT32_MAX) - 1]);
    }
  }
  assert_int_equal(seen, count);
  for (uint32_t place = 0; place < qkvi_index_places(index); place++) placed += qkvi_index_at(index, place, &entry);
  assert_int_equal(placed, count);
}

static void the_index_finds_what_is_there(void **state) {
  (void)state;
  static qkvi_entry model[INDEX_RECORDS];
  memset(model, 0, sizeof model);
  qkvi_index *index = qkvi_index_create();
  uint32_t x = 7;
  for (int i = 0; i < 60000; i++) {
    x = x * 1664525u + 1013904223u;
    qkvi_entry *entry = &model[(x >> 8) % INDEX_RECORDS];
    const uint64_t record = number_of((uint64_t)(entry - model));
    if (entry->record == 0) {
      *entry = entry_for(record, x);
      qkvi_index_add(index, entry);
    } else if (x >> 30 == 0) {
      const qkvi_entry other = entry_for(record, x);
      entry->segment = other.segment;
      entry->offset = other.offset;
      qkvi_index_move(index, record, entry->segment, entry->offset);
    } else if (x >> 30 == 1) {
      entry->tokens = 1 + entry->tokens / 2;
      qkvi_index_clip(index, record, entry->tokens);
    } else {
      qkvi_index_remove(index, record);
      entry->record = 0;
    }
    if (i % 10000 == 0) check_index(index, model);
  }
  assert_int_equal(qkvi_index_sessions(index), INDEX_SESSIONS);
  check_index(index, model);
  // A walk during which every other record, and then each one, is removed gives each once.
  for (uint64_t all = 0; all < 2; all++) {
    for (uint64_t session = 0; session < INDEX_SESSIONS; session++) {
      qkvi_index_walk walk;
      qkvi_entry entry;
      size_t given = 0, expected = 0;
      for (size_t i = 0; i < INDEX_RECORDS; i++) expected += model[i].record != 0 && model[i].session == session;
      qkvi_index_walk_init(index, session, &walk);
      for (; qkvi_index_walk_next(index, &walk, &entry); given++) {
        if (all == 0 && given % 2 == 0) continue;
        qkvi_entry *here = &model[(entry.record & UINT32_MAX) - 1];
        assert_true(here->record != 0);
        here->record = 0;
        qkvi_index_remove(index, entry.record);
      }
      assert_int_equal(given, expected);
    }
    check_index(index, model);
  }
  assert_int_equal(qkvi_index_records(index) + qkvi_index_sessions(index), 0);
  qkvi_index_destroy(&index);
}

// 0 where the heap is a sanitizer's, which does not count.
static uint64_t heap_bytes(void) {
  const struct mallinfo2 heap = mallinfo2();
  return heap.uordblks + heap.hblkhd;
}

// storage/index.h says so; a page's other half is in engine/cache/page_range.h.
static void the_index_takes_32_bytes_a_record(void **state) {
  (void)state;
  qkvi_index *index = qkvi_index_create();
  const uint64_t before = heap_bytes();
  for (uint64_t i = 0; i < 300000; i++) {
    qkvi_entry entry = entry_for(UINT64_C(5) << 40 | (i + 1), 0);
    entry.session = i / 64 % 100;
    entry.position = 64 * i;
    qkvi_index_add(index, &entry);
    if (i < 100000 || i % 10000 != 0) continue;
    assert_in_range(qkvi_index_bytes(index), 24 * i, QKV_STORAGE_RECORD_BYTES * i);
    if (before > 0) assert_in_range(heap_bytes() - before, 24 * i, QKV_STORAGE_RECORD_BYTES * i);
  }
  qkvi_index_destroy(&index);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(the_index_finds_what_is_there),
      cmocka_unit_test(the_index_takes_32_bytes_a_record),
  };
  return cmocka_run_group_tests_name("index", tests, NULL, NULL);
}
