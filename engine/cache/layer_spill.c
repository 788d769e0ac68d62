#include "engine/cache/layer_spill.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>

#include "engine/cache/layer_internal.h"

qkv_record_state qkvi_layer_record_state(const qkv_layer *layer, const qkv_page_entry *entry) {
  const qkv_backing *backing = layer->config.backing;
  if (backing == NULL || entry->record == 0) return QKV_RECORD_GONE;
  return backing->state(backing->context, entry->record);
}

// ---- Writing ----

// Chained hashes of pages whose token ids come with the rows that are being appended, from page number `first` on.
typedef struct coming_hashes {
  uint64_t first;
  size_t count;
  qkv_prefix_hash *hashes;
} coming_hashes;

// The session keeps the ids once the rows are appended, which is after their pages are written.
static coming_hashes hash_coming(const qkv_layer *layer, const qkv_row_ids *coming) {
  coming_hashes made = {0};
  if (layer->config.tokens == NULL || coming == NULL || layer->saved == layer->page_count) return made;
  const size_t pages = qkv_session_tokens_pages(coming->position, coming->count);
  if (pages == 0) return made;
  made.hashes = malloc(pages * sizeof *made.hashes);
  if (made.hashes == NULL) abort();
  made.first = coming->position / QKV_PREFIX_PAGE;
  made.count =
      qkv_session_tokens_chain(layer->config.tokens, coming->position, coming->ids, coming->count, made.hashes);
  return made;
}

// Pages of token ids begin at multiples of 64.
static bool has_hash(const qkv_layer *layer, const qkv_page_entry *entry, const coming_hashes *coming,
                     qkv_prefix_hash *hash) {
  const uint64_t page = entry->position / QKV_PREFIX_PAGE;
  if (layer->config.tokens == NULL || entry->tokens != QKV_PREFIX_PAGE || entry->position % QKV_PREFIX_PAGE != 0)
    return false;
  if (qkv_session_tokens_hash(layer->config.tokens, page, hash)) return true;
  if (page < coming->first || page - coming->first >= coming->count) return false;
  *hash = coming->hashes[page - coming->first];
  return true;
}

// A record is its session's and those of sessions that are forked from it later. So a page that other layers share
// and that has no record is copied to the layer first.
static bool put_page(qkv_layer *layer, size_t index, const coming_hashes *coming) {
  const qkv_backing *backing = layer->config.backing;
  if (qkv_layer_page(layer, index)->record != 0) return true;
  qkv_page_range *range = qkvi_layer_own_range(layer, qkv_layer_range_of(layer, index));
  qkv_page_entry *entry = qkv_layer_page(layer, index);
  assert(entry->page != NULL);
  const uint32_t bytes = entry->full != NULL ? entry->full_bytes : entry->bytes;
  if (!qkv_account_claim_ssd(range->account, bytes)) return false;
  _Atomic uint32_t **holders = entry->full != NULL ? &entry->full_holders : &entry->page_holders;
  qkv_page_hold hold =
      qkv_page_hold_image(layer->config.arena, entry->full != NULL ? entry->full : entry->page, bytes, holders);
  qkv_prefix_hash hash;
  entry->record = backing->put(backing->context, layer->config.session, layer->config.model, &hold, entry->tokens,
                               has_hash(layer, entry, coming, &hash) ? &hash : NULL);
  if (entry->record == 0) {
    qkv_account_drop_ssd(range->account, bytes);
    return false;
  }
  qkvi_range_count(range, entry, -1);
  entry->record_bytes = bytes;
  entry->record_lost = entry->lost;
  qkvi_range_count(range, entry, 1);
  return true;
}

static bool save_pages(qkv_layer *layer, const qkv_row_ids *coming) {
  const coming_hashes hashes = hash_coming(layer, coming);
  while (layer->saved < layer->page_count && put_page(layer, layer->saved, &hashes)) layer->saved++;
  free(hashes.hashes);
  return layer->saved == layer->page_count;
}

bool qkv_layer_save(qkv_layer *layer) {
  return qkv_layer_save_with(layer, NULL);
}

