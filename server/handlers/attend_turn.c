// Turns of attends. What a batch reads is locked for a turn and no longer: in between others change its layers and
// evict its pages, sessions end, and other jobs run.
#include <assert.h>
#include <stdlib.h>

#include "engine/base/histogram.h"
#include "engine/cache/session_spill.h"
#include "server/handlers/attend_call.h"
#include "server/handlers/attend_pieces.h"
#include "server/residency/read_ahead.h"
#include "server/residency/restore.h"

// Codes and exact rows that the first turn of a request reads for each thread, once for each block of queries: 15 ms.
// Later turns are as long as they should be (qkv_attend_next_cost).
#define TURN_BYTES ((uint64_t)8 << 20)

static qkv_pool *pool_of(const qkvi_attend_call *state) {
  return qkv_executor_pool(state->daemon->executor, QKV_WORK_INTERACTIVE);
}

static uint64_t *turn_of(qkvi_attend_call *state) {
  if (state->turn == 0) state->turn = TURN_BYTES * qkv_pool_width(pool_of(state));
  return &state->turn;
}

static void release(const qkvi_attend_call *state, qkvi_attend_part *part) {
  if (part->held) qkvi_budget_release(state->daemon->residency, part->session, part->item->layer);
  part->held = false;
}

void qkvi_attend_let_go(const qkvi_attend_call *state, qkvi_attend_part *part) {
  if (part->session == NULL) return;
  release(state, part);
  qkv_session_unref(&part->session);
}

void qkvi_attend_drop(qkvi_attend_call *state, size_t index) {
  (void)qkvi_item_place(&state->parts[index].item->error, index);
  qkvi_attend_let_go(state, &state->parts[index]);
}

// ---- Layers ----

qkv_status qkvi_attend_read(const qkvi_attend_part *part, bool wait, const qkv_layer **layer, qkv_error *error) {
  return (wait ? qkv_session_read : qkv_session_try_read)(part->session, part->item->layer, layer, error);
}

// Lock order, as session.h prescribes it.
static int compare_slots(const void *a, const void *b) {
  const qkvi_attend_part *left = *(qkvi_attend_part *const *)a, *right = *(qkvi_attend_part *const *)b;
  if (left->session != right->session) return (uintptr_t)left->session < (uintptr_t)right->session ? -1 : 1;
  return (left->item->layer > right->item->layer) - (left->item->layer < right->item->layer);
}

static bool same_layer(const qkvi_attend_part *a, const qkvi_attend_part *b) {
  return a->session == b->session && a->item->layer == b->item->layer;
}

static void unlock(qkvi_attend_part **order, size_t count) {
  for (size_t i = count; i-- > 0;) {
    if (i == 0 || !same_layer(order[i], order[i - 1]))
      qkv_session_read_done(order[i]->session, order[i]->item->layer);
  }
}

// A request sees what was there when its first queries were attended, in this turn or in a later one.
static void note_layer(const qkvi_attend_call *state, qkvi_attend_part *part, const qkv_layer *layer) {
  qkv_attend *left = &state->attends[part->attend];
  part->request.layer = left->layer = layer;
  part->cut = part->attended > 0 && part->cuts != layer->cuts;
  if (part->attended > 0) return;
  part->length = layer->length;
  part->cuts = layer->cuts;
  part->request.options.end = left->options.end = part->item->options.end;
  qkv_attend_end_at(&part->request, layer->length);
  qkv_attend_end_at(left, layer->length);
}

// Takes each layer once, however many items name it. False, with none taken, where one is in use and it may
// not wait.
static bool lock(qkvi_attend_call *state, qkvi_attend_part **order, size_t count) {
  const qkv_layer *layer = NULL;
  qsort(order, count, sizeof *order, compare_slots);
  for (size_t i = 0; i < count; i++) {
    assert(i == 0 || compare_slots(&order[i - 1], &order[i]) <= 0);  // in another order calls may wait for each other
    if (i == 0 || !same_layer(order[i], order[i - 1])) {
      qkv_status status = qkvi_attend_read(order[i], (state->waits & QKVI_WAIT_LAYERS) != 0, &layer, NULL);
      if (status == QKV_UNAVAILABLE) {
        unlock(order, i);
        state->waits |= QKVI_WAIT_LAYERS;
        return false;
      }
      assert(status == QKV_OK);  // check_queries has read it before
    }
    note_layer(state, order[i], layer);
  }
  return true;
}

