#include "server/handlers/contract.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// ---- in ----

static qkv_status read_name(const char *from, const char *field, char *to, qkv_error *error) {
  QKV_TRY(qkv_name_check(from, field, error));
  (void)snprintf(to, QKV_NAME_MAX + 1, "%s", from);
  return QKV_OK;
}

static qkv_status read_low_rank(const Qkv__V1__CodecPolicy *message, qkv_policy *policy, qkv_error *error) {
  policy->low_rank_said = message->low_rank[0] != '\0';
  if (!policy->low_rank_said) return QKV_OK;
  if (!qkv_low_rank_parse(message->low_rank, &policy->low_rank.mode))
    return qkv_fail(error, QKV_INVALID_ARGUMENT,
                    "policy.low_rank is \"%.64s\", known are none, predictor, correction and auto",
                    message->low_rank);
  if (message->rank > QKV_RANK_MAX)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "policy.rank is %" PRIu32 ", allowed are 0 to %d", message->rank,
                    QKV_RANK_MAX);
  policy->low_rank.rank = (uint8_t)(message->rank == 0 ? QKV_RANK_DEFAULT : message->rank);
  return QKV_OK;
}

static qkv_status read_anchor(const Qkv__V1__CodecPolicy *message, qkv_policy *policy, qkv_error *error) {
  policy->anchor_said = message->anchor[0] != '\0';
  if (!policy->anchor_said) return QKV_OK;
  if (!qkv_anchor_parse(message->anchor, &policy->anchor.kind))
    return qkv_fail(error, QKV_INVALID_ARGUMENT,
                    "policy.anchor is \"%.64s\", known are none, mean, group, chain and auto", message->anchor);
  policy->anchor.every = message->anchor_every;
  policy->anchor.threshold = (float)message->anchor_threshold;
  return QKV_OK;
}

static qkv_status read_codec(const char *name, const char *field, const qkv_codec **codec, qkv_error *error) {
  if (name[0] == '\0') return QKV_OK;
  *codec = qkv_codec_by_name(name);
  if (*codec != NULL) return QKV_OK;
  char known[QKV_CODEC_NAMES_MAX];
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "policy.%s is \"%.64s\", known are %s", field, name,
                  qkv_codec_names(known));
}

// A codec's parameters, where the policy sets any. A parameter that equals the codec's default counts as not set.
static void read_parameters(const ProtobufCMessage *message, const qkv_codec *codec, uint32_t *values) {
  const char *of;
  const qkv_parameter *parameter;
  for (size_t i = 0; (parameter = qkv_codec_parameter(codec, i, &of)) != NULL; i++) {
    const uint32_t value = qkv_parameters_read(message, of, parameter->name);
    values[i] = value == parameter->fallback ? 0 : value;
  }
}

// Whether a message of this name has parameters of the codec, or of one that is in it.
static bool takes(const qkv_codec *codec, const char *message) {
  const char *of;
  for (size_t i = 0; qkv_codec_parameter(codec, i, &of) != NULL; i++) {
    if (strcmp(of, message) == 0) return true;
  }
  return false;
}

static qkv_status read_codecs(const Qkv__V1__CodecPolicy *message, qkv_policy *policy, qkv_error *error) {
  QKV_TRY(read_codec(message->codec, "codec", &policy->codec, error));
  QKV_TRY(read_codec(message->codec_v, "codec_v", &policy->codec_v, error));
  if (policy->codec_v != NULL && policy->codec == NULL)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "policy.codec_v is \"%.64s\" without policy.codec",
                    message->codec_v);
  if (policy->codec_v == policy->codec) policy->codec_v = NULL;
  const qkv_codec *k = qkv_policy_codec(policy, QKV_K), *v = qkv_policy_codec(policy, QKV_V);
  const char *of;
  for (size_t i = 0; qkv_codec_at(i) != NULL; i++) {
    if (qkv_codec_parameter(qkv_codec_at(i), 0, &of) == NULL || takes(k, of) || takes(v, of)) continue;
    if (qkv_parameters_there(&message->base, of))
      return qkv_fail(error, QKV_INVALID_ARGUMENT, "policy.%s is there, but policy.codec is \"%.64s\"", of,
                      message->codec);
  }
  read_parameters(&message->base, k, policy->parameters[QKV_K]);
  read_parameters(&message->base, v, policy->parameters[QKV_V]);
  return QKV_OK;
}

