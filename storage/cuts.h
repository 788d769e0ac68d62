// Which cuts (truncations) of a session are needed, by the views of its heirs and its own (sessions.h).
//
// A cut is not needed where each view that it clips is clipped as much by another one: the next cut that covers it,
// for heirs that were forked behind that one and for the session itself; the last one before it, for heirs before
// that.
//
// Costs: the number of cuts times its logarithm. Threads: the caller's.
#ifndef QKV_STORAGE_CUTS_H
#define QKV_STORAGE_CUTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct qkvi_cut {
  uint64_t time, sequence;
  uint64_t position, watermark;
  uint32_t layer;
  bool needed;           // by qkvi_cuts_decide
  uint64_t from, until;  // only heirs that were forked between these may need it
  struct qkvi_cut *earlier;
} qkvi_cut;

// Sets `needed` of all of them, from the newest on. `times`: when the heirs were forked, in ascending order. `alone`:
// the session's own view counts, too. Returns them, the oldest first, which the caller frees.
qkvi_cut **qkvi_cuts_decide(qkvi_cut *newest, const uint64_t *times, size_t heirs, bool alone, size_t *count);

#endif
