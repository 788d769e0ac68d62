// The SSD tier of the daemon: storage/ behind the engine's backing (engine/cache/backing.h), and what the two need
// done during the traffic.
//
//   append seals a page ──► backing.put ──► storage                  in the append, which never waits for it
//   settle                  pages that were refused, durable marks   thread, when something is under way
//   claim                   cold sessions leave memory               the thread that needs it, longest unused first
//   restore                 pages come back                          jobs of the disk pool (restore.h),
//                                                                    some ahead (read_ahead.h)
//   fold                    tables of sessions that are sunk  upkeep jobs; back by the thread that needs it (fold.h)
//   start                   models, calibrations, sessions           before calls are served (recovery.c)
//
// What a session needs to be found again is in the journal before it is acknowledged: its SessionInfo, its model,
// and, before any page that was coded with it, its calibration.
//
// Threads: any. "Waits" means for the disk: not on completion-queue threads nor in the compute pool.
#ifndef QKV_SERVER_RESIDENCY_RESIDENCY_H
#define QKV_SERVER_RESIDENCY_RESIDENCY_H

#include "engine/base/metric.h"
#include "engine/base/pool.h"
#include "engine/cache/store.h"
#include "server/objects/objects.h"
#include "server/options.h"
#include "server/rpc/rpc.h"
#include "storage/storage.h"

typedef struct qkvi_residency qkvi_residency;

// Opens options->data_dir and restores its content into the store and the objects (NULL: without objects). *out is
// NULL where no directory is named. Errors of qkv_storage_open.
qkv_status qkvi_residency_create(const qkv_server_options *options, qkv_store *store, qkvi_objects *objects,
                                 qkv_metric_value *metrics, qkvi_residency **out, qkv_error *error);
// Seals the sessions that are to survive and whose exact rows have no records (`async`), waits until all are durable,
// but no longer than `wait_ms`. Waits. After this only destroy may be called.
void qkvi_residency_finish(qkvi_residency *residency, int64_t wait_ms);
// When nothing calls it any more, and before its store. NULL is ignored.
void qkvi_residency_destroy(qkvi_residency **residency);

// A check of all records, one at a time for the daemon. `start`: begins one unless it runs, in a job of `pool`.
// RESOURCE_EXHAUSTED where the pool's queue is full.
typedef struct qkvi_verify {
  bool running;
  uint64_t done, all;  // records
  uint64_t bad, bytes;
} qkvi_verify;
qkv_status qkvi_upkeep_verify(qkvi_residency *residency, qkv_pool *pool, bool start, qkvi_verify *verify);
// Compacts files of which at most this share is live, one call at a time. Waits. `*freed`: the bytes that were freed
// on the disk. RESOURCE_EXHAUSTED where another call runs; else the storage's errors.
qkv_status qkvi_upkeep_compact(qkvi_residency *residency, double live_share, uint64_t *freed, qkv_error *error);

// The part of memory-budget that may be used now (server/memory.h).
uint64_t qkvi_budget_limit(const qkvi_residency *residency);

qkv_storage *qkvi_residency_storage(const qkvi_residency *residency);

// Attaches a session to the storage before it is opened: fills the backing and number of its qkv_session_config, by
// config->durability. FAILED_PRECONDITION where `residency` is NULL and more than MEMORY is asked for.
qkv_status qkvi_catalogue_enlist(qkvi_residency *residency, qkv_session_config *config, qkv_error *error);
// Journals a session after it was opened. Waits. NOT_FOUND where it was closed meanwhile.
qkv_status qkvi_catalogue_opened(qkvi_residency *residency, qkv_session *session, qkv_error *error);
// Journals a fork of `parent` with its rows below positions[layer], before it is made in memory. `config` has been
// attached by qkvi_catalogue_enlist. qkvi_catalogue_fork_done() follows once it was forked in memory, or was not
// (`child` NULL): then nothing of it stays. Waits. UNAVAILABLE where a truncation of the parent is not journaled;
// RESOURCE_EXHAUSTED where the chain of forks is too deep. Nothing for sessions in memory.
typedef struct qkvi_catalogue_fork {
  qkvi_residency *residency;
  uint64_t child;
  const uint64_t *positions;
  uint64_t ids;                    // the fork's positions below this have token ids
  struct qkvi_journal_wait *wait;  // NULL: in memory
} qkvi_catalogue_fork;
qkv_status qkvi_catalogue_fork_begin(qkvi_residency *residency, qkv_session *parent, const qkv_session_config *config,
                                     const uint64_t *positions, qkvi_catalogue_fork *fork, qkv_error *error);
qkv_status qkvi_catalogue_fork_done(qkvi_catalogue_fork *fork, qkv_session *child, qkv_error *error);
// Journals that a session was closed: nothing of it can be read again, nor by the next process. Waits. Nothing for
// sessions in memory. INTERNAL, RESOURCE_EXHAUSTED: not yet; it is written again until the disk takes it.
qkv_status qkvi_catalogue_closed(qkvi_residency *residency, qkv_session *session, qkv_error *error);

