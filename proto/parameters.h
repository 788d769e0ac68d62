// The parameters of codecs in a CodecPolicy: a codec's message is the policy's field of the codec's name (with _ for
// -), and has a field of 32 bits for each parameter. So a new codec's message is read and written without code of its
// own.
//
// Threads: pure functions.
#ifndef QKV_PROTO_PARAMETERS_H
#define QKV_PROTO_PARAMETERS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <protobuf-c/protobuf-c.h>

#define QKV_PARAMETERS_MESSAGE_MAX 64  // bytes of the largest of these messages in memory

// Whether `policy` has a message for the codec.
bool qkv_parameters_there(const ProtobufCMessage *policy, const char *codec);
// A parameter of the policy; 0 where it is not set.
uint32_t qkv_parameters_read(const ProtobufCMessage *policy, const char *codec, const char *name);
// Sets it, in a message that is made in `memory` (of QKV_PARAMETERS_MESSAGE_MAX bytes, aligned) where the policy has
// none for the codec yet.
void qkv_parameters_write(ProtobufCMessage *policy, const char *codec, const char *name, uint32_t value,
                          void *memory);

#endif
