#include "storage/index_internal.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

enum { GROUP = QKVI_INDEX_GROUP, CHUNK_GROUPS = QKVI_INDEX_CHUNK, SLOTS_FIRST = 1024 };
#define NONE QKVI_INDEX_NONE

_Static_assert(sizeof(packed_record) == 24, "no padding");
_Static_assert(QKV_RECORD_TOKENS_MAX == 1u << 10 && QKVI_RECORD_INDEX + 1u == 1u << 4, "as wide as their fields");
_Static_assert(QKV_SEGMENT_BYTES_MAX / QKV_STORAGE_BLOCK == 1u << 24, "as wide as its field");
_Static_assert(QKV_RECORD_LAYERS_MAX == 1u << 16 && QKV_RECORD_BYTES_MAX == 1u << 30, "as wide as their fields");

static packed_record *packed_at(const qkvi_index *index, uint32_t place) {
  return &qkvi_index_group(index, place / GROUP)->records[place % GROUP];
}

static uint64_t number_at(const qkvi_index *index, uint32_t place) {
  const record_group *group = qkvi_index_group(index, place / GROUP);
  return (uint64_t)group->run->record_high << 32 | group->records[place % GROUP].record;
}

// ---- The table ----

static uint32_t home(const qkvi_index *index, uint64_t record) {
  const uint64_t hash = record * UINT64_C(0x9e3779b97f4a7c15) >> 32;
  return (uint32_t)(hash * index->slots >> 32);
}

static uint32_t behind(const qkvi_index *index, uint32_t slot) {
  return slot + 1 == index->slots ? 0 : slot + 1;
}

// The slot of the record, or the free one at which its chain ends.
static uint32_t slot_of(const qkvi_index *index, uint64_t record) {
  uint32_t slot = home(index, record);
  while (index->table[slot] != NONE && number_at(index, index->table[slot]) != record) slot = behind(index, slot);
  return slot;
}

static uint32_t place_of(const qkvi_index *index, uint64_t record) {
  return index->table[slot_of(index, record)];
}

static void make_table(qkvi_index *index, uint32_t slots) {
  free(index->table);
  index->table = qkvi_index_checked(malloc((size_t)slots * sizeof *index->table));
  memset(index->table, 0xff, (size_t)slots * sizeof *index->table);
  index->slots = slots;
}

static uint32_t count_in(const record_group *group, uint32_t number) {
  if (group->run == NULL) return 0;
  return group->run->first == number ? group->run->count : GROUP;
}

// A slot for one more record. The table grows by quarters, so that it is never less than 16/25 full.
static void grow_table(qkvi_index *index) {
  if ((index->records + 1) * 5 <= (uint64_t)index->slots * 4) return;
  assert(index->slots < UINT32_C(1) << 31);
  make_table(index, index->slots + index->slots / 4);
  for (uint32_t number = 0; number < index->groups; number++) {
    const record_group *group = qkvi_index_group(index, number);
    for (uint32_t i = 0; i < count_in(group, number); i++) {
      const uint64_t record = (uint64_t)group->run->record_high << 32 | group->records[i].record;
      uint32_t slot = home(index, record);
      while (index->table[slot] != NONE) slot = behind(index, slot);
      index->table[slot] = number * GROUP + i;
    }
  }
}

// Empties a slot and moves back what its chain had behind it.
static void clear_slot(qkvi_index *index, uint32_t slot) {
  uint32_t hole = slot;
  for (uint32_t at = behind(index, slot); index->table[at] != NONE; at = behind(index, at)) {
    const uint32_t wanted = home(index, number_at(index, index->table[at]));
    const uint32_t from_home = at >= wanted ? at - wanted : at + (index->slots - wanted);
    const uint32_t from_hole = at >= hole ? at - hole : at + (index->slots - hole);
    if (from_home < from_hole) continue;  // its home lies behind the hole
    index->table[hole] = index->table[at];
    hole = at;
  }
  index->table[hole] = NONE;
}

// ---- Life ----

qkvi_index *qkvi_index_create(void) {
  qkvi_index *index = qkvi_index_checked(calloc(1, sizeof *index));
  index->free = NONE;
  make_table(index, SLOTS_FIRST);
  qkvi_numbered_init(&index->sessions, sizeof(index_session));
  return index;
}

