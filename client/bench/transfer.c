// qkv-bench append and fetch: how fast rows go into the daemon and come out, compared with a raw socket and a bare
// gRPC call.
//
// By default the daemon discards (`qkvd --discard`): what is measured is the transport and the parsing of tensors.
// With --store rows are coded and decoded by the daemon, with --coded by the client, and pages cross. Both take
// --bits and --calibrated, so that the two are compared on the same session. Rows are uniform noise unless --dump
// names a file of a model's: of noise every coordinate gets bits, so calibrated codes of it take the most time that
// they can.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/bench/bench.h"
#include "client/bench/echo.h"
#include "client/bench/raw.h"
#include "client/format/dump.h"
#include "engine/base/tensor.h"
#include "engine/codec/calibrate.h"

#define MODEL "qkv-bench"
#define CALIBRATED_MODEL "qkv-bench-calibrated"
enum { HEADS = 8, DIM = 128 };             // without --dump: K and V of one token, 4 KiB of fp16
#define REPEAT_BYTES (INT64_C(256) << 20)  // at 4 GB/s 70 ms: shorter ones measure how the cores wake up

static const qkv_option options[] = {
    QKV_BENCH_OPTIONS,
    {"bytes", QKV_OPTION_BYTES, offsetof(qkv_bench_settings, bytes), "1MiB", 65536, 33554432, "BYTES",
     "fp16 rows in one message, K and V together"},
    {"rounds", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, rounds), "0", 0, 100000, "N",
     "messages in each repeat; 0: as many as carry 256 MiB"},
    {"store", QKV_OPTION_FLAG, offsetof(qkv_bench_settings, store), NULL, 0, 0, NULL,
     "code and decode the rows instead of discarding them; --target must then be a daemon that stores"},
    {"shared", QKV_OPTION_FLAG, offsetof(qkv_bench_settings, shared), NULL, 0, 0, NULL,
     "the rows lie in shared memory; --target must then be a daemon with --allow-client-shm"},
    {"coded", QKV_OPTION_FLAG, offsetof(qkv_bench_settings, coded), NULL, 0, 0, NULL,
     "the same, coded and decoded here: pages cross instead of rows"},
    {"bits", QKV_OPTION_REAL, offsetof(qkv_bench_settings, code_k), "4", 0.125, 8, "BITS",
     "with --store and --coded: code bits of a coordinate"},
    {"calibrated", QKV_OPTION_FLAG, offsetof(qkv_bench_settings, calibrated), NULL, 0, 0, NULL,
     "with --store and --coded: a session to fetch of a model with RoPE and a calibration"},
    {"threads", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, threads), "2", 1, 64, "N",
     "with --coded: threads that code and decode"},
    {"dump", QKV_OPTION_STRING, offsetof(qkv_bench_settings, dump), NULL, 0, 0, "FILE",
     "rows of a model's middle layer, again and again, in place of noise: safetensors of qkv-worker dump or qkvctl "
     "fetch"},
    {"rope-theta", QKV_OPTION_REAL, offsetof(qkv_bench_settings, rope_theta), "10000", 1, QKV_ROPE_THETA_MAX, "THETA",
     "with --calibrated: RoPE of the model that the rows are of"},
};

typedef struct transfer_run {
  const qkv_bench_settings *settings;
  qkv_client *client;
  qkv_dump *dump;  // NULL: noise
  uint32_t heads, key_dim, value_dim;
  int64_t tokens;  // of one message
  int64_t rounds;  // messages in each repeat
  uint64_t position;
  char *rows;                    // K, then V
  void *shared;                  // with --shared: these, and `arrived`
  char *arrived;                 // the same, decoded here
  size_t received;               // bytes, by fetch
  qkv_calibration *calibration;  // NULL: none
} transfer_run;

// Of all rows of K, or of V, of one message.
static size_t part_bytes(const transfer_run *transfer, int part) {
  const uint32_t dim = part == 0 ? transfer->key_dim : transfer->value_dim;
  return (size_t)transfer->tokens * transfer->heads * dim * 2;
}

static size_t message_bytes(const transfer_run *transfer) {
  return part_bytes(transfer, 0) + part_bytes(transfer, 1);
}

static qkv_client_tensor rows_tensor(const transfer_run *transfer, int part) {
  return (qkv_client_tensor){
      .dtype = QKV_CLIENT_FP16,
      .rank = 3,
      .dims = {transfer->tokens, transfer->heads, part == 0 ? transfer->key_dim : transfer->value_dim},
      .data = transfer->rows + (part == 0 ? 0 : part_bytes(transfer, 0)),
      .bytes = part_bytes(transfer, part)};
}

