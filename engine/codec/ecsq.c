#include <math.h>
#include <string.h>

#include "engine/codec/ecsq_internal.h"
#include "engine/codec/embedded.h"

enum { ID = 22, VERSION = 1 };

// ---- A head ----

static size_t ecsq_head_bytes(const qkv_part_coder *coder) {
  return sizeof(ecsq_head) + 4 * coder->dim * sizeof(float);
}

// The water level for so many bits, in sixteenths of an octave: what is above it adds up to them.
static int water_level(const int32_t *levels, size_t dim, unsigned tier) {
  const int64_t wanted = (int64_t)tier * 2 * (int64_t)dim;
  int level = levels[0];
  for (size_t j = 1; j < dim; j++) level = levels[j] > level ? levels[j] : level;
  for (;; level--) {
    int64_t above = 0;
    for (size_t j = 0; j < dim; j++) above += levels[j] > level ? levels[j] - level : 0;
    if (above >= wanted) return level;
  }
}

// What a row's codes are expected to cost, by the contexts' place: contexts are four sixteenths apart, and what codes
// cost is smooth.
static void fill_expected(ecsq_head *head, size_t dim) {
  enum { APART = 4, LAST = ECSQ_EXPECTED + APART };  // contexts are sixteenths >> 2
  const int32_t *levels = ecsq_levels(head, dim);
  uint32_t costs[LAST + 1] = {0}, at[ECSQ_CONTEXTS + APART * ECSQ_CUT_MAX];
  const int last = (int)(sizeof at / sizeof *at) - 1;
  for (int i = 0; i <= last; i++) {
    unsigned cut;
    const ecsq_steps steps = {.context = APART * (i + ECSQ_LEAST)};
    at[i] = qkvi_ecsq.expected[ecsq_context(&steps, 0, &cut)];
    at[i] += cut << 8;
  }
  for (int i = 0; i <= LAST; i++) {
    const int first = i - APART / 2 - ECSQ_EXPECTED / 2 - head->level;
    for (size_t j = 0; j < dim; j++) {
      const int place = ((levels[j] + first) >> 2) - ECSQ_LEAST;
      costs[i] += at[place < 0 ? 0 : place > last ? last : place];
    }
  }
  for (int i = 0; i < ECSQ_EXPECTED; i++) {
    const uint32_t *near = costs + i;
    head->expected[i] = (near[0] + near[4] + 2 * (near[1] + near[2] + near[3])) / (2 * APART);
  }
}

static void make_head(const qkv_part_coder *coder, const qkv_coder_spec *spec, const qkv_calibration *calibration,
                      uint32_t layer, uint32_t kv_head, void *made) {
  ecsq_head *head = made;
  const size_t dim = coder->dim;
  const qkv_policy *policy = &spec->policies[layer];
  const qkv_calibration_part kind = coder->part == QKV_V     ? QKV_PART_V
                                    : spec->rope->theta != 0 ? QKV_PART_K_ARCHIVE
                                                             : QKV_PART_K_ATTEND;
  float *roots = ecsq_roots(head, 0, dim), *units = ecsq_roots(head, 1, dim), *counts = ecsq_roots(head, 2, dim);
  int32_t *levels = (int32_t *)ecsq_levels(head, dim);
  int tier = coder->tier;
  qkvi_ecsq_fill();
  if (calibration != NULL && qkv_calibration_archive_refused(calibration)) calibration = NULL;
  head->transform = calibration == NULL ? NULL : qkv_calibration_transform(calibration, layer, kv_head, kind);
  if (head->transform == NULL || head->transform->analysis == NULL)
    head->transform = qkv_transform_uniform((uint16_t)dim);
  head->relative = head->transform->analysis == NULL;
  head->sinks = policy->sink_tokens > 0 ? (uint32_t)policy->sink_tokens : 0;
  for (size_t j = 0; j < dim; j++) {
    const float weight = head->transform->weights == NULL ? 1 : head->transform->weights[j];
    roots[j] = sqrtf(weight);
    units[j] = 1 / roots[j];
    levels[j] = ecsq_log_eighths(weight);
  }
  if (calibration != NULL) tier += qkv_calibration_tier_offset(calibration, layer, kv_head, kind);
  head->level = water_level(levels, dim, (unsigned)(tier < 4 ? 4 : tier));
  const float step = ecsq_power(2 * head->level);
  double energy = 0;
  for (size_t i = 0; !head->relative && i < dim * dim; i++)
    energy += (double)head->transform->synthesis[i] * (double)head->transform->synthesis[i];
  for (size_t j = 0; !head->relative && j < dim; j++)
    energy += (double)head->transform->mean[j] * (double)head->transform->mean[j];
  head->energy = (float)energy;
  head->size = 0;
  for (size_t j = 0; j < dim; j++) {
    const float weight = roots[j] * roots[j];
    head->size += counts[j] = weight / (weight + step);
  }
  fill_expected(head, dim);
}

