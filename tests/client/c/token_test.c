// A token file that is renewed: calls go on with the new token, without a new connection.
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "client/c/qkv.h"
#include "engine/base/status.h"
#include "tests/server/fixture.h"

#define FIRST "first-token"
#define FIRST_LINE "token sha256:55b4b48f529c3d2daa027cbffa6cfb6a03690424550f22109e39917406c8243b * read,write\n"
#define SECOND "second-token"
#define SECOND_LINE "token sha256:7a35833597e6687c599a0988b7a53b9b6a7ec18b88ca2a8e60f3265c8be6d527 * read,write\n"

static char folder[] = "/tmp/qkvd-token-XXXXXX", auth_file[64], token_file[64];

// Replaces the file in one step, as the kubelet does.
static void write_file(const char *path, const char *text) {
  char fresh[80];
  (void)snprintf(fresh, sizeof fresh, "%s.new", path);
  FILE *file = fopen(fresh, "we");
  assert_non_null(file);
  assert_true(fputs(text, file) >= 0);
  assert_int_equal(fclose(file), 0);
  assert_int_equal(rename(fresh, path), 0);
}

// Writes the file in place, in the same moment of its clock each time.
static void write_in_place(const char *path, const char *text) {
  const struct timespec times[2] = {{.tv_sec = 1000000000}, {.tv_sec = 1000000000}};
  FILE *file = fopen(path, "we");
  assert_non_null(file);
  assert_true(fputs(text, file) >= 0);
  assert_int_equal(fclose(file), 0);
  assert_int_equal(utimensat(AT_FDCWD, path, times, 0), 0);
}

static qkv_code ask(qkv_client *client) {
  const char *names[] = {"nobody"};
  uint8_t presence[1];
  uint64_t tokens[1];
  return qkv_client_has_sessions(client, names, 1, false, presence, tokens, NULL);
}

// Until a call has this outcome.
static void wait_for(qkv_client *client, qkv_code code) {
  for (int i = 0; i < 3000 && ask(client) != code; i++)
    (void)nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
  assert_int_equal(ask(client), code);
}

static void a_renewed_token_is_read(void **state) {
  (void)state;
  qkv_call_error error = {0};
  qkv_client *client = NULL, *other = NULL;
  char path[64];
  assert_non_null(mkdtemp(folder));
  (void)snprintf(auth_file, sizeof auth_file, "%s/auth", folder);
  (void)snprintf(token_file, sizeof token_file, "%s/token", folder);
  write_file(auth_file, FIRST_LINE);
  write_file(token_file, FIRST "\n");
  const char *const arguments[] = {"--auth-file", auth_file, NULL};
  fixture_daemon *qkvd = fixture_start(arguments);
  memcpy(path, token_file, sizeof path);
  if (qkv_client_connect(qkvd->unix_address, &(qkv_client_options){.token_file = path}, &client, &error) != 0)
    fail_msg("%s", error.text);
  memset(path, '?', sizeof path);  // the client has a copy
  assert_int_equal(ask(client), QKV_OK);

  write_file(auth_file, SECOND_LINE);
  wait_for(client, QKV_UNAUTHENTICATED);
  write_file(token_file, "no token\n");
  write_file(token_file, "\x01\n");  // is none: the one before stays
  assert_int_equal(ask(client), QKV_UNAUTHENTICATED);
  write_in_place(token_file, "\n");
  (void)sleep(2);  // it is read while it is being written
  assert_int_equal(ask(client), QKV_UNAUTHENTICATED);
  write_in_place(token_file, SECOND "\n");
  wait_for(client, QKV_OK);
  assert_int_equal(unlink(token_file), 0);
  (void)sleep(2);  // longer than until the file is looked at again
  assert_int_equal(ask(client), QKV_OK);

  assert_int_equal(
      qkv_client_connect(qkvd->unix_address, &(qkv_client_options){.token_file = token_file}, &other, &error),
      QKV_INVALID_ARGUMENT);
  assert_non_null(strstr(error.text, "cannot read token_file"));
  assert_int_equal(qkv_client_connect(qkvd->unix_address, &(qkv_client_options){.token = ""}, &other, &error),
                   QKV_INVALID_ARGUMENT);
  assert_string_equal(error.text, "the token is empty");
  qkv_client_close(&client);
  assert_int_equal(fixture_stop(&qkvd, SIGTERM, FIXTURE_PATIENCE_MS), 0);
  assert_int_equal(unlink(auth_file), 0);
  assert_int_equal(rmdir(folder), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(a_renewed_token_is_read)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
