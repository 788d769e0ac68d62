// Token ids, packed or not, in messages cut anywhere.
#include "server/handlers/token_ids.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

// cmocka wants the four above first.
#include <cmocka.h>

enum { FIELD = 7, MAX = 3000 };

typedef struct message {
  uint8_t bytes[20 * MAX];
  size_t length;
} message;

static void put_varint(message *to, uint64_t value) {
  for (; value >= 0x80; value >>= 7) to->bytes[to->length++] = (uint8_t)(value | 0x80);
  to->bytes[to->length++] = (uint8_t)value;
}

static void put_one(message *to, uint64_t id) {
  put_varint(to, FIELD << 3 | QKV_WIRE_VARINT);
  put_varint(to, id);
}

static void put_packed(message *to, const uint64_t *ids, size_t count) {
  static message packed;
  packed.length = 0;
  for (size_t i = 0; i < count; i++) put_varint(&packed, ids[i]);
  put_varint(to, FIELD << 3 | QKV_WIRE_BYTES);
  put_varint(to, packed.length);
  memcpy(to->bytes + to->length, packed.bytes, packed.length);
  to->length += packed.length;
}

// A string of another field.
static void put_other(message *to, const char *text) {
  put_varint(to, 1 << 3 | QKV_WIRE_BYTES);
  put_varint(to, strlen(text));
  memcpy(to->bytes + to->length, text, strlen(text));
  to->length += strlen(text);
}

// Counts the ids as a parser of the message does. `invalid` gets the error of an invalid id.
static qkv_status count(qkv_bytes bytes, qkvi_token_ids *ids, qkv_error *invalid, qkv_error *error) {
  qkv_wire_reader reader;
  qkv_wire_field field;
  bool more = true;
  *ids = (qkvi_token_ids){.message = bytes, .field = FIELD};
  qkv_wire_reader_init(&reader, bytes);
  for (;;) {
    QKV_TRY(qkv_wire_next(&reader, &field, &more, error));
    if (!more) return QKV_OK;
    if (field.number == FIELD) QKV_TRY(qkvi_token_ids_count(ids, &field, invalid, error));
  }
}

// In pieces of `step` bytes, each in memory of its own so that a sanitizer sees reads beyond it.
static void expect_ids(const message *from, size_t step, const uint64_t *expected, size_t expected_count) {
  qkv_segment *pieces = calloc(from->length / step + 1, sizeof *pieces);
  uint32_t *read = calloc(expected_count + 1, sizeof *read);
  size_t piece_count = 0;
  qkv_error error = {0};
  qkvi_token_ids ids;
  for (size_t at = 0; at < from->length; at += step, piece_count++) {
    const size_t length = from->length - at < step ? from->length - at : step;
    uint8_t *copy = malloc(length);
    memcpy(copy, from->bytes + at, length);
    pieces[piece_count] = (qkv_segment){.data = copy, .length = length};
  }
  assert_int_equal(count(qkv_bytes_of_all(pieces, piece_count), &ids, &error, &error), QKV_OK);
  assert_int_equal(error.status, QKV_OK);
  assert_int_equal(ids.count, expected_count);
  qkvi_token_ids_read(&ids, read);
  for (size_t i = 0; i < expected_count; i++) assert_int_equal(read[i], expected[i]);
  for (size_t i = 0; i < piece_count; i++) free((void *)pieces[i].data);
  free(pieces);
  free(read);
}

static void ids_come_packed_and_one_by_one(void **state) {
  (void)state;
  const uint64_t ids[] = {1, 300, UINT32_MAX, 5, 0, 127, 128};
  message m = {.length = 0};
  put_other(&m, "s");
  put_packed(&m, ids, 3);
  put_one(&m, ids[3]);
  put_packed(&m, NULL, 0);
  put_other(&m, "again");
  put_packed(&m, ids + 4, 3);
  for (size_t step = 1; step <= m.length; step++) expect_ids(&m, step, ids, 7);
}

static void ids_of_every_size_in_pieces_of_every_size(void **state) {
  (void)state;
  static uint64_t ids[MAX];
  static message m;
  uint64_t seed = 3;
  m.length = 0;
  for (size_t i = 0; i < MAX; i++) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    ids[i] = (seed >> 32) >> (seed >> 8) % 32;
  }
  put_packed(&m, ids, MAX);
  const size_t steps[] = {1, 2, 3, 5, 9, 10, 11, 13, 64, 1000, sizeof m.bytes};
  for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) expect_ids(&m, steps[i], ids, MAX);
}

// As the Python client writes them, so that their length is known before they are looked at.
static void ids_in_four_bytes_each(void **state) {
  (void)state;
  static uint64_t ids[MAX];
  static message m;
  m.length = 0;
  put_varint(&m, FIELD << 3 | QKV_WIRE_BYTES);
  put_varint(&m, 4 * MAX);
  for (size_t i = 0; i < MAX; i++) {
    ids[i] = i * i * 2971 % (1 << 28);
    for (unsigned byte = 0; byte < 4; byte++)
      m.bytes[m.length++] = (uint8_t)((ids[i] >> 7 * byte & 0x7f) | (byte < 3 ? 0x80 : 0));
  }
  const size_t steps[] = {1, 3, 4, 7, 1001, sizeof m.bytes};
  for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) expect_ids(&m, steps[i], ids, MAX);
}

static void no_ids_are_none(void **state) {
  (void)state;
  message m = {.length = 0};
  put_other(&m, "s");
  expect_ids(&m, 1, NULL, 0);
}

static void mistakes_are_told(void **state) {
  (void)state;
  const uint64_t ids[] = {1, UINT64_C(1) << 32};
  message m = {.length = 0};
  qkv_error error = {0}, invalid = {0};
  qkvi_token_ids found;
  put_packed(&m, ids, 2);
  qkv_segment segment = {.data = m.bytes, .length = m.length};
  assert_int_equal(count(qkv_bytes_of(&segment), &found, &invalid, &error), QKV_OK);
  assert_string_equal(invalid.text, "token_ids[1] is 4294967296, at most 4294967295");
  assert_int_equal(found.count, 2);

  const uint8_t fixed[] = {FIELD << 3 | QKV_WIRE_FIXED32, 1, 2, 3, 4},
                cut[] = {FIELD << 3 | QKV_WIRE_BYTES, 2, 1, 0x80};
  segment = (qkv_segment){.data = fixed, .length = sizeof fixed};
  assert_int_equal(count(qkv_bytes_of(&segment), &found, &invalid, &error), QKV_INVALID_ARGUMENT);
  assert_string_equal(error.text, "wire type is 5, expected 2 or 0");
  error = (qkv_error){0};
  segment = (qkv_segment){.data = cut, .length = sizeof cut};
  assert_int_equal(count(qkv_bytes_of(&segment), &found, &invalid, &error), QKV_INVALID_ARGUMENT);
  assert_non_null(strstr(error.text, "truncated"));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(ids_come_packed_and_one_by_one),
      cmocka_unit_test(ids_of_every_size_in_pieces_of_every_size),
      cmocka_unit_test(ids_in_four_bytes_each),
      cmocka_unit_test(no_ids_are_none),
      cmocka_unit_test(mistakes_are_told),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
