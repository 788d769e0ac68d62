// `repeated uint32 token_ids` of a message, read in place: counted and checked as the message is parsed, decoded when
// the ids are needed.
//
// Threads: pure on its inputs. A view lives as long as the message.
#ifndef QKV_SERVER_HANDLERS_TOKEN_IDS_H
#define QKV_SERVER_HANDLERS_TOKEN_IDS_H

#include <stdint.h>

#include "engine/base/bytes.h"
#include "engine/base/status.h"
#include "proto/wire.h"

typedef struct qkvi_token_ids {
  qkv_bytes message;  // that contains them
  uint32_t field;     // their number there
  uint64_t count;     // of ids
} qkvi_token_ids;

// Counts the ids of one field, packed or not. *error: INVALID_ARGUMENT, a malformed field. *invalid, with QKV_OK:
// INVALID_ARGUMENT "token_ids[3] is 4294967296, at most 4294967295".
qkv_status qkvi_token_ids_count(qkvi_token_ids *ids, const qkv_wire_field *field, qkv_error *invalid,
                                qkv_error *error);

// All of them, in order, to `out` of `ids->count`. Every field was counted, and valid.
void qkvi_token_ids_read(const qkvi_token_ids *ids, uint32_t *out);

#endif