static void close_session(const transfer_run *transfer) {
  qkv_call_error ignored = {0};
  qkv_client_close_session(transfer->client, MODEL, NULL, &ignored);
}

static bool stores(const qkv_bench_settings *settings) {
  return settings->store || settings->coded;
}

// Of the rows that are appended.
static int calibrate(transfer_run *transfer) {
  qkv_calibration_shape shape = {.layers = 1,
                                 .kv_heads = transfer->heads,
                                 .q_heads = transfer->heads,
                                 .key_dim = transfer->key_dim,
                                 .value_dim = transfer->value_dim,
                                 .rope = {.theta = transfer->settings->rope_theta}};
  qkv_error error = {0};
  qkv_status status = qkv_rope_resolve(&shape.rope, transfer->key_dim, &error);
  if (status != QKV_OK) return qkv_program_failed("%s", error.text);
  const size_t tokens = transfer->tokens < 4096 ? (size_t)transfer->tokens : 4096;
  const size_t keys = tokens * transfer->heads * transfer->key_dim;
  const size_t values = tokens * transfer->heads * transfer->value_dim;
  float *k = malloc((keys + values) * sizeof *k);
  if (k == NULL) abort();
  qkv_to_float(QKV_FP16, transfer->rows, k, keys);
  qkv_to_float(QKV_FP16, transfer->rows + part_bytes(transfer, 0), k + keys, values);
  qkv_moments *moments = qkv_moments_create(&shape);
  qkv_moments_add(moments, 0, 0, tokens, k, k + keys, true);
  status = qkv_calibrate(moments, &QKV_CALIBRATE_DEFAULTS, &transfer->calibration, &error);
  qkv_moments_destroy(&moments);
  free(k);
  return status == QKV_OK ? 0 : qkv_program_failed("%s", error.text);
}

static void add_calibration(const transfer_run *transfer, qkv_client_model *model) {
  if (transfer->calibration == NULL) return;
  model->name = CALIBRATED_MODEL;
  model->rope = (qkv_client_rope){.theta = transfer->settings->rope_theta};
  model->calibration = qkv_calibration_bytes(transfer->calibration, &model->calibration_bytes);
  model->calibration_trusted = true;
}

static int open_session(transfer_run *transfer) {
  const qkv_bench_settings *settings = transfer->settings;
  qkv_call_error error = {0};
  qkv_client_model model = {.name = MODEL,
                            .layers = 1,
                            .kv_heads = transfer->heads,
                            .q_heads = transfer->heads,
                            .key_dim = transfer->key_dim,
                            .value_dim = transfer->value_dim,
                            .dtype = QKV_CLIENT_FP16};
  add_calibration(transfer, &model);
  if (qkv_client_register_model(transfer->client, &model, &error) != 0) {
    return qkv_bench_failed("register the model", &error);
  }
  close_session(transfer);  // of the last repeat, or of a run that was cut short
  const qkv_client_policy policy = {.bits_k = settings->code_k, .bits_v = settings->code_k, .self_calibration = -1};
  const qkv_session_options session = {.session = MODEL,
                                       .model = model.name,
                                       .purpose = settings->calibrated ? 2 : 1,
                                       .policy = stores(settings) ? &policy : NULL};
  if (qkv_client_open_session(transfer->client, &session, &error) != 0) {
    return qkv_bench_failed("open a session", &error);
  }
  transfer->position = 0;
  return 0;
}

static int append_message(transfer_run *transfer) {
  qkv_call_error error = {0};
  qkv_client_item item = {
      .session = MODEL, .position = transfer->position, .k = rows_tensor(transfer, 0), .v = rows_tensor(transfer, 1)};
  const qkv_bench_settings *settings = transfer->settings;
  const qkv_code code =
      settings->coded ? qkv_client_append_encoded(transfer->client, &item, (unsigned)settings->threads, NULL, &error)
                      : qkv_client_append(transfer->client, &item, 1, NULL, &error);
  if (code != 0) return qkv_bench_failed("append", &error);
  transfer->position += (uint64_t)transfer->tokens;
  return 0;
}

// Reads a value of every cache line, so that the data has really arrived where it can be used.
static bool receive(void *context, const qkv_client_rows *rows) {
  transfer_run *transfer = context;
  const volatile char *k = rows->k.data, *v = rows->v.data;
  for (size_t i = 0; i < rows->k.bytes; i += 64) (void)k[i];
  for (size_t i = 0; i < rows->v.bytes; i += 64) (void)v[i];
  transfer->received += rows->k.bytes + rows->v.bytes;
  return true;
}

