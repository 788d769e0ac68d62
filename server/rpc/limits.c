#include "server/rpc/limits.h"
#include "engine/base/clock.h"

#include <assert.h>
#include <inttypes.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define uthash_fatal(message) abort()
#include <uthash.h>
#include <utlist.h>

#include "engine/base/histogram.h"
#include "engine/base/name.h"
#include "server/rpc/internal.h"

#define CALL_OF(part) ((qkv_rpc_call *)((char *)(part)-offsetof(qkv_rpc_call, place)))
// Calls that are ended with the lock taken once.
#define VICTIMS 64
// All calls are checked for slow clients as often as this.
#define LOOK_MS 1000
// Tenants that are kept while no call of theirs runs: their totals, and their debts.
#define TENANTS_KEPT 4096
// Tenants that a walk copies with the lock taken once. Then it sleeps for a moment: who waits for the lock is not yet
// awake when it is free, and would find it taken again. Of 60000 others waited 12 ms without, 0.04 with it.
#define AT_ONCE 256
#define PAUSE_NS 1000
// Those of tenants, from 1 on: 0 is the daemon's own.
#define FLOWS (QKV_FAIR_FLOWS - 1)

struct qkvi_rpc_group {
  UT_hash_handle hh;
  size_t members;                // counted or not
  size_t calls[QKVI_RPC_KINDS];  // counted ones
  size_t silent[QKVI_RPC_KINDS];
  size_t spoken;  // of a tenant: counted calls that have spoken and are no control calls
  qkvi_holder *holder;
  qkvi_meter meter;  // of a tenant
  uint64_t flow;     // of a tenant that has members
  char name[];
};

// A walk over the tenants, in the order in which they came. Those that come meanwhile are last.
typedef struct qkvi_rpc_walk {
  const qkvi_rpc_group *next;  // NULL: it has ended
  size_t left;                 // tenants that it visits at most
  struct qkvi_rpc_walk *further;
} qkvi_rpc_walk;

typedef struct qkvi_rpc_list {
  qkvi_rpc_place *oldest, *newest;
} qkvi_rpc_list;

struct qkvi_rpc_limits {
  qkvi_rpc_limits_config config;
  pthread_mutex_t lock;
  qkvi_rpc_group *connections, *tenants;
  qkvi_rpc_walk *walks;          // over the tenants, which keep their order meanwhile
  size_t calls[QKVI_RPC_KINDS];  // counted ones
  size_t spoken;                 // as of tenants
  size_t flows[QKV_FAIR_FLOWS];  // tenants that have each
  qkvi_rpc_list silent, others[QKVI_RPC_KINDS];
  size_t silent_most[QKVI_RPC_KINDS];  // no connection has more silent calls
  uint64_t silent_ended, stalled_ended;
  int64_t looked_ms;  // when calls that are not silent were last checked
};

bool qkvi_rpc_is_control(const char *path) {
  return strcmp(path, "/grpc.health.v1.Health/Check") == 0 || strncmp(path, "/qkv.v1.Admin/", 14) == 0;
}

qkvi_rpc_limits *qkvi_rpc_limits_create(const qkvi_rpc_limits_config *config) {
  qkvi_rpc_limits *limits = calloc(1, sizeof(*limits));
  assert(limits != NULL);
  limits->config = *config;
  pthread_mutex_init(&limits->lock, NULL);
  return limits;
}

void qkvi_rpc_limits_destroy(qkvi_rpc_limits **limits) {
  qkvi_rpc_limits *old = *limits;
  if (old == NULL) return;
  *limits = NULL;
  assert(old->connections == NULL && old->silent.oldest == NULL);
  for (size_t i = 0; i < QKVI_RPC_KINDS; i++) assert(old->others[i].oldest == NULL);
  qkvi_rpc_group *tenant = old->tenants, *next;
  HASH_CLEAR(hh, old->tenants);
  for (; tenant != NULL; tenant = next) {
    next = tenant->hh.next;
    assert(tenant->members == 0);
    qkvi_holder_unref(tenant->holder);
    free(tenant);
  }
  pthread_mutex_destroy(&old->lock);
  free(old);
}

// ---- Groups ----

static qkvi_rpc_group *join_group(qkvi_rpc_group **all, const char *name) {
  qkvi_rpc_group *group = NULL;
  HASH_FIND_STR(*all, name, group);
  if (group == NULL) {
    const size_t bytes = strlen(name) + 1;
    group = calloc(1, sizeof(*group) + bytes);
    assert(group != NULL);
    memcpy(group->name, name, bytes);
    group->holder = qkvi_holder_create();
    HASH_ADD_STR(*all, name, group);
  }
  group->members++;
  return group;
}

