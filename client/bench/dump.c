#include "client/bench/dump.h"

#include <assert.h>
#include <cblas.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/format/safetensors.h"

enum { K, V, Q, KINDS };

typedef struct dump_layer {
  uint32_t number;
  const qkv_safetensors_tensor *tensors[KINDS];  // that of queries may be NULL
} dump_layer;

struct qkvi_dump {
  qkv_safetensors *file;
  dump_layer *layers;
  size_t count;
  uint64_t first_position;
  bool heads_first, before_rope;
};

// ---- The file ----

// "layers.12.k" gives 12 and K.
static bool parse_name(const char *name, uint32_t *number, int *kind) {
  static const char prefix[] = "layers.";
  const char *digits = name + sizeof prefix - 1;
  if (strncmp(name, prefix, sizeof prefix - 1) != 0 || digits[0] < '0' || digits[0] > '9') return false;
  char *end = NULL;
  const unsigned long value = strtoul(digits, &end, 10);
  if (value >= QKV_LAYERS_MAX || end[0] != '.' || end[1] == '\0' || end[2] != '\0') return false;
  const char *found = strchr("kvq", end[1]);
  if (found == NULL) return false;
  *number = (uint32_t)value;
  *kind = (int)(found - "kvq");
  return true;
}

static dump_layer *find_layer(qkvi_dump *dump, uint32_t number) {
  for (size_t i = 0; i < dump->count; i++) {
    if (dump->layers[i].number == number) return &dump->layers[i];
  }
  dump->layers[dump->count] = (dump_layer){.number = number};
  return &dump->layers[dump->count++];
}

static int64_t tokens_of(const qkvi_dump *dump, const qkv_safetensors_tensor *tensor) {
  return tensor->dims[dump->heads_first ? 1 : 0];
}

static int64_t heads_of(const qkvi_dump *dump, const qkv_safetensors_tensor *tensor) {
  return tensor->dims[dump->heads_first ? 0 : 1];
}

static qkv_status check_layer(const qkvi_dump *dump, const dump_layer *layer, qkv_error *error) {
  const dump_layer *first = &dump->layers[0];
  for (int kind = K; kind < KINDS; kind++) {
    const qkv_safetensors_tensor *tensor = layer->tensors[kind], *other = first->tensors[kind];
    if (tensor == NULL && kind != Q) {
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
    if (heads_of(dump, tensor) != heads_of(dump, other) || tensor->dims[2] != other->dims[2]) {
      return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s has other heads or another width than %s", tensor->name,
                      other->name);
    }
  }
  return QKV_OK;
}

static qkv_status check_pair(const qkvi_dump *dump, const dump_layer *layer, qkv_error *error) {
  const qkv_safetensors_tensor *k = layer->tensors[K], *v = layer->tensors[V], *q = layer->tensors[Q];
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

static qkv_status read_choice(const qkvi_dump *dump, const char *key, const char *first, const char *second,
                              bool *is_second, qkv_error *error) {
  const char *word = qkv_safetensors_metadata(dump->file, key);
  *is_second = word != NULL && strcmp(word, second) == 0;
  if (word == NULL || *is_second || strcmp(word, first) == 0) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "its %s is \"%.32s\", allowed are %s and %s", key, word, first,
                  second);
}

