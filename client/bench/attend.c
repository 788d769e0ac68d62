// qkv-bench attend: attention over coded pages, in this process, compared with what limits it and what it replaces.
//
// In turn, repeat by repeat (unless --alone): the pages' bytes read and nothing else, attention on the codes, and
// attention on plain fp16 and fp32 rows. Medians of each, so that what else the machine does hits all of them.
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "client/bench/bench.h"
#include "client/bench/gpu.h"
#include "client/bench/plain.h"
#include "engine/kernel/kernel.h"

#define PLAIN_TOKENS_MAX 32768  // beyond, the time is that of so many tokens, times the rest: they fill no cache
#define ERROR_TOKENS_MAX 8192

static const qkv_option options[] = {
    {"tokens", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, tokens), "131072", 64, 16777216, "N",
     "tokens of a session"},
    {"sessions", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, sessions), "1", 1, 65536, "N",
     "sessions that one call attends"},
    {"dim", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, dim), "128", 8, 1024, "N",
     "width of a row, a multiple of 8"},
    {"value-dim", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, value_dim), "0", 0, 1024, "N",
     "the same of values; 0: that of keys"},
    {"kv-heads", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, kv_heads), "8", 1, 128, "N", "KV heads"},
    {"q-heads", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, q_heads), "32", 1, 1024, "N",
     "query heads, a multiple of the KV heads"},
    {"q-len", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, q_len), "1", 1, 4096, "N", "query tokens"},
    {"codec", QKV_OPTION_STRING, offsetof(qkv_bench_settings, codec), "embedded", 0, 0, "NAME",
     "a codec of the table (docs/codecs.md)"},
    {"bits-k", QKV_OPTION_REAL, offsetof(qkv_bench_settings, code_k), "4", 0, 8, "BITS",
     "code bits per coordinate of keys, a multiple of 0.125"},
    {"bits-v", QKV_OPTION_REAL, offsetof(qkv_bench_settings, code_v), "0", 0, 8, "BITS",
     "the same for values; 0: that of keys"},
    {"low-share", QKV_OPTION_REAL, offsetof(qkv_bench_settings, low_share), "0", 0, 1, "SHARE",
     "of all groups of 16 tokens, those that have been brought down to --low-bits"},
    {"low-bits", QKV_OPTION_REAL, offsetof(qkv_bench_settings, low_bits), "2", 0, 8, "BITS", "what they have"},
    {"frame", QKV_OPTION_STRING, offsetof(qkv_bench_settings, frame), "plain", 0, 0, "FRAME",
     "plain, attend or archive; the latter two of a model with RoPE"},
    {"rope-theta", QKV_OPTION_REAL, offsetof(qkv_bench_settings, rope_theta), "10000", 1, QKV_ROPE_THETA_MAX, "THETA",
     "base of RoPE, where the frame has one"},
    {"calibrated", QKV_OPTION_FLAG, offsetof(qkv_bench_settings, calibrated), NULL, 0, 0, NULL,
     "skewed rows and queries, and a code calibrated for them; with RoPE keys have means as SmolLM2's have"},
    {"anchor", QKV_OPTION_STRING, offsetof(qkv_bench_settings, anchor), "none", 0, 0, "KIND",
     "none, mean, group, chain or auto"},
    {"precision", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, precision), "0", 0, 3, "N",
     "arithmetic on codes, as in AttendOptions; 0: the default"},
    {"threads", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, threads), "1", 1, 256, "N", "threads"},
    {"order", QKV_OPTION_STRING, offsetof(qkv_bench_settings, order), "random", 0, 0, "ORDER",
     "random: pages that follow each other lie anywhere; linear: one after the other"},
    {"device", QKV_OPTION_STRING, offsetof(qkv_bench_settings, device), "cpu", 0, 0, "DEVICE",
     "what attends on the codes: cpu, or gpu, which has all pages then (docs/gpu.md)"},
    {"alone", QKV_OPTION_FLAG, offsetof(qkv_bench_settings, alone), NULL, 0, 0, NULL,
     "attention on the codes and nothing else, repeat after repeat"},
    {"huge-pages", QKV_OPTION_STRING, offsetof(qkv_bench_settings, huge_pages), "auto", 0, 0, "PAGES",
     "what codes lie on, as of qkvd: auto or off"},
    {"cpu-mask", QKV_OPTION_LIST, offsetof(qkv_bench_settings, cpu_mask), NULL, 0, 0, "LIST",
     "what to use of the processor, as of qkvd"},
    {"clock", QKV_OPTION_STRING, offsetof(qkv_bench_settings, clock), "wall", 0, 0, "CLOCK",
     "what is measured: wall time, or cpu, the time that the processor gave to the one thread"},
    {"repeats", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, repeats), "9", 1, 1000, "N",
     "repeats; medians are reported"},
    {"json", QKV_OPTION_FLAG, offsetof(qkv_bench_settings, program.json), NULL, 0, 0, NULL,
     "print one JSON object a line on standard output"},
    {"help", QKV_OPTION_FLAG, offsetof(qkv_bench_settings, program.help), NULL, 0, 0, NULL, "show this help"},
    {"version", QKV_OPTION_FLAG, offsetof(qkv_bench_settings, program.version), NULL, 0, 0, NULL, "show the version"},
};

