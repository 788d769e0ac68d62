// Encoding with VBMI and VNNI where coordinates count alike and none has more than four bits. The 16 rows of a group
// lie side by side, one coordinate a vector: the steps of a Hadamard transform meet whole vectors, sums over
// coordinates leave one number a row, and t of four coordinates become one vector of bytes, [row][coordinate], the
// shape that both dot products and slabs of keys want. Sums of t K and K K are whole numbers below 2^24, so the order
// in which the reference takes them makes no difference.
#ifndef QKV_ENGINE_KERNEL_X86_ENCODE_COLUMNS_H
#define QKV_ENGINE_KERNEL_X86_ENCODE_COLUMNS_H

#include <assert.h>
#include <stdbool.h>

#include "engine/kernel/encode_plain.h"
#include "engine/kernel/x86/bytes.h"
#include "engine/kernel/x86/encode_pack.h"

#if defined(__AVX2__)
enum { COLUMNS_MAX = 512 };  // 512 * 255 * 88 is less than 2^24

static bool columns_can(const uint16_t *reach, const float *weights) {
  return BYTE_DOTS && weights == NULL && reach[SHALLOW_MAX + 1] == 0 && reach[1] > 0 && reach[1] <= COLUMNS_MAX;
}

#if BYTE_DOTS
enum { QUAD = 4, QUADS_MAX = COLUMNS_MAX / QUAD, BLOCK_QUADS = QKVI_BLOCK_WIDTH / QUAD };

typedef struct columns {
  _Alignas(64) float x[COLUMNS_MAX + QKV_BAND][GROUP];  // whole blocks
} columns;

// ---- Rows to columns ----

// Lane i and i + 8, then 4, 2 and 1 apart, are added; destroys them.
INLINE void add_halves(__m512 sums[SUM_LANES], each *out) {
  for (size_t half = SUM_LANES / 2; half > 0; half /= 2) {
    for (size_t i = 0; i < half; i++) sums[i] = _mm512_add_ps(sums[i], sums[i + half]);
  }
  *out = (each)sums[0];
}

// 16 coordinates of 16 rows as columns, by quarters of vectors and then within them; those of the mask.
INLINE void columns_of_block(const float *rows, size_t dim, __mmask16 mask, __m512 x[QKVI_BLOCK_WIDTH]) {
  __m512 quarters[4][4];  // [quarter of coordinates][row % 4]: rows i, i + 4, i + 8, i + 12
  UNROLL
  for (size_t i = 0; i < 4; i++) {
    bytes v[4];
    UNROLL
    for (size_t j = 0; j < 4; j++) v[j] = _mm512_castps_si512(_mm512_maskz_loadu_ps(mask, rows + (i + 4 * j) * dim));
    const block_fields met = fields_of_quarters(v);
    UNROLL
    for (size_t q = 0; q < 4; q++) quarters[q][i] = _mm512_castsi512_ps(met.of[q]);
  }
  UNROLL
  for (size_t q = 0; q < 4; q++) {
    const __m512 *v = quarters[q];
    const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(v[0], v[1]));
    const __m512d b = _mm512_castps_pd(_mm512_unpackhi_ps(v[0], v[1]));
    const __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(v[2], v[3]));
    const __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(v[2], v[3]));
    x[4 * q] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
    x[4 * q + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
    x[4 * q + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
    x[4 * q + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
  }
}

// The first `coordinates`, a multiple of 8, of 16 rows, and the sums of their squares.
static void columns_of_rows(const float *rows, size_t dim, size_t coordinates, columns *out, each *squares) {
  __m512 sums[SUM_LANES] = {0};
  for (size_t c = 0; c < coordinates; c += QKVI_BLOCK_WIDTH) {
    const __mmask16 mask = c + QKVI_BLOCK_WIDTH <= coordinates ? 0xffff : 0x00ff;
    __m512 x[QKVI_BLOCK_WIDTH];
    columns_of_block(rows + c, dim, mask, x);
    UNROLL_16
    for (size_t i = 0; i < QKVI_BLOCK_WIDTH; i++) {
      sums[i] = _mm512_add_ps(sums[i], _mm512_mul_ps(x[i], x[i]));
      _mm512_store_ps(out->x[c + i], x[i]);
    }
  }
  add_halves(sums, squares);
}

// ---- t and centroids ----

// Of four coordinates at one depth, for each scale: what t below 128 gives, and t from 128 to 191. From there on it
// is the outermost centroid.
typedef struct unit_tables {
  bytes low[QKVI_SCALES][2], high[QKVI_SCALES];
} unit_tables;

INLINE void load_unit_tables(unsigned depth, unit_tables *out) {
  UNROLL
  for (size_t s = 0; s < QKVI_SCALES; s++) {
    const uint8_t *table = qkvi_integers.units[s][depth];
    assert(table[191] == table[255]);
    out->low[s][0] = load_bytes(table);
    out->low[s][1] = load_bytes(table + 64);
    out->high[s] = load_bytes(table + 128);
  }
}

// What is tried of a group, four coordinates after the other, [row][coordinate].
typedef struct tried_group {
  _Alignas(64) uint8_t units[QUADS_MAX][QKVI_SCALES][64];
  uint64_t negative[QUADS_MAX];
} tried_group;

// Bytes [i][j] of quarters become [j][i].
INLINE bytes turn_quarters(bytes all) {
  return _mm512_shuffle_epi8(
      all, _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)));
}

