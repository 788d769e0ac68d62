#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
// cmocka wants the above first
#include <cmocka.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "engine/codec/calibration_internal.h"
#include "engine/codec/codec.h"
#include "engine/codec/commvq_book.h"
#include "engine/codec/pq_book.h"
#include "naive.h"

static qkv_calibration_shape shape_of(uint32_t key_dim, uint32_t value_dim, bool rope) {
  qkv_calibration_shape shape = {
      .layers = 2, .kv_heads = 2, .q_heads = 4, .key_dim = key_dim, .value_dim = value_dim};
  if (rope) {
    shape.rope = (qkv_rope){.theta = 10000,
                            .width = 8,
                            .interleaved = true,
                            .scaling = QKV_ROPE_YARN,
                            .factor = 4,
                            .original_max_position = 2048,
                            .beta_slow = 2};
    assert_int_equal(qkv_rope_resolve(&shape.rope, key_dim, NULL), QKV_OK);
  }
  return shape;
}

// A part made of numbers that fp32 has exactly: a scaled permutation and its dual, the bits given band after band.
static void fill_part(const qkvi_part_view *part, unsigned seed) {
  for (size_t c = 0; c < part->dim; c++) {
    const size_t to = (c * 5 + seed) % part->dim;  // 5 has no divisor in common with a multiple of 8
    const float size = (float)(1 << (c % 4));
    part->mean[c] = (float)c - 0.5f * (float)seed;
    part->weights[c] = 1.0f / (float)(1 + c + seed);
    part->analysis[c * part->dim + to] = 1 / size;
    part->synthesis[c * part->dim + to] = size;
  }
  const size_t bands = part->dim / part->band;
  for (size_t i = 0; i < part->order_count; i++) part->order[i] = (uint8_t)(i % bands);
  if (seed % 2 == 1) {
    for (size_t i = 0; i < part->order_count; i++) part->order[i] = (uint8_t)(i / QKV_DEPTH_MAX);
  }
  part->header->tier_offset = (int8_t)((int)(seed % 5) - 2);
  if (part->heavy != NULL) part->header->heavy_least = 0.5f + (float)seed;
  for (size_t i = 0; i < part->dim && part->heavy != NULL; i++) part->heavy[i] = (float)i - 3;
  if (part->anchor == NULL) return;
  part->header->anchor_pairs = 2;
  part->pair_indices[0] = 1;
  part->pair_indices[1] = 3;
  for (size_t i = 0; i < 4; i++) part->anchor[i] = (float)i + 0.25f * (float)seed;
}

static uint8_t *make_bytes_of(const qkv_calibration_shape *shape, uint32_t format, uint8_t band_k, uint8_t band_v,
                              size_t *size) {
  uint8_t *bytes = NULL;
  assert_int_equal(qkvi_calibration_begin(shape, format, band_k, band_v, &bytes, NULL), QKV_OK);
  qkvi_calibration_header *header = (qkvi_calibration_header *)bytes;
  header->tokens = 12345;
  unsigned seed = 0;
  for (uint32_t layer = 0; layer < shape->layers; layer++) {
    for (uint32_t head = 0; head < shape->kv_heads; head++) {
      for (unsigned part = 0; part < QKV_CALIBRATION_PARTS; part++) {
        if (part == QKV_PART_K_ARCHIVE && shape->rope.theta == 0) continue;
        const qkvi_part_view view = qkvi_calibration_part(shape, bytes, layer, head, part);
        fill_part(&view, seed++);
      }
    }
  }
  *size = (size_t)header->bytes;
  qkvi_calibration_seal(bytes, *size);
  return bytes;
}

// In the first format.
static uint8_t *make_bytes(const qkv_calibration_shape *shape, uint8_t band_k, uint8_t band_v, size_t *size) {
  return make_bytes_of(shape, 1, band_k, band_v, size);
}

static qkv_calibration *read_bytes(const uint8_t *bytes, size_t size) {
  qkv_calibration *calibration = NULL;
  qkv_error error = {0};
  const qkv_status status = qkv_calibration_read(bytes, size, &calibration, &error);
  if (status != QKV_OK) print_error("%s\n", error.text);
  assert_int_equal(status, QKV_OK);
  return calibration;
}

static void unref(const qkv_calibration *calibration) {
  qkv_calibration_unref(&calibration);
  assert_null(calibration);
}

