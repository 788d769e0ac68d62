// Queries of the attend frame from page to page: the reference (kernel.h).
#include <assert.h>
#include <string.h>

#include "engine/kernel/kernel.h"

// A whole number, in the lowest 16 bits of a sum with the magic number.
static int16_t to_word(float number) {
  const float sum = number + QKVI_WHOLE_MAGIC;
  uint32_t bits;
  memcpy(&bits, &sum, sizeof bits);
  return (int16_t)(uint16_t)bits;
}

// sums [stride] += products with the two numbers of a pair.
static void add_pair(const qkv_dense *matrix, size_t pair, int16_t x, int16_t y, size_t stride, int32_t *sums) {
  for (size_t c = 0; c < stride; c++) {
    const int16_t *block = matrix->words + c / QKVI_DENSE_OUTPUTS * QKVI_DENSE_OUTPUTS * matrix->dim;
    const int16_t *two = block + (pair * QKVI_DENSE_OUTPUTS + c % QKVI_DENSE_OUTPUTS) * 2;
    sums[c] += two[0] * (int32_t)x + two[1] * (int32_t)y;
  }
}

static void add_level(const qkv_dense *matrix, const qkv_walk_queries *queries, const qkv_walk_level *level, size_t i,
                      size_t stride, int32_t *sums) {
  const float *row = queries->rows + i * queries->stride, factor = queries->factors[i];
  for (size_t pair = level->first; pair < level->end; pair++) {
    const float bc = level->base.cosines[pair], bs = level->base.sines[pair];
    const float oc = level->on.cosines[pair], os = level->on.sines[pair];
    const float c = bc * oc - bs * os, s = bc * os + bs * oc;
    const float a = row[pair], b = row[queries->apart + pair];
    add_pair(matrix, pair, to_word((a * c + b * s) * factor), to_word((b * c - a * s) * factor), stride, sums);
  }
}

QKV_DECLARE_SUM_LEVELS(qkvi_sum_levels_reference) {
  const size_t stride = (coordinates + QKVI_DENSE_OUTPUTS - 1) / QKVI_DENSE_OUTPUTS * QKVI_DENSE_OUTPUTS;
  int32_t sums[QKV_DIM_MAX];
  assert(coordinates <= matrix->outputs && matrix->outputs <= matrix->dim && stride <= QKV_DIM_MAX);
  for (size_t i = 0; i < queries->n; i++, rows += matrix->dim) {
    memcpy(sums, before + i * stride, stride * sizeof *sums);
    for (size_t l = 0; l < count; l++) {
      add_level(matrix, queries, &levels[l], i, stride, sums);
      if (levels[l].sums != NULL) memcpy(levels[l].sums + i * stride, sums, stride * sizeof *sums);
    }
    memset(rows, 0, matrix->dim * sizeof *rows);
    for (size_t c = 0; c < coordinates; c++) rows[c] = (float)sums[c] * (matrix->scales[c] * queries->scales[i]);
  }
}
