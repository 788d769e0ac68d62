// qkv-bench quality: what coding keys and values costs a model, for many ways to code them, in process.
//
// Windows of text run through the model once exactly and then once for each way with the coded rows of their first
// part (probe.h). Nothing is simulated: rows go into page images and come out of them.
#include "client/bench/quality.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "client/bench/dump.h"
#include "client/bench/probe.h"
#include "client/common/terminal.h"
#include "client/worker/calibrate.h"
#include "client/worker/forward.h"
#include "client/worker/text.h"

static const qkv_option options[] = {
    {"model", QKV_OPTION_STRING, offsetof(qkv_bench_settings, model), NULL, 0, 0, "PATH",
     "directory with config.json and model.safetensors of a byte-level model, or a .gguf file of the Llama family"},
    {"threads", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, threads), "0", 0, 1024, "N",
     "of the model's own arithmetic; 0: one for each processor"},
    {"text", QKV_OPTION_LIST, offsetof(qkv_bench_settings, texts), NULL, 0, 0, "FILE",
     "text to measure on; may be given several times, the figures are then means over all windows"},
    {"calibration", QKV_OPTION_STRING, offsetof(qkv_bench_settings, calibration), NULL, 0, 0, "FILE",
     "calibration of the model, made by qkv-worker calibrate; without it only data-free codes are measured, but with "
     "--codec, which then learns one from the file calibration.txt next to the model, where the codec uses any"},
    {"windows", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, windows), "16", 1, 1 << 20, "N",
     "windows of each text, evenly spread"},
    {"prefill", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, prefill), "768", 1, 1 << 20, "TOKENS",
     "of a window whose keys and values are coded"},
    {"length", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, length), "1024", 2, 1 << 20, "TOKENS",
     "of a window; those after the prefill are scored"},
    {"setting", QKV_OPTION_LIST, offsetof(qkv_bench_settings, ways), NULL, 0, 0, "WAY",
     "a way to code, FRAME:K[/V][:ANCHOR[:LOW_RANK[/RANK]]][@BITS], such as plain:4, archive:2/1.5:auto or "
     "attend:4@1.5, whose tokens are brought to 1.5 bits by attention; or CODEC[,NAME=VALUE][/CODEC_V[,NAME=VALUE]]:"
     "K[/V], such as kivi,q_group_size=64:4 or turboquant/kivi:4/2; may be given several times. Without any, a list "
     "of them"},
    {"codec", QKV_OPTION_STRING, offsetof(qkv_bench_settings, codec), NULL, 0, 0, "NAME",
     "a codec, with parameters and a codec of values as in --setting, whose figures alone are shown; or all, for a "
     "table of all of them"},
    {"bits", QKV_OPTION_REAL, offsetof(qkv_bench_settings, code_bits), "0", 0, 8, "BITS",
     "code bits per coordinate of the codec, of all codecs where they have them; 0: 4, or where a codec has no 4 "
     "bits 8 "
     "or 2, and all depths of all codecs"},
    {"bits-k", QKV_OPTION_REAL, offsetof(qkv_bench_settings, code_k), "0", 0, 8, "BITS",
     "code bits per coordinate of keys, a multiple of 0.125; with those below, one more way to code"},
    {"bits-v", QKV_OPTION_REAL, offsetof(qkv_bench_settings, code_v), "0", 0, 8, "BITS",
     "the same for values; 0: that of keys"},
    {"frame", QKV_OPTION_STRING, offsetof(qkv_bench_settings, frame), NULL, 0, 0, "FRAME",
     "plain (data-free, as attended), attend or archive; attend with a calibration, else plain"},
    {"anchor", QKV_OPTION_STRING, offsetof(qkv_bench_settings, anchor), NULL, 0, 0, "KIND",
     "none, mean, group, chain or auto; none when not given"},
    {"dump", QKV_OPTION_STRING, offsetof(qkv_bench_settings, dump), NULL, 0, 0, "FILE",
     "instead of model and text: keys and values of any model, layers.N.k and layers.N.v as qkvctl fetch writes "
     "them, "
     "and layers.N.q, its queries, for the error of attention"},
    {"rope-theta", QKV_OPTION_REAL, offsetof(qkv_bench_settings, rope_theta), "0", 0, QKV_ROPE_THETA_MAX, "THETA",
     "of the dump's model; 0: it has no RoPE, or the calibration says"},
    {"dtype", QKV_OPTION_STRING, offsetof(qkv_bench_settings, dtype), "fp32", 0, 0, "TYPE",
     "fp32, fp16 or bf16: what rows are rounded to before they are coded; in a session, the model's"},
    {"csv", QKV_OPTION_STRING, offsetof(qkv_bench_settings, csv), NULL, 0, 0, "FILE",
     "write the figures there, too, with the columns of tests/regress/baselines.csv"},
    {"json", QKV_OPTION_FLAG, offsetof(qkv_bench_settings, program.json), NULL, 0, 0, NULL,
     "print one JSON object a line on standard output"},
    {"help", QKV_OPTION_FLAG, offsetof(qkv_bench_settings, program.help), NULL, 0, 0, NULL, "show this help"},
    {"version", QKV_OPTION_FLAG, offsetof(qkv_bench_settings, program.version), NULL, 0, 0, NULL, "show the version"},
};

