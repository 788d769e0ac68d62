// A tile: one head's keys or values of a page in shared memory, [coordinate][token], which all threads of a block
// work on. Between steps the block meets. For the kernels of rows.h.
#ifndef QKV_ENGINE_KERNEL_SIMT_TILE_H
#define QKV_ENGINE_KERNEL_SIMT_TILE_H

#include "engine/kernel/simt/rows.h"
#include "engine/kernel/simt/simt.h"

#define TILE_TOKENS 64u
#define TILE_GROUPS 4u
#define TILE_GROUP_TOKENS 16u
#define TILE_BAND 8u
#define TILE_STRIDE ((unsigned)QKV_SIMT_ROWS_STRIDE)

// Words of tables, in shared memory; the block meets before they are read.
SIMT_INLINE void tile_take_tables(const void *from, unsigned words) {
  for (unsigned i = simt_thread(); i < words; i += simt_threads())
    ((uint32_t *)(void *)simt_shared())[i] = ((const uint32_t *)from)[i];
}

// qkv_dtype (engine/base/tensor.h)
#define TILE_FP32 1u
#define TILE_FP16 2u

// ---- Where codes lie (engine/codec/page.h) ----

// What a pair of bits has of 8 coordinates: they are those from `at` on of a line of 16 << width bytes at `line`, of
// bits each; 0 bits: nothing.
typedef struct tile_place {
  uint32_t line;
  unsigned width, at, bits;
} tile_place;

// `section`: where the pair begins.
SIMT_INLINE tile_place tile_place_of(const uint16_t *reach, unsigned pair, uint32_t section, unsigned first) {
  const unsigned both = reach[2 * pair + 2], any = reach[2 * pair + 1];
  tile_place place = {section, 2, 0, 0};
  if (first < both) {  // 4 bytes a coordinate; lines of 16, and one of 8
    const unsigned line = first / 16 * 16;
    place.bits = 2;
    place.width = line + 16 <= both ? 2 : 1;
    place.line += 4 * line;
    place.at = first - line;
  } else if (first < any) {  // 2 bytes a coordinate; lines of 32, and one of 16 and of 8
    unsigned line = (first - both) / 32 * 32;
    const unsigned left = any - both - line;
    place.bits = 1;
    if (left < 32 && left >= 16 && first - both - line >= 16) {
      line += 16;
      place.width = 0;
    } else if (left < 32) {
      place.width = left >= 16 ? 1 : 0;
    }
    place.line += 4 * both + 2 * line;
    place.at = first - both - line;
  }
  return place;
}

SIMT_INLINE uint32_t tile_section_after(const uint16_t *reach, unsigned pair, uint32_t section) {
  return section + 2 * (reach[2 * pair + 1] + reach[2 * pair + 2]);
}

// How far a field of a pair's byte is to be shifted.
SIMT_INLINE unsigned tile_field_shift(unsigned pair, unsigned field) {
  return 2 * (field ^ (pair & 1));
}

// Of a token in a line of keys: `width` as in tile_place.
SIMT_INLINE uint32_t tile_load_token(const uint8_t *line, unsigned width, unsigned token) {
  const uint8_t *at = line + (token << width);
  if (width == 2) return *(const uint32_t *)(const void *)at;
  if (width == 1) return *(const uint16_t *)(const void *)at;
  return *at;
}

// Where the bits of coordinate `at` + k of a line of keys are in what tile_load_token gives.
SIMT_INLINE unsigned tile_key_shift(const tile_place *place, unsigned pair, unsigned k) {
  const unsigned number = place->at + k, high = number >> (2 + place->width);  // of a narrow line the second half
  const unsigned in_half = number & ((4u << place->width) - 1);
  return 8 * (in_half & ((1u << place->width) - 1)) + tile_field_shift(pair, in_half >> place->width) + high;
}

// ---- Dense transforms in whole numbers (engine/kernel/dense.h) ----

#define TILE_SUM_LANES 16u
#define TILE_DENSE_ROW_LENGTH 32600.0f
#define TILE_DENSE_SQUARE_LEAST 1e-30f
#define TILE_WHOLE_MAGIC 12582912.0f

// In shared memory: sums [TILE_SUM_LANES][TILE_TOKENS]; of each token what makes whole numbers, and floats again.
typedef struct tile_whole {
  float *sums, *factors, *scales;
} tile_whole;

