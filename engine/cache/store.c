#include "engine/cache/store.h"

#include <assert.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

// Memory for the tables themselves: as everywhere outside the arena, running out of it is the end.
#define uthash_fatal(message) abort()
#include <uthash.h>

typedef struct model_entry {
  qkv_model model;
  size_t sessions;  // open
  UT_hash_handle hh;
} model_entry;

typedef struct session_entry {
  qkv_session *session;  // one reference
  model_entry *model;
  UT_hash_handle hh;  // keyed by the session's own copy of its name
} session_entry;

struct qkv_store {
  qkv_store_config config;
  qkv_arena *arena;
  pthread_rwlock_t lock;
  model_entry *models;  // in order of name
  session_entry *sessions;
};

static void lock_to_read(qkv_store *store) {
  int failed = pthread_rwlock_rdlock(&store->lock);
  assert(failed == 0);
}

static void lock_to_write(qkv_store *store) {
  int failed = pthread_rwlock_wrlock(&store->lock);
  assert(failed == 0);
}

static void unlock(qkv_store *store) {
  int failed = pthread_rwlock_unlock(&store->lock);
  assert(failed == 0);
}

qkv_store *qkv_store_create(const qkv_store_config *config) {
  assert(config->policy.codec != NULL && config->policy.recent_window >= 0);
  qkv_store *store = calloc(1, sizeof *store);
  assert(store != NULL);
  store->config = *config;
  store->arena = qkv_arena_create_on(&config->heap, "memory-budget", config->memory_budget);
  int failed = pthread_rwlock_init(&store->lock, NULL);
  assert(failed == 0);
  return store;
}

void qkv_store_destroy(qkv_store **store) {
  qkv_store *left = *store;
  if (left == NULL) return;
  *store = NULL;
  // Clearing frees the tables alone; the entries stay linked.
  session_entry *session = left->sessions, *next_session;
  HASH_CLEAR(hh, left->sessions);
  for (; session != NULL; session = next_session) {
    next_session = session->hh.next;
    qkv_session_unref(&session->session);
    free(session);
  }
  model_entry *model = left->models, *next_model;
  HASH_CLEAR(hh, left->models);
  for (; model != NULL; model = next_model) {
    next_model = model->hh.next;
    qkv_learner_destroy(&model->model.learner);  // before the arena, which it has a reservation of
    qkv_calibration_slot_destroy(&model->model.calibration);
    free(model->model.overrides);
    free(model);
  }
  qkv_arena_destroy(&left->arena);
  (void)pthread_rwlock_destroy(&left->lock);
  free(left);
}

qkv_arena *qkv_store_arena(const qkv_store *store) {
  return store->arena;
}

// ---- Models ----

static model_entry *find_model(qkv_store *store, const char *name) {
  model_entry *entry;
  HASH_FIND_STR(store->models, name, entry);
  return entry;
}

static int by_model_name(const model_entry *a, const model_entry *b) {
  return strcmp(a->model.name, b->model.name);
}

// NULL where no layer is to teach.
static qkv_learner *create_learner(qkv_store *store, const qkv_model *model) {
  bool teaches[QKV_LAYERS_MAX], any = false;
  for (uint32_t i = 0; i < model->layers; i++) {
    const qkv_layer_override *override = qkv_model_override(model, i);
    const qkv_policy *own = override != NULL ? &override->policy : NULL;
    teaches[i] =
        own == NULL || !((own->codec != NULL && qkv_codec_is_exact(own->codec)) || (own->learn_said && !own->learn));
    any |= teaches[i];
  }
  if (!any) return NULL;
  return qkv_learner_create(&(qkv_learner_config){.model = model,
                                                  .teaches = teaches,
                                                  .samples = model->policy.learn,
                                                  .tokens = model->policy.learn ? store->config.calibrate_tokens : 0,
                                                  .slot = model->calibration,
                                                  .arena = store->arena});
}

static model_entry *add_model(qkv_store *store, const qkv_model *model) {
  model_entry *entry = calloc(1, sizeof *entry);
  assert(entry != NULL);
  entry->model = *model;
  entry->model.calibration = qkv_calibration_slot_create();
  entry->model.overrides = NULL;
  if (model->override_count > 0) {
    entry->model.overrides = calloc(model->override_count, sizeof *model->overrides);
    assert(entry->model.overrides != NULL);
    memcpy(entry->model.overrides, model->overrides, model->override_count * sizeof *model->overrides);
  }
  entry->model.learner = create_learner(store, &entry->model);
  HASH_ADD_INORDER(hh, store->models, model.name[0], strlen(entry->model.name), entry, by_model_name);
  return entry;
}

static qkv_status register_locked(qkv_store *store, const qkv_model *model, const qkv_model **out, qkv_error *error) {
  model_entry *entry = find_model(store, model->name);
  if (entry != NULL && !qkv_model_equal(&entry->model, model)) {
    return qkv_fail(error, QKV_ALREADY_EXISTS, "the name %s is taken by a model with another %s", model->name,
                    qkv_model_difference(&entry->model, model));
  }
  if (entry == NULL && HASH_COUNT(store->models) >= store->config.models_max) {
    return qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "limit-models is %zu, all are in use", store->config.models_max);
  }
  if (entry == NULL) entry = add_model(store, model);
  if (out != NULL) *out = &entry->model;
  return QKV_OK;
}

