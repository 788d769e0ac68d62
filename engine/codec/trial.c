#include "engine/codec/trial.h"

#include <assert.h>

#include "engine/codec/row.h"
#include "engine/kernel/kernel.h"

size_t qkvi_trial_bytes(size_t dim) {
  return QKV_PAGE_TOKENS * ((dim + 1) * sizeof(float) + 1 + dim * QKV_DEPTH_MAX / 8);
}

qkvi_trial qkvi_trial_in(void *scratch, size_t dim) {
  qkvi_trial trial = {.decoded = scratch};
  trial.errors = trial.decoded + QKV_PAGE_TOKENS * dim;
  trial.gains = (uint8_t *)(trial.errors + QKV_PAGE_TOKENS);
  trial.codes = trial.gains + QKV_PAGE_TOKENS;
  return trial;
}

double qkvi_trial_encode(const qkvi_trial *trial, qkv_part part, const qkv_schedule *schedule, unsigned tier,
                         const float *weights, const float *rows) {
  const size_t dim = schedule->dim, coded = schedule->reach[tier][1];
  qkv_kernels_get()->encode(part, schedule, tier, weights, rows, trial->gains, trial->codes, trial->errors);
  double error = 0;
  for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) {
    error += (double)trial->errors[t];
    if (coded == dim) continue;
    error += qkvi_row_error(rows + t * dim + coded, NULL, weights ? weights + coded : NULL, dim - coded);
  }
  return error;
}

void qkvi_trial_run(const qkvi_trial *trial, qkv_part part, const qkv_schedule *schedule, unsigned tier,
                    const float *weights, const float *rows) {
  qkv_page_codes codes = {.gains = trial->gains, .schedule = schedule};
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
    codes.groups[g] = trial->codes + g * qkv_schedule_group_bytes(schedule, tier);
    codes.tiers[g] = (uint8_t)tier;
  }
  const qkv_kernels *kernels = qkv_kernels_get();
  kernels->encode(part, schedule, tier, weights, rows, trial->gains, trial->codes, trial->errors);
  kernels->decode(part, &codes, trial->decoded);
}

double qkvi_rows_error(const float *a, const float *b, const float *weights, size_t tokens, size_t dim) {
  double error = 0;
  for (size_t t = 0; t < tokens; t++) error += qkvi_row_error(a + t * dim, b + t * dim, weights, dim);
  return error;
}

unsigned qkvi_tier_within(const qkv_schedule *schedule, unsigned budget, size_t section) {
  assert(budget <= QKV_TIER_MAX);
  const size_t capacity = QKV_PAGE_GROUPS * qkv_schedule_group_bytes(schedule, budget);
  if (section > capacity) return 0;
  unsigned tier = budget;
  while (tier > 0 && QKV_PAGE_GROUPS * qkv_schedule_group_bytes(schedule, tier) + section > capacity) tier--;
  return tier;
}

// Of the nested codebook (codebook.h).
static const float by_depth[QKV_DEPTH_MAX + 1] = {1,        0.36338f,  0.11821f,  0.03475f,  0.00957f,
                                                  0.00261f, 0.000732f, 0.000171f, 0.0000437f};

void qkvi_tier_missed(const qkv_schedule *schedule, unsigned tier, const float *weights, float *missed) {
  const uint16_t *reach = schedule->reach[tier];
  for (unsigned c = 0, depth = QKV_DEPTH_MAX; c < schedule->dim; c++) {
    while (reach[depth] <= c) depth--;  // reach[0] is all
    missed[c] = (weights ? weights[c] : 1) * by_depth[depth];
  }
}

double qkvi_tier_distortion(const qkv_schedule *schedule, unsigned tier, const float *weights) {
  double sum = 0, all = 0;
  if (weights == NULL) {
    const uint16_t *reach = schedule->reach[tier];
    for (unsigned depth = 0; depth <= QKV_DEPTH_MAX; depth++) {
      const unsigned deeper = depth < QKV_DEPTH_MAX ? reach[depth + 1] : 0;
      sum += (double)by_depth[depth] * (double)(reach[depth] - deeper);
    }
    return sum / schedule->dim;
  }
  float missed[QKV_DIM_MAX];
  qkvi_tier_missed(schedule, tier, weights, missed);
  for (size_t c = 0; c < schedule->dim; c++) {
    sum += (double)missed[c];
    all += (double)weights[c];
  }
  return sum / all;
}
