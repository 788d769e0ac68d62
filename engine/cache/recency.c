#include "engine/cache/recency.h"

#include <assert.h>
#include <sched.h>
#include <stdlib.h>

#include "engine/cache/session_fold.h"
#include "engine/cache/session_slots.h"
#include "engine/cache/session_spill.h"
#include "engine/cache/session_state.h"

typedef struct entry {
  uint64_t time_ms : 64 - QKV_SESSION_NUMBER_BITS;  // or later; TIME_MAX: that, or later
  uint64_t session : QKV_SESSION_NUMBER_BITS;       // its number
} entry;
#define TIME_MAX (INT64_MAX >> (QKV_SESSION_NUMBER_BITS - 1))  // eight years

static uint64_t number_of(const qkv_session *session) {
  return qkv_session_number(session) & ((1u << QKV_SESSION_NUMBER_BITS) - 1);
}

static qkv_session *session_of(const entry *of) {
  return qkv_session_of((uint32_t)of->session);
}

typedef struct order {
  entry *entries;
  uint32_t count, passed, places;  // places: that there is memory for
  pthread_mutex_t passing;
} order;

struct qkv_recency {
  pthread_mutex_t lock;
  _Atomic unsigned waiting;  // threads, for the lock
  order lists[QKV_RECENCY_LISTS];
  _Atomic uint64_t bytes, coordinates, folded, folded_pages, unfolded;  // qkv_recency_sums
};

static void lock(qkv_recency *recency) {
  if (pthread_mutex_trylock(&recency->lock) == 0) return;
  atomic_fetch_add(&recency->waiting, 1);
  const int failed = pthread_mutex_lock(&recency->lock);
  atomic_fetch_sub(&recency->waiting, 1);
  assert(failed == 0);
  (void)failed;
}

static void unlock(qkv_recency *recency) {
  (void)pthread_mutex_unlock(&recency->lock);
}

// Between two critical sections of one thread: a mutex goes to a running thread rather than to sleeping waiters.
static void let_others(qkv_recency *recency) {
  enum { YIELDS = 1000 };
  for (int i = 0; i < YIELDS && atomic_load(&recency->waiting) > 0; i++) (void)sched_yield();
}

qkv_recency *qkv_recency_create(void) {
  qkv_recency *recency = calloc(1, sizeof *recency);
  if (recency == NULL) abort();
  int failed = pthread_mutex_init(&recency->lock, NULL);
  for (int i = 0; i < QKV_RECENCY_LISTS; i++) failed |= pthread_mutex_init(&recency->lists[i].passing, NULL);
  assert(failed == 0);
  (void)failed;
  return recency;
}

void qkv_recency_destroy(qkv_recency **recency) {
  qkv_recency *old = *recency;
  if (old == NULL) return;
  *recency = NULL;
  for (int i = 0; i < QKV_RECENCY_LISTS; i++) {
    assert(old->lists[i].count == 0 && old->lists[i].passed == 0);
    free(old->lists[i].entries);
    (void)pthread_mutex_destroy(&old->lists[i].passing);
  }
  (void)pthread_mutex_destroy(&old->lock);
  free(old);
}

// ---- A heap ----

// NULL: the session is not in the list. Lists of what is in memory are left before that is taken away.
static _Atomic uint32_t *place_in(qkv_session *session, qkv_recency_list list) {
  session_working *working = qkvi_working(session);
  switch (list) {
    case QKV_RECENCY_EXPIRING:
      return &session->standing.expiring;
    case QKV_RECENCY_EVICTABLE:
      return session->kind->config.evictable ? &session->standing.owned : NULL;
    case QKV_RECENCY_KEPT:
      return session->kind->config.evictable ? NULL : &session->standing.owned;
    default:
      return working == NULL ? NULL : &working->places.at[list];
  }
}

// Of a session that has one.
static _Atomic uint32_t *place_of(const qkv_recency *recency, const order *in, qkv_session *session) {
  return place_in(session, (qkv_recency_list)(in - recency->lists));
}

static void set(const qkv_recency *recency, order *in, uint32_t at, entry what) {
  in->entries[at] = what;
  atomic_store_explicit(place_of(recency, in, session_of(&what)), at + 1, memory_order_relaxed);
}

