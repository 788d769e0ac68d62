// The program qkvctl as a script uses it, against the real daemon.
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
#include <unistd.h>

#include <cmocka.h>

#include "client/c/qkv.h"
#include "client/format/safetensors.h"
#include "engine/codec/calibrate.h"
#include "tests/server/fixture.h"

enum { LAYERS = 3, HEADS = 2, DIM = 16, TOKENS = 150, OUTPUT_MAX = 1 << 16 };

static fixture_daemon *qkvd;
static qkv_client *client;
static char directory[128];
static float k[TOKENS][HEADS][DIM], v[TOKENS][HEADS][DIM];

// ---- running it ----

static char out[OUTPUT_MAX], err[OUTPUT_MAX];

static void read_back(FILE *file, char *text) {
  rewind(file);
  size_t length = fread(text, 1, OUTPUT_MAX - 1, file);
  text[length] = '\0';
  (void)fclose(file);
}

// Runs qkvctl with these arguments (NULL-terminated); its output is in `out` and `err`. Returns the exit status.
static int run(const char *const *arguments) {
  const char *argv[32] = {QKVCTL_PATH};
  for (size_t i = 0; arguments[i] != NULL; i++) argv[i + 1] = arguments[i];
  FILE *out_file = tmpfile(), *err_file = tmpfile();
  assert_true(out_file != NULL && err_file != NULL);
  pid_t pid = fork();
  assert_true(pid >= 0);
  if (pid == 0) {
    dup2(fileno(out_file), STDOUT_FILENO);
    dup2(fileno(err_file), STDERR_FILENO);
    execv(QKVCTL_PATH, (char *const *)(uintptr_t)argv);
    _exit(127);
  }
  int status = 0;
  assert_int_equal(waitpid(pid, &status, 0), pid);
  read_back(out_file, out);
  read_back(err_file, err);
  assert_true(WIFEXITED(status));
  return WEXITSTATUS(status);
}

#define RUN(...) run((const char *const[]){__VA_ARGS__, NULL})

// The one JSON line in `out`.
static json_t *line(void) {
  json_error_t error;
  json_t *object = json_loads(out, 0, &error);
  if (object == NULL) fail_msg("%s in \"%s\"", error.text, out);
  assert_string_equal(err, "");
  assert_ptr_equal(strchr(out, '\n'), out + strlen(out) - 1);
  return object;
}

static int64_t integer(const json_t *object, const char *key) {
  const json_t *value = json_object_get(object, key);
  if (!json_is_integer(value)) fail_msg("no integer %s in %s", key, out);
  return json_integer_value(value);
}

static const char *text(const json_t *object, const char *key) {
  const char *value = json_string_value(json_object_get(object, key));
  if (value == NULL) fail_msg("no text %s in %s", key, out);
  return value;
}

static const char *in_directory(const char *name) {
  static char path[256];
  snprintf(path, sizeof path, "%s/%s", directory, name);
  return path;
}

static bool exists(const char *name) {
  struct stat info;
  return stat(in_directory(name), &info) == 0;
}

// ---- a session to look at ----

static void fill(float *values, size_t count, uint32_t seed) {
  for (size_t i = 0; i < count; i++) {
    seed = seed * 1664525u + 1013904223u;
    values[i] = (float)((int)(seed >> 23) - 256) / 128;
  }
}

static int setup(void **state) {
  (void)state;
  qkvd = fixture_start(NULL);
  fixture_make_directory(directory, sizeof directory);
  setenv("QKVD_TARGET", qkvd->unix_address, 1);
  qkv_call_error error = {0};
  fill(&k[0][0][0], sizeof k / 4, 1);
  fill(&v[0][0][0], sizeof v / 4, 2);
  qkv_client_policy policy = {.recent_window = 1000};
  qkv_client_model model = {.name = "m",
                            .layers = LAYERS,
                            .kv_heads = HEADS,
                            .q_heads = HEADS,
                            .key_dim = DIM,
                            .value_dim = DIM,
                            .dtype = QKV_CLIENT_FP16,
                            .policy = &policy};
  if (qkv_client_connect(qkvd->unix_address, NULL, &client, &error) != 0 ||
      qkv_client_register_model(client, &model, &error) != 0) {
    fail_msg("%s", error.text);
  }
  return 0;
}

