// qkvctl status and models: what the daemon is and knows.
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "client/cli/cli.h"
#include "client/common/terminal.h"
#include "qkv/v1/admin.pb-c.h"
#include "qkv/v1/kv_cache.pb-c.h"

// Calls and says why not where that fails: NULL then.
static ProtobufCMessage *call(const qkvctl_values *values, const char *method, const ProtobufCMessage *request,
                              const ProtobufCMessageDescriptor *kind) {
  ProtobufCMessage *answer = NULL;
  qkv_call_error error = {0};
  qkv_client *client = qkvctl_connect(values);
  if (client == NULL) return NULL;
  if (qkv_client_call_message(client, method, request, kind, &answer, &error) != 0) {
    (void)qkv_program_failed("%s", error.text);
  }
  qkv_client_close(&client);
  return answer;
}

// ---- status ----

static json_t *gpu_json(const Qkv__V1__GpuStatus *gpu) {
  return json_pack("{s:s, s:s, s:s, s:b, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "device", gpu->device, "name",
                   gpu->name, "uuid", gpu->uuid, "up", gpu->up, "reason", gpu->reason, "bytes",
                   (json_int_t)gpu->bytes, "bytes_limit", (json_int_t)gpu->bytes_limit, "ranges",
                   (json_int_t)gpu->ranges, "sessions", (json_int_t)gpu->sessions, "hits", (json_int_t)gpu->hits,
                   "misses", (json_int_t)gpu->misses, "failures", (json_int_t)gpu->failures, "less_attended",
                   (json_int_t)gpu->less_attended);
}

static json_t *status_json(const Qkv__V1__GetStatusResponse *status) {
  json_t *listen = json_array(), *metrics = json_object(), *options = json_object(), *gpus = json_array();
  for (size_t i = 0; i < status->n_gpus; i++) json_array_append_new(gpus, gpu_json(status->gpus[i]));
  for (size_t i = 0; i < status->n_listen; i++) json_array_append_new(listen, json_string(status->listen[i]));
  for (size_t i = 0; i < status->n_metrics; i++) {
    json_object_set_new(metrics, status->metrics[i]->name, json_real(status->metrics[i]->value));
  }
  for (size_t i = 0; i < status->n_options; i++) {
    const Qkv__V1__OptionValue *option = status->options[i];
    json_object_set_new(options, option->name,
                        json_pack("{s:s, s:s}", "value", option->value, "source", option->source));
  }
  return json_pack("{s:I, s:I, s:I, s:I, s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:o, s:s, s:o, s:o, s:o}",
                   "kv_bytes_available", (json_int_t)status->kv_bytes_available, "overhead_bytes",
                   (json_int_t)status->overhead_bytes, "learning_bytes", (json_int_t)status->learning_bytes,
                   "calibration_bytes", (json_int_t)status->calibration_bytes, "version", status->version, "state",
                   status->state, "uptime_ms", (json_int_t)status->uptime_ms, "models", (json_int_t)status->models,
                   "sessions", (json_int_t)status->sessions, "kv_bytes", (json_int_t)status->kv_bytes,
                   "kv_bytes_limit", (json_int_t)status->kv_bytes_limit, "rss_bytes", (json_int_t)status->rss_bytes,
                   "listen", listen, "cpu", status->cpu, "metrics", metrics, "options", options, "gpus", gpus);
}

static void print_metrics(const Qkv__V1__GetStatusResponse *status) {
  qkv_table *table = qkv_table_create(3);
  qkv_table_cell(table, "METRIC");
  qkv_table_cell(table, "VALUE");
  qkv_table_cell(table, "MEANING");
  for (size_t i = 0; i < status->n_metrics; i++) {
    qkv_table_cell(table, "%s", status->metrics[i]->name);
    qkv_table_cell(table, "%.15g", status->metrics[i]->value);
    qkv_table_cell(table, "%s", status->metrics[i]->help);
  }
  putchar('\n');
  qkv_table_print(table, stdout);
  qkv_table_destroy(&table);
}

