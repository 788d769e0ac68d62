// Pages with planes dropped: the bits that stay are unchanged.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
// cmocka wants the above first
#include <stdio.h>
#include <time.h>

#include <cmocka.h>

#include "coder.h"
#include "engine/codec/anchor.h"
#include "engine/codec/codebook.h"
#include "engine/codec/narrow.h"
#include "engine/codec/pack.h"

enum { BYTES_MAX = 16 * QKV_DIM_MAX };

static void groups_are_cut_bit_by_bit(void **state) {
  (void)state;
  naive_random random = {21};
  static uint8_t group[BYTES_MAX], out[BYTES_MAX + 1], expected[BYTES_MAX];
  for (int round = 0; round < 400; round++) {
    qkv_schedule schedule;
    const uint16_t dim = (uint16_t)(8 * (1 + naive_below(&random, 12)));
    naive_below(&random, 2) == 0 ? naive_schedule(&random, dim, &schedule) : qkv_schedule_uniform(&schedule, dim);
    const qkv_part part = round % 2 ? QKV_K : QKV_V;
    const unsigned tier = naive_below(&random, QKV_TIER_MAX + 1), lower = naive_below(&random, tier + 1);
    const size_t bytes = qkv_schedule_group_bytes(&schedule, lower);
    for (size_t i = 0; i < qkv_schedule_group_bytes(&schedule, tier); i++) group[i] = (uint8_t)naive_next(&random);
    out[bytes] = 0xa5;
    qkvi_narrow(part, &schedule, tier, group, lower, out);
    naive_narrow(part, &schedule, tier, group, lower, expected);
    assert_memory_equal(out, expected, bytes);
    assert_int_equal(out[bytes], 0xa5);
  }
}

// A page of random rows, in memory that the caller frees.
static void *random_page(const qkv_coder *coder, naive_random *random, uint32_t tokens) {
  const size_t heads = coder->kv_heads, k = heads * coder->key_dim, v = heads * coder->value_dim;
  float *rows = coder_allocate((k + v) * QKV_PAGE_TOKENS, sizeof *rows);
  for (size_t i = 0; i < (k + v) * QKV_PAGE_TOKENS; i++) rows[i] = (float)naive_gaussian(random);
  void *page = aligned_alloc(64, (coder->codec->page_bytes_max(coder) + 63) / 64 * 64);
  assert_non_null(page);
  coder->codec->encode(coder, 64 * naive_below(random, 1000), tokens, QKV_FP32, rows, rows + k * QKV_PAGE_TOKENS,
                       NULL, page);
  free(rows);
  return page;
}

static void random_tiers(naive_random *random, uint16_t kv_heads, unsigned most, qkv_head_tiers *heads) {
  for (uint16_t h = 0; h < kv_heads; h++) {
    for (size_t g = 0; g < 2 * QKV_PAGE_GROUPS; g++) {
      heads[h].tiers[g / QKV_PAGE_GROUPS][g % QKV_PAGE_GROUPS] = (uint8_t)naive_below(random, most + 1);
    }
  }
}

static void *narrowed(const qkv_coder *coder, const void *page, const qkv_head_tiers *heads) {
  const qkv_page_header *header = page;
  void *image = aligned_alloc(64, header->bytes);
  assert_non_null(image);
  memset(image, 0xa5, header->bytes);
  const size_t bytes = coder->codec->planes->drop(coder, page, heads, image);
  assert_true(bytes <= header->bytes);
  assert_int_equal(((const qkv_page_header *)image)->bytes, bytes);
  qkv_error error = {0};
  if (coder->codec->validate(coder, image, bytes, &error) != QKV_OK) fail_msg("%s", error.text);
  return image;
}

// A row's value at a tier, in code space, gain and all.
static double value_of(const qkv_page_codes *codes, qkv_part part, size_t slot, unsigned c) {
  const size_t group = slot / 16;
  const uint16_t *reach = codes->schedule->reach[codes->tiers[group]];
  const unsigned depth = naive_depth(reach, c);
  if (depth == 0) return 0;
  const unsigned code = naive_code(part, reach, codes->groups[group], c, slot % 16);
  return naive_gain(codes->gains[slot]) * (double)qkv_codebook_value(depth, code);
}

