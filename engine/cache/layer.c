#include "engine/cache/layer.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cache/layer_internal.h"

void qkv_layer_init(qkv_layer *layer, const qkv_layer_config *config, const qkv_coder *coder) {
  assert(config->first_position <= QKV_POSITION_MAX && config->policy.recent_window >= 0);
  *layer = (qkv_layer){.config = *config,
                       .coder = coder,
                       .sealed = config->first_position,
                       .length = config->first_position,
                       .pinned = true};
  layer->clock = qkv_ema_clock_create(&config->ema, config->model->kv_heads);
}

static void cut(qkv_layer *layer, uint64_t position);

void qkv_layer_deinit(qkv_layer *layer) {
  layer->config.backing = NULL;  // which keeps the layer's records
  cut(layer, layer->config.first_position);
  assert(layer->page_count == 0 && layer->range_count == 0);
  qkv_ema_clock_destroy(&layer->clock);
  free(layer->ranges);
  free(layer->tail);
  free(layer->saved_rows);
  *layer = (qkv_layer){0};
}

// ---- Look-up ----

// Pages that the layer has of a range.
static size_t seen_of(const qkv_layer *layer, size_t range) {
  const size_t end = range + 1 < layer->range_count ? layer->ranges[range + 1].first : layer->page_count;
  return end - layer->ranges[range].first;
}

