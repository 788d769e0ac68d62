// The engine left out (option `discard`), so that a benchmark measures the transport alone.
//
// Appended rows are parsed, their shape is checked, and they are acknowledged and dropped: the layer's length
// stays, and no position is refused. Fetch is answered, for any range, out of one shared buffer of noise: zeros would
// flatter anything that compresses or shares pages.
#ifndef QKV_SERVER_HANDLERS_DISCARD_H
#define QKV_SERVER_HANDLERS_DISCARD_H

#include <stddef.h>

#include "engine/cache/session.h"
#include "server/handlers/items.h"

// Bytes of noise, at least: the most that one tensor of a Fetch response can ask for.
#define QKVI_DISCARD_BYTES (16u << 20)

// Takes the place of qkv_session_append. INVALID_ARGUMENT: layer or shape.
qkv_status qkvi_discard_append(qkv_session *session, const qkvi_item *item, uint64_t *appended, uint64_t *length,
                               qkv_error *error);

// QKVI_DISCARD_BYTES of finite fp16, which stay. Made on the first call; any thread.
const void *qkvi_discard_rows(void);

#endif
