// Where the kernels run that gpu/attend and gpu/rows compare: the emulator (launch_emulator.c), or a GPU
// (on_device.c).
#ifndef QKV_TESTS_GPU_LAUNCH_H
#define QKV_TESTS_GPU_LAUNCH_H

#include <stdbool.h>

#include "engine/kernel/simt/operands.h"

// Addresses are the host's: partials and turned blocks are scratch, each merge's `out` gets the result.
typedef struct launch_work {
  const qkv_simt_shape *shape;
  const qkv_simt_tables *tables;
  const qkv_simt_range *ranges;  // [count]
  const qkv_simt_merge *merges;  // [count]
  const qkv_simt_turn *turns;    // [count], of a calibrated shape
  uint32_t count;
  uint64_t order;  // of threads, on the emulator
} launch_work;

// Before the first launch: false where there is nothing to run on, which is said. What is added to all seeds.
bool launch_begin(int argc, char **argv, uint64_t *first_seed);
// Attends the ranges and merges their runs.
void launch_attend(const launch_work *work);

// Pages to rows: each job's `out` gets its rows, the bytes between them are as they were.
typedef struct launch_decode_work {
  const qkv_simt_decode *jobs;  // [count], of dim up to `dim`
  const size_t *code_bytes;     // [count]
  const qkv_simt_row_tables *tables;
  uint32_t count, dim;
  uint64_t order;
} launch_decode_work;
void launch_decode(const launch_decode_work *work);

// Rows to codes; each job's rows take tokens * stride bytes, its `out` gets the result.
typedef struct launch_encode_work {
  const qkv_simt_encode *jobs;  // [count]
  const size_t *code_bytes;     // [count]
  const qkv_simt_encode_tables *tables;
  uint32_t count, dim;
  uint64_t order;
} launch_encode_work;
void launch_encode(const launch_encode_work *work);

// After the last: the exit status.
int launch_end(void);

#endif
