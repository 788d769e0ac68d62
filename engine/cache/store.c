#include "engine/cache/store.h"

#include <assert.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cache/session_fold.h"
#include "engine/cache/session_kind.h"
#include "engine/cache/session_slots.h"
#include "engine/cache/session_spill.h"
#include "engine/cache/session_table.h"
#include "engine/cache/store_internal.h"

// Memory for the tables themselves: as everywhere outside the arena, running out of it is the end.
#define uthash_fatal(message) abort()
#include <uthash.h>

// The sessions that one tenant has open with a model. They refer to the account.
typedef struct model_tenant {
  const qkv_account *account;
  size_t sessions;
  UT_hash_handle hh;
} model_tenant;

typedef struct model_entry {
  qkv_model model;  // first, so that a model of the store is its entry
  qkvi_table_key key;
  bool shared;            // with the tenants that have none of its name; of the default tenant's alone
  size_t sessions;        // open
  model_tenant *tenants;  // that have some of these
  UT_hash_handle hh;
} model_entry;

struct qkv_store {
  qkv_store_config config;
  qkv_arena *arena;
  qkv_accounts *accounts;
  qkv_prefix_index *prefixes;
  qkv_recency *recency;
  pthread_rwlock_t lock;
  model_entry *models;          // in order of name, then tenant
  qkvi_session_table sessions;  // one reference each
};

static model_entry *entry_of_model(const qkv_session *session) {
  return (model_entry *)qkv_session_model(session);
}

static void add_to_model(model_entry *model, const qkv_account *account) {
  model_tenant *of = NULL;
  HASH_FIND_PTR(model->tenants, &account, of);
  if (of == NULL) {
    of = calloc(1, sizeof *of);
    assert(of != NULL);
    of->account = account;
    HASH_ADD_PTR(model->tenants, account, of);
  }
  of->sessions++;
  model->sessions++;
}

static void drop_from_model(model_entry *model, const qkv_account *account) {
  model_tenant *of = NULL;
  HASH_FIND_PTR(model->tenants, &account, of);
  assert(of != NULL);
  model->sessions--;
  if (--of->sessions > 0) return;
  HASH_DEL(model->tenants, of);
  free(of);
}

// `account` NULL: of all tenants.
static size_t sessions_of(const model_entry *model, const qkv_account *account) {
  const model_tenant *of = NULL;
  if (account == NULL) return model->sessions;
  HASH_FIND_PTR(model->tenants, &account, of);
  return of == NULL ? 0 : of->sessions;
}

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

