#include "engine/codec/ecsq.h"

#include <math.h>
#include <pthread.h>
#include <string.h>

#include "engine/codec/ecsq_ladder.h"
#include "engine/codec/embedded.h"
#include "engine/codec/rans.h"

enum { ID = 22, VERSION = 1 };
enum { HEADER = 4, STATES = 4 * RANS_LANES };
enum { SYMBOLS = 2 * QKVI_ECSQ_HALF + 2, ESCAPE = SYMBOLS - 1 };
enum { LAST_CONTEXT = QKVI_ECSQ_CONTEXTS - 1, CODE_LIMIT = 1 << 22, EXPONENT_BITS = 5 };
enum { OPS_MAX = 8 };  // of a coordinate

// ---- Powers of two and logarithms, the same on every machine ----

enum { SIXTEENTHS = 16 };

// 2^(i / 16)
static const float powers[SIXTEENTHS] = {1.0f,       1.0442737f, 1.0905077f, 1.1387886f, 1.1892071f, 1.2418578f,
                                         1.2968396f, 1.3542556f, 1.4142135f, 1.4768262f, 1.5422108f, 1.6104903f,
                                         1.6817929f, 1.7562522f, 1.8340081f, 1.9152066f};

static float power(int sixteenths) {
  const int whole = sixteenths >> 4;
  return ldexpf(powers[sixteenths & (SIXTEENTHS - 1)], whole);
}

// Eighths of log2(x), x > 0, nearest: borders are odd sixteenths.
static int eighths_of_log(float x) {
  int exponent, eighths = 0;
  const float mantissa = 2 * frexpf(x, &exponent);  // in [1, 2)
  while (eighths < 8 && mantissa >= powers[2 * eighths + 1]) eighths++;
  return 8 * (exponent - 1) + eighths;
}

// -256 log2(frequency / RANS_TOTAL), rounded down.
static uint32_t cost_of(uint32_t frequency) {
  uint64_t x = frequency;
  uint32_t whole = 0, parts = 0;
  while (x >> (whole + 1) != 0) whole++;
  x <<= 31 - whole;  // in [2^31, 2^32)
  for (int i = 0; i < 8; i++) {
    x = x * x >> 31;
    parts = parts << 1 | (uint32_t)(x >> 32);
    if (x >> 32 != 0) x >>= 1;
  }
  return (RANS_BITS << 8) - (whole << 8 | parts);
}

// ---- The ladder of distributions ----

typedef struct symbol {
  uint16_t start, frequency;
} symbol;

typedef struct ladder_tables {
  uint8_t at[QKVI_ECSQ_CONTEXTS][RANS_TOTAL];  // the symbol that has each number
  symbol symbols[QKVI_ECSQ_CONTEXTS][SYMBOLS];
  uint16_t costs[QKVI_ECSQ_CONTEXTS][SYMBOLS];        // in bits / 256
  float values[QKVI_ECSQ_CONTEXTS][SYMBOLS];          // in steps
  float borders[QKVI_ECSQ_CONTEXTS][QKVI_ECSQ_HALF];  // between magnitudes i and i + 1
} ladder_tables;

static ladder_tables tables;

#define LAMBDA 0.1155f  // squared steps that a bit is worth

