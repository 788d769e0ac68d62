// Models and sessions: small messages, through protobuf-c.
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "client/c/message.h"
#include "client/c/place.h"
#include "qkv/v1/kv_cache.pb-c.h"

// The request's field `session`, NULL where it has none.
static const char *session_of(const ProtobufCMessage *request) {
  const char *session = NULL;
  const ProtobufCFieldDescriptor *field =
      protobuf_c_message_descriptor_get_field_by_name(request->descriptor, "session");
  if (field == NULL || field->type != PROTOBUF_C_TYPE_STRING) return NULL;
  memcpy(&session, (const uint8_t *)request + field->offset, sizeof session);
  return session;
}

qkv_code qkv_client_call_message(qkv_client *client, const char *method, const ProtobufCMessage *request,
                                 const ProtobufCMessageDescriptor *kind, ProtobufCMessage **answer,
                                 qkv_call_error *error) {
  *answer = NULL;
  const qkv_code routed = qkvi_route(&client, session_of(request), error);
  if (routed != QKV_OK) return routed;
  size_t bytes = protobuf_c_message_get_packed_size(request);
  uint8_t *packed = malloc(bytes + 1);
  assert(packed != NULL);
  protobuf_c_message_pack(request, packed);
  void *response = NULL;
  size_t response_bytes = 0;
  qkv_code code = qkv_client_call(client, method, packed, bytes, &response, &response_bytes, error);
  free(packed);
  if (code != QKV_OK) return code;
  *answer = protobuf_c_message_unpack(kind, NULL, response_bytes, response);
  free(response);
  if (*answer != NULL) return QKV_OK;
  qkv_error reason = {0};
  (void)qkv_fail(&reason, QKV_INTERNAL, "it is no %s of %zu bytes", kind->name, response_bytes);
  return qkvi_malformed(error, method, &reason);
}

// The contract's empty string for a text that is not there. protobuf-c wants no const.
static char *text_or_empty(const char *text) {
  return (char *)(uintptr_t)(text == NULL ? "" : text);
}

// A policy and the messages in it.
typedef struct filled_policy {
  Qkv__V1__CodecPolicy policy;
  Qkv__V1__Kivi kivi;
  Qkv__V1__Turboquant turboquant, turboquant_ip;
  Qkv__V1__Polarquant polarquant;
  Qkv__V1__OutlierChannels turboquant_outliers, turboquant_ip_outliers;
  Qkv__V1__LowRankStage low_rank_stage;
  Qkv__V1__DeltaStage delta_stage;
} filled_policy;

static void fill_stages(const qkv_client_policy *from, filled_policy *filled) {
  Qkv__V1__CodecPolicy *to = &filled->policy;
  if (from->low_rank_stage_rank != 0) {
    filled->low_rank_stage = (Qkv__V1__LowRankStage)QKV__V1__LOW_RANK_STAGE__INIT;
    filled->low_rank_stage.rank = from->low_rank_stage_rank;
    to->low_rank_stage = &filled->low_rank_stage;
  }
  if (from->delta_stage_anchor_every != 0 || from->delta_stage_anchor_threshold != 0) {
    filled->delta_stage = (Qkv__V1__DeltaStage)QKV__V1__DELTA_STAGE__INIT;
    filled->delta_stage.anchor_every = from->delta_stage_anchor_every;
    filled->delta_stage.anchor_threshold = from->delta_stage_anchor_threshold;
    to->delta_stage = &filled->delta_stage;
  }
}