// A token's sum, by halves.
SIMT_INLINE float tile_sum(const float *sums, unsigned token) {
  float lanes[TILE_SUM_LANES];
  SIMT_UNROLL
  for (unsigned i = 0; i < TILE_SUM_LANES; i++) lanes[i] = sums[i * TILE_TOKENS + token];
  SIMT_UNROLL
  for (unsigned i = 0; i < 4 * (TILE_SUM_LANES / 2); i++) {  // steps of 8, 4, 2 and 1
    const unsigned half = TILE_SUM_LANES / 2 >> i / (TILE_SUM_LANES / 2), lane = i % (TILE_SUM_LANES / 2);
    if (lane < half) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

// A lane of a token's squares of coordinates [first, end), both multiples of 8.
SIMT_INLINE float tile_squares(const float *tile, unsigned lane, unsigned token, unsigned first, unsigned end) {
  float sum = 0;
  for (unsigned c = first / TILE_SUM_LANES * TILE_SUM_LANES + lane; c < end; c += TILE_SUM_LANES) {
    if (c < first) continue;
    const float x = tile[c * TILE_STRIDE + token];
    sum += x * x;
  }
  return sum;
}

// The first `inputs` coordinates become whole numbers.
SIMT_INLINE void tile_make_whole(unsigned inputs, const tile_whole *whole, float *tile) {
  for (unsigned i = simt_thread(); i < TILE_SUM_LANES * TILE_TOKENS; i += simt_threads())
    whole->sums[i] = tile_squares(tile, i / TILE_TOKENS, i % TILE_TOKENS, 0, inputs);
  simt_sync_block();
  for (unsigned t = simt_thread(); t < TILE_TOKENS; t += simt_threads()) {
    const float squares = tile_sum(whole->sums, t), length = simt_root(squares);
    const bool none = squares < TILE_DENSE_SQUARE_LEAST;
    whole->scales[t] = none ? 0 : length / TILE_DENSE_ROW_LENGTH;
    whole->factors[t] = none ? 0 : TILE_DENSE_ROW_LENGTH / length;
  }
  simt_sync_block();
  for (unsigned i = simt_thread(); i < inputs * TILE_TOKENS; i += simt_threads()) {
    float *number = tile + i / TILE_TOKENS * TILE_STRIDE + i % TILE_TOKENS;
    const float factor = whole->factors[i % TILE_TOKENS], sum = *number * factor + TILE_WHOLE_MAGIC;
    *number = simt_float(factor == 0 ? 0 : (uint32_t)(int32_t)(int16_t)(uint16_t)simt_bits(sum));
  }
  simt_sync_block();
}

// Rows become a matrix's outputs, of their first `inputs` coordinates, and `added` [dim] (NULL: nothing). The matrix
// is i16 [input][output], then f32 scales [dim]. A thread has an output.
SIMT_INLINE void tile_multiply(const uint8_t *matrix, unsigned dim, unsigned inputs, const float *added,
                               const tile_whole *whole, float *tile) {
  const unsigned c = simt_thread();
  const int16_t *words = (const int16_t *)(const void *)matrix;
  const float *scales = (const float *)(const void *)(words + dim * dim);
  const float more = added != NULL && c < dim ? added[c] : 0;
  tile_make_whole(inputs, whole, tile);
  for (unsigned g = 0; g < TILE_GROUPS; g++) {
    float *at = tile + g * TILE_GROUP_TOKENS;
    int32_t sums[TILE_GROUP_TOKENS];
    SIMT_UNROLL
    for (unsigned t = 0; t < TILE_GROUP_TOKENS; t++) sums[t] = 0;
    for (unsigned j = 0; c < dim && j < inputs; j++) {
      const int32_t factor = words[j * dim + c];
      SIMT_UNROLL
      for (unsigned t = 0; t < TILE_GROUP_TOKENS; t++) {
        if (t % 4 != 0) continue;
        const simt_quad four = simt_load_quad(at + j * TILE_STRIDE + t);
        SIMT_UNROLL
        for (unsigned i = 0; i < 4; i++) sums[t + i] += factor * (int32_t)four.words[i];
      }
    }
    simt_sync_block();  // all have read the group
    SIMT_UNROLL
    for (unsigned t = 0; t < TILE_GROUP_TOKENS; t++) {
      const float scale = c < dim ? scales[c] * whole->scales[g * TILE_GROUP_TOKENS + t] : 0;
      if (c < dim) at[c * TILE_STRIDE + t] = (float)sums[t] * scale + more;
    }
  }
  simt_sync_block();
}

// ---- The transform of data-free codes (engine/codec/hadamard.h) ----

// 1 / sqrt(size), a power of two.
SIMT_INLINE float tile_scale(unsigned size) {
  float scale = 1;
  for (; size > 2; size /= 4) scale *= 0.5f;
  return size == 2 ? scale * (1.0f / 1.41421354f) : scale;
}

SIMT_INLINE void tile_butterflies(float *tile, unsigned size) {
  for (unsigned half = 1; half < size; half *= 2) {
    for (unsigned i = simt_thread(); i < size / 2 * TILE_TOKENS; i += simt_threads()) {
      const unsigned pair = i / TILE_TOKENS, low = pair / half * 2 * half + pair % half;
      float *a = tile + low * TILE_STRIDE + i % TILE_TOKENS, *b = a + half * TILE_STRIDE;
      const float x = *a, y = *b;
      *a = x + y;
      *b = x - y;
    }
    simt_sync_block();
  }
  const float scale = tile_scale(size);
  for (unsigned i = simt_thread(); i < size * TILE_TOKENS; i += simt_threads())
    tile[i / TILE_TOKENS * TILE_STRIDE + i % TILE_TOKENS] *= scale;
}

SIMT_INLINE void tile_transform(float *tile, unsigned dim) {
  unsigned first = 0;
  for (unsigned size = 512; size >= TILE_BAND; size /= 2) {
    if ((dim & size) == 0) continue;
    tile_butterflies(tile + first * TILE_STRIDE, size);
    first += size;
  }
  simt_sync_block();
}

SIMT_INLINE void tile_flip_signs(const qkv_simt_code *code, float *tile) {
  for (unsigned i = simt_thread(); i < code->dim * TILE_TOKENS; i += simt_threads()) {
    const unsigned c = i / TILE_TOKENS;
    float *number = tile + c * TILE_STRIDE + i % TILE_TOKENS;
    *number = simt_float(simt_bits(*number) ^ (code->signs[c / 32] >> (c % 32) << 31));
  }
  simt_sync_block();
}

#endif
