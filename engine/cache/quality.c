#include "engine/cache/quality.h"

#include <assert.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cache/quality_measure.h"
#include "engine/codec/narrow.h"

enum { HALVES = 2, CHOOSE = 0, HOLD = 1 };  // the half that chooses, and the one that is held out
enum { ROUNDS = 4 };                        // pairs of tiers that are measured together

static const double FADE = 0.875;      // of what has been seen, a page
static const double CAUTION_MAX = 16;  // that the limit, squared, is divided by at most

struct qkv_quality {
  const qkv_model *model;
  double limit;  // squared error
  float soft_cap;
  _Atomic uint64_t attends;
  pthread_mutex_t lock;  // of the next four, and of stats
  uint64_t taken[HALVES];
  uint64_t taken_all;
  uint64_t stands[HALVES][QKV_QUALITY_TOKENS];
  float *rows;            // [HALVES][QKV_QUALITY_TOKENS][q_heads][key_dim]
  double lately[HALVES];  // squared errors of pages, fading
  qkv_quality_stats stats;
};

// Of all layers; squares and shares in NANO.
static const double NANO = 1e-9;
static _Atomic uint64_t pages_all, missed_all, nano_squares_all, nano_shares_all;

qkv_status qkv_quality_check(double error_max, qkv_error *error) {
  if (error_max >= 0 && error_max <= 1) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "max_attention_error is %g, allowed are 0 to 1", error_max);
}

// ---- Queries ----

static size_t token_floats(const qkv_model *model) {
  return (size_t)model->q_heads * model->key_dim;
}

static size_t head_bytes(void) {
  return (sizeof(qkv_quality) + 63) / 64 * 64;
}

size_t qkv_quality_bytes(const qkv_model *model) {
  return head_bytes() + (size_t)HALVES * QKV_QUALITY_TOKENS * token_floats(model) * sizeof(float);
}

qkv_quality *qkv_quality_init(void *block, const qkv_model *model, uint32_t layer, double error_max) {
  assert(error_max > 0);
  qkv_quality *quality = block;
  *quality = (qkv_quality){.model = model,
                           .limit = error_max * error_max,
                           .soft_cap = (float)qkv_model_cap(model, layer),
                           .rows = (float *)((uint8_t *)block + head_bytes())};
  atomic_init(&quality->attends, 0);
  const int failed = pthread_mutex_init(&quality->lock, NULL);
  assert(failed == 0);
  (void)failed;
  return quality;
}

void qkv_quality_deinit(qkv_quality *quality) {
  (void)pthread_mutex_destroy(&quality->lock);
}

bool qkv_quality_wants(qkv_quality *quality) {
  const uint64_t before = atomic_fetch_add_explicit(&quality->attends, 1, memory_order_relaxed);
  return before < (uint64_t)HALVES * QKV_QUALITY_TOKENS || before % QKV_QUALITY_SAMPLE_EVERY == 0;
}

static float *rows_of(const qkv_quality *quality, size_t half, uint64_t taken) {
  const size_t slot = half * QKV_QUALITY_TOKENS + (size_t)(taken % QKV_QUALITY_TOKENS);
  return quality->rows + slot * token_floats(quality->model);
}

void qkv_quality_query(qkv_quality *quality, uint64_t stand, const float *rows) {
  if (pthread_mutex_trylock(&quality->lock) != 0) return;
  const size_t half = (size_t)(quality->taken_all++ % HALVES);
  const uint64_t taken = quality->taken[half]++;
  quality->stands[half][taken % QKV_QUALITY_TOKENS] = stand;
  memcpy(rows_of(quality, half, taken), rows, token_floats(quality->model) * sizeof *rows);
  (void)pthread_mutex_unlock(&quality->lock);
}

// ---- Before a page ----

static void turn_token(const qkv_model *model, uint64_t stand, uint64_t last, float *rows) {
  if (stand >= last || model->rope.theta == 0) return;
  for (uint32_t head = 0; head < model->q_heads; head++) {
    qkv_rope_inverse(&model->rope, rows + (size_t)head * model->key_dim, stand);
    qkv_rope_forward(&model->rope, rows + (size_t)head * model->key_dim, last);
  }
}