// Parameters of codecs that are said.
static void fill_parameters(const qkv_client_policy *from, filled_policy *filled) {
  Qkv__V1__CodecPolicy *to = &filled->policy;
  if (from->kivi_q_group_size != 0) {
    filled->kivi = (Qkv__V1__Kivi)QKV__V1__KIVI__INIT;
    filled->kivi.q_group_size = from->kivi_q_group_size;
    to->kivi = &filled->kivi;
  }
  if (from->turboquant_rotation != 0) {
    filled->turboquant = (Qkv__V1__Turboquant)QKV__V1__TURBOQUANT__INIT;
    filled->turboquant.rotation = (Qkv__V1__Turboquant__Rotation)from->turboquant_rotation;
    to->turboquant = &filled->turboquant;
  }
  if (from->turboquant_ip_rotation != 0) {
    filled->turboquant_ip = (Qkv__V1__Turboquant)QKV__V1__TURBOQUANT__INIT;
    filled->turboquant_ip.rotation = (Qkv__V1__Turboquant__Rotation)from->turboquant_ip_rotation;
    to->turboquant_ip = &filled->turboquant_ip;
  }
  if (from->polarquant_row_norms != 0) {
    filled->polarquant = (Qkv__V1__Polarquant)QKV__V1__POLARQUANT__INIT;
    filled->polarquant.row_norms = (Qkv__V1__Polarquant__RowNorms)from->polarquant_row_norms;
    to->polarquant = &filled->polarquant;
  }
  if (from->turboquant_outliers_n_out != 0) {
    filled->turboquant_outliers = (Qkv__V1__OutlierChannels)QKV__V1__OUTLIER_CHANNELS__INIT;
    filled->turboquant_outliers.n_out = from->turboquant_outliers_n_out;
    to->turboquant_outliers = &filled->turboquant_outliers;
  }
  if (from->turboquant_ip_outliers_n_out != 0) {
    filled->turboquant_ip_outliers = (Qkv__V1__OutlierChannels)QKV__V1__OUTLIER_CHANNELS__INIT;
    filled->turboquant_ip_outliers.n_out = from->turboquant_ip_outliers_n_out;
    to->turboquant_ip_outliers = &filled->turboquant_ip_outliers;
  }
  fill_stages(from, filled);
}

static void fill_policy(const qkv_client_policy *from, filled_policy *filled) {
  Qkv__V1__CodecPolicy *to = &filled->policy;
  qkv__v1__codec_policy__init(to);
  fill_parameters(from, filled);
  to->codec_v = text_or_empty(from->codec_v);
  to->codec = text_or_empty(from->codec);
  to->bits_k = from->bits_k;
  to->bits_v = from->bits_v;
  to->anchor = text_or_empty(from->anchor);
  to->anchor_every = from->anchor_every;
  to->anchor_threshold = from->anchor_threshold;
  to->low_rank = text_or_empty(from->low_rank);
  to->rank = from->rank;
  if (from->gqa_compensation != 0) {
    to->gqa_compensation_set_case = QKV__V1__CODEC_POLICY__GQA_COMPENSATION_SET_GQA_COMPENSATION;
    to->gqa_compensation = from->gqa_compensation > 0;
  }
  if (from->self_calibration != 0) {
    to->self_calibration_set_case = QKV__V1__CODEC_POLICY__SELF_CALIBRATION_SET_SELF_CALIBRATION;
    to->self_calibration = from->self_calibration > 0;
  }
  if (from->sink_tokens != 0) {
    to->sink_tokens_set_case = QKV__V1__CODEC_POLICY__SINK_TOKENS_SET_SINK_TOKENS;
    to->sink_tokens = from->sink_tokens > 0 ? (uint32_t)from->sink_tokens : 0;
  }
  if (from->recent_window < 0) return;
  to->recent_window_set_case = QKV__V1__CODEC_POLICY__RECENT_WINDOW_SET_RECENT_WINDOW;
  to->recent_window = from->recent_window < UINT32_MAX ? (uint32_t)from->recent_window : UINT32_MAX;
}