static void fill_context(unsigned context) {
  const uint16_t *frequencies = ladder[context];
  uint32_t start = 0, left = RANS_TOTAL;
  for (int code = -QKVI_ECSQ_HALF; code <= QKVI_ECSQ_HALF; code++) left -= frequencies[code < 0 ? -code : code];
  for (unsigned i = 0; i < SYMBOLS; i++) {
    const int code = (int)i - QKVI_ECSQ_HALF, magnitude = code < 0 ? -code : code;
    const uint32_t frequency = i == ESCAPE ? left : frequencies[magnitude];
    tables.symbols[context][i] = (symbol){(uint16_t)start, (uint16_t)frequency};
    memset(tables.at[context] + start, (int)i, frequency);
    start += frequency;
    if (i == ESCAPE) break;
    const float shift = (float)shifts[context][magnitude] / 256;
    tables.values[context][i] = (float)code - (code < 0 ? -shift : shift);
  }
  const uint32_t escaped = cost_of(left) + ((EXPONENT_BITS + 1) << 8);
  for (unsigned i = 0; i < SYMBOLS; i++) {
    const uint32_t frequency = tables.symbols[context][i].frequency;
    tables.costs[context][i] = (uint16_t)(frequency == 0 || i == ESCAPE ? escaped : cost_of(frequency));
  }
  for (int i = 0; i < QKVI_ECSQ_HALF; i++) {
    const float *values = tables.values[context] + QKVI_ECSQ_HALF + i;
    const uint16_t *costs = tables.costs[context] + QKVI_ECSQ_HALF + i;
    const float dearer = LAMBDA * ((float)costs[1] - (float)costs[0]) / 256;
    const float border = (values[1] * values[1] - values[0] * values[0] + dearer) / (2 * (values[1] - values[0]));
    tables.borders[context][i] = fminf(fmaxf(border, (float)i), (float)(i + 1));
  }
}

static void fill_tables(void) {
  for (unsigned context = 0; context < QKVI_ECSQ_CONTEXTS; context++) fill_context(context);
}

// Gains of rows, from the middle one of a page, in half octaves: how often of 4096; the rest escapes.
enum { GAIN_HALF = 7, GAIN_ZERO = 0, GAIN_ONE = 128, GAIN_MAX = 255 };
static const uint16_t gain_frequencies[GAIN_HALF + 1] = {1500, 770, 270, 110, 50, 25, 12, 6};
enum { GAIN_LEFT = RANS_TOTAL - 1500 - 2 * (770 + 270 + 110 + 50 + 25 + 12 + 6) };

// How much finer than the page's a row's steps are: up to FINE_HALVES by as many half octaves, from there on by two
// octaves for each. Where in 4096 each number begins. Sinks get FINE_SINK more half octaves.
enum { FINE_MAX = 15, FINE_HALVES = 8, FINE_SINK = 6 };
static const uint16_t fine_starts[FINE_MAX + 2] = {0,    3440, 3680, 3830, 3930, 3990, 4030, 4050, 4062,
                                                   4070, 4076, 4080, 4084, 4087, 4090, 4093, 4096};

static int fine_sixteenths(int fine) {
  return fine <= FINE_HALVES ? 8 * fine : 8 * FINE_HALVES + 32 * (fine - FINE_HALVES);
}

// ---- A head ----

typedef struct head_tables {
  const qkv_transform *transform;
  uint32_t sinks;
  int level;        // of the step, sixteenths of an octave
  bool relative;    // steps are relative to the page's rows
  float size;       // sum of the counts
  float energy;     // squared length of usual rows
  float numbers[];  // [dim] roots of weights, [dim] one over them, [dim] counts, and then levels, int32_t
} head_tables;

static inline float *roots_of(const head_tables *head, size_t i, size_t dim) {
  return (float *)head->numbers + i * dim;
}

static inline const int32_t *levels_of(const head_tables *head, size_t dim) {
  return (const int32_t *)(head->numbers + 3 * dim);
}

// Where the steps of a page are in the middle.
enum { STEP_MIDDLE = 256, STEP_LAST = QKV_PART_STEP_LAST };

static size_t ecsq_head_bytes(const qkv_part_coder *coder) {
  return sizeof(head_tables) + 4 * coder->dim * sizeof(float);
}

// The water level for so many bits, in sixteenths of an octave: what is above it adds up to them.
static int water_level(const int32_t *levels, size_t dim, unsigned tier) {
  const int64_t wanted = (int64_t)tier * 2 * (int64_t)dim;
  int level = 16 * 64;
  for (;; level--) {
    int64_t above = 0;
    for (size_t j = 0; j < dim; j++) above += levels[j] > level ? levels[j] - level : 0;
    if (above >= wanted) return level;
  }
}

