// Append of coded pages against the real daemon: pages that were coded here or fetched elsewhere are what the daemon
// would have coded itself, and what is wrong with them is refused and changes nothing.
#include <signal.h>

#include "tests/client/c/coded_scene.h"

static fixture_daemon *qkvd, *other;
static qkv_client *client, *other_client;
static char directory[128];

static void start(fixture_daemon **daemon, qkv_client **to, const char *const *arguments) {
  qkv_call_error error = {0};
  *daemon = fixture_start(arguments);
  ok(qkv_client_connect((*daemon)->unix_address, NULL, to, &error), &error);
  const qkv_client_model model = scene_model("m");
  ok(qkv_client_register_model(*to, &model, &error), &error);
}

static int setup(void **state) {
  (void)state;
  scene_fill();
  fixture_make_directory(directory, sizeof directory);
  start(&qkvd, &client, (const char *const[]){"--data-dir", directory, NULL});
  start(&other, &other_client, NULL);
  return 0;
}

static int teardown(void **state) {
  (void)state;
  qkv_client_close(&client);
  qkv_client_close(&other_client);
  assert_int_equal(fixture_stop(&qkvd, SIGTERM, 20000), 0);
  assert_int_equal(fixture_stop(&other, SIGTERM, 20000), 0);
  fixture_remove_directory(directory);
  return 0;
}

static void open_session(qkv_client *in, const char *session, int purpose, int durability) {
  qkv_call_error error = {0};
  const qkv_session_options options = {
      .session = session, .model = "m", .purpose = purpose, .durability = durability};
  ok(qkv_client_open_session(in, &options, &error), &error);
}

static void close_session(qkv_client *in, const char *session) {
  qkv_call_error error = {0};
  ok(qkv_client_close_session(in, session, NULL, &error), &error);
}

static uint64_t length_of(const char *session) {
  qkv_call_error error = {0};
  qkv_client_session_info info;
  ok(qkv_client_get_session(client, session, &info, &error), &error);
  const uint64_t length = info.lengths[0];
  qkv_free(info.lengths);
  return length;
}

// ---- Pages of a session, kept ----

enum { PAGES_MAX = 32, IMAGE_MAX = 1 << 14 };

typedef struct kept_pages {
  size_t count[LAYERS];
  qkv_client_page pages[LAYERS][PAGES_MAX];
  uint8_t images[LAYERS][PAGES_MAX][IMAGE_MAX];
} kept_pages;

static bool keep_page(void *context, const qkv_client_page *page) {
  kept_pages *all = context;
  const size_t i = all->count[page->layer]++;
  assert_true(i < PAGES_MAX && page->bytes <= IMAGE_MAX);
  memcpy(all->images[page->layer][i], page->image, page->bytes);
  all->pages[page->layer][i] = *page;
  all->pages[page->layer][i].image = all->images[page->layer][i];
  return true;
}

static bool pass_rows(void *context, const qkv_client_rows *rows) {
  (void)context;
  (void)rows;
  return true;
}

static kept_pages *fetch_pages(qkv_client *from, const char *session) {
  qkv_call_error error = {0};
  kept_pages *all = calloc(1, sizeof *all);
  assert_non_null(all);
  const qkv_client_coded_receiver to = {keep_page, pass_rows, all};
  const qkv_client_fetch request = {.session = session};
  ok(qkv_client_fetch_pages(from, &request, &to, &error), &error);
  return all;
}

static void same_pages(const kept_pages *a, const kept_pages *b) {
  for (size_t layer = 0; layer < LAYERS; layer++) {
    assert_int_equal(a->count[layer], b->count[layer]);
    for (size_t i = 0; i < a->count[layer]; i++) {
      const qkv_client_page *x = &a->pages[layer][i], *y = &b->pages[layer][i];
      assert_int_equal(x->position, y->position);
      assert_int_equal(x->tokens, y->tokens);
      assert_true(x->calibration_hash == y->calibration_hash);
      assert_int_equal(x->bytes, y->bytes);
      assert_memory_equal(x->image, y->image, x->bytes);
    }
  }
}

static qkv_code append_pages(qkv_client *to, const char *session, uint32_t layer, const qkv_client_page *pages,
                             size_t count, uint64_t *appended, qkv_call_error *error) {
  const qkv_client_item item = {
      .session = session, .layer = layer, .position = pages[0].position, .pages = pages, .page_count = count};
  return qkv_client_append(to, &item, 1, appended, error);
}

static void append_all(qkv_client *to, const char *session, const kept_pages *all) {
  qkv_call_error error = {0};
  for (uint32_t layer = 0; layer < LAYERS; layer++)
    ok(append_pages(to, session, layer, all->pages[layer], all->count[layer], NULL, &error), &error);
}

