// PutObjectsRequest: pieces of objects, read where they lie in the message.
#ifndef QKV_SERVER_OBJECTS_PIECES_H
#define QKV_SERVER_OBJECTS_PIECES_H

#include "engine/base/bytes.h"
#include "engine/base/status.h"
#include "proto/wire.h"
#include "qkv/v1/objects.pb-c.h"

typedef struct qkvi_put_piece {
  const Qkv__V1__ObjectInfo *begin;  // of the object that begins; NULL: none does
  bool replace;
  qkv_bytes data;
} qkvi_put_piece;

// The pieces of a message, read one after the other.
typedef struct qkvi_put_pieces {
  qkv_wire_reader reader;
  size_t index;  // of the next one
} qkvi_put_pieces;

// The message stays where it is until its last piece has been read.
void qkvi_put_pieces_init(qkvi_put_pieces *pieces, qkv_bytes message);
// Calls fn for the next piece, whose arguments are valid during the call. `*more` false: there is none. An error,
// that of fn too, names the piece and ends the message. INVALID_ARGUMENT: the message is malformed.
qkv_status qkvi_put_pieces_next(qkvi_put_pieces *pieces,
                                qkv_status (*fn)(void *context, const qkvi_put_piece *piece, qkv_error *error),
                                void *context, bool *more, qkv_error *error);

#endif
