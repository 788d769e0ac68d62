#include "client/common/interrupt.h"

#include <signal.h>
#include <stddef.h>

static volatile sig_atomic_t interrupted;

static void on_signal(int signal) {
  (void)signal;
  interrupted = 1;
}

void qkv_interrupt_catch(void) {
  const struct sigaction action = {.sa_handler = on_signal, .sa_flags = (int)SA_RESETHAND};
  sigaction(SIGINT, &action, NULL);
  sigaction(SIGTERM, &action, NULL);
}

bool qkv_interrupted(void) {
  return interrupted != 0;
}
