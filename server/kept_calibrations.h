// Calibrations that models do not code with: kept for pages that were coded elsewhere (Model.calibration_kept), and
// found by their version, wherever the daemon has them.
//
// The last KEPT_MAX that each tenant added are kept, all together in at most an eighth of memory-budget, in which
// they count (docs/calibration.md). Where that is full, the oldest ones leave of the tenant that has the most bytes,
// the new one counted: a tenant's own, or those of one that has more. Sessions with pages of a calibration hold it
// themselves.
//
// Threads: any.
#ifndef QKV_SERVER_KEPT_CALIBRATIONS_H
#define QKV_SERVER_KEPT_CALIBRATIONS_H

#include "engine/cache/model.h"

typedef struct qkvi_kept_calibrations qkvi_kept_calibrations;

// `bytes_max` of all together.
qkvi_kept_calibrations *qkvi_kept_create(uint64_t bytes_max);
void qkvi_kept_destroy(qkvi_kept_calibrations **kept);  // NULL is none

// Keeps it for the tenant that brings it, with a reference of its own, and evicts older ones; one that has been kept
// for it becomes the newest. RESOURCE_EXHAUSTED
// where it alone is larger than `bytes_max`, or tenants would have to leave that have less; ALREADY_EXISTS where the
// daemon has another one of its version. On failure nothing changes.
qkv_status qkvi_kept_put(qkvi_kept_calibrations *kept, const char *tenant, const qkv_model *model,
                         const qkv_calibration *calibration, qkv_error *error);

// Whether the tenant has it already: then it becomes the newest.
bool qkvi_kept_renew(qkvi_kept_calibrations *kept, const char *tenant, const qkv_model *model,
                     const qkv_calibration *calibration);

// The model's calibration of that version: in force, waiting for its trial, of a session's pages, or kept. With a
// reference for the caller; NULL: there is none.
const qkv_calibration *qkvi_kept_find(qkvi_kept_calibrations *kept, const qkv_model *model, uint32_t version);

#endif
