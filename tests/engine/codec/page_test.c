#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
// cmocka wants the above first
#include <cmocka.h>
#include <xxhash.h>

#include "engine/codec/page.h"
#include "naive.h"

typedef struct page_shape {
  uint16_t kv_heads, key_dim, value_dim;
  uint8_t tier_k, tier_v;
} page_shape;

typedef struct head_case {
  qkv_schedule own[2];
  const qkv_schedule *schedules[2];
} head_case;

typedef struct page_case {
  page_shape shape;
  head_case *heads;          // [kv_heads]
  qkv_head_layout *layouts;  // [kv_heads]
  qkv_page_expected expected;
  size_t bytes;
  uint8_t *image;
} page_case;

static const qkv_schedule *const *schedules_of(const void *context, uint16_t kv_head) {
  return ((const head_case *)context)[kv_head].schedules;
}

// The schedules and the layouts of a page, which is not written yet.
static page_case plan(page_shape shape, naive_random *banded) {
  page_case page = {.shape = shape,
                    .heads = calloc(shape.kv_heads, sizeof *page.heads),
                    .layouts = calloc(shape.kv_heads, sizeof *page.layouts)};
  if (page.heads == NULL || page.layouts == NULL) abort();
  const uint16_t dims[] = {shape.key_dim, shape.value_dim};
  const uint8_t tiers[] = {shape.tier_k, shape.tier_v};
  for (size_t h = 0; h < shape.kv_heads; h++) {
    for (qkv_part part = QKV_K; part <= QKV_V; part++) {
      qkv_schedule *own = &page.heads[h].own[part];
      banded ? naive_schedule(banded, dims[part], own) : qkv_schedule_uniform(own, dims[part]);
      page.heads[h].schedules[part] = page.layouts[h].schedules[part] = own;
      memset(page.layouts[h].tiers[part], tiers[part], 4);
    }
  }
  page.expected = (qkv_page_expected){.kv_heads = shape.kv_heads,
                                      .key_dim = shape.key_dim,
                                      .value_dim = shape.value_dim,
                                      .schedules_of = schedules_of,
                                      .context = page.heads};
  return page;
}

static void write_as(page_case *page, const qkv_page_header *header) {
  page->bytes = qkv_page_bytes(page->layouts, page->shape.kv_heads);
  page->image = aligned_alloc(64, page->bytes);
  assert_non_null(page->image);
  memset(page->image, 0xee, page->bytes);
  qkv_page_format(page->image, header, page->layouts);
  qkv_page_seal(page->image);
}

static qkv_page_header header_of(const page_shape *shape) {
  return (qkv_page_header){.codec = 1,
                           .tier_k = shape->tier_k,
                           .tier_v = shape->tier_v,
                           .layer = 77,
                           .position = 0x0011223344556677,
                           .tokens = 64,
                           .kv_heads = shape->kv_heads,
                           .key_dim = shape->key_dim,
                           .value_dim = shape->value_dim};
}

static page_case make(page_shape shape, naive_random *banded) {
  page_case page = plan(shape, banded);
  const qkv_page_header header = header_of(&shape);
  write_as(&page, &header);
  return page;
}

static void release(page_case *page) {
  free(page->image);
  free(page->layouts);
  free(page->heads);
}

static qkv_status validate(const page_case *page, qkv_error *error) {
  *error = (qkv_error){0};
  return qkv_page_validate(page->image, page->bytes, &page->expected, error);
}

static size_t up64(size_t bytes) {
  return (bytes + 63) & ~(size_t)63;
}

