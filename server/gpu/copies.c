// Which ranges are resident.
//
// A range's attends are counted. From the second one on its images are copied to a buffer by the thread that attends,
// which has them pinned, so that neither images nor layers are held for an upload; the thread of the tier finds
// memory and uploads. Where there is none, the range that gets least attention goes (attention.h), if the new one
// gets half as much again: ranges that are attended in turn and do not all fit would else replace each other for
// ever. A range that gets less is not copied in the first place. Where memory was not found, nothing is tried for a
// tenth of a second. A tenant that has as much as its quota allows replaces its own ranges in the same way; these are
// looked for among all.
#include <assert.h>
#include <string.h>
#include <utlist.h>

#include "engine/base/clock.h"
#include "engine/base/histogram.h"
#include "engine/cache/device_image.h"
#include "server/gpu/internal.h"

enum { FULL_MS = 100 };

#define MARGIN 0.585  // log2 of 1.5

static qkv_device_copy *find(qkvi_gpu *gpu, const qkv_page_range *range) {
  qkv_device_copy *found;
  HASH_FIND_PTR(gpu->table, &range, found);
  return found;
}

static qkv_device_copy *find_or_add(qkvi_gpu *gpu, const qkv_page_range *range) {
  qkv_device_copy *copy = find(gpu, range);
  if (copy != NULL) return copy;
  copy = calloc(1, sizeof *copy);
  if (copy == NULL) abort();
  copy->range = range;
  copy->account = range->account;
  copy->attention = QKVI_GPU_NO_ATTENTION;
  HASH_ADD_PTR(gpu->table, range, copy);
  return copy;
}

// While the range is there, and so its account.
static void drop_claim(qkv_device_copy *copy) {
  if (copy->claimed > 0) qkv_account_drop_gpu(copy->account, copy->claimed);
  copy->claimed = 0;
}

// Gives its memory back.
static void leave_gpu(qkvi_gpu *gpu, qkv_device_copy *copy) {
  assert(copy->state == QKVI_COPY_RESIDENT && copy->users == 0);
  qkvi_gpu_ranks_remove(&gpu->resident, copy);
  qkv_gpu_free(gpu->open, copy->at, copy->bytes);
  drop_claim(copy);
  gpu->full = false;
  copy->state = QKVI_COPY_COUNTED;
  copy->attends = 0;
}

// Whether it has these images. They are in memory and pinned, so their serials stay.
static bool matches(const qkv_device_copy *copy, const qkv_device_pages *pages) {
  const qkv_page_entry *entries = qkvi_range_entries(pages->range);
  if (pages->end > copy->pages) return false;
  for (uint32_t i = pages->first; i < pages->end; i++) {
    if (entries[i].serial != copy->serials[i]) return false;
  }
  return true;
}

// ---- Filling ----

typedef struct range_images {
  const void *images[QKV_RANGE_PAGES];
  uint64_t serials[QKV_RANGE_PAGES], places[QKV_RANGE_PAGES];
  uint32_t count;
  bool fits;  // the kernels take them
  size_t total;
} range_images;

// False: not all pages are in memory. The range is pinned, so those that are stay.
static bool find_images(qkv_page_range *range, range_images *found) {
  bool all = true;
  const qkv_page_entry *entries = qkvi_range_entries(range);
  *found = (range_images){.count = range->count, .fits = qkv_device_takes_coder(range->coder)};
  qkvi_range_lock(range);
  for (uint32_t i = 0; i < found->count && all; i++) {
    found->images[i] = entries[i].page;
    found->serials[i] = entries[i].serial;
    all = found->images[i] != NULL;
  }
  qkvi_range_unlock(range);
  for (uint32_t i = 0; i < found->count && all && found->fits; i++)
    found->fits = qkv_device_takes_image(range->coder, found->images[i]);
  if (!all || !found->fits) return all;
  found->total = qkv_device_layout_of(range->coder).pages;
  for (uint32_t i = 0; i < found->count; i++) found->total += qkv_device_page_bytes(range->coder, found->images[i]);
  return all;
}

static uint8_t *copy_images(const qkv_coder *coder, range_images *images) {
  uint8_t *buffer = malloc(images->total);
  if (buffer == NULL) return NULL;
  uint64_t *list = (uint64_t *)(void *)buffer;
  const qkv_device_layout layout = qkv_device_layout_of(coder);
  size_t at = layout.pages;
  qkv_device_fill_tables(coder, buffer);
  for (uint32_t i = 0; i < images->count; i++) {
    list[i] = at + layout.image;
    images->places[i] = layout.expanded ? 0 : list[i];
    at += qkv_device_fill_page(coder, images->images[i], buffer + at);
  }
  assert(at == images->total);
  return buffer;
}

