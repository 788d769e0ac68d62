// The store: all models and sessions of a daemon by tenant and name, within limits. Models of two tenants may have
// the same name and differ, and so may sessions.
//
// A model of the default tenant can be shared: then it is visible to each tenant that has no model of its name.
//
// Threads: any. One lock over the two tables, held for look-ups and changes of them only; walks over all sessions
// take it for some hundred at a time.
#ifndef QKV_ENGINE_CACHE_STORE_H
#define QKV_ENGINE_CACHE_STORE_H

#include <stddef.h>
#include <stdint.h>

#include "engine/cache/session.h"

typedef struct qkv_store_config {
  uint64_t memory_budget;  // bytes of KV and of the sessions themselves
  qkv_heap_config heap;    // where these lie
  size_t models_max, sessions_max;
  qkv_policy policy;              // resolved: what models and sessions fall back to
  uint64_t calibrate_tokens;      // after which a model is calibrated from its traffic (learner.h); 0: never
  uint64_t prefixes_max;          // pages of 64 token ids that are indexed (prefix_index.h); 0: none
  uint64_t prefixes_tenant_max;   // of one tenant; 0: as many
  qkv_account_limits_fn *limits;  // of tenants (accounts.h); NULL: none have any
  void *limits_context;
  bool retier_all;                 // tiers of all sessions follow attention (server/retier.h)
  const qkv_codec *archive_codec;  // of sessions that are `archived`, below; NULL: as of others
  // The device of a new session's layers, which outlives the store; NULL: there are none. Forks have their parent's.
  qkv_device *(*choose_device)(void *devices);
  void *devices;
  qkv_pool *pool;  // whose idle threads help yielding ones to encode, borrowed; NULL: none
} qkv_store_config;

typedef struct qkv_store qkv_store;

qkv_store *qkv_store_create(const qkv_store_config *config);
// Closes every session; users must be gone (asserted by the arena).
void qkv_store_destroy(qkv_store **store);
// The arena of all sessions' memory. Borrowed.
qkv_arena *qkv_store_arena(const qkv_store *store);
// The accounts of its tenants. Borrowed.
qkv_accounts *qkv_store_accounts(const qkv_store *store);
// The index of the token ids of all its sessions; owners are sessions. Borrowed.
qkv_prefix_index *qkv_store_prefixes(const qkv_store *store);
// Its sessions by last use. Borrowed.
qkv_recency *qkv_store_recency(const qkv_store *store);

// Resolves, checks and keeps a copy, for its tenant. `*out` (where not NULL) lives as long as the store. The same
// model again is OK, and so is one that a shared model is already, which `*out` is then. Another one under the name
// is ALREADY_EXISTS, of a shared model, too; too many are RESOURCE_EXHAUSTED ("limit-models").
qkv_status qkv_store_register_model(qkv_store *store, const qkv_model *model, const qkv_model **out,
                                    qkv_error *error);
// The same where the tenant has fewer than `most` models of its own, 0: any number. RESOURCE_EXHAUSTED "quota models
// of tenant x is 3, it has registered 3".
qkv_status qkv_store_register_model_within(qkv_store *store, const qkv_model *model, uint64_t most,
                                           const qkv_model **out, qkv_error *error);
uint64_t qkv_store_tenant_models(qkv_store *store, const char *tenant);
// As qkv_store_register_model, for the tenant's own model, whether one of the name is shared or not.
qkv_status qkv_store_restore_model(qkv_store *store, const qkv_model *model, const qkv_model **out, qkv_error *error);
// Shares a model of the default tenant. Tenants that have one of the name keep theirs.
void qkv_store_share_model(qkv_store *store, const qkv_model *model);
// Ends that. FAILED_PRECONDITION "the model x has 3 sessions of other tenants"; it stays shared then.
qkv_status qkv_store_unshare_model(qkv_store *store, const qkv_model *model, qkv_error *error);
bool qkv_store_is_shared(qkv_store *store, const qkv_model *model);
// Makes and tries the calibrations that are due, one after the other; false where none was. Takes seconds for a large
// model: for a thread of its own. `may` is called before each calibration, which takes up to `bytes`; where it
// returns false, that one is left for later. NULL: all may. `fn` gets the outcome of each that was not left.
bool qkv_store_learn(qkv_store *store, bool (*may)(void *context, const qkv_model *model, uint64_t bytes),
                     void (*fn)(void *context, const qkv_model *model, const qkv_learner_outcome *outcome),
                     void *context);
// Stops learning; a calibration that is being made is abandoned.
void qkv_store_stop_learning(qkv_store *store);
// The tenant's model of that name, or the shared one. NOT_FOUND "no model x", with a tenant that is not "default" "no
// model x of tenant t".
qkv_status qkv_store_model(qkv_store *store, const char *tenant, const char *name, const qkv_model **out,
                           qkv_error *error);
// As qkv_store_model, without those that are shared.
qkv_status qkv_store_own_model(qkv_store *store, const char *tenant, const char *name, const qkv_model **out,
                               qkv_error *error);
// Models in order of name, then tenant; fn returns false to stop. With a tenant those that are visible to it, and how
// many sessions it has open with each; where that is NULL all, with the sessions of all.
void qkv_store_each_model(qkv_store *store, const char *tenant,
                          bool (*fn)(void *context, const qkv_model *model, size_t sessions), void *context);
// How many sessions the tenant has open with a model of the store; NULL: all tenants.
size_t qkv_store_model_sessions(qkv_store *store, const char *tenant, const qkv_model *model);
// Sessions that are open.
size_t qkv_store_sessions(qkv_store *store);

