#include "engine/codec/embedded.h"

#include <assert.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "engine/codec/embedded_internal.h"
#include "engine/codec/narrow.h"
#include "engine/codec/outliers.h"
#include "engine/kernel/kernel.h"

static bool embedded_bits_valid(double bits) {
  return bits > 0 && bits <= QKV_DEPTH_MAX && bits * QKV_TIER_BIT == floor(bits * QKV_TIER_BIT);
}

static void lay_out(const qkv_coder *coder, qkv_head_layout *heads) {
  for (uint16_t h = 0; h < coder->kv_heads; h++) heads[h] = qkvi_layout_of(coder, h);
}

static size_t embedded_page_bytes_max(const qkv_coder *coder) {
  qkv_head_layout heads[QKV_KV_HEADS_MAX];
  lay_out(coder, heads);
  return qkv_page_bytes(heads, coder->kv_heads) +
         qkv_outliers_bytes_max(coder->kv_heads, coder->key_dim, coder->value_dim);
}

qkvi_additions qkvi_additions_find(const qkv_coder *coder, const void *page, uint16_t kv_head, qkv_part part) {
  const qkv_page_directory *entry = qkv_page_entry_of(page, kv_head);
  const uint8_t bytes[] = {entry->anchor_k, entry->anchor_v}, ranks[] = {entry->low_rank_k, entry->low_rank_v};
  const uint16_t dims[] = {coder->key_dim, coder->value_dim};
  qkvi_additions found = {.anchored = bytes[part] != 0, .factored = ranks[part] != 0};
  if (!found.anchored && !found.factored) return found;
  size_t bytes_left;
  const uint8_t *section =
      qkv_page_sections(page, kv_head, qkv_embedded(coder)->heads[kv_head].schedules, &bytes_left);
  for (qkv_part each = QKV_K; each <= QKV_V; each++) {
    qkv_anchor anchor;
    if (bytes[each] != 0) section += qkv_anchor_find(bytes[each], section, dims[each], &anchor);
    if (each == part && found.anchored) found.anchor = anchor;
  }
  for (qkv_part each = QKV_K; each <= QKV_V && each <= part; each++) {
    if (ranks[each] != 0) section += qkv_low_rank_find(ranks[each], section, dims[each], &found.factors);
  }
  return found;
}

// The same with a fast path for none, which is the usual case.
static inline qkvi_additions additions_of(const qkv_coder *coder, const void *page, uint16_t kv_head, qkv_part part) {
  const qkv_page_directory *entry = qkv_page_entry_of(page, kv_head);
  if ((entry->anchor_k | entry->anchor_v | entry->low_rank_k | entry->low_rank_v) == 0) return (qkvi_additions){0};
  return qkvi_additions_find(coder, page, kv_head, part);
}

// Adds anchors and factors to rows [64][dim], as decoded from the codes.
static void add_rows(const qkvi_additions *added, float *rows) {
  if (added->anchored) qkv_anchor_rows(&added->anchor, rows);
  if (added->factored) qkv_low_rank_rows(&added->factors, rows);
}

// ---- Attention ----

// What is fetched while the i-th page of a call is worked on: with K all that comes before it in a head's block, with
// V all that comes behind.
static qkv_ahead ahead_of(const qkv_coder *coder, const qkv_query_block *queries, uint16_t kv_head, size_t i) {
  const qkv_page_header *header = queries->ahead[i].page;
  if (header == NULL) return (qkv_ahead){0};
  const qkv_page_directory *entry = qkv_page_entry_of(header, kv_head);
  const qkv_schedule *keys = qkv_embedded(coder)->heads[kv_head].schedules[QKV_K];
  qkv_outliers_fetch(header);
  size_t begin = entry->offset, middle = begin + (size_t)2 * QKV_PAGE_TOKENS;
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) middle += qkv_schedule_group_bytes(keys, entry->tier_k[g]);
  const bool is_keys = queries->ahead[i].part == QKV_K;
  const size_t last = kv_head + 1 < coder->kv_heads ? entry[1].offset : qkv_page_heads_end(header);
  if (middle > last) middle = last;  // of a page that another calibration codes
  const size_t end = is_keys ? middle : last;
  if (!is_keys) begin = middle;
  return (qkv_ahead){(const uint8_t *)header + begin, end - begin};
}

