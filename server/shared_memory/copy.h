// Copies from and to mapped memory of a client, which may take it away at any time: where an object of shared memory
// is truncated, or the machine has no page for it, touching the mapping raises SIGBUS.
//
// Clients' memory is accessed only here, and its content is used only after it was copied. A thread announces which
// bytes it is about to touch; a SIGBUS of that thread at one of them ends the copy. Any other one goes to the
// previous handler, so that a fault of our own still ends the process.
//
// Threads: any, after setup.
#ifndef QKV_SERVER_SHARED_MEMORY_COPY_H
#define QKV_SERVER_SHARED_MEMORY_COPY_H

#include <stdbool.h>
#include <stddef.h>

// Installs the handler of SIGBUS, once for the process, for good.
void qkvi_copy_setup(void);

// Whether all `bytes` were copied from, or to, `lent`, which is the client's. Where it is false, some may have been.
// `ours` and `lent` do not overlap.
bool qkvi_copy_from(void *ours, const void *lent, size_t bytes);
bool qkvi_copy_to(void *lent, const void *ours, size_t bytes);

#endif
