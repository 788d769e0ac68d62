// Pages with outliers: which rows are kept, and that all that reads pages does so with these, too.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
// cmocka wants the above first
#include <cmocka.h>
#include <stdio.h>
#include <xxhash.h>

#include "engine/base/cpu.h"
#include "engine/codec/heavy.h"
#include "engine/codec/narrow.h"
#include "engine/codec/outliers.h"
#include "engine/kernel/kernel.h"
#include "tests/engine/codec/coder.h"

enum { TOKENS = QKV_PAGE_TOKENS, HEADS_MAX = 8 };

static void *allocate(size_t bytes) {
  void *block = aligned_alloc(64, (bytes + 63) & ~(size_t)63);
  assert_non_null(block);
  return block;
}

static uint8_t *put(uint8_t *at, uint64_t value, size_t bytes) {
  for (size_t i = 0; i < bytes; i++) *at++ = (uint8_t)(value >> (8 * i));
  return at;
}

// ---- Pages ----

typedef struct page_shape {
  uint16_t kv_heads, key_dim, value_dim;
  double bits;
  bool dense;
  qkv_frame frame;
  uint32_t tokens;
  uint64_t position;
} page_shape;

typedef struct coded {
  page_shape shape;
  qkv_coder *coder;
  float *rows[2];  // [tokens][kv_heads][dim]
  uint8_t *image;
  size_t bytes, capacity;
} coded;

static size_t dim_of(const coded *page, qkv_part part) {
  return part == QKV_K ? page->shape.key_dim : page->shape.value_dim;
}

static float *row_of(const coded *page, qkv_part part, size_t t, size_t h) {
  return page->rows[part] + (t * page->shape.kv_heads + h) * dim_of(page, part);
}

static void encode(coded *page) {
  qkv_error error = {0};
  memset(page->image, 0xee, page->capacity);
  page->bytes = page->coder->codec->encode(page->coder, page->shape.position, page->shape.tokens, QKV_FP32,
                                           page->rows[QKV_K], page->rows[QKV_V], NULL, page->image);
  assert_true(page->bytes <= page->capacity);
  if (page->coder->codec->validate(page->coder, page->image, page->bytes, &error) != QKV_OK)
    fail_msg("%s", error.text);
}

// Gaussian rows; outliers are kept by `limit`.
static coded make_page(naive_random *random, page_shape shape, float limit, uint32_t sinks) {
  coded page = {.shape = shape};
  qkv_rope rope = {.theta = 10000};
  assert_int_equal(qkv_rope_resolve(&rope, shape.key_dim, NULL), QKV_OK);
  page.coder = shape.dense ? coder_create_dense(random, shape.kv_heads, shape.key_dim, shape.value_dim, shape.bits,
                                                shape.bits, shape.frame, &rope)
                           : coder_create(shape.kv_heads, shape.key_dim, shape.value_dim, shape.bits, shape.bits,
                                          shape.frame, &rope);
  coder_keep_outliers(page.coder, limit, sinks);
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    const size_t count = (size_t)shape.tokens * shape.kv_heads * dim_of(&page, part);
    page.rows[part] = allocate(count * sizeof(float));
    for (size_t i = 0; i < count; i++) page.rows[part][i] = (float)naive_gaussian(random);
  }
  page.capacity = page.coder->codec->page_bytes_max(page.coder);
  page.image = allocate(page.capacity);
  return page;
}

static void release(coded *page) {
  coder_destroy(page->coder);
  free(page->rows[QKV_K]);
  free(page->rows[QKV_V]);
  free(page->image);
}

static qkv_outliers kept(const void *image, uint16_t h, qkv_part part) {
  qkv_outliers found;
  (void)qkv_outliers_find(image, h, part, &found);
  return found;
}

// Rows [slots] of a head's part become `times` as long as they are, keys in one coordinate.
static void plant(const coded *page, uint16_t h, qkv_part part, uint64_t slots, float times) {
  for (size_t t = 0; t < page->shape.tokens; t++) {
    float *row = row_of(page, part, t, h);
    if ((slots >> t & 1) == 0) continue;
    for (size_t c = 0; c < dim_of(page, part); c++) row[c] *= part == QKV_V && c % 3 != 0 ? 0.01f * times : times;
  }
}

