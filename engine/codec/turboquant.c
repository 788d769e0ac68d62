#include "engine/codec/turboquant.h"

#include <string.h>

#include "engine/codec/hadamard.h"
#include "engine/codec/rotation.h"
#include "engine/codec/sized.h"
#include "engine/codec/sphere.h"

enum { ID = 3, VERSION = 1, DENSE = 2 };

static bool rotation_valid(uint32_t rotation) {
  return rotation == 1 || rotation == DENSE;
}

const qkv_parameter qkvi_turboquant_parameters[QKVI_TURBOQUANT_PARAMETERS] = {
    {.name = "rotation", .fallback = 1, .valid = rotation_valid, .text = "1 (Hadamard) and 2 (dense)"}};

static void turn(const qkv_part_coder *coder, float *rows, size_t n) {
  if (coder->parameters[0] == DENSE) return qkv_rotation_forward(rows, n, coder->dim);
  qkv_hadamard_forward(rows, n, coder->dim);
}

static void turn_back(const qkv_part_coder *coder, float *rows, size_t n) {
  if (coder->parameters[0] == DENSE) return qkv_rotation_inverse(rows, n, coder->dim);
  qkv_hadamard_inverse(rows, n, coder->dim);
}

static void turboquant_init(qkv_part_coder *coder) {
  coder->tables = qkv_sphere_get(coder->dim, coder->bits);
  coder->block_bytes = (uint32_t)qkvi_sized_bytes(coder);
}

float qkvi_turboquant_code(const qkv_part_coder *coder, const float *row, float *turned, uint8_t *codes) {
  const qkv_sphere *sphere = coder->tables;
  const float rms = qkvi_size_of(row, coder->dim, turned);
  memset(codes, 0, coder->dim);
  if (rms == 0) return 0;
  turn(coder, turned, 1);
  for (size_t c = 0; c < coder->dim; c++) codes[c] = qkv_sphere_code(sphere, coder->bits, turned[c]);
  return rms;
}

static void turboquant_query(const qkv_part_coder *coder, const float *queries, size_t n, float *ready) {
  memcpy(ready, queries, n * coder->dim * sizeof *ready);
  turn(coder, ready, n);
}

static void turboquant_encode(const qkv_part_coder *coder, const float *rows, uint32_t tokens, uint8_t *block) {
  uint8_t codes[QKV_PAGE_TOKENS * QKV_DIM_MAX] = {0};
  float rms[QKV_PAGE_TOKENS] = {0}, turned[QKV_DIM_MAX];
  for (uint32_t t = 0; t < tokens; t++)
    rms[t] = qkvi_turboquant_code(coder, rows + t * coder->dim, turned, codes + t * coder->dim);
  qkvi_sized_write(coder, rms, codes, block);
}

static void turboquant_decode(const qkv_part_coder *coder, const uint8_t *block, float *rows) {
  qkvi_sized_decode(coder, block, rows);
  turn_back(coder, rows, QKV_PAGE_TOKENS);
}

static bool turboquant_matches(const qkv_part_coder *coder, const uint8_t *block, uint32_t slot, const float *row) {
  float turned[QKV_DIM_MAX];
  uint8_t codes[QKV_DIM_MAX];
  const float rms = qkvi_turboquant_code(coder, row, turned, codes);
  return qkvi_sized_matches(coder, block, slot, rms, codes);
}

static void turboquant_round_trip(const qkv_part_coder *coder, const uint8_t *block, uint32_t slot, const float *row,
                                  float *decoded) {
  (void)block;
  (void)slot;
  float turned[QKV_DIM_MAX];
  uint8_t codes[QKV_DIM_MAX];
  qkvi_sized_round_trip(coder, qkvi_turboquant_code(coder, row, turned, codes), codes, decoded);
  turn_back(coder, decoded, 1);
}

// That of the codebook for wide rows, which is the largest, and 1 %.
static double turboquant_error_bound(double bits) {
  return qkv_sphere_get(QKV_SPHERE_GAUSSIAN, (unsigned)bits)->distortion * 1.01;
}

const qkv_part_codec qkvi_part_turboquant = {.id = ID,
                                             .version = VERSION,
                                             .init = turboquant_init,
                                             .encode = turboquant_encode,
                                             .query = turboquant_query,
                                             .scores = qkvi_sized_scores,
                                             .accumulate = qkvi_sized_accumulate,
                                             .output = turn_back,
                                             .decode = turboquant_decode,
                                             .round_trip = turboquant_round_trip,
                                             .matches = turboquant_matches,
                                             .validate = qkvi_sizes_validate};

const qkv_codec qkvi_codec_turboquant = {.id = ID,
                                         .name = "turboquant",
                                         .bits_valid = qkvi_whole_bits_valid,
                                         .bits_text = "whole numbers from 1 to 8 with turboquant",
                                         .parameters = qkvi_turboquant_parameters,
                                         .parameter_count = QKVI_TURBOQUANT_PARAMETERS,
                                         .error_bound = turboquant_error_bound,
                                         .part = &qkvi_part_turboquant,
                                         QKV_CODEC_OF_PARTS};