static void ecsq_head(const qkv_part_coder *coder, const qkv_coder_spec *spec, const qkv_calibration *calibration,
                      uint32_t layer, uint32_t kv_head, void *made) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  head_tables *head = made;
  const size_t dim = coder->dim;
  const qkv_policy *policy = &spec->policies[layer];
  const qkv_calibration_part kind = coder->part == QKV_V     ? QKV_PART_V
                                    : spec->rope->theta != 0 ? QKV_PART_K_ARCHIVE
                                                             : QKV_PART_K_ATTEND;
  float *roots = roots_of(head, 0, dim), *units = roots_of(head, 1, dim), *counts = roots_of(head, 2, dim);
  int32_t *levels = (int32_t *)levels_of(head, dim);
  int tier = coder->tier;
  (void)pthread_once(&once, fill_tables);
  head->transform = calibration == NULL ? NULL : qkv_calibration_transform(calibration, layer, kv_head, kind);
  if (head->transform == NULL || head->transform->analysis == NULL)
    head->transform = qkv_transform_uniform((uint16_t)dim);
  head->relative = head->transform->analysis == NULL;
  head->sinks = policy->sink_tokens > 0 ? (uint32_t)policy->sink_tokens : 0;
  for (size_t j = 0; j < dim; j++) {
    const float weight = head->transform->weights == NULL ? 1 : head->transform->weights[j];
    roots[j] = sqrtf(weight);
    units[j] = 1 / roots[j];
    levels[j] = eighths_of_log(weight);
  }
  if (calibration != NULL) tier += qkv_calibration_tier_offset(calibration, layer, kv_head, kind);
  head->level = water_level(levels, dim, (unsigned)(tier < 4 ? 4 : tier));
  const float step = power(2 * head->level);
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
}

// ---- Rows ----

// One head's rows of a page in code space, each coordinate times the root of its weight.
typedef struct prepared_rows {
  uint32_t tokens;
  uint8_t gains[QKV_PAGE_TOKENS];
  uint8_t fine[QKV_PAGE_TOKENS];
  uint8_t centre;
  float rows[];  // [64][dim]
} prepared_rows;

static size_t ecsq_prepared_bytes(const qkv_part_coder *coder) {
  return sizeof(prepared_rows) + (size_t)QKV_PAGE_TOKENS * coder->dim * sizeof(float);
}

static uint8_t gain_of(const head_tables *head, const float *row, size_t dim) {
  const float *counts = roots_of(head, 2, dim);
  float square = 0;
  for (size_t j = 0; j < dim; j++) square += counts[j] * (row[j] * row[j]);
  square /= head->size;
  if (!(square > 0)) {
    for (size_t j = 0; j < dim; j++) square = fmaxf(square, row[j] * row[j]);
    if (!(square > 0)) return GAIN_ZERO;
  }
  const int gain = GAIN_ONE + ((eighths_of_log(square) + 4) >> 3);
  return (uint8_t)(gain < 1 ? 1 : gain > GAIN_MAX ? GAIN_MAX : gain);
}

static uint8_t middle_of(const uint8_t *gains, uint32_t tokens) {
  uint32_t counts[GAIN_MAX + 1] = {0}, rows = 0, below = 0;
  for (uint32_t t = 0; t < tokens; t++) {
    counts[gains[t]]++;
    rows += gains[t] != GAIN_ZERO;
  }
  if (rows == 0) return GAIN_ONE;
  for (unsigned gain = 1;; gain++) {
    below += counts[gain];
    if (2 * below >= rows) return (uint8_t)gain;
  }
}

