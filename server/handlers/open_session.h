// Opening sessions: for OpenSession, and for appends that begin sessions (server/handlers/stage.h).
//
// Threads: any that may wait for the disk where there is an SSD tier, and for what `waits` says.
#ifndef QKV_SERVER_HANDLERS_OPEN_SESSION_H
#define QKV_SERVER_HANDLERS_OPEN_SESSION_H

#include "qkv/v1/kv_cache.pb-c.h"
#include "server/daemon.h"
#include "server/handlers/jobs.h"

// The session's configuration by a request, with the daemon's defaults; not its prefix. INVALID_ARGUMENT names the
// field.
qkv_status qkvi_open_config(const qkv_rpc_call *call, const Qkv__V1__OpenSessionRequest *request,
                            qkv_session_config *config, qkv_error *error);

// Opens it without rows and journals that, unless it is staged. Other sessions are evicted from memory for it, or
// closed (server/evict.h): without QKVI_WAIT_MEMORY QKV_UNAVAILABLE instead, with *error left alone. `*session` gets
// one reference. Errors of qkv_store_open, qkvi_catalogue_enlist and qkvi_catalogue_opened.
qkv_status qkvi_open_empty(const qkv_rpc_call *call, qkv_session_config *config, const char *model, qkvi_waits waits,
                           qkv_session **session, qkv_error *error);

#endif
