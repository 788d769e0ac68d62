// The SSD tier of the daemon: storage/ behind the engine's backing (engine/cache/backing.h), and what the two need
// done during the traffic.
//
//   append seals a page ──► backing.put ──► storage                  in the append, which never waits for it
//   settle                  pages that were refused, durable marks   thread, when something is under way
//   claim                   cold sessions leave memory               the thread that needs it, longest unused first
//   restore                 pages come back                          jobs of the disk pool
//   (server/residency/restore.h),
//                                                                    some ahead (server/residency/read_ahead.h)
//   start                   models, calibrations, sessions           before calls are served
//   (server/residency/recovery.c)
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
#include "server/rpc.h"
#include "storage/storage.h"

typedef struct qkvi_residency qkvi_residency;

// Opens options->data_dir and brings what is there into the store and the objects (NULL: none are looked for). *out
// is NULL where no directory is named. Errors of qkv_storage_open.
qkv_status qkvi_residency_create(const qkv_server_options *options, qkv_store *store, qkvi_objects *objects,
                                 qkv_metric_value *metrics, qkvi_residency **out, qkv_error *error);
// Seals all sessions that are to survive, waits until they are durable, but no longer than `wait_ms`. Waits. Nothing
// is called any more but destroy.
void qkvi_residency_finish(qkvi_residency *residency, int64_t wait_ms);
// When nothing calls it any more, and before its store. NULL is let through.
void qkvi_residency_destroy(qkvi_residency **residency);

// A check of all records, one at a time for the daemon. `start`: begins one unless it runs, in a job of `pool`.
// RESOURCE_EXHAUSTED where that has no room for it.
typedef struct qkvi_verify {
  bool running;
  uint64_t done, all;  // records
  uint64_t bad, bytes;
} qkvi_verify;
qkv_status qkvi_upkeep_verify(qkvi_residency *residency, qkv_pool *pool, bool start, qkvi_verify *verify);
// Files of which at most this share is needed give it to others, one call at a time. Waits. `*freed`: the bytes that
// the disk got back. RESOURCE_EXHAUSTED where another call runs; as the disk says.
qkv_status qkvi_upkeep_compact(qkvi_residency *residency, double live_share, uint64_t *freed, qkv_error *error);

// What of memory-budget may be taken now (server/memory.h).
uint64_t qkvi_budget_limit(const qkvi_residency *residency);

qkv_storage *qkvi_residency_storage(const qkvi_residency *residency);

// For qkv_session_config, before the session is opened: backing and number, by config->durability.
// FAILED_PRECONDITION where `spill` is NULL and more than MEMORY is asked for.
qkv_status qkvi_catalogue_enlist(qkvi_residency *residency, qkv_session_config *config, qkv_error *error);
// After it was opened: into the journal. Waits. NOT_FOUND where someone has closed it meanwhile.
qkv_status qkvi_catalogue_opened(qkvi_residency *residency, qkv_session *session, qkv_error *error);
// Before a session is forked: that, as a fork of `parent` with what that has below positions[layer], goes into the
// journal; qkvi_catalogue_fork_done() after it was forked in memory, or was not (`child` NULL): then nothing of it
// stays. Waits. `config` has been enlisted. UNAVAILABLE where a truncation of the parent is not in the journal;
// RESOURCE_EXHAUSTED where it is itself a fork of a fork, too many deep. Nothing for sessions in memory.
typedef struct qkvi_catalogue_fork {
  qkvi_residency *residency;
  uint64_t child;
  const uint64_t *positions;
  uint64_t ids;                    // of the fork's positions those below have token ids
  struct qkvi_journal_wait *wait;  // NULL: in memory
} qkvi_catalogue_fork;
qkv_status qkvi_catalogue_fork_begin(qkvi_residency *residency, qkv_session *parent, const qkv_session_config *config,
                                     const uint64_t *positions, qkvi_catalogue_fork *fork, qkv_error *error);
