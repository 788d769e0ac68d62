// Attend and Decode: batches of items that append, attend, or both.
//
//   check   look the sessions up, check the queries, add up the bytes of the answer    (no change yet)
//   append  the rows, item by item
//   attend  in turns: layers locked for reading, and one run over as many items and queries as take some 0.1 s
//   answer  results as references to one block that the turns wrote, or copied to the client's shared memory
//
// Small requests are served on their completion-queue thread: handing one over to the compute pool wakes a thread,
// which costs more than a decode step of a small model. Larger ones become a job, and so does the rest of one that
// meets a layer in use: only jobs wait for locks.
#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>

#include "engine/cache/session_spill.h"
#include "server/auth/identity.h"
#include "server/handlers/append.h"
#include "server/handlers/attend_call.h"
#include "server/handlers/control.h"
#include "server/handlers/handlers.h"
#include "server/residency/fold.h"

// Limit of a request served on a completion-queue thread: bytes of codes and exact rows that it reads, times queries.
// Measured with scalar kernels on 2 vCPUs: a decode step over a unix socket, 2 KV heads of 16 and 24 coordinates,
// p50 in us:
//   cost                  2560  10240  19072  54400  101504  195712
//   engine in process        5     13     76    313     632    1280
//   served inline           45     55    127    368     684    1325
//   served by the pool      60     70    146    391     723    1360
// The hop costs 15 to 40 us, and several times that on a busy machine, so that a decode step of a small model
// should not take it; at the limit a step blocks the thread for 1.7 ms.
#define INLINE_COST_MAX 262144

// ---- Check ----

static uint64_t round_up(uint64_t bytes) {
  return (bytes + 63) / 64 * 64;
}

// Places for out and LSE in the block. Elements fit: the dims have been checked against the model's.
static qkv_status plan_result(qkvi_attend_call *state, qkvi_attend_part *part, const qkv_model *model,
                              qkv_error *error) {
  uint64_t rows = (uint64_t)part->item->q.dims[0] * model->q_heads;
  uint64_t out = round_up(rows * model->value_dim * qkv_dtype_size(state->request.out_dtype));
  uint64_t lse = round_up(rows * sizeof(float));
  uint64_t limit = (uint64_t)state->daemon->options->limit_message;
  if (state->block_bytes + out + lse > limit)
    return qkv_fail(error, QKV_INVALID_ARGUMENT,
                    "q.dims[0] is %" PRId64 ", the results up to here take %" PRIu64
                    " bytes, limit-message is %" PRIu64,
                    part->item->q.dims[0], state->block_bytes + out + lse, limit);
  part->out = state->block_bytes;
  part->lse = state->block_bytes + out;
  state->block_bytes += out + lse;
  return QKV_OK;
}

static bool client_gone(const void *call) {
  return qkv_rpc_cancelled(call);
}

static qkv_status check_queries(qkvi_attend_call *state, qkvi_attend_part *part, qkv_error *error) {
  const qkvi_item *item = part->item;
  qkv_attend *attend = &part->request;
  *attend = (qkv_attend){.position = item->position,
                         .q = item->q,
                         .q_before_rope = item->q_before_rope,
                         .options = item->options,
                         .stopped = client_gone,
                         .stopped_context = state->call};
  QKV_TRY(qkvi_attend_read(part, (state->waits & QKVI_WAIT_LAYERS) != 0, &attend->layer, error));
  qkv_status status = qkv_attend_check(attend, error);
  double cost = status == QKV_OK ? (double)qkv_attend_cost(attend) * (double)item->q.dims[0] : 0;
  qkv_session_read_done(part->session, item->layer);
  QKV_TRY(status);
  QKV_TRY(plan_result(state, part, qkv_session_model(part->session), error));
  state->cost += cost;
  return QKV_OK;
}

