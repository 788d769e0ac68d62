#include "engine/base/tensor.h"

#include <assert.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <string.h>

#include "engine/base/cpu.h"
#include "engine/base/tensor_internal.h"

typedef struct dtype_row {
  const char *name;
  size_t size;  // bytes of an element
} dtype_row;

static const dtype_row dtypes[] = {
    [QKV_DTYPE_NONE] = {"none", 0}, [QKV_FP32] = {"fp32", 4}, [QKV_FP16] = {"fp16", 2}, [QKV_BF16] = {"bf16", 2}};
#define DTYPE_COUNT (sizeof dtypes / sizeof dtypes[0])

size_t qkv_dtype_size(qkv_dtype dtype) {
  return (size_t)dtype < DTYPE_COUNT ? dtypes[dtype].size : 0;
}

const char *qkv_dtype_name(qkv_dtype dtype) {
  return (size_t)dtype < DTYPE_COUNT ? dtypes[dtype].name : dtypes[QKV_DTYPE_NONE].name;
}

qkv_status qkv_dtype_parse(const char *text, qkv_dtype *dtype) {
  for (size_t i = QKV_FP32; i < DTYPE_COUNT; i++) {
    if (strcmp(text, dtypes[i].name) == 0) {
      *dtype = (qkv_dtype)i;
      return QKV_OK;
    }
  }
  return QKV_INVALID_ARGUMENT;
}

// ---- Conversions, without a branch, so that the compiler makes vectors of the loops. ----

// With masks: of `?:` over floating-point results gcc makes branches, as they could trap.
static uint32_t choose(int condition, uint32_t yes, uint32_t no) {
  uint32_t mask = 0u - (uint32_t)condition;
  return (yes & mask) | (no & ~mask);
}

static uint32_t float_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static float bits_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// Half: 1 sign, 5 exponent (bias 15), 10 fraction. Float: 1, 8 (bias 127), 23. Every half is a float.
static float half_to_float(uint16_t half) {
  uint32_t sign = (uint32_t)(half & 0x8000) << 16;
  int32_t magnitude = half & 0x7fff;
  uint32_t shifted = (uint32_t)magnitude << 13;
  uint32_t normal = shifted + ((127 - 15) << 23);
  uint32_t special = shifted | 0x7f800000;                         // infinity and NaN
  uint32_t subnormal = float_bits((float)magnitude * 0x1.0p-24f);  // exact
  uint32_t bits = choose(magnitude >= 0x7c00, special, normal);
  return bits_float(sign | choose(magnitude < 0x0400, subnormal, bits));
}

static uint16_t float_to_half(float value) {
  uint32_t bits = float_bits(value);
  uint32_t sign = (bits >> 16) & 0x8000;
  int32_t magnitude = (int32_t)(bits & 0x7fffffff);
  // Rounds by adding just under half a unit, and the last kept bit for ties. What overflows ends above the
  // infinity and is cut to it.
  int32_t rebased = magnitude - ((127 - 15) << 23);
  int32_t rounded = (rebased + 0xfff + ((rebased >> 13) & 1)) >> 13;
  uint32_t normal = choose(rounded > 0x7c00, 0x7c00, (uint32_t)rounded);
  // The unit in the last place of 0.5 is that of subnormal halves: the addition rounds as we need.
  uint32_t subnormal = float_bits(bits_float((uint32_t)magnitude) + 0.5f) - float_bits(0.5f);
  uint32_t nan = 0x7e00 | (((uint32_t)magnitude >> 13) & 0x3ff);
  uint32_t half = choose(magnitude < 0x38800000, subnormal, normal);
  return (uint16_t)(sign | choose(magnitude > 0x7f800000, nan, half));
}

static uint16_t float_to_bf16(float value) {
  uint32_t bits = float_bits(value);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  uint32_t nan = (bits >> 16) | 0x40;
  return (uint16_t)choose((int32_t)(bits & 0x7fffffff) > 0x7f800000, nan, rounded);
}

static _Atomic uint32_t cpu_mask = UINT32_MAX;

void qkv_tensor_setup(uint32_t mask) {
  atomic_store_explicit(&cpu_mask, mask, memory_order_relaxed);
}

static bool converts_halves(void) {
  return (qkv_cpu_flags() & atomic_load_explicit(&cpu_mask, memory_order_relaxed) & QKVI_CPU_HALVES) != 0;
}

static void halves_to_floats(const uint8_t *restrict in, uint8_t *restrict out, size_t n) {
  const size_t done = converts_halves() ? qkvi_halves_to_floats(in, out, n) : 0;
  for (size_t i = done; i < n; i++) {
    uint16_t half;
    memcpy(&half, in + 2 * i, sizeof half);
    float value = half_to_float(half);
    memcpy(out + 4 * i, &value, sizeof value);
  }
}

static void bf16s_to_floats(const uint8_t *restrict in, uint8_t *restrict out, size_t n) {
  for (size_t i = 0; i < n; i++) {
    uint16_t upper;
    memcpy(&upper, in + 2 * i, sizeof upper);
    uint32_t bits = (uint32_t)upper << 16;
    memcpy(out + 4 * i, &bits, sizeof bits);
  }
}

