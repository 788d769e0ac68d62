#include "engine/cache/model.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

void qkv_policy_merge(qkv_policy *policy, const qkv_policy *fallback) {
  if (policy->codec == NULL) policy->codec = fallback->codec;
  if (policy->bits_k == 0) policy->bits_k = fallback->bits_k;
  if (policy->bits_v == 0) policy->bits_v = fallback->bits_v;
  if (policy->recent_window < 0) policy->recent_window = fallback->recent_window;
}

// "1, 2, 3, 4 and 8": the whole bits that a codec takes.
static void list_bits(const qkv_codec *codec, char *text, size_t size) {
  int allowed[QKV_TIER_MAX];
  size_t count = 0;
  for (int bits = 1; bits <= QKV_TIER_MAX; bits++) {
    if (codec->bits_valid(bits)) allowed[count++] = bits;
  }
  size_t length = 0;
  text[0] = '\0';
  for (size_t i = 0; i < count && length < size; i++) {
    const char *separator = i == 0 ? "" : i + 1 == count ? " and " : ", ";
    length += (size_t)snprintf(text + length, size - length, "%s%d", separator, allowed[i]);
  }
}

static qkv_status check_bits(const qkv_codec *codec, const char *field, double bits, qkv_error *error) {
  if (bits == 0 || codec->bits_valid(bits)) return QKV_OK;
  char allowed[64];
  list_bits(codec, allowed, sizeof allowed);
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "policy.%s is %g, allowed are %s", field, bits, allowed);
}

qkv_status qkv_policy_check(const qkv_policy *policy, qkv_error *error) {
  const qkv_codec *codec = policy->codec != NULL ? policy->codec : qkv_codec_by_id(QKV_CODEC_EMBEDDED);
  QKV_TRY(check_bits(codec, "bits_k", policy->bits_k, error));
  QKV_TRY(check_bits(codec, "bits_v", policy->bits_v, error));
  if (policy->recent_window < -1 || policy->recent_window > QKV_RECENT_WINDOW_MAX) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "policy.recent_window is %" PRId64 ", allowed are 0 to %d",
                    policy->recent_window, QKV_RECENT_WINDOW_MAX);
  }
  return QKV_OK;
}

static bool name_character(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
         (c != '\0' && strchr("._:/@-", c) != NULL);
}

qkv_status qkv_name_check(const char *name, const char *field, qkv_error *error) {
  size_t length = strnlen(name, QKV_NAME_MAX + 1);
  if (length == 0) return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s is empty", field);
  if (length > QKV_NAME_MAX) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s is longer than %d characters", field, QKV_NAME_MAX);
  }
  for (size_t i = 0; i < length; i++) {
    if (name_character(name[i])) continue;
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s has byte 0x%02x at %zu, allowed are letters, digits and ._:/@-",
                    field, (unsigned)(unsigned char)name[i], i);
  }
  return QKV_OK;
}

qkv_status qkv_factor_check(const char *field, double value, qkv_error *error) {
  if (value == 0 || (value >= QKV_FACTOR_MIN && value <= QKV_FACTOR_MAX)) return QKV_OK;
  if (isnan(value)) return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s is nan", field);
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s is %g, allowed are 0 and %g to %g", field, value, QKV_FACTOR_MIN,
                  QKV_FACTOR_MAX);
}

static qkv_status check_count(const char *field, uint32_t value, uint32_t max, qkv_error *error) {
  if (value >= 1 && value <= max) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s is %" PRIu32 ", allowed are 1 to %" PRIu32, field, value, max);
}

static qkv_status check_dim(const char *field, uint32_t value, qkv_error *error) {
  if (value >= QKV_BAND && value <= QKV_DIM_MAX && value % QKV_BAND == 0) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s is %" PRIu32 ", allowed are multiples of %d from %d to %d", field,
                  value, QKV_BAND, QKV_BAND, QKV_DIM_MAX);
}

static qkv_status check_geometry(const qkv_model *model, qkv_error *error) {
  QKV_TRY(check_count("model.layers", model->layers, QKV_LAYERS_MAX, error));
  QKV_TRY(check_count("model.kv_heads", model->kv_heads, QKV_KV_HEADS_MAX, error));
  QKV_TRY(check_count("model.q_heads", model->q_heads, QKV_Q_HEADS_MAX, error));
  if (model->q_heads % model->kv_heads != 0) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT,
                    "model.q_heads is %" PRIu32 ", must be a multiple of kv_heads %" PRIu32, model->q_heads,
                    model->kv_heads);
  }
  QKV_TRY(check_dim("model.key_dim", model->key_dim, error));
  QKV_TRY(check_dim("model.value_dim", model->value_dim, error));
  if (qkv_dtype_size(model->dtype) == 0) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "model.dtype is %d, known are 1 (fp32), 2 (fp16) and 3 (bf16)",
                    (int)model->dtype);
  }
  return QKV_OK;
}

static qkv_status in_model(qkv_status status, qkv_error *error) {
  return status != QKV_OK && error != NULL ? qkv_error_prefix(error, "model.") : status;
}

qkv_status qkv_model_resolve(qkv_model *model, qkv_error *error) {
  QKV_TRY(qkv_name_check(model->name, "model.name", error));
  QKV_TRY(check_geometry(model, error));
  QKV_TRY(qkv_factor_check("model.scale", model->scale, error));
  QKV_TRY(qkv_factor_check("model.soft_cap", model->soft_cap, error));
  QKV_TRY(in_model(qkv_rope_resolve(&model->rope, model->key_dim, error), error));
  QKV_TRY(in_model(qkv_policy_check(&model->policy, error), error));
  if (model->scale == 0) model->scale = 1 / sqrt(model->key_dim);
  return QKV_OK;
}

static bool rope_equal(const qkv_rope *a, const qkv_rope *b) {
  return a->theta == b->theta && a->width == b->width && a->interleaved == b->interleaved &&
         a->scaling == b->scaling && a->factor == b->factor && a->original_max_position == b->original_max_position &&
         a->low_freq_factor == b->low_freq_factor && a->high_freq_factor == b->high_freq_factor &&
         a->beta_fast == b->beta_fast && a->beta_slow == b->beta_slow && a->attention_factor == b->attention_factor;
}

static bool policy_equal(const qkv_policy *a, const qkv_policy *b) {
  return a->codec == b->codec && a->bits_k == b->bits_k && a->bits_v == b->bits_v &&
         a->recent_window == b->recent_window;
}

const char *qkv_model_difference(const qkv_model *a, const qkv_model *b) {
  const struct {
    const char *field;
    bool same;
  } rows[] = {
      {"name", strcmp(a->name, b->name) == 0},  {"layers", a->layers == b->layers},
      {"kv_heads", a->kv_heads == b->kv_heads}, {"q_heads", a->q_heads == b->q_heads},
      {"key_dim", a->key_dim == b->key_dim},    {"value_dim", a->value_dim == b->value_dim},
      {"dtype", a->dtype == b->dtype},          {"rope", rope_equal(&a->rope, &b->rope)},
      {"scale", a->scale == b->scale},          {"sliding_window", a->sliding_window == b->sliding_window},
      {"soft_cap", a->soft_cap == b->soft_cap}, {"policy", policy_equal(&a->policy, &b->policy)},
  };
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    if (!rows[i].same) return rows[i].field;
  }
  return NULL;
}

bool qkv_model_equal(const qkv_model *a, const qkv_model *b) {
  return qkv_model_difference(a, b) == NULL;
}
