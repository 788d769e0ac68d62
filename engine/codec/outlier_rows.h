// Selects the rows of a page that are kept as outliers (outliers.h) while it is encoded, and stores them.
//
// A row is one by its position (sinks), as a heavy hitter (heavy.h), by its error as a part of its own length, or by
// its error among the page's other rows: docs/page-format.md.
//
// Threads: pure functions.
#ifndef QKV_ENGINE_CODEC_OUTLIER_ROWS_H
#define QKV_ENGINE_CODEC_OUTLIER_ROWS_H

#include <stdint.h>

#include "engine/codec/embedded.h"
#include "engine/codec/outliers.h"
#include "engine/kernel/kernel.h"

// Squared errors of a page's rows, weighted as in encoding, and their squared lengths as attended.
typedef struct qkvi_row_measures {
  float errors[QKV_PAGE_TOKENS], squares[QKV_PAGE_TOKENS];
} qkvi_row_measures;

// Slots of one head's K or V that are kept as outliers.
typedef struct qkvi_outlier_slots {
  uint64_t all;    // a mask
  int others;      // rows that are not
  float error;     // mean of these
  float relative;  // mean of theirs as parts of squared lengths
  uint64_t longs;  // rows much longer than those that are not
  float square;    // mean squared length of these
  uint64_t exact;  // rows whose errors have been measured again
} qkvi_outlier_slots;

// One head's rows of a page, while outliers are looked for.
typedef struct qkvi_part_rows {
  const qkv_head_coder *head;
  qkv_part part;
  uint64_t position;
  uint32_t tokens;
  const qkv_rows *source;
  const float *turned;           // [64][dim] in code space; NULL: what the transform makes of the source
  uint64_t heavy;                // slots of heavy hitters, a mask
  const uint8_t *gains, *codes;  // [64] and four groups', one after the other: as encoded at the head's tier
  // Brings a slot's row to `turned` before it is read; NULL: all are there.
  void (*bring)(void *context, size_t slot);
  void *bring_context;
} qkvi_part_rows;

// `measures` gets exact errors of rows in question, off their gains and codes.
qkvi_outlier_slots qkvi_outliers_choose(const qkv_coder *coder, const qkvi_part_rows *rows,
                                        qkvi_row_measures *measures);
// Moves rows from the codes to `set`: their gains become 0.
void qkvi_outliers_store(const qkvi_part_rows *rows, const qkvi_outlier_slots *found,
                         const qkvi_row_measures *measures, uint8_t *gains, qkv_outlier_set *set);
// Outlier rows [64][dim] become the mean of the others, so that no predictor is bent by them.
void qkvi_outliers_level(uint64_t slots, uint32_t tokens, size_t dim, float *rows);

#endif
