#include "client/worker/tokenizer.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/client/gguf_bytes.h"

// Where deploy/smollm2.sh leaves the real one.
#define SMOLLM2 QKV_SOURCE_DIR "/build/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

static gguf_bytes file;

static int clear(void **state) {
  (void)state;
  gguf_free(&file);
  return 0;
}

static qkvi_tokenizer *small(const char *pre) {
  gguf_begin(&file, 3, 0, GGUF_TOKENIZER_ENTRIES);
  gguf_put_tokenizer(&file, pre);
  qkv_gguf *read = NULL;
  qkvi_tokenizer *tokenizer = NULL;
  qkv_error error = {0};
  if (qkv_gguf_parse(file.data, file.count, &read, &error) != QKV_OK ||
      qkvi_tokenizer_gguf(read, &tokenizer, &error) != QKV_OK) {
    fail_msg("%s", error.text);
  }
  qkv_gguf_close(&read);
  return tokenizer;
}

static void expect(qkvi_tokenizer *tokenizer, const char *text, bool control, const int32_t *expected,
                   int64_t count) {
  int32_t *tokens = NULL;
  int64_t found = 0;
  qkvi_tokenizer_encode(tokenizer, (const uint8_t *)text, (int64_t)strlen(text), control, &tokens, &found);
  if (found != count) fail_msg("\"%s\" has %d tokens, expected are %d", text, (int)found, (int)count);
  assert_memory_equal(tokens, expected, (size_t)count * sizeof *tokens);
  free(tokens);
}

#define EXPECT(tokenizer, text, control, ...)                      \
  expect(tokenizer, text, control, (const int32_t[]){__VA_ARGS__}, \
         (int64_t)(sizeof(const int32_t[]){__VA_ARGS__} / sizeof(int32_t)))

// What is decoded from a text's tokens is the text.
static void check_round_trip(qkvi_tokenizer *tokenizer, const uint8_t *text, int64_t bytes, bool control) {
  int32_t *tokens = NULL;
  int64_t count = 0, at = 0;
  qkvi_tokenizer_encode(tokenizer, text, bytes, control, &tokens, &count);
  for (int64_t i = 0; i < count; i++) {
    size_t length = 0;
    const uint8_t *piece = qkvi_tokenizer_decode(tokenizer, tokens[i], &length);
    assert_true(at + (int64_t)length <= bytes);
    assert_memory_equal(piece, text + at, length);
    at += (int64_t)length;
  }
  assert_int_equal(at, bytes);
  free(tokens);
}

// Bytes of every kind, then more and more of them ASCII letters, blanks and characters.
static void check_random_round_trips(qkvi_tokenizer *tokenizer, const bool *left_out) {
  static const char *const pool[] = {
      "a", "hello", " ", "\n", "7", "\xc3\xa9", "\xe4\xb8\xad", "\xf0\x9f\x99\x82", "<|im_end|>", "'s"};
  uint32_t random = 1;
  for (int round = 0; round < 400; round++) {
    uint8_t text[512];
    int64_t bytes = 0;
    while (bytes < 400) {
      random = random * 1664525 + 1013904223;
      const uint32_t choice = random >> 8;
      if ((int)(choice % 400) < round) {
        const char *piece = pool[choice / 400 % (sizeof pool / sizeof *pool)];
        memcpy(text + bytes, piece, strlen(piece));
        bytes += (int64_t)strlen(piece);
      } else if (left_out == NULL || !left_out[choice / 400 % 256]) {
        text[bytes++] = (uint8_t)(choice / 400 % 256);
      }
    }
    check_round_trip(tokenizer, text, bytes, round % 2 == 0);
  }
}

static void test_bytes(void **state) {
  (void)state;
  qkvi_tokenizer *tokenizer = qkvi_tokenizer_bytes();
  assert_int_equal(qkvi_tokenizer_vocabulary(tokenizer), 256);
  assert_string_equal(qkvi_tokenizer_unit(tokenizer), "byte");
  EXPECT(tokenizer, "a \xff", true, 'a', ' ', 0xff);
  assert_false(qkvi_tokenizer_is_control(tokenizer, 2));
  check_random_round_trips(tokenizer, NULL);
  uint8_t *text = NULL;
  int64_t bytes = 0;
  qkv_error error = {0};
  assert_int_equal(qkvi_tokenizer_chat(tokenizer, (const uint8_t *)"a", 1, &text, &bytes, &error),
                   QKV_FAILED_PRECONDITION);
  assert_null(text);
  qkvi_tokenizer_destroy(&tokenizer);
  assert_null(tokenizer);
}

