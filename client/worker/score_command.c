// The command `score`: texts in, one line of figures out.
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/common/interrupt.h"
#include "client/common/terminal.h"
#include "client/worker/score.h"
#include "client/worker/text.h"
#include "client/worker/worker.h"

// The scoring of all texts, and what it has given so far.
typedef struct score_job {
  const qkvi_worker *worker;
  const qkvi_lm *lm;
  qkvi_score_options options;
  qkvi_scorer *scorer;
  qkvi_quality *qualities;  // of each text
  qkvi_quality total;
  double windows, kl, kl_squared;  // sums over windows of their mean KL
  qkv_progress progress;
} score_job;

static const char *unit(const score_job *job) {
  return qkvi_tokenizer_unit(job->lm->tokenizer);
}

static void add_window(score_job *job, const qkvi_quality *before, const qkvi_quality *after) {
  const double kl = (after->kl_bits - before->kl_bits) / (double)(after->positions - before->positions);
  job->windows++;
  job->kl += kl;
  job->kl_squared += kl * kl;
}

// Of the mean KL, from how windows differ; NAN of one alone.
static double standard_error(const score_job *job) {
  const double mean = job->kl / job->windows;
  return job->windows < 2 ? NAN : sqrt(fmax(0, job->kl_squared / job->windows - mean * mean) / (job->windows - 1));
}

static qkv_status score_windows(score_job *job, const char *path, const int32_t *text, int64_t tokens,
                                qkvi_quality *quality, qkv_error *error) {
  const qkvi_score_options *options = &job->options;
  if (tokens <= options->length) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s has %" PRId64 " %ss, a window needs %" PRId64, path, tokens,
                    unit(job), options->length + 1);
  }
  for (int64_t i = 0; i < options->windows; i++) {
    if (qkv_interrupted()) return qkv_fail(error, QKV_CANCELLED, "interrupted");
    int64_t begin = qkvi_text_window(tokens, options->length, options->windows, i);
    const qkvi_quality before = *quality;
    QKV_TRY(qkvi_score_window(job->scorer, text + begin, quality, error));
    add_window(job, &before, quality);
    qkv_progress_add(&job->progress, (uint64_t)options->length);
  }
  return QKV_OK;
}

static qkv_status score_text(score_job *job, const char *path, qkvi_quality *quality, qkv_error *error) {
  int32_t *text = NULL;
  int64_t tokens = 0;
  QKV_TRY(qkvi_text_tokens(job->lm, path, &text, &tokens, error));
  qkv_status status = score_windows(job, path, text, tokens, quality, error);
  free(text);
  qkvi_quality_sum(&job->total, quality);
  return status;
}

static qkv_status score_texts(score_job *job, qkv_error *error) {
  const qkv_option_list *texts = &job->worker->texts;
  const uint64_t tokens = texts->count * (uint64_t)(job->options.windows * job->options.length);
  qkv_progress_start(&job->progress, "scoring", tokens);
  qkv_status status = QKV_OK;
  for (size_t i = 0; status == QKV_OK && i < texts->count; i++) {
    status = score_text(job, texts->items[i], &job->qualities[i], error);
  }
  qkv_progress_end(&job->progress);
  return status;
}

static double mean(double sum, const qkvi_quality *quality) {
  return sum / (double)quality->positions;
}

// The purposes that decide the frame of keys.
enum { PURPOSE_ATTEND = 1, PURPOSE_FETCH = 2 };

static const char *frame_name(int purpose) {
  return purpose == PURPOSE_FETCH ? "archive" : "attend";
}

static json_t *quality_json(const score_job *job, const qkvi_quality *quality) {
  char bits[32], bits_exact[32];
  snprintf(bits, sizeof bits, "bits_per_%s", unit(job));
  snprintf(bits_exact, sizeof bits_exact, "bits_per_%s_exact", unit(job));
  return json_pack("{s:f, s:f, s:f, s:f}", bits, mean(quality->bits, quality), bits_exact,
                   mean(quality->bits_exact, quality), "kl_bits", mean(quality->kl_bits, quality), "top1",
                   mean((double)quality->agreed, quality));
}

static json_t *demotion_json(const qkvi_score_options *options) {
  return json_pack("{s:I, s:f, s:b}", "after", (json_int_t)options->demote_after, "bits", options->demote_bits,
                   "even", (int)options->demote_even);
}

