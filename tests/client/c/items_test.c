// Requests as libqkv writes them, read back by protobuf-c; tensors as it reads them.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "client/c/client.h"
#include "qkv/v1/kv_cache.pb-c.h"

// A client without a connection: enough to write requests.
static qkv_client make_client(void) {
  return (qkv_client){.fd = -1, .writer = qkv_wire_writer_create()};
}

static void drop_client(qkv_client *client) {
  qkvi_release_items(client);
  qkv_wire_writer_destroy(&client->writer);
  free(client->packed);
}

static Qkv__V1__AttendRequest *written(qkv_client *client) {
  size_t count = 0, used = 0;
  static uint8_t bytes[1 << 16];
  const qkv_wire_piece *pieces = qkv_wire_writer_pieces(client->writer, &count);
  for (size_t i = 0; i < count; i++) {
    assert_true(used + pieces[i].length <= sizeof bytes);
    memcpy(bytes + used, pieces[i].data, pieces[i].length);
    used += pieces[i].length;
  }
  Qkv__V1__AttendRequest *request = qkv__v1__attend_request__unpack(NULL, used, bytes);
  assert_non_null(request);
  return request;
}

static void expect_tensor(const Qkv__V1__Tensor *tensor, size_t rank, const int64_t *dims, const int64_t *strides,
                          const void *data, size_t bytes) {
  assert_non_null(tensor);
  assert_int_equal(tensor->dtype, QKV__V1__DTYPE__DTYPE_FP32);
  assert_int_equal(tensor->n_dims, rank);
  assert_memory_equal(tensor->dims, dims, rank * sizeof *dims);
  assert_int_equal(tensor->n_strides, strides == NULL ? 0 : rank);
  if (strides != NULL) assert_memory_equal(tensor->strides, strides, rank * sizeof *strides);
  assert_int_equal(tensor->data.len, bytes);
  assert_memory_equal(tensor->data.data, data, bytes);
}

static void test_every_field(void **state) {
  (void)state;
  qkv_client client = make_client();
  float rows[12];
  for (int i = 0; i < 12; i++) rows[i] = (float)i;
  qkv_client_attend_options options = {.scale = 0.5,
                                       .sliding_window = 100,
                                       .soft_cap = 30,
                                       .begin = 3,
                                       .end = 9,
                                       .causal_offset = -2,
                                       .not_causal = true};
  const uint32_t token_ids[3] = {0, 127, UINT32_MAX};
  qkv_client_item items[2] = {
      {.session = "one",
       .token_ids = token_ids,
       .layer = 3,
       .position = 1ull << 40,
       .k_before_rope = true,
       .options = &options,
       .k = {QKV_CLIENT_FP32, 3, {3, 2, 2}, {0}, rows, sizeof rows},
       .v = {QKV_CLIENT_FP32, 3, {3, 2, 1}, {0}, rows, sizeof rows}},
      {.session = "two", .q_before_rope = true, .q = {QKV_CLIENT_FP32, 3, {1, 6, 2}, {0}, rows, sizeof rows}},
  };
  assert_int_equal(qkvi_put_items(&client, items, 2, NULL, NULL), 0);
  Qkv__V1__AttendRequest *request = written(&client);
  assert_int_equal(request->n_items, 2);
  const Qkv__V1__Item *one = request->items[0], *two = request->items[1];
  assert_string_equal(one->session, "one");
  assert_int_equal(one->layer, 3);
  assert_int_equal(one->position, 1ull << 40);
  assert_int_equal(one->k_rope, QKV__V1__ROPE_FORM__ROPE_FORM_BEFORE);
  assert_int_equal(one->q_rope, QKV__V1__ROPE_FORM__ROPE_FORM_UNSPECIFIED);
  assert_non_null(one->options);
  assert_true(one->options->scale == 0.5 && one->options->soft_cap == 30);
  assert_int_equal(one->options->sliding_window, 100);
  assert_int_equal(one->options->range->begin, 3);
  assert_int_equal(one->options->range->end, 9);
  assert_int_equal(one->options->causal_offset, -2);
  assert_true(one->options->not_causal);
  expect_tensor(one->k, 3, (int64_t[]){3, 2, 2}, NULL, rows, 12 * sizeof(float));
  expect_tensor(one->v, 3, (int64_t[]){3, 2, 1}, NULL, rows, 6 * sizeof(float));
  assert_int_equal(one->n_token_ids, 3);
  assert_memory_equal(one->token_ids, token_ids, sizeof token_ids);
  assert_null(one->q);
  assert_string_equal(two->session, "two");
  assert_int_equal(two->n_token_ids, 0);
  assert_int_equal(two->q_rope, QKV__V1__ROPE_FORM__ROPE_FORM_BEFORE);
  assert_null(two->options);
  assert_null(two->k);
  expect_tensor(two->q, 3, (int64_t[]){1, 6, 2}, NULL, rows, sizeof rows);
  qkv__v1__attend_request__free_unpacked(request, NULL);
  drop_client(&client);
}

