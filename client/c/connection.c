// The connection: opened, watched, cut and opened anew.
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <grpc/grpc_posix.h>
#include <grpc/grpc_security.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "client/c/client.h"
#include "client/c/codes.h"
#include "client/c/health.h"
#include "client/c/place.h"
#include "client/c/socket.h"
#include "engine/base/clock.h"
#include "engine/base/name.h"

enum {
  TIMEOUT_MS = 60000,
  TIMEOUT_MAX_MS = INT32_MAX,  // so that a point in time can be counted with
  MESSAGE_BYTES_MAX = 256 << 20,
  RETRY_FIRST_MS = 5,
  RETRY_MAX_MS = 100,
  RECONNECT_MS = 50,  // of gRPC, where it opens the connection
  RECONNECT_MAX_MS = 1000,
  KEEPALIVE_MS = 10000,       // qkvd allows a ping every 5 s
  TOKEN_FILE_MS = 1000,       // between two looks at a token file
  RECLAIM_PATIENCE_MS = 100,  // how long a write may still hold lent memory after its call has ended
  FREED_BYTES = 8 << 20,      // keep_freed_memory
};

// Until glibc's malloc has freed a block that it had mapped by itself, it gives freed memory at the end of an arena
// back to the kernel from 128 KiB on: the memory of each response, which then comes anew, as pages of zeros, for the
// next. From there on it keeps twice the block's bytes. So one block is freed, of which no page is touched.
// Without it a fetch takes three times the processor time (docs/python.md), and 4 MiB would do. Limits that the
// program or its environment have set stay as they are.
static void keep_freed_memory(void) {
  void *volatile block = malloc(FREED_BYTES);
  free(block);
}

// Runs what gRPC has to do for up to `ms`. Nothing is ever sent with this tag, so events stay for their owners.
static void poll_for(qkv_client *client, int64_t ms) {
  static char nobody;
  gpr_timespec until = gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_millis(ms, GPR_TIMESPAN));
  grpc_event event = grpc_completion_queue_pluck(client->queue, &nobody, until, NULL);
  assert(event.type == GRPC_QUEUE_TIMEOUT);
}

void qkvi_pause(qkv_client *client, int64_t ms) {
  poll_for(client, ms);
}

void qkvi_cut(qkv_client *client) {
  if (client->fd >= 0) (void)shutdown(client->fd, SHUT_RDWR);
}

void qkvi_reclaim(qkv_client *client) {
  int64_t patience_end = 0;
  while (atomic_load(&client->lent) > 0) {
    int64_t now = qkv_now_ms();
    if (patience_end == 0) patience_end = now + RECLAIM_PATIENCE_MS;
    if (now >= patience_end) qkvi_cut(client);
    poll_for(client, 1);
  }
}

static void disconnect(qkv_client *client) {
  if (client->channel != NULL) grpc_channel_destroy(client->channel);
  if (client->fd >= 0) close(client->fd);
  client->channel = NULL;
  client->fd = -1;
}

// gRPC's arguments have no const, and are not written to.
static char *as_argument(const char *text) {
  return (char *)(uintptr_t)text;
}

// Of a connection that is TLS, which gRPC opens by itself: its channels over sockets of others are not encrypted.
static grpc_channel *create_secure_channel(const qkv_client *client) {
  int64_t bytes_max = client->options.message_bytes_max < INT32_MAX ? client->options.message_bytes_max : INT32_MAX;
  const struct {
    const char *key;
    int value;
  } integers[] = {{GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, (int)bytes_max},
                  {GRPC_ARG_MAX_SEND_MESSAGE_LENGTH, -1},
                  {GRPC_ARG_ENABLE_DEADLINE_CHECKS, 0},
                  {GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1},
                  // Ends a write to a daemon that has stopped reading, as qkvi_cut does for our own sockets.
                  {GRPC_ARG_KEEPALIVE_TIME_MS, KEEPALIVE_MS},
                  {GRPC_ARG_KEEPALIVE_TIMEOUT_MS, KEEPALIVE_MS},
                  {GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, RECONNECT_MS},
                  {GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, RECONNECT_MAX_MS}};
  enum { COUNT = sizeof integers / sizeof *integers };
  grpc_arg arguments[COUNT];
  for (size_t i = 0; i < COUNT; i++) {
    arguments[i] =
        (grpc_arg){.type = GRPC_ARG_INTEGER, .key = as_argument(integers[i].key), .value.integer = integers[i].value};
  }
  grpc_channel_args all = {.num_args = COUNT, .args = arguments};
  return grpc_channel_create(client->target, client->credentials, &all);
}

