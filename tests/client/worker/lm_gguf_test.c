#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "client/worker/exact.h"
#include "client/worker/figures.h"
#include "client/worker/forward.h"
#include "client/worker/lm.h"
#include "tests/client/gguf_bytes.h"

// Where deploy/smollm2.sh leaves it.
#define SMOLLM2 QKV_SOURCE_DIR "/build/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

static gguf_bytes file;
static char directory[] = "/tmp/qkv-lm-gguf-XXXXXX";
static char path[64];

static int make_directory(void **state) {
  (void)state;
  if (mkdtemp(directory) == NULL) return -1;
  snprintf(path, sizeof path, "%s/small.Q4_1.gguf", directory);
  return 0;
}

static int remove_directory(void **state) {
  (void)state;
  gguf_free(&file);
  unlink(path);
  return rmdir(directory);
}

// ---- A small model ----

enum { HIDDEN = 12, FFN = 8, Q_HEADS = 3, KV_HEADS = 1, DIM = 4, MODEL_ENTRIES = 8 };

static const struct {
  const char *name;
  int rank;
  int64_t dims[2];  // as the file has them: the columns first
} tensors[] = {
    {"token_embd.weight", 2, {HIDDEN, GGUF_VOCABULARY}},
    {"blk.0.attn_norm.weight", 1, {HIDDEN, 1}},
    {"blk.0.attn_q.weight", 2, {HIDDEN, Q_HEADS *DIM}},
    {"blk.0.attn_k.weight", 2, {HIDDEN, KV_HEADS *DIM}},
    {"blk.0.attn_v.weight", 2, {HIDDEN, KV_HEADS *DIM}},
    {"blk.0.attn_output.weight", 2, {Q_HEADS * DIM, HIDDEN}},
    {"blk.0.ffn_norm.weight", 1, {HIDDEN, 1}},
    {"blk.0.ffn_gate.weight", 2, {HIDDEN, FFN}},
    {"blk.0.ffn_up.weight", 2, {HIDDEN, FFN}},
    {"blk.0.ffn_down.weight", 2, {FFN, HIDDEN}},
    {"output_norm.weight", 1, {HIDDEN, 1}},
    {"output.weight", 2, {HIDDEN, GGUF_VOCABULARY}},
};
enum { TENSORS = sizeof tensors / sizeof *tensors };