// ---- What rows share ----

const ecsq_row *qkvi_ecsq_row(const ecsq_head *head, size_t dim, unsigned step, uint8_t centre, uint8_t gain,
                              uint8_t fine, ecsq_rows *rows) {
  const size_t at = (gain + 3u * fine) % ECSQ_ROWS;
  ecsq_row *row = &rows->rows[at];
  if (rows->set[at] && row->gain == gain && row->fine == fine) return row;
  const int32_t *levels = ecsq_levels(head, dim);
  const ecsq_steps steps = ecsq_steps_of(head, step, centre, gain, fine);
  rows->set[at] = true;
  row->gain = gain;
  row->fine = fine;
  row->scale = ecsq_power(steps.step);
  row->inverse = ecsq_power(-steps.step);
  memset(row->cut_bits, 0, dim / ECSQ_GROUP * sizeof *row->cut_bits);
  for (size_t j = 0; j < dim; j++) {
    unsigned cut;
    const unsigned context = ecsq_context(&steps, levels[j], &cut);
    row->contexts[j] = (uint8_t)context;
    row->cuts[j] = (uint8_t)cut;
    row->factors[j] = row->inverse / (float)(1u << cut);
    row->zeros[j] = cut > 0 ? 0.5f : qkvi_ecsq.borders[context].zero;
    row->offsets[j] = cut > 0 ? 0.5f : qkvi_ecsq.borders[context].offset;
    row->tops[j] = qkvi_ecsq.tops[context];
    row->bases[j] = (int32_t)(ECSQ_SYMBOLS * context);
    row->cut_bits[j / ECSQ_GROUP] += (uint16_t)cut;
  }
  return row;
}

// ---- Reading a block ----

static uint8_t take_gain(rans_reader *from, size_t lane, uint8_t centre, uint8_t *fine) {
  uint32_t slot = rans_peek(from, lane), start = 0;
  int gain = centre - ECSQ_GAIN_HALF, off = -ECSQ_GAIN_HALF;
  if (slot >= RANS_TOTAL - ECSQ_GAIN_LEFT) {
    rans_take(from, lane, RANS_TOTAL - ECSQ_GAIN_LEFT, ECSQ_GAIN_LEFT);
    gain = (int)rans_take_bits(from, lane, 8);
  } else {
    for (; slot >= start + qkvi_ecsq_gains[off < 0 ? -off : off]; off++, gain++)
      start += qkvi_ecsq_gains[off < 0 ? -off : off];
    rans_take(from, lane, start, qkvi_ecsq_gains[off < 0 ? -off : off]);
    if (gain < 1 || gain > ECSQ_GAIN_MAX) {
      from->wrong = true;
      gain = 1;
    }
  }
  *fine = 0;
  if (gain == ECSQ_GAIN_ZERO) return ECSQ_GAIN_ZERO;
  slot = rans_peek(from, lane);
  while (slot >= qkvi_ecsq_fine[*fine + 1]) ++*fine;
  rans_take(from, lane, qkvi_ecsq_fine[*fine], qkvi_ecsq_fine[*fine + 1] - qkvi_ecsq_fine[*fine]);
  return (uint8_t)gain;
}

