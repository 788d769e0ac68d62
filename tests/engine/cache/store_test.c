#include "engine/cache/store.h"

#include <pthread.h>

#include "tests/engine/cache/fixture.h"
#include "tests/engine/cache/used_session.h"

static qkv_store *make_store(uint64_t memory_budget, size_t models_max, size_t sessions_max) {
  return qkv_store_create(&(qkv_store_config){.memory_budget = memory_budget,
                                              .models_max = models_max,
                                              .sessions_max = sessions_max,
                                              .policy = test_policy(4, 2, 64)});
}

static qkv_model named_model(const char *name) {
  qkv_model model = {.layers = 2,
                     .kv_heads = 1,
                     .q_heads = 2,
                     .key_dim = 16,
                     .value_dim = 8,
                     .dtype = QKV_FP16,
                     .policy = QKV_POLICY_UNSET};
  (void)snprintf(model.name, sizeof model.name, "%s", name);
  return model;
}

static void must_register(qkv_store *store, const char *name) {
  qkv_model model = named_model(name);
  qkv_error error = {0};
  if (qkv_store_register_model(store, &model, NULL, &error) != QKV_OK) fail_msg("%s", error.text);
}

static void must_share(qkv_store *store, const char *name) {
  const qkv_model *model = NULL;
  must_register(store, name);
  assert_int_equal(qkv_store_model(store, "default", name, &model, NULL), QKV_OK);
  qkv_store_share_model(store, model);
}

static qkv_session_config named_session(const char *name) {
  qkv_session_config config = {.tenant = "default", .purpose = QKV_PURPOSE_ATTEND, .policy = QKV_POLICY_UNSET};
  config.name = name;
  return config;
}

static qkv_session *must_open(qkv_store *store, const char *name, const char *model) {
  qkv_session_config config = named_session(name);
  qkv_session *session = NULL;
  qkv_error error = {0};
  if (qkv_store_open(store, &config, model, &session, &error) != QKV_OK) fail_msg("%s", error.text);
  return session;
}

static void open_and_leave(qkv_store *store, const char *name, const char *model) {
  qkv_session *session = must_open(store, name, model);
  qkv_session_unref(&session);
}

static void assert_open_fails(qkv_store *store, const qkv_session_config *config, const char *model,
                              qkv_status status, const char *text) {
  qkv_session *session = NULL;
  qkv_error error = {0};
  size_t before = qkv_store_read_stats(store).sessions;
  assert_int_equal(qkv_store_open(store, config, model, &session, &error), status);
  assert_string_equal(error.text, text);
  assert_null(session);
  assert_int_equal(qkv_store_read_stats(store).sessions, before);
}

// ---- Models ----

static void test_models(void **state) {
  (void)state;
  qkv_store *store = make_store(1 << 20, 2, 4);
  qkv_model model = named_model("b");
  const qkv_model *first, *again, *found;
  assert_int_equal(qkv_store_register_model(store, &model, &first, NULL), QKV_OK);
  assert_true(first->scale == 0.25);
  assert_true(first->policy.bits_k == 4 && first->policy.bits_v == 2 && first->policy.recent_window == 64);
  assert_int_equal(qkv_store_register_model(store, &model, &again, NULL), QKV_OK);
  assert_ptr_equal(first, again);
  assert_int_equal(qkv_store_register_model(store, first, &again, NULL), QKV_OK);
  assert_int_equal(qkv_store_model(store, "default", "b", &found, NULL), QKV_OK);
  assert_ptr_equal(first, found);

  qkv_error errors[4] = {{0}, {0}, {0}, {0}};
  model.q_heads = 4;
  assert_int_equal(qkv_store_register_model(store, &model, NULL, &errors[0]), QKV_ALREADY_EXISTS);
  assert_string_equal(errors[0].text, "the name b is taken by a model with another q_heads");
  model.q_heads = 0;
  assert_int_equal(qkv_store_register_model(store, &model, NULL, &errors[1]), QKV_INVALID_ARGUMENT);
  assert_string_equal(errors[1].text, "model.q_heads is 0, allowed are 1 to 65536");
  must_register(store, "a");
  model = named_model("c");
  assert_int_equal(qkv_store_register_model(store, &model, NULL, &errors[2]), QKV_RESOURCE_EXHAUSTED);
  assert_string_equal(errors[2].text, "limit-models is 2, all are in use");
  must_register(store, "a");
  assert_int_equal(qkv_store_model(store, "default", "c", &found, &errors[3]), QKV_NOT_FOUND);
  assert_string_equal(errors[3].text, "no model c");
  assert_int_equal(qkv_store_read_stats(store).models, 2);
  qkv_store_destroy(&store);
  assert_null(store);
}

