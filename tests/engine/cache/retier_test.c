// The policy of tiers on snapshots that are made up.
#include "engine/cache/retier.h"

#include <time.h>

#include "tests/engine/cache/fixture.h"

enum { HEADS = 2, GROUPS = 2 * QKV_PAGE_GROUPS };

// Schedules of the lanes: K and V of one head after the other.
typedef struct scene {
  qkv_schedule schedules[2 * HEADS];
  qkv_retier_snapshot snapshot;
} scene;

// Errors that fall by 4 a bit, on average over the coordinates, which have variances of their own.
static void fill_errors(const qkv_schedule *schedule, qkv_lane *lane, uint64_t *seed) {
  double variances[QKV_DIM_MAX];
  for (size_t c = 0; c < schedule->dim; c++) variances[c] = exp2(-(double)c / (1 + (double)(*seed % 64)));
  for (unsigned tier = 0; tier <= QKV_TIER_MAX; tier++) {
    double error = 0;
    for (size_t c = 0; c < schedule->dim; c++) {
      unsigned depth = 0;
      while (depth < QKV_DEPTH_MAX && schedule->reach[tier][depth + 1] > c) depth++;
      error += variances[c] * pow(4, -(double)depth);
    }
    lane->errors[tier] = (float)error;
  }
}

static void setup_scene(scene *s, size_t pages, uint64_t seed) {
  *s = (scene){.snapshot = {.kv_heads = HEADS,
                            .counted = true,
                            .first_position = 5,
                            .length = 5 + pages * QKV_PAGE_TOKENS,
                            .page_count = pages,
                            .lane_count = 2 * HEADS}};
  s->snapshot.pages = calloc(pages, sizeof *s->snapshot.pages);
  s->snapshot.lanes = calloc(2 * HEADS, sizeof *s->snapshot.lanes);
  s->snapshot.groups = calloc(pages * HEADS * GROUPS, sizeof *s->snapshot.groups);
  naive_random random = {seed};
  for (size_t i = 0; i < 2 * HEADS; i++) {
    qkv_schedule_uniform(&s->schedules[i], i % 2 ? 32 : 64);
    if (i >= 2) naive_schedule(&random, i % 2 ? 32 : 64, &s->schedules[i]);
    s->snapshot.lanes[i].dim = s->schedules[i].dim;
    s->snapshot.lanes[i].group_bytes = s->schedules[i].group_bytes;
    fill_errors(&s->schedules[i], &s->snapshot.lanes[i], &seed);
  }
  for (size_t i = 0; i < pages; i++) {
    s->snapshot.pages[i] = (qkv_retier_page){.index = i,
                                             .serial = 7 * i,
                                             .position = 5 + i * QKV_PAGE_TOKENS,
                                             .tokens = QKV_PAGE_TOKENS,
                                             .quiet_for = 1000};
  }
  for (size_t i = 0; i < pages * HEADS * GROUPS; i++) {
    qkv_retier_group *group = &s->snapshot.groups[i];
    group->most = group->tier = 32;
    group->peak = exp2f(-(float)random_below(&seed, 16));
    group->weight = group->peak * group->peak;
  }
}

static void teardown_scene(scene *s) {
  qkv_retier_snapshot_deinit(&s->snapshot);
}

static size_t group_bytes(const scene *s, size_t group, unsigned tier) {
  const size_t lane = group / GROUPS % HEADS * 2 + group / QKV_PAGE_GROUPS % 2;
  return qkv_schedule_group_bytes(&s->schedules[lane], tier);
}

static double error_of(const scene *s, size_t group, unsigned tier) {
  const size_t lane = group / GROUPS % HEADS * 2 + group / QKV_PAGE_GROUPS % 2;
  return (double)s->snapshot.lanes[lane].errors[tier];
}

static size_t group_count(const scene *s) {
  return s->snapshot.page_count * HEADS * GROUPS;
}

// The tiers that a plan leads to, of all groups.
static uint8_t *outcome(const scene *s, const qkv_retier_plan *plan) {
  uint8_t *tiers = malloc(group_count(s));
  assert_non_null(tiers);
  for (size_t i = 0; i < group_count(s); i++) tiers[i] = s->snapshot.groups[i].tier;
  for (size_t i = 0; i < plan->page_count; i++) {
    assert_true(plan->pages[i] < s->snapshot.page_count);
    memcpy(tiers + plan->pages[i] * HEADS * GROUPS, &plan->tiers[i * HEADS], (size_t)HEADS * GROUPS);
  }
  return tiers;
}