static qkv_status check_part(qkvi_attend_call *state, qkvi_attend_part *part, qkv_error *error) {
  if (part->item->k.rank != 0) QKV_TRY(qkvi_call_check_role(state->call, QKVI_ROLE_WRITE, error));
  QKV_TRY(qkv_store_session(state->daemon->store, qkvi_call_tenant(state->call), part->item->session, &part->session,
                            error));
  QKV_TRY(qkvi_unfold(state->daemon->residency, state->call, part->session, &state->waits, error));
  return part->item->q.rank == 0 ? QKV_OK : check_queries(state, part, error);
}

static void ensure_capacity(qkvi_attend_call *state, size_t count) {
  if (count <= state->capacity) return;
  state->parts = realloc(state->parts, count * sizeof *state->parts);
  state->order = realloc(state->order, count * sizeof *state->order);
  state->attends = realloc(state->attends, count * sizeof *state->attends);
  if (state->parts == NULL || state->order == NULL || state->attends == NULL) abort();
  state->capacity = count;
}

static void drop_sessions(qkvi_attend_call *state) {
  for (size_t i = 0; i < state->part_count; i++) qkvi_attend_let_go(state, &state->parts[i]);
}

static void begin_check(qkvi_attend_call *state) {
  ensure_capacity(state, state->request.count);
  state->part_count = state->request.count;
  state->next = state->next_sync = 0;
  state->cost = 0;
  state->begun = false;
  state->turn = 0;
  state->block_bytes = 0;
  for (size_t i = 0; i < state->part_count; i++)
    state->parts[i] = (qkvi_attend_part){.item = &state->request.items[i]};
}

static qkv_status find_into(qkvi_attend_call *state, qkv_error *error) {
  const qkvi_region_part *part = &state->request.into;
  if (part->region.length == 0 || state->into != NULL) return QKV_OK;
  QKV_TRY(qkvi_call_check_role(state->call, QKVI_ROLE_WRITE, error));
  return qkvi_regions_find(state->daemon->regions, qkvi_call_tenant(state->call), part, "results_into", &state->into,
                           error);
}

static qkv_status make_block(qkvi_attend_call *state, qkv_error *error) {
  const uint64_t bytes = state->request.into.bytes;
  if (state->into != NULL && state->block_bytes > bytes)
    return qkv_fail(error, QKV_INVALID_ARGUMENT,
                    "results_into.shared_memory_byte_size is %" PRIu64 ", the results take %" PRIu64, bytes,
                    state->block_bytes);
  return qkvi_block_create(state->call, state->block_bytes, (uint64_t)state->daemon->options->limit_response_bytes,
                           &state->block, error);
}

// QKV_UNAVAILABLE, with nothing kept: a layer is in use or a session is folded, and it may not wait for it.
// RESOURCE_EXHAUSTED: no headroom for the answer. NOT_FOUND, INVALID_ARGUMENT: the client's memory for it is not
// registered, or too small.
static qkv_status check(qkvi_attend_call *state, qkv_error *call_error) {
  const uint64_t shared = qkvi_request_load(&state->request, state->daemon->regions, qkvi_call_tenant(state->call));
  if (shared > 0) qkv_rpc_count_bytes(state->call, shared);
  QKV_TRY(find_into(state, call_error));
  begin_check(state);
  for (size_t i = 0; i < state->part_count; i++) {
    qkvi_attend_part *part = &state->parts[i];
    qkv_error *error = &part->item->error;
    if (error->status != QKV_OK) continue;
    qkv_status status = check_part(state, part, error);
    if (status == QKV_UNAVAILABLE) {
      drop_sessions(state);
      return status;
    }
    if (status != QKV_OK) qkvi_attend_drop(state, i);
  }
  if (state->block_bytes > 0) QKV_TRY(make_block(state, call_error));
  state->checked = true;
  return QKV_OK;
}

// ---- Append ----

