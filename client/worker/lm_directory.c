// A model's directory: config.json and model.safetensors. A token of this model is a byte.
#include "client/worker/lm_files.h"

#include <inttypes.h>
#include <jansson.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/format/safetensors.h"

enum { PATH_BYTES_MAX = 4096 };

// ---- config.json ----

static qkv_status read_integer(const json_t *config, const char *key, int64_t max, int64_t *value, qkv_error *error) {
  const json_t *item = json_object_get(config, key);
  if (!json_is_integer(item)) return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s is missing or no integer", key);
  *value = json_integer_value(item);
  if (*value < 1 || *value > max) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s is %" PRId64 ", allowed are 1 to %" PRId64, key, *value, max);
  }
  return QKV_OK;
}

static qkv_status read_number(const json_t *config, const char *key, double *value, qkv_error *error) {
  const json_t *item = json_object_get(config, key);
  *value = json_number_value(item);
  if (!json_is_number(item) || !(*value > 0)) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s is missing or no number above 0", key);
  }
  return QKV_OK;
}

static qkv_status expect_text(const json_t *config, const char *key, const char *expected, qkv_error *error) {
  const char *text = json_string_value(json_object_get(config, key));
  if (text == NULL || strcmp(text, expected) != 0) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s is \"%.32s\", this program runs \"%s\"", key,
                    text == NULL ? "" : text, expected);
  }
  return QKV_OK;
}

// Absent, null or false.
static qkv_status expect_unset(const json_t *config, const char *key, qkv_error *error) {
  const json_t *item = json_object_get(config, key);
  if (item == NULL || json_is_null(item) || json_is_false(item)) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s is set, this program runs models without it", key);
}

static qkv_status read_geometry(const json_t *config, qkvi_lm *lm, qkv_error *error) {
  QKV_TRY(read_integer(config, "vocab_size", 1 << 24, &lm->vocabulary, error));
  if (lm->vocabulary != QKVI_TOKENIZER_BYTES) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "vocab_size is %" PRId64 ", a byte-level model has %d",
                    lm->vocabulary, QKVI_TOKENIZER_BYTES);
  }
  QKV_TRY(read_integer(config, "hidden_size", 1 << 16, &lm->hidden, error));
  QKV_TRY(read_integer(config, "intermediate_size", 1 << 18, &lm->ffn, error));
  QKV_TRY(read_integer(config, "num_hidden_layers", 1024, &lm->layers, error));
  QKV_TRY(read_integer(config, "num_attention_heads", 1024, &lm->q_heads, error));
  QKV_TRY(read_integer(config, "num_key_value_heads", 1024, &lm->kv_heads, error));
  QKV_TRY(read_integer(config, "max_position_embeddings", 1 << 24, &lm->context, error));
  lm->head_dim = lm->hidden / lm->q_heads;
  if (json_object_get(config, "head_dim") != NULL) {
    QKV_TRY(read_integer(config, "head_dim", 1024, &lm->head_dim, error));
  }
  if (lm->q_heads % lm->kv_heads != 0 || lm->head_dim < 2 || lm->head_dim % 2 != 0) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT,
                    "%" PRId64 " query heads, %" PRId64 " KV heads and head_dim %" PRId64 " do not go together",
                    lm->q_heads, lm->kv_heads, lm->head_dim);
  }
  return QKV_OK;
}

static qkv_status read_config(const json_t *config, qkvi_lm *lm, qkv_error *error) {
  QKV_TRY(expect_text(config, "model_type", "llama", error));
  QKV_TRY(expect_text(config, "hidden_act", "silu", error));
  QKV_TRY(expect_unset(config, "attention_bias", error));
  QKV_TRY(expect_unset(config, "mlp_bias", error));
  QKV_TRY(expect_unset(config, "rope_scaling", error));
  QKV_TRY(expect_unset(config, "tie_word_embeddings", error));
  QKV_TRY(read_geometry(config, lm, error));
  QKV_TRY(read_number(config, "rope_theta", &lm->rope_theta, error));
  return read_number(config, "rms_norm_eps", &lm->norm_epsilon, error);
}

static qkv_status load_config(const char *directory, qkvi_lm *lm, qkv_error *error) {
  char path[PATH_BYTES_MAX];
  snprintf(path, sizeof path, "%s/config.json", directory);
  json_error_t why;
  json_t *config = json_load_file(path, 0, &why);
  if (config == NULL) {
    bool missing = access(path, R_OK) != 0;
    return qkv_fail(error, missing ? QKV_NOT_FOUND : QKV_INVALID_ARGUMENT, "%s: %s", path, why.text);
  }
  qkv_status status = read_config(config, lm, error);
  json_decref(config);
  return status == QKV_OK ? QKV_OK : qkv_error_prefix(error, "%s: ", path);
}

// ---- model.safetensors ----

