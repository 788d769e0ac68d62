// Calls: batches of gRPC operations that block until they are done, and messages in gRPC's slices.
#include <assert.h>
#include <grpc/byte_buffer.h>
#include <grpc/slice.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/c/place.h"
#include "client/c/socket.h"

enum {
  // Data from this size on is sent by reference. Below, a copy into the message's first slice costs less than a
  // slice of its own does (about 150 ns to make, send and drop).
  LEND_BYTES_MIN = 16 << 10,
  // How long after its deadline an operation may take before the connection is cut.
  OVERDUE_MS = 100,
};

// ---- errors ----

qkv_code qkvi_fail(qkv_call_error *error, qkv_code code, const char *format, ...) {
  assert(code != QKV_OK);
  if (error == NULL) return code;
  error->code = code;
  va_list arguments;
  va_start(arguments, format);
  (void)vsnprintf(error->text, sizeof error->text, format, arguments);
  va_end(arguments);
  return code;
}

qkv_code qkvi_fail_with(qkv_call_error *error, const qkv_error *reason) {
  return qkvi_fail(error, (qkv_code)reason->status, "%s", reason->text);
}

qkv_code qkvi_ok(qkv_call_error *error) {
  if (error != NULL) {
    error->code = QKV_OK;
    error->text[0] = '\0';
  }
  return QKV_OK;
}

qkv_code qkvi_malformed(qkv_call_error *error, const char *method, const qkv_error *reason) {
  return qkvi_fail(error, QKV_INTERNAL, "the answer to %s is malformed: %s", method, reason->text);
}

// ---- messages ----

qkv_wire_writer *qkvi_begin_request(qkv_client *client) {
  qkv_wire_writer_clear(client->writer);
  return client->writer;
}

static void take_back(void *lent) {
  atomic_fetch_sub((atomic_size_t *)lent, 1);
}

static bool is_lent(const qkv_wire_piece *piece) {
  return piece->reference && piece->length >= LEND_BYTES_MIN;
}

// The pieces from `first` on, up to the next that is lent, in one slice.
static grpc_slice copy_run(const qkv_wire_piece *pieces, size_t first, size_t count, size_t *next) {
  size_t bytes = 0;
  size_t end = first;
  for (; end < count && !is_lent(&pieces[end]); end++) bytes += pieces[end].length;
  grpc_slice slice = grpc_slice_malloc(bytes);
  uint8_t *out = GRPC_SLICE_START_PTR(slice);
  for (size_t i = first; i < end; i++) {
    if (pieces[i].length > 0) memcpy(out, pieces[i].data, pieces[i].length);
    out += pieces[i].length;
  }
  *next = end;
  return slice;
}

static grpc_slice lend(qkv_client *client, const qkv_wire_piece *piece) {
  atomic_fetch_add(&client->lent, 1);
  // gRPC only reads it; its interface has no const.
  return grpc_slice_new_with_user_data((void *)(uintptr_t)piece->data, piece->length, take_back, &client->lent);
}

grpc_byte_buffer *qkvi_request(qkv_client *client) {
  size_t count = 0;
  const qkv_wire_piece *pieces = qkv_wire_writer_pieces(client->writer, &count);
  grpc_slice few[8];
  grpc_slice *slices = count <= sizeof few / sizeof *few ? few : malloc(count * sizeof *slices);
  assert(slices != NULL);
  size_t used = 0;
  for (size_t i = 0; i < count;) {
    if (is_lent(&pieces[i])) {
      slices[used++] = lend(client, &pieces[i++]);
    } else {
      slices[used++] = copy_run(pieces, i, count, &i);
    }
  }
  grpc_byte_buffer *buffer = grpc_raw_byte_buffer_create(slices, used);
  for (size_t i = 0; i < used; i++) grpc_slice_unref(slices[i]);
  if (slices != few) free(slices);
  return buffer;
}

grpc_byte_buffer *qkvi_request_of_bytes(const void *data, size_t bytes) {
  grpc_slice slice = grpc_slice_from_copied_buffer(data, bytes);
  grpc_byte_buffer *buffer = grpc_raw_byte_buffer_create(&slice, 1);
  grpc_slice_unref(slice);
  return buffer;
}