// The gain of a row that lost planes is the nearest to the least-squares fit.
static void check_gain(const qkv_transform *transform, const qkv_page_codes *from, const qkv_page_codes *to,
                       qkv_part part, size_t slot) {
  double along = 0, size = 0;
  for (unsigned c = 0; c < from->schedule->dim; c++) {
    const double weight = transform->weights == NULL ? 1 : (double)transform->weights[c];
    const double now = value_of(to, part, slot, c);
    along += weight * value_of(from, part, slot, c) * now;
    size += weight * now * now;
  }
  if (size == 0 || along <= 0) {
    assert_int_equal(from->gains[slot], to->gains[slot]);
    return;
  }
  // What would bring it to the best is less than half a step, but for rounding; or it is at the octave's end.
  const double off = 8 * log2(along / size);
  const int moved = abs((int)to->gains[slot] - (int)from->gains[slot]);
  assert_true(moved <= QKV_GAIN_OCTAVE);
  assert_true(fabs(off) < 0.53 || moved == QKV_GAIN_OCTAVE || to->gains[slot] == 255 || to->gains[slot] == 1);
}

// Every group has what naive_narrow gives, at the lower of its tier and the wanted one.
static void check_part(const qkv_coder *coder, const void *page, const void *image, uint16_t h, qkv_part part,
                       const qkv_head_tiers *wanted) {
  static uint8_t expected[BYTES_MAX];
  const qkv_schedule *const *schedules = qkv_embedded(coder)->heads[h].schedules;
  qkv_page_codes from, to;
  qkv_page_find(page, h, part, schedules, &from);
  qkv_page_find(image, h, part, schedules, &to);
  for (size_t slot = 0; slot < QKV_PAGE_TOKENS; slot++) {
    if (from.tiers[slot / 16] == to.tiers[slot / 16]) {
      assert_int_equal(from.gains[slot], to.gains[slot]);
    } else if (slot % 5 == 0) {
      check_gain(qkv_embedded(coder)->heads[h].transforms[part], &from, &to, part, slot);
    }
  }
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
    const uint8_t want = wanted[h].tiers[part][g];
    assert_int_equal(to.tiers[g], want < from.tiers[g] ? want : from.tiers[g]);
    naive_narrow(part, schedules[part], from.tiers[g], from.groups[g], to.tiers[g], expected);
    assert_memory_equal(to.groups[g], expected, qkv_schedule_group_bytes(schedules[part], to.tiers[g]));
  }
}

// But for gains, which two fits may leave a little apart.
static void check_same_codes(const qkv_coder *coder, const void *a, const void *b, uint16_t h) {
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    qkv_page_codes x, y;
    qkv_page_find(a, h, part, qkv_embedded(coder)->heads[h].schedules, &x);
    qkv_page_find(b, h, part, qkv_embedded(coder)->heads[h].schedules, &y);
    assert_memory_equal(x.tiers, y.tiers, sizeof x.tiers);
    for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
      assert_memory_equal(x.groups[g], y.groups[g], qkv_schedule_group_bytes(x.schedule, x.tiers[g]));
    }
  }
}

