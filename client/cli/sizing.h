// What sessions of a model take, by the engine itself: a store in this process gets rows, and what it takes is
// counted. Memory is the same as a daemon's; times are those of one core of this machine.
//
// One and two layers are filled, and a session's others taken to be as the second; of long sessions 1024 and 2048
// tokens, and the rest taken to be as those between. Rows are random: codes have no other size for that.
//
// Threads: one at a time.
#ifndef QKV_CLIENT_CLI_SIZING_H
#define QKV_CLIENT_CLI_SIZING_H

#include "engine/cache/store.h"

typedef struct qkvctl_sizing {
  const qkv_model *model;  // `layers` as the model has them
  const qkv_policy *policy;
  qkv_purpose purpose;
  uint64_t tokens;  // of a session, in each layer
} qkvctl_sizing;

typedef struct qkvctl_need {
  double memory;          // bytes of a session: pages, exact rows, tables, counters of attention
  double stored;          // bytes of its records on the SSD, sealed pages alone, as far as zstd does not shorten them
  double append_seconds;  // of one core for one token of all layers
  double attend_seconds;  // of one core for a query at the session's end, of all layers
  double learning;        // bytes, once for the model while its calibration is learnt, at most
} qkvctl_need;

// INVALID_ARGUMENT: a model or a policy beyond its limits.
qkv_status qkvctl_size_session(const qkvctl_sizing *sizing, qkvctl_need *need, qkv_error *error);

#endif
