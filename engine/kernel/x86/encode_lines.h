// From what encode_columns.h found to codes in lines (page.h).
#ifndef QKV_ENGINE_KERNEL_X86_ENCODE_LINES_H
#define QKV_ENGINE_KERNEL_X86_ENCODE_LINES_H

#include "engine/kernel/x86/encode_columns.h"

#if defined(__AVX2__)
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

// Codes at full depth of what was found of up to four bits.
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

// What was found at the scales that were chosen, of LANES rows.
INLINE bytes found_of_quad(const tried_group *tried, size_t q, size_t p, const chosen_rows *rows) {
  const size_t at = p * sizeof(bytes);
  bytes found = load_bytes(tried->found[q][0] + at);
  found = choose_rows(found, rows->second, load_bytes(tried->found[q][1] + at));
  return choose_rows(found, rows->third, load_bytes(tried->found[q][2] + at));
}

// [row][coordinate] of LANES rows, at full depth, of up to four bits.
INLINE bytes code_quad(const tried_group *tried, size_t q, size_t p, const chosen_rows *rows,
                       const code_table *table) {
  const bytes found = found_of_quad(tried, q, p, rows);
  const bytes code = (bytes)((words)find_codes(table, found) ^ (words)bytes_of_signs(tried->negative[q][p]));
  return choose_rows((bytes)(words){0}, rows->coded, code);
}

static void code_columns(const uint16_t *reach, const tried_group *tried, const group_choice *choice,
                         uint8_t (*codes)[LINE]) {
  for (size_t p = 0; p < PARTS; p++) {
    const chosen_rows rows = rows_of_choice(choice, p * LANES);
    for (size_t q = 0; q < reach[SHALLOW_MAX + 1] / QUAD; q++) {
      const bytes code = choose_rows((bytes)(words){0}, rows.coded, found_of_quad(tried, q, p, &rows));
      put_bytes(codes[q] + p * sizeof(bytes), code);
    }
    for (unsigned depth = SHALLOW_MAX; depth >= 1; depth--) {
      const code_table table = codes_of_depth(depth);
      for (size_t q = reach[depth + 1] / QUAD; q < reach[depth] / QUAD; q++) {
        put_bytes(codes[q] + p * sizeof(bytes), code_quad(tried, q, p, &rows, &table));
      }
    }
  }
}

// ---- Lines ----

// Codes of 16 coordinates, four after the other.
typedef struct block_quads {
  bytes of[PARTS][BLOCK_QUADS];
} block_quads;

// Part `p` of a line's lanes: rows of keys, coordinates of values.
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

// Where all coordinates have four bits, whole lines of pair 0 and then of pair 1 follow each other.
static bool all_fours(const uint16_t *reach) {
  return reach[SHALLOW_MAX + 1] == 0 && reach[SHALLOW_MAX] == reach[1] && reach[1] % QKVI_BLOCK_WIDTH == 0;
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
      uint8_t *line = group + i * LINE + p * sizeof(bytes);
      pack_line(&fields, 0, true, 0, line);
      pack_line(&fields, 1, true, 0, line + coordinates * LINE / QKVI_BLOCK_WIDTH);
    }
  }
}

// Codes [row][coordinate] of four coordinates, as [coordinate][row].
INLINE void turn_quad(const uint8_t codes[LINE], qkvi_codes *out) {
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

// What is left of a section behind its lines of 64 bytes: lines of 32 and 16.
static uint8_t *pack_quads_rest(qkv_part part, unsigned pair, bool wide, const uint8_t (*codes)[LINE],
                                size_t coordinates, uint8_t *line) {
  for (unsigned width = 2; width > 0; width /= 2) {
    const size_t here = (wide ? 4u : 8u) * width;
    if (here > coordinates) continue;
    qkvi_codes by_coordinate[QKVI_BLOCK_WIDTH];
    for (size_t q = 0; q < here / QUAD; q++) turn_quad(codes[q], by_coordinate + q * QUAD);
    qkvi_pack_line(part, pair, wide, width, (const qkvi_codes *)by_coordinate, line);
    codes += here / QUAD;
    coordinates -= here;
    line += (size_t)GROUP * width;
  }
  return line;
}

// 16 coordinates of a line of 64 bytes.
INLINE void pack_quads(qkv_part part, unsigned pair, bool wide, unsigned half, const uint8_t (*codes)[LINE],
                       uint8_t *line) {
  block_quads quads;
  UNROLL
  for (size_t p = 0; p < PARTS; p++) {
    UNROLL
    for (size_t i = 0; i < BLOCK_QUADS; i++) quads.of[p][i] = load_bytes(codes[i] + p * sizeof(bytes));
  }
  UNROLL
  for (size_t p = 0; p < PARTS; p++) {
    const block_fields fields = fields_of_quads(part, &quads, p);
    pack_line(&fields, pair, wide, half, line + p * sizeof(bytes));
  }
}

// A section of pair `pair`, which as `wide` is a constant: coordinates [begin, end). Returns where the next one is.
INLINE uint8_t *pack_section_of_quads(qkv_part part, unsigned pair, bool wide, const uint8_t (*codes)[LINE],
                                      size_t begin, size_t end, uint8_t *line) {
  const size_t here = wide ? QKVI_BLOCK_WIDTH : 2 * QKVI_BLOCK_WIDTH;
  for (; begin + here <= end; begin += here, line += LINE) {
    pack_quads(part, pair, wide, 0, codes + begin / QUAD, line);
    if (!wide) pack_quads(part, pair, wide, 1, codes + begin / QUAD + BLOCK_QUADS, line);
  }
  return begin < end ? pack_quads_rest(part, pair, wide, codes + begin / QUAD, end - begin, line) : line;
}

static void pack_columns(qkv_part part, const uint16_t *reach, const tried_group *tried, const group_choice *choice,
                         uint8_t *group) {
  _Alignas(64) uint8_t buffer[QUADS_MAX][LINE];
  const uint8_t(*codes)[64] = (const uint8_t(*)[LINE])buffer;
  code_columns(reach, tried, choice, buffer);
  UNROLL
  for (unsigned pair = 0; pair < QKV_DEPTH_MAX / 2; pair++) {
    const size_t wide = reach[2 * pair + 2], all = reach[2 * pair + 1];
    group = pack_section_of_quads(part, pair, true, codes, 0, wide, group);
    group = pack_section_of_quads(part, pair, false, codes, wide, all, group);
  }
}
#endif
#endif
