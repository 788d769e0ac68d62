// One call: the state machine of rpc.h over gRPC batches.
//
//   HANDLER --next--> READING --message, end--> HANDLER
//   HANDLER --send--> SENDING --sent--> HANDLER
//   HANDLER --reply, finish--> ENDING --> OVER
//
// The event of client close or cancellation comes concurrently, in a batch of its own; the call's memory is freed
// when both have ended.
#include <assert.h>
#include <grpc/byte_buffer.h>
#include <grpc/support/alloc.h>
#include <grpc/support/time.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/histogram.h"
#include "engine/base/log.h"
#include "server/rpc/internal.h"

#define CALL_OF(op, member) ((qkv_rpc_call *)((char *)(op)-offsetof(qkv_rpc_call, member)))

static void move(qkv_rpc_call *call, qkvi_rpc_phase from, qkvi_rpc_phase to) {
  if (to != QKVI_RPC_HANDLER) atomic_store_explicit(&call->phase_ns, qkv_stage_now(), memory_order_relaxed);
  bool moved =
      atomic_compare_exchange_strong_explicit(&call->phase, &from, to, memory_order_acq_rel, memory_order_acquire);
  assert(moved);
  (void)moved;
}

static void start_batch(qkv_rpc_call *call, const grpc_op *ops, size_t count, qkvi_rpc_op *op) {
  grpc_call_error result = grpc_call_start_batch(call->grpc, ops, count, op, NULL);
  assert(result == GRPC_CALL_OK);
  (void)result;
}

static void drop_message(qkv_rpc_call *call) {
  if (call->arrived > 0) qkvi_rpc_limits_served(&call->place, call->arrived);
  call->arrived = 0;
  if (call->received != NULL) grpc_byte_buffer_destroy(call->received);
  if (call->segments != call->own_segments) free(call->segments);
  call->received = NULL;
  call->segments = call->own_segments;
}

static void drop_outgoing(qkv_rpc_call *call) {
  if (call->outgoing != NULL) grpc_byte_buffer_destroy(call->outgoing);
  call->outgoing = NULL;
}

static void unref(qkv_rpc_call *call) {
  if (atomic_fetch_sub_explicit(&call->refs, 1, memory_order_acq_rel) != 1) return;
  assert(atomic_load(&call->phase) == QKVI_RPC_OVER);
  if (call->method->destroy != NULL) call->method->destroy(call->state);
  qkv_rpc_server *server = call->server;
  qkvi_rpc_limits_leave(qkvi_rpc_server_limits(server), &call->place);
  grpc_call_unref(call->grpc);
  free(call);
  qkvi_rpc_server_call_gone(server);
}

// ---- Sending ----

static grpc_byte_buffer *buffer_of_bytes(const void *data, size_t length) {
  grpc_slice slice = grpc_slice_from_copied_buffer(data, length);
  grpc_byte_buffer *buffer = grpc_raw_byte_buffer_create(&slice, 1);
  grpc_slice_unref(slice);
  return buffer;
}

// A referenced piece of memory that is being sent.
typedef struct reference {
  void (*release)(void *owner);
  void *owner;
} reference;

// gRPC drops references on any thread, its own included, ordered by counters of its own. This counter states the same
// order where a race detector can see it: writes before handing over happen before reads after it.
static _Atomic uint64_t handed_over;

static void drop_reference(void *context) {
  (void)atomic_load_explicit(&handed_over, memory_order_acquire);
  reference *dropped = context;
  dropped->release(dropped->owner);
  free(dropped);
}

static grpc_slice slice_of_reference(const qkv_wire_piece *piece, void (*release)(void *owner)) {
  reference *held = malloc(sizeof(*held));
  assert(held != NULL);
  *held = (reference){.release = release, .owner = piece->owner};
  (void)atomic_fetch_add_explicit(&handed_over, 1, memory_order_release);
  return grpc_slice_new_with_user_data((void *)piece->data, piece->length, drop_reference, held);
}