// How much finer steps a row gets that is shorter than usual, so that its error is no larger part of its length.
static uint8_t fine_of(const qkv_part_coder *coder, uint8_t centre, const float *row, bool sink) {
  const head_tables *head = coder->tables;
  const float usual = head->relative ? power(16 * (centre - GAIN_ONE)) * (float)coder->dim : head->energy;
  float square = 0;
  for (size_t c = 0; c < coder->dim; c++) square += row[c] * row[c];
  const float share = usual / (square > 0 ? square : usual);
  int halves = sink ? FINE_SINK : 0;
  if (share > 1) halves += (eighths_of_log(share) + 4) >> 3;
  const int fine = halves <= FINE_HALVES ? halves : FINE_HALVES + (halves - FINE_HALVES + 3) / 4;
  return (uint8_t)(fine > FINE_MAX ? FINE_MAX : fine);
}

static void ecsq_prepare(const qkv_part_coder *coder, uint64_t position, const float *rows, uint32_t tokens,
                         void *out) {
  const head_tables *head = coder->tables;
  prepared_rows *made = out;
  const size_t dim = coder->dim;
  const float *roots = roots_of(head, 0, dim);
  made->tokens = tokens;
  memcpy(made->rows, rows, tokens * dim * sizeof *rows);
  qkv_transform_forward(head->transform, made->rows, tokens, dim);
  memset(made->gains, 0, sizeof made->gains);
  memset(made->fine, 0, sizeof made->fine);
  for (uint32_t t = 0; t < tokens; t++) {
    float *row = made->rows + t * dim;
    made->gains[t] = gain_of(head, row, dim);
    for (size_t j = 0; j < dim; j++) row[j] *= roots[j];
  }
  made->centre = middle_of(made->gains, tokens);
  for (uint32_t t = 0; t < tokens; t++) {
    const bool sink = position + t < head->sinks;
    made->fine[t] = made->gains[t] == GAIN_ZERO ? 0 : fine_of(coder, made->centre, rows + t * dim, sink);
  }
}

// Rows with gains above this have coarser steps.
enum { LONG = 4 };

typedef struct row_steps {
  int step;     // sixteenths of an octave
  int context;  // of a coordinate with level 0, in sixteenths
} row_steps;

static row_steps steps_of(const head_tables *head, unsigned step, uint8_t centre, uint8_t gain, uint8_t fine) {
  const int base = head->relative ? centre : GAIN_ONE;
  const int at = (int)step - STEP_MIDDLE + head->level +
                 8 * (base + (gain - base > LONG ? gain - base - LONG : 0) - GAIN_ONE) - fine_sixteenths(fine);
  return (row_steps){at, 8 * (gain - GAIN_ONE) - at + 2};
}

// The context of a coordinate, and by how many bits its codes are cut.
static inline unsigned context_of(const row_steps *steps, int32_t level, unsigned *cut) {
  const int at = ((level + steps->context) >> 2) - QKVI_ECSQ_LEAST;
  *cut = 0;
  if (at < 0) return 0;
  if (at <= LAST_CONTEXT) return (unsigned)at;
  *cut = (unsigned)(at - LAST_CONTEXT + 3) / 4;
  if (*cut > 20) *cut = 20;
  const int left = at - 4 * (int)*cut;
  return (unsigned)(left > LAST_CONTEXT ? LAST_CONTEXT : left);
}

static inline int32_t code_of(unsigned context, unsigned cut, float steps) {
  const float size = fabsf(steps);
  if (!(size < (float)CODE_LIMIT)) return steps < 0 ? -CODE_LIMIT : CODE_LIMIT;
  int32_t code = (int32_t)size;
  if (cut == 0 && code < QKVI_ECSQ_HALF) {
    code += size >= tables.borders[context][code];
  } else {
    code += size - (float)code >= 0.5f;
  }
  return steps < 0 ? -code : code;
}

static inline unsigned bits_above(uint32_t x) {
  return 31 - (unsigned)__builtin_clz(x);
}

// What a code is coded by: a symbol, and what its cut or its escape leaves.
typedef struct parts_of_code {
  unsigned symbol;
  uint32_t low, beyond;
  bool negative;
} parts_of_code;

