// Rows that lie in an area (append.h), to pages.
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cache/device_rows.h"
#include "engine/codec/embedded.h"
#include "server/gpu/append.h"
#include "server/gpu/internal.h"

enum { ALIGN = 64 };

static size_t aligned(size_t bytes) {
  return (bytes + ALIGN - 1) / ALIGN * ALIGN;
}

static void *allocate(size_t bytes) {
  void *made = aligned_alloc(ALIGN, aligned(bytes));
  if (made == NULL) abort();
  return made;
}

// ---- What a call has ----

// In its memory: codes of heads and parts | turns of slots | turns of pages and heads | jobs of pages, heads and
// parts. In its output: results of pages, heads and parts.
typedef struct encode_layout {
  size_t slots, turns, jobs, bytes;
  size_t page_turns, page_jobs, page_results;  // bytes of a page
  size_t pages;                                // 0: not even one fits
} encode_layout;

static size_t group_bytes(const qkv_coder *coder, uint16_t head, qkv_part part) {
  const qkv_head_coder *own = &qkv_embedded(coder)->heads[head];
  return QKV_PAGE_GROUPS * qkv_schedule_group_bytes(own->schedules[part], own->tiers[part]);
}

static size_t result_bytes(const qkv_coder *coder, uint16_t head, qkv_part part) {
  return aligned(sizeof(qkv_simt_encoded) + group_bytes(coder, head, part));
}

static size_t smaller(size_t a, size_t b) {
  return a < b ? a : b;
}

// Pages that are asked for and have the first one's turns of slots.
static size_t pages_alike(const qkvi_gpu_source *source, const qkv_row_page *first) {
  const uint64_t left = (source->tokens - first->token) / QKV_PAGE_TOKENS;
  const uint64_t wanted = first->following < left ? first->following + 1 : left;
  const uint64_t last = first->position + (wanted - 1) * QKV_PAGE_TOKENS;
  const bool steady =
      qkv_device_encode_flags(first->coder, QKV_K) == 0 || qkv_device_slots_steady(first->coder, last);
  return steady ? wanted : 1;
}

static encode_layout lay_out(const qkvi_gpu_source *source, const qkv_row_page *first, const qkv_device_call *call) {
  const qkv_coder *coder = first->coder;
  const bool turns = qkv_device_encode_flags(coder, QKV_K) != 0;
  encode_layout layout = {.page_turns = turns ? coder->kv_heads * qkv_device_turn_floats(coder) * sizeof(float) : 0,
                          .page_jobs = (size_t)2 * coder->kv_heads * sizeof(qkv_simt_encode)};
  for (uint16_t h = 0; h < coder->kv_heads; h++) {
    for (qkv_part part = QKV_K; part <= QKV_V; part++) {
      layout.slots += aligned(qkv_device_encoder_bytes(coder, h, part));
      layout.page_results += result_bytes(coder, h, part);
    }
  }
  layout.turns = layout.slots + (turns ? aligned(qkv_device_slot_floats(coder) * sizeof(float)) : 0);
  const size_t used = layout.turns + ALIGN, each = layout.page_turns + layout.page_jobs;
  const size_t space = call->scratch_bytes > used ? call->scratch_bytes - used : 0;
  assert(each > 0);
  layout.pages = smaller(pages_alike(source, first), space / each);
  layout.pages = smaller(layout.pages, call->output_bytes / layout.page_results);
  layout.jobs = layout.turns + aligned(layout.pages * layout.page_turns);
  layout.bytes = layout.jobs + layout.pages * layout.page_jobs;
  return layout;
}

// ---- Filling it ----

static void fill_codes(const qkv_coder *coder, uint8_t *to) {
  for (uint16_t h = 0; h < coder->kv_heads; h++) {
    for (qkv_part part = QKV_K; part <= QKV_V; part++) {
      qkv_device_fill_encoder(coder, h, part, to);
      to += aligned(qkv_device_encoder_bytes(coder, h, part));
    }
  }
}

static qkv_cuda_memory place_of(const qkvi_gpu_source *source, qkv_part part, uint64_t token, uint32_t head) {
  const qkvi_gpu_place *from = &source->from[part];
  return from->at + token * from->token_stride + head * from->head_stride;
}

