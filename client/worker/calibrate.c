#include "client/worker/calibrate.h"

#include <assert.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/worker/exact.h"
#include "client/worker/forward.h"
#include "engine/cache/model.h"
#include "engine/codec/calibrate.h"

enum {
  BATCH = 256,         // tokens of a forward pass, whole pages
  SINK_TOKENS = 4,     // that are kept as outliers by default
  LEARN_FIRST = 1024,  // tokens before some are held out
};

// A cache that is looked at.
typedef struct watched_kv {
  qkvi_kv kv;
  qkvi_exact *exact;
  qkv_moments *moments;
  qkv_holdout *holdout;
  size_t k_values, v_values, q_values;  // of a token
  int64_t tokens;                       // of the window at hand
  int64_t before;                       // of those before it
  bool learns_all;
} watched_kv;

struct qkvi_calibrator {
  watched_kv cache;
  qkv_model model;
  qkvi_forward *forward;
  int64_t window;
  qkv_section_wants wants;
};

static bool holds_out(const watched_kv *cache) {
  return !cache->learns_all && cache->before >= LEARN_FIRST;
}

// Whole pages may be held out, tokens behind the last one are learnt from.
static void look_at_rows(watched_kv *cache, const qkvi_kv_rows *rows) {
  const uint32_t layer = (uint32_t)rows->layer;
  const size_t tokens = (size_t)rows->tokens;
  for (size_t begin = 0; begin < tokens; begin += QKV_PAGE_TOKENS) {
    const size_t count = tokens - begin < QKV_PAGE_TOKENS ? tokens - begin : QKV_PAGE_TOKENS;
    const uint64_t position = (uint64_t)rows->position + begin;
    const float *k = rows->k + begin * cache->k_values, *v = rows->v + begin * cache->v_values;
    const bool held =
        holds_out(cache) && count == QKV_PAGE_TOKENS && qkv_holdout_page(cache->holdout, layer, position, k, v);
    if (!held) qkv_moments_add(cache->moments, layer, position, count, k, v, false);
  }
}

// Those that see the most of a window, as queries of an answer do, may be held out.
static void look_at_queries(watched_kv *cache, const qkvi_kv_rows *rows) {
  const uint32_t layer = (uint32_t)rows->layer;
  for (size_t i = 0; i < (size_t)rows->tokens; i++) {
    const uint64_t position = (uint64_t)rows->position + i;
    const float *q = rows->q + i * cache->q_values;
    const bool late = holds_out(cache) && 4 * position >= 3 * (uint64_t)cache->tokens;
    if (late && qkv_holdout_query(cache->holdout, layer, position, q, false)) continue;
    qkv_moments_add_queries(cache->moments, layer, position, 1, q, false);
  }
}

static qkv_status step(qkvi_kv *kv, const qkvi_kv_rows *rows, float *out, qkv_error *error) {
  watched_kv *cache = (watched_kv *)kv;
  look_at_rows(cache, rows);
  look_at_queries(cache, rows);
  qkvi_kv *exact = qkvi_exact_kv(cache->exact);
  return exact->step(exact, rows, out, error);
}

static qkv_status model_of(const qkvi_lm *lm, qkv_model *model, qkv_error *error) {
  *model = (qkv_model){.layers = (uint32_t)lm->layers,
                       .kv_heads = (uint32_t)lm->kv_heads,
                       .q_heads = (uint32_t)lm->q_heads,
                       .key_dim = (uint32_t)lm->head_dim,
                       .value_dim = (uint32_t)lm->head_dim,
                       .dtype = QKV_FP16,
                       .rope = {.theta = lm->rope_theta},
                       .policy = QKV_POLICY_UNSET};
  (void)snprintf(model->name, sizeof model->name, "learnt");
  model->policy.codec = qkv_codec_by_id(QKV_CODEC_EMBEDDED);
  model->policy.bits_k = model->policy.bits_v = QKV_RUNG_MANY;
  model->policy.sink_tokens = SINK_TOKENS;
  const qkv_calibration_shape shape = qkv_model_calibration_shape(model);
  QKV_TRY(qkv_calibration_shape_check(&shape, error));
  return qkv_model_resolve(model, error);
}

static qkv_holdout *make_holdout(const qkv_model *model) {
  const qkv_holdout_shape shape = qkv_probation_sample(model);
  bool *teaches = malloc(model->layers * sizeof *teaches);
  if (teaches == NULL) abort();
  memset(teaches, true, model->layers);
  qkv_holdout *holdout = qkv_holdout_create(&shape, teaches);
  free(teaches);
  qkv_holdout_begin_pages(holdout);
  qkv_holdout_begin_queries(holdout);
  return holdout;
}