static void put_metadata(uint32_t kv_heads, const char *architecture) {
  gguf_put_string(&file, "general.architecture", architecture);
  gguf_put_integer(&file, "llama.block_count", 1);
  gguf_put_integer(&file, "llama.context_length", 64);
  gguf_put_integer(&file, "llama.embedding_length", HIDDEN);
  gguf_put_integer(&file, "llama.feed_forward_length", FFN);
  gguf_put_integer(&file, "llama.attention.head_count", Q_HEADS);
  gguf_put_integer(&file, "llama.attention.head_count_kv", kv_heads);
  gguf_put_number(&file, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
  gguf_put_tokenizer(&file, "smollm");
}

// Element `index` of tensor `i`.
static float value_of(int i, int64_t index) {
  return (float)((index * 37 + i * 101) % 251) / 64 - 1.5f;
}

static void put_data(int count) {
  for (int i = 0; i < count; i++) {
    gguf_align(&file, 32);
    for (int64_t j = 0; j < tensors[i].dims[0] * tensors[i].dims[1]; j++) {
      const float value = value_of(i, j);
      gguf_put(&file, &value, sizeof value);
    }
  }
  FILE *out = fopen(path, "wb");
  assert_non_null(out);
  assert_int_equal(fwrite(file.data, 1, file.count, out), file.count);
  fclose(out);
}

// The first `count` of the tensors; the last of them is called `last` where that is not NULL.
static void write_model(int count, const char *last) {
  gguf_begin(&file, 3, (uint64_t)count, MODEL_ENTRIES + GGUF_TOKENIZER_ENTRIES);
  put_metadata(KV_HEADS, "llama");
  uint64_t offset = 0;
  for (int i = 0; i < count; i++) {
    const char *name = last != NULL && i == count - 1 ? last : tensors[i].name;
    gguf_put_tensor(&file, name, QKV_GGUF_F32, tensors[i].rank, tensors[i].dims, offset);
    offset += ((uint64_t)(tensors[i].dims[0] * tensors[i].dims[1]) * sizeof(float) + 31) / 32 * 32;
  }
  put_data(count);
}

static qkvi_lm *load(void) {
  qkvi_lm *lm = NULL;
  qkv_error error = {0};
  if (qkvi_lm_load(path, &lm, &error) != QKV_OK) fail_msg("%s", error.text);
  return lm;
}

static void expect_tensor(const float *loaded, int index) {
  for (int64_t j = 0; j < tensors[index].dims[0] * tensors[index].dims[1]; j++) {
    assert_true(loaded[j] == value_of(index, j));
  }
}

// Rows of a head come as 0, 2, 1, 3 of what is computed with: neighbours 0 1 and 2 3 in the file are turned together.
static void expect_unpermuted(const float *loaded, int index) {
  static const int from[DIM] = {0, 2, 1, 3};
  for (int64_t row = 0; row < tensors[index].dims[1]; row++) {
    for (int64_t column = 0; column < HIDDEN; column++) {
      const int64_t in_file = row / DIM * DIM + from[row % DIM];
      assert_true(loaded[row * HIDDEN + column] == value_of(index, in_file * HIDDEN + column));
    }
  }
}

static void test_loads(void **state) {
  (void)state;
  write_model(TENSORS, NULL);
  qkvi_lm *lm = load();
  assert_string_equal(lm->name, "small.Q4_1");
  assert_int_equal(lm->layers, 1);
  assert_int_equal(lm->hidden, HIDDEN);
  assert_int_equal(lm->ffn, FFN);
  assert_int_equal(lm->q_heads, Q_HEADS);
  assert_int_equal(lm->kv_heads, KV_HEADS);
  assert_int_equal(lm->head_dim, DIM);
  assert_int_equal(lm->context, 64);
  assert_int_equal(lm->vocabulary, GGUF_VOCABULARY);
  assert_true(lm->rope_theta == 10000 && fabs(lm->norm_epsilon - 1e-5) < 1e-10);
  const qkvi_lm_layer *layer = lm->layer;
  expect_tensor(lm->embedding, 0);
  expect_tensor(layer->attention_norm, 1);
  expect_unpermuted(layer->wq, 2);
  expect_unpermuted(layer->wk, 3);
  expect_tensor(layer->wv, 4);
  expect_tensor(layer->wo, 5);
  expect_tensor(layer->mlp_norm, 6);
  expect_tensor(layer->gate, 7);
  expect_tensor(layer->up, 8);
  expect_tensor(layer->down, 9);
  expect_tensor(lm->norm, 10);
  expect_tensor(lm->head, 11);
  qkvi_lm_free(&lm);
}

static void test_a_tied_head(void **state) {
  (void)state;
  write_model(TENSORS - 1, NULL);
  qkvi_lm *lm = load();
  assert_ptr_equal(lm->head, lm->embedding);
  qkvi_lm_free(&lm);
}

static void refuse(qkv_status status, const char *text) {
  qkvi_lm *lm = NULL;
  qkv_error error = {0};
  assert_int_equal(qkvi_lm_load(path, &lm, &error), status);
  assert_null(lm);
  assert_ptr_equal(strstr(error.text, path), error.text);
  if (strstr(error.text, text) == NULL) fail_msg("\"%s\" has no \"%s\"", error.text, text);
}

static void test_refuses(void **state) {
  (void)state;
  for (int count = 1; count < TENSORS - 1; count++) {
    write_model(count, NULL);
    refuse(QKV_INVALID_ARGUMENT, "there is no tensor");
    refuse(QKV_INVALID_ARGUMENT, tensors[count].name);
  }
  write_model(TENSORS - 1, "output_norm.bias");
  refuse(QKV_INVALID_ARGUMENT, "tensor output_norm.bias is there, this program runs models without biases");
  write_model(TENSORS, "rope_freqs.weight");
  refuse(QKV_INVALID_ARGUMENT, "tensor rope_freqs.weight is there");
  gguf_begin(&file, 3, 0, MODEL_ENTRIES + GGUF_TOKENIZER_ENTRIES);
  put_metadata(2, "llama");
  put_data(0);
  refuse(QKV_INVALID_ARGUMENT, "3 query heads, 2 KV heads and heads of 4 do not go together");
  gguf_begin(&file, 3, 0, MODEL_ENTRIES + GGUF_TOKENIZER_ENTRIES);
  put_metadata(KV_HEADS, "qwen2");
  put_data(0);
  refuse(QKV_INVALID_ARGUMENT, "general.architecture is \"qwen2\", this program runs \"llama\"");
  gguf_begin(&file, 3, 1, MODEL_ENTRIES + GGUF_TOKENIZER_ENTRIES);
  put_metadata(KV_HEADS, "llama");
  gguf_put_tensor(&file, "token_embd.weight", QKV_GGUF_F32, 2, (const int64_t[]){HIDDEN, 7}, 0);
  put_data(1);
  refuse(QKV_INVALID_ARGUMENT, "tensor token_embd.weight has not the shape that the metadata gives, [264, 12]");
  unlink(path);
  refuse(QKV_NOT_FOUND, "No such file");
}

// ---- SmolLM2 ----

static void test_smollm2(void **state) {
  (void)state;
  if (access(SMOLLM2, R_OK) != 0) {
    print_message("skipped: there is no %s, see deploy/smollm2.sh\n", SMOLLM2);
    skip();
  }
  qkvi_lm *lm = NULL;
  assert_int_equal(qkvi_lm_load(SMOLLM2, &lm, NULL), QKV_OK);
  assert_int_equal(lm->layers, 30);
  assert_true(lm->rope_theta == 100000);
  static const char text[] = "The capital of France is", expected[] = " Paris";
  int32_t *tokens = NULL;
  int64_t count = 0;
  qkvi_tokenizer_encode(lm->tokenizer, (const uint8_t *)text, (int64_t)strlen(text), false, &tokens, &count);
  float *logits = calloc((size_t)lm->vocabulary, sizeof *logits);
  assert_non_null(logits);
  qkvi_forward *forward = qkvi_forward_create(lm, count, count);
  qkvi_exact *exact = qkvi_exact_create(lm, count);
  assert_int_equal(qkvi_forward_run(forward, tokens, count, 0, qkvi_exact_kv(exact), 1, logits, NULL), QKV_OK);
  size_t bytes = 0;
  const uint8_t *next = qkvi_tokenizer_decode(lm->tokenizer, qkvi_likeliest(logits, lm->vocabulary), &bytes);
  assert_int_equal(bytes, strlen(expected));
  assert_memory_equal(next, expected, bytes);
  qkvi_exact_destroy(&exact);
  qkvi_forward_destroy(&forward);
  free(logits);
  free(tokens);
  qkvi_lm_free(&lm);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_loads), cmocka_unit_test(test_a_tied_head),
                                     cmocka_unit_test(test_refuses), cmocka_unit_test(test_smollm2)};
  return cmocka_run_group_tests(tests, make_directory, remove_directory);
}
