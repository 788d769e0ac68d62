// Changing the tiers of a session's tokens, on request or step by step in the background; and statistics of them.
//
// Work is done in pieces: a layer is locked for reading while a few images are built, and for writing only to swap
// their pointers, so appends and attends go on in between.
//
// Threads: any that may wait for a layer. None of this counts as a use of the session. Two threads may re-tier one
// session at a time: a plan's pages that have changed meanwhile are left out.
#ifndef QKV_ENGINE_CACHE_SESSION_RETIER_H
#define QKV_ENGINE_CACHE_SESSION_RETIER_H

#include "engine/cache/retier.h"
#include "engine/cache/session.h"

typedef struct qkv_retier_report {
  uint64_t pages;  // changed
  uint64_t
      pages_left;  // that should change, too, but were beyond the policy's pages_max, or on their way to the backing
  // Decrease and increase of the rows' bytes, as usage counts them (bytes_coded + bytes_overhead).
  uint64_t bytes_freed, bytes_taken;
} qkv_retier_report;

// One step: the policy on the session's next layer, in turn; `*layer` gets which, where not NULL. Adds to the report.
// RESOURCE_EXHAUSTED where the arena has no headroom for pages that grow; what was changed until then stays so.
qkv_status qkv_session_retier(qkv_session *session, const qkv_retier_policy *policy, uint32_t *layer,
                              qkv_retier_report *report, qkv_error *error);

// For the thread that does this in the background, and lowers tiers step by step where memory is short. The session
// has been examined now; its tiers, as of its last use at `used_ms`, are what they should be; or are as low as they
// get. After the latter two it is not in the list (recency.h) until it is used again.
void qkv_session_tiers_looked(qkv_session *session);
void qkv_session_tiers_settled(qkv_session *session, int64_t used_ms);
void qkv_session_tiers_lowest(qkv_session *session, int64_t used_ms);

// Tokens and layers of a request. Groups of 16 tokens that are not all within are left alone.
typedef struct qkv_retier_scope {
  uint64_t begin, end;     // positions; end 0: to the end
  const uint32_t *layers;  // layer_count 0: all of them
  size_t layer_count;
} qkv_retier_scope;

// Down to an average of `bits` code bits a coordinate in every layer, by attention where that is counted, by gains
// where not; sinks stay. `even`: every group down to `bits` at most instead. INVALID_ARGUMENT "bits is 0.3, allowed
// are multiples of 0.125 up to 8", "layer is 6, ...".
qkv_status qkv_session_demote(qkv_session *session, const qkv_retier_scope *scope, double bits, bool even,
                              qkv_retier_report *report, qkv_error *error);
// Up to at least `bits`, as far as rows were coded with so many; 0: all they were coded with. FAILED_PRECONDITION,
// with nothing changed, where planes have been dropped and not kept: "layer 2: position 128 is held at 2 bits, 4 are
// asked and were not kept". RESOURCE_EXHAUSTED as above.
qkv_status qkv_session_promote(qkv_session *session, const qkv_retier_scope *scope, double bits,
                               qkv_retier_report *report, qkv_error *error);

// Where a token's rows are.
typedef enum qkv_place {
  QKV_PLACE_EXACT,   // not coded yet
  QKV_PLACE_MEMORY,  // coded, in memory, the session's alone
  QKV_PLACE_SHARED,  // coded, in memory, other sessions' too
  QKV_PLACE_SSD,     // coded, on the SSD alone
  QKV_PLACE_GPU,     // coded, in memory, and a copy on a GPU
  QKV_PLACES
} qkv_place;

// Attention and bits of one layer's tokens, in buckets of tokens_per_bucket; the last one may have fewer.
typedef struct qkv_attention_stats {
  bool counted;               // else ema is all 0
  uint64_t queries;           // counted so far
  uint64_t position, tokens;  // held
  uint64_t tokens_per_bucket;
  uint32_t kv_heads;
  size_t buckets;
  float *ema;     // [kv_heads][buckets]: mean average attention; 0 for exact rows, which are not counted
  float *bits;    // [kv_heads][buckets]: code bits a coordinate, of keys and values together; the dtype's for exact
                  // rows, 0 for what is only on the SSD
  float *places;  // [QKV_PLACES][buckets]: the part of a bucket's tokens that lie there
} qkv_attention_stats;

// In at most buckets_max buckets; 0: one a token. INVALID_ARGUMENT "layer is 6, ...".
qkv_status qkv_session_read_attention(qkv_session *session, uint32_t layer, size_t buckets_max,
                                      qkv_attention_stats *stats, qkv_error *error);
void qkv_attention_stats_deinit(qkv_attention_stats *stats);

#endif
