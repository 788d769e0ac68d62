// Memory of other processes, opened on the GPU.
#include <assert.h>
#include <inttypes.h>
#include <string.h>
#include <utlist.h>

#include "server/gpu/append.h"
#include "server/gpu/internal.h"
#include "server/gpu/rows.h"

struct qkvi_gpu_lent {
  qkvi_gpu *gpu;
  uint64_t opening;  // of the GPU, with which it ends
  qkv_gpu_lent lent;
  uint64_t offset, bytes;
  struct qkvi_gpu_lent *next;  // given back, and not closed yet
};

// ---- The GPU stays open meanwhile ----

static uint64_t opening_of(qkvi_gpu *gpu) {
  pthread_mutex_lock(&gpu->lock);
  const uint64_t opening = gpu->openings;
  pthread_mutex_unlock(&gpu->lock);
  return opening;
}

// False: it is not in use, or was opened again since.
static bool hold(const qkvi_gpu_lent *lent) {
  if (!qkvi_gpu_enter(lent->gpu)) return false;
  if (opening_of(lent->gpu) == lent->opening) return true;
  qkvi_gpu_leave(lent->gpu);
  return false;
}

// After an operation of the device.
static qkv_status end(qkvi_gpu *gpu, qkv_status status) {
  if (status != QKV_OK) qkvi_gpu_failed(gpu);
  qkvi_gpu_leave(gpu);
  return status;
}

// ---- Opening ----

static qkv_status open_lent(const qkvi_gpu *gpu, const qkvi_gpu_loan *loan, qkv_gpu_lent *lent, qkv_error *error) {
  qkv_cuda_ipc handle;
  if (loan->handle == NULL) {
    QKV_TRY(qkv_gpu_open_descriptors(gpu->open, loan->descriptors, loan->descriptor_count, loan->descriptor_bytes,
                                     lent, error));
    return QKV_OK;
  }
  memcpy(handle.bytes, loan->handle, sizeof handle.bytes);
  return qkv_gpu_open_handle(gpu->open, &handle, lent, error);
}

static qkv_status check_extent(const qkvi_gpu_loan *loan, uint64_t bytes, qkv_error *error) {
  if (loan->offset <= bytes && loan->bytes <= bytes - loan->offset) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT,
                  "offset is %" PRIu64 " and region.byte_size %" PRIu64 ", the memory behind %s has %" PRIu64
                  " bytes",
                  loan->offset, loan->bytes, loan->handle != NULL ? "raw_handle" : "descriptor", bytes);
}

// The GPU is held.
static qkv_status lend(const qkvi_gpu *gpu, const qkvi_gpu_loan *loan, qkvi_gpu_lent *lent, qkv_error *error) {
  const qkv_gpu_info info = qkv_gpu_read(gpu->open);
  if (loan->device_id != info.ordinal)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "region.device_id is %" PRId64 ", this daemon uses GPU %d, %s",
                    loan->device_id, info.ordinal, info.uuid);
  if (open_lent(gpu, loan, &lent->lent, error) != QKV_OK)
    return qkv_error_prefix(error, "%s cannot be opened: ", loan->handle != NULL ? "raw_handle" : "descriptor");
  const qkv_status status = check_extent(loan, lent->lent.bytes, error);
  if (status != QKV_OK) qkv_gpu_close_lent(gpu->open, &lent->lent);
  return status;
}

static qkv_status not_used(qkv_error *error) {
  return qkv_fail(error, QKV_UNAVAILABLE, "the GPU is not used now, after it has failed");
}

qkv_status qkvi_gpu_lend(qkvi_gpu *gpu, const qkvi_gpu_loan *loan, qkvi_gpu_lent **out, qkv_error *error) {
  assert(loan->bytes > 0);
  *out = NULL;
  if (!qkvi_gpu_enter(gpu)) return not_used(error);
  qkvi_gpu_lent *lent = malloc(sizeof *lent);
  if (lent == NULL) abort();
  *lent = (qkvi_gpu_lent){.gpu = gpu, .opening = opening_of(gpu), .offset = loan->offset, .bytes = loan->bytes};
  const qkv_status status = end(gpu, lend(gpu, loan, lent, error));
  if (status == QKV_OK)
    *out = lent;
  else
    free(lent);
  return status;
}

// Closing waits for the driver, which a caller may not.
void qkvi_gpu_give_back(qkvi_gpu_lent **lent) {
  qkvi_gpu_lent *old = *lent;
  if (old == NULL) return;
  *lent = NULL;
  qkvi_gpu *gpu = old->gpu;
  pthread_mutex_lock(&gpu->lock);
  LL_PREPEND(gpu->given_back, old);
  pthread_cond_broadcast(&gpu->changed);
  pthread_mutex_unlock(&gpu->lock);
}

