// Spilling a session: its pages are put in the backing when they are sealed, may be evicted from memory once they can
// be read back, and are restored when they are needed.
//
// Threads: any that may wait for a layer; settle and the pins never wait. None of this counts as a use of the
// session.
#ifndef QKV_ENGINE_CACHE_SESSION_SPILL_H
#define QKV_ENGINE_CACHE_SESSION_SPILL_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/cache/layer_spill.h"
#include "engine/cache/session.h"

// Gives pages to the backing that it refused before, and records which ones have become durable. Layers in use are
// left out. True where all that is sealed is durable.
bool qkv_session_settle(qkv_session *session);

// Calibrations that its pages are coded with, or may be from now on, each with a reference for the caller: from the
// `first` on, at most `max`. Returns how many.
size_t qkv_session_calibrations(qkv_session *session, size_t first, const qkv_calibration **out, size_t max);

// Nothing is put any more, and existing records are left alone: to be called before the session's files on the SSD
// are deleted. Waits for layers.
void qkv_session_detach(qkv_session *session);

// As qkv_layer_seal for every layer, and gives the pages to the backing: what a session that is to survive its
// process needs. RESOURCE_EXHAUSTED; layers that were sealed until then stay so.
qkv_status qkv_session_seal(qkv_session *session, qkv_error *error);
// The same for a session that is not in use: UNAVAILABLE, with the rest left, as soon as it is.
qkv_status qkv_session_seal_idle(qkv_session *session, qkv_error *error);

// As qkv_layer_evict, layer by layer, until `bytes` are free or there are no more; nothing of pinned layers. Layers
// are used in turn, so the one before that which is used is needed again last: it is evicted first, then those before
// it, down to the one that comes next; then the one in use, as the headroom may be for it. Pages that other threads
// read stay, and layers that they change are left out. With `wait` they are waited for, readers only where nothing
// else is left. Returns the bytes.
uint64_t qkv_session_evict(qkv_session *session, uint64_t bytes, bool wait);

// Whether its owner has pinned it.
bool qkv_session_is_pinned(const qkv_session *session);
// Sums over all layers, as last published, without a lock: bytes of exact rows; bytes in memory that no other session
// shares; bytes of records.
uint64_t qkv_session_bytes_exact(const qkv_session *session);
uint64_t qkv_session_bytes_kept(const qkv_session *session);
uint64_t qkv_session_bytes_stored(const qkv_session *session);

// Whether any page is cold; the cold tokens of a layer, and the bytes of all its records. As of the last change;
// never waits.
bool qkv_session_has_cold(const qkv_session *session);
uint64_t qkv_session_tokens_cold(const qkv_session *session);  // over all layers
uint64_t qkv_session_cold(qkv_session *session, uint32_t layer, uint64_t *bytes);
// The layer that was appended to or read last; 0 where none was.
int64_t qkv_session_last_used_ms(const qkv_session *session);  // on the monotonic clock
uint32_t qkv_session_last_layer(const qkv_session *session);
// How often the first layer was used next after the last one, as each step of a model does.
uint32_t qkv_session_turns(const qkv_session *session);

// From here on what is in memory of the layer, or is restored, stays, whatever the sessions that share it do.
// Counted, separately from the owner's pin (qkv_session_set_pinned). Waits for the layer.
void qkv_session_pin(qkv_session *session, uint32_t layer);
void qkv_session_unpin(qkv_session *session, uint32_t layer);
// Whether any layer is pinned so. Never waits.
bool qkv_session_has_pins(qkv_session *session);

// As qkv_layer_append_cost. The layer is below the model's (asserted), here and in what follows.
uint64_t qkv_session_append_cost(qkv_session *session, uint32_t layer, uint64_t end);
// As qkv_layer_missing.
size_t qkv_session_missing(qkv_session *session, uint32_t layer, uint64_t begin, uint64_t end, bool full,
                           qkv_missing_page *out, size_t max);
// As qkv_layer_missing_shared.
size_t qkv_session_missing_shared(qkv_session *session, uint32_t layer, uint64_t begin, uint64_t end, bool full,
                                  const void **out, size_t max);
// Bytes of all these pages.
uint64_t qkv_session_missing_bytes(qkv_session *session, uint32_t layer, uint64_t begin, uint64_t end, bool full);
// As qkv_layer_restore and qkv_layer_restore_full for 1 to QKV_RESTORE_PAGES pages of qkv_session_missing with an
// image each. All images are freed, or the layer's, and set to NULL. Runs concurrently with readers of the layer.
// Only giving pages their lost planes back waits for them, once. `*failed` gets the index of the first page that
// fails; those before it have been restored.
enum { QKV_RESTORE_PAGES = 8 };
qkv_status qkv_session_restore(qkv_session *session, uint32_t layer, uint64_t *reservation,
                               const qkv_missing_page *pages, void **images, size_t count, size_t *failed,
                               qkv_error *error);

// As qkv_layer_adopt, for a page that was coded with `calibration`; NULL: data-free. RESOURCE_EXHAUSTED (the
// arena's): there is no memory for the session's layers.
qkv_status qkv_session_adopt(qkv_session *session, uint32_t layer, const qkv_calibration *calibration,
                             uint32_t tokens, uint64_t record, uint32_t bytes, qkv_error *error);
// As qkv_layer_adopted.
void qkv_session_adopted(qkv_session *session, uint32_t layer);
// As qkv_layer_adopt_rows, and appends the rows of the record, k [tokens, kv_heads, key_dim] and v [tokens, kv_heads,
// value_dim], at `begin`, the layer's length. Errors are qkv_session_append's; then the session is to be dropped.
qkv_status qkv_session_adopt_rows(qkv_session *session, uint32_t layer, uint64_t record, uint64_t begin, bool shared,
                                  const qkv_tensor *k, const qkv_tensor *v, qkv_error *error);
// As qkv_layer_adopt_shared; both are of one model, policy and purpose. Only while the sessions are being found
// again.
void qkv_session_adopt_shared(qkv_session *session, qkv_session *other, uint32_t layer);

#endif