static int teardown(void **state) {
  (void)state;
  qkv_client_close(&client);
  fixture_remove_directory(directory);
  assert_int_equal(fixture_stop(&qkvd, SIGTERM, 20000), 0);
  return 0;
}

// "chat-1" holds 150 tokens in layer 0, 70 in layer 2, none in layer 1, from position 1000 on.
static int open_session(void **state) {
  (void)state;
  qkv_call_error error = {0};
  qkv_session_options options = {.session = "chat-1", .model = "m", .first_position = 1000};
  qkv_client_item items[2];
  for (int i = 0; i < 2; i++) {
    int64_t tokens = i == 0 ? TOKENS : 70;
    items[i] = (qkv_client_item){.session = "chat-1",
                                 .layer = (uint32_t)(2 * i),
                                 .position = 1000,
                                 .k = {QKV_CLIENT_FP32, 3, {tokens, HEADS, DIM}, {0}, k, sizeof k},
                                 .v = {QKV_CLIENT_FP32, 3, {tokens, HEADS, DIM}, {0}, v, sizeof v}};
  }
  if (qkv_client_open_session(client, &options, &error) != 0 ||
      qkv_client_append(client, items, 2, NULL, &error) != 0) {
    fail_msg("%s", error.text);
  }
  return 0;
}

static int close_session(void **state) {
  (void)state;
  (void)qkv_client_close_session(client, "chat-1", NULL, NULL);
  return 0;
}

// ---- the command line ----

