#include "engine/codec/polarquant.h"

#include <math.h>
#include <string.h>

#include "engine/codec/hadamard.h"
#include "engine/codec/parts.h"
#include "engine/codec/sphere.h"
#include "engine/kernel/kernel.h"

enum { ID = 4, VERSION = 1, NUMBER_BYTES = 2, NORMS = 1, NO_NORMS = 2 };

#define RMS_MAX 65504.0f  // the largest number of fp16

static bool norms_valid(uint32_t norms) {
  return norms == NORMS || norms == NO_NORMS;
}

static const qkv_parameter parameters[] = {
    {.name = "row_norms", .fallback = NORMS, .valid = norms_valid, .text = "1 (stored) and 2 (none)"}};

typedef struct channels {
  float means[QKV_DIM_MAX], deviations[QKV_DIM_MAX];
  float rms[QKV_PAGE_TOKENS];  // 1 where none are stored
} channels;

static size_t rms_offset(const qkv_part_coder *coder) {
  return (size_t)2 * NUMBER_BYTES * coder->dim;
}

static bool has_norms(const qkv_part_coder *coder) {
  return coder->parameters[0] == NORMS;
}

static size_t code_offset(const qkv_part_coder *coder) {
  return rms_offset(coder) + (has_norms(coder) ? NUMBER_BYTES * QKV_PAGE_TOKENS : 0);
}

static void polarquant_init(qkv_part_coder *coder) {
  coder->block_bytes = (uint32_t)(code_offset(coder) + qkvi_part_code_bytes(coder));
  coder->tables = qkv_sphere_get(QKV_SPHERE_GAUSSIAN, coder->bits);
}

static void read_channels(const qkv_part_coder *coder, const uint8_t *block, channels *read) {
  qkv_to_float(QKV_BF16, block, read->means, coder->dim);
  qkv_to_float(QKV_BF16, block + (size_t)NUMBER_BYTES * coder->dim, read->deviations, coder->dim);
  for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) read->rms[t] = 1;
  if (has_norms(coder)) qkv_to_float(QKV_FP16, block + rms_offset(coder), read->rms, QKV_PAGE_TOKENS);
}

// Deviations are those from the means as they are stored: of a channel that is nearly constant the rounding of its
// mean is most of it, and no row is further off than all deviations together.
static void measure(const qkv_part_coder *coder, const float *rows, uint32_t tokens, uint8_t *block) {
  channels found;
  for (size_t c = 0; c < coder->dim; c++) {
    double sum = 0;
    for (size_t t = 0; t < tokens; t++) sum += (double)rows[t * coder->dim + c];
    found.means[c] = (float)(sum / tokens);
  }
  qkv_from_float(QKV_BF16, found.means, block, coder->dim);
  qkv_to_float(QKV_BF16, block, found.means, coder->dim);
  for (size_t c = 0; c < coder->dim; c++) {
    double square = 0;
    for (size_t t = 0; t < tokens; t++) {
      const double off = (double)rows[t * coder->dim + c] - (double)found.means[c];
      square += off * off;
    }
    found.deviations[c] = (float)sqrt(square / tokens);
  }
  qkv_from_float(QKV_BF16, found.deviations, block + (size_t)NUMBER_BYTES * coder->dim, coder->dim);
}

// The codes of a row, and the RMS that they are relative to.
static float code_row(const qkv_part_coder *coder, const channels *of, const float *row, uint8_t *codes) {
  float turned[QKV_DIM_MAX], rms = 1;
  double square = 0;
  for (size_t c = 0; c < coder->dim; c++) {
    turned[c] = of->deviations[c] > 0 ? (row[c] - of->means[c]) / of->deviations[c] : 0;
    square += (double)turned[c] * (double)turned[c];
  }
  if (has_norms(coder)) rms = fminf((float)sqrt(square / coder->dim), RMS_MAX);
  for (size_t c = 0; c < coder->dim; c++) turned[c] = rms > 0 ? turned[c] / rms : 0;
  qkv_hadamard_forward(turned, 1, coder->dim);
  for (size_t c = 0; c < coder->dim; c++) codes[c] = qkv_sphere_code(coder->tables, coder->bits, turned[c]);
  return rms;
}

