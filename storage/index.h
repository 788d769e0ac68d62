// The index of records: which exist and where they lie. It takes at most 32 bytes for each of many records
// (QKV_STORAGE_RECORD_BYTES).
//
//   table (32-bit places, open addressing, at most 4/5 full)      groups of 16 packed records of one run
//   [ . | 35 | . | 0 | 7 | ... ]  ────────────────────────────►  [ run | next | r0 r1 ... r15 ]
//                                                                        └──► [ run | next | ... ]
//
//   run: the records of one session whose numbers agree in their upper 32 bits, and their positions, too
//
//   packed record, 24 bytes
//   bits  0 to 31  number         64 to 87   block of its segment     128 to 147  blocks that it takes
//        32 to 63  position       88 to 111  slot of its segment      148 to 177  raw bytes - 1
//        (lower 32 bits of both)  112 to 127 layer                    178 to 187  tokens - 1    188 to 191  kind
//
// Fields that readers find in the record's header are not kept: codec, calibration, hash, the payload's stored bytes.
//
// The records of a session that is not used can be packed: they leave the table and the groups, and are not found nor
// walked until they are unpacked. In the order of their numbers, each has a byte of flags for the fields that are not
// what follows from the record before, and these fields as varints. A page that was put behind the one before it in
// its layer takes one byte.
//
//   bit of flags   0 number  1 position  2 layer  3 segment and block  4 blocks  5 raw bytes  6 tokens  7 kind
//   expected       + 1       + tokens    the same  + blocks            the same ...
//
// What is packed can leave memory: the owner writes it as a record of its own (unload.c), of kind QKVI_RECORD_INDEX,
// and the index keeps where that record lies, and of which segments the session's records may be.
//
//   0     8  magic "QKVINDEX"
//   8     4  version (1)      12  4  records
//   16       the packed records
//
// It names slots of segments, so it counts in this process alone. The record that it is the payload of has its
// checksum. A session of one record, as a folded fork without rows of its own, takes no memory for that: the record
// lies where otherwise the place of what is packed does.
//
// Threads: guarded by the owner's lock.
#ifndef QKV_STORAGE_INDEX_H
#define QKV_STORAGE_INDEX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "storage/record.h"
#include "storage/storage.h"

#define QKVI_SEGMENTS_MAX (UINT32_C(1) << 24)          // slots that a packed record can name
#define QKVI_RECORD_INDEX (uint16_t) QKV_RECORD_KINDS  // the kind of an unloaded session's packed records

typedef struct qkvi_entry {
  uint64_t record, session, position;
  uint64_t offset;  // in its segment
  uint64_t extent;  // bytes there
  uint32_t raw_bytes;
  uint32_t segment;  // slot in the table of segments
  uint32_t layer, tokens;
  uint16_t kind;
} qkvi_entry;

typedef struct qkvi_index qkvi_index;

qkvi_index *qkvi_index_create(void);
void qkvi_index_destroy(qkvi_index **index);

// The entry of a header that has passed qkvi_record_check; `segment` is a slot.
qkvi_entry qkvi_entry_of(const qkv_record_header *header, uint32_t segment);
qkv_record_info qkvi_entry_info(const qkvi_entry *entry);

// Adds a record that is not in the index yet (asserted).
void qkvi_index_add(qkvi_index *index, const qkvi_entry *entry);
// Whether the record is in the index; fills `entry` then, where that is not NULL.
bool qkvi_index_find(const qkvi_index *index, uint64_t record, qkvi_entry *entry);
// The record must be in the index (asserted). Removes it; changes its place; sets how many tokens of it count.
void qkvi_index_remove(qkvi_index *index, uint64_t record);
void qkvi_index_move(qkvi_index *index, uint64_t record, uint32_t segment, uint64_t offset);
void qkvi_index_clip(qkvi_index *index, uint64_t record, uint32_t tokens);

// Packs a session's records, now or with the next `pack_again`, and keeps them packed but for what the following say.
// One of more than QKVI_PACKED_MAX, which take some 10 ms, is left as it is. And unpacks them, for use.
#define QKVI_PACKED_MAX 32768
void qkvi_index_pack(qkvi_index *index, uint64_t session, bool now);
void qkvi_index_unpack(qkvi_index *index, uint64_t session);
// Unpacks those of sessions that have a record in the segment, or with QKVI_ANY_SEGMENT of all, where they are in
// memory; and packs them again.
#define QKVI_ANY_SEGMENT UINT32_MAX
void qkvi_index_unpack_segment(qkvi_index *index, uint32_t segment);
void qkvi_index_pack_again(qkvi_index *index);

// ---- Leaving memory ----

// Packed records of fewer bytes stay in memory: what is known of their place would take as many.
#define QKVI_PACKED_KEPT 64
// A session that was packed since, and that is larger than that; false: there are no more. And forgets about these.
bool qkvi_index_take_fresh(qkvi_index *index, uint64_t *session);
void qkvi_index_drop_fresh(qkvi_index *index);
// The payload of a session that is packed, in memory, and not being written, which the caller frees; else NULL. It is
// being written as `record`. It has been written, as `entry` says, and leaves memory; or has failed: entry->extent is
// 0. False: it stays, or the session has been unpacked since.
uint8_t *qkvi_index_payload(const qkvi_index *index, uint64_t session, uint64_t *bytes);
void qkvi_index_writing(qkvi_index *index, uint64_t session, uint64_t record);
bool qkvi_index_unload(qkvi_index *index, const qkvi_entry *entry);
// Whether what is packed of the session is not in memory; `entry` gets the record that has it.
bool qkvi_index_unloaded(const qkvi_index *index, uint64_t session, qkvi_entry *entry);
// Unpacks from the payload of that record, for use. False, with nothing changed, where it is damaged, by `lies` too:
// whether there can be a record where the entry says.
bool qkvi_index_load(qkvi_index *index, uint64_t session, const uint8_t *payload, uint64_t bytes,
                     bool (*lies)(void *context, const qkvi_entry *entry), void *context);
// The unloaded sessions that may have a record in the segment, or with QKVI_ANY_SEGMENT all. The caller frees them.
uint64_t *qkvi_index_list_unloaded(const qkvi_index *index, uint32_t segment, size_t *count);

// The records of a session, in no order. During a walk only the record that was given last may be removed.
typedef struct qkvi_index_walk {
  const struct qkvi_index_run *run;
  uint32_t group, left;  // records of the group that were not given yet
} qkvi_index_walk;
void qkvi_index_walk_init(const qkvi_index *index, uint64_t session, qkvi_index_walk *walk);
// false: there are no more.
bool qkvi_index_walk_next(const qkvi_index *index, qkvi_index_walk *walk, qkvi_entry *entry);

// All records, in no order, by place from 0 on; false for an empty place. `places` is one behind the last.
bool qkvi_index_at(const qkvi_index *index, uint32_t place, qkvi_entry *entry);
uint32_t qkvi_index_places(const qkvi_index *index);

// Packed ones are counted, in memory or not, but not those of kind QKVI_RECORD_INDEX.
uint64_t qkvi_index_records(const qkvi_index *index);
uint64_t qkvi_index_sessions(const qkvi_index *index);
// Bytes of memory that it takes.
uint64_t qkvi_index_bytes(const qkvi_index *index);

#endif
