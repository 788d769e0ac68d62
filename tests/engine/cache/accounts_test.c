// Accounts: a tenant's usage is counted once, and never exceeds its limits.
#include "engine/cache/accounts.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

static qkv_account_limits limits_now;

static void limits(void *context, const char *tenant, qkv_account_limits *out) {
  (void)context;
  if (strncmp(tenant, "limited", 7) == 0) *out = limits_now;
}

static void accounts_come_and_go(void **state) {
  (void)state;
  qkv_arena *arena = qkv_arena_create("memory-budget", 1 << 20);
  qkv_accounts *accounts = qkv_accounts_create(arena, limits, NULL);
  qkv_account_usage usage;
  limits_now = (qkv_account_limits){.host_bytes = 4096, .host_guaranteed = 1024, .sessions = 2};
  qkv_account *a = qkv_accounts_join(accounts, "limited"), *again = qkv_accounts_join(accounts, "limited");
  qkv_account *b = qkv_accounts_join(accounts, "other");
  assert_ptr_equal(a, again);
  assert_ptr_not_equal(a, b);
  qkv_error error = {0};
  assert_int_equal(qkv_account_open(a, &error), QKV_OK);
  assert_int_equal(qkv_account_open(a, &error), QKV_OK);
  assert_int_equal(qkv_account_open(a, &error), QKV_RESOURCE_EXHAUSTED);
  assert_string_equal(error.text, "quota sessions of tenant limited is 2, 2 are open");
  assert_int_equal(qkv_arena_reserve(qkv_account_arena(a), 1024, NULL), QKV_OK);
  assert_false(qkv_account_is_over(a));
  assert_int_equal(qkv_arena_reserve(qkv_account_arena(a), 1, NULL), QKV_OK);
  assert_true(qkv_account_is_over(a));
  assert_true(qkv_accounts_read(accounts, "limited", &usage));
  assert_int_equal(usage.host_bytes, 1025);
  assert_int_equal(usage.sessions, 2);
  // A limit below the usage: nothing more, until the usage is below it.
  limits_now = (qkv_account_limits){.host_bytes = 512};
  qkv_accounts_refresh(accounts);
  error = (qkv_error){0};
  assert_int_equal(qkv_arena_reserve(qkv_account_arena(a), 1, &error), QKV_RESOURCE_EXHAUSTED);
  assert_non_null(strstr(error.text, "quota host_bytes of tenant limited is 512 bytes, 1025 in use"));
  assert_int_equal(qkv_account_open(a, NULL), QKV_OK);
  qkv_arena_unreserve(qkv_account_arena(a), 1025);
  assert_int_equal(qkv_arena_reserve(qkv_account_arena(a), 512, NULL), QKV_OK);
  qkv_arena_unreserve(qkv_account_arena(a), 512);
  for (int i = 0; i < 3; i++) qkv_account_close(a);
  qkv_account_unref(&a);
  assert_true(qkv_accounts_read(accounts, "limited", &usage));
  qkv_account_unref(&again);
  assert_false(qkv_accounts_read(accounts, "limited", &usage));
  qkv_account_unref(&b);
  qkv_accounts_destroy(&accounts);
  qkv_arena_destroy(&arena);
}