static void prepare_integers(const qkv_coder *coder, qkv_query_block *queries) {
  qkvi_embedded_queries *own = qkvi_own(queries);
  if (own->query_limit == 0) return;
  own->integers = qkvi_integer_queries_in(&own->buffer);
  qkv_kernels_get()->prepare(own->codes, queries->count, coder->key_dim, own->query_limit, &own->integers);
}

static void choose_bytes(const qkv_head_coder *head, qkv_query_block *queries) {
  qkvi_embedded_queries *own = qkvi_own(queries);
  static const uint8_t weight_bytes[] = {
      [QKV_PRECISION_FP32] = 0, [QKV_PRECISION_INT16] = 2, [QKV_PRECISION_INT8] = 1};
  own->query_limit = queries->precision == QKV_PRECISION_FP32 ? 0 : QKVI_LIMIT_2;
  if (queries->precision != QKV_PRECISION_DEFAULT) {
    own->weight_bytes = weight_bytes[queries->precision];
    return;
  }
  if (head->query_limit > 0) own->query_limit = head->query_limit;
  own->weight_bytes = head->weight_bytes == 1 ? 1 : 2;
}

// Whether a head's queries are turned back to blocks of pages.
static bool walks_blocks(const qkv_coder *coder, uint16_t kv_head) {
  return qkv_embedded(coder)->frame == QKV_FRAME_ATTEND &&
         qkv_transform_by_blocks(qkv_embedded(coder)->heads[kv_head].transforms[QKV_K]);
}

// Queries that get a form of their own for every page.
static void start_walk(const qkv_coder *coder, uint16_t kv_head, qkv_query_block *queries) {
  qkvi_embedded_queries *own = qkvi_own(queries);
  qkv_phases_start(&own->walk);
  if (!walks_blocks(coder, kv_head)) return;
  qkv_walk_start(&own->blocks, qkv_embedded(coder)->phases, qkv_embedded(coder)->heads[kv_head].transforms[QKV_K],
                 queries->rows, queries->count, qkvi_coded_most(coder, kv_head, QKV_K));
}

static void embedded_query(const qkv_coder *coder, uint16_t kv_head, qkv_query_block *queries) {
  qkvi_embedded_queries *own = qkvi_own(queries);
  assert(queries->count <= QKV_QUERY_BLOCK);
  for (size_t i = 0; i < QKV_PAGES_TOGETHER; i++) queries->ahead[i].page = NULL;
  if (queries->precision != QKV_PRECISION_FP32) qkvi_layouts_clear(&own->layouts);
  choose_bytes(&qkv_embedded(coder)->heads[kv_head], queries);
  if (qkv_embedded(coder)->frame != QKV_FRAME_PLAIN) return start_walk(coder, kv_head, queries);
  memcpy(own->codes, queries->rows, queries->count * coder->key_dim * sizeof *queries->rows);
  qkv_transform_query(qkv_embedded(coder)->heads[kv_head].transforms[QKV_K], own->codes, queries->count,
                      qkvi_coded_most(coder, kv_head, QKV_K), own->shares);
  prepare_integers(coder, queries);
}

static float dot(const float *a, const float *b, size_t n) {
  float lanes[QKV_BAND] = {0};
  for (size_t i = 0; i < n; i += QKV_BAND) {
    for (size_t lane = 0; lane < QKV_BAND; lane++) lanes[lane] += a[i + lane] * b[i + lane];
  }
  float sum = 0;
  for (size_t lane = 0; lane < QKV_BAND; lane++) sum += lanes[lane];
  return sum;
}

static void embedded_decode(const qkv_coder *coder, const void *page, uint16_t kv_head, qkv_part part,
                            bool before_rope, float *rows);

