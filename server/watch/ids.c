#include "server/watch/ids.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/clock.h"
#include "engine/cache/session_fold.h"

#define uthash_fatal(message) abort()
#include <uthash.h>

enum { NAMES = 1024, STEP_MS = 50 };  // that one list of the store gives; after so long no session is begun

typedef struct told {
  qkv_prefix_hash hash;
  UT_hash_handle hh;
} told;

// Names, not sessions, are held between two messages, which may be far apart: a closed session is freed.
struct qkvi_watch_ids {
  char tenant[QKV_NAME_MAX + 1], model[QKV_NAME_MAX + 1];  // "": all
  qkv_store_place *names;
  size_t count, next;
  size_t page;  // of the session, that comes next
  bool listed;  // all names
  told *told;
};

qkvi_watch_ids *qkvi_watch_ids_create(const char *tenant, const char *model) {
  qkvi_watch_ids *ids = calloc(1, sizeof *ids);
  if (ids == NULL) abort();
  ids->names = calloc(NAMES, sizeof *ids->names);
  if (ids->names == NULL) abort();
  (void)snprintf(ids->tenant, sizeof ids->tenant, "%s", tenant);
  (void)snprintf(ids->model, sizeof ids->model, "%s", model);
  return ids;
}

void qkvi_watch_ids_destroy(qkvi_watch_ids **ids) {
  qkvi_watch_ids *left = *ids;
  if (left == NULL) return;
  *ids = NULL;
  told *at = left->told, *next;
  HASH_CLEAR(hh, left->told);
  for (; at != NULL; at = next) {
    next = at->hh.next;
    free(at);
  }
  free(left->names);
  free(left);
}

// False where its pages have been sent.
static bool note(qkvi_watch_ids *ids, const qkv_prefix_hash *hash) {
  told *at;
  HASH_FIND(hh, ids->told, hash, sizeof *hash, at);
  if (at != NULL) return false;
  at = calloc(1, sizeof *at);
  if (at == NULL) abort();
  at->hash = *hash;
  HASH_ADD(hh, ids->told, hash, sizeof at->hash, at);
  return true;
}

static void list_more(qkvi_watch_ids *ids, qkv_store *store) {
  qkv_session *sessions[NAMES];
  const qkv_store_filter filter = {.tenant = ids->tenant[0] == '\0' ? NULL : ids->tenant,
                                   .after = ids->count > 0 ? &ids->names[ids->count - 1] : NULL};
  ids->count = qkv_store_list(store, &filter, sessions, NAMES);
  ids->next = 0;
  ids->listed = ids->count < NAMES;
  for (size_t i = 0; i < ids->count; i++) {
    ids->names[i] = qkv_store_place_of(sessions[i]);
    qkv_session_unref(&sessions[i]);
  }
}

// The next one, with a reference; NULL: it has been closed, or is of another model.
static qkv_session *find_wanted(const qkvi_watch_ids *ids, qkv_store *store) {
  qkv_session *session = NULL;
  const qkv_store_place *place = &ids->names[ids->next];
  if (qkv_store_session(store, place->tenant, place->name, &session, NULL) != QKV_OK) return NULL;
  if (ids->model[0] != '\0' && strcmp(qkv_session_model(session)->name, ids->model) != 0) qkv_session_unref(&session);
  return session;
}

// Pages of a session from ids->page on, as far as there is capacity; where all were looked at the next session
// follows.
static size_t take_session(qkvi_watch_ids *ids, qkv_session *session, qkvi_watch_event *events, uint32_t *out,
                           size_t max) {
  const qkv_session_config *config = qkv_session_config_of(session);
  qkv_prefix_hash *hashes = calloc(max + 1, sizeof *hashes);
  uint32_t *read = malloc(max * QKV_PREFIX_PAGE * sizeof *read);
  if (hashes == NULL || read == NULL) abort();
  const size_t pages = qkv_session_read_pages(session, ids->page, max, hashes, read);
  qkvi_watch_label *label = qkvi_watch_label_create(config->tenant, qkv_session_model(session)->name);
  size_t count = 0;
  for (size_t i = 0; i < pages; i++) {
    if (!note(ids, &hashes[i + 1])) continue;
    memcpy(out + count * QKV_PREFIX_PAGE, read + i * QKV_PREFIX_PAGE, QKV_PREFIX_PAGE * sizeof *read);
    events[count++] = (qkvi_watch_event){.hash = hashes[i + 1],
                                         .parent = hashes[i],
                                         .label = label,
                                         .page = ids->page + i,
                                         .kind = QKVI_WATCH_ADDED,
                                         .has_ids = true};
  }
  label->references = count;  // no other thread has it yet
  if (count == 0) free(label);
  ids->page = pages == max ? ids->page + pages : 0;
  ids->next += pages < max;
  free(hashes);
  free(read);
  return count;
}

size_t qkvi_watch_ids_next(qkvi_watch_ids *ids, qkv_store *store, qkvi_watch_event *events, uint32_t *out, size_t max,
                           bool *ends) {
  const int64_t until = qkv_now_ms() + STEP_MS;
  size_t count = 0;
  while (count < max && qkv_now_ms() <= until) {
    if (ids->next == ids->count && ids->listed) break;
    if (ids->next == ids->count) {
      list_more(ids, store);
      continue;
    }
    qkv_session *session = find_wanted(ids, store);
    if (session == NULL) {
      ids->page = 0;
      ids->next++;
      continue;
    }
    count += take_session(ids, session, events + count, out + count * QKV_PREFIX_PAGE, max - count);
    qkv_session_unref(&session);
  }
  *ends = ids->next == ids->count && ids->listed;
  return count;
}
