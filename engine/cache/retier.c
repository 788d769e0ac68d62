#include "engine/cache/retier.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/codec/bit_budget.h"

enum {
  GROUPS = 2 * QKV_PAGE_GROUPS,  // of one head of a page
  KEY_SHIFT = 23 - 5,            // of a float's bits: 1/32 of an octave, linear within
  KEYS = 1 << (31 - KEY_SHIFT),
};

static void *allocate(size_t count, size_t bytes) {
  void *made = calloc(count + 1, bytes);
  if (made == NULL) abort();
  return made;
}

void qkv_retier_snapshot_deinit(qkv_retier_snapshot *snapshot) {
  free(snapshot->pages);
  free(snapshot->lanes);
  free(snapshot->groups);
  *snapshot = (qkv_retier_snapshot){0};
}

void qkv_retier_plan_deinit(qkv_retier_plan *plan) {
  free(plan->pages);
  free(plan->tiers);
  *plan = (qkv_retier_plan){0};
}

// ---- Limits ----

static qkv_status check_levels(const qkv_retier_policy *policy, qkv_error *error) {
  for (size_t i = 0; i < QKV_RETIER_LEVELS; i++) {
    if (policy->tiers[i] > QKV_TIER_MAX) {
      return qkv_fail(error, QKV_INVALID_ARGUMENT, "retier.tiers[%zu] is %u, at most %d", i, policy->tiers[i],
                      QKV_TIER_MAX);
    }
    if (i > 0 && policy->tiers[i] > policy->tiers[i - 1]) {
      return qkv_fail(error, QKV_INVALID_ARGUMENT, "retier.tiers are not falling");
    }
  }
  for (size_t i = 0; i + 1 < QKV_RETIER_LEVELS; i++) {
    if (!(policy->thresholds[i] >= 0) || (i > 0 && policy->thresholds[i] > policy->thresholds[i - 1])) {
      return qkv_fail(error, QKV_INVALID_ARGUMENT, "retier.thresholds are not falling");
    }
  }
  return QKV_OK;
}

qkv_status qkv_retier_policy_check(const qkv_retier_policy *policy, qkv_error *error) {
  if (!(policy->bits >= 0 && policy->bits <= QKV_DEPTH_MAX)) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "retier.bits is %g, allowed are 0 to %d", policy->bits,
                    QKV_DEPTH_MAX);
  }
  if (!(policy->hysteresis >= 0 && policy->hysteresis < 1)) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "retier.hysteresis is %g, allowed are 0 to below 1",
                    policy->hysteresis);
  }
  if (policy->tier_least > QKV_TIER_MAX && policy->tier_least != QKV_RETIER_LEAST_AUTO) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "retier.tier_least is %u, at most %d", policy->tier_least,
                    QKV_TIER_MAX);
  }
  return policy->bits > 0 ? QKV_OK : check_levels(policy, error);
}

// ---- Steps between tiers ----

// The tiers of a lane on its lower hull of (bytes, error), from the least up. worth[i]: what the step to tiers[i]
// saves a byte, for a weight of 1; falling.
typedef struct hull {
  size_t count;
  uint8_t tiers[QKV_TIER_MAX + 1];
  float worth[QKV_TIER_MAX + 1];
} hull;

static float worth_of(const qkv_lane *lane, unsigned low, unsigned high) {
  const size_t bytes = lane->group_bytes[high] - lane->group_bytes[low];
  return (lane->errors[low] - lane->errors[high]) / (float)bytes;
}

static hull *make_hull(const qkv_lane *lane, unsigned least, unsigned most) {
  hull *made = allocate(1, sizeof *made);
  made->tiers[made->count++] = (uint8_t)least;
  for (unsigned tier = least + 1; tier <= most; tier++) {
    const uint8_t last = made->tiers[made->count - 1];
    if (lane->group_bytes[tier] == lane->group_bytes[last]) continue;
    if (!(lane->errors[tier] < lane->errors[last])) continue;
    // A step that is worth no more than the next one is none of its own.
    while (made->count > 1 &&
           made->worth[made->count - 1] * 1.000001f <= worth_of(lane, made->tiers[made->count - 2], tier)) {
      made->count--;
    }
    made->worth[made->count] = worth_of(lane, made->tiers[made->count - 1], tier);
    made->tiers[made->count++] = (uint8_t)tier;
  }
  return made;
}

