// Restores pages from the SSD, by one thread at a time for each layer: another thread that needs the layer waits, and
// then checks what is still missing.
#ifndef QKV_SERVER_RESIDENCY_RESTORE_H
#define QKV_SERVER_RESIDENCY_RESTORE_H

#include "server/residency/residency.h"

typedef struct qkvi_wanted {
  const qkv_rpc_call *call;  // whose client waits; NULL: it cannot be cancelled
  qkv_session *session;
  uint32_t layer;
  uint64_t begin, end;  // positions; end 0: to the end
  bool full;            // pages, too, that have lost planes
  size_t held;          // layers that the caller holds already (server/residency/residency.h)
  uint64_t extra;       // bytes of memory-budget that the caller needs in addition to the pages
} qkvi_wanted;

// Brings pages back into memory. With QKV_OK the layer is held, for the caller to release, and `*headroom`, the
// caller's reservation (NULL where wanted->extra is 0), has grown by at least wanted->extra. Claims what it needs
// (server/residency/residency.h), all of it before it begins; CANCELLED soon after the client has gone;
// RESOURCE_EXHAUSTED, with nothing done, for more than half of memory-budget. Waits. DATA_LOSS "session a: layer 3:
// the page at position 128 is lost (...); truncate to that position and append again": pages that were restored
// before stay in memory.
qkv_status qkvi_restore(qkvi_residency *residency, const qkvi_wanted *wanted, uint64_t *headroom, qkv_error *error);
// The same ahead of any request: ends silently where there is no headroom at once below `memory_max` of
// memory-budget, where a page is lost, or where another thread brings the layer back. Returns the bytes that were
// restored. They may be evicted again unless the caller holds the layer.
uint64_t qkvi_restore_ahead(qkvi_residency *residency, const qkvi_wanted *wanted, uint64_t memory_max);

// An estimate of the time to bring pages of `bytes` back, by the recent rate.
double qkvi_restore_ms(const qkvi_residency *residency, uint64_t bytes);

#endif