static grpc_channel *create_channel(const qkv_client *client, int fd) {
  int64_t bytes_max = client->options.message_bytes_max < INT32_MAX ? client->options.message_bytes_max : INT32_MAX;
  grpc_arg arguments[4] = {
      {.type = GRPC_ARG_INTEGER}, {.type = GRPC_ARG_INTEGER}, {.type = GRPC_ARG_INTEGER}, {.type = GRPC_ARG_STRING}};
  arguments[0].key = as_argument(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH);
  arguments[0].value.integer = (int)bytes_max;
  arguments[1].key = as_argument(GRPC_ARG_MAX_SEND_MESSAGE_LENGTH);
  arguments[1].value.integer = -1;
  // The deadline goes out with the call, and call.c waits no longer than that: gRPC's own timer would cost every
  // unary call 4 to 5 us (a health check over a unix socket: 64 instead of 69 us, medians of 20000, 4 rounds).
  arguments[2].key = as_argument(GRPC_ARG_ENABLE_DEADLINE_CHECKS);
  arguments[2].value.integer = 0;
  arguments[3].key = as_argument(GRPC_ARG_DEFAULT_AUTHORITY);
  arguments[3].value.string = as_argument("localhost");
  grpc_channel_args all = {.num_args = sizeof arguments / sizeof *arguments, .args = arguments};
  grpc_channel_credentials *credentials = grpc_insecure_credentials_create();
  grpc_channel *channel = grpc_channel_create_from_fd(client->target, fd, credentials, &all);
  grpc_channel_credentials_release(credentials);
  return channel;
}

// Opens a socket and a channel over it, which then owns it; the client keeps a duplicate.
static qkv_status connect_once(qkv_client *client, int64_t timeout_ms, bool *retry, qkv_error *error) {
  qkvi_target target;
  int fd = -1;
  disconnect(client);
  qkvi_shares_forget(client);
  *retry = false;
  QKV_TRY(qkvi_target_parse(client->target, &target, error));
  if (client->credentials != NULL && !target.is_unix) {
    client->channel = create_secure_channel(client);
    return QKV_OK;
  }
  QKV_TRY(qkvi_socket_connect(&target, timeout_ms, &fd, retry, error));
  client->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (client->fd < 0) {
    int reason = errno;
    char text[96];
    close(fd);
    return qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "%s", strerror_r(reason, text, sizeof text));
  }
  client->channel = create_channel(client, fd);
  return QKV_OK;
}

static qkv_code nobody_answers(const qkv_client *client, const qkv_error *reason, qkv_call_error *error) {
  if (reason->status == QKV_INVALID_ARGUMENT) return qkvi_fail_with(error, reason);
  return qkvi_fail(error, QKV_UNAVAILABLE, "nobody answers at %s: %s; is qkvd running there?", client->target,
                   reason->text);
}

qkv_code qkvi_ensure_connected(qkv_client *client, qkv_call_error *error) {
  if (client->channel != NULL && !qkvi_socket_hung_up(client->fd)) return QKV_OK;
  bool retry = false;
  qkv_error reason = {0};
  if (connect_once(client, client->options.timeout_ms, &retry, &reason) == QKV_OK) return QKV_OK;
  return nobody_answers(client, &reason, error);
}

static bool says_serving(qkv_client *client, const grpc_byte_buffer *response) {
  static const uint8_t serving[] = {0x08, 0x01};  // grpc.health.v1.HealthCheckResponse
  uint8_t bytes[sizeof serving];
  const qkv_bytes message = qkvi_view(client, response);
  if (message.length != sizeof serving) return false;
  qkv_bytes_copy(message, 0, sizeof serving, bytes);
  return memcmp(bytes, serving, sizeof serving) == 0;
}

