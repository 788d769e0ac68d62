// Parsing of the requests that carry tensors: fields, views, places of errors, hostile bytes.
#include "server/handlers/items.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// cmocka wants the four above first.
#include <cmocka.h>

#include "qkv/v1/kv_cache.pb-c.h"

#define ROWS_MAX 4096

static const qkvi_limits limits = {.items_max = 4, .message_bytes_max = 65536};

// ---- Building messages ----

// A tensor with the arrays of its parts.
typedef struct sample_tensor {
  Qkv__V1__Tensor message;
  int64_t dims[5], strides[5];
  uint8_t data[ROWS_MAX];
} sample_tensor;

static Qkv__V1__Tensor *sample(sample_tensor *tensor, Qkv__V1__DType dtype, int64_t tokens, int64_t heads,
                               int64_t dim) {
  qkv__v1__tensor__init(&tensor->message);
  const int64_t dims[3] = {tokens, heads, dim};
  memcpy(tensor->dims, dims, sizeof dims);
  int64_t bytes = 0;
  assert_int_equal(qkv_tensor_bytes((qkv_dtype)dtype, 3, dims, &bytes), QKV_OK);
  assert_true(bytes <= ROWS_MAX);
  for (size_t i = 0; i < ROWS_MAX; i++) tensor->data[i] = (uint8_t)(i * 37 + 11) & 0x3f;
  tensor->message.dtype = dtype;
  tensor->message.n_dims = 3;
  tensor->message.dims = tensor->dims;
  tensor->message.data = (ProtobufCBinaryData){(size_t)bytes, tensor->data};
  return &tensor->message;
}

// One item with k, v and q of 2 tokens, 2 heads, 8 coordinates, in a request of its own.
typedef struct sample_request {
  Qkv__V1__AttendRequest message;
  Qkv__V1__Item item;
  Qkv__V1__Item *items[1];
  sample_tensor k, v, q;
} sample_request;

static void build(sample_request *request) {
  qkv__v1__attend_request__init(&request->message);
  qkv__v1__item__init(&request->item);
  request->item.session = (char *)"s-1";
  request->item.layer = 3;
  request->item.position = 70;
  request->item.k = sample(&request->k, QKV__V1__DTYPE__DTYPE_FP16, 2, 2, 8);
  request->item.v = sample(&request->v, QKV__V1__DTYPE__DTYPE_BF16, 2, 2, 16);
  request->item.q = sample(&request->q, QKV__V1__DTYPE__DTYPE_FP32, 1, 4, 8);
  request->items[0] = &request->item;
  request->message.n_items = 1;
  request->message.items = request->items;
}

// A message in pieces of `step` bytes, each in memory of its own so that a sanitizer sees reads beyond it.
typedef struct pieces {
  qkv_segment *segments;
  size_t count;
} pieces;

static pieces cut(const uint8_t *bytes, size_t length, size_t step) {
  pieces cut = {calloc(length / step + 2, sizeof(qkv_segment)), 0};
  for (size_t at = 0; at < length; at += step) {
    size_t n = length - at < step ? length - at : step;
    uint8_t *copy = malloc(n);
    memcpy(copy, bytes + at, n);
    cut.segments[cut.count++] = (qkv_segment){.data = copy, .length = n};
  }
  return cut;
}

static void drop(pieces *cut) {
  for (size_t i = 0; i < cut->count; i++) free((void *)cut->segments[i].data);
  free(cut->segments);
}

static size_t pack(const sample_request *request, uint8_t **bytes) {
  size_t length = qkv__v1__attend_request__get_packed_size(&request->message);
  *bytes = malloc(length + 1);
  return qkv__v1__attend_request__pack(&request->message, *bytes);
}

// Parses in one piece and gives the request's status; `parsed` is the caller's to deinit. Views into the
// message are gone afterwards.
static qkv_status parse_bytes(const uint8_t *bytes, size_t length, qkvi_request_kind kind, qkvi_request *parsed,
                              qkv_error *error) {
  pieces whole = cut(bytes, length, length + 1);
  qkv_status status = qkvi_request_parse(qkv_bytes_of_all(whole.segments, whole.count), kind, &limits, parsed, error);
  drop(&whole);
  return status;
}

