// A coding: how all layers of a model are coded for one policy, one purpose and one calibration.
//
// Sessions that are coded alike share one. It is reference counted: a session holds one reference for each coding
// that any of its pages may have been written with.
//
// Threads: any.
#ifndef QKV_ENGINE_CACHE_CODING_H
#define QKV_ENGINE_CACHE_CODING_H

#include <stdint.h>

#include "engine/cache/model.h"
#include "engine/codec/calibration.h"

typedef struct qkv_coding qkv_coding;

// The policy is resolved. Models are the same where their addresses are, calibrations (NULL: data-free) where their
// versions are. The model outlives the coding; of the calibration it takes a reference.
qkv_coding *qkv_coding_get(const qkv_model *model, const qkv_policy *policy, qkv_purpose purpose,
                           const qkv_calibration *calibration);
qkv_coding *qkv_coding_ref(qkv_coding *coding);
void qkv_coding_unref(qkv_coding **coding);

// The most memory that a coding takes, without its calibration; whether there is one or not.
uint64_t qkv_coding_cost(const qkv_model *model, const qkv_policy *policy, qkv_purpose purpose,
                         const qkv_calibration *calibration);
// Whether two policies, resolved, have the same coding, where all else is equal.
bool qkv_coding_alike(const qkv_policy *a, const qkv_policy *b);
// A hash: equal for policies that have the same coding.
uint64_t qkv_coding_hash(const qkv_policy *policy);

// The calibration of this version, if any coding of the model is made with it, with a reference for the caller; else
// NULL.
const qkv_calibration *qkv_coding_find_calibration(const qkv_model *model, uint32_t version);

// Memory of all codings in the process, without their calibrations.
uint64_t qkv_coding_bytes_held(void);

// Whether a coder is one of the coding's.
bool qkv_coding_has(const qkv_coding *coding, const qkv_coder *coder);
// The coding's calibration, without a reference for the caller; NULL: data-free.
const qkv_calibration *qkv_coding_calibration(const qkv_coding *coding);

// Alive as long as the coding.
const qkv_coder *qkv_coding_layer(const qkv_coding *coding, uint32_t layer);

#endif
