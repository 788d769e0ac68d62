// grpc.health.v1: Check, and Watch streams that are notified when the daemon drains.
//
// Threads: any. One lock over the list of watchers.
#ifndef QKV_SERVER_HANDLERS_HEALTH_H
#define QKV_SERVER_HANDLERS_HEALTH_H

#include <pthread.h>
#include <stdbool.h>

typedef struct qkv_watch qkv_watch;

typedef struct qkv_health {
  pthread_mutex_t lock;
  bool draining;
  qkv_watch *parked;  // streams that wait for a change
} qkv_health;

void qkv_health_init(qkv_health *health);
// Every watcher gets NOT_SERVING and its stream ends; later ones the same at once.
void qkv_health_drain(qkv_health *health);
void qkv_health_deinit(qkv_health *health);  // no stream may be left

#endif
