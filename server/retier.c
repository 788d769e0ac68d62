#include "server/retier.h"
#include "engine/base/clock.h"

#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cache/session_spill.h"

enum { AIM_MS = 25, PRESS_MS = 50, NOTES = 4096 };

// Average bits that sessions are brought to under pressure, one step after the other.
static const double pressed_bits[] = {3, 2.5, 2};
enum { PRESSED_STEPS = sizeof pressed_bits / sizeof *pressed_bits };

// What is known of a session as it was last used. Sessions share notes by their serial: one that finds another's note
// is visited once more than necessary.
typedef struct note {
  uint64_t serial;
  int64_t last_used_ms;
  uint32_t clean;    // layers in a row that needed nothing
  uint32_t pressed;  // steps of pressed_bits that are done
  uint32_t clean_pressed;
} note;

struct qkvi_retierer {
  qkv_store *store;
  qkvi_residency *residency;  // NULL: there is no SSD
  qkv_retier_policy policy;   // tier-bits, or the thresholds
  double high, low;           // watermarks, parts of what memory-budget has for pages; 1: none
  uint64_t evictable;         // bytes of sessions that may go, as the step begins
  bool pressed;
  note notes[NOTES];
};

typedef struct step {
  qkvi_retierer *retierer;
  qkv_retier_report *report;
  uint64_t pages_before;
  int64_t until_ms;
} step;

qkvi_retierer *qkvi_retierer_create(qkv_store *store, qkvi_residency *residency, const qkv_server_options *options) {
  qkvi_retierer *retierer = calloc(1, sizeof *retierer);
  if (retierer == NULL) abort();
  retierer->store = store;
  retierer->residency = residency;
  retierer->policy = qkv_server_options_retier(options);
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
  const qkv_recency_sums sums = qkv_recency_read_sums(qkv_store_recency(retierer->store));
  return sums.coordinates == 0 ? 0 : (int64_t)(8000 * (double)sums.bytes / (double)sums.coordinates);
}

// ---- Sessions ----

// `used_ms`: the session's last use.
static note *note_of(qkvi_retierer *retierer, const qkv_session *session, int64_t used_ms) {
  const uint64_t serial = qkv_session_serial(session);
  note *found = &retierer->notes[serial % NOTES];
  if (found->serial != serial || found->last_used_ms != used_ms)
    *found = (note){.serial = serial, .last_used_ms = used_ms};
  return found;
}

static bool spent(const step *on) {
  return on->report->pages - on->pages_before >= on->retierer->policy.pages_max || qkv_now_ms() >= on->until_ms;
}

// The session's next layer; counts those in a row that needed nothing.
static void retier_layer(step *on, qkv_session *session, const qkv_retier_policy *policy, uint32_t *clean) {
  qkv_retier_report report = {0};
  qkv_error error = {0};
  const qkv_status status = qkv_session_retier(session, policy, NULL, &report, &error);
  // A page that cannot grow, as the budget is full, is tried again later.
  *clean = status == QKV_OK && report.pages == 0 && report.pages_left == 0 ? *clean + 1 : 0;
  on->report->pages += report.pages;
  on->report->bytes_freed += report.bytes_freed;
  on->report->bytes_taken += report.bytes_taken;
}

// ---- Towards what they were opened with ----

// Each of its layers once, or as many as the time allows.
static void aim_session(step *on, qkv_session *session) {
  const uint32_t layers = qkv_session_model(session)->layers;
  const int64_t used_ms = qkv_session_last_used_ms(session);
  qkv_retier_policy policy = on->retierer->policy;
  note *known = note_of(on->retierer, session, used_ms);
  policy.bits = qkv_session_config_of(session)->tier_bits;
  for (uint32_t i = 0; i < layers && known->clean < layers && !spent(on); i++)
    retier_layer(on, session, &policy, &known->clean);
  qkv_session_tiers_looked(session);
  if (known->clean >= layers) qkv_session_tiers_settled(session, used_ms);
}

static void begin_work(step *on, int64_t ms) {
  on->pages_before = on->report->pages;
  on->until_ms = qkv_now_ms() + ms;
}