static bool print_json(const score_job *job) {
  const qkv_option_list *paths = &job->worker->texts;
  const qkv_client_session_info session = qkvi_scorer_session(job->scorer);
  qkvi_samples *attend_us = qkvi_scorer_attend_us(job->scorer);
  json_t *texts = json_array();
  for (size_t i = 0; i < paths->count; i++) {
    json_t *text = quality_json(job, &job->qualities[i]);
    json_object_set_new(text, "text", json_string(paths->items[i]));
    json_array_append_new(texts, text);
  }
  json_t *line = quality_json(job, &job->total);
  const qkvi_score_errors errors = qkvi_scorer_errors(job->scorer);
  json_t *rest = json_pack(
      "{s:f, s:f, s:f, s:I, s:I, s:f, s:f, s:s, s:I, s:I, s:I, s:f, s:f, s:f, s:f, s:I, s:I, s:I, s:s, s:o}",
      "bits_per_coordinate", session.bits_per_coordinate, "max_attention_error", session.max_attention_error,
      "attention_error", session.attention_error, "contract_pages", (json_int_t)session.contract_pages,
      "contract_missed", (json_int_t)session.contract_missed, "rel_mse_k", errors.rel_mse_k, "rel_mse_v",
      errors.rel_mse_v, "frame", frame_name(session.purpose), "kv_bytes",
      (json_int_t)session.bytes_coded + (json_int_t)session.bytes_exact, "kv_bytes_overhead",
      (json_int_t)session.bytes_overhead, "kv_bytes_fp16", (json_int_t)session.bytes_fp16, "attend_us_p50",
      qkvi_samples_percentile(attend_us, 0.5), "attend_us_p99", qkvi_samples_percentile(attend_us, 0.99), "bits_k",
      session.bits_k, "bits_v", session.bits_v, "windows", (json_int_t)job->options.windows, "prefill",
      (json_int_t)job->options.prefill, "length", (json_int_t)job->options.length, "model", session.model, "texts",
      texts);
  json_object_update(line, rest);
  json_decref(rest);
  const double kl_error = standard_error(job);
  json_object_set_new(line, "kl_bits_error", isnan(kl_error) ? json_null() : json_real(kl_error));
  if (job->options.demote_bits > 0) json_object_set_new(line, "demoted", demotion_json(&job->options));
  return qkv_json_figures(line);
}

static void add_row(qkv_table *table, const char *name, const qkvi_quality *quality) {
  qkv_table_cell(table, "%s", name);
  qkv_table_cell(table, "%.5f", mean(quality->bits, quality));
  qkv_table_cell(table, "%.5f", mean(quality->bits_exact, quality));
  qkv_table_cell(table, "%.6f", mean(quality->kl_bits, quality));
  qkv_table_cell(table, "%.4f", mean((double)quality->agreed, quality));
}

static bool print_text(const score_job *job) {
  const qkv_option_list *paths = &job->worker->texts;
  const qkv_client_session_info session = qkvi_scorer_session(job->scorer);
  qkvi_samples *attend_us = qkvi_scorer_attend_us(job->scorer);
  qkv_table *table = qkv_table_create(5);
  qkv_table_cell(table, "text");
  qkv_table_cell(table, "bits/%s", unit(job));
  qkv_table_cell(table, "exact");
  qkv_table_cell(table, "KL bits");
  qkv_table_cell(table, "top-1");
  for (size_t i = 0; i < paths->count; i++) add_row(table, paths->items[i], &job->qualities[i]);
  if (paths->count > 1) add_row(table, "all", &job->total);
  qkv_table_print(table, stdout);
  qkv_table_destroy(&table);
  char held[QKV_HUMAN_MAX], plain[QKV_HUMAN_MAX];
  const qkvi_score_errors errors = qkvi_scorer_errors(job->scorer);
  printf(
      "\n%g/%g bits for keys/values, %s frame, %.3f bits per coordinate all in; a window's prefix takes %s, in "
      "fp16 %s\n",
      session.bits_k, session.bits_v, frame_name(session.purpose), session.bits_per_coordinate,
      qkv_human_bytes(session.bytes_coded + session.bytes_exact, held), qkv_human_bytes(session.bytes_fp16, plain));
  if (job->options.demote_bits > 0) {
    printf("demoted to %g bits %s after %" PRId64 " positions behind the prefill\n", job->options.demote_bits,
           job->options.demote_even ? "for all" : "on average", job->options.demote_after);
  }
  if (session.max_attention_error > 0) {
    printf("attention error %.3g asked, %.3g on %" PRIu64 " pages, %" PRIu64 " of them missed it\n",
           session.max_attention_error, session.attention_error, session.contract_pages, session.contract_missed);
  }
  printf("relative squared error of rows: keys %.5f, values %.5f\n", errors.rel_mse_k, errors.rel_mse_v);
  int64_t queries = job->options.length - job->options.prefill;
  if (queries > QKVI_SCORE_BATCH) queries = QKVI_SCORE_BATCH;
  printf("attend, up to %" PRId64 " queries over %" PRId64 " positions in one call: p50 %.0f us, p99 %.0f us\n",
         queries, job->options.prefill, qkvi_samples_percentile(attend_us, 0.5),
         qkvi_samples_percentile(attend_us, 0.99));
  return fflush(stdout) == 0;
}

