// Attend, once and on a decode stream.
#include <assert.h>
#include <grpc/byte_buffer.h>
#include <stdlib.h>
#include <string.h>

#include "client/c/place.h"

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
      // A text that is longer than the buffer is cut.
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

// A batch on its way to one daemon.
typedef struct attending {
  qkv_client *client;
  const qkv_client_item *items;
  size_t count;
  const size_t *numbers;  // as in qkvi_put_items
  qkv_client_result *results;
  bool sent;
  qkvi_exchange exchange;
  qkv_call_error reason;
} attending;

static void begin_attend(attending *batch) {
  qkv_client *client = batch->client;
  batch->sent = qkvi_put_items(client, batch->items, batch->count, batch->numbers, &batch->reason) == QKV_OK;
  if (batch->sent) qkvi_unary_start(client, attend_method, qkvi_request(client), &batch->exchange);
}

static qkv_code end_attend(attending *batch, qkv_call_error *error) {
  grpc_byte_buffer *response = NULL;
  qkv_code code = batch->reason.code;
  if (batch->sent) code = qkvi_unary_finish(&batch->exchange, &response, &batch->reason);
  qkvi_release_items(batch->client);
  if (code == QKV_OK)
    code = take_response(batch->client, attend_method, response, batch->items, batch->count, 0, batch->results,
                         &batch->reason);
  return code == QKV_OK ? qkvi_ok(error) : fail_results(batch->results, batch->count, &batch->reason, error);
}

// ---- over several daemons ----

// A batch in groups, each for one daemon. The call has failed where all of them have.
typedef struct grouped {
  qkvi_split split;
  qkv_client_item *items;  // in the split's order, as are their results
  qkv_client_result *results;
  size_t count, failed;
  qkv_call_error reason;  // the first
} grouped;

static qkv_code group(qkv_client *client, const qkv_client_item *items, size_t count, grouped *batch) {
  *batch = (grouped){.count = count};
  const qkv_code code = qkvi_split_keys(client, qkvi_key_of_item, items, count, &batch->split, &batch->reason);
  if (code != QKV_OK) return code;
  batch->items = qkvi_items_in_order(&batch->split, items, count);
  batch->results = calloc(count, sizeof *batch->results);
  assert(batch->results != NULL);
  return QKV_OK;
}

static void count_group(grouped *batch, const qkv_call_error *error) {
  if (error->code == QKV_OK) return;
  if (batch->failed++ == 0) batch->reason = *error;
}

// Gives the results in the caller's order.
static qkv_code ungroup(grouped *batch, qkv_client_result *results, qkv_call_error *error) {
  for (size_t i = 0; i < batch->count; i++) results[batch->split.order[i]] = batch->results[i];
  const bool failed = batch->failed == batch->split.groups;
  free(batch->items);
  free(batch->results);
  qkvi_split_free(&batch->split);
  if (!failed) return qkvi_ok(error);
  if (error != NULL) *error = batch->reason;
  return batch->reason.code;
}

static qkv_code attend_several(qkv_client *client, const qkv_client_item *items, size_t count,
                               qkv_client_result *results, qkv_call_error *error) {
  grouped batch;
  if (group(client, items, count, &batch) != QKV_OK) return fail_results(results, count, &batch.reason, error);
  attending *groups = calloc(batch.split.groups, sizeof *groups);
  assert(groups != NULL);
  for (size_t g = 0; g < batch.split.groups; g++) {
    const size_t begin = batch.split.begins[g];
    groups[g] = (attending){.client = batch.split.parts[g],
                            .items = batch.items + begin,
                            .count = batch.split.begins[g + 1] - begin,
                            .numbers = batch.split.order + begin,
                            .results = batch.results + begin};
    begin_attend(&groups[g]);
  }
  for (size_t g = 0; g < batch.split.groups; g++) {
    qkv_call_error reason = {0};
    (void)end_attend(&groups[g], &reason);
    count_group(&batch, &reason);
  }
  free(groups);
  return ungroup(&batch, results, error);
}

qkv_code qkv_client_attend(qkv_client *client, const qkv_client_item *items, size_t count, qkv_client_result *results,
                           qkv_call_error *error) {
  if (count > 0) memset(results, 0, count * sizeof *results);
  if (client->part_count > 0 && count > 0) return attend_several(client, items, count, results, error);
  const char *key = count > 0 && items[0].session != NULL ? items[0].session : "";
  attending batch = {.items = items, .count = count, .results = results};
  const qkv_code code = qkvi_route(&client, key, error);
  if (code != QKV_OK) return code;
  batch.client = client;
  begin_attend(&batch);
  return end_attend(&batch, error);
}

// ---- the decode stream ----

struct qkv_decode {
  qkvi_call call;
  uint64_t id;             // of the last request
  qkv_call_error outcome;  // once the call is over before its time
  bool over;
  qkv_client *whole;   // of several daemons; NULL: one
  qkv_decode **parts;  // by the parts' indices; NULL: not opened, or over
  qkvi_run run;        // of the step under way
  grpc_byte_buffer *response;
};

