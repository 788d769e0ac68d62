// Scores in integers (kernel/integer.h). Compiled for AVX2, for AVX-512 and for AVX-512 with VNNI and VBMI.
#include <assert.h>

#include "engine/kernel/kernel.h"
#include "engine/kernel/x86/banded.h"
#include "engine/kernel/x86/banded_scores.h"
#include "engine/kernel/x86/variants.h"

// One chunk of queries against some groups, all of one tier or all of plain blocks.
typedef struct key_pass {
  const qkvi_tier_blocks *const *layouts;  // of each group
  const uint8_t *const *groups;
  const mixed_group *mixed;    // of each group
  const spread_lines *spread;  // likewise
  size_t blocks, deep;
  uint8_t shape;           // that blocks are taken for
  const uint8_t *columns;  // the chunk's
  const int32_t *offsets;  // the chunk's
  size_t wide;             // blocks that need all columns; the others only the second of each two
} key_pass;

// How many sets of sums, and how many groups of one tier are taken at once.
INLINE size_t key_sets(size_t count, size_t width) {
  return BYTE_DOTS && count * width <= QKV_INTEGER_COLUMNS ? 2 : 1;
}

INLINE size_t keys_together(size_t columns) {
  if (!BYTE_DOTS) return 1;
  return columns <= 2 ? 4 : 2;
}

INLINE const uint8_t *block_columns(const key_pass *pass, size_t b, size_t width) {
  return pass->columns + b * (QKVI_BLOCK_WIDTH / 4) * width * COLUMN_BYTES;
}

// Plain blocks of one tier, or of several; those that have been spread; other ones.
typedef enum key_way { KEYS_ALIKE, KEYS_VARIOUS, KEYS_SPREAD, KEYS_ANY } key_way;

// Block b, of up to QKVI_SHALLOW_MAX bits. sums [set][count]. `halved`: only the second of each two columns.
INLINE void score_block(const key_pass *pass, qkvi_block_shape shape, size_t b, size_t lane, size_t count,
                        size_t width, key_way way, bool halved, column_sums (*sums)[TOGETHER_MAX]) {
  const uint8_t *columns = block_columns(pass, b, width);
  const qkvi_block *blocks[TOGETHER_MAX];
  source from[TOGETHER_MAX];
  UNROLL
  for (size_t g = 0; g < count; g++) {
    blocks[g] = &pass->layouts[way == KEYS_ALIKE ? 0 : g]->blocks[b];
    from[g] = way == KEYS_SPREAD ? load_spread(blocks[g], pass->groups[g], pass->spread[g], lane)
                                 : load_source(QKV_K, shape, blocks[g], pass->groups[g], lane);
  }
  UNROLL
  for (size_t f = 0; f < FIELDS; f++) {
    bytes centroids[TOGETHER_MAX];
    UNROLL
    for (size_t g = 0; g < count; g++) centroids[g] = centroids_of(QKV_K, shape, blocks[g], &from[g], f);
    add_some_dots(QKV_K, centroids, count, columns + f * width * COLUMN_BYTES, halved ? 1 : 0, halved ? 2 : 1, width,
                  sums[f % key_sets(count, width)]);
  }
}

#define RUN(SHAPE)                                                        \
  case SHAPE:                                                             \
    for (; b < end; b++) {                                                \
      score_block(pass, SHAPE, b, lane, count, width, way, halved, sums); \
      prefetch_some(&along);                                              \
    }                                                                     \
    break