static void the_ssd_has_a_ceiling(void **state) {
  (void)state;
  qkv_arena *arena = qkv_arena_create("memory-budget", 1 << 20);
  qkv_accounts *accounts = qkv_accounts_create(arena, limits, NULL);
  limits_now = (qkv_account_limits){.ssd_bytes = 100, .ssd_guaranteed = 10};
  qkv_account *a = qkv_accounts_join(accounts, "limited");
  assert_true(qkv_account_claim_ssd(a, 10));
  assert_false(qkv_account_is_over_ssd(a));
  assert_true(qkv_account_claim_ssd(a, 90));
  assert_true(qkv_account_is_over_ssd(a));
  assert_null(qkv_accounts_full_ssd(accounts));
  assert_false(qkv_account_claim_ssd(a, 1));
  assert_true(qkv_account_is_full_ssd(a));
  qkv_account *full = qkv_accounts_full_ssd(accounts);
  assert_ptr_equal(full, a);
  qkv_account_unref(&full);
  assert_null(qkv_accounts_full_ssd(accounts));  // until it is refused again
  qkv_account_drop_ssd(a, 50);
  assert_false(qkv_account_is_full_ssd(a));
  assert_true(qkv_account_claim_ssd(a, 50));
  qkv_account_add_ssd(a, 5);  // found at a start: counted whatever the limit
  qkv_account_drop_ssd(a, 105);
  qkv_account_unref(&a);
  qkv_accounts_destroy(&accounts);
  qkv_arena_destroy(&arena);
}

static void gpus_have_a_ceiling(void **state) {
  (void)state;
  qkv_arena *arena = qkv_arena_create("memory-budget", 1 << 20);
  qkv_accounts *accounts = qkv_accounts_create(arena, limits, NULL);
  limits_now = (qkv_account_limits){.gpu_bytes = 100};
  qkv_account *a = qkv_accounts_join(accounts, "limited");
  assert_true(qkv_account_claim_gpu(a, 60));
  assert_true(qkv_account_fits_gpu(a, 40));
  assert_false(qkv_account_fits_gpu(a, 41));
  assert_false(qkv_account_claim_gpu(a, 41));
  assert_true(qkv_account_may_fit_gpu(a, 100));
  assert_false(qkv_account_may_fit_gpu(a, 101));
  assert_int_equal(qkv_account_read(a).gpu_bytes, 60);
  assert_int_equal(qkv_account_read(a).limits.gpu_bytes, 100);
  qkv_account_wait_gpu(a, 5);
  assert_true(qkv_account_waits_gpu(a, 4));
  assert_false(qkv_account_waits_gpu(a, 5));
  limits_now = (qkv_account_limits){.gpu_bytes = 50};
  qkv_accounts_refresh(accounts);
  assert_false(qkv_account_waits_gpu(a, 4));
  assert_false(qkv_account_fits_gpu(a, 0));
  qkv_account_drop_gpu(a, 60);
  qkv_account_unref(&a);
  qkv_accounts_destroy(&accounts);
  qkv_arena_destroy(&arena);
}

// One of which nothing can be deleted stays full, and does not keep others from their turn.
static void full_ones_take_turns(void **state) {
  (void)state;
  static const char *const tenants[] = {"limited1", "limited2", "limited3"};
  enum { TENANTS = 3 };
  qkv_arena *arena = qkv_arena_create("memory-budget", 1 << 20);
  qkv_accounts *accounts = qkv_accounts_create(arena, limits, NULL);
  qkv_account *all[TENANTS];
  int turns[TENANTS] = {0};
  limits_now = (qkv_account_limits){.ssd_bytes = 100};
  for (int i = 0; i < TENANTS; i++) {
    all[i] = qkv_accounts_join(accounts, tenants[i]);
    assert_false(qkv_account_claim_ssd(all[i], 101));
  }
  for (int turn = 0; turn < 2 * TENANTS; turn++) {
    qkv_account *full = qkv_accounts_full_ssd(accounts);
    for (int i = 0; i < TENANTS; i++) turns[i] += full == all[i];
    qkv_account_unref(&full);
  }
  for (int i = 0; i < TENANTS; i++) {
    assert_int_equal(turns[i], 2);
    qkv_account_unref(&all[i]);
  }
  qkv_accounts_destroy(&accounts);
  qkv_arena_destroy(&arena);
}

// ---- Threads ----

enum { THREADS = 4, ROUNDS = 20000, CEILING = 5 * 64 };

typedef struct worker {
  qkv_accounts *accounts;
  int over, refused;
} worker;

