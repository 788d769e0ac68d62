// Plain codes times factors in whole numbers: mix.h says what. A chunk's 64 codes become bytes, four steps in each
// 32-bit lane, and one product with a row's bytes adds four of them. Compiled once for each family.
#include "engine/kernel/mix_plain.h"
#include "engine/kernel/x86/bytes.h"
#include "engine/kernel/x86/variants.h"

enum { ROWS = 4, CHUNK = 8, CHUNK_BYTES = 32, CHUNKS = sizeof(bytes) / CHUNK_BYTES };

// Bytes of a row's factors as products read them: a chunk's first four, four times, and its last four likewise.
typedef struct row_bytes {
  _Alignas(64) int8_t all[QKV_DIM_MAX * CHUNK_BYTES / CHUNK];
  int32_t total;
  float scale;
} row_bytes;

INLINE float largest_of(const float *factors, size_t steps) {
  __m256 most = _mm256_setzero_ps();
  for (size_t s = 0; s < steps; s += CHUNK)
    most = _mm256_max_ps(most, _mm256_andnot_ps(_mm256_set1_ps(-0.0f), _mm256_loadu_ps(factors + s)));
  float all[CHUNK], largest = 0;
  _mm256_storeu_ps(all, most);
  for (size_t i = 0; i < CHUNK; i++) largest = all[i] > largest ? all[i] : largest;
  return largest;
}

INLINE void round_row(const float *factors, size_t steps, row_bytes *row) {
  const float inverse = mix_inverse_plain(largest_of(factors, steps), &row->scale);
  __m256i total = _mm256_setzero_si256();
  for (size_t s = 0; s < steps; s += CHUNK) {
    const __m256i whole = _mm256_cvtps_epi32(_mm256_loadu_ps(factors + s) * inverse);
    const __m256i pairs = _mm256_packs_epi32(whole, whole);
    total = _mm256_add_epi32(total, whole);
    _mm256_store_si256((__m256i *)(row->all + s / CHUNK * CHUNK_BYTES), _mm256_packs_epi16(pairs, pairs));
  }
  if (steps / CHUNK % CHUNKS != 0) memset(row->all + steps / CHUNK * CHUNK_BYTES, 0, CHUNK_BYTES);
  int32_t all[CHUNK];
  _mm256_storeu_si256((__m256i *)all, total);
  row->total = 0;
  for (size_t i = 0; i < CHUNK; i++) row->total += all[i];
}

// A chunk's section as bytes [4][8 lanes] that begin with the part of step 2 j, above which lies that of 2 j + 1.
INLINE __m256i section_pairs(const uint8_t *section, unsigned width) {
  if (width == 4) return _mm256_loadu_si256((const __m256i *)section);
  if (width == 2) {
    const __m256i both = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)section));
    return _mm256_srlv_epi64(_mm256_permute4x64_epi64(both, 0x50), _mm256_setr_epi64x(0, 4, 0, 4));
  }
  long long eight_lanes;
  memcpy(&eight_lanes, section, sizeof eight_lanes);
  return _mm256_srlv_epi64(_mm256_set1_epi64x(eight_lanes), _mm256_setr_epi64x(0, 2, 4, 6));
}

// CHUNKS of them, or zeros from `left` on.
INLINE bytes pairs_of(const uint8_t *section, unsigned width, size_t chunk_bytes, size_t left) {
#if LANES == 16
  const __m256i second = left > 1 ? section_pairs(section + chunk_bytes, width) : _mm256_setzero_si256();
  return _mm512_inserti64x4(_mm512_castsi256_si512(section_pairs(section, width)), second, 1);
#else
  (void)chunk_bytes;
  (void)left;
  return section_pairs(section, width);
#endif
}

#if LANES == 16
#define AND _mm512_and_si512
#define OR _mm512_or_si512
#define SHUFFLE _mm512_shuffle_epi8
#define LOW_BYTES _mm512_unpacklo_epi8
#define HIGH_BYTES _mm512_unpackhi_epi8
#define LOW_WORDS _mm512_unpacklo_epi16
#define HIGH_WORDS _mm512_unpackhi_epi16
#else
#define AND _mm256_and_si256
#define OR _mm256_or_si256
#define SHUFFLE _mm256_shuffle_epi8
#define LOW_BYTES _mm256_unpacklo_epi8
#define HIGH_BYTES _mm256_unpackhi_epi8
#define LOW_WORDS _mm256_unpacklo_epi16
#define HIGH_WORDS _mm256_unpackhi_epi16
#endif

INLINE bytes each_byte(unsigned byte) {
#if LANES == 16
  return _mm512_set1_epi8((char)byte);
#else
  return _mm256_set1_epi8((char)byte);
#endif
}

