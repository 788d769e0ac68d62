// Products of bytes without VNNI, for pages whose codes are looked up as they are needed: vpmaddubsw adds two of them
// in 16 bits, vpmaddwd with ones two of those sums in 32. That is three operations where 16-bit products take four
// and centroids have to be widened (bytes.h), as long as no sum of 16 bits saturates.
//
// One factor is unsigned: of V the weight, of K the centroid and the largest one more. Two neighbours in a column
// that could saturate together (one pair of some hundreds unless weights are nearly equal) are split into halves,
// which are multiplied one after the other. Queries of two bytes would have to be split everywhere, as all second
// bytes are equally frequent: of banded pages (banded.h) the unsigned factor is a query's magnitude, whose sign the
// centroid takes by a fourth operation. The sum of two of these products is at most 2 * 128 * 127.
#ifndef QKV_ENGINE_KERNEL_X86_NARROW_H
#define QKV_ENGINE_KERNEL_X86_NARROW_H

#include "engine/kernel/x86/centroids.h"

#if defined(__AVX2__) && LANES == 8
// A chunk's columns, [number / 4][column][number % 4], and the halves of the vectors in which neighbours could
// saturate together.
typedef struct split_columns {
  _Alignas(32) uint8_t whole[QKV_INTEGER_COLUMNS * QKV_DIM_MAX];
  uint8_t first[QKV_INTEGER_COLUMNS * QKV_DIM_MAX], second[QKV_INTEGER_COLUMNS * QKV_DIM_MAX];
  uint8_t split[QKV_DIM_MAX / 4];  // by number / 4: SPLIT_ALWAYS, SPLIT_DEEP or 0
} split_columns;

// What is split for blocks of the shape that columns were split for: for these alone, or for those of up to four bits
// as well.
enum { SPLIT_DEEP = 1, SPLIT_ALWAYS = 3 };

// A chunk's columns, [number / 4][column][the numbers, their magnitudes][number % 4].
typedef uint8_t signed_columns[2 * QKV_INTEGER_COLUMNS * QKV_DIM_MAX];

// The largest centroid of what is taken for a shape.
INLINE int narrow_most(qkvi_block_shape shape) {
  return shape == QKVI_BLOCK_FIELDS ? QKVI_MOST_2 : shape == QKVI_BLOCK_NIBBLES ? QKVI_MOST_4 : QKVI_MOST_6;
}

INLINE bytes narrow_table(qkv_part part, qkvi_block_shape shape, const uint8_t *table) {
  const bytes all = load_table(table);
  return part == QKV_K ? _mm256_add_epi8(all, _mm256_set1_epi8((char)narrow_most(shape))) : all;
}

// `count` numbers of each column, whole blocks.
static void split_large(qkv_part part, qkvi_block_shape shape, const uint8_t *columns, size_t count, size_t width,
                        split_columns *out) {
  // Of two neighbours. Where those of a query have different signs they are always small enough.
  const int unsigned_most = part == QKV_K ? 2 : 1;
  const bytes most = _mm256_set1_epi16((short)(INT16_MAX / narrow_most(shape) / unsigned_most));
  const bytes always = _mm256_set1_epi16((short)(INT16_MAX / narrow_most(QKVI_BLOCK_NIBBLES) / unsigned_most));
  const bytes ones = _mm256_set1_epi8(1);
  const size_t size = count * width;
  memset(out->split, 0, count / 4);
  for (size_t at = 0; at < size; at += sizeof(bytes)) {
    const bytes all = at + sizeof(bytes) <= size
                          ? load_bytes(columns + at)
                          : _mm256_zextsi128_si256(_mm_loadu_si128((const __m128i *)(columns + at)));
    bytes two = part == QKV_K ? _mm256_maddubs_epi16(ones, all) : _mm256_maddubs_epi16(all, ones);
    if (part == QKV_K) two = _mm256_abs_epi16(two);
    const bytes large = _mm256_cmpgt_epi16(two, most);
    put_bytes(out->whole + at, all);
    if (_mm256_testz_si256(large, large)) continue;
    const bytes magnitudes = part == QKV_K ? _mm256_abs_epi8(all) : all;
    bytes second = (bytes)((words)down(magnitudes, 1) & EACH_BYTE(0x7f));
    if (part == QKV_K) second = _mm256_sign_epi8(second, all);
    put_bytes(out->first + at, _mm256_sub_epi8(all, second));
    put_bytes(out->second + at, second);
    const bytes larger = _mm256_cmpgt_epi16(two, always);
    const int mark = _mm256_testz_si256(larger, larger) ? SPLIT_DEEP : SPLIT_ALWAYS;
    memset(out->split + at / 4 / width, mark, sizeof(bytes) / 4 / width);
  }
}

// The bit that marks what is split for blocks of a shape.
INLINE uint8_t split_bit(qkvi_block_shape shape) {
  return shape == QKVI_BLOCK_SIXES ? SPLIT_DEEP : SPLIT_ALWAYS ^ SPLIT_DEEP;
}

// Of a block's four.
INLINE bool any_split(const split_columns *columns, qkvi_block_shape shape, size_t quad) {
  uint32_t four;
  memcpy(&four, columns->split + quad, sizeof four);
  return (four & EACH_BYTE(split_bit(shape))) != 0;
}

static inline void sign_columns(const uint8_t *columns, size_t size, signed_columns out) {
  for (size_t at = 0; at < size; at += 16) {
    const __m128i all = _mm_loadu_si128((const __m128i *)(columns + at)), magnitudes = _mm_abs_epi8(all);
    _mm_storeu_si128((__m128i *)(out + 2 * at), _mm_unpacklo_epi32(all, magnitudes));
    _mm_storeu_si128((__m128i *)(out + 2 * at + 16), _mm_unpackhi_epi32(all, magnitudes));
  }
}

// sum += unsigned . other
INLINE bytes narrow_sum(bytes sum, bytes positive, bytes other) {
  const bytes two = _mm256_maddubs_epi16(positive, other);
  sum = _mm256_add_epi32(sum, _mm256_madd_epi16(two, _mm256_set1_epi16(1)));
  // In turn: gcc would rather add products to each other first, and has no registers for all of them.
  __asm__("" : "+x"(sum));
  return sum;
}

INLINE bytes narrow_dot(qkv_part part, bytes sum, bytes centroids, bytes column) {
  return part == QKV_K ? narrow_sum(sum, centroids, column) : narrow_sum(sum, column, centroids);
}

INLINE bytes signed_dot(bytes sum, bytes centroids, bytes column, bytes magnitudes) {
  return narrow_sum(sum, magnitudes, _mm256_sign_epi8(centroids, column));
}

#endif
#endif
