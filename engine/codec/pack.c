#include "engine/codec/pack.h"

#include <assert.h>
#include <stdbool.h>
#include <string.h>

enum { PAIRS = QKV_DEPTH_MAX / 2, FIELDS = 4, FIELD_TOKENS = QKV_GROUP_TOKENS / FIELDS };

// A line of 16 * width bytes: the letter s of page.h, and a quarter of L.
typedef struct line {
  unsigned pair;
  bool wide;
  unsigned width;
} line;

static unsigned line_bytes(const line *s) {
  return QKV_GROUP_TOKENS * s->width;
}

static unsigned line_coordinates(const line *s) {
  return (s->wide ? 4 : 8) * s->width;
}

// Where a field lies in its byte.
static unsigned field_shift(const line *s, unsigned field) {
  return 2 * (field ^ (s->pair & 1));
}

// Sixteen bytes, one a token of the group. Shifts work on the whole; what crosses into a neighbour is masked off.
typedef uint64_t sixteen __attribute__((vector_size(QKV_GROUP_TOKENS)));

#define EACH(byte) ((sixteen){(byte)*0x0101010101010101u, (byte)*0x0101010101010101u})

static sixteen load(const uint8_t *bytes) {
  sixteen all;
  memcpy(&all, bytes, sizeof all);
  return all;
}

static void store(uint8_t *bytes, sixteen all) {
  memcpy(bytes, &all, sizeof all);
}

// Bytes of a K line between [token][byte] and [byte][token]. Inlined with a constant width to be vectorized.
static inline __attribute__((always_inline)) void columns_of(const uint8_t *restrict bytes, unsigned width,
                                                             qkvi_codes *restrict columns) {
  for (unsigned i = 0; i < width; i++) {
    for (unsigned t = 0; t < QKV_GROUP_TOKENS; t++) columns[i][t] = bytes[t * width + i];
  }
}

static void read_columns(const line *s, const uint8_t *bytes, qkvi_codes columns[4]) {
  if (s->width == 4) {
    columns_of(bytes, 4, columns);
  } else {
    columns_of(bytes, s->width, columns);
  }
}

static void write_columns(const line *s, qkvi_codes columns[4], uint8_t *bytes) {
  for (unsigned t = 0; t < QKV_GROUP_TOKENS; t++) {
    for (unsigned i = 0; i < s->width; i++) bytes[t * s->width + i] = columns[i][t];
  }
}

// Appends what a line's fields hold for its coordinate `at` (below 4 * width), two bits a token: both to that
// coordinate's codes, or in a narrow line the high one to those of the coordinate 4 * width further.
static void append(const line *s, qkvi_codes *codes, unsigned at, sixteen two) {
  uint8_t *low = codes[at];
  if (s->wide) {
    store(low, load(low) << 2 | two);
  } else {
    uint8_t *high = codes[at + 4 * s->width];
    store(low, load(low) << 1 | (two & EACH(1)));
    store(high, load(high) << 1 | (two >> 1 & EACH(1)));
  }
}

// The reverse: those two bits, out of codes at full depth.
static sixteen take(const line *s, const qkvi_codes *codes, unsigned at) {
  const unsigned shift = QKV_DEPTH_MAX - 2 - 2 * s->pair;  // of the pair's less significant bit
  const sixteen low = load(codes[at]) >> shift;
  if (s->wide) return low & EACH(3);
  return (low >> 1 & EACH(1)) | (load(codes[at + 4 * s->width]) >> shift & EACH(2));
}

static void unpack_k(const line *s, const uint8_t *bytes, qkvi_codes *codes) {
  qkvi_codes columns[4];
  read_columns(s, bytes, columns);
  for (unsigned at = 0; at < FIELDS * s->width; at++) {
    const unsigned shift = field_shift(s, at / s->width);
    append(s, codes, at, load(columns[at % s->width]) >> shift & EACH(3));
  }
}

static void pack_k(const line *s, const qkvi_codes *codes, uint8_t *bytes) {
  qkvi_codes columns[4] = {0};
  for (unsigned at = 0; at < FIELDS * s->width; at++) {
    uint8_t *column = columns[at % s->width];
    store(column, load(column) | take(s, codes, at) << field_shift(s, at / s->width));
  }
  write_columns(s, columns, bytes);
}