void qkvi_gpu_close_given_back(qkvi_gpu *gpu) {
  qkvi_gpu_lent *lent = gpu->given_back;
  LL_DELETE(gpu->given_back, lent);
  const bool closes = gpu->open != NULL && lent->opening == gpu->openings;
  pthread_mutex_unlock(&gpu->lock);
  if (closes) qkv_gpu_close_lent(gpu->open, &lent->lent);
  free(lent);
  pthread_mutex_lock(&gpu->lock);
}

bool qkvi_gpu_lent_lives(qkvi_gpu_lent *lent) {
  const bool lives = hold(lent);
  if (lives) qkvi_gpu_leave(lent->gpu);
  return lives;
}

bool qkvi_gpu_lent_is_aligned(const qkvi_gpu_lent *lent, uint64_t offset, size_t size) {
  return (lent->lent.at + lent->offset + offset) % size == 0;
}

// ---- Copies ----

static qkv_status has_gone(qkv_error *error) {
  return qkv_fail(error, QKV_UNAVAILABLE, "the GPU has failed since it was registered; register it again");
}

qkv_status qkvi_gpu_lent_read(qkvi_gpu_lent *lent, uint64_t offset, void *out, size_t bytes, qkv_error *error) {
  assert(offset <= lent->bytes && bytes <= lent->bytes - offset);
  if (!hold(lent)) return has_gone(error);
  const qkv_gpu_copy_back copy = {.to = out, .from = lent->lent.at + lent->offset + offset, .bytes = bytes};
  return end(lent->gpu, bytes > 0 ? qkv_gpu_download(lent->gpu->open, &copy, 1, error) : QKV_OK);
}

qkvi_gpu *qkvi_gpu_lent_on(const qkvi_gpu_lent *lent) {
  return lent->gpu;
}

qkvi_gpu_area *qkvi_gpu_area_take(const qkvi_gpu_lent *lent) {
  return qkvi_gpu_area_new(lent->gpu);
}

qkv_status qkvi_gpu_lent_take(qkvi_gpu_lent *lent, uint64_t offset, void *out, size_t bytes, qkvi_gpu_area *area,
                              qkv_cuda_memory *at, qkv_error *error) {
  assert(offset <= lent->bytes && bytes <= lent->bytes - offset);
  *at = bytes > 0 ? qkvi_gpu_area_space(area, lent->gpu, lent->opening, bytes) : 0;
  if (*at == 0) return qkvi_gpu_lent_read(lent, offset, out, bytes, error);
  if (!hold(lent)) return has_gone(error);
  const qkv_gpu_copy_back copy = {.to = out, .from = *at, .bytes = bytes};
  qkv_status status = qkv_gpu_copy_within(lent->gpu->open, *at, lent->lent.at + lent->offset + offset, bytes, error);
  if (status == QKV_OK) status = qkv_gpu_download(lent->gpu->open, &copy, 1, error);
  return end(lent->gpu, status);
}

qkv_status qkvi_gpu_lent_write(qkvi_gpu_lent *lent, uint64_t offset, const void *data, size_t bytes,
                               qkv_error *error) {
  assert(offset <= lent->bytes && bytes <= lent->bytes - offset);
  if (!hold(lent)) return has_gone(error);
  const qkv_gpu_copy copy = {.to = lent->lent.at + lent->offset + offset, .from = data, .bytes = bytes};
  return end(lent->gpu, bytes > 0 ? qkv_gpu_upload(lent->gpu->open, &copy, 1, error) : QKV_OK);
}

// ---- Rows ----

static qkv_status fetch_one(qkvi_gpu_lent *const lent[2], bool k, bool v, const qkvi_gpu_rows *rows,
                            qkv_error *error) {
  const bool wanted[2] = {k, v};
  const qkvi_gpu_lent *any = lent[k ? QKV_K : QKV_V];
  qkvi_gpu_rows there = *rows;
  for (int part = 0; part < 2; part++)
    there.to[part].at = wanted[part] ? lent[part]->lent.at + lent[part]->offset + rows->to[part].at : 0;
  if (!hold(any)) return has_gone(error);
  return end(any->gpu, qkvi_gpu_fetch(any->gpu, &there, error));
}

qkv_status qkvi_gpu_lent_fetch(qkvi_gpu_lent *const lent[2], const qkvi_gpu_rows *rows, qkv_error *error) {
  const qkvi_gpu_lent *k = lent[QKV_K], *v = lent[QKV_V];
  if (k != NULL && v != NULL && k->gpu == v->gpu && k->opening == v->opening)
    return fetch_one(lent, true, true, rows, error);
  if (k != NULL) QKV_TRY(fetch_one(lent, true, false, rows, error));
  return v != NULL ? fetch_one(lent, false, true, rows, error) : QKV_OK;
}