// Under the block's means and deviations.
static void write_codes(const qkv_part_coder *coder, const float *rows, uint32_t tokens, uint8_t *block) {
  uint8_t codes[QKV_PAGE_TOKENS * QKV_DIM_MAX] = {0};
  channels of;
  read_channels(coder, block, &of);  // as they are stored
  memset(of.rms, 0, sizeof of.rms);
  for (uint32_t t = 0; t < tokens; t++)
    of.rms[t] = code_row(coder, &of, rows + t * coder->dim, codes + t * coder->dim);
  if (has_norms(coder)) qkv_from_float(QKV_FP16, of.rms, block + rms_offset(coder), QKV_PAGE_TOKENS);
  qkvi_part_pack(coder, codes, block + code_offset(coder));
}

static void polarquant_encode(const qkv_part_coder *coder, const float *rows, uint32_t tokens, uint8_t *block) {
  measure(coder, rows, tokens, block);
  write_codes(coder, rows, tokens, block);
}

static qkv_code_matrix matrix_of(const qkv_part_coder *coder, const uint8_t *block) {
  return (qkv_code_matrix){.codes = block + code_offset(coder),
                           .bits = coder->bits,
                           .lanes = qkvi_part_lanes(coder),
                           .steps = qkvi_part_steps(coder),
                           .values = ((const qkv_sphere *)coder->tables)->values};
}

static void polarquant_scores(const qkv_part_coder *coder, const uint8_t *block, const float *queries, size_t n,
                              qkv_precision precision, float *scores) {
  const qkv_code_matrix matrix = matrix_of(coder, block);
  const size_t dim = coder->dim;
  float turned[QKV_QUERY_BLOCK * QKV_DIM_MAX], shared[QKV_QUERY_BLOCK];
  channels of;
  read_channels(coder, block, &of);
  qkv_kernels_get()->scale_factors(queries, of.deviations, of.means, n, dim, turned, shared);
  qkv_hadamard_forward(turned, n, dim);
  memset(scores, 0, n * QKV_PAGE_TOKENS * sizeof *scores);
  qkvi_part_mix(&matrix, turned, n, precision, scores, QKV_PAGE_TOKENS);
  for (size_t i = 0; i < n; i++) {
    float *row = scores + i * QKV_PAGE_TOKENS;
    for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) row[t] = shared[i] + of.rms[t] * row[t];
  }
}

static void polarquant_accumulate(const qkv_part_coder *coder, const uint8_t *block, const float *weights, size_t n,
                                  qkv_precision precision, float *sums) {
  const qkv_code_matrix matrix = matrix_of(coder, block);
  const size_t dim = coder->dim;
  float turned[QKV_QUERY_BLOCK * QKV_DIM_MAX], scaled[QKV_QUERY_BLOCK * QKV_PAGE_TOKENS];
  float totals[QKV_QUERY_BLOCK];
  channels of;
  read_channels(coder, block, &of);
  memset(turned, 0, n * dim * sizeof *turned);
  qkv_kernels_get()->scale_factors(weights, of.rms, qkvi_weights_alike, n, QKV_PAGE_TOKENS, scaled, totals);
  qkvi_part_mix(&matrix, scaled, n, precision, turned, dim);
  qkv_hadamard_inverse(turned, n, dim);
  for (size_t i = 0; i < n; i++) {
    for (size_t c = 0; c < dim; c++)
      sums[i * dim + c] += totals[i] * of.means[c] + of.deviations[c] * turned[i * dim + c];
  }
}

// Rows [n][dim] of codes, in place from what these stand for, with rms [n].
static void restore(const qkv_part_coder *coder, const channels *of, const float *rms, const uint8_t *codes, size_t n,
                    float *rows) {
  const qkv_sphere *sphere = coder->tables;
  const size_t dim = coder->dim;
  for (size_t i = 0; i < n * dim; i++) rows[i] = rms[i / dim] * sphere->values[codes[i]];
  qkv_hadamard_inverse(rows, n, dim);
  for (size_t i = 0; i < n * dim; i++) rows[i] = of->means[i % dim] + of->deviations[i % dim] * rows[i];
}

