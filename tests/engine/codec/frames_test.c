// Pages of the attend frame and of the archive frame, with transforms, schedules and tiers of every head's own.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
// cmocka wants the above first
#include <cmocka.h>

#include "engine/codec/codebook.h"
#include "engine/codec/hadamard.h"
#include "tests/engine/codec/coder.h"

enum { TOKENS = QKV_PAGE_TOKENS };

typedef struct frame_case {
  uint64_t position;
  double bits_k, bits_v;
  uint32_t tokens;
  qkv_frame frame;
  uint16_t kv_heads, key_dim, value_dim;
  bool dense;
  qkv_rope rope;
} frame_case;

#define YARN \
  { .theta = 10000, .scaling = QKV_ROPE_YARN, .factor = 8, .original_max_position = 4096 }
#define DYNAMIC \
  { .theta = 10000, .scaling = QKV_ROPE_DYNAMIC, .factor = 4, .original_max_position = 2048 }

static const frame_case cases[] = {
    {0, 3, 3, 64, QKV_FRAME_ATTEND, 2, 64, 64, true, {.theta = 10000}},
    {640, 2.5, 4, 64, QKV_FRAME_ARCHIVE, 3, 64, 32, true, {.theta = 10000, .interleaved = true}},
    {100000, 4, 2.25, 37, QKV_FRAME_ATTEND, 2, 80, 96, true, {.theta = 5e5, .width = 32, .interleaved = true}},
    {131072, 2, 2, 64, QKV_FRAME_ARCHIVE, 2, 128, 128, false, {.theta = 1e6, .width = 64}},
    {77, 4, 4, 64, QKV_FRAME_ATTEND, 1, 64, 64, false, {.theta = 10000}},
    {8000, 3, 3, 64, QKV_FRAME_ATTEND, 2, 64, 24, true, YARN},
    {8000, 3, 3, 20, QKV_FRAME_ARCHIVE, 2, 64, 24, true, YARN},
    // Across the trained length, and beyond it.
    {2040, 3, 2, 64, QKV_FRAME_ATTEND, 2, 64, 64, true, DYNAMIC},
    {20000, 3, 2, 64, QKV_FRAME_ARCHIVE, 2, 64, 64, true, DYNAMIC},
    {640, 3, 3, 64, QKV_FRAME_PLAIN, 2, 64, 64, true, {.theta = 10000}},
    {(uint64_t)3 << 20, 4, 4, 64, QKV_FRAME_ATTEND, 4, 128, 64, true, {.theta = 5e5}},
    {777, 3, 3, 64, QKV_FRAME_ATTEND, 4, 96, 32, true, {.theta = 1e6, .width = 24}},
};
enum { CASES = sizeof cases / sizeof *cases };

typedef struct framed {
  const frame_case *like;
  qkv_rope rope;
  qkv_coder *coder;
  float *rows[2];  // [tokens][kv_heads][dim]
  uint8_t *image;
  size_t bytes;
} framed;

static void *allocate(size_t bytes) {
  void *block = aligned_alloc(64, (bytes + 63) & ~(size_t)63);
  if (block == NULL) abort();
  return block;
}

static size_t dim_of(const framed *page, qkv_part part) {
  return part == QKV_K ? page->coder->key_dim : page->coder->value_dim;
}

static const qkv_codec *codec_of(const framed *page) {
  return page->coder->codec;
}

static void encode(framed *page) {
  const frame_case *like = page->like;
  page->image = allocate(codec_of(page)->page_bytes_max(page->coder));
  page->bytes = codec_of(page)->encode(page->coder, like->position, like->tokens, QKV_FP32, page->rows[QKV_K],
                                       page->rows[QKV_V], NULL, page->image);
  assert_true(page->bytes <= codec_of(page)->page_bytes_max(page->coder));
  qkv_error error = {0};
  if (codec_of(page)->validate(page->coder, page->image, page->bytes, &error) != QKV_OK) fail_msg("%s", error.text);
  assert_int_equal(page->image[38], like->frame);
  assert_int_equal(naive_read(page->image, 32, 4), page->coder->calibration);
}

