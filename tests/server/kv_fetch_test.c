// Fetch against the real daemon: the rows that the engine in this process decodes, in every form. And the metrics,
// which a fetch changes, too.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/server/kv.h"

#include <cmocka.h>

static fixture_daemon *daemon_process;
static fixture_client *client;

static int start(void **state) {
  (void)state;
  kv_start(NULL, &daemon_process, &client);
  return 0;
}

static int stop(void **state) {
  (void)state;
  kv_stop(&daemon_process, &client);
  return 0;
}

// Reads a whole fetch into rows [kv part][layer][tokens][heads][dim] fp32, by chunks of any size.
typedef struct fetched {
  float *rows[2];
  uint64_t tokens;  // of each layer, from `first` on
  uint64_t first;
  size_t responses;
} fetched;

static size_t part_dim(int part) {
  return part == 0 ? KV_KEY_DIM : KV_VALUE_DIM;
}

static void take_tensor(fetched *into, const Qkv__V1__FetchResponse *response, int part, bool heads_first) {
  const Qkv__V1__Tensor *tensor = part == 0 ? response->k : response->v;
  size_t tokens = (size_t)tensor->dims[heads_first ? 1 : 0], dim = part_dim(part);
  assert_int_equal(tensor->n_dims, 3);
  assert_int_equal(tensor->dims[heads_first ? 0 : 1], KV_HEADS);
  assert_int_equal(tensor->dims[2], dim);
  size_t size = qkv_dtype_size((qkv_dtype)tensor->dtype);
  assert_int_equal(tensor->data.len, tokens * KV_HEADS * dim * size);
  for (size_t t = 0; t < tokens; t++) {
    for (size_t h = 0; h < KV_HEADS; h++) {
      size_t from = heads_first ? h * tokens + t : t * KV_HEADS + h;
      size_t to = (response->layer * into->tokens + response->position - into->first + t) * KV_HEADS + h;
      qkv_to_float((qkv_dtype)tensor->dtype, tensor->data.data + from * dim * size, into->rows[part] + to * dim, dim);
    }
  }
}

static fetched fetch(Qkv__V1__FetchRequest *request, uint64_t first, uint64_t tokens) {
  fetched into = {.tokens = tokens, .first = first};
  for (int part = 0; part < 2; part++)
    into.rows[part] = calloc(KV_LAYERS * tokens * KV_HEADS * part_dim(part), sizeof(float));
  size_t length = qkv__v1__fetch_request__get_packed_size(request);
  uint8_t *bytes = malloc(length + 1);
  qkv__v1__fetch_request__pack(request, bytes);
  fixture_stream *stream = fixture_open(client, KV_METHOD("Fetch"), FIXTURE_PATIENCE_MS);
  assert_true(fixture_send(stream, bytes, length));
  fixture_half_close(stream);
  free(bytes);
  while (fixture_receive(stream, &bytes, &length)) {
    Qkv__V1__FetchResponse *response = qkv__v1__fetch_response__unpack(NULL, length, bytes);
    assert_non_null(response);
    bool heads_first = request->layout == QKV__V1__ROW_LAYOUT__ROW_LAYOUT_HEADS_FIRST;
    if (response->k != NULL) take_tensor(&into, response, 0, heads_first);
    if (response->v != NULL) take_tensor(&into, response, 1, heads_first);
    assert_int_equal(response->k != NULL, request->part != QKV__V1__FETCH_REQUEST__PART__PART_V);
    assert_int_equal(response->v != NULL, request->part != QKV__V1__FETCH_REQUEST__PART__PART_K);
    into.responses++;
    qkv__v1__fetch_response__free_unpacked(response, NULL);
    free(bytes);
  }
  fixture_result result = fixture_finish(&stream);
  assert_string_equal(result.text, "");
  assert_int_equal(result.status, QKV_OK);
  return into;
}

