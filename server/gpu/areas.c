// Areas: append.h.
#include <assert.h>
#include <stdlib.h>

#include "server/gpu/append.h"
#include "server/gpu/internal.h"

enum { ALIGN = 256 };

// Without memory for them there are none.
void qkvi_gpu_prepare_areas(qkvi_gpu *gpu, qkv_gpu_device *device) {
  for (size_t i = 0; i < QKVI_GPU_AREAS && gpu->config.area_bytes > 0; i++) {
    const qkv_cuda_memory at = qkv_gpu_alloc(device, gpu->config.area_bytes);
    pthread_mutex_lock(&gpu->lock);
    gpu->areas[i] = (qkvi_gpu_area_slot){.at = at};
    pthread_mutex_unlock(&gpu->lock);
  }
}

qkvi_gpu_area *qkvi_gpu_area_new(qkvi_gpu *gpu) {
  qkvi_gpu_area *area = calloc(1, sizeof *area);
  if (area == NULL) abort();
  area->gpu = gpu;
  pthread_mutex_lock(&gpu->lock);
  for (size_t i = 0; gpu->usable && i < QKVI_GPU_AREAS && area->at == 0; i++) {
    qkvi_gpu_area_slot *slot = &gpu->areas[i];
    if (slot->at == 0 || slot->user != NULL) continue;
    slot->user = area;
    area->at = slot->at;
    area->opening = gpu->openings;
  }
  pthread_mutex_unlock(&gpu->lock);
  if (area->at != 0) return area;
  free(area);
  return NULL;
}

// One that was taken before the GPU failed is in no slot any more.
void qkvi_gpu_area_return(qkvi_gpu_area **area) {
  qkvi_gpu_area *old = *area;
  if (old == NULL) return;
  *area = NULL;
  pthread_mutex_lock(&old->gpu->lock);
  for (size_t i = 0; i < QKVI_GPU_AREAS; i++) {
    if (old->gpu->areas[i].user == old) old->gpu->areas[i].user = NULL;
  }
  pthread_mutex_unlock(&old->gpu->lock);
  free(old->coded.results);
  free(old);
}

bool qkvi_gpu_enter_area(qkvi_gpu_area *area) {
  if (!qkvi_gpu_enter(area->gpu)) return false;
  pthread_mutex_lock(&area->gpu->lock);
  const bool same = area->gpu->openings == area->opening;
  pthread_mutex_unlock(&area->gpu->lock);
  if (!same) qkvi_gpu_leave(area->gpu);
  return same;
}

qkv_cuda_memory qkvi_gpu_area_space(qkvi_gpu_area *area, const qkvi_gpu *gpu, uint64_t opening, size_t bytes) {
  if (area == NULL || area->gpu != gpu || area->opening != opening) return 0;
  if (bytes > area->gpu->config.area_bytes - area->used) return 0;
  const qkv_cuda_memory at = area->at + area->used;
  const uint64_t next = (area->used + bytes + ALIGN - 1) / ALIGN * ALIGN;
  area->used = next < area->gpu->config.area_bytes ? next : area->gpu->config.area_bytes;
  return at;
}