qkv_status qkvi_calibrator_create(const qkvi_lm *lm, int64_t window, qkvi_calibrator **calibrator, qkv_error *error) {
  qkv_model model;
  *calibrator = NULL;
  QKV_TRY(model_of(lm, &model, error));
  const qkv_calibration_shape shape = qkv_model_calibration_shape(&model);
  qkvi_calibrator *created = calloc(1, sizeof *created);
  if (created == NULL) abort();
  created->model = model;
  created->cache = (watched_kv){.kv = {.step = step},
                                .exact = qkvi_exact_create(lm, window),
                                .moments = qkv_moments_create(&shape),
                                .holdout = make_holdout(&model),
                                .k_values = (size_t)model.kv_heads * model.key_dim,
                                .v_values = (size_t)model.kv_heads * model.value_dim,
                                .q_values = (size_t)model.q_heads * model.key_dim};
  qkv_moments_leave_out_before(created->cache.moments, SINK_TOKENS);
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
  qkv_holdout_destroy(&(*calibrator)->cache.holdout);
  free(*calibrator);
  *calibrator = NULL;
}

void qkvi_calibrator_learn_all(qkvi_calibrator *calibrator) {
  calibrator->cache.learns_all = true;
}

void qkvi_calibrator_want(qkvi_calibrator *calibrator, const qkv_section_wants *wants) {
  calibrator->wants = *wants;
}

qkv_status qkvi_calibrator_add(qkvi_calibrator *calibrator, const int32_t *window, int64_t tokens, qkv_error *error) {
  assert(tokens <= calibrator->window);
  calibrator->cache.before += calibrator->cache.tokens;
  calibrator->cache.tokens = tokens;
  for (int64_t done = 0; done < tokens; done += BATCH) {
    const int64_t batch = tokens - done < BATCH ? tokens - done : BATCH;
    QKV_TRY(qkvi_forward_run(calibrator->forward, window + done, batch, done, &calibrator->cache.kv, 0, NULL, error));
  }
  return QKV_OK;
}

static bool has_sample(const qkvi_calibrator *calibrator) {
  for (uint32_t layer = 0; layer < calibrator->model.layers; layer++) {
    if (!qkv_holdout_ready(calibrator->cache.holdout, layer, 0)) return false;
  }
  return true;
}

// The sample is this thread's alone.
static void hold_nothing(void *context, uint32_t layer, bool holds) {
  (void)context;
  (void)layer;
  (void)holds;
}

// Takes the candidate's reference.
static qkv_status try_out(const qkvi_calibrator *calibrator, const qkv_calibration *candidate, qkv_verdict *verdict,
                          const qkv_calibration **accepted, qkv_error *error) {
  static const _Atomic bool never = false;
  qkv_kind kinds[QKV_PROBATION_RUNGS];
  qkv_probation_rungs(&calibrator->model.policy, kinds);
  const qkv_probation probation = {.model = &calibrator->model,
                                   .holdout = calibrator->cache.holdout,
                                   .candidate = candidate,
                                   .kinds = kinds,
                                   .kind_count = QKV_PROBATION_RUNGS,
                                   .hold = hold_nothing,
                                   .cancelled = &never};
  QKV_TRY(qkv_probation_try(&probation, verdict, accepted, error));
  if (*accepted != NULL) return QKV_OK;
  return qkv_fail(error, QKV_FAILED_PRECONDITION, "the calibration is no better than data-free code: %s",
                  verdict->worst);
}

qkv_status qkvi_calibrator_finish(const qkvi_calibrator *calibrator, qkv_verdict *verdict,
                                  const qkv_calibration **calibration, qkv_error *error) {
  qkv_calibration *candidate = NULL;
  *verdict = (qkv_verdict){0};
  *calibration = NULL;
  QKV_TRY(qkv_calibrate(calibrator->cache.moments, &QKV_CALIBRATE_DEFAULTS, &candidate, error));
  const qkv_calibration *plain = candidate;
  QKV_TRY(qkv_calibration_add_sections(&plain, &calibrator->wants, NULL, &candidate, error));
  if (has_sample(calibrator)) return try_out(calibrator, candidate, verdict, calibration, error);
  *calibration = candidate;
  return QKV_OK;
}
