#include "engine/cache/accounts.h"

#include <assert.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define uthash_fatal(message) abort()
#include <uthash.h>
#include <utlist.h>

struct qkv_account {
  qkv_accounts *accounts;
  qkv_arena *arena;
  size_t references;  // under the lock
  _Atomic uint64_t sessions, evictable, objects, stored, copied;
  // Of the limits, those that are looked at without the lock; ceilings are UINT64_MAX where there is none.
  _Atomic uint64_t host_guaranteed, ssd_max, ssd_guaranteed, gpu_max, sessions_max;
  _Atomic uint64_t host_max;
  _Atomic bool ssd_full;
  _Atomic int64_t gpu_wait_ms;
  uint64_t told_full;  // when it was last given as a full one, in turns; under the lock
  UT_hash_handle hh;
  char tenant[QKV_NAME_MAX + 1];
};

// A walk over the accounts, in the order in which they were made. Those that are made meanwhile are last.
typedef struct account_walk {
  const qkv_account *next;  // NULL: it has ended
  size_t left;              // accounts that it visits at most
  struct account_walk *further;
} account_walk;

// Accounts that a walk copies with the lock taken once. Then it sleeps for a moment: who waits for the lock is not
// yet awake when it is free, and would find it taken again. Of 60000 others waited 12 ms without, 0.04 with it.
enum { AT_ONCE = 256, PAUSE_NS = 1000 };

struct qkv_accounts {
  qkv_arena *arena;
  qkv_account_limits_fn *limits;
  void *context;
  _Atomic bool any_full;  // perhaps
  pthread_mutex_t lock;
  uint64_t turns;    // of full accounts, one after the other
  qkv_account *all;  // by tenant
  account_walk *walks;
};

qkv_accounts *qkv_accounts_create(qkv_arena *arena, qkv_account_limits_fn *limits, void *context) {
  qkv_accounts *accounts = calloc(1, sizeof *accounts);
  assert(accounts != NULL);
  *accounts = (qkv_accounts){.arena = arena, .limits = limits, .context = context};
  const int failed = pthread_mutex_init(&accounts->lock, NULL);
  assert(failed == 0);
  (void)failed;
  return accounts;
}

void qkv_accounts_destroy(qkv_accounts **accounts) {
  qkv_accounts *old = *accounts;
  if (old == NULL) return;
  *accounts = NULL;
  assert(old->all == NULL);
  (void)pthread_mutex_destroy(&old->lock);
  free(old);
}

static uint64_t ceiling(uint64_t limit) {
  return limit == 0 ? UINT64_MAX : limit;
}

static void set_limits(qkv_account *account) {
  const qkv_accounts *accounts = account->accounts;
  qkv_account_limits limits = {0};
  if (accounts->limits != NULL) accounts->limits(accounts->context, account->tenant, &limits);
  qkv_arena_set_ceiling(account->arena, ceiling(limits.host_bytes));
  atomic_store_explicit(&account->host_max, limits.host_bytes, memory_order_relaxed);
  atomic_store_explicit(&account->host_guaranteed, limits.host_guaranteed, memory_order_relaxed);
  atomic_store_explicit(&account->ssd_max, ceiling(limits.ssd_bytes), memory_order_relaxed);
  atomic_store_explicit(&account->ssd_guaranteed, limits.ssd_guaranteed, memory_order_relaxed);
  atomic_store_explicit(&account->gpu_max, ceiling(limits.gpu_bytes), memory_order_relaxed);
  atomic_store_explicit(&account->gpu_wait_ms, 0, memory_order_relaxed);
  atomic_store_explicit(&account->sessions_max, ceiling(limits.sessions), memory_order_relaxed);
  atomic_store_explicit(&account->ssd_full, false, memory_order_relaxed);
}

void qkv_accounts_refresh(qkv_accounts *accounts) {
  pthread_mutex_lock(&accounts->lock);
  for (qkv_account *account = accounts->all; account != NULL; account = account->hh.next) set_limits(account);
  pthread_mutex_unlock(&accounts->lock);
}