bool qkv_layer_save_with(qkv_layer *layer, const qkv_row_ids *coming) {
  if (layer->config.backing == NULL) return true;
  const bool pages = save_pages(layer, coming);
  return qkvi_layer_rows_save(layer, coming) && pages;
}

bool qkv_layer_is_settled(const qkv_layer *layer) {
  return layer->settled == layer->page_count && qkvi_layer_rows_are_settled(layer);
}

static qkv_record_state state_at(const qkv_layer *layer, size_t index, bool *held) {
  qkv_page_range *range = layer->ranges[qkv_layer_range_of(layer, index)].range;
  const qkv_page_entry *entry = qkv_layer_page(layer, index);
  qkvi_range_lock(range);
  const qkv_record_state state = qkvi_layer_record_state(layer, entry);
  *held = entry->page != NULL;
  qkvi_range_unlock(range);
  return state;
}

// All at once: where one record has failed others have, too, and each try takes until the page is durable.
static void put_again(qkv_layer *layer) {
  for (size_t i = layer->settled; i < layer->saved; i++) {
    bool held;
    if (state_at(layer, i, &held) != QKV_RECORD_GONE || !held) continue;
    qkv_page_range *range = qkvi_layer_own_range(layer, qkv_layer_range_of(layer, i));
    qkv_page_entry *entry = qkv_layer_page(layer, i);
    qkvi_range_count(range, entry, -1);
    if (entry->record != 0) layer->config.backing->drop(layer->config.backing->context, entry->record);
    qkv_account_drop_ssd(range->account, entry->record_bytes);
    entry->record = 0;
    entry->record_bytes = 0;
    qkvi_range_count(range, entry, 1);
  }
  layer->saved = layer->settled;
}

static void settle_pages(qkv_layer *layer) {
  for (; layer->settled < layer->saved; layer->settled++) {
    bool held;
    const qkv_record_state state = state_at(layer, layer->settled, &held);
    if (state == QKV_RECORD_DURABLE) continue;
    if (state == QKV_RECORD_GONE && held) put_again(layer);
    return;
  }
}

void qkv_layer_settle(qkv_layer *layer) {
  if (layer->config.backing == NULL) return;  // it has been closed meanwhile
  settle_pages(layer);
  qkvi_layer_rows_settle(layer);
}

// ---- Out of memory ----

// A page that can leave, and the attention that its tokens receive, all heads together.
typedef struct leaving {
  size_t index;
  float heat;
} leaving;

static float heat_of(const qkv_layer *layer, size_t index, uint64_t now) {
  const qkv_ema *ema = qkv_layer_ema(layer, index);
  const uint32_t tokens = qkv_layer_page(layer, index)->tokens;
  float values[QKV_PAGE_TOKENS], sum = 0;
  if (ema == NULL) return 0;
  for (uint32_t head = 0; head < layer->config.model->kv_heads; head++) {
    qkv_ema_read(ema, layer->clock, head, now, values);
    for (size_t t = 0; t < tokens; t++) sum += values[t];
  }
  return sum;
}

static int coldest_first(const void *a, const void *b) {
  const leaving *left = a, *right = b;
  if (left->heat != right->heat) return left->heat < right->heat ? -1 : 1;
  return (left->index > right->index) - (left->index < right->index);
}

// A layer keeps it, or another layer has used it since.
static bool is_needed(qkv_page_range *range, int64_t unused_since_ms) {
  return atomic_load(&range->keepers) > 0 ||
         (qkvi_range_is_used_elsewhere(range) && atomic_load(&range->used_ms) > unused_since_ms);
}

// Pages whose records are only written stay: an fdatasync that fails may yet take those away, and then the image is
// what they are put again from.
static bool can_leave(const qkv_layer *layer, size_t index, int64_t unused_since_ms) {
  bool held;
  if (qkvi_layer_image(layer, index) == NULL) return false;
  if (is_needed(layer->ranges[qkv_layer_range_of(layer, index)].range, unused_since_ms)) return false;
  return state_at(layer, index, &held) == QKV_RECORD_DURABLE && held;
}

