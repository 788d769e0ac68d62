#include "client/format/gguf.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "client/format/mapping.h"

enum { VERSION_MIN = 2, VERSION_MAX = 3, ALIGNMENT_DEFAULT = 32, ALIGNMENT_MAX = 1 << 16, SHOWN = 64 };

// One entry of the metadata.
typedef struct entry {
  qkv_gguf_text key;
  qkv_gguf_kind kind;  // of the value, or of an array's elements
  bool array;
  uint64_t count;       // of an array's elements; 1 else
  const uint8_t *data;  // of the value or the first element
} entry;

struct qkv_gguf {
  entry *entries;
  size_t entry_count;
  qkv_gguf_tensor *tensors;
  size_t tensor_count;
  void *mapping;  // NULL where the memory is the caller's
  size_t mapping_bytes;
};

// Where reading is.
typedef struct reader {
  const uint8_t *begin, *next, *end;
  qkv_error *error;
} reader;

// ---- bytes ----

// `bytes` at `next`, which is then behind them; NULL where the file ends before.
static const uint8_t *take(reader *in, uint64_t bytes) {
  if (bytes > (uint64_t)(in->end - in->next)) return NULL;
  const uint8_t *at = in->next;
  in->next += bytes;
  return at;
}

static qkv_status ends(const reader *in, const char *what) {
  return qkv_fail(in->error, QKV_INVALID_ARGUMENT, "the file ends in %s, at byte %td", what, in->next - in->begin);
}

static qkv_status take_u32(reader *in, const char *what, uint32_t *value) {
  const uint8_t *at = take(in, sizeof *value);
  if (at == NULL) return ends(in, what);
  memcpy(value, at, sizeof *value);
  return QKV_OK;
}

static qkv_status take_u64(reader *in, const char *what, uint64_t *value) {
  const uint8_t *at = take(in, sizeof *value);
  if (at == NULL) return ends(in, what);
  memcpy(value, at, sizeof *value);
  return QKV_OK;
}

static qkv_status take_text(reader *in, const char *what, qkv_gguf_text *text) {
  uint64_t bytes = 0;
  QKV_TRY(take_u64(in, what, &bytes));
  const uint8_t *at = take(in, bytes);
  if (at == NULL) return ends(in, what);
  *text = (qkv_gguf_text){(const char *)at, (size_t)bytes};
  return QKV_OK;
}

static int shown(qkv_gguf_text text) {
  return (int)(text.bytes < SHOWN ? text.bytes : SHOWN);
}

bool qkv_gguf_text_is(qkv_gguf_text text, const char *expected) {
  return text.bytes == strlen(expected) && memcmp(text.data, expected, text.bytes) == 0;
}

static bool same(qkv_gguf_text a, qkv_gguf_text b) {
  return a.bytes == b.bytes && memcmp(a.data, b.data, a.bytes) == 0;
}

// ---- metadata ----

// Of a value; 0 for a text, an array and what is none.
static size_t kind_bytes(uint32_t kind) {
  static const uint8_t bytes[] = {
      [QKV_GGUF_UINT8] = 1,   [QKV_GGUF_INT8] = 1,  [QKV_GGUF_UINT16] = 2, [QKV_GGUF_INT16] = 2,
      [QKV_GGUF_UINT32] = 4,  [QKV_GGUF_INT32] = 4, [QKV_GGUF_BOOL] = 1,   [QKV_GGUF_FLOAT32] = 4,
      [QKV_GGUF_STRING] = 0,  [QKV_GGUF_ARRAY] = 0, [QKV_GGUF_UINT64] = 8, [QKV_GGUF_INT64] = 8,
      [QKV_GGUF_FLOAT64] = 8,
  };
  return kind < sizeof bytes ? bytes[kind] : 0;
}

static qkv_status take_values(reader *in, entry *found) {
  found->data = in->next;
  if (found->kind == QKV_GGUF_STRING) {
    qkv_gguf_text text;
    // Each takes 8 bytes at least, so that the count is bounded by the file.
    for (uint64_t i = 0; i < found->count; i++) QKV_TRY(take_text(in, "a text", &text));
    return QKV_OK;
  }
  const size_t each = kind_bytes(found->kind);
  if (each == 0)
    return qkv_fail(in->error, QKV_INVALID_ARGUMENT, "values of type %d are not known", (int)found->kind);
  if (found->count > (uint64_t)(in->end - in->next) / each) return ends(in, "an array");
  take(in, found->count * each);
  return QKV_OK;
}

