#include "storage/wake.h"

#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

static void on_event(uv_poll_t *poll, int status, int events) {
  qkvi_wake *wake = poll->data;
  eventfd_t count;
  (void)status;
  (void)events;
  (void)eventfd_read(wake->event, &count);
  // Before `run`: a thread that rings from here on is heard again.
  atomic_exchange(&wake->rung, false);
  wake->run(wake->context);
}

void qkvi_wake_init(uv_loop_t *loop, qkvi_wake *wake, void (*run)(void *context), void *context) {
  wake->event = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (wake->event < 0) abort();
  atomic_init(&wake->rung, false);
  wake->run = run;
  wake->context = context;
  if (uv_poll_init(loop, &wake->poll, wake->event) != 0) abort();
  wake->poll.data = wake;
  if (uv_poll_start(&wake->poll, UV_READABLE, on_event) != 0) abort();
}

void qkvi_wake_ring(qkvi_wake *wake) {
  if (!atomic_exchange(&wake->rung, true)) (void)eventfd_write(wake->event, 1);
}

void qkvi_wake_deinit(qkvi_wake *wake) {
  uv_poll_stop(&wake->poll);
  close(wake->event);
}