qkv_status qkvi_retention_read(Qkv__V1__Retention retention, bool evict_by_default, bool *evictable,
                               qkv_error *error) {
  if ((unsigned)retention > QKV__V1__RETENTION__RETENTION_EVICT)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "retention is %d, known are 1 (keep) and 2 (evict)", (int)retention);
  *evictable = retention == QKV__V1__RETENTION__RETENTION_UNSPECIFIED
                   ? evict_by_default
                   : retention == QKV__V1__RETENTION__RETENTION_EVICT;
  return QKV_OK;
}

qkv_status qkvi_policy_read(const Qkv__V1__CodecPolicy *message, qkv_policy *policy, qkv_error *error) {
  *policy = QKV_POLICY_UNSET;
  if (message == NULL) return QKV_OK;
  QKV_TRY(read_codecs(message, policy, error));
  policy->bits_k = message->bits_k;
  policy->bits_v = message->bits_v;
  if (message->recent_window_set_case == QKV__V1__CODEC_POLICY__RECENT_WINDOW_SET_RECENT_WINDOW)
    policy->recent_window = message->recent_window;
  if (message->sink_tokens_set_case == QKV__V1__CODEC_POLICY__SINK_TOKENS_SET_SINK_TOKENS)
    policy->sink_tokens = message->sink_tokens;
  if (message->gqa_compensation_set_case == QKV__V1__CODEC_POLICY__GQA_COMPENSATION_SET_GQA_COMPENSATION) {
    policy->gqa_said = true;
    policy->gqa_compensation = message->gqa_compensation;
  }
  if (message->self_calibration_set_case == QKV__V1__CODEC_POLICY__SELF_CALIBRATION_SET_SELF_CALIBRATION) {
    policy->learn_said = true;
    policy->learn = message->self_calibration;
  }
  QKV_TRY(read_low_rank(message, policy, error));
  return read_anchor(message, policy, error);
}

static qkv_status read_rope(const Qkv__V1__Rope *message, qkv_rope *rope, qkv_error *error) {
  *rope = (qkv_rope){0};
  if (message == NULL || message->theta == 0) return QKV_OK;
  unsigned pairing = (unsigned)message->pairing, scaling = (unsigned)message->scaling;
  if (pairing > QKV__V1__ROPE__PAIRING__PAIRING_INTERLEAVED)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "rope.pairing is %d, known are 0 and 1", (int)pairing);
  if (scaling > QKV__V1__ROPE__SCALING__SCALING_LLAMA3)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "rope.scaling is %d, known are 0 to 4", (int)scaling);
  *rope = (qkv_rope){.theta = message->theta,
                     .width = message->width,
                     .interleaved = pairing == QKV__V1__ROPE__PAIRING__PAIRING_INTERLEAVED,
                     .scaling = (qkv_rope_scaling)scaling,
                     .factor = message->factor,
                     .original_max_position = message->original_max_position,
                     .low_freq_factor = message->low_freq_factor,
                     .high_freq_factor = message->high_freq_factor,
                     .beta_fast = message->beta_fast,
                     .beta_slow = message->beta_slow,
                     .attention_factor = message->attention_factor};
  return QKV_OK;
}

