#include "engine/base/option.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

typedef struct settings {
  bool help;
  int64_t threads;
  double load;
  int64_t memory_budget;
  int64_t drain;
  const char *config;
  qkv_option_list listen;
} settings;

static const qkv_option table[] = {
    {"help", QKV_OPTION_FLAG, offsetof(settings, help), NULL, 0, 0, NULL, "Prints this."},
    {"threads", QKV_OPTION_INTEGER, offsetof(settings, threads), "8", 1, 256, "N", "Compute threads."},
    {"load", QKV_OPTION_REAL, offsetof(settings, load), "0.5", 0, 1, "FRACTION", "How full is full."},
    {"memory-budget", QKV_OPTION_BYTES, offsetof(settings, memory_budget), "4GiB", 1048576, 0x1p50, "BYTES",
     "Memory for KV, of all sessions together; when it is full, appends are refused with a message that names it."},
    {"drain", QKV_OPTION_DURATION, offsetof(settings, drain), "60s", 0, 3600000, "TIME", "Grace at the end."},
    {"config", QKV_OPTION_STRING, offsetof(settings, config), NULL, 0, 0, "FILE", "Options as YAML."},
    {"listen", QKV_OPTION_LIST, offsetof(settings, listen), "unix:a,b:1", 0, 0, "ADDRESS", "Repeatable."},
};
enum { ROWS = sizeof table / sizeof table[0], MEMORY_BUDGET = 3, LISTEN = 6 };

static settings values;
static qkv_options *options;
static qkv_error error;

static int setup(void **state) {
  (void)state;
  memset(&values, 0xee, sizeof values);
  error = (qkv_error){0};
  options = qkv_options_create(table, ROWS, "QKVT_", &values);
  return 0;
}

static int teardown(void **state) {
  (void)state;
  qkv_options_destroy(&options);
  assert_null(options);
  return 0;
}

static void assert_error(qkv_status status, const char *text) {
  assert_int_equal(status, QKV_INVALID_ARGUMENT);
  assert_string_equal(error.text, text);
  error = (qkv_error){0};
}

static void assert_text(size_t row, const char *expected) {
  char text[256];
  qkv_options_text(options, row, text, sizeof text);
  assert_string_equal(text, expected);
}

static qkv_status set(const char *name, const char *text) {
  return qkv_options_set(options, name, text, QKV_FROM_FLAG, &error);
}

static void test_defaults(void **state) {
  (void)state;
  assert_false(values.help);
  assert_int_equal(values.threads, 8);
  assert_true(values.load == 0.5);
  assert_int_equal(values.memory_budget, INT64_C(4) << 30);
  assert_int_equal(values.drain, 60000);
  assert_null(values.config);
  assert_int_equal(values.listen.count, 2);
  static const char *const texts[ROWS] = {"false", "8", "0.5", "4GiB", "1m", "", "unix:a,b:1"};
  for (size_t i = 0; i < ROWS; i++) {
    assert_text(i, texts[i]);
    assert_int_equal(qkv_options_source(options, table[i].name), QKV_FROM_DEFAULT);
  }
}

static void test_bytes_and_durations(void **state) {
  (void)state;
  static const struct {
    const char *text;
    int64_t bytes;
    const char *shown;
  } good[] = {
      {"1048576", 1 << 20, "1MiB"},           {"1.5GB", 1500000000, "1500MB"}, {"64MiB", 64 << 20, "64MiB"},
      {"2gib", INT64_C(2) << 30, "2GiB"},     {"1048577", 1048577, "1048577"}, {"2TB", 2000000000000, "2TB"},
      {"0.5TiB", INT64_C(1) << 39, "512GiB"}, {"2048KB", 2048000, "2000KiB"},  {"3000000B", 3000000, "3MB"},
  };
  for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
    assert_int_equal(set("memory-budget", good[i].text), QKV_OK);
    assert_int_equal(values.memory_budget, good[i].bytes);
    assert_text(MEMORY_BUDGET, good[i].shown);
  }
  static const char *const bad[] = {"",          "GB",       "1 GB", "-1",    "1.GB", ".5GB",
                                    "1e9",       "0x100000", "1XB",  "1.2.3", "nan",  "9223372036854775808",
                                    "9000000TiB"};
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
    char text[128];
    (void)snprintf(text, sizeof text, "--memory-budget is \"%s\", bytes are needed, such as 4096, 64KiB or 1.5GB",
                   bad[i]);
    assert_error(set("memory-budget", bad[i]), text);
  }
  assert_error(set("memory-budget", "1KiB"), "--memory-budget is 1KiB, allowed are 1MiB to 1024TiB");

  static const struct {
    const char *text;
    int64_t ms;
  } times[] = {{"250ms", 250}, {"60s", 60000}, {"1.5m", 90000}, {"1h", 3600000}, {"0", 0}};
  for (size_t i = 0; i < sizeof times / sizeof times[0]; i++) {
    assert_int_equal(set("drain", times[i].text), QKV_OK);
    assert_int_equal(values.drain, times[i].ms);
  }
  assert_error(set("drain", "60"), "--drain is \"60\", a time with its unit is needed, such as 250ms, 60s, 5m or 1h");
  assert_error(set("drain", "61m"), "--drain is 61m, allowed are 0 to 1h");
}

