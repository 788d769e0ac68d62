// The scalar reference: it defines the bytes and the arithmetic. The innermost loops run over independent lanes,
// so that vectors do not change a sum.
#include <assert.h>
#include <math.h>
#include <string.h>

#include "engine/codec/codebook.h"
#include "engine/codec/pack.h"
#include "engine/kernel/integer_plain.h"
#include "engine/kernel/kernel.h"
#include "engine/kernel/plain.h"
#include "engine/kernel/table.h"

enum { GROUP = QKV_GROUP_TOKENS, LANES = 8, QUADS = GROUP / 4 };

// Four slots. GCC keeps an array of these in registers, where it reloads an array of floats at every step: ten
// times the speed in score_group (64 coordinates x 16 slots: 87 against 867 ns).
typedef float quad __attribute__((vector_size(16)));

// Coordinates [deeper(reach, b), reach[b]) have exactly b bits.
static unsigned deeper(const uint16_t *reach, unsigned depth) {
  return depth < QKV_DEPTH_MAX ? reach[depth + 1] : 0;
}

// Coordinates that have any bits; the others are 0.
static unsigned coded(const qkv_page_codes *codes, size_t group) {
  return codes->schedule->reach[codes->tiers[group]][1];
}

// A group's values [coordinate][slot].
static void load_by_coordinate(qkv_part part, const qkv_page_codes *codes, size_t group, quad (*tile)[QUADS]) {
  qkvi_codes unpacked[QKV_DIM_MAX];
  const uint16_t *reach = codes->schedule->reach[codes->tiers[group]];
  qkvi_unpack(part, codes->schedule, codes->tiers[group], codes->groups[group], unpacked);
  for (unsigned depth = 1; depth <= QKV_DEPTH_MAX; depth++) {
    const float *values = qkvi_tables.values[depth];
    for (unsigned c = deeper(reach, depth); c < reach[depth]; c++) {
      const uint8_t *code = unpacked[c];
      for (size_t i = 0; i < QUADS; i++, code += 4) {
        tile[c][i] = (quad){values[code[0]], values[code[1]], values[code[2]], values[code[3]]};
      }
    }
  }
}

// The same as rows [slot][coordinate], `stride` floats apart.
static void load_by_slot(qkv_part part, const qkv_page_codes *codes, size_t group, float *tile, size_t stride) {
  qkvi_codes unpacked[QKV_DIM_MAX];
  const uint16_t *reach = codes->schedule->reach[codes->tiers[group]];
  qkvi_unpack(part, codes->schedule, codes->tiers[group], codes->groups[group], unpacked);
  for (unsigned depth = 1; depth <= QKV_DEPTH_MAX; depth++) {
    const float *values = qkvi_tables.values[depth];
    for (size_t t = 0; t < GROUP; t++) {
      for (unsigned c = deeper(reach, depth); c < reach[depth]; c++) tile[t * stride + c] = values[unpacked[c][t]];
    }
  }
}

static void score_group(const quad (*tile)[QUADS], unsigned coordinates, const float *query, const uint8_t *gains,
                        float *scores) {
  quad sums[QUADS] = {0};
  for (unsigned c = 0; c < coordinates; c++) {
    for (size_t i = 0; i < QUADS; i++) sums[i] += query[c] * tile[c][i];
  }
  for (size_t t = 0; t < GROUP; t++) scores[t] = qkv_gain_value(gains[t]) * sums[t / 4][t % 4];
}

static QKV_DECLARE_SCORES(scores_reference) {
  quad tile[QKV_DIM_MAX][QUADS];
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
    load_by_coordinate(QKV_K, keys, g, tile);
    for (size_t i = 0; i < n; i++) {
      score_group(tile, coded(keys, g), queries + i * keys->schedule->dim, keys->gains + g * GROUP,
                  scores + i * QKV_PAGE_TOKENS + g * GROUP);
    }
  }
}

