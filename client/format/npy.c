#include "client/format/npy.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <string.h>

enum { MAGIC_BYTES = 10, DATA_ALIGN = 64, HEADER_MAX = 256 };

// The header with its magic, a multiple of DATA_ALIGN. Returns its length.
static size_t make_header(const char *descr, int rank, const int64_t *dims, char header[HEADER_MAX]) {
  size_t used = MAGIC_BYTES;
  used +=
      (size_t)snprintf(header + used, HEADER_MAX - used, "{'descr': '%s', 'fortran_order': False, 'shape': (", descr);
  for (int i = 0; i < rank; i++) {
    const char *comma = i + 1 < rank ? ", " : rank == 1 ? "," : "";
    used += (size_t)snprintf(header + used, HEADER_MAX - used, "%" PRId64 "%s", dims[i], comma);
  }
  used += (size_t)snprintf(header + used, HEADER_MAX - used, "), }");
  size_t length = (used + 1 + DATA_ALIGN - 1) / DATA_ALIGN * DATA_ALIGN;
  assert(length <= HEADER_MAX);
  memset(header + used, ' ', length - used);
  header[length - 1] = '\n';
  static const char magic[8] = {'\x93', 'N', 'U', 'M', 'P', 'Y', 1, 0};
  memcpy(header, magic, sizeof magic);
  header[8] = (char)((length - MAGIC_BYTES) & 0xff);
  header[9] = (char)((length - MAGIC_BYTES) >> 8);
  return length;
}

qkv_status qkv_npy_create(const char *path, qkv_dtype dtype, int rank, const int64_t *dims, FILE **file,
                          qkv_error *error) {
  assert(rank >= 1 && rank <= QKV_TENSOR_RANK_MAX);
  char header[HEADER_MAX];
  *file = NULL;
  if (dtype != QKV_FP32 && dtype != QKV_FP16) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s: NumPy has no %s; write fp32 or fp16", path,
                    qkv_dtype_name(dtype));
  }
  size_t length = make_header(dtype == QKV_FP32 ? "<f4" : "<f2", rank, dims, header);
  FILE *made = fopen(path, "wbe");
  if (made == NULL) return qkv_fail(error, QKV_UNAVAILABLE, "%s: %s", path, strerror(errno));
  if (fwrite(header, 1, length, made) != length) {
    int reason = errno;
    (void)fclose(made);
    return qkv_fail(error, QKV_UNAVAILABLE, "%s: %s", path, strerror(reason));
  }
  *file = made;
  return QKV_OK;
}