// Jobs of the index-th page.
static void list_jobs(const qkvi_gpu_source *source, const qkv_row_page *first, const encode_layout *layout,
                      const qkv_device_call *call, size_t index, qkv_simt_encode *jobs) {
  const qkv_coder *coder = first->coder;
  const uint64_t token = first->token + index * QKV_PAGE_TOKENS;
  uint64_t code = call->scratch_address, out = call->output_address + index * layout->page_results;
  uint64_t turns = call->scratch_address + layout->turns + index * layout->page_turns;
  for (uint16_t h = 0; h < coder->kv_heads; h++, turns += layout->page_turns / coder->kv_heads) {
    for (qkv_part part = QKV_K; part <= QKV_V; part++) {
      const uint32_t flags = qkv_device_encode_flags(coder, part);
      const uint64_t slots = call->scratch_address + layout->slots;
      *jobs++ = (qkv_simt_encode){.rows = (const uint8_t *)(uintptr_t)place_of(source, part, token, h),
                                  .stride = source->from[part].token_stride,
                                  .code = (const qkv_simt_code *)(uintptr_t)code,
                                  .turns = flags != 0 ? (const float *)(uintptr_t)turns : NULL,
                                  .slots = flags != 0 ? (const float *)(uintptr_t)slots : NULL,
                                  .out = (qkv_simt_encoded *)(uintptr_t)out,
                                  .tokens = QKV_PAGE_TOKENS,
                                  .tier = qkv_embedded(coder)->heads[h].tiers[part],
                                  .part = part,
                                  .dtype = source->dtype,
                                  .flags = flags};
      code += aligned(qkv_device_encoder_bytes(coder, h, part));
      out += result_bytes(coder, h, part);
    }
  }
}

static void fill_turns(const qkv_row_page *first, const encode_layout *layout, uint8_t *buffer) {
  const qkv_coder *coder = first->coder;
  if (layout->page_turns == 0) return;
  qkv_device_fill_slots(coder, first->position, (float *)(void *)(buffer + layout->slots));
  float *turns = (float *)(void *)(buffer + layout->turns);
  for (size_t i = 0; i < layout->pages; i++) {
    for (uint16_t h = 0; h < coder->kv_heads; h++, turns += qkv_device_turn_floats(coder))
      qkv_device_fill_turns(coder, h, first->position + i * QKV_PAGE_TOKENS, true, turns);
  }
}

static qkv_status run_kernel(const qkvi_gpu_source *source, const qkv_row_page *first, const encode_layout *layout,
                             const qkv_device_call *call) {
  const qkv_coder *coder = first->coder;
  uint8_t *buffer = allocate(layout->bytes);
  fill_codes(coder, buffer);
  fill_turns(first, layout, buffer);
  for (size_t i = 0; i < layout->pages; i++)
    list_jobs(source, first, layout, call, i,
              (qkv_simt_encode *)(void *)(buffer + layout->jobs + i * layout->page_jobs));
  const qkv_gpu_copy copy = {call->scratch_address, buffer, layout->bytes};
  const qkv_status status = qkv_gpu_upload(source->gpu->open, &copy, 1, NULL);
  free(buffer);
  QKV_TRY(status);
  const qkv_simt_encode_args args = {
      .jobs = (const qkv_simt_encode *)(uintptr_t)(call->scratch_address + layout->jobs),
      .count = 2 * (uint32_t)coder->kv_heads * (uint32_t)layout->pages};
  const uint16_t dim = coder->key_dim > coder->value_dim ? coder->key_dim : coder->value_dim;
  return qkvi_gpu_encode_jobs(source->gpu, call, dim, &args, NULL);
}

// ---- Several pages at once ----

static void keep_results(const qkvi_gpu_source *source, const qkv_row_page *first, const encode_layout *layout,
                         const qkv_device_call *call) {
  qkvi_gpu_coded *coded = &source->area->coded;
  const size_t bytes = layout->pages * layout->page_results;
  if (coded->capacity < bytes) {
    free(coded->results);
    coded->results = allocate(bytes);
    coded->capacity = bytes;
  }
  memcpy(coded->results, call->output, bytes);
  coded->source = source;
  coded->coder = first->coder;
  coded->token = first->token;
  coded->position = first->position;
  coded->pages = layout->pages;
  coded->page_bytes = layout->page_results;
}

