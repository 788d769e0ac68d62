// Plain codes times factors, a vector of lanes at a time: mix.h says what. Several vectors of lanes and four rows of
// factors are worked on at once, so that a code is looked up once for four rows and a factor is loaded once for all
// vectors. Compiled once for each family.
#include "engine/kernel/mix.h"

#include "engine/kernel/mix_plain.h"
#include "engine/kernel/x86/lanes.h"
#include "engine/kernel/x86/lookup.h"
#include "engine/kernel/x86/variants.h"

#if !defined(__AVX512VNNI__)  // whose instructions are of no use here

#define INLINE static inline __attribute__((always_inline))

// As many sums as there are registers for.
#if defined(__AVX512F__)
enum { VECTORS = 4 };
#else
enum { VECTORS = 2 };
#endif
enum { ROWS = 4, STEPS = 8, BLOCKS = LANES / QKV_MIX_LANES };

// A step's part of the codes of a vector of lanes. Bits above it are not cleared.
INLINE words part_of(const uint8_t *section, size_t block_bytes, unsigned width, unsigned step) {
  const unsigned each = 8 / width;
  return load_bytes(section + step / each * QKV_MIX_LANES, block_bytes) >> step % each * width;
}

// The codes, below bits that are not cleared.
INLINE words code_of(const uint8_t *chunk, size_t block_bytes, unsigned bits, unsigned step) {
  words code = {0};
  for (unsigned width = 8, left = bits, at = 0; width > 0; width /= 2) {
    if ((bits & width) == 0) continue;
    left -= width;
    words part = part_of(chunk + at, block_bytes, width, step);
    if (at > 0) part &= (1u << width) - 1;
    code |= part << left;
    at += width * QKV_MIX_LANES;
  }
  return code;
}

INLINE lanes value_of(const float_table *table, words code, unsigned bits, int plain) {
  if (!plain) return find_floats(table, code, bits);
  if (bits < 8) code &= (1u << bits) - 1;
  return __builtin_convertvector((signed_words)code, lanes);
}

INLINE void mix_tile(const qkv_code_matrix *m, const float_table *table, unsigned bits, int plain, size_t vectors,
                     size_t rows, const uint8_t *codes, const float *factors, float *out, size_t stride) {
  const size_t block_bytes = m->steps * bits;
  lanes sums[ROWS][VECTORS];
  for (size_t i = 0; i < rows; i++) {
    for (size_t v = 0; v < vectors; v++) sums[i][v] = load_lanes(out + i * stride + v * LANES);
  }
  for (size_t step = 0; step < m->steps; step += STEPS, codes += QKV_MIX_LANES * (size_t)bits) {
    UNROLL
    for (unsigned s = 0; s < STEPS; s++) {
      lanes values[VECTORS];
      for (size_t v = 0; v < vectors; v++)
        values[v] = value_of(table, code_of(codes + v * BLOCKS * block_bytes, block_bytes, bits, s), bits, plain);
      for (size_t i = 0; i < rows; i++) {
        const lanes factor = all_lanes(factors[i * m->steps + step + s]);
        for (size_t v = 0; v < vectors; v++) sums[i][v] = multiply_add(factor, values[v], sums[i][v]);
      }
    }
  }
  for (size_t i = 0; i < rows; i++) {
    for (size_t v = 0; v < vectors; v++) store_lanes(out + i * stride + v * LANES, sums[i][v]);
  }
}

// So many vectors of lanes at a time, from `lane` on as long as there are as many; the first lane that is left. A
// constant `vectors`, so that sums stay in registers.
INLINE size_t mix_lanes(const qkv_code_matrix *m, const float_table *table, const float *factors, size_t n,
                        float *out, size_t stride, unsigned bits, int plain, size_t vectors, size_t lane) {
  for (; lane + vectors * LANES <= m->lanes; lane += vectors * LANES) {
    const uint8_t *codes = m->codes + lane / QKV_MIX_LANES * m->steps * bits;
    size_t i = 0;
    for (; vectors > 1 && i + ROWS <= n; i += ROWS)
      mix_tile(m, table, bits, plain, vectors, ROWS, codes, factors + i * m->steps, out + i * stride + lane, stride);
    for (; i < n; i++)
      mix_tile(m, table, bits, plain, vectors, 1, codes, factors + i * m->steps, out + i * stride + lane, stride);
  }
  return lane;
}

INLINE void mix_bits(const qkv_code_matrix *m, const float *factors, size_t n, float *out, size_t stride,
                     unsigned bits, int plain) {
  const float_table table = plain ? (float_table){.values = NULL} : make_table(m->values, bits);
  size_t lane = 0;
  if (VECTORS == 4) lane = mix_lanes(m, &table, factors, n, out, stride, bits, plain, 4, lane);
  lane = mix_lanes(m, &table, factors, n, out, stride, bits, plain, 2, lane);
  (void)mix_lanes(m, &table, factors, n, out, stride, bits, plain, 1, lane);
}

// What is left of the lanes: fewer than a vector has.
static void mix_rest(const qkv_code_matrix *m, const float *factors, size_t n, float *out, size_t stride) {
  const size_t first = m->lanes / LANES * LANES;
  qkv_code_matrix rest = *m;
  rest.codes += qkv_code_matrix_bytes(first, m->steps, m->bits);
  rest.lanes -= first;
  if (rest.lanes > 0) qkvi_mix_avx2(&rest, factors, n, out + first, stride);
}

#define CASE(b)                                                                  \
  case b:                                                                        \
    if (matrix->values == NULL) mix_bits(matrix, factors, n, out, stride, b, 1); \
    if (matrix->values != NULL) mix_bits(matrix, factors, n, out, stride, b, 0); \
    break;

QKV_DECLARE_MIX(VARIANT(qkvi_mix)) {
  switch (matrix->bits) {
    CASE(1)
    CASE(2)
    CASE(3)
    CASE(4)
    CASE(5)
    CASE(6)
    CASE(7)
    CASE(8)
  }
  if (LANES > QKV_MIX_LANES) mix_rest(matrix, factors, n, out, stride);
}

#else
QKV_DECLARE_MIX(VARIANT(qkvi_mix)) {
  qkvi_mix_avx512(matrix, factors, n, out, stride);
}
#endif

QKV_DECLARE_SCALE_FACTORS(VARIANT(qkvi_scale_factors)) {
  scale_factors_plain(factors, scales, zeros, n, steps, scaled, shares);
}