static void fill_rope(const qkv_client_rope *from, Qkv__V1__Rope *to) {
  qkv__v1__rope__init(to);
  to->theta = from->theta;
  to->width = from->width;
  to->pairing =
      from->interleaved ? QKV__V1__ROPE__PAIRING__PAIRING_INTERLEAVED : QKV__V1__ROPE__PAIRING__PAIRING_HALF;
  to->scaling = (Qkv__V1__Rope__Scaling)from->scaling;
  to->factor = from->factor;
  to->original_max_position = from->original_max_position;
  to->low_freq_factor = from->low_freq_factor;
  to->high_freq_factor = from->high_freq_factor;
  to->beta_fast = from->beta_fast;
  to->beta_slow = from->beta_slow;
  to->attention_factor = from->attention_factor;
}

typedef struct registering {
  Qkv__V1__RegisterModelRequest *request;
  qkv_code code;  // of the first failure, but for UNAVAILABLE
  size_t registered;
  qkv_call_error error;
} registering;

static bool register_part(qkv_client *part, void *context) {
  registering *all = context;
  ProtobufCMessage *answer = NULL;
  all->code = qkv_client_call_message(part, "/qkv.v1.KvCache/RegisterModel", &all->request->base,
                                      &qkv__v1__register_model_response__descriptor, &answer, &all->error);
  if (answer != NULL) protobuf_c_message_free_unpacked(answer, NULL);
  all->registered += all->code == QKV_OK;
  return all->code == QKV_OK || all->code == QKV_UNAVAILABLE;
}

// Registers with all daemons that answer; the others get the model once they do.
static qkv_code register_with_all(qkv_client *client, Qkv__V1__RegisterModelRequest *request, qkv_call_error *error) {
  registering all = {.request = request};
  const qkv_code code = qkvi_each_part(client, register_part, &all, error);
  if (code != QKV_OK) return code;
  if (all.code != QKV_OK && !(all.code == QKV_UNAVAILABLE && all.registered > 0)) {
    if (error != NULL) *error = all.error;
    return all.code;
  }
  if (client->part_count > 0) {
    const size_t bytes = qkv__v1__register_model_request__get_packed_size(request);
    uint8_t *packed = malloc(bytes + 1);
    assert(packed != NULL);
    (void)qkv__v1__register_model_request__pack(request, packed);
    qkvi_keep_model(client, request->model->name, packed, bytes);
    free(packed);
  }
  return qkvi_ok(error);
}

qkv_code qkv_client_register_model(qkv_client *client, const qkv_client_model *model, qkv_call_error *error) {
  Qkv__V1__RegisterModelRequest request = QKV__V1__REGISTER_MODEL_REQUEST__INIT;
  Qkv__V1__Model message = QKV__V1__MODEL__INIT;
  filled_policy policy;
  Qkv__V1__Rope rope;
  message.name = text_or_empty(model->name);
  message.layers = model->layers;
  message.kv_heads = model->kv_heads;
  message.q_heads = model->q_heads;
  message.key_dim = model->key_dim;
  message.value_dim = model->value_dim;
  message.dtype = (Qkv__V1__DType)model->dtype;
  fill_rope(&model->rope, &rope);
  message.rope = &rope;
  message.scale = model->scale;
  message.sliding_window = model->sliding_window;
  message.soft_cap = model->soft_cap;
  message.calibration.data = (uint8_t *)(uintptr_t)model->calibration;
  message.calibration.len = model->calibration != NULL ? model->calibration_bytes : 0;
  message.calibration_trusted = model->calibration_trusted;
  message.calibration_kept = model->calibration_kept;
  message.shared = model->shared;
  if (model->policy != NULL) {
    fill_policy(model->policy, &policy);
    message.policy = &policy.policy;
  }
  request.model = &message;
  return register_with_all(client, &request, error);
}