static qkv_status read_metadata(qkvi_dump *dump, qkv_error *error) {
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

static qkv_status read_layers(qkvi_dump *dump, qkv_error *error) {
  const size_t count = qkv_safetensors_count(dump->file);
  if (count == 0) return qkv_fail(error, QKV_INVALID_ARGUMENT, "it holds no tensors");
  dump->layers = calloc(count, sizeof *dump->layers);
  if (dump->layers == NULL) abort();
  for (size_t i = 0; i < count; i++) {
    const qkv_safetensors_tensor *tensor = qkv_safetensors_at(dump->file, i);
    uint32_t number = 0;
    int kind = K;
    if (!parse_name(tensor->name, &number, &kind)) {
      return qkv_fail(error, QKV_INVALID_ARGUMENT, "it holds \"%.64s\"; known are layers.N.k, layers.N.v, layers.N.q",
                      tensor->name);
    }
    find_layer(dump, number)->tensors[kind] = tensor;
  }
  for (size_t i = 0; i < dump->count; i++) {
    QKV_TRY(check_layer(dump, &dump->layers[i], error));
    QKV_TRY(check_pair(dump, &dump->layers[i], error));
  }
  return QKV_OK;
}

qkv_status qkvi_dump_open(const char *path, qkvi_dump **dump, qkv_error *error) {
  qkvi_dump *opened = calloc(1, sizeof *opened);
  if (opened == NULL) abort();
  *dump = NULL;
  qkv_status status = qkv_safetensors_open(path, &opened->file, error);
  if (status == QKV_OK) {
    status = read_metadata(opened, error);
    if (status == QKV_OK) status = read_layers(opened, error);
    if (status != QKV_OK) qkv_error_prefix(error, "%s: ", path);
  }
  if (status != QKV_OK) {
    qkvi_dump_close(&opened);
    return status;
  }
  *dump = opened;
  return QKV_OK;
}

void qkvi_dump_close(qkvi_dump **dump) {
  if (*dump == NULL) return;
  qkv_safetensors_close(&(*dump)->file);
  free((*dump)->layers);
  free(*dump);
  *dump = NULL;
}

size_t qkvi_dump_layers(const qkvi_dump *dump) {
  return dump->count;
}

bool qkvi_dump_has_queries(const qkvi_dump *dump) {
  return dump->layers[0].tensors[Q] != NULL;
}

qkv_model qkvi_dump_model(const qkvi_dump *dump) {
  const qkv_safetensors_tensor *const *tensors = dump->layers[0].tensors;
  qkv_model model = {.name = "dump",
                     .kv_heads = (uint32_t)heads_of(dump, tensors[K]),
                     .q_heads = (uint32_t)heads_of(dump, tensors[tensors[Q] != NULL ? Q : K]),
                     .key_dim = (uint32_t)tensors[K]->dims[2],
                     .value_dim = (uint32_t)tensors[V]->dims[2],
                     .dtype = QKV_FP32,
                     .policy = QKV_POLICY_UNSET};
  for (size_t i = 0; i < dump->count; i++) {
    if (dump->layers[i].number >= model.layers) model.layers = dump->layers[i].number + 1;
  }
  return model;
}

// ---- Rows ----

static float *floats(int64_t rows, int64_t columns) {
  float *values = calloc((size_t)rows, (size_t)columns * sizeof(float));
  if (values == NULL) abort();
  return values;
}

// Tokens from `first` on as fp32, [tokens, heads, dim], after RoPE where `rope` is not NULL. The caller frees.
static float *load(const qkvi_dump *dump, const qkv_safetensors_tensor *tensor, int64_t first, uint64_t position,
                   const qkv_rope *rope) {
  const int64_t heads = heads_of(dump, tensor), tokens = tokens_of(dump, tensor), dim = tensor->dims[2];
  const size_t row_bytes = (size_t)dim * qkv_dtype_size(tensor->dtype);
  float *rows = floats((tokens - first) * heads, dim);
  for (int64_t t = first; t < tokens; t++) {
    for (int64_t head = 0; head < heads; head++) {
      float *row = rows + ((t - first) * heads + head) * dim;
      const int64_t from = dump->heads_first ? head * tokens + t : t * heads + head;
      qkv_to_float(tensor->dtype, (const uint8_t *)tensor->data + (size_t)from * row_bytes, row, (size_t)dim);
      if (rope != NULL) qkv_rope_forward(rope, row, position + (uint64_t)(t - first));
    }
  }
  return rows;
}

// Attention of one layer's queries.
typedef struct dump_attention {
  const qkv_model *model;
  const float *q;  // [queries, q_heads, key_dim], of the last tokens
  int64_t queries, tokens;
  float *scores;  // [queries, tokens]
} dump_attention;

static void softmax(float *scores, int64_t visible, int64_t count) {
  float max = scores[0];
  double sum = 0;
  for (int64_t i = 1; i < visible; i++) max = scores[i] > max ? scores[i] : max;
  for (int64_t i = 0; i < visible; i++) {
    scores[i] = expf(scores[i] - max);
    sum += scores[i];
  }
  for (int64_t i = 0; i < visible; i++) scores[i] = (float)(scores[i] / sum);
  memset(scores + visible, 0, (size_t)(count - visible) * sizeof *scores);
}

// out [queries, q_heads, value_dim], causal.
static void attend(const dump_attention *attention, const float *k, const float *v, float *out) {
  const qkv_model *model = attention->model;
  const int n = (int)attention->queries, tokens = (int)attention->tokens;
  const int key = (int)model->key_dim, value = (int)model->value_dim;
  const int q_heads = (int)model->q_heads, kv_heads = (int)model->kv_heads;
  for (int head = 0; head < q_heads; head++) {
    const int kv_head = head / (q_heads / kv_heads);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, n, tokens, key, (float)model->scale,
                attention->q + (size_t)head * (size_t)key, q_heads * key, k + (size_t)kv_head * (size_t)key,
                kv_heads * key, 0, attention->scores, tokens);
    for (int i = 0; i < n; i++) softmax(attention->scores + (int64_t)i * tokens, tokens - n + i + 1, tokens);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, n, value, tokens, 1, attention->scores, tokens,
                v + (size_t)kv_head * (size_t)value, kv_heads * value, 0, out + (size_t)head * (size_t)value,
                q_heads * value);
  }
}

