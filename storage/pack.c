// Packing what the index has of sessions that are not used. While compaction or a check walks the index, what they
// walk is unpacked, and nothing is packed. A session's records are its heirs', too: they are packed where none of
// these is used.
#include <assert.h>
#include <stdlib.h>

#include "storage/internal.h"

typedef struct pack_message {
  qkvi_message message;
  uint64_t session;
  qkv_storage_done_fn *done;
  void *context;
} pack_message;

static pack_message take(qkvi_message *message) {
  const pack_message taken = *(pack_message *)message;
  free(message);
  return taken;
}

static void post(qkv_storage *storage, void (*run)(qkv_storage *storage, qkvi_message *message), uint64_t session,
                 qkv_storage_done_fn *done, void *context) {
  pack_message *message = qkvi_checked(calloc(1, sizeof *message));
  *message = (pack_message){.message = {.run = run}, .session = session, .done = done, .context = context};
  qkvi_post(storage, &message->message);
}

static void pack_one(void *context, uint64_t session) {
  qkv_storage *storage = context;
  pthread_mutex_lock(&storage->lock);
  qkvi_index_pack(storage->index, session, storage->index_walks == 0);
  pthread_mutex_unlock(&storage->lock);
}

void qkvi_pack_quiet(qkv_storage *storage, uint64_t session) {
  qkvi_sessions_quiet(storage->sessions, session, pack_one, storage);
  qkvi_unload_fresh(storage);
}

static void pack(qkv_storage *storage, qkvi_message *message) {
  const pack_message of = take(message);
  qkvi_sessions_rest(storage->sessions, of.session);
  qkvi_pack_quiet(storage, of.session);
}

void qkv_storage_session_pack(qkv_storage *storage, uint64_t session) {
  post(storage, pack, session, NULL, NULL);
}

// ---- Loading ----

// Loads sessions, some at a time.
typedef struct loading {
  qkv_storage *storage;
  uint64_t *sessions;
  size_t count, next, running;
  bool going;
  qkv_status status;
  qkv_storage_done_fn *done;
  void *context;
} loading;

enum { LOADING_MAX = 32 };

static void load_next(loading *on);

static void one_loaded(void *context, qkv_status status) {
  loading *on = context;
  on->running--;
  if (status != QKV_OK) on->status = status;
  load_next(on);
}

static void load_next(loading *on) {
  if (on->going) return;
  on->going = true;
  while (on->next < on->count && on->running < LOADING_MAX) {
    on->running++;
    qkvi_load_session(on->storage, on->sessions[on->next++], one_loaded, on);
  }
  on->going = false;
  if (on->running > 0) return;
  if (on->done != NULL) on->done(on->context, on->status);
  free(on->sessions);
  free(on);
}

// `sessions` is freed; `done` may be NULL.
static void load(qkv_storage *storage, uint64_t *sessions, size_t count, qkv_storage_done_fn *done, void *context) {
  loading *on = qkvi_checked(calloc(1, sizeof *on));
  *on = (loading){
      .storage = storage, .sessions = sessions, .count = count, .status = QKV_OK, .done = done, .context = context};
  load_next(on);
}

void qkvi_unpack_session(qkv_storage *storage, uint64_t session, qkv_storage_done_fn *done, void *context) {
  size_t count;
  uint64_t *line = qkvi_sessions_use(storage->sessions, session, &count);
  pthread_mutex_lock(&storage->lock);
  for (size_t i = 0; i < count; i++) qkvi_index_unpack(storage->index, line[i]);
  pthread_mutex_unlock(&storage->lock);
  load(storage, line, count, done, context);
}

static void unpack(qkv_storage *storage, qkvi_message *message) {
  const pack_message of = take(message);
  qkvi_unpack_session(storage, of.session, of.done, of.context);
}

void qkv_storage_session_unpack(qkv_storage *storage, uint64_t session, qkv_storage_done_fn *done, void *context) {
  post(storage, unpack, session, done, context);
}

// ---- Walks ----

void qkvi_begin_walk(qkv_storage *storage, uint32_t segment, qkv_storage_done_fn *done, void *context) {
  size_t count;
  pthread_mutex_lock(&storage->lock);
  storage->index_walks++;
  qkvi_index_unpack_segment(storage->index, segment);
  pthread_mutex_unlock(&storage->lock);
  uint64_t *sessions = qkvi_index_list_unloaded(storage->index, segment, &count);
  load(storage, sessions, count, done, context);
}

void qkvi_end_walk(qkv_storage *storage) {
  pthread_mutex_lock(&storage->lock);
  assert(storage->index_walks > 0);
  if (--storage->index_walks == 0) qkvi_index_pack_again(storage->index);
  pthread_mutex_unlock(&storage->lock);
  qkvi_unload_fresh(storage);
}

static void begin_check(qkv_storage *storage, qkvi_message *message) {
  const pack_message of = take(message);
  qkvi_begin_walk(storage, QKVI_ANY_SEGMENT, of.done, of.context);
}

static void end_check(qkv_storage *storage, qkvi_message *message) {
  free(message);
  qkvi_end_walk(storage);
}

void qkvi_begin_check(qkv_storage *storage, qkv_storage_done_fn *done, void *context) {
  post(storage, begin_check, 0, done, context);
}

void qkvi_end_check(qkv_storage *storage) {
  post(storage, end_check, 0, NULL, NULL);
}
