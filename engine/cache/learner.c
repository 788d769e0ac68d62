#include "engine/cache/learner.h"

#include <assert.h>
#include <cblas.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cache/learner_internal.h"

enum {
  ROWS_LEARNING = 64,  // of a page, until the first calibration
  ROWS_LATER = 2,
  QUERIES_LEARNING = 32,
  EVERY_LEARNING = 2,  // queries of every so many attends
  QUERIES_LATER = 1,
  EVERY_LATER = 64,
  MEASURES_SETTLED = 32,  // measures after which an error is believed
  CRAMPED_EVERY = 16,     // pages
  PATIENCE = 16,          // time-out for a layer's queries, in its pages, where other layers have some
  RETRY_AFTER = 4096,     // pages after one alarm that was none, before another one leads to a trial
};
#define ERROR_DECAY (1.0 / 64)  // share of a new measure in the running error
#define ERROR_NONE 1e-6         // squared error of attention that is negligible

qkv_learner *qkv_learner_create(const qkv_learner_config *config) {
  const qkv_model *model = config->model;
  bool any = false;
  qkv_learner *learner = calloc(1, sizeof *learner);
  if (learner == NULL) abort();
  *learner = (qkv_learner){.model = model,
                           .shape = qkv_model_calibration_shape(model),
                           .first = config->tokens,
                           .samples = config->samples,
                           .slot = config->slot,
                           .arena = config->arena};
  atomic_init(&learner->due_at, config->tokens > 0 ? config->tokens : UINT64_MAX);
  atomic_init(&learner->fresh, true);
  learner->layers = calloc(model->layers, sizeof *learner->layers);
  if (learner->layers == NULL) abort();
  for (uint32_t i = 0; i < model->layers; i++) {
    (void)pthread_mutex_init(&learner->layers[i].lock, NULL);
    learner->layers[i].teaches = config->teaches[i];
    any |= config->teaches[i];
  }
  assert(any);
  (void)any;
  const qkv_holdout_shape held = qkv_probation_sample(model);
  learner->holdout = qkv_holdout_create(&held, config->teaches);
  (void)pthread_mutex_init(&learner->error_lock, NULL);
  (void)pthread_mutex_init(&learner->state_lock, NULL);
  openblas_set_num_threads(1);
  return learner;
}

void qkvi_learner_lock_layers(qkv_learner *learner) {
  for (uint32_t i = 0; i < learner->shape.layers; i++) (void)pthread_mutex_lock(&learner->layers[i].lock);
}

void qkvi_learner_unlock_layers(qkv_learner *learner) {
  for (uint32_t i = 0; i < learner->shape.layers; i++) (void)pthread_mutex_unlock(&learner->layers[i].lock);
}

void qkvi_learner_forget(qkv_learner *learner) {
  qkvi_learner_lock_layers(learner);
  qkv_moments *moments = atomic_exchange(&learner->moments, NULL);
  for (uint32_t i = 0; i < learner->shape.layers; i++) {
    atomic_store(&learner->layers[i].tokens, 0);
    atomic_store(&learner->layers[i].learnt, 0);
  }
  if (moments == learner->studied) moments = NULL;
  qkvi_learner_unlock_layers(learner);
  if (moments == NULL) return;
  qkv_arena_unreserve_elsewhere(learner->arena, qkv_moments_bytes(&learner->shape));
  qkv_moments_destroy(&moments);
}

static void drop_pages(qkv_learner *learner) {
  qkvi_learner_lock_layers(learner);
  const bool had = atomic_exchange(&learner->has_pages, false);
  qkv_holdout_drop_pages(learner->holdout);
  for (uint32_t i = 0; i < learner->shape.layers; i++) atomic_store(&learner->layers[i].ready, false);
  qkvi_learner_unlock_layers(learner);
  if (had) qkv_arena_unreserve_elsewhere(learner->arena, qkv_holdout_page_bytes(learner->holdout));
}

void qkvi_learner_drop_sample(qkv_learner *learner) {
  if (!qkvi_learner_samples(learner) && atomic_load(&learner->has_pages)) drop_pages(learner);
}

void qkv_learner_destroy(qkv_learner **learner) {
  qkv_learner *old = *learner;
  if (old == NULL) return;
  *learner = NULL;
  qkvi_learner_forget(old);
  drop_pages(old);
  if (atomic_load(&old->has_queries)) {
    qkv_arena_unreserve_elsewhere(old->arena, qkv_holdout_query_bytes(old->holdout));
  }
  qkv_holdout_destroy(&old->holdout);
  qkv_calibration_unref(&old->candidate);
  for (uint32_t i = 0; i < old->shape.layers; i++) (void)pthread_mutex_destroy(&old->layers[i].lock);
  (void)pthread_mutex_destroy(&old->error_lock);
  (void)pthread_mutex_destroy(&old->state_lock);
  free(old->layers);
  free(old);
}