typedef struct timings {
  qkv_samples raw, codes, fp16, fp32;  // seconds
  bool of_processor;
} timings;

static double now(bool of_processor) {
  struct timespec time;
  if (!of_processor) return qkv_bench_now();
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void add_time(const timings *t, qkv_samples *samples, double begin) {
  qkv_samples_add(samples, now(t->of_processor) - begin);
}

static void attend(qkv_pool *pool, const qkv_bench_pages *pages, timings *t) {
  const double begin = now(t->of_processor);
  qkv_attend_run(pool, pages->requests, pages->sessions);
  add_time(t, &t->codes, begin);
}

static void repeat(qkv_pool *pool, const qkv_bench_pages *pages, const qkv_bench_plain *fp16,
                   const qkv_bench_plain *fp32, timings *t) {
  double begin = now(t->of_processor);
  (void)qkv_bench_read(pool, pages);
  add_time(t, &t->raw, begin);
  attend(pool, pages, t);
  begin = now(t->of_processor);
  qkv_bench_plain_run(pool, fp16);
  add_time(t, &t->fp16, begin);
  begin = now(t->of_processor);
  qkv_bench_plain_run(pool, fp32);
  add_time(t, &t->fp32, begin);
}

static double median(qkv_samples *samples) {
  return qkv_samples_quantile(samples, 0.5);
}

static void report(const qkv_bench_settings *settings, const qkv_bench_pages *pages, timings *t,
                   double plain_factor) {
  const double seconds = median(&t->codes), bytes = (double)pages->bytes;
  const qkv_bench_error error = qkv_bench_measure_error(pages, ERROR_TOKENS_MAX);
  json_t *shape = json_pack(
      "{s:s, s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:f, s:f, s:f, s:I, s:b, s:s, s:I}", "bench", "attend",
      "codec", settings->codec, "kernels", qkv_kernels_get()->name, "tokens", (json_int_t)settings->tokens,
      "sessions", (json_int_t)settings->sessions, "dim", (json_int_t)pages->model.key_dim, "value_dim",
      (json_int_t)pages->model.value_dim, "kv_heads", (json_int_t)settings->kv_heads, "q_heads",
      (json_int_t)settings->q_heads, "q_len", (json_int_t)settings->q_len, "bits_k", settings->code_k, "bits_v",
      settings->code_v > 0 ? settings->code_v : settings->code_k, "low_share", settings->low_share, "threads",
      (json_int_t)settings->threads, "calibrated", settings->calibrated, "frame", settings->frame, "precision",
      (json_int_t)settings->precision);
  json_t *figures =
      json_pack("{s:f, s:I, s:f, s:f, s:f}", "us", 1e6 * seconds, "code_bytes", (json_int_t)pages->bytes, "gbps",
                1e-9 * bytes / seconds, "rel_err", error.arithmetic, "code_err", error.code);
  json_object_update(shape, figures);
  json_decref(figures);
  if (settings->attends_on != NULL) {
    figures = json_pack("{s:s, s:I}", "gpu", qkv_bench_gpu_name(settings->attends_on), "gpu_ranges",
                        (json_int_t)qkv_bench_gpu_attended(settings->attends_on));
    json_object_update(shape, figures);
    json_decref(figures);
  }
  if (!settings->alone) {
    const double raw = median(&t->raw);
    figures = json_pack("{s:f, s:f, s:f, s:f}", "raw_gbps", 1e-9 * bytes / raw, "fraction", raw / seconds, "fp16_us",
                        1e6 * plain_factor * median(&t->fp16), "fp32_us", 1e6 * plain_factor * median(&t->fp32));
    json_object_update(shape, figures);
    json_decref(figures);
  }
  qkv_bench_report(settings, shape);
}

static void clear(timings *t) {
  qkv_samples *all[] = {&t->raw, &t->codes, &t->fp16, &t->fp32};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) qkv_samples_clear(all[i]);
}