// ---- Deciding ----

typedef struct decision {
  const qkv_retier_snapshot *snapshot;
  const qkv_retier_policy *policy;
  uint8_t *targets;  // of every group
  bool *free;        // of every group: in range, neither protected, fixed nor resting
  hull **hulls;      // [lane][most], as they are needed
  uint64_t coordinates, bytes_before;
  double wanted;   // bits of the policy's budget
  uint64_t bytes;  // of groups in range, at their targets
  uint64_t budget;
  float price;
} decision;

static size_t group_count(const qkv_retier_snapshot *snapshot) {
  return snapshot->page_count * snapshot->kv_heads * GROUPS;
}

// What a group is, by its number.
typedef struct place {
  const qkv_retier_page *page;
  const qkv_lane *lane;
  size_t lane_index;
  uint64_t begin, end;  // positions; the same where it has no valid token
} place;

static place place_of(const qkv_retier_snapshot *snapshot, size_t group) {
  place at = {.page = &snapshot->pages[group / GROUPS / snapshot->kv_heads]};
  const size_t head = group / GROUPS % snapshot->kv_heads, part = group / QKV_PAGE_GROUPS % 2;
  const uint64_t first = group % QKV_PAGE_GROUPS * QKV_GROUP_TOKENS, last = first + QKV_GROUP_TOKENS;
  const uint64_t tokens = at.page->tokens;
  at.lane_index = at.page->lane + 2 * head + part;
  at.lane = &snapshot->lanes[at.lane_index];
  at.begin = at.page->position + (first < tokens ? first : tokens);
  at.end = at.page->position + (last < tokens ? last : tokens);
  return at;
}

static bool in_range(const qkv_retier_policy *policy, const place *at) {
  return at->begin >= policy->begin && (policy->end == 0 || at->end <= policy->end);
}

static bool is_protected(const decision *d, const place *at) {
  const uint64_t sinks_end = d->snapshot->first_position + d->policy->sinks;
  return at->begin < sinks_end || (d->policy->recent > 0 && at->end + d->policy->recent > d->snapshot->length);
}

static size_t bytes_at(const place *at, unsigned tier) {
  return at->lane->group_bytes[tier];
}

// What a lane adds to its layer's budget, a coordinate.
static double budget_bits(const qkv_retier_policy *policy, const qkv_lane *lane) {
  const double bits = policy->bits + qkv_bit_faded((double)lane->offset, policy->bits);
  return bits < 0 ? 0 : bits > QKV_DEPTH_MAX ? QKV_DEPTH_MAX : bits;
}

// Sets every group's target where the policy does not choose it, and marks the groups where it does.
static void begin(decision *d) {
  for (size_t i = 0; i < group_count(d->snapshot); i++) {
    const qkv_retier_group *group = &d->snapshot->groups[i];
    const place at = place_of(d->snapshot, i);
    const bool resting = group->fixed || at.page->quiet_for < d->policy->rest;
    const bool held = is_protected(d, &at);
    d->targets[i] = held && !resting ? group->most : group->tier;
    if (!in_range(d->policy, &at)) {
      d->targets[i] = group->tier;
      continue;
    }
    d->free[i] = !resting && !held;
    d->coordinates += (uint64_t)at.lane->dim * QKV_GROUP_TOKENS;
    d->wanted += budget_bits(d->policy, at.lane) * (double)at.lane->dim * QKV_GROUP_TOKENS;
    d->bytes_before += bytes_at(&at, group->tier);
    d->bytes += bytes_at(&at, d->targets[i]);
  }
}

static decision decide_nothing(const qkv_retier_snapshot *snapshot, const qkv_retier_policy *policy) {
  decision d = {.snapshot = snapshot,
                .policy = policy,
                .targets = allocate(group_count(snapshot), sizeof *d.targets),
                .free = allocate(group_count(snapshot), sizeof *d.free)};
  begin(&d);
  return d;
}

static unsigned least_of(const decision *d, const qkv_retier_group *group) {
  return d->policy->tier_least < group->most ? d->policy->tier_least : group->most;
}

