// The store: all models and sessions of a daemon, by name, within limits.
//
// Threads: any. One lock over the two tables, held for look-ups and changes of them only.
#ifndef QKV_ENGINE_CACHE_STORE_H
#define QKV_ENGINE_CACHE_STORE_H

#include <stddef.h>
#include <stdint.h>

#include "engine/cache/session.h"

typedef struct qkv_store_config {
  uint64_t memory_budget;  // bytes of KV and of the sessions themselves
  qkv_heap_config heap;    // where these lie
  size_t models_max, sessions_max;
  qkv_policy policy;          // resolved: what models and sessions fall back to
  uint64_t calibrate_tokens;  // after which a model is calibrated from its traffic (learner.h); 0: never
  qkv_pool *pool;             // whose idle threads help those who stand back to encode, borrowed; NULL: none
} qkv_store_config;

typedef struct qkv_store qkv_store;

qkv_store *qkv_store_create(const qkv_store_config *config);
// Closes every session; users must be gone (asserted by the arena).
void qkv_store_destroy(qkv_store **store);
// What all sessions' memory comes from. Borrowed.
qkv_arena *qkv_store_arena(const qkv_store *store);

// Resolves, checks and keeps a copy. `*out` (where not NULL) lives as long as the store. The same model again
// is OK, another one under the name ALREADY_EXISTS, too many RESOURCE_EXHAUSTED ("limit-models").
qkv_status qkv_store_register_model(qkv_store *store, const qkv_model *model, const qkv_model **out,
                                    qkv_error *error);
// A calibration for pages to come of a model, in sessions open or not, once it has been tried (learner.h), or at once
// where it is trusted. NOT_FOUND; INVALID_ARGUMENT where it does not fit.
qkv_status qkv_store_calibrate(qkv_store *store, const char *name, const qkv_calibration *calibration,
                               qkv_calibration_source source, bool trusted, qkv_error *error);
// Makes and tries the calibrations that are due, one after the other; false where none was. Takes seconds for a large
// model: for a thread of its own. `may` is asked before each, which takes up to `bytes`, and where it says no that
// one is left for later; NULL: all may. `fn` is told of each that it said yes to.
bool qkv_store_learn(qkv_store *store, bool (*may)(void *context, const qkv_model *model, uint64_t bytes),
                     void (*fn)(void *context, const qkv_model *model, const qkv_learner_outcome *outcome),
                     void *context);
// Nothing is learnt any more; one that is being made is given up.
void qkv_store_stop_learning(qkv_store *store);
// NOT_FOUND "no model x".
qkv_status qkv_store_model(qkv_store *store, const char *name, const qkv_model **out, qkv_error *error);
// Models in order of name; fn returns false to stop. `sessions` are those open with it.
void qkv_store_each_model(qkv_store *store, bool (*fn)(void *context, const qkv_model *model, size_t sessions),
                          void *context);

// `model_name` NOT_FOUND; the session's name ALREADY_EXISTS; "limit-sessions" and "memory-budget" (for what a
// session takes when it is empty) RESOURCE_EXHAUSTED; limits
// INVALID_ARGUMENT. `*out` is a reference that the caller returns with qkv_session_unref.
qkv_status qkv_store_open(qkv_store *store, const qkv_session_config *config, const char *model_name,
                          qkv_session **out, qkv_error *error);
// A reference, or NOT_FOUND "no session x".
qkv_status qkv_store_session(qkv_store *store, const char *name, qkv_session **out, qkv_error *error);
// Takes it out of the table; `*bytes_freed` gets the bytes of its rows.
qkv_status qkv_store_close(qkv_store *store, const char *name, uint64_t *bytes_freed, qkv_error *error);

// The same for this session; NOT_FOUND where it is not open any more, whoever has its name now.
qkv_status qkv_store_close_session(qkv_store *store, const qkv_session *session, uint64_t *bytes_freed,
                                   qkv_error *error);

// References to up to `max` open sessions in order of name, beginning after `after` ("" from the start), whose
// names have the prefix. The caller returns each. Returns how many.
size_t qkv_store_list(qkv_store *store, const char *prefix, const char *after, qkv_session **out, size_t max);

typedef struct qkv_store_stats {
  size_t models, sessions;
  qkv_arena_stats memory;
  qkv_heap_stats heap;
  uint64_t learning_bytes;     // of memory: moments and held-out traffic of calibrations
  uint64_t calibration_bytes;  // beside it: calibrations, and what coders make of them, of the whole process
} qkv_store_stats;
qkv_store_stats qkv_store_read_stats(qkv_store *store);

#endif