static qkv_status take_value(reader *in, entry *found) {
  uint32_t kind = 0;
  QKV_TRY(take_u32(in, "a value's type", &kind));
  found->count = 1;
  found->array = kind == QKV_GGUF_ARRAY;
  if (found->array) {
    QKV_TRY(take_u32(in, "an array's type", &kind));
    QKV_TRY(take_u64(in, "an array's count", &found->count));
  }
  if (kind > QKV_GGUF_FLOAT64 || kind == QKV_GGUF_ARRAY) {
    return qkv_fail(in->error, QKV_INVALID_ARGUMENT, "%s of type %" PRIu32 " are not known",
                    found->array ? "arrays" : "values", kind);
  }
  found->kind = (qkv_gguf_kind)kind;
  return take_values(in, found);
}

static const entry *find_entry(const qkv_gguf *file, qkv_gguf_text key) {
  for (size_t i = 0; i < file->entry_count; i++) {
    if (same(file->entries[i].key, key)) return &file->entries[i];
  }
  return NULL;
}

static qkv_status take_entry(reader *in, qkv_gguf *file) {
  entry *found = &file->entries[file->entry_count];
  QKV_TRY(take_text(in, "a key", &found->key));
  if (found->key.bytes == 0 || found->key.bytes > QKV_GGUF_KEY_MAX) {
    return qkv_fail(in->error, QKV_INVALID_ARGUMENT, "a key has %zu bytes, allowed are 1 to %d", found->key.bytes,
                    QKV_GGUF_KEY_MAX);
  }
  if (find_entry(file, found->key) != NULL) {
    return qkv_fail(in->error, QKV_INVALID_ARGUMENT, "there are two entries %.*s", shown(found->key),
                    found->key.data);
  }
  if (take_value(in, found) != QKV_OK) {
    return qkv_error_prefix(in->error, "%.*s: ", shown(found->key), found->key.data);
  }
  file->entry_count++;
  return QKV_OK;
}

// ---- tensors ----

static qkv_status take_dims(reader *in, qkv_gguf_tensor *tensor) {
  uint32_t rank = 0;
  QKV_TRY(take_u32(in, "a rank", &rank));
  if (rank < 1 || rank > QKV_GGUF_RANK_MAX) {
    return qkv_fail(in->error, QKV_INVALID_ARGUMENT, "the rank is %" PRIu32 ", allowed are 1 to %d", rank,
                    QKV_GGUF_RANK_MAX);
  }
  tensor->rank = (int)rank;
  tensor->count = 1;
  for (int i = 0; i < QKV_GGUF_RANK_MAX; i++) {
    uint64_t dim = 1;
    if (i < tensor->rank) QKV_TRY(take_u64(in, "a dim", &dim));
    if (dim < 1 || dim > INT64_MAX || __builtin_mul_overflow(tensor->count, (int64_t)dim, &tensor->count)) {
      return qkv_fail(in->error, QKV_INVALID_ARGUMENT, "dims[%d] is %" PRIu64 ": there are 1 to 2^63 elements", i,
                      dim);
    }
    tensor->dims[i] = (int64_t)dim;
  }
  return QKV_OK;
}

static qkv_status tensor_bytes(reader *in, qkv_gguf_tensor *tensor) {
  size_t elements = 0, bytes = 0;
  if (!qkv_gguf_type_block(tensor->type, &elements, &bytes)) {
    return qkv_fail(in->error, QKV_INVALID_ARGUMENT,
                    "its type is %" PRIu32 ", known are 0 (F32), 1 (F16), 2 (Q4_0), 3 (Q4_1), 8 (Q8_0) and 30 (BF16)",
                    tensor->type);
  }
  if (tensor->dims[0] % (int64_t)elements != 0) {
    return qkv_fail(in->error, QKV_INVALID_ARGUMENT,
                    "dims[0] is %" PRId64 ", no multiple of the %zu of a block of %s", tensor->dims[0], elements,
                    qkv_gguf_type_name(tensor->type));
  }
  if (__builtin_mul_overflow((size_t)tensor->count / elements, bytes, &tensor->bytes)) {
    return qkv_fail(in->error, QKV_INVALID_ARGUMENT, "it has more than 2^64 bytes");
  }
  return QKV_OK;
}

