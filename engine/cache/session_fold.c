#include "engine/cache/session_fold.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cache/layer_internal.h"
#include "engine/cache/layer_spill.h"
#include "engine/cache/session_internal.h"
#include "engine/cache/session_spill.h"
#include "engine/cache/session_state.h"

#define FOLD_MAGIC UINT64_C(0x444c4f46564b51)  // "QKVFOLD\0"

enum { FOLD_VERSION = 1, STORED_BITS = 40, LOST = 1 << 0, TAKEN = 1 << 1 };

// The layout is drawn in session_fold.h.
typedef struct fold_header {
  uint64_t magic;
  uint32_t version, layers;
  uint64_t length, tokens, bytes;
} fold_header;

typedef struct fold_layer {
  uint64_t forked_to;
  qkv_page_watch watch;
  uint32_t pages, zero;
} fold_layer;

typedef struct fold_page {
  uint64_t record;
  uint32_t bytes, calibration, tokens, flags;
} fold_page;

_Static_assert(sizeof(fold_header) == 40 && sizeof(fold_layer) == 40 && sizeof(fold_page) == 24, "no padding");

bool qkv_session_is_folded(const qkv_session *session) {
  return (atomic_load(&session->state) & QKVI_FOLDED) != 0;
}

// With ids for all of its positions.
uint64_t qkv_session_unfold_cost(const qkv_session *session) {
  if (!qkv_session_is_folded(session)) return 0;
  return qkvi_session_working_cost(session->kind) + qkvi_session_layers_cost(session) +
         (session->folded_ids ? qkv_session_tokens_cost_most(session->folded_length) : 0);
}

bool qkv_session_may_fold(const qkv_session *session) {
  const qkv_session_config *config = &session->kind->config;
  const session_working *working = qkvi_working(session);
  const uint64_t shared = working == NULL ? 0 : atomic_load(&working->bytes_shared);
  return working != NULL && atomic_load(&working->made) != NULL && config->backing != NULL &&
         config->backing->put_fold != NULL && config->max_attention_error == 0 && !atomic_load(&session->pinned) &&
         !atomic_load(&session->staged) && !qkv_session_is_folded(session) &&
         atomic_load(&working->bytes_coded) == shared && atomic_load(&working->bytes_exact) == 0 &&
         atomic_load(&working->tokens_cold) + shared > 0 && atomic_load(&working->unsettled) == 0;
}

int64_t qkv_session_sunk_since_ms(const qkv_session *session) {
  const session_working *working = qkvi_working(session);
  const int64_t used = qkv_session_last_used_ms(session);
  const int64_t tried = working == NULL ? 0 : atomic_load(&working->fold_tried_ms);
  return used > tried ? used : tried;
}

void qkv_session_fold_later(qkv_session *session, int64_t now_ms) {
  session_working *working = qkvi_working(session);
  if (working != NULL) atomic_store(&working->fold_tried_ms, now_ms);
}

// ---- Folding ----

// What is in memory, is there for another session.
static bool range_can_fold(const qkv_page_range *range) {
  return qkvi_range_is_used_elsewhere(range) ||
         (qkvi_range_is_cold(range) && atomic_load_explicit(&range->bytes_full, memory_order_relaxed) == 0);
}

static bool layer_can_fold(const qkv_layer *layer, uint64_t length) {
  if (layer->length != length || layer->sealed != length || layer->tail_count > 0 || layer->saved_rows_count > 0 ||
      layer->settled != layer->page_count || layer->config.quality != NULL)
    return false;
  for (size_t i = 0; i < layer->range_count; i++) {
    if (!range_can_fold(layer->ranges[i].range)) return false;
  }
  for (size_t i = 0; i < layer->page_count; i++) {
    if (qkvi_layer_peek(layer, i).record == 0) return false;
  }
  return true;
}

