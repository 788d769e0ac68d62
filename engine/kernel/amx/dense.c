// Dense transforms in whole numbers (kernel/dense.h) by AMX: tiles of 16 rows, and of 16 outputs, of up to 64 bytes.
//
// A number of 16 bits is h 256 + l, h signed and l not. So a sum of products is that of four products of bytes,
//
//   sum a x = 65536 sum ah xh + 256 (sum ah xl + sum al xh) + sum al xl
//
// each with 32 bits. They may wrap around; the sum, which fits (dense.h), does not see that. 64 rows of 128 took 4.8
// us, VNNI's products of 16 bits 6.6 us (checkkern --bench 'multiply 16', Sapphire Rapids, its other thread busy).
//
// The system must have allowed tiles, which qkv_cpu_flags (engine/base/cpu.h) asks for; else the first instruction on
// them is illegal.
#include <assert.h>
#include <immintrin.h>
#include <string.h>

#include "engine/kernel/dense.h"
#include "engine/kernel/kernel.h"
#include "engine/kernel/x86/dense_words.h"

enum {
  SIDE = 16,                 // rows, or outputs, of a tile
  ROWS = 2 * SIDE,           // that meet a tile of outputs one after the other: no sum waits for itself
  DEEP = 64,                 // bytes of a tile's row: coordinates of a step
  BATCH = 2 * ROWS,          // rows at once
  PADDED_MAX = QKV_DIM_MAX,  // coordinates up to whole steps
  TILES = 8,
};
// Tiles: sums of the first 16 rows and of the others, numbers of rows, and of the matrix. Instructions have their
// numbers in their names.
#define HIGH_0 0
#define MIXED_0 1
#define LOW_0 2
#define HIGH_1 3
#define MIXED_1 4
#define LOW_1 5
#define NUMBERS 6
#define OUTPUTS 7
_Static_assert(QKVI_DENSE_OUTPUTS == SIDE && QKV_DIM_MAX % DEEP == 0, "tiles");

// Rows in whole numbers, [rows][padded], zeros behind a row's coordinates.
typedef struct split_rows {
  _Alignas(64) uint8_t high[BATCH * PADDED_MAX];
  _Alignas(64) uint8_t low[BATCH * PADDED_MAX];
  float scales[BATCH];
} split_rows;

// 16 outputs of a matrix, [padded / 4][outputs][4], in the order of rows' bytes.
typedef struct split_outputs {
  _Alignas(64) uint8_t high[SIDE * PADDED_MAX];
  _Alignas(64) uint8_t low[SIDE * PADDED_MAX];
} split_outputs;

typedef struct tile_config {
  _Alignas(64) uint8_t palette;
  uint8_t start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} tile_config;
_Static_assert(sizeof(tile_config) == 64, "tile_config");

static void configure_tiles(void) {
  tile_config config = {.palette = 1};
  for (size_t i = 0; i < TILES; i++) {
    config.row_bytes[i] = DEEP;
    config.rows[i] = SIDE;
  }
  _tile_loadconfig(&config);
}

// ---- Rows ----

// Bytes of 64 coordinates, by fours in the order of place_of.
static void split_row(const float *row, const float *mean, size_t dim, size_t padded, float factor, uint8_t *high,
                      uint8_t *low) {
  const __m512i ones = _mm512_set1_epi16(0xff);
  for (size_t j = 0; j < padded; j += DEEP) {
    const __m512i a =
        _mm512_packs_epi32(whole_numbers(row, mean, j, dim, factor), whole_numbers(row, mean, j + SIDE, dim, factor));
    const __m512i b = _mm512_packs_epi32(whole_numbers(row, mean, j + 2 * SIDE, dim, factor),
                                         whole_numbers(row, mean, j + 3 * SIDE, dim, factor));
    _mm512_store_si512(high + j, _mm512_packs_epi16(_mm512_srai_epi16(a, 8), _mm512_srai_epi16(b, 8)));
    _mm512_store_si512(low + j, _mm512_packus_epi16(_mm512_and_si512(a, ones), _mm512_and_si512(b, ones)));
  }
}

