// Fetch with `coded`: a run of coded pages, copied out of a layer, for one response.
//
// Threads: created while the layer is read; after that it is the caller's alone.
#ifndef QKV_SERVER_HANDLERS_FETCH_CODED_H
#define QKV_SERVER_HANDLERS_FETCH_CODED_H

#include <stdint.h>

#include "engine/cache/session.h"
#include "proto/wire.h"
#include "server/daemon.h"

typedef struct qkvi_coded_run qkvi_coded_run;

// What is requested of a layer that is held for reading.
typedef struct qkvi_coded_wanted {
  const qkv_rpc_call *call;
  qkv_session *session;
  const qkv_layer *layer;
  uint64_t begin, end;  // positions; `begin` is in a page (asserted)
  uint32_t tokens_max;  // that the client wants in a response; 0: not given
} qkvi_coded_wanted;

// Copies the pages from that of `begin` on, as many as a response takes, at least one. QKV_UNAVAILABLE, with *error
// left alone, where the first one is cold; RESOURCE_EXHAUSTED: limit-response-bytes. *out is then NULL.
qkv_status qkvi_coded_run_create(const qkv_daemon *daemon, const qkvi_coded_wanted *wanted, qkvi_coded_run **out,
                                 qkv_error *error);
void qkvi_coded_run_destroy(qkvi_coded_run **run);  // NULL is none

// Position of the first page, and tokens of all.
uint64_t qkvi_coded_run_position(const qkvi_coded_run *run);
uint64_t qkvi_coded_run_tokens(const qkvi_coded_run *run);
// Writes FetchResponse.pages. The images are referenced: each piece's owner is a block (server/handlers/block.h) that
// holds a reference of its own. Returns their bytes.
uint64_t qkvi_coded_run_put(const qkvi_coded_run *run, qkv_wire_writer *writer);

#endif