static void polarquant_decode(const qkv_part_coder *coder, const uint8_t *block, float *rows) {
  uint8_t codes[QKV_PAGE_TOKENS * QKV_DIM_MAX];
  channels of;
  read_channels(coder, block, &of);
  qkvi_part_unpack(coder, block + code_offset(coder), codes);
  restore(coder, &of, of.rms, codes, QKV_PAGE_TOKENS, rows);
}

static void polarquant_round_trip(const qkv_part_coder *coder, const uint8_t *block, uint32_t slot, const float *row,
                                  float *decoded) {
  (void)slot;
  uint8_t codes[QKV_DIM_MAX], half[NUMBER_BYTES];
  channels of;
  read_channels(coder, block, &of);
  float rms = code_row(coder, &of, row, codes);
  qkv_from_float(QKV_FP16, &rms, half, 1);
  qkv_to_float(QKV_FP16, half, &rms, 1);
  restore(coder, &of, &rms, codes, 1, decoded);
}

static bool polarquant_matches(const qkv_part_coder *coder, const uint8_t *block, uint32_t slot, const float *row) {
  uint8_t codes[QKV_DIM_MAX];
  channels of;
  read_channels(coder, block, &of);
  const float rms = code_row(coder, &of, row, codes);
  uint8_t half[NUMBER_BYTES];
  qkv_from_float(QKV_FP16, &rms, half, 1);
  if (has_norms(coder) && memcmp(half, block + rms_offset(coder) + (size_t)slot * sizeof half, sizeof half) != 0)
    return false;
  for (size_t c = 0; c < coder->dim; c++) {
    if (qkvi_part_code(coder, block + code_offset(coder), slot, c) != codes[c]) return false;
    // No row is further from the mean than all deviations of the page's rows together, even if it is a difference
    // that has what was missed of those before it.
    const float furthest = QKV_PAGE_TOKENS * sqrtf(coder->dim) * of.deviations[c];
    if (fabsf(row[c] - of.means[c]) > furthest + 0x1p-7f * fabsf(of.means[c]) + 1e-30f) return false;
  }
  return true;
}

static const char *polarquant_validate(const qkv_part_coder *coder, const uint8_t *block) {
  channels of;
  read_channels(coder, block, &of);
  for (size_t c = 0; c < coder->dim; c++) {
    if (!(fabsf(of.means[c]) <= 2 * QKV_ROW_MAX)) return "a channel's mean is too large or no number";
    if (!(of.deviations[c] >= 0 && of.deviations[c] <= 2 * QKV_ROW_MAX))
      return "a channel's deviation is below 0, too large or no number";
  }
  for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) {
    if (!(of.rms[t] >= 0 && of.rms[t] <= 2 * QKV_ROW_MAX)) return "a row's RMS is below 0, too large or no number";
  }
  return NULL;
}

static double polarquant_error_bound(double bits) {
  return qkv_sphere_get(QKV_SPHERE_GAUSSIAN, (unsigned)bits)->distortion * 1.03;
}

static const qkv_part_codec part = {.id = ID,
                                    .version = VERSION,
                                    .init = polarquant_init,
                                    .encode = polarquant_encode,
                                    .scores = polarquant_scores,
                                    .accumulate = polarquant_accumulate,
                                    .decode = polarquant_decode,
                                    .round_trip = polarquant_round_trip,
                                    .share = measure,
                                    .encode_shared = write_codes,
                                    .matches = polarquant_matches,
                                    .validate = polarquant_validate};

const qkv_codec qkvi_codec_polarquant = {.id = ID,
                                         .name = "polarquant",
                                         .bits_valid = qkvi_whole_bits_valid,
                                         .bits_text = "whole numbers from 1 to 8 with polarquant",
                                         .parameters = parameters,
                                         .parameter_count = sizeof parameters / sizeof *parameters,
                                         .error_bound = polarquant_error_bound,
                                         .part = &part,
                                         QKV_CODEC_OF_PARTS};
