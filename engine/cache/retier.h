// Which groups of tokens get which tiers: the policy, a pure function from a snapshot to a plan. layer_retier.h takes
// the one and applies the other.
//
// A group is QKV_GROUP_TOKENS tokens of one head's keys or values. Two ways:
//
//   a budget    sum over groups of weight * error(tier) is made least within so many bytes: rate and distortion. The
//               steps between tiers, on the lower hull of (bytes, error), are taken in order of what they save a
//               byte, to 1/32 of an octave, until the bytes are spent.
//               Layers do not compare, so that a layer's budget is what its calibration would give it at these bits
//               (qkv_lane.offset).
//   thresholds  the average attention of a group's best token decides: tiers[0] from thresholds[0] on, tiers[1] from
//               thresholds[1] on, and so on, tiers[3] below all.
//
// A group's weight is how much the error of its rows counts in attention's output, in expectation:
//
//   values   sum_t e_t g_t^2                      s_t: average attention, g_t: gain, e_t: what to expect of a_t^2
//   keys     sum_t e_t (1 - s_t)^2 g_t^2 |v_t|^2 S   S: mean square of what a unit of key error makes of a score
//
// (out = sum_t a_t v_t, and d out / d score_t = a_t (v_t - out)), so that heads, keys and values of a layer compare.
// Attention comes in bursts, and to tokens that had none before, so e_t = s_t + f / tokens, not s_t^2. Measured with
// rows coded at 4 bits in the attend frame; KL in bits (`qkv-bench quality --setting attend:4@2`):
//                                            f = 0.1   0.3      1        3        10       squared
//   SmolLM2-135M, average 2, 6 windows       0.0149    0.0141   0.0149   0.0165   0.0177   0.0174
//   tinylm, average 2, 12 windows                      0.00034  0.00035  0.00035
//   tinylm, average 1.25, 12 windows                   0.0016   0.0017   0.0021
// SmolLM2, rows coded at 2 bits: 0.0192. Keys' weights times 0.3 or 3 are worse. In the data-free code keys at less
// than 2 bits cost more than this tells: tier_least should be 16 there (QKV_RETIER_LEAST_AUTO).
//
// The policy leaves alone: the sinks and the recent window, which stay at the most that is held; groups that can not
// be cut (chains); and pages that rest. Thresholds also leave alone what no query has been counted for, such as a
// prompt that has just been appended: planes that are dropped do not come back.
// A group changes only where its cost, weight * error + price * bytes, falls by
// the part `hysteresis` (budget), or where its attention is beyond a threshold by that part; but a budget is kept:
// then the most useful cuts are made all the same.
//
// Cost: linear in groups times tiers; 128k tokens of 8 heads take 60 ms (retier_test prints it).
//
// Threads: pure functions.
#ifndef QKV_ENGINE_CACHE_RETIER_H
#define QKV_ENGINE_CACHE_RETIER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"
#include "engine/codec/codec.h"

#define QKV_RETIER_LEVELS 4
#define QKV_RETIER_SINKS 4
#define QKV_RETIER_HYSTERESIS 0.05
#define QKV_RETIER_FLOOR 0.3f  // even shares of attention
// The least tier of a budget: none in calibrated code (at an average of 1 bit, a least of 1 would leave no choice: KL
// 0.0070 for 0.0032; at 1.25 0.0024 for 0.0022, at 1.5 0.00107 for 0.00104, 16 windows). In data-free code 2 bits,
// for a budget of 2 an eighth less, for budgets below 2 1 bit, for those below 1 none.
#define QKV_RETIER_LEAST_AUTO 255

