// The real daemon: health, status, reflection, and what hostile or unlucky clients do to it.
#include <arpa/inet.h>
#include <grpc/grpc.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "engine/base/cpu.h"
#include "engine/kernel/kernel.h"
#include "grpc/health/v1/health.pb-c.h"
#include "grpc/reflection/v1alpha/reflection.pb-c.h"
#include "qkv/v1/admin.pb-c.h"
#include "tests/server/fixture.h"

#include <cmocka.h>

#define CHECK "/grpc.health.v1.Health/Check"
#define WATCH "/grpc.health.v1.Health/Watch"
#define GET_STATUS "/qkv.v1.Admin/GetStatus"
#define LIST_MODELS "/qkv.v1.KvCache/ListModels"
#define REGISTER_MODEL "/qkv.v1.KvCache/RegisterModel"
#define REFLECTION "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
#define REFLECTION_ALPHA "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
#define MIB (INT64_C(1) << 20)

typedef struct test_state {
  fixture_daemon *daemon;
  fixture_client *client;
} test_state;

static int setup(void **out) {
  static const char *const arguments[] = {"--limit-calls",
                                          "6",
                                          "--limit-tenant-calls",
                                          "7",
                                          "--limit-message",
                                          "2MiB",
                                          "--memory-budget",
                                          "8MiB",
                                          "--limit-models",
                                          "3",
                                          NULL};
  test_state *state = calloc(1, sizeof(*state));
  assert_non_null(state);
  state->daemon = fixture_start(arguments);
  state->client = fixture_connect(state->daemon->unix_address);
  *out = state;
  return 0;
}

// The daemon must have survived every test, and must exit with 0.
static int teardown(void **out) {
  test_state *state = *out;
  fixture_disconnect(&state->client);
  int status = fixture_stop(&state->daemon, SIGTERM, FIXTURE_PATIENCE_MS);
  free(state);
  return status;
}

// ---- GetStatus ----

static Qkv__V1__GetStatusResponse *get_status(fixture_client *client) {
  fixture_result result = fixture_call(client, GET_STATUS, NULL, 0, FIXTURE_PATIENCE_MS);
  assert_int_equal(result.status, GRPC_STATUS_OK);
  Qkv__V1__GetStatusResponse *status = qkv__v1__get_status_response__unpack(NULL, result.length, result.data);
  assert_non_null(status);
  fixture_free(&result);
  return status;
}

static double metric_of(const Qkv__V1__GetStatusResponse *status, const char *name) {
  for (size_t i = 0; i < status->n_metrics; i++) {
    if (strcmp(status->metrics[i]->name, name) == 0) return status->metrics[i]->value;
  }
  fail_msg("no metric %s", name);
  return 0;
}

static double read_metric(fixture_client *client, const char *name) {
  Qkv__V1__GetStatusResponse *status = get_status(client);
  double value = metric_of(status, name);
  qkv__v1__get_status_response__free_unpacked(status, NULL);
  return value;
}

// Waits until this call is the only one.
static void wait_quiet(fixture_client *client) {
  int64_t until = fixture_now_ms() + FIXTURE_PATIENCE_MS;
  while (read_metric(client, "qkvd_calls_running") > 1) {
    assert_true(fixture_now_ms() < until);
    fixture_sleep_ms(5);
  }
}

static const Qkv__V1__OptionValue *option_of(const Qkv__V1__GetStatusResponse *status, const char *name) {
  for (size_t i = 0; i < status->n_options; i++) {
    if (strcmp(status->options[i]->name, name) == 0) return status->options[i];
  }
  fail_msg("no option %s", name);
  return NULL;
}

