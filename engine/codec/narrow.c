#include "engine/codec/narrow.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "engine/codec/anchor.h"
#include "engine/codec/codebook.h"
#include "engine/codec/embedded_internal.h"
#include "engine/codec/low_rank.h"
#include "engine/codec/pack.h"
#include "engine/kernel/kernel.h"

static void page_tiers(const void *page, qkv_head_tiers *heads) {
  const qkv_page_header *header = page;
  for (uint16_t h = 0; h < header->kv_heads; h++) {
    const qkv_page_directory *entry = qkv_page_entry_of(page, h);
    memcpy(heads[h].tiers[QKV_K], entry->tier_k, sizeof entry->tier_k);
    memcpy(heads[h].tiers[QKV_V], entry->tier_v, sizeof entry->tier_v);
  }
}

static bool part_drops(const void *page, uint16_t kv_head, qkv_part part) {
  const qkv_page_directory *entry = qkv_page_entry_of(page, kv_head);
  return qkv_anchor_kind_of(part == QKV_K ? entry->anchor_k : entry->anchor_v) != QKV_ANCHOR_CHAIN;
}

static bool page_is_whole(const qkv_coder *coder, const void *page) {
  for (uint16_t h = 0; h < coder->kv_heads; h++) {
    const qkv_page_directory *entry = qkv_page_entry_of(page, h);
    const uint8_t *tiers = qkv_embedded(coder)->heads[h].tiers;
    for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
      if (entry->tier_k[g] < tiers[QKV_K] || entry->tier_v[g] < tiers[QKV_V]) return false;
    }
  }
  return true;
}

// Bytes of a head's sections without the padding of its block.
static size_t section_bytes(const qkv_coder *coder, const void *page, uint16_t kv_head) {
  const qkv_page_directory *entry = qkv_page_entry_of(page, kv_head);
  size_t capacity, used;
  qkv_anchor found;
  const uint8_t *sections =
      qkv_page_sections(page, kv_head, qkv_embedded(coder)->heads[kv_head].schedules, &capacity);
  used = qkv_anchor_find(entry->anchor_k, sections, coder->key_dim, &found);
  used += qkv_anchor_find(entry->anchor_v, sections + used, coder->value_dim, &found);
  if (entry->low_rank_k != 0) used += qkv_low_rank_bytes(entry->low_rank_k, coder->key_dim);
  if (entry->low_rank_v != 0) used += qkv_low_rank_bytes(entry->low_rank_v, coder->value_dim);
  assert(used <= capacity);
  return used;
}

static void lower(const void *page, uint16_t kv_head, qkv_part part, const uint8_t wanted[QKV_PAGE_GROUPS],
                  uint8_t tiers[QKV_PAGE_GROUPS]) {
  const qkv_page_directory *entry = qkv_page_entry_of(page, kv_head);
  memcpy(tiers, part == QKV_K ? entry->tier_k : entry->tier_v, QKV_PAGE_GROUPS);
  if (!part_drops(page, kv_head, part)) return;
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) tiers[g] = wanted[g] < tiers[g] ? wanted[g] : tiers[g];
}

static qkv_head_layout layout_of(const qkv_coder *coder, const void *page, uint16_t kv_head,
                                 const qkv_head_tiers *wanted) {
  const qkv_page_directory *entry = qkv_page_entry_of(page, kv_head);
  const qkv_head_coder *head = &qkv_embedded(coder)->heads[kv_head];
  qkv_head_layout layout = {.schedules = {head->schedules[QKV_K], head->schedules[QKV_V]},
                            .anchors = {entry->anchor_k, entry->anchor_v},
                            .ranks = {entry->low_rank_k, entry->low_rank_v},
                            .section_bytes = section_bytes(coder, page, kv_head)};
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    lower(page, kv_head, part, wanted->tiers[part], layout.tiers[part]);
  }
  return layout;
}

// sum_i weights[i] * a[i] * b[i]; weights NULL: all 1.
static float dot(const float *weights, const float *a, const float *b, size_t n) {
  float lanes[QKV_BAND] = {0}, sum = 0;
  for (size_t i = 0; i < n; i += QKV_BAND) {
    for (size_t lane = 0; lane < QKV_BAND; lane++) {
      const float product = a[i + lane] * b[i + lane];
      lanes[lane] += weights == NULL ? product : weights[i + lane] * product;
    }
  }
  for (size_t lane = 0; lane < QKV_BAND; lane++) sum += lanes[lane];
  return sum;
}

