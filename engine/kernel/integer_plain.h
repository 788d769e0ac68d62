// `prepare`, `peaks` and `weigh_integer` (kernel.h), in plain loops over independent lanes: compiled once for every
// rung, like plain.h, and with the same bits everywhere.
#ifndef QKV_ENGINE_KERNEL_INTEGER_PLAIN_H
#define QKV_ENGINE_KERNEL_INTEGER_PLAIN_H

#include <assert.h>
#include <string.h>

#include "engine/kernel/integer.h"
#include "engine/kernel/kernel.h"
#include "engine/kernel/table.h"

enum { INTEGER_LANES = 16 };

// ---- Queries ----

static inline float largest_magnitude(const float *row, size_t n) {
  float lanes[INTEGER_LANES] = {0};
  for (size_t i = 0; i < n; i += QKV_BAND) {
    for (size_t j = 0; j < QKV_BAND; j++) {
      const float magnitude = row[i + j] < 0 ? -row[i + j] : row[i + j];
      lanes[j] = magnitude > lanes[j] ? magnitude : lanes[j];
    }
  }
  for (size_t j = 1; j < INTEGER_LANES; j++) lanes[0] = lanes[j] > lanes[0] ? lanes[j] : lanes[0];
  return lanes[0];
}

// row * factor, rounded to whole numbers, the nearest even of two as near; at most 2^21.
static inline void round_row(const float *row, float factor, size_t n, int32_t *whole) {
  for (size_t i = 0; i < n; i++) {
    const float sum = row[i] * factor + QKVI_WHOLE_MAGIC;
    int32_t bits;
    memcpy(&bits, &sum, sizeof bits);
    whole[i] = bits - 0x4b400000;
  }
}

// bytes [parts][length]; returns the scale.
static inline float query_bytes(const float *row, size_t dim, size_t length, float limit, int8_t *bytes) {
  int32_t whole[QKV_DIM_MAX];
  const unsigned parts = qkvi_parts_of(limit);
  const float top = largest_magnitude(row, dim);
  memset(bytes, 0, parts * length);
  if (top < QKVI_NUMBER_LEAST) return 0;
  round_row(row, limit / top, dim, whole);
  if (parts == 1) {
    for (size_t i = 0; i < dim; i++) bytes[i] = (int8_t)whole[i];
  } else {
    for (size_t i = 0; i < dim; i++) {
      const int32_t high = (whole[i] + 128) >> 8;
      bytes[i] = (int8_t)high;
      bytes[length + i] = (int8_t)(whole[i] - 256 * high);
    }
  }
  return top / limit * qkvi_integers.step;
}

static inline void put_column(const int8_t *bytes, size_t length, size_t columns, size_t column, int8_t *out) {
  for (size_t i = 0; i < length / 4; i++) memcpy(out + (i * columns + column) * 4, bytes + 4 * i, 4);
}

static inline void put_offsets(const int8_t *bytes, size_t blocks, size_t columns, size_t column, int32_t *offsets) {
  int32_t sum = 0;
  offsets[column] = 0;
  for (size_t b = 0; b < blocks; b++) {
    for (size_t i = 0; i < QKVI_BLOCK_WIDTH; i++) sum += bytes[b * QKVI_BLOCK_WIDTH + i];
    offsets[(b + 1) * columns + column] = -128 * sum;
  }
}

// The blocks up to the last one with a byte that is not 0.
static inline size_t blocks_used(const int8_t *bytes, size_t blocks) {
  for (size_t i = blocks * QKVI_BLOCK_WIDTH; i-- > 0;) {
    if (bytes[i] != 0) return i / QKVI_BLOCK_WIDTH + 1;
  }
  return 0;
}

static inline QKV_DECLARE_PREPARE(prepare_plain) {
  const unsigned parts = qkvi_parts_of(limit);
  assert(parts >= 1 && parts <= QKV_INTEGER_PARTS);
  const size_t length = qkvi_column_bytes(dim), blocks = length / QKVI_BLOCK_WIDTH;
  queries->count = n;
  queries->parts = parts;
  queries->dim = dim;
  queries->wide = 0;
  for (qkvi_chunk chunk = {0}; chunk.first + chunk.rows < n;) {
    chunk = qkvi_chunk_at(chunk.first + chunk.rows, n, parts);
    int8_t *out = queries->bytes + chunk.first * parts * length;
    int32_t *offsets = queries->offsets + chunk.first * parts * (blocks + 1);
    for (size_t i = 0; i < chunk.columns / parts; i++) {
      int8_t bytes[QKV_INTEGER_PARTS * QKV_DIM_MAX];
      if (i < chunk.rows) {
        const size_t row = chunk.first + i;
        queries->scales[row] = query_bytes(rows + row * dim, dim, length, limit, bytes);
      } else {
        memset(bytes, 0, parts * length);
      }
      const size_t wide = parts == 2 ? blocks_used(bytes, blocks) : 0;
      if (wide > queries->wide) queries->wide = wide;
      for (unsigned p = 0; p < parts; p++) {
        put_column(bytes + p * length, length, chunk.columns, i * parts + p, out);
        put_offsets(bytes + p * length, blocks, chunk.columns, i * parts + p, offsets);
      }
    }
  }
}

