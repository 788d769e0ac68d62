// Rows to codes: the kernel qkv_simt_encode_rows of rows.h. What is computed, and in which order, is said in
// engine/kernel/encode_plain.h.
#include "engine/kernel/simt/rows.h"
#include "engine/kernel/simt/simt.h"
#include "engine/kernel/simt/tile.h"

#define ENCODE_THREADS_MAX 512
#define SUM_LANES TILE_SUM_LANES
#define FOURS 4u
#define SHALLOW_DEPTH 4u  // bits of a coordinate whose t is a whole number
#define FULL_DEPTH 8u

// What is known of the tokens.
typedef struct token_states {
  float squares[TILE_TOKENS];  // of coordinates that have bits
  float inverse[TILE_TOKENS], unit[TILE_TOKENS];
  float rest[TILE_TOKENS];  // squares of coordinates without bits
  float most[TILE_TOKENS];
  uint32_t zero[TILE_TOKENS];
  uint32_t gains[TILE_TOKENS], best[TILE_TOKENS];
  float scale[TILE_TOKENS];  // of whole numbers that the analysis takes
} token_states;

// In shared memory.
typedef struct encoding {
  const qkv_simt_encode_tables *tables;
  float *sums;  // [4][SUM_LANES][TILE_TOKENS]
  token_states *states;
  float *tile;
  const float *weights, *fours;  // NULL: all are 1
  float weight;                  // the sum of those of coordinates that have bits
} encoding;

// ---- Rows ----

SIMT_INLINE float float_of_half(uint32_t half) {
  const uint32_t sign = (half & 0x8000) << 16, magnitude = half & 0x7fff, shifted = magnitude << 13;
  if (magnitude >= 0x7c00) return simt_float(sign | shifted | 0x7f800000);
  if (magnitude >= 0x0400) return simt_float(sign | (shifted + (112u << 23)));
  return simt_float(sign | simt_bits((float)magnitude * (1.0f / 16777216)));
}

SIMT_INLINE float number_of(const uint8_t *row, unsigned dtype, unsigned c) {
  if (dtype == TILE_FP32) return ((const float *)(const void *)row)[c];
  const uint32_t bits = ((const uint16_t *)(const void *)row)[c];
  return dtype == TILE_FP16 ? float_of_half(bits) : simt_float(bits << 16);
}

SIMT_INLINE void take_rows(const qkv_simt_encode *job, float *tile) {
  const unsigned dim = job->code->dim;
  for (unsigned i = simt_thread(); i < dim * TILE_TOKENS; i += simt_threads()) {
    const unsigned c = i % dim, token = i / dim;
    tile[c * TILE_STRIDE + token] =
        token < job->tokens ? number_of(job->rows + token * job->stride, job->dtype, c) : 0;
  }
  simt_sync_block();
}

// ---- Sums of tokens ----

SIMT_INLINE float *lane_sum(const encoding *e, unsigned which, unsigned lane, unsigned token) {
  return e->sums + (which * SUM_LANES + lane) * TILE_TOKENS + token;
}

SIMT_INLINE float sum_of(const encoding *e, unsigned which, unsigned token) {
  return tile_sum(lane_sum(e, which, 0, 0), token);
}

// ---- To code space ----

// Whether rows are not those of data-free code in the plain frame.
SIMT_INLINE bool is_turned(const qkv_simt_encode *job) {
  return job->code->analysis != 0 || job->flags != 0;
}

// Squared lengths, as qkvi_row_dot adds them up (engine/codec/row.h).
SIMT_INLINE void measure_rows(const qkv_simt_encode *job, const encoding *e) {
  for (unsigned i = simt_thread(); i < SUM_LANES * TILE_TOKENS; i += simt_threads()) {
    const unsigned lane = i / TILE_TOKENS, token = i % TILE_TOKENS;
    *lane_sum(e, 0, lane, token) = tile_squares(e->tile, lane, token, 0, job->code->dim);
  }
  simt_sync_block();
  for (unsigned t = simt_thread(); t < TILE_TOKENS; t += simt_threads()) {
    float quad[4];
    SIMT_UNROLL
    for (unsigned i = 0; i < 4; i++)
      quad[i] = (*lane_sum(e, 0, i, t) + *lane_sum(e, 0, 4 + i, t)) +
                (*lane_sum(e, 0, 8 + i, t) + *lane_sum(e, 0, 12 + i, t));
    job->out->squares[t] = (quad[0] + quad[1]) + (quad[2] + quad[3]);
  }
  simt_sync_block();
}

