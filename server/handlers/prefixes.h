// The longest prefix of a prompt that an open session holds: for Match, and for OpenSession with a prefix.
//
// Threads: any that may wait for the layers of sessions which have pages on the SSD.
#ifndef QKV_SERVER_HANDLERS_PREFIXES_H
#define QKV_SERVER_HANDLERS_PREFIXES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "server/daemon.h"

enum { QKVI_PREFIX_IDS_MAX = 1 << 22 };  // ids of a prompt

typedef struct qkvi_held_prefix {
  qkv_session *session;    // NULL: there is none
  uint64_t tokens;         // that all layers hold, a multiple of QKV_PREFIX_PAGE
  uint64_t tokens_cold;    // of these, on the SSD alone in one layer at least
  uint64_t bytes_missing;  // of their pages, over all layers
} qkvi_held_prefix;

// The best of the QKV_STORE_MATCH_MAX sessions that share the most pages with `count` ids: the one whose layers all
// hold the most tokens of them, and of equal ones the one with the most in memory. Sessions that `suits` refuses are
// skipped; NULL: all suit. The caller returns the session's reference.
qkvi_held_prefix qkvi_prefix_find(const qkv_daemon *daemon, const qkv_prefix_hash *root, const uint32_t *ids,
                                  size_t count, bool (*suits)(const void *context, qkv_session *session),
                                  const void *context);

// Marks which of the first tokens / 64 pages are on the SSD alone in one layer at least; `cold` is cleared. Returns
// the bytes of what is missing. Waits for layers.
uint64_t qkvi_prefix_mark_cold(qkv_session *session, uint64_t tokens, bool *cold);

#endif
