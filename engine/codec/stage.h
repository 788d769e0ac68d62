// Stages: codecs of parts that have another one in them, the inner one, and do something before or after it. What
// both work on are rows in the inner one's code space, which its turn() or query() brings rows to and its output()
// brings back: of codecs whose code space is turned, and no more. A stage's parameters are its own, then the inner
// codec's.
//
// Threads: pure functions.
#ifndef QKV_ENGINE_CODEC_STAGE_H
#define QKV_ENGINE_CODEC_STAGE_H

#include "engine/codec/parts.h"

typedef struct qkvi_stage {
  qkv_part_codec part;  // the stage's own
  size_t parameter_count;
  bool loops;  // the inner codec's rows are differences to decoded ones
  const qkv_codec *inner;
} qkvi_stage;

// A head's tables of every stage, before the inner codec's.
typedef struct qkvi_stage_tables {
  _Alignas(64) qkv_part_coder inner;
} qkvi_stage_tables;

// The inner coder of a stage's coder.
void qkvi_stage_inner(const qkv_part_coder *coder, qkv_part_coder *inner);
// Of qkv_part_codec.
size_t qkvi_stage_head_bytes(const qkv_part_coder *coder);
void qkvi_stage_head(const qkv_part_coder *coder, const qkv_coder_spec *spec, const qkv_calibration *calibration,
                     uint32_t layer, uint32_t kv_head, void *tables);
void qkvi_stage_query(const qkv_part_coder *coder, const float *queries, size_t n, float *ready);
void qkvi_stage_output(const qkv_part_coder *coder, float *sums, size_t n);
// rows [n][dim] to the inner one's code space.
void qkvi_stage_turn(const qkv_part_coder *coder, const float *rows, size_t n, float *turned);

// In a head's coder.
static inline const qkv_part_coder *qkvi_stage_of(const qkv_part_coder *coder) {
  return &((const qkvi_stage_tables *)coder->tables)->inner;
}

#endif
