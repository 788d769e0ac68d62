// Weighted sums in integers (kernel/integer.h). Compiled for AVX2, for AVX-512 and for AVX-512 with VNNI and VBMI.
#include <assert.h>

#include "engine/kernel/kernel.h"
#include "engine/kernel/x86/banded.h"
#include "engine/kernel/x86/variants.h"

// The groups of one tier, or all groups where their blocks are plain.
typedef struct value_run {
  const qkvi_tier_blocks *const *layouts;  // only the first one counts where they are alike
  const uint8_t *const *groups;
  size_t count, blocks;
  const uint8_t *columns[QKV_PAGE_GROUPS];  // the chunk's, from the group's first token on
  const mixed_group *mixed;                 // of each group
  const spread_lines *spread;               // likewise
  // Of some of a page's groups: theirs, and which.
  const uint8_t *some[QKV_PAGE_GROUPS];
  uint8_t numbers[QKV_PAGE_GROUPS];
  uint8_t shape;  // that blocks are taken for
} value_run;

// What becomes of a chunk's sums. A page of several tiers is summed tier by tier, the highest first, in integers; a
// block of a lower tier is then one of all the higher ones as well.
typedef struct value_outcome {
  unsigned parts;
  size_t rows, dim;
  const float *scales;
  float *sums;               // [rows][dim]
  bool first;                // tier of the page
  column_sums *whole, *low;  // [lane vectors]; NULL with only one run; `low` of deep blocks
} value_outcome;

INLINE size_t value_sets(size_t count, size_t width) {
  if (!BYTE_DOTS || count * width > QKV_INTEGER_COLUMNS) return 1;
  return count * width <= 2 ? 4 : 2;
}

// Adds the first `coordinates` of a vector, a multiple of QKV_BAND.
INLINE void add_to_sums(lanes all, size_t coordinates, float *sums) {
#if LANES == 16
  if (coordinates < LANES) return store_eight(sums, load_eight(sums) + (eight)_mm512_castps512_ps256((__m512)all));
#endif
  (void)coordinates;
  store_lanes(sums, load_lanes(sums) + all);
}

// Sums of the coordinates from `first` on; `low` NULL where the block is not deep. `width` and `parts` are constants,
// as all indices of sums must be.
INLINE void fold_parts(const value_outcome *out, size_t first, size_t width, unsigned parts, const words *sums,
                       const words *low) {
  UNROLL
  for (size_t row = 0; row < width / parts; row++) {
    if (row >= out->rows) break;
    const lanes total = total_of(&sums[row * parts], low != NULL ? &low[row * parts] : NULL, parts);
    add_to_sums(total * out->scales[row], out->dim - first, out->sums + row * out->dim + first);
  }
}

INLINE void fold(const value_outcome *out, size_t first, size_t width, const words *sums, const words *low) {
  if (first >= out->dim) return;
  if (out->parts == 1) {
    fold_parts(out, first, width, 1, sums, low);
  } else {
    fold_parts(out, first, width, 2, sums, low);
  }
}

INLINE void keep(const value_outcome *out, size_t first, size_t width, const words *sums, const words *low) {
  if (out->whole == NULL) {
    fold(out, first, width, sums, low);
    return;
  }
  column_sums *whole = out->whole + first / LANES, *fine = out->low + first / LANES;
  UNROLL
  for (size_t column = 0; column < width; column++) {
    (*whole)[column] = out->first ? sums[column] : (*whole)[column] + sums[column];
    if (low != NULL) (*fine)[column] = out->first ? low[column] : (*fine)[column] + low[column];
  }
}

// Plain blocks of one tier, or of several; those that have been spread.
typedef enum value_way { VALUES_ALIKE, VALUES_VARIOUS, VALUES_SPREAD } value_way;

