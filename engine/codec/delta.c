#include "engine/codec/delta.h"

#include <math.h>
#include <string.h>

#include "engine/base/tensor.h"
#include "engine/codec/int8.h"
#include "engine/codec/kivi.h"
#include "engine/codec/outlier_channels.h"
#include "engine/codec/polarquant.h"
#include "engine/codec/row.h"
#include "engine/codec/sized.h"
#include "engine/codec/stage.h"
#include "engine/codec/turboquant.h"

enum { TURBOQUANT_ID = 14, INT8_ID = 15, KIVI_ID = 19, POLARQUANT_ID = 20, OUTLIERS_ID = 21 };
enum { VERSION = 1, ALIGN = 64, HALF = 2, EVERY_LEAST = 8, NEVER = 1000000 };
enum { EVERY, THRESHOLD, PARAMETERS };
enum { ANCHORS_MAX = QKV_PAGE_TOKENS / EVERY_LEAST };

#define DIRECTION_MAX 33.0f  // of a coordinate: the root of QKV_DIM_MAX, and rounding

static bool every_valid(uint32_t every) {
  return every >= EVERY_LEAST && every <= QKV_PAGE_TOKENS && QKV_PAGE_TOKENS % every == 0;
}

static bool threshold_valid(uint32_t threshold) {
  return threshold >= 1 && threshold <= NEVER;
}

static const qkv_parameter parameters[PARAMETERS] = {
    [EVERY] = {.name = "anchor_every", .fallback = 32, .valid = every_valid, .text = "8, 16, 32 and 64"},
    [THRESHOLD] = {
        .name = "anchor_threshold", .fallback = 400, .valid = threshold_valid, .text = "1 to 1000000 (thousandths)"}};

// ---- The block ----

static size_t anchors_of(const qkv_part_coder *coder) {
  return QKV_PAGE_TOKENS / coder->parameters[EVERY];
}

static size_t aligned(size_t bytes) {
  return (bytes + ALIGN - 1) / ALIGN * ALIGN;
}

static size_t rows_place(const qkv_part_coder *coder) {
  return aligned(sizeof(uint64_t) + anchors_of(coder) * sizeof(float));
}

static size_t deltas_place(const qkv_part_coder *coder) {
  return rows_place(coder) + aligned(anchors_of(coder) * coder->dim * HALF);
}

static const uint8_t *deltas_of(const qkv_part_coder *coder, const uint8_t *block) {
  return block + deltas_place(coder);
}

static uint64_t starts_of(const uint8_t *block) {
  uint64_t starts;
  memcpy(&starts, block, sizeof starts);
  return starts;
}

static float size_at(const uint8_t *block, size_t i) {
  float size;
  memcpy(&size, block + sizeof(uint64_t) + i * sizeof size, sizeof size);
  return size;
}

// The i-th anchor in code space.
static void read_anchor(const qkv_part_coder *coder, const uint8_t *block, size_t i, float *row) {
  const float size = size_at(block, i);
  qkv_to_float(QKV_FP16, block + rows_place(coder) + i * coder->dim * HALF, row, coder->dim);
  for (size_t c = 0; c < coder->dim; c++) row[c] *= size;
}

static void write_anchor(const qkv_part_coder *coder, const float *row, size_t i, uint8_t *block) {
  float direction[QKV_DIM_MAX], turned[QKV_DIM_MAX];
  const float size = qkvi_size_of(row, coder->dim, direction);
  qkvi_stage_turn(coder, direction, 1, turned);
  memcpy(block + sizeof(uint64_t) + i * sizeof size, &size, sizeof size);
  qkv_from_float(QKV_FP16, turned, block + rows_place(coder) + i * coder->dim * HALF, coder->dim);
}

// As a row.
static void decode_anchor(const qkv_part_coder *coder, const uint8_t *block, size_t i, float *row) {
  read_anchor(coder, block, i, row);
  qkvi_stage_output(coder, row, 1);
}

static void delta_init(qkv_part_coder *coder) {
  qkv_part_coder inner;
  qkvi_stage_inner(coder, &inner);
  coder->block_bytes = (uint32_t)deltas_place(coder) + inner.block_bytes;
}

