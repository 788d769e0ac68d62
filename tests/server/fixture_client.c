#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>
#include <grpc/compression.h>
#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <grpc/support/alloc.h>
#include <grpc/support/time.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/server/fixture.h"

#include <cmocka.h>

struct fixture_client {
  grpc_channel *channel;
  const char *tenant;
};

struct fixture_stream {
  grpc_completion_queue *queue;
  grpc_call *call;
  bool metadata_sent, metadata_received;
  bool gzip;
  const char *tenant;
  grpc_metadata sent[2];
  grpc_metadata_array metadata;
};

fixture_client *fixture_connect(const char *address) {
  grpc_init();
  fixture_client *client = calloc(1, sizeof(*client));
  assert_non_null(client);
  // A channel of its own for each client, and answers of any size.
  grpc_arg args[] = {
      {.type = GRPC_ARG_INTEGER, .key = (char *)GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, .value.integer = -1},
      {.type = GRPC_ARG_INTEGER, .key = (char *)GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, .value.integer = 1},
  };
  grpc_channel_args channel_args = {.num_args = sizeof(args) / sizeof(args[0]), .args = args};
  grpc_channel_credentials *credentials = grpc_insecure_credentials_create();
  client->channel = grpc_channel_create(address, credentials, &channel_args);
  grpc_channel_credentials_release(credentials);
  return client;
}

void fixture_set_tenant(fixture_client *client, const char *tenant) {
  client->tenant = tenant;
}

void fixture_disconnect(fixture_client **client) {
  grpc_channel_destroy((*client)->channel);
  free(*client);
  *client = NULL;
  grpc_shutdown();
}

// ---- Streams ----

fixture_stream *fixture_open(fixture_client *client, const char *method, int64_t timeout_ms) {
  fixture_stream *stream = calloc(1, sizeof(*stream));
  assert_non_null(stream);
  stream->queue = grpc_completion_queue_create_for_pluck(NULL);
  gpr_timespec deadline = gpr_inf_future(GPR_CLOCK_MONOTONIC);
  if (timeout_ms > 0) {
    deadline = gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_millis(timeout_ms, GPR_TIMESPAN));
  }
  grpc_slice path = grpc_slice_from_copied_string(method);
  stream->call = grpc_channel_create_call(client->channel, NULL, GRPC_PROPAGATE_DEFAULTS, stream->queue, path, NULL,
                                          deadline, NULL);
  grpc_slice_unref(path);
  assert_non_null(stream->call);
  grpc_metadata_array_init(&stream->metadata);
  stream->tenant = client->tenant;
  return stream;
}

