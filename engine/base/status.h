// Status codes and error texts.
//
// One list gives code, gRPC code and text. 0 is OK. A function that can fail returns a qkv_status and, where
// its caller has to be told what was wrong, fills a qkv_error: the field, the value and the limit. The first
// error is kept. A miss is not an error; a broken invariant of ours is an assert.
//
// Thread rules: none needed, a qkv_error belongs to its caller.
#ifndef QKV_ENGINE_BASE_STATUS_H
#define QKV_ENGINE_BASE_STATUS_H

#include <stdint.h>

// name, gRPC status code, text
#define QKV_STATUS_MAP(X)                          \
  X(OK, 0, "ok")                                   \
  X(CANCELLED, 1, "cancelled")                     \
  X(INVALID_ARGUMENT, 3, "invalid argument")       \
  X(DEADLINE_EXCEEDED, 4, "deadline exceeded")     \
  X(NOT_FOUND, 5, "not found")                     \
  X(ALREADY_EXISTS, 6, "already exists")           \
  X(PERMISSION_DENIED, 7, "permission denied")     \
  X(RESOURCE_EXHAUSTED, 8, "resource exhausted")   \
  X(FAILED_PRECONDITION, 9, "failed precondition") \
  X(UNIMPLEMENTED, 12, "unimplemented")            \
  X(INTERNAL, 13, "internal")                      \
  X(UNAVAILABLE, 14, "unavailable")                \
  X(DATA_LOSS, 15, "data loss")                    \
  X(UNAUTHENTICATED, 16, "unauthenticated")

// The values are the gRPC codes, so that no table is needed at the border.
typedef enum qkv_status {
#define X(name, code, text) QKV_##name = (code),
  QKV_STATUS_MAP(X)
#undef X
} qkv_status;

#define QKV_ERROR_TEXT_MAX 512

typedef struct qkv_error {
  qkv_status status;
  char text[QKV_ERROR_TEXT_MAX];  // NUL-terminated; "" while status is QKV_OK
} qkv_error;

// "invalid argument"; "unknown status" for a value that is not in the list.
const char *qkv_status_text(qkv_status status);

// "INVALID_ARGUMENT", as gRPC documents spell it.
const char *qkv_status_name(qkv_status status);

// Records status and text in `error` unless it holds an error already; `error` may be NULL. Returns `status`,
// so that a check is one line: `return qkv_fail(error, QKV_NOT_FOUND, "no session %s", name);`
qkv_status qkv_fail(qkv_error *error, qkv_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

// Puts "prefix" in front of an error's text: `items[3].` + `k.dims[1] is 3`. Cuts at the end where the text
// grows too long. Returns error->status.
qkv_status qkv_error_prefix(qkv_error *error, const char *format, ...) __attribute__((format(printf, 2, 3)));

#define QKV_TRY(call)                                    \
  do {                                                   \
    qkv_status qkv_try_status = (call);                  \
    if (qkv_try_status != QKV_OK) return qkv_try_status; \
  } while (0)

#endif
