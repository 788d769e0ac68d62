#include "engine/cache/session.h"

#include <assert.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "engine/cache/layer_spill.h"
#include "engine/cache/session_internal.h"
#include "engine/cache/session_spill.h"

// `length` and `usage` are what the last append or truncation left, under a lock of their own that is held to copy
// them: whoever asks for a session's info never waits for one that runs.
typedef struct locked_layer {
  pthread_rwlock_t lock;
  _Atomic unsigned waiting;  // threads, for the lock
  qkv_layer layer;
  pthread_mutex_t info_lock;
  uint64_t length, durable;
  bool unsettled;
  _Atomic uint64_t pins;
  qkv_layer_usage usage;
} locked_layer;

struct qkv_session {
  qkv_session_config config;
  const qkv_model *model;
  pthread_mutex_t codings_lock;  // of the list
  qkv_coding **codings;          // all that pages are written with, and those of pages to come
  size_t coding_count;
  pthread_rwlock_t codings_use;  // read by who has a coder without having its layer; written to drop some. Never
                                 // waited for to be written, nor is a layer by who writes it
  qkv_arena *arena;              // this block is its, too
  uint64_t serial;
  _Atomic uint64_t references;
  int64_t created_unix_ms;
  _Atomic int64_t last_used_ms;
  _Atomic uint64_t next_layer;   // that a step of re-tiering begins with
  _Atomic uint32_t last_layer;   // that was appended to or read
  _Atomic uint32_t turns;        // times that the first layer came after the last one
  _Atomic uint64_t tokens_cold;  // of all layers
  _Atomic uint64_t ttl_ms;
  _Atomic bool pinned;    // by the owner
  locked_layer layers[];  // model->layers
};

