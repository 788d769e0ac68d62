#include "server/watch/ids.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define uthash_fatal(message) abort()
#include <uthash.h>

enum { NAMES = 1024 };  // that one list of the store gives

typedef struct told {
  qkv_prefix_hash hash;
  UT_hash_handle hh;
} told;

// Names, not sessions, are held between two messages, which may be far apart: a closed session is freed.
struct qkvi_watch_ids {
  qkv_store_place *names;
  size_t count, next;
  size_t page;  // of the session, that comes next
  bool listed;  // all names
  told *told;
};

qkvi_watch_ids *qkvi_watch_ids_create(void) {
  qkvi_watch_ids *ids = calloc(1, sizeof *ids);
  if (ids == NULL) abort();
  ids->names = calloc(NAMES, sizeof *ids->names);
  if (ids->names == NULL) abort();
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
  const qkv_store_filter filter = {.after = ids->count > 0 ? &ids->names[ids->count - 1] : NULL};
  ids->count = qkv_store_list(store, &filter, sessions, NAMES);
  ids->next = 0;
  ids->listed = ids->count < NAMES;
  for (size_t i = 0; i < ids->count; i++) {
    ids->names[i] = qkv_store_place_of(sessions[i]);
    qkv_session_unref(&sessions[i]);
  }
}

// Pages of a session from ids->page on, as far as there is capacity; where all were looked at the next session
// follows.
static size_t take_session(qkvi_watch_ids *ids, qkv_session *session, qkvi_watch_event *events, uint32_t *out,
                           size_t max) {
  const qkv_session_config *config = qkv_session_config_of(session);
  qkv_session_tokens *tokens = qkv_session_tokens_of(session);
  if (tokens == NULL) {  // its layers cannot be made
    ids->page = 0;
    ids->next++;
    return 0;
  }
  const size_t all = (size_t)(qkv_session_tokens_length(tokens) / QKV_PREFIX_PAGE), first = ids->page;
  qkv_prefix_hash *hashes = calloc(all + 1, sizeof *hashes);
  uint32_t *read = malloc((max + 1) * QKV_PREFIX_PAGE * sizeof *read);
  if (hashes == NULL || read == NULL) abort();
  const size_t pages = qkv_session_tokens_hashes(tokens, hashes, all);
  const size_t found =
      first >= pages ? 0 : qkv_session_tokens_read(tokens, first * QKV_PREFIX_PAGE, read, max * QKV_PREFIX_PAGE);
  const size_t end = first + found / QKV_PREFIX_PAGE;
  qkvi_watch_label *label = qkvi_watch_label_create(config->tenant, qkv_session_model(session)->name);
  size_t count = 0;
  for (size_t i = first; i < end && i < pages; i++) {
    if (!note(ids, &hashes[i])) continue;
    memcpy(out + count * QKV_PREFIX_PAGE, read + (i - first) * QKV_PREFIX_PAGE, QKV_PREFIX_PAGE * sizeof *read);
    events[count++] = (qkvi_watch_event){.hash = hashes[i],
                                         .parent = i == 0 ? qkv_session_root(session) : hashes[i - 1],
                                         .label = label,
                                         .page = i,
                                         .kind = QKVI_WATCH_ADDED,
                                         .has_ids = true};
  }
  label->references = count;  // no other thread has it yet
  if (count == 0) free(label);
  const bool more = end > first && end < pages;
  ids->page = more ? end : 0;
  ids->next += !more;
  free(hashes);
  free(read);
  return count;
}

size_t qkvi_watch_ids_next(qkvi_watch_ids *ids, qkv_store *store, qkvi_watch_event *events, uint32_t *out,
                           size_t max) {
  size_t count = 0;
  while (count < max) {
    if (ids->next == ids->count && ids->listed) break;
    if (ids->next == ids->count) {
      list_more(ids, store);
      continue;
    }
    qkv_session *session = NULL;
    const qkv_store_place *place = &ids->names[ids->next];
    if (qkv_store_session(store, place->tenant, place->name, &session, NULL) != QKV_OK) {
      ids->page = 0;
      ids->next++;
      continue;
    }
    count += take_session(ids, session, events + count, out + count * QKV_PREFIX_PAGE, max - count);
    qkv_session_unref(&session);
  }
  return count;
}
