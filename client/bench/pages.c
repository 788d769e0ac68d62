#include "client/bench/pages.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/cpu.h"
#include "engine/cache/layer_retier.h"
#include "engine/codec/calibrate.h"
#include "engine/codec/hadamard.h"
#include "engine/kernel/kernel.h"

static void *allocate(size_t bytes) {
  void *made = malloc(bytes > 0 ? bytes : 1);
  if (made == NULL) abort();
  return made;
}

static int failed(const qkv_error *error) {
  return qkv_program_failed("%s", error->text);
}

// ---- Rows ----

// Two normal numbers from two of uniform_floats' (Box and Muller).
static void normal(float *values, size_t count, uint64_t seed) {
  qkv_bench_floats(values, count, seed);
  for (size_t i = 0; i + 1 < count; i += 2) {
    const double radius = sqrt(-2 * log(((double)values[i] + 2 + 0x1p-23) / 4));
    const double angle = 6.283185307179586 * ((double)values[i + 1] + 2) / 4;
    values[i] = (float)(radius * cos(angle));
    values[i + 1] = (float)(radius * sin(angle));
  }
}

// rows [count][dim].
static void fill(float *rows, size_t count, size_t dim, bool skewed, double spread, uint64_t seed) {
  float *factors = allocate((count + 1) / 2 * 2 * sizeof *factors);
  normal(rows, count * dim, seed);
  normal(factors, (count + 1) / 2 * 2, seed + 1);
  for (size_t i = 0; i < count; i++) {
    float *row = rows + i * dim;
    const float factor = (float)exp(spread * (double)factors[i]);
    for (size_t c = 0; c < dim; c++) row[c] *= skewed ? 2.83f * expf(-4 * (float)c / (float)dim) * factor : factor;
    if (skewed) qkv_hadamard_inverse(row, 1, dim);
  }
  free(factors);
}

// Keys [count][heads][dim] get a mean each head, as keys before RoPE have it: of twice their variance. In SmolLM2
// that is the median over heads, of pairs that turn by 0.2 rad or more in half a page.
static void add_means(float *rows, size_t count, size_t heads, size_t dim, uint64_t seed) {
  const float size = 1.55f;  // of rows as `fill` makes them, skewed and with a spread of 0.3
  const size_t width = heads * dim;
  float *means = allocate((width + 1) / 2 * 2 * sizeof *means);
  normal(means, (width + 1) / 2 * 2, seed);
  for (size_t i = 0; i < count; i++) {
    for (size_t c = 0; c < width; c++) rows[i * width + c] += size * means[c];
  }
  free(means);
}

// ---- The model ----

static qkv_status describe(const qkv_bench_settings *settings, qkv_bench_pages *pages, qkv_policy *policy,
                           qkv_error *error) {
  const char *frame = settings->frame;
  const bool turns = strcmp(frame, "plain") != 0;
  if (turns && strcmp(frame, "attend") != 0 && strcmp(frame, "archive") != 0) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "--frame is %.32s, known are plain, attend and archive", frame);
  }
  if (strcmp(frame, "attend") == 0 && !settings->calibrated) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "--frame attend needs --calibrated; without it rows are plain");
  }
  const qkv_codec *codec = qkv_codec_by_name(settings->codec != NULL ? settings->codec : "embedded");
  if (codec == NULL || qkv_codec_is_exact(codec) || (codec->part != NULL && settings->low_share > 0))
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "--codec is %.32s, not a codec of pages%s", settings->codec,
                    codec == NULL ? "" : " that can be at lower bits");
  *policy = (qkv_policy){.codec = codec,
                         .bits_k = settings->code_k,
                         .bits_v = settings->code_v > 0 ? settings->code_v : settings->code_k,
                         .anchor_said = true};
  if (!qkv_anchor_parse(settings->anchor, &policy->anchor.kind)) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "--anchor is %.32s, known are none, mean, group, chain and auto",
                    settings->anchor);
  }
  QKV_TRY(qkv_policy_check(policy, error));
  pages->model = (qkv_model){
      .name = "qkv-bench",
      .layers = 1,
      .kv_heads = (uint32_t)settings->kv_heads,
      .q_heads = (uint32_t)settings->q_heads,
      .key_dim = (uint32_t)settings->dim,
      .value_dim = (uint32_t)(settings->value_dim > 0 ? settings->value_dim : settings->dim),
      .dtype = QKV_FP32,
      .rope.theta = turns || codec->needs_rope ? settings->rope_theta : 0,
      .policy = QKV_POLICY_UNSET,
  };
  return qkv_model_resolve(&pages->model, error);
}

