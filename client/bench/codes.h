// What `qkv-bench encode` and `decode` work on: rows of one layer in fp16, and how they are coded. In this process,
// one thread.
//
// Rows are Gaussian with a few channels that are eight times as large and a mean that drifts from page to page; keys
// are turned by RoPE where the frame has one. A calibration is learnt from them (--calibrated).
#ifndef QKV_CLIENT_BENCH_CODES_H
#define QKV_CLIENT_BENCH_CODES_H

#include "client/bench/bench.h"
#include "engine/cache/coding.h"

typedef struct qkv_bench_codes {
  const qkv_bench_settings *settings;
  qkv_model model;
  qkv_coding *coding;
  const qkv_coder *coder;
  size_t pages;
  uint8_t *rows[2];   // fp16, by qkv_part, [pages][64][kv_heads][dim]
  size_t part_bytes;  // of a page's rows of one part
  float *floats[2];   // scratch memory for a page's rows
} qkv_bench_codes;

#define QKV_BENCH_CODES_OPTIONS 13
extern const qkv_option qkvi_bench_codes_options[QKV_BENCH_CODES_OPTIONS];

// Says what is wrong on standard error and returns an exit status; 0 if all is well.
int qkv_bench_codes_init(qkv_bench_codes *codes, const qkv_bench_settings *settings);
void qkv_bench_codes_deinit(qkv_bench_codes *codes);
// A page's rows to an image of at most qkv_bench_codes_image_bytes, 64-byte aligned. Returns its
// bytes.
size_t qkv_bench_codes_encode(qkv_bench_codes *codes, size_t page, void *image);
size_t qkv_bench_codes_image_bytes(const qkv_bench_codes *codes);

// Runs `once`, which goes through all pages, and a copy of the rows' bytes in turn, and prints figures of both.
int qkv_bench_codes_measure(qkv_bench_codes *codes, const char *bench, void (*once)(void *context), void *context,
                            size_t page_bytes);

#endif