static inline parts_of_code split(unsigned context, unsigned cut, int32_t code) {
  const int32_t half = cut > 0 ? 1 << (cut - 1) : 0, high = (code + half) >> cut;
  const int32_t size = high < 0 ? -high : high;
  parts_of_code parts = {.low = (uint32_t)(code + half) & ((1u << cut) - 1), .negative = high < 0};
  parts.symbol = size > QKVI_ECSQ_HALF ? ESCAPE : (unsigned)(high + QKVI_ECSQ_HALF);
  if (parts.symbol != ESCAPE && tables.symbols[context][parts.symbol].frequency == 0) parts.symbol = ESCAPE;
  if (parts.symbol == ESCAPE) parts.beyond = (uint32_t)size + 1;
  return parts;
}

static inline float value_of(unsigned context, unsigned cut, int32_t code) {
  if (cut > 0 || code < -QKVI_ECSQ_HALF || code > QKVI_ECSQ_HALF) return (float)code;
  return tables.values[context][code + QKVI_ECSQ_HALF];
}

static uint32_t gain_cost(uint8_t gain, uint8_t centre) {
  const int off = gain > centre ? gain - centre : centre - gain;
  const bool escapes = gain == GAIN_ZERO || off > GAIN_HALF;
  return escapes ? cost_of(GAIN_LEFT) + (8 << 8) : cost_of(gain_frequencies[off]);
}

static size_t ecsq_measure(const qkv_part_coder *coder, const void *prepared, unsigned step) {
  const head_tables *head = coder->tables;
  const prepared_rows *from = prepared;
  const size_t dim = coder->dim;
  const int32_t *levels = levels_of(head, dim);
  uint64_t cost = 0;
  uint32_t zeros[QKV_DIM_MAX] = {0};  // the cost of trailing zeros
  size_t live = 0;
  if (step >= STEP_LAST) return HEADER;
  for (uint32_t t = 0; t < QKV_PAGE_TOKENS; t++) {
    const uint8_t gain = from->gains[t];
    cost += gain_cost(gain, from->centre);
    if (gain == GAIN_ZERO) continue;
    cost += cost_of(fine_starts[from->fine[t] + 1] - fine_starts[from->fine[t]]);
    const row_steps steps = steps_of(head, step, from->centre, gain, from->fine[t]);
    const float scale = power(-steps.step);
    const float *row = from->rows + t * dim;
    for (size_t j = 0; j < dim; j++) {
      unsigned cut;
      const unsigned context = context_of(&steps, levels[j], &cut);
      const int32_t code = code_of(context, cut, row[j] * scale);
      if (code != 0 && j >= live) live = j + 1;
      if (cut == 0 && code >= -QKVI_ECSQ_HALF && code <= QKVI_ECSQ_HALF &&
          tables.symbols[context][code + QKVI_ECSQ_HALF].frequency != 0) {
        zeros[j] += tables.costs[context][code + QKVI_ECSQ_HALF];
        continue;
      }
      const parts_of_code parts = split(context, cut, code);
      zeros[j] += tables.costs[context][parts.symbol] + (cut << 8);
      if (parts.symbol == ESCAPE) zeros[j] += bits_above(parts.beyond) << 8;
    }
  }
  live = (live + 7) / 8 * 8;
  for (size_t j = 0; j < live; j++) cost += zeros[j];
  return HEADER + STATES + (size_t)(cost >> 11);
}

// ---- The entropy code ----

static void put_code(rans_writer *to, size_t lane, unsigned context, unsigned cut, int32_t code) {
  const parts_of_code parts = split(context, cut, code);
  rans_put_number(to, lane, parts.low, cut);
  if (parts.symbol == ESCAPE) {
    const unsigned count = bits_above(parts.beyond);
    rans_put_bits(to, lane, parts.negative, 1);
    rans_put_number(to, lane, parts.beyond & ((1u << count) - 1), count);
    rans_put_bits(to, lane, count, EXPONENT_BITS);
  }
  const symbol *as = &tables.symbols[context][parts.symbol];
  rans_put(to, lane, as->start, as->frequency);
}

