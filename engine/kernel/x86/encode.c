// Encoding rows in vectors (kernel/encode_plain.h). Compiled once for each family.
//
// Rows go the way of encode_columns.h; with VBMI and VNNI those with weights or more than four bits that of
// encode_bytes.h.
#include <assert.h>
#include <stdbool.h>

#include "engine/kernel/encode_plain.h"
#include "engine/kernel/kernel.h"
#include "engine/kernel/plain.h"
#include "engine/kernel/x86/encode_bytes.h"
#include "engine/kernel/x86/encode_columns.h"
#include "engine/kernel/x86/encode_lines.h"
#include "engine/kernel/x86/turn_columns.h"
#include "engine/kernel/x86/variants.h"

// A group's columns, with their squares in `scales`, to gains and codes. `weights`: NULL where none has a weight or
// more than four bits (columns_alike).
static void encode_columns(const coded_as *as, const row_weights *weights, const columns *all, group_scales *scales,
                           uint8_t *gains, uint8_t *codes, float *errors) {
  const uint16_t *reach = as->schedule->reach[as->tier];
  group_sums sums = {0};
  group_choice choice;
  tried_group tried;
  choose_scales(weights == NULL ? reach[1] : weights->sum, scales);
  if (weights == NULL) {
    try_alike(reach, all, scales->inverse, &tried, &sums);
  } else {
    try_weighed(reach, weights, all, scales->inverse, &tried, &sums);
  }
  choose_attempts(scales, &sums, &choice);
  if (!all_fours(reach)) {
    pack_columns(as->part, reach, &tried, &choice, codes);
  } else if (as->part == QKV_K) {
    pack_fours(QKV_K, reach[1], &tried, &choice, codes);
  } else {
    pack_fours(QKV_V, reach[1], &tried, &choice, codes);
  }
  memcpy(gains, choice.gains, sizeof choice.gains);
  memcpy(errors, choice.errors, sizeof choice.errors);
}

static void encode_by_columns(const coded_as *as, const row_weights *weights, const float *rows, uint8_t *gains,
                              uint8_t *codes, float *errors) {
  const size_t dim = as->schedule->dim, coordinates = as->schedule->reach[as->tier][1];
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++, rows += GROUP * dim) {
    columns all;
    group_scales scales;
    if (weights == NULL) {
      columns_of_rows(rows, dim, coordinates, NULL, &all, scales.squares);
    } else {
      columns_of_rows(rows, dim, coordinates, weights->weights, &all, scales.squares);
    }
    encode_columns(as, weights, &all, &scales, gains + g * GROUP, codes, errors + g * GROUP);
    codes += qkv_schedule_group_bytes(as->schedule, as->tier);
  }
}

QKV_DECLARE_ENCODE(VARIANT(qkvi_encode)) {
  assert(tier >= 1 && tier <= QKV_TIER_MAX);
  const uint16_t *reach = schedule->reach[tier];
  const coded_as as = {part, tier, schedule};
  row_weights each_weight;
  if (weights == NULL && columns_alike(reach)) return encode_by_columns(&as, NULL, rows, gains, codes, errors);
  weigh_coordinates(reach, weights != NULL ? weights : qkvi_weights_alike, &each_weight);
#if BYTE_DOTS
  if (encode_bytes_can(reach)) return encode_by_bytes(&as, &each_weight, rows, gains, codes, errors);
#endif
  encode_by_columns(&as, &each_weight, rows, gains, codes, errors);
}

// The rows of a group, the first of which is row `first` of the page; zeros from `tokens` on.
static void find_rows(const qkv_rows *rows, size_t first, size_t tokens, const uint8_t *found[GROUP]) {
  static const uint16_t zeros[2 * TURN_SIZE_MAX];
  for (size_t t = 0; t < GROUP; t++) {
    found[t] = first + t < tokens ? rows->data + (first + t) * rows->stride : (const uint8_t *)zeros;
  }
}

INLINE void encode_turning(qkv_dtype dtype, const coded_as *as, const qkv_rows *rows, size_t tokens, uint8_t *gains,
                           uint8_t *codes, float *errors, float *squares) {
  const size_t dim = as->schedule->dim, stride = qkv_schedule_group_bytes(as->schedule, as->tier);
  turn_signs signs;
  fill_turn_signs(dim, &signs);
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++, gains += GROUP, codes += stride, errors += GROUP, squares += GROUP) {
    const uint8_t *found[GROUP];
    columns all;
    group_scales scales;
    if (g * GROUP >= tokens) {
      memset(errors, 0, GROUP * sizeof *errors);
      memset(squares, 0, GROUP * sizeof *squares);
      memset(gains, 0, GROUP);
      memset(codes, 0, stride);
      continue;
    }
    find_rows(rows, g * GROUP, tokens, found);
    turn_group(dtype, found, rows->next, g * GROUP, dim, &signs, &all, scales.squares);
    encode_columns(as, NULL, &all, &scales, gains, codes, errors);
    memcpy(squares, scales.squares, sizeof scales.squares);
  }
}

static bool encodes_turning(const qkv_schedule *schedule, unsigned tier, qkv_dtype dtype) {
  const uint16_t *reach = schedule->reach[tier];
  return columns_alike(reach) && reach[1] == schedule->dim && turns_columns(dtype, schedule->dim);
}

QKV_DECLARE_ENCODE_ROWS(VARIANT(qkvi_encode_rows)) {
  if (encodes_turning(schedule, tier, rows->dtype)) {
    const coded_as as = {part, tier, schedule};
    if (rows->dtype == QKV_FP16) return encode_turning(QKV_FP16, &as, rows, tokens, gains, codes, errors, squares);
    return encode_turning(QKV_BF16, &as, rows, tokens, gains, codes, errors, squares);
  }
  encode_rows_plain(VARIANT(qkvi_hadamard_forward), VARIANT(qkvi_encode), part, schedule, tier, rows, tokens, gains,
                    codes, errors, squares);
}