// The offsets of the drawing in calibration.h, of the first head.
static void bytes_are_as_drawn(void **state) {
  (void)state;
  const qkv_calibration_shape shape = shape_of(16, 8, true);
  size_t size;
  uint8_t *b = make_bytes(&shape, 8, 8, &size);
  assert_memory_equal(b, "QKVC", 4);
  assert_int_equal(naive_read(b, 4, 4), 1);
  assert_int_equal(naive_read(b, 8, 8), size);
  static const uint32_t counts[] = {2, 2, 4, 16, 8};
  for (size_t i = 0; i < 5; i++) assert_int_equal(naive_read(b, 24 + 4 * i, 4), counts[i]);
  assert_int_equal(b[44], 8);
  assert_int_equal(b[45], 8);
  assert_int_equal(naive_read(b, 48, 8), 12345);
  double theta;
  memcpy(&theta, b + 56, sizeof theta);
  assert_true(theta == 10000);
  assert_int_equal(naive_read(b, 64, 4), 8);
  assert_int_equal(b[68], 1);
  assert_int_equal(b[69], QKV_ROPE_YARN);
  assert_int_equal(naive_read(b, 80, 8), 2048);
  const size_t attend = 64 + 64 + 64 + 64 + 1024 + 1024 + 128 + 512, archive = attend - 640;
  const size_t values = 64 + 64 + 64 + 64 + 256 + 256;
  assert_int_equal(size, 192 + 4 * (attend + archive + values));
  assert_int_equal(naive_read(b, 192, 2), 2);
  assert_int_equal((int8_t)b[194], -2);
  assert_int_equal(b[192 + 64 + 1], 1);
  float mean;
  memcpy(&mean, b + 192 + 128 + 12, sizeof mean);
  assert_true(mean == 3);
  assert_int_equal(naive_read(b, 192 + attend - 640 + 2, 2), 3);
  free(b);
}

// The second format has neither list of pairs nor anchor: the mean of what turns is it.
static void the_mean_of_what_turns_is_the_anchor(void **state) {
  (void)state;
  const qkv_calibration_shape shape = shape_of(16, 8, true);
  size_t size;
  uint8_t *b = make_bytes_of(&shape, 2, 8, 8, &size);
  assert_int_equal(naive_read(b, 4, 4), 2);
  const size_t keys = 64 + 64 + 64 + 64 + 1024 + 1024, values = 64 + 64 + 64 + 64 + 256 + 256;
  const size_t heavy = 64;
  assert_int_equal(size, 192 + 4 * (2 * keys + heavy + values));
  qkv_calibration *calibration = read_bytes(b, size);
  float least = 0;
  const float *predictor = qkv_calibration_heavy(calibration, 0, 0, &least);
  assert_true(least == 0.5f);
  assert_non_null(predictor);
  assert_memory_equal(predictor, b + 192 + keys, 16 * sizeof *predictor);
  const qkv_transform *transform = qkv_calibration_transform(calibration, 0, 0, QKV_PART_K_ATTEND);
  assert_int_equal(transform->plan->rule, QKV_TURN_BLOCKS);
  assert_int_equal(transform->anchor_pairs, 4);
  for (size_t i = 0; i < 16; i++) {  // interleaved, of width 8
    assert_true(transform->mean[i] == (i < 8 ? 0 : (float)i));
    if (i < 8) assert_true(transform->anchor[i] == (float)i);
  }
  assert_null(qkv_calibration_transform(calibration, 0, 0, QKV_PART_K_ARCHIVE)->plan);
  unref(calibration);
  // A pair count there is one too many.
  b[192] = 1;
  qkvi_calibration_seal(b, size);
  qkv_error error = {0};
  assert_int_equal(qkv_calibration_read(b, size, &calibration, &error), QKV_DATA_LOSS);
  assert_string_equal(error.text, "calibration, layer 0, KV head 0, k_attend: anchor_pairs is 1, at most 0");
  free(b);
}

static void parts_are_found_again(void **state) {
  (void)state;
  for (unsigned rope = 0; rope < 2; rope++) {
    const qkv_calibration_shape shape = shape_of(32, 24, rope == 1);
    size_t size, held;
    uint8_t *bytes = make_bytes(&shape, 16, 8, &size);
    qkv_calibration *calibration = read_bytes(bytes, size);
    assert_memory_equal(qkv_calibration_bytes(calibration, &held), bytes, size);
    assert_int_equal(held, size);
    assert_int_equal(qkv_calibration_tokens(calibration), 12345);
    unsigned seed = 0;
    for (uint32_t layer = 0; layer < shape.layers; layer++) {
      for (uint32_t head = 0; head < shape.kv_heads; head++) {
        for (unsigned part = 0; part < QKV_CALIBRATION_PARTS; part++) {
          const qkv_transform *transform = qkv_calibration_transform(calibration, layer, head, part);
          if (part == QKV_PART_K_ARCHIVE && rope == 0) {
            assert_memory_equal(transform, qkv_calibration_transform(calibration, layer, head, QKV_PART_K_ATTEND),
                                sizeof *transform);
            continue;
          }
          assert_int_equal(transform->schedule->dim, part == QKV_PART_V ? 24 : 32);
          assert_true(transform->mean[3] == 3 - 0.5f * (float)seed);
          assert_true(transform->weights[7] == 1.0f / (float)(8 + seed));
          assert_int_equal(transform->anchor_pairs, rope == 1 && part == QKV_PART_K_ATTEND ? 2 : 0);
          if (transform->anchor_pairs == 2) {
            assert_int_equal(transform->pair_indices[1], 3);
            assert_true(transform->anchor[2] == 2 + 0.25f * (float)seed);
          }
          assert_int_equal(qkv_calibration_tier_offset(calibration, layer, head, part), (int)(seed % 5) - 2);
          float row[32], back[32];
          for (size_t i = 0; i < 32; i++) back[i] = row[i] = (float)(i * i);
          qkv_transform_forward(transform, back, 1, transform->schedule->dim);
          qkv_transform_inverse(transform, back, 1, transform->schedule->dim);
          // Of lengths of 2600, both ways (kernel/dense.h).
          for (size_t i = 0; i < transform->schedule->dim; i++) assert_true(fabsf(row[i] - back[i]) <= 0.31f);
          seed++;
        }
      }
    }
    unref(calibration);
    free(bytes);
  }
}

