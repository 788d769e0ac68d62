// The command `generate`: a prompt in, its continuation out.
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/common/durability.h"
#include "client/common/interrupt.h"
#include "client/common/terminal.h"
#include "client/worker/generate.h"
#include "client/worker/remote.h"
#include "client/worker/text.h"
#include "client/worker/worker.h"

#define POSITIONS_MAX (1 << 20)

typedef struct generate_job {
  const qkvi_worker *worker;
  const qkvi_lm *lm;
  int durability;                      // as in qkv_session_options
  char session[QKVI_REMOTE_NAME_MAX];  // a name of our own, where none is given
  const int32_t *prompt;
  int64_t prompt_tokens;
  qkvi_remote *remote;
  qkvi_exact *exact;  // NULL without --compare
  qkvi_generation *generation;
  int64_t generated;  // tokens
  double prompt_us, decode_us;
  qkvi_quality quality;
  qkvi_samples attend_us;  // of the decode steps
  qkv_client_session_info info;
} generate_job;

static const char *unit(const generate_job *job) {
  return qkvi_tokenizer_unit(job->lm->tokenizer);
}

static bool print_token(const generate_job *job, int32_t token) {
  size_t bytes = 0;
  const uint8_t *text = qkvi_tokenizer_decode(job->lm->tokenizer, token, &bytes);
  if (!job->worker->program.json) return fwrite(text, 1, bytes, stdout) == bytes && fflush(stdout) == 0;
  json_t *characters = json_stringn((const char *)text, bytes);  // NULL: no UTF-8, as a part of a character
  if (characters == NULL) characters = json_string("\xef\xbf\xbd");
  return qkv_json_line(json_pack("{s:i, s:o}", unit(job), (int)token, "text", characters));
}

static qkv_status decode(generate_job *job, qkv_error *error) {
  while (job->generated < job->worker->tokens && !qkv_interrupted()) {
    const int32_t next = qkvi_generation_next(job->generation, &job->quality);
    if (qkvi_tokenizer_is_control(job->lm->tokenizer, next)) break;
    if (!print_token(job, next)) return qkv_fail(error, QKV_UNAVAILABLE, "standard output cannot be written");
    job->generated++;
    if (job->generated == job->worker->tokens) break;
    QKV_TRY(qkvi_generation_feed(job->generation, &next, 1, error));
  }
  return QKV_OK;
}

static qkv_status run(generate_job *job, qkv_error *error) {
  double begin_us = qkvi_now_us();
  QKV_TRY(qkvi_generation_feed(job->generation, job->prompt, job->prompt_tokens, error));
  double middle_us = qkvi_now_us();
  qkvi_remote_measure(job->remote, &job->attend_us);
  QKV_TRY(decode(job, error));
  job->prompt_us = middle_us - begin_us;
  job->decode_us = qkvi_now_us() - middle_us;
  return qkvi_remote_info(job->remote, &job->info, error);
}

static qkv_status open_and_run(generate_job *job, qkv_client *client, qkv_error *error) {
  const qkvi_worker *worker = job->worker;
  const qkvi_remote_options remote = {.session = worker->session != NULL ? worker->session : job->session,
                                      .codec = worker->codec,
                                      .codec_v = worker->codec_v,
                                      .bits_k = worker->bits_k > 0 ? worker->bits_k : worker->bits,
                                      .bits_v = worker->bits_v > 0 ? worker->bits_v : worker->bits,
                                      .recent_window = -1,
                                      .max_attention_error = worker->max_attention_error,
                                      .durability = job->durability};
  QKV_TRY(qkvi_remote_open(client, job->lm, &remote, &job->remote, error));
  int64_t positions_max = job->prompt_tokens + worker->tokens;
  if (worker->compare) job->exact = qkvi_exact_create(job->lm, positions_max);
  const qkvi_generation_options options = {.positions_max = positions_max,
                                           .temperature = worker->temperature,
                                           .seed = (uint64_t)worker->seed,
                                           .exact = job->exact};
  qkvi_kv *kv = qkvi_remote_kv(job->remote);
  job->generation = qkvi_generation_create(job->lm, kv, &options);
  qkv_status status = run(job, error);
  qkvi_generation_destroy(&job->generation);
  qkvi_exact_destroy(&job->exact);
  qkv_status closed = qkvi_remote_close(&job->remote, worker->keep, error);
  return status != QKV_OK ? status : closed;
}

