#include "server/handlers/attend_pieces.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cache/session_spill.h"
#include "server/daemon.h"
#include "server/residency/restore.h"

// A piece takes this part of the budget at most, so that several requests fit concurrently.
enum { BUDGET_PART = 8, TRIES = 8 };

typedef struct pieces {
  const qkv_rpc_call *call;
  qkvi_residency *residency;
  qkv_pool *pool;
  qkv_session *session;
  uint32_t layer;
  const qkv_attend *request;
  size_t held;
  float *out, *lse;  // of one piece
  uint64_t *length;
  uint64_t bytes;  // of a piece, at most
} pieces;

// Tokens of a piece, whole pages, by the average size of the layer's pages.
static uint64_t piece_tokens(const pieces *all) {
  const qkv_layer *layer;
  uint64_t sealed = 0, bytes = 0;
  if (qkv_session_read(all->session, all->layer, &layer, NULL) == QKV_OK) {
    sealed = layer->sealed - layer->config.first_position;
    bytes = qkv_layer_read_usage(layer).bytes_stored;
    qkv_session_read_done(all->session, all->layer);
  }
  const uint64_t page = sealed < QKV_PAGE_TOKENS ? bytes : bytes / (sealed / QKV_PAGE_TOKENS);
  const uint64_t pages = all->bytes / (page + 1);
  return (pages > 0 ? pages : 1) * QKV_PAGE_TOKENS;
}

// With the layer held. False where a page was evicted again, which only a concurrent truncation and appends can
// cause.
static bool run(const pieces *all, uint64_t begin, uint64_t end) {
  const qkv_layer *layer;
  qkv_attend piece = *all->request;
  if (qkv_session_read(all->session, all->layer, &layer, NULL) != QKV_OK) return false;
  const bool held = qkv_layer_holds(layer, begin, end);
  if (held) {
    piece.layer = layer;
    piece.options.begin = begin;
    piece.options.end = end;
    piece.out = all->out;
    piece.lse = all->lse;
    qkv_attend_run(all->pool, &piece, 1);
    *all->length = layer->length;
  }
  qkv_session_read_done(all->session, all->layer);
  return held;
}

static qkv_status attend_piece(const pieces *all, uint64_t begin, uint64_t end, qkv_error *error) {
  qkv_status status = QKV_OK;
  bool done = false;
  const qkvi_wanted wanted = {
      .call = all->call, .session = all->session, .layer = all->layer, .begin = begin, .end = end, .held = all->held};
  for (int i = 0; i < TRIES && status == QKV_OK && !done; i++) {
    status = qkvi_restore(all->residency, &wanted, NULL, error);
    if (status != QKV_OK) break;
    done = run(all, begin, end);
    qkvi_budget_release(all->residency, all->session, all->layer);
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

qkv_status qkvi_attend_pieces(const qkv_rpc_call *call, qkv_pool *pool, qkv_session *session, uint32_t layer,
                              const qkv_attend *request, uint64_t begin, uint64_t end, size_t held, uint64_t *length,
                              qkv_error *error) {
  const qkv_model *model = qkv_session_model(session);
  const size_t rows = (size_t)request->q.dims[0] * model->q_heads, dim = model->value_dim;
  const qkv_daemon *daemon = qkv_rpc_context(call);
  pieces all = {.call = call,
                .residency = daemon->residency,
                .pool = pool,
                .session = session,
                .layer = layer,
                .request = request,
                .held = held,
                .length = length,
                .bytes = qkvi_budget_limit(daemon->residency) / BUDGET_PART};
  all.out = malloc(rows * dim * sizeof *all.out + rows * sizeof *all.lse);
  if (all.out == NULL) abort();
  all.lse = all.out + rows * dim;
  memset(request->out, 0, rows * dim * sizeof *request->out);
  for (size_t i = 0; i < rows; i++) request->lse[i] = -INFINITY;
  const uint64_t step = piece_tokens(&all);
  qkv_status status = QKV_OK;
  for (uint64_t at = begin; at < end && status == QKV_OK; at += step) {
    status = attend_piece(&all, at, end - at < step ? end : at + step, error);
    for (size_t i = 0; i < rows && status == QKV_OK; i++)
      merge(all.out + i * dim, all.lse[i], dim, request->out + i * dim, &request->lse[i]);
  }
  free(all.out);
  return status;
}
