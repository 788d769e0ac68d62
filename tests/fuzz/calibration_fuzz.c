// engine/codec/calibration.h: what its reader takes can be used: transforms give finite numbers, schedules are valid.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/codec/calibration_internal.h"
#include "engine/codec/commvq_book.h"
#include "engine/codec/pq_book.h"
#include "tests/fuzz/fuzz.h"

static void use_transform(const qkv_transform *transform) {
  const size_t dim = transform->schedule->dim;
  float *row = calloc(dim, sizeof *row);
  if (row == NULL) abort();
  for (size_t i = 0; i < dim; i++) row[i] = (float)(i % 7) - 3.0f;
  if (qkv_schedule_validate(transform->schedule) != NULL) __builtin_trap();
  qkv_transform_forward(transform, row, 1, dim);
  qkv_transform_inverse(transform, row, 1, dim);
  for (size_t i = 0; i < dim; i++) {
    if (!isfinite(row[i])) __builtin_trap();
  }
  float sum = 0;
  for (size_t i = 0; i < dim; i++) sum += transform->weights[i];
  for (uint16_t i = 0; i < transform->anchor_pairs; i++)
    sum += transform->anchor[2 * i] + (float)qkv_transform_anchored(transform, i);
  if (!isfinite(sum)) __builtin_trap();
  free(row);
}

// Codebooks that a section has; training others takes long.
static void use_sections(const qkv_calibration *calibration) {
  const qkv_calibration_shape *shape = qkv_calibration_shape_of(calibration);
  const uint32_t layer = shape->layers - 1, head = shape->kv_heads - 1;
  for (unsigned bits = 1; bits <= QKV_COMMVQ_ROUNDS; bits++) {
    if (qkvi_calibration_section(calibration, QKV_COMMVQ_CODEC, bits, 0, 0) == NULL) continue;
    const qkv_commvq_book *book = qkv_commvq_book_get(calibration, layer, head, bits);
    for (size_t i = 0; i < book->groups * book->bits * QKV_COMMVQ_WIDTH; i++) {
      const qkv_commvq_round *round = &book->rounds[i / QKV_COMMVQ_WIDTH];
      for (size_t a = 0; a < QKV_COMMVQ_ENTRIES; a++) {
        const float largest = 65504 * 4 * round->entries.of[0][i % QKV_COMMVQ_WIDTH][a];
        if (!isfinite(largest) || !isfinite(round->squares[a][a])) __builtin_trap();
      }
    }
  }
  for (unsigned bits = 1; bits <= 4; bits *= 2) {
    if (qkvi_calibration_section(calibration, QKV_PQ_CODEC, bits, 0, 0) == NULL) continue;
    const qkv_pq_book *book = qkv_pq_book_calibrated(calibration, layer, head, QKV_V, 8 / bits);
    for (size_t i = 0; i < QKV_PQ_POINTS * 8 / bits; i++) {
      if (!(fabsf(qkv_pq_points(book, 0)[i]) <= QKV_PQ_COORDINATE_MAX)) __builtin_trap();
    }
  }
}

static void use(qkv_calibration *calibration) {
  const qkv_calibration_shape *shape = qkv_calibration_shape_of(calibration);
  for (uint32_t layer = 0; layer < shape->layers; layer++) {
    for (uint32_t head = 0; head < shape->kv_heads; head++) {
      for (unsigned part = 0; part < QKV_CALIBRATION_PARTS; part++) {
        use_transform(qkv_calibration_transform(calibration, layer, head, part));
        (void)qkv_calibration_tier_offset(calibration, layer, head, part);
      }
    }
  }
  use_sections(calibration);
  if (qkv_calibration_version(calibration) == 0) __builtin_trap();
  if (qkv_calibration_check(calibration, shape, NULL) != QKV_OK) __builtin_trap();
  const qkv_calibration *reference = calibration;
  qkv_calibration_unref(&reference);
}

static void read(const uint8_t *bytes, size_t size) {
  qkv_calibration *calibration = NULL;
  qkv_error error = {0};
  if (qkv_calibration_read(bytes, size, &calibration, &error) == QKV_OK) {
    use(calibration);
  } else if (error.text[0] == '\0' || calibration != NULL) {
    __builtin_trap();
  }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  read(data, size);
  // A fuzzer does not guess checksums: the same bytes again with length and checksum put right.
  if (size < sizeof(qkvi_calibration_header)) return 0;
  uint8_t *bytes = malloc(size);
  if (bytes == NULL) abort();
  memcpy(bytes, data, size);
  const uint64_t length = size;
  memcpy(bytes + offsetof(qkvi_calibration_header, bytes), &length, sizeof length);
  qkvi_calibration_seal(bytes, size);
  read(bytes, size);
  free(bytes);
  return 0;
}