enum { LEARN_WINDOW = 1024 };  // tokens

// What the windows of one way had.
typedef struct window_sums {
  uint64_t windows;
  double kl, kl_squared;  // of their means
} window_sums;

// All that is measured in one run: a language model, or a dump.
typedef struct quality_job {
  const qkv_bench_settings *settings;
  char learns_from[PATH_MAX];  // a text; empty: nothing is learnt
  qkv_dtype dtype;
  qkvi_lm *lm;
  qkv_dump *dump;
  qkv_model model;
  size_t layers;                       // that are measured
  const qkv_calibration *calibration;  // or NULL
  qkvi_setting_list ways;
  qkv_model sessions[2];  // the model as sessions have it, without and with the calibration
  qkv_coding **codings;   // [ways.count]
  qkvi_probe_sums *sums;  // [1 + ways.count]; the first is the exact cache's
  window_sums *windows;   // [ways.count]
  qkvi_probe *probe;
  qkvi_quality_row *rows;  // [1 + ways.count]
  qkv_progress progress;
} quality_job;

static qkv_status load_model(quality_job *job, qkv_error *error) {
  qkvi_forward_threads(job->settings->threads);
  QKV_TRY(qkvi_lm_load(job->settings->model, &job->lm, error));
  const qkvi_lm *lm = job->lm;
  job->layers = (size_t)lm->layers;
  job->model = (qkv_model){.layers = (uint32_t)lm->layers,
                           .kv_heads = (uint32_t)lm->kv_heads,
                           .q_heads = (uint32_t)lm->q_heads,
                           .key_dim = (uint32_t)lm->head_dim,
                           .value_dim = (uint32_t)lm->head_dim,
                           .dtype = QKV_FP32,
                           .rope = {.theta = lm->rope_theta},
                           .policy = QKV_POLICY_UNSET};
  memcpy(job->model.name, lm->name, sizeof job->model.name);
  return QKV_OK;
}

static qkv_status load_dump(quality_job *job, qkv_error *error) {
  QKV_TRY(qkv_dump_open(job->settings->dump, &job->dump, error));
  job->layers = qkv_dump_layers(job->dump);
  job->model = qkvi_dump_model(job->dump, job->calibration, job->settings->rope_theta);
  return QKV_OK;
}

static qkv_status load_calibration(quality_job *job, qkv_error *error) {
  const char *path = job->settings->calibration;
  if (path == NULL) return QKV_OK;
  uint8_t *data = NULL;
  int64_t bytes = 0;
  QKV_TRY(qkvi_text_read(path, &data, &bytes, error));
  qkv_calibration *read = NULL;
  qkv_status status = qkv_calibration_read(data, (size_t)bytes, &read, error);
  free(data);
  job->calibration = read;
  return status == QKV_OK ? QKV_OK : qkv_error_prefix(error, "%s: ", path);
}

