#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
// cmocka wants the above first
#include <cmocka.h>
#include <xxhash.h>

#include "engine/codec/page.h"
#include "naive.h"

typedef struct page_case {
  qkv_page_shape shape;
  qkv_schedule k, v;
  size_t bytes;
  uint8_t *image;
} page_case;

static page_case make(qkv_page_shape shape, naive_random *banded) {
  page_case page = {.shape = shape};
  if (banded) {
    naive_schedule(banded, shape.key_dim, &page.k);
    naive_schedule(banded, shape.value_dim, &page.v);
  } else {
    qkv_schedule_uniform(&page.k, shape.key_dim);
    qkv_schedule_uniform(&page.v, shape.value_dim);
  }
  page.bytes = qkv_page_bytes(&shape, &page.k, &page.v);
  page.image = aligned_alloc(64, page.bytes);
  assert_non_null(page.image);
  memset(page.image, 0xee, page.bytes);
  qkv_page_format(page.image, &shape, 1, 77, 0x1122334455667788, &page.k, &page.v);
  qkv_page_seal(page.image);
  return page;
}

static qkv_status validate(const page_case *page, qkv_error *error) {
  *error = (qkv_error){0};
  return qkv_page_validate(page->image, page->bytes, &page->k, &page->v, error);
}

static size_t up64(size_t bytes) {
  return (bytes + 63) & ~(size_t)63;
}

static void header_and_directory_are_as_drawn(void **state) {
  (void)state;
  page_case page = make((qkv_page_shape){3, 96, 80, 4, 3}, NULL);
  const uint8_t *b = page.image;
  const size_t head = up64(128 + 64 * 96 * 4 / 8 + 64 * 80 * 3 / 8);
  assert_int_equal(page.bytes, 128 + 3 * head);
  assert_memory_equal(b, "QKVP", 4);
  assert_int_equal(b[4], 1);
  assert_int_equal(b[5], 1);
  assert_int_equal(b[6], 4);
  assert_int_equal(b[7], 3);
  assert_int_equal(naive_read(b, 8, 4), page.bytes);
  assert_int_equal(naive_read(b, 12, 4), 77);
  assert_true(naive_read(b, 16, 8) == 0x1122334455667788);
  assert_int_equal(naive_read(b, 24, 2), 64);
  assert_int_equal(naive_read(b, 26, 2), 3);
  assert_int_equal(naive_read(b, 28, 2), 96);
  assert_int_equal(naive_read(b, 30, 2), 80);
  for (size_t i = 32; i < 56; i++) assert_int_equal(b[i], 0);
  for (size_t h = 0; h < 3; h++) {
    const uint8_t *entry = b + 64 + 16 * h;
    assert_int_equal(naive_read(entry, 0, 4), 128 + h * head);
    for (size_t g = 0; g < 4; g++) {
      assert_int_equal(entry[4 + g], 4);
      assert_int_equal(entry[8 + g], 3);
      assert_int_equal(entry[12 + g], 0);
    }
  }
  for (size_t i = 64 + 48; i < page.bytes; i++) assert_int_equal(b[i], 0);
  free(page.image);
}

static void checksum_is_the_hash_with_the_field_zero(void **state) {
  (void)state;
  naive_random random = {1};
  page_case page = make((qkv_page_shape){2, 64, 64, 4, 4}, NULL);
  for (size_t i = 192; i < page.bytes; i++) page.image[i] = (uint8_t)naive_next(&random);
  qkv_page_seal(page.image);
  const uint64_t stored = naive_read(page.image, 56, 8);
  memset(page.image + 56, 0, 8);
  assert_true(XXH3_64bits(page.image, page.bytes) == stored);
  free(page.image);
}

