#include "client/bench/bench.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "client/common/terminal.h"
#include "engine/base/cpu.h"
#include "engine/base/tensor.h"
#include "engine/kernel/kernel.h"

void qkv_samples_add(qkv_samples *samples, double value) {
  if (samples->count == samples->capacity) {
    samples->capacity = samples->capacity ? 2 * samples->capacity : 256;
    samples->values = realloc(samples->values, samples->capacity * sizeof *samples->values);
    if (!samples->values) abort();
  }
  samples->values[samples->count++] = value;
}

void qkv_samples_clear(qkv_samples *samples) {
  samples->count = 0;
}

void qkv_samples_free(qkv_samples *samples) {
  free(samples->values);
  *samples = (qkv_samples){0};
}

static int compare_doubles(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

double qkv_samples_quantile(qkv_samples *samples, double p) {
  assert(samples->count > 0);
  qsort(samples->values, samples->count, sizeof *samples->values, compare_doubles);
  return samples->values[(size_t)(p * (double)(samples->count - 1) + 0.5)];
}

double qkv_bench_now(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

// splitmix64: one multiply-xor chain a number, good enough for data that must not compress.
static uint64_t next_random(uint64_t *state) {
  uint64_t z = *state += 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

void qkv_bench_floats(float *out, size_t count, uint64_t seed) {
  for (size_t i = 0; i < count; i++) out[i] = (float)((double)(next_random(&seed) >> 40) * 0x1p-22 - 2.0);
}

void *qkv_bench_rows(size_t bytes, uint64_t seed) {
  size_t count = bytes / 2;
  float *values = malloc(count * sizeof *values);
  void *rows = malloc(bytes);
  if (!values || !rows) abort();
  qkv_bench_floats(values, count, seed);
  qkv_from_float(QKV_FP16, values, rows, count);
  free(values);
  return rows;
}

void qkv_bench_report(const qkv_bench_settings *settings, json_t *result) {
  if (settings->program.json) {
    qkv_json_figures(result);
    return;
  }
  const char *key;
  json_t *value;
  json_object_foreach(result, key, value) {
    if (json_is_string(value)) printf("%-16s %s\n", key, json_string_value(value));
    if (json_is_number(value)) printf("%-16s %.6g\n", key, json_number_value(value));
  }
  json_decref(result);
}

qkv_client *qkv_bench_connect(const qkv_bench_settings *settings, const char *target) {
  qkv_client *client = NULL;
  qkv_call_error error = {0};
  qkv_client_options options = {QKV_PROGRAM_CONNECTION(settings->program),
                                .timeout_ms = settings->program.timeout_ms};
  if (qkv_client_connect(target, &options, &client, &error) != 0) qkv_bench_failed("connect", &error);
  return client;
}

int qkv_bench_failed(const char *what, const qkv_call_error *error) {
  return qkv_program_failed("%s: %s", what, error->text);
}

int qkv_bench_take_mask(const qkv_bench_settings *settings) {
  const qkv_option_list *names = &settings->cpu_mask;
  uint32_t all = names->count == 0 ? UINT32_MAX : 0, flags;
  for (size_t i = 0; i < names->count; i++) {
    if (qkv_cpu_parse(names->items[i], &flags) != QKV_OK) {
      return qkv_program_failed(
          "--cpu-mask has %s, allowed are none and lists of avx2, fma, f16c, avx512, "
          "avx512-vnni, avx512-vbmi, neon, neon-dotprod and amx-int8",
          names->items[i]);
    }
    all |= flags;
  }
  qkv_kernels_setup(all);
  return 0;
}