static void print_options(const Qkv__V1__GetStatusResponse *status) {
  qkv_table *table = qkv_table_create(3);
  qkv_table_cell(table, "OPTION");
  qkv_table_cell(table, "VALUE");
  qkv_table_cell(table, "FROM");
  for (size_t i = 0; i < status->n_options; i++) {
    qkv_table_cell(table, "%s", status->options[i]->name);
    qkv_table_cell(table, "%s", status->options[i]->value);
    qkv_table_cell(table, "%s", status->options[i]->source);
  }
  putchar('\n');
  qkv_table_print(table, stdout);
  qkv_table_destroy(&table);
}

static const char *option_of(const Qkv__V1__GetStatusResponse *status, const char *name) {
  for (size_t i = 0; i < status->n_options; i++) {
    if (strcmp(status->options[i]->name, name) == 0) return status->options[i]->value;
  }
  return "0";
}

static void print_gpu(const Qkv__V1__GpuStatus *gpu) {
  char used[QKV_HUMAN_MAX], limit[QKV_HUMAN_MAX];
  if (!gpu->up) {
    printf("GPU %-8.8sis not used: %s\n", gpu->device, gpu->reason);
    return;
  }
  printf("GPU %-8.8s%s: %s of %s, %" PRIu64 " sessions, %" PRIu64 " ranges resident, %.0f %% of those attended\n",
         gpu->device, gpu->name, qkv_human_bytes(gpu->bytes, used), qkv_human_bytes(gpu->bytes_limit, limit),
         gpu->sessions, gpu->ranges,
         gpu->hits > 0 ? 100 * (double)gpu->hits / ((double)gpu->hits + (double)gpu->misses) : 0);
  if (gpu->less_attended > 0)
    printf("            %" PRIu64 " attends of ranges that get less attention than those, and are not uploaded\n",
           gpu->less_attended);
}

// Where the daemon is to use any.
static void print_gpus(const Qkv__V1__GetStatusResponse *status) {
  if (strcmp(option_of(status, "gpu-memory"), "0") == 0) return;
  if (status->n_gpus == 0) printf("GPU         none is used, the daemon's log says why\n");
  for (size_t i = 0; i < status->n_gpus; i++) print_gpu(status->gpus[i]);
}

static void print_status(const Qkv__V1__GetStatusResponse *status) {
  char held[QKV_HUMAN_MAX], limit[QKV_HUMAN_MAX], rss[QKV_HUMAN_MAX], uptime[QKV_HUMAN_MAX];
  char coders[QKV_HUMAN_MAX], moments[QKV_HUMAN_MAX], capacity[QKV_HUMAN_MAX], overhead[QKV_HUMAN_MAX];
  printf("qkvd %s, %s for %s\n", status->version, status->state, qkv_human_duration(status->uptime_ms, uptime));
  for (size_t i = 0; i < status->n_listen; i++) printf("listens     %s\n", status->listen[i]);
  printf("kernels     %s\n", status->cpu);
  printf("models      %" PRIu64 "\n", status->models);
  printf("sessions    %" PRIu64 "\n", status->sessions);
  printf("KV          %s of %s", qkv_human_bytes(status->kv_bytes, held),
         qkv_human_bytes(status->kv_bytes_limit, limit));
  if (status->kv_bytes_available < status->kv_bytes_limit)
    printf(", %s may be taken now", qkv_human_bytes(status->kv_bytes_available, capacity));
  putchar('\n');
  printf("calibration %s in use, %s of the KV's budget to learn from\n",
         qkv_human_bytes(status->calibration_bytes, coders), qkv_human_bytes(status->learning_bytes, moments));
  printf("memory      %s resident, %s of it outside the KV\n", qkv_human_bytes(status->rss_bytes, rss),
         qkv_human_bytes(status->overhead_bytes, overhead));
  print_gpus(status);
}

