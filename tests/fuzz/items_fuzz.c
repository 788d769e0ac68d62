// server/handlers/items.h: AppendRequest and AttendRequest; every row of an item without an error may be read.
#include "server/handlers/items.h"

#include <stdlib.h>

#include "engine/base/tensor.h"
#include "tests/fuzz/fuzz.h"

#define ITEMS_MAX 64
#define TENSOR_BYTES_MAX 65536

static void read_tensor(const qkv_tensor *tensor) {
  if (tensor->rank == 0) return;
  if (tensor->rank != 3) __builtin_trap();
  float *row = malloc((size_t)tensor->dims[2] * sizeof(float));
  if (row == NULL) abort();
  for (int64_t i = 0; i < tensor->dims[0]; i++) {
    for (int64_t j = 0; j < tensor->dims[1]; j++) qkv_tensor_row(tensor, i, j, row);
  }
  free(row);
}

static void read_ids(const qkvi_item *item) {
  if (item->token_ids.count == 0) return;
  if (item->pages == 0 && (item->k.rank != 3 || item->token_ids.count != (uint64_t)item->k.dims[0])) __builtin_trap();
  uint32_t *ids = malloc((size_t)item->token_ids.count * sizeof *ids);
  if (ids == NULL) abort();
  qkvi_token_ids_read(&item->token_ids, ids);
  free(ids);
}

static void read_item(const qkvi_item *item, qkvi_request_kind kind) {
  if (item->error.status != QKV_OK) {
    if (item->error.text[0] == '\0') __builtin_trap();
    return;
  }
  if ((item->k.rank == 0) != (item->v.rank == 0)) __builtin_trap();
  if (kind == QKVI_APPEND_REQUEST && item->pages == 0 && qkvi_item_row_bytes(item) == 0) __builtin_trap();
  read_ids(item);
  read_tensor(&item->k);
  read_tensor(&item->v);
  read_tensor(&item->q);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  const qkvi_limits limits = {.items_max = ITEMS_MAX, .message_bytes_max = TENSOR_BYTES_MAX};
  fuzz_message message;
  fuzz_message_init(&message, data, size);
  qkvi_request request = {0};
  for (int kind = QKVI_APPEND_REQUEST; kind <= QKVI_ATTEND_REQUEST; kind++) {
    qkv_error error = {0};
    if (qkvi_request_parse(message.bytes, (qkvi_request_kind)kind, &limits, &request, &error) != QKV_OK) {
      if (error.text[0] == '\0') __builtin_trap();
      continue;
    }
    const bool marked = kind == QKVI_APPEND_REQUEST && (request.opens > 0 || request.complete);
    if ((request.count == 0 && !marked) || request.count > ITEMS_MAX) __builtin_trap();
    for (size_t i = 0; i < request.count; i++) read_item(&request.items[i], (qkvi_request_kind)kind);
  }
  qkvi_request_deinit(&request);
  fuzz_message_deinit(&message);
  return 0;
}
