// qkv-bench step: a decode step (append one row, attend) through the daemon and in process, in turn.
//
// Both run the same engine on the same rows, so the difference is what the daemon costs: the socket, gRPC,
// parsing and the answer. That both answer the same bits is checked. Between the two the same bytes go over a bare
// socket in one step and as a bare gRPC call in the next. So these, too, find caches that a long session's codes have
// filled, as the daemon does.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/bench/bench.h"
#include "client/bench/echo.h"
#include "client/bench/raw.h"
#include "engine/cache/store.h"

#define NAME "qkv-bench"

enum { FILL_TOKENS = 256 };

static const qkv_option options[] = {
    QKV_BENCH_OPTIONS,
    {"rounds", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, rounds), "200", 1, 100000, "N",
     "steps in each repeat"},
    {"tokens", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, tokens), "512", 1, 4194304, "N",
     "tokens that are there before the first step"},
    {"dim", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, dim), "64", 8, 1024, "N", "width of a row"},
    {"kv-heads", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, kv_heads), "2", 1, 128, "N", "KV heads"},
    {"q-heads", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, q_heads), "8", 1, 1024, "N",
     "query heads, a multiple of the KV heads"},
    {"bits-k", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, bits_k), "4", 1, 8, "BITS", "code bits of keys"},
    {"bits-v", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, bits_v), "4", 1, 8, "BITS", "code bits of values"},
    {"threads", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, threads), "1", 1, 256, "N",
     "compute threads, of a daemon that is started for the run and in this process"},
    {"precision", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, precision), "0", 0, 3, "N",
     "arithmetic on codes, as in AttendOptions; 0: the default"},
    {"shared", QKV_OPTION_FLAG, offsetof(qkv_bench_settings, shared), NULL, 0, 0, NULL,
     "rows and queries lie in shared memory; --target must then be a daemon with --allow-client-shm"},
};

// The limits: they carry the bytes of a step and do nothing else.
typedef struct step_carriers {
  qkv_raw raw;
  qkv_echo grpc;
} step_carriers;

// One session twice: in this process and in the daemon.
typedef struct both_sides {
  const qkv_bench_settings *settings;
  uint64_t position;
  float *k, *v, *q;  // rows of one step
  float *own;        // where they lie
  void *shared;      // the same with --shared
  float *out, *lse;  // of the side in process
  size_t out_count, lse_count;
  qkv_pool *pool;
  qkv_store *store;
  qkv_session *session;
  qkv_client *client;
  qkv_decode *stream;
  step_carriers *carriers;
} both_sides;

// Microseconds.
typedef struct step_times {
  qkv_samples engine, daemon, raw, grpc;
} step_times;

static qkv_tensor tensor_of(const qkv_segment *segment, int64_t tokens, int64_t heads, int64_t dim) {
  return qkv_tensor_dense(QKV_FP32, 3, (int64_t[]){tokens, heads, dim}, segment);
}

static int engine_failed(const qkv_error *error) {
  return qkv_program_failed("in process: %s", error->text);
}

static int open_in_process(both_sides *sides) {
  const qkv_bench_settings *settings = sides->settings;
  qkv_error error = {0};
  qkv_store_config config = {.memory_budget = 4ull << 30,
                             .models_max = 1,
                             .sessions_max = 1,
                             .policy = {.codec = qkv_codec_by_id(QKV_CODEC_EMBEDDED),
                                        .bits_k = (double)settings->bits_k,
                                        .bits_v = (double)settings->bits_v,
                                        .recent_window = 64,
                                        .anchor_said = true}};
  qkv_model model = {.name = NAME,
                     .layers = 1,
                     .kv_heads = (uint32_t)settings->kv_heads,
                     .q_heads = (uint32_t)settings->q_heads,
                     .key_dim = (uint32_t)settings->dim,
                     .value_dim = (uint32_t)settings->dim,
                     .dtype = QKV_FP32,
                     .policy = QKV_POLICY_UNSET};
  qkv_session_config session = {
      .name = NAME, .tenant = "default", .purpose = QKV_PURPOSE_ATTEND, .policy = QKV_POLICY_UNSET};
  sides->store = qkv_store_create(&config);
  if (qkv_pool_create((size_t)settings->threads - 1, 1, &sides->pool, &error) != QKV_OK ||
      qkv_store_register_model(sides->store, &model, NULL, &error) != QKV_OK ||
      qkv_store_open(sides->store, &session, NAME, &sides->session, &error) != QKV_OK) {
    return engine_failed(&error);
  }
  return 0;
}