void qkvi_index_destroy(qkvi_index **index) {
  qkvi_index *old = *index;
  if (old == NULL) return;
  index_session *session;
  for (uint32_t place = 0; (session = qkvi_numbered_next(&old->sessions, &place)) != NULL;) {
    for (index_run *run = qkvi_index_runs(session), *after; run != NULL; run = after) {
      after = run->next;
      free(run);
    }
    qkvi_index_free_address(session);
  }
  qkvi_numbered_deinit(&old->sessions);
  for (uint32_t i = 0; i * CHUNK_GROUPS < old->groups; i++) free(old->chunks[i]);
  free((void *)old->chunks);
  free(old->table);
  free(old->fresh);
  free(old);
  *index = NULL;
}

// ---- Entries ----

qkvi_entry qkvi_entry_of(const qkv_record_header *header, uint32_t segment) {
  return (qkvi_entry){.record = header->record,
                      .session = header->session,
                      .position = header->position,
                      .offset = header->offset,
                      .extent = qkvi_record_extent(header->stored_bytes),
                      .raw_bytes = (uint32_t)header->raw_bytes,
                      .segment = segment,
                      .layer = header->layer,
                      .tokens = header->tokens,
                      .kind = header->kind};
}

qkv_record_info qkvi_entry_info(const qkvi_entry *entry) {
  return (qkv_record_info){.record = entry->record,
                           .meta = {.session = entry->session,
                                    .position = entry->position,
                                    .layer = entry->layer,
                                    .tokens = entry->tokens,
                                    .kind = entry->kind},
                           .bytes = entry->raw_bytes,
                           .extent = entry->extent};
}

static packed_record pack(const qkvi_entry *entry) {
  const uint64_t at = entry->offset / QKV_STORAGE_BLOCK, blocks = entry->extent / QKV_STORAGE_BLOCK;
  assert(at < 1u << 24 && entry->segment < QKVI_SEGMENTS_MAX && entry->layer < QKV_RECORD_LAYERS_MAX);
  assert(blocks < 1u << 20 && entry->raw_bytes - 1 < QKV_RECORD_BYTES_MAX);
  assert(entry->tokens - 1 < QKV_RECORD_TOKENS_MAX && entry->kind <= QKVI_RECORD_INDEX);
  return (packed_record){.record = (uint32_t)entry->record,
                         .position = (uint32_t)entry->position,
                         .at = at & 0xffffff,
                         .segment = entry->segment & 0xffffff,
                         .layer = entry->layer & 0xffff,
                         .blocks = blocks & 0xfffff,
                         .raw = (entry->raw_bytes - 1) & 0x3fffffff,
                         .tokens = (entry->tokens - 1) & 0x3ff,
                         .kind = entry->kind & 0xf};
}

static qkvi_entry unpack(const qkvi_index *index, uint32_t place) {
  const index_run *run = qkvi_index_group(index, place / GROUP)->run;
  const packed_record *packed = packed_at(index, place);
  return (qkvi_entry){.record = (uint64_t)run->record_high << 32 | packed->record,
                      .session = run->session->session,
                      .position = (uint64_t)run->position_high << 32 | packed->position,
                      QKVI_INDEX_FIELDS(packed)};
}

// ---- Runs ----

index_session *qkvi_index_session(const qkvi_index *index, uint64_t session) {
  return qkvi_numbered_find(&index->sessions, session);
}

// The run that takes the record, first of its session's then.
static index_run *run_for(qkvi_index *index, const qkvi_entry *entry) {
  const uint32_t record_high = (uint32_t)(entry->record >> 32), position_high = (uint32_t)(entry->position >> 32);
  index_session *session = qkvi_index_session(index, entry->session);
  if (session == NULL) session = qkvi_numbered_add(&index->sessions, entry->session);
  if (!qkvi_index_has_runs(session)) qkvi_index_make_place(index, session);
  index_run **link = &session->runs;
  while (*link != NULL && ((*link)->record_high != record_high || (*link)->position_high != position_high))
    link = &(*link)->next;
  index_run *run = *link;
  if (run == NULL) {
    run = qkvi_index_checked(calloc(1, sizeof *run));
    *run = (index_run){.session = session,
                       .record_high = record_high,
                       .position_high = position_high,
                       .first = NONE,
                       .count = GROUP};
    index->runs++;
  } else {
    *link = run->next;
  }
  run->next = session->runs;
  session->runs = run;
  return run;
}