// Bands one after the other, and in turns.
static void orders_become_schedules(void **state) {
  (void)state;
  const qkv_calibration_shape shape = shape_of(32, 8, false);
  size_t size;
  uint8_t *bytes = make_bytes(&shape, 16, 8, &size);
  qkv_calibration *calibration = read_bytes(bytes, size);
  // Layer 0, head 0: seed 0, in turns; head 1: seed 2, too; V of head 0: seed 1, one after the other.
  const qkv_schedule *turns = qkv_calibration_transform(calibration, 0, 0, QKV_PART_K_ATTEND)->schedule;
  static const uint16_t tier_12[] = {32, 32, 16, 0, 0, 0, 0, 0, 0};  // three increments
  assert_memory_equal(turns->reach[12], tier_12, sizeof tier_12);
  assert_memory_equal(turns->reach[15], tier_12, sizeof tier_12);
  assert_int_equal(turns->reach[16][2], 32);
  assert_int_equal(turns->reach[64][8], 32);
  assert_int_equal(turns->reach[3][1], 0);
  const qkv_schedule *single = qkv_calibration_transform(calibration, 0, 0, QKV_PART_V)->schedule;
  assert_int_equal(single->reach[15][1], 8);
  assert_int_equal(single->reach[15][2], 0);
  unref(calibration);
  free(bytes);
  const uint8_t order[] = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1};
  qkv_schedule schedule;
  qkvi_schedule_from_order(order, sizeof order, 16, 8, &schedule);
  assert_null(qkv_schedule_validate(&schedule));
  assert_int_equal(schedule.reach[32][8], 8);
  assert_int_equal(schedule.reach[32][1], 8);
  assert_int_equal(schedule.reach[36][1], 16);
}

static void versions_follow_the_content(void **state) {
  (void)state;
  const qkv_calibration_shape shape = shape_of(16, 8, true);
  size_t size;
  uint8_t *bytes = make_bytes(&shape, 8, 8, &size);
  qkv_calibration *one = read_bytes(bytes, size), *same = read_bytes(bytes, size);
  const qkvi_part_view part = qkvi_calibration_part(&shape, bytes, 1, 1, QKV_PART_V);
  part.mean[0] += 1;
  qkvi_calibration_seal(bytes, size);
  qkv_calibration *other = read_bytes(bytes, size);
  assert_int_not_equal(qkv_calibration_version(one), 0);
  assert_int_equal(qkv_calibration_version(one), qkv_calibration_version(same));
  assert_int_not_equal(qkv_calibration_version(one), qkv_calibration_version(other));
  const qkv_calibration *again = qkv_calibration_ref(one);
  unref(one);
  assert_int_equal(qkv_calibration_tokens(again), 12345);
  unref(again);
  unref(same);
  unref(other);
  assert_null(qkv_calibration_ref(NULL));
  unref(NULL);
  free(bytes);
}

static void expect_misfit(const qkv_calibration *calibration, const qkv_calibration_shape *model, const char *text) {
  qkv_error error = {0};
  assert_int_equal(qkv_calibration_check(calibration, model, &error), QKV_INVALID_ARGUMENT);
  assert_string_equal(error.text, text);
}

static void another_model_is_told_apart(void **state) {
  (void)state;
  const qkv_calibration_shape shape = shape_of(16, 8, true);
  size_t size;
  uint8_t *bytes = make_bytes(&shape, 8, 8, &size);
  qkv_calibration *calibration = read_bytes(bytes, size);
  assert_int_equal(qkv_calibration_check(calibration, &shape, NULL), QKV_OK);
  qkv_calibration_shape model = shape;
  model.key_dim = 128;
  expect_misfit(calibration, &model, "calibration.key_dim is 16, the model has 128");
  model = shape;
  model.layers = 3;
  expect_misfit(calibration, &model, "calibration.layers is 2, the model has 3");
  model = shape;
  model.rope.theta = 500000;
  expect_misfit(calibration, &model, "calibration.rope.theta is 10000, the model has 500000");
  model = shape;
  model.rope.interleaved = false;
  expect_misfit(calibration, &model, "calibration.rope.pairing is not the model's");
  unref(calibration);
  free(bytes);
}

