// Converts between the contract's messages and the engine's structs: models, policies, sessions.
//
// Results point into their source and live as long. Threads: pure, but that a model's calibration is read.
#ifndef QKV_SERVER_HANDLERS_CONTRACT_H
#define QKV_SERVER_HANDLERS_CONTRACT_H

#include "engine/cache/session.h"
#include "proto/parameters.h"
#include "qkv/v1/kv_cache.pb-c.h"

// INVALID_ARGUMENT names the field ("dtype is 9, known are ..."), UNIMPLEMENTED what is not served yet. Limits
// of the numbers are qkv_model_resolve's. The calibration is ignored. The model must be cleared, also after an error.
qkv_status qkvi_model_read(const Qkv__V1__Model *message, qkv_model *model, qkv_error *error);
void qkvi_model_clear(qkv_model *model);
// Whether a session or an object of this retention may be closed; UNSPECIFIED is the daemon's default.
qkv_status qkvi_retention_read(Qkv__V1__Retention retention, bool evict_by_default, bool *evictable,
                               qkv_error *error);
// `message` may be NULL: nothing is said.
qkv_status qkvi_policy_read(const Qkv__V1__CodecPolicy *message, qkv_policy *policy, qkv_error *error);

// Storage of the parameter messages of a policy.
typedef struct qkvi_parameters_buffer {
  _Alignas(16) unsigned char messages[2][QKV_PARAMETERS_MAX][QKV_PARAMETERS_MESSAGE_MAX];
} qkvi_parameters_buffer;

typedef struct qkvi_override_message {
  Qkv__V1__LayerOverride override;
  Qkv__V1__CodecPolicy policy;
  qkvi_parameters_buffer parameters;
} qkvi_override_message;

// A model as a message, with the storage of its parts; to be cleared.
typedef struct qkvi_model_message {
  Qkv__V1__Model model;
  Qkv__V1__Rope rope;
  Qkv__V1__CodecPolicy policy;
  qkvi_parameters_buffer parameters;
  qkvi_override_message *overrides;
  Qkv__V1__LayerOverride **override_list;
} qkvi_model_message;
void qkvi_model_write(const qkv_model *model, qkvi_model_message *message);
void qkvi_model_message_clear(qkvi_model_message *message);

// How a model is calibrated, as a message, with its texts.
typedef struct qkvi_calibration_message {
  Qkv__V1__CalibrationState state;
  qkv_calibration_state read;
} qkvi_calibration_message;
void qkvi_calibration_write(const qkv_model *model, qkvi_calibration_message *message);

typedef struct qkvi_session_message {
  Qkv__V1__SessionInfo info;
  Qkv__V1__CodecPolicy policy;
  qkvi_parameters_buffer parameters;
  uint8_t prefix_root[sizeof(qkv_prefix_hash)];
} qkvi_session_message;
// `lengths` has one entry for each layer and is borrowed; NULL leaves them out.
void qkvi_session_write(const qkv_session_info *info, uint64_t *lengths, qkvi_session_message *message);

#endif