static const hull *hull_of(decision *d, const place *at, const qkv_retier_group *group) {
  hull **made = &d->hulls[at->lane_index * (QKV_TIER_MAX + 1) + group->most];
  if (*made == NULL) *made = make_hull(at->lane, least_of(d, group), group->most);
  return *made;
}

// Falls with the worth of a step.
static size_t key_of(const qkv_retier_group *group, float worth) {
  const float all = group->weight * worth;
  uint32_t bits;
  memcpy(&bits, &all, sizeof bits);
  return bits >> KEY_SHIFT;
}

// What all steps of a key cost together; the bytes at the least tiers go to d->bytes.
static void add_steps(decision *d, uint64_t costs[KEYS]) {
  for (size_t i = 0; i < group_count(d->snapshot); i++) {
    if (!d->free[i]) continue;
    const qkv_retier_group *group = &d->snapshot->groups[i];
    const place at = place_of(d->snapshot, i);
    const hull *steps = hull_of(d, &at, group);
    d->bytes += bytes_at(&at, steps->tiers[0]);
    d->bytes -= bytes_at(&at, group->tier);
    d->targets[i] = steps->tiers[0];
    for (size_t s = 1; s < steps->count; s++) {
      costs[key_of(group, steps->worth[s])] += bytes_at(&at, steps->tiers[s]) - bytes_at(&at, steps->tiers[s - 1]);
    }
  }
}

// Takes all steps above the key, and of the key's those that fit.
static void take_steps(decision *d, size_t key) {
  for (size_t i = 0; i < group_count(d->snapshot); i++) {
    if (!d->free[i]) continue;
    const qkv_retier_group *group = &d->snapshot->groups[i];
    const place at = place_of(d->snapshot, i);
    const hull *steps = hull_of(d, &at, group);
    for (size_t s = 1; s < steps->count && key_of(group, steps->worth[s]) > key; s++) {
      d->bytes += bytes_at(&at, steps->tiers[s]) - bytes_at(&at, steps->tiers[s - 1]);
      d->targets[i] = steps->tiers[s];
    }
  }
}

static void take_last_steps(decision *d, size_t key) {
  for (size_t i = 0; i < group_count(d->snapshot); i++) {
    if (!d->free[i]) continue;
    const qkv_retier_group *group = &d->snapshot->groups[i];
    const place at = place_of(d->snapshot, i);
    const hull *steps = hull_of(d, &at, group);
    for (size_t s = 1; s < steps->count; s++) {
      const size_t cost = bytes_at(&at, steps->tiers[s]) - bytes_at(&at, steps->tiers[s - 1]);
      const size_t step_key = key_of(group, steps->worth[s]);
      if (step_key > key) continue;
      if (step_key < key || d->bytes + cost > d->budget) break;
      d->bytes += cost;
      d->targets[i] = steps->tiers[s];
    }
  }
}

static void spend_budget(decision *d) {
  uint64_t *costs = allocate(KEYS, sizeof *costs);
  add_steps(d, costs);
  uint64_t all = d->bytes;
  size_t key = KEYS;
  while (key > 0 && all + costs[key - 1] <= d->budget) all += costs[--key];
  free(costs);
  if (key == 0) {
    take_steps(d, 0);
    take_last_steps(d, 0);
    d->price = 0;
    return;
  }
  take_steps(d, key - 1);
  take_last_steps(d, key - 1);
  const uint32_t bits = (uint32_t)(key - 1) << KEY_SHIFT;
  memcpy(&d->price, &bits, sizeof bits);
}

// ---- What is not worth a change ----

typedef struct wish {
  float gain;
  size_t group;
} wish;

static int by_gain(const void *a, const void *b) {
  const wish *x = a, *y = b;
  if (x->gain != y->gain) return x->gain > y->gain ? -1 : 1;
  return x->group < y->group ? -1 : x->group > y->group;
}

// The part of its cost that a group saves by going to its target.
static float gain_of(const decision *d, size_t i, const place *at) {
  const qkv_retier_group *group = &d->snapshot->groups[i];
  const float *errors = at->lane->errors;
  const float now = group->weight * errors[group->tier] + d->price * (float)bytes_at(at, group->tier);
  const float then = group->weight * errors[d->targets[i]] + d->price * (float)bytes_at(at, d->targets[i]);
  return now > 0 ? (now - then) / now : 0;
}