static void put_gain(rans_writer *to, size_t lane, uint8_t gain, uint8_t centre, uint8_t fine) {
  const int off = (int)gain - centre;
  if (gain != GAIN_ZERO) rans_put(to, lane, fine_starts[fine], fine_starts[fine + 1] - fine_starts[fine]);
  if (gain == GAIN_ZERO || off < -GAIN_HALF || off > GAIN_HALF) {
    rans_put_bits(to, lane, gain, 8);
    return rans_put(to, lane, RANS_TOTAL - GAIN_LEFT, GAIN_LEFT);
  }
  uint32_t start = 0;
  for (int i = -GAIN_HALF; i < off; i++) start += gain_frequencies[i < 0 ? -i : i];
  rans_put(to, lane, start, gain_frequencies[off < 0 ? -off : off]);
}

static size_t ecsq_write(const qkv_part_coder *coder, const void *prepared, unsigned step, uint8_t *block,
                         size_t space) {
  const head_tables *head = coder->tables;
  const prepared_rows *from = prepared;
  const size_t dim = coder->dim;
  const int32_t *levels = levels_of(head, dim);
  const uint16_t step_word = (uint16_t)step;
  if (space < HEADER + STATES) return 0;
  memcpy(block, &step_word, sizeof step_word);
  block[2] = 0;
  block[3] = from->centre;
  if (step >= STEP_LAST) return HEADER;
  // The coordinates up to the last one that has a code other than 0.
  size_t live = 0;
  for (uint32_t t = 0; t < from->tokens; t++) {
    const row_steps steps = steps_of(head, step, from->centre, from->gains[t], from->fine[t]);
    const float scale = power(-steps.step);
    for (size_t j = dim; from->gains[t] != GAIN_ZERO && j > live; j--) {
      unsigned cut;
      const unsigned context = context_of(&steps, levels[j - 1], &cut);
      if (code_of(context, cut, from->rows[t * dim + j - 1] * scale) != 0) live = j;
    }
  }
  live = (live + 7) / 8 * 8;
  block[2] = (uint8_t)(live / 8);
  rans_writer to = {.begin = block + HEADER + STATES, .at = block + space / RANS_WORD * RANS_WORD};
  for (size_t lane = 0; lane < RANS_LANES; lane++) to.states[lane] = RANS_LEAST;
  for (uint32_t t = QKV_PAGE_TOKENS; t-- > 0;) {
    if (from->gains[t] == GAIN_ZERO) continue;
    const row_steps steps = steps_of(head, step, from->centre, from->gains[t], from->fine[t]);
    const float scale = power(-steps.step);
    for (size_t j = live; j-- > 0;) {
      unsigned cut;
      const unsigned context = context_of(&steps, levels[j], &cut);
      put_code(&to, j % RANS_LANES, context, cut, code_of(context, cut, from->rows[t * dim + j] * scale));
    }
  }
  for (uint32_t t = QKV_PAGE_TOKENS; t-- > 0;)
    put_gain(&to, t % RANS_LANES, from->gains[t], from->centre, from->fine[t]);
  if (to.full) return 0;
  const size_t words = (size_t)(block + space / RANS_WORD * RANS_WORD - to.at);
  memmove(block + HEADER + STATES, to.at, words);
  memcpy(block + HEADER, to.states, STATES);
  return HEADER + STATES + words;
}

static uint8_t take_gain(rans_reader *from, size_t lane, uint8_t centre, uint8_t *fine) {
  uint32_t slot = rans_peek(from, lane), start = 0;
  int gain = centre - GAIN_HALF, off = -GAIN_HALF;
  if (slot >= RANS_TOTAL - GAIN_LEFT) {
    rans_take(from, lane, RANS_TOTAL - GAIN_LEFT, GAIN_LEFT);
    gain = (int)rans_take_bits(from, lane, 8);
  } else {
    for (; slot >= start + gain_frequencies[off < 0 ? -off : off]; off++, gain++)
      start += gain_frequencies[off < 0 ? -off : off];
    rans_take(from, lane, start, gain_frequencies[off < 0 ? -off : off]);
    if (gain < 1 || gain > GAIN_MAX) {
      from->wrong = true;
      gain = 1;
    }
  }
  *fine = 0;
  if (gain == GAIN_ZERO) return GAIN_ZERO;
  slot = rans_peek(from, lane);
  while (slot >= fine_starts[*fine + 1]) ++*fine;
  rans_take(from, lane, fine_starts[*fine], fine_starts[*fine + 1] - fine_starts[*fine]);
  return (uint8_t)gain;
}

