#include "server/options.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/base/cpu.h"
#include "tests/server/fixture.h"

#include <cmocka.h>

typedef struct config_file {
  char directory[128];
  char path[160];
} config_file;

static int setup(void **out) {
  config_file *file = calloc(1, sizeof(*file));
  assert_non_null(file);
  fixture_make_directory(file->directory, sizeof(file->directory));
  snprintf(file->path, sizeof(file->path), "%s/qkvd.yaml", file->directory);
  *out = file;
  return 0;
}

static int teardown(void **out) {
  config_file *file = *out;
  fixture_remove_directory(file->directory);
  unsetenv("QKVD_LIMIT_MODELS");
  unsetenv("QKVD_LIMIT_ITEMS");
  free(file);
  return 0;
}

static void write_config(const config_file *config, const char *text) {
  FILE *file = fopen(config->path, "we");
  assert_non_null(file);
  fputs(text, file);
  fclose(file);
}

// As from a command line: `arguments` after the program's name, ended by NULL.
static qkv_status read_options(const char *const *arguments, qkv_server_options *values, qkv_options **set,
                               qkv_error *error) {
  const char *argv[8] = {"qkvd"};
  int argc = 1;
  for (; arguments[argc - 1] != NULL; argc++) argv[argc] = arguments[argc - 1];
  return qkv_server_options_read(argc, (char **)argv, values, set, error);
}

static void defaults(void **out) {
  (void)out;
  qkv_server_options values;
  qkv_options *set;
  qkv_error error = {0};
  assert_int_equal(read_options((const char *[]){NULL}, &values, &set, &error), QKV_OK);
  assert_int_equal(values.listen.count, 1);
  assert_string_equal(values.listen.items[0], "127.0.0.1:7580");
  assert_null(values.config);
  assert_int_equal(values.memory_budget, INT64_C(4) << 30);
  assert_int_equal(values.threads, 0);
  assert_int_equal(values.rpc_threads, 1);
  assert_int_equal(values.limit_message, 64 << 20);
  assert_int_equal(values.limit_items, 1024);
  assert_true(values.bits == 0 && values.bits_k == 0 && values.bits_v == 0);
  assert_true(qkv_server_options_policy(&values).bits_k == 4 && qkv_server_options_policy(&values).bits_v == 4);
  assert_int_equal(values.recent_window, 64);
  assert_int_equal(values.drain_grace, 10000);
  assert_false(values.discard);
  assert_int_equal(qkv_server_options_log_level(&values), QKV_LOG_INFO);
  qkv_options_destroy(&set);
}

// default < file < environment < flag
static void precedence(void **out) {
  config_file *config = *out;
  write_config(config, "limit-models: 10\nlimit-items: 10\nlimit-calls: 10\nlisten: [\"unix:a\", \"unix:b\"]\n");
  setenv("QKVD_LIMIT_MODELS", "20", 1);
  setenv("QKVD_LIMIT_ITEMS", "20", 1);
  const char *const arguments[] = {"--limit-models", "30", "--config", config->path, NULL};
  qkv_server_options values;
  qkv_options *set;
  qkv_error error = {0};
  assert_int_equal(read_options(arguments, &values, &set, &error), QKV_OK);
  assert_int_equal(values.limit_models, 30);
  assert_int_equal(values.limit_items, 20);
  assert_int_equal(values.limit_calls, 10);
  assert_int_equal(values.limit_sessions, 65536);
  assert_int_equal(values.listen.count, 2);
  assert_string_equal(values.listen.items[1], "unix:b");
  assert_int_equal(qkv_options_source(set, "limit-models"), QKV_FROM_FLAG);
  assert_int_equal(qkv_options_source(set, "limit-items"), QKV_FROM_ENVIRONMENT);
  assert_int_equal(qkv_options_source(set, "limit-calls"), QKV_FROM_FILE);
  assert_int_equal(qkv_options_source(set, "limit-sessions"), QKV_FROM_DEFAULT);
  qkv_options_destroy(&set);
}