// ---- Damage ----

static void expect_refused(const uint8_t *bytes, size_t size, qkv_status status, const char *text) {
  // Of any alignment, and with nothing behind it.
  uint8_t *copy = malloc(size + 1);
  assert_non_null(copy);
  memcpy(copy + 1, bytes, size);
  qkv_calibration *calibration = (qkv_calibration *)copy;
  qkv_error error = {0};
  assert_int_equal(qkv_calibration_read(copy + 1, size, &calibration, &error), status);
  assert_null(calibration);
  if (text != NULL) assert_string_equal(error.text, text);
  assert_int_equal(qkv_calibration_read(copy + 1, size, &calibration, NULL), status);
  free(copy);
}

typedef struct damage {
  size_t offset;
  uint32_t value;  // four bytes
  qkv_status status;
  const char *text;
} damage;

// Of a file with a right checksum. Layer 0, KV head 0: K attend at 192, K archive at 192 + 2944, V at 192 + 2944 +
// 2304.
static const damage damages[] = {
    {0, 0x50564b51, QKV_DATA_LOSS,
     "calibration.magic is 0x50564b51, expected 0x43564b51: this is no calibration file"},
    {4, 0, QKV_INVALID_ARGUMENT, "calibration.format is 0, this build reads 1 to 3"},
    {4, 4, QKV_INVALID_ARGUMENT, "calibration.format is 4, this build reads 1 to 3"},
    {4, 2, QKV_DATA_LOSS, "calibration has 24256 bytes, its geometry takes 21952"},
    {24, 0, QKV_INVALID_ARGUMENT, "calibration.layers is 0, allowed are 1 to 1024"},
    {28, 2000, QKV_INVALID_ARGUMENT, "calibration.kv_heads is 2000, allowed are 1 to 1024"},
    {32, 5, QKV_INVALID_ARGUMENT, "calibration.q_heads is 5, must be a multiple of kv_heads 2"},
    {36, 1032, QKV_INVALID_ARGUMENT, "calibration.key_dim is 1032, allowed are multiples of 8 from 8 to 1024"},
    {40, 7, QKV_INVALID_ARGUMENT, "calibration.value_dim is 7, allowed are multiples of 8 from 8 to 1024"},
    {44, 0x1010, QKV_INVALID_ARGUMENT,
     "calibration.band_v is 16, allowed are 8 and 16 where they divide value_dim 8"},
    {44, 0x0805, QKV_INVALID_ARGUMENT, "calibration.band_k is 5, allowed are 8 and 16 where they divide key_dim 16"},
    {24, 3, QKV_DATA_LOSS, "calibration has 24256 bytes, its geometry takes 36288"},
    {60, 0x7ff80000, QKV_DATA_LOSS, "calibration.rope.theta is nan"},
    {64, 18, QKV_INVALID_ARGUMENT, "calibration.rope.width is 18, at most key_dim 16"},
    {68, 0x0601, QKV_INVALID_ARGUMENT, "calibration.rope.scaling is 6, known are 0 to 4"},
    {88, 1, QKV_INVALID_ARGUMENT, "calibration.rope has fields that its scaling does not use"},
    {128, 1, QKV_DATA_LOSS, "calibration has something in reserved fields"},
    {192, 5, QKV_DATA_LOSS, "calibration, layer 0, KV head 0, k_attend: anchor_pairs is 5, at most 4"},
    {192, 0x00dc0000, QKV_DATA_LOSS,
     "calibration, layer 0, KV head 0, k_attend: tier_offset is -36, allowed are -32 to 32"},
    {192 + 8, 1, QKV_DATA_LOSS, "calibration, layer 0, KV head 0, k_attend: something is in reserved fields"},
    {192 + 64, 0x00010002, QKV_DATA_LOSS,
     "calibration, layer 0, KV head 0, k_attend: order[0] is 2, there are 2 bands"},
    {192 + 64, 0x00010001, QKV_DATA_LOSS,
     "calibration, layer 0, KV head 0, k_attend: order[0] gives band 1 more bits than the one before"},
    {192 + 64 + 12, 0, QKV_DATA_LOSS,
     "calibration, layer 0, KV head 0, k_attend: order[14] gives band 0 more than 8 bits"},
    {192 + 2304, 0x00040001, QKV_DATA_LOSS,
     "calibration, layer 0, KV head 0, k_attend: pair_indices[1] is 4, there are 4 pairs"},
    {192 + 2304, 0x00010001, QKV_DATA_LOSS,
     "calibration, layer 0, KV head 0, k_attend: pair_indices[1] is 1, not above the one before"},
    {192 + 2304 + 128, 0x7fc00000, QKV_DATA_LOSS,
     "calibration, layer 0, KV head 0, k_attend: anchor[0] is nan, allowed are -1e+06 to 1e+06"},
    {192 + 2944, 1, QKV_DATA_LOSS, "calibration, layer 0, KV head 0, k_archive: anchor_pairs is 1, at most 0"},
    {192 + 2944 + 128, 0x7f800000, QKV_DATA_LOSS,
     "calibration, layer 0, KV head 0, k_archive: mean[0] is inf, allowed are -1e+06 to 1e+06"},
    {192 + 2944 + 192 + 4, 0, QKV_DATA_LOSS,
     "calibration, layer 0, KV head 0, k_archive: weights[1] is 0, allowed are 1e-18 to 1e+09"},
    {192 + 2944 + 256 + 4, 0x7f7fffff, QKV_DATA_LOSS,
     "calibration, layer 0, KV head 0, k_archive: analysis[1] is 3.40282e+38, allowed are -1e+09 to 1e+09"},
    {192 + 2944 + 2304 + 256 + 256 + 4, 0x42c80000, QKV_DATA_LOSS, NULL},  // the dual is none: 100 somewhere
};

