#include "client/format/dump.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "client/format/safetensors.h"

enum { KINDS = QKV_DUMP_Q + 1 };

typedef struct dump_layer {
  uint32_t number;
  const qkv_safetensors_tensor *tensors[KINDS];  // that of queries may be NULL
} dump_layer;

struct qkv_dump {
  qkv_safetensors *file;
  dump_layer *layers;
  size_t count;
  uint64_t first_position;
  bool heads_first, before_rope;
};

// "layers.12.k" gives 12 and QKV_DUMP_K.
static bool parse_name(const char *name, uint32_t *number, int *kind) {
  static const char prefix[] = "layers.";
  const char *digits = name + sizeof prefix - 1;
  if (strncmp(name, prefix, sizeof prefix - 1) != 0 || digits[0] < '0' || digits[0] > '9') return false;
  char *end = NULL;
  const unsigned long value = strtoul(digits, &end, 10);
  if (value >= QKV_DUMP_LAYERS_MAX || end[0] != '.' || end[1] == '\0' || end[2] != '\0') return false;
  const char *found = strchr("kvq", end[1]);
  if (found == NULL) return false;
  *number = (uint32_t)value;
  *kind = (int)(found - "kvq");
  return true;
}

static dump_layer *find_layer(qkv_dump *dump, uint32_t number) {
  for (size_t i = 0; i < dump->count; i++) {
    if (dump->layers[i].number == number) return &dump->layers[i];
  }
  dump->layers[dump->count] = (dump_layer){.number = number};
  return &dump->layers[dump->count++];
}

static int64_t tokens_of(const qkv_dump *dump, const qkv_safetensors_tensor *tensor) {
  return tensor->dims[dump->heads_first ? 1 : 0];
}

static int64_t heads_of(const qkv_dump *dump, const qkv_safetensors_tensor *tensor) {
  return tensor->dims[dump->heads_first ? 0 : 1];
}

static qkv_status check_layer(const qkv_dump *dump, const dump_layer *layer, qkv_error *error) {
  const dump_layer *first = &dump->layers[0];
  for (int kind = QKV_DUMP_K; kind < KINDS; kind++) {
    const qkv_safetensors_tensor *tensor = layer->tensors[kind], *other = first->tensors[kind];
    if (tensor == NULL && kind != QKV_DUMP_Q) {
      return qkv_fail(error, QKV_INVALID_ARGUMENT, "layers.%" PRIu32 ".%c is missing", layer->number, "kvq"[kind]);
    }
    if ((tensor == NULL) != (other == NULL)) {
      return qkv_fail(error, QKV_INVALID_ARGUMENT,
                      "layers.%" PRIu32 " and layers.%" PRIu32 " do not both have queries", first->number,
                      layer->number);
    }
    if (tensor == NULL) continue;
    if (tensor->rank != 3 || tensor->dims[0] < 1 || tensor->dims[1] < 1 || tensor->dims[2] < 1) {
      return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s must have 3 dims, none of them 0", tensor->name);
    }
    if (heads_of(dump, tensor) > UINT32_MAX || tensor->dims[2] > UINT32_MAX) {
      return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s has %" PRId64 " heads of %" PRId64, tensor->name,
                      heads_of(dump, tensor), tensor->dims[2]);
    }
    if (heads_of(dump, tensor) != heads_of(dump, other) || tensor->dims[2] != other->dims[2]) {
      return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s has other heads or another width than %s", tensor->name,
                      other->name);
    }
  }
  return QKV_OK;
}

static qkv_status check_pair(const qkv_dump *dump, const dump_layer *layer, qkv_error *error) {
  const qkv_safetensors_tensor *k = layer->tensors[QKV_DUMP_K], *v = layer->tensors[QKV_DUMP_V],
                               *q = layer->tensors[QKV_DUMP_Q];
  assert(k != NULL && v != NULL);  // check_layer has seen them
  if (tokens_of(dump, k) != tokens_of(dump, v) || heads_of(dump, k) != heads_of(dump, v)) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s and %s have other tokens or heads", k->name, v->name);
  }
  if (q == NULL) return QKV_OK;
  if (tokens_of(dump, q) > tokens_of(dump, k) || q->dims[2] != k->dims[2] ||
      heads_of(dump, q) % heads_of(dump, k) != 0) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s does not go with %s: more tokens, or other heads or widths",
                    q->name, k->name);
  }
  return QKV_OK;
}

static qkv_status read_choice(const qkv_dump *dump, const char *key, const char *first, const char *second,
                              bool *is_second, qkv_error *error) {
  const char *word = qkv_safetensors_metadata(dump->file, key);
  *is_second = word != NULL && strcmp(word, second) == 0;
  if (word == NULL || *is_second || strcmp(word, first) == 0) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "its %s is \"%.32s\", allowed are %s and %s", key, word, first,
                  second);
}

