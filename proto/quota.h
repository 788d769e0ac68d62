// A tenant's quota: what it may take, as a line of a file and as the contract's Quota (docs/tenants.md).
//
//   team-a host_bytes=4294967296 host_bytes_guaranteed=1GiB sessions=1000
//   * calls=64 bytes_per_second=100MiB
//
// Pure. Threads: any.
#ifndef QKV_PROTO_QUOTA_H
#define QKV_PROTO_QUOTA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/name.h"
#include "engine/base/status.h"

#define QKV_QUOTA_DEFAULT "*"  // of each tenant that has none of its own
#define QKV_QUOTA_LINE_MAX 1024
enum { QKV_WEIGHT_DEFAULT = 100 };

// id, kind of option, most
#define QKV_QUOTA_MAP(X)                             \
  X(host_bytes, QKV_OPTION_BYTES, 0x1p60)            \
  X(host_bytes_guaranteed, QKV_OPTION_BYTES, 0x1p60) \
  X(ssd_bytes, QKV_OPTION_BYTES, 0x1p60)             \
  X(ssd_bytes_guaranteed, QKV_OPTION_BYTES, 0x1p60)  \
  X(gpu_bytes, QKV_OPTION_BYTES, 0x1p60)             \
  X(sessions, QKV_OPTION_INTEGER, 0x1p40)            \
  X(models, QKV_OPTION_INTEGER, 0x1p40)              \
  X(calls, QKV_OPTION_INTEGER, 0x1p40)               \
  X(bytes_per_second, QKV_OPTION_BYTES, 0x1p60)      \
  X(rows_per_second, QKV_OPTION_INTEGER, 0x1p60)     \
  X(weight, QKV_OPTION_INTEGER, 1e6)

// 0: no limit.
typedef struct qkv_quota {
  char tenant[QKV_NAME_MAX + 1];  // or QKV_QUOTA_DEFAULT
#define X(id, kind, most) int64_t id;
  QKV_QUOTA_MAP(X)
#undef X
} qkv_quota;

// Whether it says nothing.
bool qkv_quota_is_empty(const qkv_quota *quota);
// INVALID_ARGUMENT: no tenant's name; beyond what a field may be; a guarantee above its ceiling, or of "*".
qkv_status qkv_quota_check(const qkv_quota *quota, qkv_error *error);

// Takes over one field of "FIELD=VALUE", for example host_bytes=4GiB. `*which` gets its number, below 32.
qkv_status qkv_quota_change(qkv_quota *quota, const char *word, unsigned *which, qkv_error *error);

// A line without its end, which is changed. `*has` is false for a blank one and a comment.
qkv_status qkv_quota_parse(char *line, qkv_quota *quota, bool *has, qkv_error *error);
// Without an end of line; QKV_QUOTA_LINE_MAX bytes are enough.
void qkv_quota_write(const qkv_quota *quota, char *line, size_t bytes);

#endif
