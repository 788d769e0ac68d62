// Append of rows that are coded here.
#include <assert.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "client/c/codes.h"
#include "client/c/place.h"
#include "engine/base/pool.h"

// Bytes of pages in one message: small enough for any daemon's limit-message, large enough to be quick. The first one
// is small, as nothing is sent while it is coded, and each has up to twice as many as the one before.
enum { MESSAGE_BYTES = 4 << 20, FIRST_BYTES = 256 << 10, IMAGE_ALIGN = 64 };

typedef struct encoding encoding;

// One page of a message.
typedef struct page_slot {
  encoding *all;
  uint64_t first;  // token of the item that it begins with
  uint8_t *image;
  size_t bytes;  // 0: it is not there yet
} page_slot;

// The pages of one message; while one is sent the next one is coded.
typedef struct message_slots {
  page_slot *pages;
  size_t count;
} message_slots;

struct encoding {
  qkv_client *client;
  const qkv_client_item *item;
  qkv_segment segments[2];
  qkv_tensor rows[2];  // the item's, by qkv_part
  const qkv_page_code *code;
  uint64_t hash;    // of its calibration
  uint64_t tokens;  // that become pages
  size_t page_bytes, pages_max;
  size_t pages_next;  // of the next message, at most
  message_slots messages[2];
  qkv_client_page *sent;
  uint8_t *images;
  qkv_pool *pool;  // NULL: the caller codes
  pthread_mutex_t lock;
  pthread_cond_t moved;
  size_t running;
  qkv_error error;  // of the first page that failed
};

// ---- Coding ----

static qkv_tensor page_rows(const qkv_tensor *rows, uint64_t first) {
  qkv_tensor page = *rows;
  const size_t skipped = (size_t)first * (size_t)rows->strides[0];
  page.dims[0] = QKV_PAGE_TOKENS;
  page.data = qkv_bytes_slice(rows->data, skipped, rows->data.length - skipped);
  return page;
}

static void encode_page(void *context) {
  page_slot *slot = context;
  encoding *all = slot->all;
  const qkv_client_item *item = all->item;
  const qkv_tensor k = page_rows(&all->rows[QKV_K], slot->first), v = page_rows(&all->rows[QKV_V], slot->first);
  qkv_error error = {0};
  size_t bytes = 0;
  const qkv_status status = qkv_page_code_encode(all->code, item->layer, item->position + slot->first, &k, &v,
                                                 item->k_before_rope, slot->image, &bytes, &error);
  (void)pthread_mutex_lock(&all->lock);
  slot->bytes = bytes;
  if (status != QKV_OK && all->error.status == QKV_OK) all->error = error;
  all->running--;
  (void)pthread_cond_signal(&all->moved);
  (void)pthread_mutex_unlock(&all->lock);
}

// Begins to code the pages of the message whose first token is `first`.
static void begin_message(encoding *all, message_slots *message, uint64_t first) {
  const uint64_t left = (all->tokens - first) / QKV_PAGE_TOKENS;
  message->count = left < all->pages_next ? (size_t)left : all->pages_next;
  all->pages_next = 2 * all->pages_next < all->pages_max ? 2 * all->pages_next : all->pages_max;
  (void)pthread_mutex_lock(&all->lock);
  all->running += message->count;
  (void)pthread_mutex_unlock(&all->lock);
  for (size_t i = 0; i < message->count; i++) {
    page_slot *slot = &message->pages[i];
    slot->first = first + i * QKV_PAGE_TOKENS;
    if (all->pool == NULL || qkv_pool_submit(all->pool, encode_page, slot) != QKV_OK) encode_page(slot);
  }
}

static void wait_for_all(encoding *all) {
  (void)pthread_mutex_lock(&all->lock);
  while (all->running > 0) (void)pthread_cond_wait(&all->moved, &all->lock);
  (void)pthread_mutex_unlock(&all->lock);
}

// ---- Sending ----