// ---- Coded here ----

static void encoded_of(int purpose) {
  qkv_call_error error = {0};
  uint64_t appended;
  open_session(client, "rows", purpose, 1);
  open_session(client, "pages", purpose, 1);
  scene_append(client, "rows", 0, TOKENS);
  for (uint32_t layer = 0; layer < LAYERS; layer++) {
    const qkv_client_item item = scene_item("pages", layer, 0, TOKENS);
    ok(qkv_client_append_encoded(client, &item, layer, &appended, &error), &error);
    assert_int_equal(appended, TOKENS);
  }
  kept_pages *rows = fetch_pages(client, "rows"), *pages = fetch_pages(client, "pages");
  assert_true(rows->count[0] > 4);
  same_pages(rows, pages);
  qkv_client_session_info a, b;
  ok(qkv_client_get_session(client, "rows", &a, &error), &error);
  ok(qkv_client_get_session(client, "pages", &b, &error), &error);
  assert_int_equal(a.bytes_coded, b.bytes_coded);
  assert_int_equal(a.bytes_exact, b.bytes_exact);
  assert_true(a.bytes_overhead > 0);
  assert_int_equal(b.bytes_overhead, 0);  // averages of attention, which are made when attention is first counted
  assert_memory_equal(a.lengths, b.lengths, LAYERS * sizeof *a.lengths);
  qkv_free(a.lengths);
  qkv_free(b.lengths);
  free(rows);
  free(pages);
  close_session(client, "rows");
  close_session(client, "pages");
}

static void test_encoded_here(void **state) {
  (void)state;
  encoded_of(1);
  encoded_of(2);
}

static void test_encoded_with_a_calibration(void **state) {
  (void)state;
  const qkv_calibration *calibration = scene_calibrate(3);
  scene_calibrated(client, calibration);
  encoded_of(1);
  encoded_of(2);
  qkv_calibration_unref(&calibration);
}

// The ids of an item go along with its pages and with the rows behind them.
static void test_encoded_with_token_ids(void **state) {
  (void)state;
  qkv_call_error error = {0};
  uint32_t ids[TOKENS];
  for (size_t i = 0; i < TOKENS; i++) ids[i] = (uint32_t)(7 * i + 1);
  open_session(client, "ids", 1, 1);
  for (uint32_t layer = 0; layer < LAYERS; layer++) {
    qkv_client_item item = scene_item("ids", layer, 0, TOKENS);
    item.token_ids = ids;
    ok(qkv_client_append_encoded(client, &item, 1, NULL, &error), &error);
  }
  const qkv_client_prompt prompt = {.model = "m", .token_ids = ids, .token_count = TOKENS};
  qkv_client_match match;
  ok(qkv_client_match_prefix(client, &prompt, &match, &error), &error);
  assert_string_equal(match.session, "ids");
  assert_int_equal(match.tokens, TOKENS / 64 * 64);
  close_session(client, "ids");
}

// Messages begin small, so that the link has something to carry while the others are coded: those before a row that
// is refused have been appended, and sending all again continues behind them.
static void test_encoded_message_by_message(void **state) {
  (void)state;
  enum { MANY = 200 * 64 };
  qkv_call_error error = {0};
  uint64_t appended, again;
  float *k = calloc(MANY, K_ROW * sizeof *k), *v = calloc(MANY, V_ROW * sizeof *v);
  assert_non_null(k);
  assert_non_null(v);
  for (size_t i = 0; i < (size_t)MANY * K_ROW; i++) k[i] = (&scene_k[0][0][0])[i % (sizeof scene_k / sizeof *k)];
  for (size_t i = 0; i < (size_t)MANY * V_ROW; i++) v[i] = (&scene_v[0][0][0])[i % (sizeof scene_v / sizeof *v)];
  open_session(client, "many", 1, 1);
  const qkv_client_item item = {
      .session = "many",
      .k = {QKV_CLIENT_FP32, 3, {MANY, KV_HEADS, KEY_DIM}, {0}, k, (size_t)MANY * K_ROW * sizeof *k},
      .v = {QKV_CLIENT_FP32, 3, {MANY, KV_HEADS, VALUE_DIM}, {0}, v, (size_t)MANY * V_ROW * sizeof *v}};
  float *const last = &v[(size_t)(MANY - 100) * V_ROW + 5];
  *last = 1e9f;
  assert_int_equal(qkv_client_append_encoded(client, &item, 2, &appended, &error), QKV_INVALID_ARGUMENT);
  assert_non_null(strstr(error.text, "v[28, 0, 5] is 1e+09"));  // of its page
  assert_in_range(appended, 64, MANY - 128);
  assert_int_equal(length_of("many"), appended);
  *last = 0;
  ok(qkv_client_append_encoded(client, &item, 2, &again, &error), &error);
  assert_int_equal(appended + again, MANY);
  close_session(client, "many");
  free(k);
  free(v);
}