// Blocks b to b + count, of up to QKVI_SHALLOW_MAX bits and of one shape, of all groups.
INLINE void sum_blocks(const value_run *run, qkvi_block_shape shape, size_t b, size_t count, size_t width,
                       value_way way, const value_outcome *out, prefetching *ahead) {
  const size_t sets = value_sets(count, width);
  for (size_t lane = 0; lane < QKVI_BLOCK_WIDTH; lane += LANES) {
    column_sums sums[SETS_MAX][TOGETHER_MAX];
    UNROLL
    for (size_t set = 0; set < sets; set++) clear_sums(sums[set], count, width);
    for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
      const qkvi_block *blocks = &run->layouts[way == VALUES_ALIKE ? 0 : g]->blocks[b];
      source from[TOGETHER_MAX];
      UNROLL
      for (size_t i = 0; i < count; i++) {
        from[i] = way == VALUES_SPREAD ? load_spread(&blocks[i], run->groups[g], run->spread[g], lane)
                                       : load_source(QKV_V, shape, &blocks[i], run->groups[g], lane);
      }
      UNROLL
      for (size_t f = 0; f < FIELDS; f++) {
        bytes centroids[TOGETHER_MAX];
        UNROLL
        for (size_t i = 0; i < count; i++) centroids[i] = centroids_of(QKV_V, shape, &blocks[i], &from[i], f);
        add_dots(QKV_V, centroids, count, run->columns[g] + f * width * COLUMN_BYTES, width, sums[f % sets]);
      }
      prefetch_some(ahead);
    }
    UNROLL
    for (size_t set = 1; set < sets; set++) add_sums(sums[0], sums[set], count, width);
    UNROLL
    for (size_t i = 0; i < count; i++) fold(out, (b + i) * QKVI_BLOCK_WIDTH + lane, width, sums[0][i], NULL);
  }
}

// The same with centroids that have been looked up already; one block of more bits.
INLINE void sum_mixed(const value_run *run, size_t b, bool deep, size_t count, size_t width, const value_outcome *out,
                      prefetching *ahead) {
  const size_t sets = value_sets(count, width);
  for (size_t lane = 0; lane < QKVI_BLOCK_WIDTH; lane += LANES) {
    column_sums sums[SETS_MAX][TOGETHER_MAX], low[1];
    UNROLL
    for (size_t set = 0; set < sets; set++) clear_sums(sums[set], count, width);
    clear_sums(low, 1, width);
    for (size_t g = 0; g < run->count; g++) {
      const mixed_group *mixed = &run->mixed[g];
      UNROLL
      for (size_t f = 0; f < FIELDS; f++) {
        const uint8_t *columns = run->columns[g] + f * width * COLUMN_BYTES;
        bytes centroids[TOGETHER_MAX];
        UNROLL
        for (size_t i = 0; i < count; i++) centroids[i] = (*mixed)[b + i][lane / LANES][0][f];
        add_dots(QKV_V, centroids, count, columns, width, sums[f % sets]);
        if (deep) add_dots(QKV_V, &(*mixed)[b][lane / LANES][1][f], 1, columns, width, low);
      }
      prefetch_some(ahead);
    }
    UNROLL
    for (size_t set = 1; set < sets; set++) add_sums(sums[0], sums[set], count, width);
    if (deep) add_sums(sums[0], sums[0], 1, width);
    UNROLL
    for (size_t i = 0; i < count; i++) {
      keep(out, (b + i) * QKVI_BLOCK_WIDTH + lane, width, sums[0][i], deep ? low[0] : NULL);
    }
  }
}

// Two blocks at once, which share the columns, where the processor has registers enough.
enum { VALUES_TOGETHER = BYTE_DOTS ? 2 : 1 };

#define PAIRS(SHAPE)                                                            \
  case SHAPE:                                                                   \
    for (; b + VALUES_TOGETHER <= end; b += VALUES_TOGETHER) {                  \
      sum_blocks(run, SHAPE, b, VALUES_TOGETHER, width, way, out, &along);      \
    }                                                                           \
    for (; b < end; b++) sum_blocks(run, SHAPE, b, 1, width, way, out, &along); \
    break

// All groups, which have plain blocks.
INLINE void sum_plain(const value_run *run, size_t width, value_way way, const value_outcome *out,
                      prefetching *ahead) {
  const bool own = way == VALUES_ALIKE && !BYTE_DOTS;
  prefetching along = *ahead;
  for (size_t b = 0; b < run->blocks;) {
    const size_t end = own ? run_end(run->layouts[0], b, run->blocks) : run->blocks;
    switch (own ? run->layouts[0]->blocks[b].shape : run->shape) {
      PAIRS(QKVI_BLOCK_NIBBLES);
      PAIRS(QKVI_BLOCK_FIELDS);
      default:
        PAIRS(QKVI_BLOCK_SIXES);
    }
  }
  *ahead = along;
}

