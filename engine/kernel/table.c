#include "engine/kernel/table.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#include "engine/base/cpu.h"
#include "engine/codec/codebook.h"
#include "engine/codec/page.h"
#include "engine/kernel/kernel.h"

qkvi_kernel_tables qkvi_tables;
qkvi_integer_tables qkvi_integers;

static void fill_values(void) {
  for (unsigned depth = 1; depth <= QKV_DEPTH_MAX; depth++) {
    for (unsigned code = 0; code < 1u << depth; code++) {
      qkvi_tables.values[depth][code] = qkv_codebook_value(depth, code);
    }
  }
}

// What a block of this kind has of the bits of a coordinate: two of each pair.
static unsigned code_of(qkvi_block_kind kind, const uint8_t pairs[QKV_DEPTH_MAX / 2]) {
  const unsigned four = pairs[0] << 2 | pairs[1];
  switch (kind) {
    case QKVI_BLOCK_NONE:
      return 0;
    case QKVI_BLOCK_1_LOW:
      return pairs[0] & 1;
    case QKVI_BLOCK_1_HIGH:
      return pairs[0] >> 1;
    case QKVI_BLOCK_2:
      return pairs[0];
    case QKVI_BLOCK_3_LOW:
      return pairs[0] << 1 | (pairs[1] & 1);
    case QKVI_BLOCK_3_HIGH:
      return pairs[0] << 1 | pairs[1] >> 1;
    case QKVI_BLOCK_4:
      return four;
    case QKVI_BLOCK_5_LOW:
      return four << 1 | (pairs[2] & 1);
    case QKVI_BLOCK_5_HIGH:
      return four << 1 | pairs[2] >> 1;
    case QKVI_BLOCK_6:
      return four << 2 | pairs[2];
    case QKVI_BLOCK_7_LOW:
      return four << 3 | pairs[2] << 1 | (pairs[3] & 1);
    case QKVI_BLOCK_7_HIGH:
      return four << 3 | pairs[2] << 1 | pairs[3] >> 1;
    default:
      return four << 4 | pairs[2] << 2 | pairs[3];
  }
}

static const uint8_t depths[QKVI_BLOCK_SCATTERED] = {0, 1, 1, 2, 3, 3, 4, 5, 5, 6, 7, 7, 8};

unsigned qkvi_block_depth(qkvi_block_kind kind) {
  assert(kind < QKVI_BLOCK_SCATTERED);
  return depths[kind];
}

// The pairs in a byte of two nibbles of even or odd fields; of one nibble, only the latter two.
static void split_pairs(unsigned fields, unsigned byte, uint8_t pairs[QKV_DEPTH_MAX / 2]) {
  const unsigned first_at = fields == QKVI_ODD_FIELDS ? 2 : 0;
  pairs[0] = byte >> (4 + first_at) & 3;
  pairs[1] = byte >> (4 + (2 - first_at)) & 3;
  pairs[2] = byte >> first_at & 3;
  pairs[3] = byte >> (2 - first_at) & 3;
}

static void fill_nibbles(void) {
  for (qkvi_block_kind kind = 0; kind < QKVI_BLOCK_NIBBLE_KINDS; kind++) {
    for (unsigned i = 0; i < 2 * 16; i++) {
      const unsigned fields = i / 16, n = i % 16;
      uint8_t pairs[QKV_DEPTH_MAX / 2];
      split_pairs(fields, n, pairs);
      const unsigned code = code_of(kind, (const uint8_t[QKV_DEPTH_MAX / 2]){pairs[2], pairs[3]});
      qkvi_tables.nibbles[kind][fields][n] = qkvi_tables.values[depths[kind]][code];
    }
  }
}

static void fill_fields(void) {
  for (qkvi_block_kind kind = 0; kind <= QKVI_BLOCK_2; kind++) {
    for (unsigned i = 0; i < QKVI_FIELD_PLACES * 64; i++) {
      const unsigned place = i / 64, n = i % 64;
      const uint8_t pairs[QKV_DEPTH_MAX / 2] = {n >> (2 * place) & 3};
      const uint8_t integer = (uint8_t)qkvi_integers.shallow[depths[kind]][code_of(kind, pairs)];
      qkvi_integers.fields[QKV_V][kind][place][n] = integer;
      qkvi_integers.fields[QKV_K][kind][place][n] = integer ^ 0x80;
    }
  }
}

// The bytes of a deep code.
static void put_planes(qkv_part part, unsigned depth, unsigned code, uint8_t *high, uint8_t *low) {
  const uint8_t flip = part == QKV_K ? 0x80 : 0;
  *high = (uint8_t)qkvi_integers.deep_high[depth][code] ^ flip;
  *low = (uint8_t)qkvi_integers.deep_low[depth][code] ^ flip;
}