static void check_page(const qkv_coder *coder, naive_random *random) {
  void *page = random_page(coder, random, 1 + naive_below(random, 64));
  qkv_head_tiers once[8], twice[8], both[8], has[8];
  random_tiers(random, coder->kv_heads, 40, once);
  random_tiers(random, coder->kv_heads, 40, twice);
  void *image = narrowed(coder, page, once);
  for (uint16_t h = 0; h < coder->kv_heads; h++) {
    check_part(coder, page, image, h, QKV_K, once);
    check_part(coder, page, image, h, QKV_V, once);
  }
  // Down in two steps is down at once, and up changes nothing.
  void *second = narrowed(coder, image, twice);
  for (size_t h = 0; h < coder->kv_heads; h++) {
    for (size_t g = 0; g < sizeof *both; g++) {
      const uint8_t a = ((uint8_t *)&once[h])[g], b = ((uint8_t *)&twice[h])[g];
      ((uint8_t *)&both[h])[g] = a < b ? a : b;
    }
  }
  void *direct = narrowed(coder, page, both);
  assert_int_equal(((qkv_page_header *)second)->bytes, ((qkv_page_header *)direct)->bytes);
  for (uint16_t h = 0; h < coder->kv_heads; h++) check_same_codes(coder, second, direct, h);
  memset(once, QKV_TIER_MAX, sizeof once);
  void *same = narrowed(coder, image, once);
  assert_memory_equal(same, image, ((qkv_page_header *)image)->bytes);
  qkvi_embedded_planes.tiers(image, has);
  for (size_t h = 0; h < coder->kv_heads; h++) {
    const qkv_page_directory *entry = qkv_page_entry_of(image, (uint16_t)h);
    assert_memory_equal(has[h].tiers[QKV_K], entry->tier_k, sizeof entry->tier_k);
    assert_memory_equal(has[h].tiers[QKV_V], entry->tier_v, sizeof entry->tier_v);
  }
  free(page);
  free(image);
  free(second);
  free(direct);
  free(same);
}

static void pages_keep_the_bits_that_stay(void **state) {
  (void)state;
  naive_random random = {22};
  for (int round = 0; round < 60; round++) {
    const uint16_t heads = (uint16_t)(1 + naive_below(&random, 8));
    const uint16_t key_dim = (uint16_t)(8 * (1 + naive_below(&random, 12)));
    const uint16_t value_dim = (uint16_t)(8 * (1 + naive_below(&random, 12)));
    const double bits_k = 0.125 * (1 + naive_below(&random, 64)), bits_v = 0.125 * (1 + naive_below(&random, 64));
    qkv_coder *coder =
        round % 2 ? coder_create(heads, key_dim, value_dim, bits_k, bits_v, QKV_FRAME_PLAIN, NULL)
                  : coder_create_dense(&random, heads, key_dim, value_dim, bits_k, bits_v, QKV_FRAME_PLAIN, NULL);
    check_page(coder, &random);
    coder_destroy(coder);
  }
}

// The code at a tier is no worse than what the codec promises for it, though it was made for a higher one.
static void narrowed_rows_stay_within_the_bound(void **state) {
  (void)state;
  enum { DIM = 128 };
  naive_random random = {23};
  qkv_coder *coder = coder_create(1, DIM, DIM, 4, 4, QKV_FRAME_PLAIN, NULL);
  const naive_random before = random;
  void *page = random_page(coder, &random, 64);
  random = before;
  static float rows[64 * DIM], decoded[64 * DIM];
  for (size_t i = 0; i < 64 * DIM; i++) rows[i] = (float)naive_gaussian(&random);  // what the page was made of
  for (unsigned bits = 1; bits <= 4; bits++) {
    qkv_head_tiers wanted;
    memset(&wanted, (int)(bits * QKV_TIER_BIT), sizeof wanted);
    void *image = narrowed(coder, page, &wanted);
    double error = 0, size = 0;
    coder->codec->decode(coder, image, 0, QKV_K, false, decoded);
    for (size_t i = 0; i < 64 * DIM; i++) {
      error += (double)(rows[i] - decoded[i]) * (double)(rows[i] - decoded[i]);
      size += (double)rows[i] * (double)rows[i];
    }
    assert_true(error / size < coder->codec->error_bound(bits));
    assert_true(error / size > 0.5 * coder->codec->error_bound(bits));
    free(image);
  }
  free(page);
  coder_destroy(coder);
}