static void free_group(qkvi_rpc_group **all, qkvi_rpc_group *group) {
  HASH_DEL(*all, group);
  qkvi_holder_unref(group->holder);
  free(group);
}

static void set_quota(const qkvi_rpc_limits *limits, qkvi_rpc_group *tenant) {
  qkvi_call_quota quota = {0};
  if (limits->config.quota != NULL) limits->config.quota(limits->config.quota_context, tenant->name, &quota);
  qkvi_meter_set(&tenant->meter, &quota, qkv_stage_now());
}

static bool may_go(qkvi_rpc_group *tenant) {
  return tenant->members == 0 && qkvi_meter_is_idle(&tenant->meter, qkv_stage_now());
}

static void free_tenant(qkvi_rpc_limits *limits, qkvi_rpc_group *tenant) {
  for (qkvi_rpc_walk *walk = limits->walks; walk != NULL; walk = walk->further) {
    if (walk->next == tenant) walk->next = tenant->hh.next;
  }
  free_group(&limits->tenants, tenant);
}

// Looks at the oldest few: one that has left may go once its meter is idle. Those that stay become the newest.
static void drop_oldest(qkvi_rpc_limits *limits, const qkvi_rpc_group *joined) {
  enum { LOOKS = 2 };
  for (int i = 0; i < LOOKS && HASH_COUNT(limits->tenants) > TENANTS_KEPT; i++) {
    qkvi_rpc_group *oldest = limits->tenants;
    if (oldest == joined) return;
    if (may_go(oldest)) {
      free_tenant(limits, oldest);
    } else if (limits->walks == NULL) {
      HASH_DEL(limits->tenants, oldest);
      HASH_ADD_KEYPTR(hh, limits->tenants, oldest->name, strlen(oldest->name), oldest);
    }
  }
}

// A flow that no other tenant has; where others have all of them, one that few have. Mostly it is the one that the
// tenant had before.
static void take_flow(qkvi_rpc_limits *limits, qkvi_rpc_group *tenant) {
  const size_t first = tenant->hh.hashv % FLOWS + 1;
  size_t best = first;
  for (size_t i = 1; i < FLOWS && limits->flows[best] > 0; i++) {
    const size_t at = (first - 1 + i) % FLOWS + 1;
    if (limits->flows[at] < limits->flows[best]) best = at;
  }
  limits->flows[best]++;
  tenant->flow = best;
}

static qkvi_rpc_group *join_tenant(qkvi_rpc_limits *limits, const char *name) {
  const unsigned before = HASH_COUNT(limits->tenants);
  qkvi_rpc_group *tenant = join_group(&limits->tenants, name);
  if (tenant->members == 1) take_flow(limits, tenant);
  if (HASH_COUNT(limits->tenants) > before) {
    set_quota(limits, tenant);
    drop_oldest(limits, tenant);
  }
  return tenant;
}

static void leave_tenant(qkvi_rpc_limits *limits, qkvi_rpc_group *tenant) {
  if (--tenant->members > 0) return;
  limits->flows[tenant->flow]--;
  if (HASH_COUNT(limits->tenants) > TENANTS_KEPT && may_go(tenant)) free_tenant(limits, tenant);
}

// ---- The silent ones, and the others ----

static void append_to(qkvi_rpc_list *list, qkvi_rpc_place *place) {
  place->previous = list->newest;
  place->next = NULL;
  if (list->newest != NULL) list->newest->next = place;
  if (list->newest == NULL) list->oldest = place;
  list->newest = place;
}

static void take_from(qkvi_rpc_list *list, qkvi_rpc_place *place) {
  if (place->next != NULL) place->next->previous = place->previous;
  if (place->next == NULL) list->newest = place->previous;
  if (place->previous != NULL) place->previous->next = place->next;
  if (place->previous == NULL) list->oldest = place->next;
}

static void link_silent(qkvi_rpc_limits *limits, qkvi_rpc_place *place) {
  place->silent = true;
  const size_t silent = ++place->connection->silent[place->kind];
  if (silent > limits->silent_most[place->kind]) limits->silent_most[place->kind] = silent;
  append_to(&limits->silent, place);
}

