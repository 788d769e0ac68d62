// Protobuf's wire format, read in place and written without a copy.
//
// Small messages go through protobuf-c. The messages that carry tensors do not: unpacking would copy every
// byte twice. Here a reader walks a message that may lie in pieces (engine/base/bytes.h) and gives `bytes`
// fields as views; a writer builds the small parts and takes large data as references.
//
// Hostile input is expected: every length is checked, nesting is the caller's (each level is a reader of its
// own), unknown fields are skipped, groups are refused.
//
// Source: https://protobuf.dev/programming-guides/encoding/
#ifndef QKV_PROTO_WIRE_H
#define QKV_PROTO_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/bytes.h"
#include "engine/base/status.h"

typedef enum qkv_wire_type {
  QKV_WIRE_VARINT = 0,
  QKV_WIRE_FIXED64 = 1,
  QKV_WIRE_BYTES = 2,
  QKV_WIRE_FIXED32 = 5
} qkv_wire_type;

typedef struct qkv_wire_reader {
  qkv_bytes rest;  // what has not been read
  size_t fields;   // that qkv_wire_next may give still
} qkv_wire_reader;

typedef struct qkv_wire_field {
  uint32_t number;
  qkv_wire_type type;
  uint64_t value;   // VARINT, FIXED64, FIXED32: the raw bits
  qkv_bytes bytes;  // BYTES: a view into the message
} qkv_wire_field;

void qkv_wire_reader_init(qkv_wire_reader *reader, qkv_bytes message);

// The next field into *field; `*more` false at the end. INVALID_ARGUMENT "truncated protobuf" and the like. A message
// may have QKV_WIRE_FIELDS fields and one more for each 16 bytes: what has more is none of ours, and took a second
// for 64 MiB.
enum { QKV_WIRE_FIELDS = 65536 };
qkv_status qkv_wire_next(qkv_wire_reader *reader, qkv_wire_field *field, bool *more, qkv_error *error);

// One varint of a packed field; the reader is over the field's bytes.
qkv_status qkv_wire_varint(qkv_wire_reader *reader, uint64_t *value, qkv_error *error);

// The varints of at most four bytes that come next and lie in one piece, `max` of them at the most, to `out`, or
// nowhere where it is NULL. Returns how many. What stops it, a longer varint or the piece's end, is for
// qkv_wire_varint.
size_t qkv_wire_short_varints(qkv_wire_reader *reader, uint32_t *out, size_t max);

// Copies a string field into `out` of `size` bytes with a NUL. INVALID_ARGUMENT (naming `name`) where it does
// not fit or holds a NUL.
qkv_status qkv_wire_string(const qkv_wire_field *field, const char *name, char *out, size_t size, qkv_error *error);

// A writer appends to a growing buffer. References to large data are spliced in at their place by the thread that
// sends the pieces: qkv_wire_writer_pieces gives buffer runs and references in order.
typedef struct qkv_wire_writer qkv_wire_writer;

qkv_wire_writer *qkv_wire_writer_create(void);
void qkv_wire_writer_destroy(qkv_wire_writer **writer);
void qkv_wire_writer_clear(qkv_wire_writer *writer);

// Fields with proto3's rule: a zero value is not written.
void qkv_wire_put_varint(qkv_wire_writer *writer, uint32_t field, uint64_t value);
void qkv_wire_put_fixed64(qkv_wire_writer *writer, uint32_t field, uint64_t value);
void qkv_wire_put_double(qkv_wire_writer *writer, uint32_t field, double value);
void qkv_wire_put_string(qkv_wire_writer *writer, uint32_t field, const char *text);
void qkv_wire_put_packed(qkv_wire_writer *writer, uint32_t field, const int64_t *values, size_t count);
// Likewise, for token ids.
void qkv_wire_put_packed_ids(qkv_wire_writer *writer, uint32_t field, const uint32_t *ids, size_t count);

// A `bytes` field whose data is referenced: it must stay as it is until the message has been sent. `owner` is
// the caller's and comes back with the piece; an empty field is not written and gives no piece.
void qkv_wire_put_reference(qkv_wire_writer *writer, uint32_t field, const void *data, size_t length, void *owner);

// A nested message: begin, fields, end. Up to 4 levels. The length is filled in at the end and counts
// references.
void qkv_wire_begin(qkv_wire_writer *writer, uint32_t field);
void qkv_wire_end(qkv_wire_writer *writer);

typedef struct qkv_wire_piece {
  const uint8_t *data;
  size_t length;
  bool reference;  // else it lies in the writer's buffer, valid until the next put
  void *owner;
} qkv_wire_piece;

// The finished message's pieces in order (valid until the next call on the writer).
const qkv_wire_piece *qkv_wire_writer_pieces(qkv_wire_writer *writer, size_t *count);

#endif
