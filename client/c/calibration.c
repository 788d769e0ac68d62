// GetCalibration: a model's calibration file, chunk by chunk.
#include <grpc/byte_buffer.h>

#include "client/c/client.h"

enum { REQUEST_MODEL = 1, RESPONSE_CHUNK = 1 };

static const char method[] = "/qkv.v1.KvCache/GetCalibration";

// Gives the chunk to fn, piece by piece, as it has arrived; false where fn wants no more.
static qkv_status deliver(qkv_client *client, const grpc_byte_buffer *response,
                          bool (*fn)(void *context, const void *data, size_t bytes), void *context, bool *go_on,
                          qkv_error *error) {
  qkv_wire_reader reader;
  qkv_wire_field field;
  bool more = true;
  qkv_wire_reader_init(&reader, qkvi_view(client, response));
  while (*go_on) {
    QKV_TRY(qkv_wire_next(&reader, &field, &more, error));
    if (!more) break;
    if (field.number != RESPONSE_CHUNK || field.type != QKV_WIRE_BYTES) continue;
    for (qkv_bytes left = field.bytes; *go_on && left.length > 0;) {
      const size_t here = left.segments[0].length - left.offset;
      const size_t run = here < left.length ? here : left.length;
      *go_on = fn(context, left.segments[0].data + left.offset, run);
      left = qkv_bytes_slice(left, run, left.length - run);
    }
  }
  return QKV_OK;
}

qkv_code qkv_client_get_calibration(qkv_client *client, const char *model,
                                    bool (*fn)(void *context, const void *data, size_t bytes), void *context,
                                    qkv_call_error *error) {
  qkvi_call call;
  qkv_call_error outcome = {0};
  qkv_error reason = {0};
  bool go_on = true;
  if (model == NULL) return qkvi_fail(error, QKV_INVALID_ARGUMENT, "model is NULL");
  const qkv_code code = qkvi_call_open(client, method, true, &call, error);
  if (code != QKV_OK) return code;
  qkv_wire_put_string(qkvi_begin_request(client), REQUEST_MODEL, model);
  qkvi_step step = {.request = qkvi_request(client), .last = true};
  while (go_on && reason.status == QKV_OK) {
    grpc_byte_buffer *response = NULL;
    step.response = &response;
    qkvi_call_run(&call, &step);
    step = (qkvi_step){0};
    if (response == NULL) break;
    (void)deliver(client, response, fn, context, &go_on, &reason);
    grpc_byte_buffer_destroy(response);
  }
  if (go_on && reason.status == QKV_OK) qkvi_call_run(&call, &(qkvi_step){.outcome = &outcome});
  qkvi_call_close(&call);
  if (!go_on) return qkvi_fail(error, QKV_CANCELLED, "cancelled by the caller");
  if (reason.status != QKV_OK) return qkvi_malformed(error, method, &reason);
  if (error != NULL) *error = outcome;
  return outcome.code;
}
