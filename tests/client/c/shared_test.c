// Memory that the daemon maps: the same rows go in and come out as by the socket, and none of them crosses it.
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <cmocka.h>

#include "client/c/client.h"
#include "client/c/qkv.h"
#include "engine/base/status.h"
#include "qkv/v1/admin.pb-c.h"
#include "tests/client/c/calls.h"
#include "tests/server/fixture.h"

enum { TOKENS = 300, HEADS = 2, WIDTH = 32, ROW = HEADS * WIDTH, BYTES = TOKENS * ROW * (int)sizeof(float) };
enum { PLACES = 8 };  // of BYTES each in what is shared

static fixture_daemon *start(void) {
  return fixture_start((const char *[]){"--allow-client-shm", NULL});
}

static qkv_client *connect_to(const char *address) {
  qkv_call_error error = {0};
  qkv_client *client = NULL;
  ok(qkv_client_connect(address, NULL, &client, &error), &error);
  return client;
}

static void open_session(qkv_client *client, const char *session) {
  qkv_call_error error = {0};
  const qkv_client_policy policy = {.bits_k = 4, .bits_v = 4, .recent_window = 1000, .self_calibration = -1};
  const qkv_client_model model = {.name = "m",
                                  .layers = 2,
                                  .kv_heads = HEADS,
                                  .q_heads = HEADS,
                                  .key_dim = WIDTH,
                                  .value_dim = WIDTH,
                                  .dtype = QKV_CLIENT_FP32};
  const qkv_session_options options = {.session = session, .model = "m", .policy = &policy};
  ok(qkv_client_register_model(client, &model, &error), &error);
  ok(qkv_client_open_session(client, &options, &error), &error);
}

static qkv_client_tensor tensor(const float *rows, int64_t tokens) {
  return (qkv_client_tensor){.dtype = QKV_CLIENT_FP32,
                             .rank = 3,
                             .dims = {tokens, HEADS, WIDTH},
                             .data = rows,
                             .bytes = (size_t)tokens * ROW * sizeof *rows};
}

// Place i of what is shared.
static float *place(void *memory, int i) {
  return (float *)memory + (size_t)i * TOKENS * ROW;
}

static void fill(float *rows, int seed) {
  for (size_t i = 0; i < (size_t)TOKENS * ROW; i++) rows[i] = (float)((i * 31 + (size_t)seed * 7) % 253) / 64 - 2;
}

static uint64_t metric(qkv_client *client, const char *name) {
  qkv_call_error error = {0};
  void *answer = NULL;
  size_t bytes = 0;
  uint64_t value = UINT64_MAX;
  ok(qkv_client_call(client, "/qkv.v1.Admin/GetStatus", "", 0, &answer, &bytes, &error), &error);
  Qkv__V1__GetStatusResponse *status = qkv__v1__get_status_response__unpack(NULL, bytes, answer);
  assert_non_null(status);
  for (size_t i = 0; i < status->n_metrics; i++) {
    if (strcmp(status->metrics[i]->name, name) == 0) value = (uint64_t)status->metrics[i]->value;
  }
  qkv__v1__get_status_response__free_unpacked(status, NULL);
  qkv_free(answer);
  return value;
}

static uint64_t moved_in(qkv_client *client) {
  return metric(client, "qkvd_client_shm_read_bytes_total");
}

static uint64_t moved_out(qkv_client *client) {
  return metric(client, "qkvd_client_shm_written_bytes_total");
}

static void append(qkv_client *client, const char *session, const float *k, const float *v) {
  qkv_call_error error = {0};
  const qkv_client_item item = {.session = session, .k = tensor(k, TOKENS), .v = tensor(v, TOKENS)};
  ok(qkv_client_append(client, &item, 1, NULL, &error), &error);
}