// ---- what is printed at the end ----

static uint64_t held_bytes(const generate_job *job) {
  return job->info.bytes_coded + job->info.bytes_exact;
}

// A key with the name of the model's tokens in it.
static void set_of_unit(const generate_job *job, json_t *line, const char *before, const char *behind,
                        json_t *value) {
  char key[64];
  snprintf(key, sizeof key, "%s%s%s", before, unit(job), behind);
  json_object_set_new(line, key, value);
}

static bool print_summary_json(generate_job *job) {
  const qkv_client_session_info *info = &job->info;
  const qkvi_quality *quality = &job->quality;
  json_t *line =
      json_pack("{s:s, s:s, s:f, s:f, s:I, s:I, s:f, s:f, s:f}", "session", info->session, "model", info->model,
                "prompt_seconds", job->prompt_us * 1e-6, "decode_seconds", job->decode_us * 1e-6, "kv_bytes",
                (json_int_t)held_bytes(job), "kv_bytes_fp16", (json_int_t)info->bytes_fp16, "bits_per_coordinate",
                info->bits_per_coordinate, "attend_us_p50", qkvi_samples_percentile(&job->attend_us, 0.5),
                "attend_us_p99", qkvi_samples_percentile(&job->attend_us, 0.99));
  set_of_unit(job, line, "prompt_", "s", json_integer(job->prompt_tokens));
  set_of_unit(job, line, "generated_", "s", json_integer(job->generated));
  if (info->max_attention_error > 0) {
    json_object_set_new(line, "attention_error", json_real(info->attention_error));
    json_object_set_new(line, "contract_pages", json_integer((json_int_t)info->contract_pages));
    json_object_set_new(line, "contract_missed", json_integer((json_int_t)info->contract_missed));
  }
  if (quality->positions > 0) {
    double positions = (double)quality->positions;
    set_of_unit(job, line, "bits_per_", "", json_real(quality->bits / positions));
    set_of_unit(job, line, "bits_per_", "_exact", json_real(quality->bits_exact / positions));
    json_object_set_new(line, "kl_bits", json_real(quality->kl_bits / positions));
    json_object_set_new(line, "top1", json_real((double)quality->agreed / positions));
  }
  return qkv_json_figures(line);
}

static void add_row(qkv_table *table, const char *what, const char *daemon, const char *reference) {
  qkv_table_cell(table, "%s", what);
  qkv_table_cell(table, "%s", daemon);
  qkv_table_cell(table, "%s", reference);
}

static void print_table(generate_job *job) {
  const qkvi_quality *quality = &job->quality;
  double positions = (double)quality->positions;
  enum { CELL = 48 };
  char what[CELL], daemon[CELL], reference[CELL];
  qkv_table *table = qkv_table_create(3);
  add_row(table, "", "qkvd", "compared with");
  snprintf(daemon, CELL, "%.4f", quality->bits / positions);
  snprintf(reference, CELL, "%.4f exact fp32 cache", quality->bits_exact / positions);
  snprintf(what, CELL, "bits per %s, of its own text", unit(job));
  add_row(table, what, daemon, reference);
  snprintf(daemon, CELL, "%.6f bits", quality->kl_bits / positions);
  add_row(table, "KL divergence", daemon, "0 exact fp32 cache");
  qkv_human_bytes(held_bytes(job), daemon);
  char plain[QKV_HUMAN_MAX];
  snprintf(reference, CELL, "%s in fp16", qkv_human_bytes(job->info.bytes_fp16, plain));
  add_row(table, "KV held", daemon, reference);
  snprintf(daemon, CELL, "%.0f us", qkvi_samples_percentile(&job->attend_us, 0.5));
  snprintf(reference, CELL, "%zu decode steps of one layer", job->attend_us.count);
  add_row(table, "attend p50", daemon, reference);
  snprintf(daemon, CELL, "%.0f us", qkvi_samples_percentile(&job->attend_us, 0.99));
  add_row(table, "attend p99", daemon, "");
  fprintf(stderr, "\n\n");
  qkv_table_print(table, stderr);
  qkv_table_destroy(&table);
}

