// KvCache calls under failures around them: a full budget, a full queue, clients that die, do not read, run out of
// time or cancel, sessions that close under a fetch, and many clients at once.
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/server/kv.h"

#include <cmocka.h>

#define LONG_TOKENS 6000  // of a session whose fetch fills every buffer to the client

static fixture_daemon *daemon_process;
static fixture_client *client;

static void start(const char *const *arguments) {
  kv_start(arguments, &daemon_process, &client);
}

static void stop(void) {
  kv_stop(&daemon_process, &client);
}

static bool send_items(fixture_stream *stream, const kv_item *items, size_t count) {
  uint8_t *bytes = NULL;
  size_t length = kv_pack(items, count, 0, &bytes);
  bool sent = fixture_send(stream, bytes, length);
  free(bytes);
  return sent;
}

static void fill_long_session(const char *session) {
  kv_open(client, session);
  for (uint32_t layer = 0; layer < KV_LAYERS; layer++) {
    for (uint64_t at = 0; at < LONG_TOKENS; at += 2000) {
      const kv_item item = {.session = session, .layer = layer, .position = at, .tokens = 2000, .seed = 1};
      assert_int_equal(kv_append(client, &item, 1, NULL), QKV_OK);
    }
  }
}

static fixture_stream *open_fetch(fixture_client *from, const char *session, uint32_t chunk_tokens) {
  uint8_t bytes[64];
  Qkv__V1__FetchRequest request = QKV__V1__FETCH_REQUEST__INIT;
  request.session = (char *)session;
  request.dtype = QKV__V1__DTYPE__DTYPE_FP32;
  request.chunk_tokens = chunk_tokens;
  size_t length = qkv__v1__fetch_request__pack(&request, bytes);
  fixture_stream *stream = fixture_open(from, KV_METHOD("Fetch"), 0);
  assert_true(fixture_send(stream, bytes, length));
  fixture_half_close(stream);
  return stream;
}

// ---- Budgets ----

static void a_full_budget_refuses_whole_items(void **state) {
  (void)state;
  // Nothing is demoted for memory, which would hold the session for a moment after it is closed.
  start((const char *[]){"--memory-budget", "1MiB", "--memory-high", "1", "--memory-low", "1", NULL});
  kv_open(client, "a");
  kv_open(client, "b");
  char text[FIXTURE_TEXT_MAX];
  uint64_t held = 0;
  int status = QKV_OK;
  double bytes = 0, reserved = 0;
  while (status == QKV_OK) {
    bytes = kv_metric(client, "qkvd_kv_bytes");
    reserved = kv_metric(client, "qkvd_kv_reserved_bytes");
    // The small item after the large one is not applied once that has failed.
    const kv_item items[] = {{.session = "a", .position = held, .tokens = 1000, .seed = 1},
                             {.session = "a", .layer = 1, .position = held / 1000, .tokens = 1, .seed = 1}};
    status = kv_append(client, items, 2, text);
    if (status == QKV_OK) held += 1000;
    assert_true(held < 100000);
  }
  assert_true(held > 0);
  assert_int_equal(status, QKV_RESOURCE_EXHAUSTED);
  assert_non_null(strstr(text, "message 0: items[0]: memory-budget is 1048576 bytes"));
  assert_int_equal(kv_length(client, "a", 0), held);
  assert_int_equal(kv_length(client, "a", 1), held / 1000);
  assert_true(kv_metric(client, "qkvd_kv_bytes") == bytes);
  assert_true(kv_metric(client, "qkvd_kv_reserved_bytes") == reserved);
  assert_true(kv_metric(client, "qkvd_refused_budget_total") == 1);

  // Attend's error names it, too; held sessions still answer, and another session gets no memory either.
  const kv_item more = {.session = "b", .tokens = 1000, .queries = 1, .seed = 1};
  Qkv__V1__AttendResponse *response = NULL;
  assert_int_equal(kv_attend(client, &more, 1, &response, text), QKV_RESOURCE_EXHAUSTED);
  assert_non_null(strstr(text, "items[0]: memory-budget is 1048576 bytes"));
  assert_int_equal(kv_length(client, "b", 0), 0);
  const kv_item query = {.session = "a", .position = held, .queries = 1};
  assert_int_equal(kv_attend(client, &query, 1, &response, NULL), QKV_OK);
  qkv__v1__attend_response__free_unpacked(response, NULL);

  kv_close(client, "a");
  assert_int_equal(kv_append(client, &(kv_item){.session = "b", .tokens = 1000, .seed = 1}, 1, NULL), QKV_OK);
  assert_int_equal(kv_length(client, "b", 0), 1000);
  stop();
}