// A code that is cut or escapes, after its symbol.
static __attribute__((noinline)) int32_t take_rest(rans_reader *from, size_t lane, unsigned cut, unsigned as) {
  int32_t high = (int32_t)as - ECSQ_HALF;
  if (as == ECSQ_ESCAPE) {
    const unsigned count = rans_take_bits(from, lane, ECSQ_EXPONENT_BITS);
    const unsigned bits = count > 2 * RANS_BITS - 1 ? 2 * RANS_BITS - 1 : count;
    const int32_t size = (int32_t)((1u << bits | rans_take_number(from, lane, bits)) - 1);
    if (count != bits) from->wrong = true;
    high = rans_take_bits(from, lane, 1) != 0 ? -size : size;
  }
  const int64_t code = ((int64_t)high * ((int64_t)1 << cut)) + (int64_t)rans_take_number(from, lane, cut) -
                       (cut > 0 ? (int64_t)1 << (cut - 1) : 0);
  if (code > ECSQ_CODE_LIMIT || code < -ECSQ_CODE_LIMIT) {
    from->wrong = true;
    return 0;
  }
  return (int32_t)code;
}

// What is left of a code after its symbol, by a copy of the states, which then stay in registers where it is not
// called.
static inline float take_value(rans_reader *from, size_t lane, unsigned context, unsigned cut, unsigned as) {
  rans_reader copy = *from;
  const int32_t code = take_rest(&copy, lane, cut, as);
  *from = copy;
  return ecsq_value(context, cut, code);
}

// The codes of a group; `checked`: there may be no words.
static inline __attribute__((always_inline)) void take_group(rans_reader *from, const ecsq_row *row, size_t first,
                                                             bool checked, const float *units, float *out) {
#pragma GCC unroll 8
  for (size_t i = 0; i < ECSQ_GROUP; i++) {
    const size_t lane = i % RANS_LANES;
    const unsigned context = row->contexts[first + i];
    const unsigned as = qkvi_ecsq.at[context][rans_peek(from, lane)];
    const ecsq_symbol *found = &qkvi_ecsq.symbols[context][as];
    float value = found->value;
    if (checked) {
      const unsigned cut = row->cuts[first + i];
      rans_take(from, lane, found->start, found->frequency);
      if (cut > 0 || as == ECSQ_ESCAPE) value = take_value(from, lane, context, cut, as);
    } else {
      rans_take_symbol(from, lane, found->start, found->frequency);
      if (__builtin_expect(as == ECSQ_ESCAPE, 0)) value = take_value(from, lane, context, 0, as);
    }
    out[first + i] = value * units[first + i] * row->scale;
  }
}

// A row's codes. An escape takes six words at most.
static void take_row(rans_reader *from, const ecsq_row *row, const float *units, size_t live, float *out) {
  enum { WORDS = 7 * ECSQ_GROUP };
  rans_reader near = *from;
  for (size_t first = 0; first < live; first += ECSQ_GROUP) {
    if (row->cut_bits[first / ECSQ_GROUP] > 0 || near.end - near.at < WORDS * RANS_WORD) {
      take_group(&near, row, first, true, units, out);
    } else {
      take_group(&near, row, first, false, units, out);
    }
  }
  *from = near;
}

// What a block says of its rows.
typedef struct block_rows {
  unsigned step;
  uint8_t centre;
  size_t live;
  uint8_t gains[QKV_PAGE_TOKENS];
  uint8_t fine[QKV_PAGE_TOKENS];
} block_rows;