#undef PAIRS

// All groups, whose halves have been spread; deep blocks are of groups that are alike.
INLINE void sum_spread(const value_run *run, size_t width, const value_outcome *out, prefetching *ahead) {
  prefetching along = *ahead;
  const size_t deep = run->layouts[0]->deep;
  size_t b = 0;
  for (; b < deep; b++) sum_mixed(run, b, true, 1, width, out, &along);
  for (; b + VALUES_TOGETHER <= run->blocks; b += VALUES_TOGETHER) {
    sum_blocks(run, QKVI_BLOCK_SIXES, b, VALUES_TOGETHER, width, VALUES_SPREAD, out, &along);
  }
  for (; b < run->blocks; b++) sum_blocks(run, QKVI_BLOCK_SIXES, b, 1, width, VALUES_SPREAD, out, &along);
  *ahead = along;
}

// Any blocks of groups that are alike.
INLINE void sum_any(const value_run *run, size_t width, const value_outcome *out, prefetching *ahead) {
  prefetching along = *ahead;
  const size_t deep = run->layouts[0]->deep;
  size_t b = 0;
  for (; b < deep; b++) sum_mixed(run, b, true, 1, width, out, &along);
  for (; b + VALUES_TOGETHER <= run->blocks; b += VALUES_TOGETHER) {
    sum_mixed(run, b, false, VALUES_TOGETHER, width, out, &along);
  }
  for (; b < run->blocks; b++) sum_mixed(run, b, false, 1, width, out, &along);
  *ahead = along;
}

// For any number of columns, which becomes a constant. Separate functions, as the compiler optimizes these better.
#define EACH_WIDTH(SUM)                                      \
  switch (columns) {                                         \
    case 1:                                                  \
      return SUM(1);                                         \
    case 2:                                                  \
      return SUM(2);                                         \
    case 4:                                                  \
      return SUM(4);                                         \
    case 8:                                                  \
      return SUM(8);                                         \
    default:                                                 \
      assert(!"a chunk of other than 1, 2, 4 or 8 columns"); \
  }

static void sum_alike(const value_run *run, size_t columns, const value_outcome *out, prefetching *ahead) {
#define SUM(WIDTH) sum_plain(run, WIDTH, VALUES_ALIKE, out, ahead)
  EACH_WIDTH(SUM)
#undef SUM
}

static void sum_various(const value_run *run, size_t columns, const value_outcome *out, prefetching *ahead) {
#define SUM(WIDTH) sum_plain(run, WIDTH, VALUES_VARIOUS, out, ahead)
  EACH_WIDTH(SUM)
#undef SUM
}

static void sum_halves(const value_run *run, size_t columns, const value_outcome *out, prefetching *ahead) {
#define SUM(WIDTH) sum_spread(run, WIDTH, out, ahead)
  EACH_WIDTH(SUM)
#undef SUM
}

static void sum_chunk(const value_run *run, size_t columns, const value_outcome *out, prefetching *ahead) {
#define SUM(WIDTH) sum_any(run, WIDTH, out, ahead)
  EACH_WIDTH(SUM)
#undef SUM
}
// The sums that were kept for several tiers, of all the blocks of the highest.
static void fold_chunk(const value_outcome *out, size_t columns, const qkvi_tier_blocks *layout) {
  for (size_t c = 0; c < layout->count * QKVI_BLOCK_WIDTH; c += LANES) {
    const words *low = c / QKVI_BLOCK_WIDTH < layout->deep ? out->low[c / LANES] : NULL;
    switch (columns) {
      case 1:
        fold(out, c, 1, out->whole[c / LANES], low);
        break;
      case 2:
        fold(out, c, 2, out->whole[c / LANES], low);
        break;
      case 4:
        fold(out, c, 4, out->whole[c / LANES], low);
        break;
      default:
        fold(out, c, 8, out->whole[c / LANES], low);
    }
  }
}

