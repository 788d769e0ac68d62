#include "client/worker/worker.h"

#include <stddef.h>
#include <stdlib.h>

#include "client/common/interrupt.h"
#include "client/worker/forward.h"
#include "client/worker/remote.h"

qkv_status qkvi_worker_load(const qkvi_worker *worker, qkvi_lm **lm, qkv_error *error) {
  qkvi_forward_threads(worker->threads);
  return qkvi_lm_load(worker->model, lm, error);
}

qkv_status qkvi_worker_setup(const qkvi_worker *worker, qkvi_lm **lm, qkv_client **client, qkv_error *error) {
  *client = NULL;
  QKV_TRY(qkvi_worker_load(worker, lm, error));
  const qkv_client_options options = {QKV_PROGRAM_CONNECTION(worker->program),
                                      .timeout_ms = worker->program.timeout_ms};
  qkv_call_error call = {0};
  if (qkv_client_connect(worker->program.target, &options, client, &call) != 0) {
    qkvi_lm_free(lm);
    return qkvi_remote_failed(&call, error);
  }
  qkv_interrupt_catch();
  return QKV_OK;
}

void qkvi_worker_teardown(qkvi_lm **lm, qkv_client **client) {
  qkv_client_close(client);
  qkvi_lm_free(lm);
}
