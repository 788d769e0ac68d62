// Encoding rows in vectors. Compiled once for AVX2 and once for AVX-512.
//
// The reference's sums run over eight lanes, so a vector holds eight coordinates of as many rows as it has eights.
// Codes of a group are gathered as bytes [token][coordinate] and then packed block by block.
#include <assert.h>
#include <math.h>
#include <stdbool.h>

#include "engine/codec/pack.h"
#include "engine/kernel/blocks.h"
#include "engine/kernel/kernel.h"
#include "engine/kernel/x86/lanes.h"
#include "engine/kernel/x86/twins.h"

enum { GROUP = QKV_GROUP_TOKENS, EIGHT = 8, ROWS = LANES / EIGHT, STEPS_MAX = QKV_DIM_MAX / EIGHT, ATTEMPTS = 3 };

// ---- Quantization ----

enum { IN_REGISTERS = 5 };  // depths whose tables have at most 16 entries

// The tables of one depth.
typedef struct quantizer {
  words first_middle;
  lookup middles[IN_REGISTERS + 1];
  lookup values;
} quantizer;

static inline __attribute__((always_inline)) quantizer quantizer_of(unsigned depth) {
  quantizer q = {.first_middle = (words){0} + qkvi_tables.middles[2][0]};
  const unsigned shallow = depth < IN_REGISTERS ? depth : IN_REGISTERS;
  for (unsigned d = 3; d <= shallow; d++) q.middles[d] = load_lookup(qkvi_tables.middles[d]);
  q.values = load_lookup(qkvi_tables.values[depth] + (1u << (depth - 1)));
  return q;
}

// Looks the cells of x up. `kept` gets the centroids; the result is a code less half the codes there are: the cell of
// a positive x, its complement of a negative one.
static inline __attribute__((always_inline)) words quantize(const quantizer *q, unsigned depth, lanes x,
                                                            lanes *kept) {
  const words negative = (words)(x < 0);
  // |x|; for a negative x the next smaller number, because -x on a boundary belongs to the cell nearer to 0.
  const words magnitude = ((words)x & 0x7fffffff) + negative;
  words cell = {0};
  if (depth >= 2) cell = one_up(cell, q->first_middle, magnitude);
  for (unsigned d = 3; d <= depth; d++) {
    const words middle =
        d <= IN_REGISTERS ? look_up(q->middles[d], cell) : (words)gather((const float *)qkvi_tables.middles[d], cell);
    cell = one_up(cell + cell, middle, magnitude);
  }
  const words value = depth <= IN_REGISTERS ? look_up(q->values, cell)
                                            : (words)gather(qkvi_tables.values[depth] + (1u << (depth - 1)), cell);
  *kept = (lanes)(value ^ (negative & 0x80000000));
  return cell ^ negative;
}

// ---- Rows ----

// Some rows and three ways to code each of them. Vectors hold eight coordinates of every row.
typedef struct attempts {
  lanes x[STEPS_MAX], weights[STEPS_MAX];
  lanes kept[STEPS_MAX][ATTEMPTS];
  words cells[STEPS_MAX][ATTEMPTS];                 // as of `quantize`
  lanes with_row[ATTEMPTS], with_itself[ATTEMPTS];  // weighted sums of kept * x and of kept * kept
} attempts;

// One number for every row and attempt: that of row r and attempt a is number QUAD * r + a, the others are any.
enum { QUAD = 4 };
typedef float numbers __attribute__((vector_size(32)));

// A row's number in every lane of the row.
static inline lanes spread(const numbers *all, size_t attempt) {
  const float *from = (const float *)all + attempt;
#if LANES == 16
  return (lanes)_mm512_insertf32x8(_mm512_set1_ps(from[0]), _mm256_set1_ps(from[QUAD]), 1);
#else
  return (lanes)_mm256_set1_ps(from[0]);
#endif
}