static void damage_is_told(void **state) {
  (void)state;
  const qkv_calibration_shape shape = shape_of(16, 8, true);
  size_t size;
  uint8_t *bytes = make_bytes(&shape, 8, 8, &size);
  for (size_t i = 0; i < sizeof damages / sizeof damages[0]; i++) {
    uint8_t *copy = malloc(size);
    assert_non_null(copy);
    memcpy(copy, bytes, size);
    memcpy(copy + damages[i].offset, &damages[i].value, sizeof damages[i].value);
    qkvi_calibration_seal(copy, size);
    expect_refused(copy, size, damages[i].status, damages[i].text);
    free(copy);
  }
  free(bytes);
}

// Numbers that are within their limits each, but not together: squares of rows would overflow.
static void absurd_products_are_refused(void **state) {
  (void)state;
  const qkv_calibration_shape shape = shape_of(16, 8, false);
  size_t size;
  for (size_t which = 0; which < 2; which++) {
    uint8_t *bytes = make_bytes(&shape, 8, 8, &size);
    const qkvi_part_view part = qkvi_calibration_part(&shape, bytes, 0, 0, QKV_PART_K_ATTEND);
    for (size_t i = 0; i < (which == 0 ? part.dim : 1u); i++) part.analysis[i] = 1e9f;
    part.mean[0] = 0;
    part.weights[0] = which == 0 ? 1e-18f : 1e9f;
    qkvi_calibration_seal(bytes, size);
    expect_refused(bytes, size, QKV_DATA_LOSS,
                   which == 0
                       ? "calibration, layer 0, KV head 0, k_attend: coordinate 0 of a row can be 1.0487e+15, "
                         "at most 1e+15"
                       : "calibration, layer 0, KV head 0, k_attend: coordinate 0 of a row can have a weighted "
                         "square of 4.29497e+36, at most 1e+30");
    free(bytes);
  }
}

static void every_cut_and_every_flip_is_refused(void **state) {
  (void)state;
  const qkv_calibration_shape shape = {.layers = 1, .kv_heads = 1, .q_heads = 1, .key_dim = 8, .value_dim = 8};
  size_t size;
  uint8_t *bytes = make_bytes(&shape, 8, 8, &size);
  unref(read_bytes(bytes, size));
  expect_refused(bytes, 100, QKV_DATA_LOSS, "calibration has 100 bytes, its header alone takes 192");
  expect_refused(bytes, size - 1, QKV_DATA_LOSS, "calibration.bytes is 1728, there are 1727");
  for (size_t cut = 0; cut < size; cut += 1 + cut / 16) expect_refused(bytes, cut, QKV_DATA_LOSS, NULL);
  for (size_t at = 0; at < size; at++) {
    bytes[at] ^= (uint8_t)(1u << at % 8);
    qkv_calibration *calibration = NULL;
    assert_int_not_equal(qkv_calibration_read(bytes, size, &calibration, NULL), QKV_OK);
    bytes[at] ^= (uint8_t)(1u << at % 8);
  }
  unref(read_bytes(bytes, size));
  free(bytes);
}

static void limits_hold_for_writers(void **state) {
  (void)state;
  qkv_calibration_shape shape = shape_of(16, 8, true);
  uint8_t *bytes = NULL;
  qkv_error error = {0};
  shape.layers = 1024;
  shape.kv_heads = shape.q_heads = 1024;
  shape.key_dim = 1024;
  assert_int_equal(qkvi_calibration_begin(&shape, 2, 8, 8, &bytes, &error), QKV_INVALID_ARGUMENT);
  assert_string_equal(error.text, "a calibration of this geometry takes more than 4294967296 bytes");
  assert_null(bytes);
}