static bool append_part(qkvi_attend_call *state, size_t index) {
  qkvi_attend_part *part = &state->parts[index];
  uint64_t appended = 0;
  if (part->session == NULL || part->item->k.rank == 0) return true;
  if (part->item->q.rank != 0) qkv_attend_show(&part->request);
  qkv_status status = qkvi_append_item(state->call, part->session, part->item, &state->waits, &appended,
                                       &part->length, &part->item->error);
  if (status == QKV_UNAVAILABLE && part->item->error.status == QKV_OK) return false;
  if (status != QKV_OK) qkvi_attend_drop(state, index);
  return true;
}

// False where it stopped before its end, at part `next`: the client has gone, or it has to wait for more.
static bool append(qkvi_attend_call *state) {
  for (; state->next < state->part_count; state->next++) {
    if (qkv_rpc_cancelled(state->call) || !append_part(state, state->next)) return false;
  }
  return true;
}

// The same for parts that have to be durable before they are acknowledged.
static bool sync_parts(qkvi_attend_call *state) {
  for (; state->next_sync < state->part_count; state->next_sync++) {
    qkvi_attend_part *part = &state->parts[state->next_sync];
    if (part->session == NULL || part->item->k.rank == 0) continue;
    qkv_error *error = &part->item->error;
    const qkv_status status = qkvi_append_sync(state->call, part->session, &state->waits, error);
    if (status == QKV_UNAVAILABLE && error->status == QKV_OK) return false;
    if (status != QKV_OK) qkvi_attend_drop(state, state->next_sync);
  }
  return true;
}

// ---- Answer ----

// Field numbers are those of kv_cache.proto and tensor.proto.
static void put_tensor(const qkvi_attend_call *state, uint32_t field, qkv_dtype dtype, const int64_t *dims, int rank,
                       size_t offset) {
  qkv_wire_writer *writer = state->writer;
  int64_t bytes = 0;
  qkv_status status = qkv_tensor_bytes(dtype, rank, dims, &bytes);
  assert(status == QKV_OK);
  qkv_wire_begin(writer, field);
  qkv_wire_put_varint(writer, 1, (uint64_t)dtype);
  qkv_wire_put_packed(writer, 2, dims, (size_t)rank);
  if (state->into != NULL) {
    qkvi_region_put(writer, &state->request.into, offset, (uint64_t)bytes);
  } else {
    qkvi_block_hold(state->block);
    qkv_wire_put_reference(writer, 15, state->block->data + offset, (size_t)bytes, state->block);
  }
  qkv_wire_end(writer);
}

static void put_result(const qkvi_attend_call *state, const qkvi_attend_part *part) {
  qkv_wire_writer *writer = state->writer;
  const qkvi_item *item = part->item;
  qkv_wire_begin(writer, 1);
  qkv_wire_begin(writer, 1);
  qkv_wire_put_varint(writer, 1, (uint64_t)item->error.status);
  qkv_wire_put_string(writer, 2, item->error.text);
  qkv_wire_end(writer);
  if (item->error.status == QKV_OK) qkv_wire_put_varint(writer, 2, part->length);
  if (part->session != NULL && item->q.rank != 0) {
    const qkv_model *model = qkv_session_model(part->session);
    const int64_t dims[3] = {item->q.dims[0], model->q_heads, model->value_dim};
    put_tensor(state, 3, state->request.out_dtype, dims, 3, part->out);
    put_tensor(state, 4, QKV_FP32, dims, 2, part->lse);
  }
  qkv_wire_end(writer);
}

static void count_attends(const qkvi_attend_call *state) {
  int64_t items = 0, queries = 0;
  for (size_t i = 0; i < state->part_count; i++) {
    const qkvi_attend_part *part = &state->parts[i];
    if (part->session == NULL || part->item->q.rank == 0) continue;
    items++;
    queries += part->item->q.dims[0];
  }
  qkv_metric_add(&state->daemon->metrics[QKV_METRIC_ATTEND_ITEMS], items);
  qkv_metric_add(&state->daemon->metrics[QKV_METRIC_ATTEND_QUERIES], queries);
}

