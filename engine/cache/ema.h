// How much attention the coded tokens of a layer receive: for each token and KV head
//
//   s <- alpha s + (1 - alpha) a
//
// once a query, a being the softmax weight averaged over the query heads of the KV head. It is attend's own weight,
// of what the layer holds. Only one block of queries in `sample_every` is looked at (attend_sample.c); it stands for
// all queries since the last one, so that the averages are the same whatever is sampled, but for noise. Decay is
// lazy: a page knows for each head up to which query its values are right.
//
// A value is 16 bits: 5 of exponent, 11 of mantissa, 2^-31 to 2, 0 for less. Steps of 0.05 %: an average whose
// alpha^n rounds to 1 for the n queries between two samples would not fade, so alpha is at most QKV_EMA_ALPHA_MAX.
//
//   page            0  u64 query at which it was sealed
//                   8  u64 query at which its tiers were last changed; 0: never
//                  16  u64 KV heads
//                  24  u64 query that the values of each head are right for
//                   .  16 x u64 for each head: 64 values, four a word, the first one lowest
//
// Threads: qkv_ema_clock_* and qkv_ema_add run together; values are relaxed atomics of four tokens each. Of two
// concurrent additions to a page one may be lost: it is a statistic.
#ifndef QKV_ENGINE_CACHE_EMA_H
#define QKV_ENGINE_CACHE_EMA_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"
#include "engine/codec/page.h"

#define QKV_EMA_ALPHA 0.996  // about the last 256 queries
#define QKV_EMA_ALPHA_MAX 0.99999
#define QKV_EMA_SAMPLE_EVERY 16

typedef struct qkv_ema_options {
  double alpha;           // 0 < alpha <= QKV_EMA_ALPHA_MAX
  uint32_t sample_every;  // blocks of QKV_QUERY_BLOCK queries, or attends; 0: nothing is counted or kept
} qkv_ema_options;

// INVALID_ARGUMENT "ema-alpha is 2, allowed are 0 to 0.99999".
qkv_status qkv_ema_check(const qkv_ema_options *options, qkv_error *error);

// ---- A layer's clock ----

typedef struct qkv_ema_clock {
  double log_alpha;  // to the base 2, < 0
  uint32_t sample_every;
  uint32_t kv_heads;
  _Atomic uint64_t queries;  // attended so far
  _Atomic uint64_t blocks;   // of queries, likewise
  _Atomic uint64_t sampled;  // `queries` at the last sample
  _Atomic uint32_t sizes[];  // [kv_heads] floats: mean square of a coordinate of q times the scale; 0: none yet
} qkv_ema_clock;

// NULL where options->sample_every is 0.
qkv_ema_clock *qkv_ema_clock_create(const qkv_ema_options *options, uint32_t kv_heads);
void qkv_ema_clock_destroy(qkv_ema_clock **clock);

// What one sample stands for.
typedef struct qkv_ema_step {
  uint64_t now;      // queries attended, this call's included
  uint64_t queries;  // since the last sample
} qkv_ema_step;

// Counts a call of so many queries in so many blocks. Returns whether it is to be sampled; then fills `step`.
bool qkv_ema_clock_count(qkv_ema_clock *clock, uint64_t queries, uint64_t blocks, qkv_ema_step *step);
uint64_t qkv_ema_clock_now(const qkv_ema_clock *clock);

// An average that is kept as the bits of a float, 0 at first: `value` is what the sample found.
void qkv_ema_clock_average(const qkv_ema_clock *clock, _Atomic uint32_t *average, const qkv_ema_step *step,
                           float value);
float qkv_ema_average(const _Atomic uint32_t *average);

// The mean square of a query's coordinates, times the scale's: what an error in a key weighs by.
void qkv_ema_clock_add_size(qkv_ema_clock *clock, uint32_t kv_head, const qkv_ema_step *step, float mean_square);
float qkv_ema_clock_size(const qkv_ema_clock *clock, uint32_t kv_head);

// ---- A page's averages ----

typedef struct qkv_ema {
  uint64_t born;
  _Atomic uint64_t changed;
  uint64_t kv_heads;
  _Atomic uint64_t words[];  // right-for [kv_heads], then values [kv_heads][QKV_PAGE_TOKENS / 4]
} qkv_ema;

size_t qkv_ema_bytes(uint32_t kv_heads);
// Brings what qkv_ema_add needs for one of a page's `kv_heads` into the cache, without a look at it.
__attribute__((always_inline)) static inline void qkv_ema_fetch(const qkv_ema *ema, uint32_t kv_heads,
                                                                uint32_t kv_head) {
  enum { WORDS = QKV_PAGE_TOKENS / 4, LINE_WORDS = 8 };
  __builtin_prefetch(&ema->words[kv_head]);
  for (size_t i = 0; i <= WORDS; i += LINE_WORDS) {
    __builtin_prefetch(&ema->words[kv_heads + (size_t)kv_head * WORDS + i]);
  }
}

// In memory of qkv_ema_bytes.
void qkv_ema_init(qkv_ema *ema, uint32_t kv_heads, uint64_t now);

// attention [64]: each token's weight, averaged over the rows of the sample.
void qkv_ema_add(qkv_ema *ema, const qkv_ema_clock *clock, uint32_t kv_head, const qkv_ema_step *step,
                 const float *attention);

// Whether a query has been counted for a head of the page.
bool qkv_ema_seen(const qkv_ema *ema, uint32_t kv_head);

// values [64] as of `now`. Queries before the page was sealed do not count: the average is over its own life.
void qkv_ema_read(const qkv_ema *ema, const qkv_ema_clock *clock, uint32_t kv_head, uint64_t now, float *values);

#endif
