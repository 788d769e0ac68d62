// Where fetched tensors go: one .safetensors file, or a directory of .npy files. Either appears under its name
// when it is whole, and not at all otherwise.
//
// Threads: one at a time.
#ifndef QKV_CLIENT_CLI_OUTPUT_H
#define QKV_CLIENT_CLI_OUTPUT_H

#include <stdbool.h>
#include <stddef.h>

#include "client/format/safetensors.h"
#include "engine/base/status.h"

typedef struct qkvctl_output qkvctl_output;

// For `count` tensors of known shapes, which are copied. As directory (`npy`), `path` must not be there yet;
// `metadata` goes to safetensors only.
qkv_status qkvctl_output_create(const char *path, bool npy, const qkv_safetensors_tensor *tensors, size_t count,
                                const qkv_safetensors_entry *metadata, size_t metadata_count, qkvctl_output **output,
                                qkv_error *error);
// The next bytes of tensor `index`, by turns as the rows come.
qkv_status qkvctl_output_write(qkvctl_output *output, size_t index, const void *data, size_t bytes, qkv_error *error);
// Gives the file or directory its name; FAILED_PRECONDITION where a tensor is not whole. Clears *output.
qkv_status qkvctl_output_finish(qkvctl_output **output, qkv_error *error);
// Gives up: leaves nothing behind. Clears *output.
void qkvctl_output_destroy(qkvctl_output **output);

#endif