// The groups of a page by tier, the highest first. Returns how many tiers there are.
static size_t find_runs(const qkv_page_codes *values, const page_groups *page, mixed_group *mixed,
                        value_run runs[QKV_PAGE_GROUPS]) {
  size_t count = 0;
  for (int below = QKV_TIER_MAX + 1;;) {
    int tier = -1;
    for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
      if (values->tiers[g] < below && values->tiers[g] > tier) tier = values->tiers[g];
    }
    if (tier < 0) return count;
    value_run *run = &runs[count];
    run->groups = run->some;
    run->count = 0;
    for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
      if (values->tiers[g] != tier) continue;
      run->layouts = &page->layouts[g];
      run->some[run->count] = values->groups[g];
      run->numbers[run->count++] = (uint8_t)g;
    }
    run->blocks = run->layouts[0]->count;
    run->mixed = mixed;
    mix_groups(QKV_V, run->layouts[0], run->blocks, run->groups, run->count, mixed);
    mixed += run->count;
    below = tier;
    count++;
  }
}

// All groups of a page at once, which have plain blocks or spread ones.
static size_t find_run(const page_groups *page, value_run *run) {
  run->layouts = page->layouts;
  run->groups = page->groups;
  run->blocks = page->blocks;
  run->shape = page->shape;
  run->count = QKV_PAGE_GROUPS;
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) run->numbers[g] = (uint8_t)g;
  return 1;
}

#if STEADY_LOOPS
// ---- Steady blocks ----

// A chunk of weights of one byte.
typedef struct steady_values {
  size_t blocks, rows, dim;
  const uint8_t *columns;
  const float *scales;
  float *sums;
} steady_values;

// Vectors of blocks from b on; `shape`, `count` and `width` are constants.
INLINE void sum_steady_blocks(const steady_group groups[QKV_PAGE_GROUPS], const steady_values *values,
                              qkvi_block_shape shape, size_t b, size_t count, size_t width, prefetching *ahead) {
  const size_t sets = value_sets(count, width);
  const uint8_t *columns = values->columns;
  column_sums sums[SETS_MAX][TOGETHER_MAX];
  UNROLL
  for (size_t set = 0; set < sets; set++) clear_sums(sums[set], count, width);
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++, columns += FIELDS * width * 4) {
    joined codes[TOGETHER_MAX];
    prefetch_lines(ahead, 2 * count / VECTORS);
    UNROLL
    for (size_t i = 0; i < count; i++) codes[i] = steady_codes(shape, &groups[g], (b + i) * sizeof(bytes));
    add_steady(QKV_V, shape, &groups[g], count, codes, count, columns, g * FIELDS, width, sets, sums);
  }
  UNROLL
  for (size_t set = 1; set < sets; set++) add_sums(sums[0], sums[set], count, width);
  UNROLL
  for (size_t row = 0; row < width; row++) {
    if (row >= values->rows) break;
    UNROLL
    for (size_t i = 0; i < count; i++) {
      float *at = values->sums + row * values->dim + (b + i) * LANES;
      store_lanes(at, load_lanes(at) + total_of(&sums[0][i][row], NULL, 1) * values->scales[row]);
    }
  }
}

// Functions of their own for the constants.
#define STEADY(NAME, SHAPE, COUNT, WIDTH)                                                      \
  static void NAME(const page_groups *page, const steady_values *all, prefetching *ahead) {    \
    const steady_values values = *all;                                                         \
    steady_group groups[QKV_PAGE_GROUPS];                                                      \
    prefetching along = *ahead;                                                                \
    size_t b = 0;                                                                              \
    for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) groups[g] = steady_of(QKV_V, SHAPE, page, g); \
    const size_t end = values.blocks * VECTORS;                                                \
    for (; b + (COUNT) <= end; b += (COUNT)) {                                                 \
      sum_steady_blocks(groups, &values, SHAPE, b, COUNT, WIDTH, &along);                      \
    }                                                                                          \
    for (; b < end; b++) sum_steady_blocks(groups, &values, SHAPE, b, 1, WIDTH, &along);       \
    *ahead = along;                                                                            \
  }