static int fetch_pages(transfer_run *transfer) {
  qkv_call_error error = {0};
  const uint32_t layer = 0;
  const qkv_client_fetch request = {.session = MODEL,
                                    .layers = &layer,
                                    .layer_count = 1,
                                    .end = (uint64_t)transfer->tokens,
                                    .dtype = QKV_CLIENT_FP16};
  qkv_client_layer_rows rows = {.k = transfer->arrived,
                                .v = transfer->arrived + part_bytes(transfer, 0),
                                .capacity = (uint64_t)transfer->tokens};
  if (qkv_client_fetch_decoded(transfer->client, &request, (unsigned)transfer->settings->threads, &rows, &error) != 0)
    return qkv_bench_failed("fetch", &error);
  if (rows.tokens == (uint64_t)transfer->tokens) return 0;
  return qkv_program_failed("fetch returned %llu tokens, %lld were asked for", (unsigned long long)rows.tokens,
                            (long long)transfer->tokens);
}

static int fetch_shared(const transfer_run *transfer) {
  qkv_call_error error = {0};
  const uint32_t layer = 0;
  const size_t keys = part_bytes(transfer, 0);
  const qkv_client_fetch request = {.session = MODEL,
                                    .layers = &layer,
                                    .layer_count = 1,
                                    .end = (uint64_t)transfer->tokens,
                                    .dtype = QKV_CLIENT_FP16};
  qkv_client_layer_memory to = {.k = {.data = transfer->arrived, .bytes = keys},
                                .v = {.data = transfer->arrived + keys, .bytes = part_bytes(transfer, 1)}};
  if (qkv_client_fetch_into(transfer->client, &request, &to, &error) != 0) return qkv_bench_failed("fetch", &error);
  if (to.tokens == (uint64_t)transfer->tokens) return 0;
  return qkv_program_failed("fetch returned %llu tokens, %lld were asked for", (unsigned long long)to.tokens,
                            (long long)transfer->tokens);
}

static int fetch_message(transfer_run *transfer) {
  qkv_call_error error = {0};
  if (transfer->settings->coded) return fetch_pages(transfer);
  if (transfer->settings->shared) return fetch_shared(transfer);
  qkv_client_fetch request = {.session = MODEL, .end = (uint64_t)transfer->tokens, .dtype = QKV_CLIENT_FP16};
  transfer->received = 0;
  if (qkv_client_fetch_rows(transfer->client, &request, receive, transfer, &error) != 0) {
    return qkv_bench_failed("fetch", &error);
  }
  if (transfer->received == message_bytes(transfer)) return 0;
  return qkv_program_failed("fetch returned %zu bytes, %zu were asked for", transfer->received,
                            message_bytes(transfer));
}

// What the daemon's figures are held against, and the samples of all in gigabytes a second.
typedef struct references {
  qkv_raw raw;
  qkv_echo echo;
  qkv_samples daemon, socket, grpc, memory;
} references;

// A message's rows copied within this process, as often as they are sent.
static double copy_rows(transfer_run *transfer) {
  const double begin = qkv_bench_now();
  char *volatile to = transfer->arrived;
  for (int64_t i = 0; i < transfer->rounds; i++) memcpy(to, transfer->rows, message_bytes(transfer));
  return qkv_bench_now() - begin;
}

// One repeat of each, one after the other.
static int repeat(transfer_run *transfer, int (*message)(transfer_run *), references *others) {
  if (open_session(transfer)) return 1;
  if (message == fetch_message && append_message(transfer)) return 1;
  double gigabytes = 1e-9 * (double)message_bytes(transfer) * (double)transfer->rounds;
  double begin = qkv_bench_now();
  for (int64_t i = 0; i < transfer->rounds; i++) {
    if (message(transfer)) return 1;
  }
  qkv_samples_add(&others->daemon, gigabytes / (qkv_bench_now() - begin));
  qkv_samples_add(&others->memory, gigabytes / copy_rows(transfer));
  double socket = 0, grpc = 0;
  for (int64_t i = 0; i < transfer->rounds; i++) {
    double seconds = qkv_echo_exchange(&others->echo);
    if (seconds < 0) return qkv_program_failed("the bare gRPC call has failed");
    grpc += seconds;
  }
  for (int64_t i = 0; i < transfer->rounds; i++) {
    double seconds = qkv_raw_exchange(&others->raw);
    if (seconds < 0) return qkv_program_failed("the raw socket has failed");
    socket += seconds;
  }
  qkv_samples_add(&others->grpc, gigabytes / grpc);
  qkv_samples_add(&others->socket, gigabytes / socket);
  return 0;
}

