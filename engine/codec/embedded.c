#include "engine/codec/embedded.h"

#include <assert.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "engine/codec/narrow.h"
#include "engine/codec/pack.h"
#include "engine/codec/trial.h"
#include "engine/kernel/kernel.h"

enum { WIDTHS = QKV_DIM_MAX / QKV_BAND };

// The data-free transform of every valid width.
static qkv_schedule uniform_schedules[WIDTHS];
static qkv_transform uniform_transforms[WIDTHS];

static void fill_uniform(void) {
  for (size_t i = 0; i < WIDTHS; i++) {
    qkv_schedule_uniform(&uniform_schedules[i], (uint16_t)((i + 1) * QKV_BAND));
    uniform_transforms[i].schedule = &uniform_schedules[i];
  }
}

const qkv_transform *qkv_transform_uniform(uint16_t dim) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  (void)pthread_once(&once, fill_uniform);
  assert(dim >= QKV_BAND && dim <= QKV_DIM_MAX && dim % QKV_BAND == 0);
  return &uniform_transforms[dim / QKV_BAND - 1];
}

static void find(const qkv_coder *coder, const void *page, uint16_t kv_head, qkv_part part, qkv_page_codes *codes) {
  qkv_page_find(page, kv_head, part, coder->heads[kv_head].schedules, codes);
}

static uint16_t part_dim(const qkv_coder *coder, qkv_part part) {
  return part == QKV_K ? coder->key_dim : coder->value_dim;
}

// Coordinates that have any bits at a tier.
static size_t coded(const qkv_schedule *schedule, unsigned tier) {
  return schedule->reach[tier][1];
}

// The same at the highest tier of a head's part; no page of the coder has more.
static size_t coded_most(const qkv_coder *coder, uint16_t kv_head, qkv_part part) {
  return coded(coder->heads[kv_head].schedules[part], coder->heads[kv_head].tiers[part]);
}

static bool embedded_bits_valid(double bits) {
  return bits > 0 && bits <= QKV_DEPTH_MAX && bits * QKV_TIER_BIT == floor(bits * QKV_TIER_BIT);
}

static qkv_head_layout layout_of(const qkv_coder *coder, uint16_t kv_head) {
  const qkv_head_coder *head = &coder->heads[kv_head];
  qkv_head_layout layout = {.schedules = {head->schedules[QKV_K], head->schedules[QKV_V]}};
  memset(layout.tiers[QKV_K], head->tiers[QKV_K], sizeof layout.tiers[QKV_K]);
  memset(layout.tiers[QKV_V], head->tiers[QKV_V], sizeof layout.tiers[QKV_V]);
  return layout;
}

static void lay_out(const qkv_coder *coder, qkv_head_layout *heads) {
  for (uint16_t h = 0; h < coder->kv_heads; h++) heads[h] = layout_of(coder, h);
}

static size_t embedded_page_bytes_max(const qkv_coder *coder) {
  qkv_head_layout heads[QKV_KV_HEADS_MAX];
  lay_out(coder, heads);
  return qkv_page_bytes(heads, coder->kv_heads);
}

// ---- Encoding ----

// `tokens` rows that are `stride` floats apart, those of a page's slots from `first` on, to code space: out
// [64][dim], zeros in the other slots. `position` is that of slot 0.
static void turn_rows(const qkv_coder *coder, uint16_t kv_head, qkv_part part, uint64_t position, uint32_t first,
                      uint32_t tokens, const float *rows, size_t stride, float *out) {
  const qkv_transform *transform = coder->heads[kv_head].transforms[part];
  const size_t dim = part_dim(coder, part);
  memset(out, 0, QKV_PAGE_TOKENS * dim * sizeof *out);
  for (size_t t = 0; t < tokens; t++) memcpy(out + (first + t) * dim, rows + t * stride, dim * sizeof *out);
  if (part == QKV_K && coder->frame == QKV_FRAME_ARCHIVE) {
    qkv_phases_inverse(coder->phases, position, QKV_PAGE_TOKENS, dim, out);
  } else if (part == QKV_K && coder->frame == QKV_FRAME_ATTEND) {
    qkv_phases_to_page(coder->phases, transform, position, QKV_PAGE_TOKENS, out);
    memset(out, 0, first * dim * sizeof *out);
    memset(out + (first + tokens) * dim, 0, (QKV_PAGE_TOKENS - first - tokens) * dim * sizeof *out);
  }
  qkv_transform_forward(transform, out + first * dim, tokens, coded_most(coder, kv_head, part));
}

