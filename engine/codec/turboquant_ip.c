#include "engine/codec/turboquant_ip.h"

#include <math.h>
#include <string.h>

#include "engine/codec/rotation.h"
#include "engine/codec/sized.h"
#include "engine/codec/sphere.h"
#include "engine/codec/turboquant.h"

enum { ID = 6, VERSION = 1, ALIGN = 64 };

static bool bits_valid(double bits) {
  return bits >= 2 && qkvi_whole_bits_valid(bits);
}

// The two parts of a block, each coded as one by itself.
static qkv_part_coder first_of(const qkv_part_coder *coder) {
  qkv_part_coder first = *coder;
  first.bits = (uint8_t)(coder->bits - 1);
  return first;
}

static qkv_part_coder signs_of(const qkv_part_coder *coder) {
  static const float values[] = {-1, 1};
  qkv_part_coder signs = *coder;
  signs.bits = 1;
  signs.tables = values;
  return signs;
}

static size_t signs_offset(const qkv_part_coder *coder) {
  const qkv_part_coder first = first_of(coder);
  return (qkvi_sized_bytes(&first) + ALIGN - 1) / ALIGN * ALIGN;
}

static void ip_init(qkv_part_coder *coder) {
  if (coder->part == QKV_V) {
    coder->codec = &qkvi_part_turboquant;
    coder->codec->init(coder);
    return;
  }
  const qkv_part_coder signs = signs_of(coder);
  coder->tables = qkv_sphere_get(coder->dim, coder->bits - 1u);
  coder->block_bytes = (uint32_t)(signs_offset(coder) + qkvi_sized_bytes(&signs));
}

// What a sign stands for, times the residual's RMS.
static float sign_value(const qkv_part_coder *coder) {
  return sqrtf((float)(1.57079632679489662 / coder->dim));
}

typedef struct coded_row {
  float rms, residual;  // RMS of both
  uint8_t codes[QKV_DIM_MAX], signs[QKV_DIM_MAX];
} coded_row;

static void code_row(const qkv_part_coder *coder, const float *row, coded_row *coded) {
  const qkv_part_coder first = first_of(coder);
  const float *values = ((const qkv_sphere *)coder->tables)->values;
  float rest[QKV_DIM_MAX];
  double square = 0;
  coded->rms = qkvi_turboquant_code(&first, row, rest, coded->codes);
  for (size_t c = 0; c < coder->dim; c++) {
    rest[c] = coded->rms > 0 ? rest[c] - values[coded->codes[c]] : 0;
    square += (double)rest[c] * (double)rest[c];
  }
  coded->residual = coded->rms * (float)sqrt(square / coder->dim);
  qkv_sketch_forward(rest, 1, coder->dim);
  for (size_t c = 0; c < coder->dim; c++) coded->signs[c] = rest[c] > 0;
}

static void ip_encode(const qkv_part_coder *coder, const float *rows, uint32_t tokens, uint8_t *block) {
  const qkv_part_coder first = first_of(coder), signs = signs_of(coder);
  uint8_t first_codes[QKV_PAGE_TOKENS * QKV_DIM_MAX] = {0}, sign_codes[QKV_PAGE_TOKENS * QKV_DIM_MAX] = {0};
  float rms[QKV_PAGE_TOKENS] = {0}, residuals[QKV_PAGE_TOKENS] = {0};
  coded_row coded;
  for (uint32_t t = 0; t < tokens; t++) {
    code_row(coder, rows + t * coder->dim, &coded);
    rms[t] = coded.rms;
    residuals[t] = coded.residual;
    memcpy(first_codes + t * coder->dim, coded.codes, coder->dim);
    memcpy(sign_codes + t * coder->dim, coded.signs, coder->dim);
  }
  qkvi_sized_write(&first, rms, first_codes, block);
  qkvi_sized_write(&signs, residuals, sign_codes, block + signs_offset(coder));
}