// Rows [64][dim] in code space; false: they are not what was written.
static bool read_block(const qkv_part_coder *coder, const uint8_t *block, block_rows *rows, float *out) {
  const size_t bytes = coder->bytes;
  const ecsq_head *head = coder->tables;
  const size_t dim = coder->dim;
  const float *units = ecsq_roots(head, 1, dim);
  ecsq_rows kinds;
  uint16_t step;
  memset(out, 0, QKV_PAGE_TOKENS * dim * sizeof *out);
  memset(rows, 0, sizeof *rows);
  if (bytes < ECSQ_HEADER) return false;
  memcpy(&step, block, sizeof step);
  rows->step = step;
  rows->live = (size_t)block[2] * 8;
  rows->centre = block[3];
  if (step > ECSQ_STEP_LAST || rows->live > dim || rows->centre == ECSQ_GAIN_ZERO) return false;
  if (step == ECSQ_STEP_LAST) return bytes == ECSQ_HEADER && rows->live == 0;
  if (bytes < ECSQ_HEADER + ECSQ_STATES) return false;
  memset(kinds.set, 0, sizeof kinds.set);
  rans_reader from = {.at = block + ECSQ_HEADER + ECSQ_STATES, .end = block + bytes};
  memcpy(from.states, block + ECSQ_HEADER, ECSQ_STATES);
  for (size_t lane = 0; lane < RANS_LANES; lane++) {
    if (from.states[lane] < RANS_LEAST) return false;
  }
  for (uint32_t t = 0; t < QKV_PAGE_TOKENS; t++)
    rows->gains[t] = take_gain(&from, t % RANS_LANES, rows->centre, &rows->fine[t]);
  for (uint32_t t = 0; t < QKV_PAGE_TOKENS; t++) {
    if (rows->gains[t] == ECSQ_GAIN_ZERO) continue;
    const ecsq_row *row = qkvi_ecsq_row(head, dim, step, rows->centre, rows->gains[t], rows->fine[t], &kinds);
    take_row(&from, row, units, rows->live, out + t * dim);
  }
  for (size_t lane = 0; lane < RANS_LANES; lane++) from.wrong |= from.states[lane] != RANS_LEAST;
  return !from.wrong && from.at == from.end;
}

// ---- The codec ----

static bool bits_valid(double bits) {
  return bits >= 1 && bits <= QKV_DEPTH_MAX && bits * QKV_TIER_BIT == floor(bits * QKV_TIER_BIT);
}

static void ecsq_init(qkv_part_coder *coder) {
  coder->block_bytes = (uint32_t)(QKV_PAGE_TOKENS * coder->dim / 8 * coder->tier / QKV_TIER_BIT);
}

static void ecsq_decode(const qkv_part_coder *coder, const uint8_t *block, float *rows) {
  const ecsq_head *head = coder->tables;
  block_rows of;
  (void)read_block(coder, block, &of, rows);
  qkv_transform_inverse(head->transform, rows, QKV_PAGE_TOKENS, of.live);
}

static void ecsq_columns(const qkv_part_coder *coder, const uint8_t *block, float *columns, float *mean) {
  float rows[QKV_PAGE_TOKENS * QKV_DIM_MAX];
  ecsq_decode(coder, block, rows);
  memset(mean, 0, coder->dim * sizeof *mean);
  for (size_t c = 0; c < coder->dim; c++) {
    for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) columns[c * QKV_PAGE_TOKENS + t] = rows[t * coder->dim + c];
  }
}

static void ecsq_accumulate(const qkv_part_coder *coder, const uint8_t *block, const float *weights, size_t n,
                            qkv_precision precision, float *sums) {
  (void)precision;
  const size_t dim = coder->dim;
  float rows[QKV_PAGE_TOKENS * QKV_DIM_MAX];
  block_rows of;
  (void)read_block(coder, block, &of, rows);
  for (size_t i = 0; i < n; i++) {
    for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) {
      const float weight = weights[i * QKV_PAGE_TOKENS + t];
      for (size_t j = 0; j < of.live; j++) sums[i * dim + j] += weight * rows[t * dim + j];
    }
  }
}

