#include "server/handlers/block.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>

#include "server/rpc/rpc.h"

typedef enum held { RESPONSES, REQUESTS, KINDS } held;

struct qkvi_holder {
  _Atomic uint64_t references, bytes[KINDS];
};

static _Atomic uint64_t bytes_held[KINDS];

// Of errors.
static const struct {
  const char *limit, *state;
} words[KINDS] = {[RESPONSES] = {"limit-response-bytes is", "are on their way"},
                  [REQUESTS] = {"messages that have arrived may have", "are being served"}};

// ---- Holders ----

qkvi_holder *qkvi_holder_create(void) {
  qkvi_holder *holder = malloc(sizeof *holder);
  if (holder == NULL) abort();
  atomic_init(&holder->references, 1);
  for (size_t i = 0; i < KINDS; i++) atomic_init(&holder->bytes[i], 0);
  return holder;
}

static qkvi_holder *ref(qkvi_holder *holder) {
  (void)atomic_fetch_add_explicit(&holder->references, 1, memory_order_relaxed);
  return holder;
}

void qkvi_holder_unref(qkvi_holder *holder) {
  if (atomic_fetch_sub_explicit(&holder->references, 1, memory_order_acq_rel) == 1) free(holder);
}

// `most` is the holder's limit, unless it has nothing yet.
static qkv_status take(held kind, qkvi_holder *holder, uint64_t bytes, uint64_t most, const char *whose,
                       uint64_t limit, qkv_error *error) {
  const uint64_t before = atomic_fetch_add_explicit(&holder->bytes[kind], bytes, memory_order_relaxed);
  if (before == 0 || before + bytes <= most) return QKV_OK;
  (void)atomic_fetch_sub_explicit(&holder->bytes[kind], bytes, memory_order_relaxed);
  return qkv_fail(error, QKV_RESOURCE_EXHAUSTED,
                  "%s %" PRIu64 " bytes, of which this %s may have %" PRIu64 " now: %" PRIu64 " %s, %" PRIu64
                  " more are needed",
                  words[kind].limit, limit, whose, most, before, words[kind].state, bytes);
}

static void give(held kind, qkvi_holder *holder, uint64_t bytes) {
  (void)atomic_fetch_sub_explicit(&holder->bytes[kind], bytes, memory_order_relaxed);
}

static qkv_status take_all(held kind, const qkvi_holders *holders, uint64_t bytes, uint64_t limit, qkv_error *error) {
  const uint64_t before = atomic_fetch_add_explicit(&bytes_held[kind], bytes, memory_order_relaxed);
  qkv_status status = QKV_OK;
  if (before + bytes > limit)
    status =
        qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "%s %" PRIu64 " bytes, %" PRIu64 " %s, %" PRIu64 " more are needed",
                 words[kind].limit, limit, before, words[kind].state, bytes);
  const uint64_t left = limit - before - bytes;
  if (status == QKV_OK) status = take(kind, holders->tenant, bytes, 2 * left, "tenant", limit, error);
  if (status == QKV_OK) {
    status = take(kind, holders->connection, bytes, left, "connection", limit, error);
    if (status != QKV_OK) give(kind, holders->tenant, bytes);
  }
  if (status != QKV_OK) (void)atomic_fetch_sub_explicit(&bytes_held[kind], bytes, memory_order_relaxed);
  return status;
}

static void give_all(held kind, const qkvi_holders *holders, uint64_t bytes) {
  (void)atomic_fetch_sub_explicit(&bytes_held[kind], bytes, memory_order_relaxed);
  give(kind, holders->connection, bytes);
  give(kind, holders->tenant, bytes);
}

// ---- Requests ----

qkv_status qkvi_request_take(const qkvi_holders *holders, uint64_t bytes, uint64_t limit, qkv_error *error) {
  return take_all(REQUESTS, holders, bytes, limit, error);
}

void qkvi_request_give(const qkvi_holders *holders, uint64_t bytes) {
  give_all(REQUESTS, holders, bytes);
}

// ---- Blocks ----

qkv_status qkvi_block_create(const qkv_rpc_call *call, uint64_t bytes, uint64_t limit, qkvi_response_block **out,
                             qkv_error *error) {
  const uint64_t rounded = (bytes + 63) / 64 * 64;
  const qkvi_holders holders = qkvi_rpc_holders(call);
  QKV_TRY(take_all(RESPONSES, &holders, rounded, limit, error));
  qkvi_response_block *block = aligned_alloc(64, sizeof *block + rounded);
  if (block == NULL) abort();
  atomic_init(&block->references, 1);
  block->bytes = rounded;
  block->holders = (qkvi_holders){.connection = ref(holders.connection), .tenant = ref(holders.tenant)};
  *out = block;
  return QKV_OK;
}

void qkvi_block_hold(qkvi_response_block *block) {
  uint64_t before = atomic_fetch_add_explicit(&block->references, 1, memory_order_relaxed);
  assert(before > 0);
}

void qkvi_block_release(void *block) {
  qkvi_response_block *left = block;
  if (left == NULL) return;
  // What every holder did before its release happens before the last one frees.
  if (atomic_fetch_sub_explicit(&left->references, 1, memory_order_acq_rel) != 1) return;
  give_all(RESPONSES, &left->holders, left->bytes);
  qkvi_holder_unref(left->holders.connection);
  qkvi_holder_unref(left->holders.tenant);
  free(left);
}

uint64_t qkvi_block_bytes(void) {
  return atomic_load_explicit(&bytes_held[RESPONSES], memory_order_relaxed);
}