static qkv_status parse(const sample_request *request, qkvi_request_kind kind, qkvi_request *parsed,
                        qkv_error *error) {
  uint8_t *bytes = NULL;
  size_t length = pack(request, &bytes);
  qkv_status status = parse_bytes(bytes, length, kind, parsed, error);
  free(bytes);
  return status;
}

static void expect_item_error(const sample_request *request, qkvi_request_kind kind, qkv_status status,
                              const char *text) {
  qkvi_request parsed = {0};
  qkv_error error = {0};
  assert_int_equal(parse(request, kind, &parsed, &error), QKV_OK);
  assert_int_equal(parsed.count, 1);
  assert_string_equal(parsed.items[0].error.text, text);
  assert_int_equal(parsed.items[0].error.status, status);
  qkvi_request_deinit(&parsed);
}

static void expect_refused(const sample_request *request, const char *text) {
  qkvi_request parsed = {0};
  qkv_error error = {0};
  assert_int_equal(parse(request, QKVI_ATTEND_REQUEST, &parsed, &error), QKV_INVALID_ARGUMENT);
  assert_string_equal(error.text, text);
  qkvi_request_deinit(&parsed);
}

// ---- What is read ----

static void reads_every_field_however_the_message_is_cut(void **state) {
  (void)state;
  sample_request request;
  build(&request);
  Qkv__V1__TokenRange range = QKV__V1__TOKEN_RANGE__INIT;
  range.begin = 5;
  range.end = 900;
  Qkv__V1__AttendOptions options = QKV__V1__ATTEND_OPTIONS__INIT;
  options.scale = 0.25;
  options.sliding_window = 128;
  options.soft_cap = 30;
  options.range = &range;
  options.causal_offset = -7;
  options.not_causal = 1;
  request.item.options = &options;
  request.item.k_rope = QKV__V1__ROPE_FORM__ROPE_FORM_BEFORE;
  request.item.q_rope = QKV__V1__ROPE_FORM__ROPE_FORM_AFTER;
  request.message.out_dtype = QKV__V1__DTYPE__DTYPE_BF16;
  request.message.id = UINT64_MAX;
  uint8_t *bytes = NULL;
  size_t length = pack(&request, &bytes);

  const size_t steps[] = {1, 2, 3, 7, 64, 1000000};
  qkvi_request parsed = {0};
  for (size_t s = 0; s < sizeof steps / sizeof steps[0]; s++) {
    pieces cuts = cut(bytes, length, steps[s]);
    qkv_error error = {0};
    qkv_bytes message = qkv_bytes_of_all(cuts.segments, cuts.count);
    assert_int_equal(qkvi_request_parse(message, QKVI_ATTEND_REQUEST, &limits, &parsed, &error), QKV_OK);
    assert_int_equal(parsed.count, 1);
    assert_int_equal(parsed.out_dtype, QKV_BF16);
    assert_true(parsed.id == UINT64_MAX);
    const qkvi_item *item = &parsed.items[0];
    assert_string_equal(item->error.text, "");
    assert_int_equal(item->error.status, QKV_OK);
    assert_string_equal(item->session, "s-1");
    assert_int_equal(item->layer, 3);
    assert_int_equal(item->position, 70);
    assert_true(item->k_before_rope);
    assert_false(item->q_before_rope);
    assert_true(item->options.scale == 0.25 && item->options.soft_cap == 30);
    assert_int_equal(item->options.sliding_window, 128);
    assert_int_equal(item->options.begin, 5);
    assert_int_equal(item->options.end, 900);
    assert_int_equal(item->options.causal_offset, -7);
    assert_true(item->options.not_causal);
    assert_int_equal(qkvi_item_row_bytes(item), 2 * 2 * 8 * 2 + 2 * 2 * 16 * 2);
    assert_int_equal(qkvi_request_row_bytes(&parsed), 2 * 2 * 8 * 2 + 2 * 2 * 16 * 2 + 4 * 8 * 4);

    // The rows are those of the message, in place.
    uint8_t row[32];
    qkv_tensor_row_raw(&item->v, 1, 1, row);
    assert_memory_equal(row, request.v.data + 3 * 32, 32);
    assert_int_equal(item->k.strides[0], 32);
    assert_int_equal(item->k.strides[1], 16);
    assert_int_equal(item->k.strides[2], 2);
    drop(&cuts);
  }
  qkvi_request_deinit(&parsed);
  free(bytes);
}