static void expect_rows(const fetched *got, kv_reference *reference, uint32_t layer, int part, uint64_t begin,
                        uint64_t end, bool before_rope, qkv_dtype dtype) {
  size_t row = KV_HEADS * part_dim(part), count = (end - begin) * row;
  float *expected = malloc(count * sizeof *expected);
  uint8_t *narrow = malloc(count * 4);
  const qkv_layer *held = NULL;
  assert_int_equal(qkv_session_read(reference->session, layer, &held, NULL), QKV_OK);
  qkv_layer_rows(held, part == 0 ? QKV_K : QKV_V, begin, end - begin, before_rope, expected);
  qkv_session_read_done(reference->session, layer);
  qkv_from_float(dtype, expected, narrow, count);
  qkv_to_float(dtype, narrow, expected, count);
  assert_memory_equal(got->rows[part] + (layer * got->tokens + begin - got->first) * row, expected,
                      count * sizeof *expected);
  free(narrow);
  free(expected);
}

static void drop_fetched(fetched *got) {
  free(got->rows[0]);
  free(got->rows[1]);
}

// Of a session with rows that were sent in both forms.
static void fetch_in_every_form(qkv_purpose purpose) {
  kv_open_for(client, "f", purpose);
  kv_reference reference = kv_reference_open_for("f", purpose);
  for (uint32_t layer = 0; layer < KV_LAYERS; layer++) {
    const kv_item items[] = {{.session = "f", .layer = layer, .tokens = 100, .seed = 16, .before_rope = true},
                             {.session = "f", .layer = layer, .position = 100, .tokens = 200, .seed = 16}};
    assert_int_equal(kv_append(client, items, 2, NULL), QKV_OK);
    kv_reference_append(&reference, &items[0]);
    kv_reference_append(&reference, &items[1]);
  }
  const uint32_t chunks[] = {0, 1, 64, 77, 24};
  for (unsigned form = 0; form < 3 * 2 * 2 * 3; form++) {
    Qkv__V1__FetchRequest request = QKV__V1__FETCH_REQUEST__INIT;
    request.session = (char *)"f";
    request.dtype = (Qkv__V1__DType)(form % 3 + 1);
    request.layout = (Qkv__V1__RowLayout)(form / 3 % 2 + 1);
    request.rope = (Qkv__V1__RopeForm)(form / 6 % 2 + 1);
    request.part = (Qkv__V1__FetchRequest__Part)(form / 12 % 3);
    request.chunk_tokens = chunks[form % 5];
    fetched got = fetch(&request, 0, 300);
    for (uint32_t layer = 0; layer < KV_LAYERS; layer++) {
      for (int part = 0; part < 2; part++) {
        if (request.part == QKV__V1__FETCH_REQUEST__PART__PART_K && part == 1) continue;
        if (request.part == QKV__V1__FETCH_REQUEST__PART__PART_V && part == 0) continue;
        bool before = part == 0 && request.rope == QKV__V1__ROPE_FORM__ROPE_FORM_BEFORE;
        expect_rows(&got, &reference, layer, part, 0, 300, before, (qkv_dtype)request.dtype);
      }
    }
    drop_fetched(&got);
  }

  // The exact tail is the very rows that were appended.
  Qkv__V1__FetchRequest request = QKV__V1__FETCH_REQUEST__INIT;
  request.session = (char *)"f";
  fetched got = fetch(&request, 0, 300);
  float *sent = malloc(64 * KV_HEADS * KV_VALUE_DIM * sizeof(float));
  kv_rows(16, 2, KV_V, 236, 64, sent);
  assert_memory_equal(got.rows[1] + (2 * 300 + 236) * KV_HEADS * KV_VALUE_DIM, sent,
                      64 * KV_HEADS * KV_VALUE_DIM * sizeof(float));
  free(sent);
  drop_fetched(&got);

  // Ranges, layers in the order asked, chunks no larger than asked, which end where pages do.
  Qkv__V1__TokenRange range = QKV__V1__TOKEN_RANGE__INIT;
  uint32_t layers[] = {2, 0};
  range.begin = 50;
  range.end = 1000;  // sent up to the end
  request.range = &range;
  request.layers = layers;
  request.n_layers = 2;
  request.chunk_tokens = 100;
  got = fetch(&request, 50, 250);
  assert_int_equal(got.responses, 2 * 4);  // up to 128, 192, 256 and 300
  expect_rows(&got, &reference, 0, 0, 50, 300, false, QKV_FP16);
  expect_rows(&got, &reference, 2, 1, 50, 300, false, QKV_FP16);
  drop_fetched(&got);
  request.chunk_tokens = 48;
  got = fetch(&request, 50, 250);
  assert_int_equal(got.responses, 2 * 8);  // up to 64, 112, 128, 176, 192, 240, 256 and 300
  expect_rows(&got, &reference, 0, 1, 50, 300, false, QKV_FP16);
  expect_rows(&got, &reference, 2, 0, 50, 300, false, QKV_FP16);
  drop_fetched(&got);
  range.begin = 300;
  range.end = 0;
  got = fetch(&request, 300, 1);
  assert_int_equal(got.responses, 0);
  drop_fetched(&got);
  kv_reference_close(&reference);
  kv_close(client, "f");
}

