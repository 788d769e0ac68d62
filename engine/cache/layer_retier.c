#include "engine/cache/layer_retier.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/precedence.h"
#include "engine/cache/layer_internal.h"
#include "engine/codec/calibrate.h"
#include "engine/kernel/kernel.h"

static void *room(size_t count, size_t bytes) {
  void *made = calloc(count + 1, bytes);
  if (made == NULL) abort();
  return made;
}

// ---- Tiers ----

void qkv_layer_tiers(const qkv_layer *layer, const qkv_page_entry *entry, qkv_head_tiers *now, qkv_head_tiers *most) {
  assert(((const qkv_page_header *)entry->page)->kv_heads == layer->config.model->kv_heads);
  qkv_page_tiers(entry->page, now);
  qkv_page_tiers(entry->full != NULL ? entry->full : entry->page, most);
}

// ---- The snapshot ----

static double weight_sum(const qkv_transform *transform) {
  double sum = 0;
  if (transform->weights == NULL) return transform->schedule->dim;
  for (size_t c = 0; c < transform->schedule->dim; c++) sum += (double)transform->weights[c];
  return sum;
}

static void fill_lane(const qkv_transform *transform, qkv_retier_lane *lane) {
  const qkv_schedule *schedule = transform->schedule;
  lane->schedule = schedule;
  for (unsigned tier = 0; tier <= QKV_TIER_MAX; tier++) {
    const uint16_t *reach = schedule->reach[tier];
    double error = 0;
    for (unsigned c = 0, depth = QKV_DEPTH_MAX; c < schedule->dim; c++) {
      while (reach[depth] <= c) depth--;  // reach[0] is all
      const double weight = transform->weights == NULL ? 1 : (double)transform->weights[c];
      error += weight * qkv_codebook_distortion[depth];
    }
    lane->errors[tier] = (float)error;
  }
}

// What the weights of a head's groups are made of.
typedef struct head_scale {
  float key_error;   // mean square of what a unit of a key's error adds to a score
  float value_size;  // mean square of a value of gain 1
} head_scale;

static head_scale scale_of(const qkv_layer *layer, const qkv_coder *coder, uint16_t kv_head) {
  const qkv_head_coder *head = &coder->heads[kv_head];
  const double scale = layer->config.model->scale;
  head_scale made = {.value_size = (float)weight_sum(head->transforms[QKV_V])};
  // A calibration's weights have the queries in them. Else they are taken to go every way alike: what is measured,
  // or, until it is, coordinates of variance 1.
  const float measured = layer->clock == NULL ? 0 : qkv_ema_clock_size(layer->clock, kv_head);
  const bool calibrated = head->transforms[QKV_K]->weights != NULL;
  made.key_error = calibrated || measured == 0 ? (float)(scale * scale) : measured;
  return made;
}

static float squared_gain(uint8_t gain) {
  const float value = qkv_gain_value(gain);
  return value * value;
}

// Sums over a group's valid tokens. `floor` [tokens] is added to what is expected of each.
static void weigh_group(const head_scale *scale, const uint8_t *gains_k, const uint8_t *gains_v,
                        const float *attention, const float *floor, size_t tokens, qkv_retier_group groups[2]) {
  float keys = 0, values = 0, peak = 0;
  for (size_t t = 0; t < tokens; t++) {
    const float s = attention[t], weight = (s + floor[t]) * squared_gain(gains_v[t]);
    values += weight;
    keys += weight * (1 - s) * (1 - s) * squared_gain(gains_k[t]);
    peak = s > peak ? s : peak;
  }
  groups[QKV_K].weight = keys * scale->key_error * scale->value_size;
  groups[QKV_V].weight = values;
  groups[QKV_K].peak = groups[QKV_V].peak = peak;
}

// What is expected of each of a page's tokens whatever the average: QKV_RETIER_FLOOR times the even share; nothing
// of those that the sliding window has passed.
static void fill_floor(const qkv_layer *layer, const qkv_page_entry *entry, float floor[QKV_PAGE_TOKENS]) {
  const uint64_t window = qkv_model_window(layer->config.model, layer->config.layer);
  const float share = QKV_RETIER_FLOOR / (float)(layer->length - layer->config.first_position);
  for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) {
    const bool passed = window != 0 && layer->length - (entry->position + t) > window;
    floor[t] = t >= entry->tokens || passed ? 0 : share;
  }
}

