#include "storage/index.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

// uthash counts on this: no record without memory for its entry.
#define uthash_fatal(text) abort()
#include <uthash.h>

typedef struct index_session {
  uint64_t session;
  uint32_t first;
  UT_hash_handle hh;
} index_session;

struct qkvi_index {
  qkvi_entry *entries;  // record 0: free
  uint32_t places, room;
  uint32_t free;  // the first free place, linked by `next`
  uint32_t *table;
  uint32_t mask;  // of the table
  uint64_t records;
  index_session *sessions;
};

enum { ROOM_FIRST = 1024 };

static void *checked(void *memory) {
  if (memory == NULL) abort();
  return memory;
}

static uint32_t home(const qkvi_index *index, uint64_t record) {
  return (uint32_t)((record * UINT64_C(0x9e3779b97f4a7c15)) >> 32) & index->mask;
}

static void link_table(qkvi_index *index, uint32_t place) {
  uint32_t at = home(index, index->entries[place].record);
  while (index->table[at] != QKVI_NO_ENTRY) at = (at + 1) & index->mask;
  index->table[at] = place;
}

static void make_table(qkvi_index *index, uint32_t slots) {
  free(index->table);
  index->table = checked(malloc((size_t)slots * sizeof *index->table));
  memset(index->table, 0xff, (size_t)slots * sizeof *index->table);
  index->mask = slots - 1;
}

// Room for one more entry, and a table that is at most half full.
static void grow(qkvi_index *index) {
  if (index->places < index->room) return;
  assert(index->room < UINT32_C(1) << 30);
  index->room *= 2;
  index->entries = checked(realloc(index->entries, (size_t)index->room * sizeof *index->entries));
  memset(index->entries + index->places, 0, (size_t)(index->room - index->places) * sizeof *index->entries);
  make_table(index, 2 * index->room);
  for (uint32_t i = 0; i < index->places; i++) {
    if (index->entries[i].record != 0) link_table(index, i);
  }
}

qkvi_index *qkvi_index_create(void) {
  qkvi_index *index = checked(calloc(1, sizeof *index));
  index->room = ROOM_FIRST;
  index->free = QKVI_NO_ENTRY;
  index->entries = checked(calloc(index->room, sizeof *index->entries));
  make_table(index, 2 * ROOM_FIRST);
  return index;
}

void qkvi_index_destroy(qkvi_index **index) {
  qkvi_index *old = *index;
  if (old == NULL) return;
  index_session *session = old->sessions;
  HASH_CLEAR(hh, old->sessions);
  while (session != NULL) {
    index_session *next = session->hh.next;
    free(session);
    session = next;
  }
  free(old->table);
  free(old->entries);
  free(old);
  *index = NULL;
}

qkvi_entry qkvi_entry_of(const qkv_record_header *header, uint32_t segment) {
  return (qkvi_entry){.record = header->record,
                      .session = header->session,
                      .position = header->position,
                      .offset = header->offset,
                      .raw_bytes = (uint32_t)header->raw_bytes,
                      .stored_bytes = (uint32_t)header->stored_bytes,
                      .layer = header->layer,
                      .tokens = header->tokens,
                      .codec = header->codec,
                      .calibration = header->calibration,
                      .segment = segment,
                      .kind = header->kind};
}

qkv_record_info qkvi_entry_info(const qkvi_entry *entry) {
  return (qkv_record_info){.record = entry->record,
                           .meta = {.session = entry->session,
                                    .position = entry->position,
                                    .layer = entry->layer,
                                    .tokens = entry->tokens,
                                    .codec = entry->codec,
                                    .calibration = entry->calibration,
                                    .kind = entry->kind},
                           .bytes = entry->raw_bytes,
                           .stored_bytes = entry->stored_bytes};
}

static index_session *session_of(const qkvi_index *index, uint64_t session) {
  index_session *found = NULL;
  HASH_FIND(hh, index->sessions, &session, sizeof session, found);
  return found;
}

