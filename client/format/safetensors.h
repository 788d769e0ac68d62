// Safetensors files: read through a mapping, written as a stream.
//
//   [ 8 bytes: N, little-endian ][ N bytes: JSON header ][ data                              ]
//     {"__metadata__": {"key": "text"}, "name": {"dtype": "F16", "shape": [3, 4], "data_offsets": [0, 24]}, ...}
//
// The reader takes files from strangers: the header is at most 16 MiB, and a tensor that the file does not
// hold whole, overlaps another one, leaves bytes between two, or whose shape does not fit its bytes is refused
// before anything of it is handed out. Types read and written are F32, F16 and BF16, up to four dims.
//
// Threads: a file or a writer is used by one thread at a time.
#ifndef QKV_CLIENT_FORMAT_SAFETENSORS_H
#define QKV_CLIENT_FORMAT_SAFETENSORS_H

#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"
#include "engine/base/tensor.h"

#define QKV_SAFETENSORS_HEADER_MAX (16u << 20)  // bytes of JSON

// One tensor, dense and row-major. `data` and `bytes` are the reader's to fill; a writer ignores them.
typedef struct qkv_safetensors_tensor {
  const char *name;
  qkv_dtype dtype;
  int rank;                           // 0 to 4; 0 is one element
  int64_t dims[QKV_TENSOR_RANK_MAX];  // elements, >= 0
  const void *data;                   // of any alignment
  size_t bytes;
} qkv_safetensors_tensor;

typedef struct qkv_safetensors_entry {
  const char *key, *value;
} qkv_safetensors_entry;

// ---- reading ----

typedef struct qkv_safetensors qkv_safetensors;

// Maps the file; tensors point into the mapping. The file must not be cut short while it is open. NOT_FOUND
// where it cannot be opened, INVALID_ARGUMENT where it is no safetensors file. On failure *file is NULL.
qkv_status qkv_safetensors_open(const char *path, qkv_safetensors **file, qkv_error *error);
// The same from memory, which the caller keeps for the life of *file.
qkv_status qkv_safetensors_parse(const void *data, size_t bytes, qkv_safetensors **file, qkv_error *error);
// Clears *file; its tensors and texts are gone with it.
void qkv_safetensors_close(qkv_safetensors **file);

// Tensors in the order of their data.
size_t qkv_safetensors_count(const qkv_safetensors *file);
const qkv_safetensors_tensor *qkv_safetensors_at(const qkv_safetensors *file, size_t index);
// NULL when there is none of that name.
const qkv_safetensors_tensor *qkv_safetensors_find(const qkv_safetensors *file, const char *name);
// The text of a key of `__metadata__`, or NULL.
const char *qkv_safetensors_metadata(const qkv_safetensors *file, const char *key);

// ---- writing ----

typedef struct qkv_safetensors_writer qkv_safetensors_writer;

// Writes the header for tensors of known shapes, in the order given, to "PATH.partial". Names are distinct.
// What is passed is copied. UNAVAILABLE with the system's reason where the file cannot be written, INVALID_ARGUMENT
// where PATH is there and not a regular file (finishing would replace a device or a pipe).
qkv_status qkv_safetensors_writer_create(const char *path, const qkv_safetensors_tensor *tensors, size_t count,
                                         const qkv_safetensors_entry *metadata, size_t metadata_count,
                                         qkv_safetensors_writer **writer, qkv_error *error);
// The next bytes of tensor `index`. Tensors may be written in any order and by turns; more bytes than a tensor
// has is INVALID_ARGUMENT.
qkv_status qkv_safetensors_write(qkv_safetensors_writer *writer, size_t index, const void *data, size_t bytes,
                                 qkv_error *error);
// Gives the file its name and clears *writer; a file that was there is replaced. FAILED_PRECONDITION, naming the
// tensor, when bytes are missing. After a failure nothing is left behind.
qkv_status qkv_safetensors_writer_finish(qkv_safetensors_writer **writer, qkv_error *error);
// Gives up: removes what was written. Clears *writer.
void qkv_safetensors_writer_destroy(qkv_safetensors_writer **writer);

#endif
