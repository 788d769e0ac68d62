#include <stdlib.h>
#include <string.h>

#include "tests/gpu/kernels.h"
#include "tests/gpu/launch.h"

bool launch_begin(int argc, char **argv, uint64_t *first_seed) {
  *first_seed = argc > 1 ? strtoull(argv[1], NULL, 10) : 0;
  return true;
}

static emulator_kernel *kernel_of(const char *name) {
  for (size_t i = 0; i < sizeof kernels_all / sizeof *kernels_all; i++) {
    if (strcmp(kernels_all[i].name, name) == 0) return kernels_all[i].kernel;
  }
  abort();
}

void launch_attend(const launch_work *work) {
  const qkv_simt_attend_args attend = {.ranges = work->ranges, .tables = work->tables, .count = work->count};
  const qkv_simt_merge_args merge = {
      .merges = work->merges, .count = work->count, .dim = work->shape->dim, .rows = work->shape->rows};
  const qkv_simt_turn_args turn = {.turns = work->turns, .count = work->count};
  if (work->shape->turn != NULL)
    emulator_run(&(emulator_launch){.kernel = kernel_of(work->shape->turn),
                                    .args = &turn,
                                    .blocks = work->count * QKV_SIMT_TURN_BLOCKS,
                                    .threads = QKV_SIMT_WARPS * 32,
                                    .shared_bytes = QKV_SIMT_TURN_SHARED_BYTES(work->shape->dim),
                                    .order = work->order});
  emulator_run(&(emulator_launch){.kernel = kernel_of(work->shape->name),
                                  .args = &attend,
                                  .blocks = work->count * QKV_SIMT_RANGE_RUNS / QKV_SIMT_WARPS,
                                  .threads = QKV_SIMT_WARPS * 32,
                                  .shared_bytes = work->shape->shared_bytes,
                                  .order = work->order});
  emulator_run(&(emulator_launch){.kernel = kernel_of("qkv_simt_merge_partials"),
                                  .args = &merge,
                                  .blocks = work->count,
                                  .threads = QKV_SIMT_MERGE_THREADS,
                                  .order = work->order});
}

void launch_decode(const launch_decode_work *work) {
  const qkv_simt_decode_args args = {.jobs = work->jobs, .tables = work->tables, .count = work->count};
  emulator_run(&(emulator_launch){.kernel = kernel_of("qkv_simt_decode_rows"),
                                  .args = &args,
                                  .blocks = work->count,
                                  .threads = QKV_SIMT_ROWS_THREADS(work->dim),
                                  .shared_bytes = QKV_SIMT_ROWS_SHARED_BYTES(work->dim),
                                  .order = work->order});
}

void launch_encode(const launch_encode_work *work) {
  const qkv_simt_encode_args args = {.jobs = work->jobs, .tables = work->tables, .count = work->count};
  emulator_run(&(emulator_launch){.kernel = kernel_of("qkv_simt_encode_rows"),
                                  .args = &args,
                                  .blocks = work->count,
                                  .threads = QKV_SIMT_ROWS_THREADS(work->dim),
                                  .shared_bytes = QKV_SIMT_ENCODE_SHARED_BYTES(work->dim),
                                  .order = work->order});
}

int launch_end(void) {
  return 0;
}
