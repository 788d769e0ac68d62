// The quality contract of one layer of a session: max_attention_error, held where pages are sealed.
//
// A few of the session's latest queries are kept. When a page is sealed, while its exact rows are at hand, each of
// them attends to all that the layer holds, the page being exact, and once more to the page alone by its codes. The
// page's squared error, over the queries and all heads, is
//
//   error^2 = sum w^2 |c - p|^2 / sum w |o|^2     o: output;  w: share of the page in the softmax;  p: output of the
//                                                 page alone;  c = sum_t e^(s_t) v_t from codes over the exact sum of
//                                                 e^(s_t), so that a page whose share moves errs, too
//
// that is, a page may take as much of the allowed squared error as it has of the attention. Pages err independently,
// so their squares add up, and the shares add up to 1 at most: where every page's error is within the limit, so is
// the output's. It is careful: what the softmax's common denominator takes back of a moved share is not taken off,
// since with few tokens held it takes back nearly all (it let the sink's keys go to 1 bit: on tinylm, data-free,
// at 2.6 bits a KL of 0.021 for 0.002). The half of the queries that chooses, below, takes a page to have its even
// part of the attention at least. On tinylm the error of outputs at the end of a prefix of 768 tokens is 5 to 10
// times below the one reported, which is that at the time of sealing, when less is held.
//
// Which planes: keys and values are measured each alone at up to QKV_QUALITY_LEVELS tiers, evenly spaced from the
// coded ones down to QKV_QUALITY_TIER_LEAST; squared errors add up; the pair of the least bytes within the limit is
// taken, in eighths of a bit, and measured together. All heads of a part go down by the same, so that what the
// calibration gave to some stays. Where even the coded tiers miss the limit, the page keeps them and is counted as
// missed.
//
// What is reported is held out: the queries are of two halves in turn, one chooses the tiers, the other one gives the
// error. Where the second half's error has been larger for recent pages, the limit for the first is lowered by as
// much.
//
// Queries that stand before the place where a page's tokens have left the recent window are turned to it (RoPE),
// since no coded row is attended from before. Pages that are sealed before a query of each half has been seen keep
// the policy's tiers and are not counted. What becomes of a page's tiers later is not in the error.
//
// Cost: an attend of 2 QKV_QUALITY_TOKENS tokens, on the caller's thread, and for 8 heads of 128 + 128 with 4 query
// heads each about twice what encoding takes (quality_test prints it).
//
// Threads: qkv_quality_query and qkv_quality_read from any, with the layer locked for reading or not at all;
// qkv_quality_query drops its queries where another thread holds the lock. The others by the thread that changes the
// layer's rows (layer.h).
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
#define QKV_QUALITY_SAMPLE_EVERY 4  // attends, of which one is sampled

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

// The latest queries, as if they stood at position `last` or where they did, whichever is later: [tokens][q_heads]
// [key_dim], of both halves in turn, for at most 2 QKV_QUALITY_TOKENS tokens. Returns the tokens; 0: too few so far.
size_t qkv_quality_gather(qkv_quality *quality, uint64_t last, float *queries);

// A full page that has just been coded, its rows k [64][kv_heads][key_dim] and v [64][kv_heads][value_dim], and the
// gathered queries, with what they get from all that the layer holds: out [tokens][q_heads][value_dim], lse
// [tokens][q_heads].
typedef struct qkv_quality_page {
  const qkv_coder *coder;
  const void *page;
  const float *k, *v;
  uint64_t held;  // tokens that the layer holds
  size_t tokens;  // whose queries these are
  const float *queries, *out, *lse;
} qkv_quality_page;

// Fills `image` (64-byte aligned, with space for as many bytes as the page has) with the page at fewer bits and
// returns its bytes; 0: the page keeps its tiers.
size_t qkv_quality_judge(qkv_quality *quality, const qkv_quality_page *page, void *image);

typedef struct qkv_quality_stats {
  uint64_t pages;   // whose tiers were selected
  uint64_t missed;  // of these: the coded tiers were not enough
  double squares;   // sum over these pages of squared errors, each times the page's share of the attention
  double shares;    // sum of these
} qkv_quality_stats;
qkv_quality_stats qkv_quality_read(const qkv_quality *quality);
// The root of the mean square; 0 without pages.
double qkv_quality_error(const qkv_quality_stats *stats);

// Of all layers that the process has had. Any thread.
qkv_quality_stats qkv_quality_totals(void);

#endif
