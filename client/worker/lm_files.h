// Between the files that read models: a directory (lm_directory.c) and a GGUF file (lm_gguf.c).
#ifndef QKV_CLIENT_WORKER_LM_FILES_H
#define QKV_CLIENT_WORKER_LM_FILES_H

#include <stddef.h>

#include "client/worker/lm.h"

// Each fills everything of *lm but its name; the directory's reader leaves its tokenizer alone, too, which is that of
// bytes. What was allocated is in *lm, on failure, too. Errors name the file.
qkv_status qkvi_lm_read_directory(const char *directory, qkvi_lm *lm, qkv_error *error);
qkv_status qkvi_lm_read_gguf(const char *path, qkvi_lm *lm, qkv_error *error);

// Memory for `floats` weights and for the layers. RESOURCE_EXHAUSTED.
qkv_status qkvi_lm_allocate(qkvi_lm *lm, size_t floats, qkv_error *error);
// So many floats of it are taken by a tensor of `count`, so that the next one is aligned to a cache line.
static inline size_t qkvi_lm_aligned(size_t count) {
  enum { ALIGN_FLOATS = 16 };
  return (count + ALIGN_FLOATS - 1) / ALIGN_FLOATS * ALIGN_FLOATS;
}

#endif
