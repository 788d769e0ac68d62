#include "engine/kernel/mix.h"

#include <math.h>
#include <string.h>

#include "engine/kernel/kernel.h"
#include "engine/kernel/mix_plain.h"

enum { LANES = QKV_MIX_LANES, STEPS = 8 };

// ---- Packing ----

// The sections of a chunk, from the most significant bits on: bytes from *at on with codes of *width bits, above
// which *below bits of the code follow.
typedef struct section {
  unsigned width, below;
  size_t at;
} section;

static size_t sections_of(unsigned bits, section found[4]) {
  size_t count = 0, at = 0;
  for (unsigned width = 8, left = bits; width > 0; width /= 2) {
    if ((bits & width) == 0) continue;
    left -= width;
    found[count++] = (section){width, left, at};
    at += (size_t)width * LANES;
  }
  return count;
}

void qkv_mix_pack(const uint8_t *codes, size_t lanes, size_t steps, unsigned bits, uint8_t *matrix) {
  section all[4];
  const size_t count = sections_of(bits, all), chunks = steps / STEPS;
  memset(matrix, 0, qkv_code_matrix_bytes(lanes, steps, bits));
  for (size_t lane = 0; lane < lanes; lane++) {
    for (size_t step = 0; step < steps; step++) {
      uint8_t *chunk = matrix + (lane / LANES * chunks + step / STEPS) * LANES * bits;
      for (size_t i = 0; i < count; i++) {
        const unsigned each = 8 / all[i].width;
        const unsigned part = codes[lane * steps + step] >> all[i].below & ((1u << all[i].width) - 1);
        chunk[all[i].at + step % STEPS / each * LANES + lane % LANES] |=
            (uint8_t)(part << step % STEPS % each * all[i].width);
      }
    }
  }
}

uint8_t qkv_mix_code(const uint8_t *matrix, size_t steps, unsigned bits, size_t lane, size_t step) {
  const uint8_t *chunk = matrix + (lane / LANES * (steps / STEPS) + step / STEPS) * LANES * bits;
  section all[4];
  const size_t count = sections_of(bits, all);
  unsigned code = 0;
  for (size_t i = 0; i < count; i++) {
    const unsigned each = 8 / all[i].width;
    const unsigned byte = chunk[all[i].at + step % STEPS / each * LANES + lane % LANES];
    code |= (byte >> step % STEPS % each * all[i].width & ((1u << all[i].width) - 1)) << all[i].below;
  }
  return (uint8_t)code;
}

void qkv_mix_unpack(const uint8_t *matrix, size_t lanes, size_t steps, unsigned bits, uint8_t *codes) {
  for (size_t lane = 0; lane < lanes; lane++) {
    for (size_t step = 0; step < steps; step++)
      codes[lane * steps + step] = qkv_mix_code(matrix, steps, bits, lane, step);
  }
}

// ---- The reference ----

QKV_DECLARE_MIX(qkvi_mix_reference) {
  float plain[256], tile[STEPS * LANES];
  uint8_t codes[STEPS * LANES];
  const size_t chunk_bytes = (size_t)LANES * matrix->bits;
  for (size_t i = 0; i < 256; i++) plain[i] = (float)i;
  const float *values = matrix->values != NULL ? matrix->values : plain;
  const uint8_t *chunk = matrix->codes;
  for (size_t lane = 0; lane < matrix->lanes; lane += LANES) {
    for (size_t step = 0; step < matrix->steps; step += STEPS, chunk += chunk_bytes) {
      qkv_mix_unpack(chunk, LANES, STEPS, matrix->bits, codes);
      for (size_t i = 0; i < (size_t)STEPS * LANES; i++) tile[i % STEPS * LANES + i / STEPS] = values[codes[i]];
      for (size_t i = 0; i < n; i++) {
        float *sums = out + i * stride + lane;
        for (size_t s = 0; s < STEPS; s++) {
          const float factor = factors[i * matrix->steps + step + s];
          for (size_t j = 0; j < LANES; j++) sums[j] = fmaf(factor, tile[s * LANES + j], sums[j]);
        }
      }
    }
  }
}

QKV_DECLARE_MIX(qkv_mix) {
  qkv_kernels_get()->mix(matrix, factors, n, out, stride);
}

// Rounds factors [steps]; their sum is the result.
static int32_t round_factors(const float *factors, size_t steps, int8_t *whole, float *scale) {
  float largest = 0;
  int32_t total = 0;
  for (size_t s = 0; s < steps; s++) largest = fmaxf(largest, fabsf(factors[s]));
  const float inverse = mix_inverse_plain(largest, scale);
  for (size_t s = 0; s < steps; s++) {
    whole[s] = (int8_t)lrintf(factors[s] * inverse);
    total += whole[s];
  }
  return total;
}

QKV_DECLARE_MIX(qkvi_mix_integer_reference) {
  enum { ROWS = 8 };
  uint8_t codes[LANES * QKV_DIM_MAX];
  int8_t whole[ROWS][QKV_DIM_MAX];
  int32_t totals[ROWS];
  float scales[ROWS];
  mix_bytes table;
  const size_t steps = matrix->steps, rows = n < ROWS ? n : ROWS;
  mix_bytes_plain(matrix, &table);
  for (size_t i = 0; i < rows; i++) totals[i] = round_factors(factors + i * steps, steps, whole[i], &scales[i]);
  for (size_t lane = 0; lane < matrix->lanes; lane += LANES) {
    qkv_mix_unpack(matrix->codes + lane * steps * matrix->bits / 8, LANES, steps, matrix->bits, codes);
    for (size_t i = 0; i < rows * LANES; i++) {
      const size_t row = i / LANES, at = i % LANES;
      int32_t sum = 0;
      for (size_t s = 0; s < steps; s++) sum += whole[row][s] * table.bytes[codes[at * steps + s]];
      const int32_t units = 2 * sum - table.middle * totals[row];
      out[row * stride + lane + at] += (float)units * (scales[row] * table.half_step);
    }
  }
  if (n > rows) qkvi_mix_integer_reference(matrix, factors + rows * steps, n - rows, out + rows * stride, stride);
}

QKV_DECLARE_MIX(qkv_mix_integer) {
  qkv_kernels_get()->mix_integer(matrix, factors, n, out, stride);
}