static grpc_byte_buffer *buffer_of_writer(qkv_wire_writer *writer, void (*release)(void *owner)) {
  size_t count;
  const qkv_wire_piece *pieces = qkv_wire_writer_pieces(writer, &count);
  grpc_byte_buffer *buffer = grpc_raw_byte_buffer_create(NULL, 0);
  for (size_t i = 0; i < count; i++) {
    const qkv_wire_piece *piece = &pieces[i];
    grpc_slice slice = piece->reference ? slice_of_reference(piece, release)
                                        : grpc_slice_from_copied_buffer((const char *)piece->data, piece->length);
    grpc_slice_buffer_add(&buffer->data.raw.slice_buffer, slice);
  }
  return buffer;
}

// Puts the initial metadata (once) and the outgoing message (if there is one) into ops.
static size_t put_ops(qkv_rpc_call *call, grpc_op *ops) {
  size_t count = 0;
  if (!call->metadata_sent) {
    ops[count++].op = GRPC_OP_SEND_INITIAL_METADATA;
    call->metadata_sent = true;
  }
  if (call->outgoing != NULL) {
    ops[count].op = GRPC_OP_SEND_MESSAGE;
    ops[count++].data.send_message.send_message = call->outgoing;
  }
  return count;
}

static void count_bytes(qkv_rpc_call *call, grpc_byte_buffer *buffer) {
  if (buffer == NULL) return;
  qkvi_rpc_limits_take(qkvi_rpc_server_limits(call->server), &call->place, grpc_byte_buffer_length(buffer), 0);
}

// A stream's message has been served: its next one is read, or it is answered.
static void end_step(qkv_rpc_call *call) {
  qkv_rpc_forget_waits(call);
  if (call->step_ns == 0) return;
  qkvi_rpc_server_step(call);
  call->step_ns = call->quota_ns = call->queue_ns = 0;
}

static void send_buffer(qkv_rpc_call *call, grpc_byte_buffer *buffer) {
  assert(call->method->sent != NULL);
  end_step(call);
  count_bytes(call, buffer);
  drop_message(call);
  call->outgoing = buffer;
  grpc_op ops[2];
  memset(ops, 0, sizeof(ops));
  size_t count = put_ops(call, ops);
  move(call, QKVI_RPC_HANDLER, QKVI_RPC_SENDING);
  start_batch(call, ops, count, &call->send_op);
}

static bool past_deadline(const qkv_rpc_call *call) {
  return gpr_time_cmp(gpr_now(call->deadline.clock_type), call->deadline) >= 0;
}

static void end_call(qkv_rpc_call *call, grpc_byte_buffer *buffer, qkv_status status, const char *text) {
  if (status == QKV_CANCELLED && past_deadline(call)) {  // our clock may be a little before the client's
    status = QKV_DEADLINE_EXCEEDED;
    text = "the call's deadline has passed";
  }
  const qkv_status told = qkv_rpc_cancelled(call) ? QKV_CANCELLED : status;
  qkvi_rpc_server_ended(call->server, told);
  qkvi_rpc_server_timed(call, told);
  qkvi_rpc_server_report(call, told, text);
  drop_message(call);
  count_bytes(call, buffer);
  call->outgoing = buffer;
  call->status_text = grpc_slice_from_copied_string(text);
  grpc_op ops[3];
  memset(ops, 0, sizeof(ops));
  size_t count = put_ops(call, ops);
  ops[count].op = GRPC_OP_SEND_STATUS_FROM_SERVER;
  ops[count].data.send_status_from_server.status = (grpc_status_code)status;
  ops[count++].data.send_status_from_server.status_details = &call->status_text;
  move(call, QKVI_RPC_HANDLER, QKVI_RPC_ENDING);
  start_batch(call, ops, count, &call->end_op);
}

static void end_cancelled(qkv_rpc_call *call) {
  end_call(call, NULL, QKV_CANCELLED, "cancelled");
}

