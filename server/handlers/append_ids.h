// The token ids of one item around its append: checked and reserved for before rows are appended, kept once they are.
//
//   qkvi_append_ids ids;
//   qkvi_append_ids_init(&ids, session, item);
//   QKV_TRY(qkvi_append_ids_reserve(&ids, headroom, error));   for every attempt
//   ... append the rows ...
//   qkvi_append_ids_done(&ids, appended);                  after every reserve that was OK
//   qkvi_append_ids_deinit(&ids);
//
// Threads: one for each object. An item without ids costs nothing.
#ifndef QKV_SERVER_HANDLERS_APPEND_IDS_H
#define QKV_SERVER_HANDLERS_APPEND_IDS_H

#include <stdbool.h>

#include "server/handlers/items.h"

typedef struct qkvi_append_ids {
  qkv_session_tokens *tokens;
  uint64_t position;
  size_t count;
  uint32_t *ids;          // `few`, or memory of their own
  uint64_t reserved;      // bytes of the arena
  uint64_t cuts;          // of the session, before the rows are appended
  uint64_t pages_shared;  // that appends took from other sessions
  uint32_t few[64];
} qkvi_append_ids;

// `session` outlives the object.
void qkvi_append_ids_init(qkvi_append_ids *ids, qkv_session *session, const qkvi_item *item);
void qkvi_append_ids_deinit(qkvi_append_ids *ids);

// Bytes of the arena that they will take.
uint64_t qkvi_append_ids_cost(const qkvi_append_ids *ids);
// ALREADY_EXISTS (session_tokens.h), RESOURCE_EXHAUSTED (the arena's). `headroom`: a reservation, as of
// qkv_arena_reserve_in.
qkv_status qkvi_append_ids_reserve(qkvi_append_ids *ids, uint64_t *headroom, qkv_error *error);
// `appended`: the session has the rows. The unused part of the reservation is returned.
void qkvi_append_ids_done(qkvi_append_ids *ids, bool appended);

#endif
