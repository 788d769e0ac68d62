#include "engine/cache/compare.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/yield.h"
#include "engine/cache/coding.h"
#include "engine/cache/layer.h"
#include "engine/cache/layer_spill.h"
#include "engine/cache/probe.h"

static const double tried_bits[] = {1, 2, 3, 4, 8};
enum { TRIED = sizeof tried_bits / sizeof *tried_bits };

// One layer's part of the sample.
typedef struct sampled {
  uint32_t layer;
  size_t pages;
  uint64_t positions[QKV_COMPARE_PAGES];
  float *rows[2];  // by part: [pages][64][kv_heads][dim]
  qkv_probe *probes[QKV_COMPARE_HEADS];
} sampled;

struct qkv_comparer {
  qkv_session *session;  // a reference
  const qkv_model *model;
  qkv_session_config config;
  const qkv_calibration *calibration;  // a reference; NULL: none
  size_t pages_max, heads, count;
  sampled layers[QKV_COMPARE_LAYERS];
  size_t codec, bits;  // next, in the table and in tried_bits
  qkv_comparison found;
};

static void *block(size_t bytes) {
  void *made = aligned_alloc(64, (bytes + 63) / 64 * 64 + 64);
  if (made == NULL) abort();
  return made;
}

static size_t dim_of(const qkv_model *model, qkv_part part) {
  return part == QKV_K ? model->key_dim : model->value_dim;
}

static size_t page_floats(const qkv_model *model, qkv_part part) {
  return (size_t)QKV_PAGE_TOKENS * model->kv_heads * dim_of(model, part);
}

// Of `count` evenly spread among `of`, the i-th.
static size_t spread(size_t i, size_t count, size_t of) {
  return count <= 1 ? of - 1 : i * (of - 1) / (count - 1);
}

// ---- Sampling ----

// Chooses pages of a layer that is held: exact ones where there are as many as may be.
static void choose_pages(const qkv_comparer *all, const qkv_layer *layer, sampled *of, uint64_t *exact) {
  const uint64_t first = layer->config.first_position;
  const uint64_t tail = layer->sealed > first ? layer->sealed : first;
  const bool rows_are_exact = layer->length >= tail + all->pages_max * QKV_PAGE_TOKENS;
  const uint64_t begin = rows_are_exact ? tail : first;
  const size_t there = layer->length > begin ? (size_t)((layer->length - begin) / QKV_PAGE_TOKENS) : 0;
  const size_t wanted = there < all->pages_max ? there : all->pages_max;
  for (size_t i = 0; i < wanted; i++) {
    const uint64_t position = begin + spread(i, wanted, there) * QKV_PAGE_TOKENS;
    if (!qkv_layer_holds(layer, position, position + QKV_PAGE_TOKENS)) continue;
    of->positions[of->pages++] = position;
    *exact += position >= tail                    ? QKV_PAGE_TOKENS
              : position + QKV_PAGE_TOKENS > tail ? position + QKV_PAGE_TOKENS - tail
                                                  : 0;
  }
}

static void make_probes(const qkv_comparer *all, sampled *of) {
  const qkv_model *model = all->model;
  const uint64_t last = of->positions[of->pages - 1] + QKV_PAGE_TOKENS;
  const qkv_probe_queries none = {.group = model->q_heads / model->kv_heads,
                                  .last = last,
                                  .rope = &model->rope,
                                  .scale = model->scale,
                                  .soft_cap = qkv_model_cap(model, of->layer)};
  for (size_t i = 0; i < all->heads; i++) {
    const size_t head = spread(i, all->heads, model->kv_heads);
    const qkv_probe_rows rows = {.tokens = of->pages * QKV_PAGE_TOKENS,
                                 .key_dim = model->key_dim,
                                 .value_dim = model->value_dim,
                                 .whole = of->positions[0] == 0 ? QKV_PAGE_TOKENS : 0,
                                 .k_stride = (size_t)model->kv_heads * model->key_dim,
                                 .v_stride = (size_t)model->kv_heads * model->value_dim,
                                 .k = of->rows[QKV_K] + head * model->key_dim,
                                 .v = of->rows[QKV_V] + head * model->value_dim};
    of->probes[i] = qkv_probe_create(&rows, &none);
    qkv_yield_now();
  }
}