qkv_bytes qkvi_view(qkv_client *client, const grpc_byte_buffer *buffer) {
  assert(buffer != NULL);
  const grpc_slice_buffer *slices = &buffer->data.raw.slice_buffer;
  if (slices->count > client->segment_capacity) {
    client->segments = realloc(client->segments, slices->count * sizeof *client->segments);
    assert(client->segments != NULL);
    client->segment_capacity = slices->count;
  }
  for (size_t i = 0; i < slices->count; i++) {
    // By reference: a short slice holds its bytes in itself.
    const grpc_slice *slice = &slices->slices[i];
    client->segments[i] = (qkv_segment){.data = GRPC_SLICE_START_PTR(*slice), .length = GRPC_SLICE_LENGTH(*slice)};
  }
  return qkv_bytes_of_all(client->segments, slices->count);
}

// ---- calls ----

static gpr_timespec after_ms(int64_t ms) {
  return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_millis(ms, GPR_TIMESPAN));
}

qkv_code qkvi_call_open(qkv_client *client, const char *method, bool stream, qkvi_call *call, qkv_call_error *error) {
  *call = (qkvi_call){.client = client, .method = method, .stream = stream};
  qkv_code code = qkvi_ensure_connected(client, error);
  if (code != QKV_OK) return code;
  qkvi_renew_token(client);
  call->until = stream ? gpr_inf_future(GPR_CLOCK_MONOTONIC) : after_ms(client->options.timeout_ms);
  call->call = grpc_channel_create_call(client->channel, NULL, GRPC_PROPAGATE_DEFAULTS, client->queue,
                                        grpc_slice_from_static_string(method), NULL, call->until, NULL);
  grpc_metadata_array_init(&call->initial);
  grpc_metadata_array_init(&call->trailing);
  return QKV_OK;
}

void qkvi_call_close(qkvi_call *call) {
  if (call->call == NULL) return;
  grpc_call_unref(call->call);
  grpc_metadata_array_destroy(&call->initial);
  grpc_metadata_array_destroy(&call->trailing);
  call->call = NULL;
}