static void the_model_limit_is_named(void **state) {
  (void)state;
  start((const char *[]){"--limit-models", "1", NULL});
  Qkv__V1__Model model = QKV__V1__MODEL__INIT;
  model.name = (char *)"second";
  model.layers = model.kv_heads = model.q_heads = 1;
  model.key_dim = model.value_dim = 8;
  model.dtype = QKV__V1__DTYPE__DTYPE_FP32;
  Qkv__V1__RegisterModelRequest request = QKV__V1__REGISTER_MODEL_REQUEST__INIT;
  request.model = &model;
  fixture_result result = kv_call(client, KV_METHOD("RegisterModel"), &request.base);
  assert_int_equal(result.status, QKV_RESOURCE_EXHAUSTED);
  assert_non_null(strstr(result.text, "limit-models is 1"));
  fixture_free(&result);
  stop();
}

// Of eight streams at once with one message each: how many are answered, and how many refused with that text.
typedef struct outcome {
  size_t answered, refused;
} outcome;

static outcome send_at_once(const char *method, const kv_item items[8], const char *refusal) {
  fixture_stream *streams[8];
  outcome all = {0};
  for (size_t i = 0; i < 8; i++) {
    streams[i] = fixture_open(client, method, FIXTURE_PATIENCE_MS);
    assert_true(send_items(streams[i], &items[i], 1));
  }
  for (size_t i = 0; i < 8; i++) {
    fixture_half_close(streams[i]);
    uint8_t *answer = NULL;
    size_t length = 0;
    const bool answered = fixture_receive(streams[i], &answer, &length);
    free(answer);
    fixture_result result = fixture_finish(&streams[i]);
    all.answered += answered;
    all.refused += !answered;
    if (answered) continue;
    assert_int_equal(result.status, QKV_RESOURCE_EXHAUSTED);
    assert_string_equal(result.text, refusal);
  }
  return all;
}

// One compute thread, one job may wait: of eight heavy requests at once some are refused, by name, and the daemon
// serves on. The requests come again where the thread was done with each before the next one came.
static void a_full_queue_refuses(void **state) {
  (void)state;
  start((const char *[]){"--threads", "1", "--limit-queue", "1", "--cpu-mask", "none", NULL});
  fill_long_session("q");
  kv_item heavy[8];
  for (size_t i = 0; i < 8; i++)
    heavy[i] = (kv_item){.session = "q", .position = LONG_TOKENS, .queries = 40, .seed = 2};
  outcome all;
  do {
    all = send_at_once(KV_METHOD("Decode"), heavy, "limit-queue is 1 jobs, that many wait already");
    assert_true(all.answered >= 1);
    kv_wait_idle(client);
  } while (all.refused == 0);
  assert_true(kv_metric(client, "qkvd_refused_queue_total") == (double)all.refused);
  kv_close(client, "q");
  assert_true(kv_metric(client, "qkvd_kv_bytes") == 0);
  stop();
}

// Of an Append stream it says which message was refused.
static void a_full_queue_refuses_a_message(void **state) {
  (void)state;
  start((const char *[]){"--threads", "1", "--limit-queue", "1", "--cpu-mask", "none", NULL});
  kv_item rows[8];
  for (uint32_t i = 0; i < 8; i++)
    rows[i] = (kv_item){.session = "q", .layer = i % KV_LAYERS, .tokens = LONG_TOKENS, .seed = 1};
  outcome all;
  do {
    fill_long_session("q");
    all = send_at_once(KV_METHOD("Append"), rows, "message 0: limit-queue is 1 jobs, that many wait already");
    kv_wait_idle(client);
    kv_close(client, "q");
  } while (all.refused == 0);
  stop();
}

