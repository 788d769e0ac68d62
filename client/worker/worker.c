#include "client/worker/worker.h"

#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "client/worker/remote.h"

#define FILE_BYTES_MAX (INT64_C(1) << 30)

static volatile sig_atomic_t interrupted;

static void on_signal(int signal) {
  (void)signal;
  interrupted = 1;
}

bool qkvi_worker_interrupted(void) {
  return interrupted != 0;
}

qkv_status qkvi_worker_setup(const qkvi_worker *worker, qkvi_lm **lm, qkv_client **client, qkv_error *error) {
  *client = NULL;
  QKV_TRY(qkvi_lm_load(worker->model, lm, error));
  const qkv_client_options options = {.timeout_ms = worker->program.timeout_ms};
  qkv_call_error call = {0};
  if (qkv_client_connect(worker->program.target, &options, client, &call) != 0) {
    qkvi_lm_free(lm);
    return qkvi_remote_failed(&call, error);
  }
  // A second signal ends the program at once.
  const struct sigaction action = {.sa_handler = on_signal, .sa_flags = (int)SA_RESETHAND};
  sigaction(SIGINT, &action, NULL);
  sigaction(SIGTERM, &action, NULL);
  return QKV_OK;
}

void qkvi_worker_teardown(qkvi_lm **lm, qkv_client **client) {
  qkv_client_close(client);
  qkvi_lm_free(lm);
}

static qkv_status read_all(FILE *file, const char *path, uint8_t **data, int64_t *bytes, qkv_error *error) {
  struct stat info;
  if (fstat(fileno(file), &info) != 0 || !S_ISREG(info.st_mode) || info.st_size > FILE_BYTES_MAX) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s is no file of at most %" PRId64 " bytes", path, FILE_BYTES_MAX);
  }
  *bytes = info.st_size;
  *data = malloc((size_t)*bytes + 1);
  if (*data == NULL) abort();
  if (fread(*data, 1, (size_t)*bytes, file) == (size_t)*bytes) return QKV_OK;
  free(*data);
  *data = NULL;
  return qkv_fail(error, QKV_UNAVAILABLE, "%s: %s", path, ferror(file) ? strerror(errno) : "it has become shorter");
}

qkv_status qkvi_worker_read(const char *path, uint8_t **data, int64_t *bytes, qkv_error *error) {
  *data = NULL;
  FILE *file = fopen(path, "rb");
  if (file == NULL) return qkv_fail(error, QKV_NOT_FOUND, "%s: %s", path, strerror(errno));
  qkv_status status = read_all(file, path, data, bytes, error);
  fclose(file);
  return status;
}