static size_t find_leaving(const qkv_layer *layer, int64_t unused_since_ms, leaving *out) {
  const uint64_t now = layer->clock == NULL ? 0 : qkv_ema_clock_now(layer->clock);
  size_t count = 0;
  for (size_t i = 0; i < layer->page_count; i++) {
    if (can_leave(layer, i, unused_since_ms)) out[count++] = (leaving){.index = i, .heat = heat_of(layer, i, now)};
  }
  return count;
}

// The bytes that this frees; a page stays while another thread reads its range. The range's keepers are looked at
// once it is seized: a thread that becomes one pins it meanwhile, so it waits for the end of this.
static uint64_t evict_at(const qkv_layer *layer, size_t index, int64_t unused_since_ms, bool *in_use) {
  qkv_page_range *range = layer->ranges[qkv_layer_range_of(layer, index)].range;
  qkvi_leaving_image images[2] = {0};
  if (qkvi_range_is_cold(range)) return 0;
  if (!qkvi_range_seize(range)) {
    *in_use = true;
    return 0;
  }
  qkv_page_entry *entry = qkv_layer_page(layer, index);
  qkvi_range_lock(range);
  if (entry->page != NULL && !is_needed(range, unused_since_ms)) qkvi_range_evict(range, entry, images);
  qkvi_range_pack(range);
  qkvi_range_unlock(range);
  qkvi_range_release(range);
  uint64_t freed = 0;
  for (int i = 0; i < 2; i++)
    freed += qkvi_image_leave(layer->config.arena, images[i].image, images[i].bytes, images[i].holders);
  return freed;
}

static uint64_t evict_in_order(const qkv_layer *layer, uint64_t bytes, int64_t unused_since_ms, bool *in_use) {
  uint64_t freed = 0;
  for (size_t i = 0; i < layer->page_count && freed < bytes; i++) {
    if (can_leave(layer, i, unused_since_ms)) freed += evict_at(layer, i, unused_since_ms, in_use);
  }
  return freed;
}

static uint64_t evict_coldest(const qkv_layer *layer, uint64_t bytes, int64_t unused_since_ms, bool *in_use) {
  uint64_t freed = 0;
  leaving *pages = malloc(layer->page_count * sizeof *pages);
  if (pages == NULL) abort();
  const size_t count = find_leaving(layer, unused_since_ms, pages);
  qsort(pages, count, sizeof *pages, coldest_first);
  for (size_t i = 0; i < count && freed < bytes; i++)
    freed += evict_at(layer, pages[i].index, unused_since_ms, in_use);
  free(pages);
  return freed;
}

static void drop_unseen(const qkv_layer *layer, size_t at) {
  qkv_page_range *range = layer->ranges[at].range;
  size_t first, end;
  qkv_layer_range(layer, at, &first, &end);
  if (!atomic_load(&range->was_shared) || qkvi_range_is_used_elsewhere(range) || !qkvi_range_seize(range)) return;
  qkvi_range_lock(range);
  // A layer that has got the range from a trunk meanwhile waits to pin it, and may see them.
  if (!qkvi_range_is_used_elsewhere(range) && range->count > end - first)
    qkvi_range_leave_memory(range, (uint32_t)(end - first), layer->config.arena);
  qkvi_range_unlock(range);
  qkvi_range_release(range);
}

void qkvi_layer_drop_unseen(const qkv_layer *layer) {
  for (size_t i = 0; i < layer->range_count; i++) drop_unseen(layer, i);
}

uint64_t qkv_layer_evict(const qkv_layer *layer, uint64_t bytes, int64_t unused_since_ms, bool *in_use) {
  *in_use = false;
  qkvi_layer_drop_unseen(layer);
  const uint64_t coded = qkv_layer_read_usage(layer).bytes_coded;
  if (coded == 0) return 0;
  return bytes < coded ? evict_coldest(layer, bytes, unused_since_ms, in_use)
                       : evict_in_order(layer, bytes, unused_since_ms, in_use);
}