static void floats_to_halves(const uint8_t *restrict in, uint8_t *restrict out, size_t n) {
  const size_t done = converts_halves() ? qkvi_floats_to_halves(in, out, n) : 0;
  for (size_t i = done; i < n; i++) {
    float value;
    memcpy(&value, in + 4 * i, sizeof value);
    uint16_t half = float_to_half(value);
    memcpy(out + 2 * i, &half, sizeof half);
  }
}

static void floats_to_bf16s(const uint8_t *restrict in, uint8_t *restrict out, size_t n) {
  for (size_t i = 0; i < n; i++) {
    float value;
    memcpy(&value, in + 4 * i, sizeof value);
    uint16_t upper = float_to_bf16(value);
    memcpy(out + 2 * i, &upper, sizeof upper);
  }
}

void qkv_to_float(qkv_dtype dtype, const void *in, float *out, size_t n) {
  if (n == 0) return;
  switch (dtype) {
    case QKV_FP32:
      memcpy(out, in, n * sizeof *out);
      return;
    case QKV_FP16:
      halves_to_floats(in, (uint8_t *)out, n);
      return;
    case QKV_BF16:
      bf16s_to_floats(in, (uint8_t *)out, n);
      return;
    case QKV_DTYPE_NONE:
      break;
  }
  assert(!"a dtype that was not checked");
}

void qkv_from_float(qkv_dtype dtype, const float *in, void *out, size_t n) {
  if (n == 0) return;
  switch (dtype) {
    case QKV_FP32:
      memcpy(out, in, n * sizeof *in);
      return;
    case QKV_FP16:
      floats_to_halves((const uint8_t *)in, out, n);
      return;
    case QKV_BF16:
      floats_to_bf16s((const uint8_t *)in, out, n);
      return;
    case QKV_DTYPE_NONE:
      break;
  }
  assert(!"a dtype that was not checked");
}

// ---- Tensors ----

void qkv_tensor_strides(qkv_dtype dtype, int rank, const int64_t *dims, int64_t *strides) {
  assert(rank >= 0 && rank <= QKV_TENSOR_RANK_MAX);
  int64_t stride = (int64_t)qkv_dtype_size(dtype);
  for (int i = rank - 1; i >= 0; i--) {
    strides[i] = stride;
    stride = (int64_t)((uint64_t)stride * (uint64_t)dims[i]);  // an overflow is qkv_tensor_check's to find
  }
}

qkv_tensor qkv_tensor_dense(qkv_dtype dtype, int rank, const int64_t *dims, const qkv_segment *segment) {
  assert(rank >= 0 && rank <= QKV_TENSOR_RANK_MAX);
  qkv_tensor tensor = {.dtype = dtype, .rank = rank, .data = qkv_bytes_of(segment)};
  for (int i = 0; i < rank; i++) tensor.dims[i] = dims[i];
  qkv_tensor_strides(dtype, rank, dims, tensor.strides);
  return tensor;
}

qkv_status qkv_tensor_bytes(qkv_dtype dtype, int rank, const int64_t *dims, int64_t *bytes) {
  int64_t total = (int64_t)qkv_dtype_size(dtype);
  if (total == 0) return QKV_INVALID_ARGUMENT;
  for (int i = 0; i < rank; i++) {
    if (dims[i] < 0 || __builtin_mul_overflow(total, dims[i], &total)) return QKV_INVALID_ARGUMENT;
  }
  *bytes = total;
  return QKV_OK;
}

static qkv_status check_shape(const qkv_tensor *tensor, const char *name, int rank, qkv_error *error) {
  if (qkv_dtype_size(tensor->dtype) == 0) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s.dtype is %d, allowed are 1 (fp32), 2 (fp16) and 3 (bf16)", name,
                    (int)tensor->dtype);
  }
  if (tensor->rank != rank) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s.dims has %d entries, %d are needed", name, tensor->rank, rank);
  }
  for (int i = 0; i < rank; i++) {
    if (tensor->dims[i] < 1) {
      return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s.dims[%d] is %" PRId64 ", at least 1", name, i,
                      tensor->dims[i]);
    }
  }
  int64_t bytes = 0;
  if (qkv_tensor_bytes(tensor->dtype, rank, tensor->dims, &bytes) != QKV_OK) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s.dims are more than %" PRId64 " bytes", name, INT64_MAX);
  }
  return QKV_OK;
}

static qkv_status check_strides(const qkv_tensor *tensor, const char *name, qkv_error *error) {
  int64_t element = (int64_t)qkv_dtype_size(tensor->dtype);
  assert(element > 0);
  for (int i = 0; i < tensor->rank; i++) {
    int64_t stride = tensor->strides[i];
    if (stride < 0) {
      return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s.strides[%d] is %" PRId64 ", at least 0", name, i, stride);
    }
    if (stride % element != 0) {
      return qkv_fail(error, QKV_INVALID_ARGUMENT,
                      "%s.strides[%d] is %" PRId64 ", a multiple of %" PRId64 " (%s) is needed", name, i, stride,
                      element, qkv_dtype_name(tensor->dtype));
    }
  }
  int last = tensor->rank - 1;
  if (tensor->strides[last] != element) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT,
                    "%s.strides[%d] is %" PRId64 ", rows are contiguous: %" PRId64 " is needed", name, last,
                    tensor->strides[last], element);
  }
  return QKV_OK;
}