static qkv_status take_layer(qkv_comparer *all, uint32_t index, qkv_error *error) {
  const qkv_layer *layer = NULL;
  sampled *of = &all->layers[all->count];
  uint64_t exact = 0;
  *of = (sampled){.layer = index};
  QKV_TRY(qkv_session_read(all->session, index, &layer, error));
  choose_pages(all, layer, of, &exact);
  for (qkv_part part = QKV_K; part <= QKV_V && of->pages > 0; part++) {
    const size_t floats = page_floats(all->model, part);
    of->rows[part] = block(of->pages * floats * sizeof(float));
    for (size_t page = 0; page < of->pages; page++)
      qkv_layer_rows(layer, part, of->positions[page], QKV_PAGE_TOKENS, false, of->rows[part] + page * floats);
  }
  if (all->calibration == NULL && layer->coder->calibration != 0)
    all->calibration = qkv_coding_find_calibration(all->model, layer->coder->calibration);
  qkv_session_read_done(all->session, index);
  if (of->pages == 0) return QKV_OK;
  make_probes(all, of);
  all->count++;
  all->found.layers++;
  all->found.tokens += of->pages * QKV_PAGE_TOKENS;
  all->found.exact += exact;
  return QKV_OK;
}

// ---- Measuring ----

typedef struct measured {
  double bytes, square;  // of pages; sum of squared errors
  size_t pages, errors;
} measured;

static void measure_layer(const qkv_comparer *all, const qkv_coder *coder, const sampled *of, measured *sums) {
  const qkv_model *model = all->model;
  uint8_t *images[QKV_COMPARE_PAGES];
  float *decoded[2];
  for (qkv_part part = QKV_K; part <= QKV_V; part++)
    decoded[part] = block(of->pages * QKV_PAGE_TOKENS * dim_of(model, part) * sizeof(float));
  for (size_t page = 0; page < of->pages; page++, sums->pages++) {
    images[page] = block(coder->codec->page_bytes_max(coder));
    sums->bytes += (double)coder->codec->encode(
        coder, of->positions[page], QKV_PAGE_TOKENS, QKV_FP32, of->rows[QKV_K] + page * page_floats(model, QKV_K),
        of->rows[QKV_V] + page * page_floats(model, QKV_V), NULL, images[page]);
    qkv_yield_now();
  }
  for (size_t i = 0; i < all->heads; i++, sums->errors++) {
    const uint16_t head = (uint16_t)spread(i, all->heads, model->kv_heads);
    for (size_t page = 0; page < of->pages; page++) {
      for (qkv_part part = QKV_K; part <= QKV_V; part++)
        coder->codec->decode(coder, images[page], head, part, false,
                             decoded[part] + page * QKV_PAGE_TOKENS * dim_of(model, part));
    }
    sums->square += qkv_probe_error(of->probes[i], decoded[QKV_K], decoded[QKV_V]);
    qkv_yield_now();
  }
  for (size_t page = 0; page < of->pages; page++) free(images[page]);
  for (qkv_part part = QKV_K; part <= QKV_V; part++) free(decoded[part]);
}