// The model is that of qkv_store_model for the config's tenant: NOT_FOUND. The session's name ALREADY_EXISTS;
// "limit-sessions", "memory-budget" (for what a session takes when it is empty) and the tenant's account
// RESOURCE_EXHAUSTED; limits INVALID_ARGUMENT. `*out` is a reference that the caller returns with qkv_session_unref.
// Where config->archived and purpose is FETCH, a session whose codec nobody has named gets the archive codec, if a
// calibration of its model is in force at that time: it has been tried with that codec, too (learner.h).
qkv_status qkv_store_open(qkv_store *store, const qkv_session_config *config, const char *model_name,
                          qkv_session **out, qkv_error *error);
// Memory that opening it takes for coders at most, in addition to what an empty session takes; 0: sessions of the
// tenant that are coded alike have them, or there is no such model.
uint64_t qkv_store_coders_cost(qkv_store *store, const qkv_session_config *config, const char *model_name);
// What it would do to the policy of the config, which it resolves.
void qkv_store_resolve(const qkv_model *model, const qkv_session_config *config, qkv_policy *policy);
// A session with config->staged: no client finds it by its name, which another may take meanwhile, until it is
// published. qkv_store_list has it, Match does not. ALREADY_EXISTS where the name is open, here or when it is
// published; NOT_FOUND where it has been closed.
qkv_status qkv_store_publish(qkv_store *store, qkv_session *session, qkv_error *error);
// As qkv_store_open, for a fork (session.h) of an open session; the config's name, tenant and id are the fork's.
qkv_status qkv_store_fork(qkv_store *store, qkv_session *parent, const qkv_session_config *config,
                          const uint64_t *positions, qkv_session **out, qkv_error *error);
// Here and below tenants and names are valid (qkv_name_check).
// A reference, or NOT_FOUND "no session x", with a tenant that is not "default" "no session x of tenant t".
qkv_status qkv_store_session(qkv_store *store, const char *tenant, const char *name, qkv_session **out,
                             qkv_error *error);
// As qkv_store_session, for many of one tenant, under one lock: a reference or NULL in out[i] for names[i].
void qkv_store_find(qkv_store *store, const char *tenant, const char *const *names, size_t count, qkv_session **out);
// Takes it out of the table; `*bytes_freed` gets the bytes of its rows.
qkv_status qkv_store_close(qkv_store *store, const char *tenant, const char *name, uint64_t *bytes_freed,
                           qkv_error *error);
// As qkv_store_close, for this session; NOT_FOUND where it is not open any more, though another one may have its name
// now.
qkv_status qkv_store_close_session(qkv_store *store, const qkv_session *session, uint64_t *bytes_freed,
                                   qkv_error *error);

// Folds a session (session_fold.h) of which the caller has one reference, and no other thread has any; false: not
// now, or it stays as it is. Waits for the tier to take the record, with no lock of the store.
bool qkv_store_fold(qkv_store *store, qkv_session *session);

// A place in the order of names, and among equal names of tenants: that of a session, or with tenant "" behind all
// sessions of the name.
typedef struct qkv_store_place {
  char name[QKV_NAME_MAX + 1], tenant[QKV_NAME_MAX + 1];
} qkv_store_place;
qkv_store_place qkv_store_place_of(const qkv_session *session);
bool qkv_store_is_behind(const qkv_session *session, const qkv_store_place *after);

// Which sessions are listed; what is NULL leaves none out.
typedef struct qkv_store_filter {
  const char *tenant, *prefix;                                      // prefix: of the name
  const qkv_store_place *after;                                     // those behind it
  bool (*wanted)(const void *context, const qkv_session *session);  // called with the store's lock
  const void *context;
} qkv_store_filter;

// References to the first `max` sessions at most, open and staged, by name, then tenant. The caller returns each.
// Returns how many. Of sessions that are opened or closed meanwhile any may be among them.
size_t qkv_store_list(qkv_store *store, const qkv_store_filter *filter, qkv_session **out, size_t max);

// References to up to `max` open sessions that have a backing, in no order. The caller returns each. Returns how
// many.
size_t qkv_store_backed(qkv_store *store, qkv_session **out, size_t max);
// Bytes of memory that sessions without a backing have, and those that are pinned. O(sessions), a look at a few
// numbers each.
uint64_t qkv_store_staying(qkv_store *store);
// Likewise, of the sessions that may be closed where something is full (qkv_session_may_go).
uint64_t qkv_store_evictable(qkv_store *store);

// Up to `max` open sessions that share the longest prefixes with `count` token ids, in the order of
// qkv_prefix_index_match, with a reference each that the caller returns; `pages` gets how many each shares. Returns
// how many.
size_t qkv_store_match(qkv_store *store, const qkv_prefix_hash *root, const uint32_t *ids, size_t count,
                       qkv_session **out, uint64_t *pages, size_t max);
enum { QKV_STORE_MATCH_MAX = 16 };  // of `max` (asserted)

typedef struct qkv_store_stats {
  size_t models, sessions;
  qkv_arena_stats memory;
  qkv_heap_stats heap;
  uint64_t learning_bytes;     // of memory: moments and held-out traffic of calibrations
  uint64_t calibration_bytes;  // calibrations, and what coders make of them, of the whole process
} qkv_store_stats;
qkv_store_stats qkv_store_read_stats(qkv_store *store);

#endif