// Ids of the item from token `first` on.
static const uint32_t *ids_from(const encoding *all, uint64_t first) {
  return all->item->token_ids == NULL ? NULL : all->item->token_ids + first;
}

static qkv_code send_message(encoding *all, const message_slots *message, uint64_t *appended, qkv_call_error *error) {
  uint64_t tokens = 0;
  for (size_t i = 0; i < message->count; i++) {
    const page_slot *slot = &message->pages[i];
    all->sent[i] = (qkv_client_page){.layer = all->item->layer,
                                     .position = all->item->position + slot->first,
                                     .tokens = QKV_PAGE_TOKENS,
                                     .calibration_hash = all->hash,
                                     .image = slot->image,
                                     .bytes = slot->bytes};
  }
  const qkv_client_item item = {.session = all->item->session,
                                .layer = all->item->layer,
                                .position = all->sent[0].position,
                                .token_ids = ids_from(all, message->pages[0].first),
                                .pages = all->sent,
                                .page_count = message->count};
  const qkv_code code = qkv_client_append(all->client, &item, 1, &tokens, error);
  *appended += tokens;
  return code;
}

static qkv_code send_pages(encoding *all, uint64_t *appended, qkv_call_error *error) {
  qkv_code code = QKV_OK;
  size_t which = 0;
  if (all->tokens > 0) begin_message(all, &all->messages[0], 0);
  for (uint64_t first = 0; first < all->tokens && code == QKV_OK; which = 1 - which) {
    const message_slots *ready = &all->messages[which];
    wait_for_all(all);
    if (all->error.status != QKV_OK) return qkvi_fail_with(error, &all->error);
    first += ready->count * QKV_PAGE_TOKENS;
    if (first < all->tokens) begin_message(all, &all->messages[1 - which], first);
    code = send_message(all, ready, appended, error);
  }
  wait_for_all(all);
  return code;
}

static qkv_client_tensor rest_of(const qkv_client_tensor *from, const qkv_tensor *rows, uint64_t first) {
  qkv_client_tensor rest = *from;
  const size_t skipped = (size_t)first * (size_t)rows->strides[0];
  rest.dims[0] -= (int64_t)first;
  rest.data = (const uint8_t *)from->data + skipped;
  rest.bytes -= skipped;
  return rest;
}

static qkv_code send_rows(const encoding *all, uint64_t *appended, qkv_call_error *error) {
  uint64_t tokens = 0;
  if (all->tokens == (uint64_t)all->rows[QKV_K].dims[0]) return QKV_OK;
  qkv_client_item item = *all->item;
  item.position += all->tokens;
  item.token_ids = ids_from(all, all->tokens);
  item.k = rest_of(&all->item->k, &all->rows[QKV_K], all->tokens);
  item.v = rest_of(&all->item->v, &all->rows[QKV_V], all->tokens);
  const qkv_code code = qkv_client_append(all->client, &item, 1, &tokens, error);
  *appended += tokens;
  return code;
}

// ---- All ----

static qkv_status check_item(encoding *all, qkv_error *error) {
  const qkv_client_item *item = all->item;
  if (item->session == NULL) return qkv_fail(error, QKV_INVALID_ARGUMENT, "session is NULL");
  if (item->q.rank != 0 || item->page_count != 0)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "q or pages are set, rows to code are k and v");
  QKV_TRY(qkvi_check_tensor(&item->k, "k", &all->segments[QKV_K], &all->rows[QKV_K], error));
  QKV_TRY(qkvi_check_tensor(&item->v, "v", &all->segments[QKV_V], &all->rows[QKV_V], error));
  if (item->k.rank == 3 && item->v.rank == 3 && item->k.dims[0] == item->v.dims[0]) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "k and v must have 3 dims and the same tokens");
}

// What the daemon would seal once it has all of the rows.
static uint64_t sealed_tokens(const encoding *all, const Qkv__V1__CodecPolicy *policy) {
  const uint64_t tokens = (uint64_t)all->rows[QKV_K].dims[0], window = policy->recent_window;
  if (all->page_bytes == 0 || tokens < window) return 0;
  return (tokens - window) / QKV_PAGE_TOKENS * QKV_PAGE_TOKENS;
}

