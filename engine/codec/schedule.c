#include "engine/codec/schedule.h"

#include <assert.h>
#include <string.h>

void qkv_schedule_uniform(qkv_schedule *schedule, uint16_t dim) {
  memset(schedule, 0, sizeof *schedule);
  schedule->dim = dim;
  for (unsigned tier = 0; tier <= QKV_TIER_MAX; tier++) {
    for (unsigned depth = 0; depth <= tier; depth++) schedule->reach[tier][depth] = dim;
  }
}

const char *qkv_schedule_validate(const qkv_schedule *schedule) {
  if (schedule->dim == 0 || schedule->dim > QKV_DIM_MAX) return "the row width is not within 1 to 1024";
  if (schedule->dim % QKV_BAND != 0) return "the row width is not a multiple of 8";
  for (unsigned tier = 0; tier <= QKV_TIER_MAX; tier++) {
    const uint16_t *reach = schedule->reach[tier];
    if (reach[0] != schedule->dim) return "a tier does not start with all coordinates";
    for (unsigned depth = 1; depth <= QKV_DEPTH_MAX; depth++) {
      if (reach[depth] % QKV_BAND != 0) return "a depth is not reached by a multiple of 8 coordinates";
      if (reach[depth] > reach[depth - 1]) return "a depth is reached by more coordinates than the one before";
      if (tier > 0 && reach[depth] < schedule->reach[tier - 1][depth]) return "a tier is not a prefix of the next";
    }
  }
  return NULL;
}

size_t qkv_schedule_group_bytes(const qkv_schedule *schedule, unsigned tier) {
  assert(tier <= QKV_TIER_MAX);
  size_t bits = 0;  // of one token
  for (unsigned depth = 1; depth <= QKV_DEPTH_MAX; depth++) bits += schedule->reach[tier][depth];
  return bits * QKV_GROUP_TOKENS / 8;
}