static void fetch(qkv_client *client, const char *session, float *k, float *v) {
  qkv_call_error error = {0};
  const uint32_t layer = 0;
  qkv_client_layer_memory memory = {.k = {.data = k, .bytes = BYTES}, .v = {.data = v, .bytes = BYTES}};
  const qkv_client_fetch request = {.session = session, .layers = &layer, .layer_count = 1, .chunk_tokens = 70};
  ok(qkv_client_fetch_into(client, &request, &memory, &error), &error);
  assert_int_equal(memory.tokens, TOKENS);
  assert_int_equal(memory.k.dtype, QKV_CLIENT_FP32);
  assert_int_equal(memory.v.heads, HEADS);
  assert_int_equal(memory.v.dim, WIDTH);
}

static void rows_cross_by_memory(void **state) {
  (void)state;
  qkv_call_error error = {0};
  void *memory = NULL;
  static float own[2][TOKENS * ROW];
  fixture_daemon *daemon = start();
  qkv_client *client = connect_to(daemon->unix_address);
  ok(qkv_client_share(client, (size_t)PLACES * BYTES, &memory, &error), &error);
  open_session(client, "s");
  for (int i = 0; i < 2; i++) fill(place(memory, i), i);

  append(client, "s", place(memory, 0), place(memory, 1));
  assert_int_equal(moved_in(client), 2 * BYTES);
  fetch(client, "s", place(memory, 2), place(memory, 3));
  assert_int_equal(moved_out(client), 2 * BYTES);
  assert_memory_equal(place(memory, 2), place(memory, 0), 2 * BYTES);
  fetch(client, "s", own[0], own[1]);  // and not into other memory
  assert_int_equal(moved_out(client), 2 * BYTES);
  assert_memory_equal(own, place(memory, 0), 2 * BYTES);
  // Both must lie there, whole.
  fetch(client, "s", place(memory, 4), own[1]);
  assert_int_equal(moved_out(client), 2 * BYTES);
  assert_memory_equal(place(memory, 4), own[0], BYTES);

  qkv_client_unshare(client, &memory);
  assert_null(memory);
  assert_int_equal(metric(client, "qkvd_client_shm_regions"), 0);
  ok(qkv_client_share(client, 1, &memory, &error), &error);  // close gives it back
  qkv_client_close(&client);
  client = connect_to(daemon->unix_address);
  assert_int_equal(metric(client, "qkvd_client_shm_regions"), 0);
  qkv_client_close(&client);
  assert_int_equal(fixture_stop(&daemon, SIGTERM, FIXTURE_PATIENCE_MS), 0);
}

static void layers_and_parts(void **state) {
  (void)state;
  qkv_call_error error = {0};
  void *memory = NULL;
  fixture_daemon *daemon = start();
  qkv_client *client = connect_to(daemon->unix_address);
  ok(qkv_client_share(client, (size_t)PLACES * BYTES, &memory, &error), &error);
  open_session(client, "s");
  for (int i = 0; i < 4; i++) fill(place(memory, i), i);
  const qkv_client_item items[2] = {
      {.session = "s", .k = tensor(place(memory, 0), TOKENS), .v = tensor(place(memory, 1), TOKENS)},
      {.session = "s", .layer = 1, .k = tensor(place(memory, 2), TOKENS), .v = tensor(place(memory, 3), TOKENS)}};
  ok(qkv_client_append(client, items, 2, NULL, &error), &error);

  const uint32_t layers[] = {0, 1};
  qkv_client_layer_memory to[2] = {{.k = {.data = place(memory, 4), .bytes = BYTES}},
                                   {.k = {.data = place(memory, 5), .bytes = BYTES}}};
  qkv_client_fetch request = {.session = "s", .layers = layers, .layer_count = 2, .part = 1};
  ok(qkv_client_fetch_into(client, &request, to, &error), &error);
  assert_int_equal(moved_out(client), 2 * BYTES);
  for (int i = 0; i < 2; i++) {
    assert_int_equal(to[i].tokens, TOKENS);
    assert_memory_equal(place(memory, 4 + i), place(memory, 2 * i), BYTES);
  }
  to[1].k.bytes = BYTES - 1;
  assert_int_equal(qkv_client_fetch_into(client, &request, to, &error), QKV_INVALID_ARGUMENT);
  assert_non_null(strstr(error.text, "k_into.shared_memory_byte_size is too small"));
  assert_int_equal(to[0].tokens, 0);
  qkv_client_close(&client);
  assert_int_equal(fixture_stop(&daemon, SIGTERM, FIXTURE_PATIENCE_MS), 0);
}