static void status_tells_all(void **out) {
  test_state *state = *out;
  Qkv__V1__GetStatusResponse *status = get_status(state->client);
  assert_string_equal(status->version, QKV_VERSION);
  assert_string_equal(status->state, "serving");
  assert_true(status->uptime_ms < 600000);
  assert_int_equal(status->models, 0);
  assert_int_equal(status->sessions, 0);
  assert_int_equal(status->kv_bytes, 0);
  assert_int_equal(status->kv_bytes_limit, 8 * MIB);
  assert_int_equal(status->kv_bytes_available, 8 * MIB);  // so little is never lowered
  assert_true(status->overhead_bytes > 0 && status->overhead_bytes <= status->rss_bytes + 8 * MIB);
  assert_in_range(status->rss_bytes, MIB, 4096 * MIB);
  assert_int_equal(status->n_listen, 2);
  assert_string_equal(status->listen[0], state->daemon->unix_address);
  assert_string_equal(status->listen[1], state->daemon->tcp_address);
  const qkv_kernels *kernels = qkv_kernels_for(qkv_cpu_flags());  // this machine's, which the daemon takes, too
  char flags[128], cpu[256];
  qkv_cpu_text(kernels->needs, flags, sizeof(flags));
  snprintf(cpu, sizeof(cpu), "%s: %s", kernels->name, flags);
  assert_string_equal(status->cpu, cpu);
  assert_string_equal(option_of(status, "limit-models")->value, "3");
  assert_string_equal(option_of(status, "limit-models")->source, "flag");
  assert_string_equal(option_of(status, "limit-items")->source, "default");
  assert_int_equal(metric_of(status, "qkvd_kv_limit_bytes"), 8 * MIB);
  assert_int_equal(metric_of(status, "qkvd_kv_allowed_bytes"), 8 * MIB);
  assert_true(metric_of(status, "qkvd_other_bytes") > 0);
  assert_int_equal(metric_of(status, "qkvd_calls_running"), 1);
  assert_string_equal(status->metrics[0]->type, "counter");
  assert_true(strlen(status->metrics[0]->help) > 0);
  qkv__v1__get_status_response__free_unpacked(status, NULL);
}

static void calls_are_counted_by_their_end(void **out) {
  test_state *state = *out;
  double before = read_metric(state->client, "qkvd_calls_refused_total");
  fixture_result result = fixture_call(state->client, "/qkv.v1.KvCache/Nothing", NULL, 0, FIXTURE_PATIENCE_MS);
  assert_int_equal(result.status, GRPC_STATUS_UNIMPLEMENTED);
  assert_string_equal(result.text, "no method /qkv.v1.KvCache/Nothing");
  assert_true(read_metric(state->client, "qkvd_calls_refused_total") == before + 1);
  before = read_metric(state->client, "qkvd_calls_bad_request_total");
  result = fixture_call(state->client, GET_STATUS, "\xff\xff", 2, FIXTURE_PATIENCE_MS);
  assert_int_equal(result.status, GRPC_STATUS_INVALID_ARGUMENT);
  assert_true(read_metric(state->client, "qkvd_calls_bad_request_total") == before + 1);
}

// ---- Health ----

static int serving(const uint8_t *data, size_t length) {
  Grpc__Health__V1__HealthCheckResponse *response =
      grpc__health__v1__health_check_response__unpack(NULL, length, data);
  assert_non_null(response);
  int status = response->status;
  grpc__health__v1__health_check_response__free_unpacked(response, NULL);
  return status;
}

static size_t health_request(const char *service, uint8_t data[64]) {
  Grpc__Health__V1__HealthCheckRequest request = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
  request.service = (char *)service;
  assert_true(grpc__health__v1__health_check_request__get_packed_size(&request) <= 64);
  return grpc__health__v1__health_check_request__pack(&request, data);
}

static void health_check(void **out) {
  test_state *state = *out;
  static const char *const services[] = {"", "qkv.v1.KvCache", "qkv.v1.Admin"};
  uint8_t request[64];
  for (size_t i = 0; i < 3; i++) {
    fixture_result result =
        fixture_call(state->client, CHECK, request, health_request(services[i], request), FIXTURE_PATIENCE_MS);
    assert_int_equal(result.status, GRPC_STATUS_OK);
    assert_int_equal(serving(result.data, result.length), 1);
    fixture_free(&result);
  }
  fixture_result result =
      fixture_call(state->client, CHECK, request, health_request("qkv.v2", request), FIXTURE_PATIENCE_MS);
  assert_int_equal(result.status, GRPC_STATUS_NOT_FOUND);
  assert_string_equal(result.text, "no service qkv.v2");
}

static fixture_stream *watch(fixture_client *client, const char *service, int64_t timeout_ms, int expected) {
  uint8_t request[64], *data;
  size_t length;
  fixture_stream *stream = fixture_open(client, WATCH, timeout_ms);
  assert_true(fixture_send(stream, request, health_request(service, request)));
  assert_true(fixture_receive(stream, &data, &length));
  assert_int_equal(serving(data, length), expected);
  free(data);
  return stream;
}

