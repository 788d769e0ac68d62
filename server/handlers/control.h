// Small messages, the ones without tensors: through protobuf-c.
//
// Threads: any, like the call they belong to.
#ifndef QKV_SERVER_HANDLERS_CONTROL_H
#define QKV_SERVER_HANDLERS_CONTROL_H

#include <protobuf-c/protobuf-c.h>

#include "engine/base/bytes.h"
#include "engine/base/name.h"
#include "server/rpc/rpc.h"

#define QKVI_CONTROL_BYTES_MAX 1048576  // of a request without tensors
#define QKVI_CONTROL_FIELDS_MAX 65536   // of any request, known or not, without packed ids
// Of a request that is unpacked by the thread that reads all of them, which takes 0.1 us for a field: up to 1024
// layers.
#define QKVI_HERE_BYTES_MAX 16384
#define QKVI_HERE_FIELDS_MAX 2048
#define QKVI_SOON_BYTES_MAX 1024  // of one that could be unpacked elsewhere, too, or that everybody may send
#define QKVI_NAMES_MAX 16384      // sessions, or objects, that a lookup names
// Of such a lookup: as many of the longest names, each with its tag and its length, and the other fields.
#define QKVI_NAMES_BYTES_MAX (QKVI_NAMES_MAX * (QKV_NAME_MAX + 3) + 4096)

// The unpacked request, which the caller frees with qkvi_control_free. NULL, with *error filled, where it is too
// large (QKVI_CONTROL_BYTES_MAX, or QKVI_NAMES_BYTES_MAX with a list of names), not a message of this type, or has a
// NUL inside a string: INVALID_ARGUMENT, "request is 2000000 bytes, at most 1048576". For jobs.
void *qkvi_control_unpack(qkv_bytes message, const ProtobufCMessageDescriptor *type, qkv_error *error);
// The same for handlers, of requests that need no more than QKVI_HERE_BYTES_MAX and QKVI_HERE_FIELDS_MAX.
void *qkvi_control_unpack_here(qkv_bytes message, const ProtobufCMessageDescriptor *type, qkv_error *error);
// The same for messages that carry a file or packed ids: their bytes come on top, as large as the server takes
// messages. A caller that expects ids checks their number first.
void *qkvi_control_unpack_large(qkv_bytes message, const ProtobufCMessageDescriptor *type, qkv_error *error);
void qkvi_control_free(void *request);

// Answers with `response` and ends the call with OK.
void qkvi_control_reply(qkv_rpc_call *call, const ProtobufCMessage *response);
// Likewise, for calls that change nothing and whose answers may be large. One of 16 KiB or more counts for
// limit-response-bytes until it has been sent; where that is exceeded the call ends with RESOURCE_EXHAUSTED. Smaller
// ones are bounded by the number of calls.
void qkvi_control_reply_counted(qkv_rpc_call *call, const ProtobufCMessage *response);

// Ends the call with the error's status and text.
void qkvi_control_fail(qkv_rpc_call *call, const qkv_error *error);

#endif
