#include "proto/wire.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

// ---- Reader ----

void qkv_wire_reader_init(qkv_wire_reader *reader, qkv_bytes message) {
  enum { FIELD_BYTES = 16 };
  reader->rest = message;
  reader->fields = QKV_WIRE_FIELDS + message.length / FIELD_BYTES;
}

static qkv_status truncated(qkv_error *error) {
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "truncated protobuf");
}

static qkv_bytes take(qkv_wire_reader *reader, size_t length) {
  qkv_bytes taken = qkv_bytes_slice(reader->rest, 0, length);
  reader->rest = qkv_bytes_slice(reader->rest, length, reader->rest.length - length);
  return taken;
}

// Seven bits a byte, the least significant first; the high bit says that more follow.
// A varint that is valid and ends before the last byte of its piece, which is what most are; else false, and nothing
// is read.
static bool read_within(qkv_wire_reader *reader, uint64_t *value) {
  enum { BYTES_MAX = 9 };  // 63 bits: one of 10 bytes can be invalid
  qkv_bytes *rest = &reader->rest;
  if (rest->length <= BYTES_MAX || rest->segments[0].length - rest->offset <= BYTES_MAX) return false;
  const uint8_t *at = rest->segments[0].data + rest->offset;
  uint64_t result = 0;
  for (unsigned i = 0; i < BYTES_MAX; i++) {
    result |= (uint64_t)(at[i] & 0x7f) << (7 * i);
    if (at[i] >= 0x80) continue;
    *value = result;
    rest->offset += i + 1;
    rest->length -= i + 1;
    return true;
  }
  return false;
}

qkv_status qkv_wire_varint(qkv_wire_reader *reader, uint64_t *value, qkv_error *error) {
  uint64_t result = 0;
  if (read_within(reader, value)) return QKV_OK;
  for (unsigned shift = 0; shift < 64; shift += 7) {
    if (reader->rest.length == 0) return truncated(error);
    uint64_t byte = reader->rest.segments[0].data[reader->rest.offset];
    reader->rest = qkv_bytes_slice(reader->rest, 1, reader->rest.length - 1);
    if (shift == 63 && byte > 1) break;
    result |= (byte & 0x7f) << shift;
    if (byte < 0x80) {
      *value = result;
      return QKV_OK;
    }
  }
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "malformed protobuf: a varint of more than 64 bits");
}

// The four bytes of which each but the last has its high bit set, as one number.
static uint32_t of_groups(uint32_t bytes) {
  return (bytes & 0x7f) | (bytes >> 1 & 0x3f80) | (bytes >> 2 & 0x1fc000) | (bytes >> 3 & 0xfe00000);
}

size_t qkv_wire_short_varints(qkv_wire_reader *reader, uint32_t *out, size_t max) {
  const qkv_bytes rest = reader->rest;
  if (rest.length == 0) return 0;
  const size_t piece = rest.segments[0].length - rest.offset;
  const uint8_t *begin = rest.segments[0].data + rest.offset, *at = begin;
  const uint8_t *end = begin + (piece < rest.length ? piece : rest.length);
  size_t count = 0;
  for (; count < max && end - at >= 4; count++) {
    const uint32_t bytes = (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
    const uint32_t ends = ~bytes & 0x80808080;
    if (ends == 0) break;
    const uint32_t first = ends & -ends;
    if (out != NULL) out[count] = of_groups(bytes & (first ^ (first - 1)));
    // Clients write ids of a prompt in four bytes each. A branch that is foreseen does not wait for the bytes.
    at += ends == 0x80000000 ? 4 : (__builtin_ctz(first) + 1) / 8;
  }
  const size_t read = (size_t)(at - begin);
  reader->rest = qkv_bytes_slice(rest, read, rest.length - read);
  return count;
}

// Little-endian, as the format is.
static qkv_status read_fixed(qkv_wire_reader *reader, size_t size, uint64_t *value, qkv_error *error) {
  uint8_t raw[8];
  if (size > reader->rest.length) return truncated(error);
  qkv_bytes_copy(take(reader, size), 0, size, raw);
  *value = 0;
  for (size_t i = 0; i < size; i++) *value |= (uint64_t)raw[i] << (8 * i);
  return QKV_OK;
}

static qkv_status read_bytes(qkv_wire_reader *reader, qkv_bytes *bytes, qkv_error *error) {
  uint64_t length = 0;
  QKV_TRY(qkv_wire_varint(reader, &length, error));
  if (length > reader->rest.length) return truncated(error);
  *bytes = take(reader, (size_t)length);
  return QKV_OK;
}

qkv_status qkv_wire_next(qkv_wire_reader *reader, qkv_wire_field *field, bool *more, qkv_error *error) {
  *more = reader->rest.length > 0;
  if (!*more) return QKV_OK;
  if (reader->fields-- == 0) return qkv_fail(error, QKV_INVALID_ARGUMENT, "malformed protobuf: too many fields");
  uint64_t tag = 0;
  QKV_TRY(qkv_wire_varint(reader, &tag, error));
  if (tag > UINT32_MAX || tag >> 3 == 0) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "malformed protobuf: no valid field number");
  }
  *field = (qkv_wire_field){.number = (uint32_t)(tag >> 3), .type = (qkv_wire_type)(tag & 7)};
  switch (field->type) {
    case QKV_WIRE_VARINT:
      return qkv_wire_varint(reader, &field->value, error);
    case QKV_WIRE_FIXED64:
      return read_fixed(reader, 8, &field->value, error);
    case QKV_WIRE_BYTES:
      return read_bytes(reader, &field->bytes, error);
    case QKV_WIRE_FIXED32:
      return read_fixed(reader, 4, &field->value, error);
  }
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "malformed protobuf: field %u has wire type %u", field->number,
                  (unsigned)(tag & 7));
}

