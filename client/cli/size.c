// qkvctl size: what a daemon needs for so many sessions.
#include <stdio.h>
#include <string.h>

#include "client/c/codes.h"
#include "client/cli/cli.h"
#include "client/cli/sizing.h"
#include "client/common/terminal.h"

// In addition to pages: a tenth of them for fragmentation and pages under way, and this much for the process.
#define PROCESS_BYTES ((double)(64 << 20))
// Of the SSD: what has been dropped and is not compacted yet.
#define DEAD_PART 0.25
// Of a container, beyond memory-budget and its tenth (deploy/helm/qkvd).
#define CONTAINER_BYTES ((double)(256 << 20))

typedef struct needed {
  qkvctl_need session;
  double sessions, memory, budget, container, stored, disk;
  double append_cores, attend_cores;
} needed;

// The daemon's model, as far as options do not say otherwise.
static qkv_code ask_model(const qkvctl_values *values, qkv_model *model, qkv_policy *policy, qkv_call_error *error) {
  Qkv__V1__GetModelRequest request = QKV__V1__GET_MODEL_REQUEST__INIT;
  ProtobufCMessage *answer = NULL;
  request.name = (char *)(uintptr_t)values->model;  // protobuf-c wants no const
  qkv_client *client = qkvctl_connect(values);
  if (client == NULL) return QKV_UNAVAILABLE;
  qkv_code code = qkv_client_call_message(client, "/qkv.v1.KvCache/GetModel", &request.base,
                                          &qkv__v1__get_model_response__descriptor, &answer, error);
  const Qkv__V1__Model *from = code == 0 ? ((const Qkv__V1__GetModelResponse *)answer)->model : NULL;
  if (from != NULL) {
    model->layers = from->layers;
    model->kv_heads = from->kv_heads;
    model->q_heads = from->q_heads;
    model->key_dim = from->key_dim;
    model->value_dim = from->value_dim;
    model->dtype = (qkv_dtype)from->dtype;
    qkv_policy said;
    qkvi_policy_of_message(from->policy, &said);
    qkv_policy_merge(&said, policy);
    *policy = said;
  } else if (code == 0) {
    code = QKV_INTERNAL;
    (void)qkv_program_failed("the daemon does not describe model %s", values->model);
  } else {
    (void)qkv_program_failed("%s", error->text);
  }
  if (answer != NULL) protobuf_c_message_free_unpacked(answer, NULL);
  qkv_client_close(&client);
  return code;
}

static int64_t chosen(int64_t option, int64_t otherwise) {
  return option > 0 ? option : otherwise;
}

static qkv_status read_policy(const qkvctl_values *values, qkv_policy *policy, qkv_error *error) {
  if (values->codec != NULL) {
    policy->codec = qkv_codec_by_name(values->codec);
    policy->codec_v = NULL;
    memset(policy->parameters, 0, sizeof policy->parameters);
  }
  if (policy->codec == NULL)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "codec is \"%.64s\", qkvd --codecs lists those that there are",
                    values->codec != NULL ? values->codec : "");
  if (values->bits > 0) policy->bits_k = policy->bits_v = values->bits;
  if (values->bits_k > 0) policy->bits_k = values->bits_k;
  if (values->bits_v > 0) policy->bits_v = values->bits_v;
  if (values->recent_window >= 0) policy->recent_window = values->recent_window;
  return QKV_OK;
}

static qkv_status read_model(const qkvctl_values *values, qkv_model *model, qkv_error *error) {
  model->layers = (uint32_t)chosen(values->model_layers, model->layers);
  model->kv_heads = (uint32_t)chosen(values->kv_heads, model->kv_heads);
  model->q_heads = (uint32_t)chosen(values->q_heads, chosen(model->q_heads, model->kv_heads));
  model->key_dim = (uint32_t)chosen(values->key_dim, model->key_dim);
  model->value_dim = (uint32_t)chosen(values->value_dim, chosen(model->value_dim, model->key_dim));
  if (values->dtype != NULL && qkv_dtype_parse(values->dtype, &model->dtype) != QKV_OK)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "dtype is \"%.32s\", allowed are fp32, fp16 and bf16",
                    values->dtype);
  if (model->layers > 0 && model->kv_heads > 0 && model->key_dim > 0) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "--model NAME is needed, or --layers, --kv-heads and --key-dim");
}

static needed all_of_them(const qkvctl_values *values, const qkvctl_need *session) {
  needed all = {.session = *session, .sessions = (double)values->session_count};
  all.memory = all.sessions * session->memory;
  all.budget = 1.1 * all.memory + session->learning + PROCESS_BYTES;
  all.container = 1.1 * all.budget + CONTAINER_BYTES;
  all.stored = all.sessions * session->stored;
  all.disk = (1 + DEAD_PART) * all.stored;
  all.append_cores = values->append_rate * session->append_seconds;
  all.attend_cores = values->step_rate * session->attend_seconds;
  return all;
}

