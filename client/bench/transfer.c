// qkv-bench append and fetch: how fast rows go into the daemon and come out, beside a raw socket and a bare gRPC
// call.
//
// By default the daemon discards (`qkvd --discard`): what is measured is the transport and the parsing of
// tensors. With --store rows are coded and decoded.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/bench/bench.h"
#include "client/bench/echo.h"
#include "client/bench/raw.h"

#define MODEL "qkv-bench"
enum { HEADS = 8, DIM = 128 };             // K and V of one token: 4 KiB of fp16
#define REPEAT_BYTES (INT64_C(256) << 20)  // at 4 GB/s 70 ms: shorter ones measure how the cores wake up

static const qkv_option options[] = {
    QKV_BENCH_OPTIONS,
    {"bytes", QKV_OPTION_BYTES, offsetof(qkv_bench_settings, bytes), "1MiB", 65536, 33554432, "BYTES",
     "fp16 rows in one message, K and V together"},
    {"rounds", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, rounds), "0", 0, 100000, "N",
     "messages in each repeat; 0: as many as carry 256 MiB"},
    {"store", QKV_OPTION_FLAG, offsetof(qkv_bench_settings, store), NULL, 0, 0, NULL,
     "code and decode the rows instead of discarding them; --target must then be a daemon that stores"},
};

typedef struct transfer_run {
  const qkv_bench_settings *settings;
  qkv_client *client;
  int64_t tokens;  // of one message
  int64_t rounds;  // messages in each repeat
  uint64_t position;
  char *rows;       // K, then V
  size_t received;  // bytes, by fetch
} transfer_run;

static qkv_client_tensor rows_tensor(const transfer_run *transfer, int part) {
  size_t half = (size_t)transfer->tokens * HEADS * DIM * 2;
  return (qkv_client_tensor){.dtype = QKV_CLIENT_FP16,
                             .rank = 3,
                             .dims = {transfer->tokens, HEADS, DIM},
                             .data = transfer->rows + (part ? half : 0),
                             .bytes = half};
}

static void close_session(const transfer_run *transfer) {
  qkv_call_error ignored = {0};
  qkv_client_close_session(transfer->client, MODEL, NULL, &ignored);
}

