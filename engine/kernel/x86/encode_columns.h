// Encoding where coordinates count alike and none has more than four bits. The 16 rows of a group lie side by side,
// a coordinate of all of them in a vector or two: the steps of a Hadamard transform meet whole vectors, sums over
// coordinates leave one number a row, and t of four coordinates become bytes [row][coordinate], the shape that both
// dot products and slabs of keys want. Sums of t K and K K are whole numbers below 2^24, so the order in which the
// reference takes them makes no difference.
//
// With VBMI centroids are looked up by t, and codes by centroids; without it cells are searched, bit by bit in
// look-ups of 16 bytes, and centroids and codes are looked up by cells.
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
  return weights == NULL && reach[SHALLOW_MAX + 1] == 0 && reach[1] > 0 && reach[1] <= COLUMNS_MAX;
}

enum { QUAD = 4, QUADS_MAX = COLUMNS_MAX / QUAD, BLOCK_QUADS = QKVI_BLOCK_WIDTH / QUAD, SLAB = 64 };

// The operation of this width.
#if LANES == 16
#define SIMD(operation) _mm512_##operation
#else
#define SIMD(operation) _mm256_##operation
#endif

typedef struct columns {
  _Alignas(64) float x[COLUMNS_MAX + QKV_BAND][GROUP];  // whole blocks
} columns;

// ---- Rows to columns ----

// Lane i and i + 8, then 4, 2 and 1 apart, are added; destroys them.
INLINE void add_halves(lanes sums[SUM_LANES], float *out) {
  for (size_t half = SUM_LANES / 2; half > 0; half /= 2) {
    for (size_t i = 0; i < half; i++) sums[i] += sums[i + half];
  }
  store_lanes(out, sums[0]);
}

#if LANES == 16
// 16 coordinates, or the first eight of them, of LANES rows as columns, by quarters of vectors and then within them.
INLINE void columns_of_block(const float *rows, size_t dim, bool whole, lanes x[QKVI_BLOCK_WIDTH]) {
  const __mmask16 mask = whole ? 0xffff : 0x00ff;
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
    x[4 * q] = (lanes)_mm512_unpacklo_pd(a, c);
    x[4 * q + 1] = (lanes)_mm512_unpackhi_pd(a, c);
    x[4 * q + 2] = (lanes)_mm512_unpacklo_pd(b, d);
    x[4 * q + 3] = (lanes)_mm512_unpackhi_pd(b, d);
  }
}
#else
// 16 coordinates, or the first eight of them, of LANES rows as columns.
INLINE void columns_of_block(const float *rows, size_t dim, bool whole, lanes x[QKVI_BLOCK_WIDTH]) {
  transpose_eight(rows, dim, (float *)x, LANES);
  if (whole) {
    transpose_eight(rows + LANES, dim, (float *)(x + LANES), LANES);
  } else {
    memset(x + LANES, 0, LANES * sizeof *x);
  }
}
#endif

// The first `coordinates`, a multiple of 8, of 16 rows, and the sums of their squares.
static void columns_of_rows(const float *rows, size_t dim, size_t coordinates, columns *out, each squares) {
  for (size_t first = 0; first < GROUP; first += LANES) {
    lanes sums[SUM_LANES] = {0};
    for (size_t c = 0; c < coordinates; c += QKVI_BLOCK_WIDTH) {
      lanes x[QKVI_BLOCK_WIDTH];
      columns_of_block(rows + first * dim + c, dim, c + QKVI_BLOCK_WIDTH <= coordinates, x);
      UNROLL_16
      for (size_t i = 0; i < QKVI_BLOCK_WIDTH; i++) {
        sums[i] += x[i] * x[i];
        store_lanes(out->x[c + i] + first, x[i]);
      }
    }
    add_halves(sums, squares + first);
  }
}

// ---- t ----

// Which bytes are negative.
#if LANES == 16
typedef __mmask64 byte_signs;
#else
typedef bytes byte_signs;  // all ones where they are
#endif

INLINE byte_signs signs_of(bytes all) {
#if LANES == 16
  return _mm512_movepi8_mask(all);
#else
  return _mm256_cmpgt_epi8(_mm256_setzero_si256(), all);
#endif
}

INLINE bytes bytes_of_signs(byte_signs signs) {
#if LANES == 16
  return _mm512_movm_epi8(signs);
#else
  return signs;
#endif
}

// Bytes [i][j] of quarters become [j][i].
INLINE bytes turn_quarters(bytes all) {
  const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
#if LANES == 16
  return _mm512_shuffle_epi8(all, _mm512_broadcast_i32x4(order));
#else
  return _mm256_shuffle_epi8(all, _mm256_broadcastsi128_si256(order));
#endif
}