static uint64_t queries_left(const qkvi_attend_part *part) {
  if (part->session == NULL || part->item->q.rank == 0) return 0;
  return (uint64_t)part->item->q.dims[0] - part->attended;
}

// What is left of the parts; gives their number.
static size_t gather(qkvi_attend_call *state) {
  size_t count = 0;
  for (size_t i = 0; i < state->part_count; i++) {
    qkvi_attend_part *part = &state->parts[i];
    if (queries_left(part) == 0) continue;
    state->attends[count] = qkv_attend_slice(&part->request, part->attended, queries_left(part));
    part->attend = count;
    state->order[count++] = part;
  }
  return count;
}

// Leaves those of `count` locked parts that are for this turn, and unlocks the others; gives their number.
static size_t choose(qkvi_attend_call *state, size_t count) {
  qkvi_attend_part **order = state->order;
  uint64_t queries;
  size_t left = 0;
  const size_t taken = qkv_attend_take(state->attends, count, *turn_of(state), &queries);
  state->attends[taken - 1] = qkv_attend_slice(&state->attends[taken - 1], 0, queries);
  for (size_t i = 0, end; i < count; i = end) {
    const size_t before = left;
    for (end = i; end < count && same_layer(order[end], order[i]); end++) {
      if (order[end]->attend < taken) order[left++] = order[end];
    }
    if (left == before) qkv_session_read_done(order[i]->session, order[i]->item->layer);
  }
  return left;
}

// Where the results go of the queries that are next.
static uint8_t *place_of_out(const qkvi_attend_call *state, const qkvi_attend_part *part) {
  const qkv_model *model = qkv_session_model(part->session);
  return state->block->data + part->out +
         part->attended * model->q_heads * model->value_dim * qkv_dtype_size(state->request.out_dtype);
}

// Only FP32 results are written by the engine in place, into the block that is sent.
static void narrow(const qkvi_attend_call *state, const qkvi_attend_part *part) {
  const qkv_attend *attend = &state->attends[part->attend];
  const qkv_model *model = qkv_session_model(part->session);
  if (state->request.out_dtype == QKV_FP32) return;
  size_t count = (size_t)attend->q.dims[0] * model->q_heads * model->value_dim;
  qkv_from_float(state->request.out_dtype, attend->out, place_of_out(state, part), count);
  free(attend->out);
}

static void aim(const qkvi_attend_call *state, const qkvi_attend_part *part) {
  qkv_attend *attend = &state->attends[part->attend];
  const qkv_model *model = qkv_session_model(part->session);
  attend->lse = (float *)(state->block->data + part->lse) + part->attended * model->q_heads;
  attend->out = (float *)place_of_out(state, part);
  if (state->request.out_dtype == QKV_FP32) return;
  attend->out = malloc((size_t)attend->q.dims[0] * model->q_heads * model->value_dim * sizeof(float));
  if (attend->out == NULL) abort();
}

// Notes the parts whose positions are not all in memory; whether there are any.
static bool find_cold(const qkvi_attend_call *state, size_t count) {
  bool any = false;
  for (size_t i = 0; i < count; i++) {
    qkvi_attend_part *part = state->order[i];
    const qkv_attend left = qkv_attend_slice(&part->request, part->attended, queries_left(part));
    qkv_attend_span(&left, &part->begin, &part->end);
    part->cold = !qkv_layer_holds(left.layer, part->begin, part->end);
    any |= part->cold;
  }
  return any;
}

// What is left of a part that does not fit into memory at once.
static qkv_status attend_pieces(qkvi_attend_call *state, qkvi_attend_part *part, size_t held, qkv_error *error) {
  qkv_attend *left = &state->attends[part->attend];
  *left = qkv_attend_slice(&part->request, part->attended, queries_left(part));
  aim(state, part);
  const qkvi_pieces wanted = {.call = state->call,
                              .pool = pool_of(state),
                              .session = part->session,
                              .layer = part->item->layer,
                              .cuts = part->cuts,
                              .begin = part->begin,
                              .end = part->end,
                              .held = held,
                              .turn = turn_of(state)};
  const qkv_status status = qkvi_attend_pieces(&wanted, left, error);
  narrow(state, part);
  part->attended += queries_left(part);
  return status;
}

