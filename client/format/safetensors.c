#include "client/format/safetensors.h"

#include <assert.h>
#include <inttypes.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "client/format/mapping.h"

#define LENGTH_BYTES 8  // of the header's length

struct qkv_safetensors {
  json_t *header;                   // owns the names and the metadata
  qkv_safetensors_tensor *tensors;  // by data
  size_t count;
  void *mapping;  // NULL where the memory is the caller's
  size_t mapping_bytes;
};

// ---- the header ----

static qkv_status parse_dims(const json_t *shape, qkv_safetensors_tensor *tensor, qkv_error *error) {
  if (!json_is_array(shape)) return qkv_fail(error, QKV_INVALID_ARGUMENT, "shape is no array");
  size_t rank = json_array_size(shape);
  if (rank > QKV_TENSOR_RANK_MAX) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "shape has %zu dims, at most %d", rank, QKV_TENSOR_RANK_MAX);
  }
  tensor->rank = (int)rank;
  for (size_t i = 0; i < rank; i++) {
    const json_t *dim = json_array_get(shape, i);
    if (!json_is_integer(dim) || json_integer_value(dim) < 0) {
      return qkv_fail(error, QKV_INVALID_ARGUMENT, "shape[%zu] is no integer of at least 0", i);
    }
    tensor->dims[i] = json_integer_value(dim);
  }
  return QKV_OK;
}

static qkv_status parse_dtype(const json_t *dtype, qkv_dtype *out, qkv_error *error) {
  const char *text = json_is_string(dtype) ? json_string_value(dtype) : "";
  if (strcmp(text, "F32") == 0) {
    *out = QKV_FP32;
  } else if (strcmp(text, "F16") == 0) {
    *out = QKV_FP16;
  } else if (strcmp(text, "BF16") == 0) {
    *out = QKV_BF16;
  } else {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "dtype is \"%.32s\", known are F32, F16 and BF16", text);
  }
  return QKV_OK;
}

// Bytes of a dense tensor; unlike qkv_tensor_bytes this takes dims of 0.
static qkv_status tensor_bytes(const qkv_safetensors_tensor *tensor, uint64_t *bytes, qkv_error *error) {
  uint64_t product = qkv_dtype_size(tensor->dtype);
  for (int i = 0; i < tensor->rank; i++) {
    if (__builtin_mul_overflow(product, (uint64_t)tensor->dims[i], &product)) {
      return qkv_fail(error, QKV_INVALID_ARGUMENT, "shape is more than 2^64 bytes");
    }
  }
  *bytes = product;
  return QKV_OK;
}

static qkv_status parse_offsets(const json_t *offsets, const uint8_t *data, uint64_t data_bytes,
                                qkv_safetensors_tensor *tensor, qkv_error *error) {
  const json_t *first = json_array_get(offsets, 0);
  const json_t *last = json_array_get(offsets, 1);
  if (json_array_size(offsets) != 2 || !json_is_integer(first) || !json_is_integer(last)) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "data_offsets are no two integers");
  }
  json_int_t begin = json_integer_value(first);
  json_int_t end = json_integer_value(last);
  if (begin < 0 || begin > end || (uint64_t)end > data_bytes) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT,
                    "data_offsets are [%" JSON_INTEGER_FORMAT ", %" JSON_INTEGER_FORMAT "], the file has %" PRIu64
                    " bytes of data",
                    begin, end, data_bytes);
  }
  uint64_t bytes = 0;
  QKV_TRY(tensor_bytes(tensor, &bytes, error));
  if (bytes != (uint64_t)(end - begin)) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT,
                    "data_offsets hold %" JSON_INTEGER_FORMAT " bytes, the shape needs %" PRIu64, end - begin, bytes);
  }
  tensor->data = data + begin;
  tensor->bytes = (size_t)bytes;
  return QKV_OK;
}

static qkv_status parse_tensor(const json_t *value, const uint8_t *data, uint64_t data_bytes,
                               qkv_safetensors_tensor *tensor, qkv_error *error) {
  if (!json_is_object(value)) return qkv_fail(error, QKV_INVALID_ARGUMENT, "is no object");
  QKV_TRY(parse_dtype(json_object_get(value, "dtype"), &tensor->dtype, error));
  QKV_TRY(parse_dims(json_object_get(value, "shape"), tensor, error));
  return parse_offsets(json_object_get(value, "data_offsets"), data, data_bytes, tensor, error);
}

static qkv_status check_metadata(json_t *metadata, qkv_error *error) {
  if (!json_is_object(metadata)) return qkv_fail(error, QKV_INVALID_ARGUMENT, "__metadata__ is no object");
  const char *key;
  json_t *value;
  json_object_foreach(metadata, key, value) {
    if (!json_is_string(value)) {
      return qkv_fail(error, QKV_INVALID_ARGUMENT, "__metadata__.%.64s is no text", key);
    }
  }
  return QKV_OK;
}

static int by_data(const void *left, const void *right) {
  const qkv_safetensors_tensor *a = left, *b = right;
  if (a->data != b->data) return (const uint8_t *)a->data < (const uint8_t *)b->data ? -1 : 1;
  return a->bytes < b->bytes ? -1 : a->bytes > b->bytes;  // empty ones first
}

