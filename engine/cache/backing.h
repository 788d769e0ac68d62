// A tier below memory, where sealed pages are kept: one table of functions. The SSD's is in
// server/residency/write_back.c, tests have doubles. To add a tier is to write this table. The engine itself has no
// I/O.
//
//   seal ──► put ──► WAITING ──► WRITTEN ──► DURABLE        evict: the image leaves memory, the record stays
//                       └──────────┴─► GONE                 restore: read_begin, read_wait for each, read_end
//
// A page is put once, as it was first coded. Planes are dropped in memory alone and not before the record is DURABLE,
// so that full precision can be restored from it; unless the tier takes nothing (`health`).
//
// Exact rows are put as they are appended where put_rows is there; their records are dropped once pages that cover
// them are DURABLE.
//
// Threads: any; all but `context` is constant. The functions are called with a layer locked for reading or writing,
// and never wait. Those that read records, put_fold and read_fold are called without its lock, and wait for the tier.
#ifndef QKV_ENGINE_CACHE_BACKING_H
#define QKV_ENGINE_CACHE_BACKING_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/base/status.h"
#include "engine/cache/model.h"
#include "engine/cache/page_range.h"
#include "engine/cache/prefix_index.h"

typedef enum qkv_record_state {
  QKV_RECORD_GONE,     // could not be written or made durable, or was dropped
  QKV_RECORD_WAITING,  // on its way
  QKV_RECORD_WRITTEN,  // can be read back by this process
  QKV_RECORD_DURABLE,  // and by the next one
} qkv_record_state;

#define QKV_BACKING_LAYERS UINT32_MAX

// Bytes that a tier holds, with what it has not cleaned up yet, and that it may hold; UINT64_MAX: as many as fit.
typedef struct qkv_tier_capacity {
  uint64_t bytes, bytes_max;
} qkv_tier_capacity;

typedef struct qkv_backing {
  void *context;
  // Takes a page of a session of the model, of which the first `tokens` are valid, and releases it (qkv_page_let_go)
  // once it is stored or not needed any more. Returns the number of its record, larger than all before; 0: no
  // headroom for it now, and it has been released. `hash`: the chained hash of the token ids up to the page's end
  // (prefix_index.h); NULL: not known, or not asked of this layer.
  uint64_t (*put)(void *context, uint64_t session, const qkv_model *model, qkv_page_hold *page, uint32_t tokens,
                  const qkv_prefix_hash *hash);
  // Copies exact rows of one layer: k [tokens][kv_heads][key_dim] and v [tokens][kv_heads][value_dim] in the model's
  // dtype, 1 to 64 tokens from `position` on, and their token ids [tokens]; NULL: not all known, or not asked of this
  // layer. `*tokens` gets how many of them it took, the first ones, 1 at least. Returns as put() does; state() and
  // drop() take the record, too. NULL: exact rows are not kept beyond memory.
  uint64_t (*put_rows)(void *context, uint64_t session, const qkv_model *model, uint32_t layer, uint64_t position,
                       uint32_t *tokens, const void *k, const void *v, const uint32_t *ids);
  // Puts what a session is made again from (session_fold.h), copied, and waits until it can be read. state() and
  // drop() take the record, too. 0: the tier does not take it, or `*stop` became true. NULL: sessions are not folded.
  uint64_t (*put_fold)(void *context, uint64_t session, const void *bytes, uint64_t count, const _Atomic bool *stop);
  // From there on no other record of the session is asked for until this has read the last one that was put. `*bytes`
  // gets a buffer, which the caller frees, `*record` the number of the record. Errors are read_wait's.
  qkv_status (*read_fold)(void *context, uint64_t session, uint64_t *record, uint8_t **bytes, uint64_t *count,
                          qkv_error *error);
  // What read_fold has read is kept: no other record of the session is asked for before it is read again. May be
  // NULL.
  void (*keep_fold)(void *context, uint64_t session);
  qkv_record_state (*state)(void *context, uint64_t record);
  // The record is not needed any more.
  void (*drop)(void *context, uint64_t record);
  // OK: the tier takes what is put of this session (0: of any). Otherwise what is not there may never be:
  // RESOURCE_EXHAUSTED: it is full; INTERNAL: it has failed, or could not write a truncation of the session.
  qkv_status (*health)(void *context, uint64_t session);
  qkv_tier_capacity (*capacity)(void *context);
  // Truncates what was put of this layer up to now at `position`, for the next process, too. Layer model->layers: the
  // hashes alone of token ids that records of the last layer have. QKV_BACKING_LAYERS: all layers and these hashes,
  // of which the next process finds all truncated, or none.
  void (*cut)(void *context, uint64_t session, uint32_t layer, uint64_t position);
  // Begins to read records (copied) in their order, up to `ahead_bytes`, but one at least, in front of what has been
  // waited for. Never NULL.
  void *(*read_begin)(void *context, const uint64_t *records, size_t count, uint64_t ahead_bytes);
  // Waits for the i-th record and fills `image` with its `bytes`. Each once, by any thread, best in order. NOT_FOUND:
  // it is not there any more; DATA_LOSS: it is damaged, with the reason; others as the device says.
  qkv_status (*read_wait)(void *reading, size_t i, void *image, uint64_t bytes, qkv_error *error);
  // When no thread waits any more.
  void (*read_end)(void *reading);
} qkv_backing;

#endif