// Rows after RoPE have to be made before a query can meet them.
static void score_rows(const qkv_coder *coder, const void *page, uint16_t kv_head, const qkv_query_block *queries,
                       float *scores) {
  const qkv_page_header *header = page;
  const size_t dim = coder->key_dim;
  float rows[QKV_PAGE_TOKENS * QKV_DIM_MAX];
  embedded_decode(coder, page, kv_head, QKV_K, false, rows);
  memset(rows + header->tokens * dim, 0, (QKV_PAGE_TOKENS - header->tokens) * dim * sizeof *rows);
  for (size_t i = 0; i < queries->count; i++) {
    for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) {
      scores[i * QKV_PAGE_TOKENS + t] = dot(queries->rows + i * dim, rows + t * dim, dim);
    }
  }
}

// means [4][dim]: what all rows of a group have before RoPE in addition to what their codes give.
static void group_means(const qkv_transform *transform, const qkvi_additions *added, size_t coordinates,
                        float *means) {
  const size_t dim = transform->schedule->dim, rows = added->anchored ? added->anchor.count : 1;
  if (added->anchored) {
    qkv_anchor_values(&added->anchor, means);
    qkv_transform_inverse(transform, means, rows, coordinates);
  } else if (transform->mean != NULL) {
    memcpy(means, transform->mean, dim * sizeof *means);
  } else {
    memset(means, 0, dim * sizeof *means);
  }
  for (size_t g = rows; g < QKV_PAGE_GROUPS; g++) memcpy(means + g * dim, means, dim * sizeof *means);
}

// Before RoPE, as columns (rebuild.h); false where that has to be done with rows.
static bool score_columns(const qkv_coder *coder, const void *page, uint16_t kv_head, qkv_query_block *queries,
                          float *scores) {
  qkvi_embedded_queries *own = qkvi_own(queries);
  const qkv_head_coder *head = &qkv_embedded(coder)->heads[kv_head];
  const qkvi_additions added = qkvi_additions_find(coder, page, kv_head, QKV_K);
  if (own->query_limit == 0 || head->rebuild == NULL || added.factored) return false;
  if (added.anchored && added.anchor.kind == QKV_ANCHOR_CHAIN) return false;
  if (queries->precision == QKV_PRECISION_INT16 && head->rebuild->columns.parts == 1) return false;
  const uint64_t position = ((const qkv_page_header *)page)->position;
  const size_t dim = coder->key_dim;
  _Alignas(64) float columns[QKV_PAGE_TOKENS * QKV_DIM_MAX];
  float means[QKV_PAGE_GROUPS * QKV_DIM_MAX];
  qkv_page_codes codes;
  qkvi_find(coder, page, kv_head, QKV_K, &codes);
  group_means(head->transforms[QKV_K], &added, qkvi_coded_most(coder, kv_head, QKV_K), means);
  qkv_kernels_get()->scores_integer(&codes, &head->rebuild->columns, &own->layouts,
                                    ahead_of(coder, queries, kv_head, 0), columns);
  qkv_phases_turn_queries(qkv_embedded(coder)->phases, &own->walk, position, queries->count, dim, queries->rows,
                          own->turned);
  qkv_phases_score_columns(qkv_embedded(coder)->phases, position, dim, columns, means, queries->count, own->turned,
                           scores);
  return true;
}

// A page's outliers, whose rows are fetched while its codes are worked on.
static bool find_outliers(const void *page, uint16_t kv_head, qkv_part part, qkv_outliers *found) {
  enum { LINE = 64 };
  if (!qkv_outliers_find(page, kv_head, part, found)) return false;
  for (size_t i = 0; i < found->count * found->dim; i += LINE) __builtin_prefetch(found->rows + i);
  return true;
}

static void archive_scores(const qkv_coder *coder, const void *page, uint16_t kv_head, qkv_query_block *queries,
                           float *scores) {
  if (!score_columns(coder, page, kv_head, queries, scores)) score_rows(coder, page, kv_head, queries, scores);
}