static void add_row(float *restrict sums, const float *restrict row, float weight, unsigned coordinates) {
  for (unsigned c = 0; c < coordinates; c++) sums[c] += weight * row[c];
}

static QKV_DECLARE_ACCUMULATE(accumulate_reference) {
  float tile[GROUP * QKV_DIM_MAX];
  const size_t dim = values->schedule->dim;
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
    const uint8_t *gains = values->gains + g * GROUP;
    load_by_slot(QKV_V, values, g, tile, dim);
    for (size_t i = 0; i < n; i++) {
      const float *w = weights + i * QKV_PAGE_TOKENS + g * GROUP;
      for (size_t t = 0; t < GROUP; t++) {
        add_row(sums + i * dim, tile + t * dim, w[t] * qkv_gain_value(gains[t]), coded(values, g));
      }
    }
  }
}

static QKV_DECLARE_DECODE(decode_reference) {
  const size_t dim = codes->schedule->dim;
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
    float *out = rows + g * GROUP * dim;
    memset(out, 0, GROUP * dim * sizeof *out);
    load_by_slot(part, codes, g, out, dim);
    for (size_t t = 0; t < GROUP; t++) {
      const float gain = qkv_gain_value(codes->gains[g * GROUP + t]);
      for (size_t c = 0; c < dim; c++) out[t * dim + c] *= gain;
    }
  }
}

// Sums over rows are LANES sums over i % LANES, then those in order. n is a multiple of LANES.
static float in_order(const float lanes[LANES]) {
  float sum = 0;
  for (size_t lane = 0; lane < LANES; lane++) sum += lanes[lane];
  return sum;
}

// sum_i weights[i] * a[i] * b[i]
static float dot(const float *weights, const float *a, const float *b, unsigned n) {
  float lanes[LANES] = {0};
  for (unsigned i = 0; i < n; i += LANES) {
    for (unsigned lane = 0; lane < LANES; lane++) lanes[lane] += weights[i + lane] * a[i + lane] * b[i + lane];
  }
  return in_order(lanes);
}

static float sum(const float *a, unsigned n) {
  float lanes[LANES] = {0};
  for (unsigned i = 0; i < n; i += LANES) {
    for (unsigned lane = 0; lane < LANES; lane++) lanes[lane] += a[i + lane];
  }
  return in_order(lanes);
}

// The squared error of gain * kept as a row.
static float squared_error(const float *weights, const float *row, const float *kept, float gain, unsigned n) {
  float lanes[LANES] = {0};
  for (unsigned i = 0; i < n; i += LANES) {
    for (unsigned lane = 0; lane < LANES; lane++) {
      const float miss = row[i + lane] - gain * kept[i + lane];
      lanes[lane] += weights[i + lane] * miss * miss;
    }
  }
  return in_order(lanes);
}

// A way to code a row.
typedef struct attempt {
  uint8_t codes[QKV_DIM_MAX];  // at full depth
  uint8_t gain;
  float error;  // squared, of what the tier keeps
} attempt;

// Quantizes the row over the value of gain `scale`, then fits the gain to the codes that the tier keeps.
static void try_scale(const uint16_t *reach, const float *weights, const float *row, uint8_t scale, attempt *a) {
  const unsigned coordinates = reach[1];
  float kept[QKV_DIM_MAX];
  qkv_codebook_codes(row, 1 / qkv_gain_value(scale), coordinates, a->codes);
  for (unsigned depth = 1; depth <= QKV_DEPTH_MAX; depth++) {
    const float *values = qkvi_tables.values[depth];
    for (unsigned c = deeper(reach, depth); c < reach[depth]; c++) {
      kept[c] = values[a->codes[c] >> (QKV_DEPTH_MAX - depth)];
    }
  }
  a->gain = qkvi_gain_nearest(dot(weights, row, kept, coordinates) / dot(weights, kept, kept, coordinates));
  a->error = squared_error(weights, row, kept, qkv_gain_value(a->gain), coordinates);
}