// The blocks from `begin` to `last`, which are plain. All are taken for the largest shape: with look-ups of 64 bytes
// that costs little, and a loop for each shape more (a calibrated page with four of them a seventh). Without, a run
// of one shape at a time, where they are of one tier.
INLINE void score_plain(const key_pass *pass, size_t begin, size_t last, size_t lane, size_t count, size_t width,
                        key_way way, bool halved, column_sums (*sums)[TOGETHER_MAX], prefetching *ahead) {
  const bool own = way == KEYS_ALIKE && !BYTE_DOTS;
  prefetching along = *ahead;
  for (size_t b = begin; b < last;) {
    const size_t end = own ? run_end(pass->layouts[0], b, last) : last;
    switch (own ? pass->layouts[0]->blocks[b].shape : pass->shape) {
      RUN(QKVI_BLOCK_NIBBLES);
      RUN(QKVI_BLOCK_FIELDS);
      default:
        RUN(QKVI_BLOCK_SIXES);
    }
  }
  *ahead = along;
}

#undef RUN

// Scores of blocks whose halves have been spread to 64 bytes.
INLINE void score_spread(const key_pass *pass, size_t begin, size_t last, size_t lane, size_t count, size_t width,
                         bool halved, column_sums (*sums)[TOGETHER_MAX], prefetching *ahead) {
  prefetching along = *ahead;
  for (size_t b = begin; b < last; b++) {
    score_block(pass, QKVI_BLOCK_SIXES, b, lane, count, width, KEYS_SPREAD, halved, sums);
    prefetch_some(&along);
  }
  *ahead = along;
}

// Scores of any blocks, whose centroids have been looked up already.
INLINE void score_mixed(const key_pass *pass, size_t begin, size_t last, size_t lane, size_t count, size_t width,
                        bool halved, column_sums (*sums)[TOGETHER_MAX], prefetching *ahead) {
  prefetching along = *ahead;
  for (size_t b = begin; b < last; b++) {
    const uint8_t *columns = block_columns(pass, b, width);
    UNROLL
    for (size_t f = 0; f < FIELDS; f++) {
      bytes centroids[TOGETHER_MAX];
      UNROLL
      for (size_t g = 0; g < count; g++) centroids[g] = pass->mixed[g][b][lane / LANES][0][f];
      add_some_dots(QKV_K, centroids, count, columns + f * width * COLUMN_BYTES, halved ? 1 : 0, halved ? 2 : 1,
                    width, sums[f % key_sets(count, width)]);
    }
    prefetch_some(&along);
  }
  *ahead = along;
}

// The sums of the high bytes of deep blocks, of the low ones, or of both, of group g.
INLINE void score_planes(const key_pass *pass, size_t lane, size_t g, size_t first, size_t end, size_t width,
                         column_sums sums[2]) {
  for (size_t b = 0; b < pass->deep; b++) {
    const mixed_planes *planes = &pass->mixed[g][b][lane / LANES];
    const uint8_t *columns = block_columns(pass, b, width);
    UNROLL
    for (size_t f = 0; f < FIELDS; f++, columns += width * COLUMN_BYTES) {
      UNROLL
      for (size_t p = first; p < end; p++) add_dots(QKV_K, &(*planes)[p][f], 1, columns, width, &sums[p]);
    }
  }
}

// The blocks of more than QKVI_SHALLOW_MAX bits, of group g: their sums, and those of the low bytes.
INLINE void score_deep(const key_pass *pass, size_t lane, size_t g, size_t width, words *sums, words *low) {
  column_sums both[2];
  clear_sums(both, 2, width);
  if (BYTE_DOTS) {
    score_planes(pass, lane, g, 0, 2, width, both);
  } else {  // one after the other, for want of registers
    score_planes(pass, lane, g, 0, 1, width, both);
    score_planes(pass, lane, g, 1, 2, width, both);
  }
  UNROLL
  for (size_t column = 0; column < width; column++) {
    const uint32_t offset = BYTE_DOTS ? (uint32_t)pass->offsets[pass->deep * width + column] : 0;
    sums[column] = 2 * (both[0][column] + offset);
    low[column] = both[1][column] + offset;
  }
}