static void measure_alone(const qkv_bench_settings *settings, const qkv_bench_pages *pages, qkv_pool *pool) {
  timings t = {.of_processor = strcmp(settings->clock, "cpu") == 0};
  attend(pool, pages, &t);
  clear(&t);
  for (int64_t i = 0; i < settings->repeats; i++) attend(pool, pages, &t);
  report(settings, pages, &t, 1);
  qkv_samples_free(&t.codes);
}

static void measure(const qkv_bench_settings *settings, const qkv_bench_pages *pages, qkv_pool *pool) {
  const double tokens = (double)settings->tokens * (double)settings->sessions;
  const size_t plain_tokens = tokens < PLAIN_TOKENS_MAX ? (size_t)tokens : PLAIN_TOKENS_MAX;
  qkv_bench_plain fp16, fp32;
  timings t = {.of_processor = strcmp(settings->clock, "cpu") == 0};
  qkv_bench_plain_init(&fp16, pages, QKV_FP16, plain_tokens);
  qkv_bench_plain_init(&fp32, pages, QKV_FP32, plain_tokens);
  repeat(pool, pages, &fp16, &fp32, &t);
  clear(&t);
  for (int64_t i = 0; i < settings->repeats; i++) repeat(pool, pages, &fp16, &fp32, &t);
  report(settings, pages, &t, tokens / (double)plain_tokens);
  qkv_samples *all[] = {&t.raw, &t.codes, &t.fp16, &t.fp32};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) qkv_samples_free(all[i]);
  qkv_bench_plain_deinit(&fp16);
  qkv_bench_plain_deinit(&fp32);
}

static int run(void *values, const qkv_option_list *arguments) {
  (void)arguments;
  qkv_bench_settings *settings = values;
  qkv_bench_pages pages;
  qkv_pool *pool = NULL;
  qkv_error error = {0};
  int status = qkv_bench_take_mask(settings);
  if (strcmp(settings->huge_pages, "auto") != 0 && strcmp(settings->huge_pages, "off") != 0)
    return qkv_program_misused("--huge-pages is %s, known are auto and off", settings->huge_pages);
  if (status) return status;
  if (strcmp(settings->clock, "wall") != 0 && strcmp(settings->clock, "cpu") != 0)
    return qkv_program_misused("--clock is %s, known are wall and cpu", settings->clock);
  if (strcmp(settings->clock, "cpu") == 0 && (settings->threads != 1 || strcmp(settings->device, "cpu") != 0))
    return qkv_program_misused("--clock cpu is of one thread: --threads 1, --device cpu");
  const bool on_gpu = strcmp(settings->device, "gpu") == 0;
  if (!on_gpu && strcmp(settings->device, "cpu") != 0)
    return qkv_program_misused("--device is %s, known are cpu and gpu", settings->device);
  if (qkv_pool_create((size_t)settings->threads - 1, 1, &pool, &error) != QKV_OK) {
    return qkv_program_failed("%s", error.text);
  }
  if (on_gpu && qkv_bench_gpu_open(&settings->attends_on, &error) != QKV_OK) {
    qkv_pool_destroy(&pool);
    return qkv_program_failed("--device gpu: %s", error.text);
  }
  status = qkv_bench_pages_init(settings, &pages);
  if (!status) (settings->alone ? measure_alone : measure)(settings, &pages, pool);
  qkv_bench_pages_deinit(&pages);
  qkv_bench_gpu_close(&settings->attends_on);
  qkv_pool_destroy(&pool);
  return status;
}

const qkv_command qkvi_bench_attend = {
    .name = "attend",
    .arguments = "",
    .summary = "attention on codes, in process, compared with reading the same bytes",
    .options = options,
    .option_count = sizeof options / sizeof *options,
    .run = run};
