#include "engine/kernel/blocks.h"

#include <assert.h>

enum { NARROW_WIDTH = 2 * QKVI_BLOCK_WIDTH };  // coordinates of a narrow line of 64 bytes

// How a pair holds a block: 0 bits where no line of 64 bytes begins with the block or has it for a half and none of
// 32 bytes is the block's own, else 2 bits or 1.
typedef struct holding {
  unsigned bits;
  bool high;      // the second half of a narrow line
  bool half;      // a narrow line of 32 bytes
  unsigned line;  // offset
} holding;

static holding find_in_pair(const uint16_t *reach, unsigned pair, unsigned section, unsigned first) {
  const unsigned both = reach[2 * pair + 2], any = reach[2 * pair + 1];
  // 16 tokens x 2 bits are 4 bytes a coordinate.
  if (first + QKVI_BLOCK_WIDTH <= both) return (holding){.bits = 2, .line = section + 4 * first};
  if (first < both) return (holding){0};
  const unsigned at = first - both, line = at / NARROW_WIDTH * NARROW_WIDTH;
  if (at % QKVI_BLOCK_WIDTH != 0) return (holding){0};
  const holding found = {.bits = 1, .high = at != line, .line = section + 4 * both + 2 * line};
  if (line + NARROW_WIDTH <= any - both) return found;
  if (at != line || line + QKVI_BLOCK_WIDTH > any - both) return (holding){0};
  return (holding){.bits = 1, .half = true, .line = found.line};
}

static qkvi_block_kind kind_of(unsigned depth, bool high) {
  static const uint8_t kinds[QKV_DEPTH_MAX + 1] = {QKVI_BLOCK_SCATTERED, QKVI_BLOCK_1_LOW, QKVI_BLOCK_2,
                                                   QKVI_BLOCK_3_LOW,     QKVI_BLOCK_4,     QKVI_BLOCK_5_LOW,
                                                   QKVI_BLOCK_6,         QKVI_BLOCK_7_LOW, QKVI_BLOCK_8};
  return kinds[depth] + (high ? 1u : 0u);
}

// Bytes behind a half are ignored, and readable in any case.
static void place_spread(qkvi_block *block) {
  const unsigned half = qkvi_block_half(block);
  for (unsigned pair = 0; pair < QKVI_SHALLOW_PAIRS; pair++) {
    block->spread[pair] = pair >= half;
    block->places[pair] = pair >= half ? (uint16_t)(64 * half) : block->lines[pair];
  }
}

static qkvi_block find_block(const uint16_t *reach, const unsigned sections[QKV_DEPTH_MAX / 2], unsigned first) {
  const qkvi_block scattered = {.kind = QKVI_BLOCK_SCATTERED, .shape = QKVI_BLOCK_ANY};
  unsigned depth = 1;
  while (depth < QKV_DEPTH_MAX && reach[depth + 1] > first) depth++;
  if (reach[depth] < first + QKVI_BLOCK_WIDTH) return scattered;
  qkvi_block block = {0};
  bool high = false, half = false;
  for (unsigned pair = 0; pair < QKV_DEPTH_MAX / 2; pair++) {
    if (2 * pair >= depth) {
      block.lines[pair] = block.lines[0];
      continue;
    }
    const holding held = find_in_pair(reach, pair, sections[pair], first);
    if (held.bits == 0) return scattered;
    block.lines[pair] = (uint16_t)held.line;
    high = held.high;
    half = held.half;
  }
  block.kind = (uint8_t)kind_of(depth, high);
  block.shape = (uint8_t)((half ? QKVI_BLOCK_FIELDS_HALF : QKVI_BLOCK_FIELDS) + (depth - 1) / 2);
  place_spread(&block);
  return block;
}

// ---- Halves of scattered blocks ----

static qkvi_unit unit_of(unsigned line, qkvi_unit_how how, unsigned place) {
  return (qkvi_unit){.line = (uint16_t)line, .how = (uint8_t)how, .place = (uint8_t)place};
}

// Where a pair holds the 8 coordinates from `first` on.
static qkvi_unit find_unit(const uint16_t *reach, unsigned pair, unsigned section, unsigned first) {
  const unsigned both = reach[2 * pair + 2], any = reach[2 * pair + 1];
  if (first >= any) return unit_of(0, QKVI_UNIT_NONE, 0);
  if (first < both) {
    const unsigned line = first / QKVI_BLOCK_WIDTH * QKVI_BLOCK_WIDTH;
    const bool whole = line + QKVI_BLOCK_WIDTH <= both;
    return unit_of(section + 4 * line, whole ? QKVI_UNIT_WIDE : QKVI_UNIT_WIDE_HALF, (first - line) / QKV_BAND);
  }
  // 16 tokens x 1 bit are 2 bytes a coordinate.
  const unsigned at = first - both, narrow = section + 4 * both;
  const unsigned line = at / NARROW_WIDTH * NARROW_WIDTH, left = any - both - line;
  if (left >= NARROW_WIDTH) return unit_of(narrow + 2 * line, QKVI_UNIT_NARROW, (at - line) / QKV_BAND);
  if (left >= QKVI_BLOCK_WIDTH && at < line + QKVI_BLOCK_WIDTH) {
    return unit_of(narrow + 2 * line, QKVI_UNIT_NARROW_HALF, (at - line) / QKV_BAND);
  }
  return unit_of(narrow + 2 * at, QKVI_UNIT_NARROW_QUARTER, 0);
}

