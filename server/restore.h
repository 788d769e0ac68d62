// Pages back from the SSD, one at a time for each layer: who comes to a layer that is being brought back waits, and
// then looks at what is still missing.
#ifndef QKV_SERVER_RESTORE_H
#define QKV_SERVER_RESTORE_H

#include "server/spill.h"

// Brings the pages of [begin, end), end 0: to the end, of a layer back into memory; with `full` those, too, that have
// lost planes. The layer is pinned by the caller, or they may leave again at any moment. Makes room where it has to;
// RESOURCE_EXHAUSTED, with nothing done, for more than half of memory-budget. Waits. DATA_LOSS "session a: layer 3:
// the page at position 128 is lost (...); truncate to that position and append again" leaves what has come back until
// then.
qkv_status qkvi_restore(qkvi_spill *spill, qkv_session *session, uint32_t layer, uint64_t begin, uint64_t end,
                        bool full, qkv_error *error);
// The same for what nobody has asked for yet: ends without a word where there is no room at once below `memory_max`
// of memory-budget, where a page is lost, or where someone else brings the layer back. The bytes that have come back.
uint64_t qkvi_restore_ahead(qkvi_spill *spill, qkv_session *session, uint32_t layer, uint64_t begin, uint64_t end,
                            uint64_t memory_max);

#endif
