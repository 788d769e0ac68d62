#include "server/handlers/health.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "grpc/health/v1/health.pb-c.h"
#include "server/daemon.h"
#include "server/handlers/control.h"
#include "server/handlers/handlers.h"

typedef Grpc__Health__V1__HealthCheckResponse__ServingStatus serving_status;
#define SERVING GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVING
#define NOT_SERVING GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__NOT_SERVING
#define SERVICE_UNKNOWN GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVICE_UNKNOWN
#define NOTHING_SENT GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__UNKNOWN

#define RESPONSE_BYTES_MAX 16

// One Watch stream.
struct qkv_watch {
  qkv_rpc_call *call;
  qkv_health *health;
  bool known;           // the name is a service of ours
  serving_status sent;  // last sent
  bool parked;          // in the list; guarded by the lock, as are the links
  qkv_watch *next, *previous;
};

void qkv_health_init(qkv_health *health) {
  pthread_mutex_init(&health->lock, NULL);
  health->draining = false;
  health->parked = NULL;
}

void qkv_health_deinit(qkv_health *health) {
  assert(health->parked == NULL);
  pthread_mutex_destroy(&health->lock);
}

// The request's service, "" for the whole daemon.
static qkv_status read_request(qkv_bytes message, bool *known, qkv_error *error) {
  static const char *const services[] = {"", "qkv.v1.KvCache", "qkv.v1.Admin"};
  *known = false;
  if (message.length > QKVI_SOON_BYTES_MAX)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "request is %zu bytes, at most %d", message.length,
                    QKVI_SOON_BYTES_MAX);
  Grpc__Health__V1__HealthCheckRequest *request =
      qkvi_control_unpack_here(message, &grpc__health__v1__health_check_request__descriptor, error);
  if (request == NULL) return error->status;
  for (size_t i = 0; i < sizeof(services) / sizeof(services[0]); i++) {
    if (strcmp(request->service, services[i]) == 0) *known = true;
  }
  qkv_status status = QKV_OK;
  if (!*known) status = qkv_fail(error, QKV_NOT_FOUND, "no service %s", request->service);
  qkvi_control_free(request);
  return status;
}

static size_t pack(serving_status status, uint8_t *data) {
  Grpc__Health__V1__HealthCheckResponse response = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__INIT;
  response.status = status;
  assert(grpc__health__v1__health_check_response__get_packed_size(&response) <= RESPONSE_BYTES_MAX);
  return grpc__health__v1__health_check_response__pack(&response, data);
}

static void on_check(qkv_rpc_call *call, qkv_bytes message) {
  qkv_daemon *daemon = qkv_rpc_context(call);
  bool known;
  qkv_error error = {0};
  if (read_request(message, &known, &error) != QKV_OK) {
    qkvi_control_fail(call, &error);
    return;
  }
  uint8_t data[RESPONSE_BYTES_MAX];
  qkv_rpc_reply_bytes(call, data, pack(atomic_load(&daemon->draining) ? NOT_SERVING : SERVING, data));
}

// ---- Watch ----

static serving_status current(const qkv_watch *watch) {
  if (!watch->known) return SERVICE_UNKNOWN;
  return watch->health->draining ? NOT_SERVING : SERVING;
}

static void park(qkv_watch *watch) {
  watch->parked = true;
  watch->previous = NULL;
  watch->next = watch->health->parked;
  if (watch->next != NULL) watch->next->previous = watch;
  watch->health->parked = watch;
}

static void unpark(qkv_watch *watch) {
  assert(watch->parked);
  watch->parked = false;
  if (watch->previous != NULL) watch->previous->next = watch->next;
  if (watch->previous == NULL) watch->health->parked = watch->next;
  if (watch->next != NULL) watch->next->previous = watch->previous;
}

// The next response to a stream that the handler owns. The lock is held.
static void settle(qkv_watch *watch) {
  if (watch->sent != current(watch)) {
    watch->sent = current(watch);
    uint8_t data[RESPONSE_BYTES_MAX];
    qkv_rpc_send_bytes(watch->call, data, pack(watch->sent, data));
  } else if (watch->health->draining) {
    qkv_rpc_finish(watch->call, QKV_UNAVAILABLE, "draining: the daemon is about to stop");
  } else if (qkv_rpc_cancelled(watch->call)) {
    qkv_rpc_finish(watch->call, QKV_CANCELLED, "cancelled");
  } else {
    park(watch);
  }
}

static void settle_locked(qkv_watch *watch) {
  qkv_health *health = watch->health;
  pthread_mutex_lock(&health->lock);
  settle(watch);
  pthread_mutex_unlock(&health->lock);
}

static void on_watch(qkv_rpc_call *call, qkv_bytes message) {
  qkv_daemon *daemon = qkv_rpc_context(call);
  bool known;
  qkv_error error = {0};
  qkv_status status = read_request(message, &known, &error);
  if (status != QKV_OK && status != QKV_NOT_FOUND) {
    qkvi_control_fail(call, &error);
    return;
  }
  qkv_watch *watch = calloc(1, sizeof(*watch));
  assert(watch != NULL);
  watch->call = call;
  watch->health = &daemon->health;
  watch->known = known;
  watch->sent = NOTHING_SENT;
  qkv_rpc_set_state(call, watch);
  settle_locked(watch);
}

static void on_watch_sent(qkv_rpc_call *call) {
  settle_locked(qkv_rpc_state(call));
}

static void on_watch_cancelled(qkv_rpc_call *call) {
  qkv_watch *watch = qkv_rpc_state(call);
  if (watch == NULL) return;
  qkv_health *health = watch->health;
  pthread_mutex_lock(&health->lock);
  if (watch->parked) {
    unpark(watch);
    qkv_rpc_finish(call, QKV_CANCELLED, "cancelled");
  }
  pthread_mutex_unlock(&health->lock);
}

void qkv_health_drain(qkv_health *health) {
  pthread_mutex_lock(&health->lock);
  health->draining = true;
  while (health->parked != NULL) {
    qkv_watch *watch = health->parked;
    unpark(watch);
    settle(watch);
  }
  pthread_mutex_unlock(&health->lock);
}

const qkv_rpc_method qkvi_health_methods[] = {
    {.path = "/grpc.health.v1.Health/Check", .message = on_check},
    {.path = "/grpc.health.v1.Health/Watch",
     .message = on_watch,
     .sent = on_watch_sent,
     .cancelled = on_watch_cancelled,
     .destroy = free},
    {0},
};
