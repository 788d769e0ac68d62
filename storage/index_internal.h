// What the files of the index share: index.c, index_packed.c (sessions that are not used). Not for others: see
// index.h.
#ifndef QKV_STORAGE_INDEX_INTERNAL_H
#define QKV_STORAGE_INDEX_INTERNAL_H

#include "storage/index.h"

// For uthash: abort where there is no memory for a record's entry.
#define uthash_fatal(text) abort()
#include <uthash.h>

enum { QKVI_INDEX_GROUP = 16, QKVI_INDEX_CHUNK = 256 };
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
  uint64_t segments;  // bit (slot % 64) of each that has a record
  uint64_t writing;   // the record that it is being written as; 0: none
  uint8_t data[];
} packed_session;

typedef struct unloaded_session {
  uint64_t record, segments;  // likewise, with that of the record
  uint32_t count;
  uint32_t segment, at, blocks, raw_bytes;  // of the record
} unloaded_session;

typedef struct index_session {
  uint64_t session;
  index_run *runs;             // the one that was added to last first
  packed_session *packed;      // NULL: none
  unloaded_session *unloaded;  // NULL: nothing; then `packed` is
  bool stays_packed;
  UT_hash_handle hh;
} index_session;

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
  index_session *sessions;
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

// NULL: it has no records.
index_session *qkvi_index_session(const qkvi_index *index, uint64_t session);
// Records that are not packed.
uint64_t qkvi_index_count(const qkvi_index *index, const index_session *session);
// All records into new groups and a new table, once most of the groups are free.
void qkvi_index_shrink(qkvi_index *index);

#endif
