// The tensor types of GGUF files that can be read, and how their blocks become floats. The layouts are ggml's
// (ggml-common.h): a block of 32 elements has its scale, in fp16, before its codes.
#include <assert.h>
#include <string.h>

#include "client/format/gguf.h"
#include "engine/base/tensor.h"

enum { BLOCK = 32 };  // elements of a quantized type's block

static float half_at(const uint8_t *bytes) {
  float value;
  qkv_to_float(QKV_FP16, bytes, &value, 1);
  return value;
}

// [d fp16][16 bytes of codes]: d (code - 8); the low halves of the bytes are elements 0 to 15, the high ones the
// rest.
static void q4_0_to_float(const uint8_t *block, float *out) {
  const float d = half_at(block);
  for (int i = 0; i < BLOCK / 2; i++) {
    out[i] = d * (float)((block[2 + i] & 15) - 8);
    out[i + BLOCK / 2] = d * (float)((block[2 + i] >> 4) - 8);
  }
}

// [d fp16][m fp16][16 bytes of codes]: d code + m.
static void q4_1_to_float(const uint8_t *block, float *out) {
  const float d = half_at(block), m = half_at(block + 2);
  for (int i = 0; i < BLOCK / 2; i++) {
    out[i] = d * (float)(block[4 + i] & 15) + m;
    out[i + BLOCK / 2] = d * (float)(block[4 + i] >> 4) + m;
  }
}

// [d fp16][32 signed bytes]: d code.
static void q8_0_to_float(const uint8_t *block, float *out) {
  const float d = half_at(block);
  for (int i = 0; i < BLOCK; i++) out[i] = d * (float)(int8_t)block[2 + i];
}

typedef struct tensor_type {
  const char *name;
  size_t elements, bytes;  // of a block
  void (*to_float)(const uint8_t *block, float *out);
  qkv_gguf_type id;
  qkv_dtype dtype;  // of a type without blocks
} tensor_type;

static const tensor_type types[] = {
    {"F32", 1, 4, NULL, QKV_GGUF_F32, QKV_FP32},
    {"F16", 1, 2, NULL, QKV_GGUF_F16, QKV_FP16},
    {"BF16", 1, 2, NULL, QKV_GGUF_BF16, QKV_BF16},
    {"Q4_0", BLOCK, 2 + BLOCK / 2, q4_0_to_float, QKV_GGUF_Q4_0, QKV_DTYPE_NONE},
    {"Q4_1", BLOCK, 4 + BLOCK / 2, q4_1_to_float, QKV_GGUF_Q4_1, QKV_DTYPE_NONE},
    {"Q8_0", BLOCK, 2 + BLOCK, q8_0_to_float, QKV_GGUF_Q8_0, QKV_DTYPE_NONE},
};

static const tensor_type *find(uint32_t id) {
  for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
    if ((uint32_t)types[i].id == id) return &types[i];
  }
  return NULL;
}

const char *qkv_gguf_type_name(uint32_t type) {
  const tensor_type *found = find(type);
  return found != NULL ? found->name : NULL;
}

bool qkv_gguf_type_block(uint32_t type, size_t *elements, size_t *bytes) {
  const tensor_type *found = find(type);
  if (found == NULL) return false;
  *elements = found->elements;
  *bytes = found->bytes;
  return true;
}

void qkv_gguf_to_float(const qkv_gguf_tensor *tensor, float *out) {
  const tensor_type *type = find(tensor->type);
  assert(type != NULL && tensor->bytes == (size_t)tensor->count / type->elements * type->bytes);
  if (type->to_float == NULL) {
    qkv_to_float(type->dtype, tensor->data, out, (size_t)tensor->count);
    return;
  }
  const size_t blocks = (size_t)tensor->count / type->elements;
  for (size_t i = 0; i < blocks; i++) type->to_float(tensor->data + i * type->bytes, out + i * type->elements);
}