static uint64_t total_bytes(const scene *s, const uint8_t *tiers) {
  uint64_t bytes = 0;
  for (size_t i = 0; i < group_count(s); i++) bytes += group_bytes(s, i, tiers[i]);
  return bytes;
}

static double total_error(const scene *s, const uint8_t *tiers) {
  double error = 0;
  for (size_t i = 0; i < group_count(s); i++) {
    error += (double)s->snapshot.groups[i].weight * error_of(s, i, tiers[i]);
  }
  return error;
}

static uint8_t *decide(const scene *s, const qkv_retier_policy *policy, qkv_retier_plan *plan) {
  qkv_error error = {0};
  assert_int_equal(qkv_retier_policy_check(policy, &error), QKV_OK);
  if (qkv_retier_decide(&s->snapshot, policy, plan, &error) != QKV_OK) fail_msg("%s", error.text);
  uint8_t *tiers = outcome(s, plan);
  if (plan->page_count == plan->page_count_all && policy->end == 0 && policy->begin == 0) {
    assert_int_equal(plan->bytes_after, total_bytes(s, tiers));
  }
  return tiers;
}

static void adopt(scene *s, const uint8_t *tiers) {
  for (size_t i = 0; i < group_count(s); i++) s->snapshot.groups[i].tier = tiers[i];
}

static qkv_retier_policy budget_of(double bits) {
  qkv_retier_policy policy = QKV_RETIER_POLICY;
  policy.bits = bits;
  policy.sinks = 0;
  policy.hysteresis = 0;
  return policy;
}

static void limits_are_named(void **state) {
  (void)state;
  qkv_error error = {0};
  qkv_retier_policy policy = budget_of(9);
  assert_int_equal(qkv_retier_policy_check(&policy, &error), QKV_INVALID_ARGUMENT);
  assert_string_equal(error.text, "retier.bits is 9, allowed are 0 to 8");
  policy = budget_of(2);
  policy.hysteresis = 1;
  assert_int_equal(qkv_retier_policy_check(&policy, NULL), QKV_INVALID_ARGUMENT);
  policy = budget_of(0);
  policy.thresholds[2] = 0.5;
  error = (qkv_error){0};
  assert_int_equal(qkv_retier_policy_check(&policy, &error), QKV_INVALID_ARGUMENT);
  assert_string_equal(error.text, "retier.thresholds are not falling");
  policy = budget_of(0);
  policy.tiers[3] = 65;
  assert_int_equal(qkv_retier_policy_check(&policy, NULL), QKV_INVALID_ARGUMENT);

  scene s;
  qkv_retier_plan plan;
  setup_scene(&s, 2, 1);
  s.snapshot.counted = false;
  policy = budget_of(0);
  assert_int_equal(qkv_retier_decide(&s.snapshot, &policy, &plan, NULL), QKV_FAILED_PRECONDITION);
  teardown_scene(&s);
}