// The codes of even and of odd steps, [4][8 lanes].
INLINE void codes_of(const uint8_t *chunk, unsigned bits, size_t left, bytes *even, bytes *odd) {
  bytes codes[2] = {each_byte(0), each_byte(0)};
  unsigned at = 0, below = bits;
  for (unsigned width = 4; width > 0; width /= 2) {
    if ((bits & width) == 0) continue;
    const bytes pairs = pairs_of(chunk + at, width, (size_t)CHUNK * bits, left), mask = each_byte((1u << width) - 1);
    below -= width;
    codes[0] = OR(codes[0], up(AND(pairs, mask), (int)below));
    codes[1] = OR(codes[1], up(AND(down(pairs, (int)width), mask), (int)below));
    at += width * QKV_MIX_LANES;
  }
  *even = codes[0];
  *odd = codes[1];
}

// sum + products of four bytes in each lane; those of values are below 128, so that two products fit 16 bits.
INLINE bytes add_products(bytes sum, bytes values, bytes factors) {
#if BYTE_DOTS
  return _mm512_dpbusd_epi32(sum, values, factors);
#elif LANES == 16
  return _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(values, factors), _mm512_set1_epi16(1)));
#else
  return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(values, factors), _mm256_set1_epi16(1)));
#endif
}

// Of four lanes each: sums over the vectors' 128-bit parts.
INLINE __m256i eight_sums(bytes low, bytes high) {
#if LANES == 16
  const __m256i a = _mm256_add_epi32(_mm512_castsi512_si256(low), _mm512_extracti64x4_epi64(low, 1));
  const __m256i b = _mm256_add_epi32(_mm512_castsi512_si256(high), _mm512_extracti64x4_epi64(high, 1));
#else
  const __m256i a = low, b = high;
#endif
  return _mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
}

INLINE void finish(const row_bytes *row, const mix_bytes *table, __m256i sums, float *out) {
  const __m256i centred =
      _mm256_sub_epi32(_mm256_add_epi32(sums, sums), _mm256_set1_epi32(table->middle * row->total));
  const __m256 product = _mm256_cvtepi32_ps(centred) * _mm256_set1_ps(row->scale * table->half_step);
  _mm256_storeu_ps(out, _mm256_loadu_ps(out) + product);
}

// Eight lanes of so many rows, a constant.
INLINE void mix_eight(const uint8_t *codes, unsigned bits, size_t chunks, const mix_bytes *table,
                      const row_bytes *rows, size_t n, float *out, size_t stride) {
#if LANES == 16
  const bytes values = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i *)table->bytes));
#else
  const bytes values = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i *)table->bytes));
#endif
  bytes sums[ROWS][2];
  for (size_t i = 0; i < n; i++) sums[i][0] = sums[i][1] = each_byte(0);
  for (size_t s = 0; s < chunks; s += CHUNKS, codes += CHUNKS * (size_t)CHUNK * bits) {
    bytes even, odd;
    codes_of(codes, bits, chunks - s, &even, &odd);
    even = SHUFFLE(values, even);
    odd = SHUFFLE(values, odd);
    const bytes first = LOW_BYTES(even, odd), second = HIGH_BYTES(even, odd);  // steps 0, 1 and 4, 5; 2, 3 and 6, 7
    const bytes low = LOW_WORDS(first, second), high = HIGH_WORDS(first, second);
    for (size_t i = 0; i < n; i++) {
      const bytes factors = load_bytes(rows[i].all + s * CHUNK_BYTES);
      sums[i][0] = add_products(sums[i][0], low, factors);
      sums[i][1] = add_products(sums[i][1], high, factors);
    }
  }
  for (size_t i = 0; i < n; i++) finish(&rows[i], table, eight_sums(sums[i][0], sums[i][1]), out + i * stride);
}

INLINE void mix_rows(const qkv_code_matrix *m, unsigned bits, const mix_bytes *table, const row_bytes *rows, size_t n,
                     float *out, size_t stride) {
  const size_t block_bytes = m->steps * bits, chunks = m->steps / CHUNK;
  const uint8_t *codes = m->codes;
  for (size_t lane = 0; lane < m->lanes; lane += QKV_MIX_LANES, codes += block_bytes)
    mix_eight(codes, bits, chunks, table, rows, n, out + lane, stride);
}

INLINE void mix_bits(const qkv_code_matrix *m, unsigned bits, const float *factors, size_t n, float *out,
                     size_t stride) {
  row_bytes rows[ROWS];
  mix_bytes table;
  mix_bytes_plain(m, &table);
  for (size_t i = 0; i < n; i += ROWS) {
    const size_t count = n - i < ROWS ? n - i : ROWS;
    for (size_t j = 0; j < count; j++) round_row(factors + (i + j) * m->steps, m->steps, &rows[j]);
    if (count == ROWS) mix_rows(m, bits, &table, rows, ROWS, out + i * stride, stride);
    for (size_t j = 0; count < ROWS && j < count; j++)
      mix_rows(m, bits, &table, rows + j, 1, out + (i + j) * stride, stride);
  }
}

QKV_DECLARE_MIX(VARIANT(qkvi_mix_integer)) {
  switch (matrix->bits) {
    case 1:
      mix_bits(matrix, 1, factors, n, out, stride);
      break;
    case 2:
      mix_bits(matrix, 2, factors, n, out, stride);
      break;
    case 3:
      mix_bits(matrix, 3, factors, n, out, stride);
      break;
    default:
      mix_bits(matrix, 4, factors, n, out, stride);
  }
}
