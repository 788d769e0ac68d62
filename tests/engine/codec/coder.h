// For the tests: coders of any shape, with data-free transforms or with random dense ones.
#ifndef QKV_TESTS_ENGINE_CODEC_CODER_H
#define QKV_TESTS_ENGINE_CODEC_CODER_H

#include <assert.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "engine/codec/embedded.h"
#include "tests/engine/codec/naive.h"

enum { CODER_LAYER = 5 };

// What a page's pair is turned back by in the attend frame.
static inline long double coder_frame_angle(const qkv_rope *rope, const qkv_transform *transform, uint64_t position,
                                            uint32_t pair) {
  const uint64_t centre = position + QKV_PAGE_TOKENS / 2;
  uint64_t tokens = QKV_PAGE_TOKENS;  // of a block
  if (!qkv_transform_by_blocks(transform)) return (long double)centre * qkv_rope_frequency(rope, centre, pair);
  if (pair < transform->plan->begins[0]) return 0;
  if (!qkv_rope_steady(rope, position + QKV_PAGE_TOKENS)) {
    return (long double)centre * qkv_rope_frequency(rope, centre, pair);
  }
  const double frequency = qkv_rope_frequency(rope, 0, pair);
  while (tokens < 4096 && (double)tokens * frequency <= 0.25) tokens *= 2;
  return (long double)(centre / tokens * tokens + tokens / 2) * frequency;
}

// How far decoded rows of dense coders may be off, relative to their lengths: they come back in whole numbers
// (kernel/dense.h), by matrices that stretch some rows by 9 times as much as others.
#define CODER_WHOLE_OFF 3e-4

// One head's transform of keys or of values, and all that it points to.
typedef struct owned_transform {
  qkv_transform transform;
  qkv_schedule schedule;
  float *matrices;  // analysis, synthesis; NULL: data-free
  float *vectors;   // mean, weights, anchor
  uint16_t pairs[QKV_ANCHOR_PAIRS_MAX];
  void *whole[3];
  qkv_dense forward, backward, turning;
  qkv_turn_plan plan;
} owned_transform;

// The fields of a coder of coder_create, to be changed.
static inline qkv_embedded_coder *coder_own(const qkv_coder *coder) {
  return (qkv_embedded_coder *)coder;
}

// A coder that owns its parts. It must not move: take it from coder_create.
typedef struct owned_coder {
  qkv_embedded_coder coder;
  qkv_phases *phases;
  owned_transform *transforms;  // [kv_heads][2]; NULL: data-free
  float *steps;                 // [kv_heads][value_dim], of outliers; NULL: none are kept, or all are 1
  qkv_head_coder heads[];
} owned_coder;

static inline void *coder_allocate(size_t count, size_t size) {
  assert(count > 0 && size > 0);
  void *made = calloc(count, size);
  assert(made != NULL);
  return made;
}

// What attending keys of the archive frame takes, for the head as it is now.
static inline void coder_rebuild(qkv_head_coder *head) {
  qkv_rebuild *old = (qkv_rebuild *)head->rebuild;
  qkv_rebuild_destroy(&old);
  head->rebuild = qkv_rebuild_create(head->transforms[QKV_K], head->tiers[QKV_K]);
}

// Data-free, of layer CODER_LAYER. `rope` NULL: none.
static inline qkv_coder *coder_create(uint16_t kv_heads, uint16_t key_dim, uint16_t value_dim, double bits_k,
                                      double bits_v, qkv_frame frame, const qkv_rope *rope) {
  owned_coder *made = coder_allocate(1, sizeof *made + kv_heads * sizeof(qkv_head_coder));
  const qkv_transform *k = qkv_transform_uniform(key_dim), *v = qkv_transform_uniform(value_dim);
  const uint8_t tier_k = (uint8_t)(bits_k * QKV_TIER_BIT), tier_v = (uint8_t)(bits_v * QKV_TIER_BIT);
  if (rope != NULL && rope->theta != 0) made->phases = qkv_phases_create(rope);
  assert(frame == QKV_FRAME_PLAIN || made->phases != NULL);
  for (uint16_t h = 0; h < kv_heads; h++) {
    made->heads[h] =
        (qkv_head_coder){.transforms = {k, v}, .schedules = {k->schedule, v->schedule}, .tiers = {tier_k, tier_v}};
    if (frame == QKV_FRAME_ARCHIVE) coder_rebuild(&made->heads[h]);
  }
  made->coder = (qkv_embedded_coder){.base = {.codec = qkv_codec_by_id(QKV_CODEC_EMBEDDED),
                                              .layer = CODER_LAYER,
                                              .kv_heads = kv_heads,
                                              .key_dim = key_dim,
                                              .value_dim = value_dim,
                                              .kind = (uint32_t)frame << 16 | (uint32_t)tier_k << 8 | tier_v},
                                     .tier_k = tier_k,
                                     .tier_v = tier_v,
                                     .frame = frame,
                                     .phases = made->phases,
                                     .heads = made->heads};
  return &made->coder.base;
}

