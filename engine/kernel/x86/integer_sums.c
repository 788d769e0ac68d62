// Weighted sums in integers (kernel/integer.h). Compiled for AVX2, for AVX-512 and for AVX-512 with VNNI and VBMI.
#include "engine/kernel/kernel.h"
#include "engine/kernel/x86/columns.h"
#include "engine/kernel/x86/twins.h"

// One chunk of weights against the groups in the order of their tiers, the highest first, so that a block's depth
// never grows from one to the next.
typedef struct value_pass {
  const qkvi_tier_blocks *layouts[QKV_PAGE_GROUPS];
  const uint16_t *reach[QKV_PAGE_GROUPS];
  const uint8_t *groups[QKV_PAGE_GROUPS];
  const uint8_t *columns[QKV_PAGE_GROUPS];  // the chunk's, of the group's first token
  const unpacked *unpacked[QKV_PAGE_GROUPS];
  bool uniform;  // all of one tier
} value_pass;

INLINE size_t value_sets(size_t count, size_t width) {
  if (!BYTE_DOTS || count * width > QKV_INTEGER_COLUMNS) return 1;
  return count * width <= 2 ? 4 : 2;
}

INLINE void add_deep_shape(const value_pass *pass, qkvi_block_shape shape, size_t g, size_t b, size_t lane,
                           size_t width, column_sums *sums, column_sums *low) {
  bytes first[FIELDS], second[FIELDS];
  load_deep(QKV_V, shape, &pass->layouts[g]->blocks[b], pass->groups[g], pass->reach[g], pass->unpacked[g], b, lane,
            first, second);
  UNROLL
  for (size_t f = 0; f < FIELDS; f++) {
    const uint8_t *columns = pass->columns[g] + f * width * COLUMN_BYTES;
    add_dots(QKV_V, &first[f], 1, columns, width, sums);
    add_dots(QKV_V, &second[f], 1, columns, width, low);
  }
}

INLINE void add_deep(const value_pass *pass, size_t g, size_t b, size_t lane, size_t width, column_sums *sums,
                     column_sums *low) {
  if (pass->layouts[g]->blocks[b].shape == QKVI_BLOCK_BYTES) {
    add_deep_shape(pass, QKVI_BLOCK_BYTES, g, b, lane, width, sums, low);
  } else {
    add_deep_shape(pass, QKVI_BLOCK_OTHER, g, b, lane, width, sums, low);
  }
}

// Blocks b to b + count of group g, of up to four bits and of one shape. sums [set][count].
INLINE void add_shape(const value_pass *pass, qkvi_block_shape shape, const qkvi_tier_blocks *layout, size_t g,
                      size_t b, size_t lane, size_t count, size_t width, column_sums (*sums)[TOGETHER_MAX]) {
  shallow_block blocks[TOGETHER_MAX];
  tables t[TOGETHER_MAX];
  UNROLL
  for (size_t i = 0; i < count; i++) {
    t[i] = load_tables(QKV_V, shape, &layout->blocks[b + i]);
    load_shallow(QKV_V, shape, &layout->blocks[b + i], pass->groups[g], pass->reach[g], pass->unpacked[g], b + i,
                 lane, &blocks[i]);
  }
  UNROLL
  for (size_t f = 0; f < FIELDS; f++) {
    bytes centroids[TOGETHER_MAX];
    UNROLL
    for (size_t i = 0; i < count; i++) centroids[i] = field_of(shape, &layout->blocks[b + i], &blocks[i], &t[i], f);
    add_dots(QKV_V, centroids, count, pass->columns[g] + f * width * COLUMN_BYTES, width,
             sums[f % value_sets(count, width)]);
  }
}

// The same in all groups from g on that have them.
INLINE void add_shallow(const value_pass *pass, size_t g, size_t b, size_t lane, size_t count, size_t width,
                        column_sums (*sums)[TOGETHER_MAX]) {
  for (; g < QKV_PAGE_GROUPS && b < pass->layouts[g]->count; g++) {
    const qkvi_tier_blocks *layout = pass->layouts[g];
    switch (layout->blocks[b].shape) {
      case QKVI_BLOCK_NIBBLES:
        add_shape(pass, QKVI_BLOCK_NIBBLES, layout, g, b, lane, count, width, sums);
        break;
      case QKVI_BLOCK_FIELDS:
        add_shape(pass, QKVI_BLOCK_FIELDS, layout, g, b, lane, count, width, sums);
        break;
      default:
        add_shape(pass, QKVI_BLOCK_OTHER, layout, g, b, lane, count, width, sums);
    }
  }
}

