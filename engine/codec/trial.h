// Coding rows to see what they decode to, before anything is written to a page.
//
// Threads: pure functions, with scratch from the caller.
#ifndef QKV_ENGINE_CODEC_TRIAL_H
#define QKV_ENGINE_CODEC_TRIAL_H

#include <stddef.h>
#include <stdint.h>

#include "engine/codec/page.h"

typedef struct qkvi_trial {
  float *decoded;  // [64][dim]
  uint8_t *gains;  // [64]
  float *errors;   // [64], of rows, about
  uint8_t *codes;  // of the highest tier
} qkvi_trial;

size_t qkvi_trial_bytes(size_t dim);
// In `scratch` of qkvi_trial_bytes, 64-byte aligned.
qkvi_trial qkvi_trial_in(void *scratch, size_t dim);

// Codes rows [64][dim] at `tier` >= 1, errors weighted [dim] or NULL, with the kernels in use. Returns their squared
// error, about.
double qkvi_trial_encode(const qkvi_trial *trial, qkv_part part, const qkv_schedule *schedule, unsigned tier,
                         const float *weights, const float *rows);
// The same, and decodes them into `decoded`.
void qkvi_trial_run(const qkvi_trial *trial, qkv_part part, const qkv_schedule *schedule, unsigned tier,
                    const float *weights, const float *rows);

// The squared error of `tokens` rows, weights [dim] or NULL.
double qkvi_rows_error(const float *a, const float *b, const float *weights, size_t tokens, size_t dim);

// The highest tier whose codes of a page, together with a section of so many bytes, take no more than those of tier
// `budget` alone. 0: none.
unsigned qkvi_tier_within(const qkv_schedule *schedule, unsigned budget, size_t section);

// About the part of squared rows that codes of a tier miss, weights [dim] or NULL; 1 at tier 0.
double qkvi_tier_distortion(const qkv_schedule *schedule, unsigned tier, const float *weights);

// missed[dim]: weights (or 1) times the part of a coordinate's squares that codes of a tier miss, about. That is how
// much its squares count in the estimated gain of a predictor: without bits in full, with many bits hardly.
void qkvi_tier_missed(const qkv_schedule *schedule, unsigned tier, const float *weights, float *missed);

#endif