static void free_run(qkvi_index *index, index_run *run) {
  index_session *session = run->session;
  index_run **link = &session->runs;
  while (*link != run) link = &(*link)->next;
  *link = run->next;
  free(run);
  index->runs--;
  if (session->runs != NULL || index->packing) return;
  if (session->apart) {
    qkvi_index_join(session);
  } else if (qkvi_index_packed(session) == NULL) {
    qkvi_numbered_remove(&index->sessions, session);
  }
}

static uint32_t take_group(qkvi_index *index) {
  const uint32_t number = index->free;
  if (number != NONE) {
    index->free = qkvi_index_group(index, number)->next;
    index->free_groups--;
    return number;
  }
  if (index->groups % CHUNK_GROUPS == 0) {
    const uint32_t chunks = index->groups / CHUNK_GROUPS;
    assert(index->groups < UINT32_C(1) << 27);
    if (chunks == index->chunks_capacity) {
      index->chunks_capacity = chunks == 0 ? 16 : 2 * chunks;
      index->chunks =
          qkvi_index_checked((void *)realloc((void *)index->chunks, index->chunks_capacity * sizeof *index->chunks));
    }
    index->chunks[chunks] = qkvi_index_checked(calloc(CHUNK_GROUPS, sizeof **index->chunks));
  }
  return index->groups++;
}

// ---- Changes ----

// A place for one more record of the run.
static uint32_t take_place(qkvi_index *index, index_run *run) {
  if (run->count == GROUP) {
    const uint32_t number = take_group(index);
    record_group *group = qkvi_index_group(index, number);
    group->run = run;
    group->next = run->first;
    run->first = number;
    run->count = 0;
  }
  return run->first * GROUP + run->count++;
}

void qkvi_index_add(qkvi_index *index, const qkvi_entry *entry) {
  assert(entry->record != 0);
  grow_table(index);
  const uint32_t slot = slot_of(index, entry->record);
  assert(index->table[slot] == NONE);
  index_run *run = run_for(index, entry);
  const uint32_t place = take_place(index, run);
  *packed_at(index, place) = pack(entry);
  index->table[slot] = place;
  index->records++;
}

bool qkvi_index_find(const qkvi_index *index, uint64_t record, qkvi_entry *entry) {
  const uint32_t place = place_of(index, record);
  if (place != NONE && entry != NULL) *entry = unpack(index, place);
  return place != NONE;
}

// The newest record of the run replaces the removed one.
void qkvi_index_remove(qkvi_index *index, uint64_t record) {
  const uint32_t slot = slot_of(index, record), place = index->table[slot];
  assert(place != NONE);
  index_run *run = qkvi_index_group(index, place / GROUP)->run;
  const uint32_t last = run->first * GROUP + run->count - 1;
  clear_slot(index, slot);
  if (last != place) index->table[slot_of(index, number_at(index, last))] = place;
  *packed_at(index, place) = *packed_at(index, last);
  index->records--;
  if (--run->count > 0) return;
  const uint32_t empty = run->first;
  record_group *group = qkvi_index_group(index, empty);
  run->first = group->next;
  run->count = GROUP;
  group->run = NULL;
  group->next = index->free;
  index->free = empty;
  index->free_groups++;
  if (run->first == NONE) free_run(index, run);
}

void qkvi_index_move(qkvi_index *index, uint64_t record, uint32_t segment, uint64_t offset) {
  const uint32_t place = place_of(index, record);
  assert(place != NONE);
  qkvi_entry entry = unpack(index, place);
  entry.segment = segment;
  entry.offset = offset;
  *packed_at(index, place) = pack(&entry);
}

void qkvi_index_clip(qkvi_index *index, uint64_t record, uint32_t tokens) {
  const uint32_t place = place_of(index, record);
  assert(place != NONE);
  qkvi_entry entry = unpack(index, place);
  entry.tokens = tokens;
  *packed_at(index, place) = pack(&entry);
}

// ---- Giving memory back ----

