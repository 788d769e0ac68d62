// Pages to rows: the kernel qkv_simt_decode_rows of rows.h.
#include "engine/kernel/simt/rows.h"
#include "engine/kernel/simt/simt.h"
#include "engine/kernel/simt/tile.h"

#define ROWS_THREADS_MAX 576
#define OUTLIER_WIDE_ROW 0x80u
#define OUTLIER_SLOT_BITS 0x3fu

SIMT_INLINE unsigned halfword_at(const uint8_t *from, unsigned offset) {
  return *(const uint16_t *)(const void *)(from + offset);
}
SIMT_INLINE uint32_t word_at(const uint8_t *from, uint32_t offset) {
  return *(const uint32_t *)(const void *)(from + offset);
}

// The directory entry of a job's head.
SIMT_INLINE const uint8_t *entry_of(const qkv_simt_decode *job) {
  return job->page + 64 + 16 * job->kv_head;
}

// ---- Codes ----

// Offset of a group's codes from the beginning of the page; group 4: of what is behind them.
SIMT_INLINE uint32_t codes_at(const qkv_simt_decode *job, unsigned part, unsigned group) {
  const uint8_t *entry = entry_of(job);
  uint32_t at = word_at(entry, 0) + 2 * TILE_TOKENS;
  for (unsigned i = 0; i < part * TILE_GROUPS + group; i++) at += job->code->bytes[i / TILE_GROUPS][entry[4 + i]];
  return at;
}

SIMT_INLINE float gain_of(const qkv_simt_decode *job, const qkv_simt_row_tables *tables, unsigned token) {
  return tables->gains[job->page[word_at(entry_of(job), 0) + job->part * TILE_TOKENS + token]];
}

SIMT_INLINE float value_of(const qkv_simt_row_tables *tables, unsigned depth, unsigned code) {
  return depth == 0 ? 0 : tables->values[(1u << depth) - 2 + code];
}

// Eight coordinates of a token.
SIMT_INLINE void take_key_band(const qkv_simt_decode *job, const qkv_simt_row_tables *tables, const uint16_t *reach,
                               uint32_t section, unsigned token, unsigned first, float *tile) {
  unsigned depth = 0, codes[TILE_BAND] = {0};
  SIMT_UNROLL
  for (unsigned pair = 0; pair < 4; pair++) {
    const tile_place place = tile_place_of(reach, pair, section, first);
    if (place.bits == 0) break;
    const uint32_t bytes = tile_load_token(job->page + place.line, place.width, token % TILE_GROUP_TOKENS);
    SIMT_UNROLL
    for (unsigned k = 0; k < TILE_BAND; k++) {
      const uint32_t two = bytes >> tile_key_shift(&place, pair, k);
      codes[k] = codes[k] << place.bits | (two & place.bits) | (two & (place.bits & 2) >> 1);
    }
    depth += place.bits;
    section = tile_section_after(reach, pair, section);
  }
  const float gain = gain_of(job, tables, token);
  SIMT_UNROLL
  for (unsigned k = 0; k < TILE_BAND; k++)
    tile[(first + k) * TILE_STRIDE + token] = value_of(tables, depth, codes[k]) * gain;
}

// A coordinate of the 16 tokens of a group.
SIMT_INLINE void take_value_group(const qkv_simt_decode *job, const qkv_simt_row_tables *tables,
                                  const uint16_t *reach, uint32_t section, unsigned group, unsigned coordinate,
                                  float *tile) {
  unsigned depth = 0;
  uint32_t codes[4] = {0, 0, 0, 0};  // of four tokens each
  SIMT_UNROLL
  for (unsigned pair = 0; pair < 4; pair++) {
    const tile_place place = tile_place_of(reach, pair, section, coordinate / TILE_BAND * TILE_BAND);
    if (place.bits == 0) break;
    const unsigned number = place.at + coordinate % TILE_BAND, lanes = 4u << place.width;
    const uint32_t word = word_at(job->page, place.line + 4 * (number & (lanes - 1)));
    const unsigned high = place.bits == 1 && number >= lanes;
    SIMT_UNROLL
    for (unsigned f = 0; f < 4; f++) {
      const uint32_t two = word >> (tile_field_shift(pair, f) + high);
      codes[f] = codes[f] << place.bits | (two & (place.bits == 2 ? 0x03030303 : 0x01010101));
    }
    depth += place.bits;
    section = tile_section_after(reach, pair, section);
  }
  float *to = tile + coordinate * TILE_STRIDE + group * TILE_GROUP_TOKENS;
  SIMT_UNROLL
  for (unsigned i = 0; i < TILE_GROUP_TOKENS; i++) {
    const float gain = gain_of(job, tables, group * TILE_GROUP_TOKENS + i);
    to[i] = value_of(tables, depth, codes[i / 4] >> (8 * (i % 4)) & 255) * gain;
  }
}

