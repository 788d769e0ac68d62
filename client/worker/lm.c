#include "client/worker/lm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/worker/lm_files.h"

enum { CACHE_LINE = 64 };

// Whether it ends in ".gguf".
static bool is_gguf(const char *path, size_t bytes) {
  static const char end[] = ".gguf";
  return bytes >= strlen(end) && memcmp(path + bytes - strlen(end), end, strlen(end)) == 0;
}

// "models/tinylm/" gives "tinylm", "models/small.Q4_1.gguf" "small.Q4_1".
static void name_of(const char *path, char *name, size_t size) {
  size_t end = strlen(path);
  while (end > 0 && path[end - 1] == '/') end--;
  if (is_gguf(path, end)) end -= strlen(".gguf");
  size_t begin = end;
  while (begin > 0 && path[begin - 1] != '/') begin--;
  snprintf(name, size, "%.*s", (int)(end - begin), path + begin);
}

static qkv_status load(const char *path, qkvi_lm *lm, qkv_error *error) {
  name_of(path, lm->name, sizeof lm->name);
  if (is_gguf(path, strlen(path))) return qkvi_lm_read_gguf(path, lm, error);
  QKV_TRY(qkvi_lm_read_directory(path, lm, error));
  lm->tokenizer = qkvi_tokenizer_bytes();
  return QKV_OK;
}

qkv_status qkvi_lm_load(const char *path, qkvi_lm **lm, qkv_error *error) {
  *lm = NULL;
  qkvi_lm *loaded = calloc(1, sizeof(*loaded));
  if (loaded == NULL) return qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "out of memory");
  const qkv_status status = load(path, loaded, error);
  if (status != QKV_OK) {
    qkvi_lm_free(&loaded);
    return status;
  }
  *lm = loaded;
  return QKV_OK;
}

qkv_status qkvi_lm_allocate(qkvi_lm *lm, size_t floats, qkv_error *error) {
  lm->weights = aligned_alloc(CACHE_LINE, qkvi_lm_aligned(floats + 1) * sizeof(float));
  lm->layer = calloc((size_t)lm->layers, sizeof(*lm->layer));
  if (lm->weights == NULL || lm->layer == NULL) return qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "out of memory");
  return QKV_OK;
}

void qkvi_lm_free(qkvi_lm **lm) {
  if (*lm == NULL) return;
  qkvi_tokenizer_destroy(&(*lm)->tokenizer);
  free((*lm)->weights);
  free((*lm)->layer);
  free(*lm);
  *lm = NULL;
}