// Codes one row into a column of `codes` and returns its gain: the best of three scales, the gain nearest to the
// row's weighted RMS and its two neighbours. Relative squared error on Gaussian rows of 64, at a top tier of 4 and
// when planes are dropped afterwards:
//   scales tried                            4 bits   3       2      1       8 bits
//   RMS                                     0.00922  0.0339  0.116  0.3588  0.0000410
//   RMS, then the fitted gain if it differs 0.00914  0.0338  0.116  0.3589  0.0000410
//   RMS and one step up and down            0.00787  0.0330  0.116  0.3626  0.0000332
//   RMS and two steps up and down           0.00745  0.0324  0.117  0.3680  0.0000316
static uint8_t encode_row(const uint16_t *reach, const float *weights, const float *row, qkvi_codes *codes,
                          size_t slot) {
  const unsigned coordinates = reach[1];
  const float rms = coordinates > 0 ? sqrtf(dot(weights, row, row, coordinates) / sum(weights, coordinates)) : 0;
  if (rms < qkv_gain_value(1) / 2) {
    for (unsigned c = 0; c < coordinates; c++) codes[c][slot] = 0;
    return 0;
  }
  const uint8_t middle = qkvi_gain_nearest(rms);
  attempt attempts[3], *best = attempts;
  try_scale(reach, weights, row, middle, best);
  if (middle > 1) {
    try_scale(reach, weights, row, middle - 1, &attempts[1]);
    if (attempts[1].error < best->error) best = &attempts[1];
  }
  if (middle < UINT8_MAX) {
    try_scale(reach, weights, row, middle + 1, &attempts[2]);
    if (attempts[2].error < best->error) best = &attempts[2];
  }
  for (unsigned c = 0; c < coordinates; c++) codes[c][slot] = best->codes[c];
  return best->gain;
}

void qkvi_row_round_trip(const qkv_schedule *schedule, unsigned tier, const float *weights, const float *row,
                         float *decoded) {
  if (weights == NULL) weights = qkvi_weights_alike;
  assert(tier >= 1 && tier <= QKV_TIER_MAX);
  (void)qkv_kernels_at(0);  // fills the tables
  const uint16_t *reach = schedule->reach[tier];
  qkvi_codes codes[QKV_DIM_MAX];
  const float gain = qkv_gain_value(encode_row(reach, weights, row, codes, 0));
  memset(decoded, 0, schedule->dim * sizeof *decoded);
  for (unsigned depth = 1; depth <= QKV_DEPTH_MAX; depth++) {
    for (unsigned c = deeper(reach, depth); c < reach[depth]; c++) {
      decoded[c] = qkvi_tables.values[depth][codes[c][0] >> (QKV_DEPTH_MAX - depth)] * gain;
    }
  }
}

static QKV_DECLARE_ENCODE(encode_reference) {
  if (weights == NULL) weights = qkvi_weights_alike;
  assert(tier >= 1 && tier <= QKV_TIER_MAX);
  const size_t dim = schedule->dim;
  qkvi_codes unpacked[QKV_DIM_MAX];
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
    for (size_t t = 0; t < GROUP; t++) {
      const size_t slot = g * GROUP + t;
      gains[slot] = encode_row(schedule->reach[tier], weights, rows + slot * dim, unpacked, t);
    }
    qkvi_pack(part, schedule, tier, unpacked, codes);
    codes += qkv_schedule_group_bytes(schedule, tier);
  }
}

const qkv_kernels qkvi_kernels_reference = {
    .name = "reference",
    .scores = scores_reference,
    .accumulate = accumulate_reference,
    .encode = encode_reference,
    .decode = decode_reference,
    .largest = largest_plain,
    .weigh = weigh_plain,
    .hadamard_forward = hadamard_forward_plain,
    .hadamard_inverse = hadamard_inverse_plain,
    .prepare = prepare_plain,
    .scores_integer = qkvi_scores_integer_reference,
    .peaks = peaks_plain,
    .weigh_integer = weigh_integer_plain,
    .accumulate_integer = qkvi_accumulate_integer_reference,
};
