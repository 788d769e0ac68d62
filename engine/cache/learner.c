#include "engine/cache/learner.h"

#include <assert.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "engine/codec/calibrate.h"

enum {
  ROWS_LEARNING = 64,  // of a page, until the first calibration
  ROWS_LATER = 2,
  QUERIES_LEARNING = 32,
  EVERY_LEARNING = 2,  // queries of every so many attends
  QUERIES_LATER = 1,
  EVERY_LATER = 64,
  MEASURE_EVERY = 16,     // pages
  MEASURES_SETTLED = 32,  // measures after which an error is believed
};
#define ERROR_DECAY (1.0 / 64)  // share of a new measure in the running error

typedef struct taught_layer {
  pthread_mutex_t lock;
  bool teaches;
  _Atomic uint64_t tokens, attends;
} taught_layer;

struct qkv_learner {
  qkv_calibration_shape shape;
  uint64_t first;  // tokens before the first calibration
  qkv_calibration_slot *slot;
  qkv_arena *arena;
  _Atomic(qkv_moments *) moments;  // each layer's under its lock, the pointer under any of them; NULL: none
  qkv_moments *studied;            // those that a calibration is being made of; changes under all layers' locks
  taught_layer *layers;
  _Atomic uint64_t pages;
  _Atomic uint64_t due_at;  // tokens; UINT64_MAX: not before a drift
  _Atomic bool fresh;       // nothing has been learnt yet, or not since the last drift
  _Atomic uint32_t runs;
  _Atomic uint32_t version;  // of the last calibration made here; 0: none yet
  _Atomic uint32_t before;   // of the one before, which is in use until that one is
  _Atomic bool running, stopped;

  pthread_mutex_t error_lock;  // of the rest
  uint32_t measured_as;        // frame and budget of the pages that are measured: those of the first one
  double error, settled;       // running mean; what it was once it had settled after the last calibration
  uint64_t measures;
};

qkv_learner *qkv_learner_create(const qkv_calibration_shape *shape, const bool *teaches, uint64_t tokens,
                                qkv_calibration_slot *slot, qkv_arena *arena) {
  assert(tokens >= 1);
  bool any = false;
  qkv_learner *learner = calloc(1, sizeof *learner);
  if (learner == NULL) abort();
  *learner = (qkv_learner){.shape = *shape, .first = tokens, .slot = slot, .arena = arena};
  atomic_init(&learner->due_at, tokens);
  atomic_init(&learner->fresh, true);
  learner->layers = calloc(shape->layers, sizeof *learner->layers);
  if (learner->layers == NULL) abort();
  for (uint32_t i = 0; i < shape->layers; i++) {
    (void)pthread_mutex_init(&learner->layers[i].lock, NULL);
    learner->layers[i].teaches = teaches[i];
    any |= teaches[i];
  }
  assert(any);
  (void)any;
  (void)pthread_mutex_init(&learner->error_lock, NULL);
  return learner;
}

static void lock_layers(qkv_learner *learner) {
  for (uint32_t i = 0; i < learner->shape.layers; i++) (void)pthread_mutex_lock(&learner->layers[i].lock);
}

static void unlock_layers(qkv_learner *learner) {
  for (uint32_t i = 0; i < learner->shape.layers; i++) (void)pthread_mutex_unlock(&learner->layers[i].lock);
}

static void drop(qkv_learner *learner, qkv_moments *moments) {
  if (moments == NULL) return;
  qkv_arena_unreserve_elsewhere(learner->arena, qkv_moments_bytes(&learner->shape));
  qkv_moments_destroy(&moments);
}

// The moments go, and with them what was counted. Those that a calibration is being made of go behind it.
static void forget(qkv_learner *learner) {
  lock_layers(learner);
  qkv_moments *moments = atomic_exchange(&learner->moments, NULL);
  for (uint32_t i = 0; i < learner->shape.layers; i++) atomic_store(&learner->layers[i].tokens, 0);
  if (moments == learner->studied) moments = NULL;
  unlock_layers(learner);
  drop(learner, moments);
}

// Until `done` the moments stay, whoever forgets them; NULL: there are none.
static qkv_moments *study(qkv_learner *learner) {
  lock_layers(learner);
  qkv_moments *moments = learner->studied = atomic_load(&learner->moments);
  unlock_layers(learner);
  return moments;
}

static void done(qkv_learner *learner) {
  lock_layers(learner);
  qkv_moments *moments = learner->studied;
  learner->studied = NULL;
  if (moments == atomic_load(&learner->moments)) moments = NULL;
  unlock_layers(learner);
  drop(learner, moments);
}

void qkv_learner_destroy(qkv_learner **learner) {
  qkv_learner *old = *learner;
  if (old == NULL) return;
  *learner = NULL;
  forget(old);
  for (uint32_t i = 0; i < old->shape.layers; i++) (void)pthread_mutex_destroy(&old->layers[i].lock);
  (void)pthread_mutex_destroy(&old->error_lock);
  free(old->layers);
  free(old);
}

