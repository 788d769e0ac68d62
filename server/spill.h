// The SSD tier of the daemon: storage/ behind the engine's backing (engine/cache/backing.h), and what the two need
// done beside the traffic.
//
//   append seals a page ──► backing.put ──► storage                  in the append, which never waits for it
//   settle                  pages that found no room, durable marks  spill thread, when something is under way
//   claim                   cold sessions leave memory               whoever needs the bytes, longest unused first
//   restore                 pages come back                          jobs of the disk pool (server/restore.h),
//                                                                    some ahead (server/read_ahead.h)
//   start                   models, calibrations, sessions           before calls are served (server/recovery.c)
//
// What a session needs to be found again is in the journal before it is acknowledged: its SessionInfo, its model,
// and, before any page that was coded with it, its calibration.
//
// Threads: any. "Waits" means for the disk: not on completion-queue threads nor in the compute pool.
#ifndef QKV_SERVER_SPILL_H
#define QKV_SERVER_SPILL_H

#include "engine/base/metric.h"
#include "engine/base/pool.h"
#include "engine/cache/store.h"
#include "server/options.h"
#include "storage/storage.h"

typedef struct qkvi_spill qkvi_spill;

// Opens options->data_dir and brings what is there into the store. *out is NULL where no directory is named. Errors
// of qkv_storage_open.
qkv_status qkvi_spill_create(const qkv_server_options *options, qkv_store *store, qkv_metric_value *metrics,
                             qkvi_spill **out, qkv_error *error);
// Seals all sessions that are to survive, waits until they are durable, but no longer than `wait_ms`. Waits. Nothing
// is called any more but destroy.
void qkvi_spill_finish(qkvi_spill *spill, int64_t wait_ms);
// When nothing calls it any more, and before its store. NULL is let through.
void qkvi_spill_destroy(qkvi_spill **spill);

// A check of all records, one at a time for the daemon. `start`: begins one unless it runs, in a job of `pool`.
// RESOURCE_EXHAUSTED where that has no room for it.
typedef struct qkvi_verify {
  bool running;
  uint64_t done, all;  // records
  uint64_t bad, bytes;
} qkvi_verify;
qkv_status qkvi_spill_verify(qkvi_spill *spill, qkv_pool *pool, bool start, qkvi_verify *verify);
// Files of which at most this share is needed give it to others. Waits. The bytes that the disk got back.
qkv_status qkvi_spill_compact(qkvi_spill *spill, double live_share, uint64_t *freed, qkv_error *error);

// What of memory-budget may be taken now (server/memory.h).
uint64_t qkvi_spill_budget(const qkvi_spill *spill);

qkv_storage *qkvi_spill_storage(const qkvi_spill *spill);

// For qkv_session_config, before the session is opened: backing and number, by config->durability.
// FAILED_PRECONDITION where `spill` is NULL and more than MEMORY is asked for.
qkv_status qkvi_spill_enlist(qkvi_spill *spill, qkv_session_config *config, qkv_error *error);
// After it was opened: into the journal. Waits. NOT_FOUND where someone has closed it meanwhile.
qkv_status qkvi_spill_opened(qkvi_spill *spill, qkv_session *session, qkv_error *error);
// After it was closed: nothing of it can be read again, by the next process neither. Waits. Nothing for sessions in
// memory.
qkv_status qkvi_spill_closed(qkvi_spill *spill, qkv_session *session, qkv_error *error);

// After its ttl_ms or its pin has changed: the next process knows it. Waits. Nothing for sessions in memory.
qkv_status qkvi_spill_noted(qkvi_spill *spill, qkv_session *session, qkv_error *error);

// After a truncation: it holds for the next process, too. Waits.
qkv_status qkvi_spill_truncated(qkvi_spill *spill, const qkv_session *session, qkv_error *error);

// Whether the start could not read all that may be of the session, so that it may end later for the next one. Then
// nothing is appended or truncated before qkvi_spill_tie: it ends where it does now, for ever. Waits. Errors of
// qkvi_spill_truncated.
bool qkvi_spill_is_loose(qkvi_spill *spill, const qkv_session *session);
qkv_status qkvi_spill_tie(qkvi_spill *spill, qkv_session *session, qkv_error *error);

// Whether an acknowledgement has to wait for qkvi_spill_sync: the session is SYNC and has something that is not
// durable.
bool qkvi_spill_owes(qkvi_spill *spill, qkv_session *session);
// All that is sealed, and all that was cut, is durable. Waits. UNAVAILABLE with the reason where the disk does not
// take it; the rows are in memory all the same.
qkv_status qkvi_spill_sync(qkvi_spill *spill, qkv_session *session, qkv_error *error);
// The same for what is sealed now of these layers (layer_count 0: of all) below `end` (0: all of it), whatever else
// is on its way.
qkv_status qkvi_spill_sync_range(qkvi_spill *spill, qkv_session *session, const uint32_t *layers, size_t layer_count,
                                 uint64_t end, qkv_error *error);

// A layer stays in memory while it is held for a piece of work; counted. Who waits for room knows by this whether
// some will be left. `spill` NULL: nobody waits.
void qkvi_spill_hold(qkvi_spill *spill, qkv_session *session, uint32_t layer);
void qkvi_spill_release(qkvi_spill *spill, qkv_session *session, uint32_t layer);

// Adds `bytes` of memory-budget to a room (engine/base/arena.h), which is the caller's to use. Sessions leave memory
// for it, the longest unused first. Waits, at most some seconds, for others' turn, who came before, and where pages
// must be written first or layers are held; the caller itself holds `held`, and should hold as little as it can: two
// that hold what the other one waits for are both refused. RESOURCE_EXHAUSTED where nothing more can leave.
qkv_status qkvi_spill_claim(qkvi_spill *spill, uint64_t bytes, size_t held, uint64_t *room, qkv_error *error);
// What is left of a room.
void qkvi_spill_unclaim(qkvi_spill *spill, uint64_t *room);
// Sessions leave memory without waiting, for layers in use neither, down to `target` bytes in use. Returns the bytes
// that were freed.
uint64_t qkvi_spill_evict(qkvi_spill *spill, uint64_t target);

#endif
