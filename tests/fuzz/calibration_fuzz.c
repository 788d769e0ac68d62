// engine/codec/calibration.h: what its reader takes can be used: transforms give finite numbers, schedules are valid.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/codec/calibration_internal.h"
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