// Keys to the attend frame, less the rotating anchor, or to before RoPE (engine/codec/phases.c).
SIMT_INLINE void turn_to_frame(const qkv_simt_encode *job, float *tile) {
  const qkv_simt_code *code = job->code;
  const unsigned pairs = code->pairs;
  const bool framed = (job->flags & QKV_SIMT_ROWS_FRAME) != 0;
  for (unsigned i = simt_thread(); i < pairs * TILE_TOKENS; i += simt_threads()) {
    const unsigned pair = i / TILE_TOKENS;
    if (i % TILE_TOKENS >= job->tokens) continue;
    const float *turns = job->turns + pair, slot_c = job->slots[i], slot_s = job->slots[pairs * TILE_TOKENS + i];
    float *first = tile + pair * code->step * TILE_STRIDE + i % TILE_TOKENS,
          *second = first + code->apart * TILE_STRIDE;
    const float a = *first, b = *second;
    if (framed) {
      const float c = turns[0], s = turns[pairs], x = turns[2 * pairs], y = turns[3 * pairs];
      *first = a * c + b * s - (x * slot_c - y * slot_s);
      *second = b * c - a * s - (x * slot_s + y * slot_c);
    } else {
      const float centre_c = turns[4 * pairs], centre_s = turns[5 * pairs];
      const float c = centre_c * slot_c - centre_s * slot_s, s = -(centre_c * slot_s + centre_s * slot_c);
      *first = a * c - b * s;
      *second = a * s + b * c;
    }
  }
  simt_sync_block();
}

// The analysis of rows less the mean; tokens beyond the last are zeros.
SIMT_INLINE void analyse(const qkv_simt_encode *job, const encoding *e) {
  const qkv_simt_code *code = job->code;
  const unsigned dim = code->dim;
  const uint8_t *matrix = (const uint8_t *)code + code->analysis;
  const float *mean = (const float *)(const void *)(matrix + 2 * dim * dim) + dim;
  const tile_whole whole = {e->sums, e->states->unit, e->states->scale};
  for (unsigned i = simt_thread(); i < dim * TILE_TOKENS; i += simt_threads()) {
    float *number = e->tile + i / TILE_TOKENS * TILE_STRIDE + i % TILE_TOKENS;
    *number = i % TILE_TOKENS < job->tokens ? *number - mean[i / TILE_TOKENS] : 0;
  }
  simt_sync_block();
  tile_multiply(matrix, dim, dim, NULL, &whole, e->tile);
}

// ---- Gains ----

SIMT_INLINE uint32_t clamped_gain(int32_t gain) {
  return (uint32_t)(gain < 1 ? 1 : gain > 255 ? 255 : gain);
}

SIMT_INLINE uint32_t nearest_gain(const qkv_simt_encode_tables *tables, float factor) {
  const uint32_t bits = simt_bits(factor);
  const float mantissa = simt_float((bits & 0x7fffff) | 0x3f800000);
  int32_t gain = 128 + 8 * (((int32_t)bits >> 23) - 127);
  SIMT_UNROLL
  for (unsigned i = 0; i < 8; i++) gain += mantissa > tables->gain_middles[i] ? 1 : 0;
  return clamped_gain(gain);
}

// Of the square root.
SIMT_INLINE uint32_t nearest_gain_of_square(const qkv_simt_encode_tables *tables, float square) {
  const int32_t bits = (int32_t)simt_bits(square), exponent = (bits >> 23) - 127;
  const float mantissa = simt_float(((uint32_t)bits & 0x7fffff) | (uint32_t)(127 + (exponent & 1)) << 23);
  int32_t gain = 128 + 8 * (exponent >> 1);
  SIMT_UNROLL
  for (unsigned i = 0; i < 8; i++) gain += mantissa > tables->gain_middles[i] * tables->gain_middles[i] ? 1 : 0;
  return clamped_gain(gain);
}

// Of coordinates that have bits, weighted.
SIMT_INLINE float weighted_squares(const encoding *e, unsigned coded, unsigned lane, unsigned token) {
  float sum = 0;
  for (unsigned c = lane; c < coded; c += SUM_LANES) {
    const float x = e->tile[c * TILE_STRIDE + token];
    sum += e->fours[c / FOURS] * x * x;
  }
  return sum;
}

