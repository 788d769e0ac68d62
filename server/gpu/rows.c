#include "server/gpu/rows.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cache/device_image.h"
#include "engine/cache/device_rows.h"
#include "engine/codec/page.h"
#include "server/gpu/internal.h"

enum { ALIGN = 64 };

static size_t aligned(size_t bytes) {
  return (bytes + ALIGN - 1) / ALIGN * ALIGN;
}

// A page, and which of its tokens are wanted.
typedef struct wanted_page {
  const uint8_t *image;
  uint64_t position;
  uint32_t first, end;
  uint32_t index;  // in its range
  uint64_t serial;
  qkv_cuda_memory at;  // on the GPU; 0: the image crosses
} wanted_page;

// Pages of one range that one launch decodes, and what lies in the call's memory:
//
//   codes of parts and heads | turns of slots | turns of pages and heads | jobs | images that are not resident
typedef struct page_group {
  const qkv_coder *coder;  // NULL: there are no pages
  qkv_page_range *range;
  qkv_device_call call;
  qkv_device_copy *copy;  // resident, and held; NULL: none
  wanted_page pages[QKV_RANGE_PAGES];
  size_t count;
  size_t bytes;  // with the images
} page_group;

typedef struct rows_work {
  qkvi_gpu *gpu;
  const qkvi_gpu_rows *rows;
  page_group group;
  qkv_error *error;
} rows_work;

static bool is_wanted(const qkvi_gpu_rows *rows, qkv_part part) {
  return rows->to[part].at != 0;
}

static qkv_cuda_memory place_of(const qkvi_gpu_rows *rows, qkv_part part, uint64_t position, uint32_t head) {
  const qkvi_gpu_place *to = &rows->to[part];
  return to->at + (position - rows->begin) * to->token_stride + head * to->head_stride;
}

// ---- Rows that the CPU decodes ----

// One copy where rows lie without gaps, else one for each.
static size_t list_copies(const qkvi_gpu_rows *rows, qkv_part part, uint64_t position, uint64_t tokens,
                          const uint8_t *from, size_t row_bytes, qkv_gpu_copy *copies) {
  const qkvi_gpu_place *to = &rows->to[part];
  const uint32_t heads = rows->layer->config.model->kv_heads;
  size_t count = 0;
  if (to->head_stride == row_bytes && to->token_stride == heads * row_bytes) {
    copies[0] = (qkv_gpu_copy){place_of(rows, part, position, 0), from, tokens * heads * row_bytes};
    return 1;
  }
  for (uint64_t t = 0; t < tokens; t++) {
    for (uint32_t h = 0; h < heads; h++, from += row_bytes)
      copies[count++] = (qkv_gpu_copy){place_of(rows, part, position + t, h), from, row_bytes};
  }
  return count;
}

static qkv_status bring_part(const rows_work *work, qkv_part part, uint64_t position, uint64_t tokens) {
  const qkvi_gpu_rows *rows = work->rows;
  const qkv_model *model = rows->layer->config.model;
  const size_t dim = part == QKV_K ? model->key_dim : model->value_dim, count = tokens * model->kv_heads;
  float *floats = malloc(count * dim * sizeof *floats);
  uint8_t *narrow = malloc(count * dim * qkv_dtype_size(rows->dtype));
  qkv_gpu_copy *copies = malloc(count * sizeof *copies);
  if (floats == NULL || narrow == NULL || copies == NULL) abort();
  qkv_layer_rows(rows->layer, part, position, tokens, rows->before_rope, floats);
  qkv_from_float(rows->dtype, floats, narrow, count * dim);
  const size_t listed = list_copies(rows, part, position, tokens, narrow, dim * qkv_dtype_size(rows->dtype), copies);
  const qkv_status status = qkv_gpu_upload(work->gpu->open, copies, listed, work->error);
  free(copies);
  free(narrow);
  free(floats);
  return status;
}

static qkv_status bring_rows(const rows_work *work, uint64_t position, uint64_t tokens) {
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    if (is_wanted(work->rows, part)) QKV_TRY(bring_part(work, part, position, tokens));
  }
  qkvi_gpu_count(work->gpu, QKV_METRIC_GPU_FETCH_HOST_TOKENS, tokens);
  return QKV_OK;
}

