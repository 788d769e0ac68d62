// A session: the KV cache of one sequence, and the lock of each of its layers.
//
// Reference counted: the store holds one reference while the session is open, every user of it another.
// Closing takes it out of the store; its memory is freed when the last user is done.
//
// Threads: any. Each layer has two locks: that of its rows, which appends, truncations and forks hold from their
// beginning to their end, and a read-write lock, which they write only while pages and rows become the layer's or
// leave it. So attends and fetches run together, and concurrently with an append that codes pages, of which they see
// all or nothing (of an append with a contract, page after page). A waiting writer goes before readers that come
// later, so a thread must not read a layer that it reads already. Lock order: layers in ascending order of (session
// address, layer), of a layer its rows first.
//
// Memory: an open session takes less than 1 KiB (of 32 layers). With its first use it gets its layers' locks and
// tables, about 600 bytes a layer, and with a quality contract the queries that it is held by (qkv_quality_bytes a
// layer). Folded (session_fold.h) it takes its name and some 100 bytes. All of it is the arena's like the rows;
// usage counts the rows alone. What sessions have alike is in one object for all of them (session_kind.h).
#ifndef QKV_ENGINE_CACHE_SESSION_H
#define QKV_ENGINE_CACHE_SESSION_H

#include <stdatomic.h>
#include <stdint.h>

#include "engine/cache/accounts.h"
#include "engine/cache/attend.h"
#include "engine/cache/coding.h"
#include "engine/cache/layer.h"
#include "engine/cache/prefix_index.h"
#include "engine/cache/recency.h"
#include "engine/cache/session_tokens.h"

// Whether pages are written beyond memory; the daemon decides when an append is acknowledged. The values are those of
// qkv.v1.Durability.
typedef enum qkv_durability {
  QKV_DURABILITY_MEMORY = 1,
  QKV_DURABILITY_ASYNC = 2,
  QKV_DURABILITY_SYNC = 3
} qkv_durability;

typedef struct qkv_session_config {
  const char *name, *tenant;  // NULL: empty. Copied; those of a session are alive while it is
  qkv_purpose purpose;
  qkv_policy policy;  // the session's own; merged with the model's and the store's on opening
  uint64_t first_position;
  qkv_ema_options ema;          // attention is counted where sample_every is not 0
  bool keep_full;               // layer.h
  double max_attention_error;   // quality.h; 0: no contract
  double tier_bits;             // what its owner brings it to (session_retier.h); 0: nothing. Not used here
  qkv_durability durability;    // 0: MEMORY
  const qkv_backing *backing;   // not with MEMORY; outlives the session
  uint64_t id;                  // as the backing knows it: unique for ever
  uint64_t ttl_ms;              // unused for so long, it has expired; 0: never
  bool evictable;               // it may be closed where something is full: its owner's business
  bool archived;                // its codec may be the archive codec, if nothing names one (store.h). Not used here
  bool staged;                  // only the client that opened it knows it yet (store.h)
  bool pinned;                  // nothing of it leaves memory
  bool retier_all;              // tiers follow attention, whatever tier_bits is (server/retier.h). The store's
  uint64_t whole;               // positions that every layer must have, or it is lost; 0: any will do
  uint64_t parent_truncations;  // of a fork: qkv_session_truncations of its parent when that was decided on
  uint64_t *headroom;           // the reservation that it is created in (arena.h), or NULL; not used afterwards
  bool found;                   // at a start: where little memory is left, its coders are not counted in the budget
  qkv_pool *pool;               // helps to encode (layer.h), and outlives the session; NULL: none does. The store's
  qkv_device *device;           // of its layers (layer.h); NULL: none. The store chooses it
  qkv_prefix_index *prefixes;   // that it is matched by, and outlives the session; NULL: it is not. The store's
  qkv_recency *recency;         // that it is listed in, and outlives the session; NULL: it is not. The store's
  qkv_prefix_hash root;         // of tenant, model and salt; zeros: the store's, of these without a salt
} qkv_session_config;