// The gains of groups that lost planes, fitted to what the rows were with them: least squares, as in encoding.
static void fit_gains(const qkv_transform *transform, qkv_part part, const qkv_page_codes *from,
                      const qkv_page_codes *to) {
  float before[QKV_PAGE_TOKENS * QKV_DIM_MAX], after[QKV_PAGE_TOKENS * QKV_DIM_MAX];
  const size_t dim = from->schedule->dim;
  qkv_kernels_get()->decode(part, from, before);
  qkv_kernels_get()->decode(part, to, after);
  for (size_t slot = 0; slot < QKV_PAGE_TOKENS; slot++) {
    const size_t group = slot / QKV_GROUP_TOKENS;
    const float *row = before + slot * dim, *kept = after + slot * dim;
    if (from->tiers[group] == to->tiers[group] || from->gains[slot] == 0) continue;
    const float along = dot(transform->weights, row, kept, dim), size = dot(transform->weights, kept, kept, dim);
    if (!(along > 0 && size > 0)) continue;
    const float factor = along / size < 0.5f ? 0.5f : along / size > 2 ? 2 : along / size;
    ((uint8_t *)to->gains)[slot] = qkvi_gain_nearest(qkv_gain_value(from->gains[slot]) * factor);
  }
}

static void narrow_part(const qkv_transform *transform, qkv_part part, const qkv_page_codes *from,
                        const qkv_page_codes *to) {
  memcpy((uint8_t *)to->gains, from->gains, QKV_PAGE_TOKENS);
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
    qkvi_narrow(part, from->schedule, from->tiers[g], from->groups[g], to->tiers[g], (uint8_t *)to->groups[g]);
  }
  if (memcmp(from->tiers, to->tiers, sizeof from->tiers) != 0) fit_gains(transform, part, from, to);
}

// Weighted squares of rows [64][dim] less the factors.
static float left_by(const uint8_t *section, uint8_t rank, const float *weights, uint16_t dim, const float *rows,
                     float *scratch) {
  qkv_low_rank found;
  float sum = 0;
  (void)qkv_low_rank_find(rank, section, dim, &found);
  memcpy(scratch, rows, (size_t)QKV_PAGE_TOKENS * dim * sizeof *rows);
  qkv_low_rank_subtract(&found, scratch);
  for (size_t slot = 0; slot < QKV_PAGE_TOKENS; slot++)
    sum += dot(weights, scratch + slot * dim, scratch + slot * dim, dim);
  return sum;
}

// Factors take over what the codes have lost, as far as their rank goes: they are fitted to the rows as they were,
// less the codes that are left. `section` has the old ones; they stay where new ones are no better.
static void refit(const float *weights, qkv_part part, uint32_t tokens, uint8_t rank, const qkv_page_codes *from,
                  const qkv_page_codes *to, uint8_t *section) {
  const uint16_t dim = from->schedule->dim;
  const size_t bytes = qkv_low_rank_bytes(rank, dim), count = (size_t)QKV_PAGE_TOKENS * dim;
  float *rows = malloc(2 * count * sizeof *rows + bytes), *work = rows + count;
  void *scratch = aligned_alloc(64, (qkv_low_rank_scratch_bytes(dim) + 63) / 64 * 64);
  if (rows == NULL || scratch == NULL) abort();
  uint8_t *fitted = (uint8_t *)(work + count);
  qkv_low_rank old;
  (void)qkv_low_rank_find(rank, section, dim, &old);
  qkv_kernels_get()->decode(part, from, rows);
  qkv_kernels_get()->decode(part, to, work);
  qkv_low_rank_rows(&old, rows);
  for (size_t i = 0; i < count; i++) rows[i] -= work[i];
  qkv_low_rank_fit(rows, weights, tokens, dim, rank, scratch, fitted);
  if (left_by(fitted, rank, weights, dim, rows, work) < left_by(section, rank, weights, dim, rows, work))
    memcpy(section, fitted, bytes);
  free(scratch);
  free(rows);
}