static void sink(const qkv_recency *recency, order *in, uint32_t at) {
  const entry what = in->entries[at];
  for (uint32_t child; (child = 2 * at + 1) < in->count; at = child) {
    if (child + 1 < in->count && in->entries[child + 1].time_ms < in->entries[child].time_ms) child++;
    if (what.time_ms <= in->entries[child].time_ms) break;
    set(recency, in, at, in->entries[child]);
  }
  set(recency, in, at, what);
}

static void rise(const qkv_recency *recency, order *in, uint32_t at) {
  const entry what = in->entries[at];
  for (; at > 0 && in->entries[(at - 1) / 2].time_ms > what.time_ms; at = (at - 1) / 2)
    set(recency, in, at, in->entries[(at - 1) / 2]);
  set(recency, in, at, what);
}

// Memory for so many, a quarter more at a time; what is not needed any more is given back in halves.
static void resize(order *in, uint32_t wanted) {
  enum { LEAST = 16 };
  uint32_t places = in->places < LEAST ? LEAST : in->places;
  while (places < wanted) places += places / 4;
  while (places > LEAST && wanted < places / 4) places /= 2;
  if (places == in->places) return;
  entry *entries = realloc(in->entries, places * sizeof *entries);
  if (entries == NULL) abort();
  in->entries = entries;
  in->places = places;
}

static int64_t full_time_of(const qkv_session *session, qkv_recency_list list) {
  const int64_t used_ms = qkv_session_last_used_ms(session);
  if (list == QKV_RECENCY_AIMED) return atomic_load(&qkvi_working(session)->tiers.looked_ms);
  if (list == QKV_RECENCY_SUNK) return qkv_session_sunk_since_ms(session);
  if (list != QKV_RECENCY_EXPIRING) return used_ms;
  const uint64_t ttl = atomic_load(&session->ttl_ms);
  return ttl < (uint64_t)(INT64_MAX - used_ms) ? used_ms + (int64_t)ttl : INT64_MAX;
}

static uint64_t time_of(const qkv_session *session, qkv_recency_list list) {
  const int64_t time_ms = full_time_of(session, list);
  if (time_ms < 0) return 0;
  return (uint64_t)(time_ms < TIME_MAX ? time_ms : TIME_MAX) & TIME_MAX;
}

// The account that counts what the list has of it; NULL: none does.
static qkv_account *counting(const qkv_recency *recency, const order *in, const qkv_session *session) {
  return in == &recency->lists[QKV_RECENCY_EVICTABLE] ? qkv_session_account(session) : NULL;
}

static void insert(const qkv_recency *recency, order *in, qkv_session *session) {
  qkv_account *account = counting(recency, in, session);
  if (account != NULL) qkv_account_add_evictable(account);
  resize(in, in->count + in->passed + 1);
  if (in->passed > 0) set(recency, in, in->count + in->passed, in->entries[in->count]);
  const qkv_recency_list list = (qkv_recency_list)(in - recency->lists);
  set(recency, in, in->count, (entry){.time_ms = time_of(session, list) & TIME_MAX, .session = number_of(session)});
  rise(recency, in, in->count++);
}

// The last entry of the heap moves to the place of another.
static void fill(const qkv_recency *recency, order *in, uint32_t at) {
  const entry last = in->entries[--in->count];
  if (at == in->count) return;
  set(recency, in, at, last);
  rise(recency, in, at);
  sink(recency, in, atomic_load_explicit(place_of(recency, in, session_of(&last)), memory_order_relaxed) - 1);
}

static void take_out(const qkv_recency *recency, order *in, qkv_session *session) {
  _Atomic uint32_t *place = place_of(recency, in, session);
  uint32_t at = place == NULL ? 0 : atomic_load_explicit(place, memory_order_relaxed);
  if (at-- == 0) return;
  qkv_account *account = counting(recency, in, session);
  if (account != NULL) qkv_account_drop_evictable(account);
  if (at < in->count) {
    fill(recency, in, at);
    at = in->count;
    in->passed++;
  }
  const uint32_t last = in->count + --in->passed;
  if (at != last) set(recency, in, at, in->entries[last]);
  atomic_store(place, 0);
}

// ---- Members ----

static void enter_locked(qkv_recency *recency, qkv_recency_list list, qkv_session *session) {
  const _Atomic uint32_t *place = place_in(session, list);
  if (session->joined && place != NULL && atomic_load_explicit(place, memory_order_relaxed) == 0)
    insert(recency, &recency->lists[list], session);
}