void qkv_learner_stop(qkv_learner *learner) {
  atomic_store(&learner->stopped, true);
}

bool qkvi_learner_wants(const qkv_learner *learner) {
  return atomic_load_explicit(&learner->due_at, memory_order_relaxed) != UINT64_MAX &&
         !atomic_load_explicit(&learner->brought, memory_order_relaxed);
}

bool qkvi_learner_samples(const qkv_learner *learner) {
  return qkvi_learner_wants(learner) || atomic_load_explicit(&learner->pending, memory_order_relaxed) ||
         atomic_load_explicit(&learner->retry, memory_order_relaxed) ||
         atomic_load_explicit(&learner->trying, memory_order_relaxed);
}

// ---- Teaching ----

// With all layers locked. Where memory is short it is tried again later.
static bool reserve(qkv_learner *learner, uint64_t bytes) {
  const bool has = qkv_arena_reserve_elsewhere(learner->arena, bytes, NULL) == QKV_OK;
  atomic_store(&learner->cramped, !has);
  return has;
}

static bool is_cramped(const qkv_learner *learner) {
  return atomic_load_explicit(&learner->cramped, memory_order_relaxed) &&
         atomic_load_explicit(&learner->pages, memory_order_relaxed) % CRAMPED_EVERY != 0;
}

// The sample is begun where one is wanted and memory allows, anew where it is to be another one. Not with a
// layer locked.
static void begin_pages(qkv_learner *learner) {
  const bool has = atomic_load_explicit(&learner->has_pages, memory_order_relaxed);
  if ((has && !atomic_load_explicit(&learner->renew, memory_order_relaxed)) || is_cramped(learner)) return;
  qkvi_learner_lock_layers(learner);
  const bool had = atomic_load(&learner->has_pages), renew = atomic_load(&learner->renew);
  if ((had && renew) || (!had && reserve(learner, qkv_holdout_page_bytes(learner->holdout)))) {
    qkv_holdout_begin_pages(learner->holdout);
    for (uint32_t i = 0; i < learner->shape.layers; i++) atomic_store(&learner->layers[i].ready, false);
    atomic_store(&learner->has_pages, true);
    atomic_store(&learner->renew, false);
  }
  qkvi_learner_unlock_layers(learner);
}

static void begin_queries(qkv_learner *learner) {
  if (atomic_load_explicit(&learner->has_queries, memory_order_relaxed) || is_cramped(learner)) return;
  qkvi_learner_lock_layers(learner);
  const bool begun =
      !atomic_load(&learner->has_queries) && reserve(learner, qkv_holdout_query_bytes(learner->holdout));
  if (begun) {
    qkv_holdout_begin_queries(learner->holdout);
    atomic_store(&learner->has_queries, true);
  }
  qkvi_learner_unlock_layers(learner);
  if (begun) qkvi_learner_retry(learner);  // earlier trials used random queries
}

// With a layer locked. NULL where the arena is full.
static qkv_moments *moments_of(qkv_learner *learner) {
  qkv_moments *moments = atomic_load_explicit(&learner->moments, memory_order_acquire);
  if (moments != NULL) return moments;
  (void)pthread_mutex_lock(&learner->error_lock);
  moments = atomic_load_explicit(&learner->moments, memory_order_acquire);
  if (moments == NULL &&
      qkv_arena_reserve_elsewhere(learner->arena, qkv_moments_bytes(&learner->shape), NULL) == QKV_OK) {
    moments = qkv_moments_create(&learner->shape);
    const int64_t sinks = learner->model->policy.sink_tokens;
    qkv_moments_leave_out_before(moments, sinks > 0 ? (uint64_t)sinks : 0);
    atomic_store_explicit(&learner->moments, moments, memory_order_release);
  }
  (void)pthread_mutex_unlock(&learner->error_lock);
  return moments;
}