qkv_status qkv_wire_string(const qkv_wire_field *field, const char *name, char *out, size_t size, qkv_error *error) {
  assert(size > 0);
  if (field->type != QKV_WIRE_BYTES) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s has wire type %u, a string is needed", name,
                    (unsigned)field->type);
  }
  if (field->bytes.length >= size) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s is %zu bytes, at most %zu", name, field->bytes.length, size - 1);
  }
  qkv_bytes_copy(field->bytes, 0, field->bytes.length, out);
  out[field->bytes.length] = '\0';
  if (strlen(out) != field->bytes.length) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s holds a NUL byte", name);
  }
  return QKV_OK;
}

// ---- Writer ----

#define LEVELS_MAX 4
#define VARINT_BYTES_MAX 10

// Data that belongs into the message at `position` of the buffer. Positions do not fall.
typedef struct wire_reference {
  size_t position;
  const uint8_t *data;
  size_t length;
  void *owner;
} wire_reference;

// A nested message that has not ended. Its length takes one byte until it is known.
typedef struct wire_level {
  size_t content;             // position in the buffer, behind the length
  size_t first_reference;     // index of the first reference inside
  uint64_t referenced_bytes;  // the writer's, when the message began
} wire_level;

struct qkv_wire_writer {
  uint8_t *buffer;
  size_t length;
  size_t capacity;
  wire_reference *references;
  size_t reference_count;
  size_t reference_capacity;
  uint64_t referenced_bytes;
  wire_level levels[LEVELS_MAX];
  size_t depth;
  qkv_wire_piece *pieces;  // of the last qkv_wire_writer_pieces
};

qkv_wire_writer *qkv_wire_writer_create(void) {
  qkv_wire_writer *writer = calloc(1, sizeof *writer);
  assert(writer != NULL);
  return writer;
}

void qkv_wire_writer_destroy(qkv_wire_writer **writer) {
  if (*writer == NULL) return;
  free((*writer)->buffer);
  free((*writer)->references);
  free((*writer)->pieces);
  free(*writer);
  *writer = NULL;
}

void qkv_wire_writer_clear(qkv_wire_writer *writer) {
  writer->length = 0;
  writer->reference_count = 0;
  writer->referenced_bytes = 0;
  writer->depth = 0;
}

// Space for `more` bytes at the end of the buffer, which grows where it has to.
static uint8_t *reserve(qkv_wire_writer *writer, size_t more) {
  if (more > writer->capacity - writer->length) {
    size_t capacity = 2 * writer->capacity + more + 256;
    uint8_t *buffer = realloc(writer->buffer, capacity);
    assert(buffer != NULL);
    writer->buffer = buffer;
    writer->capacity = capacity;
  }
  return writer->buffer + writer->length;
}

static size_t varint_size(uint64_t value) {
  size_t size = 1;
  while (value >= 0x80) {
    value >>= 7;
    size++;
  }
  return size;
}

static size_t encode_varint(uint8_t *out, uint64_t value) {
  size_t size = 0;
  while (value >= 0x80) {
    out[size++] = (uint8_t)(value | 0x80);
    value >>= 7;
  }
  out[size++] = (uint8_t)value;
  return size;
}

static void append_varint(qkv_wire_writer *writer, uint64_t value) {
  writer->length += encode_varint(reserve(writer, VARINT_BYTES_MAX), value);
}

static void append_tag(qkv_wire_writer *writer, uint32_t field, qkv_wire_type type) {
  assert(field > 0 && field < 1u << 29);
  append_varint(writer, (uint64_t)field << 3 | type);
}

void qkv_wire_put_varint(qkv_wire_writer *writer, uint32_t field, uint64_t value) {
  if (value == 0) return;
  append_tag(writer, field, QKV_WIRE_VARINT);
  append_varint(writer, value);
}

