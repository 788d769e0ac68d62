// Scores in integers (kernel/integer.h). Compiled for AVX2, for AVX-512 and for AVX-512 with VNNI and VBMI.
#include <assert.h>

#include "engine/kernel/kernel.h"
#include "engine/kernel/x86/columns.h"
#include "engine/kernel/x86/twins.h"

// One chunk of queries against some groups of one tier.
typedef struct key_pass {
  const qkvi_tier_blocks *layout;
  const uint16_t *reach;
  const uint8_t *groups[QKV_PAGE_GROUPS];
  const unpacked *unpacked;  // of the only group, if the layout has scattered blocks
  const uint8_t *columns;    // the chunk's
  const int32_t *offsets;    // the chunk's
} key_pass;

// How many sets of sums, and how many groups of one tier are taken at once.
INLINE size_t key_sets(size_t count, size_t width) {
  return BYTE_DOTS && count * width <= QKV_INTEGER_COLUMNS ? 2 : 1;
}

INLINE size_t keys_together(size_t columns) {
  if (!BYTE_DOTS) return 1;
  return columns <= 2 ? 4 : 2;
}

// Block b, of up to four bits. sums [set][count].
INLINE void score_block(const key_pass *pass, qkvi_block_shape shape, size_t b, size_t lane, size_t count,
                        size_t width, column_sums (*sums)[TOGETHER_MAX]) {
  const qkvi_block *block = &pass->layout->blocks[b];
  const uint8_t *columns = pass->columns + b * (QKVI_BLOCK_WIDTH / 4) * width * COLUMN_BYTES;
  shallow_block blocks[TOGETHER_MAX];
  const tables t = load_tables(QKV_K, shape, block);
  UNROLL
  for (size_t g = 0; g < count; g++) {
    load_shallow(QKV_K, shape, block, pass->groups[g], pass->reach, pass->unpacked, b, lane, &blocks[g]);
  }
  UNROLL
  for (size_t f = 0; f < FIELDS; f++) {
    bytes centroids[TOGETHER_MAX];
    UNROLL
    for (size_t g = 0; g < count; g++) centroids[g] = field_of(shape, block, &blocks[g], &t, f);
    add_dots(QKV_K, centroids, count, columns + f * width * COLUMN_BYTES, width, sums[f % key_sets(count, width)]);
  }
}

// The blocks from `begin` on, of up to four bits.
INLINE void score_shallow(const key_pass *pass, size_t begin, size_t lane, size_t count, size_t width,
                          column_sums (*sums)[TOGETHER_MAX], prefetching *ahead) {
  prefetching along = *ahead;
  for (size_t b = begin; b < pass->layout->count;) {
    const size_t end = run_end(pass->layout, b, pass->layout->count);
    const uint8_t shape = pass->layout->blocks[b].shape;
    if (shape == QKVI_BLOCK_NIBBLES) {
      for (; b < end; b++) {
        score_block(pass, QKVI_BLOCK_NIBBLES, b, lane, count, width, sums);
        prefetch_some(&along);
      }
    } else if (shape == QKVI_BLOCK_FIELDS) {
      for (; b < end; b++) {
        score_block(pass, QKVI_BLOCK_FIELDS, b, lane, count, width, sums);
        prefetch_some(&along);
      }
    } else {
      for (; b < end; b++) {
        score_block(pass, QKVI_BLOCK_OTHER, b, lane, count, width, sums);
        prefetch_some(&along);
      }
    }
  }
  *ahead = along;
}

INLINE void score_deep_block(const key_pass *pass, qkvi_block_shape shape, size_t b, size_t lane, size_t width,
                             column_sums *sums, column_sums *low) {
  bytes first[FIELDS], second[FIELDS];
  const uint8_t *columns = pass->columns + b * (QKVI_BLOCK_WIDTH / 4) * width * COLUMN_BYTES;
  load_deep(QKV_K, shape, &pass->layout->blocks[b], pass->groups[0], pass->reach, pass->unpacked, b, lane, first,
            second);
  UNROLL
  for (size_t f = 0; f < FIELDS; f++) {
    add_dots(QKV_K, &first[f], 1, columns + f * width * COLUMN_BYTES, width, sums);
    add_dots(QKV_K, &second[f], 1, columns + f * width * COLUMN_BYTES, width, low);
  }
}

// The blocks with more than four bits of one group: their sums to `sums`, the low planes' to `low`.
INLINE void score_deep(const key_pass *pass, size_t lane, size_t width, column_sums *sums, column_sums *low,
                       prefetching *ahead) {
  const size_t deep = pass->layout->deep;
  clear_sums(sums, 1, width);
  clear_sums(low, 1, width);
  UNROLL
  for (size_t column = 0; column < width; column++) {
    const uint32_t offset = BYTE_DOTS ? (uint32_t)pass->offsets[deep * width + column] : 0;
    sums[0][column] += offset;
    low[0][column] += offset;
  }
  for (size_t b = 0; b < deep; b++) {
    prefetch_some(ahead);
    if (pass->layout->blocks[b].shape == QKVI_BLOCK_BYTES) {
      score_deep_block(pass, QKVI_BLOCK_BYTES, b, lane, width, sums, low);
    } else {
      score_deep_block(pass, QKVI_BLOCK_OTHER, b, lane, width, sums, low);
    }
  }
  add_sums(sums, sums, 1, width);
}