uint64_t qkv_layer_append_cost(const qkv_layer *layer, uint64_t end) {
  if (end <= layer->length) return 0;
  const uint64_t tokens = end - layer->length;
  const uint64_t block = qkv_arena_cost(qkvi_block_bytes(layer->config.model));
  if (qkv_codec_is_exact(layer->coder->codec)) return (qkvi_blocks(tokens) + 1) * block;
  const uint64_t window = (uint64_t)layer->config.policy.recent_window;
  return (qkvi_blocks(tokens) + 1) * qkvi_seal_cost(layer) +
         (qkvi_blocks(window < tokens ? window : tokens) + 2) * block;
}

// ---- Back into memory ----

static bool has_cold(const qkv_layer *layer) {
  for (size_t i = 0; i < layer->range_count; i++) {
    if (atomic_load_explicit(&layer->ranges[i].range->tokens_cold, memory_order_acquire) > 0) return true;
  }
  return false;
}

bool qkv_layer_holds(const qkv_layer *layer, uint64_t begin, uint64_t end) {
  if (!has_cold(layer)) return true;
  for (size_t i = qkv_layer_page_at(layer, begin); i < layer->page_count; i++) {
    if (qkvi_layer_span(layer, i).begin >= end) break;
    if (qkvi_layer_image(layer, i) == NULL) return false;
  }
  return true;
}

static bool is_missing(const qkv_layer *layer, const qkv_page_entry *entry, bool full) {
  if (entry->page == NULL) return true;
  return full && entry->lost && !entry->record_lost && qkvi_layer_record_state(layer, entry) >= QKV_RECORD_WRITTEN;
}

// False where the page is not missing.
static bool read_missing(const qkv_layer *layer, size_t index, bool full, qkv_missing_page *out) {
  const qkv_range_slot *slot = &layer->ranges[qkv_layer_range_of(layer, index)];
  qkvi_range_lock(slot->range);
  const qkv_page_entry entry = qkvi_range_copy_entry(slot->range, (uint32_t)(index - slot->first));
  const bool missing = is_missing(layer, &entry, full);
  qkvi_range_unlock(slot->range);
  *out = (qkv_missing_page){.index = index,
                            .serial = entry.serial,
                            .record = entry.record,
                            .position = entry.position,
                            .bytes = entry.record_bytes};
  return missing;
}

size_t qkv_layer_missing(const qkv_layer *layer, uint64_t begin, uint64_t end, bool full, qkv_missing_page *out,
                         size_t max) {
  size_t count = 0;
  for (size_t i = qkv_layer_page_at(layer, begin); i < layer->page_count && count < max; i++) {
    if (end != 0 && qkvi_layer_span(layer, i).begin >= end) break;
    if (read_missing(layer, i, full, &out[count])) count++;
  }
  return count;
}

size_t qkv_layer_missing_shared(const qkv_layer *layer, uint64_t begin, uint64_t end, bool full, const void **out,
                                size_t max) {
  size_t count = 0;
  qkv_missing_page page;
  for (size_t i = qkv_layer_page_at(layer, begin); i < layer->page_count && count < max; i++) {
    if (end != 0 && qkvi_layer_span(layer, i).begin >= end) break;
    const qkv_page_range *range = layer->ranges[qkv_layer_range_of(layer, i)].range;
    if (!qkvi_range_is_shared(range) || (count > 0 && out[count - 1] == range)) continue;
    if (read_missing(layer, i, full, &page)) out[count++] = range;
  }
  return count;
}

uint64_t qkv_layer_missing_bytes(const qkv_layer *layer, uint64_t begin, uint64_t end, bool full) {
  uint64_t bytes = 0;
  qkv_missing_page page;
  for (size_t i = qkv_layer_page_at(layer, begin); i < layer->page_count; i++) {
    if (end != 0 && qkvi_layer_span(layer, i).begin >= end) break;
    if (read_missing(layer, i, full, &page)) bytes += qkv_arena_cost(page.bytes);
  }
  return bytes;
}

