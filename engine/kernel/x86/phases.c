// What rotary phases add to scores. Compiled once for each family.
#include "engine/kernel/phases_plain.h"

#include "engine/kernel/kernel.h"
#include "engine/kernel/x86/variants.h"

QKV_DECLARE_ADD_WAVES(VARIANT(qkvi_add_waves)) {
  add_waves_plain(turns, pairs, count, factors, n, scores);
}

QKV_DECLARE_SCORE_COLUMNS(VARIANT(qkvi_score_columns)) {
  score_columns_plain(columns, dim, means, turns, queries, n, scores);
}