static void *contend(void *context) {
  worker *own = context;
  for (int i = 0; i < ROUNDS; i++) {
    qkv_account *account = qkv_accounts_join(own->accounts, "limited");
    const bool claimed = qkv_account_claim_ssd(account, 128);
    const bool reserved = qkv_arena_reserve(qkv_account_arena(account), 128, NULL) == QKV_OK;
    const qkv_account_usage usage = qkv_account_read(account);
    own->over += usage.host_bytes > CEILING || usage.ssd_bytes > CEILING;
    own->refused += !claimed;
    if (reserved) qkv_arena_unreserve(qkv_account_arena(account), 128);
    if (claimed) qkv_account_drop_ssd(account, 128);
    qkv_account_unref(&account);
  }
  return NULL;
}

static void threads_stay_below_the_ceilings(void **state) {
  (void)state;
  qkv_arena *arena = qkv_arena_create("memory-budget", 1 << 20);
  qkv_accounts *accounts = qkv_accounts_create(arena, limits, NULL);
  limits_now = (qkv_account_limits){.ssd_bytes = CEILING, .host_bytes = CEILING};
  worker workers[THREADS];
  pthread_t threads[THREADS];
  for (int i = 0; i < THREADS; i++) {
    workers[i] = (worker){.accounts = accounts};
    assert_int_equal(pthread_create(&threads[i], NULL, contend, &workers[i]), 0);
  }
  for (int i = 0; i < THREADS; i++) {
    assert_int_equal(pthread_join(threads[i], NULL), 0);
    assert_int_equal(workers[i].over, 0);
  }
  qkv_accounts_destroy(&accounts);
  assert_int_equal(qkv_arena_read(arena).bytes_reserved, 0);
  qkv_arena_destroy(&arena);
}

// A walk over all of them, on which accounts go and come.
enum { MANY = 1000, GO = 400, STAY = 900 };  // those between the latter go

typedef struct tour {
  qkv_accounts *accounts;
  qkv_account *all[MANY], *more;
  bool seen[MANY];
  size_t count;
} tour;

// With the lock it would wait for ever. Accounts that come later in the walk go; one that is made may be visited.
static void visit(void *context, const char *tenant) {
  tour *on = context;
  int number;
  if (strcmp(tenant, "late") == 0) return;
  assert_int_equal(sscanf(tenant, "tenant-%d", &number), 1);
  assert_false(on->seen[number]);
  on->seen[number] = true;
  on->count++;
  if (on->count != 1) return;
  on->more = qkv_accounts_join(on->accounts, "late");
  for (int i = GO; i < STAY; i++) qkv_account_unref(&on->all[i]);
}

static void a_walk_gives_the_lock_to_others(void **state) {
  (void)state;
  qkv_arena *arena = qkv_arena_create("memory-budget", 1 << 20);
  qkv_accounts *accounts = qkv_accounts_create(arena, NULL, NULL);
  tour on = {.accounts = accounts};
  for (int i = 0; i < MANY; i++) {
    char name[32];
    (void)snprintf(name, sizeof name, "tenant-%d", i);
    on.all[i] = qkv_accounts_join(accounts, name);
  }
  qkv_accounts_each(accounts, visit, &on);
  for (int i = 0; i < GO; i++) assert_true(on.seen[i]);
  for (int i = STAY; i < MANY; i++) assert_true(on.seen[i]);
  assert_true(on.count <= GO + MANY - STAY);
  for (int i = 0; i < MANY; i++) qkv_account_unref(&on.all[i]);
  qkv_account_unref(&on.more);
  qkv_accounts_destroy(&accounts);
  qkv_arena_destroy(&arena);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(accounts_come_and_go),
      cmocka_unit_test(the_ssd_has_a_ceiling),
      cmocka_unit_test(gpus_have_a_ceiling),
      cmocka_unit_test(full_ones_take_turns),
      cmocka_unit_test(threads_stay_below_the_ceilings),
      cmocka_unit_test(a_walk_gives_the_lock_to_others),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
