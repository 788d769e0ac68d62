// Meters the calls of one tenant: messages' bytes and appended rows, against the rates of its quota, and totals.
//
// Threads: the owner's (server/rpc/limits.h: under its lock).
#ifndef QKV_SERVER_TENANTS_METER_H
#define QKV_SERVER_TENANTS_METER_H

#include <stdbool.h>

#include "engine/base/status.h"
#include "server/tenants/rate.h"

// The quota of a tenant's calls; 0: no limit. `weight` is that of its share (engine/base/fair.h).
typedef struct qkvi_call_quota {
  uint64_t calls;
  uint64_t bytes_per_second, rows_per_second;
  uint32_t weight;
} qkvi_call_quota;

typedef void qkvi_call_quota_fn(void *context, const char *tenant, qkvi_call_quota *quota);

typedef struct qkvi_call_usage {
  uint64_t calls;
  uint64_t bytes, rows, refused;  // since the start
} qkvi_call_usage;

typedef struct qkvi_meter {
  qkvi_call_quota quota;
  qkvi_rate bytes, rows;
  qkvi_call_usage usage;  // but for the calls
} qkvi_meter;

void qkvi_meter_set(qkvi_meter *meter, const qkvi_call_quota *quota, uint64_t now_ns);
void qkvi_meter_take(qkvi_meter *meter, uint64_t bytes, uint64_t rows, uint64_t now_ns);
// How long its calls have to wait to keep to the rates. Where that is not 0, *error gets "quota bytes_per_second of
// tenant x is 1000, it has used 4200 more: 5 s to wait".
uint64_t qkvi_meter_wait_ms(qkvi_meter *meter, const char *tenant, uint64_t now_ns, qkv_error *error);
// Whether the meter can be dropped: nothing has to wait.
bool qkvi_meter_is_idle(qkvi_meter *meter, uint64_t now_ns);

#endif
