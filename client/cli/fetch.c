// qkvctl fetch: a session's rows into a file.
#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "client/cli/cli.h"
#include "client/cli/output.h"
#include "client/common/interrupt.h"
#include "client/common/terminal.h"
#include "qkv/v1/kv_cache.pb-c.h"

enum { K = 0, V = 1 };

// What is fetched of one layer: positions [begin, end), into tensors 2i and 2i + 1 of the output.
typedef struct layer_plan {
  uint32_t layer;
  uint64_t begin, end;
} layer_plan;

typedef struct fetch_plan {
  qkv_client *client;
  const qkvctl_values *values;
  const char *session;
  char model[129];
  uint64_t first_position;
  int64_t kv_heads, dims[2];  // key_dim, value_dim
  qkv_dtype dtype;
  layer_plan *layers;
  size_t count;
  uint64_t tokens;  // over all layers
  uint64_t bytes;   // of all tensors
} fetch_plan;

// ---- what to fetch ----

static size_t row_bytes(const fetch_plan *plan, int part) {
  return (size_t)(plan->kv_heads * plan->dims[part]) * qkv_dtype_size(plan->dtype);
}

static int ask_model(fetch_plan *plan) {
  Qkv__V1__GetModelRequest request = QKV__V1__GET_MODEL_REQUEST__INIT;
  ProtobufCMessage *answer = NULL;
  qkv_call_error error = {0};
  request.name = plan->model;
  if (qkv_client_call_message(plan->client, "/qkv.v1.KvCache/GetModel", &request.base,
                              &qkv__v1__get_model_response__descriptor, &answer, &error) != 0) {
    return qkv_program_failed("%s", error.text);
  }
  const Qkv__V1__Model *model = ((const Qkv__V1__GetModelResponse *)answer)->model;
  int status = QKV_EXIT_OK;
  if (model == NULL) {
    status = qkv_program_failed("the daemon does not describe model %s", plan->model);
  } else {
    plan->kv_heads = model->kv_heads;
    plan->dims[K] = model->key_dim;
    plan->dims[V] = model->value_dim;
    if (plan->dtype == QKV_DTYPE_NONE) plan->dtype = (qkv_dtype)model->dtype;
  }
  protobuf_c_message_free_unpacked(answer, NULL);
  return status;
}

// Layers that hold nothing in the range are left out.
static int plan_layers(fetch_plan *plan, const qkv_client_session_info *info) {
  const qkvctl_values *values = plan->values;
  size_t count = 0;
  qkv_error error = {0};
  uint32_t *chosen = calloc((size_t)info->layers + 1, sizeof *chosen);
  plan->layers = calloc((size_t)info->layers + 1, sizeof *plan->layers);
  assert(chosen != NULL && plan->layers != NULL);
  qkv_status status = qkvctl_parse_layers(values->layers, info->layers, chosen, &count, &error);
  for (size_t i = 0; i < count; i++) {
    layer_plan layer = {.layer = chosen[i], .begin = (uint64_t)values->begin, .end = info->lengths[chosen[i]]};
    if (layer.begin < info->first_position) layer.begin = info->first_position;
    if (values->end != 0 && (uint64_t)values->end < layer.end) layer.end = (uint64_t)values->end;
    if (layer.begin >= layer.end) continue;
    plan->layers[plan->count++] = layer;
    plan->tokens += layer.end - layer.begin;
  }
  free(chosen);
  if (status != QKV_OK) return qkv_program_misused("%s", error.text);
  if (plan->count == 0) return qkv_program_failed("session %s holds no rows there", plan->session);
  return QKV_EXIT_OK;
}

static int make_plan(fetch_plan *plan) {
  qkv_client_session_info info;
  qkv_call_error error = {0};
  if (qkv_client_get_session(plan->client, plan->session, &info, &error) != 0) {
    return qkv_program_failed("%s", error.text);
  }
  memcpy(plan->model, info.model, sizeof plan->model);
  plan->first_position = info.first_position;
  int status = plan_layers(plan, &info);
  qkv_free(info.lengths);
  if (status == QKV_EXIT_OK) status = ask_model(plan);
  if (status == QKV_EXIT_OK) plan->bytes = plan->tokens * (row_bytes(plan, K) + row_bytes(plan, V));
  return status;
}

