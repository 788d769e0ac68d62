// The quotas of all tenants, and the file that they lie in.
//
// The file (quota.h) is the only source of the quotas in force: an operator edits it, and Admin.SetQuota rewrites it
// before it answers, so that a crash keeps what was acknowledged. Lines of other tenants, and comments, stay as they
// are.
//
// Threads: any. `get` never waits for the file.
#ifndef QKV_SERVER_TENANTS_QUOTAS_H
#define QKV_SERVER_TENANTS_QUOTAS_H

#include "proto/quota.h"

typedef struct qkvi_quotas qkvi_quotas;

enum { QKVI_QUOTAS_MAX = 65536, QKVI_QUOTAS_AT_ONCE = 256 };  // lines; of a list

typedef struct qkvi_quotas_config {
  const char *path;  // NULL: there is no file, and no quota can be set
  bool may_be_missing;
  uint64_t host_bytes, ssd_bytes;  // limits of all guarantees together; ssd_bytes 0: no limit
  int64_t sessions, models;        // quotas of a tenant for which the file gives none; 0: no limit
} qkvi_quotas_config;

// Reads the file. UNAVAILABLE: it cannot be read. INVALID_ARGUMENT: "FILE:3: ...".
qkv_status qkvi_quotas_create(const qkvi_quotas_config *config, qkvi_quotas **out, qkv_error *error);
void qkvi_quotas_destroy(qkvi_quotas **quotas);

// Reads the file again where it has changed, or with `always`; where that fails the previous quotas stay in force.
// `changed` says whether it was read.
qkv_status qkvi_quotas_reload(qkvi_quotas *quotas, bool always, bool *changed, qkv_error *error);

// The tenant's quota, else that of "*", with the tenant's name and with the config's values where the file gives
// none.
void qkvi_quotas_get(qkvi_quotas *quotas, const char *tenant, qkv_quota *quota, bool *by_default);
// The tenants of the file, in order, "*" first: up to QKVI_QUOTAS_AT_ONCE of those behind `after` ("": of all), as
// calls wait meanwhile. Returns how many.
size_t qkvi_quotas_list(qkvi_quotas *quotas, const char *after, char names[QKVI_QUOTAS_AT_ONCE][QKV_NAME_MAX + 1]);

// Replaces the tenant's quota; an empty one removes it. The file is durable with OK, and nothing has changed
// otherwise. INVALID_ARGUMENT: qkv_quota_check, or the guarantees of all together exceed the limits.
// FAILED_PRECONDITION: there is no file. UNAVAILABLE: it cannot be written. Waits for the disk.
qkv_status qkvi_quotas_set(qkvi_quotas *quotas, const qkv_quota *quota, qkv_error *error);

#endif
