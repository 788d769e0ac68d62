// Outlier rows: the section's bytes, how they are read, and what is refused.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
// cmocka wants the above first
#include <cmocka.h>

#include "engine/codec/outliers.h"
#include "engine/kernel/kernel.h"
#include "tests/engine/codec/naive.h"

enum { TOKENS = QKV_PAGE_TOKENS, HEADS_MAX = 8 };

static void *allocate(size_t bytes) {
  void *block = aligned_alloc(64, (bytes + 63) & ~(size_t)63);
  assert_non_null(block);
  return block;
}

// ---- Sections ----

typedef struct plain_row {
  uint8_t slot;
  bool wide;
  float scale;
  int numbers[64];
} plain_row;

// What a section is made of, and what it says.
typedef struct section_case {
  uint16_t kv_heads, dims[2];
  size_t counts[HEADS_MAX][2];
  plain_row rows[HEADS_MAX][2][QKV_OUTLIERS_MAX];
  float steps[64];
  uint8_t *bytes;
  size_t size;
} section_case;

static void make_row(naive_random *random, size_t dim, bool stepped, const float *steps, plain_row *row,
                     float *floats) {
  const int most = row->wide ? 32767 : 127;
  // A scale of few bits, so that numbers come back as they are.
  row->scale = ldexpf(1, (int)naive_below(random, 20) - (row->wide ? 18 : 10));
  for (size_t c = 0; c < dim; c++) row->numbers[c] = (int)naive_below(random, (unsigned)(2 * most + 1)) - most;
  row->numbers[naive_below(random, (unsigned)dim)] = naive_below(random, 2) == 0 ? most : -most;
  for (size_t c = 0; c < dim; c++) floats[c] = (float)row->numbers[c] * row->scale * (stepped ? steps[c] : 1);
}

static section_case make_section(naive_random *random, unsigned most) {
  section_case made = {
      .kv_heads = (uint16_t)(1 + naive_below(random, HEADS_MAX)),
      .dims = {(uint16_t)(8 + 8 * naive_below(random, 8)), (uint16_t)(8 + 8 * naive_below(random, 8))}};
  static uint8_t buffer[HEADS_MAX][2][QKV_OUTLIERS_MAX * 64 * 2];
  qkv_outlier_set sets[HEADS_MAX][2] = {0};
  for (size_t c = 0; c < 64; c++) made.steps[c] = ldexpf(1, (int)naive_below(random, 5) - 2);
  for (size_t h = 0; h < made.kv_heads; h++) {
    for (qkv_part part = QKV_K; part <= QKV_V; part++) {
      sets[h][part].rows = buffer[h][part];
      size_t wanted = most == 0 ? 0 : naive_below(random, most + 1);
      if (h == 0 && part == QKV_V && most > 0 && wanted == 0) wanted = 1;
      for (unsigned slot = 0; slot < TOKENS && made.counts[h][part] < wanted; slot++) {
        if (naive_below(random, 3) != 0 && TOKENS - slot > wanted - made.counts[h][part]) continue;
        plain_row *row = &made.rows[h][part][made.counts[h][part]++];
        float floats[64];
        row->slot = (uint8_t)slot;
        row->wide = naive_below(random, 2) == 0;
        make_row(random, made.dims[part], part == QKV_V, made.steps, row, floats);
        qkv_outlier_set_add(&sets[h][part], row->slot, row->wide, floats, part == QKV_V ? made.steps : NULL,
                            made.dims[part]);
      }
    }
  }
  made.size = qkv_outliers_bytes(&sets[0][0], made.kv_heads, made.dims[QKV_K], made.dims[QKV_V]);
  assert_true(made.size <= qkv_outliers_bytes_max(made.kv_heads, made.dims[QKV_K], made.dims[QKV_V]));
  if (made.size == 0) return made;
  made.bytes = allocate(made.size);
  memset(made.bytes, 0xee, made.size);
  qkv_outliers_write(&sets[0][0], made.kv_heads, made.dims[QKV_K], made.dims[QKV_V], made.bytes);
  return made;
}

static uint8_t *put(uint8_t *at, uint64_t value, size_t bytes) {
  for (size_t i = 0; i < bytes; i++) *at++ = (uint8_t)(value >> (8 * i));
  return at;
}