// rows [64][dim] in code space, or what anchors leave of them, to gains and codes.
static void encode_turned(qkv_part part, const qkv_transform *transform, unsigned tier, const float *rows,
                          uint8_t *gains, uint8_t *codes) {
  float errors[QKV_PAGE_TOKENS];
  memset(gains, 0, QKV_PAGE_TOKENS);
  if (tier == 0) return;
  qkv_kernels_get()->encode(part, transform->schedule, tier, transform->weights, rows, gains, codes, errors);
}

// One head's K or V, coded, before it has a place in the page.
typedef struct coded_part {
  uint8_t tier;
  uint8_t anchor, rank;  // as in the directory
  size_t section_bytes;  // of the anchors
  size_t factor_bytes;   // of the low-rank factors
  uint8_t gains[QKV_PAGE_TOKENS];
  uint8_t *codes;    // room for those of the head's tier
  uint8_t *section;  // room for any anchors
  uint8_t *factors;  // and factors
} coded_part;

// What encoding a page needs beside the image.
typedef struct page_work {
  coded_part *parts;  // [kv_heads][2]
  uint8_t *bytes;     // their codes and sections
  float *turned;      // [64][QKV_DIM_MAX]
  float *residual;    // the same
  void *anchor;       // for qkv_anchor_choose
  void *low_rank;     // for qkv_low_rank_choose
} page_work;

static void *room(size_t bytes) {
  void *made = aligned_alloc(64, (bytes + 63) / 64 * 64);
  if (made == NULL) abort();
  return made;
}

static page_work begin_work(const qkv_coder *coder) {
  const size_t most = coder->key_dim > coder->value_dim ? coder->key_dim : coder->value_dim;
  const size_t code_bytes = QKV_PAGE_TOKENS * most, factor_bytes = qkv_low_rank_bytes(QKV_RANK_MAX, most);
  const size_t part_bytes = code_bytes + qkv_anchor_bytes_max(most) + factor_bytes;
  page_work work = {.parts = room(2 * (size_t)coder->kv_heads * sizeof(coded_part)),
                    .bytes = room(2 * (size_t)coder->kv_heads * part_bytes),
                    .turned = room(QKV_PAGE_TOKENS * most * sizeof(float)),
                    .residual = room(QKV_PAGE_TOKENS * most * sizeof(float)),
                    .anchor = room(qkv_anchor_scratch_bytes(most)),
                    .low_rank = room(qkv_low_rank_scratch_bytes(most))};
  for (size_t i = 0; i < 2 * (size_t)coder->kv_heads; i++) {
    work.parts[i].codes = work.bytes + i * part_bytes;
    work.parts[i].factors = work.parts[i].codes + code_bytes;
    work.parts[i].section = work.parts[i].factors + factor_bytes;
  }
  return work;
}

static void end_work(page_work *work) {
  free(work->parts);
  free(work->bytes);
  free(work->turned);
  free(work->residual);
  free(work->anchor);
  free(work->low_rank);
}

// Anchors for turned rows; what they leave comes into work->residual.
static void anchor_part(const qkv_coder *coder, const qkv_head_coder *head, qkv_part part, uint32_t tokens,
                        const page_work *work, coded_part *coded_as) {
  const qkv_anchor_input input = {.schedule = head->schedules[part],
                                  .weights = head->transforms[part]->weights,
                                  .rows = work->turned,
                                  .tokens = tokens};
  qkv_anchor_choice choice;
  qkv_anchor_choose(part, &input, &coder->anchors[part], head->tiers[part], work->anchor, coded_as->section,
                    work->residual, &choice);
  coded_as->tier = choice.tier;
  coded_as->anchor = choice.byte;
  coded_as->section_bytes = choice.bytes;
}