static void test_numbers_and_flags(void **state) {
  (void)state;
  assert_error(set("threads", "0"), "--threads is 0, allowed are 1 to 256");
  assert_error(set("threads", "257"), "--threads is 257, allowed are 1 to 256");
  assert_error(set("threads", "8x"), "--threads is \"8x\", a whole number is needed");
  assert_error(set("threads", ""), "--threads is \"\", a whole number is needed");
  assert_error(set("threads", "99999999999999999999"),
               "--threads is \"99999999999999999999\", a whole number is needed");
  assert_error(set("load", "1.5"), "--load is 1.5, allowed are 0 to 1");
  assert_error(set("load", "nan"), "--load is \"nan\", a number is needed");
  assert_error(set("load", "1e"), "--load is \"1e\", a number is needed");
  assert_error(set("help", "yes"), "--help is \"yes\", true or false is needed");
  assert_int_equal(values.threads, 8);
  assert_true(values.load == 0.5);
  assert_int_equal(set("threads", "+256"), QKV_OK);
  assert_int_equal(values.threads, 256);
  assert_int_equal(set("load", "2.5e-1"), QKV_OK);
  assert_true(values.load == 0.25);
}

static void test_closest_name(void **state) {
  (void)state;
  assert_error(set("memry-budget", "1"), "unknown option --memry-budget; did you mean --memory-budget?");
  assert_error(set("ilsten", "1"), "unknown option --ilsten; did you mean --listen?");
  assert_error(set("thread", "1"), "unknown option --thread; did you mean --threads?");
  assert_error(set("", "1"), "unknown option --; did you mean --help?");
  char name[5000];
  memset(name, 'd', sizeof name);
  name[sizeof name - 1] = '\0';
  assert_int_equal(set(name, "1"), QKV_INVALID_ARGUMENT);
  error = (qkv_error){0};
}

static qkv_status read_arguments(qkv_option_list *positional, const char *const *words) {
  static char *argv[16];
  int argc = 0;
  argv[argc++] = (char *)"program";
  while (*words != NULL) argv[argc++] = (char *)*words++;
  return qkv_options_read_arguments(options, argc, argv, positional, &error);
}

#define READ(positional, ...) read_arguments(positional, (const char *const[]){__VA_ARGS__, NULL})

static void test_arguments(void **state) {
  (void)state;
  qkv_option_list words = {0};
  assert_int_equal(READ(&words, "session", "--threads", "4", "--listen=x", "-", "--listen", "--y,z", "--help", "--",
                        "--threads", "-3"),
                   QKV_OK);
  assert_int_equal(values.threads, 4);
  assert_true(values.help);
  assert_int_equal(values.listen.count, 2);
  assert_string_equal(values.listen.items[0], "x");
  assert_string_equal(values.listen.items[1], "--y,z");
  assert_int_equal(words.count, 4);
  assert_string_equal(words.items[0], "session");
  assert_string_equal(words.items[1], "-");
  assert_string_equal(words.items[2], "--threads");
  assert_string_equal(words.items[3], "-3");
  assert_text(LISTEN, "x,--y,z");

  assert_error(READ(&words, "--memory-budgt", "1GB"), "unknown option --memory-budgt; did you mean --memory-budget?");
  assert_error(READ(&words, "--thread=4"), "unknown option --thread; did you mean --threads?");
  assert_error(READ(&words, "-threads"), "unknown option -threads; did you mean --threads?");
  assert_error(READ(&words, "-h"), "unknown option -h; did you mean --help?");
  assert_error(READ(&words, "--config"), "--config needs a value: FILE");
  assert_error(READ(&words, "--help=true"), "--help takes no value");
  assert_error(READ(&words, "--threads="), "--threads is \"\", a whole number is needed");
  assert_error(READ(&words, "--config", "caf\xe9"), "--config is no UTF-8");
  assert_error(READ(&words, "--listen=\xff"), "--listen is no UTF-8");
  assert_int_equal(READ(&words, "--config", "caf\xc3\xa9"), QKV_OK);
  assert_int_equal(READ(&words, "--config="), QKV_OK);
  assert_string_equal(values.config, "");
}

