// An Attend or Decode request while it is served, and its turns (attend_turn.c): the layers of a turn are locked for
// reading, and one run attends as many items and queries as take some 0.1 s.
//
// Threads: one at a time has a request.
#ifndef QKV_SERVER_HANDLERS_ATTEND_CALL_H
#define QKV_SERVER_HANDLERS_ATTEND_CALL_H

#include "engine/cache/attend.h"
#include "server/daemon.h"
#include "server/handlers/attend_pieces.h"
#include "server/handlers/block.h"
#include "server/handlers/items.h"
#include "server/handlers/jobs.h"

// An item while its request is served.
typedef struct qkvi_attend_part {
  qkvi_item *item;
  qkv_session *session;  // a reference while the item has no error
  qkv_attend request;    // where the item has queries
  uint64_t attended;     // queries
  uint64_t length;       // the layer's when its first queries were attended; else when its rows had been appended
  uint32_t cuts;         // of the layer then
  bool cut;              // the layer was cut since
  size_t out, lse;       // bytes into the block
  size_t attend;         // its place in `attends`, in this turn
  uint64_t begin, end;   // positions that it still reads
  uint64_t turn_end;     // of those of this turn
  bool cold, held;       // not all of these are in memory; restored pages stay
  qkvi_pieces *pieces;   // where what is left does not fit into memory at once; else NULL
} qkvi_attend_part;

typedef struct qkvi_attend_call {
  qkv_rpc_call *call;
  qkv_daemon *daemon;
  bool stream;  // the call is Decode
  qkv_bytes message;
  qkvi_request request;
  qkvi_attend_part *parts;   // [request.count]
  qkvi_attend_part **order;  // parts with queries, in lock order
  qkv_attend *attends;       // of the same parts, in the order of the request: what is left of them, or a turn's
  size_t capacity;           // of the three
  size_t part_count;         // of the request that is served
  bool parsed, checked;
  qkvi_waits waits;            // its wait reasons
  size_t next;                 // part to append
  size_t next_sync;            // part whose rows are to be durable
  double cost;                 // of all attends
  bool begun;                  // there was a turn
  uint64_t turn;               // cost of a turn; 0: none has begun
  uint64_t back_ns;            // in this turn: how long pages took to come back
  uint64_t block_bytes;        // of all outs and LSEs
  qkvi_response_block *block;  // of block_bytes; NULL without attends
  qkvi_region *into;           // where the block is copied to; NULL: the answer refers to it
  qkv_wire_writer *writer;
} qkvi_attend_call;

// The item's layer, locked for reading; QKV_UNAVAILABLE without `wait` where another thread changes it.
qkv_status qkvi_attend_read(const qkvi_attend_part *part, bool wait, const qkv_layer **layer, qkv_error *error);
// Ends the use of an item's session; the same for an item with an error, which gets its place in the request.
void qkvi_attend_let_go(const qkvi_attend_call *state, qkvi_attend_part *part);
void qkvi_attend_drop(qkvi_attend_call *state, size_t index);

// A turn. False, with nothing done, where it has to wait for more, which is in state->waits then. `*more`: there are
// queries left.
bool qkvi_attend_turn(qkvi_attend_call *state, bool *more);

#endif