// A limit that no row's own length is beyond.
#define NEVER 1000.0f

static const page_shape shapes[] = {
    {2, 64, 64, 4, false, QKV_FRAME_PLAIN, 64, 640},    {2, 64, 32, 2, true, QKV_FRAME_ATTEND, 64, 1000},
    {3, 32, 64, 3, true, QKV_FRAME_ARCHIVE, 64, 12800}, {2, 24, 80, 2.5, false, QKV_FRAME_ARCHIVE, 64, 64},
    {2, 64, 64, 8, true, QKV_FRAME_ATTEND, 23, 0},      {1, 96, 96, 3, false, QKV_FRAME_PLAIN, 1, 7},
    {2, 128, 64, 1, true, QKV_FRAME_PLAIN, 50, 64},
};
enum { SHAPES = sizeof shapes / sizeof *shapes };

// Every sink is kept, and as keys are attended; before RoPE it is the row before RoPE.
static void kept_keys_decode_as_they_were(void **state) {
  (void)state;
  naive_random random = {11};
  for (size_t i = 0; i < SHAPES; i++) {
    page_shape shape = shapes[i];
    shape.position = 1;
    coded page = make_page(&random, shape, 0, 12);
    encode(&page);
    const size_t dim = shape.key_dim;
    qkv_rope rope = {.theta = 10000};
    assert_int_equal(qkv_rope_resolve(&rope, shape.key_dim, NULL), QKV_OK);
    for (uint16_t h = 0; h < shape.kv_heads; h++) {
      const size_t count = shape.tokens < 11 ? shape.tokens : 11;
      float *attended = allocate(TOKENS * dim * sizeof(float)), *before = allocate(TOKENS * dim * sizeof(float));
      qkv_outliers found = kept(page.image, h, QKV_K);
      assert_int_equal(found.count, count);
      assert_int_equal(kept(page.image, h, QKV_V).count, count);
      page.coder->codec->decode(page.coder, page.image, h, QKV_K, false, attended);
      page.coder->codec->decode(page.coder, page.image, h, QKV_K, true, before);
      for (size_t t = 0; t < count; t++) {
        const float *row = row_of(&page, QKV_K, t, h);
        float scale, turned[QKV_DIM_MAX];
        memcpy(&scale, found.scales + t * sizeof scale, sizeof scale);
        memcpy(turned, before + t * dim, dim * sizeof *turned);
        qkv_rope_forward(&rope, turned, shape.position + t);
        for (size_t c = 0; c < dim; c++) {
          assert_true(fabsf(attended[t * dim + c] - row[c]) <= 0.501f * scale);
          assert_true(fabsf(turned[c] - row[c]) <= 0.501f * scale + 1e-5f);
        }
      }
      free(attended);
      free(before);
    }
    release(&page);
  }
}

// The gain byte of an outlier's slot is 0.
static void check_gains(const coded *page, const void *image) {
  for (uint16_t h = 0; h < page->shape.kv_heads; h++) {
    for (qkv_part part = QKV_K; part <= QKV_V; part++) {
      const qkv_outliers found = kept(image, h, part);
      qkv_page_codes codes;
      qkv_page_find(image, h, part, qkv_embedded(page->coder)->heads[h].schedules, &codes);
      for (uint64_t left = qkv_outliers_mask(&found); left != 0; left &= left - 1) {
        assert_int_equal(codes.gains[__builtin_ctzll(left)], 0);
      }
    }
  }
}

static uint64_t random_slots(naive_random *random, uint32_t tokens, size_t count) {
  uint64_t slots = 0;
  for (size_t i = 0; i < count; i++) slots |= UINT64_C(1) << naive_below(random, tokens);
  return slots;
}

static coded planted_page(naive_random *random, page_shape shape) {
  // Some by their errors, and those of the first slots.
  coded page = make_page(random, shape, NEVER, (uint32_t)shape.position + 1 + naive_below(random, 3));
  for (uint16_t h = 0; h < shape.kv_heads; h++) {
    plant(&page, h, QKV_K, random_slots(random, shape.tokens, 1 + naive_below(random, 5)), 80);
    plant(&page, h, QKV_V, random_slots(random, shape.tokens, 1 + naive_below(random, 5)), 80);
  }
  return page;
}