static void report(const transfer_run *transfer, const char *bench, bool tcp, references *others) {
  const qkv_bench_settings *settings = transfer->settings;
  double median = qkv_samples_quantile(&others->daemon, 0.5), raw = qkv_samples_quantile(&others->socket, 0.5);
  double grpc = qkv_samples_quantile(&others->grpc, 0.5), memory = qkv_samples_quantile(&others->memory, 0.5);
  qkv_bench_report(
      settings,
      json_pack("{s:s, s:s, s:s, s:s, s:I, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f}", "bench", bench, "transport",
                settings->shared ? "shared memory"
                : tcp            ? "tcp"
                                 : "unix",
                "engine", stores(settings) ? "store" : "discard", "crossing", settings->coded ? "pages" : "rows",
                "bytes", (json_int_t)message_bytes(transfer), "gbps", median, "gbps_min",
                qkv_samples_quantile(&others->daemon, 0), "gbps_max", qkv_samples_quantile(&others->daemon, 1),
                "raw_gbps", raw, "fraction", median / raw, "grpc_gbps", grpc, "grpc_fraction", median / grpc,
                "memcpy_gbps", memory, "memcpy_fraction", median / memory));
}

static bool start(references *others, bool tcp, size_t up, size_t down) {
  if (qkv_raw_start(&others->raw, tcp, up, down) && qkv_echo_start(&others->echo, tcp, up, down)) return true;
  (void)qkv_program_failed("cannot start what the daemon is compared with");
  return false;
}

// In this order: the echo's peer has inherited the raw socket.
static void stop(references *others) {
  qkv_echo_stop(&others->echo);
  qkv_raw_stop(&others->raw);
  qkv_samples_free(&others->daemon);
  qkv_samples_free(&others->socket);
  qkv_samples_free(&others->grpc);
  qkv_samples_free(&others->memory);
}

// The middle layer's keys, or values, over and over, as fp16.
static void read_part(const transfer_run *transfer, int part, char *out) {
  const size_t layer = qkv_dump_layers(transfer->dump) / 2;
  const qkv_dump_kind kind = part == 0 ? QKV_DUMP_K : QKV_DUMP_V;
  const uint64_t tokens = qkv_dump_tokens(transfer->dump, layer, kind);
  const size_t width = (size_t)transfer->heads * (part == 0 ? transfer->key_dim : transfer->value_dim);
  float *rows = malloc((size_t)tokens * width * sizeof *rows);
  if (rows == NULL) abort();
  qkv_dump_read(transfer->dump, layer, kind, 0, tokens, rows);
  for (uint64_t t = 0; t < (uint64_t)transfer->tokens; t += tokens) {
    const uint64_t left = (uint64_t)transfer->tokens - t;
    qkv_from_float(QKV_FP16, rows, out + (size_t)t * width * 2, (size_t)(left < tokens ? left : tokens) * width);
  }
  free(rows);
}

static char *message_rows(const transfer_run *transfer) {
  if (transfer->dump == NULL) return qkv_bench_rows(message_bytes(transfer), 1);
  char *rows = malloc(message_bytes(transfer));
  if (rows == NULL) abort();
  read_part(transfer, 0, rows);
  read_part(transfer, 1, rows + part_bytes(transfer, 0));
  return rows;
}

// Rows to send, and memory for those that come.
static int make_rows(transfer_run *transfer) {
  const size_t bytes = message_bytes(transfer);
  qkv_call_error error = {0};
  transfer->rows = message_rows(transfer);
  if (!transfer->settings->shared) {
    transfer->arrived = malloc(bytes);
    if (transfer->arrived == NULL) abort();
  } else {
    char *own = transfer->rows;
    if (qkv_client_share(transfer->client, 2 * bytes, &transfer->shared, &error) != 0) {
      free(own);
      transfer->rows = NULL;
      return qkv_bench_failed("share memory", &error);
    }
    transfer->rows = transfer->shared;
    memcpy(transfer->rows, own, bytes);
    free(own);
    transfer->arrived = transfer->rows + bytes;
  }
  memset(transfer->arrived, 1, bytes);
  return 0;
}

static void free_rows(transfer_run *transfer) {
  if (transfer->shared != NULL) {
    qkv_client_unshare(transfer->client, &transfer->shared);
    return;
  }
  free(transfer->arrived);
  free(transfer->rows);
}

