// qkv-bench encode: rows in fp16 to pages, as an append does it once it has checked them.
#include <stdlib.h>

#include "client/bench/codes.h"

typedef struct encoding {
  qkv_bench_codes codes;
  void *image;
  size_t bytes;
} encoding;

static void encode_all(void *context) {
  encoding *e = context;
  for (size_t page = 0; page < e->codes.pages; page++) {
    e->bytes = qkv_bench_codes_encode(&e->codes, page, e->image);
  }
}

static int run(void *settings, const qkv_option_list *arguments) {
  (void)arguments;
  encoding e = {0};
  int status = qkv_bench_codes_init(&e.codes, settings);
  if (status == 0) {
    e.image = aligned_alloc(64, qkv_bench_codes_image_bytes(&e.codes));
    if (e.image == NULL) abort();
    encode_all(&e);
    status = qkv_bench_codes_measure(&e.codes, "encode", encode_all, &e, e.bytes);
    free(e.image);
  }
  qkv_bench_codes_deinit(&e.codes);
  return status;
}

const qkv_command qkvi_bench_encode = {
    .name = "encode",
    .arguments = "",
    .summary = "rows in fp16 to pages, in this process, compared with copying them",
    .options = qkvi_bench_codes_options,
    .option_count = QKV_BENCH_CODES_OPTIONS,
    .run = run};
