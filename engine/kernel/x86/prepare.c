// Queries to bytes, in vectors where there are 16 lanes: integer_plain.h says what.
#include <assert.h>

#include "engine/kernel/integer_plain.h"
#include "engine/kernel/kernel.h"
#include "engine/kernel/x86/interleave.h"
#include "engine/kernel/x86/twins.h"

#if LANES == 16
enum { QUADS = SIXTY_FOUR / 4, SIXTY_FOUR_BLOCKS = SIXTY_FOUR / QKVI_BLOCK_WIDTH };

// Which of 16 lanes from `at` on are below `dim`.
INLINE __mmask16 lanes_below(size_t at, size_t dim) {
  return at + LANES <= dim ? 0xffff : at >= dim ? 0 : (__mmask16)((1u << (dim - at)) - 1);
}

INLINE __m512 load_some(const float *row, size_t at, size_t dim) {
  return _mm512_maskz_loadu_ps(lanes_below(at, dim), row + at);
}

static float largest_in(const float *row, size_t dim) {
  __m512 largest = _mm512_setzero_ps();
  for (size_t at = 0; at < dim; at += LANES) {
    largest = _mm512_max_ps(largest, _mm512_abs_ps(load_some(row, at, dim)));
  }
  return _mm512_reduce_max_ps(largest);
}

// 64 numbers from `at` on times `factor`, rounded.
INLINE sixty_four round_some(const float *row, size_t at, size_t dim, float factor) {
  sixty_four out;
  UNROLL
  for (size_t i = 0; i < SIXTY_FOUR_VECTORS; i++) {
    const lanes all = (lanes)load_some(row, at + i * LANES, dim);
    out.whole[i] = (words)(all * factor + QKVI_WHOLE_MAGIC);
  }
  return out;
}

// The sums of 64 signed bytes by block.
INLINE void block_sums(bytes all, int32_t sums[SIXTY_FOUR_BLOCKS]) {
  const bytes ones = _mm512_set1_epi8(1);
#if BYTE_DOTS
  bytes sum = _mm512_dpbusd_epi32(_mm512_setzero_si512(), ones, all);
#else
  bytes sum = _mm512_madd_epi16(_mm512_maddubs_epi16(ones, all), _mm512_set1_epi16(1));
#endif
  sum = (bytes)((words)sum + (words)_mm512_shuffle_epi32(sum, 0xb1));
  sum = (bytes)((words)sum + (words)_mm512_shuffle_epi32(sum, 0x4e));
  int32_t four_each[LANES];
  memcpy(four_each, &sum, sizeof four_each);
  for (size_t i = 0; i < SIXTY_FOUR_BLOCKS; i++) sums[i] = four_each[4 * i];
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

// qkv_integer_queries.wide, with the first bytes from coordinate `at` on.
INLINE void count_wide(const preparing *p, bytes first, size_t at) {
  const uint64_t used = _mm512_test_epi8_mask(first, first);
  if (used == 0) return;
  const size_t blocks = (at + 63 - (size_t)__builtin_clzll(used)) / QKVI_BLOCK_WIDTH + 1;
  if (blocks > *p->wide) *p->wide = blocks;
}

// Coordinates [at, at + 64) of a chunk; `columns` and `parts` are constants.
INLINE void prepare_some(const preparing *p, size_t at, size_t columns, unsigned parts) {
  bytes all[QKV_INTEGER_COLUMNS];
  UNROLL
  for (size_t row = 0; row < columns / parts; row++) {
    if (row >= p->rows_count) {
      for (unsigned i = 0; i < parts; i++) all[row * parts + i] = _mm512_setzero_si512();
      continue;
    }
    sixty_four whole = round_some(p->rows + row * p->dim, at, p->dim, p->factors[row]);
    all[row * parts + parts - 1] = pack_bytes(&whole, false);
    if (parts == 1) continue;
    UNROLL
    for (size_t i = 0; i < SIXTY_FOUR_VECTORS; i++) whole.whole[i] += 128;
    all[row * parts] = pack_bytes(&whole, true);
    count_wide(p, all[row * parts], at);
  }
  const size_t block = at / QKVI_BLOCK_WIDTH, blocks = p->length / QKVI_BLOCK_WIDTH;
  UNROLL
  for (size_t column = 0; column < columns; column++) {
    int32_t sums[SIXTY_FOUR_BLOCKS], *offsets = p->offsets + block * columns + column;
    block_sums(all[column], sums);
    for (size_t i = 0; i < SIXTY_FOUR_BLOCKS && block + i < blocks; i++) {
      offsets[(i + 1) * columns] = offsets[i * columns] - 128 * sums[i];
    }
  }
  uint8_t *out = (uint8_t *)p->bytes + at * columns;
  if (at + SIXTY_FOUR <= p->length) {
    put_interleaved(all, columns, out);
  } else {
    uint8_t room[QKV_INTEGER_COLUMNS * SIXTY_FOUR];
    put_interleaved(all, columns, room);
    memcpy(out, room, (p->length - at) * columns);
  }
}

INLINE void prepare_chunk_of(const preparing *p, size_t columns, unsigned parts) {
  for (size_t column = 0; column < columns; column++) p->offsets[column] = 0;
  for (size_t at = 0; at < p->length; at += SIXTY_FOUR) prepare_some(p, at, columns, parts);
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

QKV_DECLARE_PREPARE(TWIN(qkvi_prepare)) {
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
#else
QKV_DECLARE_PREPARE(TWIN(qkvi_prepare)) {
  prepare_plain(rows, n, dim, limit, queries);
}
#endif