enum { N = 4 };  // queries

// Relative, of scores and sums.
static double off_of(const coded *page) {
  return page->shape.dense ? CODER_WHOLE_OFF : 2e-5;
}

static void check_scores(const coded *page, uint16_t h, const float *queries, const float *scores) {
  const size_t dim = page->shape.key_dim;
  float *k = allocate(TOKENS * dim * sizeof *k);
  page->coder->codec->decode(page->coder, page->image, h, QKV_K, false, k);
  for (size_t i = 0; i < (size_t)N * page->shape.tokens; i++) {
    const size_t q = i / page->shape.tokens, t = i % page->shape.tokens;
    double expected = 0, q2 = 0, k2 = 0;
    for (size_t c = 0; c < dim; c++) {
      const double a = (double)queries[q * dim + c], b = (double)k[t * dim + c];
      expected += a * b, q2 += a * a, k2 += b * b;
    }
    assert_true(fabs((double)scores[q * TOKENS + t] - expected) <= off_of(page) * (1 + sqrt(q2 * k2)));
  }
  free(k);
}

static void check_sums(const coded *page, uint16_t h, const float *weights, const float *sums) {
  const size_t dim = page->shape.value_dim;
  float *v = allocate(TOKENS * dim * sizeof *v);
  page->coder->codec->decode(page->coder, page->image, h, QKV_V, false, v);
  for (size_t q = 0; q < N; q++) {
    double miss2 = 0, size2 = 0;
    for (size_t c = 0; c < dim; c++) {
      double expected = 0, size = 0;
      for (size_t t = 0; t < page->shape.tokens; t++) {
        const double term = (double)weights[q * TOKENS + t] * (double)v[t * dim + c];
        expected += term, size += fabs(term);
      }
      miss2 += ((double)sums[q * dim + c] - expected) * ((double)sums[q * dim + c] - expected);
      size2 += size * size;
    }
    assert_true(sqrt(miss2) <= off_of(page) * sqrt(size2));
  }
  free(v);
}

static void check_attention(const coded *page, uint16_t h, naive_random *random, qkv_query_block *block) {
  const qkv_coder *coder = page->coder;
  float scores[N * TOKENS], weights[N * TOKENS] = {0}, *sums = coder_allocate(N * (size_t)coder->value_dim, 4);
  double totals[N] = {0};
  block->count = N;
  block->precision = QKV_PRECISION_FP32;
  for (size_t j = 0; j < N * (size_t)coder->key_dim; j++) block->rows[j] = (float)naive_gaussian(random);
  for (size_t j = 0; j < (size_t)N * TOKENS; j++) {
    if (j % TOKENS < page->shape.tokens) totals[j / TOKENS] += (double)(weights[j] = (float)naive_uniform(random));
  }
  coder->codec->query(coder, h, block);
  coder->codec->scores(coder, page->image, h, block, scores);
  coder->codec->accumulate(coder, page->image, h, weights, N, sums);
  coder->codec->output(coder, h, sums, totals, N);
  check_scores(page, h, block->rows, scores);
  check_sums(page, h, weights, sums);
  free(sums);
}

static void attention_is_that_over_decoded_rows(void **state) {
  (void)state;
  naive_random random = {12};
  qkv_query_block *block = allocate(sizeof *block);
  size_t found = 0;
  for (size_t i = 0; i < 10 * SHAPES; i++) {
    coded page = planted_page(&random, shapes[i % SHAPES]);
    coder_own(page.coder)->anchors[QKV_K].kind = coder_own(page.coder)->anchors[QKV_V].kind =
        (qkv_anchor_kind)(i / SHAPES % 5);
    if (i / SHAPES % 2 == 0) coder_own(page.coder)->low_rank = (qkv_low_rank_options){QKV_LOW_RANK_PREDICTOR, 2};
    encode(&page);
    check_gains(&page, page.image);
    for (uint16_t h = 0; h < page.shape.kv_heads; h++) {
      found += kept(page.image, h, QKV_K).count + kept(page.image, h, QKV_V).count;
      check_attention(&page, h, &random, block);
    }
    release(&page);
  }
  assert_true(found > 400);
  free(block);
}