// Rows that are picked are added one by one, as their positions do not follow one another.
static void teach_rows(qkv_learner *learner, uint32_t layer, uint64_t position, size_t tokens, const float *k,
                       const float *v) {
  qkv_moments *moments = qkvi_learner_wants(learner) ? moments_of(learner) : NULL;
  if (moments == NULL) return;
  const size_t rows = atomic_load_explicit(&learner->fresh, memory_order_relaxed) ? ROWS_LEARNING : ROWS_LATER;
  const size_t count = tokens < rows ? tokens : rows;
  const size_t k_width = (size_t)learner->shape.kv_heads * learner->shape.key_dim;
  const size_t v_width = (size_t)learner->shape.kv_heads * learner->shape.value_dim;
  if (count == tokens) qkv_moments_add(moments, layer, position, tokens, k, v, false);
  for (size_t i = 0; i < count && count < tokens; i++) {
    const size_t at = i * tokens / count;
    qkv_moments_add(moments, layer, position + at, 1, k + at * k_width, v + at * v_width, false);
  }
  // A page of rows that were looked at in part stands for all of them.
  (void)atomic_fetch_add_explicit(&learner->layers[layer].tokens, tokens, memory_order_relaxed);
  (void)atomic_fetch_add_explicit(&learner->layers[layer].learnt, tokens, memory_order_relaxed);
}

// With the layer locked. What is held out does not teach.
static bool hold_out(qkv_learner *learner, uint32_t layer, uint64_t position, size_t tokens, const float *k,
                     const float *v) {
  if (tokens != QKV_PAGE_TOKENS || !learner->layers[layer].teaches || !qkvi_learner_samples(learner)) return false;
  if (!atomic_load_explicit(&learner->has_pages, memory_order_relaxed)) return false;
  const bool held = qkv_holdout_page(learner->holdout, layer, position, k, v);
  const bool asks = atomic_load_explicit(&learner->has_queries, memory_order_relaxed);
  atomic_store(&learner->layers[layer].ready, qkv_holdout_ready(learner->holdout, layer, asks ? PATIENCE : 0));
  if (!held) return false;
  if (qkvi_learner_wants(learner)) {
    (void)atomic_fetch_add_explicit(&learner->layers[layer].tokens, tokens, memory_order_relaxed);
  }
  return true;
}

size_t qkv_learner_wants_queries(qkv_learner *learner, uint32_t layer) {
  assert(layer < learner->shape.layers);
  if (!learner->samples || !learner->layers[layer].teaches) return 0;
  const bool learning = qkvi_learner_wants(learner) ? atomic_load_explicit(&learner->fresh, memory_order_relaxed)
                                                    : qkvi_learner_samples(learner);
  const uint64_t attend = atomic_fetch_add_explicit(&learner->layers[layer].attends, 1, memory_order_relaxed);
  if (attend % (learning ? EVERY_LEARNING : EVERY_LATER) != 0) return 0;
  return learning ? QUERIES_LEARNING : QUERIES_LATER;
}

void qkv_learner_queries(qkv_learner *learner, uint32_t layer, uint64_t position, const float *q, bool before_rope) {
  assert(layer < learner->shape.layers);
  if (!learner->layers[layer].teaches) return;
  begin_queries(learner);
  if (pthread_mutex_trylock(&learner->layers[layer].lock) != 0) return;
  const bool held = atomic_load_explicit(&learner->has_queries, memory_order_relaxed) &&
                    qkv_holdout_query(learner->holdout, layer, position, q, before_rope);
  qkv_moments *moments = !held && qkvi_learner_wants(learner) ? moments_of(learner) : NULL;
  if (moments != NULL) qkv_moments_add_queries(moments, layer, position, 1, q, before_rope);
  (void)pthread_mutex_unlock(&learner->layers[layer].lock);
}

// ---- Measuring ----

static double squared_error(const float *a, const float *b, size_t stride, size_t tokens, size_t dim, double *norm) {
  double error = 0;
  for (size_t t = 0; t < tokens; t++) {
    for (size_t i = 0; i < dim; i++) {
      const double x = a[t * stride + i], miss = x - (double)b[t * dim + i];
      error += miss * miss;
      *norm += x * x;
    }
  }
  return error;
}

// One head's relative error, keys and values together.
static double measure(const qkv_learner *learner, const qkv_page_watch_page *page) {
  const qkv_calibration_shape *shape = &learner->shape;
  const size_t widest = shape->key_dim > shape->value_dim ? shape->key_dim : shape->value_dim;
  float *rows = malloc(QKV_PAGE_TOKENS * widest * sizeof *rows);
  if (rows == NULL) abort();
  double relative = 0;
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    const size_t dim = part == QKV_K ? shape->key_dim : shape->value_dim;
    double norm = 0;
    page->coder->codec->decode(page->coder, page->image, page->head, part, false, rows);
    const double error = squared_error((part == QKV_K ? page->k : page->v) + page->head * dim, rows,
                                       shape->kv_heads * dim, page->tokens, dim, &norm);
    relative += norm > 0 ? error / norm / 2 : 0;
  }
  free(rows);
  return relative;
}