// Gains and groups lie where the drawing says, for bands and for mixed tiers.
static void find_follows_the_drawing(void **state) {
  (void)state;
  naive_random random = {2};
  for (int round = 0; round < 200; round++) {
    const qkv_page_shape shape = {(uint16_t)(1 + naive_below(&random, 9)),
                                  (uint16_t)(8 + 8 * naive_below(&random, 20)),
                                  (uint16_t)(8 + 8 * naive_below(&random, 20)),
                                  (uint8_t)(1 + naive_below(&random, 8)), (uint8_t)(1 + naive_below(&random, 8))};
    page_case page = make(shape, &random);
    qkv_error error;
    assert_int_equal(validate(&page, &error), QKV_OK);
    const uint16_t h = (uint16_t)naive_below(&random, shape.kv_heads);
    uint8_t *entry = page.image + 64 + 16 * h;
    // Lower tiers in place: what follows moves, and stays inside.
    for (size_t g = 0; g < 4; g++) {
      entry[4 + g] = (uint8_t)naive_below(&random, shape.bits_k + 1u);
      entry[8 + g] = (uint8_t)naive_below(&random, shape.bits_v + 1u);
    }
    size_t at = naive_read(entry, 0, 4);
    qkv_page_codes k, v;
    qkv_page_find(page.image, h, QKV_K, &page.k, &page.v, &k);
    qkv_page_find(page.image, h, QKV_V, &page.k, &page.v, &v);
    assert_ptr_equal(k.gains, page.image + at);
    assert_ptr_equal(v.gains, page.image + at + 64);
    assert_ptr_equal(k.schedule, &page.k);
    assert_ptr_equal(v.schedule, &page.v);
    at += 128;
    for (size_t g = 0; g < 4; g++) {
      assert_int_equal(k.tiers[g], entry[4 + g]);
      assert_ptr_equal(k.groups[g], page.image + at);
      assert_int_equal((uintptr_t)k.groups[g] % 16, 0);
      at += qkv_schedule_group_bytes(&page.k, entry[4 + g]);
    }
    for (size_t g = 0; g < 4; g++) {
      assert_int_equal(v.tiers[g], entry[8 + g]);
      assert_ptr_equal(v.groups[g], page.image + at);
      at += qkv_schedule_group_bytes(&page.v, entry[8 + g]);
    }
    assert_true(at <= page.bytes);
    free(page.image);
  }
}

