// Watching pages: the error of attention from their codes, measured on one head of some of them as they are sealed,
// when exact rows are at hand, with recent queries (holdout.h); and the error of the data-free code at the same bits.
// Measured as in probe.h, over the page's tokens alone.
//
// Cost: one head of a page is decoded, coded once more and attended.
//
// Threads: pure, but for qkv_page_watch, which is its owner's.
#ifndef QKV_ENGINE_CACHE_PAGE_WATCH_H
#define QKV_ENGINE_CACHE_PAGE_WATCH_H

#include <stddef.h>
#include <stdint.h>

#include "engine/cache/probe.h"
#include "engine/codec/codec.h"

#define QKV_PAGE_WATCH_FADE 0.9  // of what was measured before, a measure

// Fading sums of squared errors.
typedef struct qkv_page_watch {
  double coded, data_free, measures;
} qkv_page_watch;

typedef struct qkv_page_watch_page {
  const qkv_coder *coder;
  const void *image;
  uint64_t position;
  size_t tokens;
  const float *k, *v;  // [tokens][kv_heads][dim], k after RoPE
  uint16_t head;       // that is measured
} qkv_page_watch_page;

typedef struct qkv_page_watched {
  double coded, data_free;  // squared errors; the same where the page is data-free, or of parts (parts.h)
} qkv_page_watched;

// `queries` are the head's; their `last` is set here.
qkv_page_watched qkv_page_watch_measure(const qkv_page_watch_page *page, const qkv_probe_queries *queries);

void qkv_page_watch_add(qkv_page_watch *watch, const qkv_page_watched *measured);
// Roots of the means; 0 where nothing was measured.
double qkv_page_watch_error(const qkv_page_watch *watch);
double qkv_page_watch_data_free(const qkv_page_watch *watch);

#endif