// ---- Softmax of a tile ----

static inline QKV_DECLARE_PEAKS(peaks_plain) {
  for (size_t row = 0; row < n; row++, scores += QKV_PAGE_TOKENS) {
    float lanes[INTEGER_LANES];
    memcpy(lanes, scores, sizeof lanes);
    for (size_t t = INTEGER_LANES; t < QKV_PAGE_TOKENS; t += INTEGER_LANES) {
      for (size_t i = 0; i < INTEGER_LANES; i++) lanes[i] = scores[t + i] > lanes[i] ? scores[t + i] : lanes[i];
    }
    for (size_t half = INTEGER_LANES / 2; half > 0; half /= 2) {
      for (size_t i = 0; i < half; i++) lanes[i] = lanes[i + half] > lanes[i] ? lanes[i + half] : lanes[i];
    }
    peaks[row] = lanes[0];
  }
}

// 2^x for x up to 100, 3e-6 of it off at most; 2^-100 from -100 down and for NaN. x is split into the nearest whole
// number and the rest, whose power is the polynomial with the least largest error.
static inline float power_of_two(float x) {
  const float clamped = x > QKVI_POWER_LEAST ? x : QKVI_POWER_LEAST;
  const float magic = clamped + QKVI_WHOLE_MAGIC;
  const float r = clamped - (magic - QKVI_WHOLE_MAGIC);
  float y = 0.00957010128f * r + 0.0559178591f;
  y = y * r + 0.240247443f;
  y = y * r + 0.693121791f;
  y = y * r + 0.999999285f;
  uint32_t whole, bits;
  memcpy(&whole, &magic, sizeof whole);
  memcpy(&bits, &y, sizeof bits);
  bits += whole << 23;  // the lowest bits of `magic` are x's whole number
  memcpy(&y, &bits, sizeof y);
  return y;
}

static inline float sum_lanes(float lanes[INTEGER_LANES]) {
  for (size_t half = INTEGER_LANES / 2; half > 0; half /= 2) {
    for (size_t i = 0; i < half; i++) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

static inline float powers_of_row(const float *scores, float peak, float *powers) {
  float sums[INTEGER_LANES] = {0};
  for (size_t t = 0; t < QKV_PAGE_TOKENS; t += INTEGER_LANES) {
    for (size_t i = 0; i < INTEGER_LANES; i++) {
      powers[t + i] = power_of_two((scores[t + i] - peak) * 1.44269504f);
      sums[i] += powers[t + i];
    }
  }
  return sum_lanes(sums);
}

// bytes [parts][QKV_PAGE_TOKENS] of weights * gains; returns the scale.
static inline float weight_bytes(float *weights, const float *gains, unsigned parts, uint8_t *bytes) {
  const float limit = parts == 1 ? 255 : 65535;
  float top;
  for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) weights[t] *= gains[t];
  peaks_plain(weights, 1, &top);
  if (top < QKVI_NUMBER_LEAST) {
    memset(bytes, 0, parts * QKV_PAGE_TOKENS);
    return 0;
  }
  int32_t whole[QKV_PAGE_TOKENS];
  round_row(weights, limit / top, QKV_PAGE_TOKENS, whole);
  if (parts == 1) {
    for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) bytes[t] = (uint8_t)whole[t];
  } else {
    for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) bytes[t] = (uint8_t)(whole[t] >> 8);
    for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) bytes[QKV_PAGE_TOKENS + t] = (uint8_t)whole[t];
  }
  return top / limit * qkvi_integers.step;
}

static inline QKV_DECLARE_WEIGH_INTEGER(weigh_integer_plain) {
  assert(n <= QKV_INTEGER_ROWS && parts >= 1 && parts <= QKV_INTEGER_PARTS);
  float factors[QKV_PAGE_TOKENS];
  for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) factors[t] = qkvi_integers.gains[gains[t]];
  weights->count = n;
  weights->parts = parts;
  for (qkvi_chunk chunk = {0}; chunk.first + chunk.rows < n;) {
    chunk = qkvi_chunk_at(chunk.first + chunk.rows, n, parts);
    uint8_t *out = weights->bytes + chunk.first * parts * QKV_PAGE_TOKENS;
    for (size_t i = 0; i < chunk.columns / parts; i++) {
      uint8_t bytes[QKV_INTEGER_PARTS * QKV_PAGE_TOKENS] = {0};
      if (i < chunk.rows) {
        const size_t row = chunk.first + i;
        float powers[QKV_PAGE_TOKENS];
        totals[row] = powers_of_row(scores + row * QKV_PAGE_TOKENS, peaks[row], powers);
        weights->scales[row] = weight_bytes(powers, factors, parts, bytes);
      }
      for (unsigned p = 0; p < parts; p++) {
        put_column((const int8_t *)bytes + p * QKV_PAGE_TOKENS, QKV_PAGE_TOKENS, chunk.columns, i * parts + p,
                   (int8_t *)out);
      }
    }
  }
}

#endif
