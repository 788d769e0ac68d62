// Who is alive, by the entries of the journal in their order.
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "storage/internal.h"

#define uthash_fatal(text) abort()
#include <uthash.h>

typedef struct session_cut {
  qkv_journal_entry entry;
  struct session_cut *next;
} session_cut;

typedef struct known_session {
  uint64_t session, opened, noted;  // sequences of SESSION_OPEN and of the last SESSION_NOTE
  bool dead;
  session_cut *cuts;
  UT_hash_handle hh;
} known_session;

struct qkvi_sessions {
  known_session *known;
};

qkvi_sessions *qkvi_sessions_create(void) {
  return qkvi_checked(calloc(1, sizeof(qkvi_sessions)));
}

static void drop_cuts(known_session *session) {
  while (session->cuts != NULL) {
    session_cut *next = session->cuts->next;
    free(session->cuts);
    session->cuts = next;
  }
}

void qkvi_sessions_destroy(qkvi_sessions **sessions) {
  if (*sessions == NULL) return;
  known_session *session = (*sessions)->known;
  HASH_CLEAR(hh, (*sessions)->known);
  while (session != NULL) {
    known_session *next = session->hh.next;
    drop_cuts(session);
    free(session);
    session = next;
  }
  free(*sessions);
  *sessions = NULL;
}

static known_session *find(const qkvi_sessions *sessions, uint64_t number) {
  known_session *found = NULL;
  HASH_FIND(hh, sessions->known, &number, sizeof number, found);
  return found;
}

void qkvi_sessions_note(qkvi_sessions *sessions, const qkv_journal_entry *entry) {
  known_session *session = find(sessions, entry->session);
  if (entry->kind == QKV_JOURNAL_SESSION_OPEN && session == NULL) {
    session = qkvi_checked(calloc(1, sizeof *session));
    session->session = entry->session;
    session->opened = entry->sequence;
    HASH_ADD(hh, sessions->known, session, sizeof session->session, session);
  }
  if (session == NULL) return;
  if (entry->kind == QKV_JOURNAL_SESSION_CLOSE) session->dead = true;
  if (entry->kind == QKV_JOURNAL_SESSION_NOTE) session->noted = entry->sequence;
  if (entry->kind == QKV_JOURNAL_SESSION_TRUNCATE) {
    session_cut *cut = qkvi_checked(malloc(sizeof *cut));
    *cut = (session_cut){.entry = *entry, .next = session->cuts};
    cut->entry.payload = NULL;
    session->cuts = cut;
  }
}

uint64_t qkvi_sessions_give_up(qkvi_sessions *sessions, uint64_t sequence) {
  uint64_t given_up = 0;
  known_session *session, *next;
  HASH_ITER(hh, sessions->known, session, next) {
    if (session->dead || session->opened >= sequence) continue;
    session->dead = true;
    given_up++;
  }
  return given_up;
}

void qkvi_sessions_drop(qkvi_sessions *sessions, uint64_t session) {
  known_session *found = find(sessions, session);
  if (found != NULL) found->dead = true;
}

// Whether a later cut does all that this one does.
static bool outdone(const known_session *session, const qkv_journal_entry *entry) {
  for (const session_cut *cut = session->cuts; cut != NULL; cut = cut->next) {
    const qkv_journal_entry *later = &cut->entry;
    if (later->sequence <= entry->sequence) return false;
    if ((later->layer == QKV_LAYER_ALL || later->layer == entry->layer) && later->position <= entry->position)
      return true;
  }
  return false;
}

bool qkvi_sessions_keep(const qkvi_sessions *sessions, const qkv_journal_entry *entry) {
  if (entry->kind < QKV_JOURNAL_SESSION_OPEN) return true;
  const known_session *session = find(sessions, entry->session);
  if (session == NULL || session->dead) return false;
  if (entry->kind == QKV_JOURNAL_SESSION_NOTE) return entry->sequence == session->noted;
  return entry->kind != QKV_JOURNAL_SESSION_TRUNCATE || !outdone(session, entry);
}

uint32_t qkvi_cut_tokens(const qkv_journal_entry *cut, const qkvi_entry *entry) {
  if (entry->record >= cut->watermark || (cut->layer != QKV_LAYER_ALL && cut->layer != entry->layer)) {
    return entry->tokens;
  }
  if (entry->position >= cut->position) return 0;
  const uint64_t left = cut->position - entry->position;
  return left < entry->tokens ? (uint32_t)left : entry->tokens;
}

uint32_t qkvi_sessions_tokens(const qkvi_sessions *sessions, const qkvi_entry *entry) {
  const known_session *found = find(sessions, entry->session);
  if (found == NULL || found->dead) return 0;
  uint32_t tokens = entry->tokens;
  for (const session_cut *cut = found->cuts; cut != NULL; cut = cut->next) {
    const uint32_t left = qkvi_cut_tokens(&cut->entry, entry);
    if (left < tokens) tokens = left;
  }
  return tokens;
}
