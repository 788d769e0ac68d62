#include "server/objects/pieces.h"

#include "server/handlers/control.h"

// Field numbers of qkv/v1/objects.proto.
enum { REQUEST_PIECES = 1 };
enum { PIECE_BEGIN = 1, PIECE_REPLACE = 2, PIECE_DATA = 15 };

// `begins`: the message in field `begin`; of several the last one counts.
static qkv_status read_piece(qkv_bytes message, qkvi_put_piece *piece, qkv_bytes *begin, bool *begins,
                             qkv_error *error) {
  qkv_wire_reader reader;
  qkv_wire_field field;
  bool more = true;
  qkv_wire_reader_init(&reader, message);
  for (;;) {
    QKV_TRY(qkv_wire_next(&reader, &field, &more, error));
    if (!more) return QKV_OK;
    if (field.number == PIECE_REPLACE && field.type == QKV_WIRE_VARINT) piece->replace = field.value != 0;
    if (field.type != QKV_WIRE_BYTES) continue;
    if (field.number == PIECE_DATA) piece->data = field.bytes;
    if (field.number != PIECE_BEGIN) continue;
    *begin = field.bytes;
    *begins = true;
  }
}

typedef qkv_status (*piece_fn)(void *context, const qkvi_put_piece *piece, qkv_error *error);

static qkv_status give_piece(qkv_bytes message, piece_fn fn, void *context, qkv_error *error) {
  qkvi_put_piece piece = {0};
  qkv_bytes begin = {0};
  bool begins = false;
  QKV_TRY(read_piece(message, &piece, &begin, &begins, error));
  if (!begins) return fn(context, &piece, error);
  Qkv__V1__ObjectInfo *info = qkvi_control_unpack(begin, &qkv__v1__object_info__descriptor, error);
  if (info == NULL) return qkv_error_prefix(error, "begin: ");
  piece.begin = info;
  const qkv_status status = fn(context, &piece, error);
  qkvi_control_free(info);
  return status;
}

void qkvi_put_pieces_init(qkvi_put_pieces *pieces, qkv_bytes message) {
  pieces->index = 0;
  qkv_wire_reader_init(&pieces->reader, message);
}

qkv_status qkvi_put_pieces_next(qkvi_put_pieces *pieces, piece_fn fn, void *context, bool *more, qkv_error *error) {
  qkv_wire_field field;
  for (;;) {
    QKV_TRY(qkv_wire_next(&pieces->reader, &field, more, error));
    if (!*more) return QKV_OK;
    if (field.number != REQUEST_PIECES || field.type != QKV_WIRE_BYTES) continue;
    const size_t index = pieces->index++;
    return give_piece(field.bytes, fn, context, error) == QKV_OK ? QKV_OK
                                                                 : qkv_error_prefix(error, "pieces[%zu]: ", index);
  }
}
