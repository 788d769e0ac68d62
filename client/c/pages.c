// Pages that the caller decodes and codes itself.
#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "client/c/codes.h"
#include "client/c/place.h"

enum { IMAGE_ALIGN = 64 };

// ---- Codes ----

qkv_code qkv_client_get_page_code(qkv_client *client, const char *session, const qkv_client_page *page,
                                  const qkv_page_code **code, qkv_call_error *error) {
  qkvi_coded_session coded;
  qkv_page_header header;
  *code = NULL;
  if (session == NULL) return qkvi_fail(error, QKV_INVALID_ARGUMENT, "session is NULL");
  if (page != NULL && (page->image == NULL || page->bytes < sizeof header))
    return qkvi_fail(error, QKV_INVALID_ARGUMENT, "page.bytes is %zu, a page has at least %zu", page->bytes,
                     sizeof header);
  qkv_code status = qkvi_route(&client, session, error);
  if (status == QKV_OK) status = qkvi_coded_session_get(client, session, &coded, error);
  if (status != QKV_OK) return status;
  if (page != NULL) memcpy(&header, page->image, sizeof header);
  status = qkvi_code_find(client, &coded, page != NULL ? header.calibration : coded.info->calibration,
                          page != NULL ? page->calibration_hash : 0, code, NULL, error);
  qkvi_coded_session_free(&coded);
  if (status != QKV_OK) return status;
  (void)qkv_page_code_ref(*code);
  return qkvi_ok(error);
}

void qkv_page_code_free(const qkv_page_code **code) {
  qkv_page_code_unref(code);
}

size_t qkv_page_bytes_max(const qkv_page_code *code, uint32_t layer) {
  return layer < qkv_page_code_layers(code) ? qkv_page_code_bytes_max(code, layer) : 0;
}

// ---- Out of a page ----

qkv_code qkv_page_decode(const qkv_page_code *code, const qkv_client_page *page, const qkv_client_page_rows *rows,
                         qkv_call_error *error) {
  qkv_error reason = {0};
  if (page->image == NULL) return qkvi_fail(error, QKV_INVALID_ARGUMENT, "page.image is NULL");
  if (rows->tokens > page->tokens || rows->first > page->tokens - rows->tokens)
    return qkvi_fail(error, QKV_INVALID_ARGUMENT,
                     "rows.first is %" PRIu32 " and rows.tokens is %" PRIu32 ", the page has %" PRIu32
                     " valid tokens",
                     rows->first, rows->tokens, page->tokens);
  const qkv_page_rows to = {.first = rows->first,
                            .tokens = rows->tokens,
                            .dtype = (qkv_dtype)rows->dtype,
                            .before_rope = rows->before_rope,
                            .k = rows->k,
                            .v = rows->v};
  if (qkv_page_code_decode(code, page->layer, page->image, page->bytes, &to, &reason) == QKV_OK)
    return qkvi_ok(error);
  return qkvi_fail_with(error, &reason);
}

// ---- Into a page ----

static qkv_status encode(const qkv_page_code *code, const qkv_client_rows_to_code *rows, void *image, size_t *bytes,
                         qkv_error *error) {
  qkv_segment segments[2];
  qkv_tensor k, v;
  QKV_TRY(qkvi_check_tensor(&rows->k, "k", &segments[QKV_K], &k, error));
  QKV_TRY(qkvi_check_tensor(&rows->v, "v", &segments[QKV_V], &v, error));
  if (k.rank != 3 || v.rank != 3) return qkv_fail(error, QKV_INVALID_ARGUMENT, "k and v must have 3 dims");
  return qkv_page_code_encode(code, rows->layer, rows->position, &k, &v, rows->before_rope, image, bytes, error);
}

qkv_code qkv_page_encode(const qkv_page_code *code, const qkv_client_rows_to_code *rows, void *image, size_t capacity,
                         qkv_client_page *page, qkv_call_error *error) {
  const size_t most = qkv_page_bytes_max(code, rows->layer);
  const qkv_calibration *calibration = qkv_page_code_calibration(code);
  qkv_error reason = {0};
  size_t bytes = 0;
  *page = (qkv_client_page){0};
  if (capacity < most)
    return qkvi_fail(error, QKV_INVALID_ARGUMENT, "capacity is %zu, at least %zu are needed", capacity, most);
  const bool aligned = (uintptr_t)image % IMAGE_ALIGN == 0;
  void *copy = aligned ? NULL : aligned_alloc(IMAGE_ALIGN, (most / IMAGE_ALIGN + 1) * IMAGE_ALIGN);
  assert(aligned || copy != NULL);
  const qkv_status status = encode(code, rows, aligned ? image : copy, &bytes, &reason);
  if (status == QKV_OK && !aligned) memcpy(image, copy, bytes);
  free(copy);
  if (status != QKV_OK) return qkvi_fail_with(error, &reason);
  *page = (qkv_client_page){.layer = rows->layer,
                            .position = rows->position,
                            .tokens = (uint32_t)rows->k.dims[0],
                            .calibration_hash = calibration == NULL ? 0 : qkv_calibration_hash(calibration),
                            .image = image,
                            .bytes = bytes};
  return qkvi_ok(error);
}