static void test_usage(void **state) {
  (void)state;
  assert_int_equal(RUN("--version"), 0);
  assert_string_equal(out, "qkvctl " QKV_VERSION "\n");
  assert_int_equal(RUN("--help"), 0);
  assert_non_null(strstr(out, "truncate SESSION POSITION"));
  assert_int_equal(RUN("fetch", "--help"), 0);
  assert_non_null(strstr(out, "--heads-first"));
  assert_string_equal(err, "");
  static const struct {
    const char *arguments[4];
    const char *text;
  } cases[] = {
      {{"sesions"}, "qkvctl: unknown command \"sesions\"; did you mean sessions?\n"},
      {{"frobnicate"}, "qkvctl: unknown command \"frobnicate\"; qkvctl --help lists the commands\n"},
      {{"session"}, "qkvctl: session needs SESSION; see qkvctl session --help\n"},
      {{"session", "a", "b"}, "qkvctl: session: unexpected word \"b\"; see qkvctl session --help\n"},
      {{"status", "--metric"}, "qkvctl: unknown option --metric; did you mean --metrics?\n"},
      {{"truncate", "a", "x"}, "qkvctl: POSITION is \"x\", a number from 0 on is needed\n"},
      {{"fetch", "a"}, "qkvctl: fetch needs --output FILE\n"},
      {{"calibrate", "m"}, "qkvctl: calibrate needs --output FILE\n"},
      {{"fetch", "a", "--output=x", "--dtype=int8"},
       "qkvctl: --dtype is \"int8\", allowed are fp32, fp16 and bf16\n"},
      {{"fetch", "a", "--output=x", "--format=csv"},
       "qkvctl: --format is \"csv\", allowed are safetensors and npy\n"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    const char *arguments[5] = {NULL};
    memcpy(arguments, cases[i].arguments, sizeof cases[i].arguments);
    assert_int_equal(run(arguments), 2);
    assert_string_equal(out, "");
    assert_string_equal(err, cases[i].text);
  }
}

static void test_errors(void **state) {
  (void)state;
  assert_int_equal(RUN("session", "nobody"), 1);
  assert_string_equal(out, "");
  assert_non_null(strstr(err, "nobody"));
  assert_int_equal(RUN("status", "--target", "unix:/no/such/socket", "--timeout", "20ms"), 1);
  assert_string_equal(
      err, "qkvctl: nobody answers at unix:/no/such/socket: No such file or directory; is qkvd running there?\n");
  assert_int_equal(RUN("load", "/no/such/file"), 1);
  assert_non_null(strstr(err, "/no/such/file"));
}

// ---- looking ----

static void test_status(void **state) {
  (void)state;
  // Options may stand before the command.
  assert_int_equal(RUN("--target", qkvd->tcp_address, "status", "--json"), 0);
  json_t *status = line();
  assert_string_equal(text(status, "version"), QKV_VERSION);
  assert_string_equal(text(status, "state"), "serving");
  assert_int_equal(integer(status, "sessions"), 1);
  assert_int_equal(integer(status, "models"), 1);
  assert_true(integer(status, "kv_bytes") > 0 && integer(status, "rss_bytes") > 0);
  assert_in_range(integer(status, "kv_bytes_available"), 1, integer(status, "kv_bytes_limit"));
  assert_true(integer(status, "overhead_bytes") > 0);
  assert_int_equal(json_array_size(json_object_get(status, "listen")), 2);
  assert_non_null(json_object_get(json_object_get(status, "metrics"), "qkvd_append_tokens_total"));
  json_decref(status);
  assert_int_equal(RUN("status", "--metrics", "--options"), 0);
  assert_non_null(strstr(out, "qkvd " QKV_VERSION ", serving for "));
  assert_non_null(strstr(out, "qkvd_append_tokens_total"));
  assert_non_null(strstr(out, "memory-budget"));
  assert_non_null(strstr(out, " of it outside the KV\n"));
}

static void test_models(void **state) {
  (void)state;
  assert_int_equal(RUN("models", "--json"), 0);
  json_t *model = line();
  assert_string_equal(text(model, "model"), "m");
  assert_int_equal(integer(model, "layers"), LAYERS);
  assert_string_equal(text(model, "dtype"), "fp16");
  assert_int_equal(integer(model, "sessions"), 1);
  json_decref(model);
  assert_int_equal(RUN("models"), 0);
  assert_non_null(strstr(out, "MODEL  TENANT   LAYERS  HEADS Q/KV"));
  assert_non_null(strstr(out, "2/2"));
}

static void test_sessions(void **state) {
  (void)state;
  assert_int_equal(RUN("sessions", "--json", "--prefix", "chat-"), 0);
  json_t *listed = line();
  assert_string_equal(text(listed, "session"), "chat-1");
  assert_int_equal(integer(listed, "tokens_exact") + integer(listed, "tokens_coded"), TOKENS + 70);
  json_decref(listed);
  assert_int_equal(RUN("sessions", "--prefix", "other"), 0);
  assert_non_null(strstr(out, "SESSION"));
  assert_null(strstr(out, "chat-1"));

  assert_int_equal(RUN("session", "chat-1", "--json"), 0);
  json_t *session = line();
  assert_int_equal(integer(session, "first_position"), 1000);
  const json_t *lengths = json_object_get(session, "lengths");
  assert_int_equal(json_array_size(lengths), LAYERS);
  assert_int_equal(json_integer_value(json_array_get(lengths, 0)), 1000 + TOKENS);
  assert_int_equal(json_integer_value(json_array_get(lengths, 1)), 1000);
  json_decref(session);
  assert_int_equal(RUN("session", "chat-1"), 0);
  assert_non_null(strstr(out, "layer 0         positions 1000 to 1150\n"));
}

// ---- fetch and load ----

static const qkv_safetensors_tensor *tensor(const qkv_safetensors *file, const char *name, int64_t a, int64_t b,
                                            int64_t c) {
  const qkv_safetensors_tensor *found = qkv_safetensors_find(file, name);
  if (found == NULL) fail_msg("no %s", name);
  assert_int_equal(found->rank, 3);
  assert_true(found->dims[0] == a && found->dims[1] == b && found->dims[2] == c);
  return found;
}

static qkv_safetensors *open_file(const char *name) {
  qkv_safetensors *file = NULL;
  qkv_error error = {0};
  if (qkv_safetensors_open(in_directory(name), &file, &error) != QKV_OK) fail_msg("%s", error.text);
  return file;
}

static void test_fetch(void **state) {
  (void)state;
  assert_int_equal(RUN("fetch", "chat-1", "--output", in_directory("a.safetensors"), "--dtype", "fp32", "--json"), 0);
  json_t *done = line();
  assert_int_equal(integer(done, "layers"), 2);
  assert_int_equal(integer(done, "rows"), TOKENS + 70);
  assert_int_equal(integer(done, "bytes"), (TOKENS + 70) * 2 * HEADS * DIM * 4);
  json_decref(done);
  assert_false(exists("a.safetensors.partial"));
  qkv_safetensors *file = open_file("a.safetensors");
  assert_int_equal(qkv_safetensors_count(file), 4);
  assert_memory_equal(tensor(file, "layers.0.k", TOKENS, HEADS, DIM)->data, k, sizeof k);
  assert_memory_equal(tensor(file, "layers.0.v", TOKENS, HEADS, DIM)->data, v, sizeof v);
  assert_memory_equal(tensor(file, "layers.2.v", 70, HEADS, DIM)->data, v, 70 * sizeof v[0]);
  assert_string_equal(qkv_safetensors_metadata(file, "session"), "chat-1");
  assert_string_equal(qkv_safetensors_metadata(file, "model"), "m");
  assert_string_equal(qkv_safetensors_metadata(file, "first_position"), "1000");
  qkv_safetensors_close(&file);
}

static void test_fetch_a_part_heads_first(void **state) {
  (void)state;
  assert_int_equal(RUN("fetch", "chat-1", "--output", in_directory("b.safetensors"), "--dtype", "fp32", "--layers",
                       "0-1", "--begin", "1010", "--end", "1020", "--heads-first"),
                   0);
  qkv_safetensors *file = open_file("b.safetensors");
  assert_int_equal(qkv_safetensors_count(file), 2);
  const float *data = tensor(file, "layers.0.k", HEADS, 10, DIM)->data;
  for (int head = 0; head < HEADS; head++) {
    for (int t = 0; t < 10; t++) {
      assert_memory_equal((const char *)data + (head * 10 + t) * (int)sizeof k[0][0], k[10 + t][head],
                          sizeof k[0][0]);
    }
  }
  assert_string_equal(qkv_safetensors_metadata(file, "first_position"), "1010");
  assert_string_equal(qkv_safetensors_metadata(file, "layout"), "heads_first");
  qkv_safetensors_close(&file);
}

static void test_fetch_npy(void **state) {
  (void)state;
  assert_int_equal(RUN("fetch", "chat-1", "--output", in_directory("npy"), "--format", "npy", "--dtype", "fp32"), 0);
  FILE *file = fopen(in_directory("npy/layers.0.k.npy"), "rb");
  assert_non_null(file);
  static char bytes[sizeof k + 512];
  size_t size = fread(bytes, 1, sizeof bytes, file);
  (void)fclose(file);
  assert_non_null(strstr(bytes + 10, "'shape': (150, 2, 16)"));
  assert_memory_equal(bytes + size - sizeof k, k, sizeof k);
  assert_true(exists("npy/layers.2.v.npy"));
  assert_false(exists("npy.partial"));
  assert_int_equal(RUN("fetch", "chat-1", "--output", in_directory("npy"), "--format", "npy"), 1);
  assert_non_null(strstr(err, "is there already; choose another directory"));
  assert_int_equal(RUN("fetch", "chat-1", "--output", in_directory("c"), "--format", "npy", "--dtype", "bf16"), 2);
}

static void test_fetch_nothing(void **state) {
  (void)state;
  assert_int_equal(RUN("fetch", "chat-1", "--output", in_directory("n"), "--layers", "1"), 1);
  assert_string_equal(err, "qkvctl: session chat-1 holds no rows there\n");
  assert_int_equal(RUN("fetch", "chat-1", "--output", in_directory("n"), "--layers", "3"), 2);
  assert_string_equal(err, "qkvctl: --layers names layer 3, the session has 0 to 2\n");
  assert_int_equal(RUN("fetch", "chat-1", "--output", in_directory("n"), "--begin", "7", "--end", "7"), 2);
  assert_int_equal(RUN("fetch", "nobody", "--output", in_directory("n")), 1);
  assert_false(exists("n"));
  assert_false(exists("n.partial"));
}

// Out, in again under another name, and out again: the same file but for the name in it.
static void check_round_trip(const char *layout_option) {
  char first[256], second[256];
  memcpy(first, in_directory("1.safetensors"), sizeof first);
  memcpy(second, in_directory("2.safetensors"), sizeof second);
  assert_int_equal(RUN("fetch", "chat-1", "--output", first, layout_option), 0);
  assert_int_equal(RUN("load", first, "--session", "chat-2", "--json"), 0);
  json_t *done = line();
  assert_string_equal(text(done, "session"), "chat-2");
  assert_string_equal(text(done, "model"), "m");
  assert_int_equal(integer(done, "rows"), TOKENS + 70);
  json_decref(done);
  assert_int_equal(RUN("fetch", "chat-2", "--output", second, layout_option), 0);
  qkv_safetensors *one = open_file("1.safetensors"), *two = open_file("2.safetensors");
  assert_int_equal(qkv_safetensors_count(two), 4);
  for (size_t i = 0; i < 4; i++) {
    const qkv_safetensors_tensor *a = qkv_safetensors_at(one, i), *b = qkv_safetensors_at(two, i);
    assert_string_equal(a->name, b->name);
    assert_int_equal(a->bytes, b->bytes);
    assert_memory_equal(a->data, b->data, a->bytes);
  }
  assert_string_equal(qkv_safetensors_metadata(two, "first_position"), "1000");
  qkv_safetensors_close(&one);
  qkv_safetensors_close(&two);
  assert_int_equal(RUN("load", first, "--session", "chat-2"), 1);
  assert_non_null(strstr(err, "chat-2"));
  assert_int_equal(RUN("rm", "chat-2"), 0);
}

static void test_load(void **state) {
  (void)state;
  check_round_trip(NULL);
  check_round_trip("--heads-first");
}

static void test_load_with_tiers(void **state) {
  (void)state;
  char path[256];
  memcpy(path, in_directory("tiers.safetensors"), sizeof path);
  assert_int_equal(RUN("fetch", "chat-1", "--output", path), 0);
  static const struct {
    const char *bits;
    double tier_bits;
  } cases[] = {{"2.5", 2.5}, {"0", 0}, {"-1", 0}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    assert_int_equal(RUN("load", path, "--session", "tiers", "--tier-bits", cases[i].bits, "--keep-full"), 0);
    assert_int_equal(RUN("session", "tiers", "--json"), 0);
    json_t *session = line();
    assert_true(json_number_value(json_object_get(session, "tier_bits")) == cases[i].tier_bits);
    assert_true(json_is_true(json_object_get(session, "keep_full")));
    assert_int_equal(integer(session, "bytes_overhead"), 0);  // no page is sealed yet
    json_decref(session);
    assert_int_equal(RUN("rm", "tiers"), 0);
  }
  assert_int_equal(RUN("load", path, "--session", "tiers"), 0);
  assert_int_equal(RUN("session", "tiers"), 0);
  assert_non_null(strstr(out, "\noverhead        "));
  assert_null(strstr(out, "kept in full"));
  assert_int_equal(RUN("rm", "tiers"), 0);
  assert_int_equal(RUN("load", path, "--session", "tiers", "--tier-bits", "2.3"), 1);
  assert_non_null(strstr(err, "tier_bits is 2.3, allowed are 0 and multiples of 0.125 up to 8"));
}

// A file that does not fit the model: the session it opened is closed again.
static void test_load_what_does_not_fit(void **state) {
  (void)state;
  const char *path = in_directory("bad.safetensors");
  qkv_safetensors_tensor tensors[2] = {{.name = "layers.0.k", .dtype = QKV_FP32, .rank = 3, .dims = {5, 3, DIM}},
                                       {.name = "layers.0.v", .dtype = QKV_FP32, .rank = 3, .dims = {5, 3, DIM}}};
  qkv_safetensors_writer *writer = NULL;
  assert_int_equal(qkv_safetensors_writer_create(path, tensors, 2, NULL, 0, &writer, NULL), QKV_OK);
  for (size_t i = 0; i < 2; i++) assert_int_equal(qkv_safetensors_write(writer, i, k, 5 * 3 * DIM * 4, NULL), QKV_OK);
  assert_int_equal(qkv_safetensors_writer_finish(&writer, NULL), QKV_OK);
  assert_int_equal(RUN("load", path), 2);
  assert_string_equal(err, "qkvctl: the file names no session; give --session NAME\n");
  assert_int_equal(RUN("load", path, "--session", "bad", "--model", "m"), 1);
  assert_non_null(strstr(err, "k.dims[1] is 3"));
  assert_non_null(strstr(err, "(the session was closed again)"));
  assert_int_equal(RUN("session", "bad"), 1);

  static const char *const wrong[][2] = {
      {"layers.1.v", "is no session's file: layers.0.v is missing"},
      {"layers.00.k", "is no session's file: it holds layers.0.k and layers.00.k"},
  };
  for (size_t w = 0; w < 2; w++) {
    tensors[1].name = wrong[w][0];
    assert_int_equal(qkv_safetensors_writer_create(path, tensors, 2, NULL, 0, &writer, NULL), QKV_OK);
    for (size_t i = 0; i < 2; i++)
      assert_int_equal(qkv_safetensors_write(writer, i, k, 5 * 3 * DIM * 4, NULL), QKV_OK);
    assert_int_equal(qkv_safetensors_writer_finish(&writer, NULL), QKV_OK);
    assert_int_equal(RUN("load", path, "--session", "bad", "--model", "m"), 1);
    assert_non_null(strstr(err, wrong[w][1]));
  }
}

// Words that fetch does not write are refused: taken for their defaults, the rows would be taken for others.
static void test_load_unknown_words(void **state) {
  (void)state;
  static const struct {
    qkv_safetensors_entry entry;
    const char *text;
  } cases[] = {
      {{"layout", "HEADS_FIRST"}, "its layout is \"HEADS_FIRST\", allowed are tokens_first and heads_first\n"},
      {{"rope", "befor"}, "its rope is \"befor\", allowed are after and before\n"},
  };
  const char *path = in_directory("words.safetensors");
  const qkv_safetensors_tensor tensors[2] = {
      {.name = "layers.0.k", .dtype = QKV_FP32, .rank = 3, .dims = {5, HEADS, DIM}},
      {.name = "layers.0.v", .dtype = QKV_FP32, .rank = 3, .dims = {5, HEADS, DIM}}};
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    qkv_safetensors_writer *writer = NULL;
    assert_int_equal(qkv_safetensors_writer_create(path, tensors, 2, &cases[i].entry, 1, &writer, NULL), QKV_OK);
    for (size_t j = 0; j < 2; j++) {
      assert_int_equal(qkv_safetensors_write(writer, j, k, (size_t)5 * HEADS * DIM * 4, NULL), QKV_OK);
    }
    assert_int_equal(qkv_safetensors_writer_finish(&writer, NULL), QKV_OK);
    assert_int_equal(RUN("load", path, "--session", "words", "--model", "m"), 1);
    assert_non_null(strstr(err, cases[i].text));
    assert_int_equal(RUN("session", "words"), 1);
  }
}