// In the attend frame queries have a form of their own for every page.
static void turn_to_page(const qkv_coder *coder, uint64_t position, uint16_t kv_head, qkv_query_block *queries) {
  qkvi_embedded_queries *own = qkvi_own(queries);
  const size_t dim = coder->key_dim;
  if (walks_blocks(coder, kv_head)) {
    if (own->query_limit > 0) {
      qkv_walk_codes(&own->blocks, position, own->codes);
    } else {
      qkv_walk_exact(&own->blocks, position, queries->rows, own->codes);
    }
    return prepare_integers(coder, queries);
  }
  qkv_phases_turn_queries(qkv_embedded(coder)->phases, &own->walk, position, queries->count, dim, queries->rows,
                          own->turned);
  memcpy(own->codes, own->turned, queries->count * dim * sizeof *own->codes);
  const qkv_transform *transform = qkv_embedded(coder)->heads[kv_head].transforms[QKV_K];
  const size_t coded = qkvi_coded_most(coder, kv_head, QKV_K);
  if (own->query_limit > 0) {
    qkv_transform_turned(transform, own->codes, queries->count, coded, own->shares);
  } else {
    qkv_transform_query(transform, own->codes, queries->count, coded, own->shares);
  }
  prepare_integers(coder, queries);
}

// Of what codes, anchors and factors say.
static void score_codes(const qkv_coder *coder, const void *page, uint16_t kv_head, qkv_query_block *queries,
                        float *scores) {
  qkvi_embedded_queries *own = qkvi_own(queries);
  const qkv_page_header *header = page;
  const qkv_transform *transform = qkv_embedded(coder)->heads[kv_head].transforms[QKV_K];
  qkv_page_codes codes;
  if (qkv_embedded(coder)->frame == QKV_FRAME_ATTEND) turn_to_page(coder, header->position, kv_head, queries);
  qkvi_find(coder, page, kv_head, QKV_K, &codes);
  const qkvi_additions added = additions_of(coder, page, kv_head, QKV_K);
  // A chain sums the scores of codes up, and with them what rounding adds to each.
  if (own->query_limit > 0 && !(added.anchored && added.anchor.kind == QKV_ANCHOR_CHAIN)) {
    qkv_kernels_get()->scores_integer(&codes, &own->integers, &own->layouts, ahead_of(coder, queries, kv_head, 0),
                                      scores);
  } else {
    qkv_kernels_get()->scores(&codes, own->codes, queries->count, scores);
  }
  if (added.anchored) qkv_anchor_scores(&added.anchor, own->codes, queries->count, scores);
  if (added.factored) qkv_low_rank_scores(&added.factors, own->codes, queries->count, scores);
  if (walks_blocks(coder, kv_head)) return qkv_walk_add_scores(&own->blocks, header->position, scores);
  for (size_t i = 0; i < queries->count && transform->mean != NULL; i++) {
    float *row = scores + i * QKV_PAGE_TOKENS;
    for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) row[t] += own->shares[i];
  }
  if (qkv_embedded(coder)->frame == QKV_FRAME_ATTEND) {
    qkv_phases_add_scores(qkv_embedded(coder)->phases, transform, header->position, queries->count, own->turned,
                          scores);
  }
}

static void embedded_scores(const qkv_coder *coder, const void *page, uint16_t kv_head, qkv_query_block *queries,
                            float *scores) {
  qkv_outliers outliers;
  const bool kept = find_outliers(page, kv_head, QKV_K, &outliers);
  if (qkv_embedded(coder)->frame == QKV_FRAME_ARCHIVE) {
    archive_scores(coder, page, kv_head, queries, scores);
  } else {
    score_codes(coder, page, kv_head, queries, scores);
  }
  if (kept) qkv_kernels_get()->score_outliers(&outliers, queries->rows, queries->count, scores);
}

