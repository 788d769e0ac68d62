// Numbers from seeds, the same on every machine: integers by splitmix64, and sums of twelve of them.
//
// Threads: pure functions of the state.
#ifndef QKV_ENGINE_CODEC_RANDOM_H
#define QKV_ENGINE_CODEC_RANDOM_H

#include <stdint.h>

static inline uint64_t qkvi_random_next(uint64_t *state) {
  uint64_t z = *state += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// Even on [0, 1).
static inline double qkvi_random_uniform(uint64_t *state) {
  return (double)(qkvi_random_next(state) >> 11) * 0x1p-53;
}

// About N(0, 1), without functions that differ between machines.
static inline double qkvi_random_gaussian(uint64_t *state) {
  double sum = -6;
  for (int i = 0; i < 12; i++) sum += qkvi_random_uniform(state);
  return sum;
}

#endif
