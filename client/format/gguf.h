// GGUF files, versions 2 and 3, read through a mapping: metadata and tensors, as llama.cpp writes them.
//
//   [ "GGUF" ][ version u32 ][ tensors u64 ][ entries u64 ]
//   [ entries: key, type u32, value ]
//   [ tensors: name, rank u32, dims u64 each, type u32, offset u64 ]
//   [ zeros up to a multiple of general.alignment ][ data ]
//
// A text is u64 bytes and the bytes; an array is type u32, u64 count, values.
//
// Everything is little-endian. The reader takes files from strangers: a value, a text or a tensor that the file does
// not hold whole is refused before anything of it is handed out, and so are two entries or tensors of one name.
// Arrays of arrays are refused. dims[0] is the one that changes fastest: a matrix [out, in], row-major, has the dims
// in, out.
//
// Threads: read-only once open.
#ifndef QKV_CLIENT_FORMAT_GGUF_H
#define QKV_CLIENT_FORMAT_GGUF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"

enum {
  QKV_GGUF_RANK_MAX = 4,
  QKV_GGUF_NAME_MAX = 64,          // bytes of a tensor's name
  QKV_GGUF_KEY_MAX = 65535,        // bytes of an entry's key
  QKV_GGUF_ENTRIES_MAX = 1 << 14,  // of metadata
  QKV_GGUF_TENSORS_MAX = 1 << 14,
};

// Bytes of the file, not terminated.
typedef struct qkv_gguf_text {
  const char *data;
  size_t bytes;
} qkv_gguf_text;

// The values are the file's.
typedef enum qkv_gguf_kind {
  QKV_GGUF_UINT8 = 0,
  QKV_GGUF_INT8 = 1,
  QKV_GGUF_UINT16 = 2,
  QKV_GGUF_INT16 = 3,
  QKV_GGUF_UINT32 = 4,
  QKV_GGUF_INT32 = 5,
  QKV_GGUF_FLOAT32 = 6,
  QKV_GGUF_BOOL = 7,
  QKV_GGUF_STRING = 8,
  QKV_GGUF_ARRAY = 9,
  QKV_GGUF_UINT64 = 10,
  QKV_GGUF_INT64 = 11,
  QKV_GGUF_FLOAT64 = 12,
} qkv_gguf_kind;

// A tensor type that can be made floats (gguf_tensor.c), and its id in the file.
typedef enum qkv_gguf_type {
  QKV_GGUF_F32 = 0,
  QKV_GGUF_F16 = 1,
  QKV_GGUF_Q4_0 = 2,
  QKV_GGUF_Q4_1 = 3,
  QKV_GGUF_Q8_0 = 8,
  QKV_GGUF_BF16 = 30,
} qkv_gguf_type;

typedef struct qkv_gguf_tensor {
  qkv_gguf_text name;
  uint32_t type;                    // a qkv_gguf_type
  int rank;                         // 1 to 4
  int64_t dims[QKV_GGUF_RANK_MAX];  // elements, >= 1; 1 beyond the rank
  int64_t count;                    // elements in all
  const uint8_t *data;              // aligned to general.alignment in the file
  size_t bytes;
} qkv_gguf_tensor;

typedef struct qkv_gguf qkv_gguf;

// Maps the file, which must not be cut short while it is open. NOT_FOUND where it cannot be opened, INVALID_ARGUMENT
// where it is no GGUF file or has a tensor of another type. On failure *file is NULL.
qkv_status qkv_gguf_open(const char *path, qkv_gguf **file, qkv_error *error);
// The same from memory, which the caller keeps for the life of *file.
qkv_status qkv_gguf_parse(const void *data, size_t bytes, qkv_gguf **file, qkv_error *error);
// Clears *file; its tensors and texts are gone with it.
void qkv_gguf_close(qkv_gguf **file);

// ---- metadata ----

bool qkv_gguf_has(const qkv_gguf *file, const char *key);
// Each fails, naming the key, with NOT_FOUND where there is none and INVALID_ARGUMENT where it has another kind or is
// outside of what is allowed.
qkv_status qkv_gguf_integer(const qkv_gguf *file, const char *key, int64_t min, int64_t max, int64_t *value,
                            qkv_error *error);
// Float32 or float64, finite.
qkv_status qkv_gguf_number(const qkv_gguf *file, const char *key, double *value, qkv_error *error);
qkv_status qkv_gguf_string(const qkv_gguf *file, const char *key, qkv_gguf_text *value, qkv_error *error);
bool qkv_gguf_text_is(qkv_gguf_text text, const char *expected);

// An array's elements, one after the other.
typedef struct qkv_gguf_array {
  qkv_gguf_kind kind;
  uint64_t left;        // elements that are still to come
  const uint8_t *next;  // inside the file
} qkv_gguf_array;

// Of elements of `kind`.
qkv_status qkv_gguf_array_of(const qkv_gguf *file, const char *key, qkv_gguf_kind kind, qkv_gguf_array *array,
                             qkv_error *error);
// The next text of an array of QKV_GGUF_STRING, or number of one of QKV_GGUF_INT32; asserts that there is one.
qkv_gguf_text qkv_gguf_next_string(qkv_gguf_array *array);
int32_t qkv_gguf_next_int32(qkv_gguf_array *array);

// ---- tensors ----

size_t qkv_gguf_tensors(const qkv_gguf *file);
const qkv_gguf_tensor *qkv_gguf_tensor_at(const qkv_gguf *file, size_t index);
// NULL when there is none of that name.
const qkv_gguf_tensor *qkv_gguf_tensor_find(const qkv_gguf *file, const char *name);

// "Q4_1"; NULL for a type that is not among those above.
const char *qkv_gguf_type_name(uint32_t type);
// Elements of a block, 1 where there are none, and its bytes. false for a type that is not among those above.
bool qkv_gguf_type_block(uint32_t type, size_t *elements, size_t *bytes);
// All elements as fp32, tensor->count of them.
void qkv_gguf_to_float(const qkv_gguf_tensor *tensor, float *out);

#endif