// Rows of one layer, all in fp32.
typedef struct layer_rows {
  int64_t tokens;
  uint64_t position;
  float *k, *v, *k_out, *v_out;
  float *q, *out, *coded_out;  // NULL without queries
} layer_rows;

static void measure_coding(const layer_rows *rows, const dump_attention *attention, const qkv_coder *coder,
                           qkv_dtype dtype, qkvi_probe_layer *sums) {
  qkvi_recode(coder, dtype, rows->position, (uint64_t)rows->tokens, rows->k, rows->v, rows->k_out, rows->v_out,
              &sums->rows);
  if (rows->q == NULL) return;
  attend(attention, rows->k_out, rows->v_out, rows->coded_out);
  const int64_t dim = attention->model->value_dim;
  for (int64_t row = 0; row < attention->queries * (int64_t)attention->model->q_heads; row++) {
    qkvi_probe_add_attention(rows->out + row * dim, rows->coded_out + row * dim, dim, sums);
  }
}

qkv_status qkvi_dump_measure(const qkvi_dump *dump, const qkv_model *model, size_t index, qkv_dtype dtype,
                             qkv_coding *const *codings, size_t count, qkvi_probe_layer *sums, qkv_error *error) {
  assert(index < dump->count);
  const dump_layer *layer = &dump->layers[index];
  if (dump->before_rope && model->rope.theta == 0) {
    return qkv_fail(error, QKV_FAILED_PRECONDITION, "its rows are from before RoPE, which is not known here");
  }
  openblas_set_num_threads(1);
  const qkv_rope *rope = dump->before_rope ? &model->rope : NULL;
  layer_rows rows = {.tokens = tokens_of(dump, layer->tensors[K]), .position = dump->first_position};
  rows.k = load(dump, layer->tensors[K], 0, rows.position, rope);
  rows.v = load(dump, layer->tensors[V], 0, 0, NULL);
  rows.k_out = floats(rows.tokens * (int64_t)model->kv_heads, model->key_dim);
  rows.v_out = floats(rows.tokens * (int64_t)model->kv_heads, model->value_dim);
  dump_attention attention = {.model = model, .tokens = rows.tokens};
  if (layer->tensors[Q] != NULL) {
    const int64_t all = tokens_of(dump, layer->tensors[Q]);
    attention.queries = all < QKVI_DUMP_QUERIES ? all : QKVI_DUMP_QUERIES;
    attention.q = rows.q = load(dump, layer->tensors[Q], all - attention.queries,
                                rows.position + (uint64_t)(rows.tokens - attention.queries), rope);
    attention.scores = floats(attention.queries, rows.tokens);
    rows.out = floats(attention.queries * (int64_t)model->q_heads, model->value_dim);
    rows.coded_out = floats(attention.queries * (int64_t)model->q_heads, model->value_dim);
    attend(&attention, rows.k, rows.v, rows.out);
  }
  for (size_t i = 0; i < count; i++) {
    measure_coding(&rows, &attention, qkv_coding_layer(codings[i], layer->number), dtype, &sums[i]);
  }
  float *blocks[] = {rows.k, rows.v, rows.k_out, rows.v_out, rows.q, rows.out, rows.coded_out, attention.scores};
  for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++) free(blocks[i]);
  return QKV_OK;
}
