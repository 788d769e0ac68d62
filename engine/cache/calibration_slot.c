#include "engine/cache/calibration_slot.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

struct qkv_calibration_slot {
  pthread_mutex_t lock;
  const qkv_calibration *calibration;
  _Atomic uint32_t version;
};

qkv_calibration_slot *qkv_calibration_slot_create(void) {
  qkv_calibration_slot *slot = calloc(1, sizeof *slot);
  if (slot == NULL || pthread_mutex_init(&slot->lock, NULL) != 0) abort();
  return slot;
}

void qkv_calibration_slot_destroy(qkv_calibration_slot **slot) {
  qkv_calibration_slot *old = *slot;
  if (old == NULL) return;
  *slot = NULL;
  qkv_calibration_unref(&old->calibration);
  (void)pthread_mutex_destroy(&old->lock);
  free(old);
}

void qkv_calibration_slot_set(qkv_calibration_slot *slot, const qkv_calibration *calibration) {
  (void)pthread_mutex_lock(&slot->lock);
  const qkv_calibration *old = slot->calibration;
  slot->calibration = qkv_calibration_ref(calibration);
  atomic_store_explicit(&slot->version, calibration != NULL ? qkv_calibration_version(calibration) : 0,
                        memory_order_release);
  (void)pthread_mutex_unlock(&slot->lock);
  qkv_calibration_unref(&old);
}

const qkv_calibration *qkv_calibration_slot_get(qkv_calibration_slot *slot) {
  (void)pthread_mutex_lock(&slot->lock);
  const qkv_calibration *calibration = qkv_calibration_ref(slot->calibration);
  (void)pthread_mutex_unlock(&slot->lock);
  return calibration;
}

uint32_t qkv_calibration_slot_version(const qkv_calibration_slot *slot) {
  return atomic_load_explicit(&slot->version, memory_order_acquire);
}