// Results and rows that would not fit are refused by name; what was sent is given back.
static void responses_have_a_limit(void **state) {
  (void)state;
  start((const char *[]){"--limit-response-bytes", "1MiB", NULL});
  fill_long_session("r");
  fixture_stream *stream = open_fetch(client, "r", LONG_TOKENS);  // 768000 bytes of k, 1152000 of v
  fixture_result result = fixture_finish(&stream);
  assert_int_equal(result.status, QKV_RESOURCE_EXHAUSTED);
  assert_string_equal(result.text,
                      "limit-response-bytes is 1048576 bytes, 768000 are on their way, 1152000 more are needed");
  // 2721 queries: 4 heads of 24 floats each, and 4 LSEs.
  const kv_item many = {.session = "r", .position = LONG_TOKENS, .tokens = 1, .queries = 2721, .seed = 1};
  char text[FIXTURE_TEXT_MAX];
  Qkv__V1__AttendResponse *response = NULL;
  assert_int_equal(kv_attend(client, &many, 1, &response, text), QKV_RESOURCE_EXHAUSTED);
  assert_string_equal(text, "limit-response-bytes is 1048576 bytes, 0 are on their way, 1088448 more are needed");
  assert_int_equal(kv_length(client, "r", 0), LONG_TOKENS);  // nothing has been appended
  stream = open_fetch(client, "r", 512);
  uint8_t *data = NULL;
  size_t length = 0;
  while (fixture_receive(stream, &data, &length)) free(data);
  assert_int_equal(fixture_finish(&stream).status, QKV_OK);
  kv_wait_idle(client);
  assert_true(kv_metric(client, "qkvd_response_bytes") == 0);
  stop();
}

// ---- Clients that go away ----

// Runs this program again, as a client in a process of its own.
static pid_t spawn(const char *role) {
  pid_t pid = fork();
  assert_true(pid >= 0);
  if (pid > 0) return pid;
  execl("/proc/self/exe", "kv_life_test", role, daemon_process->unix_address, (char *)NULL);
  _exit(127);
}

// Three streams at full speed, then a violent end.
static int die(const char *address) {
  fixture_client *doomed = fixture_connect(address);
  fixture_stream *append = fixture_open(doomed, KV_METHOD("Append"), 0);
  fixture_stream *decode = fixture_open(doomed, KV_METHOD("Decode"), 0);
  const kv_item rows = {.session = "dies", .tokens = 5, .seed = 3};
  const kv_item step = {.session = "dies", .layer = 1, .tokens = 1, .queries = 1, .seed = 3};
  uint8_t *answer = NULL;
  size_t length = 0;
  if (!send_items(append, &rows, 1) || !send_items(decode, &step, 1)) return 1;
  if (!fixture_receive(decode, &answer, &length)) return 1;
  (void)open_fetch(doomed, "long", 512);
  while (kv_length(doomed, "dies", 0) < 5) fixture_sleep_ms(1);
  (void)raise(SIGKILL);
  return 1;
}

// Three fetches, and no step further until it is woken; then reads one to its end, which must be that the session
// is gone, and drops the others.
static int stall(const char *address) {
  fixture_client *stalled = fixture_connect(address);
  fixture_stream *streams[3];
  for (size_t i = 0; i < 3; i++) streams[i] = open_fetch(stalled, "long", 512);
  (void)raise(SIGSTOP);
  uint8_t *data = NULL;
  size_t length = 0;
  while (fixture_receive(streams[0], &data, &length)) free(data);
  fixture_result result = fixture_finish(&streams[0]);
  for (size_t i = 1; i < 3; i++) {
    fixture_cancel(streams[i]);
    (void)fixture_finish(&streams[i]);
  }
  fixture_disconnect(&stalled);
  return result.status == QKV_NOT_FOUND && strcmp(result.text, "session long has been closed") == 0 ? 0 : 1;
}