static void unlink_silent(qkvi_rpc_limits *limits, qkvi_rpc_place *place) {
  if (!place->silent) return;
  place->silent = false;
  place->connection->silent[place->kind]--;
  take_from(&limits->silent, place);
  append_to(&limits->others[place->kind], place);
}

static void count(qkvi_rpc_limits *limits, qkvi_rpc_place *place) {
  place->counted = true;
  limits->calls[place->kind]++;
  place->connection->calls[place->kind]++;
  place->tenant->calls[place->kind]++;
}

static void discount(qkvi_rpc_limits *limits, qkvi_rpc_place *place) {
  if (!place->counted) return;
  place->counted = false;
  limits->calls[place->kind]--;
  place->connection->calls[place->kind]--;
  place->tenant->calls[place->kind]--;
  if (!place->spoken) return;
  place->spoken = false;
  place->tenant->spoken--;
  limits->spoken--;
}

// Takes a call's place away. Returns its gRPC call, with a reference for the caller, which cancels it without the
// lock.
static grpc_call *evict(qkvi_rpc_limits *limits, qkvi_rpc_place *place) {
  qkv_rpc_call *call = CALL_OF(place);
  *(place->silent ? &limits->silent_ended : &limits->stalled_ended) += 1;
  unlink_silent(limits, place);
  discount(limits, place);
  atomic_store_explicit(&call->cancelled, true, memory_order_release);
  grpc_call_ref(call->grpc);
  return call->grpc;
}

static void cancel(grpc_call *call, qkv_status status, const char *text) {
  (void)grpc_call_cancel_with_status(call, (grpc_status_code)status, text, NULL);
  grpc_call_unref(call);
}

// The oldest of the connection that has the most silent calls, if that are more than `own`. Where calls come one to a
// connection that is the first one.
static qkvi_rpc_place *find_victim(qkvi_rpc_limits *limits, qkvi_rpc_kind kind, size_t own) {
  qkvi_rpc_place *victim = NULL, *place = limits->silent.oldest;
  size_t most = own;
  for (; place != NULL && most < limits->silent_most[kind]; place = place->next) {
    if (place->kind != kind || place->connection->silent[kind] <= most) continue;
    victim = place;
    most = place->connection->silent[kind];
  }
  if (place == NULL && most < limits->silent_most[kind]) limits->silent_most[kind] = most;
  return victim;
}

static bool is_unread(const qkv_rpc_call *call) {
  const qkvi_rpc_phase phase = atomic_load_explicit(&call->phase, memory_order_acquire);
  return phase == QKVI_RPC_SENDING || phase == QKVI_RPC_ENDING;
}

// Of the control calls whose answers have not been read, the one that has waited longest of the connections that have
// the most control calls, if that are more than `own`. They are few.
static qkvi_rpc_place *find_unread(const qkvi_rpc_limits *limits, size_t own) {
  qkvi_rpc_place *victim = NULL;
  uint64_t since = 0;
  size_t most = own;
  for (qkvi_rpc_place *place = limits->others[QKVI_RPC_CONTROL].oldest; place != NULL; place = place->next) {
    const qkv_rpc_call *call = CALL_OF(place);
    const size_t calls = place->connection->calls[QKVI_RPC_CONTROL];
    if (!place->counted || calls < most || calls <= own || !is_unread(call)) continue;
    const uint64_t began = atomic_load_explicit(&call->phase_ns, memory_order_relaxed);
    if (calls == most && began >= since) continue;
    victim = place;
    most = calls;
    since = began;
  }
  return victim;
}

// ---- Calls ----

static qkv_status check_groups(const qkvi_rpc_limits *limits, const qkvi_rpc_place *place, qkv_error *error) {
  const qkvi_rpc_limits_config *config = &limits->config;
  const bool control = place->kind == QKVI_RPC_CONTROL;
  const size_t quarter = config->control_max / 4 + 1, most = control ? quarter : config->connection_max;
  if (place->connection->calls[place->kind] >= most && control)
    return qkv_fail(error, QKV_RESOURCE_EXHAUSTED,
                    "limit-control-calls is %zu, of which one connection may have %zu at once", config->control_max,
                    most);
  if (place->connection->calls[place->kind] >= most)
    return qkv_fail(error, QKV_RESOURCE_EXHAUSTED,
                    "limit-connection-calls is %zu and so many calls are running on this connection", most);
  const uint64_t own = place->tenant->meter.quota.calls;
  if (!control && own > 0 && place->tenant->calls[QKVI_RPC_CALL] >= own)
    return qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "quota calls of tenant %s is %" PRIu64 ", %zu are running",
                    place->tenant->name, own, place->tenant->calls[QKVI_RPC_CALL]);
  if (!control && own == 0 && config->tenant_max > 0 && place->tenant->calls[QKVI_RPC_CALL] >= config->tenant_max)
    return qkv_fail(error, QKV_RESOURCE_EXHAUSTED,
                    "limit-tenant-calls is %zu and so many calls of this tenant are running", config->tenant_max);
  return QKV_OK;
}

