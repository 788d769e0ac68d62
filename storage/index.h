// Which records there are and where they lie: a hash table of record numbers over one array of entries, and a list of
// its entries for every session.
//
//   table (32-bit places of entries, open addressing)        entries, 80 bytes each, reused
//   [ . | 3 | . | 0 | 7 | ... ]  ─────────────────────────►  [ e0 | e1 | ... ]     a session: e7 ─► e3 ─► e0
//
// Threads: the owner's lock.
#ifndef QKV_STORAGE_INDEX_H
#define QKV_STORAGE_INDEX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "storage/record.h"
#include "storage/storage.h"

#define QKVI_NO_ENTRY UINT32_MAX

typedef struct qkvi_entry {
  uint64_t record, session, position;
  uint64_t offset;  // in its segment
  uint32_t raw_bytes, stored_bytes;
  uint32_t layer, tokens;
  uint32_t codec, calibration;
  uint32_t segment;         // slot in the table of segments
  uint32_t previous, next;  // of the session
  uint16_t kind;
} qkvi_entry;

typedef struct qkvi_index qkvi_index;

qkvi_index *qkvi_index_create(void);
void qkvi_index_destroy(qkvi_index **index);

// What a header says; `segment` is a slot.
qkvi_entry qkvi_entry_of(const qkv_record_header *header, uint32_t segment);
qkv_record_info qkvi_entry_info(const qkvi_entry *entry);

// A record that is not there yet (asserted).
void qkvi_index_add(qkvi_index *index, const qkvi_entry *entry);
// Until the next change of the index; NULL: it is not there.
qkvi_entry *qkvi_index_find(const qkvi_index *index, uint64_t record);
// It must be there (asserted).
void qkvi_index_remove(qkvi_index *index, uint64_t record);

// The entries of a session, in no order: the first, the next behind `entry`, NULL at the end. The next one is to be
// taken before an entry is removed.
qkvi_entry *qkvi_index_first(const qkvi_index *index, uint64_t session);
qkvi_entry *qkvi_index_next(const qkvi_index *index, const qkvi_entry *entry);

// All entries, in no order: from place 0 on; NULL for a place without one. `places` is one behind the last.
qkvi_entry *qkvi_index_at(const qkvi_index *index, uint32_t place);
uint32_t qkvi_index_places(const qkvi_index *index);

uint64_t qkvi_index_records(const qkvi_index *index);
uint64_t qkvi_index_sessions(const qkvi_index *index);

#endif
