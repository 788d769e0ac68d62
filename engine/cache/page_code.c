#include "engine/cache/page_code.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cache/layer.h"
#include "engine/cache/layer_internal.h"

struct qkv_page_code {
  qkv_model model;  // with overrides of its own, and neither calibration nor learner
  qkv_coding *coding;
  const qkv_calibration *calibration;  // NULL: none
  atomic_size_t references;
};

// ---- Life ----

static qkv_status check(const qkv_model *model, const qkv_policy *policy, const qkv_calibration *calibration,
                        qkv_error *error) {
  QKV_TRY(qkv_policy_check(policy, error));
  QKV_TRY(qkv_model_policy_check(model, policy, error));
  if (policy->codec == NULL || policy->recent_window < 0)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "policy is not the resolved one of a session");
  if (calibration == NULL) return QKV_OK;
  const qkv_calibration_shape shape = qkv_model_calibration_shape(model);
  return qkv_calibration_check(calibration, &shape, error);
}

qkv_status qkv_page_code_create(const qkv_model *model, const qkv_policy *policy, qkv_purpose purpose,
                                const qkv_calibration *calibration, const qkv_page_code **out, qkv_error *error) {
  *out = NULL;
  QKV_TRY(check(model, policy, calibration, error));
  qkv_page_code *code = calloc(1, sizeof *code);
  if (code == NULL) abort();
  code->model = *model;
  code->model.calibration = NULL;
  code->model.learner = NULL;
  code->model.overrides = calloc(model->override_count + 1, sizeof *model->overrides);
  if (code->model.overrides == NULL) abort();
  if (model->override_count > 0)
    memcpy(code->model.overrides, model->overrides, model->override_count * sizeof *model->overrides);
  code->coding = qkv_coding_get(&code->model, policy, purpose, calibration);
  code->calibration = qkv_calibration_ref(calibration);
  atomic_init(&code->references, 1);
  *out = code;
  return QKV_OK;
}

const qkv_page_code *qkv_page_code_ref(const qkv_page_code *code) {
  // The count is the one thing that changes.
  const size_t before =
      atomic_fetch_add_explicit(&((qkv_page_code *)(uintptr_t)code)->references, 1, memory_order_relaxed);
  assert(before > 0);
  (void)before;
  return code;
}

void qkv_page_code_unref(const qkv_page_code **code) {
  qkv_page_code *left = (qkv_page_code *)(uintptr_t)*code;
  *code = NULL;
  if (left == NULL || atomic_fetch_sub_explicit(&left->references, 1, memory_order_acq_rel) != 1) return;
  qkv_calibration_unref(&left->calibration);
  qkv_coding_unref(&left->coding);
  free(left->model.overrides);
  free(left);
}

static qkv_status find_coder(const qkv_page_code *code, uint32_t layer, const qkv_coder **coder, qkv_error *error) {
  if (layer >= code->model.layers)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "layer is %" PRIu32 ", the model %s has %" PRIu32 " layers", layer,
                    code->model.name, code->model.layers);
  *coder = qkv_coding_layer(code->coding, layer);
  if (!qkv_codec_is_exact((*coder)->codec)) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "layer %" PRIu32 " keeps exact rows and has no pages", layer);
}

// ---- Out of a page ----

static void decode_part(const qkv_page_code *code, const qkv_coder *coder, const void *image, qkv_part part,
                        const qkv_page_rows *rows) {
  float decoded[QKV_PAGE_TOKENS * QKV_DIM_MAX];
  const size_t heads = code->model.kv_heads, dim = qkvi_part_dim(&code->model, part);
  const size_t row = dim * qkv_dtype_size(rows->dtype);
  const bool before_rope = part == QKV_K && rows->before_rope && code->model.rope.theta != 0;
  uint8_t *out = part == QKV_K ? rows->k : rows->v;
  for (size_t head = 0; head < heads && out != NULL; head++) {
    coder->codec->decode(coder, image, (uint16_t)head, part, before_rope, decoded);
    for (size_t t = 0; t < rows->tokens; t++)
      qkv_from_float(rows->dtype, decoded + (rows->first + t) * dim, out + (t * heads + head) * row, dim);
  }
}

// The kernels read at multiples of 64.
static void *aligned_copy(const void *image, size_t bytes) {
  void *copy = aligned_alloc(QKV_ARENA_ALIGN, (bytes + QKV_ARENA_ALIGN - 1) / QKV_ARENA_ALIGN * QKV_ARENA_ALIGN);
  if (copy == NULL) abort();
  memcpy(copy, image, bytes);
  return copy;
}

qkv_status qkv_page_code_decode(const qkv_page_code *code, uint32_t layer, const void *image, size_t bytes,
                                const qkv_page_rows *rows, qkv_error *error) {
  const qkv_coder *coder = NULL;
  QKV_TRY(find_coder(code, layer, &coder, error));
  assert(coder != NULL);
  QKV_TRY(coder->codec->validate(coder, image, bytes, error));
  qkv_page_header header;
  memcpy(&header, image, sizeof header);
  if (header.layer != layer || header.position > QKV_POSITION_MAX)
    return qkv_fail(error, QKV_DATA_LOSS, "it is the page at position %" PRIu64 " of layer %" PRIu32, header.position,
                    header.layer);
  if (rows->tokens > header.tokens || rows->first > header.tokens - rows->tokens || qkv_dtype_size(rows->dtype) == 0)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "tokens %" PRIu32 " to %" PRIu64 " as %s are asked, the page has %u",
                    rows->first, (uint64_t)rows->first + rows->tokens, qkv_dtype_name(rows->dtype), header.tokens);
  void *copy = (uintptr_t)image % QKV_ARENA_ALIGN == 0 ? NULL : aligned_copy(image, bytes);
  for (qkv_part part = QKV_K; part <= QKV_V; part++)
    decode_part(code, coder, copy == NULL ? image : copy, part, rows);
  free(copy);
  return QKV_OK;
}