// Attention of recent queries. False where another thread has the layer.
static bool measure_attention(qkv_learner *learner, uint32_t layer, const qkv_page_watch_page *page,
                              qkv_page_watched *out) {
  const qkv_model *model = learner->model;
  const size_t group = model->q_heads / model->kv_heads;
  uint64_t stands[QKV_HOLDOUT_QUERIES];
  float *queries = malloc(QKV_HOLDOUT_QUERIES * group * model->key_dim * sizeof *queries);
  if (queries == NULL) abort();
  if (pthread_mutex_trylock(&learner->layers[layer].lock) != 0) {
    free(queries);
    return false;
  }
  const size_t tokens = qkv_holdout_head_queries(learner->holdout, layer, page->head, queries, stands);
  (void)pthread_mutex_unlock(&learner->layers[layer].lock);
  const qkv_probe_queries asked = {.tokens = tokens,
                                   .group = group,
                                   .rows = queries,
                                   .stands = stands,
                                   .rope = &model->rope,
                                   .scale = model->scale,
                                   .soft_cap = qkv_model_cap(model, layer)};
  *out = qkv_page_watch_measure(page, &asked);
  free(queries);
  return true;
}

// A running mean, and whether it has grown by `most` since it settled; then it settles anew. A measure that is not
// finite would stay in the mean for ever, and is left out. With the error's lock.
static bool has_drifted(double *error, double *settled, uint64_t *measures, double next, double most) {
  if (!isfinite(next)) return false;
  ++*measures;
  *error += (*measures < MEASURES_SETTLED ? 1.0 / (double)*measures : ERROR_DECAY) * (next - *error);
  if (*measures == MEASURES_SETTLED) *settled = *error;
  if (!(*settled > 0 && *error > most * *settled)) return false;
  *settled = 0;
  *measures = 0;
  return true;
}

static void note_error(qkv_learner *learner, const qkv_coder *coder, double error) {
  (void)pthread_mutex_lock(&learner->error_lock);
  if (learner->measures == 0) learner->measured_as = coder->kind;
  const bool drifted = learner->measured_as == coder->kind &&
                       has_drifted(&learner->error, &learner->settled, &learner->measures, error, QKV_LEARNER_DRIFT);
  (void)pthread_mutex_unlock(&learner->error_lock);
  if (drifted && !atomic_load(&learner->fresh)) qkvi_learner_start_over(learner);
}

typedef enum finding { NOTHING, DRIFTED, DOUBTFUL, WORSE } finding;

// Of pages with first tokens as many as one sequence has: which layers and heads come first is chance.
static uint32_t alarm_pages(const qkv_learner *learner, size_t class) {
  const uint32_t layers = learner->shape.layers;
  if (class == QKVI_OTHER_PAGES) return QKV_LEARNER_ALARM_PAGES;
  if (layers < QKV_LEARNER_ALARM_FIRST) return QKV_LEARNER_ALARM_FIRST;
  return layers < QKV_LEARNER_ALARM_FIRST_MOST ? layers : QKV_LEARNER_ALARM_FIRST_MOST;
}

static size_t class_of(const qkv_page_watch_page *page) {
  return page->position == 0 ? QKVI_FIRST_PAGES : QKVI_OTHER_PAGES;
}

// With the error's lock. `text` is said of what is worse.
static finding look_at_alarm(qkv_learner *learner, size_t class, const qkv_page_watched *measured,
                             char text[QKV_LEARNER_TEXT_MAX]) {
  const double worse = QKV_LEARNER_WORSE * QKV_LEARNER_WORSE, count = alarm_pages(learner, class);
  qkvi_alarm *alarm = &learner->alarms[class];
  const uint32_t left = atomic_load(&alarm->left);
  if (left == 0) {
    if (measured->coded <= worse * measured->data_free || measured->coded < ERROR_NONE) return NOTHING;
    alarm->coded = alarm->data_free = 0;
    alarm->worse = 0;
    atomic_store(&alarm->left, alarm_pages(learner, class));
    return NOTHING;
  }
  alarm->worse += measured->coded > worse * measured->data_free;
  alarm->coded += measured->coded;
  alarm->data_free += measured->data_free;
  atomic_store(&alarm->left, left - 1);
  if (left > 1) return NOTHING;
  // A few pages may make the sums: where it is the code, most pages are worse.
  if (alarm->coded > worse * alarm->data_free && 2 * alarm->worse > count) {
    (void)snprintf(text, QKV_LEARNER_TEXT_MAX, "%g pages %s: attention error %.3g, data-free %.3g", count,
                   class == QKVI_FIRST_PAGES ? "with a sequence's first tokens" : "in a row",
                   sqrt(alarm->coded / count), sqrt(alarm->data_free / count));
    return WORSE;
  }
  const uint64_t pages = atomic_load_explicit(&learner->pages, memory_order_relaxed);
  if (pages < learner->retry_after) return NOTHING;
  learner->retry_after = pages + RETRY_AFTER;
  return DOUBTFUL;
}

