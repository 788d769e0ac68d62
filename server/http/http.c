#include "server/http/http.h"

#include <arpa/inet.h>
#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <microhttpd.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "engine/base/log.h"
#include "engine/base/pool.h"
#include "server/daemon.h"
#include "server/http/api.h"
#include "server/http/https.h"
#include "server/http/page.h"
#include "server/http/places.h"
#include "server/rpc/internal.h"

enum {
  CONNECTIONS_MAX = 64,
  CONNECTIONS_KEPT = 16,     // of these for new ones (places.h)
  CONNECTION_BYTES = 32768,  // of a request's line and headers, and of what is sent at once
  IDLE_SECONDS = 10,
  WORKERS = 2,
  WAITING_MAX = CONNECTIONS_MAX / 2,  // requests for a worker: a connection whose request waits keeps its place
};

struct qkvi_http {
  qkv_daemon *daemon;
  qkvi_rpc_listener listener;
  struct MHD_Daemon *servers[QKVI_RPC_SOCKETS_MAX];  // one for each socket
  qkvi_http_places places[QKVI_RPC_SOCKETS_MAX];     // the same
  bool local;                                        // this machine alone reaches all of them
  qkvi_usage_cache usage;
  char *page;             // with its nonce
  char page_policy[256];  // Content-Security-Policy
  pthread_mutex_t lock;   // of the next two
  bool closing;           // the workers get no more requests
  qkv_pool *workers;
};

typedef struct route route;

// One request, from its first callback to its end.
typedef struct exchange {
  qkvi_http *http;
  struct MHD_Connection *connection;
  const route *route;
  qkvi_http_query query;
  qkvi_http_answer answer;
  bool answered;  // by a worker, which then resumes the connection
} exchange;

struct route {
  const char *path;
  void (*here)(exchange *request);  // on the connection's thread, which must not wait; or NULL
  qkvi_http_route_fn *run;          // by a worker
};

// ---- Health and the page ----

static void say(qkvi_http_answer *answer, unsigned status, const char *text) {
  answer->status = status;
  answer->type = "text/plain; charset=utf-8";
  answer->body = strdup(text);
  if (answer->body == NULL) abort();
  answer->length = strlen(text);
}

bool qkvi_http_is_ready(const qkv_daemon *daemon, const char **reason) {
  const bool draining = atomic_load(&daemon->draining);
  const bool degraded = qkv_metric_read(&daemon->metrics[QKV_METRIC_SPILL_DEGRADED]) != 0;
  const bool without_gpu = qkv_metric_read(&daemon->metrics[QKV_METRIC_GPU_DOWN]) != 0;
  if (reason != NULL)
    *reason = draining      ? "draining\n"
              : degraded    ? "ready, but the SSD refuses what is written: the log says why\n"
              : without_gpu ? "ready, but a GPU is not used: the log says why\n"
                            : "ready\n";
  return !draining;
}

static void live(exchange *request) {
  say(&request->answer, MHD_HTTP_OK, "live\n");
}

static void ready(exchange *request) {
  const char *reason;
  const bool is = qkvi_http_is_ready(request->http->daemon, &reason);
  say(&request->answer, is ? MHD_HTTP_OK : MHD_HTTP_SERVICE_UNAVAILABLE, reason);
}

static void page(exchange *request) {
  say(&request->answer, MHD_HTTP_OK, request->http->page);
  request->answer.type = "text/html; charset=utf-8";
}

static void metrics(qkv_daemon *daemon, qkvi_usage_cache *usage, const qkvi_http_query *query,
                    qkvi_http_answer *answer) {
  (void)query;
  qkvi_http_metrics(daemon, usage, answer);
}

static const route routes[] = {
    {"/", page, NULL},
    {"/health/live", live, NULL},
    {"/health/ready", ready, NULL},
    {"/metrics", NULL, metrics},
    {"/api/status", NULL, qkvi_api_status},
    {"/api/tenants", NULL, qkvi_api_tenants},
    {"/api/sessions", NULL, qkvi_api_sessions},
    {"/api/session", NULL, qkvi_api_session},
    {"/api/map", NULL, qkvi_api_map},
    {"/api/storage", NULL, qkvi_api_storage},
};

