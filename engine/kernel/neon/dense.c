// Dense transforms in whole numbers (kernel/dense.h). Compiled with and without dot product instructions.
#include "engine/kernel/dense_plain.h"

#include <assert.h>

#include "engine/kernel/kernel.h"
#include "engine/kernel/neon/variants.h"
#include "engine/kernel/neon/vectors.h"

enum { ROWS = 4, QUADS = QKVI_DENSE_OUTPUTS / 4 };

// Rows in whole numbers.
typedef struct dense_rows {
  int16_t words[ROWS][QKV_DIM_MAX];
  float scales[ROWS];
} dense_rows;

INLINE int16x4_t load_pair(const int16_t *from) {
  uint32_t pair;
  memcpy(&pair, from, sizeof pair);
  return vreinterpret_s16_u32(vdup_n_u32(pair));
}

// The outputs of block b of `count` rows, a constant. Numbers j and j + 1 of an output are neighbours, and apart once
// they are loaded.
INLINE void multiply_tile(const qkv_dense *matrix, const dense_rows *x, size_t count, size_t b, float *out) {
  const int16_t *from = matrix->words + b * QKVI_DENSE_OUTPUTS * matrix->dim;
  int32x4_t sums[ROWS][QUADS] = {0};
  for (size_t j = 0; j < matrix->dim; j += 2, from += 2 * QKVI_DENSE_OUTPUTS) {
    const int16x8x2_t low = vld2q_s16(from), high = vld2q_s16(from + QKVI_DENSE_OUTPUTS);
    UNROLL
    for (size_t i = 0; i < count; i++) {
      const int16x4_t numbers = load_pair(&x->words[i][j]);
      sums[i][0] = vmlal_lane_s16(sums[i][0], vget_low_s16(low.val[0]), numbers, 0);
      sums[i][1] = vmlal_high_lane_s16(sums[i][1], low.val[0], numbers, 0);
      sums[i][2] = vmlal_lane_s16(sums[i][2], vget_low_s16(high.val[0]), numbers, 0);
      sums[i][3] = vmlal_high_lane_s16(sums[i][3], high.val[0], numbers, 0);
      sums[i][0] = vmlal_lane_s16(sums[i][0], vget_low_s16(low.val[1]), numbers, 1);
      sums[i][1] = vmlal_high_lane_s16(sums[i][1], low.val[1], numbers, 1);
      sums[i][2] = vmlal_lane_s16(sums[i][2], vget_low_s16(high.val[1]), numbers, 1);
      sums[i][3] = vmlal_high_lane_s16(sums[i][3], high.val[1], numbers, 1);
    }
  }
  UNROLL
  for (size_t i = 0; i < count; i++) {
    UNROLL
    for (size_t q = 0; q < QUADS; q++) {
      const size_t c = b * QKVI_DENSE_OUTPUTS + 4 * q;
      const float32x4_t scale = vld1q_f32(matrix->scales + c) * x->scales[i];
      vst1q_f32(out + i * QKV_DIM_MAX + c, vcvtq_f32_s32(sums[i][q]) * scale);
    }
  }
}

INLINE void multiply_some(const qkv_dense *matrix, size_t coordinates, size_t count, const float *mean,
                          const float *added, float *rows) {
  float out[ROWS * QKV_DIM_MAX];
  const size_t dim = matrix->dim;
  dense_rows x;
  for (size_t i = 0; i < count; i++) x.scales[i] = dense_words(rows + i * dim, mean, dim, x.words[i]);
  for (size_t b = 0; b * QKVI_DENSE_OUTPUTS < coordinates; b++) multiply_tile(matrix, &x, count, b, out);
  for (size_t i = 0; i < count; i++) {
    for (size_t c = 0; c < coordinates; c++) {
      rows[i * dim + c] = out[i * QKV_DIM_MAX + c] + (added != NULL ? added[c] : 0);
    }
    memset(rows + i * dim + coordinates, 0, (dim - coordinates) * sizeof *rows);
  }
}

QKV_DECLARE_MULTIPLY_INTEGER(VARIANT(qkvi_multiply_integer)) {
  assert(coordinates <= matrix->outputs && matrix->outputs <= matrix->dim);
  size_t i = 0;
  for (; i + ROWS <= n; i += ROWS) multiply_some(matrix, coordinates, ROWS, mean, added, rows + i * matrix->dim);
  for (; i < n; i++) multiply_some(matrix, coordinates, 1, mean, added, rows + i * matrix->dim);
}