// By default readers go before writers: lists that overlap would keep sessions from being opened. No thread that has
// the lock takes it again.
static void init_lock(pthread_rwlock_t *lock) {
  pthread_rwlockattr_t attributes;
  int failed = pthread_rwlockattr_init(&attributes);
  failed |= pthread_rwlockattr_setkind_np(&attributes, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
  failed |= pthread_rwlock_init(lock, &attributes);
  assert(failed == 0);
  (void)failed;
  (void)pthread_rwlockattr_destroy(&attributes);
}

qkv_store *qkv_store_create(const qkv_store_config *config) {
  assert(config->policy.codec != NULL && config->policy.recent_window >= 0);
  qkv_store *store = calloc(1, sizeof *store);
  assert(store != NULL);
  store->config = *config;
  store->arena = qkv_arena_create_on(&config->heap, "memory-budget", config->memory_budget);
  store->accounts = qkv_accounts_create(store->arena, config->limits, config->limits_context);
  store->prefixes = qkv_prefix_index_create(
      config->prefixes_max, config->prefixes_tenant_max == 0 ? config->prefixes_max : config->prefixes_tenant_max);
  store->recency = qkv_recency_create();
  init_lock(&store->lock);
  return store;
}

void qkv_store_destroy(qkv_store **store) {
  qkv_store *left = *store;
  if (left == NULL) return;
  *store = NULL;
  qkv_session *session;
  for (size_t place = 0; (session = qkvi_session_table_next(&left->sessions, &place)) != NULL;) {
    qkv_recency_leave(left->recency, session);
    qkv_session_close_tokens(session);
    qkv_account_close(qkv_session_account(session));
    drop_from_model(entry_of_model(session), qkv_session_account(session));
    qkv_session_unref(&session);
  }
  qkvi_session_table_deinit(&left->sessions);
  // Clearing frees the table alone; the entries stay linked.
  model_entry *model = left->models, *next_model;
  HASH_CLEAR(hh, left->models);
  for (; model != NULL; model = next_model) {
    next_model = model->hh.next;
    qkv_learner_destroy(&model->model.learner);  // before the arena, which it has a reservation of
    qkv_calibration_slot_destroy(&model->model.calibration);
    free(model->model.overrides);
    free(model);
  }
  qkv_prefix_index_destroy(&left->prefixes);
  qkv_recency_destroy(&left->recency);
  qkv_accounts_destroy(&left->accounts);
  qkv_arena_destroy(&left->arena);
  (void)pthread_rwlock_destroy(&left->lock);
  free(left);
}

qkv_arena *qkv_store_arena(const qkv_store *store) {
  return store->arena;
}

qkv_accounts *qkv_store_accounts(const qkv_store *store) {
  return store->accounts;
}

qkv_prefix_index *qkv_store_prefixes(const qkv_store *store) {
  return store->prefixes;
}

qkv_recency *qkv_store_recency(const qkv_store *store) {
  return store->recency;
}

// ---- Models ----

static model_entry *find_model(qkv_store *store, const char *tenant, const char *name) {
  const qkvi_table_key key = qkvi_key_of_name(tenant, name);
  model_entry *entry;
  HASH_FIND(hh, store->models, key.text, key.bytes, entry);
  return entry;
}

// The tenant's own model of that name, else the one that is shared. So a tenant uses one model of a name at most:
// where a shared one came first, it cannot register its own.
static model_entry *find_visible(qkv_store *store, const char *tenant, const char *name) {
  model_entry *entry = find_model(store, tenant, name);
  if (entry != NULL) return entry;
  entry = find_model(store, QKV_TENANT_DEFAULT, name);
  return entry != NULL && entry->shared ? entry : NULL;
}

static bool is_default(const char *tenant) {
  return strcmp(tenant, QKV_TENANT_DEFAULT) == 0;
}

// The text does not name the default tenant.
static qkv_status not_found(const char *what, const char *tenant, const char *name, qkv_error *error) {
  const bool plain = is_default(tenant);
  return qkv_fail(error, QKV_NOT_FOUND, "no %s %s%s%s", what, name, plain ? "" : " of tenant ", plain ? "" : tenant);
}

static int compare_models(const qkv_model *a, const qkv_model *b) {
  const int names = strcmp(a->name, b->name);
  return names != 0 ? names : strcmp(a->tenant, b->tenant);
}

static int by_name_and_tenant(const model_entry *a, const model_entry *b) {
  return compare_models(&a->model, &b->model);
}

// NULL where no layer is to teach.
static qkv_learner *create_learner(qkv_store *store, const qkv_model *model) {
  bool teaches[QKV_LAYERS_MAX], any = false;
  for (uint32_t i = 0; i < model->layers; i++) {
    const qkv_layer_override *override = qkv_model_override(model, i);
    const qkv_policy *own = override != NULL ? &override->policy : NULL;
    teaches[i] = own == NULL ||
                 ((own->codec == NULL || qkv_policy_calibrates(own, QKV_K)) && (!own->learn_said || own->learn));
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
  entry->key = qkvi_key_of_name(model->tenant, model->name);
  HASH_ADD_KEYPTR_INORDER(hh, store->models, entry->key.text, entry->key.bytes, entry, by_name_and_tenant);
  return entry;
}

static size_t count_models(const qkv_store *store, const char *tenant) {
  size_t count = 0;
  for (const model_entry *entry = store->models; entry != NULL; entry = entry->hh.next)
    count += strcmp(entry->model.tenant, tenant) == 0;
  return count;
}

static qkv_status check_quota(const qkv_store *store, const char *tenant, uint64_t most, qkv_error *error) {
  const size_t count = most > 0 ? count_models(store, tenant) : 0;
  if (most == 0 || count < most) return QKV_OK;
  return qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "quota models of tenant %s is %" PRIu64 ", it has registered %zu",
                  tenant, most, count);
}

static qkv_status register_locked(qkv_store *store, const qkv_model *model, bool own, uint64_t most,
                                  const qkv_model **out, qkv_error *error) {
  model_entry *entry = (own ? find_model : find_visible)(store, model->tenant, model->name);
  if (entry != NULL && !qkv_model_equal(&entry->model, model)) {
    return qkv_fail(error, QKV_ALREADY_EXISTS, "the name %s is taken by a %smodel with another %s", model->name,
                    strcmp(entry->model.tenant, model->tenant) == 0 ? "" : "shared ",
                    qkv_model_difference(&entry->model, model));
  }
  if (entry == NULL && HASH_COUNT(store->models) >= store->config.models_max) {
    return qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "limit-models is %zu, all are in use", store->config.models_max);
  }
  if (entry == NULL) {
    QKV_TRY(check_quota(store, model->tenant, most, error));
    entry = add_model(store, model);
  }
  if (out != NULL) *out = &entry->model;
  return QKV_OK;
}