static void header_and_directory_are_as_drawn(void **state) {
  (void)state;
  page_case page = make((page_shape){3, 96, 80, 32, 20}, NULL);
  const uint8_t *b = page.image;
  const size_t head = up64(128 + 64 * 96 * 4 / 8 + 64 * (80 * 2 + 40) / 8);
  assert_int_equal(page.bytes, 128 + 3 * head);
  assert_memory_equal(b, "QKVP", 4);
  assert_int_equal(b[4], 3);
  assert_int_equal(b[5], 1);
  assert_int_equal(b[6], 32);
  assert_int_equal(b[7], 20);
  assert_int_equal(naive_read(b, 8, 4), page.bytes);
  assert_int_equal(naive_read(b, 12, 4), 77);
  assert_true(naive_read(b, 16, 8) == 0x0011223344556677);
  assert_int_equal(naive_read(b, 24, 2), 64);
  assert_int_equal(naive_read(b, 26, 2), 3);
  assert_int_equal(naive_read(b, 28, 2), 96);
  assert_int_equal(naive_read(b, 30, 2), 80);
  for (size_t i = 32; i < 56; i++) assert_int_equal(b[i], 0);
  for (size_t h = 0; h < 3; h++) {
    const uint8_t *entry = b + 64 + 16 * h;
    assert_int_equal(naive_read(entry, 0, 4), 128 + h * head);
    for (size_t g = 0; g < 4; g++) {
      assert_int_equal(entry[4 + g], 32);
      assert_int_equal(entry[8 + g], 20);
      assert_int_equal(entry[12 + g], 0);
    }
  }
  for (size_t i = 64 + 48; i < page.bytes; i++) assert_int_equal(b[i], 0);
  release(&page);
}

static void the_rest_of_the_header_is_as_drawn(void **state) {
  (void)state;
  page_case page = plan((page_shape){1, 8, 8, 8, 8}, NULL);
  qkv_page_header header = header_of(&page.shape);
  header.tokens = 3;
  header.calibration = 0xa1b2c3d4;
  header.features = QKV_FEATURE_ANCHOR | QKV_FEATURE_LOW_RANK;
  header.frame = QKV_FRAME_ARCHIVE;
  write_as(&page, &header);
  assert_int_equal(naive_read(page.image, 24, 2), 3);
  assert_int_equal(naive_read(page.image, 32, 4), 0xa1b2c3d4);
  assert_int_equal(naive_read(page.image, 36, 2), 6);
  assert_int_equal(page.image[38], 2);
  page.expected.features = 6;
  qkv_error error;
  assert_int_equal(validate(&page, &error), QKV_OK);
  release(&page);
}

static void checksum_is_the_hash_with_the_field_zero(void **state) {
  (void)state;
  naive_random random = {1};
  page_case page = make((page_shape){2, 64, 64, 32, 32}, NULL);
  for (size_t i = 192; i < page.bytes; i++) page.image[i] = (uint8_t)naive_next(&random);
  qkv_page_seal(page.image);
  const uint64_t stored = naive_read(page.image, 56, 8);
  memset(page.image + 56, 0, 8);
  assert_true(XXH3_64bits(page.image, page.bytes) == stored);
  release(&page);
}

// One head's gains and groups lie where the drawing says, from `at` on. Returns where its codes end.
static size_t check_block(const page_case *page, uint16_t h, size_t at) {
  const uint8_t *entry = page->image + 64 + 16 * (size_t)h;
  assert_int_equal(naive_read(entry, 0, 4), at);
  at += 128;
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    const qkv_schedule *schedule = page->heads[h].schedules[part];
    qkv_page_codes codes;
    qkv_page_find(page->image, h, part, page->heads[h].schedules, &codes);
    assert_ptr_equal(codes.gains, page->image + naive_read(entry, 0, 4) + 64 * (size_t)part);
    assert_ptr_equal(codes.schedule, schedule);
    for (size_t g = 0; g < 4; g++) {
      assert_int_equal(codes.tiers[g], entry[4 + 4 * part + g]);
      assert_ptr_equal(codes.groups[g], page->image + at);
      assert_int_equal((uintptr_t)codes.groups[g] % 16, 0);
      size_t bits = 0;
      for (unsigned c = 0; c < schedule->dim; c++) bits += 16 * naive_depth(schedule->reach[codes.tiers[g]], c);
      at += bits / 8;
    }
  }
  return at;
}

