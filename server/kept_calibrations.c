#include "server/kept_calibrations.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cache/coding.h"

enum { KEPT_MAX = 8 };  // of a tenant

typedef struct kept_calibration {
  char tenant[QKV_NAME_MAX + 1];  // who brought it; the model may be another one's
  const qkv_model *model;
  const qkv_calibration *calibration;
  bool leaves;  // for one that is about to come
} kept_calibration;

struct qkvi_kept_calibrations {
  pthread_mutex_t lock;
  uint64_t bytes_max;
  size_t count, capacity;
  kept_calibration *rows;  // the oldest first; `bytes_max` bounds them
};

qkvi_kept_calibrations *qkvi_kept_create(uint64_t bytes_max) {
  qkvi_kept_calibrations *kept = calloc(1, sizeof *kept);
  if (kept == NULL || pthread_mutex_init(&kept->lock, NULL) != 0) abort();
  kept->bytes_max = bytes_max;
  return kept;
}

void qkvi_kept_destroy(qkvi_kept_calibrations **kept) {
  qkvi_kept_calibrations *old = *kept;
  if (old == NULL) return;
  *kept = NULL;
  for (size_t i = 0; i < old->count; i++) qkv_calibration_unref(&old->rows[i].calibration);
  free(old->rows);
  (void)pthread_mutex_destroy(&old->lock);
  free(old);
}

static bool same_bytes(const qkv_calibration *a, const qkv_calibration *b) {
  size_t a_bytes, b_bytes;
  const void *a_data = qkv_calibration_bytes(a, &a_bytes), *b_data = qkv_calibration_bytes(b, &b_bytes);
  return a_bytes == b_bytes && memcmp(a_data, b_data, a_bytes) == 0;
}

static uint64_t bytes_of(const qkv_calibration *calibration) {
  size_t bytes;
  (void)qkv_calibration_bytes(calibration, &bytes);
  return bytes;
}

// The index of a version's row, or `count` where there is none. `tenant` NULL: a row of any tenant.
static size_t place_of(const qkvi_kept_calibrations *kept, const char *tenant, const qkv_model *model,
                       uint32_t version) {
  size_t i = 0;
  while (i < kept->count &&
         (kept->rows[i].model != model || qkv_calibration_version(kept->rows[i].calibration) != version ||
          (tenant != NULL && strcmp(kept->rows[i].tenant, tenant) != 0)))
    i++;
  return i;
}

typedef struct share {
  size_t rows, oldest;
  uint64_t bytes;
} share;

// What is kept for a tenant; NULL: for all.
static share share_of(const qkvi_kept_calibrations *kept, const char *tenant) {
  share of = {.oldest = kept->count};
  for (size_t i = kept->count; i-- > 0;) {
    const kept_calibration *row = &kept->rows[i];
    if (row->leaves || (tenant != NULL && strcmp(row->tenant, tenant) != 0)) continue;
    of.rows++;
    of.oldest = i;
    of.bytes += bytes_of(row->calibration);
  }
  return of;
}

// The oldest row of the tenant that has the most bytes, `tenant` with so many more than it has. `count`: that is
// `tenant`, and it has no row.
static size_t next_to_leave(const qkvi_kept_calibrations *kept, const char *tenant, uint64_t bytes) {
  const share own = share_of(kept, tenant);
  uint64_t most = own.bytes + bytes;
  size_t found = own.oldest;
  for (size_t i = 0; i < kept->count; i++) {
    const share of = share_of(kept, kept->rows[i].tenant);
    if (of.bytes <= most || strcmp(kept->rows[i].tenant, tenant) == 0) continue;
    most = of.bytes;
    found = of.oldest;
  }
  return found;
}

// Marks the rows that leave for one of so many bytes. False: there is not enough that may.
static bool mark_leaving(qkvi_kept_calibrations *kept, const char *tenant, uint64_t bytes) {
  const share own = share_of(kept, tenant);
  if (own.rows == KEPT_MAX) kept->rows[own.oldest].leaves = true;
  while (share_of(kept, NULL).bytes + bytes > kept->bytes_max) {
    const size_t leaves = next_to_leave(kept, tenant, bytes);
    if (leaves == kept->count) return false;
    kept->rows[leaves].leaves = true;
  }
  return true;
}

static void forget_leaving(qkvi_kept_calibrations *kept) {
  size_t left = 0;
  for (size_t i = 0; i < kept->count; i++) {
    if (kept->rows[i].leaves)
      qkv_calibration_unref(&kept->rows[i].calibration);
    else
      kept->rows[left++] = kept->rows[i];
  }
  kept->count = left;
}

