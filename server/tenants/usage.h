// What each tenant uses, and its quota, for Admin.GetQuota and /metrics.
//
// Threads: any.
#ifndef QKV_SERVER_TENANTS_USAGE_H
#define QKV_SERVER_TENANTS_USAGE_H

#include "server/daemon.h"

typedef struct qkvi_tenant_usage {
  qkv_quota quota;  // in force; `tenant` is the tenant's
  bool by_default;  // it is that of "*"
  uint64_t host_bytes, ssd_bytes, gpu_bytes, sessions, models;
  qkvi_call_usage calls;
} qkvi_tenant_usage;

// Of one tenant, known or not.
void qkvi_tenant_usage_read(qkv_daemon *daemon, const char *tenant, qkvi_tenant_usage *usage);
// Of the tenants that have a quota, use something or have called, in the order of names, without "*": at most `max`
// of those behind `after` ("": of all). The caller frees `*out`. Returns how many.
size_t qkvi_tenant_usage_list(qkv_daemon *daemon, const char *after, size_t max, qkvi_tenant_usage **out);

#endif
