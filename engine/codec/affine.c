#include "engine/codec/affine.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#include "engine/codec/row.h"
#include "engine/kernel/kernel.h"

enum { STEPS_MAX = QKV_DIM_MAX };

typedef struct affine {
  size_t lanes, steps, group, groups;
  qkv_dtype dtype;
} affine;

static const qkvi_affine_kind *kind_of(const qkv_part_coder *coder) {
  return coder->tables;
}

// The last group may have fewer lanes.
static affine affine_of(const qkv_part_coder *coder) {
  const size_t lanes = qkvi_part_lanes(coder), group = kind_of(coder)->group > 0 ? kind_of(coder)->group : lanes;
  return (affine){.lanes = lanes,
                  .steps = qkvi_part_steps(coder),
                  .group = group,
                  .groups = (lanes + group - 1) / group,
                  .dtype = kind_of(coder)->dtype};
}

static size_t number_bytes(const affine *as) {
  return as->groups * as->steps * qkv_dtype_size(as->dtype);
}

void qkvi_affine_init(qkv_part_coder *coder, const qkvi_affine_kind *kind) {
  coder->tables = kind;
  const affine as = affine_of(coder);
  coder->block_bytes = (uint32_t)(2 * number_bytes(&as) + qkvi_part_code_bytes(coder));
}

// The numbers of a group: scales and zeros [steps].
static void read_numbers(const affine *as, const uint8_t *block, size_t group, float *scales, float *zeros) {
  const uint8_t *at = block + group * as->steps * qkv_dtype_size(as->dtype);
  qkv_to_float(as->dtype, at, scales, as->steps);
  qkv_to_float(as->dtype, at + number_bytes(as), zeros, as->steps);
}

static void write_numbers(const affine *as, uint8_t *block, size_t group, const float *scales, const float *zeros) {
  uint8_t *at = block + group * as->steps * qkv_dtype_size(as->dtype);
  qkv_from_float(as->dtype, scales, at, as->steps);
  qkv_from_float(as->dtype, zeros, at + number_bytes(as), as->steps);
}

static const uint8_t *codes_of(const affine *as, const uint8_t *block) {
  return block + 2 * number_bytes(as);
}

uint8_t qkvi_affine_code(float x, float scale, float zero, unsigned most) {
  if (!(scale > 0)) return 0;
  const float code = rintf((x - zero) / scale);
  if (!(code > 0)) return 0;
  return code > (float)most ? (uint8_t)most : (uint8_t)code;
}

static size_t lanes_of(const affine *as, size_t group) {
  const size_t left = as->lanes - group * as->group;
  return left < as->group ? left : as->group;
}

// Where the number of a lane and a step is in rows [64][dim].
static size_t place(const qkv_part_coder *coder, size_t lane, size_t step) {
  return coder->part == QKV_K ? lane * coder->dim + step : step * coder->dim + lane;
}

static uint32_t slot_of(const qkv_part_coder *coder, size_t lane, size_t step) {
  return (uint32_t)(coder->part == QKV_K ? lane : step);
}

// The scale and the zero of one step of a group.
static void find_range(const qkv_part_coder *coder, const affine *as, size_t group, size_t step, const float *rows,
                       uint32_t tokens, float *scale, float *zero) {
  float least = INFINITY, most = -INFINITY;
  for (size_t i = 0; i < lanes_of(as, group); i++) {
    const size_t lane = group * as->group + i;
    if (slot_of(coder, lane, step) >= tokens) continue;
    const float x = rows[place(coder, lane, step)];
    least = x < least ? x : least;
    most = x > most ? x : most;
  }
  *zero = least <= most ? least : 0;
  *scale = least <= most ? (most - least) / (float)((1u << coder->bits) - 1) : 0;
}

// The numbers of all groups.
static void write_ranges(const qkv_part_coder *coder, const float *rows, uint32_t tokens, uint8_t *block) {
  const affine as = affine_of(coder);
  float scales[STEPS_MAX], zeros[STEPS_MAX];
  for (size_t group = 0; group < as.groups; group++) {
    for (size_t step = 0; step < as.steps; step++)
      find_range(coder, &as, group, step, rows, tokens, &scales[step], &zeros[step]);
    write_numbers(&as, block, group, scales, zeros);
  }
}