// What a codec learns from where no calibration is given: a text in the model's directory, or next to its file.
static void find_text(quality_job *job) {
  const qkv_bench_settings *settings = job->settings;
  if (settings->codec == NULL || settings->calibration != NULL || settings->model == NULL) return;
  const qkv_codec *codec = qkvi_setting_codec(settings->codec);
  const bool learns = codec != NULL && codec->calibrated && !qkv_codec_is_exact(codec);
  if (!learns && strcmp(settings->codec, "all") != 0) return;
  struct stat info;
  if (stat(settings->model, &info) != 0) return;
  const char *slash = S_ISDIR(info.st_mode) ? NULL : strrchr(settings->model, '/');
  const int length = snprintf(job->learns_from, sizeof job->learns_from, "%.*s/calibration.txt",
                              S_ISDIR(info.st_mode) ? (int)strlen(settings->model)
                              : slash != NULL       ? (int)(slash - settings->model)
                                                    : 1,
                              S_ISDIR(info.st_mode) || slash != NULL ? settings->model : ".");
  const bool fits = length > 0 && (size_t)length < sizeof job->learns_from;
  if (!fits || stat(job->learns_from, &info) != 0 || !S_ISREG(info.st_mode)) job->learns_from[0] = '\0';
}

static bool calibrated(const quality_job *job) {
  return job->settings->calibration != NULL || job->learns_from[0] != '\0';
}

static qkv_status learn_windows(quality_job *job, qkvi_calibrator *calibrator, int64_t window, qkv_error *error) {
  int32_t *text = NULL;
  int64_t count = 0;
  QKV_TRY(qkvi_text_tokens(job->lm, job->learns_from, &text, &count, error));
  qkv_progress_start(&job->progress, "calibrating", (uint64_t)count);
  qkv_status status = QKV_OK;
  for (int64_t begin = 0, tokens; status == QKV_OK && begin < count; begin += tokens) {
    tokens = count - begin < window ? count - begin : window;
    status = qkvi_calibrator_add(calibrator, text + begin, tokens, error);
    qkv_progress_add(&job->progress, (uint64_t)tokens);
  }
  qkv_progress_end(&job->progress);
  free(text);
  return status;
}

// As qkv-worker calibrate does.
static qkv_status learn_calibration(quality_job *job, qkv_error *error) {
  if (job->learns_from[0] == '\0') return QKV_OK;
  const int64_t window = job->lm->context < LEARN_WINDOW ? job->lm->context : LEARN_WINDOW;
  qkvi_calibrator *calibrator = NULL;
  qkv_verdict verdict;
  QKV_TRY(qkvi_calibrator_create(job->lm, window, &calibrator, error));
  qkv_status status = learn_windows(job, calibrator, window, error);
  if (status == QKV_OK) status = qkvi_calibrator_finish(calibrator, &verdict, &job->calibration, error);
  qkvi_calibrator_destroy(&calibrator);
  return status == QKV_OK ? QKV_OK : qkv_error_prefix(error, "%s: ", job->learns_from);
}

static void *zeroed(size_t count, size_t bytes) {
  void *memory = calloc(count > 0 ? count : 1, bytes);
  if (memory == NULL) abort();
  return memory;
}

// Without RoPE there is one frame, and a dump has queries of its last tokens only: asking for what cannot be is an
// error, what of it the default list has is left out.
static qkv_status check_ways(quality_job *job, qkv_error *error) {
  const bool asked = job->settings->ways.count > 0 || job->settings->frame != NULL;
  size_t kept = 0;
  for (size_t i = 0; i < job->ways.count; i++) {
    const bool archive = job->ways.items[i].frame == QKV_FRAME_ARCHIVE && job->model.rope.theta == 0;
    if (archive && asked) {
      return qkv_fail(error, QKV_INVALID_ARGUMENT, "the archive frame needs a model with RoPE; see --rope-theta");
    }
    const bool tiers = job->ways.items[i].tier_bits > 0 && job->dump != NULL;
    if (tiers && asked) {
      return qkv_fail(error, QKV_INVALID_ARGUMENT,
                      "tiers by attention need --model and --text, a dump has few queries");
    }
    if (!archive && !tiers) job->ways.items[kept++] = job->ways.items[i];
  }
  job->ways.count = kept;
  return QKV_OK;
}

