// The journal: a log of which sessions were opened, closed and truncated, and of the caller's data on models. The
// file is "journal.qkv"; entries are appended, each in blocks of its own, so that no durable byte is written twice.
//
//   0       4096     8192
//   +--------+--------+---------+---------+-----
//   | header | header | entry   | entry   |          the header is stored twice
//   +--------+--------+---------+---------+-----
//
//   header, 4096 bytes                     entry, at a multiple of 4096
//   0     8  magic "QKVJOURN"              0    8  magic "QKVENTRY"
//   8     2  version (1, 2) 10 6  zero     8    2  version (1)   10  2  kind   12  4  layer
//   16    8  store: its number             16   8  sequence
//   24    8  epoch                         24   8  durable: newest sequence that was durable before
//   32    8  durable: sequence of the      32   8  session
//            last entry it was made with   40   8  position
//   40 4048  zero                          48   8  watermark: a record's number
//   4088  8  XXH3-64 of 0 to 4087          56   8  offset in the file
//                                          64   8  bytes of the payload
//                                          72   8  XXH3-64 of the payload
//                                          80  40  zero
//                                          120  8  XXH3-64 of bytes 0 to 119, seeded with the store's number
//                                          128     the payload, then zeros up to a block
//
//   payload of SESSION_FORK
//   0     8  parent: a session              8   4  layers: n            12  4  zero
//   16   8n  for each layer the position below which the session has what the parent has
//   16+8n    the caller's bytes
//
// A journal with SESSION_FORK is of version 2, one without of version 1; nothing else differs. A daemon that knows
// only version 1 does not open version 2: it would drop forks, and records of closed sessions that they need. So the
// journal is rewritten before the first fork.
//
// At every start the journal is rewritten without closed sessions (new file, fsync, rename, fsync of the directory),
// and the epoch is raised. Numbers of records, sessions and entries are (epoch << 40) + count: never reused, and
// those of a later start are larger.
//
// A torn tail is cut. A durable entry that is damaged is more serious, as it may have closed or truncated a session.
// Later entries (their `durable`) and records (their `journal`) reveal it, and every session that was opened before
// the lost entry is given up: lost rows rather than wrong ones.
#ifndef QKV_STORAGE_JOURNAL_H
#define QKV_STORAGE_JOURNAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"
#include "storage/record.h"

#define QKVI_JOURNAL_MAGIC 0x4e52554f4a564b51u  // "QKVJOURN"
#define QKVI_ENTRY_MAGIC 0x5952544e45564b51u    // "QKVENTRY"
#define QKV_JOURNAL_PAYLOAD_MAX (UINT64_C(1) << 30)
#define QKV_LAYER_ALL UINT32_MAX
#define QKVI_EPOCH_SHIFT 40

// Limits of SESSION_FORK: layers, and the length of a chain of forks.
#define QKV_FORK_LAYERS_MAX 65536u
#define QKV_FORK_DEPTH_MAX 1000u

// The version of a journal without forks and of every entry; that of a journal that may have forks.
enum { QKVI_JOURNAL_VERSION = 1, QKVI_JOURNAL_VERSION_FORKS = 2 };

typedef enum qkv_journal_kind {
  QKV_JOURNAL_MODEL = 1,             // the caller's bytes
  QKV_JOURNAL_CALIBRATION = 2,       // the caller's bytes
  QKV_JOURNAL_SESSION_OPEN = 3,      // session, the caller's bytes
  QKV_JOURNAL_SESSION_NOTE = 4,      // session, the caller's bytes: the last one counts
  QKV_JOURNAL_SESSION_CLOSE = 5,     // session
  QKV_JOURNAL_SESSION_TRUNCATE = 6,  // session, layer or QKV_LAYER_ALL, position, watermark
  QKV_JOURNAL_SESSION_FORK = 7,      // session, parent, layers, positions, the caller's bytes
} qkv_journal_kind;

typedef struct qkvi_journal_header {
  uint64_t magic;
  uint16_t version, zero[3];
  uint64_t store, epoch, durable;
  uint64_t zeros[506];
  uint64_t hash;
} qkvi_journal_header;

typedef struct qkvi_entry_header {
  uint64_t magic;
  uint16_t version, kind;
  uint32_t layer;
  uint64_t sequence, durable;
  uint64_t session, position, watermark;
  uint64_t offset;
  uint64_t payload_bytes, payload_hash;
  uint64_t zeros[5];
  uint64_t header_hash;
} qkvi_entry_header;

_Static_assert(sizeof(qkvi_journal_header) == QKV_STORAGE_BLOCK, "one block");
_Static_assert(sizeof(qkvi_entry_header) == 128, "128 bytes without padding");