static void clients_that_die_leave_nothing_running(void **state) {
  (void)state;
  start(NULL);
  fill_long_session("long");
  kv_open(client, "dies");
  int status = 0;
  pid_t pid = spawn("--die");
  assert_int_equal(waitpid(pid, &status, 0), pid);
  assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
  kv_wait_idle(client);
  assert_int_equal(kv_length(client, "dies", 0), 5);  // rows that had arrived whole stay
  assert_int_equal(kv_length(client, "dies", 1), 1);
  const kv_item next = {.session = "dies", .position = 5, .tokens = 1, .seed = 3};
  assert_int_equal(kv_append(client, &next, 1, NULL), QKV_OK);
  assert_true(kv_metric(client, "qkvd_calls_cancelled_total") >= 1);
  stop();
}

// A client that asks for megabytes and reads none of them: it is sent as much as the connection's buffers take, keeps
// no memory of the session, and blocks no other client.
static void a_client_that_never_reads_costs_one_chunk(void **state) {
  (void)state;
  start(NULL);
  fill_long_session("long");
  const double chunk = 512 * KV_HEADS * (KV_KEY_DIM + KV_VALUE_DIM) * 4.0,
               all = chunk / 512 * LONG_TOKENS * KV_LAYERS;
  int status = 0;
  pid_t pid = spawn("--stall");
  assert_int_equal(waitpid(pid, &status, WUNTRACED), pid);
  assert_true(WIFSTOPPED(status));
  // Once nothing more is sent for a while, a part has been, and every call still runs.
  for (double sent = 0, before = -1; sent < chunk || sent != before;) {
    fixture_sleep_ms(500);
    before = sent;
    sent = kv_metric(client, "qkvd_fetch_bytes_total");
    assert_true(sent < all);
  }
  assert_true(kv_metric(client, "qkvd_calls_running") == 4);

  // Its session closes and releases everything at once. A client that reads on gets an error.
  kv_close(client, "long");
  assert_true(kv_metric(client, "qkvd_kv_bytes") == 0);
  assert_true(kv_metric(client, "qkvd_calls_running") == 4);
  assert_int_equal(kill(pid, SIGCONT), 0);
  assert_int_equal(waitpid(pid, &status, 0), pid);
  assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  kv_wait_idle(client);
  stop();
}

// Another session of the same name is not taken for the requested one; a truncated one ends where it ends.
static void sessions_may_change_under_a_fetch(void **state) {
  (void)state;
  start(NULL);
  fill_long_session("x");
  fixture_stream *stream = open_fetch(client, "x", 2);
  uint8_t *data = NULL;
  size_t length = 0;
  assert_true(fixture_receive(stream, &data, &length));
  free(data);
  Qkv__V1__TruncateRequest truncate = QKV__V1__TRUNCATE_REQUEST__INIT;
  truncate.session = (char *)"x";
  truncate.position = 10;
  fixture_result result = kv_call(client, KV_METHOD("Truncate"), &truncate.base);
  assert_int_equal(result.status, QKV_OK);
  fixture_free(&result);
  while (fixture_receive(stream, &data, &length)) free(data);
  result = fixture_finish(&stream);
  assert_string_equal(result.text, "");
  assert_int_equal(result.status, QKV_OK);
  kv_close(client, "x");

  fill_long_session("x");
  stream = open_fetch(client, "x", 2);
  assert_true(fixture_receive(stream, &data, &length));
  free(data);
  kv_close(client, "x");
  fill_long_session("x");
  while (fixture_receive(stream, &data, &length)) free(data);
  result = fixture_finish(&stream);
  assert_int_equal(result.status, QKV_NOT_FOUND);
  assert_string_equal(result.text, "session x has been closed");
  stop();
}