static inline void transform_deinit(owned_transform *owned) {
  free(owned->matrices);
  free(owned->vectors);
  free(owned->whole[0]);
  free(owned->whole[1]);
  free(owned->whole[2]);
}

// A matrix [dim][dim] in whole numbers.
static inline qkv_dense coder_whole(const float *matrix, size_t dim, void **memory) {
  *memory = aligned_alloc(64, (qkv_dense_bytes(dim, dim) + 63) / 64 * 64);
  assert(*memory != NULL);
  return qkv_dense_in(*memory, matrix, dim, dim);
}

static inline void coder_destroy(const qkv_coder *coder) {
  owned_coder *made = (owned_coder *)coder;
  if (made == NULL) return;
  for (size_t i = 0; made->transforms != NULL && i < (size_t)2 * coder->kv_heads; i++) {
    transform_deinit(&made->transforms[i]);
  }
  for (uint16_t h = 0; h < coder->kv_heads; h++) {
    qkv_rebuild *rebuild = (qkv_rebuild *)made->heads[h].rebuild;
    qkv_rebuild_destroy(&rebuild);
  }
  free(made->transforms);
  free(made->steps);
  qkv_phases_destroy(&made->phases);
  free(made);
}

// Rows whose squared error is above `limit` of their squared length, and above what is usual, are kept as outliers,
// and so are the first `sinks` positions.
static inline void coder_keep_outliers(qkv_coder *coder, float limit, uint32_t sinks) {
  owned_coder *made = (owned_coder *)coder;
  coder_own(coder)->sinks = sinks;
  if (made->transforms != NULL) made->steps = calloc((size_t)coder->kv_heads * coder->value_dim, sizeof(float));
  assert(made->transforms == NULL || made->steps != NULL);
  for (uint16_t h = 0; h < coder->kv_heads; h++) {
    qkv_head_coder *head = &made->heads[h];
    float *steps = made->steps != NULL ? made->steps + (size_t)h * coder->value_dim : NULL;
    for (qkv_part part = QKV_K; part <= QKV_V; part++) {
      head->outlier_limits[part] = limit;
      head->error_scales[part] = 1;
    }
    for (size_t c = 0; steps != NULL && c < coder->value_dim; c++) {
      steps[c] = 1 / sqrtf(head->transforms[QKV_V]->weights[c]);
    }
    head->outlier_steps = steps;
  }
}

// ---- Dense transforms ----

// Rows of `matrix` [dim][dim] become an orthonormal basis: Gram-Schmidt, twice.
static inline void coder_orthogonalize(double *matrix, size_t dim) {
  for (size_t i = 0; i < 2 * dim; i++) {
    double *row = matrix + i % dim * dim, size = 0;
    for (size_t j = 0; j < i % dim; j++) {
      double along = 0;
      for (size_t c = 0; c < dim; c++) along += row[c] * matrix[j * dim + c];
      for (size_t c = 0; c < dim; c++) row[c] -= along * matrix[j * dim + c];
    }
    for (size_t c = 0; c < dim; c++) size += row[c] * row[c];
    for (size_t c = 0; c < dim; c++) row[c] /= sqrt(size);
  }
}

static inline double *coder_orthogonal(naive_random *random, size_t dim) {
  double *matrix = coder_allocate(dim * dim, sizeof *matrix);
  for (size_t i = 0; i < dim * dim; i++) matrix[i] = naive_gaussian(random);
  coder_orthogonalize(matrix, dim);
  return matrix;
}

// A pair of matrices that are each other's dual, analysis . synthesis^T = 1: with A = U S W, U and W orthogonal and S
// diagonal, the dual is U S^-1 W. `skew` 1: orthogonal; else S is spread from 1 / skew to skew.
static inline void coder_dual_matrices(naive_random *random, size_t dim, double skew, float *analysis,
                                       float *synthesis) {
  assert(dim > 1);
  double *u = coder_orthogonal(random, dim), *w = coder_orthogonal(random, dim);
  for (size_t i = 0; i < dim; i++) {
    for (size_t j = 0; j < dim; j++) {
      double a = 0, s = 0;
      for (size_t c = 0; c < dim; c++) {
        const double scale = pow(skew, 2.0 * (double)c / (double)(dim - 1) - 1);
        a += u[i * dim + c] * scale * w[c * dim + j];
        s += u[i * dim + c] / scale * w[c * dim + j];
      }
      analysis[i * dim + j] = (float)a;
      synthesis[i * dim + j] = (float)s;
    }
  }
  free(u);
  free(w);
}