static void watch_ends_with_its_client(void **out) {
  test_state *state = *out;
  double before = read_metric(state->client, "qkvd_calls_cancelled_total");
  fixture_stream *cancelled = watch(state->client, "", 0, 1);
  fixture_stream *late = watch(state->client, "qkv.v1.KvCache", 200, 1);
  fixture_stream *unknown = watch(state->client, "qkv.v2", 0, 3);
  fixture_cancel(cancelled);
  fixture_cancel(unknown);
  assert_int_equal(fixture_finish(&cancelled).status, GRPC_STATUS_CANCELLED);
  assert_int_equal(fixture_finish(&unknown).status, GRPC_STATUS_CANCELLED);
  assert_int_equal(fixture_finish(&late).status, GRPC_STATUS_DEADLINE_EXCEEDED);
  wait_quiet(state->client);
  assert_true(read_metric(state->client, "qkvd_calls_cancelled_total") == before + 3);
}

// Calls that have been ended free their places, but not at once.
static void wait_served(fixture_client *client) {
  fixture_result result;
  do {
    result = fixture_call(client, LIST_MODELS, NULL, 0, FIXTURE_PATIENCE_MS);
    fixture_free(&result);
  } while (result.status == GRPC_STATUS_RESOURCE_EXHAUSTED);
  assert_int_equal(result.status, GRPC_STATUS_OK);
}

static void too_many_calls_are_refused(void **out) {
  test_state *state = *out;
  fixture_stream *streams[6];
  for (size_t i = 0; i < 6; i++) streams[i] = watch(state->client, "", 0, 1);
  fixture_result result = fixture_call(state->client, LIST_MODELS, NULL, 0, FIXTURE_PATIENCE_MS);
  assert_int_equal(result.status, GRPC_STATUS_RESOURCE_EXHAUSTED);
  assert_string_equal(result.text, "limit-calls is 6 and so many calls are running");
  result = fixture_call(state->client, GET_STATUS, NULL, 0, FIXTURE_PATIENCE_MS);  // has a limit of its own
  assert_int_equal(result.status, GRPC_STATUS_OK);
  fixture_free(&result);
  fixture_cancel(streams[0]);
  (void)fixture_finish(&streams[0]);
  wait_served(state->client);
  for (size_t i = 1; i < 6; i++) {
    fixture_cancel(streams[i]);
    (void)fixture_finish(&streams[i]);
  }
  wait_quiet(state->client);
}

// ---- Reflection ----

typedef Grpc__Reflection__V1alpha__ServerReflectionResponse reflection_response;
#define REQUEST(kind) GRPC__REFLECTION__V1ALPHA__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_##kind
#define RESPONSE(kind) GRPC__REFLECTION__V1ALPHA__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_##kind

static reflection_response *ask(fixture_stream *stream, int what, const char *text) {
  Grpc__Reflection__V1alpha__ServerReflectionRequest request =
      GRPC__REFLECTION__V1ALPHA__SERVER_REFLECTION_REQUEST__INIT;
  request.message_request_case = what;
  request.file_by_filename = (char *)text;  // every case but the extension's is a string there
  uint8_t packed[256], *data;
  size_t length;
  assert_true(grpc__reflection__v1alpha__server_reflection_request__get_packed_size(&request) <= sizeof(packed));
  length = grpc__reflection__v1alpha__server_reflection_request__pack(&request, packed);
  assert_true(fixture_send(stream, packed, length));
  assert_true(fixture_receive(stream, &data, &length));
  reflection_response *response = grpc__reflection__v1alpha__server_reflection_response__unpack(NULL, length, data);
  assert_non_null(response);
  free(data);
  assert_int_equal(response->original_request->message_request_case, what);
  return response;
}

static void free_response(reflection_response *response) {
  grpc__reflection__v1alpha__server_reflection_response__free_unpacked(response, NULL);
}

// The answer is `count` files, the first of which is named `name` (a FileDescriptorProto begins with its name).
static void expect_files(fixture_stream *stream, int what, const char *text, const char *name, size_t count) {
  reflection_response *response = ask(stream, what, text);
  assert_int_equal(response->message_response_case, RESPONSE(FILE_DESCRIPTOR_RESPONSE));
  assert_int_equal(response->file_descriptor_response->n_file_descriptor_proto, count);
  const ProtobufCBinaryData *file = &response->file_descriptor_response->file_descriptor_proto[0];
  assert_int_equal(file->data[0], 0x0a);
  assert_int_equal(file->data[1], strlen(name));
  assert_memory_equal(file->data + 2, name, strlen(name));
  free_response(response);
}