static bool has_tensor(const qkv_gguf *file, qkv_gguf_text name) {
  for (size_t i = 0; i < file->tensor_count; i++) {
    if (same(file->tensors[i].name, name)) return true;
  }
  return false;
}

// Everything but where the data is, which is known only behind the last of them: offsets[tensor_count].
static qkv_status take_tensor(reader *in, qkv_gguf *file, uint64_t *offsets) {
  qkv_gguf_tensor *tensor = &file->tensors[file->tensor_count];
  QKV_TRY(take_text(in, "a tensor's name", &tensor->name));
  if (tensor->name.bytes == 0 || tensor->name.bytes > QKV_GGUF_NAME_MAX) {
    return qkv_fail(in->error, QKV_INVALID_ARGUMENT, "a tensor's name has %zu bytes, allowed are 1 to %d",
                    tensor->name.bytes, QKV_GGUF_NAME_MAX);
  }
  if (has_tensor(file, tensor->name)) {
    return qkv_fail(in->error, QKV_INVALID_ARGUMENT, "there are two tensors %.*s", shown(tensor->name),
                    tensor->name.data);
  }
  qkv_status status = take_dims(in, tensor);
  if (status == QKV_OK) status = take_u32(in, "a tensor's type", &tensor->type);
  if (status == QKV_OK) status = take_u64(in, "a tensor's offset", &offsets[file->tensor_count]);
  if (status == QKV_OK) status = tensor_bytes(in, tensor);
  if (status != QKV_OK) {
    return qkv_error_prefix(in->error, "tensor %.*s: ", shown(tensor->name), tensor->name.data);
  }
  file->tensor_count++;
  return QKV_OK;
}

static qkv_status place_tensors(const reader *in, qkv_gguf *file, const uint64_t *offsets) {
  int64_t alignment = ALIGNMENT_DEFAULT;
  if (qkv_gguf_has(file, "general.alignment")) {
    QKV_TRY(qkv_gguf_integer(file, "general.alignment", 1, ALIGNMENT_MAX, &alignment, in->error));
  }
  if ((alignment & (alignment - 1)) != 0) {
    return qkv_fail(in->error, QKV_INVALID_ARGUMENT, "general.alignment is %" PRId64 ", no power of two", alignment);
  }
  const uint64_t size = (uint64_t)(in->end - in->begin), behind = (uint64_t)(in->next - in->begin);
  const uint64_t data = (behind + (uint64_t)alignment - 1) / (uint64_t)alignment * (uint64_t)alignment;
  for (size_t i = 0; i < file->tensor_count; i++) {
    qkv_gguf_tensor *tensor = &file->tensors[i];
    const uint64_t held = data <= size ? size - data : 0;
    if (offsets[i] % (uint64_t)alignment != 0 || offsets[i] > held || tensor->bytes > held - offsets[i]) {
      return qkv_fail(in->error, QKV_INVALID_ARGUMENT,
                      "tensor %.*s: its offset is %" PRIu64 " and it has %zu bytes; the file has %" PRIu64
                      " bytes of data, aligned to %" PRId64,
                      shown(tensor->name), tensor->name.data, offsets[i], tensor->bytes, held, alignment);
    }
    tensor->data = in->begin + data + offsets[i];
  }
  return QKV_OK;
}

// ---- the file ----

static qkv_status take_count(reader *in, const char *what, uint64_t max, uint64_t *count) {
  QKV_TRY(take_u64(in, "the header", count));
  if (*count <= max) return QKV_OK;
  return qkv_fail(in->error, QKV_INVALID_ARGUMENT, "there are %" PRIu64 " %s, at most %" PRIu64, *count, what, max);
}

