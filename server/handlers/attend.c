// Attend and Decode: batches of items that append, attend, or both.
//
//   check   look the sessions up, check the queries, add up the bytes of the answer    (no change yet)
//   append  the rows, item by item
//   attend  all requested layers locked for reading, one run over all items
//   answer  results as references to one block that the run wrote, or copied to the client's shared memory
//
//
// Small requests are served on their completion-queue thread: handing one over to the compute pool wakes a thread,
// which costs more than a decode step of a small model. Larger ones become a job, and so does the rest of one that
// meets a layer in use: only jobs wait for locks.
#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>

#include "engine/base/histogram.h"
#include "engine/cache/session_spill.h"
#include "server/auth/identity.h"
#include "server/handlers/append.h"
#include "server/handlers/attend_pieces.h"
#include "server/handlers/block.h"
#include "server/handlers/control.h"
#include "server/handlers/handlers.h"
#include "server/handlers/jobs.h"
#include "server/residency/fold.h"
#include "server/residency/read_ahead.h"
#include "server/residency/restore.h"

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

// An item while its request is served.
typedef struct batch_part {
  qkvi_item *item;
  qkv_session *session;  // a reference while the item has no error
  uint64_t length;       // the layer's, afterwards
  size_t attend;         // its place in `attends`, where the item has queries
  size_t out, lse;       // bytes into the block
  uint64_t begin, end;   // positions that it reads
  bool cold, held;       // not all of them are in memory; restored pages stay
  bool done;             // attended piece by piece
} batch_part;

typedef struct attend_call {
  qkv_rpc_call *call;
  qkv_daemon *daemon;
  bool stream;  // the call is Decode
  qkv_bytes message;
  qkvi_request request;
  batch_part *parts;    // [request.count]
  batch_part **order;   // parts with queries, in lock order
  qkv_attend *attends;  // of the same parts, in the order of the request
  size_t capacity;      // of the three
  size_t part_count;    // of the request that is served
  size_t attend_count;
  bool parsed, checked;
  qkvi_waits waits;            // its wait reasons
  size_t next;                 // part to append
  size_t next_sync;            // part whose rows are to be durable
  double cost;                 // of all attends
  uint64_t block_bytes;        // of all outs and LSEs
  qkvi_response_block *block;  // of block_bytes; NULL without attends
  qkvi_region *into;           // where the block is copied to; NULL: the answer refers to it
  qkv_wire_writer *writer;
} attend_call;

static qkv_pool *pool_of(const attend_call *state) {
  return qkv_executor_pool(state->daemon->executor, QKV_WORK_INTERACTIVE);
}

// ---- Check ----

static uint64_t round_up(uint64_t bytes) {
  return (bytes + 63) / 64 * 64;
}