static int open_in_daemon(both_sides *sides, const char *target) {
  const qkv_bench_settings *settings = sides->settings;
  qkv_call_error error = {0};
  sides->client = qkv_bench_connect(settings, target);
  if (!sides->client) return 1;
  // All that the daemon has defaults of its own for: both sides hold the same codes.
  qkv_client_policy policy = {.bits_k = (double)settings->bits_k,
                              .bits_v = (double)settings->bits_v,
                              .recent_window = 64,
                              .anchor = "none",
                              .low_rank = "none",
                              .gqa_compensation = -1,
                              .self_calibration = -1,
                              .sink_tokens = -1};
  // A daemon that was given may have the name already, with another geometry: name the geometry.
  char name[96];
  snprintf(name, sizeof name, NAME "-%lldx%lldx%lld", (long long)settings->dim, (long long)settings->kv_heads,
           (long long)settings->q_heads);
  qkv_client_model model = {.name = name,
                            .layers = 1,
                            .kv_heads = (uint32_t)settings->kv_heads,
                            .q_heads = (uint32_t)settings->q_heads,
                            .key_dim = (uint32_t)settings->dim,
                            .value_dim = (uint32_t)settings->dim,
                            .dtype = QKV_CLIENT_FP32};
  if (qkv_client_register_model(sides->client, &model, &error) != 0) {
    return qkv_bench_failed("register the model", &error);
  }
  qkv_client_close_session(sides->client, NAME, NULL, &(qkv_call_error){0});  // of a run that was cut short
  qkv_session_options session = {.session = NAME, .model = name, .policy = &policy};
  if (qkv_client_open_session(sides->client, &session, &error) != 0) {
    return qkv_bench_failed("open a session", &error);
  }
  if (qkv_decode_open(sides->client, &sides->stream, &error) != 0) return qkv_bench_failed("decode", &error);
  return 0;
}

static void next_rows(both_sides *sides) {
  size_t row = (size_t)(sides->settings->kv_heads * sides->settings->dim);
  qkv_bench_floats(sides->k, row, 3 * sides->position + 1);
  qkv_bench_floats(sides->v, row, 3 * sides->position + 2);
  qkv_bench_floats(sides->q, (size_t)(sides->settings->q_heads * sides->settings->dim), 3 * sides->position + 3);
}

static int step_in_process(both_sides *sides) {
  const qkv_bench_settings *settings = sides->settings;
  size_t row = (size_t)(settings->kv_heads * settings->dim) * sizeof(float);
  qkv_segment k = {.data = (const uint8_t *)sides->k, .length = row};
  qkv_segment v = {.data = (const uint8_t *)sides->v, .length = row};
  qkv_segment q = {.data = (const uint8_t *)sides->q,
                   .length = (size_t)(settings->q_heads * settings->dim) * sizeof(float)};
  qkv_tensor kt = tensor_of(&k, 1, settings->kv_heads, settings->dim);
  qkv_tensor vt = tensor_of(&v, 1, settings->kv_heads, settings->dim);
  qkv_error error = {0};
  uint64_t appended, length;
  qkv_attend request = {.position = sides->position,
                        .options.precision = (qkv_precision)settings->precision,
                        .q = tensor_of(&q, 1, settings->q_heads, settings->dim),
                        .out = sides->out,
                        .lse = sides->lse};
  if (qkv_session_append(sides->session, 0, sides->position, &kt, &vt, false, &appended, &length, &error) != QKV_OK ||
      qkv_session_read(sides->session, 0, &request.layer, &error) != QKV_OK) {
    return engine_failed(&error);
  }
  qkv_status status = qkv_attend_check(&request, &error);
  if (status == QKV_OK) qkv_attend_run(sides->pool, &request, 1);
  qkv_session_read_done(sides->session, 0);
  return status == QKV_OK ? 0 : engine_failed(&error);
}

static qkv_client_tensor client_tensor(const float *data, int64_t tokens, int64_t heads, int64_t dim) {
  return (qkv_client_tensor){.dtype = QKV_CLIENT_FP32,
                             .rank = 3,
                             .dims = {tokens, heads, dim},
                             .data = data,
                             .bytes = (size_t)(tokens * heads * dim) * sizeof *data};
}

static int step_in_daemon(both_sides *sides, qkv_client_result *result) {
  const qkv_bench_settings *settings = sides->settings;
  qkv_call_error error = {0};
  const qkv_client_attend_options attend = {.precision = (int)settings->precision};
  qkv_client_item item = {.session = NAME,
                          .position = sides->position,
                          .options = &attend,
                          .k = client_tensor(sides->k, 1, settings->kv_heads, settings->dim),
                          .v = client_tensor(sides->v, 1, settings->kv_heads, settings->dim),
                          .q = client_tensor(sides->q, 1, settings->q_heads, settings->dim)};
  if (qkv_decode_step(sides->stream, &item, 1, result, &error) != 0) return qkv_bench_failed("decode", &error);
  return result->code == 0 ? 0 : qkv_program_failed("decode: %s", result->text);
}

