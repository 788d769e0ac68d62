// Conversions of elements by the processor against the plain ones: every half and bfloat, and floats of all
// exponents, in runs whose lengths and alignments are odd.
#include <stdio.h>

#include "engine/base/tensor.h"
#include "tests/checkkern/checkkern.h"

enum { NARROW = 65536, FLOATS = 1 << 18, RUN_MAX = 100 };
static void convert(qkv_dtype dtype, bool to_float, const uint8_t *in, uint8_t *out, size_t n) {
  const size_t narrow = qkv_dtype_size(dtype), wide = sizeof(float);
  for (size_t i = 0, run = 1; i < n; i += run, run = run % RUN_MAX + 1) {
    if (run > n - i) run = n - i;
    if (to_float) {
      qkv_to_float(dtype, in + i * narrow, (float *)(void *)(out + i * wide), run);
    } else {
      qkv_from_float(dtype, (const float *)(const void *)(in + i * wide), out + i * narrow, run);
    }
  }
}

static size_t check_both(uint32_t cpu_flags, qkv_dtype dtype, bool to_float, const guarded *in, size_t n) {
  guarded expected = guarded_make(n * (to_float ? sizeof(float) : qkv_dtype_size(dtype)));
  guarded got = guarded_copy(&expected);
  qkv_tensor_setup(0);
  convert(dtype, to_float, in->data, expected.data, n);
  qkv_tensor_setup(cpu_flags);
  convert(dtype, to_float, in->data, got.data, n);
  const bool same = memcmp(expected.data, got.data, got.bytes) == 0 && guarded_intact(&got);
  if (!same) printf("conversion %s %s: FAILED\n", to_float ? "from" : "to", qkv_dtype_name(dtype));
  guarded_free(&expected);
  guarded_free(&got);
  return same ? 0 : 1;
}

size_t check_conversions(uint32_t cpu_flags) {
  naive_random random = {3};
  size_t failures = 0;
  guarded narrow = guarded_make(NARROW * sizeof(uint16_t)), wide = guarded_make(FLOATS * sizeof(uint32_t));
  for (size_t i = 0; i < NARROW; i++) ((uint16_t *)(void *)narrow.data)[i] = (uint16_t)i;
  for (size_t i = 0; i < FLOATS; i++) {
    // Any floats, what halves and bfloats are, what lies in the middle of two, and their neighbours.
    static const uint32_t masks[] = {UINT32_MAX, 0xffff8000, 0xfffff000, 0x87fff000};
    const uint32_t bits = (uint32_t)naive_next(&random) & masks[i % 4];
    ((uint32_t *)(void *)wide.data)[i] = bits + (i % 3 == 0 ? 1 : 0) - (i % 5 == 0 ? 1 : 0);
  }
  for (qkv_dtype dtype = QKV_FP16; dtype <= QKV_BF16; dtype++) {
    failures += check_both(cpu_flags, dtype, true, &narrow, NARROW);
    failures += check_both(cpu_flags, dtype, false, &wide, FLOATS);
  }
  qkv_tensor_setup(UINT32_MAX);
  guarded_free(&narrow);
  guarded_free(&wide);
  return failures;
}