// What a layer's override leaves open is filled in by the model's or the session's policy: checked together.
static void test_overrides(void **state) {
  (void)state;
  qkv_store *store = make_store(1 << 20, 4, 4);
  qkv_layer_override override = {.layer = 1, .policy = QKV_POLICY_UNSET};
  override.policy.codec = qkv_codec_by_id(QKV_CODEC_EMBEDDED);
  override.policy.bits_k = 16;
  qkv_model model = named_model("m");
  model.overrides = &override;
  model.override_count = 1;
  qkv_error error = {0};
  assert_int_equal(qkv_store_register_model(store, &model, NULL, &error), QKV_INVALID_ARGUMENT);
  assert_string_equal(error.text, "model.overrides[0].policy.bits_k is 16, allowed are multiples of 0.125 up to 8");
  assert_int_equal(qkv_store_read_stats(store).models, 0);
  // Bits of the next level that the layer's codec does not have become the codec's own default.
  override.policy.bits_k = 0;
  model.policy.codec = qkv_codec_by_name("exact");
  model.policy.bits_k = 16;
  const qkv_model *registered;
  assert_int_equal(qkv_store_register_model(store, &model, &registered, NULL), QKV_OK);
  assert_true(qkv_model_policy(registered, 0, &registered->policy).bits_k == 16);
  assert_true(qkv_model_policy(registered, 1, &registered->policy).bits_k == 4);
  qkv_session_config config = named_session("s");
  config.policy.codec = qkv_codec_by_id(QKV_CODEC_EMBEDDED);
  config.policy.bits_v = 16;
  assert_open_fails(store, &config, "m", QKV_INVALID_ARGUMENT,
                    "policy.bits_v is 16, allowed are multiples of 0.125 up to 8");
  // A pointer to none is not taken for the store's own.
  memcpy(model.name, "n", sizeof "n");
  model.override_count = 0;
  assert_int_equal(qkv_store_register_model(store, &model, &registered, NULL), QKV_OK);
  assert_null(registered->overrides);
  qkv_store_destroy(&store);
}

typedef struct listing {
  char text[128];
  size_t stop_after, count;
} listing;

static bool list_model(void *context, const qkv_model *model, size_t sessions) {
  listing *list = context;
  size_t length = strlen(list->text);
  (void)snprintf(list->text + length, sizeof list->text - length, "%s:%zu ", model->name, sessions);
  return ++list->count != list->stop_after;
}

static void test_each_model_in_order(void **state) {
  (void)state;
  qkv_store *store = make_store(1 << 20, 10, 10);
  const char *names[] = {"m", "b", "z", "a", "ma"};
  for (size_t i = 0; i < 5; i++) must_register(store, names[i]);
  open_and_leave(store, "1", "b");
  open_and_leave(store, "2", "b");
  open_and_leave(store, "3", "ma");
  uint64_t bytes;
  assert_int_equal(qkv_store_close(store, "default", "2", &bytes, NULL), QKV_OK);
  listing list = {{0}, 0, 0}, two = {{0}, 2, 0};
  qkv_store_each_model(store, NULL, list_model, &list);
  assert_string_equal(list.text, "a:0 b:1 m:0 ma:1 z:0 ");
  qkv_store_each_model(store, NULL, list_model, &two);
  assert_string_equal(two.text, "a:0 b:1 ");

  qkv_store_destroy(&store);
}

// ---- Models of tenants ----

static const qkv_model *must_register_of(qkv_store *store, const char *tenant, const char *name, uint32_t q_heads) {
  qkv_model model = named_model(name);
  const qkv_model *registered = NULL;
  qkv_error error = {0};
  (void)snprintf(model.tenant, sizeof model.tenant, "%s", tenant);
  model.q_heads = q_heads;
  if (qkv_store_register_model(store, &model, &registered, &error) != QKV_OK) fail_msg("%s", error.text);
  return registered;
}