static void expect_error(fixture_stream *stream, int what, const char *text, int code, const char *message) {
  reflection_response *response = ask(stream, what, text);
  assert_int_equal(response->message_response_case, RESPONSE(ERROR_RESPONSE));
  assert_int_equal(response->error_response->error_code, code);
  assert_string_equal(response->error_response->error_message, message);
  free_response(response);
}

static void reflection_lists_services(void **out) {
  test_state *state = *out;
  static const char *const expected[] = {"qkv.v1.KvCache", "qkv.v1.Admin", "grpc.health.v1.Health",
                                         "grpc.reflection.v1.ServerReflection",
                                         "grpc.reflection.v1alpha.ServerReflection"};
  static const char *const versions[] = {REFLECTION, REFLECTION_ALPHA};
  for (size_t version = 0; version < 2; version++) {
    fixture_stream *stream = fixture_open(state->client, versions[version], FIXTURE_PATIENCE_MS);
    reflection_response *response = ask(stream, REQUEST(LIST_SERVICES), "");
    for (size_t i = 0; i < sizeof(expected) / sizeof(expected[0]); i++) {
      size_t found = 0;
      for (size_t j = 0; j < response->list_services_response->n_service; j++) {
        found += strcmp(response->list_services_response->service[j]->name, expected[i]) == 0;
      }
      assert_int_equal(found, 1);
    }
    free_response(response);
    fixture_half_close(stream);
    assert_int_equal(fixture_finish(&stream).status, GRPC_STATUS_OK);
  }
}

static void reflection_finds_files_and_symbols(void **out) {
  test_state *state = *out;
  static const char cache[] = "qkv/v1/kv_cache.proto", tensor[] = "qkv/v1/tensor.proto";
  fixture_stream *stream = fixture_open(state->client, REFLECTION, FIXTURE_PATIENCE_MS);
  expect_files(stream, REQUEST(FILE_BY_FILENAME), cache, cache, 3);  // with model and tensor
  expect_files(stream, REQUEST(FILE_BY_FILENAME), tensor, tensor, 1);
  static const char *const symbols[] = {"qkv.v1.KvCache",           "qkv.v1.KvCache.Attend", "qkv.v1.FetchRequest",
                                        "qkv.v1.FetchRequest.Part", "qkv.v1.Purpose",        "qkv.v1.Item.layer"};
  for (size_t i = 0; i < sizeof(symbols) / sizeof(symbols[0]); i++) {
    expect_files(stream, REQUEST(FILE_CONTAINING_SYMBOL), symbols[i], cache, 3);
  }
  expect_files(stream, REQUEST(FILE_CONTAINING_SYMBOL), "qkv.v1.DType", tensor, 1);
  expect_files(stream, REQUEST(FILE_CONTAINING_SYMBOL), "grpc.reflection.v1.ServerReflection",
               "grpc/reflection/v1/reflection.proto", 1);
  expect_error(stream, REQUEST(FILE_BY_FILENAME), "kv_cache.proto", 5, "no file kv_cache.proto");
  // Prefixes, extensions of names and the package itself are no symbols.
  static const char *const none[] = {"qkv.v1", "qkv.v1.KvCach", "qkv.v1.KvCache.", "qkv.v1.KvCache.Attend.x", "",
                                     "."};
  for (size_t i = 0; i < sizeof(none) / sizeof(none[0]); i++) {
    char text[64];
    snprintf(text, sizeof(text), "no symbol %s", none[i]);
    expect_error(stream, REQUEST(FILE_CONTAINING_SYMBOL), none[i], 5, text);
  }
  expect_error(stream, REQUEST(ALL_EXTENSION_NUMBERS_OF_TYPE), "qkv.v1.Item", 5, "this contract has no extensions");
  fixture_half_close(stream);
  assert_int_equal(fixture_finish(&stream).status, GRPC_STATUS_OK);
}

// ---- Bad input ----

static void large_message_is_refused(void **out) {
  test_state *state = *out;
  uint8_t *data = calloc(1, 3 * MIB);
  fixture_result result = fixture_call(state->client, GET_STATUS, data, 3 * MIB, FIXTURE_PATIENCE_MS);
  assert_int_equal(result.status, GRPC_STATUS_RESOURCE_EXHAUSTED);
  assert_non_null(strstr(result.text, "2097152"));
  free(data);
  wait_quiet(state->client);
}

