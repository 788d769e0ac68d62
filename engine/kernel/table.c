#include "engine/kernel/table.h"

#include <string.h>

#include "engine/codec/codebook.h"
#include "engine/kernel/kernel.h"

qkvi_kernel_tables qkvi_tables;

static void fill_values(void) {
  for (unsigned depth = 1; depth <= QKV_DEPTH_MAX; depth++) {
    for (unsigned code = 0; code < 1u << depth; code++) {
      qkvi_tables.values[depth][code] = qkv_codebook_value(depth, code);
    }
  }
}

// `first` and `second`: two bits each, of pair 0 and pair 1.
static float nibble_value(qkvi_block_kind kind, unsigned first, unsigned second) {
  switch (kind) {
    case QKVI_BLOCK_1_LOW:
      return qkvi_tables.values[1][first & 1];
    case QKVI_BLOCK_1_HIGH:
      return qkvi_tables.values[1][first >> 1];
    case QKVI_BLOCK_2:
      return qkvi_tables.values[2][first];
    case QKVI_BLOCK_3_LOW:
      return qkvi_tables.values[3][first << 1 | (second & 1)];
    case QKVI_BLOCK_3_HIGH:
      return qkvi_tables.values[3][first << 1 | second >> 1];
    default:
      return qkvi_tables.values[4][first << 2 | second];
  }
}

static unsigned swapped(unsigned nibble) {
  return (nibble & 3) << 2 | nibble >> 2;
}

static void fill_nibbles(void) {
  for (qkvi_block_kind kind = 0; kind < QKVI_BLOCK_NIBBLE_KINDS; kind++) {
    for (unsigned n = 0; n < 16; n++) {
      qkvi_tables.nibbles[kind][QKVI_ODD_FIELDS][n] = nibble_value(kind, n >> 2, n & 3);
      qkvi_tables.nibbles[kind][QKVI_EVEN_FIELDS][n] = nibble_value(kind, n & 3, n >> 2);
    }
  }
  for (unsigned code = 0; code < 256; code++) {
    qkvi_tables.bytes[QKVI_ODD_FIELDS][code] = qkvi_tables.values[8][code];
    qkvi_tables.bytes[QKVI_EVEN_FIELDS][swapped(code >> 4) << 4 | swapped(code & 15)] = qkvi_tables.values[8][code];
  }
}

// The smallest positive float, as bits, whose code at the full depth is `code` or more.
static uint32_t boundary_below(unsigned code) {
  uint32_t low = 0, high = 0x7f800000;
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2;
    float x;
    memcpy(&x, &middle, sizeof x);
    if (qkv_codebook_code(x) >= code) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

static void fill_middles(void) {
  for (unsigned depth = 2; depth <= QKV_DEPTH_MAX; depth++) {
    const unsigned half = 1u << (depth - 1);
    for (unsigned cell = 0; cell < half / 2; cell++) {
      qkvi_tables.middles[depth][cell] = boundary_below((half + 2 * cell + 1) << (QKV_DEPTH_MAX - depth));
    }
  }
}

static void fill_roots(void) {
  for (unsigned i = 0; i < 16; i++) qkvi_tables.roots[i] = qkv_gain_value((uint8_t)(128 + i % 8));
}

void qkvi_tables_fill(void) {
  fill_roots();
  fill_values();
  fill_nibbles();
  fill_middles();
}
