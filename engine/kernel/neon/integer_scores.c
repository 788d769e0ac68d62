// Scores in integers (kernel/integer.h). Compiled with and without dot product instructions.
#include <assert.h>

#include "engine/kernel/kernel.h"
#include "engine/kernel/neon/centroids.h"
#include "engine/kernel/neon/variants.h"

// One chunk of queries against one group.
typedef struct key_pass {
  const qkvi_tier_blocks *layout;
  const uint8_t *group;
  const uint8_t *columns;  // the chunk's
  unsigned parts;
  size_t rows;
  const float *scales;
  const float *gains;  // [GROUP]
  float *scores;       // [rows][64], from the group's first slot on
} key_pass;

INLINE const uint8_t *block_columns(const key_pass *pass, size_t b, size_t width) {
  return pass->columns + b * QKVI_BLOCK_WIDTH * width;
}

// A block whose halves have kinds of their own, the first one's coordinates in fields 0 and 1.
INLINE void score_halves(const key_pass *pass, size_t b, size_t at, size_t width, bool deep, quarter_sums *sums) {
  const quarter from = load_any(QKV_K, pass->layout, b, pass->group, at);
  const uint8_t *columns = block_columns(pass, b, width);
  UNROLL
  for (size_t half = 0; half < HALVES; half++) {
    const qkvi_block_kind kind = kind_of_half(pass->layout, b, half);
    if (kind == QKVI_BLOCK_SCATTERED) continue;
    if (deep && kind >= QKVI_BLOCK_7_LOW) {
      add_deep(QKV_K, kind, &from, 2 * half, 2 * half + 2, columns, width, sums);
    } else {
      add_shallow(QKV_K, kind, &from, 2 * half, 2 * half + 2, columns, width, sums->shallow);
    }
  }
}

// The blocks of up to QKVI_SHALLOW_MAX bits.
INLINE void score_shallow(const key_pass *pass, size_t at, size_t width, quarter_sums *sums) {
  for (size_t b = pass->layout->deep; b < pass->layout->count; b++) {
    const qkvi_block *block = &pass->layout->blocks[b];
    if (qkvi_block_is_whole(block)) {
      const quarter from = load_whole(block, pass->group, at, false);
      add_shallow(QKV_K, block->kind, &from, 0, FIELDS, block_columns(pass, b, width), width, sums->shallow);
    } else {
      score_halves(pass, b, at, width, false, sums);
    }
  }
}

// `width`, `parts` and `deep` are constants.
INLINE void put_scores(const key_pass *pass, size_t at, size_t width, unsigned parts, bool deep,
                       const quarter_sums *sums) {
  const float32x4_t gains = vld1q_f32(pass->gains + at * FIELDS);
  UNROLL
  for (size_t row = 0; row < width / parts; row++) {
    if (row >= pass->rows) break;
    int32x4_t x[QKV_INTEGER_PARTS], low[QKV_INTEGER_PARTS];
    for (unsigned p = 0; p < parts; p++) {
      x[p] = sum_of(sums->shallow[row * parts + p]);
      if (deep) x[p] = vaddq_s32(x[p], vshlq_n_s32(sum_of(sums->high[row * parts + p]), 1));
      if (deep) low[p] = sum_of(sums->low[row * parts + p]);
    }
    const float32x4_t total = total_of(x, deep ? low : NULL, parts);
    vst1q_f32(pass->scores + row * QKV_PAGE_TOKENS + at * FIELDS, total * pass->scales[row] * gains);
  }
}

INLINE void score_group_of(const key_pass *pass, size_t width, bool deep, prefetching *ahead) {
  for (size_t at = 0; at < QUARTERS; at++) {
    quarter_sums sums;
    clear_dots(sums.shallow, width);
    if (deep) clear_dots(sums.high, width);
    if (deep) clear_dots(sums.low, width);
    for (size_t b = 0; deep && b < pass->layout->deep; b++) score_halves(pass, b, at, width, true, &sums);
    score_shallow(pass, at, width, &sums);
    if (pass->parts == 1) {
      put_scores(pass, at, width, 1, deep, &sums);
    } else {
      put_scores(pass, at, width, 2, deep, &sums);
    }
    prefetch_some(ahead);
  }
}

static void score_group(const key_pass *pass, size_t columns, prefetching *ahead) {
#define CASE(WIDTH)                              \
  case WIDTH:                                    \
    if (pass->layout->deep == 0) {               \
      score_group_of(pass, WIDTH, false, ahead); \
    } else {                                     \
      score_group_of(pass, WIDTH, true, ahead);  \
    }                                            \
    break
  switch (columns) {
    CASE(1);
    CASE(2);
    CASE(4);
    CASE(8);
    default:
      assert(!"a chunk of other than 1, 2, 4 or 8 columns");
  }
#undef CASE
}

QKV_DECLARE_SCORES_INTEGER(VARIANT(qkvi_scores_integer)) {
  const size_t length = qkvi_column_bytes(queries->dim);
  const unsigned parts = queries->parts;
  float gains[QKV_PAGE_TOKENS];
  for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) gains[t] = qkvi_integers.gains[keys->gains[t]];
  prefetching along = prefetching_of(ahead, QKV_PAGE_GROUPS * QUARTERS);
  for (qkvi_chunk chunk = {0}; chunk.first + chunk.rows < queries->count;) {
    chunk = qkvi_chunk_at(chunk.first + chunk.rows, queries->count, parts);
    for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
      const key_pass pass = {.layout = qkvi_layouts_find(layouts, keys->schedule, keys->tiers[g]),
                             .group = keys->groups[g],
                             .columns = (const uint8_t *)queries->bytes + chunk.first * parts * length,
                             .parts = parts,
                             .rows = chunk.rows,
                             .scales = queries->scales + chunk.first,
                             .gains = gains + g * GROUP,
                             .scores = scores + chunk.first * QKV_PAGE_TOKENS + g * GROUP};
      score_group(&pass, chunk.columns, &along);
    }
  }
}