// ---- References ----

static qkv_account *add(qkv_accounts *accounts, const char *tenant) {
  char name[QKV_NAME_MAX + 32];
  qkv_account *account = calloc(1, sizeof *account);
  assert(account != NULL && strlen(tenant) <= QKV_NAME_MAX);
  account->accounts = accounts;
  memcpy(account->tenant, tenant, strlen(tenant) + 1);
  (void)snprintf(name, sizeof name, "quota host_bytes of tenant %s", tenant);
  account->arena = qkv_arena_create_account(accounts->arena, name, account);
  set_limits(account);
  HASH_ADD_STR(accounts->all, tenant, account);
  return account;
}

qkv_account *qkv_accounts_join(qkv_accounts *accounts, const char *tenant) {
  qkv_account *account = NULL;
  pthread_mutex_lock(&accounts->lock);
  HASH_FIND_STR(accounts->all, tenant, account);
  if (account == NULL) account = add(accounts, tenant);
  account->references++;
  pthread_mutex_unlock(&accounts->lock);
  return account;
}

qkv_account *qkv_account_ref(qkv_account *account) {
  pthread_mutex_lock(&account->accounts->lock);
  account->references++;
  pthread_mutex_unlock(&account->accounts->lock);
  return account;
}

static void take_out(qkv_accounts *accounts, qkv_account *account) {
  for (account_walk *walk = accounts->walks; walk != NULL; walk = walk->further) {
    if (walk->next == account) walk->next = account->hh.next;
  }
  HASH_DEL(accounts->all, account);
}

void qkv_account_unref(qkv_account **account) {
  qkv_account *old = *account;
  if (old == NULL) return;
  *account = NULL;
  qkv_accounts *accounts = old->accounts;
  pthread_mutex_lock(&accounts->lock);
  const bool last = --old->references == 0;
  if (last) take_out(accounts, old);
  pthread_mutex_unlock(&accounts->lock);
  if (!last) return;
  assert(atomic_load(&old->sessions) == 0 && atomic_load(&old->stored) == 0 && atomic_load(&old->copied) == 0);
  qkv_arena_destroy(&old->arena);
  free(old);
}

qkv_arena *qkv_account_arena(const qkv_account *account) {
  return account->arena;
}

qkv_account *qkv_account_of(const qkv_arena *arena) {
  return qkv_arena_owner(arena);
}

const char *qkv_account_tenant(const qkv_account *account) {
  return account->tenant;
}

// ---- What it has ----

static uint64_t host_bytes(const qkv_account *account) {
  const qkv_arena_stats memory = qkv_arena_read(account->arena);
  return memory.bytes_used + memory.bytes_reserved;
}

uint64_t qkv_account_excess(const qkv_account *account) {
  const uint64_t bytes = host_bytes(account),
                 guaranteed = atomic_load_explicit(&account->host_guaranteed, memory_order_relaxed);
  return bytes > guaranteed ? bytes - guaranteed : 0;
}

bool qkv_account_is_over(const qkv_account *account) {
  return qkv_account_excess(account) > 0;
}

bool qkv_account_is_over_ssd(const qkv_account *account) {
  return atomic_load_explicit(&account->stored, memory_order_relaxed) >
         atomic_load_explicit(&account->ssd_guaranteed, memory_order_relaxed);
}

qkv_status qkv_account_open(qkv_account *account, qkv_error *error) {
  const uint64_t most = atomic_load_explicit(&account->sessions_max, memory_order_relaxed);
  const uint64_t open = atomic_load_explicit(&account->sessions, memory_order_relaxed);
  if (open >= most)
    return qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "quota sessions of tenant %s is %" PRIu64 ", %" PRIu64 " are open",
                    account->tenant, most, open);
  atomic_fetch_add_explicit(&account->sessions, 1, memory_order_relaxed);
  return QKV_OK;
}

