// Exact rows beyond memory: each append's rows are one record, until the pages that they become are durable.
//
//   positions     pages, durable      sealed                  length
//                 ...... | page | page | exact rows ..............|
//   records           | r1 |  r2  | r3 |r4|r5|  r6   |               r1 is dropped: durable pages cover it
//
// Between two records there are only rows that went into pages in the append that brought them.
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cache/layer_internal.h"
#include "engine/cache/layer_spill.h"
#include "engine/cache/session_tokens.h"

bool qkvi_layer_takes_rows(const qkv_layer *layer) {
  return layer->config.backing != NULL && layer->config.backing->put_rows != NULL;
}

static uint64_t saved_end(const qkv_layer *layer) {
  return layer->saved_rows_count == 0 ? 0 : layer->saved_rows[layer->saved_rows_count - 1].end;
}

// Rows below are in pages or have a record.
static uint64_t first_unsaved(const qkv_layer *layer) {
  const uint64_t end = saved_end(layer);
  return end > layer->sealed ? end : layer->sealed;
}

static void add_record(qkv_layer *layer, const qkv_saved_rows *rows) {
  if (layer->saved_rows_count == layer->saved_rows_capacity) {
    layer->saved_rows_capacity = layer->saved_rows_capacity == 0 ? 4 : 2 * layer->saved_rows_capacity;
    layer->saved_rows = realloc(layer->saved_rows, layer->saved_rows_capacity * sizeof *layer->saved_rows);
    if (layer->saved_rows == NULL) abort();
  }
  layer->saved_rows[layer->saved_rows_count++] = *rows;
}

// Records that other sessions share stay: the backing drops them with the last session that has them.
static void drop_record(const qkv_layer *layer, const qkv_saved_rows *rows) {
  if (layer->config.backing != NULL && !rows->shared)
    layer->config.backing->drop(layer->config.backing->context, rows->record);
}

// Forgets the records from `count` on.
static void keep_records(qkv_layer *layer, size_t count) {
  while (layer->saved_rows_count > count) drop_record(layer, &layer->saved_rows[--layer->saved_rows_count]);
  if (layer->rows_settled > count) layer->rows_settled = count;
}

// ---- Writing ----

// The token ids of [begin, begin + tokens): those that the session holds, behind them those of the rows that are
// being appended. NULL: some are not known, or they go with another layer.
static const uint32_t *known_ids(const qkv_layer *layer, const qkv_row_ids *coming, uint64_t begin, size_t tokens,
                                 uint32_t *ids) {
  if (layer->config.tokens == NULL) return NULL;
  const size_t held = qkv_session_tokens_read(layer->config.tokens, begin, ids, tokens);
  if (held == tokens) return ids;
  const uint64_t first = begin + held, end = begin + tokens;
  if (coming == NULL || first < coming->position || end > coming->position + coming->count) return NULL;
  memcpy(ids + held, coming->ids + (first - coming->position), (tokens - held) * sizeof *ids);
  return ids;
}

// Rows of one block, which are in one piece there.
static bool save_piece(qkv_layer *layer, const qkv_row_ids *coming, uint64_t begin) {
  const qkv_backing *backing = layer->config.backing;
  const uint64_t slot = (begin - layer->sealed) % QKV_PAGE_TOKENS, left = layer->length - begin;
  uint32_t tokens = (uint32_t)(left < QKV_PAGE_TOKENS - slot ? left : QKV_PAGE_TOKENS - slot);
  uint32_t ids[QKV_PAGE_TOKENS];
  const uint64_t record =
      backing->put_rows(backing->context, layer->config.session, layer->config.model, layer->config.layer, begin,
                        &tokens, qkv_layer_exact_row(layer, QKV_K, begin, 0),
                        qkv_layer_exact_row(layer, QKV_V, begin, 0), known_ids(layer, coming, begin, tokens, ids));
  if (record == 0) return false;
  add_record(layer, &(qkv_saved_rows){.record = record, .begin = begin, .end = begin + tokens});
  return true;
}

bool qkvi_layer_rows_save(qkv_layer *layer, const qkv_row_ids *coming) {
  if (!qkvi_layer_takes_rows(layer)) return true;
  while (first_unsaved(layer) < layer->length) {
    if (!save_piece(layer, coming, first_unsaved(layer))) return false;
  }
  return true;
}

// Rows that durable pages cover need no record.
static void drop_covered(qkv_layer *layer) {
  const uint64_t durable = qkvi_layer_pages_durable(layer);
  size_t count = 0;
  while (count < layer->saved_rows_count && layer->saved_rows[count].end <= durable)
    drop_record(layer, &layer->saved_rows[count++]);
  if (count == 0) return;
  layer->saved_rows_count -= count;
  memmove(layer->saved_rows, layer->saved_rows + count, layer->saved_rows_count * sizeof *layer->saved_rows);
  layer->rows_settled -= count < layer->rows_settled ? count : layer->rows_settled;
}

void qkvi_layer_rows_settle(qkv_layer *layer) {
  const qkv_backing *backing = layer->config.backing;
  if (!qkvi_layer_takes_rows(layer)) return;
  drop_covered(layer);
  for (; layer->rows_settled < layer->saved_rows_count; layer->rows_settled++) {
    const qkv_record_state state = backing->state(backing->context, layer->saved_rows[layer->rows_settled].record);
    if (state == QKV_RECORD_GONE) keep_records(layer, layer->rows_settled);
    if (state != QKV_RECORD_DURABLE) return;
  }
}

bool qkvi_layer_rows_are_settled(const qkv_layer *layer) {
  return !qkvi_layer_takes_rows(layer) ||
         (layer->rows_settled == layer->saved_rows_count && first_unsaved(layer) >= layer->length);
}

uint64_t qkvi_layer_rows_durable(const qkv_layer *layer, uint64_t begin) {
  uint64_t durable = begin;
  for (size_t i = 0; i < layer->rows_settled && layer->saved_rows[i].begin <= durable; i++) {
    if (layer->saved_rows[i].end > durable) durable = layer->saved_rows[i].end;
  }
  return durable;
}

// ---- Cutting and forking ----

void qkvi_layer_rows_cut(qkv_layer *layer, uint64_t position) {
  size_t kept = layer->saved_rows_count;
  while (kept > 0 && layer->saved_rows[kept - 1].begin >= position) kept--;
  keep_records(layer, kept);
  if (kept > 0 && layer->saved_rows[kept - 1].end > position) layer->saved_rows[kept - 1].end = position;
}

void qkvi_layer_rows_fork(qkv_layer *layer, const qkv_layer *parent) {
  for (size_t i = 0; i < parent->saved_rows_count; i++) {
    parent->saved_rows[i].shared = true;
    add_record(layer, &parent->saved_rows[i]);
  }
  layer->rows_settled = parent->rows_settled;
}

void qkv_layer_adopt_rows(qkv_layer *layer, uint64_t record, uint64_t begin, uint64_t end, bool shared) {
  assert(begin < end && record != 0 && (layer->saved_rows_count == 0 || begin == saved_end(layer)));
  add_record(layer, &(qkv_saved_rows){.record = record, .begin = begin, .end = end, .shared = shared});
  layer->rows_settled = layer->saved_rows_count;
}
