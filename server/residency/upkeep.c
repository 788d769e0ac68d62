// Verification and compaction of the data directory, on request of its operator.
#include <jansson.h>

#include "server/residency/internal.h"

static bool on_verified(void *context, uint64_t done, uint64_t all) {
  qkvi_residency *residency = context;
  qkvi_residency_lock(residency);
  residency->verify.done = done;
  residency->verify.all = all;
  const bool go_on = !residency->finishing;
  qkvi_residency_unlock(residency);
  return go_on;
}

static void verify_job(void *context) {
  qkvi_residency *residency = context;
  qkv_storage_verify_report report = {0};
  (void)qkv_storage_verify(residency->storage, on_verified, residency, &report);
  qkvi_residency_lock(residency);
  residency->verify.running = false;
  residency->verify.bad = report.bad;
  residency->verify.bytes = report.bytes;
  qkvi_residency_unlock(residency);
  if (report.bad > 0)
    qkv_log(QKV_LOG_ERROR, "damaged records", "{s:I, s:I}", "bad", (json_int_t)report.bad, "records",
            (json_int_t)report.records);
}

qkv_status qkvi_upkeep_verify(qkvi_residency *residency, qkv_pool *pool, bool start, qkvi_verify *verify) {
  qkvi_residency_lock(residency);
  const qkvi_verify last = residency->verify;
  const bool begin = start && !last.running;
  if (begin) residency->verify = (qkvi_verify){.running = true};
  qkvi_residency_unlock(residency);
  const qkv_status status = begin ? qkv_pool_submit(pool, verify_job, residency) : QKV_OK;
  qkvi_residency_lock(residency);
  if (status != QKV_OK) residency->verify = last;
  *verify = residency->verify;
  qkvi_residency_unlock(residency);
  return status;
}

static bool begin_compacting(qkvi_residency *residency) {
  qkvi_residency_lock(residency);
  const bool begin = !residency->compacting;
  residency->compacting = true;
  qkvi_residency_unlock(residency);
  return begin;
}

qkv_status qkvi_upkeep_compact(qkvi_residency *residency, double live_share, uint64_t *freed, qkv_error *error) {
  *freed = 0;
  if (!begin_compacting(residency))
    return qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "a Compact call is running, 1 at a time is served");
  qkv_storage_stats before, after;
  qkvi_journal_wait wait = {.residency = residency};
  qkv_storage_read_stats(residency->storage, &before);
  qkv_storage_compact(residency->storage, live_share, qkvi_catalogue_on_journal, &wait);
  qkvi_residency_lock(residency);
  while (!wait.done) (void)pthread_cond_wait(&residency->moved, &residency->lock);
  residency->compacting = false;
  qkvi_residency_unlock(residency);
  qkv_storage_read_stats(residency->storage, &after);
  *freed = before.disk_bytes > after.disk_bytes ? before.disk_bytes - after.disk_bytes : 0;
  return wait.status == QKV_OK ? QKV_OK : qkv_fail(error, wait.status, "the disk did not take what was to be moved");
}
