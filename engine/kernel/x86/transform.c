// Transforms of rows in vectors: Hadamard and dense ones. Compiled once for each family.
#include <math.h>

#include "engine/kernel/kernel.h"
#include "engine/kernel/plain.h"
#include "engine/kernel/x86/lane_sums.h"
#include "engine/kernel/x86/lanes.h"
#include "engine/kernel/x86/variants.h"

// ---- Hadamard ----

enum { CHUNK = 32, BLOCK_MAX = 256, VECTORS_MAX = BLOCK_MAX / LANES };  // numbers, and vectors

// Sums to `a`, differences to `b`.
INLINE void meet(lanes *a, lanes *b, lanes low, lanes high) {
  *a = low + high;
  *b = low - high;
}

#if LANES == 16
// One step of two vectors, 32 numbers: neighbours meet, and the bits of a number's index move down by one. After five
// of them numbers are where they were.
INLINE void meet_neighbours(lanes *a, lanes *b) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  meet(a, b, (lanes)_mm512_permutex2var_ps((__m512)*a, even, (__m512)*b),
       (lanes)_mm512_permutex2var_ps((__m512)*a, odd, (__m512)*b));
}

// The steps within each two vectors.
INLINE void meet_within(lanes *v, size_t vectors) {
  UNROLL
  for (int step = 0; step < 5; step++) {
    UNROLL
    for (size_t i = 0; i < vectors; i += 2) meet_neighbours(&v[i], &v[i + 1]);
  }
}
#else
// One step within halves of two vectors: neighbours meet. The lowest bit of a number's index becomes that of its
// vector, whose bit becomes the higher one of the two within its half, and that the lower.
INLINE void meet_neighbours(lanes *a, lanes *b) {
  meet(a, b, (lanes)_mm256_shuffle_ps((__m256)*a, (__m256)*b, 0x88),
       (lanes)_mm256_shuffle_ps((__m256)*a, (__m256)*b, 0xdd));
}

// The steps within each two vectors: of neighbours, of numbers two apart, of halves, and of the two.
INLINE void meet_within(lanes *v, size_t vectors) {
  UNROLL
  for (size_t i = 0; i < vectors; i += 2) {
    lanes *a = &v[i], *b = &v[i + 1];
    meet_neighbours(a, b);
    meet_neighbours(a, b);
    meet(a, b, (lanes)_mm256_permute2f128_ps((__m256)*a, (__m256)*b, 0x20),
         (lanes)_mm256_permute2f128_ps((__m256)*a, (__m256)*b, 0x31));
    meet_neighbours(a, b);
    *a = (lanes)_mm256_permute4x64_pd((__m256d)*a, 0xd8);
    *b = (lanes)_mm256_permute4x64_pd((__m256d)*b, 0xd8);
  }
}
#endif

INLINE lanes flip(lanes all, const float *signs) {
  return (lanes)((words)all ^ load_words(signs));
}

// `vectors`, a power of two of at least 2, is a constant. Signs, as -0, are flipped before or after.
INLINE void transform_vectors(float *block, size_t vectors, const float *before, const float *after) {
  const float scale = 1.0f / sqrtf((float)(vectors * LANES));
  lanes v[VECTORS_MAX];
  UNROLL
  for (size_t i = 0; i < vectors; i++) {
    v[i] = load_lanes(block + i * LANES);
    if (before != NULL) v[i] = flip(v[i], before + i * LANES);
  }
  meet_within(v, vectors);
  UNROLL
  for (size_t half = 2; half < vectors; half *= 2) {
    UNROLL
    for (size_t i = 0; i < vectors; i++) {
      if ((i & half) == 0) meet(&v[i], &v[i + half], v[i], v[i + half]);
    }
  }
  UNROLL
  for (size_t i = 0; i < vectors; i++) {
    v[i] = v[i] * scale;
    if (after != NULL) v[i] = flip(v[i], after + i * LANES);
    store_lanes(block + i * LANES, v[i]);
  }
}

