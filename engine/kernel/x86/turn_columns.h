// The Hadamard transform on the way from rows of two bytes a number, which may lie apart, to the columns that they
// are encoded from (encode_columns.h): numbers are turned while they are two bytes, half the vectors, and after that
// every step adds and subtracts whole vectors. The sums are those of hadamard_forward, in the same order.
#ifndef QKV_ENGINE_KERNEL_X86_TURN_COLUMNS_H
#define QKV_ENGINE_KERNEL_X86_TURN_COLUMNS_H

#include <math.h>

#include "engine/kernel/plain.h"
#include "engine/kernel/x86/encode_columns.h"

#if defined(__AVX2__)
enum { TURN_BLOCK = 16, TURN_CHUNK = 2 * TURN_BLOCK, TURN_SIZE_MAX = 256 };

static bool turns_columns(qkv_dtype dtype, size_t dim) {
  return (dtype == QKV_FP16 || dtype == QKV_BF16) && dim % TURN_CHUNK == 0 && dim < 2 * TURN_SIZE_MAX;
}

#if LANES == 16
// Highest bits of what is flipped, in the order that `take_block` has 16 coordinates in: twice 8, then twice the
// others.
typedef struct turn_signs {
  _Alignas(64) uint16_t of[2 * TURN_SIZE_MAX / TURN_BLOCK][2 * TURN_BLOCK];
} turn_signs;

INLINE void put_turn_signs(uint16_t flips, uint16_t *out) {
  const __m512i order = _mm512_setr_epi64(0, 1, 0, 1, 2, 3, 2, 3);
  const __m256i signs = _mm256_maskz_set1_epi16(flips, INT16_MIN);
  _mm512_store_si512(out, _mm512_permutexvar_epi64(order, _mm512_castsi256_si512(signs)));
}
#else
// Highest bits of what is flipped.
typedef struct turn_signs {
  _Alignas(32) uint16_t of[2 * TURN_SIZE_MAX / TURN_BLOCK][TURN_BLOCK];
} turn_signs;

INLINE void put_turn_signs(uint16_t flips, uint16_t *out) {
  const __m256i bits = _mm256_setr_epi16(1, 1 << 1, 1 << 2, 1 << 3, 1 << 4, 1 << 5, 1 << 6, 1 << 7, 1 << 8, 1 << 9,
                                         1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, INT16_MIN);
  const __m256i set = _mm256_and_si256(_mm256_set1_epi16((int16_t)flips), bits);
  put_bytes(out, _mm256_slli_epi16(_mm256_cmpeq_epi16(set, bits), 15));
}
#endif

static void fill_turn_signs(size_t dim, turn_signs *out) {
  uint64_t state = dim, word = 0;
  for (size_t c = 0; c < dim; c += TURN_BLOCK, word >>= TURN_BLOCK) {
    if (c % 64 == 0) word = splitmix64(&state);  // as flip_signs
    put_turn_signs((uint16_t)word, out->of[c / TURN_BLOCK]);
  }
}

#if LANES == 16
INLINE lanes widen_numbers(qkv_dtype dtype, __m256i numbers) {
  return dtype == QKV_FP16 ? (lanes)_mm512_cvtph_ps(numbers)
                           : (lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32(numbers), 16);
}

// 16 coordinates of LANES rows, two bytes each, from block `b` on.
INLINE void load_block(const uint8_t *const rows[LANES], size_t b, const uint16_t *signs, __m512i v[8]) {
  const size_t offset = b / 2 * TURN_CHUNK * sizeof(uint16_t);
  const __m512i first_half = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
  const __m512i order = b % 2 != 0 ? _mm512_add_epi64(first_half, _mm512_set1_epi64(4)) : first_half;
  const __m512i flips = _mm512_load_si512(signs);
  UNROLL
  for (size_t i = 0; i < 8; i++) {  // rows i and i + 8: coordinates 0 to 7 of both, then 8 to 15
    const __m512i low = _mm512_loadu_si512(rows[i] + offset), high = _mm512_loadu_si512(rows[i + 8] + offset);
    v[i] = _mm512_xor_si512(_mm512_permutex2var_epi64(low, order, high), flips);
  }
}

INLINE __m256i low_half(__m512i all) {
  return _mm512_castsi512_si256(all);
}

INLINE __m256i high_half(__m512i all) {
  return _mm512_extracti64x4_epi64(all, 1);
}
#else
INLINE lanes widen_numbers(qkv_dtype dtype, __m128i numbers) {
  return dtype == QKV_FP16 ? (lanes)_mm256_cvtph_ps(numbers)
                           : (lanes)_mm256_slli_epi32(_mm256_cvtepu16_epi32(numbers), 16);
}

// 16 coordinates of LANES rows, two bytes each, from block `b` on.
INLINE void load_block(const uint8_t *const rows[LANES], size_t b, const uint16_t *signs, __m256i v[8]) {
  const bytes flips = load_bytes(signs);
  UNROLL
  for (size_t i = 0; i < 8; i++) v[i] = _mm256_xor_si256(load_bytes(rows[i] + b * sizeof flips), flips);
}

