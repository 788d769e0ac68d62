// Sessions in the order of a time, mostly that of their last use, for passes that take the first ones and leave the
// rest alone: taking memory or disk from the least recently used, tiers in the background, expiry.
//
// A session is in those lists that it has something for. Each is a binary heap of (time, session) whose times may be
// too early: a use of a session changes nothing here, and the time is corrected when the session comes to the top. So
// a use costs nothing, and the next session costs O(log n), without allocating.
//
//   heap of a list    | by time: not looked at yet  | passed in this pass | free |
//                     0                           count             count + passed
//
// A pass takes sessions from the top one by one. They go behind the heap, and back into it when the pass ends. A
// session that has nothing for the list any more leaves it on the way.
//
// Threads: any. One lock, which is the last in any order and held for at most QKV_RECENCY_STEPS corrections. One pass
// of a list at a time; others wait for its end.
#ifndef QKV_ENGINE_CACHE_RECENCY_H
#define QKV_ENGINE_CACHE_RECENCY_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { QKV_RECENCY_STEPS = 64 };

typedef enum qkv_recency_list {
  QKV_RECENCY_CODED,      // have a backing and pages in memory that may leave it
  QKV_RECENCY_EXACT,      // have a backing and exact rows that may become pages
  QKV_RECENCY_UNSETTLED,  // have something that is not settled (layer_spill.h)
  QKV_RECENCY_SUNK,       // have nothing in memory and may be folded (session_fold.h)
  QKV_RECENCY_EVICTABLE,  // may be closed where something is full (qkv_session_may_go); counted by account
  QKV_RECENCY_KEPT,       // the others that have a backing and are not pinned
  QKV_RECENCY_AIMED,      // coded pages may have to change tiers (session_retier.h); longest not examined first
  QKV_RECENCY_DEMOTABLE,  // coded pages may go to lower tiers where memory is short
  QKV_RECENCY_EXPIRING,   // have a time to live; in the order in which that ends
  QKV_RECENCY_LISTS
} qkv_recency_list;

typedef struct qkv_session qkv_session;
typedef struct qkv_recency qkv_recency;

// A session's part: where it is in lists, counted from 1; 0: not in it. `places` are its places in lists of what is
// in memory, which a folded session (session_fold.h) is in none of; the others are its standing.
typedef struct qkv_recency_places {
  _Atomic uint32_t at[QKV_RECENCY_LISTS];
} qkv_recency_places;

typedef struct qkv_recency_standing {
  _Atomic uint32_t owned;  // in EVICTABLE or KEPT, whichever is its own
  _Atomic uint32_t expiring;
} qkv_recency_standing;

qkv_recency *qkv_recency_create(void);
// When no session is left in it (asserted).
void qkv_recency_destroy(qkv_recency **recency);

// The store has the session from here on; until it leaves. In between the store has a reference.
void qkv_recency_join(qkv_recency *recency, qkv_session *session);
void qkv_recency_leave(qkv_recency *recency, qkv_session *session);
// To be called when it may have changed whether the session has something for the list. Does nothing before it has
// joined.
void qkv_recency_note(qkv_recency *recency, qkv_recency_list list, qkv_session *session);
// The same for EVICTABLE or KEPT, whichever is its own.
void qkv_recency_note_owned(qkv_recency *recency, qkv_session *session);
// As qkv_recency_note, where its time in the list may have become an earlier one, too.
void qkv_recency_move(qkv_recency *recency, qkv_recency_list list, qkv_session *session);

// Of all sessions whose config has this object, as last published: coded pages in memory, their bytes and the
// coordinates that they code; sessions that are folded (session_fold.h), and their pages.
typedef struct qkv_recency_sums {
  uint64_t bytes, coordinates;
  uint64_t folded, folded_pages;
  uint64_t unfolded;  // that were, since the start
} qkv_recency_sums;
qkv_recency_sums qkv_recency_read_sums(const qkv_recency *recency);
// Differences, modulo 2^64.
void qkv_recency_add_sums(qkv_recency *recency, const qkv_recency_sums *by);

// A pass: between the two `next` gives the least recently used session that has not been passed yet, with a reference
// that the caller returns; NULL: there is none. Sessions that enter meanwhile are among them.
void qkv_recency_begin(qkv_recency *recency, qkv_recency_list list);
qkv_session *qkv_recency_next(qkv_recency *recency, qkv_recency_list list);
void qkv_recency_end(qkv_recency *recency, qkv_recency_list list);
// Between the two no pass gives a reference, and no session enters or leaves.
void qkv_recency_lock(qkv_recency *recency);
void qkv_recency_unlock(qkv_recency *recency);
// In between: the session, which is to be folded, leaves the lists of what is in memory.
void qkv_recency_withdraw(qkv_recency *recency, qkv_session *session);
// Within a pass of QKV_RECENCY_EXACT: the exact rows of this session, so many bytes, stay in memory; it enters again
// with its next rows.
void qkv_recency_give_up(qkv_recency *recency, qkv_session *session, uint64_t bytes_exact);

#endif
