// engine/codec/page.h: an image that passes validation may be read by every function of its codec, gives rows and
// scores that are finite, and may be appended to a layer (engine/cache/layer_coded.h), as a client's page is. The
// first byte of the input chooses the coder that reads it.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cache/layer_coded.h"
#include "engine/codec/narrow.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/page_coder.h"

static void expect_finite(const float *values, size_t count) {
  for (size_t i = 0; i < count; i++) {
    if (!isfinite(values[i])) __builtin_trap();
  }
}

// The page's place in an empty layer that begins at its position: whatever it holds, the layer stays in order.
static void append_page(const qkv_coder *coder, const qkv_page_header *header) {
  const qkv_model model = {.layers = coder->layer + 1,
                           .kv_heads = coder->kv_heads,
                           .q_heads = coder->kv_heads,
                           .key_dim = coder->key_dim,
                           .value_dim = coder->value_dim,
                           .dtype = QKV_FP16,
                           .scale = 1};
  const qkv_coded_page page = {.image = header,
                               .bytes = header->bytes,
                               .tokens = header->tokens,
                               .position = header->position,
                               .coder = coder};
  if (header->position > QKV_POSITION_MAX) return;
  qkv_arena *arena = qkv_arena_create("memory-budget", (uint64_t)1 << 30);
  qkv_layer layer;
  qkv_layer_init(&layer,
                 &(qkv_layer_config){.model = &model,
                                     .layer = coder->layer,
                                     .first_position = header->position,
                                     .policy = {.codec = coder->codec},
                                     .arena = arena},
                 coder);
  uint64_t appended;
  qkv_error error = {0};
  const bool fits = header->layer == coder->layer && header->position <= QKV_POSITION_MAX - QKV_PAGE_TOKENS;
  const qkv_status status = qkv_layer_append_pages(&layer, &page, 1, &appended, &error);
  if ((status == QKV_OK) != fits || qkv_layer_validate(&layer) != NULL) __builtin_trap();
  if (fits && qkv_layer_append_pages(&layer, &page, 1, &appended, &error) != QKV_OK) __builtin_trap();
  qkv_layer_deinit(&layer);
  qkv_arena_destroy(&arena);
}

static void read_head(const qkv_coder *coder, const void *page, const qkv_page_header *header, uint16_t head) {
  const qkv_codec *codec = coder->codec;
  const size_t width_max = coder->key_dim > coder->value_dim ? coder->key_dim : coder->value_dim;
  float *rows = calloc(QKV_PAGE_TOKENS * width_max, sizeof(float));
  float *sums = calloc(width_max, sizeof(float));
  qkv_query_block *queries = calloc(1, sizeof *queries);
  float scores[QKV_PAGE_TOKENS];
  const double total = 1;
  if (rows == NULL || sums == NULL || queries == NULL) abort();
  codec->decode(coder, page, head, QKV_K, true, rows);
  expect_finite(rows, header->tokens * (size_t)coder->key_dim);
  codec->decode(coder, page, head, QKV_K, false, rows);
  expect_finite(rows, header->tokens * (size_t)coder->key_dim);
  codec->rows_match(coder, page, head, QKV_K, 0, header->tokens, rows);
  codec->decode(coder, page, head, QKV_V, false, rows);
  expect_finite(rows, header->tokens * (size_t)coder->value_dim);
  codec->rows_match(coder, page, head, QKV_V, header->tokens / 2, header->tokens - header->tokens / 2, rows);
  queries->count = 1;
  for (size_t i = 0; i < coder->key_dim; i++) queries->rows[i] = (float)(i % 7) - 3.0f;
  codec->query(coder, head, queries);
  codec->scores(coder, page, head, queries, scores);
  expect_finite(scores, header->tokens);
  float peak = 0, weights_total;
  for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) peak = scores[t] > peak ? scores[t] : peak;
  if (codec->weigh != NULL) codec->weigh(coder, &page, 1, head, queries, scores, &peak, &weights_total, sums);
  codec->accumulate(coder, page, head, scores, 1, sums);
  codec->output(coder, head, sums, &total, 1);
  free(rows);
  free(sums);
  free(queries);
}

// The page at half its tiers is one, too.
static void narrow_page(const qkv_coder *coder, const qkv_page_header *header) {
  qkv_head_tiers tiers[4];
  uint8_t *image = aligned_alloc(64, (header->bytes + 63) / 64 * 64);
  if (image == NULL || header->kv_heads > 4) abort();
  qkvi_embedded_planes.tiers(header, tiers);
  for (size_t i = 0; i < header->kv_heads * sizeof *tiers; i++) ((uint8_t *)tiers)[i] /= 2;
  const size_t bytes = coder->codec->planes->drop(coder, header, tiers, image);
  if (coder->codec->validate(coder, image, bytes, NULL) != QKV_OK) __builtin_trap();
  free(image);
}

static void read_page(const qkv_coder *coder, const void *image) {
  const qkv_page_header *header = image;
  if (coder->codec->planes != NULL) narrow_page(coder, header);
  append_page(coder, header);
  for (uint16_t head = 0; head < header->kv_heads; head++) read_head(coder, image, header, head);
}

// By libFuzzer, before it looks at the time: a codebook is found in seconds, with sanitizers.
int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerInitialize(int *argc, char ***argv) {
  (void)argc;
  (void)argv;
  for (size_t i = 0; i < FUZZ_PAGE_CODERS; i++) (void)fuzz_page_coder(i);
  return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  if (size == 0) return 0;
  const qkv_coder *coder = fuzz_page_coder(data[0] % FUZZ_PAGE_CODERS);
  data++;
  size--;
  uint8_t *image = aligned_alloc(64, (size + 64) / 64 * 64);
  if (image == NULL) abort();
  if (size > 0) memcpy(image, data, size);
  // Bytes behind `size` belong to the allocation only.
  __builtin_memset(image + size, 0xa5, (size + 64) / 64 * 64 - size);
  qkv_error error = {0};
  if (coder->codec->validate(coder, image, size, &error) == QKV_OK) read_page(coder, image);
  // A fuzzer does not guess checksums: the same image again with length and checksum put right.
  if (size >= sizeof(qkv_page_header) && size <= UINT32_MAX) {
    uint32_t bytes = (uint32_t)size;
    memcpy(image + offsetof(qkv_page_header, bytes), &bytes, sizeof bytes);
    qkv_page_seal(image);
    error = (qkv_error){0};
    if (coder->codec->validate(coder, image, size, &error) == QKV_OK) {
      read_page(coder, image);
    } else if (error.text[0] == '\0') {
      __builtin_trap();
    }
  }
  free(image);
  return 0;
}
