// Pages that a program decodes and codes itself, against the real daemon: the bits are the daemon's.
#include <math.h>
#include <pthread.h>
#include <signal.h>

#include "engine/base/tensor.h"
#include "tests/client/c/coded_scene.h"

enum { PAGES_MAX = 16, PAGE = 64, THREADS = 4 };

static fixture_daemon *qkvd;
static qkv_client *client;

// Pages of one layer, copied out of a fetch.
typedef struct held_pages {
  qkv_client_page pages[PAGES_MAX];
  size_t count;
} held_pages;

static int setup(void **state) {
  (void)state;
  qkv_call_error error = {0};
  scene_fill();
  qkvd = fixture_start(NULL);
  ok(qkv_client_connect(qkvd->unix_address, NULL, &client, &error), &error);
  const qkv_client_model model = scene_model("m");
  ok(qkv_client_register_model(client, &model, &error), &error);
  return 0;
}

static int teardown(void **state) {
  (void)state;
  qkv_client_close(&client);
  assert_int_equal(fixture_stop(&qkvd, SIGTERM, 20000), 0);
  return 0;
}

static void open_session(const char *session, int purpose) {
  qkv_call_error error = {0};
  const qkv_session_options options = {.session = session, .model = "m", .purpose = purpose};
  ok(qkv_client_open_session(client, &options, &error), &error);
}

static void close_session(const char *session) {
  qkv_call_error error = {0};
  ok(qkv_client_close_session(client, session, NULL, &error), &error);
}

static bool hold_page(void *context, const qkv_client_page *page) {
  held_pages *held = context;
  assert_true(held->count < PAGES_MAX);
  void *image = malloc(page->bytes);
  assert_non_null(image);
  memcpy(image, page->image, page->bytes);
  held->pages[held->count] = *page;
  held->pages[held->count++].image = image;
  return true;
}

static bool skip_rows(void *context, const qkv_client_rows *rows) {
  (void)context;
  return rows->layer < LAYERS;
}

static void fetch_pages(const char *session, uint32_t layer, held_pages *held) {
  qkv_call_error error = {0};
  const qkv_client_fetch request = {.session = session, .layers = &layer, .layer_count = 1};
  const qkv_client_coded_receiver to = {.page = hold_page, .rows = skip_rows, .context = held};
  held->count = 0;
  ok(qkv_client_fetch_pages(client, &request, &to, &error), &error);
  assert_true(held->count > 0);
}

static void drop_pages(held_pages *held) {
  for (size_t i = 0; i < held->count; i++) free((void *)(uintptr_t)held->pages[i].image);
  held->count = 0;
}

static const qkv_page_code *code_of(const char *session, const qkv_client_page *page) {
  qkv_call_error error = {0};
  const qkv_page_code *code = NULL;
  ok(qkv_client_get_page_code(client, session, page, &code, &error), &error);
  assert_non_null(code);
  return code;
}

// ---- Out of pages ----

typedef struct decoded {
  float k[TOKENS][K_ROW], v[TOKENS][V_ROW];
} decoded;

// Decodes every stride-th page of a layer, from the first-th on.
typedef struct decode_job {
  const qkv_page_code *code;
  const held_pages *held;
  decoded *out;
  size_t first, stride;
} decode_job;

static void *decode_some(void *context) {
  const decode_job *job = context;
  for (size_t i = job->first; i < job->held->count; i += job->stride) {
    const qkv_client_page *page = &job->held->pages[i];
    const qkv_client_page_rows rows = {.tokens = page->tokens,
                                       .dtype = QKV_CLIENT_FP32,
                                       .k = job->out->k[page->position],
                                       .v = job->out->v[page->position]};
    if (qkv_page_decode(job->code, page, &rows, NULL) != 0) return context;
  }
  return NULL;
}

static bool take_row_bits(void *context, const qkv_client_rows *rows) {
  decoded *to = context;
  memcpy(to->k[rows->position], rows->k.data, rows->k.bytes);
  memcpy(to->v[rows->position], rows->v.data, rows->v.bytes);
  return true;
}

