#include "engine/cache/session_share.h"

#include <assert.h>
#include <stdlib.h>

#include "engine/cache/session_fold.h"
#include "engine/cache/session_slots.h"

enum { PAGE = QKV_PREFIX_PAGE, HOLDERS_MAX = 4 };
static_assert(QKV_PREFIX_PAGE == QKV_PAGE_TOKENS, "pages of ids are pages of rows");

typedef struct offer {
  const void *image;  // NULL: none, or taken
  _Atomic uint32_t *holders;
  uint32_t bytes, calibration;
} offer;

struct qkvi_page_offers {
  uint64_t first;  // page number of offers[0]
  size_t count;
  uint64_t taken;
  offer offers[];
};

// ---- Who holds them ----

static void take_reference(uint32_t owner) {
  (void)qkv_session_ref(qkv_session_of(owner));
}

static bool codes_alike(const qkv_session *a, const qkv_session *b) {
  const qkv_session_config *x = qkv_session_config_of(a), *y = qkv_session_config_of(b);
  return x->purpose == y->purpose && qkv_policy_equal(&x->policy, &y->policy) && y->max_attention_error == 0;
}

// Another session, coded alike, that shares the most of these pages, with a reference; `*end` gets the page behind
// the last that it shares.
static qkv_session *find_holder(qkv_session *session, uint64_t first, const qkv_prefix_hash *hashes, size_t count,
                                uint64_t *end) {
  qkv_prefix_index *index = qkv_session_config_of(session)->prefixes;
  qkv_prefix_found found[HOLDERS_MAX];
  qkv_session *holder = NULL;
  const size_t found_count =
      qkv_prefix_index_match_pages(index, first, hashes, count, take_reference, found, HOLDERS_MAX);
  for (size_t i = 0; i < found_count; i++) {
    qkv_session *candidate = qkv_session_of(found[i].owner);
    if (holder == NULL && candidate != session && codes_alike(session, candidate)) {
      holder = candidate;
      *end = found[i].pages;
    } else {
      qkv_session_unref(&candidate);
    }
  }
  return holder;
}

// ---- What they have ----

// Planes may have been dropped, and clients append pages with fewer of them: rows that are coded anew are better.
static bool is_whole(const qkv_page_entry *entry) {
  const qkv_codec_planes *planes = entry->coder->codec->planes;
  return planes == NULL || planes->whole(entry->coder, entry->page);
}

static void offer_page(const qkv_layer *layer, uint64_t position, offer *made) {
  const size_t at = qkv_layer_page_at(layer, position);
  if (at == layer->page_count) return;
  if (qkvi_layer_image(layer, at) == NULL) return;
  qkv_page_range *range = layer->ranges[qkv_layer_range_of(layer, at)].range;
  qkv_page_entry *entry = qkv_layer_page(layer, at);
  qkvi_range_lock(range);
  if (entry->position == position && entry->tokens == PAGE && entry->page != NULL && entry->full == NULL &&
      is_whole(entry)) {
    qkvi_image_share(&entry->page_holders);
    *made = (offer){.image = entry->page,
                    .holders = entry->page_holders,
                    .bytes = entry->bytes,
                    .calibration = entry->coder->calibration};
  }
  qkvi_range_unlock(range);
}

// Token ids are cut before the rows of any layer: ids that are still there belong to the rows that are.
static bool still_holds(qkv_session *holder, uint64_t page, const qkv_prefix_hash *expected) {
  qkv_prefix_hash hash;
  return qkv_session_tokens_hash(qkv_session_tokens_of(holder), page, &hash) &&
         qkv_prefix_hash_equal(&hash, expected);
}

static qkvi_page_offers *gather(qkv_session *holder, uint32_t layer, uint64_t first, uint64_t end,
                                const qkv_prefix_hash *last) {
  const qkv_layer *held;
  if (qkv_session_is_folded(holder)) return NULL;  // what it shares is in memory at most, for others
  if (qkv_session_try_read(holder, layer, &held, NULL) != QKV_OK) return NULL;
  qkvi_page_offers *offers = NULL;
  if (still_holds(holder, end - 1, last)) {
    offers = calloc(1, sizeof *offers + (size_t)(end - first) * sizeof *offers->offers);
    if (offers == NULL) abort();
    offers->first = first;
    offers->count = (size_t)(end - first);
    for (uint64_t page = first; page < end; page++) offer_page(held, page * PAGE, &offers->offers[page - first]);
  }
  qkv_session_read_done(holder, layer);
  return offers;
}

// ---- Offers ----

// The first page that the append may seal: what is in the tail already belongs to the same chain.
static uint64_t first_unsealed(const qkv_layer *layer) {
  return (layer->sealed + PAGE - 1) / PAGE;
}

static bool takes_pages(qkv_session *session, const qkv_layer *layer, uint64_t position, size_t count) {
  const qkv_session_config *config = qkv_session_config_of(session);
  return count >= PAGE && config->prefixes != NULL && config->first_position == 0 && layer->config.quality == NULL &&
         !qkv_codec_is_exact(layer->coder->codec) && position + count > layer->length;
}

qkvi_page_offers *qkvi_session_offers(qkv_session *session, const qkv_layer *layer, uint64_t position,
                                      const uint32_t *ids, size_t count) {
  if (!takes_pages(session, layer, position, count)) return NULL;
  const uint64_t first = position / PAGE;
  qkv_prefix_hash *hashes = calloc(qkv_session_tokens_pages(position, count), sizeof *hashes);
  if (hashes == NULL) abort();
  const size_t pages = qkv_session_tokens_chain(qkv_session_tokens_of(session), position, ids, count, hashes);
  qkvi_page_offers *offers = NULL;
  uint64_t end = 0;
  qkv_session *holder = pages == 0 ? NULL : find_holder(session, first, hashes, pages, &end);
  if (holder != NULL) {
    if (first_unsealed(layer) < end)
      offers = gather(holder, layer->config.layer, first_unsealed(layer), end, &hashes[end - 1 - first]);
    qkv_session_unref(&holder);
  }
  free(hashes);
  return offers;
}

uint64_t qkvi_page_offers_free(qkvi_page_offers **offers, qkv_arena *arena) {
  qkvi_page_offers *left = *offers;
  *offers = NULL;
  if (left == NULL) return 0;
  for (size_t i = 0; i < left->count; i++) {
    const offer *made = &left->offers[i];
    (void)qkvi_image_leave(arena, made->image, made->bytes, made->holders);
  }
  const uint64_t taken = left->taken;
  free(left);
  return taken;
}

bool qkvi_page_take(qkvi_page_offers *offers, uint64_t position, uint32_t calibration, qkv_page_entry *entry) {
  if (offers == NULL || position % PAGE != 0 || position / PAGE < offers->first) return false;
  const uint64_t i = position / PAGE - offers->first;
  if (i >= offers->count) return false;
  offer *made = &offers->offers[i];
  if (made->image == NULL || made->calibration != calibration) return false;
  entry->page = made->image;
  entry->bytes = made->bytes;
  entry->page_holders = made->holders;
  entry->taken = true;
  *made = (offer){0};
  offers->taken++;
  return true;
}