static void bomb_is_refused_in_little_memory(void **out) {
  test_state *state = *out;
  int64_t length = 256 * MIB;
  uint8_t *zeros = calloc(1, length);  // 256 KiB once it is compressed
  assert_non_null(zeros);
  fixture_result result = fixture_call_gzip(state->client, GET_STATUS, zeros, length, FIXTURE_PATIENCE_MS);
  free(zeros);
  assert_int_equal(result.status, GRPC_STATUS_UNIMPLEMENTED);
  wait_quiet(state->client);
  if (!fixture_is_sanitized()) assert_in_range(fixture_memory(state->daemon, "VmHWM"), 1, 100 * MIB);
}

static int connect_unix(const char *address) {
  struct sockaddr_un peer = {.sun_family = AF_UNIX};
  snprintf(peer.sun_path, sizeof(peer.sun_path), "%s", address + strlen("unix:"));
  int file = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  assert_int_equal(connect(file, (struct sockaddr *)&peer, sizeof(peer)), 0);
  return file;
}

static int connect_tcp(const char *address) {
  unsigned long port = strtoul(strrchr(address, ':') + 1, NULL, 10);
  struct sockaddr_in peer = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
  peer.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  int file = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  assert_int_equal(connect(file, (struct sockaddr *)&peer, sizeof(peer)), 0);
  return file;
}

static size_t put_frame(uint8_t *out, uint8_t type, uint8_t flags, uint32_t stream, const void *body, size_t length) {
  const uint8_t head[] = {
      0, 0, (uint8_t)length, type, flags, 0, (uint8_t)(stream >> 16), (uint8_t)(stream >> 8), (uint8_t)stream};
  memcpy(out, head, sizeof(head));
  if (length > 0) memcpy(out + sizeof(head), body, length);
  return sizeof(head) + length;
}