// The lock is held. Frees what was forgotten meanwhile.
static void end_fill(qkvi_gpu *gpu, qkv_device_copy *copy, qkvi_copy_state state) {
  free(copy->buffer);
  copy->buffer = NULL;
  copy->state = state;
  copy->attends = 0;
  gpu->filled--;
  if (copy->forgotten) free(copy);
}

static void fill(qkvi_gpu *gpu, qkv_device_copy *copy, qkv_page_range *range) {
  range_images images;
  const bool all = find_images(range, &images);
  images.fits &= images.total <= gpu->config.memory_bytes / 2;
  uint8_t *buffer = all && images.fits ? copy_images(range->coder, &images) : NULL;
  pthread_mutex_lock(&gpu->lock);
  copy->pages = images.count;
  memcpy(copy->serials, images.serials, sizeof copy->serials);
  memcpy(copy->places, images.places, sizeof copy->places);
  copy->bytes = images.total;
  copy->buffer = buffer;
  if (buffer != NULL && gpu->usable) {
    DL_APPEND(gpu->queue, copy);
    pthread_cond_broadcast(&gpu->changed);
  } else {
    end_fill(gpu, copy, all && !images.fits ? QKVI_COPY_UNFIT : QKVI_COPY_COUNTED);
  }
  pthread_mutex_unlock(&gpu->lock);
}

// The resident range that has to go for one of so many pages that gets so much attention; NULL: none has to.
static qkv_device_copy *least_below(qkvi_gpu *gpu, double attention, uint32_t pages) {
  double value;
  qkv_device_copy *least = qkvi_gpu_ranks_least(&gpu->resident, &value);
  return least != NULL && qkvi_gpu_attention_by_page(attention, pages) > value + MARGIN ? least : NULL;
}

// The same among those of the tenant.
static qkv_device_copy *own_least_below(const qkvi_gpu *gpu, const qkv_device_copy *next, uint32_t pages) {
  qkv_device_copy *least = NULL;
  double value = qkvi_gpu_attention_by_page(next->attention, pages) - MARGIN;
  for (size_t i = 0; i < gpu->resident.count; i++) {
    qkv_device_copy *copy = gpu->resident.items[i].copy;
    if (copy->account != next->account || copy->claimed == 0 || copy->users > 0) continue;
    const double own = qkvi_gpu_attention_by_page(copy->attention, copy->pages);
    if (own >= value) continue;
    value = own;
    least = copy;
  }
  return least;
}

// Whether the tenant has as much as it may, and no range of its own that would go for this one.
static bool quota_keeps_out(const qkvi_gpu *gpu, const qkv_device_copy *copy, const qkv_page_range *range) {
  const uint64_t bytes = atomic_load_explicit(&range->bytes_coded, memory_order_relaxed);  // about what it takes
  if (copy->account == NULL || qkv_account_fits_gpu(copy->account, bytes)) return false;
  if (qkv_account_waits_gpu(copy->account, qkv_now_ms())) return true;
  if (qkv_account_may_fit_gpu(copy->account, bytes) && own_least_below(gpu, copy, range->count) != NULL) return false;
  qkv_account_wait_gpu(copy->account, qkv_now_ms() + FULL_MS);
  return true;
}

// Counts an attend by the CPU; whether the images are to be filled.
static bool is_due(qkvi_gpu *gpu, qkv_device_copy *copy, const qkv_device_pages *pages) {
  if (copy->state == QKVI_COPY_FILLED || copy->users > 0) return false;
  if (copy->state == QKVI_COPY_UNFIT && matches(copy, pages)) return false;
  if (copy->state == QKVI_COPY_RESIDENT) leave_gpu(gpu, copy);
  copy->state = QKVI_COPY_COUNTED;
  copy->attends++;
  if (pages->grows || copy->attends < gpu->config.admit_attends || gpu->filled == QKVI_GPU_FILLS) return false;
  if (gpu->full && qkv_now_ms() < gpu->full_until_ms) return false;
  if ((gpu->full && gpu->resident.count > 0 && least_below(gpu, copy->attention, pages->range->count) == NULL) ||
      quota_keeps_out(gpu, copy, pages->range)) {
    qkvi_gpu_count(gpu, QKV_METRIC_GPU_LESS_ATTENDED, 1);
    return false;
  }
  copy->state = QKVI_COPY_FILLED;
  gpu->filled++;
  return true;
}

