// Outlier rows, compiled once for each family.
#include "engine/kernel/outliers_plain.h"

#include "engine/kernel/x86/variants.h"

QKV_DECLARE_SCORE_OUTLIERS(VARIANT(qkvi_score_outliers)) {
  score_outliers_plain(keys, queries, n, scores);
}

QKV_DECLARE_WEIGH_OUTLIERS(VARIANT(qkvi_weigh_outliers)) {
  weigh_outliers_plain(values, steps, scores, peaks, n, sums);
}