static int64_t now_ms(clockid_t clock) {
  struct timespec now;
  (void)clock_gettime(clock, &now);
  return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

// The time of day is told and not counted with: it is set, forwards and back.
static void touch(qkv_session *session) {
  atomic_store_explicit(&session->last_used_ms, now_ms(CLOCK_MONOTONIC), memory_order_relaxed);
}

static int64_t idle_ms(const qkv_session *session) {
  return now_ms(CLOCK_MONOTONIC) - atomic_load_explicit(&session->last_used_ms, memory_order_relaxed);
}

static void touch_layer(qkv_session *session, uint32_t layer) {
  touch(session);
  const uint32_t before = atomic_exchange_explicit(&session->last_layer, layer, memory_order_relaxed);
  if (layer == 0 && before == session->model->layers - 1 && before > 0)
    (void)atomic_fetch_add_explicit(&session->turns, 1, memory_order_relaxed);
}

uint32_t qkv_session_turns(const qkv_session *session) {
  return atomic_load_explicit(&session->turns, memory_order_relaxed);
}

uint32_t qkv_session_last_layer(const qkv_session *session) {
  return atomic_load_explicit(&session->last_layer, memory_order_relaxed);
}

void qkv_session_touch(qkv_session *session) {
  touch(session);
}

void qkv_session_set_ttl(qkv_session *session, uint64_t ttl_ms) {
  atomic_store_explicit(&session->ttl_ms, ttl_ms, memory_order_relaxed);
}

void qkv_session_set_pinned(qkv_session *session, bool pinned) {
  atomic_store(&session->pinned, pinned);
}

bool qkv_session_expired(const qkv_session *session) {
  const uint64_t ttl = atomic_load_explicit(&session->ttl_ms, memory_order_relaxed);
  const int64_t idle = idle_ms(session);
  return ttl > 0 && idle >= 0 && (uint64_t)idle >= ttl;
}

static void lock_to_read(locked_layer *layer) {
  if (pthread_rwlock_tryrdlock(&layer->lock) == 0) return;
  atomic_fetch_add_explicit(&layer->waiting, 1, memory_order_relaxed);
  int failed = pthread_rwlock_rdlock(&layer->lock);
  atomic_fetch_sub_explicit(&layer->waiting, 1, memory_order_relaxed);
  assert(failed == 0);
}

static void lock_to_write(locked_layer *layer) {
  if (pthread_rwlock_trywrlock(&layer->lock) == 0) return;
  atomic_fetch_add_explicit(&layer->waiting, 1, memory_order_relaxed);
  int failed = pthread_rwlock_wrlock(&layer->lock);
  atomic_fetch_sub_explicit(&layer->waiting, 1, memory_order_relaxed);
  assert(failed == 0);
}

static void unlock(locked_layer *layer) {
  int failed = pthread_rwlock_unlock(&layer->lock);
  assert(failed == 0);
}

static void lock_info(locked_layer *layer) {
  int failed = pthread_mutex_lock(&layer->info_lock);
  assert(failed == 0);
}

static void unlock_info(locked_layer *layer) {
  int failed = pthread_mutex_unlock(&layer->info_lock);
  assert(failed == 0);
}

// The layer is locked, or nobody else's yet.
static void publish(qkv_session *session, locked_layer *layer) {
  qkv_layer_usage usage = qkv_layer_read_usage(&layer->layer);
  lock_info(layer);
  // What was there before is taken off: a difference, which may be below 0.
  atomic_fetch_add_explicit(&session->tokens_cold, usage.tokens_cold - layer->usage.tokens_cold,
                            memory_order_relaxed);
  layer->length = layer->layer.length;
  layer->durable = qkv_layer_durable(&layer->layer);
  layer->unsettled = layer->layer.config.backing != NULL && layer->layer.settled < layer->layer.page_count;
  layer->usage = usage;
  unlock_info(layer);
}

static size_t session_bytes(const qkv_model *model) {
  return sizeof(qkv_session) + model->layers * sizeof(locked_layer);
}

// Whether the layer's pages are judged.
static bool has_contract(const qkv_session_config *config, const qkv_model *model, uint32_t layer) {
  return config->max_attention_error > 0 &&
         !qkv_codec_is_exact(qkv_model_policy(model, layer, &config->policy).codec);
}

// All that a session takes before it has rows.
static uint64_t empty_cost(const qkv_session_config *config, const qkv_model *model) {
  uint64_t cost = qkv_arena_cost(session_bytes(model));
  for (uint32_t i = 0; i < model->layers; i++) {
    if (has_contract(config, model, i)) cost += qkv_arena_cost(qkv_quality_bytes(model));
  }
  return cost;
}

static qkv_quality *create_quality(const qkv_session *session, uint32_t layer) {
  if (!has_contract(&session->config, session->model, layer)) return NULL;
  void *block = qkv_arena_alloc(session->arena, qkv_quality_bytes(session->model));
  return qkv_quality_init(block, session->model, layer, session->config.max_attention_error);
}

static void destroy_quality(const qkv_session *session, qkv_quality *quality) {
  if (quality == NULL) return;
  qkv_quality_deinit(quality);
  qkv_arena_free(session->arena, quality, qkv_quality_bytes(session->model));
}

// A writer that waits goes before readers that come later: glibc's default kind would let readers that follow
// each other closely keep an append out for ever.
static void init_lock(pthread_rwlock_t *lock) {
  pthread_rwlockattr_t kind;
  int failed = pthread_rwlockattr_init(&kind);
  failed |= pthread_rwlockattr_setkind_np(&kind, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
  failed |= pthread_rwlock_init(lock, &kind);
  assert(failed == 0);
  (void)pthread_rwlockattr_destroy(&kind);
}

const qkv_coding *qkvi_session_coding(qkv_session *session, const qkv_calibration *calibration) {
  qkv_coding *coding = qkv_coding_get(session->model, &session->config.policy, session->config.purpose, calibration);
  (void)pthread_mutex_lock(&session->codings_lock);
  size_t i = 0;
  while (i < session->coding_count && session->codings[i] != coding) i++;
  if (i < session->coding_count) {
    (void)pthread_mutex_unlock(&session->codings_lock);
    qkv_coding *extra = coding;  // the list holds one reference already
    qkv_coding_unref(&extra);
    return coding;
  }
  session->codings = realloc((void *)session->codings, (session->coding_count + 1) * sizeof *session->codings);
  if (session->codings == NULL) abort();
  session->codings[session->coding_count++] = coding;
  (void)pthread_mutex_unlock(&session->codings_lock);
  return coding;
}

size_t qkv_session_calibrations(qkv_session *session, size_t first, const qkv_calibration **out, size_t max) {
  size_t count = 0, passed = 0;
  (void)pthread_mutex_lock(&session->codings_lock);
  for (size_t i = 0; i < session->coding_count && count < max; i++) {
    const qkv_calibration *calibration = qkv_coding_calibration(session->codings[i]);
    if (calibration != NULL && passed++ >= first) out[count++] = qkv_calibration_ref(calibration);
  }
  (void)pthread_mutex_unlock(&session->codings_lock);
  return count;
}

// The coding for pages to come: another one where the model's calibration has changed.
static const qkv_coding *current_coding(qkv_session *session) {
  const qkv_model *model = session->model;
  const qkv_calibration *calibration =
      model->calibration != NULL ? qkv_calibration_slot_get(model->calibration) : NULL;
  const qkv_coding *coding = qkvi_session_coding(session, calibration);
  qkv_calibration_unref(&calibration);
  return coding;
}

// The layer is locked to be written.
static bool renew_coder(qkv_session *session, uint32_t layer) {
  qkv_layer *renewed = &session->layers[layer].layer;
  const qkv_calibration_slot *slot = session->model->calibration;
  if (slot == NULL || qkv_calibration_slot_version(slot) == renewed->coder->calibration) return false;
  qkvi_session_use_codings(session);
  renewed->coder = qkv_coding_layer(current_coding(session), layer);
  qkvi_session_codings_used(session);
  return true;
}

void qkvi_session_use_codings(qkv_session *session) {
  int failed = pthread_rwlock_rdlock(&session->codings_use);
  assert(failed == 0);
}

void qkvi_session_codings_used(qkv_session *session) {
  int failed = pthread_rwlock_unlock(&session->codings_use);
  assert(failed == 0);
}

static void mark_coder(const qkv_session *session, const qkv_coder *coder, bool *used) {
  for (size_t i = 0; i < session->coding_count; i++) used[i] |= qkv_coding_has(session->codings[i], coder);
}

// False where a layer is in use.
static bool mark_used(qkv_session *session, bool *used) {
  for (uint32_t i = 0; i < session->model->layers; i++) {
    locked_layer *locked = &session->layers[i];
    if (pthread_rwlock_tryrdlock(&locked->lock) != 0) return false;
    const qkv_coder *last = locked->layer.coder;
    mark_coder(session, last, used);
    for (size_t p = 0; p < locked->layer.page_count; p++) {
      if (locked->layer.pages[p].coder == last) continue;
      last = locked->layer.pages[p].coder;
      mark_coder(session, last, used);
    }
    unlock(locked);
  }
  return true;
}

// Codings that nothing is coded by any more go, and with the last session that has one a calibration that has been
// replaced. Now or another time: nobody waits.
static void drop_unused(qkv_session *session) {
  if (pthread_rwlock_trywrlock(&session->codings_use) != 0) return;
  (void)pthread_mutex_lock(&session->codings_lock);
  bool *used = calloc(session->coding_count + 1, sizeof *used);
  if (used == NULL) abort();
  if (session->coding_count > 1 && mark_used(session, used)) {
    size_t kept = 0;
    for (size_t i = 0; i < session->coding_count; i++) {
      if (used[i]) {
        session->codings[kept++] = session->codings[i];
      } else {
        qkv_coding_unref(&session->codings[i]);
      }
    }
    session->coding_count = kept;
  }
  free(used);
  (void)pthread_mutex_unlock(&session->codings_lock);
  qkvi_session_codings_used(session);
}

static void drop_codings(qkv_session *session) {
  for (size_t i = 0; i < session->coding_count; i++) qkv_coding_unref(&session->codings[i]);
  free((void *)session->codings);
  (void)pthread_mutex_destroy(&session->codings_lock);
  (void)pthread_rwlock_destroy(&session->codings_use);
}

qkv_status qkv_session_create(const qkv_session_config *config, const qkv_model *model, qkv_arena *arena,
                              qkv_session **out, qkv_error *error) {
  static _Atomic uint64_t serials;
  QKV_TRY(qkv_arena_reserve_in(arena, config->room, empty_cost(config, model), error));
  qkv_session *session = qkv_arena_alloc(arena, session_bytes(model));
  *session = (qkv_session){.config = *config,
                           .model = model,
                           .arena = arena,
                           .serial = atomic_fetch_add_explicit(&serials, 1, memory_order_relaxed),
                           .created_unix_ms = now_ms(CLOCK_REALTIME)};
  session->config.room = NULL;
  atomic_init(&session->references, 1);
  atomic_init(&session->last_used_ms, now_ms(CLOCK_MONOTONIC));
  atomic_init(&session->next_layer, 0);
  atomic_init(&session->last_layer, 0);
  atomic_init(&session->turns, 0);
  atomic_init(&session->tokens_cold, 0);
  atomic_init(&session->pinned, config->pinned);
  atomic_init(&session->ttl_ms, config->ttl_ms);
  int failed = pthread_mutex_init(&session->codings_lock, NULL);
  failed |= pthread_rwlock_init(&session->codings_use, NULL);
  assert(failed == 0);
  if (model->learner != NULL && config->policy.learn) {
    qkv_learner_note_kind(model->learner, &config->policy, (int)config->purpose);
  }
  const qkv_coding *coding = current_coding(session);
  for (uint32_t i = 0; i < model->layers; i++) {
    init_lock(&session->layers[i].lock);
    atomic_init(&session->layers[i].pins, 0);
    session->layers[i].usage = (qkv_layer_usage){0};
    failed = pthread_mutex_init(&session->layers[i].info_lock, NULL);
    assert(failed == 0);
    qkv_layer_init(&session->layers[i].layer,
                   &(qkv_layer_config){.model = model,
                                       .policy = qkv_model_policy(model, i, &config->policy),
                                       .layer = i,
                                       .first_position = config->first_position,
                                       .arena = arena,
                                       .ema = config->ema,
                                       .keep_full = config->keep_full,
                                       .quality = create_quality(session, i),
                                       .backing = config->backing,
                                       .session = config->id,
                                       .pool = config->pool},
                   qkv_coding_layer(coding, i));
    atomic_init(&session->layers[i].waiting, 0);
    session->layers[i].layer.waiting = &session->layers[i].waiting;
    publish(session, &session->layers[i]);
  }
  *out = session;
  return QKV_OK;
}

qkv_session *qkv_session_ref(qkv_session *session) {
  uint64_t before = atomic_fetch_add_explicit(&session->references, 1, memory_order_relaxed);
  assert(before > 0);
  return session;
}

void qkv_session_unref(qkv_session **session) {
  qkv_session *left = *session;
  if (left == NULL) return;
  *session = NULL;
  // What every user did before it let go happens before the last one frees.
  uint64_t before = atomic_fetch_sub_explicit(&left->references, 1, memory_order_acq_rel);
  assert(before > 0);
  if (before > 1) return;
  for (uint32_t i = 0; i < left->model->layers; i++) {
    qkv_quality *quality = left->layers[i].layer.config.quality;
    qkv_layer_deinit(&left->layers[i].layer);
    destroy_quality(left, quality);
    (void)pthread_mutex_destroy(&left->layers[i].info_lock);
    (void)pthread_rwlock_destroy(&left->layers[i].lock);
  }
  drop_codings(left);
  qkv_arena_free(left->arena, left, session_bytes(left->model));
}

const qkv_model *qkv_session_model(const qkv_session *session) {
  return session->model;
}

uint64_t qkv_session_serial(const qkv_session *session) {
  return session->serial;
}

const char *qkv_session_name(const qkv_session *session) {
  return session->config.name;
}

static qkv_status check_layer(const qkv_session *session, uint32_t layer, qkv_error *error) {
  if (layer < session->model->layers) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "layer is %" PRIu32 ", the model %s has %" PRIu32 " layers", layer,
                  session->model->name, session->model->layers);
}

// The write lock is held, and given back.
static qkv_status append_locked(qkv_session *session, uint32_t layer, uint64_t position, const qkv_tensor *k,
                                const qkv_tensor *v, bool before_rope, uint64_t *appended, uint64_t *length,
                                qkv_error *error) {
  locked_layer *locked = &session->layers[layer];
  const bool renewed = renew_coder(session, layer);
  qkv_status status = qkv_layer_append(&locked->layer, position, k, v, before_rope, appended, error);
  *length = locked->layer.length;
  locked->layer.room = NULL;
  (void)qkv_layer_save(&locked->layer);  // what finds no room is given again when there is some (session_spill.h)
  publish(session, locked);
  unlock(locked);
  if (renewed) drop_unused(session);
  return status;
}

qkv_status qkv_session_append(qkv_session *session, uint32_t layer, uint64_t position, const qkv_tensor *k,
                              const qkv_tensor *v, bool before_rope, uint64_t *appended, uint64_t *length,
                              qkv_error *error) {
  return qkv_session_append_in(session, layer, NULL, position, k, v, before_rope, appended, length, error);
}

qkv_status qkv_session_append_in(qkv_session *session, uint32_t layer, uint64_t *room, uint64_t position,
                                 const qkv_tensor *k, const qkv_tensor *v, bool before_rope, uint64_t *appended,
                                 uint64_t *length, qkv_error *error) {
  *appended = *length = 0;
  QKV_TRY(check_layer(session, layer, error));
  touch_layer(session, layer);
  lock_to_write(&session->layers[layer]);
  session->layers[layer].layer.room = room;
  return append_locked(session, layer, position, k, v, before_rope, appended, length, error);
}

qkv_status qkv_session_try_append(qkv_session *session, uint32_t layer, uint64_t position, const qkv_tensor *k,
                                  const qkv_tensor *v, bool before_rope, uint64_t *appended, uint64_t *length,
                                  qkv_error *error) {
  *appended = *length = 0;
  QKV_TRY(check_layer(session, layer, error));
  touch_layer(session, layer);
  if (pthread_rwlock_trywrlock(&session->layers[layer].lock) != 0) return QKV_UNAVAILABLE;
  return append_locked(session, layer, position, k, v, before_rope, appended, length, error);
}

qkv_status qkv_session_read(qkv_session *session, uint32_t layer, const qkv_layer **out, qkv_error *error) {
  QKV_TRY(check_layer(session, layer, error));
  touch_layer(session, layer);
  lock_to_read(&session->layers[layer]);
  *out = &session->layers[layer].layer;
  return QKV_OK;
}

qkv_status qkv_session_try_read(qkv_session *session, uint32_t layer, const qkv_layer **out, qkv_error *error) {
  QKV_TRY(check_layer(session, layer, error));
  touch_layer(session, layer);
  if (pthread_rwlock_tryrdlock(&session->layers[layer].lock) != 0) return QKV_UNAVAILABLE;
  *out = &session->layers[layer].layer;
  return QKV_OK;
}

void qkv_session_read_done(qkv_session *session, uint32_t layer) {
  assert(layer < session->model->layers);
  unlock(&session->layers[layer]);
}

const qkv_layer *qkvi_session_look(qkv_session *session, uint32_t layer) {
  assert(layer < session->model->layers);
  lock_to_read(&session->layers[layer]);
  return &session->layers[layer].layer;
}

qkv_layer *qkvi_session_change(qkv_session *session, uint32_t layer) {
  assert(layer < session->model->layers);
  lock_to_write(&session->layers[layer]);
  return &session->layers[layer].layer;
}

void qkvi_session_changed(qkv_session *session, uint32_t layer) {
  publish(session, &session->layers[layer]);
  unlock(&session->layers[layer]);
}

qkv_layer *qkvi_session_try_change(qkv_session *session, uint32_t layer) {
  assert(layer < session->model->layers);
  if (pthread_rwlock_trywrlock(&session->layers[layer].lock) != 0) return NULL;
  return &session->layers[layer].layer;
}

bool qkv_session_has_cold(const qkv_session *session) {
  return atomic_load_explicit(&session->tokens_cold, memory_order_relaxed) > 0;
}

uint64_t qkv_session_cold(qkv_session *session, uint32_t layer, uint64_t *bytes) {
  assert(layer < session->model->layers);
  lock_info(&session->layers[layer]);
  const uint64_t tokens = session->layers[layer].usage.tokens_cold;
  *bytes = session->layers[layer].usage.bytes_stored;
  unlock_info(&session->layers[layer]);
  return tokens;
}

bool qkvi_session_unsettled(qkv_session *session, uint32_t layer) {
  lock_info(&session->layers[layer]);
  const bool unsettled = session->layers[layer].unsettled;
  unlock_info(&session->layers[layer]);
  return unsettled;
}

const qkv_session_config *qkv_session_config_of(const qkv_session *session) {
  return &session->config;
}

_Atomic uint64_t *qkvi_session_pins(qkv_session *session, uint32_t layer) {
  assert(layer < session->model->layers);
  return &session->layers[layer].pins;
}

bool qkvi_session_stays(qkv_session *session, uint32_t layer) {
  return atomic_load(&session->pinned) || atomic_load(qkvi_session_pins(session, layer)) > 0;
}

uint32_t qkvi_session_next_layer(qkv_session *session) {
  return (uint32_t)(atomic_fetch_add_explicit(&session->next_layer, 1, memory_order_relaxed) %
                    session->model->layers);
}

static void truncate_layer(qkv_session *session, uint32_t layer, uint64_t position) {
  lock_to_write(&session->layers[layer]);
  qkv_layer_truncate(&session->layers[layer].layer, position);
  publish(session, &session->layers[layer]);
  unlock(&session->layers[layer]);
}

qkv_status qkv_session_truncate(qkv_session *session, uint64_t position, const uint32_t *layers, size_t layer_count,
                                qkv_error *error) {
  for (size_t i = 0; i < layer_count; i++) QKV_TRY(check_layer(session, layers[i], error));
  touch(session);
  if (layer_count == 0) {
    for (uint32_t i = 0; i < session->model->layers; i++) truncate_layer(session, i, position);
  }
  for (size_t i = 0; i < layer_count; i++) truncate_layer(session, layers[i], position);
  drop_unused(session);
  return QKV_OK;
}

static void add_usage(qkv_layer_usage *sum, const qkv_layer_usage *usage) {
  sum->tokens_coded += usage->tokens_coded;
  sum->tokens_exact += usage->tokens_exact;
  sum->bytes_coded += usage->bytes_coded;
  sum->bytes_exact += usage->bytes_exact;
  sum->bytes_beside += usage->bytes_beside;
  sum->tokens_cold += usage->tokens_cold;
  sum->bytes_stored += usage->bytes_stored;
  sum->quality.pages += usage->quality.pages;
  sum->quality.missed += usage->quality.missed;
  sum->quality.squares += usage->quality.squares;
  sum->quality.shares += usage->quality.shares;
  sum->watch.coded += usage->watch.coded;
  sum->watch.data_free += usage->watch.data_free;
  sum->watch.measures += usage->watch.measures;
}

void qkv_session_read_info(qkv_session *session, qkv_session_info *info, uint64_t *lengths) {
  const int64_t used_unix_ms = now_ms(CLOCK_REALTIME) - idle_ms(session), created = session->created_unix_ms;
  *info = (qkv_session_info){.config = session->config,
                             .model = session->model,
                             .created_unix_ms = created,
                             .last_used_unix_ms = used_unix_ms > created ? used_unix_ms : created,
                             .last_used_ms = atomic_load_explicit(&session->last_used_ms, memory_order_relaxed)};
  info->config.ttl_ms = atomic_load_explicit(&session->ttl_ms, memory_order_relaxed);
  info->config.pinned = atomic_load_explicit(&session->pinned, memory_order_relaxed);
  for (uint32_t i = 0; i < session->model->layers; i++) {
    lock_info(&session->layers[i]);
    if (lengths != NULL) lengths[i] = session->layers[i].length;
    add_usage(&info->usage, &session->layers[i].usage);
    unlock_info(&session->layers[i]);
  }
}

void qkv_session_read_durable(qkv_session *session, uint64_t *durable) {
  for (uint32_t i = 0; i < session->model->layers; i++) {
    lock_info(&session->layers[i]);
    durable[i] = session->layers[i].durable;
    unlock_info(&session->layers[i]);
  }
}

bool qkv_session_is_durable(qkv_session *session, uint32_t layer, uint64_t end) {
  assert(layer < session->model->layers);
  lock_info(&session->layers[layer]);
  const bool durable = !session->layers[layer].unsettled || session->layers[layer].durable >= end;
  unlock_info(&session->layers[layer]);
  return durable;
}
