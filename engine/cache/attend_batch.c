// A batch of requests as tasks: first the ranges that are computed apart from their heads, then a task for every KV
// head, which merges their partial results in order and computes all others. A device (device.h) computes ranges that
// it has copies of at the same time as the first tasks; what it does not get done, the heads compute.
//
// Ranges become tasks of their own for three reasons, and those of all heads follow each other:
//
// With some tasks for each thread, a thread that the scheduler delays does not hold up the end.
//
// A page has all heads, so a head after the other goes through the same memory as often as there are heads. Beyond
// some hundred megabytes every round finds the tables of addresses fallen out of the caches. At 1048576 tokens, one
// thread and four query heads 64 ns a token instead of 83 with one or two ranges a task, 77 with 16; at one query
// head 53 instead of 80. A task costs about a microsecond, 6 % of a range's time.
//
// Requests of sessions that were forked share ranges: the rows of all of them are one block for one pass over the
// codes (attend_share.c).
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cache/attend_internal.h"

#define TASKS_A_THREAD 16
#define SHARED_A_THREAD 2  // ranges of all heads that sharing leaves a thread, at least
#define RANGES_FAR 32
#define RANGES_TOGETHER 2
#define SPLIT_BYTES_MAX ((size_t)64 << 20)  // of partial results at once

// The ranges of one request that have partial results: [first, first + count) for every KV head.
typedef struct split {
  size_t first, count;     // count 0: its heads compute all
  size_t each;             // ranges of a task of this request, the last one may have less; 0: it has no tasks
  bool *shared;            // [count]: computed by a task of several requests, or by a device
  bool *computed;          // [count]: by any task
  qkvi_partial *partials;  // [kv_heads][count]
  float *sums;             // [kv_heads][count][rows][value_dim]
} split;

typedef struct split_task {
  const qkvi_share_group *group;  // NULL: of one request
  size_t place;                   // which one, in the batch
  size_t first, count;            // ranges of the layer
  uint16_t kv_head;
} split_task;

typedef struct attend_batch {
  const qkv_attend *requests;
  size_t count;
  size_t heads_max;   // KV heads of the request that has most
  size_t task_count;  // before those of heads
  qkvi_sharing sharing;
  qkvi_device_work *device;  // NULL: no device has any of the ranges
  split *splits;             // [count]; NULL: nothing is computed apart
  split_task *tasks;         // then all partials, all sums and all flags
} attend_batch;

// How a call is cut into tasks.
typedef struct cut_plan {
  size_t width;        // threads
  size_t each;         // ranges of a task
  size_t members_max;  // requests of a group; below 2: no ranges are shared
} cut_plan;

static size_t heads_of(const qkv_attend *request) {
  return request->layer->config.model->kv_heads;
}

// ---- Running ----

static void attend_index(void *context, size_t index, size_t worker) {
  (void)worker;
  const attend_batch *batch = context;
  const qkv_attend *request = &batch->requests[index / batch->heads_max];
  size_t kv_head = index % batch->heads_max;
  if (kv_head >= heads_of(request)) return;
  const split *ranges = batch->splits != NULL ? &batch->splits[index / batch->heads_max] : NULL;
  if (ranges == NULL || ranges->count == 0) return qkvi_attend_head(request, (uint16_t)kv_head, NULL);
  qkvi_attend_head(request, (uint16_t)kv_head,
                   &(qkvi_head_ranges){.first = ranges->first,
                                       .computed = ranges->computed,
                                       .partials = ranges->partials + kv_head * ranges->count});
}

// Makes the block's queries ready for a range, unless they are.
static void ready_for(const qkvi_head_task *task, qkvi_row_block *block, size_t range, const qkv_coder **ready) {
  const qkv_coder *coder = qkvi_attend_coder(task->layer, range);
  if (coder != *ready) coder->codec->query(coder, task->kv_head, &block->queries);
  *ready = coder;
}

// A request's partial result of a range, and its sums.
static qkvi_partial *slot_of(const attend_batch *batch, size_t place, uint16_t kv_head, size_t range, float **sums) {
  const split *ranges = &batch->splits[place];
  const qkv_attend *request = &batch->requests[place];
  const size_t at = kv_head * ranges->count + range - ranges->first;
  *sums = ranges->sums + at * qkvi_attend_rows(request) * request->layer->config.model->value_dim;
  return &ranges->partials[at];
}

