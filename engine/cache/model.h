// A model: the geometry of a KV cache and how it is coded.
//
// Immutable once registered, so shared without locks. Fields, defaults and limits are those of
// proto/qkv/v1/model.proto.
#ifndef QKV_ENGINE_CACHE_MODEL_H
#define QKV_ENGINE_CACHE_MODEL_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/base/status.h"
#include "engine/base/tensor.h"
#include "engine/codec/codec.h"
#include "engine/codec/rope.h"

#define QKV_NAME_MAX 128  // characters of a model's, session's or tenant's name
#define QKV_LAYERS_MAX 1024
#define QKV_Q_HEADS_MAX 65536
#define QKV_RECENT_WINDOW_MAX 1048576  // tokens

// How rows are coded. 0, NULL and -1 mean "not said here" until qkv_policy_merge has filled them in.
typedef struct qkv_policy {
  const qkv_codec *codec;
  double bits_k, bits_v;
  int64_t recent_window;  // tokens kept exact beside the open page; -1 not said
} qkv_policy;

#define QKV_POLICY_UNSET ((qkv_policy){NULL, 0, 0, -1})

// Fields that `policy` does not say are taken from `fallback`.
void qkv_policy_merge(qkv_policy *policy, const qkv_policy *fallback);
// Limits of what is said. INVALID_ARGUMENT "policy.bits_k is 5, allowed are 1, 2, 3, 4 and 8".
qkv_status qkv_policy_check(const qkv_policy *policy, qkv_error *error);

typedef struct qkv_model {
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
} qkv_model;

// Letters, digits and ._:/@- ; 1 to QKV_NAME_MAX. INVALID_ARGUMENT names `field`.
qkv_status qkv_name_check(const char *name, const char *field, qkv_error *error);

// Fills in defaults (scale, RoPE, dtype stays as given and must be set) and checks every limit.
// INVALID_ARGUMENT names the field: "model.q_heads is 7, must be a multiple of kv_heads 2".
qkv_status qkv_model_resolve(qkv_model *model, qkv_error *error);

// A scale or a soft cap is 0 (not said) or within these, so that scores stay finite in fp32.
#define QKV_FACTOR_MIN 1e-6
#define QKV_FACTOR_MAX 1e6
// INVALID_ARGUMENT "options.scale is nan", "model.soft_cap is 1e+09, allowed are 0 and 1e-06 to 1e+06".
qkv_status qkv_factor_check(const char *field, double value, qkv_error *error);

// Whether two resolved models are the same in every field.
bool qkv_model_equal(const qkv_model *a, const qkv_model *b);
// The first field of the contract in which they are not; NULL where they are the same.
const char *qkv_model_difference(const qkv_model *a, const qkv_model *b);

#endif