// Low-rank factors for what is left, in place. Not behind a chain, whose rows depend on each other.
static void factor_part(const qkv_coder *coder, const qkv_head_coder *head, qkv_part part, uint32_t tokens,
                        const page_work *work, coded_part *coded_as) {
  if (qkv_anchor_kind_of(coded_as->anchor) == QKV_ANCHOR_CHAIN) return;
  qkv_low_rank_choice choice;
  qkv_low_rank_choose(part, head->schedules[part], head->transforms[part]->weights, tokens, &coder->low_rank,
                      coded_as->tier, work->low_rank, work->residual, coded_as->factors, &choice);
  coded_as->tier = choice.tier;
  coded_as->rank = choice.rank;
  coded_as->factor_bytes = choice.bytes;
}

static void encode_part(const qkv_coder *coder, uint16_t kv_head, qkv_part part, uint64_t position, uint32_t tokens,
                        const float *rows, const page_work *work) {
  const qkv_head_coder *head = &coder->heads[kv_head];
  const size_t dim = part_dim(coder, part);
  coded_part *coded_as = &work->parts[2 * kv_head + part];
  const bool anchored = coder->anchors[part].kind != QKV_ANCHOR_NONE,
             factored = coder->low_rank.mode != QKV_LOW_RANK_OFF;
  turn_rows(coder, kv_head, part, position, 0, tokens, rows + kv_head * dim, coder->kv_heads * dim, work->turned);
  coded_as->tier = head->tiers[part];
  coded_as->anchor = coded_as->rank = 0;
  coded_as->section_bytes = coded_as->factor_bytes = 0;
  if (coded_as->tier > 0 && anchored) anchor_part(coder, head, part, tokens, work, coded_as);
  if (!anchored) memcpy(work->residual, work->turned, QKV_PAGE_TOKENS * dim * sizeof *work->residual);
  if (coded_as->tier > 0 && factored) factor_part(coder, head, part, tokens, work, coded_as);
  encode_turned(part, head->transforms[part], coded_as->tier, work->residual, coded_as->gains, coded_as->codes);
}

// Appends to a head's sections.
static uint8_t *place_section(uint8_t *at, const uint8_t *section, size_t bytes) {
  memcpy(at, section, bytes);
  return at + bytes;
}

static void place_head(const qkv_coder *coder, uint16_t kv_head, const coded_part parts[2], void *image) {
  size_t bytes;
  uint8_t *section = (uint8_t *)qkv_page_sections(image, kv_head, coder->heads[kv_head].schedules, &bytes);
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    qkv_page_codes codes;
    find(coder, image, kv_head, part, &codes);
    memcpy((uint8_t *)codes.gains, parts[part].gains, QKV_PAGE_TOKENS);
    memcpy((uint8_t *)codes.groups[0], parts[part].codes,
           QKV_PAGE_GROUPS * qkv_schedule_group_bytes(codes.schedule, parts[part].tier));
    section = place_section(section, parts[part].section, parts[part].section_bytes);
  }
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    section = place_section(section, parts[part].factors, parts[part].factor_bytes);
  }
}

// Header and directory for what has been coded.
static void format_page(const qkv_coder *coder, uint64_t position, uint32_t tokens, const coded_part *parts,
                        void *image) {
  qkv_head_layout heads[QKV_KV_HEADS_MAX];
  uint16_t features = 0;
  for (uint16_t h = 0; h < coder->kv_heads; h++) {
    heads[h] = layout_of(coder, h);
    for (qkv_part part = QKV_K; part <= QKV_V; part++) {
      const coded_part *coded_as = &parts[2 * h + part];
      memset(heads[h].tiers[part], coded_as->tier, sizeof heads[h].tiers[part]);
      heads[h].anchors[part] = coded_as->anchor;
      heads[h].ranks[part] = coded_as->rank;
      heads[h].section_bytes += coded_as->section_bytes + coded_as->factor_bytes;
      if (coded_as->anchor != 0) features |= QKV_FEATURE_ANCHOR;
      if (coded_as->rank != 0) features |= QKV_FEATURE_LOW_RANK;
    }
  }
  const qkv_page_header header = {.codec = QKV_CODEC_EMBEDDED,
                                  .tier_k = coder->tier_k,
                                  .tier_v = coder->tier_v,
                                  .layer = coder->layer,
                                  .position = position,
                                  .tokens = (uint16_t)tokens,
                                  .kv_heads = coder->kv_heads,
                                  .key_dim = coder->key_dim,
                                  .value_dim = coder->value_dim,
                                  .calibration = coder->calibration,
                                  .features = features,
                                  .frame = (uint8_t)coder->frame};
  qkv_page_format(image, &header, heads);
}

