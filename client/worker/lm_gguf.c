// A model in a GGUF file of llama.cpp's: general.architecture "llama".
#include <inttypes.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/format/gguf.h"
#include "client/worker/lm_files.h"

// ---- metadata ----

static qkv_status expect_text(const qkv_gguf *file, const char *key, const char *expected, qkv_error *error) {
  qkv_gguf_text text;
  QKV_TRY(qkv_gguf_string(file, key, &text, error));
  if (qkv_gguf_text_is(text, expected)) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s is \"%.*s\", this program runs \"%s\"", key,
                  (int)(text.bytes < 32 ? text.bytes : 32), text.data, expected);
}

static qkv_status positive(const qkv_gguf *file, const char *key, double *value, qkv_error *error) {
  QKV_TRY(qkv_gguf_number(file, key, value, error));
  return *value > 0 ? QKV_OK : qkv_fail(error, QKV_INVALID_ARGUMENT, "%s is %g, it must be above 0", key, *value);
}

// RoPE turns all coordinates of a head, and nothing stretches it.
static qkv_status check_rope(const qkv_gguf *file, const qkvi_lm *lm, qkv_error *error) {
  int64_t turned = lm->head_dim;
  if (qkv_gguf_has(file, "llama.rope.dimension_count")) {
    QKV_TRY(qkv_gguf_integer(file, "llama.rope.dimension_count", 1, 1024, &turned, error));
  }
  if (turned != lm->head_dim) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT,
                    "llama.rope.dimension_count is %" PRId64 ", this program turns all %" PRId64 " of a head", turned,
                    lm->head_dim);
  }
  if (qkv_gguf_has(file, "llama.rope.scaling.type")) {
    QKV_TRY(expect_text(file, "llama.rope.scaling.type", "none", error));
  }
  if (qkv_gguf_tensor_find(file, "rope_freqs.weight") == NULL) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT,
                  "tensor rope_freqs.weight is there, this program runs models without it");
}

static qkv_status read_geometry(const qkv_gguf *file, qkvi_lm *lm, qkv_error *error) {
  QKV_TRY(expect_text(file, "general.architecture", "llama", error));
  QKV_TRY(qkv_gguf_integer(file, "llama.block_count", 1, 1024, &lm->layers, error));
  QKV_TRY(qkv_gguf_integer(file, "llama.context_length", 1, 1 << 24, &lm->context, error));
  QKV_TRY(qkv_gguf_integer(file, "llama.embedding_length", 1, 1 << 16, &lm->hidden, error));
  QKV_TRY(qkv_gguf_integer(file, "llama.feed_forward_length", 1, 1 << 18, &lm->ffn, error));
  QKV_TRY(qkv_gguf_integer(file, "llama.attention.head_count", 1, 1024, &lm->q_heads, error));
  lm->kv_heads = lm->q_heads;
  if (qkv_gguf_has(file, "llama.attention.head_count_kv")) {
    QKV_TRY(qkv_gguf_integer(file, "llama.attention.head_count_kv", 1, 1024, &lm->kv_heads, error));
  }
  lm->head_dim = lm->hidden / lm->q_heads;
  if (qkv_gguf_has(file, "llama.attention.key_length")) {
    QKV_TRY(qkv_gguf_integer(file, "llama.attention.key_length", 2, 1024, &lm->head_dim, error));
  }
  if (lm->q_heads % lm->kv_heads != 0 || lm->head_dim < 2 || lm->head_dim % 2 != 0) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT,
                    "%" PRId64 " query heads, %" PRId64 " KV heads and heads of %" PRId64 " do not go together",
                    lm->q_heads, lm->kv_heads, lm->head_dim);
  }
  lm->rope_theta = 10000;
  if (qkv_gguf_has(file, "llama.rope.freq_base")) {
    QKV_TRY(positive(file, "llama.rope.freq_base", &lm->rope_theta, error));
  }
  QKV_TRY(positive(file, "llama.attention.layer_norm_rms_epsilon", &lm->norm_epsilon, error));
  return check_rope(file, lm, error);
}

// ---- tensors ----

static qkv_status expect_no_bias(const qkv_gguf *file, qkv_error *error) {
  static const char end[] = ".bias";
  for (size_t i = 0; i < qkv_gguf_tensors(file); i++) {
    const qkv_gguf_text name = qkv_gguf_tensor_at(file, i)->name;
    if (name.bytes < strlen(end) || memcmp(name.data + name.bytes - strlen(end), end, strlen(end)) != 0) continue;
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "tensor %.*s is there, this program runs models without biases",
                    (int)name.bytes, name.data);
  }
  return QKV_OK;
}

typedef struct weight_loader {
  const qkv_gguf *file;
  float *next;        // where the next tensor goes
  qkv_status status;  // of the first tensor that failed; the others are then passed over
  qkv_error *error;
} weight_loader;