// Rows that have little in common with the coder, and one that is 0.
static framed make(const frame_case *like, naive_random *random) {
  framed page = {.like = like, .rope = like->rope};
  qkv_error error = {0};
  if (qkv_rope_resolve(&page.rope, like->key_dim, &error) != QKV_OK) fail_msg("%s", error.text);
  page.coder = like->dense ? coder_create_dense(random, like->kv_heads, like->key_dim, like->value_dim, like->bits_k,
                                                like->bits_v, like->frame, &page.rope)
                           : coder_create(like->kv_heads, like->key_dim, like->value_dim, like->bits_k, like->bits_v,
                                          like->frame, &page.rope);
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    const size_t count = (size_t)like->tokens * like->kv_heads * dim_of(&page, part);
    page.rows[part] = allocate(count * sizeof(float));
    for (size_t i = 0; i < count; i++) page.rows[part][i] = (float)(2 * naive_gaussian(random));
    memset(page.rows[part] + like->tokens / 3 * like->kv_heads * dim_of(&page, part), 0,
           dim_of(&page, part) * sizeof(float));
  }
  return page;
}

static void release(framed *page) {
  coder_destroy(page->coder);
  free(page->rows[QKV_K]);
  free(page->rows[QKV_V]);
  free(page->image);
}

static float *decode(const framed *page, uint16_t h, qkv_part part, bool before_rope) {
  float *rows = allocate(TOKENS * dim_of(page, part) * sizeof *rows);
  codec_of(page)->decode(page->coder, page->image, h, part, before_rope, rows);
  return rows;
}

// Rounding to float along the way, and the angle, which a double counts in steps of its own.
static double tolerance(const framed *page) {
  return 1e-5 + 4 * 0x1p-52 * (double)page->like->position;
}

// ---- Decoding ----

// A slot's row in code space, read by the drawing.
static void read_slot(const framed *page, uint16_t h, qkv_part part, unsigned slot, double *z) {
  qkv_page_codes codes;
  qkv_page_find(page->image, h, part, qkv_embedded(page->coder)->heads[h].schedules, &codes);
  const uint16_t *reach = codes.schedule->reach[codes.tiers[slot / 16]];
  for (unsigned c = 0; c < codes.schedule->dim; c++) {
    const unsigned depth = naive_depth(reach, c);
    const unsigned code = naive_code(part, reach, codes.groups[slot / 16], c, slot % 16);
    z[c] = depth == 0 ? 0 : naive_gain(codes.gains[slot]) * (double)qkv_codebook_value(depth, code);
  }
}

// Code space to what the frame leaves of a row: mean + sum_c z_c synthesis_c. Returns how far a coordinate of a
// decoded row may be off that, which comes back in whole numbers (kernel/dense.h).
static double leave_code_space(const qkv_transform *transform, const double *z, double *row) {
  const size_t dim = transform->schedule->dim;
  if (transform->synthesis == NULL) {
    float turned[QKV_DIM_MAX] = {0};
    for (size_t c = 0; c < dim; c++) turned[c] = (float)z[c];
    qkv_hadamard_inverse(turned, 1, dim);
    for (size_t c = 0; c < dim; c++) row[c] = turned[c];
    return 0;
  }
  double z2 = 0, longest2 = 0;
  for (size_t c = 0; c < dim; c++) z2 += z[c] * z[c];
  for (size_t j = 0; j < dim; j++) {
    double column2 = 0;
    row[j] = transform->mean[j];
    for (size_t c = 0; c < dim; c++) {
      const double entry = transform->synthesis[c * dim + j];
      row[j] += z[c] * entry, column2 += entry * entry;
    }
    longest2 = fmax(longest2, column2);
  }
  return 6e-5 * sqrt(z2 * longest2);
}

static void turn_pair(const qkv_rope *rope, uint32_t pair, long double angle, double scale, double *row) {
  double *first = row + qkv_rope_first(rope, pair), *second = row + qkv_rope_second(rope, pair);
  const double a = *first, b = *second, c = scale * (double)cosl(angle), s = scale * (double)sinl(angle);
  *first = a * c - b * s;
  *second = a * s + b * c;
}

static long double angle_at(const qkv_rope *rope, uint64_t position, uint32_t pair) {
  return (long double)position * qkv_rope_frequency(rope, position, pair);
}

// A key that has left code space, to what it is as attended.
static void leave_frame(const framed *page, uint16_t h, uint64_t position, double *row) {
  const qkv_rope *rope = &page->rope;
  const qkv_transform *transform = qkv_embedded(page->coder)->heads[h].transforms[QKV_K];
  const uint64_t begin = page->like->position;
  if (page->like->frame == QKV_FRAME_PLAIN) return;
  if (page->like->frame == QKV_FRAME_ATTEND) {
    double anchor[QKV_DIM_MAX] = {0};
    for (size_t i = 0; i < transform->anchor_pairs; i++) {
      const uint32_t pair = qkv_transform_anchored(transform, i);
      anchor[qkv_rope_first(rope, pair)] = transform->anchor[2 * i];
      anchor[qkv_rope_second(rope, pair)] = transform->anchor[2 * i + 1];
      turn_pair(rope, pair, angle_at(rope, position, pair) - coder_frame_angle(rope, transform, begin, pair),
                qkv_rope_magnitude(rope), anchor);
    }
    for (size_t c = 0; c < page->coder->key_dim; c++) row[c] += anchor[c];
  }
  for (uint32_t pair = 0; pair < rope->width / 2; pair++) {
    if (page->like->frame == QKV_FRAME_ATTEND) {
      turn_pair(rope, pair, coder_frame_angle(rope, transform, begin, pair), 1, row);
    } else {
      turn_pair(rope, pair, angle_at(rope, position, pair), qkv_rope_magnitude(rope), row);
    }
  }
}