static bool can_fold(const qkv_session *session, const session_layers *layers, uint64_t length) {
  for (uint32_t i = 0; i < session->kind->model->layers; i++) {
    if (!layer_can_fold(&layers->at[i].layer, length)) return false;
  }
  return true;
}

static uint8_t *put(uint8_t *at, const void *bytes, size_t count) {
  memcpy(at, bytes, count);
  return at + count;
}

// Of those that are not in the trunk.
static size_t own_pages(const qkv_layer *layer, const qkvi_trunk *trunk) {
  const size_t ranges = qkvi_trunk_ranges(trunk, layer->config.layer);
  return ranges == layer->range_count ? 0 : layer->page_count - layer->ranges[ranges].first;
}

static uint8_t *put_pages(uint8_t *at, const qkv_layer *layer, size_t count) {
  for (size_t i = layer->page_count - count; i < layer->page_count; i++) {
    const qkv_page_entry entry = qkvi_layer_peek(layer, i);
    const fold_page page = {.record = entry.record,
                            .bytes = entry.record_bytes,
                            .calibration = entry.coder->calibration,
                            .tokens = entry.tokens,
                            .flags = (entry.record_lost ? LOST : 0) | (entry.taken ? TAKEN : 0)};
    at = put(at, &page, sizeof page);
  }
  return at;
}

// The record, which the caller frees.
static uint8_t *pack(const qkv_session *session, session_working *working, const qkvi_trunk *trunk, uint64_t *bytes) {
  const uint32_t count = session->kind->model->layers;
  const session_layers *layers = atomic_load(&working->made);
  const uint64_t token_pages = qkvi_trunk_token_pages(trunk);
  *bytes = sizeof(fold_header) + count * sizeof(fold_layer) + session->folded_pages * sizeof(fold_page) +
           qkv_session_tokens_packed_bytes(&working->tokens, token_pages);
  uint8_t *record = malloc(*bytes), *at = record;
  if (record == NULL) abort();
  const fold_header header = {.magic = FOLD_MAGIC,
                              .version = FOLD_VERSION,
                              .layers = count,
                              .length = session->folded_length,
                              .tokens = qkv_session_tokens_length(&working->tokens),
                              .bytes = *bytes};
  at = put(at, &header, sizeof header);
  for (uint32_t i = 0; i < count; i++) {
    const qkv_layer *layer = &layers->at[i].layer;
    const fold_layer folded = {
        .forked_to = layer->forked_to, .watch = layer->watch, .pages = (uint32_t)own_pages(layer, trunk)};
    at = put(at, &folded, sizeof folded);
  }
  for (uint32_t i = 0; i < count; i++)
    at = put_pages(at, &layers->at[i].layer, own_pages(&layers->at[i].layer, trunk));
  at = qkv_session_tokens_pack(&working->tokens, token_pages, at);
  assert(at == record + *bytes);
  return record;
}

static uint64_t count_pages(const qkv_session *session, const session_layers *layers, const qkvi_trunk *trunk) {
  uint64_t pages = 0;
  for (uint32_t i = 0; i < session->kind->model->layers; i++) pages += own_pages(&layers->at[i].layer, trunk);
  return pages;
}

void qkvi_session_count_folded(const qkv_session *session, int sign) {
  const uint64_t by = sign > 0 ? 1 : UINT64_MAX;
  qkv_account *account = qkv_account_of(session->kind->arena);
  const uint64_t shared = qkvi_trunk_stored(qkvi_session_trunk(atomic_load(&session->state)));
  (sign > 0 ? qkv_account_add_ssd : qkv_account_drop_ssd)(account, qkvi_session_stored(session) - shared);
  if (session->kind->config.recency != NULL)
    qkv_recency_add_sums(session->kind->config.recency,
                         &(qkv_recency_sums){.folded = by, .folded_pages = by * session->folded_pages});
}

