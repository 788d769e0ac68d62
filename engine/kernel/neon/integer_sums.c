// Weighted sums in integers (kernel/integer.h). Compiled with and without dot product instructions.
#include <assert.h>
#include <string.h>

#include "engine/kernel/kernel.h"
#include "engine/kernel/neon/centroids.h"
#include "engine/kernel/neon/variants.h"

// -128 times the sums of a column's weights over some of the groups: bit g of the mask is group g.
typedef struct offsets {
  unsigned mask;
  int32_t of[QKV_INTEGER_COLUMNS];
} offsets;

// One chunk of weights against a page.
typedef struct value_pass {
  const qkvi_tier_blocks *layouts[QKV_PAGE_GROUPS];
  const uint8_t *groups[QKV_PAGE_GROUPS];
  size_t blocks, deep;     // of the group that has most of them
  const uint8_t *columns;  // the chunk's
  uint32_t totals[QKV_PAGE_GROUPS][QKV_INTEGER_COLUMNS];
  unsigned parts;
  size_t rows, dim;
  const float *scales;
  float *sums;  // [rows][dim]
} value_pass;

static void total_columns(value_pass *pass, size_t width) {
  memset(pass->totals, 0, sizeof pass->totals);
  for (size_t word = 0; word < QKV_PAGE_TOKENS / 4 * width; word++) {
    const uint8_t *four = pass->columns + 4 * word;
    pass->totals[word / width / FIELDS][word % width] += (uint32_t)four[0] + four[1] + four[2] + four[3];
  }
}

static void turn_offsets(const value_pass *pass, unsigned mask, size_t width, offsets *out) {
  if (out->mask == mask) return;
  out->mask = mask;
  for (size_t column = 0; column < width; column++) {
    uint32_t sum = 0;
    for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) sum += (mask >> g & 1) != 0 ? pass->totals[g][column] : 0;
    out->of[column] = -128 * (int32_t)sum;
  }
}

// Which groups had coordinates of up to four bits, and of more.
typedef struct parts_met {
  offsets shallow, deep;
} parts_met;

// Adds to the four sums of each row. `width`, `parts` and `deep` are constants.
INLINE void fold(const value_pass *pass, size_t first, size_t width, unsigned parts, bool deep, const parts_met *met,
                 const quarter_sums *sums) {
  UNROLL
  for (size_t row = 0; row < width / parts; row++) {
    if (row >= pass->rows) break;
    int32x4_t x[QKV_INTEGER_PARTS], low[QKV_INTEGER_PARTS];
    for (unsigned p = 0; p < parts; p++) {
      const size_t column = row * parts + p;
      x[p] = vaddq_s32(sum_of(sums->shallow[column]), vdupq_n_s32(met->shallow.of[column]));
      if (!deep) continue;
      const int32x4_t offset = vdupq_n_s32(met->deep.of[column]);
      x[p] = vaddq_s32(x[p], vshlq_n_s32(vaddq_s32(sum_of(sums->high[column]), offset), 1));
      low[p] = vaddq_s32(sum_of(sums->low[column]), offset);
    }
    float *out = pass->sums + row * pass->dim + first;
    vst1q_f32(out, vld1q_f32(out) + total_of(x, deep ? low : NULL, parts) * pass->scales[row]);
  }
}

// Quarter `at` of block b, of all groups; `deep`: some of them may have more than QKVI_SHALLOW_MAX bits there.
INLINE void sum_quarter(const value_pass *pass, size_t b, size_t at, size_t width, bool deep, parts_met *met) {
  quarter_sums sums;
  unsigned shallow_groups = 0, deep_groups = 0;
  clear_dots(sums.shallow, width);
  if (deep) clear_dots(sums.high, width);
  if (deep) clear_dots(sums.low, width);
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
    const qkvi_tier_blocks *layout = pass->layouts[g];
    const uint8_t *columns = pass->columns + g * GROUP * width;
    if (b >= layout->count) continue;
    const qkvi_block_kind kind = kind_of_half(layout, b, at / 2);
    if (kind == QKVI_BLOCK_SCATTERED) continue;
    const quarter from = load_any(QKV_V, layout, b, pass->groups[g], at);
    if (deep && kind >= QKVI_BLOCK_7_LOW) {
      deep_groups |= 1u << g;
      add_deep(QKV_V, kind, &from, 0, FIELDS, columns, width, &sums);
    } else {
      shallow_groups |= 1u << g;
      add_shallow(QKV_V, kind, &from, 0, FIELDS, columns, width, sums.shallow);
    }
  }
  if (shallow_groups + deep_groups == 0) return;
  turn_offsets(pass, shallow_groups, width, &met->shallow);
  turn_offsets(pass, deep_groups, width, &met->deep);
  const size_t first = b * QKVI_BLOCK_WIDTH + at * FIELDS;
  if (pass->parts == 1) {
    fold(pass, first, width, 1, deep, met, &sums);
  } else {
    fold(pass, first, width, 2, deep, met, &sums);
  }
}

INLINE void sum_chunk_of(const value_pass *pass, size_t width, prefetching *ahead) {
  parts_met met = {0};
  for (size_t b = 0; b < pass->blocks; b++) {
    for (size_t at = 0; at < QUARTERS; at++) {
      if (b < pass->deep) {
        sum_quarter(pass, b, at, width, true, &met);
      } else {
        sum_quarter(pass, b, at, width, false, &met);
      }
    }
    prefetch_some(ahead);
  }
}

static void sum_chunk(const value_pass *pass, size_t columns, prefetching *ahead) {
  switch (columns) {
    case 1:
      return sum_chunk_of(pass, 1, ahead);
    case 2:
      return sum_chunk_of(pass, 2, ahead);
    case 4:
      return sum_chunk_of(pass, 4, ahead);
    case 8:
      return sum_chunk_of(pass, 8, ahead);
    default:
      assert(!"a chunk of other than 1, 2, 4 or 8 columns");
  }
}

QKV_DECLARE_ACCUMULATE_INTEGER(VARIANT(qkvi_accumulate_integer)) {
  const unsigned parts = weights->parts;
  value_pass pass = {.parts = parts, .dim = values->schedule->dim};
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
    pass.layouts[g] = qkvi_layouts_find(layouts, values->schedule, values->tiers[g]);
    pass.groups[g] = values->groups[g];
    if (pass.layouts[g]->count > pass.blocks) pass.blocks = pass.layouts[g]->count;
    if (pass.layouts[g]->deep > pass.deep) pass.deep = pass.layouts[g]->deep;
  }
  prefetching along = prefetching_of(ahead, pass.blocks);
  for (qkvi_chunk chunk = {0}; chunk.first + chunk.rows < weights->count;) {
    chunk = qkvi_chunk_at(chunk.first + chunk.rows, weights->count, parts);
    pass.columns = weights->bytes + chunk.first * parts * QKV_PAGE_TOKENS;
    pass.rows = chunk.rows;
    pass.scales = weights->scales + chunk.first;
    pass.sums = sums + chunk.first * pass.dim;
    total_columns(&pass, chunk.columns);
    sum_chunk(&pass, chunk.columns, &along);
  }
}
