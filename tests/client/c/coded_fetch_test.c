// Coded fetch against the real daemon: pages that are decoded here have the bits of rows that the daemon decodes,
// whatever the pages have been through.
#include <signal.h>

#include "tests/client/c/coded_scene.h"

static fixture_daemon *qkvd;
static qkv_client *client;
static char directory[128];

static int setup(void **state) {
  (void)state;
  qkv_call_error error = {0};
  scene_fill();
  fixture_make_directory(directory, sizeof directory);
  const char *arguments[] = {"--data-dir", directory, NULL};
  qkvd = fixture_start(arguments);
  ok(qkv_client_connect(qkvd->unix_address, NULL, &client, &error), &error);
  const qkv_client_model model = scene_model("m");
  ok(qkv_client_register_model(client, &model, &error), &error);
  return 0;
}

static int teardown(void **state) {
  (void)state;
  qkv_client_close(&client);
  assert_int_equal(fixture_stop(&qkvd, SIGTERM, 20000), 0);
  fixture_remove_directory(directory);
  return 0;
}

static void open_session(const char *session, int purpose, int durability) {
  qkv_call_error error = {0};
  const qkv_session_options options = {
      .session = session, .model = "m", .purpose = purpose, .durability = durability};
  ok(qkv_client_open_session(client, &options, &error), &error);
}

static void close_session(const char *session) {
  qkv_call_error error = {0};
  ok(qkv_client_close_session(client, session, NULL, &error), &error);
}

static void for_each_purpose(void (*test)(int purpose)) {
  test(1);
  test(2);
}

static void fresh_of(int purpose) {
  open_session("s", purpose, 1);
  scene_append(client, "s", 0, TOKENS);
  scene_same_forms(client, "s");
  close_session("s");
}

static void test_fresh_pages(void **state) {
  (void)state;
  for_each_purpose(fresh_of);
}

static bool count_bytes(void *context, const void *data, size_t bytes) {
  (void)data;
  *(size_t *)context += bytes;
  return true;
}

static qkv_code get_version(uint32_t version, size_t *bytes) {
  *bytes = 0;
  return qkv_client_get_calibration_version(client, "m", version, count_bytes, bytes, NULL);
}

static void calibrated_of(int purpose) {
  const qkv_calibration *first = scene_calibrate(3), *second = scene_calibrate(5);
  size_t bytes, arrived;
  open_session("s", purpose, 1);
  scene_append(client, "s", 0, 130);
  scene_calibrated(client, first);
  scene_append(client, "s", 130, 260);
  scene_calibrated(client, second);
  scene_append(client, "s", 260, TOKENS);
  scene_same_forms(client, "s");
  // A version that is not in force any more, as long as a session has pages of it.
  (void)qkv_calibration_bytes(first, &bytes);
  assert_int_equal(get_version(qkv_calibration_version(first), &arrived), 0);
  assert_int_equal(arrived, bytes);
  assert_int_equal(get_version(qkv_calibration_version(second), &arrived), 0);
  close_session("s");
  assert_int_equal(get_version(qkv_calibration_version(first), &arrived), QKV_NOT_FOUND);
  assert_int_equal(get_version(qkv_calibration_version(second), &arrived), 0);
  qkv_calibration_unref(&first);
  qkv_calibration_unref(&second);
}

static void test_several_calibrations(void **state) {
  (void)state;
  for_each_purpose(calibrated_of);
}

static void demoted_of(int purpose) {
  qkv_call_error error = {0};
  const qkv_client_scope scope = {.session = "s", .begin = 64, .end = 192};
  qkv_client_tiers tiers;
  open_session("s", purpose, 1);
  scene_append(client, "s", 0, TOKENS);
  ok(qkv_client_demote(client, &scope, 1, true, &tiers, &error), &error);
  assert_true(tiers.pages > 0);
  scene_same_forms(client, "s");
  close_session("s");
}

static void test_demoted_pages(void **state) {
  (void)state;
  for_each_purpose(demoted_of);
}

static void truncated_of(int purpose) {
  qkv_call_error error = {0};
  open_session("s", purpose, 1);
  scene_append(client, "s", 0, TOKENS);
  ok(qkv_client_truncate(client, "s", 100, &error), &error);
  scene_append(client, "s", 100, TOKENS);
  scene_same_forms(client, "s");
  close_session("s");
}

static void test_truncated_pages(void **state) {
  (void)state;
  for_each_purpose(truncated_of);
}

static void cold_of(int purpose) {
  qkv_call_error error = {0};
  qkv_client_session_info info;
  open_session("s", purpose, 2);
  scene_append(client, "s", 0, TOKENS);
  for (int i = 0; i < 3; i++) {
    ok(qkv_client_sink_session(client, "s", NULL, &error), &error);
    ok(qkv_client_get_session(client, "s", &info, &error), &error);
    assert_true(info.tokens_cold > 0);
    qkv_free(info.lengths);
    // The coded fetch comes first, so it is the one that restores.
    static const uint32_t layers[] = {0, 1};
    static float k[2][TOKENS][K_ROW];
    const qkv_client_fetch request = {
        .session = "s", .layers = layers, .layer_count = 2, .begin = 70, .dtype = QKV_CLIENT_FP32};
    qkv_client_layer_rows rows[] = {{.k = k[0], .capacity = TOKENS}, {.k = k[1], .capacity = TOKENS}};
    ok(qkv_client_fetch_decoded(client, &request, 2, rows, &error), &error);
    assert_int_equal(rows[1].tokens, TOKENS - 70);
    scene_same_forms(client, "s");
  }
  close_session("s");
}