static void queries_and_gaps(void **state) {
  (void)state;
  qkv_call_error error = {0};
  void *memory = NULL;
  static float own[TOKENS * ROW];
  fixture_daemon *daemon = start();
  qkv_client *client = connect_to(daemon->unix_address);
  ok(qkv_client_share(client, (size_t)PLACES * BYTES, &memory, &error), &error);
  open_session(client, "s");
  for (int i = 0; i < 2; i++) fill(place(memory, i), i);
  // Every second row of the first two places, which takes no more than twice the bytes; then every 16th, which does.
  const int64_t apart[] = {2, 16};
  uint64_t position = 0;
  for (int i = 0; i < 2; i++) {
    qkv_client_tensor gaps = tensor(place(memory, 0), 10);
    gaps.strides[0] = apart[i] * ROW * (int64_t)sizeof(float);
    gaps.strides[1] = WIDTH * (int64_t)sizeof(float);
    gaps.strides[2] = sizeof(float);
    gaps.bytes = (size_t)(9 * apart[i] + 1) * ROW * sizeof(float);
    const uint64_t before = moved_in(client);
    const qkv_client_item item = {.session = "s", .position = position, .k = gaps, .v = gaps};
    ok(qkv_client_append(client, &item, 1, NULL, &error), &error);
    assert_int_equal(moved_in(client) - before, i == 0 ? 2 * gaps.bytes : 0);
    position += 10;
  }
  memcpy(own, place(memory, 1), BYTES);
  qkv_client_result results[2];
  const qkv_client_item items[2] = {{.session = "s", .position = 19, .q = tensor(place(memory, 1), 1)},
                                    {.session = "s", .position = 19, .q = tensor(own, 1)}};
  ok(qkv_client_attend(client, items, 2, results, &error), &error);
  assert_memory_equal(results[0].out, results[1].out, (results[0].out_count + results[0].lse_count) * sizeof(float));
  qkv_client_results_free(results, 2);
  qkv_client_close(&client);
  assert_int_equal(fixture_stop(&daemon, SIGTERM, FIXTURE_PATIENCE_MS), 0);
}

static void a_daemon_that_starts_anew_gets_to_know_it(void **state) {
  (void)state;
  qkv_call_error error = {0};
  void *memory = NULL;
  char folder[128], address[160];
  fixture_make_directory(folder, sizeof folder);
  (void)snprintf(address, sizeof address, "unix:%s/own.sock", folder);
  const char *const arguments[] = {"--allow-client-shm", "--listen", address, NULL};
  fixture_daemon *daemon = fixture_start(arguments);
  qkv_client *client = connect_to(address);
  ok(qkv_client_share(client, (size_t)PLACES * BYTES, &memory, &error), &error);
  for (int i = 0; i < 2; i++) fill(place(memory, i), i);
  for (int i = 0; i < 3; i++) {
    open_session(client, "s");
    append(client, "s", place(memory, 0), place(memory, 1));
    fetch(client, "s", place(memory, 2), place(memory, 3));
    assert_memory_equal(place(memory, 2), place(memory, 0), 2 * BYTES);
    assert_int_equal(moved_in(client), 2 * BYTES);
    assert_int_equal(fixture_stop(&daemon, SIGTERM, FIXTURE_PATIENCE_MS), 0);
    daemon = fixture_start(arguments);
  }
  qkv_client_close(&client);
  assert_int_equal(fixture_stop(&daemon, SIGTERM, FIXTURE_PATIENCE_MS), 0);
  fixture_remove_directory(folder);
}