// score_deep for all groups, for any width. A function of its own, so that the code after it has all registers.
__attribute__((noinline)) static void score_deep_groups(const key_pass *pass, size_t lane, size_t count, size_t width,
                                                        column_sums *sums, column_sums *low) {
  for (size_t g = 0; g < count; g++) {
    if (width == 1) score_deep(pass, lane, g, 1, sums[g], low[g]);
    if (width == 2) score_deep(pass, lane, g, 2, sums[g], low[g]);
    if (width == 4) score_deep(pass, lane, g, 4, sums[g], low[g]);
    if (width == 8) score_deep(pass, lane, g, 8, sums[g], low[g]);
  }
}

// `count`, `width` and `way` are constants.
INLINE void score_groups(const key_pass *pass, size_t count, size_t width, key_way way, const key_outcome *out,
                         prefetching *ahead) {
  const size_t deep = way == KEYS_ANY || way == KEYS_SPREAD ? pass->deep : 0, blocks = pass->blocks;
  const size_t least = pass->wide < deep ? deep : pass->wide;
  const size_t wide = way == KEYS_VARIOUS || least > blocks ? blocks : least;
  const bool halves = way != KEYS_VARIOUS && width > 1;
  for (size_t lane = 0; lane < GROUP; lane += LANES) {
    column_sums sets[SETS_MAX][TOGETHER_MAX], *sums = sets[0], high[TOGETHER_MAX], low[TOGETHER_MAX];
    prefetch_some(ahead);
    clear_sums(sets[0], count, width);
    if (key_sets(count, width) > 1) clear_sums(sets[1], count, width);
    if (deep > 0) {
      score_deep_groups(pass, lane, count, width, high, low);
      add_sums(sums, high, count, width);
    }
#if BYTE_DOTS
    UNROLL
    for (size_t column = 0; column < width; column++) {
      const int32_t *offsets = pass->offsets + column;
      const int32_t offset = offsets[blocks * width] - offsets[deep * width];
      UNROLL
      for (size_t g = 0; g < count; g++) sums[g][column] += (uint32_t)offset;
    }
#endif
    if (way == KEYS_ANY) {
      score_mixed(pass, deep, wide, lane, count, width, false, sets, ahead);
      if (halves && wide < blocks) score_mixed(pass, wide, blocks, lane, count, width, true, sets, ahead);
    } else if (way == KEYS_SPREAD) {
      score_spread(pass, deep, wide, lane, count, width, false, sets, ahead);
      if (halves && wide < blocks) score_spread(pass, wide, blocks, lane, count, width, true, sets, ahead);
    } else {
      score_plain(pass, 0, wide, lane, count, width, way, false, sets, ahead);
      if (halves && wide < blocks) score_plain(pass, wide, blocks, lane, count, width, way, true, sets, ahead);
    }
    if (key_sets(count, width) > 1) add_sums(sums, sets[1], count, width);
    UNROLL
    for (size_t g = 0; g < count; g++) {
      const lanes factors = gain_lanes(out->gains + g * GROUP + lane);
      if (out->parts == 1) {
        put_scores(out, g, lane, width, 1, factors, sums[g], deep > 0 ? low[g] : NULL);
      } else {
        put_scores(out, g, lane, width, 2, factors, sums[g], deep > 0 ? low[g] : NULL);
      }
    }
  }
}

// score_groups for any number of groups and columns, which become constants. Separate functions, as the compiler
// optimizes these better.
#define CASE(COUNT, WIDTH, WAY) \
  if (count == (COUNT) && columns == (WIDTH)) return score_groups(pass, COUNT, WIDTH, WAY, out, ahead)
#define CASES_ALONE(WAY) \
  CASE(1, 1, WAY);       \
  CASE(1, 2, WAY);       \
  CASE(1, 4, WAY);       \
  CASE(1, 8, WAY)
#define CASES_TOGETHER(WAY) \
  CASE(4, 1, WAY);          \
  CASE(4, 2, WAY);          \
  CASE(2, 4, WAY);          \
  CASE(2, 8, WAY)