static void fill_open(const qkv_session_options *options, Qkv__V1__OpenSessionRequest *request,
                      filled_policy *policy) {
  qkv__v1__open_session_request__init(request);
  request->session = text_or_empty(options->session);
  request->model = text_or_empty(options->model);
  request->purpose = (Qkv__V1__Purpose)options->purpose;
  request->first_position = options->first_position;
  request->max_attention_error = options->max_attention_error;
  request->durability = (Qkv__V1__Durability)options->durability;
  request->salt.data = (uint8_t *)(uintptr_t)options->salt;
  request->salt.len = options->salt_bytes;
  request->prefix_token_ids = (uint32_t *)(uintptr_t)options->prefix_token_ids;
  request->n_prefix_token_ids = options->prefix_token_ids != NULL ? options->prefix_token_count : 0;
  if (options->tier_bits != 0) {
    request->tier_bits_set_case = QKV__V1__OPEN_SESSION_REQUEST__TIER_BITS_SET_TIER_BITS;
    request->tier_bits = options->tier_bits == -1 ? 0 : options->tier_bits;
  }
  if (options->keep_full != 0) {
    request->keep_full_set_case = QKV__V1__OPEN_SESSION_REQUEST__KEEP_FULL_SET_KEEP_FULL;
    request->keep_full = options->keep_full > 0;
  }
  if (options->policy != NULL) {
    fill_policy(options->policy, policy);
    request->policy = &policy->policy;
  }
  if (options->evict) request->retention = QKV__V1__RETENTION__RETENTION_EVICT;
}

void *qkvi_pack_open(const qkv_session_options *options, size_t *bytes) {
  Qkv__V1__OpenSessionRequest request;
  filled_policy policy;
  fill_open(options, &request, &policy);
  *bytes = qkv__v1__open_session_request__get_packed_size(&request);
  uint8_t *packed = malloc(*bytes + 1);
  assert(packed != NULL);
  (void)qkv__v1__open_session_request__pack(&request, packed);
  return packed;
}

qkv_code qkv_client_open_session(qkv_client *client, const qkv_session_options *options, qkv_call_error *error) {
  Qkv__V1__OpenSessionRequest request;
  filled_policy policy;
  ProtobufCMessage *answer = NULL;
  fill_open(options, &request, &policy);
  if (options->matched_tokens != NULL) *options->matched_tokens = 0;
  qkv_code code = qkv_client_call_message(client, "/qkv.v1.KvCache/OpenSession", &request.base,
                                          &qkv__v1__open_session_response__descriptor, &answer, error);
  if (options->matched_tokens != NULL)
    *options->matched_tokens = answer != NULL ? ((const Qkv__V1__OpenSessionResponse *)answer)->matched_tokens : 0;
  if (answer != NULL) protobuf_c_message_free_unpacked(answer, NULL);
  return code;
}

static qkv_code close_session(qkv_client *client, const char *session, bool keep, uint64_t *bytes_freed,
                              qkv_call_error *error) {
  Qkv__V1__CloseSessionRequest request = QKV__V1__CLOSE_SESSION_REQUEST__INIT;
  ProtobufCMessage *answer = NULL;
  request.session = text_or_empty(session);
  request.keep = keep;
  qkv_code code = qkv_client_call_message(client, "/qkv.v1.KvCache/CloseSession", &request.base,
                                          &qkv__v1__close_session_response__descriptor, &answer, error);
  if (code != QKV_OK) return code;
  if (bytes_freed != NULL) *bytes_freed = ((const Qkv__V1__CloseSessionResponse *)answer)->bytes_freed;
  protobuf_c_message_free_unpacked(answer, NULL);
  return QKV_OK;
}

qkv_code qkv_client_close_session(qkv_client *client, const char *session, uint64_t *bytes_freed,
                                  qkv_call_error *error) {
  return close_session(client, session, false, bytes_freed, error);
}

qkv_code qkv_client_sink_session(qkv_client *client, const char *session, uint64_t *bytes_freed,
                                 qkv_call_error *error) {
  return close_session(client, session, true, bytes_freed, error);
}

static void copy_name(char out[129], const char *name) {
  size_t length = strnlen(name, 128);
  memcpy(out, name, length);
  out[length] = '\0';
}