// A lane of a V line: four bytes, whose field f is tokens 4 f to 4 f + 3.
static void unpack_v(const line *s, const uint8_t *bytes, qkvi_codes *codes) {
  for (unsigned lane = 0; lane < 4 * s->width; lane++, bytes += FIELD_TOKENS) {
    uint32_t packed;
    memcpy(&packed, bytes, sizeof packed);
    uint64_t token[FIELDS];
    for (unsigned f = 0; f < FIELDS; f++) token[f] = packed >> field_shift(s, f) & 0x03030303;
    append(s, codes, lane, (sixteen){token[0] | token[1] << 32, token[2] | token[3] << 32});
  }
}

static void pack_v(const line *s, const qkvi_codes *codes, uint8_t *bytes) {
  for (unsigned lane = 0; lane < 4 * s->width; lane++, bytes += FIELD_TOKENS) {
    const sixteen two = take(s, codes, lane);
    const uint32_t token[FIELDS] = {(uint32_t)two[0], (uint32_t)(two[0] >> 32), (uint32_t)two[1],
                                    (uint32_t)(two[1] >> 32)};
    uint32_t packed = 0;
    for (unsigned f = 0; f < FIELDS; f++) packed |= token[f] << field_shift(s, f);
    memcpy(bytes, &packed, sizeof packed);
  }
}

void qkvi_pack_line(qkv_part part, unsigned pair, bool wide, unsigned width, const qkvi_codes *codes,
                    uint8_t *bytes) {
  const line s = {pair, wide, width};
  part == QKV_K ? pack_k(&s, codes, bytes) : pack_v(&s, codes, bytes);
}

// Sets `s` to the line at coordinate `at` of a group's section that ends at `end`: the largest that fits.
static void line_fit(line *s, unsigned at, unsigned end) {
  s->width = 4;
  while (at + line_coordinates(s) > end) s->width /= 2;
  assert(s->width > 0);
}

// Coordinates [*begin, *end) of a section at a tier.
static void section(const uint16_t *reach, const line *s, unsigned *begin, unsigned *end) {
  const unsigned both = reach[2 * s->pair + 2], first = reach[2 * s->pair + 1];
  *begin = s->wide ? 0 : both;
  *end = s->wide ? both : first;
}

// One section's coordinates. Both return where the section ends in `bytes`.
static uint8_t *pack_section(qkv_part part, line s, const uint16_t *reach, const qkvi_codes *codes, uint8_t *bytes) {
  unsigned at, end;
  section(reach, &s, &at, &end);
  for (; at < end; at += line_coordinates(&s), bytes += line_bytes(&s)) {
    line_fit(&s, at, end);
    part == QKV_K ? pack_k(&s, codes + at, bytes) : pack_v(&s, codes + at, bytes);
  }
  return bytes;
}

static const uint8_t *unpack_section(qkv_part part, line s, const uint16_t *reach, const uint8_t *bytes,
                                     qkvi_codes *codes) {
  unsigned at, end;
  section(reach, &s, &at, &end);
  for (; at < end; at += line_coordinates(&s), bytes += line_bytes(&s)) {
    line_fit(&s, at, end);
    part == QKV_K ? unpack_k(&s, bytes, codes + at) : unpack_v(&s, bytes, codes + at);
  }
  return bytes;
}

void qkvi_pack(qkv_part part, const qkv_schedule *schedule, unsigned tier, const qkvi_codes *codes, uint8_t *bytes) {
  for (unsigned i = 0; i < 2 * PAIRS; i++) {
    bytes = pack_section(part, (line){.pair = i / 2, .wide = i % 2 == 0}, schedule->reach[tier], codes, bytes);
  }
}

void qkvi_unpack(qkv_part part, const qkv_schedule *schedule, unsigned tier, const uint8_t *bytes,
                 qkvi_codes *codes) {
  memset(codes, 0, schedule->dim * sizeof *codes);
  for (unsigned i = 0; i < 2 * PAIRS; i++) {
    bytes = unpack_section(part, (line){.pair = i / 2, .wide = i % 2 == 0}, schedule->reach[tier], bytes, codes);
  }
}

