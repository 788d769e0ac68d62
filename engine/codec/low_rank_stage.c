#include "engine/codec/low_rank_stage.h"

#include <stdlib.h>
#include <string.h>

#include "engine/codec/int8.h"
#include "engine/codec/kivi.h"
#include "engine/codec/low_rank.h"
#include "engine/codec/polarquant.h"
#include "engine/codec/running_u8.h"
#include "engine/codec/stage.h"
#include "engine/codec/turboquant.h"

enum { TURBOQUANT_ID = 12, KIVI_ID = 13, POLARQUANT_ID = 16, INT8_ID = 17, RUNNING_U8_ID = 18, VERSION = 1 };
enum { PARAMETERS = 1 };

static bool rank_valid(uint32_t rank) {
  return rank >= 1 && rank <= QKV_RANK_MAX;
}

static const qkv_parameter parameters[PARAMETERS] = {
    {.name = "rank", .fallback = QKV_RANK_DEFAULT, .valid = rank_valid, .text = "1 to 16"}};

static uint8_t rank_of(const qkv_part_coder *coder) {
  return (uint8_t)coder->parameters[0];
}

static void low_rank_init(qkv_part_coder *coder) {
  qkv_part_coder inner;
  qkvi_stage_inner(coder, &inner);
  coder->block_bytes = inner.block_bytes + (uint32_t)qkv_low_rank_bytes(rank_of(coder), coder->dim);
}

static const uint8_t *section_of(const qkv_part_coder *coder, const uint8_t *block) {
  return block + qkvi_stage_of(coder)->block_bytes;
}

static qkv_low_rank factors_of(const qkv_part_coder *coder, const uint8_t *block) {
  qkv_low_rank factors;
  (void)qkv_low_rank_find(rank_of(coder), section_of(coder, block), coder->dim, &factors);
  return factors;
}

// ---- Rows ----

static void *allocate(size_t bytes) {
  void *made = aligned_alloc(64, (bytes + 63) / 64 * 64);
  if (made == NULL) abort();
  return made;
}

static void low_rank_encode(const qkv_part_coder *coder, const float *rows, uint32_t tokens, uint8_t *block) {
  const qkv_part_coder *inner = qkvi_stage_of(coder);
  const size_t count = (size_t)QKV_PAGE_TOKENS * coder->dim;
  float *missed = allocate(2 * count * sizeof *missed), *coded = missed + count;
  void *scratch = allocate(qkv_low_rank_scratch_bytes(coder->dim));
  inner->codec->encode(inner, rows, tokens, block);
  inner->codec->decode(inner, block, coded);
  for (size_t i = 0; i < count; i++) missed[i] = rows[i] - coded[i];
  qkvi_stage_turn(coder, missed, QKV_PAGE_TOKENS, coded);
  qkv_low_rank_fit(coded, NULL, tokens, coder->dim, rank_of(coder), scratch, (uint8_t *)section_of(coder, block));
  free(scratch);
  free(missed);
}

static void low_rank_decode(const qkv_part_coder *coder, const uint8_t *block, float *rows) {
  const qkv_part_coder *inner = qkvi_stage_of(coder);
  const qkv_low_rank factors = factors_of(coder, block);
  float added[QKV_PAGE_TOKENS * QKV_DIM_MAX];
  const size_t count = (size_t)QKV_PAGE_TOKENS * coder->dim;
  memset(added, 0, count * sizeof *added);
  qkv_low_rank_rows(&factors, added);
  qkvi_stage_output(coder, added, QKV_PAGE_TOKENS);
  inner->codec->decode(inner, block, rows);
  for (size_t i = 0; i < count; i++) rows[i] += added[i];
}

static bool low_rank_matches(const qkv_part_coder *coder, const uint8_t *block, uint32_t slot, const float *row) {
  const qkv_part_coder *inner = qkvi_stage_of(coder);
  return inner->codec->matches(inner, block, slot, row);
}

static const char *low_rank_validate(const qkv_part_coder *coder, const uint8_t *block) {
  const qkv_part_coder *inner = qkvi_stage_of(coder);
  const size_t bytes = qkv_low_rank_bytes(rank_of(coder), coder->dim);
  size_t used;
  const char *wrong = inner->codec->validate(inner, block);
  if (wrong != NULL) return wrong;
  if (qkv_low_rank_validate(rank_of(coder), section_of(coder, block), bytes, QKV_PAGE_TOKENS, coder->dim, &used,
                            NULL) == QKV_OK)
    return NULL;
  return "a factor is -128, or padding is not 0";
}

// ---- Attention ----

static void low_rank_scores(const qkv_part_coder *coder, const uint8_t *block, const float *queries, size_t n,
                            qkv_precision precision, float *scores) {
  const qkv_part_coder *inner = qkvi_stage_of(coder);
  const qkv_low_rank factors = factors_of(coder, block);
  inner->codec->scores(inner, block, queries, n, precision, scores);
  qkv_low_rank_scores(&factors, queries, n, scores);
}

static void low_rank_accumulate(const qkv_part_coder *coder, const uint8_t *block, const float *weights, size_t n,
                                qkv_precision precision, float *sums) {
  const qkv_part_coder *inner = qkvi_stage_of(coder);
  const qkv_low_rank factors = factors_of(coder, block);
  inner->codec->accumulate(inner, block, weights, n, precision, sums);
  qkv_low_rank_accumulate(&factors, weights, n, sums);
}

// ---- The codecs ----

// Behind the codec qkvi_codec_OF.
#define STAGE(of, number, called, text)                                               \
  static bool of##_bits_valid(double bits) {                                          \
    return qkvi_codec_##of.bits_valid(bits);                                          \
  }                                                                                   \
  static double of##_bound(double bits) {                                             \
    return qkvi_codec_##of.error_bound(bits);                                         \
  }                                                                                   \
  static const qkvi_stage of##_stage = {.part = {.id = (number),                      \
                                                 .version = VERSION,                  \
                                                 .init = low_rank_init,               \
                                                 .head_bytes = qkvi_stage_head_bytes, \
                                                 .head = qkvi_stage_head,             \
                                                 .encode = low_rank_encode,           \
                                                 .query = qkvi_stage_query,           \
                                                 .scores = low_rank_scores,           \
                                                 .accumulate = low_rank_accumulate,   \
                                                 .output = qkvi_stage_output,         \
                                                 .decode = low_rank_decode,           \
                                                 .matches = low_rank_matches,         \
                                                 .validate = low_rank_validate},      \
                                        .parameter_count = PARAMETERS,                \
                                        .inner = &qkvi_codec_##of};                   \
  const qkv_codec qkvi_codec_##of##_low_rank = {.id = (number),                       \
                                                .name = (called),                     \
                                                .bits_valid = of##_bits_valid,        \
                                                .bits_text = text " with " called,    \
                                                .parameters = parameters,             \
                                                .parameter_count = PARAMETERS,        \
                                                .message = "low_rank_stage",          \
                                                .inner = &qkvi_codec_##of,            \
                                                .error_bound = of##_bound,            \
                                                .part = &of##_stage.part,             \
                                                QKV_CODEC_OF_PARTS}

STAGE(turboquant, TURBOQUANT_ID, "turboquant-low-rank", "whole numbers from 1 to 8");
STAGE(kivi, KIVI_ID, "kivi-low-rank", "whole numbers from 2 to 8");
STAGE(polarquant, POLARQUANT_ID, "polarquant-low-rank", "whole numbers from 1 to 8");
STAGE(int8, INT8_ID, "int8-low-rank", "8");
STAGE(running_u8, RUNNING_U8_ID, "running-u8-low-rank", "8");
