// The scalar reference of the integer kernels: it defines their arithmetic.
#include "engine/kernel/integer.h"

#include <assert.h>
#include <string.h>

#include "engine/codec/pack.h"
#include "engine/kernel/integer_plain.h"
#include "engine/kernel/kernel.h"

enum { GROUP = QKV_GROUP_TOKENS };

const qkvi_tier_blocks *qkvi_layouts_find(qkv_layouts *layouts, const qkv_schedule *schedule, unsigned tier) {
  size_t place = 0;
  layouts->finds++;
  for (size_t i = 0; i < QKV_LAYOUTS; i++) {
    if (layouts->all[i].schedule == schedule && layouts->all[i].tier == tier) {
      layouts->all[i].used = layouts->finds;
      return &layouts->all[i].blocks;
    }
    if (layouts->all[i].used < layouts->all[place].used) place = i;
  }
  layouts->all[place].schedule = schedule;
  layouts->all[place].tier = tier;
  layouts->all[place].used = layouts->finds;
  qkvi_blocks_find(schedule, tier, &layouts->all[place].blocks);
  return &layouts->all[place].blocks;
}

// A group's integers by coordinate: those of shallow ones in `low`, whose `high` is 0.
typedef struct tile {
  unsigned deep, coordinates;  // more than QKVI_SHALLOW_MAX bits, any bits
  int8_t high[QKV_DIM_MAX][GROUP], low[QKV_DIM_MAX][GROUP];
} tile;

static void load_tile(qkv_part part, const qkv_page_codes *codes, size_t group, tile *out) {
  qkvi_codes unpacked[QKV_DIM_MAX];
  const uint16_t *reach = codes->schedule->reach[codes->tiers[group]];
  qkvi_unpack(part, codes->schedule, codes->tiers[group], codes->groups[group], unpacked);
  out->deep = reach[QKVI_SHALLOW_MAX + 1];
  out->coordinates = reach[1];
  for (unsigned depth = 1; depth <= QKV_DEPTH_MAX; depth++) {
    const unsigned begin = depth < QKV_DEPTH_MAX ? reach[depth + 1] : 0;
    for (unsigned c = begin; c < reach[depth]; c++) {
      for (size_t t = 0; t < GROUP; t++) {
        const uint8_t code = unpacked[c][t];
        out->high[c][t] = depth > QKVI_SHALLOW_MAX ? qkvi_integers.deep_high[depth][code] : 0;
        out->low[c][t] =
            depth > QKVI_SHALLOW_MAX ? qkvi_integers.deep_low[depth][code] : qkvi_integers.shallow[depth][code];
      }
    }
  }
}

// Where the four bytes of numbers 4 i to 4 i + 3 of a column lie; a column has `length` bytes.
static size_t place_of(const qkvi_chunk *chunk, unsigned parts, size_t length, size_t i, size_t column) {
  return chunk->first * parts * length + (i * chunk->columns + column) * 4;
}

QKV_DECLARE_SCORES_INTEGER(qkvi_scores_integer_reference) {
  (void)layouts, (void)ahead;
  tile all;
  const unsigned parts = queries->parts;
  const size_t length = qkvi_column_bytes(queries->dim);
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
    load_tile(QKV_K, keys, g, &all);
    for (size_t row = 0; row < queries->count; row++) {
      const qkvi_chunk chunk = qkvi_chunk_of(row, queries->count, parts);
      for (size_t t = 0; t < GROUP; t++) {
        float total = 0;
        for (unsigned p = 0; p < parts; p++) {
          int32_t x = 0, low = 0;
          for (unsigned c = 0; c < all.coordinates; c++) {
            const size_t at = place_of(&chunk, parts, length, c / 4, (row - chunk.first) * parts + p) + c % 4;
            const int32_t q = (int32_t)queries->bytes[at];
            if (c < all.deep) {
              x += 2 * all.high[c][t] * q;
              low += all.low[c][t] * q;
            } else {
              x += all.low[c][t] * q;
            }
          }
          total = total * QKVI_HIGH_BYTE + ((float)x + (float)low * QKVI_LOW_PLANE);
        }
        const size_t slot = g * GROUP + t;
        scores[row * QKV_PAGE_TOKENS + slot] = total * queries->scales[row] * qkv_gain_value(keys->gains[slot]);
      }
    }
  }
}

QKV_DECLARE_ACCUMULATE_INTEGER(qkvi_accumulate_integer_reference) {
  (void)layouts, (void)ahead;
  tile all[QKV_PAGE_GROUPS];
  const unsigned parts = weights->parts;
  const size_t dim = values->schedule->dim;
  unsigned coordinates = 0;
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
    load_tile(QKV_V, values, g, &all[g]);
    if (all[g].coordinates > coordinates) coordinates = all[g].coordinates;
  }
  for (size_t row = 0; row < weights->count; row++) {
    const qkvi_chunk chunk = qkvi_chunk_of(row, weights->count, parts);
    for (unsigned c = 0; c < coordinates; c++) {
      float total = 0;
      for (unsigned p = 0; p < parts; p++) {
        int32_t x = 0, low = 0;
        for (size_t slot = 0; slot < QKV_PAGE_TOKENS; slot++) {
          const tile *from = &all[slot / GROUP];
          const size_t at = place_of(&chunk, parts, QKV_PAGE_TOKENS, slot / 4, (row - chunk.first) * parts + p);
          const int32_t w = weights->bytes[at + slot % 4], t = slot % GROUP;
          if (c < from->deep) {
            x += 2 * from->high[c][t] * w;
            low += from->low[c][t] * w;
          } else if (c < from->coordinates) {
            x += from->low[c][t] * w;
          }
        }
        total = total * QKVI_HIGH_BYTE + ((float)x + (float)low * QKVI_LOW_PLANE);
      }
      sums[row * dim + c] += total * weights->scales[row];
    }
  }
}