static qkv_status read_metadata(qkv_dump *dump, qkv_error *error) {
  const char *position = qkv_safetensors_metadata(dump->file, "first_position");
  if (position != NULL) {
    char *end = NULL;
    dump->first_position = strtoull(position, &end, 10);
    if (position[0] < '0' || position[0] > '9' || *end != '\0' || dump->first_position > INT64_MAX / 2) {
      return qkv_fail(error, QKV_INVALID_ARGUMENT, "its first_position is \"%.32s\"", position);
    }
  }
  QKV_TRY(read_choice(dump, "layout", "tokens_first", "heads_first", &dump->heads_first, error));
  return read_choice(dump, "rope", "after", "before", &dump->before_rope, error);
}

static qkv_status read_layers(qkv_dump *dump, qkv_error *error) {
  const size_t count = qkv_safetensors_count(dump->file);
  if (count == 0) return qkv_fail(error, QKV_INVALID_ARGUMENT, "it holds no tensors");
  dump->layers = calloc(count, sizeof *dump->layers);
  if (dump->layers == NULL) abort();
  for (size_t i = 0; i < count; i++) {
    const qkv_safetensors_tensor *tensor = qkv_safetensors_at(dump->file, i);
    uint32_t number = 0;
    int kind = QKV_DUMP_K;
    if (!parse_name(tensor->name, &number, &kind)) {
      return qkv_fail(error, QKV_INVALID_ARGUMENT, "it holds \"%.64s\"; known are layers.N.k, layers.N.v, layers.N.q",
                      tensor->name);
    }
    const qkv_safetensors_tensor **place = &find_layer(dump, number)->tensors[kind];
    if (*place != NULL)  // "layers.01.k"
      return qkv_fail(error, QKV_INVALID_ARGUMENT, "it holds %.64s and %.64s", (*place)->name, tensor->name);
    *place = tensor;
  }
  for (size_t i = 0; i < dump->count; i++) {
    QKV_TRY(check_layer(dump, &dump->layers[i], error));
    QKV_TRY(check_pair(dump, &dump->layers[i], error));
  }
  return QKV_OK;
}

qkv_status qkv_dump_open(const char *path, qkv_dump **dump, qkv_error *error) {
  qkv_dump *opened = calloc(1, sizeof *opened);
  if (opened == NULL) abort();
  *dump = NULL;
  qkv_status status = qkv_safetensors_open(path, &opened->file, error);
  if (status == QKV_OK) {
    status = read_metadata(opened, error);
    if (status == QKV_OK) status = read_layers(opened, error);
    if (status != QKV_OK) qkv_error_prefix(error, "%s: ", path);
  }
  if (status != QKV_OK) {
    qkv_dump_close(&opened);
    return status;
  }
  *dump = opened;
  return QKV_OK;
}

void qkv_dump_close(qkv_dump **dump) {
  if (*dump == NULL) return;
  qkv_safetensors_close(&(*dump)->file);
  free((*dump)->layers);
  free(*dump);
  *dump = NULL;
}

size_t qkv_dump_layers(const qkv_dump *dump) {
  return dump->count;
}

bool qkv_dump_has_queries(const qkv_dump *dump) {
  return dump->layers[0].tensors[QKV_DUMP_Q] != NULL;
}

bool qkv_dump_before_rope(const qkv_dump *dump) {
  return dump->before_rope;
}

uint64_t qkv_dump_first_position(const qkv_dump *dump) {
  return dump->first_position;
}

uint32_t qkv_dump_heads(const qkv_dump *dump, qkv_dump_kind kind) {
  const qkv_safetensors_tensor *tensor = dump->layers[0].tensors[kind];
  return tensor != NULL ? (uint32_t)heads_of(dump, tensor) : 0;
}

uint32_t qkv_dump_width(const qkv_dump *dump, qkv_dump_kind kind) {
  const qkv_safetensors_tensor *tensor = dump->layers[0].tensors[kind];
  return tensor != NULL ? (uint32_t)tensor->dims[2] : 0;
}

uint32_t qkv_dump_number(const qkv_dump *dump, size_t index) {
  assert(index < dump->count);
  return dump->layers[index].number;
}

uint64_t qkv_dump_tokens(const qkv_dump *dump, size_t index, qkv_dump_kind kind) {
  assert(index < dump->count);
  const qkv_safetensors_tensor *tensor = dump->layers[index].tensors[kind];
  return tensor != NULL ? (uint64_t)tokens_of(dump, tensor) : 0;
}

void qkv_dump_read(const qkv_dump *dump, size_t index, qkv_dump_kind kind, uint64_t first, uint64_t tokens,
                   float *out) {
  assert(first + tokens <= qkv_dump_tokens(dump, index, kind));
  const qkv_safetensors_tensor *tensor = dump->layers[index].tensors[kind];
  const uint64_t heads = (uint64_t)heads_of(dump, tensor), all = (uint64_t)tokens_of(dump, tensor);
  const size_t dim = (size_t)tensor->dims[2], row_bytes = dim * qkv_dtype_size(tensor->dtype);
  for (uint64_t t = first; t < first + tokens; t++) {
    for (uint64_t head = 0; head < heads; head++, out += dim) {
      const uint64_t from = dump->heads_first ? head * all + t : t * heads + head;
      qkv_to_float(tensor->dtype, (const uint8_t *)tensor->data + from * row_bytes, out, dim);
    }
  }
}