static void fetch_gives_the_engines_rows_in_every_form(void **state) {
  (void)state;
  fetch_in_every_form(QKV_PURPOSE_ATTEND);
  fetch_in_every_form(QKV_PURPOSE_FETCH);
}

// ---- Sessions that are for being fetched ----

// Rows of the test's own, [tokens][heads][dim]: an item's, turned to their positions.
static float *turned_rows(const kv_item *item, kv_part part) {
  const size_t heads = part == KV_Q ? KV_Q_HEADS : KV_HEADS, tokens = part == KV_Q ? item->queries : item->tokens;
  const qkv_model model = kv_model();
  qkv_rope rope = model.rope;
  assert_int_equal(qkv_rope_resolve(&rope, KV_KEY_DIM, NULL), QKV_OK);
  float *rows = calloc(tokens * heads * KV_KEY_DIM, sizeof *rows);
  assert_non_null(rows);
  kv_rows(item->seed, item->layer, part, item->position, tokens, rows);
  for (size_t i = 0; i < tokens * heads; i++) {
    qkv_rope_forward(&rope, rows + i * KV_KEY_DIM, item->position + i / heads);
  }
  return rows;
}

// Coded before RoPE: keys that were sent before it come back so within the error of their code; and rotated.
static void archived_keys_come_back_in_both_forms(void **state) {
  (void)state;
  const kv_item item = {.session = "a", .tokens = 300, .seed = 21, .before_rope = true};
  const size_t row = KV_HEADS * KV_KEY_DIM, coded = 192 * row, all = 300 * row;
  kv_open_for(client, "a", QKV_PURPOSE_FETCH);
  Qkv__V1__SessionInfo *info = kv_info(client, "a");
  assert_int_equal(info->purpose, QKV__V1__PURPOSE__PURPOSE_FETCH);
  qkv__v1__session_info__free_unpacked(info, NULL);
  assert_int_equal(kv_append(client, &item, 1, NULL), QKV_OK);
  float *sent[2] = {calloc(all, sizeof(float)), turned_rows(&item, KV_K)};
  assert_non_null(sent[0]);
  kv_rows(item.seed, item.layer, KV_K, 0, 300, sent[0]);
  const double bound = qkv_codec_by_id(QKV_CODEC_EMBEDDED)->error_bound(4);
  for (int after = 0; after < 2; after++) {
    Qkv__V1__FetchRequest request = QKV__V1__FETCH_REQUEST__INIT;
    request.session = (char *)"a";
    request.dtype = QKV__V1__DTYPE__DTYPE_FP32;
    request.rope = after ? QKV__V1__ROPE_FORM__ROPE_FORM_AFTER : QKV__V1__ROPE_FORM__ROPE_FORM_BEFORE;
    fetched got = fetch(&request, 0, 300);
    double miss2 = 0, size2 = 0;
    for (size_t i = 0; i < all; i++) {
      const double size = sent[after][i], miss = (double)got.rows[0][i] - size;
      if (i >= coded) assert_true(fabs(miss) < 2e-3);  // fp16
      miss2 += i < coded ? miss * miss : 0;
      size2 += i < coded ? size * size : 0;
    }
    assert_true(miss2 > 0 && miss2 <= 1.5 * bound * size2);
    drop_fetched(&got);
  }
  free(sent[0]);
  free(sent[1]);
  kv_close(client, "a");
}

