#include "engine/kernel/dense.h"

#include <assert.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "engine/kernel/dense_plain.h"
#include "engine/kernel/kernel.h"

enum { ALIGN = 64 };

static size_t padded(size_t outputs) {
  return (outputs + QKVI_DENSE_OUTPUTS - 1) / QKVI_DENSE_OUTPUTS * QKVI_DENSE_OUTPUTS;
}

static size_t mask_words(size_t dim) {
  return (dim + QKVI_DENSE_MASK_INPUTS - 1) / QKVI_DENSE_MASK_INPUTS;
}

// Where in `words` a number is.
static size_t place(size_t dim, size_t output, size_t input) {
  const size_t block = output / QKVI_DENSE_OUTPUTS * QKVI_DENSE_OUTPUTS * dim;
  return block + (input / 2 * QKVI_DENSE_OUTPUTS + output % QKVI_DENSE_OUTPUTS) * 2 + input % 2;
}

// Scales, words, shares, limits, the order and masks.
size_t qkv_dense_bytes(size_t dim, size_t outputs) {
  return padded(outputs) * (sizeof(float) + dim * sizeof(int16_t) + sizeof(int32_t)) + dim * sizeof(int16_t) +
         (dim / QKVI_DENSE_FOUR + mask_words(dim)) * sizeof(uint16_t);
}

// What a row of the matrix is divided by; 0 for a row of nothing.
static float scale_of(const float *row, size_t dim) {
  double squares = 0, top = 0;
  for (size_t j = 0; j < dim; j++) {
    squares += (double)row[j] * (double)row[j];
    top = fmax(top, fabs((double)row[j]));
  }
  const double scale = fmax(sqrt(squares) / (double)QKVI_DENSE_LENGTH, top / (double)QKVI_DENSE_NUMBER_MAX);
  return scale >= (double)QKVI_NUMBER_LEAST ? (float)scale : 0;
}

// A four of inputs and the largest of its numbers.
typedef struct dense_four {
  uint16_t first;
  int16_t top;
} dense_four;

static int compare_fours(const void *a, const void *b) {
  const dense_four *x = a, *y = b;
  return x->top != y->top ? x->top - y->top : x->first - y->first;
}

static dense_four four_at(const int16_t *words, size_t dim, size_t outputs, size_t first) {
  dense_four four = {.first = (uint16_t)first};
  for (size_t c = 0; c < outputs; c++) {
    for (size_t j = first; j < first + QKVI_DENSE_FOUR; j++) {
      const int number = abs(words[place(dim, c, j)]);
      if (number > four.top) four.top = (int16_t)number;
    }
  }
  return four;
}

// A sum of a_i a_j with those of one four.
static int32_t share_of(const int16_t *words, size_t dim, size_t output, size_t first, int32_t sum) {
  uint32_t all = (uint32_t)sum;
  for (size_t i = first; i < first + 2; i++) {
    all += (uint32_t)(words[place(dim, output, i)] * words[place(dim, output, i + 2)]);
  }
  return (int32_t)all;
}

// Marks the fours that are paired, in order of their inputs.
static void choose_fours(const dense_four *fours, size_t count, size_t pairs, bool *chosen) {
  dense_four sorted[QKV_DIM_MAX / QKVI_DENSE_FOUR];
  memcpy(sorted, fours, count * sizeof *fours);
  qsort(sorted, count, sizeof *sorted, compare_fours);
  memset(chosen, 0, count * sizeof *chosen);
  for (size_t f = 0; f < pairs; f++) chosen[sorted[f].first / QKVI_DENSE_FOUR] = true;
}

