// Attend, once and on a decode stream.
#include <assert.h>
#include <grpc/byte_buffer.h>
#include <stdlib.h>
#include <string.h>

#include "client/c/client.h"

// Field numbers of qkv/v1/kv_cache.proto and tensor.proto.
enum { REQUEST_ID = 4 };
enum { RESPONSE_RESULTS = 1, RESPONSE_ID };
enum { RESULT_STATUS = 1, RESULT_LENGTH, RESULT_OUT, RESULT_LSE };
enum { STATUS_CODE = 1, STATUS_MESSAGE };

static const char attend_method[] = "/qkv.v1.KvCache/Attend";
static const char decode_method[] = "/qkv.v1.KvCache/Decode";

// ---- results ----

void qkv_client_results_free(qkv_client_result *results, size_t count) {
  for (size_t i = 0; i < count; i++) free(results[i].out);  // lse lies behind out
  if (count > 0) memset(results, 0, count * sizeof *results);
}

static qkv_status read_status(qkv_bytes message, qkv_client_result *result, qkv_error *error) {
  qkv_wire_reader reader;
  qkv_wire_field field;
  bool more = true;
  qkv_wire_reader_init(&reader, message);
  for (;;) {
    QKV_TRY(qkv_wire_next(&reader, &field, &more, error));
    if (!more) return QKV_OK;
    if (field.number == STATUS_CODE) result->code = (qkv_code)field.value;
    if (field.number == STATUS_MESSAGE && field.type == QKV_WIRE_BYTES) {
      // A longer text than we have room for is cut.
      size_t length = field.bytes.length < sizeof result->text ? field.bytes.length : sizeof result->text - 1;
      qkv_bytes_copy(field.bytes, 0, length, result->text);
      result->text[length] = '\0';
    }
  }
}

// `out` and `lse` must have a row for every query head of the item: the caller reads them by its own dims.
static qkv_status check_shapes(const qkv_client_item *item, const qkv_tensor *out, const qkv_tensor *lse,
                               qkv_error *error) {
  if (out->dtype != QKV_FP32 || lse->dtype != QKV_FP32) {
    return qkv_fail(error, QKV_INTERNAL, "out and lse are %s and %s, expected is fp32", qkv_dtype_name(out->dtype),
                    qkv_dtype_name(lse->dtype));
  }
  for (int i = 0; i < 2; i++) {
    if (out->dims[i] == item->q.dims[i] && lse->dims[i] == item->q.dims[i]) continue;
    return qkv_fail(error, QKV_INTERNAL, "out.dims[%d] is %lld and lse.dims[%d] is %lld, q has %lld", i,
                    (long long)out->dims[i], i, (long long)lse->dims[i], (long long)item->q.dims[i]);
  }
  return QKV_OK;
}

static qkv_status keep_output(const qkv_client_item *item, qkv_bytes out_message, qkv_bytes lse_message,
                              qkv_client_result *result, qkv_error *error) {
  qkv_tensor out, lse;
  QKV_TRY(qkvi_read_tensor(out_message, "out", 3, &out, error));
  QKV_TRY(qkvi_read_tensor(lse_message, "lse", 2, &lse, error));
  QKV_TRY(check_shapes(item, &out, &lse, error));
  result->lse_count = (size_t)(lse.dims[0] * lse.dims[1]);
  result->out_count = result->lse_count * (size_t)out.dims[2];
  result->out = malloc((result->out_count + result->lse_count) * sizeof(float));
  if (result->out == NULL) return qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "no memory for the output");
  result->lse = result->out + result->out_count;
  qkv_bytes_copy(out.data, 0, result->out_count * sizeof(float), result->out);
  qkv_bytes_copy(lse.data, 0, result->lse_count * sizeof(float), result->lse);
  return QKV_OK;
}

static qkv_status read_result(qkv_bytes message, const qkv_client_item *item, qkv_client_result *result,
                              qkv_error *error) {
  qkv_wire_reader reader;
  qkv_wire_field field;
  bool more = true;
  qkv_bytes out = {0}, lse = {0};
  qkv_wire_reader_init(&reader, message);
  for (;;) {
    QKV_TRY(qkv_wire_next(&reader, &field, &more, error));
    if (!more) break;
    if (field.number == RESULT_LENGTH) result->length = field.value;
    if (field.type != QKV_WIRE_BYTES) continue;
    if (field.number == RESULT_STATUS) QKV_TRY(read_status(field.bytes, result, error));
    if (field.number == RESULT_OUT) out = field.bytes;
    if (field.number == RESULT_LSE) lse = field.bytes;
  }
  if (result->code != QKV_OK || item->q.rank == 0) return QKV_OK;
  return keep_output(item, out, lse, result, error);
}

