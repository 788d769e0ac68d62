#include "engine/codec/stage.h"

#include <string.h>

enum { ALIGN = 64 };

void qkvi_stage_inner(const qkv_part_coder *coder, qkv_part_coder *inner) {
  const qkv_codec *codec = ((const qkvi_stage *)coder->codec)->inner;
  *inner = *coder;
  inner->codec = codec->part;
  inner->tables = NULL;
  for (size_t i = 0; i < codec->parameter_count; i++) inner->parameters[i] = codec->parameters[i].fallback;
  inner->codec->init(inner);
  inner->block_bytes = (inner->block_bytes + ALIGN - 1) / ALIGN * ALIGN;
}

size_t qkvi_stage_head_bytes(const qkv_part_coder *coder) {
  (void)coder;
  return sizeof(qkvi_stage_tables);
}

void qkvi_stage_head(const qkv_part_coder *coder, const qkv_coder_spec *spec, const qkv_calibration *calibration,
                     uint32_t layer, uint32_t kv_head, void *tables) {
  (void)spec;
  (void)calibration;
  (void)layer;
  (void)kv_head;
  qkvi_stage_inner(coder, &((qkvi_stage_tables *)tables)->inner);
}

void qkvi_stage_query(const qkv_part_coder *coder, const float *queries, size_t n, float *ready) {
  const qkv_part_coder *inner = qkvi_stage_of(coder);
  if (inner->codec->query != NULL) return inner->codec->query(inner, queries, n, ready);
  memcpy(ready, queries, n * inner->dim * sizeof *ready);
}

void qkvi_stage_output(const qkv_part_coder *coder, float *sums, size_t n) {
  const qkv_part_coder *inner = qkvi_stage_of(coder);
  if (inner->codec->output != NULL) inner->codec->output(inner, sums, n);
}