void qkv_account_close(qkv_account *account) {
  const uint64_t before = atomic_fetch_sub_explicit(&account->sessions, 1, memory_order_relaxed);
  assert(before > 0);
  (void)before;
}

void qkv_account_add_evictable(qkv_account *account) {
  atomic_fetch_add_explicit(&account->evictable, 1, memory_order_relaxed);
}

void qkv_account_drop_evictable(qkv_account *account) {
  const uint64_t before = atomic_fetch_sub_explicit(&account->evictable, 1, memory_order_relaxed);
  assert(before > 0);
  (void)before;
}

uint64_t qkv_account_evictable(const qkv_account *account) {
  return atomic_load_explicit(&account->evictable, memory_order_relaxed);
}

void qkv_account_add_object(qkv_account *account) {
  atomic_fetch_add_explicit(&account->objects, 1, memory_order_relaxed);
}

void qkv_account_drop_object(qkv_account *account) {
  const uint64_t before = atomic_fetch_sub_explicit(&account->objects, 1, memory_order_relaxed);
  assert(before > 0);
  (void)before;
}

uint64_t qkv_account_objects(const qkv_account *account) {
  return atomic_load_explicit(&account->objects, memory_order_relaxed);
}

bool qkv_account_claim_ssd(qkv_account *account, uint64_t bytes) {
  if (account == NULL) return true;
  const uint64_t most = atomic_load_explicit(&account->ssd_max, memory_order_relaxed);
  uint64_t stored = atomic_load_explicit(&account->stored, memory_order_relaxed);
  do {
    if (stored <= most && bytes <= most - stored) continue;
    atomic_store_explicit(&account->ssd_full, true, memory_order_relaxed);
    atomic_store_explicit(&account->accounts->any_full, true, memory_order_relaxed);
    return false;
  } while (!atomic_compare_exchange_weak_explicit(&account->stored, &stored, stored + bytes, memory_order_relaxed,
                                                  memory_order_relaxed));
  return true;
}

void qkv_account_add_ssd(qkv_account *account, uint64_t bytes) {
  if (account != NULL) atomic_fetch_add_explicit(&account->stored, bytes, memory_order_relaxed);
}

void qkv_account_drop_ssd(qkv_account *account, uint64_t bytes) {
  if (account == NULL || bytes == 0) return;
  const uint64_t before = atomic_fetch_sub_explicit(&account->stored, bytes, memory_order_relaxed);
  assert(before >= bytes);
  (void)before;
  atomic_store_explicit(&account->ssd_full, false, memory_order_relaxed);
}

bool qkv_account_is_full_ssd(const qkv_account *account) {
  return atomic_load_explicit(&account->ssd_full, memory_order_relaxed);
}

qkv_account *qkv_accounts_full_ssd(qkv_accounts *accounts) {
  if (!atomic_exchange_explicit(&accounts->any_full, false, memory_order_relaxed)) return NULL;
  qkv_account *full = NULL;
  pthread_mutex_lock(&accounts->lock);
  for (qkv_account *account = accounts->all; account != NULL; account = account->hh.next) {
    if (!qkv_account_is_full_ssd(account)) continue;
    if (full != NULL) atomic_store_explicit(&accounts->any_full, true, memory_order_relaxed);  // one more
    if (full == NULL || account->told_full < full->told_full) full = account;
  }
  if (full != NULL) {
    full->told_full = ++accounts->turns;
    full->references++;
  }
  pthread_mutex_unlock(&accounts->lock);
  return full;
}

bool qkv_account_claim_gpu(qkv_account *account, uint64_t bytes) {
  const uint64_t most = atomic_load_explicit(&account->gpu_max, memory_order_relaxed);
  uint64_t copied = atomic_load_explicit(&account->copied, memory_order_relaxed);
  do {
    if (copied > most || bytes > most - copied) return false;
  } while (!atomic_compare_exchange_weak_explicit(&account->copied, &copied, copied + bytes, memory_order_relaxed,
                                                  memory_order_relaxed));
  return true;
}