typedef struct qkv_retier_policy {
  double bits;                               // budget: code bits a coordinate, on average over layers; 0: thresholds
  double thresholds[QKV_RETIER_LEVELS - 1];  // falling
  uint8_t tiers[QKV_RETIER_LEVELS];          // falling
  uint8_t tier_least;                        // of a budget, or QKV_RETIER_LEAST_AUTO
  uint64_t begin, end;                       // positions; end 0: to the end
  uint64_t sinks, recent;                    // tokens at the beginning and at the end of the layer
  double hysteresis;                         // 0 to below 1
  uint64_t rest;                             // queries that a page is left alone after it was sealed or changed
  size_t pages_max;                          // changed at once; 0: no limit
} qkv_retier_policy;

// No budget and no thresholds yet: 4, 3, 2 and 1 bits, at least 1, four sinks.
#define QKV_RETIER_POLICY \
  ((qkv_retier_policy){   \
      .tiers = {32, 24, 16, 8}, .tier_least = 8, .sinks = QKV_RETIER_SINKS, .hysteresis = QKV_RETIER_HYSTERESIS})

// INVALID_ARGUMENT "retier.bits is 9, allowed are 0 to 8", "retier.thresholds are not falling".
qkv_status qkv_retier_policy_check(const qkv_retier_policy *policy, qkv_error *error);

typedef struct qkv_retier_group {
  float weight;        // >= 0
  float peak;          // the average attention of its best token
  uint8_t tier, most;  // now, and the most that is held
  bool fixed;          // can not be cut
  bool unseen;         // no query has been counted: `peak` says nothing
} qkv_retier_group;

typedef struct qkv_retier_page {
  size_t index;        // in the layer
  uint64_t serial;     // of its image
  uint64_t position;   // of its first token
  uint32_t tokens;     // valid ones
  bool lost;           // planes have been dropped and not kept
  bool shared;         // with other layers, and to be left alone for that
  uint32_t lane;       // of its coder: that of head h's part p is lanes[lane + 2 h + p]
  uint64_t quiet_for;  // queries since it was sealed or changed
} qkv_retier_page;

typedef struct qkv_retier_snapshot {
  uint32_t kv_heads;
  bool data_free;                   // whether some of the pages are coded so
  bool counted;                     // whether there are averages; weights are made of gains alone where not
  uint64_t first_position, length;  // of the layer
  size_t page_count, lane_count;
  qkv_retier_page *pages;
  qkv_lane *lanes;
  qkv_retier_group *groups;  // [page_count][kv_heads][2][QKV_PAGE_GROUPS]
} qkv_retier_snapshot;

void qkv_retier_snapshot_deinit(qkv_retier_snapshot *snapshot);

typedef struct qkv_retier_plan {
  size_t page_count;
  size_t *pages;                       // of the snapshot's, those that free most first
  qkv_head_tiers *tiers;               // [page_count][kv_heads]: what they get
  size_t page_count_all;               // pages that should change; page_count is pages_max at most
  uint64_t bytes_before, bytes_after;  // of the codes of all groups in range, once all pages have changed
  uint64_t coordinates;                // of these groups
} qkv_retier_plan;

// The policy has passed the check. FAILED_PRECONDITION for thresholds where nothing is counted.
qkv_status qkv_retier_decide(const qkv_retier_snapshot *snapshot, const qkv_retier_policy *given,
                             qkv_retier_plan *plan, qkv_error *error);
// Without a policy: every group of positions [begin, end) (end 0: to the end) at `tier` at most, or at least as far
// as it is held (QKV_TIER_MAX: all of it). FAILED_PRECONDITION where planes that are wanted back have been dropped:
// "position 128 is held at 2 bits, 4 are asked and were not kept".
void qkv_retier_at_most(const qkv_retier_snapshot *snapshot, uint64_t begin, uint64_t end, uint8_t tier,
                        qkv_retier_plan *plan);
qkv_status qkv_retier_at_least(const qkv_retier_snapshot *snapshot, uint64_t begin, uint64_t end, uint8_t tier,
                               qkv_retier_plan *plan, qkv_error *error);
void qkv_retier_plan_deinit(qkv_retier_plan *plan);

#endif
