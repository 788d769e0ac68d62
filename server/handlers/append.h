// Appending one item, as Append, Attend and Decode do it.
#ifndef QKV_SERVER_HANDLERS_APPEND_H
#define QKV_SERVER_HANDLERS_APPEND_H

#include "server/daemon.h"
#include "server/handlers/items.h"
#include "server/handlers/jobs.h"

// Requests with more bytes of rows (and queries) than this go to the compute pool, not through the thread of the
// completion queue, which they would block. Measured with scalar kernels on 2 vCPUs, fp32 rows of 2 KV heads of 16
// and 24 coordinates, appended and coded: 5 KiB 86 us, 20 KiB 377 us, 80 KiB 2.1 ms, 512 KiB 10.7 ms; the hop to the
// pool costs 15 to 40 us.
#define QKVI_INLINE_ROWS_MAX 16384

// Messages with more bytes than this are parsed by a job: everything in them but rows is walked field by field, at
// worst 17 ns a byte.
#define QKVI_INLINE_MESSAGE_MAX 65536

// Appends the item's rows (it has some) to its session and counts them. Ends soon after the client of `call` has
// gone. `*appended` gets the tokens that are new, `*length` the layer's length. Errors are qkv_session_append's;
// QKV_UNAVAILABLE, with *error left alone, where it has to wait for more (server/handlers/jobs.h).
qkv_status qkvi_append_item(const qkv_rpc_call *call, qkv_session *session, const qkvi_item *item, qkvi_waits *waits,
                            uint64_t *appended, uint64_t *length, qkv_error *error);

// Waits until the rows of a SYNC session are durable, before its appends are acknowledged. QKV_UNAVAILABLE as above,
// or with *error filled where the write fails.
qkv_status qkvi_append_sync(const qkv_rpc_call *call, qkv_session *session, qkvi_waits *waits, qkv_error *error);

#endif