// t of four coordinates and which of them are negative.
INLINE bytes t_of_quad(const float (*x)[GROUP], __m512 inverse, __mmask64 *negative) {
  __m512i bits[QUAD], t[QUAD];
  UNROLL
  for (size_t i = 0; i < QUAD; i++) {
    const __m512 column = _mm512_load_ps(x[i]);
    bits[i] = _mm512_castps_si512(column);
    t[i] = _mm512_cvtps_epi32(_mm512_mul_ps(column, inverse));
  }
  // What is too large becomes -32768, which has no opposite.
  const __m512i least = _mm512_set1_epi16(-32767);
  const __m512i low = _mm512_abs_epi16(_mm512_max_epi16(_mm512_packs_epi32(t[0], t[1]), least));
  const __m512i high = _mm512_abs_epi16(_mm512_max_epi16(_mm512_packs_epi32(t[2], t[3]), least));
  const __m512i signs =
      _mm512_packs_epi16(_mm512_packs_epi32(bits[0], bits[1]), _mm512_packs_epi32(bits[2], bits[3]));
  *negative = _mm512_movepi8_mask(turn_quarters(signs));
  return turn_quarters(_mm512_packus_epi16(low, high));
}

static void try_columns(const uint16_t *reach, const columns *all, const each *inverse, tried_group *tried,
                        group_sums *sums) {
  const __m512 scale = (__m512)*inverse;
  bytes with_row[QKVI_SCALES], with_itself[QKVI_SCALES];
  for (size_t s = 0; s < QKVI_SCALES; s++) with_row[s] = with_itself[s] = _mm512_setzero_si512();
  for (unsigned depth = SHALLOW_MAX; depth >= 1; depth--) {
    if (reach[depth + 1] == reach[depth]) continue;
    unit_tables units;
    load_unit_tables(depth, &units);
    for (size_t q = reach[depth + 1] / QUAD; q < reach[depth] / QUAD; q++) {
      __mmask64 negative;
      const bytes t = t_of_quad(all->x + q * QUAD, scale, &negative);
      const bytes index = _mm512_min_epu8(t, _mm512_set1_epi8((char)191));
      const __mmask64 upper = _mm512_movepi8_mask(t);
      tried->negative[q] = negative;
      UNROLL
      for (size_t s = 0; s < QKVI_SCALES; s++) {
        const bytes low = _mm512_permutex2var_epi8(units.low[s][0], index, units.low[s][1]);
        const bytes k = _mm512_mask_permutexvar_epi8(low, upper, index, units.high[s]);
        with_row[s] = _mm512_dpbusd_epi32(with_row[s], t, k);
        with_itself[s] = _mm512_dpbusd_epi32(with_itself[s], k, k);
        _mm512_store_si512(tried->units[q][s], k);
      }
    }
  }
  for (size_t s = 0; s < QKVI_SCALES; s++) {
    sums->with_row[s] = (each)_mm512_cvtepi32_ps(with_row[s]);
    sums->with_itself[s] = (each)_mm512_cvtepi32_ps(with_itself[s]);
  }
}