// t of four coordinates of LANES rows, the first of which is row `first`, and which of them are negative.
INLINE bytes t_of_quad(const float (*x)[GROUP], size_t first, lanes inverse, byte_signs *negative) {
  bytes bits[QUAD], t[QUAD];
  UNROLL
  for (size_t i = 0; i < QUAD; i++) {
    const lanes column = load_lanes(x[i] + first);
    bits[i] = (bytes)column;
    t[i] = SIMD(cvtps_epi32)(column * inverse);
  }
  // What is too large becomes -32768, which has no opposite.
  const bytes least = SIMD(set1_epi16)(-32767);
  const bytes low = SIMD(abs_epi16)(SIMD(max_epi16)(SIMD(packs_epi32)(t[0], t[1]), least));
  const bytes high = SIMD(abs_epi16)(SIMD(max_epi16)(SIMD(packs_epi32)(t[2], t[3]), least));
  const bytes signs = SIMD(packs_epi16)(SIMD(packs_epi32)(bits[0], bits[1]), SIMD(packs_epi32)(bits[2], bits[3]));
  *negative = signs_of(turn_quarters(signs));
  return turn_quarters(SIMD(packus_epi16)(low, high));
}

// What is tried of a group, four coordinates after the other, [row][coordinate]: centroids or cells.
typedef struct tried_group {
  _Alignas(64) uint8_t found[QUADS_MAX][QKVI_SCALES][SLAB];
  byte_signs negative[QUADS_MAX][PARTS];
} tried_group;

// ---- Centroids of t ----

// Sums over coordinates for each scale.
typedef struct tried_sums {
  bytes with_row[QKVI_SCALES], with_itself[QKVI_SCALES];
} tried_sums;

#if BYTE_DOTS
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

// Quads [begin, end), all of one depth.
static void try_quads(unsigned depth, size_t begin, size_t end, const columns *all, size_t first, lanes inverse,
                      tried_group *tried, tried_sums *sums) {
  unit_tables units;
  load_unit_tables(depth, &units);
  for (size_t q = begin; q < end; q++) {
    const bytes t = t_of_quad(all->x + q * QUAD, first, inverse, &tried->negative[q][0]);
    const bytes index = _mm512_min_epu8(t, _mm512_set1_epi8((char)191));
    const __mmask64 upper = _mm512_movepi8_mask(t);
    UNROLL
    for (size_t s = 0; s < QKVI_SCALES; s++) {
      const bytes low = _mm512_permutex2var_epi8(units.low[s][0], index, units.low[s][1]);
      const bytes k = _mm512_mask_permutexvar_epi8(low, upper, index, units.high[s]);
      sums->with_row[s] = _mm512_dpbusd_epi32(sums->with_row[s], t, k);
      sums->with_itself[s] = _mm512_dpbusd_epi32(sums->with_itself[s], k, k);
      put_bytes(tried->found[q][s], k);
    }
  }
}
#else
// 1 more where t - 128 is above what it is compared with.
INLINE bytes step_up(bytes cell, bytes t, bytes below) {
#if LANES == 16
  return _mm512_sub_epi8(cell, _mm512_movm_epi8(_mm512_cmpgt_epi8_mask(t, below)));
#else
  return _mm256_sub_epi8(cell, _mm256_cmpgt_epi8(t, below));
#endif
}

INLINE bytes cells_of(unsigned depth, size_t scale, bytes t) {
  bytes cell = (bytes)(words){0};
  if (depth >= 2) cell = step_up(cell, t, SIMD(set1_epi8)(qkvi_integers.below[scale][2][0]));
  UNROLL
  for (unsigned d = 3; d <= depth; d++) {
    const bytes below = load_table((const uint8_t *)qkvi_integers.below[scale][d]);
    cell = step_up(SIMD(add_epi8)(cell, cell), t, look_up_cell(below, cell));
  }
  return cell;
}

INLINE bytes sum_pairs(bytes pairs) {
  return SIMD(madd_epi16)(pairs, SIMD(set1_epi16)(1));
}

