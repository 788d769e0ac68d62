#include "server/watch/places.h"

#include <stdlib.h>

#include "engine/cache/session_fold.h"
#include "engine/cache/session_spill.h"
#include "server/handlers/prefixes.h"

#define uthash_fatal(message) abort()
#include <uthash.h>

enum { PAGES_AT_ONCE = 8192 };  // reported at a look

// A session of which some pages are on the SSD alone.
typedef struct known {
  uint64_t serial, tokens_cold, look;
  size_t pages;
  bool *cold;  // [pages]
  UT_hash_handle hh;
} known;

struct qkvi_watch_places {
  known *sessions;
  uint64_t looks;
  size_t told;  // in this one
};

qkvi_watch_places *qkvi_watch_places_create(void) {
  qkvi_watch_places *places = calloc(1, sizeof *places);
  if (places == NULL) abort();
  return places;
}

static void drop(qkvi_watch_places *places, known *left) {
  HASH_DEL(places->sessions, left);  // NOLINT(clang-analyzer-unix.Malloc): what was freed is not linked any more
  free(left->cold);
  free(left);
}

void qkvi_watch_places_forget(qkvi_watch_places *places) {
  known *at, *next;
  HASH_ITER(hh, places->sessions, at, next) {
    drop(places, at);
  }
}

void qkvi_watch_places_destroy(qkvi_watch_places **places) {
  if (*places == NULL) return;
  qkvi_watch_places_forget(*places);
  free(*places);
  *places = NULL;
}

static known *find(qkvi_watch_places *places, uint64_t serial) {
  known *found;
  HASH_FIND(hh, places->sessions, &serial, sizeof serial, found);
  return found;
}

static known *add(qkvi_watch_places *places, uint64_t serial) {
  known *made = calloc(1, sizeof *made);
  if (made == NULL) abort();
  made->serial = serial;
  HASH_ADD(hh, places->sessions, serial, sizeof made->serial, made);
  return made;
}

static void tell(qkvi_watch_places *places, qkvi_watch_log *log, qkv_session *session, const known *before,
                 const qkv_prefix_hash *hashes, const bool *cold, size_t pages) {
  const qkv_session_config *config = qkv_session_config_of(session);
  qkvi_watch_event event = {.label = qkvi_watch_label_create(config->tenant, qkv_session_model(session)->name),
                            .kind = QKVI_WATCH_MOVED};
  for (size_t i = 0; i < pages; i++) {
    const bool was = i < before->pages && before->cold[i];
    if (cold[i] == was) continue;
    event.hash = hashes[i];
    event.parent = i == 0 ? qkv_session_root(session) : hashes[i - 1];
    event.page = i;
    event.on_ssd = cold[i];
    qkvi_watch_log_moved(log, &event);
    places->told++;
  }
  qkvi_watch_log_return(log, &event, 1);
}

static void look_at(qkvi_watch_places *places, qkvi_watch_log *log, qkv_session *session, known *at,
                    uint64_t tokens_cold) {
  const bool folded = qkv_session_is_folded(session);
  const uint64_t tokens =
      folded ? qkv_session_length(session) : qkv_session_tokens_length(qkv_session_tokens_of(session));
  const size_t capacity = (size_t)(tokens / QKV_PREFIX_PAGE);
  qkv_prefix_hash *hashes = calloc(capacity + 1, sizeof *hashes);
  bool *cold = calloc(capacity + 1, sizeof *cold);
  if (hashes == NULL || cold == NULL) abort();
  const size_t pages = folded ? qkv_session_indexed_hashes(session, hashes, capacity)
                              : qkv_session_tokens_hashes(qkv_session_tokens_of(session), hashes, capacity);
  if (folded) {
    for (size_t i = (size_t)(qkv_session_folded_held(session) / QKV_PREFIX_PAGE); i < pages; i++) cold[i] = true;
  } else {
    (void)qkvi_prefix_mark_cold(session, pages * QKV_PREFIX_PAGE, cold);
  }
  tell(places, log, session, at, hashes, cold, pages);
  free(hashes);
  free(at->cold);
  at->cold = cold;
  at->pages = pages;
  at->tokens_cold = tokens_cold;
}

static void look_at_session(qkvi_watch_places *places, qkvi_watch_log *log, qkv_session *session) {
  const uint64_t serial = qkv_session_serial(session), tokens_cold = qkv_session_tokens_cold(session);
  known *at = find(places, serial);
  if (at != NULL) at->look = places->looks;
  if ((at == NULL ? 0 : at->tokens_cold) == tokens_cold || places->told >= PAGES_AT_ONCE) return;
  if (at == NULL) at = add(places, serial);
  at->look = places->looks;
  look_at(places, log, session, at, tokens_cold);
}

void qkvi_watch_places_look(qkvi_watch_places *places, qkv_store *store, qkvi_watch_log *log) {
  const size_t capacity = qkv_store_sessions(store) + 1;
  qkv_session **listed = calloc(capacity, sizeof *listed);
  if (listed == NULL) abort();
  const size_t count = qkv_store_backed(store, listed, capacity);
  places->looks++;
  places->told = 0;
  for (size_t i = 0; i < count; i++) {
    look_at_session(places, log, listed[i]);
    qkv_session_unref(&listed[i]);
  }
  free((void *)listed);
  known *at, *next;
  HASH_ITER(hh, places->sessions, at, next) {
    if (at->look != places->looks) drop(places, at);
  }
}
