// Between the files of the codec ecsq: the ladder's tables, a head's, and what a row's codes are made by.
#ifndef QKV_ENGINE_CODEC_ECSQ_INTERNAL_H
#define QKV_ENGINE_CODEC_ECSQ_INTERNAL_H

#include <math.h>
#include <string.h>

#include "engine/codec/ecsq.h"
#include "engine/codec/rans.h"

enum { ECSQ_CONTEXTS = 18, ECSQ_LEAST = -9, ECSQ_HALF = 15, ECSQ_LAST_CONTEXT = ECSQ_CONTEXTS - 1 };
enum { ECSQ_SYMBOLS = 2 * ECSQ_HALF + 2, ECSQ_ESCAPE = ECSQ_SYMBOLS - 1 };
enum { ECSQ_CODE_LIMIT = 1 << 22, ECSQ_EXPONENT_BITS = 5, ECSQ_CUT_MAX = 20 };
enum { ECSQ_HEADER = 4, ECSQ_STATES = 4 * RANS_LANES };
enum { ECSQ_GROUP = 8 };  // coordinates that are coded or left out together
enum { ECSQ_STEP_MIDDLE = 256, ECSQ_STEP_LAST = QKV_PART_STEP_LAST };

// ---- Powers of two and logarithms, the same on every machine ----

extern const float qkvi_ecsq_powers[16];  // 2^(i / 16)

static inline float ecsq_power(int sixteenths) {
  return ldexpf(qkvi_ecsq_powers[sixteenths & 15], sixteenths >> 4);
}

// Eighths of log2(x), x > 0, nearest: borders are odd sixteenths.
static inline int ecsq_log_eighths(float x) {
  int exponent, eighths = 0;
  const float mantissa = 2 * frexpf(x, &exponent);  // in [1, 2)
  for (int i = 1; i < 16; i += 2) eighths += mantissa >= qkvi_ecsq_powers[i];
  return 8 * (exponent - 1) + eighths;
}

// ---- The ladder of distributions (ecsq_ladder.h) ----

// How magnitudes of a context become codes: 0 below `zero`, else 1 or, if it is more, what is below `offset` more.
typedef struct ecsq_borders {
  float zero, offset;
} ecsq_borders;

typedef struct ecsq_symbol {
  uint16_t start, frequency;
  float value;  // in steps; of an escape none
} ecsq_symbol;

typedef struct ecsq_tables {
  uint8_t at[ECSQ_CONTEXTS][RANS_TOTAL];  // the symbol that has each number
  ecsq_symbol symbols[ECSQ_CONTEXTS][ECSQ_SYMBOLS];
  rans_symbol puts[ECSQ_CONTEXTS * ECSQ_SYMBOLS];
  ecsq_borders borders[ECSQ_CONTEXTS];
  uint16_t costs[ECSQ_CONTEXTS * ECSQ_SYMBOLS];  // of each magnitude, in bits / 256
  int32_t tops[ECSQ_CONTEXTS];                   // the largest code with a symbol of its own
  uint32_t expected[ECSQ_CONTEXTS];              // cost of a code on average
  uint16_t escape[ECSQ_CONTEXTS];                // cost of an escape but for the bits of its number
} ecsq_tables;

extern ecsq_tables qkvi_ecsq;
// Fills them. Any thread, any number of times.
void qkvi_ecsq_fill(void);
// -256 log2(frequency / RANS_TOTAL), rounded down.
uint32_t qkvi_ecsq_cost(uint32_t frequency);

// ---- A head ----

// What codes are expected to cost: a table over the contexts' sixteenths, around the head's water level.
enum { ECSQ_EXPECTED = 512 };

typedef struct ecsq_head {
  const qkv_transform *transform;
  uint32_t sinks;
  int level;                         // of the step, sixteenths of an octave
  bool relative;                     // steps are relative to the page's rows
  float size;                        // sum of the counts
  float energy;                      // squared length of usual rows
  uint32_t expected[ECSQ_EXPECTED];  // of a row, in bits / 256
  float numbers[];  // [dim] roots of weights, [dim] one over them, [dim] counts, and then levels, int32_t
} ecsq_head;

static inline float *ecsq_roots(const ecsq_head *head, size_t i, size_t dim) {
  return (float *)head->numbers + i * dim;
}

static inline const int32_t *ecsq_levels(const ecsq_head *head, size_t dim) {
  return (const int32_t *)(head->numbers + 3 * dim);
}

// ---- Gains ----

// Gains of rows, from the middle one of a page, in half octaves: how often of 4096; the rest escapes.
enum { ECSQ_GAIN_HALF = 7, ECSQ_GAIN_ZERO = 0, ECSQ_GAIN_ONE = 128, ECSQ_GAIN_MAX = 255 };
extern const uint16_t qkvi_ecsq_gains[ECSQ_GAIN_HALF + 1];
enum { ECSQ_GAIN_LEFT = RANS_TOTAL - 1500 - 2 * (770 + 270 + 110 + 50 + 25 + 12 + 6) };

