#include "client/cli/output.h"

#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "client/format/npy.h"

// A .npy file. It is open from its first byte to its last, so that few are at once.
typedef struct npy_part {
  char *path;
  qkv_dtype dtype;
  int rank;
  int64_t dims[QKV_TENSOR_RANK_MAX];
  FILE *file;
  size_t missing;  // bytes
} npy_part;

struct qkvctl_output {
  qkv_safetensors_writer *safetensors;  // NULL: npy
  char *path, *partial;                 // the directory's name, and until it is whole
  npy_part *parts;
  size_t count;
};

static npy_part make_part(const char *directory, const qkv_safetensors_tensor *tensor) {
  npy_part part = {.dtype = tensor->dtype, .rank = tensor->rank, .missing = qkv_dtype_size(tensor->dtype)};
  int length = asprintf(&part.path, "%s/%s.npy", directory, tensor->name);
  assert(length > 0);
  for (int i = 0; i < tensor->rank; i++) {
    part.dims[i] = tensor->dims[i];
    part.missing *= (size_t)tensor->dims[i];
  }
  return part;
}

// What a fetch that was killed has left is not this one's.
static bool remove_leftovers(const char *directory) {
  DIR *list = opendir(directory);
  if (list == NULL) return false;
  for (const struct dirent *entry; (entry = readdir(list)) != NULL;) {
    const size_t length = strlen(entry->d_name);
    if (length > 4 && strcmp(entry->d_name + length - 4, ".npy") == 0) (void)unlinkat(dirfd(list), entry->d_name, 0);
  }
  (void)closedir(list);
  return rmdir(directory) == 0;
}

static qkv_status create_directory(qkvctl_output *output, const char *path, const qkv_safetensors_tensor *tensors,
                                   size_t count, qkv_error *error) {
  output->path = strdup(path);
  int length = asprintf(&output->partial, "%s.partial", path);
  output->parts = calloc(count + 1, sizeof *output->parts);
  assert(output->path != NULL && length > 0 && output->parts != NULL);
  if (access(path, F_OK) == 0) {
    return qkv_fail(error, QKV_ALREADY_EXISTS, "%s is there already; choose another directory", path);
  }
  int reason = mkdir(output->partial, 0777) == 0 ? 0 : errno;
  if (reason == EEXIST && remove_leftovers(output->partial)) reason = mkdir(output->partial, 0777) == 0 ? 0 : errno;
  if (reason != 0) {
    return qkv_fail(error, QKV_UNAVAILABLE, "%s: %s", output->partial, strerror(reason));
  }
  for (; output->count < count; output->count++) {
    output->parts[output->count] = make_part(output->partial, &tensors[output->count]);
  }
  return QKV_OK;
}

qkv_status qkvctl_output_create(const char *path, bool npy, const qkv_safetensors_tensor *tensors, size_t count,
                                const qkv_safetensors_entry *metadata, size_t metadata_count, qkvctl_output **output,
                                qkv_error *error) {
  *output = calloc(1, sizeof **output);
  assert(*output != NULL);
  qkv_status status = npy ? create_directory(*output, path, tensors, count, error)
                          : qkv_safetensors_writer_create(path, tensors, count, metadata, metadata_count,
                                                          &(*output)->safetensors, error);
  if (status != QKV_OK) qkvctl_output_destroy(output);
  return status;
}

static qkv_status close_part(npy_part *part, qkv_error *error) {
  FILE *file = part->file;
  part->file = NULL;
  if (fclose(file) == 0) return QKV_OK;
  return qkv_fail(error, QKV_UNAVAILABLE, "%s: %s", part->path, strerror(errno));
}

static qkv_status write_part(npy_part *part, const void *data, size_t bytes, qkv_error *error) {
  if (bytes > part->missing) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s: %zu bytes where %zu are missing", part->path, bytes,
                    part->missing);
  }
  if (part->file == NULL) {
    QKV_TRY(qkv_npy_create(part->path, part->dtype, part->rank, part->dims, &part->file, error));
  }
  if (fwrite(data, 1, bytes, part->file) != bytes) {
    return qkv_fail(error, QKV_UNAVAILABLE, "%s: %s", part->path, strerror(errno));
  }
  part->missing -= bytes;
  return part->missing == 0 ? close_part(part, error) : QKV_OK;
}

qkv_status qkvctl_output_write(qkvctl_output *output, size_t index, const void *data, size_t bytes,
                               qkv_error *error) {
  if (output->safetensors != NULL) return qkv_safetensors_write(output->safetensors, index, data, bytes, error);
  assert(index < output->count);
  return bytes == 0 ? QKV_OK : write_part(&output->parts[index], data, bytes, error);
}

static qkv_status finish_directory(const qkvctl_output *output, qkv_error *error) {
  for (size_t i = 0; i < output->count; i++) {
    if (output->parts[i].missing == 0) continue;
    return qkv_fail(error, QKV_FAILED_PRECONDITION, "%s: %zu bytes are missing", output->parts[i].path,
                    output->parts[i].missing);
  }
  if (rename(output->partial, output->path) == 0) return QKV_OK;
  return qkv_fail(error, QKV_UNAVAILABLE, "%s: %s", output->path, strerror(errno));
}

static void release(qkvctl_output **output) {
  for (size_t i = 0; i < (*output)->count; i++) free((*output)->parts[i].path);
  free((*output)->parts);
  free((*output)->path);
  free((*output)->partial);
  free(*output);
  *output = NULL;
}

qkv_status qkvctl_output_finish(qkvctl_output **output, qkv_error *error) {
  bool npy = (*output)->safetensors == NULL;
  qkv_status status =
      npy ? finish_directory(*output, error) : qkv_safetensors_writer_finish(&(*output)->safetensors, error);
  if (status == QKV_OK || !npy) {
    release(output);
  } else {
    qkvctl_output_destroy(output);
  }
  return status;
}

void qkvctl_output_destroy(qkvctl_output **output) {
  if (*output == NULL) return;
  qkv_safetensors_writer_destroy(&(*output)->safetensors);
  for (size_t i = 0; i < (*output)->count; i++) {
    if ((*output)->parts[i].file != NULL) (void)fclose((*output)->parts[i].file);
    unlink((*output)->parts[i].path);
  }
  if ((*output)->count > 0) rmdir((*output)->partial);
  release(output);
}