qkv_status qkv_tensor_reach(const qkv_tensor *tensor, int64_t *end) {
  *end = (int64_t)qkv_dtype_size(tensor->dtype);
  for (int i = 0; i < tensor->rank; i++) {
    int64_t span = 0;
    if (__builtin_mul_overflow(tensor->dims[i] - 1, tensor->strides[i], &span)) return QKV_INVALID_ARGUMENT;
    if (__builtin_add_overflow(*end, span, end)) return QKV_INVALID_ARGUMENT;
  }
  return QKV_OK;
}

qkv_status qkv_tensor_check(const qkv_tensor *tensor, const char *name, int rank, qkv_error *error) {
  assert(rank >= 1 && rank <= QKV_TENSOR_RANK_MAX);
  QKV_TRY(check_shape(tensor, name, rank, error));
  QKV_TRY(check_strides(tensor, name, error));
  int64_t end = 0;
  if (qkv_tensor_reach(tensor, &end) != QKV_OK) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s.dims and strides reach beyond %" PRId64 " bytes", name,
                    INT64_MAX);
  }
  if ((uint64_t)end > tensor->data.length) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s.data is %zu bytes, its dims and strides reach %" PRId64, name,
                    tensor->data.length, end);
  }
  return QKV_OK;
}

static size_t row_offset(const qkv_tensor *tensor, int64_t i, int64_t j) {
  assert(tensor->rank == 2 || tensor->rank == 3);
  assert(i >= 0 && i < tensor->dims[0]);
  if (tensor->rank == 2) return (size_t)(i * tensor->strides[0]);
  assert(j >= 0 && j < tensor->dims[1]);
  return (size_t)(i * tensor->strides[0] + j * tensor->strides[1]);
}

void qkv_tensor_row(const qkv_tensor *tensor, int64_t i, int64_t j, float *out) {
  size_t offset = row_offset(tensor, i, j);
  size_t left = (size_t)tensor->dims[tensor->rank - 1];
  size_t element = qkv_dtype_size(tensor->dtype);
  assert(element > 0);
  const uint8_t *row = qkv_bytes_contiguous(tensor->data, offset, left * element);
  if (row != NULL) {
    qkv_to_float(tensor->dtype, row, out, left);
    return;
  }
  uint8_t joined[1024];
  while (left > 0) {
    size_t n = left < sizeof joined / element ? left : sizeof joined / element;
    qkv_bytes_copy(tensor->data, offset, n * element, joined);
    qkv_to_float(tensor->dtype, joined, out, n);
    offset += n * element;
    out += n;
    left -= n;
  }
}

void qkv_tensor_row_raw(const qkv_tensor *tensor, int64_t i, int64_t j, void *out) {
  size_t length = (size_t)tensor->dims[tensor->rank - 1] * qkv_dtype_size(tensor->dtype);
  qkv_bytes_copy(tensor->data, row_offset(tensor, i, j), length, out);
}

// Magnitudes are in the order of their bits, NaN and infinity last; a difference below 0 leaves its sign.
static bool within_16(const uint8_t *bytes, size_t n, int16_t most) {
  int16_t signs = 0;
  for (size_t i = 0; i < n; i++) {
    int16_t bits;
    memcpy(&bits, bytes + i * sizeof bits, sizeof bits);
    signs = (int16_t)(signs | (most - (bits & INT16_MAX)));
  }
  return signs >= 0;
}

static bool within_32(const uint8_t *bytes, size_t n, int32_t most) {
  int32_t signs = 0;
  for (size_t i = 0; i < n; i++) {
    int32_t bits;
    memcpy(&bits, bytes + i * sizeof bits, sizeof bits);
    signs |= most - (bits & INT32_MAX);
  }
  return signs >= 0;
}

bool qkv_tensor_within(const qkv_tensor *tensor, int64_t i, float most) {
  const size_t element = qkv_dtype_size(tensor->dtype);
  size_t n = 1;
  for (int dim = tensor->rank - 1; dim > 0; dim--) {
    if (tensor->dims[dim] > 1 && tensor->strides[dim] != (int64_t)(n * element)) return false;
    n *= (size_t)tensor->dims[dim];
  }
  const uint8_t *bytes = qkv_bytes_contiguous(tensor->data, row_offset(tensor, i, 0), n * element);
  if (bytes == NULL) return false;
  int32_t bits = 0;
  qkv_from_float(tensor->dtype, &most, &bits, 1);
  return element == sizeof bits ? within_32(bytes, n, bits) : within_16(bytes, n, (int16_t)bits);
}
