// OpenSession with prefix_token_ids: the new session begins as a fork of one that holds the longest prefix.
//
// Threads: any that may wait for layers, and with an SSD tier for the disk.
#ifndef QKV_SERVER_HANDLERS_OPEN_PREFIX_H
#define QKV_SERVER_HANDLERS_OPEN_PREFIX_H

#include <stddef.h>
#include <stdint.h>

#include "server/daemon.h"

// Opens the session that `config` describes, as for qkv_store_open, with as many of `count` ids as an open session of
// the same coding, durability, contract and keep_full holds in all layers. `*session` gets one reference. Returns the
// tokens that it begins with; 0, with *session NULL, where there are none or no fork succeeds: then the caller opens
// an empty one, and gets the error of that. A holder that is closed or truncated meanwhile costs another search.
uint64_t qkvi_open_prefix(const qkv_rpc_call *call, const qkv_session_config *config, const char *model,
                          const uint32_t *ids, size_t count, qkv_session **session);

#endif