// Whether a gRPC server is behind the socket: any answer to a health check will do, unless it must be `serving`.
static qkv_status greet(qkv_client *client, int64_t timeout_ms, bool serving, qkv_error *error) {
  grpc_byte_buffer *response = NULL;
  qkv_call_error answer = {0};
  int64_t timeout_of_calls_ms = client->options.timeout_ms;
  client->options.timeout_ms = timeout_ms;
  (void)qkvi_unary(client, "/grpc.health.v1.Health/Check", qkvi_request_of_bytes("", 0), &response, &answer);
  client->options.timeout_ms = timeout_of_calls_ms;
  const bool served = response != NULL && says_serving(client, response);
  if (response != NULL) grpc_byte_buffer_destroy(response);
  if (answer.code == QKV_DEADLINE_EXCEEDED || answer.code == QKV_UNAVAILABLE || (serving && answer.code != QKV_OK))
    return qkv_fail(error, QKV_UNAVAILABLE, "%.200s", answer.text);
  if (serving && !served) return qkv_fail(error, QKV_UNAVAILABLE, "%.200s does not serve", client->target);
  return QKV_OK;
}

qkv_code qkvi_check_health(qkv_client *client, int64_t timeout_ms, qkv_call_error *error) {
  bool retry = false;
  qkv_error reason = {0};
  qkv_status status = QKV_OK;
  const int64_t until = qkv_now_ms() + timeout_ms;
  if (client->channel == NULL || qkvi_socket_hung_up(client->fd))
    status = connect_once(client, timeout_ms, &retry, &reason);
  const int64_t left_ms = until - qkv_now_ms();
  if (status == QKV_OK) status = greet(client, left_ms < 1 ? 1 : left_ms, true, &reason);
  return status == QKV_OK ? qkvi_ok(error) : nobody_answers(client, &reason, error);
}

static qkv_code connect_until(qkv_client *client, int64_t deadline_ms, qkv_call_error *error) {
  for (int64_t pause_ms = RETRY_FIRST_MS;; pause_ms = pause_ms < RETRY_MAX_MS / 2 ? 2 * pause_ms : RETRY_MAX_MS) {
    bool retry = false;
    qkv_error reason = {0};
    int64_t left_ms = deadline_ms - qkv_now_ms();
    if (left_ms < 1) left_ms = 1;
    qkv_status status = connect_once(client, left_ms, &retry, &reason);
    if (status == QKV_OK) {
      left_ms = deadline_ms - qkv_now_ms();
      status = greet(client, left_ms < 1 ? 1 : left_ms, false, &reason);
      retry = true;
    }
    if (status == QKV_OK) return qkvi_ok(error);
    if (!retry || qkv_now_ms() + pause_ms >= deadline_ms) return nobody_answers(client, &reason, error);
    poll_for(client, pause_ms);
  }
}

// Of the whole file, NUL-terminated, or NULL.
static char *read_file(const char *path, const char *what, qkv_error *error) {
  char *text = NULL;
  size_t capacity = 0;
  FILE *file = fopen(path, "re");
  const ssize_t bytes = file != NULL ? getdelim(&text, &capacity, '\0', file) : -1;
  if (bytes <= 0) (void)qkv_fail(error, QKV_INVALID_ARGUMENT, "cannot read %s %.300s: %m", what, path);
  if (file != NULL) (void)fclose(file);
  if (bytes > 0) return text;
  free(text);
  return NULL;
}

static qkv_status read_tls(qkv_client *client, qkv_error *error) {
  const qkv_client_options *options = &client->options;
  if (options->tls_ca == NULL && options->tls_cert == NULL && options->tls_key == NULL) return QKV_OK;
  if (options->tls_ca == NULL || (options->tls_cert == NULL) != (options->tls_key == NULL))
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "TLS needs tls_ca, and tls_cert and tls_key need each other");
  char *ca = read_file(options->tls_ca, "tls_ca", error), *cert = NULL, *key = NULL;
  if (ca != NULL && options->tls_cert != NULL) cert = read_file(options->tls_cert, "tls_cert", error);
  if (cert != NULL) key = read_file(options->tls_key, "tls_key", error);
  if (error->status == QKV_OK) {
    grpc_ssl_pem_key_cert_pair pair = {.private_key = key, .cert_chain = cert};
    client->credentials = grpc_ssl_credentials_create_ex(ca, cert != NULL ? &pair : NULL, NULL, NULL);
  }
  free(ca);
  free(cert);
  free(key);
  return error->status;
}