static uint8_t *pad(uint8_t *at, const uint8_t *begin, size_t alignment) {
  while ((size_t)(at - begin) % alignment != 0) *at++ = 0;
  return at;
}

// The counts before every head, by the drawing.
static uint8_t *put_index(const section_case *from, uint8_t *at) {
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    size_t rows = 0, wide = 0;
    for (size_t h = 0; h <= from->kv_heads; h++) {
      at = put(put(at, rows, 2), wide, 2);
      for (size_t i = 0; h < from->kv_heads && i < from->counts[h][part]; i++) wide += from->rows[h][part][i].wide;
      rows += h < from->kv_heads ? from->counts[h][part] : 0;
    }
  }
  return at;
}

// A section by the drawing in outliers.h alone; returns its size.
static size_t draw(const section_case *from, uint8_t *begin) {
  uint8_t *at = put_index(from, begin);
  for (int array = 0; array < 3; array++) {
    for (qkv_part part = QKV_K; part <= QKV_V; part++) {
      for (size_t i = 0; i < from->kv_heads * (size_t)QKV_OUTLIERS_MAX; i++) {
        const size_t h = i / QKV_OUTLIERS_MAX;
        const plain_row *row = &from->rows[h][part][i % QKV_OUTLIERS_MAX];
        uint32_t scale;
        if (i % QKV_OUTLIERS_MAX >= from->counts[h][part]) continue;
        memcpy(&scale, &row->scale, sizeof scale);
        if (array == 0) at = put(at, row->slot | (row->wide ? 0x80u : 0), 1);
        if (array == 1) at = put(at, scale, 4);
        for (size_t c = 0; array == 2 && c < from->dims[part]; c++) {
          at = put(at, (uint64_t)(int64_t)row->numbers[c], row->wide ? 2 : 1);
        }
      }
    }
    at = pad(at, begin, array == 0 ? 4 : array == 1 ? 8 : 64);
  }
  return (size_t)(at - begin);
}

static void sections_are_as_drawn(void **state) {
  (void)state;
  naive_random random = {1};
  static uint8_t expected[HEADS_MAX * 2 * QKV_OUTLIERS_MAX * (64 * 2 + 5) + 1024];
  for (int round = 0; round < 500; round++) {
    section_case made = make_section(&random, round % 5 == 0   ? 0
                                              : round % 7 == 0 ? 16
                                                               : 1 + naive_below(&random, 16));
    if (made.bytes == NULL) {
      assert_int_equal(round % 5, 0);
      continue;
    }
    assert_int_equal(draw(&made, expected), made.size);
    assert_int_equal(made.size % 64, 0);
    assert_memory_equal(made.bytes, expected, made.size);
    qkv_error error = {0};
    if (qkv_outliers_validate(made.bytes, made.size, made.kv_heads, made.dims[QKV_K], made.dims[QKV_V], TOKENS,
                              &error) != QKV_OK) {
      fail_msg("%s", error.text);
    }
    free(made.bytes);
  }
}

// A page with a section and nothing that a head of so small widths would need.
static uint8_t *page_around(const section_case *made) {
  qkv_schedule schedules[2];
  qkv_head_layout heads[HEADS_MAX] = {0};
  qkv_schedule_uniform(&schedules[QKV_K], made->dims[QKV_K]);
  qkv_schedule_uniform(&schedules[QKV_V], made->dims[QKV_V]);
  for (size_t h = 0; h < made->kv_heads; h++) {
    heads[h].schedules[QKV_K] = &schedules[QKV_K];
    heads[h].schedules[QKV_V] = &schedules[QKV_V];
  }
  const qkv_page_header header = {
      .tokens = TOKENS, .kv_heads = made->kv_heads, .key_dim = made->dims[QKV_K], .value_dim = made->dims[QKV_V]};
  const size_t plain = qkv_page_bytes(heads, made->kv_heads);
  uint8_t *page = allocate(plain + made->size);
  qkv_page_format(page, &header, heads);
  assert_int_equal(qkv_page_heads_end((const qkv_page_header *)page), plain);
  if (made->size > 0) memcpy(qkv_page_add_outliers(page, made->size), made->bytes, made->size);
  qkv_page_seal(page);
  assert_int_equal(qkv_page_heads_end((const qkv_page_header *)page), plain);
  assert_int_equal(naive_read(page, 40, 4), made->size > 0 ? plain : 0);
  assert_int_equal(naive_read(page, 8, 4), plain + made->size);
  return page;
}