// Where the i-th four of the coordinates of a step lie in it: packing takes 16 bytes from each quarter of its
// vectors.
static size_t place_of(size_t i) {
  return i % 4 * 4 + i / 4;
}

// Fills the tiles that `count` rows reach into.
static void split_batch(const float *rows, const float *mean, size_t dim, size_t padded, size_t count,
                        split_rows *out) {
  const size_t whole = (count + ROWS - 1) / ROWS * ROWS;
  float factors[BATCH];
  find_scales(rows, mean, dim, count, factors, out->scales);
  for (size_t i = 0; i < count; i++) {
    split_row(rows + i * dim, mean, dim, padded, factors[i], out->high + i * padded, out->low + i * padded);
  }
  memset(out->high + count * padded, 0, (whole - count) * padded);
  memset(out->low + count * padded, 0, (whole - count) * padded);
}

// ---- Products ----

// The 16 outputs from words [dim / 2][16][2] on.
static void split_matrix(const int16_t *from, size_t dim, size_t padded, split_outputs *out) {
  _Alignas(64) uint8_t odd[64], even[64];  // of two vectors' bytes
  for (size_t i = 0; i < 64; i++) {
    const size_t word = i % 4 / 2 * 32 + i / 4 * 2 + i % 2;  // output i / 4, coordinate i % 4
    odd[i] = (uint8_t)(2 * word + 1);
    even[i] = (uint8_t)(2 * word);
  }
  const __m512i highs = _mm512_load_si512(odd), lows = _mm512_load_si512(even);
  if (padded > dim) {
    memset(out->high + (padded - DEEP) * SIDE, 0, DEEP * SIDE);
    memset(out->low + (padded - DEEP) * SIDE, 0, DEEP * SIDE);
  }
  for (size_t i = 0; i < dim / 4; i++, from += DEEP) {
    const size_t at = (i / SIDE * SIDE + place_of(i % SIDE)) * DEEP;
    const __m512i first = _mm512_loadu_si512(from), second = _mm512_loadu_si512(from + DEEP / 2);
    _mm512_store_si512(out->high + at, _mm512_permutex2var_epi8(first, highs, second));
    _mm512_store_si512(out->low + at, _mm512_permutex2var_epi8(first, lows, second));
  }
}

typedef struct tile_sums {
  _Alignas(64) int32_t high[ROWS][SIDE], mixed[ROWS][SIDE], low[ROWS][SIDE];
} tile_sums;

// Of ROWS rows.
static void multiply_tiles(const uint8_t *high, const uint8_t *low, const split_outputs *outputs, size_t padded,
                           tile_sums *sums) {
  const size_t other = SIDE * padded;
  _tile_zero(HIGH_0);
  _tile_zero(MIXED_0);
  _tile_zero(LOW_0);
  _tile_zero(HIGH_1);
  _tile_zero(MIXED_1);
  _tile_zero(LOW_1);
  for (size_t j = 0; j < padded; j += DEEP, high += DEEP, low += DEEP) {
    _tile_loadd(OUTPUTS, outputs->high + j * SIDE, DEEP);
    _tile_loadd(NUMBERS, high, padded);
    _tile_dpbssd(HIGH_0, NUMBERS, OUTPUTS);
    _tile_loadd(NUMBERS, low, padded);
    _tile_dpbusd(MIXED_0, NUMBERS, OUTPUTS);
    _tile_loadd(NUMBERS, high + other, padded);
    _tile_dpbssd(HIGH_1, NUMBERS, OUTPUTS);
    _tile_loadd(NUMBERS, low + other, padded);
    _tile_dpbusd(MIXED_1, NUMBERS, OUTPUTS);
    _tile_loadd(OUTPUTS, outputs->low + j * SIDE, DEEP);
    _tile_loadd(NUMBERS, low, padded);
    _tile_dpbuud(LOW_0, NUMBERS, OUTPUTS);
    _tile_loadd(NUMBERS, high, padded);
    _tile_dpbsud(MIXED_0, NUMBERS, OUTPUTS);
    _tile_loadd(NUMBERS, low + other, padded);
    _tile_dpbuud(LOW_1, NUMBERS, OUTPUTS);
    _tile_loadd(NUMBERS, high + other, padded);
    _tile_dpbsud(MIXED_1, NUMBERS, OUTPUTS);
  }
  _tile_stored(HIGH_0, sums->high, DEEP);
  _tile_stored(MIXED_0, sums->mixed, DEEP);
  _tile_stored(LOW_0, sums->low, DEEP);
  _tile_stored(HIGH_1, sums->high[SIDE], DEEP);
  _tile_stored(MIXED_1, sums->mixed[SIDE], DEEP);
  _tile_stored(LOW_1, sums->low[SIDE], DEEP);
}

