#include "server/retier.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { AIM_MS = 25, PRESS_MS = 50, NOTES = 4096 };

// What sessions are brought to under pressure, one after the other.
static const double pressed_bits[] = {3, 2.5, 2};
enum { PRESSED_STEPS = sizeof pressed_bits / sizeof *pressed_bits };

// What is known of a session as it was last used. Sessions share notes by their serial: one that finds another's note
// is looked at once more than it need be.
typedef struct note {
  uint64_t serial;
  int64_t last_used_ms;
  uint32_t clean;    // layers in a row that needed nothing
  uint32_t pressed;  // steps of pressed_bits that are done
  uint32_t clean_pressed;
} note;

struct qkvi_retierer {
  qkv_store *store;
  qkvi_residency *residency;  // NULL: memory is all there is
  qkv_retier_policy policy;   // tier-bits, or the thresholds
  bool thresholds;
  double high, low;  // parts of what memory-budget has for pages; 1: there is no such mark
  bool pressed;
  int64_t millibits;
  qkv_store_place after;  // the session that was looked at last; "" at the beginning
  note notes[NOTES];
};

typedef struct candidate {
  qkv_session *session;  // a reference
  qkv_session_info info;
} candidate;

typedef struct step {
  qkvi_retierer *retierer;
  qkv_retier_report *report;
  uint64_t pages_before;
  int64_t until_ms;
  candidate *candidates;
  size_t count;
} step;

