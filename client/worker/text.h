// Texts to run a model over, and the windows that are cut out of them.
#ifndef QKV_CLIENT_WORKER_TEXT_H
#define QKV_CLIENT_WORKER_TEXT_H

#include <stdint.h>

#include "client/worker/lm.h"
#include "engine/base/status.h"

// The file's bytes, free()d by the caller, at most 1 GiB. NOT_FOUND, INVALID_ARGUMENT (no ordinary file).
qkv_status qkvi_text_read(const char *path, uint8_t **data, int64_t *bytes, qkv_error *error);

// The file as the model's tokens; none stands for a control token. free()d by the caller.
qkv_status qkvi_text_tokens(const qkvi_lm *lm, const char *path, int32_t **tokens, int64_t *count, qkv_error *error);

// Where window `index` of `windows` begins: they have length + 1 tokens, are spread evenly over a text of `tokens`,
// and the last one ends with it. tokens > length.
int64_t qkvi_text_window(int64_t tokens, int64_t length, int64_t windows, int64_t index);

#endif
