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

// Only FP32 results are written by the engine in place, into the block that is sent.
static void drop_out(const qkvi_attend_call *state, const qkv_attend *attend) {
  if (state->request.out_dtype != QKV_FP32) free(attend->out);
}

static void drop_pieces(const qkvi_attend_call *state, qkvi_attend_part *part) {
  if (part->pieces == NULL) return;
  drop_out(state, qkvi_pieces_request(part->pieces));
  qkvi_pieces_destroy(&part->pieces);
}

void qkvi_attend_let_go(const qkvi_attend_call *state, qkvi_attend_part *part) {
  if (part->session == NULL) return;
  drop_pieces(state, part);
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

// What is left of parts [0, end), but those in pieces; gives their number.
static size_t gather(qkvi_attend_call *state, size_t end) {
  size_t count = 0;
  for (size_t i = 0; i < end; i++) {
    qkvi_attend_part *part = &state->parts[i];
    if (queries_left(part) == 0 || part->pieces != NULL) continue;
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

static void narrow(const qkvi_attend_call *state, const qkvi_attend_part *part, const qkv_attend *attend) {
  const qkv_model *model = qkv_session_model(part->session);
  if (state->request.out_dtype == QKV_FP32) return;
  size_t count = (size_t)attend->q.dims[0] * model->q_heads * model->value_dim;
  qkv_from_float(state->request.out_dtype, attend->out, place_of_out(state, part), count);
}

static void aim(const qkvi_attend_call *state, const qkvi_attend_part *part, qkv_attend *attend) {
  const qkv_model *model = qkv_session_model(part->session);
  attend->lse = (float *)(state->block->data + part->lse) + part->attended * model->q_heads;
  attend->out = (float *)place_of_out(state, part);
  if (state->request.out_dtype == QKV_FP32) return;
  attend->out = malloc((size_t)attend->q.dims[0] * model->q_heads * model->value_dim * sizeof(float));
  if (attend->out == NULL) abort();
}

// Notes the parts that read positions in this turn that are not all in memory; whether there are any.
static bool find_cold(const qkvi_attend_call *state, size_t count) {
  bool any = false;
  for (size_t i = 0; i < count; i++) {
    qkvi_attend_part *part = state->order[i];
    const qkv_attend left = qkv_attend_slice(&part->request, part->attended, queries_left(part));
    qkv_attend_span(&left, &part->begin, &part->end);
    qkv_attend_span(&state->attends[part->attend], &part->begin, &part->turn_end);
    part->cold = !qkv_layer_holds(left.layer, part->begin, part->turn_end);
    any |= part->cold;
  }
  return any;
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

static qkv_status hold_part(qkvi_attend_call *state, qkvi_attend_part *part, qkv_error *error) {
  const uint64_t began = qkv_stage_now();
  const qkvi_wanted wanted = {.call = state->call,
                              .session = part->session,
                              .layer = part->item->layer,
                              .begin = part->begin,
                              .end = part->turn_end,
                              .held = count_held(state)};
  const qkv_status status = qkvi_restore(state->daemon->residency, &wanted, NULL, error);
  part->held = status == QKV_OK;
  state->back_ns += qkv_stage_now() - began;
  return status;
}

// What is left of a part that does not fit into memory at once.
static void begin_pieces(qkvi_attend_call *state, qkvi_attend_part *part) {
  qkv_attend left = qkv_attend_slice(&part->request, part->attended, queries_left(part));
  aim(state, part, &left);
  const qkvi_pieces_config config = {.call = state->call,
                                     .pool = pool_of(state),
                                     .session = part->session,
                                     .layer = part->item->layer,
                                     .cuts = part->cuts,
                                     .begin = part->begin,
                                     .end = part->end,
                                     .turn = turn_of(state)};
  part->pieces = qkvi_pieces_create(&config, &left);
}

// Brings the pages of these parts of [0, end) back, and holds them. Returns the end of those that fit into memory
// together: the others have their turns later. A part that does not fit alone is attended in pieces.
static size_t bring_back(qkvi_attend_call *state, size_t end) {
  for (size_t i = 0; i < end; i++) {
    qkvi_attend_part *part = &state->parts[i];
    qkv_error error = {0};
    if (part->session == NULL || !part->cold) continue;
    release(state, part);
    part->cold = false;
    const qkv_status status = hold_part(state, part, &error);
    if (status == QKV_RESOURCE_EXHAUSTED && count_held(state) > 0) return i;
    if (status == QKV_RESOURCE_EXHAUSTED) {
      begin_pieces(state, part);
    } else if (status != QKV_OK) {
      fail_part(state, i, &error);
    }
  }
  return end;
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

// With the layers of a turn locked and all pages that it reads in memory: the number of parts; 0 where none is left
// but in pieces. False where it has to wait for more.
static bool lock_all(qkvi_attend_call *state, size_t *count) {
  size_t end = state->part_count;
  for (;;) {
    *count = gather(state, end);
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
    end = bring_back(state, end);
  }
}

static void run_turn(qkvi_attend_call *state, size_t count) {
  for (size_t i = 0; i < count; i++) {
    const qkvi_attend_part *part = state->order[i];
    qkv_attend *turn = &state->attends[part->attend];
    if ((uint64_t)turn->q.dims[0] == queries_left(part))
      qkvi_read_ahead(state->daemon, part->session, &part->request, part->end);
    aim(state, part, turn);
    turn->host_only = (state->waits & QKVI_WAIT_LAYERS) == 0;
  }
  const uint64_t began = qkv_stage_now();
  qkv_attend_run((state->waits & QKVI_WAIT_LAYERS) != 0 ? pool_of(state) : NULL, state->attends, count);
  state->turn = qkv_attend_next_cost(state->turn, qkv_stage_now() - began);
  qkv_stage_add(QKV_STAGE_ATTEND, began);
  unlock(state->order, count);
  for (size_t i = 0; i < count; i++) {
    qkvi_attend_part *part = state->order[i];
    const qkv_attend *turn = &state->attends[part->attend];
    narrow(state, part, turn);
    drop_out(state, turn);
    part->attended += (uint64_t)turn->q.dims[0];
    qkv_session_touch(part->session);  // it is used until now
  }
}

// Ends the use of pages by parts that are attended; of the others, too, unless they are kept. Whether any are.
static bool release_parts(const qkvi_attend_call *state, bool keep) {
  for (size_t i = 0; i < state->part_count; i++) {
    qkvi_attend_part *part = &state->parts[i];
    if (!keep || queries_left(part) == 0) release(state, part);
  }
  return count_held(state) > 0;
}

// A turn of the parts that are not in pieces, or more where pages are kept. False as lock_all() says. `*any`: there
// was one.
static bool run_turns(qkvi_attend_call *state, bool *any) {
  uint64_t ran_ns = 0;
  state->back_ns = 0;
  *any = false;
  for (bool keep = true; keep;) {
    size_t count;
    if (!lock_all(state, &count)) return false;
    const uint64_t began = qkv_stage_now();
    if (count > 0) run_turn(state, count);
    ran_ns += qkv_stage_now() - began;
    *any |= count > 0;
    keep = count > 0 && qkvi_attend_keeps(state->back_ns, ran_ns) && !qkv_rpc_cancelled(state->call);
    keep = release_parts(state, keep);
  }
  return true;
}

// Goes on with the first part in pieces. False where it has to wait for the disk. `*any`: there was one, and no
// error.
static bool go_on_in_pieces(qkvi_attend_call *state, bool *any) {
  size_t i = 0;
  qkv_error error = {0};
  bool done = false;
  while (i < state->part_count && state->parts[i].pieces == NULL) i++;
  if (i == state->part_count) return true;
  if ((state->waits & QKVI_WAIT_DISK) == 0) {
    state->waits |= QKVI_WAIT_DISK;
    return false;
  }
  qkvi_attend_part *part = &state->parts[i];
  const qkv_status status = qkvi_pieces_go_on(part->pieces, &done, &error);
  *any = status == QKV_OK;
  if (status != QKV_OK) fail_part(state, i, &error);
  if (!done) return true;
  narrow(state, part, qkvi_pieces_request(part->pieces));
  part->attended += queries_left(part);
  drop_pieces(state, part);
  return true;
}

// What other turns are left needs: those in pieces alone need the disk for certain.
static bool find_more(qkvi_attend_call *state) {
  bool any = false, in_memory = false;
  for (size_t i = 0; i < state->part_count; i++) {
    any |= queries_left(&state->parts[i]) > 0;
    in_memory |= queries_left(&state->parts[i]) > 0 && state->parts[i].pieces == NULL;
  }
  if (in_memory) state->waits &= QKVI_WAIT_LAYERS;
  return any;
}

// A turn. False as lock_all() says. `*more`: there are queries left.
bool qkvi_attend_turn(qkvi_attend_call *state, bool *more) {
  bool any;
  *more = false;
  if (!run_turns(state, &any) || (!any && !go_on_in_pieces(state, &any))) return false;
  if (any) qkv_rpc_forget_waits(state->call);  // this turn's: others have had what it waited for meanwhile
  state->begun |= any;
  *more = find_more(state);
  return true;
}
