// Encoding of ecsq: rows to code space, what a step costs, and a block's bytes.
#include "engine/codec/ecsq_internal.h"

// Sums run over so many lanes, which are added in order: the same on every machine.
typedef float lanes __attribute__((vector_size(16)));
typedef int32_t words __attribute__((vector_size(16)));
typedef int16_t shorts __attribute__((vector_size(8)));
enum { LANES = sizeof(lanes) / sizeof(float) };
_Static_assert(ECSQ_GROUP % LANES == 0, "a row has whole vectors");

static inline lanes load(const float *from) {
  lanes all;
  memcpy(&all, from, sizeof all);
  return all;
}

static inline words load_words(const int32_t *from) {
  words all;
  memcpy(&all, from, sizeof all);
  return all;
}

static inline float sum_of(lanes all) {
  return (all[0] + all[1]) + (all[2] + all[3]);
}

// ---- Rows ----

// Rows of a page with the same gain and fineness.
typedef struct row_kind {
  uint8_t gain, fine, count;
} row_kind;

// One head's rows of a page in code space, each coordinate times the root of its weight; and what they are under the
// step that was measured last.
typedef struct prepared_rows {
  uint32_t tokens, kinds;
  unsigned step;
  size_t live;    // coordinates up to the last one that has a code other than 0
  uint64_t cost;  // of gains and finenesses, in bits / 256
  row_kind kind[QKV_PAGE_TOKENS];
  uint8_t gains[QKV_PAGE_TOKENS];
  uint8_t fine[QKV_PAGE_TOKENS];
  uint8_t centre;
  // Of each row's groups, whether codes are cut or escape.
  bool others[QKV_PAGE_TOKENS][QKV_DIM_MAX / ECSQ_GROUP];
  float rows[];  // [64][dim], and then symbols, of all contexts, int16_t
} prepared_rows;

size_t qkvi_ecsq_prepared_bytes(const qkv_part_coder *coder) {
  return sizeof(prepared_rows) + (size_t)QKV_PAGE_TOKENS * coder->dim * (sizeof(float) + sizeof(int16_t));
}

static inline int16_t *symbols_of(const prepared_rows *of, size_t dim, uint32_t t) {
  return (int16_t *)(of->rows + QKV_PAGE_TOKENS * dim) + t * dim;
}

uint8_t qkvi_ecsq_gain(const ecsq_head *head, const float *row, size_t dim) {
  const float *counts = ecsq_roots(head, 2, dim);
  lanes squares[2] = {{0}};
  for (size_t j = 0; j < dim; j += ECSQ_GROUP) {
    const lanes a = load(row + j), b = load(row + j + LANES);
    squares[0] += load(counts + j) * (a * a);
    squares[1] += load(counts + j + LANES) * (b * b);
  }
  float square = sum_of(squares[0] + squares[1]) / head->size;
  if (!(square > 0)) {
    for (size_t j = 0; j < dim; j++) square = fmaxf(square, row[j] * row[j]);
    if (!(square > 0)) return ECSQ_GAIN_ZERO;
  }
  const int gain = ECSQ_GAIN_ONE + ((ecsq_log_eighths(square) + 4) >> 3);
  return (uint8_t)(gain < 1 ? 1 : gain > ECSQ_GAIN_MAX ? ECSQ_GAIN_MAX : gain);
}

static uint8_t middle_of(const uint8_t *gains, uint32_t tokens) {
  uint32_t counts[ECSQ_GAIN_MAX + 1] = {0}, rows = 0, below = 0;
  for (uint32_t t = 0; t < tokens; t++) {
    counts[gains[t]]++;
    rows += gains[t] != ECSQ_GAIN_ZERO;
  }
  if (rows == 0) return ECSQ_GAIN_ONE;
  for (unsigned gain = 1;; gain++) {
    below += counts[gain];
    if (2 * below >= rows) return (uint8_t)gain;
  }
}