static void take_info(const Qkv__V1__SessionInfo *from, qkv_client_session_info *info) {
  *info = (qkv_client_session_info){
      .purpose = (int)from->purpose,
      .first_position = from->first_position,
      .tokens_coded = from->tokens_coded,
      .tokens_exact = from->tokens_exact,
      .bytes_coded = from->bytes_coded,
      .bytes_exact = from->bytes_exact,
      .bytes_fp16 = from->bytes_fp16,
      .bytes_overhead = from->bytes_overhead,
      .bits_per_coordinate = from->bits_per_coordinate,
      .tier_bits = from->tier_bits,
      .keep_full = from->keep_full != 0,
      .durability = (int)from->durability,
      .evictable = from->retention == QKV__V1__RETENTION__RETENTION_EVICT,
      .tokens_cold = from->tokens_cold,
      .bytes_stored = from->bytes_stored,
      .bytes_shared = from->bytes_shared,
      .max_attention_error = from->max_attention_error,
      .attention_error = from->attention_error,
      .contract_pages = from->contract_pages,
      .contract_missed = from->contract_missed,
      .calibration = from->calibration,
      .calibration_since_unix_ms = from->calibration_since_unix_ms,
      .watched_error = from->watched_error,
      .watched_error_data_free = from->watched_error_data_free,
      .created_unix_ms = from->created_unix_ms,
      .last_used_unix_ms = from->last_used_unix_ms,
      .layers = (uint32_t)from->n_lengths,
  };
  copy_name(info->session, from->session);
  copy_name(info->model, from->model);
  copy_name(info->tenant, from->tenant);
  if (from->policy != NULL) {
    info->bits_k = from->policy->bits_k;
    info->bits_v = from->policy->bits_v;
    info->recent_window = from->policy->recent_window;
  }
  if (from->n_lengths == 0) return;
  info->lengths = malloc(2 * from->n_lengths * sizeof *info->lengths);
  assert(info->lengths != NULL);
  memcpy(info->lengths, from->lengths, from->n_lengths * sizeof *info->lengths);
  if (from->n_durable != from->n_lengths) return;
  info->durable = info->lengths + from->n_lengths;
  memcpy(info->durable, from->durable, from->n_durable * sizeof *info->durable);
}

qkv_code qkv_client_get_session(qkv_client *client, const char *session, qkv_client_session_info *info,
                                qkv_call_error *error) {
  Qkv__V1__GetSessionRequest request = QKV__V1__GET_SESSION_REQUEST__INIT;
  ProtobufCMessage *answer = NULL;
  *info = (qkv_client_session_info){0};
  request.session = text_or_empty(session);
  qkv_code code = qkv_client_call_message(client, "/qkv.v1.KvCache/GetSession", &request.base,
                                          &qkv__v1__session_info__descriptor, &answer, error);
  if (code != QKV_OK) return code;
  take_info((const Qkv__V1__SessionInfo *)answer, info);
  protobuf_c_message_free_unpacked(answer, NULL);
  return QKV_OK;
}

static qkv_code has_of_one(qkv_client *client, const char *const *sessions, size_t count, bool touch,
                           uint8_t *presence, uint64_t *tokens, qkv_call_error *error) {
  static const char method[] = "/qkv.v1.KvCache/HasSessions";
  Qkv__V1__HasSessionsRequest request = QKV__V1__HAS_SESSIONS_REQUEST__INIT;
  ProtobufCMessage *answer = NULL;
  request.sessions = (char **)(uintptr_t)sessions;
  request.n_sessions = count;
  request.tokens = tokens != NULL;
  request.touch = touch;
  const qkv_code code = qkv_client_call_message(client, method, &request.base,
                                                &qkv__v1__has_sessions_response__descriptor, &answer, error);
  if (code != QKV_OK) return code;
  const Qkv__V1__HasSessionsResponse *response = (const Qkv__V1__HasSessionsResponse *)answer;
  const bool whole = response->n_presence == count && (tokens == NULL || response->n_tokens == count);
  for (size_t i = 0; i < count && whole; i++) {
    presence[i] = (uint8_t)response->presence[i];
    if (tokens != NULL) tokens[i] = response->tokens[i];
  }
  protobuf_c_message_free_unpacked(answer, NULL);
  if (whole) return QKV_OK;
  qkv_error reason = {0};
  (void)qkv_fail(&reason, QKV_INTERNAL, "it does not have an entry for each name");
  return qkvi_malformed(error, method, &reason);
}

