#include "engine/cache/model.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include <xxhash.h>

// The next level's bits. Where that level has another codec, bits that this one does not have become its default: 4
// bits go with int8 as 8. Those of the same codec stay, right or wrong, for the check.
static double merged_bits(const qkv_codec *codec, const qkv_codec *fallback, double bits) {
  if (codec == fallback || codec == NULL || bits == 0 || codec->bits_valid(bits)) return bits;
  return qkv_codec_bits_default(codec);
}

void qkv_policy_merge(qkv_policy *policy, const qkv_policy *fallback) {
  if (policy->codec == NULL) {
    policy->codec = fallback->codec;
    policy->codec_v = fallback->codec_v;
    memcpy(policy->parameters, fallback->parameters, sizeof policy->parameters);
  }
  if (policy->bits_k == 0) policy->bits_k = merged_bits(policy->codec, fallback->codec, fallback->bits_k);
  if (policy->bits_v == 0)
    policy->bits_v =
        merged_bits(qkv_policy_codec(policy, QKV_V), qkv_policy_codec(fallback, QKV_V), fallback->bits_v);
  if (policy->recent_window < 0) policy->recent_window = fallback->recent_window;
  if (policy->sink_tokens < 0) policy->sink_tokens = fallback->sink_tokens;
  if (!policy->anchor_said) policy->anchor = fallback->anchor;
  policy->anchor_said |= fallback->anchor_said;
  if (!policy->gqa_said) policy->gqa_compensation = fallback->gqa_compensation;
  policy->gqa_said |= fallback->gqa_said;
  if (!policy->low_rank_said) policy->low_rank = fallback->low_rank;
  policy->low_rank_said |= fallback->low_rank_said;
  if (!policy->learn_said) policy->learn = fallback->learn;
  policy->learn_said |= fallback->learn_said;
}

static qkv_status check_bits(const qkv_codec *codec, const char *field, double bits, qkv_error *error) {
  if (bits == 0 || codec->bits_valid(bits)) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "policy.%s is %g, allowed are %s", field, bits, codec->bits_text);
}

static qkv_status check_parameters(const qkv_codec *codec, const uint32_t *values, qkv_error *error) {
  const char *message;
  const qkv_parameter *parameter;
  for (size_t i = 0; (parameter = qkv_codec_parameter(codec, i, &message)) != NULL; i++) {
    if (values[i] == 0 || parameter->valid(values[i])) continue;
    char field[64];  // as the contract spells it
    (void)snprintf(field, sizeof field, "%s", message);
    for (char *c = strchr(field, '-'); c != NULL; c = strchr(c, '-')) *c = '_';
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "policy.%s.%s is %" PRIu32 ", allowed are %s", field,
                    parameter->name, values[i], parameter->text);
  }
  return QKV_OK;
}

static qkv_status check_codecs(const qkv_policy *policy, const qkv_codec *k, const qkv_codec *v, qkv_error *error) {
  if (k != v && (k->part == NULL || v->part == NULL)) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT,
                    "policy.codec_v is \"%s\" and policy.codec is \"%s\": %s codes keys and values together", v->name,
                    k->name, k->part == NULL ? k->name : v->name);
  }
  QKV_TRY(check_parameters(k, policy->parameters[QKV_K], error));
  return check_parameters(v, policy->parameters[QKV_V], error);
}

static qkv_status check_anchor(const qkv_anchor_options *anchor, qkv_error *error) {
  if (anchor->every > QKV_ANCHOR_EVERY_MAX) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "policy.anchor_every is %" PRIu32 ", allowed are 0 to %d",
                    anchor->every, QKV_ANCHOR_EVERY_MAX);
  }
  if (!(anchor->threshold >= 0 && (double)anchor->threshold <= QKV_ANCHOR_THRESHOLD_MAX)) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "policy.anchor_threshold is %g, allowed are 0 to %g",
                    (double)anchor->threshold, QKV_ANCHOR_THRESHOLD_MAX);
  }
  return QKV_OK;
}