// Waits for the batch. One that is overdue is cancelled; one that even then does not end hangs in a write to a
// daemon that has stopped reading, and the connection is cut.
static void wait_for(qkvi_call *call, void *tag) {
  grpc_completion_queue *queue = call->client->queue;
  gpr_timespec until = call->stream ? after_ms(call->client->options.timeout_ms) : call->until;
  if (grpc_completion_queue_pluck(queue, tag, until, NULL).type == GRPC_OP_COMPLETE) return;
  (void)grpc_call_cancel_with_status(call->call, GRPC_STATUS_DEADLINE_EXCEEDED, "Deadline Exceeded", NULL);
  if (grpc_completion_queue_pluck(queue, tag, after_ms(OVERDUE_MS), NULL).type == GRPC_OP_COMPLETE) return;
  qkvi_cut(call->client);
  grpc_event event = grpc_completion_queue_pluck(queue, tag, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
  assert(event.type == GRPC_OP_COMPLETE);
}

static bool is_text(const char *text, int length, const char *other) {
  return (size_t)length == strlen(other) && memcmp(text, other, (size_t)length) == 0;
}

// The call's status in our words. `details` is what came with it.
static void describe(const qkvi_call *call, grpc_status_code status, grpc_slice details, qkv_call_error *outcome) {
  int length = (int)GRPC_SLICE_LENGTH(details);
  const char *text = (const char *)GRPC_SLICE_START_PTR(details);
  // gRPC's own where a stream went before its connection did ("Stream removed"); a daemon never answers UNKNOWN.
  if (status == GRPC_STATUS_UNKNOWN) status = GRPC_STATUS_UNAVAILABLE;
  // What this client cancels has another status. A daemon that stops resets calls that came too late; those that it
  // has not seen yet are ended by gRPC, with words of its own.
  const bool late = status == GRPC_STATUS_CANCELLED ||
                    (status == GRPC_STATUS_UNAVAILABLE && is_text(text, length, "GOAWAY received"));
  if (late) status = GRPC_STATUS_UNAVAILABLE;
  if (status == GRPC_STATUS_OK) {
    (void)qkvi_ok(outcome);
  } else if (status == GRPC_STATUS_DEADLINE_EXCEEDED && (length == 0 || is_text(text, length, "Deadline Exceeded"))) {
    (void)qkvi_fail(outcome, (qkv_code)status, "no answer to %s within %lld ms", call->method,
                    (long long)call->client->options.timeout_ms);
  } else if (late) {
    (void)qkvi_fail(outcome, (qkv_code)status, "%s has ended the call, as it does when it stops",
                    call->client->target);
  } else if (length == 0) {
    (void)qkvi_fail(outcome, (qkv_code)status, "%s: %s", call->method, qkv_status_text((qkv_status)status));
  } else if (status == GRPC_STATUS_UNAVAILABLE && qkvi_socket_hung_up(call->client->fd)) {
    // gRPC's words ("Socket closed") do not say which.
    (void)qkvi_fail(outcome, (qkv_code)status, "the connection to %s is gone: %.*s", call->client->target, length,
                    text);
  } else {
    (void)qkvi_fail(outcome, (qkv_code)status, "%.*s", length, text);
  }
}

void qkvi_call_start(qkvi_call *call, const qkvi_step *step, qkvi_run *run) {
  grpc_op ops[6] = {0};
  size_t count = 0;
  const qkv_client *client = call->client;
  *run = (qkvi_run){.step = *step, .status = GRPC_STATUS_UNKNOWN, .details = grpc_empty_slice()};
  if (!call->begun) {
    ops[count].op = GRPC_OP_SEND_INITIAL_METADATA;
    ops[count].data.send_initial_metadata.count = client->metadata_count + (client->keyed ? 1 : 0);
    ops[count++].data.send_initial_metadata.metadata = call->client->metadata;
    call->begun = true;
  }
  if (!call->heard && step->response != NULL) {  // they come with the daemon's first answer
    ops[count].op = GRPC_OP_RECV_INITIAL_METADATA;
    ops[count++].data.recv_initial_metadata.recv_initial_metadata = &call->initial;
    call->heard = true;
  }
  if (step->request != NULL) {
    ops[count].op = GRPC_OP_SEND_MESSAGE;
    ops[count++].data.send_message.send_message = step->request;
  }
  if (step->last) ops[count++].op = GRPC_OP_SEND_CLOSE_FROM_CLIENT;
  if (step->response != NULL) {
    *step->response = NULL;
    ops[count].op = GRPC_OP_RECV_MESSAGE;
    ops[count++].data.recv_message.recv_message = step->response;
  }
  if (step->outcome != NULL) {
    ops[count].op = GRPC_OP_RECV_STATUS_ON_CLIENT;
    ops[count].data.recv_status_on_client.trailing_metadata = &call->trailing;
    ops[count].data.recv_status_on_client.status = &run->status;
    ops[count++].data.recv_status_on_client.status_details = &run->details;
  }
  grpc_call_error started = grpc_call_start_batch(call->call, ops, count, call, NULL);
  assert(started == GRPC_CALL_OK);
}

void qkvi_call_finish(qkvi_call *call, qkvi_run *run) {
  qkv_call_error *outcome = run->step.outcome;
  wait_for(call, call);
  if (run->step.request != NULL) grpc_byte_buffer_destroy(run->step.request);
  if (outcome != NULL) describe(call, run->status, run->details, outcome);
  if (outcome != NULL && (outcome->code == QKV_UNAVAILABLE || outcome->code == QKV_DEADLINE_EXCEEDED))
    call->client->suspect = true;
  if (outcome != NULL && outcome->code == QKV_UNAUTHENTICATED) call->client->token_next_ms = 0;
  grpc_slice_unref(run->details);
}

void qkvi_call_run(qkvi_call *call, const qkvi_step *step) {
  qkvi_run run;
  qkvi_call_start(call, step, &run);
  qkvi_call_finish(call, &run);
}

void qkvi_unary_start(qkv_client *client, const char *method, grpc_byte_buffer *request, qkvi_exchange *exchange) {
  *exchange = (qkvi_exchange){0};
  if (qkvi_call_open(client, method, false, &exchange->call, &exchange->outcome) != QKV_OK) {
    client->suspect = true;
    grpc_byte_buffer_destroy(request);
    return;
  }
  const qkvi_step step = {
      .request = request, .last = true, .response = &exchange->response, .outcome = &exchange->outcome};
  qkvi_call_start(&exchange->call, &step, &exchange->run);
}

qkv_code qkvi_unary_finish(qkvi_exchange *exchange, grpc_byte_buffer **response, qkv_call_error *error) {
  qkv_call_error *outcome = &exchange->outcome;
  const char *method = exchange->call.method;
  if (exchange->call.call != NULL) {
    qkvi_call_finish(&exchange->call, &exchange->run);
    qkvi_call_close(&exchange->call);
  }
  qkvi_reclaim(exchange->call.client);
  *response = exchange->response;
  if (outcome->code == QKV_OK && *response == NULL)
    (void)qkvi_fail(outcome, QKV_INTERNAL, "%s was answered ok, but without a message", method);
  if (outcome->code != QKV_OK && *response != NULL) {
    grpc_byte_buffer_destroy(*response);
    *response = NULL;
  }
  if (error != NULL) *error = *outcome;
  return outcome->code;
}

qkv_code qkvi_unary(qkv_client *client, const char *method, grpc_byte_buffer *request, grpc_byte_buffer **response,
                    qkv_call_error *error) {
  qkvi_exchange exchange;
  qkvi_unary_start(client, method, request, &exchange);
  return qkvi_unary_finish(&exchange, response, error);
}

qkv_code qkvi_read_stream(qkv_client *client, const char *method, grpc_byte_buffer *request, qkvi_response_fn fn,
                          void *context, qkv_call_error *error) {
  qkvi_call call;
  qkv_call_error outcome = {0};
  qkv_error reason = {0};
  bool go_on = true;
  const qkv_code code = qkvi_call_open(client, method, true, &call, error);
  if (code != QKV_OK) {
    grpc_byte_buffer_destroy(request);
    return code;
  }
  qkvi_step step = {.request = request, .last = true};
  while (go_on) {
    grpc_byte_buffer *response = NULL;
    step.response = &response;
    qkvi_call_run(&call, &step);
    step = (qkvi_step){0};
    if (response == NULL) break;
    go_on = fn(client, response, context, &reason);
    grpc_byte_buffer_destroy(response);
  }
  if (go_on) qkvi_call_run(&call, &(qkvi_step){.outcome = &outcome});
  qkvi_call_close(&call);
  if (reason.status == QKV_DATA_LOSS) return qkvi_fail_with(error, &reason);
  if (reason.status != QKV_OK) return qkvi_malformed(error, method, &reason);
  if (!go_on) return qkvi_fail(error, QKV_CANCELLED, "cancelled by the caller");
  if (error != NULL) *error = outcome;
  return outcome.code;
}

static void *flatten(const grpc_byte_buffer *buffer, qkv_bytes view, size_t *bytes) {
  *bytes = grpc_byte_buffer_length((grpc_byte_buffer *)(uintptr_t)buffer);
  void *flat = malloc(*bytes + 1);
  assert(flat != NULL);
  qkv_bytes_copy(view, 0, *bytes, flat);
  return flat;
}

qkv_code qkv_client_call(qkv_client *client, const char *method, const void *request, size_t request_bytes,
                         void **response, size_t *response_bytes, qkv_call_error *error) {
  grpc_byte_buffer *answer = NULL;
  *response = NULL;
  *response_bytes = 0;
  qkv_code code = qkvi_route(&client, NULL, error);
  if (code != QKV_OK) return code;
  code = qkvi_unary(client, method, qkvi_request_of_bytes(request, request_bytes), &answer, error);
  if (code != QKV_OK) return code;
  *response = flatten(answer, qkvi_view(client, answer), response_bytes);
  grpc_byte_buffer_destroy(answer);
  return QKV_OK;
}