static void stay_put(decision *d) {
  wish *cuts = allocate(group_count(d->snapshot), sizeof *cuts);
  size_t count = 0;
  for (size_t i = 0; i < group_count(d->snapshot); i++) {
    const qkv_retier_group *group = &d->snapshot->groups[i];
    const place at = place_of(d->snapshot, i);
    if (!d->free[i] || d->targets[i] == group->tier) continue;
    const float gain = gain_of(d, i, &at);
    if (gain >= (float)d->policy->hysteresis && gain > 0) continue;
    if (d->targets[i] < group->tier) {
      cuts[count++] = (wish){gain, i};
    } else {
      d->bytes -= bytes_at(&at, d->targets[i]) - bytes_at(&at, group->tier);
      d->targets[i] = group->tier;
    }
  }
  qsort(cuts, count, sizeof *cuts, by_gain);
  // From the least useful on, as long as the budget holds.
  while (count > 0) {
    const size_t i = cuts[--count].group;
    const place at = place_of(d->snapshot, i);
    const size_t more = bytes_at(&at, d->snapshot->groups[i].tier) - bytes_at(&at, d->targets[i]);
    if (d->bytes + more > d->budget) continue;
    d->bytes += more;
    d->targets[i] = d->snapshot->groups[i].tier;
  }
  free(cuts);
}

// ---- Thresholds ----

static uint8_t level_of(const qkv_retier_policy *policy, double attention) {
  size_t level = 0;
  while (level + 1 < QKV_RETIER_LEVELS && attention < policy->thresholds[level]) level++;
  return policy->tiers[level];
}

static void apply_thresholds(decision *d) {
  const qkv_retier_policy *policy = d->policy;
  for (size_t i = 0; i < group_count(d->snapshot); i++) {
    const qkv_retier_group *group = &d->snapshot->groups[i];
    const place at = place_of(d->snapshot, i);
    if (!d->free[i] || group->unseen) continue;
    const double peak = (double)group->peak;
    const uint8_t low = level_of(policy, peak / (1 + policy->hysteresis));
    const uint8_t high = level_of(policy, peak / (1 - policy->hysteresis));
    uint8_t target = group->tier < low ? low : group->tier > high ? high : group->tier;
    if (target > group->most) target = group->most;
    d->bytes += bytes_at(&at, target);
    d->bytes -= bytes_at(&at, group->tier);
    d->targets[i] = target;
  }
}

// ---- The plan ----

typedef struct change {
  int64_t bytes;  // more
  size_t page;
} change;

static int by_bytes(const void *a, const void *b) {
  const change *x = a, *y = b;
  if (x->bytes != y->bytes) return x->bytes < y->bytes ? -1 : 1;
  return x->page < y->page ? -1 : x->page > y->page;
}

static bool changes(const decision *d, size_t page, int64_t *bytes) {
  const size_t groups = (size_t)d->snapshot->kv_heads * GROUPS;
  bool any = false;
  *bytes = 0;
  for (size_t i = page * groups; i < (page + 1) * groups; i++) {
    const place at = place_of(d->snapshot, i);
    *bytes += (int64_t)bytes_at(&at, d->targets[i]) - (int64_t)bytes_at(&at, d->snapshot->groups[i].tier);
    any |= d->targets[i] != d->snapshot->groups[i].tier;
  }
  return any;
}

static void make_plan(const decision *d, qkv_retier_plan *plan) {
  const qkv_retier_snapshot *snapshot = d->snapshot;
  change *all = allocate(snapshot->page_count, sizeof *all);
  size_t count = 0;
  for (size_t page = 0; page < snapshot->page_count; page++) {
    if (changes(d, page, &all[count].bytes)) all[count++].page = page;
  }
  qsort(all, count, sizeof *all, by_bytes);
  *plan = (qkv_retier_plan){.page_count = count,
                            .page_count_all = count,
                            .bytes_before = d->bytes_before,
                            .bytes_after = d->bytes,
                            .coordinates = d->coordinates};
  if (d->policy->pages_max != 0 && count > d->policy->pages_max) plan->page_count = d->policy->pages_max;
  plan->pages = allocate(plan->page_count, sizeof *plan->pages);
  plan->tiers = allocate(plan->page_count * snapshot->kv_heads, sizeof *plan->tiers);
  for (size_t i = 0; i < plan->page_count; i++) {
    plan->pages[i] = all[i].page;
    memcpy(plan->tiers + i * snapshot->kv_heads, d->targets + all[i].page * snapshot->kv_heads * GROUPS,
           snapshot->kv_heads * sizeof *plan->tiers);
  }
  free(all);
}

