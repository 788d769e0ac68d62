#include "server/handlers/append_coded.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cache/session_coded.h"
#include "engine/codec/page.h"
#include "proto/wire.h"
#include "server/handlers/append_ids.h"
#include "server/residency/restore.h"

// Fields of Item and CodedPage.
enum { ITEM_PAGES = 12, PAGE_TOKENS = 1, PAGE_HASH = 2, PAGE_IMAGE = 15 };

enum { IMAGE_ALIGN = 64, TRIES = 4 };

// An item's pages, copied.
typedef struct copied {
  qkv_incoming_page *pages;
  size_t count;
  uint8_t *images;
  uint64_t end;  // position behind the last one
} copied;

// ---- Out of the message ----

static size_t aligned(size_t bytes) {
  return (bytes + IMAGE_ALIGN - 1) / IMAGE_ALIGN * IMAGE_ALIGN;
}

static qkv_status read_page(qkv_bytes message, qkv_incoming_page *page, uint64_t *hash, qkv_bytes *image,
                            qkv_error *error) {
  qkv_wire_reader reader;
  qkv_wire_field field;
  bool more = true;
  *image = (qkv_bytes){0};
  *hash = 0;
  qkv_wire_reader_init(&reader, message);
  for (;;) {
    QKV_TRY(qkv_wire_next(&reader, &field, &more, error));
    if (!more) return QKV_OK;
    if (field.number == PAGE_TOKENS && field.type == QKV_WIRE_VARINT)
      page->tokens = field.value > UINT32_MAX ? UINT32_MAX : (uint32_t)field.value;
    if (field.number == PAGE_HASH && field.type == QKV_WIRE_FIXED64) *hash = field.value;
    if (field.number == PAGE_IMAGE && field.type == QKV_WIRE_BYTES) *image = field.bytes;
  }
}

// Reads the page's header. `page->calibration` gets a reference.
static qkv_status find_calibration(const qkv_daemon *daemon, const qkv_model *model, size_t i, uint64_t hash,
                                   qkv_incoming_page *page, qkv_error *error) {
  qkv_page_header header;
  memcpy(&header, page->image, sizeof header);
  if (header.calibration == 0) return QKV_OK;
  page->calibration = qkvi_kept_find(daemon->kept, model, header.calibration);
  if (page->calibration == NULL)
    return qkv_fail(error, QKV_FAILED_PRECONDITION,
                    "pages[%zu].image has calibration %" PRIu32
                    ", which the daemon does not have; RegisterModel with calibration_kept brings it",
                    i, header.calibration);
  if (qkv_calibration_hash(page->calibration) == hash) return QKV_OK;
  return qkv_fail(error, QKV_FAILED_PRECONDITION,
                  "pages[%zu].calibration_hash is %016" PRIx64 ", the daemon's calibration %" PRIu32
                  " has %016" PRIx64,
                  i, hash, header.calibration, qkv_calibration_hash(page->calibration));
}

static qkv_status copy_page(const qkv_daemon *daemon, const qkv_model *model, qkv_bytes message, copied *all,
                            uint8_t **at, qkv_error *error) {
  const size_t i = all->count++;
  qkv_incoming_page *page = &all->pages[i];
  uint64_t hash;
  qkv_bytes image;
  QKV_TRY(read_page(message, page, &hash, &image, error));
  if (image.length < sizeof(qkv_page_header))
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "pages[%zu].image has %zu bytes, its header %zu", i, image.length,
                    sizeof(qkv_page_header));
  qkv_bytes_copy(image, 0, image.length, *at);
  page->image = *at;
  page->bytes = image.length;
  *at += aligned(image.length);
  all->end += page->tokens;
  return find_calibration(daemon, model, i, hash, page, error);
}

static void drop(copied *all) {
  for (size_t i = 0; i < all->count; i++) qkv_calibration_unref(&all->pages[i].calibration);
  free(all->pages);
  free(all->images);
}

static qkv_status copy_pages(const qkv_daemon *daemon, const qkv_model *model, const qkvi_item *item, copied *all,
                             qkv_error *error) {
  qkv_wire_reader reader;
  qkv_wire_field field;
  bool more = true;
  *all = (copied){0};
  if (item->page_bytes / sizeof(qkv_page_header) < item->pages)
    return qkv_fail(error, QKV_INVALID_ARGUMENT,
                    "pages has %zu entries in %" PRIu64 " bytes, a page has at least %zu", item->pages,
                    item->page_bytes, sizeof(qkv_page_header));
  *all = (copied){.pages = calloc(item->pages, sizeof *all->pages),
                  .images = aligned_alloc(IMAGE_ALIGN, aligned(item->page_bytes + item->pages * IMAGE_ALIGN)),
                  .end = item->position};
  if (all->pages == NULL || all->images == NULL) abort();
  uint8_t *at = all->images;
  qkv_wire_reader_init(&reader, item->message);
  while (all->count < item->pages) {
    QKV_TRY(qkv_wire_next(&reader, &field, &more, error));
    assert(more);  // the parser has counted them
    if (field.number == ITEM_PAGES && field.type == QKV_WIRE_BYTES)
      QKV_TRY(copy_page(daemon, model, field.bytes, all, &at, error));
  }
  return QKV_OK;
}

// ---- Into the session ----