void qkv_wire_put_fixed64(qkv_wire_writer *writer, uint32_t field, uint64_t value) {
  if (value == 0) return;
  append_tag(writer, field, QKV_WIRE_FIXED64);
  uint8_t *out = reserve(writer, sizeof value);
  for (size_t i = 0; i < sizeof value; i++) out[i] = (uint8_t)(value >> (8 * i));
  writer->length += sizeof value;
}

void qkv_wire_put_double(qkv_wire_writer *writer, uint32_t field, double value) {
  uint64_t bits;
  memcpy(&bits, &value, sizeof bits);
  qkv_wire_put_fixed64(writer, field, bits);
}

void qkv_wire_put_string(qkv_wire_writer *writer, uint32_t field, const char *text) {
  size_t length = text != NULL ? strlen(text) : 0;
  if (length == 0) return;
  append_tag(writer, field, QKV_WIRE_BYTES);
  append_varint(writer, length);
  memcpy(reserve(writer, length), text, length);
  writer->length += length;
}

void qkv_wire_put_packed(qkv_wire_writer *writer, uint32_t field, const int64_t *values, size_t count) {
  if (count == 0) return;
  size_t length = 0;
  for (size_t i = 0; i < count; i++) length += varint_size((uint64_t)values[i]);
  append_tag(writer, field, QKV_WIRE_BYTES);
  append_varint(writer, length);
  for (size_t i = 0; i < count; i++) append_varint(writer, (uint64_t)values[i]);
}

void qkv_wire_put_packed_ids(qkv_wire_writer *writer, uint32_t field, const uint32_t *ids, size_t count) {
  if (count == 0) return;
  size_t length = 0;
  for (size_t i = 0; i < count; i++) length += varint_size(ids[i]);
  append_tag(writer, field, QKV_WIRE_BYTES);
  append_varint(writer, length);
  for (size_t i = 0; i < count; i++) append_varint(writer, ids[i]);
}

static void grow_references(qkv_wire_writer *writer) {
  size_t capacity = 2 * writer->reference_capacity + 4;
  wire_reference *references = realloc(writer->references, capacity * sizeof *references);
  assert(references != NULL);
  writer->references = references;
  writer->reference_capacity = capacity;
}

void qkv_wire_put_reference(qkv_wire_writer *writer, uint32_t field, const void *data, size_t length, void *owner) {
  if (length == 0) return;
  append_tag(writer, field, QKV_WIRE_BYTES);
  append_varint(writer, length);
  if (writer->reference_count == writer->reference_capacity) grow_references(writer);
  writer->references[writer->reference_count++] =
      (wire_reference){.position = writer->length, .data = data, .length = length, .owner = owner};
  writer->referenced_bytes += length;
}

void qkv_wire_begin(qkv_wire_writer *writer, uint32_t field) {
  assert(writer->depth < LEVELS_MAX);
  append_tag(writer, field, QKV_WIRE_BYTES);
  *reserve(writer, 1) = 0;
  writer->length++;
  writer->levels[writer->depth++] = (wire_level){.content = writer->length,
                                                 .first_reference = writer->reference_count,
                                                 .referenced_bytes = writer->referenced_bytes};
}

void qkv_wire_end(qkv_wire_writer *writer) {
  assert(writer->depth > 0);
  const wire_level *level = &writer->levels[--writer->depth];
  size_t written = writer->length - level->content;
  uint64_t length = written + (writer->referenced_bytes - level->referenced_bytes);
  size_t shift = varint_size(length) - 1;
  if (shift > 0) {
    (void)reserve(writer, shift);
    memmove(writer->buffer + level->content + shift, writer->buffer + level->content, written);
    for (size_t i = level->first_reference; i < writer->reference_count; i++) writer->references[i].position += shift;
    writer->length += shift;
  }
  (void)encode_varint(writer->buffer + level->content - 1, length);
}

static size_t add_run(qkv_wire_writer *writer, size_t count, size_t begin, size_t end) {
  if (begin == end) return count;
  writer->pieces[count] = (qkv_wire_piece){.data = writer->buffer + begin, .length = end - begin};
  return count + 1;
}

const qkv_wire_piece *qkv_wire_writer_pieces(qkv_wire_writer *writer, size_t *count) {
  assert(writer->depth == 0);
  qkv_wire_piece *pieces = realloc(writer->pieces, (2 * writer->reference_count + 1) * sizeof *pieces);
  assert(pieces != NULL);
  writer->pieces = pieces;
  size_t made = 0;
  size_t position = 0;
  for (size_t i = 0; i < writer->reference_count; i++) {
    const wire_reference *reference = &writer->references[i];
    made = add_run(writer, made, position, reference->position);
    position = reference->position;
    pieces[made++] = (qkv_wire_piece){
        .data = reference->data, .length = reference->length, .reference = true, .owner = reference->owner};
  }
  *count = add_run(writer, made, position, writer->length);
  return pieces;
}