// ---- rm, truncate ----

static void test_truncate_and_remove(void **state) {
  (void)state;
  assert_int_equal(RUN("truncate", "chat-1", "1100", "--json"), 0);
  json_t *done = line();
  assert_int_equal(integer(done, "position"), 1100);
  json_decref(done);
  qkv_client_session_info info;
  assert_int_equal(qkv_client_get_session(client, "chat-1", &info, NULL), 0);
  assert_int_equal(info.lengths[0], 1100);
  assert_int_equal(info.lengths[2], 1070);
  qkv_free(info.lengths);
  // One that is not there does not keep the other.
  assert_int_equal(RUN("rm", "nobody", "chat-1"), 1);
  assert_non_null(strstr(err, "nobody"));
  assert_non_null(strstr(out, "closed chat-1, "));
  assert_int_equal(qkv_client_get_session(client, "chat-1", &info, NULL), QKV_NOT_FOUND);
}

// ---- calibrate ----

static size_t read_file(const char *path, uint8_t *bytes, size_t size) {
  FILE *file = fopen(path, "re");
  if (file == NULL) fail_msg("cannot open %s", path);
  size_t length = fread(bytes, 1, size, file);
  assert_int_equal(fclose(file), 0);
  return length;
}

// The golden calibration, given with a model that it fits, comes back byte for byte.
static void test_calibrate(void **state) {
  (void)state;
  static uint8_t given[16384], got[16384];
  const size_t size = read_file(QKV_SOURCE_DIR "/tests/golden/calibration_v1.bin", given, sizeof given);
  const char *path = in_directory("calibrated.qkvc");
  const qkv_client_model model = {.name = "calibrated",
                                  .layers = 1,
                                  .kv_heads = 1,
                                  .q_heads = 1,
                                  .key_dim = 16,
                                  .value_dim = 8,
                                  .dtype = QKV_CLIENT_FP16,
                                  .rope = {.theta = 10000,
                                           .width = 8,
                                           .interleaved = true,
                                           .scaling = 3,  // YaRN
                                           .factor = 4,
                                           .original_max_position = 2048,
                                           .beta_slow = 2},
                                  .calibration = given,
                                  .calibration_bytes = size};
  qkv_call_error error = {0};
  if (qkv_client_register_model(client, &model, &error) != 0) fail_msg("%s", error.text);
  assert_int_equal(RUN("calibrate", "calibrated", "--output", path, "--json"), 0);
  json_t *done = line();
  assert_int_equal(integer(done, "bytes"), size);
  assert_string_equal(text(done, "model"), "calibrated");
  json_decref(done);
  assert_int_equal(read_file(path, got, sizeof got), size);
  assert_memory_equal(got, given, size);
  assert_int_equal(RUN("status", "--json"), 0);
  json_t *status = line();
  assert_true(integer(status, "calibration_bytes") > (int64_t)size);  // and what it takes to find its parts
  assert_int_equal(integer(status, "learning_bytes"), 0);
  json_decref(status);
  assert_int_equal(RUN("status"), 0);
  assert_non_null(strstr(out, "\ncalibration "));
  assert_int_equal(RUN("calibrate", "calibrated", "--output", path), 0);
  assert_non_null(strstr(out, ": the calibration of calibrated, 6.1 KiB\n"));
  assert_int_equal(RUN("calibrate", "nobody", "--output", path), 1);
  assert_string_equal(err, "qkvctl: no model nobody\n");
  assert_int_equal(RUN("calibrate", "calibrated", "--output", directory), 1);
  assert_non_null(strstr(err, "is there, and no ordinary file\n"));
}