// ---- Codes ----

// Which of the rows have the second and the third scale, and which are not zero.
typedef struct chosen_rows {
  __mmask16 second, third, coded;
} chosen_rows;

INLINE chosen_rows rows_of_choice(const group_choice *choice) {
  const __m128i scales = _mm_loadu_si128((const __m128i *)choice->scales);
  const __m128i zero = _mm_loadu_si128((const __m128i *)choice->zero);
  return (chosen_rows){.second = _mm_cmpeq_epi8_mask(scales, _mm_set1_epi8(1)),
                       .third = _mm_cmpeq_epi8_mask(scales, _mm_set1_epi8(2)),
                       .coded = _mm_cmpeq_epi8_mask(zero, _mm_setzero_si128())};
}

// [row][coordinate], at full depth.
INLINE bytes code_quad(const tried_group *tried, size_t q, const chosen_rows *rows, bytes low, bytes high) {
  bytes k = _mm512_load_si512(tried->units[q][0]);
  k = _mm512_mask_mov_epi32(k, rows->second, _mm512_load_si512(tried->units[q][1]));
  k = _mm512_mask_mov_epi32(k, rows->third, _mm512_load_si512(tried->units[q][2]));
  const bytes cell = _mm512_permutex2var_epi8(low, k, high), signs = _mm512_movm_epi8(tried->negative[q]);
  return _mm512_maskz_xor_epi32(rows->coded, cell, signs);
}

static void code_columns(const uint16_t *reach, const tried_group *tried, const group_choice *choice,
                         uint8_t (*codes)[64]) {
  const chosen_rows rows = rows_of_choice(choice);
  for (unsigned depth = SHALLOW_MAX; depth >= 1; depth--) {
    const bytes low = load_bytes(qkvi_integers.codes[depth]), high = load_bytes(qkvi_integers.codes[depth] + 64);
    for (size_t q = reach[depth + 1] / QUAD; q < reach[depth] / QUAD; q++) {
      _mm512_store_si512(codes[q], code_quad(tried, q, &rows, low, high));
    }
  }
}

INLINE block_fields fields_of_quads(qkv_part part, const bytes quads[BLOCK_QUADS]) {
  bytes turned[BLOCK_QUADS];
  if (part == QKV_K) return (block_fields){{quads[0], quads[1], quads[2], quads[3]}};
  UNROLL
  for (size_t i = 0; i < BLOCK_QUADS; i++) turned[i] = turn_quarters(quads[i]);
  return fields_of_quarters(turned);
}

// Where all coordinates have four bits, whole slabs of pair 0 and then of pair 1 follow each other.
static bool all_fours(const uint16_t *reach) {
  return reach[SHALLOW_MAX] == reach[1] && reach[1] % QKVI_BLOCK_WIDTH == 0;
}