// ---- Rows ----

// What of a row is coded. Limited, so that its size is; what that leaves comes with the next one.
static void subtract(const float *row, const float *before, size_t dim, float *delta) {
  for (size_t c = 0; c < dim; c++) {
    const float off = row[c] - before[c];
    delta[c] = off > QKV_ROW_MAX ? QKV_ROW_MAX : off < -QKV_ROW_MAX ? -QKV_ROW_MAX : off;
  }
}

static bool far(const qkv_part_coder *coder, const float *row, const float *delta) {
  const double part = (double)coder->parameters[THRESHOLD] / 1000;
  return qkvi_row_error(delta, NULL, NULL, coder->dim) > part * part * qkvi_row_error(row, NULL, NULL, coder->dim);
}

// A page's rows on the way to its block.
typedef struct looped {
  uint64_t starts;  // slots of anchors, a mask
  float deltas[QKV_PAGE_TOKENS * QKV_DIM_MAX];
} looped;

// A row that is coded as the delta to `before`, which becomes what it decodes to.
static void step(const qkv_part_coder *coder, const uint8_t *block, uint32_t t, const float *delta, float *before) {
  const qkv_part_coder *inner = qkvi_stage_of(coder);
  float coded[QKV_DIM_MAX];
  inner->codec->round_trip(inner, deltas_of(coder, block), t, delta, coded);
  for (size_t c = 0; c < coder->dim; c++) before[c] += coded[c];
}

// Writes anchors and finds deltas. Not `closed`: to the rows before as they are. `given`: which rows are anchors;
// NULL: finds them.
static void loop(const qkv_part_coder *coder, const float *rows, uint32_t tokens, bool closed, const uint64_t *given,
                 uint8_t *block, looped *out) {
  const size_t dim = coder->dim;
  float before[QKV_DIM_MAX] = {0};
  size_t anchors = 0;
  uint32_t last = 0;
  out->starts = 0;
  memset(out->deltas, 0, QKV_PAGE_TOKENS * dim * sizeof *out->deltas);
  for (uint32_t t = 0; t < tokens; t++) {
    const float *row = rows + t * dim;
    float *delta = out->deltas + t * dim;
    if (t > 0) subtract(row, before, dim, delta);
    const bool wanted =
        given != NULL ? *given >> t & 1 : t == 0 || t - last >= coder->parameters[EVERY] || far(coder, row, delta);
    if (wanted && anchors < anchors_of(coder)) {
      memset(delta, 0, dim * sizeof *delta);
      write_anchor(coder, row, anchors, block);
      decode_anchor(coder, block, anchors++, before);
      out->starts |= (uint64_t)1 << t;
      last = t;
    } else if (closed) {
      step(coder, block, t, delta, before);
    } else {
      memcpy(before, row, dim * sizeof *before);
    }
  }
}

// Numbers that rows share are those of deltas between exact rows, and so is what is an anchor.
static void delta_encode(const qkv_part_coder *coder, const float *rows, uint32_t tokens, uint8_t *block) {
  const qkv_part_coder *inner = qkvi_stage_of(coder);
  uint8_t *deltas = (uint8_t *)deltas_of(coder, block);
  looped page;
  if (inner->codec->share == NULL) {
    loop(coder, rows, tokens, true, NULL, block, &page);
    inner->codec->encode(inner, page.deltas, tokens, deltas);
  } else {
    loop(coder, rows, tokens, false, NULL, block, &page);
    inner->codec->share(inner, page.deltas, tokens, deltas);
    const uint64_t starts = page.starts;
    loop(coder, rows, tokens, true, &starts, block, &page);
    inner->codec->encode_shared(inner, page.deltas, tokens, deltas);
  }
  memcpy(block, &page.starts, sizeof page.starts);
}

static void delta_decode(const qkv_part_coder *coder, const uint8_t *block, float *rows) {
  const qkv_part_coder *inner = qkvi_stage_of(coder);
  const uint64_t starts = starts_of(block);
  inner->codec->decode(inner, deltas_of(coder, block), rows);
  for (size_t t = 0, anchor = 0; t < QKV_PAGE_TOKENS; t++, rows += coder->dim) {
    if (starts >> t & 1) {
      decode_anchor(coder, block, anchor++, rows);
    } else {
      const float *before = rows - coder->dim;
      for (size_t c = 0; c < coder->dim; c++) rows[c] += before[c];
    }
  }
}

