// The program qkv-worker as a user runs it: options, JSON keys, exit statuses.
#include <jansson.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <cmocka.h>

#include "tests/server/fixture.h"

#define DATA QKV_SOURCE_DIR "/tests/data/tinylm"
#define MODEL " --model " DATA

// Of the prompt below, by the exact cache.
#define CONTINUATION " sea, "

enum { OUTPUT_MAX = 1 << 16 };

static fixture_daemon *server;
static char output[OUTPUT_MAX];

static char directory[128], prompt[160], calibration[160];

// A short prompt, so that all of it stays in the exact tail and the runs are quick.
static void write_prompt(void) {
  fixture_make_directory(directory, sizeof directory);
  snprintf(prompt, sizeof prompt, "%s/prompt", directory);
  snprintf(calibration, sizeof calibration, "%s/calibration", directory);
  FILE *file = fopen(prompt, "we");
  assert_non_null(file);
  assert_true(fputs("In the beginning God created the heaven and the", file) > 0);
  assert_int_equal(fclose(file), 0);
}

static int start(void **state) {
  (void)state;
  write_prompt();
  setenv("PROMPT", prompt, 1);
  server = fixture_start(NULL);
  setenv("QKVD_TARGET", server->unix_address, 1);
  return 0;
}

static int stop(void **state) {
  (void)state;
  fixture_remove_directory(directory);
  assert_int_equal(fixture_stop(&server, SIGTERM, 20000), 0);
  return 0;
}

// Runs "qkv-worker ARGUMENTS" by the shell. What it prints is in `output`; returns its exit status.
static int run(const char *arguments) {
  char command[2048];
  snprintf(command, sizeof command, "%s %s", QKV_WORKER_PATH, arguments);
  FILE *pipe = popen(command, "r");  // NOLINT(cert-env33-c): a test runs its program
  assert_non_null(pipe);
  size_t length = fread(output, 1, sizeof output - 1, pipe);
  output[length] = '\0';
  int status = pclose(pipe);
  assert_true(WIFEXITED(status));
  return WEXITSTATUS(status);
}