static void deadlines_and_cancellation_end_calls(void **state) {
  (void)state;
  start(NULL);
  fill_long_session("long");
  double cancelled = kv_metric(client, "qkvd_calls_cancelled_total");
  // A stream that waits for its client.
  fixture_stream *idle = fixture_open(client, KV_METHOD("Decode"), 3000);
  const kv_item step = {.session = "long", .position = LONG_TOKENS, .queries = 1};
  assert_true(send_items(idle, &step, 1));
  uint8_t *answer = NULL;
  size_t length = 0;
  assert_true(fixture_receive(idle, &answer, &length));
  free(answer);
  fixture_result result = fixture_finish(&idle);
  assert_int_equal(result.status, QKV_DEADLINE_EXCEEDED);
  // A computation that takes longer than its client waits.
  const kv_item heavy = {.session = "long", .position = LONG_TOKENS, .queries = 2000};
  uint8_t *bytes = NULL;
  length = kv_pack(&heavy, 1, 0, &bytes);
  result = fixture_call(client, KV_METHOD("Attend"), bytes, length, 2);
  assert_int_equal(result.status, QKV_DEADLINE_EXCEEDED);
  // One that is cancelled while it waits for rows.
  fixture_stream *stream = fixture_open(client, KV_METHOD("Append"), 0);
  const kv_item rows = {.session = "long", .position = LONG_TOKENS, .tokens = 1, .seed = 1};
  assert_true(send_items(stream, &rows, 1));
  while (kv_length(client, "long", 0) == LONG_TOKENS) fixture_sleep_ms(1);
  fixture_cancel(stream);
  result = fixture_finish(&stream);
  assert_int_equal(result.status, QKV_CANCELLED);
  kv_wait_idle(client);
  // Perhaps none was counted: a stream that is cancelled between two messages can look like one that has ended, and
  // the computation may not have reached the daemon in time. A call that waits longer has.
  for (int64_t patience_ms = 4; kv_metric(client, "qkvd_calls_cancelled_total") < cancelled + 1; patience_ms *= 2) {
    result = fixture_call(client, KV_METHOD("Attend"), bytes, length, patience_ms);
    assert_int_equal(result.status, QKV_DEADLINE_EXCEEDED);
    kv_wait_idle(client);
  }
  free(bytes);
  stop();
}

// ---- Many at once ----

typedef struct worker {
  const char *address;
  char session[16];
  int index;
  size_t wrong;
} worker;

// Steps of a decode loop on a session of its own; each answer equals the reference session's, whatever the other
// threads do.
static void *decode_steps(void *context) {
  worker *self = context;
  fixture_client *own = fixture_connect(self->address);
  kv_reference reference = kv_reference_open(self->session);
  fixture_stream *stream = fixture_open(own, KV_METHOD("Decode"), FIXTURE_PATIENCE_MS);
  for (uint64_t step = 0; step < 150; step++) {
    // The session's own row and query, and a query to the session that all threads share.
    const kv_item items[] = {
        {.session = self->session, .position = step, .tokens = 1, .queries = 1, .seed = (uint32_t)self->index},
        {.session = "shared", .position = 500, .queries = 1, .seed = 5}};
    uint8_t *answer = NULL;
    size_t length = 0;
    if (!send_items(stream, items, 2) || !fixture_receive(stream, &answer, &length)) {
      self->wrong++;
      break;
    }
    Qkv__V1__AttendResponse *response = qkv__v1__attend_response__unpack(NULL, length, answer);
    float out[KV_Q_HEADS * KV_VALUE_DIM], lse[KV_Q_HEADS];
    kv_reference_append(&reference, &items[0]);
    kv_reference_attend(&reference, &items[0], out, lse);
    if (response == NULL || response->n_results != 2 || response->results[0]->status->code != QKV_OK ||
        response->results[1]->status->code != QKV_OK || response->results[0]->out->data.len != sizeof out ||
        memcmp(response->results[0]->out->data.data, (const uint8_t *)out, sizeof out) != 0)
      self->wrong++;
    if (response != NULL) qkv__v1__attend_response__free_unpacked(response, NULL);
    free(answer);
  }
  fixture_half_close(stream);
  self->wrong += fixture_finish(&stream).status != QKV_OK;
  kv_reference_close(&reference);
  fixture_disconnect(&own);
  return NULL;
}

