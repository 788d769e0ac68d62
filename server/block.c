#include "server/block.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>

static _Atomic uint64_t bytes_held;

qkv_status qkvi_block_create(uint64_t bytes, uint64_t limit, qkvi_response_block **out, qkv_error *error) {
  const uint64_t rounded = (bytes + 63) / 64 * 64;
  const uint64_t before = atomic_fetch_add_explicit(&bytes_held, rounded, memory_order_relaxed);
  if (before + rounded > limit) {
    (void)atomic_fetch_sub_explicit(&bytes_held, rounded, memory_order_relaxed);
    return qkv_fail(error, QKV_RESOURCE_EXHAUSTED,
                    "limit-response-bytes is %" PRIu64 " bytes, %" PRIu64 " are on their way, %" PRIu64
                    " more are needed",
                    limit, before, rounded);
  }
  qkvi_response_block *block = aligned_alloc(64, sizeof *block + rounded);
  if (block == NULL) abort();
  atomic_init(&block->references, 1);
  block->bytes = rounded;
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
  // What every holder did before it let go happens before the last one frees.
  if (atomic_fetch_sub_explicit(&left->references, 1, memory_order_acq_rel) != 1) return;
  (void)atomic_fetch_sub_explicit(&bytes_held, left->bytes, memory_order_relaxed);
  free(left);
}

uint64_t qkvi_block_bytes(void) {
  return atomic_load_explicit(&bytes_held, memory_order_relaxed);
}
