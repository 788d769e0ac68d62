#include "proto/parameters.h"

#include <assert.h>
#include <string.h>

enum { FIELD_MAX = 64 };

static const ProtobufCFieldDescriptor *field_of(const ProtobufCMessage *policy, const char *codec) {
  char name[FIELD_MAX] = "";
  for (size_t i = 0; codec[i] != '\0' && i + 1 < sizeof name; i++) name[i] = codec[i] == '-' ? '_' : codec[i];
  const ProtobufCFieldDescriptor *field = protobuf_c_message_descriptor_get_field_by_name(policy->descriptor, name);
  return field != NULL && field->type == PROTOBUF_C_TYPE_MESSAGE ? field : NULL;
}

static ProtobufCMessage **message_of(const ProtobufCMessage *policy, const char *codec) {
  const ProtobufCFieldDescriptor *field = field_of(policy, codec);
  return field == NULL ? NULL : (ProtobufCMessage **)((uintptr_t)policy + field->offset);
}

// Enums and uint32 alike.
static uint32_t *number_of(const ProtobufCMessage *message, const char *name) {
  const ProtobufCFieldDescriptor *field = protobuf_c_message_descriptor_get_field_by_name(message->descriptor, name);
  assert(field != NULL && (field->type == PROTOBUF_C_TYPE_UINT32 || field->type == PROTOBUF_C_TYPE_ENUM));
  return (uint32_t *)((uintptr_t)message + field->offset);
}

bool qkv_parameters_there(const ProtobufCMessage *policy, const char *codec) {
  ProtobufCMessage *const *message = message_of(policy, codec);
  return message != NULL && *message != NULL;
}

uint32_t qkv_parameters_read(const ProtobufCMessage *policy, const char *codec, const char *name) {
  return qkv_parameters_there(policy, codec) ? *number_of(*message_of(policy, codec), name) : 0;
}

void qkv_parameters_write(ProtobufCMessage *policy, const char *codec, const char *name, uint32_t value,
                          void *memory) {
  ProtobufCMessage **message = message_of(policy, codec);
  assert(message != NULL);
  if (*message == NULL) {
    const ProtobufCMessageDescriptor *descriptor = field_of(policy, codec)->descriptor;
    assert(descriptor->sizeof_message <= QKV_PARAMETERS_MESSAGE_MAX);
    protobuf_c_message_init(descriptor, memory);
    *message = memory;
  }
  *number_of(*message, name) = value;
}
