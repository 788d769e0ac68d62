#include "engine/cache/layer_retier.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/yield.h"
#include "engine/cache/layer_internal.h"

static void *allocate(size_t count, size_t bytes) {
  void *made = calloc(count + 1, bytes);
  if (made == NULL) abort();
  return made;
}

// ---- Tiers ----

void qkv_layer_tiers(const qkv_layer *layer, const qkv_page_entry *entry, qkv_head_tiers *now, qkv_head_tiers *most) {
  assert(((const qkv_page_header *)entry->page)->kv_heads == layer->config.model->kv_heads);
  const qkv_codec_planes *planes = entry->coder->codec->planes;
  planes->tiers(entry->page, now);
  planes->tiers(entry->full != NULL ? entry->full : entry->page, most);
}

// ---- The snapshot ----

// What the weights of a head's groups are made of.
typedef struct head_scale {
  float key_error;   // mean square of what a unit of a key's error adds to a score
  float value_size;  // mean square of a value of gain 1
} head_scale;

static head_scale scale_of(const qkv_layer *layer, const qkv_lane lanes[2], uint16_t kv_head) {
  const double scale = layer->config.model->scale;
  head_scale made = {.value_size = lanes[QKV_V].size};
  // A calibration's weights have the queries in them. Else queries are taken to be isotropic: with the measured size,
  // or, until that is known, coordinates of variance 1.
  const float measured = layer->clock == NULL ? 0 : qkv_ema_clock_size(layer->clock, kv_head);
  made.key_error = lanes[QKV_K].weighed || measured == 0 ? (float)(scale * scale) : measured;
  return made;
}

// Sums over a group's valid tokens. `floor` [tokens] is added to what is expected of each.
static void weigh_group(const head_scale *scale, const float *sizes_k, const float *sizes_v, const float *attention,
                        const float *floor, size_t tokens, qkv_retier_group groups[2]) {
  float keys = 0, values = 0, peak = 0;
  for (size_t t = 0; t < tokens; t++) {
    const float s = attention[t], weight = (s + floor[t]) * sizes_v[t];
    values += weight;
    keys += weight * (1 - s) * (1 - s) * sizes_k[t];
    peak = s > peak ? s : peak;
  }
  groups[QKV_K].weight = keys * scale->key_error * scale->value_size;
  groups[QKV_V].weight = values;
  groups[QKV_K].peak = groups[QKV_V].peak = peak;
}

// The expected attention of each of a page's tokens whatever the average: QKV_RETIER_FLOOR times the even share;
// nothing of those that the sliding window has passed.
static void fill_floor(const qkv_layer *layer, const qkv_page_entry *entry, float floor[QKV_PAGE_TOKENS]) {
  const uint64_t window = qkv_model_window(layer->config.model, layer->config.layer);
  const float share = QKV_RETIER_FLOOR / (float)(layer->length - layer->config.first_position);
  for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) {
    const bool passed = window != 0 && layer->length - (entry->position + t) > window;
    floor[t] = t >= entry->tokens || passed ? 0 : share;
  }
}

// Whether one of a group's tokens may still be attended.
static bool is_awaited(const float *floor, size_t tokens) {
  for (size_t t = 0; t < tokens; t++) {
    if (floor[t] > 0) return true;
  }
  return false;
}

// `groups` [2][QKV_PAGE_GROUPS] of one head of a page.
static void fill_head(const qkv_layer *layer, const qkv_page_entry *entry, const qkv_lane lanes[2],
                      const qkv_ema *ema, uint16_t kv_head, uint64_t now, qkv_retier_group *groups) {
  const qkv_codec_planes *planes = entry->coder->codec->planes;
  const head_scale scale = scale_of(layer, lanes, kv_head);
  float attention[QKV_PAGE_TOKENS] = {0}, floor[QKV_PAGE_TOKENS];
  float sizes[2][QKV_PAGE_TOKENS];
  for (qkv_part part = QKV_K; part <= QKV_V; part++)
    planes->sizes(entry->coder, entry->page, kv_head, part, sizes[part]);
  const bool seen = ema != NULL && qkv_ema_seen(ema, kv_head);
  if (seen) qkv_ema_read(ema, layer->clock, kv_head, now, attention);
  fill_floor(layer, entry, floor);
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
    const size_t first = g * QKV_GROUP_TOKENS;
    size_t tokens = entry->tokens > first ? entry->tokens - first : 0;
    if (tokens > QKV_GROUP_TOKENS) tokens = QKV_GROUP_TOKENS;
    qkv_retier_group both[2] = {0};
    weigh_group(&scale, sizes[QKV_K] + first, sizes[QKV_V] + first, attention + first, floor + first, tokens, both);
    // What the sliding window has passed gets no attention, counted or not.
    both[QKV_K].unseen = both[QKV_V].unseen = !seen && is_awaited(floor + first, tokens);
    groups[g] = both[QKV_K];
    groups[QKV_PAGE_GROUPS + g] = both[QKV_V];
  }
}

