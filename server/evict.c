#include "server/evict.h"

#include <jansson.h>
#include <time.h>

#include "engine/cache/session_spill.h"

// This part more than asked for is freed, so that not every append has to evict.
enum { SLACK = 64 };  // of the limits

// The bytes and sessions that are missing.
typedef struct shortage {
  uint64_t bytes, places;
} shortage;

static uint64_t beyond(uint64_t taken, uint64_t limit) {
  return taken > limit ? taken - limit : 0;
}

// `slack` 0: no more than asked for.
static shortage look(const qkv_daemon *daemon, uint64_t bytes, unsigned slack) {
  const qkv_store_stats stats = qkv_store_read_stats(daemon->store);
  const uint64_t limit = stats.memory.bytes_limit, places = (uint64_t)daemon->options->limit_sessions;
  const uint64_t more = slack == 0 ? 0 : limit / slack, more_places = slack == 0 ? 0 : places / slack;
  return (shortage){.bytes = beyond(stats.memory.bytes_used + stats.memory.bytes_reserved + bytes + more, limit),
                    .places = beyond(stats.sessions + 1 + more_places, places)};
}

// What is missing below the account's ceilings.
static shortage look_at(const qkv_account *account, uint64_t bytes) {
  if (account == NULL) return (shortage){0};
  const qkv_account_usage usage = qkv_account_read(account);
  const uint64_t most = usage.limits.host_bytes, places = usage.limits.sessions;
  return (shortage){.bytes = most == 0 ? 0 : beyond(usage.host_bytes + bytes, most),
                    .places = places == 0 ? 0 : beyond(usage.sessions + 1, places)};
}

static bool exceeds_quota(const qkv_account *account, uint64_t bytes) {
  if (account == NULL) return false;
  const uint64_t most = qkv_account_read(account).limits.host_bytes;
  return most != 0 && bytes > most;
}

static bool is_met(const shortage *missing) {
  return missing->bytes == 0 && missing->places == 0;
}

// Closed sessions are counted as free: their memory is released by their last user, a moment later where a list of
// all sessions is being walked.
static bool close_one(qkv_daemon *daemon, qkv_session *session, shortage *missing) {
  uint64_t freed = 0;
  if (qkv_store_close_session(daemon->store, session, &freed, NULL) != QKV_OK) return false;
  freed += qkv_session_fixed_bytes(session);
  qkvi_catalogue_drop(daemon->residency, session);
  qkv_metric_add(&daemon->metrics[QKV_METRIC_SESSIONS_EVICTED], 1);
  missing->bytes = beyond(missing->bytes, freed);
  missing->places = beyond(missing->places, 1);
  return true;
}

// Objects that were last used before the session, of the account where it is not NULL, else of tenants above their
// guaranteed part, or with `all` of any. Returns how many were deleted.
static size_t close_objects(const qkv_daemon *daemon, const qkv_account *account, bool all, int64_t before_ms,
                            shortage *missing) {
  size_t places = 0;
  if (missing->bytes > 0)
    missing->bytes =
        beyond(missing->bytes, qkvi_objects_evict(daemon->objects, account, all, before_ms, missing->bytes, &places));
  return places;
}

// Sessions and objects of the tenant; those of others are walked over only as far as there are some behind them.
// Returns how many were closed.
static size_t close_own(qkv_daemon *daemon, const qkv_account *account, const qkv_session *but, shortage *missing) {
  qkv_recency *recency = qkv_store_recency(daemon->store);
  size_t closed = 0;
  qkv_recency_begin(recency, QKV_RECENCY_EVICTABLE);
  qkvi_objects_begin_pass(daemon->objects, QKVI_PASS_EVICT);
  for (uint64_t left = qkv_account_evictable(account); left > 0 && !is_met(missing);) {
    qkv_session *session = qkv_recency_next(recency, QKV_RECENCY_EVICTABLE);
    if (session == NULL) break;
    const bool own = qkv_session_account(session) == account;
    left -= own;
    if (session != but && own && qkv_session_may_go(session)) {
      closed += close_objects(daemon, account, true, qkv_session_last_used_ms(session), missing);
      if (!is_met(missing)) closed += close_one(daemon, session, missing);
    }
    qkv_session_unref(&session);
  }
  closed += close_objects(daemon, account, true, INT64_MAX, missing);
  qkv_recency_end(recency, QKV_RECENCY_EVICTABLE);
  return closed;
}

// Of tenants above their guaranteed part, or with `all` of any tenant. Returns how many were closed.
static size_t close_some(qkv_daemon *daemon, bool all, const qkv_session *but, shortage *missing) {
  qkv_recency *recency = qkv_store_recency(daemon->store);
  size_t closed = 0;
  qkv_recency_begin(recency, QKV_RECENCY_EVICTABLE);
  qkvi_objects_begin_pass(daemon->objects, QKVI_PASS_EVICT);
  while (!is_met(missing)) {
    qkv_session *session = qkv_recency_next(recency, QKV_RECENCY_EVICTABLE);
    if (session == NULL) break;
    const bool asked = all || qkv_account_is_over(qkv_session_account(session));
    if (session != but && asked && qkv_session_may_go(session)) {
      closed += close_objects(daemon, NULL, all, qkv_session_last_used_ms(session), missing);
      if (!is_met(missing)) closed += close_one(daemon, session, missing);
    }
    qkv_session_unref(&session);
  }
  closed += close_objects(daemon, NULL, all, INT64_MAX, missing);
  qkv_recency_end(recency, QKV_RECENCY_EVICTABLE);
  return closed;
}

static void await_memory(const qkv_daemon *daemon, const qkv_account *account, uint64_t bytes) {
  enum { STEPS = 200 };
  const struct timespec step = {.tv_nsec = 1000000};
  for (int i = 0; i < STEPS && (look(daemon, bytes, 0).bytes > 0 || look_at(account, bytes).bytes > 0); i++)
    (void)nanosleep(&step, NULL);
}

bool qkvi_evict(qkv_daemon *daemon, const qkv_account *account, const qkv_session *but, uint64_t bytes) {
  size_t closed = 0;
  if (bytes > qkv_store_read_stats(daemon->store).memory.bytes_limit || exceeds_quota(account, bytes)) return false;
  (void)pthread_mutex_lock(&daemon->evicting);
  shortage missing = look(daemon, bytes, 0), own = look_at(account, bytes);
  const bool was_met = is_met(&missing) && is_met(&own);  // another thread has done it meanwhile
  if (!is_met(&own)) closed = close_own(daemon, account, but, &own);
  missing = is_met(&own) ? look(daemon, bytes, 0) : (shortage){0};  // the tenant's quota still refuses it
  if (!is_met(&missing)) missing = look(daemon, bytes, SLACK);
  if (!is_met(&missing)) closed += close_some(daemon, false, but, &missing);
  if (!is_met(&missing)) closed += close_some(daemon, true, but, &missing);
  if (closed > 0) await_memory(daemon, account, bytes);
  (void)pthread_mutex_unlock(&daemon->evicting);
  if (closed > 0) qkv_log(QKV_LOG_DEBUG, "sessions were evicted", "{s:I}", "sessions", (json_int_t)closed);
  return closed > 0 || was_met;
}