// What a daemon maps is given back over a new connection to it, too.
static void a_connection_is_cut(void **state) {
  (void)state;
  qkv_call_error error = {0};
  void *memory = NULL;
  fixture_daemon *daemon = start();
  qkv_client *client = connect_to(daemon->unix_address);
  ok(qkv_client_share(client, BYTES, &memory, &error), &error);
  qkvi_cut(client);
  assert_int_equal(metric(client, "qkvd_client_shm_regions"), 1);
  qkv_client_unshare(client, &memory);
  assert_int_equal(metric(client, "qkvd_client_shm_regions"), 0);
  qkv_client_close(&client);
  assert_int_equal(fixture_stop(&daemon, SIGTERM, FIXTURE_PATIENCE_MS), 0);
}

static void who_may_not(void **state) {
  (void)state;
  qkv_call_error error = {0};
  void *memory = NULL;
  fixture_daemon *daemon = start();
  qkv_client *client = connect_to(daemon->tcp_address);
  assert_int_equal(qkv_client_share(client, 4096, &memory, &error), QKV_PERMISSION_DENIED);
  assert_non_null(strstr(error.text, "unix socket"));
  assert_null(memory);
  qkv_client_close(&client);
  client = connect_to(daemon->unix_address);
  assert_int_equal(qkv_client_share(client, 0, &memory, &error), QKV_INVALID_ARGUMENT);
  assert_int_equal(qkv_client_share(client, SIZE_MAX, &memory, &error), QKV_INVALID_ARGUMENT);
  assert_int_equal(qkv_client_share(client, (size_t)1 << 60, &memory, &error), QKV_RESOURCE_EXHAUSTED);
  qkv_client_close(&client);
  assert_int_equal(fixture_stop(&daemon, SIGTERM, FIXTURE_PATIENCE_MS), 0);
  daemon = fixture_start(NULL);
  client = connect_to(daemon->unix_address);
  assert_int_equal(qkv_client_share(client, 4096, &memory, &error), QKV_UNIMPLEMENTED);
  assert_non_null(strstr(error.text, "--allow-client-shm"));
  qkv_client_close(&client);
  assert_int_equal(fixture_stop(&daemon, SIGTERM, FIXTURE_PATIENCE_MS), 0);
}

// ---- lent memory ----

// A daemon that does not answer holds up nobody who goes.
static void a_client_is_closed_while_the_daemon_is_stopped(void **state) {
  (void)state;
  enum { SHARES = 3, TIMEOUT_MS = 4000 };
  fixture_daemon *daemon = start();
  const qkv_client_options options = {.timeout_ms = TIMEOUT_MS};
  qkv_call_error error = {0};
  qkv_client *client = NULL;
  void *memory = NULL;
  ok(qkv_client_connect(daemon->unix_address, &options, &client, &error), &error);
  for (int i = 0; i < SHARES; i++) ok(qkv_client_share(client, 4096, &memory, &error), &error);
  assert_int_equal(kill(daemon->pid, SIGSTOP), 0);
  const int64_t began = fixture_now_ms();
  qkv_client_close(&client);
  assert_true(fixture_now_ms() - began < TIMEOUT_MS);
  assert_int_equal(kill(daemon->pid, SIGCONT), 0);
  assert_int_equal(fixture_stop(&daemon, SIGTERM, FIXTURE_PATIENCE_MS), 0);
}

static void on_alarm(int number) {
  (void)number;
}

// Takes descriptors, and refuses them after a while.
static void *refuse_late(void *context) {
  const int *listener = context;
  static const char answer[] = {QKV_INTERNAL, 'l', 'a', 't', 'e'};
  char greeting[8];
  const int fd = accept(*listener, NULL, NULL);
  assert_true(fd >= 0);
  assert_int_equal(recv(fd, greeting, sizeof greeting, MSG_WAITALL), sizeof greeting);
  fixture_sleep_ms(300);
  (void)send(fd, answer, sizeof answer, MSG_NOSIGNAL);
  close(fd);
  return NULL;
}