STEADY(sum_nibbles_1, QKVI_BLOCK_NIBBLES, STEADY_MANY, 1)
STEADY(sum_nibbles_2, QKVI_BLOCK_NIBBLES, STEADY_MANY, 2)
STEADY(sum_nibbles_4, QKVI_BLOCK_NIBBLES, STEADY_FEW, 4)
STEADY(sum_nibbles_8, QKVI_BLOCK_NIBBLES, STEADY_FEW, 8)
STEADY(sum_fields_1, QKVI_BLOCK_FIELDS, STEADY_MANY, 1)
STEADY(sum_fields_2, QKVI_BLOCK_FIELDS, STEADY_MANY, 2)
STEADY(sum_fields_4, QKVI_BLOCK_FIELDS, STEADY_FEW, 4)
STEADY(sum_fields_8, QKVI_BLOCK_FIELDS, STEADY_FEW, 8)
#undef STEADY

static void sum_steady(const page_groups *page, const steady_values *values, size_t columns, prefetching *ahead) {
  const bool fields = page->shape == QKVI_BLOCK_FIELDS;
  if (columns == 1) return (fields ? sum_fields_1 : sum_nibbles_1)(page, values, ahead);
  if (columns == 2) return (fields ? sum_fields_2 : sum_nibbles_2)(page, values, ahead);
  if (columns == 4) return (fields ? sum_fields_4 : sum_nibbles_4)(page, values, ahead);
  (fields ? sum_fields_8 : sum_nibbles_8)(page, values, ahead);
}

static void sums_of_steady(const page_groups *page, const qkv_integer_weights *weights, size_t dim, qkv_ahead ahead,
                           float *sums) {
  prefetching along = prefetching_all(ahead);
  for (qkvi_chunk chunk = {0}; chunk.first + chunk.rows < weights->count;) {
    chunk = qkvi_chunk_at(chunk.first + chunk.rows, weights->count, 1);
    const uint8_t *columns = weights->bytes + chunk.first * QKV_PAGE_TOKENS;
#if !BYTE_DOTS
    split_columns halves;
    split_large(QKV_V, page->shape, columns, QKV_PAGE_TOKENS, chunk.columns, &halves);
    columns = halves.whole;
#endif
    const steady_values values = {.blocks = page->blocks,
                                  .rows = chunk.rows,
                                  .dim = dim,
                                  .columns = columns,
                                  .scales = weights->scales + chunk.first,
                                  .sums = sums + chunk.first * dim};
    sum_steady(page, &values, chunk.columns, &along);
  }
  prefetch_rest(&along);
}
#endif

#if STEADY_LOOPS
// ---- Banded blocks ----

// A chunk of weights against a page.
typedef struct banded_values {
  banded page;
  const uint8_t *columns;
  const value_run *run;  // of deep blocks
  value_outcome out;
} banded_values;

// Vectors of blocks from b on, of a group; `split`: some of its numbers may be.
INLINE void sum_banded_fields(const banded_block *blocks, const source *from, qkvi_block_shape shape, size_t count,
                              const uint8_t *columns, size_t g, bool split, size_t width, size_t sets,
                              column_sums (*sums)[TOGETHER_MAX]) {
  UNROLL
  for (size_t f = 0; f < FIELDS; f++) {
    bytes centroids[TOGETHER_MAX];
    UNROLL
    for (size_t i = 0; i < count; i++) centroids[i] = banded_centroids(shape, &blocks[i], &from[i], f);
    add_split_dots(QKV_V, shape, centroids, count, columns + f * width * 4, g * FIELDS + f, split, width,
                   sums[f % sets]);
  }
}

