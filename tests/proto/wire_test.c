#include "proto/wire.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "qkv/v1/kv_cache.pb-c.h"

// ---- Reader ----

static qkv_status next_of(const void *data, size_t length, qkv_wire_field *field, bool *more, qkv_error *error) {
  static qkv_segment segment;  // views of `field` borrow it
  segment = (qkv_segment){.data = data, .length = length};
  qkv_wire_reader reader;
  qkv_wire_reader_init(&reader, qkv_bytes_of(&segment));
  return qkv_wire_next(&reader, field, more, error);
}

#define NEXT(literal, field, more, error) next_of((literal), sizeof(literal) - 1, (field), (more), (error))

static void test_fields(void **state) {
  (void)state;
  qkv_wire_field field;
  bool more = true;
  assert_int_equal(NEXT("", &field, &more, NULL), QKV_OK);
  assert_false(more);
  assert_int_equal(NEXT("\x08\x96\x01", &field, &more, NULL), QKV_OK);
  assert_true(more);
  assert_int_equal(field.number, 1);
  assert_int_equal(field.type, QKV_WIRE_VARINT);
  assert_int_equal(field.value, 150);
  assert_int_equal(NEXT("\x11\x01\x02\x03\x04\x05\x06\x07\x88", &field, &more, NULL), QKV_OK);
  assert_int_equal(field.type, QKV_WIRE_FIXED64);
  assert_true(field.value == UINT64_C(0x8807060504030201));
  assert_int_equal(NEXT("\x1d\x01\x02\x03\x84", &field, &more, NULL), QKV_OK);
  assert_int_equal(field.type, QKV_WIRE_FIXED32);
  assert_int_equal(field.value, 0x84030201);
  assert_int_equal(NEXT("\xfa\xff\xff\xff\x0f\x02hi", &field, &more, NULL), QKV_OK);
  assert_int_equal(field.number, (1u << 29) - 1);
  assert_int_equal(field.bytes.length, 2);
  assert_memory_equal(qkv_bytes_contiguous(field.bytes, 0, 2), "hi", 2);
  assert_int_equal(NEXT("\x0a\x00", &field, &more, NULL), QKV_OK);
  assert_int_equal(field.bytes.length, 0);
}

static void test_varint_limits(void **state) {
  (void)state;
  qkv_wire_field field;
  bool more = false;
  assert_int_equal(NEXT("\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", &field, &more, NULL), QKV_OK);
  assert_true(field.value == UINT64_MAX);
  assert_int_equal(NEXT("\x08\x80\x80\x80\x80\x80\x80\x80\x80\x80\x00", &field, &more, NULL), QKV_OK);
  assert_int_equal(field.value, 0);  // longer than it needs to be, and allowed
}

static void test_hostile(void **state) {
  (void)state;
  static const char cut[] = "truncated protobuf";
  static const char number[] = "malformed protobuf: no valid field number";
  static const char varint[] = "malformed protobuf: a varint of more than 64 bits";
  static const struct {
    const char *data;
    size_t length;
    const char *text;
  } rows[] = {
#define ROW(literal, text) {(literal), sizeof(literal) - 1, (text)}
      ROW("\x80", cut),
      ROW("\x08", cut),
      ROW("\x08\x80", cut),
      ROW("\x09\x01\x02\x03\x04\x05\x06\x07", cut),
      ROW("\x0d\x01\x02\x03", cut),
      ROW("\x0a", cut),
      ROW("\x0a\x03hi", cut),
      ROW("\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7fhi", cut),      // length 2^63 - 1
      ROW("\x0a\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01hi", cut),  // 2^63
      ROW("\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01hi", cut),  // 2^64 - 1
      ROW("\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x02", varint),
      ROW("\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x81\x01", varint),
      ROW("\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", varint),
      ROW("\x00\x01", number),
      ROW("\x07", number),
      ROW("\x80\x80\x80\x80\x10\x01", number),
      ROW("\x0b", "malformed protobuf: field 1 has wire type 3"),
      ROW("\x14", "malformed protobuf: field 2 has wire type 4"),
      ROW("\x0e\x01", "malformed protobuf: field 1 has wire type 6"),
      ROW("\x0f\x01", "malformed protobuf: field 1 has wire type 7"),
#undef ROW
  };
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    // On the heap at its exact size, so that a read beyond the end is seen.
    char *copy = malloc(rows[i].length);
    memcpy(copy, rows[i].data, rows[i].length);
    qkv_wire_field field;
    bool more = false;
    qkv_error error = {0};
    assert_int_equal(next_of(copy, rows[i].length, &field, &more, &error), QKV_INVALID_ARGUMENT);
    assert_string_equal(error.text, rows[i].text);
    free(copy);
  }
}