// The session's policy with another codec in it, of all layers.
static void measure_codec(const qkv_comparer *all, const qkv_codec *codec, double bits, qkv_compared *out) {
  const qkv_model *model = all->model;
  const qkv_calibration *calibration = codec->calibrated ? all->calibration : NULL;
  const qkv_coder **coders = calloc(model->layers, sizeof *coders);
  qkv_policy *policies = calloc(model->layers, sizeof *policies), policy = all->config.policy;
  measured sums = {0};
  uint64_t bytes = 0;
  if (coders == NULL || policies == NULL) abort();
  policy.codec = codec;
  policy.codec_v = NULL;
  memset(policy.parameters, 0, sizeof policy.parameters);
  policy.bits_k = policy.bits_v = bits;
  policy.gqa_compensation = false;
  for (uint32_t layer = 0; layer < model->layers; layer++) policies[layer] = policy;
  const qkv_coder_spec spec = qkv_model_coder_spec(model, policies, all->config.purpose, calibration);
  void *made = codec->create(&spec, coders, &bytes);
  for (size_t i = 0; i < all->count; i++) measure_layer(all, coders[all->layers[i].layer], &all->layers[i], &sums);
  codec->destroy(made);
  free((void *)coders);
  free(policies);
  const double page = sums.bytes / (double)sums.pages;
  *out = (qkv_compared){.codec = codec,
                        .bits = bits,
                        .calibrated = calibration != NULL,
                        .bytes = page / QKV_PAGE_TOKENS * model->layers,
                        .coordinate = 8 * page / (double)(page_floats(model, QKV_K) + page_floats(model, QKV_V)),
                        .error = sqrt(sums.square / (double)sums.errors)};
}

// ---- All of it ----

bool qkv_comparer_step(qkv_comparer *comparer) {
  for (; qkv_codec_at(comparer->codec) != NULL; comparer->codec++, comparer->bits = 0) {
    const qkv_codec *codec = qkv_codec_at(comparer->codec);
    const bool taken = !qkv_codec_is_exact(codec) && (!codec->needs_rope || comparer->model->rope.theta != 0);
    for (; taken && comparer->bits < TRIED; comparer->bits++) {
      if (!codec->bits_valid(tried_bits[comparer->bits]) || comparer->found.count == QKV_COMPARE_ROWS_MAX) continue;
      measure_codec(comparer, codec, tried_bits[comparer->bits++], &comparer->found.rows[comparer->found.count++]);
      return true;
    }
  }
  return false;
}

const qkv_comparison *qkv_comparer_found(const qkv_comparer *comparer) {
  return &comparer->found;
}

qkv_status qkv_comparer_create(qkv_session *session, qkv_comparer **out, qkv_error *error) {
  qkv_session_info info;
  qkv_session_read_info(session, &info, NULL);
  const qkv_model *model = info.model;
  const size_t page = (page_floats(model, QKV_K) + page_floats(model, QKV_V)) * sizeof(float);
  const size_t pages = QKV_COMPARE_BYTES / 2 / QKV_COMPARE_LAYERS / page;
  const size_t layers = model->layers < QKV_COMPARE_LAYERS ? model->layers : QKV_COMPARE_LAYERS;
  qkv_comparer *all = calloc(1, sizeof *all);
  qkv_status status = QKV_OK;
  if (all == NULL) abort();
  *all = (qkv_comparer){.session = qkv_session_ref(session),
                        .model = model,
                        .config = info.config,
                        .pages_max = pages < 1                   ? 1
                                     : pages < QKV_COMPARE_PAGES ? pages
                                                                 : QKV_COMPARE_PAGES,
                        .heads = model->kv_heads < QKV_COMPARE_HEADS ? model->kv_heads : QKV_COMPARE_HEADS};
  for (size_t i = 0; i < layers && status == QKV_OK; i++)
    status = take_layer(all, (uint32_t)spread(i, layers, model->layers), error);
  if (status == QKV_OK && all->count == 0)
    status = qkv_fail(error, QKV_FAILED_PRECONDITION, "session %s has less than %d tokens in memory",
                      qkv_session_name(session), QKV_PAGE_TOKENS);
  *out = all;
  if (status != QKV_OK) qkv_comparer_destroy(out);
  return status;
}

void qkv_comparer_destroy(qkv_comparer **comparer) {
  qkv_comparer *all = *comparer;
  if (all == NULL) return;
  for (size_t i = 0; i < all->count; i++) {
    for (size_t head = 0; head < all->heads; head++) qkv_probe_destroy(&all->layers[i].probes[head]);
    for (qkv_part part = QKV_K; part <= QKV_V; part++) free(all->layers[i].rows[part]);
  }
  qkv_calibration_unref(&all->calibration);
  qkv_session_unref(&all->session);
  free(all);
  *comparer = NULL;
}