// ---- the output ----

static qkv_safetensors_tensor describe(const fetch_plan *plan, const layer_plan *layer, int part, char *name,
                                       size_t size) {
  int64_t tokens = (int64_t)(layer->end - layer->begin);
  bool heads_first = plan->values->heads_first;
  snprintf(name, size, "layers.%" PRIu32 ".%c", layer->layer, part == K ? 'k' : 'v');
  return (qkv_safetensors_tensor){
      .name = name,
      .dtype = plan->dtype,
      .rank = 3,
      .dims = {heads_first ? plan->kv_heads : tokens, heads_first ? tokens : plan->kv_heads, plan->dims[part]},
  };
}

static qkv_status create_output(const fetch_plan *plan, bool npy, qkvctl_output **output, qkv_error *error) {
  enum { NAME_SIZE = 32 };
  char position[32];
  qkv_safetensors_tensor *tensors = calloc(2 * plan->count + 1, sizeof *tensors);
  char(*names)[NAME_SIZE] = calloc(2 * plan->count + 1, sizeof *names);
  assert(tensors != NULL && names != NULL);
  for (size_t i = 0; i < 2 * plan->count; i++) {
    tensors[i] = describe(plan, &plan->layers[i / 2], (int)(i % 2), names[i], NAME_SIZE);
  }
  uint64_t begin = (uint64_t)plan->values->begin;
  snprintf(position, sizeof position, "%" PRIu64, begin > plan->first_position ? begin : plan->first_position);
  const qkv_safetensors_entry metadata[] = {
      {"session", plan->session},
      {"model", plan->model},
      {"first_position", position},
      {"layout", plan->values->heads_first ? "heads_first" : "tokens_first"},
      {"rope", plan->values->before_rope ? "before" : "after"},
  };
  qkv_status status = qkvctl_output_create(plan->values->output, npy, tensors, 2 * plan->count, metadata,
                                           sizeof metadata / sizeof *metadata, output, error);
  free(names);
  free(tensors);
  return status;
}

// ---- the rows ----

typedef struct fetch_state {
  const fetch_plan *plan;
  const layer_plan *layer;
  size_t index;     // of the layer in the plan
  uint64_t next;    // position that has to come
  uint8_t *all[2];  // heads first: the layer's tensors, which chunks of tokens do not fill front to back
  qkvctl_output *output;
  qkv_progress progress;
  qkv_error error;
} fetch_state;

// Whether these are the rows that were asked for: K or V of some tokens of the layer in the plan's shape.
static qkv_status check_rows(const fetch_state *state, const qkv_client_rows *rows, int part, int64_t *tokens,
                             qkv_error *error) {
  const fetch_plan *plan = state->plan;
  const qkv_client_tensor *tensor = part == K ? &rows->k : &rows->v;
  int token_axis = plan->values->heads_first ? 1 : 0;
  *tokens = tensor->rank == 3 ? tensor->dims[token_axis] : 0;
  bool right = rows->layer == state->layer->layer && rows->position == state->next && tensor->rank == 3 &&
               tensor->dtype == (int)plan->dtype && tensor->dims[1 - token_axis] == plan->kv_heads &&
               tensor->dims[2] == plan->dims[part] && *tokens >= 1 &&
               (uint64_t)*tokens <= state->layer->end - state->next;
  if (right) return QKV_OK;
  return qkv_fail(error, QKV_INTERNAL,
                  "the daemon sent other rows than asked for (layer %" PRIu32 ", position %" PRIu64 ")", rows->layer,
                  rows->position);
}

// [kv_heads, tokens, dim] into its place in [kv_heads, all tokens, dim].
static void place_heads(const fetch_state *state, const qkv_client_tensor *tensor, int part) {
  const fetch_plan *plan = state->plan;
  size_t row = (size_t)plan->dims[part] * qkv_dtype_size(plan->dtype);
  size_t all_tokens = state->layer->end - state->layer->begin;
  size_t tokens = (size_t)tensor->dims[1];
  size_t first = state->next - state->layer->begin;
  for (size_t head = 0; head < (size_t)plan->kv_heads; head++) {
    memcpy(state->all[part] + (head * all_tokens + first) * row, (const uint8_t *)tensor->data + head * tokens * row,
           tokens * row);
  }
}

