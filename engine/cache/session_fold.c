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

enum { FOLD_VERSION = 1, LOST = 1 << 0, TAKEN = 1 << 1 };

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

static bool has_layers(const qkv_session *session) {
  return atomic_load(&session->made) != NULL;
}

bool qkv_session_is_folded(const qkv_session *session) {
  return atomic_load(&session->fold.record) != 0;
}

uint64_t qkv_session_unfold_cost(const qkv_session *session) {
  return qkv_session_is_folded(session) ? session->fold.layers->cost : 0;
}

bool qkv_session_may_fold(const qkv_session *session) {
  const qkv_session_config *config = &session->config;
  return config->backing != NULL && config->backing->put_fold != NULL && config->max_attention_error == 0 &&
         !atomic_load(&session->pinned) && !atomic_load(&session->staged) && !qkv_session_is_folded(session) &&
         has_layers(session) && atomic_load(&session->bytes_coded) == 0 && atomic_load(&session->bytes_exact) == 0 &&
         atomic_load(&session->tokens_cold) > 0 && atomic_load(&session->unsettled) == 0;
}

int64_t qkv_session_sunk_since_ms(const qkv_session *session) {
  const int64_t used = qkv_session_last_used_ms(session), tried = atomic_load(&session->fold.tried_ms);
  return used > tried ? used : tried;
}

void qkv_session_fold_later(qkv_session *session, int64_t now_ms) {
  atomic_store(&session->fold.tried_ms, now_ms);
}

size_t qkv_session_indexed_hashes(qkv_session *session, qkv_prefix_hash *hashes, size_t max) {
  return qkv_session_tokens_indexed(&session->tokens, hashes, max);
}

// ---- Folding ----

static bool range_is_folded(const qkv_page_range *range) {
  return !qkvi_range_is_shared(range) && qkvi_range_is_cold(range) &&
         atomic_load_explicit(&range->bytes_full, memory_order_relaxed) == 0;
}

static bool layer_can_fold(const qkv_layer *layer, uint64_t length) {
  if (layer->length != length || layer->sealed != length || layer->tail_count > 0 || layer->saved_rows_count > 0 ||
      layer->settled != layer->page_count || layer->config.quality != NULL)
    return false;
  for (size_t i = 0; i < layer->range_count; i++) {
    if (!range_is_folded(layer->ranges[i].range)) return false;
  }
  for (size_t i = 0; i < layer->page_count; i++) {
    if (qkvi_layer_peek(layer, i).record == 0) return false;
  }
  return true;
}

static bool can_fold(const qkv_session *session, const session_layers *layers) {
  for (uint32_t i = 0; i < session->model->layers; i++) {
    if (!layer_can_fold(&layers->at[i].layer, session->fold.layers->length)) return false;
  }
  return true;
}

static uint8_t *put(uint8_t *at, const void *bytes, size_t count) {
  memcpy(at, bytes, count);
  return at + count;
}

