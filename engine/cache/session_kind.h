// What sessions have alike: their model, their memory, and their config but for what is each session's own. Equal
// ones are one object, so a session of which little else is in memory has a pointer to it (session_state.h).
//
// Reference counted: each session holds one reference. Memory: malloc's, outside the arena, some 400 bytes.
// Threads: any; one lock, held for a look-up.
#ifndef QKV_ENGINE_CACHE_SESSION_KIND_H
#define QKV_ENGINE_CACHE_SESSION_KIND_H

#include "engine/cache/session.h"

typedef struct qkvi_session_kind {
  qkv_session_config config;  // name NULL; id, root, ttl_ms, pinned, staged, whole, parent_truncations, headroom zero
  const qkv_model *model;
  qkv_arena *arena;
} qkvi_session_kind;

// With a reference. `config` is copied, with its tenant; the model and the arena outlive the kind.
const qkvi_session_kind *qkvi_session_kind_get(const qkv_session_config *config, const qkv_model *model,
                                               qkv_arena *arena);
// Gives the reference back, and clears `*kind`.
void qkvi_session_kind_unref(const qkvi_session_kind **kind);
// How many there are in the process.
size_t qkvi_session_kinds(void);

#endif