// Anchors stay, but for chains, which would go through outliers; factors are left out.
static void outliers_go_with_means_alone(void **state) {
  (void)state;
  static const qkv_anchor_kind expected[] = {QKV_ANCHOR_NONE, QKV_ANCHOR_MEAN, QKV_ANCHOR_GROUP, QKV_ANCHOR_MEAN,
                                             QKV_ANCHOR_MEAN};
  naive_random random = {13};
  for (qkv_anchor_kind kind = QKV_ANCHOR_NONE; kind <= QKV_ANCHOR_AUTO; kind++) {
    coded page = make_page(&random, (page_shape){2, 64, 64, 4, false, QKV_FRAME_PLAIN, 64, 0}, NEVER, 4);
    // Rows far from 0, so that a mean is worth its bytes.
    for (qkv_part part = QKV_K; part <= QKV_V; part++) {
      for (size_t i = 0; i < (size_t)TOKENS * 2 * 64; i++) page.rows[part][i] += 4 + (float)(i % 5);
      coder_own(page.coder)->anchors[part].kind = kind;
    }
    coder_own(page.coder)->low_rank = (qkv_low_rank_options){QKV_LOW_RANK_PREDICTOR, 2};
    encode(&page);
    for (uint16_t h = 0; h < 2; h++) {
      const qkv_page_directory *entry = qkv_page_entry_of(page.image, h);
      assert_true(kept(page.image, h, QKV_K).count > 0 && kept(page.image, h, QKV_V).count > 0);
      assert_int_equal(qkv_anchor_kind_of(entry->anchor_k), expected[kind]);
      assert_int_equal(qkv_anchor_kind_of(entry->anchor_v), expected[kind]);
      assert_int_equal(entry->low_rank_k, 0);
      assert_int_equal(entry->low_rank_v, 0);
    }
    release(&page);
  }
}

static void the_worst_are_kept(void **state) {
  (void)state;
  naive_random random = {14};
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    coded page = make_page(&random, shapes[0], NEVER, 0);
    // 20 rows, each a half longer than the one before: those from the fifth on stay.
    float times = 3;
    uint64_t expected = 0;
    for (size_t t = 0; t < 20; t++, times *= 1.5f) {
      float *row = row_of(&page, QKV_K, (7 + 3 * t) % 64, 0);
      for (size_t c = 0; c < 64; c++) row[c] *= times;
      if (t >= 4) expected |= UINT64_C(1) << (7 + 3 * t) % 64;
    }
    encode(&page);
    const qkv_outliers found = kept(page.image, 0, QKV_K);
    assert_int_equal(found.count, QKV_OUTLIERS_MAX);
    assert_int_equal(qkv_outliers_mask(&found), expected);
    // Sinks go before all others.
    coder_own(page.coder)->sinks = 16;
    page.shape.position = 0;
    encode(&page);
    const qkv_outliers sinks = kept(page.image, 0, QKV_K);
    assert_int_equal(qkv_outliers_mask(&sinks), 0xffff);
    // Heavy hitters, here two of any score, before those that err, and after sinks.
    const float predictor[64] = {1};
    qkv_head_coder *head = (qkv_head_coder *)&coder_own(page.coder)->heads[0];
    head->heavy = predictor;
    head->heavy_least = -1e30f;
    for (uint32_t few = 16; few >= 14; few--) {
      coder_own(page.coder)->sinks = few;
      encode(&page);
      const qkv_outliers all = kept(page.image, 0, QKV_K);
      const uint64_t heavy =
          qkv_heavy_slots(page.coder, 0, 0, TOKENS, QKV_FP32, page.rows[QKV_K], sizeof(float[2][64]));
      const uint64_t first = (UINT64_C(1) << few) - 1, mask = qkv_outliers_mask(&all);
      assert_int_equal(__builtin_popcountll(heavy), 2);
      assert_int_equal(all.count, QKV_OUTLIERS_MAX);
      assert_int_equal(mask & first, first);
      assert_int_equal(mask & ~first & ~heavy, 0);
    }
    release(&page);
  }
}