// Every second head of a cache: sent as it lies, to the last byte that counts.
static void test_strides_are_kept(void **state) {
  (void)state;
  qkv_client client = make_client();
  float cache[2][4][3];
  for (int i = 0; i < 24; i++) ((float *)cache)[i] = (float)i;
  qkv_client_item item = {
      .session = "s",
      .q = {QKV_CLIENT_FP32, 3, {2, 2, 3}, {sizeof cache[0], 2 * sizeof cache[0][0], 4}, cache, sizeof cache}};
  assert_int_equal(qkvi_put_items(&client, &item, 1, NULL, NULL), 0);
  Qkv__V1__AttendRequest *request = written(&client);
  expect_tensor(request->items[0]->q, 3, (int64_t[]){2, 2, 3}, (int64_t[]){48, 24, 4}, cache, 84);
  qkv__v1__attend_request__free_unpacked(request, NULL);
  drop_client(&client);
}

// One head of eight: seven eighths would be waste.
static void test_wasteful_strides_are_packed(void **state) {
  (void)state;
  qkv_client client = make_client();
  float cache[5][8][2];
  float packed[5][1][2];
  for (int i = 0; i < 80; i++) ((float *)cache)[i] = (float)i;
  for (int i = 0; i < 5; i++) memcpy(packed[i][0], cache[i][3], sizeof packed[i][0]);
  qkv_client_item item = {.session = "s",
                          .k = {QKV_CLIENT_FP32, 3, {5, 1, 2}, {64, 8, 4}, cache[0][3], sizeof cache - 24},
                          .v = {QKV_CLIENT_FP32, 3, {5, 1, 2}, {64, 8, 4}, cache[0][3], sizeof cache - 24}};
  assert_int_equal(qkvi_put_items(&client, &item, 1, NULL, NULL), 0);
  assert_int_equal(client.packed_count, 2);
  Qkv__V1__AttendRequest *request = written(&client);
  expect_tensor(request->items[0]->k, 3, (int64_t[]){5, 1, 2}, NULL, packed, sizeof packed);
  expect_tensor(request->items[0]->v, 3, (int64_t[]){5, 1, 2}, NULL, packed, sizeof packed);
  qkv__v1__attend_request__free_unpacked(request, NULL);
  qkvi_release_items(&client);
  assert_int_equal(client.packed_count, 0);
  drop_client(&client);
}

static void test_repeated_rows(void **state) {
  (void)state;
  qkv_client client = make_client();
  float row[2] = {1, 2};
  qkv_client_item item = {.session = "s", .q = {QKV_CLIENT_FP32, 3, {4, 3, 2}, {0, 0, 4}, row, sizeof row}};
  assert_int_equal(qkvi_put_items(&client, &item, 1, NULL, NULL), 0);
  Qkv__V1__AttendRequest *request = written(&client);
  expect_tensor(request->items[0]->q, 3, (int64_t[]){4, 3, 2}, (int64_t[]){0, 0, 4}, row, sizeof row);
  qkv__v1__attend_request__free_unpacked(request, NULL);
  drop_client(&client);
}

