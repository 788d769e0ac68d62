// proto/wire.h: any bytes read as fields, nested ones and packed ones too.
#include "proto/wire.h"
#include "tests/fuzz/fuzz.h"

#define DEPTH_MAX 6

// Those that are read many at once are the same as one by one.
static void read_packed(qkv_bytes bytes) {
  enum { AT_ONCE = 8 };
  qkv_wire_reader reader, many;
  uint32_t values[AT_ONCE];
  uint64_t value;
  qkv_wire_reader_init(&reader, bytes);
  while (reader.rest.length > 0) {
    many = reader;
    const size_t count = qkv_wire_short_varints(&many, values, AT_ONCE);
    for (size_t i = 0; i < count; i++)
      if (qkv_wire_varint(&reader, &value, NULL) != QKV_OK || value != values[i]) __builtin_trap();
    if (reader.rest.length != many.rest.length) __builtin_trap();
    if (reader.rest.length > 0 && qkv_wire_varint(&reader, &value, NULL) != QKV_OK) return;
  }
}

static void read_message(qkv_bytes bytes, int depth) {
  qkv_wire_reader reader;
  qkv_wire_reader_init(&reader, bytes);
  for (;;) {
    qkv_wire_field field;
    bool more = false;
    qkv_error error = {0};
    if (qkv_wire_next(&reader, &field, &more, &error) != QKV_OK) {
      if (error.text[0] == '\0') __builtin_trap();
      return;
    }
    if (!more) return;
    if (field.type != QKV_WIRE_BYTES) continue;
    char text[32];
    if (qkv_wire_string(&field, "field", text, sizeof text, NULL) == QKV_OK && field.bytes.length >= sizeof text) {
      __builtin_trap();
    }
    read_packed(field.bytes);
    if (depth < DEPTH_MAX) read_message(field.bytes, depth + 1);
  }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz_message message;
  fuzz_message_init(&message, data, size);
  read_message(message.bytes, 0);
  fuzz_message_deinit(&message);
  return 0;
}