typedef struct qkv_session_info {
  qkv_session_config config;  // resolved; ttl_ms, pinned, staged and whole as they are now
  const qkv_model *model;     // alive while the session is
  qkv_layer_usage usage;      // over all layers
  int64_t created_unix_ms, last_used_unix_ms;
  int64_t last_used_ms;  // on the monotonic clock
} qkv_session_info;

// `config` is resolved and `model` outlives the session (the store's). `*out` gets one reference.
// RESOURCE_EXHAUSTED (the arena's).
qkv_status qkv_session_create(const qkv_session_config *config, const qkv_model *model, qkv_arena *arena,
                              qkv_session **out, qkv_error *error);
// Bytes of the arena that a fork of a session of this config takes.
uint64_t qkv_session_fork_cost(const qkv_session_config *config, const qkv_model *model);
qkv_session *qkv_session_ref(qkv_session *session);
void qkv_session_unref(qkv_session **session);

// A new session of the parent's model that has all that the parent has below positions[layer], of each of the model's
// layers, shared: the codes, and the exact rows until one of the two writes. A layer that ends earlier is shared as
// far as it goes. Attention averages, tiers and the contract are its own from here on. `config` is the parent's but
// for name, id, headroom, ttl_ms, pinned, tier_bits and max_attention_error; its root is not read. Takes as much of
// the arena as an empty session. No truncation of the parent happens meanwhile: the fork has rows and token ids of
// one state, or of states that appends lead to. RESOURCE_EXHAUSTED (the arena's); UNAVAILABLE: the parent has been
// truncated since config->parent_truncations.
qkv_status qkv_session_fork(qkv_session *parent, const qkv_session_config *config, const uint64_t *positions,
                            qkv_session **out, qkv_error *error);

const qkv_model *qkv_session_model(const qkv_session *session);
// How often it has been truncated, for comparing while a reference is held: folding begins anew.
uint64_t qkv_session_truncations(const qkv_session *session);
const char *qkv_session_name(const qkv_session *session);
// Asks for its memory, which is soon read; NULL: nothing.
void qkv_session_prefetch(const qkv_session *session);
uint64_t qkv_session_id(const qkv_session *session);  // as the backing knows it
// Its config, resolved, but for what is each session's own, which is 0 here, `name` NULL: name, id, root, ttl_ms,
// pinned, staged, whole. qkv_session_read_info has all.
const qkv_session_config *qkv_session_config_of(const qkv_session *session);
qkv_prefix_hash qkv_session_root(const qkv_session *session);  // of its tenant, model and salt
// Its token ids; alive while a reference is held. Where it is folded (session_fold.h) this makes its layers first;
// NULL where that fails.
qkv_session_tokens *qkv_session_tokens_of(qkv_session *session);
// For the store: as qkv_session_tokens_close.
void qkv_session_close_tokens(qkv_session *session);
// Its tenant's account; NULL: none. Alive as long as the session.
qkv_account *qkv_session_account(const qkv_session *session);
// Unique in the process: tells a session from a later one of its name, where no reference is held meanwhile. Of a
// session with a backing its id.
uint64_t qkv_session_serial(const qkv_session *session);

// Counts as a use of the session.
void qkv_session_touch(qkv_session *session);
void qkv_session_set_ttl(qkv_session *session, uint64_t ttl_ms);
void qkv_session_set_pinned(qkv_session *session, bool pinned);
// Bytes of the arena that it takes in addition to its rows: an empty session, and its layers once it has been used.
uint64_t qkv_session_fixed_bytes(qkv_session *session);
// Whether it may be closed where something is full: evictable, neither pinned nor staged.
bool qkv_session_may_go(const qkv_session *session);
bool qkv_session_is_staged(const qkv_session *session);
// For the store: it is not staged any more; sets `whole`, which truncations lower.
void qkv_session_unstage(qkv_session *session);
void qkv_session_set_whole(qkv_session *session, uint64_t whole);
bool qkv_session_expired(const qkv_session *session);