static void append(qkvi_kept_calibrations *kept, const char *tenant, const qkv_model *model,
                   const qkv_calibration *calibration) {
  if (kept->count == kept->capacity) {
    kept->capacity = 2 * kept->capacity + KEPT_MAX;
    kept->rows = realloc(kept->rows, kept->capacity * sizeof *kept->rows);
    if (kept->rows == NULL) abort();
  }
  kept_calibration *row = &kept->rows[kept->count++];
  *row = (kept_calibration){.model = model, .calibration = qkv_calibration_ref(calibration)};
  (void)snprintf(row->tenant, sizeof row->tenant, "%s", tenant);
}

// False, and nothing changes, where only other tenants' could leave for it, who have less.
static bool put(qkvi_kept_calibrations *kept, const char *tenant, const qkv_model *model,
                const qkv_calibration *calibration) {
  (void)pthread_mutex_lock(&kept->lock);
  const size_t same = place_of(kept, tenant, model, qkv_calibration_version(calibration));
  if (same < kept->count) kept->rows[same].leaves = true;
  const bool fits = mark_leaving(kept, tenant, bytes_of(calibration));
  for (size_t i = 0; i < kept->count && !fits; i++) kept->rows[i].leaves = false;
  if (fits) forget_leaving(kept);
  if (fits) append(kept, tenant, model, calibration);
  (void)pthread_mutex_unlock(&kept->lock);
  return fits;
}

bool qkvi_kept_renew(qkvi_kept_calibrations *kept, const char *tenant, const qkv_model *model,
                     const qkv_calibration *calibration) {
  (void)pthread_mutex_lock(&kept->lock);
  const size_t at = place_of(kept, tenant, model, qkv_calibration_version(calibration));
  const bool has = at < kept->count && same_bytes(kept->rows[at].calibration, calibration);
  if (has) {
    const kept_calibration row = kept->rows[at];
    memmove(&kept->rows[at], &kept->rows[at + 1], (kept->count - at - 1) * sizeof row);
    kept->rows[kept->count - 1] = row;
  }
  (void)pthread_mutex_unlock(&kept->lock);
  return has;
}

qkv_status qkvi_kept_put(qkvi_kept_calibrations *kept, const char *tenant, const qkv_model *model,
                         const qkv_calibration *calibration, qkv_error *error) {
  if (bytes_of(calibration) > kept->bytes_max)
    return qkv_fail(error, QKV_RESOURCE_EXHAUSTED,
                    "model.calibration has %" PRIu64 " bytes, those that are kept may have %" PRIu64
                    ", an eighth of memory-budget",
                    bytes_of(calibration), kept->bytes_max);
  if (qkvi_kept_renew(kept, tenant, model, calibration)) return QKV_OK;
  const uint32_t version = qkv_calibration_version(calibration);
  const qkv_calibration *known = qkvi_kept_find(kept, model, version);
  const bool other = known != NULL && !same_bytes(known, calibration);
  qkv_calibration_unref(&known);
  if (other)
    return qkv_fail(error, QKV_ALREADY_EXISTS, "the model %s has another calibration of version %" PRIu32 " already",
                    model->name, version);
  if (put(kept, tenant, model, calibration)) return QKV_OK;
  return qkv_fail(error, QKV_RESOURCE_EXHAUSTED,
                  "model.calibration has %" PRIu64 " bytes, those that are kept may have %" PRIu64
                  " together, and no other tenant has more of them than %s would have",
                  bytes_of(calibration), kept->bytes_max, tenant);
}

static const qkv_calibration *find_kept(qkvi_kept_calibrations *kept, const qkv_model *model, uint32_t version) {
  (void)pthread_mutex_lock(&kept->lock);
  const size_t at = place_of(kept, NULL, model, version);
  const qkv_calibration *found = at < kept->count ? qkv_calibration_ref(kept->rows[at].calibration) : NULL;
  (void)pthread_mutex_unlock(&kept->lock);
  return found;
}

// Drops `found` unless it has that version.
static bool fits(const qkv_calibration **found, uint32_t version) {
  if (*found != NULL && qkv_calibration_version(*found) != version) qkv_calibration_unref(found);
  return *found != NULL;
}

const qkv_calibration *qkvi_kept_find(qkvi_kept_calibrations *kept, const qkv_model *model, uint32_t version) {
  const qkv_calibration *found = qkv_calibration_slot_get(model->calibration);
  if (fits(&found, version)) return found;
  found = model->learner != NULL ? qkv_learner_on_trial(model->learner) : NULL;
  if (fits(&found, version)) return found;
  found = qkv_coding_find_calibration(model, version);
  return found != NULL ? found : find_kept(kept, model, version);
}