size_t qkv_quality_gather(qkv_quality *quality, uint64_t last, float *queries) {
  const size_t floats = token_floats(quality->model);
  (void)pthread_mutex_lock(&quality->lock);
  uint64_t each = quality->taken[HOLD];  // the half that comes second has no more than the other one
  if (each > QKV_QUALITY_TOKENS) each = QKV_QUALITY_TOKENS;
  for (uint64_t i = 0; i < HALVES * each; i++) {
    const size_t half = (size_t)(i % HALVES);
    const uint64_t token = quality->taken[half] - 1 - i / HALVES;
    memcpy(queries + i * floats, rows_of(quality, half, token), floats * sizeof *queries);
    turn_token(quality->model, quality->stands[half][token % QKV_QUALITY_TOKENS], last, queries + i * floats);
  }
  (void)pthread_mutex_unlock(&quality->lock);
  return (size_t)(HALVES * each);
}

// A half of the page's queries: as many tokens as a block of queries takes, and so for query heads.
static void fill_sample(const qkv_quality *quality, size_t half, const qkv_quality_page *page, qkvi_sample *sample) {
  const qkv_model *model = quality->model;
  const uint32_t group = model->q_heads / model->kv_heads;
  const size_t heads = group < QKV_QUERY_BLOCK ? group : QKV_QUERY_BLOCK;
  const size_t key_dim = model->key_dim, value_dim = model->value_dim;
  size_t tokens = page->tokens / HALVES;
  if (tokens > QKV_QUERY_BLOCK / heads) tokens = QKV_QUERY_BLOCK / heads;
  qkvi_sample_init(sample, page, quality->soft_cap, tokens * heads);
  for (uint32_t h = 0; h < model->kv_heads; h++) {
    for (size_t row = 0; row < sample->rows; row++) {
      const size_t token = row / heads * HALVES + half, at = h * sample->rows + row;
      const size_t from = token * model->q_heads + (size_t)h * group + row % heads;
      memcpy(sample->queries + at * key_dim, page->queries + from * key_dim, key_dim * sizeof(float));
      memcpy(sample->whole + at * value_dim, page->out + from * value_dim, value_dim * sizeof(float));
      sample->shares[at] = page->lse[from];
    }
  }
}

// ---- Which tiers ----

// Bytes and error of each part of a page alone, when it goes down by so many tiers.
typedef struct choice {
  const qkv_quality_page *page;
  const qkvi_sample *sample;
  qkv_head_tiers *coded, *wanted;       // [kv_heads]
  unsigned deepest;                     // how far the highest group can go
  float missed[2][QKV_TIER_MAX + 1];    // squared errors by part, growing
  uint64_t bytes[2][QKV_TIER_MAX + 1];  // of codes
  void *images[2];                      // the best so far and the one that is tried
  size_t best_bytes;                    // of the best image; 0: the page itself
  uint64_t best_codes;                  // bytes of its codes
} choice;

static uint8_t lowered(uint8_t tier, unsigned drop) {
  if (tier <= QKV_QUALITY_TIER_LEAST) return tier;
  return (uint8_t)(tier >= drop + QKV_QUALITY_TIER_LEAST ? tier - drop : QKV_QUALITY_TIER_LEAST);
}

// Writes the image at lower tiers; returns its bytes.
static size_t cut(const choice *made, const unsigned drops[2], void *image) {
  const qkv_coder *coder = made->page->coder;
  for (uint16_t h = 0; h < coder->kv_heads; h++) {
    for (qkv_part part = QKV_K; part <= QKV_V; part++) {
      for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
        made->wanted[h].tiers[part][g] = lowered(made->coded[h].tiers[part][g], drops[part]);
      }
    }
  }
  return coder->codec->planes->drop(coder, made->page->page, made->wanted, image);
}

static uint64_t code_bytes(const choice *made, qkv_part part, unsigned drop) {
  const qkv_coder *coder = made->page->coder;
  uint64_t bytes = 0;
  for (uint16_t h = 0; h < coder->kv_heads; h++) {
    const uint16_t *group_bytes = coder->codec->planes->group_bytes(coder, h, part);
    const bool drops = coder->codec->planes->part_drops(made->page->page, h, part);
    for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
      const uint8_t tier = made->coded[h].tiers[part][g];
      bytes += group_bytes[drops ? lowered(tier, drop) : tier];
    }
  }
  return bytes;
}

static void measure_costs(choice *made) {
  const qkv_coder *coder = made->page->coder;
  uint8_t highest = QKV_QUALITY_TIER_LEAST;
  for (uint16_t h = 0; h < coder->kv_heads; h++) {
    for (size_t i = 0; i < (size_t)2 * QKV_PAGE_GROUPS; i++) {
      const uint8_t tier = made->coded[h].tiers[i / QKV_PAGE_GROUPS][i % QKV_PAGE_GROUPS];
      highest = tier > highest ? tier : highest;
    }
  }
  made->deepest = highest - QKV_QUALITY_TIER_LEAST;
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    for (unsigned drop = 0; drop <= made->deepest; drop++) made->bytes[part][drop] = code_bytes(made, part, drop);
  }
}