static void rows_are_views_not_copies(void **state) {
  (void)state;
  sample_request request;
  build(&request);
  uint8_t *bytes = NULL;
  size_t length = pack(&request, &bytes);
  qkv_segment segment = {.data = bytes, .length = length};
  qkvi_request parsed = {0};
  assert_int_equal(qkvi_request_parse(qkv_bytes_of(&segment), QKVI_ATTEND_REQUEST, &limits, &parsed, NULL), QKV_OK);
  const uint8_t *k = qkv_bytes_contiguous(parsed.items[0].k.data, 0, 64);
  assert_true(k >= bytes && k + 64 <= bytes + length);
  qkvi_request_deinit(&parsed);
  free(bytes);
}

static void items_without_options_take_the_requests(void **state) {
  (void)state;
  sample_request request;
  build(&request);
  Qkv__V1__AttendOptions options = QKV__V1__ATTEND_OPTIONS__INIT;
  options.scale = 0.5;
  request.message.options = &options;
  Qkv__V1__AttendOptions own = QKV__V1__ATTEND_OPTIONS__INIT;
  own.soft_cap = 9;
  Qkv__V1__Item second = request.item;
  second.options = &own;
  Qkv__V1__Item *items[2] = {&request.item, &second};
  request.message.items = items;
  request.message.n_items = 2;
  qkvi_request parsed = {0};
  assert_int_equal(parse(&request, QKVI_ATTEND_REQUEST, &parsed, NULL), QKV_OK);
  assert_true(parsed.items[0].options.scale == 0.5);
  assert_true(parsed.items[1].options.scale == 0);  // as a whole
  assert_true(parsed.items[1].options.soft_cap == 9);
  qkvi_request_deinit(&parsed);
}

static void strides_may_slice_and_repeat(void **state) {
  (void)state;
  sample_request request;
  build(&request);
  // Rows of 8 halves, 40 bytes from token to token, one head repeated.
  request.item.k->strides = request.k.strides;
  request.item.k->n_strides = 3;
  request.k.strides[0] = 40;
  request.k.strides[1] = 0;
  request.k.strides[2] = 2;
  uint8_t *bytes = NULL;
  size_t length = pack(&request, &bytes);
  qkv_segment segment = {.data = bytes, .length = length};
  qkvi_request parsed = {0};
  assert_int_equal(qkvi_request_parse(qkv_bytes_of(&segment), QKVI_ATTEND_REQUEST, &limits, &parsed, NULL), QKV_OK);
  assert_int_equal(parsed.items[0].error.status, QKV_OK);
  uint8_t row[16];
  qkv_tensor_row_raw(&parsed.items[0].k, 1, 1, row);
  assert_memory_equal(row, request.k.data + 40, 16);
  qkvi_request_deinit(&parsed);
  free(bytes);
}

static void unpacked_dims_and_unknown_fields_are_read(void **state) {
  (void)state;
  // Item { session "s", k { dtype 1, dims 1, dims 1, dims 8 (unpacked), data 32 bytes }, v the same },
  // field 99 of the item and of the request unknown.
  uint8_t tensor[64] = {0x08, 1, 0x10, 1, 0x10, 1, 0x10, 8, 0x7a, 32};
  size_t tensor_length = 10 + 32;
  uint8_t item[256] = {0x0a, 1, 's', 0x98, 0x06, 5};
  size_t n = 6;
  for (uint8_t tag = 0x42; tag <= 0x4a; tag += 8) {
    item[n++] = tag;
    item[n++] = (uint8_t)tensor_length;
    memcpy(item + n, tensor, tensor_length);
    n += tensor_length;
  }
  uint8_t message[300] = {0x9a, 0x06, 2, 'x', 'y', 0x0a, (uint8_t)n};
  memcpy(message + 7, item, n);
  qkvi_request parsed = {0};
  qkv_error error = {0};
  assert_int_equal(parse_bytes(message, 7 + n, QKVI_APPEND_REQUEST, &parsed, &error), QKV_OK);
  assert_string_equal(parsed.items[0].error.text, "");
  assert_int_equal(parsed.items[0].k.dims[2], 8);
  qkvi_request_deinit(&parsed);
}