// `part` is a constant.
INLINE void pack_fours(qkv_part part, size_t coordinates, const tried_group *tried, const group_choice *choice,
                       uint8_t *group) {
  enum { SLAB = 64 };
  const chosen_rows rows = rows_of_choice(choice);
  const uint8_t *table = qkvi_integers.codes[SHALLOW_MAX];
  const bytes low = load_bytes(table), high = load_bytes(table + 64);
  for (size_t i = 0; i < coordinates / QKVI_BLOCK_WIDTH; i++) {
    bytes quads[BLOCK_QUADS];
    UNROLL
    for (size_t j = 0; j < BLOCK_QUADS; j++) quads[j] = code_quad(tried, i * BLOCK_QUADS + j, &rows, low, high);
    const block_fields fields = fields_of_quads(part, quads);
    pack_slab(&fields, 0, true, 0, group + i * SLAB);
    pack_slab(&fields, 1, true, 0, group + coordinates * SLAB / QKVI_BLOCK_WIDTH + i * SLAB);
  }
}

// What is left of a section behind its slabs of 64 bytes: slabs of 32 and 16.
static uint8_t *pack_quads_rest(qkv_part part, unsigned pair, bool wide, const uint8_t (*codes)[64],
                                size_t coordinates, uint8_t *slab) {
  const __m512i dwords = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  for (unsigned width = 2; width > 0; width /= 2) {
    const size_t here = (wide ? 4u : 8u) * width;
    if (here > coordinates) continue;
    _Alignas(64) qkvi_codes by_coordinate[QKVI_BLOCK_WIDTH];
    for (size_t q = 0; q < here / QUAD; q++) {
      const bytes turned = turn_quarters(load_bytes(codes[q]));
      _mm512_store_si512(by_coordinate[q * QUAD], _mm512_permutexvar_epi32(dwords, turned));
    }
    qkvi_pack_slab(part, pair, wide, width, (const qkvi_codes *)by_coordinate, slab);
    codes += here / QUAD;
    coordinates -= here;
    slab += (size_t)GROUP * width;
  }
  return slab;
}

// 16 coordinates of a slab of 64 bytes.
INLINE void pack_quads(qkv_part part, unsigned pair, bool wide, unsigned half, const uint8_t (*codes)[64],
                       uint8_t *slab) {
  bytes quads[BLOCK_QUADS];
  UNROLL
  for (size_t i = 0; i < BLOCK_QUADS; i++) quads[i] = load_bytes(codes[i]);
  const block_fields fields = fields_of_quads(part, quads);
  pack_slab(&fields, pair, wide, half, slab);
}

// A section of pair `pair`, which as `wide` is a constant: coordinates [begin, end). Returns where the next one is.
INLINE uint8_t *pack_section_of_quads(qkv_part part, unsigned pair, bool wide, const uint8_t (*codes)[64],
                                      size_t begin, size_t end, uint8_t *slab) {
  enum { SLAB = 64 };
  const size_t here = wide ? QKVI_BLOCK_WIDTH : 2 * QKVI_BLOCK_WIDTH;
  for (; begin + here <= end; begin += here, slab += SLAB) {
    pack_quads(part, pair, wide, 0, codes + begin / QUAD, slab);
    if (!wide) pack_quads(part, pair, wide, 1, codes + begin / QUAD + BLOCK_QUADS, slab);
  }
  return begin < end ? pack_quads_rest(part, pair, wide, codes + begin / QUAD, end - begin, slab) : slab;
}

static void pack_columns(qkv_part part, const uint16_t *reach, const tried_group *tried, const group_choice *choice,
                         uint8_t *group) {
  _Alignas(64) uint8_t room[QUADS_MAX][64];
  const uint8_t(*codes)[64] = (const uint8_t(*)[64])room;
  code_columns(reach, tried, choice, room);
  group = pack_section_of_quads(part, 0, true, codes, 0, reach[2], group);
  group = pack_section_of_quads(part, 0, false, codes, reach[2], reach[1], group);
  group = pack_section_of_quads(part, 1, true, codes, 0, reach[4], group);
  (void)pack_section_of_quads(part, 1, false, codes, reach[4], reach[3], group);
}
#endif
#endif
#endif