static qkv_status read_all(reader *in, qkv_gguf *file) {
  const uint8_t *magic = take(in, 4);
  if (magic == NULL || memcmp(magic, "GGUF", 4) != 0) {
    return qkv_fail(in->error, QKV_INVALID_ARGUMENT, "it is no GGUF file: it does not begin with \"GGUF\"");
  }
  uint32_t version = 0;
  QKV_TRY(take_u32(in, "the header", &version));
  if (version < VERSION_MIN || version > VERSION_MAX) {
    return qkv_fail(in->error, QKV_INVALID_ARGUMENT, "its version is %" PRIu32 ", known are %d and %d", version,
                    VERSION_MIN, VERSION_MAX);
  }
  uint64_t tensors = 0, entries = 0;
  QKV_TRY(take_count(in, "tensors", QKV_GGUF_TENSORS_MAX, &tensors));
  QKV_TRY(take_count(in, "entries", QKV_GGUF_ENTRIES_MAX, &entries));
  file->entries = calloc((size_t)entries + 1, sizeof *file->entries);
  file->tensors = calloc((size_t)tensors + 1, sizeof *file->tensors);
  uint64_t *offsets = calloc((size_t)tensors + 1, sizeof *offsets);
  if (file->entries == NULL || file->tensors == NULL || offsets == NULL) {
    free(offsets);
    return qkv_fail(in->error, QKV_RESOURCE_EXHAUSTED, "out of memory");
  }
  qkv_status status = QKV_OK;
  for (uint64_t i = 0; status == QKV_OK && i < entries; i++) status = take_entry(in, file);
  for (uint64_t i = 0; status == QKV_OK && i < tensors; i++) status = take_tensor(in, file, offsets);
  if (status == QKV_OK) status = place_tensors(in, file, offsets);
  free(offsets);
  return status;
}

qkv_status qkv_gguf_parse(const void *data, size_t bytes, qkv_gguf **file, qkv_error *error) {
  *file = NULL;
  qkv_error own = {0};
  qkv_gguf *parsed = calloc(1, sizeof *parsed);
  if (parsed == NULL) return qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "out of memory");
  reader in = {data, data, (const uint8_t *)data + bytes, error != NULL ? error : &own};
  const qkv_status status = read_all(&in, parsed);
  if (status != QKV_OK) {
    qkv_gguf_close(&parsed);
    return status;
  }
  *file = parsed;
  return QKV_OK;
}

qkv_status qkv_gguf_open(const char *path, qkv_gguf **file, qkv_error *error) {
  *file = NULL;
  qkv_error own = {0};
  if (error == NULL) error = &own;
  void *mapping = NULL;
  size_t bytes = 0;
  QKV_TRY(qkv_format_map(path, &mapping, &bytes, error));
  if (qkv_gguf_parse(mapping, bytes, file, error) != QKV_OK) {
    munmap(mapping, bytes);
    return qkv_error_prefix(error, "%s: ", path);
  }
  assert(*file != NULL);
  (*file)->mapping = mapping;
  (*file)->mapping_bytes = bytes;
  return QKV_OK;
}

void qkv_gguf_close(qkv_gguf **file) {
  if (*file == NULL) return;
  free((*file)->entries);
  free((*file)->tensors);
  if ((*file)->mapping != NULL) munmap((*file)->mapping, (*file)->mapping_bytes);
  free(*file);
  *file = NULL;
}

// ---- what it holds ----

static const entry *find_key(const qkv_gguf *file, const char *key) {
  return find_entry(file, (qkv_gguf_text){key, strlen(key)});
}

bool qkv_gguf_has(const qkv_gguf *file, const char *key) {
  return find_key(file, key) != NULL;
}

static qkv_status want(const qkv_gguf *file, const char *key, const entry **found, qkv_error *error) {
  *found = find_key(file, key);
  return *found != NULL ? QKV_OK : qkv_fail(error, QKV_NOT_FOUND, "%s is missing", key);
}

