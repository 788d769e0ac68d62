// *Banded* pages, those of calibrated schedules: all groups have one tier and lie at equal distances, and their
// blocks lie in lines of their own, of 64 bytes or of 32. Lines of 32 bytes are widened to 64 ahead, into memory with
// the same distance between groups, so that a block is at one distance in all of them. A block's depth is known
// before its codes are loaded: bits that it does not have are not loaded.
#ifndef QKV_ENGINE_KERNEL_X86_BANDED_H
#define QKV_ENGINE_KERNEL_X86_BANDED_H

#include "engine/kernel/x86/columns.h"

#if defined(__AVX2__)
#if STEADY_LOOPS
typedef struct banded {
  const qkvi_tier_blocks *layout;
  size_t stride;            // from a group to the next
  const uint8_t *bases[2];  // of group 0: its codes, its halves
} banded;

// Halves [QKV_PAGE_GROUPS][stride], of which 64 bytes a pair are used.
typedef uint8_t banded_halves[QKV_PAGE_GROUPS * QKV_DIM_MAX * QKV_GROUP_TOKENS + sizeof(spread_lines)];

// Whether a page is banded.
INLINE bool groups_are_banded(const page_groups *page) {
  const size_t stride = (size_t)(page->groups[1] - page->groups[0]);
  // With look-ups of 64 bytes plain blocks of one shape are as fast in the other loops.
  const bool plain = page->plain && (!BYTE_DOTS || page->shape == QKVI_BLOCK_SIXES);
  if (!page->alike || !(page->spread || plain)) return false;
  for (size_t g = 2; g < QKV_PAGE_GROUPS; g++) {
    if ((size_t)(page->groups[g] - page->groups[g - 1]) != stride) return false;
  }
  return stride >= sizeof(spread_lines) && stride <= QKV_DIM_MAX * QKV_GROUP_TOKENS;
}

INLINE banded banded_of(qkv_part part, const page_groups *page, banded_halves halves) {
  const size_t stride = (size_t)(page->groups[1] - page->groups[0]);
  for (size_t g = 0; g < QKV_PAGE_GROUPS && !page->plain; g++) {
    spread_halves(part, page->layouts[0], page->groups[g], (uint8_t(*)[64])(halves + g * stride));
  }
  return (banded){page->layouts[0], stride, {page->groups[0], halves}};
}

// A block of some groups: where each pair lies in group 0, and its tables.
typedef struct banded_block {
  const uint8_t *pairs[QKVI_SHALLOW_PAIRS];
  const uint8_t (*tables)[64];
} banded_block;

// `shape` is at least the block's, and a constant; `table`: the part that has its tables, those of K being unsigned.
INLINE banded_block banded_block_of(qkv_part table, qkvi_block_shape shape, const banded *page, size_t b) {
  const qkvi_block *block = &page->layout->blocks[b];
  banded_block found = {.tables = qkvi_integers.sixes[table][block->kind]};
  UNROLL
  for (unsigned pair = 0; pair <= shape; pair++) {
    found.pairs[pair] = page->bases[block->spread[pair]] + block->places[pair];
  }
  return found;
}

// Where a vector of a page's tokens (K) lies, or one of a block's coordinates (V) in group 0.
INLINE size_t banded_at(const banded *page, size_t vector) {
  return vector / VECTORS * page->stride + vector % VECTORS * sizeof(bytes);
}

// `at` is the vector's distance.
INLINE source banded_source(qkvi_block_shape shape, const banded_block *block, size_t at) {
  bytes pairs[QKVI_SHALLOW_PAIRS];
  UNROLL
  for (unsigned pair = 0; pair <= shape; pair++) pairs[pair] = load_bytes(block->pairs[pair] + at);
  if (shape == QKVI_BLOCK_FIELDS) return (source){.above = {pairs[0], pairs[0]}};
  if (shape == QKVI_BLOCK_SIXES) return (source){join(pairs[0], pairs[1]), {pairs[2], pairs[2]}};
  return (source){.above = join(pairs[0], pairs[1])};
}

INLINE bytes banded_centroids(qkvi_block_shape shape, const banded_block *block, const source *from, size_t field) {
  if (shape == QKVI_BLOCK_SIXES) return look_up_field(block->tables[field % 2], from, field);
  return look_up_byte(load_table(block->tables[field % 2]), nibble_of(&from->above, field));
}

// Where the blocks of `shape` or less begin, as depths fall: from `begin` on.
INLINE size_t banded_until(const banded *page, size_t begin, qkvi_block_shape shape) {
  size_t b = begin;
  while (b < page->layout->count && whole_of(page->layout->blocks[b].shape) > shape) b++;
  return b;
}
#endif
#endif
#endif