// What would make us read outside the caller's memory never leaves.
static void test_refused(void **state) {
  (void)state;
  qkv_client client = make_client();
  float rows[8] = {0};
  const struct {
    qkv_client_tensor tensor;
    const char *text;
  } cases[] = {
      {{QKV_CLIENT_FP32, 3, {1, 4, 2}, {0}, NULL, 32}, "items[1].k.data is NULL"},
      {{QKV_CLIENT_FP32, 5, {1, 4, 2}, {0}, rows, 32}, "items[1].k.rank is 5, allowed are 1 to 4"},
      {{QKV_CLIENT_FP32, 3, {1, 4, 3}, {0}, rows, 32}, "items[1].k"},
      {{QKV_CLIENT_FP32, 3, {1, 4, 2}, {0, -8, 4}, rows, 32}, "items[1].k.strides[1]"},
      {{9, 3, {1, 4, 2}, {0}, rows, 32}, "items[1].k.dtype"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    qkv_client_item items[2] = {{.session = "a"}, {.session = "b", .k = cases[i].tensor}};
    qkv_call_error error = {0};
    assert_int_equal(qkvi_put_items(&client, items, 2, NULL, &error), QKV_INVALID_ARGUMENT);
    assert_int_equal(error.code, QKV_INVALID_ARGUMENT);
    if (strstr(error.text, cases[i].text) != error.text) fail_msg("\"%s\" is not \"%s\"", error.text, cases[i].text);
    assert_int_equal(qkvi_put_items(&client, items, 2, NULL, NULL), QKV_INVALID_ARGUMENT);
  }
  qkv_call_error error = {0};
  assert_int_equal(qkvi_put_items(&client, &(qkv_client_item){0}, 1, NULL, &error), QKV_INVALID_ARGUMENT);
  assert_string_equal(error.text, "items[0].session is NULL");
  drop_client(&client);
}

// ---- tensors on their way in ----

static qkv_status read_back(const Qkv__V1__Tensor *message, int rank, qkv_tensor *tensor, qkv_error *error) {
  static uint8_t bytes[4096];
  static qkv_segment segment;
  segment = (qkv_segment){.data = bytes, .length = qkv__v1__tensor__pack(message, bytes)};
  return qkvi_read_tensor(qkv_bytes_of(&segment), "out", rank, tensor, error);
}

static void test_tensors_in(void **state) {
  (void)state;
  Qkv__V1__Tensor message = QKV__V1__TENSOR__INIT;
  int64_t dims[5] = {2, 3, 1, 1, 1};
  int64_t strides[2] = {12, 4};
  float values[6] = {1, 2, 3, 4, 5, 6};
  qkv_tensor tensor;
  qkv_error error = {0};
  message.dtype = QKV__V1__DTYPE__DTYPE_FP32;
  message.dims = dims;
  message.n_dims = 2;
  message.data = (ProtobufCBinaryData){.len = sizeof values, .data = (uint8_t *)values};
  assert_int_equal(read_back(&message, 2, &tensor, &error), QKV_OK);
  assert_int_equal(tensor.data.length, sizeof values);
  assert_int_equal(tensor.dims[1], 3);
  message.strides = strides;
  message.n_strides = 2;
  assert_int_equal(read_back(&message, 2, &tensor, &error), QKV_OK);

  qkv_error rank = {0}, dense = {0}, many = {0}, small = {0};
  assert_int_equal(read_back(&message, 3, &tensor, &rank), QKV_INVALID_ARGUMENT);
  assert_string_equal(rank.text, "out has 2 dims, expected are 3");
  strides[0] = 0;
  assert_int_equal(read_back(&message, 2, &tensor, &dense), QKV_INVALID_ARGUMENT);
  assert_string_equal(dense.text, "out is not dense");
  message.n_strides = 0;
  message.n_dims = 5;
  assert_int_equal(read_back(&message, 2, &tensor, &many), QKV_INVALID_ARGUMENT);
  assert_string_equal(many.text, "out has more than 4 dims");
  message.n_dims = 2;
  message.data.len = 20;
  assert_int_equal(read_back(&message, 2, &tensor, &small), QKV_INVALID_ARGUMENT);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_every_field),
      cmocka_unit_test(test_strides_are_kept),
      cmocka_unit_test(test_wasteful_strides_are_packed),
      cmocka_unit_test(test_repeated_rows),
      cmocka_unit_test(test_refused),
      cmocka_unit_test(test_tensors_in),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