// Of coordinates without bits: qkvi_row_error (engine/codec/row.h).
SIMT_INLINE float rest_of(const encoding *e, unsigned coded, unsigned dim, unsigned token) {
  double lanes[8];
  SIMT_UNROLL
  for (unsigned i = 0; i < 8; i++) lanes[i] = 0;
  for (unsigned c = coded; c < dim; c += 8) {
    SIMT_UNROLL
    for (unsigned i = 0; i < 8; i++) {
      const float x = e->tile[(c + i) * TILE_STRIDE + token];
      lanes[i] += (double)(x * x * (e->weights != NULL ? e->weights[c + i] : 1));
    }
  }
  return (float)(((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7])));
}

// Each token's scale, and of rows that are not turned the squares that the host gets.
SIMT_INLINE void choose_scales(const qkv_simt_encode *job, const encoding *e) {
  const unsigned dim = job->code->dim, coded = job->code->reach[job->tier][1];
  const bool turned = is_turned(job);
  for (unsigned i = simt_thread(); i < SUM_LANES * TILE_TOKENS; i += simt_threads()) {
    const unsigned lane = i / TILE_TOKENS, token = i % TILE_TOKENS;
    *lane_sum(e, 0, lane, token) =
        e->fours != NULL ? weighted_squares(e, coded, lane, token) : tile_squares(e->tile, lane, token, 0, coded);
    *lane_sum(e, 1, lane, token) = tile_squares(e->tile, lane, token, 0, dim);
    *lane_sum(e, 2, lane, token) = tile_squares(e->tile, lane, token, coded, dim);
  }
  simt_sync_block();
  for (unsigned t = simt_thread(); t < TILE_TOKENS; t += simt_threads()) {
    const float squares = sum_of(e, 0, t), least = e->tables->rows.gains[1] / 2;
    const float mean = squares / (e->weight > 0 ? e->weight : 1.0f);
    const float value = e->tables->rows.gains[nearest_gain_of_square(e->tables, mean)];
    e->states->squares[t] = squares;
    e->states->zero[t] = mean < least * least;
    e->states->inverse[t] = 64 / value;
    e->states->unit[t] = value / 64;
    e->states->rest[t] = turned ? rest_of(e, coded, dim, t) : sum_of(e, 2, t);
    if (!turned) job->out->squares[t] = sum_of(e, 1, t);
  }
  simt_sync_block();
}

// ---- Codes ----

SIMT_INLINE unsigned whole_t(float x, float inverse) {
  const float t = simt_float(simt_bits(x * inverse) & 0x7fffffff);
  return (unsigned)((t < 255.0f ? t : 255.0f) + 8388608.0f - 8388608.0f);
}

// qkv_codebook_code: by halves of what is left.
SIMT_INLINE unsigned codebook_code(const qkv_simt_encode_tables *tables, float x) {
  const bool negative = x < 0;
  const uint32_t magnitude = (simt_bits(x) & 0x7fffffff) - (negative ? 1 : 0);
  unsigned cell = 0;
  SIMT_UNROLL
  for (unsigned depth = 2; depth <= FULL_DEPTH; depth++)
    cell = 2 * cell + (magnitude >= tables->middles[(1u << (depth - 2)) + cell] ? 1 : 0);
  return (128 + cell) ^ (negative ? 255 : 0);
}

// At full depth.
SIMT_INLINE unsigned code_of(const qkv_simt_encode_tables *tables, bool deep, unsigned scale, float x,
                             float inverse) {
  if (deep) return codebook_code(tables, x * inverse * (1.0f / 64) * tables->scales[scale]);
  const unsigned code = tables->cells[scale][whole_t(x, inverse)];
  return simt_bits(x) >> 31 != 0 ? code ^ 255 : code;
}

// Bits of coordinate c.
SIMT_INLINE unsigned depth_of(const uint16_t *reach, unsigned c) {
  unsigned depth = 0;
  while (depth < FULL_DEPTH && reach[depth + 1] > c) depth++;
  return depth;
}