static void find_units(const uint16_t *reach, const unsigned sections[QKV_DEPTH_MAX / 2], unsigned b,
                       qkvi_tier_blocks *blocks) {
  for (unsigned half = 0; half < 2; half++) {
    const unsigned first = b * QKVI_BLOCK_WIDTH + half * QKV_BAND;
    unsigned depth = 0;
    while (depth < QKV_DEPTH_MAX && reach[depth + 1] > first) depth++;
    blocks->depths[b][half] = (uint8_t)depth;
    for (unsigned pair = 0; pair < QKV_DEPTH_MAX / 2; pair++) {
      blocks->units[b][half][pair] = find_unit(reach, pair, sections[pair], first);
    }
  }
}

void qkvi_blocks_find(const qkv_schedule *schedule, unsigned tier, qkvi_tier_blocks *blocks) {
  assert(tier <= QKV_TIER_MAX);
  const uint16_t *reach = schedule->reach[tier];
  unsigned sections[QKV_DEPTH_MAX / 2];  // where each pair begins
  unsigned at = 0;
  for (unsigned pair = 0; pair < QKV_DEPTH_MAX / 2; pair++) {
    sections[pair] = at;
    at += 2u * (reach[2 * pair + 1] + reach[2 * pair + 2]);
  }
  blocks->coordinates = reach[1];
  blocks->count = (reach[1] + QKVI_BLOCK_WIDTH - 1) / QKVI_BLOCK_WIDTH;
  blocks->deep = (reach[QKVI_SHALLOW_MAX + 1] + QKVI_BLOCK_WIDTH - 1) / QKVI_BLOCK_WIDTH;
  blocks->scattered = blocks->halves = 0;
  blocks->shape = QKVI_BLOCK_FIELDS;
  for (unsigned i = 0; i < blocks->count; i++) {
    blocks->blocks[i] = find_block(reach, sections, i * QKVI_BLOCK_WIDTH);
    if (blocks->blocks[i].shape > blocks->shape) blocks->shape = blocks->blocks[i].shape;
    blocks->scattered += blocks->blocks[i].kind == QKVI_BLOCK_SCATTERED;
    if (qkvi_block_is_whole(&blocks->blocks[i])) continue;
    find_units(reach, sections, i, blocks);
    const unsigned pair = qkvi_block_half(&blocks->blocks[i]);
    if (pair >= QKV_DEPTH_MAX / 2) continue;
    blocks->halves |= (uint8_t)(1u << pair);
    blocks->half_lines[pair] = blocks->blocks[i].lines[pair];
  }
  for (unsigned i = blocks->count; i * QKVI_BLOCK_WIDTH < schedule->dim; i++) {
    blocks->blocks[i] = (qkvi_block){.kind = QKVI_BLOCK_NONE, .shape = QKVI_BLOCK_FIELDS};
  }
}

// ---- Reading and packing by blocks ----

void qkvi_reader_init(qkvi_reader *reader, qkv_part part, const qkv_page_codes *codes) {
  reader->part = part;
  reader->codes = codes;
  reader->tier = codes->tiers[0];
  qkvi_blocks_find(codes->schedule, reader->tier, &reader->blocks);
}

void qkvi_reader_turn_to(qkvi_reader *reader, size_t group) {
  if (reader->codes->tiers[group] == reader->tier) return;
  reader->tier = reader->codes->tiers[group];
  qkvi_blocks_find(reader->codes->schedule, reader->tier, &reader->blocks);
}

// What is left of a section behind its lines of 64 bytes: lines of 32 and 16.
static uint8_t *pack_rest(const qkvi_packing *packing, qkv_part part, unsigned pair, bool wide, const uint8_t *codes,
                          size_t stride, unsigned coordinates, uint8_t *line) {
  const uint8_t *end = codes + coordinates;
  for (unsigned width = 2; width > 0; width /= 2) {
    const unsigned here = (wide ? 4 : 8) * width;
    if (codes + here > end) continue;
    qkvi_codes columns[QKVI_BLOCK_WIDTH];
    packing->transpose(codes, stride, here, columns);
    qkvi_pack_line(part, pair, wide, width, (const qkvi_codes *)columns, line);
    codes += here;
    line += (size_t)QKV_GROUP_TOKENS * width;
  }
  return line;
}

void qkvi_pack_sections(const qkvi_packing *packing, qkv_part part, const uint16_t *reach, const uint8_t *codes,
                        size_t stride, uint8_t *group) {
  enum { LINE = 64 };
  for (unsigned pair = 0; pair < QKV_DEPTH_MAX / 2; pair++) {
    for (int narrow = 0; narrow <= 1; narrow++) {
      unsigned c = narrow ? reach[2 * pair + 2] : 0;
      const unsigned end = narrow ? reach[2 * pair + 1] : reach[2 * pair + 2];
      const unsigned here = narrow ? NARROW_WIDTH : QKVI_BLOCK_WIDTH;
      for (; c + here <= end; c += here, group += LINE) {
        for (unsigned half = 0; half <= (unsigned)narrow; half++)
          packing->block(part, pair, !narrow, half, codes + c + half * QKVI_BLOCK_WIDTH, stride, group);
      }
      group = pack_rest(packing, part, pair, !narrow, codes + c, stride, end - c, group);
    }
  }
}