// Signals that the program handles do not end the passing of descriptors.
static void signals_while_descriptors_are_passed(void **state) {
  (void)state;
  enum { ALARM_US = 20000 };
  char folder[128];
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  fixture_make_directory(folder, sizeof folder);
  (void)snprintf(address.sun_path, sizeof address.sun_path, "%.90s/s", folder);
  int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  assert_int_equal(bind(listener, (const struct sockaddr *)&address, sizeof address), 0);
  assert_int_equal(listen(listener, 1), 0);
  fixture_daemon *daemon = start();
  qkv_client *client = connect_to(daemon->unix_address);
  sigset_t alarms;
  pthread_t thread;
  (void)sigemptyset(&alarms);
  (void)sigaddset(&alarms, SIGALRM);
  assert_int_equal(pthread_sigmask(SIG_BLOCK, &alarms, NULL), 0);
  assert_int_equal(pthread_create(&thread, NULL, refuse_late, &listener), 0);
  assert_int_equal(pthread_sigmask(SIG_UNBLOCK, &alarms, NULL), 0);
  const struct sigaction handled = {.sa_handler = on_alarm};
  const struct itimerval often = {{0, ALARM_US}, {0, ALARM_US}}, never = {{0, 0}, {0, 0}};
  assert_int_equal(sigaction(SIGALRM, &handled, NULL), 0);
  assert_int_equal(setitimer(ITIMER_REAL, &often, NULL), 0);
  const qkv_client_lent memory = {
      .data = folder, .bytes = 1, .descriptors = &listener, .descriptor_count = 1, .passing = address.sun_path};
  qkv_call_error error = {0};
  const qkv_code code = qkv_client_lend(client, &memory, &error);
  assert_int_equal(setitimer(ITIMER_REAL, &never, NULL), 0);
  assert_int_equal(pthread_join(thread, NULL), 0);
  assert_int_equal(code, QKV_INTERNAL);
  assert_non_null(strstr(error.text, ": late"));
  qkv_client_close(&client);
  assert_int_equal(fixture_stop(&daemon, SIGTERM, FIXTURE_PATIENCE_MS), 0);
  close(listener);
  fixture_remove_directory(folder);
}

// A daemon whose GPU is the fake driver's, and that takes descriptors at `passing`.
typedef struct lending {
  char folder[128], kernels[160], passing[160], listen[176];
  fixture_daemon *daemon;
  qkv_client *client;
} lending;

static void start_lending(lending *with) {
  fixture_make_directory(with->folder, sizeof with->folder);
  (void)snprintf(with->kernels, sizeof with->kernels, "%s/kernels", with->folder);
  (void)snprintf(with->passing, sizeof with->passing, "%s/shm.sock", with->folder);
  (void)snprintf(with->listen, sizeof with->listen, "unix:%s", with->passing);
  FILE *file = fopen(with->kernels, "w");
  assert_non_null(file);
  (void)fputs("the fake driver has its own", file);
  (void)fclose(file);
  assert_int_equal(setenv("LD_LIBRARY_PATH", FAKE_CUDA, 1), 0);
  with->daemon = fixture_start((const char *[]){"--allow-client-shm", "--shm-listen", with->listen, "--gpu-memory",
                                                "64MiB", "--gpu-kernels", with->kernels, NULL});
  assert_int_equal(unsetenv("LD_LIBRARY_PATH"), 0);
  with->client = connect_to(with->daemon->unix_address);
  open_session(with->client, "s");
}

static void stop_lending(lending *with) {
  qkv_client_close(&with->client);
  assert_int_equal(fixture_stop(&with->daemon, SIGTERM, FIXTURE_PATIENCE_MS), 0);
  fixture_remove_directory(with->folder);
}