static int check(const qkvi_worker *worker) {
  if (worker->model == NULL) return qkv_program_misused("--model is missing: a model's directory or its .gguf file");
  if (worker->texts.count == 0) return qkv_program_misused("--text is missing: a file to score");
  if (worker->prefill >= worker->length) {
    return qkv_program_misused("--prefill is %" PRId64 ", it must be below --length, %" PRId64, worker->prefill,
                               worker->length);
  }
  if (worker->demote_after >= worker->length - worker->prefill) {
    return qkv_program_misused("--demote-after is %" PRId64 ", it must be below --length - --prefill, %" PRId64,
                               worker->demote_after, worker->length - worker->prefill);
  }
  if (worker->demote_even && worker->demote_bits == 0) {
    return qkv_program_misused("--demote-even needs --demote-bits BITS");
  }
  if (strcmp(worker->frame, "attend") != 0 && strcmp(worker->frame, "archive") != 0) {
    return qkv_program_misused("--frame is %s, known are attend and archive", worker->frame);
  }
  return QKV_EXIT_OK;
}

// The calibration's bytes, which the caller frees; NULL where none is asked for.
static qkv_status read_calibration(const qkvi_worker *worker, qkvi_score_options *options, uint8_t **bytes,
                                   qkv_error *error) {
  int64_t size = 0;
  *bytes = NULL;
  if (worker->calibration == NULL) return QKV_OK;
  QKV_TRY(qkvi_text_read(worker->calibration, bytes, &size, error));
  options->calibration = *bytes;
  options->calibration_bytes = (size_t)size;
  // Nothing at all would be taken for no calibration.
  return size > 0 ? QKV_OK : qkv_fail(error, QKV_INVALID_ARGUMENT, "%s is empty", worker->calibration);
}

int qkvi_score(void *values, const qkv_option_list *arguments) {
  (void)arguments;
  const qkvi_worker *worker = values;
  int exit_status = check(worker);
  if (exit_status != QKV_EXIT_OK) return exit_status;
  qkvi_lm *lm = NULL;
  qkv_client *client = NULL;
  qkv_error error = {0};
  if (qkvi_worker_setup(worker, &lm, &client, &error) != QKV_OK) return qkv_program_failed("%s", error.text);
  score_job job = {
      .worker = worker,
      .lm = lm,
      .options = {.windows = worker->windows,
                  .prefill = worker->prefill,
                  .length = worker->length,
                  .codec = worker->codec,
                  .codec_v = worker->codec_v,
                  .bits_k = worker->bits_k > 0 ? worker->bits_k : worker->bits,
                  .bits_v = worker->bits_v > 0 ? worker->bits_v : worker->bits,
                  .max_attention_error = worker->max_attention_error,
                  .anchor = worker->anchor,
                  .demote_after = worker->demote_after,
                  .demote_bits = worker->demote_bits,
                  .demote_even = worker->demote_even,
                  .purpose = strcmp(worker->frame, "archive") == 0 ? PURPOSE_FETCH : PURPOSE_ATTEND},
      .qualities = calloc(worker->texts.count, sizeof(qkvi_quality)),
  };
  if (job.qualities == NULL) abort();
  uint8_t *calibration = NULL;
  qkv_status status = read_calibration(worker, &job.options, &calibration, &error);
  job.scorer = qkvi_scorer_create(client, lm, &job.options);
  if (status == QKV_OK) status = score_texts(&job, &error);
  if (status != QKV_OK) {
    exit_status = qkv_program_failed("%s", error.text);
  } else if (!(worker->program.json ? print_json(&job) : print_text(&job))) {
    exit_status = qkv_program_failed("standard output cannot be written");
  }
  qkvi_scorer_destroy(&job.scorer);
  free(job.qualities);
  free(calibration);
  qkvi_worker_teardown(&lm, &client);
  return exit_status;
}
