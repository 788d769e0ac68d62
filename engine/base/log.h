// Structured logging: one JSON object a line.
//
//   qkv_log(QKV_LOG_INFO, "listening", "{s:s, s:i}", "address", address, "port", port);
//   {"time":"2026-11-21T04:05:06.789Z","level":"info","message":"listening","address":"127.0.0.1","port":7580}
//
// The format after the message is jansson's json_pack format of an object, or NULL for no fields. Fields that
// cannot be packed (a string that is no UTF-8) are replaced by "log_error"; the line is written.
//
// Threads: any. Lines are written whole. Not for hot paths.
#ifndef QKV_ENGINE_BASE_LOG_H
#define QKV_ENGINE_BASE_LOG_H

#include <stdbool.h>
#include <stdio.h>

#include "engine/base/status.h"

typedef enum qkv_log_level { QKV_LOG_DEBUG, QKV_LOG_INFO, QKV_LOG_WARN, QKV_LOG_ERROR } qkv_log_level;

// "debug", "info", "warn", "error".
qkv_status qkv_log_level_parse(const char *text, qkv_log_level *level);

// Lines below `level` are dropped. Before the first call: INFO to stderr. The stream is borrowed.
void qkv_log_setup(FILE *stream, qkv_log_level level);
// Whether lines of this level are written: for fields that cost something to make.
bool qkv_log_wants(qkv_log_level level);

void qkv_log(qkv_log_level level, const char *message, const char *fields_format, ...);

#endif