static void send_done(qkvi_rpc_op *op, bool ok) {
  qkv_rpc_call *call = CALL_OF(op, send_op);
  move(call, QKVI_RPC_SENDING, QKVI_RPC_HANDLER);
  drop_outgoing(call);
  if (!ok || qkv_rpc_cancelled(call)) {
    end_cancelled(call);
  } else {
    call->method->sent(call);
  }
}

static void end_done(qkvi_rpc_op *op, bool ok) {
  (void)ok;  // a client that is gone gets no status
  qkv_rpc_call *call = CALL_OF(op, end_op);
  move(call, QKVI_RPC_ENDING, QKVI_RPC_OVER);
  drop_outgoing(call);
  grpc_slice_unref(call->status_text);
  unref(call);
}

// ---- Receiving ----

static void read_message(qkv_rpc_call *call) {
  grpc_op op;
  memset(&op, 0, sizeof(op));
  op.op = GRPC_OP_RECV_MESSAGE;
  op.data.recv_message.recv_message = &call->received;
  move(call, QKVI_RPC_HANDLER, QKVI_RPC_READING);
  start_batch(call, &op, 1, &call->read_op);
}

// The message's pieces where they lie.
static qkv_bytes message_bytes(qkv_rpc_call *call) {
  const grpc_slice_buffer *slices = &call->received->data.raw.slice_buffer;
  if (slices->count > QKVI_RPC_SEGMENTS) {
    call->segments = malloc(slices->count * sizeof(*call->segments));
    assert(call->segments != NULL);
  }
  for (size_t i = 0; i < slices->count; i++) {
    call->segments[i] = (qkv_segment){.data = GRPC_SLICE_START_PTR(slices->slices[i]),
                                      .length = GRPC_SLICE_LENGTH(slices->slices[i])};
  }
  return qkv_bytes_of_all(call->segments, slices->count);
}

static void end_without_message(qkv_rpc_call *call) {
  char text[128];
  (void)snprintf(text, sizeof(text), "the call of %s has no message, 1 is needed", call->method->path);
  end_call(call, NULL, QKV_INVALID_ARGUMENT, text);
}

static void resume(qkvi_rpc_delayed *delayed);

// Reads the message at once, or, where the tenant exceeds the rates of its quota, so much later that it keeps to
// them. The first message of a call, which holds nothing yet, is refused where that is longer.
static void take_message(qkv_rpc_call *call) {
  enum { WAIT_MAX_MS = 1000 };
  qkvi_rpc_limits *limits = qkvi_rpc_server_limits(call->server);
  qkv_error error = {0};
  const uint64_t wait =
      qkvi_rpc_limits_wait_ms(limits, &call->place, call->served ? UINT64_MAX : WAIT_MAX_MS, &error);
  if (wait >= WAIT_MAX_MS && !call->served) return end_call(call, NULL, QKV_RESOURCE_EXHAUSTED, error.text);
  if (wait > 0) {
    call->delayed.resume = resume;
    call->delayed_at_ns = qkv_stage_now();
    qkvi_rpc_delays_add(qkvi_rpc_server_delays(call->server), &call->delayed,
                        wait < WAIT_MAX_MS ? wait : WAIT_MAX_MS);
    return;
  }
  call->served = true;
  count_bytes(call, call->received);
  call->method->message(call, message_bytes(call));
}

static void resume(qkvi_rpc_delayed *delayed) {
  qkv_rpc_call *call = CALL_OF(delayed, delayed);
  call->quota_ns += qkv_stage_now() - call->delayed_at_ns;
  if (qkv_rpc_cancelled(call)) return end_cancelled(call);
  take_message(call);
}

// Small messages are bounded by the number of calls.
static qkv_status count_arrived(qkv_rpc_call *call, qkv_error *error) {
  enum { COUNTED_BYTES = 64 * 1024 };
  const uint64_t bytes = grpc_byte_buffer_length(call->received);
  if (bytes < COUNTED_BYTES) return QKV_OK;
  QKV_TRY(qkvi_rpc_limits_arrived(qkvi_rpc_server_limits(call->server), &call->place, bytes, error));
  call->arrived = bytes;
  return QKV_OK;
}

