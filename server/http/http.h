// HTTP for operators: metrics, health, the state as JSON and the page that shows it (docs/monitoring.md).
//
//   GET /metrics                     Prometheus' text format
//   GET /health/live, /health/ready  200 or 503 and a word
//   GET /api/...                     JSON (api.h)
//   GET /                            the page
//
// It has threads of its own, so that it answers while calls occupy all others: one for each address, which serves
// health and the page and passes the rest to two workers. Connections, queued requests and the idle time of a
// connection are bounded.
//
// Threads: create and destroy by the daemon's owner.
#ifndef QKV_SERVER_HTTP_HTTP_H
#define QKV_SERVER_HTTP_HTTP_H

#include <stdbool.h>
#include <stddef.h>

#include "engine/base/status.h"
#include "server/http/usage.h"

typedef struct qkv_daemon qkv_daemon;
typedef struct qkvi_http qkvi_http;

// Binds options->admin_listen; *out is NULL where that is not set. INVALID_ARGUMENT and UNAVAILABLE as
// qkv_rpc_server_create, and INVALID_ARGUMENT where others than this machine's users can reach the address and
// `admin-anonymous` is not set.
qkv_status qkvi_http_create(qkv_daemon *daemon, qkvi_http **out, qkv_error *error);
// The address as bound.
const char *qkvi_http_address(const qkvi_http *http);
// Before the daemon's store is destroyed.
void qkvi_http_destroy(qkvi_http **http);

// What one request asks for, checked and copied out of the connection.
typedef struct qkvi_http_query {
  char tenant[QKV_NAME_MAX + 1];     // "": all, or "default"
  char session[QKV_NAME_MAX + 1];    // "": none
  char search[QKV_NAME_MAX + 1];     // part of a name
  char after[2 * QKV_NAME_MAX + 2];  // `next` of the answer before
  size_t limit;                      // rows
  size_t buckets;                    // 0: as many as there may be
  uint32_t layer;
} qkvi_http_query;

// Filled by a route. `body` is malloc's.
typedef struct qkvi_http_answer {
  unsigned status;   // of HTTP
  const char *type;  // of the content
  char *body;
  size_t length;
} qkvi_http_answer;

// Not draining. An SSD that refuses writes, or a GPU that is missing, does not end it: calls are answered all the
// same, and a restart would lose what is in memory alone. `reason`, where not NULL, gets a line that names them.
bool qkvi_http_is_ready(const qkv_daemon *daemon, const char **reason);

// /metrics (metrics_text.c).
void qkvi_http_metrics(qkv_daemon *daemon, qkvi_usage_cache *cache, qkvi_http_answer *answer);

#endif
