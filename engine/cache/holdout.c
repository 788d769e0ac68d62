#include "engine/cache/holdout.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

typedef struct held_layer {
  bool teaches;
  size_t index;         // among those that teach
  uint64_t pages_seen;  // but for the one with first tokens
  uint64_t queries_seen, queries_taken;
  bool has[QKV_HOLDOUT_PAGES];  // the first one is that of first tokens
  uint64_t positions[QKV_HOLDOUT_PAGES], stands[QKV_HOLDOUT_QUERIES];
} held_layer;

struct qkv_holdout {
  qkv_holdout_shape shape;
  size_t teachers;
  uint64_t random;
  uint8_t *pages;  // [teachers][QKV_HOLDOUT_PAGES] blocks: K [64][kv_heads][key_dim], then V; NULL: none are held
  float *queries;  // [teachers][QKV_HOLDOUT_QUERIES][q_heads][key_dim]; the same
  held_layer layers[];
};

static void *zeroed(size_t count, size_t size) {
  void *block = calloc(count, size);
  if (block == NULL) abort();
  return block;
}

qkv_holdout *qkv_holdout_create(const qkv_holdout_shape *shape, const bool *teaches) {
  qkv_holdout *holdout = zeroed(1, sizeof *holdout + shape->layers * sizeof *holdout->layers);
  holdout->shape = *shape;
  holdout->random = 1;
  for (uint32_t i = 0; i < shape->layers; i++) {
    holdout->layers[i].teaches = teaches[i];
    holdout->layers[i].index = holdout->teachers;
    holdout->teachers += teaches[i];
  }
  return holdout;
}

void qkv_holdout_destroy(qkv_holdout **holdout) {
  if (*holdout == NULL) return;
  free((*holdout)->pages);
  free((*holdout)->queries);
  free(*holdout);
  *holdout = NULL;
}

static size_t k_values(const qkv_holdout *holdout) {
  return (size_t)QKV_PAGE_TOKENS * holdout->shape.kv_heads * holdout->shape.key_dim;
}

static size_t v_values(const qkv_holdout *holdout) {
  return (size_t)QKV_PAGE_TOKENS * holdout->shape.kv_heads * holdout->shape.value_dim;
}

static size_t block_bytes(const qkv_holdout *holdout) {
  return (k_values(holdout) + v_values(holdout)) * qkv_dtype_size(holdout->shape.dtype);
}

static size_t token_values(const qkv_holdout *holdout) {
  return (size_t)holdout->shape.q_heads * holdout->shape.key_dim;
}

uint64_t qkv_holdout_page_bytes(const qkv_holdout *holdout) {
  return (uint64_t)holdout->teachers * QKV_HOLDOUT_PAGES * block_bytes(holdout);
}

uint64_t qkv_holdout_query_bytes(const qkv_holdout *holdout) {
  return (uint64_t)holdout->teachers * QKV_HOLDOUT_QUERIES * token_values(holdout) * sizeof(float);
}

void qkv_holdout_begin_pages(qkv_holdout *holdout) {
  for (uint32_t i = 0; i < holdout->shape.layers; i++) {
    memset(holdout->layers[i].has, 0, sizeof holdout->layers[i].has);
    holdout->layers[i].pages_seen = 0;
  }
  if (holdout->pages == NULL) holdout->pages = zeroed(1, qkv_holdout_page_bytes(holdout));
}

void qkv_holdout_begin_queries(qkv_holdout *holdout) {
  for (uint32_t i = 0; i < holdout->shape.layers; i++) {
    holdout->layers[i].queries_seen = holdout->layers[i].queries_taken = 0;
  }
  if (holdout->queries == NULL) holdout->queries = zeroed(1, qkv_holdout_query_bytes(holdout));
}

void qkv_holdout_drop_pages(qkv_holdout *holdout) {
  free(holdout->pages);
  holdout->pages = NULL;
}

// ---- Taking ----