// What codes are added to is copied; a chain keeps its tiers.
static void sections_go_along(void **state) {
  (void)state;
  enum { DIM = 32 };
  naive_random random = {24};
  qkv_coder *coder = coder_create(2, DIM, DIM, 4, 3, QKV_FRAME_PLAIN, NULL);
  const size_t mean = qkv_anchor_bytes(QKV_ANCHOR_MEAN, 1, DIM), chain = qkv_anchor_bytes(QKV_ANCHOR_CHAIN, 1, DIM);
  qkv_head_layout heads[2] = {0};
  for (size_t h = 0; h < 2; h++) {
    memcpy(heads[h].schedules, qkv_embedded(coder)->heads[h].schedules, sizeof heads[h].schedules);
    memset(heads[h].tiers[QKV_K], 32, QKV_PAGE_GROUPS);
    memset(heads[h].tiers[QKV_V], 24, QKV_PAGE_GROUPS);
  }
  heads[0].anchors[QKV_K] = QKV_ANCHOR_MEAN | 7 << 2;
  heads[0].anchors[QKV_V] = QKV_ANCHOR_CHAIN | 9 << 2;
  heads[0].section_bytes = mean + chain;
  const qkv_page_header header = {.codec = QKV_CODEC_EMBEDDED,
                                  .tier_k = 32,
                                  .tier_v = 24,
                                  .layer = CODER_LAYER,
                                  .tokens = 64,
                                  .kv_heads = 2,
                                  .key_dim = DIM,
                                  .value_dim = DIM,
                                  .features = QKV_FEATURE_ANCHOR};
  uint8_t *page = aligned_alloc(64, qkv_page_bytes(heads, 2));
  assert_non_null(page);
  qkv_page_format(page, &header, heads);
  size_t capacity;
  uint8_t *sections = (uint8_t *)qkv_page_sections(page, 0, qkv_embedded(coder)->heads[0].schedules, &capacity);
  for (size_t i = 0; i < mean + chain; i++) sections[i] = (uint8_t)naive_below(&random, 128);
  qkv_page_seal(page);
  assert_true(qkvi_embedded_planes.part_drops(page, 0, QKV_K));
  assert_false(qkvi_embedded_planes.part_drops(page, 0, QKV_V));

  qkv_head_tiers wanted[2];
  memset(wanted, 8, sizeof wanted);
  uint8_t *image = aligned_alloc(64, qkv_page_bytes(heads, 2)), *again = aligned_alloc(64, qkv_page_bytes(heads, 2));
  assert_non_null(image);
  assert_non_null(again);
  const size_t bytes = coder->codec->planes->drop(coder, page, wanted, image);
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
    assert_int_equal(qkv_page_entry_of(image, 0)->tier_k[g], 8);
    assert_int_equal(qkv_page_entry_of(image, 0)->tier_v[g], 24);
    assert_int_equal(qkv_page_entry_of(image, 1)->tier_v[g], 8);
  }
  const uint8_t *copied = qkv_page_sections(image, 0, qkv_embedded(coder)->heads[0].schedules, &capacity);
  assert_memory_equal(copied, sections, mean + chain);
  // The padding does not grow with every step.
  memset(wanted, 7, sizeof wanted);
  const size_t less = coder->codec->planes->drop(coder, image, wanted, again);
  assert_true(less <= bytes);
  assert_memory_equal(qkv_page_sections(again, 0, qkv_embedded(coder)->heads[0].schedules, &capacity), sections,
                      mean + chain);
  free(page);
  free(image);
  free(again);
  coder_destroy(coder);
}

// Values of a page against those it was made from.
static double value_error(const qkv_coder *coder, const void *page, const float *v) {
  const size_t dim = coder->value_dim;
  float *rows = coder_allocate(QKV_PAGE_TOKENS * dim, sizeof *rows);
  double sum = 0;
  coder->codec->decode(coder, page, 0, QKV_V, false, rows);
  for (size_t i = 0; i < QKV_PAGE_TOKENS * dim; i++)
    sum += ((double)rows[i] - (double)v[i]) * ((double)rows[i] - (double)v[i]);
  free(rows);
  return sum;
}