// ---- One slot ----

// What a line has of a slot's row: two bits for each of its coordinates below 4 * width.
static void take_slot(qkv_part part, const line *s, const uint8_t *bytes, unsigned slot, uint8_t *two) {
  if (part == QKV_V) {
    const unsigned shift = field_shift(s, slot / FIELD_TOKENS);
    bytes += slot % FIELD_TOKENS;
    for (unsigned at = 0; at < 4 * s->width; at++) two[at] = bytes[at * FIELD_TOKENS] >> shift & 3;
    return;
  }
  bytes += slot * s->width;
  for (unsigned field = 0; field < FIELDS; field++, two += s->width) {
    const unsigned shift = field_shift(s, field);
    for (unsigned i = 0; i < s->width; i++) two[i] = bytes[i] >> shift & 3;
  }
}

static const uint8_t *unpack_section_of(qkv_part part, line s, const uint16_t *reach, const uint8_t *bytes,
                                        unsigned slot, uint8_t *codes) {
  unsigned first, end;
  section(reach, &s, &first, &end);
  for (; first < end; first += line_coordinates(&s), bytes += line_bytes(&s)) {
    uint8_t two[QKV_GROUP_TOKENS];
    line_fit(&s, first, end);
    take_slot(part, &s, bytes, slot, two);
    uint8_t *low = codes + first, *high = low + 4 * s.width;
    for (unsigned at = 0; at < 4 * s.width; at++) {
      low[at] = (uint8_t)(s.wide ? low[at] << 2 | two[at] : low[at] << 1 | (two[at] & 1));
      if (!s.wide) high[at] = (uint8_t)(high[at] << 1 | two[at] >> 1);
    }
  }
  return bytes;
}

void qkvi_unpack_slot(qkv_part part, const qkv_schedule *schedule, unsigned tier, const uint8_t *bytes, unsigned slot,
                      uint8_t *codes) {
  assert(slot < QKV_GROUP_TOKENS);
  memset(codes, 0, schedule->dim);
  for (unsigned i = 0; i < 2 * PAIRS; i++) {
    const line s = {.pair = i / 2, .wide = i % 2 == 0};
    bytes = unpack_section_of(part, s, schedule->reach[tier], bytes, slot, codes);
  }
}

// ---- Fewer planes ----

// Moves codes of one pair's bits to where they lie at full depth.
static void raise(const uint16_t *reach, unsigned pair, qkvi_codes *codes) {
  const unsigned shift = QKV_DEPTH_MAX - 2 - 2 * pair;
  for (unsigned c = 0; c < reach[2 * pair + 1]; c++) {
    store(codes[c], load(codes[c]) << (c < reach[2 * pair + 2] ? shift : shift + 1));
  }
}

// Bytes of one pair's two sections.
static size_t pair_bytes(const uint16_t *reach, unsigned pair) {
  return (size_t)(reach[2 * pair + 1] + reach[2 * pair + 2]) * QKV_GROUP_TOKENS / 8;
}

void qkvi_narrow(qkv_part part, const qkv_schedule *schedule, unsigned tier, const uint8_t *bytes, unsigned lower,
                 uint8_t *out) {
  const uint16_t *reach = schedule->reach[tier], *low = schedule->reach[lower];
  assert(lower <= tier);
  for (unsigned pair = 0; pair < PAIRS && low[2 * pair + 1] > 0; pair++) {
    const size_t all = pair_bytes(reach, pair), kept = pair_bytes(low, pair);
    if (all == kept) {
      memcpy(out, bytes, all);
    } else {
      qkvi_codes codes[QKV_DIM_MAX];
      memset(codes, 0, reach[2 * pair + 1] * sizeof *codes);
      const uint8_t *next = unpack_section(part, (line){.pair = pair, .wide = true}, reach, bytes, codes);
      (void)unpack_section(part, (line){.pair = pair}, reach, next, codes);
      raise(reach, pair, codes);
      uint8_t *end = pack_section(part, (line){.pair = pair, .wide = true}, low, codes, out);
      (void)pack_section(part, (line){.pair = pair}, low, codes, end);
    }
    bytes += all;
    out += kept;
  }
}