static void score_alike(const key_pass *pass, size_t count, size_t columns, const key_outcome *out,
                        prefetching *ahead) {
#if BYTE_DOTS
  CASES_TOGETHER(KEYS_ALIKE);
#else
  CASES_ALONE(KEYS_ALIKE);
#endif
  assert(!"a combination without code of its own");
}

#if BYTE_DOTS
static void score_various(const key_pass *pass, size_t count, size_t columns, const key_outcome *out,
                          prefetching *ahead) {
  CASES_TOGETHER(KEYS_VARIOUS);
  assert(!"a combination without code of its own");
}
#endif

static void score_halves(const key_pass *pass, size_t count, size_t columns, const key_outcome *out,
                         prefetching *ahead) {
#if BYTE_DOTS
  CASES_TOGETHER(KEYS_SPREAD);
#else
  CASES_ALONE(KEYS_SPREAD);
#endif
  assert(!"a combination without code of its own");
}

static void score_any(const key_pass *pass, size_t count, size_t columns, const key_outcome *out,
                      prefetching *ahead) {
#if BYTE_DOTS
  CASES_TOGETHER(KEYS_ANY);
#endif
  CASES_ALONE(KEYS_ANY);
  assert(!"a combination without code of its own");
}
#undef CASES_TOGETHER
#undef CASES_ALONE
#undef CASE

static void score_chunk(const page_groups *page, const key_pass *pass, size_t count, size_t columns,
                        const key_outcome *out, prefetching *ahead) {
  if (page->spread) return score_halves(pass, count, columns, out, ahead);
  if (!page->plain) return score_any(pass, count, columns, out, ahead);
#if BYTE_DOTS
  if (!page->alike) return score_various(pass, count, columns, out, ahead);
#endif
  score_alike(pass, count, columns, out, ahead);
}

#if STEADY_LOOPS
// ---- Steady blocks ----

// A chunk of queries of one byte against a page.
typedef struct steady_keys {
  size_t blocks, rows;
  const uint8_t *columns, *gains;
  const int32_t *offsets;  // of all blocks
  const float *scales;
  float *scores;
} steady_keys;

// What centroids are more than 0 counts, of the sum of a column's bytes.
INLINE words steady_offset(qkvi_block_shape shape, const int32_t *offset) {
#if BYTE_DOTS
  (void)shape;
  return (words)repeat_word(offset);
#else
  return (words){0} + (uint32_t)(*offset / 128 * narrow_most(shape));
#endif
}

// Vectors of groups from `first` on; `shape`, `count` and `width` are constants.
INLINE void score_steady_groups(const page_groups *page, const steady_keys *keys, qkvi_block_shape shape,
                                size_t first, size_t count, size_t width, prefetching *ahead) {
  const size_t sets = key_sets(count, width);
  const uint8_t *columns = keys->columns;
  steady_group groups[TOGETHER_MAX];
  column_sums sums[SETS_MAX][TOGETHER_MAX];
  UNROLL
  for (size_t g = 0; g < count; g += VECTORS) {
    groups[g / VECTORS] = steady_of(QKV_K, shape, page, (first + g) / VECTORS);
  }
  UNROLL
  for (size_t set = 1; set < sets; set++) clear_sums(sums[set], count, width);
  UNROLL
  for (size_t column = 0; column < width; column++) {
    UNROLL
    for (size_t g = 0; g < count; g++) sums[0][g][column] = steady_offset(shape, &keys->offsets[column]);
  }
  for (size_t b = 0; b < keys->blocks; b++, columns += FIELDS * width * 4) {
    joined codes[TOGETHER_MAX];
    prefetch_lines(ahead, 2 * count / VECTORS);
    UNROLL
    for (size_t g = 0; g < count; g++) {
      const size_t vector = (count < VECTORS ? first : g) % VECTORS;
      codes[g] = steady_codes(shape, &groups[g / VECTORS], b * LINE + vector * sizeof(bytes));
    }
    add_steady(QKV_K, shape, groups, VECTORS, codes, count, columns, b * FIELDS, width, sets, sums);
  }
  UNROLL
  for (size_t set = 1; set < sets; set++) add_sums(sums[0], sums[set], count, width);
  lanes factors[TOGETHER_MAX];
  UNROLL
  for (size_t g = 0; g < count; g++) factors[g] = gain_lanes(keys->gains + (first + g) * LANES);
  UNROLL
  for (size_t row = 0; row < width; row++) {
    if (row >= keys->rows) break;
    UNROLL
    for (size_t g = 0; g < count; g++) {
      store_lanes(keys->scores + row * QKV_PAGE_TOKENS + (first + g) * LANES,
                  total_of(&sums[0][g][row], NULL, 1) * keys->scales[row] * factors[g]);
    }
  }
}