// The block of a row that begins with coordinate `start`, in every row.
INLINE void transform_blocks(float *rows, size_t n, size_t dim, size_t start, size_t size, const float *before,
                             const float *after) {
  const float *first = before != NULL ? before + start : NULL;
  const float *last = after != NULL ? after + start : NULL;
  for (size_t i = 0; i < n; i++) transform_vectors(rows + i * dim + start, size / LANES, first, last);
}

static bool fits_registers(size_t dim) {
  return dim % CHUNK == 0 && dim < 2 * BLOCK_MAX;
}

// Widths that are sums of 32, 64, 128 and 256.
static void transform_rows(float *rows, size_t n, size_t dim, const float *before, const float *after) {
  size_t start = 0;
  for (size_t size = BLOCK_MAX; size >= CHUNK; size /= 2) {
    if ((dim & size) == 0) continue;
    switch (size) {
      case 32:
        transform_blocks(rows, n, dim, start, 32, before, after);
        break;
      case 64:
        transform_blocks(rows, n, dim, start, 64, before, after);
        break;
      case 128:
        transform_blocks(rows, n, dim, start, 128, before, after);
        break;
      default:
        transform_blocks(rows, n, dim, start, 256, before, after);
    }
    start += size;
  }
}

// -0 where a sign is flipped.
static void fill_signs(size_t dim, float *signs) {
  memset(signs, 0, dim * sizeof *signs);
  flip_signs(signs, dim);
}

QKV_DECLARE_HADAMARD(VARIANT(qkvi_hadamard_forward)) {
  _Alignas(64) float signs[2 * BLOCK_MAX];
  if (!fits_registers(dim)) return hadamard_forward_plain(rows, n, dim);
  fill_signs(dim, signs);
  transform_rows(rows, n, dim, signs, NULL);
}

QKV_DECLARE_HADAMARD(VARIANT(qkvi_hadamard_inverse)) {
  _Alignas(64) float signs[2 * BLOCK_MAX];
  if (!fits_registers(dim)) return hadamard_inverse_plain(rows, n, dim);
  fill_signs(dim, signs);
  transform_rows(rows, n, dim, NULL, signs);
}

// ---- Dense ----

// Rows and, of the matrix, rows or vectors that are taken at once: their products fill the registers.
enum { ROWS = LANES == 16 ? 4 : 2, ACROSS = 4, EIGHT = 8 };

#if LANES == 16
// Lanes below `count`.
INLINE lanes load_some(const float *from, size_t count) {
  return (lanes)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), from);
}

// out[i * dim + c] = rows[i] . matrix[c], for i < ROWS and c < ACROSS.
INLINE void multiply_tile(const float *matrix, size_t dim, const float *rows, float *out) {
  lanes sums[ROWS * ACROSS] = {0};
  size_t j = 0;
  for (; j + LANES <= dim; j += LANES) {
    lanes x[ROWS];
    UNROLL
    for (size_t i = 0; i < ROWS; i++) x[i] = load_lanes(rows + i * dim + j);
    UNROLL
    for (size_t c = 0; c < ACROSS; c++) {
      const lanes y = load_lanes(matrix + c * dim + j);
      UNROLL
      for (size_t i = 0; i < ROWS; i++) sums[i * ACROSS + c] += y * x[i];
    }
  }
  if (j < dim) {  // eight lanes
    UNROLL
    for (size_t i = 0; i < ROWS; i++) {
      const lanes x = load_some(rows + i * dim + j, EIGHT);
      UNROLL
      for (size_t c = 0; c < ACROSS; c++) {
        const lanes next = sums[i * ACROSS + c] + load_some(matrix + c * dim + j, EIGHT) * x;
        sums[i * ACROSS + c] = (lanes)_mm512_mask_mov_ps((__m512)sums[i * ACROSS + c], 0x00ff, (__m512)next);
      }
    }
  }
  float all[ROWS * ACROSS];
  _mm512_storeu_ps(all, add_lanes_of_16((__m512 *)sums, false));
  for (size_t i = 0; i < ROWS; i++) memcpy(out + i * dim, all + i * ACROSS, ACROSS * sizeof *out);
}
#endif