uint64_t qkvi_index_count(const qkvi_index *index, const index_session *session) {
  uint64_t count = 0;
  for (const index_run *run = qkvi_index_runs(session); run != NULL; run = run->next) {
    for (uint32_t group = run->first; group != NONE; group = qkvi_index_group(index, group)->next)
      count += group == run->first ? run->count : GROUP;
  }
  return count;
}

// A run's records from its groups among `old` to new ones.
static void move_run(qkvi_index *index, record_group **old, index_run *run) {
  uint32_t group = run->first, left = run->count;
  run->first = NONE;
  run->count = GROUP;
  while (group != NONE) {
    const record_group *from = &old[group / CHUNK_GROUPS][group % CHUNK_GROUPS];
    while (left-- > 0) {
      const uint32_t place = take_place(index, run);
      *packed_at(index, place) = from->records[left];
      index->table[slot_of(index, number_at(index, place))] = place;
      index->records++;
    }
    group = from->next;
    left = GROUP;
  }
}

void qkvi_index_shrink(qkvi_index *index) {
  if (index->free_groups < CHUNK_GROUPS || index->free_groups < index->groups / 2) return;
  const uint32_t chunks = (index->groups + CHUNK_GROUPS - 1) / CHUNK_GROUPS;
  record_group **old = index->chunks;
  index->chunks = NULL;
  index->groups = index->chunks_capacity = index->free_groups = 0;
  index->free = NONE;
  const uint64_t records = index->records;
  uint32_t slots = SLOTS_FIRST;
  while ((records + 1) * 5 > (uint64_t)slots * 4) slots += slots / 4;
  make_table(index, slots);
  index->records = 0;
  const index_session *session;
  for (uint32_t place = 0; (session = qkvi_numbered_next(&index->sessions, &place)) != NULL;) {
    for (index_run *run = qkvi_index_runs(session); run != NULL; run = run->next) move_run(index, old, run);
  }
  assert(index->records == records);
  for (uint32_t i = 0; i < chunks; i++) free(old[i]);
  free((void *)old);
}

// ---- Walks ----

static void walk_run(qkvi_index_walk *walk, const index_run *run) {
  walk->run = run;
  walk->group = run == NULL ? NONE : run->first;
  walk->left = run == NULL ? 0 : run->count;
}

void qkvi_index_walk_init(const qkvi_index *index, uint64_t session, qkvi_index_walk *walk) {
  const index_session *found = qkvi_index_session(index, session);
  walk_run(walk, found == NULL ? NULL : qkvi_index_runs(found));
}

// From the last record of each run to the first, as the replacement of a removed one comes from the end. A group, and
// a run, is left with its last record, whose removal may free it.
bool qkvi_index_walk_next(const qkvi_index *index, qkvi_index_walk *walk, qkvi_entry *entry) {
  if (walk->run == NULL) return false;
  *entry = unpack(index, walk->group * GROUP + --walk->left);
  if (walk->left > 0) return true;
  const uint32_t next = qkvi_index_group(index, walk->group)->next;
  if (next == NONE) {
    walk_run(walk, walk->run->next);
  } else {
    walk->group = next;
    walk->left = GROUP;
  }
  return true;
}

bool qkvi_index_at(const qkvi_index *index, uint32_t place, qkvi_entry *entry) {
  const uint32_t number = place / GROUP;
  if (place % GROUP >= count_in(qkvi_index_group(index, number), number)) return false;
  *entry = unpack(index, place);
  return true;
}

uint32_t qkvi_index_places(const qkvi_index *index) {
  return index->groups * GROUP;
}

uint64_t qkvi_index_records(const qkvi_index *index) {
  return index->records + index->packed_records;
}

uint64_t qkvi_index_sessions(const qkvi_index *index) {
  return index->sessions.count;
}

uint64_t qkvi_index_bytes(const qkvi_index *index) {
  const uint64_t chunks = (index->groups + CHUNK_GROUPS - 1) / CHUNK_GROUPS;
  return chunks * CHUNK_GROUPS * sizeof(record_group) + (uint64_t)index->slots * sizeof *index->table +
         index->runs * sizeof(index_run) + qkvi_numbered_bytes(&index->sessions) + index->packed_bytes;
}