// Any bytes either parse or are refused, and every call takes at least one byte.
static void test_random_bytes(void **state) {
  (void)state;
  uint64_t seed = 12345;
  for (int round = 0; round < 20000; round++) {
    uint8_t data[32];
    for (size_t i = 0; i < sizeof data; i++) {
      seed = seed * UINT64_C(6364136223846793005) + 1442695040888963407;
      data[i] = (uint8_t)(seed >> 56);
    }
    size_t length = (size_t)round % (sizeof data + 1);
    size_t cut = length / 3;
    qkv_segment segments[] = {{.data = data, .length = cut}, {.data = data + cut, .length = length - cut}};
    qkv_wire_reader reader;
    qkv_wire_reader_init(&reader, qkv_bytes_of_all(segments, 2));
    qkv_wire_field field;
    bool more = true;
    for (;;) {
      size_t before = reader.rest.length;
      if (qkv_wire_next(&reader, &field, &more, NULL) != QKV_OK || !more) break;
      assert_true(reader.rest.length < before);
    }
  }
}

static void test_string(void **state) {
  (void)state;
  qkv_wire_field field;
  bool more = false;
  char out[5];
  qkv_error error = {0};
  assert_int_equal(NEXT("\x0a\x04name", &field, &more, NULL), QKV_OK);
  assert_int_equal(qkv_wire_string(&field, "session", out, sizeof out, &error), QKV_OK);
  assert_string_equal(out, "name");
  assert_int_equal(qkv_wire_string(&field, "session", out, 4, &error), QKV_INVALID_ARGUMENT);
  assert_string_equal(error.text, "session is 4 bytes, at most 3");
  error = (qkv_error){0};
  assert_int_equal(NEXT("\x0a\x03x\0y", &field, &more, NULL), QKV_OK);
  assert_int_equal(qkv_wire_string(&field, "session", out, sizeof out, &error), QKV_INVALID_ARGUMENT);
  assert_string_equal(error.text, "session holds a NUL byte");
  error = (qkv_error){0};
  assert_int_equal(NEXT("\x08\x03", &field, &more, NULL), QKV_OK);
  assert_int_equal(qkv_wire_string(&field, "session", out, sizeof out, &error), QKV_INVALID_ARGUMENT);
  assert_string_equal(error.text, "session has wire type 0, a string is needed");
  assert_int_equal(NEXT("\x0a\x00", &field, &more, NULL), QKV_OK);
  assert_int_equal(qkv_wire_string(&field, "session", out, 1, NULL), QKV_OK);
  assert_string_equal(out, "");
}

// ---- Writer ----

// The pieces one after the other; to be freed.
static uint8_t *join(qkv_wire_writer *writer, size_t *length) {
  size_t count = 0;
  const qkv_wire_piece *pieces = qkv_wire_writer_pieces(writer, &count);
  *length = 0;
  for (size_t i = 0; i < count; i++) *length += pieces[i].length;
  uint8_t *joined = malloc(*length + 1);
  size_t at = 0;
  for (size_t i = 0; i < count; i++) {
    memcpy(joined + at, pieces[i].data, pieces[i].length);
    at += pieces[i].length;
  }
  return joined;
}

