#include "server/handlers/control.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "proto/wire.h"
#include "server/daemon.h"
#include "server/handlers/block.h"

// Bytes that a message may have, and those of them that are left, and fields.
typedef struct bytes_left {
  size_t most, now, fields_most, fields;
} bytes_left;

// Subtracts the cost of a field.
static qkv_status spend(size_t bytes, bytes_left *left, qkv_error *error) {
  if (left->fields-- == 0)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "request has more than %zu fields", left->fields_most);
  if (bytes > left->now)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "request has more than %zu bytes without those of files",
                    left->most);
  left->now -= bytes;
  return QKV_OK;
}

// A list of strings has names, and place for the longest ones.
static size_t bytes_max(const ProtobufCMessageDescriptor *type) {
  for (unsigned i = 0; i < type->n_fields; i++) {
    const ProtobufCFieldDescriptor *field = &type->fields[i];
    if (field->label == PROTOBUF_C_LABEL_REPEATED && field->type == PROTOBUF_C_TYPE_STRING)
      return QKVI_NAMES_BYTES_MAX;
  }
  return QKVI_CONTROL_BYTES_MAX;
}

// Unpacked, packed ids take at most four times their bytes; the callers limit them.
static bool is_ids(const ProtobufCFieldDescriptor *field) {
  return field->label == PROTOBUF_C_LABEL_REPEATED && field->type == PROTOBUF_C_TYPE_UINT32;
}

// Handlers get strings as C strings, which end at the first NUL: a name with one inside would be taken for another
// name. A field of two bytes takes a hundred when it is unpacked. So everything has a limit except the contents of
// `bytes` fields, which are files, and of packed ids. No message of the contract is recursive, so the depth is the
// contract's.
static qkv_status check(qkv_bytes message, const ProtobufCMessageDescriptor *type, bytes_left *left,
                        qkv_error *error) {
  qkv_wire_reader reader;
  qkv_wire_field field;
  bool more = true;
  qkv_wire_reader_init(&reader, message);
  for (;;) {
    const size_t before = reader.rest.length;
    QKV_TRY(qkv_wire_next(&reader, &field, &more, error));
    if (!more) return QKV_OK;
    const ProtobufCFieldDescriptor *known = protobuf_c_message_descriptor_get_field(type, field.number);
    const bool has_bytes = known != NULL && field.type == QKV_WIRE_BYTES && field.bytes.length > 0;
    const bool counted = !has_bytes || (known->type != PROTOBUF_C_TYPE_MESSAGE &&
                                        known->type != PROTOBUF_C_TYPE_BYTES && !is_ids(known));
    QKV_TRY(spend(before - reader.rest.length - (counted ? 0 : field.bytes.length), left, error));
    if (!has_bytes) continue;
    if (known->type == PROTOBUF_C_TYPE_MESSAGE) {
      QKV_TRY(check(field.bytes, known->descriptor, left, error));
    } else if (known->type == PROTOBUF_C_TYPE_STRING) {
      const uint8_t *text = qkv_bytes_contiguous(field.bytes, 0, field.bytes.length);
      if (memchr(text, '\0', field.bytes.length) != NULL)
        return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s holds a NUL byte", known->name);
    }
  }
}

// The message as one contiguous buffer. Where the two readers of the wire format disagree, the stricter one wins.
static void *unpack(const uint8_t *flat, size_t length, const ProtobufCMessageDescriptor *type, size_t fields,
                    qkv_error *error) {
  const qkv_segment segment = {.data = flat, .length = length};
  bytes_left left = {.most = bytes_max(type), .now = bytes_max(type), .fields_most = fields, .fields = fields};
  if (check(qkv_bytes_of(&segment), type, &left, error) != QKV_OK) return NULL;
  ProtobufCMessage *request = protobuf_c_message_unpack(type, NULL, length, flat);
  if (request == NULL)
    (void)qkv_fail(error, QKV_INVALID_ARGUMENT, "request of %zu bytes is truncated or no %s", length, type->name);
  return request;
}

static void *unpack_within(size_t bytes, size_t fields, qkv_bytes message, const ProtobufCMessageDescriptor *type,
                           qkv_error *error) {
  if (message.length > bytes) {
    (void)qkv_fail(error, QKV_INVALID_ARGUMENT, "request is %zu bytes, at most %zu", message.length, bytes);
    return NULL;
  }
  uint8_t *flat = malloc(message.length + 1);
  if (flat == NULL) abort();
  qkv_bytes_copy(message, 0, message.length, flat);
  void *request = unpack(flat, message.length, type, fields, error);
  free(flat);
  return request;
}

void *qkvi_control_unpack(qkv_bytes message, const ProtobufCMessageDescriptor *type, qkv_error *error) {
  return unpack_within(bytes_max(type), QKVI_CONTROL_FIELDS_MAX, message, type, error);
}

void *qkvi_control_unpack_here(qkv_bytes message, const ProtobufCMessageDescriptor *type, qkv_error *error) {
  return unpack_within(QKVI_HERE_BYTES_MAX, QKVI_HERE_FIELDS_MAX, message, type, error);
}

void *qkvi_control_unpack_large(qkv_bytes message, const ProtobufCMessageDescriptor *type, qkv_error *error) {
  return unpack_within(SIZE_MAX, QKVI_CONTROL_FIELDS_MAX, message, type, error);
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

void qkvi_control_reply_counted(qkv_rpc_call *call, const ProtobufCMessage *response) {
  enum { COUNTED_BYTES = 16 * 1024 };
  const size_t length = protobuf_c_message_get_packed_size(response);
  if (length < COUNTED_BYTES) return qkvi_control_reply(call, response);
  const qkv_daemon *daemon = qkv_rpc_context(call);
  qkvi_response_block *block = NULL;
  qkv_error error = {0};
  if (qkvi_block_create(call, length, (uint64_t)daemon->options->limit_response_bytes, &block, &error) != QKV_OK)
    return qkvi_control_fail(call, &error);
  const size_t written = protobuf_c_message_pack(response, block->data);
  assert(written == length);
  (void)written;
  const qkv_wire_piece piece = {.data = block->data, .length = length, .reference = true, .owner = block};
  qkv_rpc_reply_reference(call, &piece, qkvi_block_release);
}

void qkvi_control_fail(qkv_rpc_call *call, const qkv_error *error) {
  assert(error->status != QKV_OK);
  qkv_rpc_finish(call, error->status, error->text);
}
