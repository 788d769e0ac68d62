// The embedded codec: rows to pages, and whether rows are those of a page.
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "engine/codec/embedded.h"
#include "engine/codec/embedded_internal.h"
#include "engine/codec/heavy.h"
#include "engine/codec/narrow.h"
#include "engine/codec/outlier_rows.h"
#include "engine/codec/outliers.h"
#include "engine/codec/pack.h"
#include "engine/codec/row.h"
#include "engine/codec/trial.h"
#include "engine/kernel/kernel.h"

// `tokens` rows, those of a page's slots from `first` on, to code space: out [64][dim], zeros in the other slots.
// `position` is that of slot 0. squares [64] of the slots.
static void turn_rows(const qkv_coder *coder, uint16_t kv_head, qkv_part part, uint64_t position, uint32_t first,
                      uint32_t tokens, const qkv_rows *rows, float *out, float *squares) {
  const qkv_transform *transform = qkv_embedded(coder)->heads[kv_head].transforms[part];
  const size_t dim = qkvi_coder_dim(coder, part), end = first + tokens;
  memset(squares, 0, QKV_PAGE_TOKENS * sizeof *squares);
  memset(out, 0, first * dim * sizeof *out);
  memset(out + end * dim, 0, (QKV_PAGE_TOKENS - end) * dim * sizeof *out);
  qkv_kernels_get()->load_rows(rows, tokens, dim, out + first * dim, squares + first);
  if (part == QKV_K && qkv_embedded(coder)->frame == QKV_FRAME_ARCHIVE) {
    qkv_phases_inverse(qkv_embedded(coder)->phases, position, QKV_PAGE_TOKENS, dim, out);
  } else if (part == QKV_K && qkv_embedded(coder)->frame == QKV_FRAME_ATTEND) {
    qkv_phases_to_page(qkv_embedded(coder)->phases, transform, position, QKV_PAGE_TOKENS, out);
    memset(out, 0, first * dim * sizeof *out);
    memset(out + end * dim, 0, (QKV_PAGE_TOKENS - end) * dim * sizeof *out);
  }
  // Coordinates without bits count in a row's error, and outliers need them.
  qkv_transform_forward(transform, out + first * dim, tokens, dim);
}

// rows [64][dim] in code space, or what anchors leave of them, to gains and codes.
static void encode_turned(qkv_part part, const qkv_transform *transform, unsigned tier, const float *rows,
                          uint8_t *gains, uint8_t *codes, float errors[QKV_PAGE_TOKENS]) {
  const size_t dim = transform->schedule->dim, coded = qkvi_coded(transform->schedule, tier);
  const float *weights = transform->weights;
  memset(gains, 0, QKV_PAGE_TOKENS);
  memset(errors, 0, QKV_PAGE_TOKENS * sizeof *errors);
  if (tier > 0) qkv_kernels_get()->encode(part, transform->schedule, tier, weights, rows, gains, codes, errors);
  for (size_t t = 0; coded < dim && t < QKV_PAGE_TOKENS; t++) {
    errors[t] +=
        (float)qkvi_row_error(rows + t * dim + coded, NULL, weights != NULL ? weights + coded : NULL, dim - coded);
  }
}

// One head's K or V, coded, before it has a place in the page.
typedef struct coded_part {
  uint8_t tier;
  uint8_t anchor, rank;  // as in the directory
  size_t section_bytes;  // of the anchors
  size_t factor_bytes;   // of the low-rank factors
  uint8_t gains[QKV_PAGE_TOKENS];
  uint8_t *codes;    // space for those of the head's tier
  uint8_t *section;  // space for any anchors
  uint8_t *factors;  // and factors
} coded_part;

// ---- Predictors ----

// Scratch memory for encoding a head, without the space for what is coded.
typedef struct head_work {
  float *turned;    // [64][QKV_DIM_MAX]
  float *residual;  // the same
  float *whole;     // the same, rows with their outliers
  void *anchor;     // for qkv_anchor_choose
  void *low_rank;   // for qkv_low_rank_choose
} head_work;

static void *allocate(size_t bytes) {
  void *made = aligned_alloc(64, (bytes + 63) / 64 * 64);
  if (made == NULL) abort();
  return made;
}

static size_t widest(const qkv_coder *coder) {
  return coder->key_dim > coder->value_dim ? coder->key_dim : coder->value_dim;
}