// Functions of their own for the constants: vectors at once, columns.
#define STEADY(NAME, SHAPE, COUNT, WIDTH)                                                 \
  static void NAME(const page_groups *page, const steady_keys *all, prefetching *ahead) { \
    const steady_keys keys = *all;                                                        \
    prefetching along = *ahead;                                                           \
    for (size_t g = 0; g < QKV_PAGE_GROUPS * VECTORS; g += (COUNT)) {                     \
      score_steady_groups(page, &keys, SHAPE, g, COUNT, WIDTH, &along);                   \
    }                                                                                     \
    *ahead = along;                                                                       \
  }
STEADY(score_nibbles_1, QKVI_BLOCK_NIBBLES, STEADY_MANY, 1)
STEADY(score_nibbles_2, QKVI_BLOCK_NIBBLES, STEADY_MANY, 2)
STEADY(score_nibbles_4, QKVI_BLOCK_NIBBLES, STEADY_FEW, 4)
STEADY(score_nibbles_8, QKVI_BLOCK_NIBBLES, STEADY_FEW, 8)
STEADY(score_fields_1, QKVI_BLOCK_FIELDS, STEADY_MANY, 1)
STEADY(score_fields_2, QKVI_BLOCK_FIELDS, STEADY_MANY, 2)
STEADY(score_fields_4, QKVI_BLOCK_FIELDS, STEADY_FEW, 4)
STEADY(score_fields_8, QKVI_BLOCK_FIELDS, STEADY_FEW, 8)
#undef STEADY

static void score_steady(const page_groups *page, const steady_keys *keys, size_t columns, prefetching *ahead) {
  const bool fields = page->shape == QKVI_BLOCK_FIELDS;
  if (columns == 1) return (fields ? score_fields_1 : score_nibbles_1)(page, keys, ahead);
  if (columns == 2) return (fields ? score_fields_2 : score_nibbles_2)(page, keys, ahead);
  if (columns == 4) return (fields ? score_fields_4 : score_nibbles_4)(page, keys, ahead);
  (fields ? score_fields_8 : score_nibbles_8)(page, keys, ahead);
}

static void scores_of_steady(const page_groups *page, const qkv_page_codes *codes, const qkv_integer_queries *queries,
                             size_t length, qkv_ahead ahead, float *scores) {
  const size_t blocks = length / QKVI_BLOCK_WIDTH;
  prefetching along = prefetching_all(ahead);
  for (qkvi_chunk chunk = {0}; chunk.first + chunk.rows < queries->count;) {
    chunk = qkvi_chunk_at(chunk.first + chunk.rows, queries->count, 1);
    const uint8_t *columns = (const uint8_t *)queries->bytes + chunk.first * length;
#if !BYTE_DOTS
    split_columns halves;
    split_large(QKV_K, page->shape, columns, page->blocks * QKVI_BLOCK_WIDTH, chunk.columns, &halves);
    columns = halves.whole;
#endif
    const steady_keys keys = {.blocks = page->blocks,
                              .rows = chunk.rows,
                              .columns = columns,
                              .gains = codes->gains,
                              .offsets = queries->offsets + chunk.first * (blocks + 1) + page->blocks * chunk.columns,
                              .scales = queries->scales + chunk.first,
                              .scores = scores + chunk.first * QKV_PAGE_TOKENS};
    score_steady(page, &keys, chunk.columns, &along);
  }
  prefetch_rest(&along);
}
#endif