int qkvctl_status(void *values_in, const qkv_option_list *arguments) {
  (void)arguments;
  const qkvctl_values *values = values_in;
  Qkv__V1__GetStatusRequest request = QKV__V1__GET_STATUS_REQUEST__INIT;
  ProtobufCMessage *answer =
      call(values, "/qkv.v1.Admin/GetStatus", &request.base, &qkv__v1__get_status_response__descriptor);
  if (answer == NULL) return QKV_EXIT_FAILED;
  const Qkv__V1__GetStatusResponse *status = (const Qkv__V1__GetStatusResponse *)answer;
  bool written = true;
  if (values->program.json) {
    written = qkv_json_line(status_json(status));
  } else {
    print_status(status);
    if (values->metrics) print_metrics(status);
    if (values->options) print_options(status);
  }
  protobuf_c_message_free_unpacked(answer, NULL);
  return written ? QKV_EXIT_OK : QKV_EXIT_FAILED;
}

// ---- models ----

static const char *source_name(const Qkv__V1__CalibrationState *state) {
  static const char *const names[] = {"none", "learnt", "registered", "file", "stored"};
  const size_t source = (size_t)state->source;
  return source < sizeof names / sizeof *names ? names[source] : "unknown";
}

static json_t *calibration_json(const Qkv__V1__CalibrationState *state) {
  return json_pack("{s:s, s:I, s:I, s:I, s:b, s:b, s:f, s:f, s:I, s:I, s:b, s:I, s:I, s:s, s:f, s:f, s:s}", "source",
                   source_name(state), "version", (json_int_t)state->version, "since_unix_ms",
                   (json_int_t)state->since_unix_ms, "tokens", (json_int_t)state->tokens, "trusted",
                   (int)state->trusted, "tried", (int)state->tried, "attention_error", state->attention_error,
                   "attention_error_data_free", state->attention_error_data_free, "parts", (json_int_t)state->parts,
                   "parts_data_free", (json_int_t)state->parts_data_free, "archive_refused",
                   (int)state->archive_refused, "on_trial", (json_int_t)state->on_trial, "refused",
                   (json_int_t)state->refused, "refusal", state->refusal, "watched_error", state->watched_error,
                   "watched_error_data_free", state->watched_error_data_free, "rope_doubt", state->rope_doubt);
}

static json_t *model_json(const Qkv__V1__GetModelResponse *response) {
  const Qkv__V1__Model *model = response->model;
  json_t *object =
      json_pack("{s:s, s:s, s:b, s:i, s:i, s:i, s:i, s:i, s:s, s:f, s:I, s:f, s:f, s:I}", "model", model->name,
                "tenant", response->tenant, "shared", (int)response->shared, "layers", (int)model->layers, "kv_heads",
                (int)model->kv_heads, "q_heads", (int)model->q_heads, "key_dim", (int)model->key_dim, "value_dim",
                (int)model->value_dim, "dtype", qkv_dtype_name((qkv_dtype)model->dtype), "scale", model->scale,
                "sliding_window", (json_int_t)model->sliding_window, "soft_cap", model->soft_cap, "rope_theta",
                model->rope == NULL ? 0.0 : model->rope->theta, "sessions", (json_int_t)response->sessions);
  if (response->calibration != NULL)
    json_object_set_new(object, "calibration", calibration_json(response->calibration));
  const Qkv__V1__CodecPolicy *policy = model->policy;
  if (policy == NULL) return object;
  json_object_set_new(object, "codec", json_string(policy->codec));
  json_object_set_new(object, "bits_k", json_real(policy->bits_k));
  json_object_set_new(object, "bits_v", json_real(policy->bits_v));
  json_object_set_new(object, "recent_window", json_integer(policy->recent_window));
  json_object_set_new(object, "sink_tokens", json_integer(policy->sink_tokens));
  return object;
}

// Version and source, since when, from how many tokens, and what it is worth: errors of attention as last tried.
static void add_calibration(qkv_table *table, const Qkv__V1__CalibrationState *state) {
  char since[QKV_HUMAN_MAX];
  const bool has = state != NULL && state->version != 0;
  if (has) {
    qkv_table_cell(table, "%08" PRIx32 " %s%s", state->version, source_name(state),
                   state->trusted ? ", trusted" : "");
  } else {
    qkv_table_cell(table, state != NULL && state->on_trial != 0 ? "on trial" : "none");
  }
  qkv_table_cell(table, "%s",
                 state != NULL && state->since_unix_ms > 0 ? qkv_human_age(state->since_unix_ms, since) : "-");
  if (!has) {
    qkv_table_cell(table, "-");
    qkv_table_cell(table, "-");
    return;
  }
  qkv_table_cell(table, "%" PRIu64, state->tokens);
  if (state->tried) {
    qkv_table_cell(table, "%.3g for %.3g", state->attention_error, state->attention_error_data_free);
  } else {
    qkv_table_cell(table, "not tried");
  }
}