static void check_row(const framed *page, const float *got, const double *expected, size_t dim, double off) {
  double size = 1;
  for (size_t c = 0; c < dim; c++) size = fmax(size, fabs(expected[c]));
  for (size_t c = 0; c < dim; c++) {
    if (fabs((double)got[c] - expected[c]) <= tolerance(page) * size + off) continue;
    fail_msg("coordinate %zu is %.9g, expected %.9g", c, (double)got[c], expected[c]);
  }
}

static void pages_decode_as_drawn(void **state) {
  (void)state;
  naive_random random = {71};
  for (size_t i = 0; i < CASES; i++) {
    framed page = make(&cases[i], &random);
    encode(&page);
    for (uint16_t h = 0; h < page.like->kv_heads; h++) {
      for (qkv_part part = QKV_K; part <= QKV_V; part++) {
        float *rows = decode(&page, h, part, false);
        for (unsigned t = 0; t < page.like->tokens; t += 5) {
          double z[QKV_DIM_MAX] = {0}, row[QKV_DIM_MAX] = {0};
          read_slot(&page, h, part, t, z);
          const double off = leave_code_space(qkv_embedded(page.coder)->heads[h].transforms[part], z, row);
          if (part == QKV_K) leave_frame(&page, h, page.like->position + t, row);
          check_row(&page, rows + t * dim_of(&page, part), row, dim_of(&page, part), off);
        }
        free(rows);
      }
    }
    release(&page);
  }
}

static void both_forms_of_keys_are_one(void **state) {
  (void)state;
  naive_random random = {72};
  for (size_t i = 0; i < CASES; i++) {
    framed page = make(&cases[i], &random);
    const size_t dim = page.coder->key_dim;
    encode(&page);
    float *before = decode(&page, 0, QKV_K, true), *after = decode(&page, 0, QKV_K, false);
    for (size_t t = 0; t < page.like->tokens; t++) {
      double expected[QKV_DIM_MAX] = {0};
      qkv_rope_forward(&page.rope, before + t * dim, page.like->position + t);
      for (size_t c = 0; c < dim; c++) expected[c] = before[t * dim + c];
      check_row(&page, after + t * dim, expected, dim, 0);
    }
    free(before);
    before = decode(&page, 0, QKV_V, true);
    free(after);
    after = decode(&page, 0, QKV_V, false);
    assert_memory_equal(before, after, page.like->tokens * page.coder->value_dim * sizeof *before);
    free(before);
    free(after);
    release(&page);
  }
}

// What a coder knows, means and rotating anchors, takes no bits: errors are those of what is left.
static void what_is_known_costs_nothing(void **state) {
  (void)state;
  naive_random random = {73};
  for (qkv_frame frame = QKV_FRAME_PLAIN; frame <= QKV_FRAME_ARCHIVE; frame++) {
    const frame_case like = {4000, 3, 2, 64, frame, 1, 64, 64, false, {.theta = 10000}};
    framed page = make(&like, &random);
    owned_transform known[2];
    qkv_head_coder *head = (qkv_head_coder *)qkv_embedded(page.coder)->heads;
    for (qkv_part part = QKV_K; part <= QKV_V; part++) {
      transform_init(&known[part], &random, 64, false, 1, part == QKV_K ? &page.rope : NULL);
      if (frame != QKV_FRAME_ATTEND) known[part].transform.anchor_pairs = 0;
      for (size_t c = 0; c < 64; c++) known[part].vectors[c] *= 30;  // the mean
      head->transforms[part] = &known[part].transform;
      head->schedules[part] = &known[part].schedule;
      double noise2 = 0, miss2 = 0;
      for (size_t t = 0; t < TOKENS; t++) {
        double row[64] = {0};
        float *out = page.rows[part] + t * 64;
        for (size_t c = 0; c < 64; c++) {
          const double noise = naive_gaussian(&random);
          row[c] = known[part].vectors[c] + noise;
          noise2 += noise * noise;
        }
        if (part == QKV_K) leave_frame(&page, 0, like.position + t, row);
        for (size_t c = 0; c < 64; c++) out[c] = (float)row[c];
      }
      free(page.image);
      encode(&page);
      float *rows = decode(&page, 0, part, false);
      for (size_t j = 0; j < (size_t)TOKENS * 64; j++) {
        const double miss = (double)rows[j] - (double)page.rows[part][j];
        miss2 += miss * miss;
      }
      assert_true(miss2 <= page.coder->codec->error_bound(part == QKV_K ? 3 : 2) * noise2);
      assert_true(miss2 > 0);
      free(rows);
    }
    release(&page);
    transform_deinit(&known[QKV_K]);
    transform_deinit(&known[QKV_V]);
  }
}