static bool delta_matches(const qkv_part_coder *coder, const uint8_t *block, uint32_t slot, const float *row) {
  const qkv_part_coder *inner = qkvi_stage_of(coder);
  const uint64_t starts = starts_of(block), upto = starts << (QKV_PAGE_TOKENS - 1 - slot);
  const size_t dim = coder->dim;
  if (starts >> slot & 1) {
    const size_t i = (size_t)__builtin_popcountll(upto) - 1;
    uint8_t image[sizeof(uint64_t) + ANCHORS_MAX * sizeof(float) + ALIGN + ANCHORS_MAX * QKV_DIM_MAX * HALF];
    write_anchor(coder, row, i, image);
    const size_t size = sizeof(uint64_t) + i * sizeof(float), place = rows_place(coder) + i * dim * HALF;
    return memcmp(block + size, image + size, sizeof(float)) == 0 &&
           memcmp(block + place, image + place, dim * HALF) == 0;
  }
  float rows[QKV_PAGE_TOKENS * QKV_DIM_MAX], delta[QKV_DIM_MAX];
  delta_decode(coder, block, rows);
  subtract(row, rows + (slot - 1) * dim, dim, delta);
  return inner->codec->matches(inner, deltas_of(coder, block), slot, delta);
}

static const char *delta_validate(const qkv_part_coder *coder, const uint8_t *block) {
  const qkv_part_coder *inner = qkvi_stage_of(coder);
  const uint64_t starts = starts_of(block);
  const size_t anchors = (size_t)__builtin_popcountll(starts);
  if ((starts & 1) == 0) return "the first row is no anchor";
  if (anchors > anchors_of(coder)) return "there are more anchors than the block can hold";
  for (size_t i = 0; i < anchors_of(coder); i++) {
    const float size = size_at(block, i);
    float row[QKV_DIM_MAX];
    if (!(size >= 0 && size <= 2 * QKV_ROW_MAX)) return "an anchor's size is below 0, too large or no number";
    if (i >= anchors && size != 0) return "an anchor that is not used has a size";
    qkv_to_float(QKV_FP16, block + rows_place(coder) + i * coder->dim * HALF, row, coder->dim);
    for (size_t c = 0; c < coder->dim; c++) {
      if (!(fabsf(row[c]) <= DIRECTION_MAX)) return "an anchor's coordinate is too large or no number";
    }
  }
  return inner->codec->validate(inner, deltas_of(coder, block));
}

// ---- Attention ----

// Queries for anchors, in code space, and what the inner codec takes: the same, unless it has a turn().
static const float *inner_queries(const qkv_part_coder *coder, const float *ready, size_t n) {
  return qkvi_stage_of(coder)->codec->turn == NULL ? ready : ready + n * coder->dim;
}

static void delta_query(const qkv_part_coder *coder, const float *queries, size_t n, float *ready) {
  if (qkvi_stage_of(coder)->codec->turn != NULL) qkvi_stage_turn(coder, queries, n, ready);
  qkvi_stage_query(coder, queries, n, (float *)inner_queries(coder, ready, n));
}

static void delta_scores(const qkv_part_coder *coder, const uint8_t *block, const float *queries, size_t n,
                         qkv_precision precision, float *scores) {
  (void)precision;
  const qkv_part_coder *inner = qkvi_stage_of(coder);
  const uint64_t starts = starts_of(block);
  inner->codec->scores(inner, deltas_of(coder, block), inner_queries(coder, queries, n), n, QKV_PRECISION_FP32,
                       scores);
  for (size_t t = 0, anchor = 0; t < QKV_PAGE_TOKENS; t++) {
    float row[QKV_DIM_MAX];
    const bool starts_here = starts >> t & 1;
    if (starts_here) read_anchor(coder, block, anchor++, row);
    for (size_t i = 0; i < n; i++) {
      float *score = scores + i * QKV_PAGE_TOKENS + t;
      *score = starts_here ? qkvi_row_dot(queries + i * coder->dim, row, coder->dim) : *score + score[-1];
    }
  }
}