static void read_done(qkvi_rpc_op *op, bool ok) {
  (void)ok;  // true even where there is no message
  qkv_rpc_call *call = CALL_OF(op, read_op);
  qkv_error error = {0};
  if (!call->spoken) call->message_ns = qkv_stage_now() - call->began_ns;
  qkv_status status = QKV_OK;
  if (!call->spoken) status = qkvi_rpc_limits_spoken(qkvi_rpc_server_limits(call->server), &call->place, &error);
  call->spoken = true;
  move(call, QKVI_RPC_READING, QKVI_RPC_HANDLER);
  if (call->method->end != NULL && call->received != NULL) call->step_ns = qkv_stage_now();
  if (qkv_rpc_cancelled(call)) {
    end_cancelled(call);
  } else if (status != QKV_OK) {
    end_call(call, NULL, status, error.text);
  } else if (call->received == NULL && call->method->end != NULL) {
    call->method->end(call);
  } else if (call->received == NULL) {
    end_without_message(call);
  } else if (call->received->data.raw.compression != GRPC_COMPRESS_NONE) {
    end_call(call, NULL, QKV_UNIMPLEMENTED, "compressed messages are not accepted");
  } else if (count_arrived(call, &error) != QKV_OK) {
    end_call(call, NULL, error.status, error.text);
  } else {
    take_message(call);
  }
}

static void close_done(qkvi_rpc_op *op, bool ok) {
  (void)ok;
  qkv_rpc_call *call = CALL_OF(op, close_op);
  if (call->closed_by_cancel) {
    atomic_store_explicit(&call->cancelled, true, memory_order_release);
    if (call->method->cancelled != NULL) call->method->cancelled(call);
  }
  unref(call);
}

// ---- For the server ----

static qkv_status enter(qkv_rpc_call *call, qkv_error *error) {
  const qkvi_rpc_kind kind = qkvi_rpc_is_control(call->method->path) ? QKVI_RPC_CONTROL : QKVI_RPC_CALL;
  char *peer = grpc_call_get_peer(call->grpc);
  const qkv_status status = qkvi_rpc_limits_enter(qkvi_rpc_server_limits(call->server), &call->place, kind, peer,
                                                  qkvi_call_tenant(call), error);
  gpr_free(peer);
  return status;
}

// Once it has entered, other threads may end it: it is complete before.
qkv_status qkvi_rpc_call_create(qkv_rpc_server *server, const qkv_rpc_method *method, grpc_call *grpc,
                                const qkvi_identity *identity, gpr_timespec deadline, qkv_rpc_call **out,
                                qkv_error *error) {
  qkv_rpc_call *call = malloc(sizeof(*call));
  assert(call != NULL);
  memset(call, 0, offsetof(qkv_rpc_call, own_segments));
  call->server = server;
  call->method = method;
  call->grpc = grpc;
  call->identity = *identity;
  call->deadline = deadline;
  call->number = qkvi_rpc_server_number(server);
  call->began_ns = qkv_stage_now();
  call->close_op.done = close_done;
  call->read_op.done = read_done;
  call->send_op.done = send_done;
  call->end_op.done = end_done;
  call->segments = call->own_segments;
  call->session[0] = '\0';
  atomic_init(&call->phase, QKVI_RPC_HANDLER);
  atomic_init(&call->cancelled, false);
  atomic_init(&call->refs, 2);
  const qkv_status status = enter(call, error);
  *out = status == QKV_OK ? call : NULL;
  if (status != QKV_OK) free(call);
  return status;
}

void qkvi_rpc_call_start(qkv_rpc_call *call) {
  grpc_op op;
  memset(&op, 0, sizeof(op));
  op.op = GRPC_OP_RECV_CLOSE_ON_SERVER;
  op.data.recv_close_on_server.cancelled = &call->closed_by_cancel;
  start_batch(call, &op, 1, &call->close_op);
  read_message(call);
}

// ---- For handlers ----

