// Writes the seeds that are bytes of ours: a page, messages, and files of the storage. Texts are committed in corpus/
// as they are.
//
//   fuzz_seeds DIRECTORY    makes DIRECTORY/page/..., wire/..., items/..., control/..., objects/..., answer/...,
//                            segment/..., journal/... and gguf/... there
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "engine/codec/codec.h"
#include "proto/wire.h"
#include "storage/internal.h"
#include "tests/client/gguf_bytes.h"
#include "tests/fuzz/page_coder.h"

static FILE *open_seed(const char *directory, const char *target, const char *name) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%s", directory, target);
  if (mkdir(path, 0755) != 0 && errno != EEXIST) {
    perror(path);
    exit(1);
  }
  snprintf(path, sizeof path, "%s/%s/%s", directory, target, name);
  FILE *file = fopen(path, "wb");
  if (file == NULL) {
    perror(path);
    exit(1);
  }
  return file;
}

static void write_page(const char *directory, const char *name, size_t index, uint32_t tokens) {
  const qkv_coder *coder = fuzz_page_coder(index);
  void *image = aligned_alloc(64, (coder->codec->page_bytes_max(coder) + 63) / 64 * 64);
  size_t k_count = (size_t)QKV_PAGE_TOKENS * coder->kv_heads * coder->key_dim;
  size_t v_count = (size_t)QKV_PAGE_TOKENS * coder->kv_heads * coder->value_dim;
  float *k = calloc(k_count, sizeof(float));
  float *v = calloc(v_count, sizeof(float));
  if (image == NULL || k == NULL || v == NULL) abort();
  for (size_t i = 0; i < k_count; i++) k[i] = (float)(i * 7 % 13) - 6.0f;
  for (size_t i = 0; i < v_count; i++) v[i] = (float)(i * 5 % 11) - 5.0f;
  // Rows that coders keep as outliers, where they keep any.
  for (size_t i = k_count / 2; i < k_count / 2 + coder->key_dim; i++) k[i] *= 500;
  for (size_t i = v_count / 2; i < v_count / 2 + coder->value_dim; i++) v[i] *= i % 2 == 0 ? 500 : 1;
  size_t bytes = coder->codec->encode(coder, 0, tokens, QKV_FP32, k, v, NULL, image);
  FILE *file = open_seed(directory, "page", name);
  fputc((int)index, file);  // which coder reads it
  fwrite(image, 1, bytes, file);
  fclose(file);
  free(image);
  free(k);
  free(v);
}

static void put_tensor(qkv_wire_writer *writer, uint32_t field, int64_t heads, bool strided) {
  static const float data[2 * 2 * 8] = {0.5f, -1.0f, 2.0f};
  const int64_t dims[3] = {2, heads, 8};
  const int64_t strides[3] = {heads * 32, 32, 4};
  qkv_wire_begin(writer, field);
  qkv_wire_put_varint(writer, 1, 1);
  qkv_wire_put_packed(writer, 2, dims, 3);
  if (strided) qkv_wire_put_packed(writer, 3, strides, 3);
  qkv_wire_put_reference(writer, 15, data, (size_t)heads * 2 * 8 * sizeof(float), NULL);
  qkv_wire_end(writer);
}

// Writes the finished message and destroys the writer.
static void write_message(const char *directory, const char *target, const char *name, qkv_wire_writer *writer) {
  FILE *file = open_seed(directory, target, name);
  fputc(37, file);  // where fuzz_message_init cuts
  size_t count = 0;
  const qkv_wire_piece *pieces = qkv_wire_writer_pieces(writer, &count);
  for (size_t i = 0; i < count; i++) fwrite(pieces[i].data, 1, pieces[i].length, file);
  fclose(file);
  qkv_wire_writer_destroy(&writer);
}

static void write_request(const char *directory, const char *target, const char *name, bool attend) {
  qkv_wire_writer *writer = qkv_wire_writer_create();
  for (int i = 0; i < 2; i++) {
    qkv_wire_begin(writer, 1);
    qkv_wire_put_string(writer, 1, "session");
    qkv_wire_put_varint(writer, 2, 3);
    qkv_wire_put_varint(writer, 3, 64);
    qkv_wire_begin(writer, 6);
    qkv_wire_put_double(writer, 1, 0.125);
    qkv_wire_end(writer);
    put_tensor(writer, 8, 1, false);
    put_tensor(writer, 9, 1, i == 1);
    if (attend) put_tensor(writer, 10, 2, false);
    qkv_wire_end(writer);
  }
  write_message(directory, target, name, writer);
}