// Those of ways with tiers.
static void prepare_sessions(quality_job *job) {
  for (size_t i = 0; i < 2; i++) {
    job->sessions[i] = job->model;
    job->sessions[i].dtype = job->dtype;
    job->sessions[i].calibration = qkv_calibration_slot_create();
  }
  if (job->calibration != NULL) qkv_calibration_slot_set(job->sessions[1].calibration, job->calibration);
}

static qkv_status prepare(quality_job *job, qkv_error *error) {
  const qkv_bench_settings *settings = job->settings;
  find_text(job);
  QKV_TRY(qkvi_settings_collect(settings, calibrated(job), &job->ways, error));
  QKV_TRY(load_calibration(job, error));
  QKV_TRY(settings->dump != NULL ? load_dump(job, error) : load_model(job, error));
  QKV_TRY(learn_calibration(job, error));
  QKV_TRY(qkv_model_resolve(&job->model, error));
  if (job->calibration != NULL) {
    const qkv_calibration_shape shape = qkv_model_calibration_shape(&job->model);
    QKV_TRY(qkv_calibration_check(job->calibration, &shape, error));
  }
  QKV_TRY(check_ways(job, error));
  if (job->lm != NULL) job->probe = qkvi_probe_create(job->lm, settings->prefill, settings->length, job->dtype);
  job->codings = zeroed(job->ways.count, sizeof *job->codings);
  job->sums = zeroed(1 + job->ways.count, sizeof *job->sums);
  job->windows = zeroed(job->ways.count, sizeof *job->windows);
  job->rows = zeroed(1 + job->ways.count, sizeof *job->rows);
  for (size_t i = 0; i < job->ways.count; i++) {
    job->codings[i] = qkvi_setting_coding(&job->ways.items[i], &job->model, job->calibration);
    job->sums[1 + i].layers = zeroed(job->layers, sizeof *job->sums->layers);
  }
  prepare_sessions(job);
  return QKV_OK;
}

static void tear_down(quality_job *job) {
  for (size_t i = 0; job->codings != NULL && i < job->ways.count; i++) {
    qkv_coding_unref(&job->codings[i]);
    free(job->sums[1 + i].layers);
  }
  for (size_t i = 0; i < 2; i++) qkv_calibration_slot_destroy(&job->sessions[i].calibration);
  free(job->codings);
  free(job->sums);
  free(job->windows);
  free(job->rows);
  qkvi_probe_destroy(&job->probe);
  qkv_calibration_unref(&job->calibration);
  qkvi_lm_free(&job->lm);
  qkv_dump_close(&job->dump);
  qkvi_settings_clear(&job->ways);
}

static void measure_way(quality_job *job, size_t way) {
  qkvi_probe_sums *sums = &job->sums[1 + way];
  window_sums *windows = &job->windows[way];
  const qkvi_setting *setting = &job->ways.items[way];
  const qkvi_quality before = sums->quality;
  if (setting->tier_bits > 0) {
    qkvi_tiered *session =
        qkvi_tiered_create(&job->sessions[setting->calibrated], &setting->policy, qkvi_setting_purpose(setting));
    qkvi_probe_tiered(job->probe, session, setting->tier_bits, sums);
    qkvi_tiered_destroy(&session);
  } else {
    qkvi_probe_coded(job->probe, job->codings[way], sums);
  }
  const double kl = (sums->quality.kl_bits - before.kl_bits) / (double)(sums->quality.positions - before.positions);
  windows->windows++;
  windows->kl += kl;
  windows->kl_squared += kl * kl;
}