static void assert_same_as_packed(qkv_wire_writer *writer, const ProtobufCMessage *message) {
  size_t packed_length = protobuf_c_message_get_packed_size(message);
  uint8_t *packed = malloc(packed_length + 1);
  assert_int_equal(protobuf_c_message_pack(message, packed), packed_length);
  size_t length = 0;
  uint8_t *joined = join(writer, &length);
  assert_int_equal(length, packed_length);
  assert_memory_equal(joined, packed, length);
  free(packed);
  free(joined);
}

static int64_t k_dims[] = {1, 2, 300};
static int64_t k_strides[] = {1200, -600, 2};
static uint8_t k_data[1200];
static uint8_t v_data[1 << 16];

static int fill(void **state) {
  (void)state;
  for (size_t i = 0; i < sizeof k_data; i++) k_data[i] = (uint8_t)(i * 7);
  for (size_t i = 0; i < sizeof v_data; i++) v_data[i] = (uint8_t)(i * 13);
  return 0;
}

static Qkv__V1__Tensor tensor_message(Qkv__V1__DType dtype, size_t strides, uint8_t *data, size_t length) {
  Qkv__V1__Tensor tensor = QKV__V1__TENSOR__INIT;
  tensor.dtype = dtype;
  tensor.n_dims = 3;
  tensor.dims = k_dims;
  tensor.n_strides = strides;
  tensor.strides = k_strides;
  tensor.data = (ProtobufCBinaryData){.data = data, .len = length};
  return tensor;
}

static void put_tensor(qkv_wire_writer *writer, uint32_t field, const Qkv__V1__Tensor *tensor) {
  qkv_wire_begin(writer, field);
  qkv_wire_put_varint(writer, 1, (uint64_t)tensor->dtype);
  qkv_wire_put_packed(writer, 2, tensor->dims, tensor->n_dims);
  qkv_wire_put_packed(writer, 3, tensor->strides, tensor->n_strides);
  qkv_wire_put_reference(writer, 15, tensor->data.data, tensor->data.len, (void *)tensor);
  qkv_wire_end(writer);
}

static Qkv__V1__AttendOptions options_message(void) {
  Qkv__V1__AttendOptions options = QKV__V1__ATTEND_OPTIONS__INIT;
  options.scale = -0.125;
  options.sliding_window = UINT64_MAX;
  options.causal_offset = -3;
  options.not_causal = true;
  return options;
}

static void put_options(qkv_wire_writer *writer, uint32_t field, const Qkv__V1__AttendOptions *options) {
  qkv_wire_begin(writer, field);
  qkv_wire_put_double(writer, 1, options->scale);
  qkv_wire_put_varint(writer, 2, options->sliding_window);
  qkv_wire_put_double(writer, 3, options->soft_cap);
  if (options->range != NULL) {
    qkv_wire_begin(writer, 4);
    qkv_wire_put_varint(writer, 1, options->range->begin);
    qkv_wire_put_varint(writer, 2, options->range->end);
    qkv_wire_end(writer);
  }
  qkv_wire_put_varint(writer, 5, (uint64_t)options->causal_offset);
  qkv_wire_put_varint(writer, 6, options->not_causal);
  qkv_wire_end(writer);
}

// An item with everything in it; what it points to is static, so it lives as long.
static Qkv__V1__Item *item_message(void) {
  static Qkv__V1__Item item;
  static Qkv__V1__Tensor k, v, q;
  static Qkv__V1__AttendOptions options;
  static Qkv__V1__TokenRange range;
  static uint32_t token_ids[] = {0, 127, 128, UINT32_MAX};
  qkv__v1__item__init(&item);
  qkv__v1__token_range__init(&range);
  range.end = 70000;
  options = options_message();
  options.range = &range;
  k = tensor_message(QKV__V1__DTYPE__DTYPE_FP16, 3, k_data, sizeof k_data);
  v = tensor_message(QKV__V1__DTYPE__DTYPE_BF16, 0, v_data, sizeof v_data);
  q = tensor_message(QKV__V1__DTYPE__DTYPE_UNSPECIFIED, 0, NULL, 0);
  item.session = (char *)"user:1/chat";
  item.layer = 3;
  item.position = UINT64_C(1) << 40;
  item.q_rope = QKV__V1__ROPE_FORM__ROPE_FORM_BEFORE;
  item.options = &options;
  item.n_token_ids = 4;
  item.token_ids = token_ids;
  item.k = &k;
  item.v = &v;
  item.q = &q;
  return &item;
}