static int open_session(transfer_run *transfer) {
  qkv_call_error error = {0};
  qkv_client_model model = {.name = MODEL,
                            .layers = 1,
                            .kv_heads = HEADS,
                            .q_heads = HEADS,
                            .key_dim = DIM,
                            .value_dim = DIM,
                            .dtype = QKV_CLIENT_FP16};
  if (qkv_client_register_model(transfer->client, &model, &error) != 0) {
    return qkv_bench_failed("register the model", &error);
  }
  close_session(transfer);  // of the last repeat, or of a run that was cut short
  qkv_session_options session = {.session = MODEL, .model = MODEL};
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
  if (qkv_client_append(transfer->client, &item, 1, NULL, &error) != 0) return qkv_bench_failed("append", &error);
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

static int fetch_message(transfer_run *transfer) {
  qkv_call_error error = {0};
  qkv_client_fetch request = {.session = MODEL, .end = (uint64_t)transfer->tokens, .dtype = QKV_CLIENT_FP16};
  transfer->received = 0;
  if (qkv_client_fetch_rows(transfer->client, &request, receive, transfer, &error) != 0) {
    return qkv_bench_failed("fetch", &error);
  }
  if (transfer->received == (size_t)transfer->settings->bytes) return 0;
  return qkv_program_failed("fetch returned %zu bytes, %lld were asked for", transfer->received,
                            (long long)transfer->settings->bytes);
}

// What the daemon's figures are held against, and the samples of all three in gigabytes a second.
typedef struct beside {
  qkv_raw raw;
  qkv_echo echo;
  qkv_samples daemon, socket, grpc;
} beside;

// One repeat of each, one after the other.
static int repeat(transfer_run *transfer, int (*message)(transfer_run *), beside *others) {
  const qkv_bench_settings *settings = transfer->settings;
  if (open_session(transfer)) return 1;
  if (message == fetch_message && append_message(transfer)) return 1;
  double gigabytes = 1e-9 * (double)settings->bytes * (double)transfer->rounds;
  double begin = qkv_bench_now();
  for (int64_t i = 0; i < transfer->rounds; i++) {
    if (message(transfer)) return 1;
  }
  qkv_samples_add(&others->daemon, gigabytes / (qkv_bench_now() - begin));
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

static void report(const qkv_bench_settings *settings, const char *bench, bool tcp, beside *others) {
  double median = qkv_samples_quantile(&others->daemon, 0.5), raw = qkv_samples_quantile(&others->socket, 0.5);
  double grpc = qkv_samples_quantile(&others->grpc, 0.5);
  qkv_bench_report(settings, json_pack("{s:s, s:s, s:s, s:I, s:f, s:f, s:f, s:f, s:f, s:f, s:f}", "bench", bench,
                                       "transport", tcp ? "tcp" : "unix", "engine",
                                       settings->store ? "store" : "discard", "bytes", (json_int_t)settings->bytes,
                                       "gbps", median, "gbps_min", qkv_samples_quantile(&others->daemon, 0),
                                       "gbps_max", qkv_samples_quantile(&others->daemon, 1), "raw_gbps", raw,
                                       "fraction", median / raw, "grpc_gbps", grpc, "grpc_fraction", median / grpc));
}

static bool start(beside *others, bool tcp, size_t up, size_t down) {
  if (qkv_raw_start(&others->raw, tcp, up, down) && qkv_echo_start(&others->echo, tcp, up, down)) return true;
  (void)qkv_program_failed("cannot start what the daemon is compared with");
  return false;
}

// In this order: the echo's peer has inherited the raw socket.
static void stop(beside *others) {
  qkv_echo_stop(&others->echo);
  qkv_raw_stop(&others->raw);
  qkv_samples_free(&others->daemon);
  qkv_samples_free(&others->socket);
  qkv_samples_free(&others->grpc);
}

static int run_transfer(const qkv_bench_settings *settings, const char *bench, int (*message)(transfer_run *)) {
  transfer_run transfer = {.settings = settings,
                           .tokens = settings->bytes / (2 * HEADS * DIM * 2),
                           .rounds = settings->rounds > 0 ? settings->rounds : REPEAT_BYTES / settings->bytes};
  if (settings->bytes % (2 * HEADS * DIM * 2)) {
    return qkv_program_misused("--bytes is %lld, must be a multiple of %d", (long long)settings->bytes,
                               2 * HEADS * DIM * 2);
  }
  qkv_bench_daemon daemon;
  if (!qkv_bench_daemon_start(&daemon, settings->program.target,
                              (const char *const[]){settings->store ? NULL : "--discard", NULL}))
    return 1;
  bool tcp = strncmp(daemon.target, "unix:", 5) != 0;
  size_t bytes = (size_t)settings->bytes;
  beside others = {0};
  bool up = message == append_message;
  int status = start(&others, tcp, up ? bytes : 64, up ? 64 : bytes) ? 0 : 1;
  transfer.rows = qkv_bench_rows(bytes, 1);
  transfer.client = status ? NULL : qkv_bench_connect(settings, daemon.target);
  if (!transfer.client) status = 1;
  // The first repeat warms up.
  for (int64_t i = 0; i <= settings->repeats && !status; i++) {
    status = repeat(&transfer, message, &others);
    if (i > 0) continue;
    qkv_samples_clear(&others.daemon);
    qkv_samples_clear(&others.socket);
    qkv_samples_clear(&others.grpc);
  }
  if (!status) report(settings, bench, tcp, &others);
  if (transfer.client) close_session(&transfer);
  qkv_client_close(&transfer.client);
  free(transfer.rows);
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
                                       "rows into the daemon, beside a raw socket and a bare gRPC call",
                                       options,
                                       sizeof options / sizeof *options,
                                       0,
                                       0,
                                       run_append};
const qkv_command qkvi_bench_fetch = {"fetch",
                                      "",
                                      "rows out of the daemon, beside a raw socket and a bare gRPC call",
                                      options,
                                      sizeof options / sizeof *options,
                                      0,
                                      0,
                                      run_fetch};
