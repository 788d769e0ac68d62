#include "engine/cache/session.h"

#include <assert.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/cache/layer_internal.h"
#include "engine/cache/layer_spill.h"
#include "engine/cache/session_fold.h"
#include "engine/cache/session_internal.h"
#include "engine/cache/session_share.h"
#include "engine/cache/session_slots.h"
#include "engine/cache/session_spill.h"
#include "engine/cache/session_state.h"

bool qkvi_session_has_layers(const qkv_session *session) {
  const session_working *working = qkvi_working(session);
  return working != NULL && atomic_load(&working->made) != NULL;
}

// Those of a folded session are there before it is said not to be folded any more.
bool qkvi_session_is_new(const qkv_session *session) {
  return !qkvi_session_has_layers(session) && !qkv_session_is_folded(session) && !qkvi_session_has_layers(session);
}

bool qkvi_session_needs_layers(qkv_session *session) {
  if (qkvi_session_has_layers(session)) return true;
  return !qkvi_session_is_new(session) && qkvi_session_make_layers(session, NULL, NULL) == QKV_OK;
}

static int64_t now_ms(clockid_t clock) {
  struct timespec now;
  (void)clock_gettime(clock, &now);
  return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

// Where it has something for them; what has no backing does not leave memory.
static void list_session(qkv_session *session, bool coded, bool exact, bool unsettled, bool cold) {
  qkv_recency *recency = session->kind->config.recency;
  if (coded) qkv_recency_note(recency, QKV_RECENCY_AIMED, session);
  if (coded) qkv_recency_note(recency, QKV_RECENCY_DEMOTABLE, session);
  if (session->kind->config.backing == NULL) return;
  if (coded) qkv_recency_note(recency, QKV_RECENCY_CODED, session);
  if (exact) qkv_recency_note(recency, QKV_RECENCY_EXACT, session);
  if (unsettled) qkv_recency_note(recency, QKV_RECENCY_UNSETTLED, session);
  if (cold) qkv_recency_note(recency, QKV_RECENCY_SUNK, session);
}

// The time of day is told and not counted with: it is set, forwards and back. What is known of tiers is reset after
// that: a thread that sets it reads the time afterwards, so one of the two sees the other.
void qkv_session_touch(qkv_session *session) {
  atomic_store(&session->last_used_ms, now_ms(CLOCK_MONOTONIC));
  session_working *working = qkvi_working(session);
  if (working == NULL || (!atomic_load(&working->tiers.settled) && !atomic_load(&working->tiers.lowest))) return;
  atomic_store(&working->tiers.settled, false);
  atomic_store(&working->tiers.lowest, false);
  qkv_recency_note(session->kind->config.recency, QKV_RECENCY_AIMED, session);
  qkv_recency_note(session->kind->config.recency, QKV_RECENCY_DEMOTABLE, session);
}

static int64_t idle_ms(const qkv_session *session) {
  return now_ms(CLOCK_MONOTONIC) - atomic_load_explicit(&session->last_used_ms, memory_order_relaxed);
}

void qkvi_session_touch_layer(qkv_session *session, uint32_t layer) {
  qkv_session_touch(session);
  session_working *working = qkvi_working(session);
  const uint32_t before = atomic_exchange_explicit(&working->last_layer, layer, memory_order_relaxed);
  if (layer == 0 && before == session->kind->model->layers - 1 && before > 0)
    (void)atomic_fetch_add_explicit(&working->turns, 1, memory_order_relaxed);
}

uint32_t qkv_session_turns(const qkv_session *session) {
  const session_working *working = qkvi_working(session);
  return working == NULL ? 0 : atomic_load_explicit(&working->turns, memory_order_relaxed);
}

uint32_t qkv_session_last_layer(const qkv_session *session) {
  const session_working *working = qkvi_working(session);
  return working == NULL ? 0 : atomic_load_explicit(&working->last_layer, memory_order_relaxed);
}

int64_t qkv_session_last_used_ms(const qkv_session *session) {
  return atomic_load_explicit(&session->last_used_ms, memory_order_relaxed);
}

void qkv_session_set_ttl(qkv_session *session, uint64_t ttl_ms) {
  atomic_store_explicit(&session->ttl_ms, ttl_ms, memory_order_relaxed);
  qkv_recency_move(session->kind->config.recency, QKV_RECENCY_EXPIRING, session);
}

void qkv_session_set_pinned(qkv_session *session, bool pinned) {
  atomic_store(&session->pinned, pinned);
  for (uint32_t i = 0; i < session->kind->model->layers; i++) qkvi_session_keep(session, i);
  list_session(session, true, true, false, true);
  qkv_recency_note_owned(session->kind->config.recency, session);
}

bool qkv_session_may_go(const qkv_session *session) {
  return session->kind->config.evictable && !atomic_load(&session->pinned) && !qkv_session_is_staged(session);
}

bool qkv_session_is_staged(const qkv_session *session) {
  return atomic_load_explicit(&session->staged, memory_order_acquire);
}

void qkv_session_unstage(qkv_session *session) {
  atomic_store_explicit(&session->staged, false, memory_order_release);
  qkv_recency_note_owned(session->kind->config.recency, session);
}

void qkv_session_set_whole(qkv_session *session, uint64_t whole) {
  atomic_store_explicit(&session->whole, whole, memory_order_relaxed);
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

// While a layer is locked its pages stay in memory. `used_ms` 0: it is no use of the session.
static const qkv_layer *begin_read(locked_layer *layer, int64_t used_ms) {
  qkvi_layer_pin(&layer->layer, used_ms);
  return &layer->layer;
}

static void end_read(locked_layer *layer) {
  qkvi_layer_unpin(&layer->layer);
  unlock(layer);
}

static qkv_layer *begin_write(locked_layer *layer, int64_t used_ms) {
  qkvi_layer_pin(&layer->layer, used_ms);
  layer->layer.pinned = true;
  return &layer->layer;
}

static void end_write(locked_layer *layer) {
  layer->layer.pinned = false;
  qkvi_layer_unpin(&layer->layer);
  unlock(layer);
}

// A range that is added later is this session's alone, and is told when it is shared.
void qkvi_session_keep_ranges(qkv_session *session, uint32_t layer) {
  locked_layer *locked = layer_at(session, layer);
  qkvi_session_lock_info(locked);
  qkvi_layer_keep(&locked->layer, qkvi_session_stays(session, layer));
  qkvi_session_unlock_info(locked);
}

void qkvi_session_keep(qkv_session *session, uint32_t layer) {
  if (!qkvi_session_has_layers(session)) return;
  (void)qkvi_session_look(session, layer);
  qkvi_session_keep_ranges(session, layer);
  qkv_session_read_done(session, layer);
}

static uint64_t kept_bytes(const qkv_layer_usage *usage) {
  return usage->bytes_coded - usage->bytes_shared + usage->bytes_exact + usage->bytes_overhead;
}

// What was there before is taken off: a difference, which may be below 0.
static void add_difference(_Atomic uint64_t *sum, uint64_t now, uint64_t before) {
  if (now != before) (void)atomic_fetch_add(sum, now - before);
}

// That the layer's coded pages in memory code.
static uint64_t coordinates_of(const qkv_model *model, const qkv_layer_usage *usage) {
  return (usage->tokens_coded - usage->tokens_cold) * model->kv_heads * (model->key_dim + model->value_dim);
}

// For all sessions, as for this one.
static void publish_sums(const qkv_session *session, const qkv_layer_usage *now, const qkv_layer_usage *before) {
  const qkv_recency_sums by = {
      .bytes = now->bytes_coded - before->bytes_coded,
      .coordinates = coordinates_of(session->kind->model, now) - coordinates_of(session->kind->model, before)};
  if (session->kind->config.recency != NULL && (by.bytes | by.coordinates) != 0)
    qkv_recency_add_sums(session->kind->config.recency, &by);
}

// The layer is locked, or no other thread has it yet. Of several threads that read it the last one to come here has
// seen what all of them have done to its pages.
void qkvi_session_publish(qkv_session *session, session_working *working, locked_layer *layer) {
  qkvi_session_lock_info(layer);
  const qkv_layer_usage usage = qkv_layer_read_usage(&layer->layer);
  const qkv_layer_usage before = layer->usage;
  add_difference(&working->tokens_cold, usage.tokens_cold, before.tokens_cold);
  add_difference(&working->bytes_coded, usage.bytes_coded, before.bytes_coded);
  add_difference(&working->bytes_shared, usage.bytes_shared, before.bytes_shared);
  publish_sums(session, &usage, &before);
  add_difference(&working->bytes_exact, usage.bytes_exact, before.bytes_exact);
  add_difference(&working->bytes_kept, kept_bytes(&usage), kept_bytes(&before));
  add_difference(&working->bytes_stored, usage.bytes_stored, before.bytes_stored);
  atomic_store(qkvi_length_of(layer), layer->layer.length);
  layer->durable = qkv_layer_durable(&layer->layer);
  const bool unsettled = layer->layer.config.backing != NULL && !qkv_layer_is_settled(&layer->layer);
  const bool newly = unsettled && !layer->unsettled;
  atomic_fetch_add(&working->unsettled, (uint32_t)unsettled - (uint32_t)layer->unsettled);
  layer->unsettled = unsettled;
  layer->usage = usage;
  const bool settled = !unsettled && atomic_load(&working->unsettled) == 0;
  qkvi_session_unlock_info(layer);
  list_session(session, usage.bytes_coded != before.bytes_coded, usage.bytes_exact != before.bytes_exact, newly,
               settled && usage.tokens_cold + usage.bytes_shared > 0);
}

static void publish(qkv_session *session, locked_layer *layer) {
  qkvi_session_publish(session, qkvi_working(session), layer);
}

static const char *text_of(const char *text) {
  return text == NULL ? "" : text;
}

static size_t layers_bytes(const qkv_model *model) {
  return sizeof(session_layers) + model->layers * (sizeof(locked_layer) + sizeof(_Atomic uint64_t));
}

// Whether the tiers of the layer's pages are selected by a quality contract.
static bool has_contract(const qkv_session_config *config, const qkv_model *model, uint32_t layer) {
  return config->max_attention_error > 0 &&
         !qkv_codec_is_exact(qkv_model_policy(model, layer, &config->policy).codec);
}

static uint64_t layers_cost(const qkv_session_config *config, const qkv_model *model) {
  uint64_t cost = qkv_arena_cost(layers_bytes(model));
  for (uint32_t i = 0; i < model->layers; i++) {
    if (has_contract(config, model, i)) cost += qkv_arena_cost(qkv_quality_bytes(model));
  }
  return cost;
}

uint64_t qkvi_session_layers_cost(const qkv_session *session) {
  return layers_cost(&session->kind->config, session->kind->model);
}

uint64_t qkv_session_fork_cost(const qkv_session_config *config, const qkv_model *model) {
  return qkv_arena_cost(qkvi_session_bytes(strlen(text_of(config->name)), true)) +
         qkv_arena_cost(qkvi_working_bytes(model)) + qkvi_session_kind_cost(config) + layers_cost(config, model);
}

static qkv_quality *create_quality(const qkv_session *session, uint32_t layer) {
  if (!has_contract(&session->kind->config, session->kind->model, layer)) return NULL;
  void *block = qkv_arena_alloc(session->kind->arena, qkv_quality_bytes(session->kind->model));
  return qkv_quality_init(block, session->kind->model, layer, session->kind->config.max_attention_error);
}

static void destroy_quality(const qkv_session *session, qkv_quality *quality) {
  if (quality == NULL) return;
  qkv_quality_deinit(quality);
  qkv_arena_free(session->kind->arena, quality, qkv_quality_bytes(session->kind->model));
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

// Behind the name of a session that is salted.
static void *salt_of(qkv_session *session) {
  return (uint8_t *)session + qkvi_session_bytes_of(session) - sizeof(qkv_prefix_hash);
}

// Serials of sessions without a backing, whose number is the serial of others.
#define OWN_SERIAL (UINT64_C(1) << 63)

qkv_status qkv_session_create(const qkv_session_config *config, const qkv_model *model, qkv_arena *arena,
                              qkv_session **out, qkv_error *error) {
  static _Atomic uint64_t serials;
  const char *name = text_of(config->name);
  const qkvi_session_kind *kind = NULL;
  QKV_TRY(qkvi_session_kind_get(config, model, arena, &kind, error));
  const bool salted = !qkv_prefix_hash_equal(&config->root, &kind->root);
  const size_t bytes = qkvi_session_bytes(strlen(name), salted);
  const uint64_t cost = qkv_arena_cost(bytes) + qkv_arena_cost(qkvi_working_bytes(model));
  const qkv_status status = qkv_arena_reserve_in(arena, config->headroom, cost, error);
  if (status != QKV_OK) {
    qkvi_session_kind_unref(&kind);
    return status;
  }
  uint8_t slot;
  qkv_arena_spend(arena, bytes);
  qkv_session *session = qkvi_session_slot_take(arena, bytes, &slot);
  const uint64_t created = (uint64_t)now_ms(CLOCK_REALTIME);
  *session = (qkv_session){.kind = kind,
                           .id = config->id,
                           .created_low = (uint32_t)created,
                           .created_high = (uint16_t)(created >> 32),
                           .slot = slot,
                           .salted = salted};
  memcpy(session->name, name, strlen(name) + 1);
  if (salted) memcpy(salt_of(session), &config->root, sizeof config->root);
  if (qkv_account_of(arena) != NULL) (void)qkv_account_ref(qkv_account_of(arena));
  if (config->device != NULL) atomic_fetch_add_explicit(&config->device->sessions, 1, memory_order_relaxed);
  atomic_init(&session->references, 1);
  atomic_init(&session->last_used_ms, now_ms(CLOCK_MONOTONIC));
  atomic_init(&session->pinned, config->pinned);
  atomic_init(&session->staged, config->staged);
  atomic_init(&session->whole, config->whole);
  atomic_init(&session->ttl_ms, config->ttl_ms);
  atomic_init(&session->fold_wanted, false);
  session_working *working = qkvi_session_new_working(session);
  working->serial = atomic_fetch_add_explicit(&serials, 1, memory_order_relaxed) | OWN_SERIAL;
  atomic_init(&session->state, (uintptr_t)working);
  if (model->learner != NULL && config->policy.learn)
    qkv_learner_note_kind(model->learner, &config->policy, (int)config->purpose);
  *out = session;
  return QKV_OK;
}

// ---- Layers ----

static void init_layer(qkv_session *session, session_working *working, uint32_t index, qkv_quality *quality,
                       qkv_layer *layer) {
  const qkv_session_config *config = &session->kind->config;
  const qkv_model *model = session->kind->model;
  qkv_layer_init(layer,
                 &(qkv_layer_config){.model = model,
                                     .policy = qkv_model_policy(model, index, &config->policy),
                                     .layer = index,
                                     .first_position = config->first_position,
                                     .arena = session->kind->arena,
                                     .ema = config->ema,
                                     .keep_full = config->keep_full,
                                     .quality = quality,
                                     .backing = session->detached ? NULL : config->backing,
                                     .session = session->id,
                                     .tokens = index == model->layers - 1 ? &working->tokens : NULL,
                                     .pool = config->pool,
                                     .device = config->device},
                 qkv_coding_layer(qkvi_working_current_coding(session->kind, working), index));
}

void qkvi_session_init_layer(qkv_session *session, uint32_t index, qkv_layer *layer) {
  init_layer(session, qkvi_working(session), index, NULL, layer);
}

static void init_locked(qkv_session *session, session_working *working, uint32_t index, locked_layer *locked) {
  *locked = (locked_layer){.usage = {0}};
  init_lock(&locked->lock);
  const int failed = pthread_mutex_init(&locked->info_lock, NULL) | pthread_mutex_init(&locked->rows, NULL);
  assert(failed == 0);
  (void)failed;
  init_layer(session, working, index, create_quality(session, index), &locked->layer);
  atomic_init(&locked->waiting, 0);
  locked->layer.waiting = &locked->waiting;
  atomic_init(qkvi_length_of(locked), 0);
}

session_layers *qkvi_session_new_layers(qkv_session *session, session_working *working) {
  session_layers *made = qkv_arena_alloc(session->kind->arena, layers_bytes(session->kind->model));
  for (uint32_t i = 0; i < session->kind->model->layers; i++) init_locked(session, working, i, &made->at[i]);
  qkv_session_tokens_give_open(&working->tokens, made->open);
  return made;
}

void qkvi_session_end_new_layer(locked_layer *layer) {
  layer->layer.pinned = false;
  qkvi_layer_unpin(&layer->layer);
}

static qkv_status make_layers(qkv_session *session, uint64_t *headroom, qkv_error *error) {
  QKV_TRY(qkv_arena_reserve_in(session->kind->arena, headroom, qkvi_session_layers_cost(session), error));
  session_working *working = qkvi_working(session);
  session_layers *made = qkvi_session_new_layers(session, working);
  for (uint32_t i = 0; i < session->kind->model->layers; i++) {
    qkvi_session_end_new_layer(&made->at[i]);
    publish(session, &made->at[i]);
  }
  atomic_store_explicit(&working->made, made, memory_order_release);
  return QKV_OK;
}

// What was pinned meanwhile, and what may be folded again.
static void keep_unfolded(qkv_session *session) {
  for (uint32_t i = 0; i < session->kind->model->layers; i++) {
    if (qkvi_session_stays(session, i)) qkvi_session_keep(session, i);
  }
  if (atomic_load(&qkvi_working(session)->shares)) qkvi_session_note_shared(session);
  qkv_recency_note(session->kind->config.recency, QKV_RECENCY_SUNK, session);
}

qkv_status qkvi_session_make_layers(qkv_session *session, uint64_t *headroom, qkv_error *error) {
  if (qkvi_session_has_layers(session)) return QKV_OK;
  atomic_store(&session->fold_wanted, true);
  qkvi_session_lock_making(session);
  const bool folded = qkv_session_is_folded(session), has = qkvi_session_has_layers(session);
  qkv_status status = QKV_OK;
  if (!has)
    status = folded ? qkvi_session_unfold_locked(session, headroom, error) : make_layers(session, headroom, error);
  qkvi_session_unlock_making(session);
  if (!has && folded && status == QKV_OK) keep_unfolded(session);
  return status;
}

bool qkvi_session_detach_empty(qkv_session *session) {
  qkvi_session_lock_making(session);
  const bool empty = !qkvi_session_has_layers(session);
  session->detached |= empty;
  qkvi_session_unlock_making(session);
  return empty;
}

static void free_layers(qkv_session *session, session_layers *made) {
  for (uint32_t i = 0; i < session->kind->model->layers; i++) {
    qkv_quality *quality = made->at[i].layer.config.quality;
    publish_sums(session, &(qkv_layer_usage){0}, &made->at[i].usage);
    qkv_layer_deinit(&made->at[i].layer);
    destroy_quality(session, quality);
    (void)pthread_mutex_destroy(&made->at[i].info_lock);
    (void)pthread_rwlock_destroy(&made->at[i].lock);
    (void)pthread_mutex_destroy(&made->at[i].rows);
  }
  qkv_arena_free(session->kind->arena, made, layers_bytes(session->kind->model));
}

void qkvi_session_free_working(qkv_session *session, session_working *working) {
  session_layers *made = atomic_load(&working->made);
  qkv_session_tokens_deinit(&working->tokens);
  if (made != NULL) free_layers(session, made);
  qkvi_working_drop_codings(working);
  qkv_arena_free(session->kind->arena, working, qkvi_working_bytes(session->kind->model));
}

uint64_t qkv_session_fixed_bytes(qkv_session *session) {
  const uint64_t working = qkvi_working(session) != NULL ? qkvi_session_working_cost(session->kind) : 0;
  const uint64_t layers = qkvi_session_has_layers(session) ? qkvi_session_layers_cost(session) : 0;
  return qkv_arena_cost(qkvi_session_bytes_of(session)) + working + layers;
}

// ---- References ----

qkv_session *qkv_session_ref(qkv_session *session) {
  const uint32_t before = atomic_fetch_add_explicit(&session->references, 1, memory_order_relaxed);
  assert(before > 0 && before < UINT32_MAX);
  return session;
}

void qkv_session_unref(qkv_session **session) {
  qkv_session *left = *session;
  if (left == NULL) return;
  *session = NULL;
  // What every user did before its release happens before the last one frees.
  const uint32_t before = atomic_fetch_sub_explicit(&left->references, 1, memory_order_acq_rel);
  assert(before > 0);
  if (before > 1) return;
  qkv_session_close_tokens(left);
  session_working *working = qkvi_working(left);
  if (working != NULL) {
    qkvi_session_free_working(left, working);
  } else {
    qkvi_session_count_folded(left, -1);
    qkvi_session_drop_kept(atomic_load(&left->state));
  }
  const qkvi_session_kind *kind = left->kind;
  qkv_device *device = kind->config.device;
  if (device != NULL) atomic_fetch_sub_explicit(&device->sessions, 1, memory_order_relaxed);
  qkv_account *account = qkv_account_of(kind->arena);
  const size_t bytes = qkvi_session_bytes_of(left);
  qkv_arena_unspend(kind->arena, bytes);
  qkvi_session_slot_give(left, bytes, left->slot);
  qkvi_session_kind_unref(&kind);
  qkv_account_unref(&account);
}

qkv_account *qkv_session_account(const qkv_session *session) {
  return qkv_account_of(session->kind->arena);
}

const qkv_model *qkv_session_model(const qkv_session *session) {
  return session->kind->model;
}

qkv_session_tokens *qkv_session_tokens_of(qkv_session *session) {
  (void)qkvi_session_needs_layers(session);
  session_working *working = qkvi_working(session);
  return working == NULL ? NULL : &working->tokens;
}

// A caller that compares two results has a reference to the session in between, so it is not folded.
uint64_t qkv_session_truncations(const qkv_session *session) {
  const session_working *working = qkvi_working(session);
  return working == NULL ? 0 : atomic_load(&working->truncations);
}

uint64_t qkv_session_id(const qkv_session *session) {
  return session->id;
}

qkv_prefix_hash qkv_session_root(const qkv_session *session) {
  qkv_prefix_hash root = session->kind->root;
  if (session->salted) memcpy(&root, salt_of((qkv_session *)session), sizeof root);
  return root;
}

uint64_t qkv_session_serial(const qkv_session *session) {
  return session->kind->config.backing != NULL ? session->id : qkvi_working(session)->serial;
}

uint32_t qkv_session_number(const qkv_session *session) {
  return qkvi_session_slot_number(session, qkvi_session_bytes_of(session), session->slot);
}

const char *qkv_session_name(const qkv_session *session) {
  return session->name;
}

void qkv_session_prefetch(const qkv_session *session) {
  if (session == NULL) return;
  __builtin_prefetch(session);
  __builtin_prefetch(session->name);
}

qkv_status qkvi_session_check_layer(const qkv_session *session, uint32_t layer, qkv_error *error) {
  if (layer < session->kind->model->layers) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "layer is %" PRIu32 ", the model %s has %" PRIu32 " layers", layer,
                  session->kind->model->name, session->kind->model->layers);
}

qkv_status qkv_session_read(qkv_session *session, uint32_t layer, const qkv_layer **out, qkv_error *error) {
  QKV_TRY(qkvi_session_check_layer(session, layer, error));
  QKV_TRY(qkvi_session_make_layers(session, NULL, error));
  qkvi_session_touch_layer(session, layer);
  lock_to_read(layer_at(session, layer));
  *out = begin_read(layer_at(session, layer), qkv_session_last_used_ms(session));
  return QKV_OK;
}

qkv_status qkv_session_try_read(qkv_session *session, uint32_t layer, const qkv_layer **out, qkv_error *error) {
  QKV_TRY(qkvi_session_check_layer(session, layer, error));
  QKV_TRY(qkvi_session_make_layers(session, NULL, error));
  qkvi_session_touch_layer(session, layer);
  if (pthread_rwlock_tryrdlock(&layer_at(session, layer)->lock) != 0) return QKV_UNAVAILABLE;
  *out = begin_read(layer_at(session, layer), qkv_session_last_used_ms(session));
  return QKV_OK;
}

void qkv_session_read_done(qkv_session *session, uint32_t layer) {
  assert(layer < session->kind->model->layers);
  end_read(layer_at(session, layer));
}

const qkv_layer *qkvi_session_look(qkv_session *session, uint32_t layer) {
  assert(layer < session->kind->model->layers);
  lock_to_read(layer_at(session, layer));
  return begin_read(layer_at(session, layer), 0);
}

const qkv_layer *qkvi_session_try_look(qkv_session *session, uint32_t layer) {
  assert(layer < session->kind->model->layers);
  if (pthread_rwlock_tryrdlock(&layer_at(session, layer)->lock) != 0) return NULL;
  return begin_read(layer_at(session, layer), 0);
}

void qkvi_session_looked(qkv_session *session, uint32_t layer) {
  publish(session, layer_at(session, layer));
  end_read(layer_at(session, layer));
}

qkv_arena *qkvi_session_arena(const qkv_session *session) {
  return session->kind->arena;
}

qkv_layer *qkvi_session_change(qkv_session *session, uint32_t layer) {
  assert(layer < session->kind->model->layers);
  lock_to_write(layer_at(session, layer));
  return begin_write(layer_at(session, layer), 0);
}

void qkvi_session_changed(qkv_session *session, uint32_t layer) {
  publish(session, layer_at(session, layer));
  end_write(layer_at(session, layer));
}

qkv_layer *qkvi_session_try_change(qkv_session *session, uint32_t layer) {
  assert(layer < session->kind->model->layers);
  if (pthread_rwlock_trywrlock(&layer_at(session, layer)->lock) != 0) return NULL;
  return begin_write(layer_at(session, layer), 0);
}

bool qkv_session_is_pinned(const qkv_session *session) {
  return atomic_load(&session->pinned);
}

const qkv_session_config *qkv_session_config_of(const qkv_session *session) {
  return &session->kind->config;
}

_Atomic uint16_t *qkvi_session_pins(qkv_session *session, uint32_t layer) {
  assert(layer < session->kind->model->layers);
  session_working *working = qkvi_working(session);
  assert(working != NULL);
  return &working->pins[layer];
}

bool qkvi_session_stays(qkv_session *session, uint32_t layer) {
  return atomic_load(&session->pinned) || atomic_load(qkvi_session_pins(session, layer)) > 0;
}

uint32_t qkvi_session_next_layer(qkv_session *session) {
  return (uint32_t)(atomic_fetch_add_explicit(&qkvi_working(session)->next_layer, 1, memory_order_relaxed) %
                    session->kind->model->layers);
}

static void add_usage(qkv_layer_usage *sum, const qkv_layer_usage *usage) {
  sum->tokens_coded += usage->tokens_coded;
  sum->tokens_exact += usage->tokens_exact;
  sum->bytes_coded += usage->bytes_coded;
  sum->bytes_exact += usage->bytes_exact;
  sum->bytes_overhead += usage->bytes_overhead;
  sum->bytes_shared += usage->bytes_shared;
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

// What another session has done to pages that are shared is not published here: looked at anew where that needs no
// waiting.
static void look_again(qkv_session *session, locked_layer *layer) {
  if (!atomic_load_explicit(&qkvi_working(session)->shares, memory_order_relaxed) ||
      pthread_rwlock_tryrdlock(&layer->lock) != 0)
    return;
  (void)begin_read(layer, 0);
  publish(session, layer);
  end_read(layer);
}

// ---- Sharing ----

void qkvi_session_note_shared(qkv_session *session) {
  atomic_store(&qkvi_working(session)->shares, true);
  list_session(session, true, false, false, false);
}

void qkv_session_read_info(qkv_session *session, qkv_session_info *info, uint64_t *lengths) {
  const int64_t used_unix_ms = now_ms(CLOCK_REALTIME) - idle_ms(session),
                created = (int64_t)session->created_high << 32 | session->created_low;
  *info = (qkv_session_info){.config = session->kind->config,
                             .model = session->kind->model,
                             .created_unix_ms = created,
                             .last_used_unix_ms = used_unix_ms > created ? used_unix_ms : created,
                             .last_used_ms = atomic_load_explicit(&session->last_used_ms, memory_order_relaxed)};
  info->config.name = session->name;
  info->config.id = session->id;
  info->config.root = qkv_session_root(session);
  info->config.ttl_ms = atomic_load_explicit(&session->ttl_ms, memory_order_relaxed);
  info->config.pinned = atomic_load_explicit(&session->pinned, memory_order_relaxed);
  info->config.staged = qkv_session_is_staged(session);
  info->config.whole = atomic_load_explicit(&session->whole, memory_order_relaxed);
  if (!qkvi_session_has_layers(session) && qkv_session_is_folded(session))
    return qkvi_session_read_folded(session, info, lengths);
  for (uint32_t i = 0; i < session->kind->model->layers; i++) {
    if (lengths != NULL) lengths[i] = session->kind->config.first_position;
    if (!qkvi_session_has_layers(session)) continue;
    locked_layer *layer = layer_at(session, i);
    look_again(session, layer);
    qkvi_session_lock_info(layer);
    if (lengths != NULL) lengths[i] = atomic_load(qkvi_length_of(layer));
    add_usage(&info->usage, &layer->usage);
    qkvi_session_unlock_info(layer);
  }
}
