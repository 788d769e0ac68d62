#include "engine/codec/schedule.h"

#include <string.h>

static uint16_t group_bytes(const uint16_t *reach) {
  unsigned bits = 0;  // of one token
  for (unsigned depth = 1; depth <= QKV_DEPTH_MAX; depth++) bits += reach[depth];
  return (uint16_t)(bits * QKV_GROUP_TOKENS / 8);
}

void qkv_schedule_finish(qkv_schedule *schedule) {
  for (unsigned tier = 0; tier <= QKV_TIER_MAX; tier++) {
    schedule->group_bytes[tier] = group_bytes(schedule->reach[tier]);
  }
}

void qkv_schedule_uniform(qkv_schedule *schedule, uint16_t dim) {
  memset(schedule, 0, sizeof *schedule);
  schedule->dim = dim;
  for (unsigned tier = 0; tier <= QKV_TIER_MAX; tier++) {
    uint16_t *reach = schedule->reach[tier];
    const unsigned whole = tier / QKV_TIER_BIT, rest = tier % QKV_TIER_BIT;
    for (unsigned depth = 0; depth <= whole; depth++) reach[depth] = dim;
    if (rest > 0) reach[whole + 1] = (uint16_t)(dim * rest / QKV_TIER_BIT / QKV_BAND * QKV_BAND);
  }
  qkv_schedule_finish(schedule);
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
    if (schedule->group_bytes[tier] != group_bytes(reach)) return "a tier's bytes are not those of its depths";
  }
  return NULL;
}