// Bytes of format 1 as they were first written are read, and written, for ever.
static void check_golden(const char *path, uint32_t format, uint32_t version) {
  qkv_calibration_shape shape = shape_of(16, 8, true);
  shape.layers = shape.kv_heads = shape.q_heads = 1;
  size_t size;
  uint8_t *bytes = make_bytes_of(&shape, format, 16, 8, &size), *golden = malloc(size + 1);
  assert_non_null(golden);
  FILE *file = fopen(path, "rb");
  if (file == NULL) fail_msg("cannot open %s", path);
  assert_int_equal(fread(golden, 1, size + 1, file), size);
  assert_int_equal(fclose(file), 0);
  assert_memory_equal(bytes, golden, size);
  qkv_calibration *calibration = read_bytes(golden, size);
  assert_int_equal(qkv_calibration_version(calibration), version);
  unref(calibration);
  free(golden);
  free(bytes);
}

static void golden_files(void **state) {
  (void)state;
  check_golden(QKV_SOURCE_DIR "/tests/golden/calibration_v1.bin", 1, 0xbc76b808);
  check_golden(QKV_SOURCE_DIR "/tests/golden/calibration_v2.bin", 2, 0x86fe226a);
}

// ---- Sections ----

// A small calibration with the sections that sessions of these policies use.
static qkv_calibration *make_for(const qkv_policy *policies, size_t count, size_t *begin) {
  qkv_calibration_shape shape = shape_of(16, 8, true);
  shape.layers = shape.kv_heads = shape.q_heads = 1;
  uint8_t *bytes = make_bytes_of(&shape, 3, 16, 8, begin);
  const qkv_calibration *plain = read_bytes(bytes, *begin);
  free(bytes);
  qkv_section_wants wants = {0};
  for (size_t i = 0; i < count; i++) qkv_section_want(&wants, &policies[i]);
  qkv_calibration *calibration = NULL;
  assert_int_equal(qkv_calibration_add_sections(&plain, &wants, NULL, &calibration, NULL), QKV_OK);
  assert_null(plain);
  assert_int_equal(calibration->size - *begin, qkv_calibration_sections_cost(&shape, &wants));
  return calibration;
}

// Of pq with 2 and 4 bits: 12 KiB each.
static qkv_calibration *make_with_sections(size_t *begin) {
  const qkv_codec *pq = qkv_codec_by_name("pq"), *kivi = qkv_codec_by_name("kivi");
  const qkv_policy policies[] = {{.codec = pq, .bits_k = 2, .bits_v = 4},
                                 {.codec = kivi, .bits_k = 2, .bits_v = 2},
                                 {.codec = kivi, .codec_v = pq, .bits_k = 2, .bits_v = 1}};
  qkv_calibration *calibration = make_for(policies, 3, begin);
  assert_int_equal(calibration->size, *begin + 2 * (64 + 512 * (16 + 8)));
  return calibration;
}

// Of commvq with 1 and 2 bits, of keys alone: 1 and 2 KiB.
static qkv_calibration *make_with_commvq(size_t *begin) {
  const qkv_codec *commvq = qkv_codec_by_name("commvq");
  const qkv_policy policies[] = {{.codec = commvq, .bits_k = 1, .bits_v = 1},
                                 {.codec = commvq, .bits_k = 2, .bits_v = 1}};
  qkv_calibration *calibration = make_for(policies, 2, begin);
  assert_int_equal(calibration->size, *begin + 64 + 1024 + 64 + 2048);
  return calibration;
}