static qkv_status code_in_call(const qkvi_gpu_source *source, const qkv_row_page *first, bool *made) {
  qkv_device_call call;
  if (!qkvi_gpu_begin_call(&source->gpu->device, &call)) return QKV_OK;
  const encode_layout layout = lay_out(source, first, &call);
  const qkv_status status = layout.pages > 0 ? run_kernel(source, first, &layout, &call) : QKV_OK;
  *made = layout.pages > 0 && status == QKV_OK;
  if (*made) keep_results(source, first, &layout, &call);
  qkvi_gpu_end_call(&source->gpu->device, &call);
  return status;
}

// The page and those that follow it, as many as fit in a call.
static bool code_pages(const qkvi_gpu_source *source, const qkv_row_page *first) {
  bool made = false;
  if (!qkvi_gpu_enter_area(source->area)) return false;
  const qkv_status status = code_in_call(source, first, &made);
  qkvi_gpu_leave(source->gpu);
  if (status != QKV_OK) qkvi_gpu_failed(source->gpu);
  return made;
}

static bool is_coded(const qkvi_gpu_source *source, const qkv_row_page *page) {
  const qkvi_gpu_coded *coded = &source->area->coded;
  return coded->source == source && coded->coder == page->coder && page->token >= coded->token &&
         page->token - coded->token < coded->pages * QKV_PAGE_TOKENS &&
         page->position - coded->position == page->token - coded->token;
}

// ---- A page ----

static size_t place(const qkvi_gpu_source *source, const qkv_row_page *page, void *image) {
  const qkvi_gpu_coded *coded = &source->area->coded;
  const qkv_coder *coder = page->coder;
  const uint8_t *next = coded->results + (page->token - coded->token) / QKV_PAGE_TOKENS * coded->page_bytes;
  qkv_coded_rows *parts = allocate(2 * (size_t)coder->kv_heads * sizeof *parts);
  for (uint16_t h = 0; h < coder->kv_heads; h++) {
    for (qkv_part part = QKV_K; part <= QKV_V; part++) {
      const qkv_simt_encoded *result = (const qkv_simt_encoded *)(const void *)next;
      parts[2 * h + part] =
          (qkv_coded_rows){result->gains, (const uint8_t *)(result + 1), result->errors, result->squares};
      next += result_bytes(coder, h, part);
    }
  }
  const qkv_device_page made = {.position = page->position,
                                .tokens = QKV_PAGE_TOKENS,
                                .dtype = source->dtype,
                                .rows = {page->k, page->v},
                                .parts = parts};
  const size_t bytes = qkv_embedded_place_coded(coder, &made, image);
  free(parts);
  return bytes;
}

static bool takes(const qkv_coder *coder) {
  return qkv_embedded_takes_coded(coder) && coder->key_dim <= QKVI_GPU_ROWS_DIM_MAX &&
         coder->value_dim <= QKVI_GPU_ROWS_DIM_MAX;
}

static bool encode(const qkv_row_encoder *encoder, const qkv_row_page *page, void *image, size_t *bytes) {
  const qkvi_gpu_source *source = (const qkvi_gpu_source *)encoder;
  assert(page->token + QKV_PAGE_TOKENS <= source->tokens);
  const bool made =
      source->area != NULL && takes(page->coder) && (is_coded(source, page) || code_pages(source, page));
  if (made) *bytes = place(source, page, image);
  qkvi_gpu_count(source->gpu, made ? QKV_METRIC_GPU_APPEND_TOKENS : QKV_METRIC_GPU_APPEND_HOST_TOKENS,
                 QKV_PAGE_TOKENS);
  return made;
}

static qkvi_gpu_place place_in(const qkv_tensor *tensor, qkv_cuda_memory at) {
  return (qkvi_gpu_place){at, (uint64_t)tensor->strides[0], (uint64_t)tensor->strides[1]};
}

void qkvi_gpu_source_init(qkvi_gpu_source *source, qkvi_gpu *gpu, qkvi_gpu_area *area, const qkv_tensor *k,
                          const qkv_tensor *v, const qkv_cuda_memory at[2]) {
  const bool both = at[QKV_K] != 0 && at[QKV_V] != 0 && k->dtype == v->dtype;
  *source = (qkvi_gpu_source){.encoder = {.encode = encode},
                              .gpu = gpu,
                              .area = both ? area : NULL,
                              .dtype = k->dtype,
                              .tokens = (uint64_t)(k->dims[0] < v->dims[0] ? k->dims[0] : v->dims[0]),
                              .from = {place_in(k, at[QKV_K]), place_in(v, at[QKV_V])}};
}