// How much finer than the page's a row's steps are: up to FINE_HALVES by as many half octaves, from there on by two
// octaves for each. Where in 4096 each number begins. Sinks get FINE_SINK more half octaves.
enum { ECSQ_FINE_MAX = 15, ECSQ_FINE_HALVES = 8, ECSQ_FINE_SINK = 6 };
extern const uint16_t qkvi_ecsq_fine[ECSQ_FINE_MAX + 2];

// ---- What a row is coded by ----

// Rows with gains above this have coarser steps.
enum { ECSQ_LONG = 4 };

typedef struct ecsq_steps {
  int step;     // sixteenths of an octave
  int context;  // of a coordinate with level 0, in sixteenths
} ecsq_steps;

static inline ecsq_steps ecsq_steps_of(const ecsq_head *head, unsigned step, uint8_t centre, uint8_t gain,
                                       uint8_t fine) {
  const int base = head->relative ? centre : ECSQ_GAIN_ONE;
  const int finer = fine <= ECSQ_FINE_HALVES ? 8 * fine : 8 * ECSQ_FINE_HALVES + 32 * (fine - ECSQ_FINE_HALVES);
  const int at = (int)step - ECSQ_STEP_MIDDLE + head->level +
                 8 * (base + (gain - base > ECSQ_LONG ? gain - base - ECSQ_LONG : 0) - ECSQ_GAIN_ONE) - finer;
  return (ecsq_steps){at, 8 * (gain - ECSQ_GAIN_ONE) - at + 2};
}

// The context of a coordinate, and by how many bits its codes are cut.
static inline unsigned ecsq_context(const ecsq_steps *steps, int32_t level, unsigned *cut) {
  const int at = ((level + steps->context) >> 2) - ECSQ_LEAST;
  *cut = 0;
  if (at < 0) return 0;
  if (at <= ECSQ_LAST_CONTEXT) return (unsigned)at;
  *cut = (unsigned)(at - ECSQ_LAST_CONTEXT + 3) / 4;
  if (*cut > ECSQ_CUT_MAX) *cut = ECSQ_CUT_MAX;
  const int left = at - 4 * (int)*cut;
  return (unsigned)(left > ECSQ_LAST_CONTEXT ? ECSQ_LAST_CONTEXT : left);
}

// What rows with the same gain and fineness share, in a block of one step.
typedef struct ecsq_row {
  float scale;    // a step
  float inverse;  // one over it
  uint8_t gain, fine;
  uint8_t contexts[QKV_DIM_MAX], cuts[QKV_DIM_MAX];
  uint16_t cut_bits[QKV_DIM_MAX / ECSQ_GROUP];  // of all codes of a group
  // What a coordinate is multiplied by, and the context's numbers; of codes that are cut, for those without their low
  // bits, rounded to the nearest.
  float factors[QKV_DIM_MAX], zeros[QKV_DIM_MAX], offsets[QKV_DIM_MAX];
  int32_t tops[QKV_DIM_MAX];
  int32_t bases[QKV_DIM_MAX];  // where the context's symbols begin
} ecsq_row;

enum { ECSQ_ROWS = 8 };

typedef struct ecsq_rows {
  bool set[ECSQ_ROWS];
  ecsq_row rows[ECSQ_ROWS];
} ecsq_rows;

// That of these numbers. `rows` begin with none set; what is returned stays until the next call.
const ecsq_row *qkvi_ecsq_row(const ecsq_head *head, size_t dim, unsigned step, uint8_t centre, uint8_t gain,
                              uint8_t fine, ecsq_rows *rows);

// The code of a coordinate, in steps.
static inline int32_t ecsq_code(unsigned context, unsigned cut, float steps) {
  const float size = fabsf(steps);
  if (!(size < (float)ECSQ_CODE_LIMIT)) return steps < 0 ? -ECSQ_CODE_LIMIT : ECSQ_CODE_LIMIT;
  const ecsq_borders *borders = &qkvi_ecsq.borders[context];
  int32_t code = (int32_t)(size + borders->offset);
  code += code == 0;
  if (size < borders->zero) code = 0;
  if (cut > 0 || code > ECSQ_HALF) code = (int32_t)(size + 0.5f);
  return steps < 0 ? -code : code;
}

static inline float ecsq_value(unsigned context, unsigned cut, int32_t code) {
  if (cut > 0 || code < -ECSQ_HALF || code > ECSQ_HALF) return (float)code;
  return qkvi_ecsq.symbols[context][code + ECSQ_HALF].value;
}

// ---- Encoding (ecsq_encode.c) ----

uint8_t qkvi_ecsq_gain(const ecsq_head *head, const float *row, size_t dim);
size_t qkvi_ecsq_prepared_bytes(const qkv_part_coder *coder);
void qkvi_ecsq_prepare(const qkv_part_coder *coder, uint64_t position, const float *rows, uint32_t tokens, void *out);
size_t qkvi_ecsq_expect(const qkv_part_coder *coder, const void *prepared, unsigned step);
size_t qkvi_ecsq_measure(const qkv_part_coder *coder, void *prepared, unsigned step);
size_t qkvi_ecsq_write(const qkv_part_coder *coder, void *prepared, unsigned step, uint8_t *block, size_t space);

#endif