// ---- Attention ----

static double off_of(const framed *page) {
  return page->like->dense ? CODER_WHOLE_OFF : 0;
}

static void check_scores(const framed *page, const float *q, const float *k, const float *scores) {
  const size_t dim = page->coder->key_dim;
  for (size_t t = 0; t < page->like->tokens; t++) {
    double expected = 0, q2 = 0, k2 = 0;
    for (size_t c = 0; c < dim; c++) {
      const double a = q[c], b = k[t * dim + c];
      expected += a * b, q2 += a * a, k2 += b * b;
    }
    assert_true(fabs((double)scores[t] - expected) <= (tolerance(page) + off_of(page)) * (1 + sqrt(q2 * k2)));
  }
}

static void check_sums(const framed *page, const float *weights, const float *v, const float *sums) {
  const size_t dim = page->coder->value_dim;
  double miss2 = 0, size2 = 0;
  for (size_t c = 0; c < dim; c++) {
    double expected = 0, size = 0;
    for (size_t t = 0; t < page->like->tokens; t++) {
      const double term = (double)weights[t] * (double)v[t * dim + c];
      expected += term, size += fabs(term);
    }
    miss2 += ((double)sums[c] - expected) * ((double)sums[c] - expected);
    size2 += size * size;
  }
  assert_true(sqrt(miss2) <= (1e-5 + off_of(page)) * sqrt(size2));
}

static void check_attention(const framed *page, naive_random *random) {
  enum { N = 5 };
  const qkv_coder *coder = page->coder;
  const uint16_t h = (uint16_t)(coder->kv_heads - 1);
  qkv_query_block *block = allocate(sizeof *block);
  block->precision = QKV_PRECISION_FP32;
  float *sums = allocate((size_t)N * coder->value_dim * sizeof *sums);
  float scores[N * TOKENS], weights[N * TOKENS] = {0};
  double totals[N] = {0};
  memset(sums, 0, (size_t)N * coder->value_dim * sizeof *sums);
  block->count = N;
  for (size_t i = 0; i < (size_t)N * coder->key_dim; i++) block->rows[i] = (float)naive_gaussian(random);
  for (size_t i = 0; i < N; i++) {
    for (size_t t = 0; t < page->like->tokens; t++) {
      weights[i * TOKENS + t] = (float)naive_uniform(random);
      totals[i] += (double)weights[i * TOKENS + t];
    }
  }
  coder->codec->query(coder, h, block);
  coder->codec->scores(coder, page->image, h, block, scores);
  coder->codec->accumulate(coder, page->image, h, weights, N, sums);
  coder->codec->output(coder, h, sums, totals, N);
  float *k = decode(page, h, QKV_K, false), *v = decode(page, h, QKV_V, false);
  for (size_t i = 0; i < N; i++) {
    check_scores(page, block->rows + i * coder->key_dim, k, scores + i * TOKENS);
    check_sums(page, weights + i * TOKENS, v, sums + i * coder->value_dim);
  }
  free(k), free(v), free(block), free(sums);
}

static void attention_is_that_over_decoded_rows(void **state) {
  (void)state;
  naive_random random = {74};
  for (size_t i = 0; i < CASES; i++) {
    framed page = make(&cases[i], &random);
    // Pages without anchors of their own, with every kind of them, and with whichever is best.
    for (qkv_anchor_kind kind = QKV_ANCHOR_NONE; kind <= QKV_ANCHOR_AUTO; kind++) {
      coder_own(page.coder)->anchors[QKV_K].kind = coder_own(page.coder)->anchors[QKV_V].kind = kind;
      free(page.image);
      encode(&page);
      check_attention(&page, &random);
    }
    release(&page);
  }
}