// ---- Mistakes inside an item ----

static void tensor_mistakes_name_field_value_and_limit(void **state) {
  (void)state;
  sample_request r;
  const qkv_status bad = QKV_INVALID_ARGUMENT;
  const qkvi_request_kind kind = QKVI_ATTEND_REQUEST;

  build(&r);
  r.k.dims[1] = 0;
  expect_item_error(&r, kind, bad, "items[0].k.dims[1] is 0, at least 1");
  build(&r);
  r.v.dims[0] = -3;
  expect_item_error(&r, kind, bad, "items[0].v.dims[0] is -3, at least 1");
  build(&r);
  r.item.k->n_dims = 0;
  expect_item_error(&r, kind, bad, "items[0].k.dims has 0 entries, expected are 3");
  build(&r);
  r.item.k->n_dims = 2;
  expect_item_error(&r, kind, bad, "items[0].k.dims has 2 entries, expected are 3");
  build(&r);
  r.item.k->n_dims = 5;
  expect_item_error(&r, kind, bad, "items[0].k.dims has at least 5 entries, expected are 3");
  build(&r);
  r.item.q->dtype = QKV__V1__DTYPE__DTYPE_UNSPECIFIED;
  expect_item_error(&r, kind, bad, "items[0].q.dtype is 0, known are 1 (fp32), 2 (fp16) and 3 (bf16)");
  build(&r);
  r.item.q->dtype = (Qkv__V1__DType)7;
  expect_item_error(&r, kind, bad, "items[0].q.dtype is 7, known are 1 (fp32), 2 (fp16) and 3 (bf16)");
  build(&r);
  r.item.k->data.len = 63;
  expect_item_error(&r, kind, bad, "items[0].k.data is 63 bytes, its dims and strides reach 64");
  build(&r);
  r.item.k->data.len = 0;
  expect_item_error(&r, kind, bad, "items[0].k.data is 0 bytes, its dims and strides reach 64");
  build(&r);
  r.item.k->shared_memory_region = (char *)"region";
  expect_item_error(&r, kind, QKV_UNIMPLEMENTED,
                    "items[0].k.shared_memory_region is set, this daemon runs without --allow-client-shm");
}

static void token_ids_are_as_many_as_rows(void **state) {
  (void)state;
  uint32_t ids[3] = {7, 8, 9};
  sample_request r;
  const qkv_status bad = QKV_INVALID_ARGUMENT;
  build(&r);
  r.item.token_ids = ids;
  r.item.n_token_ids = 3;
  expect_item_error(&r, QKVI_ATTEND_REQUEST, bad, "items[0].token_ids has 3 entries, k has 2 tokens");
  r.item.n_token_ids = 1;
  expect_item_error(&r, QKVI_ATTEND_REQUEST, bad, "items[0].token_ids has 1 entries, k has 2 tokens");
  r.item.n_token_ids = 2;
  expect_item_error(&r, QKVI_ATTEND_REQUEST, QKV_OK, "");
  r.item.k = r.item.v = NULL;
  expect_item_error(&r, QKVI_ATTEND_REQUEST, bad, "items[0].token_ids has 2 entries, k has 0 tokens");
}