// The sums over each row's eight lanes, in their order.
static numbers row_sums(const lanes sums[ATTEMPTS]) {
  float in[EIGHT * EIGHT] = {0}, out[EIGHT * EIGHT];
  for (size_t i = 0; i < ATTEMPTS; i++) {
    for (size_t row = 0; row < ROWS; row++) {
      memcpy(in + (QUAD * row + i) * EIGHT, (const float *)&sums[i] + row * EIGHT, EIGHT * sizeof *in);
    }
  }
  transpose_eight(in, EIGHT, out, EIGHT);
  numbers all = {0};
  for (size_t i = 0; i < EIGHT; i++) all += load_eight(out + i * EIGHT);
  return all;
}

// Rows that are `dim` floats apart.
static void load_rows(const float *rows, size_t dim, size_t steps, lanes *x) {
  for (size_t s = 0; s < steps; s++) {
#if LANES == 16
    const __m512 first = _mm512_castps256_ps512(_mm256_loadu_ps(rows + s * EIGHT));
    x[s] = (lanes)_mm512_insertf32x8(first, _mm256_loadu_ps(rows + dim + s * EIGHT), 1);
#else
    (void)dim;
    x[s] = load_lanes(rows + s * EIGHT);
#endif
  }
}

static inline __attribute__((always_inline)) void quantize_run(unsigned depth, size_t begin, size_t end,
                                                               const lanes inverse[ATTEMPTS], attempts *a) {
  const quantizer q = quantizer_of(depth);
  lanes with_row[ATTEMPTS], with_itself[ATTEMPTS];
  memcpy(with_row, a->with_row, sizeof with_row);
  memcpy(with_itself, a->with_itself, sizeof with_itself);
  for (size_t s = begin; s < end; s++) {
    const lanes x = a->x[s], weight = a->weights[s], weighted = weight * x;
    for (size_t i = 0; i < ATTEMPTS; i++) {
      lanes kept;
      a->cells[s][i] = quantize(&q, depth, x * inverse[i], &kept);
      a->kept[s][i] = kept;
      with_row[i] += weighted * kept;
      with_itself[i] += weight * kept * kept;
    }
  }
  memcpy(a->with_row, with_row, sizeof with_row);
  memcpy(a->with_itself, with_itself, sizeof with_itself);
}

// The first step of the coordinates that have exactly `depth` bits.
static size_t first_step(const uint16_t *reach, unsigned depth) {
  return depth < QKV_DEPTH_MAX ? reach[depth + 1] / EIGHT : 0;
}

// Coordinates in the order of the reference's sums: from 0 on, so the deepest first.
static void quantize_rows(const uint16_t *reach, const lanes inverse[ATTEMPTS], attempts *a) {
  memset(a->with_row, 0, sizeof a->with_row);
  memset(a->with_itself, 0, sizeof a->with_itself);
  for (unsigned depth = QKV_DEPTH_MAX; depth >= 1; depth--) {
    const size_t begin = first_step(reach, depth), end = reach[depth] / EIGHT;
    if (begin == end) continue;
    switch (depth) {  // constants, so that the search has no loop
      case 1:
        quantize_run(1, begin, end, inverse, a);
        break;
      case 2:
        quantize_run(2, begin, end, inverse, a);
        break;
      case 3:
        quantize_run(3, begin, end, inverse, a);
        break;
      case 4:
        quantize_run(4, begin, end, inverse, a);
        break;
      default:
        quantize_run(depth, begin, end, inverse, a);
    }
  }
}

// The squared errors of the attempts with their gains.
static numbers squared_errors(const attempts *a, size_t steps, const numbers *gains) {
  lanes errors[ATTEMPTS] = {0}, factors[ATTEMPTS];
  for (size_t i = 0; i < ATTEMPTS; i++) factors[i] = spread(gains, i);
  for (size_t s = 0; s < steps; s++) {
    for (size_t i = 0; i < ATTEMPTS; i++) {
      const lanes miss = a->x[s] - factors[i] * a->kept[s][i];
      errors[i] += a->weights[s] * miss * miss;
    }
  }
  return row_sums(errors);
}