// Opens, fills, fetches and closes; appends to the shared session now and then.
static void *churn(void *context) {
  worker *self = context;
  fixture_client *own = fixture_connect(self->address);
  for (uint64_t round = 0; round < 15; round++) {
    kv_open(own, "churn");
    const kv_item rows[] = {{.session = "churn", .tokens = 2000, .seed = 6},
                            {.session = "shared", .position = 500 + round * 3, .tokens = 3, .seed = 7}};
    self->wrong += kv_append(own, rows, 2, NULL) != QKV_OK;
    fixture_stream *stream = open_fetch(own, "churn", 512);
    uint8_t *data = NULL;
    size_t length = 0, responses = 0;
    while (fixture_receive(stream, &data, &length)) {
      free(data);
      responses++;
    }
    self->wrong += fixture_finish(&stream).status != QKV_OK || responses != 4;
    kv_close(own, "churn");
  }
  fixture_disconnect(&own);
  return NULL;
}

static void many_clients_do_not_disturb_each_other(void **state) {
  (void)state;
  start((const char *[]){"--rpc-threads", "3", NULL});
  kv_open(client, "shared");
  assert_int_equal(kv_append(client, &(kv_item){.session = "shared", .tokens = 500, .seed = 7}, 1, NULL), QKV_OK);
  worker workers[5];
  pthread_t threads[5];
  for (int i = 0; i < 5; i++) {
    workers[i] =
        (worker){.address = i % 2 == 0 ? daemon_process->unix_address : daemon_process->tcp_address, .index = i};
    (void)snprintf(workers[i].session, sizeof workers[i].session, "own-%d", i);
    if (i < 4) kv_open(client, workers[i].session);
    assert_int_equal(pthread_create(&threads[i], NULL, i < 4 ? decode_steps : churn, &workers[i]), 0);
  }
  for (int i = 0; i < 5; i++) {
    assert_int_equal(pthread_join(threads[i], NULL), 0);
    assert_int_equal(workers[i].wrong, 0);
  }
  assert_int_equal(kv_length(client, "shared", 0), 545);
  for (int i = 0; i < 4; i++) kv_close(client, workers[i].session);
  kv_close(client, "shared");
  assert_true(kv_metric(client, "qkvd_kv_bytes") == 0);
  stop();
}

// ---- Discard ----

// A model, and a session of its name, with as many heads as "m" and other widths.
static void open_other(uint32_t key_dim, uint32_t value_dim, const char *name) {
  Qkv__V1__Model model = QKV__V1__MODEL__INIT;
  Qkv__V1__RegisterModelRequest request = QKV__V1__REGISTER_MODEL_REQUEST__INIT;
  Qkv__V1__OpenSessionRequest open = QKV__V1__OPEN_SESSION_REQUEST__INIT;
  model.name = (char *)(uintptr_t)name;
  model.layers = 1;
  model.kv_heads = KV_HEADS;
  model.q_heads = KV_Q_HEADS;
  model.key_dim = key_dim;
  model.value_dim = value_dim;
  model.dtype = QKV__V1__DTYPE__DTYPE_FP16;
  request.model = &model;
  fixture_result result = kv_call(client, KV_METHOD("RegisterModel"), &request.base);
  assert_int_equal(result.status, QKV_OK);
  fixture_free(&result);
  open.session = open.model = model.name;
  result = kv_call(client, KV_METHOD("OpenSession"), &open.base);
  assert_int_equal(result.status, QKV_OK);
  fixture_free(&result);
}

