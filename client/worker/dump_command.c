// The command `dump`: a text in, the keys, values and queries of its tokens out, as `qkv-bench quality --dump` and
// `qkvctl calibrate --from` take them (client/format/dump.h).
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "client/common/terminal.h"
#include "client/format/safetensors.h"
#include "client/worker/exact.h"
#include "client/worker/forward.h"
#include "client/worker/text.h"
#include "client/worker/worker.h"

enum { BATCH = 256, KINDS = 3, NAME_SIZE = 32 };

// A cache whose rows are written as they come.
typedef struct dumped_kv {
  qkvi_kv kv;
  qkvi_exact *exact;
  qkv_safetensors_writer *writer;
  size_t bytes[KINDS];  // of a token's keys, values and queries
} dumped_kv;

static qkv_status step(qkvi_kv *kv, const qkvi_kv_rows *rows, float *out, qkv_error *error) {
  const dumped_kv *cache = (dumped_kv *)kv;
  const float *const data[KINDS] = {rows->k, rows->v, rows->q};
  for (size_t kind = 0; kind < KINDS; kind++) {
    QKV_TRY(qkv_safetensors_write(cache->writer, (size_t)rows->layer * KINDS + kind, data[kind],
                                  (size_t)rows->tokens * cache->bytes[kind], error));
  }
  qkvi_kv *exact = qkvi_exact_kv(cache->exact);
  return exact->step(exact, rows, out, error);
}

static qkv_status create(const qkvi_worker *worker, const qkvi_lm *lm, int64_t tokens, dumped_kv *cache,
                         qkv_error *error) {
  static const char letters[KINDS] = {'k', 'v', 'q'};
  const int64_t heads[KINDS] = {lm->kv_heads, lm->kv_heads, lm->q_heads};
  const size_t count = (size_t)lm->layers * KINDS;
  qkv_safetensors_tensor *tensors = calloc(count, sizeof *tensors);
  char(*names)[NAME_SIZE] = calloc(count, sizeof *names);
  if (tensors == NULL || names == NULL) abort();
  for (size_t i = 0; i < count; i++) {
    (void)snprintf(names[i], NAME_SIZE, "layers.%zu.%c", i / KINDS, letters[i % KINDS]);
    tensors[i] = (qkv_safetensors_tensor){
        .name = names[i], .dtype = QKV_FP32, .rank = 3, .dims = {tokens, heads[i % KINDS], lm->head_dim}};
  }
  for (size_t kind = 0; kind < KINDS; kind++)
    cache->bytes[kind] = (size_t)(heads[kind] * lm->head_dim) * sizeof(float);
  const qkv_safetensors_entry metadata[] = {
      {"model", lm->name}, {"first_position", "0"}, {"layout", "tokens_first"}, {"rope", "after"}};
  const qkv_status status = qkv_safetensors_writer_create(worker->output, tensors, count, metadata,
                                                          sizeof metadata / sizeof *metadata, &cache->writer, error);
  free(names);
  free(tensors);
  return status;
}

static qkv_status write_rows(const qkvi_worker *worker, const qkvi_lm *lm, const int32_t *text, int64_t tokens,
                             qkv_error *error) {
  dumped_kv cache = {.kv = {.step = step}};
  QKV_TRY(create(worker, lm, tokens, &cache, error));
  cache.exact = qkvi_exact_create(lm, tokens);
  qkvi_forward *forward = qkvi_forward_create(lm, BATCH, tokens);
  qkv_status status = QKV_OK;
  for (int64_t done = 0; status == QKV_OK && done < tokens; done += BATCH) {
    const int64_t batch = tokens - done < BATCH ? tokens - done : BATCH;
    status = qkvi_forward_run(forward, text + done, batch, done, &cache.kv, 0, NULL, error);
  }
  if (status == QKV_OK) status = qkv_safetensors_writer_finish(&cache.writer, error);
  qkv_safetensors_writer_destroy(&cache.writer);
  qkvi_forward_destroy(&forward);
  qkvi_exact_destroy(&cache.exact);
  return status;
}

static qkv_status dump(const qkvi_worker *worker, const qkvi_lm *lm, int64_t *tokens, qkv_error *error) {
  int32_t *text = NULL;
  int64_t count = 0;
  const char *path = worker->texts.items[0];
  QKV_TRY(qkvi_text_tokens(lm, path, &text, &count, error));
  *tokens = worker->length < lm->context ? worker->length : lm->context;
  if (*tokens > count) *tokens = count;
  const qkv_status status = *tokens > 0 ? write_rows(worker, lm, text, *tokens, error)
                                        : qkv_fail(error, QKV_INVALID_ARGUMENT, "%s is empty", path);
  free(text);
  return status;
}

static int check(const qkvi_worker *worker) {
  if (worker->model == NULL) return qkv_program_misused("--model is missing: a model's directory or its .gguf file");
  if (worker->texts.count != 1)
    return qkv_program_misused("--text is there %zu times, one file is needed", worker->texts.count);
  if (worker->output == NULL) return qkv_program_misused("--output is missing: the .safetensors file to write");
  return QKV_EXIT_OK;
}

static bool print(const qkvi_worker *worker, const qkvi_lm *lm, int64_t tokens) {
  if (worker->program.json) {
    return qkv_json_line(json_pack("{s:s, s:s, s:I, s:I}", "output", worker->output, "model", lm->name, "layers",
                                   (json_int_t)lm->layers, "tokens", (json_int_t)tokens));
  }
  printf("%s: keys, values and queries of %" PRId64 " tokens in %" PRId64 " layers of %s\n", worker->output, tokens,
         lm->layers, lm->name);
  return fflush(stdout) == 0;
}

int qkvi_dump(void *values, const qkv_option_list *arguments) {
  (void)arguments;
  const qkvi_worker *worker = values;
  int exit_status = check(worker);
  if (exit_status != QKV_EXIT_OK) return exit_status;
  qkvi_lm *lm = NULL;
  int64_t tokens = 0;
  qkv_error error = {0};
  if (qkvi_worker_load(worker, &lm, &error) != QKV_OK) return qkv_program_failed("%s", error.text);
  if (dump(worker, lm, &tokens, &error) != QKV_OK) {
    exit_status = qkv_program_failed("%s", error.text);
  } else if (!print(worker, lm, tokens)) {
    exit_status = qkv_program_failed("standard output cannot be written");
  }
  qkvi_lm_free(&lm);
  return exit_status;
}