static size_t embedded_weigh(const qkv_coder *coder, const void *const *pages, size_t page_count, uint16_t kv_head,
                             qkv_query_block *queries, const float *scores, const float *peaks, float *totals,
                             float *sums) {
  qkvi_embedded_queries *own = qkvi_own(queries);
  const qkv_kernels *kernels = qkv_kernels_get();
  const size_t n = queries->count;
  qkv_page_codes codes[QKV_PAGES_TOGETHER];
  qkv_integer_weights weights[QKV_PAGES_TOGETHER];
  qkv_outliers outliers[QKV_PAGES_TOGETHER];
  size_t done = 0;
  assert(page_count <= QKV_PAGES_TOGETHER);
  // All weights first: while one page's weights wait for results, those of another are computed.
  for (; own->weight_bytes > 0 && done < page_count; done++) {
    const qkvi_additions added = additions_of(coder, pages[done], kv_head, QKV_V);
    if (added.factored || (added.anchored && added.anchor.kind != QKV_ANCHOR_MEAN)) break;
    qkvi_find(coder, pages[done], kv_head, QKV_V, &codes[done]);
    kernels->weigh_integer(scores + done * n * QKV_PAGE_TOKENS, peaks + done * n, n, codes[done].gains,
                           own->weight_bytes, &weights[done], totals + done * n);
    (void)find_outliers(pages[done], kv_head, QKV_V, &outliers[done]);
  }
  for (size_t i = 0; i < done; i++) {
    kernels->accumulate_integer(&codes[i], &weights[i], &own->layouts, ahead_of(coder, queries, kv_head, i), sums);
    const qkvi_additions added = additions_of(coder, pages[i], kv_head, QKV_V);
    if (added.anchored) qkv_anchor_add_mean(&added.anchor, totals + i * n, n, sums);
    if (outliers[i].count == 0) continue;
    kernels->weigh_outliers(&outliers[i], qkv_embedded(coder)->heads[kv_head].outlier_steps,
                            scores + i * n * QKV_PAGE_TOKENS, peaks + i * n, n, sums);
  }
  return done;
}

static void embedded_accumulate(const qkv_coder *coder, const void *page, uint16_t kv_head, const float *weights,
                                size_t n, float *sums) {
  assert(n <= QKV_QUERY_BLOCK);
  qkv_page_codes codes;
  float scratch[QKV_QUERY_BLOCK * QKV_PAGE_TOKENS];
  const qkvi_additions added = qkvi_additions_find(coder, page, kv_head, QKV_V);
  qkv_outliers outliers;
  if (qkv_outliers_find(page, kv_head, QKV_V, &outliers)) {
    qkv_kernels_get()->weigh_outliers(&outliers, qkv_embedded(coder)->heads[kv_head].outlier_steps, weights, NULL, n,
                                      sums);
  }
  qkvi_find(coder, page, kv_head, QKV_V, &codes);
  if (added.factored) qkv_low_rank_accumulate(&added.factors, weights, n, sums);
  if (added.anchored) weights = qkv_anchor_weights(&added.anchor, weights, n, scratch, sums);
  qkv_kernels_get()->accumulate(&codes, weights, n, sums);
}

static void embedded_output(const qkv_coder *coder, uint16_t kv_head, float *sums, const double *totals, size_t n) {
  // Outliers have coordinates that codes have no bits of.
  qkv_transform_output(qkv_embedded(coder)->heads[kv_head].transforms[QKV_V], sums, totals, n, coder->value_dim);
}

// ---- Decoding ----

// Rows [64][dim] in code space.
static void decode_all(const qkv_coder *coder, const void *page, uint16_t kv_head, qkv_part part,
                       const qkv_outliers *outliers, float *rows) {
  qkv_page_codes codes;
  qkvi_find(coder, page, kv_head, part, &codes);
  const qkvi_additions added = qkvi_additions_find(coder, page, kv_head, part);
  qkv_kernels_get()->decode(part, &codes, rows);
  if (part == QKV_V) qkv_outliers_rows(outliers, qkv_embedded(coder)->heads[kv_head].outlier_steps, rows);
  add_rows(&added, rows);
}