static void test_pieces_and_merges(void **state) {
  (void)state;
  qkvi_tokenizer *tokenizer = small("smollm");
  assert_int_equal(qkvi_tokenizer_vocabulary(tokenizer), GGUF_VOCABULARY);
  assert_string_equal(qkvi_tokenizer_unit(tokenizer), "token");
  EXPECT(tokenizer, "hello hello", false, 259, 260);
  EXPECT(tokenizer, "hello  hello", false, 259, ' ', 260);  // the last blank is the word's
  EXPECT(tokenizer, "hello\n hello", false, 259, '\n', 260);
  EXPECT(tokenizer, "aaaaa", false, 261, 261, 'a');
  EXPECT(tokenizer,
         "a\xff"
         "aa",
         false, 'a', 0xff, 261);
  EXPECT(tokenizer, "<|im_end|>", true, GGUF_END);
  EXPECT(tokenizer, "<|im_end|>", false, '<', '|', 'i', 'm', '_', 'e', 'n', 'd', '|', '>');
  EXPECT(tokenizer, "aa<|im_start|>aa", true, 261, GGUF_START, 261);
  assert_true(qkvi_tokenizer_is_control(tokenizer, GGUF_END));
  assert_false(qkvi_tokenizer_is_control(tokenizer, 261));
  check_random_round_trips(tokenizer, NULL);
  qkvi_tokenizer_destroy(&tokenizer);
}

static void test_chat(void **state) {
  (void)state;
  qkvi_tokenizer *tokenizer = small("gpt-2");
  uint8_t *text = NULL;
  int64_t bytes = 0;
  qkv_error error = {0};
  assert_int_equal(qkvi_tokenizer_chat(tokenizer, (const uint8_t *)"hello", 5, &text, &bytes, &error), QKV_OK);
  static const char expected[] =
      "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n";
  assert_int_equal(bytes, strlen(expected));
  assert_memory_equal(text, expected, strlen(expected));
  free(text);
  qkvi_tokenizer_destroy(&tokenizer);
}

// ---- Files that have none ----

// A file where the first `what` is replaced by another text.
static void refuse(const char *what, const char *by, const char *text) {
  assert_int_equal(strlen(what), strlen(by));
  gguf_begin(&file, 3, 0, GGUF_TOKENIZER_ENTRIES);
  gguf_put_tokenizer(&file, "smollm");
  uint8_t *at = memmem(file.data, file.count, what, strlen(what));
  assert_non_null(at);
  memcpy(at, by, strlen(by));
  qkv_gguf *read = NULL;
  qkvi_tokenizer *tokenizer = NULL;
  qkv_error error = {0};
  assert_int_equal(qkv_gguf_parse(file.data, file.count, &read, &error), QKV_OK);
  assert_int_not_equal(qkvi_tokenizer_gguf(read, &tokenizer, &error), QKV_OK);
  assert_null(tokenizer);
  if (strstr(error.text, text) == NULL) fail_msg("\"%s\" has no \"%s\"", error.text, text);
  qkv_gguf_close(&read);
}

static void test_refuses(void **state) {
  (void)state;
  refuse("gpt2", "bert", "tokenizer.ggml.model is \"bert\", this program runs \"gpt2\"");
  refuse("smollm", "llama3", "tokenizer.ggml.pre is \"llama3\", known are smollm and gpt-2");
  refuse("ggml.merges", "ggml.marges", "tokenizer.ggml.merges is missing");
  refuse("hell o", "hell q", "tokenizer.ggml.merges[3] is \"hell q\", no two tokens that make a third");
  refuse("hell o", "hello!", "tokenizer.ggml.merges[3] is \"hello!\"");
  refuse("hello", "hel o", "tokenizer.ggml.tokens[259] is \"hel o\", which has characters that stand for no byte");
}