// How much finer steps a row gets that is shorter than usual, so that its error is no larger part of its length.
static uint8_t fine_of(const ecsq_head *head, size_t dim, uint8_t centre, const float *row, bool sink) {
  const float usual = head->relative ? ecsq_power(16 * (centre - ECSQ_GAIN_ONE)) * (float)dim : head->energy;
  lanes squares[2] = {{0}};
  for (size_t c = 0; c < dim; c += ECSQ_GROUP) {
    const lanes a = load(row + c), b = load(row + c + LANES);
    squares[0] += a * a;
    squares[1] += b * b;
  }
  const float square = sum_of(squares[0] + squares[1]), share = usual / (square > 0 ? square : usual);
  int halves = sink ? ECSQ_FINE_SINK : 0;
  if (share > 1) halves += (ecsq_log_eighths(share) + 4) >> 3;
  const int fine = halves <= ECSQ_FINE_HALVES ? halves : ECSQ_FINE_HALVES + (halves - ECSQ_FINE_HALVES + 3) / 4;
  return (uint8_t)(fine > ECSQ_FINE_MAX ? ECSQ_FINE_MAX : fine);
}

static uint32_t gain_cost(uint8_t gain, uint8_t centre) {
  const int off = gain > centre ? gain - centre : centre - gain;
  const bool escapes = gain == ECSQ_GAIN_ZERO || off > ECSQ_GAIN_HALF;
  return escapes ? qkvi_ecsq_cost(ECSQ_GAIN_LEFT) + (8 << 8) : qkvi_ecsq_cost(qkvi_ecsq_gains[off]);
}

// Kinds of rows, and what their gains and finenesses cost.
static void count_kinds(prepared_rows *made) {
  made->kinds = 0;
  made->cost = (uint64_t)(QKV_PAGE_TOKENS - made->tokens) * gain_cost(ECSQ_GAIN_ZERO, made->centre);
  for (uint32_t t = 0; t < made->tokens; t++) {
    const row_kind of = {.gain = made->gains[t], .fine = made->fine[t], .count = 1};
    uint32_t i = 0;
    while (i < made->kinds && (made->kind[i].gain != of.gain || made->kind[i].fine != of.fine)) i++;
    if (i < made->kinds) {
      made->kind[i].count++;
    } else {
      made->kind[made->kinds++] = of;
    }
  }
  for (uint32_t i = 0; i < made->kinds; i++) {
    const row_kind *of = &made->kind[i];
    uint32_t cost = gain_cost(of->gain, made->centre);
    if (of->gain != ECSQ_GAIN_ZERO)
      cost += qkvi_ecsq_cost((uint32_t)qkvi_ecsq_fine[of->fine + 1] - qkvi_ecsq_fine[of->fine]);
    made->cost += (uint64_t)of->count * cost;
  }
}

void qkvi_ecsq_prepare(const qkv_part_coder *coder, uint64_t position, const float *rows, uint32_t tokens,
                       void *out) {
  const ecsq_head *head = coder->tables;
  prepared_rows *made = out;
  const size_t dim = coder->dim;
  const float *roots = ecsq_roots(head, 0, dim);
  made->tokens = tokens;
  made->step = ECSQ_STEP_LAST;
  memcpy(made->rows, rows, tokens * dim * sizeof *rows);
  qkv_transform_forward(head->transform, made->rows, tokens, dim);
  memset(made->gains, 0, sizeof made->gains);
  memset(made->fine, 0, sizeof made->fine);
  for (uint32_t t = 0; t < tokens; t++) {
    float *row = made->rows + t * dim;
    made->gains[t] = qkvi_ecsq_gain(head, row, dim);
    for (size_t j = 0; j < dim; j += LANES) {
      const lanes all = load(row + j) * load(roots + j);
      memcpy(row + j, &all, sizeof all);
    }
  }
  made->centre = middle_of(made->gains, tokens);
  for (uint32_t t = 0; t < tokens; t++) {
    const bool sink = position + t < head->sinks;
    if (made->gains[t] != ECSQ_GAIN_ZERO) made->fine[t] = fine_of(head, dim, made->centre, rows + t * dim, sink);
  }
  count_kinds(made);
}

