// The live sessions and their forks, by the entries of the journal in their order. A fork inherits records: it is an
// heir of its ancestors. A session's view says how many tokens of a record it has:
//
//   a ──── fork ────► b ──── fork ────► c          c's view: its own records, those of b below c's limits, and what
//   own records       own records                  of a's records b had when c was forked, below these limits, too
//
// - An own record: every cut (truncation) that came after its put clips it.
// - A record of an ancestor: the limits of each fork on the way clip it. A session's limits are the positions of its
//   fork, and each of its cuts lowers them for good. A later fork has the limits of the time of its fork.
// - Cuts of the session that owns the record count if they came before the fork and after the put (they clipped the
//   record before it was inherited), or after the fork and before the put: rows at or beyond a cut of the second kind
//   belong to a later history of the parent, which the fork does not share.
//
// A closed session that has live heirs is a ghost: kept, but neither reported nor forked again. It is freed with the
// last heir.
//
// Two phases. While a journal is scanned (recovery, rewriting) all cuts are kept, as the later ones decide which
// entries are needed. While the storage runs, cuts that no heir's view needs are forgotten, and sweep() is called for
// each session whose own records may have lost the last view.
//
// Costs: a fork, its layers. A close or a cut of a session without heirs: its own records. With heirs: these and the
// heirs. Closing an heir: its ancestors' records only if it reached further than its siblings, and the ancestor was
// closed or cut. Which cuts are needed takes time of their number times its logarithm. About 22 bytes a session,
// 30 more in a scan. One that has a parent, heirs or cuts has a lineage: 150 more, and 24 for each layer of a fork
// whose layers were forked, or cut, at different positions. Forks of one parent that see the same, and have neither
// heirs nor cuts, share one. Threads: the owner's.
#ifndef QKV_STORAGE_SESSIONS_H
#define QKV_STORAGE_SESSIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"
#include "storage/index.h"
#include "storage/journal.h"

typedef struct qkvi_sessions qkvi_sessions;
typedef struct qkvi_session qkvi_session;

// Own records of `session` may have lost tokens, by qkvi_needs. False: they are not known now; qkvi_sessions_swept
// follows.
typedef bool qkvi_sweep_fn(void *context, const qkvi_session *session);

qkvi_sessions *qkvi_sessions_create(void);
void qkvi_sessions_destroy(qkvi_sessions **sessions);

// Applies an entry. FAILED_PRECONDITION: a fork of a session that is not open; RESOURCE_EXHAUSTED: of one that is
// QKV_FORK_DEPTH_MAX forks deep. Then nothing has changed while the storage runs; in a scan the session is added, but
// given up by qkvi_sessions_give_up().
qkv_status qkvi_sessions_note(qkvi_sessions *sessions, const qkv_journal_entry *entry);

// ---- Scanning ----

// Gives up the sessions opened before `sequence`, their heirs, and forks of unknown parents; returns how many were
// alive.
uint64_t qkvi_sessions_give_up(qkvi_sessions *sessions, uint64_t sequence);
// As if it had been closed, which is not journaled.
void qkvi_sessions_drop(qkvi_sessions *sessions, uint64_t session);
// Calls each() for every ghost that qkvi_sessions_drop has made.
void qkvi_sessions_dropped(const qkvi_sessions *sessions, void (*each)(void *context, uint64_t session),
                           void *context);
// Whether an entry is still needed; all entries have been applied before.
bool qkvi_sessions_keep(const qkvi_sessions *sessions, const qkv_journal_entry *entry);
bool qkvi_sessions_alive(const qkvi_sessions *sessions, uint64_t session);
bool qkvi_sessions_known(const qkvi_sessions *sessions, uint64_t session);
// The live ones in ascending order of their numbers. The caller frees *live.
size_t qkvi_sessions_live(const qkvi_sessions *sessions, const qkvi_session ***live);
uint64_t qkvi_session_number(const qkvi_session *session);

// ---- One view: of the own records, then of those of each ancestor ----

typedef struct qkvi_view {
  const qkvi_session *owner;  // of the records
  const qkvi_session *from;   // the heir whose parent is `owner`; NULL: the view's own session is the owner
  uint64_t *limits;           // of each layer, NULL: none
  uint32_t layers;
} qkvi_view;

// It begins at the session's own records.
void qkvi_view_init(qkvi_view *view, const qkvi_session *session);
void qkvi_view_deinit(qkvi_view *view);
// Goes on to the parent's records. false: there is no parent.
bool qkvi_view_up(qkvi_view *view);
// Tokens of a record of view->owner that the view has.
uint32_t qkvi_view_tokens(const qkvi_view *view, const qkvi_entry *entry);

// ---- Running ----

// The scan is over. sweep() may not change `sessions`.
void qkvi_sessions_run(qkvi_sessions *sessions, qkvi_sweep_fn *sweep, void *context);
// Of each open session that has heirs: how far their views go, in each layer, into what is put for it from now on.
void qkvi_sessions_tell_reach(const qkvi_sessions *sessions,
                              void (*tell)(void *context, uint64_t session, const uint64_t *reach, uint32_t layers),
                              void *context);
// The session's own records are what qkvi_needs says now. NULL: there is no session of this number any more.
const qkvi_session *qkvi_sessions_find(const qkvi_sessions *sessions, uint64_t session);
void qkvi_sessions_swept(qkvi_sessions *sessions, uint64_t session);
// A session is used until it rests. Its records are needed by itself and by its heirs: where none of them is used it
// is quiet. `quiet` calls each() for the session and for each ancestor, upwards, as far as they are quiet. `use` ends
// the rest of the session: from then on neither it nor its ancestors are quiet, whose numbers it gives, the session
// first; the caller frees them. A session is used when it is forked (asserted).
void qkvi_sessions_rest(qkvi_sessions *sessions, uint64_t session);
void qkvi_sessions_quiet(qkvi_sessions *sessions, uint64_t session, void (*each)(void *context, uint64_t session),
                         void *context);
uint64_t *qkvi_sessions_use(qkvi_sessions *sessions, uint64_t session, size_t *count);
// 0: it has none.
uint64_t qkvi_sessions_parent(const qkvi_sessions *sessions, uint64_t session);

// The entry that opens it could not be written: it must not be forked.
void qkvi_sessions_fail(qkvi_sessions *sessions, uint64_t session);
bool qkvi_sessions_failed(const qkvi_sessions *sessions, uint64_t session);

// The tokens of a session's own records that all views together need, until `sessions` changes.
typedef struct qkvi_needs {
  const qkvi_session *owner;
  size_t count;     // groups of heirs, between whose forks the owner was not cut
  uint64_t *times;  // of a fork of each group
  uint64_t *reach;  // [count][layers]: how far a group's views go
  uint32_t layers;
} qkvi_needs;

void qkvi_needs_init(qkvi_needs *needs, const qkvi_session *owner);
void qkvi_needs_deinit(qkvi_needs *needs);
// The most tokens of a record of the owner's that any view has.
uint32_t qkvi_needs_tokens(const qkvi_needs *needs, const qkvi_entry *entry);
// The same for one record. All of its tokens where its session is unknown: it was never opened, so its records are
// the caller's business.
uint32_t qkvi_sessions_needed(const qkvi_sessions *sessions, const qkvi_entry *entry);

#endif
