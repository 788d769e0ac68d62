// What sessions.c knows of a session. Not for others: see sessions.h.
#ifndef QKV_STORAGE_SESSIONS_INTERNAL_H
#define QKV_STORAGE_SESSIONS_INTERNAL_H

#include <assert.h>

#include "storage/cuts.h"
#include "storage/numbered.h"
#include "storage/positions.h"
#include "storage/sessions.h"

// What a session has only with a parent, heirs or cuts. Forks of one parent at the same positions, with no cut of the
// parent between them, share one as long as they have neither heirs nor cuts: their views are equal.
typedef struct lineage {
  uint64_t time;        // of the session; of those that share it, the first one's
  uint32_t sharers;     // sessions that have it, >= 1
  uint32_t depth;       // length of the chain of forks
  uint32_t layers;      // of a fork; 0: it is none, or only the tree counts
  uint32_t used_heirs;  // sessions that are not quiet
  qkvi_positions limits;
  qkvi_positions parent_limits;  // those of the parent when this was forked; 0 where that is no fork
  qkvi_positions reach;          // how far its view and those of its heirs go into the parent's own records
  qkvi_session *parent;
  struct lineage *heirs;          // the newest first
  struct lineage *newer, *older;  // among the parent's heirs
  qkvi_cut *cuts;                 // the newest first
  qkvi_cut **ordered;             // the same, the oldest first, once it is decided which are needed, in a scan
  size_t ordered_count;
} lineage;

#define LINEAGE_ALIGN UINT64_C(16)  // malloc's: so an address takes as many bits as a time
#define AT_MAX (UINT64_MAX >> 8)

struct qkvi_session {
  uint64_t session;
  uint64_t at : 56;      // when it was opened, by the table's clock; `lined`: the address of its lineage / 16
  uint64_t lined : 1;    // it has a lineage, which has its time
  uint64_t dead : 1;     // closed; a ghost, if it has heirs
  uint64_t dropped : 1;  // dropped without an entry that says so
  uint64_t lost : 1;     // a fork without its parent
  uint64_t failed : 1;   // the entry that opens it is not in the journal
  uint64_t unswept : 1;  // its records wait for sweep(), which needs its cuts
  uint64_t rests : 1;    // it is not used
  uint64_t quiet : 1;    // so it is, or dead, and all of its heirs are quiet
};

_Static_assert(sizeof(qkvi_session) == 16, "no padding");

// Of a session, while the journal is scanned: sequences of the entry that opened it and of the last SESSION_NOTE.
typedef struct scanned {
  uint64_t session;
  uint64_t opened, noted;
} scanned;

struct qkvi_sessions {
  qkvi_numbered known;
  qkvi_numbered scanned;  // none while the storage runs
  uint64_t clock;
  qkvi_sweep_fn *sweep;  // NULL: scanning
  void *context;
};

// NULL: it has none.
static inline lineage *own_lines(const qkvi_session *session) {
  return session->lined ? (lineage *)(uintptr_t)(session->at * LINEAGE_ALIGN) : NULL;
}

static inline uint64_t time_of(const qkvi_session *session) {
  const lineage *lines = own_lines(session);
  return lines == NULL ? session->at : lines->time;
}

static inline const lineage *lines_of(const qkvi_session *session) {
  static const lineage none;
  const lineage *lines = own_lines(session);
  return lines == NULL ? &none : lines;
}

static inline void set_lines(qkvi_session *session, lineage *lines) {
  assert((uintptr_t)lines % LINEAGE_ALIGN == 0);
  session->at = (uintptr_t)lines / LINEAGE_ALIGN & AT_MAX;
  session->lined = true;
  lines->sharers++;
}

// A layer that a session does not inherit has the limit 0.
static inline uint64_t limit_of(const lineage *lines, uint32_t layer) {
  return layer < lines->layers ? qkvi_positions_at(&lines->limits, layer) : 0;
}

static inline uint64_t reach_at(const lineage *heir, uint32_t layer) {
  return qkvi_positions_at(&heir->reach, layer);
}

#endif
