// Heavy hitters: rows that will get much of the attention, predicted from their keys alone.
//
// Most of what attention misses comes from few rows: with weights w, the errors of a code add up as sum_t w_t^2
// e_t^2. Queries of a head have a mean, far from 0, and RoPE leaves of it what turns slowly over the distances of
// queries and keys. With that mean q as the predictor, score_t = q . k_t, rows are heavy hitters whose score is above
// the mean of all keys' by QKV_HEAVY_DEVIATIONS standard deviations. On SmolLM2-135M these are 1.1 % of the rows,
// which make 35 % of the sum above (sinks left out; 16 queries and 6 pages a layer that were not learnt from); as
// outliers (outliers.h) they cost a tenth of a bit a coordinate.
//
// Source: own measurements; that few keys get most attention, and are the same for all queries, is in Zhang et al.,
// "H2O: Heavy-Hitter Oracle" (2023).
//
// Threads: pure functions.
#ifndef QKV_ENGINE_CODEC_HEAVY_H
#define QKV_ENGINE_CODEC_HEAVY_H

#include <stddef.h>
#include <stdint.h>

#include "engine/codec/embedded.h"

#define QKV_HEAVY_DEVIATIONS 2.0
#define QKV_HEAVY_MOST 2                   // of a page and KV head, those with the highest scores
#define QKV_HEAVY_TIER (6 * QKV_TIER_BIT)  // at which an outlier's 8 bits are hardly better than the codes

// Slots of a page, a mask, whose rows are heavy hitters: keys of one KV head as attended, that of slot t at
// keys + t * stride bytes. First tokens, which are outliers anyway, are not among them.
uint64_t qkv_heavy_slots(const qkv_coder *coder, uint16_t kv_head, uint64_t position, uint32_t tokens,
                         qkv_dtype dtype, const void *keys, size_t stride);

#endif