// A code that is cut or escapes, after its symbol.
static __attribute__((noinline)) int32_t take_rest(rans_reader *from, size_t lane, unsigned cut, unsigned as) {
  int32_t high = (int32_t)as - QKVI_ECSQ_HALF;
  if (as == ESCAPE) {
    const unsigned count = rans_take_bits(from, lane, EXPONENT_BITS);
    const unsigned bits = count > 2 * RANS_BITS - 1 ? 2 * RANS_BITS - 1 : count;
    const int32_t size = (int32_t)((1u << bits | rans_take_number(from, lane, bits)) - 1);
    if (count != bits) from->wrong = true;
    high = rans_take_bits(from, lane, 1) != 0 ? -size : size;
  }
  const int64_t code = ((int64_t)high * ((int64_t)1 << cut)) + (int64_t)rans_take_number(from, lane, cut) -
                       (cut > 0 ? (int64_t)1 << (cut - 1) : 0);
  if (code > CODE_LIMIT || code < -CODE_LIMIT) {
    from->wrong = true;
    return 0;
  }
  return (int32_t)code;
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
static bool read_block(const qkv_part_coder *coder, const uint8_t *block, size_t bytes, block_rows *rows,
                       float *out) {
  const head_tables *head = coder->tables;
  const size_t dim = coder->dim;
  const int32_t *levels = levels_of(head, dim);
  const float *units = roots_of(head, 1, dim);
  uint16_t step;
  memset(out, 0, QKV_PAGE_TOKENS * dim * sizeof *out);
  memset(rows, 0, sizeof *rows);
  if (bytes < HEADER) return false;
  memcpy(&step, block, sizeof step);
  rows->step = step;
  rows->live = (size_t)block[2] * 8;
  rows->centre = block[3];
  if (step > STEP_LAST || rows->live > dim || rows->centre == GAIN_ZERO) return false;
  if (step == STEP_LAST) return bytes == HEADER && rows->live == 0;
  if (bytes < HEADER + STATES) return false;
  rans_reader from = {.at = block + HEADER + STATES, .end = block + bytes};
  memcpy(from.states, block + HEADER, STATES);
  for (size_t lane = 0; lane < RANS_LANES; lane++) {
    if (from.states[lane] < RANS_LEAST) return false;
  }
  for (uint32_t t = 0; t < QKV_PAGE_TOKENS; t++)
    rows->gains[t] = take_gain(&from, t % RANS_LANES, rows->centre, &rows->fine[t]);
  for (uint32_t t = 0; t < QKV_PAGE_TOKENS; t++) {
    if (rows->gains[t] == GAIN_ZERO) continue;
    const row_steps steps = steps_of(head, step, rows->centre, rows->gains[t], rows->fine[t]);
    const float scale = power(steps.step);
    for (size_t j = 0; j < rows->live; j += RANS_LANES) {
      for (size_t lane = 0; lane < RANS_LANES; lane++) {
        unsigned cut;
        const unsigned context = context_of(&steps, levels[j + lane], &cut);
        const unsigned as = tables.at[context][rans_peek(&from, lane)];
        const symbol *found = &tables.symbols[context][as];
        float value = tables.values[context][as];
        rans_take(&from, lane, found->start, found->frequency);
        if (cut > 0 || as == ESCAPE) value = value_of(context, cut, take_rest(&from, lane, cut, as));
        out[t * dim + j + lane] = value * units[j + lane] * scale;
      }
    }
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
  const head_tables *head = coder->tables;
  block_rows of;
  (void)read_block(coder, block, SIZE_MAX / 2, &of, rows);
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
  (void)read_block(coder, block, SIZE_MAX / 2, &of, rows);
  for (size_t i = 0; i < n; i++) {
    for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) {
      const float weight = weights[i * QKV_PAGE_TOKENS + t];
      for (size_t j = 0; j < of.live; j++) sums[i * dim + j] += weight * rows[t * dim + j];
    }
  }
}

static void ecsq_output(const qkv_part_coder *coder, float *sums, const double *totals, size_t n) {
  const head_tables *head = coder->tables;
  qkv_transform_output(head->transform, sums, totals, n, coder->dim);
}

static uint32_t ecsq_matching(const qkv_part_coder *coder, const uint8_t *block, uint32_t first, uint32_t tokens,
                              const float *rows) {
  const head_tables *head = coder->tables;
  const size_t dim = coder->dim;
  const int32_t *levels = levels_of(head, dim);
  const float *roots = roots_of(head, 0, dim), *units = roots_of(head, 1, dim);
  float read[QKV_PAGE_TOKENS * QKV_DIM_MAX], row[QKV_DIM_MAX];
  block_rows of;
  (void)read_block(coder, block, SIZE_MAX / 2, &of, read);
  for (uint32_t t = 0; t < tokens; t++) {
    memcpy(row, rows + t * dim, dim * sizeof *row);
    qkv_transform_forward(head->transform, row, 1, dim);
    if (of.step < STEP_LAST && gain_of(head, row, dim) != of.gains[first + t]) return t;
    if (of.gains[first + t] == GAIN_ZERO) continue;
    const row_steps steps = steps_of(head, of.step, of.centre, of.gains[first + t], of.fine[first + t]);
    const float scale = power(-steps.step), back = power(steps.step);
    for (size_t j = 0; j < dim; j++) {
      unsigned cut;
      const unsigned context = context_of(&steps, levels[j], &cut);
      const int32_t code = code_of(context, cut, row[j] * roots[j] * scale);
      if (value_of(context, cut, code) * units[j] * back != read[(first + t) * dim + j]) return t;
    }
  }
  return tokens;
}

static const char *ecsq_validate(const qkv_part_coder *coder, const uint8_t *block, size_t bytes) {
  float rows[QKV_PAGE_TOKENS * QKV_DIM_MAX];
  block_rows of;
  return read_block(coder, block, bytes, &of, rows) ? NULL : "the codes are not what an encoder writes";
}

// Of N(0, 1). Even steps with an ideal entropy code are at 1.42 times the limit 4^-bits; with what rows' gains, steps
// and the blocks' heads rans_take 1.63 times was measured at 2 bits.
static double ecsq_error_bound(double bits) {
  return 1.85 * pow(4, -bits);
}

static const qkv_part_stream stream = {.prepared_bytes = ecsq_prepared_bytes,
                                       .prepare = ecsq_prepare,
                                       .measure = ecsq_measure,
                                       .write = ecsq_write,
                                       .matching = ecsq_matching,
                                       .validate = ecsq_validate};

static const qkv_part_codec part = {.id = ID,
                                    .version = VERSION,
                                    .init = ecsq_init,
                                    .head_bytes = ecsq_head_bytes,
                                    .head = ecsq_head,
                                    .stream = &stream,
                                    .columns = ecsq_columns,
                                    .accumulate = ecsq_accumulate,
                                    .output_mean = ecsq_output,
                                    .decode = ecsq_decode};

const qkv_codec qkvi_codec_ecsq = {.id = ID,
                                   .name = "ecsq",
                                   .calibrated = true,
                                   .bits_valid = bits_valid,
                                   .bits_text = "multiples of 0.125 from 1 to 8 with ecsq",
                                   .error_bound = ecsq_error_bound,
                                   .part = &part,
                                   QKV_CODEC_OF_PARTS};