// As many rows as there can be, all of them wide.
static void pages_stay_within_their_most(void **state) {
  (void)state;
  naive_random random = {15};
  size_t fullest = 0;
  for (size_t i = 0; i < SHAPES; i++) {
    page_shape shape = shapes[i];
    shape.position = 0, shape.tokens = TOKENS;
    coded page = make_page(&random, shape, NEVER, 16);
    for (uint16_t h = 0; h < shape.kv_heads; h++) {
      plant(&page, h, QKV_K, 0xffff, 300);
      plant(&page, h, QKV_V, 0xffff, 0.001f);
    }
    for (qkv_anchor_kind kind = QKV_ANCHOR_NONE; kind <= QKV_ANCHOR_AUTO; kind++) {
      coder_own(page.coder)->anchors[QKV_K].kind = coder_own(page.coder)->anchors[QKV_V].kind = kind;
      encode(&page);
      fullest += page.bytes == page.capacity;
      assert_int_equal(kept(page.image, 0, QKV_V).count, QKV_OUTLIERS_MAX);
    }
    release(&page);
  }
  assert_true(fullest > 0);
}

static float *run_of(const coded *page, uint16_t h, qkv_part part, uint32_t first, uint32_t count) {
  const size_t dim = dim_of(page, part);
  float *run = allocate((count + 1) * dim * sizeof *run);
  for (uint32_t t = 0; t < count; t++) memcpy(run + t * dim, row_of(page, part, first + t, h), dim * sizeof *run);
  return run;
}

static uint32_t match(const coded *page, const void *image, uint16_t h, qkv_part part, uint32_t first, uint32_t count,
                      const float *run) {
  return page->coder->codec->rows_match(page->coder, image, h, part, first, count, run);
}

static void check_matching(const coded *page, naive_random *random, const void *image) {
  const uint32_t tokens = page->shape.tokens;
  for (int round = 0; round < 12; round++) {
    const uint16_t h = (uint16_t)naive_below(random, page->shape.kv_heads);
    const qkv_part part = round % 2 == 0 ? QKV_K : QKV_V;
    const uint32_t first = round < 2 ? 0 : naive_below(random, tokens);
    const uint32_t count = round < 2 ? tokens : 1 + naive_below(random, tokens - first);
    float *run = run_of(page, h, part, first, count);
    assert_int_equal(match(page, image, h, part, first, count, run), count);
    const qkv_outliers found = kept(image, h, part);
    uint64_t within = qkv_outliers_mask(&found) >> first;
    if (count < 64) within &= (UINT64_C(1) << count) - 1;
    if (within != 0) {
      // Of two changed outliers the first is told.
      const uint32_t slot = (uint32_t)__builtin_ctzll(within), last = 63 - (uint32_t)__builtin_clzll(within);
      run[slot * dim_of(page, part)] += 100;
      run[last * dim_of(page, part) + 1] -= 100;
      assert_int_equal(match(page, image, h, part, first, count, run), slot);
    }
    free(run);
  }
}

static void repeated_rows_match(void **state) {
  (void)state;
  naive_random random = {16};
  for (size_t i = 0; i < 10 * SHAPES; i++) {
    coded page = planted_page(&random, shapes[i % SHAPES]);
    coder_own(page.coder)->anchors[QKV_K].kind = coder_own(page.coder)->anchors[QKV_V].kind =
        (qkv_anchor_kind)(i / SHAPES % 5);
    encode(&page);
    check_matching(&page, &random, page.image);
    release(&page);
  }
}

static void narrow_keeps_outliers(void **state) {
  (void)state;
  naive_random random = {17};
  for (size_t i = 0; i < 6 * SHAPES; i++) {
    coded page = planted_page(&random, shapes[i % SHAPES]);
    coder_own(page.coder)->anchors[QKV_K].kind = coder_own(page.coder)->anchors[QKV_V].kind =
        (qkv_anchor_kind)(i / SHAPES % 3);
    encode(&page);
    qkv_head_tiers wanted[HEADS_MAX];
    for (size_t j = 0; j < sizeof wanted; j++) ((uint8_t *)wanted)[j] = (uint8_t)naive_below(&random, 30);
    uint8_t *image = allocate(page.bytes);
    const size_t bytes = page.coder->codec->planes->drop(page.coder, page.image, wanted, image);
    qkv_error error = {0};
    if (page.coder->codec->validate(page.coder, image, bytes, &error) != QKV_OK) fail_msg("%s", error.text);
    const qkv_page_header *from = (const qkv_page_header *)page.image, *to = (const qkv_page_header *)image;
    assert_int_equal(to->outliers != 0, from->outliers != 0);
    if (to->outliers != 0) {
      assert_int_equal(to->bytes - to->outliers, from->bytes - from->outliers);
      assert_memory_equal(image + to->outliers, page.image + from->outliers, to->bytes - to->outliers);
    }
    check_gains(&page, image);
    if (!page.shape.dense && qkv_embedded(page.coder)->anchors[QKV_K].kind == QKV_ANCHOR_NONE)
      check_matching(&page, &random, image);
    free(image);
    release(&page);
  }
}

