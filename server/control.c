#include "server/control.h"

#include <assert.h>
#include <stdlib.h>

void *qkvi_control_unpack(qkv_bytes message, const ProtobufCMessageDescriptor *type, qkv_error *error) {
  if (message.length > QKVI_CONTROL_BYTES_MAX) {
    (void)qkv_fail(error, QKV_INVALID_ARGUMENT, "request is %zu bytes, at most %d", message.length,
                   QKVI_CONTROL_BYTES_MAX);
    return NULL;
  }
  uint8_t *flat = malloc(message.length + 1);
  if (flat == NULL) abort();
  qkv_bytes_copy(message, 0, message.length, flat);
  ProtobufCMessage *request = protobuf_c_message_unpack(type, NULL, message.length, flat);
  free(flat);
  if (request == NULL)
    (void)qkv_fail(error, QKV_INVALID_ARGUMENT, "request of %zu bytes is truncated or no %s", message.length,
                   type->name);
  return request;
}

void qkvi_control_free(void *request) {
  protobuf_c_message_free_unpacked(request, NULL);
}

void qkvi_control_reply(qkv_rpc_call *call, const ProtobufCMessage *response) {
  size_t length = protobuf_c_message_get_packed_size(response);
  uint8_t *packed = malloc(length + 1);
  if (packed == NULL) abort();
  size_t written = protobuf_c_message_pack(response, packed);
  assert(written == length);
  qkv_rpc_reply_bytes(call, packed, length);
  free(packed);
}

void qkvi_control_fail(qkv_rpc_call *call, const qkv_error *error) {
  assert(error->status != QKV_OK);
  qkv_rpc_finish(call, error->status, error->text);
}
