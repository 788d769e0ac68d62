#include "engine/codec/codebook.h"

#include <assert.h>
#include <string.h>

#include "engine/codec/codebook_table.h"

typedef struct codebook {
  const int16_t *integers;  // of the positive cells, lowest first
  float step;
} codebook;

#define ITEM(n) (n),
static const int16_t integers_1[] = {QKVI_INTEGERS_1(ITEM)};
static const int16_t integers_2[] = {QKVI_INTEGERS_2(ITEM)};
static const int16_t integers_3[] = {QKVI_INTEGERS_3(ITEM)};
static const int16_t integers_4[] = {QKVI_INTEGERS_4(ITEM)};
static const int16_t integers_5[] = {QKVI_INTEGERS_5(ITEM)};
static const int16_t integers_6[] = {QKVI_INTEGERS_6(ITEM)};
static const int16_t integers_7[] = {QKVI_INTEGERS_7(ITEM)};
static const int16_t integers_8[] = {QKVI_INTEGERS_8(ITEM)};
#undef ITEM

static const codebook codebooks[QKV_DEPTH_MAX + 1] = {
    {NULL, 0},
    {integers_1, QKVI_STEP_1},
    {integers_2, QKVI_STEP_2},
    {integers_3, QKVI_STEP_3},
    {integers_4, QKVI_STEP_4},
    {integers_5, QKVI_STEP_5},
    {integers_6, QKVI_STEP_6},
    {integers_7, QKVI_STEP_7},
    {integers_8, QKVI_STEP_8},
};

// Without branches: the sign of a coordinate cannot be predicted.
static inline uint8_t look_up(float x) {
  const unsigned negative = x < 0;
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  // |x|; for a negative x the next smaller number, because -x on a boundary belongs to the cell nearer to 0.
  bits = (bits & 0x7fffffff) - negative;
  float magnitude;
  memcpy(&magnitude, &bits, sizeof magnitude);
  const float scaled = magnitude * QKVI_CELLS_PER_UNIT;
  const unsigned cell = (unsigned)(scaled < QKVI_CELLS - 1 ? scaled : QKVI_CELLS - 1);
  const unsigned start = cell_start[cell];
  const unsigned below = start + (boundaries[start] <= magnitude) + (boundaries[start + 1] <= magnitude);
  return (uint8_t)((QKVI_BOUNDARIES + 1 + below) ^ (negative ? 0xff : 0));
}

uint8_t qkv_codebook_code(float x) {
  return look_up(x);
}

// calibrate_test.c integrates them again.
const double qkv_codebook_distortion[QKV_DEPTH_MAX + 1] = {1,        0.36338,  0.11821,  0.03475,  0.00957,
                                                           0.002610, 0.000732, 0.000171, 0.0000437};

int16_t qkv_codebook_integer(unsigned depth, unsigned code) {
  assert(depth >= 1 && depth <= QKV_DEPTH_MAX && code < 1u << depth);
  const unsigned half = 1u << (depth - 1);
  const int16_t *integers = codebooks[depth].integers;
  return (int16_t)(code >= half ? integers[code - half] : -integers[half - 1 - code]);
}

float qkv_codebook_step(unsigned depth) {
  assert(depth >= 1 && depth <= QKV_DEPTH_MAX);
  return codebooks[depth].step;
}

float qkv_codebook_value(unsigned depth, unsigned code) {
  return (float)qkv_codebook_integer(depth, code) * qkv_codebook_step(depth);
}