// ---- Groups of pages ----

static size_t code_bytes(const qkvi_gpu_rows *rows, const qkv_coder *coder) {
  size_t bytes = 0;
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    for (uint16_t h = 0; is_wanted(rows, part) && h < coder->kv_heads; h++)
      bytes += qkv_device_code_bytes(coder, h, part);
  }
  return aligned(bytes);
}

static bool turns(const qkvi_gpu_rows *rows, const qkv_coder *coder) {
  return is_wanted(rows, QKV_K) && qkv_device_row_flags(coder, QKV_K, rows->before_rope) != 0;
}

static size_t slot_bytes(const qkvi_gpu_rows *rows, const qkv_coder *coder) {
  return turns(rows, coder) ? aligned(qkv_device_slot_floats(coder) * sizeof(float)) : 0;
}

static size_t turn_bytes(const qkvi_gpu_rows *rows, const qkv_coder *coder) {
  return turns(rows, coder) ? aligned(coder->kv_heads * qkv_device_turn_floats(coder) * sizeof(float)) : 0;
}

static size_t job_bytes(const qkv_coder *coder) {
  return aligned((size_t)2 * coder->kv_heads * sizeof(qkv_simt_decode));
}

static size_t image_bytes(const void *image) {
  return aligned(((const qkv_page_header *)image)->bytes);
}

// Bytes of a page in the call's memory.
static size_t page_bytes(const qkvi_gpu_rows *rows, const qkv_coder *coder, const wanted_page *page) {
  return turn_bytes(rows, coder) + job_bytes(coder) + (page->at == 0 ? image_bytes(page->image) : 0);
}

static bool takes(const qkv_coder *coder) {
  return qkv_device_takes_rows(coder) && coder->key_dim <= QKVI_GPU_ROWS_DIM_MAX &&
         coder->value_dim <= QKVI_GPU_ROWS_DIM_MAX;
}

// ---- Decoding a group ----

// Fills and lists codes and slots, which come first; where each code is.
static size_t fill_codes(const qkvi_gpu_rows *rows, const page_group *group, uint8_t *buffer,
                         uint64_t (*codes)[QKV_KV_HEADS_MAX]) {
  const qkv_coder *coder = group->coder;
  size_t at = 0;
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    for (uint16_t h = 0; is_wanted(rows, part) && h < coder->kv_heads; h++) {
      qkv_device_fill_code(coder, h, part, buffer + at);
      codes[part][h] = group->call.scratch_address + at;
      at += qkv_device_code_bytes(coder, h, part);
    }
  }
  at = aligned(at);
  if (turns(rows, coder)) qkv_device_fill_slots(coder, group->pages[0].position, (float *)(void *)(buffer + at));
  return at;
}

// Jobs of a page; returns how many.
static size_t list_jobs(const qkvi_gpu_rows *rows, const page_group *group, const wanted_page *page,
                        uint64_t (*codes)[QKV_KV_HEADS_MAX], uint64_t slots, uint64_t page_turns,
                        qkv_simt_decode *jobs) {
  const qkv_coder *coder = group->coder;
  size_t count = 0;
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    const uint32_t flags = qkv_device_row_flags(coder, part, rows->before_rope);
    for (uint16_t h = 0; is_wanted(rows, part) && h < coder->kv_heads; h++) {
      const uint64_t own = page_turns + h * qkv_device_turn_floats(coder) * sizeof(float);
      jobs[count++] =
          (qkv_simt_decode){.page = (const uint8_t *)(uintptr_t)page->at,
                            .code = (const qkv_simt_code *)(uintptr_t)codes[part][h],
                            .turns = flags != 0 ? (const float *)(uintptr_t)own : NULL,
                            .slots = flags != 0 ? (const float *)(uintptr_t)slots : NULL,
                            .out = (uint8_t *)(uintptr_t)place_of(rows, part, page->position + page->first, h),
                            .stride = rows->to[part].token_stride,
                            .kv_head = h,
                            .part = part,
                            .first = page->first,
                            .end = page->end,
                            .dtype = rows->dtype,
                            .flags = flags};
    }
  }
  return count;
}

