// Which pairs of RoPE the attend frame turns back, and to where. A calibration's format says which rule; everything
// else follows from the rope.
//
// What is mixed by a dense transform has to stand still, or nearly so: the pairs of a page's keys are turned back by
// an angle, and queries by the same one before they are mixed likewise. Two rules:
//
//   QKV_TURN_PAGE     (format 1) All pairs to the page's centre, slot 32. Queries are mixed anew for every page.
//   QKV_TURN_BLOCKS   (format 2) Pairs that turn by more than 4 rad in half a page gain little by being mixed: they
//                     are *plain*, as attended, and so are a query's. The others are turned back to the middle of a
//                     block of 1, 2, 4, ..., 64 pages, the longest in half of which a pair turns by a quarter of a
//                     radian or less, of one page where there is none. Blocks begin at multiples of their length, and
//                     a page belongs to the one that its slot 32 is in. So what of a query belongs to slow pairs
//                     stays as it is for many pages.
//
// Measured on tinylm (`qkv-bench quality`, 32 windows; errors of the KL about 10 %): keys at 3 and 2 bits with values
// at 8, KL in bits and error of attention's output:
//   page, anchor of some pairs             0.00022 0.0183   0.00095 0.0351
//   page, all pairs anchored               0.00024 0.0186   0.00106 0.0362
//   blocks, plain above 8 rad              0.00028 0.0204   0.00093 0.0378
//   blocks, plain above 4 rad              0.00025 0.0193   0.00117 0.0375
//   blocks, plain above 2 rad              0.00027 0.0205   0.00097 0.0384
//   the same, half a block of 0.125 rad    0.00026 0.0210   0.00096 0.0389
//   the same, blocks of a page             0.00027 0.0211   0.00092 0.0388
//
// Frequencies fall from pair to pair, so that both are runs of pairs. Dynamic NTK: those within the trained length;
// pages beyond it are turned as QKV_TURN_PAGE does, except that plain pairs stay plain (phases.h).
#ifndef QKV_ENGINE_CODEC_TURN_PLAN_H
#define QKV_ENGINE_CODEC_TURN_PLAN_H

#include <stddef.h>
#include <stdint.h>

#include "engine/codec/page.h"
#include "engine/codec/rope.h"

#define QKV_TURN_LEVELS 7  // blocks of 1, 2, 4, ..., 64 pages
// Tokens of the longest.
#define QKV_TURN_SPAN ((uint64_t)QKV_PAGE_TOKENS << (QKV_TURN_LEVELS - 1))

typedef enum qkv_turn_rule { QKV_TURN_PAGE = 1, QKV_TURN_BLOCKS = 2 } qkv_turn_rule;  // a format

typedef struct qkv_turn_plan {
  qkv_turn_rule rule;
  // Level l: pairs [begins[l], begins[l + 1]), turned back to the middles of blocks of 2^l pages. Those before
  // begins[0] are plain. Of QKV_TURN_PAGE all pairs are of level 0.
  uint16_t begins[QKV_TURN_LEVELS + 1];
} qkv_turn_plan;

// The rope is resolved and has a theta.
qkv_turn_plan qkv_turn_plan_of(const qkv_rope *rope, qkv_turn_rule rule);

// Which block of a level a page belongs to; `position` is that of slot 0.
static inline uint64_t qkv_turn_block(uint64_t position, unsigned level) {
  return (position + QKV_PAGE_TOKENS / 2) / ((uint64_t)QKV_PAGE_TOKENS << level);
}

// The position that a level's block is turned back to.
static inline uint64_t qkv_turn_middle(uint64_t block, unsigned level) {
  return block * ((uint64_t)QKV_PAGE_TOKENS << level) + ((uint64_t)QKV_PAGE_TOKENS / 2 << level);
}

// The coordinate of a row that queries' matrices have at place `i`: pairs in their order, each pair's two coordinates
// side by side, then what does not turn.
static inline size_t qkv_turn_input(const qkv_rope *rope, size_t i) {
  if (i >= rope->width) return i;
  const uint32_t pair = (uint32_t)(i / 2);
  return i % 2 == 0 ? qkv_rope_first(rope, pair) : qkv_rope_second(rope, pair);
}

#endif