// A scalar integer's value; false where it is none, or beyond int64_t.
static bool integer_of(const entry *found, int64_t *value) {
  if (found->array) return false;
  uint64_t raw = 0;
  memcpy(&raw, found->data, kind_bytes(found->kind));
  *value = (int64_t)raw;
  switch (found->kind) {
    case QKV_GGUF_UINT8:
    case QKV_GGUF_UINT16:
    case QKV_GGUF_UINT32:
    case QKV_GGUF_INT64:
      return true;
    case QKV_GGUF_BOOL:
      return raw <= 1;
    case QKV_GGUF_UINT64:
      return raw <= INT64_MAX;
    case QKV_GGUF_INT8:
      *value = (int64_t)((raw ^ 0x80) - 0x80);
      return true;
    case QKV_GGUF_INT16:
      *value = (int16_t)raw;
      return true;
    case QKV_GGUF_INT32:
      *value = (int32_t)raw;
      return true;
    default:
      return false;
  }
}

qkv_status qkv_gguf_integer(const qkv_gguf *file, const char *key, int64_t min, int64_t max, int64_t *value,
                            qkv_error *error) {
  const entry *found = NULL;
  QKV_TRY(want(file, key, &found, error));
  if (!integer_of(found, value)) return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s is no integer", key);
  if (*value >= min && *value <= max) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s is %" PRId64 ", allowed are %" PRId64 " to %" PRId64, key, *value,
                  min, max);
}

qkv_status qkv_gguf_number(const qkv_gguf *file, const char *key, double *value, qkv_error *error) {
  const entry *found = NULL;
  QKV_TRY(want(file, key, &found, error));
  float narrow = NAN;
  *value = NAN;
  if (!found->array && found->kind == QKV_GGUF_FLOAT32) {
    memcpy(&narrow, found->data, sizeof narrow);
    *value = (double)narrow;
  } else if (!found->array && found->kind == QKV_GGUF_FLOAT64) {
    memcpy(value, found->data, sizeof *value);
  }
  return isfinite(*value) ? QKV_OK : qkv_fail(error, QKV_INVALID_ARGUMENT, "%s is no finite number", key);
}

static qkv_gguf_text text_at(const uint8_t *at) {
  uint64_t bytes = 0;
  memcpy(&bytes, at, sizeof bytes);
  return (qkv_gguf_text){(const char *)at + sizeof bytes, (size_t)bytes};
}

qkv_status qkv_gguf_string(const qkv_gguf *file, const char *key, qkv_gguf_text *value, qkv_error *error) {
  const entry *found = NULL;
  QKV_TRY(want(file, key, &found, error));
  if (found->array || found->kind != QKV_GGUF_STRING) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s is no text", key);
  }
  *value = text_at(found->data);
  return QKV_OK;
}

qkv_status qkv_gguf_array_of(const qkv_gguf *file, const char *key, qkv_gguf_kind kind, qkv_gguf_array *array,
                             qkv_error *error) {
  const entry *found = NULL;
  QKV_TRY(want(file, key, &found, error));
  if (!found->array || found->kind != kind) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s is no array of type %d", key, (int)kind);
  }
  *array = (qkv_gguf_array){kind, found->count, found->data};
  return QKV_OK;
}

qkv_gguf_text qkv_gguf_next_string(qkv_gguf_array *array) {
  assert(array->kind == QKV_GGUF_STRING && array->left > 0);
  const qkv_gguf_text text = text_at(array->next);
  array->next += sizeof(uint64_t) + text.bytes;
  array->left--;
  return text;
}

int32_t qkv_gguf_next_int32(qkv_gguf_array *array) {
  assert(array->kind == QKV_GGUF_INT32 && array->left > 0);
  int32_t value;
  memcpy(&value, array->next, sizeof value);
  array->next += sizeof value;
  array->left--;
  return value;
}

size_t qkv_gguf_tensors(const qkv_gguf *file) {
  return file->tensor_count;
}

const qkv_gguf_tensor *qkv_gguf_tensor_at(const qkv_gguf *file, size_t index) {
  assert(index < file->tensor_count);
  return &file->tensors[index];
}

const qkv_gguf_tensor *qkv_gguf_tensor_find(const qkv_gguf *file, const char *name) {
  for (size_t i = 0; i < file->tensor_count; i++) {
    if (qkv_gguf_text_is(file->tensors[i].name, name)) return &file->tensors[i];
  }
  return NULL;
}