qkv_status qkv_policy_check(const qkv_policy *policy, qkv_error *error) {
  const qkv_codec *codec = policy->codec != NULL ? policy->codec : qkv_codec_by_id(QKV_CODEC_EMBEDDED);
  const qkv_codec *codec_v = policy->codec_v != NULL ? policy->codec_v : codec;
  QKV_TRY(check_codecs(policy, codec, codec_v, error));
  QKV_TRY(check_bits(codec, "bits_k", policy->bits_k, error));
  QKV_TRY(check_bits(codec_v, "bits_v", policy->bits_v, error));
  QKV_TRY(check_anchor(&policy->anchor, error));
  if (policy->low_rank.rank > QKV_RANK_MAX) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "policy.rank is %u, allowed are 0 to %d", policy->low_rank.rank,
                    QKV_RANK_MAX);
  }
  if (policy->recent_window < -1 || policy->recent_window > QKV_RECENT_WINDOW_MAX) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "policy.recent_window is %" PRId64 ", allowed are 0 to %d",
                    policy->recent_window, QKV_RECENT_WINDOW_MAX);
  }
  if (policy->sink_tokens < -1 || policy->sink_tokens > QKV_SINK_TOKENS_MAX) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "policy.sink_tokens is %" PRId64 ", allowed are 0 to %d",
                    policy->sink_tokens, QKV_SINK_TOKENS_MAX);
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

// Sorted by layer, each once, within limits.
static qkv_status check_overrides(const qkv_model *model, qkv_error *error) {
  for (uint32_t i = 0; i < model->override_count; i++) {
    const qkv_layer_override *override = &model->overrides[i];
    if (override->layer >= model->layers) {
      return qkv_fail(error, QKV_INVALID_ARGUMENT,
                      "model.overrides[%" PRIu32 "].layer is %" PRIu32 ", the model has %" PRIu32 " layers", i,
                      override->layer, model->layers);
    }
    if (i > 0 && override->layer <= model->overrides[i - 1].layer) {
      return qkv_fail(error, QKV_INVALID_ARGUMENT,
                      "model.overrides[%" PRIu32 "].layer is %" PRIu32 ", they must be in ascending order", i,
                      override->layer);
    }
    QKV_TRY(qkv_factor_check("model.overrides.soft_cap", override->soft_cap, error));
    if (qkv_policy_check(&override->policy, error) != QKV_OK) {
      return error == NULL ? QKV_INVALID_ARGUMENT : qkv_error_prefix(error, "model.overrides[%" PRIu32 "].", i);
    }
  }
  return QKV_OK;
}

qkv_status qkv_model_resolve(qkv_model *model, qkv_error *error) {
  QKV_TRY(qkv_name_check(model->name, "model.name", error));
  if (model->tenant[0] == '\0') memcpy(model->tenant, QKV_TENANT_DEFAULT, sizeof QKV_TENANT_DEFAULT);
  QKV_TRY(qkv_name_check(model->tenant, "model.tenant", error));
  QKV_TRY(check_geometry(model, error));
  QKV_TRY(qkv_factor_check("model.scale", model->scale, error));
  QKV_TRY(qkv_factor_check("model.soft_cap", model->soft_cap, error));
  QKV_TRY(in_model(qkv_rope_resolve(&model->rope, model->key_dim, error), error));
  QKV_TRY(in_model(qkv_policy_check(&model->policy, error), error));
  QKV_TRY(check_overrides(model, error));
  if (model->scale == 0) model->scale = 1 / sqrt(model->key_dim);
  return QKV_OK;
}

const qkv_layer_override *qkv_model_override(const qkv_model *model, uint32_t layer) {
  for (uint32_t i = 0; i < model->override_count; i++) {
    if (model->overrides[i].layer == layer) return &model->overrides[i];
  }
  return NULL;
}

uint64_t qkv_model_window(const qkv_model *model, uint32_t layer) {
  const qkv_layer_override *override = qkv_model_override(model, layer);
  return override != NULL && override->sliding_window != 0 ? override->sliding_window : model->sliding_window;
}

double qkv_model_cap(const qkv_model *model, uint32_t layer) {
  const qkv_layer_override *override = qkv_model_override(model, layer);
  return override != NULL && override->soft_cap != 0 ? override->soft_cap : model->soft_cap;
}