// ---- calibrate --from ----

static float many[2 * TOKENS][HEADS][DIM];  // queries of TOKENS tokens, of twice as many heads

// Layers [first, 2), with queries or without.
static const char *write_dump(const char *name, int first, bool queries, int64_t dim) {
  static const char *const names[] = {"layers.0.k", "layers.0.v", "layers.0.q",
                                      "layers.1.k", "layers.1.v", "layers.1.q"};
  qkv_safetensors_tensor tensors[6];
  const void *rows[6];
  size_t count = 0;
  for (int i = 3 * first; i < 6; i++) {
    if (i % 3 == 2 && !queries) continue;
    rows[count] = i % 3 == 0 ? (const void *)k : i % 3 == 1 ? (const void *)v : (const void *)many;
    tensors[count++] = (qkv_safetensors_tensor){.name = names[i],
                                                .dtype = QKV_FP32,
                                                .rank = 3,
                                                .dims = {TOKENS, i % 3 == 2 ? 2 * HEADS : HEADS * DIM / dim, dim}};
  }
  qkv_safetensors_writer *writer = NULL;
  const qkv_safetensors_entry metadata[] = {{"first_position", "1000"}};
  const char *path = in_directory(name);
  assert_int_equal(qkv_safetensors_writer_create(path, tensors, count, metadata, 1, &writer, NULL), QKV_OK);
  for (size_t i = 0; i < count; i++) {
    const size_t bytes = sizeof k * (tensors[i].dims[1] == 2 * HEADS && tensors[i].name[9] == 'q' ? 2 : 1);
    assert_int_equal(qkv_safetensors_write(writer, i, rows[i], bytes, NULL), QKV_OK);
  }
  assert_int_equal(qkv_safetensors_writer_finish(&writer, NULL), QKV_OK);
  return path;
}