// As qkv_layer_append; pages that are sealed are given to the backing. INVALID_ARGUMENT "layer is 6, the model tinylm
// has 6 layers". `*length` gets the layer's length afterwards, 0 where there is no such layer.
qkv_status qkv_session_append(qkv_session *session, uint32_t layer, uint64_t position, const qkv_tensor *k,
                              const qkv_tensor *v, bool before_rope, uint64_t *appended, uint64_t *length,
                              qkv_error *error);
// As qkv_layer_append_check, and INVALID_ARGUMENT where there is no such layer. Waits for the layer.
qkv_status qkv_session_append_check(qkv_session *session, uint32_t layer, uint64_t position, const qkv_tensor *k,
                                    const qkv_tensor *v, qkv_error *error);

// What an append may use; zeros: nothing.
typedef struct qkv_append_use {
  uint64_t *headroom;   // a reservation that it is made in (arena.h)
  const uint32_t *ids;  // of its rows, one each, checked (session_tokens.h): they go to the backing with exact rows,
                        // and pages of them that another session holds are taken instead of coded (session_share.h).
                        // NULL: not known
  bool separate;        // every page is coded
  bool at_once;         // where another append has the layer, which may code pages for long: UNAVAILABLE, with *error
                        // left alone and nothing changed
  const qkv_row_encoder *encoder;  // of these rows (device.h); NULL: none
  uint64_t pages_shared;           // out: pages that were taken
} qkv_append_use;

// qkv_session_append with it.
qkv_status qkv_session_append_in(qkv_session *session, uint32_t layer, qkv_append_use *use, uint64_t position,
                                 const qkv_tensor *k, const qkv_tensor *v, bool before_rope, uint64_t *appended,
                                 uint64_t *length, qkv_error *error);

// A layer for reading: attend and rows. Every read must be followed by its done. INVALID_ARGUMENT as above.
qkv_status qkv_session_read(qkv_session *session, uint32_t layer, const qkv_layer **out, qkv_error *error);
// Append and read for threads that must not wait (`ids` as in qkv_append_use): UNAVAILABLE, with *error left alone
// and nothing changed, where another thread has the layer.
qkv_status qkv_session_try_append(qkv_session *session, uint32_t layer, const uint32_t *ids, uint64_t position,
                                  const qkv_tensor *k, const qkv_tensor *v, bool before_rope, uint64_t *appended,
                                  uint64_t *length, qkv_error *error);
qkv_status qkv_session_try_read(qkv_session *session, uint32_t layer, const qkv_layer **out, qkv_error *error);
void qkv_session_read_done(qkv_session *session, uint32_t layer);

// `layer_count` 0: all of them. Token ids from `position` on are dropped with the rows of any layer.
qkv_status qkv_session_truncate(qkv_session *session, uint64_t position, const uint32_t *layers, size_t layer_count,
                                qkv_error *error);

// Each layer as its last append or truncation left it; never waits for one that runs. `lengths`, where not NULL, is
// [model->layers].
void qkv_session_read_info(qkv_session *session, qkv_session_info *info, uint64_t *lengths);
// The end of the shortest layer, as qkv_session_read_info has it: positions below are held by all layers.
uint64_t qkv_session_length(qkv_session *session);
// Asks for the memory of what it reads, for sessions of which a reference is held; NULL: nothing.
void qkv_session_prefetch_lengths(qkv_session *const *sessions, size_t count);
// A layer's next position, as of the last change; never waits.
uint64_t qkv_session_layer_length(qkv_session *session, uint32_t layer);
// For each of model->layers: positions below survive the process, as far as is known (session_spill.h).
void qkv_session_read_durable(qkv_session *session, uint64_t *durable);
// Whether that holds for all rows of the layer that are below `end` and not exact. The layer is below the model's
// (asserted).
bool qkv_session_is_durable(qkv_session *session, uint32_t layer, uint64_t end);

#endif