qkv_policy qkv_model_policy(const qkv_model *model, uint32_t layer, const qkv_policy *session) {
  const qkv_layer_override *override = qkv_model_override(model, layer);
  if (override == NULL) return *session;
  qkv_policy policy = override->policy;
  qkv_policy_merge(&policy, session);
  policy.learn &= session->learn;
  return policy;
}

void qkv_model_merge_policy(const qkv_model *model, const char *tenant, qkv_policy *session) {
  const bool own = strcmp(model->tenant, tenant) == 0, opted_in = session->learn_said && session->learn;
  qkv_policy_merge(session, &model->policy);
  if (own || opted_in) return;
  session->learn_said = true;
  session->learn = false;
}

static qkv_status check_needs(const qkv_model *model, const qkv_policy *policy, qkv_error *error) {
  if (policy->codec == NULL || !policy->codec->needs_rope || model->rope.theta != 0) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT,
                  "policy.codec is \"%s\", which codes keys before RoPE, and model.rope is not there",
                  policy->codec->name);
}

qkv_status qkv_model_policy_check(const qkv_model *model, const qkv_policy *session, qkv_error *error) {
  QKV_TRY(check_needs(model, session, error));
  for (uint32_t i = 0; i < model->override_count; i++) {
    const uint32_t layer = model->overrides[i].layer;
    const qkv_policy policy = qkv_model_policy(model, layer, session);
    if (qkv_policy_check(&policy, error) == QKV_OK && check_needs(model, &policy, error) == QKV_OK) continue;
    return error == NULL ? QKV_INVALID_ARGUMENT : qkv_error_prefix(error, "layer %" PRIu32 ": ", layer);
  }
  return QKV_OK;
}

// Whether a layer that the session's policy codes has what is embedded's alone.
static bool has_embedded_only(const qkv_policy *policy) {
  return policy->anchor.kind != QKV_ANCHOR_NONE || policy->low_rank.mode != QKV_LOW_RANK_OFF;
}

bool qkv_model_archive(const qkv_model *model, qkv_policy *policy) {
  qkv_policy archived = *policy;
  archived.codec = model->archive_codec;
  if (archived.codec == NULL || model->asked.codec != NULL || policy->codec->id != QKV_CODEC_EMBEDDED) return false;
  for (uint32_t i = 0; i < model->override_count; i++) {
    const qkv_policy layer = qkv_model_policy(model, model->overrides[i].layer, policy);
    if (model->overrides[i].policy.codec == NULL && has_embedded_only(&layer)) return false;
  }
  if (has_embedded_only(policy) || qkv_policy_check(&archived, NULL) != QKV_OK ||
      qkv_model_policy_check(model, &archived, NULL) != QKV_OK)
    return false;
  *policy = archived;
  return true;
}

qkv_status qkv_model_calibrate(const qkv_model *model, const qkv_calibration *calibration,
                               qkv_calibration_source source, bool trusted, qkv_error *error) {
  const qkv_calibration_shape shape = qkv_model_calibration_shape(model);
  QKV_TRY(qkv_calibration_check(calibration, &shape, error));
  if (model->learner != NULL) {
    qkv_learner_bring(model->learner, calibration, source, trusted);
  } else {
    qkv_calibration_slot_set(model->calibration, calibration);
  }
  return QKV_OK;
}

qkv_calibration_shape qkv_model_calibration_shape(const qkv_model *model) {
  return (qkv_calibration_shape){.layers = model->layers,
                                 .kv_heads = model->kv_heads,
                                 .q_heads = model->q_heads,
                                 .key_dim = model->key_dim,
                                 .value_dim = model->value_dim,
                                 .rope = model->rope};
}

qkv_coder_spec qkv_model_coder_spec(const qkv_model *model, const qkv_policy *policies, qkv_purpose purpose,
                                    const qkv_calibration *calibration) {
  return (qkv_coder_spec){.layers = model->layers,
                          .kv_heads = model->kv_heads,
                          .q_heads = model->q_heads,
                          .key_dim = model->key_dim,
                          .value_dim = model->value_dim,
                          .rope = &model->rope,
                          .policies = policies,
                          .purpose = purpose,
                          .calibration = calibration};
}