static void check_reading(const section_case *made, const uint8_t *page, uint16_t h, qkv_part part,
                          naive_random *random) {
  enum { N = 3 };
  const size_t dim = made->dims[part], count = made->counts[h][part];
  float queries[N * 64], scores[N * TOKENS], weights[N * TOKENS], sums[N * 64], rows[TOKENS * 64];
  uint64_t mask = 0;
  qkv_outliers found;
  assert_int_equal(qkv_outliers_find(page, h, part, &found), count > 0);
  assert_int_equal(found.count, count);
  for (size_t i = 0; i < N * 64; i++) queries[i] = (float)naive_below(random, 9) - 4, sums[i] = 100;
  for (size_t i = 0; i < (size_t)N * TOKENS; i++) weights[i] = (float)naive_below(random, 5), scores[i] = -7;
  for (size_t i = 0; i < TOKENS * dim; i++) rows[i] = 0.125f;
  qkv_kernels_get()->score_outliers(&found, queries, N, scores);
  qkv_kernels_get()->weigh_outliers(&found, made->steps, weights, NULL, N, sums);
  qkv_outliers_rows(&found, part == QKV_V ? made->steps : NULL, rows);
  for (size_t i = 0; i < count; i++) {
    const plain_row *row = &made->rows[h][part][i];
    mask |= UINT64_C(1) << row->slot;
    for (size_t c = 0; c < dim; c++) {
      const float step = part == QKV_V ? made->steps[c] : 1;
      assert_true(rows[row->slot * dim + c] == (float)row->numbers[c] * row->scale * step);
    }
    for (size_t q = 0; q < N; q++) {
      double score = 0, size = 0;
      for (size_t c = 0; c < dim; c++) {
        const double term = (double)queries[q * dim + c] * row->numbers[c] * (double)row->scale;
        score += term, size += fabs(term);
      }
      assert_true(fabs((double)scores[q * TOKENS + row->slot] - score) <= 1e-6 * size);
    }
  }
  assert_int_equal(qkv_outliers_mask(&found), mask);
  for (size_t t = 0; t < TOKENS; t++) {
    if ((mask >> t & 1) != 0) continue;
    assert_true(scores[t] == -7 && rows[t * dim] == 0.125f && rows[t * dim + dim - 1] == 0.125f);
  }
  for (size_t i = 0; i < N * dim; i++) {
    double sum = 100, size = 100;
    for (size_t j = 0; j < count; j++) {
      const plain_row *row = &made->rows[h][part][j];
      const double term = (double)weights[i / dim * TOKENS + row->slot] * row->numbers[i % dim] * (double)row->scale *
                          (double)made->steps[i % dim];
      sum += term, size += fabs(term);
    }
    assert_true(fabs((double)sums[i] - sum) <= 1e-6 * size);
  }
}

static void rows_are_read_as_written(void **state) {
  (void)state;
  naive_random random = {2};
  for (int round = 0; round < 200; round++) {
    section_case made = make_section(&random, round % 9 == 0 ? 0 : 1 + naive_below(&random, 16));
    uint8_t *page = page_around(&made);
    for (uint16_t h = 0; h < made.kv_heads; h++) {
      for (qkv_part part = QKV_K; part <= QKV_V; part++) check_reading(&made, page, h, part, &random);
    }
    free(page);
    free(made.bytes);
  }
}

