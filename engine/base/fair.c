#include "engine/base/fair.h"

#include <assert.h>
#include <stdlib.h>

#define COST_FIRST 1e5  // ns of a flow's first job
#define COST_PART 0.25  // of the last job, in the average

enum { NONE = UINT32_MAX, KINDS = 2 };  // urgent jobs, and all others

// Jobs of a kind in the order they came, by their places.
typedef struct line {
  uint32_t first, last;  // NONE: empty
} line;

typedef struct flow {
  double end;   // of its last job that was taken, in virtual time: where the next one starts
  double cost;  // of its jobs, in ns; 0: it had none
  line lines[KINDS];
  uint32_t waiting, running;
  uint32_t place;  // among the active ones, while something waits
} flow;

typedef struct node {
  qkv_fair_job job;
  uint32_t next;
} node;

struct qkv_fair {
  size_t max, length;
  size_t threads, running;  // 0 threads: a flow may have all; running <= threads else
  node *nodes;              // [max + QKV_FAIR_AGAIN]
  uint32_t free;            // the first of those that hold no job
  double now;               // virtual time: ns of a flow of weight 1
  uint64_t number;          // of jobs that came
  unsigned urgent_run;      // urgent jobs that were taken while another one waited
  size_t waiting[KINDS];
  uint32_t active[QKV_FAIR_FLOWS];  // flows of which something waits
  uint32_t active_count;
  flow flows[QKV_FAIR_FLOWS];
};

qkv_fair *qkv_fair_create(size_t jobs_max, size_t threads) {
  qkv_fair *fair = calloc(1, sizeof *fair);
  const size_t places = jobs_max + QKV_FAIR_AGAIN;
  assert(fair != NULL && places < NONE);
  fair->max = jobs_max;
  fair->threads = threads;
  fair->nodes = calloc(places, sizeof *fair->nodes);
  assert(fair->nodes != NULL);
  for (uint32_t i = 0; i < places; i++) fair->nodes[i].next = i + 1 < places ? i + 1 : NONE;
  for (int i = 0; i < QKV_FAIR_FLOWS; i++) {
    for (int kind = 0; kind < KINDS; kind++) fair->flows[i].lines[kind] = (line){NONE, NONE};
  }
  return fair;
}

void qkv_fair_destroy(qkv_fair **fair) {
  qkv_fair *old = *fair;
  if (old == NULL) return;
  *fair = NULL;
  free(old->nodes);
  free(old);
}

size_t qkv_fair_length(const qkv_fair *fair) {
  return fair->length;
}

static flow *flow_of(qkv_fair *fair, const qkv_share *share) {
  return &fair->flows[share->flow % QKV_FAIR_FLOWS];
}

static double weight_of(const qkv_share *share) {
  return share->weight == 0 ? QKV_FAIR_WEIGHT : share->weight;
}

static void activate(qkv_fair *fair, flow *of) {
  of->place = fair->active_count;
  fair->active[fair->active_count++] = (uint32_t)(of - fair->flows);
  if (of->end < fair->now) of->end = fair->now;  // what it did not use is gone
}

static void deactivate(qkv_fair *fair, const flow *of) {
  const uint32_t last = fair->active[--fair->active_count];
  fair->active[of->place] = last;
  fair->flows[last].place = of->place;
}

// What waits of the flow may be this many times what is left to others. There is a place left.
static bool has_part(const qkv_fair *fair, const qkv_share *share, const flow *of) {
  return share->flow != 0 && !share->again && of->waiting >= QKV_FAIR_PART * (fair->max - fair->length);
}

qkv_status qkv_fair_push(qkv_fair *fair, const qkv_fair_job *job) {
  const int kind = job->share.urgent ? 0 : 1;
  flow *of = flow_of(fair, &job->share);
  if (fair->length >= fair->max + (job->share.again ? QKV_FAIR_AGAIN : 0)) return QKV_RESOURCE_EXHAUSTED;
  if (has_part(fair, &job->share, of)) return QKV_UNAVAILABLE;
  line *into = &of->lines[kind];
  const uint32_t at = fair->free;
  fair->free = fair->nodes[at].next;
  fair->nodes[at] = (node){.job = *job, .next = NONE};
  fair->nodes[at].job.number = fair->number++;
  if (into->first == NONE) into->first = at;
  if (into->last != NONE) fair->nodes[into->last].next = at;
  into->last = at;
  fair->length++;
  fair->waiting[kind]++;
  if (of->waiting++ == 0) activate(fair, of);
  return QKV_OK;
}

static bool may_start(const qkv_fair *fair, const flow *of) {
  return fair->threads == 0 || of->running < fair->threads - fair->running;
}

bool qkv_fair_ready(const qkv_fair *fair) {
  if (fair->threads == 0) return fair->length > 0;
  for (uint32_t i = 0; i < fair->active_count; i++) {
    if (may_start(fair, &fair->flows[fair->active[i]])) return true;
  }
  return false;
}

// Of those that may start a job of the kind, the one that starts first; of several the one whose job came first.
// NULL: there is none.
static flow *find_first(qkv_fair *fair, int kind) {
  flow *first = NULL;
  for (uint32_t i = 0; i < fair->active_count; i++) {
    flow *of = &fair->flows[fair->active[i]];
    if (of->lines[kind].first == NONE || !may_start(fair, of) || (first != NULL && of->end > first->end)) continue;
    if (first != NULL && of->end == first->end &&
        fair->nodes[of->lines[kind].first].job.number > fair->nodes[first->lines[kind].first].job.number)
      continue;
    first = of;
  }
  return first;
}

// The flow whose job is next, and that job's kind.
static flow *choose(qkv_fair *fair, int *kind) {
  const bool other_turn = fair->waiting[1] > 0 && fair->urgent_run >= QKV_FAIR_URGENT;
  *kind = fair->waiting[0] == 0 || other_turn ? 1 : 0;
  flow *of = find_first(fair, *kind);
  if (of == NULL) {
    *kind = 1 - *kind;
    of = find_first(fair, *kind);
  }
  fair->urgent_run = *kind == 1 || fair->waiting[1] == 0 ? 0 : fair->urgent_run + 1;
  return of;
}

qkv_fair_job qkv_fair_pop(qkv_fair *fair) {
  int kind;
  flow *of = choose(fair, &kind);
  assert(of != NULL && (fair->threads == 0 || fair->running < fair->threads));
  line *from = &of->lines[kind];
  const uint32_t at = from->first;
  from->first = fair->nodes[at].next;
  if (from->first == NONE) from->last = NONE;
  qkv_fair_job job = fair->nodes[at].job;
  fair->nodes[at].next = fair->free;
  fair->free = at;
  fair->length--;
  fair->waiting[kind]--;
  fair->running++;
  of->running++;
  if (--of->waiting == 0) deactivate(fair, of);
  if (of->end > fair->now) fair->now = of->end;
  job.cost = of->cost > 0 ? of->cost : COST_FIRST;
  of->end += job.cost / weight_of(&job.share);
  return job;
}

void qkv_fair_done(qkv_fair *fair, const qkv_fair_job *job, uint64_t ns) {
  flow *of = flow_of(fair, &job->share);
  assert(of->running > 0);
  of->running--;
  fair->running--;
  of->end += ((double)ns - job->cost) / weight_of(&job->share);
  of->cost = of->cost == 0 ? (double)ns + 1 : of->cost + COST_PART * ((double)ns - of->cost);
}