static qkv_status register_model(qkv_store *store, const qkv_model *model, bool own, uint64_t most,
                                 const qkv_model **out, qkv_error *error) {
  qkv_model resolved = *model;
  QKV_TRY(qkv_model_resolve(&resolved, error));
  resolved.asked = resolved.policy;
  resolved.archive_codec = store->config.archive_codec;
  qkv_policy_merge(&resolved.policy, &store->config.policy);
  QKV_TRY(qkv_policy_check(&resolved.policy, error));
  QKV_TRY(qkv_model_policy_check(&resolved, &resolved.policy, error));
  lock_to_write(store);
  qkv_status status = register_locked(store, &resolved, own, most, out, error);
  unlock(store);
  return status;
}

qkv_status qkv_store_register_model(qkv_store *store, const qkv_model *model, const qkv_model **out,
                                    qkv_error *error) {
  return register_model(store, model, false, 0, out, error);
}

qkv_status qkv_store_register_model_within(qkv_store *store, const qkv_model *model, uint64_t most,
                                           const qkv_model **out, qkv_error *error) {
  return register_model(store, model, false, most, out, error);
}

uint64_t qkv_store_tenant_models(qkv_store *store, const char *tenant) {
  lock_to_read(store);
  const size_t count = count_models(store, tenant);
  unlock(store);
  return count;
}

qkv_status qkv_store_restore_model(qkv_store *store, const qkv_model *model, const qkv_model **out,
                                   qkv_error *error) {
  return register_model(store, model, true, 0, out, error);
}

void qkv_store_share_model(qkv_store *store, const qkv_model *model) {
  assert(is_default(model->tenant));
  lock_to_write(store);
  find_model(store, model->tenant, model->name)->shared = true;
  unlock(store);
}

bool qkv_store_is_shared(qkv_store *store, const qkv_model *model) {
  lock_to_read(store);
  const bool shared = find_model(store, model->tenant, model->name)->shared;
  unlock(store);
  return shared;
}

void qkv_store_stop_learning(qkv_store *store) {
  lock_to_read(store);
  for (model_entry *entry = store->models; entry != NULL; entry = entry->hh.next) {
    if (entry->model.learner != NULL) qkv_learner_stop(entry->model.learner);
  }
  unlock(store);
}

// The first model behind `after` (NULL: of all) whose learner is due; NULL: none. Models stay as long as the store.
static const qkv_model *due_model(qkv_store *store, const qkv_model *after) {
  const qkv_model *due = NULL;
  lock_to_read(store);
  for (model_entry *entry = store->models; entry != NULL && due == NULL; entry = entry->hh.next) {
    const qkv_model *model = &entry->model;
    if (after != NULL && compare_models(model, after) <= 0) continue;
    if (model->learner != NULL && qkv_learner_due(model->learner)) due = model;
  }
  unlock(store);
  return due;
}

bool qkv_store_learn(qkv_store *store, bool (*may)(void *context, const qkv_model *model, uint64_t bytes),
                     void (*fn)(void *context, const qkv_model *model, const qkv_learner_outcome *outcome),
                     void *context) {
  const qkv_model *model = NULL;
  bool any = false;
  while ((model = due_model(store, model)) != NULL) {
    qkv_learner_outcome outcome;
    if (may != NULL && !may(context, model, qkv_learner_cost(model->learner))) continue;
    qkv_learner_run(model->learner, &outcome);
    fn(context, model, &outcome);
    any = true;
  }
  return any;
}

qkv_status qkv_store_model(qkv_store *store, const char *tenant, const char *name, const qkv_model **out,
                           qkv_error *error) {
  lock_to_read(store);
  model_entry *entry = find_visible(store, tenant, name);
  unlock(store);
  if (entry == NULL) return not_found("model", tenant, name, error);
  *out = &entry->model;
  return QKV_OK;
}

qkv_status qkv_store_own_model(qkv_store *store, const char *tenant, const char *name, const qkv_model **out,
                               qkv_error *error) {
  lock_to_read(store);
  model_entry *entry = find_model(store, tenant, name);
  unlock(store);
  if (entry == NULL) return not_found("model", tenant, name, error);
  *out = &entry->model;
  return QKV_OK;
}

