// The index of records: lookups, and its memory.
#include "storage/index.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <malloc.h>
#include <stdlib.h>
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

static size_t count_found(const qkvi_index *index, const qkvi_entry *model, uint32_t segment) {
  size_t count = 0;
  for (size_t i = 0; i < INDEX_RECORDS; i++)
    count += model[i].record != 0 && (segment == QKVI_ANY_SEGMENT || model[i].segment == segment) &&
             qkvi_index_find(index, model[i].record, NULL);
  return count;
}

// Random changes, of which some are packing and unpacking of sessions. Fields are as large as they can be.
static void packed_records_come_back(void **state) {
  (void)state;
  static qkvi_entry model[INDEX_RECORDS];
  memset(model, 0, sizeof model);
  qkvi_index *index = qkvi_index_create();
  uint32_t x = 11;
  for (int i = 0; i < 40000; i++) {
    x = x * 1664525u + 1013904223u;
    qkvi_entry *entry = &model[(x >> 8) % INDEX_RECORDS];
    const uint64_t record = number_of((uint64_t)(entry - model));
    if (i % 1000 == 7) {
      qkvi_index_pack(index, x % INDEX_SESSIONS, x >> 31 == 0);
    } else if (i % 3000 == 11) {
      qkvi_index_pack_again(index);
    } else if (entry->record == 0) {
      *entry = entry_for(record, x);
      qkvi_index_add(index, entry);  // also to a session that is packed
    } else if (x >> 30 == 3) {
      qkvi_index_unpack(index, entry->session);
      qkvi_index_remove(index, record);
      entry->record = 0;
    }
    if (i % 5000 != 0) continue;
    qkvi_index_unpack_segment(index, QKVI_ANY_SEGMENT);
    check_index(index, model);
    qkvi_index_pack_again(index);
  }
  for (uint64_t session = 0; session < INDEX_SESSIONS; session++) qkvi_index_pack(index, session, true);
  const uint64_t records = qkvi_index_records(index);
  assert_int_equal(count_found(index, model, QKVI_ANY_SEGMENT), 0);
  size_t first = 0;
  while (model[first].record == 0) first++;
  qkvi_index_unpack_segment(index, model[first].segment);
  assert_true(count_found(index, model, model[first].segment) > 0);
  assert_true(count_found(index, model, QKVI_ANY_SEGMENT) < records);
  qkvi_index_pack_again(index);
  assert_int_equal(count_found(index, model, QKVI_ANY_SEGMENT), 0);
  assert_int_equal(qkvi_index_records(index), records);
  for (uint64_t session = 0; session < INDEX_SESSIONS; session++) qkvi_index_unpack(index, session);
  qkvi_index_pack_again(index);  // none stays packed
  check_index(index, model);
  qkvi_index_destroy(&index);
}

// A folded fork has one record.
static void a_single_packed_record_takes_no_memory_of_its_own(void **state) {
  (void)state;
  enum { MANY = 20000 };
  qkvi_index *index = qkvi_index_create();
  const uint64_t before = heap_bytes();
  for (uint64_t i = 0; i < MANY; i++) {
    qkvi_entry entry = entry_for(UINT64_C(5) << 40 | (i + 1), 0), other = entry;
    entry.session = 1000 + i;
    entry.position = 0;
    entry.extent %= 1 << 24;
    entry.raw_bytes = 1 + (entry.raw_bytes - 1) % (1 << 24);
    qkvi_index_add(index, &entry);
    qkvi_index_pack(index, entry.session, true);
    assert_false(qkvi_index_find(index, entry.record, NULL));
    assert_int_equal(qkvi_index_records(index), i + 1);
    if (i % 64 != 0) continue;
    qkvi_index_unpack_segment(index, entry.segment + 1);
    assert_false(qkvi_index_find(index, entry.record, &other));
    qkvi_index_unpack_segment(index, entry.segment);
    assert_true(qkvi_index_find(index, entry.record, &other));
    assert_same_entry(&other, &entry);
    qkvi_index_pack_again(index);
    assert_false(qkvi_index_find(index, entry.record, NULL));
  }
  assert_int_equal(qkvi_index_sessions(index), MANY);
  assert_in_range(qkvi_index_bytes(index), 32 * MANY, 48 * MANY);
  if (before > 0) assert_in_range(heap_bytes() - before, 32 * MANY, 48 * MANY);
  qkvi_index_destroy(&index);
}

