#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "client/format/safetensors.h"

#define LENGTH_BYTES 8
#define DATA_ALIGN 8  // of the data in the file, by spaces after the JSON

// Where a tensor's bytes go.
typedef struct tensor_part {
  char *name;
  uint64_t next;  // offset in the file of the next byte
  uint64_t end;   // offset behind the last
} tensor_part;

struct qkv_safetensors_writer {
  char *path;     // the final name
  char *partial;  // the name until it is finished
  int fd;
  tensor_part *parts;
  size_t count;
};

static const char *dtype_text(qkv_dtype dtype) {
  switch (dtype) {
    case QKV_FP32:
      return "F32";
    case QKV_FP16:
      return "F16";
    case QKV_BF16:
      return "BF16";
    default:
      assert(!"a tensor of no type");
      return NULL;
  }
}

static uint64_t tensor_bytes(const qkv_safetensors_tensor *tensor) {
  uint64_t bytes = qkv_dtype_size(tensor->dtype);
  for (int i = 0; i < tensor->rank; i++) {
    assert(tensor->dims[i] >= 0);
    bool overflow = __builtin_mul_overflow(bytes, (uint64_t)tensor->dims[i], &bytes);
    assert(!overflow);
  }
  return bytes;
}

static json_t *tensor_json(const qkv_safetensors_tensor *tensor, uint64_t begin, uint64_t end) {
  json_t *shape = json_array();
  for (int i = 0; i < tensor->rank; i++) json_array_append_new(shape, json_integer(tensor->dims[i]));
  return json_pack("{s:s, s:o, s:[I, I]}", "dtype", dtype_text(tensor->dtype), "shape", shape, "data_offsets",
                   (json_int_t)begin, (json_int_t)end);
}

// The header's JSON, padded; sets the parts' places relative to the data. NULL for a name that is no UTF-8 or
// that comes twice.
static char *header_text(qkv_safetensors_writer *writer, const qkv_safetensors_tensor *tensors,
                         const qkv_safetensors_entry *metadata, size_t metadata_count, size_t *length) {
  json_t *header = json_object();
  if (metadata_count > 0) {
    json_t *texts = json_object();
    for (size_t i = 0; i < metadata_count; i++) {
      json_object_set_new(texts, metadata[i].key, json_string(metadata[i].value));
    }
    json_object_set_new(header, "__metadata__", texts);
  }
  uint64_t next = 0;
  for (size_t i = 0; i < writer->count; i++) {
    uint64_t end = next + tensor_bytes(&tensors[i]);
    json_object_set_new(header, tensors[i].name, tensor_json(&tensors[i], next, end));
    writer->parts[i] = (tensor_part){.name = strdup(tensors[i].name), .next = next, .end = end};
    next = end;
  }
  bool distinct = json_object_size(header) == writer->count + (metadata_count > 0);
  char *text = distinct ? json_dumps(header, JSON_COMPACT) : NULL;
  json_decref(header);
  if (text == NULL) return NULL;
  size_t used = strlen(text);
  *length = (used + DATA_ALIGN - 1) / DATA_ALIGN * DATA_ALIGN;
  char *padded = realloc(text, *length + 1);
  if (padded == NULL) abort();
  memset(padded + used, ' ', *length - used);
  padded[*length] = '\0';
  return padded;
}

static qkv_status write_at(const qkv_safetensors_writer *writer, const void *data, size_t bytes, uint64_t offset,
                           qkv_error *error) {
  const uint8_t *next = data;
  while (bytes > 0) {
    ssize_t written = pwrite(writer->fd, next, bytes, (off_t)offset);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return qkv_fail(error, QKV_UNAVAILABLE, "%s: %s", writer->partial, strerror(errno));
    next += written;
    offset += (uint64_t)written;
    bytes -= (size_t)written;
  }
  return QKV_OK;
}