static const route *find_route(const char *path) {
  for (size_t i = 0; i < sizeof routes / sizeof *routes; i++) {
    if (strcmp(routes[i].path, path) == 0) return &routes[i];
  }
  return NULL;
}

// ---- The query ----

static qkv_status read_text(struct MHD_Connection *connection, const char *name, size_t max, char *text,
                            qkv_error *error) {
  const char *value = NULL;
  size_t length = 0;
  (void)MHD_lookup_connection_value_n(connection, MHD_GET_ARGUMENT_KIND, name, strlen(name), &value, &length);
  if (value == NULL) return QKV_OK;
  if (length > max || memchr(value, '\0', length) != NULL)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s is %zu bytes, at most %zu without NUL are allowed", name, length,
                    max);
  memcpy(text, value, length);
  text[length] = '\0';
  return QKV_OK;
}

static qkv_status read_name(struct MHD_Connection *connection, const char *name, char *text, qkv_error *error) {
  QKV_TRY(read_text(connection, name, QKV_NAME_MAX, text, error));
  return text[0] == '\0' ? QKV_OK : qkv_name_check(text, name, error);
}

static qkv_status read_number(struct MHD_Connection *connection, const char *name, size_t least, size_t most,
                              size_t *number, qkv_error *error) {
  char text[21] = "", *end = NULL;
  QKV_TRY(read_text(connection, name, sizeof text - 1, text, error));
  if (text[0] == '\0') return QKV_OK;
  errno = 0;
  const unsigned long long value = strtoull(text, &end, 10);
  if (text[0] < '0' || text[0] > '9' || *end != '\0' || errno != 0 || value < least || value > most)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s is not a number from %zu to %zu", name, least, most);
  *number = (size_t)value;
  return QKV_OK;
}

static qkv_status read_query(struct MHD_Connection *connection, qkvi_http_query *query, qkv_error *error) {
  size_t layer = 0;
  query->limit = QKVI_API_LIMIT;
  QKV_TRY(read_name(connection, "tenant", query->tenant, error));
  QKV_TRY(read_name(connection, "session", query->session, error));
  QKV_TRY(read_text(connection, "search", sizeof query->search - 1, query->search, error));
  QKV_TRY(read_text(connection, "after", sizeof query->after - 1, query->after, error));
  QKV_TRY(read_number(connection, "limit", 1, QKVI_API_LIMIT_MAX, &query->limit, error));
  QKV_TRY(read_number(connection, "buckets", 1, QKVI_API_BUCKETS_MAX, &query->buckets, error));
  QKV_TRY(read_number(connection, "layer", 0, UINT32_MAX, &layer, error));
  query->layer = (uint32_t)layer;
  return QKV_OK;
}

// ---- Authorization ----

static bool host_is_local(const char *host) {
  char name[64];
  size_t length = host[0] == '[' ? strcspn(host, "]") + 1 : strcspn(host, ":");
  if (length >= sizeof name) return false;
  memcpy(name, host, length);
  name[length] = '\0';
  struct in_addr number;
  if (inet_pton(AF_INET, name, &number) == 1) return (ntohl(number.s_addr) >> 24) == IN_LOOPBACKNET;
  return strcasecmp(name, "localhost") == 0 || strcmp(name, "[::1]") == 0;
}

// A web page that makes its own name resolve to this machine (DNS rebinding) sends that name, and is refused.
static bool may_ask(const exchange *request) {
  const char *host = MHD_lookup_connection_value(request->connection, MHD_HEADER_KIND, MHD_HTTP_HEADER_HOST);
  return !request->http->local || host == NULL || host_is_local(host);
}

// ---- Requests ----

static qkvi_http_place *place_of(struct MHD_Connection *connection) {
  return MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT)->socket_context;
}