// One code, several threads, and the daemon's bits.
static void decoded_of(int purpose) {
  qkv_call_error error = {0};
  held_pages held;
  open_session("s", purpose);
  scene_append(client, "s", 0, TOKENS);
  for (uint32_t layer = 0; layer < LAYERS; layer++) {
    decoded *expected = calloc(1, sizeof *expected), *got = calloc(1, sizeof *got);
    pthread_t threads[THREADS];
    decode_job jobs[THREADS];
    assert_non_null(expected);
    assert_non_null(got);
    fetch_pages("s", layer, &held);
    const uint64_t end = held.pages[held.count - 1].position + held.pages[held.count - 1].tokens;
    const qkv_client_fetch request = {
        .session = "s", .layers = &layer, .layer_count = 1, .end = end, .dtype = QKV_CLIENT_FP32};
    ok(qkv_client_fetch_rows(client, &request, take_row_bits, expected, &error), &error);
    const qkv_page_code *code = code_of("s", &held.pages[0]);
    for (size_t i = 0; i < THREADS; i++) {
      jobs[i] = (decode_job){.code = code, .held = &held, .out = got, .first = i, .stride = THREADS};
      assert_int_equal(pthread_create(&threads[i], NULL, decode_some, &jobs[i]), 0);
    }
    for (size_t i = 0; i < THREADS; i++) {
      void *failed = NULL;
      assert_int_equal(pthread_join(threads[i], &failed), 0);
      assert_null(failed);
    }
    assert_memory_equal(got, expected, sizeof *got);
    qkv_page_code_free(&code);
    assert_null(code);
    drop_pages(&held);
    free(expected);
    free(got);
  }
  close_session("s");
}

static void test_decoded_by_several_threads(void **state) {
  (void)state;
  decoded_of(1);
  decoded_of(2);
}

static void test_what_decode_refuses(void **state) {
  (void)state;
  qkv_call_error error = {0};
  held_pages held;
  float k[PAGE][K_ROW];
  open_session("s", 1);
  scene_append(client, "s", 0, TOKENS);
  fetch_pages("s", 1, &held);
  const qkv_page_code *code = code_of("s", &held.pages[0]);
  qkv_client_page page = held.pages[0];
  qkv_client_page_rows rows = {.first = 10, .tokens = PAGE - 9, .dtype = QKV_CLIENT_FP32, .k = k};
  assert_int_equal(qkv_page_decode(code, &page, &rows, &error), QKV_INVALID_ARGUMENT);
  assert_string_equal(error.text, "rows.first is 10 and rows.tokens is 55, the page has 64 valid tokens");
  rows.tokens = 1;
  page.layer = LAYERS;
  assert_int_equal(qkv_page_decode(code, &page, &rows, &error), QKV_INVALID_ARGUMENT);
  page.layer = 0;
  assert_int_equal(qkv_page_decode(code, &page, &rows, &error), QKV_DATA_LOSS);
  page = held.pages[0];
  page.bytes = 10;
  assert_int_equal(qkv_page_decode(code, &page, &rows, &error), QKV_DATA_LOSS);
  page.image = NULL;
  assert_int_equal(qkv_page_decode(code, &page, &rows, &error), QKV_INVALID_ARGUMENT);
  page = held.pages[0];
  ((uint8_t *)(uintptr_t)page.image)[200] ^= 1;
  assert_int_equal(qkv_page_decode(code, &page, &rows, &error), QKV_DATA_LOSS);
  qkv_page_code_free(&code);
  assert_int_equal(qkv_client_get_page_code(client, "none", NULL, &code, &error), QKV_NOT_FOUND);
  assert_int_equal(qkv_client_get_page_code(client, NULL, NULL, &code, &error), QKV_INVALID_ARGUMENT);
  page.bytes = 63;
  assert_int_equal(qkv_client_get_page_code(client, "s", &page, &code, &error), QKV_INVALID_ARGUMENT);
  assert_string_equal(error.text, "page.bytes is 63, a page has at least 64");
  assert_null(code);
  qkv_page_code_free(&code);
  drop_pages(&held);
  close_session("s");
}

// ---- Into pages ----

static qkv_client_rows_to_code rows_of(uint32_t layer, size_t begin, size_t end) {
  const qkv_client_item item = scene_item("", layer, begin, end);
  return (qkv_client_rows_to_code){.layer = layer, .position = begin, .k = item.k, .v = item.v};
}

// The same rows in fp16, which is the model's.
static qkv_client_rows_to_code halves_of(uint32_t layer, size_t begin, size_t end, uint16_t *space) {
  qkv_client_rows_to_code rows = rows_of(layer, begin, end);
  qkv_client_tensor *parts[] = {&rows.k, &rows.v};
  for (size_t part = 0; part < 2; part++) {
    const size_t count = parts[part]->bytes / sizeof(float);
    qkv_from_float(QKV_FP16, parts[part]->data, (uint8_t *)space, count);
    parts[part]->dtype = QKV_CLIENT_FP16;
    parts[part]->data = space;
    parts[part]->bytes = count * sizeof *space;
    space += count;
  }
  return rows;
}