static uint8_t *put_pages(uint8_t *at, const qkv_layer *layer) {
  for (size_t i = 0; i < layer->page_count; i++) {
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
static uint8_t *pack(qkv_session *session, const session_layers *layers, uint64_t *bytes) {
  const uint32_t count = session->model->layers;
  *bytes = sizeof(fold_header) + count * sizeof(fold_layer) + qkv_session_tokens_packed_bytes(&session->tokens);
  for (uint32_t i = 0; i < count; i++) *bytes += layers->at[i].layer.page_count * sizeof(fold_page);
  uint8_t *record = malloc(*bytes), *at = record;
  if (record == NULL) abort();
  const fold_header header = {.magic = FOLD_MAGIC,
                              .version = FOLD_VERSION,
                              .layers = count,
                              .length = session->fold.layers->length,
                              .tokens = qkv_session_tokens_length(&session->tokens),
                              .bytes = *bytes};
  at = put(at, &header, sizeof header);
  for (uint32_t i = 0; i < count; i++) {
    const qkv_layer *layer = &layers->at[i].layer;
    const fold_layer folded = {
        .forked_to = layer->forked_to, .watch = layer->watch, .pages = (uint32_t)layer->page_count};
    at = put(at, &folded, sizeof folded);
  }
  for (uint32_t i = 0; i < count; i++) at = put_pages(at, &layers->at[i].layer);
  at = qkv_session_tokens_pack(&session->tokens, at);
  assert(at == record + *bytes);
  return record;
}

static void count_pages(qkv_session *session, const session_layers *layers) {
  session->fold.layers->stored = session->fold.layers->pages = 0;
  for (uint32_t i = 0; i < session->model->layers; i++) {
    const qkv_layer *layer = &layers->at[i].layer;
    session->fold.layers->pages += layer->page_count;
    for (size_t page = 0; page < layer->page_count; page++)
      session->fold.layers->stored += qkvi_layer_peek(layer, page).record_bytes;
  }
}

void qkvi_session_count_folded(const qkv_session *session, int sign) {
  const uint64_t by = sign > 0 ? 1 : UINT64_MAX;
  qkv_account *account = qkv_account_of(session->arena);
  (sign > 0 ? qkv_account_add_ssd : qkv_account_drop_ssd)(account, session->fold.layers->stored);
  if (session->config.recency != NULL)
    qkv_recency_add_sums(session->config.recency,
                         &(qkv_recency_sums){.folded = by, .folded_pages = by * session->fold.layers->pages});
}

static bool ends_at(const qkv_session *session, const session_layers *layers, uint64_t length) {
  for (uint32_t i = 0; i < session->model->layers; i++) {
    if (layers->at[i].layer.length != length) return false;
  }
  return true;
}

bool qkvi_session_fold_begin(qkv_session *session, uint64_t references, session_layers **layers) {
  if (!qkv_session_may_fold(session) || pthread_mutex_trylock(&session->making) != 0) return false;
  const session_layers *made = atomic_load(&session->made);
  const uint64_t length = made->at[0].layer.length;
  // What other threads did before they released their references happens before.
  if (atomic_load_explicit(&session->references, memory_order_acquire) != references ||
      !ends_at(session, made, length)) {
    (void)pthread_mutex_unlock(&session->making);
    return false;
  }
  if (session->fold.layers == NULL) session->fold.layers = calloc(1, sizeof *session->fold.layers);
  if (session->fold.layers == NULL) abort();
  session->fold.layers->length = length;
  atomic_store(&session->fold.wanted, false);
  atomic_store(&session->fold.record, QKVI_FOLDING);
  *layers = atomic_exchange(&session->made, NULL);
  return true;
}

// The number of the record; 0: it is not folded.
static uint64_t write_record(qkv_session *session, const session_layers *layers) {
  const qkv_backing *backing = session->config.backing;
  uint64_t bytes;
  if (session->detached || !can_fold(session, layers)) return 0;
  atomic_store(&session->fold.layers->cost,
               qkvi_session_layers_cost(session) + qkv_session_tokens_held_cost(&session->tokens));
  count_pages(session, layers);
  uint8_t *packed = pack(session, layers, &bytes);
  session->fold.layers->bytes = bytes;
  const uint64_t record =
      backing->put_fold(backing->context, session->config.id, packed, bytes, &session->fold.wanted);
  free(packed);
  return record;
}

bool qkvi_session_fold_end(qkv_session *session, session_layers *layers) {
  const uint64_t record = write_record(session, layers);
  if (record == 0) {
    atomic_store(&session->made, layers);
    atomic_store(&session->fold.record, 0);
    (void)pthread_mutex_unlock(&session->making);
    return false;
  }
  qkvi_session_count_folded(session, 1);
  qkv_session_tokens_forget(&session->tokens);
  atomic_store(&session->bytes_kept, 0);
  atomic_store(&session->fold.record, record);
  qkvi_session_free_layers(session, layers);
  (void)pthread_mutex_unlock(&session->making);
  qkv_recency_note(session->config.recency, QKV_RECENCY_SUNK, session);
  return true;
}

// ---- Unfolding ----

typedef struct folded {
  const qkv_session *session;
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
static const qkv_coding *coding_of(const qkv_session *session, uint32_t version) {
  for (size_t i = 0; i < session->coding_count; i++) {
    const qkv_calibration *calibration = qkv_coding_calibration(session->codings[i]);
    if ((calibration == NULL ? 0 : qkv_calibration_version(calibration)) == version) return session->codings[i];
  }
  return NULL;
}

// Whether the pages of each layer are possible and reach its length. `*pages` gets how many there are.
static bool pages_are_right(const folded *all, uint64_t *pages) {
  const uint64_t fixed = sizeof(fold_header) + all->header.layers * sizeof(fold_layer);
  *pages = 0;
  for (uint32_t i = 0; i < all->header.layers; i++) *pages += layer_of(all, i).pages;
  if (*pages > (all->count - fixed) / sizeof(fold_page)) return false;
  for (uint32_t i = 0, layer_first = 0; i < all->header.layers; i++) {
    uint64_t end = all->session->config.first_position;
    const uint32_t count = layer_of(all, i).pages;
    for (uint32_t at = layer_first; at < layer_first + count; at++) {
      const fold_page page = page_of(all, at);
      if (page.record == 0 || page.tokens < 1 || page.tokens > QKV_PAGE_TOKENS || page.bytes == 0 ||
          coding_of(all->session, page.calibration) == NULL)
        return false;
      end += page.tokens;
    }
    if (end != all->header.length) return false;
    layer_first += count;
  }
  return true;
}

// `*tokens` gets where the token ids begin.
static bool is_right(folded *all, uint64_t *tokens) {
  uint64_t pages;
  if (all->count < sizeof all->header) return false;
  memcpy(&all->header, all->bytes, sizeof all->header);
  if (all->header.magic != FOLD_MAGIC || all->header.version != FOLD_VERSION || all->header.bytes != all->count ||
      all->header.layers != all->session->model->layers || all->header.length != all->session->fold.layers->length ||
      all->header.layers * sizeof(fold_layer) > all->count - sizeof all->header || !pages_are_right(all, &pages))
    return false;
  *tokens = sizeof all->header + all->header.layers * sizeof(fold_layer) + pages * sizeof(fold_page);
  return qkv_session_tokens_are_packed(all->bytes + *tokens, all->count - *tokens, all->header.tokens);
}

static void unfold_layer(const folded *all, uint32_t index, uint64_t first, qkv_layer *layer) {
  const fold_layer from = layer_of(all, index);
  for (uint64_t i = first; i < first + from.pages; i++) {
    const fold_page page = page_of(all, i);
    qkv_layer_adopt(layer, qkv_coding_layer(coding_of(all->session, page.calibration), index), page.tokens,
                    page.record, page.bytes);
    qkv_page_entry *entry = qkv_layer_page(layer, layer->page_count - 1);
    entry->lost = entry->record_lost = (page.flags & LOST) != 0;
    entry->taken = (page.flags & TAKEN) != 0;
  }
  layer->forked_to = from.forked_to;
  layer->watch = from.watch;
  qkv_layer_adopted(layer);
}

// The arena's memory has been reserved.
static session_layers *unfold_layers(qkv_session *session, const folded *all, uint64_t tokens) {
  session_layers *layers = qkvi_session_new_layers(session);
  uint64_t first = 0;
  for (uint32_t i = 0; i < session->model->layers; i++) {
    unfold_layer(all, i, first, &layers->at[i].layer);
    first += layer_of(all, i).pages;
    qkvi_session_end_new_layer(&layers->at[i]);
  }
  qkv_session_tokens_give_open(&session->tokens, layers->open);
  qkv_session_tokens_unpack(&session->tokens, all->bytes + tokens, all->header.tokens);
  return layers;
}

// A buffer that the caller frees; NULL, with *error filled.
static uint8_t *read_record(const qkv_session *session, uint64_t record, qkv_error *error) {
  const qkv_backing *backing = session->config.backing;
  uint8_t *bytes = malloc(session->fold.layers->bytes);
  if (bytes == NULL) abort();
  qkv_error reason = {0};
  const qkv_status status =
      backing->read_fold(backing->context, session->config.id, record, bytes, session->fold.layers->bytes, &reason);
  if (status == QKV_OK) return bytes;
  free(bytes);
  (void)qkv_fail(error, status == QKV_NOT_FOUND ? QKV_DATA_LOSS : status, "session %s: its folded layers %s%s",
                 session->config.name, status == QKV_NOT_FOUND ? "are gone" : "cannot be read: ",
                 status == QKV_NOT_FOUND ? "" : reason.text);
  return NULL;
}

// The sums are what they were.
static void publish_all(qkv_session *session, session_layers *layers) {
  uint64_t cold = 0, stored = 0, kept = 0;
  for (uint32_t i = 0; i < session->model->layers; i++) {
    locked_layer *layer = &layers->at[i];
    layer->usage = qkv_layer_read_usage(&layer->layer);
    layer->length = layer->layer.length;
    layer->durable = qkv_layer_durable(&layer->layer);
    cold += layer->usage.tokens_cold;
    stored += layer->usage.bytes_stored;
    kept += layer->usage.bytes_overhead;
  }
  atomic_store(&session->tokens_cold, cold);
  atomic_store(&session->bytes_stored, stored);
  atomic_store(&session->bytes_kept, kept);
}

qkv_status qkvi_session_unfold_locked(qkv_session *session, uint64_t *headroom, qkv_error *error) {
  const uint64_t record = atomic_load(&session->fold.record);
  const qkv_backing *backing = session->config.backing;
  if (session->detached) return qkv_fail(error, QKV_NOT_FOUND, "session %s has been closed", session->config.name);
  uint8_t *bytes = read_record(session, record, error);
  if (bytes == NULL) return error == NULL ? QKV_DATA_LOSS : error->status;
  folded all = {.session = session, .bytes = bytes, .count = session->fold.layers->bytes};
  uint64_t tokens = 0;
  qkv_status status = QKV_OK;
  if (!is_right(&all, &tokens))
    status = qkv_fail(error, QKV_DATA_LOSS, "session %s: its folded layers are damaged", session->config.name);
  if (status == QKV_OK) status = qkv_arena_reserve_in(session->arena, headroom, session->fold.layers->cost, error);
  if (status != QKV_OK) {
    free(bytes);
    return status;
  }
  session_layers *layers = unfold_layers(session, &all, tokens);
  free(bytes);
  qkvi_session_count_folded(session, -1);
  publish_all(session, layers);
  if (session->config.recency != NULL)
    qkv_recency_add_sums(session->config.recency, &(qkv_recency_sums){.unfolded = 1});
  atomic_store(&session->made, layers);
  atomic_store(&session->fold.record, 0);
  backing->drop(backing->context, record);
  return QKV_OK;
}

qkv_status qkv_session_unfold(qkv_session *session, uint64_t *headroom, qkv_error *error) {
  return qkv_session_is_folded(session) ? qkvi_session_make_layers(session, headroom, error) : QKV_OK;
}