static bool all_failed(const qkvi_request *request) {
  for (size_t i = 0; i < request->count; i++) {
    if (request->items[i].error.status == QKV_OK) return false;
  }
  return true;
}

static void drop_block(qkvi_attend_call *state) {
  qkvi_block_release(state->block);
  state->block = NULL;
}

static void drop_into(qkvi_attend_call *state) {
  qkvi_region_release(state->into);
  state->into = NULL;
}

static qkv_status write_one(const qkvi_attend_call *state, size_t offset, uint64_t bytes, qkv_error *error) {
  qkv_rpc_count_bytes(state->call, bytes);
  return qkvi_region_write(state->into, state->request.into.offset + offset, state->block->data + offset, bytes,
                           error);
}

// The results alone: what lies between them in the block is memory that others had.
static qkv_status write_into(const qkvi_attend_call *state, qkv_error *error) {
  for (size_t i = 0; i < state->part_count; i++) {
    const qkvi_attend_part *part = &state->parts[i];
    if (part->session == NULL || part->item->q.rank == 0) continue;
    const qkv_model *model = qkv_session_model(part->session);
    const uint64_t rows = (uint64_t)part->item->q.dims[0] * model->q_heads;
    QKV_TRY(write_one(state, part->out, rows * model->value_dim * qkv_dtype_size(state->request.out_dtype), error));
    QKV_TRY(write_one(state, part->lse, rows * sizeof(float), error));
  }
  return QKV_OK;
}

// The call may be over, and `state` freed, when this returns. The client may have gone and stopped the attends.
static void answer(qkvi_attend_call *state) {
  qkvi_request *request = &state->request;
  qkv_error error = {0};
  if (!qkvi_job_wanted(state->call)) return;
  count_attends(state);
  if (state->into != NULL && write_into(state, &error) != QKV_OK) return qkvi_control_fail(state->call, &error);
  qkv_wire_writer_clear(state->writer);
  for (size_t i = 0; i < state->part_count; i++) put_result(state, &state->parts[i]);
  qkv_wire_put_varint(state->writer, 2, request->id);
  drop_block(state);  // the pieces hold it
  drop_into(state);
  drop_sessions(state);
  qkvi_request_unload(request);
  if (state->stream) return qkv_rpc_send(state->call, state->writer, qkvi_block_release);
  if (all_failed(request)) return qkvi_control_fail(state->call, &request->items[0].error);
  qkv_rpc_reply(state->call, state->writer, qkvi_block_release);
}

// ---- The call ----

// False where the call is over.
static bool parse(qkvi_attend_call *state) {
  const qkvi_limits limits = qkvi_limits_of(state->daemon->options);
  qkv_error error = {0};
  qkv_status status = qkvi_request_parse(state->message, QKVI_ATTEND_REQUEST, &limits, &state->request, &error);
  state->parsed = status == QKV_OK;
  if (status == QKV_OK && state->request.items[0].error.status == QKV_OK)
    qkv_rpc_name_session(state->call, state->request.items[0].session);
  if (status != QKV_OK) qkvi_control_fail(state->call, &error);
  return status == QKV_OK;
}

static void serve_job(void *context);

// Urgent or not: a step of decoding has few queries, and the whole batch waits for it; a prompt has many. A message
// that is not parsed yet is large.
static bool is_decode(const qkvi_attend_call *state) {
  enum { QUERIES_MAX = 16 };  // of an item
  if (!state->parsed) return false;
  for (size_t i = 0; i < state->request.count; i++) {
    const qkvi_item *item = &state->request.items[i];
    if ((item->q.rank != 0 && item->q.dims[0] > QUERIES_MAX) || (item->k.rank != 0 && item->k.dims[0] > QUERIES_MAX))
      return false;
  }
  return true;
}

static void submit(qkvi_attend_call *state, qkvi_waits waits) {
  const qkv_share share = {.urgent = is_decode(state), .again = state->checked && state->begun};
  qkvi_job_submit_as(state->call, waits, share, serve_job, state);
}