static qkv_status check_image(const qkv_layer *layer, const qkv_page_entry *entry, const void *image,
                              qkv_error *error) {
  qkv_error reason = {0};
  if (entry->coder->codec->validate(entry->coder, image, entry->record_bytes, &reason) == QKV_OK) {
    const qkv_page_header *header = image;
    if (header->position == entry->position && header->layer == layer->config.layer &&
        header->tokens >= entry->tokens)
      return QKV_OK;
    (void)qkv_fail(&reason, QKV_DATA_LOSS, "it is the page at position %" PRIu64 " of layer %" PRIu32,
                   header->position, header->layer);
  }
  return qkv_fail(error, QKV_DATA_LOSS, "layer %" PRIu32 ": position %" PRIu64 " on the SSD is damaged: %s",
                  layer->config.layer, entry->position, reason.text);
}

// Whether the entry is what was found missing.
static bool is_still(const qkv_page_entry *entry, const qkv_missing_page *page) {
  return entry->serial == page->serial && entry->record == page->record &&
         (entry->page == NULL) == qkv_page_is_cold(page);
}

// Under the range's lock. Other layers, and readers of this one, read meanwhile what the entry of a cold page has
// already: its bytes are the record's. The image comes last.
static qkv_status warm(const qkv_layer *layer, uint64_t *reservation, qkv_page_range *range, qkv_page_entry *entry,
                       void **image, qkv_error *error) {
  QKV_TRY(qkv_arena_recount(layer->config.arena, reservation, 0, entry->record_bytes, error));
  qkvi_range_count(range, entry, -1);
  entry->serial = qkvi_serial_next();
  entry->page = *image;
  qkvi_range_count(range, entry, 1);
  *image = NULL;
  return QKV_OK;
}

qkv_status qkv_layer_restore(const qkv_layer *layer, uint64_t *reservation, const qkv_missing_page *page,
                             void **image, qkv_error *error) {
  if (page->index >= layer->page_count) return QKV_OK;
  const qkv_range_slot *slot = &layer->ranges[qkv_layer_range_of(layer, page->index)];
  const qkv_page_entry before = qkvi_layer_peek(layer, page->index);
  if (!is_still(&before, page)) return QKV_OK;
  QKV_TRY(check_image(layer, &before, *image, error));
  if (!qkv_page_is_cold(page)) return QKV_OK;
  qkv_page_entry *entry = qkv_layer_page(layer, page->index);
  qkv_status status = QKV_OK;
  qkvi_range_lock(slot->range);
  if (is_still(entry, page)) status = warm(layer, reservation, slot->range, entry, image, error);
  qkvi_range_unlock(slot->range);
  return status;
}

qkv_status qkv_layer_restore_full(qkv_layer *layer, uint64_t *reservation, const qkv_missing_page *page, void **image,
                                  uint32_t *bytes, qkv_error *error) {
  assert(!qkv_page_is_cold(page));
  *bytes = page->bytes;
  if (page->index >= layer->page_count || !is_still(qkv_layer_page(layer, page->index), page)) return QKV_OK;
  qkv_page_range *range = qkvi_layer_own_range(layer, qkv_layer_range_of(layer, page->index));
  qkv_page_entry *entry = qkv_layer_page(layer, page->index);
  const void *left = entry->page;
  const uint32_t left_bytes = entry->bytes;
  const bool sole = qkvi_image_is_sole(entry->page_holders);
  QKV_TRY(qkv_arena_recount(layer->config.arena, reservation, sole ? left_bytes : 0, entry->record_bytes, error));
  qkvi_range_count(range, entry, -1);
  if (sole) {
    free(entry->page_holders);
  } else {
    (void)qkvi_image_leave(layer->config.arena, left, left_bytes, entry->page_holders);
  }
  entry->page_holders = NULL;
  entry->bytes = entry->record_bytes;
  entry->lost = entry->record_lost;
  entry->serial = qkvi_serial_next();
  entry->page = *image;
  qkvi_range_count(range, entry, 1);
  *image = sole ? (void *)left : NULL;
  *bytes = left_bytes;
  return QKV_OK;
}

// ---- Found again ----