static bool ends_at(const qkv_session *session, const session_layers *layers, uint64_t length) {
  for (uint32_t i = 0; i < session->kind->model->layers; i++) {
    if (layers->at[i].layer.length != length) return false;
  }
  return true;
}

// No other thread has the session: what it has of token ids is taken without the locks that guard it otherwise.
static session_working *take_working(qkv_session *session, uint64_t length, uint64_t stored) {
  session_working *working = qkvi_working(session);
  session->folded_length = (uint32_t)length;
  session->folded_stored = (uint32_t)stored;
  session->folded_stored_high = (uint8_t)(stored >> 32);
  session->folded_ids = working->tokens.length > 0;
  session->folded_holder = working->tokens.holder;
  working->tokens.holder = 0;
  atomic_store(&session->fold_wanted, false);
  qkv_recency_withdraw(session->kind->config.recency, session);
  atomic_store(&session->state, QKVI_FOLDING);
  return working;
}

bool qkvi_session_fold_begin(qkv_session *session, uint32_t references, session_working **working) {
  if (!qkv_session_may_fold(session) || !qkvi_session_try_making(session)) return false;
  const session_layers *made = atomic_load(&qkvi_working(session)->made);
  const uint64_t length = made->at[0].layer.length, stored = atomic_load(&qkvi_working(session)->bytes_stored);
  // What other threads did before they released their references happens before.
  if (atomic_load_explicit(&session->references, memory_order_acquire) != references ||
      !ends_at(session, made, length) || length > UINT32_MAX || stored >> STORED_BITS != 0) {
    qkvi_session_unlock_making(session);
    return false;
  }
  *working = take_working(session, length, stored);
  return true;
}

// What other sessions have left in its ranges would keep it in memory.
static void drop_unseen(const qkv_session *session, session_working *working) {
  const session_layers *layers = atomic_load(&working->made);
  for (uint32_t i = 0; i < session->kind->model->layers; i++) {
    const qkv_layer *layer = &layers->at[i].layer;
    qkvi_layer_pin(layer, 0);
    qkvi_layer_drop_unseen(layer);
    qkvi_layer_unpin(layer);
  }
}

static bool write_record(qkv_session *session, session_working *working, const qkvi_trunk *trunk) {
  const qkv_backing *backing = session->kind->config.backing;
  const session_layers *layers = atomic_load(&working->made);
  uint64_t bytes;
  if (session->detached || !can_fold(session, layers, session->folded_length)) return false;
  const uint64_t pages = count_pages(session, layers, trunk);
  if (pages > UINT32_MAX) return false;
  session->folded_pages = (uint32_t)pages;
  uint8_t *packed = pack(session, working, trunk, &bytes);
  const uint64_t record = backing->put_fold(backing->context, session->id, packed, bytes, &session->fold_wanted);
  free(packed);
  return record != 0;
}

// What is shared stays so until the trunk has it, though other sessions may leave meanwhile.
bool qkvi_session_fold_end(qkv_session *session, session_working *working) {
  const qkvi_session_kind *kind = session->kind;
  drop_unseen(session, working);
  qkvi_trunk *trunk = qkvi_trunk_plan(atomic_load(&working->made), kind->model->layers, &working->tokens);
  const bool written = write_record(session, working, trunk);
  if (written) {
    trunk = qkvi_trunk_keep(trunk, kind->arena);
    atomic_store(&session->state, qkvi_session_keep_folded(session, working, trunk));
    qkvi_session_count_folded(session, 1);
    qkvi_session_free_working(session, working);
  } else {
    qkvi_trunk_discard(trunk);
    qkvi_session_set_working(session, working);
  }
  qkvi_session_unlock_making(session);
  if (!written) qkv_recency_note(session->kind->config.recency, QKV_RECENCY_SUNK, session);
  return written;
}

// ---- Unfolding ----

typedef struct folded {
  const qkv_session *session;
  session_working *working;  // that is being made
  const qkvi_trunk *trunk;
  const uint8_t *bytes;
  uint64_t count;
  fold_header header;
} folded;