static enum MHD_Result respond(exchange *request) {
  qkvi_http_answer *answer = &request->answer;
  qkvi_http_place_wait(place_of(request->connection));
  struct MHD_Response *response =
      MHD_create_response_from_buffer(answer->length, answer->body, MHD_RESPMEM_MUST_FREE);
  if (response == NULL) return MHD_NO;
  answer->body = NULL;
  const bool html = request->route != NULL && request->route->here == page;
  (void)MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, answer->type);
  (void)MHD_add_response_header(response, MHD_HTTP_HEADER_CACHE_CONTROL, "no-store");
  (void)MHD_add_response_header(response, "X-Content-Type-Options", "nosniff");
  (void)MHD_add_response_header(response, "Content-Security-Policy",
                                html ? request->http->page_policy : "default-src 'none'");
  if (answer->status == MHD_HTTP_UNAUTHORIZED)
    (void)MHD_add_response_header(response, MHD_HTTP_HEADER_WWW_AUTHENTICATE, "Bearer");
  if (answer->status == MHD_HTTP_METHOD_NOT_ALLOWED)
    (void)MHD_add_response_header(response, MHD_HTTP_HEADER_ALLOW, "GET, HEAD");
  const enum MHD_Result result = MHD_queue_response(request->connection, answer->status, response);
  MHD_destroy_response(response);
  return result;
}

static void work(void *context) {
  exchange *request = context;
  qkvi_http *http = request->http;
  request->answer.status = MHD_HTTP_OK;
  request->route->run(http->daemon, &http->usage, &request->query, &request->answer);
  request->answered = true;
  MHD_resume_connection(request->connection);
}

// The connection is suspended before a worker can resume it.
static enum MHD_Result give_to_worker(exchange *request) {
  qkvi_http *http = request->http;
  qkvi_http_place_work(place_of(request->connection));
  MHD_suspend_connection(request->connection);
  pthread_mutex_lock(&http->lock);
  const bool given = !http->closing && qkv_pool_submit(http->workers, work, request) == QKV_OK;
  pthread_mutex_unlock(&http->lock);
  if (given) return MHD_YES;
  qkvi_api_fail(MHD_HTTP_SERVICE_UNAVAILABLE, "too many requests wait, or the daemon ends", &request->answer);
  request->answered = true;
  MHD_resume_connection(request->connection);
  return MHD_YES;
}

// With --admin-auth everything about tenants needs a token that may read for all of them. The page itself contains
// nothing about them.
static qkv_status check_token(const exchange *request, const char *path, qkv_error *error) {
  const qkv_daemon *daemon = request->http->daemon;
  qkvi_grant grant;
  if (!daemon->options->admin_auth || strncmp(path, "/health/", 8) == 0 || strcmp(path, "/") == 0) return QKV_OK;
  const char *value =
      MHD_lookup_connection_value(request->connection, MHD_HEADER_KIND, MHD_HTTP_HEADER_AUTHORIZATION);
  if (value == NULL)
    return qkv_fail(error, QKV_UNAUTHENTICATED, "the request has no authorization: a bearer token is needed");
  QKV_TRY(qkvi_auth_bearer(daemon->auth, value, strlen(value), &grant, error));
  if ((grant.roles & QKVI_ROLE_READ) != 0 && grant.tenant[0] == '\0') return QKV_OK;
  return qkv_fail(error, QKV_PERMISSION_DENIED, "the request needs a token with the role read for all tenants");
}

static qkv_status check_access(const exchange *request, const char *path, qkv_error *error) {
  if (!may_ask(request)) return qkv_fail(error, QKV_PERMISSION_DENIED, "the Host of the request is not this machine");
  return check_token(request, path, error);
}

static void refuse(exchange *request, const char *method, const char *path, const qkv_error *error) {
  char asked[300], peer[256] = "";
  const union MHD_ConnectionInfo *info =
      MHD_get_connection_info(request->connection, MHD_CONNECTION_INFO_CONNECTION_FD);
  if (info != NULL) qkvi_socket_peer_write(info->connect_fd, peer, sizeof peer);
  (void)snprintf(asked, sizeof asked, "%.16s %.256s", method, path);
  qkvi_audit_write(
      request->http->daemon->audit,
      &(qkvi_audit_line){
          .refused = true, .method = asked, .peer = peer, .status = error->status, .reason = error->text});
  const unsigned status = error->status == QKV_UNAUTHENTICATED ? MHD_HTTP_UNAUTHORIZED : MHD_HTTP_FORBIDDEN;
  qkvi_api_fail(status, error->text, &request->answer);
}