static void put_item(qkv_wire_writer *writer, const Qkv__V1__Item *item) {
  int64_t token_ids[8];
  for (size_t i = 0; i < item->n_token_ids; i++) token_ids[i] = item->token_ids[i];
  qkv_wire_put_string(writer, 1, item->session);
  qkv_wire_put_varint(writer, 2, item->layer);
  qkv_wire_put_varint(writer, 3, item->position);
  qkv_wire_put_varint(writer, 4, item->k_rope);
  qkv_wire_put_varint(writer, 5, item->q_rope);
  if (item->options != NULL) put_options(writer, 6, item->options);
  qkv_wire_put_packed(writer, 7, token_ids, item->n_token_ids);
  if (item->k != NULL) put_tensor(writer, 8, item->k);
  if (item->v != NULL) put_tensor(writer, 9, item->v);
  if (item->q != NULL) put_tensor(writer, 10, item->q);
}

static void test_item(void **state) {
  (void)state;
  qkv_wire_writer *writer = qkv_wire_writer_create();
  Qkv__V1__Item empty = QKV__V1__ITEM__INIT;
  put_item(writer, &empty);
  assert_same_as_packed(writer, &empty.base);
  const Qkv__V1__Item *item = item_message();
  for (int round = 0; round < 2; round++) {  // again in the same writer
    qkv_wire_writer_clear(writer);
    put_item(writer, item);
    assert_same_as_packed(writer, &item->base);
  }
  qkv_wire_writer_destroy(&writer);
  assert_null(writer);
}

static void test_attend_request(void **state) {
  (void)state;
  Qkv__V1__Item small = QKV__V1__ITEM__INIT;
  small.session = (char *)"s";
  Qkv__V1__Item *items[] = {item_message(), &small, item_message(), item_message()};
  Qkv__V1__AttendOptions options = options_message();
  Qkv__V1__AttendRequest request = QKV__V1__ATTEND_REQUEST__INIT;
  request.n_items = 4;
  request.items = items;
  request.options = &options;
  request.out_dtype = QKV__V1__DTYPE__DTYPE_FP16;
  request.id = 77;
  qkv_wire_writer *writer = qkv_wire_writer_create();
  for (size_t i = 0; i < 4; i++) {
    qkv_wire_begin(writer, 1);
    put_item(writer, items[i]);
    qkv_wire_end(writer);
  }
  put_options(writer, 2, &options);
  qkv_wire_put_varint(writer, 3, request.out_dtype);
  qkv_wire_put_varint(writer, 4, request.id);
  assert_same_as_packed(writer, &request.base);
  qkv_wire_writer_destroy(&writer);
}

static void test_fetch_response(void **state) {
  (void)state;
  Qkv__V1__Tensor k = tensor_message(QKV__V1__DTYPE__DTYPE_FP32, 0, k_data, sizeof k_data);
  Qkv__V1__Tensor v = tensor_message(QKV__V1__DTYPE__DTYPE_FP32, 0, v_data, sizeof v_data);
  Qkv__V1__FetchResponse response = QKV__V1__FETCH_RESPONSE__INIT;
  response.layer = 300;
  response.position = 64;
  response.k = &k;
  response.v = &v;
  qkv_wire_writer *writer = qkv_wire_writer_create();
  qkv_wire_put_varint(writer, 1, response.layer);
  qkv_wire_put_varint(writer, 2, response.position);
  put_tensor(writer, 3, &k);
  put_tensor(writer, 4, &v);
  assert_same_as_packed(writer, &response.base);

  // Large data is referenced, in its place, with its owner.
  size_t count = 0;
  const qkv_wire_piece *pieces = qkv_wire_writer_pieces(writer, &count);
  assert_int_equal(count, 4);
  assert_false(pieces[0].reference);
  assert_true(pieces[1].reference);
  assert_ptr_equal(pieces[1].data, k_data);
  assert_ptr_equal(pieces[1].owner, &k);
  assert_false(pieces[2].reference);
  assert_ptr_equal(pieces[3].data, v_data);
  assert_int_equal(pieces[3].length, sizeof v_data);
  qkv_wire_writer_destroy(&writer);
}