static void test_environment(void **state) {
  (void)state;
  (void)setenv("QKVT_MEMORY_BUDGET", "2GB", 1);
  (void)setenv("QKVT_LISTEN", "one,,two,", 1);
  (void)setenv("QKVT_HELP", "true", 1);
  (void)setenv("QKVT_SERVICE_HOST", "10.0.0.1", 1);  // no row: left alone
  assert_int_equal(qkv_options_read_environment(options, &error), QKV_OK);
  assert_int_equal(values.memory_budget, 2000000000);
  assert_true(values.help);
  assert_int_equal(values.listen.count, 2);
  assert_string_equal(values.listen.items[1], "two");
  assert_int_equal(qkv_options_source(options, "listen"), QKV_FROM_ENVIRONMENT);

  (void)setenv("QKVT_THREADS", "0", 1);
  assert_error(qkv_options_read_environment(options, &error), "QKVT_THREADS is 0, allowed are 1 to 256");
  static const char *const names[] = {"QKVT_MEMORY_BUDGET", "QKVT_LISTEN", "QKVT_HELP", "QKVT_SERVICE_HOST",
                                      "QKVT_THREADS"};
  for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) (void)unsetenv(names[i]);
}

static void test_precedence(void **state) {
  (void)state;
  static const qkv_option_source order[] = {QKV_FROM_FLAG, QKV_FROM_FILE, QKV_FROM_ENVIRONMENT};
  for (size_t i = 0; i < 3; i++) {
    char number[2] = {(char)('1' + order[i]), '\0'};
    assert_int_equal(qkv_options_set(options, "threads", number, order[i], &error), QKV_OK);
    assert_int_equal(qkv_options_set(options, "listen", number, order[i], &error), QKV_OK);
  }
  assert_int_equal(values.threads, 1 + QKV_FROM_FLAG);
  assert_text(LISTEN, "4");
  assert_int_equal(qkv_options_source(options, "threads"), QKV_FROM_FLAG);
  // What is overruled is checked all the same.
  assert_error(qkv_options_set(options, "threads", "no", QKV_FROM_FILE, &error),
               "threads is \"no\", a whole number is needed");
}

static char path[] = "option_test_XXXXXX";

static qkv_status read_text(const char *text, size_t length) {
  FILE *file = fopen(path, "wb");
  assert_non_null(file);
  assert_int_equal(fwrite(text, 1, length, file), length);
  (void)fclose(file);
  return qkv_options_read_file(options, path, &error);
}

static void assert_file_error(const char *yaml, const char *text) {
  char expected[512];
  (void)snprintf(expected, sizeof expected, "%s: %s", path, text);
  assert_error(read_text(yaml, strlen(yaml)), expected);
}

static void test_file(void **state) {
  (void)state;
  const char *text =
      "# a comment\nthreads: 16\nmemory-budget: 8GB\nhelp: true\nlisten:\n  - unix:/x\n  - \"h:1,2\"\nload: .25\n";
  assert_int_equal(read_text(text, strlen(text)), QKV_OK);
  assert_int_equal(values.threads, 16);
  assert_int_equal(values.memory_budget, 8000000000);
  assert_true(values.help);
  assert_int_equal(values.listen.count, 2);
  assert_string_equal(values.listen.items[1], "h:1,2");
  assert_true(values.load == 0.25);
  assert_int_equal(read_text("listen: one\n", 12), QKV_OK);
  assert_text(LISTEN, "one");
  assert_int_equal(read_text("listen: []\n", 11), QKV_OK);
  assert_int_equal(values.listen.count, 0);
  assert_int_equal(read_text("listen: one\n", 12), QKV_OK);
  assert_int_equal(read_text("listen:\n", 8), QKV_OK);
  assert_int_equal(values.listen.count, 0);
  assert_int_equal(read_text("listen: \"\"\n", 11), QKV_OK);
  assert_int_equal(values.listen.count, 1);
  assert_int_equal(read_text("", 0), QKV_OK);
  assert_int_equal(read_text("# nothing\n", 10), QKV_OK);
}

