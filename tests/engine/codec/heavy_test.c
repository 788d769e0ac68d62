// Heavy hitters: told from keys by the mean of queries, and kept as outliers.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
// cmocka wants the above first
#include <cmocka.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/codec/calibrate.h"
#include "engine/codec/heavy.h"
#include "engine/codec/moments.h"
#include "engine/codec/outliers.h"
#include "naive.h"
#include "tests/engine/codec/coder.h"

enum { DIM = 32, HEADS = 2, GROUP = 2, TOKENS = 4096, FIRST = 192 };

// Rows of a model whose queries look for a direction that few keys have much of.
typedef struct traffic {
  qkv_calibration_shape shape;
  float *k, *v, *q;   // [TOKENS][heads][DIM], before RoPE
  float sought[DIM];  // what queries have in common
} traffic;

static float *floats(size_t count) {
  float *made = calloc(count, sizeof *made);
  assert_non_null(made);
  return made;
}

static traffic make_traffic(bool rope, bool sought) {
  naive_random random = {.state = 7};
  traffic made = {
      .shape = {.layers = 1, .kv_heads = HEADS, .q_heads = HEADS * GROUP, .key_dim = DIM, .value_dim = DIM},
      .k = floats((size_t)TOKENS * HEADS * DIM),
      .v = floats((size_t)TOKENS * HEADS * DIM),
      .q = floats((size_t)TOKENS * HEADS * GROUP * DIM)};
  if (rope) made.shape.rope = (qkv_rope){.theta = 10000};
  if (rope) assert_int_equal(qkv_rope_resolve(&made.shape.rope, DIM, NULL), QKV_OK);
  // The last pairs turn by little.
  for (size_t i = 0; i < DIM; i++) made.sought[i] = sought && i % (DIM / 2) >= DIM / 2 - 4 ? 1 : 0;
  for (size_t i = 0; i < (size_t)TOKENS * HEADS * DIM; i++) {
    made.k[i] = (float)naive_gaussian(&random);
    made.v[i] = (float)naive_gaussian(&random);
  }
  for (size_t i = 0; i < (size_t)TOKENS * HEADS * GROUP * DIM; i++) {
    made.q[i] = made.sought[i % DIM] + 0.5f * (float)naive_gaussian(&random);
  }
  return made;
}

static void free_traffic(traffic *made) {
  free(made->k);
  free(made->v);
  free(made->q);
}

static const qkv_calibration *learn(const traffic *from) {
  qkv_moments *moments = qkv_moments_create(&from->shape);
  qkv_calibration *made = NULL;
  qkv_error error = {0};
  qkv_moments_add(moments, 0, 0, TOKENS, from->k, from->v, true);
  qkv_moments_add_queries(moments, 0, 0, TOKENS, from->q, true);
  if (qkv_calibrate(moments, &QKV_CALIBRATE_DEFAULTS, &made, &error) != QKV_OK) fail_msg("%s", error.text);
  qkv_moments_destroy(&moments);
  return made;
}

// A coder with the calibration's predictor, and whatever else.
static qkv_coder *coder_with(const qkv_calibration *calibration, bool rope, double bits) {
  const qkv_rope *said = &qkv_calibration_shape_of(calibration)->rope;
  qkv_coder *coder = coder_create(HEADS, DIM, DIM, bits, bits, rope ? QKV_FRAME_ARCHIVE : QKV_FRAME_PLAIN, said);
  for (uint32_t head = 0; head < HEADS; head++) {
    qkv_head_coder *of = (qkv_head_coder *)&qkv_embedded(coder)->heads[head];
    of->heavy = qkv_calibration_heavy(calibration, 0, head, &of->heavy_least);
  }
  return coder;
}

// A page's keys as attended, of rows from `first` on.
static float *page_of(const traffic *from, size_t first, uint64_t position) {
  float *keys = floats((size_t)QKV_PAGE_TOKENS * HEADS * DIM);
  memcpy(keys, from->k + first * HEADS * DIM, (size_t)QKV_PAGE_TOKENS * HEADS * DIM * sizeof *keys);
  for (size_t t = 0; t < QKV_PAGE_TOKENS && from->shape.rope.theta != 0; t++) {
    for (size_t h = 0; h < HEADS; h++) {
      qkv_rope_forward(&from->shape.rope, keys + (t * HEADS + h) * DIM, position + t);
    }
  }
  return keys;
}

static uint64_t slots_of(const qkv_coder *coder, uint16_t head, uint64_t position, uint32_t tokens,
                         const float *keys) {
  return qkv_heavy_slots(coder, head, position, tokens, QKV_FP32, keys + (size_t)head * DIM,
                         (size_t)HEADS * DIM * sizeof *keys);
}