// parts [kv_heads][2], and in the same block what they point to.
static coded_part *make_parts(const qkv_coder *coder) {
  const size_t most = widest(coder), count = 2 * (size_t)coder->kv_heads;
  const size_t code_bytes = QKV_PAGE_TOKENS * most, factor_bytes = qkv_low_rank_bytes(QKV_RANK_MAX, most);
  const size_t head_bytes = (count * sizeof(coded_part) + 63) / 64 * 64;
  const size_t part_bytes = (code_bytes + qkv_anchor_bytes_max(most) + factor_bytes + 63) / 64 * 64;
  coded_part *parts = allocate(head_bytes + count * part_bytes);
  for (size_t i = 0; i < count; i++) {
    parts[i].codes = (uint8_t *)parts + head_bytes + i * part_bytes;
    parts[i].factors = parts[i].codes + code_bytes;
    parts[i].section = parts[i].factors + factor_bytes;
  }
  return parts;
}

static head_work begin_work(const qkv_coder *coder) {
  const size_t most = widest(coder);
  return (head_work){.turned = allocate(QKV_PAGE_TOKENS * most * sizeof(float)),
                     .residual = allocate(QKV_PAGE_TOKENS * most * sizeof(float)),
                     .whole = allocate(QKV_PAGE_TOKENS * most * sizeof(float)),
                     .anchor = allocate(qkv_anchor_scratch_bytes(most)),
                     .low_rank = allocate(qkv_low_rank_scratch_bytes(most))};
}

static void end_work(head_work *work) {
  free(work->turned);
  free(work->residual);
  free(work->whole);
  free(work->anchor);
  free(work->low_rank);
}

// Anchors for turned rows; what they leave comes into work->residual and is coded. A chain would go through outliers:
// with any, a page has a mean instead.
static void anchor_part(const qkv_coder *coder, const qkv_head_coder *head, qkv_part part, uint32_t tokens,
                        bool outliers, const head_work *work, coded_part *coded_as) {
  qkv_anchor_options options = qkv_embedded(coder)->anchors[part];
  if (outliers && (options.kind == QKV_ANCHOR_CHAIN || options.kind == QKV_ANCHOR_AUTO))
    options.kind = QKV_ANCHOR_MEAN;
  const qkv_anchor_input input = {.schedule = head->schedules[part],
                                  .weights = head->transforms[part]->weights,
                                  .rows = work->turned,
                                  .tokens = tokens};
  qkv_anchor_choice choice;
  qkv_anchor_choose(part, &input, &options, head->tiers[part], work->anchor, coded_as->section, work->residual,
                    &choice);
  coded_as->tier = choice.tier;
  coded_as->anchor = choice.byte;
  coded_as->section_bytes = choice.bytes;
  memcpy(coded_as->gains, choice.gains, sizeof coded_as->gains);
  memcpy(coded_as->codes, choice.codes,
         QKV_PAGE_GROUPS * qkv_schedule_group_bytes(head->schedules[part], choice.tier));
}

// Low-rank factors for what is left, in place. Not behind a chain, whose rows depend on each other.
static void factor_part(const qkv_coder *coder, const qkv_head_coder *head, qkv_part part, uint32_t tokens,
                        const head_work *work, coded_part *coded_as) {
  if (qkv_anchor_kind_of(coded_as->anchor) == QKV_ANCHOR_CHAIN) return;
  qkv_low_rank_choice choice;
  qkv_low_rank_choose(part, head->schedules[part], head->transforms[part]->weights, tokens,
                      &qkv_embedded(coder)->low_rank, coded_as->tier, work->low_rank, work->residual,
                      coded_as->factors, &choice);
  coded_as->tier = choice.tier;
  coded_as->rank = choice.rank;
  coded_as->factor_bytes = choice.bytes;
}

// A page's rows.
typedef struct page_rows {
  uint64_t position;
  uint32_t tokens;
  qkv_dtype dtype;
  const void *parts[2];  // [tokens][kv_heads][dim]
} page_rows;

static qkv_rows source_of(const qkv_coder *coder, const page_rows *rows, uint16_t kv_head, qkv_part part) {
  const size_t bytes = qkvi_coder_dim(coder, part) * qkv_dtype_size(rows->dtype);
  return (qkv_rows){.dtype = rows->dtype,
                    .data = (const uint8_t *)rows->parts[part] + kv_head * bytes,
                    .stride = coder->kv_heads * bytes,
                    .bytes = bytes};
}