static qkv_status calibrate(qkv_bench_pages *pages, qkv_error *error) {
  const qkv_calibration_shape shape = qkv_model_calibration_shape(&pages->model);
  qkv_moments *moments = qkv_moments_create(&shape);
  float *queries =
      allocate((size_t)QKV_BENCH_ROWS / 4 * pages->model.q_heads * pages->model.key_dim * sizeof *queries);
  fill(queries, (size_t)QKV_BENCH_ROWS / 4 * pages->model.q_heads, pages->model.key_dim, true, 0, 9);
  qkv_moments_add(moments, 0, 0, QKV_BENCH_ROWS, pages->k, pages->v, true);
  qkv_moments_add_queries(moments, 0, 0, QKV_BENCH_ROWS / 4, queries, true);
  qkv_calibration *made = NULL;
  const qkv_status status = qkv_calibrate(moments, &QKV_CALIBRATE_DEFAULTS, &made, error);
  pages->calibration = made;
  qkv_moments_destroy(&moments);
  free(queries);
  return status;
}

// ---- Sessions ----

qkv_status qkv_bench_pages_append(const qkv_bench_pages *pages, qkv_layer *layer, uint64_t end, qkv_error *error) {
  const qkv_model *model = &pages->model;
  assert(layer->length % QKV_BENCH_ROWS == 0);
  for (uint64_t at = layer->length, appended; at < end; at += QKV_BENCH_ROWS) {
    const size_t count = end - at < QKV_BENCH_ROWS ? (size_t)(end - at) : QKV_BENCH_ROWS;
    const qkv_segment k = {.data = (const uint8_t *)pages->k,
                           .length = count * model->kv_heads * model->key_dim * sizeof(float)};
    const qkv_segment v = {.data = (const uint8_t *)pages->v,
                           .length = count * model->kv_heads * model->value_dim * sizeof(float)};
    const qkv_tensor kt =
        qkv_tensor_dense(QKV_FP32, 3, (int64_t[]){(int64_t)count, model->kv_heads, model->key_dim}, &k);
    const qkv_tensor vt =
        qkv_tensor_dense(QKV_FP32, 3, (int64_t[]){(int64_t)count, model->kv_heads, model->value_dim}, &v);
    QKV_TRY(qkv_layer_append(layer, at, &kt, &vt, model->rope.theta != 0, &appended, error));
  }
  return QKV_OK;
}

// That share of all groups goes to the tier.
static qkv_status mix(qkv_layer *layer, double share, uint8_t tier, uint64_t *seed, qkv_error *error) {
  const size_t heads = layer->config.model->kv_heads;
  qkv_head_tiers *now = allocate(2 * heads * sizeof *now), *most = now + heads;
  float *dice = allocate(heads * 2 * QKV_PAGE_GROUPS * sizeof *dice);
  for (size_t i = 0; i < layer->page_count; i++) {
    qkv_cut cut;
    qkv_layer_tiers(layer, qkv_layer_page(layer, i), now, most);
    qkv_bench_floats(dice, heads * 2 * QKV_PAGE_GROUPS, (*seed)++);
    for (size_t each = 0; each < heads * 2 * QKV_PAGE_GROUPS; each++) {
      uint8_t *mine =
          &now[each / (2 * (size_t)QKV_PAGE_GROUPS)].tiers[each / QKV_PAGE_GROUPS % 2][each % QKV_PAGE_GROUPS];
      if (((double)dice[each] + 2) / 4 < share && *mine > tier) *mine = tier;
    }
    if (!qkv_layer_cut(layer, i, qkv_layer_page(layer, i)->serial, now, &cut)) continue;
    QKV_TRY(qkv_layer_exchange(layer, &cut, error));
    qkv_cut_deinit(&cut);
  }
  free(now);
  free(dice);
  return QKV_OK;
}

