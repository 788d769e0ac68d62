// Queries to bytes, in vectors: integer_plain.h says what.
#include <assert.h>

#include "engine/kernel/integer_plain.h"
#include "engine/kernel/kernel.h"
#include "engine/kernel/x86/interleave.h"
#include "engine/kernel/x86/variants.h"

// Coordinates that are taken at once: a vector of bytes.
enum {
  AT_ONCE = (int)sizeof(bytes),
  AT_ONCE_VECTORS = AT_ONCE / LANES,
};

#if LANES == 16
// Which of 16 lanes from `at` on are below `dim`.
INLINE __mmask16 lanes_below(size_t at, size_t dim) {
  return at + LANES <= dim ? 0xffff : at >= dim ? 0 : (__mmask16)((1u << (dim - at)) - 1);
}

INLINE lanes load_some(const float *row, size_t at, size_t dim) {
  return (lanes)_mm512_maskz_loadu_ps(lanes_below(at, dim), row + at);
}

INLINE uint64_t used_bytes(bytes all) {
  return _mm512_test_epi8_mask(all, all);
}

INLINE bytes pack_some(const words whole[AT_ONCE_VECTORS], bool next) {
  sixty_four row;
  memcpy(row.whole, whole, sizeof row.whole);
  return pack_bytes(&row, next);
}

// A number's first byte of two, and its second.
INLINE void pack_both(words whole[AT_ONCE_VECTORS], bytes *first, bytes *second) {
  *second = pack_some(whole, false);
  UNROLL
  for (size_t i = 0; i < AT_ONCE_VECTORS; i++) whole[i] += 128;
  *first = pack_some(whole, true);
}

INLINE float largest_lane(lanes all) {
  return _mm512_reduce_max_ps((__m512)all);
}

INLINE lanes larger(lanes a, lanes b) {
  return (lanes)_mm512_max_ps((__m512)a, (__m512)b);
}
#else
// Widths are multiples of the lanes.
INLINE lanes load_some(const float *row, size_t at, size_t dim) {
  return at < dim ? load_lanes(row + at) : (lanes){0};
}

INLINE uint64_t used_bytes(bytes all) {
  return (uint32_t)~_mm256_movemask_epi8(_mm256_cmpeq_epi8(all, _mm256_setzero_si256()));
}