// Whatever the weights: the budget is met, spent but for less than one step, and nothing gets more than is held.
static void budgets_are_met_and_spent(void **state) {
  (void)state;
  for (uint64_t seed = 1; seed <= 40; seed++) {
    scene s;
    uint64_t random = seed;
    setup_scene(&s, 1 + random_below(&random, 30), seed);
    const bool alike = seed % 5 == 0;  // ties everywhere
    for (size_t i = 0; i < group_count(&s); i++) {
      if (alike) s.snapshot.groups[i].weight = 1;
      if (seed % 7 == 0 && i % 3 == 0) s.snapshot.groups[i].weight = 0;
      if (seed % 3 == 0) s.snapshot.groups[i].tier = s.snapshot.groups[i].most = (uint8_t)random_below(&random, 40);
    }
    for (double bits = 0.5; bits <= 5; bits += 0.375) {
      qkv_retier_plan plan;
      qkv_retier_policy policy = budget_of(bits);
      policy.hysteresis = seed % 2 == 0 ? 0.05 : 0;
      policy.tier_least = seed % 4 == 0 ? 0 : 4;
      uint8_t *tiers = decide(&s, &policy, &plan);
      uint64_t least = 0, most = 0, step = 0;
      for (size_t i = 0; i < group_count(&s); i++) {
        const qkv_retier_group *group = &s.snapshot.groups[i];
        const uint8_t floor_tier = policy.tier_least < group->most ? policy.tier_least : group->most;
        assert_true(tiers[i] <= group->most);
        least += group_bytes(&s, i, floor_tier);
        most += group_bytes(&s, i, group->most);
        const uint64_t all = group_bytes(&s, i, group->most) - group_bytes(&s, i, floor_tier);
        step = all > step ? all : step;
      }
      const uint64_t budget = (uint64_t)(bits * (double)plan.coordinates / 8), spent = total_bytes(&s, tiers);
      assert_int_equal(plan.coordinates, s.snapshot.page_count * HEADS * QKV_PAGE_TOKENS * (64 + 32));
      assert_true(spent <= (budget > least ? budget : least));
      if (policy.hysteresis == 0) assert_true(spent + step > (budget < most ? budget : most));
      free(tiers);
      qkv_retier_plan_deinit(&plan);
    }
    teardown_scene(&s);
  }
}

// A layer has the bits that its calibration would give it: all of the lanes' offsets at 2 bits, half at 1.5.
static void budgets_follow_the_calibration(void **state) {
  (void)state;
  scene s;
  setup_scene(&s, 20, 3);
  const struct { double bits, offset, budget; } cases[] = {{2, 0.5, 2.5}, {3, -0.75, 2.25}, {1.5, 1, 2}, {1, 1, 1}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    qkv_retier_plan given, even;
    const qkv_retier_policy policy = budget_of(cases[i].bits), same = budget_of(cases[i].budget);
    for (size_t lane = 0; lane < s.snapshot.lane_count; lane++)
      s.snapshot.lanes[lane].offset = (float)cases[i].offset;
    free(decide(&s, &policy, &given));
    for (size_t lane = 0; lane < s.snapshot.lane_count; lane++) s.snapshot.lanes[lane].offset = 0;
    free(decide(&s, &same, &even));
    assert_int_equal(given.bytes_after, even.bytes_after);
    qkv_retier_plan_deinit(&given);
    qkv_retier_plan_deinit(&even);
  }
  teardown_scene(&s);
}

// No other choice of tiers within the same bytes is better by more than what the last step and the keys' grain leave:
// the price bounds from below what any choice can reach (weak duality).
static void budgets_are_spent_well(void **state) {
  (void)state;
  for (uint64_t seed = 1; seed <= 12; seed++) {
    scene s;
    setup_scene(&s, 20, seed);
    const bool uniform = seed % 2 == 0;
    for (size_t i = 2; i < 2 * HEADS && uniform; i++) {
      qkv_schedule_uniform(&s.schedules[i], s.schedules[i].dim);
      fill_errors(&s.schedules[i], &s.snapshot.lanes[i], &(uint64_t){seed});
    }
    for (double bits = 1; bits <= 3.5; bits += 0.5) {
      qkv_retier_plan plan;
      const qkv_retier_policy policy = budget_of(bits);
      uint8_t *tiers = decide(&s, &policy, &plan);
      const double budget = (double)total_bytes(&s, tiers);
      double bound = 0;
      for (double price = 1e-12; price < 1e3; price *= 1.05) {
        double lower = -price * budget;
        for (size_t i = 0; i < group_count(&s); i++) {
          double best = INFINITY;
          for (unsigned tier = policy.tier_least; tier <= 32; tier++) {
            const double cost = (double)s.snapshot.groups[i].weight * error_of(&s, i, tier) +
                                price * (double)group_bytes(&s, i, tier);
            best = fmin(best, cost);
          }
          lower += best;
        }
        bound = fmax(bound, lower);
      }
      const double error = total_error(&s, tiers);
      assert_true(error >= bound * 0.999);
      assert_true(error <= bound * 1.02);
      // And far better than the same bytes evenly.
      uint8_t *even = malloc(group_count(&s));
      assert_non_null(even);
      memset(even, (int)(bits * QKV_TIER_BIT), group_count(&s));
      if (total_bytes(&s, even) <= total_bytes(&s, tiers)) assert_true(error <= total_error(&s, even));
      if (uniform && bits >= 2 && bits <= 2.5) assert_true(error < 0.7 * total_error(&s, even));
      free(even);
      free(tiers);
      qkv_retier_plan_deinit(&plan);
    }
    teardown_scene(&s);
  }
}