static int finish(generate_job *job) {
  const qkvi_worker *worker = job->worker;
  if (worker->program.json && !print_summary_json(job)) {
    return qkv_program_failed("standard output cannot be written");
  }
  if (!worker->program.json && job->quality.positions > 0) {
    print_table(job);
  } else if (!worker->program.json && isatty(STDOUT_FILENO)) {
    putchar('\n');
  }
  if (qkv_interrupted()) return qkv_program_failed("interrupted");
  return QKV_EXIT_OK;
}

static int check(const qkvi_worker *worker) {
  int durability;
  qkv_error error = {0};
  if (qkvi_durability_parse(worker->durability, &durability, &error) != QKV_OK)
    return qkv_program_misused("%s", error.text);
  if (worker->model == NULL) return qkv_program_misused("--model is missing: a model's directory or its .gguf file");
  if (worker->prompt == NULL) return qkv_program_misused("--prompt is missing: a file to continue");
  return QKV_EXIT_OK;
}

static int generate(const qkvi_worker *worker, const qkvi_lm *lm, qkv_client *client, const int32_t *prompt,
                    int64_t prompt_tokens) {
  generate_job job = {.worker = worker, .lm = lm, .prompt = prompt, .prompt_tokens = prompt_tokens};
  if (prompt_tokens < 1 || prompt_tokens > POSITIONS_MAX - worker->tokens) {
    return qkv_program_failed("%s has %" PRId64 " %ss, allowed are 1 to %" PRId64, worker->prompt, prompt_tokens,
                              unit(&job), POSITIONS_MAX - worker->tokens);
  }
  if (prompt_tokens + worker->tokens > lm->context) {
    fprintf(stderr, "qkv-worker: the model was trained on contexts of %" PRId64 " %ss; beyond them its text decays\n",
            lm->context, unit(&job));
  }
  qkvi_remote_name("qkv-worker", job.session);
  qkv_error error = {0};
  (void)qkvi_durability_parse(worker->durability, &job.durability, NULL);  // checked before
  qkv_status status = open_and_run(&job, client, &error);
  int exit_status = status == QKV_OK ? finish(&job) : qkv_program_failed("%s", error.text);
  qkvi_samples_clear(&job.attend_us);
  return exit_status;
}

// The prompt as the model's tokens, free()d by the caller.
static qkv_status read_prompt(const qkvi_worker *worker, const qkvi_lm *lm, int32_t **tokens, int64_t *count,
                              qkv_error *error) {
  uint8_t *text = NULL, *message = NULL;
  int64_t bytes = 0;
  QKV_TRY(qkvi_text_read(worker->prompt, &text, &bytes, error));
  qkv_status status = QKV_OK;
  if (worker->chat) {
    message = text;
    status = qkvi_tokenizer_chat(lm->tokenizer, message, bytes, &text, &bytes, error);
  }
  if (status == QKV_OK) qkvi_tokenizer_encode(lm->tokenizer, text, bytes, worker->chat, tokens, count);
  free(text);
  free(message);
  return status;
}

int qkvi_generate(void *values, const qkv_option_list *arguments) {
  (void)arguments;
  const qkvi_worker *worker = values;
  int exit_status = check(worker);
  if (exit_status != QKV_EXIT_OK) return exit_status;
  int32_t *prompt = NULL;
  int64_t prompt_tokens = 0;
  qkvi_lm *lm = NULL;
  qkv_client *client = NULL;
  qkv_error error = {0};
  if (access(worker->prompt, F_OK) != 0) return qkv_program_failed("%s: %s", worker->prompt, strerror(errno));
  if (qkvi_worker_setup(worker, &lm, &client, &error) != QKV_OK ||
      read_prompt(worker, lm, &prompt, &prompt_tokens, &error) != QKV_OK) {
    exit_status = qkv_program_failed("%s", error.text);
  } else {
    exit_status = generate(worker, lm, client, prompt, prompt_tokens);
  }
  qkvi_worker_teardown(&lm, &client);
  free(prompt);
  return exit_status;
}