static void test_file_errors(void **state) {
  (void)state;
  assert_file_error("\n\nmemry-budget: 4GB\n",
                    "line 3: unknown key \"memry-budget\"; did you mean \"memory-budget\"?");
  assert_file_error("load: 0\nthreads: 0\n", "line 2: threads is 0, allowed are 1 to 256");
  assert_file_error("threads: 1\nload: 0\nthreads: 2\n", "line 3: threads is set twice");
  assert_file_error("threads:\n  - 1\n", "line 1: threads needs one scalar");
  assert_file_error("listen: {a: b}\n", "line 1: listen needs scalars");
  assert_file_error("listen:\n  - [a]\n", "line 1: listen needs scalars");
  assert_file_error("config: \"a\\0b\"\n", "line 1: config needs one scalar");
  assert_file_error("[a]: b\n", "line 1: a key has to be the name of an option");
  assert_file_error("- threads\n", "line 1: a mapping is needed, such as \"help: ...\"");
  assert_file_error("threads: 1\n---\nload: 0\n", "line 3: one document is allowed, this is a second");
  assert_file_error("threads: [1\nload: 0\n", "line 2: did not find expected ',' or ']'");
  assert_file_error("threads: *none\n", "line 1: found undefined alias");

  char *big = malloc((1 << 20) + 1);
  memset(big, '#', (1 << 20) + 1);
  assert_int_equal(read_text(big, 1 << 20), QKV_OK);
  assert_int_equal(read_text(big, (1 << 20) + 1), QKV_INVALID_ARGUMENT);
  assert_non_null(strstr(error.text, " is more than 1048576 bytes, the limit for an option file"));
  free(big);

  error = (qkv_error){0};
  assert_int_equal(qkv_options_read_file(options, "/nowhere/x.yaml", &error), QKV_NOT_FOUND);
  assert_string_equal(error.text, "/nowhere/x.yaml: cannot be opened: No such file or directory");
  error = (qkv_error){0};
  assert_error(qkv_options_read_file(options, "/", &error), "/: cannot be read: Is a directory");
}

static void test_help(void **state) {
  (void)state;
  char *text = NULL;
  size_t length = 0;
  FILE *out = open_memstream(&text, &length);
  qkv_options_help(options, out);
  (void)fclose(out);
  assert_string_equal(
      text,
      "  --help                 Prints this. [env QKVT_HELP]\n"
      "  --threads N            Compute threads. [env QKVT_THREADS, default 8, 1 to 256]\n"
      "  --load FRACTION        How full is full. [env QKVT_LOAD, default 0.5, 0 to 1]\n"
      "  --memory-budget BYTES  Memory for KV, of all sessions together; when it is full, appends are\n"
      "                         refused with a message that names it. [env QKVT_MEMORY_BUDGET, default\n"
      "                         4GiB, 1MiB to 1024TiB]\n"
      "  --drain TIME           Grace at the end. [env QKVT_DRAIN, default 60s, 0 to 1h]\n"
      "  --config FILE          Options as YAML. [env QKVT_CONFIG]\n"
      "  --listen ADDRESS       Repeatable. [env QKVT_LISTEN, default unix:a,b:1]\n");
  free(text);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test_setup_teardown(test_defaults, setup, teardown),
                                     cmocka_unit_test_setup_teardown(test_bytes_and_durations, setup, teardown),
                                     cmocka_unit_test_setup_teardown(test_numbers_and_flags, setup, teardown),
                                     cmocka_unit_test_setup_teardown(test_closest_name, setup, teardown),
                                     cmocka_unit_test_setup_teardown(test_arguments, setup, teardown),
                                     cmocka_unit_test_setup_teardown(test_environment, setup, teardown),
                                     cmocka_unit_test_setup_teardown(test_precedence, setup, teardown),
                                     cmocka_unit_test_setup_teardown(test_file, setup, teardown),
                                     cmocka_unit_test_setup_teardown(test_file_errors, setup, teardown),
                                     cmocka_unit_test_setup_teardown(test_help, setup, teardown)};
  int file = mkstemp(path);
  if (file < 0) return 1;
  (void)close(file);
  int failed = cmocka_run_group_tests(tests, NULL, NULL);
  (void)unlink(path);
  return failed;
}