static const qkv_model *visible(qkv_store *store, const char *tenant, const char *name) {
  const qkv_model *found = NULL;
  return qkv_store_model(store, tenant, name, &found, NULL) == QKV_OK ? found : NULL;
}

static void open_for(qkv_store *store, const char *tenant, const char *name, const qkv_model *expected) {
  qkv_session_config config = named_session(name);
  qkv_session *session = NULL;
  qkv_error error = {0};
  config.tenant = tenant;
  if (qkv_store_open(store, &config, expected->name, &session, &error) != QKV_OK) fail_msg("%s", error.text);
  assert_ptr_equal(qkv_session_model(session), expected);
  qkv_session_unref(&session);
}

static void test_models_are_a_tenants(void **state) {
  (void)state;
  qkv_store *store = make_store(1 << 20, 4, 10);
  const qkv_model *m = must_register_of(store, "", "m", 4), *a = must_register_of(store, "a", "m", 8);
  const qkv_model *b = must_register_of(store, "a", "b", 4);
  assert_true(a != m && a->q_heads == 8);
  assert_ptr_equal(must_register_of(store, "a", "m", 8), a);
  assert_true(visible(store, "default", "m") == m && visible(store, "a", "m") == a);
  assert_null(visible(store, "c", "m"));
  assert_null(visible(store, "default", "b"));
  const qkv_model *found = NULL;
  qkv_error error = {0};
  assert_int_equal(qkv_store_model(store, "c", "m", &found, &error), QKV_NOT_FOUND);
  assert_string_equal(error.text, "no model m of tenant c");
  qkv_session_config config = named_session("s");
  assert_open_fails(store, &config, "b", QKV_NOT_FOUND, "no model b");
  open_for(store, "default", "s", m);
  open_for(store, "a", "s", a);
  open_for(store, "a", "t", a);
  open_for(store, "a", "u", b);
  listing all = {{0}, 0, 0}, own = {{0}, 0, 0};
  qkv_store_each_model(store, NULL, list_model, &all);
  assert_string_equal(all.text, "b:1 m:2 m:1 ");  // of one name in the order of tenants
  qkv_store_each_model(store, "a", list_model, &own);
  assert_string_equal(own.text, "b:1 m:2 ");
  qkv_store_destroy(&store);
}

static void test_shared_models(void **state) {
  (void)state;
  qkv_store *store = make_store(1 << 20, 4, 10);
  const qkv_model *m = must_register_of(store, "", "m", 4), *a = must_register_of(store, "a", "m", 8);
  assert_false(qkv_store_is_shared(store, m));
  qkv_store_share_model(store, m);
  assert_true(qkv_store_is_shared(store, m) && !qkv_store_is_shared(store, a));
  assert_true(visible(store, "a", "m") == a && visible(store, "b", "m") == m);
  assert_ptr_equal(must_register_of(store, "a", "m", 8), a);
  assert_ptr_equal(must_register_of(store, "b", "m", 4), m);
  qkv_model other = named_model("m");
  qkv_error error = {0};
  other.q_heads = 16;
  (void)snprintf(other.tenant, sizeof other.tenant, "b");
  assert_int_equal(qkv_store_register_model(store, &other, NULL, &error), QKV_ALREADY_EXISTS);
  assert_string_equal(error.text, "the name m is taken by a shared model with another q_heads");
  open_for(store, "default", "s", m);
  open_for(store, "a", "s", a);
  open_for(store, "b", "s", m);
  listing shared = {{0}, 0, 0}, all = {{0}, 0, 0};
  qkv_store_each_model(store, "b", list_model, &shared);
  assert_string_equal(shared.text, "m:1 ");
  qkv_store_each_model(store, NULL, list_model, &all);
  assert_string_equal(all.text, "m:1 m:2 ");
  // What is restored is the tenant's own.
  const qkv_model *restored = NULL;
  assert_int_equal(qkv_store_restore_model(store, &other, &restored, NULL), QKV_OK);
  assert_true(restored != m && visible(store, "b", "m") == restored);
  qkv_store_destroy(&store);
}

// ---- Sessions ----