static enum MHD_Result begin(exchange *request, const char *method, const char *path) {
  qkv_error error = {0};
  if (check_access(request, path, &error) != QKV_OK) {
    refuse(request, method, path, &error);
  } else if (strcmp(method, MHD_HTTP_METHOD_GET) != 0 && strcmp(method, MHD_HTTP_METHOD_HEAD) != 0) {
    qkvi_api_fail(MHD_HTTP_METHOD_NOT_ALLOWED, "only GET and HEAD are served", &request->answer);
  } else if ((request->route = find_route(path)) == NULL) {
    qkvi_api_fail(MHD_HTTP_NOT_FOUND, "no such path", &request->answer);
  } else if (request->route->here != NULL) {
    request->route->here(request);
  } else if (read_query(request->connection, &request->query, &error) != QKV_OK) {
    qkvi_api_fail(MHD_HTTP_BAD_REQUEST, error.text, &request->answer);
  } else {
    return give_to_worker(request);
  }
  return respond(request);
}

static enum MHD_Result on_request(void *context, struct MHD_Connection *connection, const char *path,
                                  const char *method, const char *version, const char *upload, size_t *upload_bytes,
                                  void **state) {
  (void)version;
  (void)upload;
  exchange *request = *state;
  if (request != NULL && request->answered) return respond(request);
  if (request != NULL) {  // it has a body, which nothing here takes
    *upload_bytes = 0;
    return MHD_YES;
  }
  request = calloc(1, sizeof *request);
  if (request == NULL) abort();
  request->http = context;
  request->connection = connection;
  *state = request;
  return begin(request, method, path);
}

static void on_completed(void *context, struct MHD_Connection *connection, void **state,
                         enum MHD_RequestTerminationCode code) {
  (void)context;
  (void)code;
  exchange *request = *state;
  if (request == NULL) return;
  qkvi_http_place_wait(place_of(connection));  // for the next one
  free(request->answer.body);
  free(request);
  *state = NULL;
}

static void on_connection(void *context, struct MHD_Connection *connection, void **state,
                          enum MHD_ConnectionNotificationCode code) {
  qkvi_http_place *place = *state;
  if (code == MHD_CONNECTION_NOTIFY_STARTED) {
    place = qkvi_http_place_open(context,
                                 MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd);
  } else {
    qkvi_http_place_close(&place);
  }
  *state = place;
}

static void count_ended(void *context) {
  const qkvi_http *http = context;
  qkv_metric_add(&http->daemon->metrics[QKV_METRIC_HTTP_ENDED], 1);
}

// ---- Life ----

__attribute__((format(printf, 2, 0))) static void on_log(void *context, const char *format, va_list arguments) {
  (void)context;
  char text[512];
  if (!qkv_log_wants(QKV_LOG_DEBUG)) return;
  (void)vsnprintf(text, sizeof text, format, arguments);
  text[strcspn(text, "\n")] = '\0';
  qkv_log(QKV_LOG_DEBUG, "http", "{s:s}", "text", text);
}

static bool socket_is_local(int socket) {
  struct sockaddr_storage address = {0};
  socklen_t length = sizeof address;
  if (getsockname(socket, (struct sockaddr *)&address, &length) != 0) return false;
  if (address.ss_family == AF_UNIX) return true;
  if (address.ss_family == AF_INET)
    return (ntohl(((const struct sockaddr_in *)&address)->sin_addr.s_addr) >> 24) == IN_LOOPBACKNET;
  return address.ss_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)&address)->sin6_addr);
}

// Clients are not authenticated, so addresses that other machines can reach are bound only where that is allowed.
static qkv_status check_reach(qkvi_http *http, const qkv_server_options *options, qkv_error *error) {
  http->local = true;
  for (size_t i = 0; i < http->listener.socket_count; i++) http->local &= socket_is_local(http->listener.sockets[i]);
  if (http->local || options->admin_anonymous || options->admin_auth) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT,
                  "--admin-listen is %s, which other machines may reach, and nobody is asked for credentials there; "
                  "--admin-auth asks for a token, --admin-anonymous serves it nevertheless",
                  options->admin_listen);
}

