// Models of tenants in a store that many threads use: registered, shared, looked up, listed and opened at once.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>
#include <pthread.h>

#include "engine/cache/store.h"
#include "tests/engine/cache/fixture.h"

enum { TENANTS = 4, NAMES = 8, ROUNDS = 50 };

typedef struct tenant {
  qkv_store *store;
  char name[16];
  uint32_t q_heads;  // of its models, other than those of the others
  size_t visible;    // of the last list
  int wrong;
  pthread_t thread;
} tenant;

static qkv_model model_of(const char *of, int name, uint32_t q_heads) {
  qkv_model model = {.layers = 1,
                     .kv_heads = 1,
                     .q_heads = q_heads,
                     .key_dim = 16,
                     .value_dim = 8,
                     .dtype = QKV_FP16,
                     .policy = QKV_POLICY_UNSET};
  (void)snprintf(model.tenant, sizeof model.tenant, "%s", of);
  (void)snprintf(model.name, sizeof model.name, "m%d", name);
  return model;
}

static bool count_visible(void *context, const qkv_model *model, size_t sessions) {
  tenant *of = context;
  (void)sessions;
  of->wrong += strcmp(model->tenant, of->name) != 0 && strcmp(model->tenant, "default") != 0;
  of->visible++;
  return true;
}

// A model of the name that the tenant uses stays the one that it has found first.
static void use(tenant *of, const qkv_model *expected, int round) {
  const qkv_model *found = NULL;
  qkv_session *session = NULL;
  uint64_t freed;
  char name[16];
  (void)snprintf(name, sizeof name, "s%d", round);
  const qkv_session_config config = {
      .tenant = of->name, .name = name, .purpose = QKV_PURPOSE_ATTEND, .policy = QKV_POLICY_UNSET};
  of->wrong += qkv_store_model(of->store, of->name, expected->name, &found, NULL) != QKV_OK || found != expected;
  of->wrong += qkv_store_open(of->store, &config, expected->name, &session, NULL) != QKV_OK;
  if (session == NULL) return;
  of->wrong += qkv_session_model(session) != expected;
  qkv_session_unref(&session);
  of->wrong += qkv_store_close(of->store, of->name, config.name, &freed, NULL) != QKV_OK;
}

static void *use_models(void *context) {
  tenant *of = context;
  for (int i = 0; i < NAMES; i++) {
    const qkv_model said = model_of(of->name, i, of->q_heads), *model = NULL;
    const qkv_status status = qkv_store_register_model(of->store, &said, &model, NULL);
    if (status == QKV_ALREADY_EXISTS) {  // the shared one came first
      of->wrong += qkv_store_model(of->store, of->name, said.name, &model, NULL) != QKV_OK;
      of->wrong += !qkv_store_is_shared(of->store, model);
    } else {
      of->wrong += status != QKV_OK || strcmp(model->tenant, of->name) != 0;
    }
    if (model == NULL) continue;
    for (int round = 0; round < ROUNDS; round++) use(of, model, round);
    qkv_store_each_model(of->store, of->name, count_visible, of);
  }
  of->visible = 0;
  return NULL;
}

static void test_threads_register_share_and_open(void **state) {
  (void)state;
  tenant tenants[TENANTS];
  qkv_store *store = qkv_store_create(&(qkv_store_config){.memory_budget = 1 << 24,
                                                          .models_max = (TENANTS + 1) * NAMES,
                                                          .sessions_max = TENANTS,
                                                          .policy = test_policy(4, 2, 64)});
  for (uint32_t i = 0; i < TENANTS; i++) {
    tenants[i] = (tenant){.store = store, .q_heads = 2U << i};
    (void)snprintf(tenants[i].name, sizeof tenants[i].name, "t%u", (unsigned)i);
    assert_int_equal(pthread_create(&tenants[i].thread, NULL, use_models, &tenants[i]), 0);
  }
  for (int i = NAMES - 1; i >= 0; i--) {  // from the other end, so that some are shared first
    const qkv_model said = model_of("default", i, 1), *model = NULL;
    assert_int_equal(qkv_store_register_model(store, &said, &model, NULL), QKV_OK);
    qkv_store_share_model(store, model);
  }
  for (size_t i = 0; i < TENANTS; i++) {
    assert_int_equal(pthread_join(tenants[i].thread, NULL), 0);
    assert_int_equal(tenants[i].wrong, 0);
    qkv_store_each_model(store, tenants[i].name, count_visible, &tenants[i]);
    assert_int_equal(tenants[i].visible, NAMES);
  }
  qkv_store_destroy(&store);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_threads_register_share_and_open)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
