// Rows that lie on the GPU, to pages: rows.h.
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cache/device_rows.h"
#include "engine/codec/embedded.h"
#include "server/gpu/internal.h"
#include "server/gpu/rows.h"

enum { ALIGN = 64 };

static size_t aligned(size_t bytes) {
  return (bytes + ALIGN - 1) / ALIGN * ALIGN;
}

static void *allocate(size_t bytes) {
  void *made = aligned_alloc(ALIGN, aligned(bytes));
  if (made == NULL) abort();
  return made;
}

typedef struct encode_work {
  qkvi_gpu *gpu;
  const qkvi_gpu_page *page;
  uint8_t *rows[2];  // [tokens][kv_heads][dim], filled as far as they are needed
  qkv_status status;
  qkv_error *error;
} encode_work;

static size_t row_bytes(const qkvi_gpu_page *page, qkv_part part) {
  return (part == QKV_K ? page->coder->key_dim : page->coder->value_dim) * qkv_dtype_size(page->dtype);
}

static qkv_cuda_memory place_of(const qkvi_gpu_page *page, qkv_part part, uint32_t slot, uint32_t head) {
  const qkvi_gpu_place *from = &page->from[part];
  return from->at + slot * from->token_stride + head * from->head_stride;
}

// ---- Rows that cross ----

static qkv_gpu_copy_back copy_of(const encode_work *work, qkv_part part, uint32_t slot, uint16_t head) {
  const size_t bytes = row_bytes(work->page, part);
  uint8_t *to = work->rows[part] + ((size_t)slot * work->page->coder->kv_heads + head) * bytes;
  return (qkv_gpu_copy_back){to, place_of(work->page, part, slot, head), bytes};
}

// What comes of a page without them is not used.
static void bring(void *context, uint16_t head, qkv_part part, uint32_t slot) {
  encode_work *work = context;
  const qkv_gpu_copy_back copy = copy_of(work, part, slot, head);
  if (work->status == QKV_OK) work->status = qkv_gpu_download(work->gpu->open, &copy, 1, work->error);
  if (work->status != QKV_OK) memset(copy.to, 0, copy.bytes);
}

static qkv_status bring_all(const encode_work *work) {
  const qkvi_gpu_page *page = work->page;
  const size_t count = (size_t)page->tokens * page->coder->kv_heads;
  qkv_gpu_copy_back *copies = allocate(count * sizeof *copies);
  qkv_status status = QKV_OK;
  for (qkv_part part = QKV_K; part <= QKV_V && status == QKV_OK; part++) {
    for (size_t i = 0; i < count; i++)
      copies[i] = copy_of(work, part, (uint32_t)(i / page->coder->kv_heads), (uint16_t)(i % page->coder->kv_heads));
    status = qkv_gpu_download(work->gpu->open, copies, count, work->error);
  }
  free(copies);
  return status;
}

static qkv_status encode_here(const encode_work *work, void *image, size_t *bytes) {
  const qkvi_gpu_page *page = work->page;
  QKV_TRY(bring_all(work));
  *bytes = page->coder->codec->encode(page->coder, page->position, page->tokens, page->dtype, work->rows[QKV_K],
                                      work->rows[QKV_V], NULL, image);
  return QKV_OK;
}

// ---- By the kernel ----

// What lies in the call's memory: codes of heads and parts | turns of slots | turns of heads | jobs.
typedef struct encode_layout {
  size_t slots, turns, jobs, bytes;
  size_t results;  // bytes of the call's output
} encode_layout;

static size_t group_bytes(const qkv_coder *coder, uint16_t head, qkv_part part) {
  const qkv_head_coder *own = &qkv_embedded(coder)->heads[head];
  return QKV_PAGE_GROUPS * qkv_schedule_group_bytes(own->schedules[part], own->tiers[part]);
}

static size_t result_bytes(const qkv_coder *coder, uint16_t head, qkv_part part) {
  return aligned(sizeof(qkv_simt_encoded) + group_bytes(coder, head, part));
}

static encode_layout lay_out(const qkv_coder *coder) {
  encode_layout layout = {0};
  const bool turns = qkv_device_encode_flags(coder, QKV_K) != 0;
  for (uint16_t h = 0; h < coder->kv_heads; h++) {
    for (qkv_part part = QKV_K; part <= QKV_V; part++) {
      layout.slots += aligned(qkv_device_encoder_bytes(coder, h, part));
      layout.results += result_bytes(coder, h, part);
    }
  }
  layout.turns = layout.slots + (turns ? aligned(qkv_device_slot_floats(coder) * sizeof(float)) : 0);
  layout.jobs = layout.turns + (turns ? aligned(coder->kv_heads * qkv_device_turn_floats(coder) * sizeof(float)) : 0);
  layout.bytes = layout.jobs + aligned((size_t)2 * coder->kv_heads * sizeof(qkv_simt_encode));
  return layout;
}

