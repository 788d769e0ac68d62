#include "server/residency/read_ahead.h"

#include <stdlib.h>

#include "engine/cache/session_spill.h"
#include "server/residency/internal.h"
#include "server/residency/restore.h"

// A session whose layers have been walked through so often (a prefill does it once) is expected to do so again: after
// its last layer comes the first one.
enum { JOBS_MAX = 2, BUDGET_PART = 8, TURNS_MIN = 2 };

typedef struct reading_ahead {
  qkvi_ahead here;  // in the list of those under way
  qkv_daemon *daemon;
  qkv_session *session;     // a reference
  bool run;                 // of one layer; else layers behind the one that is used
  uint32_t layer;           // of a run; else the one that was used as this began
  uint64_t begin, end;      // positions
  uint64_t queries;         // of the request
  uint64_t sliding_window;  // of its own, or 0
} reading_ahead;

static uint64_t window_bytes(const qkv_daemon *daemon) {
  const uint64_t most = (uint64_t)daemon->options->storage_read_ahead;
  const uint64_t part = qkvi_budget_limit(daemon->residency) / BUDGET_PART;
  return most < part ? most : part;
}

// The first position that a request like this one reads in a layer.
static uint64_t begin_in(const reading_ahead *on, uint32_t layer) {
  const uint64_t own = on->sliding_window,
                 window = own > 0 ? own : qkv_model_window(qkv_session_model(on->session), layer);
  const uint64_t seen = window + on->queries;
  return window > 0 && on->end > seen && on->end - seen > on->begin ? on->end - seen : on->begin;
}

static uint32_t layer_at(const reading_ahead *on, uint32_t step) {
  return (on->layer + step) % qkv_session_model(on->session)->layers;
}

// The range that is read ahead of a layer.
typedef struct range {
  uint32_t step;  // in steps from on->layer
  uint64_t begin, end;
} range;

// The end of the whole pages of a layer's `bytes` that fit into `headroom` bytes.
static uint64_t end_in(const reading_ahead *on, uint64_t begin, uint64_t bytes, uint64_t headroom) {
  if (bytes <= headroom) return on->end;
  const double part = (double)headroom / (double)bytes * (double)(on->end - begin);
  return begin + (uint64_t)part / QKV_PAGE_TOKENS * QKV_PAGE_TOKENS;
}

// The next layer behind step `done`, and behind the one in use, that has cold pages, within the window, once around
// at most; of the last one as much as fits. The first pages that are evicted are those that a sliding window has
// passed: so many may be cold without being missed.
static bool next_range(const reading_ahead *on, uint32_t done, range *next) {
  const uint64_t window = window_bytes(on->daemon);
  const uint64_t first = qkv_session_config_of(on->session)->first_position;
  const uint32_t layers = qkv_session_model(on->session)->layers;
  const uint32_t steps = qkv_session_turns(on->session) < TURNS_MIN ? layers - on->layer : layers;
  uint64_t sum = 0;
  for (uint32_t i = (qkv_session_last_layer(on->session) + layers - on->layer) % layers + 1; i < steps; i++) {
    uint64_t bytes;
    const uint64_t cold = qkv_session_cold(on->session, layer_at(on, i), &bytes), headroom = window - sum;
    const uint64_t begin = begin_in(on, layer_at(on, i)), end = end_in(on, begin, bytes, headroom);
    const uint64_t outside = (begin > first ? begin - first : 0) + (on->end - end);
    *next = (range){.step = i, .begin = begin, .end = end};
    if (i > done && begin < end && cold > outside) return true;
    if (bytes > headroom) return false;
    sum += bytes;
  }
  return false;
}

static uint64_t bring_back(const reading_ahead *on, uint32_t layer, uint64_t begin, uint64_t end) {
  qkvi_residency *residency = on->daemon->residency;
  const double budget = (double)qkvi_budget_limit(residency);
  const qkvi_wanted wanted = {.session = on->session, .layer = layer, .begin = begin, .end = end};
  qkvi_budget_hold(residency, on->session, layer);
  // Not above memory-high: nothing is demoted for pages that no request has asked for.
  const uint64_t bytes =
      qkvi_restore_ahead(residency, &wanted, (uint64_t)(on->daemon->options->memory_high * budget));
  qkvi_budget_release(residency, on->session, layer);
  qkv_metric_add(&residency->metrics[QKV_METRIC_READ_AHEAD_BYTES], (int64_t)bytes);
  return bytes;
}

static void leave(reading_ahead *on) {
  qkvi_residency *residency = on->daemon->residency;
  qkvi_residency_lock(residency);
  qkvi_ahead **link = &residency->ahead;
  while (*link != &on->here) link = &(*link)->next;
  *link = on->here.next;
  residency->ahead_count--;
  qkvi_residency_unlock(residency);
  qkv_session_unref(&on->session);
  free(on);
}

static void job(void *context) {
  reading_ahead *on = context;
  range next = {0};
  if (on->run) (void)bring_back(on, on->layer, on->begin, on->end);
  while (!on->run && next_range(on, next.step, &next)) {
    if (bring_back(on, layer_at(on, next.step), next.begin, next.end) == 0) break;
  }
  leave(on);
}

// Whether the session may have a job now; then it is added to the list.
static bool enter(reading_ahead *on) {
  qkvi_residency *residency = on->daemon->residency;
  qkvi_residency_lock(residency);
  bool free_place = residency->ahead_count < JOBS_MAX;
  for (const qkvi_ahead *at = residency->ahead; at != NULL; at = at->next) free_place &= at->session != on->session;
  if (free_place) {
    on->here = (qkvi_ahead){.session = on->session, .next = residency->ahead};
    residency->ahead = &on->here;
    residency->ahead_count++;
  }
  qkvi_residency_unlock(residency);
  return free_place;
}

static void begin_job(const reading_ahead *wanted) {
  reading_ahead *on = malloc(sizeof *on);
  if (on == NULL) abort();
  *on = *wanted;
  if (!enter(on)) return free(on);
  (void)qkv_session_ref(on->session);
  if (qkv_executor_submit(on->daemon->executor, QKV_WORK_BLOCKING, job, on) != QKV_OK) leave(on);
}

static bool may_read(const qkv_daemon *daemon, const qkv_session *session) {
  return daemon->residency != NULL && daemon->options->storage_read_ahead > 0 && qkv_session_has_cold(session);
}

void qkvi_read_ahead(qkv_daemon *daemon, qkv_session *session, const qkv_attend *request, uint64_t end) {
  if (!may_read(daemon, session)) return;
  const reading_ahead wanted = {.daemon = daemon,
                                .session = session,
                                .layer = qkv_session_last_layer(session),
                                .begin = request->options.begin,
                                .end = end,
                                .queries = (uint64_t)request->q.dims[0],
                                .sliding_window = request->options.sliding_window};
  range next;
  if (next_range(&wanted, 0, &next)) begin_job(&wanted);
}

void qkvi_read_ahead_run(qkv_daemon *daemon, qkv_session *session, uint32_t layer, uint64_t begin, uint64_t end) {
  if (!may_read(daemon, session) || begin >= end) return;
  begin_job(&(reading_ahead){
      .daemon = daemon, .session = session, .run = true, .layer = layer, .begin = begin, .end = end});
}