// An append that opens its session, brings a page as it is coded, with ids of its tokens, and completes the session.
static void write_whole_session(const char *directory) {
  static const int64_t ids[2] = {17, 300};
  qkv_wire_writer *writer = qkv_wire_writer_create();
  qkv_wire_begin(writer, 1);
  qkv_wire_put_string(writer, 1, "session");
  qkv_wire_put_packed(writer, 7, ids, 2);
  qkv_wire_begin(writer, 12);
  qkv_wire_put_string(writer, 2, "codes");
  qkv_wire_end(writer);
  qkv_wire_end(writer);
  qkv_wire_begin(writer, 2);
  qkv_wire_put_string(writer, 1, "session");
  qkv_wire_end(writer);
  qkv_wire_put_varint(writer, 3, 1);
  write_message(directory, "items", "whole_session", writer);
}

// What a daemon says to two items, the second without queries.
static void write_answer(const char *directory, const char *name, uint64_t code) {
  static const float data[16] = {0.5f, -1.0f};
  const int64_t out_dims[3] = {1, 2, 8}, lse_dims[2] = {1, 2};
  qkv_wire_writer *writer = qkv_wire_writer_create();
  for (int i = 0; i < 2; i++) {
    qkv_wire_begin(writer, 1);
    qkv_wire_begin(writer, 1);
    qkv_wire_put_varint(writer, 1, code);
    qkv_wire_put_string(writer, 2, code == 0 ? "" : "items[0]: no session s");
    qkv_wire_end(writer);
    qkv_wire_put_varint(writer, 2, 100);
    qkv_wire_begin(writer, 3);
    qkv_wire_put_varint(writer, 1, 1);
    qkv_wire_put_packed(writer, 2, out_dims, 3);
    qkv_wire_put_reference(writer, 15, data, 16 * sizeof(float), NULL);
    qkv_wire_end(writer);
    qkv_wire_begin(writer, 4);
    qkv_wire_put_varint(writer, 1, 1);
    qkv_wire_put_packed(writer, 2, lse_dims, 2);
    qkv_wire_put_reference(writer, 15, data, 2 * sizeof(float), NULL);
    qkv_wire_end(writer);
    qkv_wire_end(writer);
  }
  qkv_wire_put_varint(writer, 2, 7);
  write_message(directory, "answer", name, writer);
}

// RegisterModelRequest, with every part that a model has.
static void write_model(const char *directory) {
  qkv_wire_writer *writer = qkv_wire_writer_create();
  qkv_wire_begin(writer, 1);
  qkv_wire_put_string(writer, 1, "m");
  for (uint32_t field = 2; field <= 6; field++) qkv_wire_put_varint(writer, field, 8);
  qkv_wire_put_varint(writer, 7, 2);
  qkv_wire_begin(writer, 8);
  qkv_wire_put_double(writer, 1, 10000);
  qkv_wire_end(writer);
  qkv_wire_begin(writer, 12);
  qkv_wire_put_string(writer, 1, "embedded");
  qkv_wire_put_double(writer, 2, 4);
  qkv_wire_end(writer);
  qkv_wire_end(writer);
  write_message(directory, "control", "model", writer);
}

static void write_session(const char *directory) {
  qkv_wire_writer *writer = qkv_wire_writer_create();
  qkv_wire_put_string(writer, 1, "session");
  qkv_wire_put_string(writer, 2, "m");
  qkv_wire_begin(writer, 5);
  qkv_wire_put_string(writer, 1, "embedded");
  qkv_wire_end(writer);
  write_message(directory, "control", "session", writer);
}

// A sealed segment of two records (its numbers are those that segment_fuzz.c looks for), and a journal of three
// entries.
static void write_storage(const char *directory) {
  enum { STORE = 7, SEGMENT = 1, BLOCK = 4096 };
  uint8_t *bytes = aligned_alloc(BLOCK, 8 * BLOCK);
  if (bytes == NULL) abort();
  memset(bytes, 0, 8 * BLOCK);
  qkvi_segment_header_make((qkvi_segment_header *)bytes, STORE, SEGMENT, 1);
  qkv_record_header headers[2];
  for (uint64_t i = 0; i < 2; i++) {
    const qkv_record_meta meta = {.session = 1, .position = 64 * i, .tokens = 64};
    uint8_t *at = bytes + (1 + i) * BLOCK, raw[500] = {1, 2, 3};
    const uint64_t stored = i == 0 ? qkvi_record_compress(raw, sizeof raw, at + sizeof *headers) : sizeof raw;
    if (i == 1) memcpy(at + sizeof *headers, raw, sizeof raw);
    qkvi_record_describe(&headers[i], &meta, i + 1, sizeof raw, i == 0 ? QKV_RECORD_ZSTD : QKV_RECORD_PLAIN,
                         at + sizeof *headers, stored);
    qkvi_record_place(&headers[i], STORE, SEGMENT, (1 + i) * BLOCK, 0);
    memcpy(at, &headers[i], sizeof *headers);
  }
  qkvi_segment_tail_make(bytes + 3 * BLOCK, STORE, SEGMENT, 3 * BLOCK, headers, 2);
  FILE *file = open_seed(directory, "segment", "sealed");
  fwrite(bytes, 1, 3 * BLOCK + qkvi_segment_tail_bytes(2), file);
  fclose(file);
  qkvi_journal_header_make(bytes, STORE, 1, 0, true);
  for (uint64_t i = 0; i < 2; i++) {
    const qkv_journal_entry entry = {.kind = i == 0 ? QKV_JOURNAL_SESSION_OPEN : QKV_JOURNAL_SESSION_TRUNCATE,
                                     .sequence = UINT64_C(1) << QKVI_EPOCH_SHIFT | (i + 1),
                                     .session = 9,
                                     .payload = "model",
                                     .bytes = 5};
    qkvi_entry_make(bytes + (2 + i) * BLOCK, &entry, STORE, 0, (2 + i) * BLOCK);
  }
  uint64_t payload[4];
  qkv_journal_entry fork = {.kind = QKV_JOURNAL_SESSION_FORK,
                            .sequence = UINT64_C(1) << QKVI_EPOCH_SHIFT | 3,
                            .session = 10,
                            .parent = 9,
                            .layers = 2,
                            .positions = (const uint64_t[]){64, 128}};
  qkvi_fork_make((uint8_t *)payload, &fork);
  fork.payload = payload;
  fork.bytes = sizeof payload;
  qkvi_entry_make(bytes + 4 * BLOCK, &fork, STORE, 0, 4 * BLOCK);
  file = open_seed(directory, "journal", "three");
  fwrite(bytes, 1, 5 * BLOCK, file);
  fclose(file);
  free(bytes);
}

