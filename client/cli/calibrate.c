// qkvctl calibrate: what the daemon has learnt of a model, as a file.
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/cli/cli.h"
#include "client/common/file.h"
#include "client/common/terminal.h"

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

int qkvctl_calibrate(void *values, const qkv_option_list *arguments) {
  const qkvctl_values *options = values;
  if (options->output == NULL) return qkv_program_misused("calibrate needs --output FILE");
  qkv_client *client = qkvctl_connect(options);
  if (client == NULL) return QKV_EXIT_FAILED;
  const int exit_status = save(options, client, arguments->items[0]);
  qkv_client_close(&client);
  return exit_status;
}