// The same where all groups have one layout.
INLINE void add_uniform(const value_pass *pass, qkvi_block_shape shape, size_t b, size_t lane, size_t count,
                        size_t width, column_sums (*sums)[TOGETHER_MAX]) {
  const qkvi_tier_blocks *layout = pass->layouts[0];
#pragma GCC unroll 4
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) add_shape(pass, shape, layout, g, b, lane, count, width, sums);
}

// Adds the first `coordinates` of a vector.
INLINE void add_to_sums(lanes all, size_t coordinates, float *sums) {
  if (coordinates >= LANES) {
    store_lanes(sums, load_lanes(sums) + all);
  } else {
    for (size_t i = 0; i < coordinates; i++) sums[i] += all[i];
  }
}

// How a run of blocks is summed.
typedef enum run_kind {
  RUN_MIXED,  // of any layouts
  RUN_DEEP,   // of any layouts, with more than four bits in some groups
  RUN_NIBBLES,
  RUN_FIELDS,  // all groups of one layout, and of one shape
} run_kind;

// sums [rows][dim] of blocks b to b + count. With more than one, none is deep and every group has all or none of
// them.
INLINE void add_blocks(const value_pass *pass, run_kind kind, size_t b, size_t count, size_t dim, size_t width,
                       unsigned parts, size_t rows, const float *scales, float *sums) {
  for (size_t lane = 0; lane < QKVI_BLOCK_WIDTH && b * QKVI_BLOCK_WIDTH + lane < dim; lane += LANES) {
    column_sums all[SETS_MAX][TOGETHER_MAX], low[1];
    const size_t sets = value_sets(count, width);
    UNROLL
    for (size_t set = 0; set < sets; set++) clear_sums(all[set], count, width);
    size_t g = 0;
    if (kind == RUN_DEEP) {
      clear_sums(low, 1, width);
      for (; g < QKV_PAGE_GROUPS && b < pass->layouts[g]->deep; g++) {
        add_deep(pass, g, b, lane, width, all[0], low);
      }
      add_sums(all[0], all[0], 1, width);
    }
    if (kind == RUN_NIBBLES) {
      add_uniform(pass, QKVI_BLOCK_NIBBLES, b, lane, count, width, all);
    } else if (kind == RUN_FIELDS) {
      add_uniform(pass, QKVI_BLOCK_FIELDS, b, lane, count, width, all);
    } else {
      add_shallow(pass, g, b, lane, count, width, all);
    }
    UNROLL
    for (size_t set = 1; set < sets; set++) add_sums(all[0], all[set], count, width);
    UNROLL
    for (size_t i = 0; i < count; i++) {
      const size_t first = (b + i) * QKVI_BLOCK_WIDTH + lane;
      UNROLL
      for (size_t row = 0; row < width / parts; row++) {
        if (row >= rows) break;
        const lanes total = total_of(&all[0][i][row * parts], kind == RUN_DEEP ? &low[0][row * parts] : NULL, parts);
        add_to_sums(total * scales[row], dim - first, sums + row * dim + first);
      }
    }
  }
}

// Whether blocks b and b + 1 can be taken at once: both of one shape in each group.
INLINE bool goes_with_next(const value_pass *pass, size_t b) {
  if (b < pass->layouts[0]->deep) return false;
  for (size_t g = 0; g < QKV_PAGE_GROUPS && b < pass->layouts[g]->count; g++) {
    const qkvi_block *blocks = pass->layouts[g]->blocks;
    if (b + 1 == pass->layouts[g]->count || blocks[b].shape != blocks[b + 1].shape ||
        blocks[b].shape == QKVI_BLOCK_OTHER) {
      return false;
    }
  }
  return true;
}