static qkv_status read_overrides(const Qkv__V1__Model *message, qkv_model *model, qkv_error *error) {
  if (message->n_overrides > message->layers)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "overrides has %zu entries, the model has %" PRIu32 " layers",
                    message->n_overrides, message->layers);
  if (message->n_overrides == 0) return QKV_OK;
  model->overrides = calloc(message->n_overrides, sizeof *model->overrides);
  if (model->overrides == NULL) abort();
  for (size_t i = 0; i < message->n_overrides; i++) {
    const Qkv__V1__LayerOverride *from = message->overrides[i];
    qkv_layer_override *to = &model->overrides[model->override_count++];
    *to = (qkv_layer_override){
        .layer = from->layer, .sliding_window = from->sliding_window, .soft_cap = from->soft_cap};
    if (qkvi_policy_read(from->policy, &to->policy, error) != QKV_OK)
      return qkv_error_prefix(error, "overrides[%zu].", i);
  }
  return QKV_OK;
}

void qkvi_model_clear(qkv_model *model) {
  free(model->overrides);
  model->overrides = NULL;
  model->override_count = 0;
}

qkv_status qkvi_model_read(const Qkv__V1__Model *message, qkv_model *model, qkv_error *error) {
  *model = (qkv_model){0};
  unsigned dtype = (unsigned)message->dtype;
  if (dtype < QKV_FP32 || dtype > QKV_BF16)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "dtype is %d, known are 1 (fp32), 2 (fp16) and 3 (bf16)",
                    (int)dtype);
  *model = (qkv_model){.layers = message->layers,
                       .kv_heads = message->kv_heads,
                       .q_heads = message->q_heads,
                       .key_dim = message->key_dim,
                       .value_dim = message->value_dim,
                       .dtype = (qkv_dtype)dtype,
                       .scale = message->scale,
                       .sliding_window = message->sliding_window,
                       .soft_cap = message->soft_cap};
  QKV_TRY(read_name(message->name, "name", model->name, error));
  QKV_TRY(read_rope(message->rope, &model->rope, error));
  QKV_TRY(qkvi_policy_read(message->policy, &model->policy, error));
  return read_overrides(message, model, error);
}

// ---- out ----

static void write_codecs(const qkv_policy *policy, qkvi_parameters_buffer *buffer, Qkv__V1__CodecPolicy *message) {
  const char *of;
  const qkv_parameter *parameter;
  if (policy->codec == NULL) return;
  message->codec = (char *)policy->codec->name;
  if (policy->codec_v != NULL) message->codec_v = (char *)policy->codec_v->name;
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    const qkv_codec *codec = qkv_policy_codec(policy, part);
    for (size_t i = 0; (parameter = qkv_codec_parameter(codec, i, &of)) != NULL; i++) {
      const uint32_t said = policy->parameters[part][i];
      qkv_parameters_write(&message->base, of, parameter->name, said != 0 ? said : parameter->fallback,
                           buffer->messages[part][i]);
    }
  }
}

static void write_policy(const qkv_policy *policy, qkvi_parameters_buffer *buffer, Qkv__V1__CodecPolicy *message) {
  qkv__v1__codec_policy__init(message);
  write_codecs(policy, buffer, message);
  message->bits_k = policy->bits_k;
  message->bits_v = policy->bits_v;
  if (policy->low_rank_said) {
    message->low_rank = (char *)(uintptr_t)qkv_low_rank_name(policy->low_rank.mode);
    message->rank = policy->low_rank.rank;
  }
  if (policy->anchor_said) {
    message->anchor = (char *)(uintptr_t)qkv_anchor_name(policy->anchor.kind);
    message->anchor_every = policy->anchor.every;
    message->anchor_threshold = (double)policy->anchor.threshold;
  }
  if (policy->gqa_said) {
    message->gqa_compensation_set_case = QKV__V1__CODEC_POLICY__GQA_COMPENSATION_SET_GQA_COMPENSATION;
    message->gqa_compensation = policy->gqa_compensation;
  }
  if (policy->learn_said) {
    message->self_calibration_set_case = QKV__V1__CODEC_POLICY__SELF_CALIBRATION_SET_SELF_CALIBRATION;
    message->self_calibration = policy->learn;
  }
  if (policy->sink_tokens >= 0) {
    message->sink_tokens_set_case = QKV__V1__CODEC_POLICY__SINK_TOKENS_SET_SINK_TOKENS;
    message->sink_tokens = (uint32_t)policy->sink_tokens;
  }
  if (policy->recent_window < 0) return;
  message->recent_window_set_case = QKV__V1__CODEC_POLICY__RECENT_WINDOW_SET_RECENT_WINDOW;
  message->recent_window = (uint32_t)policy->recent_window;
}