// To the nearest number, whatever the row; a row of zeros has scale 0.
static void rows_are_rounded_to_the_nearest(void **state) {
  (void)state;
  naive_random random = {3};
  for (int round = 0; round < 300; round++) {
    const bool wide = round % 2 == 0;
    const double most = wide ? 32767 : 127;
    int16_t buffer[32];
    float row[32], largest = 0;
    const float size = ldexpf(1, (int)naive_below(&random, 60) - 30);
    for (size_t c = 0; c < 32; c++) {
      row[c] = round < 2 ? 0 : size * (float)naive_gaussian(&random);
      largest = fmaxf(largest, fabsf(row[c]));
    }
    qkv_outlier_set set = {.rows = (uint8_t *)buffer};
    qkv_outlier_set_add(&set, 63, wide, row, NULL, 32);
    assert_int_equal(set.slots[0], wide ? 63 | 0x80 : 63);
    assert_true(fabs((double)set.scales[0] - (double)largest / most) <= 1e-6 * (double)largest);
    for (size_t c = 0; c < 32; c++) {
      const double number = wide ? buffer[c] : ((int8_t *)buffer)[c];
      assert_true(fabs(number * (double)set.scales[0] - (double)row[c]) <= 0.51 * (double)set.scales[0]);
    }
    assert_true(qkv_outlier_error(row, 32) <= 32 * (largest / 127) * (largest / 127) / 12 * 1.001f);
  }
}

// ---- Refusals ----

// Two heads of 8 and 16: K of head 0 slots 3 (wide) and 9, of head 1 slot 5; V of head 1 slot 0 and slot 63 (wide).
static section_case small_section(void) {
  section_case made = {.kv_heads = 2, .dims = {8, 16}};
  made.counts[0][QKV_K] = 2, made.counts[1][QKV_K] = 1, made.counts[1][QKV_V] = 2;
  made.rows[0][QKV_K][0] = (plain_row){3, true, 2, {300, -1}};
  made.rows[0][QKV_K][1] = (plain_row){9, false, 0.5f, {-128, 127}};
  made.rows[1][QKV_K][0] = (plain_row){5, false, 1, {1}};
  made.rows[1][QKV_V][0] = (plain_row){0, false, 1, {2}};
  made.rows[1][QKV_V][1] = (plain_row){63, true, 4, {-32768}};
  made.bytes = allocate(192);
  made.size = draw(&made, made.bytes);
  assert_int_equal(made.size, 192);
  return made;
}

// 24 bytes of counts, then slots at 24, scales at 32, K's rows at 56, V's at 88.
static const struct refusal {
  size_t offset, bytes;
  uint64_t value;
  const char *text;  // NULL: let through
} refusals[] = {
    {0, 2, 1, "page.outliers.before[0] is not 0"},
    {2, 2, 1, "page.outliers.before[0] is not 0"},
    {12, 2, 1, "page.outliers.before[3] is not 0"},
    {14, 2, 1, "page.outliers.before[3] is not 0"},
    {4, 2, 17, "page.outliers.before[1] has 17 rows after 0, at most 16 are one head's and 3 all heads'"},
    {4, 2, 4, "page.outliers.before[1] has 4 rows after 0, at most 16 are one head's and 3 all heads'"},
    {16, 2, 3, "page.outliers.before[4] has 3 rows after 0, at most 16 are one head's and 2 all heads'"},
    {4, 2, 1, "page.outliers.slots[2] is 5 after 9, the page has 64 tokens"},
    {6, 2, 0, "page.outliers.before[1] has 0 wide rows, its slots have 1"},
    {6, 2, 2, "page.outliers.before[1] has 2 wide rows, its slots have 1"},
    {24, 1, 3, "page.outliers.before[1] has 1 wide rows, its slots have 0"},
    {25, 1, 0x89, "page.outliers.before[1] has 1 wide rows, its slots have 2"},
    {24, 1, 0x89, "page.outliers.slots[1] is 9 after 9, the page has 64 tokens"},
    {24, 1, 0x8a, "page.outliers.slots[1] is 9 after 10, the page has 64 tokens"},
    {25, 1, 0x40, "page.outliers.slots[1] is 64 after 3, the page has 64 tokens"},
    {26, 1, 0x7f, "page.outliers.slots[2] is 127 after -1, the page has 64 tokens"},
    // Of rows of 8 and of 16 bits, keys, then values: numbers of 65536 and 4e15.
    {32, 4, 0x7fc00000, "page.outliers.scales[0] is nan, allowed are 0 to 2.00006"},
    {32, 4, 0x40000100, NULL},
    {32, 4, 0x40001000, "page.outliers.scales[0] is 2.00098, allowed are 0 to 2.00006"},
    {36, 4, 0xbf800000, "page.outliers.scales[1] is -1, allowed are 0 to 516.031"},
    {36, 4, 0x44010201, NULL},
    {36, 4, 0x44010300, "page.outliers.scales[1] is 516.047, allowed are 0 to 516.031"},
    {44, 4, 0x55e50000, NULL},
    {44, 4, 0x55e60000, "page.outliers.scales[3] is 3.1611e+13, allowed are 0 to 3.14961e+13"},
    {48, 4, 0x7f800000, "page.outliers.scales[4] is inf, allowed are 0 to 1.22074e+11"},
    {48, 4, 0x51e40000, "page.outliers.scales[4] is 1.22407e+11, allowed are 0 to 1.22074e+11"},
    {48, 4, 0, NULL},
    {56, 2, 0x8000, NULL},
    {8, 2, 40, "page.outliers has 192 bytes, its rows make 640"},
    {20, 2, 0, "page.outliers has 192 bytes, its rows make 128"},
};