static void attend_own(const attend_batch *batch, const split_task *task) {
  _Alignas(64) qkvi_row_block block;
  const qkv_attend *request = &batch->requests[task->place];
  const split *ranges = &batch->splits[task->place];
  const qkvi_head_task head = qkvi_attend_task(request, task->kv_head);
  const qkv_coder *ready = NULL;
  qkvi_attend_load(&head, &block, 0, qkvi_attend_rows(request));
  for (size_t range = task->first; range < task->first + task->count && !qkvi_attend_stopped(request); range++) {
    float *sums;
    if (ranges->shared[range - ranges->first]) continue;
    qkvi_partial *partial = slot_of(batch, task->place, task->kv_head, range, &sums);
    ready_for(&head, &block, range, &ready);
    qkvi_attend_range(&head, &block, range, sums, partial);
  }
}

// Members of a group, each with its rows behind those of the one before; stopped ones are left out.
static size_t load_members(const attend_batch *batch, const split_task *task, qkvi_row_block *block, size_t *places) {
  size_t count = 0;
  qkvi_attend_clear(block, batch->requests[task->group->members[0]].options.precision);
  for (size_t i = 0; i < task->group->member_count; i++) {
    const qkv_attend *request = &batch->requests[task->group->members[i]];
    if (qkvi_attend_stopped(request)) continue;
    const qkvi_head_task head = qkvi_attend_task(request, task->kv_head);
    qkvi_attend_add(&head, block, 0, qkvi_attend_rows(request));
    places[count++] = task->group->members[i];
  }
  return count;
}

// `partial`, from row `first` on, is what a member gets of a range.
static void hand_out(const attend_batch *batch, size_t place, uint16_t kv_head, size_t range,
                     const qkvi_partial *partial, size_t first) {
  const qkv_attend *request = &batch->requests[place];
  const size_t rows = qkvi_attend_rows(request), dim = request->layer->config.model->value_dim;
  float *sums;
  qkvi_partial *own = slot_of(batch, place, kv_head, range, &sums);
  own->rows = rows;
  for (size_t row = 0; row < rows; row++) {
    own->sums[row] = memcpy(sums + row * dim, partial->sums[first + row], dim * sizeof *sums);
    own->peak[row] = partial->peak[first + row];
    own->total[row] = partial->total[first + row];
  }
}

static bool all_stopped(const attend_batch *batch, const size_t *places, size_t count) {
  for (size_t i = 0; i < count; i++) {
    if (!qkvi_attend_stopped(&batch->requests[places[i]])) return false;
  }
  return true;
}

static void attend_shared(const attend_batch *batch, const split_task *task) {
  _Alignas(64) qkvi_row_block block;
  size_t places[QKVI_SHARE_ROWS];
  const size_t count = load_members(batch, task, &block, places);
  if (count == 0) return;
  const qkvi_head_task head = qkvi_attend_task(&batch->requests[places[0]], task->kv_head);
  const qkv_coder *ready = NULL;
  for (size_t range = task->first; range < task->first + task->count; range++) {
    qkvi_partial partial;
    if (all_stopped(batch, places, count)) return;
    ready_for(&head, &block, range, &ready);
    qkvi_attend_range(&head, &block, range, block.part, &partial);
    for (size_t i = 0, row = 0; i < count; row += qkvi_attend_rows(&batch->requests[places[i]]), i++)
      hand_out(batch, places[i], task->kv_head, range, &partial, row);
  }
}

static void attend_split_index(void *context, size_t index, size_t worker) {
  (void)worker;
  const attend_batch *batch = context;
  const split_task *task = &batch->tasks[index];
  if (task->group != NULL) return attend_shared(batch, task);
  attend_own(batch, task);
}

// ---- Planning ----

// Only requests of one block are split: larger ones have work enough, and their partial results take more memory.
static split plan_split(const qkv_attend *request, const cut_plan *plan) {
  split made = {0};
  if (qkvi_attend_rows(request) > QKV_QUERY_BLOCK) return made;
  qkvi_attend_ranges(request, &made.first, &made.count);
  made.count -= made.first;
  made.each = made.count >= RANGES_FAR && plan->each > RANGES_TOGETHER ? RANGES_TOGETHER : plan->each;
  if (made.count > made.each) return made;
  made.each = 0;
  const bool shares = plan->members_max >= 2 && qkvi_share_may(request);
  if (!shares && !qkvi_device_may(request)) made.count = 0;
  return made;
}

// Of a partial result of every range and head, and of as many tasks.
static size_t split_bytes(const qkv_attend *request, const split *plan) {
  const size_t sums = qkvi_attend_rows(request) * request->layer->config.model->value_dim * sizeof(float);
  return plan->count * (heads_of(request) * (sizeof(split_task) + sizeof(qkvi_partial) + sums) + 2 * sizeof(bool));
}