// One entry, as callers see it.
typedef struct qkv_journal_entry {
  qkv_journal_kind kind;
  uint32_t layer;             // of SESSION_TRUNCATE, or QKV_LAYER_ALL
  uint64_t sequence;          // order of the entries
  uint64_t session;           // of SESSION_*
  uint64_t position;          // of SESSION_TRUNCATE: tokens that are left
  uint64_t watermark;         // of SESSION_TRUNCATE: records with smaller numbers are cut
  uint64_t parent;            // of SESSION_FORK
  uint32_t layers;            // of SESSION_FORK
  const uint64_t *positions;  // of SESSION_FORK: `layers` of them
  const void *payload;        // the caller's bytes
  uint64_t bytes;             // of the payload
  // The rest of the payload, of an entry that is to be written.
  const void *rest;
  uint64_t rest_bytes;
} qkv_journal_entry;

// A source of a journal's bytes; a file is read piece by piece.
typedef struct qkvi_journal_source {
  void *context;
  uint64_t size;  // a multiple of blocks
  // `size` bytes from `offset` on, which exist, both multiples of blocks; valid until the next call. NULL: they
  // cannot be read, the caller of the scan knows why.
  const uint8_t *(*at)(void *context, uint64_t offset, uint64_t size);
} qkvi_journal_source;

// The result of a scan.
typedef struct qkvi_journal_report {
  uint64_t last;         // sequence of the last good entry, or 0
  uint64_t end;          // bytes up to its end
  uint64_t bad;          // damaged entries
  uint64_t lost_before;  // sessions opened by an earlier entry than this may have lost one; 0: none is missing
} qkvi_journal_report;

// Bytes of an entry in the file.
uint64_t qkvi_entry_extent(uint64_t payload_bytes);
// Bytes of a SESSION_FORK's payload in front of the caller's.
uint64_t qkvi_fork_bytes(uint32_t layers);
// The payload of a SESSION_FORK, qkvi_fork_bytes(entry->layers) + entry->bytes, into `out`, which is aligned to 8.
void qkvi_fork_make(uint8_t *out, const qkv_journal_entry *entry);
// An entry of a scan, as it is to be written again: with the whole payload of the file.
qkv_journal_entry qkvi_entry_stored(const qkv_journal_entry *entry);
// Both headers, two blocks. `forks`: the journal may have SESSION_FORK.
void qkvi_journal_header_make(uint8_t *out, uint64_t store, uint64_t epoch, uint64_t durable, bool forks);
// The header of an entry that lies at `offset`.
qkvi_entry_header qkvi_entry_header_make(const qkv_journal_entry *entry, uint64_t store, uint64_t durable,
                                         uint64_t offset);
// `size` bytes, from `from` on, of the encoded entry: header, payload, and zeros up to its extent.
void qkvi_entry_copy(uint8_t *out, const qkvi_entry_header *header, const qkv_journal_entry *entry, uint64_t from,
                     uint64_t size);
// The whole entry.
void qkvi_entry_make(uint8_t *out, const qkv_journal_entry *entry, uint64_t store, uint64_t durable, uint64_t offset);

// The functions that read a journal fail with INTERNAL where at() does.

// A valid one of the two headers. DATA_LOSS: there is none, or it is of an unknown version.
qkv_status qkvi_journal_header_read(const qkvi_journal_source *source, qkvi_journal_header *header, qkv_error *error);
// The newest entry that was certainly durable: no entry up to it can be missing because of a crash alone.
// `journal_seen` is the largest `journal` of any record of the store.
qkv_status qkvi_journal_durable(const qkvi_journal_source *source, const qkvi_journal_header *header,
                                uint64_t journal_seen, uint64_t *durable, qkv_error *error);
// Calls each() for every valid entry, in order; payload and positions are valid until each() returns.
qkv_status qkvi_journal_scan(const qkvi_journal_source *source, const qkvi_journal_header *header, uint64_t durable,
                             void (*each)(void *context, const qkv_journal_entry *entry), void *context,
                             qkvi_journal_report *report, qkv_error *error);

// A walk over a journal that this process has written, which therefore has no missing, torn or reordered entries:
// block by block, from the first one behind the headers.
typedef struct qkvi_journal_walk {
  uint64_t store;
  uint64_t offset;            // of the next block
  uint64_t next;              // sequence of the next entry
  qkv_journal_entry entry;    // that the last block is of; without its payload and positions, and with no layers
  bool first;                 // that block is the entry's first one
  uint64_t used, left;        // bytes of that block that count; of the payload, in blocks to come
  uint64_t payload_hash;      // as the header says
  struct XXH3_state_s *hash;  // of the payload so far
} qkvi_journal_walk;

// For a file that was begun in `epoch`.
void qkvi_journal_walk_init(qkvi_journal_walk *walk, uint64_t store, uint64_t epoch);
void qkvi_journal_walk_deinit(qkvi_journal_walk *walk);
// false: it is not the expected block, or was the last one of a damaged entry.
bool qkvi_journal_walk_block(qkvi_journal_walk *walk, const uint8_t *block);
// Changes the first block of an entry for another journal of the store, where it is durable before it can be read.
void qkvi_entry_renumber(uint8_t *block, uint64_t store, uint64_t sequence, uint64_t offset);

#endif
