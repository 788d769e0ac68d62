// qkv-bench decode: pages to rows in fp16, in token order, as a fetch does it before it sends them.
#include <stdlib.h>
#include <string.h>

#include "client/bench/codes.h"
#include "engine/base/tensor.h"

typedef struct decoding {
  qkv_bench_codes codes;
  uint8_t *images;  // [pages]
  size_t image_bytes;
  uint8_t *out;  // fp16 rows of a page, [kv_heads][64][dim]
} decoding;

static void decode_all(void *context) {
  decoding *d = context;
  const qkv_coder *coder = d->codes.coder;
  const size_t count = (size_t)QKV_PAGE_TOKENS * coder->key_dim;
  for (size_t page = 0; page < d->codes.pages; page++) {
    for (uint16_t head = 0; head < coder->kv_heads; head++) {
      for (qkv_part part = QKV_K; part <= QKV_V; part++) {
        coder->codec->decode(coder, d->images + page * d->image_bytes, head, part, false, d->codes.floats[part]);
        qkv_from_float(QKV_FP16, d->codes.floats[part], d->out + ((size_t)head * 2 + part) * 2 * count, count);
      }
    }
  }
}

static int run(void *settings, const qkv_option_list *arguments) {
  (void)arguments;
  decoding d = {0};
  int status = qkv_bench_codes_init(&d.codes, settings);
  if (status == 0) {
    size_t bytes = 0;
    d.image_bytes = qkv_bench_codes_image_bytes(&d.codes);
    d.images = aligned_alloc(64, d.codes.pages * d.image_bytes);
    d.out = aligned_alloc(64, 2 * d.codes.part_bytes);
    if (d.images == NULL || d.out == NULL) abort();
    for (size_t page = 0; page < d.codes.pages; page++) {
      bytes = qkv_bench_codes_encode(&d.codes, page, d.images + page * d.image_bytes);
    }
    status = qkv_bench_codes_measure(&d.codes, "decode", decode_all, &d, bytes);
    free(d.images);
    free(d.out);
  }
  qkv_bench_codes_deinit(&d.codes);
  return status;
}

const qkv_command qkvi_bench_decode = {
    .name = "decode",
    .arguments = "",
    .summary = "pages to rows in fp16, in this process, compared with copying them",
    .options = qkvi_bench_codes_options,
    .option_count = QKV_BENCH_CODES_OPTIONS,
    .run = run};
