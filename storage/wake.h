// Wakes a loop from other threads, by an eventfd.
//
// uv_async_send does the same, but the loop spins until a sender that has begun has ended (libuv 1.44). Senders here
// may yield (engine/base/yield.h) and lose the processor in between.
#ifndef QKV_STORAGE_WAKE_H
#define QKV_STORAGE_WAKE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <uv.h>

typedef struct qkvi_wake {
  uv_poll_t poll;
  int event;
  _Atomic bool rung;  // since the last run
  void (*run)(void *context);
  void *context;
} qkvi_wake;

// `run` is called by the loop, once or more often after each ring. The wake keeps the loop alive until it is closed.
void qkvi_wake_init(uv_loop_t *loop, qkvi_wake *wake, void (*run)(void *context), void *context);
// Any thread. What was written before is seen by `run`.
void qkvi_wake_ring(qkvi_wake *wake);
// When no thread rings any more, by the loop's thread; then uv_close of `poll`.
void qkvi_wake_deinit(qkvi_wake *wake);

#endif