static void store_codes(const uint16_t *reach, const attempts *a, size_t attempt, size_t row, uint8_t *codes) {
  for (unsigned depth = QKV_DEPTH_MAX; depth >= 1; depth--) {
    const __m128i half = _mm_set1_epi32(1 << (depth - 1));
    for (size_t s = first_step(reach, depth); s < reach[depth] / (size_t)EIGHT; s++) {
      const __m128i *from = (const __m128i *)((const uint32_t *)&a->cells[s][attempt] + row * EIGHT);
      const __m128i low = _mm_add_epi32(_mm_loadu_si128(from), half);
      const __m128i high = _mm_add_epi32(_mm_loadu_si128(from + 1), half);
      const __m128i both = _mm_slli_epi16(_mm_packus_epi32(low, high), (int)(QKV_DEPTH_MAX - depth));
      _mm_storel_epi64((__m128i *)(codes + s * EIGHT), _mm_packus_epi16(both, both));
    }
  }
}

// The scales to try, and the numbers to multiply the rows with. Whether a row counts as zero.
static void choose_scales(const attempts *a, size_t steps, numbers *inverse, bool zero[ROWS]) {
  lanes squares[ATTEMPTS] = {0};
  for (size_t s = 0; s < steps; s++) {
    squares[0] += a->weights[s] * a->x[s] * a->x[s];
    squares[1] += a->weights[s];
  }
  const numbers sums = row_sums(squares);
  for (size_t row = 0; row < ROWS; row++) {
    const float rms = steps > 0 ? sqrtf(sums[QUAD * row] / sums[QUAD * row + 1]) : 0;
    zero[row] = rms < qkv_gain_value(1) / 2;
    const uint8_t middle = zero[row] ? 1 : qkvi_gain_nearest(rms);
    // Where a neighbour does not exist the middle is tried again, and does not win.
    float *out = (float *)inverse + QUAD * row;
    out[0] = 1 / qkv_gain_value(middle);
    out[1] = middle > 1 ? 1 / qkv_gain_value(middle - 1) : out[0];
    out[2] = middle < UINT8_MAX ? 1 / qkv_gain_value(middle + 1) : out[0];
  }
}

// Codes ROWS rows as reference.c's encode_row does. `codes` [ROWS][dim].
static void encode_rows(const uint16_t *reach, const float *weights, const float *rows, size_t dim, uint8_t *gains,
                        uint8_t *codes) {
  attempts a;
  const size_t steps = reach[1] / EIGHT;
  bool zero[ROWS];
  numbers inverse = {0}, values = {0};
  load_rows(rows, dim, steps, a.x);
  load_rows(weights, 0, steps, a.weights);
  choose_scales(&a, steps, &inverse, zero);
  quantize_rows(reach, (const lanes[ATTEMPTS]){spread(&inverse, 0), spread(&inverse, 1), spread(&inverse, 2)}, &a);
  const numbers factors = row_sums(a.with_row) / row_sums(a.with_itself);
  uint8_t fitted[ROWS * QUAD];
  for (size_t row = 0; row < ROWS; row++) {
    for (size_t i = QUAD * row; i < QUAD * row + ATTEMPTS; i++) {
      fitted[i] = zero[row] ? 0 : qkvi_gain_nearest(((const float *)&factors)[i]);
      ((float *)&values)[i] = qkv_gain_value(fitted[i]);
    }
  }
  const numbers errors = squared_errors(&a, steps, &values);
  for (size_t row = 0; row < ROWS; row++) {
    const float *error = (const float *)&errors + QUAD * row;
    size_t best = error[1] < error[0] ? 1 : 0;
    if (error[2] < error[best]) best = 2;
    gains[row] = fitted[QUAD * row + best];
    store_codes(reach, &a, best, row, codes + row * dim);
    if (zero[row]) memset(codes + row * dim, 0, steps * EIGHT);
  }
}

// ---- Packing ----

// out[j][i] = in[i][j] of 16 x 16 bytes.
static inline void transpose_bytes(const uint8_t *in, size_t in_stride, uint8_t *out, size_t out_stride) {
  __m128i r[GROUP], p[GROUP];
  for (size_t i = 0; i < GROUP; i++) r[i] = _mm_loadu_si128((const __m128i *)(in + i * in_stride));
  // Interleaving rows i and i + 8, four times, rotates the bits of (row, column) by four.
  for (int round = 0; round < 4; round++) {
    for (size_t i = 0; i < GROUP / 2; i++) {
      p[2 * i] = _mm_unpacklo_epi8(r[i], r[i + GROUP / 2]);
      p[2 * i + 1] = _mm_unpackhi_epi8(r[i], r[i + GROUP / 2]);
    }
    memcpy(r, p, sizeof r);
  }
  for (size_t i = 0; i < GROUP; i++) _mm_storeu_si128((__m128i *)(out + i * out_stride), r[i]);
}

