// The state as JSON. Each fills the answer, with 400 or 404 and {"error": "..."} where the query asks for what is
// not there. Lists are paged: `limit` rows (100; at most 1000) behind `after`, which is `next` of the answer before;
// the last one has none.
//
//   /api/status                             version, state, memory, calls and stages with their histograms
//   /api/tenants?search=&limit=&after=      what each holds, by name
//   /api/sessions?tenant=&search=&limit=&after=
//   /api/session?session=&tenant=           one, with its layers' lengths
//   /api/map?session=&tenant=&layer=&buckets=  bits, attention and places of one layer's tokens
//   /api/storage?limit=&after=              the SSD tier and its files
//
// Threads: any that may wait for a layer (map does).
#ifndef QKV_SERVER_HTTP_API_H
#define QKV_SERVER_HTTP_API_H

#include "server/http/http.h"

typedef void qkvi_http_route_fn(qkv_daemon *daemon, qkvi_usage_cache *usage, const qkvi_http_query *query,
                                qkvi_http_answer *answer);

qkvi_http_route_fn qkvi_api_status, qkvi_api_tenants, qkvi_api_sessions, qkvi_api_session, qkvi_api_map,
    qkvi_api_storage;

enum { QKVI_API_LIMIT = 100, QKVI_API_LIMIT_MAX = 1000, QKVI_API_BUCKETS = 512, QKVI_API_BUCKETS_MAX = 4096 };

// {"error": text}.
void qkvi_api_fail(unsigned status, const char *text, qkvi_http_answer *answer);

#endif