// ---- Holding ----

uint64_t qkvi_gpu_hold(qkv_device *device, const qkv_device_pages *pages, qkv_device_copy **out) {
  qkvi_gpu *gpu = qkvi_gpu_of(device);
  uint64_t address = 0;
  bool due = false;
  pthread_mutex_lock(&gpu->lock);
  if (!gpu->usable) {
    pthread_mutex_unlock(&gpu->lock);
    return 0;
  }
  qkv_device_copy *copy = find_or_add(gpu, pages->range);
  copy->attention = qkvi_gpu_attention_add(copy->attention, pages->attention, qkv_now_ms(), gpu->config.half_life_ms);
  if (copy->state == QKVI_COPY_RESIDENT && matches(copy, pages)) {
    copy->users++;
    gpu->held++;
    *out = copy;
    address = copy->at;
  } else {
    due = is_due(gpu, copy, pages);
  }
  pthread_mutex_unlock(&gpu->lock);
  qkvi_gpu_count(gpu, address != 0 ? QKV_METRIC_GPU_HITS : QKV_METRIC_GPU_MISSES, 1);
  if (due) fill(gpu, copy, pages->range);
  return address;
}

void qkvi_gpu_release(qkv_device *device, qkv_device_copy *copy) {
  qkvi_gpu *gpu = qkvi_gpu_of(device);
  pthread_mutex_lock(&gpu->lock);
  assert(copy->users > 0 && gpu->held > 0);
  copy->users--;
  if (copy->forgotten && copy->users == 0) {
    leave_gpu(gpu, copy);
    free(copy);
  }
  if (--gpu->held == 0) pthread_cond_broadcast(&gpu->changed);
  pthread_mutex_unlock(&gpu->lock);
}

qkv_device_copy *qkvi_gpu_find(qkvi_gpu *gpu, const qkv_page_range *range) {
  pthread_mutex_lock(&gpu->lock);
  qkv_device_copy *copy = gpu->usable ? find(gpu, range) : NULL;
  if (copy != NULL && copy->state != QKVI_COPY_RESIDENT) copy = NULL;
  if (copy != NULL) {
    copy->users++;
    gpu->held++;
  }
  pthread_mutex_unlock(&gpu->lock);
  return copy;
}

qkv_cuda_memory qkvi_gpu_image_of(const qkv_device_copy *copy, uint32_t page, uint64_t serial) {
  const bool has = page < copy->pages && copy->serials[page] == serial && copy->places[page] != 0;
  return has ? copy->at + copy->places[page] : 0;
}

bool qkvi_gpu_has(qkv_device *device, const qkv_page_range *range, uint32_t page, uint64_t serial) {
  qkvi_gpu *gpu = qkvi_gpu_of(device);
  pthread_mutex_lock(&gpu->lock);
  const qkv_device_copy *copy = find(gpu, range);
  const bool has =
      copy != NULL && copy->state == QKVI_COPY_RESIDENT && page < copy->pages && copy->serials[page] == serial;
  pthread_mutex_unlock(&gpu->lock);
  return has;
}

void qkvi_gpu_forget(qkv_device *device, const qkv_page_range *range) {
  qkvi_gpu *gpu = qkvi_gpu_of(device);
  pthread_mutex_lock(&gpu->lock);
  qkv_device_copy *copy = find(gpu, range);
  if (copy != NULL) {
    HASH_DEL(gpu->table, copy);
    drop_claim(copy);
    copy->forgotten = copy->state == QKVI_COPY_FILLED || copy->users > 0;
    if (!copy->forgotten) {
      if (copy->state == QKVI_COPY_RESIDENT) leave_gpu(gpu, copy);
      free(copy);
    }
  }
  pthread_mutex_unlock(&gpu->lock);
}

// ---- By the thread ----

// The range that gets least attention goes, if `next` gets more, unless it is in use now.
static bool evict_one(qkvi_gpu *gpu, const qkv_device_copy *next) {
  pthread_mutex_lock(&gpu->lock);
  qkv_device_copy *copy = least_below(gpu, next->attention, next->pages);
  const bool goes = copy != NULL && copy->users == 0;
  if (goes) {
    leave_gpu(gpu, copy);
    gpu->full = true;  // it is taken at once
  }
  pthread_mutex_unlock(&gpu->lock);
  if (goes) qkvi_gpu_count(gpu, QKV_METRIC_GPU_EVICTIONS, 1);
  return goes;
}