static qkv_status take_part(fetch_state *state, const qkv_client_rows *rows, int part, int64_t *tokens) {
  const qkv_client_tensor *tensor = part == K ? &rows->k : &rows->v;
  QKV_TRY(check_rows(state, rows, part, tokens, &state->error));
  if (state->plan->values->heads_first) {
    place_heads(state, tensor, part);
  } else {
    QKV_TRY(qkvctl_output_write(state->output, 2 * state->index + (size_t)part, tensor->data, tensor->bytes,
                                &state->error));
  }
  qkv_progress_add(&state->progress, tensor->bytes);
  return QKV_OK;
}

static bool take_rows(void *context, const qkv_client_rows *rows) {
  fetch_state *state = context;
  int64_t k_tokens = 0, v_tokens = 0;
  if (qkv_interrupted()) {
    (void)qkv_fail(&state->error, QKV_CANCELLED, "interrupted");
    return false;
  }
  if (take_part(state, rows, K, &k_tokens) != QKV_OK) return false;
  if (take_part(state, rows, V, &v_tokens) != QKV_OK) return false;
  if (k_tokens != v_tokens) {
    (void)qkv_fail(&state->error, QKV_INTERNAL, "the daemon sent %" PRId64 " keys with %" PRId64 " values", k_tokens,
                   v_tokens);
    return false;
  }
  state->next += (uint64_t)k_tokens;
  return true;
}

// Memory for one layer's tensors, or their way to the file once they are full.
static qkv_status gather_begin(fetch_state *state) {
  if (!state->plan->values->heads_first) return QKV_OK;
  for (int part = 0; part < 2; part++) {
    size_t bytes = (state->layer->end - state->layer->begin) * row_bytes(state->plan, part);
    state->all[part] = malloc(bytes);
    if (state->all[part] != NULL) continue;
    return qkv_fail(&state->error, QKV_RESOURCE_EXHAUSTED,
                    "no memory for %zu bytes of layer %" PRIu32 "; fetch without --heads-first, or fewer positions",
                    bytes, state->layer->layer);
  }
  return QKV_OK;
}

static qkv_status gather_end(fetch_state *state, bool keep) {
  qkv_status status = QKV_OK;
  for (int part = 0; part < 2 && state->plan->values->heads_first; part++) {
    size_t bytes = (state->layer->end - state->layer->begin) * row_bytes(state->plan, part);
    if (keep && status == QKV_OK) {
      status =
          qkvctl_output_write(state->output, 2 * state->index + (size_t)part, state->all[part], bytes, &state->error);
    }
    free(state->all[part]);
    state->all[part] = NULL;
  }
  return status;
}

static qkv_status fetch_layer(fetch_state *state) {
  const fetch_plan *plan = state->plan;
  qkv_client_fetch request = {
      .session = plan->session,
      .layers = &state->layer->layer,
      .layer_count = 1,
      .begin = state->layer->begin,
      .end = state->layer->end,
      .dtype = (int)plan->dtype,
      .heads_first = plan->values->heads_first,
      .before_rope = plan->values->before_rope,
  };
  qkv_call_error error = {0};
  state->next = state->layer->begin;
  qkv_status status = gather_begin(state);
  if (status == QKV_OK && qkv_client_fetch_rows(plan->client, &request, take_rows, state, &error) != 0) {
    // Where a row was refused here, that reason stands.
    status = qkv_fail(&state->error, (qkv_status)error.code, "%.200s", error.text);
  }
  if (status == QKV_OK && state->next != state->layer->end) {
    status = qkv_fail(&state->error, QKV_DATA_LOSS,
                      "layer %" PRIu32 " ended at position %" PRIu64 ", it had %" PRIu64
                      "; was the session truncated meanwhile?",
                      state->layer->layer, state->next, state->layer->end);
  }
  qkv_status gathered = gather_end(state, status == QKV_OK);
  return status == QKV_OK ? gathered : status;
}