static fold_layer layer_of(const folded *all, uint32_t layer) {
  fold_layer out;
  memcpy(&out, all->bytes + sizeof(fold_header) + layer * sizeof out, sizeof out);
  return out;
}

static fold_page page_of(const folded *all, uint64_t page) {
  fold_page out;
  memcpy(&out, all->bytes + sizeof(fold_header) + all->header.layers * sizeof(fold_layer) + page * sizeof out,
         sizeof out);
  return out;
}

// How pages of this calibration are coded in the session, which has kept its codings; NULL: not known.
static const qkv_coding *coding_of(const session_working *working, uint32_t version) {
  for (size_t i = 0; i < working->coding_count; i++) {
    const qkv_calibration *calibration = qkv_coding_calibration(working->codings[i]);
    if ((calibration == NULL ? 0 : qkv_calibration_version(calibration)) == version) return working->codings[i];
  }
  return NULL;
}

// Whether the record has the place for the pages of each layer, behind those of the trunk, that it says. `*pages`
// gets how many there are.
static bool has_pages(const folded *all, uint64_t *pages) {
  const uint64_t fixed = sizeof(fold_header) + all->header.layers * sizeof(fold_layer);
  *pages = 0;
  for (uint32_t i = 0; i < all->header.layers; i++) *pages += layer_of(all, i).pages;
  return *pages <= (all->count - fixed) / sizeof(fold_page);
}

// Whether these pages are possible and reach each layer's length.
static bool pages_are_right(const folded *all) {
  for (uint32_t i = 0, layer_first = 0; i < all->header.layers; i++) {
    uint64_t end = qkvi_trunk_end(all->trunk, i, all->session->kind->config.first_position);
    const uint32_t count = layer_of(all, i).pages;
    for (uint32_t at = layer_first; at < layer_first + count; at++) {
      const fold_page page = page_of(all, at);
      if (page.record == 0 || page.tokens < 1 || page.tokens > QKV_PAGE_TOKENS || page.bytes == 0 ||
          coding_of(all->working, page.calibration) == NULL)
        return false;
      end += page.tokens;
    }
    if (end != all->header.length) return false;
    layer_first += count;
  }
  return true;
}

static uint64_t shared_tokens(const folded *all) {
  return qkvi_trunk_token_pages(all->trunk) * QKV_PREFIX_PAGE;
}

// All but the pages. `*tokens` gets where the token ids begin.
static bool frame_is_right(folded *all, uint64_t *tokens) {
  uint64_t pages;
  if (all->count < sizeof all->header) return false;
  memcpy(&all->header, all->bytes, sizeof all->header);
  if (all->header.magic != FOLD_MAGIC || all->header.version != FOLD_VERSION || all->header.bytes != all->count ||
      all->header.layers != all->session->kind->model->layers || all->header.length != all->session->folded_length ||
      all->header.layers * sizeof(fold_layer) > all->count - sizeof all->header || !has_pages(all, &pages))
    return false;
  *tokens = sizeof all->header + all->header.layers * sizeof(fold_layer) + pages * sizeof(fold_page);
  return all->header.tokens >= shared_tokens(all) &&
         qkv_session_tokens_are_packed(all->bytes + *tokens, all->count - *tokens,
                                       all->header.tokens - shared_tokens(all));
}

static bool is_right(folded *all, uint64_t *tokens) {
  return frame_is_right(all, tokens) && pages_are_right(all);
}