qkv_status qkvi_catalogue_fork_done(qkvi_catalogue_fork *fork, qkv_session *child, qkv_error *error);
// After it was closed: nothing of it can be read again, by the next process neither. Waits. Nothing for sessions in
// memory.
qkv_status qkvi_catalogue_closed(qkvi_residency *residency, qkv_session *session, qkv_error *error);

// The same without waiting: a crash soon afterwards may bring the session back. `residency` may be NULL.
void qkvi_catalogue_drop(qkvi_residency *residency, qkv_session *session);

// Changes the session's pin and ttl_ms, those that are not NULL, in the journal and then in memory: a change that the
// disk does not take is not made. Waits. `residency` NULL, and sessions in memory: no journal.
typedef struct qkvi_note {
  const bool *pinned;
  const uint64_t *ttl_ms;
} qkvi_note;
qkv_status qkvi_catalogue_note(qkvi_residency *residency, qkv_session *session, const qkvi_note *note,
                               qkv_error *error);

// After a truncation: it holds for the next process, too. Waits.
qkv_status qkvi_write_back_truncated(qkvi_residency *residency, const qkv_session *session, qkv_error *error);

// Whether the start could not read all that may be of the session, so that it may end later for the next one. Then
// nothing is appended or truncated before qkvi_catalogue_tie: it ends where it does now, for ever. Waits. Errors of
// qkvi_write_back_truncated.
bool qkvi_catalogue_is_loose(qkvi_residency *residency, const qkv_session *session);
qkv_status qkvi_catalogue_tie(qkvi_residency *residency, qkv_session *session, qkv_error *error);

// Whether an acknowledgement has to wait for qkvi_write_back_sync: the session is SYNC and has something that is not
// durable.
bool qkvi_write_back_owes(qkvi_residency *residency, qkv_session *session);
// All that is sealed, exact rows of a SYNC session, and all that was cut, is durable. Waits. UNAVAILABLE with the
// reason where the disk does not take it; the rows are in memory all the same.
// CANCELLED soon after the client of `call` has gone.
qkv_status qkvi_write_back_sync(qkvi_residency *residency, const qkv_rpc_call *call, qkv_session *session,
                                qkv_error *error);
// The same for what is sealed now of these layers (layer_count 0: of all) below `end` (0: all of it), whatever else
// is on its way.
qkv_status qkvi_write_back_sync_range(qkvi_residency *residency, qkv_session *session, const uint32_t *layers,
                                      size_t layer_count, uint64_t end, qkv_error *error);

// A layer stays in memory while it is held for a piece of work; counted. Who waits for room knows by this whether
// some will be left. `residency` NULL: nobody waits.
void qkvi_budget_hold(qkvi_residency *residency, qkv_session *session, uint32_t layer);
void qkvi_budget_release(qkvi_residency *residency, qkv_session *session, uint32_t layer);

// Adds `bytes` of memory-budget to a room (engine/base/arena.h), which is the caller's to use. Sessions leave memory
// for it, the longest unused first. Waits, at most some seconds, for others' turn, who came before, and where pages
// must be written first or layers are held; the caller itself holds `held`, and should hold as little as it can: two
// that hold what the other one waits for are both refused. RESOURCE_EXHAUSTED where nothing more can leave.
// CANCELLED soon after the client of `call` has gone; NULL: no client waits.
qkv_status qkvi_budget_reserve(qkvi_residency *residency, const qkv_rpc_call *call, uint64_t bytes, size_t held,
                               uint64_t *reservation, qkv_error *error);
// What is left of a reservation.
void qkvi_budget_unreserve(qkvi_residency *residency, uint64_t *reservation);
// Sessions leave memory without waiting, for layers in use neither, down to `target` bytes in use. Returns the bytes
// that were freed.
uint64_t qkvi_budget_evict(qkvi_residency *residency, uint64_t target);

#endif