static qkv_client_model dumped(void) {
  return (qkv_client_model){.name = "dumped",
                            .layers = 2,
                            .kv_heads = HEADS,
                            .q_heads = 2 * HEADS,
                            .key_dim = DIM,
                            .value_dim = DIM,
                            .dtype = QKV_CLIENT_FP16,
                            .rope = {.theta = 10000}};
}

// The same rows by the library itself.
static const qkv_calibration *calibration_of_rows(void) {
  qkv_calibration_shape shape = {2, HEADS, 2 * HEADS, DIM, DIM, {.theta = 10000}};
  assert_int_equal(qkv_rope_resolve(&shape.rope, DIM, NULL), QKV_OK);
  qkv_moments *moments = qkv_moments_create(&shape);
  for (uint32_t layer = 0; layer < 2; layer++) {
    qkv_moments_add(moments, layer, 1000, TOKENS, &k[0][0][0], &v[0][0][0], false);
    qkv_moments_add_queries(moments, layer, 1000, TOKENS, &many[0][0][0], false);
  }
  qkv_calibration *calibration = NULL;
  assert_int_equal(qkv_calibrate(moments, &QKV_CALIBRATE_DEFAULTS, &calibration, NULL), QKV_OK);
  qkv_moments_destroy(&moments);
  return calibration;
}

