// The packed bytes against the drawing in page.h, through the naive reader.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
// cmocka wants the above first
#include <cmocka.h>

#include "engine/codec/pack.h"
#include "naive.h"

static const uint16_t dims[] = {8, 16, 24, 64, 80, 96, 128, 192, 256};
enum { DIMS = sizeof dims / sizeof *dims, BYTES_MAX = 16 * QKV_DIM_MAX };

static void check_group(naive_random *random, qkv_part part, const qkv_schedule *schedule, unsigned tier) {
  const uint16_t *reach = schedule->reach[tier];
  const size_t bytes = qkv_schedule_group_bytes(schedule, tier);
  static qkvi_codes codes[QKV_DIM_MAX], unpacked[QKV_DIM_MAX];
  static uint8_t packed[BYTES_MAX + 1];
  for (unsigned c = 0; c < schedule->dim; c++) {
    for (unsigned t = 0; t < 16; t++) codes[c][t] = (uint8_t)naive_next(random);
  }
  packed[bytes] = 0xa5;
  qkvi_pack(part, schedule, tier, codes, packed);
  assert_int_equal(packed[bytes], 0xa5);
  qkvi_unpack(part, schedule, tier, packed, unpacked);
  for (unsigned c = 0; c < schedule->dim; c++) {
    const unsigned depth = naive_depth(reach, c);
    for (unsigned t = 0; t < 16; t++) {
      const unsigned expected = codes[c][t] >> (8 - depth);
      assert_int_equal(naive_code(part, reach, packed, c, t), expected);
      assert_int_equal(unpacked[c][t], expected);
    }
  }
  for (unsigned t = 0; t < 16; t++) {
    static uint8_t row[QKV_DIM_MAX];
    qkvi_unpack_slot(part, schedule, tier, packed, t, row);
    for (unsigned c = 0; c < schedule->dim; c++) assert_int_equal(row[c], unpacked[c][t]);
  }
}

static void uniform_schedules_follow_the_drawing(void **state) {
  (void)state;
  naive_random random = {11};
  for (size_t d = 0; d < DIMS; d++) {
    qkv_schedule schedule;
    qkv_schedule_uniform(&schedule, dims[d]);
    // Every tier of the narrow ones; of the others whole bits and what is about them.
    for (unsigned tier = 0; tier <= QKV_TIER_MAX && dims[d] <= 96; tier += dims[d] > 24 && tier % 8 == 1 ? 6 : 1) {
      check_group(&random, QKV_K, &schedule, tier);
      check_group(&random, QKV_V, &schedule, tier);
    }
  }
}

static void banded_schedules_follow_the_drawing(void **state) {
  (void)state;
  naive_random random = {12};
  for (size_t d = 0; d < DIMS; d++) {
    for (int round = 0; round < 6; round++) {
      qkv_schedule schedule;
      naive_schedule(&random, dims[d], &schedule);
      const unsigned tier = 1 + naive_below(&random, QKV_TIER_MAX);
      check_group(&random, round % 2 ? QKV_K : QKV_V, &schedule, tier);
    }
  }
}

// The drawing leaves no bit over and gives none twice.
static void every_bit_has_one_place(void **state) {
  (void)state;
  naive_random random = {13};
  for (int round = 0; round < 40; round++) {
    qkv_schedule schedule;
    naive_schedule(&random, (uint16_t)(8 * (1 + naive_below(&random, 10))), &schedule);
    const unsigned tier = 1 + naive_below(&random, QKV_TIER_MAX);
    const uint16_t *reach = schedule.reach[tier];
    const qkv_part part = round % 2 ? QKV_K : QKV_V;
    const size_t bytes = qkv_schedule_group_bytes(&schedule, tier);
    static uint8_t taken[BYTES_MAX];
    memset(taken, 0, sizeof taken);
    for (unsigned c = 0; c < schedule.dim; c++) {
      for (unsigned t = 0; t < 16; t++) {
        for (unsigned j = 0; j < naive_depth(reach, c); j++) {
          const naive_place place = naive_locate(part, reach, c, t, j);
          assert_true(place.byte < bytes && place.bit < 8);
          assert_false(taken[place.byte] >> place.bit & 1);
          taken[place.byte] |= (uint8_t)(1u << place.bit);
        }
      }
    }
    for (size_t i = 0; i < bytes; i++) assert_int_equal(taken[i], 0xff);
  }
}

// A few places worked out by hand from the drawing.
static void known_places(void **state) {
  (void)state;
  qkv_schedule schedule;
  qkv_schedule_uniform(&schedule, 64);
  const struct {
    qkv_part part;
    unsigned tier, c, t;
    size_t byte;
    uint8_t value;  // of that byte, where the code of (c, t) is all ones and every other 0
  } cases[] = {
      {QKV_K, 16, 0, 0, 0, 0x03},         // field 0 of byte 0
      {QKV_K, 16, 5, 3, 13, 0x0c},        // field 1, i = 1, token 3: byte 3 * 4 + 1
      {QKV_K, 16, 16, 0, 64, 0x03},       // second line
      {QKV_K, 32, 0, 0, 256, 0x0c},       // pair 1 after 256 bytes of pair 0, field 0 stored in 1
      {QKV_K, 8, 0, 0, 0, 0x01},          // narrow: low bit
      {QKV_K, 8, 16, 0, 0, 0x02},         // narrow: high bit is coordinate 4 s further
      {QKV_K, 24, 20, 2, 256 + 8, 0x02},  // pair 1 narrow, 20 = 4 s + s * 1: field 1 stored in 0, high bit
      {QKV_V, 16, 3, 6, 14, 0x0c},        // lane 3, token 6 = 4 * 1 + 2: byte 3 * 4 + 2, field 1
      {QKV_V, 32, 3, 6, 256 + 14, 0x03},  // pair 1: field 1 stored in 0
      {QKV_V, 8, 17, 0, 4, 0x02},         // narrow: high bit is coordinate L further
      {QKV_K, 12, 8, 0, 0, 0x30},         // 32 coordinates of two bits come first, wide; 8 = s * 2: field 2
      {QKV_K, 12, 32, 0, 128, 0x01},      // narrow after 2 wide lines
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    static qkvi_codes codes[QKV_DIM_MAX];
    static uint8_t packed[BYTES_MAX];
    memset(codes, 0, sizeof codes);
    codes[cases[i].c][cases[i].t] = 0xff;
    qkvi_pack(cases[i].part, &schedule, cases[i].tier, codes, packed);
    assert_int_equal(packed[cases[i].byte], cases[i].value);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(uniform_schedules_follow_the_drawing),
      cmocka_unit_test(banded_schedules_follow_the_drawing),
      cmocka_unit_test(every_bit_has_one_place),
      cmocka_unit_test(known_places),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