static void write_rope(const qkv_rope *rope, Qkv__V1__Rope *message) {
  qkv__v1__rope__init(message);
  message->theta = rope->theta;
  message->width = rope->width;
  message->pairing =
      rope->interleaved ? QKV__V1__ROPE__PAIRING__PAIRING_INTERLEAVED : QKV__V1__ROPE__PAIRING__PAIRING_HALF;
  message->scaling = (Qkv__V1__Rope__Scaling)rope->scaling;
  message->factor = rope->factor;
  message->original_max_position = rope->original_max_position;
  message->low_freq_factor = rope->low_freq_factor;
  message->high_freq_factor = rope->high_freq_factor;
  message->beta_fast = rope->beta_fast;
  message->beta_slow = rope->beta_slow;
  message->attention_factor = rope->attention_factor;
}

static void write_override(const qkv_layer_override *override, qkvi_override_message *message) {
  qkv__v1__layer_override__init(&message->override);
  message->override.layer = override->layer;
  message->override.sliding_window = override->sliding_window;
  message->override.soft_cap = override->soft_cap;
  write_policy(&override->policy, &message->parameters, &message->policy);
  message->override.policy = &message->policy;
}

void qkvi_model_write(const qkv_model *model, qkvi_model_message *message) {
  Qkv__V1__Model *out = &message->model;
  qkv__v1__model__init(out);
  out->name = (char *)model->name;
  out->layers = model->layers;
  out->kv_heads = model->kv_heads;
  out->q_heads = model->q_heads;
  out->key_dim = model->key_dim;
  out->value_dim = model->value_dim;
  out->dtype = (Qkv__V1__DType)model->dtype;
  out->scale = model->scale;
  out->sliding_window = model->sliding_window;
  out->soft_cap = model->soft_cap;
  if (model->rope.theta != 0) {
    write_rope(&model->rope, &message->rope);
    out->rope = &message->rope;
  }
  write_policy(&model->policy, &message->parameters, &message->policy);
  out->policy = &message->policy;
  message->overrides = NULL;
  message->override_list = NULL;
  if (model->override_count == 0) return;
  message->overrides = calloc(model->override_count, sizeof *message->overrides);
  message->override_list = calloc(model->override_count, sizeof *message->override_list);
  if (message->overrides == NULL || message->override_list == NULL) abort();
  for (uint32_t i = 0; i < model->override_count; i++) {
    write_override(&model->overrides[i], &message->overrides[i]);
    message->override_list[i] = &message->overrides[i].override;
  }
  out->overrides = message->override_list;
  out->n_overrides = model->override_count;
}

void qkvi_model_message_clear(qkvi_model_message *message) {
  free(message->overrides);
  free((void *)message->override_list);
}

void qkvi_calibration_write(const qkv_model *model, qkvi_calibration_message *message) {
  Qkv__V1__CalibrationState *out = &message->state;
  qkv_calibration_state *read = &message->read;
  qkv__v1__calibration_state__init(out);
  *read = (qkv_calibration_state){.version = qkv_calibration_slot_version(model->calibration)};
  if (model->learner != NULL) qkv_learner_read_state(model->learner, read);
  out->source = (Qkv__V1__CalibrationState__Source)read->source;
  out->version = read->version;
  out->since_unix_ms = read->since_unix_ms;
  out->tokens = read->tokens;
  out->trusted = read->trusted;
  out->tried = read->tried;
  out->attention_error = read->error;
  out->attention_error_data_free = read->data_free;
  out->parts = read->parts;
  out->parts_data_free = read->dropped;
  out->archive_refused = read->archive_refused;
  out->on_trial = read->on_trial;
  out->refused = read->refused;
  out->refusal = read->refusal;
  out->watched_error = qkv_page_watch_error(&read->watch);
  out->watched_error_data_free = qkv_page_watch_data_free(&read->watch);
  out->rope_doubt = read->rope;
}

