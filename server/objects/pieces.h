// PutObjectsRequest: pieces of objects, read where they lie in the message.
#ifndef QKV_SERVER_OBJECTS_PIECES_H
#define QKV_SERVER_OBJECTS_PIECES_H

#include "engine/base/bytes.h"
#include "engine/base/status.h"
#include "qkv/v1/objects.pb-c.h"

typedef struct qkvi_put_piece {
  const Qkv__V1__ObjectInfo *begin;  // of the object that begins; NULL: none does
  bool replace;
  qkv_bytes data;
} qkvi_put_piece;

// Calls fn for each piece of the message, in order, until one fails. Arguments of fn are valid during its call.
// Errors name the piece. INVALID_ARGUMENT: the message is malformed.
qkv_status qkvi_put_pieces_read(qkv_bytes message,
                                qkv_status (*fn)(void *context, const qkvi_put_piece *piece, qkv_error *error),
                                void *context, qkv_error *error);

#endif