// The pages to compare with, and memory for the new ones.
static qkv_status prepare(const qkv_rpc_call *call, qkv_session *session, const qkvi_item *item, const copied *all,
                          const qkvi_append_ids *ids, uint64_t *headroom, qkv_error *error) {
  const qkv_daemon *daemon = qkv_rpc_context(call);
  const qkvi_wanted wanted = {
      .call = call,
      .session = session,
      .layer = item->layer,
      .begin = item->position,
      .end = all->end,
      .extra = qkv_session_pages_cost(session, item->layer, all->pages, all->count) + qkvi_append_ids_cost(ids)};
  return qkvi_restore(daemon->residency, &wanted, headroom, error);
}

static qkv_status append_once(qkv_session *session, const qkvi_item *item, const copied *all, qkvi_append_ids *ids,
                              uint64_t *headroom, qkvi_waits waits, uint64_t *appended, uint64_t *length,
                              qkv_error *error) {
  const qkv_append_use use = {.headroom = headroom,
                              .ids = ids->count > 0 ? ids->ids : NULL,
                              .at_once = (waits & (QKVI_WAIT_ROWS | QKVI_WAIT_DISK)) == 0};
  QKV_TRY(qkvi_append_ids_reserve(ids, headroom, error));
  const qkv_status status = qkv_session_append_pages(session, item->layer, &use, item->position, all->pages,
                                                     all->count, appended, length, error);
  qkvi_append_ids_done(ids, status == QKV_OK);
  return status;
}

static qkv_status append_waiting(const qkv_rpc_call *call, qkv_session *session, const qkvi_item *item,
                                 const copied *all, qkvi_append_ids *ids, uint64_t *appended, uint64_t *length,
                                 qkv_error *error) {
  const qkv_daemon *daemon = qkv_rpc_context(call);
  qkv_status status = QKV_UNAVAILABLE;
  for (int i = 0; i <= TRIES && (status == QKV_UNAVAILABLE || status == QKV_RESOURCE_EXHAUSTED); i++) {
    uint64_t headroom = 0;
    *error = (qkv_error){0};
    if (i > 0) QKV_TRY(prepare(call, session, item, all, ids, &headroom, error));
    status = append_once(session, item, all, ids, &headroom, QKVI_WAIT_DISK, appended, length, error);
    qkvi_budget_unreserve(daemon->residency, &headroom);
    if (i > 0) qkvi_budget_release(daemon->residency, session, item->layer);
  }
  return status;
}

static qkv_status append_copied(const qkv_rpc_call *call, qkv_session *session, const qkvi_item *item,
                                const copied *all, qkvi_append_ids *ids, qkvi_waits *waits, uint64_t *appended,
                                uint64_t *length, qkv_error *error) {
  const qkv_daemon *daemon = qkv_rpc_context(call);
  if ((*waits & QKVI_WAIT_DISK) != 0) return append_waiting(call, session, item, all, ids, appended, length, error);
  qkv_error reason = {0};
  const qkv_status status = append_once(session, item, all, ids, NULL, *waits, appended, length, &reason);
  if (status == QKV_UNAVAILABLE || (status == QKV_RESOURCE_EXHAUSTED && daemon->residency != NULL)) {
    *waits |= daemon->residency != NULL ? QKVI_WAIT_DISK : QKVI_WAIT_ROWS;
    return QKV_UNAVAILABLE;
  }
  if (status != QKV_OK) *error = reason;
  return status;
}

static qkv_status check_ids(const qkvi_item *item, const copied *all, qkv_error *error) {
  const uint64_t count = item->token_ids.count, tokens = all->end - item->position;
  if (count == 0 || count == tokens) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "token_ids has %" PRIu64 " entries, pages have %" PRIu64 " tokens",
                  count, tokens);
}

static qkv_status append_with_ids(const qkv_rpc_call *call, qkv_session *session, const qkvi_item *item,
                                  const copied *all, qkvi_waits *waits, uint64_t *appended, uint64_t *length,
                                  qkv_error *error) {
  qkvi_append_ids ids;
  QKV_TRY(check_ids(item, all, error));
  qkvi_append_ids_init(&ids, session, item);
  const qkv_status status = append_copied(call, session, item, all, &ids, waits, appended, length, error);
  qkvi_append_ids_deinit(&ids);
  return status;
}

qkv_status qkvi_append_pages(const qkv_rpc_call *call, qkv_session *session, const qkvi_item *item, qkvi_waits *waits,
                             uint64_t *appended, uint64_t *length, qkv_error *error) {
  const qkv_daemon *daemon = qkv_rpc_context(call);
  const qkv_model *model = qkv_session_model(session);
  copied all;
  if (daemon->options->discard)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "pages is set, a daemon with --discard takes rows");
  if (item->layer >= model->layers)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "layer is %" PRIu32 ", the model %s has %" PRIu32 " layers",
                    item->layer, model->name, model->layers);
  if ((*waits & QKVI_WAIT_LAYERS) == 0) {
    *waits |= QKVI_WAIT_LAYERS;
    return QKV_UNAVAILABLE;
  }
  qkv_status status = copy_pages(daemon, model, item, &all, error);
  if (status == QKV_OK) status = append_with_ids(call, session, item, &all, waits, appended, length, error);
  drop(&all);
  return status;
}