static void write_codes(const qkv_part_coder *coder, const float *rows, uint32_t tokens, uint8_t *block) {
  const affine as = affine_of(coder);
  float scales[STEPS_MAX], zeros[STEPS_MAX];
  uint8_t codes[QKV_PAGE_TOKENS * QKV_DIM_MAX] = {0};
  const unsigned most = (1u << coder->bits) - 1;
  for (size_t group = 0; group < as.groups; group++) {
    read_numbers(&as, block, group, scales, zeros);  // as they are stored
    for (size_t i = 0; i < lanes_of(&as, group); i++) {
      const size_t lane = group * as.group + i;
      for (size_t step = 0; step < as.steps; step++) {
        const size_t at = place(coder, lane, step);
        if (slot_of(coder, lane, step) < tokens)
          codes[at] = qkvi_affine_code(rows[at], scales[step], zeros[step], most);
      }
    }
  }
  qkvi_part_pack(coder, codes, (uint8_t *)codes_of(&as, block));
}

void qkvi_affine_encode(const qkv_part_coder *coder, const float *rows, uint32_t tokens, uint8_t *block) {
  write_ranges(coder, rows, tokens, block);
  write_codes(coder, rows, tokens, block);
}

void qkvi_affine_share(const qkv_part_coder *coder, const float *rows, uint32_t tokens, uint8_t *block) {
  if (coder->part == QKV_K) write_ranges(coder, rows, tokens, block);
}

void qkvi_affine_encode_shared(const qkv_part_coder *coder, const float *rows, uint32_t tokens, uint8_t *block) {
  if (coder->part == QKV_V) return qkvi_affine_encode(coder, rows, tokens, block);
  write_codes(coder, rows, tokens, block);
}

// A token's range of a group of channels, as it is stored.
static void range_of_value(const qkv_part_coder *coder, const affine *as, size_t group, const float *row,
                           float *scale, float *zero) {
  uint8_t stored[sizeof(float)];
  find_range(coder, as, group, 0, row, 1, scale, zero);
  qkv_from_float(as->dtype, scale, stored, 1);
  qkv_to_float(as->dtype, stored, scale, 1);
  qkv_from_float(as->dtype, zero, stored, 1);
  qkv_to_float(as->dtype, stored, zero, 1);
}

void qkvi_affine_round_trip(const qkv_part_coder *coder, const uint8_t *block, uint32_t slot, const float *row,
                            float *decoded) {
  const affine as = affine_of(coder);
  float scales[STEPS_MAX] = {0}, zeros[STEPS_MAX] = {0};
  const unsigned most = (1u << coder->bits) - 1;
  if (coder->part == QKV_K) read_numbers(&as, block, slot / as.group, scales, zeros);
  for (size_t group = 0; coder->part == QKV_V && group < as.groups; group++)
    range_of_value(coder, &as, group, row, &scales[group], &zeros[group]);
  for (size_t c = 0; c < coder->dim; c++) {
    const size_t at = coder->part == QKV_K ? c : c / as.group;
    decoded[c] = zeros[at] + scales[at] * (float)qkvi_affine_code(row[c], scales[at], zeros[at], most);
  }
}

void qkvi_affine_write_one(const qkv_part_coder *coder, const float *scales, const float *zeros, const uint8_t *codes,
                           uint8_t *block) {
  const affine as = affine_of(coder);
  assert(as.groups == 1);
  write_numbers(&as, block, 0, scales, zeros);
  qkvi_part_pack(coder, codes, (uint8_t *)codes_of(&as, block));
}

// row += weight * other, or + weight where there is none; n is a multiple of 8.
static void add_row(float *row, float weight, const float *other, size_t n) {
  for (size_t i = 0; i < n; i += QKVI_QUAD) {
    qkvi_quad x, y = {1, 1, 1, 1};
    qkvi_quad_load(row + i, &x);
    if (other != NULL) qkvi_quad_load(other + i, &y);
    x += weight * y;
    memcpy(row + i, &x, sizeof x);
  }
}