// What a token has, and how many a message has.
static int take_shape(transfer_run *transfer) {
  const qkv_bench_settings *settings = transfer->settings;
  transfer->heads = HEADS;
  transfer->key_dim = transfer->value_dim = DIM;
  if (settings->dump != NULL) {
    qkv_error error = {0};
    if (qkv_dump_open(settings->dump, &transfer->dump, &error) != QKV_OK) return qkv_program_failed("%s", error.text);
    transfer->heads = qkv_dump_heads(transfer->dump, QKV_DUMP_K);
    transfer->key_dim = qkv_dump_width(transfer->dump, QKV_DUMP_K);
    transfer->value_dim = qkv_dump_width(transfer->dump, QKV_DUMP_V);
    if (qkv_dump_before_rope(transfer->dump))
      return qkv_program_misused("%s has keys from before RoPE, must have them as attended", settings->dump);
  }
  const int64_t token = (int64_t)2 * transfer->heads * (transfer->key_dim + transfer->value_dim);
  const int64_t unit = settings->coded ? 64 * token : token;
  transfer->tokens = settings->bytes / token;
  // A model's tokens have any number of bytes: the message gets fewer where they do not fit.
  if (transfer->dump != NULL) transfer->tokens = settings->bytes / unit * (unit / token);
  if (transfer->tokens == 0 || (transfer->dump == NULL && settings->bytes % unit != 0))
    return qkv_program_misused("--bytes is %lld, must be a multiple of %lld%s", (long long)settings->bytes,
                               (long long)unit, settings->coded ? " with --coded: whole pages" : "");
  return 0;
}

static int run_transfer(const qkv_bench_settings *settings, const char *bench, int (*message)(transfer_run *)) {
  transfer_run transfer = {.settings = settings,
                           .rounds = settings->rounds > 0 ? settings->rounds : REPEAT_BYTES / settings->bytes};
  int status = take_shape(&transfer);
  if (status != 0) {
    qkv_dump_close(&transfer.dump);
    return status;
  }
  qkv_bench_daemon daemon;
  const char *arguments[3] = {NULL};
  size_t count = 0;
  if (!stores(settings)) arguments[count++] = "--discard";
  if (settings->shared) arguments[count++] = "--allow-client-shm";
  if (!qkv_bench_daemon_start(&daemon, settings->program.target, arguments)) {
    qkv_dump_close(&transfer.dump);
    return 1;
  }
  bool tcp = strncmp(daemon.target, "unix:", 5) != 0;
  const size_t bytes = message_bytes(&transfer);
  references others = {0};
  bool up = message == append_message;
  status = start(&others, tcp, up ? bytes : 64, up ? 64 : bytes) ? 0 : 1;
  transfer.client = status ? NULL : qkv_bench_connect(settings, daemon.target);
  if (!transfer.client || make_rows(&transfer)) status = 1;
  if (!status && settings->calibrated && stores(settings)) status = calibrate(&transfer);
  // The first repeat warms up.
  for (int64_t i = 0; i <= settings->repeats && !status; i++) {
    status = repeat(&transfer, message, &others);
    if (i > 0) continue;
    qkv_samples_clear(&others.daemon);
    qkv_samples_clear(&others.socket);
    qkv_samples_clear(&others.grpc);
    qkv_samples_clear(&others.memory);
  }
  if (!status) report(&transfer, bench, tcp, &others);
  if (transfer.client) close_session(&transfer);
  if (transfer.client) free_rows(&transfer);
  qkv_client_close(&transfer.client);
  const qkv_calibration *made = transfer.calibration;
  qkv_calibration_unref(&made);
  qkv_dump_close(&transfer.dump);
  stop(&others);
  qkv_bench_daemon_stop(&daemon);
  return status;
}

static int run_append(void *settings, const qkv_option_list *arguments) {
  (void)arguments;
  return run_transfer(settings, "append", append_message);
}

static int run_fetch(void *settings, const qkv_option_list *arguments) {
  (void)arguments;
  return run_transfer(settings, "fetch", fetch_message);
}

const qkv_command qkvi_bench_append = {"append",
                                       "",
                                       "rows into the daemon, compared with a raw socket and a bare gRPC call",
                                       options,
                                       sizeof options / sizeof *options,
                                       0,
                                       0,
                                       run_append};
const qkv_command qkvi_bench_fetch = {"fetch",
                                      "",
                                      "rows out of the daemon, compared with a raw socket and a bare gRPC call",
                                      options,
                                      sizeof options / sizeof *options,
                                      0,
                                      0,
                                      run_fetch};