// The tasks of a task's ranges, `each` at most, for all heads.
static void add_tasks(attend_batch *batch, split_task task, size_t each) {
  if (each > task.count) each = task.count;
  const size_t end = task.first + task.count, heads = heads_of(&batch->requests[task.place]);
  for (; task.first < end; task.first += each) {
    task.count = end - task.first < each ? end - task.first : each;
    for (size_t head = 0; head < heads; head++) {
      task.kv_head = (uint16_t)head;
      batch->tasks[batch->task_count++] = task;
    }
  }
}

static void leave_to_device(attend_batch *batch) {
  const bool *const *taken = qkvi_device_taken(batch->device);
  for (size_t i = 0; taken != NULL && i < batch->count; i++) {
    if (taken[i] != NULL) memcpy(batch->splits[i].shared, taken[i], batch->splits[i].count * sizeof(bool));
  }
}

static void add_shared(attend_batch *batch, const cut_plan *plan) {
  const qkvi_sharing *sharing = &batch->sharing;
  size_t all = 0;
  for (size_t i = 0; i < sharing->count; i++)
    all += sharing->groups[i].count * heads_of(&batch->requests[sharing->groups[i].members[0]]);
  const size_t tasks = TASKS_A_THREAD * plan->width, each = plan->width == 1 ? SIZE_MAX : (all + tasks - 1) / tasks;
  for (size_t i = 0; i < sharing->count; i++) {
    const qkvi_share_group *group = &sharing->groups[i];
    const split_task task = {
        .group = group, .place = group->members[0], .first = group->first, .count = group->count};
    add_tasks(batch, task, group->count >= RANGES_FAR && each > RANGES_TOGETHER ? RANGES_TOGETHER : each);
    for (size_t m = 0; m < group->member_count; m++) {
      const split *member = &batch->splits[group->members[m]];
      memset(member->shared + group->first - member->first, true, group->count);
      memset(member->computed + group->first - member->first, true, group->count);
    }
  }
}

static bool is_shared(const split *ranges, size_t first, size_t end) {
  while (first < end && ranges->shared[first]) first++;
  return first == end;
}

static void add_own(attend_batch *batch, size_t place) {
  const split *plan = &batch->splits[place];
  if (plan->each == 0) return;
  for (size_t first = 0; first < plan->count; first += plan->each) {
    const size_t end = plan->count - first < plan->each ? plan->count : first + plan->each;
    const split_task task = {.place = place, .first = plan->first + first, .count = end - first};
    if (!is_shared(plan, first, end)) add_tasks(batch, task, plan->each);
  }
  for (size_t i = 0; i < plan->count; i++) plan->computed[i] |= !plan->shared[i];
}

// Plans what each request of a batch has computed apart. Requests that share nothing after all have nothing, unless
// they are split.
static void plan_batch(attend_batch *batch, const cut_plan *plan) {
  for (size_t i = 0; i < batch->count; i++) batch->splits[i] = plan_split(&batch->requests[i], plan);
  batch->device = qkvi_device_find(batch->requests, batch->count);
  const bool *const *taken = qkvi_device_taken(batch->device);
  if (plan->members_max >= 2)
    qkvi_share_find(batch->requests, batch->count, plan->members_max, taken, &batch->sharing);
  bool *needed = calloc(batch->count, sizeof *needed);
  if (needed == NULL) batch->sharing.count = 0;
  for (size_t i = 0; i < batch->sharing.count; i++) {
    const qkvi_share_group *group = &batch->sharing.groups[i];
    for (size_t m = 0; m < group->member_count; m++) needed[group->members[m]] = true;
  }
  for (size_t i = 0; i < batch->count; i++) {
    const bool is_needed = (needed != NULL && needed[i]) || (taken != NULL && taken[i] != NULL);
    if (batch->splits[i].each == 0 && !is_needed) batch->splits[i].count = 0;
  }
  free(needed);
}

// Lays out partial results and flags in the block that begins with the tasks; `partials` of all requests.
static void lay_out(attend_batch *batch, size_t partials) {
  qkvi_partial *next_partial = (qkvi_partial *)(batch->tasks + partials);
  float *next_sums = (float *)(next_partial + partials);
  for (size_t i = 0; i < batch->count; i++) {
    split *ranges = &batch->splits[i];
    const size_t count = ranges->count * heads_of(&batch->requests[i]);
    ranges->partials = next_partial;
    ranges->sums = next_sums;
    next_partial += count;
    next_sums += count * qkvi_attend_rows(&batch->requests[i]) * batch->requests[i].layer->config.model->value_dim;
  }
  bool *next_flag = (bool *)next_sums;
  for (size_t i = 0; i < batch->count; i++) {
    split *ranges = &batch->splits[i];
    ranges->shared = next_flag;
    ranges->computed = next_flag + ranges->count;
    memset(next_flag, false, 2 * ranges->count * sizeof *next_flag);
    next_flag += 2 * ranges->count;
  }
}

