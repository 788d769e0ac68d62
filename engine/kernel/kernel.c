#include "engine/kernel/kernel.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "engine/base/cpu.h"
#include "engine/base/tensor.h"
#include "engine/kernel/plain.h"
#include "engine/kernel/table.h"

enum { STEPS = 8, GAIN_ONE = 128, GAIN_MIN = 1, GAIN_MAX = 255 };

// 2^(i / 8)
static const float roots[STEPS + 1] = {1.0f,        1.09050773f, 1.18920712f, 1.29683955f, 1.41421356f,
                                       1.54221083f, 1.68179283f, 1.83400809f, 2.0f};

float qkv_gain_value(uint8_t gain) {
  if (gain == 0) return 0;
  uint32_t bits;
  memcpy(&bits, &roots[gain % STEPS], sizeof bits);
  bits += (uint32_t)(gain / STEPS - GAIN_ONE / STEPS) << 23;  // the exponent; all are normal numbers
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

uint8_t qkvi_gain_nearest(float factor) {
  int exponent;
  const float mantissa = 2 * frexpf(factor, &exponent);  // [1, 2)
  int step = 0;                                          // without a branch: mantissas cannot be predicted
  for (int i = 0; i < STEPS; i++) step += mantissa > (roots[i] + roots[i + 1]) / 2;
  const int gain = GAIN_ONE + STEPS * (exponent - 1) + step;
  if (gain < GAIN_MIN) return GAIN_MIN;
  return (uint8_t)(gain > GAIN_MAX ? GAIN_MAX : gain);
}

float qkv_exp_negative(float x) {
  plain_floats all = {x};
  exp_negative(&all);
  return all[0];
}

// tanh(y) is odd: a polynomial below 1/2, else by the exponential.
static void soft_cap(float cap, float inverse, plain_floats *scores) {
  const plain_floats y = *scores * inverse, square = y * y;
  const plain_words sign = (plain_words)y & INT32_MIN;
  const plain_floats size = (plain_floats)((plain_words)y ^ sign);
  plain_floats small = square * -0.00694294181f + 0.0214706827f;
  small = small * square - 0.0539334677f;
  small = small * square + 0.133332253f;
  small = small * square - 0.333333313f;
  small = size + size * (square * small);
  plain_floats large = size * -2.0f;
  exp_negative(&large);
  large = (1.0f - large) / (1.0f + large);
  const plain_words below = size < 0.5f;
  const plain_words bits = ((plain_words)small & below) | ((plain_words)large & ~below) | sign;
  *scores = (plain_floats)bits * cap;
}

void qkv_soft_cap(float *scores, size_t n, float cap) {
  const float inverse = 1.0f / cap;
  for (size_t i = 0; i < n; i += PLAIN_WIDTH) {
    plain_floats some = {0};
    const size_t bytes = (n - i < PLAIN_WIDTH ? n - i : PLAIN_WIDTH) * sizeof *scores;
    memcpy(&some, scores + i, bytes);
    soft_cap(cap, inverse, &some);
    memcpy(scores + i, &some, bytes);
  }
}

#define ALIKE(x) x, x, x, x, x, x, x, x
#define ALIKE_64 ALIKE(1), ALIKE(1), ALIKE(1), ALIKE(1), ALIKE(1), ALIKE(1), ALIKE(1), ALIKE(1)
#define ALIKE_256 ALIKE_64, ALIKE_64, ALIKE_64, ALIKE_64
const float qkvi_weights_alike[QKV_DIM_MAX] = {ALIKE_256, ALIKE_256, ALIKE_256, ALIKE_256};

#if defined(__x86_64__) && !defined(QKV_WITHOUT_AVX512)
// The AMX rung: the AVX-512 VNNI table, except for kernels that AMX tiles do faster.
static qkv_kernels with_tiles;

static void fill_ladder(void) {
  with_tiles = qkvi_kernels_avx512_vnni;
  with_tiles.name = "amx";
  with_tiles.needs |= QKV_CPU_AMX;
  with_tiles.multiply_integer = qkvi_multiply_integer_amx;
}
#else
static void fill_ladder(void) {}
#endif

static const qkv_kernels *const ladder[] = {
    &qkvi_kernels_reference,
#if defined(__x86_64__)
    &qkvi_kernels_avx2,
#ifndef QKV_WITHOUT_AVX512
    &qkvi_kernels_avx512,    &qkvi_kernels_avx512_vnni, &with_tiles,
#endif
#elif defined(__aarch64__)
    &qkvi_kernels_neon,
    &qkvi_kernels_neon_dotprod,
#endif
};
enum { RUNGS = sizeof ladder / sizeof *ladder };

static void fill_once(void) {
  qkvi_tables_fill();
  fill_ladder();
}

const qkv_kernels *qkv_kernels_at(size_t row) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  (void)pthread_once(&once, fill_once);
  return row < RUNGS ? ladder[row] : NULL;
}

const qkv_kernels *qkv_kernels_for(uint32_t cpu_flags) {
  size_t highest = 0;  // the reference, which needs nothing
  for (size_t row = 1; row < RUNGS; row++) {
    if ((qkv_kernels_at(row)->needs & ~cpu_flags) == 0) highest = row;
  }
  return qkv_kernels_at(highest);
}

static _Atomic(const qkv_kernels *) in_use;

void qkv_kernels_setup(uint32_t cpu_mask) {
  qkv_tensor_setup(cpu_mask);
  atomic_store(&in_use, qkv_kernels_for(qkv_cpu_flags() & cpu_mask));
}

const qkv_kernels *qkv_kernels_get(void) {
  const qkv_kernels *kernels = atomic_load_explicit(&in_use, memory_order_acquire);
  return kernels != NULL ? kernels : qkv_kernels_for(qkv_cpu_flags());
}