// Those that come after a part's, as far as there are any.
static const qkv_rows *next_of(const qkv_coder *coder, const page_rows *rows, uint16_t kv_head, qkv_part part,
                               qkv_rows *next_rows) {
  if (part == QKV_V && kv_head + 1 == coder->kv_heads) return NULL;
  *next_rows =
      part == QKV_K ? source_of(coder, rows, kv_head, QKV_V) : source_of(coder, rows, (uint16_t)(kv_head + 1), QKV_K);
  return next_rows;
}

static uint64_t heavy_of(const qkv_coder *coder, uint16_t kv_head, const page_rows *rows) {
  const qkv_rows keys = source_of(coder, rows, kv_head, QKV_K);
  return qkv_heavy_slots(coder, kv_head, rows->position, rows->tokens, rows->dtype, keys.data, keys.stride);
}

static qkvi_part_rows part_rows_of(const qkv_coder *coder, uint16_t kv_head, qkv_part part, const page_rows *rows,
                                   uint64_t heavy, const qkv_rows *source, const float *turned, const uint8_t *gains,
                                   const uint8_t *codes) {
  return (qkvi_part_rows){.head = &qkv_embedded(coder)->heads[kv_head],
                          .part = part,
                          .heavy = heavy,
                          .position = rows->position,
                          .tokens = rows->tokens,
                          .source = source,
                          .turned = turned,
                          .gains = gains,
                          .codes = codes};
}

// One head's K or V to code space.
static void turn_part(const qkv_coder *coder, uint16_t kv_head, qkv_part part, const page_rows *rows, float *turned,
                      float *squares) {
  qkv_rows source = source_of(coder, rows, kv_head, part), next_rows;
  source.next = next_of(coder, rows, kv_head, part, &next_rows);
  turn_rows(coder, kv_head, part, rows->position, 0, rows->tokens, &source, turned, squares);
}

// The rows of work->turned that are outliers, by their errors without a predictor. They are leveled there, and are in
// work->whole as they were.
static qkvi_outlier_slots part_outliers(const qkv_coder *coder, const qkvi_part_rows *rows, const head_work *work,
                                        qkvi_row_measures *measures, coded_part *coded_as) {
  const size_t dim = qkvi_coder_dim(coder, rows->part);
  encode_turned(rows->part, rows->head->transforms[rows->part], coded_as->tier, work->turned, coded_as->gains,
                coded_as->codes, measures->errors);
  const qkvi_outlier_slots found = qkvi_outliers_choose(coder, rows, measures);
  if (found.all == 0) return found;
  memcpy(work->whole, work->turned, QKV_PAGE_TOKENS * dim * sizeof *work->whole);
  qkvi_outliers_level(found.all, rows->tokens, dim, work->turned);
  return found;
}

// Coordinates without bits become 0 in rows [64][dim]: readers of codes, anchors and factors ignore them, so
// predictors must not fit them.
static void clear_uncoded(const qkv_schedule *schedule, unsigned tier, float *rows) {
  const size_t dim = schedule->dim, coded = qkvi_coded(schedule, tier);
  for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) memset(rows + t * dim + coded, 0, (dim - coded) * sizeof *rows);
}

// What anchors leave of the outlier rows in work->whole, in place.
static void subtract_anchor(const coded_part *coded_as, uint64_t slots, size_t dim, const head_work *work) {
  qkv_anchor anchor;
  (void)qkv_anchor_find(coded_as->anchor, coded_as->section, (uint16_t)dim, &anchor);
  memset(work->turned, 0, QKV_PAGE_TOKENS * dim * sizeof *work->turned);
  qkv_anchor_rows(&anchor, work->turned);
  for (; slots != 0; slots &= slots - 1) {
    const size_t first = (size_t)__builtin_ctzll(slots) * dim;
    for (size_t c = 0; c < dim; c++) work->whole[first + c] -= work->turned[first + c];
  }
}

