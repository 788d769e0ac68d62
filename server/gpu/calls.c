// Calls of a GPU: the memory that they read and write, and the kernels.
#include <assert.h>

#include "engine/base/histogram.h"
#include "server/gpu/internal.h"

enum {
  // In the order of qkv_simt_shape_at(), then those that turn queries for calibrated shapes, and that which merges.
  SHAPES = 8,
  CALIBRATED = 2,
  TURN = SHAPES + CALIBRATED,
  MERGE = TURN + CALIBRATED,
  // The same kernel for each width, with the shared memory that it takes; from narrow to wide, as the last one says
  // what the kernel may have.
  WIDTHS = 3,
  DECODE = MERGE + 1,
  ENCODE = DECODE + WIDTHS,
  KERNELS = ENCODE + WIDTHS,
  SCRATCH_PART = 64,
  INPUT_BYTES = 512 << 10,
  WARP = 32,
};
// Results of the runs of 500 ranges at 128 coordinates and four rows; of a calibrated code, with its queries, of 56.
#define SCRATCH_MAX (UINT64_C(8) << 20)

// An eighth of the memory for all calls, at most.
uint64_t qkvi_gpu_scratch_bytes(uint64_t memory_bytes) {
  const uint64_t part = memory_bytes / SCRATCH_PART;
  return part < SCRATCH_MAX ? part : SCRATCH_MAX;
}

static size_t output_bytes(const qkvi_gpu *gpu) {
  return (size_t)(gpu->scratch_bytes / QKV_SIMT_RANGE_RUNS);
}

void qkvi_gpu_set_calls(const qkvi_gpu *gpu, qkv_gpu_config *config) {
#define KERNEL(dim, rows, query_parts, weight_parts) \
  {"qkv_simt_attend_" #dim "x" #rows "_q" #query_parts "w" #weight_parts, QKV_SIMT_SHARED_BYTES(dim)},
#define KERNEL_CALIBRATED(dim) {"qkv_simt_calibrated_" #dim, QKV_SIMT_FRAME_SHARED_BYTES(dim)},
#define KERNEL_TURN(dim) {"qkv_simt_turn_" #dim, QKV_SIMT_TURN_SHARED_BYTES(dim)},
#define KERNEL_DECODE(dim) {"qkv_simt_decode_rows", QKV_SIMT_ROWS_SHARED_BYTES(dim)},
#define KERNEL_ENCODE(dim) {"qkv_simt_encode_rows", QKV_SIMT_ENCODE_SHARED_BYTES(dim)},
#define WIDTHS_OF(kernel) kernel(64) kernel(128) kernel(QKVI_GPU_ROWS_DIM_MAX)
  static const qkv_gpu_kernel kernels[] = {QKV_SIMT_SHAPES(KERNEL) QKV_SIMT_CALIBRATED(KERNEL_CALIBRATED)
                                               QKV_SIMT_CALIBRATED(KERNEL_TURN){"qkv_simt_merge_partials", 0},
                                           WIDTHS_OF(KERNEL_DECODE) WIDTHS_OF(KERNEL_ENCODE)};
#undef KERNEL
#undef KERNEL_CALIBRATED
#undef KERNEL_TURN
#undef KERNEL_DECODE
#undef KERNEL_ENCODE
#undef WIDTHS_OF
  _Static_assert(sizeof kernels / sizeof *kernels == KERNELS, "kernels");
  config->kernels = kernels;
  config->kernel_count = KERNELS;
  config->calls = QKVI_GPU_CALLS;
  config->input_bytes = INPUT_BYTES;
  config->output_bytes = output_bytes(gpu);
}

qkv_status qkvi_gpu_prepare_calls(qkvi_gpu *gpu, qkv_gpu_device *device, qkv_error *error) {
  qkv_simt_tables tables;
  qkv_simt_encode_tables row_tables;
  qkv_simt_tables_fill(&tables);
  qkv_simt_encode_tables_fill(&row_tables);
  gpu->tables = qkv_gpu_alloc(device, sizeof tables);
  gpu->row_tables = qkv_gpu_alloc(device, sizeof row_tables);
  bool has = gpu->tables != 0 && gpu->row_tables != 0;
  for (size_t i = 0; i < QKVI_GPU_CALLS; i++) {
    gpu->slots[i] = (qkvi_gpu_slot){.scratch = qkv_gpu_alloc(device, gpu->scratch_bytes)};
    has &= gpu->slots[i].scratch != 0;
  }
  if (!has) return qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "the GPU has no memory for what kernels compute");
  const qkv_gpu_copy copies[] = {{gpu->tables, &tables, sizeof tables},
                                 {gpu->row_tables, &row_tables, sizeof row_tables}};
  return qkv_gpu_upload(device, copies, 2, error);
}

bool qkvi_gpu_begin_call(qkv_device *device, qkv_device_call *call) {
  qkvi_gpu *gpu = qkvi_gpu_of(device);
  qkvi_gpu_slot *slot = NULL;
  pthread_mutex_lock(&gpu->lock);
  assert(gpu->held > 0);
  for (size_t i = 0; gpu->usable && i < QKVI_GPU_CALLS && slot == NULL; i++) {
    if (gpu->slots[i].call == NULL) slot = &gpu->slots[i];
  }
  if (slot != NULL) slot->call = qkv_gpu_begin(gpu->open);
  const bool began = slot != NULL && slot->call != NULL;
  pthread_mutex_unlock(&gpu->lock);
  if (!began) return false;
  *call = (qkv_device_call){.own = slot,
                            .input = qkv_gpu_input(slot->call),
                            .input_bytes = INPUT_BYTES,
                            .input_address = qkv_gpu_input_address(slot->call),
                            .output = qkv_gpu_output(slot->call),
                            .output_bytes = output_bytes(gpu),
                            .output_address = qkv_gpu_output_address(slot->call),
                            .scratch_address = slot->scratch,
                            .scratch_bytes = gpu->scratch_bytes,
                            .tables_address = gpu->tables};
  return true;
}