// Vectors of blocks from b on; `shape`, `count` and `width` are constants.
INLINE void sum_banded_blocks(const banded_values *values, qkvi_block_shape shape, size_t b, size_t count,
                              size_t width, prefetching *along) {
  const size_t sets = value_sets(count, width), stride = values->page.stride;
  const uint8_t *columns = values->columns;
  banded_block blocks[TOGETHER_MAX];
  column_sums sums[SETS_MAX][TOGETHER_MAX];
  UNROLL
  for (size_t i = 0; i < count; i++) blocks[i] = banded_block_of(QKV_V, shape, &values->page, (b + i) / VECTORS);
  UNROLL
  for (size_t set = 0; set < sets; set++) clear_sums(sums[set], count, width);
  if (!BYTE_DOTS) prefetch_some(along);
  for (size_t g = 0, at = b % VECTORS * sizeof(bytes); g < QKV_PAGE_GROUPS; g++, at += stride) {
    source from[TOGETHER_MAX];
    if (BYTE_DOTS) prefetch_some(along);
    UNROLL
    for (size_t i = 0; i < count; i++) from[i] = banded_source(shape, &blocks[i], at);
    if (are_split(shape, columns, g * FIELDS, width)) {
      sum_banded_fields(blocks, from, shape, count, columns, g, true, width, sets, sums);
    } else {
      sum_banded_fields(blocks, from, shape, count, columns, g, false, width, sets, sums);
    }
    columns += FIELDS * width * 4;
  }
  UNROLL
  for (size_t set = 1; set < sets; set++) add_sums(sums[0], sums[set], count, width);
  UNROLL
  for (size_t i = 0; i < count; i++) fold(&values->out, (b + i) * LANES, width, sums[0][i], NULL);
}

INLINE void sum_banded(const banded_values *all, size_t width, prefetching *ahead) {
  enum { MANY = VALUES_TOGETHER };
  const banded_values copy = *all, *values = &copy;  // which stored sums cannot alias
  const size_t deep = values->page.layout->deep, end = values->page.layout->count * VECTORS;
  const size_t sixes = banded_until(&values->page, deep, QKVI_BLOCK_NIBBLES) * VECTORS;
  prefetching along = *ahead;
  for (size_t b = 0; b < deep; b++) sum_mixed(values->run, b, true, 1, width, &values->out, &along);
  size_t b = deep * VECTORS;
  for (; b < sixes && b + MANY <= end; b += MANY) sum_banded_blocks(values, QKVI_BLOCK_SIXES, b, MANY, width, &along);
  if (MANY > 1 && b < sixes) sum_banded_blocks(values, QKVI_BLOCK_SIXES, b++, 1, width, &along);
#if BYTE_DOTS
  for (; b + MANY <= end; b += MANY) sum_banded_blocks(values, QKVI_BLOCK_NIBBLES, b, MANY, width, &along);
  if (b < end) sum_banded_blocks(values, QKVI_BLOCK_NIBBLES, b, 1, width, &along);
#else
  const size_t nibbles = banded_until(&values->page, b / VECTORS, QKVI_BLOCK_FIELDS) * VECTORS;
  for (; b < nibbles; b++) sum_banded_blocks(values, QKVI_BLOCK_NIBBLES, b, 1, width, &along);
  for (; b < end; b++) sum_banded_blocks(values, QKVI_BLOCK_FIELDS, b, 1, width, &along);
#endif
  *ahead = along;
}

static void sum_banded_chunk(const banded_values *values, size_t columns, prefetching *along) {
#define SUM(WIDTH) sum_banded(values, WIDTH, along)
  EACH_WIDTH(SUM)
#undef SUM
}

static void sums_of_banded(const page_groups *page, const qkv_integer_weights *weights, size_t dim, float *sums,
                           prefetching *along) {
  const unsigned parts = weights->parts;
  _Alignas(64) banded_halves halves;
  mixed_group mixed[QKV_PAGE_GROUPS];
  value_run run = {.mixed = mixed, .count = QKV_PAGE_GROUPS};
  banded_values values = {.page = banded_of(QKV_V, page, halves), .run = &run};
  mix_groups(QKV_V, page->layouts[0], page->layouts[0]->deep, page->groups, QKV_PAGE_GROUPS, mixed);
  for (qkvi_chunk chunk = {0}; chunk.first + chunk.rows < weights->count;) {
    chunk = qkvi_chunk_at(chunk.first + chunk.rows, weights->count, parts);
    values.columns = weights->bytes + chunk.first * parts * QKV_PAGE_TOKENS;
    const uint8_t *deep = values.columns;
#if !BYTE_DOTS
    split_columns narrow;
    int16_t wide[QKV_INTEGER_COLUMNS * QKV_PAGE_TOKENS];
    if (page->layouts[0]->deep > 0) widen_columns(deep, QKV_PAGE_TOKENS / 4 * chunk.columns, false, wide);
    split_large(QKV_V, QKVI_BLOCK_SIXES, values.columns, QKV_PAGE_TOKENS, chunk.columns, &narrow);
    values.columns = narrow.whole;
    deep = (const uint8_t *)wide;
#endif
    for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
      run.columns[g] = deep + g * (size_t)(GROUP / 4) * chunk.columns * COLUMN_BYTES;
    }
    values.out = (value_outcome){.parts = parts,
                                 .rows = chunk.rows,
                                 .dim = dim,
                                 .scales = weights->scales + chunk.first,
                                 .sums = sums + chunk.first * dim};
    sum_banded_chunk(&values, chunk.columns, along);
  }
}
#endif
#undef EACH_WIDTH