// Whether a session that is in the list belongs there.
static bool belongs(const qkv_session *session, qkv_recency_list list) {
  const session_working *working = qkvi_working(session);
  if (list == QKV_RECENCY_EXPIRING) return atomic_load(&session->ttl_ms) > 0;
  const bool pinned = atomic_load(&session->pinned);
  if (list == QKV_RECENCY_EVICTABLE) return qkv_session_may_go(session);
  if (list == QKV_RECENCY_KEPT) return !pinned && session->kind->config.backing != NULL;
  if (working == NULL) return false;
  // What another session brings back of pages that they share is not published here.
  const bool coded = atomic_load(&working->shares) || atomic_load(&working->bytes_coded) > 0;
  switch (list) {
    case QKV_RECENCY_CODED:
      return coded && !pinned;
    case QKV_RECENCY_EXACT:
      return !pinned && atomic_load(&working->bytes_exact) > 0;
    case QKV_RECENCY_UNSETTLED:
      return atomic_load(&working->unsettled) > 0;
    case QKV_RECENCY_SUNK:
      return qkv_session_may_fold(session);
    case QKV_RECENCY_AIMED:
      return coded && working->tiers.aimed && !atomic_load(&working->tiers.settled);
    default:  // QKV_RECENCY_DEMOTABLE
      return coded && working->tiers.demotable && !atomic_load(&working->tiers.lowest);
  }
}

void qkv_recency_join(qkv_recency *recency, qkv_session *session) {
  const bool backed = session->kind->config.backing != NULL;
  const qkv_recency_list owned = session->kind->config.evictable ? QKV_RECENCY_EVICTABLE : QKV_RECENCY_KEPT;
  lock(recency);
  session->joined = true;
  if (belongs(session, owned)) enter_locked(recency, owned, session);
  // A fork may have rows before it is opened.
  for (qkv_recency_list i = 0; i < QKV_RECENCY_LISTS; i++) {
    const bool listed = i <= QKV_RECENCY_SUNK ? backed : i >= QKV_RECENCY_AIMED;
    if (listed && belongs(session, i)) enter_locked(recency, i, session);
  }
  unlock(recency);
}

// A thread that gives the session something for the list does so first and then reads its place. So what was given
// before the session left the list is seen here.
static void drop_locked(qkv_recency *recency, qkv_recency_list list, qkv_session *session) {
  take_out(recency, &recency->lists[list], session);
  if (belongs(session, list)) enter_locked(recency, list, session);
}

void qkv_recency_leave(qkv_recency *recency, qkv_session *session) {
  lock(recency);
  session->joined = false;
  for (int i = 0; i < QKV_RECENCY_LISTS; i++) {
    order *in = &recency->lists[i];
    take_out(recency, in, session);
    resize(in, in->count + in->passed);
  }
  unlock(recency);
}

// One that has been passed is left to the end of the pass, so that it does not come twice.
void qkv_recency_note(qkv_recency *recency, qkv_recency_list list, qkv_session *session) {
  if (recency == NULL) return;
  const _Atomic uint32_t *at = place_in(session, list);
  const bool wanted = belongs(session, list);
  if (at == NULL || wanted == (atomic_load(at) != 0)) return;
  lock(recency);
  if (wanted) {
    enter_locked(recency, list, session);
  } else if (atomic_load(at) <= recency->lists[list].count) {
    drop_locked(recency, list, session);
  }
  unlock(recency);
}

void qkv_recency_note_owned(qkv_recency *recency, qkv_session *session) {
  qkv_recency_note(recency, QKV_RECENCY_EVICTABLE, session);
  qkv_recency_note(recency, QKV_RECENCY_KEPT, session);
}

void qkv_recency_move(qkv_recency *recency, qkv_recency_list list, qkv_session *session) {
  if (recency == NULL) return;
  lock(recency);
  const _Atomic uint32_t *at = place_in(session, list);
  if (at != NULL && atomic_load(at) <= recency->lists[list].count) drop_locked(recency, list, session);
  unlock(recency);
}

qkv_recency_sums qkv_recency_read_sums(const qkv_recency *recency) {
  return (qkv_recency_sums){.bytes = atomic_load_explicit(&recency->bytes, memory_order_relaxed),
                            .coordinates = atomic_load_explicit(&recency->coordinates, memory_order_relaxed),
                            .folded = atomic_load_explicit(&recency->folded, memory_order_relaxed),
                            .folded_pages = atomic_load_explicit(&recency->folded_pages, memory_order_relaxed),
                            .unfolded = atomic_load_explicit(&recency->unfolded, memory_order_relaxed)};
}