static void expect_refusal(const char *const *arguments, const char *text) {
  qkv_server_options values;
  qkv_options *set;
  qkv_error error = {0};
  assert_int_equal(read_options(arguments, &values, &set, &error), QKV_INVALID_ARGUMENT);
  if (strstr(error.text, text) == NULL) fail_msg("\"%s\" is not in \"%s\"", text, error.text);
  qkv_options_destroy(&set);
}

static void unknown_names(void **out) {
  config_file *config = *out;
  expect_refusal((const char *[]){"--memry-budget", "4GB", NULL},
                 "unknown option --memry-budget; did you mean --memory-budget?");
  write_config(config, "threads: 2\nlimit-model: 10\n");
  expect_refusal((const char *[]){"--config", config->path, NULL},
                 "line 2: unknown key \"limit-model\"; did you mean \"limit-models\"?");
}

// Kubernetes sets variables like this one for a service named "qkvd", so they cannot be refused.
static void foreign_variables_are_left_alone(void **out) {
  (void)out;
  setenv("QKVD_SERVICE_HOST", "10.0.0.1", 1);
  qkv_server_options values;
  qkv_options *set;
  qkv_error error = {0};
  assert_int_equal(read_options((const char *[]){NULL}, &values, &set, &error), QKV_OK);
  unsetenv("QKVD_SERVICE_HOST");
  qkv_options_destroy(&set);
}

static void values_out_of_limits(void **out) {
  (void)out;
  static const struct {
    const char *argument, *text;
  } rows[] = {
      {"--rpc-threads=0", "--rpc-threads is 0, allowed are 1 to 64"},
      {"--memory-budget=1KB", "--memory-budget is"},
      {"--memory-budget=lots", "lots"},
      {"--huge-pages=always", "--huge-pages is always, known are auto and off"},
      {"--numa=both", "--numa is both, known are off, interleave and local"},
      {"--drain-grace=10", "10"},
      {"--bits-v=5.2", "--bits-v is 5.2, allowed are multiples of 0.125 up to 8"},
      {"--bits-k=9", "--bits-k is 9, allowed are multiples of 0.125 up to 8"},
      {"--bits=-1", "--bits is -1, allowed are multiples of 0.125 up to 8"},
      {"--codec=zip", "--codec is zip, known are embedded, exact, kivi, "},
      {"--archive-codec=zip", "--archive-codec is zip, known are embedded, exact, kivi, "},
      {"--codec-v=zip", "--codec-v is zip, known are embedded, exact, kivi, "},
      {"--codec-v=kivi", "--codec-v is kivi and --codec is embedded: embedded codes keys and values together"},
      {"--bits=2.3", "--bits is 2.3, allowed are multiples of 0.125 up to 8"},
      {"--cpu-mask=avx1024", "--cpu-mask is avx1024, allowed are none and lists of avx2, fma"},
      {"--ema-alpha=2", "--ema-alpha is 2, allowed are 0 (not included) to 0.99999"},
      {"--tier-bits=1.3", "--tier-bits is 1.3, allowed are multiples of 0.125 up to 8"},
      {"--tier-thresholds=0.1,0.01", "--tier-thresholds is \"0.1,0.01\", three numbers HI,MID,LO are needed"},
      {"--tier-thresholds=0.1,0.2,0.3", "--tier-thresholds: retier.thresholds are not falling"},
      {"--memory-low=0.95", "--memory-low is 0.95, at most --memory-high 0.9"},
      {"--log-level=loud", "--log-level is loud, allowed are debug, info, warn and error"},
  };
  for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
    expect_refusal((const char *[]){rows[i].argument, NULL}, rows[i].text);
  }
}