// Heads with schedules and tiers of their own, groups of mixed tiers.
static void find_follows_the_drawing(void **state) {
  (void)state;
  naive_random random = {2};
  for (int round = 0; round < 200; round++) {
    const page_shape shape = {(uint16_t)(1 + naive_below(&random, 9)), (uint16_t)(8 + 8 * naive_below(&random, 20)),
                              (uint16_t)(8 + 8 * naive_below(&random, 20)), (uint8_t)naive_below(&random, 65),
                              (uint8_t)naive_below(&random, 65)};
    page_case page = plan(shape, &random);
    for (size_t i = 0; i < shape.kv_heads; i++) {
      for (size_t j = 0; j < 8; j++) page.layouts[i].tiers[j / 4][j % 4] = (uint8_t)naive_below(&random, 65);
    }
    const qkv_page_header header = header_of(&shape);
    write_as(&page, &header);
    qkv_error error;
    assert_int_equal(validate(&page, &error), QKV_OK);
    size_t at = up64(64 + 16 * (size_t)shape.kv_heads);
    for (uint16_t h = 0; h < shape.kv_heads; h++) {
      assert_memory_equal(page.image + 64 + 16 * h + 4, page.layouts[h].tiers, 8);
      at = up64(check_block(&page, h, at));
    }
    assert_int_equal(at, page.bytes);
    release(&page);
  }
}

// ---- Sections ----

// Four heads, the first and the last without sections.
static page_case make_sections(size_t bytes_1, size_t bytes_2) {
  page_case page = plan((page_shape){4, 16, 24, 24, 20}, NULL);
  page.layouts[1].anchors[QKV_V] = 9;
  page.layouts[1].section_bytes = bytes_1;
  page.layouts[2].anchors[QKV_K] = 1;
  page.layouts[2].ranks[QKV_K] = 7;
  page.layouts[2].ranks[QKV_V] = 255;
  page.layouts[2].section_bytes = bytes_2;
  page.expected.features = QKV_FEATURE_ANCHOR | QKV_FEATURE_LOW_RANK;
  qkv_page_header header = header_of(&page.shape);
  header.features = page.expected.features;
  write_as(&page, &header);
  return page;
}

static void sections_follow_the_codes(void **state) {
  (void)state;
  naive_random random = {4};
  for (int round = 0; round < 100; round++) {
    const size_t wanted[4] = {0, naive_below(&random, 500), naive_below(&random, 500), 0};
    page_case page = make_sections(wanted[1], wanted[2]);
    qkv_error error;
    assert_int_equal(validate(&page, &error), QKV_OK);
    size_t at = 128;
    for (uint16_t h = 0; h < 4; h++) {
      const size_t codes_end = check_block(&page, h, at);
      size_t bytes = 0;
      const uint8_t *sections = qkv_page_sections(page.image, h, page.heads[h].schedules, &bytes);
      assert_ptr_equal(sections, page.image + codes_end);
      assert_int_equal((uintptr_t)sections % 16, 0);
      at = up64(codes_end + wanted[h]);
      assert_int_equal(bytes, at - codes_end);
      assert_memory_equal(page.image + 64 + 16 * h + 12,
                          ((const uint8_t[4][4]){{0}, {0, 9, 0, 0}, {1, 0, 7, 255}, {0}})[h], 4);
      const qkv_page_directory *entry = qkv_page_entry_of(page.image, h);
      assert_ptr_equal(entry, page.image + 64 + 16 * h);
      assert_int_equal(entry->low_rank_v, h == 2 ? 255 : 0);
    }
    assert_int_equal(at, page.bytes);
    release(&page);
  }
}