// Queries, and the columns of keys in the archive frame, are rounded: all pages' scores taken together.
static void check_precision(const framed *page, const qkv_query_block *exact, qkv_precision precision, double most) {
  const qkv_coder *coder = page->coder;
  qkv_query_block *block = allocate(sizeof *block);
  float scores[2][QKV_QUERY_BLOCK * TOKENS];
  double miss2 = 0, size2 = 0;
  for (uint16_t h = 0; h < coder->kv_heads; h++) {
    for (int rounded = 0; rounded <= 1; rounded++) {
      block->count = exact->count;
      block->precision = rounded ? precision : QKV_PRECISION_FP32;
      memcpy(block->rows, exact->rows, exact->count * coder->key_dim * sizeof *block->rows);
      coder->codec->query(coder, h, block);
      coder->codec->scores(coder, page->image, h, block, scores[rounded]);
    }
    for (size_t i = 0; i < exact->count; i++) {
      for (size_t t = i * TOKENS; t < i * TOKENS + page->like->tokens; t++) {
        const double miss = (double)scores[1][t] - (double)scores[0][t];
        miss2 += miss * miss, size2 += (double)scores[0][t] * (double)scores[0][t];
      }
    }
  }
  assert_true(size2 > 0);
  if (sqrt(miss2) > most * sqrt(size2)) {
    fail_msg("position %llu: off by %g, at most %g", (unsigned long long)page->like->position, sqrt(miss2 / size2),
             most);
  }
  free(block);
}

static void whole_numbers_miss_little(void **state) {
  (void)state;
  naive_random random = {76};
  qkv_query_block *block = allocate(sizeof *block);
  for (size_t i = 0; i < CASES; i++) {
    framed page = make(&cases[i], &random);
    for (qkv_anchor_kind kind = QKV_ANCHOR_NONE; kind <= QKV_ANCHOR_AUTO; kind++) {
      coder_own(page.coder)->anchors[QKV_K].kind = kind;
      free(page.image);
      encode(&page);
      block->count = 1 + naive_below(&random, 12);
      for (size_t j = 0; j < block->count * page.coder->key_dim; j++) block->rows[j] = (float)naive_gaussian(&random);
      check_precision(&page, block, QKV_PRECISION_DEFAULT, 0.04);
      check_precision(&page, block, QKV_PRECISION_INT16, 0.025);
    }
    release(&page);
  }
  free(block);
}

// ---- Repeated rows ----

static void the_same_rows_match_and_no_others(void **state) {
  (void)state;
  naive_random random = {75};
  for (size_t i = 0; i < CASES; i++) {
    framed page = make(&cases[i], &random);
    coder_own(page.coder)->anchors[QKV_K].kind = coder_own(page.coder)->anchors[QKV_V].kind =
        (qkv_anchor_kind)(i % 5);
    encode(&page);
    const uint32_t tokens = page.like->tokens;
    for (int round = 0; round < 40; round++) {
      const uint16_t h = (uint16_t)naive_below(&random, page.like->kv_heads);
      const qkv_part part = round % 2 ? QKV_V : QKV_K;
      const size_t dim = dim_of(&page, part);
      const uint32_t first = round < 2 ? 0 : naive_below(&random, tokens);
      const uint32_t count = round < 2 ? tokens : 1 + naive_below(&random, tokens - first);
      float *run = allocate(count * dim * sizeof *run);
      for (uint32_t t = 0; t < count; t++) {
        memcpy(run + t * dim, page.rows[part] + ((size_t)(first + t) * page.like->kv_heads + h) * dim,
               dim * sizeof *run);
      }
      assert_int_equal(codec_of(&page)->rows_match(page.coder, page.image, h, part, first, count, run), count);
      // Where anchors take all bits, rows are not told apart.
      qkv_page_codes codes;
      qkv_page_find(page.image, h, part, qkv_embedded(page.coder)->heads[h].schedules, &codes);
      const uint32_t other = codes.schedule->reach[codes.tiers[0]][1] > 0 ? naive_below(&random, count) : count;
      for (size_t c = 0; c < dim && other < count; c++) run[other * dim + c] += (float)(20 * naive_gaussian(&random));
      assert_int_equal(codec_of(&page)->rows_match(page.coder, page.image, h, part, first, count, run), other);
      free(run);
    }
    release(&page);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(pages_decode_as_drawn),       cmocka_unit_test(both_forms_of_keys_are_one),
      cmocka_unit_test(what_is_known_costs_nothing), cmocka_unit_test(attention_is_that_over_decoded_rows),
      cmocka_unit_test(whole_numbers_miss_little),   cmocka_unit_test(the_same_rows_match_and_no_others),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