// A tokenizer and two tensors.
static void write_gguf(const char *directory) {
  gguf_bytes bytes = {0};
  gguf_begin(&bytes, 3, 2, 1 + GGUF_TOKENIZER_ENTRIES);
  gguf_put_number(&bytes, "llama.rope.freq_base", 1e5f);
  gguf_put_tokenizer(&bytes, "smollm");
  gguf_put_tensor(&bytes, "a", QKV_GGUF_F16, 2, (const int64_t[]){4, 2}, 0);
  gguf_put_tensor(&bytes, "b", QKV_GGUF_Q4_1, 1, (const int64_t[]){32}, 32);
  gguf_align(&bytes, 32);
  for (int i = 0; i < 52; i++) gguf_put(&bytes, "q", 1);
  FILE *file = open_seed(directory, "gguf", "tokenizer");
  fwrite(bytes.data, 1, bytes.count, file);
  fclose(file);
  gguf_free(&bytes);
}

// Two objects in three pieces.
static void write_objects(const char *directory) {
  qkv_wire_writer *writer = qkv_wire_writer_create();
  for (int i = 0; i < 3; i++) {
    qkv_wire_begin(writer, 1);
    if (i != 1) {
      qkv_wire_begin(writer, 1);
      qkv_wire_put_string(writer, 61, i == 0 ? "state/1" : "state/2");
      qkv_wire_put_varint(writer, 63, i == 0 ? 12 : 6);
      qkv_wire_put_varint(writer, 65, 2);
      qkv_wire_end(writer);
      qkv_wire_put_varint(writer, 2, 1);
    }
    qkv_wire_put_reference(writer, 15, "bytes!", 6, NULL);
    qkv_wire_end(writer);
  }
  write_message(directory, "objects", "two", writer);
}

int main(int argc, char **argv) {
  if (argc != 2) {
    fprintf(stderr, "usage: fuzz_seeds DIRECTORY\n");
    return 2;
  }
  write_page(argv[1], "one-head", 0, 64);
  write_page(argv[1], "short", 1, 5);
  write_page(argv[1], "wide", 2, 64);
  write_page(argv[1], "archive", 3, 64);
  write_page(argv[1], "attend", 4, 33);
  write_page(argv[1], "outliers", 5, 64);
  write_page(argv[1], "outliers-archive", 6, 50);
  write_page(argv[1], "kivi", 7, 64);
  write_page(argv[1], "turboquant", 8, 40);
  write_page(argv[1], "polarquant", 9, 64);
  write_page(argv[1], "running-u8", 10, 64);
  write_page(argv[1], "turboquant-ip", 11, 64);
  write_page(argv[1], "pq", 12, 40);
  write_page(argv[1], "int8", 13, 64);
  write_page(argv[1], "commvq", 14, 50);
  write_page(argv[1], "outlier-channels", 15, 64);
  write_page(argv[1], "low-rank", 16, 64);
  write_page(argv[1], "deltas", 17, 50);
  write_page(argv[1], "ecsq", 21, 50);
  write_request(argv[1], "wire", "append", false);
  write_request(argv[1], "items", "append", false);
  write_whole_session(argv[1]);
  write_request(argv[1], "items", "attend", true);
  write_answer(argv[1], "two", 0);
  write_answer(argv[1], "failed", 5);
  write_model(argv[1]);
  write_session(argv[1]);
  write_objects(argv[1]);
  write_storage(argv[1]);
  write_gguf(argv[1]);
  return 0;
}