// Outputs [c, c + 16) of `count` rows, as far as a row reaches.
static void store_tile(const tile_sums *sums, const float *matrix_scales, const float *scales, const float *added,
                       size_t count, size_t c, size_t dim, float *rows) {
  const __m512 own = _mm512_loadu_ps(matrix_scales + c);
  const __mmask16 mask = c + SIDE <= dim ? 0xffff : 0x00ff;
  const __m512 more = _mm512_maskz_loadu_ps(mask, added + c);
  for (size_t i = 0; i < count; i++) {
    const __m512i high = _mm512_slli_epi32(_mm512_load_si512(sums->high[i]), 16);
    const __m512i mixed = _mm512_slli_epi32(_mm512_load_si512(sums->mixed[i]), 8);
    const __m512i all = _mm512_add_epi32(_mm512_add_epi32(high, mixed), _mm512_load_si512(sums->low[i]));
    const __m512 scale = _mm512_mul_ps(own, _mm512_set1_ps(scales[i]));
    const __m512 output = _mm512_add_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(all), scale), more);
    _mm512_mask_storeu_ps(rows + i * dim + c, mask, output);
  }
}

static void multiply_batch(const qkv_dense *matrix, size_t coordinates, size_t count, const float *mean,
                           const float *added, float *rows) {
  const size_t dim = matrix->dim, padded = (dim + DEEP - 1) / DEEP * DEEP;
  split_rows x;
  split_outputs outputs;
  tile_sums sums;
  split_batch(rows, mean, dim, padded, count, &x);
  for (size_t c = 0; c < coordinates; c += SIDE) {
    split_matrix(matrix->words + c * dim, dim, padded, &outputs);
    for (size_t i = 0; i < count; i += ROWS) {
      const size_t here = count - i < ROWS ? count - i : ROWS;
      multiply_tiles(x.high + i * padded, x.low + i * padded, &outputs, padded, &sums);
      store_tile(&sums, matrix->scales, x.scales + i, added, here, c, dim, rows + i * dim);
    }
  }
  for (size_t i = 0; coordinates < dim && i < count; i++) {
    memset(rows + i * dim + coordinates, 0, (dim - coordinates) * sizeof *rows);
  }
}

QKV_DECLARE_MULTIPLY_INTEGER(qkvi_multiply_integer_amx) {
  static const float zeros[QKV_DIM_MAX];
  assert(coordinates <= matrix->outputs && matrix->outputs <= matrix->dim);
  if (n < SIDE) return qkvi_multiply_integer_avx512_vnni(matrix, coordinates, mean, added, rows, n);
  if (mean == NULL) mean = zeros;
  if (added == NULL) added = zeros;
  configure_tiles();
  for (size_t i = 0; i < n; i += BATCH) {
    const size_t count = n - i < BATCH ? n - i : BATCH;
    multiply_batch(matrix, coordinates, count, mean, added, rows + i * matrix->dim);
  }
  _tile_release();  // so that switches to other threads need not save them
}