// A head's gains and codes take 128 + 4 * 16 * 16 * 3 / 8 + 4 * 16 * (24 * 2 + 8) / 8 = 960 bytes. Head 1 has 64
// more, so that the heads begin at 128, 1088, 2112 and 3072.
static void sections_need_their_bytes(void **state) {
  (void)state;
  static const struct {
    size_t offset, bytes;
    uint64_t value;
    const char *text;
  } cases[] = {
      {96, 4, 2048 - 64, "page.directory[1] ends at 1984, at least 2048 of 4032 are needed"},
      {96, 4, 2048 + 63, "page.directory[1] ends at 2111, at least 2048 of 4032 are needed"},
      {96, 4, 0, "page.directory[1] ends at 0, at least 2048 of 4032 are needed"},
      {96, 4, 4032 + 64, "page.directory[1] ends at 4096, at least 2048 of 4032 are needed"},
      {96, 4, 0xffffffc0, "page.directory[1] ends at 4294967232, at least 2048 of 4032 are needed"},
      // Then the next head has not enough space itself.
      {96, 4, 2112 + 64, "page.directory[2] ends at 3072, at least 3136 of 4032 are needed"},
      {112, 4, 3072 + 64, "page.bytes is 4032, its heads make 4096"},
      {80, 4, 1088 + 64, "page.directory[1].offset is 1152, expected 1088"},
      // A head that has no sections is as long as its codes.
      {93, 1, 0, "page.directory[2].offset is 2112, expected 2048"},
      {127, 1, 1, NULL},
  };
  qkv_error error;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    page_case page = make_sections(64, 0);
    assert_int_equal(page.bytes, 4032);
    memcpy(page.image + cases[i].offset, &cases[i].value, cases[i].bytes);
    qkv_page_seal(page.image);
    assert_int_equal(validate(&page, &error), cases[i].text ? QKV_DATA_LOSS : QKV_OK);
    if (cases[i].text) assert_string_equal(error.text, cases[i].text);
    release(&page);
  }
  page_case page = make_sections(64, 0);
  page.expected.features = QKV_FEATURE_ANCHOR;
  assert_int_equal(validate(&page, &error), QKV_DATA_LOSS);
  assert_string_equal(error.text, "page.features is 0x6, known are 0x2");
  page.expected.features = 7;
  page.image[36] = 4;
  assert_int_equal(validate(&page, &error), QKV_DATA_LOSS);
  assert_string_equal(error.text, "page.directory[1] has an anchor, which page.features does not say");
  page.image[36] = 2;
  assert_int_equal(validate(&page, &error), QKV_DATA_LOSS);
  assert_string_equal(error.text, "page.directory[2] has low-rank factors, which page.features does not say");
  release(&page);
}

static void refusals_say_why(void **state) {
  (void)state;
  static const struct {
    size_t offset;
    uint8_t value;
    const char *text;
  } cases[] = {
      {0, 'X', "page.magic is 0x50564b58, expected 0x50564b51"},
      {4, 1, "page.version is 1, known are 2 to 3"},
      {4, 4, "page.version is 4, known are 2 to 3"},
      {36, 1, "page.features is 0x1, known are 0x0"},
      {37, 0x80, "page.features is 0x8000, known are 0x0"},
      {38, 3, "page.frame is 3, at most 2"},
      {36, 8, "page.features is 0x8, known are 0x0"},
      {40, 64, "page.outliers is 64, page.features is 0x0 and page.version 3"},
      {39, 1, "page.reserved is not 0"},
      {47, 1, "page.reserved is not 0"},
      {48, 1, "page.reserved is not 0"},
      {10, 1, "page.bytes is 74112, the page is 8576 bytes"},
      {24, 0, "page.tokens is 0, allowed are 1 to 64"},
      {24, 65, "page.tokens is 65, allowed are 1 to 64"},
      {26, 0, "page.kv_heads is 0, expected 2"},
      {27, 4, "page.kv_heads is 1026, expected 2"},
      {28, 72, "page.key_dim is 72, expected 64"},
      {30, 0, "page.value_dim is 0, expected 64"},
      {6, 65, "page.tier_k is 65, at most 64"},
      {7, 255, "page.tier_v is 255, at most 64"},
      {64, 0, "page.directory[0].offset is 0, expected 128"},
      {80, 64, "page.directory[1].offset is 4416, expected 4352"},
      {69, 65, "page.directory[0].tier_k[1] is 65, at most 64"},
      {91, 255, "page.directory[1].tier_v[3] is 255, at most 64"},
      {69, 24, "page.directory[1].offset is 4352, expected 4224"},
      {69, 27, "page.directory[1].offset is 4352, expected 4288"},
      {85, 24, "page.bytes is 8576, its heads make 8448"},
      {76, 1, "page.directory[0] has an anchor, which page.features does not say"},
      {93, 1, "page.directory[1] has an anchor, which page.features does not say"},
      {78, 1, "page.directory[0] has low-rank factors, which page.features does not say"},
      {95, 1, "page.directory[1] has low-rank factors, which page.features does not say"},
  };
  qkv_error error;
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    page_case page = make((page_shape){2, 64, 64, 32, 32}, NULL);
    page.image[cases[i].offset] = cases[i].value;
    assert_int_equal(validate(&page, &error), QKV_DATA_LOSS);
    assert_string_equal(error.text, cases[i].text);
    release(&page);
  }
  page_case page = make((page_shape){9, 8, 8, 1, 1}, NULL);
  page.bytes = 192;
  memcpy(page.image + 8, &(uint32_t){192}, 4);
  assert_int_equal(validate(&page, &error), QKV_DATA_LOSS);
  assert_string_equal(error.text, "page.kv_heads is 9, whose directory does not fit 192 bytes");
  release(&page);
}