INLINE __m128i low_half(__m256i all) {
  return _mm256_castsi256_si128(all);
}

INLINE __m128i high_half(__m256i all) {
  return _mm256_extracti128_si256(all, 1);
}
#endif

// Block `b` of LANES rows, as columns.
INLINE void take_block(qkv_dtype dtype, const uint8_t *const rows[LANES], size_t b, const uint16_t *signs,
                       lanes x[TURN_BLOCK]) {
  bytes v[8];
  load_block(rows, b, signs, v);
  // Three times the highest bit of a number's place among eight becomes one of its vector, which gives up one.
  UNROLL
  for (size_t bit = 4; bit > 0; bit /= 2) {
    UNROLL
    for (size_t i = 0; i < 8; i++) {
      if ((i & bit) != 0) continue;
      const bytes low = v[i], high = v[i + bit];
      v[i] = SIMD(unpacklo_epi16)(low, high);
      v[i + bit] = SIMD(unpackhi_epi16)(low, high);
    }
  }
  UNROLL
  for (size_t i = 0; i < 8; i++) {
    x[i] = widen_numbers(dtype, low_half(v[i]));
    x[i + 8] = widen_numbers(dtype, high_half(v[i]));
  }
}

// `count` is a constant.
INLINE void meet_vectors(lanes *x, size_t count) {
  UNROLL
  for (size_t half = 1; half < count; half *= 2) {
    UNROLL_16
    for (size_t i = 0; i < count; i++) {
      if ((i & half) != 0) continue;
      const lanes low = x[i], high = x[i + half];
      x[i] = low + high;
      x[i + half] = low - high;
    }
  }
}

// What is left of a transform once its blocks of 16 are done, and the sums of squares, of LANES rows from row `first`
// on. `blocks` is a constant.
INLINE void meet_blocks(float (*x)[GROUP], size_t first, size_t blocks, lanes squares[SUM_LANES]) {
  const float scale = 1.0f / sqrtf((float)(blocks * TURN_BLOCK));
  for (size_t c = 0; c < TURN_BLOCK; c++) {
    lanes v[TURN_SIZE_MAX / TURN_BLOCK];
    UNROLL_16
    for (size_t i = 0; i < blocks; i++) v[i] = load_lanes(x[i * TURN_BLOCK + c] + first);
    meet_vectors(v, blocks);
    lanes sum = squares[c];
    UNROLL_16
    for (size_t i = 0; i < blocks; i++) {
      v[i] = v[i] * scale;
      sum += v[i] * v[i];
      store_lanes(x[i * TURN_BLOCK + c] + first, v[i]);
    }
    squares[c] = sum;
  }
}

// Fetches what lies ahead, a share with every block.
INLINE void fetch_share(const qkv_rows *next, size_t first, size_t block, size_t blocks) {
  const size_t end = first + LANES * (block + 1) / blocks;
  for (size_t t = first + LANES * block / blocks; t < end; t++) qkvi_fetch_row(next, t);
}

// LANES rows of a group from row `first` on, the group being from row `group` of its page on.
INLINE void turn_rows(qkv_dtype dtype, const uint8_t *const rows[GROUP], const qkv_rows *next, size_t group,
                      size_t first, size_t dim, const turn_signs *signs, columns *out, float *squares) {
  const size_t blocks = dim / TURN_BLOCK;
  for (size_t b = 0; b < blocks; b++) {
    lanes x[TURN_BLOCK];
    if (next != NULL) fetch_share(next, group + first, b, blocks);
    take_block(dtype, rows + first, b, signs->of[b], x);
    meet_vectors(x, TURN_BLOCK);
    UNROLL_16
    for (size_t i = 0; i < TURN_BLOCK; i++) store_lanes(out->x[b * TURN_BLOCK + i] + first, x[i]);
  }
  lanes sums[SUM_LANES] = {0};
  size_t start = 0;
  for (size_t size = TURN_SIZE_MAX; size >= TURN_CHUNK; size /= 2) {
    if ((dim & size) == 0) continue;
    switch (size / TURN_BLOCK) {
      case 2:
        meet_blocks(out->x + start, first, 2, sums);
        break;
      case 4:
        meet_blocks(out->x + start, first, 4, sums);
        break;
      case 8:
        meet_blocks(out->x + start, first, 8, sums);
        break;
      default:
        meet_blocks(out->x + start, first, 16, sums);
    }
    start += size;
  }
  add_halves(sums, squares + first);
}

// 16 rows, the first of which is row `group` of a page, and the sums of their squares.
INLINE void turn_group(qkv_dtype dtype, const uint8_t *const rows[GROUP], const qkv_rows *next, size_t group,
                       size_t dim, const turn_signs *signs, columns *out, each squares) {
  for (size_t first = 0; first < GROUP; first += LANES) {
    turn_rows(dtype, rows, next, group, first, dim, signs, out, squares);
  }
}
#endif
#endif
