// Admin.GetStorage, VerifyStorage, Compact: the SSD tier as its operator sees it.
#include <math.h>
#include <stdlib.h>

#include "qkv/v1/admin.pb-c.h"
#include "server/daemon.h"
#include "server/handlers/control.h"
#include "server/handlers/handlers.h"
#include "server/handlers/jobs.h"

#define LIVE_SHARE 0.9  // that is worth moving on request

// Waits for the disk, where there is one.
static void submit(qkv_rpc_call *call, qkv_bytes message, const ProtobufCMessageDescriptor *type, qkv_job_fn *job) {
  const qkv_daemon *daemon = qkv_rpc_context(call);
  if (daemon->residency == NULL) return qkv_rpc_finish(call, QKV_FAILED_PRECONDITION, "the daemon has no data-dir");
  qkvi_request_job(call, message, type, QKVI_WAIT_DISK, job);
}

// ---- GetStorage ----

static void write_stats(const qkv_storage_stats *stats, Qkv__V1__GetStorageResponse *response) {
  response->io = (char *)stats->io;
  response->records = stats->records;
  response->disk_bytes = stats->disk_bytes;
  response->live_bytes = stats->live_bytes;
  response->dead_bytes = stats->dead_bytes;
  response->dirty_bytes = stats->dirty_bytes;
  response->journal_bytes = stats->journal_bytes;
  response->put_bytes = stats->put_bytes;
  response->put_stored_bytes = stats->put_stored_bytes;
  response->read_bytes = stats->read_bytes;
  response->bad_records = stats->bad_records + stats->read_errors;
  response->failed = stats->full_errors + stats->device_errors;
  response->recovery_seconds = stats->recovery_s;
  response->unread_segments = stats->unread_segments;
}

static void write_segment(const qkv_storage_segment *from, Qkv__V1__StorageSegment *segment) {
  qkv__v1__storage_segment__init(segment);
  segment->segment = from->segment;
  segment->file_bytes = from->file_bytes;
  segment->live_bytes = from->live_bytes;
  segment->records = from->records;
  segment->sealed = from->sealed;
  segment->unread = from->unread;
}

static void get_job(void *context) {
  qkv_rpc_call *call = context;
  const qkv_daemon *daemon = qkv_rpc_context(call);
  qkv_storage *storage = qkvi_residency_storage(daemon->residency);
  if (!qkvi_job_wanted(call)) return;
  qkv_storage_stats stats;
  Qkv__V1__GetStorageResponse response = QKV__V1__GET_STORAGE_RESPONSE__INIT;
  qkv_storage_read_stats(storage, &stats);
  write_stats(&stats, &response);
  response.directory = (char *)daemon->options->data_dir;
  const size_t capacity = (size_t)stats.segments + 16;  // some may be begun meanwhile
  qkv_storage_segment *segments = calloc(capacity, sizeof *segments);
  Qkv__V1__StorageSegment *messages = calloc(capacity, sizeof *messages);
  Qkv__V1__StorageSegment **rows = calloc(capacity, sizeof *rows);
  if (segments == NULL || messages == NULL || rows == NULL) abort();
  const size_t there = qkv_storage_list_segments(storage, segments, capacity);
  response.n_segments = there < capacity ? there : capacity;
  response.segments = rows;
  for (size_t i = 0; i < response.n_segments; i++) {
    write_segment(&segments[i], &messages[i]);
    rows[i] = &messages[i];
  }
  qkvi_control_reply(call, &response.base);
  free(segments);
  free(messages);
  free(rows);
}

static void on_get_storage(qkv_rpc_call *call, qkv_bytes message) {
  submit(call, message, &qkv__v1__get_storage_request__descriptor, get_job);
}

// ---- VerifyStorage ----

static void verify_job(void *context) {
  qkv_rpc_call *call = context;
  qkv_daemon *daemon = qkv_rpc_context(call);
  const Qkv__V1__VerifyStorageRequest *request = qkv_rpc_state(call);
  qkvi_verify verify;
  qkv_error error = {0};
  if (!qkvi_job_wanted(call)) return;
  if (qkvi_upkeep_verify(daemon->residency, qkv_executor_pool(daemon->executor, QKV_WORK_BULK_BLOCKING),
                         request->start != 0, &verify) != QKV_OK) {
    (void)qkvi_queue_full(daemon, &error);
    return qkvi_control_fail(call, &error);
  }
  Qkv__V1__VerifyStorageResponse response = QKV__V1__VERIFY_STORAGE_RESPONSE__INIT;
  response.running = verify.running;
  response.records_done = verify.done;
  response.records = verify.all;
  response.bad = verify.bad;
  response.bytes = verify.bytes;
  qkvi_control_reply(call, &response.base);
}

static void on_verify_storage(qkv_rpc_call *call, qkv_bytes message) {
  submit(call, message, &qkv__v1__verify_storage_request__descriptor, verify_job);
}

// ---- Compact ----

static void compact_job(void *context) {
  qkv_rpc_call *call = context;
  const qkv_daemon *daemon = qkv_rpc_context(call);
  const Qkv__V1__CompactRequest *request = qkv_rpc_state(call);
  qkv_error error = {0};
  if (!qkvi_job_wanted(call)) return;
  const double share = request->live_share;
  if (isnan(share) || share < 0 || share > 1) {
    (void)qkv_fail(&error, QKV_INVALID_ARGUMENT, "live_share is %g, allowed are 0 to 1", share);
    return qkvi_control_fail(call, &error);
  }
  Qkv__V1__CompactResponse response = QKV__V1__COMPACT_RESPONSE__INIT;
  if (qkvi_upkeep_compact(daemon->residency, share == 0 ? LIVE_SHARE : share, &response.bytes_freed, &error) !=
      QKV_OK)
    return qkvi_control_fail(call, &error);
  qkvi_control_reply(call, &response.base);
}

static void on_compact(qkv_rpc_call *call, qkv_bytes message) {
  submit(call, message, &qkv__v1__compact_request__descriptor, compact_job);
}

const qkv_rpc_method qkvi_storage_methods[] = {
    {.path = "/qkv.v1.Admin/GetStorage", .message = on_get_storage, .destroy = qkvi_control_free},
    {.path = "/qkv.v1.Admin/VerifyStorage", .message = on_verify_storage, .destroy = qkvi_control_free},
    {.path = "/qkv.v1.Admin/Compact", .message = on_compact, .destroy = qkvi_control_free},
    {0}};
