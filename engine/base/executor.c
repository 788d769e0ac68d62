#include "engine/base/executor.h"

#include <assert.h>
#include <stdlib.h>

enum { UPKEEP_THREADS = 2 };

struct qkv_executor {
  qkv_pool *pools[QKV_WORK_KINDS];
};

static qkv_pool_config pool_config(const qkv_executor_config *config, qkv_work work) {
  static const bool yields[QKV_WORK_KINDS] = {
      [QKV_WORK_BULK] = true, [QKV_WORK_BULK_BLOCKING] = true, [QKV_WORK_UPKEEP] = true};
  static const bool on_demand[QKV_WORK_KINDS] = {
      [QKV_WORK_BLOCKING] = true, [QKV_WORK_BULK_BLOCKING] = true, [QKV_WORK_UPKEEP] = true};
  static const bool waits[QKV_WORK_KINDS] = {[QKV_WORK_BLOCKING] = true, [QKV_WORK_BULK_BLOCKING] = true};
  const size_t threads[QKV_WORK_KINDS] = {[QKV_WORK_INTERACTIVE] = config->threads,
                                          [QKV_WORK_BULK] = config->threads,
                                          [QKV_WORK_BLOCKING] = config->blocking_max,
                                          [QKV_WORK_BULK_BLOCKING] = config->blocking_max,
                                          [QKV_WORK_UPKEEP] = UPKEEP_THREADS};
  return (qkv_pool_config){.threads = threads[work],
                           .queue_max = config->queue_max,
                           .pinned = config->pinned && work == QKV_WORK_INTERACTIVE,
                           .yields = yields[work],
                           .nice = yields[work] ? config->bulk_nice : 0,
                           .on_demand = on_demand[work],
                           .waits = waits[work],
                           .timed = work != QKV_WORK_UPKEEP};
}

qkv_status qkv_executor_create(const qkv_executor_config *config, qkv_executor **executor, qkv_error *error) {
  qkv_executor *made = calloc(1, sizeof *made);
  assert(made != NULL && config->threads >= 1 && config->blocking_max >= 1);
  qkv_status status = QKV_OK;
  for (qkv_work work = 0; work < QKV_WORK_KINDS && status == QKV_OK; work++) {
    const qkv_pool_config wanted = pool_config(config, work);
    status = qkv_pool_create_with(&wanted, &made->pools[work], error);
  }
  if (status == QKV_OK) {
    *executor = made;
  } else {
    qkv_executor_destroy(&made);
  }
  return status;
}

void qkv_executor_destroy(qkv_executor **executor) {
  // Bulk threads that compute help the others.
  static const qkv_work order[QKV_WORK_KINDS] = {QKV_WORK_INTERACTIVE, QKV_WORK_BLOCKING, QKV_WORK_BULK_BLOCKING,
                                                 QKV_WORK_UPKEEP, QKV_WORK_BULK};
  qkv_executor *old = *executor;
  if (old == NULL) return;
  *executor = NULL;
  for (size_t i = 0; i < QKV_WORK_KINDS; i++) qkv_pool_destroy(&old->pools[order[i]]);
  free(old);
}

qkv_status qkv_executor_submit(qkv_executor *executor, qkv_work work, qkv_job_fn *run, void *context) {
  return qkv_pool_submit(executor->pools[work], run, context);
}

qkv_status qkv_executor_submit_as(qkv_executor *executor, qkv_work work, const qkv_share *share, qkv_job_fn *run,
                                  void *context) {
  return qkv_pool_submit_as(executor->pools[work], share, run, context);
}

qkv_pool *qkv_executor_pool(const qkv_executor *executor, qkv_work work) {
  return executor->pools[work];
}

size_t qkv_executor_waiting(const qkv_executor *executor) {
  size_t waiting = 0;
  for (size_t i = 0; i < QKV_WORK_KINDS; i++) waiting += qkv_pool_waiting(executor->pools[i]);
  return waiting;
}

size_t qkv_executor_threads(const qkv_executor *executor) {
  size_t threads = 0;
  for (size_t i = 0; i < QKV_WORK_KINDS; i++) threads += qkv_pool_running(executor->pools[i]);
  return threads;
}
