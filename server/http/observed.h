// Counters of calls in addition to the table of metrics: latencies by method and by tenant, and outcomes by method
// and status.
//
// Threads: any; counting is lock-free, but for the first call of a tenant.
#ifndef QKV_SERVER_HTTP_OBSERVED_H
#define QKV_SERVER_HTTP_OBSERVED_H

#include "engine/base/histogram.h"
#include "engine/base/status.h"
#include "server/http/labels.h"
#include "server/rpc/rpc.h"

enum { QKVI_STATUS_CODES = 17 };  // of gRPC

typedef struct qkvi_observed_method {
  const qkv_rpc_method *method;
  const char *name;     // "Attend", behind the last slash of the path
  const char *service;  // "qkv.v1.KvCache", not terminated
  size_t service_bytes;
  qkv_histogram seconds;
  _Atomic uint64_t ended[QKVI_STATUS_CODES];
} qkvi_observed_method;

typedef struct qkvi_observed {
  qkvi_observed_method *methods;
  size_t method_count;
  qkvi_labels tenants, models;
} qkvi_observed;

// `tables` are those of the server (rpc.h).
void qkvi_observed_init(qkvi_observed *observed, const qkv_rpc_method *const *tables, size_t labels_max);
void qkvi_observed_deinit(qkvi_observed *observed);
// A call has ended. Only tenants with a call that was answered OK get a label of their own.
void qkvi_observed_call(qkvi_observed *observed, const qkv_rpc_method *method, const char *tenant, qkv_status status,
                        uint64_t ns);

#endif