// Little more than a loop: `count` results in the order of the items, and the request's id.
static qkv_status read_response(qkv_bytes message, const qkv_client_item *items, size_t count, uint64_t id,
                                qkv_client_result *results, qkv_error *error) {
  qkv_wire_reader reader;
  qkv_wire_field field;
  bool more = true;
  size_t read = 0;
  uint64_t answered = 0;
  qkv_wire_reader_init(&reader, message);
  for (;;) {
    QKV_TRY(qkv_wire_next(&reader, &field, &more, error));
    if (!more) break;
    if (field.number == RESPONSE_ID) answered = field.value;
    if (field.number != RESPONSE_RESULTS || field.type != QKV_WIRE_BYTES) continue;
    if (read < count) QKV_TRY(read_result(field.bytes, &items[read], &results[read], error));
    read++;
  }
  if (read != count) return qkv_fail(error, QKV_INTERNAL, "%zu results to %zu items", read, count);
  if (answered != id) {
    return qkv_fail(error, QKV_INTERNAL, "it answers request %llu, asked was %llu", (unsigned long long)answered,
                    (unsigned long long)id);
  }
  return QKV_OK;
}

// Reads and frees `response`.
static qkv_code take_response(qkv_client *client, const char *method, grpc_byte_buffer *response,
                              const qkv_client_item *items, size_t count, uint64_t id, qkv_client_result *results,
                              qkv_call_error *error) {
  qkv_error reason = {0};
  qkv_status status = read_response(qkvi_view(client, response), items, count, id, results, &reason);
  grpc_byte_buffer_destroy(response);
  if (status == QKV_OK) return qkvi_ok(error);
  qkv_client_results_free(results, count);
  return qkvi_malformed(error, method, &reason);
}

// Where a call failed, so has every item of it.
static qkv_code fail_results(qkv_client_result *results, size_t count, const qkv_call_error *reason,
                             qkv_call_error *error) {
  for (size_t i = 0; i < count; i++) {
    results[i].code = reason->code;
    size_t length = strnlen(reason->text, sizeof results[i].text - 1);
    memcpy(results[i].text, reason->text, length);
    results[i].text[length] = '\0';
  }
  if (error != NULL) *error = *reason;
  return reason->code;
}

qkv_code qkv_client_attend(qkv_client *client, const qkv_client_item *items, size_t count, qkv_client_result *results,
                           qkv_call_error *error) {
  qkv_call_error reason = {0};
  grpc_byte_buffer *response = NULL;
  if (count > 0) memset(results, 0, count * sizeof *results);
  qkv_code code = qkvi_put_items(client, items, count, &reason);
  if (code == QKV_OK) code = qkvi_unary(client, attend_method, qkvi_request(client), &response, &reason);
  qkvi_release_items(client);
  if (code == QKV_OK) code = take_response(client, attend_method, response, items, count, 0, results, &reason);
  return code == QKV_OK ? qkvi_ok(error) : fail_results(results, count, &reason, error);
}

// ---- the decode stream ----

struct qkv_decode {
  qkvi_call call;
  uint64_t id;             // of the last request
  qkv_call_error outcome;  // once the call is over before its time
  bool over;
};

qkv_code qkv_decode_open(qkv_client *client, qkv_decode **stream_out, qkv_call_error *error) {
  *stream_out = NULL;
  qkv_decode *stream = calloc(1, sizeof *stream);
  assert(stream != NULL);
  qkv_code code = qkvi_call_open(client, decode_method, true, &stream->call, error);
  if (code != QKV_OK) {
    free(stream);
    return code;
  }
  *stream_out = stream;
  return qkvi_ok(error);
}

// The daemon has ended the call, or it was cancelled: asks why, once.
static void find_outcome(qkv_decode *stream) {
  qkvi_call_run(&stream->call, &(qkvi_step){.outcome = &stream->outcome});
  stream->over = true;
  if (stream->outcome.code == QKV_OK) {
    (void)qkvi_fail(&stream->outcome, QKV_UNAVAILABLE, "the daemon has ended the decode stream");
  }
}

qkv_code qkv_decode_step(qkv_decode *stream, const qkv_client_item *items, size_t count, qkv_client_result *results,
                         qkv_call_error *error) {
  qkv_client *client = stream->call.client;
  qkv_call_error reason = {0};
  grpc_byte_buffer *response = NULL;
  if (count > 0) memset(results, 0, count * sizeof *results);
  if (stream->over) return fail_results(results, count, &stream->outcome, error);
  if (qkvi_put_items(client, items, count, &reason) != QKV_OK) return fail_results(results, count, &reason, error);
  qkv_wire_put_varint(client->writer, REQUEST_ID, ++stream->id);
  qkvi_call_run(&stream->call, &(qkvi_step){.request = qkvi_request(client), .response = &response});
  if (response == NULL) find_outcome(stream);
  qkvi_reclaim(client);
  qkvi_release_items(client);
  if (response == NULL) return fail_results(results, count, &stream->outcome, error);
  if (take_response(client, decode_method, response, items, count, stream->id, results, &reason) != QKV_OK) {
    return fail_results(results, count, &reason, error);
  }
  return qkvi_ok(error);
}

qkv_code qkv_decode_close(qkv_decode **stream_in, qkv_call_error *error) {
  qkv_decode *stream = *stream_in;
  if (stream == NULL) return qkvi_ok(error);
  if (!stream->over && stream->call.begun) {
    qkvi_call_run(&stream->call, &(qkvi_step){.last = true, .outcome = &stream->outcome});
  }
  qkv_call_error outcome = stream->outcome;
  qkvi_call_close(&stream->call);
  free(stream);
  *stream_in = NULL;
  if (error != NULL) *error = outcome;
  return outcome.code;
}
