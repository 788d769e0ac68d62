// Between the files of the embedded codec: what attending, decoding and encoding need of a coder's heads and of a
// page.
#ifndef QKV_ENGINE_CODEC_EMBEDDED_INTERNAL_H
#define QKV_ENGINE_CODEC_EMBEDDED_INTERNAL_H

#include <stdbool.h>
#include <string.h>

#include "engine/codec/embedded.h"
#include "engine/codec/phases.h"
#include "engine/codec/walk.h"
#include "engine/kernel/integer.h"

// What the codec keeps of a block of queries.
typedef struct qkvi_embedded_queries {
  qkv_integer_buffers buffer;
  qkv_integer_queries integers;  // of `codes`, in the memory `buffer`
  qkv_layouts layouts;
  qkv_phases_walk walk;  // frames that are turned back by the page
  // The most of a query's numbers and the bytes of weights where arithmetic is in integers (kernel/integer.h); 0: in
  // floats.
  float query_limit;
  unsigned weight_bytes;
  float shares[QKV_QUERY_BLOCK];                             // what every score gets
  _Alignas(64) float codes[QKV_QUERY_BLOCK * QKV_DIM_MAX];   // [count][key_dim], in code space
  _Alignas(64) float turned[QKV_QUERY_BLOCK * QKV_DIM_MAX];  // attend frame: turned back by the page's centre
  qkv_walk blocks;  // attend frame, where keys are turned back to blocks of pages
} qkvi_embedded_queries;
_Static_assert(sizeof(qkvi_embedded_queries) <= QKV_QUERY_OWN_MAX, "queries of the embedded codec");

static inline qkvi_embedded_queries *qkvi_own(qkv_query_block *queries) {
  return (qkvi_embedded_queries *)queries->own;
}

static inline void qkvi_find(const qkv_coder *coder, const void *page, uint16_t kv_head, qkv_part part,
                             qkv_page_codes *codes) {
  qkv_page_find(page, kv_head, part, qkv_embedded(coder)->heads[kv_head].schedules, codes);
}

static inline uint16_t qkvi_coder_dim(const qkv_coder *coder, qkv_part part) {
  return part == QKV_K ? coder->key_dim : coder->value_dim;
}

// Coordinates that have any bits at a tier.
static inline size_t qkvi_coded(const qkv_schedule *schedule, unsigned tier) {
  return schedule->reach[tier][1];
}

// Coordinates that have bits at the highest tier of a head's part; no page of the coder has more.
static inline size_t qkvi_coded_most(const qkv_coder *coder, uint16_t kv_head, qkv_part part) {
  return qkvi_coded(qkv_embedded(coder)->heads[kv_head].schedules[part],
                    qkv_embedded(coder)->heads[kv_head].tiers[part]);
}

static inline qkv_head_layout qkvi_layout_of(const qkv_coder *coder, uint16_t kv_head) {
  const qkv_head_coder *head = &qkv_embedded(coder)->heads[kv_head];
  qkv_head_layout layout = {.schedules = {head->schedules[QKV_K], head->schedules[QKV_V]}};
  memset(layout.tiers[QKV_K], head->tiers[QKV_K], sizeof layout.tiers[QKV_K]);
  memset(layout.tiers[QKV_V], head->tiers[QKV_V], sizeof layout.tiers[QKV_V]);
  return layout;
}

// What a head's part has in addition to its codes.
typedef struct qkvi_additions {
  bool anchored, factored;
  qkv_anchor anchor;
  qkv_low_rank factors;
} qkvi_additions;
qkvi_additions qkvi_additions_find(const qkv_coder *coder, const void *page, uint16_t kv_head, qkv_part part);

// qkv_codec.create and qkv_codec.destroy, encode and rows_match.
uint64_t qkvi_embedded_cost(const qkv_coder_spec *spec);
void *qkvi_embedded_create(const qkv_coder_spec *spec, const qkv_coder **coders, uint64_t *bytes);
void qkvi_embedded_destroy(void *of);
size_t qkvi_embedded_encode(const qkv_coder *coder, uint64_t position, uint32_t tokens, qkv_dtype dtype,
                            const void *k, const void *v, qkv_pool *pool, void *image);
uint32_t qkvi_embedded_rows_match(const qkv_coder *coder, const void *page, uint16_t kv_head, qkv_part part,
                                  uint32_t first, uint32_t tokens, const float *rows);

#endif
