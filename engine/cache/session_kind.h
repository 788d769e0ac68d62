// What sessions have alike: their model, their memory, and their config but for what is each session's own. Equal
// ones are one object, so a session of which little else is in memory has a pointer to it (session_state.h).
//
// Reference counted: each session holds one reference. Memory: its arena's, some 500 bytes, so that sessions of many
// policies count in the budget. So does what their coders take (coding.h), beyond QKVI_CODERS_FREE bytes: it is
// reserved in the arena from the first of the kinds on that are coded alike until the last one goes, with the
// calibration that is in force at first. Threads: any; one lock, held for a look-up.
#ifndef QKV_ENGINE_CACHE_SESSION_KIND_H
#define QKV_ENGINE_CACHE_SESSION_KIND_H

#include "engine/cache/session.h"

typedef struct qkvi_session_kind {
  qkv_session_config config;  // name NULL; id, root, ttl_ms, pinned, staged, whole, parent_truncations, archived,
                              // headroom, found zero
  const qkv_model *model;
  qkv_arena *arena;
  qkv_prefix_hash root;  // of its tenant and model, without a salt
} qkvi_session_kind;

// With a reference in *out. `config` is copied, with its tenant; the model and the arena outlive the kind. One that
// is new is made in config->headroom as far as that goes. RESOURCE_EXHAUSTED, with nothing changed: the arena's.
qkv_status qkvi_session_kind_get(const qkv_session_config *config, const qkv_model *model, qkv_arena *arena,
                                 const qkvi_session_kind **out, qkv_error *error);
// Bytes of the arena that a new one takes, without coders.
uint64_t qkvi_session_kind_cost(const qkv_session_config *config);
// Bytes of the arena that are reserved for coders where no kind is coded alike.
uint64_t qkvi_session_coders_cost(const qkv_session_config *config, const qkv_model *model);
// The same; 0: there is one.
uint64_t qkvi_session_coders_missing(const qkv_session_config *config, const qkv_model *model,
                                     const qkv_arena *arena);
enum { QKVI_CODERS_FREE = 4096 };
// Gives the reference back, and clears `*kind`.
void qkvi_session_kind_unref(const qkvi_session_kind **kind);
// How many there are in the process.
size_t qkvi_session_kinds(void);

#endif