// Keys are turned back to blocks of pages: the synthesis as queries take it, and a mean of what does not turn.
static inline void transform_by_blocks(owned_transform *owned, const qkv_rope *rope) {
  const size_t dim = owned->transform.schedule->dim;
  const float *synthesis = owned->transform.synthesis;
  float *ordered = coder_allocate(dim * dim, sizeof *ordered);
  for (size_t c = 0; c < dim; c++) {
    for (size_t i = 0; i < dim; i++) ordered[c * dim + i] = synthesis[c * dim + qkv_turn_input(rope, i)];
  }
  for (size_t i = 0; i < rope->width; i++) owned->vectors[qkv_turn_input(rope, i)] = 0;
  free(owned->whole[1]);
  owned->turning = coder_whole(ordered, dim, &owned->whole[1]);
  owned->plan = qkv_turn_plan_of(rope, QKV_TURN_BLOCKS);
  owned->transform.plan = &owned->plan;
  free(ordered);
}

// A random transform with a mean: dense, with a random schedule where `banded`. With `rope`, a rotating anchor of
// some of its pairs, and half of the time keys that are turned back to blocks of pages.
static inline void transform_init(owned_transform *owned, naive_random *random, uint16_t dim, bool banded,
                                  double skew, const qkv_rope *rope) {
  const size_t square = (size_t)dim * dim, pairs_floats = (size_t)2 * QKV_ANCHOR_PAIRS_MAX;
  memset(owned, 0, sizeof *owned);
  banded ? naive_schedule(random, dim, &owned->schedule) : qkv_schedule_uniform(&owned->schedule, dim);
  owned->matrices = coder_allocate(2 * square, sizeof(float));
  owned->vectors = coder_allocate((size_t)2 * dim + pairs_floats, sizeof(float));
  float *mean = owned->vectors, *weights = mean + dim, *anchor = weights + dim;
  coder_dual_matrices(random, dim, skew, owned->matrices, owned->matrices + square);
  for (size_t c = 0; c < dim; c++) mean[c] = (float)naive_gaussian(random);
  for (size_t c = 0; c < dim; c++) weights[c] = (float)exp(naive_gaussian(random));
  uint16_t pairs = 0;
  for (uint16_t pair = 0; rope != NULL && pair < rope->width / 2 && pairs < QKV_ANCHOR_PAIRS_MAX; pair++) {
    if (naive_below(random, 3) == 0) continue;
    for (size_t i = 0; i < 2; i++) anchor[2 * (size_t)pairs + i] = (float)(3 * naive_gaussian(random));
    owned->pairs[pairs++] = pair;
  }
  float *columns = coder_allocate(square, sizeof *columns);
  for (size_t i = 0; i < square; i++) columns[i] = owned->matrices[square + i % dim * dim + i / dim];
  owned->forward = coder_whole(owned->matrices, dim, &owned->whole[0]);
  owned->turning = coder_whole(owned->matrices + square, dim, &owned->whole[1]);
  owned->backward = coder_whole(columns, dim, &owned->whole[2]);
  free(columns);
  owned->transform = (qkv_transform){.schedule = &owned->schedule,
                                     .forward = &owned->forward,
                                     .backward = &owned->backward,
                                     .turning = &owned->turning,
                                     .analysis = owned->matrices,
                                     .synthesis = owned->matrices + square,
                                     .mean = mean,
                                     .weights = weights,
                                     .anchor_pairs = pairs,
                                     .pair_indices = pairs > 0 ? owned->pairs : NULL,
                                     .anchor = pairs > 0 ? anchor : NULL};
  if (rope != NULL && naive_below(random, 2) == 0) transform_by_blocks(owned, rope);
}

// As if calibrated: each head has transforms, schedules and tiers of its own, between half the budget's and the
// budget's twice.
static inline qkv_coder *coder_create_dense(naive_random *random, uint16_t kv_heads, uint16_t key_dim,
                                            uint16_t value_dim, double bits_k, double bits_v, qkv_frame frame,
                                            const qkv_rope *rope) {
  qkv_coder *coder = coder_create(kv_heads, key_dim, value_dim, bits_k, bits_v, frame, rope);
  owned_coder *made = (owned_coder *)coder;
  coder->calibration = 1 + naive_below(random, 1000);
  made->transforms = coder_allocate((size_t)2 * kv_heads, sizeof *made->transforms);
  for (uint16_t h = 0; h < kv_heads; h++) {
    for (qkv_part part = QKV_K; part <= QKV_V; part++) {
      owned_transform *owned = &made->transforms[2 * h + part];
      const unsigned budget = made->heads[h].tiers[part];
      unsigned tier = 1 + budget / 2 + naive_below(random, budget / 2 * 3 + 1);
      transform_init(owned, random, part == QKV_K ? key_dim : value_dim, naive_below(random, 2) == 0,
                     naive_below(random, 2) == 0 ? 1 : 3, part == QKV_K && frame == QKV_FRAME_ATTEND ? rope : NULL);
      made->heads[h].transforms[part] = &owned->transform;
      made->heads[h].schedules[part] = &owned->schedule;
      if (tier > QKV_TIER_MAX) tier = QKV_TIER_MAX;
      while (owned->schedule.reach[tier][1] == 0) tier++;  // something is coded
      made->heads[h].tiers[part] = (uint8_t)tier;
    }
    if (frame == QKV_FRAME_ARCHIVE) coder_rebuild(&made->heads[h]);
  }
  return coder;
}

#endif