QKV_DECLARE_ACCUMULATE_INTEGER(VARIANT(qkvi_accumulate_integer)) {
  const size_t dim = values->schedule->dim;
  const unsigned parts = weights->parts;
  page_groups page;
  value_run runs[QKV_PAGE_GROUPS];
  mixed_group mixed[QKV_PAGE_GROUPS];
  _Alignas(64) spread_lines spread[QKV_PAGE_GROUPS];
  column_sums whole[QKV_DIM_MAX / LANES], low[QKV_DIM_MAX / LANES];
  find_groups(values, layouts, &page);
#if STEADY_LOOPS
  if (page.steady && parts == 1) return sums_of_steady(&page, weights, dim, ahead, sums);
  if (groups_are_banded(&page)) {
    const size_t steps = (page.blocks * VECTORS + VALUES_TOGETHER - 1) / VALUES_TOGETHER;
    prefetching along = prefetching_of(ahead, BYTE_DOTS ? steps * QKV_PAGE_GROUPS : steps);
    sums_of_banded(&page, weights, dim, sums, &along);
    return;
  }
#endif
  const bool at_once = page.plain || page.spread;
  const size_t run_count = at_once ? find_run(&page, &runs[0]) : find_runs(values, &page, mixed, runs);
  if (page.spread) {
    runs[0].mixed = mixed;
    runs[0].spread = spread;
    mix_groups(QKV_V, page.layouts[0], page.layouts[0]->deep, page.groups, QKV_PAGE_GROUPS, mixed);
    spread_groups(QKV_V, values, &page, spread);
  }
  size_t steps = 0;
  for (size_t i = 0; i < run_count; i++) {
    steps += runs[i].blocks / VALUES_TOGETHER * runs[i].count * (QKVI_BLOCK_WIDTH / LANES);
  }
  prefetching along = prefetching_of(ahead, steps);
  for (qkvi_chunk chunk = {0}; chunk.first + chunk.rows < weights->count;) {
    chunk = qkvi_chunk_at(chunk.first + chunk.rows, weights->count, parts);
    const uint8_t *columns = weights->bytes + chunk.first * parts * QKV_PAGE_TOKENS;
#if !BYTE_DOTS
    int16_t wide[QKV_INTEGER_COLUMNS * QKV_PAGE_TOKENS];
    widen_columns(columns, QKV_PAGE_TOKENS / 4 * chunk.columns, false, wide);
    columns = (const uint8_t *)wide;
#endif
    value_outcome out = {.parts = parts,
                         .rows = chunk.rows,
                         .dim = dim,
                         .scales = weights->scales + chunk.first,
                         .sums = sums + chunk.first * dim,
                         .whole = run_count > 1 ? whole : NULL,
                         .low = low};
    for (size_t i = 0; i < run_count; i++) {
      for (size_t j = 0; j < runs[i].count; j++) {
        runs[i].columns[j] = columns + runs[i].numbers[j] * (size_t)(GROUP / 4) * chunk.columns * COLUMN_BYTES;
      }
      out.first = i == 0;
      if (page.spread) {
        sum_halves(&runs[i], chunk.columns, &out, &along);
      } else if (!page.plain) {
        sum_chunk(&runs[i], chunk.columns, &out, &along);
      } else if (page.alike) {
        sum_alike(&runs[i], chunk.columns, &out, &along);
      } else {
        sum_various(&runs[i], chunk.columns, &out, &along);
      }
    }
    if (run_count > 1) fold_chunk(&out, chunk.columns, runs[0].layouts[0]);
  }
}