static qkv_status start(qkvi_http *http, size_t at, qkv_error *error) {
  http->places[at] =
      (qkvi_http_places){.most = CONNECTIONS_MAX - CONNECTIONS_KEPT, .ended = count_ended, .context = http};
  // Both mean nothing without MHD_USE_TLS.
  const struct MHD_OptionItem tls[] = {
      {MHD_OPTION_HTTPS_PRIORITIES, 0, (void *)(uintptr_t)QKVI_HTTPS_PRIORITIES},
      {MHD_OPTION_HTTPS_CERT_CALLBACK2, 0, (void *)(uintptr_t)qkvi_https_certificate},
      {MHD_OPTION_END, 0, NULL},
  };
  const unsigned flags = MHD_USE_EPOLL_INTERNAL_THREAD | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ERROR_LOG |
                         (http->daemon->options->admin_tls ? MHD_USE_TLS : 0);
  http->servers[at] = MHD_start_daemon(
      flags, 0, NULL, NULL, on_request, http, MHD_OPTION_EXTERNAL_LOGGER, on_log, NULL, MHD_OPTION_LISTEN_SOCKET,
      http->listener.sockets[at], MHD_OPTION_CONNECTION_LIMIT, (unsigned)CONNECTIONS_MAX,
      MHD_OPTION_CONNECTION_MEMORY_LIMIT, (size_t)CONNECTION_BYTES, MHD_OPTION_CONNECTION_TIMEOUT,
      (unsigned)IDLE_SECONDS, MHD_OPTION_STRICT_FOR_CLIENT, 1, MHD_OPTION_NOTIFY_COMPLETED, on_completed, NULL,
      MHD_OPTION_NOTIFY_CONNECTION, on_connection, &http->places[at],
      http->daemon->options->admin_tls ? MHD_OPTION_ARRAY : MHD_OPTION_END, tls, MHD_OPTION_END);
  if (http->servers[at] != NULL) {
    http->listener.sockets[at] = -1;  // the server closes it
    return QKV_OK;
  }
  return qkv_fail(error, QKV_UNAVAILABLE, "--admin-listen: cannot serve %s", http->listener.address);
}

static qkv_status open_all(qkvi_http *http, const qkv_server_options *options, qkv_error *error) {
  // Reachability is checked here, not there.
  const qkvi_rpc_listen_config listen = {.mode = qkv_server_options_listen_mode(options), .open = true};
  if (qkvi_rpc_listen(NULL, options->admin_listen, &listen, &http->listener, error) != QKV_OK)
    return qkv_error_prefix(error, "--admin-listen: ");
  QKV_TRY(check_reach(http, options, error));
  if (options->admin_tls) qkvi_https_show(http->daemon->tls);
  const qkv_pool_config workers = {.threads = WORKERS, .queue_max = WAITING_MAX};
  QKV_TRY(qkv_pool_create_with(&workers, &http->workers, error));
  for (size_t i = 0; i < http->listener.socket_count; i++) QKV_TRY(start(http, i, error));
  return QKV_OK;
}

qkv_status qkvi_http_create(qkv_daemon *daemon, qkvi_http **out, qkv_error *error) {
  *out = NULL;
  if (daemon->options->admin_listen == NULL) return QKV_OK;
  qkvi_http *http = calloc(1, sizeof *http);
  if (http == NULL) abort();
  http->daemon = daemon;
  http->listener.lock = -1;
  http->page = qkvi_page_create(http->page_policy, sizeof http->page_policy);
  qkvi_usage_cache_init(&http->usage);
  const int failed = pthread_mutex_init(&http->lock, NULL);
  assert(failed == 0);
  (void)failed;
  const qkv_status status = open_all(http, daemon->options, error);
  if (status != QKV_OK) {
    qkvi_http_destroy(&http);
    return status;
  }
  *out = http;
  return QKV_OK;
}

const char *qkvi_http_address(const qkvi_http *http) {
  return http->listener.address;
}

// The workers end their requests and resume the connections; no server ends without that.
void qkvi_http_destroy(qkvi_http **http) {
  qkvi_http *old = *http;
  if (old == NULL) return;
  *http = NULL;
  pthread_mutex_lock(&old->lock);
  old->closing = true;
  pthread_mutex_unlock(&old->lock);
  if (old->workers != NULL) qkv_pool_destroy(&old->workers);
  for (size_t i = 0; i < QKVI_RPC_SOCKETS_MAX; i++) {
    if (old->servers[i] != NULL) MHD_stop_daemon(old->servers[i]);
  }
  if (old->daemon->options->admin_tls) qkvi_https_show(NULL);
  qkvi_rpc_unlisten(&old->listener);
  qkvi_usage_cache_deinit(&old->usage);
  (void)pthread_mutex_destroy(&old->lock);
  free(old->page);
  free(old);
}
