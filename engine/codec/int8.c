#include "engine/codec/int8.h"

#include <math.h>
#include <pthread.h>

#include "engine/codec/sized.h"

enum { ID = 8, VERSION = 1, BITS = 8, CODES = 256, ZERO = 128, MOST = 127 };

static bool bits_valid(double bits) {
  return bits == BITS;
}

static float values[CODES];

static void fill_values(void) {
  for (int code = 0; code < CODES; code++) values[code] = (float)(code - ZERO);
}

static void int8_init(qkv_part_coder *coder) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  (void)pthread_once(&once, fill_values);
  coder->tables = values;
  coder->block_bytes = (uint32_t)qkvi_sized_bytes(coder);
}

// A row's codes and its scale, as it is stored.
static float code_row(const qkv_part_coder *coder, const float *row, uint8_t *codes) {
  float most = 0, scale;
  uint16_t stored;
  for (size_t c = 0; c < coder->dim; c++) most = fmaxf(most, fabsf(row[c]));
  scale = most / MOST;
  qkv_from_float(QKV_FP16, &scale, &stored, 1);
  qkv_to_float(QKV_FP16, &stored, &scale, 1);
  for (size_t c = 0; c < coder->dim; c++) {
    const float code = scale > 0 ? rintf(row[c] / scale) : 0;
    codes[c] = (uint8_t)(ZERO + (int)fmaxf(-MOST, fminf(MOST, code)));
  }
  return scale;
}

static void int8_encode(const qkv_part_coder *coder, const float *rows, uint32_t tokens, uint8_t *block) {
  uint8_t codes[QKV_PAGE_TOKENS * QKV_DIM_MAX] = {0};
  float scales[QKV_PAGE_TOKENS] = {0};
  for (uint32_t t = 0; t < tokens; t++) scales[t] = code_row(coder, rows + t * coder->dim, codes + t * coder->dim);
  qkvi_sized_write(coder, scales, codes, block);
}

static void int8_round_trip(const qkv_part_coder *coder, const uint8_t *block, uint32_t slot, const float *row,
                            float *decoded) {
  (void)block;
  (void)slot;
  uint8_t codes[QKV_DIM_MAX];
  qkvi_sized_round_trip(coder, code_row(coder, row, codes), codes, decoded);
}

static bool int8_matches(const qkv_part_coder *coder, const uint8_t *block, uint32_t slot, const float *row) {
  uint8_t codes[QKV_DIM_MAX];
  const float scale = code_row(coder, row, codes);
  return qkvi_sized_matches(coder, block, slot, scale, codes);
}

// Of N(0, 1): a twelfth of a step's square, of rows of up to 1024, whose largest coordinate is below 3.6 on average.
static double int8_error_bound(double bits) {
  (void)bits;
  return 3.6 * 3.6 / (MOST * MOST) / 12;
}

static const qkv_part_codec part = {.id = ID,
                                    .version = VERSION,
                                    .init = int8_init,
                                    .encode = int8_encode,
                                    .scores = qkvi_sized_scores,
                                    .accumulate = qkvi_sized_accumulate,
                                    .decode = qkvi_sized_decode,
                                    .round_trip = int8_round_trip,
                                    .matches = int8_matches,
                                    .validate = qkvi_sizes_validate};

const qkv_codec qkvi_codec_int8 = {.id = ID,
                                   .name = "int8",
                                   .bits_valid = bits_valid,
                                   .bits_text = "8 with int8",
                                   .error_bound = int8_error_bound,
                                   .part = &part,
                                   QKV_CODEC_OF_PARTS};
