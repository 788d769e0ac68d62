// --calibration, and GetCalibration.
#include "server/calibrations.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "qkv/v1/kv_cache.pb-c.h"
#include "server/auth/identity.h"
#include "server/daemon.h"
#include "server/handlers/control.h"
#include "server/handlers/handlers.h"

// ---- Files ----

typedef struct named_calibration {
  char model[QKV_NAME_MAX + 1];
  const qkv_calibration *calibration;
} named_calibration;

struct qkvi_calibrations {
  size_t count;
  named_calibration rows[];
};

static const named_calibration *find(const qkvi_calibrations *calibrations, const char *model) {
  for (size_t i = 0; i < calibrations->count; i++) {
    if (strcmp(calibrations->rows[i].model, model) == 0) return &calibrations->rows[i];
  }
  return NULL;
}

static qkv_status read_bytes(FILE *file, uint8_t **bytes, size_t *size, qkv_error *error) {
  struct stat info;
  if (fstat(fileno(file), &info) != 0) return qkv_fail(error, QKV_UNAVAILABLE, "%s", strerror(errno));
  if (!S_ISREG(info.st_mode)) return qkv_fail(error, QKV_INVALID_ARGUMENT, "it is no ordinary file");
  if ((uint64_t)info.st_size > QKV_CALIBRATION_BYTES_MAX) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "it has more than %zu bytes", QKV_CALIBRATION_BYTES_MAX);
  }
  *size = (size_t)info.st_size;
  *bytes = malloc(*size + 1);
  if (*bytes == NULL) abort();
  if (fread(*bytes, 1, *size, file) == *size) return QKV_OK;
  return qkv_fail(error, QKV_UNAVAILABLE, "it cannot be read in full");
}

static qkv_status read_file(const char *path, const qkv_calibration **calibration, qkv_error *error) {
  uint8_t *bytes = NULL;
  size_t size = 0;
  FILE *file = fopen(path, "rbe");
  if (file == NULL) return qkv_fail(error, QKV_NOT_FOUND, "%s", strerror(errno));
  qkv_calibration *read = NULL;
  qkv_status status = read_bytes(file, &bytes, &size, error);
  if (status == QKV_OK) status = qkv_calibration_read(bytes, size, &read, error);
  *calibration = read;
  free(bytes);
  fclose(file);
  return status;
}

// "MODEL=FILE". Model names have no '='.
static qkv_status load(qkvi_calibrations *into, const char *option, qkv_error *error) {
  named_calibration *row = &into->rows[into->count];
  const char *separator = strchr(option, '=');
  const size_t length = separator != NULL ? (size_t)(separator - option) : 0;
  if (length == 0 || length > QKV_NAME_MAX || separator[1] == '\0') {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "--calibration is %s, expected MODEL=FILE", option);
  }
  memcpy(row->model, option, length);
  row->model[length] = '\0';
  if (qkv_name_check(row->model, "model", error) != QKV_OK) return qkv_error_prefix(error, "--calibration: ");
  if (find(into, row->model) != NULL) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "--calibration names the model %s twice", row->model);
  }
  if (read_file(separator + 1, &row->calibration, error) != QKV_OK) {
    return qkv_error_prefix(error, "--calibration %s: ", option);
  }
  into->count++;
  return QKV_OK;
}

qkv_status qkvi_calibrations_load(const qkv_option_list *options, qkvi_calibrations **out, qkv_error *error) {
  qkvi_calibrations *calibrations = calloc(1, sizeof *calibrations + options->count * sizeof *calibrations->rows);
  if (calibrations == NULL) abort();
  qkv_status status = QKV_OK;
  for (size_t i = 0; status == QKV_OK && i < options->count; i++)
    status = load(calibrations, options->items[i], error);
  if (status != QKV_OK) qkvi_calibrations_destroy(&calibrations);
  *out = calibrations;
  return status;
}

void qkvi_calibrations_destroy(qkvi_calibrations **calibrations) {
  qkvi_calibrations *old = *calibrations;
  if (old == NULL) return;
  *calibrations = NULL;
  for (size_t i = 0; i < old->count; i++) qkv_calibration_unref(&old->rows[i].calibration);
  free(old);
}

