// Forks of sessions, in memory and in the journal: for Fork, and for OpenSession with a prefix.
//
// Threads: any that may wait for layers, and with an SSD tier for the disk.
#ifndef QKV_SERVER_HANDLERS_FORKS_H
#define QKV_SERVER_HANDLERS_FORKS_H

#include <stdint.h>

#include "server/daemon.h"

// A new open session that has the rows of `parent` below positions[layer] in each of the model's layers. `config` is
// as qkv_session_fork wants it, without id, backing and reservation, which are filled in here. Where memory is full,
// sessions are evicted for it. `*child` gets one reference. Errors of qkv_store_fork, and with an SSD tier of
// qkvi_catalogue_fork_begin: then nothing is left of the fork.
qkv_status qkvi_fork(const qkv_rpc_call *call, qkv_session *parent, qkv_session_config *config,
                     const uint64_t *positions, qkv_session **child, qkv_error *error);

// Closes a session that no client knows of yet, and returns the caller's reference.
void qkvi_fork_undo(const qkv_daemon *daemon, qkv_session **child);

#endif
