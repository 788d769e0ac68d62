// Quotas and their use as metrics of tenants, in Prometheus' text format.
//
// Threads: any.
#ifndef QKV_SERVER_TENANTS_METRICS_H
#define QKV_SERVER_TENANTS_METRICS_H

#include <stdio.h>

#include "server/daemon.h"

// Of tenants that have a label (server/http/labels.h), and of all others together as "other".
void qkvi_tenant_metrics(FILE *out, qkv_daemon *daemon);

#endif