// ---- From another daemon ----

static void keep_calibration(qkv_client *in, const qkv_calibration *calibration) {
  qkv_call_error error = {0};
  qkv_client_model model = scene_model("m");
  model.calibration = qkv_calibration_bytes(calibration, &model.calibration_bytes);
  model.calibration_kept = true;
  ok(qkv_client_register_model(in, &model, &error), &error);
}

static void same_attention(qkv_client *a, const char *in_a, qkv_client *b, const char *in_b) {
  qkv_call_error error = {0};
  for (uint32_t layer = 0; layer < LAYERS; layer++) {
    qkv_client_item item = {.session = in_a, .layer = layer, .position = TOKENS - 1};
    item.q =
        (qkv_client_tensor){QKV_CLIENT_FP32, 3, {1, Q_HEADS, KEY_DIM}, {0}, scene_k[layer][5], Q_HEADS * KEY_DIM * 4};
    qkv_client_result x, y;
    ok(qkv_client_attend(a, &item, 1, &x, &error), &error);
    item.session = in_b;
    ok(qkv_client_attend(b, &item, 1, &y, &error), &error);
    assert_memory_equal(x.out, y.out, x.out_count * sizeof *x.out);
    assert_memory_equal(x.lse, y.lse, x.lse_count * sizeof *x.lse);
    qkv_client_results_free(&x, 1);
    qkv_client_results_free(&y, 1);
  }
}

// Of `client` to `other_client`, with a calibration that the other one does not have at first.
static void moved_of(int purpose) {
  qkv_call_error error = {0};
  const qkv_calibration *calibration = scene_calibrate(4);
  open_session(client, "s", purpose, 1);
  open_session(other_client, "s", purpose, 1);
  scene_append(client, "s", 0, 150);
  scene_calibrated(client, calibration);
  scene_append(client, "s", 150, 300);
  ok(qkv_client_truncate(client, "s", 250, &error), &error);
  scene_append(client, "s", 250, TOKENS);
  kept_pages *pages = fetch_pages(client, "s");
  const size_t count = pages->count[0];
  size_t calibrated = 0;
  while (calibrated < count && pages->pages[0][calibrated].calibration_hash != qkv_calibration_hash(calibration))
    calibrated++;
  if (purpose == 1) {  // the other daemon has it afterwards
    assert_in_range(calibrated, 1, count - 1);
    assert_int_equal(append_pages(other_client, "s", 0, pages->pages[0], count, NULL, &error),
                     QKV_FAILED_PRECONDITION);
    assert_non_null(strstr(error.text, "which the daemon does not have"));
    keep_calibration(other_client, calibration);
    // Nothing of that became the model's.
    qkv_client_session_info info;
    ok(qkv_client_get_session(other_client, "s", &info, &error), &error);
    assert_int_equal(info.calibration, 0);
    assert_int_equal(info.lengths[0], 0);
    qkv_free(info.lengths);
    pages->pages[0][calibrated].calibration_hash++;
    assert_int_equal(append_pages(other_client, "s", 0, pages->pages[0], count, NULL, &error),
                     QKV_FAILED_PRECONDITION);
    assert_non_null(strstr(error.text, "calibration_hash is"));
    pages->pages[0][calibrated].calibration_hash--;
  }
  append_all(other_client, "s", pages);
  kept_pages *arrived = fetch_pages(other_client, "s");
  same_pages(pages, arrived);
  // The exact tail follows as rows.
  const qkv_client_page *last = &pages->pages[0][count - 1];
  scene_append(other_client, "s", last->position + last->tokens, TOKENS);
  same_attention(client, "s", other_client, "s");
  scene_same_forms(other_client, "s");
  free(pages);
  free(arrived);
  close_session(client, "s");
  close_session(other_client, "s");
  qkv_calibration_unref(&calibration);
}

static void test_from_another_daemon(void **state) {
  (void)state;
  moved_of(1);
  moved_of(2);
}

// ---- Rules ----

static void refused(const char *session, const qkv_client_page *pages, size_t count, qkv_code code,
                    const char *text) {
  qkv_call_error error = {0};
  const uint64_t before = length_of(session);
  const qkv_code got = append_pages(client, session, 0, pages, count, NULL, &error);
  if (got != code || strstr(error.text, text) == NULL) fail_msg("%d: %s", got, error.text);
  assert_int_equal(length_of(session), before);
}