static bool rope_equal(const qkv_rope *a, const qkv_rope *b) {
  return a->theta == b->theta && a->width == b->width && a->interleaved == b->interleaved &&
         a->scaling == b->scaling && a->factor == b->factor && a->original_max_position == b->original_max_position &&
         a->low_freq_factor == b->low_freq_factor && a->high_freq_factor == b->high_freq_factor &&
         a->beta_fast == b->beta_fast && a->beta_slow == b->beta_slow && a->attention_factor == b->attention_factor;
}

static bool anchor_equal(const qkv_anchor_options *a, const qkv_anchor_options *b) {
  return a->kind == b->kind && a->every == b->every && a->threshold == b->threshold;
}

bool qkv_policy_equal(const qkv_policy *a, const qkv_policy *b) {
  return a->codec == b->codec && a->codec_v == b->codec_v &&
         memcmp(a->parameters, b->parameters, sizeof a->parameters) == 0 && a->bits_k == b->bits_k &&
         a->bits_v == b->bits_v && a->recent_window == b->recent_window && a->sink_tokens == b->sink_tokens &&
         a->anchor_said == b->anchor_said && anchor_equal(&a->anchor, &b->anchor) &&
         a->low_rank_said == b->low_rank_said && a->low_rank.mode == b->low_rank.mode &&
         a->low_rank.rank == b->low_rank.rank && a->learn_said == b->learn_said && a->learn == b->learn &&
         a->gqa_said == b->gqa_said && a->gqa_compensation == b->gqa_compensation;
}

// Numbers: adding 0 makes one of the two zeros.
uint64_t qkv_policy_hash(const qkv_policy *policy) {
  struct {
    const void *codec, *codec_v;
    uint32_t parameters[2][QKV_PARAMETERS_MAX];
    double bits_k, bits_v, threshold;
    int64_t recent_window, sink_tokens;
    uint32_t anchor_kind, anchor_every, low_rank_mode, rank, flags;
  } key;
  memset(&key, 0, sizeof key);
  key.codec = policy->codec;
  key.codec_v = policy->codec_v;
  memcpy(key.parameters, policy->parameters, sizeof key.parameters);
  key.bits_k = policy->bits_k + 0;
  key.bits_v = policy->bits_v + 0;
  key.threshold = (double)policy->anchor.threshold + 0;
  key.recent_window = policy->recent_window;
  key.sink_tokens = policy->sink_tokens;
  key.anchor_kind = (uint32_t)policy->anchor.kind;
  key.anchor_every = policy->anchor.every;
  key.low_rank_mode = (uint32_t)policy->low_rank.mode;
  key.rank = policy->low_rank.rank;
  key.flags = (uint32_t)policy->anchor_said | (uint32_t)policy->low_rank_said << 1 |
              (uint32_t)policy->learn_said << 2 | (uint32_t)policy->learn << 3 | (uint32_t)policy->gqa_said << 4 |
              (uint32_t)policy->gqa_compensation << 5;
  return XXH3_64bits(&key, sizeof key);
}

static bool overrides_equal(const qkv_model *a, const qkv_model *b) {
  if (a->override_count != b->override_count) return false;
  for (uint32_t i = 0; i < a->override_count; i++) {
    const qkv_layer_override *x = &a->overrides[i], *y = &b->overrides[i];
    if (x->layer != y->layer || x->sliding_window != y->sliding_window || x->soft_cap != y->soft_cap ||
        !qkv_policy_equal(&x->policy, &y->policy)) {
      return false;
    }
  }
  return true;
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
      {"soft_cap", a->soft_cap == b->soft_cap}, {"policy", qkv_policy_equal(&a->policy, &b->policy)},
      {"overrides", overrides_equal(a, b)},
  };
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    if (!rows[i].same) return rows[i].field;
  }
  return NULL;
}

bool qkv_model_equal(const qkv_model *a, const qkv_model *b) {
  return qkv_model_difference(a, b) == NULL;
}
