#include "engine/codec/sized.h"

#include <math.h>
#include <string.h>

enum { SIZE_BYTES = 2 };

size_t qkvi_sized_bytes(const qkv_part_coder *coder) {
  return QKVI_SIZES_BYTES + qkvi_part_code_bytes(coder);
}

void qkvi_sized_write(const qkv_part_coder *coder, const float *sizes, const uint8_t *codes, uint8_t *block) {
  qkvi_sizes_write(sizes, block);
  qkvi_part_pack(coder, codes, block + QKVI_SIZES_BYTES);
}

static qkv_code_matrix matrix_of(const qkv_part_coder *coder, const uint8_t *block) {
  return (qkv_code_matrix){.codes = block + QKVI_SIZES_BYTES,
                           .bits = coder->bits,
                           .lanes = qkvi_part_lanes(coder),
                           .steps = qkvi_part_steps(coder),
                           .values = coder->tables};
}

void qkvi_sized_scores(const qkv_part_coder *coder, const uint8_t *block, const float *queries, size_t n,
                       qkv_precision precision, float *scores) {
  const qkv_code_matrix matrix = matrix_of(coder, block);
  float sizes[QKV_PAGE_TOKENS];
  memset(scores, 0, n * QKV_PAGE_TOKENS * sizeof *scores);
  qkvi_part_mix(&matrix, queries, n, precision, scores, QKV_PAGE_TOKENS);
  qkvi_sizes_read(block, sizes);
  for (size_t i = 0; i < n; i++) {
    for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) scores[i * QKV_PAGE_TOKENS + t] *= sizes[t];
  }
}

void qkvi_sized_accumulate(const qkv_part_coder *coder, const uint8_t *block, const float *weights, size_t n,
                           qkv_precision precision, float *sums) {
  const qkv_code_matrix matrix = matrix_of(coder, block);
  float sizes[QKV_PAGE_TOKENS], scaled[QKV_QUERY_BLOCK * QKV_PAGE_TOKENS];
  qkvi_sizes_read(block, sizes);
  for (size_t i = 0; i < n; i++) {
    for (size_t t = 0; t < QKV_PAGE_TOKENS; t++)
      scaled[i * QKV_PAGE_TOKENS + t] = weights[i * QKV_PAGE_TOKENS + t] * sizes[t];
  }
  qkvi_part_mix(&matrix, scaled, n, precision, sums, coder->dim);
}

void qkvi_sized_decode(const qkv_part_coder *coder, const uint8_t *block, float *rows) {
  const float *values = coder->tables;
  uint8_t codes[QKV_PAGE_TOKENS * QKV_DIM_MAX];
  float sizes[QKV_PAGE_TOKENS];
  qkvi_sizes_read(block, sizes);
  qkvi_part_unpack(coder, block + QKVI_SIZES_BYTES, codes);
  for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) {
    for (size_t c = 0; c < coder->dim; c++) rows[t * coder->dim + c] = sizes[t] * values[codes[t * coder->dim + c]];
  }
}

void qkvi_sized_round_trip(const qkv_part_coder *coder, float size, const uint8_t *codes, float *row) {
  const float *values = coder->tables;
  uint8_t half[SIZE_BYTES];
  qkv_from_float(QKV_FP16, &size, half, 1);
  qkv_to_float(QKV_FP16, half, &size, 1);
  for (size_t c = 0; c < coder->dim; c++) row[c] = size * values[codes[c]];
}

bool qkvi_sized_matches(const qkv_part_coder *coder, const uint8_t *block, uint32_t slot, float size,
                        const uint8_t *codes) {
  if (!qkvi_sizes_match(block, slot, size)) return false;
  for (size_t c = 0; c < coder->dim; c++) {
    if (qkvi_part_code(coder, block + QKVI_SIZES_BYTES, slot, c) != codes[c]) return false;
  }
  return true;
}

// ---- Sizes ----

void qkvi_sizes_read(const uint8_t *block, float sizes[QKV_PAGE_TOKENS]) {
  qkv_to_float(QKV_FP16, block, sizes, QKV_PAGE_TOKENS);
}

void qkvi_sizes_write(const float sizes[QKV_PAGE_TOKENS], uint8_t *block) {
  qkv_from_float(QKV_FP16, sizes, block, QKV_PAGE_TOKENS);
}

bool qkvi_sizes_match(const uint8_t *block, uint32_t slot, float size) {
  uint8_t half[SIZE_BYTES];
  qkv_from_float(QKV_FP16, &size, half, 1);
  return memcmp(half, block + (size_t)slot * SIZE_BYTES, sizeof half) == 0;
}

const char *qkvi_sizes_validate(const qkv_part_coder *coder, const uint8_t *block) {
  float sizes[QKV_PAGE_TOKENS];
  (void)coder;
  qkvi_sizes_read(block, sizes);
  for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) {
    if (!(sizes[t] >= 0 && sizes[t] <= 2 * QKV_ROW_MAX)) return "a row's size is below 0, too large or no number";
  }
  return NULL;
}

float qkvi_size_of(const float *row, size_t dim, float *direction) {
  double square = 0;
  for (size_t c = 0; c < dim; c++) square += (double)row[c] * (double)row[c];
  const float rms = (float)sqrt(square / (double)dim), inverse = rms > 0 ? 1 / rms : 0;
  if (!(inverse > 0 && inverse <= 3e38f)) {
    memset(direction, 0, dim * sizeof *direction);
    return 0;
  }
  for (size_t c = 0; c < dim; c++) direction[c] = row[c] * inverse;
  return rms;
}
