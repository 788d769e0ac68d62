// Runs kernels written with engine/kernel/simt/simt.h without a GPU. Each thread of a block is a fiber; blocks run
// one after the other. A fiber runs until it comes to a meeting (barrier, exchange, vote, product, copy) that others
// are still missing at.
//
// What it finds, as a message with the block, the thread and the places, and an abort:
//   threads at different meetings, threads that never come, waits for copies that nobody begins or out of order
// and what else shows in results or under a sanitizer:
//   shared memory that nobody wrote     it is 0xa5, and so is a copy's target until the copy was waited for
//   an order of threads that matters    `order` chooses one of many
//   accesses outside of shared memory   AddressSanitizer: it is allocated to the byte, anew for each block
//   a missing barrier                   ThreadSanitizer: switching fibers orders nothing; barriers and waits for
//                                       copies do; exchanges, votes and products do not
//
// Threads: its state is global. One launch at a time; callers lock.
#ifndef QKV_TESTS_GPU_EMULATOR_H
#define QKV_TESTS_GPU_EMULATOR_H

#include <stddef.h>
#include <stdint.h>

typedef void emulator_kernel(const void *args);

typedef struct emulator_launch {
  emulator_kernel *kernel;
  const void *args;
  unsigned blocks, threads;  // threads of a block: a multiple of 32, at most 1024
  size_t shared_bytes;       // of a block
  uint64_t order;            // 0: ascending threads, 1: descending, else a random order of its own
} emulator_launch;

void emulator_run(const emulator_launch *launch);

// Loads of 16 bytes a thread from shared memory since the start. The memory delivers 128 bytes a step, 8 threads at a
// time, as far as these are in different banks or the same place; so 32 threads take 4 steps at least.
typedef struct emulator_loads {
  const char *place;      // "file:line"
  uint64_t loads, steps;  // of whole warps
} emulator_loads;

// The n-th place of loads; false: there are fewer.
int emulator_loads_at(size_t n, emulator_loads *loads);

#endif