static void sections_are_found_again(void **state) {
  (void)state;
  size_t begin, size;
  qkv_calibration *made = make_with_sections(&begin);
  const void *file = qkv_calibration_bytes(made, &size);
  qkv_calibration *calibration = read_bytes(file, size);
  const uint8_t *bytes = calibration->bytes;
  assert_int_equal(qkvi_calibration_section(calibration, 7, 2, 0, 0) - bytes, begin + 64);
  assert_int_equal(qkvi_calibration_section(calibration, 7, 4, 0, 0) - bytes, begin + 64 + 12288 + 64);
  assert_null(qkvi_calibration_section(calibration, 7, 1, 0, 0));
  assert_null(qkvi_calibration_section(calibration, 9, 2, 0, 0));
  // What is adjusted has them, too: those of parts that stay.
  bool drop[QKV_CALIBRATION_PARTS] = {true, false, true};
  uint8_t *points = malloc(12288);
  assert_non_null(points);
  memcpy(points, bytes + begin + 64, 12288);
  const qkv_calibration *whole = calibration;
  assert_int_equal(qkv_calibration_adjust(&whole, drop, NULL, NULL, &calibration, NULL), QKV_OK);
  assert_memory_equal(qkvi_calibration_section(calibration, 7, 2, 0, 0), points, 8192);
  assert_memory_not_equal(qkvi_calibration_section(calibration, 7, 2, 0, 0) + 8192, points + 8192, 4096);
  free(points);
  unref(calibration);
  unref(made);
  // Nothing that is wanted: the same calibration.
  const qkv_calibration_shape shape = shape_of(16, 8, true);
  uint8_t *plain = make_bytes_of(&shape, 3, 16, 8, &size);
  const qkv_calibration *before = read_bytes(plain, size), *same = before;
  free(plain);
  assert_int_equal(qkv_calibration_add_sections(&before, &(qkv_section_wants){0}, NULL, &calibration, NULL), QKV_OK);
  assert_ptr_equal(calibration, same);
  // Called off.
  before = calibration;
  qkv_section_wants wants = {0};
  const qkv_policy policy = {.codec = qkv_codec_by_name("pq"), .bits_k = 1, .bits_v = 1};
  const _Atomic bool cancelled = true;
  qkv_section_want(&wants, &policy);
  assert_int_equal(qkv_calibration_add_sections(&before, &wants, &cancelled, &calibration, NULL), QKV_CANCELLED);
  assert_null(calibration);
}

static void damaged_sections_are_told(void **state) {
  (void)state;
  size_t begin, size;
  qkv_calibration *calibration = make_with_sections(&begin);
  const void *file = qkv_calibration_bytes(calibration, &size);
  uint8_t *bytes = malloc(size);
  assert_non_null(bytes);
  memcpy(bytes, file, size);
  const size_t second = begin + 64 + 12288;
  const damage all[] = {
      {begin, 0x00020108, QKV_INVALID_ARGUMENT, "calibration has a section of codec 8, which this build has not"},
      {begin, 0x00020207, QKV_INVALID_ARGUMENT, "calibration's section of pq has version 2, this build reads 1"},
      {begin, 0x00030107, QKV_DATA_LOSS, "calibration's section of pq is of 3 bits"},
      {begin, 0x01020107, QKV_DATA_LOSS, "calibration's section of pq has something in reserved fields"},
      {begin + 32, 1, QKV_DATA_LOSS, "calibration's section of pq has something in reserved fields"},
      {begin, 0x00040107, QKV_DATA_LOSS, "calibration's section of pq with 4 bits is out of order"},
      {begin + 8, 0x00003000, QKV_DATA_LOSS, "calibration's section of pq has 12288 bytes of 24704, it takes 12352"},
      {begin + 64, 0x7c000000, QKV_DATA_LOSS,
       "calibration's section of pq with 2 bits: a point's coordinate is not within -64 to 64"},
      {second + 64 + 12284, 0x00007e00, QKV_DATA_LOSS,
       "calibration's section of pq with 4 bits: a point's coordinate is not within -64 to 64"},
  };
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
    uint32_t before;
    memcpy(&before, bytes + all[i].offset, sizeof before);
    memcpy(bytes + all[i].offset, &all[i].value, sizeof before);
    qkvi_calibration_seal(bytes, size);
    // Out of order is what the second one is.
    expect_refused(bytes, size, all[i].status, all[i].text);
    memcpy(bytes + all[i].offset, &before, sizeof before);
  }
  // Cut behind the first section, and in the second one.
  const size_t ends[] = {second, second + 63, second + 64, size - 64};
  for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
    ((qkvi_calibration_header *)bytes)->bytes = ends[i];
    qkvi_calibration_seal(bytes, ends[i]);
    if (i == 0) {
      unref(read_bytes(bytes, ends[i]));
    } else {
      expect_refused(bytes, ends[i], QKV_DATA_LOSS, NULL);
    }
  }
  free(bytes);
  unref(calibration);
}