// What anchors' slots have of deltas counts for nothing.
static void delta_accumulate(const qkv_part_coder *coder, const uint8_t *block, const float *weights, size_t n,
                             qkv_precision precision, float *sums) {
  (void)precision;
  const qkv_part_coder *inner = qkvi_stage_of(coder);
  const uint64_t starts = starts_of(block);
  float suffixes[QKV_QUERY_BLOCK * QKV_PAGE_TOKENS], anchored[QKV_QUERY_BLOCK * ANCHORS_MAX], row[QKV_DIM_MAX];
  const size_t anchors = (size_t)__builtin_popcountll(starts);
  for (size_t i = 0; i < n; i++) {
    float sum = 0;
    for (size_t t = QKV_PAGE_TOKENS, anchor = anchors; t-- > 0;) {
      sum += weights[i * QKV_PAGE_TOKENS + t];
      const bool starts_here = starts >> t & 1;
      suffixes[i * QKV_PAGE_TOKENS + t] = starts_here ? 0 : sum;
      if (!starts_here) continue;
      anchored[i * ANCHORS_MAX + --anchor] = sum;
      sum = 0;
    }
  }
  inner->codec->accumulate(inner, deltas_of(coder, block), suffixes, n, QKV_PRECISION_FP32, sums);
  for (size_t anchor = 0; anchor < anchors; anchor++) {
    read_anchor(coder, block, anchor, row);
    for (size_t i = 0; i < n; i++)
      qkvi_row_add(sums + i * coder->dim, row, anchored[i * ANCHORS_MAX + anchor], coder->dim);
  }
}

// ---- The codecs ----

// Before the codec qkvi_codec_OF. `most`: of rows that have nothing to do with each other differences have twice
// their squares.
#define STAGE(of, number, called, text, has_calibration, most)                        \
  static bool of##_bits_valid(double bits) {                                          \
    return qkvi_codec_##of.bits_valid(bits);                                          \
  }                                                                                   \
  static double of##_bound(double bits) {                                             \
    return (most)*qkvi_codec_##of.error_bound(bits);                                  \
  }                                                                                   \
  static const qkvi_stage of##_stage = {.part = {.id = (number),                      \
                                                 .version = VERSION,                  \
                                                 .init = delta_init,                  \
                                                 .head_bytes = qkvi_stage_head_bytes, \
                                                 .head = qkvi_stage_head,             \
                                                 .encode = delta_encode,              \
                                                 .query = delta_query,                \
                                                 .scores = delta_scores,              \
                                                 .accumulate = delta_accumulate,      \
                                                 .output = qkvi_stage_output,         \
                                                 .decode = delta_decode,              \
                                                 .matches = delta_matches,            \
                                                 .validate = delta_validate},         \
                                        .parameter_count = PARAMETERS,                \
                                        .loops = true,                                \
                                        .inner = &qkvi_codec_##of};                   \
  const qkv_codec qkvi_codec_##of##_delta = {.id = (number),                          \
                                             .name = (called),                        \
                                             .calibrated = (has_calibration),         \
                                             .bits_valid = of##_bits_valid,           \
                                             .bits_text = text " with " called,       \
                                             .parameters = parameters,                \
                                             .parameter_count = PARAMETERS,           \
                                             .message = "delta_stage",                \
                                             .inner = &qkvi_codec_##of,               \
                                             .error_bound = of##_bound,               \
                                             .part = &of##_stage.part,                \
                                             QKV_CODEC_OF_PARTS}

STAGE(turboquant, TURBOQUANT_ID, "turboquant-delta", "whole numbers from 1 to 8", false, 2);
STAGE(int8, INT8_ID, "int8-delta", "8", false, 2);
STAGE(kivi, KIVI_ID, "kivi-delta", "whole numbers from 2 to 8", false, 2);
STAGE(polarquant, POLARQUANT_ID, "polarquant-delta", "whole numbers from 1 to 8", false, 2);
STAGE(turboquant_outliers, OUTLIERS_ID, "turboquant-outliers-delta", "1, 2, 3 and 4", true, 2);
