// What codecs have made of a calibration, in its file.
#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "engine/codec/calibration_internal.h"
#include "engine/codec/codec.h"

enum { BITS = 16 };  // of qkv_section_wants

#define REFUSE(...) return qkv_fail(error, QKV_DATA_LOSS, __VA_ARGS__)

static const qkvi_calibration_header *header_of(const qkv_calibration *calibration) {
  return (const qkvi_calibration_header *)calibration->bytes;
}

uint32_t qkvi_calibration_format(const qkv_calibration *calibration) {
  return header_of(calibration)->format;
}

// Where sections begin.
static size_t begin_in(const qkv_calibration_shape *shape, const uint8_t *bytes) {
  const qkvi_calibration_header *header = (const qkvi_calibration_header *)bytes;
  return qkvi_calibration_size(shape, header->format, header->band_k, header->band_v);
}

static size_t begin_of(const qkv_calibration *calibration) {
  return begin_in(&calibration->shape, calibration->bytes);
}

static size_t heads_of(const qkv_calibration_shape *shape) {
  return (size_t)shape->layers * shape->kv_heads;
}

static size_t section_bytes(const qkv_codec *codec, const qkv_calibration_shape *shape, unsigned bits) {
  return sizeof(qkvi_section_header) + heads_of(shape) * codec->section->bytes(shape, bits);
}

// ---- Reading ----

static qkv_status check_section(const qkv_calibration_shape *shape, const uint8_t *at, size_t left,
                                const qkvi_section_header *before, qkvi_section_header *header, qkv_error *error) {
  static const uint8_t none[sizeof header->none] = {0};
  if (left < sizeof *header) REFUSE("calibration has %zu bytes behind its sections", left);
  memcpy(header, at, sizeof *header);
  const qkv_codec *codec = qkv_codec_by_id(header->codec);
  if (codec == NULL || codec->section == NULL)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "calibration has a section of codec %u, which this build has not",
                    header->codec);
  if (header->version != codec->section->version)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "calibration's section of %s has version %u, this build reads %u",
                    codec->name, header->version, codec->section->version);
  if (!codec->bits_valid(header->bits))
    REFUSE("calibration's section of %s is of %u bits", codec->name, header->bits);
  if (memcmp(header->reserved, none, sizeof header->reserved) != 0 || memcmp(header->none, none, sizeof none) != 0)
    REFUSE("calibration's section of %s has something in reserved fields", codec->name);
  if (before->codec > header->codec || (before->codec == header->codec && before->bits >= header->bits))
    REFUSE("calibration's section of %s with %u bits is out of order", codec->name, header->bits);
  const size_t due = section_bytes(codec, shape, header->bits);
  if (header->bytes != due || due > left)
    REFUSE("calibration's section of %s has %" PRIu64 " bytes of %zu, it takes %zu", codec->name, header->bytes, left,
           due);
  const size_t bytes = codec->section->bytes(shape, header->bits);
  for (size_t head = 0; head < heads_of(shape); head++) {
    const char *wrong = codec->section->validate(shape, header->bits, at + sizeof *header + head * bytes);
    if (wrong != NULL) REFUSE("calibration's section of %s with %u bits: %s", codec->name, header->bits, wrong);
  }
  return QKV_OK;
}

qkv_status qkvi_calibration_check_sections(const qkv_calibration_shape *shape, const uint8_t *bytes, size_t size,
                                           qkv_error *error) {
  uint64_t end;
  memcpy(&end, bytes + offsetof(qkvi_calibration_header, bytes), sizeof end);
  qkvi_section_header before = {0};
  for (size_t at = size; at < end;) {
    qkvi_section_header header = {0};
    QKV_TRY(check_section(shape, bytes + at, (size_t)end - at, &before, &header, error));
    at += (size_t)header.bytes;
    before = header;
  }
  return QKV_OK;
}

const uint8_t *qkvi_calibration_section(const qkv_calibration *calibration, uint8_t codec, unsigned bits,
                                        uint32_t layer, uint32_t kv_head) {
  const size_t head = (size_t)layer * calibration->shape.kv_heads + kv_head;
  for (size_t at = begin_of(calibration); at < calibration->size;) {
    const qkvi_section_header *header = (const qkvi_section_header *)(calibration->bytes + at);
    if (header->codec == codec && header->bits == bits)
      return (const uint8_t *)(header + 1) + head * qkv_codec_by_id(codec)->section->bytes(&calibration->shape, bits);
    at += (size_t)header->bytes;
  }
  return NULL;
}