static void encode_part(const qkv_coder *coder, uint16_t kv_head, qkv_part part, const page_rows *rows,
                        uint64_t heavy, const head_work *work, coded_part *coded_as, qkv_outlier_set *set) {
  const qkv_head_coder *head = &qkv_embedded(coder)->heads[kv_head];
  const qkv_rows source = source_of(coder, rows, kv_head, part);
  const size_t dim = qkvi_coder_dim(coder, part);
  const bool anchored = qkv_embedded(coder)->anchors[part].kind != QKV_ANCHOR_NONE,
             factored = qkv_embedded(coder)->low_rank.mode != QKV_LOW_RANK_OFF;
  qkvi_row_measures measures;
  turn_part(coder, kv_head, part, rows, work->turned, measures.squares);
  coded_as->tier = head->tiers[part];
  coded_as->anchor = coded_as->rank = 0;
  coded_as->section_bytes = coded_as->factor_bytes = 0;
  qkvi_part_rows own =
      part_rows_of(coder, kv_head, part, rows, heavy, &source, work->turned, coded_as->gains, coded_as->codes);
  const qkvi_outlier_slots found = part_outliers(coder, &own, work, &measures, coded_as);
  clear_uncoded(head->schedules[part], head->tiers[part], work->turned);
  if (coded_as->tier > 0 && anchored) anchor_part(coder, head, part, rows->tokens, found.all != 0, work, coded_as);
  if (!anchored) memcpy(work->residual, work->turned, QKV_PAGE_TOKENS * dim * sizeof *work->residual);
  if (coded_as->tier > 0 && factored && found.all == 0) factor_part(coder, head, part, rows->tokens, work, coded_as);
  if (!anchored || coded_as->tier == 0 || coded_as->rank != 0) {
    encode_turned(part, head->transforms[part], coded_as->tier, work->residual, coded_as->gains, coded_as->codes,
                  measures.errors);
  }
  if (coded_as->anchor != 0 && found.all != 0) subtract_anchor(coded_as, found.all, dim, work);
  own.turned = work->whole;
  qkvi_outliers_store(&own, &found, &measures, coded_as->gains, set);
}

// Appends to a head's sections.
static uint8_t *place_section(uint8_t *at, const uint8_t *section, size_t bytes) {
  memcpy(at, section, bytes);
  return at + bytes;
}

static void place_head(const qkv_coder *coder, uint16_t kv_head, const coded_part parts[2], void *image) {
  size_t bytes;
  uint8_t *section =
      (uint8_t *)qkv_page_sections(image, kv_head, qkv_embedded(coder)->heads[kv_head].schedules, &bytes);
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    qkv_page_codes codes;
    qkvi_find(coder, image, kv_head, part, &codes);
    memcpy((uint8_t *)codes.gains, parts[part].gains, QKV_PAGE_TOKENS);
    memcpy((uint8_t *)codes.groups[0], parts[part].codes,
           QKV_PAGE_GROUPS * qkv_schedule_group_bytes(codes.schedule, parts[part].tier));
    section = place_section(section, parts[part].section, parts[part].section_bytes);
  }
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    section = place_section(section, parts[part].factors, parts[part].factor_bytes);
  }
}