// Quads [begin, end), all of one depth, a constant. Products of two bytes of which one is signed are added in twos to
// 16 bits: that is exact, as centroids are 88 at most, so t counts from -128. What that leaves out is 128 times the
// sum of the centroids.
INLINE void try_quads_of(unsigned depth, size_t begin, size_t end, const columns *all, size_t first, lanes inverse,
                         tried_group *tried, tried_sums *sums) {
  bytes centroids[QKVI_SCALES];  // in 16 bits: at most 2 * 88 for each of 128 quads
  UNROLL
  for (size_t s = 0; s < QKVI_SCALES; s++) centroids[s] = (bytes)(words){0};
  for (size_t q = begin; q < end; q++) {
    const bytes whole = t_of_quad(all->x + q * QUAD, first, inverse, &tried->negative[q][first / LANES]);
    const bytes t = (bytes)((words)whole ^ EACH_BYTE(0x80));
    UNROLL
    for (size_t s = 0; s < QKVI_SCALES; s++) {
      const bytes cell = cells_of(depth, s, t);
      const bytes k = look_up_cell(load_table(qkvi_integers.unit_of_cell[depth]), cell);
      const bytes with_row = sum_pairs(SIMD(maddubs_epi16)(k, t));
      const bytes with_itself = sum_pairs(SIMD(maddubs_epi16)(k, k));
      sums->with_row[s] = SIMD(add_epi32)(sums->with_row[s], with_row);
      sums->with_itself[s] = SIMD(add_epi32)(sums->with_itself[s], with_itself);
      centroids[s] = SIMD(add_epi16)(centroids[s], SIMD(maddubs_epi16)(k, SIMD(set1_epi8)(1)));
      put_bytes(tried->found[q][s] + first * QUAD, cell);
    }
  }
  UNROLL
  for (size_t s = 0; s < QKVI_SCALES; s++) {
    const bytes left_out = SIMD(slli_epi32)(sum_pairs(centroids[s]), 7);
    sums->with_row[s] = SIMD(add_epi32)(sums->with_row[s], left_out);
  }
}

static void try_quads(unsigned depth, size_t begin, size_t end, const columns *all, size_t first, lanes inverse,
                      tried_group *tried, tried_sums *sums) {
  switch (depth) {
    case 1:
      try_quads_of(1, begin, end, all, first, inverse, tried, sums);
      break;
    case 2:
      try_quads_of(2, begin, end, all, first, inverse, tried, sums);
      break;
    case 3:
      try_quads_of(3, begin, end, all, first, inverse, tried, sums);
      break;
    default:
      try_quads_of(4, begin, end, all, first, inverse, tried, sums);
  }
}
#endif

static void try_columns(const uint16_t *reach, const columns *all, const each inverse, tried_group *tried,
                        group_sums *out) {
  for (size_t first = 0; first < GROUP; first += LANES) {
    const lanes scale = load_lanes(inverse + first);
    tried_sums sums = {0};
    for (unsigned depth = SHALLOW_MAX; depth >= 1; depth--) {
      if (reach[depth + 1] == reach[depth]) continue;
      try_quads(depth, reach[depth + 1] / QUAD, reach[depth] / QUAD, all, first, scale, tried, &sums);
    }
    for (size_t s = 0; s < QKVI_SCALES; s++) {
      store_lanes(out->with_row[s] + first, SIMD(cvtepi32_ps)(sums.with_row[s]));
      store_lanes(out->with_itself[s] + first, SIMD(cvtepi32_ps)(sums.with_itself[s]));
    }
  }
}

// ---- Codes ----

// Of LANES rows: which have the second and the third scale, and which are not zero.
#if LANES == 16
typedef __mmask16 row_mask;
#else
typedef bytes row_mask;
#endif
typedef struct chosen_rows {
  row_mask second, third, coded;
} chosen_rows;

INLINE row_mask rows_with(const uint8_t *what, uint8_t value) {
#if LANES == 16
  return _mm_cmpeq_epi8_mask(_mm_loadu_si128((const __m128i *)what), _mm_set1_epi8((char)value));
#else
  return _mm256_cmpeq_epi32((bytes)widen_bytes(what), _mm256_set1_epi32(value));
#endif
}

// b in the rows of the mask, else a.
INLINE bytes choose_rows(bytes a, row_mask mask, bytes b) {
#if LANES == 16
  return _mm512_mask_mov_epi32(a, mask, b);
#else
  return _mm256_blendv_epi8(a, b, mask);
#endif
}

INLINE chosen_rows rows_of_choice(const group_choice *choice, size_t first) {
  return (chosen_rows){.second = rows_with(choice->scales + first, 1),
                       .third = rows_with(choice->scales + first, 2),
                       .coded = rows_with(choice->zero + first, 0)};
}

// Codes at full depth of what `try_columns` found.
#if BYTE_DOTS
typedef struct code_table {
  bytes low, high;
} code_table;

