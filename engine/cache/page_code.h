// Pages outside a daemon: rows from the image of a page, and a page from rows, as the daemon itself would decode and
// code them, for clients that fetch and append pages.
//
// A page code is what a session's pages are coded by under one calibration. It is made from what GetModel, GetSession
// and GetCalibration answer; the policy is the session's resolved one. It is immutable once made, and counts who
// holds it.
//
// Threads: any, at the same time.
#ifndef QKV_ENGINE_CACHE_PAGE_CODE_H
#define QKV_ENGINE_CACHE_PAGE_CODE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/cache/coding.h"

typedef struct qkv_page_code qkv_page_code;

// Copies the model, which is resolved (qkv_model_resolve), and takes a reference of the calibration; NULL: data-free.
// *out is the caller's, who gives it back by qkv_page_code_unref. INVALID_ARGUMENT: a policy out of its limits, a
// calibration that was not made for the model; *out is then NULL.
qkv_status qkv_page_code_create(const qkv_model *model, const qkv_policy *policy, qkv_purpose purpose,
                                const qkv_calibration *calibration, const qkv_page_code **out, qkv_error *error);
// One reference more, which is returned.
const qkv_page_code *qkv_page_code_ref(const qkv_page_code *code);
// Gives a reference back and clears *code; the last one frees it. *code may be NULL.
void qkv_page_code_unref(const qkv_page_code **code);

// The buffers that rows of a page are decoded to, and their form: tokens [first, first + tokens) of the page.
typedef struct qkv_page_rows {
  uint32_t first, tokens;
  qkv_dtype dtype;
  bool before_rope;  // keys as projected; else as attended
  void *k, *v;       // dense [tokens][kv_heads][dim]; NULL: not wanted
} qkv_page_rows;

// Decodes the image of a page of a layer, which may be anything, at any alignment. The rows have the bits that Fetch
// gives of them. DATA_LOSS with the reason where it is no page of this code; INVALID_ARGUMENT where the layer is not
// the model's or keeps exact rows, or `rows` has tokens that the page has not. Nothing is written then.
qkv_status qkv_page_code_decode(const qkv_page_code *code, uint32_t layer, const void *image, size_t bytes,
                                const qkv_page_rows *rows, qkv_error *error);

// The model's layers, and the calibration; NULL: data-free.
uint32_t qkv_page_code_layers(const qkv_page_code *code);
const qkv_calibration *qkv_page_code_calibration(const qkv_page_code *code);

// Most bytes of a page of a layer; 0: it keeps exact rows, and has no pages. The layer is the model's (asserted).
size_t qkv_page_code_bytes_max(const qkv_page_code *code, uint32_t layer);

// Codes rows k, v [tokens][kv_heads][dim], 1 to 64 tokens from `position` on, as the daemon does once it has
// converted them to the model's dtype: `image`, 64-byte aligned and of qkv_page_code_bytes_max, gets the page and
// `*bytes` what it has. Tensors have passed qkv_tensor_check. INVALID_ARGUMENT: a layer that keeps exact rows, a
// shape, a position beyond 2^53, an element that is not finite or beyond 32768; the image is then undefined.
qkv_status qkv_page_code_encode(const qkv_page_code *code, uint32_t layer, uint64_t position, const qkv_tensor *k,
                                const qkv_tensor *v, bool before_rope, void *image, size_t *bytes, qkv_error *error);

#endif