static void refusals_say_why(void **state) {
  (void)state;
  static const struct {
    size_t offset;
    uint8_t value;
    const char *text;
  } cases[] = {
      {0, 'X', "page.magic is 0x50564b58, expected 0x50564b51"},
      {4, 2, "page.version is 2, known is 1"},
      {36, 1, "page.features is 0x1, none is known"},
      {37, 0x80, "page.features is 0x8000, none is known"},
      {38, 3, "page.frame is 3, at most 2"},
      {39, 1, "page.reserved is not 0"},
      {47, 1, "page.reserved is not 0"},
      {48, 1, "page.reserved is not 0"},
      {10, 1, "page.bytes is 74112, the page is 8576 bytes"},
      {24, 0, "page.tokens is 0, allowed are 1 to 64"},
      {24, 65, "page.tokens is 65, allowed are 1 to 64"},
      {26, 0, "page.kv_heads is 0, allowed are 1 to 1024"},
      {27, 4, "page.kv_heads is 1026, allowed are 1 to 1024"},
      {27, 3, "page.kv_heads is 770, whose directory does not fit 8576 bytes"},
      {26, 1, "page.bytes is 8576, its heads make 4352"},
      {26, 3, "page.directory[2].offset is 0, expected 8576"},
      {28, 72, "page.key_dim is 72, expected 64"},
      {30, 0, "page.value_dim is 0, expected 64"},
      {6, 0, "page.bits_k is 0, allowed are 1 to 8"},
      {7, 9, "page.bits_v is 9, allowed are 1 to 8"},
      {64, 0, "page.directory[0].offset is 0, expected 128"},
      {80, 64, "page.directory[1].offset is 4416, expected 4352"},
      {69, 5, "page.directory[0].tier_k[1] is 5, at most 4"},
      {91, 255, "page.directory[1].tier_v[3] is 255, at most 4"},
      {69, 3, "page.directory[1].offset is 4352, expected 4224"},
      {85, 3, "page.bytes is 8576, its heads make 8448"},
      {76, 1, "page.directory[0] has an anchor or low-rank factors, which page.features does not say"},
      {95, 1, "page.directory[1] has an anchor or low-rank factors, which page.features does not say"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    page_case page = make((qkv_page_shape){2, 64, 64, 4, 4}, NULL);
    qkv_error error;
    page.image[cases[i].offset] = cases[i].value;
    assert_int_equal(validate(&page, &error), QKV_DATA_LOSS);
    assert_string_equal(error.text, cases[i].text);
    free(page.image);
  }
}

static void every_flipped_bit_is_found(void **state) {
  (void)state;
  page_case page = make((qkv_page_shape){1, 8, 8, 1, 1}, NULL);
  qkv_error error;
  for (size_t bit = 0; bit < 8 * page.bytes; bit++) {
    page.image[bit / 8] ^= (uint8_t)(1u << bit % 8);
    assert_int_equal(validate(&page, &error), QKV_DATA_LOSS);
    page.image[bit / 8] ^= (uint8_t)(1u << bit % 8);
  }
  assert_int_equal(validate(&page, &error), QKV_OK);
  page.image[page.bytes - 1] ^= 1;
  assert_int_equal(validate(&page, &error), QKV_DATA_LOSS);
  assert_memory_equal(error.text, "page.checksum is 0x", 19);
  free(page.image);
}

// At every length, in a block of exactly that length and at an odd address: the sanitizer watches.
static void cut_pages_are_refused(void **state) {
  (void)state;
  page_case page = make((qkv_page_shape){2, 16, 8, 2, 1}, NULL);
  for (size_t length = 0; length < page.bytes; length++) {
    uint8_t *block = malloc(length + 1);
    assert_non_null(block);
    memcpy(block + 1, page.image, length);
    qkv_error error = {0};
    assert_int_equal(qkv_page_validate(block + 1, length, &page.k, &page.v, &error), QKV_DATA_LOSS);
    if (length >= 64) memcpy(block + 1 + 8, &(uint32_t){(uint32_t)length}, 4);
    assert_int_equal(qkv_page_validate(block + 1, length, &page.k, &page.v, NULL), QKV_DATA_LOSS);
    free(block);
  }
  qkv_error error = {0};
  assert_int_equal(qkv_page_validate(page.image, 63, &page.k, &page.v, &error), QKV_DATA_LOSS);
  assert_string_equal(error.text, "the page is 63 bytes, its header is 64");
  free(page.image);
}

// Random damage with a checksum that fits: accepted or refused, never read outside.
static void sealed_damage_is_safe(void **state) {
  (void)state;
  naive_random random = {3};
  size_t accepted = 0;
  for (int round = 0; round < 3000; round++) {
    page_case page = make((qkv_page_shape){2, 16, 24, 4, 3}, NULL);
    for (unsigned i = 0; i < 1 + naive_below(&random, 3); i++) {
      page.image[naive_below(&random, 160)] = (uint8_t)naive_next(&random);
    }
    memcpy(page.image + 8, &(uint32_t){(uint32_t)page.bytes}, 4);
    qkv_page_seal(page.image);
    qkv_error error;
    if (validate(&page, &error) == QKV_OK) {
      accepted++;
      const uint16_t heads = (uint16_t)naive_read(page.image, 26, 2);
      for (uint16_t h = 0; h < heads; h++) {
        qkv_page_codes codes;
        qkv_page_find(page.image, h, QKV_V, &page.k, &page.v, &codes);
        const size_t end = qkv_schedule_group_bytes(&page.v, codes.tiers[3]);
        assert_true(codes.groups[3] + end <= page.image + page.bytes);
      }
    }
    free(page.image);
  }
  assert_true(accepted > 100);  // layer, position, codec are free
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(header_and_directory_are_as_drawn),
      cmocka_unit_test(checksum_is_the_hash_with_the_field_zero),
      cmocka_unit_test(find_follows_the_drawing),
      cmocka_unit_test(refusals_say_why),
      cmocka_unit_test(every_flipped_bit_is_found),
      cmocka_unit_test(cut_pages_are_refused),
      cmocka_unit_test(sealed_damage_is_safe),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