void qkv_layer_adopt(qkv_layer *layer, const qkv_coder *coder, uint32_t tokens, uint64_t record, uint32_t bytes) {
  assert(layer->length == layer->sealed && tokens >= 1 && tokens <= QKV_PAGE_TOKENS && record != 0);
  const qkv_page_entry entry = {.coder = coder,
                                .bytes = bytes,
                                .tokens = tokens,
                                .position = layer->sealed,
                                .record = record,
                                .record_bytes = bytes};
  qkvi_layer_add_page(layer, &entry);
  // The process before may have had forks that still need the record.
  atomic_store(&layer->ranges[layer->range_count - 1].range->was_shared, true);
  layer->saved = layer->settled = layer->page_count;
  layer->sealed += tokens;
  layer->length = layer->sealed;
}

void qkv_layer_adopted(qkv_layer *layer) {
  for (size_t i = 0; i < layer->range_count; i++) qkvi_range_pack(layer->ranges[i].range);
}

static bool is_same(const qkv_page_entry *a, const qkv_page_entry *b) {
  return a->record == b->record && a->tokens == b->tokens && a->coder == b->coder;
}

// Pages of `other`'s range that the layer has from its page `at` on.
static size_t count_same(const qkv_layer *layer, size_t at, const qkv_layer *other, size_t range) {
  size_t first, end, count = 0;
  qkv_layer_range(other, range, &first, &end);
  while (first + count < end && at + count < layer->page_count &&
         is_same(qkv_layer_page(layer, at + count), qkv_layer_page(other, first + count)))
    count++;
  return count;
}

// Equal pages of this range and those behind it. Where the two layers diverge within a range, the other's is split.
static size_t count_taken(const qkv_layer *layer, size_t at, qkv_layer *other, size_t range) {
  size_t taken = 0, first, end, same;
  for (; range < other->range_count; range++) {
    same = count_same(layer, at + taken, other, range);
    taken += same;
    qkv_layer_range(other, range, &first, &end);
    if (same == end - first) continue;
    if (same > 0) qkvi_layer_split_range(other, range, same);
    break;
  }
  return taken;
}

// The leading pages that are shared already, in ranges [0, *range).
static size_t skip_shared(const qkv_layer *layer, const qkv_layer *other, size_t *range) {
  size_t first, end = 0, other_end = 0;
  for (*range = 0; *range < layer->range_count && *range < other->range_count; ++*range) {
    if (layer->ranges[*range].range != other->ranges[*range].range) break;
    qkv_layer_range(layer, *range, &first, &end);
    qkv_layer_range(other, *range, &first, &other_end);
    if (end != other_end) return layer->page_count;  // the two layers diverge here
  }
  return *range == 0 ? 0 : end;
}

static void adopt_shared(qkv_layer *layer, qkv_layer *other) {
  size_t range, kept = skip_shared(layer, other, &range);
  if (range >= layer->range_count || range >= other->range_count || kept >= layer->page_count) return;
  if (qkvi_range_is_shared(layer->ranges[range].range) || count_same(layer, kept, other, range) == 0) return;
  // The pages from here on leave their ranges, all of them cold, and come back in those of the other one or in
  // others.
  const size_t count = layer->page_count - kept;
  qkv_page_entry *pages = malloc(count * sizeof *pages);
  if (pages == NULL) abort();
  for (size_t i = 0; i < count; i++) pages[i] = *qkv_layer_page(layer, kept + i);
  const size_t taken = count_taken(layer, kept, other, range);
  qkvi_layer_replace_ranges(layer, range, other, taken);
  for (size_t i = taken; i < count; i++) {
    qkvi_layer_add_page(layer, &pages[i]);
    atomic_store(&layer->ranges[layer->range_count - 1].range->was_shared, true);
  }
  free(pages);
}

// Both are packed again, also where they have nothing in common: comparing has unpacked them.
void qkv_layer_adopt_shared(qkv_layer *layer, qkv_layer *other) {
  adopt_shared(layer, other);
  qkv_layer_adopted(layer);
  qkv_layer_adopted(other);
}