// ---- who calls ----

static void add_metadata(qkv_client *client, const char *key, grpc_slice value) {
  client->metadata[client->metadata_count++] =
      (grpc_metadata){.key = grpc_slice_from_static_string(key), .value = value};
}

// The value of `authorization`, where it is a token.
static qkv_status write_authorization(const char *token, grpc_slice *out, qkv_error *error) {
  char *value = NULL;
  if (token[0] == '\0') return qkv_fail(error, QKV_INVALID_ARGUMENT, "the token is empty");
  for (const char *c = token; *c != '\0'; c++) {
    if (*c <= ' ' || *c > '~') return qkv_fail(error, QKV_INVALID_ARGUMENT, "the token has byte 0x%02x", *c & 0xff);
  }
  const int length = asprintf(&value, "Bearer %s", token);
  assert(length > 0);
  (void)length;
  *out = grpc_slice_from_copied_string(value);
  free(value);
  return QKV_OK;
}

static qkv_status read_token_file(const char *path, grpc_slice *out, qkv_error *error) {
  char *text = read_file(path, "token_file", error);
  if (text == NULL) return error->status;
  text[strcspn(text, " \t\r\n")] = '\0';
  const qkv_status status = text[0] != '\0'
                                ? write_authorization(text, out, error)
                                : qkv_fail(error, QKV_INVALID_ARGUMENT, "token_file %s begins with no token", path);
  free(text);
  return status;
}

// Whether the file `now` is another one than the one whose token was read last.
static bool has_changed(const qkv_client *client, const struct stat *now) {
  return now->st_ino != client->token_inode || now->st_mtim.tv_sec != client->token_written.tv_sec ||
         now->st_mtim.tv_nsec != client->token_written.tv_nsec;
}

// One that cannot be read counts as unread: it may be in the middle of being written.
static qkv_status read_token_file_as(qkv_client *client, const struct stat *now, grpc_slice *out, qkv_error *error) {
  QKV_TRY(read_token_file(client->token_file, out, error));
  client->token_inode = now->st_ino;
  client->token_written = now->st_mtim;
  return QKV_OK;
}

void qkvi_renew_token(qkv_client *client) {
  if (client->token_file == NULL || qkv_now_ms() < client->token_next_ms) return;
  client->token_next_ms = qkv_now_ms() + TOKEN_FILE_MS;
  grpc_slice value;
  struct stat now;
  qkv_error ignored = {0};
  if (stat(client->token_file, &now) != 0 || !has_changed(client, &now) ||
      read_token_file_as(client, &now, &value, &ignored) != QKV_OK)
    return;
  grpc_slice_unref(client->metadata[0].value);  // calls under way have references of their own
  client->metadata[0].value = value;
}

static qkv_status read_token(qkv_client *client, qkv_error *error) {
  const qkv_client_options *options = &client->options;
  grpc_slice value;
  if (options->token == NULL && options->token_file == NULL) return QKV_OK;
  if (options->token != NULL) {
    QKV_TRY(write_authorization(options->token, &value, error));
  } else {
    client->token_file = strdup(options->token_file);
    assert(client->token_file != NULL);
    struct stat now = {0};
    (void)stat(client->token_file, &now);
    QKV_TRY(read_token_file_as(client, &now, &value, error));
  }
  add_metadata(client, "authorization", value);
  return QKV_OK;
}

static qkv_status read_identity(qkv_client *client, qkv_error *error) {
  const char *tenant = client->options.tenant;
  QKV_TRY(read_tls(client, error));
  QKV_TRY(read_token(client, error));
  if (tenant != NULL) add_metadata(client, "qkv-tenant", grpc_slice_from_copied_string(tenant));
  return QKV_OK;
}

static int64_t bounded_ms(int64_t ms, int64_t unset) {
  if (ms <= 0) return unset;
  return ms < TIMEOUT_MAX_MS ? ms : TIMEOUT_MAX_MS;
}

