// Appending one item, as Append, Attend and Decode do it.
#ifndef QKV_SERVER_APPEND_H
#define QKV_SERVER_APPEND_H

#include "server/daemon.h"
#include "server/items.h"

// Rows beyond so many bytes in one message are appended on the compute pool, not on the thread of the
// completion queue: copying and checking them takes longer than waking a thread.
#define QKVI_INLINE_ROWS_MAX 131072

// Appends the item's rows (it has some) to its session and counts them. `*appended` gets the tokens that are
// new, `*length` the layer's length. Errors are qkv_session_append's.
qkv_status qkvi_append_item(qkv_daemon *daemon, qkv_session *session, const qkvi_item *item, uint64_t *appended,
                            uint64_t *length, qkv_error *error);

#endif