qkv_status qkv_store_register_model(qkv_store *store, const qkv_model *model, const qkv_model **out,
                                    qkv_error *error) {
  qkv_model resolved = *model;
  QKV_TRY(qkv_model_resolve(&resolved, error));
  resolved.asked = resolved.policy;
  qkv_policy_merge(&resolved.policy, &store->config.policy);
  QKV_TRY(qkv_policy_check(&resolved.policy, error));
  QKV_TRY(qkv_model_policy_check(&resolved, &resolved.policy, error));
  lock_to_write(store);
  qkv_status status = register_locked(store, &resolved, out, error);
  unlock(store);
  return status;
}

qkv_status qkv_store_calibrate(qkv_store *store, const char *name, const qkv_calibration *calibration,
                               qkv_calibration_source source, bool trusted, qkv_error *error) {
  const qkv_model *model = NULL;
  qkv_status status = qkv_store_model(store, name, &model, error);
  if (model == NULL) return status;
  const qkv_calibration_shape shape = qkv_model_calibration_shape(model);
  QKV_TRY(qkv_calibration_check(calibration, &shape, error));
  if (model->learner != NULL) {
    qkv_learner_bring(model->learner, calibration, source, trusted);
  } else {
    qkv_calibration_slot_set(model->calibration, calibration);
  }
  return QKV_OK;
}

void qkv_store_stop_learning(qkv_store *store) {
  lock_to_read(store);
  for (model_entry *entry = store->models; entry != NULL; entry = entry->hh.next) {
    if (entry->model.learner != NULL) qkv_learner_stop(entry->model.learner);
  }
  unlock(store);
}

// The first model behind `after` whose learner is due; NULL: none. Models stay as long as the store.
static const qkv_model *due_model(qkv_store *store, const char *after) {
  const qkv_model *due = NULL;
  lock_to_read(store);
  for (model_entry *entry = store->models; entry != NULL && due == NULL; entry = entry->hh.next) {
    const qkv_model *model = &entry->model;
    if (strcmp(model->name, after) > 0 && model->learner != NULL && qkv_learner_due(model->learner)) due = model;
  }
  unlock(store);
  return due;
}

bool qkv_store_learn(qkv_store *store, bool (*may)(void *context, const qkv_model *model, uint64_t bytes),
                     void (*fn)(void *context, const qkv_model *model, const qkv_learner_outcome *outcome),
                     void *context) {
  const qkv_model *model;
  bool any = false;
  for (const char *after = ""; (model = due_model(store, after)) != NULL; after = model->name) {
    qkv_learner_outcome outcome;
    if (may != NULL && !may(context, model, qkv_learner_cost(model->learner))) continue;
    qkv_learner_run(model->learner, &outcome);
    fn(context, model, &outcome);
    any = true;
  }
  return any;
}

qkv_status qkv_store_model(qkv_store *store, const char *name, const qkv_model **out, qkv_error *error) {
  lock_to_read(store);
  model_entry *entry = find_model(store, name);
  unlock(store);
  if (entry == NULL) return qkv_fail(error, QKV_NOT_FOUND, "no model %s", name);
  *out = &entry->model;
  return QKV_OK;
}

void qkv_store_each_model(qkv_store *store, bool (*fn)(void *context, const qkv_model *model, size_t sessions),
                          void *context) {
  lock_to_read(store);
  for (model_entry *entry = store->models; entry != NULL; entry = entry->hh.next) {
    if (!fn(context, &entry->model, entry->sessions)) break;
  }
  unlock(store);
}

// ---- Sessions ----

static session_entry *find_session(qkv_store *store, const char *name) {
  session_entry *entry;
  HASH_FIND_STR(store->sessions, name, entry);
  return entry;
}

static qkv_status check_session(const qkv_session_config *config, qkv_error *error) {
  QKV_TRY(qkv_name_check(config->name, "session", error));
  QKV_TRY(qkv_name_check(config->tenant, "tenant", error));
  QKV_TRY(qkv_policy_check(&config->policy, error));
  QKV_TRY(qkv_quality_check(config->max_attention_error, error));
  if (config->purpose != QKV_PURPOSE_ATTEND && config->purpose != QKV_PURPOSE_FETCH) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "purpose is %d, allowed are %d (attend) and %d (fetch)",
                    (int)config->purpose, QKV_PURPOSE_ATTEND, QKV_PURPOSE_FETCH);
  }
  if (config->first_position > QKV_POSITION_MAX) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "first_position is %" PRIu64 ", at most %" PRIu64,
                    config->first_position, QKV_POSITION_MAX);
  }
  return QKV_OK;
}

static void add_session(qkv_store *store, qkv_session *session, model_entry *model) {
  session_entry *entry = calloc(1, sizeof *entry);
  assert(entry != NULL);
  entry->session = session;
  entry->model = model;
  model->sessions++;
  const char *name = qkv_session_name(session);
  HASH_ADD_KEYPTR(hh, store->sessions, name, strlen(name), entry);
}