INLINE void add_chunk_of(const value_pass *pass, size_t dim, size_t width, unsigned parts, size_t rows,
                         const float *scales, float *sums, prefetching *ahead) {
  const qkvi_tier_blocks *layout = pass->layouts[0];
  prefetching along = *ahead;
  for (size_t b = 0; b < layout->count;) {
    size_t pairs_end = b;
    if (BYTE_DOTS && pass->uniform && b >= layout->deep && layout->blocks[b].shape != QKVI_BLOCK_OTHER) {
      pairs_end = b + (run_end(layout, b, layout->count) - b) / 2 * 2;
    }
    if (b < pairs_end && layout->blocks[b].shape == QKVI_BLOCK_NIBBLES) {
      for (; b < pairs_end; b += 2, prefetch_twice(&along)) {
        add_blocks(pass, RUN_NIBBLES, b, 2, dim, width, parts, rows, scales, sums);
      }
    } else if (b < pairs_end) {
      for (; b < pairs_end; b += 2, prefetch_twice(&along)) {
        add_blocks(pass, RUN_FIELDS, b, 2, dim, width, parts, rows, scales, sums);
      }
    } else if (b < layout->deep) {
      add_blocks(pass, RUN_DEEP, b, 1, dim, width, parts, rows, scales, sums);
      prefetch_some(&along);
      b++;
    } else if (BYTE_DOTS && !pass->uniform && goes_with_next(pass, b)) {
      add_blocks(pass, RUN_MIXED, b, 2, dim, width, parts, rows, scales, sums);
      prefetch_twice(&along);
      b += 2;
    } else {
      add_blocks(pass, RUN_MIXED, b, 1, dim, width, parts, rows, scales, sums);
      prefetch_some(&along);
      b++;
    }
  }
  *ahead = along;
}

static void add_chunk(const value_pass *pass, const qkvi_chunk *chunk, unsigned parts, size_t dim,
                      const float *scales, float *sums, prefetching *ahead) {
#define CASE(WIDTH, PARTS)                           \
  if (chunk->columns == (WIDTH) && parts == (PARTS)) \
  return add_chunk_of(pass, dim, WIDTH, PARTS, chunk->rows, scales, sums, ahead)
  CASE(1, 1);
  CASE(2, 1);
  CASE(4, 1);
  CASE(8, 1);
  CASE(2, 2);
  CASE(4, 2);
  CASE(8, 2);
#undef CASE
}

// Group numbers by falling tier.
static void order_groups(const uint8_t tiers[QKV_PAGE_GROUPS], size_t order[QKV_PAGE_GROUPS]) {
  for (size_t i = 0; i < QKV_PAGE_GROUPS; i++) {
    size_t at = i;
    for (; at > 0 && tiers[order[at - 1]] < tiers[i]; at--) order[at] = order[at - 1];
    order[at] = i;
  }
}

QKV_DECLARE_ACCUMULATE_INTEGER(TWIN(qkvi_accumulate_integer)) {
  const size_t dim = values->schedule->dim;
  const unsigned parts = weights->parts;
  size_t order[QKV_PAGE_GROUPS];
  value_pass pass = {.uniform = true};
  unpacked scattered[QKV_PAGE_GROUPS];
  prefetching along = prefetching_of(ahead, qkvi_column_bytes(dim) / QKVI_BLOCK_WIDTH);
  order_groups(values->tiers, order);
  for (size_t i = 0; i < QKV_PAGE_GROUPS; i++) {
    const size_t g = order[i];
    pass.layouts[i] = qkvi_layouts_find(layouts, values->schedule, values->tiers[g]);
    pass.reach[i] = values->schedule->reach[values->tiers[g]];
    pass.groups[i] = values->groups[g];
    pass.unpacked[i] = &scattered[i];
    pass.uniform = pass.uniform && pass.layouts[i] == pass.layouts[0];
    unpack_scattered(QKV_V, values, g, pass.layouts[i], &scattered[i]);
  }
  for (qkvi_chunk chunk = {0}; chunk.first + chunk.rows < weights->count;) {
    chunk = qkvi_chunk_at(chunk.first + chunk.rows, weights->count, parts);
    const uint8_t *columns = weights->bytes + chunk.first * parts * QKV_PAGE_TOKENS;
#if !BYTE_DOTS
    int16_t wide[QKV_INTEGER_COLUMNS * QKV_PAGE_TOKENS];
    widen_columns(columns, QKV_PAGE_TOKENS / 4 * chunk.columns, false, wide);
    columns = (const uint8_t *)wide;
#endif
    for (size_t i = 0; i < QKV_PAGE_GROUPS; i++) {
      pass.columns[i] = columns + order[i] * (GROUP / 4) * chunk.columns * COLUMN_BYTES;
    }
    add_chunk(&pass, &chunk, parts, dim, weights->scales + chunk.first, sums + chunk.first * dim, &along);
  }
}