static int exchange(both_sides *sides, step_times *times) {
  const bool raw = sides->position % 2 == 0;
  const double seconds = raw ? qkv_raw_exchange(&sides->carriers->raw) : qkv_echo_exchange(&sides->carriers->grpc);
  qkv_samples_add(raw ? &times->raw : &times->grpc, 1e6 * seconds);
  return seconds < 0 ? qkv_program_failed("a bare %s has failed", raw ? "socket" : "gRPC call") : 0;
}

static int step(both_sides *sides, step_times *times) {
  next_rows(sides);
  double begin = qkv_bench_now();
  if (step_in_process(sides)) return 1;
  qkv_samples_add(&times->engine, 1e6 * (qkv_bench_now() - begin));
  if (exchange(sides, times)) return 1;
  qkv_client_result result = {0};
  begin = qkv_bench_now();
  int status = step_in_daemon(sides, &result);
  qkv_samples_add(&times->daemon, 1e6 * (qkv_bench_now() - begin));
  if (!status && (result.out_count != sides->out_count || result.lse_count != sides->lse_count ||
                  memcmp(result.out, sides->out, sides->out_count * sizeof(float)) != 0 ||
                  memcmp(result.lse, sides->lse, sides->lse_count * sizeof(float)) != 0)) {
    status = qkv_program_failed("at position %llu the daemon and the engine in process differ",
                                (unsigned long long)sides->position);
  }
  qkv_client_results_free(&result, 1);
  sides->position++;
  return status;
}

// Rows that nothing attends, many at a time.
static int fill(both_sides *sides, size_t tokens) {
  const qkv_bench_settings *settings = sides->settings;
  const size_t row = (size_t)(settings->kv_heads * settings->dim), bytes = tokens * row * sizeof(float);
  float *rows = malloc(2 * bytes);
  if (!rows) abort();
  qkv_bench_floats(rows, tokens * row, 3 * sides->position + 1);
  qkv_bench_floats(rows + tokens * row, tokens * row, 3 * sides->position + 2);
  const qkv_segment k = {.data = (const uint8_t *)rows, .length = bytes};
  const qkv_segment v = {.data = (const uint8_t *)rows + bytes, .length = bytes};
  const qkv_tensor kt = tensor_of(&k, (int64_t)tokens, settings->kv_heads, settings->dim);
  const qkv_tensor vt = tensor_of(&v, (int64_t)tokens, settings->kv_heads, settings->dim);
  const qkv_client_item item = {
      .session = NAME,
      .position = sides->position,
      .k = client_tensor(rows, (int64_t)tokens, settings->kv_heads, settings->dim),
      .v = client_tensor(rows + tokens * row, (int64_t)tokens, settings->kv_heads, settings->dim)};
  qkv_error error = {0};
  qkv_call_error call_error = {0};
  uint64_t appended, length;
  int status = 0;
  if (qkv_session_append(sides->session, 0, sides->position, &kt, &vt, false, &appended, &length, &error) != QKV_OK) {
    status = engine_failed(&error);
  } else if (qkv_client_append(sides->client, &item, 1, NULL, &call_error) != 0) {
    status = qkv_bench_failed("append", &call_error);
  }
  sides->position += tokens;
  free(rows);
  return status;
}

static int measure(both_sides *sides, step_times *times) {
  const qkv_bench_settings *settings = sides->settings;
  while (sides->position + FILL_TOKENS <= (uint64_t)settings->tokens) {
    if (fill(sides, FILL_TOKENS)) return 1;
  }
  while (sides->position < (uint64_t)settings->tokens) {
    if (step(sides, times)) return 1;
  }
  qkv_samples_clear(&times->engine);
  qkv_samples_clear(&times->daemon);
  qkv_samples_clear(&times->raw);
  qkv_samples_clear(&times->grpc);
  for (int64_t i = 0; i < settings->repeats * settings->rounds; i++) {
    if (step(sides, times)) return 1;
  }
  double engine = qkv_samples_quantile(&times->engine, 0.5), daemon = qkv_samples_quantile(&times->daemon, 0.5);
  qkv_bench_report(
      settings,
      json_pack("{s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:f, s:f, s:f, s:f, s:f, s:f, s:f}", "bench", "step",
                "tokens", (json_int_t)settings->tokens, "threads", (json_int_t)settings->threads, "dim",
                (json_int_t)settings->dim, "kv_heads", (json_int_t)settings->kv_heads, "q_heads",
                (json_int_t)settings->q_heads, "bits_k", (json_int_t)settings->bits_k, "bits_v",
                (json_int_t)settings->bits_v, "engine_us_p50", engine, "engine_us_p99",
                qkv_samples_quantile(&times->engine, 0.99), "daemon_us_p50", daemon, "daemon_us_p99",
                qkv_samples_quantile(&times->daemon, 0.99), "added_us_p50", daemon - engine, "raw_us_p50",
                qkv_samples_quantile(&times->raw, 0.5), "grpc_us_p50", qkv_samples_quantile(&times->grpc, 0.5)));
  return 0;
}

