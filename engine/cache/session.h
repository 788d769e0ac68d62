// A session: the KV cache of one sequence, and the lock of each of its layers.
//
// Reference counted: the store holds one reference while the session is open, every user of it another.
// Closing takes it out of the store; its memory goes when the last user is done.
//
// Threads: any. Each layer has a read-write lock: appends and truncation exclude each other and readers;
// attends and fetches run together. A writer that waits goes before readers that come later, so a thread must not
// read a layer that it reads already. Lock order: layers in ascending order of (session address, layer).
//
// Memory: the session itself, with its layers' locks and tables, about 300 bytes a layer, and with a quality contract
// the queries that it is held by (qkv_quality_bytes a layer), is the arena's like the rows; usage counts the rows
// alone.
#ifndef QKV_ENGINE_CACHE_SESSION_H
#define QKV_ENGINE_CACHE_SESSION_H

#include <stdatomic.h>
#include <stdint.h>

#include "engine/cache/attend.h"
#include "engine/cache/coding.h"
#include "engine/cache/layer.h"

// Whether pages are written beyond memory; when an append is acknowledged is the daemon's business. The values are
// those of qkv.v1.Durability.
typedef enum qkv_durability {
  QKV_DURABILITY_MEMORY = 1,
  QKV_DURABILITY_ASYNC = 2,
  QKV_DURABILITY_SYNC = 3
} qkv_durability;

typedef struct qkv_session_config {
  char name[QKV_NAME_MAX + 1];
  char tenant[QKV_NAME_MAX + 1];
  qkv_purpose purpose;
  qkv_policy policy;  // what the session says; merged with the model's and the store's on opening
  uint64_t first_position;
  qkv_ema_options ema;         // attention is counted where sample_every is not 0
  bool keep_full;              // layer.h
  double max_attention_error;  // quality.h; 0: no contract
  double tier_bits;            // what its owner brings it to (session_retier.h); 0: nothing. Not looked at here
  qkv_durability durability;   // 0: MEMORY
  const qkv_backing *backing;  // not with MEMORY; outlives the session
  uint64_t id;                 // as the backing knows it: unique for ever
  uint64_t ttl_ms;             // unused for so long, it has expired; 0: never
  bool pinned;                 // nothing of it leaves memory
  uint64_t *room;              // that it is created in (arena.h), or NULL; not looked at afterwards
  qkv_pool *pool;              // helps to encode (layer.h), and outlives the session; NULL: nobody does. The store's
} qkv_session_config;

typedef struct qkv_session qkv_session;

typedef struct qkv_session_info {
  qkv_session_config config;  // resolved; ttl_ms and pinned as they are now
  const qkv_model *model;     // alive while the session is
  qkv_layer_usage usage;      // over all layers
  int64_t created_unix_ms, last_used_unix_ms;
  int64_t last_used_ms;  // on the monotonic clock
} qkv_session_info;

// `config` is resolved and `model` outlives the session (the store's). `*out` gets one reference.
// RESOURCE_EXHAUSTED (the arena's).
qkv_status qkv_session_create(const qkv_session_config *config, const qkv_model *model, qkv_arena *arena,
                              qkv_session **out, qkv_error *error);
qkv_session *qkv_session_ref(qkv_session *session);
void qkv_session_unref(qkv_session **session);

const qkv_model *qkv_session_model(const qkv_session *session);
const char *qkv_session_name(const qkv_session *session);
const qkv_session_config *qkv_session_config_of(const qkv_session *session);  // resolved
// Unique in the process: tells a session from a later one of its name, where no reference is held meanwhile.
uint64_t qkv_session_serial(const qkv_session *session);

// A use of the session, though nothing is done.
void qkv_session_touch(qkv_session *session);
void qkv_session_set_ttl(qkv_session *session, uint64_t ttl_ms);
void qkv_session_set_pinned(qkv_session *session, bool pinned);
bool qkv_session_expired(const qkv_session *session);

// As qkv_layer_append; pages that are sealed are given to the backing. INVALID_ARGUMENT "layer is 6, the model tinylm
// has 6 layers". `*length` gets the layer's length afterwards, 0 where there is no such layer.
qkv_status qkv_session_append(qkv_session *session, uint32_t layer, uint64_t position, const qkv_tensor *k,
                              const qkv_tensor *v, bool before_rope, uint64_t *appended, uint64_t *length,
                              qkv_error *error);

// The same in a room (arena.h).
qkv_status qkv_session_append_in(qkv_session *session, uint32_t layer, uint64_t *room, uint64_t position,
                                 const qkv_tensor *k, const qkv_tensor *v, bool before_rope, uint64_t *appended,
                                 uint64_t *length, qkv_error *error);

// A layer for reading: attend and rows. Every read must be followed by its done. INVALID_ARGUMENT as above.
qkv_status qkv_session_read(qkv_session *session, uint32_t layer, const qkv_layer **out, qkv_error *error);
// The same two for threads that must not wait: UNAVAILABLE, with *error left alone and nothing changed, where another
// thread has the layer.
qkv_status qkv_session_try_append(qkv_session *session, uint32_t layer, uint64_t position, const qkv_tensor *k,
                                  const qkv_tensor *v, bool before_rope, uint64_t *appended, uint64_t *length,
                                  qkv_error *error);
qkv_status qkv_session_try_read(qkv_session *session, uint32_t layer, const qkv_layer **out, qkv_error *error);
void qkv_session_read_done(qkv_session *session, uint32_t layer);

// `layer_count` 0: all of them.
qkv_status qkv_session_truncate(qkv_session *session, uint64_t position, const uint32_t *layers, size_t layer_count,
                                qkv_error *error);

// Each layer as its last append or truncation left it; never waits for one that runs. `lengths`, where not NULL, has
// room for model->layers.
void qkv_session_read_info(qkv_session *session, qkv_session_info *info, uint64_t *lengths);
// For each of model->layers: positions below survive the process, as far as is known (session_spill.h).
void qkv_session_read_durable(qkv_session *session, uint64_t *durable);
// Whether that holds for all rows of the layer that are below `end` and not exact. The layer is below the model's
// (asserted).
bool qkv_session_is_durable(qkv_session *session, uint32_t layer, uint64_t end);

#endif