static void unfold_layer(const folded *all, uint32_t index, uint64_t first, qkv_layer *layer) {
  const fold_layer from = layer_of(all, index);
  qkvi_trunk_give_pages(all->trunk, layer);
  const size_t given = layer->range_count;
  for (uint64_t i = first; i < first + from.pages; i++) {
    const fold_page page = page_of(all, i);
    qkv_layer_adopt(layer, qkv_coding_layer(coding_of(all->working, page.calibration), index), page.tokens,
                    page.record, page.bytes);
    qkv_page_entry *entry = qkv_layer_page(layer, layer->page_count - 1);
    entry->lost = entry->record_lost = (page.flags & LOST) != 0;
    entry->taken = (page.flags & TAKEN) != 0;
  }
  layer->forked_to = from.forked_to;
  layer->watch = from.watch;
  for (size_t i = given; i < layer->range_count; i++) qkvi_range_pack(layer->ranges[i].range);
}

static void unfold_layers(qkv_session *session, const folded *all, uint64_t tokens) {
  session_layers *layers = qkvi_session_new_layers(session, all->working);
  uint64_t first = 0;
  for (uint32_t i = 0; i < session->kind->model->layers; i++) {
    unfold_layer(all, i, first, &layers->at[i].layer);
    qkvi_session_publish(session, all->working, &layers->at[i]);
    first += layer_of(all, i).pages;
    qkvi_session_end_new_layer(&layers->at[i]);
  }
  qkvi_trunk_give_tokens(all->trunk, &all->working->tokens);
  qkv_session_tokens_unpack(&all->working->tokens, all->bytes + tokens, all->header.tokens - shared_tokens(all));
  atomic_store(&all->working->shares, all->trunk != NULL);
  atomic_store(&all->working->made, layers);
}

// A buffer that the caller frees; NULL, with *error filled.
static uint8_t *read_record(const qkv_session *session, uint64_t *record, uint64_t *count, qkv_error *error) {
  const qkv_backing *backing = session->kind->config.backing;
  uint8_t *bytes = NULL;
  qkv_error reason = {0};
  const qkv_status status = backing->read_fold(backing->context, session->id, record, &bytes, count, &reason);
  if (status == QKV_OK) return bytes;
  (void)qkv_fail(
      error, status == QKV_NOT_FOUND ? QKV_DATA_LOSS : status, "session %s: its folded layers %s%s", session->name,
      status == QKV_NOT_FOUND ? "are gone" : "cannot be read: ", status == QKV_NOT_FOUND ? "" : reason.text);
  return NULL;
}

// The pages of the record become those of all->working, which has no codings yet.
static qkv_status unfold_record(qkv_session *session, folded *all, qkv_error *error) {
  uint64_t tokens = 0;
  qkvi_session_take_codings(atomic_load(&session->state), all->working);
  if (!is_right(all, &tokens))
    return qkv_fail(error, QKV_DATA_LOSS, "session %s: its folded layers are damaged", session->name);
  unfold_layers(session, all, tokens);
  return QKV_OK;
}

qkv_status qkvi_session_unfold_locked(qkv_session *session, uint64_t *headroom, qkv_error *error) {
  const uint64_t cost = qkv_session_unfold_cost(session);
  const qkv_backing *backing = session->kind->config.backing;
  qkv_arena *arena = session->kind->arena;
  uint64_t record = 0, count = 0, spent = qkvi_session_working_cost(session->kind);
  if (session->detached) return qkv_fail(error, QKV_NOT_FOUND, "session %s has been closed", session->name);
  uint8_t *bytes = read_record(session, &record, &count, error);
  if (bytes == NULL) return error == NULL ? QKV_DATA_LOSS : error->status;
  qkv_status status = qkv_arena_reserve_in(arena, headroom, cost, error);
  if (status == QKV_OK) {
    const uintptr_t kept = atomic_load(&session->state);
    folded all = {.session = session,
                  .working = qkvi_session_new_working(session),
                  .trunk = qkvi_session_trunk(kept),
                  .bytes = bytes,
                  .count = count};
    status = unfold_record(session, &all, error);
    if (status == QKV_OK) {
      spent += qkvi_session_layers_cost(session) +
               qkv_session_tokens_held_cost(&all.working->tokens, qkvi_trunk_token_pages(all.trunk));
      qkvi_session_count_folded(session, -1);
      qkvi_session_set_working(session, all.working);
      qkvi_session_drop_kept(kept);
    } else {
      qkvi_session_free_working(session, all.working);
    }
    qkv_arena_unreserve(arena, cost - spent);
  }
  free(bytes);
  if (status != QKV_OK) return status;
  if (session->kind->config.recency != NULL)
    qkv_recency_add_sums(session->kind->config.recency, &(qkv_recency_sums){.unfolded = 1});
  backing->drop(backing->context, record);
  return QKV_OK;
}