qkv_code qkv_decode_open(qkv_client *client, qkv_decode **stream_out, qkv_call_error *error) {
  *stream_out = NULL;
  qkv_decode *stream = calloc(1, sizeof *stream);
  assert(stream != NULL);
  qkv_code code = QKV_OK;
  if (client->part_count > 0) {
    stream->whole = client;
    stream->parts = calloc(client->part_count, sizeof(qkv_decode *));
    assert(stream->parts != NULL);
  } else {
    code = qkvi_call_open(client, decode_method, true, &stream->call, error);
  }
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

// Sends a step's request. False, with a reason, where there is none to be finished.
static bool begin_step(qkv_decode *stream, const qkv_client_item *items, size_t count, const size_t *numbers,
                       qkv_call_error *reason) {
  qkv_client *client = stream->call.client;
  assert(client != NULL);
  if (stream->over) *reason = stream->outcome;
  if (stream->over || qkvi_put_items(client, items, count, numbers, reason) != QKV_OK) return false;
  qkv_wire_put_varint(client->writer, REQUEST_ID, ++stream->id);
  const qkvi_step step = {.request = qkvi_request(client), .response = &stream->response};
  qkvi_call_start(&stream->call, &step, &stream->run);
  return true;
}

static qkv_code end_step(qkv_decode *stream, const qkv_client_item *items, size_t count, qkv_client_result *results,
                         qkv_call_error *reason) {
  qkv_client *client = stream->call.client;
  assert(client != NULL);
  qkvi_call_finish(&stream->call, &stream->run);
  grpc_byte_buffer *response = stream->response;
  if (response == NULL) find_outcome(stream);
  qkvi_reclaim(client);
  qkvi_release_items(client);
  if (response != NULL)
    return take_response(client, decode_method, response, items, count, stream->id, results, reason);
  *reason = stream->outcome;
  return reason->code;
}

// The stream of one of several daemons, opened anew where it has ended.
static qkv_decode *part_stream(const qkv_decode *stream, qkv_client *part, qkv_call_error *reason) {
  qkv_decode **place = &stream->parts[part->index];
  if (*place != NULL && (*place)->over) (void)qkv_decode_close(place, NULL);
  if (*place == NULL) (void)qkv_decode_open(part, place, reason);
  return *place;
}

static qkv_code step_several(qkv_decode *stream, const qkv_client_item *items, size_t count,
                             qkv_client_result *results, qkv_call_error *error) {
  grouped batch;
  if (group(stream->whole, items, count, &batch) != QKV_OK) return fail_results(results, count, &batch.reason, error);
  qkv_decode **sent = calloc(batch.split.groups, sizeof(qkv_decode *));
  qkv_call_error *reasons = calloc(batch.split.groups, sizeof *reasons);
  assert(sent != NULL && reasons != NULL);
  for (size_t g = 0; g < batch.split.groups; g++) {
    const size_t begin = batch.split.begins[g], size = batch.split.begins[g + 1] - begin;
    qkv_decode *part = part_stream(stream, batch.split.parts[g], &reasons[g]);
    if (part != NULL && begin_step(part, batch.items + begin, size, batch.split.order + begin, &reasons[g]))
      sent[g] = part;
  }
  for (size_t g = 0; g < batch.split.groups; g++) {
    const size_t begin = batch.split.begins[g], size = batch.split.begins[g + 1] - begin;
    if (sent[g] != NULL) (void)end_step(sent[g], batch.items + begin, size, batch.results + begin, &reasons[g]);
    if (reasons[g].code != QKV_OK) (void)fail_results(batch.results + begin, size, &reasons[g], NULL);
    count_group(&batch, &reasons[g]);
  }
  free((void *)sent);
  free(reasons);
  return ungroup(&batch, results, error);
}

qkv_code qkv_decode_step(qkv_decode *stream, const qkv_client_item *items, size_t count, qkv_client_result *results,
                         qkv_call_error *error) {
  qkv_call_error reason = {0};
  if (count > 0) memset(results, 0, count * sizeof *results);
  if (stream->whole != NULL && count == 0) return qkvi_ok(error);
  if (stream->whole != NULL) return step_several(stream, items, count, results, error);
  qkv_client *client = stream->call.client;
  // The metadata go with the first message.
  if (!stream->call.begun) (void)qkvi_route(&client, count > 0 ? items[0].session : NULL, NULL);
  if (!begin_step(stream, items, count, NULL, &reason) || end_step(stream, items, count, results, &reason) != QKV_OK)
    return fail_results(results, count, &reason, error);
  return qkvi_ok(error);
}

qkv_code qkv_decode_close(qkv_decode **stream_in, qkv_call_error *error) {
  qkv_decode *stream = *stream_in;
  if (stream == NULL) return qkvi_ok(error);
  for (size_t i = 0; stream->whole != NULL && i < stream->whole->part_count; i++) {
    if (stream->parts[i] == NULL) continue;
    qkv_call_error outcome = {0};
    (void)qkv_decode_close(&stream->parts[i], &outcome);
    if (stream->outcome.code == QKV_OK) stream->outcome = outcome;
  }
  if (stream->whole == NULL && !stream->over && stream->call.begun) {
    qkvi_call_run(&stream->call, &(qkvi_step){.last = true, .outcome = &stream->outcome});
  }
  qkv_call_error outcome = stream->outcome;
  if (stream->whole == NULL) qkvi_call_close(&stream->call);
  free((void *)stream->parts);
  free(stream);
  *stream_in = NULL;
  if (error != NULL) *error = outcome;
  return outcome.code;
}