static qkv_code find_code(encoding *all, qkv_call_error *error) {
  qkvi_coded_session session;
  qkv_code code = qkvi_coded_session_get(all->client, all->item->session, &session, error);
  if (code != QKV_OK) return code;
  code = qkvi_code_find(all->client, &session, session.info->calibration, 0, &all->code, &all->hash, error);
  if (code == QKV_OK && all->item->layer >= session.model->model->layers)
    code = qkvi_fail(error, QKV_INVALID_ARGUMENT, "layer is %" PRIu32 ", the model %s has %" PRIu32 " layers",
                     all->item->layer, session.info->model, session.model->model->layers);
  if (code == QKV_OK) {
    all->page_bytes = qkv_page_code_bytes_max(all->code, all->item->layer);
    all->tokens = sealed_tokens(all, session.info->policy);
  }
  qkvi_coded_session_free(&session);
  return code;
}

static qkv_code make_slots(encoding *all, unsigned threads, qkv_call_error *error) {
  qkv_error reason = {0};
  if (all->tokens == 0) return QKV_OK;
  const size_t place = (all->page_bytes + IMAGE_ALIGN - 1) / IMAGE_ALIGN * IMAGE_ALIGN;
  const uint64_t pages = all->tokens / QKV_PAGE_TOKENS;
  all->pages_max = MESSAGE_BYTES / place > 0 ? MESSAGE_BYTES / place : 1;
  if (pages < all->pages_max) all->pages_max = (size_t)pages;
  all->pages_next = FIRST_BYTES / place > 0 ? FIRST_BYTES / place : 1;
  if (all->pages_next > all->pages_max) all->pages_next = all->pages_max;
  assert(all->pages_max > 0);  // what is encoded are whole pages
  all->images = aligned_alloc(IMAGE_ALIGN, 2 * all->pages_max * place);
  all->sent = calloc(all->pages_max, sizeof *all->sent);
  assert(all->images != NULL && all->sent != NULL);
  for (size_t m = 0; m < 2; m++) {
    all->messages[m].pages = calloc(all->pages_max, sizeof(page_slot));
    assert(all->messages[m].pages != NULL);
    for (size_t i = 0; i < all->pages_max; i++)
      all->messages[m].pages[i] = (page_slot){.all = all, .image = all->images + (m * all->pages_max + i) * place};
  }
  if (threads > 0 && qkv_pool_create(threads, all->pages_max, &all->pool, &reason) != QKV_OK)
    return qkvi_fail_with(error, &reason);
  return QKV_OK;
}

qkv_code qkv_client_append_encoded(qkv_client *client, const qkv_client_item *item, unsigned threads,
                                   uint64_t *appended, qkv_call_error *error) {
  encoding all = {.item = item};
  qkv_error reason = {0};
  uint64_t tokens = 0;
  if (appended != NULL) *appended = 0;
  if (check_item(&all, &reason) != QKV_OK) return qkvi_fail_with(error, &reason);
  const qkv_code routed = qkvi_route(&client, item->session, error);
  if (routed != QKV_OK) return routed;
  all.client = client;
  if (pthread_mutex_init(&all.lock, NULL) != 0 || pthread_cond_init(&all.moved, NULL) != 0) abort();
  qkv_code code = find_code(&all, error);
  if (code == QKV_OK) code = make_slots(&all, threads, error);
  if (code == QKV_OK) code = send_pages(&all, &tokens, error);
  if (code == QKV_OK) code = send_rows(&all, &tokens, error);
  if (appended != NULL) *appended = tokens;
  qkv_pool_destroy(&all.pool);
  for (size_t m = 0; m < 2; m++) free(all.messages[m].pages);
  free(all.sent);
  free(all.images);
  (void)pthread_cond_destroy(&all.moved);
  (void)pthread_mutex_destroy(&all.lock);
  return code;
}