void qkv_learner_stop(qkv_learner *learner) {
  atomic_store(&learner->stopped, true);
}

// ---- Teaching ----

// The calibration in use was brought, not learnt.
static bool was_brought(const qkv_learner *learner) {
  const uint32_t version = qkv_calibration_slot_version(learner->slot);
  return version != 0 && version != atomic_load(&learner->version) && version != atomic_load(&learner->before);
}

// Whether what is taught now will ever be looked at.
static bool wants(const qkv_learner *learner) {
  return atomic_load_explicit(&learner->due_at, memory_order_relaxed) != UINT64_MAX && !was_brought(learner);
}

// With a layer locked. NULL where there is no room.
static qkv_moments *moments_of(qkv_learner *learner) {
  qkv_moments *moments = atomic_load_explicit(&learner->moments, memory_order_acquire);
  if (moments != NULL) return moments;
  (void)pthread_mutex_lock(&learner->error_lock);
  moments = atomic_load_explicit(&learner->moments, memory_order_acquire);
  if (moments == NULL &&
      qkv_arena_reserve_elsewhere(learner->arena, qkv_moments_bytes(&learner->shape), NULL) == QKV_OK) {
    moments = qkv_moments_create(&learner->shape);
    atomic_store_explicit(&learner->moments, moments, memory_order_release);
  }
  (void)pthread_mutex_unlock(&learner->error_lock);
  return moments;
}

// Rows that are picked are added one by one, as their positions do not follow one another.
static void teach_rows(qkv_learner *learner, uint32_t layer, uint64_t position, size_t tokens, const float *k,
                       const float *v) {
  qkv_moments *moments = wants(learner) ? moments_of(learner) : NULL;
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
}

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
static double measure(const qkv_learner *learner, size_t tokens, const float *k, const float *v,
                      const qkv_coder *coder, const void *page, uint16_t head) {
  const size_t widest =
      learner->shape.key_dim > learner->shape.value_dim ? learner->shape.key_dim : learner->shape.value_dim;
  float *rows = malloc(QKV_PAGE_TOKENS * widest * sizeof *rows);
  if (rows == NULL) abort();
  double relative = 0;
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    const size_t dim = part == QKV_K ? learner->shape.key_dim : learner->shape.value_dim;
    double norm = 0;
    coder->codec->decode(coder, page, head, part, false, rows);
    const double error =
        squared_error((part == QKV_K ? k : v) + head * dim, rows, learner->shape.kv_heads * dim, tokens, dim, &norm);
    relative += norm > 0 ? error / norm / 2 : 0;
  }
  free(rows);
  return relative;
}

// Errors compare between pages of one kind only.
static uint32_t kind_of(const qkv_coder *coder) {
  return (uint32_t)coder->frame << 16 | (uint32_t)coder->tier_k << 8 | coder->tier_v;
}

static void note_error(qkv_learner *learner, const qkv_coder *coder, double error) {
  (void)pthread_mutex_lock(&learner->error_lock);
  if (learner->measures == 0) learner->measured_as = kind_of(coder);
  if (learner->measured_as != kind_of(coder)) {
    (void)pthread_mutex_unlock(&learner->error_lock);
    return;
  }
  learner->measures++;
  const double share = learner->measures < MEASURES_SETTLED ? 1.0 / (double)learner->measures : ERROR_DECAY;
  learner->error += share * (error - learner->error);
  if (learner->measures == MEASURES_SETTLED) learner->settled = learner->error;
  const bool drifted = learner->settled > 0 && learner->error > QKV_LEARNER_DRIFT * learner->settled;
  if (drifted) {
    learner->settled = 0;
    learner->measures = 0;
  }
  (void)pthread_mutex_unlock(&learner->error_lock);
  if (!drifted || atomic_load(&learner->fresh) || was_brought(learner)) return;
  forget(learner);
  atomic_store(&learner->fresh, true);
  atomic_store(&learner->due_at, learner->first);
}

void qkv_learner_page(qkv_learner *learner, uint32_t layer, uint64_t position, size_t tokens, const float *k,
                      const float *v, const qkv_coder *coder, const void *page) {
  assert(layer < learner->shape.layers && tokens >= 1);
  if (pthread_mutex_trylock(&learner->layers[layer].lock) == 0) {
    teach_rows(learner, layer, position, tokens, k, v);
    (void)pthread_mutex_unlock(&learner->layers[layer].lock);
  }
  if (was_brought(learner) && atomic_load_explicit(&learner->moments, memory_order_relaxed) != NULL) forget(learner);
  const uint64_t number = atomic_fetch_add_explicit(&learner->pages, 1, memory_order_relaxed);
  if (number % MEASURE_EVERY != 0) return;
  const uint16_t head = (uint16_t)(number / MEASURE_EVERY % learner->shape.kv_heads);
  note_error(learner, coder, measure(learner, tokens, k, v, coder, page, head));
}

