// The exact tail, in floating point: tiles of scores like those of pages.
#include <string.h>

#include "engine/cache/attend_internal.h"

#define TILE_WIDTH 64  // coordinates of exact keys that are transposed at once
#define LANES 16       // independent sums, so that the compiler can vectorize without reordering

// A tile's tokens up to whole lanes.
static size_t lanes_of(size_t tokens) {
  return (tokens + LANES - 1) / LANES * LANES;
}

// keys [TILE_WIDTH][QKVI_TILE_TOKENS]: coordinates [c, c + width) of a tile's keys, transposed; zeros fill the lanes.
static void transpose_keys(const qkvi_head_task *task, uint64_t position, size_t tokens, size_t c, size_t width,
                           float *keys) {
  qkv_dtype dtype = task->model->dtype;
  float part[TILE_WIDTH];
  for (size_t i = 0; i < width; i++) {
    for (size_t t = tokens; t < lanes_of(tokens); t++) keys[i * QKVI_TILE_TOKENS + t] = 0;
  }
  for (size_t t = 0; t < tokens; t++) {
    const uint8_t *row = qkv_layer_exact_row(task->layer, QKV_K, position + t, task->kv_head);
    qkv_to_float(dtype, row + c * qkv_dtype_size(dtype), part, width);
    for (size_t i = 0; i < width; i++) keys[i * QKVI_TILE_TOKENS + t] = part[i];
  }
}

// scores[tokens, up to whole lanes] += query[width] . keys[width][QKVI_TILE_TOKENS], over coordinates in order.
static void add_scores(const float *query, const float *keys, size_t width, size_t tokens, float *scores) {
  for (size_t t = 0; t < tokens; t += LANES) {
    float lanes[LANES];
    memcpy(lanes, scores + t, sizeof lanes);
    for (size_t c = 0; c < width; c++) {
      for (size_t i = 0; i < LANES; i++) lanes[i] += query[c] * keys[c * QKVI_TILE_TOKENS + t + i];
    }
    memcpy(scores + t, lanes, sizeof lanes);
  }
}

static void score_exact(const qkvi_head_task *task, qkvi_row_block *block, uint64_t position, size_t tokens) {
  float keys[TILE_WIDTH * QKVI_TILE_TOKENS];
  size_t dim = task->model->key_dim;
  memset(block->scores, 0, block->queries.count * QKVI_TILE_TOKENS * sizeof *block->scores);
  for (size_t c = 0; c < dim; c += TILE_WIDTH) {
    size_t width = dim - c < TILE_WIDTH ? dim - c : TILE_WIDTH;
    transpose_keys(task, position, tokens, c, width, keys);
    for (size_t row = 0; row < block->queries.count; row++) {
      add_scores(block->queries.rows + row * dim + c, keys, width, tokens, block->scores + row * QKVI_TILE_TOKENS);
    }
  }
}

static void accumulate_exact(const qkvi_head_task *task, const qkvi_row_block *block, uint64_t position,
                             size_t tokens, qkvi_partial *partial) {
  float value[QKV_DIM_MAX];
  size_t dim = task->model->value_dim;
  for (size_t t = 0; t < tokens; t++) {
    qkv_to_float(task->model->dtype, qkv_layer_exact_row(task->layer, QKV_V, position + t, task->kv_head), value,
                 dim);
    for (size_t row = 0; row < block->queries.count; row++) {
      float weight = block->scores[row * QKVI_TILE_TOKENS + t];
      float *sums = partial->sums[row];
      for (size_t i = 0; i < dim; i++) sums[i] += weight * value[i];
    }
  }
}

// Tiles begin at whole blocks, so that a row's sums do not depend on what other rows of its block see.
void qkvi_attend_tail(const qkvi_head_task *task, qkvi_row_block *block, qkvi_partial *partial) {
  const qkv_layer *layer = task->layer;
  uint64_t begin = block->begin_min > layer->sealed ? block->begin_min : layer->sealed;
  uint64_t position = layer->sealed + (begin - layer->sealed) / QKVI_TILE_TOKENS * QKVI_TILE_TOKENS;
  for (; position < block->end_max; position += QKVI_TILE_TOKENS) {
    size_t tokens =
        layer->length - position < QKVI_TILE_TOKENS ? (size_t)(layer->length - position) : QKVI_TILE_TOKENS;
    score_exact(task, block, position, tokens);
    if (qkvi_attend_fold(task, block, partial, position, tokens))
      accumulate_exact(task, block, position, tokens, partial);
  }
}
