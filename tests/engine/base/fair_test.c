// Fair queues: shares by weight, whatever the number of jobs, and urgent ones first.
#include "engine/base/fair.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

static void nothing(void *context) {
  (void)context;
}

static bool push(qkv_fair *fair, uint64_t flow, uint32_t weight, bool urgent, uintptr_t tag) {
  const qkv_fair_job job = {
      .run = nothing, .context = (void *)tag, .share = {.flow = flow, .weight = weight, .urgent = urgent}};
  return qkv_fair_push(fair, &job) == QKV_OK;
}

static uintptr_t pop(qkv_fair *fair, uint64_t ns) {
  const qkv_fair_job job = qkv_fair_pop(fair);
  qkv_fair_done(fair, &job, ns);
  return (uintptr_t)job.context;
}

static void one_flow_is_first_come_first_served(void **state) {
  (void)state;
  qkv_fair *fair = qkv_fair_create(8, 0);
  for (uintptr_t i = 0; i < 8; i++) assert_true(push(fair, 0, 0, false, i));
  assert_false(push(fair, 1, 0, true, 9));
  assert_int_equal(qkv_fair_length(fair), 8);
  for (uintptr_t i = 0; i < 8; i++) assert_int_equal(pop(fair, 1000 * (8 - i)), i);
  qkv_fair_destroy(&fair);
}

// All of a flow's jobs that are taken; the last one is not.
static int push_all(qkv_fair *fair, uint64_t flow) {
  const qkv_fair_job job = {.run = nothing, .share = {.flow = flow}};
  int count = 0;
  qkv_status status;
  while ((status = qkv_fair_push(fair, &job)) == QKV_OK) count++;
  assert_int_equal(status, qkv_fair_length(fair) >= 64 ? QKV_RESOURCE_EXHAUSTED : QKV_UNAVAILABLE);
  return count;
}

static void a_flow_leaves_places_to_others(void **state) {
  (void)state;
  static const int expected[] = {48, 12, 3, 1, 0};
  qkv_fair *fair = qkv_fair_create(64, 0);
  for (uint64_t i = 0; i < 5; i++) assert_int_equal(push_all(fair, i + 1), expected[i]);
  for (int i = 0; i < 64; i++) (void)pop(fair, 1000);
  for (uint64_t i = 0; i < 2; i++) assert_int_equal(push_all(fair, i + 1), expected[i]);
  const qkv_fair_job rest = {.run = nothing, .share = {.flow = 1, .again = true}};
  assert_int_equal(qkv_fair_push(fair, &rest), QKV_OK);
  assert_int_equal(push_all(fair, 0), 3);  // the owner's
  qkv_fair_destroy(&fair);
}

// A long job that is queued again where all places are taken would else keep its thread from those that wait.
static void a_full_queue_takes_jobs_that_have_run(void **state) {
  (void)state;
  qkv_fair *fair = qkv_fair_create(64, 0);
  assert_true(push(fair, 1, 0, false, 1));
  qkv_fair_job rest = qkv_fair_pop(fair);
  for (uint64_t flow = 1; flow < 5; flow++) (void)push_all(fair, flow);
  assert_int_equal(qkv_fair_length(fair), 64);
  rest.share.again = true;
  assert_int_equal(qkv_fair_push(fair, &rest), QKV_OK);
  qkv_fair_done(fair, &rest, 100000000);
  assert_int_equal(push_all(fair, 5), 0);
  const qkv_fair_job next = qkv_fair_pop(fair);
  assert_true(next.share.flow != 1);
  qkv_fair_done(fair, &next, 1000);
  for (int i = 0; i < QKV_FAIR_AGAIN; i++) assert_int_equal(qkv_fair_push(fair, &rest), QKV_OK);
  assert_int_equal(qkv_fair_push(fair, &rest), QKV_RESOURCE_EXHAUSTED);
  while (qkv_fair_length(fair) > 0) (void)pop(fair, 1000);
  qkv_fair_destroy(&fair);
}