// Of two groups of one lane the heavier one has no fewer bits, but for the last step that fitted.
static void heavier_groups_have_no_fewer_bits(void **state) {
  (void)state;
  scene s;
  setup_scene(&s, 12, 3);
  qkv_retier_plan plan;
  const qkv_retier_policy policy = budget_of(2.2);
  uint8_t *tiers = decide(&s, &policy, &plan);
  for (size_t i = 0; i < group_count(&s); i++) {
    for (size_t j = 0; j < group_count(&s); j++) {
      if (i / QKV_PAGE_GROUPS % (2 * HEADS) != j / QKV_PAGE_GROUPS % (2 * HEADS)) continue;
      if (s.snapshot.groups[i].weight <= 1.05f * s.snapshot.groups[j].weight) continue;
      assert_true(tiers[i] >= tiers[j]);
    }
  }
  free(tiers);
  qkv_retier_plan_deinit(&plan);
  teardown_scene(&s);
}

static void protected_groups_stay(void **state) {
  (void)state;
  scene s;
  setup_scene(&s, 10, 4);
  qkv_retier_plan plan;
  qkv_retier_policy policy = budget_of(1);
  policy.sinks = 20;
  policy.recent = 40;
  policy.rest = 500;
  s.snapshot.pages[4].quiet_for = 499;
  for (size_t i = 0; i < GROUPS; i++) s.snapshot.groups[6 * HEADS * GROUPS + i].fixed = true;
  s.snapshot.groups[0].tier = 8;                   // a sink, held in full
  s.snapshot.groups[5 * HEADS * GROUPS].tier = 8;  // free, but light
  s.snapshot.groups[5 * HEADS * GROUPS].weight = 1e-12f;
  uint8_t *tiers = decide(&s, &policy, &plan);
  for (size_t i = 0; i < group_count(&s); i++) {
    const size_t page = i / GROUPS / HEADS, g = i % QKV_PAGE_GROUPS;
    const uint64_t begin = page * QKV_PAGE_TOKENS + g * QKV_GROUP_TOKENS, end = begin + QKV_GROUP_TOKENS;
    const bool held = begin < 20 || end > 640 - 40 || page == 4 || (page == 6 && i / GROUPS % HEADS == 0);
    assert_int_equal(tiers[i] == 32, held);
    if (!held) assert_int_equal(tiers[i], policy.tier_least);  // what is held has spent the budget
  }
  free(tiers);
  qkv_retier_plan_deinit(&plan);

  // Positions outside of the range are nobody's business.
  policy = budget_of(1);
  policy.begin = 5 + 70;
  policy.end = 5 + 200;
  tiers = decide(&s, &policy, &plan);
  for (size_t i = 0; i < group_count(&s); i++) {
    const size_t page = i / GROUPS / HEADS, g = i % QKV_PAGE_GROUPS;
    const uint64_t begin = page * QKV_PAGE_TOKENS + g * QKV_GROUP_TOKENS, end = begin + QKV_GROUP_TOKENS;
    if (begin >= 70 && end <= 200) continue;
    assert_int_equal(tiers[i], s.snapshot.groups[i].tier);
  }
  assert_int_equal(plan.coordinates, (uint64_t)7 * QKV_GROUP_TOKENS * HEADS * (64 + 32));
  assert_true(plan.bytes_after < plan.bytes_before);
  free(tiers);
  qkv_retier_plan_deinit(&plan);
  teardown_scene(&s);
}