static void a_session_of_a_single_packed_record_gets_others(void **state) {
  (void)state;
  qkvi_index *index = qkvi_index_create();
  qkvi_entry entries[2];
  for (uint32_t i = 0; i < 2; i++)
    entries[i] = (qkvi_entry){
        .record = 10 + i, .session = 3, .offset = 4096, .extent = 8192, .raw_bytes = 5000, .segment = i, .tokens = 1};
  for (int round = 0; round < 3; round++) {
    qkvi_index_add(index, &entries[0]);
    qkvi_index_pack(index, 3, true);
    qkvi_index_add(index, &entries[1]);
    assert_true(!qkvi_index_find(index, 10, NULL) && qkvi_index_find(index, 11, NULL));
    assert_int_equal(qkvi_index_records(index), 2);
    if (round > 0) qkvi_index_pack_again(index);
    if (round > 1) qkvi_index_unpack_segment(index, 1);
    qkvi_index_unpack(index, 3);
    for (uint32_t i = 0; i < 2; i++) {
      qkvi_entry found;
      assert_true(qkvi_index_find(index, 10 + i, &found));
      assert_same_entry(&found, &entries[i]);
      qkvi_index_remove(index, 10 + i);
    }
    assert_int_equal(qkvi_index_records(index) + qkvi_index_sessions(index), 0);
  }
  qkvi_index_destroy(&index);
}

static bool in_any_place(void *context, const qkvi_entry *entry) {
  (void)context;
  return entry->offset > 0;
}

static bool nowhere(void *context, const qkvi_entry *entry) {
  (void)context;
  (void)entry;
  return false;
}

// Whether the session is unloaded now; the payload is the caller's.
static bool unload(qkvi_index *index, uint64_t session, uint64_t record, uint8_t **payload, uint64_t *bytes) {
  const qkvi_entry entry = {.record = record,
                            .session = session,
                            .segment = 70,
                            .offset = 8192,
                            .extent = 12288,
                            .raw_bytes = 9000,
                            .tokens = 1,
                            .kind = QKVI_RECORD_INDEX};
  *payload = qkvi_index_payload(index, session, bytes);
  if (*payload == NULL) return false;
  qkvi_index_writing(index, session, record);
  assert_null(qkvi_index_payload(index, session, bytes));
  return qkvi_index_unload(index, &entry);
}

// Bytes of it that have changed are refused, or give other records; never more than the payload has.
static void try_damaged(qkvi_index *index, uint64_t session, const uint8_t *payload, uint64_t bytes) {
  uint8_t *damaged = malloc(bytes);
  assert_non_null(damaged);
  for (uint64_t i = 0; i < bytes; i += 1 + i / 16) {
    memcpy(damaged, payload, bytes);
    damaged[i] ^= (uint8_t)(1 + i % 255);
    assert_false(qkvi_index_load(index, session, damaged, bytes, nowhere, NULL));
    if (i < 16) assert_false(qkvi_index_load(index, session, damaged, bytes, in_any_place, NULL));
  }
  for (uint64_t left = 0; left < bytes; left += 1 + left / 8)
    assert_false(qkvi_index_load(index, session, payload, left, in_any_place, NULL));
  free(damaged);
}

// Records that are put for an unloaded session are in memory; with the last one of them everything is as before.
static void put_since(qkvi_index *index, uint64_t session) {
  qkvi_entry before, after, late = entry_for(UINT64_C(7) << 40, 3);
  late.session = session;
  assert_true(qkvi_index_unloaded(index, session, &before));
  for (uint64_t i = 0; i < 40; i++, late.record++) qkvi_index_add(index, &late);
  qkvi_index_pack(index, session, true);  // not while it is unloaded
  assert_true(qkvi_index_unloaded(index, session, &after));
  assert_same_entry(&before, &after);
  for (uint64_t i = 0; i < 40; i++) {
    qkvi_index_walk walk;
    qkvi_entry entry;
    qkvi_index_walk_init(index, session, &walk);
    assert_true(qkvi_index_walk_next(index, &walk, &entry) && entry.record >> 40 == 7);
    if (session % 2 == 0 || i < 39) qkvi_index_remove(index, entry.record);
  }
  assert_true(qkvi_index_unloaded(index, session, &after));
  assert_same_entry(&before, &after);
}

static void drop_late(qkvi_index *index, uint64_t session) {
  qkvi_index_walk walk;
  qkvi_entry entry;
  size_t late = 0;
  qkvi_index_walk_init(index, session, &walk);
  while (qkvi_index_walk_next(index, &walk, &entry)) {
    if (entry.record >> 40 != 7) continue;
    qkvi_index_remove(index, entry.record);
    late++;
  }
  assert_int_equal(late, 1);
}