// Header and directory for what has been coded; `parts` NULL: rows with codes alone, at their heads' tiers.
static void format_page(const qkv_coder *coder, uint64_t position, uint32_t tokens, const coded_part *parts,
                        void *image) {
  qkv_head_layout heads[QKV_KV_HEADS_MAX];
  uint16_t features = 0;
  for (uint16_t h = 0; h < coder->kv_heads; h++) {
    heads[h] = qkvi_layout_of(coder, h);
    for (qkv_part part = QKV_K; parts != NULL && part <= QKV_V; part++) {
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
                                  .tier_k = qkv_embedded(coder)->tier_k,
                                  .tier_v = qkv_embedded(coder)->tier_v,
                                  .layer = coder->layer,
                                  .position = position,
                                  .tokens = (uint16_t)tokens,
                                  .kv_heads = coder->kv_heads,
                                  .key_dim = coder->key_dim,
                                  .value_dim = coder->value_dim,
                                  .calibration = coder->calibration,
                                  .features = features,
                                  .frame = (uint8_t)qkv_embedded(coder)->frame};
  qkv_page_format(image, &header, heads);
}

// Writes one head's K or V to its place in the page.
static void encode_part_plainly(const qkv_coder *coder, uint16_t kv_head, qkv_part part, const page_rows *rows,
                                uint64_t heavy, uint8_t *gains, uint8_t *codes, qkv_outlier_set *set) {
  const qkv_head_coder *head = &qkv_embedded(coder)->heads[kv_head];
  const qkv_transform *transform = head->transforms[part];
  const uint8_t tier = head->tiers[part];
  const bool as_it_is = part == QKV_V || qkv_embedded(coder)->frame == QKV_FRAME_PLAIN;
  const qkv_rows source = source_of(coder, rows, kv_head, part);
  qkvi_row_measures measures;
  if (tier > 0 && as_it_is && transform->analysis == NULL) {
    qkv_rows fetching = source, next_rows;
    fetching.next = next_of(coder, rows, kv_head, part, &next_rows);
    qkv_kernels_get()->encode_rows(part, transform->schedule, tier, &fetching, rows->tokens, gains, codes,
                                   measures.errors, measures.squares);
    const qkvi_part_rows own = part_rows_of(coder, kv_head, part, rows, heavy, &source, NULL, gains, codes);
    const qkvi_outlier_slots found = qkvi_outliers_choose(coder, &own, &measures);
    return qkvi_outliers_store(&own, &found, &measures, gains, set);
  }
  _Alignas(64) float turned[QKV_PAGE_TOKENS * QKV_DIM_MAX];
  turn_part(coder, kv_head, part, rows, turned, measures.squares);
  encode_turned(part, transform, tier, turned, gains, codes, measures.errors);
  const qkvi_part_rows own = part_rows_of(coder, kv_head, part, rows, heavy, &source, turned, gains, codes);
  const qkvi_outlier_slots found = qkvi_outliers_choose(coder, &own, &measures);
  qkvi_outliers_store(&own, &found, &measures, gains, set);
}

// A page whose heads are encoded, by several threads.
typedef struct page_job {
  const qkv_coder *coder;
  const page_rows *rows;
  void *image;            // of rows with codes alone
  coded_part *parts;      // [kv_heads][2], of others
  qkv_outlier_set *sets;  // [kv_heads][2]
} page_job;

static void encode_head_plainly(void *context, size_t index, size_t worker) {
  const page_job *job = context;
  (void)worker;
  const uint64_t heavy = heavy_of(job->coder, (uint16_t)index, job->rows);
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    qkv_page_codes codes;
    qkvi_find(job->coder, job->image, (uint16_t)index, part, &codes);
    encode_part_plainly(job->coder, (uint16_t)index, part, job->rows, heavy, (uint8_t *)codes.gains,
                        (uint8_t *)codes.groups[0], &job->sets[2 * index + part]);
  }
}

static void encode_head(void *context, size_t index, size_t worker) {
  const page_job *job = context;
  (void)worker;
  head_work work = begin_work(job->coder);
  const uint64_t heavy = heavy_of(job->coder, (uint16_t)index, job->rows);
  for (qkv_part part = QKV_K; part <= QKV_V; part++)
    encode_part(job->coder, (uint16_t)index, part, job->rows, heavy, &work, &job->parts[2 * index + part],
                &job->sets[2 * index + part]);
  end_work(&work);
}

static void each_head(page_job *job, qkv_pool *pool, qkv_loop_fn *run) {
  if (pool != NULL) return qkv_pool_loop(pool, job->coder->kv_heads, run, job);
  for (size_t h = 0; h < job->coder->kv_heads; h++) run(job, h, 0);
}

// sets [kv_heads][2], and in the same block what they point to.
static qkv_outlier_set *make_sets(const qkv_coder *coder) {
  const size_t count = 2 * (size_t)coder->kv_heads, bytes = QKV_OUTLIERS_MAX * widest(coder) * sizeof(int16_t);
  qkv_outlier_set *sets = allocate(count * (sizeof *sets + bytes));
  for (size_t i = 0; i < count; i++) {
    sets[i].count = 0;
    sets[i].rows = (uint8_t *)(sets + count) + i * bytes;
  }
  return sets;
}

static void add_outliers(const qkv_coder *coder, const qkv_outlier_set *sets, void *image) {
  const size_t bytes = qkv_outliers_bytes(sets, coder->kv_heads, coder->key_dim, coder->value_dim);
  if (bytes == 0) return;
  qkv_outliers_write(sets, coder->kv_heads, coder->key_dim, coder->value_dim, qkv_page_add_outliers(image, bytes));
}

// Rows with codes alone are written to their places in the page at once.
static void encode_plainly(const qkv_coder *coder, const page_rows *rows, qkv_pool *pool, qkv_outlier_set *sets,
                           void *image) {
  format_page(coder, rows->position, rows->tokens, NULL, image);
  each_head(&(page_job){.coder = coder, .rows = rows, .image = image, .sets = sets}, pool, encode_head_plainly);
}