static qkv_status open_locked(qkv_store *store, qkv_session_config *config, const char *model_name, qkv_session **out,
                              qkv_error *error) {
  model_entry *model = find_model(store, model_name);
  if (model == NULL) return qkv_fail(error, QKV_NOT_FOUND, "no model %s", model_name);
  qkv_policy_merge(&config->policy, &model->model.policy);
  QKV_TRY(qkv_policy_check(&config->policy, error));
  QKV_TRY(qkv_model_policy_check(&model->model, &config->policy, error));
  config->pool = store->config.pool;
  if (find_session(store, config->name) != NULL) {
    return qkv_fail(error, QKV_ALREADY_EXISTS, "the session %s is open already", config->name);
  }
  if (HASH_COUNT(store->sessions) >= store->config.sessions_max) {
    return qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "limit-sessions is %zu, all are in use",
                    store->config.sessions_max);
  }
  QKV_TRY(qkv_session_create(config, &model->model, store->arena, out, error));
  add_session(store, qkv_session_ref(*out), model);
  return QKV_OK;
}

qkv_status qkv_store_open(qkv_store *store, const qkv_session_config *config, const char *model_name,
                          qkv_session **out, qkv_error *error) {
  QKV_TRY(check_session(config, error));
  qkv_session_config resolved = *config;
  lock_to_write(store);
  qkv_status status = open_locked(store, &resolved, model_name, out, error);
  unlock(store);
  return status;
}

qkv_status qkv_store_session(qkv_store *store, const char *name, qkv_session **out, qkv_error *error) {
  lock_to_read(store);
  session_entry *entry = find_session(store, name);
  if (entry != NULL) *out = qkv_session_ref(entry->session);
  unlock(store);
  return entry != NULL ? QKV_OK : qkv_fail(error, QKV_NOT_FOUND, "no session %s", name);
}

// `session` NULL: whichever has the name.
static qkv_status close_entry(qkv_store *store, const char *name, const qkv_session *session, uint64_t *bytes_freed,
                              qkv_error *error) {
  lock_to_write(store);
  session_entry *entry = find_session(store, name);
  if (entry != NULL && session != NULL && entry->session != session) entry = NULL;
  if (entry != NULL) {
    HASH_DEL(store->sessions, entry);
    entry->model->sessions--;
  }
  unlock(store);
  if (entry == NULL) return qkv_fail(error, QKV_NOT_FOUND, "no session %s", name);
  qkv_session_info info;
  qkv_session_read_info(entry->session, &info, NULL);
  *bytes_freed = info.usage.bytes_coded + info.usage.bytes_exact + info.usage.bytes_beside;
  qkv_session_unref(&entry->session);
  free(entry);
  return QKV_OK;
}

qkv_status qkv_store_close(qkv_store *store, const char *name, uint64_t *bytes_freed, qkv_error *error) {
  return close_entry(store, name, NULL, bytes_freed, error);
}

qkv_status qkv_store_close_session(qkv_store *store, const qkv_session *session, uint64_t *bytes_freed,
                                   qkv_error *error) {
  return close_entry(store, qkv_session_name(session), session, bytes_freed, error);
}

typedef struct listed {
  qkv_session *session;
  const char *name;
} listed;

static int by_name(const void *a, const void *b) {
  return strcmp(((const listed *)a)->name, ((const listed *)b)->name);
}

size_t qkv_store_list(qkv_store *store, const char *prefix, const char *after, qkv_session **out, size_t max) {
  size_t prefix_length = strlen(prefix), count = 0;
  lock_to_read(store);
  listed *found = calloc(HASH_COUNT(store->sessions) + 1, sizeof *found);
  assert(found != NULL);
  for (session_entry *entry = store->sessions; entry != NULL; entry = entry->hh.next) {
    const char *name = qkv_session_name(entry->session);
    if (strncmp(name, prefix, prefix_length) != 0 || strcmp(name, after) <= 0) continue;
    found[count++] = (listed){.session = entry->session, .name = name};
  }
  qsort(found, count, sizeof *found, by_name);
  if (count > max) count = max;
  for (size_t i = 0; i < count; i++) out[i] = qkv_session_ref(found[i].session);
  unlock(store);
  free(found);
  return count;
}

qkv_store_stats qkv_store_read_stats(qkv_store *store) {
  lock_to_read(store);
  qkv_store_stats stats = {.models = HASH_COUNT(store->models), .sessions = HASH_COUNT(store->sessions)};
  for (model_entry *entry = store->models; entry != NULL; entry = entry->hh.next) {
    if (entry->model.learner != NULL) stats.learning_bytes += qkv_learner_read(entry->model.learner).bytes;
  }
  unlock(store);
  stats.memory = qkv_arena_read(store->arena);
  stats.heap = qkv_heap_read(qkv_arena_heap(store->arena));
  stats.calibration_bytes = qkv_calibration_bytes_held() + qkv_coding_bytes_held();
  return stats;
}
