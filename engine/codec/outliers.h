// Outlier rows: rows of a page that its codes would represent badly, kept as scaled whole numbers instead.
//
// Real models have rows unlike all others: attention sinks, special tokens. A transform that was learnt from ordinary
// rows sends them into coordinates that have few bits or none, where codes clip them. So the encoder measures the
// error of every row, and a row beyond the bound (docs/page-format.md) is stored a second time, in 8 or 16 bits a
// coordinate. The gain byte of its slot is 0: the codes add nothing, and all kernels on codes stay as they are.
//
//   keys     the row as attended (after RoPE), whatever the frame: its score replaces that of the slot
//   values   the row in code space less the anchor, coordinate c in units of `steps[c]`: it is added to what
//            the codes give, so that means and anchors count for it as for every other row
//
//   row[c] = scale * whole number[c] * (values: steps[c], the inverse of the square root of the transform's weight)
//
// One section for all heads, behind the last head's block, at the header's `outliers`; absent if no row needs it:
//
//    0  u16 before[2][kv_heads + 1][2]   K, then V: rows, and wide rows among them, of all heads before this one. The
//                                        last entry of a part has the totals.
//    .  u8  slots[n]                     K's rows by head and slot, then V's; n: all rows. Bits 0..5 the slot, bit 6
//                                        0, bit 7 set: wide
//    .  0 up to a multiple of 4
//    .  f32 scales[n]                    >= 0; the largest number of the row's width times it is at most 65536 (K),
//                                        4e15 (V)
//    .  0 up to a multiple of 8
//    .  K's rows [key_dim], then V's [value_dim]: i8, of wide rows i16
//    .  0 up to a multiple of 64, the end of the page
//
// Threads: pure functions.
#ifndef QKV_ENGINE_CODEC_OUTLIERS_H
#define QKV_ENGINE_CODEC_OUTLIERS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"
#include "engine/codec/page.h"

#define QKV_OUTLIERS_MAX 16  // of one head's K or V of a page; bounds what a page can take

enum { QKV_OUTLIER_WIDE = 0x80, QKV_OUTLIER_SLOT = 0x3f };  // of a slot's byte

// One head's rows of a page, found. Borrows the page's bytes.
typedef struct qkv_outliers {
  size_t count;
  size_t dim;
  const uint8_t *slots;   // [count]
  const uint8_t *scales;  // [count] of f32, 4-byte aligned
  const uint8_t *rows;    // one after the other, 2-byte aligned
} qkv_outliers;

// ---- Reading ----

// False: the head's part has none; *found is then empty. The page must be valid.
bool qkv_outliers_find(const void *page, uint16_t kv_head, qkv_part part, qkv_outliers *found);

// Prefetches the section's index, with the slots and scales of some rows, before it is read.
static inline void qkv_outliers_fetch(const qkv_page_header *header) {
  enum { LINES = 4, LINE = 64 };
  if (header->outliers == 0) return;
  const uint8_t *section = (const uint8_t *)header + header->outliers;
  for (size_t i = 0; i < LINES; i++) __builtin_prefetch(section + i * LINE);
}

// Scores and sums: score_outliers and weigh_outliers of engine/kernel/kernel.h.

// rows[64][dim]: those of outlier slots are overwritten; steps [dim] of values, NULL: all 1.
void qkv_outliers_rows(const qkv_outliers *outliers, const float *steps, float *rows);

// The slots as a mask.
uint64_t qkv_outliers_mask(const qkv_outliers *outliers);

// ---- Writing ----

// One head's K or V on the way to a page.
typedef struct qkv_outlier_set {
  size_t count;
  uint8_t slots[QKV_OUTLIERS_MAX];  // ascending, bit 7: wide
  float scales[QKV_OUTLIERS_MAX];
  uint8_t *rows;  // space for QKV_OUTLIERS_MAX wide ones
} qkv_outlier_set;

// units [dim] = row [dim] / steps [dim], NULL: all 1; `units` may be `row`.
void qkv_outlier_units(const float *row, const float *steps, size_t dim, float *units);
// Adds a row [dim], finite, at a slot above those of the set; steps as above.
void qkv_outlier_set_add(qkv_outlier_set *set, uint8_t slot, bool wide, const float *row, const float *steps,
                         size_t dim);
// The squared error of a row [dim] as it would be stored, narrow, in units of its own coordinates.
float qkv_outlier_error(const float *row, size_t dim);

// Bytes of the section for sets [kv_heads][2]; 0 where all are empty. And the most for a page of this shape.
size_t qkv_outliers_bytes(const qkv_outlier_set *sets, uint16_t kv_heads, uint16_t key_dim, uint16_t value_dim);
size_t qkv_outliers_bytes_max(uint16_t kv_heads, uint16_t key_dim, uint16_t value_dim);
// Writes it, all of its bytes.
void qkv_outliers_write(const qkv_outlier_set *sets, uint16_t kv_heads, uint16_t key_dim, uint16_t value_dim,
                        uint8_t *section);

// ---- Bytes from outside ----

// DATA_LOSS with the reason unless `section` of `bytes`, at any alignment, is that of a page of this shape with
// `tokens` tokens. Reads nothing beyond.
qkv_status qkv_outliers_validate(const uint8_t *section, size_t bytes, uint16_t kv_heads, uint16_t key_dim,
                                 uint16_t value_dim, uint32_t tokens, qkv_error *error);

#endif