// `groups` [2][QKV_PAGE_GROUPS] of one head of a page.
static void fill_head(const qkv_layer *layer, const qkv_page_entry *entry, uint16_t kv_head, uint64_t now,
                      qkv_retier_group *groups) {
  const qkv_schedule *const *schedules = entry->coder->heads[kv_head].schedules;
  const head_scale scale = scale_of(layer, entry->coder, kv_head);
  float attention[QKV_PAGE_TOKENS] = {0}, floor[QKV_PAGE_TOKENS];
  qkv_page_codes codes[2];
  qkv_page_find(entry->page, kv_head, QKV_K, schedules, &codes[QKV_K]);
  qkv_page_find(entry->page, kv_head, QKV_V, schedules, &codes[QKV_V]);
  if (entry->ema != NULL) qkv_ema_read(entry->ema, layer->clock, kv_head, now, attention);
  fill_floor(layer, entry, floor);
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
    const size_t first = g * QKV_GROUP_TOKENS;
    size_t tokens = entry->tokens > first ? entry->tokens - first : 0;
    if (tokens > QKV_GROUP_TOKENS) tokens = QKV_GROUP_TOKENS;
    qkv_retier_group both[2] = {0};
    weigh_group(&scale, codes[QKV_K].gains + first, codes[QKV_V].gains + first, attention + first, floor + first,
                tokens, both);
    groups[g] = both[QKV_K];
    groups[QKV_PAGE_GROUPS + g] = both[QKV_V];
  }
}

static uint64_t quiet_for(const qkv_layer *layer, const qkv_page_entry *entry, uint64_t now) {
  if (entry->ema == NULL) return UINT64_MAX;
  const uint64_t changed = atomic_load_explicit(&entry->ema->changed, memory_order_relaxed);
  const uint64_t since = changed > entry->ema->born ? changed : entry->ema->born;
  assert(layer->clock != NULL);
  return now > since ? now - since : 0;
}

static void fill_page(const qkv_layer *layer, size_t index, uint64_t now, qkv_retier_page *page,
                      qkv_retier_group *groups) {
  const qkv_page_entry *entry = &layer->pages[index];
  const uint32_t heads = layer->config.model->kv_heads;
  qkv_head_tiers *tiers = room((size_t)2 * heads, sizeof *tiers), *most = tiers + heads;
  qkv_layer_tiers(layer, entry, tiers, most);
  page->index = index;
  page->serial = entry->serial;
  page->position = entry->position;
  page->tokens = entry->tokens;
  page->lost = entry->lost;
  page->quiet_for = quiet_for(layer, entry, now);
  for (uint32_t h = 0; h < heads; h++) {
    qkv_retier_group *head = groups + (size_t)h * 2 * QKV_PAGE_GROUPS;
    fill_head(layer, entry, (uint16_t)h, now, head);
    for (size_t i = 0; i < (size_t)2 * QKV_PAGE_GROUPS; i++) {
      const qkv_part part = i < QKV_PAGE_GROUPS ? QKV_K : QKV_V;
      head[i].tier = tiers[h].tiers[part][i % QKV_PAGE_GROUPS];
      head[i].most = most[h].tiers[part][i % QKV_PAGE_GROUPS];
      head[i].fixed = !qkv_page_part_narrows(entry->page, (uint16_t)h, part);
    }
  }
  free(tiers);
}

static float offset_of(const qkv_coder *coder, size_t kv_head, qkv_part part) {
  const int tier = part == QKV_K ? coder->tier_k : coder->tier_v;
  return (float)(coder->heads[kv_head].tiers[part] - tier) / QKV_TIER_BIT;
}