size_t qkvi_layer_find_range(const qkv_layer *layer, size_t page) {
  size_t low = page / QKV_RANGE_PAGES, high = layer->range_count;
  assert(page < layer->page_count);
  while (high - low > 1) {
    const size_t middle = low + (high - low) / 2;
    if (layer->ranges[middle].first <= page) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

qkv_ema *qkv_layer_ema(const qkv_layer *layer, size_t index) {
  const qkv_range_slot *slot = &layer->ranges[qkv_layer_range_of(layer, index)];
  qkv_ema_table *emas = atomic_load_explicit(&slot->emas, memory_order_acquire);
  return emas == NULL ? NULL : atomic_load_explicit(&emas->pages[index - slot->first], memory_order_acquire);
}

// The last range that begins at or below `position`.
static size_t range_at(const qkv_layer *layer, uint64_t position) {
  size_t low = 0, high = layer->range_count;
  while (high - low > 1) {
    const size_t middle = low + (high - low) / 2;
    if (layer->ranges[middle].range->begin <= position) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

size_t qkv_layer_page_at(const qkv_layer *layer, uint64_t position) {
  if (layer->page_count == 0) return 0;
  const size_t range = range_at(layer, position);
  return layer->ranges[range].first +
         qkvi_range_find(layer->ranges[range].range, (uint32_t)seen_of(layer, range), position);
}

void qkv_layer_range(const qkv_layer *layer, size_t range, size_t *first, size_t *end) {
  assert(range < layer->range_count);
  *first = layer->ranges[range].first;
  *end = *first + seen_of(layer, range);
  assert(*first < *end);
}

const void *qkv_layer_exact_row(const qkv_layer *layer, qkv_part part, uint64_t position, uint32_t kv_head) {
  assert(position >= layer->sealed && position < layer->length);
  uint64_t offset = position - layer->sealed;
  return qkvi_block_row(layer->config.model, layer->tail[offset / QKV_PAGE_TOKENS].rows, part,
                        offset % QKV_PAGE_TOKENS, kv_head);
}

// ---- Ranges ----

static void grow_slots(qkv_layer *layer, size_t capacity) {
  layer->ranges = realloc(layer->ranges, capacity * sizeof *layer->ranges);
  if (layer->ranges == NULL) abort();
  layer->range_capacity = capacity;
}

static void add_slot(qkv_layer *layer, qkv_page_range *range) {
  if (layer->range_count == layer->range_capacity)
    grow_slots(layer, layer->range_capacity == 0 ? 1 : 2 * layer->range_capacity);
  qkv_range_slot *slot = &layer->ranges[layer->range_count++];
  slot->range = range;
  slot->first = layer->page_count;
  slot->kept = false;
  atomic_init(&slot->emas, NULL);
}

qkv_page_range *qkvi_layer_own_range(qkv_layer *layer, size_t range) {
  qkv_range_slot *slot = &layer->ranges[range];
  const uint32_t seen = (uint32_t)seen_of(layer, range);
  if (!qkvi_range_is_shared(slot->range)) {
    if (slot->range->count > seen) qkvi_range_cut(slot->range, seen, layer->config.arena);
    return slot->range;
  }
  qkv_page_range *copy = qkvi_range_copy(slot->range, 0, seen);
  const bool kept = slot->kept;
  qkvi_layer_keep_range(slot, false);
  qkvi_range_unpin(slot->range);
  qkvi_range_leave(&slot->range, layer->config.arena);
  slot->range = copy;
  qkvi_layer_keep_range(slot, kept);
  return copy;
}

void qkvi_layer_keep_range(qkv_range_slot *slot, bool keep) {
  if (slot->kept == keep) return;
  slot->kept = keep;
  atomic_fetch_add(&slot->range->keepers, keep ? 1 : UINT32_MAX);
}

void qkvi_layer_keep(const qkv_layer *layer, bool keep) {
  for (size_t i = 0; i < layer->range_count; i++) qkvi_layer_keep_range(&layer->ranges[i], keep);
}

// A layer whose ranges have half as many pages as they could, and some more ranges, begins no other one before its
// last is full: each costs memory, and attention a little time.
enum { RANGES_FREE = 8 };

static bool may_begin_range(const qkv_layer *layer) {
  return layer->range_count < RANGES_FREE + layer->page_count / (QKV_RANGE_PAGES / 2);
}

// A full range is followed by another one, and so is one of another coder or one that is shared.
static bool fits_last(const qkv_layer *layer, const qkv_coder *coder) {
  if (layer->range_count == 0) return false;
  const size_t last = layer->range_count - 1;
  const qkv_page_range *range = layer->ranges[last].range;
  if (qkvi_range_is_shared(range) && may_begin_range(layer)) return false;
  return seen_of(layer, last) < QKV_RANGE_PAGES && range->coder == coder;
}

void qkvi_layer_add_page(qkv_layer *layer, const qkv_page_entry *entry) {
  if (!fits_last(layer, entry->coder)) add_slot(layer, qkvi_range_create(qkv_account_of(layer->config.arena)));
  qkvi_range_add(qkvi_layer_own_range(layer, layer->range_count - 1), entry);
  layer->page_count++;
}

void qkvi_layer_split_range(qkv_layer *layer, size_t range, size_t pages) {
  qkv_page_range *left = layer->ranges[range].range;
  const uint32_t seen = (uint32_t)seen_of(layer, range);
  assert(pages < seen && !layer->ranges[range].kept && atomic_load(&layer->ranges[range].emas) == NULL);
  if (qkvi_range_is_shared(left) || !may_begin_range(layer)) return;
  const size_t first = layer->ranges[range].first + pages, behind = layer->range_count - range - 1;
  add_slot(layer, qkvi_range_copy(left, (uint32_t)pages, seen));
  const qkv_range_slot added = layer->ranges[layer->range_count - 1];
  qkv_range_slot *slot = &layer->ranges[range + 1];
  memmove((void *)(slot + 1), (const void *)slot, behind * sizeof *slot);
  memcpy((void *)slot, (const void *)&added, sizeof *slot);
  slot->first = first;
  qkvi_range_cut(left, (uint32_t)pages, layer->config.arena);
}

void qkvi_layer_replace_ranges(qkv_layer *layer, size_t range, const qkv_layer *other, size_t pages) {
  layer->page_count = layer->ranges[range].first;
  while (layer->range_count > range) {
    qkv_range_slot *slot = &layer->ranges[--layer->range_count];
    assert(!slot->kept && atomic_load(&slot->emas) == NULL);
    qkvi_range_unpin(slot->range);
    qkvi_range_leave(&slot->range, layer->config.arena);
  }
  for (size_t i = range; pages > 0; i++) {
    const size_t seen = seen_of(other, i), taken = seen < pages ? seen : pages;
    add_slot(layer, qkvi_range_share(other->ranges[i].range));
    qkvi_range_pin(other->ranges[i].range, 0);
    layer->page_count += taken;
    pages -= taken;
  }
}

void qkvi_layer_adopt_range(qkv_layer *layer, qkv_page_range *range, size_t pages) {
  assert(layer->length == layer->sealed && pages > 0);
  add_slot(layer, qkvi_range_share_of_trunk(range));
  qkvi_range_pin(range, 0);
  layer->page_count += pages;
  layer->saved = layer->settled = layer->page_count;
  layer->sealed = layer->length = qkvi_range_span(range, (uint32_t)pages - 1).end;
}

// ---- Averages ----

// The slot's table, which is made where there is none: perhaps by several threads that read the layer.
static qkv_ema_table *table_of(qkv_range_slot *slot) {
  qkv_ema_table *there = atomic_load_explicit(&slot->emas, memory_order_acquire);
  if (there != NULL) return there;
  qkv_ema_table *made = calloc(1, sizeof *made);
  if (made == NULL) abort();
  if (atomic_compare_exchange_strong(&slot->emas, &there, made)) return made;
  free(made);
  return there;
}

qkv_ema *qkvi_layer_put_ema(const qkv_layer *layer, size_t index, void *block) {
  const uint32_t heads = layer->config.model->kv_heads;
  qkv_range_slot *slot = &layer->ranges[qkv_layer_range_of(layer, index)];
  qkv_ema_table *table = table_of(slot);
  qkv_ema *there = NULL;
  qkv_ema_init(block, heads, qkv_ema_clock_now(layer->clock));
  if (atomic_compare_exchange_strong(&table->pages[index - slot->first], &there, block)) {
    atomic_fetch_add_explicit(&table->count, 1, memory_order_relaxed);
    return block;
  }
  qkv_arena_free(layer->config.arena, block, qkv_ema_bytes(heads));
  return there;
}

qkv_ema *qkvi_layer_need_ema(const qkv_layer *layer, size_t index) {
  qkv_ema *there = qkv_layer_ema(layer, index);
  if (there != NULL || layer->clock == NULL) return there;
  const size_t bytes = qkv_ema_bytes(layer->config.model->kv_heads);
  if (qkv_arena_reserve(layer->config.arena, qkv_arena_cost(bytes), NULL) != QKV_OK) return NULL;
  return qkvi_layer_put_ema(layer, index, qkv_arena_alloc(layer->config.arena, bytes));
}

static uint32_t ema_count(const qkv_range_slot *slot) {
  const qkv_ema_table *emas = atomic_load_explicit(&slot->emas, memory_order_acquire);
  return emas == NULL ? 0 : atomic_load_explicit(&emas->count, memory_order_relaxed);
}

// Frees those from the `kept`th on; with none left the table, too.
static void drop_emas(qkv_layer *layer, qkv_range_slot *slot, size_t kept) {
  qkv_ema_table *emas = atomic_load(&slot->emas);
  if (emas == NULL) return;
  for (size_t i = kept; i < QKV_RANGE_PAGES; i++) {
    qkv_ema *ema = atomic_exchange(&emas->pages[i], NULL);
    if (ema == NULL) continue;
    qkv_arena_free(layer->config.arena, ema, qkv_ema_bytes(layer->config.model->kv_heads));
    atomic_fetch_sub(&emas->count, 1);
  }
  if (kept > 0) return;
  atomic_store(&slot->emas, NULL);
  free(emas);
}

// ---- Truncation ----

static void drop_blocks(qkv_layer *layer, uint64_t kept) {
  while (layer->tail_count > kept) qkvi_block_leave(layer, &layer->tail[--layer->tail_count]);
}

// Records of pages that have been shared are needed by sessions that the backing knows of.
static void drop_records(const qkv_layer *layer, qkv_page_range *range, uint32_t kept) {
  const qkv_backing *backing = layer->config.backing;
  if (backing == NULL || atomic_load(&range->was_shared)) return;
  for (uint32_t i = kept; i < range->count; i++) {
    const uint64_t record = qkvi_range_peek(range, i).record;
    if (record != 0) backing->drop(backing->context, record);
  }
}

// Removes the last range.
static void drop_range(qkv_layer *layer) {
  qkv_range_slot *slot = &layer->ranges[--layer->range_count];
  layer->page_count = slot->first;
  drop_emas(layer, slot, 0);
  drop_records(layer, slot->range, 0);
  qkvi_layer_keep_range(slot, false);
  if (layer->pinned) qkvi_range_unpin(slot->range);
  qkvi_range_leave(&slot->range, layer->config.arena);
}

// The last page of the last range, which is shared, gets a range of its own, so that those before it stay shared.
static void split_last_page(qkv_layer *layer) {
  const size_t last = layer->range_count - 1;
  const uint32_t at = (uint32_t)seen_of(layer, last) - 1;
  const bool kept = layer->ranges[last].kept;
  qkv_ema_table *emas = atomic_load(&layer->ranges[last].emas);
  qkv_ema *ema = emas == NULL ? NULL : atomic_exchange(&emas->pages[at], NULL);
  if (ema != NULL) atomic_fetch_sub(&emas->count, 1);
  layer->page_count--;
  add_slot(layer, qkvi_range_copy(layer->ranges[last].range, at, at + 1));
  layer->page_count++;
  qkv_range_slot *slot = &layer->ranges[last + 1];
  qkvi_layer_keep_range(slot, kept);
  if (ema == NULL) return;
  atomic_store(&table_of(slot)->pages[0], ema);
  atomic_store(&table_of(slot)->count, 1);
}

// Cuts the last range to the pages below `position`, of which there is at least one.
static void cut_range(qkv_layer *layer, uint64_t position) {
  const size_t last = layer->range_count - 1;
  qkv_range_slot *slot = &layer->ranges[last];
  uint32_t kept = (uint32_t)seen_of(layer, last);
  while (qkvi_range_span(slot->range, kept - 1).begin >= position) kept--;
  layer->page_count = slot->first + kept;
  drop_emas(layer, slot, kept);
  if (!qkvi_range_is_shared(slot->range)) drop_records(layer, slot->range, kept);
  const qkvi_page_span cut_page = qkvi_range_span(slot->range, kept - 1);
  const uint32_t tokens = (uint32_t)(position - cut_page.begin);
  if (qkvi_range_is_shared(slot->range) && cut_page.end <= position) return;
  if (qkvi_range_is_shared(slot->range) && kept > 1 && may_begin_range(layer)) split_last_page(layer);
  qkv_page_range *own = qkvi_layer_own_range(layer, layer->range_count - 1);
  if (qkvi_range_copy_entry(own, own->count - 1).tokens > tokens) {
    qkv_page_entry *entry = &qkvi_range_entries(own)[own->count - 1];
    qkvi_range_count(own, entry, -1);
    entry->tokens = tokens;
    qkvi_range_count(own, entry, 1);
  }
  qkvi_range_pack(own);  // where it was packed
}

static void drop_pages(qkv_layer *layer, uint64_t position) {
  while (layer->range_count > 0 && layer->ranges[layer->range_count - 1].range->begin >= position) drop_range(layer);
  if (layer->range_count > 0) cut_range(layer, position);
  if (layer->saved > layer->page_count) layer->saved = layer->page_count;
  if (layer->settled > layer->saved) layer->settled = layer->saved;
}

static uint64_t possible_position(const qkv_layer *layer, uint64_t position) {
  return position < layer->config.first_position ? layer->config.first_position : position;
}

// Rows that were put and are gone from the list may be found again, too. What another session puts at positions that
// were forked would be found by this one, and the other way about.
bool qkv_layer_cut_is_needed(const qkv_layer *layer, uint64_t position) {
  if (layer->config.backing == NULL || position >= layer->length) return false;
  const uint64_t from = possible_position(layer, position);
  return from < layer->sealed || from < layer->forked_to || qkvi_layer_takes_rows(layer);
}

void qkv_layer_truncate_untold(qkv_layer *layer, uint64_t position) {
  if (position >= layer->length) return;
  position = possible_position(layer, position);
  if (layer->forked_to > position) layer->forked_to = position;
  layer->cuts++;
  cut(layer, position);
}

void qkv_layer_truncate(qkv_layer *layer, uint64_t position) {
  const qkv_backing *backing = layer->config.backing;
  if (qkv_layer_cut_is_needed(layer, position))
    backing->cut(backing->context, layer->config.session, layer->config.layer, possible_position(layer, position));
  qkv_layer_truncate_untold(layer, position);
}

// Truncates at `position`, which is not beyond the length.
static void cut(qkv_layer *layer, uint64_t position) {
  layer->length = position;
  if (position < layer->sealed) {
    drop_pages(layer, position);
    layer->sealed = position;
  }
  drop_blocks(layer, qkvi_blocks(layer->length - layer->sealed));
  qkvi_layer_rows_cut(layer, position);
}

// ---- Fork ----

void qkv_layer_fork(qkv_layer *layer, const qkv_layer *parent, uint64_t position) {
  assert(layer->length == layer->config.first_position && layer->config.model == parent->config.model);
  if (position > parent->length) position = parent->length;
  if (position <= layer->config.first_position) return;
  layer->length = parent->length;
  layer->sealed = parent->sealed;
  grow_slots(layer, parent->range_count + 1);
  for (size_t i = 0; i < parent->range_count; i++) {
    add_slot(layer, qkvi_range_share(parent->ranges[i].range));
    layer->page_count += seen_of(parent, i);
  }
  qkvi_layer_share_tail(layer, parent);
  qkvi_layer_rows_fork(layer, parent);
  layer->saved = parent->saved;
  layer->settled = parent->settled;
  qkvi_layer_pin(layer, 0);  // the caller has done so before there was anything to pin
  cut(layer, position);
  layer->forked_to = position;
}

void qkvi_layer_pin(const qkv_layer *layer, int64_t used_ms) {
  for (size_t i = 0; i < layer->range_count; i++) qkvi_range_pin(layer->ranges[i].range, used_ms);
}

void qkvi_layer_unpin(const qkv_layer *layer) {
  for (size_t i = 0; i < layer->range_count; i++) qkvi_range_unpin(layer->ranges[i].range);
}

// ---- Rows ----

typedef struct row_copy {
  const qkv_layer *layer;
  qkv_part part;
  uint32_t dim;
  uint64_t begin, end;  // positions
  bool before_rope;
  float *out;  // [end - begin][kv_heads][dim]
} row_copy;

static float *out_row(const row_copy *copy, uint64_t position, uint32_t kv_head) {
  size_t row = (size_t)(position - copy->begin) * copy->layer->config.model->kv_heads + kv_head;
  return copy->out + row * copy->dim;
}

static void copy_page(const row_copy *copy, const qkv_page_entry *entry, float *rows) {
  const qkv_layer *layer = copy->layer;
  const void *page = entry->page;
  assert(page != NULL);
  uint64_t begin = copy->begin > entry->position ? copy->begin : entry->position;
  uint64_t end = entry->position + entry->tokens;
  if (end > copy->end) end = copy->end;
  for (uint32_t head = 0; head < layer->config.model->kv_heads; head++) {
    entry->coder->codec->decode(entry->coder, page, (uint16_t)head, copy->part, copy->before_rope, rows);
    for (uint64_t position = begin; position < end; position++) {
      memcpy(out_row(copy, position, head), rows + (position - entry->position) * copy->dim,
             copy->dim * sizeof *rows);
    }
  }
}

static void copy_pages(const row_copy *copy) {
  const qkv_layer *layer = copy->layer;
  float rows[QKV_PAGE_TOKENS * QKV_DIM_MAX];
  for (size_t i = qkv_layer_page_at(layer, copy->begin); i < layer->page_count; i++) {
    if (qkvi_layer_span(layer, i).begin >= copy->end) break;
    copy_page(copy, qkv_layer_page(layer, i), rows);
  }
}

static void copy_tail(const row_copy *copy) {
  const qkv_layer *layer = copy->layer;
  const qkv_model *model = layer->config.model;
  uint64_t position = copy->begin > layer->sealed ? copy->begin : layer->sealed;
  for (; position < copy->end; position++) {
    for (uint32_t head = 0; head < model->kv_heads; head++) {
      float *row = out_row(copy, position, head);
      qkv_to_float(model->dtype, qkv_layer_exact_row(layer, copy->part, position, head), row, copy->dim);
      if (copy->before_rope) qkv_rope_inverse(&model->rope, row, position);
    }
  }
}

void qkv_layer_rows(const qkv_layer *layer, qkv_part part, uint64_t begin, uint64_t tokens, bool before_rope,
                    float *out) {
  assert(begin >= layer->config.first_position && begin <= layer->length && tokens <= layer->length - begin);
  const qkv_model *model = layer->config.model;
  row_copy copy = {.layer = layer,
                   .part = part,
                   .dim = qkvi_part_dim(model, part),
                   .begin = begin,
                   .end = begin + tokens,
                   .before_rope = before_rope && part == QKV_K && model->rope.theta != 0,
                   .out = out};
  if (begin < layer->sealed) copy_pages(&copy);
  copy_tail(&copy);
}

// ---- Usage and invariants ----

static void add_entry(const qkv_page_entry *entry, qkv_layer_usage *usage) {
  if (entry->page != NULL) {
    usage->bytes_coded += qkv_arena_cost(entry->bytes);
  } else {
    usage->tokens_cold += entry->tokens;
  }
  if (entry->full != NULL) usage->bytes_overhead += qkv_arena_cost(entry->full_bytes);
  usage->bytes_stored += entry->record_bytes;
}

static void add_range(const qkv_layer *layer, size_t i, qkv_layer_usage *usage) {
  qkv_page_range *range = layer->ranges[i].range;
  const size_t seen = seen_of(layer, i);
  uint64_t bytes = usage->bytes_coded;
  if (seen == range->count) {
    usage->bytes_coded += atomic_load_explicit(&range->bytes_coded, memory_order_relaxed);
    usage->bytes_overhead += atomic_load_explicit(&range->bytes_full, memory_order_relaxed);
    usage->bytes_stored += atomic_load_explicit(&range->bytes_stored, memory_order_relaxed);
    usage->tokens_cold += atomic_load_explicit(&range->tokens_cold, memory_order_relaxed);
  } else {
    qkvi_range_lock(range);
    for (uint32_t p = 0; p < seen; p++) {
      const qkv_page_entry entry = qkvi_range_copy_entry(range, p);
      add_entry(&entry, usage);
    }
    qkvi_range_unlock(range);
  }
  if (qkvi_range_is_used_elsewhere(range)) usage->bytes_shared += usage->bytes_coded - bytes;
  usage->bytes_overhead += ema_count(&layer->ranges[i]) * qkvi_ema_cost(layer);
}

qkv_layer_usage qkv_layer_read_usage(const qkv_layer *layer) {
  const qkv_quality *quality = layer->config.quality;
  qkv_layer_usage usage = {.watch = layer->watch,
                           .quality = quality == NULL ? (qkv_quality_stats){0} : qkv_quality_read(quality),
                           .tokens_coded = layer->sealed - layer->config.first_position,
                           .tokens_exact = layer->length - layer->sealed,
                           .bytes_exact = layer->tail_count * qkv_arena_cost(qkvi_block_bytes(layer->config.model))};
  for (size_t i = 0; i < layer->range_count; i++) add_range(layer, i, &usage);
  return usage;
}

uint64_t qkv_layer_durable(const qkv_layer *layer) {
  return qkvi_layer_rows_durable(layer, qkvi_layer_pages_durable(layer));
}

uint64_t qkvi_layer_pages_durable(const qkv_layer *layer) {
  if (layer->settled == 0) return layer->config.first_position;
  return qkvi_layer_span(layer, layer->settled - 1).end;
}

static const char *validate_cold(const qkv_page_entry *entry) {
  if (entry->tokens < 1 || entry->tokens > QKV_PAGE_TOKENS) return "a page has no tokens, or too many";
  if (entry->record == 0) return "a page has neither an image nor a record";
  if (entry->full != NULL) return "a cold page has a full image";
  return entry->bytes == entry->record_bytes ? NULL : "a cold page's bytes are not its record's";
}

static const char *validate_page(const qkv_layer *layer, const qkv_page_entry *entry, uint64_t position) {
  if (entry->position != position) return "a page does not begin where the one before ends";
  if (entry->record == 0 && entry->record_bytes != 0) return "a page without a record has bytes of one";
  if (entry->page == NULL) return validate_cold(entry);
  if (entry->coder->codec->validate(entry->coder, entry->page, entry->bytes, NULL) != QKV_OK)
    return "a page's image is damaged";
  const qkv_page_header *header = entry->page;
  if (header->position != entry->position) return "a page's image has another position";
  if (header->layer != layer->config.layer) return "a page's image has another layer";
  if (entry->tokens < 1 || entry->tokens > header->tokens) return "a page holds fewer tokens than are valid";
  if (entry->full == NULL) return NULL;
  if (!layer->config.keep_full) return "a page is kept in full, which is not wanted";
  if (entry->coder->codec->validate(entry->coder, entry->full, entry->full_bytes, NULL) != QKV_OK)
    return "a full page's image is damaged";
  return NULL;
}

static const char *validate_sums(qkv_page_range *range) {
  qkv_layer_usage sums = {0};
  for (uint32_t p = 0; p < range->count; p++) {
    const qkv_page_entry entry = qkvi_range_peek(range, p);
    add_entry(&entry, &sums);
  }
  if (sums.bytes_coded != range->bytes_coded) return "bytes_coded is not the sum of the pages";
  if (sums.bytes_overhead != range->bytes_full) return "bytes_full is not the sum of the full pages";
  if (sums.bytes_stored != range->bytes_stored) return "bytes_stored is not the sum of the records";
  return sums.tokens_cold == range->tokens_cold ? NULL : "tokens_cold is not the sum of the cold pages' tokens";
}

static const char *validate_emas(const qkv_layer *layer, size_t i) {
  const qkv_ema_table *emas = layer->ranges[i].emas;
  uint32_t count = 0;
  if (emas == NULL) return NULL;
  if (layer->clock == NULL) return "a page has averages where attention is not counted";
  for (size_t p = 0; p < QKV_RANGE_PAGES; p++) {
    if (emas->pages[p] == NULL) continue;
    if (p >= seen_of(layer, i)) return "there are averages of a page that is not there";
    count++;
  }
  return count == emas->count ? NULL : "the averages are not as many as are counted";
}

static const char *validate_range(const qkv_layer *layer, size_t i, uint64_t *position) {
  qkv_page_range *range = layer->ranges[i].range;
  const uint32_t seen = (uint32_t)seen_of(layer, i);
  const char *reason = NULL;
  if ((range->packed == NULL && range->count > range->capacity) || range->count > QKV_RANGE_PAGES)
    return "a range has too many pages";
  if (seen == 0 || seen > range->count) return "a range has fewer pages than the layer sees";
  if (range->layers == 0) return "a range is no layer's";
  if (range->begin != *position) return "a range does not begin with its first page";
  if (range->packed != NULL && !qkvi_range_is_cold(range)) return "a range is packed that has images";
  for (uint32_t p = 0; p < seen && reason == NULL; p++) {
    const qkv_page_entry entry = qkvi_range_peek(range, p);
    if (entry.coder != range->coder) return "a range has two coders";
    reason = validate_page(layer, &entry, *position);
    *position += entry.tokens;
  }
  if (reason == NULL) reason = validate_sums(range);
  return reason == NULL ? validate_emas(layer, i) : reason;
}

static const char *validate_tail(const qkv_layer *layer) {
  if (layer->length < layer->sealed) return "length is below sealed";
  uint64_t exact = layer->length - layer->sealed;
  if (layer->tail_count != qkvi_blocks(exact)) return "the tail has not as many blocks as its tokens need";
  if (layer->tail_count > layer->tail_capacity) return "the tail is longer than its array";
  if (!qkv_codec_is_exact(layer->coder->codec) &&
      exact >= QKV_PAGE_TOKENS + (uint64_t)layer->config.policy.recent_window) {
    return "a page was not sealed";
  }
  for (size_t i = 0; i < layer->tail_count; i++) {
    if (layer->tail[i].rows == NULL) return "a block of the tail is missing";
  }
  return NULL;
}

const char *qkv_layer_validate(const qkv_layer *layer) {
  uint64_t position = layer->config.first_position;
  if (layer->range_count > layer->range_capacity) return "the page table is longer than its array";
  for (size_t i = 0, pages = 0; i < layer->range_count; i++) {
    if (layer->ranges[i].first != pages) return "a range does not begin where the one before ends";
    const char *reason = validate_range(layer, i, &position);
    if (reason != NULL) return reason;
    pages += seen_of(layer, i);
  }
  if (layer->range_count == 0 && layer->page_count > 0) return "there are pages in no range";
  if (position != layer->sealed) return "the pages do not end at sealed";
  if (layer->settled > layer->saved || layer->saved > layer->page_count) return "more is saved than there is";
  if (layer->rows_settled > layer->saved_rows_count) return "more rows are settled than are saved";
  for (size_t i = 0; i < layer->saved_rows_count; i++) {
    const qkv_saved_rows *rows = &layer->saved_rows[i];
    if (rows->begin >= rows->end || rows->end > layer->length)
      return "a record of rows is empty or beyond the length";
    if (i > 0 && rows->begin < rows[-1].end) return "a record of rows begins before the one before ends";
  }
  return validate_tail(layer);
}