static uint64_t quiet_for(const qkv_layer *layer, const qkv_ema *ema, uint64_t now) {
  if (ema == NULL) return UINT64_MAX;
  const uint64_t changed = atomic_load_explicit(&ema->changed, memory_order_relaxed);
  const uint64_t since = changed > ema->born ? changed : ema->born;
  assert(layer->clock != NULL);
  return now > since ? now - since : 0;
}

static void fill_page(const qkv_layer *layer, size_t index, const qkv_lane *lanes, uint64_t now, bool leave_shared,
                      qkv_retier_page *page, qkv_retier_group *groups) {
  const qkv_page_entry *entry = qkv_layer_page(layer, index);
  const qkv_ema *ema = qkv_layer_ema(layer, index);
  const uint32_t heads = layer->config.model->kv_heads;
  qkv_head_tiers *tiers = allocate((size_t)2 * heads, sizeof *tiers), *most = tiers + heads;
  qkv_layer_tiers(layer, entry, tiers, most);
  page->index = index;
  page->serial = entry->serial;
  page->position = entry->position;
  page->tokens = entry->tokens;
  page->lost = entry->lost;
  page->shared = leave_shared && qkvi_range_is_shared(layer->ranges[qkv_layer_range_of(layer, index)].range);
  page->quiet_for = quiet_for(layer, ema, now);
  for (uint32_t h = 0; h < heads; h++) {
    qkv_retier_group *head = groups + (size_t)h * 2 * QKV_PAGE_GROUPS;
    fill_head(layer, entry, lanes + (size_t)2 * h, ema, (uint16_t)h, now, head);
    for (size_t i = 0; i < (size_t)2 * QKV_PAGE_GROUPS; i++) {
      const qkv_part part = i < QKV_PAGE_GROUPS ? QKV_K : QKV_V;
      head[i].tier = tiers[h].tiers[part][i % QKV_PAGE_GROUPS];
      head[i].most = most[h].tiers[part][i % QKV_PAGE_GROUPS];
      head[i].fixed = page->shared || !entry->coder->codec->planes->part_drops(entry->page, (uint16_t)h, part);
    }
  }
  free(tiers);
}

// The lanes of one coder more.
static void add_lanes(const qkv_coder *coder, qkv_retier_snapshot *snapshot) {
  const size_t lanes = (size_t)2 * snapshot->kv_heads;
  qkv_lane *grown = realloc(snapshot->lanes, (snapshot->lane_count + lanes) * sizeof *grown);
  if (grown == NULL) abort();
  snapshot->lanes = grown;
  for (size_t i = 0; i < lanes; i++) {
    coder->codec->planes->lane(coder, (uint16_t)(i / 2), (qkv_part)(i % 2), &snapshot->lanes[snapshot->lane_count++]);
  }
}