// Endless calls of a client that reads no answer, in frames of HTTP/2 and HPACK: in 6 bytes each, as most of each
// call is in the table that the first one makes.
static void flood_of_calls_is_cut(void **out) {
  test_state *state = *out;
  enum { HEADERS = 1, SETTINGS = 4, CALLS = 20000 };
  static const char first[] =
      "\x83\x86\x44\x16/qkv.v1.KvCache/Attend\x40\x0a:authority\x01l\x40\x0c"
      "content-type\x10"
      "application/grpc\x40\x02te\x08trailers";
  static const char other[] = "\x83\x86\xc1\xc0\xbf\xbe", greeting[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
  uint8_t frame[128];
  wait_quiet(state->client);
  const int64_t before = fixture_memory(state->daemon, "VmHWM");
  int file = connect_unix(state->daemon->unix_address);
  assert_int_equal(send(file, greeting, sizeof(greeting) - 1, MSG_NOSIGNAL), sizeof(greeting) - 1);
  (void)send(file, frame, put_frame(frame, SETTINGS, 0, 0, "", 0), MSG_NOSIGNAL);
  assert_true(recv(file, frame, sizeof(frame), 0) > 0);  // its settings
  (void)send(file, frame, put_frame(frame, SETTINGS, 1, 0, "", 0), MSG_NOSIGNAL);
  bool cut = false;
  for (uint32_t i = 0; i < CALLS && !cut; i++) {
    const size_t length = i == 0 ? put_frame(frame, HEADERS, 4, 1, first, sizeof(first) - 1)
                                 : put_frame(frame, HEADERS, 4, 2 * i + 1, other, sizeof(other) - 1);
    cut = send(file, frame, length, MSG_NOSIGNAL) < 0;
  }
  assert_true(cut);
  close(file);
  wait_served(state->client);
  wait_quiet(state->client);
  if (!fixture_is_sanitized()) assert_true(fixture_memory(state->daemon, "VmHWM") <= before + 16 * MIB);
}

// A model of empty overrides, two bytes each, which would take a hundred each once they are unpacked.
static void swarm_is_refused_in_little_memory(void **out) {
  test_state *state = *out;
  enum { OVERRIDES = 13, EMPTY = 1000000, LENGTH = 2 * EMPTY, HEAD = 4 };  // model.proto
  uint8_t *request = malloc(HEAD + LENGTH);
  assert_non_null(request);
  const uint8_t head[HEAD] = {0x0a, 0x80 | (LENGTH & 0x7f), 0x80 | (LENGTH >> 7 & 0x7f), LENGTH >> 14};
  memcpy(request, head, HEAD);
  for (size_t i = 0; i < EMPTY; i++) memcpy(request + HEAD + 2 * i, (const uint8_t[]){OVERRIDES << 3 | 2, 0}, 2);
  const int64_t before = fixture_memory(state->daemon, "VmHWM");
  fixture_result result = fixture_call(state->client, REGISTER_MODEL, request, HEAD + LENGTH, FIXTURE_PATIENCE_MS);
  free(request);
  assert_int_equal(result.status, GRPC_STATUS_INVALID_ARGUMENT);
  assert_string_equal(result.text, "request has more than 65536 fields");
  wait_quiet(state->client);
  if (!fixture_is_sanitized()) assert_true(fixture_memory(state->daemon, "VmHWM") <= before + 16 * MIB);
}

static void garbage_on_the_sockets(void **out) {
  test_state *state = *out;
  uint8_t noise[4096];
  uint32_t random = 12345;
  for (size_t i = 0; i < sizeof(noise); i++) noise[i] = (uint8_t)((random = random * 1664525 + 1013904223) >> 24);
  static const char *const greetings[] = {"", "GET / HTTP/1.1\r\nHost: x\r\n\r\n",
                                          "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"};
  for (int i = 0; i < 12; i++) {
    int file = i % 2 ? connect_unix(state->daemon->unix_address) : connect_tcp(state->daemon->tcp_address);
    const char *greeting = greetings[i % 3];
    (void)send(file, greeting, strlen(greeting), MSG_NOSIGNAL);
    (void)send(file, noise, sizeof(noise), MSG_NOSIGNAL);
    close(file);
  }
  uint8_t request[64];
  fixture_result result =
      fixture_call(state->client, CHECK, request, health_request("", request), FIXTURE_PATIENCE_MS);
  assert_int_equal(result.status, GRPC_STATUS_OK);
  fixture_free(&result);
}

// Every prefix of a message, cut inside a field.
static void truncated_messages_are_refused(void **out) {
  test_state *state = *out;
  uint8_t request[64];
  size_t length = health_request("qkv.v1.KvCache", request);
  for (size_t cut = 1; cut < length; cut++) {
    fixture_result result = fixture_call(state->client, CHECK, request, cut, FIXTURE_PATIENCE_MS);
    assert_int_equal(result.status, GRPC_STATUS_INVALID_ARGUMENT);
    assert_non_null(strstr(result.text, "truncated"));
  }
}

// Calls whose client is gone before the daemon has seen them: the daemon is stopped meanwhile.
static void calls_that_are_over_when_they_arrive(void **out) {
  test_state *state = *out;
  fixture_stream *streams[3];
  uint8_t request[64];
  size_t length = health_request("", request);
  wait_quiet(state->client);
  assert_int_equal(kill(state->daemon->pid, SIGSTOP), 0);
  for (size_t i = 0; i < 3; i++) {
    streams[i] = fixture_open(state->client, i == 0 ? WATCH : CHECK, 3000);
    assert_true(fixture_send(streams[i], request, length));
  }
  fixture_cancel(streams[0]);
  assert_int_equal(fixture_finish(&streams[0]).status, GRPC_STATUS_CANCELLED);
  assert_int_equal(fixture_finish(&streams[1]).status, GRPC_STATUS_DEADLINE_EXCEEDED);
  assert_int_equal(fixture_finish(&streams[2]).status, GRPC_STATUS_DEADLINE_EXCEEDED);
  assert_int_equal(kill(state->daemon->pid, SIGCONT), 0);
  wait_quiet(state->client);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(status_tells_all),
      cmocka_unit_test(calls_are_counted_by_their_end),
      cmocka_unit_test(health_check),
      cmocka_unit_test(watch_ends_with_its_client),
      cmocka_unit_test(too_many_calls_are_refused),
      cmocka_unit_test(reflection_lists_services),
      cmocka_unit_test(reflection_finds_files_and_symbols),
      cmocka_unit_test(large_message_is_refused),
      cmocka_unit_test(flood_of_calls_is_cut),
      cmocka_unit_test(swarm_is_refused_in_little_memory),
      cmocka_unit_test(bomb_is_refused_in_little_memory),
      cmocka_unit_test(garbage_on_the_sockets),
      cmocka_unit_test(truncated_messages_are_refused),
      cmocka_unit_test(calls_that_are_over_when_they_arrive),
  };
  return cmocka_run_group_tests(tests, setup, teardown);
}