SIMT_INLINE void take_codes(const qkv_simt_decode *job, const qkv_simt_row_tables *tables, float *tile) {
  const unsigned dim = job->code->dim;
  const uint8_t *tiers = entry_of(job) + 4 + job->part * TILE_GROUPS;
  if (job->part == 0) {
    for (unsigned i = simt_thread(); i < dim / TILE_BAND * TILE_TOKENS; i += simt_threads()) {
      const unsigned token = i % TILE_TOKENS, group = token / TILE_GROUP_TOKENS;
      take_key_band(job, tables, job->code->reach[tiers[group]], codes_at(job, 0, group), token,
                    i / TILE_TOKENS * TILE_BAND, tile);
    }
  } else {
    for (unsigned i = simt_thread(); i < dim * TILE_GROUPS; i += simt_threads()) {
      const unsigned group = i / dim;
      take_value_group(job, tables, job->code->reach[tiers[group]], codes_at(job, 1, group), group, i % dim, tile);
    }
  }
  simt_sync_block();
}

// ---- Outlier rows (engine/codec/outliers.h) ----

typedef struct kept_rows {
  uint32_t count;
  const uint8_t *slots;
  const float *scales;
  const uint8_t *rows;
} kept_rows;

SIMT_INLINE uint32_t up_to(uint32_t bytes, uint32_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

SIMT_INLINE kept_rows find_kept(const qkv_simt_decode *job) {
  kept_rows found = {0, NULL, NULL, NULL};
  const uint32_t at = word_at(job->page, 40);
  if (at == 0) return found;
  const unsigned heads = halfword_at(job->page, 26), entry = job->part * (heads + 1) + job->kv_head;
  const uint8_t *section = job->page + at;  // of rows, and wide rows, before each head
  const unsigned begin = halfword_at(section, 4 * entry), wide = halfword_at(section, 4 * entry + 2);
  const unsigned keys = halfword_at(section, 4 * heads), wide_keys = halfword_at(section, 4 * heads + 2);
  const unsigned values = halfword_at(section, 8 * heads + 4), first = (job->part == 0 ? 0 : keys) + begin;
  const uint32_t slots = 8 * (heads + 1), scales = up_to(slots + keys + values, 4);
  uint32_t rows = up_to(scales + 4 * (keys + values), 8);
  if (job->part == 1) rows += (keys + wide_keys) * job->code->key_dim;
  found.count = halfword_at(section, 4 * entry + 4) - begin;
  found.slots = section + slots + first;
  found.scales = (const float *)(const void *)(section + scales) + first;
  found.rows = section + rows + (begin + wide) * job->code->dim;
  return found;
}

// They take the places of their slots.
SIMT_INLINE void put_kept(const qkv_simt_decode *job, const kept_rows *kept, float *tile) {
  const qkv_simt_code *code = job->code;
  const uint8_t *row = kept->rows;
  const float *steps = (const float *)(const void *)((const uint8_t *)code + code->outlier_steps);
  for (uint32_t r = 0; r < kept->count; r++) {
    const bool wide = (kept->slots[r] & OUTLIER_WIDE_ROW) != 0;
    for (unsigned c = simt_thread(); c < code->dim; c += simt_threads()) {
      const int number = wide ? ((const int16_t *)(const void *)row)[c] : ((const int8_t *)row)[c];
      float value = (float)number * kept->scales[r];
      if (job->part == 1 && code->outlier_steps != 0) value *= steps[c];
      tile[c * TILE_STRIDE + (kept->slots[r] & OUTLIER_SLOT_BITS)] = value;
    }
    row += wide ? 2 * code->dim : code->dim;
  }
  simt_sync_block();
}

SIMT_INLINE bool is_kept(const kept_rows *kept, unsigned token) {
  bool is = false;
  for (uint32_t r = 0; r < kept->count; r++) is = is || (kept->slots[r] & OUTLIER_SLOT_BITS) == token;
  return is;
}

// ---- Anchors and factors (engine/codec/anchor.h, low_rank.h) ----

enum { ANCHOR_MEAN = 1, ANCHOR_GROUP = 2, ANCHOR_CHAIN = 3 };

typedef struct anchor_rows {
  unsigned kind;          // 0: none
  uint64_t starts;        // slots from which on the next row counts
  float unit;             // of rows without scales
  const uint8_t *scales;  // NULL: none
  const int8_t *rows;
  uint32_t bytes;
} anchor_rows;

SIMT_INLINE unsigned ones_of(uint64_t mask) {
  unsigned count = 0;
  for (; mask != 0; mask &= mask - 1) count++;
  return count;
}

SIMT_INLINE anchor_rows find_anchor(unsigned byte, const uint8_t *section, unsigned dim,
                                    const qkv_simt_row_tables *tables) {
  anchor_rows found = {byte & 3, 1, tables->gains[byte / 4 * 4 + 3] / 127, NULL, (const int8_t *)section, 0};
  unsigned count = 1;
  if (found.kind == ANCHOR_GROUP) {
    found.starts = 0x0001000100010001;
    count = TILE_GROUPS;
  } else if (byte == ANCHOR_CHAIN) {
    found.starts = word_at(section, 0) | (uint64_t)word_at(section, 4) << 32;
    count = ones_of(found.starts);
    found.scales = section + 8;
    found.rows = (const int8_t *)section + 8 + count;
  }
  if (found.kind != 0) found.bytes = up_to((uint32_t)(found.rows - (const int8_t *)section) + count * dim, 16);
  return found;
}

SIMT_INLINE void add_anchor(const anchor_rows *anchor, unsigned dim, const qkv_simt_row_tables *tables, float *tile) {
  for (unsigned c = simt_thread(); c < dim; c += simt_threads()) {
    float *to = tile + c * TILE_STRIDE, value = 0, before = 0;
    unsigned next = 0;
    for (unsigned t = 0; t < TILE_TOKENS; t++) {
      const bool starts = (anchor->starts >> t & 1) != 0;
      if (starts) {
        const float unit = anchor->scales != NULL ? tables->gains[anchor->scales[next]] / 127 : anchor->unit;
        value = (float)anchor->rows[next * dim + c] * unit;
        next++;
      }
      to[t] += starts || anchor->kind != ANCHOR_CHAIN ? value : before;
      before = to[t];
    }
  }
}

// Of `rank` directions.
SIMT_INLINE void add_factors(unsigned rank, const uint8_t *section, unsigned dim, const qkv_simt_row_tables *tables,
                             float *tile) {
  const int8_t *directions = (const int8_t *)section, *factors = directions + rank * dim;
  const uint8_t *scales = (const uint8_t *)factors + rank * TILE_TOKENS;
  for (unsigned i = simt_thread(); i < dim * TILE_TOKENS; i += simt_threads()) {
    const unsigned c = i / TILE_TOKENS, t = i % TILE_TOKENS;
    float *to = tile + c * TILE_STRIDE + t;
    for (unsigned r = 0; r < rank; r++)
      *to += (float)factors[r * TILE_TOKENS + t] * (tables->gains[scales[r]] / (127 * 127)) *
             (float)directions[r * dim + c];
  }
}

SIMT_INLINE void add_predictions(const qkv_simt_decode *job, const qkv_simt_row_tables *tables, float *tile) {
  const uint8_t *entry = entry_of(job);
  if (word_at(entry, 12) == 0) return;
  const uint8_t *section = job->page + codes_at(job, 1, TILE_GROUPS);
  for (unsigned part = 0; part < 2; part++) {
    const unsigned dim = part == 0 ? job->code->key_dim : job->code->value_dim;
    const anchor_rows anchor = find_anchor(entry[12 + part], section, dim, tables);
    if (part == job->part && anchor.kind != 0) add_anchor(&anchor, dim, tables, tile);
    section += anchor.bytes;
  }
  simt_sync_block();
  for (unsigned part = 0; part <= job->part; part++) {
    const unsigned rank = entry[14 + part], dim = part == 0 ? job->code->key_dim : job->code->value_dim;
    if (part == job->part) add_factors(rank, section, dim, tables, tile);
    section += up_to(rank * (dim + TILE_TOKENS + 1), 16);
  }
  simt_sync_block();
}

// ---- Back from code space ----

SIMT_INLINE void combine(const qkv_simt_code *code, unsigned coordinates, float *tile) {
  const unsigned dim = code->dim;
  const uint8_t *matrix = (const uint8_t *)code + code->synthesis;
  const float *mean = (const float *)(const void *)(matrix + 2 * dim * dim) + dim;
  float *sums = tile + dim * TILE_STRIDE, *factors = sums + TILE_SUM_LANES * TILE_TOKENS;
  const tile_whole whole = {sums, factors, factors + TILE_TOKENS};
  tile_multiply(matrix, dim, coordinates, mean, &whole, tile);
}

// ---- Turns of keys (engine/codec/phases.c) ----

SIMT_INLINE void turn_pair(float *a, float *b, float c, float s) {
  const float x = *a, y = *b;
  *a = x * c - y * s;
  *b = x * s + y * c;
}

// From the frame, with its rotating anchor, to rows as attended.
SIMT_INLINE void turn_from_frame(const qkv_simt_decode *job, float *tile) {
  const qkv_simt_code *code = job->code;
  const unsigned pairs = code->pairs;
  for (unsigned i = simt_thread(); i < pairs * TILE_TOKENS; i += simt_threads()) {
    const unsigned pair = i / TILE_TOKENS;
    const float *turns = job->turns + pair, c = job->slots[i], s = job->slots[pairs * TILE_TOKENS + i];
    const float x = turns[2 * pairs], y = turns[3 * pairs];
    float *a = tile + pair * code->step * TILE_STRIDE + i % TILE_TOKENS, *b = a + code->apart * TILE_STRIDE;
    *a += x * c - y * s;
    *b += x * s + y * c;
    turn_pair(a, b, turns[0], turns[pairs]);
  }
  simt_sync_block();
}

// RoPE, forward or back.
SIMT_INLINE void turn_rows(const qkv_simt_decode *job, const kept_rows *kept, float *tile) {
  const qkv_simt_code *code = job->code;
  const unsigned pairs = code->pairs;
  for (unsigned i = simt_thread(); i < pairs * TILE_TOKENS; i += simt_threads()) {
    const unsigned pair = i / TILE_TOKENS, token = i % TILE_TOKENS;
    const unsigned flag = is_kept(kept, token) ? QKV_SIMT_ROWS_TURN_KEPT : QKV_SIMT_ROWS_TURN;
    if ((job->flags & flag) == 0) continue;
    const float c = job->turns[4 * pairs + pair], s = job->turns[5 * pairs + pair];
    const float slot_c = job->slots[i], slot_s = job->slots[pairs * TILE_TOKENS + i];
    const float sine = c * slot_s + s * slot_c;
    float *a = tile + pair * code->step * TILE_STRIDE + token;
    turn_pair(a, a + code->apart * TILE_STRIDE, c * slot_c - s * slot_s,
              (job->flags & QKV_SIMT_ROWS_BACK) != 0 ? -sine : sine);
  }
  simt_sync_block();
}

// ---- Rows ----

// To the nearest half; engine/base/tensor.c.
SIMT_INLINE uint32_t half_of(float value) {
  const uint32_t bits = simt_bits(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  const uint32_t rebased = magnitude - (112u << 23);
  uint32_t rounded = (rebased + 0xfff + (rebased >> 13 & 1)) >> 13;
  if (rounded > 0x7c00) rounded = 0x7c00;
  if (magnitude < 0x38800000) rounded = simt_bits(simt_float(magnitude) + 0.5f) - simt_bits(0.5f);
  return sign | (magnitude > 0x7f800000 ? 0x7e00 | (magnitude >> 13 & 0x3ff) : rounded);
}

SIMT_INLINE uint32_t bf16_of(float value) {
  const uint32_t bits = simt_bits(value);
  return (bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// Four tokens of a coordinate at a time.
SIMT_INLINE void write_rows(const qkv_simt_decode *job, const float *tile) {
  const unsigned dim = job->code->dim;
  for (unsigned i = simt_thread(); i < dim * (TILE_TOKENS / 4); i += simt_threads()) {
    const unsigned c = i % dim, first = i / dim * 4;
    const simt_quad four = simt_load_quad(tile + c * TILE_STRIDE + first);
    SIMT_UNROLL
    for (unsigned k = 0; k < 4; k++) {
      const unsigned token = first + k;
      if (token < job->first || token >= job->end) continue;
      uint8_t *row = job->out + (token - job->first) * job->stride;
      const float value = simt_float(four.words[k]);
      if (job->dtype == TILE_FP32) {
        ((float *)(void *)row)[c] = value;
      } else {
        ((uint16_t *)(void *)row)[c] = (uint16_t)(job->dtype == TILE_FP16 ? half_of(value) : bf16_of(value));
      }
    }
  }
}

SIMT_KERNEL(qkv_simt_decode_rows, qkv_simt_decode_args, ROWS_THREADS_MAX, 1) {
  const qkv_simt_decode *job = &args->jobs[simt_block()];
  const qkv_simt_code *code = job->code;
  const qkv_simt_row_tables *tables = (const qkv_simt_row_tables *)(const void *)simt_shared();
  float *tile = (float *)(void *)(simt_shared() + sizeof *tables);
  const kept_rows kept = find_kept(job);
  tile_take_tables(args->tables, sizeof *tables / 4);
  simt_sync_block();
  take_codes(job, tables, tile);
  if (job->part == 1 && kept.count > 0) put_kept(job, &kept, tile);
  add_predictions(job, tables, tile);
  if (code->synthesis != 0) {
    combine(code, kept.count > 0 ? code->dim : code->coded, tile);
  } else {
    tile_transform(tile, code->dim);
    tile_flip_signs(code, tile);
  }
  if ((job->flags & QKV_SIMT_ROWS_FRAME) != 0) turn_from_frame(job, tile);
  if (job->part == 0 && kept.count > 0) put_kept(job, &kept, tile);
  if ((job->flags & (QKV_SIMT_ROWS_TURN | QKV_SIMT_ROWS_TURN_KEPT)) != 0) turn_rows(job, &kept, tile);
  write_rows(job, tile);
}