static void test_sessions(void **state) {
  (void)state;
  qkv_store *store = make_store(1 << 20, 2, 2);
  must_register(store, "tiny");
  qkv_session_config config = named_session("a");
  config.policy.bits_v = 8;
  config.first_position = 7;
  qkv_session *opened, *found;
  assert_int_equal(qkv_store_open(store, &config, "tiny", &opened, NULL), QKV_OK);
  assert_int_equal(qkv_store_session(store, "default", "a", &found, NULL), QKV_OK);
  assert_ptr_equal(opened, found);
  qkv_session_info info;
  uint64_t lengths[2], bytes;
  qkv_session_read_info(found, &info, lengths);
  assert_true(info.config.policy.bits_k == 4 && info.config.policy.bits_v == 8);
  assert_int_equal(info.config.policy.recent_window, 64);
  assert_int_equal(lengths[1], 7);
  qkv_session_unref(&found);

  assert_open_fails(store, &config, "tiny", QKV_ALREADY_EXISTS, "the session a is open already");
  config = named_session("b");
  assert_open_fails(store, &config, "other", QKV_NOT_FOUND, "no model other");
  open_and_leave(store, "b", "tiny");
  config = named_session("c");
  assert_open_fails(store, &config, "tiny", QKV_RESOURCE_EXHAUSTED, "limit-sessions is 2, all are in use");

  assert_int_equal(qkv_store_close(store, "default", "a", &bytes, NULL), QKV_OK);
  qkv_error errors[2] = {{0}, {0}};
  assert_int_equal(qkv_store_session(store, "default", "a", &found, &errors[0]), QKV_NOT_FOUND);
  assert_int_equal(qkv_store_close(store, "default", "a", &bytes, &errors[1]), QKV_NOT_FOUND);
  for (size_t i = 0; i < 2; i++) assert_string_equal(errors[i].text, "no session a");
  open_and_leave(store, "a", "tiny");
  qkv_session_unref(&opened);
  qkv_store_destroy(&store);
}

static void test_session_limits(void **state) {
  (void)state;
  qkv_store *store = make_store(1 << 20, 2, 2);
  must_register(store, "tiny");
  qkv_session_config config = named_session("");
  assert_open_fails(store, &config, "tiny", QKV_INVALID_ARGUMENT, "session is empty");
  config = named_session("a b");
  assert_open_fails(store, &config, "tiny", QKV_INVALID_ARGUMENT,
                    "session has byte 0x20 at 1, allowed are letters, digits and ._:/@-");
  config = named_session("a");
  config.policy.bits_k = 3.3;
  assert_open_fails(store, &config, "tiny", QKV_INVALID_ARGUMENT,
                    "policy.bits_k is 3.3, allowed are multiples of 0.125 up to 8");
  config = named_session("a");
  config.purpose = (qkv_purpose)3;
  assert_open_fails(store, &config, "tiny", QKV_INVALID_ARGUMENT,
                    "purpose is 3, allowed are 1 (attend) and 2 (fetch)");
  config = named_session("a");
  config.first_position = QKV_POSITION_MAX + 1;
  assert_open_fails(store, &config, "tiny", QKV_INVALID_ARGUMENT,
                    "first_position is 9007199254740993, at most 9007199254740992");
  config = named_session("a");
  config.tenant = "";
  assert_open_fails(store, &config, "tiny", QKV_INVALID_ARGUMENT, "tenant is empty");
  qkv_store_destroy(&store);
}

static qkv_status append_to(qkv_session *session, uint32_t layer, const sequence *rows, uint64_t begin, uint64_t end,
                            qkv_error *error) {
  row_pair pair;
  uint64_t appended, length;
  make_pair(&pair, rows, begin, end, QKV_FP16);
  qkv_status status =
      qkv_session_append(session, layer, begin, &pair.k.tensor, &pair.v.tensor, false, &appended, &length, error);
  free_pair(&pair);
  return status;
}

static uint64_t bytes_used(qkv_store *store) {
  return qkv_store_read_stats(store).memory.bytes_used;
}

// Closing frees when the last user is done, and not before.
static void test_close_while_in_use(void **state) {
  (void)state;
  qkv_store *store = make_store(1 << 20, 2, 2);
  must_register(store, "tiny");
  qkv_session *session = must_open(store, "a", "tiny");
  use_session(session);
  uint64_t empty = bytes_used(store), bytes = 0;
  sequence rows = make_sequence(qkv_session_model(session), 100, 1);
  assert_int_equal(append_to(session, 0, &rows, 0, 50, NULL), QKV_OK);
  uint64_t used = bytes_used(store);
  assert_true(used > empty);
  assert_int_equal(qkv_store_close(store, "default", "a", &bytes, NULL), QKV_OK);
  assert_int_equal(bytes, used - empty);
  assert_int_equal(append_to(session, 0, &rows, 50, 100, NULL), QKV_OK);
  assert_true(bytes_used(store) > used);
  qkv_session_unref(&session);
  assert_int_equal(bytes_used(store), 0);
  free_sequence(&rows);
  qkv_store_destroy(&store);
}

