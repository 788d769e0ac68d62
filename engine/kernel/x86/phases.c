// Rotary phases: what they add to scores, and rows that turn. Compiled once for each family.
#include "engine/kernel/phases_plain.h"

#include "engine/kernel/kernel.h"
#include "engine/kernel/x86/variants.h"

QKV_DECLARE_ADD_WAVES(VARIANT(qkvi_add_waves)) {
  add_waves_plain(turns, pairs, count, factors, n, scores);
}

QKV_DECLARE_SCORE_COLUMNS(VARIANT(qkvi_score_columns)) {
  score_columns_plain(columns, dim, means, turns, queries, n, scores);
}

QKV_DECLARE_TURN_ROWS(VARIANT(qkvi_turn_rows)) {
  turn_rows_plain(turns, back, n, dim, rows);
}

QKV_DECLARE_FRAME_ROWS(VARIANT(qkvi_frame_rows)) {
  frame_rows_plain(turns, x, y, out, n, dim, rows);
}