void qkvi_index_add(qkvi_index *index, const qkvi_entry *entry) {
  assert(entry->record != 0 && qkvi_index_find(index, entry->record) == NULL);
  uint32_t place = index->free;
  if (place != QKVI_NO_ENTRY) {
    index->free = index->entries[place].next;
  } else {
    grow(index);
    place = index->places++;
  }
  index_session *session = session_of(index, entry->session);
  if (session == NULL) {
    session = checked(calloc(1, sizeof *session));
    session->session = entry->session;
    session->first = QKVI_NO_ENTRY;
    HASH_ADD(hh, index->sessions, session, sizeof session->session, session);
  }
  qkvi_entry *made = &index->entries[place];
  *made = *entry;
  made->previous = QKVI_NO_ENTRY;
  made->next = session->first;
  if (made->next != QKVI_NO_ENTRY) index->entries[made->next].previous = place;
  session->first = place;
  link_table(index, place);
  index->records++;
}

static uint32_t slot_of(const qkvi_index *index, uint64_t record) {
  for (uint32_t at = home(index, record);; at = (at + 1) & index->mask) {
    const uint32_t place = index->table[at];
    if (place == QKVI_NO_ENTRY || index->entries[place].record == record) return at;
  }
}

qkvi_entry *qkvi_index_find(const qkvi_index *index, uint64_t record) {
  const uint32_t place = index->table[slot_of(index, record)];
  return place == QKVI_NO_ENTRY ? NULL : &index->entries[place];
}

// Takes a slot out and moves what its chain had behind it.
static void unlink_table(qkvi_index *index, uint32_t slot) {
  uint32_t hole = slot;
  for (uint32_t at = (slot + 1) & index->mask; index->table[at] != QKVI_NO_ENTRY; at = (at + 1) & index->mask) {
    const uint32_t wanted = home(index, index->entries[index->table[at]].record);
    if (((at - wanted) & index->mask) < ((at - hole) & index->mask)) continue;  // it lies between hole and its home
    index->table[hole] = index->table[at];
    hole = at;
  }
  index->table[hole] = QKVI_NO_ENTRY;
}

void qkvi_index_remove(qkvi_index *index, uint64_t record) {
  const uint32_t slot = slot_of(index, record), place = index->table[slot];
  assert(place != QKVI_NO_ENTRY);
  qkvi_entry *entry = &index->entries[place];
  unlink_table(index, slot);
  if (entry->next != QKVI_NO_ENTRY) index->entries[entry->next].previous = entry->previous;
  if (entry->previous != QKVI_NO_ENTRY) {
    index->entries[entry->previous].next = entry->next;
  } else {
    index_session *session = session_of(index, entry->session);
    session->first = entry->next;
    if (session->first == QKVI_NO_ENTRY) {
      HASH_DEL(index->sessions, session);
      free(session);
    }
  }
  entry->record = 0;
  entry->next = index->free;
  index->free = place;
  index->records--;
}

qkvi_entry *qkvi_index_first(const qkvi_index *index, uint64_t session) {
  const index_session *found = session_of(index, session);
  return found == NULL ? NULL : &index->entries[found->first];
}

qkvi_entry *qkvi_index_next(const qkvi_index *index, const qkvi_entry *entry) {
  return entry->next == QKVI_NO_ENTRY ? NULL : &index->entries[entry->next];
}

qkvi_entry *qkvi_index_at(const qkvi_index *index, uint32_t place) {
  return index->entries[place].record == 0 ? NULL : &index->entries[place];
}

uint32_t qkvi_index_places(const qkvi_index *index) {
  return index->places;
}

uint64_t qkvi_index_records(const qkvi_index *index) {
  return index->records;
}

uint64_t qkvi_index_sessions(const qkvi_index *index) {
  return HASH_COUNT(index->sessions);
}