static void test_usage(void **state) {
  (void)state;
  assert_int_equal(run("--version"), 0);
  assert_string_equal(output, "qkv-worker " QKV_VERSION "\n");
  assert_int_equal(run("generate --help"), 0);
  assert_non_null(strstr(output, "--prompt"));
  assert_int_equal(run("score --help"), 0);
  assert_non_null(strstr(output, "--prefill"));
  static const struct {
    const char *arguments, *text;
  } cases[] = {
      {"generate 2>&1", "qkv-worker: --model is missing: a model's directory or its .gguf file\n"},
      {"generate" MODEL " 2>&1", "qkv-worker: --prompt is missing: a file to continue\n"},
      {"score" MODEL " 2>&1", "qkv-worker: --text is missing: a file to score\n"},
      {"score" MODEL " --text x --prefill 10 --length 10 2>&1",
       "qkv-worker: --prefill is 10, it must be below --length, 10\n"},
      {"score" MODEL " --text x --prefill 10 --length 20 --demote-after 10 2>&1",
       "qkv-worker: --demote-after is 10, it must be below --length - --prefill, 10\n"},
      {"score" MODEL " --text x --demote-even 2>&1", "qkv-worker: --demote-even needs --demote-bits BITS\n"},
      {"calibrate 2>&1", "qkv-worker: --model is missing: a model's directory or its .gguf file\n"},
      {"calibrate" MODEL " 2>&1", "qkv-worker: --text is missing: a file to learn from\n"},
      {"calibrate" MODEL " --text x 2>&1", "qkv-worker: --output is missing: the calibration file to write\n"},
      {"score" MODEL " --text x --frame plain 2>&1", "qkv-worker: --frame is plain, known are attend and archive\n"},
      {"generate --byte 5 2>&1", "qkv-worker: unknown option --byte; did you mean --bytes?\n"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    assert_int_equal(run(cases[i].arguments), 2);
    assert_string_equal(output, cases[i].text);
  }
}

static void test_failures(void **state) {
  (void)state;
  assert_int_equal(run("generate" MODEL " --prompt /nowhere/prompt 2>&1"), 1);
  assert_string_equal(output, "qkv-worker: /nowhere/prompt: No such file or directory\n");
  assert_int_equal(run("generate --model /nowhere --prompt $PROMPT 2>&1"), 1);
  assert_non_null(strstr(output, "/nowhere/config.json"));
  assert_int_equal(run("generate" MODEL " --prompt $PROMPT --target unix:/nowhere/s --timeout 200ms 2>&1"), 1);
  assert_non_null(strstr(output, "/nowhere/s"));
  assert_int_equal(run("score" MODEL " --text " DATA "/prompt.txt 2>&1"), 1);
  assert_non_null(strstr(output, "prompt.txt has 512 bytes, a window needs 1025"));
  assert_int_equal(run("generate" MODEL " --prompt $PROMPT --bits-k 4.9 2>&1"), 1);
  assert_non_null(strstr(output, "bits_k"));
  assert_int_equal(run("generate" MODEL " --prompt $PROMPT --bytes 4 >/dev/full 2>/dev/null"), 1);
  assert_int_equal(run("generate" MODEL " --prompt $PROMPT --chat 2>&1"), 1);
  assert_string_equal(output, "qkv-worker: the model has no chat template, or one of another form than ChatML\n");
  assert_int_equal(run("generate --model /nowhere/model.gguf --prompt $PROMPT 2>&1"), 1);
  assert_string_equal(output, "qkv-worker: /nowhere/model.gguf: No such file or directory\n");
  assert_int_equal(run("generate" MODEL " --prompt /dev/null 2>&1"), 1);
  assert_string_equal(output, "qkv-worker: /dev/null is no file of at most 1073741824 bytes\n");
}

static void test_text_goes_to_standard_output(void **state) {
  (void)state;
  assert_int_equal(run("generate" MODEL " --prompt $PROMPT --tokens 6 --threads 2 --compare 2>/dev/null"), 0);
  assert_string_equal(output, CONTINUATION);
  assert_int_equal(run("generate" MODEL " --prompt $PROMPT --bytes 6 --compare 2>&1 >/dev/null"), 0);
  assert_non_null(strstr(output, "KL divergence"));
  assert_non_null(strstr(output, "bits per byte, of its own text"));
}

static void expect_numbers(const json_t *line, const char *const *keys) {
  for (; *keys != NULL; keys++) {
    if (!json_is_number(json_object_get(line, *keys))) fail_msg("%s is no number in %s", *keys, output);
  }
}

static double number(const json_t *line, const char *key) {
  return json_number_value(json_object_get(line, key));
}

static void test_generate_json(void **state) {
  (void)state;
  assert_int_equal(run("generate" MODEL " --prompt $PROMPT --bytes 3 --json --compare --keep --session s"), 0);
  char *rest = output;
  for (int i = 0; i < 3; i++) {
    char *end = strchr(rest, '\n');
    assert_non_null(end);
    json_t *line = json_loadb(rest, (size_t)(end - rest), 0, NULL);
    assert_int_equal(number(line, "byte"), CONTINUATION[i]);
    assert_memory_equal(json_string_value(json_object_get(line, "text")), &CONTINUATION[i], 1);
    json_decref(line);
    rest = end + 1;
  }
  json_t *summary = json_loads(rest, 0, NULL);
  assert_non_null(summary);
  assert_string_equal(json_string_value(json_object_get(summary, "session")), "s");
  assert_string_equal(json_string_value(json_object_get(summary, "model")), "tinylm");
  expect_numbers(summary, (const char *const[]){"bits_per_byte", "bits_per_byte_exact", "kl_bits",
                                                "bits_per_coordinate", "attend_us_p50", "attend_us_p99", NULL});
  assert_int_equal(number(summary, "prompt_bytes"), 47);
  assert_int_equal(number(summary, "generated_bytes"), 3);
  assert_int_equal(number(summary, "kv_bytes_fp16"), 6 * (47 + 2) * 2 * 2 * 64 * 2);
  assert_true(number(summary, "kv_bytes") > 0);
  json_decref(summary);
  // The session was kept, so that its name is taken.
  assert_int_equal(run("generate" MODEL " --prompt $PROMPT --bytes 3 --session s 2>&1"), 1);
}

static void test_score_archive(void **state) {
  (void)state;
  assert_int_equal(run("score" MODEL " --text " DATA "/heldout_kjv.txt --windows 1 --prefill 128 --length 160 "
                       "--bits-k 4 --bits-v 4 --frame archive --json"),
                   0);
  json_t *line = json_loads(output, 0, NULL);
  assert_non_null(line);
  assert_string_equal(json_string_value(json_object_get(line, "frame")), "archive");
  // Fetched keys are rows after RoPE, or they would be nowhere near those that went in.
  assert_true(number(line, "rel_mse_k") > 1e-4 && number(line, "rel_mse_k") < 0.0105);
  assert_true(number(line, "kl_bits") > 0 && number(line, "kl_bits") < 0.01);
  json_decref(line);
}

// A file is made without a daemon, replaces one that was there, and is what score takes.
static void test_calibrate(void **state) {
  (void)state;
  setenv("CALIBRATION", calibration, 1);
  assert_int_equal(run("calibrate --json --target unix:/nonexistent" MODEL " --text " DATA
                       "/calibration.txt --tokens 700 --output $CALIBRATION"),
                   0);
  json_t *line = json_loads(output, 0, NULL);
  assert_non_null(line);
  assert_string_equal(json_string_value(json_object_get(line, "output")), calibration);
  assert_string_equal(json_string_value(json_object_get(line, "model")), "tinylm");
  assert_int_equal(json_integer_value(json_object_get(line, "tokens")), 700);
  struct stat info;
  assert_int_equal(stat(calibration, &info), 0);
  assert_int_equal(json_integer_value(json_object_get(line, "bytes")), info.st_size);
  // Windows of another length are other text to the model.
  const json_int_t version = json_integer_value(json_object_get(line, "version"));
  json_decref(line);
  assert_int_equal(run("calibrate --json" MODEL " --text " DATA
                       "/calibration.txt --tokens 700 --length 350 --output $CALIBRATION"),
                   0);
  line = json_loads(output, 0, NULL);
  assert_int_equal(json_integer_value(json_object_get(line, "tokens")), 700);
  assert_true(json_integer_value(json_object_get(line, "version")) != version);
  json_decref(line);
  assert_int_equal(run("calibrate" MODEL " --text $PROMPT --text $PROMPT --output $CALIBRATION"), 0);
  assert_non_null(strstr(output, "of tinylm, from 94 tokens, 1.2 MiB\nnot tried: "));
  assert_int_equal(run("score" MODEL " --text " DATA "/heldout_kjv.txt --windows 1 --prefill 128 --length 160 "
                       "--calibration $CALIBRATION"),
                   0);
  assert_non_null(strstr(output, "KL bits"));
}

static void test_calibrate_failures(void **state) {
  (void)state;
  setenv("CALIBRATION", calibration, 1);
  assert_int_equal(run("calibrate" MODEL " --text /nonexistent --output $CALIBRATION 2>&1"), 1);
  assert_string_equal(output, "qkv-worker: /nonexistent: No such file or directory\n");
  assert_int_equal(run("calibrate" MODEL " --text $PROMPT --output /dev/null 2>&1"), 1);
  assert_string_equal(output, "qkv-worker: /dev/null is there, and no ordinary file\n");
  assert_int_equal(run("calibrate" MODEL " --text $PROMPT --output /nonexistent/file 2>&1"), 1);
  assert_string_equal(output, "qkv-worker: /nonexistent/file.partial: No such file or directory\n");
  assert_int_equal(run("score" MODEL " --text " DATA "/heldout_kjv.txt --calibration $PROMPT 2>&1"), 1);
  assert_string_equal(output, "qkv-worker: calibration has 47 bytes, its header alone takes 192\n");
  assert_int_equal(run("score" MODEL " --text " DATA "/heldout_kjv.txt --calibration /dev/null 2>&1"), 1);
}

// Four sinks of 128 tokens take 0.3 bits a coordinate. Chains read rows in order, so their pages keep their bits; the
// first page, which has sinks, has a mean instead.
static void test_score_options_reach_the_session(void **state) {
  (void)state;
#define SHORT \
  "score" MODEL " --text " DATA "/heldout_kjv.txt --windows 1 --prefill 128 --length 160 --bits-k 4 --bits-v 4"
  static const struct {
    const char *arguments;
    double least, most;  // bits a coordinate, all in
  } cases[] = {{SHORT " --anchor none --json", 4, 4.6},
               {SHORT " --anchor none --demote-bits 2 --demote-even --json", 2, 2.6},
               {SHORT " --anchor chain --demote-bits 2 --demote-even --json", 3, 3.8},
               {SHORT " --anchor none --demote-bits 2.5 --demote-after 8 --json", 2.4, 3.1}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    assert_int_equal(run(cases[i].arguments), 0);
    json_t *line = json_loads(output, 0, NULL);
    assert_non_null(line);
    const double bits = number(line, "bits_per_coordinate");
    if (!(bits > cases[i].least && bits < cases[i].most)) fail_msg("%s: %g bits", cases[i].arguments, bits);
    const json_t *demoted = json_object_get(line, "demoted");
    assert_int_equal(demoted != NULL, i > 0);
    if (i == 3) assert_true(number(demoted, "after") == 8 && number(demoted, "bits") == 2.5);
    json_decref(line);
  }
  assert_int_equal(run(SHORT " --anchor chains 2>&1"), 1);
  assert_non_null(strstr(output, "policy.anchor is"));
  assert_int_equal(run(SHORT " --demote-bits 0.3 2>&1"), 1);
  assert_non_null(strstr(output, "bits is 0.3, allowed are multiples of 0.125 up to 8"));
}

static void test_score_text(void **state) {
  (void)state;
  assert_int_equal(run("score" MODEL " --text " DATA "/heldout_kjv.txt --windows 1 --prefill 128 --length 160"), 0);
  assert_non_null(strstr(output, "\nattend, up to 32 queries over 128 positions in one call: p50 "));
}

// Nobody reads seventeen digits of a time.
static void expect_few_digits(const char *line) {
  for (const char *at = line; *at != '\0';) {
    at += strcspn(at, "0123456789");
    const char *number = at;
    at += strspn(at, "0123456789.");
    bool real = memchr(number, '.', (size_t)(at - number)) != NULL;
    number += strspn(number, "0.");
    if (real && at - number > 8) fail_msg("more than 7 digits: %.*s in %s", (int)(at - number), number, line);
  }
}

static void test_score_json(void **state) {
  (void)state;
  assert_int_equal(run("score" MODEL " --text " DATA "/heldout_kjv.txt --text " DATA
                       "/heldout_jargon.txt --windows 1 --prefill 128 --length 160 --bits-k 2 --bits-v 1 --json"),
                   0);
  json_t *line = json_loads(output, 0, NULL);  // one object, one line
  assert_non_null(line);
  expect_few_digits(output);
  expect_numbers(line, (const char *const[]){"bits_per_byte", "bits_per_byte_exact", "kl_bits", "bits_per_coordinate",
                                             "kv_bytes", "kv_bytes_fp16", "attend_us_p50", "attend_us_p99",
                                             "rel_mse_k", "rel_mse_v", "top1", NULL});
  assert_string_equal(json_string_value(json_object_get(line, "frame")), "attend");
  // What 2 and 1 bits of a Gaussian coordinate lose, 0.1175 and 0.3634, less what an anchor saves.
  assert_true(number(line, "rel_mse_k") > 0.02 && number(line, "rel_mse_k") < 0.12);
  assert_true(number(line, "rel_mse_v") > 0.1 && number(line, "rel_mse_v") < 0.38);
  assert_int_equal(number(line, "windows"), 1);
  assert_int_equal(number(line, "prefill"), 128);
  assert_int_equal(number(line, "length"), 160);
  assert_int_equal(number(line, "bits_k"), 2);
  assert_int_equal(number(line, "bits_v"), 1);
  assert_int_equal(number(line, "kv_bytes_fp16"), 6 * 128 * 2 * 2 * 64 * 2);
  assert_true(number(line, "kl_bits") > 0);
  const json_t *texts = json_object_get(line, "texts");
  assert_int_equal(json_array_size(texts), 2);
  double mean = (number(json_array_get(texts, 0), "kl_bits") + number(json_array_get(texts, 1), "kl_bits")) / 2;
  assert_true(number(line, "kl_bits") > mean * 0.999998 && number(line, "kl_bits") < mean * 1.000002);
  // Two windows: half of what they differ by.
  const double first = number(json_array_get(texts, 0), "kl_bits"),
               difference = first > mean ? first - mean : mean - first;
  assert_true(number(line, "kl_bits_error") > difference * 0.999 &&
              number(line, "kl_bits_error") < difference * 1.001);
  json_decref(line);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_usage),
                                     cmocka_unit_test(test_failures),
                                     cmocka_unit_test(test_text_goes_to_standard_output),
                                     cmocka_unit_test(test_generate_json),
                                     cmocka_unit_test(test_score_json),
                                     cmocka_unit_test(test_score_archive),
                                     cmocka_unit_test(test_score_options_reach_the_session),
                                     cmocka_unit_test(test_calibrate),
                                     cmocka_unit_test(test_calibrate_failures),
                                     cmocka_unit_test(test_score_text)};
  return cmocka_run_group_tests(tests, start, stop);
}
