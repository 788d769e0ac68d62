// What rotary phases add to scores, and what queries need from page to page. Compiled once for each family.
#include "engine/kernel/phases_plain.h"

#include "engine/kernel/kernel.h"
#include "engine/kernel/walk_plain.h"
#include "engine/kernel/x86/twins.h"

QKV_DECLARE_ADD_WAVES(TWIN(qkvi_add_waves)) {
  add_waves_plain(turns, pairs, count, factors, n, scores);
}

QKV_DECLARE_SCORE_COLUMNS(TWIN(qkvi_score_columns)) {
  score_columns_plain(columns, dim, means, turns, queries, n, scores);
}

QKV_DECLARE_TURN_WORDS(TWIN(qkvi_turn_words)) {
  turn_words_plain(rows, stride, apart, count, cosines, sines, factors, n, numbers);
}

QKV_DECLARE_SCALE_SUMS(TWIN(qkvi_scale_sums)) {
  scale_sums_plain(matrix, coordinates, sums, scales, n, rows);
}

QKV_DECLARE_ADD_ANCHORS(TWIN(qkvi_add_anchors)) {
  add_anchors_plain(waves, cosines, sines, products, n, shares, scores);
}