static void test_places(void **state) {
  (void)state;
  qkv_call_error error = {0};
  uint64_t appended;
  open_session(client, "from", 1, 1);
  open_session(client, "to", 1, 1);
  scene_append(client, "from", 0, TOKENS);
  kept_pages *all = fetch_pages(client, "from");
  const qkv_client_page *pages = all->pages[0];
  refused("to", pages + 1, 1, QKV_FAILED_PRECONDITION, "items[0].position is 64, the expected position is 0");
  refused("to", (qkv_client_page[]){pages[0], pages[2]}, 2, QKV_INVALID_ARGUMENT,
          "items[0].pages[1].image begins at position 128, expected 64");
  ok(append_pages(client, "to", 0, pages, 2, &appended, &error), &error);
  assert_int_equal(appended, 128);
  // Again, and more of it.
  ok(append_pages(client, "to", 0, pages, 2, &appended, &error), &error);
  assert_int_equal(appended, 0);
  ok(append_pages(client, "to", 0, pages + 1, 2, &appended, &error), &error);
  assert_int_equal(appended, 64);
  qkv_client_page shorter = pages[1];
  shorter.tokens = 63;
  refused("to", &shorter, 1, QKV_ALREADY_EXISTS, "position 64 holds another page already");
  // Of the other layer.
  refused("to", all->pages[1] + 3, 1, QKV_INVALID_ARGUMENT, "pages[0].image is of layer 1, expected 0");
  // Exact rows end it.
  const qkv_client_item item = scene_item("to", 0, 192, 200);
  ok(qkv_client_append(client, &item, 1, NULL, &error), &error);
  refused("to", (qkv_client_page[]){pages[3]}, 1, QKV_FAILED_PRECONDITION, "pages follow pages only");
  ok(append_pages(client, "to", 0, pages, 3, &appended, &error), &error);
  assert_int_equal(appended, 0);
  // One that has lost bits since is another one.
  const qkv_client_scope scope = {.session = "to", .begin = 64, .end = 128};
  ok(qkv_client_demote(client, &scope, 1, true, NULL, &error), &error);
  refused("to", pages + 1, 1, QKV_ALREADY_EXISTS, "position 64 holds another page already");
  free(all);
  close_session(client, "from");
  close_session(client, "to");
}

static void test_hostile_pages(void **state) {
  (void)state;
  open_session(client, "from", 1, 1);
  open_session(client, "to", 1, 1);
  open_session(client, "archive", 2, 1);
  scene_append(client, "from", 0, TOKENS);
  kept_pages *all = fetch_pages(client, "from");
  qkv_client_page page = all->pages[0][0];
  uint8_t *image = all->images[0][0];
  refused("archive", &page, 1, QKV_INVALID_ARGUMENT, "items[0].pages[0].image is refused: page.frame is");
  // Every byte of the header and some of the others.
  for (size_t i = 0; i < page.bytes; i += i < 128 ? 1 : 97) {
    image[i] ^= 0x11;
    qkv_call_error error = {0};
    const qkv_code code = append_pages(client, "to", 0, &page, 1, NULL, &error);
    if (code != QKV_INVALID_ARGUMENT && code != QKV_FAILED_PRECONDITION) fail_msg("byte %zu: %d", i, code);
    image[i] ^= 0x11;
  }
  assert_int_equal(length_of("to"), 0);
  for (uint32_t tokens = 0; tokens < 100; tokens += 65) {
    page.tokens = tokens;
    refused("to", &page, 1, QKV_INVALID_ARGUMENT, "the page has 1 to 64");
  }
  page = all->pages[0][0];
  for (size_t bytes = 1; bytes < page.bytes; bytes = bytes * 2 + 1) {
    qkv_client_page cut = page;
    cut.bytes = bytes;
    qkv_call_error error = {0};
    assert_int_equal(append_pages(client, "to", 0, &cut, 1, NULL, &error), QKV_INVALID_ARGUMENT);
  }
  // More bits than the session's policy gives.
  qkv_call_error error = {0};
  const qkv_client_policy policy = {.bits_k = 2, .bits_v = 2, .recent_window = -1};
  const qkv_session_options options = {.session = "small", .model = "m", .policy = &policy, .durability = 1};
  ok(qkv_client_open_session(client, &options, &error), &error);
  refused("small", &page, 1, QKV_INVALID_ARGUMENT, "the coder has");
  // It is fine after all.
  ok(append_pages(client, "to", 0, &page, 1, NULL, &error), &error);
  assert_int_equal(length_of("to"), 64);
  free(all);
  close_session(client, "from");
  close_session(client, "to");
  close_session(client, "archive");
  close_session(client, "small");
}

