// The kernels of engine/kernel/simt as the emulator runs them.
#ifndef QKV_TESTS_GPU_KERNELS_H
#define QKV_TESTS_GPU_KERNELS_H

#include "engine/kernel/simt/attend.h"
#include "tests/gpu/emulator.h"

#define KERNELS_DECLARE(dim, rows, query_parts, weight_parts) \
  emulator_kernel qkv_simt_attend_##dim##x##rows##_q##query_parts##w##weight_parts;
QKV_SIMT_SHAPES(KERNELS_DECLARE)
emulator_kernel qkv_simt_merge_partials;

typedef struct kernels_entry {
  const char *name;
  emulator_kernel *kernel;
  size_t argument_bytes;
} kernels_entry;

#define KERNELS_ENTRY(dim, rows, query_parts, weight_parts)               \
  {"qkv_simt_attend_" #dim "x" #rows "_q" #query_parts "w" #weight_parts, \
   qkv_simt_attend_##dim##x##rows##_q##query_parts##w##weight_parts, sizeof(qkv_simt_attend_args)},
static const kernels_entry kernels_all[] = {
    QKV_SIMT_SHAPES(KERNELS_ENTRY){"qkv_simt_merge_partials", qkv_simt_merge_partials, sizeof(qkv_simt_merge_args)}};

#endif