#if STEADY_LOOPS
// ---- Banded blocks ----

// Blocks b to `end`, of vectors of groups from g on; all but b, `end` and g are constants. Returns `end`.
INLINE size_t score_banded_blocks(const banded_keys *keys, qkvi_block_shape shape, size_t b, size_t end, size_t g,
                                  size_t count, size_t width, size_t step, column_sums (*sums)[TOGETHER_MAX],
                                  prefetching *along) {
  const uint8_t *columns = keys->columns + b * FIELDS * width * COLUMN_BYTES;
  for (; b < end; b++) {
    const banded_block block = banded_block_of(table_part(QKV_K), shape, &keys->page, b);
    source from[TOGETHER_MAX];
    prefetch_some(along);
    UNROLL
    for (size_t i = 0; i < count; i++) from[i] = banded_source(shape, &block, banded_at(&keys->page, g + i));
    UNROLL
    for (size_t f = 0; f < FIELDS; f++, columns += width * COLUMN_BYTES) {
      bytes centroids[TOGETHER_MAX];
      UNROLL
      for (size_t i = 0; i < count; i++) centroids[i] = banded_centroids(shape, &block, &from[i], f);
      add_signed_dots(centroids, count, columns, step - 1, step, width, sums[f % key_sets(count, width)]);
    }
  }
  return b;
}

// Vectors of groups from g on; `count`, `width` and `parts` are constants.
INLINE void score_banded_groups(const banded_keys *keys, size_t g, size_t count, size_t width, unsigned parts,
                                prefetching *along) {
  const size_t deep = keys->page.layout->deep, blocks = keys->page.layout->count, sets = key_sets(count, width);
  const size_t wide = keys->wide < deep ? deep : keys->wide < blocks ? keys->wide : blocks;
  column_sums sums[SETS_MAX][TOGETHER_MAX], high[TOGETHER_MAX], low[TOGETHER_MAX];
  UNROLL
  for (size_t set = 0; set < sets; set++) clear_sums(sums[set], count, width);
  if (deep > 0) {
    const size_t each = VECTORS > 1 ? 1 : count;
    UNROLL
    for (size_t i = 0; i < count; i += each) {
      const key_pass pass = {
          .mixed = keys->mixed + (g + i) / VECTORS, .deep = deep, .columns = keys->deep, .offsets = keys->offsets};
      score_deep_groups(&pass, (g + i) % VECTORS * LANES, each, width, high + i, low + i);
    }
    add_sums(sums[0], high, count, width);
  }
  UNROLL
  for (size_t column = 0; BYTE_DOTS && column < width; column++) {
    const int32_t *offsets = keys->offsets + column;
    const uint32_t offset = (uint32_t)offsets[blocks * width] - (uint32_t)offsets[deep * width];
    UNROLL
    for (size_t i = 0; i < count; i++) sums[0][i][column] += offset;
  }
  size_t b = deep;
  if (parts == 2) b = score_banded_blocks(keys, QKVI_BLOCK_SIXES, b, wide, g, count, width, 1, sums, along);
  b = score_banded_blocks(keys, QKVI_BLOCK_SIXES, b, banded_until(&keys->page, b, QKVI_BLOCK_NIBBLES), g, count,
                          width, parts, sums, along);
  score_banded_blocks(keys, QKVI_BLOCK_NIBBLES, b, blocks, g, count, width, parts, sums, along);
  UNROLL
  for (size_t set = 1; set < sets; set++) add_sums(sums[0], sums[set], count, width);
  UNROLL
  for (size_t i = 0; i < count; i++) {
    const lanes factors = gain_lanes(keys->out.gains + (g + i) * LANES);
    put_scores(&keys->out, 0, (g + i) * LANES, width, parts, factors, sums[0][i], deep > 0 ? low[i] : NULL);
  }
}