// The lower bytes of 32 numbers of 16 bits in order, given as vectors 0 and 1 and 2 and 3 by halves.
INLINE bytes pack_words(bytes a, bytes b) {
  return _mm256_permutevar8x32_epi32(_mm256_packus_epi16(a, b), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

// The lowest 16 bits of 32 numbers, as pack_words takes them.
INLINE void narrow_some(const words whole[AT_ONCE_VECTORS], bytes *a, bytes *b) {
  bytes v[AT_ONCE_VECTORS];
  UNROLL
  for (size_t i = 0; i < AT_ONCE_VECTORS; i++) v[i] = (bytes)(whole[i] & 0xffff);
  *a = _mm256_packus_epi32(v[0], v[1]);
  *b = _mm256_packus_epi32(v[2], v[3]);
}

INLINE bytes low_bytes(bytes all) {
  return _mm256_and_si256(all, _mm256_set1_epi16(0xff));
}

// The lowest byte of each of 32 numbers, in order.
INLINE bytes pack_some(const words whole[AT_ONCE_VECTORS], bool next) {
  (void)next;
  bytes a, b;
  narrow_some(whole, &a, &b);
  return pack_words(low_bytes(a), low_bytes(b));
}

INLINE void pack_both(words whole[AT_ONCE_VECTORS], bytes *first, bytes *second) {
  const bytes half = _mm256_set1_epi16(128);
  bytes a, b;
  narrow_some(whole, &a, &b);
  *second = pack_words(low_bytes(a), low_bytes(b));
  *first = pack_words(down(_mm256_add_epi16(a, half), 8), down(_mm256_add_epi16(b, half), 8));
}

INLINE float largest_lane(lanes all) {
  __m128 most = _mm_max_ps(_mm256_castps256_ps128((__m256)all), _mm256_extractf128_ps((__m256)all, 1));
  most = _mm_max_ps(most, _mm_movehl_ps(most, most));
  return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
}

INLINE lanes larger(lanes a, lanes b) {
  return (lanes)_mm256_max_ps((__m256)a, (__m256)b);
}
#endif

static float largest_in(const float *row, size_t dim) {
  lanes largest = {0};
  size_t at = 0;
  for (; at + AT_ONCE <= dim; at += AT_ONCE) {
    UNROLL
    for (size_t i = 0; i < AT_ONCE_VECTORS; i++) {
      const words magnitude = (words)load_lanes(row + at + i * LANES) & INT32_MAX;
      largest = larger(largest, (lanes)magnitude);
    }
  }
  for (; at < dim; at += LANES) {
    const words magnitude = (words)load_some(row, at, dim) & INT32_MAX;
    largest = larger(largest, (lanes)magnitude);
  }
  return largest_lane(largest);
}

// Numbers from `at` on times `factor`, rounded, in the lowest bits. `whole_row`: there are AT_ONCE of them.
INLINE void round_some(const float *row, size_t at, size_t dim, bool whole_row, float factor,
                       words whole[AT_ONCE_VECTORS]) {
  UNROLL
  for (size_t i = 0; i < AT_ONCE_VECTORS; i++) {
    const lanes all = whole_row ? load_lanes(row + at + i * LANES) : load_some(row, at + i * LANES, dim);
    whole[i] = (words)(all * factor + QKVI_WHOLE_MAGIC);
  }
}

// What a chunk is made from and what it becomes.
typedef struct preparing {
  const float *rows;  // [rows][dim]
  size_t dim, length, rows_count;
  float factors[QKV_INTEGER_COLUMNS];
  int8_t *bytes;
  int32_t *offsets;
  size_t *wide;
} preparing;

// qkv_integer_queries.wide, with the first bytes from coordinate `at` on, of all rows together.
INLINE void count_wide(const preparing *p, bytes first, size_t at) {
  const uint64_t used = used_bytes(first);
  if (used == 0) return;
  const size_t blocks = (at + 63 - (size_t)__builtin_clzll(used)) / QKVI_BLOCK_WIDTH + 1;
  if (blocks > *p->wide) *p->wide = blocks;
}

// Coordinates [at, at + AT_ONCE) of a chunk; `columns`, `parts` and `whole_rows` are constants.
INLINE void prepare_some(const preparing *p, size_t at, size_t columns, unsigned parts, bool whole_rows) {
  bytes all[QKV_INTEGER_COLUMNS], first = (bytes)(words){0};
  UNROLL
  for (size_t row = 0; row < columns / parts; row++) {
    if (row >= p->rows_count) {
      for (unsigned i = 0; i < parts; i++) all[row * parts + i] = (bytes)(words){0};
      continue;
    }
    words whole[AT_ONCE_VECTORS];
    round_some(p->rows + row * p->dim, at, p->dim, whole_rows, p->factors[row], whole);
    if (parts == 1) {
      all[row] = pack_some(whole, false);
    } else {
      pack_both(whole, &all[row * parts], &all[row * parts + 1]);
      first |= all[row * parts];
    }
  }
  if (parts > 1) count_wide(p, first, at);
  uint8_t *out = (uint8_t *)p->bytes + at * columns;
  if (whole_rows || at + AT_ONCE <= p->length) {
    put_interleaved(all, columns, out);
  } else {
    uint8_t buffer[QKV_INTEGER_COLUMNS * AT_ONCE];
    put_interleaved(all, columns, buffer);
    memcpy(out, buffer, (p->length - at) * columns);
  }
}

// ---- Offsets ----

typedef int32_t eight_words __attribute__((vector_size(32)));

// Adds signed bytes by fours.
INLINE __m256i add_fours(__m256i sum, __m256i all) {
  const __m256i ones = _mm256_set1_epi8(1);
#if BYTE_DOTS
  return _mm256_dpbusd_epi32(sum, ones, all);
#else
  return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(ones, all), _mm256_set1_epi16(1)));
#endif
}