static void encode_with_additions(const qkv_coder *coder, const page_rows *rows, qkv_pool *pool,
                                  qkv_outlier_set *sets, void *image) {
  coded_part *parts = make_parts(coder);
  each_head(&(page_job){.coder = coder, .rows = rows, .parts = parts, .sets = sets}, pool, encode_head);
  format_page(coder, rows->position, rows->tokens, parts, image);
  for (uint16_t h = 0; h < coder->kv_heads; h++) place_head(coder, h, &parts[2 * (size_t)h], image);
  free(parts);
}

size_t qkvi_embedded_encode(const qkv_coder *coder, uint64_t position, uint32_t tokens, qkv_dtype dtype,
                            const void *k, const void *v, qkv_pool *pool, void *image) {
  assert(tokens >= 1 && tokens <= QKV_PAGE_TOKENS);
  const page_rows rows = {position, tokens, dtype, {k, v}};
  qkv_outlier_set *sets = make_sets(coder);
  if (qkv_embedded(coder)->anchors[QKV_K].kind == QKV_ANCHOR_NONE &&
      qkv_embedded(coder)->anchors[QKV_V].kind == QKV_ANCHOR_NONE &&
      qkv_embedded(coder)->low_rank.mode == QKV_LOW_RANK_OFF) {
    encode_plainly(coder, &rows, pool, sets, image);
  } else {
    encode_with_additions(coder, &rows, pool, sets, image);
  }
  add_outliers(coder, sets, image);
  free(sets);
  qkv_page_seal(image);
  return ((const qkv_page_header *)image)->bytes;
}

// ---- Pages whose rows a device has coded ----

// One head's K or V, whose rows are turned when they are asked for.
typedef struct lazy_part {
  const qkv_coder *coder;
  uint16_t kv_head;
  qkv_part part;
  const page_rows *rows;
  const qkv_coded_rows *coded_as;
  float *turned, *scratch;  // [64][dim]; `turned` NULL: outliers are turned where they are looked at
  uint64_t brought;         // slots, a mask
} lazy_part;

// In a frame a row takes as long as all of a page.
static void bring_row(void *context, size_t slot) {
  lazy_part *lazy = context;
  float squares[QKV_PAGE_TOKENS];
  if ((lazy->brought >> slot & 1) != 0) return;
  const bool alone = lazy->part == QKV_V || qkv_embedded(lazy->coder)->frame == QKV_FRAME_PLAIN;
  const size_t dim = qkvi_coder_dim(lazy->coder, lazy->part), first = alone ? slot : 0;
  const uint32_t tokens = alone ? 1 : lazy->rows->tokens;
  lazy->brought |= alone ? (uint64_t)1 << slot : UINT64_MAX;
  qkv_rows rows = source_of(lazy->coder, lazy->rows, lazy->kv_head, lazy->part);
  rows.data += first * rows.stride;
  turn_rows(lazy->coder, lazy->kv_head, lazy->part, lazy->rows->position, (uint32_t)first, tokens, &rows,
            lazy->scratch, squares);
  memcpy(lazy->turned + first * dim, lazy->scratch + first * dim, tokens * dim * sizeof *lazy->turned);
}

static void place_part(lazy_part *lazy, uint64_t heavy, void *image, qkv_outlier_set *set) {
  const qkv_coded_rows *coded_as = lazy->coded_as;
  const qkv_head_coder *head = &qkv_embedded(lazy->coder)->heads[lazy->kv_head];
  const qkv_rows source = source_of(lazy->coder, lazy->rows, lazy->kv_head, lazy->part);
  qkvi_row_measures measures;
  qkv_page_codes codes;
  qkvi_find(lazy->coder, image, lazy->kv_head, lazy->part, &codes);
  uint8_t *gains = (uint8_t *)codes.gains, *groups = (uint8_t *)codes.groups[0];
  memcpy(gains, coded_as->gains, QKV_PAGE_TOKENS);
  memcpy(groups, coded_as->codes,
         QKV_PAGE_GROUPS * qkv_schedule_group_bytes(codes.schedule, head->tiers[lazy->part]));
  memcpy(measures.errors, coded_as->errors, sizeof measures.errors);
  memcpy(measures.squares, coded_as->squares, sizeof measures.squares);
  qkvi_part_rows own =
      part_rows_of(lazy->coder, lazy->kv_head, lazy->part, lazy->rows, heavy, &source, lazy->turned, gains, groups);
  own.bring = lazy->turned != NULL ? bring_row : NULL;
  own.bring_context = lazy;
  const qkvi_outlier_slots found = qkvi_outliers_choose(lazy->coder, &own, &measures);
  qkvi_outliers_store(&own, &found, &measures, gains, set);
}