// `victim` is a call that has lost its place for this one, or NULL; *why gets what it is told.
static qkv_status find_place(qkvi_rpc_limits *limits, const qkvi_rpc_place *place, grpc_call **victim,
                             const char **why, qkv_error *error) {
  const bool control = place->kind == QKVI_RPC_CONTROL;
  const size_t most = control ? limits->config.control_max : limits->config.calls_max;
  const size_t own = place->connection->calls[place->kind];
  if (limits->calls[place->kind] < most) return QKV_OK;
  qkvi_rpc_place *found = find_victim(limits, place->kind, own);
  *why = control ? "limit-control-calls is reached and this call has sent no message"
                 : "limit-calls is reached and this call has sent no message";
  if (found == NULL && control) {
    found = find_unread(limits, own);
    *why = "limit-control-calls is reached and the answer to this call has not been read";
  }
  if (found == NULL)
    return qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "%s is %zu and so many calls are running",
                    control ? "limit-control-calls" : "limit-calls", most);
  *victim = evict(limits, found);
  return QKV_OK;
}

static void leave(qkvi_rpc_limits *limits, qkvi_rpc_place *place) {
  discount(limits, place);
  if (--place->connection->members == 0) free_group(&limits->connections, place->connection);
  leave_tenant(limits, place->tenant);
}

qkv_status qkvi_rpc_limits_enter(qkvi_rpc_limits *limits, qkvi_rpc_place *place, qkvi_rpc_kind kind, const char *peer,
                                 const char *tenant, qkv_error *error) {
  grpc_call *victim = NULL;
  const char *why = NULL;
  *place = (qkvi_rpc_place){.kind = kind, .begun_ms = qkv_now_ms(), .metered = kind == QKVI_RPC_CALL};
  pthread_mutex_lock(&limits->lock);
  place->connection = join_group(&limits->connections, peer);
  place->tenant = join_tenant(limits, tenant);
  qkv_status status = check_groups(limits, place, error);
  place->tenant->meter.usage.refused += status != QKV_OK;
  if (status == QKV_OK) status = find_place(limits, place, &victim, &why, error);
  if (status == QKV_OK) {
    count(limits, place);
    link_silent(limits, place);
  } else {
    leave(limits, place);
  }
  pthread_mutex_unlock(&limits->lock);
  if (victim != NULL) cancel(victim, QKV_RESOURCE_EXHAUSTED, why);
  return status;
}

// Calls that have spoken keep their places. A tenant without a limit of its own may have three times as many of them
// as it leaves to others, and one at least. Places of silent calls count as left: others can have them.
static qkv_status check_share(qkvi_rpc_limits *limits, const qkvi_rpc_place *place, qkv_error *error) {
  const size_t most = limits->config.calls_max, all = limits->spoken, own = place->tenant->spoken;
  if (place->kind == QKVI_RPC_CONTROL || !place->counted || own == 0) return QKV_OK;
  if (limits->config.tenant_max > 0 || place->tenant->meter.quota.calls > 0) return QKV_OK;
  if (all + 1 <= most && own + 1 <= 3 * (most - all - 1)) return QKV_OK;
  place->tenant->meter.usage.refused++;
  return qkv_fail(error, QKV_RESOURCE_EXHAUSTED,
                  "limit-calls is %zu and this tenant has %zu of %zu: what is left is for others, unless "
                  "limit-tenant-calls says how many a tenant may have",
                  most, own, all);
}

qkv_status qkvi_rpc_limits_spoken(qkvi_rpc_limits *limits, qkvi_rpc_place *place, qkv_error *error) {
  pthread_mutex_lock(&limits->lock);
  unlink_silent(limits, place);
  const qkv_status status = check_share(limits, place, error);
  if (status == QKV_OK && place->kind == QKVI_RPC_CALL && place->counted) {
    place->spoken = true;
    place->tenant->spoken++;
    limits->spoken++;
  }
  pthread_mutex_unlock(&limits->lock);
  return status;
}