void qkv_account_drop_gpu(qkv_account *account, uint64_t bytes) {
  const uint64_t before = atomic_fetch_sub_explicit(&account->copied, bytes, memory_order_relaxed);
  assert(before >= bytes);
  (void)before;
}

bool qkv_account_fits_gpu(const qkv_account *account, uint64_t bytes) {
  const uint64_t most = atomic_load_explicit(&account->gpu_max, memory_order_relaxed);
  const uint64_t copied = atomic_load_explicit(&account->copied, memory_order_relaxed);
  return copied <= most && bytes <= most - copied;
}

bool qkv_account_may_fit_gpu(const qkv_account *account, uint64_t bytes) {
  return bytes <= atomic_load_explicit(&account->gpu_max, memory_order_relaxed);
}

void qkv_account_wait_gpu(qkv_account *account, int64_t until_ms) {
  atomic_store_explicit(&account->gpu_wait_ms, until_ms, memory_order_relaxed);
}

bool qkv_account_waits_gpu(const qkv_account *account, int64_t now_ms) {
  return now_ms < atomic_load_explicit(&account->gpu_wait_ms, memory_order_relaxed);
}

static uint64_t limit_of(const _Atomic uint64_t *most) {
  const uint64_t value = atomic_load_explicit(most, memory_order_relaxed);
  return value == UINT64_MAX ? 0 : value;
}

qkv_account_usage qkv_account_read(const qkv_account *account) {
  return (qkv_account_usage){.limits = {.host_bytes = limit_of(&account->host_max),
                                        .host_guaranteed = limit_of(&account->host_guaranteed),
                                        .ssd_bytes = limit_of(&account->ssd_max),
                                        .ssd_guaranteed = limit_of(&account->ssd_guaranteed),
                                        .gpu_bytes = limit_of(&account->gpu_max),
                                        .sessions = limit_of(&account->sessions_max)},
                             .host_bytes = host_bytes(account),
                             .ssd_bytes = atomic_load_explicit(&account->stored, memory_order_relaxed),
                             .gpu_bytes = atomic_load_explicit(&account->copied, memory_order_relaxed),
                             .sessions = atomic_load_explicit(&account->sessions, memory_order_relaxed)};
}

bool qkv_accounts_read(qkv_accounts *accounts, const char *tenant, qkv_account_usage *usage) {
  const qkv_account *account = NULL;
  *usage = (qkv_account_usage){0};
  pthread_mutex_lock(&accounts->lock);
  HASH_FIND_STR(accounts->all, tenant, account);
  if (account != NULL) *usage = qkv_account_read(account);
  pthread_mutex_unlock(&accounts->lock);
  return account != NULL;
}

// ---- All of them ----

// With the lock.
static size_t copy_names(account_walk *walk, char names[AT_ONCE][QKV_NAME_MAX + 1]) {
  size_t count = 0;
  for (; count < AT_ONCE && walk->next != NULL; count++) {
    memcpy(names[count], walk->next->tenant, sizeof walk->next->tenant);
    walk->next = --walk->left > 0 ? walk->next->hh.next : NULL;
  }
  return count;
}

void qkv_accounts_each(qkv_accounts *accounts, void (*fn)(void *context, const char *tenant), void *context) {
  char names[AT_ONCE][QKV_NAME_MAX + 1];
  pthread_mutex_lock(&accounts->lock);
  account_walk walk = {.next = accounts->all, .left = HASH_COUNT(accounts->all)};
  LL_PREPEND2(accounts->walks, &walk, further);
  while (walk.next != NULL) {
    const size_t count = copy_names(&walk, names);
    pthread_mutex_unlock(&accounts->lock);
    for (size_t i = 0; i < count; i++) fn(context, names[i]);
    if (count == AT_ONCE) (void)nanosleep(&(struct timespec){.tv_nsec = PAUSE_NS}, NULL);
    pthread_mutex_lock(&accounts->lock);
  }
  LL_DELETE2(accounts->walks, &walk, further);
  pthread_mutex_unlock(&accounts->lock);
}
