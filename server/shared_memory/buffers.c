#include "server/shared_memory/buffers.h"

#include <assert.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { KEPT_COUNT = 16, ALIGNMENT = 64, HUGE_PAGE = 2 << 20, IDLE_MS = 5000 };

typedef struct kept_buffer {
  qkvi_buffer buffer;     // data NULL: none
  int64_t idle_since_ms;  // as of the last tend; 0: returned since
} kept_buffer;

struct qkvi_buffers {
  pthread_mutex_t lock;
  size_t kept_max, bytes;  // of `kept`
  kept_buffer kept[KEPT_COUNT];
};

qkvi_buffers *qkvi_buffers_create(size_t kept_max) {
  qkvi_buffers *buffers = calloc(1, sizeof *buffers);
  if (buffers == NULL) abort();
  const int failed = pthread_mutex_init(&buffers->lock, NULL);
  assert(failed == 0);
  (void)failed;
  buffers->kept_max = kept_max;
  return buffers;
}

void qkvi_buffers_destroy(qkvi_buffers **buffers) {
  qkvi_buffers *old = *buffers;
  if (old == NULL) return;
  *buffers = NULL;
  for (size_t i = 0; i < KEPT_COUNT; i++) free(old->kept[i].buffer.data);
  (void)pthread_mutex_destroy(&old->lock);
  free(old);
}

// The smallest that is large enough, or an empty place. With the lock.
static kept_buffer *find(qkvi_buffers *buffers, size_t bytes) {
  kept_buffer *found = NULL;
  for (size_t i = 0; i < KEPT_COUNT; i++) {
    kept_buffer *kept = &buffers->kept[i];
    if (kept->buffer.data == NULL || kept->buffer.bytes < bytes) continue;
    if (found == NULL || kept->buffer.bytes < found->buffer.bytes) found = kept;
  }
  return found;
}

// With the lock. The caller gets the buffer.
static qkvi_buffer take_out(qkvi_buffers *buffers, kept_buffer *kept) {
  const qkvi_buffer buffer = kept->buffer;
  buffers->bytes -= buffer.bytes;
  *kept = (kept_buffer){0};
  return buffer;
}

static qkvi_buffer make(size_t bytes) {
  const size_t unit = bytes < HUGE_PAGE ? ALIGNMENT : HUGE_PAGE;
  qkvi_buffer buffer = {.bytes = (bytes + unit - 1) / unit * unit};
  buffer.data = aligned_alloc(unit, buffer.bytes);
  if (buffer.data == NULL) abort();
  if (unit == HUGE_PAGE) (void)madvise(buffer.data, buffer.bytes, MADV_HUGEPAGE);  // where there are some
  return buffer;
}

qkvi_buffer qkvi_buffers_borrow(qkvi_buffers *buffers, size_t bytes) {
  qkvi_buffer buffer = {0};
  assert(bytes > 0);
  (void)pthread_mutex_lock(&buffers->lock);
  kept_buffer *kept = find(buffers, bytes);
  if (kept != NULL) buffer = take_out(buffers, kept);
  (void)pthread_mutex_unlock(&buffers->lock);
  return buffer.data != NULL ? buffer : make(bytes);
}

void qkvi_buffers_return(qkvi_buffers *buffers, qkvi_buffer *buffer) {
  if (buffer->data == NULL) return;
  uint8_t *unwanted = buffer->data;
  (void)pthread_mutex_lock(&buffers->lock);
  for (size_t i = 0; i < KEPT_COUNT && buffer->bytes <= buffers->kept_max - buffers->bytes; i++) {
    if (buffers->kept[i].buffer.data != NULL) continue;
    buffers->kept[i] = (kept_buffer){.buffer = *buffer};
    buffers->bytes += buffer->bytes;
    unwanted = NULL;
    break;
  }
  (void)pthread_mutex_unlock(&buffers->lock);
  free(unwanted);
  *buffer = (qkvi_buffer){0};
}

void qkvi_buffers_tend(qkvi_buffers *buffers, int64_t now_ms) {
  qkvi_buffer idle = {0};
  (void)pthread_mutex_lock(&buffers->lock);
  for (size_t i = 0; i < KEPT_COUNT; i++) {
    kept_buffer *kept = &buffers->kept[i];
    if (kept->buffer.data == NULL) continue;
    if (kept->idle_since_ms == 0) kept->idle_since_ms = now_ms;
    if (now_ms - kept->idle_since_ms < IDLE_MS || idle.data != NULL) continue;
    idle = take_out(buffers, kept);
  }
  (void)pthread_mutex_unlock(&buffers->lock);
  free(idle.data);
}

size_t qkvi_buffers_kept(qkvi_buffers *buffers) {
  (void)pthread_mutex_lock(&buffers->lock);
  const size_t bytes = buffers->bytes;
  (void)pthread_mutex_unlock(&buffers->lock);
  return bytes;
}