// All tables of kernels write the same bytes.
static void kernels_agree(void **state) {
  (void)state;
  for (size_t i = 0; i < 5 * SHAPES; i++) {
    naive_random random = {18 + i};
    coded page = planted_page(&random, shapes[i % SHAPES]);
    coder_own(page.coder)->anchors[QKV_K].kind = coder_own(page.coder)->anchors[QKV_V].kind =
        (qkv_anchor_kind)(i / SHAPES % 5);
    encode(&page);
    uint8_t *first = allocate(page.bytes);
    const size_t bytes = page.bytes;
    memcpy(first, page.image, bytes);
    for (size_t row = 0; qkv_kernels_at(row) != NULL; row++) {
      if ((qkv_kernels_at(row)->needs & ~qkv_cpu_flags()) != 0) continue;
      qkv_kernels_setup(qkv_kernels_at(row)->needs);
      encode(&page);
      assert_int_equal(page.bytes, bytes);
      assert_memory_equal(page.image, first, bytes);
    }
    qkv_kernels_setup(~(uint32_t)0);
    free(first);
    release(&page);
  }
}

// ---- A golden page ----

// Rows are whole numbers over 256 from a generator of whole numbers, so that every machine codes the same ones: two
// sinks, and four rows a part that are far longer.
static coded golden_rows(void) {
  naive_random random = {1};
  coded page = make_page(&random, (page_shape){2, 64, 64, 3, false, QKV_FRAME_PLAIN, 57, 10}, 0.1f, 12);
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    for (size_t i = 0; i < (size_t)57 * 2 * 64; i++) {
      page.rows[part][i] = (float)((int)naive_below(&random, 4097) - 2048) / 256;
    }
    for (size_t i = 0; i < 4; i++) {
      float *row = row_of(&page, part, 5 + 13 * i, i % 2);
      memset(row, 0, 64 * sizeof *row);
      for (size_t c = i; c < 64; c += 9 + i)
        row[c] = (float)((int)naive_below(&random, 4097) - 2048) / (i < 2 ? 8 : 1);
    }
  }
  return page;
}

// Decoded forever, and written still.
static void a_golden_page_stays_readable(void **state) {
  (void)state;
  coded page = golden_rows();
  encode(&page);
  uint8_t *golden = allocate(page.bytes + 1);
  FILE *file = fopen(QKV_SOURCE_DIR "/tests/golden/page_v3_k3_v3_outliers.bin", "rb");
  assert_non_null(file);
  assert_int_equal(fread(golden, 1, page.bytes + 1, file), page.bytes);
  assert_int_equal(fclose(file), 0);
  qkv_error error = {0};
  if (page.coder->codec->validate(page.coder, golden, page.bytes, &error) != QKV_OK) fail_msg("%s", error.text);
  assert_memory_equal(golden, page.image, page.bytes);
  float rows[4][57 * 64];
  size_t narrow = 0, wide = 0;
  for (uint16_t h = 0; h < 2; h++) {
    for (qkv_part part = QKV_K; part <= QKV_V; part++) {
      const qkv_outliers found = kept(golden, h, part);
      page.coder->codec->decode(page.coder, golden, h, part, false, rows[2 * h + part]);
      for (size_t i = 0; i < found.count; i++) found.slots[i] & 0x80 ? wide++ : narrow++;
    }
  }
  assert_true(narrow > 4 && wide > 1);
  assert_true(XXH3_64bits(rows, sizeof rows) == 0x0624ce9cbaa81d70u);
  free(golden);
  release(&page);
}