// The result of each head and part is `parts` [kv_heads][2].
static void fill(const qkvi_gpu_page *page, const encode_layout *layout, const qkv_device_call *call, uint8_t *buffer,
                 qkv_coded_rows *parts) {
  const qkv_coder *coder = page->coder;
  const uint64_t base = call->scratch_address;
  qkv_simt_encode *jobs = (qkv_simt_encode *)(void *)(buffer + layout->jobs);
  const size_t turn_bytes = qkv_device_turn_floats(coder) * sizeof(float);
  size_t code = 0, out = 0;
  if (layout->turns > layout->slots)
    qkv_device_fill_slots(coder, page->position, (float *)(void *)(buffer + layout->slots));
  for (uint16_t h = 0; h < coder->kv_heads; h++) {
    const size_t turns = layout->turns + h * turn_bytes;
    if (layout->jobs > layout->turns)
      qkv_device_fill_turns(coder, h, page->position, true, (float *)(void *)(buffer + turns));
    for (qkv_part part = QKV_K; part <= QKV_V; part++) {
      const qkv_simt_encoded *result = (const qkv_simt_encoded *)(const void *)(call->output + out);
      const uint32_t flags = qkv_device_encode_flags(coder, part);
      qkv_device_fill_encoder(coder, h, part, buffer + code);
      jobs[2 * h + part] =
          (qkv_simt_encode){.rows = (const uint8_t *)(uintptr_t)place_of(page, part, 0, h),
                            .stride = page->from[part].token_stride,
                            .code = (const qkv_simt_code *)(uintptr_t)(base + code),
                            .turns = flags != 0 ? (const float *)(uintptr_t)(base + turns) : NULL,
                            .slots = flags != 0 ? (const float *)(uintptr_t)(base + layout->slots) : NULL,
                            .out = (qkv_simt_encoded *)(uintptr_t)(call->output_address + out),
                            .tokens = page->tokens,
                            .tier = qkv_embedded(coder)->heads[h].tiers[part],
                            .part = part,
                            .dtype = page->dtype,
                            .flags = flags};
      parts[2 * h + part] =
          (qkv_coded_rows){result->gains, (const uint8_t *)(result + 1), result->errors, result->squares};
      code += aligned(qkv_device_encoder_bytes(coder, h, part));
      out += result_bytes(coder, h, part);
    }
  }
}

static qkv_status run_kernel(const encode_work *work, const encode_layout *layout, const qkv_device_call *call,
                             qkv_coded_rows *parts) {
  const qkv_coder *coder = work->page->coder;
  uint8_t *buffer = allocate(layout->bytes);
  fill(work->page, layout, call, buffer, parts);
  const qkv_gpu_copy copy = {call->scratch_address, buffer, layout->bytes};
  qkv_status status = qkv_gpu_upload(work->gpu->open, &copy, 1, work->error);
  free(buffer);
  const qkv_simt_encode_args args = {
      .jobs = (const qkv_simt_encode *)(uintptr_t)(call->scratch_address + layout->jobs),
      .count = 2 * (uint32_t)coder->kv_heads};
  const uint16_t dim = coder->key_dim > coder->value_dim ? coder->key_dim : coder->value_dim;
  if (status == QKV_OK) status = qkvi_gpu_encode_jobs(work->gpu, call, dim, &args, work->error);
  return status;
}

static qkv_status encode_there(encode_work *work, const encode_layout *layout, const qkv_device_call *call,
                               void *image, size_t *bytes) {
  const qkvi_gpu_page *page = work->page;
  qkv_coded_rows *parts = allocate(2 * (size_t)page->coder->kv_heads * sizeof *parts);
  work->status = run_kernel(work, layout, call, parts);
  const qkv_device_page coded = {.position = page->position,
                                 .tokens = page->tokens,
                                 .dtype = page->dtype,
                                 .rows = {work->rows[QKV_K], work->rows[QKV_V]},
                                 .parts = parts,
                                 .bring = bring,
                                 .context = work};
  if (work->status == QKV_OK) *bytes = qkv_embedded_place_coded(page->coder, &coded, image);
  free(parts);
  return work->status;
}

// ---- A page ----

static bool takes(const qkv_coder *coder) {
  return qkv_embedded_takes_coded(coder) && coder->key_dim <= QKVI_GPU_ROWS_DIM_MAX &&
         coder->value_dim <= QKVI_GPU_ROWS_DIM_MAX;
}

static qkv_status encode(encode_work *work, void *image, size_t *bytes) {
  qkv_device_call call;
  const encode_layout layout = takes(work->page->coder) ? lay_out(work->page->coder) : (encode_layout){0};
  if (layout.bytes == 0 || !qkvi_gpu_begin_call(&work->gpu->device, &call)) return encode_here(work, image, bytes);
  const bool fits = layout.bytes <= call.scratch_bytes && layout.results <= call.output_bytes;
  const qkv_status status = fits ? encode_there(work, &layout, &call, image, bytes) : encode_here(work, image, bytes);
  qkvi_gpu_end_call(&work->gpu->device, &call);
  return status;
}

qkv_status qkvi_gpu_encode(qkvi_gpu *gpu, const qkvi_gpu_page *page, void *image, size_t *bytes, qkv_error *error) {
  encode_work work = {.gpu = gpu, .page = page, .error = error};
  assert(page->tokens >= 1 && page->tokens <= QKV_PAGE_TOKENS);
  if (!qkvi_gpu_enter(gpu))
    return qkv_fail(error, QKV_UNAVAILABLE, "no GPU is used, so its memory is not either: the log says why");
  for (qkv_part part = QKV_K; part <= QKV_V; part++)
    work.rows[part] = allocate((size_t)page->tokens * page->coder->kv_heads * row_bytes(page, part));
  const qkv_status status = encode(&work, image, bytes);
  qkvi_gpu_leave(gpu);
  free(work.rows[QKV_K]);
  free(work.rows[QKV_V]);
  if (status != QKV_OK) qkvi_gpu_failed(gpu);
  return status;
}
