// One window of text through a model: once exactly, then with the coded rows of its prefix, as often as there are
// ways to code them. docs/quality.md has the protocol:
//
//   exact   all positions in fp32; rows of the prefix, queries, attention outputs and logits behind it are kept
//   coded   the positions behind the prefix once more, from their tokens; in every layer keys and values of the
//           prefix are what came out of their pages, those of later positions stay exact. So hidden states carry the
//           codes' error from layer to layer.
//
// Threads: one at a time for each probe.
#ifndef QKV_CLIENT_BENCH_PROBE_H
#define QKV_CLIENT_BENCH_PROBE_H

#include "client/bench/recode.h"
#include "client/bench/tiered.h"
#include "client/worker/figures.h"
#include "client/worker/lm.h"
#include "engine/cache/coding.h"

// Of one layer.
typedef struct qkvi_probe_layer {
  qkvi_recoded rows;
  // Attention outputs of the exact pass's queries behind the prefix, one query and head at a time: over coded rows of
  // the prefix and exact later ones, against all exact.
  double attention_error, attention_square;
  double attention_cosine;
  uint64_t attention_rows;
} qkvi_probe_layer;

// Sums over windows.
typedef struct qkvi_probe_sums {
  qkvi_quality quality;
  qkvi_probe_layer *layers;  // [lm->layers]
} qkvi_probe_sums;

// Adds one query's output of one head, [dim].
void qkvi_probe_add_attention(const float *exact, const float *coded, int64_t dim, qkvi_probe_layer *sums);

typedef struct qkvi_probe qkvi_probe;

// `lm` is borrowed. 1 <= prefill < length. Rows are rounded to `dtype` before they are coded.
qkvi_probe *qkvi_probe_create(const qkvi_lm *lm, int64_t prefill, int64_t length, qkv_dtype dtype);
void qkvi_probe_destroy(qkvi_probe **probe);

// The exact pass over `length` + 1 tokens, borrowed until the next one. Adds to sums->quality what an exact cache
// has: bits per token, and no divergence.
void qkvi_probe_exact(qkvi_probe *probe, const int32_t *window, qkvi_probe_sums *sums);

// A coded pass over the same window.
void qkvi_probe_coded(qkvi_probe *probe, const qkv_coding *coding, qkvi_probe_sums *sums);
// A coded pass whose session was attended with the prefix's own queries and then demoted, by their attention, to an
// average of `bits`. `session` is new and filled.
void qkvi_probe_tiered(qkvi_probe *probe, qkvi_tiered *session, double bits, qkvi_probe_sums *sums);

#endif
