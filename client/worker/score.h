// Scoring: what the daemon's codes of a prefix cost a model in quality.
//
// Each text gives `windows` windows of length + 1 tokens, evenly spread. The model runs over the first `length`
// tokens of a window twice:
//
//   exact   with the worker's own fp32 cache
//   coded   from position `prefill` on; keys and values of the prefix, as the exact run made them, are in the
//           daemon, all of them coded; the worker holds those of later positions itself and merges the two partial
//           attentions by their LSE. So hidden states carry the codes' error from layer to layer.
//
// With a quality contract the prefix comes to the daemon as from a worker that runs it there, keys, values and
// queries of QKVI_SCORE_BATCH positions at a time; its answers are not used. The daemon so knows queries of the
// prefix, none of those that are compared.
//
// With `demote_bits` the prefix comes in the same way, so that its tokens' attention is counted. After `demote_after`
// queries behind the prefix, which are not scored, the session is brought to so many bits.
//
// Compared are the next-token distributions at the positions from prefill + demote_after on.
#ifndef QKV_CLIENT_WORKER_SCORE_H
#define QKV_CLIENT_WORKER_SCORE_H

#include <stdbool.h>
#include <stdint.h>

#include "client/c/qkv.h"
#include "client/worker/figures.h"
#include "client/worker/lm.h"

// Tokens of a forward pass, and so the queries of one attend call.
enum { QKVI_SCORE_BATCH = 256 };

typedef struct qkvi_score_options {
  int64_t windows, prefill, length;  // 1 <= prefill < length
  const char *codec, *codec_v;       // borrowed; NULL: the daemon's
  double bits_k, bits_v;             // 0: the daemon's
  double max_attention_error;        // quality contract; 0: none
  const char *anchor;                // its kind, borrowed; NULL: the daemon's
  int64_t demote_after;              // queries behind the prefill that are not scored; < length - prefill
  double demote_bits;       // average that the session is then brought to, by attention; 0: it stays as it is
  bool demote_even;         // to so many for all, whatever the attention
  int purpose;              // of the session, as in qkv_session_options: decides the frame of keys
  const void *calibration;  // a file's bytes, borrowed; NULL: none is given to the daemon
  size_t calibration_bytes;
  int precision;  // of attention, as in qkv_client_attend_options
} qkvi_score_options;

// How far the daemon's rows of a prefix are from the exact ones: means over layers and windows of the squared error
// relative to the squares.
typedef struct qkvi_score_errors {
  double rel_mse_k, rel_mse_v;
} qkvi_score_errors;

typedef struct qkvi_scorer qkvi_scorer;

// `client` and `lm` are borrowed.
qkvi_scorer *qkvi_scorer_create(qkv_client *client, const qkvi_lm *lm, const qkvi_score_options *options);
void qkvi_scorer_destroy(qkvi_scorer **scorer);

// Scores `length` + 1 tokens and adds to `quality`. Its session is closed whatever happens.
qkv_status qkvi_score_window(qkvi_scorer *scorer, const int32_t *window, qkvi_quality *quality, qkv_error *error);

// Of the latest window's session; bits per coordinate and what is said of its contract are over all windows.
qkv_client_session_info qkvi_scorer_session(const qkvi_scorer *scorer);
// Of all windows so far.
qkvi_score_errors qkvi_scorer_errors(const qkvi_scorer *scorer);
// Times of all attend calls so far; owned by the scorer.
qkvi_samples *qkvi_scorer_attend_us(qkvi_scorer *scorer);

#endif