static void every_flipped_bit_is_found(void **state) {
  (void)state;
  page_case page = make((page_shape){1, 8, 8, 8, 8}, NULL);
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
  release(&page);
}

// At every length, in a block of exactly that length and at an odd address: the sanitizer watches.
static void cut_pages_are_refused(void **state) {
  (void)state;
  page_case page = make((page_shape){2, 16, 8, 16, 8}, NULL);
  for (size_t length = 0; length < page.bytes; length++) {
    uint8_t *block = malloc(length + 1);
    assert_non_null(block);
    memcpy(block + 1, page.image, length);
    qkv_error error = {0};
    assert_int_equal(qkv_page_validate(block + 1, length, &page.expected, &error), QKV_DATA_LOSS);
    if (length >= 64) memcpy(block + 1 + 8, &(uint32_t){(uint32_t)length}, 4);
    assert_int_equal(qkv_page_validate(block + 1, length, &page.expected, NULL), QKV_DATA_LOSS);
    free(block);
  }
  qkv_error error = {0};
  assert_int_equal(qkv_page_validate(page.image, 63, &page.expected, &error), QKV_DATA_LOSS);
  assert_string_equal(error.text, "the page is 63 bytes, its header is 64");
  release(&page);
}

// Random damage to header and directory with a checksum that fits: accepted or refused, never read outside.
static void sealed_damage_is_safe(void **state) {
  (void)state;
  naive_random random = {3};
  size_t accepted = 0;
  for (int round = 0; round < 6000; round++) {
    page_case page = round % 2 ? make((page_shape){2, 16, 24, 32, 24}, NULL) : make_sections(100, 200);
    for (unsigned i = 0; i < 1 + naive_below(&random, 3); i++) {
      page.image[naive_below(&random, round % 2 ? 96 : 128)] =
          naive_below(&random, 2) ? (uint8_t)naive_next(&random) : (uint8_t)naive_below(&random, 16);
    }
    memcpy(page.image + 8, &(uint32_t){(uint32_t)page.bytes}, 4);
    qkv_page_seal(page.image);
    qkv_error error;
    if (validate(&page, &error) == QKV_OK) {
      accepted++;
      for (uint16_t h = 0; h < page.shape.kv_heads; h++) {
        qkv_page_codes codes;
        size_t bytes;
        qkv_page_find(page.image, h, QKV_V, page.heads[h].schedules, &codes);
        const uint8_t *end = codes.groups[3] + qkv_schedule_group_bytes(codes.schedule, codes.tiers[3]);
        assert_ptr_equal(qkv_page_sections(page.image, h, page.heads[h].schedules, &bytes), end);
        assert_true(end + bytes <= page.image + page.bytes);
      }
    }
    release(&page);
  }
  assert_true(accepted > 1000);  // layer, position, codec are free
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(header_and_directory_are_as_drawn),
      cmocka_unit_test(the_rest_of_the_header_is_as_drawn),
      cmocka_unit_test(checksum_is_the_hash_with_the_field_zero),
      cmocka_unit_test(find_follows_the_drawing),
      cmocka_unit_test(sections_follow_the_codes),
      cmocka_unit_test(sections_need_their_bytes),
      cmocka_unit_test(refusals_say_why),
      cmocka_unit_test(every_flipped_bit_is_found),
      cmocka_unit_test(cut_pages_are_refused),
      cmocka_unit_test(sealed_damage_is_safe),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
