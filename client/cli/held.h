// Whether a session that a daemon has already is the beginning of the one that is brought to it (target.h).
//
// Token ids say so where both have them of all that is held. Otherwise the first and the newest page of each layer
// are compared, or the newest exact row: rows of a model depend on all tokens before them, and pages are copied to
// the bit. What cannot be compared (a page that has lost bits on one side) counts as different.
//
// Threads: used by the program's main thread.
#ifndef QKV_CLIENT_CLI_HELD_H
#define QKV_CLIENT_CLI_HELD_H

#include <stdbool.h>
#include <stdint.h>

#include "client/c/qkv.h"
#include "client/cli/target.h"

// What the target has.
typedef struct qkvctl_held {
  const uint64_t *lengths;  // [layers]
  size_t layers;
  bool same_root;  // token ids mean the same there: model, tenant and salt are the source's
} qkvctl_held;

// FAILED_PRECONDITION, with what to do: they are, or may be, rows of other tokens, or more than the source has.
qkv_code qkvctl_held_check(const qkvctl_target_config *config, const qkvctl_held *held, qkv_call_error *error);

#endif