// Pages that are coded here and appended are those that the daemon codes of the same rows.
static void coded_of(int purpose) {
  qkv_call_error error = {0};
  held_pages held;
  open_session("daemon", purpose);
  open_session("here", purpose);
  scene_append(client, "daemon", 0, TOKENS);
  const qkv_page_code *code = code_of("here", NULL);
  for (uint32_t layer = 0; layer < LAYERS; layer++) {
    const size_t capacity = qkv_page_bytes_max(code, layer);
    qkv_client_page pages[PAGES_MAX];
    fetch_pages("daemon", layer, &held);
    uint8_t *images = malloc(held.count * (capacity + 1));
    assert_non_null(images);
    for (size_t i = 0; i < held.count; i++) {
      uint16_t halves[PAGE * (K_ROW + V_ROW)];
      const qkv_client_rows_to_code rows =
          i % 2 == 0 ? rows_of(layer, i * PAGE, (i + 1) * PAGE) : halves_of(layer, i * PAGE, (i + 1) * PAGE, halves);
      ok(qkv_page_encode(code, &rows, images + i * (capacity + 1), capacity, &pages[i], &error), &error);
      assert_int_equal(pages[i].tokens, PAGE);
      assert_int_equal(pages[i].calibration_hash, held.pages[i].calibration_hash);
      assert_int_equal(pages[i].bytes, held.pages[i].bytes);
      assert_memory_equal(pages[i].image, held.pages[i].image, pages[i].bytes);
    }
    const qkv_client_item item = {.session = "here", .layer = layer, .pages = pages, .page_count = held.count};
    ok(qkv_client_append(client, &item, 1, NULL, &error), &error);
    free(images);
    drop_pages(&held);
  }
  qkv_page_code_free(&code);
  close_session("daemon");
  close_session("here");
}

static void test_coded_as_by_the_daemon(void **state) {
  (void)state;
  coded_of(1);
  coded_of(2);
  const qkv_calibration *calibration = scene_calibrate(3);
  scene_calibrated(client, calibration);
  coded_of(1);
  decoded_of(2);
  qkv_calibration_unref(&calibration);
}

static void test_what_encode_refuses(void **state) {
  (void)state;
  qkv_call_error error = {0};
  qkv_client_page page;
  open_session("s", 1);
  const qkv_page_code *code = code_of("s", NULL);
  const size_t capacity = qkv_page_bytes_max(code, 0);
  uint8_t *image = malloc(capacity);
  assert_non_null(image);
  assert_int_equal(qkv_page_bytes_max(code, LAYERS), 0);
  qkv_client_rows_to_code rows = rows_of(0, 0, PAGE);
  assert_int_equal(qkv_page_encode(code, &rows, image, capacity - 1, &page, &error), QKV_INVALID_ARGUMENT);
  assert_non_null(strstr(error.text, "capacity is "));
  rows = rows_of(0, 0, PAGE + 1);
  assert_int_equal(qkv_page_encode(code, &rows, image, capacity, &page, &error), QKV_INVALID_ARGUMENT);
  assert_non_null(strstr(error.text, "k.dims are [65, 2, 16]"));
  rows = rows_of(0, 0, PAGE);
  rows.layer = LAYERS;
  assert_int_equal(qkv_page_encode(code, &rows, image, capacity, &page, &error), QKV_INVALID_ARGUMENT);
  rows = rows_of(0, 0, PAGE);
  rows.v.rank = 2;
  assert_int_equal(qkv_page_encode(code, &rows, image, capacity, &page, &error), QKV_INVALID_ARGUMENT);
  const float row[K_ROW] = {[17] = NAN};
  rows = rows_of(0, 0, 1);
  rows.k.data = row;
  assert_int_equal(qkv_page_encode(code, &rows, image, capacity, &page, &error), QKV_INVALID_ARGUMENT);
  assert_non_null(strstr(error.text, "k[0, 1, 1] is nan"));
  assert_int_equal(page.bytes, 0);
  uint16_t halves[2 * (K_ROW + V_ROW)];
  rows = halves_of(0, 0, 2, halves);
  halves[2 * K_ROW + V_ROW + VALUE_DIM + 3] = 0x7c00;
  assert_int_equal(qkv_page_encode(code, &rows, image, capacity, &page, &error), QKV_INVALID_ARGUMENT);
  assert_non_null(strstr(error.text, "v[1, 1, 3] is inf"));
  free(image);
  qkv_page_code_free(&code);
  close_session("s");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_decoded_by_several_threads),
      cmocka_unit_test(test_what_decode_refuses),
      cmocka_unit_test(test_what_encode_refuses),
      cmocka_unit_test(test_coded_as_by_the_daemon),
  };
  return cmocka_run_group_tests(tests, setup, teardown);
}
