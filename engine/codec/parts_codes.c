// What blocks of scalar codes have in common (parts.h).
#include <string.h>

#include "engine/codec/parts.h"

void qkvi_part_mix(const qkv_code_matrix *matrix, const float *factors, size_t n, qkv_precision precision, float *out,
                   size_t stride) {
  if (qkvi_part_in_integers(matrix->bits, precision)) return qkv_mix_integer(matrix, factors, n, out, stride);
  qkv_mix(matrix, factors, n, out, stride);
}

void qkvi_part_pack(const qkv_part_coder *coder, const uint8_t *codes, uint8_t *matrix) {
  const size_t lanes = qkvi_part_lanes(coder), steps = qkvi_part_steps(coder);
  uint8_t turned[QKV_PAGE_TOKENS * QKV_DIM_MAX];
  if (coder->part == QKV_K) return qkv_mix_pack(codes, lanes, steps, coder->bits, matrix);
  for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) {
    for (size_t c = 0; c < coder->dim; c++) turned[c * QKV_PAGE_TOKENS + t] = codes[t * coder->dim + c];
  }
  qkv_mix_pack(turned, lanes, steps, coder->bits, matrix);
}

void qkvi_part_unpack(const qkv_part_coder *coder, const uint8_t *matrix, uint8_t *codes) {
  const size_t lanes = qkvi_part_lanes(coder), steps = qkvi_part_steps(coder);
  uint8_t turned[QKV_PAGE_TOKENS * QKV_DIM_MAX];
  if (coder->part == QKV_K) return qkv_mix_unpack(matrix, lanes, steps, coder->bits, codes);
  qkv_mix_unpack(matrix, lanes, steps, coder->bits, turned);
  for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) {
    for (size_t c = 0; c < coder->dim; c++) codes[t * coder->dim + c] = turned[c * QKV_PAGE_TOKENS + t];
  }
}

uint8_t qkvi_part_code(const qkv_part_coder *coder, const uint8_t *matrix, uint32_t slot, size_t coordinate) {
  const size_t lane = coder->part == QKV_K ? slot : coordinate, step = coder->part == QKV_K ? coordinate : slot;
  return qkv_mix_code(matrix, qkvi_part_steps(coder), coder->bits, lane, step);
}