// Copies the pages of all sessions, in random order, so that pages that follow each other lie anywhere.
static void scatter(qkv_bench_pages *pages) {
  size_t count = 0, next = 0;
  for (size_t s = 0; s < pages->sessions; s++) count += pages->layers[s].page_count;
  qkv_page_entry **entries = allocate(count * sizeof *entries);
  void **old = allocate(count * sizeof *old);
  for (size_t s = 0; s < pages->sessions; s++) {
    for (size_t i = 0; i < pages->layers[s].page_count; i++) entries[next++] = qkv_layer_page(&pages->layers[s], i);
  }
  float *dice = allocate(count * sizeof *dice);
  qkv_bench_floats(dice, count, 11);
  for (size_t i = count; i-- > 1;) {
    const size_t j = (size_t)(((double)dice[i] + 2) / 4 * (double)(i + 1));
    qkv_page_entry *swapped = entries[i];
    entries[i] = entries[j];
    entries[j] = swapped;
  }
  for (size_t i = 0; i < count; i++) {
    void *copy = qkv_arena_alloc_overhead(pages->arena, entries[i]->bytes);
    memcpy(copy, entries[i]->page, entries[i]->bytes);
    old[i] = (void *)entries[i]->page;
    entries[i]->page = copy;
  }
  for (size_t i = 0; i < count; i++) qkv_arena_free_overhead(pages->arena, old[i], entries[i]->bytes);
  free(entries);
  free((void *)old);
  free(dice);
}

static qkv_status make_sessions(const qkv_bench_settings *settings, qkv_bench_pages *pages, const qkv_policy *policy,
                                qkv_error *error) {
  const qkv_purpose purpose = strcmp(settings->frame, "archive") == 0 ? QKV_PURPOSE_FETCH : QKV_PURPOSE_ATTEND;
  uint64_t seed = 1000;
  pages->coding = qkv_coding_get(&pages->model, policy, purpose, pages->calibration);
  const qkv_layer_config config = {
      .model = &pages->model, .policy = *policy, .arena = pages->arena, .device = settings->attends_on};
  for (size_t s = 0; s < pages->sessions; s++) {
    qkv_layer *layer = &pages->layers[s];
    qkv_layer_init(layer, &config, qkv_coding_layer(pages->coding, 0));
    QKV_TRY(qkv_bench_pages_append(pages, layer, (uint64_t)settings->tokens, error));
    if (settings->low_share > 0) {
      QKV_TRY(mix(layer, settings->low_share, (uint8_t)(settings->low_bits * QKV_TIER_BIT), &seed, error));
    }
  }
  if (strcmp(settings->order, "random") == 0) scatter(pages);
  for (size_t s = 0; s < pages->sessions; s++) {
    for (size_t i = 0; i < pages->layers[s].page_count; i++)
      pages->bytes += qkv_layer_page(&pages->layers[s], i)->bytes;
  }
  return QKV_OK;
}