// From words, which are set; all else is 0.
static void pair_inputs(const int16_t *words, size_t dim, size_t outputs, uint16_t *order, int16_t *limits,
                        uint16_t *paired, int32_t *shares) {
  enum { PAIRS = QKVI_DENSE_GROUP - 1 };
  dense_four fours[QKV_DIM_MAX / QKVI_DENSE_FOUR];
  bool chosen[QKV_DIM_MAX / QKVI_DENSE_FOUR];
  const size_t count = dim / QKVI_DENSE_FOUR, groups = count / QKVI_DENSE_GROUP;
  size_t pairs = 0, others = 0;
  for (size_t f = 0; f < count; f++) fours[f] = four_at(words, dim, outputs, f * QKVI_DENSE_FOUR);
  choose_fours(fours, count, groups * PAIRS, chosen);
  for (size_t f = 0; f < count; f++) {
    const size_t first = fours[f].first;
    const int16_t most = (int16_t)QKVI_DENSE_NUMBER_MAX, limit = chosen[f] ? most - fours[f].top : most;
    for (size_t j = first; j < first + QKVI_DENSE_FOUR; j++) limits[j] = limit;
    if (!chosen[f]) {
      const size_t at = others < groups ? others * QKVI_DENSE_GROUP + PAIRS : groups * PAIRS + others;
      order[at] = (uint16_t)first;
      others++;
      continue;
    }
    order[pairs / PAIRS * QKVI_DENSE_GROUP + pairs % PAIRS] = (uint16_t)first;
    pairs++;
    paired[first / QKVI_DENSE_MASK_INPUTS] |= (uint16_t)(1u << first % QKVI_DENSE_MASK_INPUTS / 2);
    for (size_t c = 0; c < outputs; c++) shares[c] = share_of(words, dim, c, first, shares[c]);
  }
}

qkv_dense qkv_dense_in(void *memory, const float *matrix, size_t dim, size_t outputs) {
  assert((uintptr_t)memory % ALIGN == 0 && dim % QKV_BAND == 0);
  float *scales = memory;
  int16_t *words = (int16_t *)(scales + padded(outputs));
  int32_t *shares = (int32_t *)(words + padded(outputs) * dim);
  int16_t *limits = (int16_t *)(shares + padded(outputs));
  uint16_t *order = (uint16_t *)(limits + dim), *paired = order + dim / QKVI_DENSE_FOUR;
  memset(memory, 0, qkv_dense_bytes(dim, outputs));
  for (size_t c = 0; c < outputs; c++) {
    const float *row = matrix + c * dim;
    scales[c] = scale_of(row, dim);
    for (size_t j = 0; scales[c] > 0 && j < dim; j++) {
      // A scale that was rounded down would make 32768 of the largest.
      const double number = nearbyint((double)row[j] / (double)scales[c]);
      const double most = (double)QKVI_DENSE_NUMBER_MAX;
      words[place(dim, c, j)] = (int16_t)fmin(fmax(number, -most), most);
    }
  }
  pair_inputs(words, dim, outputs, order, limits, paired, shares);
  return (qkv_dense){.dim = dim,
                     .outputs = outputs,
                     .scales = scales,
                     .words = words,
                     .order = order,
                     .limits = limits,
                     .paired = paired,
                     .shares = shares};
}

QKV_DECLARE_MULTIPLY_INTEGER(qkvi_multiply_integer_reference) {
  assert(coordinates <= matrix->outputs && matrix->outputs <= matrix->dim);
  const size_t dim = matrix->dim;
  int16_t x[QKV_DIM_MAX];
  for (size_t i = 0; i < n; i++, rows += dim) {
    const float scale = dense_words(rows, mean, dim, x);
    memset(rows, 0, dim * sizeof *rows);
    for (size_t c = 0; c < coordinates; c++) {
      int32_t sum = 0;
      for (size_t j = 0; j < dim; j++) sum += matrix->words[place(dim, c, j)] * (int32_t)x[j];
      rows[c] = (float)sum * (matrix->scales[c] * scale) + (added != NULL ? added[c] : 0);
    }
  }
}

QKV_DECLARE_ADD_PRODUCTS(qkvi_add_products_reference) {
  assert(coordinates <= matrix->outputs && first % 2 == 0 && count % 2 == 0 && first + count <= matrix->dim);
  const size_t stride = padded(coordinates);
  for (size_t i = 0; i < n; i++, numbers += count) {
    for (size_t c = 0; c < stride; c++) {
      int32_t sum = before == NULL ? 0 : before[i * stride + c];
      for (size_t j = 0; j < count; j++) sum += matrix->words[place(matrix->dim, c, first + j)] * numbers[j];
      after[i * stride + c] = sum;
    }
  }
}