static void clear_batch(attend_batch *batch) {
  qkvi_share_clear(&batch->sharing);
  qkvi_device_clear(&batch->device);
  free(batch->tasks);
  free(batch->splits);
  batch->splits = NULL;
  batch->tasks = NULL;
}

// Makes the tasks of a batch, with memory for their partial results. Leaves `splits` NULL where there are none.
static void split_batch(attend_batch *batch, const cut_plan *plan) {
  size_t partials = 0, bytes = 0;
  batch->splits = malloc(batch->count * sizeof *batch->splits);
  if (batch->splits == NULL) return;
  plan_batch(batch, plan);
  for (size_t i = 0; i < batch->count; i++) {
    partials += batch->splits[i].count * heads_of(&batch->requests[i]);
    bytes += split_bytes(&batch->requests[i], &batch->splits[i]);
  }
  if (bytes > 0) batch->tasks = malloc(bytes);
  if (batch->tasks == NULL) return clear_batch(batch);
  lay_out(batch, partials);
  leave_to_device(batch);
  add_shared(batch, plan);
  for (size_t i = 0; i < batch->count; i++) add_own(batch, i);
  assert(batch->task_count <= partials);
}

// The first requests, as many as SPLIT_BYTES_MAX holds the partial results of; one that is too large for that is not
// split.
static attend_batch first_batch(const qkv_attend *requests, size_t count, const cut_plan *plan) {
  attend_batch batch = {.requests = requests};
  size_t bytes = 0;
  for (; batch.count < count; batch.count++) {
    const split made = plan_split(&requests[batch.count], plan);
    const size_t more = split_bytes(&requests[batch.count], &made);
    if (batch.count > 0 && bytes + more > SPLIT_BYTES_MAX) break;
    bytes += more;
    const size_t heads = heads_of(&requests[batch.count]);
    if (heads > batch.heads_max) batch.heads_max = heads;
  }
  if (bytes > 0 && bytes <= SPLIT_BYTES_MAX) split_batch(&batch, plan);
  return batch;
}

// Tasks should be as many as keep threads busy to the end.
static cut_plan plan_cut(const qkv_pool *pool, const qkv_attend *requests, size_t count) {
  cut_plan plan = {.width = pool == NULL ? 1 : qkv_pool_width(pool), .each = SIZE_MAX, .members_max = SIZE_MAX};
  size_t sharers = 0, all = 0, first, end;
  for (size_t i = 0; i < count && count > 1 && sharers < 2; i++) sharers += qkvi_share_may(&requests[i]);
  if (sharers < 2) plan.members_max = 0;
  if (plan.width == 1) return plan;
  for (size_t i = 0; i < count; i++) {
    qkvi_attend_ranges(&requests[i], &first, &end);
    all += (end - first) * heads_of(&requests[i]);
  }
  plan.each = (all + TASKS_A_THREAD * plan.width - 1) / (TASKS_A_THREAD * plan.width);
  if (plan.members_max > 0) plan.members_max = all / (SHARED_A_THREAD * plan.width);
  return plan;
}

static qkvi_partial *device_slot(void *context, size_t place, uint16_t kv_head, size_t range, float **sums) {
  return slot_of(context, place, kv_head, range, sums);
}

static void device_computed(void *context, size_t place, size_t range) {
  const attend_batch *batch = context;
  batch->splits[place].computed[range - batch->splits[place].first] = true;
}

static void run_loop(qkv_pool *pool, size_t count, qkv_loop_fn *run, void *context) {
  if (pool != NULL) return qkv_pool_loop(pool, count, run, context);
  for (size_t i = 0; i < count; i++) run(context, i, 0);
}

void qkvi_attend_batch(qkv_pool *pool, const qkv_attend *requests, size_t count) {
  const cut_plan plan = plan_cut(pool, requests, count);
  for (size_t first = 0; first < count;) {
    attend_batch batch = first_batch(requests + first, count - first, &plan);
    if (batch.device != NULL) qkvi_device_start(batch.device);
    if (batch.splits != NULL) run_loop(pool, batch.task_count, attend_split_index, &batch);
    if (batch.device != NULL)
      qkvi_device_finish(batch.device, &(qkvi_device_results){device_slot, device_computed, &batch});
    run_loop(pool, batch.count * batch.heads_max, attend_index, &batch);
    clear_batch(&batch);
    first += batch.count;
  }
}