static void tiers(void **out) {
  (void)out;
  qkv_server_options values;
  qkv_options *set;
  qkv_error error = {0};
  expect_refusal((const char *[]){"--ema-every=0", "--tier-thresholds=0.1,0.01,0.001", NULL},
                 "--tier-thresholds need attention to be counted, --ema-every is 0");
  assert_int_equal(read_options((const char *[]){"--tier-thresholds=0.5,0.25,0.125", "--tier-bits=1.625",
                                                 "--tier-pages=7", "--tier-sinks=9", NULL},
                                &values, &set, &error),
                   QKV_OK);
  const qkv_retier_policy policy = qkv_server_options_retier(&values);
  assert_true(policy.thresholds[0] == 0.5 && policy.thresholds[1] == 0.25 && policy.thresholds[2] == 0.125);
  assert_true(policy.bits == 1.625 && policy.pages_max == 7 && policy.sinks == 9);
  qkv_options_destroy(&set);
}

static void codecs(void **out) {
  (void)out;
  static const struct {
    const char *arguments[4], *k, *v;
    double bits_k, bits_v;
  } rows[] = {
      {{NULL}, "embedded", NULL, 4, 4},
      {{"--codec=exact", NULL}, "exact", NULL, 4, 4},
      {{"--codec=int8", NULL}, "int8", NULL, 8, 8},
      {{"--codec=commvq", "--bits-k=1", NULL}, "commvq", NULL, 1, 2},
      {{"--codec=turboquant", "--codec-v=kivi", "--bits=3", NULL}, "turboquant", "kivi", 3, 3},
      {{"--codec=turboquant", "--codec-v=int8", "--bits=3", NULL}, "turboquant", "int8", 3, 8},
      {{"--codec=kivi", "--codec-v=kivi", NULL}, "kivi", NULL, 4, 4},
  };
  for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
    qkv_server_options values;
    qkv_options *set;
    qkv_error error = {0};
    assert_int_equal(read_options(rows[i].arguments, &values, &set, &error), QKV_OK);
    const qkv_policy policy = qkv_server_options_policy(&values);
    assert_string_equal(policy.codec->name, rows[i].k);
    assert_true(policy.codec_v == (rows[i].v != NULL ? qkv_codec_by_name(rows[i].v) : NULL));
    assert_true(policy.bits_k == rows[i].bits_k && policy.bits_v == rows[i].bits_v);
    qkv_options_destroy(&set);
  }
  qkv_server_options values;
  qkv_options *set;
  qkv_error error = {0};
  assert_int_equal(read_options((const char *[]){NULL}, &values, &set, &error), QKV_OK);
  assert_string_equal(qkv_server_options_archive_codec(&values)->name, "ecsq");
  qkv_options_destroy(&set);
  assert_int_equal(read_options((const char *[]){"--archive-codec=embedded", NULL}, &values, &set, &error), QKV_OK);
  assert_null(qkv_server_options_archive_codec(&values));
  qkv_options_destroy(&set);
  expect_refusal((const char *[]){"--codec=pq", "--bits=3", NULL}, "--bits is 3, allowed are 1, 2 and 4 with pq");
}

static void cpu_masks(void **out) {
  (void)out;
  static const struct {
    const char *first, *second;
    uint32_t mask;
  } rows[] = {
      {NULL, NULL, UINT32_MAX},
      {"--cpu-mask=none", NULL, 0},
      {"--cpu-mask=avx2,f16c", NULL, QKV_CPU_AVX2 | QKV_CPU_F16C},
      {"--cpu-mask=avx2", "--cpu-mask=avx512", QKV_CPU_AVX2 | QKV_CPU_AVX512},
  };
  for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
    qkv_server_options values;
    qkv_options *set;
    qkv_error error = {0};
    assert_int_equal(read_options((const char *[]){rows[i].first, rows[i].second, NULL}, &values, &set, &error),
                     QKV_OK);
    assert_int_equal(qkv_server_options_cpu_mask(&values), rows[i].mask);
    qkv_options_destroy(&set);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(defaults),
      cmocka_unit_test_setup_teardown(precedence, setup, teardown),
      cmocka_unit_test_setup_teardown(unknown_names, setup, teardown),
      cmocka_unit_test(foreign_variables_are_left_alone),
      cmocka_unit_test(values_out_of_limits),
      cmocka_unit_test(tiers),
      cmocka_unit_test(codecs),
      cmocka_unit_test(cpu_masks),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