static void damaged_entries_are_told(void **state) {
  (void)state;
  size_t begin, size;
  // No section for bits that only values have.
  const qkv_policy one = {.codec = qkv_codec_by_name("commvq"), .bits_k = 1, .bits_v = 2};
  qkv_calibration *calibration = make_for(&one, 1, &begin);
  assert_int_equal(calibration->size, begin + 64 + 1024);
  unref(calibration);
  calibration = make_with_commvq(&begin);
  const void *file = qkv_calibration_bytes(calibration, &size);
  uint8_t *bytes = malloc(size);
  assert_non_null(bytes);
  memcpy(bytes, file, size);
  const damage all[] = {
      {begin, 0x00010209, QKV_INVALID_ARGUMENT, "calibration's section of commvq has version 2, this build reads 1"},
      {begin, 0x00040109, QKV_DATA_LOSS, "calibration's section of commvq is of 4 bits"},
      {begin, 0x00020109, QKV_DATA_LOSS, "calibration's section of commvq has 1088 bytes of 3200, it takes 2112"},
      {begin + 64, 0x7fc00000, QKV_DATA_LOSS,
       "calibration's section of commvq with 1 bits: an entry's coordinate is not within -1e8 to 1e8"},
      {size - 4, 0xccbebc21, QKV_DATA_LOSS,
       "calibration's section of commvq with 2 bits: an entry's coordinate is not within -1e8 to 1e8"},
  };
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
    uint32_t before;
    memcpy(&before, bytes + all[i].offset, sizeof before);
    memcpy(bytes + all[i].offset, &all[i].value, sizeof before);
    qkvi_calibration_seal(bytes, size);
    expect_refused(bytes, size, all[i].status, all[i].text);
    memcpy(bytes + all[i].offset, &before, sizeof before);
  }
  // The largest entries that are taken are used.
  const float most = QKV_COMMVQ_ENTRY_MAX;
  for (size_t at = begin + 64; at < begin + 64 + 1024; at += sizeof most) memcpy(bytes + at, &most, sizeof most);
  qkvi_calibration_seal(bytes, size);
  qkv_calibration *extreme = read_bytes(bytes, size);
  const qkv_commvq_book *book = qkv_commvq_book_get(extreme, 0, 0, 1);
  for (size_t group = 0; group < book->groups; group++) {
    const qkv_entries *entries = &book->rounds[group].entries;
    for (size_t j = 0; j < QKV_COMMVQ_WIDTH; j++) assert_true(isfinite(65504 * 2 * entries->of[0][j][0]));
    assert_true(isfinite(book->rounds[group].squares[0][0]));
  }
  unref(extreme);
  free(bytes);
  unref(calibration);
}

// Sections of format 3 as they were first made are made, and read, for ever; and from files without sections the same
// points are found that pages have been coded with.
static void check_golden_sections(const char *path, qkv_calibration *calibration) {
  size_t size;
  const void *bytes = qkv_calibration_bytes(calibration, &size);
  if (getenv("QKV_GOLDEN_WRITE") != NULL) {
    FILE *out = fopen(path, "wb");
    assert_true(out != NULL && fwrite(bytes, 1, size, out) == size);
    assert_int_equal(fclose(out), 0);
  }
  uint8_t *golden = malloc(size + 1);
  assert_non_null(golden);
  FILE *file = fopen(path, "rb");
  if (file == NULL) fail_msg("cannot open %s", path);
  assert_int_equal(fread(golden, 1, size + 1, file), size);
  assert_int_equal(fclose(file), 0);
  assert_memory_equal(bytes, golden, size);
  unref(read_bytes(golden, size));
  free(golden);
  unref(calibration);
}

static void golden_sections(void **state) {
  (void)state;
  size_t begin;
  check_golden_sections(QKV_SOURCE_DIR "/tests/golden/calibration_v3.bin", make_with_sections(&begin));
  check_golden_sections(QKV_SOURCE_DIR "/tests/golden/calibration_v3_commvq.bin", make_with_commvq(&begin));
}

static void points_of_first_formats_stay(void **state) {
  (void)state;
  const uint64_t hashes[] = {0xc1ed672eeea0ac40, 0x4fa7bef8216a7f4c};
  qkv_calibration_shape shape = shape_of(16, 8, true);
  shape.layers = shape.kv_heads = shape.q_heads = 1;
  for (uint32_t format = 1; format <= 2; format++) {
    size_t size;
    uint8_t *bytes = make_bytes_of(&shape, format, 16, 8, &size);
    qkv_calibration *calibration = read_bytes(bytes, size);
    for (qkv_part part = QKV_K; part <= QKV_V; part++) {
      const qkv_pq_book *book = qkv_pq_book_calibrated(calibration, 0, 0, part, 4);
      const size_t subs = part == QKV_K ? 4 : 2, floats = (2 * 4 + 1) * QKV_PQ_POINTS;
      assert_int_equal(XXH3_64bits(book->numbers, subs * floats * sizeof(float)), hashes[part]);
    }
    unref(calibration);
    free(bytes);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(bytes_are_as_drawn),           cmocka_unit_test(parts_are_found_again),
      cmocka_unit_test(orders_become_schedules),      cmocka_unit_test(versions_follow_the_content),
      cmocka_unit_test(another_model_is_told_apart),  cmocka_unit_test(damage_is_told),
      cmocka_unit_test(absurd_products_are_refused),  cmocka_unit_test(every_cut_and_every_flip_is_refused),
      cmocka_unit_test(limits_hold_for_writers),      cmocka_unit_test(golden_files),
      cmocka_unit_test(sections_are_found_again),     cmocka_unit_test(damaged_sections_are_told),
      cmocka_unit_test(damaged_entries_are_told),     cmocka_unit_test(golden_sections),
      cmocka_unit_test(points_of_first_formats_stay), cmocka_unit_test(the_mean_of_what_turns_is_the_anchor),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