static bool run_batch(fixture_stream *stream, const grpc_op *ops, size_t count) {
  void *tag = stream;
  assert_int_equal(grpc_call_start_batch(stream->call, ops, count, tag, NULL), GRPC_CALL_OK);
  grpc_event event = grpc_completion_queue_pluck(stream->queue, tag, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
  assert_int_equal(event.type, GRPC_OP_COMPLETE);
  return event.success != 0;
}

static void put_pair(fixture_stream *stream, grpc_op *op, const char *key, const char *value) {
  grpc_metadata *pair = &stream->sent[op->data.send_initial_metadata.count++];
  pair->key = grpc_slice_from_static_string(key);
  pair->value = grpc_slice_from_static_string(value);
}

static size_t put_metadata(fixture_stream *stream, grpc_op *op) {
  if (stream->metadata_sent) return 0;
  stream->metadata_sent = true;
  op->op = GRPC_OP_SEND_INITIAL_METADATA;
  op->data.send_initial_metadata.metadata = stream->sent;
  if (stream->gzip) put_pair(stream, op, GRPC_COMPRESSION_REQUEST_ALGORITHM_MD_KEY, "gzip");
  if (stream->tenant != NULL) put_pair(stream, op, "qkv-tenant", stream->tenant);
  return 1;
}

bool fixture_send(fixture_stream *stream, const void *data, size_t length) {
  grpc_op ops[2];
  memset(ops, 0, sizeof(ops));
  size_t count = put_metadata(stream, ops);
  grpc_slice slice = grpc_slice_from_copied_buffer(data == NULL ? "" : data, length);
  grpc_byte_buffer *buffer = grpc_raw_byte_buffer_create(&slice, 1);
  grpc_slice_unref(slice);
  ops[count].op = GRPC_OP_SEND_MESSAGE;
  ops[count++].data.send_message.send_message = buffer;
  bool ok = run_batch(stream, ops, count);
  grpc_byte_buffer_destroy(buffer);
  return ok;
}

void fixture_half_close(fixture_stream *stream) {
  grpc_op ops[2];
  memset(ops, 0, sizeof(ops));
  size_t count = put_metadata(stream, ops);
  ops[count++].op = GRPC_OP_SEND_CLOSE_FROM_CLIENT;
  (void)run_batch(stream, ops, count);
}

static size_t receive_metadata(fixture_stream *stream, grpc_op *op) {
  if (stream->metadata_received) return 0;
  stream->metadata_received = true;
  op->op = GRPC_OP_RECV_INITIAL_METADATA;
  op->data.recv_initial_metadata.recv_initial_metadata = &stream->metadata;
  return 1;
}

bool fixture_receive(fixture_stream *stream, uint8_t **data, size_t *length) {
  grpc_op ops[2];
  grpc_byte_buffer *buffer = NULL;
  memset(ops, 0, sizeof(ops));
  size_t count = receive_metadata(stream, ops);
  ops[count].op = GRPC_OP_RECV_MESSAGE;
  ops[count++].data.recv_message.recv_message = &buffer;
  (void)run_batch(stream, ops, count);
  if (buffer == NULL) return false;
  grpc_byte_buffer_reader reader;
  assert_true(grpc_byte_buffer_reader_init(&reader, buffer));
  grpc_slice flat = grpc_byte_buffer_reader_readall(&reader);
  grpc_byte_buffer_reader_destroy(&reader);
  grpc_byte_buffer_destroy(buffer);
  *length = GRPC_SLICE_LENGTH(flat);
  *data = malloc(*length + 1);
  assert_non_null(*data);
  memcpy(*data, GRPC_SLICE_START_PTR(flat), *length);
  grpc_slice_unref(flat);
  return true;
}

void fixture_cancel(fixture_stream *stream) {
  assert_int_equal(grpc_call_cancel(stream->call, NULL), GRPC_CALL_OK);
}

static void destroy(fixture_stream *stream) {
  grpc_call_unref(stream->call);
  grpc_metadata_array_destroy(&stream->metadata);
  grpc_completion_queue_shutdown(stream->queue);
  grpc_completion_queue_destroy(stream->queue);
  free(stream);
}

fixture_result fixture_finish(fixture_stream **stream) {
  fixture_result result = {0};
  grpc_op ops[2];
  grpc_metadata_array trailing;
  grpc_status_code status;
  grpc_slice text = grpc_empty_slice();
  memset(ops, 0, sizeof(ops));
  size_t count = receive_metadata(*stream, ops);
  grpc_metadata_array_init(&trailing);
  grpc_op *op = &ops[count++];
  op->op = GRPC_OP_RECV_STATUS_ON_CLIENT;
  op->data.recv_status_on_client.trailing_metadata = &trailing;
  op->data.recv_status_on_client.status = &status;
  op->data.recv_status_on_client.status_details = &text;
  (void)run_batch(*stream, ops, count);
  result.status = (int)status;
  snprintf(result.text, sizeof(result.text), "%.*s", (int)GRPC_SLICE_LENGTH(text),
           (const char *)GRPC_SLICE_START_PTR(text));
  grpc_slice_unref(text);
  grpc_metadata_array_destroy(&trailing);
  destroy(*stream);
  *stream = NULL;
  return result;
}

// ---- Unary calls ----

static fixture_result call(fixture_client *client, const char *method, const void *data, size_t length,
                           int64_t timeout_ms, bool gzip) {
  fixture_stream *stream = fixture_open(client, method, timeout_ms);
  stream->gzip = gzip;
  uint8_t *response = NULL;
  size_t response_length = 0;
  if (fixture_send(stream, data, length)) fixture_half_close(stream);
  (void)fixture_receive(stream, &response, &response_length);
  fixture_result result = fixture_finish(&stream);
  result.data = response;
  result.length = response_length;
  return result;
}

fixture_result fixture_call(fixture_client *client, const char *method, const void *data, size_t length,
                            int64_t timeout_ms) {
  return call(client, method, data, length, timeout_ms, false);
}

fixture_result fixture_call_gzip(fixture_client *client, const char *method, const void *data, size_t length,
                                 int64_t timeout_ms) {
  return call(client, method, data, length, timeout_ms, true);
}

void fixture_free(fixture_result *result) {
  free(result->data);
  result->data = NULL;
}