// Errors between two drops that have been measured: so many dB a tier.
static void interpolate(float *missed, unsigned from, unsigned to) {
  if (missed[to] < missed[from]) missed[to] = missed[from];
  const float low = logf(fmaxf(missed[from], 1e-30f)), high = logf(fmaxf(missed[to], 1e-30f));
  for (unsigned drop = from + 1; drop < to; drop++) {
    missed[drop] = expf(low + (high - low) * (float)(drop - from) / (float)(to - from));
  }
}

static void measure_levels(choice *made, const qkvi_missed *coded) {
  const unsigned step = (made->deepest + QKV_QUALITY_LEVELS - 2) / (QKV_QUALITY_LEVELS - 1);
  for (qkv_part part = QKV_K; part <= QKV_V; part++) made->missed[part][0] = (float)coded->parts[part];
  for (unsigned from = 0; from < made->deepest; from += step) {
    const unsigned to = from + step < made->deepest ? from + step : made->deepest;
    (void)cut(made, (unsigned[]){to, to}, made->images[1]);
    const qkvi_missed missed = qkvi_sample_measure(made->sample, made->images[1], true);
    for (qkv_part part = QKV_K; part <= QKV_V; part++) {
      made->missed[part][to] = (float)missed.parts[part];
      interpolate(made->missed[part], from, to);
    }
  }
}

// The pair of the least bytes within `limit`, going by the parts alone. No pair: false.
static bool choose_drops(const choice *made, double limit, unsigned drops[2]) {
  uint64_t least = UINT64_MAX;
  for (unsigned k = 0; k <= made->deepest; k++) {
    const double left = limit - (double)made->missed[QKV_K][k];
    if ((double)made->missed[QKV_V][0] > left) break;
    unsigned v = made->deepest;
    while ((double)made->missed[QKV_V][v] > left) v--;
    const uint64_t bytes = made->bytes[QKV_K][k] + made->bytes[QKV_V][v];
    if (bytes >= least) continue;
    least = bytes;
    drops[QKV_K] = k;
    drops[QKV_V] = v;
  }
  return least != UINT64_MAX;
}

// Measures a pair together and keeps it where it is within `limit` and smaller than the best one. Its squared error.
static double try_drops(choice *made, const unsigned drops[2], double limit) {
  const uint64_t codes = made->bytes[QKV_K][drops[QKV_K]] + made->bytes[QKV_V][drops[QKV_V]];
  const size_t bytes = cut(made, drops, made->images[1]);
  const double missed = qkvi_sample_measure(made->sample, made->images[1], false).both;
  if (missed > limit || codes >= made->best_codes) return missed;
  void *image = made->images[0];
  made->images[0] = made->images[1];
  made->images[1] = image;
  made->best_bytes = bytes;
  made->best_codes = codes;
  return missed;
}

// Parts that are measured alone do not tell all: what is allowed to their sum is corrected by what they miss
// together.
static void search(choice *made, double limit) {
  unsigned drops[2], before[2] = {0};
  double allowed = limit;
  for (int round = 0; round < ROUNDS; round++) {
    if (!choose_drops(made, allowed, drops)) return;
    if (drops[QKV_K] == before[QKV_K] && drops[QKV_V] == before[QKV_V]) return;
    memcpy(before, drops, sizeof before);
    const double missed = try_drops(made, drops, limit);
    allowed *= fmin(fmax(limit / fmax(missed, 1e-30), 0.25), 4) * 0.97;
  }
}

// ---- The verdict ----

static void *allocate(size_t bytes) {
  void *made = aligned_alloc(64, (bytes + 63) / 64 * 64);
  if (made == NULL) abort();
  return made;
}

