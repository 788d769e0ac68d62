// A real qkvd process for a test, and a plain gRPC client.
//
//   fixture_daemon *daemon = fixture_start((const char *[]){"--limit-calls", "4", NULL});
//   fixture_client *client = fixture_connect(daemon->unix_address);
//   fixture_result result = fixture_call(client, "/qkv.v1.Admin/GetStatus", NULL, 0, 5000);
//
// Errors in the fixture itself fail the test. Calls block; a client is used by one thread.
#ifndef TESTS_SERVER_FIXTURE_H
#define TESTS_SERVER_FIXTURE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define FIXTURE_TEXT_MAX 512

// ---- The daemon ----

typedef struct fixture_daemon {
  pid_t pid;
  char directory[128];     // of its own; removed by fixture_stop
  char unix_address[160];  // "unix:..."
  char tcp_address[64];    // "127.0.0.1:PORT"
  char log_path[160];      // its standard error
} fixture_daemon;

// Starts qkvd on a unix socket and a TCP port of its own, with further arguments (NULL-terminated, or NULL), and
// waits until it is ready. It is killed when the thread that has started it ends.
fixture_daemon *fixture_start(const char *const *arguments);

// Waits until its log has the text.
void fixture_wait_log(const fixture_daemon *daemon, const char *text);

// Sends `signal` and waits for the end: at most `wait_ms`. Returns the exit status, or -1 if it took longer or was
// killed. Clears *daemon.
int fixture_stop(fixture_daemon **daemon, int signal, int64_t wait_ms);

// Runs qkvd with exactly these arguments to its end. Returns the exit status; `output` gets what it printed (both
// streams), cut to `size`.
int fixture_run(const char *const *arguments, char *output, size_t size);

// The value of "VmRSS" and the like in /proc/PID/status, in bytes.
int64_t fixture_memory(const fixture_daemon *daemon, const char *key);

// A directory of its own; the caller removes it with fixture_remove_directory.
void fixture_make_directory(char *path, size_t size);
void fixture_remove_directory(const char *path);

int64_t fixture_now_ms(void);
// Time-out of waits that must succeed, however busy the machine is.
#define FIXTURE_PATIENCE_MS 240000
void fixture_sleep_ms(int64_t ms);

// Whether the tests are built with a sanitizer: then limits of memory and time do not hold.
bool fixture_is_sanitized(void);

// ---- Calls ----

typedef struct fixture_client fixture_client;
typedef struct fixture_stream fixture_stream;

typedef struct fixture_result {
  int status;  // gRPC's
  char text[FIXTURE_TEXT_MAX];
  uint8_t *data;  // the response, NULL if there is none; fixture_free frees it
  size_t length;
} fixture_result;

fixture_client *fixture_connect(const char *address);
void fixture_disconnect(fixture_client **client);
// The tenant of its calls from here on, which stays the caller's; NULL: none.
void fixture_set_tenant(fixture_client *client, const char *tenant);

// One request, one response. `timeout_ms` 0: no deadline.
fixture_result fixture_call(fixture_client *client, const char *method, const void *data, size_t length,
                            int64_t timeout_ms);
void fixture_free(fixture_result *result);

// The same with the request gzipped by gRPC.
fixture_result fixture_call_gzip(fixture_client *client, const char *method, const void *data, size_t length,
                                 int64_t timeout_ms);

fixture_stream *fixture_open(fixture_client *client, const char *method, int64_t timeout_ms);
bool fixture_send(fixture_stream *stream, const void *data, size_t length);
void fixture_half_close(fixture_stream *stream);
// The next message, false at the end. `*data` is freed by the caller.
bool fixture_receive(fixture_stream *stream, uint8_t **data, size_t *length);
void fixture_cancel(fixture_stream *stream);
// Waits for the status and frees the stream.
fixture_result fixture_finish(fixture_stream **stream);

#endif