static void test_calibrate_from_rows(void **state) {
  (void)state;
  static uint8_t got[131072];
  char dump[256], path[256];
  qkv_client_model model = dumped();
  qkv_call_error error = {0};
  fill(&many[0][0][0], sizeof many / 4, 3);
  if (qkv_client_register_model(client, &model, &error) != 0) fail_msg("%s", error.text);
  memcpy(dump, write_dump("rows.safetensors", 0, true, DIM), sizeof dump);
  memcpy(path, in_directory("rows.qkvc"), sizeof path);
  assert_int_equal(RUN("calibrate", "dumped", "--from", dump, "--output", path, "--json"), 0);
  const qkv_calibration *expected = calibration_of_rows();
  size_t size;
  const void *bytes = qkv_calibration_bytes(expected, &size);
  json_t *done = line();
  assert_int_equal(integer(done, "bytes"), size);
  assert_int_equal(integer(done, "tokens"), TOKENS);
  assert_int_equal(integer(done, "version"), qkv_calibration_version(expected));
  json_decref(done);
  assert_int_equal(read_file(path, got, sizeof got), size);
  assert_memory_equal(got, bytes, size);
  // It is one of that model.
  model.calibration = got;
  model.calibration_bytes = size;
  if (qkv_client_register_model(client, &model, &error) != 0) fail_msg("%s", error.text);
  memcpy(dump, write_dump("few.safetensors", 0, false, DIM), sizeof dump);
  assert_int_equal(RUN("calibrate", "dumped", "--from", dump, "--output", path), 0);
  assert_non_null(strstr(out, "of dumped, from 150 tokens, "));
  qkv_calibration_unref(&expected);
}

