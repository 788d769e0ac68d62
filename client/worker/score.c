#include "client/worker/score.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "client/worker/exact.h"
#include "client/worker/forward.h"
#include "client/worker/remote.h"

enum { APPEND_TOKENS = 4096 };  // rows in one append message

// The cache of the coded pass: the daemon's for the prefix, the worker's for the rest.
typedef struct split_kv {
  qkvi_kv kv;
  int64_t prefill;
  qkvi_remote *prefix;
  qkvi_exact *rest;
  const qkvi_lm *lm;
  float *lse, *prefix_out, *prefix_lse;  // [QKVI_SCORE_BATCH, q_heads (, head_dim)]
} split_kv;

// The cache of a prefix that is run in the daemon, too; what comes back from there is not used.
typedef struct shown_kv {
  qkvi_kv kv;
  qkvi_exact *exact;
  qkvi_remote *remote;
  float *out;  // [QKVI_SCORE_BATCH, q_heads, head_dim]
} shown_kv;

struct qkvi_scorer {
  qkvi_score_options options;
  const qkvi_lm *lm;
  qkv_client *client;
  qkvi_forward *forward;
  qkvi_exact *exact;
  split_kv split;
  float *logits, *exact_logits;  // [length - prefill, vocabulary]
  qkvi_samples attend_us;
  double (*row_error)[2], (*row_square)[2];  // [layers][K, V], sums over windows
  qkv_client_session_info session;
  double windows, bits, square;  // scored, and sums over them: bits per coordinate, squared errors of measured pages
  uint64_t pages, missed;        // likewise: measured, and those of them that miss the contract
  char session_name[QKVI_REMOTE_NAME_MAX];
};

static qkv_status split_step(qkvi_kv *kv, const qkvi_kv_rows *rows, float *out, qkv_error *error) {
  split_kv *split = (split_kv *)kv;
  qkvi_exact_append(split->rest, rows);
  qkvi_exact_attend(split->rest, rows, split->prefill, out, split->lse);
  QKV_TRY(qkvi_remote_attend(split->prefix, rows, split->prefix_out, split->prefix_lse, error));
  qkvi_merge(out, split->lse, split->prefix_out, split->prefix_lse, rows->tokens * split->lm->q_heads,
             split->lm->head_dim);
  return QKV_OK;
}

static qkv_status shown_step(qkvi_kv *kv, const qkvi_kv_rows *rows, float *out, qkv_error *error) {
  shown_kv *shown = (shown_kv *)kv;
  qkvi_kv *exact = qkvi_exact_kv(shown->exact), *remote = qkvi_remote_kv(shown->remote);
  QKV_TRY(exact->step(exact, rows, out, error));
  return remote->step(remote, rows, shown->out, error);
}

static float *floats(int64_t rows, int64_t columns) {
  float *values = calloc((size_t)rows, (size_t)columns * sizeof(float));
  if (values == NULL) abort();
  return values;
}

qkvi_scorer *qkvi_scorer_create(qkv_client *client, const qkvi_lm *lm, const qkvi_score_options *options) {
  assert(options->prefill >= 1 && options->prefill < options->length);
  assert(options->demote_after >= 0 && options->demote_after < options->length - options->prefill);
  qkvi_scorer *scorer = calloc(1, sizeof(*scorer));
  if (scorer == NULL) abort();
  scorer->options = *options;
  scorer->lm = lm;
  scorer->client = client;
  scorer->forward = qkvi_forward_create(lm, QKVI_SCORE_BATCH, options->length);
  scorer->exact = qkvi_exact_create(lm, options->length);
  scorer->split = (split_kv){.kv.step = split_step,
                             .prefill = options->prefill,
                             .rest = qkvi_exact_create(lm, options->length),
                             .lm = lm,
                             .lse = floats(QKVI_SCORE_BATCH, lm->q_heads),
                             .prefix_out = floats(QKVI_SCORE_BATCH, lm->q_heads * lm->head_dim),
                             .prefix_lse = floats(QKVI_SCORE_BATCH, lm->q_heads)};
  scorer->logits = floats(options->length - options->prefill, lm->vocabulary);
  scorer->exact_logits = floats(options->length - options->prefill, lm->vocabulary);
  scorer->row_error = calloc((size_t)lm->layers, sizeof *scorer->row_error);
  scorer->row_square = calloc((size_t)lm->layers, sizeof *scorer->row_square);
  if (scorer->row_error == NULL || scorer->row_square == NULL) abort();
  qkvi_remote_name("qkv-worker-score", scorer->session_name);
  return scorer;
}