// Functions of their own for the constants: vectors at once, columns, bytes of a query.
#define BANDED(COUNT, WIDTH, PARTS)                                                         \
  static void score_banded_##WIDTH##_##PARTS(const banded_keys *keys, prefetching *ahead) { \
    prefetching along = *ahead;                                                             \
    for (size_t g = 0; g < QKV_PAGE_GROUPS * VECTORS; g += (COUNT)) {                       \
      score_banded_groups(keys, g, COUNT, WIDTH, PARTS, &along);                            \
    }                                                                                       \
    *ahead = along;                                                                         \
  }
BANDED(STEADY_MANY, 1, 1)
BANDED(STEADY_MANY, 2, 1)
BANDED(STEADY_FEW, 4, 1)
BANDED(STEADY_FEW, 8, 1)
BANDED(STEADY_MANY, 2, 2)
BANDED(STEADY_FEW, 4, 2)
BANDED(STEADY_FEW, 8, 2)
#undef BANDED

static void score_banded(const banded_keys *keys, size_t columns, prefetching *along) {
  const bool two = keys->out.parts == 2;
  if (columns == 1) return score_banded_1_1(keys, along);
  if (columns == 2) return (two ? score_banded_2_2 : score_banded_2_1)(keys, along);
  if (columns == 4) return (two ? score_banded_4_2 : score_banded_4_1)(keys, along);
  (two ? score_banded_8_2 : score_banded_8_1)(keys, along);
}

static void scores_of_banded(const qkv_page_codes *codes, const page_groups *page, const qkv_integer_queries *queries,
                             float *scores, prefetching *along) {
  const size_t length = qkvi_column_bytes(queries->dim), blocks = length / QKVI_BLOCK_WIDTH;
  const unsigned parts = queries->parts;
  _Alignas(64) banded_halves halves;
  mixed_group mixed[QKV_PAGE_GROUPS];
  banded_keys keys = {.page = banded_of(QKV_K, page, halves), .wide = queries->wide, .mixed = mixed};
  mix_groups(QKV_K, page->layouts[0], page->layouts[0]->deep, page->groups, QKV_PAGE_GROUPS, mixed);
  for (qkvi_chunk chunk = {0}; chunk.first + chunk.rows < queries->count;) {
    chunk = qkvi_chunk_at(chunk.first + chunk.rows, queries->count, parts);
    keys.columns = keys.deep = (const uint8_t *)queries->bytes + chunk.first * parts * length;
    keys.offsets = queries->offsets + chunk.first * parts * (blocks + 1);
    keys.out = (key_outcome){.parts = parts,
                             .rows = chunk.rows,
                             .scales = queries->scales + chunk.first,
                             .gains = codes->gains,
                             .scores = scores + chunk.first * QKV_PAGE_TOKENS};
#if !BYTE_DOTS
    _Alignas(32) signed_columns narrow;
    _Alignas(32) int16_t wide[QKV_INTEGER_COLUMNS * QKV_DIM_MAX];
#if LANES == 8
    if (parts == 2 && page->layouts[0]->deep == 0 && length <= WHOLE_MOST) {
      join_columns(keys.columns, page->blocks * QKVI_BLOCK_WIDTH * chunk.columns, wide);
      keys.columns = (const uint8_t *)wide;
      score_whole_chunk(&keys, chunk.columns / parts, along);
      continue;
    }
#endif
    widen_columns(keys.deep, page->layouts[0]->deep * FIELDS * chunk.columns, true, wide);
    sign_columns(keys.columns, page->blocks * QKVI_BLOCK_WIDTH * chunk.columns, narrow);
    keys.columns = narrow;
    keys.deep = (const uint8_t *)wide;
#endif
    score_banded(&keys, chunk.columns, along);
  }
}
#endif

