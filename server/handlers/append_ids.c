#include "server/handlers/append_ids.h"

#include <stdlib.h>

void qkvi_append_ids_init(qkvi_append_ids *ids, qkv_session *session, const qkvi_item *item) {
  ids->tokens = qkv_session_tokens_of(session);
  ids->position = item->position;
  ids->count = (size_t)item->token_ids.count;
  ids->reserved = 0;
  ids->pages_shared = 0;
  ids->ids = ids->few;
  if (ids->count > sizeof ids->few / sizeof *ids->few) ids->ids = malloc(ids->count * sizeof *ids->ids);
  if (ids->ids == NULL) abort();
  if (ids->count > 0) qkvi_token_ids_read(&item->token_ids, ids->ids);
}

void qkvi_append_ids_deinit(qkvi_append_ids *ids) {
  if (ids->ids != ids->few) free(ids->ids);
}

uint64_t qkvi_append_ids_cost(const qkvi_append_ids *ids) {
  return ids->count == 0 ? 0 : qkv_session_tokens_cost(ids->tokens, ids->position, ids->count);
}

qkv_status qkvi_append_ids_reserve(qkvi_append_ids *ids, uint64_t *headroom, qkv_error *error) {
  if (ids->count == 0) return QKV_OK;
  ids->cuts = qkv_session_tokens_cuts(ids->tokens);
  QKV_TRY(qkv_session_tokens_check(ids->tokens, ids->position, ids->ids, ids->count, error));
  const uint64_t cost = qkvi_append_ids_cost(ids);
  QKV_TRY(qkv_arena_reserve_in(ids->tokens->config.arena, headroom, cost, error));
  ids->reserved = cost;
  return QKV_OK;
}

void qkvi_append_ids_done(qkvi_append_ids *ids, bool appended) {
  if (ids->count == 0) return;
  if (appended) qkv_session_tokens_keep(ids->tokens, ids->cuts, ids->position, ids->ids, ids->count, &ids->reserved);
  qkv_arena_unreserve(ids->tokens->config.arena, ids->reserved);
  ids->reserved = 0;
}