size_t qkv_learner_wants_queries(qkv_learner *learner, uint32_t layer) {
  assert(layer < learner->shape.layers);
  if (!wants(learner)) return 0;
  const bool learning = atomic_load_explicit(&learner->fresh, memory_order_relaxed);
  const uint64_t attend = atomic_fetch_add_explicit(&learner->layers[layer].attends, 1, memory_order_relaxed);
  if (attend % (learning ? EVERY_LEARNING : EVERY_LATER) != 0) return 0;
  return learning ? QUERIES_LEARNING : QUERIES_LATER;
}

void qkv_learner_queries(qkv_learner *learner, uint32_t layer, uint64_t position, const float *q, bool before_rope) {
  assert(layer < learner->shape.layers);
  if (pthread_mutex_trylock(&learner->layers[layer].lock) != 0) return;
  qkv_moments *moments = wants(learner) ? moments_of(learner) : NULL;
  if (moments != NULL) qkv_moments_add_queries(moments, layer, position, 1, q, before_rope);
  (void)pthread_mutex_unlock(&learner->layers[layer].lock);
}

// ---- Learning ----

qkv_learner_stats qkv_learner_read(const qkv_learner *learner) {
  qkv_learner_stats stats = {.tokens = UINT64_MAX, .runs = atomic_load(&learner->runs)};
  for (uint32_t i = 0; i < learner->shape.layers; i++) {
    const uint64_t tokens = atomic_load_explicit(&learner->layers[i].tokens, memory_order_relaxed);
    if (learner->layers[i].teaches && tokens < stats.tokens) stats.tokens = tokens;
  }
  if (atomic_load_explicit(&learner->moments, memory_order_relaxed) != NULL) {
    stats.bytes = qkv_moments_bytes(&learner->shape);
  }
  pthread_mutex_t *lock = (pthread_mutex_t *)(uintptr_t)&learner->error_lock;
  (void)pthread_mutex_lock(lock);
  stats.error = learner->error;
  (void)pthread_mutex_unlock(lock);
  return stats;
}

bool qkv_learner_due(const qkv_learner *learner) {
  if (was_brought(learner) || atomic_load(&learner->stopped)) return false;
  return !atomic_load(&learner->running) && qkv_learner_read(learner).tokens >= atomic_load(&learner->due_at);
}

static void hold_layer(void *context, uint32_t layer, bool holds) {
  qkv_learner *learner = context;
  (void)(holds ? pthread_mutex_lock : pthread_mutex_unlock)(&learner->layers[layer].lock);
}

static void plan_next(qkv_learner *learner, uint64_t tokens, bool made) {
  const uint32_t runs = made ? atomic_fetch_add(&learner->runs, 1) + 1 : atomic_load(&learner->runs);
  uint64_t next = tokens * QKV_LEARNER_GROWTH;
  if (!made) next = tokens + learner->first;
  if (made && runs >= QKV_LEARNER_RUNS) next = UINT64_MAX;  // until a drift
  atomic_store(&learner->due_at, next);
  if (made) atomic_store(&learner->fresh, false);
  if (next == UINT64_MAX) forget(learner);
  (void)pthread_mutex_lock(&learner->error_lock);
  learner->settled = 0;
  learner->measures = 0;
  (void)pthread_mutex_unlock(&learner->error_lock);
}

bool qkv_learner_run(qkv_learner *learner, qkv_error *error) {
  bool running = false;
  if (!atomic_compare_exchange_strong(&learner->running, &running, true)) return false;
  const uint64_t tokens = qkv_learner_read(learner).tokens;
  const uint32_t replaced = qkv_calibration_slot_version(learner->slot);
  qkv_calibrate_options options = QKV_CALIBRATE_DEFAULTS;
  options.cancelled = &learner->stopped;
  options.hold = hold_layer;
  options.context = learner;
  qkv_calibration *calibration = NULL;
  const qkv_moments *moments = was_brought(learner) ? NULL : study(learner);
  if (moments == NULL) {
    atomic_store(&learner->running, false);
    return false;
  }
  const bool made = qkv_calibrate(moments, &options, &calibration, error) == QKV_OK;
  done(learner);
  const qkv_calibration *own = calibration;
  if (made) {
    atomic_store(&learner->before, atomic_load(&learner->version));
    atomic_store(&learner->version, qkv_calibration_version(own));
    qkv_calibration_slot_replace(learner->slot, replaced, own);  // unless one was brought meanwhile
  }
  qkv_calibration_unref(&own);
  plan_next(learner, tokens, made);
  atomic_store(&learner->running, false);
  return made;
}
