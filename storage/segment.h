// The segment: one file of records, "segment-<16 hex digits>.qkv", written from front to back.
//
//   0       4096                                      end           end + summary         size of the file
//   +--------+--------+-----+--------+-- ... --+--------+-------------+--------+
//   | header | record | record       |         | record | summary     | footer |
//   +--------+--------+-----+--------+-- ... --+--------+-------------+--------+
//                                                        \___ sealed segments ___/
//
//   header, 4096 bytes                          footer, the last 4096 bytes of a sealed file
//   0     8  magic "QKVSEGMT"                   0     8  magic "QKVSEGFT"
//   8     2  version (1)   10  6  zero          8     2  version (1)   10  6  zero
//   16    8  store: its number                  16    8  store
//   24    8  segment: its number                24    8  segment
//   32    8  epoch of the store                 32    8  end: where the summary begins
//   40 4048  zero                               40    8  records
//   4088  8  XXH3-64 of bytes 0 to 4087         48    8  XXH3-64 of the summary
//                                               56 4032  zero
//                                               4088  8  XXH3-64 of bytes 0 to 4087
//
//   summary: the headers of all records (record.h), 128 bytes each, by offset; zeros up to a block
//
// Recovery of a sealed segment reads its footer and summary alone; all of its records were durable before the footer
// was written. In an unsealed one (the newest ones after a crash) every record is read and checked, which ends a torn
// tail. Blocks that are no record are skipped one by one, as after a power cut a later write may exist without an
// earlier one.
#ifndef QKV_STORAGE_SEGMENT_H
#define QKV_STORAGE_SEGMENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "storage/record.h"

#define QKVI_SEGMENT_MAGIC 0x544d474553564b51u  // "QKVSEGMT"
#define QKVI_FOOTER_MAGIC 0x5446474553564b51u   // "QKVSEGFT"
#define QKVI_SEGMENT_NAME_MAX 32

enum { QKVI_SEGMENT_VERSION = 1 };

typedef struct qkvi_segment_header {
  uint64_t magic;
  uint16_t version, zero[3];
  uint64_t store, segment, epoch;
  uint64_t zeros[506];
  uint64_t hash;
} qkvi_segment_header;

typedef struct qkvi_segment_footer {
  uint64_t magic;
  uint16_t version, zero[3];
  uint64_t store, segment;
  uint64_t end, records;
  uint64_t summary_hash;
  uint64_t zeros[504];
  uint64_t hash;
} qkvi_segment_footer;

_Static_assert(sizeof(qkvi_segment_header) == QKV_STORAGE_BLOCK, "one block");
_Static_assert(sizeof(qkvi_segment_footer) == QKV_STORAGE_BLOCK, "one block");

// "segment-00000000000000a1.qkv" and back; false for other names.
void qkvi_segment_name(uint64_t segment, char name[QKVI_SEGMENT_NAME_MAX]);
bool qkvi_segment_parse_name(const char *name, uint64_t *segment);

// Bytes of summary and footer for `records` records.
uint64_t qkvi_segment_tail_bytes(uint64_t records);

void qkvi_segment_header_make(qkvi_segment_header *header, uint64_t store, uint64_t segment, uint64_t epoch);
// NULL, or what is wrong with the header. `store` 0: any.
const char *qkvi_segment_header_check(const qkvi_segment_header *header, uint64_t store, uint64_t segment);

// Summary and footer, qkvi_segment_tail_bytes(records) bytes, into `out`.
void qkvi_segment_tail_make(uint8_t *out, uint64_t store, uint64_t segment, uint64_t end,
                            const qkv_record_header *headers, uint64_t records);
// `file_bytes` is the size of the file that the footer ends. NULL, or what is wrong with it.
const char *qkvi_segment_footer_check(const qkvi_segment_footer *footer, uint64_t store, uint64_t segment,
                                      uint64_t file_bytes);
// The same for the summary, in front of a footer that has passed. It checks every record header, too.
const char *qkvi_segment_summary_check(const qkvi_segment_footer *footer, const qkv_record_header *headers);

// ---- Reading a segment that is not sealed, as its bytes come ----

typedef struct qkvi_segment_scan {
  uint64_t store, segment, file_bytes;
  uint64_t offset;      // where the next record may begin; a multiple of 4096
  uint64_t bad;         // damaged records
  uint64_t bad_offset;  // of the last damaged one
  uint64_t end;         // of the last good record
} qkvi_segment_scan;

void qkvi_segment_scan_init(qkvi_segment_scan *scan, uint64_t store, uint64_t segment, uint64_t file_bytes);
// Scans the bytes from scan->offset on, of which `size` are given (all of the file's rest where that is less than a
// record). Returns the next valid record, with scan->offset behind it, or NULL: then `*wanted` is 0 at the end of the
// file, else how many bytes from scan->offset on (which may have moved) the next call needs.
const qkv_record_header *qkvi_segment_scan_next(qkvi_segment_scan *scan, const uint8_t *bytes, uint64_t size,
                                                uint64_t *wanted);

#endif
