#include "server/auth/audit.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "engine/base/histogram.h"
#include "engine/base/log.h"
#include "server/tenants/rate.h"

struct qkvi_audit {
  char *path;
  pthread_mutex_t lock;
  int file;
  bool failed;  // the last line was not written
  qkvi_rate refusals;
  uint64_t skipped;  // refusals since the last line
};

static int open_file(const char *path) {
  return open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
}

qkv_status qkvi_audit_create(const char *path, qkvi_audit **out, qkv_error *error) {
  const int file = open_file(path);
  if (file < 0) return qkv_fail(error, QKV_UNAVAILABLE, "cannot open audit-log %.200s: %m", path);
  qkvi_audit *audit = calloc(1, sizeof *audit);
  assert(audit != NULL);
  audit->path = strdup(path);
  assert(audit->path != NULL);
  audit->file = file;
  qkvi_rate_set(&audit->refusals, QKVI_AUDIT_REFUSALS, qkv_stage_now());
  const int failed = pthread_mutex_init(&audit->lock, NULL);
  assert(failed == 0);
  (void)failed;
  *out = audit;
  return QKV_OK;
}

void qkvi_audit_destroy(qkvi_audit **audit) {
  qkvi_audit *old = *audit;
  if (old == NULL) return;
  *audit = NULL;
  (void)close(old->file);
  (void)pthread_mutex_destroy(&old->lock);
  free(old->path);
  free(old);
}

qkv_status qkvi_audit_reopen(qkvi_audit *audit, qkv_error *error) {
  const int file = open_file(audit->path);
  if (file < 0) return qkv_fail(error, QKV_UNAVAILABLE, "cannot open audit-log %.200s: %m", audit->path);
  (void)pthread_mutex_lock(&audit->lock);
  (void)close(audit->file);
  audit->file = file;
  (void)pthread_mutex_unlock(&audit->lock);
  return QKV_OK;
}

static void set_text(json_t *object, const char *key, const char *text) {
  if (text == NULL || text[0] == '\0') return;
  json_t *value = json_string(text);
  json_object_set_new(object, key, value != NULL ? value : json_string("(no UTF-8)"));
}

static void set_time(json_t *object) {
  struct timespec now;
  struct tm parts;
  char text[64];
  clock_gettime(CLOCK_REALTIME, &now);
  (void)gmtime_r(&now.tv_sec, &parts);
  const size_t used = strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S", &parts);
  (void)snprintf(text + used, sizeof text - used, ".%03dZ", (int)(now.tv_nsec / 1000000));
  json_object_set_new(object, "time", json_string(text));
}

static char *write_line(const qkvi_audit_line *line, uint64_t skipped) {
  json_t *object = json_object();
  set_time(object);
  set_text(object, "event", line->refused ? "refused" : "admin");
  if (line->call != 0) json_object_set_new(object, "call", json_integer((json_int_t)line->call));
  set_text(object, "method", line->method);
  set_text(object, "tenant", line->tenant);
  set_text(object, "peer", line->peer);
  set_text(object, "traceparent", line->traceparent);
  set_text(object, "status", qkv_status_name(line->status));
  set_text(object, "reason", line->reason);
  if (skipped > 0) json_object_set_new(object, "skipped", json_integer((json_int_t)skipped));
  char *text = json_dumps(object, JSON_COMPACT);
  json_decref(object);
  return text;
}

// False: one refusal too many. `*skipped`: how many before it were.
static bool may_write(qkvi_audit *audit, const qkvi_audit_line *line, uint64_t *skipped) {
  (void)pthread_mutex_lock(&audit->lock);
  const uint64_t now = qkv_stage_now();
  const bool may = !line->refused || qkvi_rate_wait_ms(&audit->refusals, now) == 0;
  if (may && line->refused) qkvi_rate_take(&audit->refusals, 1, now);
  *skipped = may ? audit->skipped : 0;
  audit->skipped = may ? 0 : audit->skipped + 1;
  (void)pthread_mutex_unlock(&audit->lock);
  return may;
}

// Writes the whole line at once, so that other processes that append to the file do not interleave.
void qkvi_audit_write(qkvi_audit *audit, const qkvi_audit_line *line) {
  uint64_t skipped;
  if (audit == NULL || !may_write(audit, line, &skipped)) return;
  char *text = write_line(line, skipped);
  if (text == NULL) abort();
  const size_t bytes = strlen(text);
  text[bytes] = '\n';  // in place of the end
  (void)pthread_mutex_lock(&audit->lock);
  const bool written = write(audit->file, text, bytes + 1) == (ssize_t)bytes + 1;
  const bool tell = !written && !audit->failed;
  audit->failed = !written;
  (void)pthread_mutex_unlock(&audit->lock);
  if (tell)
    qkv_log(QKV_LOG_ERROR, "audit-log cannot be written", "{s:s, s:s}", "file", audit->path, "reason",
            strerror(errno));
  free(text);
}