// scores [rows][64] of `count` groups, from their first slot on.
INLINE void score_groups(const key_pass *pass, size_t count, bool with_deep, size_t width, unsigned parts,
                         size_t rows, const float *scales, const uint8_t *gains, float *scores, prefetching *ahead) {
  const size_t deep = with_deep ? pass->layout->deep : 0;
  for (size_t lane = 0; lane < GROUP; lane += LANES) {
    column_sums sets[SETS_MAX][TOGETHER_MAX], *sums = sets[0], low[1];
    clear_sums(sets[0], count, width);
    if (key_sets(count, width) > 1) clear_sums(sets[1], count, width);
    if (with_deep) score_deep(pass, lane, width, sums, low, ahead);
#if BYTE_DOTS
    UNROLL
    for (size_t column = 0; column < width; column++) {
      const int32_t *offsets = pass->offsets + column;
      const int32_t offset = offsets[pass->layout->count * width] - offsets[deep * width];
      UNROLL
      for (size_t g = 0; g < count; g++) sums[g][column] += (uint32_t)offset;
    }
#endif
    score_shallow(pass, deep, lane, count, width, sets, ahead);
    if (key_sets(count, width) > 1) add_sums(sums, sets[1], count, width);
    UNROLL
    for (size_t g = 0; g < count; g++) {
      const lanes factors = gain_lanes(gains + g * GROUP + lane);
      UNROLL
      for (size_t row = 0; row < width / parts; row++) {
        if (row >= rows) break;
        const lanes total = total_of(&sums[g][row * parts], with_deep ? &low[0][row * parts] : NULL, parts);
        store_lanes(scores + row * QKV_PAGE_TOKENS + g * GROUP + lane, total * scales[row] * factors);
      }
    }
  }
}

// The same for whatever number of groups, columns and parts: these become constants.
static void score_chunk(const key_pass *pass, size_t count, const qkvi_chunk *chunk, unsigned parts,
                        const float *scales, const uint8_t *gains, float *scores, prefetching *ahead) {
#define CASE(COUNT, DEEP, WIDTH, PARTS)              \
  if (chunk->columns == (WIDTH) && parts == (PARTS)) \
  return score_groups(pass, COUNT, DEEP, WIDTH, PARTS, chunk->rows, scales, gains, scores, ahead)
#define CASES(COUNT, DEEP) \
  CASE(COUNT, DEEP, 1, 1); \
  CASE(COUNT, DEEP, 2, 1); \
  CASE(COUNT, DEEP, 4, 1); \
  CASE(COUNT, DEEP, 8, 1); \
  CASE(COUNT, DEEP, 2, 2); \
  CASE(COUNT, DEEP, 4, 2); \
  CASE(COUNT, DEEP, 8, 2)
  if (count == 4) {
    CASE(4, false, 1, 1);
    CASE(4, false, 2, 1);
    CASE(4, false, 2, 2);
  } else if (count == 2) {
    CASE(2, false, 4, 1);
    CASE(2, false, 8, 1);
    CASE(2, false, 4, 2);
    CASE(2, false, 8, 2);
  } else if (pass->layout->deep > 0) {
    CASES(1, true);
  } else {
    CASES(1, false);
  }
#undef CASES
#undef CASE
}

// How many groups from g on go together: all of one tier, without deep or scattered blocks.
static size_t groups_together(const uint8_t tiers[QKV_PAGE_GROUPS], size_t g, const qkvi_tier_blocks *layout,
                              size_t most) {
  if (layout->deep + layout->scattered > 0 || g + most > QKV_PAGE_GROUPS) return 1;
  for (size_t i = 1; i < most; i++) {
    if (tiers[g + i] != tiers[g]) return 1;
  }
  return most;
}

QKV_DECLARE_SCORES_INTEGER(TWIN(qkvi_scores_integer)) {
  const size_t length = qkvi_column_bytes(queries->dim), blocks = length / QKVI_BLOCK_WIDTH;
  const unsigned parts = queries->parts;
  unpacked scattered;
  prefetching along = {0};
  for (qkvi_chunk chunk = {0}; chunk.first + chunk.rows < queries->count;) {
    chunk = qkvi_chunk_at(chunk.first + chunk.rows, queries->count, parts);
    const uint8_t *columns = (const uint8_t *)queries->bytes + chunk.first * parts * length;
#if !BYTE_DOTS
    int16_t wide[QKV_INTEGER_COLUMNS * QKV_DIM_MAX];
    widen_columns(columns, length / 4 * chunk.columns, true, wide);
    columns = (const uint8_t *)wide;
#endif
    const size_t most = keys_together(chunk.columns);
    if (chunk.first == 0) along = prefetching_of(ahead, QKV_PAGE_GROUPS / most * blocks);
    for (size_t g = 0, count; g < QKV_PAGE_GROUPS; g += count) {
      const uint8_t tier = keys->tiers[g];
      key_pass pass = {.layout = qkvi_layouts_find(layouts, keys->schedule, tier),
                       .reach = keys->schedule->reach[tier],
                       .unpacked = &scattered,
                       .columns = columns,
                       .offsets = queries->offsets + chunk.first * parts * (blocks + 1)};
      count = groups_together(keys->tiers, g, pass.layout, most);
      for (size_t i = 0; i < count; i++) pass.groups[i] = keys->groups[g + i];
      unpack_scattered(QKV_K, keys, g, pass.layout, &scattered);
      score_chunk(&pass, count, &chunk, parts, queries->scales + chunk.first, keys->gains + g * GROUP,
                  scores + chunk.first * QKV_PAGE_TOKENS + g * GROUP, &along);
    }
  }
}