typedef struct weight_loader {
  const qkv_safetensors *file;
  float *next;        // where the next tensor goes
  qkv_status status;  // of the first tensor that failed; the others are then passed over
  qkv_error *error;
} weight_loader;

// The tensor of that name as fp32: [rows, columns], or [columns] where rows is 0.
static const float *load_tensor(weight_loader *loader, int64_t rows, int64_t columns, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
static const float *load_tensor(weight_loader *loader, int64_t rows, int64_t columns, const char *format, ...) {
  if (loader->status != QKV_OK) return NULL;
  char name[128];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(name, sizeof name, format, arguments);
  va_end(arguments);
  const qkv_safetensors_tensor *tensor = qkv_safetensors_find(loader->file, name);
  if (tensor == NULL) {
    loader->status = qkv_fail(loader->error, QKV_INVALID_ARGUMENT, "there is no tensor %s", name);
    return NULL;
  }
  bool fits = rows == 0 ? tensor->rank == 1 && tensor->dims[0] == columns
                        : tensor->rank == 2 && tensor->dims[0] == rows && tensor->dims[1] == columns;
  if (!fits) {
    loader->status = qkv_fail(loader->error, QKV_INVALID_ARGUMENT,
                              "tensor %s has not the shape that config.json gives, [%" PRId64 ", %" PRId64 "]", name,
                              rows, columns);
    return NULL;
  }
  size_t count = tensor->bytes / qkv_dtype_size(tensor->dtype);
  float *values = loader->next;
  qkv_to_float(tensor->dtype, tensor->data, values, count);
  loader->next += qkvi_lm_aligned(count);
  return values;
}

static void load_layer(weight_loader *loader, const qkvi_lm *lm, int64_t index, qkvi_lm_layer *layer) {
  int64_t q_width = lm->q_heads * lm->head_dim;
  int64_t kv_width = lm->kv_heads * lm->head_dim;
  char at[64];
  snprintf(at, sizeof at, "model.layers.%" PRId64, index);
  layer->attention_norm = load_tensor(loader, 0, lm->hidden, "%s.input_layernorm.weight", at);
  layer->wq = load_tensor(loader, q_width, lm->hidden, "%s.self_attn.q_proj.weight", at);
  layer->wk = load_tensor(loader, kv_width, lm->hidden, "%s.self_attn.k_proj.weight", at);
  layer->wv = load_tensor(loader, kv_width, lm->hidden, "%s.self_attn.v_proj.weight", at);
  layer->wo = load_tensor(loader, lm->hidden, q_width, "%s.self_attn.o_proj.weight", at);
  layer->mlp_norm = load_tensor(loader, 0, lm->hidden, "%s.post_attention_layernorm.weight", at);
  layer->gate = load_tensor(loader, lm->ffn, lm->hidden, "%s.mlp.gate_proj.weight", at);
  layer->up = load_tensor(loader, lm->ffn, lm->hidden, "%s.mlp.up_proj.weight", at);
  layer->down = load_tensor(loader, lm->hidden, lm->ffn, "%s.mlp.down_proj.weight", at);
}

static qkv_status load_tensors(const qkv_safetensors *file, qkvi_lm *lm, qkv_error *error) {
  size_t floats = 0;
  for (size_t i = 0; i < qkv_safetensors_count(file); i++) {
    const qkv_safetensors_tensor *tensor = qkv_safetensors_at(file, i);
    floats += qkvi_lm_aligned(tensor->bytes / qkv_dtype_size(tensor->dtype));
  }
  QKV_TRY(qkvi_lm_allocate(lm, floats, error));
  weight_loader loader = {.file = file, .next = lm->weights, .error = error};
  lm->embedding = load_tensor(&loader, lm->vocabulary, lm->hidden, "model.embed_tokens.weight");
  for (int64_t i = 0; i < lm->layers; i++) load_layer(&loader, lm, i, &lm->layer[i]);
  lm->norm = load_tensor(&loader, 0, lm->hidden, "model.norm.weight");
  lm->head = load_tensor(&loader, lm->vocabulary, lm->hidden, "lm_head.weight");
  return loader.status;
}

static qkv_status load_weights(const char *directory, qkvi_lm *lm, qkv_error *error) {
  char path[PATH_BYTES_MAX];
  snprintf(path, sizeof path, "%s/model.safetensors", directory);
  qkv_safetensors *file = NULL;
  QKV_TRY(qkv_safetensors_open(path, &file, error));
  qkv_status status = load_tensors(file, lm, error);
  qkv_safetensors_close(&file);
  return status == QKV_OK ? QKV_OK : qkv_error_prefix(error, "%s: ", path);
}

qkv_status qkvi_lm_read_directory(const char *directory, qkvi_lm *lm, qkv_error *error) {
  QKV_TRY(load_config(directory, lm, error));
  return load_weights(directory, lm, error);
}