static void test_calibrate_from_other_rows(void **state) {
  (void)state;
  const struct {
    const char *name;
    int first;
    int64_t dim;
    const char *model, *text;
  } cases[] = {
      {"half.safetensors", 1, DIM, "dumped",
       "half.safetensors: it has no rows of layer 0, which the model dumped codes\n"},
      {"wide.safetensors", 0, 2 * DIM, "dumped",
       "wide.safetensors: its keys have 1 heads of 32, the model dumped has 2 of 16\n"},
      {"rows2.safetensors", 0, DIM, "one", "rows2.safetensors: it has rows of layer 1, the model one has 1 layers\n"},
      {"rows3.safetensors", 0, DIM, "nobody", "no model nobody\n"},
  };
  qkv_client_model model = dumped();
  qkv_call_error error = {0};
  char dump[256];
  model.name = "one";
  model.layers = 1;
  if (qkv_client_register_model(client, &model, &error) != 0) fail_msg("%s", error.text);
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    memcpy(dump, write_dump(cases[i].name, cases[i].first, false, cases[i].dim), sizeof dump);
    assert_int_equal(RUN("calibrate", cases[i].model, "--from", dump, "--output", in_directory("none.qkvc")), 1);
    if (strstr(err, cases[i].text) == NULL) fail_msg("%s", err);
    assert_false(exists("none.qkvc"));
  }
  assert_int_equal(RUN("calibrate", "dumped", "--from", "/no/such/file", "--output", "/dev/null"), 1);
  assert_non_null(strstr(err, "/no/such/file: "));
}

#define WITH_SESSION(test) cmocka_unit_test_setup_teardown(test, open_session, close_session)

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_usage),
      cmocka_unit_test(test_errors),
      WITH_SESSION(test_status),
      WITH_SESSION(test_models),
      WITH_SESSION(test_sessions),
      WITH_SESSION(test_fetch),
      WITH_SESSION(test_fetch_a_part_heads_first),
      WITH_SESSION(test_fetch_npy),
      WITH_SESSION(test_fetch_nothing),
      WITH_SESSION(test_load),
      WITH_SESSION(test_load_with_tiers),
      WITH_SESSION(test_load_what_does_not_fit),
      WITH_SESSION(test_load_unknown_words),
      WITH_SESSION(test_truncate_and_remove),
      cmocka_unit_test(test_calibrate),
      cmocka_unit_test(test_calibrate_from_rows),
      cmocka_unit_test(test_calibrate_from_other_rows),
  };
  return cmocka_run_group_tests(tests, setup, teardown);
}
