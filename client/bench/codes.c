#include "client/bench/codes.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/base/tensor.h"
#include "engine/codec/calibrate.h"
#include "engine/codec/moments.h"
#include "engine/kernel/kernel.h"

const qkv_option qkvi_bench_codes_options[QKV_BENCH_CODES_OPTIONS] = {
    {"json", QKV_OPTION_FLAG, offsetof(qkv_bench_settings, program.json), NULL, 0, 0, NULL,
     "print one JSON object a line on standard output"},
    {"help", QKV_OPTION_FLAG, offsetof(qkv_bench_settings, program.help), NULL, 0, 0, NULL, "show this help"},
    {"version", QKV_OPTION_FLAG, offsetof(qkv_bench_settings, program.version), NULL, 0, 0, NULL, "show the version"},
    {"repeats", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, repeats), "15", 1, 1000, "N",
     "repeats; medians are reported"},
    {"tokens", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, tokens), "4096", 64, 1048576, "N",
     "tokens, in whole pages of 64"},
    {"dim", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, dim), "128", 8, 1024, "N", "width of a row"},
    {"kv-heads", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, kv_heads), "8", 1, 128, "N", "KV heads"},
    {"codec", QKV_OPTION_STRING, offsetof(qkv_bench_settings, codec), "embedded", 0, 0, "NAME",
     "a codec of the table (docs/codecs.md)"},
    {"bits", QKV_OPTION_REAL, offsetof(qkv_bench_settings, code_k), "4", 0.125, 8, "BITS",
     "code bits of keys and values, a multiple of 1/8"},
    {"anchor", QKV_OPTION_STRING, offsetof(qkv_bench_settings, anchor), "none", 0, 0, "KIND",
     "none, mean, group, chain or auto"},
    {"frame", QKV_OPTION_STRING, offsetof(qkv_bench_settings, frame), "plain", 0, 0, "FRAME",
     "of the keys: plain, attend (calibrated) or archive"},
    {"calibrated", QKV_OPTION_FLAG, offsetof(qkv_bench_settings, calibrated), NULL, 0, 0, NULL,
     "dense transforms, learnt from the rows"},
    {"cpu-mask", QKV_OPTION_LIST, offsetof(qkv_bench_settings, cpu_mask), NULL, 0, 0, "LIST",
     "what to use of the processor, as of qkvd"},
};
static void *allocate(size_t bytes) {
  void *made = aligned_alloc(64, (bytes + 63) / 64 * 64);
  if (made == NULL) abort();
  return made;
}

// ---- Rows ----

// Sums of uniform numbers stand for Gaussian ones.
static void fill_gaussian(float *out, size_t count, uint64_t seed) {
  enum { SUMMED = 4, CHUNK = 256 };
  float uniform[SUMMED * CHUNK];  // in [-2, 2): variance 4 / 3
  for (size_t done = 0; done < count; done += CHUNK) {
    const size_t n = count - done < CHUNK ? count - done : CHUNK;
    qkv_bench_floats(uniform, SUMMED * n, seed + done * 7919);
    for (size_t i = 0; i < n; i++) {
      const float *u = uniform + SUMMED * i;
      out[done + i] = (u[0] + u[1] + u[2] + u[3]) * 0.4330127f;
    }
  }
}

static void shape_rows(const qkv_bench_codes *codes, size_t page, float *rows) {
  const size_t heads = codes->model.kv_heads, dim = codes->model.key_dim;
  for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) {
    for (size_t h = 0; h < heads; h++) {
      float *row = rows + (t * heads + h) * dim;
      for (size_t c = 0; c < dim; c++) {
        const float at = (float)(page * QKV_PAGE_TOKENS + t) / 700.0f;
        if ((c * 37 + h * 11) % 41 == 0) row[c] *= 8;
        row[c] += 0.7f * sinf(at + (float)(c * 13 + h));
      }
    }
  }
}

