// For the tests of the codec and of the kernels: random numbers, random schedules, and a reader of page codes
// that was written from the drawing in engine/codec/page.h alone: one bit at a time, by search, slowly.
#ifndef QKV_TESTS_ENGINE_CODEC_NAIVE_H
#define QKV_TESTS_ENGINE_CODEC_NAIVE_H

#include <assert.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "engine/codec/page.h"

typedef struct naive_random {
  uint64_t state;
} naive_random;

static inline uint64_t naive_next(naive_random *random) {
  uint64_t z = (random->state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

static inline unsigned naive_below(naive_random *random, unsigned limit) {
  assert(limit > 0);
  return (unsigned)(naive_next(random) % limit);
}

static inline double naive_uniform(naive_random *random) {
  return ((double)(naive_next(random) >> 11) + 1) * 0x1p-53;
}

static inline double naive_gaussian(naive_random *random) {
  const double radius = sqrt(-2 * log(naive_uniform(random)));
  return radius * cos(6.283185307179586 * naive_uniform(random));
}

// A valid schedule with runs of every depth: tier by tier, depths only grow, all full at none but the last tiers.
static inline void naive_schedule(naive_random *random, uint16_t dim, qkv_schedule *schedule) {
  memset(schedule, 0, sizeof *schedule);
  schedule->dim = dim;
  for (unsigned tier = 0; tier <= QKV_TIER_MAX; tier++) {
    uint16_t *reach = schedule->reach[tier];
    reach[0] = dim;
    for (unsigned depth = 1; depth <= QKV_DEPTH_MAX; depth++) {
      const unsigned least = tier > 0 ? schedule->reach[tier - 1][depth] : 0;
      const unsigned capacity = (reach[depth - 1] - least) / QKV_BAND;
      const bool grows = tier > 0 && depth <= tier / QKV_TIER_BIT + 3 && naive_below(random, 4) == 0;
      reach[depth] = (uint16_t)(least + (grows ? QKV_BAND * naive_below(random, capacity + 1) : 0));
    }
  }
  qkv_schedule_finish(schedule);
}

// A bit of a group's codes: of byte `byte`, counted from the least significant.
typedef struct naive_place {
  size_t byte;
  unsigned bit;
} naive_place;

// Whether field f of byte b of a line holds coordinate c (from the line's first) of token t, and if so at which
// of the field's bits the code's bit lies. `units` is s of a K line; L of a V line is 4 * units. `second` asks
// for the second bit of the pair.
static inline int naive_field_bit(qkv_part part, bool wide, unsigned units, unsigned b, unsigned f, unsigned c,
                                  unsigned t, bool second) {
  const unsigned s = units, lanes = 4 * units;
  unsigned token, low, high;  // what the field's low and high bits belong to
  if (part == QKV_K) {
    const unsigned i = b % s;
    token = b / s;
    low = s * f + i;
    high = 4 * s + s * f + i;
  } else {
    const unsigned lane = b / 4, i = b % 4;
    token = 4 * f + i;
    low = lane;
    high = lanes + lane;
  }
  if (token != t) return -1;
  if (wide) return low == c ? (second ? 0 : 1) : -1;
  if (second) return -1;
  if (low == c) return 0;
  return high == c ? 1 : -1;
}

// Where bit `j` (0 is the most significant) of coordinate `c` of token `t` lies in a group.
static inline naive_place naive_locate(qkv_part part, const uint16_t *reach, unsigned c, unsigned t, unsigned j) {
  const unsigned p = j / 2;
  size_t start = 0;
  for (unsigned q = 0; q < p; q++) {
    start += 16 * (size_t)reach[2 * q + 2] * 2 / 8;
    start += 16 * (size_t)(reach[2 * q + 1] - reach[2 * q + 2]) / 8;
  }
  const bool wide = c < reach[2 * p + 2];
  unsigned left = reach[2 * p + 2];  // coordinates of the section from the line on
  if (!wide) {
    start += 16 * (size_t)reach[2 * p + 2] * 2 / 8;
    c -= reach[2 * p + 2];
    left = reach[2 * p + 1] - reach[2 * p + 2];
  }
  unsigned units = 4;
  for (;;) {
    const unsigned in_line = wide ? 4 * units : 8 * units;
    if (left < in_line) {
      units /= 2;
      continue;
    }
    if (c < in_line) break;
    c -= in_line;
    left -= in_line;
    start += 16 * (size_t)units;
  }
  for (unsigned b = 0; b < 16 * units; b++) {
    for (unsigned f = 0; f < 4; f++) {
      const int bit = naive_field_bit(part, wide, units, b, f, c, t, j % 2 == 1);
      const unsigned stored = p % 2 == 1 ? f ^ 1 : f;
      if (bit >= 0) return (naive_place){start + b, 2 * stored + (unsigned)bit};
    }
  }
  abort();
}

static inline unsigned naive_depth(const uint16_t *reach, unsigned c) {
  unsigned depth = 0;
  while (depth < QKV_DEPTH_MAX && reach[depth + 1] > c) depth++;
  return depth;
}

// The code of a coordinate of a token, at its depth.
static inline unsigned naive_code(qkv_part part, const uint16_t *reach, const uint8_t *group, unsigned c,
                                  unsigned t) {
  unsigned code = 0;
  for (unsigned j = 0; j < naive_depth(reach, c); j++) {
    const naive_place place = naive_locate(part, reach, c, t, j);
    code = code << 1 | (group[place.byte] >> place.bit & 1);
  }
  return code;
}

// Copies a group to a lower tier, bit by bit.
static inline void naive_narrow(qkv_part part, const qkv_schedule *schedule, unsigned from, const uint8_t *group,
                                unsigned to, uint8_t *narrowed) {
  const uint16_t *wide = schedule->reach[from], *narrow = schedule->reach[to];
  memset(narrowed, 0, qkv_schedule_group_bytes(schedule, to));
  for (unsigned c = 0; c < schedule->dim; c++) {
    for (unsigned t = 0; t < 16; t++) {
      for (unsigned j = 0; j < naive_depth(narrow, c); j++) {
        const naive_place a = naive_locate(part, wide, c, t, j), b = naive_locate(part, narrow, c, t, j);
        narrowed[b.byte] |= (uint8_t)((group[a.byte] >> a.bit & 1) << b.bit);
      }
    }
  }
}

// 2^((g - 128) / 8), 0 for 0.
static inline double naive_gain(uint8_t gain) {
  return gain == 0 ? 0 : exp2((gain - 128) / 8.0);
}

static inline uint64_t naive_read(const uint8_t *bytes, size_t offset, size_t size) {
  uint64_t value = 0;
  for (size_t i = 0; i < size; i++) value |= (uint64_t)bytes[offset + i] << (8 * i);
  return value;
}

#endif