// A lane's parts of A and B, of up to four bits and of more.
SIMT_INLINE void try_scale(const uint16_t *reach, const encoding *e, unsigned scale, unsigned lane, unsigned token) {
  const unsigned shallow = reach[SHALLOW_DEPTH + 1];
  const float inverse = e->states->inverse[token], *numbers = e->tile + token;
  float a = 0, b = 0, deep_a = 0, deep_b = 0;
  for (unsigned four = shallow / FOURS / SUM_LANES * SUM_LANES + lane; four < reach[1] / FOURS; four += SUM_LANES) {
    if (four < shallow / FOURS) continue;
    const uint8_t *units = e->tables->units[scale][depth_of(reach, four * FOURS)];
    int32_t tk = 0, kk = 0;
    SIMT_UNROLL
    for (unsigned i = 0; i < FOURS; i++) {
      const int32_t t = (int32_t)whole_t(numbers[(four * FOURS + i) * TILE_STRIDE], inverse), k = units[t];
      tk += t * k;
      kk += k * k;
    }
    const float weight = e->fours != NULL ? e->fours[four] : 1;
    a += weight * (float)tk;
    b += weight * (float)kk;
  }
  for (unsigned c = lane; c < shallow; c += SUM_LANES) {
    const float x = numbers[c * TILE_STRIDE];
    const unsigned depth = depth_of(reach, c), code = code_of(e->tables, true, scale, x, inverse);
    const float value = e->tables->rows.values[(1u << depth) - 2 + (code >> (FULL_DEPTH - depth))];
    const float k = simt_float(simt_bits(value) & 0x7fffffff) * e->tables->inverse_step;
    const float weighted = e->fours != NULL ? e->fours[c / FOURS] * k : k;
    deep_a += weighted * simt_float(simt_bits(x * inverse) & 0x7fffffff);
    deep_b += weighted * k;
  }
  *lane_sum(e, 0, lane, token) = a;
  *lane_sum(e, 1, lane, token) = b;
  *lane_sum(e, 2, lane, token) = deep_a;
  *lane_sum(e, 3, lane, token) = deep_b;
}

// Keeps the scale if its error is less.
SIMT_INLINE void judge_scale(const encoding *e, unsigned scale, unsigned token) {
  token_states *states = e->states;
  const float a = sum_of(e, 0, token) + sum_of(e, 2, token), b = sum_of(e, 1, token) + sum_of(e, 3, token);
  const float unit = states->unit[token], inverse = states->inverse[token], step = e->tables->step;
  const uint32_t fitted = nearest_gain(e->tables, a / b * (unit / step));
  const float ratio = e->tables->rows.gains[fitted] * (inverse * step), gained = ratio * (a + a - ratio * b);
  if (scale > 0 && !(gained > states->most[token])) return;
  states->most[token] = gained;
  states->gains[token] = fitted;
  states->best[token] = scale;
}

// Numbers become codes at full depth.
SIMT_INLINE void choose_codes(const qkv_simt_encode *job, const encoding *e) {
  const uint16_t *reach = job->code->reach[job->tier];
  for (unsigned scale = 0; scale < QKV_SIMT_ENCODE_SCALES; scale++) {
    for (unsigned i = simt_thread(); i < SUM_LANES * TILE_TOKENS; i += simt_threads())
      try_scale(reach, e, scale, i / TILE_TOKENS, i % TILE_TOKENS);
    simt_sync_block();
    for (unsigned t = simt_thread(); t < TILE_TOKENS; t += simt_threads()) judge_scale(e, scale, t);
    simt_sync_block();
  }
  for (unsigned i = simt_thread(); i < reach[1] * TILE_TOKENS; i += simt_threads()) {
    const unsigned c = i / TILE_TOKENS, token = i % TILE_TOKENS;
    float *number = e->tile + c * TILE_STRIDE + token;
    const unsigned code =
        code_of(e->tables, c < reach[SHALLOW_DEPTH + 1], e->states->best[token], *number, e->states->inverse[token]);
    *number = simt_float(e->states->zero[token] != 0 ? 0 : code);
  }
  simt_sync_block();
}

// ---- Lines (engine/codec/page.h) ----

// The line that has a byte of a group: it begins with coordinate `first`.
typedef struct line_place {
  unsigned pair, first, width, at;  // 16 << width bytes; the byte's place within
  bool wide;
} line_place;

SIMT_INLINE line_place find_line(const uint16_t *reach, unsigned byte) {
  line_place place = {0, 0, 2, 0, true};
  unsigned left = byte;  // of the section
  while (left >= 2 * (unsigned)(reach[2 * place.pair + 1] + reach[2 * place.pair + 2])) {
    left -= 2 * (unsigned)(reach[2 * place.pair + 1] + reach[2 * place.pair + 2]);
    place.pair++;
  }
  const unsigned both = reach[2 * place.pair + 2], any = reach[2 * place.pair + 1];
  place.wide = left < 4 * both;
  const unsigned each = place.wide ? 4 : 2;  // bytes of a coordinate
  unsigned bytes = place.wide ? 4 * both : 2 * (any - both);
  if (!place.wide) left -= 4 * both;
  place.first = left / 64 * (64 / each);
  bytes -= left / 64 * 64;
  left %= 64;
  if (bytes < 64) place.width = bytes >= 32 && left < 32 ? 1 : 0;
  if (bytes < 64 && left >= 32) {  // behind a line of 32 bytes one of 16
    left -= 32;
    place.first += 32 / each;
  }
  if (!place.wide) place.first += both;
  place.at = left;
  return place;
}