static int fetch_all(const fetch_plan *plan, bool npy) {
  fetch_state state = {.plan = plan};
  char what[160];
  qkv_interrupt_catch();
  qkv_status status = create_output(plan, npy, &state.output, &state.error);
  if (status != QKV_OK) return qkv_program_failed("%s", state.error.text);
  snprintf(what, sizeof what, "fetching %s", plan->session);
  qkv_progress_start(&state.progress, what, plan->bytes);
  for (; state.index < plan->count && status == QKV_OK; state.index++) {
    state.layer = &plan->layers[state.index];
    status = fetch_layer(&state);
  }
  qkv_progress_end(&state.progress);
  if (status == QKV_OK) status = qkvctl_output_finish(&state.output, &state.error);
  if (status == QKV_OK) return QKV_EXIT_OK;
  qkvctl_output_destroy(&state.output);
  return qkv_program_failed("%s", state.error.text);
}

static int report(const fetch_plan *plan) {
  char bytes[QKV_HUMAN_MAX];
  if (plan->values->program.json) {
    json_t *line =
        json_pack("{s:s, s:s, s:s, s:s, s:I, s:I, s:I}", "session", plan->session, "model", plan->model, "output",
                  plan->values->output, "dtype", qkv_dtype_name(plan->dtype), "layers", (json_int_t)plan->count,
                  "rows", (json_int_t)plan->tokens, "bytes", (json_int_t)plan->bytes);
    return qkv_json_line(line) ? QKV_EXIT_OK : QKV_EXIT_FAILED;
  }
  printf("%s: %" PRIu64 " rows of %zu layers, %s as %s\n", plan->values->output, plan->tokens, plan->count,
         qkv_human_bytes(plan->bytes, bytes), qkv_dtype_name(plan->dtype));
  return QKV_EXIT_OK;
}

// ---- the command ----

static int check_values(const qkvctl_values *values, bool *npy, qkv_dtype *dtype) {
  *npy = strcmp(values->format, "npy") == 0;
  if (values->output == NULL) return qkv_program_misused("fetch needs --output FILE");
  const bool chosen = values->layers != NULL || values->begin != 0 || values->end != 0 || values->dtype != NULL;
  if (values->coded && (*npy || chosen || values->heads_first || values->before_rope))
    return qkv_program_misused("--coded writes all of a session as it is; of the others it goes with --output alone");
  if (!*npy && strcmp(values->format, "safetensors") != 0) {
    return qkv_program_misused("--format is \"%s\", allowed are safetensors and npy", values->format);
  }
  if (values->dtype != NULL && qkv_dtype_parse(values->dtype, dtype) != QKV_OK) {
    return qkv_program_misused("--dtype is \"%s\", allowed are fp32, fp16 and bf16", values->dtype);
  }
  if (*npy && *dtype == QKV_BF16) return qkv_program_misused("NumPy has no bf16; fetch npy as fp32 or fp16");
  if (values->end != 0 && values->end <= values->begin) {
    return qkv_program_misused("--end is %" PRId64 ", it must be above --begin %" PRId64, values->end, values->begin);
  }
  return QKV_EXIT_OK;
}

int qkvctl_fetch(void *values_in, const qkv_option_list *arguments) {
  const qkvctl_values *values = values_in;
  bool npy = false;
  fetch_plan plan = {.values = values, .session = arguments->items[0]};
  int status = check_values(values, &npy, &plan.dtype);
  if (status != QKV_EXIT_OK) return status;
  if (values->coded) return qkvctl_fetch_coded(values, plan.session);
  plan.client = qkvctl_connect(values);
  if (plan.client == NULL) return QKV_EXIT_FAILED;
  status = make_plan(&plan);
  if (status == QKV_EXIT_OK && npy && plan.dtype == QKV_BF16) {
    // The model's own type, and NumPy has none like it.
    plan.dtype = QKV_FP32;
    plan.bytes *= 2;
  }
  if (status == QKV_EXIT_OK) status = fetch_all(&plan, npy);
  if (status == QKV_EXIT_OK) status = report(&plan);
  free(plan.layers);
  qkv_client_close(&plan.client);
  return status;
}