static qkv_status measure_text(quality_job *job, const char *path, const int32_t *text, int64_t tokens,
                               qkv_error *error) {
  const qkv_bench_settings *settings = job->settings;
  const int64_t length = settings->length;
  if (tokens <= length) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s has %" PRId64 " %ss, a window needs %" PRId64, path, tokens,
                    qkvi_tokenizer_unit(job->lm->tokenizer), length + 1);
  }
  for (int64_t i = 0; i < settings->windows; i++) {
    qkvi_probe_exact(job->probe, text + qkvi_text_window(tokens, length, settings->windows, i), &job->sums[0]);
    for (size_t way = 0; way < job->ways.count; way++) {
      measure_way(job, way);
      qkv_progress_add(&job->progress, (uint64_t)length);
    }
  }
  return QKV_OK;
}

static qkv_status measure_dump(quality_job *job, qkv_error *error) {
  qkvi_probe_layer *sums = zeroed(job->ways.count, sizeof *sums);
  qkv_progress_start(&job->progress, "measuring", job->layers);
  qkv_status status = QKV_OK;
  for (size_t layer = 0; status == QKV_OK && layer < job->layers; layer++) {
    memset(sums, 0, job->ways.count * sizeof *sums);
    status = qkvi_dump_measure(job->dump, &job->model, layer, job->dtype, job->codings, job->ways.count, sums, error);
    for (size_t way = 0; way < job->ways.count; way++) job->sums[1 + way].layers[layer] = sums[way];
    qkv_progress_add(&job->progress, 1);
  }
  qkv_progress_end(&job->progress);
  free(sums);
  return status == QKV_OK ? QKV_OK : qkv_error_prefix(error, "%s: ", job->settings->dump);
}

static qkv_status measure(quality_job *job, qkv_error *error) {
  if (job->dump != NULL) return measure_dump(job, error);
  const qkv_bench_settings *settings = job->settings;
  const uint64_t passes = settings->texts.count * (uint64_t)settings->windows * job->ways.count;
  qkv_progress_start(&job->progress, "measuring", passes * (uint64_t)settings->length);
  qkv_status status = QKV_OK;
  for (size_t i = 0; status == QKV_OK && i < settings->texts.count; i++) {
    int32_t *text = NULL;
    int64_t tokens = 0;
    status = qkvi_text_tokens(job->lm, settings->texts.items[i], &text, &tokens, error);
    if (status == QKV_OK) status = measure_text(job, settings->texts.items[i], text, tokens, error);
    free(text);
  }
  qkv_progress_end(&job->progress);
  return status;
}

// ---- Figures ----

static void fill_quality(qkvi_quality_row *row, const qkvi_quality *quality) {
  const double positions = (double)quality->positions;  // 0 of a dump, whose figures are then NAN
  row->bits_per_token = quality->bits / positions;
  row->delta = (quality->bits - quality->bits_exact) / positions;
  row->kl_bits = quality->kl_bits / positions;
  row->top1 = (double)quality->agreed / positions;
}

static double standard_error(const window_sums *windows) {
  const double n = (double)windows->windows, mean = windows->kl / n;
  if (windows->windows < 2) return NAN;
  return sqrt(fmax(0, windows->kl_squared / n - mean * mean) / (n - 1));
}

// Means over layers of what is relative within each.
static void fill_layers(qkvi_quality_row *row, const qkvi_probe_layer *layers, size_t count) {
  uint64_t bytes = 0, coordinates = 0;
  for (size_t i = 0; i < count; i++) {
    const qkvi_probe_layer *layer = &layers[i];
    const double part = 1 / (double)count;
    bytes += layer->rows.bytes;
    coordinates += layer->rows.coordinates;
    for (int kv = QKV_K; kv <= QKV_V; kv++) {
      row->rel_mse[kv] += part * qkvi_recoded_error(&layer->rows, (qkv_part)kv);
      row->cosine[kv] += part * qkvi_recoded_cosine(&layer->rows, (qkv_part)kv);
    }
    row->attention_error += part * sqrt(layer->attention_error / layer->attention_square);
    row->attention_cosine += part * layer->attention_cosine / (double)layer->attention_rows;
  }
  row->bits = 8 * (double)bytes / (double)coordinates;
}