static size_t embedded_encode(const qkv_coder *coder, uint64_t position, uint32_t tokens, const float *k,
                              const float *v, void *image) {
  assert(tokens >= 1 && tokens <= QKV_PAGE_TOKENS);
  page_work work = begin_work(coder);
  for (uint16_t h = 0; h < coder->kv_heads; h++) {
    encode_part(coder, h, QKV_K, position, tokens, k, &work);
    encode_part(coder, h, QKV_V, position, tokens, v, &work);
  }
  format_page(coder, position, tokens, work.parts, image);
  for (uint16_t h = 0; h < coder->kv_heads; h++) place_head(coder, h, &work.parts[2 * h], image);
  end_work(&work);
  qkv_page_seal(image);
  return ((const qkv_page_header *)image)->bytes;
}

// What a head's part has beside its codes.
typedef struct additions {
  bool anchored, factored;
  qkv_anchor anchor;
  qkv_low_rank factors;
} additions;

static additions find_additions(const qkv_coder *coder, const void *page, uint16_t kv_head, qkv_part part) {
  const qkv_page_directory *entry = qkv_page_entry_of(page, kv_head);
  const uint8_t bytes[] = {entry->anchor_k, entry->anchor_v}, ranks[] = {entry->low_rank_k, entry->low_rank_v};
  const uint16_t dims[] = {coder->key_dim, coder->value_dim};
  additions found = {.anchored = bytes[part] != 0, .factored = ranks[part] != 0};
  if (!found.anchored && !found.factored) return found;
  size_t room_left;
  const uint8_t *section = qkv_page_sections(page, kv_head, coder->heads[kv_head].schedules, &room_left);
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

// rows [64][dim], as decoded from the codes, with all that comes on top.
static void add_rows(const additions *added, float *rows) {
  if (added->anchored) qkv_anchor_rows(&added->anchor, rows);
  if (added->factored) qkv_low_rank_rows(&added->factors, rows);
}

// ---- Attention ----

// What of the page ahead is fetched while a head's K, or its V, is worked on: half of the head's block each.
static qkv_ahead ahead_of(const qkv_coder *coder, const qkv_query_block *queries, uint16_t kv_head, qkv_part part) {
  if (queries->ahead == NULL) return (qkv_ahead){0};
  const qkv_page_header *header = queries->ahead;
  const qkv_page_directory *entry = qkv_page_entry_of(header, kv_head);
  const size_t end = kv_head + 1 < coder->kv_heads ? entry[1].offset : header->bytes;
  const size_t middle = entry->offset + (end - entry->offset) / 2, begin = part == QKV_K ? entry->offset : middle;
  return (qkv_ahead){(const uint8_t *)header + begin, (part == QKV_K ? middle : end) - begin};
}

static void prepare_integers(const qkv_coder *coder, qkv_query_block *queries) {
  if (queries->query_bytes == 0) return;
  qkv_kernels_get()->prepare(queries->codes, queries->count, coder->key_dim, queries->query_bytes,
                             &queries->integers);
}

static void embedded_query(const qkv_coder *coder, uint16_t kv_head, qkv_query_block *queries) {
  assert(queries->count <= QKV_QUERY_BLOCK);
  queries->ahead = NULL;
  if (coder->frame != QKV_FRAME_PLAIN) return qkv_phases_start(&queries->walk);
  memcpy(queries->codes, queries->rows, queries->count * coder->key_dim * sizeof *queries->rows);
  qkv_transform_query(coder->heads[kv_head].transforms[QKV_K], queries->codes, queries->count,
                      coded_most(coder, kv_head, QKV_K), queries->shares);
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
static void archive_scores(const qkv_coder *coder, const void *page, uint16_t kv_head, const qkv_query_block *queries,
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

// In the attend frame queries have a form of their own for every page.
static void turn_to_page(const qkv_coder *coder, uint64_t position, uint16_t kv_head, qkv_query_block *queries) {
  const size_t dim = coder->key_dim;
  qkv_phases_turn_queries(coder->phases, &queries->walk, position, queries->count, dim, queries->rows,
                          queries->turned);
  memcpy(queries->codes, queries->turned, queries->count * dim * sizeof *queries->codes);
  qkv_transform_query(coder->heads[kv_head].transforms[QKV_K], queries->codes, queries->count,
                      coded_most(coder, kv_head, QKV_K), queries->shares);
  prepare_integers(coder, queries);
}

static void embedded_scores(const qkv_coder *coder, const void *page, uint16_t kv_head, qkv_query_block *queries,
                            float *scores) {
  const qkv_page_header *header = page;
  const qkv_transform *transform = coder->heads[kv_head].transforms[QKV_K];
  qkv_page_codes codes;
  if (coder->frame == QKV_FRAME_ARCHIVE) return archive_scores(coder, page, kv_head, queries, scores);
  if (coder->frame == QKV_FRAME_ATTEND) turn_to_page(coder, header->position, kv_head, queries);
  find(coder, page, kv_head, QKV_K, &codes);
  if (queries->query_bytes > 0) {
    qkv_kernels_get()->scores_integer(&codes, &queries->integers, &queries->layouts,
                                      ahead_of(coder, queries, kv_head, QKV_K), scores);
  } else {
    qkv_kernels_get()->scores(&codes, queries->codes, queries->count, scores);
  }
  const additions added = find_additions(coder, page, kv_head, QKV_K);
  if (added.anchored) qkv_anchor_scores(&added.anchor, queries->codes, queries->count, scores);
  if (added.factored) qkv_low_rank_scores(&added.factors, queries->codes, queries->count, scores);
  for (size_t i = 0; i < queries->count && transform->mean != NULL; i++) {
    float *row = scores + i * QKV_PAGE_TOKENS;
    for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) row[t] += queries->shares[i];
    if (coder->frame == QKV_FRAME_ATTEND) {
      qkv_phases_add_scores(coder->phases, transform, header->position, queries->turned + i * coder->key_dim, row);
    }
  }
}

static bool embedded_weigh(const qkv_coder *coder, const void *page, uint16_t kv_head, qkv_query_block *queries,
                           const float *scores, const float *peaks, float *totals, float *sums) {
  if (queries->weight_bytes == 0) return false;
  const qkv_page_directory *entry = qkv_page_entry_of(page, kv_head);
  if (entry->anchor_v != 0 || entry->low_rank_v != 0) return false;
  qkv_page_codes codes;
  qkv_integer_weights weights;
  find(coder, page, kv_head, QKV_V, &codes);
  const qkv_kernels *kernels = qkv_kernels_get();
  kernels->weigh_integer(scores, peaks, queries->count, codes.gains, queries->weight_bytes, &weights, totals);
  kernels->accumulate_integer(&codes, &weights, &queries->layouts, ahead_of(coder, queries, kv_head, QKV_V), sums);
  return true;
}

static void embedded_accumulate(const qkv_coder *coder, const void *page, uint16_t kv_head, const float *weights,
                                size_t n, float *sums) {
  assert(n <= QKV_QUERY_BLOCK);
  qkv_page_codes codes;
  float scratch[QKV_QUERY_BLOCK * QKV_PAGE_TOKENS];
  const additions added = find_additions(coder, page, kv_head, QKV_V);
  find(coder, page, kv_head, QKV_V, &codes);
  if (added.factored) qkv_low_rank_accumulate(&added.factors, weights, n, sums);
  if (added.anchored) weights = qkv_anchor_weights(&added.anchor, weights, n, scratch, sums);
  qkv_kernels_get()->accumulate(&codes, weights, n, sums);
}

static void embedded_output(const qkv_coder *coder, uint16_t kv_head, float *sums, const double *totals, size_t n) {
  qkv_transform_output(coder->heads[kv_head].transforms[QKV_V], sums, totals, n, coded_most(coder, kv_head, QKV_V));
}

// ---- Decoding ----

static void embedded_decode(const qkv_coder *coder, const void *page, uint16_t kv_head, qkv_part part,
                            bool before_rope, float *rows) {
  const qkv_page_header *header = page;
  const qkv_transform *transform = coder->heads[kv_head].transforms[part];
  qkv_page_codes codes;
  find(coder, page, kv_head, part, &codes);
  const size_t dim = codes.schedule->dim, tokens = header->tokens;
  float turned[QKV_PAGE_TOKENS * QKV_DIM_MAX];
  const additions added = find_additions(coder, page, kv_head, part);
  qkv_kernels_get()->decode(part, &codes, turned);
  add_rows(&added, turned);
  memcpy(rows, turned, tokens * dim * sizeof *rows);
  qkv_transform_inverse(transform, rows, tokens, coded_most(coder, kv_head, part));
  if (part == QKV_V || coder->phases == NULL) return;
  if (coder->frame == QKV_FRAME_ATTEND) {
    qkv_phases_from_page(coder->phases, transform, header->position, tokens, rows);
  }
  if (coder->frame == QKV_FRAME_ARCHIVE && !before_rope) {
    qkv_phases_forward(coder->phases, header->position, tokens, dim, rows);
  } else if (coder->frame != QKV_FRAME_ARCHIVE && before_rope) {
    qkv_phases_inverse(coder->phases, header->position, tokens, dim, rows);
  }
}

// How many bits of a coordinate's code the lower tier does not have.
static unsigned dropped(const qkv_schedule *schedule, size_t coordinate, unsigned high, unsigned low) {
  unsigned bits = 0;
  for (unsigned depth = 1; depth <= QKV_DEPTH_MAX; depth++) {
    bits += coordinate < schedule->reach[high][depth];
    bits -= coordinate < schedule->reach[low][depth];
  }
  return bits;
}

// Slots [first, end) of one group that are the same in both, one after the other. `theirs` may be at a lower tier:
// its codes are prefixes of those at the top.
static uint32_t matching_slots(qkv_part part, const qkv_page_codes *mine, const qkv_page_codes *theirs, size_t group,
                               uint32_t first, uint32_t end) {
  const qkv_schedule *schedule = theirs->schedule;
  // Gains were fitted anew where planes have been dropped (narrow.h): within an octave.
  const int drift = mine->tiers[group] == theirs->tiers[group] ? 0 : QKV_GAIN_OCTAVE;
  qkvi_codes a[QKV_DIM_MAX], b[QKV_DIM_MAX];
  uint32_t same = end;
  if (theirs->tiers[group] > mine->tiers[group]) return 0;  // no page that encode has written
  for (uint32_t slot = end; slot-- > first;) {
    if (abs(mine->gains[slot] - theirs->gains[slot]) > drift) same = slot;
  }
  qkvi_unpack(part, schedule, mine->tiers[group], mine->groups[group], a);
  qkvi_unpack(part, schedule, theirs->tiers[group], theirs->groups[group], b);
  for (size_t c = 0; c < schedule->dim; c++) {
    const unsigned drop = dropped(schedule, c, mine->tiers[group], theirs->tiers[group]);
    for (uint32_t slot = first; slot < same; slot++) {
      if (a[c][slot % QKV_GROUP_TOKENS] >> drop != b[c][slot % QKV_GROUP_TOKENS]) same = slot;
    }
  }
  return same - first;
}

// Whether the factors were taken off before the rows were coded. A page does not say, its coder does: corrections are
// fitted to what the codes miss.
static bool factors_precede(const qkv_coder *coder, const additions *added) {
  return added->factored && coder->low_rank.mode != QKV_LOW_RANK_CORRECTION;
}

// What the codes of a page's slots begin from, factors left out: out [64][dim] in code space.
static void predict_rows(const additions *added, const qkv_page_codes *codes, qkv_part part, float *out) {
  const size_t dim = codes->schedule->dim;
  memset(out, 0, QKV_PAGE_TOKENS * dim * sizeof *out);
  qkv_anchor_rows(&added->anchor, out);
  if (added->anchor.kind != QKV_ANCHOR_CHAIN) return;
  // A segment begins from its anchor, any other row from the one before.
  float rows[QKV_PAGE_TOKENS * QKV_DIM_MAX];
  qkv_kernels_get()->decode(part, codes, rows);
  qkv_anchor_rows(&added->anchor, rows);
  for (size_t t = 1; t < QKV_PAGE_TOKENS; t++) {
    if ((added->anchor.starts >> t & 1) == 0) memcpy(out + t * dim, rows + (t - 1) * dim, dim * sizeof *out);
  }
}

// Rows [64][dim] in code space less what their codes begin from, in the order of encoding, to the same bits.
static void take_off(const qkv_coder *coder, const additions *added, const qkv_page_codes *codes, qkv_part part,
                     float *rows) {
  const size_t n = QKV_PAGE_TOKENS * (size_t)codes->schedule->dim;
  if (added->anchored) {
    float predicted[QKV_PAGE_TOKENS * QKV_DIM_MAX];
    predict_rows(added, codes, part, predicted);
    for (size_t i = 0; i < n; i++) rows[i] -= predicted[i];
  }
  if (factors_precede(coder, added)) qkv_low_rank_subtract(&added->factors, rows);
}

// The tier that a part was coded with: its budget, less what its sections take. A chain has kept its own, which may
// be lower: it can begin fewer segments than it had paid for.
static unsigned coded_tier(const additions *added, const qkv_page_codes *codes, unsigned budget) {
  const qkv_schedule *schedule = codes->schedule;
  if (added->anchored && added->anchor.kind == QKV_ANCHOR_CHAIN) return codes->tiers[0];
  if (added->anchored) {
    budget =
        qkvi_tier_within(schedule, budget, qkv_anchor_bytes(added->anchor.kind, added->anchor.count, schedule->dim));
  }
  if (added->factored) {
    budget = qkvi_tier_within(schedule, budget, qkv_low_rank_bytes(added->factors.rank, schedule->dim));
  }
  return budget;
}

static uint32_t embedded_rows_match(const qkv_coder *coder, const void *page, uint16_t kv_head, qkv_part part,
                                    uint32_t first, uint32_t tokens, const float *rows) {
  const qkv_page_header *header = page;
  assert(first + tokens <= header->tokens);
  qkv_page_codes theirs;
  find(coder, page, kv_head, part, &theirs);
  const qkv_schedule *schedule = theirs.schedule;
  const additions added = find_additions(coder, page, kv_head, part);
  const unsigned tier = coded_tier(&added, &theirs, coder->heads[kv_head].tiers[part]);
  float turned[QKV_PAGE_TOKENS * QKV_DIM_MAX];
  uint8_t gains[QKV_PAGE_TOKENS], bytes[QKV_PAGE_TOKENS * QKV_DIM_MAX];
  turn_rows(coder, kv_head, part, header->position, first, tokens, rows, schedule->dim, turned);
  take_off(coder, &added, &theirs, part, turned);
  encode_turned(part, coder->heads[kv_head].transforms[part], tier, turned, gains, bytes);
  qkv_page_codes mine = {.gains = gains, .schedule = schedule};
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
    mine.groups[g] = bytes + g * qkv_schedule_group_bytes(schedule, tier);
    mine.tiers[g] = (uint8_t)tier;
  }
  for (uint32_t slot = first; slot < first + tokens;) {
    const size_t group = slot / QKV_GROUP_TOKENS;
    uint32_t end = (uint32_t)(group + 1) * QKV_GROUP_TOKENS;
    if (end > first + tokens) end = first + tokens;
    const uint32_t same = matching_slots(part, &mine, &theirs, group, slot, end);
    if (same < end - slot) return slot + same - first;
    slot = end;
  }
  return tokens;
}

// ---- Validation ----

static const qkv_schedule *const *schedules_of(const void *context, uint16_t kv_head) {
  const qkv_coder *coder = context;
  return coder->heads[kv_head].schedules;
}

static qkv_status validate_kind(const qkv_coder *coder, const qkv_page_header *header, qkv_error *error) {
  if (header->codec != QKV_CODEC_EMBEDDED) {
    return qkv_fail(error, QKV_DATA_LOSS, "page.codec is %u, expected %d", header->codec, QKV_CODEC_EMBEDDED);
  }
  if (header->calibration != coder->calibration) {
    return qkv_fail(error, QKV_DATA_LOSS, "page.calibration is %u, expected %u", header->calibration,
                    coder->calibration);
  }
  if (header->frame != coder->frame) {
    return qkv_fail(error, QKV_DATA_LOSS, "page.frame is %u, expected %u", header->frame, coder->frame);
  }
  return QKV_OK;
}

// A head's block has no more bits than the coder gives, its sections, and nothing else but padding. The directory has
// been found in order.
static qkv_status validate_head(const qkv_coder *coder, const uint8_t *image, const qkv_page_header *header,
                                uint16_t kv_head, qkv_error *error) {
  qkv_page_directory entry;
  uint32_t end = header->bytes;
  const uint8_t *at = image + sizeof *header + kv_head * sizeof entry;
  memcpy(&entry, at, sizeof entry);
  if (kv_head + 1 < header->kv_heads) memcpy(&end, at + sizeof entry, sizeof end);
  size_t begin = entry.offset + (size_t)2 * QKV_PAGE_TOKENS, used = 0;
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    const uint8_t *tiers = part == QKV_K ? entry.tier_k : entry.tier_v, most = coder->heads[kv_head].tiers[part];
    for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
      if (tiers[g] > most) {
        return qkv_fail(error, QKV_DATA_LOSS, "page.directory[%u].tier_%c[%zu] is %u, the coder has %u", kv_head,
                        part == QKV_K ? 'k' : 'v', g, tiers[g], most);
      }
      begin += qkv_schedule_group_bytes(coder->heads[kv_head].schedules[part], tiers[g]);
    }
  }
  for (qkv_part part = QKV_K; part <= QKV_V; part++, begin += used) {
    const uint8_t byte = part == QKV_K ? entry.anchor_k : entry.anchor_v;
    QKV_TRY(
        qkv_anchor_validate(byte, image + begin, end - begin, header->tokens, part_dim(coder, part), &used, error));
  }
  for (qkv_part part = QKV_K; part <= QKV_V; part++, begin += used) {
    const uint8_t rank = part == QKV_K ? entry.low_rank_k : entry.low_rank_v;
    QKV_TRY(
        qkv_low_rank_validate(rank, image + begin, end - begin, header->tokens, part_dim(coder, part), &used, error));
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
                                      .features = QKV_FEATURE_ANCHOR | QKV_FEATURE_LOW_RANK,
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
  static const double bounds[] = {1, 0.372, 0.122, 0.0354, 0.0098, 0.0027, 0.00072, 0.000185, 0.0000445};
  assert(embedded_bits_valid(bits));
  const int whole = (int)bits;
  const double rest = bits - whole;
  return rest == 0 ? bounds[whole] : (1 - rest) * bounds[whole] + rest * bounds[whole + 1];
}

const qkv_codec qkvi_codec_embedded = {
    .id = QKV_CODEC_EMBEDDED,
    .name = "embedded",
    .bits_valid = embedded_bits_valid,
    .page_bytes_max = embedded_page_bytes_max,
    .encode = embedded_encode,
    .query = embedded_query,
    .scores = embedded_scores,
    .accumulate = embedded_accumulate,
    .weigh = embedded_weigh,
    .output = embedded_output,
    .decode = embedded_decode,
    .rows_match = embedded_rows_match,
    .narrow = qkvi_narrow_page,
    .validate = embedded_validate,
    .error_bound = embedded_error_bound,
};
