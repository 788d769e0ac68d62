// Times the flash attention of ggml or of ik_llama.cpp, whichever it is linked with, on one decode step: d = 128, 8
// KV heads, every head's rows one after the other (what they like best). Built and run by run.sh, outside the
// project's own build.
//
// usage: flash_attention TYPE TOKENS QUERY_HEADS_PER_KV_HEAD THREADS REPEATS; prints the median in microseconds.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ggml.h"
#if __has_include("ggml-cpu.h")
#include "ggml-cpu.h"
#define QUANTIZE(type, from, to, rows) ggml_quantize_chunk(type, from, to, 0, rows, DIM, NULL)
#else  // ik_llama.cpp
#define QUANTIZE(type, from, to, rows) ggml_quantize_chunk(type, from, to, 0, rows, DIM, NULL, NULL)
#endif

enum { DIM = 128, KV_HEADS = 8, MASK_ROWS = 64 };

static double now_us(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec * 1e6 + (double)now.tv_nsec * 1e-3;
}

static int by_size(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return x < y ? -1 : x > y;
}

// Nearly normal: four uniform numbers together.
static void fill(float *values, size_t count) {
  static uint64_t state = 88172645463325252u;
  for (size_t i = 0; i < count; i++) {
    float sum = 0;
    for (int j = 0; j < 4; j++) {
      state ^= state << 13, state ^= state >> 7, state ^= state << 17;
      sum += (float)(state >> 40) / (float)(1 << 24) - 0.5f;
    }
    values[i] = sum * 1.7f;
  }
}

static struct ggml_tensor *rows(struct ggml_context *context, enum ggml_type type, int64_t tokens) {
  struct ggml_tensor *tensor = ggml_new_tensor_3d(context, type, DIM, tokens, KV_HEADS);
  float *head = malloc((size_t)tokens * DIM * sizeof(float));
  if (head == NULL) abort();
  for (int64_t h = 0; h < KV_HEADS; h++) {
    fill(head, (size_t)tokens * DIM);
    char *out = (char *)tensor->data + (size_t)h * tensor->nb[2];
    if (type == GGML_TYPE_F16)
      ggml_fp32_to_fp16_row(head, (ggml_fp16_t *)out, tokens * DIM);
    else
      QUANTIZE(type, head, out, tokens);
  }
  free(head);
  return tensor;
}

int main(int argc, char **argv) {
  if (argc != 6) return fprintf(stderr, "usage: %s f16|q8_0|q4_0 TOKENS GROUP THREADS REPEATS\n", argv[0]), 2;
  const enum ggml_type type = !strcmp(argv[1], "f16")    ? GGML_TYPE_F16
                              : !strcmp(argv[1], "q8_0") ? GGML_TYPE_Q8_0
                                                         : GGML_TYPE_Q4_0;
  const int64_t tokens = atoll(argv[2]), heads = KV_HEADS * atoll(argv[3]);
  const int threads = (int)atoll(argv[4]), repeats = (int)atoll(argv[5]);
  double *times = calloc((size_t)repeats, sizeof *times);
  const size_t bytes = (size_t)tokens * (DIM * KV_HEADS * 4 + MASK_ROWS * 2) + ((size_t)256 << 20);
  struct ggml_context *context = ggml_init((struct ggml_init_params){.mem_size = bytes});
  if (times == NULL || context == NULL) return 1;
#if __has_include("ggml-cpu.h")
  ggml_cpu_init();
#endif
  struct ggml_tensor *q = ggml_new_tensor_3d(context, GGML_TYPE_F32, DIM, 1, heads);
  fill(q->data, (size_t)heads * DIM);
  struct ggml_tensor *k = rows(context, type, tokens), *v = rows(context, type, tokens);
  struct ggml_tensor *mask = ggml_new_tensor_2d(context, GGML_TYPE_F16, tokens, MASK_ROWS);
  memset(mask->data, 0, ggml_nbytes(mask));
  struct ggml_tensor *out = ggml_flash_attn_ext(context, q, k, v, mask, 0.08838835f, 0, 0);
  struct ggml_cgraph *graph = ggml_new_graph(context);
  ggml_build_forward_expand(graph, out);
  for (int i = -1; i < repeats; i++) {
    const double begin = now_us();
    if (ggml_graph_compute_with_ctx(context, graph, threads) != GGML_STATUS_SUCCESS) return 1;
    if (i >= 0) times[i] = now_us() - begin;
  }
  qsort(times, (size_t)repeats, sizeof *times, by_size);
  printf("%.0f\n", times[repeats / 2]);
  ggml_free(context);
  free(times);
}