static void discard_checks_shapes_and_keeps_nothing(void **state) {
  (void)state;
  start((const char *[]){"--discard", NULL});
  kv_open(client, "d");
  const double empty = kv_metric(client, "qkvd_kv_bytes");
  const kv_item items[] = {{.session = "d", .position = 77, .tokens = 100, .seed = 8},
                           {.session = "d", .layer = 2, .tokens = 3000, .seed = 8}};
  char text[FIXTURE_TEXT_MAX];
  assert_int_equal(kv_append(client, items, 2, text), QKV_OK);
  assert_int_equal(kv_length(client, "d", 0), 0);
  assert_true(kv_metric(client, "qkvd_kv_bytes") == empty);
  assert_true(kv_metric(client, "qkvd_append_tokens_total") == 3100);
  const kv_item bad = {.session = "d", .layer = KV_LAYERS, .tokens = 1};
  assert_int_equal(kv_append(client, &bad, 1, text), QKV_INVALID_ARGUMENT);
  assert_string_equal(text, "message 0: items[0].layer is 3, the model m has 3 layers");
  open_other(2 * KV_KEY_DIM, KV_VALUE_DIM, "keys");
  open_other(KV_KEY_DIM, 2 * KV_VALUE_DIM, "values");
  assert_int_equal(kv_append(client, &(kv_item){.session = "keys", .tokens = 5}, 1, text), QKV_INVALID_ARGUMENT);
  assert_string_equal(text, "message 0: items[0].k.dims are [5, 2, 16], the model has [tokens, 2, 32]");
  assert_int_equal(kv_append(client, &(kv_item){.session = "values", .tokens = 5}, 1, text), QKV_INVALID_ARGUMENT);
  assert_string_equal(text, "message 0: items[0].v.dims are [5, 2, 24], the model has [tokens, 2, 48]");

  Qkv__V1__TokenRange range = QKV__V1__TOKEN_RANGE__INIT;
  Qkv__V1__FetchRequest request = QKV__V1__FETCH_REQUEST__INIT;
  request.session = (char *)"d";
  fixture_result result = kv_call(client, KV_METHOD("Fetch"), &request.base);
  assert_int_equal(result.status, QKV_INVALID_ARGUMENT);
  assert_string_equal(result.text, "range.end is 0, a daemon with --discard needs an end");
  range.begin = 100;
  range.end = 1100;
  request.range = &range;
  request.chunk_tokens = 300;
  uint8_t bytes[64];
  size_t length = qkv__v1__fetch_request__pack(&request, bytes);
  fixture_stream *stream = fixture_open(client, KV_METHOD("Fetch"), FIXTURE_PATIENCE_MS);
  assert_true(fixture_send(stream, bytes, length));
  fixture_half_close(stream);
  size_t responses = 0, varied = 0;
  uint64_t tokens = 0;
  uint8_t *data = NULL;
  while (fixture_receive(stream, &data, &length)) {
    Qkv__V1__FetchResponse *response = qkv__v1__fetch_response__unpack(NULL, length, data);
    assert_non_null(response);
    assert_int_equal(response->position, 100 + tokens % 1000);
    assert_int_equal(response->layer, tokens / 1000);
    tokens += (uint64_t)response->k->dims[0];
    assert_int_equal(response->k->data.len, (size_t)response->k->dims[0] * KV_HEADS * KV_KEY_DIM * 2);
    for (size_t i = 1; i < response->v->data.len; i++)
      varied += response->v->data.data[i] != response->v->data.data[0];
    responses++;
    qkv__v1__fetch_response__free_unpacked(response, NULL);
    free(data);
  }
  result = fixture_finish(&stream);
  assert_int_equal(result.status, QKV_OK);
  assert_int_equal(responses, 4 * KV_LAYERS);
  assert_int_equal(tokens, 1000 * KV_LAYERS);
  assert_true(varied > 1000 * KV_HEADS * KV_VALUE_DIM);  // no zeros
  stop();
}

int main(int argc, char **argv) {
  if (argc == 3 && strcmp(argv[1], "--die") == 0) return die(argv[2]);
  if (argc == 3 && strcmp(argv[1], "--stall") == 0) return stall(argv[2]);
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(a_full_budget_refuses_whole_items),
      cmocka_unit_test(the_model_limit_is_named),
      cmocka_unit_test(a_full_queue_refuses),
      cmocka_unit_test(a_full_queue_refuses_a_message),
      cmocka_unit_test(responses_have_a_limit),
      cmocka_unit_test(clients_that_die_leave_nothing_running),
      cmocka_unit_test(a_client_that_never_reads_costs_one_chunk),
      cmocka_unit_test(sessions_may_change_under_a_fetch),
      cmocka_unit_test(deadlines_and_cancellation_end_calls),
      cmocka_unit_test(many_clients_do_not_disturb_each_other),
      cmocka_unit_test(discard_checks_shapes_and_keeps_nothing),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