static void test_a_byte_without_token(void **state) {
  (void)state;
  // Byte 'z' is called "y": there is none for it.
  gguf_begin(&file, 3, 0, GGUF_TOKENIZER_ENTRIES + 1);
  gguf_put_tokenizer(&file, "smollm");
  static const char z[] = "\x01\0\0\0\0\0\0\0z";
  uint8_t *at = memmem(file.data, file.count, z, sizeof z - 1);
  assert_non_null(at);
  at[8] = 'y';
  gguf_put_integer(&file, "tokenizer.ggml.unknown_token_id", GGUF_START);
  qkv_gguf *read = NULL;
  qkvi_tokenizer *tokenizer = NULL;
  qkv_error error = {0};
  assert_int_equal(qkv_gguf_parse(file.data, file.count, &read, &error), QKV_OK);
  assert_int_equal(qkvi_tokenizer_gguf(read, &tokenizer, &error), QKV_OK);
  EXPECT(tokenizer, "yz", false, 'y', GGUF_START);
  qkvi_tokenizer_destroy(&tokenizer);
  qkv_gguf_close(&read);
  at = memmem(file.data, file.count, "unknown", strlen("unknown"));
  assert_non_null(at);
  memcpy(at, "Unknown", strlen("Unknown"));
  assert_int_equal(qkv_gguf_parse(file.data, file.count, &read, &error), QKV_OK);
  assert_int_equal(qkvi_tokenizer_gguf(read, &tokenizer, &error), QKV_INVALID_ARGUMENT);
  assert_string_equal(
      error.text, "tokenizer.ggml.tokens has none for byte 0x7a, and there is no tokenizer.ggml.unknown_token_id");
  qkv_gguf_close(&read);
}

// ---- SmolLM2 ----

// What Hugging Face's tokenizers 0.22 give, from the same vocabulary and merges.
static void test_smollm2(void **state) {
  (void)state;
  if (access(SMOLLM2, R_OK) != 0) {
    print_message("skipped: there is no %s, see deploy/smollm2.sh\n", SMOLLM2);
    skip();
  }
  qkv_gguf *read = NULL;
  qkvi_tokenizer *tokenizer = NULL;
  assert_int_equal(qkv_gguf_open(SMOLLM2, &read, NULL), QKV_OK);
  assert_int_equal(qkvi_tokenizer_gguf(read, &tokenizer, NULL), QKV_OK);
  qkv_gguf_close(&read);
  assert_int_equal(qkvi_tokenizer_vocabulary(tokenizer), 49152);
  EXPECT(tokenizer, "Hello, world!", false, 19556, 28, 905, 17);
  EXPECT(tokenizer, "The quick brown fox jumps over 13 lazy dogs.", false, 504, 2365, 6354, 16438, 27003, 690, 216,
         33, 35, 23790, 5046, 30);
  EXPECT(tokenizer, "  indented\n\n\tcode = x[10] + y  # it's\n", false, 216, 641, 6574, 1116, 197, 4635, 446, 1792,
         75, 33, 32, 77, 1232, 329, 216, 907, 357, 506, 198);
  EXPECT(tokenizer, "don't we'll I'VE", false, 12420, 982, 392, 3060, 339, 23, 18525);
  EXPECT(tokenizer, "\r\n\r\n  1  2   3a", false, 18682, 256, 33, 256, 34, 333, 35, 81);
  EXPECT(tokenizer, "  \u00a0 x\u2003y", false, 256, 15442, 1792, 321, 221, 105);
  EXPECT(tokenizer, "\U0001f642 ok", false, 10813, 38887, 10907);
  EXPECT(tokenizer, "1234567.89e-10", false, 33, 34, 35, 36, 37, 38, 39, 30, 40, 41, 85, 29, 33, 32);
  EXPECT(tokenizer, "<|im_start|>user\n", true, 1, 4093, 198);
  // Bytes that it has no tokens for.
  static const uint8_t missing[] = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1d, 0xc0, 0xc1, 0xf1, 0xf2, 0xf5,
                                    0xf6, 0xf7, 0xf8, 0xf9, 0xfa, 0xfb, 0xfc, 0xfd, 0xfe, 0xff};
  bool left_out[256] = {false};
  for (size_t i = 0; i < sizeof missing; i++) left_out[missing[i]] = true;
  check_random_round_trips(tokenizer, left_out);
  EXPECT(tokenizer, "\xff", false, 0);
  qkvi_tokenizer_destroy(&tokenizer);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_bytes),   cmocka_unit_test(test_pieces_and_merges),    cmocka_unit_test(test_chat),
      cmocka_unit_test(test_refuses), cmocka_unit_test(test_a_byte_without_token), cmocka_unit_test(test_smollm2)};
  return cmocka_run_group_tests(tests, NULL, clear);
}