// The same without waiting: a crash soon afterwards may bring the session back. `residency` may be NULL.
void qkvi_catalogue_drop(qkvi_residency *residency, qkv_session *session);

// INVALID_ARGUMENT "model.calibration has 2000000000 bytes, ...": it does not fit into an entry of the journal. OK
// without a data-dir (NULL).
qkv_status qkvi_catalogue_check_calibration(const qkvi_residency *residency, const qkv_calibration *calibration,
                                            qkv_error *error);
// Shares a model of the default tenant (qkv_store_share_model), in the journal first where the model is there. Waits.
// UNAVAILABLE, RESOURCE_EXHAUSTED: it was not journaled, and is not shared. `residency` NULL: no journal.
qkv_status qkvi_catalogue_share_model(qkvi_residency *residency, qkv_store *store, const qkv_model *model,
                                      qkv_error *error);
// Ends that (qkv_store_unshare_model), likewise: a change that cannot be journaled is not made.
qkv_status qkvi_catalogue_unshare_model(qkvi_residency *residency, qkv_store *store, const qkv_model *model,
                                        qkv_error *error);
// Changes the session's pin and ttl_ms, those that are not NULL, in the journal and then in memory: a change that
// cannot be journaled is not made. Waits. `residency` NULL, and sessions in memory: no journal.
typedef struct qkvi_note {
  const bool *pinned;
  const uint64_t *ttl_ms;
} qkvi_note;
qkv_status qkvi_catalogue_note(qkvi_residency *residency, qkv_session *session, const qkvi_note *note,
                               qkv_error *error);

// Waits until a truncation is durable: it holds for the next process, too. CANCELLED soon after the client of `call`
// has gone; NULL: no client waits.
qkv_status qkvi_write_back_truncated(qkvi_residency *residency, const qkv_rpc_call *call, const qkv_session *session,
                                     qkv_error *error);

// Whether the end of the session is unconfirmed: the start could not read all records, and the next start may find
// more of it. Then qkvi_catalogue_tie must confirm the present end, for good, before anything is appended or
// truncated. It waits. Errors of qkvi_write_back_truncated.
bool qkvi_catalogue_is_unconfirmed(qkvi_residency *residency, const qkv_session *session);
qkv_status qkvi_catalogue_tie(qkvi_residency *residency, const qkv_rpc_call *call, qkv_session *session,
                              qkv_error *error);

// Whether the session needs sync: an acknowledgement has to wait for qkvi_write_back_sync, as the session is SYNC and
// has something that is not durable.
bool qkvi_write_back_owes(qkvi_residency *residency, qkv_session *session);
// Makes durable what is sealed, exact rows of a SYNC session, and truncations. Waits. UNAVAILABLE with the reason
// where writing fails; the rows are in memory all the same. CANCELLED soon after the client of `call` has gone.
qkv_status qkvi_write_back_sync(qkvi_residency *residency, const qkv_rpc_call *call, qkv_session *session,
                                qkv_error *error);
// The same for what is sealed now of these layers (layer_count 0: of all) below `end` (0: all of it), without waiting
// for other writes.
qkv_status qkvi_write_back_sync_range(qkvi_residency *residency, const qkv_rpc_call *call, qkv_session *session,
                                      const uint32_t *layers, size_t layer_count, uint64_t end, qkv_error *error);

// A layer stays in memory while it is held for a piece of work; counted. By the count a thread that waits for memory
// knows whether some can still become free. `residency` NULL: no thread waits.
void qkvi_budget_hold(qkvi_residency *residency, qkv_session *session, uint32_t layer);
void qkvi_budget_release(qkvi_residency *residency, qkv_session *session, uint32_t layer);

// Adds `bytes` of memory-budget to a reservation (engine/base/arena.h), which is the caller's to use. Sessions are
// evicted for it, the least recently used first. Waits, at most some seconds, for the turns of earlier threads, and
// where pages must be written first or layers are held. The caller itself holds `held` layers, and should hold as few
// as it can: two threads that hold what the other one waits for are both refused. RESOURCE_EXHAUSTED where nothing
// more can be evicted. CANCELLED soon after the client of `call` has gone; NULL: no client waits.
qkv_status qkvi_budget_reserve(qkvi_residency *residency, const qkv_rpc_call *call, uint64_t bytes, size_t held,
                               uint64_t *reservation, qkv_error *error);
// What is left of a reservation.
void qkvi_budget_unreserve(qkvi_residency *residency, uint64_t *reservation);
// Evicts sessions from memory, down to `target` bytes in use. Never waits, also not for layers in use. Returns the
// bytes that were freed.
uint64_t qkvi_budget_evict(qkvi_residency *residency, uint64_t target);
// Likewise, but evicts pages of this session alone.
uint64_t qkvi_budget_evict_session(qkvi_residency *residency, qkv_session *session, uint64_t target);

#endif
