// A model: the geometry of a KV cache and how it is coded.
//
// Immutable once registered, so shared without locks. Fields, defaults and limits are those of
// proto/qkv/v1/model.proto.
#ifndef QKV_ENGINE_CACHE_MODEL_H
#define QKV_ENGINE_CACHE_MODEL_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/base/name.h"
#include "engine/base/status.h"
#include "engine/base/tensor.h"
#include "engine/cache/calibration_slot.h"
#include "engine/cache/learner.h"
#include "engine/codec/codec.h"
#include "engine/codec/policy.h"
#include "engine/codec/rope.h"

#define QKV_LAYERS_MAX 1024
#define QKV_Q_HEADS_MAX 65536

// Fields that are not set in `policy` are taken from `fallback`.
void qkv_policy_merge(qkv_policy *policy, const qkv_policy *fallback);
// Limits of the fields that are set. INVALID_ARGUMENT "policy.bits_k is 0.3, allowed are multiples of 0.125 up
// to 8".
qkv_status qkv_policy_check(const qkv_policy *policy, qkv_error *error);
// Whether two policies are the same in every field.
bool qkv_policy_equal(const qkv_policy *a, const qkv_policy *b);
// Equal policies have the same.
uint64_t qkv_policy_hash(const qkv_policy *policy);

// Settings of one layer. 0, or a field that is not set: as in the model. A field that the policy sets overrides the
// session's.
typedef struct qkv_layer_override {
  uint32_t layer;
  uint64_t sliding_window;
  double soft_cap;
  qkv_policy policy;
} qkv_layer_override;

typedef struct qkv_model {
  char tenant[QKV_NAME_MAX + 1];  // whose it is; "": resolved to the default one. No part of equality
  char name[QKV_NAME_MAX + 1];
  uint32_t layers;
  uint32_t kv_heads, q_heads;
  uint32_t key_dim, value_dim;
  qkv_dtype dtype;          // of exact rows
  qkv_rope rope;            // theta 0: none
  double scale;             // > 0 once resolved
  uint64_t sliding_window;  // 0: none
  double soft_cap;          // 0: none
  qkv_policy policy;
  qkv_policy asked;  // that of its registration, before the store's was merged into it; no part of equality
  const qkv_codec
      *archive_codec;  // of sessions that are fetched (below), the store's; NULL: none. No part of equality
  qkv_layer_override *overrides;  // at most one for each layer, in their order; borrowed
  uint32_t override_count;
  // The calibration of pages to come; NULL: data-free for ever. Borrowed, no part of equality.
  qkv_calibration_slot *calibration;
  qkv_learner *learner;  // NULL: all layers stay exact, or are kept out; borrowed, the same
} qkv_model;

// NULL where the layer has no override.
const qkv_layer_override *qkv_model_override(const qkv_model *model, uint32_t layer);
// A layer's own, or the model's.
uint64_t qkv_model_window(const qkv_model *model, uint32_t layer);
double qkv_model_cap(const qkv_model *model, uint32_t layer);
// How a layer of a session is coded: the layer's override before the session's policy, which has been resolved. Rows
// that the session's keeps out of learning stay out, whatever the override says.
qkv_policy qkv_model_policy(const qkv_model *model, uint32_t layer, const qkv_policy *session);
// Completes a session's own policy by the model's. In sessions of another tenant than the model's, rows teach its
// calibration only where the session's own policy says so.
void qkv_model_merge_policy(const qkv_model *model, const char *tenant, qkv_policy *session);
// Gives a resolved policy, whose codec neither the session nor the model has named, the archive codec. Returns
// whether that is so: there is one, it has the policy's bits, and the policy has nothing that is embedded's alone.
bool qkv_model_archive(const qkv_model *model, qkv_policy *policy);
// Checks the policies that the two result in for each layer: INVALID_ARGUMENT "layer 3: policy.bits_k is 16, ...".
qkv_status qkv_model_policy_check(const qkv_model *model, const qkv_policy *session, qkv_error *error);

// Fills in defaults (scale, RoPE, dtype stays as given and must be set) and checks every limit.
// INVALID_ARGUMENT names the field: "model.q_heads is 7, must be a multiple of kv_heads 2".
qkv_status qkv_model_resolve(qkv_model *model, qkv_error *error);

// A scale or a soft cap is 0 (not set) or within these, so that scores stay finite in fp32.
#define QKV_FACTOR_MIN 1e-6
#define QKV_FACTOR_MAX 1e6
// INVALID_ARGUMENT "options.scale is nan", "model.soft_cap is 1e+09, allowed are 0 and 1e-06 to 1e+06".
qkv_status qkv_factor_check(const char *field, double value, qkv_error *error);

// A calibration for pages to come, in sessions open or not, once it has been tried (learner.h), or at once where it
// is trusted. INVALID_ARGUMENT where it does not fit. The model is a store's (store.h). Threads: any.
qkv_status qkv_model_calibrate(const qkv_model *model, const qkv_calibration *calibration,
                               qkv_calibration_source source, bool trusted, qkv_error *error);

// What a calibration of this model has to fit.
qkv_calibration_shape qkv_model_calibration_shape(const qkv_model *model);
// The specification of this model's coders; policies [layers], resolved, and the model are borrowed.
qkv_coder_spec qkv_model_coder_spec(const qkv_model *model, const qkv_policy *policies, qkv_purpose purpose,
                                    const qkv_calibration *calibration);

// Whether two resolved models are the same in every field.
bool qkv_model_equal(const qkv_model *a, const qkv_model *b);
// The first field of the contract in which they are not; NULL where they are the same.
const char *qkv_model_difference(const qkv_model *a, const qkv_model *b);

#endif