// ---- What a step costs ----

static size_t bytes_of(uint64_t cost) {
  return ECSQ_HEADER + ECSQ_STATES + (size_t)(cost >> 11);
}

size_t qkvi_ecsq_expect(const qkv_part_coder *coder, const void *prepared, unsigned step) {
  const ecsq_head *head = coder->tables;
  const prepared_rows *from = prepared;
  uint64_t cost = from->cost;
  if (step >= ECSQ_STEP_LAST) return ECSQ_HEADER;
  for (uint32_t i = 0; i < from->kinds; i++) {
    const row_kind *of = &from->kind[i];
    if (of->gain == ECSQ_GAIN_ZERO) continue;
    const ecsq_steps steps = ecsq_steps_of(head, step, from->centre, of->gain, of->fine);
    const int at = steps.context + head->level + ECSQ_EXPECTED / 2, last = ECSQ_EXPECTED - 1;
    uint64_t row = head->expected[at < 0 ? 0 : at > last ? last : at];
    if (at > last) row += (uint64_t)(at - last) * coder->dim * 256 / 16;
    cost += of->count * row;
  }
  return bytes_of(cost);
}

static inline unsigned bits_above(uint32_t x) {
  return 31 - (unsigned)__builtin_clz(x);
}

enum { FAR = ECSQ_SYMBOLS - 1 };

// The magnitudes of codes, as ecsq_code() has them up to the context's top; those of FAR or more are FAR, which *far
// gets to know.
static inline words magnitudes(const ecsq_row *row, size_t j, lanes from, words *far) {
  const lanes all = (lanes)((words)from & INT32_MAX) * load(row->factors + j), most = (lanes){0} + FAR;
  const words within = all < most;
  const lanes size = (lanes)(((words)all & within) | ((words)most & ~within));
  const words codes = __builtin_convertvector(size + load(row->offsets + j), words);
  *far |= ~within;
  return (codes - (codes == 0)) & (size >= load(row->zeros + j));
}

static inline bool any_of(words all) {
  return (all[0] | all[1] | all[2] | all[3]) != 0;
}

// What codes of FAR or more cost more than one of FAR.
static __attribute__((noinline)) uint32_t cost_beyond(const ecsq_row *row, size_t first, const float *from) {
  uint32_t cost = 0;
  for (size_t j = first; j < first + ECSQ_GROUP; j++) {
    const float size = fminf(fabsf(from[j]) * row->factors[j], ECSQ_CODE_LIMIT);
    if (size >= FAR) cost += (bits_above((uint32_t)(size + 1.5f)) - bits_above(FAR + 1)) << 8;
  }
  return cost;
}

// Quantizes a group to symbols, and takes note of whether codes are not 0, and of whether some escape. Returns the
// cost.
static inline uint32_t quantize(const ecsq_row *row, size_t first, const float *from, int16_t *symbols, words *any,
                                bool *escape) {
  uint32_t cost = row->cut_bits[first / ECSQ_GROUP] << 8;
  words far = {0}, escapes = {0};
  for (size_t j = first; j < first + ECSQ_GROUP; j += LANES) {
    const lanes values = load(from + j);
    const words sizes = magnitudes(row, j, values, &far), negative = (words)values >> 31;
    const words bases = load_words(row->bases + j), at = bases + sizes;
    const words codes = bases + ECSQ_HALF + ((sizes ^ negative) - negative);
    escapes |= sizes > load_words(row->tops + j);
    *any |= sizes;
    for (size_t i = 0; i < LANES; i++) cost += qkvi_ecsq.costs[at[i]];
    const shorts narrow = __builtin_convertvector(codes, shorts);
    memcpy(symbols + j, &narrow, sizeof narrow);
  }
  *escape = any_of(escapes);
  return any_of(far) ? cost + cost_beyond(row, first, from) : cost;
}

