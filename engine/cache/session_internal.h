// A session's layers for session_retier.c: read and written without that being a use of the session.
#ifndef QKV_ENGINE_CACHE_SESSION_INTERNAL_H
#define QKV_ENGINE_CACHE_SESSION_INTERNAL_H

#include "engine/cache/session.h"

// Takes the layer's lock for reading; qkv_session_read_done gives it back.
const qkv_layer *qkvi_session_look(qkv_session *session, uint32_t layer);
// The same for writing; `changed` publishes what the layer has become and gives the lock back.
qkv_layer *qkvi_session_change(qkv_session *session, uint32_t layer);
void qkvi_session_changed(qkv_session *session, uint32_t layer);

const qkv_arena *qkvi_session_arena(const qkv_session *session);

// Layers in turn.
uint32_t qkvi_session_next_layer(qkv_session *session);

#endif