// The lanes of one coder more.
static void add_lanes(const qkv_coder *coder, qkv_retier_snapshot *snapshot) {
  const size_t lanes = (size_t)2 * snapshot->kv_heads;
  qkv_retier_lane *grown = realloc(snapshot->lanes, (snapshot->lane_count + lanes) * sizeof *grown);
  if (grown == NULL) abort();
  snapshot->lanes = grown;
  for (size_t i = 0; i < lanes; i++) {
    qkv_retier_lane *lane = &snapshot->lanes[snapshot->lane_count++];
    fill_lane(coder->heads[i / 2].transforms[i % 2], lane);
    lane->offset = offset_of(coder, i / 2, (qkv_part)(i % 2));
  }
}

void qkv_layer_snapshot(const qkv_layer *layer, uint64_t begin, uint64_t end, qkv_retier_snapshot *snapshot) {
  const uint64_t now = layer->clock == NULL ? 0 : qkv_ema_clock_now(layer->clock);
  const qkv_coder *coder = NULL;
  size_t first = qkv_layer_page_at(layer, begin), last = first;
  while (last < layer->page_count && (end == 0 || layer->pages[last].position < end)) last++;
  *snapshot = (qkv_retier_snapshot){.kv_heads = layer->config.model->kv_heads,
                                    .counted = layer->clock != NULL,
                                    .first_position = layer->config.first_position,
                                    .length = layer->length};
  snapshot->pages = room(last - first, sizeof *snapshot->pages);
  snapshot->groups = room((last - first) * snapshot->kv_heads * 2 * QKV_PAGE_GROUPS, sizeof *snapshot->groups);
  for (size_t i = first; i < last; i++) {
    qkv_retier_page *page = &snapshot->pages[snapshot->page_count];
    if (layer->pages[i].page == NULL) continue;
    if (coder == NULL || layer->pages[i].coder != coder) {
      coder = layer->pages[i].coder;
      assert(coder != NULL);
      add_lanes(coder, snapshot);
      snapshot->data_free |= coder->calibration == 0;
    }
    page->lane = (uint32_t)(snapshot->lane_count - (size_t)2 * snapshot->kv_heads);
    fill_page(layer, i, now, page,
              snapshot->groups + snapshot->page_count * snapshot->kv_heads * 2 * QKV_PAGE_GROUPS);
    snapshot->page_count++;
    qkvi_layer_give_way(layer);
  }
}

bool qkv_layer_lowered(const qkv_layer *layer, uint64_t begin, uint64_t end) {
  for (size_t i = qkv_layer_page_at(layer, begin); i < layer->page_count; i++) {
    const qkv_page_entry *entry = &layer->pages[i];
    if (end != 0 && entry->position >= end) return false;
    if (entry->page != NULL && (entry->full != NULL || entry->lost)) return true;
  }
  return false;
}

// ---- The exchange ----

static qkv_page_entry *entry_of(const qkv_layer *layer, size_t index, uint64_t serial) {
  if (index >= layer->page_count || layer->pages[index].serial != serial || layer->pages[index].page == NULL)
    return NULL;
  return &layer->pages[index];
}

// Brings what is wanted of a page down to what is held, and leaves what can not be cut.
static void limit(const void *held, uint32_t heads, const qkv_head_tiers *most, qkv_head_tiers *wanted) {
  for (uint32_t h = 0; h < heads; h++) {
    for (qkv_part part = QKV_K; part <= QKV_V; part++) {
      const bool narrows = qkv_page_part_narrows(held, (uint16_t)h, part);
      for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
        uint8_t *tier = &wanted[h].tiers[part][g];
        if (!narrows || *tier > most[h].tiers[part][g]) *tier = most[h].tiers[part][g];
      }
    }
  }
}

static void cut_image(const qkv_page_entry *entry, const void *held, const qkv_head_tiers *tiers, qkv_cut *cut) {
  void *wide = aligned_alloc(QKV_ARENA_ALIGN, qkv_arena_cost(((const qkv_page_header *)held)->bytes));
  if (wide == NULL) abort();
  cut->bytes = (uint32_t)entry->coder->codec->narrow(entry->coder, held, tiers, wide);
  cut->image = qkv_arena_alloc_beside(cut->arena, cut->bytes);
  memcpy(cut->image, wide, cut->bytes);
  free(wide);
}