static void place_coded_head(const qkv_coder *coder, uint16_t kv_head, const page_rows *rows,
                             const qkv_device_page *page, float *space, void *image, qkv_outlier_set *sets) {
  const qkv_embedded_coder *own = qkv_embedded(coder);
  const uint64_t heavy = heavy_of(coder, kv_head, rows);
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    const bool as_it_is =
        (part == QKV_V || own->frame == QKV_FRAME_PLAIN) && own->heads[kv_head].transforms[part]->analysis == NULL;
    lazy_part lazy = {.coder = coder,
                      .kv_head = kv_head,
                      .part = part,
                      .rows = rows,
                      .coded_as = &page->parts[2 * kv_head + part],
                      .turned = as_it_is ? NULL : space,
                      .scratch = space + QKV_PAGE_TOKENS * widest(coder)};
    place_part(&lazy, heavy, image, &sets[2 * kv_head + part]);
  }
}

bool qkv_embedded_takes_coded(const qkv_coder *coder) {
  if (coder->codec != &qkvi_codec_embedded) return false;
  const qkv_embedded_coder *own = qkv_embedded(coder);
  for (uint16_t h = 0; h < coder->kv_heads; h++) {
    if (own->heads[h].tiers[QKV_K] == 0 || own->heads[h].tiers[QKV_V] == 0) return false;
  }
  return own->anchors[QKV_K].kind == QKV_ANCHOR_NONE && own->anchors[QKV_V].kind == QKV_ANCHOR_NONE &&
         own->low_rank.mode == QKV_LOW_RANK_OFF;
}

size_t qkv_embedded_place_coded(const qkv_coder *coder, const qkv_device_page *page, void *image) {
  assert(qkv_embedded_takes_coded(coder) && page->tokens >= 1 && page->tokens <= QKV_PAGE_TOKENS);
  const page_rows rows = {page->position, page->tokens, page->dtype, {page->rows[QKV_K], page->rows[QKV_V]}};
  qkv_outlier_set *sets = make_sets(coder);
  float *space = allocate(2 * QKV_PAGE_TOKENS * widest(coder) * sizeof *space);
  format_page(coder, rows.position, rows.tokens, NULL, image);
  for (uint16_t h = 0; h < coder->kv_heads; h++) place_coded_head(coder, h, &rows, page, space, image, sets);
  add_outliers(coder, sets, image);
  free(space);
  free(sets);
  qkv_page_seal(image);
  return ((const qkv_page_header *)image)->bytes;
}

// ---- Comparing ----

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
// Slots in `passed` count as the same.
static uint32_t matching_slots(qkv_part part, const qkv_page_codes *mine, const qkv_page_codes *theirs, size_t group,
                               uint64_t passed, uint32_t first, uint32_t end) {
  const qkv_schedule *schedule = theirs->schedule;
  // Gains were fitted anew where planes have been dropped (narrow.h): within an octave.
  const int drift = mine->tiers[group] == theirs->tiers[group] ? 0 : QKV_GAIN_OCTAVE;
  qkvi_codes a[QKV_DIM_MAX], b[QKV_DIM_MAX];
  uint32_t same = end;
  if (theirs->tiers[group] > mine->tiers[group]) return 0;  // no page that encode has written
  for (uint32_t slot = end; slot-- > first;) {
    if ((passed >> slot & 1) == 0 && abs(mine->gains[slot] - theirs->gains[slot]) > drift) same = slot;
  }
  qkvi_unpack(part, schedule, mine->tiers[group], mine->groups[group], a);
  qkvi_unpack(part, schedule, theirs->tiers[group], theirs->groups[group], b);
  for (size_t c = 0; c < schedule->dim; c++) {
    const unsigned drop = dropped(schedule, c, mine->tiers[group], theirs->tiers[group]);
    for (uint32_t slot = first; slot < same; slot++) {
      if ((passed >> slot & 1) != 0) continue;
      if (a[c][slot % QKV_GROUP_TOKENS] >> drop != b[c][slot % QKV_GROUP_TOKENS]) same = slot;
    }
  }
  return same - first;
}

// Whether the factors were taken off before the rows were coded. A page does not say, its coder does: corrections are
// fitted to what the codes miss.
static bool factors_precede(const qkv_coder *coder, const qkvi_additions *added) {
  return added->factored && qkv_embedded(coder)->low_rank.mode != QKV_LOW_RANK_CORRECTION;
}