// Keys among the rows that are kept as attended.
static void decode_keys_kept(const qkv_coder *coder, uint64_t position, const qkv_outliers *outliers, uint32_t tokens,
                             bool before_rope, float *rows) {
  if (!before_rope || qkv_embedded(coder)->phases == NULL) return qkv_outliers_rows(outliers, NULL, rows);
  float kept[QKV_PAGE_TOKENS * QKV_DIM_MAX] = {0};
  const size_t dim = coder->key_dim;
  qkv_outliers_rows(outliers, NULL, kept);
  qkv_phases_inverse(qkv_embedded(coder)->phases, position, tokens, dim, kept);
  for (uint64_t left = qkv_outliers_mask(outliers); left != 0; left &= left - 1) {
    const size_t slot = (size_t)__builtin_ctzll(left);
    memcpy(rows + slot * dim, kept + slot * dim, dim * sizeof *rows);
  }
}

static void embedded_decode(const qkv_coder *coder, const void *page, uint16_t kv_head, qkv_part part,
                            bool before_rope, float *rows) {
  const qkv_page_header *header = page;
  const qkv_transform *transform = qkv_embedded(coder)->heads[kv_head].transforms[part];
  const size_t dim = qkvi_coder_dim(coder, part), tokens = header->tokens;
  qkv_outliers outliers;
  const bool kept = qkv_outliers_find(page, kv_head, part, &outliers);
  if (tokens == QKV_PAGE_TOKENS) {
    decode_all(coder, page, kv_head, part, &outliers, rows);
  } else {
    float all[QKV_PAGE_TOKENS * QKV_DIM_MAX];
    decode_all(coder, page, kv_head, part, &outliers, all);
    memcpy(rows, all, tokens * dim * sizeof *rows);
  }
  qkv_transform_inverse(transform, rows, tokens, kept ? dim : qkvi_coded_most(coder, kv_head, part));
  if (part == QKV_V) return;
  if (qkv_embedded(coder)->phases != NULL && qkv_embedded(coder)->frame == QKV_FRAME_ATTEND) {
    qkv_phases_from_page(qkv_embedded(coder)->phases, transform, header->position, tokens, rows);
  }
  if (qkv_embedded(coder)->phases != NULL && qkv_embedded(coder)->frame == QKV_FRAME_ARCHIVE && !before_rope) {
    qkv_phases_forward(qkv_embedded(coder)->phases, header->position, tokens, dim, rows);
  } else if (qkv_embedded(coder)->phases != NULL && qkv_embedded(coder)->frame != QKV_FRAME_ARCHIVE && before_rope) {
    qkv_phases_inverse(qkv_embedded(coder)->phases, header->position, tokens, dim, rows);
  }
  if (kept) decode_keys_kept(coder, header->position, &outliers, header->tokens, before_rope, rows);
}

// ---- Validation ----

static const qkv_schedule *const *schedules_of(const void *context, uint16_t kv_head) {
  const qkv_coder *coder = context;
  return qkv_embedded(coder)->heads[kv_head].schedules;
}

static qkv_status validate_kind(const qkv_coder *coder, const qkv_page_header *header, qkv_error *error) {
  if (header->codec != QKV_CODEC_EMBEDDED) {
    return qkv_fail(error, QKV_DATA_LOSS, "page.codec is %u, expected %d", header->codec, QKV_CODEC_EMBEDDED);
  }
  if (header->calibration != coder->calibration) {
    return qkv_fail(error, QKV_DATA_LOSS, "page.calibration is %u, expected %u", header->calibration,
                    coder->calibration);
  }
  if (header->frame != qkv_embedded(coder)->frame) {
    return qkv_fail(error, QKV_DATA_LOSS, "page.frame is %u, expected %u", header->frame, qkv_embedded(coder)->frame);
  }
  return QKV_OK;
}

