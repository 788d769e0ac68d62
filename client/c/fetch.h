// What fetch.c and coded.c share: the request, and rows that have arrived.
#ifndef QKV_CLIENT_C_FETCH_H
#define QKV_CLIENT_C_FETCH_H

#include "client/c/client.h"

#define qkvi_fetch_method "/qkv.v1.KvCache/Fetch"

// INVALID_ARGUMENT: layers that are not named in rising order, or heads first: of fetches into memory.
qkv_code qkvi_fetch_check(const qkv_client_fetch *request, qkv_call_error *error);

// The message, for qkvi_read_stream to take. `session` is not NULL.
grpc_byte_buffer *qkvi_fetch_request(qkv_client *client, const qkv_client_fetch *fetch, bool coded);

typedef struct qkvi_row_receiver {
  bool heads_first;
  bool (*fn)(void *context, const qkv_client_rows *rows);
  void *context;
} qkvi_row_receiver;

// A qkvi_response_fn whose context is a qkvi_row_receiver; nothing is given of a response without rows.
bool qkvi_fetch_deliver(qkv_client *client, const grpc_byte_buffer *response, void *context, qkv_error *reason);

#endif
