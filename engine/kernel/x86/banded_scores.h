// Scores of pages of calibrated schedules (banded.h): what becomes of sums, and, where bytes are multiplied in 16
// bits anyway, queries of two bytes in one product.
#ifndef QKV_ENGINE_KERNEL_X86_BANDED_SCORES_H
#define QKV_ENGINE_KERNEL_X86_BANDED_SCORES_H

#include "engine/kernel/x86/banded.h"

#if defined(__AVX2__)
// What becomes of the sums.
typedef struct key_outcome {
  unsigned parts;
  size_t rows;
  const float *scales;
  const uint8_t *gains;  // from the first group on
  float *scores;         // [rows][64], from the first group's first slot on
} key_outcome;

// The scores of a group's lanes from `lane` on. `width` and `parts` are constants, as all indices of sums must be.
INLINE void put_scores(const key_outcome *out, size_t g, size_t lane, size_t width, unsigned parts, lanes factors,
                       const words *sums, const words *low) {
  UNROLL
  for (size_t row = 0; row < width / parts; row++) {
    if (row >= out->rows) break;
    const lanes total = total_of(&sums[row * parts], low != NULL ? &low[row * parts] : NULL, parts);
    store_lanes(out->scores + row * QKV_PAGE_TOKENS + g * GROUP + lane, total * out->scales[row] * factors);
  }
}

#if STEADY_LOOPS
// A chunk of queries against a page.
typedef struct banded_keys {
  banded page;
  size_t wide;             // blocks that need all columns; the others only the second of each two
  const uint8_t *columns;  // the chunk's
  const uint8_t *deep;     // the same for deep blocks
  const int32_t *offsets;  // the chunk's
  const mixed_group *mixed;
  key_outcome out;
} banded_keys;

#endif

#if LANES == 8
// ---- Queries of two bytes ----

// Both bytes at once, in products of 16 bits. Up to so many coordinates sums fit; to round such a sum is to round
// 256 T_0 + T_1 (integer.h), which are whole numbers below 2^24 where no block is deep.
enum { WHOLE_MOST = 512, WHOLE_BYTES = 8 };

// Four numbers of a row from two columns of bytes: 0, 2, 1, 3. Of four rows at once; more may be read and written.
static void join_columns(const uint8_t *from, size_t bytes_count, int16_t *out) {
  const __m256i high =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(-1, 0, -1, 2, -1, 1, -1, 3, -1, 8, -1, 10, -1, 9, -1, 11));
  const __m256i low =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(-1, 4, -1, 6, -1, 5, -1, 7, -1, 12, -1, 14, -1, 13, -1, 15));
  for (size_t i = 0; i < bytes_count; i += sizeof high, out += sizeof high / sizeof *out) {
    const __m256i all = load_bytes(from + i);
    const __m256i second = _mm256_srai_epi16(_mm256_shuffle_epi8(all, low), 8);
    put_bytes(out, _mm256_add_epi16(_mm256_shuffle_epi8(all, high), second));
  }
}

// The even ones of unsigned bytes, widened, or the odd ones. (Signed ones take an operation more.)
INLINE bytes unsigned_words(bytes centroids, bool odd) {
  return odd ? _mm256_srli_epi16(centroids, 8) : _mm256_and_si256(centroids, _mm256_set1_epi16(0xff));
}

// What unsigned centroids are more than signed ones counts in a row's sums, of all blocks.
INLINE words whole_offset(const banded_keys *keys, size_t rows, size_t row) {
  const int32_t *offsets = keys->offsets + keys->page.layout->count * 2 * rows + 2 * row;
  return (words){0} + ((uint32_t)offsets[0] * 256 + (uint32_t)offsets[1]);
}

// Blocks b to `end`, of vectors of groups from g on, of `rows` queries; all but b, `end` and g are constants.
INLINE size_t score_whole_blocks(const banded_keys *keys, qkvi_block_shape shape, size_t b, size_t end, size_t g,
                                 size_t count, size_t rows, column_sums *sums, prefetching *along) {
  const uint8_t *columns = keys->columns + b * FIELDS * rows * WHOLE_BYTES;
  for (; b < end; b++) {
    const banded_block block = banded_block_of(QKV_K, shape, &keys->page, b);
    source from[TOGETHER_MAX];
    prefetch_some(along);
    UNROLL
    for (size_t i = 0; i < count; i++) from[i] = banded_source(shape, &block, banded_at(&keys->page, g + i));
    UNROLL
    for (size_t f = 0; f < FIELDS; f++, columns += rows * WHOLE_BYTES) {
      bytes centroids[TOGETHER_MAX], widened[TOGETHER_MAX];
      UNROLL
      for (size_t i = 0; i < count; i++) centroids[i] = banded_centroids(shape, &block, &from[i], f);
      UNROLL
      for (size_t odd = 0; odd < 2; odd++) {  // in turn: for both at once there are not registers enough
        UNROLL
        for (size_t i = 0; i < count; i++) widened[i] = unsigned_words(centroids[i], odd != 0);
        UNROLL
        for (size_t row = 0; row < rows; row++) {
          const bytes numbers = repeat_word(columns + row * WHOLE_BYTES + 4 * odd);
          UNROLL
          for (size_t i = 0; i < count; i++) {
            bytes sum = ADD_WORDS((bytes)sums[i][row], MULTIPLY_HALVES(widened[i], numbers));
            __asm__("" : "+x"(sum));  // else gcc adds products up first, and spills
            sums[i][row] = (words)sum;
          }
        }
      }
    }
  }
  return b;
}

// `rows` is a constant.
INLINE void score_whole(const banded_keys *keys, size_t rows, prefetching *ahead) {
  enum { COUNT = 2 };
  const size_t blocks = keys->page.layout->count, sixes = banded_until(&keys->page, 0, QKVI_BLOCK_NIBBLES);
  const size_t nibbles = banded_until(&keys->page, sixes, QKVI_BLOCK_FIELDS);
  prefetching along = *ahead;
  words offsets[QKV_INTEGER_COLUMNS / 2];
  along.step *= COUNT;  // as vectors go together
  UNROLL
  for (size_t row = 0; row < rows; row++) offsets[row] = whole_offset(keys, rows, row);
  for (size_t g = 0; g < QKV_PAGE_GROUPS * VECTORS; g += COUNT) {
    column_sums sums[COUNT];
    UNROLL
    for (size_t row = 0; row < rows; row++) {
      UNROLL
      for (size_t i = 0; i < COUNT; i++) sums[i][row] = offsets[row];
    }
    score_whole_blocks(keys, QKVI_BLOCK_SIXES, 0, sixes, g, COUNT, rows, sums, &along);
    score_whole_blocks(keys, QKVI_BLOCK_NIBBLES, sixes, nibbles, g, COUNT, rows, sums, &along);
    score_whole_blocks(keys, QKVI_BLOCK_FIELDS, nibbles, blocks, g, COUNT, rows, sums, &along);
    UNROLL
    for (size_t i = 0; i < COUNT; i++) {
      put_scores(&keys->out, 0, (g + i) * LANES, rows, 1, gain_lanes(keys->out.gains + (g + i) * LANES), sums[i],
                 NULL);
    }
  }
  along.step /= COUNT;
  *ahead = along;
}

static void score_whole_chunk(const banded_keys *keys, size_t rows, prefetching *along) {
  if (rows == 1) return score_whole(keys, 1, along);
  if (rows == 2) return score_whole(keys, 2, along);
  score_whole(keys, 4, along);
}
#endif

#endif
#endif