size_t qkvi_ecsq_measure(const qkv_part_coder *coder, void *prepared, unsigned step) {
  prepared_rows *from = prepared;
  const size_t dim = coder->dim, groups = dim / ECSQ_GROUP;
  uint64_t cost = from->cost, trailing = 0;
  uint32_t costs[QKV_DIM_MAX / ECSQ_GROUP] = {0};
  words any[QKV_DIM_MAX / ECSQ_GROUP] = {{0}};
  ecsq_rows rows;
  if (step >= ECSQ_STEP_LAST) return ECSQ_HEADER;
  memset(rows.set, 0, sizeof rows.set);
  for (uint32_t t = 0; t < from->tokens; t++) {
    if (from->gains[t] == ECSQ_GAIN_ZERO) continue;
    const ecsq_row *row = qkvi_ecsq_row(coder->tables, dim, step, from->centre, from->gains[t], from->fine[t], &rows);
    for (size_t g = 0; g < groups; g++) {
      bool escapes;
      costs[g] += quantize(row, g * ECSQ_GROUP, from->rows + t * dim, symbols_of(from, dim, t), &any[g], &escapes);
      any[g] |= row->cut_bits[g];
      from->others[t][g] = escapes || row->cut_bits[g] > 0;
    }
  }
  from->step = step;
  from->live = 0;
  for (size_t g = 0; g < groups; g++) {
    trailing += costs[g];
    if (!any_of(any[g])) continue;
    cost += trailing;
    trailing = 0;
    from->live = (g + 1) * ECSQ_GROUP;
  }
  return bytes_of(cost);
}

// ---- The block ----

static void put_code(rans_writer *to, size_t lane, unsigned context, unsigned cut, int32_t code) {
  const int32_t half = cut > 0 ? 1 << (cut - 1) : 0, high = (code + half) >> cut;
  const uint32_t size = (uint32_t)(high < 0 ? -high : high), low = (uint32_t)(code + half) & ((1u << cut) - 1);
  const bool escapes = (int32_t)size > qkvi_ecsq.tops[context];
  rans_put_number(to, lane, low, cut);
  if (escapes) {
    const unsigned count = bits_above(size + 1);
    rans_put_bits(to, lane, high < 0, 1);
    rans_put_number(to, lane, (size + 1) & ((1u << count) - 1), count);
    rans_put_bits(to, lane, count, ECSQ_EXPONENT_BITS);
  }
  const ecsq_symbol *as = &qkvi_ecsq.symbols[context][escapes ? ECSQ_ESCAPE : high + ECSQ_HALF];
  rans_put(to, lane, as->start, as->frequency);
}

static void put_gain(rans_writer *to, size_t lane, uint8_t gain, uint8_t centre, uint8_t fine) {
  const int off = (int)gain - centre;
  if (gain != ECSQ_GAIN_ZERO)
    rans_put(to, lane, qkvi_ecsq_fine[fine], qkvi_ecsq_fine[fine + 1] - qkvi_ecsq_fine[fine]);
  if (gain == ECSQ_GAIN_ZERO || off < -ECSQ_GAIN_HALF || off > ECSQ_GAIN_HALF) {
    rans_put_bits(to, lane, gain, 8);
    return rans_put(to, lane, RANS_TOTAL - ECSQ_GAIN_LEFT, ECSQ_GAIN_LEFT);
  }
  uint32_t start = 0;
  for (int i = -ECSQ_GAIN_HALF; i < off; i++) start += qkvi_ecsq_gains[i < 0 ? -i : i];
  rans_put(to, lane, start, qkvi_ecsq_gains[off < 0 ? -off : off]);
}

