// A calibration from a dump of rows (client/format/dump.h), for a model that the daemon knows.
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "client/c/codes.h"
#include "client/cli/cli.h"
#include "client/common/terminal.h"
#include "client/format/dump.h"
#include "engine/codec/calibrate.h"

enum { BLOCK = 256 };  // tokens that are read at once
#define POSITION_MAX ((uint64_t)1 << 53)

typedef struct learn_job {
  const Qkv__V1__Model *model;
  qkv_dump *dump;
  qkv_moments *moments;
  float *rows[2];  // [BLOCK] of two kinds
  qkv_progress progress;
} learn_job;

static qkv_status shape_of(const Qkv__V1__Model *model, qkv_calibration_shape *shape, qkv_error *error) {
  *shape = (qkv_calibration_shape){.layers = model->layers,
                                   .kv_heads = model->kv_heads,
                                   .q_heads = model->q_heads,
                                   .key_dim = model->key_dim,
                                   .value_dim = model->value_dim,
                                   .rope = qkvi_rope_of_message(model->rope)};
  QKV_TRY(qkv_calibration_shape_check(shape, error));
  return qkv_rope_resolve(&shape->rope, shape->key_dim, error);
}

static bool stays_exact(const Qkv__V1__Model *model, uint32_t layer) {
  for (size_t i = 0; i < model->n_overrides; i++) {
    const Qkv__V1__LayerOverride *override = model->overrides[i];
    if (override->layer == layer && override->policy != NULL) return strcmp(override->policy->codec, "exact") == 0;
  }
  return false;
}

static qkv_status check_layers(const learn_job *job, qkv_error *error) {
  bool found[QKV_DUMP_LAYERS_MAX] = {false};
  const Qkv__V1__Model *model = job->model;
  for (size_t i = 0; i < qkv_dump_layers(job->dump); i++) {
    const uint32_t number = qkv_dump_number(job->dump, i);
    if (number >= model->layers) {
      return qkv_fail(error, QKV_INVALID_ARGUMENT,
                      "it has rows of layer %" PRIu32 ", the model %s has %" PRIu32 " layers", number, model->name,
                      model->layers);
    }
    found[number] = true;
    if (qkv_dump_first_position(job->dump) + qkv_dump_tokens(job->dump, i, QKV_DUMP_K) > POSITION_MAX) {
      return qkv_fail(error, QKV_INVALID_ARGUMENT, "its first_position is %" PRIu64 ", positions end at %" PRIu64,
                      qkv_dump_first_position(job->dump), POSITION_MAX);
    }
  }
  for (uint32_t layer = 0; layer < model->layers; layer++) {
    if (found[layer] || stays_exact(model, layer)) continue;
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "it has no rows of layer %" PRIu32 ", which the model %s codes",
                    layer, model->name);
  }
  return QKV_OK;
}

static qkv_status check_fit(const learn_job *job, const qkv_calibration_shape *shape, qkv_error *error) {
  const struct {
    qkv_dump_kind kind;
    const char *name;
    uint32_t heads, width;
  } rows[] = {{QKV_DUMP_K, "keys", shape->kv_heads, shape->key_dim},
              {QKV_DUMP_V, "values", shape->kv_heads, shape->value_dim},
              {QKV_DUMP_Q, "queries", shape->q_heads, shape->key_dim}};
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    const uint32_t heads = qkv_dump_heads(job->dump, rows[i].kind), width = qkv_dump_width(job->dump, rows[i].kind);
    if (heads == 0 || (heads == rows[i].heads && width == rows[i].width)) continue;
    return qkv_fail(error, QKV_INVALID_ARGUMENT,
                    "its %s have %" PRIu32 " heads of %" PRIu32 ", the model %s has %" PRIu32 " of %" PRIu32,
                    rows[i].name, heads, width, job->model->name, rows[i].heads, rows[i].width);
  }
  return check_layers(job, error);
}

static uint64_t block_of(uint64_t first, uint64_t all) {
  return all - first < BLOCK ? all - first : BLOCK;
}

static void learn_layer(learn_job *job, size_t index) {
  const uint32_t layer = qkv_dump_number(job->dump, index);
  const bool before = qkv_dump_before_rope(job->dump);
  const uint64_t position = qkv_dump_first_position(job->dump);
  const uint64_t tokens = qkv_dump_tokens(job->dump, index, QKV_DUMP_K);
  const uint64_t queries = qkv_dump_tokens(job->dump, index, QKV_DUMP_Q);
  uint64_t n;
  for (uint64_t at = 0; at < tokens; at += n) {
    n = block_of(at, tokens);
    qkv_dump_read(job->dump, index, QKV_DUMP_K, at, n, job->rows[0]);
    qkv_dump_read(job->dump, index, QKV_DUMP_V, at, n, job->rows[1]);
    qkv_moments_add(job->moments, layer, position + at, n, job->rows[0], job->rows[1], before);
    qkv_progress_add(&job->progress, n);
  }
  for (uint64_t at = 0; at < queries; at += n) {
    n = block_of(at, queries);
    qkv_dump_read(job->dump, index, QKV_DUMP_Q, at, n, job->rows[0]);
    qkv_moments_add_queries(job->moments, layer, position + tokens - queries + at, n, job->rows[0], before);
    qkv_progress_add(&job->progress, n);
  }
}

static float *floats(uint64_t rows, uint64_t width) {
  float *made = calloc(rows * width, sizeof *made);
  if (made == NULL) abort();
  return made;
}

static void learn_layers(learn_job *job, const qkv_calibration_shape *shape) {
  uint64_t rows = 0;
  const size_t layers = qkv_dump_layers(job->dump);
  for (size_t i = 0; i < layers; i++) {
    rows += qkv_dump_tokens(job->dump, i, QKV_DUMP_K) + qkv_dump_tokens(job->dump, i, QKV_DUMP_Q);
  }
  job->moments = qkv_moments_create(shape);
  qkv_moments_leave_out_before(job->moments, job->model->policy != NULL ? job->model->policy->sink_tokens : 0);
  job->rows[0] = floats(BLOCK, (uint64_t)shape->q_heads * shape->key_dim);  // of keys, too, whose heads are no more
  job->rows[1] = floats(BLOCK, (uint64_t)shape->kv_heads * shape->value_dim);
  qkv_progress_start(&job->progress, "calibrating", rows);
  for (size_t i = 0; i < layers; i++) learn_layer(job, i);
  qkv_progress_end(&job->progress);
  free(job->rows[0]);
  free(job->rows[1]);
}

qkv_status qkvctl_learn(const char *path, const Qkv__V1__Model *model, qkv_calibration **calibration,
                        qkv_error *error) {
  learn_job job = {.model = model};
  qkv_calibration_shape shape;
  *calibration = NULL;
  QKV_TRY(shape_of(model, &shape, error));
  QKV_TRY(qkv_dump_open(path, &job.dump, error));
  qkv_status status = check_fit(&job, &shape, error);
  if (status == QKV_OK) {
    learn_layers(&job, &shape);
    status = qkv_calibrate(job.moments, &QKV_CALIBRATE_DEFAULTS, calibration, error);
    qkv_moments_destroy(&job.moments);
  }
  qkv_dump_close(&job.dump);
  return status == QKV_OK ? QKV_OK : qkv_error_prefix(error, "%s: ", path);
}
