// Copies from and to memory that is mapped here and belongs to a client, who may take it away at any time: where an
// object of shared memory is truncated, or the machine has no page for it, touching the mapping is a SIGBUS.
//
// The copy is the only place where such memory is touched, and nothing that was read is looked at before it is ours.
// A thread says which bytes it is about to touch; a SIGBUS of that thread at one of them ends the copy. Any other one
// goes to what was there before, so that a fault of our own still ends the process.
//
// Threads: any, after setup.
#ifndef QKV_SERVER_SHARED_MEMORY_COPY_H
#define QKV_SERVER_SHARED_MEMORY_COPY_H

#include <stdbool.h>
#include <stddef.h>

// Takes SIGBUS, once for the process, which keeps it.
void qkvi_copy_setup(void);

// Whether all `bytes` came from, or went to, `lent`, which is the client's. Where it is false, some may have. `ours`
// and `lent` do not overlap.
bool qkvi_copy_from(void *ours, const void *lent, size_t bytes);
bool qkvi_copy_to(void *lent, const void *ours, size_t bytes);

#endif
