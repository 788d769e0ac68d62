#include "server/kept_calibrations.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cache/coding.h"

enum { KEPT_MAX = 8 };

typedef struct kept_calibration {
  const qkv_model *model;
  const qkv_calibration *calibration;
} kept_calibration;

struct qkvi_kept_calibrations {
  pthread_mutex_t lock;
  uint64_t bytes_max;
  size_t count;
  kept_calibration rows[KEPT_MAX];  // the oldest first
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

static void forget(qkvi_kept_calibrations *kept, size_t at) {
  qkv_calibration_unref(&kept->rows[at].calibration);
  kept->count--;
  for (size_t i = at; i < kept->count; i++) kept->rows[i] = kept->rows[i + 1];
}

// The row of a version, or `count`.
static size_t place_of(const qkvi_kept_calibrations *kept, const qkv_model *model, uint32_t version) {
  size_t i = 0;
  while (i < kept->count &&
         (kept->rows[i].model != model || qkv_calibration_version(kept->rows[i].calibration) != version))
    i++;
  return i;
}

static uint64_t bytes_held(const qkvi_kept_calibrations *kept) {
  uint64_t bytes = 0;
  for (size_t i = 0; i < kept->count; i++) bytes += bytes_of(kept->rows[i].calibration);
  return bytes;
}

static void put(qkvi_kept_calibrations *kept, const qkv_model *model, const qkv_calibration *calibration) {
  (void)pthread_mutex_lock(&kept->lock);
  const size_t same = place_of(kept, model, qkv_calibration_version(calibration));
  if (same < kept->count) forget(kept, same);
  while (kept->count == KEPT_MAX || (kept->count > 0 && bytes_held(kept) + bytes_of(calibration) > kept->bytes_max))
    forget(kept, 0);
  kept->rows[kept->count++] = (kept_calibration){model, qkv_calibration_ref(calibration)};
  (void)pthread_mutex_unlock(&kept->lock);
}

qkv_status qkvi_kept_put(qkvi_kept_calibrations *kept, const qkv_model *model, const qkv_calibration *calibration,
                         qkv_error *error) {
  if (bytes_of(calibration) > kept->bytes_max)
    return qkv_fail(error, QKV_RESOURCE_EXHAUSTED,
                    "model.calibration has %" PRIu64 " bytes, those that are kept may have %" PRIu64
                    ", an eighth of memory-budget",
                    bytes_of(calibration), kept->bytes_max);
  const uint32_t version = qkv_calibration_version(calibration);
  const qkv_calibration *known = qkvi_kept_find(kept, model, version);
  const bool other = known != NULL && !same_bytes(known, calibration);
  qkv_calibration_unref(&known);
  if (other)
    return qkv_fail(error, QKV_ALREADY_EXISTS, "the model %s has another calibration of version %" PRIu32 " already",
                    model->name, version);
  put(kept, model, calibration);
  return QKV_OK;
}

static const qkv_calibration *find_kept(qkvi_kept_calibrations *kept, const qkv_model *model, uint32_t version) {
  (void)pthread_mutex_lock(&kept->lock);
  const size_t at = place_of(kept, model, version);
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
