#include "engine/cache/page_watch.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/codec/embedded.h"

static void *block(size_t bytes) {
  void *made = aligned_alloc(64, (bytes + 63) / 64 * 64 + 64);
  if (made == NULL) abort();
  return made;
}

// The page's one head, coded data-free at the coder's bits.
static void *code_data_free(const qkv_page_watch_page *page, const qkv_coder *coder) {
  const size_t key_dim = coder->key_dim, value_dim = coder->value_dim, heads = page->coder->kv_heads;
  float *k = block(page->tokens * (key_dim + value_dim) * sizeof *k), *v = k + page->tokens * key_dim;
  for (size_t t = 0; t < page->tokens; t++) {
    memcpy(k + t * key_dim, page->k + (t * heads + page->head) * key_dim, key_dim * sizeof *k);
    memcpy(v + t * value_dim, page->v + (t * heads + page->head) * value_dim, value_dim * sizeof *v);
  }
  void *image = block(coder->codec->page_bytes_max(coder));
  (void)coder->codec->encode(coder, page->position, (uint32_t)page->tokens, QKV_FP32, k, v, NULL, image);
  free(k);
  return image;
}

static double error_of(qkv_probe *probe, const qkv_coder *coder, const void *image, uint16_t head) {
  float *k = block((size_t)QKV_PAGE_TOKENS * (coder->key_dim + coder->value_dim) * sizeof *k);
  float *v = k + (size_t)QKV_PAGE_TOKENS * coder->key_dim;
  coder->codec->decode(coder, image, head, QKV_K, false, k);
  coder->codec->decode(coder, image, head, QKV_V, false, v);
  const double error = qkv_probe_error(probe, k, v);
  free(k);
  return error;
}

qkv_page_watched qkv_page_watch_measure(const qkv_page_watch_page *page, const qkv_probe_queries *queries) {
  const qkv_coder *coder = page->coder;
  qkv_probe_queries asked = *queries;
  asked.last = page->position + page->tokens;
  const qkv_probe_rows rows = {.tokens = page->tokens,
                               .whole = page->tokens,
                               .key_dim = coder->key_dim,
                               .value_dim = coder->value_dim,
                               .k_stride = (size_t)coder->kv_heads * coder->key_dim,
                               .v_stride = (size_t)coder->kv_heads * coder->value_dim,
                               .k = page->k + (size_t)page->head * coder->key_dim,
                               .v = page->v + (size_t)page->head * coder->value_dim};
  qkv_probe *probe = qkv_probe_create(&rows, &asked);
  qkv_page_watched measured;
  measured.coded = measured.data_free = error_of(probe, coder, page->image, page->head);
  if (coder->calibration != 0 && coder->codec->part == NULL) {
    qkv_head_coder head;
    qkv_embedded_coder other;
    qkv_embedded_data_free(coder, page->head, &head, &other);
    void *image = code_data_free(page, &other.base);
    measured.data_free = error_of(probe, &other.base, image, 0);
    free(image);
  }
  qkv_probe_destroy(&probe);
  return measured;
}

void qkv_page_watch_add(qkv_page_watch *watch, const qkv_page_watched *measured) {
  watch->coded = QKV_PAGE_WATCH_FADE * watch->coded + measured->coded;
  watch->data_free = QKV_PAGE_WATCH_FADE * watch->data_free + measured->data_free;
  watch->measures = QKV_PAGE_WATCH_FADE * watch->measures + 1;
}

double qkv_page_watch_error(const qkv_page_watch *watch) {
  return watch->measures > 0 ? sqrt(watch->coded / watch->measures) : 0;
}

double qkv_page_watch_data_free(const qkv_page_watch *watch) {
  return watch->measures > 0 ? sqrt(watch->data_free / watch->measures) : 0;
}