// The sums of the bytes of each column of a block, [number / 4][column][4], in the first lanes; a constant number.
INLINE eight_words block_sums(const uint8_t *block, size_t columns) {
  __m256i sum = _mm256_setzero_si256();
  if (columns == 1)
    return (eight_words)add_fours(sum, _mm256_zextsi128_si256(_mm_loadu_si128((const __m128i *)block)));
  UNROLL
  for (size_t at = 0; at < columns * QKVI_BLOCK_WIDTH; at += sizeof sum) {
    sum = add_fours(sum, _mm256_loadu_si256((const __m256i *)(block + at)));
  }
  return (eight_words)sum;
}

// From the bytes that have been put.
INLINE void put_offsets_of(const preparing *p, size_t columns) {
  const uint8_t *block = (const uint8_t *)p->bytes;
  int32_t *offsets = p->offsets;
  eight_words total = {0};
  const size_t blocks = p->length / QKVI_BLOCK_WIDTH;
  memset(offsets, 0, columns * sizeof *offsets);
  for (size_t b = 0; b < blocks; b++, block += columns * QKVI_BLOCK_WIDTH) {
    eight_words sum = block_sums(block, columns);
    if (columns <= 4) sum += __builtin_shufflevector(sum, sum, 4, 5, 6, 7, 0, 1, 2, 3);
    if (columns <= 2) sum += __builtin_shufflevector(sum, sum, 2, 3, 0, 1, 6, 7, 4, 5);
    if (columns <= 1) sum += __builtin_shufflevector(sum, sum, 1, 0, 3, 2, 5, 4, 7, 6);
    total -= sum * 128;
    offsets += columns;
    memcpy(offsets, &total, columns * sizeof *offsets);
  }
}

INLINE void prepare_chunk_of(const preparing *all, size_t columns, unsigned parts) {
  const preparing copy = *all, *p = &copy;  // which stored bytes cannot alias
  size_t at = 0;
  for (; at + AT_ONCE <= p->dim; at += AT_ONCE) prepare_some(p, at, columns, parts, true);
  for (; at < p->length; at += AT_ONCE) prepare_some(p, at, columns, parts, false);
  put_offsets_of(p, columns);
}

static void prepare_chunk(const preparing *p, size_t columns, unsigned parts) {
#define CASE(COLUMNS, PARTS)                      \
  if (columns == (COLUMNS) && parts == (PARTS)) { \
    prepare_chunk_of(p, COLUMNS, PARTS);          \
    return;                                       \
  }
  CASE(1, 1)
  CASE(2, 1)
  CASE(4, 1)
  CASE(8, 1)
  CASE(2, 2)
  CASE(4, 2)
  CASE(8, 2)
#undef CASE
}

QKV_DECLARE_PREPARE(VARIANT(qkvi_prepare)) {
  const unsigned parts = qkvi_parts_of(limit);
  const size_t length = qkvi_column_bytes(dim), blocks = length / QKVI_BLOCK_WIDTH;
  queries->wide = 0;
  queries->count = n;
  queries->parts = parts;
  queries->dim = dim;
  for (qkvi_chunk chunk = {0}; chunk.first + chunk.rows < n;) {
    chunk = qkvi_chunk_at(chunk.first + chunk.rows, n, parts);
    preparing p = {.rows = rows + chunk.first * dim,
                   .dim = dim,
                   .length = length,
                   .rows_count = chunk.rows,
                   .wide = &queries->wide,
                   .bytes = queries->bytes + chunk.first * parts * length,
                   .offsets = queries->offsets + chunk.first * parts * (blocks + 1)};
    for (size_t row = 0; row < chunk.rows; row++) {
      const float top = largest_in(p.rows + row * dim, dim);
      const bool counts = top >= QKVI_NUMBER_LEAST;
      p.factors[row] = counts ? limit / top : 0;
      queries->scales[chunk.first + row] = counts ? top / limit * qkvi_integers.step : 0;
    }
    prepare_chunk(&p, chunk.columns, parts);
  }
}
