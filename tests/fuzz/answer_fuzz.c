// client/c/attend.c: what a daemon answers to an Attend of two items, read by libqkv.
//
// The parser is the file's own, so the file is part of this target.
#include "client/c/attend.c"
#include "tests/fuzz/fuzz.h"

#define ITEMS 2
#define QUERIES 1
#define Q_HEADS 2

static void read_result_rows(const qkv_client_result *result) {
  if (result->text[sizeof result->text - 1] != '\0') __builtin_trap();
  if (result->out == NULL) return;
  if (result->lse_count != QUERIES * Q_HEADS || result->out_count % result->lse_count != 0) __builtin_trap();
  volatile float sink = 0;
  for (size_t i = 0; i < result->out_count; i++) sink = result->out[i];
  for (size_t i = 0; i < result->lse_count; i++) sink = result->lse[i];
  (void)sink;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  const qkv_client_item items[ITEMS] = {
      {.session = "s", .q = {.dtype = QKV_CLIENT_FP32, .rank = 3, .dims = {QUERIES, Q_HEADS, 8}}},
      {.session = "s"},  // without queries
  };
  qkv_client_result results[ITEMS] = {0};
  qkv_error error = {0};
  fuzz_message message;
  fuzz_message_init(&message, data, size);
  if (read_response(message.bytes, items, ITEMS, 7, results, &error) != QKV_OK && error.text[0] == '\0') {
    __builtin_trap();
  }
  for (size_t i = 0; i < ITEMS; i++) read_result_rows(&results[i]);
  qkv_client_results_free(results, ITEMS);
  fuzz_message_deinit(&message);
  return 0;
}