qkv_status qkv_store_unshare_model(qkv_store *store, const qkv_model *model, qkv_error *error) {
  qkv_account *account = qkv_accounts_join(store->accounts, model->tenant);
  lock_to_write(store);
  model_entry *entry = find_model(store, model->tenant, model->name);
  const size_t others = entry->sessions - sessions_of(entry, account);
  if (others == 0) entry->shared = false;
  unlock(store);
  qkv_account_unref(&account);
  if (others == 0) return QKV_OK;
  return qkv_fail(error, QKV_FAILED_PRECONDITION, "the model %s has %zu sessions of other tenants", model->name,
                  others);
}

void qkv_store_each_model(qkv_store *store, const char *tenant,
                          bool (*fn)(void *context, const qkv_model *model, size_t sessions), void *context) {
  qkv_account *account = tenant == NULL ? NULL : qkv_accounts_join(store->accounts, tenant);
  lock_to_read(store);
  for (model_entry *entry = store->models; entry != NULL; entry = entry->hh.next) {
    if (tenant != NULL && find_visible(store, tenant, entry->model.name) != entry) continue;
    if (!fn(context, &entry->model, sessions_of(entry, account))) break;
  }
  unlock(store);
  qkv_account_unref(&account);
}

size_t qkv_store_model_sessions(qkv_store *store, const char *tenant, const qkv_model *model) {
  qkv_account *account = tenant == NULL ? NULL : qkv_accounts_join(store->accounts, tenant);
  lock_to_read(store);
  const size_t sessions = sessions_of((const model_entry *)model, account);
  unlock(store);
  qkv_account_unref(&account);
  return sessions;
}

// ---- Sessions ----

static qkv_session *find_session(const qkv_store *store, const char *tenant, const char *name) {
  const qkvi_table_key key = qkvi_key_of_name(tenant, name);
  return qkvi_session_table_find(&store->sessions, &key);
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

// The reference is the table's from here on.
static void add_session(qkv_store *store, qkv_session *session) {
  add_to_model(entry_of_model(session), qkv_session_account(session));
  qkvi_session_table_add(&store->sessions, session);
  qkv_recency_join(store->recency, session);
}

// Not where it has been closed, though another one may have its name now.
static bool is_open(const qkv_store *store, const qkv_session *session) {
  const qkvi_table_key key = qkvi_key_of_session(session);
  return qkvi_session_table_find(&store->sessions, &key) == session;
}

static qkv_status check_place(qkv_store *store, const qkv_session_config *config, qkv_error *error) {
  if (find_session(store, config->tenant, config->name) != NULL)
    return qkv_fail(error, QKV_ALREADY_EXISTS, "the session %s is open already", config->name);
  if (store->sessions.count < store->config.sessions_max) return QKV_OK;
  return qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "limit-sessions is %zu, all are in use", store->config.sessions_max);
}

static bool has_archive_calibration(const qkv_model *model) {
  const qkv_calibration *calibration = qkv_calibration_slot_get(model->calibration);
  const bool has = calibration != NULL && !qkv_calibration_archive_refused(calibration);
  qkv_calibration_unref(&calibration);
  return has;
}

void qkv_store_resolve(const qkv_model *model, const qkv_session_config *config, qkv_policy *policy) {
  const bool archived = config->archived && config->purpose == QKV_PURPOSE_FETCH && policy->codec == NULL;
  qkv_model_merge_policy(model, config->tenant, policy);
  if (archived && has_archive_calibration(model)) (void)qkv_model_archive(model, policy);
}

static qkv_status open_locked(qkv_store *store, qkv_session_config *config, qkv_account *account,
                              const char *model_name, qkv_session **out, qkv_error *error) {
  model_entry *model = find_visible(store, config->tenant, model_name);
  if (model == NULL) return not_found("model", config->tenant, model_name, error);
  qkv_store_resolve(&model->model, config, &config->policy);
  QKV_TRY(qkv_policy_check(&config->policy, error));
  QKV_TRY(qkv_model_policy_check(&model->model, &config->policy, error));
  config->pool = store->config.pool;
  config->device = store->config.choose_device != NULL ? store->config.choose_device(store->config.devices) : NULL;
  config->prefixes = store->prefixes;
  config->recency = store->recency;
  config->retier_all = store->config.retier_all;
  if (qkv_prefix_hash_equal(&config->root, &(qkv_prefix_hash){0}))
    config->root = qkv_prefix_root(config->tenant, model->model.name, NULL, 0);
  QKV_TRY(check_place(store, config, error));
  QKV_TRY(qkv_account_open(account, error));
  const qkv_status status = qkv_session_create(config, &model->model, qkv_account_arena(account), out, error);
  if (status != QKV_OK) qkv_account_close(account);
  if (status == QKV_OK) add_session(store, qkv_session_ref(*out));
  return status;
}