static void *map(int fd, size_t bytes) {
  void *seen = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  assert_ptr_not_equal(seen, MAP_FAILED);
  return seen;
}

// Rows go from what the client calls `data`, which this process sees at `seen`, and come back there.
static void cross(qkv_client *client, void *data, void *seen) {
  const uint64_t in = moved_in(client), out = moved_out(client);
  for (int i = 0; i < 2; i++) fill(place(seen, i), i);
  append(client, "s", place(data, 0), place(data, 1));
  assert_int_equal(moved_in(client) - in, 2 * BYTES);
  fetch(client, "s", place(data, 2), place(data, 3));
  assert_int_equal(moved_out(client) - out, 2 * BYTES);
  assert_memory_equal(place(seen, 2), place(seen, 0), 2 * BYTES);
}

enum { LENT = 4 * BYTES, EACH = 1 << 16, PARTS = (LENT + EACH - 1) / EACH };

static void a_memfd_is_lent(void **state) {
  (void)state;
  lending with = {0};
  qkv_call_error error = {0};
  start_lending(&with);
  const int fd = memfd_create("lent", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  assert_int_equal(ftruncate(fd, LENT + 4096), 0);
  uint8_t *seen = map(fd, LENT + 4096);
  qkv_client_lent memory = {.data = seen + 4096,
                            .bytes = LENT,
                            .offset = 4096,
                            .descriptors = &fd,
                            .descriptor_count = 1,
                            .passing = with.passing};
  assert_int_equal(qkv_client_lend(with.client, &memory, &error), QKV_INVALID_ARGUMENT);
  assert_non_null(strstr(error.text, "F_SEAL_SHRINK"));
  assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
  ok(qkv_client_lend(with.client, &memory, &error), &error);
  cross(with.client, seen + 4096, seen + 4096);
  void *gone = seen + 4096;
  qkv_client_unshare(with.client, &gone);
  assert_int_equal(metric(with.client, "qkvd_client_shm_regions"), 0);
  memset(seen, 1, LENT + 4096);  // it is the caller's

  memory.passing = "/no/such/socket";
  assert_int_equal(qkv_client_lend(with.client, &memory, &error), QKV_UNAVAILABLE);
  assert_non_null(strstr(error.text, "/no/such/socket"));
  memory.passing = NULL;
  assert_int_equal(qkv_client_lend(with.client, &memory, &error), QKV_INVALID_ARGUMENT);
  memory.passing = with.passing;
  memory.descriptor_count = 65;
  assert_int_equal(qkv_client_lend(with.client, &memory, &error), QKV_INVALID_ARGUMENT);
  memory.descriptor_count = 1;
  memory.bytes = 0;
  assert_int_equal(qkv_client_lend(with.client, &memory, &error), QKV_INVALID_ARGUMENT);
  stop_lending(&with);
  close(fd);
  munmap(seen, LENT + 4096);
}

// Memory on the GPU is at an address that cannot be read here.
static void memory_on_the_gpu_is_lent(void **state) {
  (void)state;
  lending with = {0};
  qkv_call_error error = {0};
  char key[64];
  uint8_t handle[64] = "ekaf";
  float own[ROW] = {0};
  start_lending(&with);
  (void)snprintf(key, sizeof key, "/qkv-lent-%d", (int)getpid());
  memcpy(handle + 4, key, strlen(key));
  const int fd = shm_open(key, O_CREAT | O_EXCL | O_RDWR, 0600);
  assert_true(fd >= 0 && ftruncate(fd, LENT + 256) == 0);
  uint8_t *seen = map(fd, LENT + 256);
  uint8_t *there = mmap(NULL, LENT, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  assert_ptr_not_equal(there, MAP_FAILED);
  qkv_client_lent memory = {
      .data = there, .bytes = LENT, .offset = 256, .on_gpu = true, .cuda_handle = handle, .device_id = 7};
  assert_int_equal(qkv_client_lend(with.client, &memory, &error), QKV_INVALID_ARGUMENT);
  assert_non_null(strstr(error.text, "region.device_id is 7"));
  memory.device_id = 0;
  ok(qkv_client_lend(with.client, &memory, &error), &error);
  assert_int_equal(metric(with.client, "qkvd_client_shm_cuda_regions"), 1);
  cross(with.client, there, seen + 256);

  // What would have to be read or written here is refused.
  const qkv_client_item reaches = {.session = "s", .q = tensor((const float *)(there + LENT - 4), 1)};
  qkv_client_result result;
  assert_int_equal(qkv_client_attend(with.client, &reaches, 1, &result, &error), QKV_INVALID_ARGUMENT);
  assert_non_null(strstr(error.text, "items[0].q reaches beyond"));
  const uint32_t layer = 0;
  qkv_client_layer_memory mixed = {.k = {.data = place(there, 0), .bytes = BYTES},
                                   .v = {.data = own, .bytes = sizeof own}};
  const qkv_client_fetch request = {.session = "s", .layers = &layer, .layer_count = 1};
  assert_int_equal(qkv_client_fetch_into(with.client, &request, &mixed, &error), QKV_INVALID_ARGUMENT);
  assert_non_null(strstr(error.text, "layers[0] has memory on a GPU"));
  void *gone = there;
  qkv_client_unshare(with.client, &gone);
  assert_int_equal(metric(with.client, "qkvd_client_shm_cuda_regions"), 0);
  assert_int_equal(shm_unlink(key), 0);
  stop_lending(&with);
  close(fd);
  munmap(seen, LENT + 256);
  munmap(there, LENT);
}

static void allocations_of_a_gpu_are_lent(void **state) {
  (void)state;
  lending with = {0};
  qkv_call_error error = {0};
  int fds[PARTS];
  start_lending(&with);
  uint8_t *seen = mmap(NULL, PARTS * EACH, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  assert_ptr_not_equal(seen, MAP_FAILED);
  for (size_t i = 0; i < PARTS; i++) {
    fds[i] = memfd_create("part", MFD_CLOEXEC);
    assert_true(fds[i] >= 0 && ftruncate(fds[i], EACH) == 0);
    assert_ptr_not_equal(mmap(seen + i * EACH, EACH, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fds[i], 0),
                         MAP_FAILED);
  }
  uint8_t *there = mmap(NULL, LENT, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  assert_ptr_not_equal(there, MAP_FAILED);
  const qkv_client_lent memory = {.data = there,
                                  .bytes = LENT,
                                  .on_gpu = true,
                                  .descriptors = fds,
                                  .descriptor_count = PARTS,
                                  .descriptor_bytes = EACH,
                                  .passing = with.passing};
  ok(qkv_client_lend(with.client, &memory, &error), &error);
  for (size_t i = 0; i < PARTS; i++) close(fds[i]);
  cross(with.client, there, seen);
  stop_lending(&with);  // lent until it closes
  munmap(seen, PARTS * EACH);
  munmap(there, LENT);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(rows_cross_by_memory),
      cmocka_unit_test(layers_and_parts),
      cmocka_unit_test(queries_and_gaps),
      cmocka_unit_test(a_daemon_that_starts_anew_gets_to_know_it),
      cmocka_unit_test(a_connection_is_cut),
      cmocka_unit_test(who_may_not),
      cmocka_unit_test(a_client_is_closed_while_the_daemon_is_stopped),
      cmocka_unit_test(signals_while_descriptors_are_passed),
      cmocka_unit_test(a_memfd_is_lent),
      cmocka_unit_test(memory_on_the_gpu_is_lent),
      cmocka_unit_test(allocations_of_a_gpu_are_lent),
  };
  return cmocka_run_group_tests_name("client/c/shared", tests, NULL, NULL);
}
