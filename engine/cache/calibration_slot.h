// The calibration that a model's new pages are coded with: none at first, then one version after the other. Existing
// pages keep theirs.
//
// Threads: any.
#ifndef QKV_ENGINE_CACHE_CALIBRATION_SLOT_H
#define QKV_ENGINE_CACHE_CALIBRATION_SLOT_H

#include <stdint.h>

#include "engine/codec/calibration.h"

typedef struct qkv_calibration_slot qkv_calibration_slot;

qkv_calibration_slot *qkv_calibration_slot_create(void);
void qkv_calibration_slot_destroy(qkv_calibration_slot **slot);

// Takes a reference of its own; NULL: data-free from now on.
void qkv_calibration_slot_set(qkv_calibration_slot *slot, const qkv_calibration *calibration);
// With a reference for the caller; NULL: none.
const qkv_calibration *qkv_calibration_slot_get(qkv_calibration_slot *slot);
// The version of the one that get() would give, without a lock; 0: none.
uint32_t qkv_calibration_slot_version(const qkv_calibration_slot *slot);

#endif