qkv_status qkv_session_unfold(qkv_session *session, uint64_t *headroom, qkv_error *error) {
  return qkv_session_is_folded(session) ? qkvi_session_make_layers(session, headroom, error) : QKV_OK;
}

// ---- Token ids ----

// What the trunk has of them.
static size_t read_shared_pages(const folded *all, uint64_t first, size_t max, qkv_prefix_hash *hashes,
                                uint32_t *ids) {
  qkv_session_tokens shared;
  if (all->trunk == NULL) return 0;
  qkv_session_tokens_init(&shared, &(qkv_session_tokens_config){.arena = all->session->kind->arena,
                                                                .root = qkv_session_root(all->session)});
  qkvi_trunk_give_tokens(all->trunk, &shared);
  const size_t count = qkv_session_tokens_read_pages(&shared, first, max, hashes, ids);
  if (count == 0 && first > 0 && first == qkvi_trunk_token_pages(all->trunk))
    (void)qkv_session_tokens_hash(&shared, first - 1, &hashes[0]);
  qkv_session_tokens_deinit(&shared);
  return count;
}

// And the record, from page number `first` on.
static size_t read_own_pages(folded *all, uint64_t first, size_t max, qkv_prefix_hash *hashes, uint32_t *ids) {
  const qkv_backing *backing = all->session->kind->config.backing;
  uint64_t record = 0, tokens = 0;
  qkv_error ignored = {0};
  uint8_t *bytes = read_record(all->session, &record, &all->count, &ignored);
  if (backing->keep_fold != NULL) backing->keep_fold(backing->context, all->session->id);
  if (bytes == NULL) return 0;
  all->bytes = bytes;
  const size_t count =
      !frame_is_right(all, &tokens)
          ? 0
          : qkv_session_tokens_read_packed(bytes + tokens, all->header.tokens - shared_tokens(all),
                                           qkvi_trunk_token_pages(all->trunk), first, max, hashes, ids);
  free(bytes);
  return count;
}

static size_t read_folded_pages(const qkv_session *session, uint64_t first, size_t max, qkv_prefix_hash *hashes,
                                uint32_t *ids) {
  folded all = {.session = session, .trunk = qkvi_session_trunk(atomic_load(&session->state))};
  const uint64_t shared = qkvi_trunk_token_pages(all.trunk);
  if (session->detached || !session->folded_ids) return 0;
  hashes[0] = qkv_session_root(session);
  const size_t count = first <= shared ? read_shared_pages(&all, first, max, hashes, ids) : 0;
  if (count == max || first + count < shared) return count;
  return count + read_own_pages(&all, first + count, max - count, hashes + count, ids + count * QKV_PREFIX_PAGE);
}

size_t qkv_session_read_pages(qkv_session *session, uint64_t first, size_t max, qkv_prefix_hash *hashes,
                              uint32_t *ids) {
  if (qkv_session_is_folded(session)) {
    qkvi_session_lock_making(session);
    const bool still = qkv_session_is_folded(session);
    const size_t count = still ? read_folded_pages(session, first, max, hashes, ids) : 0;
    qkvi_session_unlock_making(session);
    if (still) return count;
  }
  qkv_session_tokens *tokens = qkv_session_tokens_of(session);
  return tokens == NULL ? 0 : qkv_session_tokens_read_pages(tokens, first, max, hashes, ids);
}