static uint64_t cost_of_an_empty_session(bool used) {
  qkv_store *store = make_store(1 << 20, 2, 2);
  must_register(store, "tiny");
  qkv_session *session = must_open(store, "a", "tiny");
  if (used) use_session(session);
  qkv_session_unref(&session);
  uint64_t bytes = bytes_used(store) - kind_cost();
  qkv_store_destroy(&store);
  return bytes;
}

static void test_the_budget_is_shared(void **state) {
  (void)state;
  char text[128];
  uint64_t empty = cost_of_an_empty_session(true), budget = 8000 + 2 * empty + kind_cost();
  qkv_store *store = make_store(budget, 2, 3);
  must_register(store, "tiny");
  qkv_session *a = must_open(store, "a", "tiny"), *b = must_open(store, "b", "tiny");
  sequence rows = make_sequence(qkv_session_model(a), 100, 1);
  use_session(b);
  assert_int_equal(append_to(a, 0, &rows, 0, 100, NULL), QKV_OK);
  qkv_error error = {0};
  assert_int_equal(append_to(b, 0, &rows, 0, 100, &error), QKV_RESOURCE_EXHAUSTED);
  (void)snprintf(text, sizeof text, "memory-budget is %d bytes, %d in use, 6144 more are needed", (int)budget,
                 (int)(6144 + 2 * empty + kind_cost()));
  assert_string_equal(error.text, text);
  uint64_t bytes;
  assert_int_equal(qkv_store_close(store, "default", "a", &bytes, NULL), QKV_OK);
  assert_int_equal(bytes, 6144);
  qkv_session_unref(&a);
  assert_int_equal(append_to(b, 0, &rows, 0, 100, NULL), QKV_OK);
  qkv_session_unref(&b);
  free_sequence(&rows);
  qkv_store_destroy(&store);
}

static void test_a_session_needs_headroom(void **state) {
  (void)state;
  char text[128];
  uint64_t empty = cost_of_an_empty_session(false), budget = 2 * empty + kind_cost(), bytes;
  qkv_store *store = make_store(budget, 2, 3);
  must_register(store, "tiny");
  open_and_leave(store, "a", "tiny");
  open_and_leave(store, "b", "tiny");
  qkv_session_config config = named_session("c");
  (void)snprintf(text, sizeof text, "memory-budget is %d bytes, %d in use, %d more are needed", (int)budget,
                 (int)budget, (int)empty);
  assert_open_fails(store, &config, "tiny", QKV_RESOURCE_EXHAUSTED, text);
  assert_int_equal(bytes_used(store), budget);
  listing list = {{0}, 0, 0};
  qkv_store_each_model(store, NULL, list_model, &list);
  assert_string_equal(list.text, "tiny:2 ");
  assert_int_equal(qkv_store_close(store, "default", "a", &bytes, NULL), QKV_OK);
  assert_int_equal(bytes, 0);
  open_and_leave(store, "c", "tiny");
  qkv_store_destroy(&store);
}

static void test_list(void **state) {
  (void)state;
  qkv_store *store = make_store(1 << 20, 2, 100);
  must_register(store, "tiny");
  char name[16];
  for (int i = 0; i < 40; i++) {
    (void)snprintf(name, sizeof name, "%s%02d", i % 2 != 0 ? "odd-" : "even-", i * 7 % 40);
    open_and_leave(store, name, "tiny");
  }
  qkv_session *page[7];
  qkv_store_place after = {.name = ""};
  const qkv_store_filter odd = {.prefix = "odd-", .after = &after};
  size_t total = 0, count;
  while ((count = qkv_store_list(store, &odd, page, 7)) > 0) {
    for (size_t i = 0; i < count; i++) {
      assert_true(strcmp(qkv_session_name(page[i]), after.name) > 0);
      after = qkv_store_place_of(page[i]);
      assert_memory_equal(after.name, "odd-", 4);
      qkv_session_unref(&page[i]);
    }
    assert_int_equal(count, total + 7 <= 20 ? 7 : 20 - total);
    total += count;
  }
  assert_int_equal(total, 20);
  assert_int_equal(qkv_store_list(store, &(qkv_store_filter){0}, page, 0), 0);
  assert_int_equal(qkv_store_list(store, &(qkv_store_filter){.prefix = "none"}, page, 7), 0);
  qkv_store_destroy(&store);
}

