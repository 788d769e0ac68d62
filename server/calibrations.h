// Calibrations from files: what --calibration MODEL=FILE gives to the default tenant's model that is registered under
// that name.
//
// Threads: immutable once loaded.
#ifndef QKV_SERVER_CALIBRATIONS_H
#define QKV_SERVER_CALIBRATIONS_H

#include "engine/base/option.h"
#include "engine/codec/calibration.h"

typedef struct qkvi_calibrations qkvi_calibrations;

// Reads every file. INVALID_ARGUMENT "--calibration is x, expected MODEL=FILE", or for a model that is named twice;
// NOT_FOUND, UNAVAILABLE, DATA_LOSS, with the file, for what cannot be read or is no calibration.
qkv_status qkvi_calibrations_load(const qkv_option_list *options, qkvi_calibrations **out, qkv_error *error);
void qkvi_calibrations_destroy(qkvi_calibrations **calibrations);

// With a reference for the caller; NULL: none for this model.
const qkv_calibration *qkvi_calibrations_get(const qkvi_calibrations *calibrations, const char *model);

#endif
