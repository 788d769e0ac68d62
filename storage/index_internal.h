// What the files of the index share: index.c, index_packed.c (sessions that are not used). Not for others: see
// index.h.
#ifndef QKV_STORAGE_INDEX_INTERNAL_H
#define QKV_STORAGE_INDEX_INTERNAL_H

#include <stdlib.h>

#include "storage/index.h"
#include "storage/numbered.h"

enum { QKVI_INDEX_GROUP = 16, QKVI_INDEX_CHUNK = 256, QKVI_INDEX_MASK = 40 };
#define QKVI_INDEX_NONE UINT32_MAX

// The layout is drawn in index.h.
typedef struct packed_record {
  uint32_t record, position;
  uint64_t at : 24, segment : 24, layer : 16;
  uint64_t blocks : 20, raw : 30, tokens : 10, kind : 4;
} packed_record;

// Only the first group of a run may have fewer than QKVI_INDEX_GROUP records, and it has one at least.
typedef struct qkvi_index_run {
  struct index_session *session;
  struct qkvi_index_run *next;          // of the session
  uint32_t record_high, position_high;  // upper 32 bits
  uint32_t first, count;                // group, records in it
} index_run;

typedef struct record_group {
  index_run *run;  // NULL: free
  uint32_t next;   // of the run, or of the free ones
  packed_record records[QKVI_INDEX_GROUP];
} record_group;

typedef struct packed_session {
  uint32_t count, bytes;
  uint64_t writing;  // the record that it is being written as; 0: none
  uint8_t data[];
} packed_session;

// What is packed of it is in memory, on the disk, or nowhere.
//
//   in memory or nowhere           runs | packed_session, or none  | 0
//   one record without runs        that record                     | single
//   on the disk, in a record       where that record lies          | unloaded
//   so, and records were put since runs | qkvi_entry of that record | unloaded, apart
typedef struct index_session {
  uint64_t session;
  union {
    // Of what is packed: bit (slot % QKVI_INDEX_MASK) of each segment that has a record, that which it is unloaded to
    // included.
    uint64_t segments : QKVI_INDEX_MASK;
    struct {
      uint64_t layer : 16, tokens : 10, kind : 4, unused : 10;  // of a single record
      uint64_t record_high : 24;  // of that record, as the fields of packed_record, and those below
    };
  };
  union {
    index_run *runs;  // the one that was added to last first
    struct {
      uint64_t record_low : 40, at : 24;
    };
  };
  union {
    struct {
      uint64_t address : 60;  // malloc's, / INDEX_ALIGN
      uint64_t unloaded : 1, apart : 1, stays_packed : 1, single : 1;
    };
    struct {
      uint64_t segment : 24, raw : 24, blocks : 12, flags : 4;
    };
  };
} index_session;

_Static_assert(sizeof(index_session) == 32, "no padding");

// Fields of a qkvi_entry, from a packed_record or from a single record's index_session, which have the same names.
#define QKVI_INDEX_FIELDS(from)                                                                                   \
  .offset = (uint64_t)(from)->at * QKV_STORAGE_BLOCK, .extent = (uint64_t)(from)->blocks * QKV_STORAGE_BLOCK,     \
  .raw_bytes = (uint32_t)(from)->raw + 1, .segment = (uint32_t)(from)->segment, .layer = (uint32_t)(from)->layer, \
  .tokens = (uint32_t)(from)->tokens + 1, .kind = (uint16_t)(from)->kind

#define INDEX_ALIGN UINT64_C(16)

struct qkvi_index {
  record_group **chunks;  // QKVI_INDEX_CHUNK each
  uint32_t groups, chunks_capacity;
  uint32_t free;  // the first free group
  uint32_t *table;
  uint32_t slots;
  uint64_t records, runs;  // records: in the table
  uint32_t free_groups;
  uint64_t packed_records, packed_bytes;
  bool packing;  // a session whose last record goes stays
  qkvi_numbered sessions;
  uint64_t *fresh;  // sessions that were packed and not taken by take_fresh yet
  size_t fresh_count, fresh_capacity;
};

static inline void *qkvi_index_checked(void *memory) {
  if (memory == NULL) abort();
  return memory;
}

static inline record_group *qkvi_index_group(const qkvi_index *index, uint32_t group) {
  return &index->chunks[group / QKVI_INDEX_CHUNK][group % QKVI_INDEX_CHUNK];
}

static inline bool qkvi_index_has_runs(const index_session *session) {
  return !session->single && (!session->unloaded || session->apart);
}

static inline index_run *qkvi_index_runs(const index_session *session) {
  return qkvi_index_has_runs(session) ? session->runs : NULL;
}

// What is packed of it in memory, but for a single record; NULL: nothing.
static inline packed_session *qkvi_index_packed(const index_session *session) {
  return session->unloaded || session->single ? NULL : (packed_session *)(uintptr_t)(session->address * INDEX_ALIGN);
}

// NULL: it has no records.
index_session *qkvi_index_session(const qkvi_index *index, uint64_t session);
// Frees what its address is of, for a session that has runs or is to end.
void qkvi_index_free_address(index_session *session);
// A session without a place for runs gets one, as records of it are put; and an unloaded one loses the last run.
void qkvi_index_make_place(qkvi_index *index, index_session *session);
void qkvi_index_join(index_session *session);
// Records that are not packed.
uint64_t qkvi_index_count(const qkvi_index *index, const index_session *session);
// All records into new groups and a new table, once most of the groups are free.
void qkvi_index_shrink(qkvi_index *index);

#endif