static qkv_session *open_of(qkv_store *store, const char *tenant, const char *name, bool staged) {
  qkv_session_config config = named_session(name);
  qkv_session *session = NULL;
  config.tenant = tenant;
  config.staged = staged;
  assert_int_equal(qkv_store_open(store, &config, "tiny", &session, NULL), QKV_OK);
  return session;
}

static bool finds(qkv_store *store, const char *tenant, const char *name, const qkv_session *expected) {
  const char *const names[] = {"nobody", name};
  qkv_session *found = NULL, *all[2];
  qkv_store_find(store, tenant, names, 2, all);
  const bool same =
      qkv_store_session(store, tenant, name, &found, NULL) == (expected == NULL ? QKV_NOT_FOUND : QKV_OK);
  const bool right = same && found == expected && all[0] == NULL && all[1] == expected;
  if (found != NULL) qkv_session_unref(&found);
  if (all[1] != NULL) qkv_session_unref(&all[1]);
  return right;
}

// Names of the maximum length, and pairs whose tenant and name joined by a slash look like others.
static void test_names_belong_to_tenants(void **state) {
  (void)state;
  enum { COUNT = 6 };
  char longest[QKV_NAME_MAX + 1];
  memset(longest, 'n', QKV_NAME_MAX);
  longest[QKV_NAME_MAX] = '\0';
  const char *const names[COUNT][2] = {{"a", "s"},     {"b", "s"},     {"default", "s"},
                                       {"a/s", "a/s"}, {"a", "s/a/s"}, {longest, longest}};
  qkv_store *store = make_store(1 << 20, 1, COUNT + 1);
  qkv_session *sessions[COUNT];
  uint64_t freed;
  must_share(store, "tiny");
  for (size_t i = 0; i < COUNT; i++) {
    assert_true(finds(store, names[i][0], names[i][1], NULL));
    sessions[i] = open_of(store, names[i][0], names[i][1], false);
  }
  qkv_session_config again = named_session("s");
  assert_open_fails(store, &again, "tiny", QKV_ALREADY_EXISTS, "the session s is open already");
  for (size_t i = 0; i < COUNT; i++) assert_true(finds(store, names[i][0], names[i][1], sessions[i]));
  assert_true(finds(store, longest, "s", NULL));

  qkv_error error = {0};
  assert_int_equal(qkv_store_close(store, "c", "s", &freed, &error), QKV_NOT_FOUND);
  assert_string_equal(error.text, "no session s of tenant c");
  assert_int_equal(qkv_store_close(store, "b", "s", &freed, NULL), QKV_OK);
  assert_int_equal(qkv_store_close_session(store, sessions[1], &freed, NULL), QKV_NOT_FOUND);
  for (size_t i = 0; i < COUNT; i++) {
    assert_true(finds(store, names[i][0], names[i][1], i == 1 ? NULL : sessions[i]));
    qkv_session_unref(&sessions[i]);
  }
  qkv_store_destroy(&store);
}

static void test_staged_sessions_of_tenants(void **state) {
  (void)state;
  qkv_store *store = make_store(1 << 20, 1, 10);
  must_share(store, "tiny");
  qkv_session *a = open_of(store, "a", "s", true), *b = open_of(store, "b", "s", true),
              *late = open_of(store, "a", "s", true);
  assert_true(finds(store, "a", "s", NULL) && finds(store, "b", "s", NULL));
  assert_int_equal(qkv_store_publish(store, a, NULL), QKV_OK);
  assert_int_equal(qkv_store_publish(store, b, NULL), QKV_OK);
  assert_int_equal(qkv_store_publish(store, late, NULL), QKV_ALREADY_EXISTS);
  assert_true(finds(store, "a", "s", a) && finds(store, "b", "s", b) && finds(store, "default", "s", NULL));
  qkv_session_unref(&a);
  qkv_session_unref(&b);
  qkv_session_unref(&late);
  qkv_store_destroy(&store);
}

