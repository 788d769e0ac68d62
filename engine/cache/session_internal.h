// A session's layers for session_retier.c and session_spill.c: locked for reading and writing without counting as a
// use of the session.
#ifndef QKV_ENGINE_CACHE_SESSION_INTERNAL_H
#define QKV_ENGINE_CACHE_SESSION_INTERNAL_H

#include <stdatomic.h>
#include <stdbool.h>

#include "engine/cache/session.h"

// A session has its layers from its first use on, unless it is folded (session_fold.h). What follows needs them
// (asserted).
bool qkvi_session_has_layers(const qkv_session *session);
// Whether there was no use yet.
bool qkvi_session_is_new(const qkv_session *session);
// Whether it has layers, also after making those of a folded session, where that is possible: for threads that may
// wait for the tier.
bool qkvi_session_needs_layers(qkv_session *session);
// Bytes of the arena that they take; makes them, within a reservation (arena.h) or NULL. RESOURCE_EXHAUSTED (the
// arena's), and errors of qkv_session_unfold.
uint64_t qkvi_session_layers_cost(const qkv_session *session);
qkv_status qkvi_session_make_layers(qkv_session *session, uint64_t *headroom, qkv_error *error);
// A layer as a new one would be, of a session that has none, for asking what it costs.
void qkvi_session_init_layer(qkv_session *session, uint32_t index, qkv_layer *layer);
// Whether it has no layers yet; layers made later then have no backing.
bool qkvi_session_detach_empty(qkv_session *session);

// Takes the layer's lock for reading; qkv_session_read_done gives it back. `try`: NULL where another thread changes
// the layer, or waits to do so.
const qkv_layer *qkvi_session_look(qkv_session *session, uint32_t layer);
const qkv_layer *qkvi_session_try_look(qkv_session *session, uint32_t layer);
// As qkv_session_read_done, where pages have been evicted or restored meanwhile: publishes that first.
void qkvi_session_looked(qkv_session *session, uint32_t layer);
// Borrowed.
qkv_arena *qkvi_session_arena(const qkv_session *session);
// The same for writing; `changed` publishes what the layer has become and gives the lock back.
qkv_layer *qkvi_session_change(qkv_session *session, uint32_t layer);
void qkvi_session_changed(qkv_session *session, uint32_t layer);

// As qkvi_session_change; NULL where another thread has the layer.
qkv_layer *qkvi_session_try_change(qkv_session *session, uint32_t layer);

// Around a change of the layer's rows (qkv_layer_access): with the lock of its rows, and readers excluded only where
// the layer asks for it. A reservation (arena.h) or NULL. What has changed is published, and given to the backing.
typedef struct qkvi_row_change {
  qkv_layer_access access;
  qkv_session *session;
  uint32_t layer;
  int64_t used_ms;         // page_range.h; 0: it is no use of the session
  const qkv_row_ids *ids;  // of rows that are appended; NULL: not known
} qkvi_row_change;
qkv_layer *qkvi_session_begin_rows(qkv_session *session, uint32_t layer, uint64_t *headroom, qkvi_row_change *change);
// NULL where it is to be at once and another thread has the rows.
qkv_layer *qkvi_session_begin_append(qkv_session *session, uint32_t layer, const qkv_append_use *use,
                                     qkvi_row_change *change);
void qkvi_session_end_rows(const qkvi_row_change *change);

// Whether any layer has something that is not settled.
bool qkvi_session_any_unsettled(const qkv_session *session);
// Whether there is anything of the layer that is not settled (layer_spill.h), as it was last published.
bool qkvi_session_unsettled(qkv_session *session, uint32_t layer);

// The number of threads that need what they have restored of a layer to stay in memory; whether there are any, or the
// owner has pinned the session.
_Atomic uint16_t *qkvi_session_pins(qkv_session *session, uint32_t layer);
bool qkvi_session_stays(qkv_session *session, uint32_t layer);
// After a change of either: no other session that shares the layer's pages takes them out of memory where they stay.
// Reads the layer.
void qkvi_session_keep(qkv_session *session, uint32_t layer);

// Between the two calls coders of this session stay alive without their layer's lock. No layer is waited for in
// between.
void qkvi_session_use_codings(qkv_session *session);
void qkvi_session_codings_used(qkv_session *session);

// How pages of this calibration (NULL: data-free) are coded here; alive while a layer uses it, or as above.
const qkv_coding *qkvi_session_coding(qkv_session *session, const qkv_calibration *calibration);

// From here on it may share pages with others.
void qkvi_session_note_shared(qkv_session *session);

// Returns the layers in turn.
uint32_t qkvi_session_next_layer(qkv_session *session);

#endif
