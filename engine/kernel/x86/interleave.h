// Numbers to bytes and rows of bytes to chunks of columns (kernel/integer.h), 64 of each row at a time.
#ifndef QKV_ENGINE_KERNEL_X86_INTERLEAVE_H
#define QKV_ENGINE_KERNEL_X86_INTERLEAVE_H

#include "engine/kernel/x86/bytes.h"

#if defined(__AVX2__)
#include "engine/kernel/integer.h"

enum { SIXTY_FOUR = 64, SIXTY_FOUR_VECTORS = SIXTY_FOUR / LANES };

// Whole numbers of a row, in the low 16 bits of the words.
typedef struct sixty_four {
  words whole[SIXTY_FOUR_VECTORS];
} sixty_four;

#if LANES == 16
// A byte of each of 64 numbers, in order: the lowest or the next.
INLINE bytes pack_bytes(const sixty_four *row, bool next) {
#if BYTE_DOTS
  const words from = {0x0c080400, 0x1c181410, 0x2c282420, 0x3c383430, 0x4c484440, 0x5c585450, 0x6c686460, 0x7c787470};
  const bytes order = (bytes)(next ? from + EACH_BYTE(1) : from);
  const bytes low = _mm512_permutex2var_epi8((bytes)row->whole[0], order, (bytes)row->whole[1]);
  const bytes high = _mm512_permutex2var_epi8((bytes)row->whole[2], order, (bytes)row->whole[3]);
  return _mm512_inserti64x4(low, _mm512_castsi512_si256(high), 1);
#else
  uint8_t all[SIXTY_FOUR];
  for (size_t i = 0; i < SIXTY_FOUR_VECTORS; i++) {
    const bytes shifted = (bytes)(next ? row->whole[i] >> 8 : row->whole[i]);
    _mm_storeu_si128((__m128i *)(all + i * LANES), _mm512_cvtepi32_epi8(shifted));
  }
  return load_bytes(all);
#endif
}

#endif

// The words of two rows by turns: those of their lower halves, and of their upper.
INLINE void shuffle_rows(bytes a, bytes b, bytes *lower, bytes *upper) {
#if LANES == 16
  const bytes low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const bytes high = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  *lower = _mm512_permutex2var_epi32(a, low, b);
  *upper = _mm512_permutex2var_epi32(a, high, b);
#else
  const bytes even = _mm256_unpacklo_epi32(a, b), odd = _mm256_unpackhi_epi32(a, b);
  *lower = _mm256_permute2x128_si256(even, odd, 0x20);
  *upper = _mm256_permute2x128_si256(even, odd, 0x31);
#endif
}

// Rows of words, one a column, to [word][column]: a perfect shuffle for each doubling of the columns.
INLINE void interleave(bytes *rows, size_t columns) {
  UNROLL
  for (size_t round = 1; round < columns; round *= 2) {
    bytes next[QKV_INTEGER_COLUMNS];
    UNROLL
    for (size_t i = 0; i < columns / 2; i++) {
      shuffle_rows(rows[i], rows[i + columns / 2], &next[2 * i], &next[2 * i + 1]);
    }
    UNROLL
    for (size_t i = 0; i < columns; i++) rows[i] = next[i];
  }
}

INLINE void put_interleaved(bytes rows[QKV_INTEGER_COLUMNS], size_t columns, uint8_t *out) {
  interleave(rows, columns);
  UNROLL
  for (size_t i = 0; i < columns; i++) put_bytes(out + sizeof *rows * i, rows[i]);
}

#endif
#endif