// By name, then tenant; a list goes on between two sessions of one name.
static void test_lists_of_tenants(void **state) {
  (void)state;
  qkv_store *store = make_store(1 << 20, 1, 10);
  const char *const order[][2] = {{"b", "r"}, {"a", "s"}, {"b", "s"}, {"c", "s"}, {"a", "t"}};
  enum { COUNT = sizeof order / sizeof *order };
  must_share(store, "tiny");
  for (size_t i = COUNT; i-- > 0;) {
    qkv_session *session = open_of(store, order[i][0], order[i][1], false);
    qkv_session_unref(&session);
  }
  qkv_store_place after = {.name = ""};
  for (size_t i = 0; i < COUNT; i++) {
    qkv_session *next = NULL;
    assert_int_equal(qkv_store_list(store, &(qkv_store_filter){.after = &after}, &next, 1), 1);
    assert_true(qkv_store_is_behind(next, &after));
    after = qkv_store_place_of(next);
    assert_false(qkv_store_is_behind(next, &after));
    assert_string_equal(after.tenant, order[i][0]);
    assert_string_equal(after.name, order[i][1]);
    qkv_session_unref(&next);
  }
  qkv_session *found[COUNT];
  after = (qkv_store_place){.name = "s"};
  assert_int_equal(qkv_store_list(store, &(qkv_store_filter){.after = &after}, found, COUNT), 1);
  assert_string_equal(qkv_session_name(found[0]), "t");
  qkv_session_unref(&found[0]);
  assert_int_equal(qkv_store_list(store, &(qkv_store_filter){.tenant = "a"}, found, COUNT), 2);
  assert_string_equal(qkv_session_name(found[0]), "s");
  assert_string_equal(qkv_session_name(found[1]), "t");
  for (size_t i = 0; i < 2; i++) qkv_session_unref(&found[i]);
  assert_int_equal(qkv_store_list(store, &(qkv_store_filter){.tenant = "a", .prefix = "t"}, found, 0), 0);
  assert_int_equal(qkv_store_list(store, &(qkv_store_filter){.tenant = "d"}, found, COUNT), 0);
  qkv_store_destroy(&store);
}

// ---- Threads ----

enum { WRITERS = 2, READERS = 2, TOKENS = 300, SESSIONS = 3 };

typedef struct crowd {
  qkv_store *store;
  sequence rows;
  _Atomic bool done;
  _Atomic int wrong;  // what cmocka's asserts, which are for one thread, cannot say
} crowd;

static void session_name(char *name, size_t size, uint64_t i) {
  (void)snprintf(name, size, "shared-%d", (int)i);
}

// Every writer appends every session's rows: what the other has appended already is acknowledged.
static void *write_rows(void *context) {
  crowd *c = context;
  char name[16];
  for (uint64_t i = 0; i < SESSIONS; i++) {
    qkv_session *session;
    session_name(name, sizeof name, i);
    if (qkv_store_session(c->store, "default", name, &session, NULL) != QKV_OK) {
      c->wrong++;
      continue;
    }
    for (uint64_t begin = 0; begin < TOKENS; begin += 30) {
      for (uint32_t layer = 0; layer < 2; layer++) {
        if (append_to(session, layer, &c->rows, begin, begin + 30, NULL) != QKV_OK) c->wrong++;
      }
    }
    qkv_session_unref(&session);
  }
  return NULL;
}

static bool attend_once(qkv_session *session, uint32_t layer_index, uint64_t seed) {
  float q[2 * 16], out[2 * 8], lse[2];
  for (size_t i = 0; i < 32; i++) q[i] = random_normal(&seed);
  test_tensor tensor;
  make_tensor(&tensor, QKV_FP32, q, 1, 2, 16);
  const qkv_layer *layer;
  bool ok = qkv_session_read(session, layer_index, &layer, NULL) == QKV_OK;
  if (ok) {
    qkv_attend request = {.layer = layer, .position = layer->length, .q = tensor.tensor, .out = out, .lse = lse};
    ok = qkv_attend_check(&request, NULL) == QKV_OK && qkv_layer_validate(layer) == NULL;
    if (ok) qkv_attend_run(NULL, &request, 1);
    ok = ok && (layer->length == 0 ? lse[0] == -INFINITY : isfinite(lse[0]));
    qkv_session_read_done(session, layer_index);
  }
  free_tensor(&tensor);
  return ok;
}