static void a_flow_alone_has_three_quarters(void **state) {
  (void)state;
  for (size_t places = 1; places < 20; places++) {
    qkv_fair *fair = qkv_fair_create(places, 0);
    size_t count = 0;
    while (push(fair, 1, 0, false, 1)) count++;
    assert_true(count >= 1 && count >= places * 3 / 4 && count <= (places * 3 + 3) / 4);
    qkv_fair_destroy(&fair);
  }
}

static void a_flood_does_not_hold_others_up(void **state) {
  (void)state;
  qkv_fair *fair = qkv_fair_create(1024, 0);
  for (uintptr_t i = 0; i < 500; i++) assert_true(push(fair, 1, 0, false, 1));
  for (int i = 0; i < 10; i++) (void)pop(fair, 1000000);
  assert_true(push(fair, 2, 0, false, 2));
  assert_int_equal(pop(fair, 1000000), 2);  // it has had nothing yet
  qkv_fair_destroy(&fair);
}

// Busy all the time, with jobs of `cost`; shares of the time in what `rounds` jobs take.
static void share_out(const uint32_t *weights, const uint64_t *costs, double *shares) {
  enum { FLOWS = 3, ROUNDS = 6000 };
  qkv_fair *fair = qkv_fair_create(64, 0);
  double sums[FLOWS] = {0}, all = 0;
  for (uintptr_t flow = 0; flow < FLOWS; flow++) {
    for (int i = 0; i < (flow == 0 ? 20 : 2); i++) assert_true(push(fair, flow, weights[flow], false, flow));
  }
  for (int i = 0; i < ROUNDS; i++) {
    const qkv_fair_job job = qkv_fair_pop(fair);
    const uintptr_t flow = (uintptr_t)job.context;
    qkv_fair_done(fair, &job, costs[flow]);
    sums[flow] += (double)costs[flow];
    all += (double)costs[flow];
    assert_true(push(fair, flow, weights[flow], false, flow));
  }
  for (int i = 0; i < FLOWS; i++) shares[i] = sums[i] / all;
  qkv_fair_destroy(&fair);
}

static void time_is_shared_by_weight_and_not_by_jobs(void **state) {
  (void)state;
  double shares[3];
  share_out((const uint32_t[]){100, 100, 100}, (const uint64_t[]){10000000, 100000, 1000000}, shares);
  for (int i = 0; i < 3; i++) assert_true(shares[i] > 0.9 / 3 && shares[i] < 1.1 / 3);
  share_out((const uint32_t[]){100, 300, 600}, (const uint64_t[]){1000000, 50000, 3000000}, shares);
  assert_true(shares[0] > 0.09 && shares[0] < 0.11);
  assert_true(shares[1] > 0.27 && shares[1] < 0.33);
  assert_true(shares[2] > 0.54 && shares[2] < 0.66);
}

static void idleness_saves_nothing_up(void **state) {
  (void)state;
  qkv_fair *fair = qkv_fair_create(64, 0);
  for (int i = 0; i < 1000; i++) {
    assert_true(push(fair, 1, 0, false, 1));
    (void)pop(fair, 1000000);
  }
  int first = 0;
  for (int i = 0; i < 20; i++) assert_true(push(fair, 1, 0, false, 1));
  for (int i = 0; i < 20; i++) assert_true(push(fair, 2, 0, false, 2));
  for (int i = 0; i < 20; i++) first += pop(fair, 1000000) == 2;
  assert_true(first >= 8 && first <= 14);
  qkv_fair_destroy(&fair);
}

static void urgent_jobs_go_first_and_starve_nobody(void **state) {
  (void)state;
  qkv_fair *fair = qkv_fair_create(64, 0);
  assert_true(push(fair, 1, 0, false, 1));
  assert_true(push(fair, 1, 0, false, 1));
  for (int i = 0; i < 20; i++) assert_true(push(fair, 2, 0, true, 2));
  for (int i = 0; i < QKV_FAIR_URGENT; i++) assert_int_equal(pop(fair, 1000), 2);
  assert_int_equal(pop(fair, 1000), 1);
  for (int i = 0; i < QKV_FAIR_URGENT; i++) assert_int_equal(pop(fair, 1000), 2);
  assert_int_equal(pop(fair, 1000), 1);
  for (int i = 0; i < 4; i++) assert_int_equal(pop(fair, 1000), 2);
  qkv_fair_destroy(&fair);
}

