#include "engine/cache/trunk.h"

#include <assert.h>
#include <pthread.h>
#include <stdlib.h>

#define uthash_fatal(message) abort()
#include <uthash.h>

#include "engine/cache/layer_internal.h"
#include "engine/cache/session_state.h"

typedef struct part {
  qkv_page_range *range;
  uint32_t layer, pages;  // of the range the first ones
} part;

_Static_assert(sizeof(part) == 16, "no padding: it is part of a key");

struct qkvi_trunk {
  UT_hash_handle hh;
  size_t references;  // under the lock
  size_t count;       // of parts
  uint64_t stored;    // bytes of their records
  uint64_t token_pages;
  qkv_arena *arena;
  // The key.
  qkvi_token_chunk *tokens;  // the last page of token ids; NULL: none
  part parts[];              // in the order of layers
};

static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER;
static qkvi_trunk *table;

static unsigned key_bytes(const qkvi_trunk *trunk) {
  return (unsigned)(sizeof trunk->tokens + trunk->count * sizeof *trunk->parts);
}

// ---- What is shared ----

static size_t shared_ranges(const qkv_layer *layer) {
  size_t count = layer->range_count;
  while (count > 0 && !qkvi_range_is_shared(layer->ranges[count - 1].range)) count--;
  return count;
}

static void add_parts(qkvi_trunk *trunk, const qkv_layer *layer, size_t ranges) {
  for (size_t i = 0; i < ranges; i++) {
    size_t first, end;
    qkv_layer_range(layer, i, &first, &end);
    trunk->parts[trunk->count++] =
        (part){.range = layer->ranges[i].range, .layer = layer->config.layer, .pages = (uint32_t)(end - first)};
  }
}

qkvi_trunk *qkvi_trunk_plan(const session_layers *layers, uint32_t layer_count, qkv_session_tokens *tokens) {
  size_t most = 0;
  for (uint32_t i = 0; i < layer_count; i++) most += layers->at[i].layer.range_count;
  qkvi_trunk *planned = calloc(1, sizeof *planned + most * sizeof *planned->parts);
  if (planned == NULL) abort();
  for (uint32_t i = 0; i < layer_count; i++)
    add_parts(planned, &layers->at[i].layer, shared_ranges(&layers->at[i].layer));
  planned->tokens = qkv_session_tokens_shared(tokens, &planned->token_pages);
  if (planned->count > 0 || planned->tokens != NULL) return planned;
  free(planned);
  return NULL;
}

void qkvi_trunk_discard(qkvi_trunk *planned) {
  assert(planned == NULL || planned->references == 0);
  free(planned);
}

// ---- References ----

static void add(qkvi_trunk *made, qkv_arena *arena) {
  made->arena = arena;
  for (size_t i = 0; i < made->count; i++)
    made->stored += qkvi_range_join_trunk(made->parts[i].range, made->parts[i].pages);
  (void)qkvi_token_chunk_ref(made->tokens);
  HASH_ADD_KEYPTR(hh, table, &made->tokens, key_bytes(made), made);
}

qkvi_trunk *qkvi_trunk_keep(qkvi_trunk *planned, qkv_arena *arena) {
  qkvi_trunk *kept;
  if (planned == NULL) return NULL;
  (void)pthread_mutex_lock(&table_lock);
  HASH_FIND(hh, table, &planned->tokens, key_bytes(planned), kept);
  if (kept == NULL) {
    add(planned, arena);
    kept = planned;
  } else {
    free(planned);
  }
  kept->references++;
  (void)pthread_mutex_unlock(&table_lock);
  return kept;
}

void qkvi_trunk_unref(qkvi_trunk **trunk) {
  qkvi_trunk *left = *trunk;
  *trunk = NULL;
  if (left == NULL) return;
  (void)pthread_mutex_lock(&table_lock);
  const bool last = --left->references == 0;
  if (last) HASH_DEL(table, left);
  (void)pthread_mutex_unlock(&table_lock);
  if (!last) return;
  for (size_t i = 0; i < left->count; i++)
    qkvi_range_leave_trunk(&left->parts[i].range, left->parts[i].pages, left->arena);
  qkvi_token_chunk_unref(left->arena, left->tokens);
  free(left);
}

// ---- Looking ----

size_t qkvi_trunk_ranges(const qkvi_trunk *trunk, uint32_t layer) {
  size_t ranges = 0;
  for (size_t i = 0; trunk != NULL && i < trunk->count; i++) ranges += trunk->parts[i].layer == layer;
  return ranges;
}

uint64_t qkvi_trunk_end(const qkvi_trunk *trunk, uint32_t layer, uint64_t from) {
  for (size_t i = 0; trunk != NULL && i < trunk->count; i++) {
    if (trunk->parts[i].layer == layer)
      from += qkvi_range_read_held(trunk->parts[i].range, trunk->parts[i].pages).tokens;
  }
  return from;
}

uint64_t qkvi_trunk_stored(const qkvi_trunk *trunk) {
  return trunk == NULL ? 0 : trunk->stored;
}

uint64_t qkvi_trunk_token_pages(const qkvi_trunk *trunk) {
  return trunk == NULL ? 0 : trunk->token_pages;
}

void qkvi_trunk_give_pages(const qkvi_trunk *trunk, qkv_layer *layer) {
  for (size_t i = 0; trunk != NULL && i < trunk->count; i++) {
    if (trunk->parts[i].layer == layer->config.layer)
      qkvi_layer_adopt_range(layer, trunk->parts[i].range, trunk->parts[i].pages);
  }
}

void qkvi_trunk_give_tokens(const qkvi_trunk *trunk, qkv_session_tokens *tokens) {
  if (trunk != NULL) qkv_session_tokens_adopt(tokens, trunk->tokens, trunk->token_pages);
}

// Of the layer that part `*at` belongs to; `*at` becomes the next layer's first.
static qkvi_trunk_held read_layer(const qkvi_trunk *trunk, size_t *at, uint64_t from) {
  qkvi_trunk_held held = {.end = from};
  bool all = true;
  for (const uint32_t layer = trunk->parts[*at].layer; *at < trunk->count && trunk->parts[*at].layer == layer;
       ++*at) {
    const qkvi_range_held of = qkvi_range_read_held(trunk->parts[*at].range, trunk->parts[*at].pages);
    held.tokens += of.tokens_held;
    held.bytes += of.bytes_held;
    all &= of.tokens_held == of.tokens;
    if (all) held.end += of.tokens;
  }
  return held;
}

qkvi_trunk_held qkvi_trunk_read_held(const qkvi_trunk *trunk, uint32_t layer, uint32_t layer_count, uint64_t from) {
  qkvi_trunk_held sum = {.end = UINT64_MAX};
  uint32_t layers = 0;
  for (size_t at = 0; at < trunk->count;) {
    if (layer != QKVI_TRUNK_LAYERS && trunk->parts[at].layer != layer) {
      at++;
      continue;
    }
    const qkvi_trunk_held held = read_layer(trunk, &at, from);
    sum.tokens += held.tokens;
    sum.bytes += held.bytes;
    if (held.end < sum.end) sum.end = held.end;
    layers++;
  }
  if (layers < (layer == QKVI_TRUNK_LAYERS ? layer_count : 1)) sum.end = from;
  return sum;
}
