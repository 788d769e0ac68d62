// Bit schedules: how many bits of its code each coordinate has at each tier.
//
// A tier is named after the code bits per coordinate that it has on average, in eighths: tier 32 has 4 bits, tier
// 12 one and a half. Coordinates are ordered so that depths never grow (a calibrated transform orders them by
// variance; the data-free code gives all the same depth, as far as the tier is a whole number of bits). So one
// number per depth says everything: reach[tier][j] is how many coordinates have at least j bits at that tier.
//
//   a calibrated schedule    reach[28] = { d, 48, 40, 24, 16, 8, 0, 0, 0 }
//   depth                    5 4 4 ... 3 3 2 ... 1 1 0 0
//                            |<- 8 ->|  coordinates in bands of 8
//
// Tiers are prefixes: reach[t][j] <= reach[t + 1][j], so going down a tier only drops bits.
#ifndef QKV_ENGINE_CODEC_SCHEDULE_H
#define QKV_ENGINE_CODEC_SCHEDULE_H

#include <stddef.h>
#include <stdint.h>

#define QKV_TIER_BIT 8                               // tiers a bit
#define QKV_DEPTH_MAX 8                              // bits of a coordinate
#define QKV_TIER_MAX (QKV_DEPTH_MAX * QKV_TIER_BIT)  // the highest tier
#define QKV_BAND 8                                   // coordinates that share a depth; every row width is a multiple
#define QKV_DIM_MAX 1024                             // row width, coordinates
#define QKV_GROUP_TOKENS 16                          // tokens whose codes lie together and share a tier

typedef struct qkv_schedule {
  uint16_t dim;
  uint16_t reach[QKV_TIER_MAX + 1][QKV_DEPTH_MAX + 1];  // [tier][depth]; reach[t][0] == dim, multiples of QKV_BAND
  uint16_t group_bytes[QKV_TIER_MAX + 1];               // of the codes of one group: 2 * sum of reach[tier][1...]
} qkv_schedule;

// Every coordinate has tier / QKV_TIER_BIT bits; what is left over gives the first ones one more, in whole bands.
void qkv_schedule_uniform(qkv_schedule *schedule, uint16_t dim);

// Fills group_bytes from reach.
void qkv_schedule_finish(qkv_schedule *schedule);

// NULL, or what is wrong with it.
const char *qkv_schedule_validate(const qkv_schedule *schedule);

// Bytes of the codes of one group (16 tokens) at a tier.
static inline size_t qkv_schedule_group_bytes(const qkv_schedule *schedule, unsigned tier) {
  return schedule->group_bytes[tier];
}

#endif
