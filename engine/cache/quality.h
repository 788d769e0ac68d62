// The quality contract of one layer of a session: max_attention_error, held where pages are sealed.
//
// A few of the session's latest queries are kept. When a page is sealed, while its exact rows are at hand, each of
// them attends the page twice, exactly and by its codes, and planes are dropped as far as the error allows. The error
// of a query head q on a page is that of what the page adds to the output,
//
//   o = sum_t e^(s_t) v_t / Z     Z = sum_t e^(s_t), over the page alone, from exact rows
//   o^                            the same sum from codes, over the same Z
//   error^2 = sum |o^ - o|^2 / sum |o|^2     over the queries and all heads
//
// so that scores which are all off by the same, which the page's own softmax would hide, count: they move the page's
// share. The whole output is the pages' o in their shares, sum_p w_p o_p, and its error sum_p w_p (o^_p - o_p), less
// what the common denominator takes back. Pages err independently, so where each errs by the part e of its |o_p|, the
// output errs by e sqrt(sum w_p^2 |o_p|^2): e of |output| where the pages' outputs are orthogonal, less where they
// agree or where exact rows take part. It is more only where they cancel out.
//
// Which planes: keys and values are measured each alone at up to QKV_QUALITY_LEVELS tiers, evenly spaced from the
// coded ones down to QKV_QUALITY_TIER_LEAST; squared errors add up; the pair of the least bytes within the limit is
// taken, in eighths of a bit, and measured together. All heads of a part go down by the same, so that what the
// calibration gave to some stays. Where even the coded tiers miss the limit, the page keeps them and is counted as
// missed.
//
// What is reported is held out: the queries are of two halves in turn, one chooses the tiers, the other one gives the
// error. Where the second one has been larger, lately, the limit for the first is lowered by as much.
//
// Queries that stand before a page's last token are turned to it (RoPE), since that is where those to come begin;
// sliding windows are not looked at. Pages that are sealed before a query of each half has been seen keep the
// policy's tiers and are not judged. What becomes of a page's tiers later is not in the error.
//
// Cost, for 8 heads of 128 + 128 with 4 query heads each: see quality_test, which prints it.
//
// Threads: qkv_quality_query from any, with the layer read or not at all; one that finds another there gives up. The
// others while the layer is written.
#ifndef QKV_ENGINE_CACHE_QUALITY_H
#define QKV_ENGINE_CACHE_QUALITY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/cache/model.h"
#include "engine/codec/codec.h"

#define QKV_QUALITY_TOKENS 4        // of each half, whose queries are kept
#define QKV_QUALITY_LEVELS 8        // tiers that are measured
#define QKV_QUALITY_TIER_LEAST 8    // a bit a coordinate
#define QKV_QUALITY_SAMPLE_EVERY 4  // attends, of which one is looked at

typedef struct qkv_quality qkv_quality;

// INVALID_ARGUMENT "max_attention_error is 2, allowed are 0 to 1".
qkv_status qkv_quality_check(double error_max, qkv_error *error);

// In a block of qkv_quality_bytes, which has most of its bytes for queries: 2 QKV_QUALITY_TOKENS rows of every query
// head, in fp32. `error_max` > 0.
size_t qkv_quality_bytes(const qkv_model *model);
qkv_quality *qkv_quality_init(void *block, const qkv_model *model, uint32_t layer, double error_max);
void qkv_quality_deinit(qkv_quality *quality);

// Counts an attend; whether its queries are wanted: one in QKV_QUALITY_SAMPLE_EVERY, and all until there are enough.
bool qkv_quality_wants(qkv_quality *quality);
// A token's queries [q_heads][key_dim] at position `stand`, as attended, times the scale.
void qkv_quality_query(qkv_quality *quality, uint64_t stand, const float *rows);

// A full page that has just been coded, and its rows k [64][kv_heads][key_dim] and v [64][kv_heads][value_dim].
typedef struct qkv_quality_page {
  const qkv_coder *coder;
  const void *page;
  const float *k, *v;
} qkv_quality_page;

// Fills `image` (64-byte aligned, with room for as much as the page has) with the page at fewer bits and returns its
// bytes; 0: the page stays as it is.
size_t qkv_quality_judge(qkv_quality *quality, const qkv_quality_page *page, void *image);

typedef struct qkv_quality_stats {
  uint64_t pages;   // judged
  uint64_t missed;  // of these: the coded tiers were not enough
  double squares;   // sum over judged pages of the squared error; the reported one is the root of the mean
} qkv_quality_stats;
qkv_quality_stats qkv_quality_read(const qkv_quality *quality);
// 0 where no page has been judged.
double qkv_quality_error(const qkv_quality_stats *stats);

// Of all layers that the process has had. Any thread.
qkv_quality_stats qkv_quality_totals(void);

#endif
