// A block of queries on its way over the pages of the attend frame, under QKV_TURN_BLOCKS (turn_plan.h).
//
// A query q is turned back as the keys of a page are, pair by pair, and then transformed. With pairs in the order of
// their blocks' lengths, the transformed query is a sum of shares, from those that never change to those that change
// with every page:
//
//   synthesis q = what never changes (plain pairs, coordinates that do not turn) + pairs of the longest blocks + ...
//                 + pairs of blocks of a page
//
// Blocks nest, so sums are kept level by level, and a page costs only the levels below the longest block that ends
// before it: with 50 of 64 pairs turned back, 17 of them on average. All in whole numbers (kernel/dense.h), and a
// query's scale is that of its length, which turning does not change: the sums are the same bits whichever pages came
// before.
//
// The rotating anchor's share of a score is Re(p e^{iwt}) for each pair, p the product of query and anchor: once for
// the block of queries, then turned to a page's middle and from there to the slots (kernel.h: add_anchors).
//
// Threads: a walk is of one thread; everything else is only read.
#ifndef QKV_ENGINE_CODEC_WALK_H
#define QKV_ENGINE_CODEC_WALK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/codec/phases.h"
#include "engine/codec/transform.h"

// Sums that can be kept: all levels' of 32 queries of 256 coordinates. Of more they are made anew for every page.
#define QKV_WALK_SUMS ((size_t)65536)

typedef struct qkv_walk {
  const qkv_phases *phases;
  const qkv_transform *transform;
  size_t n, dim, coordinates;        // coordinates that are wanted in code space
  bool keeps;                        // sums of all levels
  uint64_t blocks[QKV_TURN_LEVELS];  // that the sums are of; UINT64_MAX: none
  uint64_t spans[2];                 // positions that the turns below are of: blocks', pages'
  qkv_pair_turns turns[2];           // to them
  _Alignas(64) float buffer[2][QKV_DIM_MAX];
  float factors[QKV_QUERY_BLOCK], scales[QKV_QUERY_BLOCK];  // to whole numbers and back
  float shares[QKV_QUERY_BLOCK];                            // of the mean, the same for all pages
  // [n][dim]: all first coordinates of pairs, all second, the rest
  _Alignas(64) float rows[QKV_QUERY_BLOCK * QKV_DIM_MAX];
  _Alignas(64) float products[QKV_QUERY_BLOCK * QKV_DIM_MAX];  // [n][2][stride] with the anchor
  _Alignas(64) int32_t sums[QKV_WALK_SUMS];  // [levels, and what never changes][n][coordinates up to 16s]
} qkv_walk;

// queries [n][dim], as attended.
void qkv_walk_start(qkv_walk *walk, const qkv_phases *phases, const qkv_transform *transform, const float *queries,
                    size_t n, size_t coordinates);
// codes [n][dim], the queries in code space for the page whose slot 0 is at `position`.
void qkv_walk_codes(qkv_walk *walk, uint64_t position, float *codes);
// The same in floats, from the queries again.
void qkv_walk_exact(qkv_walk *walk, uint64_t position, const float *queries, float *codes);
// What a page's queries are turned by, cosines and sines of all pairs, first to where the plan turns them (plain ones
// not at all), then to the page's middle: qkv_walk_codes and qkv_walk_add_scores have the same bits. False: they turn
// otherwise, as rows have frequencies of their own or are far away. `turns` NULL: only that.
typedef struct qkv_walk_page_turns {
  float cosines[2][QKV_DIM_MAX / 2], sines[2][QKV_DIM_MAX / 2];
} qkv_walk_page_turns;
bool qkv_walk_turns(const qkv_phases *phases, const qkv_turn_plan *plan, uint64_t position,
                    qkv_walk_page_turns *turns);
// scores[n][64] += what mean and anchor add.
void qkv_walk_add_scores(qkv_walk *walk, uint64_t position, float *scores);

#endif