void *qkv_rpc_context(const qkv_rpc_call *call) {
  return qkvi_rpc_server_context(call->server);
}

void *qkv_rpc_state(const qkv_rpc_call *call) {
  return call->state;
}

void qkv_rpc_set_state(qkv_rpc_call *call, void *state) {
  call->state = state;
}

// gRPC cancels a call at its deadline, but that event may be queued behind others.
bool qkv_rpc_cancelled(const qkv_rpc_call *call) {
  return atomic_load_explicit(&call->cancelled, memory_order_acquire) || past_deadline(call);
}

void qkv_rpc_count_rows(const qkv_rpc_call *call, uint64_t rows) {
  qkvi_rpc_limits_take(qkvi_rpc_server_limits(call->server), &call->place, 0, rows);
}

void qkv_rpc_count_bytes(const qkv_rpc_call *call, uint64_t bytes) {
  qkvi_rpc_limits_take(qkvi_rpc_server_limits(call->server), &call->place, bytes, 0);
}

void qkv_rpc_queued(qkv_rpc_call *call) {
  call->queued_at_ns = qkv_stage_now();
}

void qkv_rpc_dequeued(qkv_rpc_call *call) {
  if (call->queued_at_ns != 0) call->queue_ns += qkv_stage_now() - call->queued_at_ns;
  call->queued_at_ns = 0;
}

void qkv_rpc_count_wait(const qkv_rpc_call *call, qkv_rpc_wait what, int64_t ms) {
  ((qkv_rpc_call *)call)->waited_ms[what] += ms;
}

int64_t qkv_rpc_waited_ms(const qkv_rpc_call *call, qkv_rpc_wait what) {
  return call->waited_ms[what];
}

void qkv_rpc_forget_waits(qkv_rpc_call *call) {
  memset(call->waited_ms, 0, sizeof call->waited_ms);
}

void qkv_rpc_name_session(qkv_rpc_call *call, const char *session) {
  const size_t bytes = strnlen(session, QKV_NAME_MAX);
  memcpy(call->session, session, bytes);
  call->session[bytes] = '\0';
}

qkv_share qkv_rpc_share(const qkv_rpc_call *call) {
  return qkvi_rpc_limits_share(qkvi_rpc_server_limits(call->server), &call->place);
}

qkvi_holders qkvi_rpc_holders(const qkv_rpc_call *call) {
  return qkvi_rpc_limits_holders(&call->place);
}

void qkv_rpc_count_refusal(const qkv_rpc_call *call) {
  qkvi_rpc_limits_refused(qkvi_rpc_server_limits(call->server), &call->place);
}

void qkv_rpc_next(qkv_rpc_call *call) {
  assert(call->method->end != NULL);
  end_step(call);
  drop_message(call);
  read_message(call);
}

void qkv_rpc_reply(qkv_rpc_call *call, qkv_wire_writer *writer, void (*release)(void *owner)) {
  end_call(call, buffer_of_writer(writer, release), QKV_OK, "");
}

void qkv_rpc_send(qkv_rpc_call *call, qkv_wire_writer *writer, void (*release)(void *owner)) {
  send_buffer(call, buffer_of_writer(writer, release));
}

void qkv_rpc_reply_bytes(qkv_rpc_call *call, const void *data, size_t length) {
  end_call(call, buffer_of_bytes(data, length), QKV_OK, "");
}

void qkv_rpc_reply_reference(qkv_rpc_call *call, const qkv_wire_piece *piece, void (*release)(void *owner)) {
  grpc_slice slice = slice_of_reference(piece, release);
  grpc_byte_buffer *buffer = grpc_raw_byte_buffer_create(&slice, 1);
  grpc_slice_unref(slice);
  end_call(call, buffer, QKV_OK, "");
}

void qkv_rpc_send_bytes(qkv_rpc_call *call, const void *data, size_t length) {
  send_buffer(call, buffer_of_bytes(data, length));
}

void qkv_rpc_finish(qkv_rpc_call *call, qkv_status status, const char *text) {
  end_call(call, NULL, status, text);
}