// A plan leads to a state that the same policy leaves alone; small shifts of weight are not followed, large ones are.
static void plans_settle(void **state) {
  (void)state;
  scene s;
  setup_scene(&s, 16, 6);
  qkv_retier_plan plan;
  qkv_retier_policy policy = budget_of(2);
  policy.hysteresis = 0.05;
  uint8_t *tiers = decide(&s, &policy, &plan);
  adopt(&s, tiers);
  free(tiers);
  qkv_retier_plan_deinit(&plan);
  tiers = decide(&s, &policy, &plan);
  assert_int_equal(plan.page_count_all, 0);
  free(tiers);
  qkv_retier_plan_deinit(&plan);

  uint64_t seed = 9;
  for (size_t i = 0; i < group_count(&s); i++) {
    s.snapshot.groups[i].weight *= 1 + 0.02f * (float)random_below(&seed, 2);
  }
  tiers = decide(&s, &policy, &plan);
  assert_int_equal(plan.page_count_all, 0);
  free(tiers);
  qkv_retier_plan_deinit(&plan);
  policy.hysteresis = 0;
  tiers = decide(&s, &policy, &plan);
  free(tiers);
  qkv_retier_plan_deinit(&plan);

  policy.hysteresis = 0.05;
  for (size_t i = 0; i < (size_t)HEADS * GROUPS; i++) {
    s.snapshot.groups[3 * HEADS * GROUPS + i].weight *= 1e4f;
    s.snapshot.groups[9 * HEADS * GROUPS + i].weight *= 1e-6f;
  }
  tiers = decide(&s, &policy, &plan);
  assert_true(plan.page_count_all > 0);
  uint64_t before = 0, after = 0;
  for (size_t i = 0; i < (size_t)HEADS * GROUPS; i++) {
    before += s.snapshot.groups[3 * HEADS * GROUPS + i].tier;
    after += tiers[3 * HEADS * GROUPS + i];
    assert_true(tiers[9 * HEADS * GROUPS + i] <= s.snapshot.groups[9 * HEADS * GROUPS + i].tier);
  }
  assert_true(after > before);
  free(tiers);
  qkv_retier_plan_deinit(&plan);
  teardown_scene(&s);
}

// Step by step, the same as at once; cuts come first.
static void steps_are_bounded(void **state) {
  (void)state;
  scene s;
  setup_scene(&s, 23, 7);
  qkv_retier_plan plan;
  qkv_retier_policy policy = budget_of(2);
  uint8_t *at_once = decide(&s, &policy, &plan);
  const size_t all = plan.page_count_all;
  qkv_retier_plan_deinit(&plan);
  policy.pages_max = 5;
  size_t steps = 0;
  for (;; steps++) {
    uint8_t *tiers = decide(&s, &policy, &plan);
    assert_true(plan.page_count <= 5);
    assert_true(plan.page_count_all >= plan.page_count);
    const size_t left = plan.page_count_all;
    assert_true(total_bytes(&s, tiers) <= plan.bytes_before);
    adopt(&s, tiers);
    free(tiers);
    qkv_retier_plan_deinit(&plan);
    if (left == 0) break;
    assert_true(steps < all);
  }
  assert_int_equal(steps, (all + 4) / 5);
  for (size_t i = 0; i < group_count(&s); i++) assert_int_equal(s.snapshot.groups[i].tier, at_once[i]);
  free(at_once);
  teardown_scene(&s);
}

static void thresholds_go_by_the_best_token(void **state) {
  (void)state;
  scene s;
  setup_scene(&s, 1, 8);
  qkv_retier_plan plan;
  qkv_retier_policy policy = budget_of(0);
  policy.thresholds[0] = 0.1;
  policy.thresholds[1] = 0.01;
  policy.thresholds[2] = 0.001;
  policy.hysteresis = 0.1;
  static const struct {
    float peak;
    uint8_t tier, most, expected;
  } cases[] = {
      {0.5f, 32, 32, 32},   {0.05f, 32, 32, 24},  {0.005f, 32, 32, 16},  {0.0005f, 32, 32, 8},
      {0.095f, 32, 32, 32},  // not a tenth below
      {0.085f, 32, 32, 24}, {0.105f, 24, 32, 24}, {0.115f, 24, 32, 32},  {0.5f, 8, 20, 20},
      {0.5f, 8, 8, 8},      {0.0000f, 32, 32, 8}, {0.0105f, 16, 32, 16}, {0.012f, 16, 32, 24},
  };
  enum { CASES = sizeof cases / sizeof *cases };
  for (size_t i = 0; i < CASES; i++) {
    s.snapshot.groups[i].peak = cases[i].peak;
    s.snapshot.groups[i].tier = cases[i].tier;
    s.snapshot.groups[i].most = cases[i].most;
  }
  s.snapshot.groups[CASES].peak = 0;
  s.snapshot.groups[CASES].unseen = true;
  uint8_t *tiers = decide(&s, &policy, &plan);
  for (size_t i = 0; i < CASES; i++) {
    if (tiers[i] != cases[i].expected) fail_msg("case %zu: tier %u", i, tiers[i]);
  }
  assert_int_equal(tiers[CASES], 32);
  free(tiers);
  qkv_retier_plan_deinit(&plan);
  teardown_scene(&s);
}