void qkvi_rpc_limits_leave(qkvi_rpc_limits *limits, qkvi_rpc_place *place) {
  pthread_mutex_lock(&limits->lock);
  assert(!place->silent);
  take_from(&limits->others[place->kind], place);
  leave(limits, place);
  pthread_mutex_unlock(&limits->lock);
}

// ---- Time ----

typedef struct late_call {
  grpc_call *grpc;
  const char *limit, *what;
  int64_t ms;
} late_call;

static size_t take_silent(qkvi_rpc_limits *limits, late_call *late) {
  const int64_t most = limits->config.first_message_ms, before = qkv_now_ms() - most;
  size_t found = 0;
  while (most > 0 && found < VICTIMS && limits->silent.oldest != NULL && limits->silent.oldest->begun_ms < before)
    late[found++] = (late_call){.grpc = evict(limits, limits->silent.oldest),
                                .limit = "limit-first-message",
                                .what = "the call's first message has not arrived as a whole",
                                .ms = most};
  return found;
}

// The time-out that the call exceeds in waiting for its client; false: none. A phase is not older than its time.
static bool is_stalled(const qkvi_rpc_limits *limits, const qkv_rpc_call *call, uint64_t now, late_call *late) {
  const qkvi_rpc_phase phase = atomic_load_explicit(&call->phase, memory_order_acquire);
  const uint64_t since = atomic_load_explicit(&call->phase_ns, memory_order_relaxed);
  if (phase == QKVI_RPC_READING)
    *late = (late_call){.limit = "limit-idle-stream",
                        .what = "the stream's next message has not arrived in that time",
                        .ms = limits->config.idle_ms};
  else if (phase == QKVI_RPC_SENDING || phase == QKVI_RPC_ENDING)
    *late = (late_call){.limit = "limit-unread-response",
                        .what = "a message to the client has not been read in that time",
                        .ms = limits->config.unread_ms};
  else
    return false;
  return late->ms > 0 && now > since && now - since > (uint64_t)late->ms * 1000000;
}

static size_t take_stalled(qkvi_rpc_limits *limits, const qkvi_rpc_list *list, late_call *late, size_t found) {
  const uint64_t now = qkv_stage_now();
  for (qkvi_rpc_place *place = list->oldest; place != NULL && found < VICTIMS; place = place->next) {
    late_call each = {0};
    if (!place->counted || !is_stalled(limits, CALL_OF(place), now, &each)) continue;
    each.grpc = evict(limits, place);
    late[found++] = each;
  }
  return found;
}

static size_t take_late(qkvi_rpc_limits *limits, late_call *late) {
  pthread_mutex_lock(&limits->lock);
  size_t found = take_silent(limits, late);
  const int64_t now = qkv_now_ms();
  if (now - limits->looked_ms >= LOOK_MS) {
    for (size_t i = 0; i < QKVI_RPC_KINDS; i++) found = take_stalled(limits, &limits->others[i], late, found);
    if (found < VICTIMS) limits->looked_ms = now;
  }
  pthread_mutex_unlock(&limits->lock);
  return found;
}

void qkvi_rpc_limits_tend(qkvi_rpc_limits *limits) {
  late_call late[VICTIMS];
  for (size_t found = VICTIMS; found == VICTIMS;) {
    found = take_late(limits, late);
    for (size_t i = 0; i < found; i++) {
      char text[128];
      (void)snprintf(text, sizeof text, "%s is %" PRId64 " ms and %s", late[i].limit, late[i].ms, late[i].what);
      cancel(late[i].grpc, QKV_DEADLINE_EXCEEDED, text);
    }
  }
}

// ---- Quotas ----

void qkvi_rpc_limits_refresh(qkvi_rpc_limits *limits) {
  pthread_mutex_lock(&limits->lock);
  for (qkvi_rpc_group *tenant = limits->tenants; tenant != NULL; tenant = tenant->hh.next) set_quota(limits, tenant);
  pthread_mutex_unlock(&limits->lock);
}

uint64_t qkvi_rpc_limits_wait_ms(qkvi_rpc_limits *limits, qkvi_rpc_place *place, uint64_t refuses, qkv_error *error) {
  if (!place->metered) return 0;
  pthread_mutex_lock(&limits->lock);
  qkvi_meter *meter = &place->tenant->meter;
  const uint64_t wait = qkvi_meter_wait_ms(meter, place->tenant->name, qkv_stage_now(), error);
  meter->usage.refused += wait > 0 && wait >= refuses;
  pthread_mutex_unlock(&limits->lock);
  return wait;
}

