// The kernels for the fake driver (tests/storage/gpu/fake_cuda.h), run by the emulator: on_device.c without a GPU.
#include "tests/gpu/kernels.h"
#include "tests/storage/gpu/fake_cuda.h"

static void emulate(emulator_kernel *kernel, const void *args, uint32_t blocks, uint32_t threads, uint32_t shared) {
  emulator_run(&(emulator_launch){
      .kernel = kernel, .args = args, .blocks = blocks, .threads = threads, .shared_bytes = shared});
}

#define RUN(name)                                                                                \
  static void run_##name(const void *args, uint32_t blocks, uint32_t threads, uint32_t shared) { \
    emulate(name, args, blocks, threads, shared);                                                \
  }
#define RUN_SHAPE(dim, rows, query_parts, weight_parts) \
  RUN(qkv_simt_attend_##dim##x##rows##_q##query_parts##w##weight_parts)
#define ROW(name) {#name, run_##name},
#define ROW_OF(name) ROW(name)
#define ROW_SHAPE(dim, rows, query_parts, weight_parts) \
  ROW_OF(qkv_simt_attend_##dim##x##rows##_q##query_parts##w##weight_parts)
#define RUN_CALIBRATED(dim) RUN(qkv_simt_calibrated_##dim) RUN(qkv_simt_turn_##dim)
#define ROW_CALIBRATED(dim) ROW(qkv_simt_calibrated_##dim) ROW(qkv_simt_turn_##dim)
QKV_SIMT_SHAPES(RUN_SHAPE)
QKV_SIMT_CALIBRATED(RUN_CALIBRATED)
RUN(qkv_simt_merge_partials)
RUN(qkv_simt_decode_rows)
RUN(qkv_simt_encode_rows)

const fake_cuda_kernel fake_cuda_kernels[] = {QKV_SIMT_SHAPES(ROW_SHAPE) QKV_SIMT_CALIBRATED(ROW_CALIBRATED) ROW(
    qkv_simt_merge_partials) ROW(qkv_simt_decode_rows) ROW(qkv_simt_encode_rows){0}};