static void fill_rows(quality_job *job) {
  qkvi_quality_row *exact = &job->rows[0];
  *exact = (qkvi_quality_row){.name = "exact fp32", .bits = 32, .cosine = {1, 1}, .attention_cosine = 1};
  fill_quality(exact, &job->sums[0].quality);
  if (job->dump != NULL) exact->kl_error = NAN;
  for (size_t i = 0; i < job->ways.count; i++) {
    const qkvi_setting *way = &job->ways.items[i];
    qkvi_quality_row *row = &job->rows[1 + i];
    qkvi_setting_name(way, row->name);
    row->bits_k = way->policy.bits_k;
    row->bits_v = way->policy.bits_v;
    fill_quality(row, &job->sums[1 + i].quality);
    row->kl_error = standard_error(&job->windows[i]);
    fill_layers(row, job->sums[1 + i].layers, job->layers);
  }
}

// What figures are per; of a dump, which has none of them, as of a byte-level model.
static const char *unit(const quality_job *job) {
  return job->lm != NULL ? qkvi_tokenizer_unit(job->lm->tokenizer) : "byte";
}

static int write_csv(const quality_job *job) {
  const char *path = job->settings->csv;
  if (path == NULL) return QKV_EXIT_OK;
  FILE *out = fopen(path, "w");
  if (out == NULL) return qkv_program_failed("%s: %s", path, strerror(errno));
  qkvi_quality_csv_heading(out, unit(job));
  for (size_t i = 0; i < 1 + job->ways.count; i++) qkvi_quality_csv_row(out, &job->rows[i]);
  const bool failed = ferror(out) != 0;
  if (fclose(out) == 0 && !failed) return QKV_EXIT_OK;
  return qkv_program_failed("%s cannot be written", path);
}

static int show(quality_job *job) {
  fill_rows(job);
  bool shown = true;
  if (job->settings->program.json) {
    // One codec is one line.
    const bool alone = job->settings->codec != NULL && job->ways.count == 1;
    for (size_t i = alone ? 1 : 0; shown && i < 1 + job->ways.count; i++) {
      shown = qkv_json_figures(qkvi_quality_json(&job->rows[i], unit(job)));
    }
  } else {
    qkvi_quality_print(job->rows, 1 + job->ways.count, unit(job));
    shown = fflush(stdout) == 0;
  }
  const int written = write_csv(job);
  return shown ? written : qkv_program_failed("standard output cannot be written");
}

static int check(quality_job *job) {
  const qkv_bench_settings *settings = job->settings;
  if (qkv_dtype_parse(settings->dtype, &job->dtype) != QKV_OK) {
    return qkv_program_misused("--dtype is %s, known are fp32, fp16 and bf16", settings->dtype);
  }
  if (settings->dump != NULL && (settings->model != NULL || settings->texts.count > 0)) {
    return qkv_program_misused("--dump stands in place of --model and --text");
  }
  if (settings->dump != NULL) return QKV_EXIT_OK;
  if (settings->model == NULL)
    return qkv_program_misused("--model is missing: a model's directory or its .gguf file");
  if (settings->texts.count == 0) return qkv_program_misused("--text is missing: a file to measure on");
  if (settings->prefill >= settings->length) {
    return qkv_program_misused("--prefill is %" PRId64 ", it must be below --length, %" PRId64, settings->prefill,
                               settings->length);
  }
  return QKV_EXIT_OK;
}

static int run(void *values, const qkv_option_list *arguments) {
  (void)arguments;
  quality_job job = {.settings = values};
  int exit_status = check(&job);
  if (exit_status != QKV_EXIT_OK) return exit_status;
  qkv_error error = {0};
  qkv_status status = prepare(&job, &error);
  if (status == QKV_OK) status = measure(&job, &error);
  exit_status = status == QKV_OK ? show(&job) : qkv_program_failed("%s", error.text);
  tear_down(&job);
  return exit_status;
}

const qkv_command qkvi_bench_quality = {"quality",
                                        "",
                                        "what codes of keys and values cost a model in quality, in process",
                                        options,
                                        sizeof options / sizeof *options,
                                        0,
                                        0,
                                        run};