static void close_sides(both_sides *sides) {
  qkv_call_error ignored = {0};
  if (sides->stream) qkv_decode_close(&sides->stream, &ignored);
  if (sides->client) qkv_client_close_session(sides->client, NAME, NULL, &ignored);
  if (sides->shared) qkv_client_unshare(sides->client, &sides->shared);
  qkv_client_close(&sides->client);
  qkv_session_unref(&sides->session);
  qkv_store_destroy(&sides->store);
  qkv_pool_destroy(&sides->pool);
  free(sides->own);
  free(sides->out);
}

static void place_rows(both_sides *sides, float *at) {
  const size_t row = (size_t)(sides->settings->kv_heads * sides->settings->dim);
  sides->k = at;
  sides->v = sides->k + row;
  sides->q = sides->v + row;
}

static int share_rows(both_sides *sides, size_t bytes) {
  qkv_call_error error = {0};
  if (qkv_client_share(sides->client, bytes, &sides->shared, &error) != 0)
    return qkv_bench_failed("share memory", &error);
  place_rows(sides, sides->shared);
  return 0;
}

static int compare(const qkv_bench_settings *settings, const char *target, step_carriers *carriers) {
  both_sides sides = {.settings = settings,
                      .carriers = carriers,
                      .out_count = (size_t)(settings->q_heads * settings->dim),
                      .lse_count = (size_t)settings->q_heads};
  size_t row = (size_t)(settings->kv_heads * settings->dim), query = sides.out_count;
  const size_t bytes = (2 * row + query) * sizeof(float);
  sides.own = malloc(bytes);
  sides.out = malloc((sides.out_count + sides.lse_count) * sizeof(float));
  if (!sides.own || !sides.out) abort();
  place_rows(&sides, sides.own);
  sides.lse = sides.out + sides.out_count;
  step_times times = {0};
  int status = open_in_process(&sides) || open_in_daemon(&sides, target);
  if (!status && settings->shared) status = share_rows(&sides, bytes);
  if (!status) status = measure(&sides, &times);
  close_sides(&sides);
  qkv_samples_free(&times.engine);
  qkv_samples_free(&times.daemon);
  qkv_samples_free(&times.raw);
  qkv_samples_free(&times.grpc);
  return status;
}

static int run(void *settings, const qkv_option_list *arguments) {
  (void)arguments;
  const qkv_bench_settings *given = settings;
  qkv_bench_daemon daemon;
  char threads[32];
  snprintf(threads, sizeof threads, "%lld", (long long)given->threads);
  if (!qkv_bench_daemon_start(
          &daemon, given->program.target,
          (const char *const[]){"--threads", threads, given->shared ? "--allow-client-shm" : NULL, NULL}))
    return 1;
  const size_t rows = (size_t)(given->dim * (2 * given->kv_heads + given->q_heads));
  const size_t results = (size_t)((given->dim + 1) * given->q_heads);
  const bool tcp = strncmp(daemon.target, "unix:", 5) != 0;
  step_carriers carriers;
  int status = 1;
  if (!qkv_echo_start(&carriers.grpc, tcp, rows * sizeof(float), results * sizeof(float))) goto end;
  if (qkv_raw_start(&carriers.raw, tcp, rows * sizeof(float), results * sizeof(float))) {
    status = compare(given, daemon.target, &carriers);
    qkv_raw_stop(&carriers.raw);
  }
  qkv_echo_stop(&carriers.grpc);
end:
  qkv_bench_daemon_stop(&daemon);
  return status;
}

const qkv_command qkvi_bench_step = {.name = "step",
                                     .arguments = "",
                                     .summary = "a decode step through the daemon and in process",
                                     .options = options,
                                     .option_count = sizeof options / sizeof *options,
                                     .run = run};