// ---- Into a page ----

uint32_t qkv_page_code_layers(const qkv_page_code *code) {
  return code->model.layers;
}

const qkv_calibration *qkv_page_code_calibration(const qkv_page_code *code) {
  return code->calibration;
}

size_t qkv_page_code_bytes_max(const qkv_page_code *code, uint32_t layer) {
  const qkv_coder *coder = qkv_coding_layer(code->coding, layer);
  return qkv_codec_is_exact(coder->codec) ? 0 : coder->codec->page_bytes_max(coder);
}

static qkv_status check_shape(const qkv_page_code *code, const qkv_tensor *tensor, qkv_part part, int64_t tokens,
                              qkv_error *error) {
  const char *name = part == QKV_K ? "k" : "v";
  const int64_t heads = code->model.kv_heads, dim = qkvi_part_dim(&code->model, part);
  if (tensor->rank == 3 && tensor->dims[0] == tokens && tokens >= 1 && tokens <= QKV_PAGE_TOKENS &&
      tensor->dims[1] == heads && tensor->dims[2] == dim)
    return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT,
                  "%s.dims are [%" PRId64 ", %" PRId64 ", %" PRId64 "], a page takes [1 to %d, %" PRId64 ", %" PRId64
                  "], k and v alike",
                  name, tensor->dims[0], tensor->dims[1], tensor->dims[2], QKV_PAGE_TOKENS, heads, dim);
}

// One row as a page is made of it, in the model's dtype, rotated where `rotate`; `index` is of its token and head.
static qkv_status convert_row(const qkv_page_code *code, const qkv_tensor *tensor, qkv_part part,
                              const int64_t index[2], uint64_t position, bool rotate, uint8_t *out,
                              qkv_error *error) {
  float row[QKV_DIM_MAX];
  const size_t dim = qkvi_part_dim(&code->model, part);
  qkv_tensor_row(tensor, index[0], index[1], row);
  if (rotate) qkv_rope_forward(&code->model.rope, row, position + (uint64_t)index[0]);
  for (size_t i = 0; i < dim; i++) {
    if (fabsf(row[i]) <= QKV_ROW_MAX) continue;
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s[%" PRId64 ", %" PRId64 ", %zu] is %g%s, allowed are -%g to %g",
                    part == QKV_K ? "k" : "v", index[0], index[1], i, (double)row[i], rotate ? " after RoPE" : "",
                    (double)QKV_ROW_MAX, (double)QKV_ROW_MAX);
  }
  qkv_from_float(code->model.dtype, row, out, dim);
  return QKV_OK;
}

// Rows in the model's dtype, dense. A token's rows are copied where they stay as they are.
static qkv_status convert(const qkv_page_code *code, const qkv_tensor *tensor, qkv_part part, uint64_t position,
                          bool rotate, uint8_t *out, qkv_error *error) {
  const size_t size = qkvi_part_dim(&code->model, part) * qkv_dtype_size(code->model.dtype);
  for (int64_t token = 0; token < tensor->dims[0]; token++) {
    const bool same = !rotate && tensor->dtype == code->model.dtype && qkv_tensor_within(tensor, token, QKV_ROW_MAX);
    for (int64_t head = 0; head < tensor->dims[1]; head++, out += size) {
      const int64_t index[] = {token, head};
      if (same) {
        qkv_tensor_row_raw(tensor, token, head, out);
      } else {
        QKV_TRY(convert_row(code, tensor, part, index, position, rotate, out, error));
      }
    }
  }
  return QKV_OK;
}

qkv_status qkv_page_code_encode(const qkv_page_code *code, uint32_t layer, uint64_t position, const qkv_tensor *k,
                                const qkv_tensor *v, bool before_rope, void *image, size_t *bytes, qkv_error *error) {
  const qkv_model *model = &code->model;
  const qkv_coder *coder = NULL;
  QKV_TRY(find_coder(code, layer, &coder, error));
  QKV_TRY(check_shape(code, k, QKV_K, k->dims[0], error));
  QKV_TRY(check_shape(code, v, QKV_V, k->dims[0], error));
  if (position > QKV_POSITION_MAX - QKV_PAGE_TOKENS)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "position is %" PRIu64 ", positions end at %" PRIu64, position,
                    QKV_POSITION_MAX);
  assert(coder != NULL);
  uint8_t *rows = malloc(qkvi_block_bytes(model));
  if (rows == NULL) abort();
  uint8_t *values = rows + QKV_PAGE_TOKENS * (size_t)model->kv_heads * model->key_dim * qkv_dtype_size(model->dtype);
  const bool rotate = before_rope && model->rope.theta != 0;
  qkv_status status = convert(code, k, QKV_K, position, rotate, rows, error);
  if (status == QKV_OK) status = convert(code, v, QKV_V, position, false, values, error);
  if (status == QKV_OK)
    *bytes = coder->codec->encode(coder, position, (uint32_t)k->dims[0], model->dtype, rows, values, NULL, image);
  free(rows);
  return status;
}
