// qkv-bench rpc: the latency of the smallest call, compared with a raw echo of 64 bytes.
#include <string.h>

#include "client/bench/bench.h"
#include "client/bench/raw.h"

static const qkv_option options[] = {
    QKV_BENCH_OPTIONS,
    {"rounds", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, rounds), "500", 1, 1000000, "N",
     "calls in each repeat"},
};

// grpc.health.v1.Health/Check of the whole server: an empty message there, two bytes back.
static int check(qkv_client *client) {
  qkv_call_error error = {0};
  void *response = NULL;
  size_t bytes;
  if (qkv_client_call(client, "/grpc.health.v1.Health/Check", "", 0, &response, &bytes, &error) != 0) {
    return qkv_bench_failed("health check", &error);
  }
  qkv_free(response);
  return 0;
}

static int sample(const qkv_bench_settings *settings, qkv_client *client, qkv_raw *raw, qkv_samples *calls,
                  qkv_samples *echoes) {
  for (int64_t repeat = 0; repeat < settings->repeats; repeat++) {
    for (int64_t i = 0; i < settings->rounds; i++) {
      double begin = qkv_bench_now();
      if (check(client)) return 1;
      qkv_samples_add(calls, 1e6 * (qkv_bench_now() - begin));
    }
    for (int64_t i = 0; i < settings->rounds; i++) {
      double seconds = qkv_raw_exchange(raw);
      if (seconds < 0) return 1;
      qkv_samples_add(echoes, 1e6 * seconds);
    }
  }
  return 0;
}

static int run(void *values, const qkv_option_list *arguments) {
  (void)arguments;
  const qkv_bench_settings *settings = values;
  qkv_bench_daemon daemon;
  if (!qkv_bench_daemon_start(&daemon, settings->program.target, (const char *const[]){NULL})) return 1;
  bool tcp = strncmp(daemon.target, "unix:", 5) != 0;
  qkv_raw raw;
  qkv_samples calls = {0}, echoes = {0};
  int status = qkv_raw_start(&raw, tcp, 64, 64) ? 0 : 1;
  qkv_client *client = status ? NULL : qkv_bench_connect(settings, daemon.target);
  if (!client) status = 1;
  if (!status) status = sample(settings, client, &raw, &calls, &echoes);
  if (!status) {
    qkv_bench_report(
        settings,
        json_pack("{s:s, s:s, s:f, s:f, s:f, s:f}", "bench", "rpc", "transport", tcp ? "tcp" : "unix", "us_p50",
                  qkv_samples_quantile(&calls, 0.5), "us_p99", qkv_samples_quantile(&calls, 0.99), "raw_us_p50",
                  qkv_samples_quantile(&echoes, 0.5), "raw_us_p99", qkv_samples_quantile(&echoes, 0.99)));
  }
  qkv_client_close(&client);
  qkv_raw_stop(&raw);
  qkv_samples_free(&calls);
  qkv_samples_free(&echoes);
  qkv_bench_daemon_stop(&daemon);
  return status;
}

const qkv_command qkvi_bench_rpc = {
    "rpc", "", "latency of the smallest call, compared with a raw echo", options, sizeof options / sizeof *options, 0,
    0,     run};