void qkv_layer_snapshot(const qkv_layer *layer, uint64_t begin, uint64_t end, bool leave_shared,
                        qkv_retier_snapshot *snapshot) {
  const uint64_t now = layer->clock == NULL ? 0 : qkv_ema_clock_now(layer->clock);
  const qkv_coder *coder = NULL;
  size_t first = qkv_layer_page_at(layer, begin), last = first;
  while (last < layer->page_count && (end == 0 || qkvi_layer_span(layer, last).begin < end)) last++;
  *snapshot = (qkv_retier_snapshot){.kv_heads = layer->config.model->kv_heads,
                                    .counted = layer->clock != NULL,
                                    .first_position = layer->config.first_position,
                                    .length = layer->length};
  snapshot->pages = allocate(last - first, sizeof *snapshot->pages);
  snapshot->groups = allocate((last - first) * snapshot->kv_heads * 2 * QKV_PAGE_GROUPS, sizeof *snapshot->groups);
  for (size_t i = first; i < last; i++) {
    qkv_retier_page *page = &snapshot->pages[snapshot->page_count];
    if (qkvi_layer_image(layer, i) == NULL) continue;
    const qkv_page_entry *entry = qkv_layer_page(layer, i);
    if (entry->coder->codec->planes == NULL) continue;
    if (coder == NULL || entry->coder != coder) {
      coder = entry->coder;
      assert(coder != NULL);
      add_lanes(coder, snapshot);
      snapshot->data_free |= coder->calibration == 0;
    }
    page->lane = (uint32_t)(snapshot->lane_count - (size_t)2 * snapshot->kv_heads);
    fill_page(layer, i, snapshot->lanes + page->lane, now, leave_shared, page,
              snapshot->groups + snapshot->page_count * snapshot->kv_heads * 2 * QKV_PAGE_GROUPS);
    snapshot->page_count++;
    qkvi_layer_yield(layer);
  }
}

bool qkv_layer_lowered(const qkv_layer *layer, uint64_t begin, uint64_t end) {
  for (size_t i = qkv_layer_page_at(layer, begin); i < layer->page_count; i++) {
    if (end != 0 && qkvi_layer_span(layer, i).begin >= end) return false;
    if (qkvi_layer_image(layer, i) == NULL) continue;
    const qkv_page_entry *entry = qkv_layer_page(layer, i);
    if (entry->full != NULL || entry->lost) return true;
  }
  return false;
}

// ---- The exchange ----

static qkv_page_entry *entry_of(const qkv_layer *layer, size_t index, uint64_t serial) {
  if (index >= layer->page_count || qkvi_layer_image(layer, index) == NULL) return NULL;
  qkv_page_entry *entry = qkv_layer_page(layer, index);
  return entry->serial != serial ? NULL : entry;
}

static qkv_page_range *range_with(const qkv_layer *layer, size_t index) {
  return layer->ranges[qkv_layer_range_of(layer, index)].range;
}

// Lowers the tiers that are wanted of a page to those held, and leaves groups alone that can not be cut.
static void limit(const qkv_codec_planes *planes, const void *held, uint32_t heads, const qkv_head_tiers *most,
                  qkv_head_tiers *wanted) {
  for (uint32_t h = 0; h < heads; h++) {
    for (qkv_part part = QKV_K; part <= QKV_V; part++) {
      const bool drops = planes->part_drops(held, (uint16_t)h, part);
      for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
        uint8_t *tier = &wanted[h].tiers[part][g];
        if (!drops || *tier > most[h].tiers[part][g]) *tier = most[h].tiers[part][g];
      }
    }
  }
}

static void cut_image(const qkv_page_entry *entry, const void *held, const qkv_head_tiers *tiers, qkv_cut *cut) {
  void *wide = aligned_alloc(QKV_ARENA_ALIGN, qkv_arena_cost(((const qkv_page_header *)held)->bytes));
  if (wide == NULL) abort();
  cut->bytes = (uint32_t)entry->coder->codec->planes->drop(entry->coder, held, tiers, wide);
  cut->image = qkv_arena_alloc_overhead(cut->arena, cut->bytes);
  memcpy(cut->image, wide, cut->bytes);
  free(wide);
}

bool qkv_layer_cut_early(const qkv_layer *layer, size_t index, uint64_t serial) {
  const qkv_page_entry *entry = entry_of(layer, index, serial);
  const qkv_backing *backing = layer->config.backing;
  if (entry == NULL || backing == NULL || layer->config.keep_full || entry->full != NULL) return false;
  qkv_page_range *range = range_with(layer, index);
  qkvi_range_lock(range);
  const qkv_record_state state = qkvi_layer_record_state(layer, entry);
  qkvi_range_unlock(range);
  return state != QKV_RECORD_DURABLE && backing->health(backing->context, layer->config.session) == QKV_OK;
}