static void *read_rows(void *context) {
  crowd *c = context;
  char name[16];
  for (uint64_t i = 0; !c->done; i++) {
    qkv_session *session = NULL, *listed[2];
    session_name(name, sizeof name, i % SESSIONS);
    if (qkv_store_session(c->store, "default", name, &session, NULL) != QKV_OK || !attend_once(session, i % 2, i))
      c->wrong++;
    qkv_session_unref(&session);
    size_t count = qkv_store_list(c->store, &(qkv_store_filter){0}, listed, 2);
    for (size_t j = 0; j < count; j++) {
      qkv_session_info info;
      qkv_session_read_info(listed[j], &info, NULL);
      qkv_session_unref(&listed[j]);
    }
  }
  return NULL;
}

static void *open_and_close(void *context) {
  crowd *c = context;
  qkv_session_config config = named_session("brief");
  while (!c->done) {
    qkv_session *session;
    uint64_t bytes;
    if (qkv_store_open(c->store, &config, "tiny", &session, NULL) != QKV_OK) {
      c->wrong++;
      break;
    }
    if (append_to(session, 0, &c->rows, 0, 70, NULL) != QKV_OK) c->wrong++;
    if (qkv_store_close(c->store, "default", "brief", &bytes, NULL) != QKV_OK || bytes == 0) c->wrong++;
    if (qkv_session_truncate(session, 10, NULL, 0, NULL) != QKV_OK) c->wrong++;
    qkv_session_unref(&session);
  }
  return NULL;
}

static void test_many_threads(void **state) {
  (void)state;
  crowd c = {.store = make_store(1 << 24, 2, 10)};
  must_register(c.store, "tiny");
  char name[16];
  for (uint64_t i = 0; i < SESSIONS; i++) {
    session_name(name, sizeof name, i);
    open_and_leave(c.store, name, "tiny");
  }
  const qkv_model *model;
  assert_int_equal(qkv_store_model(c.store, "default", "tiny", &model, NULL), QKV_OK);
  c.rows = make_sequence(model, TOKENS, 3);

  pthread_t writers[WRITERS], readers[READERS + 1];
  for (size_t i = 0; i < READERS; i++) assert_int_equal(pthread_create(&readers[i], NULL, read_rows, &c), 0);
  assert_int_equal(pthread_create(&readers[READERS], NULL, open_and_close, &c), 0);
  for (size_t i = 0; i < WRITERS; i++) assert_int_equal(pthread_create(&writers[i], NULL, write_rows, &c), 0);
  for (size_t i = 0; i < WRITERS; i++) assert_int_equal(pthread_join(writers[i], NULL), 0);
  c.done = true;
  for (size_t i = 0; i <= READERS; i++) assert_int_equal(pthread_join(readers[i], NULL), 0);
  assert_int_equal(c.wrong, 0);

  for (uint64_t i = 0; i < SESSIONS; i++) {
    qkv_session *session;
    qkv_session_info info;
    uint64_t lengths[2];
    session_name(name, sizeof name, i);
    assert_int_equal(qkv_store_session(c.store, "default", name, &session, NULL), QKV_OK);
    qkv_session_read_info(session, &info, lengths);
    assert_true(lengths[0] == TOKENS && lengths[1] == TOKENS);
    qkv_session_unref(&session);
  }
  free_sequence(&c.rows);
  qkv_store_destroy(&c.store);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_models),
      cmocka_unit_test(test_overrides),
      cmocka_unit_test(test_each_model_in_order),
      cmocka_unit_test(test_models_are_a_tenants),
      cmocka_unit_test(test_shared_models),
      cmocka_unit_test(test_sessions),
      cmocka_unit_test(test_session_limits),
      cmocka_unit_test(test_close_while_in_use),
      cmocka_unit_test(test_the_budget_is_shared),
      cmocka_unit_test(test_a_session_needs_headroom),
      cmocka_unit_test(test_list),
      cmocka_unit_test(test_names_belong_to_tenants),
      cmocka_unit_test(test_staged_sessions_of_tenants),
      cmocka_unit_test(test_lists_of_tenants),
      cmocka_unit_test(test_many_threads),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