// A query, rotated, and its sketch, times what a sign stands for.
static void ip_query(const qkv_part_coder *coder, const float *queries, size_t n, float *ready) {
  const float value = sign_value(coder);
  float *turned = ready, *sketched = ready + n * coder->dim;
  qkvi_part_turboquant.query(coder, queries, n, turned);
  memcpy(sketched, turned, n * coder->dim * sizeof *turned);
  qkv_sketch_forward(sketched, n, coder->dim);
  for (size_t i = 0; i < n * coder->dim; i++) sketched[i] *= value;
}

static void ip_scores(const qkv_part_coder *coder, const uint8_t *block, const float *queries, size_t n,
                      qkv_precision precision, float *scores) {
  const qkv_part_coder first = first_of(coder), signs = signs_of(coder);
  float corrections[QKV_QUERY_BLOCK * QKV_PAGE_TOKENS];
  if (!qkvi_part_in_integers(coder->bits, precision)) precision = QKV_PRECISION_FP32;  // signs are of one bit
  qkvi_sized_scores(&first, block, queries, n, precision, scores);
  qkvi_sized_scores(&signs, block + signs_offset(coder), queries + n * coder->dim, n, precision, corrections);
  for (size_t i = 0; i < n * QKV_PAGE_TOKENS; i++) scores[i] += corrections[i];
}

static void ip_decode(const qkv_part_coder *coder, const uint8_t *block, float *rows) {
  const qkv_part_coder first = first_of(coder), signs = signs_of(coder);
  const float value = sign_value(coder);
  float corrections[QKV_PAGE_TOKENS * QKV_DIM_MAX];
  qkvi_sized_decode(&first, block, rows);
  qkvi_sized_decode(&signs, block + signs_offset(coder), corrections);
  qkv_sketch_back(corrections, QKV_PAGE_TOKENS, coder->dim);
  for (size_t i = 0; i < (size_t)QKV_PAGE_TOKENS * coder->dim; i++) rows[i] += value * corrections[i];
  qkvi_part_turboquant.output(coder, rows, QKV_PAGE_TOKENS);
}

static bool ip_matches(const qkv_part_coder *coder, const uint8_t *block, uint32_t slot, const float *row) {
  const qkv_part_coder first = first_of(coder), signs = signs_of(coder);
  coded_row coded;
  code_row(coder, row, &coded);
  return qkvi_sized_matches(&first, block, slot, coded.rms, coded.codes) &&
         qkvi_sized_matches(&signs, block + signs_offset(coder), slot, coded.residual, coded.signs);
}

static const char *ip_validate(const qkv_part_coder *coder, const uint8_t *block) {
  const qkv_part_coder first = first_of(coder), signs = signs_of(coder);
  const char *wrong = qkvi_sizes_validate(&first, block);
  return wrong != NULL ? wrong : qkvi_sizes_validate(&signs, block + signs_offset(coder));
}

// Of keys: what the MSE quantizer leaves, times pi / 2; and 2 %.
static double ip_error_bound(double bits) {
  return qkv_sphere_get(QKV_SPHERE_GAUSSIAN, (unsigned)bits - 1)->distortion * 1.5708 * 1.02;
}

static const qkv_part_codec part = {.id = ID,
                                    .version = VERSION,
                                    .init = ip_init,
                                    .encode = ip_encode,
                                    .query = ip_query,
                                    .scores = ip_scores,
                                    .decode = ip_decode,
                                    .matches = ip_matches,
                                    .validate = ip_validate};

const qkv_codec qkvi_codec_turboquant_ip = {.id = ID,
                                            .name = "turboquant-ip",
                                            .bits_valid = bits_valid,
                                            .bits_text = "whole numbers from 2 to 8 with turboquant-ip",
                                            .parameters = qkvi_turboquant_parameters,
                                            .parameter_count = QKVI_TURBOQUANT_PARAMETERS,
                                            .error_bound = ip_error_bound,
                                            .part = &part,
                                            QKV_CODEC_OF_PARTS};
