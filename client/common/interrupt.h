// SIGINT and SIGTERM while a program does what it must not leave half done: it looks now and then, ends it in order,
// and says what has become of it.
//
// Threads: caught by any; asked by any.
#ifndef QKV_CLIENT_COMMON_INTERRUPT_H
#define QKV_CLIENT_COMMON_INTERRUPT_H

#include <stdbool.h>

// From now on the first SIGINT or SIGTERM is recorded; a second one ends the program at once.
void qkv_interrupt_catch(void);
// Whether one has come since.
bool qkv_interrupted(void);

#endif