static size_t kernel_of(const qkv_simt_shape *shape) {
  size_t n = 0;
  while (qkv_simt_shape_at(n) != shape) n++;
  assert(n < TURN);
  return n;
}

static qkv_status launch(const qkvi_gpu_slot *slot, const qkv_simt_shape *shape, const qkv_device_kernels *kernels) {
  const size_t kernel = kernel_of(shape);
  const qkv_simt_turn_args *turn = &kernels->turn;
  const qkv_simt_attend_args *attend = &kernels->attend;
  const qkv_simt_merge_args *merge = &kernels->merge;
  if (shape->turn != NULL)
    QKV_TRY(qkv_gpu_launch(slot->call, TURN + kernel - SHAPES, turn->count * QKV_SIMT_TURN_BLOCKS,
                           QKV_SIMT_WARPS * WARP, turn, sizeof *turn, NULL));
  QKV_TRY(qkv_gpu_launch(slot->call, kernel, attend->count * QKV_SIMT_RANGE_RUNS / QKV_SIMT_WARPS,
                         QKV_SIMT_WARPS * WARP, attend, sizeof *attend, NULL));
  return qkv_gpu_launch(slot->call, MERGE, merge->count, QKV_SIMT_MERGE_THREADS, merge, sizeof *merge, NULL);
}

bool qkvi_gpu_submit(qkv_device *device, qkv_device_call *call, const qkv_simt_shape *shape,
                     const qkv_device_kernels *kernels) {
  qkvi_gpu_slot *slot = call->own;
  slot->began_ns = qkv_stage_now();
  if (launch(slot, shape, kernels) == QKV_OK) return true;
  (void)qkv_gpu_wait(slot->call, NULL);  // for what has been launched
  qkvi_gpu_failed(qkvi_gpu_of(device));
  return false;
}

bool qkvi_gpu_wait_call(qkv_device *device, qkv_device_call *call) {
  qkvi_gpu *gpu = qkvi_gpu_of(device);
  qkvi_gpu_slot *slot = call->own;
  if (qkv_gpu_wait(slot->call, NULL) != QKV_OK) {
    qkvi_gpu_failed(gpu);
    return false;
  }
  qkv_stage_add(QKV_STAGE_GPU, slot->began_ns);
  qkvi_gpu_count(gpu, QKV_METRIC_GPU_CALLS, 1);
  return true;
}

void qkvi_gpu_end_call(qkv_device *device, qkv_device_call *call) {
  qkvi_gpu *gpu = qkvi_gpu_of(device);
  qkvi_gpu_slot *slot = call->own;
  qkv_gpu_call *ended = slot->call;
  pthread_mutex_lock(&gpu->lock);
  slot->call = NULL;
  pthread_mutex_unlock(&gpu->lock);
  qkv_gpu_end(ended);
}

// ---- Rows ----

static size_t variant_of(uint16_t dim) {
  assert(dim <= QKVI_GPU_ROWS_DIM_MAX);
  return dim <= 64 ? 0 : dim <= 128 ? 1 : 2;
}

// Launches one kernel of rows, and waits.
static qkv_status run_rows(qkvi_gpu *gpu, const qkv_device_call *call, size_t kernel, uint32_t blocks, uint16_t dim,
                           const void *args, size_t bytes, qkv_error *error) {
  qkvi_gpu_slot *slot = call->own;
  slot->began_ns = qkv_stage_now();
  qkv_status status = qkv_gpu_launch(slot->call, kernel, blocks, QKV_SIMT_ROWS_THREADS(dim), args, bytes, error);
  if (status == QKV_OK) status = qkv_gpu_wait(slot->call, error);
  if (status != QKV_OK) return status;
  qkv_stage_add(QKV_STAGE_GPU, slot->began_ns);
  qkvi_gpu_count(gpu, QKV_METRIC_GPU_CALLS, 1);
  return QKV_OK;
}

qkv_status qkvi_gpu_decode(qkvi_gpu *gpu, const qkv_device_call *call, uint16_t dim, const qkv_simt_decode_args *args,
                           qkv_error *error) {
  qkv_simt_decode_args own = *args;
  own.tables = (const qkv_simt_row_tables *)(uintptr_t)gpu->row_tables;
  return run_rows(gpu, call, DECODE + variant_of(dim), own.count, dim, &own, sizeof own, error);
}

qkv_status qkvi_gpu_encode_jobs(qkvi_gpu *gpu, const qkv_device_call *call, uint16_t dim,
                                const qkv_simt_encode_args *args, qkv_error *error) {
  qkv_simt_encode_args own = *args;
  own.tables = (const qkv_simt_encode_tables *)(uintptr_t)gpu->row_tables;
  return run_rows(gpu, call, ENCODE + variant_of(dim), own.count, dim, &own, sizeof own, error);
}