// Places for out and LSE in the block. Elements fit: the dims have been checked against the model's.
static qkv_status plan_result(attend_call *state, batch_part *part, const qkv_model *model, qkv_error *error) {
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

static qkv_status read_layer(const batch_part *part, bool wait, const qkv_layer **layer, qkv_error *error) {
  return (wait ? qkv_session_read : qkv_session_try_read)(part->session, part->item->layer, layer, error);
}

static bool client_gone(const void *call) {
  return qkv_rpc_cancelled(call);
}

static qkv_status check_queries(attend_call *state, batch_part *part, qkv_error *error) {
  const qkvi_item *item = part->item;
  qkv_attend *attend = &state->attends[state->attend_count];
  *attend = (qkv_attend){.position = item->position,
                         .q = item->q,
                         .q_before_rope = item->q_before_rope,
                         .options = item->options,
                         .stopped = client_gone,
                         .stopped_context = state->call};
  QKV_TRY(read_layer(part, (state->waits & QKVI_WAIT_LAYERS) != 0, &attend->layer, error));
  qkv_status status = qkv_attend_check(attend, error);
  double cost = status == QKV_OK ? (double)qkv_attend_cost(attend) * (double)item->q.dims[0] : 0;
  qkv_session_read_done(part->session, item->layer);
  QKV_TRY(status);
  QKV_TRY(plan_result(state, part, qkv_session_model(part->session), error));
  part->attend = state->attend_count++;
  state->cost += cost;
  return QKV_OK;
}

static qkv_status check_part(attend_call *state, batch_part *part, qkv_error *error) {
  if (part->item->k.rank != 0) QKV_TRY(qkvi_call_check_role(state->call, QKVI_ROLE_WRITE, error));
  QKV_TRY(qkv_store_session(state->daemon->store, qkvi_call_tenant(state->call), part->item->session, &part->session,
                            error));
  QKV_TRY(qkvi_unfold(state->daemon->residency, state->call, part->session, &state->waits, error));
  return part->item->q.rank == 0 ? QKV_OK : check_queries(state, part, error);
}

static void ensure_capacity(attend_call *state, size_t count) {
  if (count <= state->capacity) return;
  state->parts = realloc(state->parts, count * sizeof *state->parts);
  state->order = realloc(state->order, count * sizeof *state->order);
  state->attends = realloc(state->attends, count * sizeof *state->attends);
  if (state->parts == NULL || state->order == NULL || state->attends == NULL) abort();
  state->capacity = count;
}

static void release(const attend_call *state, batch_part *part) {
  if (part->held) qkvi_budget_release(state->daemon->residency, part->session, part->item->layer);
  part->held = false;
}

static void let_go(const attend_call *state, batch_part *part) {
  if (part->session == NULL) return;
  release(state, part);
  qkv_session_unref(&part->session);
}

static void drop_part(attend_call *state, size_t index) {
  (void)qkvi_item_place(&state->parts[index].item->error, index);
  let_go(state, &state->parts[index]);
}

static void drop_sessions(attend_call *state) {
  for (size_t i = 0; i < state->part_count; i++) let_go(state, &state->parts[i]);
}

static void begin_check(attend_call *state) {
  ensure_capacity(state, state->request.count);
  state->part_count = state->request.count;
  state->next = state->next_sync = 0;
  state->attend_count = 0;
  state->cost = 0;
  state->block_bytes = 0;
  for (size_t i = 0; i < state->part_count; i++) state->parts[i] = (batch_part){.item = &state->request.items[i]};
}

static qkv_status find_into(attend_call *state, qkv_error *error) {
  const qkvi_region_part *part = &state->request.into;
  if (part->region.length == 0 || state->into != NULL) return QKV_OK;
  QKV_TRY(qkvi_call_check_role(state->call, QKVI_ROLE_WRITE, error));
  return qkvi_regions_find(state->daemon->regions, qkvi_call_tenant(state->call), part, "results_into", &state->into,
                           error);
}

static qkv_status make_block(attend_call *state, qkv_error *error) {
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
static qkv_status check(attend_call *state, qkv_error *call_error) {
  const uint64_t shared = qkvi_request_load(&state->request, state->daemon->regions, qkvi_call_tenant(state->call));
  if (shared > 0) qkv_rpc_count_bytes(state->call, shared);
  QKV_TRY(find_into(state, call_error));
  begin_check(state);
  for (size_t i = 0; i < state->part_count; i++) {
    batch_part *part = &state->parts[i];
    qkv_error *error = &part->item->error;
    if (error->status != QKV_OK) continue;
    qkv_status status = check_part(state, part, error);
    if (status == QKV_UNAVAILABLE) {
      drop_sessions(state);
      return status;
    }
    if (status != QKV_OK) drop_part(state, i);
  }
  if (state->attend_count > 0) QKV_TRY(make_block(state, call_error));
  state->checked = true;
  return QKV_OK;
}

// ---- Append and attend ----

static bool append_part(attend_call *state, size_t index) {
  batch_part *part = &state->parts[index];
  uint64_t appended = 0;
  if (part->session == NULL || part->item->k.rank == 0) return true;
  if (part->item->q.rank != 0) qkv_attend_show(&state->attends[part->attend]);
  qkv_status status = qkvi_append_item(state->call, part->session, part->item, &state->waits, &appended,
                                       &part->length, &part->item->error);
  if (status == QKV_UNAVAILABLE && part->item->error.status == QKV_OK) return false;
  if (status != QKV_OK) drop_part(state, index);
  return true;
}

// False where it stopped before its end, at part `next`: the client has gone, or it has to wait for more.
static bool append(attend_call *state) {
  for (; state->next < state->part_count; state->next++) {
    if (qkv_rpc_cancelled(state->call) || !append_part(state, state->next)) return false;
  }
  return true;
}

// The same for parts that have to be durable before they are acknowledged.
static bool sync_parts(attend_call *state) {
  for (; state->next_sync < state->part_count; state->next_sync++) {
    batch_part *part = &state->parts[state->next_sync];
    if (part->session == NULL || part->item->k.rank == 0) continue;
    qkv_error *error = &part->item->error;
    const qkv_status status = qkvi_append_sync(state->call, part->session, &state->waits, error);
    if (status == QKV_UNAVAILABLE && error->status == QKV_OK) return false;
    if (status != QKV_OK) drop_part(state, state->next_sync);
  }
  return true;
}

// Lock order, as session.h prescribes it.
static int compare_slots(const void *a, const void *b) {
  const batch_part *left = *(batch_part *const *)a, *right = *(batch_part *const *)b;
  if (left->session != right->session) return (uintptr_t)left->session < (uintptr_t)right->session ? -1 : 1;
  return (left->item->layer > right->item->layer) - (left->item->layer < right->item->layer);
}

static bool same_layer(const batch_part *a, const batch_part *b) {
  return a->session == b->session && a->item->layer == b->item->layer;
}

static void unlock(batch_part **order, size_t count) {
  for (size_t i = count; i-- > 0;) {
    if (i == 0 || !same_layer(order[i], order[i - 1]))
      qkv_session_read_done(order[i]->session, order[i]->item->layer);
  }
}

// Takes each layer once, however many items name it. False, with none taken, where one is in use and it may
// not wait.
static bool lock(attend_call *state, batch_part **order, size_t count) {
  const qkv_layer *layer = NULL;
  qsort(order, count, sizeof *order, compare_slots);
  for (size_t i = 0; i < count; i++) {
    assert(i == 0 || compare_slots(&order[i - 1], &order[i]) <= 0);  // in another order calls may wait for each other
    if (i == 0 || !same_layer(order[i], order[i - 1])) {
      qkv_status status = read_layer(order[i], (state->waits & QKVI_WAIT_LAYERS) != 0, &layer, NULL);
      if (status == QKV_UNAVAILABLE) {
        unlock(order, i);
        state->waits |= QKVI_WAIT_LAYERS;
        return false;
      }
      assert(status == QKV_OK);  // check_queries has read it before
    }
    order[i]->length = layer->length;
    state->attends[order[i]->attend].layer = layer;
  }
  return true;
}

// `attends` without those whose append has failed; gives the parts that are left.
static size_t gather(attend_call *state) {
  size_t count = 0;
  for (size_t i = 0; i < state->part_count; i++) {
    batch_part *part = &state->parts[i];
    if (part->session == NULL || part->item->q.rank == 0 || part->done) continue;
    state->attends[count] = state->attends[part->attend];
    part->attend = count;
    state->order[count++] = part;
  }
  return count;
}

static void count_attends(const attend_call *state) {
  int64_t queries = 0;
  for (size_t i = 0; i < state->attend_count; i++) queries += state->attends[i].q.dims[0];
  qkv_metric_add(&state->daemon->metrics[QKV_METRIC_ATTEND_ITEMS], (int64_t)state->attend_count);
  qkv_metric_add(&state->daemon->metrics[QKV_METRIC_ATTEND_QUERIES], queries);
}

// Only FP32 results are written by the engine in place, into the block that is sent.
static void narrow(const attend_call *state, const batch_part *part) {
  const qkv_attend *attend = &state->attends[part->attend];
  const qkv_model *model = qkv_session_model(part->session);
  if (state->request.out_dtype == QKV_FP32) return;
  size_t count = (size_t)attend->q.dims[0] * model->q_heads * model->value_dim;
  qkv_from_float(state->request.out_dtype, attend->out, state->block->data + part->out, count);
  free(attend->out);
}

static void aim(const attend_call *state, const batch_part *part) {
  qkv_attend *attend = &state->attends[part->attend];
  const qkv_model *model = qkv_session_model(part->session);
  attend->lse = (float *)(state->block->data + part->lse);
  attend->out = (float *)(state->block->data + part->out);
  if (state->request.out_dtype == QKV_FP32) return;
  attend->out = malloc((size_t)attend->q.dims[0] * model->q_heads * model->value_dim * sizeof(float));
  if (attend->out == NULL) abort();
}

// Notes the parts whose positions are not all in memory; whether there are any.
static bool find_cold(const attend_call *state, size_t count) {
  bool any = false;
  for (size_t i = 0; i < count; i++) {
    batch_part *part = state->order[i];
    const qkv_attend *request = &state->attends[part->attend];
    qkv_attend_span(request, &part->begin, &part->end);
    part->cold = !qkv_layer_holds(request->layer, part->begin, part->end);
    any |= part->cold;
  }
  return any;
}

// The parts that do not fit into memory at once.
static qkv_status attend_pieces(attend_call *state, batch_part *part, size_t held, qkv_error *error) {
  aim(state, part);
  const qkv_status status =
      qkvi_attend_pieces(state->call, pool_of(state), part->session, part->item->layer, &state->attends[part->attend],
                         part->begin, part->end, held, &part->length, error);
  narrow(state, part);
  part->done = true;
  return status;
}

static void fail_part(attend_call *state, size_t index, const qkv_error *error) {
  state->parts[index].item->error = *error;
  drop_part(state, index);
}

static size_t count_held(const attend_call *state) {
  size_t held = 0;
  for (size_t i = 0; i < state->part_count; i++) held += state->parts[i].held ? 1 : 0;
  return held;
}

// Attends the parts whose pages have come back, so that these may be evicted again.
static void finish_held(attend_call *state) {
  for (size_t i = 0; i < state->part_count; i++) {
    batch_part *part = &state->parts[i];
    qkv_error error = {0};
    if (!part->held) continue;
    const qkv_status status = attend_pieces(state, part, count_held(state), &error);
    release(state, part);
    if (status != QKV_OK) fail_part(state, i, &error);
  }
}

static qkv_status hold_part(attend_call *state, batch_part *part, qkv_error *error) {
  const qkvi_wanted wanted = {.call = state->call,
                              .session = part->session,
                              .layer = part->item->layer,
                              .begin = part->begin,
                              .end = part->end,
                              .held = count_held(state)};
  *error = (qkv_error){0};
  const qkv_status status = qkvi_restore(state->daemon->residency, &wanted, NULL, error);
  part->held = status == QKV_OK;
  return status;
}

// A layer that does not fit in addition to the held ones is tried again without them, and then in pieces.
static qkv_status bring_part_back(attend_call *state, batch_part *part, qkv_error *error) {
  qkv_status status = hold_part(state, part, error);
  if (status == QKV_RESOURCE_EXHAUSTED && count_held(state) > 0) {
    finish_held(state);
    status = hold_part(state, part, error);
  }
  if (status != QKV_RESOURCE_EXHAUSTED) return status;
  *error = (qkv_error){0};
  return attend_pieces(state, part, 0, error);
}

// Brings the pages of these parts back. They stay until the answer is made, or until there is no memory for all.
static void bring_back(attend_call *state) {
  for (size_t i = 0; i < state->part_count; i++) {
    batch_part *part = &state->parts[i];
    qkv_error error = {0};
    if (part->session == NULL || !part->cold) continue;
    release(state, part);
    part->cold = false;
    if (part->done) continue;
    if (bring_part_back(state, part, &error) != QKV_OK) fail_part(state, i, &error);
  }
}

// With all layers locked and all pages that are read in memory: the number of parts; 0 where none is left. False
// where it has to wait for more.
static bool lock_all(attend_call *state, size_t *count) {
  for (;;) {
    *count = state->attend_count = gather(state);
    if (*count == 0) return true;
    if (!lock(state, state->order, *count)) return false;
    if (!find_cold(state, *count)) return true;
    unlock(state->order, *count);
    if ((state->waits & QKVI_WAIT_DISK) == 0) {
      state->waits |= QKVI_WAIT_DISK;
      return false;
    }
    bring_back(state);
  }
}

// False as lock_all() says.
static bool attend(attend_call *state) {
  size_t count;
  if (!lock_all(state, &count)) return false;
  if (count == 0) return true;
  for (size_t i = 0; i < count; i++) {
    const batch_part *part = state->order[i];
    qkvi_read_ahead(state->daemon, part->session, &state->attends[part->attend], part->end);
  }
  for (size_t i = 0; i < count; i++) {
    aim(state, state->order[i]);
    state->attends[i].host_only = (state->waits & QKVI_WAIT_LAYERS) == 0;
  }
  const uint64_t began = qkv_stage_now();
  qkv_attend_run((state->waits & QKVI_WAIT_LAYERS) != 0 ? pool_of(state) : NULL, state->attends, count);
  qkv_stage_add(QKV_STAGE_ATTEND, began);
  unlock(state->order, count);
  for (size_t i = 0; i < count; i++) narrow(state, state->order[i]);
  count_attends(state);
  return true;
}

// ---- Answer ----

// Field numbers are those of kv_cache.proto and tensor.proto.
static void put_tensor(const attend_call *state, uint32_t field, qkv_dtype dtype, const int64_t *dims, int rank,
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

static void put_result(const attend_call *state, const batch_part *part) {
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

static bool all_failed(const qkvi_request *request) {
  for (size_t i = 0; i < request->count; i++) {
    if (request->items[i].error.status == QKV_OK) return false;
  }
  return true;
}

static void drop_block(attend_call *state) {
  qkvi_block_release(state->block);
  state->block = NULL;
}

static void drop_into(attend_call *state) {
  qkvi_region_release(state->into);
  state->into = NULL;
}

static qkv_status write_one(const attend_call *state, size_t offset, uint64_t bytes, qkv_error *error) {
  qkv_rpc_count_bytes(state->call, bytes);
  return qkvi_region_write(state->into, state->request.into.offset + offset, state->block->data + offset, bytes,
                           error);
}

// The results alone: what lies between them in the block is memory that others had.
static qkv_status write_into(const attend_call *state, qkv_error *error) {
  for (size_t i = 0; i < state->part_count; i++) {
    const batch_part *part = &state->parts[i];
    if (part->session == NULL || part->item->q.rank == 0) continue;
    const qkv_model *model = qkv_session_model(part->session);
    const uint64_t rows = (uint64_t)part->item->q.dims[0] * model->q_heads;
    QKV_TRY(write_one(state, part->out, rows * model->value_dim * qkv_dtype_size(state->request.out_dtype), error));
    QKV_TRY(write_one(state, part->lse, rows * sizeof(float), error));
  }
  return QKV_OK;
}

// The call may be over, and `state` freed, when this returns. The client may have gone and stopped the attends.
static void answer(attend_call *state) {
  qkvi_request *request = &state->request;
  qkv_error error = {0};
  if (!qkvi_job_wanted(state->call)) return;
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
static bool parse(attend_call *state) {
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
static bool is_decode(const attend_call *state) {
  enum { QUERIES_MAX = 16 };  // of an item
  if (!state->parsed) return false;
  for (size_t i = 0; i < state->request.count; i++) {
    const qkvi_item *item = &state->request.items[i];
    if ((item->q.rank != 0 && item->q.dims[0] > QUERIES_MAX) || (item->k.rank != 0 && item->k.dims[0] > QUERIES_MAX))
      return false;
  }
  return true;
}

static void submit(attend_call *state, qkvi_waits waits) {
  (is_decode(state) ? qkvi_job_submit_urgent : qkvi_job_submit)(state->call, waits, serve_job, state);
}

// A stopped request goes on in a job that may wait for it, unless its client has gone.
static void serve(attend_call *state) {
  if (append(state) && sync_parts(state) && attend(state))
    answer(state);
  else if (qkvi_job_wanted(state->call))
    submit(state, state->waits);
}

static void serve_job(void *context) {
  attend_call *state = context;
  qkv_error error = {0};
  if (!qkvi_job_wanted(state->call)) return;
  state->waits |= QKVI_WAIT_LAYERS;
  if (!state->parsed && !parse(state)) return;
  const qkv_status status = state->checked ? QKV_OK : check(state, &error);
  if (status == QKV_UNAVAILABLE && error.status == QKV_OK) return submit(state, state->waits);
  if (status != QKV_OK) return qkvi_control_fail(state->call, &error);
  serve(state);
}

static attend_call *state_of(qkv_rpc_call *call, bool stream) {
  attend_call *state = qkv_rpc_state(call);
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
  attend_call *state = state_of(call, stream);
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
  attend_call *state = context;
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
