// Opaque objects through libqkv, against a daemon.
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "client/c/qkv.h"
#include "tests/client/c/calls.h"
#include "tests/server/fixture.h"

enum { COUNT = 40, PART = 1 << 20 };

typedef struct scene {
  fixture_daemon *daemon;
  qkv_client *client;
  qkv_client_object in[COUNT], out[COUNT];
  char names[COUNT][16];
} scene;

static size_t size_of(size_t i) {
  return i == COUNT - 1 ? 5 * PART / 2 : 1 + i * 7919;
}

static int setup(void **state) {
  scene *s = calloc(1, sizeof *s);
  qkv_call_error error = {0};
  s->daemon = fixture_start(NULL);
  ok(qkv_client_connect(s->daemon->unix_address, NULL, &s->client, &error), &error);
  for (size_t i = 0; i < COUNT; i++) {
    (void)snprintf(s->names[i], sizeof s->names[i], "o%zu", i);
    s->in[i] = (qkv_client_object){.name = s->names[i], .data = malloc(size_of(i)), .bytes = size_of(i)};
    s->out[i] = (qkv_client_object){.name = s->names[i], .data = malloc(size_of(i)), .capacity = size_of(i)};
    for (size_t at = 0; at < size_of(i); at++) ((uint8_t *)s->in[i].data)[at] = (uint8_t)(at * 31 + i + at / 251);
    memset(s->out[i].data, 0, size_of(i));
  }
  *state = s;
  return 0;
}

static int teardown(void **state) {
  scene *s = *state;
  for (size_t i = 0; i < COUNT; i++) {
    free(s->in[i].data);
    free(s->out[i].data);
  }
  qkv_client_close(&s->client);
  const int status = fixture_stop(&s->daemon, SIGTERM, FIXTURE_PATIENCE_MS);
  free(s);
  return status;
}

static void test_out_comes_what_went_in(void **state) {
  scene *s = *state;
  qkv_call_error error = {0};
  const qkv_client_objects in = {s->in, COUNT}, out = {s->out, COUNT};
  ok(qkv_client_put_objects(s->client, &in, &error), &error);
  ok(qkv_client_put_objects(s->client, &in, &error), &error);  // again
  ok(qkv_client_has_objects(s->client, &out, true, &error), &error);
  for (size_t i = 0; i < COUNT; i++) assert_int_equal(s->out[i].bytes, s->in[i].bytes);
  ok(qkv_client_get_objects(s->client, &out, &error), &error);
  for (size_t i = 0; i < COUNT; i++) {
    assert_int_equal(s->out[i].bytes, s->in[i].bytes);
    assert_memory_equal(s->out[i].data, s->in[i].data, s->in[i].bytes);
  }
}

static void test_what_is_missing_or_does_not_fit(void **state) {
  scene *s = *state;
  qkv_call_error error = {0};
  size_t deleted = 0;
  ok(qkv_client_put_objects(s->client, &(qkv_client_objects){s->in, 3}, &error), &error);
  s->out[1].capacity = 10;
  s->out[3].bytes = 77;
  ok(qkv_client_get_objects(s->client, &(qkv_client_objects){s->out, 4}, &error), &error);
  assert_memory_equal(s->out[2].data, s->in[2].data, s->in[2].bytes);
  assert_int_equal(s->out[1].bytes, s->in[1].bytes);
  assert_int_equal(((uint8_t *)s->out[1].data)[5], 0);
  assert_int_equal(s->out[3].bytes, 0);
  qkv_client *another = NULL;
  ok(qkv_client_connect(s->daemon->unix_address, &(qkv_client_options){.tenant = "another"}, &another, &error),
     &error);
  ok(qkv_client_get_objects(another, &(qkv_client_objects){s->out, 4}, &error), &error);
  assert_int_equal(s->out[2].bytes, 0);
  qkv_client_close(&another);
  ok(qkv_client_delete_objects(s->client, &(qkv_client_objects){s->out, 4}, &deleted, &error), &error);
  assert_int_equal(deleted, 3);
  ok(qkv_client_has_objects(s->client, &(qkv_client_objects){s->out, 4}, false, &error), &error);
  for (size_t i = 0; i < 4; i++) assert_int_equal(s->out[i].bytes, 0);
}

static void test_refusals(void **state) {
  scene *s = *state;
  qkv_call_error error = {0};
  ok(qkv_client_put_objects(s->client, &(qkv_client_objects){s->in, 1}, &error), &error);
  qkv_client_object other = s->in[5];
  other.name = "o0";
  assert_int_equal(qkv_client_put_objects(s->client, &(qkv_client_objects){&other, 1}, &error), 6);
  assert_string_equal(error.text, "pieces[0]: object o0: another one of 1 bytes has the name");
  other.replace = true;
  ok(qkv_client_put_objects(s->client, &(qkv_client_objects){&other, 1}, &error), &error);
  other.name = "no name";
  assert_int_equal(qkv_client_put_objects(s->client, &(qkv_client_objects){&other, 1}, &error), 3);
  assert_int_equal(qkv_client_get_objects(s->client, &(qkv_client_objects){&other, 1}, &error), 3);
  // One that is refused early, while many messages are to come.
  other = s->in[COUNT - 1];
  other.durability = 3;
  assert_int_equal(qkv_client_put_objects(s->client, &(qkv_client_objects){&other, 1}, &error), 9);
  other.bytes = 0;
  assert_int_equal(qkv_client_put_objects(s->client, &(qkv_client_objects){&other, 1}, &error), 3);
  assert_string_equal(error.text, "objects[0] has no bytes");
  ok(qkv_client_put_objects(s->client, &(qkv_client_objects){s->in, 0}, &error), &error);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup_teardown(test_out_comes_what_went_in, setup, teardown),
      cmocka_unit_test_setup_teardown(test_what_is_missing_or_does_not_fit, setup, teardown),
      cmocka_unit_test_setup_teardown(test_refusals, setup, teardown),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