static void tiers_are_set_without_a_policy(void **state) {
  (void)state;
  scene s;
  setup_scene(&s, 4, 9);
  qkv_retier_plan plan;
  s.snapshot.groups[HEADS * GROUPS].tier = 4;
  qkv_retier_at_most(&s.snapshot, 5 + 64, 5 + 128, 12, &plan);
  uint8_t *tiers = outcome(&s, &plan);
  for (size_t i = 0; i < group_count(&s); i++) {
    assert_int_equal(tiers[i], i / GROUPS / HEADS != 1 ? 32 : i == (size_t)HEADS * GROUPS ? 4 : 12);
  }
  adopt(&s, tiers);
  free(tiers);
  qkv_retier_plan_deinit(&plan);

  assert_int_equal(qkv_retier_at_least(&s.snapshot, 0, 0, 20, &plan, NULL), QKV_OK);
  tiers = outcome(&s, &plan);
  for (size_t i = 0; i < group_count(&s); i++) assert_int_equal(tiers[i], i / GROUPS / HEADS != 1 ? 32 : 20);
  free(tiers);
  qkv_retier_plan_deinit(&plan);

  for (size_t i = 0; i < (size_t)HEADS * GROUPS; i++) s.snapshot.groups[HEADS * GROUPS + i].most = 16;
  assert_int_equal(qkv_retier_at_least(&s.snapshot, 0, 0, 20, &plan, NULL), QKV_OK);  // never had more
  tiers = outcome(&s, &plan);
  assert_int_equal(tiers[HEADS * GROUPS], 16);
  free(tiers);
  qkv_retier_plan_deinit(&plan);
  s.snapshot.pages[1].lost = true;
  qkv_error error = {0};
  assert_int_equal(qkv_retier_at_least(&s.snapshot, 0, 0, 20, &plan, &error), QKV_FAILED_PRECONDITION);
  assert_string_equal(error.text, "position 69 is held at 2 bits, 2.5 are asked and were not kept");
  assert_int_equal(qkv_retier_at_least(&s.snapshot, 0, 0, 16, &plan, NULL), QKV_OK);
  qkv_retier_plan_deinit(&plan);
  teardown_scene(&s);
}

// No test of speed: prints what retier.h speaks of.
static void large_layers_take_milliseconds(void **state) {
  (void)state;
  scene s;
  setup_scene(&s, 2048 * 8 / HEADS, 10);
  qkv_retier_plan plan;
  const qkv_retier_policy policy = budget_of(2);
  struct timespec begin, end;
  clock_gettime(CLOCK_MONOTONIC, &begin);
  uint8_t *tiers = decide(&s, &policy, &plan);
  clock_gettime(CLOCK_MONOTONIC, &end);
  printf("as many groups as 128k tokens of 8 heads: %.1f ms\n",
         (double)(end.tv_sec - begin.tv_sec) * 1e3 + (double)(end.tv_nsec - begin.tv_nsec) * 1e-6);
  free(tiers);
  qkv_retier_plan_deinit(&plan);
  teardown_scene(&s);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(limits_are_named),
      cmocka_unit_test(budgets_are_met_and_spent),
      cmocka_unit_test(budgets_follow_the_calibration),
      cmocka_unit_test(budgets_are_spent_well),
      cmocka_unit_test(heavier_groups_have_no_fewer_bits),
      cmocka_unit_test(protected_groups_stay),
      cmocka_unit_test(plans_settle),
      cmocka_unit_test(steps_are_bounded),
      cmocka_unit_test(thresholds_go_by_the_best_token),
      cmocka_unit_test(tiers_are_set_without_a_policy),
      cmocka_unit_test(large_layers_take_milliseconds),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
