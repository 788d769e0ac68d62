// The command `calibrate`: texts in, a calibration file out.
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "client/common/file.h"
#include "client/common/interrupt.h"
#include "client/common/terminal.h"
#include "client/worker/calibrate.h"
#include "client/worker/text.h"
#include "client/worker/worker.h"

typedef struct calibrate_job {
  const qkvi_worker *worker;
  const qkvi_lm *lm;
  qkvi_calibrator *calibrator;
  int64_t window;  // its tokens
  int64_t left;    // that may still be learnt from
  qkv_progress progress;
  qkv_verdict verdict;
} calibrate_job;

// Windows one after the other.
static qkv_status learn_windows(calibrate_job *job, const int32_t *text, int64_t count, qkv_error *error) {
  for (int64_t begin = 0; begin < count && job->left > 0; begin += job->window) {
    if (qkv_interrupted()) return qkv_fail(error, QKV_CANCELLED, "interrupted");
    int64_t tokens = count - begin < job->window ? count - begin : job->window;
    if (tokens > job->left) tokens = job->left;
    QKV_TRY(qkvi_calibrator_add(job->calibrator, text + begin, tokens, error));
    job->left -= tokens;
    qkv_progress_add(&job->progress, (uint64_t)tokens);
  }
  return QKV_OK;
}

static qkv_status learn_text(calibrate_job *job, const char *path, qkv_error *error) {
  int32_t *text = NULL;
  int64_t count = 0;
  QKV_TRY(qkvi_text_tokens(job->lm, path, &text, &count, error));
  const qkv_status status = learn_windows(job, text, count, error);
  free(text);
  return status;
}

// For the progress bar: more than there are tokens, of most tokenizers.
static uint64_t total_bytes(const qkvi_worker *worker) {
  uint64_t total = 0;
  for (size_t i = 0; i < worker->texts.count; i++) {
    struct stat info;
    if (stat(worker->texts.items[i], &info) == 0 && S_ISREG(info.st_mode)) total += (uint64_t)info.st_size;
  }
  return worker->tokens > 0 && (uint64_t)worker->tokens < total ? (uint64_t)worker->tokens : total;
}

// The sections of the codec that is said, for the bits that are, or for all that it has.
static qkv_status read_wants(const qkvi_worker *worker, qkv_section_wants *wants, qkv_error *error) {
  if (worker->codec == NULL) return QKV_OK;
  char names[QKV_CODEC_NAMES_MAX];
  const qkv_codec *codec = qkv_codec_by_name(worker->codec);
  if (codec == NULL)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "--codec is %s, allowed are %s", worker->codec,
                    qkv_codec_names(names));
  if (worker->bits > 0 && !codec->bits_valid(worker->bits))
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "--bits is %g, allowed are %s", worker->bits, codec->bits_text);
  for (int bits = 1; bits <= QKV_DEPTH_MAX; bits++) {
    const qkv_policy policy = {.codec = codec, .bits_k = bits, .bits_v = bits};
    if (worker->bits <= 0 || bits == worker->bits) qkv_section_want(wants, &policy);
  }
  return QKV_OK;
}

static qkv_status learn(calibrate_job *job, const qkv_calibration **calibration, qkv_error *error) {
  const qkvi_worker *worker = job->worker;
  qkv_section_wants wants = {0};
  QKV_TRY(read_wants(worker, &wants, error));
  QKV_TRY(qkvi_calibrator_create(job->lm, job->window, &job->calibrator, error));
  qkvi_calibrator_want(job->calibrator, &wants);
  if (worker->untried) qkvi_calibrator_learn_all(job->calibrator);
  qkv_progress_start(&job->progress, "calibrating", total_bytes(worker));
  qkv_status status = QKV_OK;
  for (size_t i = 0; status == QKV_OK && i < worker->texts.count; i++) {
    status = learn_text(job, worker->texts.items[i], error);
  }
  qkv_progress_end(&job->progress);
  if (status == QKV_OK) status = qkvi_calibrator_finish(job->calibrator, &job->verdict, calibration, error);
  qkvi_calibrator_destroy(&job->calibrator);
  return status;
}

// ---- The command ----

static bool print(const calibrate_job *job, const qkv_calibration *calibration, size_t size) {
  const uint64_t tokens = qkv_calibration_tokens(calibration);
  const qkv_verdict *verdict = &job->verdict;
  if (job->worker->program.json) {
    return qkv_json_line(json_pack(
        "{s:s, s:s, s:I, s:I, s:I, s:i, s:i, s:f, s:f}", "output", job->worker->output, "model", job->lm->name,
        "version", (json_int_t)qkv_calibration_version(calibration), "tokens", (json_int_t)tokens, "bytes",
        (json_int_t)size, "parts", (int)verdict->parts, "parts_data_free", (int)verdict->dropped, "attention_error",
        verdict->error, "attention_error_data_free", verdict->data_free));
  }
  char held[QKV_HUMAN_MAX];
  printf("%s: calibration %08" PRIx32 " of %s, from %" PRIu64 " tokens, %s\n", job->worker->output,
         qkv_calibration_version(calibration), job->lm->name, tokens, qkv_human_bytes(size, held));
  if (verdict->parts == 0) {
    printf("not tried: no pages were held out\n");
  } else {
    printf("tried on held-out pages: attention error %.3g, data-free code %.3g; %" PRIu32 " of %" PRIu32
           " parts of heads are data-free\n",
           verdict->error, verdict->data_free, verdict->dropped, verdict->parts);
  }
  return fflush(stdout) == 0;
}

static int check(const qkvi_worker *worker) {
  if (worker->model == NULL) return qkv_program_misused("--model is missing: a model's directory or its .gguf file");
  if (worker->texts.count == 0) return qkv_program_misused("--text is missing: a file to learn from");
  if (worker->output == NULL) return qkv_program_misused("--output is missing: the calibration file to write");
  return QKV_EXIT_OK;
}

static qkv_status run(calibrate_job *job, bool *printed, qkv_error *error) {
  const qkv_calibration *calibration = NULL;
  size_t size;
  QKV_TRY(learn(job, &calibration, error));
  const void *bytes = qkv_calibration_bytes(calibration, &size);
  const qkv_status status = qkv_file_write(job->worker->output, bytes, size, error);
  if (status == QKV_OK) *printed = print(job, calibration, size);
  qkv_calibration_unref(&calibration);
  return status;
}

int qkvi_calibrate(void *values, const qkv_option_list *arguments) {
  (void)arguments;
  const qkvi_worker *worker = values;
  int exit_status = check(worker);
  if (exit_status != QKV_EXIT_OK) return exit_status;
  qkvi_lm *lm = NULL;
  qkv_error error = {0};
  if (qkvi_worker_load(worker, &lm, &error) != QKV_OK) return qkv_program_failed("%s", error.text);
  qkv_interrupt_catch();
  calibrate_job job = {.worker = worker,
                       .lm = lm,
                       .window = worker->length < lm->context ? worker->length : lm->context,
                       .left = worker->tokens > 0 ? worker->tokens : INT64_MAX};
  bool printed = false;
  if (run(&job, &printed, &error) != QKV_OK) {
    exit_status = qkv_program_failed("%s", error.text);
  } else if (!printed) {
    exit_status = qkv_program_failed("standard output cannot be written");
  }
  qkvi_lm_free(&lm);
  return exit_status;
}