static void test_cold_pages(void **state) {
  (void)state;
  for_each_purpose(cold_of);
}

// What a receiver of pages as they are sees of truncated and partly asked pages.
typedef struct seen {
  size_t pages, rows;
  uint64_t next;  // position
  uint32_t tokens[16];
} seen;

static bool see_page(void *context, const qkv_client_page *page) {
  seen *all = context;
  qkv_page_header header;
  memcpy(&header, page->image, sizeof header);
  if (all->pages > 0) assert_int_equal(page->position, all->next);
  assert_int_equal(header.position, page->position);
  assert_int_equal(header.bytes, page->bytes);
  assert_in_range(page->tokens, 1, header.tokens);
  all->tokens[all->pages++] = page->tokens;
  all->next = page->position + page->tokens;
  return true;
}

static bool see_rows(void *context, const qkv_client_rows *rows) {
  seen *all = context;
  assert_int_equal(rows->position, all->next);
  all->rows += (size_t)rows->k.dims[0];
  all->next += (uint64_t)rows->k.dims[0];
  return true;
}

static void test_pages_as_they_are(void **state) {
  (void)state;
  qkv_call_error error = {0};
  open_session("s", 1, 1);
  scene_append(client, "s", 0, 200);
  ok(qkv_client_truncate(client, "s", 100, &error), &error);
  scene_append(client, "s", 100, 300);
  // Pages at 0, 64 (36 tokens), 100, 164; exact from 228 on.
  seen all = {0};
  const uint32_t layer = 1;
  const qkv_client_coded_receiver to = {see_page, see_rows, &all};
  qkv_client_fetch request = {.session = "s", .layers = &layer, .layer_count = 1};
  ok(qkv_client_fetch_pages(client, &request, &to, &error), &error);
  assert_int_equal(all.pages, 4);
  assert_int_equal(all.tokens[1], 36);
  assert_int_equal(all.next, 300);
  assert_int_equal(all.rows, 72);
  all = (seen){0};
  request.begin = 70;
  request.end = 110;
  ok(qkv_client_fetch_pages(client, &request, &to, &error), &error);
  assert_int_equal(all.pages, 2);
  assert_int_equal(all.next, 164);
  assert_int_equal(all.rows, 0);
  request.part = 1;
  assert_int_equal(qkv_client_fetch_pages(client, &request, &to, &error), QKV_INVALID_ARGUMENT);
  assert_non_null(strstr(error.text, "part is 1"));
  close_session("s");
}

static void test_bad_requests(void **state) {
  (void)state;
  qkv_call_error error = {0};
  const uint32_t layers[] = {0, 1}, twice[] = {0, 0};
  static float k[TOKENS][K_ROW];
  qkv_client_layer_rows rows[] = {{.k = k, .capacity = 100}, {.capacity = TOKENS}};
  open_session("s", 1, 1);
  scene_append(client, "s", 0, 200);
  qkv_client_fetch request = {.session = "s", .layers = layers, .layer_count = 2, .dtype = QKV_CLIENT_FP32};
  assert_int_equal(qkv_client_fetch_decoded(client, &request, 2, rows, &error), QKV_INVALID_ARGUMENT);
  assert_non_null(strstr(error.text, "layers[0].capacity is 100"));
  assert_int_equal(rows[0].tokens, 0);
  rows[0].capacity = TOKENS;
  rows[0].k_bytes = sizeof k - 1;
  assert_int_equal(qkv_client_fetch_decoded(client, &request, 2, rows, &error), QKV_INVALID_ARGUMENT);
  assert_string_equal(error.text,
                      "layers[0].k_bytes is 51199, capacity is 400 rows, of 128 bytes each in this session");
  rows[0].k_bytes = sizeof k;
  request.layers = twice;
  assert_int_equal(qkv_client_fetch_decoded(client, &request, 2, rows, &error), QKV_INVALID_ARGUMENT);
  request.layers = layers;
  request.heads_first = true;
  assert_int_equal(qkv_client_fetch_decoded(client, &request, 2, rows, &error), QKV_INVALID_ARGUMENT);
  request.heads_first = false;
  request.session = "nobody";
  assert_int_equal(qkv_client_fetch_decoded(client, &request, 2, rows, &error), QKV_NOT_FOUND);
  // The client is as before.
  request.session = "s";
  ok(qkv_client_fetch_decoded(client, &request, 2, rows, &error), &error);
  assert_int_equal(rows[1].tokens, 200);
  close_session("s");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_fresh_pages),          cmocka_unit_test(test_demoted_pages),
      cmocka_unit_test(test_truncated_pages),      cmocka_unit_test(test_cold_pages),
      cmocka_unit_test(test_pages_as_they_are),    cmocka_unit_test(test_bad_requests),
      cmocka_unit_test(test_several_calibrations),
  };
  return cmocka_run_group_tests(tests, setup, teardown);
}