// How many groups from g on go together: all of one tier, or plain ones.
static size_t groups_together(const page_groups *page, size_t g, size_t most) {
  if (page->alike || page->plain || page->spread) return most;
  if (g + most > QKV_PAGE_GROUPS) return 1;
  for (size_t i = 1; i < most; i++) {
    if (page->layouts[g + i] != page->layouts[g]) return 1;
  }
  return most;
}

QKV_DECLARE_SCORES_INTEGER(VARIANT(qkvi_scores_integer)) {
  const size_t length = qkvi_column_bytes(queries->dim), blocks = length / QKVI_BLOCK_WIDTH;
  const unsigned parts = queries->parts;
  page_groups page;
  mixed_group mixed[QKV_PAGE_GROUPS];
  _Alignas(64) spread_lines spread[QKV_PAGE_GROUPS];
  prefetching along = {0};
  find_groups(keys, layouts, &page);
#if STEADY_LOOPS
  if (page.steady && parts == 1) return scores_of_steady(&page, keys, queries, length, ahead, scores);
  if (groups_are_banded(&page)) {
    const size_t steps = page.blocks - page.layouts[0]->deep + 1;
    along = prefetching_of(ahead, steps * QKV_PAGE_GROUPS * VECTORS / STEADY_FEW);
    scores_of_banded(keys, &page, queries, scores, &along);
    return;
  }
#endif
  if (!page.plain) {
    for (size_t g = 0, count; g < QKV_PAGE_GROUPS; g += count) {
      for (count = 1; g + count < QKV_PAGE_GROUPS && page.layouts[g + count] == page.layouts[g];) count++;
      const size_t blocks_ahead = page.spread ? page.layouts[g]->deep : page.layouts[g]->count;
      mix_groups(QKV_K, page.layouts[g], blocks_ahead, &page.groups[g], count, &mixed[g]);
    }
    if (page.spread) spread_groups(QKV_K, keys, &page, spread);
  }
  for (qkvi_chunk chunk = {0}; chunk.first + chunk.rows < queries->count;) {
    chunk = qkvi_chunk_at(chunk.first + chunk.rows, queries->count, parts);
    const uint8_t *columns = (const uint8_t *)queries->bytes + chunk.first * parts * length;
#if !BYTE_DOTS
    int16_t wide[QKV_INTEGER_COLUMNS * QKV_DIM_MAX];
    widen_columns(columns, length / 4 * chunk.columns, true, wide);
    columns = (const uint8_t *)wide;
#endif
    const size_t most = keys_together(chunk.columns);
    if (chunk.first == 0) {
      const size_t steps = page.layouts[0]->count - page.layouts[0]->deep + 1;
      along = prefetching_of(ahead, QKV_PAGE_GROUPS / most * steps * (GROUP / LANES));
    }
    for (size_t g = 0, count; g < QKV_PAGE_GROUPS; g += count) {
      count = groups_together(&page, g, most);
      const key_pass pass = {.layouts = &page.layouts[g],
                             .groups = &page.groups[g],
                             .mixed = &mixed[g],
                             .spread = &spread[g],
                             .blocks = (page.plain || page.spread) && most > 1 ? page.blocks : page.layouts[g]->count,
                             .shape = page.shape,
                             .deep = page.layouts[g]->deep,
                             .columns = columns,
                             .wide = parts == 2 ? queries->wide : blocks,
                             .offsets = queries->offsets + chunk.first * parts * (blocks + 1)};
      const key_outcome out = {.parts = parts,
                               .rows = chunk.rows,
                               .scales = queries->scales + chunk.first,
                               .gains = keys->gains + g * GROUP,
                               .scores = scores + chunk.first * QKV_PAGE_TOKENS + g * GROUP};
      score_chunk(&page, &pass, count, chunk.columns, &out, &along);
    }
  }
}