// ---- Damage ----

static void page_refusals_say_why(void **state) {
  (void)state;
  naive_random random = {19};
  coded page = planted_page(&random, (page_shape){1, 8, 8, 2, false, QKV_FRAME_PLAIN, 64, 640});
  encode(&page);
  const uint32_t at = (uint32_t)naive_read(page.image, 40, 4);
  assert_true(at != 0);
  const struct {
    size_t offset, bytes;
    uint64_t value;
    const char *text;  // its beginning
  } cases[] = {
      {40, 4, 0, "page.outliers is 0, page.features is 0x8 and page.version 3"},
      {36, 2, 0, "page.outliers is "},
      {4, 1, 2, "page.outliers is "},
      {40, 4, page.bytes + 64, "page.outliers is "},
      {40, 4, 0xffffffc0, "page.outliers is 4294967232, the page is "},
      {40, 4, page.bytes, "page.outliers is "},
      {40, 4, at - 64, "page.outliers is "},
      {40, 4, at + 64, "page.outliers is "},
      {40, 4, at + 1, "page.outliers is "},
      {at, 1, 1, "page.outliers.before[0] is not 0"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    qkv_error error = {0};
    uint8_t *image = allocate(page.bytes);
    memcpy(image, page.image, page.bytes);
    put(image + cases[i].offset, cases[i].value, cases[i].bytes);
    qkv_page_seal(image);
    assert_int_equal(page.coder->codec->validate(page.coder, image, page.bytes, &error), QKV_DATA_LOSS);
    if (strncmp(error.text, cases[i].text, strlen(cases[i].text)) != 0) fail_msg("%s", error.text);
    free(image);
  }
  release(&page);
}

// All outliers of an image get the scale that makes their largest number `keys` and `values`.
static void set_largest(const page_shape *shape, uint8_t *image, double keys, double values) {
  for (uint16_t h = 0; h < shape->kv_heads; h++) {
    for (qkv_part part = QKV_K; part <= QKV_V; part++) {
      const qkv_outliers found = kept(image, h, part);
      for (size_t i = 0; i < found.count; i++) {
        const bool wide = (found.slots[i] & QKV_OUTLIER_WIDE) != 0;
        const float scale = (float)((part == QKV_K ? keys : values) / (wide ? 32767 : 127));
        memcpy(image + (found.scales - image) + i * sizeof scale, &scale, sizeof scale);
      }
    }
  }
  qkv_page_seal(image);
}

static void assert_finite(const float *numbers, size_t count) {
  for (size_t i = 0; i < count; i++) assert_true(isfinite(numbers[i]));
}

// Of outliers as large as a page may say, whatever the queries, all is finite; larger ones are refused.
static void outliers_make_nothing_infinite(void **state) {
  (void)state;
  naive_random random = {21};
  qkv_query_block *block = allocate(sizeof *block);
  for (size_t i = 0; i < SHAPES; i++) {
    coded page = planted_page(&random, shapes[i]);
    qkv_error error = {0};
    encode(&page);
    set_largest(&page.shape, page.image, 0.999 * 65536, 0.999 * 4e15);
    if (page.coder->codec->validate(page.coder, page.image, page.bytes, &error) != QKV_OK) fail_msg("%s", error.text);
    for (uint16_t h = 0; h < page.shape.kv_heads; h++) {
      float scores[TOKENS], weights[TOKENS], sums[QKV_DIM_MAX] = {0};
      const double total = page.shape.tokens;
      block->count = 1;
      block->precision = QKV_PRECISION_FP32;
      for (size_t c = 0; c < page.shape.key_dim; c++) block->rows[c] = 32768;
      for (size_t t = 0; t < TOKENS; t++) weights[t] = t < page.shape.tokens;
      page.coder->codec->query(page.coder, h, block);
      page.coder->codec->scores(page.coder, page.image, h, block, scores);
      page.coder->codec->accumulate(page.coder, page.image, h, weights, 1, sums);
      page.coder->codec->output(page.coder, h, sums, &total, 1);
      assert_finite(scores, page.shape.tokens);
      assert_finite(sums, page.shape.value_dim);
    }
    for (int way = 0; way < 2; way++) {
      set_largest(&page.shape, page.image, way == 0 ? 1e30 : 1, way == 1 ? 1e30 : 1);
      assert_int_equal(page.coder->codec->validate(page.coder, page.image, page.bytes, &error), QKV_DATA_LOSS);
      assert_non_null(strstr(error.text, "page.outliers.scales["));
    }
    release(&page);
  }
  free(block);
}

// Whatever passes may be read by every function.
static void read_all(const coded *page, const uint8_t *image, qkv_query_block *block) {
  const qkv_coder *coder = page->coder;
  float rows[TOKENS * 32], sums[32] = {0}, scores[TOKENS];
  const double total = 1;
  const qkv_page_header *header = (const qkv_page_header *)image;
  for (uint16_t h = 0; h < page->shape.kv_heads; h++) {
    for (qkv_part part = QKV_K; part <= QKV_V; part++) {
      coder->codec->decode(coder, image, h, part, true, rows);
      coder->codec->decode(coder, image, h, part, false, rows);
      (void)coder->codec->rows_match(coder, image, h, part, 0, header->tokens, rows);
    }
    coder->codec->query(coder, h, block);
    coder->codec->scores(coder, image, h, block, scores);
    coder->codec->accumulate(coder, image, h, scores, 1, sums);
    coder->codec->output(coder, h, sums, &total, 1);
  }
}

static void damaged_pages_are_refused_or_read(void **state) {
  (void)state;
  naive_random random = {20};
  qkv_query_block *block = allocate(sizeof *block);
  static const page_shape small[] = {{2, 16, 8, 2, false, QKV_FRAME_PLAIN, 60, 640},
                                     {2, 16, 8, 2, true, QKV_FRAME_ATTEND, 60, 640}};
  size_t passed = 0, refused = 0;
  memset(block, 0, sizeof *block);
  block->count = 1;
  for (size_t c = 0; c < 16; c++) block->rows[c] = (float)c - 5;
  for (size_t i = 0; i < 2; i++) {
    coded page = planted_page(&random, small[i]);
    encode(&page);
    assert_true(((const qkv_page_header *)page.image)->outliers != 0);
    uint8_t *image = allocate(page.bytes);
    memcpy(image, page.image, page.bytes);
    for (size_t at = 0; at < page.bytes; at++) {
      const uint8_t was = image[at];
      const uint8_t values[] = {0, 1, 0x7f, 0x80, 0xff, (uint8_t)(was + 1), (uint8_t)(was - 1), was ^ 0x40};
      for (size_t j = 0; j < sizeof values; j++) {
        if (values[j] == was) continue;
        image[at] = values[j];
        assert_int_equal(page.coder->codec->validate(page.coder, image, page.bytes, NULL), QKV_DATA_LOSS);
        // Sealed anew, with the length that it has.
        uint64_t checksum;
        memcpy(&checksum, image + 56, sizeof checksum);
        memset(image + 56, 0, 8);
        const uint64_t sum = XXH3_64bits(image, page.bytes);
        memcpy(image + 56, &sum, sizeof sum);
        if (page.coder->codec->validate(page.coder, image, page.bytes, NULL) == QKV_OK) {
          passed++;
          read_all(&page, image, block);
        } else {
          refused++;
        }
        memcpy(image + 56, page.image + 56, 8);
        image[at] = was;
      }
    }
    assert_memory_equal(image, page.image, page.bytes);
    free(image);
    release(&page);
  }
  printf("of sealed pages with one byte changed %zu were read, %zu refused\n", passed, refused);
  assert_true(passed > 1000 && refused > 1000);
  free(block);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(kept_keys_decode_as_they_were),  cmocka_unit_test(attention_is_that_over_decoded_rows),
      cmocka_unit_test(outliers_go_with_means_alone),   cmocka_unit_test(the_worst_are_kept),
      cmocka_unit_test(pages_stay_within_their_most),   cmocka_unit_test(repeated_rows_match),
      cmocka_unit_test(narrow_keeps_outliers),          cmocka_unit_test(kernels_agree),
      cmocka_unit_test(a_golden_page_stays_readable),   cmocka_unit_test(page_refusals_say_why),
      cmocka_unit_test(outliers_make_nothing_infinite), cmocka_unit_test(damaged_pages_are_refused_or_read),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