// The tensors, in order, cover the data exactly.
static qkv_status check_cover(const qkv_safetensors *file, const uint8_t *data, uint64_t data_bytes,
                              qkv_error *error) {
  const uint8_t *next = data;
  for (size_t i = 0; i < file->count; i++) {
    const qkv_safetensors_tensor *tensor = &file->tensors[i];
    if ((const uint8_t *)tensor->data != next) {
      return qkv_fail(error, QKV_INVALID_ARGUMENT, "tensor %.64s begins at %td where %td is expected: %s",
                      tensor->name, (const uint8_t *)tensor->data - data, next - data,
                      (const uint8_t *)tensor->data < next ? "tensors overlap" : "bytes between tensors");
    }
    next += tensor->bytes;
  }
  if (next != data + data_bytes) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "the tensors end at %td of %" PRIu64 " bytes of data", next - data,
                    data_bytes);
  }
  return QKV_OK;
}

static qkv_status parse_tensors(qkv_safetensors *file, const uint8_t *data, uint64_t data_bytes, qkv_error *error) {
  const char *key;
  json_t *value;
  json_object_foreach(file->header, key, value) {
    if (strcmp(key, "__metadata__") == 0) {
      QKV_TRY(check_metadata(value, error));
      continue;
    }
    qkv_safetensors_tensor *tensor = &file->tensors[file->count];
    tensor->name = key;
    if (parse_tensor(value, data, data_bytes, tensor, error) != QKV_OK) {
      return qkv_error_prefix(error, "tensor %.64s: ", key);
    }
    file->count++;
  }
  qsort(file->tensors, file->count, sizeof(*file->tensors), by_data);
  return check_cover(file, data, data_bytes, error);
}

static qkv_status parse_header(qkv_safetensors *file, const uint8_t *bytes, size_t size, qkv_error *error) {
  if (size < LENGTH_BYTES) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%zu bytes are too short for a safetensors file", size);
  }
  uint64_t length = 0;
  for (int i = LENGTH_BYTES; i-- > 0;) length = length << 8 | bytes[i];
  if (length > QKV_SAFETENSORS_HEADER_MAX) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "the header has %" PRIu64 " bytes, at most %u", length,
                    QKV_SAFETENSORS_HEADER_MAX);
  }
  if (length > size - LENGTH_BYTES) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "the header has %" PRIu64 " bytes, the file ends after %zu", length,
                    size - LENGTH_BYTES);
  }
  json_error_t why;
  file->header = json_loadb((const char *)bytes + LENGTH_BYTES, (size_t)length, JSON_REJECT_DUPLICATES, &why);
  if (file->header == NULL) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "the header is no JSON: %s at byte %d", why.text, why.position);
  }
  if (!json_is_object(file->header)) return qkv_fail(error, QKV_INVALID_ARGUMENT, "the header is no JSON object");
  file->tensors = calloc(json_object_size(file->header) + 1, sizeof(*file->tensors));
  if (file->tensors == NULL) return qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "out of memory");
  return parse_tensors(file, bytes + LENGTH_BYTES + length, size - LENGTH_BYTES - length, error);
}

qkv_status qkv_safetensors_parse(const void *data, size_t bytes, qkv_safetensors **file, qkv_error *error) {
  *file = NULL;
  qkv_error own = {0};
  if (error == NULL) error = &own;
  qkv_safetensors *parsed = calloc(1, sizeof(*parsed));
  if (parsed == NULL) return qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "out of memory");
  qkv_status status = parse_header(parsed, data, bytes, error);
  if (status != QKV_OK) {
    qkv_safetensors_close(&parsed);
    return status;
  }
  *file = parsed;
  return QKV_OK;
}

// ---- the file ----

qkv_status qkv_safetensors_open(const char *path, qkv_safetensors **file, qkv_error *error) {
  *file = NULL;
  qkv_error own = {0};
  if (error == NULL) error = &own;
  void *mapping = NULL;
  size_t bytes = 0;
  QKV_TRY(qkv_format_map(path, &mapping, &bytes, error));
  if (qkv_safetensors_parse(mapping, bytes, file, error) != QKV_OK) {
    munmap(mapping, bytes);
    return qkv_error_prefix(error, "%s: ", path);
  }
  assert(*file != NULL);
  (*file)->mapping = mapping;
  (*file)->mapping_bytes = bytes;
  return QKV_OK;
}

void qkv_safetensors_close(qkv_safetensors **file) {
  if (*file == NULL) return;
  json_decref((*file)->header);
  free((*file)->tensors);
  if ((*file)->mapping != NULL) munmap((*file)->mapping, (*file)->mapping_bytes);
  free(*file);
  *file = NULL;
}

size_t qkv_safetensors_count(const qkv_safetensors *file) {
  return file->count;
}

const qkv_safetensors_tensor *qkv_safetensors_at(const qkv_safetensors *file, size_t index) {
  assert(index < file->count);
  return &file->tensors[index];
}

const qkv_safetensors_tensor *qkv_safetensors_find(const qkv_safetensors *file, const char *name) {
  for (size_t i = 0; i < file->count; i++) {
    if (strcmp(file->tensors[i].name, name) == 0) return &file->tensors[i];
  }
  return NULL;
}

const char *qkv_safetensors_metadata(const qkv_safetensors *file, const char *key) {
  return json_string_value(json_object_get(json_object_get(file->header, "__metadata__"), key));
}