// Rows with much of what queries seek are found, wherever they stand; at most QKV_HEAVY_MOST, those with the most.
static void test_planted_rows_are_found(void **state) {
  (void)state;
  for (int rope = 0; rope < 2; rope++) {
    traffic from = make_traffic(rope != 0, true);
    const qkv_calibration *calibration = learn(&from);
    qkv_coder *coder = coder_with(calibration, rope != 0, 2);
    static const uint64_t positions[] = {0, 64, 6400, 1 << 20};
    for (size_t i = 0; i < sizeof positions / sizeof positions[0]; i++) {
      // Nothing of what is sought in any row but the planted ones.
      for (size_t t = 0; t < QKV_PAGE_TOKENS * (size_t)HEADS; t++) {
        for (size_t j = 0; j < DIM; j++) from.k[t * DIM + j] *= 1 - from.sought[j];
      }
      float *none = page_of(&from, 0, positions[i]);
      assert_int_equal(slots_of(coder, 1, positions[i], QKV_PAGE_TOKENS, none), 0);
      static const size_t planted[] = {9, 33, 60};
      for (size_t p = 0; p < 3; p++) {
        for (size_t j = 0; j < DIM; j++) {
          from.k[(planted[p] * HEADS + 1) * DIM + j] += (float)(2 + p) * from.sought[j];
        }
      }
      float *keys = page_of(&from, 0, positions[i]);
      assert_int_equal(slots_of(coder, 1, positions[i], QKV_PAGE_TOKENS, keys),
                       (uint64_t)1 << 33 | (uint64_t)1 << 60);
      assert_int_equal(slots_of(coder, 1, positions[i], 50, keys), (uint64_t)1 << 9 | (uint64_t)1 << 33);
      assert_int_equal(slots_of(coder, 0, positions[i], QKV_PAGE_TOKENS, keys), 0);
      coder_own(coder)->sinks = (uint32_t)positions[i] + 40;  // these are outliers whatever they are
      assert_int_equal(slots_of(coder, 1, positions[i], QKV_PAGE_TOKENS, keys), (uint64_t)1 << 60);
      coder_own(coder)->sinks = 0;
      free(none);
      free(keys);
    }
    coder_destroy(coder);
    qkv_calibration_unref(&calibration);
    free_traffic(&from);
  }
}

// They are kept as outliers, keys and values, where codes have few bits.
static void test_they_are_outliers(void **state) {
  (void)state;
  traffic from = make_traffic(true, true);
  const qkv_calibration *calibration = learn(&from);
  for (double bits = 2; bits <= 8; bits += 6) {
    qkv_coder *coder = coder_with(calibration, true, bits);
    for (size_t first = 0; first < TOKENS; first += QKV_PAGE_TOKENS) {
      float *keys = page_of(&from, first, FIRST);
      uint8_t *image = aligned_alloc(64, (coder->codec->page_bytes_max(coder) + 63) / 64 * 64);
      assert_non_null(image);
      (void)coder->codec->encode(coder, FIRST, QKV_PAGE_TOKENS, QKV_FP32, keys, from.v + first * HEADS * DIM, NULL,
                                 image);
      for (uint16_t head = 0; head < HEADS; head++) {
        const uint64_t heavy = slots_of(coder, head, FIRST, QKV_PAGE_TOKENS, keys);
        for (qkv_part part = QKV_K; part <= QKV_V; part++) {
          qkv_outliers kept = {0};
          const bool any = qkv_outliers_find(image, head, part, &kept);
          assert_int_equal(any ? qkv_outliers_mask(&kept) : 0, bits == 2 ? heavy : 0);
        }
      }
      free(image);
      free(keys);
    }
    coder_destroy(coder);
  }
  qkv_calibration_unref(&calibration);
  free_traffic(&from);
}

// About as many as of a normal distribution beyond two deviations, at most, where pages have no more than they may.
static void test_they_are_few(void **state) {
  (void)state;
  traffic from = make_traffic(true, true);
  const qkv_calibration *calibration = learn(&from);
  qkv_coder *coder = coder_with(calibration, true, 2);
  size_t found = 0;
  for (size_t first = 0; first < TOKENS; first += QKV_PAGE_TOKENS) {
    float *keys = page_of(&from, first, first);
    for (uint16_t head = 0; head < HEADS; head++) {
      found += (size_t)__builtin_popcountll(slots_of(coder, head, first, QKV_PAGE_TOKENS, keys));
    }
    free(keys);
  }
  assert_in_range(found, TOKENS * HEADS / 100, TOKENS * HEADS * 3 / 100);
  coder_destroy(coder);
  qkv_calibration_unref(&calibration);
  free_traffic(&from);
}

// Keys that are all alike have none, and their calibration is one all the same.
static void test_equal_keys_have_none(void **state) {
  (void)state;
  traffic from = make_traffic(false, true);
  for (size_t i = 0; i < (size_t)TOKENS * HEADS * DIM; i++) from.k[i] = (float)(i % DIM);
  const qkv_calibration *calibration = learn(&from);
  float least;
  for (uint32_t head = 0; head < HEADS; head++) assert_null(qkv_calibration_heavy(calibration, 0, head, &least));
  qkv_calibration_unref(&calibration);
  free_traffic(&from);
}

// A calibration may be told to forget some heads'.
static void test_forgetting(void **state) {
  (void)state;
  traffic from = make_traffic(true, true);
  const qkv_calibration *calibration = learn(&from);
  const uint32_t before = qkv_calibration_version(calibration);
  const bool forget[HEADS] = {false, true};
  qkv_calibration *left = NULL;
  float least;
  assert_int_equal(qkv_calibration_adjust(&calibration, NULL, NULL, forget, &left, NULL), QKV_OK);
  assert_null(calibration);
  assert_int_not_equal(qkv_calibration_version(left), before);
  assert_non_null(qkv_calibration_heavy(left, 0, 0, &least));
  assert_null(qkv_calibration_heavy(left, 0, 1, &least));
  const qkv_calibration *reference = left;
  qkv_calibration_unref(&reference);
  free_traffic(&from);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_planted_rows_are_found),
      cmocka_unit_test(test_they_are_outliers),
      cmocka_unit_test(test_they_are_few),
      cmocka_unit_test(test_equal_keys_have_none),
      cmocka_unit_test(test_forgetting),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