void qkvi_calibration_clear_sections(const qkv_calibration_shape *shape, uint8_t *bytes, uint32_t layer,
                                     uint32_t kv_head, bool keys) {
  const size_t end = (size_t)((const qkvi_calibration_header *)bytes)->bytes;
  for (size_t at = begin_in(shape, bytes); at < end;) {
    const qkvi_section_header *header = (const qkvi_section_header *)(bytes + at);
    const qkv_codec_section *section = qkv_codec_by_id(header->codec)->section;
    const size_t head = (size_t)layer * shape->kv_heads + kv_head;
    section->clear(shape, header->bits, keys,
                   bytes + at + sizeof *header + head * section->bytes(shape, header->bits));
    at += (size_t)header->bytes;
  }
}

// ---- Adding ----

// Codecs with sections in the order of their ids; NULL behind the last one.
static const qkv_codec *next_codec(const qkv_codec *before, size_t *row) {
  const qkv_codec *next = NULL;
  for (size_t i = 0; qkv_codec_at(i) != NULL; i++) {
    const qkv_codec *codec = qkv_codec_at(i);
    if (codec->section == NULL || (before != NULL && codec->id <= before->id)) continue;
    if (next != NULL && codec->id > next->id) continue;
    next = codec;
    *row = i;
  }
  return next;
}

typedef struct section {
  const qkv_codec *codec;
  unsigned bits;
} section;

// Those that are wanted and fit into so many bytes, and what they take; out NULL: not listed.
static size_t list_wanted(const qkv_calibration_shape *shape, const qkv_section_wants *wants, size_t capacity,
                          section *out, size_t *bytes) {
  size_t count = 0, row = 0;
  *bytes = 0;
  for (const qkv_codec *codec = next_codec(NULL, &row); codec != NULL; codec = next_codec(codec, &row)) {
    for (unsigned bits = 1; bits < BITS; bits++) {
      const size_t more = (wants->bits[row] >> bits & 1) == 0 ? 0 : section_bytes(codec, shape, bits);
      if (more == 0 || more > capacity - *bytes) continue;
      if (out != NULL) out[count] = (section){codec, bits};
      count++;
      *bytes += more;
    }
  }
  return count;
}

uint64_t qkv_calibration_sections_cost(const qkv_calibration_shape *shape, const qkv_section_wants *wants) {
  size_t bytes;
  (void)list_wanted(shape, wants, QKV_CALIBRATION_BYTES_MAX, NULL, &bytes);
  return bytes;
}

// With the header; false: it was cancelled.
static bool make_section(const qkv_calibration *from, const section *of, const _Atomic bool *cancelled,
                         uint8_t *out) {
  const qkv_calibration_shape *shape = &from->shape;
  const size_t bytes = of->codec->section->bytes(shape, of->bits);
  qkvi_section_header *header = (qkvi_section_header *)out;
  *header = (qkvi_section_header){.codec = of->codec->id,
                                  .version = of->codec->section->version,
                                  .bits = (uint8_t)of->bits,
                                  .bytes = section_bytes(of->codec, shape, of->bits)};
  uint8_t *at = (uint8_t *)(header + 1);
  for (size_t head = 0; head < heads_of(shape); head++) {
    if (cancelled != NULL && atomic_load(cancelled)) return false;
    of->codec->section->make(from, of->bits, (uint32_t)(head / shape->kv_heads), (uint32_t)(head % shape->kv_heads),
                             at + head * bytes);
  }
  return true;
}

qkv_status qkv_calibration_add_sections(const qkv_calibration **calibration, const qkv_section_wants *wants,
                                        const _Atomic bool *cancelled, qkv_calibration **out, qkv_error *error) {
  const qkv_calibration *from = *calibration;
  const size_t size = from->size;
  assert(qkvi_calibration_format(from) == QKV_CALIBRATION_FORMAT && size == begin_of(from));
  section sections[QKV_CODECS_MAX * BITS];
  size_t more;
  const size_t count = list_wanted(&from->shape, wants, QKV_CALIBRATION_BYTES_MAX - size, sections, &more);
  if (count == 0) {
    *out = (qkv_calibration *)(uintptr_t)from;
    *calibration = NULL;
    return QKV_OK;
  }
  uint8_t *bytes = aligned_alloc(64, size + more);
  if (bytes == NULL) abort();
  memcpy(bytes, from->bytes, size);
  memset(bytes + size, 0, more);
  ((qkvi_calibration_header *)bytes)->bytes = size + more;
  bool made = true;
  for (size_t i = 0, at = size; made && i < count; i++) {
    made = make_section(from, &sections[i], cancelled, bytes + at);
    at += section_bytes(sections[i].codec, &from->shape, sections[i].bits);
  }
  qkv_calibration_unref(calibration);
  *out = NULL;
  if (made) return qkvi_calibration_finish(bytes, out, error);
  free(bytes);
  return qkv_fail(error, QKV_CANCELLED, "it was called off");
}