void qkvi_scorer_destroy(qkvi_scorer **scorer) {
  if (*scorer == NULL) return;
  qkvi_forward_destroy(&(*scorer)->forward);
  qkvi_exact_destroy(&(*scorer)->exact);
  qkvi_exact_destroy(&(*scorer)->split.rest);
  free((*scorer)->split.lse);
  free((*scorer)->split.prefix_out);
  free((*scorer)->split.prefix_lse);
  free((*scorer)->logits);
  free((*scorer)->exact_logits);
  free((*scorer)->row_error);
  free((*scorer)->row_square);
  qkvi_samples_clear(&(*scorer)->attend_us);
  free(*scorer);
  *scorer = NULL;
}

static int64_t smaller(int64_t a, int64_t b) {
  return a < b ? a : b;
}

// Runs the positions [begin, end) through a cache. The logits of those from `prefill` on go to `keep`, which begins
// there.
static qkv_status run_pass(qkvi_scorer *scorer, const int32_t *window, int64_t begin, int64_t end, qkvi_kv *kv,
                           float *keep, qkv_error *error) {
  int64_t tokens = 0;
  for (int64_t position = begin; position < end; position += tokens) {
    // A batch ends at the prefill, so that it lies on one side of it.
    int64_t side = position < scorer->options.prefill ? scorer->options.prefill : end;
    tokens = smaller(QKVI_SCORE_BATCH, side - position);
    const int64_t scored = position - scorer->options.prefill;
    float *out = scored >= 0 ? keep + scored * scorer->lm->vocabulary : NULL;
    QKV_TRY(qkvi_forward_run(scorer->forward, window + position, tokens, position, kv, scored >= 0 ? tokens : 0, out,
                             error));
  }
  return QKV_OK;
}

static qkv_status append_prefix(qkvi_scorer *scorer, qkvi_remote *remote, qkv_error *error) {
  int64_t tokens = 0;
  for (int64_t layer = 0; layer < scorer->lm->layers; layer++) {
    for (int64_t position = 0; position < scorer->options.prefill; position += tokens) {
      tokens = smaller(APPEND_TOKENS, scorer->options.prefill - position);
      const qkvi_kv_rows rows = {.layer = layer,
                                 .position = position,
                                 .tokens = tokens,
                                 .k = qkvi_exact_k(scorer->exact, layer, position),
                                 .v = qkvi_exact_v(scorer->exact, layer, position)};
      QKV_TRY(qkvi_remote_append(remote, &rows, error));
    }
  }
  return QKV_OK;
}

static qkv_status show_prefix(qkvi_scorer *scorer, const int32_t *window, qkvi_remote *remote, qkv_error *error) {
  shown_kv shown = {.kv.step = shown_step,
                    .exact = scorer->exact,
                    .remote = remote,
                    .out = floats(QKVI_SCORE_BATCH, scorer->lm->q_heads * scorer->lm->head_dim)};
  qkv_status status = run_pass(scorer, window, 0, scorer->options.prefill, &shown.kv, NULL, error);
  free(shown.out);
  return status;
}

static void add_session(qkvi_scorer *scorer) {
  const qkv_client_session_info *session = &scorer->session;
  scorer->windows++;
  scorer->bits += session->bits_per_coordinate;
  scorer->pages += session->contract_pages;
  scorer->missed += session->contract_missed;
  scorer->square += session->attention_error * session->attention_error * (double)session->contract_pages;
}

static qkv_status compare_prefix(qkvi_scorer *scorer, qkvi_remote *remote, qkv_error *error) {
  for (int64_t layer = 0; layer < scorer->lm->layers; layer++) {
    const qkvi_kv_rows rows = {.layer = layer,
                               .tokens = scorer->options.prefill,
                               .k = qkvi_exact_k(scorer->exact, layer, 0),
                               .v = qkvi_exact_v(scorer->exact, layer, 0)};
    QKV_TRY(qkvi_remote_compare(remote, &rows, scorer->row_error[layer], scorer->row_square[layer], error));
  }
  return QKV_OK;
}

