// The limits of a request.
#include <assert.h>
#include <inttypes.h>
#include <math.h>

#include "engine/cache/attend_internal.h"

static qkv_status check_options(const qkv_attend *request, qkv_error *error) {
  const qkv_attend_options *options = &request->options;
  QKV_TRY(qkv_factor_check("options.scale", options->scale, error));
  QKV_TRY(qkv_factor_check("options.soft_cap", options->soft_cap, error));
  if (options->end != 0 && options->begin > options->end) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "options.range.begin is %" PRIu64 ", at most range.end %" PRIu64,
                    options->begin, options->end);
  }
  if ((unsigned)options->precision > QKV_PRECISION_INT8) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "options.precision is %d, known are 0 to %d",
                    (int)options->precision, QKV_PRECISION_INT8);
  }
  if (options->not_causal && qkvi_attend_window(request) != 0) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "options.not_causal excludes a sliding window");
  }
  return QKV_OK;
}

static qkv_status check_positions(const qkv_attend *request, qkv_error *error) {
  int64_t offset = request->options.causal_offset, limit = (int64_t)QKV_POSITION_MAX;
  if (request->position > QKV_POSITION_MAX) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "position is %" PRIu64 ", positions end at %" PRIu64,
                    request->position, QKV_POSITION_MAX);
  }
  if (offset > limit || offset < -limit) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT,
                    "options.causal_offset is %" PRId64 ", allowed are -%" PRId64 " to %" PRId64, offset, limit,
                    limit);
  }
  if (request->q.dims[0] > limit || qkvi_attend_stand(request, (uint64_t)request->q.dims[0]) > limit) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT,
                    "position is %" PRIu64 ", with causal_offset %" PRId64 " for %" PRId64
                    " queries, positions end at %" PRId64,
                    request->position, offset, request->q.dims[0], limit);
  }
  if (request->q_before_rope && qkvi_attend_stand(request, 0) < 0) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT,
                    "options.causal_offset is %" PRId64 ", which rotates query 0 to a position below 0", offset);
  }
  return QKV_OK;
}

static qkv_status check_shape(const qkv_attend *request, qkv_error *error) {
  const qkv_model *model = request->layer->config.model;
  const qkv_tensor *q = &request->q;
  assert(q->rank == 3);
  if (q->dims[1] != model->q_heads) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "q.dims[1] is %" PRId64 ", the model %s has %" PRIu32 " q_heads",
                    q->dims[1], model->name, model->q_heads);
  }
  if (q->dims[2] != model->key_dim) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "q.dims[2] is %" PRId64 ", the model %s has key_dim %" PRIu32,
                    q->dims[2], model->name, model->key_dim);
  }
  return QKV_OK;
}

static qkv_status check_query(const qkv_attend *request, int64_t query, int64_t head, qkv_error *error) {
  float row[QKV_DIM_MAX];
  size_t dim = request->layer->config.model->key_dim;
  int outside = 0;
  qkv_tensor_row(&request->q, query, head, row);
  for (size_t i = 0; i < dim; i++) outside |= !(fabsf(row[i]) <= QKV_ROW_MAX);
  if (outside == 0) return QKV_OK;
  size_t i = 0;
  while (fabsf(row[i]) <= QKV_ROW_MAX) i++;
  if (!isfinite(row[i])) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "q[%" PRId64 ", %" PRId64 ", %zu] is %s", query, head, i,
                    isnan(row[i]) ? "nan" : "inf");
  }
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "q[%" PRId64 ", %" PRId64 ", %zu] is %g, allowed are -%g to %g", query,
                  head, i, (double)row[i], (double)QKV_ROW_MAX, (double)QKV_ROW_MAX);
}

qkv_status qkv_attend_check(const qkv_attend *request, qkv_error *error) {
  QKV_TRY(check_shape(request, error));
  QKV_TRY(check_options(request, error));
  QKV_TRY(check_positions(request, error));
  for (int64_t query = 0; query < request->q.dims[0]; query++) {
    for (int64_t head = 0; head < request->q.dims[1]; head++) QKV_TRY(check_query(request, query, head, error));
  }
  return QKV_OK;
}

void qkv_attend_span(const qkv_attend *request, uint64_t *begin, uint64_t *end) {
  uint64_t unused;
  qkvi_attend_visible(request, 0, begin, &unused);
  qkvi_attend_visible(request, (uint64_t)request->q.dims[0] - 1, &unused, end);
}