static void fail_part(qkvi_attend_call *state, size_t index, const qkv_error *error) {
  state->parts[index].item->error = *error;
  qkvi_attend_drop(state, index);
}

static size_t count_held(const qkvi_attend_call *state) {
  size_t held = 0;
  for (size_t i = 0; i < state->part_count; i++) held += state->parts[i].held ? 1 : 0;
  return held;
}

// Attends the parts whose pages have come back, so that these may be evicted again.
static void finish_held(qkvi_attend_call *state) {
  for (size_t i = 0; i < state->part_count; i++) {
    qkvi_attend_part *part = &state->parts[i];
    qkv_error error = {0};
    if (!part->held) continue;
    const qkv_status status = attend_pieces(state, part, count_held(state), &error);
    release(state, part);
    if (status != QKV_OK) fail_part(state, i, &error);
  }
}

static qkv_status hold_part(qkvi_attend_call *state, qkvi_attend_part *part, qkv_error *error) {
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
static qkv_status bring_part_back(qkvi_attend_call *state, qkvi_attend_part *part, qkv_error *error) {
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
static void bring_back(qkvi_attend_call *state) {
  for (size_t i = 0; i < state->part_count; i++) {
    qkvi_attend_part *part = &state->parts[i];
    qkv_error error = {0};
    if (part->session == NULL || !part->cold) continue;
    release(state, part);
    part->cold = false;
    if (queries_left(part) == 0) continue;
    if (bring_part_back(state, part, &error) != QKV_OK) fail_part(state, i, &error);
  }
}

// Fails the parts whose layers were cut between turns; whether there were any. Then nothing is locked any more.
static bool drop_cut(qkvi_attend_call *state, size_t count) {
  bool any = false;
  for (size_t i = 0; i < count; i++) any |= state->order[i]->cut;
  if (!any) return false;
  unlock(state->order, count);
  for (size_t i = 0; i < state->part_count; i++) {
    qkv_error error = {0};
    if (!state->parts[i].cut) continue;
    state->parts[i].cut = false;
    (void)qkvi_attend_was_cut(&error);
    fail_part(state, i, &error);
  }
  return true;
}

// With the layers of a turn locked and all pages that it reads in memory: the number of parts; 0 where none is left.
// False where it has to wait for more.
static bool lock_all(qkvi_attend_call *state, size_t *count) {
  for (;;) {
    *count = gather(state);
    if (*count == 0) return true;
    if (!lock(state, state->order, *count)) return false;
    if (drop_cut(state, *count)) continue;
    *count = choose(state, *count);
    if (!find_cold(state, *count)) return true;
    unlock(state->order, *count);
    if ((state->waits & QKVI_WAIT_DISK) == 0) {
      state->waits |= QKVI_WAIT_DISK;
      return false;
    }
    bring_back(state);
  }
}

static void run_turn(qkvi_attend_call *state, size_t count) {
  for (size_t i = 0; i < count; i++) {
    const qkvi_attend_part *part = state->order[i];
    const qkv_attend *turn = &state->attends[part->attend];
    if ((uint64_t)turn->q.dims[0] == queries_left(part))
      qkvi_read_ahead(state->daemon, part->session, &part->request, part->end);
    aim(state, part);
    state->attends[part->attend].host_only = (state->waits & QKVI_WAIT_LAYERS) == 0;
  }
  const uint64_t began = qkv_stage_now();
  qkv_attend_run((state->waits & QKVI_WAIT_LAYERS) != 0 ? pool_of(state) : NULL, state->attends, count);
  state->turn = qkv_attend_next_cost(state->turn, qkv_stage_now() - began);
  qkv_stage_add(QKV_STAGE_ATTEND, began);
  unlock(state->order, count);
  for (size_t i = 0; i < count; i++) {
    qkvi_attend_part *part = state->order[i];
    narrow(state, part);
    part->attended += (uint64_t)state->attends[part->attend].q.dims[0];
    qkv_session_touch(part->session);  // it is used until now
  }
}

// A turn. False as lock_all() says. `*more`: there are queries left.
bool qkvi_attend_turn(qkvi_attend_call *state, bool *more) {
  size_t count;
  *more = false;
  if (!lock_all(state, &count)) return false;
  if (count > 0) run_turn(state, count);
  for (size_t i = 0; i < state->part_count; i++) {
    release(state, &state->parts[i]);
    *more |= queries_left(&state->parts[i]) > 0;
  }
  return true;
}