static void narrow_head(const qkv_coder *coder, const void *page, uint16_t kv_head, void *image) {
  const qkv_schedule *const *schedules = qkv_embedded(coder)->heads[kv_head].schedules;
  const qkv_page_directory *entry = qkv_page_entry_of(page, kv_head);
  const uint8_t ranks[2] = {entry->low_rank_k, entry->low_rank_v};
  qkv_page_codes from[2], to[2];
  qkv_anchor found;
  size_t capacity;
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    qkv_page_find(page, kv_head, part, schedules, &from[part]);
    qkv_page_find(image, kv_head, part, schedules, &to[part]);
    narrow_part(qkv_embedded(coder)->heads[kv_head].transforms[part], part, &from[part], &to[part]);
  }
  const uint8_t *sections = qkv_page_sections(page, kv_head, schedules, &capacity);
  uint8_t *out = (uint8_t *)qkv_page_sections(image, kv_head, schedules, &capacity);
  memcpy(out, sections, section_bytes(coder, page, kv_head));
  out += qkv_anchor_find(entry->anchor_k, out, coder->key_dim, &found);
  out += qkv_anchor_find(entry->anchor_v, out, coder->value_dim, &found);
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    if (ranks[part] == 0) continue;
    const uint16_t dim = from[part].schedule->dim;
    if (memcmp(from[part].tiers, to[part].tiers, sizeof to[part].tiers) != 0)
      refit(qkv_embedded(coder)->heads[kv_head].transforms[part]->weights, part,
            ((const qkv_page_header *)page)->tokens, ranks[part], &from[part], &to[part], out);
    out += qkv_low_rank_bytes(ranks[part], dim);
  }
}

static size_t drop_planes(const qkv_coder *coder, const void *page, const qkv_head_tiers *heads, void *image) {
  const qkv_page_header *header = page;
  qkv_head_layout layouts[QKV_KV_HEADS_MAX];
  assert((header->features & QKV_FEATURE_SLOTS) == 0 && header->kv_heads == coder->kv_heads);
  for (uint16_t h = 0; h < coder->kv_heads; h++) layouts[h] = layout_of(coder, page, h, &heads[h]);
  qkv_page_format(image, header, layouts);
  for (uint16_t h = 0; h < coder->kv_heads; h++) narrow_head(coder, page, h, image);
  if (header->outliers != 0) {
    const size_t bytes = header->bytes - header->outliers;
    memcpy(qkv_page_add_outliers(image, bytes), (const uint8_t *)page + header->outliers, bytes);
  }
  qkv_page_seal(image);
  return ((const qkv_page_header *)image)->bytes;
}

// ---- What dropping costs ----

static double weight_sum(const qkv_transform *transform) {
  double sum = 0;
  if (transform->weights == NULL) return transform->schedule->dim;
  for (size_t c = 0; c < transform->schedule->dim; c++) sum += (double)transform->weights[c];
  return sum;
}

static void fill_lane(const qkv_coder *coder, uint16_t kv_head, qkv_part part, qkv_lane *lane) {
  const qkv_embedded_coder *own = qkv_embedded(coder);
  const qkv_transform *transform = own->heads[kv_head].transforms[part];
  const qkv_schedule *schedule = transform->schedule;
  const int budget = part == QKV_K ? own->tier_k : own->tier_v;
  *lane = (qkv_lane){.dim = schedule->dim,
                     .group_bytes = schedule->group_bytes,
                     .offset = (float)(own->heads[kv_head].tiers[part] - budget) / QKV_TIER_BIT,
                     .size = (float)weight_sum(transform),
                     .weighed = transform->weights != NULL};
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

static const uint16_t *group_bytes(const qkv_coder *coder, uint16_t kv_head, qkv_part part) {
  return qkv_embedded(coder)->heads[kv_head].schedules[part]->group_bytes;
}

static void row_sizes(const qkv_coder *coder, const void *page, uint16_t kv_head, qkv_part part,
                      float sizes[QKV_PAGE_TOKENS]) {
  qkv_page_codes codes;
  qkvi_find(coder, page, kv_head, part, &codes);
  for (size_t slot = 0; slot < QKV_PAGE_TOKENS; slot++) {
    const float gain = qkv_gain_value(codes.gains[slot]);
    sizes[slot] = gain * gain;
  }
}

const qkv_codec_planes qkvi_embedded_planes = {
    .tiers = page_tiers,
    .part_drops = part_drops,
    .whole = page_is_whole,
    .group_bytes = group_bytes,
    .lane = fill_lane,
    .sizes = row_sizes,
    .drop = drop_planes,
};