static void stride_mistakes_name_field_value_and_limit(void **state) {
  (void)state;
  const struct {
    int64_t strides[3];
    size_t count;
    const char *text;
  } cases[] = {
      {{-32, 16, 2}, 3, "items[0].k.strides[0] is -32, at least 0"},
      {{32, 15, 2}, 3, "items[0].k.strides[1] is 15, a multiple of 2 (fp16) is needed"},
      {{32, 16, 4}, 3, "items[0].k.strides[2] is 4, rows are contiguous: 2 is needed"},
      {{32, 16, 2}, 2, "items[0].k.strides has 2 entries, dims has 3"},
      {{64, 16, 2}, 3, "items[0].k.data is 64 bytes, its dims and strides reach 96"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    sample_request r;
    build(&r);
    memcpy(r.k.strides, cases[i].strides, sizeof cases[i].strides);
    r.item.k->strides = r.k.strides;
    r.item.k->n_strides = cases[i].count;
    expect_item_error(&r, QKVI_ATTEND_REQUEST, QKV_INVALID_ARGUMENT, cases[i].text);
  }
}

// Strides of 0 must not turn a few bytes into any amount of work.
static void repeated_rows_count_in_full(void **state) {
  (void)state;
  sample_request r;
  build(&r);
  r.item.k = r.item.v = NULL;
  r.q.strides[0] = 0;
  r.q.strides[1] = 0;
  r.q.strides[2] = 4;
  r.item.q->strides = r.q.strides;
  r.item.q->n_strides = 3;
  r.q.dims[0] = 512;  // * 4 heads * 8 * 4 bytes = the limit
  qkvi_request parsed = {0};
  assert_int_equal(parse(&r, QKVI_ATTEND_REQUEST, &parsed, NULL), QKV_OK);
  assert_string_equal(parsed.items[0].error.text, "");
  qkvi_request_deinit(&parsed);
  r.q.dims[0] = 513;
  expect_item_error(&r, QKVI_ATTEND_REQUEST, QKV_INVALID_ARGUMENT,
                    "items[0].q.dims are [513, 4, 8], 65664 bytes, limit-message is 65536");
  r.q.dims[0] = INT64_MAX;
  r.q.dims[1] = INT64_MAX;
  expect_item_error(&r, QKVI_ATTEND_REQUEST, QKV_INVALID_ARGUMENT,
                    "items[0].q.dims are more than 9223372036854775807 bytes");
}

// Nor must many tensors that are each within the limit.
static void repeated_rows_count_together(void **state) {
  (void)state;
  sample_request r;
  build(&r);
  r.q.strides[0] = 0;
  r.q.strides[1] = 0;
  r.q.strides[2] = 4;
  r.item.q->strides = r.q.strides;
  r.item.q->n_strides = 3;
  r.q.dims[0] = 511;
  Qkv__V1__Item *items[] = {&r.item, &r.item};
  r.message.items = items;
  r.message.n_items = 2;
  expect_refused(&r, "items has 2 entries with 131200 bytes of rows, limit-message is 65536");
}

static void item_mistakes_name_the_field(void **state) {
  (void)state;
  sample_request r;
  const qkv_status bad = QKV_INVALID_ARGUMENT;
  char long_name[131];
  memset(long_name, 'n', 130);
  long_name[130] = '\0';

  build(&r);
  r.item.session = (char *)"";
  expect_item_error(&r, QKVI_ATTEND_REQUEST, bad, "items[0].session is empty");
  build(&r);
  r.item.session = long_name;
  expect_item_error(&r, QKVI_ATTEND_REQUEST, bad, "items[0].session is 130 bytes, at most 128");
  build(&r);
  r.item.session = (char *)"a b";
  expect_item_error(&r, QKVI_ATTEND_REQUEST, bad,
                    "items[0].session has byte 0x20 at 1, allowed are letters, digits and ._:/@-");
  build(&r);
  r.item.layer = 5000;
  expect_item_error(&r, QKVI_ATTEND_REQUEST, bad, "items[0].layer is 5000, models have at most 1024 layers");
  build(&r);
  r.item.k_rope = (Qkv__V1__RopeForm)3;
  expect_item_error(&r, QKVI_ATTEND_REQUEST, bad, "items[0].k_rope is 3, known are 1 (after) and 2 (before)");
  build(&r);
  r.item.v = NULL;
  expect_item_error(&r, QKVI_ATTEND_REQUEST, bad, "items[0].v is missing, k and v come together");
  build(&r);
  r.item.k = NULL;
  expect_item_error(&r, QKVI_APPEND_REQUEST, bad, "items[0].k is missing, k and v come together");
  build(&r);
  r.item.v = sample(&r.v, QKV__V1__DTYPE__DTYPE_BF16, 3, 2, 16);
  expect_item_error(&r, QKVI_ATTEND_REQUEST, bad, "items[0].v.dims[0] is 3, k has 2 tokens");
  build(&r);
  expect_item_error(&r, QKVI_APPEND_REQUEST, bad, "items[0].q is set, Append takes k and v only");
  r.item.q = NULL;
  r.item.k = NULL;
  r.item.v = NULL;
  expect_item_error(&r, QKVI_APPEND_REQUEST, bad, "items[0].k is missing, Append takes k and v");
  expect_item_error(&r, QKVI_ATTEND_REQUEST, bad, "items[0].q is missing, and so are k and v: nothing to do");

  Qkv__V1__TokenRange range = QKV__V1__TOKEN_RANGE__INIT;
  range.begin = 9;
  range.end = 4;
  Qkv__V1__AttendOptions options = QKV__V1__ATTEND_OPTIONS__INIT;
  options.range = &range;
  build(&r);
  r.item.options = &options;
  expect_item_error(&r, QKVI_ATTEND_REQUEST, bad, "items[0].options.range.begin is 9, at most range.end 4");
}

static void one_bad_item_leaves_the_others(void **state) {
  (void)state;
  sample_request good, bad;
  build(&good);
  build(&bad);
  bad.k.dims[2] = 0;
  Qkv__V1__Item *items[3] = {&good.item, &bad.item, &good.item};
  good.message.items = items;
  good.message.n_items = 3;
  qkvi_request parsed = {0};
  assert_int_equal(parse(&good, QKVI_ATTEND_REQUEST, &parsed, NULL), QKV_OK);
  assert_int_equal(parsed.count, 3);
  assert_int_equal(parsed.items[0].error.status, QKV_OK);
  assert_string_equal(parsed.items[1].error.text, "items[1].k.dims[2] is 0, at least 1");
  assert_int_equal(parsed.items[2].error.status, QKV_OK);
  assert_int_equal(parsed.items[2].position, 70);
  qkvi_request_deinit(&parsed);
}

// ---- Mistakes of the whole request ----

static void request_mistakes_refuse_it_whole(void **state) {
  (void)state;
  sample_request r;
  build(&r);
  r.message.n_items = 0;
  expect_refused(&r, "items is empty, at least 1");

  build(&r);
  Qkv__V1__Item *items[5] = {&r.item, &r.item, &r.item, &r.item, &r.item};
  r.message.items = items;
  r.message.n_items = 5;
  expect_refused(&r, "items has 5 entries, limit-items is 4");

  build(&r);
  r.message.out_dtype = (Qkv__V1__DType)9;
  expect_refused(&r, "out_dtype is 9, known are 1 (fp32), 2 (fp16) and 3 (bf16)");

  Qkv__V1__TokenRange range = QKV__V1__TOKEN_RANGE__INIT;
  range.begin = 2;
  range.end = 1;
  Qkv__V1__AttendOptions options = QKV__V1__ATTEND_OPTIONS__INIT;
  options.range = &range;
  build(&r);
  r.message.options = &options;
  expect_refused(&r, "options.range.begin is 2, at most range.end 1");
}

static void wrong_wire_types_are_refused(void **state) {
  (void)state;
  const struct {
    uint8_t bytes[8];
    size_t length;
    const char *text;
  } cases[] = {
      {{0x08, 1}, 2, "items has wire type 0, expected 2"},
      {{0x0a, 2, 0x08, 1}, 4, "items[0]: session has wire type 0, expected 2"},
      {{0x0a, 3, 0x12, 1, 'x'}, 5, "items[0]: layer has wire type 2, expected 0"},
      {{0x0a, 4, 0x42, 2, 0x0a, 0}, 6, "items[0]: k: dtype has wire type 2, expected 0"},
      {{0x0a, 4, 0x42, 2, 0x78, 0}, 6, "items[0]: k: data has wire type 0, expected 2"},
      {{0x0a, 4, 0x32, 2, 0x08, 0}, 6, "items[0]: options: scale has wire type 0, expected 1"},
      {{0x0a, 4, 0x42, 2, 0x7a, 9}, 6, "items[0]: k: truncated protobuf"},
      {{0x0a, 2, 0x0b, 1}, 4, "items[0]: malformed protobuf: field 1 has wire type 3"},
      {{0x0a, 0, 0x1a, 0}, 4, "out_dtype has wire type 2, expected 0"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    qkvi_request parsed = {0};
    qkv_error error = {0};
    assert_int_equal(parse_bytes(cases[i].bytes, cases[i].length, QKVI_ATTEND_REQUEST, &parsed, &error),
                     QKV_INVALID_ARGUMENT);
    assert_string_equal(error.text, cases[i].text);
    qkvi_request_deinit(&parsed);
  }
}

// Every prefix of a valid message: refused or an error of an item, never a crash and never a valid item with rows
// that do not exist.
static void truncated_messages_are_refused(void **state) {
  (void)state;
  sample_request request;
  build(&request);
  uint8_t *bytes = NULL;
  size_t length = pack(&request, &bytes);
  qkvi_request parsed = {0};
  for (size_t n = 0; n < length; n++) {
    qkv_error error = {0};
    assert_int_equal(parse_bytes(bytes, n, QKVI_ATTEND_REQUEST, &parsed, &error), QKV_INVALID_ARGUMENT);
    assert_string_equal(error.text, n == 0 ? "items is empty, at least 1" : "truncated protobuf");
  }
  qkvi_request_deinit(&parsed);
  free(bytes);
}

// Flipped bytes: whatever the result, the parser reads nothing outside (the sanitizers watch), and all that it
// accepts can be read.
static void flipped_bytes_are_survived(void **state) {
  (void)state;
  sample_request request;
  build(&request);
  uint8_t *bytes = NULL;
  size_t length = pack(&request, &bytes);
  qkvi_request parsed = {0};
  uint32_t random = 12345;
  size_t good = 0;
  for (int round = 0; round < 20000; round++) {
    uint8_t *copy = malloc(length);
    memcpy(copy, bytes, length);
    for (int flips = 0; flips < 1 + round % 3; flips++) {
      random = random * 1664525 + 1013904223;
      copy[(random >> 8) % length] ^= (uint8_t)(1u << (random >> 29));
    }
    qkv_segment segment = {.data = copy, .length = length};
    qkv_error error = {0};
    qkv_status status = qkvi_request_parse(qkv_bytes_of(&segment), QKVI_ATTEND_REQUEST, &limits, &parsed, &error);
    for (size_t i = 0; status == QKV_OK && i < parsed.count; i++) {
      const qkvi_item *item = &parsed.items[i];
      if (item->error.status != QKV_OK || item->k.rank == 0) continue;
      float row[ROWS_MAX * 4];
      assert_true(item->k.dims[2] * 2 <= (int64_t)length);
      qkv_tensor_row(&item->k, item->k.dims[0] - 1, item->k.dims[1] - 1, row);
      good++;
    }
    free(copy);
  }
  assert_true(good > 1000);
  qkvi_request_deinit(&parsed);
  free(bytes);
}

static void places_read_as_fields_or_sentences(void **state) {
  (void)state;
  qkv_error field = {0}, sentence = {0};
  (void)qkv_fail(&field, QKV_FAILED_PRECONDITION, "position is 70, the expected position is 64");
  (void)qkv_fail(&sentence, QKV_NOT_FOUND, "no session x");
  assert_int_equal(qkvi_item_place(&field, 5), QKV_FAILED_PRECONDITION);
  assert_int_equal(qkvi_item_place(&sentence, 0), QKV_NOT_FOUND);
  assert_string_equal(field.text, "items[5].position is 70, the expected position is 64");
  assert_string_equal(sentence.text, "items[0]: no session x");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(reads_every_field_however_the_message_is_cut),
      cmocka_unit_test(rows_are_views_not_copies),
      cmocka_unit_test(items_without_options_take_the_requests),
      cmocka_unit_test(strides_may_slice_and_repeat),
      cmocka_unit_test(unpacked_dims_and_unknown_fields_are_read),
      cmocka_unit_test(tensor_mistakes_name_field_value_and_limit),
      cmocka_unit_test(token_ids_are_as_many_as_rows),
      cmocka_unit_test(stride_mistakes_name_field_value_and_limit),
      cmocka_unit_test(repeated_rows_count_in_full),
      cmocka_unit_test(repeated_rows_count_together),
      cmocka_unit_test(item_mistakes_name_the_field),
      cmocka_unit_test(one_bad_item_leaves_the_others),
      cmocka_unit_test(request_mistakes_refuse_it_whole),
      cmocka_unit_test(wrong_wire_types_are_refused),
      cmocka_unit_test(truncated_messages_are_refused),
      cmocka_unit_test(flipped_bytes_are_survived),
      cmocka_unit_test(places_read_as_fields_or_sentences),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