// The same queries for all sessions.
static qkv_status make_requests(const qkv_bench_settings *settings, qkv_bench_pages *pages, qkv_error *error) {
  const qkv_model *model = &pages->model;
  const size_t rows = (size_t)settings->q_len * model->q_heads;
  pages->segment = (qkv_segment){.data = (const uint8_t *)pages->q, .length = rows * model->key_dim * sizeof(float)};
  for (size_t s = 0; s < pages->sessions; s++) {
    pages->requests[s] = (qkv_attend){
        .layer = &pages->layers[s],
        .position = (uint64_t)(settings->tokens - settings->q_len),
        .q = qkv_tensor_dense(QKV_FP32, 3, (int64_t[]){settings->q_len, model->q_heads, model->key_dim},
                              &pages->segment),
        .q_before_rope = model->rope.theta != 0,
        .options.precision = (qkv_precision)settings->precision,
        .out = pages->out + s * rows * model->value_dim,
        .lse = pages->lse + s * rows,
    };
    QKV_TRY(qkv_attend_check(&pages->requests[s], error));
  }
  return QKV_OK;
}

static qkv_status check(const qkv_bench_settings *settings, qkv_error *error) {
  if (strcmp(settings->order, "random") != 0 && strcmp(settings->order, "linear") != 0) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "--order is %.32s, known are random and linear", settings->order);
  }
  if (settings->q_len > settings->tokens) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "--q-len is %lld, there are %lld tokens", (long long)settings->q_len,
                    (long long)settings->tokens);
  }
  return QKV_OK;
}

int qkv_bench_pages_init(const qkv_bench_settings *settings, qkv_bench_pages *pages) {
  qkv_error error = {0};
  qkv_policy policy;
  *pages = (qkv_bench_pages){.sessions = (size_t)settings->sessions};
  qkv_status status = check(settings, &error);
  if (status == QKV_OK) status = describe(settings, pages, &policy, &error);
  if (status != QKV_OK) return failed(&error);
  const qkv_model *model = &pages->model;
  const size_t rows = (size_t)QKV_BENCH_ROWS * model->kv_heads, queries = (size_t)settings->q_len * model->q_heads;
  pages->k = allocate(rows * model->key_dim * sizeof(float));
  pages->v = allocate(rows * model->value_dim * sizeof(float));
  pages->q = allocate(queries * model->key_dim * sizeof(float));
  pages->out = allocate(pages->sessions * queries * model->value_dim * sizeof(float));
  pages->lse = allocate(pages->sessions * queries * sizeof(float));
  pages->layers = calloc(pages->sessions, sizeof *pages->layers);
  pages->requests = calloc(pages->sessions, sizeof *pages->requests);
  if (pages->layers == NULL || pages->requests == NULL) abort();
  fill(pages->k, rows, model->key_dim, settings->calibrated, 0.3, 1);
  if (settings->calibrated && model->rope.theta != 0)
    add_means(pages->k, QKV_BENCH_ROWS, model->kv_heads, model->key_dim, 7);
  fill(pages->v, rows, model->value_dim, settings->calibrated, 0.3, 3);
  fill(pages->q, queries, model->key_dim, settings->calibrated, 0, 5);
  const bool small = settings->huge_pages != NULL && strcmp(settings->huge_pages, "off") == 0;
  pages->arena = qkv_arena_create_on(&(qkv_heap_config){.pages = small ? QKV_HEAP_PAGES_SMALL : QKV_HEAP_PAGES_AUTO},
                                     "memory", (uint64_t)1 << 40);
  if (settings->calibrated) status = calibrate(pages, &error);
  if (status == QKV_OK) status = make_sessions(settings, pages, &policy, &error);
  if (status == QKV_OK) status = make_requests(settings, pages, &error);
  return status == QKV_OK ? 0 : failed(&error);
}

void qkv_bench_pages_deinit(qkv_bench_pages *pages) {
  for (size_t s = 0; s < pages->sessions && pages->layers != NULL; s++) {
    if (pages->layers[s].config.model != NULL) qkv_layer_deinit(&pages->layers[s]);
  }
  qkv_coding_unref(&pages->coding);
  qkv_calibration_unref(&pages->calibration);
  if (pages->arena != NULL) qkv_arena_destroy(&pages->arena);
  free(pages->layers);
  free(pages->requests);
  free(pages->k);
  free(pages->v);
  free(pages->q);
  free(pages->out);
  free(pages->lse);
}