INLINE code_table codes_of_depth(unsigned depth) {
  return (code_table){load_bytes(qkvi_integers.codes[depth]), load_bytes(qkvi_integers.codes[depth] + 64)};
}

INLINE bytes find_codes(const code_table *table, bytes found) {
  return _mm512_permutex2var_epi8(table->low, found, table->high);
}
#else
typedef bytes code_table;

INLINE code_table codes_of_depth(unsigned depth) {
  return load_table(qkvi_integers.code_of_cell[depth]);
}

INLINE bytes find_codes(const code_table *table, bytes found) {
  return look_up_cell(*table, found);
}
#endif

// [row][coordinate] of LANES rows, at full depth.
INLINE bytes code_quad(const tried_group *tried, size_t q, size_t p, const chosen_rows *rows,
                       const code_table *table) {
  const size_t at = p * sizeof(bytes);
  bytes found = load_bytes(tried->found[q][0] + at);
  found = choose_rows(found, rows->second, load_bytes(tried->found[q][1] + at));
  found = choose_rows(found, rows->third, load_bytes(tried->found[q][2] + at));
  const bytes code = (bytes)((words)find_codes(table, found) ^ (words)bytes_of_signs(tried->negative[q][p]));
  return choose_rows((bytes)(words){0}, rows->coded, code);
}

static void code_columns(const uint16_t *reach, const tried_group *tried, const group_choice *choice,
                         uint8_t (*codes)[SLAB]) {
  for (size_t p = 0; p < PARTS; p++) {
    const chosen_rows rows = rows_of_choice(choice, p * LANES);
    for (unsigned depth = SHALLOW_MAX; depth >= 1; depth--) {
      const code_table table = codes_of_depth(depth);
      for (size_t q = reach[depth + 1] / QUAD; q < reach[depth] / QUAD; q++) {
        put_bytes(codes[q] + p * sizeof(bytes), code_quad(tried, q, p, &rows, &table));
      }
    }
  }
}

// ---- Slabs ----

// Codes of 16 coordinates, four after the other.
typedef struct block_quads {
  bytes of[PARTS][BLOCK_QUADS];
} block_quads;

// Part `p` of a slab's lanes: rows of keys, coordinates of values.
INLINE block_fields fields_of_quads(qkv_part part, const block_quads *quads, size_t p) {
  if (part == QKV_K) return (block_fields){{quads->of[p][0], quads->of[p][1], quads->of[p][2], quads->of[p][3]}};
#if LANES == 16
  bytes turned[BLOCK_QUADS];
  UNROLL
  for (size_t i = 0; i < BLOCK_QUADS; i++) turned[i] = turn_quarters(quads->of[0][i]);
  return fields_of_quarters(turned);
#else
  block_fields fields;
  UNROLL
  for (size_t i = 0; i < PARTS; i++) {  // rows 8 i to 8 i + 3 are field 2 i, the next four the one behind it
    const bytes a = turn_quarters(quads->of[i][2 * p]), b = turn_quarters(quads->of[i][2 * p + 1]);
    fields.of[2 * i] = _mm256_permute2x128_si256(a, b, 0x20);
    fields.of[2 * i + 1] = _mm256_permute2x128_si256(a, b, 0x31);
  }
  return fields;
#endif
}

// Where all coordinates have four bits, whole slabs of pair 0 and then of pair 1 follow each other.
static bool all_fours(const uint16_t *reach) {
  return reach[SHALLOW_MAX] == reach[1] && reach[1] % QKVI_BLOCK_WIDTH == 0;
}

// `part` is a constant.
INLINE void pack_fours(qkv_part part, size_t coordinates, const tried_group *tried, const group_choice *choice,
                       uint8_t *group) {
  const code_table table = codes_of_depth(SHALLOW_MAX);
  chosen_rows rows[PARTS];
  UNROLL
  for (size_t p = 0; p < PARTS; p++) rows[p] = rows_of_choice(choice, p * LANES);
  for (size_t i = 0; i < coordinates / QKVI_BLOCK_WIDTH; i++) {
    block_quads quads;
    UNROLL
    for (size_t p = 0; p < PARTS; p++) {
      UNROLL
      for (size_t j = 0; j < BLOCK_QUADS; j++) {
        quads.of[p][j] = code_quad(tried, i * BLOCK_QUADS + j, p, &rows[p], &table);
      }
    }
    UNROLL
    for (size_t p = 0; p < PARTS; p++) {
      const block_fields fields = fields_of_quads(part, &quads, p);
      uint8_t *slab = group + i * SLAB + p * sizeof(bytes);
      pack_slab(&fields, 0, true, 0, slab);
      pack_slab(&fields, 1, true, 0, slab + coordinates * SLAB / QKVI_BLOCK_WIDTH);
    }
  }
}

