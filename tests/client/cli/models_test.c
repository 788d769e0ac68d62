// What qkvctl models says of calibrations, against the real daemon.
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "client/c/qkv.h"
#include "engine/codec/calibrate.h"
#include "tests/server/fixture.h"

enum { HEADS = 2, DIM = 16, TOKENS = 64 };

static fixture_daemon *qkvd;
static qkv_client *client;

static const qkv_client_model model = {.name = "calibrated",
                                       .layers = 1,
                                       .kv_heads = HEADS,
                                       .q_heads = HEADS,
                                       .key_dim = DIM,
                                       .value_dim = DIM,
                                       .dtype = QKV_CLIENT_FP16};

static int setup(void **state) {
  (void)state;
  qkv_call_error error = {0};
  qkvd = fixture_start(NULL);
  setenv("QKVD_TARGET", qkvd->unix_address, 1);
  if (qkv_client_connect(qkvd->unix_address, NULL, &client, &error) != 0) fail_msg("%s", error.text);
  return 0;
}

static int teardown(void **state) {
  (void)state;
  qkv_client_close(&client);
  assert_int_equal(fixture_stop(&qkvd, SIGTERM, 20000), 0);
  return 0;
}

static const char *output_of(const char *command) {
  static char text[1 << 16];
  FILE *pipe = popen(command, "re");
  assert_non_null(pipe);
  text[fread(text, 1, sizeof text - 1, pipe)] = '\0';
  assert_int_equal(pclose(pipe), 0);
  return text;
}

__attribute__((format(printf, 1, 2))) static const char *say(const char *format, ...) {
  static char said[160];
  va_list list;
  va_start(list, format);
  (void)vsnprintf(said, sizeof said, format, list);
  va_end(list);
  return said;
}

static void expect(const char *said, const char *command) {
  const char *text = output_of(command);
  if (strstr(text, said) == NULL) fail_msg("expected \"%s\" in: %s", said, text);
}

static const qkv_calibration *calibrate(void) {
  static float rows[TOKENS * HEADS * DIM];
  const qkv_calibration_shape shape = {1, HEADS, HEADS, DIM, DIM, {.theta = 0}};
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) rows[i] = (float)((i * 2654435761u >> 7) % 1024) / 1024;
  qkv_moments *moments = qkv_moments_create(&shape);
  qkv_moments_add(moments, 0, 0, TOKENS, rows, rows, true);
  qkv_calibration *made = NULL;
  assert_int_equal(qkv_calibrate(moments, &QKV_CALIBRATE_DEFAULTS, &made, NULL), QKV_OK);
  qkv_moments_destroy(&moments);
  return made;
}

static void test_calibrations(void **state) {
  (void)state;
  const char *table = "'" QKVCTL_PATH "' models", *lines = "'" QKVCTL_PATH "' models --json";
  qkv_call_error error = {0};
  qkv_client_model brings = model;
  const qkv_calibration *made = calibrate();
  const uint32_t version = qkv_calibration_version(made);
  if (qkv_client_register_model(client, &brings, &error) != 0) fail_msg("%s", error.text);
  expect(" none ", table);
  expect("\"source\":\"none\"", lines);

  brings.calibration = qkv_calibration_bytes(made, &brings.calibration_bytes);
  if (qkv_client_register_model(client, &brings, &error) != 0) fail_msg("%s", error.text);
  expect(" on trial ", table);
  expect(say("\ncalibrated: calibration %08x waits for traffic to be tried on\n", version), table);
  expect(say("\"on_trial\":%u", version), lines);

  brings.calibration_trusted = true;
  if (qkv_client_register_model(client, &brings, &error) != 0) fail_msg("%s", error.text);
  expect(say(" %08x registered, trusted ", version), table);
  expect(" not tried ", table);
  expect(say("\"version\":%u", version), lines);
  expect("\"trusted\":true", lines);
  assert_null(strstr(output_of(table), "waits for traffic"));

  const qkv_session_options options = {.session = "s", .model = "calibrated"};
  if (qkv_client_open_session(client, &options, &error) != 0) fail_msg("%s", error.text);
  expect(say("\ncalibration     %08x, in force for ", version), "'" QKVCTL_PATH "' session s");
  expect(say("\"calibration\":%u", version), "'" QKVCTL_PATH "' session s --json");
  expect(say(" %08x ", version), "'" QKVCTL_PATH "' sessions");
  expect(say("\"calibration\":%u", version), "'" QKVCTL_PATH "' sessions --json");

  // Not for the archive codec.
  expect("\"archive_refused\":false", lines);
  qkv_calibration *refused = NULL;
  assert_int_equal(qkv_calibration_refuse_archive(&made, &refused, NULL), QKV_OK);
  brings.calibration = qkv_calibration_bytes(refused, &brings.calibration_bytes);
  if (qkv_client_register_model(client, &brings, &error) != 0) fail_msg("%s", error.text);
  expect(say("\ncalibrated: calibration %08x is not for the archive codec, which is worse with it than data-free\n",
             qkv_calibration_version(refused)),
         table);
  expect("\"archive_refused\":true", lines);
  qkv_calibration_unref((const qkv_calibration **)&refused);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_calibrations)};
  return cmocka_run_group_tests(tests, setup, teardown);
}
