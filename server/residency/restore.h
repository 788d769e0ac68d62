// Pages back from the SSD, one at a time for each layer: who comes to a layer that is being brought back waits, and
// then looks at what is still missing.
#ifndef QKV_SERVER_RESIDENCY_RESTORE_H
#define QKV_SERVER_RESIDENCY_RESTORE_H

#include "server/residency/residency.h"

typedef struct qkvi_wanted {
  const qkv_rpc_call *call;  // whose client waits; NULL: nobody may go
  qkv_session *session;
  uint32_t layer;
  uint64_t begin, end;  // positions; end 0: to the end
  bool full;            // pages, too, that have lost planes
  size_t held;          // layers that the caller holds already (server/residency/residency.h)
  uint64_t beside;      // bytes of memory-budget that it needs together with the pages
} qkvi_wanted;

// Brings pages back into memory. With QKV_OK the layer is held, for the caller to release, and `*room` (NULL where
// nothing is wanted beside) has got at least what is wanted beside. Claims what it needs
// (server/residency/residency.h), all of it before it begins; CANCELLED soon after the client has gone;
// RESOURCE_EXHAUSTED, with nothing done, for more than half of memory-budget. Waits. DATA_LOSS "session a: layer 3:
// the page at position 128 is lost (...); truncate to that position and append again" leaves what has come back until
// then.
qkv_status qkvi_restore(qkvi_residency *residency, const qkvi_wanted *wanted, uint64_t *room, qkv_error *error);
// The same for what nobody has asked for yet: ends without a word where there is no room at once below `memory_max`
// of memory-budget, where a page is lost, or where someone else brings the layer back. The bytes that have come back;
// what they may leave again by is up to the caller, who holds the layer or does not.
uint64_t qkvi_restore_ahead(qkvi_residency *residency, const qkvi_wanted *wanted, uint64_t memory_max);

// About how long it takes to bring pages of `bytes` back, by how fast it went lately.
double qkvi_restore_ms(const qkvi_residency *residency, uint64_t bytes);

#endif