static void test_items_with_pages(void **state) {
  (void)state;
  qkv_call_error error = {0};
  open_session(client, "s", 1, 1);
  scene_append(client, "s", 0, TOKENS);
  kept_pages *all = fetch_pages(client, "s");
  qkv_client_item item = scene_item("s", 0, 0, 10);
  item.pages = all->pages[0];
  item.page_count = 1;
  assert_int_equal(qkv_client_append(client, &item, 1, NULL, &error), QKV_INVALID_ARGUMENT);
  assert_non_null(strstr(error.text, "items[0].pages is set, and so are k and v"));
  item = (qkv_client_item){.session = "s", .pages = all->pages[0], .page_count = 1};
  qkv_client_result result;
  assert_int_equal(qkv_client_attend(client, &item, 1, &result, &error), QKV_INVALID_ARGUMENT);
  assert_non_null(strstr(error.text, "Append alone takes pages"));
  qkv_client_results_free(&result, 1);
  item.layer = LAYERS;
  assert_int_equal(qkv_client_append(client, &item, 1, NULL, &error), QKV_INVALID_ARGUMENT);
  assert_non_null(strstr(error.text, "items[0].layer is 2"));
  free(all);
  close_session(client, "s");
}

// ---- On the SSD ----

static void wait_durable(const char *session, uint64_t position) {
  qkv_call_error error = {0};
  for (int i = 0; i < 2000; i++) {
    qkv_client_session_info info;
    ok(qkv_client_get_session(client, session, &info, &error), &error);
    const bool durable = info.durable != NULL && info.durable[0] >= position && info.durable[1] >= position;
    qkv_free(info.lengths);
    if (durable) return;
    fixture_sleep_ms(10);
  }
  fail_msg("position %d is not durable", (int)position);
}

// Pages go to the SSD as sealed ones do, leave memory, are compared with what is there, and outlive the process,
// together with a calibration that is not the model's.
static void test_ssd(void **state) {
  (void)state;
  qkv_call_error error = {0};
  uint64_t appended;
  const qkv_calibration *calibration = scene_calibrate(6);
  open_session(other_client, "s", 1, 1);
  open_session(client, "s", 1, 2);
  scene_calibrated(other_client, calibration);
  scene_append(other_client, "s", 0, TOKENS);
  keep_calibration(client, calibration);
  kept_pages *all = fetch_pages(other_client, "s");
  append_all(client, "s", all);
  const size_t count = all->count[0];
  wait_durable("s", all->pages[0][count - 1].position);
  ok(qkv_client_sink_session(client, "s", NULL, &error), &error);
  ok(append_pages(client, "s", 0, all->pages[0], count, &appended, &error), &error);
  assert_int_equal(appended, 0);
  ok(qkv_client_sink_session(client, "s", NULL, &error), &error);
  all->pages[0][1].tokens = 60;
  assert_int_equal(append_pages(client, "s", 0, all->pages[0] + 1, 1, &appended, &error), QKV_ALREADY_EXISTS);
  all->pages[0][1].tokens = 64;
  qkv_client_session_info info;
  ok(qkv_client_get_session(client, "s", &info, &error), &error);
  const uint32_t in_force = info.calibration;
  assert_true(in_force != qkv_calibration_version(calibration));
  qkv_free(info.lengths);

  qkv_client_close(&client);
  assert_int_equal(fixture_stop(&qkvd, SIGTERM, 20000), 0);
  qkvd = fixture_start((const char *const[]){"--data-dir", directory, NULL});
  ok(qkv_client_connect(qkvd->unix_address, NULL, &client, &error), &error);
  kept_pages *after = fetch_pages(client, "s");
  same_pages(all, after);
  ok(qkv_client_get_session(client, "s", &info, &error), &error);
  assert_true(info.calibration != qkv_calibration_version(calibration));
  qkv_free(info.lengths);
  free(all);
  free(after);
  close_session(client, "s");
  close_session(other_client, "s");
  qkv_calibration_unref(&calibration);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_encoded_here),
      cmocka_unit_test(test_from_another_daemon),
      cmocka_unit_test(test_encoded_with_a_calibration),
      cmocka_unit_test(test_encoded_with_token_ids),
      cmocka_unit_test(test_encoded_message_by_message),
      cmocka_unit_test(test_places),
      cmocka_unit_test(test_hostile_pages),
      cmocka_unit_test(test_items_with_pages),
      cmocka_unit_test(test_ssd),
  };
  return cmocka_run_group_tests(tests, setup, teardown);
}