bool qkv_layer_cut_early(const qkv_layer *layer, size_t index, uint64_t serial) {
  const qkv_page_entry *entry = entry_of(layer, index, serial);
  const qkv_backing *backing = layer->config.backing;
  if (entry == NULL || backing == NULL || layer->config.keep_full || entry->full != NULL) return false;
  return qkvi_layer_record_state(layer, entry) != QKV_RECORD_DURABLE &&
         backing->takes(backing->context, layer->config.session);
}

bool qkv_layer_cut(const qkv_layer *layer, size_t index, uint64_t serial, const qkv_head_tiers *tiers, qkv_cut *cut) {
  const qkv_page_entry *entry = entry_of(layer, index, serial);
  const uint32_t heads = layer->config.model->kv_heads;
  const size_t bytes = heads * sizeof *tiers;
  *cut = (qkv_cut){.index = index, .serial = serial, .arena = layer->config.arena};
  if (entry == NULL) return false;
  const void *held = entry->full != NULL ? entry->full : entry->page;
  qkv_head_tiers *now = room((size_t)3 * heads, sizeof *now), *most = now + heads, *wanted = most + heads;
  qkv_layer_tiers(layer, entry, now, most);
  memcpy(wanted, tiers, bytes);
  limit(held, heads, most, wanted);
  const bool differs = memcmp(wanted, now, bytes) != 0;
  const bool all = entry->full != NULL && memcmp(wanted, most, bytes) == 0;
  if (differs && !all) cut_image(entry, held, wanted, cut);
  free(now);
  return differs;
}

// The full page takes its place again.
static void restore(qkv_layer *layer, qkv_page_entry *entry, qkv_cut *cut) {
  const qkv_status status = qkv_arena_recount(layer->config.arena, NULL, entry->bytes, 0, NULL);
  assert(status == QKV_OK);
  (void)status;
  layer->bytes_coded -= qkv_arena_cost(entry->bytes);
  layer->bytes_coded += qkv_arena_cost(entry->full_bytes);
  layer->bytes_beside -= qkv_arena_cost(entry->full_bytes);
  cut->image = (void *)entry->page;
  cut->bytes = entry->bytes;
  entry->page = entry->full;
  entry->bytes = entry->full_bytes;
  entry->full = NULL;
  entry->full_bytes = 0;
}

static qkv_status replace(qkv_layer *layer, qkv_page_entry *entry, qkv_cut *cut, qkv_error *error) {
  const bool keeps = layer->config.keep_full && entry->full == NULL;
  QKV_TRY(qkv_arena_recount(layer->config.arena, NULL, keeps ? 0 : entry->bytes, cut->bytes, error));
  layer->bytes_coded -= qkv_arena_cost(entry->bytes);
  layer->bytes_coded += qkv_arena_cost(cut->bytes);
  void *left = (void *)entry->page;
  const uint32_t left_bytes = entry->bytes;
  if (keeps) {
    layer->bytes_beside += qkv_arena_cost(entry->bytes);
    entry->full = entry->page;
    entry->full_bytes = entry->bytes;
    left = NULL;
  }
  entry->lost |= entry->full == NULL;
  entry->page = cut->image;
  entry->bytes = cut->bytes;
  cut->image = left;
  cut->bytes = left_bytes;
  return QKV_OK;
}

qkv_status qkv_layer_exchange(qkv_layer *layer, qkv_cut *cut, qkv_error *error) {
  qkv_page_entry *entry = entry_of(layer, cut->index, cut->serial);
  if (entry == NULL) return QKV_OK;
  if (cut->image == NULL) {
    restore(layer, entry, cut);
  } else {
    QKV_TRY(replace(layer, entry, cut, error));
  }
  entry->serial = layer->next_serial++;
  if (entry->ema != NULL) {
    atomic_store_explicit(&entry->ema->changed, qkv_ema_clock_now(layer->clock), memory_order_relaxed);
  }
  return QKV_OK;
}

void qkv_cut_deinit(qkv_cut *cut) {
  qkv_arena_free_beside(cut->arena, cut->image, cut->bytes);
  cut->image = NULL;
}