qkv_code qkvi_client_create(const char *target, const qkv_client_options *options, qkv_client **client_out,
                            qkv_call_error *error) {
  static pthread_once_t kept = PTHREAD_ONCE_INIT;
  *client_out = NULL;
  qkv_error invalid = {0};
  (void)pthread_once(&kept, keep_freed_memory);
  qkv_client *client = calloc(1, sizeof *client);
  assert(client != NULL);
  if (options != NULL) client->options = *options;
  client->options.timeout_ms = bounded_ms(client->options.timeout_ms, TIMEOUT_MS);
  client->options.connect_timeout_ms = bounded_ms(client->options.connect_timeout_ms, client->options.timeout_ms);
  if (client->options.message_bytes_max <= 0) client->options.message_bytes_max = MESSAGE_BYTES_MAX;
  client->fd = -1;
  client->target = strdup(target);
  client->writer = qkv_wire_writer_create();
  assert(client->target != NULL && client->writer != NULL);
  if (client->options.placement != NULL) client->placement = strdup(client->options.placement);
  assert(client->options.placement == NULL || client->placement != NULL);
  grpc_init();
  client->queue = grpc_completion_queue_create_for_pluck(NULL);
  if (read_identity(client, &invalid) != QKV_OK) {
    qkv_client_close(&client);
    return qkvi_fail_with(error, &invalid);
  }
  *client_out = client;
  return QKV_OK;
}

qkv_code qkv_client_connect(const char *target, const qkv_client_options *options, qkv_client **client_out,
                            qkv_call_error *error) {
  *client_out = NULL;
  qkv_error invalid = {0};
  if (target == NULL) return qkvi_fail(error, QKV_INVALID_ARGUMENT, "target is NULL");
  const char *tenant = options != NULL ? options->tenant : NULL;
  const char *placement = options != NULL ? options->placement : NULL;
  if (tenant != NULL && qkv_name_check(tenant, "tenant", &invalid) != QKV_OK) return qkvi_fail_with(error, &invalid);
  if (placement != NULL && qkv_name_check(placement, "placement", &invalid) != QKV_OK)
    return qkvi_fail_with(error, &invalid);
  if (strchr(target, ',') != NULL) return qkvi_connect_several(target, options, client_out, error);
  qkv_client *client = NULL;
  qkv_code code = qkvi_client_create(target, options, &client, error);
  if (code != QKV_OK) return code;
  assert(client != NULL);
  code = connect_until(client, qkv_now_ms() + client->options.connect_timeout_ms, error);
  if (code != QKV_OK) qkv_client_close(&client);
  *client_out = client;
  return code;
}

void qkv_client_set_timeout(qkv_client *client, int64_t timeout_ms) {
  client->options.timeout_ms = bounded_ms(timeout_ms, TIMEOUT_MS);
  for (size_t i = 0; i < client->part_count; i++) qkv_client_set_timeout(client->parts[i], timeout_ms);
}

void qkv_client_close(qkv_client **client_in) {
  qkv_client *client = *client_in;
  if (client == NULL) return;
  assert(atomic_load(&client->lent) == 0);
  qkvi_health_destroy(&client->health);
  qkvi_shares_free(client);
  qkvi_close_parts(client);
  disconnect(client);
  grpc_completion_queue_shutdown(client->queue);
  static char nobody;
  grpc_event event;
  do {
    event = grpc_completion_queue_pluck(client->queue, &nobody, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
  } while (event.type != GRPC_QUEUE_SHUTDOWN);
  grpc_completion_queue_destroy(client->queue);
  for (size_t i = 0; i < client->metadata_count; i++) grpc_slice_unref(client->metadata[i].value);
  if (client->credentials != NULL) grpc_channel_credentials_release(client->credentials);
  qkv_wire_writer_destroy(&client->writer);
  free(client->packed);
  free(client->segments);
  qkvi_codes_free(client);
  for (int i = 0; i < 2; i++) free(client->scratch[i]);
  free(client->placement);
  free(client->token_file);
  free(client->target);
  free(client);
  *client_in = NULL;
  grpc_shutdown();
}

void qkv_free(void *memory) {
  free(memory);
}
