#include "engine/codec/hadamard.h"

#include <assert.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "engine/codec/schedule.h"

static uint64_t splitmix64(uint64_t *state) {
  uint64_t z = (*state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// The signs of a width: bit i of word w is coordinate 64 w + i, 1 for minus. Part of the format.
static void flip_signs(float *row, size_t dim) {
  uint64_t state = dim;
  for (size_t start = 0; start < dim; start += 64) {
    uint64_t word = splitmix64(&state);
    const size_t end = start + 64 < dim ? start + 64 : dim;
    for (size_t i = start; i < end; i++, word >>= 1) {
      uint32_t bits;
      memcpy(&bits, &row[i], sizeof bits);
      bits ^= (uint32_t)(word & 1) << 31;
      memcpy(&row[i], &bits, sizeof bits);
    }
  }
}

// The two innermost steps at once, so that every loop of the outer ones runs over neighbours.
static void butterfly_quads(float *block, size_t size) {
  for (size_t i = 0; i < size; i += 4) {
    const float a = block[i] + block[i + 1], b = block[i] - block[i + 1];
    const float c = block[i + 2] + block[i + 3], d = block[i + 2] - block[i + 3];
    block[i] = a + c;
    block[i + 1] = b + d;
    block[i + 2] = a - c;
    block[i + 3] = b - d;
  }
}

static void butterfly(float *restrict low, float *restrict high, size_t half) {
  for (size_t i = 0; i < half; i++) {
    const float a = low[i], b = high[i];
    low[i] = a + b;
    high[i] = a - b;
  }
}

// Orthonormal and its own inverse; `size` is a power of two, at least 8.
static void transform_block(float *block, size_t size) {
  butterfly_quads(block, size);
  for (size_t half = 4; half < size; half *= 2) {
    for (size_t start = 0; start < size; start += 2 * half) butterfly(block + start, block + start + half, half);
  }
  const float scale = 1.0f / sqrtf((float)size);
  for (size_t i = 0; i < size; i++) block[i] *= scale;
}

static void transform(float *row, size_t dim) {
  size_t start = 0;
  for (size_t size = QKV_DIM_MAX; size >= QKV_BAND; size /= 2) {
    if ((dim & size) == 0) continue;
    transform_block(row + start, size);
    start += size;
  }
  assert(start == dim);
}

void qkv_hadamard_forward(float *row, size_t dim) {
  assert(dim <= QKV_DIM_MAX && dim % QKV_BAND == 0);
  flip_signs(row, dim);
  transform(row, dim);
}

void qkv_hadamard_inverse(float *row, size_t dim) {
  assert(dim <= QKV_DIM_MAX && dim % QKV_BAND == 0);
  transform(row, dim);
  flip_signs(row, dim);
}