const qkv_calibration *qkvi_calibrations_get(const qkvi_calibrations *calibrations, const char *model) {
  const named_calibration *row = find(calibrations, model);
  return row == NULL ? NULL : qkv_calibration_ref(row->calibration);
}

// ---- GetCalibration ----

enum { CHUNK_BYTES = 1 << 20 };

// A calibration that is being sent. Parts that gRPC has not sent hold references of their own.
typedef struct calibration_stream {
  const qkv_calibration *calibration;
  size_t sent;
  qkv_wire_writer *writer;
} calibration_stream;

static void release(void *owner) {
  const qkv_calibration *calibration = owner;
  qkv_calibration_unref(&calibration);
}

static void send_next(qkv_rpc_call *call) {
  calibration_stream *stream = qkv_rpc_state(call);
  size_t size;
  const uint8_t *bytes = qkv_calibration_bytes(stream->calibration, &size);
  const size_t chunk = size - stream->sent < CHUNK_BYTES ? size - stream->sent : CHUNK_BYTES;
  qkv_wire_writer_clear(stream->writer);
  void *owner = (void *)(uintptr_t)qkv_calibration_ref(stream->calibration);
  qkv_wire_put_reference(stream->writer, 1, bytes + stream->sent, chunk, owner);
  stream->sent += chunk;
  (stream->sent == size ? qkv_rpc_reply : qkv_rpc_send)(call, stream->writer, release);
}

static void destroy_stream(void *state) {
  calibration_stream *stream = state;
  if (stream == NULL) return;
  qkv_calibration_unref(&stream->calibration);
  qkv_wire_writer_destroy(&stream->writer);
  free(stream);
}

static qkv_status find_version(qkv_daemon *daemon, const qkv_model *model, uint32_t version,
                               const qkv_calibration **calibration, qkv_error *error) {
  *calibration = qkvi_kept_find(daemon->kept, model, version);
  if (*calibration != NULL) return QKV_OK;
  return qkv_fail(error, QKV_NOT_FOUND,
                  "the model %s has no calibration of version %" PRIu32 ", no session has pages of it", model->name,
                  version);
}

static qkv_status find_calibration(const qkv_rpc_call *call, const Qkv__V1__GetCalibrationRequest *request,
                                   const qkv_calibration **calibration, qkv_error *error) {
  qkv_daemon *daemon = qkv_rpc_context(call);
  const qkv_model *model = NULL;
  const char *name = request->model;
  QKV_TRY(qkv_name_check(name, "model", error));
  QKV_TRY(qkv_store_model(daemon->store, qkvi_call_tenant(call), name, &model, error));
  if (request->version != 0) return find_version(daemon, model, request->version, calibration, error);
  *calibration = model->learner != NULL ? qkv_learner_on_trial(model->learner) : NULL;
  if (*calibration == NULL) *calibration = qkv_calibration_slot_get(model->calibration);
  if (*calibration != NULL) return QKV_OK;
  return qkv_fail(error, QKV_NOT_FOUND,
                  "the model %s has no calibration, none was given and none has been learnt yet", name);
}

static void on_get_calibration(qkv_rpc_call *call, qkv_bytes message) {
  qkv_error error = {0};
  const qkv_calibration *calibration = NULL;
  Qkv__V1__GetCalibrationRequest *request =
      qkvi_control_unpack_here(message, &qkv__v1__get_calibration_request__descriptor, &error);
  if (request == NULL) return qkvi_control_fail(call, &error);
  const qkv_status status = find_calibration(call, request, &calibration, &error);
  qkvi_control_free(request);
  if (status != QKV_OK) return qkvi_control_fail(call, &error);
  calibration_stream *stream = calloc(1, sizeof *stream);
  if (stream == NULL) abort();
  *stream = (calibration_stream){.calibration = calibration, .writer = qkv_wire_writer_create()};
  qkv_rpc_set_state(call, stream);
  send_next(call);
}

const qkv_rpc_method qkvi_calibration_methods[] = {{.path = "/qkv.v1.KvCache/GetCalibration",
                                                    .message = on_get_calibration,
                                                    .sent = send_next,
                                                    .destroy = destroy_stream},
                                                   {0}};