bool qkv_layer_cut(const qkv_layer *layer, size_t index, uint64_t serial, const qkv_head_tiers *tiers, qkv_cut *cut) {
  const qkv_page_entry *entry = entry_of(layer, index, serial);
  const uint32_t heads = layer->config.model->kv_heads;
  const size_t bytes = heads * sizeof *tiers;
  *cut = (qkv_cut){.index = index, .serial = serial, .arena = layer->config.arena};
  if (entry == NULL || entry->coder->codec->planes == NULL) return false;
  const void *held = entry->full != NULL ? entry->full : entry->page;
  qkv_head_tiers *now = allocate((size_t)3 * heads, sizeof *now), *most = now + heads, *wanted = most + heads;
  qkv_layer_tiers(layer, entry, now, most);
  memcpy(wanted, tiers, bytes);
  limit(entry->coder->codec->planes, held, heads, most, wanted);
  const bool differs = memcmp(wanted, now, bytes) != 0;
  const bool all = entry->full != NULL && memcmp(wanted, most, bytes) == 0;
  if (differs && !all) cut_image(entry, held, wanted, cut);
  free(now);
  return differs;
}

// Takes an image out of an entry: the caller gets it and frees it outside of the budget. Where other ranges hold it,
// it is released here.
static void let_image_go(qkv_layer *layer, qkv_cut *cut, const void *image, uint32_t bytes, bool sole,
                         _Atomic uint32_t *holders) {
  cut->image = sole ? (void *)image : NULL;
  cut->bytes = bytes;
  if (sole) {
    free(holders);
  } else {
    (void)qkvi_image_leave(layer->config.arena, image, bytes, holders);
  }
}

// The full page takes its place again.
static void restore(qkv_layer *layer, qkv_page_entry *entry, qkv_cut *cut) {
  const void *left = entry->page;
  const uint32_t left_bytes = entry->bytes;
  _Atomic uint32_t *holders = entry->page_holders;
  const bool sole = qkvi_image_is_sole(holders);
  const qkv_status status = qkv_arena_recount(layer->config.arena, NULL, sole ? left_bytes : 0, 0, NULL);
  assert(status == QKV_OK);
  (void)status;
  entry->page = entry->full;
  entry->page_holders = entry->full_holders;
  entry->bytes = entry->full_bytes;
  entry->full = NULL;
  entry->full_holders = NULL;
  entry->full_bytes = 0;
  let_image_go(layer, cut, left, left_bytes, sole, holders);
}

static qkv_status replace(qkv_layer *layer, qkv_page_entry *entry, qkv_cut *cut, qkv_error *error) {
  const bool keeps = layer->config.keep_full && entry->full == NULL;
  const void *left = entry->page;
  const uint32_t left_bytes = entry->bytes, made_bytes = cut->bytes;
  void *made = cut->image;
  _Atomic uint32_t *holders = entry->page_holders;
  const bool sole = !keeps && qkvi_image_is_sole(holders);
  QKV_TRY(qkv_arena_recount(layer->config.arena, NULL, sole ? left_bytes : 0, made_bytes, error));
  if (keeps) {
    entry->full = left;
    entry->full_bytes = left_bytes;
    entry->full_holders = holders;
    cut->image = NULL;
  } else {
    let_image_go(layer, cut, left, left_bytes, sole, holders);
  }
  entry->lost |= entry->full == NULL;
  entry->page = made;
  entry->page_holders = NULL;
  entry->bytes = made_bytes;
  return QKV_OK;
}

qkv_status qkv_layer_exchange(qkv_layer *layer, qkv_cut *cut, qkv_error *error) {
  if (entry_of(layer, cut->index, cut->serial) == NULL) return QKV_OK;
  qkv_page_range *range = qkvi_layer_own_range(layer, qkv_layer_range_of(layer, cut->index));
  qkv_page_entry *entry = qkv_layer_page(layer, cut->index);
  qkv_status status = QKV_OK;
  qkvi_range_count(range, entry, -1);
  if (cut->image == NULL) {
    restore(layer, entry, cut);
  } else {
    status = replace(layer, entry, cut, error);
  }
  qkvi_range_count(range, entry, 1);
  QKV_TRY(status);
  cut->exchanged = true;
  entry->serial = qkvi_serial_next();
  qkvi_range_forget(range);
  qkv_ema *ema = qkv_layer_ema(layer, cut->index);
  if (ema != NULL) atomic_store_explicit(&ema->changed, qkv_ema_clock_now(layer->clock), memory_order_relaxed);
  return QKV_OK;
}

void qkv_cut_deinit(qkv_cut *cut) {
  qkv_arena_free_overhead(cut->arena, cut->image, cut->bytes);
  cut->image = NULL;
}
