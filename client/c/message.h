// A unary call with protobuf-c messages, for everything that carries no tensors. Part of libqkv's inside and of
// programs that link it statically (qkvctl); the header that is installed is qkv.h alone.
#ifndef QKV_CLIENT_C_MESSAGE_H
#define QKV_CLIENT_C_MESSAGE_H

#include <protobuf-c/protobuf-c.h>

#include "client/c/qkv.h"

// Sends `request` and unpacks the answer as `kind` into *answer, which the caller frees with
// protobuf_c_message_free_unpacked(*answer, NULL). INTERNAL where the answer does not unpack. A request with a field
// `session` goes to that session's daemon, where there are several.
qkv_code qkv_client_call_message(qkv_client *client, const char *method, const ProtobufCMessage *request,
                                 const ProtobufCMessageDescriptor *kind, ProtobufCMessage **answer,
                                 qkv_call_error *error);

#endif
