// Tensor views and element types.
//
// A tensor is a type, up to four dims, 64-bit byte strides and the bytes. It borrows the bytes, which may lie
// in pieces and at any alignment (bytes.h). Rows, the last dim, are contiguous; the unit of every read is a
// row, converted to float on the way.
#ifndef QKV_ENGINE_BASE_TENSOR_H
#define QKV_ENGINE_BASE_TENSOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/bytes.h"
#include "engine/base/status.h"

#define QKV_TENSOR_RANK_MAX 4

// The values are those of qkv.v1.DType.
typedef enum qkv_dtype { QKV_DTYPE_NONE = 0, QKV_FP32 = 1, QKV_FP16 = 2, QKV_BF16 = 3 } qkv_dtype;

// Bytes of one element: 4, 2, 2; 0 for anything else.
size_t qkv_dtype_size(qkv_dtype dtype);
// "fp32", "fp16", "bf16"; "none".
const char *qkv_dtype_name(qkv_dtype dtype);
qkv_status qkv_dtype_parse(const char *text, qkv_dtype *dtype);

// Conversions of `n` elements, round to nearest even; `in` and `out` may have any alignment and must not
// overlap. fp32 values beyond a narrower type's range become infinities.
void qkv_to_float(qkv_dtype dtype, const void *in, float *out, size_t n);
void qkv_from_float(qkv_dtype dtype, const float *in, void *out, size_t n);

// Conversions use the instructions that the machine has (engine/base/cpu.h) and `cpu_mask` allows; without a call,
// all of them. The bits are the same either way.
void qkv_tensor_setup(uint32_t cpu_mask);

typedef struct qkv_tensor {
  qkv_dtype dtype;
  int rank;                              // 0: absent
  int64_t dims[QKV_TENSOR_RANK_MAX];     // elements
  int64_t strides[QKV_TENSOR_RANK_MAX];  // bytes
  qkv_bytes data;
} qkv_tensor;

// A dense row-major tensor over one segment (borrowed, as is its data).
qkv_tensor qkv_tensor_dense(qkv_dtype dtype, int rank, const int64_t *dims, const qkv_segment *segment);

// Fills `strides` for a dense row-major tensor of `dims`.
void qkv_tensor_strides(qkv_dtype dtype, int rank, const int64_t *dims, int64_t *strides);

// Checks everything that proto/qkv/v1/tensor.proto promises: known dtype, rank `rank`, dims >= 1 without overflow,
// non-negative strides in whole elements, contiguous rows, last byte inside the data. INVALID_ARGUMENT with a text
// like "k.strides[0] is -4, at least 0" (`name` is its prefix, here k).
qkv_status qkv_tensor_check(const qkv_tensor *tensor, const char *name, int rank, qkv_error *error);

// One past the last byte that the dims and strides reach, in *end. They are not negative. INVALID_ARGUMENT on
// overflow of int64_t.
qkv_status qkv_tensor_reach(const qkv_tensor *tensor, int64_t *end);

// Bytes of a dense tensor of these dims; INVALID_ARGUMENT on overflow of int64_t.
qkv_status qkv_tensor_bytes(qkv_dtype dtype, int rank, const int64_t *dims, int64_t *bytes);

// Row (i) of a rank-2 tensor or row (i, j) of a rank-3 tensor (j is ignored for rank 2), dims[rank-1] floats
// into `out`. The tensor must have passed qkv_tensor_check; i and j lie inside (asserted).
void qkv_tensor_row(const qkv_tensor *tensor, int64_t i, int64_t j, float *out);

// true: no element of [i] is a NaN or beyond `most` in magnitude, which has to be exact in the tensor's type. false:
// one may be; also where the bytes do not lie in one piece. Some ten times as fast as rows in floats.
bool qkv_tensor_within(const qkv_tensor *tensor, int64_t i, float most);

// The same row's raw bytes, dims[rank-1] elements.
void qkv_tensor_row_raw(const qkv_tensor *tensor, int64_t i, int64_t j, void *out);

#endif