INLINE float multiply_one(const float *matrix, size_t dim, const float *row) {
  lanes sums[SUM_VECTORS] = {0};
  size_t j = 0;
  for (; j + 16 <= dim; j += 16) {
    for (size_t i = 0; i < SUM_VECTORS; i++) {
      sums[i] += load_lanes(matrix + j + i * LANES) * load_lanes(row + j + i * LANES);
    }
  }
  if (j < dim) {
    eight low;
    memcpy(&low, sums, sizeof low);
    low += load_eight(matrix + j) * load_eight(row + j);
    memcpy(sums, &low, sizeof low);
  }
  return add_lanes(sums);
}

QKV_DECLARE_DENSE(VARIANT(qkvi_multiply)) {
  float out[ROWS * QKV_DIM_MAX];
  for (size_t i = 0; i < n;) {
    const size_t count = n - i < ROWS ? 1 : ROWS;
    size_t c = 0;
#if LANES == 16
    for (; count == ROWS && c + ACROSS <= coordinates; c += ACROSS) {
      multiply_tile(matrix + c * dim, dim, rows, out + c);
    }
#endif
    for (; c < coordinates; c++) {
      for (size_t k = 0; k < count; k++) out[k * dim + c] = multiply_one(matrix + c * dim, dim, rows + k * dim);
    }
    for (size_t k = 0; k < count; k++) {
      memcpy(rows + k * dim, out + k * dim, coordinates * sizeof *rows);
      memset(rows + k * dim + coordinates, 0, (dim - coordinates) * sizeof *rows);
    }
    rows += count * dim;
    i += count;
  }
}

// out[i * dim + j] for i < count rows and `vectors` vectors of j.
INLINE void combine_tile(const float *matrix, size_t dim, size_t coordinates, const float *rows, size_t count,
                         size_t vectors, float *out) {
  lanes sums[ROWS][ACROSS] = {0};
  for (size_t c = 0; c < coordinates; c++) {
    lanes y[ACROSS];
    UNROLL
    for (size_t v = 0; v < vectors; v++) y[v] = load_lanes(matrix + c * dim + v * LANES);
    UNROLL
    for (size_t i = 0; i < count; i++) {
      UNROLL
      for (size_t v = 0; v < vectors; v++) sums[i][v] += rows[i * dim + c] * y[v];
    }
  }
  UNROLL
  for (size_t i = 0; i < count; i++) {
    UNROLL
    for (size_t v = 0; v < vectors; v++) store_lanes(out + i * dim + v * LANES, sums[i][v]);
  }
}

INLINE void combine_rows(const float *matrix, size_t dim, size_t coordinates, const float *rows, size_t count,
                         float *out) {
  size_t j = 0;
  for (; j + ACROSS * LANES <= dim; j += ACROSS * LANES) {
    combine_tile(matrix + j, dim, coordinates, rows, count, ACROSS, out + j);
  }
  for (; j + LANES <= dim; j += LANES) combine_tile(matrix + j, dim, coordinates, rows, count, 1, out + j);
  for (; j < dim; j += EIGHT) {
    for (size_t i = 0; i < count; i++) {
      eight sum = {0};
      for (size_t c = 0; c < coordinates; c++) sum += rows[i * dim + c] * load_eight(matrix + c * dim + j);
      store_eight(out + i * dim + j, sum);
    }
  }
}

QKV_DECLARE_DENSE(VARIANT(qkvi_combine)) {
  float out[ROWS * QKV_DIM_MAX];
  size_t i = 0;
  for (; i + ROWS <= n; i += ROWS, rows += ROWS * dim) {
    combine_rows(matrix, dim, coordinates, rows, ROWS, out);
    memcpy(rows, out, ROWS * dim * sizeof *rows);
  }
  for (; i < n; i++, rows += dim) {
    combine_rows(matrix, dim, coordinates, rows, 1, out);
    memcpy(rows, out, dim * sizeof *rows);
  }
}