qkv_status qkv_store_open(qkv_store *store, const qkv_session_config *config, const char *model_name,
                          qkv_session **out, qkv_error *error) {
  QKV_TRY(check_session(config, error));
  qkv_session_config resolved = *config;
  qkv_account *account = qkv_accounts_join(store->accounts, config->tenant);
  lock_to_write(store);
  qkv_status status = open_locked(store, &resolved, account, model_name, out, error);
  unlock(store);
  qkv_account_unref(&account);
  return status;
}

uint64_t qkv_store_coders_cost(qkv_store *store, const qkv_session_config *config, const char *model_name) {
  const qkv_model *model = NULL;
  qkv_session_config resolved = *config;
  (void)qkv_store_model(store, config->tenant, model_name, &model, NULL);
  if (model == NULL) return 0;
  qkv_store_resolve(model, &resolved, &resolved.policy);
  if (qkv_policy_check(&resolved.policy, NULL) != QKV_OK ||
      qkv_model_policy_check(model, &resolved.policy, NULL) != QKV_OK)
    return 0;
  qkv_account *account = qkv_accounts_join(store->accounts, config->tenant);
  const uint64_t bytes = qkvi_session_coders_missing(&resolved, model, qkv_account_arena(account));
  qkv_account_unref(&account);
  return bytes;
}

qkv_status qkv_store_publish(qkv_store *store, qkv_session *session, qkv_error *error) {
  const char *name = qkv_session_name(session);
  lock_to_write(store);
  const bool open = is_open(store, session);
  const bool taken = find_session(store, qkv_session_config_of(session)->tenant, name) != NULL;
  if (open && !taken) {
    qkvi_session_table_remove(&store->sessions, session);
    qkv_session_unstage(session);
    qkvi_session_table_add(&store->sessions, session);
  }
  unlock(store);
  if (taken) return qkv_fail(error, QKV_ALREADY_EXISTS, "the session %s is open already", name);
  return open ? QKV_OK : qkv_fail(error, QKV_NOT_FOUND, "session %s has been closed", name);
}

// Forking waits for the parent's layers, so the table is not locked meanwhile.
qkv_status qkv_store_fork(qkv_store *store, qkv_session *parent, const qkv_session_config *config,
                          const uint64_t *positions, qkv_session **out, qkv_error *error) {
  QKV_TRY(check_session(config, error));
  lock_to_read(store);
  qkv_status status = check_place(store, config, error);
  unlock(store);
  if (status == QKV_OK) status = qkv_session_fork(parent, config, positions, out, error);
  if (status != QKV_OK) return status;
  lock_to_write(store);
  status = check_place(store, config, error);
  if (status == QKV_OK) status = qkv_account_open(qkv_session_account(*out), error);
  if (status == QKV_OK) add_session(store, qkv_session_ref(*out));
  unlock(store);
  if (status == QKV_OK) return QKV_OK;
  qkv_session_close_tokens(*out);
  qkv_session_unref(out);
  return status;
}

qkv_status qkv_store_session(qkv_store *store, const char *tenant, const char *name, qkv_session **out,
                             qkv_error *error) {
  lock_to_read(store);
  qkv_session *found = find_session(store, tenant, name);
  if (found != NULL) *out = qkv_session_ref(found);
  unlock(store);
  return found != NULL ? QKV_OK : not_found("session", tenant, name, error);
}

void qkv_store_find(qkv_store *store, const char *tenant, const char *const *names, size_t count, qkv_session **out) {
  lock_to_read(store);
  qkvi_session_table_find_names(&store->sessions, tenant, names, count, out);
  for (size_t i = 0; i < count; i++) {
    if (out[i] != NULL) (void)qkv_session_ref(out[i]);
  }
  unlock(store);
}

size_t qkv_store_backed(qkv_store *store, qkv_session **out, size_t max) {
  size_t count = 0;
  lock_to_read(store);
  qkv_session *session;
  for (size_t place = 0; count < max && (session = qkvi_session_table_next(&store->sessions, &place)) != NULL;) {
    if (qkv_session_config_of(session)->backing != NULL) out[count++] = qkv_session_ref(session);
  }
  unlock(store);
  return count;
}

