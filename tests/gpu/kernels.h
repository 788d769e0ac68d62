// The kernels of engine/kernel/simt as the emulator runs them.
#ifndef QKV_TESTS_GPU_KERNELS_H
#define QKV_TESTS_GPU_KERNELS_H

#include "engine/kernel/simt/calibrated.h"
#include "engine/kernel/simt/rows.h"
#include "tests/gpu/emulator.h"

#define KERNELS_DECLARE(dim, rows, query_parts, weight_parts) \
  emulator_kernel qkv_simt_attend_##dim##x##rows##_q##query_parts##w##weight_parts;
QKV_SIMT_SHAPES(KERNELS_DECLARE)
#define KERNELS_DECLARE_CALIBRATED(dim) emulator_kernel qkv_simt_calibrated_##dim, qkv_simt_turn_##dim;
QKV_SIMT_CALIBRATED(KERNELS_DECLARE_CALIBRATED)
emulator_kernel qkv_simt_merge_partials, qkv_simt_decode_rows, qkv_simt_encode_rows;

typedef struct kernels_entry {
  const char *name;
  emulator_kernel *kernel;
  size_t argument_bytes;
} kernels_entry;

#define KERNELS_ENTRY(dim, rows, query_parts, weight_parts)               \
  {"qkv_simt_attend_" #dim "x" #rows "_q" #query_parts "w" #weight_parts, \
   qkv_simt_attend_##dim##x##rows##_q##query_parts##w##weight_parts, sizeof(qkv_simt_attend_args)},
#define KERNELS_ENTRY_CALIBRATED(dim)                                                     \
  {"qkv_simt_calibrated_" #dim, qkv_simt_calibrated_##dim, sizeof(qkv_simt_attend_args)}, \
      {"qkv_simt_turn_" #dim, qkv_simt_turn_##dim, sizeof(qkv_simt_turn_args)},
static const kernels_entry kernels_all[] = {
    QKV_SIMT_SHAPES(KERNELS_ENTRY) QKV_SIMT_CALIBRATED(KERNELS_ENTRY_CALIBRATED){
        "qkv_simt_merge_partials", qkv_simt_merge_partials, sizeof(qkv_simt_merge_args)},
    {"qkv_simt_decode_rows", qkv_simt_decode_rows, sizeof(qkv_simt_decode_args)},
    {"qkv_simt_encode_rows", qkv_simt_encode_rows, sizeof(qkv_simt_encode_args)}};

#endif