// Sessions take the model's with their next append.
static void write_coding(const qkv_session_info *info, Qkv__V1__SessionInfo *out) {
  const qkv_page_watch *watch = &info->usage.watch;
  qkv_calibration_state state = {.version = qkv_calibration_slot_version(info->model->calibration)};
  if (info->model->learner != NULL) qkv_learner_read_state(info->model->learner, &state);
  const qkv_codec *codec = info->config.policy.codec;
  out->calibration = qkv_codec_is_exact(codec) || !codec->calibrated ? 0 : state.version;
  out->calibration_since_unix_ms = state.since_unix_ms;
  out->watched_error = qkv_page_watch_error(watch);
  out->watched_error_data_free = qkv_page_watch_data_free(watch);
}

void qkvi_session_write(const qkv_session_info *info, uint64_t *lengths, qkvi_session_message *message) {
  const qkv_model *model = info->model;
  const qkv_layer_usage *usage = &info->usage;
  uint64_t coordinates = (uint64_t)model->kv_heads * (model->key_dim + model->value_dim);  // of a token
  Qkv__V1__SessionInfo *out = &message->info;
  qkv__v1__session_info__init(out);
  out->session = (char *)info->config.name;
  out->model = (char *)model->name;
  out->model_tenant = (char *)model->tenant;
  out->tenant = (char *)info->config.tenant;
  out->purpose = (Qkv__V1__Purpose)info->config.purpose;
  write_policy(&info->config.policy, &message->parameters, &message->policy);
  out->policy = &message->policy;
  out->first_position = info->config.first_position;
  out->durability = info->config.durability == 0 ? QKV__V1__DURABILITY__DURABILITY_MEMORY
                                                 : (Qkv__V1__Durability)info->config.durability;
  out->lengths = lengths;
  out->n_lengths = lengths == NULL ? 0 : model->layers;
  out->tokens_coded = usage->tokens_coded;
  out->tokens_exact = usage->tokens_exact;
  out->bytes_coded = usage->bytes_coded;
  out->bytes_exact = usage->bytes_exact;
  out->bytes_fp16 = (usage->tokens_coded + usage->tokens_exact) * coordinates * 2;
  const uint64_t warm = usage->tokens_coded - usage->tokens_cold;
  if (warm > 0) out->bits_per_coordinate = 8.0 * (double)usage->bytes_coded / ((double)warm * (double)coordinates);
  out->tokens_cold = usage->tokens_cold;
  out->bytes_stored = usage->bytes_stored;
  out->bytes_shared = usage->bytes_shared;
  out->ttl_ms = info->config.ttl_ms;
  out->pinned = info->config.pinned;
  out->retention = info->config.evictable ? QKV__V1__RETENTION__RETENTION_EVICT : QKV__V1__RETENTION__RETENTION_KEEP;
  out->whole = info->config.whole;
  out->bytes_overhead = usage->bytes_overhead;
  out->tier_bits = info->config.tier_bits;
  out->keep_full = info->config.keep_full;
  out->attention_error = qkv_quality_error(&usage->quality);
  out->max_attention_error = info->config.max_attention_error;
  out->contract_pages = usage->quality.pages;
  out->contract_missed = usage->quality.missed;
  write_coding(info, out);
  memcpy(message->prefix_root, &info->config.root, sizeof message->prefix_root);
  out->prefix_root = (ProtobufCBinaryData){.len = sizeof message->prefix_root, .data = message->prefix_root};
  out->created_unix_ms = info->created_unix_ms;
  out->last_used_unix_ms = info->last_used_unix_ms;
}