static void fill_turns(const qkvi_gpu_rows *rows, const qkv_coder *coder, uint64_t position, uint8_t *to) {
  for (uint16_t h = 0; turns(rows, coder) && h < coder->kv_heads; h++)
    qkv_device_fill_turns(coder, h, position, rows->before_rope,
                          (float *)(void *)to + h * qkv_device_turn_floats(coder));
}

// All but the images to `buffer`, as it will lie in the call's memory. Returns where the jobs lie and their number;
// `copies` gets the images, behind the first one.
static size_t fill_group(const qkvi_gpu_rows *rows, page_group *group, uint8_t *buffer, qkv_gpu_copy *copies,
                         size_t *copy_count, size_t *jobs_at) {
  uint64_t codes[2][QKV_KV_HEADS_MAX] = {{0}};
  const uint64_t base = group->call.scratch_address;
  const size_t slots = fill_codes(rows, group, buffer, codes);
  size_t turns_at = slots + slot_bytes(rows, group->coder), jobs = 0;
  *jobs_at = turns_at + group->count * turn_bytes(rows, group->coder);
  size_t images = *jobs_at + group->count * job_bytes(group->coder);
  copies[0] = (qkv_gpu_copy){base, buffer, images};
  *copy_count = 1;
  for (size_t i = 0; i < group->count; i++) {
    wanted_page *page = &group->pages[i];
    if (page->at == 0) {
      page->at = base + images;
      copies[(*copy_count)++] =
          (qkv_gpu_copy){page->at, page->image, ((const qkv_page_header *)(const void *)page->image)->bytes};
      images += image_bytes(page->image);
    }
    fill_turns(rows, group->coder, page->position, buffer + turns_at);
    jobs += list_jobs(rows, group, page, codes, base + slots, base + turns_at,
                      (qkv_simt_decode *)(void *)(buffer + *jobs_at) + jobs);
    turns_at += turn_bytes(rows, group->coder);
  }
  return jobs;
}

static qkv_status decode_group(const rows_work *work, page_group *group) {
  const qkv_coder *coder = group->coder;
  qkv_gpu_copy copies[1 + QKV_RANGE_PAGES];
  size_t copy_count, jobs_at;
  uint64_t tokens = 0;
  uint8_t *buffer = aligned_alloc(ALIGN, group->bytes);
  if (buffer == NULL) abort();
  const size_t jobs = fill_group(work->rows, group, buffer, copies, &copy_count, &jobs_at);
  qkv_status status = qkv_gpu_upload(work->gpu->open, copies, copy_count, work->error);
  free(buffer);
  const qkv_simt_decode_args args = {
      .jobs = (const qkv_simt_decode *)(uintptr_t)(group->call.scratch_address + jobs_at), .count = (uint32_t)jobs};
  if (status == QKV_OK)
    status =
        qkvi_gpu_decode(work->gpu, &group->call,
                        coder->key_dim > coder->value_dim ? coder->key_dim : coder->value_dim, &args, work->error);
  for (size_t i = 0; i < group->count; i++) tokens += group->pages[i].end - group->pages[i].first;
  if (status == QKV_OK) qkvi_gpu_count(work->gpu, QKV_METRIC_GPU_FETCH_TOKENS, tokens);
  return status;
}

static qkv_status end_group(rows_work *work) {
  page_group *group = &work->group;
  if (group->coder == NULL) return QKV_OK;
  const qkv_status status = decode_group(work, group);
  if (group->copy != NULL) qkvi_gpu_release(&work->gpu->device, group->copy);
  group->copy = NULL;
  qkvi_gpu_end_call(&work->gpu->device, &group->call);
  group->coder = NULL;
  return status;
}

