// Names of models, sessions and tenants.
#ifndef QKV_ENGINE_BASE_NAME_H
#define QKV_ENGINE_BASE_NAME_H

#include "engine/base/status.h"

#define QKV_NAME_MAX 128              // characters
#define QKV_TENANT_DEFAULT "default"  // of calls that name none

// Letters, digits and ._:/@- ; 1 to QKV_NAME_MAX. INVALID_ARGUMENT names `field`.
qkv_status qkv_name_check(const char *name, const char *field, qkv_error *error);

#endif