// Chooses tiers and writes the page at them to `image`. Returns its bytes; 0: the page keeps its tiers.
static size_t narrow_to(const qkv_quality_page *page, const qkvi_sample *sample, const qkvi_missed *coded,
                        double limit, void *image) {
  if (page->coder->codec->planes == NULL) return 0;
  const qkv_page_header *header = page->page;
  const size_t heads = header->kv_heads;
  choice made = {.page = page, .sample = sample, .coded = allocate(2 * heads * sizeof *made.coded)};
  made.wanted = made.coded + heads;
  page->coder->codec->planes->tiers(page->page, made.coded);
  measure_costs(&made);
  made.best_codes = made.bytes[QKV_K][0] + made.bytes[QKV_V][0];
  if (coded->both <= limit && made.deepest > 0) {
    for (size_t i = 0; i < 2; i++) made.images[i] = allocate(header->bytes);
    measure_levels(&made, coded);
    search(&made, limit);
    if (made.best_bytes > 0) memcpy(image, made.images[0], made.best_bytes);
  }
  free(made.images[0]);
  free(made.images[1]);
  free(made.coded);
  return made.best_bytes;
}

static void count(qkv_quality *quality, const double missed[HALVES], double share, bool over) {
  (void)pthread_mutex_lock(&quality->lock);
  quality->stats.pages++;
  quality->stats.missed += over;
  quality->stats.squares += share * missed[HOLD];
  quality->stats.shares += share;
  (void)pthread_mutex_unlock(&quality->lock);
  for (size_t half = 0; half < HALVES; half++) {
    quality->lately[half] = FADE * quality->lately[half] + fmin(missed[half], 1);
  }
  atomic_fetch_add_explicit(&pages_all, 1, memory_order_relaxed);
  atomic_fetch_add_explicit(&missed_all, over, memory_order_relaxed);
  atomic_fetch_add_explicit(&nano_squares_all, (uint64_t)(share * fmin(missed[HOLD], 1e3) / NANO),
                            memory_order_relaxed);
  atomic_fetch_add_explicit(&nano_shares_all, (uint64_t)(share / NANO), memory_order_relaxed);
}

// What the limit is divided by, going by how much more than the half that chose the other one has missed.
static double caution(const qkv_quality *quality) {
  if (!(quality->lately[HOLD] > quality->lately[CHOOSE])) return 1;
  return fmin(quality->lately[HOLD] / fmax(quality->lately[CHOOSE], 1e-30), CAUTION_MAX);
}

static size_t judge(qkv_quality *quality, const qkv_quality_page *page, const qkvi_sample samples[HALVES],
                    void *image) {
  const qkvi_missed coded = qkvi_sample_measure(&samples[CHOOSE], page->page, true);
  const size_t bytes = narrow_to(page, &samples[CHOOSE], &coded, quality->limit / caution(quality), image);
  double missed[HALVES];
  for (size_t half = 0; half < HALVES; half++) {
    missed[half] = qkvi_sample_measure(&samples[half], bytes > 0 ? image : page->page, false).both;
  }
  count(quality, missed, samples[HOLD].share, coded.both > quality->limit);
  return bytes;
}

size_t qkv_quality_judge(qkv_quality *quality, const qkv_quality_page *page, void *image) {
  const float even = (float)QKV_PAGE_TOKENS / (float)page->held;
  qkvi_sample samples[HALVES];
  size_t bytes = 0;
  assert(((const qkv_page_header *)page->page)->tokens == QKV_PAGE_TOKENS && page->tokens >= HALVES);
  assert(page->held >= QKV_PAGE_TOKENS);
  for (size_t half = 0; half < HALVES; half++) {
    fill_sample(quality, half, page, &samples[half]);
    qkvi_sample_answer(&samples[half], half == CHOOSE ? even : 0);
  }
  if (samples[CHOOSE].square > 0 && samples[HOLD].square > 0) bytes = judge(quality, page, samples, image);
  for (size_t half = 0; half < HALVES; half++) qkvi_sample_deinit(&samples[half]);
  return bytes;
}

qkv_quality_stats qkv_quality_read(const qkv_quality *quality) {
  qkv_quality *locked = (qkv_quality *)quality;
  (void)pthread_mutex_lock(&locked->lock);
  const qkv_quality_stats stats = quality->stats;
  (void)pthread_mutex_unlock(&locked->lock);
  return stats;
}

double qkv_quality_error(const qkv_quality_stats *stats) {
  return !(stats->shares > 0) ? 0 : sqrt(stats->squares / stats->shares);
}

qkv_quality_stats qkv_quality_totals(void) {
  return (qkv_quality_stats){.pages = atomic_load_explicit(&pages_all, memory_order_relaxed),
                             .missed = atomic_load_explicit(&missed_all, memory_order_relaxed),
                             .squares = (double)atomic_load_explicit(&nano_squares_all, memory_order_relaxed) * NANO,
                             .shares = (double)atomic_load_explicit(&nano_shares_all, memory_order_relaxed) * NANO};
}