// Codes [row][coordinate] of four coordinates, as [coordinate][row].
INLINE void turn_quad(const uint8_t codes[SLAB], qkvi_codes *out) {
#if LANES == 16
  const __m512i dwords = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  put_bytes(out, _mm512_permutexvar_epi32(dwords, turn_quarters(load_bytes(codes))));
#else
  const bytes v = turn_quarters(load_bytes(codes)), w = turn_quarters(load_bytes(codes + sizeof v));
  const __m128i a = _mm256_castsi256_si128(v), b = _mm256_extracti128_si256(v, 1);
  const __m128i c = _mm256_castsi256_si128(w), d = _mm256_extracti128_si256(w, 1);
  const bytes low = _mm256_set_m128i(_mm_unpackhi_epi32(a, b), _mm_unpacklo_epi32(a, b));
  const bytes high = _mm256_set_m128i(_mm_unpackhi_epi32(c, d), _mm_unpacklo_epi32(c, d));
  const bytes even = _mm256_unpacklo_epi64(low, high), odd = _mm256_unpackhi_epi64(low, high);
  put_bytes(out, _mm256_permute2x128_si256(even, odd, 0x20));
  put_bytes(out + 2, _mm256_permute2x128_si256(even, odd, 0x31));
#endif
}

// What is left of a section behind its slabs of 64 bytes: slabs of 32 and 16.
static uint8_t *pack_quads_rest(qkv_part part, unsigned pair, bool wide, const uint8_t (*codes)[SLAB],
                                size_t coordinates, uint8_t *slab) {
  for (unsigned width = 2; width > 0; width /= 2) {
    const size_t here = (wide ? 4u : 8u) * width;
    if (here > coordinates) continue;
    qkvi_codes by_coordinate[QKVI_BLOCK_WIDTH];
    for (size_t q = 0; q < here / QUAD; q++) turn_quad(codes[q], by_coordinate + q * QUAD);
    qkvi_pack_slab(part, pair, wide, width, (const qkvi_codes *)by_coordinate, slab);
    codes += here / QUAD;
    coordinates -= here;
    slab += (size_t)GROUP * width;
  }
  return slab;
}

// 16 coordinates of a slab of 64 bytes.
INLINE void pack_quads(qkv_part part, unsigned pair, bool wide, unsigned half, const uint8_t (*codes)[SLAB],
                       uint8_t *slab) {
  block_quads quads;
  UNROLL
  for (size_t p = 0; p < PARTS; p++) {
    UNROLL
    for (size_t i = 0; i < BLOCK_QUADS; i++) quads.of[p][i] = load_bytes(codes[i] + p * sizeof(bytes));
  }
  UNROLL
  for (size_t p = 0; p < PARTS; p++) {
    const block_fields fields = fields_of_quads(part, &quads, p);
    pack_slab(&fields, pair, wide, half, slab + p * sizeof(bytes));
  }
}

// A section of pair `pair`, which as `wide` is a constant: coordinates [begin, end). Returns where the next one is.
INLINE uint8_t *pack_section_of_quads(qkv_part part, unsigned pair, bool wide, const uint8_t (*codes)[SLAB],
                                      size_t begin, size_t end, uint8_t *slab) {
  const size_t here = wide ? QKVI_BLOCK_WIDTH : 2 * QKVI_BLOCK_WIDTH;
  for (; begin + here <= end; begin += here, slab += SLAB) {
    pack_quads(part, pair, wide, 0, codes + begin / QUAD, slab);
    if (!wide) pack_quads(part, pair, wide, 1, codes + begin / QUAD + BLOCK_QUADS, slab);
  }
  return begin < end ? pack_quads_rest(part, pair, wide, codes + begin / QUAD, end - begin, slab) : slab;
}

static void pack_columns(qkv_part part, const uint16_t *reach, const tried_group *tried, const group_choice *choice,
                         uint8_t *group) {
  _Alignas(64) uint8_t room[QUADS_MAX][SLAB];
  const uint8_t(*codes)[64] = (const uint8_t(*)[SLAB])room;
  code_columns(reach, tried, choice, room);
  group = pack_section_of_quads(part, 0, true, codes, 0, reach[2], group);
  group = pack_section_of_quads(part, 0, false, codes, reach[2], reach[1], group);
  group = pack_section_of_quads(part, 1, true, codes, 0, reach[4], group);
  (void)pack_section_of_quads(part, 1, false, codes, reach[4], reach[3], group);
}
#endif
#endif
