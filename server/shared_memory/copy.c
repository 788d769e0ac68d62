#include "server/shared_memory/copy.h"

#include <assert.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

typedef struct copy_guard {
  uintptr_t begin, end;  // bytes that may fail
  sigjmp_buf failed;
} copy_guard;

static _Thread_local copy_guard *volatile guarding;  // NULL: this thread accesses no client memory
static struct sigaction before;

// siglongjmp leaves a memcpy, which POSIX lists among the functions that a handler may interrupt, and restores the
// signal mask, which includes this signal while it is handled.
static void on_bus(int number, siginfo_t *info, void *context) {
  (void)context;
  copy_guard *guard = guarding;
  const uintptr_t at = (uintptr_t)info->si_addr;
  if (info->si_code > 0 && guard != NULL && at >= guard->begin && at < guard->end) siglongjmp(guard->failed, 1);
  (void)sigaction(number, &before, NULL);       // a fault is raised again
  if (info->si_code <= 0) (void)raise(number);  // a signal that a process has sent is not
}

static void take_signal(void) {
  struct sigaction action = {.sa_sigaction = on_bus, .sa_flags = SA_SIGINFO | SA_ONSTACK};
  (void)sigemptyset(&action.sa_mask);
  const int failed = sigaction(SIGBUS, &action, &before);
  assert(failed == 0);
  (void)failed;
}

void qkvi_copy_setup(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  (void)pthread_once(&once, take_signal);
}

static bool copy(void *to, const void *from, size_t bytes, const void *lent) {
  copy_guard guard = {.begin = (uintptr_t)lent, .end = (uintptr_t)lent + bytes};
  if (bytes == 0) return true;
  assert(guarding == NULL);
  if (sigsetjmp(guard.failed, 1) != 0) {
    guarding = NULL;
    return false;
  }
  guarding = &guard;
  atomic_signal_fence(memory_order_seq_cst);  // the copy stays between the two
  memcpy(to, from, bytes);
  atomic_signal_fence(memory_order_seq_cst);
  guarding = NULL;
  return true;
}

bool qkvi_copy_from(void *ours, const void *lent, size_t bytes) {
  return copy(ours, lent, bytes, lent);
}

bool qkvi_copy_to(void *lent, const void *ours, size_t bytes) {
  return copy(lent, ours, bytes, lent);
}
