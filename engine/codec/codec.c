#include "engine/codec/codec.h"

#include <string.h>

#include "engine/codec/embedded.h"

static bool any_bits(double bits) {
  return bits > 0;
}

static const qkv_codec exact = {.id = 0, .name = "exact", .bits_valid = any_bits};

enum { CODECS = 2 };

static const qkv_codec *const codecs[CODECS] = {&qkvi_codec_embedded, &exact};

const qkv_codec *qkv_codec_by_id(uint8_t id) {
  for (size_t row = 0; row < CODECS; row++) {
    if (codecs[row]->id == id) return codecs[row];
  }
  return NULL;
}

const qkv_codec *qkv_codec_by_name(const char *name) {
  for (size_t row = 0; row < CODECS; row++) {
    if (strcmp(codecs[row]->name, name) == 0) return codecs[row];
  }
  return NULL;
}

const qkv_codec *qkv_codec_at(size_t row) {
  return row < CODECS ? codecs[row] : NULL;
}