static const char *name_at(const void *names, size_t i) {
  return ((const char *const *)names)[i];
}

// One group after the other.
static qkv_code has_of_several(qkv_client *client, const char *const *sessions, size_t count, bool touch,
                               uint8_t *presence, uint64_t *tokens, qkv_call_error *error) {
  qkvi_split split;
  qkv_code code = qkvi_split_keys(client, name_at, sessions, count, &split, error);
  if (code != QKV_OK) return code;
  const char **names = calloc(count, sizeof *names);
  uint8_t *found = calloc(count, sizeof *found);
  uint64_t *held = calloc(count, sizeof *held);
  assert(names != NULL && found != NULL && held != NULL);
  for (size_t i = 0; i < count; i++) names[i] = sessions[split.order[i]];
  for (size_t g = 0; g < split.groups && code == QKV_OK; g++) {
    const size_t begin = split.begins[g];
    code = has_of_one(split.parts[g], names + begin, split.begins[g + 1] - begin, touch, found + begin,
                      tokens != NULL ? held + begin : NULL, error);
  }
  for (size_t i = 0; i < count && code == QKV_OK; i++) {
    presence[split.order[i]] = found[i];
    if (tokens != NULL) tokens[split.order[i]] = held[i];
  }
  free((void *)names);
  free(found);
  free(held);
  qkvi_split_free(&split);
  return code;
}

qkv_code qkv_client_has_sessions(qkv_client *client, const char *const *sessions, size_t count, bool touch,
                                 uint8_t *presence, uint64_t *tokens, qkv_call_error *error) {
  if (client->part_count > 0 && count > 0)
    return has_of_several(client, sessions, count, touch, presence, tokens, error);
  const qkv_code routed = qkvi_route(&client, count > 0 ? sessions[0] : "", error);
  if (routed != QKV_OK) return routed;
  return has_of_one(client, sessions, count, touch, presence, tokens, error);
}

// A fork stays where its session is, so it must belong there.
static qkv_code check_fork(const qkv_client *whole, const qkv_client *owner, const char *session, const char *fork,
                           qkv_call_error *error) {
  qkv_client *other = (qkv_client *)(uintptr_t)whole;
  if (whole->part_count == 0) return QKV_OK;
  const qkv_code code = qkvi_route(&other, fork, error);
  if (code != QKV_OK || other == owner) return code;
  return qkvi_fail(error, QKV_FAILED_PRECONDITION,
                   "session %.128s is at %.100s, a session named %.128s belongs to %.100s: forks need a client with "
                   "placement",
                   session, owner->target, fork, other->target);
}

qkv_code qkv_client_fork(qkv_client *client, const char *session, const char *fork, uint64_t position,
                         qkv_call_error *error) {
  Qkv__V1__ForkRequest request = QKV__V1__FORK_REQUEST__INIT;
  ProtobufCMessage *answer = NULL;
  request.session = text_or_empty(session);
  request.fork = text_or_empty(fork);
  request.position = position;
  qkv_client *const whole = client;
  const qkv_code routed = qkvi_route(&client, request.session, error);
  if (routed != QKV_OK) return routed;
  const qkv_code misplaced = check_fork(whole, client, request.session, request.fork, error);
  if (misplaced != QKV_OK) return misplaced;
  const qkv_code code = qkv_client_call_message(client, "/qkv.v1.KvCache/Fork", &request.base,
                                                &qkv__v1__fork_response__descriptor, &answer, error);
  if (answer != NULL) protobuf_c_message_free_unpacked(answer, NULL);
  return code;
}

