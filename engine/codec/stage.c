#include "engine/codec/stage.h"

#include <string.h>

enum { ALIGN = 64 };

void qkvi_stage_inner(const qkv_part_coder *coder, qkv_part_coder *inner) {
  const qkvi_stage *stage = (const qkvi_stage *)coder->codec;
  *inner = *coder;
  inner->codec = stage->inner->part;
  inner->tables = NULL;
  inner->in_loop = stage->loops;
  for (size_t i = 0; i < QKV_PARAMETERS_MAX; i++) {
    const size_t from = i + stage->parameter_count;
    inner->parameters[i] = from < QKV_PARAMETERS_MAX ? coder->parameters[from] : 0;
  }
  qkvi_part_defaults(stage->inner, inner->parameters);
  inner->codec->init(inner);
  inner->block_bytes = (inner->block_bytes + ALIGN - 1) / ALIGN * ALIGN;
}

size_t qkvi_stage_head_bytes(const qkv_part_coder *coder) {
  qkv_part_coder inner;
  qkvi_stage_inner(coder, &inner);
  return sizeof(qkvi_stage_tables) + (inner.codec->head != NULL ? inner.codec->head_bytes(&inner) : 0);
}

void qkvi_stage_head(const qkv_part_coder *coder, const qkv_coder_spec *spec, const qkv_calibration *calibration,
                     uint32_t layer, uint32_t kv_head, void *tables) {
  qkvi_stage_tables *made = tables;
  qkv_part_coder *inner = &made->inner;
  qkvi_stage_inner(coder, inner);
  if (inner->codec->head == NULL) return;
  inner->codec->head(inner, spec, calibration, layer, kv_head, made + 1);
  inner->tables = made + 1;
}

void qkvi_stage_query(const qkv_part_coder *coder, const float *queries, size_t n, float *ready) {
  const qkv_part_coder *inner = qkvi_stage_of(coder);
  if (inner->codec->query != NULL) return inner->codec->query(inner, queries, n, ready);
  memcpy(ready, queries, n * inner->dim * sizeof *ready);
}

void qkvi_stage_turn(const qkv_part_coder *coder, const float *rows, size_t n, float *turned) {
  const qkv_part_coder *inner = qkvi_stage_of(coder);
  if (inner->codec->turn != NULL) return inner->codec->turn(inner, rows, n, turned);
  qkvi_stage_query(coder, rows, n, turned);
}

void qkvi_stage_output(const qkv_part_coder *coder, float *sums, size_t n) {
  const qkv_part_coder *inner = qkvi_stage_of(coder);
  if (inner->codec->output != NULL) inner->codec->output(inner, sums, n);
}