static void ecsq_output(const qkv_part_coder *coder, float *sums, const double *totals, size_t n) {
  const ecsq_head *head = coder->tables;
  qkv_transform_output(head->transform, sums, totals, n, coder->dim);
}

static uint32_t ecsq_matching(const qkv_part_coder *coder, const uint8_t *block, uint32_t first, uint32_t tokens,
                              const float *rows) {
  const ecsq_head *head = coder->tables;
  const size_t dim = coder->dim;
  const int32_t *levels = ecsq_levels(head, dim);
  const float *roots = ecsq_roots(head, 0, dim), *units = ecsq_roots(head, 1, dim);
  float read[QKV_PAGE_TOKENS * QKV_DIM_MAX], row[QKV_DIM_MAX];
  block_rows of;
  (void)read_block(coder, block, &of, read);
  for (uint32_t t = 0; t < tokens; t++) {
    memcpy(row, rows + t * dim, dim * sizeof *row);
    qkv_transform_forward(head->transform, row, 1, dim);
    if (of.step < ECSQ_STEP_LAST && qkvi_ecsq_gain(head, row, dim) != of.gains[first + t]) return t;
    if (of.gains[first + t] == ECSQ_GAIN_ZERO) continue;
    const ecsq_steps steps = ecsq_steps_of(head, of.step, of.centre, of.gains[first + t], of.fine[first + t]);
    const float scale = ecsq_power(-steps.step), back = ecsq_power(steps.step);
    for (size_t j = 0; j < dim; j++) {
      unsigned cut;
      const unsigned context = ecsq_context(&steps, levels[j], &cut);
      const int32_t code = ecsq_code(context, cut, row[j] * roots[j] * scale);
      if (ecsq_value(context, cut, code) * units[j] * back != read[(first + t) * dim + j]) return t;
    }
  }
  return tokens;
}

static const char *ecsq_validate(const qkv_part_coder *coder, const uint8_t *block) {
  float rows[QKV_PAGE_TOKENS * QKV_DIM_MAX];
  block_rows of;
  return read_block(coder, block, &of, rows) ? NULL : "the codes are not what an encoder writes";
}

// Of N(0, 1). Even steps with an ideal entropy code are at 1.42 times the limit 4^-bits; with what rows' gains, steps
// and the blocks' heads rans_take 1.63 times was measured at 2 bits.
static double ecsq_error_bound(double bits) {
  return 1.85 * pow(4, -bits);
}

static const qkv_part_stream stream = {.prepared_bytes = qkvi_ecsq_prepared_bytes,
                                       .prepare = qkvi_ecsq_prepare,
                                       .expect = qkvi_ecsq_expect,
                                       .measure = qkvi_ecsq_measure,
                                       .write = qkvi_ecsq_write,
                                       .matching = ecsq_matching};

static const qkv_part_codec part = {.id = ID,
                                    .version = VERSION,
                                    .init = ecsq_init,
                                    .head_bytes = ecsq_head_bytes,
                                    .head = make_head,
                                    .copies = true,
                                    .stream = &stream,
                                    .columns = ecsq_columns,
                                    .accumulate = ecsq_accumulate,
                                    .output_mean = ecsq_output,
                                    .decode = ecsq_decode,
                                    .validate = ecsq_validate};

const qkv_codec qkvi_codec_ecsq = {.id = ID,
                                   .name = "ecsq",
                                   .calibrated = true,
                                   .bits_valid = bits_valid,
                                   .bits_text = "multiples of 0.125 from 1 to 8 with ecsq",
                                   .error_bound = ecsq_error_bound,
                                   .part = &part,
                                   QKV_CODEC_OF_PARTS};