static void fill_bytes(void) {
  for (qkvi_block_kind kind = QKVI_BLOCK_NIBBLE_KINDS; kind < QKVI_BLOCK_SCATTERED; kind++) {
    const unsigned deep = kind - QKVI_BLOCK_NIBBLE_KINDS;
    for (unsigned i = 0; i < 2 * 256; i++) {
      const unsigned fields = i / 256, byte = i % 256;
      uint8_t pairs[QKV_DEPTH_MAX / 2];
      split_pairs(fields, byte, pairs);
      const unsigned code = code_of(kind, pairs);
      qkvi_tables.bytes[deep][fields][byte] = qkvi_tables.values[depths[kind]][code];
      for (qkv_part part = QKV_K; part <= QKV_V && kind >= QKVI_BLOCK_7_LOW; part++) {
        uint8_t(*planes)[256] = qkvi_integers.bytes[part][kind - QKVI_BLOCK_7_LOW][fields];
        put_planes(part, depths[kind], code, &planes[0][byte], &planes[1][byte]);
      }
    }
  }
}

static void fill_sixes(void) {
  for (qkvi_block_kind kind = 0; kind <= QKVI_BLOCK_6; kind++) {
    for (unsigned i = 0; i < 2 * 64; i++) {
      const unsigned fields = i / 64, six = i % 64;
      uint8_t pairs[QKV_DEPTH_MAX / 2];
      split_pairs(fields, six, pairs);
      const unsigned code = code_of(kind, (const uint8_t[QKV_DEPTH_MAX / 2]){pairs[2], pairs[3], six >> 4 & 3});
      const uint8_t integer = (uint8_t)qkvi_integers.shallow[depths[kind]][code];
      qkvi_integers.sixes[QKV_V][kind][fields][six] = integer;
      qkvi_integers.sixes[QKV_K][kind][fields][six] = integer ^ 0x80;
    }
  }
}

// The multiples of the common step, which is that of depths 4 to 6, that are nearest to the centroids.
static void fill_integers(void) {
  qkvi_integers.step = qkv_codebook_step(4);
  for (unsigned depth = 1; depth <= QKV_DEPTH_MAX; depth++) {
    for (unsigned code = 0; code < 1u << depth; code++) {
      const float units = qkv_codebook_value(depth, code) / qkvi_integers.step;
      if (depth <= QKVI_SHALLOW_MAX) {
        qkvi_integers.shallow[depth][code] = (int8_t)lrintf(units);
        assert(depth > 2 || fabsf(units) < QKVI_MOST_2 + 0.5f);
        assert(depth > 4 || fabsf(units) < QKVI_MOST_4 + 0.5f);
        assert(fabsf(units) < QKVI_MOST_6 + 0.5f);
        continue;
      }
      const int fine = (int)lrintf(units * 128), high = (fine + 128) >> 8;
      qkvi_integers.deep_high[depth][code] = (int8_t)high;
      qkvi_integers.deep_low[depth][code] = (int8_t)(fine - 256 * high);
    }
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
  for (unsigned i = 0; i < 256; i++) qkvi_integers.gains[i] = qkv_gain_value((uint8_t)i);
}

// What encoding looks t up in.
static void fill_encoding(void) {
  qkvi_tables.inverse_step = 1 / qkvi_integers.step;
  static const uint8_t scale_gains[QKVI_SCALES] = {128, 129, 127};
  for (size_t s = 0; s < QKVI_SCALES; s++) {
    qkvi_tables.scales[s] = qkv_gain_value(scale_gains[s]);
    for (unsigned t = 0; t < 256; t++) {
      const uint8_t code = qkv_codebook_code((float)t / 64 * qkvi_tables.scales[s]);
      qkvi_tables.cells[s][t] = code;
      for (unsigned depth = 1; depth <= 4; depth++) {
        const uint8_t unit = (uint8_t)qkvi_integers.shallow[depth][code >> (QKV_DEPTH_MAX - depth)];
        qkvi_integers.units[s][depth][t] = unit;
        qkvi_integers.codes[depth][unit] = code;
      }
    }
    for (unsigned depth = 1; depth <= 4; depth++) {  // look-ups end at 191
      assert(qkvi_integers.units[s][depth][191] == qkvi_integers.units[s][depth][255]);
    }
    for (unsigned depth = 2; depth <= 4; depth++) {
      for (unsigned cell = 0; cell < 1u << (depth - 2); cell++) {
        const unsigned upper = ((1u << (depth - 1)) + 2 * cell + 1) << (QKV_DEPTH_MAX - depth);
        uint32_t t = 0;
        while (t < 256 && qkvi_tables.cells[s][t] < upper) t++;
        qkvi_integers.below[s][depth][cell] = (int8_t)((int)t - 1 - 128);
      }
    }
  }
  for (unsigned depth = 1; depth <= 4; depth++) {
    const unsigned half = 1u << (depth - 1);
    for (unsigned cell = 0; cell < half; cell++) {
      qkvi_integers.unit_of_cell[depth][cell] = (uint8_t)qkvi_integers.shallow[depth][half + cell];
      qkvi_integers.code_of_cell[depth][cell] = (uint8_t)((half + cell) << (QKV_DEPTH_MAX - depth));
    }
  }
  for (unsigned i = 0; i < 8; i++) {
    qkvi_tables.gain_middles[i] = (qkv_gain_value((uint8_t)(128 + i)) + qkv_gain_value((uint8_t)(129 + i))) / 2;
  }
}

void qkvi_tables_fill(void) {
  fill_roots();
  fill_values();
  fill_integers();
  fill_nibbles();
  fill_fields();
  fill_bytes();
  fill_sixes();
  fill_middles();
  fill_encoding();
  qkvi_tables.dots_alone = qkv_cpu_intel();
}
