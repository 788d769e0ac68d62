#include "server/handlers/token_ids.h"

#include <assert.h>
#include <inttypes.h>
#include <stdbool.h>

static void count_id(qkvi_token_ids *ids, uint64_t id, qkv_error *invalid) {
  if (id > UINT32_MAX)
    (void)qkv_fail(invalid, QKV_INVALID_ARGUMENT, "token_ids[%" PRIu64 "] is %" PRIu64 ", at most %" PRIu32,
                   ids->count, id, UINT32_MAX);
  ids->count++;
}

qkv_status qkvi_token_ids_count(qkvi_token_ids *ids, const qkv_wire_field *field, qkv_error *invalid,
                                qkv_error *error) {
  if (field->type == QKV_WIRE_VARINT) {
    count_id(ids, field->value, invalid);
    return QKV_OK;
  }
  if (field->type != QKV_WIRE_BYTES)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "wire type is %d, expected %d or %d", (int)field->type,
                    (int)QKV_WIRE_BYTES, (int)QKV_WIRE_VARINT);
  qkv_wire_reader reader;
  qkv_wire_reader_init(&reader, field->bytes);
  for (;;) {
    uint64_t id = 0;
    ids->count += qkv_wire_short_varints(&reader, NULL, SIZE_MAX);
    if (reader.rest.length == 0) break;
    QKV_TRY(qkv_wire_varint(&reader, &id, error));
    count_id(ids, id, invalid);
  }
  return QKV_OK;
}

static void put(const qkvi_token_ids *ids, uint64_t id, uint32_t *out, uint64_t *read) {
  assert(*read < ids->count);
  out[(*read)++] = (uint32_t)id;
}

static void read_packed(const qkvi_token_ids *ids, qkv_bytes packed, uint32_t *out, uint64_t *read) {
  qkv_wire_reader reader;
  uint64_t id = 0;
  qkv_wire_reader_init(&reader, packed);
  for (;;) {
    *read += qkv_wire_short_varints(&reader, out + *read, (size_t)(ids->count - *read));
    if (reader.rest.length == 0 || qkv_wire_varint(&reader, &id, NULL) != QKV_OK) break;
    put(ids, id, out, read);
  }
}

void qkvi_token_ids_read(const qkvi_token_ids *ids, uint32_t *out) {
  qkv_wire_reader reader;
  qkv_wire_field field;
  uint64_t read = 0;
  bool more = true;
  qkv_wire_reader_init(&reader, ids->message);
  while (qkv_wire_next(&reader, &field, &more, NULL) == QKV_OK && more) {
    if (field.number != ids->field) continue;
    if (field.type == QKV_WIRE_VARINT) put(ids, field.value, out, &read);
    if (field.type == QKV_WIRE_BYTES) read_packed(ids, field.bytes, out, &read);
  }
  assert(read == ids->count);
}
