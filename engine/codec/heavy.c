#include "engine/codec/heavy.h"

#include <math.h>
#include <string.h>

#include "engine/codec/phases.h"
#include "engine/codec/row.h"

// scores[tokens] of keys and the predictor turned to where they stand.
static void find_scores(const qkv_coder *coder, const float *predictor, uint64_t position, uint32_t tokens,
                        qkv_dtype dtype, const uint8_t *keys, size_t stride, float *scores) {
  const size_t dim = coder->key_dim;
  _Alignas(64) float turned[QKV_PAGE_TOKENS * QKV_DIM_MAX];
  float key[QKV_DIM_MAX];
  for (size_t t = 0; t < tokens; t++) memcpy(turned + t * dim, predictor, dim * sizeof *turned);
  if (qkv_embedded(coder)->phases != NULL)
    qkv_phases_forward(qkv_embedded(coder)->phases, position, tokens, dim, turned);
  for (size_t t = 0; t < tokens; t++) {
    qkv_to_float(dtype, keys + t * stride, key, dim);
    scores[t] = qkvi_row_dot(key, turned + t * dim, dim);
  }
}

uint64_t qkv_heavy_slots(const qkv_coder *coder, uint16_t kv_head, uint64_t position, uint32_t tokens,
                         qkv_dtype dtype, const void *keys, size_t stride) {
  const qkv_head_coder *head = &qkv_embedded(coder)->heads[kv_head];
  float scores[QKV_PAGE_TOKENS];
  uint64_t found = 0;
  if (head->heavy == NULL) return 0;
  find_scores(coder, head->heavy, position, tokens, dtype, keys, stride, scores);
  for (size_t i = 0; i < QKV_HEAVY_MOST; i++) {
    size_t best = QKV_PAGE_TOKENS;
    float score = head->heavy_least;
    for (size_t t = 0; t < tokens; t++) {
      if (position + t < qkv_embedded(coder)->sinks || (found >> t & 1) != 0 || !(scores[t] > score)) continue;
      best = t;
      score = scores[t];
    }
    if (best < QKV_PAGE_TOKENS) found |= (uint64_t)1 << best;
  }
  return found;
}