// The tensor of that name as fp32: [rows, columns], or [columns] where rows is 0.
static float *load_tensor(weight_loader *loader, int64_t rows, int64_t columns, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
static float *load_tensor(weight_loader *loader, int64_t rows, int64_t columns, const char *format, ...) {
  if (loader->status != QKV_OK) return NULL;
  char name[QKV_GGUF_NAME_MAX + 1];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(name, sizeof name, format, arguments);
  va_end(arguments);
  const qkv_gguf_tensor *tensor = qkv_gguf_tensor_find(loader->file, name);
  if (tensor == NULL) {
    loader->status = qkv_fail(loader->error, QKV_INVALID_ARGUMENT, "there is no tensor %s", name);
    return NULL;
  }
  const int64_t expected = rows == 0 ? 1 : rows;
  if (tensor->rank != (rows == 0 ? 1 : 2) || tensor->dims[0] != columns || tensor->dims[1] != expected) {
    loader->status = qkv_fail(loader->error, QKV_INVALID_ARGUMENT,
                              "tensor %s has not the shape that the metadata gives, [%" PRId64 ", %" PRId64 "]", name,
                              rows, columns);
    return NULL;
  }
  float *values = loader->next;
  qkv_gguf_to_float(tensor, values);
  loader->next += qkvi_lm_aligned((size_t)tensor->count);
  return values;
}

// Rows of Q or K as llama.cpp orders them, 2 i + h of a head, to h head_dim / 2 + i. `scratch` holds a head.
static void unpermute(float *rows, int64_t heads, int64_t dim, int64_t width, float *scratch) {
  if (rows == NULL) return;
  const size_t row_bytes = (size_t)width * sizeof(float);
  for (int64_t head = 0; head < heads; head++) {
    float *at = rows + head * dim * width;
    memcpy(scratch, at, (size_t)dim * row_bytes);
    for (int64_t row = 0; row < dim; row++) {
      memcpy(at + (row % 2 * (dim / 2) + row / 2) * width, scratch + row * width, row_bytes);
    }
  }
}

static void load_layer(weight_loader *loader, const qkvi_lm *lm, int64_t index, float *scratch,
                       qkvi_lm_layer *layer) {
  const int64_t q_width = lm->q_heads * lm->head_dim, kv_width = lm->kv_heads * lm->head_dim;
  char at[32];
  snprintf(at, sizeof at, "blk.%" PRId64, index);
  layer->attention_norm = load_tensor(loader, 0, lm->hidden, "%s.attn_norm.weight", at);
  float *wq = load_tensor(loader, q_width, lm->hidden, "%s.attn_q.weight", at);
  float *wk = load_tensor(loader, kv_width, lm->hidden, "%s.attn_k.weight", at);
  unpermute(wq, lm->q_heads, lm->head_dim, lm->hidden, scratch);
  unpermute(wk, lm->kv_heads, lm->head_dim, lm->hidden, scratch);
  layer->wq = wq;
  layer->wk = wk;
  layer->wv = load_tensor(loader, kv_width, lm->hidden, "%s.attn_v.weight", at);
  layer->wo = load_tensor(loader, lm->hidden, q_width, "%s.attn_output.weight", at);
  layer->mlp_norm = load_tensor(loader, 0, lm->hidden, "%s.ffn_norm.weight", at);
  layer->gate = load_tensor(loader, lm->ffn, lm->hidden, "%s.ffn_gate.weight", at);
  layer->up = load_tensor(loader, lm->ffn, lm->hidden, "%s.ffn_up.weight", at);
  layer->down = load_tensor(loader, lm->hidden, lm->ffn, "%s.ffn_down.weight", at);
}

static qkv_status load_weights(const qkv_gguf *file, qkvi_lm *lm, qkv_error *error) {
  size_t floats = 0;
  for (size_t i = 0; i < qkv_gguf_tensors(file); i++) {
    floats += qkvi_lm_aligned((size_t)qkv_gguf_tensor_at(file, i)->count);
  }
  QKV_TRY(qkvi_lm_allocate(lm, floats, error));
  float *scratch = calloc((size_t)lm->head_dim, (size_t)lm->hidden * sizeof(float));
  if (scratch == NULL) return qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "out of memory");
  weight_loader loader = {.file = file, .next = lm->weights, .error = error};
  lm->embedding = load_tensor(&loader, lm->vocabulary, lm->hidden, "token_embd.weight");
  for (int64_t i = 0; i < lm->layers; i++) load_layer(&loader, lm, i, scratch, &lm->layer[i]);
  lm->norm = load_tensor(&loader, 0, lm->hidden, "output_norm.weight");
  const bool tied = qkv_gguf_tensor_find(file, "output.weight") == NULL;
  lm->head = tied ? lm->embedding : load_tensor(&loader, lm->vocabulary, lm->hidden, "output.weight");
  free(scratch);
  return loader.status;
}

static qkv_status read_file(const qkv_gguf *file, qkvi_lm *lm, qkv_error *error) {
  QKV_TRY(read_geometry(file, lm, error));
  QKV_TRY(expect_no_bias(file, error));
  QKV_TRY(qkvi_tokenizer_gguf(file, &lm->tokenizer, error));
  lm->vocabulary = qkvi_tokenizer_vocabulary(lm->tokenizer);
  return load_weights(file, lm, error);
}

qkv_status qkvi_lm_read_gguf(const char *path, qkvi_lm *lm, qkv_error *error) {
  qkv_gguf *file = NULL;
  QKV_TRY(qkv_gguf_open(path, &file, error));
  const qkv_status status = read_file(file, lm, error);
  qkv_gguf_close(&file);
  return status == QKV_OK ? QKV_OK : qkv_error_prefix(error, "%s: ", path);
}