// A code that is cut, where there is space for two words and it does not escape; else false.
static inline bool put_cut(rans_writer *to, size_t lane, const ecsq_row *row, size_t j, float from) {
  const unsigned cut = row->cuts[j];
  const float size = fabsf(from) * row->inverse;
  if (cut - 1 >= RANS_BITS || !(size < (float)ECSQ_CODE_LIMIT)) return false;
  const int32_t magnitude = (int32_t)(size + 0.5f), half = 1 << (cut - 1);
  const int32_t code = (from < 0 ? -magnitude : magnitude) + half, high = code >> cut;
  if (high > row->tops[j] || -high > row->tops[j]) return false;
  rans_put_few(to, lane, (uint32_t)code & ((1u << cut) - 1), cut);
  rans_put_symbol(to, lane, &qkvi_ecsq.puts[row->bases[j] + ECSQ_HALF + high]);
  return true;
}

// A group with codes that are cut or escape, or for which there may be no space.
static void put_group(rans_writer *to, const ecsq_row *row, size_t first, const float *from) {
  enum { WORDS = 2 };
  for (size_t j = first + ECSQ_GROUP; j-- > first;) {
    const size_t lane = j % RANS_LANES;
    if (to->at - to->begin >= WORDS * RANS_WORD && put_cut(to, lane, row, j, from[j])) continue;
    put_code(to, lane, row->contexts[j], row->cuts[j],
             ecsq_code(row->contexts[j], row->cuts[j], from[j] * row->inverse));
  }
}

static void put_row(rans_writer *to, const ecsq_row *row, const float *from, const int16_t *symbols,
                    const bool *others, size_t live) {
  rans_writer near = *to;
  for (size_t g = live / ECSQ_GROUP; g-- > 0;) {
    const size_t first = g * ECSQ_GROUP;
    if (others[g] || near.at - near.begin < ECSQ_GROUP * RANS_WORD) {
      *to = near;
      put_group(to, row, first, from);
      near = *to;
      continue;
    }
    for (size_t i = ECSQ_GROUP; i-- > 0;) rans_put_symbol(&near, i % RANS_LANES, &qkvi_ecsq.puts[symbols[first + i]]);
  }
  *to = near;
}

size_t qkvi_ecsq_write(const qkv_part_coder *coder, void *prepared, unsigned step, uint8_t *block, size_t space) {
  const prepared_rows *from = prepared;
  const size_t dim = coder->dim;
  const uint16_t step_word = (uint16_t)step;
  ecsq_rows rows;
  if (space < ECSQ_HEADER + ECSQ_STATES) return 0;
  memcpy(block, &step_word, sizeof step_word);
  block[2] = 0;
  block[3] = from->centre;
  if (step >= ECSQ_STEP_LAST) return ECSQ_HEADER;
  memset(rows.set, 0, sizeof rows.set);
  if (from->step != step) (void)qkvi_ecsq_measure(coder, prepared, step);
  block[2] = (uint8_t)(from->live / ECSQ_GROUP);
  uint8_t *const end = block + space / RANS_WORD * RANS_WORD;
  rans_writer to = {.begin = block + ECSQ_HEADER + ECSQ_STATES, .at = end};
  for (size_t lane = 0; lane < RANS_LANES; lane++) to.states[lane] = RANS_LEAST;
  for (uint32_t t = from->tokens; t-- > 0 && !to.full;) {
    if (from->gains[t] == ECSQ_GAIN_ZERO) continue;
    const ecsq_row *row = qkvi_ecsq_row(coder->tables, dim, step, from->centre, from->gains[t], from->fine[t], &rows);
    put_row(&to, row, from->rows + t * dim, symbols_of(from, dim, t), from->others[t], from->live);
  }
  for (uint32_t t = QKV_PAGE_TOKENS; t-- > 0;)
    put_gain(&to, t % RANS_LANES, from->gains[t], from->centre, from->fine[t]);
  if (to.full) return 0;
  const size_t written = (size_t)(end - to.at);
  memmove(block + ECSQ_HEADER + ECSQ_STATES, to.at, written);
  memcpy(block + ECSQ_HEADER, to.states, ECSQ_STATES);
  return ECSQ_HEADER + ECSQ_STATES + written;
}
