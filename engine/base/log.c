#include "engine/base/log.h"

#include <assert.h>
#include <jansson.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const char *const level_names[] = {"debug", "info", "warn", "error"};
#define LEVEL_COUNT (sizeof level_names / sizeof level_names[0])

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static FILE *log_stream;  // NULL: stderr; guarded by the lock, as are writes to it
static _Atomic qkv_log_level log_level = QKV_LOG_INFO;

qkv_status qkv_log_level_parse(const char *text, qkv_log_level *level) {
  for (size_t i = 0; i < LEVEL_COUNT; i++) {
    if (strcmp(text, level_names[i]) == 0) {
      *level = (qkv_log_level)i;
      return QKV_OK;
    }
  }
  return QKV_INVALID_ARGUMENT;
}

void qkv_log_setup(FILE *stream, qkv_log_level level) {
  pthread_mutex_lock(&lock);
  log_stream = stream;
  atomic_store(&log_level, level);
  pthread_mutex_unlock(&lock);
}

bool qkv_log_wants(qkv_log_level level) {
  return level >= atomic_load(&log_level);
}

static void time_text(char *text, size_t size) {
  struct timespec now;
  (void)clock_gettime(CLOCK_REALTIME, &now);
  struct tm utc;
  (void)gmtime_r(&now.tv_sec, &utc);
  char seconds[32];
  (void)strftime(seconds, sizeof seconds, "%Y-%m-%dT%H:%M:%S", &utc);
  (void)snprintf(text, size, "%s.%03dZ", seconds, (int)(now.tv_nsec / 1000000));
}

// Fields that cannot be packed (bytes from outside that are no UTF-8) cost the fields, not the line.
static json_t *pack_fields(const char *format, va_list *arguments) {
  json_error_t error;
  json_t *fields = json_vpack_ex(&error, 0, format, *arguments);
  return fields != NULL ? fields : json_pack("{s:s}", "log_error", error.text);
}

// The line with its newline, `*length` bytes, to be freed; NULL where memory is exhausted.
static char *line_text(const json_t *line, size_t *length) {
  size_t size = json_dumpb(line, NULL, 0, JSON_COMPACT);
  char *text = malloc(size + 1);
  if (text == NULL) return NULL;
  (void)json_dumpb(line, text, size, JSON_COMPACT);
  text[size] = '\n';
  *length = size + 1;
  return text;
}

static void write_line(const json_t *line) {
  size_t length = 0;
  char *text = line_text(line, &length);
  if (text == NULL) return;
  pthread_mutex_lock(&lock);
  FILE *stream = log_stream != NULL ? log_stream : stderr;
  (void)fwrite(text, 1, length, stream);
  (void)fflush(stream);
  pthread_mutex_unlock(&lock);
  free(text);
}

void qkv_log(qkv_log_level level, const char *message, const char *fields_format, ...) {
  assert((size_t)level < LEVEL_COUNT);
  if (!qkv_log_wants(level)) return;
  char now[64];
  time_text(now, sizeof now);
  json_t *line = json_pack("{s:s, s:s, s:s}", "time", now, "level", level_names[level], "message", message);
  if (fields_format != NULL) {
    va_list arguments;
    va_start(arguments, fields_format);
    json_t *fields = pack_fields(fields_format, &arguments);
    va_end(arguments);
    (void)json_object_update_missing(line, fields);
    json_decref(fields);
  }
  write_line(line);
  json_decref(line);
}