static qkv_cuda_memory find_memory(qkvi_gpu *gpu, const qkv_device_copy *copy) {
  for (;;) {
    const qkv_cuda_memory at = qkv_gpu_alloc(gpu->open, copy->bytes);
    if (at != 0 || !evict_one(gpu, copy)) return at;
  }
}

static bool upload(qkvi_gpu *gpu, const qkv_device_copy *copy, qkv_cuda_memory at) {
  uint64_t *list = (uint64_t *)(void *)copy->buffer;
  const uint64_t began = qkv_stage_now();
  for (uint32_t i = 0; i < copy->pages; i++) list[i] += at;
  const qkv_gpu_copy whole = {.to = at, .from = copy->buffer, .bytes = copy->bytes};
  if (qkv_gpu_upload(gpu->open, &whole, 1, NULL) != QKV_OK) return false;
  qkv_stage_add(QKV_STAGE_UPLOAD, began);
  qkvi_gpu_count(gpu, QKV_METRIC_GPU_UPLOADS, 1);
  qkvi_gpu_count(gpu, QKV_METRIC_GPU_UPLOAD_BYTES, copy->bytes);
  return true;
}

// Within the tenant's quota, for which ranges of its own that get less attention go.
static bool claim(qkvi_gpu *gpu, qkv_device_copy *copy) {
  if (copy->forgotten) return false;
  if (copy->account == NULL) return true;
  bool may = qkv_account_may_fit_gpu(copy->account, copy->bytes);
  while (may && !qkv_account_claim_gpu(copy->account, copy->bytes)) {
    qkv_device_copy *own = own_least_below(gpu, copy, copy->pages);
    may = own != NULL;
    if (!may) continue;
    leave_gpu(gpu, own);
    qkvi_gpu_count(gpu, QKV_METRIC_GPU_EVICTIONS, 1);
  }
  if (may) copy->claimed = copy->bytes;
  if (!may) qkv_account_wait_gpu(copy->account, qkv_now_ms() + FULL_MS);
  return may;
}

void qkvi_gpu_upload_next(qkvi_gpu *gpu) {
  qkv_device_copy *copy = gpu->queue;
  DL_DELETE(gpu->queue, copy);
  if (!claim(gpu, copy)) return end_fill(gpu, copy, QKVI_COPY_COUNTED);
  pthread_mutex_unlock(&gpu->lock);
  const qkv_cuda_memory at = find_memory(gpu, copy);
  const bool uploaded = at != 0 && upload(gpu, copy, at);
  if (at == 0 || !uploaded) qkvi_gpu_failed(gpu);
  pthread_mutex_lock(&gpu->lock);
  if (at == 0) {
    gpu->full = true;
    gpu->full_until_ms = qkv_now_ms() + FULL_MS;
  }
  if (uploaded && !copy->forgotten) {
    copy->at = at;
    qkvi_gpu_ranks_add(&gpu->resident, copy);
    end_fill(gpu, copy, QKVI_COPY_RESIDENT);
    return;
  }
  if (at != 0) qkv_gpu_free(gpu->open, at, copy->bytes);
  drop_claim(copy);
  end_fill(gpu, copy, QKVI_COPY_COUNTED);
}

// A thread that fills one now finds that the GPU is not usable.
void qkvi_gpu_drop_copies(qkvi_gpu *gpu) {
  assert(gpu->held == 0 && !gpu->usable);
  while (gpu->queue != NULL) {
    qkv_device_copy *copy = gpu->queue;
    DL_DELETE(gpu->queue, copy);
    end_fill(gpu, copy, QKVI_COPY_COUNTED);
  }
  while (gpu->resident.count > 0) leave_gpu(gpu, gpu->resident.items[gpu->resident.count - 1].copy);
}

void qkvi_gpu_destroy_copies(qkvi_gpu *gpu) {
  qkv_device_copy *copy, *next;
  HASH_ITER(hh, gpu->table, copy, next) {
    HASH_DEL(gpu->table, copy);  // NOLINT(clang-analyzer-unix.Malloc): what was freed is not linked any more
    free(copy);
  }
}
