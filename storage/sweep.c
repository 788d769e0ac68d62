// Forgets records that no session's view has any more.
#include "storage/internal.h"

qkvi_entry qkvi_put_entry(const qkvi_put *put) {
  const qkv_record_meta *meta = &put->request.meta;
  return (qkvi_entry){.record = put->record,
                      .session = meta->session,
                      .position = meta->position,
                      .layer = meta->layer,
                      .tokens = put->tokens};
}

// `needs` may be NULL: nothing.
static void sweep_records(qkv_storage *storage, const qkvi_needs *needs, uint64_t session) {
  qkvi_index_walk walk;
  qkvi_index_walk_init(storage->index, session, &walk);
  for (qkvi_entry entry; qkvi_index_walk_next(storage->index, &walk, &entry);) {
    const uint32_t tokens = needs == NULL ? 0 : qkvi_needs_tokens(needs, &entry);
    if (tokens == 0) {
      qkvi_forget(storage, entry.record);
    } else if (tokens < entry.tokens) {
      pthread_mutex_lock(&storage->lock);
      qkvi_index_clip(storage->index, entry.record, tokens);
      pthread_mutex_unlock(&storage->lock);
    }
  }
}

static void sweep_puts(qkv_storage *storage, const qkvi_needs *needs, uint64_t session) {
  for (qkvi_put *put = storage->all_first; put != NULL; put = put->all_next) {
    if (put->moved || put->request.meta.session != session) continue;
    const qkvi_entry entry = qkvi_put_entry(put);
    put->tokens = qkvi_needs_tokens(needs, &entry);
    if (put->tokens == 0) put->cancelled = true;
  }
}

bool qkvi_sweep(void *context, const qkvi_session *session) {
  qkv_storage *storage = context;
  const uint64_t number = qkvi_session_number(session);
  qkvi_entry unloaded;
  qkvi_needs needs;
  qkvi_needs_init(&needs, session);
  sweep_puts(storage, &needs, number);
  pthread_mutex_lock(&storage->lock);
  qkvi_index_unpack(storage->index, number);
  pthread_mutex_unlock(&storage->lock);
  qkvi_load_session(storage, number, NULL, NULL);
  sweep_records(storage, &needs, number);  // those that have been put since it was unloaded, at least
  qkvi_needs_deinit(&needs);
  return !qkvi_index_unloaded(storage->index, number, &unloaded);
}

// Sessions are unloaded while they are open: one that is not known has been closed.
void qkvi_sweep_loaded(qkv_storage *storage, uint64_t session) {
  const qkvi_session *owner = qkvi_sessions_find(storage->sessions, session);
  qkvi_needs needs = {0};
  if (owner != NULL) qkvi_needs_init(&needs, owner);
  sweep_records(storage, owner == NULL ? NULL : &needs, session);
  qkvi_needs_deinit(&needs);
  qkvi_sessions_swept(storage->sessions, session);
  qkvi_pack_quiet(storage, session);
}
