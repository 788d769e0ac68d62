#include "server/handlers/attend_pieces.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/histogram.h"
#include "engine/cache/session_spill.h"
#include "server/daemon.h"
#include "server/residency/restore.h"

// A piece takes this part of the budget at most, or of the tenant's quota, so that several requests fit concurrently.
enum { BUDGET_PART = 8, TRIES = 8 };

struct qkvi_pieces {
  qkvi_pieces_config config;
  qkvi_residency *residency;
  qkv_attend request;
  float *out, *lse;  // of a piece
  uint64_t step;     // tokens of a piece
  uint64_t at;       // where the piece begins
  uint64_t first;    // query of it that is next
  int tries;         // that have not attended any
};

static uint64_t memory_of(const qkvi_pieces *all) {
  const qkv_account *account = qkv_session_account(all->config.session);
  const uint64_t budget = qkvi_budget_limit(all->residency),
                 quota = account == NULL ? 0 : qkv_account_read(account).limits.host_bytes;
  return quota != 0 && quota < budget ? quota : budget;
}

// Tokens of a piece, whole pages, by the average size of the layer's pages.
static uint64_t piece_tokens(const qkvi_pieces *all) {
  const qkv_layer *layer;
  uint64_t sealed = 0, bytes = 0;
  if (qkv_session_read(all->config.session, all->config.layer, &layer, NULL) == QKV_OK) {
    sealed = layer->sealed - layer->config.first_position;
    bytes = qkv_layer_read_usage(layer).bytes_stored;
    qkv_session_read_done(all->config.session, all->config.layer);
  }
  const uint64_t page = sealed < QKV_PAGE_TOKENS ? bytes : bytes / (sealed / QKV_PAGE_TOKENS);
  const uint64_t pages = memory_of(all) / BUDGET_PART / (page + 1);
  return (pages > 0 ? pages : 1) * QKV_PAGE_TOKENS;
}

static size_t rows_of(const qkvi_pieces *all) {
  return (size_t)all->request.q.dims[0] * qkv_session_model(all->config.session)->q_heads;
}

qkvi_pieces *qkvi_pieces_create(const qkvi_pieces_config *config, const qkv_attend *request) {
  qkvi_pieces *all = calloc(1, sizeof *all);
  if (all == NULL) abort();
  const qkv_daemon *daemon = qkv_rpc_context(config->call);
  *all = (qkvi_pieces){.config = *config, .residency = daemon->residency, .request = *request, .at = config->begin};
  const size_t rows = rows_of(all), dim = qkv_session_model(config->session)->value_dim;
  all->out = calloc(rows, (dim + 1) * sizeof *all->out);  // and a row's LSE
  if (all->out == NULL) abort();
  all->lse = all->out + rows * dim;
  memset(request->out, 0, rows * dim * sizeof *request->out);
  for (size_t i = 0; i < rows; i++) request->lse[i] = -INFINITY;
  all->step = piece_tokens(all);
  return all;
}

void qkvi_pieces_destroy(qkvi_pieces **pieces) {
  qkvi_pieces *all = *pieces;
  if (all == NULL) return;
  *pieces = NULL;
  free(all->out);
  free(all);
}

const qkv_attend *qkvi_pieces_request(const qkvi_pieces *pieces) {
  return &pieces->request;
}

qkv_status qkvi_attend_was_cut(qkv_error *error) {
  return qkv_fail(error, QKV_FAILED_PRECONDITION, "session was truncated during the attend");
}

static uint64_t piece_end(const qkvi_pieces *all) {
  return all->config.end - all->at < all->step ? all->config.end : all->at + all->step;
}

// A turn of the piece's queries from `first` on. Attends none where a page was evicted again, which only a concurrent
// truncation and appends can cause.
static qkv_status run_turn(qkvi_pieces *all, qkv_error *error) {
  const qkvi_pieces_config *config = &all->config;
  const qkv_layer *layer;
  uint64_t queries;
  QKV_TRY(qkv_session_read(config->session, config->layer, &layer, error));
  const bool cut = layer->cuts != config->cuts;
  if (!cut && qkv_layer_holds(layer, all->at, piece_end(all))) {
    qkv_attend piece = all->request;
    piece.layer = layer;
    piece.options.begin = all->at;
    piece.options.end = piece_end(all);
    piece.out = all->out;
    piece.lse = all->lse;
    qkv_attend turn = qkv_attend_slice(&piece, all->first, (uint64_t)piece.q.dims[0] - all->first);
    (void)qkv_attend_take(&turn, 1, *config->turn, &queries);
    turn = qkv_attend_slice(&turn, 0, queries);
    const uint64_t began = qkv_stage_now();
    qkv_attend_run(config->pool, &turn, 1);
    *config->turn = qkv_attend_next_cost(*config->turn, qkv_stage_now() - began);
    qkv_stage_add(QKV_STAGE_ATTEND, began);
    all->first += queries;
  }
  qkv_session_read_done(config->session, config->layer);
  return cut ? qkvi_attend_was_cut(error) : QKV_OK;
}

// Merges a piece's row into that of the pieces before.
static void merge(const float *out, float lse, size_t dim, float *all_out, float *all_lse) {
  if (isinf(lse) && lse < 0) return;
  const float top = *all_lse > lse ? *all_lse : lse;
  const float mine = expf(lse - top), theirs = expf(*all_lse - top);
  for (size_t c = 0; c < dim; c++) all_out[c] = (all_out[c] * theirs + out[c] * mine) / (theirs + mine);
  *all_lse = top + logf(theirs + mine);
}

static void end_piece(qkvi_pieces *all) {
  const size_t rows = rows_of(all), dim = qkv_session_model(all->config.session)->value_dim;
  for (size_t i = 0; i < rows; i++)
    merge(all->out + i * dim, all->lse[i], dim, all->request.out + i * dim, &all->request.lse[i]);
  all->at = piece_end(all);
  all->first = 0;
}

// Turns, with the piece in memory, until its queries are attended or others may have the memory.
static qkv_status run_turns(qkvi_pieces *all, uint64_t back_ns, qkv_error *error) {
  const uint64_t began = qkv_stage_now(), queries = (uint64_t)all->request.q.dims[0];
  uint64_t before;
  do {
    if (qkv_rpc_cancelled(all->config.call)) return qkv_fail(error, QKV_CANCELLED, "the client has gone");
    before = all->first;
    QKV_TRY(run_turn(all, error));
  } while (all->first > before && all->first < queries && qkvi_attend_keeps(back_ns, qkv_stage_now() - began));
  return QKV_OK;
}

qkv_status qkvi_pieces_go_on(qkvi_pieces *all, bool *done, qkv_error *error) {
  const qkvi_pieces_config *config = &all->config;
  const uint64_t began = qkv_stage_now(), first = all->first;
  const qkvi_wanted wanted = {.call = config->call,
                              .session = config->session,
                              .layer = config->layer,
                              .begin = all->at,
                              .end = piece_end(all)};
  QKV_TRY(qkvi_restore(all->residency, &wanted, NULL, error));
  const qkv_status status = run_turns(all, qkv_stage_now() - began, error);
  qkvi_budget_release(all->residency, config->session, config->layer);
  QKV_TRY(status);
  all->tries = all->first > first ? 0 : all->tries + 1;
  if (all->tries == TRIES) return qkv_fail(error, QKV_UNAVAILABLE, "the session is changed all the time");
  if (all->first == (uint64_t)all->request.q.dims[0]) end_piece(all);
  *done = all->at == config->end;
  return QKV_OK;
}