// A head's block has no more bits than the coder gives, its sections, and nothing else but padding. The directory has
// been found in order.
static qkv_status validate_head(const qkv_coder *coder, const uint8_t *image, const qkv_page_header *header,
                                uint16_t kv_head, qkv_error *error) {
  qkv_page_directory entry;
  uint32_t end = qkv_page_heads_end(header);
  const uint8_t *at = image + sizeof *header + kv_head * sizeof entry;
  memcpy(&entry, at, sizeof entry);
  if (kv_head + 1 < header->kv_heads) memcpy(&end, at + sizeof entry, sizeof end);
  size_t begin = entry.offset + (size_t)2 * QKV_PAGE_TOKENS, used = 0;
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    const uint8_t *tiers = part == QKV_K ? entry.tier_k : entry.tier_v,
                  most = qkv_embedded(coder)->heads[kv_head].tiers[part];
    for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
      if (tiers[g] > most) {
        return qkv_fail(error, QKV_DATA_LOSS, "page.directory[%u].tier_%c[%zu] is %u, the coder has %u", kv_head,
                        part == QKV_K ? 'k' : 'v', g, tiers[g], most);
      }
      begin += qkv_schedule_group_bytes(qkv_embedded(coder)->heads[kv_head].schedules[part], tiers[g]);
    }
  }
  for (qkv_part part = QKV_K; part <= QKV_V; part++, begin += used) {
    const uint8_t byte = part == QKV_K ? entry.anchor_k : entry.anchor_v;
    QKV_TRY(qkv_anchor_validate(byte, image + begin, end - begin, header->tokens, qkvi_coder_dim(coder, part), &used,
                                error));
  }
  for (qkv_part part = QKV_K; part <= QKV_V; part++, begin += used) {
    const uint8_t rank = part == QKV_K ? entry.low_rank_k : entry.low_rank_v;
    QKV_TRY(qkv_low_rank_validate(rank, image + begin, end - begin, header->tokens, qkvi_coder_dim(coder, part),
                                  &used, error));
  }
  if (end - begin >= 64) {
    return qkv_fail(error, QKV_DATA_LOSS, "page.directory[%u] has %zu bytes that nothing needs", kv_head,
                    end - begin);
  }
  return QKV_OK;
}

static qkv_status embedded_validate(const qkv_coder *coder, const void *image, size_t bytes, qkv_error *error) {
  const qkv_page_expected expected = {.kv_heads = coder->kv_heads,
                                      .key_dim = coder->key_dim,
                                      .value_dim = coder->value_dim,
                                      .features = QKV_FEATURE_ANCHOR | QKV_FEATURE_LOW_RANK | QKV_FEATURE_OUTLIERS,
                                      .schedules_of = schedules_of,
                                      .context = coder};
  QKV_TRY(qkv_page_validate(image, bytes, &expected, error));
  qkv_page_header header;
  memcpy(&header, image, sizeof header);
  QKV_TRY(validate_kind(coder, &header, error));
  for (uint16_t h = 0; h < header.kv_heads; h++) {
    QKV_TRY(validate_head(coder, image, &header, h, error));
  }
  return QKV_OK;
}

// The error of the quantizer on N(0, 1) plus 1 to 3 %. Gaussian rows of any width stay below, and so do rows
// with outliers where the width is a power of two, and whatever tier a page is cut to. (In other widths an
// outlier is spread over its block alone, and the row's gain fits the other blocks badly.)
static double embedded_error_bound(double bits) {
  static const double bounds[] = {1, 0.372, 0.122, 0.0354, 0.0098, 0.0027, 0.00076, 0.000185, 0.0000445};
  assert(embedded_bits_valid(bits));
  const int whole = (int)bits;
  const double rest = bits - whole;
  return rest == 0 ? bounds[whole] : (1 - rest) * bounds[whole] + rest * bounds[whole + 1];
}

const qkv_codec qkvi_codec_embedded = {
    .id = QKV_CODEC_EMBEDDED,
    .name = "embedded",
    .calibrated = true,
    .bits_valid = embedded_bits_valid,
    .bits_text = "multiples of 0.125 up to 8",
    .create = qkvi_embedded_create,
    .cost = qkvi_embedded_cost,
    .destroy = qkvi_embedded_destroy,
    .page_bytes_max = embedded_page_bytes_max,
    .encode = qkvi_embedded_encode,
    .query = embedded_query,
    .scores = embedded_scores,
    .accumulate = embedded_accumulate,
    .weigh = embedded_weigh,
    .output = embedded_output,
    .decode = embedded_decode,
    .rows_match = qkvi_embedded_rows_match,
    .planes = &qkvi_embedded_planes,
    .validate = embedded_validate,
    .error_bound = embedded_error_bound,
};