// Factors that were fitted to what 4 bits miss are fitted anew to what 1 bit misses.
static void factors_are_fitted_anew(void **state) {
  (void)state;
  enum { DIM = 32, COUNT = QKV_PAGE_TOKENS * DIM };
  static const qkv_low_rank_mode modes[] = {QKV_LOW_RANK_CORRECTION, QKV_LOW_RANK_PREDICTOR};
  static const double most[] = {0.3, 0.95};  // a predictor has taken what it can of the rows before they were coded
  for (size_t m = 0; m < 2; m++) {
    naive_random random = {25};
    qkv_coder *coder = coder_create(1, DIM, DIM, 4, 4, QKV_FRAME_PLAIN, NULL);
    coder_own(coder)->low_rank = (qkv_low_rank_options){.mode = modes[m], .rank = 3};
    float *k = coder_allocate(COUNT, sizeof *k), *v = coder_allocate(COUNT, sizeof *v), direction[DIM];
    for (size_t c = 0; c < DIM; c++) direction[c] = (float)naive_gaussian(&random);
    for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) {
      const float along = 2 * (float)naive_gaussian(&random);
      for (size_t c = 0; c < DIM; c++) {
        k[t * DIM + c] = (float)naive_gaussian(&random);
        v[t * DIM + c] = along * direction[c] + 0.5f * (float)naive_gaussian(&random);
      }
    }
    uint8_t *page = aligned_alloc(64, (coder->codec->page_bytes_max(coder) + 63) / 64 * 64);
    assert_non_null(page);
    coder->codec->encode(coder, 0, QKV_PAGE_TOKENS, QKV_FP32, k, v, NULL, page);
    assert_int_equal(qkv_page_entry_of(page, 0)->low_rank_v, 3);
    qkv_head_tiers wanted;
    memset(&wanted, QKV_TIER_BIT, sizeof wanted);
    uint8_t *image = narrowed(coder, page, &wanted);
    const double fitted = value_error(coder, image, v);
    size_t capacity;
    const size_t bytes = 2 * qkv_low_rank_bytes(3, DIM);
    memcpy((uint8_t *)qkv_page_sections(image, 0, qkv_embedded(coder)->heads[0].schedules, &capacity),
           qkv_page_sections(page, 0, qkv_embedded(coder)->heads[0].schedules, &capacity), bytes);
    const double copied = value_error(coder, image, v);
    printf("factors of rank 3, 4 bits to 1: error %.4g fitted anew, %.4g as they were\n", fitted, copied);
    assert_true(fitted < most[m] * copied);
    free(image);
    free(page);
    free(k);
    free(v);
    coder_destroy(coder);
  }
}

static double now_us(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec * 1e6 + (double)now.tv_nsec * 1e-3;
}

// Not a test of speed, which machines differ in: prints what narrow.h speaks of.
static void a_page_takes_microseconds(void **state) {
  (void)state;
  naive_random random = {25};
  qkv_coder *coder = coder_create(8, 128, 128, 4, 4, QKV_FRAME_PLAIN, NULL);
  void *page = random_page(coder, &random, 64), *image = aligned_alloc(64, ((qkv_page_header *)page)->bytes);
  assert_non_null(image);
  for (unsigned tier = 32; tier >= 8; tier -= 4) {
    qkv_head_tiers wanted[8];
    double best = 1e9;
    memset(wanted, (int)tier, sizeof wanted);
    for (int round = 0; round < 20; round++) {
      const double begin = now_us();
      coder->codec->planes->drop(coder, page, wanted, image);
      const double took = now_us() - begin;
      best = took < best ? took : best;
    }
    printf("8 heads of 128 + 128, 64 tokens, 4 bits to %g: %.1f us\n", tier / 8.0, best);
  }
  free(page);
  free(image);
  coder_destroy(coder);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(groups_are_cut_bit_by_bit),
      cmocka_unit_test(pages_keep_the_bits_that_stay),
      cmocka_unit_test(narrowed_rows_stay_within_the_bound),
      cmocka_unit_test(sections_go_along),
      cmocka_unit_test(factors_are_fitted_anew),
      cmocka_unit_test(a_page_takes_microseconds),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