void qkv_recency_add_sums(qkv_recency *recency, const qkv_recency_sums *by) {
  atomic_fetch_add_explicit(&recency->bytes, by->bytes, memory_order_relaxed);
  atomic_fetch_add_explicit(&recency->coordinates, by->coordinates, memory_order_relaxed);
  atomic_fetch_add_explicit(&recency->folded, by->folded, memory_order_relaxed);
  atomic_fetch_add_explicit(&recency->folded_pages, by->folded_pages, memory_order_relaxed);
  atomic_fetch_add_explicit(&recency->unfolded, by->unfolded, memory_order_relaxed);
}

// ---- A pass ----

void qkv_recency_begin(qkv_recency *recency, qkv_recency_list list) {
  const int failed = pthread_mutex_lock(&recency->lists[list].passing);
  assert(failed == 0);
  (void)failed;
}

// False: the session at the top has nothing any more, or another time, and another one may be there now.
static bool is_right(qkv_recency *recency, qkv_recency_list list) {
  order *in = &recency->lists[list];
  qkv_session *session = session_of(&in->entries[0]);
  const uint64_t time_ms = time_of(session, list);
  const bool stays = belongs(session, list);
  if (stays && time_ms <= in->entries[0].time_ms) return true;
  in->entries[0].time_ms = time_ms & TIME_MAX;
  if (stays) {
    sink(recency, in, 0);
  } else {
    drop_locked(recency, list, session);
  }
  return false;
}

// The top goes behind the heap.
static qkv_session *pass_top(const qkv_recency *recency, order *in) {
  const entry top = in->entries[0];
  fill(recency, in, 0);
  in->passed++;
  set(recency, in, in->count, top);
  return qkv_session_ref(session_of(&top));
}

// False: the lock has been held for long enough.
static bool try_next(qkv_recency *recency, qkv_recency_list list, qkv_session **out) {
  order *in = &recency->lists[list];
  bool done = false;
  *out = NULL;
  lock(recency);
  for (int step = 0; !done && step < QKV_RECENCY_STEPS; step++) {
    done = in->count == 0 || is_right(recency, list);
    if (done && in->count > 0) *out = pass_top(recency, in);
  }
  unlock(recency);
  return done;
}

qkv_session *qkv_recency_next(qkv_recency *recency, qkv_recency_list list) {
  qkv_session *next;
  while (!try_next(recency, list, &next)) let_others(recency);
  return next;
}

// One passed session goes back into the heap, or out of the list. False: there was none.
static bool end_one(qkv_recency *recency, qkv_recency_list list) {
  order *in = &recency->lists[list];
  if (in->passed == 0) return false;
  qkv_session *session = session_of(&in->entries[in->count]);
  if (belongs(session, list)) {
    in->entries[in->count].time_ms = time_of(session, list) & TIME_MAX;
    in->passed--;
    rise(recency, in, in->count++);
  } else {
    drop_locked(recency, list, session);
  }
  return true;
}

void qkv_recency_end(qkv_recency *recency, qkv_recency_list list) {
  for (bool more = true; more;) {
    lock(recency);
    for (int step = 0; more && step < QKV_RECENCY_STEPS; step++) more = end_one(recency, list);
    unlock(recency);
    if (more) let_others(recency);
  }
  (void)pthread_mutex_unlock(&recency->lists[list].passing);
}

void qkv_recency_lock(qkv_recency *recency) {
  lock(recency);
}

void qkv_recency_unlock(qkv_recency *recency) {
  unlock(recency);
}

void qkv_recency_withdraw(qkv_recency *recency, qkv_session *session) {
  for (int i = 0; i < QKV_RECENCY_LISTS; i++) {
    const bool stands = i == QKV_RECENCY_EVICTABLE || i == QKV_RECENCY_KEPT || i == QKV_RECENCY_EXPIRING;
    order *in = &recency->lists[i];
    if (!stands) take_out(recency, in, session);
    if (!stands) resize(in, in->count + in->passed);
  }
}

void qkv_recency_give_up(qkv_recency *recency, qkv_session *session, uint64_t bytes_exact) {
  lock(recency);
  take_out(recency, &recency->lists[QKV_RECENCY_EXACT], session);
  if (qkv_session_bytes_exact(session) != bytes_exact) enter_locked(recency, QKV_RECENCY_EXACT, session);
  unlock(recency);
}
