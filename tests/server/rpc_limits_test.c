// A walk over the tenants of calls leaves the lock to others, and tenants that go meanwhile. Each has a flow of its
// own.
#include "server/rpc/limits.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

enum { KEPT = 4096, TENANTS = KEPT + 1000 };  // more than are kept without calls

typedef struct tour {
  qkvi_rpc_limits *limits;
  qkvi_rpc_place places[TENANTS], late;
  bool seen[TENANTS];
  size_t count;
} tour;

static void enter(qkvi_rpc_limits *limits, qkvi_rpc_place *place, const char *tenant) {
  assert_int_equal(qkvi_rpc_limits_enter(limits, place, QKVI_RPC_CALL, "peer", tenant, NULL), QKV_OK);
  assert_int_equal(qkvi_rpc_limits_spoken(limits, place, NULL), QKV_OK);
}

// With the lock it would wait for ever. Tenants that come later in the walk go; one that comes may be visited.
static void visit(void *context, const char *tenant) {
  tour *on = context;
  int number;
  if (strcmp(tenant, "late") == 0) return;
  assert_int_equal(sscanf(tenant, "tenant-%d", &number), 1);
  assert_false(on->seen[number]);
  on->seen[number] = true;
  if (++on->count != 1) return;
  enter(on->limits, &on->late, "late");
  for (int i = 50; i < TENANTS; i++) qkvi_rpc_limits_leave(on->limits, &on->places[i]);
}

static void a_walk_gives_the_lock_to_others(void **state) {
  (void)state;
  static tour on;
  on.limits = qkvi_rpc_limits_create(
      &(qkvi_rpc_limits_config){.calls_max = 2 * TENANTS, .control_max = 8, .connection_max = 2 * TENANTS});
  for (int i = 0; i < TENANTS; i++) {
    char name[32];
    (void)snprintf(name, sizeof name, "tenant-%d", i);
    enter(on.limits, &on.places[i], name);
  }
  qkvi_rpc_limits_each(on.limits, visit, &on);
  for (int i = 0; i < 50; i++) assert_true(on.seen[i]);
  assert_true(on.count >= KEPT - 1 && on.count < TENANTS);
  for (int i = 0; i < 50; i++) qkvi_rpc_limits_leave(on.limits, &on.places[i]);
  qkvi_rpc_limits_leave(on.limits, &on.late);
  qkvi_rpc_limits_destroy(&on.limits);
}

enum { FLOWS = QKV_FAIR_FLOWS - 1 };  // but the daemon's own

static void enter_all(qkvi_rpc_limits *limits, qkvi_rpc_place *places, const char *prefix) {
  for (int i = 0; i < FLOWS; i++) {
    char name[32];
    (void)snprintf(name, sizeof name, "%s-%d", prefix, i);
    enter(limits, &places[i], name);
  }
}

static void count_flows(qkvi_rpc_limits *limits, const qkvi_rpc_place *places, int *tenants) {
  memset(tenants, 0, QKV_FAIR_FLOWS * sizeof *tenants);
  for (int i = 0; i < FLOWS; i++) tenants[qkvi_rpc_limits_share(limits, &places[i]).flow % QKV_FAIR_FLOWS]++;
}

// By their hashes alone a few dozen tenants would have had some flow in common.
static void tenants_have_a_flow_each(void **state) {
  (void)state;
  static qkvi_rpc_place first[FLOWS], second[FLOWS], again;
  int tenants[QKV_FAIR_FLOWS];
  qkvi_rpc_limits *limits =
      qkvi_rpc_limits_create(&(qkvi_rpc_limits_config){.calls_max = 4096, .control_max = 8, .connection_max = 4096});
  enter_all(limits, first, "first");
  count_flows(limits, first, tenants);
  for (int i = 0; i < QKV_FAIR_FLOWS; i++) assert_int_equal(tenants[i], i > 0);
  enter(limits, &again, "first-0");
  assert_int_equal(qkvi_rpc_limits_share(limits, &again).flow, qkvi_rpc_limits_share(limits, &first[0]).flow);
  qkvi_rpc_limits_leave(limits, &again);
  enter_all(limits, second, "second");  // there are no others left
  count_flows(limits, second, tenants);
  for (int i = 0; i < QKV_FAIR_FLOWS; i++) assert_int_equal(tenants[i], i > 0);
  for (int i = 0; i < FLOWS; i++) qkvi_rpc_limits_leave(limits, &first[i]);
  enter_all(limits, first, "third");  // tenants without calls have none
  count_flows(limits, first, tenants);
  for (int i = 0; i < QKV_FAIR_FLOWS; i++) assert_int_equal(tenants[i], i > 0);
  for (int i = 0; i < FLOWS; i++) qkvi_rpc_limits_leave(limits, &first[i]);
  for (int i = 0; i < FLOWS; i++) qkvi_rpc_limits_leave(limits, &second[i]);
  qkvi_rpc_limits_destroy(&limits);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(a_walk_gives_the_lock_to_others),
                                     cmocka_unit_test(tenants_have_a_flow_each)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
