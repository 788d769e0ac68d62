// The record: a stored page, and its format on the disk.
//
//   at a multiple of 4096 in its segment
//   0         8   magic "QKVRECRD"
//   8         2   version (1)            10  2  bytes of this header (128)
//   12        2   kind                   14  1  encoding (0 plain, 1 zstd)      15  1  zero
//   16        8   record: its number, unique for ever
//   24        8   session: its number, unique for ever
//   32        8   position: the first token
//   40        4   layer                  44  4  tokens
//   48        4   codec                  52  4  calibration: its version, 0 for none
//   56        8   raw: bytes of the payload as it was put
//   64        8   stored: bytes of the payload as they lie here
//   72        8   segment                80  8  offset in it: where this record is meant to lie
//   88        8   journal: the newest entry that was durable when the record was written (journal.h)
//   96        8   XXH3-64 of the stored payload
//   104      16   hash: two numbers of the caller's, zero where it has said none; records of before it have zeros
//   120       8   XXH3-64 of bytes 0 to 119, seeded with the store's number
//   128           the stored payload, then zeros up to a multiple of 4096
//
// Numbers are little-endian. A reader rejects a record whose header does not match the request: number, session,
// segment and offset reveal misdirected and lost writes, the checksums reveal damage. Because of the seed a payload
// that contains the image of a record is not mistaken for one.
//
// Nothing here does I/O. Threads: any, on bytes of the caller's.
#ifndef QKV_STORAGE_RECORD_H
#define QKV_STORAGE_RECORD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"

#define QKV_RECORD_MAGIC 0x4452434552564b51u  // "QKVRECRD"
#define QKV_RECORD_BYTES_MAX (UINT64_C(1) << 30)
#define QKV_RECORD_TOKENS_MAX 1024u
#define QKV_RECORD_LAYERS_MAX 65536u
#define QKV_RECORD_KINDS 15u                        // of callers; the next one is the storage's own (index.h)
#define QKV_SEGMENT_BYTES_MAX (UINT64_C(64) << 30)  // of the file that it lies in
#define QKV_STORAGE_BLOCK 4096u                     // bytes; everything on the disk begins at a multiple of it

enum { QKV_RECORD_VERSION = 1 };

typedef enum qkv_record_encoding { QKV_RECORD_PLAIN = 0, QKV_RECORD_ZSTD = 1 } qkv_record_encoding;

// The caller's metadata of a record. All but `tokens` is stored and returned unchanged.
typedef struct qkv_record_meta {
  uint64_t session;      // of qkv_storage_session_number
  uint64_t position;     // first token
  uint32_t layer;        // of the model, below QKV_RECORD_LAYERS_MAX
  uint32_t tokens;       // 1 to QKV_RECORD_TOKENS_MAX
  uint32_t codec;        // id of the codec of the payload
  uint32_t calibration;  // version, 0: none
  uint16_t kind;     // the caller's, below QKV_RECORD_KINDS: records of several may have the same layer and position
  uint64_t hash[2];  // the caller's, of what the record was made from; {0, 0}: unknown
} qkv_record_meta;

typedef struct qkv_record_header {
  uint64_t magic;
  uint16_t version, header_bytes;
  uint16_t kind;
  uint8_t encoding, zero;
  uint64_t record, session, position;
  uint32_t layer, tokens;
  uint32_t codec, calibration;
  uint64_t raw_bytes, stored_bytes;
  uint64_t segment, offset;
  uint64_t journal;
  uint64_t payload_hash;
  uint64_t hash[2];
  uint64_t header_hash;
} qkv_record_header;

_Static_assert(sizeof(qkv_record_header) == 128, "the header is 128 bytes without padding");

// Bytes of a record on the disk: header and payload up to the next block.
uint64_t qkvi_record_extent(uint64_t stored_bytes);

// Fills the header, but for its place (qkvi_record_place), for a payload of `stored_bytes` stored bytes at `payload`.
void qkvi_record_describe(qkv_record_header *header, const qkv_record_meta *meta, uint64_t record, uint64_t raw_bytes,
                          qkv_record_encoding encoding, const void *payload, uint64_t stored_bytes);
// Sets where the record lies and seals the header. A record that is moved must be placed again.
void qkvi_record_place(qkv_record_header *header, uint64_t store, uint64_t segment, uint64_t offset,
                       uint64_t journal);

// NULL for a header that is undamaged, of this store, and lies where it says; else what is wrong with it.
const char *qkvi_record_check(const qkv_record_header *header, uint64_t store, uint64_t segment, uint64_t offset);
// NULL for a payload (`header->stored_bytes` bytes) that matches the header.
const char *qkvi_record_check_payload(const qkv_record_header *header, const void *payload);

// The payload as it was put, header->raw_bytes bytes into `raw`. Header and payload have passed their checks. NULL,
// or what is wrong: bytes that this version of zstd does not decode.
const char *qkvi_record_decode(const qkv_record_header *header, const void *payload, void *raw);

// Compresses with zstd where that is worth its time: tried on samples of `raw` first, then on all of it. Returns the
// bytes that were written to `out` (of capacity `bytes`), or 0 where less than 3 % would be saved.
uint64_t qkvi_record_compress(const void *raw, uint64_t bytes, void *out);

#endif
