// Vectors of bytes for the integer kernels: 64 where the file is compiled for AVX-512, 32 for AVX2. A vector holds,
// in 32-bit lanes, four bytes each of LANES tokens (K) or coordinates (V).
//
// With VNNI four products of bytes are added to a 32-bit lane by one instruction, whose first factor is unsigned:
// then centroids of K are 128 more (table.h). Without it both factors are widened to 16 bits, which cannot saturate,
// and take two instructions with 16-bit products and two additions.
#ifndef QKV_ENGINE_KERNEL_X86_BYTES_H
#define QKV_ENGINE_KERNEL_X86_BYTES_H

#include "engine/kernel/x86/lanes.h"

#if defined(__AVX2__)
#define INLINE static inline __attribute__((always_inline))

#if LANES == 16
typedef __m512i bytes;
#else
typedef __m256i bytes;
#endif

#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__)
#define BYTE_DOTS 1
#else
#define BYTE_DOTS 0
#endif

// Whether pages of one depth have loops of their own (columns.h).
#define STEADY_LOOPS (BYTE_DOTS || LANES == 8)

static inline bytes load_bytes(const void *from) {
#if LANES == 16
  return _mm512_loadu_si512(from);
#else
  return _mm256_loadu_si256(from);
#endif
}

static inline void put_bytes(void *to, bytes all) {
#if LANES == 16
  _mm512_storeu_si512(to, all);
#else
  _mm256_storeu_si256(to, all);
#endif
}

// The same four bytes in every lane.
static inline bytes repeat_word(const void *from) {
  int32_t word;
  memcpy(&word, from, sizeof word);
#if LANES == 16
  return _mm512_set1_epi32(word);
#else
  return _mm256_set1_epi32(word);
#endif
}

#define EACH_BYTE(byte) ((uint32_t)(byte)*0x01010101u)

// a where the mask has ones in a byte, else b.
static inline bytes blend_bits(uint8_t mask, bytes a, bytes b) {
#if LANES == 16
  return _mm512_ternarylogic_epi32(_mm512_set1_epi8((char)mask), a, b, 0xca);
#else
  const __m256i all = _mm256_set1_epi8((char)mask);
  return _mm256_or_si256(_mm256_and_si256(all, a), _mm256_andnot_si256(all, b));
#endif
}

// Shifts of 16-bit lanes; callers ignore the bits that cross from byte to byte.
static inline bytes down(bytes all, int bits) {
#if LANES == 16
  return _mm512_srli_epi16(all, (unsigned)bits);
#else
  return _mm256_srli_epi16(all, bits);
#endif
}

static inline bytes up(bytes all, int bits) {
#if LANES == 16
  return _mm512_slli_epi16(all, (unsigned)bits);
#else
  return _mm256_slli_epi16(all, bits);
#endif
}

// A table of 64 bytes that repeats its first 16, for indices of which only the low bits count; `look_up_byte` may
// look at six of them.
static inline bytes load_table(const uint8_t *table) {
#if BYTE_DOTS
  return load_bytes(table);
#elif LANES == 16
  return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table));
#else
  return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
#endif
}

static inline bytes look_up_byte(bytes table, bytes index) {
#if BYTE_DOTS
  return _mm512_permutexvar_epi8(index, table);
#elif LANES == 16
  return _mm512_shuffle_epi8(table, _mm512_and_si512(index, _mm512_set1_epi8(15)));
#else
  return _mm256_shuffle_epi8(table, _mm256_and_si256(index, _mm256_set1_epi8(15)));
#endif
}

#if !BYTE_DOTS
// The same where no index is above 15.
static inline bytes look_up_cell(bytes table, bytes index) {
#if LANES == 16
  return _mm512_shuffle_epi8(table, index);
#else
  return _mm256_shuffle_epi8(table, index);
#endif
}
#endif

// The same with a table of 64 in memory, and six bits of the index.
static inline bytes look_up_six(const uint8_t *table, bytes index) {
#if BYTE_DOTS
  return _mm512_permutexvar_epi8(index, load_bytes(table));
#else
  const bytes a = look_up_byte(load_table(table), index), b = look_up_byte(load_table(table + 16), index);
  const bytes c = look_up_byte(load_table(table + 32), index), d = look_up_byte(load_table(table + 48), index);
#if LANES == 16
  const __mmask64 odd = _mm512_test_epi8_mask(index, _mm512_set1_epi8(16));
  const __mmask64 upper = _mm512_test_epi8_mask(index, _mm512_set1_epi8(32));
  return _mm512_mask_blend_epi8(upper, _mm512_mask_blend_epi8(odd, a, b), _mm512_mask_blend_epi8(odd, c, d));
#else
  const __m256i odd = _mm256_slli_epi16(index, 3), upper = _mm256_slli_epi16(index, 2);  // their highest bits
  return _mm256_blendv_epi8(_mm256_blendv_epi8(a, b, odd), _mm256_blendv_epi8(c, d, odd), upper);
#endif
#endif
}

// Looks all the bytes of an index up in a table of 256.
static inline bytes look_up_256(const uint8_t *table, bytes index) {
#if BYTE_DOTS
  const bytes low = _mm512_permutex2var_epi8(load_bytes(table), index, load_bytes(table + 64));
  const bytes high = _mm512_permutex2var_epi8(load_bytes(table + 128), index, load_bytes(table + 192));
  return _mm512_mask_blend_epi8(_mm512_movepi8_mask(index), low, high);
#elif LANES == 8
  const bytes a = look_up_six(table, index), b = look_up_six(table + 64, index);
  const bytes c = look_up_six(table + 128, index), d = look_up_six(table + 192, index);
  const bytes odd = up(index, 1);
  return _mm256_blendv_epi8(_mm256_blendv_epi8(a, b, odd), _mm256_blendv_epi8(c, d, odd), index);
#else
  uint8_t all[sizeof(bytes)];
  memcpy(all, &index, sizeof all);
  for (size_t i = 0; i < sizeof all; i++) all[i] = table[all[i]];
  return load_bytes(all);
#endif
}

// A number of each column for every lane: four bytes as they lie in integer.h, or the same widened.
#if BYTE_DOTS
typedef bytes plane;
typedef uint8_t column_bytes[4];

static inline plane plane_of(bytes centroids) {
  return centroids;
}

static inline bytes dot_keys(bytes sum, plane keys, bytes column) {
  return _mm512_dpbusd_epi32(sum, keys, column);
}

static inline bytes dot_values(bytes sum, plane values, bytes column) {
  return _mm512_dpbusd_epi32(sum, column, values);
}
#else
// Bytes 0 and 2 of every lane, and 1 and 3.
typedef struct plane {
  bytes even, odd;
} plane;
typedef int16_t column_words[4];  // 0 and 2, 1 and 3

#if LANES == 16
#define ADD_WORDS _mm512_add_epi32
#define MULTIPLY_HALVES _mm512_madd_epi16
#else
#define ADD_WORDS _mm256_add_epi32
#define MULTIPLY_HALVES _mm256_madd_epi16
#endif

static inline plane plane_of(bytes centroids) {
#if LANES == 16
  return (plane){_mm512_srai_epi16(_mm512_slli_epi16(centroids, 8), 8), _mm512_srai_epi16(centroids, 8)};
#else
  return (plane){_mm256_srai_epi16(_mm256_slli_epi16(centroids, 8), 8), _mm256_srai_epi16(centroids, 8)};
#endif
}
#endif

#endif
#endif
