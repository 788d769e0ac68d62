#include "server/handlers/attend_pieces.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/histogram.h"
#include "engine/cache/session_spill.h"
#include "server/daemon.h"
#include "server/residency/restore.h"

// A piece takes this part of the budget at most, so that several requests fit concurrently.
enum { BUDGET_PART = 8, TRIES = 8 };

typedef struct pieces {
  qkvi_pieces wanted;
  qkvi_residency *residency;
  const qkv_attend *request;
  float *out, *lse;  // of one piece
  uint64_t bytes;    // of a piece, at most
} pieces;

// Tokens of a piece, whole pages, by the average size of the layer's pages.
static uint64_t piece_tokens(const pieces *all) {
  const qkv_layer *layer;
  uint64_t sealed = 0, bytes = 0;
  if (qkv_session_read(all->wanted.session, all->wanted.layer, &layer, NULL) == QKV_OK) {
    sealed = layer->sealed - layer->config.first_position;
    bytes = qkv_layer_read_usage(layer).bytes_stored;
    qkv_session_read_done(all->wanted.session, all->wanted.layer);
  }
  const uint64_t page = sealed < QKV_PAGE_TOKENS ? bytes : bytes / (sealed / QKV_PAGE_TOKENS);
  const uint64_t pages = all->bytes / (page + 1);
  return (pages > 0 ? pages : 1) * QKV_PAGE_TOKENS;
}

qkv_status qkvi_attend_was_cut(qkv_error *error) {
  return qkv_fail(error, QKV_FAILED_PRECONDITION, "session was truncated during the attend");
}

// A turn of the queries from `*first` on, which it moves forward. False in *held where a page was evicted again,
// which only a concurrent truncation and appends can cause.
static qkv_status run_turn(const pieces *all, qkv_attend *piece, uint64_t *first, bool *held, qkv_error *error) {
  const qkvi_pieces *wanted = &all->wanted;
  const qkv_layer *layer;
  uint64_t queries;
  QKV_TRY(qkv_session_read(wanted->session, wanted->layer, &layer, error));
  const bool cut = layer->cuts != wanted->cuts;
  *held = !cut && qkv_layer_holds(layer, piece->options.begin, piece->options.end);
  if (*held) {
    piece->layer = layer;
    qkv_attend turn = qkv_attend_slice(piece, *first, (uint64_t)piece->q.dims[0] - *first);
    (void)qkv_attend_take(&turn, 1, *wanted->turn, &queries);
    turn = qkv_attend_slice(&turn, 0, queries);
    const uint64_t began = qkv_stage_now();
    qkv_attend_run(wanted->pool, &turn, 1);
    *wanted->turn = qkv_attend_next_cost(*wanted->turn, qkv_stage_now() - began);
    *first += queries;
  }
  qkv_session_read_done(wanted->session, wanted->layer);
  return cut ? qkvi_attend_was_cut(error) : QKV_OK;
}

// With the layer held. `*held` as of run_turn.
static qkv_status run(const pieces *all, uint64_t begin, uint64_t end, bool *held, qkv_error *error) {
  qkv_attend piece = *all->request;
  piece.options.begin = begin;
  piece.options.end = end;
  piece.out = all->out;
  piece.lse = all->lse;
  *held = true;
  for (uint64_t first = 0; *held && first < (uint64_t)piece.q.dims[0];) {
    if (qkv_rpc_cancelled(all->wanted.call)) return qkv_fail(error, QKV_CANCELLED, "the client has gone");
    QKV_TRY(run_turn(all, &piece, &first, held, error));
  }
  return QKV_OK;
}

static qkv_status attend_piece(const pieces *all, uint64_t begin, uint64_t end, qkv_error *error) {
  const qkvi_pieces *of = &all->wanted;
  qkv_status status = QKV_OK;
  bool done = false;
  const qkvi_wanted wanted = {
      .call = of->call, .session = of->session, .layer = of->layer, .begin = begin, .end = end, .held = of->held};
  for (int i = 0; i < TRIES && status == QKV_OK && !done; i++) {
    status = qkvi_restore(all->residency, &wanted, NULL, error);
    if (status != QKV_OK) break;
    status = run(all, begin, end, &done, error);
    qkvi_budget_release(all->residency, of->session, of->layer);
  }
  if (status == QKV_OK && !done) status = qkv_fail(error, QKV_UNAVAILABLE, "the session is changed all the time");
  return status;
}

// Merges a piece's row into that of the pieces before.
static void merge(const float *out, float lse, size_t dim, float *all_out, float *all_lse) {
  if (isinf(lse) && lse < 0) return;
  const float top = *all_lse > lse ? *all_lse : lse;
  const float mine = expf(lse - top), theirs = expf(*all_lse - top);
  for (size_t c = 0; c < dim; c++) all_out[c] = (all_out[c] * theirs + out[c] * mine) / (theirs + mine);
  *all_lse = top + logf(theirs + mine);
}

qkv_status qkvi_attend_pieces(const qkvi_pieces *wanted, const qkv_attend *request, qkv_error *error) {
  const qkv_model *model = qkv_session_model(wanted->session);
  const size_t rows = (size_t)request->q.dims[0] * model->q_heads, dim = model->value_dim;
  const qkv_daemon *daemon = qkv_rpc_context(wanted->call);
  pieces all = {.wanted = *wanted,
                .residency = daemon->residency,
                .request = request,
                .bytes = qkvi_budget_limit(daemon->residency) / BUDGET_PART};
  all.out = calloc(rows, (dim + 1) * sizeof *all.out);  // and a row's LSE
  if (all.out == NULL) abort();
  all.lse = all.out + rows * dim;
  memset(request->out, 0, rows * dim * sizeof *request->out);
  for (size_t i = 0; i < rows; i++) request->lse[i] = -INFINITY;
  const uint64_t step = piece_tokens(&all);
  qkv_status status = QKV_OK;
  for (uint64_t at = wanted->begin; at < wanted->end && status == QKV_OK; at += step) {
    status = attend_piece(&all, at, wanted->end - at < step ? wanted->end : at + step, error);
    for (size_t i = 0; i < rows && status == QKV_OK; i++)
      merge(all.out + i * dim, all.lse[i], dim, request->out + i * dim, &request->lse[i]);
  }
  free(all.out);
  return status;
}