static void unloaded_records_come_back(void **state) {
  (void)state;
  static qkvi_entry model[INDEX_RECORDS];
  qkvi_index *index = qkvi_index_create();
  for (uint64_t i = 0; i < INDEX_RECORDS; i++) {
    model[i] = entry_for(number_of(i), 3);
    if (model[i].offset == 0) model[i].offset = 4096;
    model[i].extent = 4096 * (1 + i % 1000);
    qkvi_index_add(index, &model[i]);
  }
  uint8_t *payloads[INDEX_SESSIONS];
  uint64_t bytes[INDEX_SESSIONS], fresh;
  assert_false(qkvi_index_take_fresh(index, &fresh));
  for (uint64_t session = 0; session < INDEX_SESSIONS; session++) {
    assert_false(unload(index, session, 1, &payloads[session], &bytes[session]));  // it is not packed
    qkvi_index_pack(index, session, true);
    assert_true(qkvi_index_take_fresh(index, &fresh) && fresh == session);
    assert_true(unload(index, session, UINT64_C(9) << 40 | session, &payloads[session], &bytes[session]));
  }
  assert_int_equal(count_found(index, model, QKVI_ANY_SEGMENT), 0);
  assert_int_equal(qkvi_index_records(index), INDEX_RECORDS);
  // What they take: the table, a chunk or two that are left, and the sessions.
  assert_true(qkvi_index_bytes(index) < 300000);
  for (uint64_t session = 0; session < INDEX_SESSIONS; session++) {
    qkvi_entry entry;
    size_t count, in_segment;
    free(qkvi_index_list_unloaded(index, QKVI_ANY_SEGMENT, &count));
    free(qkvi_index_list_unloaded(index, 70, &in_segment));  // where the payloads lie
    assert_true(count == INDEX_SESSIONS - session && in_segment == count);
    assert_true(qkvi_index_unloaded(index, session, &entry));
    assert_true(entry.record == (UINT64_C(9) << 40 | session) && entry.segment == 70 && entry.offset == 8192 &&
                entry.extent == 12288 && entry.raw_bytes == 9000 && entry.session == session);
    qkvi_index_unpack(index, session);  // not in memory
    assert_true(qkvi_index_unloaded(index, session, &entry));
    put_since(index, session);
    try_damaged(index, session, payloads[session], bytes[session]);
    assert_true(qkvi_index_load(index, session, payloads[session], bytes[session], in_any_place, NULL));
    assert_false(qkvi_index_unloaded(index, session, &entry));
    if (session % 2 == 1) drop_late(index, session);
    free(payloads[session]);
  }
  check_index(index, model);
  // One that is unpacked, or packed anew, while it is being written, stays in memory. So does one that is not
  // written.
  qkvi_index_pack(index, 3, true);
  uint8_t *payload = qkvi_index_payload(index, 3, &bytes[3]);
  qkvi_index_writing(index, 3, 11);
  qkvi_index_unpack(index, 3);
  qkvi_index_pack(index, 3, true);
  assert_false(qkvi_index_unload(index, &(qkvi_entry){.record = 11, .session = 3, .extent = 4096, .offset = 4096}));
  qkvi_index_writing(index, 3, 12);
  assert_false(qkvi_index_unload(index, &(qkvi_entry){.record = 12, .session = 3}));
  qkvi_index_unpack(index, 3);
  check_index(index, model);
  free(payload);
  qkvi_index_destroy(&index);
}

// Pages as a session puts them: layer after layer, or all layers for each 64 tokens. The rest is given back.
static void packed_records_take_few_bytes(void **state) {
  (void)state;
  enum { PACKED_SESSIONS = 400, LAYERS = 32, PAGES = 16 };
  for (int by_layers = 0; by_layers < 2; by_layers++) {
    qkvi_index *index = qkvi_index_create();
    const uint64_t before = heap_bytes();
    uint64_t record = 1, offset = 4096;
    for (uint64_t session = 0; session < PACKED_SESSIONS + 1; session++) {
      for (uint64_t i = 0; i < LAYERS * PAGES; i++, record++, offset += 8192) {
        const uint64_t page = by_layers ? i % PAGES : i / LAYERS, layer = by_layers ? i / PAGES : i % LAYERS;
        const qkvi_entry entry = {.record = record,
                                  .session = session,
                                  .position = 64 * page,
                                  .layer = (uint32_t)layer,
                                  .tokens = 64,
                                  .offset = offset,
                                  .extent = 8192,
                                  .raw_bytes = 5000};
        qkvi_index_add(index, &entry);
      }
    }
    for (uint64_t session = 0; session < PACKED_SESSIONS; session++) qkvi_index_pack(index, session, true);
    const uint64_t packed = (uint64_t)PACKED_SESSIONS * LAYERS * PAGES;
    assert_int_equal(qkvi_index_records(index), packed + LAYERS * PAGES);
    // Five bytes at the most where each record is another layer's; chunks that are left, and the sessions.
    assert_true(qkvi_index_bytes(index) < 5 * packed + 300000 + 200 * PACKED_SESSIONS);
    if (before > 0) assert_true(heap_bytes() - before < 5 * packed + 400000 + 250 * PACKED_SESSIONS);
    qkvi_entry entry;
    assert_true(qkvi_index_find(index, record - 1, &entry) && entry.offset == offset - 8192);
    qkvi_index_unpack(index, 3);
    assert_true(qkvi_index_find(index, 3 * LAYERS * PAGES + 5, &entry) && entry.session == 3);
    qkvi_index_destroy(&index);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(the_index_finds_what_is_there),
      cmocka_unit_test(the_index_takes_32_bytes_a_record),
      cmocka_unit_test(packed_records_come_back),
      cmocka_unit_test(packed_records_take_few_bytes),
      cmocka_unit_test(unloaded_records_come_back),
      cmocka_unit_test(a_single_packed_record_takes_no_memory_of_its_own),
      cmocka_unit_test(a_session_of_a_single_packed_record_gets_others),
  };
  return cmocka_run_group_tests_name("index", tests, NULL, NULL);
}