// False: all calls are in use.
static bool begin_group(rows_work *work, qkv_page_range *range, const qkv_coder *coder) {
  page_group *group = &work->group;
  if (!qkvi_gpu_begin_call(&work->gpu->device, &group->call)) return false;
  group->coder = coder;
  group->range = range;
  group->copy = qkvi_gpu_find(work->gpu, range);
  group->count = 0;
  group->bytes = code_bytes(work->rows, coder) + slot_bytes(work->rows, coder);
  return true;
}

// Whether the group's turns of slots are the page's, too, and it has space for it.
static bool fits(const rows_work *work, const qkv_page_range *range, const wanted_page *page) {
  const page_group *group = &work->group;
  return group->range == range && qkv_device_slots_steady(group->coder, page->position) &&
         qkv_device_slots_steady(group->coder, group->pages[0].position) &&
         group->bytes + page_bytes(work->rows, group->coder, page) <= group->call.scratch_bytes;
}

// Adds a page to the group, or to a new one. False: it is the CPU's.
static bool add_page(rows_work *work, qkv_page_range *range, const wanted_page *page, qkv_status *status) {
  page_group *group = &work->group;
  const qkv_coder *coder = range->coder;
  if (!takes(coder) ||
      code_bytes(work->rows, coder) + slot_bytes(work->rows, coder) + page_bytes(work->rows, coder, page) >
          work->gpu->scratch_bytes)
    return false;
  if (group->coder != NULL && !fits(work, range, page)) {
    *status = end_group(work);
    if (*status != QKV_OK) return true;
  }
  if (group->coder == NULL && !begin_group(work, range, coder)) return false;
  wanted_page *added = &group->pages[group->count++];
  *added = *page;
  added->at = group->copy != NULL ? qkvi_gpu_image_of(group->copy, page->index, page->serial) : 0;
  group->bytes += page_bytes(work->rows, coder, added);
  return true;
}

// ---- All rows ----

// The page that holds `position`, which is below what is sealed.
static wanted_page find_page(const qkvi_gpu_rows *rows, uint64_t position, size_t *range) {
  const qkv_layer *layer = rows->layer;
  const size_t index = qkv_layer_page_at(layer, position);
  const qkv_page_entry *entry = qkv_layer_page(layer, index);
  const uint64_t stop = rows->begin + rows->tokens, end = entry->position + entry->tokens;
  *range = qkv_layer_range_of(layer, index);
  assert(entry->page != NULL && entry->position <= position && position < end);
  return (wanted_page){.image = entry->page,
                       .position = entry->position,
                       .first = (uint32_t)(position - entry->position),
                       .end = (uint32_t)((end < stop ? end : stop) - entry->position),
                       .serial = entry->serial,
                       .index = (uint32_t)(index - layer->ranges[*range].first)};
}

static qkv_status fetch(rows_work *work) {
  const qkvi_gpu_rows *rows = work->rows;
  const qkv_layer *layer = rows->layer;
  const uint64_t stop = rows->begin + rows->tokens;
  uint64_t at = rows->begin;
  qkv_status status = QKV_OK;
  while (status == QKV_OK && at < stop && at < layer->sealed) {
    size_t range;
    const wanted_page page = find_page(rows, at, &range);
    const uint64_t next = page.position + page.end;
    if (!add_page(work, layer->ranges[range].range, &page, &status)) status = bring_rows(work, at, next - at);
    at = next;
  }
  const qkv_status ended = end_group(work);
  if (status == QKV_OK) status = ended;
  for (; status == QKV_OK && at < stop; at += QKV_PAGE_TOKENS)
    status = bring_rows(work, at, stop - at < QKV_PAGE_TOKENS ? stop - at : QKV_PAGE_TOKENS);
  return status;
}

qkv_status qkvi_gpu_fetch(qkvi_gpu *gpu, const qkvi_gpu_rows *rows, qkv_error *error) {
  rows_work work = {.gpu = gpu, .rows = rows, .error = error};
  if (!qkvi_gpu_enter(gpu))
    return qkv_fail(error, QKV_UNAVAILABLE, "no GPU is used, so its memory is not either: the log says why");
  const qkv_status status = fetch(&work);
  qkvi_gpu_leave(gpu);
  if (status != QKV_OK) qkvi_gpu_failed(gpu);
  return status;
}