// out[n][lanes] += factors[n][steps] . values
static void mix(const qkv_part_coder *coder, const uint8_t *block, const float *factors, size_t n,
                qkv_precision precision, float *out) {
  const affine as = affine_of(coder);
  float scales[STEPS_MAX], zeros[STEPS_MAX], scaled[QKV_QUERY_BLOCK * STEPS_MAX], shares[QKV_QUERY_BLOCK];
  const size_t steps = as.steps;
  const float middle = (float)((1u << coder->bits) - 1) / 2;
  const uint8_t *codes = codes_of(&as, block);
  assert(n <= QKV_QUERY_BLOCK);
  for (size_t group = 0; group < as.groups; group++) {
    const size_t first = group * as.group, lanes = lanes_of(&as, group);
    read_numbers(&as, block, group, scales, zeros);
    if (qkvi_part_in_integers(coder->bits, precision)) add_row(zeros, middle, scales, steps);
    qkv_kernels_get()->scale_factors(factors, scales, zeros, n, steps, scaled, shares);
    for (size_t i = 0; i < n; i++) add_row(out + i * as.lanes + first, shares[i], NULL, lanes);
    const qkv_code_matrix matrix = {.codes = codes + qkv_code_matrix_bytes(first, steps, coder->bits),
                                    .bits = coder->bits,
                                    .lanes = lanes,
                                    .steps = steps};
    qkvi_part_mix(&matrix, scaled, n, precision, out + first, as.lanes);
  }
}

void qkvi_affine_scores(const qkv_part_coder *coder, const uint8_t *block, const float *queries, size_t n,
                        qkv_precision precision, float *scores) {
  memset(scores, 0, n * QKV_PAGE_TOKENS * sizeof *scores);
  mix(coder, block, queries, n, precision, scores);
}

void qkvi_affine_accumulate(const qkv_part_coder *coder, const uint8_t *block, const float *weights, size_t n,
                            qkv_precision precision, float *sums) {
  mix(coder, block, weights, n, precision, sums);
}

void qkvi_affine_decode(const qkv_part_coder *coder, const uint8_t *block, float *rows) {
  const affine as = affine_of(coder);
  float scales[STEPS_MAX], zeros[STEPS_MAX];
  uint8_t codes[QKV_PAGE_TOKENS * QKV_DIM_MAX];
  qkvi_part_unpack(coder, codes_of(&as, block), codes);
  for (size_t group = 0; group < as.groups; group++) {
    read_numbers(&as, block, group, scales, zeros);
    for (size_t i = 0; i < lanes_of(&as, group); i++) {
      for (size_t step = 0; step < as.steps; step++) {
        const size_t at = place(coder, group * as.group + i, step);
        rows[at] = zeros[step] + scales[step] * (float)codes[at];
      }
    }
  }
}

// How far a row may be out of its group's range, by what rounding the two numbers did to that: in a loop for all rows
// of the page.
static float rounding(const qkv_part_coder *coder, float x, float scale, float zero) {
  const float largest = fabsf(zero) + scale * (float)((1u << coder->bits) - 1);
  return 0x1p-14f + (coder->in_loop ? QKV_PAGE_TOKENS * 0x1p-11f * largest : 0x1p-10f * fabsf(x));
}

bool qkvi_affine_matches(const qkv_part_coder *coder, const uint8_t *block, uint32_t slot, const float *row) {
  const affine as = affine_of(coder);
  float scales[STEPS_MAX] = {0}, zeros[STEPS_MAX] = {0};
  const uint8_t *matrix = codes_of(&as, block);
  const unsigned most_off = coder->part == QKV_K ? kind_of(coder)->drift_keys : 0;
  size_t read = SIZE_MAX;
  for (size_t c = 0; c < coder->dim; c++) {
    const size_t lane = coder->part == QKV_K ? slot : c, step = coder->part == QKV_K ? c : slot;
    const size_t group = lane / as.group;
    if (group != read) read_numbers(&as, block, group, scales, zeros);
    read = group;
    const int is = qkvi_part_code(coder, matrix, slot, c);
    const int wanted = qkvi_affine_code(row[c], scales[step], zeros[step], (1u << coder->bits) - 1);
    if ((unsigned)(is > wanted ? is - wanted : wanted - is) > most_off) return false;
    // What no row of the group had been.
    const float off = fabsf(row[c] - (zeros[step] + scales[step] * (float)wanted));
    if (off > scales[step] + rounding(coder, row[c], scales[step], zeros[step])) return false;
  }
  return true;
}

const char *qkvi_affine_validate(const qkv_part_coder *coder, const uint8_t *block) {
  const affine as = affine_of(coder);
  float scales[STEPS_MAX], zeros[STEPS_MAX];
  for (size_t group = 0; group < as.groups; group++) {
    read_numbers(&as, block, group, scales, zeros);
    for (size_t step = 0; step < as.steps; step++) {
      if (!(scales[step] >= 0 && scales[step] <= 2 * QKV_ROW_MAX))
        return "a scale is below 0, too large or no number";
      if (!(fabsf(zeros[step]) <= 2 * QKV_ROW_MAX)) return "a zero point is too large or no number";
    }
  }
  return NULL;
}