static qkv_code match_of_one(qkv_client *client, const qkv_client_prompt *prompt, qkv_client_match *match,
                             qkv_call_error *error) {
  Qkv__V1__MatchRequest request = QKV__V1__MATCH_REQUEST__INIT;
  ProtobufCMessage *answer = NULL;
  *match = (qkv_client_match){0};
  request.model = text_or_empty(prompt->model);
  request.token_ids = (uint32_t *)(uintptr_t)prompt->token_ids;
  request.n_token_ids = prompt->token_count;
  request.salt.data = (uint8_t *)(uintptr_t)prompt->salt;
  request.salt.len = prompt->salt_bytes;
  const qkv_code code = qkv_client_call_message(client, "/qkv.v1.KvCache/Match", &request.base,
                                                &qkv__v1__match_response__descriptor, &answer, error);
  if (code != QKV_OK) return code;
  const Qkv__V1__MatchResponse *response = (const Qkv__V1__MatchResponse *)answer;
  *match = (qkv_client_match){.tokens = response->tokens,
                              .tokens_in_memory = response->tokens_in_memory,
                              .tokens_on_ssd = response->tokens_on_ssd,
                              .restore_ms = response->restore_ms};
  copy_name(match->session, response->session);
  protobuf_c_message_free_unpacked(answer, NULL);
  return QKV_OK;
}

typedef struct matching {
  const qkv_client *whole;
  const qkv_client_prompt *prompt;
  qkv_client_match best;
  qkv_code code;  // of the last part
  bool found;     // a daemon knows the model
  qkv_call_error error;
} matching;

// A session that is held by another than its owner, from when that did not answer, cannot be reached by its name.
static bool reachable(const matching *all, const qkv_client *part, const char *session) {
  qkv_client *owner = (qkv_client *)(uintptr_t)all->whole;
  if (session[0] == '\0' || all->whole->part_count == 0) return true;
  return qkvi_route(&owner, session, NULL) == QKV_OK && owner == part;
}

static bool match_part(qkv_client *part, void *context) {
  matching *all = context;
  qkv_client_match match;
  all->code = match_of_one(part, all->prompt, &match, &all->error);
  if (all->code != QKV_OK) return all->code == QKV_NOT_FOUND || all->code == QKV_UNAVAILABLE;
  all->found = true;
  const bool better = match.tokens > all->best.tokens ||
                      (match.tokens == all->best.tokens && match.tokens_in_memory > all->best.tokens_in_memory);
  if (better && reachable(all, part, match.session)) all->best = match;
  return true;
}

qkv_code qkv_client_match_prefix(qkv_client *client, const qkv_client_prompt *prompt, qkv_client_match *match,
                                 qkv_call_error *error) {
  matching all = {.whole = client, .prompt = prompt};
  *match = (qkv_client_match){0};
  const qkv_code code = qkvi_each_part(client, match_part, &all, error);
  if (code != QKV_OK) return code;
  const bool passed_over = all.found && (all.code == QKV_NOT_FOUND || all.code == QKV_UNAVAILABLE);
  if (all.code != QKV_OK && !passed_over) {
    if (error != NULL) *error = all.error;
    return all.code;
  }
  *match = all.best;
  return qkvi_ok(error);
}

qkv_code qkv_client_truncate(qkv_client *client, const char *session, uint64_t position, qkv_call_error *error) {
  Qkv__V1__TruncateRequest request = QKV__V1__TRUNCATE_REQUEST__INIT;
  ProtobufCMessage *answer = NULL;
  request.session = text_or_empty(session);
  request.position = position;
  qkv_code code = qkv_client_call_message(client, "/qkv.v1.KvCache/Truncate", &request.base,
                                          &qkv__v1__truncate_response__descriptor, &answer, error);
  if (answer != NULL) protobuf_c_message_free_unpacked(answer, NULL);
  return code;
}