static void fill_page(qkv_bench_codes *codes, qkv_part part, size_t page) {
  const size_t count = codes->part_bytes / 2, row = codes->model.key_dim;
  float *rows = codes->floats[part];
  fill_gaussian(rows, count, 2 * page + part);
  shape_rows(codes, page, rows);
  for (size_t i = 0; part == QKV_K && codes->model.rope.theta != 0 && i < count / row; i++) {
    qkv_rope_forward(&codes->model.rope, rows + i * row, page * QKV_PAGE_TOKENS + i / codes->model.kv_heads);
  }
  qkv_from_float(QKV_FP16, rows, codes->rows[part] + page * codes->part_bytes, count);
}

// ---- Coder ----

static int failed(const qkv_error *error) {
  return qkv_program_failed("%s", error->text);
}

static int calibrate(qkv_bench_codes *codes, const qkv_calibration **calibration) {
  const qkv_calibration_shape shape = qkv_model_calibration_shape(&codes->model);
  qkv_error error = {0};
  qkv_calibration *made = NULL;
  qkv_moments *moments = qkv_moments_create(&shape);
  for (size_t page = 0; page < codes->pages; page++) {
    for (qkv_part part = QKV_K; part <= QKV_V; part++) {
      qkv_to_float(QKV_FP16, codes->rows[part] + page * codes->part_bytes, codes->floats[part],
                   codes->part_bytes / 2);
    }
    qkv_moments_add(moments, 0, page * QKV_PAGE_TOKENS, QKV_PAGE_TOKENS, codes->floats[QKV_K], codes->floats[QKV_V],
                    false);
  }
  const qkv_status status = qkv_calibrate(moments, &QKV_CALIBRATE_DEFAULTS, &made, &error);
  qkv_moments_destroy(&moments);
  *calibration = made;
  return status == QKV_OK ? 0 : failed(&error);
}

static int choose_frame(qkv_bench_codes *codes, qkv_purpose *purpose) {
  const char *frame = codes->settings->frame;
  *purpose = strcmp(frame, "archive") == 0 ? QKV_PURPOSE_FETCH : QKV_PURPOSE_ATTEND;
  if (strcmp(frame, "plain") == 0) return 0;
  codes->model.rope = (qkv_rope){.theta = 10000};
  if (strcmp(frame, "archive") == 0) return 0;
  if (strcmp(frame, "attend") != 0) return qkv_program_failed("--frame is %s, not plain, attend or archive", frame);
  return codes->settings->calibrated ? 0 : qkv_program_failed("--frame attend needs --calibrated");
}

static int make_coder(qkv_bench_codes *codes, qkv_purpose purpose) {
  const qkv_bench_settings *settings = codes->settings;
  qkv_error error = {0};
  qkv_policy policy = {.codec = qkv_codec_by_name(settings->codec),
                       .bits_k = settings->code_k,
                       .bits_v = settings->code_k,
                       .recent_window = 0,
                       .anchor_said = true,
                       .low_rank_said = true};
  if (policy.codec == NULL || qkv_codec_is_exact(policy.codec))
    return qkv_program_failed("--codec is %s, not a codec of pages", settings->codec);
  if (!qkv_anchor_parse(settings->anchor, &policy.anchor.kind)) {
    return qkv_program_failed("--anchor is %s, not none, mean, group, chain or auto", settings->anchor);
  }
  if (qkv_policy_check(&policy, &error) != QKV_OK) return failed(&error);
  const qkv_calibration *calibration = NULL;
  if (settings->calibrated && calibrate(codes, &calibration) != 0) return 1;
  codes->coding = qkv_coding_get(&codes->model, &policy, purpose, calibration);
  qkv_calibration_unref(&calibration);
  codes->coder = qkv_coding_layer(codes->coding, 0);
  return 0;
}