// What a pair takes of the codes [item][lane] of a block, into its slab: two bits or, in a narrow slab, one.
static inline void pack_slab(const uint8_t *codes, size_t stride, unsigned pair, bool wide, unsigned half,
                             uint8_t *slab) {
  const unsigned from = QKV_DEPTH_MAX - 2 * pair - (wide ? 2 : 1), mask = wide ? 3 : 1;
  for (size_t lane = 0; lane < GROUP; lane += LANES) {
    words packed = load_words(slab + 4 * lane);
    for (unsigned item = 0; item < GROUP; item++) {
      const unsigned field = (item / 4) ^ (pair & 1), to = 8 * (item % 4) + 2 * field + half;
      packed |= (widen_bytes(codes + item * stride + lane) >> from & mask) << to;
    }
    memcpy(slab + 4 * lane, &packed, sizeof packed);
  }
}

static void pack_block(const qkvi_block *block, const uint8_t *codes, size_t stride, uint8_t *group) {
  const unsigned depth = qkvi_block_depth(block->kind);
  const bool high = block->kind == QKVI_BLOCK_1_HIGH || block->kind == QKVI_BLOCK_3_HIGH ||
                    block->kind == QKVI_BLOCK_5_HIGH || block->kind == QKVI_BLOCK_7_HIGH;
  for (unsigned pair = 0; 2 * pair < depth; pair++) {
    if (2 * pair + 2 <= depth) {
      pack_slab(codes, stride, pair, true, 0, group + block->slabs[pair]);
    } else {
      pack_slab(codes, stride, pair, false, high, group + block->slabs[pair]);
    }
  }
}

// `codes` [GROUP][dim] at full depth.
static void pack_scattered(qkv_part part, const qkv_schedule *schedule, unsigned tier, const uint8_t *codes,
                           uint8_t *group) {
  qkvi_codes columns[QKV_DIM_MAX];
  for (size_t t = 0; t < GROUP; t++) {
    for (size_t c = 0; c < schedule->reach[tier][1]; c++) columns[c][t] = codes[t * schedule->dim + c];
  }
  qkvi_pack(part, schedule, tier, columns, group);
}

static void pack_group(qkv_part part, const qkv_schedule *schedule, unsigned tier, const qkvi_tier_blocks *blocks,
                       const uint8_t *codes, uint8_t *group) {
  if (blocks->scattered + blocks->halves > 0) {
    pack_scattered(part, schedule, tier, codes, group);
    return;
  }
  memset(group, 0, qkv_schedule_group_bytes(schedule, tier));
  for (unsigned i = 0; i < blocks->count; i++) {
    const uint8_t *block = codes + (size_t)i * QKVI_BLOCK_WIDTH;
    if (part == QKV_V) {
      pack_block(&blocks->blocks[i], block, schedule->dim, group);
    } else {
      uint8_t columns[QKVI_BLOCK_WIDTH * GROUP];
      transpose_bytes(block, schedule->dim, columns, GROUP);
      pack_block(&blocks->blocks[i], columns, GROUP, group);
    }
  }
}

QKV_DECLARE_ENCODE(TWIN(qkvi_encode)) {
  assert(tier >= 1 && tier <= QKV_TIER_MAX);
  const size_t dim = schedule->dim;
  uint8_t group_codes[GROUP * QKV_DIM_MAX];  // [token][dim]
  if (weights == NULL) weights = qkvi_weights_alike;
  qkvi_tier_blocks blocks;
  qkvi_blocks_find(schedule, tier, &blocks);
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
    for (size_t t = 0; t < GROUP; t += ROWS) {
      const size_t slot = g * GROUP + t;
      encode_rows(schedule->reach[tier], weights, rows + slot * dim, dim, gains + slot, group_codes + t * dim);
    }
    pack_group(part, schedule, tier, &blocks, group_codes, codes);
    codes += qkv_schedule_group_bytes(schedule, tier);
  }
}