// Round robin: a session that was visited is moved behind the others.
static void aim_sessions(step *on) {
  qkv_recency *recency = qkv_store_recency(on->retierer->store);
  qkv_session *session;
  begin_work(on, AIM_MS);
  qkv_recency_begin(recency, QKV_RECENCY_AIMED);
  while (!spent(on) && (session = qkv_recency_next(recency, QKV_RECENCY_AIMED)) != NULL) {
    aim_session(on, session);
    qkv_session_unref(&session);
  }
  qkv_recency_end(recency, QKV_RECENCY_AIMED);
}

// ---- Under pressure ----

// But for what is freed by closing a session as soon as it is asked for.
static uint64_t used(const qkvi_retierer *retierer) {
  const uint64_t all = qkv_arena_read(qkv_store_arena(retierer->store)).bytes_used;
  return all > retierer->evictable ? all - retierer->evictable : 0;
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

static void press_session(step *on, qkv_session *session) {
  qkvi_retierer *retierer = on->retierer;
  const int64_t used_ms = qkv_session_last_used_ms(session);
  note *known = note_of(retierer, session, used_ms);
  qkv_retier_policy policy = retierer->policy;
  const uint32_t layers = qkv_session_model(session)->layers;
  uint32_t still = 0;  // layers in a row that did not change, those whose pages wait for the disk among them
  while (known->pressed < PRESSED_STEPS && still < layers && !spent(on) && !is_low(retierer)) {
    const uint64_t before = on->report->pages;
    policy.bits = pressed_bits[known->pressed];
    retier_layer(on, session, &policy, &known->clean_pressed);
    still = on->report->pages == before ? still + 1 : 0;
    if (known->clean_pressed < layers) continue;
    known->pressed++;
    known->clean_pressed = still = 0;
  }
  if (known->pressed == PRESSED_STEPS) qkv_session_tiers_lowest(session, used_ms);
}

static void log_pressure(const qkvi_retierer *retierer, const char *text) {
  qkv_log(QKV_LOG_INFO, text, "{s:I}", "bytes", (json_int_t)used(retierer));
}

// Where no planes can be dropped a session goes to the SSD in its turn, not once others have lost bits in its place.
static void evict_whole(const qkvi_retierer *retierer, qkv_session *session) {
  if (qkv_session_config_of(session)->policy.codec->planes == NULL && retierer->residency != NULL)
    (void)qkvi_budget_evict_session(retierer->residency, session, mark(retierer, retierer->low));
}

// The least recently used first. True where one of them is in memory alone: only demotion frees memory of it.
static bool press_in_order(step *on) {
  qkv_recency *recency = qkv_store_recency(on->retierer->store);
  qkv_session *session;
  bool alone = false;
  qkv_recency_begin(recency, QKV_RECENCY_DEMOTABLE);
  while (!spent(on) && !is_low(on->retierer) &&
         (session = qkv_recency_next(recency, QKV_RECENCY_DEMOTABLE)) != NULL) {
    alone |= qkv_session_config_of(session)->backing == NULL;
    evict_whole(on->retierer, session);
    press_session(on, session);
    qkv_session_unref(&session);
  }
  qkv_recency_end(recency, QKV_RECENCY_DEMOTABLE);
  return alone;
}

// True where there is more to demote.
static bool press_sessions(step *on) {
  qkvi_retierer *retierer = on->retierer;
  retierer->evictable = 0;
  if (retierer->pressed || is_high(retierer)) retierer->evictable = qkv_store_evictable(retierer->store);
  if (!retierer->pressed && !is_high(retierer)) return false;
  begin_work(on, PRESS_MS);
  if (!retierer->pressed) log_pressure(retierer, "memory-high is reached, sessions are demoted");
  retierer->pressed = true;
  const bool alone = press_in_order(on);
  // A session that cannot be demoted any further is evicted, where it is on the SSD.
  if (retierer->residency != NULL && !spent(on) && !is_low(retierer))
    (void)qkvi_budget_evict(retierer->residency, mark(retierer, retierer->low));
  if (is_low(retierer)) {
    log_pressure(retierer, "memory-low is reached");
    retierer->pressed = false;
  }
  // Sessions on the SSD are evicted when memory is needed: that is not urgent.
  return retierer->pressed && spent(on) && alone;
}

bool qkvi_retierer_step(qkvi_retierer *retierer, qkv_retier_report *report) {
  step on = {.retierer = retierer, .report = report};
  aim_sessions(&on);
  return press_sessions(&on);
}
