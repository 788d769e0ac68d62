// A session's layers for session_retier.c and session_spill.c: read and written without that being a use of the
// session.
#ifndef QKV_ENGINE_CACHE_SESSION_INTERNAL_H
#define QKV_ENGINE_CACHE_SESSION_INTERNAL_H

#include <stdatomic.h>
#include <stdbool.h>

#include "engine/cache/session.h"

// Takes the layer's lock for reading; qkv_session_read_done gives it back.
const qkv_layer *qkvi_session_look(qkv_session *session, uint32_t layer);
// The same for writing; `changed` publishes what the layer has become and gives the lock back.
qkv_layer *qkvi_session_change(qkv_session *session, uint32_t layer);
void qkvi_session_changed(qkv_session *session, uint32_t layer);

// As qkvi_session_change; NULL where another thread has the layer.
qkv_layer *qkvi_session_try_change(qkv_session *session, uint32_t layer);

// Whether there is anything of the layer that is not settled (layer_spill.h), as it was last published.
bool qkvi_session_unsettled(qkv_session *session, uint32_t layer);

// The number of those who need what they have brought back of a layer to stay in memory; whether there are any, or
// the owner has pinned the session.
_Atomic uint64_t *qkvi_session_pins(qkv_session *session, uint32_t layer);
bool qkvi_session_stays(qkv_session *session, uint32_t layer);

// Around what is done with coders of this session after their layer's lock is given back: they stay alive. No layer
// is waited for in between.
void qkvi_session_use_codings(qkv_session *session);
void qkvi_session_codings_used(qkv_session *session);

// How pages of such a calibration (NULL: data-free) are coded here; alive while a layer uses it, or as above.
const qkv_coding *qkvi_session_coding(qkv_session *session, const qkv_calibration *calibration);

// Layers in turn.
uint32_t qkvi_session_next_layer(qkv_session *session);

#endif