// What the codes of a page's slots begin from, factors left out: out [64][dim] in code space.
static void predict_rows(const qkvi_additions *added, const qkv_page_codes *codes, qkv_part part, float *out) {
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
static void take_off(const qkv_coder *coder, const qkvi_additions *added, const qkv_page_codes *codes, qkv_part part,
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
static unsigned coded_tier(const qkvi_additions *added, const qkv_page_codes *codes, unsigned budget) {
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

// Of slots [first, end) those up to the first outlier that would be kept otherwise. `turned` as qkvi_outliers_store
// wants it, `rows` the source from slot `first` on.
static uint32_t match_outliers(const qkv_head_coder *head, qkv_part part, const qkv_outliers *outliers,
                               const float *rows, const float *turned, uint32_t first, uint32_t end) {
  const size_t dim = outliers->dim;
  const uint8_t *stored = outliers->rows;
  int16_t bytes[QKV_DIM_MAX];
  for (size_t i = 0; i < outliers->count; i++) {
    const uint8_t slot = outliers->slots[i] & (QKV_PAGE_TOKENS - 1);
    const bool wide = outliers->slots[i] != slot;
    const size_t row_bytes = dim * (wide ? sizeof *bytes : 1);
    if (slot >= first && slot < end) {
      qkv_outlier_set set = {.rows = (uint8_t *)bytes};
      const float *row = part == QKV_V ? turned + slot * dim : rows + (slot - first) * dim;
      qkv_outlier_set_add(&set, slot, wide, row, part == QKV_V ? head->outlier_steps : NULL, dim);
      float scale;
      memcpy(&scale, outliers->scales + i * sizeof scale, sizeof scale);
      if (set.scales[0] != scale || memcmp(bytes, stored, row_bytes) != 0) return slot;
    }
    stored += row_bytes;
  }
  return end;
}

uint32_t qkvi_embedded_rows_match(const qkv_coder *coder, const void *page, uint16_t kv_head, qkv_part part,
                                  uint32_t first, uint32_t tokens, const float *rows) {
  const qkv_page_header *header = page;
  assert(first + tokens <= header->tokens);
  qkv_page_codes theirs;
  qkvi_find(coder, page, kv_head, part, &theirs);
  const qkv_schedule *schedule = theirs.schedule;
  const qkvi_additions added = qkvi_additions_find(coder, page, kv_head, part);
  const unsigned tier = coded_tier(&added, &theirs, qkv_embedded(coder)->heads[kv_head].tiers[part]);
  float turned[QKV_PAGE_TOKENS * QKV_DIM_MAX];
  qkvi_row_measures measures;
  qkv_outliers outliers;
  (void)qkv_outliers_find(page, kv_head, part, &outliers);
  uint8_t gains[QKV_PAGE_TOKENS], bytes[QKV_PAGE_TOKENS * QKV_DIM_MAX];
  const size_t row_bytes = schedule->dim * sizeof *rows;
  const qkv_rows source = {QKV_FP32, (const uint8_t *)rows, row_bytes, row_bytes, NULL};
  turn_rows(coder, kv_head, part, header->position, first, tokens, &source, turned, measures.squares);
  take_off(coder, &added, &theirs, part, turned);
  const uint32_t kept =
      match_outliers(&qkv_embedded(coder)->heads[kv_head], part, &outliers, rows, turned, first, first + tokens);
  tokens = kept - first;
  encode_turned(part, qkv_embedded(coder)->heads[kv_head].transforms[part], tier, turned, gains, bytes,
                measures.errors);
  qkv_page_codes mine = {.gains = gains, .schedule = schedule};
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
    mine.groups[g] = bytes + g * qkv_schedule_group_bytes(schedule, tier);
    mine.tiers[g] = (uint8_t)tier;
  }
  for (uint32_t slot = first; slot < first + tokens;) {
    const size_t group = slot / QKV_GROUP_TOKENS;
    uint32_t end = (uint32_t)(group + 1) * QKV_GROUP_TOKENS;
    if (end > first + tokens) end = first + tokens;
    const uint32_t same = matching_slots(part, &mine, &theirs, group, qkv_outliers_mask(&outliers), slot, end);
    if (same < end - slot) return slot + same - first;
    slot = end;
  }
  return tokens;
}