static finding note_attention(qkv_learner *learner, const qkv_page_watch_page *page, const qkv_page_watched *measured,
                              char text[QKV_LEARNER_TEXT_MAX]) {
  const qkv_coder *coder = page->coder;
  const size_t class = class_of(page);
  finding found = NOTHING;
  (void)pthread_mutex_lock(&learner->error_lock);
  qkv_page_watch_add(&learner->watch, measured);
  if (coder->calibration != 0 && coder->calibration == qkv_calibration_slot_version(learner->slot)) {
    found = look_at_alarm(learner, class, measured, text);
    // Of squares.
    if (class == QKVI_OTHER_PAGES && learner->measured_as == coder->kind &&
        has_drifted(&learner->attention, &learner->attention_settled, &learner->attention_measures, measured->coded,
                    QKV_LEARNER_DRIFT * QKV_LEARNER_DRIFT) &&
        found == NOTHING) {
      found = DRIFTED;
    }
  }
  (void)pthread_mutex_unlock(&learner->error_lock);
  return found;
}

static void watch_page(qkv_learner *learner, uint32_t layer, const qkv_page_watch_page *page, qkv_page_watch *watch) {
  qkv_page_watched measured;
  char text[QKV_LEARNER_TEXT_MAX];
  if (!measure_attention(learner, layer, page, &measured)) return;
  qkv_page_watch_add(watch, &measured);
  switch (note_attention(learner, page, &measured, text)) {
    case WORSE:
      qkvi_learner_withdraw(learner, page->coder->calibration, text);
      break;
    case DOUBTFUL:
      atomic_store(&learner->renew, true);
      qkvi_learner_retry(learner);
      break;
    case DRIFTED:
      if (!atomic_load(&learner->fresh)) qkvi_learner_start_over(learner);
      break;
    case NOTHING:
      break;
  }
}

void qkv_learner_page(qkv_learner *learner, uint32_t layer, uint64_t position, size_t tokens, const float *k,
                      const float *v, const qkv_coder *coder, const void *page, qkv_page_watch *watch) {
  assert(layer < learner->shape.layers && tokens >= 1);
  if (!learner->samples) return;
  if (qkvi_learner_samples(learner)) begin_pages(learner);
  if (pthread_mutex_trylock(&learner->layers[layer].lock) == 0) {
    if (!hold_out(learner, layer, position, tokens, k, v)) teach_rows(learner, layer, position, tokens, k, v);
    (void)pthread_mutex_unlock(&learner->layers[layer].lock);
  }
  if (!qkvi_learner_wants(learner) && atomic_load_explicit(&learner->moments, memory_order_relaxed) != NULL) {
    qkvi_learner_forget(learner);
  }
  qkvi_learner_drop_sample(learner);
  const uint64_t number = atomic_fetch_add_explicit(&learner->pages, 1, memory_order_relaxed);
  const bool regular = number % QKV_LEARNER_WATCH_EVERY == 0;
  const qkvi_alarm *alarm = &learner->alarms[QKVI_OTHER_PAGES];
  if (!regular && position > 0 && atomic_load_explicit(&alarm->left, memory_order_relaxed) == 0) return;
  const uint64_t turn = regular ? number / QKV_LEARNER_WATCH_EVERY : number;
  const qkv_page_watch_page watched = {.coder = coder,
                                       .image = page,
                                       .position = position,
                                       .tokens = tokens,
                                       .k = k,
                                       .v = v,
                                       .head = (uint16_t)(turn % learner->shape.kv_heads)};
  if (regular) note_error(learner, coder, measure(learner, &watched));
  watch_page(learner, layer, &watched, watch);
}