static qkv_status write_header(qkv_safetensors_writer *writer, const qkv_safetensors_tensor *tensors,
                               const qkv_safetensors_entry *metadata, size_t metadata_count, qkv_error *error) {
  size_t length = 0;
  char *text = header_text(writer, tensors, metadata, metadata_count, &length);
  if (text == NULL) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "tensor names and metadata must be distinct UTF-8 texts");
  }
  if (length > QKV_SAFETENSORS_HEADER_MAX) {
    free(text);
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "the header has %zu bytes, at most %u", length,
                    QKV_SAFETENSORS_HEADER_MAX);
  }
  for (size_t i = 0; i < writer->count; i++) {
    writer->parts[i].next += LENGTH_BYTES + length;
    writer->parts[i].end += LENGTH_BYTES + length;
  }
  uint8_t prefix[LENGTH_BYTES];
  for (int i = 0; i < LENGTH_BYTES; i++) prefix[i] = (uint8_t)((uint64_t)length >> 8 * i);
  qkv_status status = write_at(writer, prefix, LENGTH_BYTES, 0, error);
  if (status == QKV_OK) status = write_at(writer, text, length, LENGTH_BYTES, error);
  free(text);
  return status;
}

// A file that is renamed over a device or a pipe would take its place.
static qkv_status check_replaceable(const char *path, qkv_error *error) {
  struct stat there;
  if (stat(path, &there) != 0 || S_ISREG(there.st_mode)) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s is there and not a regular file; give the name of a file", path);
}

qkv_status qkv_safetensors_writer_create(const char *path, const qkv_safetensors_tensor *tensors, size_t count,
                                         const qkv_safetensors_entry *metadata, size_t metadata_count,
                                         qkv_safetensors_writer **writer, qkv_error *error) {
  *writer = NULL;
  QKV_TRY(check_replaceable(path, error));
  qkv_safetensors_writer *made = calloc(1, sizeof(*made));
  if (made == NULL) abort();
  made->count = count;
  made->parts = calloc(count + 1, sizeof(*made->parts));
  made->path = strdup(path);
  if (made->parts == NULL || made->path == NULL || asprintf(&made->partial, "%s.partial", path) < 0) abort();
  made->fd = open(made->partial, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  qkv_status status = QKV_OK;
  if (made->fd < 0) {
    status = qkv_fail(error, QKV_UNAVAILABLE, "%s: %s", made->partial, strerror(errno));
  } else {
    status = write_header(made, tensors, metadata, metadata_count, error);
  }
  if (status != QKV_OK) {
    qkv_safetensors_writer_destroy(&made);
    return status;
  }
  *writer = made;
  return QKV_OK;
}

qkv_status qkv_safetensors_write(qkv_safetensors_writer *writer, size_t index, const void *data, size_t bytes,
                                 qkv_error *error) {
  assert(index < writer->count);
  tensor_part *part = &writer->parts[index];
  if (bytes > part->end - part->next) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "tensor %s: %zu bytes where %" PRIu64 " are missing", part->name,
                    bytes, part->end - part->next);
  }
  QKV_TRY(write_at(writer, data, bytes, part->next, error));
  part->next += bytes;
  return QKV_OK;
}

static qkv_status finish(qkv_safetensors_writer *writer, qkv_error *error) {
  for (size_t i = 0; i < writer->count; i++) {
    const tensor_part *part = &writer->parts[i];
    if (part->next != part->end) {
      return qkv_fail(error, QKV_FAILED_PRECONDITION, "tensor %s: %" PRIu64 " bytes are missing", part->name,
                      part->end - part->next);
    }
  }
  // Some file systems report a write's failure only here.
  int fd = writer->fd;
  writer->fd = -1;
  if (close(fd) != 0 || rename(writer->partial, writer->path) != 0) {
    return qkv_fail(error, QKV_UNAVAILABLE, "%s: %s", writer->path, strerror(errno));
  }
  return QKV_OK;
}

static void release(qkv_safetensors_writer **writer) {
  for (size_t i = 0; i < (*writer)->count; i++) free((*writer)->parts[i].name);
  free((*writer)->parts);
  free((*writer)->path);
  free((*writer)->partial);
  free(*writer);
  *writer = NULL;
}

qkv_status qkv_safetensors_writer_finish(qkv_safetensors_writer **writer, qkv_error *error) {
  qkv_status status = finish(*writer, error);
  if (status == QKV_OK) {
    release(writer);
  } else {
    qkv_safetensors_writer_destroy(writer);
  }
  return status;
}

void qkv_safetensors_writer_destroy(qkv_safetensors_writer **writer) {
  if (*writer == NULL) return;
  if ((*writer)->fd >= 0) close((*writer)->fd);
  unlink((*writer)->partial);
  release(writer);
}