bool qkvi_store_next_part(qkv_store *store, uint64_t *next, void (*fn)(void *context, qkv_session *session),
                          void *context) {
  lock_to_read(store);
  const bool more = qkvi_session_table_next_part(&store->sessions, next, fn, context);
  unlock(store);
  return more;
}

// Takes the session, which has been found, out of the table and gives the lock back.
static qkv_status close_found(qkv_store *store, qkv_session *session, uint64_t *bytes_freed) {
  qkvi_session_table_remove(&store->sessions, session);
  drop_from_model(entry_of_model(session), qkv_session_account(session));
  qkv_account_close(qkv_session_account(session));
  qkv_recency_leave(store->recency, session);
  unlock(store);
  qkv_session_info info;
  qkv_session_close_tokens(session);
  qkv_session_read_info(session, &info, NULL);
  *bytes_freed = info.usage.bytes_coded + info.usage.bytes_exact + info.usage.bytes_overhead;
  qkv_session_unref(&session);
  return QKV_OK;
}

qkv_status qkv_store_close(qkv_store *store, const char *tenant, const char *name, uint64_t *bytes_freed,
                           qkv_error *error) {
  lock_to_write(store);
  qkv_session *found = find_session(store, tenant, name);
  if (found != NULL) return close_found(store, found, bytes_freed);
  unlock(store);
  return not_found("session", tenant, name, error);
}

qkv_status qkv_store_close_session(qkv_store *store, const qkv_session *session, uint64_t *bytes_freed,
                                   qkv_error *error) {
  lock_to_write(store);
  if (is_open(store, session)) return close_found(store, (qkv_session *)session, bytes_freed);
  unlock(store);
  return not_found("session", qkv_session_config_of(session)->tenant, qkv_session_name(session), error);
}

// References come from the table, the index of prefixes, the order of use, and other references.
bool qkv_store_fold(qkv_store *store, qkv_session *session) {
  enum { REFERENCES = 2 };  // the table's and the caller's
  session_working *working = NULL;
  if (!qkv_session_may_fold(session)) return false;
  lock_to_write(store);
  qkv_prefix_index_lock(store->prefixes);
  qkv_recency_lock(store->recency);
  const bool begun = is_open(store, session) && qkvi_session_fold_begin(session, REFERENCES, &working);
  qkv_recency_unlock(store->recency);
  qkv_prefix_index_unlock(store->prefixes);
  unlock(store);
  return begun && qkvi_session_fold_end(session, working);
}

// While the session is in the index, the store holds a reference: it leaves the index first.
static void take_session(uint32_t owner) {
  (void)qkv_session_ref(qkv_session_of(owner));
}

size_t qkv_store_match(qkv_store *store, const qkv_prefix_hash *root, const uint32_t *ids, size_t count,
                       qkv_session **out, uint64_t *pages, size_t max) {
  qkv_prefix_found found[QKV_STORE_MATCH_MAX];
  assert(max <= QKV_STORE_MATCH_MAX);
  const size_t found_count = qkv_prefix_index_match(store->prefixes, root, ids, count, take_session, found, max);
  size_t count_out = 0;
  for (size_t i = 0; i < found_count; i++) {
    qkv_session *session = qkv_session_of(found[i].owner);
    if (qkv_session_is_staged(session)) {
      qkv_session_unref(&session);
    } else {
      out[count_out] = session;
      pages[count_out++] = found[i].pages;
    }
  }
  return count_out;
}

size_t qkv_store_sessions(qkv_store *store) {
  lock_to_read(store);
  const size_t sessions = store->sessions.count;
  unlock(store);
  return sessions;
}

qkv_store_stats qkv_store_read_stats(qkv_store *store) {
  lock_to_read(store);
  qkv_store_stats stats = {.models = HASH_COUNT(store->models), .sessions = store->sessions.count};
  for (model_entry *entry = store->models; entry != NULL; entry = entry->hh.next) {
    if (entry->model.learner != NULL) stats.learning_bytes += qkv_learner_read(entry->model.learner).bytes;
  }
  unlock(store);
  stats.memory = qkv_arena_read(store->arena);
  stats.heap = qkv_heap_read(qkv_arena_heap(store->arena));
  stats.calibration_bytes = qkv_calibration_bytes_held() + qkv_coding_bytes_held();
  return stats;
}
