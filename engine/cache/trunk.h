// What folded sessions (session_fold.h) share with other sessions: leading pages of each layer, and of token ids.
//
// A fork that is folded gives up its tables, and a trunk keeps the ranges (page_range.h) that it shared. Forks of one
// parent at one position have one trunk, whatever their number, and the parent has the same ranges:
//
//   parent, open     [ range 0 ][ range 1 ][ range 2 ]
//                         ▲          ▲
//   trunk                 └──────────┴──── folded forks a, b, c
//
// A trunk counts as one of a range's layers: other layers write to copies of the range, its records are counted once,
// and a fork that is unfolded has the pages that the parent has in memory. But it keeps no page in memory: once no
// layer has a range any more, its images leave memory, and it is packed. Then the trunk takes 16 bytes a page and 5 a
// token id, once for all of its sessions.
//
// Reference counted: each folded session holds one reference. Memory: malloc's.
// Threads: any. One lock over the table of trunks, held for a look-up; locks of ranges are taken after it.
#ifndef QKV_ENGINE_CACHE_TRUNK_H
#define QKV_ENGINE_CACHE_TRUNK_H

#include <stddef.h>
#include <stdint.h>

#include "engine/cache/layer.h"
#include "engine/cache/session_tokens.h"

typedef struct qkvi_trunk qkvi_trunk;
typedef struct session_layers session_layers;

// What a session that no other thread has shares: of each layer the ranges up to the last one that others have, too,
// and the token ids up to the last page that others have. It refers to nothing until it is kept, and is freed by
// `discard` or `keep`. NULL: nothing is shared.
qkvi_trunk *qkvi_trunk_plan(const session_layers *layers, uint32_t layer_count, qkv_session_tokens *tokens);
void qkvi_trunk_discard(qkvi_trunk *planned);  // NULL: nothing
// While the session still has it: a reference, perhaps to an equal trunk. `arena` is the session's. NULL: NULL.
qkvi_trunk *qkvi_trunk_keep(qkvi_trunk *planned, qkv_arena *arena);
void qkvi_trunk_unref(qkvi_trunk **trunk);  // NULL inside: nothing

// A trunk, planned or kept, has so many ranges of a layer, bytes of records, and full pages of token ids. NULL: 0.
size_t qkvi_trunk_ranges(const qkvi_trunk *trunk, uint32_t layer);
uint64_t qkvi_trunk_stored(const qkvi_trunk *trunk);
uint64_t qkvi_trunk_token_pages(const qkvi_trunk *trunk);
// The position that it reaches in a layer, which begins at `from`.
uint64_t qkvi_trunk_end(const qkvi_trunk *trunk, uint32_t layer, uint64_t from);

// An empty layer gets what the trunk has of it; an empty session's token ids likewise. NULL: nothing.
void qkvi_trunk_give_pages(const qkvi_trunk *trunk, qkv_layer *layer);
void qkvi_trunk_give_tokens(const qkvi_trunk *trunk, qkv_session_tokens *tokens);

// What of it other sessions have in memory: of one layer, or of QKVI_TRUNK_LAYERS, all. `from` is the layers' first
// position; `end` gets the position that they have in memory from there on, the least of these layers.
#define QKVI_TRUNK_LAYERS UINT32_MAX
typedef struct qkvi_trunk_held {
  uint64_t tokens, bytes, end;
} qkvi_trunk_held;
qkvi_trunk_held qkvi_trunk_read_held(const qkvi_trunk *trunk, uint32_t layer, uint32_t layer_count, uint64_t from);

#endif