// ---- Threads ----

// Takes jobs while one may start; tallies[flow] of them.
static void take_all(qkv_fair *fair, int *tallies) {
  while (qkv_fair_ready(fair)) tallies[(uintptr_t)qkv_fair_pop(fair).context]++;
}

static void end_one(qkv_fair *fair, uint64_t flow) {
  qkv_fair_done(fair, &(qkv_fair_job){.share = {.flow = flow}}, 1000);
}

static void a_flow_has_no_more_threads_than_are_free(void **state) {
  (void)state;
  qkv_fair *fair = qkv_fair_create(1024, 16);
  static const int expected[] = {8, 4, 2, 1, 1};  // each after those before
  int running[7] = {0};
  for (uintptr_t flow = 0; flow < 5; flow++) {
    for (int i = 0; i < 20; i++) assert_true(push(fair, flow, 0, false, flow));
    take_all(fair, running);
    for (uintptr_t i = 0; i < 5; i++) assert_int_equal(running[i], i <= flow ? expected[i] : 0);
  }
  assert_true(push(fair, 5, 0, true, 5));
  assert_false(qkv_fair_ready(fair));  // there is no thread left
  end_one(fair, 0);
  take_all(fair, running);
  assert_int_equal(running[5], 1);  // the last free one is for a flow that has none
  end_one(fair, 0);
  assert_false(qkv_fair_ready(fair));
  assert_true(push(fair, 6, 0, false, 6));
  take_all(fair, running);
  assert_int_equal(running[6], 1);
  qkv_fair_destroy(&fair);
}

static void flows_that_come_together_have_as_many_threads(void **state) {
  (void)state;
  qkv_fair *fair = qkv_fair_create(64, 16);
  int running[2] = {0};
  for (uintptr_t i = 0; i < 40; i++) assert_true(push(fair, i % 2, 0, false, i % 2));
  take_all(fair, running);
  assert_int_equal(running[0] + running[1], 11);
  assert_in_range(running[0], 5, 6);
  qkv_fair_destroy(&fair);
}

static void urgent_jobs_do_not_get_more_threads(void **state) {
  (void)state;
  qkv_fair *fair = qkv_fair_create(64, 4);
  int running[3] = {0};
  for (int i = 0; i < 20; i++) assert_true(push(fair, 1, 0, true, 1));
  take_all(fair, running);
  assert_int_equal(running[1], 2);
  assert_true(push(fair, 2, 0, false, 2));  // goes past them
  take_all(fair, running);
  assert_int_equal(running[1], 2);
  assert_int_equal(running[2], 1);
  qkv_fair_destroy(&fair);
}

static void each_flow_gets_a_thread_where_there_are_few(void **state) {
  (void)state;
  for (size_t threads = 1; threads < 4; threads++) {
    qkv_fair *fair = qkv_fair_create(64, threads);
    for (uintptr_t i = 0; i < 30; i++) assert_true(push(fair, i % 3, 0, i % 2 == 0, i));
    for (int i = 0; i < 30; i++) {
      assert_true(qkv_fair_ready(fair));
      (void)pop(fair, 1000);
    }
    assert_false(qkv_fair_ready(fair));
    assert_int_equal(qkv_fair_length(fair), 0);
    qkv_fair_destroy(&fair);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(one_flow_is_first_come_first_served),
      cmocka_unit_test(a_flow_leaves_places_to_others),
      cmocka_unit_test(a_full_queue_takes_jobs_that_have_run),
      cmocka_unit_test(a_flow_alone_has_three_quarters),
      cmocka_unit_test(a_flood_does_not_hold_others_up),
      cmocka_unit_test(time_is_shared_by_weight_and_not_by_jobs),
      cmocka_unit_test(idleness_saves_nothing_up),
      cmocka_unit_test(urgent_jobs_go_first_and_starve_nobody),
      cmocka_unit_test(a_flow_has_no_more_threads_than_are_free),
      cmocka_unit_test(flows_that_come_together_have_as_many_threads),
      cmocka_unit_test(urgent_jobs_do_not_get_more_threads),
      cmocka_unit_test(each_flow_gets_a_thread_where_there_are_few),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