// Whether the daemon is to see the queries of the prefix.
static bool asks_attention(const qkvi_score_options *options) {
  return options->max_attention_error > 0 || (options->demote_bits > 0 && !options->demote_even);
}

static qkv_status coded_pass(qkvi_scorer *scorer, const int32_t *window, qkvi_remote *remote, float *logits,
                             qkv_error *error) {
  const qkvi_score_options *options = &scorer->options;
  const int64_t from = options->prefill + options->demote_after;
  QKV_TRY(asks_attention(options) ? show_prefix(scorer, window, remote, error)
                                  : append_prefix(scorer, remote, error));
  scorer->split.prefix = remote;
  QKV_TRY(run_pass(scorer, window, options->prefill, from, &scorer->split.kv, logits, error));
  if (options->demote_bits > 0) {
    QKV_TRY(qkvi_remote_demote(remote, options->demote_bits, options->demote_even, error));
  }
  QKV_TRY(compare_prefix(scorer, remote, error));
  QKV_TRY(qkvi_remote_info(remote, &scorer->session, error));
  add_session(scorer);
  qkvi_remote_measure(remote, &scorer->attend_us);
  return run_pass(scorer, window, from, options->length, &scorer->split.kv, logits, error);
}

static qkv_status coded_logits(qkvi_scorer *scorer, const int32_t *window, float *logits, qkv_error *error) {
  const qkvi_remote_options options = {.session = scorer->session_name,
                                       .codec = scorer->options.codec,
                                       .codec_v = scorer->options.codec_v,
                                       .bits_k = scorer->options.bits_k,
                                       .bits_v = scorer->options.bits_v,
                                       .recent_window = 0,
                                       .purpose = scorer->options.purpose,
                                       .max_attention_error = scorer->options.max_attention_error,
                                       .anchor = scorer->options.anchor,
                                       .calibration = scorer->options.calibration,
                                       .calibration_bytes = scorer->options.calibration_bytes,
                                       .precision = scorer->options.precision};
  qkvi_remote *remote = NULL;
  QKV_TRY(qkvi_remote_open(scorer->client, scorer->lm, &options, &remote, error));
  qkv_status status = coded_pass(scorer, window, remote, logits, error);
  qkv_status closed = qkvi_remote_close(&remote, false, error);
  return status != QKV_OK ? status : closed;
}

qkv_status qkvi_score_window(qkvi_scorer *scorer, const int32_t *window, qkvi_quality *quality, qkv_error *error) {
  int64_t prefill = scorer->options.prefill, scored = scorer->options.length - prefill;
  QKV_TRY(
      run_pass(scorer, window, 0, scorer->options.length, qkvi_exact_kv(scorer->exact), scorer->exact_logits, error));
  const int64_t vocabulary = scorer->lm->vocabulary;
  qkv_status status = coded_logits(scorer, window, scorer->logits, error);
  for (int64_t i = scorer->options.demote_after; status == QKV_OK && i < scored; i++) {
    qkvi_quality_add(quality, scorer->exact_logits + i * vocabulary, scorer->logits + i * vocabulary, vocabulary,
                     window[prefill + i + 1]);
  }
  return status;
}

qkv_client_session_info qkvi_scorer_session(const qkvi_scorer *scorer) {
  qkv_client_session_info session = scorer->session;
  if (scorer->windows > 0) session.bits_per_coordinate = scorer->bits / scorer->windows;
  if (scorer->pages > 0) session.attention_error = sqrt(scorer->square / (double)scorer->pages);
  session.contract_pages = scorer->pages;
  session.contract_missed = scorer->missed;
  return session;
}

qkvi_score_errors qkvi_scorer_errors(const qkvi_scorer *scorer) {
  double mean[2] = {0};
  for (int64_t layer = 0; layer < scorer->lm->layers; layer++) {
    for (int part = 0; part < 2; part++) {
      mean[part] += scorer->row_error[layer][part] / scorer->row_square[layer][part] / (double)scorer->lm->layers;
    }
  }
  return (qkvi_score_errors){mean[0], mean[1]};
}

qkvi_samples *qkvi_scorer_attend_us(qkvi_scorer *scorer) {
  return &scorer->attend_us;
}