// Lengths around the sizes at which their varint grows, four levels deep.
static void test_nested_lengths(void **state) {
  (void)state;
  static const size_t lengths[] = {0,   1,   100, 119, 120, 121,   122,   123,  124,
                                   125, 126, 127, 128, 129, 16383, 16384, 65536};
  qkv_wire_writer *writer = qkv_wire_writer_create();
  for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
    qkv_wire_writer_clear(writer);
    for (int level = 0; level < 4; level++) qkv_wire_begin(writer, 1);
    qkv_wire_put_reference(writer, 15, v_data, lengths[i], NULL);
    for (int level = 0; level < 4; level++) qkv_wire_end(writer);
    size_t length = 0;
    uint8_t *joined = join(writer, &length);
    qkv_segment segment = {.data = joined, .length = length};
    qkv_bytes message = qkv_bytes_of(&segment);
    qkv_wire_field field = {0};
    for (int level = 0; level < 5; level++) {
      if (level == 4 && lengths[i] == 0) break;
      qkv_wire_reader reader;
      qkv_wire_reader_init(&reader, message);
      bool more = false;
      assert_int_equal(qkv_wire_next(&reader, &field, &more, NULL), QKV_OK);
      assert_true(more);
      assert_int_equal(field.number, level < 4 ? 1 : 15);
      assert_int_equal(reader.rest.length, 0);
      message = field.bytes;
    }
    assert_int_equal(message.length, lengths[i]);
    if (lengths[i] > 0) assert_memory_equal(qkv_bytes_contiguous(message, 0, lengths[i]), v_data, lengths[i]);
    free(joined);
  }
  qkv_wire_writer_destroy(&writer);
}

// ---- There and back, in pieces ----

// Everything that a reader sees in a message, as a number. Fields of the types in `nested` are read inside.
static uint64_t digest(qkv_bytes message, int depth) {
  uint64_t sum = 1469598103934665603u;
  qkv_wire_reader reader;
  qkv_wire_reader_init(&reader, message);
  qkv_wire_field field;
  bool more = true;
  for (;;) {
    assert_int_equal(qkv_wire_next(&reader, &field, &more, NULL), QKV_OK);
    if (!more) return sum;
    sum = (sum ^ field.number) * 1099511628211u;
    sum = (sum ^ field.value) * 1099511628211u;
    if (field.type != QKV_WIRE_BYTES) continue;
    if (depth == 0 && field.number >= 8) {
      sum = (sum ^ digest(field.bytes, 1)) * 1099511628211u;
    } else if (depth == 1 && (field.number == 2 || field.number == 3)) {
      qkv_wire_reader packed;
      qkv_wire_reader_init(&packed, field.bytes);
      while (packed.rest.length > 0) {
        uint64_t value = 0;
        assert_int_equal(qkv_wire_varint(&packed, &value, NULL), QKV_OK);
        sum = (sum ^ value) * 1099511628211u;
      }
    } else {
      uint8_t raw[64];
      assert_true(field.bytes.length <= sizeof raw);
      qkv_bytes_copy(field.bytes, 0, field.bytes.length, raw);
      for (size_t i = 0; i < field.bytes.length; i++) sum = (sum ^ raw[i]) * 1099511628211u;
    }
  }
}

