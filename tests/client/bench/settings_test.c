#include "client/bench/quality.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

static void test_names(void **state) {
  (void)state;
  static const struct {
    const char *setting;
    bool calibrated;
    const char *name;
  } cases[] = {
      // As in tests/regress/baselines.csv.
      {"plain:4", false, "Hadamard + gain, no anchor, 4"},
      {"plain:2.125:mean", false, "page mean anchor + Hadamard + gain, 2"},
      {"attend:2.5/1.5", true, "attend frame: rotating mean anchor + query-aware KLT K 2.5 / KLT V 1.5"},
      {"archive:1/1", true, "archive frame: pre-RoPE KLT K 1 / KLT V 1"},
      // Ours alone.
      {"plain:4:none", true, "Hadamard + gain, no anchor, 4"},
      {"plain:3/2:auto", false, "best anchor + Hadamard + gain, K 3 / V 2"},
      {"archive:2:chain", false, "archive frame: pre-RoPE chain + Hadamard + gain, 2"},
      {"archive:2/1:auto", true, "archive frame: pre-RoPE KLT K 2 / KLT V 1, best anchor"},
      {"attend:2/1:group", true, "attend frame: rotating mean anchor + query-aware KLT K 2 / KLT V 1, group anchor"},
      {"plain:3.125:mean:correction", false, "page mean anchor + Hadamard + gain, 3, low-rank correction 4"},
      {"plain:3:none:auto/8", false, "Hadamard + gain, no anchor, 3, low-rank auto 8"},
      {"attend:4@1.5", true,
       "attend frame: rotating mean anchor + query-aware KLT K 4 / KLT V 4, by attention to 1.5"},
      {"kivi:4", false, "kivi 4"},
      {"kivi,q_group_size=64:4/2", false, "kivi q_group_size=64 4/2"},
      {"kivi,q_group_size=32:4", false, "kivi 4"},
      {"kivi/kivi:4", false, "kivi 4"},
      {"turboquant,rotation=2/kivi,q_group_size=64:3/2", false, "turboquant rotation=2/kivi q_group_size=64 3/2"},
      {"exact:16", false, "exact"},
      {"plain:4:auto:predictor/2@2", false,
       "best anchor + Hadamard + gain, 4, low-rank predictor 2, by attention to 2"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    qkvi_setting setting;
    qkv_error error = {0};
    char name[QKVI_SETTING_NAME_MAX];
    if (qkvi_setting_parse(cases[i].setting, cases[i].calibrated, &setting, &error) != QKV_OK)
      fail_msg("%s", error.text);
    assert_string_equal(qkvi_setting_name(&setting, name), cases[i].name);
  }
}

static void test_parts(void **state) {
  (void)state;
  qkvi_setting setting;
  assert_int_equal(qkvi_setting_parse("archive:2.5/1.125:group", false, &setting, NULL), QKV_OK);
  assert_int_equal(setting.frame, QKV_FRAME_ARCHIVE);
  assert_false(setting.calibrated);
  assert_true(setting.policy.bits_k == 2.5 && setting.policy.bits_v == 1.125);
  assert_int_equal(setting.policy.anchor.kind, QKV_ANCHOR_GROUP);
  assert_int_equal(setting.policy.recent_window, 0);
  assert_int_equal(qkvi_setting_parse("archive:2", true, &setting, NULL), QKV_OK);
  assert_true(setting.calibrated);
  assert_true(setting.policy.bits_v == 2);
}

static void test_refused(void **state) {
  (void)state;
  static const struct {
    const char *setting, *text;
  } cases[] = {
      {"", "the frame is , known are plain, attend and archive"},
      {"archiv:2", "the frame is archiv, known are plain, attend and archive"},
      {"plain", "the bits are , expected K or K/V"},
      {"plain:2/", "the bits are 2/, expected K or K/V"},
      {"plain:2/1/1", "the bits are 2/1/1, expected K or K/V"},
      {"plain:2x", "the bits are 2x, expected K or K/V"},
      {"plain:-2", "the bits are -2/-2, both must be above 0"},
      {"plain:nan", "the bits are nan/nan, both must be above 0"},
      {"plain:2.3", "policy.bits_k is 2.3"},
      {"plain:2/9", "policy.bits_v is 9"},
      {"plain:2:best", "the anchor is best, known are none, mean, group, chain and auto"},
      {"attend:2", "the attend frame needs --calibration"},
      {"plain:2:none:x", "the low rank is x, known are none, predictor, correction and auto"},
      {"plain:2:none:auto/0", "the rank is 0, allowed are 1 to 16"},
      {"plain:2:none:auto/17", "the rank is 17, allowed are 1 to 16"},
      {"plain:2:none:auto/", "the rank is , allowed are 1 to 16"},
      {"plain:2@", "the average is , allowed are multiples of 0.125 up to 8"},
      {"plain:2@1.3", "the average is 1.3, allowed are multiples of 0.125 up to 8"},
      {"plain:2@9", "the average is 9, allowed are multiples of 0.125 up to 8"},
      {"plain:2:none:auto:x", "expected FRAME:K[/V][:ANCHOR[:LOW_RANK[/RANK]]][@BITS]"},
      {"plain:2:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
       "expected FRAME:K[/V][:ANCHOR["},
      {"kivi,group=64:4", "kivi has no parameter group"},
      {"kivi,q_group_size:4", "q_group_size is no parameter, expected NAME=VALUE"},
      {"kivi,q_group_size=x:4", "q_group_size=x is no parameter"},
      {"kivi,q_group_size=48:4", "policy.kivi.q_group_size is 48, allowed are 32 and 64"},
      {"kivi/zip:4", "the codec of values is zip, known are embedded, exact, kivi"},
      {"kivi/pq/pq:4", "the codec is kivi/pq/pq, expected CODEC"},
      {"kivi/embedded:4", "embedded codes keys and values together"},
      {"kivi/pq:3", "policy.bits_v is 3, allowed are 1, 2 and 4 with pq"},
      {"kivi:4@2", "pages of kivi cannot lose bits"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    qkvi_setting setting;
    qkv_error error = {0};
    assert_int_equal(qkvi_setting_parse(cases[i].setting, false, &setting, &error), QKV_INVALID_ARGUMENT);
    if (strstr(error.text, cases[i].text) == NULL) fail_msg("%s: %s", cases[i].setting, error.text);
    assert_non_null(strstr(error.text, "--setting"));
  }
}

static void test_lists(void **state) {
  (void)state;
  qkv_bench_settings options = {0};
  qkvi_setting_list free_list = {0}, all = {0}, one = {0};
  // Without a calibration everything is data-free, and names are distinct: they are what rows are found by.
  assert_int_equal(qkvi_settings_collect(&options, false, &free_list, NULL), QKV_OK);
  assert_true(free_list.count > 8);
  for (size_t i = 0; i < free_list.count; i++) assert_false(free_list.items[i].calibrated);
  assert_int_equal(qkvi_settings_collect(&options, true, &all, NULL), QKV_OK);
  assert_true(all.count > free_list.count);
  for (size_t i = 0; i < all.count; i++) {
    for (size_t j = 0; j < i; j++) {
      char a[QKVI_SETTING_NAME_MAX], b[QKVI_SETTING_NAME_MAX];
      assert_string_not_equal(qkvi_setting_name(&all.items[i], a), qkvi_setting_name(&all.items[j], b));
    }
  }
  // Flags alone are one setting, in the frame that fits.
  options.code_k = 2;
  assert_int_equal(qkvi_settings_collect(&options, true, &one, NULL), QKV_OK);
  assert_int_equal(one.count, 1);
  assert_int_equal(one.items[0].frame, QKV_FRAME_ATTEND);
  assert_true(one.items[0].policy.bits_v == 2);
  // All codecs of the table that have pages, at bits that they have.
  qkvi_setting_list codecs = {0}, alone = {0};
  options = (qkv_bench_settings){.codec = "all"};
  assert_int_equal(qkvi_settings_collect(&options, true, &codecs, NULL), QKV_OK);
  for (size_t row = 0; qkv_codec_at(row) != NULL; row++) {
    bool found = qkv_codec_is_exact(qkv_codec_at(row));
    for (size_t i = 0; i < codecs.count; i++) found |= codecs.items[i].policy.codec == qkv_codec_at(row);
    assert_true(found);
  }
  // At one depth each codec has a row, embedded one for each of its frames.
  qkvi_settings_clear(&codecs);
  options.code_bits = 3;
  assert_int_equal(qkvi_settings_collect(&options, true, &codecs, NULL), QKV_OK);
  size_t rows = 0;
  while (qkv_codec_at(rows) != NULL) rows++;
  assert_int_equal(codecs.count, rows - 1 + 2);  // the exact one has none
  for (size_t i = 0; i < codecs.count; i++) {
    const qkv_policy *policy = &codecs.items[i].policy;
    const double depth = policy->codec->bits_valid(3) ? 3 : qkv_codec_bits_default(policy->codec);
    assert_true(policy->bits_k == depth);
  }
  options = (qkv_bench_settings){.codec = "turboquant,rotation=2/int8"};
  assert_int_equal(qkvi_settings_collect(&options, false, &alone, NULL), QKV_OK);
  assert_int_equal(alone.count, 1);
  assert_int_equal(alone.items[0].policy.parameters[QKV_K][0], 2);
  assert_true(alone.items[0].policy.bits_k == 4 && alone.items[0].policy.bits_v == 8);
  qkvi_settings_clear(&codecs);
  qkvi_settings_clear(&alone);
  qkvi_settings_clear(&free_list);
  qkvi_settings_clear(&all);
  qkvi_settings_clear(&one);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_names), cmocka_unit_test(test_parts),
                                     cmocka_unit_test(test_refused), cmocka_unit_test(test_lists)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