int qkv_bench_codes_init(qkv_bench_codes *codes, const qkv_bench_settings *settings) {
  qkv_error error = {0};
  qkv_purpose purpose;
  *codes = (qkv_bench_codes){.settings = settings,
                             .model = {.name = "qkv-bench",
                                       .layers = 1,
                                       .kv_heads = (uint32_t)settings->kv_heads,
                                       .q_heads = (uint32_t)settings->kv_heads,
                                       .key_dim = (uint32_t)settings->dim,
                                       .value_dim = (uint32_t)settings->dim,
                                       .dtype = QKV_FP16,
                                       .policy = QKV_POLICY_UNSET},
                             .pages = (size_t)settings->tokens / QKV_PAGE_TOKENS};
  if (qkv_bench_take_mask(settings) != 0 || choose_frame(codes, &purpose) != 0) return 1;
  if (qkv_model_resolve(&codes->model, &error) != QKV_OK) return failed(&error);
  codes->part_bytes = (size_t)(2 * QKV_PAGE_TOKENS * settings->kv_heads * settings->dim);
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    codes->rows[part] = allocate(codes->pages * codes->part_bytes);
    codes->floats[part] = allocate(2 * codes->part_bytes);
    for (size_t page = 0; page < codes->pages; page++) fill_page(codes, part, page);
  }
  return make_coder(codes, purpose);
}

void qkv_bench_codes_deinit(qkv_bench_codes *codes) {
  qkv_coding_unref(&codes->coding);
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    free(codes->rows[part]);
    free(codes->floats[part]);
  }
}

size_t qkv_bench_codes_image_bytes(const qkv_bench_codes *codes) {
  return (codes->coder->codec->page_bytes_max(codes->coder) + 63) / 64 * 64;
}

size_t qkv_bench_codes_encode(qkv_bench_codes *codes, size_t page, void *image) {
  const size_t at = page * codes->part_bytes;
  return codes->coder->codec->encode(codes->coder, page * QKV_PAGE_TOKENS, QKV_PAGE_TOKENS, QKV_FP16,
                                     codes->rows[QKV_K] + at, codes->rows[QKV_V] + at, NULL, image);
}

// ---- Measuring ----

// Processor time: one thread that waits for nothing, whatever else the machine does.
static double seconds_of_thread(void) {
  struct timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void copy_all(const qkv_bench_codes *codes, uint8_t *to) {
  for (size_t page = 0; page < codes->pages; page++) {
    for (qkv_part part = QKV_K; part <= QKV_V; part++) {
      memcpy(to + (2 * page + part) * codes->part_bytes, codes->rows[part] + page * codes->part_bytes,
             codes->part_bytes);
    }
  }
}

int qkv_bench_codes_measure(qkv_bench_codes *codes, const char *bench, void (*once)(void *context), void *context,
                            size_t page_bytes) {
  const qkv_bench_settings *settings = codes->settings;
  const double bytes = (double)(2 * codes->pages * codes->part_bytes), rows = bytes / (double)(2 * settings->dim);
  uint8_t *copy = allocate(2 * codes->pages * codes->part_bytes);
  qkv_samples seconds = {0}, copy_seconds = {0};
  copy_all(codes, copy);
  once(context);
  for (int64_t i = 0; i < settings->repeats; i++) {
    const double begin = seconds_of_thread();
    once(context);
    const double middle = seconds_of_thread();
    copy_all(codes, copy);
    qkv_samples_add(&seconds, middle - begin);
    qkv_samples_add(&copy_seconds, seconds_of_thread() - middle);
  }
  const double took = qkv_samples_quantile(&seconds, 0.5), copied = qkv_samples_quantile(&copy_seconds, 0.5);
  qkv_bench_report(
      settings,
      json_pack("{s:s, s:s, s:I, s:I, s:I, s:f, s:s, s:s, s:b, s:f, s:f, s:f, s:f, s:f}", "bench", bench, "kernels",
                qkv_kernels_get()->name, "tokens", (json_int_t)codes->pages * QKV_PAGE_TOKENS, "dim",
                (json_int_t)settings->dim, "kv_heads", (json_int_t)settings->kv_heads, "bits", settings->code_k,
                "anchor", settings->anchor, "frame", settings->frame, "calibrated", settings->calibrated, "ns_a_row",
                1e9 * took / rows, "rows_per_s", rows / took, "gbps", 1e-9 * bytes / took, "memcpy_gbps",
                1e-9 * bytes / copied, "code_bits",
                8.0 * (double)page_bytes / (2.0 * QKV_PAGE_TOKENS * (double)(settings->kv_heads * settings->dim))));
  free(copy);
  qkv_samples_free(&seconds);
  qkv_samples_free(&copy_seconds);
  return 0;
}