static int show_json(const qkvctl_values *values, const needed *all) {
  json_t *line =
      json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "tokens", (json_int_t)values->token_count,
                "sessions", (json_int_t)values->session_count, "session_bytes", (json_int_t)all->session.memory,
                "session_stored_bytes", (json_int_t)all->session.stored, "memory_bytes", (json_int_t)all->memory,
                "memory_budget", (json_int_t)all->budget, "container_bytes", (json_int_t)all->container,
                "learning_bytes", (json_int_t)all->session.learning, "stored_bytes", (json_int_t)all->stored,
                "disk_bytes", (json_int_t)all->disk);
  json_object_set_new(line, "append_seconds_per_token", json_real(all->session.append_seconds));
  json_object_set_new(line, "attend_seconds_per_step", json_real(all->session.attend_seconds));
  json_object_set_new(line, "cores", json_real(all->append_cores + all->attend_cores));
  return qkv_json_figures(line) ? QKV_EXIT_OK : QKV_EXIT_FAILED;
}

static int show(const qkvctl_values *values, const needed *all) {
  char a[QKV_HUMAN_MAX], b[QKV_HUMAN_MAX];
  printf("A session of %lld tokens: %s in memory, %s on the SSD\n", (long long)values->token_count,
         qkv_human_bytes((uint64_t)all->session.memory, a), qkv_human_bytes((uint64_t)all->session.stored, b));
  printf("%lld of them: %s in memory, %s on the SSD\n", (long long)values->session_count,
         qkv_human_bytes((uint64_t)all->memory, a), qkv_human_bytes((uint64_t)all->stored, b));
  printf("memory-budget: %s, of it up to %s while a calibration is learnt\n",
         qkv_human_bytes((uint64_t)all->budget, a), qkv_human_bytes((uint64_t)all->session.learning, b));
  printf("A container's limit: %s\n", qkv_human_bytes((uint64_t)all->container, a));
  printf("The SSD, with a quarter for what is dropped: %s\n", qkv_human_bytes((uint64_t)all->disk, a));
  printf("A core of this machine: %.0f tokens a second to append, %.1f steps a second over such a session\n",
         all->session.append_seconds > 0 ? 1 / all->session.append_seconds : 0,
         all->session.attend_seconds > 0 ? 1 / all->session.attend_seconds : 0);
  if (values->append_rate > 0 || values->step_rate > 0)
    printf("Cores like this one's: %.2f to append, %.2f to attend\n", all->append_cores, all->attend_cores);
  return fflush(stdout) == 0 ? QKV_EXIT_OK : QKV_EXIT_FAILED;
}

int qkvctl_size(void *values_in, const qkv_option_list *arguments) {
  const qkvctl_values *values = values_in;
  (void)arguments;
  qkv_error error = {0};
  qkv_call_error asked = {0};
  qkv_model model = {.name = "size", .dtype = QKV_FP16, .policy = QKV_POLICY_UNSET};
  // As qkvd has them by default.
  qkv_policy policy = {.codec = qkv_codec_at(0), .bits_k = 4, .bits_v = 4, .recent_window = 64, .sink_tokens = 4};
  policy.low_rank_said = policy.gqa_said = policy.learn_said = policy.anchor_said = true;
  if (values->token_count == 0) return qkv_program_misused("size needs --tokens N");
  if (strcmp(values->purpose, "attend") != 0 && strcmp(values->purpose, "fetch") != 0)
    return qkv_program_misused("purpose is \"%s\", allowed are attend and fetch", values->purpose);
  if (values->model != NULL && ask_model(values, &model, &policy, &asked) != 0) return QKV_EXIT_FAILED;
  const bool fetch = strcmp(values->purpose, "fetch") == 0;
  const qkvctl_sizing sizing = {.model = &model,
                                .policy = &policy,
                                .purpose = fetch ? QKV_PURPOSE_FETCH : QKV_PURPOSE_ATTEND,
                                .tokens = (uint64_t)values->token_count};
  qkvctl_need session;
  if (read_policy(values, &policy, &error) != QKV_OK || read_model(values, &model, &error) != QKV_OK ||
      qkvctl_size_session(&sizing, &session, &error) != QKV_OK)
    return qkv_program_misused("%s", error.text);
  const needed all = all_of_them(values, &session);
  return (values->program.json ? show_json : show)(values, &all);
}