// splitmix64
static uint64_t random_number(const qkv_holdout *holdout, uint32_t layer, uint64_t seen) {
  uint64_t z = holdout->random + layer * 0x9e3779b97f4a7c15u + seen * 0xd1342543de82ef95u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

static uint8_t *block_of(const qkv_holdout *holdout, uint32_t layer, size_t page) {
  return holdout->pages + (holdout->layers[layer].index * QKV_HOLDOUT_PAGES + page) * block_bytes(holdout);
}

// Where a page goes; QKV_HOLDOUT_PAGES: nowhere.
static size_t place_of(qkv_holdout *holdout, uint32_t layer, uint64_t position) {
  held_layer *held = &holdout->layers[layer];
  const uint64_t others = QKV_HOLDOUT_PAGES - 1;
  if (position == 0 && !held->has[0]) return 0;
  const uint64_t seen = held->pages_seen++;
  if (seen % QKV_HOLDOUT_PAGE_EVERY != 0) return QKV_HOLDOUT_PAGES;
  const uint64_t stood = seen / QKV_HOLDOUT_PAGE_EVERY;
  const uint64_t place = stood < others ? stood : random_number(holdout, layer, stood + 1) % (stood + 1);
  return place < others ? (size_t)place + 1 : QKV_HOLDOUT_PAGES;
}

bool qkv_holdout_page(qkv_holdout *holdout, uint32_t layer, uint64_t position, const float *k, const float *v) {
  held_layer *held = &holdout->layers[layer];
  assert(held->teaches && holdout->pages != NULL);
  const size_t place = place_of(holdout, layer, position);
  if (place == QKV_HOLDOUT_PAGES) return false;
  uint8_t *block = block_of(holdout, layer, place);
  const qkv_dtype dtype = holdout->shape.dtype;
  qkv_from_float(dtype, k, block, k_values(holdout));
  qkv_from_float(dtype, v, block + k_values(holdout) * qkv_dtype_size(dtype), v_values(holdout));
  held->has[place] = true;
  held->positions[place] = position;
  return true;
}

static float *query_of(const qkv_holdout *holdout, uint32_t layer, size_t slot) {
  const size_t index = holdout->layers[layer].index * QKV_HOLDOUT_QUERIES + slot;
  return holdout->queries + index * token_values(holdout);
}

bool qkv_holdout_query(qkv_holdout *holdout, uint32_t layer, uint64_t position, const float *q, bool before_rope) {
  held_layer *held = &holdout->layers[layer];
  const qkv_holdout_shape *shape = &holdout->shape;
  assert(held->teaches && holdout->queries != NULL);
  if (held->queries_seen++ % QKV_HOLDOUT_QUERY_EVERY != 0) return false;
  const uint64_t taken = held->queries_taken++;
  const size_t slot =
      taken < QKV_HOLDOUT_QUERIES ? (size_t)taken : random_number(holdout, layer, taken) % QKV_HOLDOUT_QUERIES;
  float *rows = query_of(holdout, layer, slot);
  memcpy(rows, q, token_values(holdout) * sizeof *rows);
  for (uint32_t head = 0; head < shape->q_heads && before_rope && shape->rope.theta != 0; head++) {
    qkv_rope_forward(&shape->rope, rows + (size_t)head * shape->key_dim, position);
  }
  held->stands[slot] = position;
  return true;
}

// ---- Looking ----

bool qkv_holdout_ready(const qkv_holdout *holdout, uint32_t layer, uint64_t patience) {
  const held_layer *held = &holdout->layers[layer];
  size_t pages = 0;
  if (!held->teaches) return true;
  for (size_t i = 0; i < QKV_HOLDOUT_PAGES; i++) pages += held->has[i];
  if (holdout->pages == NULL || pages < QKV_HOLDOUT_PAGES_LEAST) return false;
  if (!held->has[0] && held->pages_seen < QKV_HOLDOUT_PATIENCE) return false;
  return held->queries_taken > 0 || held->pages_seen >= patience;
}

static float *floats(size_t count) {
  float *made = malloc((count + 1) * sizeof *made);
  if (made == NULL) abort();
  return made;
}

static size_t held_tokens(const held_layer *held) {
  return held->queries_taken < QKV_HOLDOUT_QUERIES ? (size_t)held->queries_taken : QKV_HOLDOUT_QUERIES;
}

void qkv_holdout_copy(const qkv_holdout *holdout, uint32_t layer, qkv_held *held) {
  const held_layer *from = &holdout->layers[layer];
  const qkv_dtype dtype = holdout->shape.dtype;
  const size_t ks = k_values(holdout), vs = v_values(holdout);
  *held = (qkv_held){.teaches = from->teaches,
                     .k = floats(QKV_HOLDOUT_PAGES * ks),
                     .v = floats(QKV_HOLDOUT_PAGES * vs),
                     .queries = floats(QKV_HOLDOUT_QUERIES * token_values(holdout))};
  for (size_t i = 0; i < QKV_HOLDOUT_PAGES && from->teaches && holdout->pages != NULL; i++) {
    if (!from->has[i]) continue;
    const uint8_t *block = block_of(holdout, layer, i);
    qkv_to_float(dtype, block, held->k + held->pages * ks, ks);
    qkv_to_float(dtype, block + ks * qkv_dtype_size(dtype), held->v + held->pages * vs, vs);
    held->positions[held->pages++] = from->positions[i];
  }
  if (!from->teaches || holdout->queries == NULL) return;
  held->tokens = held_tokens(from);
  memcpy(held->queries, query_of(holdout, layer, 0), held->tokens * token_values(holdout) * sizeof *held->queries);
  memcpy(held->stands, from->stands, sizeof held->stands);
}

void qkv_held_clear(qkv_held *held) {
  free(held->k);
  free(held->v);
  free(held->queries);
  *held = (qkv_held){0};
}

size_t qkv_holdout_head_queries(const qkv_holdout *holdout, uint32_t layer, uint32_t kv_head, float *queries,
                                uint64_t stands[QKV_HOLDOUT_QUERIES]) {
  const held_layer *from = &holdout->layers[layer];
  if (!from->teaches || holdout->queries == NULL) return 0;
  const size_t each = (size_t)(holdout->shape.q_heads / holdout->shape.kv_heads) * holdout->shape.key_dim;
  const size_t tokens = held_tokens(from);
  for (size_t i = 0; i < tokens; i++) {
    memcpy(queries + i * each, query_of(holdout, layer, i) + kv_head * each, each * sizeof *queries);
  }
  memcpy(stands, from->stands, sizeof from->stands);
  return tokens;
}