_Static_assert(sizeof(qkv_head_tiers) == GROUPS, "targets of a head are its tiers");

static uint8_t least_tier(const qkv_retier_snapshot *snapshot, const qkv_retier_policy *policy) {
  if (policy->tier_least != QKV_RETIER_LEAST_AUTO) return policy->tier_least;
  if (!snapshot->data_free) return 0;
  const uint8_t two = 2 * QKV_TIER_BIT;
  if (policy->bits >= 2) return policy->bits > 2 ? two : two - 1;  // the sinks have to be paid
  return policy->bits >= 1 ? QKV_TIER_BIT : 0;
}

qkv_status qkv_retier_decide(const qkv_retier_snapshot *snapshot, const qkv_retier_policy *given,
                             qkv_retier_plan *plan, qkv_error *error) {
  assert(qkv_retier_policy_check(given, NULL) == QKV_OK);
  qkv_retier_policy resolved = *given;
  const qkv_retier_policy *policy = &resolved;
  resolved.tier_least = least_tier(snapshot, given);
  if (policy->bits == 0 && !snapshot->counted) {
    return qkv_fail(error, QKV_FAILED_PRECONDITION, "retier.thresholds need attention to be counted, which is off");
  }
  const size_t hulls = snapshot->lane_count * (QKV_TIER_MAX + 1);
  decision d = decide_nothing(snapshot, policy);
  d.hulls = allocate(hulls, sizeof(hull *));
  if (policy->bits > 0) {
    d.budget = (uint64_t)floor(d.wanted / 8);
    spend_budget(&d);
    stay_put(&d);
  } else {
    apply_thresholds(&d);
  }
  make_plan(&d, plan);
  for (size_t i = 0; i < hulls; i++) free(d.hulls[i]);
  free((void *)d.hulls);
  free(d.free);
  free(d.targets);
  return QKV_OK;
}

// ---- Without a policy ----

static void aim(decision *d, size_t i, uint8_t tier) {
  const place at = place_of(d->snapshot, i);
  d->bytes += bytes_at(&at, tier);
  d->bytes -= bytes_at(&at, d->targets[i]);
  d->targets[i] = tier;
}

void qkv_retier_at_most(const qkv_retier_snapshot *snapshot, uint64_t begin, uint64_t end, uint8_t tier,
                        qkv_retier_plan *plan) {
  const qkv_retier_policy all = {.begin = begin, .end = end};
  decision d = decide_nothing(snapshot, &all);
  for (size_t i = 0; i < group_count(snapshot); i++) {
    if (d.free[i] && snapshot->groups[i].tier > tier) aim(&d, i, tier);
  }
  make_plan(&d, plan);
  free(d.free);
  free(d.targets);
}

static qkv_status raise(decision *d, uint8_t tier, qkv_error *error) {
  for (size_t i = 0; i < group_count(d->snapshot); i++) {
    const qkv_retier_group *group = &d->snapshot->groups[i];
    if (!d->free[i] || group->tier >= tier) continue;
    const place at = place_of(d->snapshot, i);
    if (group->most < tier && at.page->lost) {
      return qkv_fail(error, QKV_FAILED_PRECONDITION,
                      "position %" PRIu64 " is held at %g bits, %g are asked and were not kept", at.begin,
                      (double)group->most / QKV_TIER_BIT, (double)tier / QKV_TIER_BIT);
    }
    aim(d, i, group->most < tier ? group->most : tier);
  }
  return QKV_OK;
}

qkv_status qkv_retier_at_least(const qkv_retier_snapshot *snapshot, uint64_t begin, uint64_t end, uint8_t tier,
                               qkv_retier_plan *plan, qkv_error *error) {
  const qkv_retier_policy all = {.begin = begin, .end = end};
  decision d = decide_nothing(snapshot, &all);
  const qkv_status status = raise(&d, tier, error);
  if (status == QKV_OK) make_plan(&d, plan);
  free(d.free);
  free(d.targets);
  return status;
}