static void test_every_split(void **state) {
  (void)state;
  Qkv__V1__Item *item = item_message();
  item->k->data.len = 50;
  item->v->data.len = 33;
  qkv_wire_writer *writer = qkv_wire_writer_create();
  put_item(writer, item);
  size_t length = 0;
  uint8_t *joined = join(writer, &length);
  qkv_segment whole = {.data = joined, .length = length};
  uint64_t expected = digest(qkv_bytes_of(&whole), 0);
  for (size_t a = 0; a <= length; a++) {
    for (size_t b = a; b <= length; b++) {
      qkv_segment segments[] = {{.data = joined, .length = a},
                                {.data = joined + a, .length = b - a},
                                {.data = joined + b, .length = length - b}};
      assert_true(digest(qkv_bytes_of_all(segments, 3), 0) == expected);
    }
    qkv_segment two[] = {{.data = joined, .length = a}, {.data = joined + a, .length = length - a}};
    assert_true(digest(qkv_bytes_of_all(two, 2), 0) == expected);
  }
  joined[length - 1] ^= 1;  // the digest sees a change
  assert_true(digest(qkv_bytes_of(&whole), 0) != expected);
  free(joined);
  qkv_wire_writer_destroy(&writer);
}

// Every message cut short is refused or ends between two fields.
static void test_every_truncation(void **state) {
  (void)state;
  Qkv__V1__Item *item = item_message();
  item->v->data.len = 0;
  qkv_wire_writer *writer = qkv_wire_writer_create();
  put_item(writer, item);
  size_t length = 0;
  uint8_t *joined = join(writer, &length);
  size_t refused = 0;
  for (size_t kept = 0; kept < length; kept++) {
    uint8_t *copy = malloc(kept + 1);
    memcpy(copy + 1, joined, kept);  // up to the very end of the block
    qkv_segment segment = {.data = copy + 1, .length = kept};
    qkv_wire_reader reader;
    qkv_wire_reader_init(&reader, qkv_bytes_of(&segment));
    qkv_wire_field field;
    bool more = true;
    qkv_status status = QKV_OK;
    while (status == QKV_OK && more) status = qkv_wire_next(&reader, &field, &more, NULL);
    if (status != QKV_OK) refused++;
    free(copy);
  }
  assert_int_equal(refused, length - 9);  // 9 fields: session, layer, position, q_rope, options, ids, k, v, q
  free(joined);
  qkv_wire_writer_destroy(&writer);
}

// Small fields of a large message end it before all of them are read.
static void test_too_many_fields(void **state) {
  (void)state;
  enum { BYTES = 16 << 20, MOST = QKV_WIRE_FIELDS + BYTES / 16 };
  uint8_t *data = malloc(BYTES);
  assert_non_null(data);
  for (size_t i = 0; i < BYTES; i++) data[i] = i % 2 == 0 ? 1 << 3 : 1;
  qkv_wire_reader reader;
  qkv_wire_field field;
  qkv_error error = {0};
  bool more = true;
  for (int part = 0; part < 2; part++) {
    const qkv_segment segment = {.data = data, .length = part == 0 ? 2 * QKV_WIRE_FIELDS : BYTES};
    size_t count = 0;
    qkv_status status;
    qkv_wire_reader_init(&reader, qkv_bytes_of(&segment));
    while ((status = qkv_wire_next(&reader, &field, &more, &error)) == QKV_OK && more) count++;
    assert_int_equal(status, part == 0 ? QKV_OK : QKV_INVALID_ARGUMENT);
    assert_int_equal(count, part == 0 ? QKV_WIRE_FIELDS : MOST);
  }
  assert_string_equal(error.text, "malformed protobuf: too many fields");
  free(data);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_fields),         cmocka_unit_test(test_too_many_fields),
                                     cmocka_unit_test(test_varint_limits),  cmocka_unit_test(test_hostile),
                                     cmocka_unit_test(test_random_bytes),   cmocka_unit_test(test_string),
                                     cmocka_unit_test(test_item),           cmocka_unit_test(test_attend_request),
                                     cmocka_unit_test(test_fetch_response), cmocka_unit_test(test_nested_lengths),
                                     cmocka_unit_test(test_every_split),    cmocka_unit_test(test_every_truncation)};
  return cmocka_run_group_tests(tests, fill, NULL);
}