static int64_t now_ms(void) {
  struct timespec now;
  (void)clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

qkvi_retierer *qkvi_retierer_create(qkv_store *store, qkvi_residency *residency, const qkv_server_options *options) {
  qkvi_retierer *retierer = calloc(1, sizeof *retierer);
  if (retierer == NULL) abort();
  retierer->store = store;
  retierer->residency = residency;
  retierer->policy = qkv_server_options_retier(options);
  retierer->thresholds = options->tier_thresholds != NULL;
  retierer->high = options->memory_high;
  retierer->low = options->memory_low;
  for (size_t i = 0; i < NOTES; i++) retierer->notes[i].serial = UINT64_MAX;
  return retierer;
}

void qkvi_retierer_destroy(qkvi_retierer **retierer) {
  free(*retierer);
  *retierer = NULL;
}

int64_t qkvi_retierer_millibits(const qkvi_retierer *retierer) {
  return retierer->millibits;
}

// ---- Sessions ----

static note *note_of(qkvi_retierer *retierer, const candidate *of) {
  const uint64_t serial = qkv_session_serial(of->session);
  note *found = &retierer->notes[serial % NOTES];
  if (found->serial != serial || found->last_used_ms != of->info.last_used_ms)
    *found = (note){.serial = serial, .last_used_ms = of->info.last_used_ms};
  return found;
}

static void list_candidates(step *on) {
  const size_t room = qkv_store_read_stats(on->retierer->store).sessions + 1;
  qkv_session **listed = calloc(room, sizeof *listed);
  if (listed == NULL) abort();
  on->count = qkv_store_list(on->retierer->store, &(qkv_store_filter){0}, listed, room);
  on->candidates = calloc(on->count + 1, sizeof *on->candidates);
  if (on->candidates == NULL) abort();
  for (size_t i = 0; i < on->count; i++) {
    on->candidates[i].session = listed[i];
    qkv_session_read_info(listed[i], &on->candidates[i].info, NULL);
  }
  free((void *)listed);
}

static void drop_candidates(step *on) {
  for (size_t i = 0; i < on->count; i++) qkv_session_unref(&on->candidates[i].session);
  free(on->candidates);
}

static void measure(step *on) {
  double sum = 0;
  size_t coded = 0;
  for (size_t i = 0; i < on->count; i++) {
    const qkv_session_info *info = &on->candidates[i].info;
    const double coordinates =
        (double)info->usage.tokens_coded * info->model->kv_heads * (info->model->key_dim + info->model->value_dim);
    if (coordinates == 0) continue;
    sum += 8000 * (double)info->usage.bytes_coded / coordinates;
    coded++;
  }
  on->retierer->millibits = coded == 0 ? 0 : (int64_t)(sum / (double)coded);
}

static bool spent(const step *on) {
  return on->report->pages - on->pages_before >= on->retierer->policy.pages_max || now_ms() >= on->until_ms;
}

// The session's next layer; counts those in a row that needed nothing.
static void retier_layer(step *on, qkv_session *session, const qkv_retier_policy *policy, uint32_t *clean) {
  qkv_retier_report report = {0};
  qkv_error error = {0};
  const qkv_status status = qkv_session_retier(session, policy, NULL, &report, &error);
  // A page that cannot grow, as the budget is full, does so later.
  *clean = status == QKV_OK && report.pages == 0 && report.pages_left == 0 ? *clean + 1 : 0;
  on->report->pages += report.pages;
  on->report->bytes_freed += report.bytes_freed;
  on->report->bytes_taken += report.bytes_taken;
}

// ---- Towards what they were opened with ----

static bool has_aim(const qkvi_retierer *retierer, const candidate *at) {
  if (at->info.config.max_attention_error > 0 || at->info.usage.tokens_coded == 0) return false;
  return at->info.config.tier_bits > 0 || retierer->thresholds;
}

// Each of its layers once, or as many as there is time for.
static void aim_session(step *on, const candidate *at) {
  const uint32_t layers = at->info.model->layers;
  qkv_retier_policy policy = on->retierer->policy;
  note *known = note_of(on->retierer, at);
  policy.bits = at->info.config.tier_bits;
  for (uint32_t i = 0; i < layers && known->clean < layers && !spent(on); i++)
    retier_layer(on, at->session, &policy, &known->clean);
}

static void begin_work(step *on, int64_t ms) {
  on->pages_before = on->report->pages;
  on->until_ms = now_ms() + ms;
}

// Goes on behind the session that was last looked at.
static void aim_sessions(step *on) {
  qkvi_retierer *retierer = on->retierer;
  size_t first = 0;
  begin_work(on, AIM_MS);
  while (first < on->count && !qkv_store_is_behind(on->candidates[first].session, &retierer->after)) first++;
  for (size_t done = 0; done < on->count && !spent(on); done++) {
    const candidate *at = &on->candidates[(first + done) % on->count];
    if (!has_aim(retierer, at)) continue;
    aim_session(on, at);
    retierer->after = qkv_store_place_of(at->session);
  }
}

// ---- Under pressure ----

static int by_last_use(const void *a, const void *b) {
  const int64_t first = ((const candidate *)a)->info.last_used_ms;
  const int64_t second = ((const candidate *)b)->info.last_used_ms;
  return (first > second) - (first < second);
}

static uint64_t used(const qkvi_retierer *retierer) {
  return qkv_arena_read(qkv_store_arena(retierer->store)).bytes_used;
}

static uint64_t mark(const qkvi_retierer *retierer, double part) {
  return (uint64_t)(part * (double)qkv_arena_read(qkv_store_arena(retierer->store)).bytes_limit);
}

static bool is_high(const qkvi_retierer *retierer) {
  return retierer->high < 1 && used(retierer) > mark(retierer, retierer->high);
}

static bool is_low(const qkvi_retierer *retierer) {
  return used(retierer) <= mark(retierer, retierer->low);
}

static void press_session(step *on, const candidate *at) {
  qkvi_retierer *retierer = on->retierer;
  note *known = note_of(retierer, at);
  qkv_retier_policy policy = retierer->policy;
  const uint32_t layers = at->info.model->layers;
  uint32_t still = 0;  // layers in a row that did not change, those whose pages wait for the disk among them
  while (known->pressed < PRESSED_STEPS && still < layers && !spent(on) && !is_low(retierer)) {
    const uint64_t before = on->report->pages;
    policy.bits = pressed_bits[known->pressed];
    retier_layer(on, at->session, &policy, &known->clean_pressed);
    still = on->report->pages == before ? still + 1 : 0;
    if (known->clean_pressed < layers) continue;
    known->pressed++;
    known->clean_pressed = still = 0;
  }
}

static void log_pressure(const qkvi_retierer *retierer, const char *text) {
  qkv_log(QKV_LOG_INFO, text, "{s:I}", "bytes", (json_int_t)used(retierer));
}

// True where there is more to demote.
static bool press_sessions(step *on) {
  qkvi_retierer *retierer = on->retierer;
  if (!retierer->pressed && !is_high(retierer)) return false;
  begin_work(on, PRESS_MS);
  if (!retierer->pressed) log_pressure(retierer, "memory-high is reached, sessions are demoted");
  retierer->pressed = true;
  qsort(on->candidates, on->count, sizeof *on->candidates, by_last_use);
  bool alone = false;  // in memory: nothing but demotion makes room of it
  for (size_t i = 0; i < on->count && !spent(on) && !is_low(retierer); i++) {
    const candidate *at = &on->candidates[i];
    if (at->info.config.max_attention_error > 0 || at->info.config.keep_full) continue;
    alone |= at->info.config.backing == NULL;
    if (at->info.usage.tokens_coded > 0) press_session(on, at);
  }
  // What cannot be demoted any further leaves memory, where it is on the SSD.
  if (retierer->residency != NULL && !spent(on) && !is_low(retierer))
    (void)qkvi_budget_evict(retierer->residency, mark(retierer, retierer->low));
  if (is_low(retierer)) {
    log_pressure(retierer, "memory-low is reached");
    retierer->pressed = false;
  }
  // Of what is on the SSD, too, whoever needs room makes it: that is not urgent.
  return retierer->pressed && spent(on) && alone;
}

bool qkvi_retierer_step(qkvi_retierer *retierer, qkv_retier_report *report) {
  step on = {.retierer = retierer, .report = report};
  list_candidates(&on);
  measure(&on);
  aim_sessions(&on);
  const bool more = press_sessions(&on);
  drop_candidates(&on);
  return more;
}
