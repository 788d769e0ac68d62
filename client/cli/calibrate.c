// qkvctl calibrate: what the daemon has learnt of a model, as a file; or what a file of its rows tells.
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/cli/cli.h"
#include "client/common/file.h"
#include "client/common/terminal.h"
#include "qkv/v1/kv_cache.pb-c.h"

// What has arrived.
typedef struct calibration_bytes {
  uint8_t *data;
  size_t size, capacity;
  qkv_progress progress;
} calibration_bytes;

static bool take(void *context, const void *data, size_t bytes) {
  calibration_bytes *arrived = context;
  if (bytes > arrived->capacity - arrived->size) {
    arrived->capacity = 2 * (arrived->capacity + bytes);
    arrived->data = realloc(arrived->data, arrived->capacity);
    if (arrived->data == NULL) abort();
  }
  memcpy(arrived->data + arrived->size, data, bytes);
  arrived->size += bytes;
  qkv_progress_add(&arrived->progress, bytes);
  return true;
}

static int show(const qkvctl_values *values, const char *model, size_t size) {
  char human[QKV_HUMAN_MAX];
  if (!values->program.json) {
    printf("%s: the calibration of %s, %s\n", values->output, model, qkv_human_bytes(size, human));
    return fflush(stdout) == 0 ? QKV_EXIT_OK : QKV_EXIT_FAILED;
  }
  json_t *line = json_pack("{s:s, s:s, s:I}", "output", values->output, "model", model, "bytes", (json_int_t)size);
  return qkv_json_line(line) ? QKV_EXIT_OK : QKV_EXIT_FAILED;
}

static int save(const qkvctl_values *values, qkv_client *client, const char *model) {
  calibration_bytes arrived = {0};
  qkv_call_error call = {0};
  qkv_error error = {0};
  qkv_progress_start(&arrived.progress, model, 0);
  const qkv_code code = qkv_client_get_calibration(client, model, take, &arrived, &call);
  qkv_progress_end(&arrived.progress);
  int exit_status = QKV_EXIT_OK;
  if (code != 0) {
    exit_status = qkv_program_failed("%s", call.text);
  } else if (qkv_file_write(values->output, arrived.data, arrived.size, &error) != QKV_OK) {
    exit_status = qkv_program_failed("%s", error.text);
  } else {
    exit_status = show(values, model, arrived.size);
  }
  free(arrived.data);
  return exit_status;
}

// ---- From a file ----

static int show_learnt(const qkvctl_values *values, const char *model, const qkv_calibration *calibration,
                       size_t size) {
  char human[QKV_HUMAN_MAX];
  const uint64_t tokens = qkv_calibration_tokens(calibration);
  const uint32_t version = qkv_calibration_version(calibration);
  if (values->program.json) {
    json_t *line = json_pack("{s:s, s:s, s:I, s:I, s:I}", "output", values->output, "model", model, "bytes",
                             (json_int_t)size, "version", (json_int_t)version, "tokens", (json_int_t)tokens);
    return qkv_json_line(line) ? QKV_EXIT_OK : QKV_EXIT_FAILED;
  }
  printf("%s: calibration %08" PRIx32 " of %s, from %" PRIu64 " tokens, %s\n", values->output, version, model, tokens,
         qkv_human_bytes(size, human));
  return fflush(stdout) == 0 ? QKV_EXIT_OK : QKV_EXIT_FAILED;
}

static int learn(const qkvctl_values *values, const Qkv__V1__Model *model) {
  qkv_calibration *calibration = NULL;
  qkv_error error = {0};
  size_t size;
  if (qkvctl_learn(values->from, model, &calibration, &error) != QKV_OK) return qkv_program_failed("%s", error.text);
  const void *bytes = qkv_calibration_bytes(calibration, &size);
  const int exit_status = qkv_file_write(values->output, bytes, size, &error) != QKV_OK
                              ? qkv_program_failed("%s", error.text)
                              : show_learnt(values, model->name, calibration, size);
  const qkv_calibration *reference = calibration;
  qkv_calibration_unref(&reference);
  return exit_status;
}

// The daemon knows the model's geometry and its RoPE.
static int save_learnt(const qkvctl_values *values, qkv_client *client, const char *model) {
  Qkv__V1__GetModelRequest request = QKV__V1__GET_MODEL_REQUEST__INIT;
  ProtobufCMessage *answer = NULL;
  qkv_call_error error = {0};
  request.name = (char *)(uintptr_t)model;  // protobuf-c wants no const
  if (qkv_client_call_message(client, "/qkv.v1.KvCache/GetModel", &request.base,
                              &qkv__v1__get_model_response__descriptor, &answer, &error) != 0)
    return qkv_program_failed("%s", error.text);
  const Qkv__V1__GetModelResponse *response = (const Qkv__V1__GetModelResponse *)answer;
  const int exit_status = response->model != NULL ? learn(values, response->model)
                                                  : qkv_program_failed("the daemon's answer has no model");
  protobuf_c_message_free_unpacked(answer, NULL);
  return exit_status;
}

int qkvctl_calibrate(void *values, const qkv_option_list *arguments) {
  const qkvctl_values *options = values;
  if (options->output == NULL) return qkv_program_misused("calibrate needs --output FILE");
  qkv_client *client = qkvctl_connect(options);
  if (client == NULL) return QKV_EXIT_FAILED;
  const int exit_status = (options->from != NULL ? save_learnt : save)(options, client, arguments->items[0]);
  qkv_client_close(&client);
  return exit_status;
}