// They are attended like any other rows: the bits of the engine in this process, with queries in both forms.
static void archived_sessions_are_attended(void **state) {
  (void)state;
  kv_open_for(client, "a", QKV_PURPOSE_FETCH);
  kv_reference reference = kv_reference_open_for("a", QKV_PURPOSE_FETCH);
  const kv_item rows = {.session = "a", .layer = 1, .tokens = 300, .seed = 22, .before_rope = true};
  assert_int_equal(kv_append(client, &rows, 1, NULL), QKV_OK);
  kv_reference_append(&reference, &rows);
  for (int form = 0; form < 2; form++) {
    const kv_item query = {
        .session = "a", .layer = 1, .position = 290, .queries = 5, .seed = 23, .before_rope = form == 1};
    Qkv__V1__AttendResponse *response = NULL;
    assert_int_equal(kv_attend(client, &query, 1, &response, NULL), QKV_OK);
    kv_same_attend(&reference, &query, response->results[0]);
    qkv__v1__attend_response__free_unpacked(response, NULL);
  }
  kv_reference_close(&reference);
  kv_close(client, "a");
}

// The same rows again are acknowledged, in the form that they were sent in; other rows are refused.
static void archived_rows_are_known_again(void **state) {
  (void)state;
  char text[FIXTURE_TEXT_MAX];
  kv_open_for(client, "a", QKV_PURPOSE_FETCH);
  kv_item item = {.session = "a", .tokens = 300, .seed = 24, .before_rope = true};
  assert_int_equal(kv_append(client, &item, 1, NULL), QKV_OK);
  assert_int_equal(kv_append(client, &item, 1, NULL), QKV_OK);
  item.position = 70;
  item.tokens = 60;
  assert_int_equal(kv_append(client, &item, 1, NULL), QKV_OK);
  assert_int_equal(kv_length(client, "a", 0), 300);
  item.before_rope = false;
  assert_int_equal(kv_append(client, &item, 1, text), QKV_ALREADY_EXISTS);
  assert_non_null(strstr(text, "position 70 holds other rows already"));
  kv_close(client, "a");
}

// ---- Counters ----

static void metrics_count_what_was_done(void **state) {
  (void)state;
  kv_open(client, "n");
  double items = kv_metric(client, "qkvd_append_items_total"), tokens = kv_metric(client, "qkvd_append_tokens_total");
  double bytes = kv_metric(client, "qkvd_append_bytes_total"), attends = kv_metric(client, "qkvd_attend_items_total");
  double queries = kv_metric(client, "qkvd_attend_queries_total"), sent = kv_metric(client, "qkvd_fetch_bytes_total");
  const kv_item both = {.session = "n", .tokens = 10, .queries = 3, .seed = 19};
  Qkv__V1__AttendResponse *response = NULL;
  assert_int_equal(kv_attend(client, &both, 1, &response, NULL), QKV_OK);
  qkv__v1__attend_response__free_unpacked(response, NULL);
  Qkv__V1__FetchRequest request = QKV__V1__FETCH_REQUEST__INIT;
  request.session = (char *)"n";
  fetched got = fetch(&request, 0, 10);
  drop_fetched(&got);
  const double coordinates = 10 * KV_HEADS * (KV_KEY_DIM + KV_VALUE_DIM);
  assert_true(kv_metric(client, "qkvd_append_items_total") == items + 1);
  assert_true(kv_metric(client, "qkvd_append_tokens_total") == tokens + 10);
  assert_true(kv_metric(client, "qkvd_append_bytes_total") == bytes + coordinates * 4);
  assert_true(kv_metric(client, "qkvd_attend_items_total") == attends + 1);
  assert_true(kv_metric(client, "qkvd_attend_queries_total") == queries + 3);
  assert_true(kv_metric(client, "qkvd_fetch_bytes_total") == sent + coordinates * 2);
  kv_close(client, "n");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(fetch_gives_the_engines_rows_in_every_form),
      cmocka_unit_test(archived_keys_come_back_in_both_forms), cmocka_unit_test(archived_sessions_are_attended),
      cmocka_unit_test(archived_rows_are_known_again), cmocka_unit_test(metrics_count_what_was_done)};
  return cmocka_run_group_tests(tests, start, stop);
}