static void check_refusal(const struct refusal *one) {
  section_case made = small_section();
  qkv_error error = {0};
  put(made.bytes + one->offset, one->value, one->bytes);
  // At any alignment, and nothing beyond is read: what is behind is not ours.
  uint8_t *odd = malloc(made.size + 1);
  assert_non_null(odd);
  memcpy(odd + 1, made.bytes, made.size);
  const qkv_status status = qkv_outliers_validate(odd + 1, made.size, 2, 8, 16, TOKENS, &error);
  if (one->text == NULL && status != QKV_OK) fail_msg("%s", error.text);
  assert_int_equal(status, one->text == NULL ? QKV_OK : QKV_DATA_LOSS);
  if (one->text != NULL) assert_string_equal(error.text, one->text);
  free(odd);
  free(made.bytes);
}

static void refusals_say_why(void **state) {
  (void)state;
  for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) check_refusal(&refusals[i]);
  section_case made = small_section();
  const struct {
    size_t bytes;
    uint32_t tokens;
    const char *text;
  } others[] = {{192, 63, "page.outliers.slots[1] is 63 after 0, the page has 63 tokens"},
                {128, 64, "page.outliers has 128 bytes, its rows make 192"},
                {256, 64, "page.outliers has 256 bytes, its rows make 192"},
                {23, 64, "page.outliers has 23 bytes, its index is 24"},
                {0, 64, "page.outliers has 0 bytes, its index is 24"}};
  for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
    qkv_error error = {0};
    assert_int_equal(qkv_outliers_validate(made.bytes, others[i].bytes, 2, 8, 16, others[i].tokens, &error),
                     QKV_DATA_LOSS);
    assert_string_equal(error.text, others[i].text);
  }
  qkv_error error = {0};
  memset(made.bytes, 0, 64);
  assert_int_equal(qkv_outliers_validate(made.bytes, 64, 2, 8, 16, TOKENS, &error), QKV_DATA_LOSS);
  assert_string_equal(error.text, "page.outliers has no rows");
  free(made.bytes);
}

// Counts that go up beyond the total and come down again would lead beyond the section.
static void counts_do_not_lead_beyond(void **state) {
  (void)state;
  enum { HEADS = 1000 };
  uint8_t *bytes = malloc(2 * (HEADS + 1) * 4 + 64);
  assert_non_null(bytes);
  memset(bytes, 0, 2 * (HEADS + 1) * 4 + 64);
  for (size_t h = 1; h < HEADS; h++) put(bytes + 4 * h, 16 * h, 2);
  put(bytes + 4 * (size_t)HEADS, 1, 2);
  qkv_error error = {0};
  const size_t size = (2 * (HEADS + 1) * 4 + 1 + 3 + 4 + 8 + 63) / 64 * 64;
  assert_true(size <= 2 * (HEADS + 1) * 4 + 64);
  assert_int_equal(qkv_outliers_validate(bytes, size, HEADS, 8, 8, TOKENS, &error), QKV_DATA_LOSS);
  assert_string_equal(error.text,
                      "page.outliers.before[1] has 16 rows after 0, at most 16 are one head's and 1 all heads'");
  free(bytes);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(sections_are_as_drawn),           cmocka_unit_test(rows_are_read_as_written),
      cmocka_unit_test(rows_are_rounded_to_the_nearest), cmocka_unit_test(refusals_say_why),
      cmocka_unit_test(counts_do_not_lead_beyond),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