void qkvi_rpc_limits_take(qkvi_rpc_limits *limits, const qkvi_rpc_place *place, uint64_t bytes, uint64_t rows) {
  if (!place->metered) return;
  pthread_mutex_lock(&limits->lock);
  qkvi_meter_take(&place->tenant->meter, bytes, rows, qkv_stage_now());
  pthread_mutex_unlock(&limits->lock);
}

qkv_share qkvi_rpc_limits_share(qkvi_rpc_limits *limits, const qkvi_rpc_place *place) {
  pthread_mutex_lock(&limits->lock);
  const qkv_share share = {.flow = place->tenant->flow, .weight = place->tenant->meter.quota.weight};
  pthread_mutex_unlock(&limits->lock);
  return share;
}

void qkvi_rpc_limits_refused(qkvi_rpc_limits *limits, const qkvi_rpc_place *place) {
  pthread_mutex_lock(&limits->lock);
  place->tenant->meter.usage.refused++;
  pthread_mutex_unlock(&limits->lock);
}

qkvi_call_usage qkvi_rpc_limits_usage(qkvi_rpc_limits *limits, const char *tenant) {
  qkvi_call_usage usage = {0};
  qkvi_rpc_group *found = NULL;
  pthread_mutex_lock(&limits->lock);
  HASH_FIND_STR(limits->tenants, tenant, found);
  if (found != NULL) usage = found->meter.usage;
  if (found != NULL) usage.calls = found->calls[QKVI_RPC_CALL];
  pthread_mutex_unlock(&limits->lock);
  return usage;
}

// With the lock.
static size_t copy_names(qkvi_rpc_walk *walk, char names[AT_ONCE][QKV_NAME_MAX + 1]) {
  size_t count = 0;
  for (; count < AT_ONCE && walk->next != NULL; count++) {
    assert(strlen(walk->next->name) <= QKV_NAME_MAX);
    memcpy(names[count], walk->next->name, strlen(walk->next->name) + 1);
    walk->next = --walk->left > 0 ? walk->next->hh.next : NULL;
  }
  return count;
}

void qkvi_rpc_limits_each(qkvi_rpc_limits *limits, void (*fn)(void *context, const char *tenant), void *context) {
  char names[AT_ONCE][QKV_NAME_MAX + 1];
  pthread_mutex_lock(&limits->lock);
  qkvi_rpc_walk walk = {.next = limits->tenants, .left = HASH_COUNT(limits->tenants)};
  LL_PREPEND2(limits->walks, &walk, further);
  while (walk.next != NULL) {
    const size_t count = copy_names(&walk, names);
    pthread_mutex_unlock(&limits->lock);
    for (size_t i = 0; i < count; i++) fn(context, names[i]);
    if (count == AT_ONCE) (void)nanosleep(&(struct timespec){.tv_nsec = PAUSE_NS}, NULL);
    pthread_mutex_lock(&limits->lock);
  }
  LL_DELETE2(limits->walks, &walk, further);
  pthread_mutex_unlock(&limits->lock);
}

qkvi_holders qkvi_rpc_limits_holders(const qkvi_rpc_place *place) {
  return (qkvi_holders){.connection = place->connection->holder, .tenant = place->tenant->holder};
}

qkv_status qkvi_rpc_limits_arrived(qkvi_rpc_limits *limits, const qkvi_rpc_place *place, uint64_t bytes,
                                   qkv_error *error) {
  const qkvi_holders holders = qkvi_rpc_limits_holders(place);
  const qkv_status status = qkvi_request_take(&holders, bytes, limits->config.arrived_max, error);
  if (status != QKV_OK) qkvi_rpc_limits_refused(limits, place);
  return status;
}

void qkvi_rpc_limits_served(const qkvi_rpc_place *place, uint64_t bytes) {
  const qkvi_holders holders = qkvi_rpc_limits_holders(place);
  qkvi_request_give(&holders, bytes);
}

uint64_t qkvi_rpc_limits_stalled_ended(qkvi_rpc_limits *limits) {
  pthread_mutex_lock(&limits->lock);
  const uint64_t ended = limits->stalled_ended;
  pthread_mutex_unlock(&limits->lock);
  return ended;
}

uint64_t qkvi_rpc_limits_silent_ended(qkvi_rpc_limits *limits) {
  pthread_mutex_lock(&limits->lock);
  const uint64_t ended = limits->silent_ended;
  pthread_mutex_unlock(&limits->lock);
  return ended;
}
