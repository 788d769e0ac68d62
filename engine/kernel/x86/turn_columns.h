// The Hadamard transform on the way from rows of two bytes a number, which may lie apart, to the columns that they
// are encoded from (encode_columns.h): numbers are turned while they are two bytes, half the vectors, and after that
// every step adds and subtracts whole vectors. The sums are those of hadamard_forward, in the same order.
#ifndef QKV_ENGINE_KERNEL_X86_TURN_COLUMNS_H
#define QKV_ENGINE_KERNEL_X86_TURN_COLUMNS_H

#include <math.h>

#include "engine/kernel/plain.h"
#include "engine/kernel/x86/encode_columns.h"

#if defined(__AVX2__) && BYTE_DOTS
enum { TURN_BLOCK = 16, TURN_CHUNK = 2 * TURN_BLOCK, TURN_SIZE_MAX = 256 };

static bool turns_columns(qkv_dtype dtype, size_t dim) {
  return (dtype == QKV_FP16 || dtype == QKV_BF16) && dim % TURN_CHUNK == 0 && dim < 2 * TURN_SIZE_MAX;
}

// Highest bits of what is flipped, in the order that `take_block` has 16 coordinates in: twice 8, then twice the
// others.
typedef struct turn_signs {
  _Alignas(64) uint16_t of[2 * TURN_SIZE_MAX / TURN_BLOCK][2 * TURN_BLOCK];
} turn_signs;

static void fill_turn_signs(size_t dim, turn_signs *out) {
  const __m512i order = _mm512_setr_epi64(0, 1, 0, 1, 2, 3, 2, 3);
  uint64_t state = dim, word = 0;
  for (size_t c = 0; c < dim; c += TURN_BLOCK, word >>= TURN_BLOCK) {
    if (c % 64 == 0) word = splitmix64(&state);  // as flip_signs
    const __m256i signs = _mm256_maskz_set1_epi16((__mmask16)word, INT16_MIN);
    _mm512_store_si512(out->of[c / TURN_BLOCK], _mm512_permutexvar_epi64(order, _mm512_castsi256_si512(signs)));
  }
}

INLINE __m512 widen_numbers(qkv_dtype dtype, __m256i numbers) {
  return dtype == QKV_FP16 ? _mm512_cvtph_ps(numbers)
                           : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(numbers), 16));
}

// Half of 32 coordinates of 16 rows, as columns.
INLINE void take_block(qkv_dtype dtype, const uint8_t *const rows[GROUP], size_t offset, bool second,
                       const uint16_t *signs, __m512 x[TURN_BLOCK]) {
  const __m512i first_half = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
  const __m512i order = second ? _mm512_add_epi64(first_half, _mm512_set1_epi64(4)) : first_half;
  const __m512i flips = _mm512_load_si512(signs);
  __m512i v[8];  // rows i and i + 8: coordinates 0 to 7 of both, then 8 to 15
  UNROLL
  for (size_t i = 0; i < 8; i++) {
    const __m512i low = _mm512_loadu_si512(rows[i] + offset), high = _mm512_loadu_si512(rows[i + 8] + offset);
    v[i] = _mm512_xor_si512(_mm512_permutex2var_epi64(low, order, high), flips);
  }
  // Three times the highest bit of a number's place among eight becomes one of its vector, which gives up one.
  UNROLL
  for (size_t bit = 4; bit > 0; bit /= 2) {
    UNROLL
    for (size_t i = 0; i < 8; i++) {
      if ((i & bit) != 0) continue;
      const __m512i a = v[i], b = v[i + bit];
      v[i] = _mm512_unpacklo_epi16(a, b);
      v[i + bit] = _mm512_unpackhi_epi16(a, b);
    }
  }
  UNROLL
  for (size_t i = 0; i < 8; i++) {
    x[i] = widen_numbers(dtype, _mm512_castsi512_si256(v[i]));
    x[i + 8] = widen_numbers(dtype, _mm512_extracti64x4_epi64(v[i], 1));
  }
}

// `count` is a constant.
INLINE void meet_vectors(__m512 *x, size_t count) {
  UNROLL
  for (size_t half = 1; half < count; half *= 2) {
    UNROLL_16
    for (size_t i = 0; i < count; i++) {
      if ((i & half) != 0) continue;
      const __m512 low = x[i], high = x[i + half];
      x[i] = _mm512_add_ps(low, high);
      x[i + half] = _mm512_sub_ps(low, high);
    }
  }
}

// What is left of a transform once its blocks of 16 are done, and the sums of squares. `blocks` is a constant.
INLINE void meet_blocks(float (*x)[GROUP], size_t blocks, __m512 squares[SUM_LANES]) {
  const __m512 scale = _mm512_set1_ps(1.0f / sqrtf((float)(blocks * TURN_BLOCK)));
  for (size_t c = 0; c < TURN_BLOCK; c++) {
    __m512 v[TURN_SIZE_MAX / TURN_BLOCK];
    UNROLL_16
    for (size_t i = 0; i < blocks; i++) v[i] = _mm512_load_ps(x[i * TURN_BLOCK + c]);
    meet_vectors(v, blocks);
    __m512 sum = squares[c];
    UNROLL_16
    for (size_t i = 0; i < blocks; i++) {
      v[i] = _mm512_mul_ps(v[i], scale);
      sum = _mm512_add_ps(sum, _mm512_mul_ps(v[i], v[i]));
      _mm512_store_ps(x[i * TURN_BLOCK + c], v[i]);
    }
    squares[c] = sum;
  }
}

// Fetches what lies ahead, a share with every block.
INLINE void fetch_share(const qkv_rows *next, size_t first, size_t block, size_t blocks) {
  const size_t end = first + GROUP * (block + 1) / blocks;
  for (size_t t = first + GROUP * block / blocks; t < end; t++) qkvi_fetch_row(next, t);
}

// 16 rows, the first of which is row `first` of a page, and the sums of their squares.
INLINE void turn_group(qkv_dtype dtype, const uint8_t *const rows[GROUP], const qkv_rows *next, size_t first,
                       size_t dim, const turn_signs *signs, columns *out, each *squares) {
  const size_t blocks = dim / TURN_BLOCK;
  for (size_t b = 0; b < blocks; b++) {
    __m512 x[TURN_BLOCK];
    const size_t offset = b / 2 * TURN_CHUNK * sizeof(uint16_t);
    if (next != NULL) fetch_share(next, first, b, blocks);
    take_block(dtype, rows, offset, b % 2, signs->of[b], x);
    meet_vectors(x, TURN_BLOCK);
    UNROLL_16
    for (size_t i = 0; i < TURN_BLOCK; i++) _mm512_store_ps(out->x[b * TURN_BLOCK + i], x[i]);
  }
  __m512 sums[SUM_LANES] = {0};
  size_t start = 0;
  for (size_t size = TURN_SIZE_MAX; size >= TURN_CHUNK; size /= 2) {
    if ((dim & size) == 0) continue;
    switch (size / TURN_BLOCK) {
      case 2:
        meet_blocks(out->x + start, 2, sums);
        break;
      case 4:
        meet_blocks(out->x + start, 4, sums);
        break;
      case 8:
        meet_blocks(out->x + start, 8, sums);
        break;
      default:
        meet_blocks(out->x + start, 16, sums);
    }
    start += size;
  }
  add_halves(sums, squares);
}
#endif
#endif