static void add_model(qkv_table *table, const Qkv__V1__GetModelResponse *response) {
  const Qkv__V1__Model *model = response->model;
  qkv_table_cell(table, "%s", model->name);
  qkv_table_cell(table, "%s%s", response->tenant, response->shared ? ", shared" : "");
  qkv_table_cell(table, "%" PRIu32, model->layers);
  qkv_table_cell(table, "%" PRIu32 "/%" PRIu32, model->q_heads, model->kv_heads);
  qkv_table_cell(table, "%" PRIu32 "/%" PRIu32, model->key_dim, model->value_dim);
  qkv_table_cell(table, "%s", qkv_dtype_name((qkv_dtype)model->dtype));
  if (model->policy == NULL) {
    qkv_table_cell(table, "-");
  } else {
    qkv_table_cell(table, "%.3g/%.3g", model->policy->bits_k, model->policy->bits_v);
  }
  add_calibration(table, response->calibration);
  qkv_table_cell(table, "%" PRIu64, response->sessions);
}

// What is no row of the table.
static void print_notes(const Qkv__V1__GetModelResponse *response) {
  const Qkv__V1__CalibrationState *state = response->calibration;
  if (state == NULL) return;
  if (state->on_trial != 0)
    printf("%s: calibration %08" PRIx32 " waits for traffic to be tried on\n", response->model->name,
           state->on_trial);
  if (state->archive_refused)
    printf("%s: calibration %08" PRIx32 " is not for the archive codec, which is worse with it than data-free\n",
           response->model->name, state->version);
  if (state->refusal[0] != '\0') printf("%s: calibration %s\n", response->model->name, state->refusal);
  if (state->rope_doubt[0] != '\0') printf("%s: %s\n", response->model->name, state->rope_doubt);
}

static void print_models(const Qkv__V1__ListModelsResponse *list) {
  static const char *const headings[] = {"MODEL",    "TENANT",      "LAYERS", "HEADS Q/KV", "DIM K/V", "DTYPE",
                                         "BITS K/V", "CALIBRATION", "SINCE",  "TOKENS",     "ERROR",   "SESSIONS"};
  qkv_table *table = qkv_table_create(sizeof headings / sizeof *headings);
  for (size_t i = 0; i < sizeof headings / sizeof *headings; i++) qkv_table_cell(table, "%s", headings[i]);
  for (size_t i = 0; i < list->n_models; i++) {
    if (list->models[i]->model != NULL) add_model(table, list->models[i]);
  }
  qkv_table_print(table, stdout);
  qkv_table_destroy(&table);
  for (size_t i = 0; i < list->n_models; i++) {
    if (list->models[i]->model != NULL) print_notes(list->models[i]);
  }
}

int qkvctl_models(void *values_in, const qkv_option_list *arguments) {
  (void)arguments;
  const qkvctl_values *values = values_in;
  Qkv__V1__ListModelsRequest request = QKV__V1__LIST_MODELS_REQUEST__INIT;
  ProtobufCMessage *answer =
      call(values, "/qkv.v1.KvCache/ListModels", &request.base, &qkv__v1__list_models_response__descriptor);
  if (answer == NULL) return QKV_EXIT_FAILED;
  const Qkv__V1__ListModelsResponse *list = (const Qkv__V1__ListModelsResponse *)answer;
  bool written = true;
  if (!values->program.json) print_models(list);
  for (size_t i = 0; values->program.json && i < list->n_models && written; i++) {
    if (list->models[i]->model != NULL) written = qkv_json_line(model_json(list->models[i]));
  }
  protobuf_c_message_free_unpacked(answer, NULL);
  return written ? QKV_EXIT_OK : QKV_EXIT_FAILED;
}
