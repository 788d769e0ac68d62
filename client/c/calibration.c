// GetCalibration: a model's calibration file, chunk by chunk.
#include <grpc/byte_buffer.h>

#include "client/c/place.h"

enum { REQUEST_MODEL = 1, REQUEST_VERSION = 2, RESPONSE_CHUNK = 1 };

static const char method[] = "/qkv.v1.KvCache/GetCalibration";

typedef struct receiver {
  bool (*fn)(void *context, const void *data, size_t bytes);
  void *context;
} receiver;

// Gives the chunk to the receiver, piece by piece, as it has arrived.
static bool deliver(qkv_client *client, const grpc_byte_buffer *response, void *context, qkv_error *reason) {
  const receiver *to = context;
  qkv_wire_reader reader;
  qkv_wire_field field;
  bool more = true;
  qkv_wire_reader_init(&reader, qkvi_view(client, response));
  for (;;) {
    if (qkv_wire_next(&reader, &field, &more, reason) != QKV_OK) return false;
    if (!more) return true;
    if (field.number != RESPONSE_CHUNK || field.type != QKV_WIRE_BYTES) continue;
    for (qkv_bytes left = field.bytes; left.length > 0;) {
      const size_t here = left.segments[0].length - left.offset;
      const size_t run = here < left.length ? here : left.length;
      if (!to->fn(to->context, left.segments[0].data + left.offset, run)) return false;
      left = qkv_bytes_slice(left, run, left.length - run);
    }
  }
}

qkv_code qkv_client_get_calibration_version(qkv_client *client, const char *model, uint32_t version,
                                            bool (*fn)(void *context, const void *data, size_t bytes), void *context,
                                            qkv_call_error *error) {
  if (model == NULL) return qkvi_fail(error, QKV_INVALID_ARGUMENT, "model is NULL");
  const qkv_code routed = qkvi_route(&client, NULL, error);
  if (routed != QKV_OK) return routed;
  qkv_wire_put_string(qkvi_begin_request(client), REQUEST_MODEL, model);
  qkv_wire_put_varint(client->writer, REQUEST_VERSION, version);
  return qkvi_read_stream(client, method, qkvi_request(client), deliver, &(receiver){fn, context}, error);
}

qkv_code qkv_client_get_calibration(qkv_client *client, const char *model,
                                    bool (*fn)(void *context, const void *data, size_t bytes), void *context,
                                    qkv_call_error *error) {
  return qkv_client_get_calibration_version(client, model, 0, fn, context, error);
}