// A stopped request goes on in a job that may wait for it, unless its client has gone; one with queries left when
// other jobs have had their turn. The call may be over, and `state` freed, when this returns.
static void serve(qkvi_attend_call *state) {
  const qkv_work here = qkvi_work_of(state->waits, false);
  for (bool more = true; more;) {
    if (!append(state) || !sync_parts(state) || !qkvi_attend_turn(state, &more)) {
      if (qkvi_job_wanted(state->call)) submit(state, state->waits);
      return;
    }
    if (more && qkvi_job_yield(state->call, here, state->waits, is_decode(state), serve_job, state)) return;
    if (more && !qkvi_job_wanted(state->call)) return;
  }
  answer(state);
}

static void serve_job(void *context) {
  qkvi_attend_call *state = context;
  qkv_error error = {0};
  if (!qkvi_job_wanted(state->call)) return;
  state->waits |= QKVI_WAIT_LAYERS;
  if (!state->parsed && !parse(state)) return;
  const qkv_status status = state->checked ? QKV_OK : check(state, &error);
  if (status == QKV_UNAVAILABLE && error.status == QKV_OK) return submit(state, state->waits);
  if (status != QKV_OK) return qkvi_control_fail(state->call, &error);
  serve(state);
}

static qkvi_attend_call *state_of(qkv_rpc_call *call, bool stream) {
  qkvi_attend_call *state = qkv_rpc_state(call);
  if (state != NULL) return state;
  state = calloc(1, sizeof *state);
  if (state == NULL) abort();
  state->call = call;
  state->daemon = qkv_rpc_context(call);
  state->stream = stream;
  state->writer = qkv_wire_writer_create();
  qkv_rpc_set_state(call, state);
  return state;
}

static void take(qkv_rpc_call *call, qkv_bytes message, bool stream) {
  qkvi_attend_call *state = state_of(call, stream);
  qkv_error error = {0};
  state->message = message;
  state->parsed = state->checked = false;
  state->waits = 0;
  if (message.length > QKVI_INLINE_MESSAGE_MAX) return submit(state, QKVI_WAIT_LAYERS);
  if (!parse(state)) return;
  if (qkvi_request_row_bytes(&state->request) > QKVI_INLINE_ROWS_MAX ||
      qkvi_request_may_wait(&state->request, state->daemon->regions))
    return submit(state, QKVI_WAIT_LAYERS);
  qkv_status status = check(state, &error);
  if (status != QKV_OK && status != QKV_UNAVAILABLE) return qkvi_control_fail(call, &error);
  if (status == QKV_UNAVAILABLE || state->cost > INLINE_COST_MAX)
    return submit(state, state->waits | QKVI_WAIT_LAYERS);
  serve(state);
}

static void on_attend(qkv_rpc_call *call, qkv_bytes message) {
  take(call, message, false);
}

static void on_decode(qkv_rpc_call *call, qkv_bytes message) {
  take(call, message, true);
}

static void on_decode_end(qkv_rpc_call *call) {
  qkv_rpc_finish(call, QKV_OK, "");
}

static void destroy(void *context) {
  qkvi_attend_call *state = context;
  if (state == NULL) return;
  drop_sessions(state);  // those of a job that was refused or skipped
  drop_block(state);
  drop_into(state);
  qkvi_request_deinit(&state->request);
  qkv_wire_writer_destroy(&state->writer);
  free(state->parts);
  free(state->order);
  free(state->attends);
  free(state);
}

const qkv_rpc_method qkvi_attend_methods[] = {
    {.path = "/qkv.v1.KvCache/Attend", .message = on_attend, .destroy = destroy},
    {.path = "/qkv.v1.KvCache/Decode",
     .message = on_decode,
     .end = on_decode_end,
     .sent = qkv_rpc_next,
     .destroy = destroy},
    {0}};