// Two bits of a coordinate and its partner in a line: both of the first, or one of each.
SIMT_INLINE unsigned two_bits(const encoding *e, const line_place *line, unsigned c, unsigned partner,
                              unsigned token) {
  const unsigned shift = 6 - 2 * line->pair;
  const unsigned low = simt_bits(e->tile[c * TILE_STRIDE + token]) >> shift;
  if (line->wide) return low & 3;
  return (low >> 1 & 1) | (simt_bits(e->tile[partner * TILE_STRIDE + token]) >> shift & 2);
}

SIMT_INLINE unsigned byte_of_line(const qkv_simt_encode *job, const encoding *e, const line_place *line, unsigned at,
                                  unsigned group) {
  const unsigned width = 1u << line->width;  // s of page.h
  unsigned byte = 0;
  SIMT_UNROLL
  for (unsigned f = 0; f < 4; f++) {
    const unsigned c = line->first + (job->part == 0 ? width * f + at % width : at / 4);
    const unsigned token = TILE_GROUP_TOKENS * group + (job->part == 0 ? at / width : 4 * f + at % 4);
    byte |= two_bits(e, line, c, c + 4 * width, token) << tile_field_shift(line->pair, f);
  }
  return byte;
}

SIMT_INLINE void write_codes(const qkv_simt_encode *job, const encoding *e) {
  const uint16_t *reach = job->code->reach[job->tier];
  const unsigned words = job->code->bytes[job->part][job->tier] / 4u;
  uint32_t *codes = (uint32_t *)(void *)(job->out + 1);
  for (unsigned i = simt_thread(); i < TILE_GROUPS * words; i += simt_threads()) {
    const line_place line = find_line(reach, i % words * 4);
    uint32_t word = 0;
    SIMT_UNROLL
    for (unsigned k = 0; k < 4; k++) word |= byte_of_line(job, e, &line, line.at + k, i / words) << (8 * k);
    codes[i] = word;
  }
}

SIMT_INLINE void write_gains(const qkv_simt_encode *job, const encoding *e) {
  const token_states *states = e->states;
  const bool all = job->code->reach[job->tier][1] == job->code->dim;
  for (unsigned t = simt_thread(); t < TILE_TOKENS; t += simt_threads()) {
    const bool zero = states->zero[t] != 0;
    const float missed = states->squares[t] - (zero ? 0 : states->most[t] * (states->unit[t] * states->unit[t]));
    const float error = missed > 0 ? missed : 0;
    job->out->gains[t] = (uint8_t)(zero ? 0 : states->gains[t]);
    job->out->errors[t] = all ? error : error + states->rest[t];
  }
}

SIMT_KERNEL(qkv_simt_encode_rows, qkv_simt_encode_args, ENCODE_THREADS_MAX, 1) {
  const qkv_simt_encode *job = &args->jobs[simt_block()];
  uint8_t *shared = simt_shared();
  encoding e;
  e.tables = (const qkv_simt_encode_tables *)(const void *)shared;
  e.sums = (float *)(void *)(shared + sizeof *e.tables);
  e.states = (token_states *)(void *)(shared + sizeof *e.tables + QKV_SIMT_ENCODE_SUM_BYTES);
  e.tile = (float *)(void *)(e.states + 1);
  const float *weights = (const float *)(const void *)((const uint8_t *)job->code + job->code->weights);
  e.weights = job->code->weights != 0 ? weights + 4 : NULL;
  e.fours = job->code->weights != 0 ? weights + 4 + job->code->dim : NULL;
  e.weight = job->code->weights != 0 ? weights[0] : (float)job->code->reach[job->tier][1];
  tile_take_tables(args->tables, sizeof *e.tables / 4);
  take_rows(job, e.tile);
  if (is_turned(job)) measure_rows(job, &e);
  if (job->flags != 0) turn_to_frame(job, e.tile);
  if (job->code->analysis != 0) {
    analyse(job, &e);
  } else {
    tile_flip_signs(job->code, e.tile);
    tile_transform(e.tile, job->code->dim);
  }
  choose_scales(job, &e);
  choose_codes(job, &e);
  write_codes(job, &e);
  write_gains(job, &e);
}
