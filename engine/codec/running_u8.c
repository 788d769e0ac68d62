#include "engine/codec/running_u8.h"

#include "engine/codec/affine.h"

// A code that was rescaled again and again may be so far from that of its row.
enum { ID = 5, VERSION = 1, BITS = 8, MOST = 255, DRIFT_MAX = 2 };

static bool bits_valid(double bits) {
  return bits == BITS;
}

// All tokens of a page share a key channel's range, all channels a token's.
static void running_init(qkv_part_coder *coder) {
  static const qkvi_affine_kind kind = {.dtype = QKV_FP32, .drift_keys = DRIFT_MAX};
  qkvi_affine_init(coder, &kind);
}

// A channel's range, and its codes so far.
typedef struct running {
  float low, high, scale;
} running;

// Rescales the codes so far to a wider range.
static void rescale(running *range, float low, float high, uint8_t *codes, size_t stride, uint32_t count) {
  const float scale = (high - low) / MOST;
  for (uint32_t t = 0; t < count; t++)
    codes[t * stride] = qkvi_affine_code(range->low + range->scale * (float)codes[t * stride], scale, low, MOST);
  *range = (running){low, high, scale};
}

static void encode_keys(const qkv_part_coder *coder, const float *rows, uint32_t tokens, uint8_t *block) {
  uint8_t codes[QKV_PAGE_TOKENS * QKV_DIM_MAX] = {0};
  float scales[QKV_DIM_MAX], zeros[QKV_DIM_MAX];
  const size_t dim = coder->dim;
  for (size_t c = 0; c < dim; c++) {
    running range = {rows[c], rows[c], 0};
    for (uint32_t t = 0; t < tokens; t++) {
      const float x = rows[t * dim + c];
      if (x < range.low) rescale(&range, x, range.high, codes + c, dim, t);
      if (x > range.high) rescale(&range, range.low, x, codes + c, dim, t);
      codes[t * dim + c] = qkvi_affine_code(x, range.scale, range.low, MOST);
    }
    scales[c] = range.scale;
    zeros[c] = range.low;
  }
  qkvi_affine_write_one(coder, scales, zeros, codes, block);
}

static void running_encode(const qkv_part_coder *coder, const float *rows, uint32_t tokens, uint8_t *block) {
  if (coder->part == QKV_K) return encode_keys(coder, rows, tokens, block);
  qkvi_affine_encode(coder, rows, tokens, block);
}

// Of N(0, 1): a range of some 6 in 255 steps, and what rescaling adds.
static double running_error_bound(double bits) {
  (void)bits;
  return 0.00008;
}

static const qkv_part_codec part = {
    .id = ID, .version = VERSION, .init = running_init, .encode = running_encode, QKVI_AFFINE_FUNCTIONS};

const qkv_codec qkvi_codec_running_u8 = {.id = ID,
                                         .name = "running-u8",
                                         .bits_valid = bits_valid,
                                         .bits_text = "8 with running-u8",
                                         .error_bound = running_error_bound,
                                         .part = &part,
                                         QKV_CODEC_OF_PARTS};
