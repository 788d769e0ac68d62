// The audit log: calls of Admin, and refused calls, by gRPC or HTTP (docs/security.md).
//
//   {"time":"2027-01-31T12:00:00.123Z","event":"admin","call":17,"method":"/qkv.v1.Admin/SetQuota","tenant":"default",
//    "peer":"10.0.0.7:41234","status":"OK"}
//
// Of refusals, which any client can cause, at most QKVI_AUDIT_REFUSALS a second are written. The next line that is
// written says how many were "skipped".
//
// One line of JSON for each, in a file of its own, written before the client is answered. A line that cannot be
// written is reported in the log, once until a write succeeds again; the call goes on.
//
// Threads: any. One lock, held while a line is written.
#ifndef QKV_SERVER_AUTH_AUDIT_H
#define QKV_SERVER_AUTH_AUDIT_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/base/status.h"

enum { QKVI_AUDIT_REFUSALS = 100 };

typedef struct qkvi_audit qkvi_audit;

// Appends to the file, which is made, with mode 0600, where it is not there. UNAVAILABLE: it cannot be opened.
qkv_status qkvi_audit_create(const char *path, qkvi_audit **out, qkv_error *error);
void qkvi_audit_destroy(qkvi_audit **audit);
// Opens it again: after it was moved away. The old one stays where that fails.
qkv_status qkvi_audit_reopen(qkvi_audit *audit, qkv_error *error);

// Strings that are NULL or empty are left out.
typedef struct qkvi_audit_line {
  bool refused;   // the event: "refused", else "admin"
  uint64_t call;  // its number; 0: it has none
  const char *method, *tenant, *peer, *traceparent;
  qkv_status status;
  const char *reason;
} qkvi_audit_line;

void qkvi_audit_write(qkvi_audit *audit, const qkvi_audit_line *line);  // NULL: nothing

#endif
