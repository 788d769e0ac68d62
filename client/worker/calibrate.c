#include "client/worker/calibrate.h"

#include <assert.h>
#include <stdlib.h>

#include "client/worker/exact.h"
#include "client/worker/forward.h"
#include "engine/codec/calibrate.h"

enum { BATCH = 256 };  // tokens of a forward pass

// A cache that is looked at.
typedef struct watched_kv {
  qkvi_kv kv;
  qkvi_exact *exact;
  qkv_moments *moments;
} watched_kv;

struct qkvi_calibrator {
  watched_kv cache;
  qkvi_forward *forward;
  int64_t window;
  float logits[BATCH * QKVI_LM_VOCABULARY];  // not looked at
};

static qkv_status step(qkvi_kv *kv, const qkvi_kv_rows *rows, float *out, qkv_error *error) {
  watched_kv *cache = (watched_kv *)kv;
  const uint32_t layer = (uint32_t)rows->layer;
  const uint64_t position = (uint64_t)rows->position;
  const size_t tokens = (size_t)rows->tokens;
  qkv_moments_add(cache->moments, layer, position, tokens, rows->k, rows->v, false);
  qkv_moments_add_queries(cache->moments, layer, position, tokens, rows->q, false);
  qkvi_kv *exact = qkvi_exact_kv(cache->exact);
  return exact->step(exact, rows, out, error);
}

static qkv_status shape_of(const qkvi_lm *lm, qkv_calibration_shape *shape, qkv_error *error) {
  *shape = (qkv_calibration_shape){.layers = (uint32_t)lm->layers,
                                   .kv_heads = (uint32_t)lm->kv_heads,
                                   .q_heads = (uint32_t)lm->q_heads,
                                   .key_dim = (uint32_t)lm->head_dim,
                                   .value_dim = (uint32_t)lm->head_dim,
                                   .rope = {.theta = lm->rope_theta}};
  QKV_TRY(qkv_calibration_shape_check(shape, error));
  return qkv_rope_resolve(&shape->rope, shape->key_dim, error);
}

qkv_status qkvi_calibrator_create(const qkvi_lm *lm, int64_t window, qkvi_calibrator **calibrator, qkv_error *error) {
  qkv_calibration_shape shape;
  *calibrator = NULL;
  QKV_TRY(shape_of(lm, &shape, error));
  qkvi_calibrator *created = calloc(1, sizeof *created);
  if (created == NULL) abort();
  created->cache.kv.step = step;
  created->cache.exact = qkvi_exact_create(lm, window);
  created->cache.moments = qkv_moments_create(&shape);
  created->forward = qkvi_forward_create(lm, BATCH, window);
  created->window = window;
  *calibrator = created;
  return QKV_OK;
}

void qkvi_calibrator_destroy(qkvi_calibrator **calibrator) {
  if (*calibrator == NULL) return;
  qkvi_forward_destroy(&(*calibrator)->forward);
  qkvi_exact_destroy(&(*calibrator)->cache.exact);
  qkv_moments_destroy(&(*calibrator)->cache.moments);
  free(*calibrator);
  *calibrator = NULL;
}

qkv_status qkvi_calibrator_add(qkvi_calibrator *calibrator, const uint8_t *window, int64_t tokens, qkv_error *error) {
  assert(tokens <= calibrator->window);
  for (int64_t done = 0; done < tokens; done += BATCH) {
    const int64_t batch = tokens - done < BATCH ? tokens - done : BATCH;
    QKV_TRY(qkvi_forward_run(calibrator->forward, window + done, batch, done, &calibrator->cache.kv,
                             calibrator->logits, error));
  }
  return QKV_OK;
}

qkv_status qkvi_calibrator_finish(const qkvi_calibrator *calibrator, qkv_calibration **calibration,
                                  qkv_error *error) {
  return qkv_calibrate(calibrator->cache.moments, &QKV_CALIBRATE_DEFAULTS, calibration, error);
}
