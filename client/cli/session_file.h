// A session in a file, as its daemon held it: the model, the session, its sealed pages as they are, its exact rows
// and the calibrations that the pages were coded with. Written by `qkvctl fetch --coded`, read by `qkvctl load`.
//
// Little-endian. Offsets in bytes.
//
//   file                                  header (16 bytes)
//   +--------------------------+  0        0  u32 magic "QKVS"      4  u32 format (2)     8  u64 0
//   | header                   |
//   +--------------------------+  16      record (48 bytes, the payload, zeros up to a multiple of 8)
//   | record                   |           0  u32 magic "QKVR"      4  u32 kind
//   +--------------------------+           8  u64 bytes of the payload
//   | ...                      |          16  u64 position of the first token    (PAGE, ROWS, IDS)
//                                                  records before this one             (END)
//   +--------------------------+          24  u32 layer                          (PAGE, ROWS)
//   | record END               |          28  u32 tokens                         (PAGE, ROWS, IDS)
//                                                  version                             (CALIBRATION)
//   +--------------------------+          32  u64 hash of the calibration        (PAGE, CALIBRATION)
//                                         40  u64 XXH3-64 of the record up to its payload's end, this field being 0
//
//   kind            payload
//   1 MODEL         qkv.v1.Model, once
//   2 SESSION       qkv.v1.SessionInfo, once
//   3 CALIBRATION   its file (docs/calibration.md)
//   4 PAGE          its image (docs/page-format.md); pages and rows of a layer in order
//   5 ROWS          exact rows, K [tokens][kv_heads][key_dim], then V alike, in the model's dtype, as attended
//   6 END           nothing; what has no END was not written in full
//   7 IDS           u32 for each token, from position 0 on without a gap. Not in format 1, which is read as well
//
// Threads: used by the program's main thread.
#ifndef QKV_CLIENT_CLI_SESSION_FILE_H
#define QKV_CLIENT_CLI_SESSION_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"

typedef enum qkvctl_record_kind {
  QKVCTL_RECORD_MODEL = 1,
  QKVCTL_RECORD_SESSION,
  QKVCTL_RECORD_CALIBRATION,
  QKVCTL_RECORD_PAGE,
  QKVCTL_RECORD_ROWS,
  QKVCTL_RECORD_END,
  QKVCTL_RECORD_IDS
} qkvctl_record_kind;

typedef struct qkvctl_record {
  qkvctl_record_kind kind;
  uint32_t layer;
  uint64_t position;
  uint32_t tokens;  // CALIBRATION: its version
  uint64_t hash;
  const void *payload[2];  // one after the other; read: all in the first
  size_t bytes[2];
} qkvctl_record;

// ---- Writing ----

typedef struct qkvctl_session_writer qkvctl_session_writer;

// Writes PATH.partial, which finish gives its name. UNAVAILABLE with the system's reason.
qkv_status qkvctl_session_writer_create(const char *path, qkvctl_session_writer **out, qkv_error *error);
qkv_status qkvctl_session_writer_put(qkvctl_session_writer *writer, const qkvctl_record *record, qkv_error *error);
// Writes END and frees the writer. On failure nothing is left behind.
qkv_status qkvctl_session_writer_finish(qkvctl_session_writer **writer, qkv_error *error);
// Gives up: nothing is left behind. NULL is none.
void qkvctl_session_writer_destroy(qkvctl_session_writer **writer);
uint64_t qkvctl_session_writer_bytes(const qkvctl_session_writer *writer);  // by now

// ---- Reading ----

// Whether the file begins as one of these; false where it cannot be read.
bool qkvctl_session_file_is(const char *path);

typedef struct qkvctl_session_file qkvctl_session_file;

// Maps the file and checks all of its records. DATA_LOSS with what is wrong, INVALID_ARGUMENT for another format,
// NOT_FOUND, UNAVAILABLE.
qkv_status qkvctl_session_file_open(const char *path, qkvctl_session_file **out, qkv_error *error);
void qkvctl_session_file_close(qkvctl_session_file **file);  // NULL is none

size_t qkvctl_session_file_count(const qkvctl_session_file *file);
// Without END. The payload is as long as the file is open, 8-byte aligned.
qkvctl_record qkvctl_session_file_at(const qkvctl_session_file *file, size_t i);

#endif
