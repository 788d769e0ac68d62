// Calibrations: made, brought, tried, put in force and taken out of it.
#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/cache/learner_internal.h"
#include "engine/codec/calibrate.h"
#include "engine/codec/rope_check.h"

enum {
  KINDS_MAX = QKV_LEARNER_KINDS + QKV_PROBATION_RUNGS + QKV_PROBATION_RUNGS / 2,
  ROPE_LAYERS = 8,
  ROPE_HEADS = 4,
  TRY_AFTER = 64,     // pages, counted over all layers, after a trial that failed,
  TRY_DOUBLINGS = 6,  // twice as many after each failure that follows, up to so often
};

static int64_t now_unix_ms(void) {
  struct timespec now;
  (void)clock_gettime(CLOCK_REALTIME, &now);
  return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void lock_state(qkv_learner *learner) {
  (void)pthread_mutex_lock(&learner->state_lock);
}

static void unlock_state(qkv_learner *learner) {
  (void)pthread_mutex_unlock(&learner->state_lock);
}

void qkvi_learner_settle(qkv_learner *learner) {
  (void)pthread_mutex_lock(&learner->error_lock);
  learner->settled = learner->attention_settled = 0;
  learner->measures = learner->attention_measures = 0;
  for (size_t i = 0; i < QKVI_PAGE_CLASSES; i++) atomic_store(&learner->alarms[i].left, 0);
  learner->watch = (qkv_page_watch){0};
  (void)pthread_mutex_unlock(&learner->error_lock);
}

void qkvi_learner_start_over(qkv_learner *learner) {
  if (learner->first == 0 || atomic_load(&learner->brought)) return;
  qkvi_learner_forget(learner);
  lock_state(learner);
  learner->starts++;
  atomic_store(&learner->renew, true);
  atomic_store(&learner->fresh, true);
  atomic_store(&learner->due_at, learner->first);
  unlock_state(learner);
}

// ---- What is in force; with the state's lock ----

static bool is_brought(qkv_calibration_source source) {
  return source != QKV_CALIBRATION_NONE && source != QKV_CALIBRATION_LEARNT;
}

static void publish(qkv_learner *learner) {
  const bool pending = learner->candidate != NULL;
  learner->state.on_trial = pending ? qkv_calibration_version(learner->candidate) : 0;
  atomic_store(&learner->pending, pending);
  atomic_store(&learner->brought, pending || is_brought(learner->state.source));
}

// NULL: data-free from now on.
static void put_in_force(qkv_learner *learner, const qkv_calibration *calibration, qkv_calibration_source source,
                         bool trusted) {
  qkv_calibration_state *state = &learner->state;
  qkv_calibration_slot_set(learner->slot, calibration);
  state->source = source;
  state->version = calibration != NULL ? qkv_calibration_version(calibration) : 0;
  state->tokens = calibration != NULL ? qkv_calibration_tokens(calibration) : 0;
  state->since_unix_ms = now_unix_ms();
  state->trusted = trusted;
  state->tried = false;
  state->parts = state->dropped = 0;
  state->error = state->data_free = 0;
  state->archive_refused = calibration != NULL && qkv_calibration_archive_refused(calibration);
  state->accepted += calibration != NULL;
}

static void note_verdict(qkv_learner *learner, const qkv_verdict *verdict) {
  qkv_calibration_state *state = &learner->state;
  state->tried = true;
  state->parts = verdict->parts;
  state->dropped = verdict->dropped;
  state->error = verdict->error;
  state->data_free = verdict->data_free;
}

static void note_refusal(qkv_learner *learner, uint32_t version, const char *what, const char *text) {
  learner->state.refused++;
  (void)snprintf(learner->state.refusal, sizeof learner->state.refusal, "%08" PRIx32 " %s: %s", version, what, text);
}

// ---- Brought ----

void qkv_learner_bring(qkv_learner *learner, const qkv_calibration *calibration, qkv_calibration_source source,
                       bool trusted) {
  const uint32_t version = qkv_calibration_version(calibration);
  const bool at_once = trusted || !learner->samples || source == QKV_CALIBRATION_STORED;
  lock_state(learner);
  const bool known = version == learner->offered && !(trusted && !learner->state.trusted);
  if (!known) {
    learner->offered = version;
    qkv_calibration_unref(&learner->candidate);
    if (at_once) {
      put_in_force(learner, calibration, source, trusted);
    } else {
      learner->candidate = qkv_calibration_ref(calibration);
      learner->offered_from = source;
    }
    atomic_store(&learner->retry, at_once && !trusted && learner->samples);
    atomic_store(&learner->renew, true);
    publish(learner);
  }
  unlock_state(learner);
  if (known) return;
  qkvi_learner_settle(learner);
  if (atomic_load(&learner->brought)) qkvi_learner_forget(learner);
  qkvi_learner_drop_sample(learner);
}

uint32_t qkv_learner_brought(qkv_learner *learner) {
  lock_state(learner);
  const uint32_t version = learner->offered;
  unlock_state(learner);
  return version;
}

const qkv_calibration *qkv_learner_on_trial(qkv_learner *learner) {
  lock_state(learner);
  const qkv_calibration *candidate = qkv_calibration_ref(learner->candidate);
  unlock_state(learner);
  return candidate;
}

// With the state's lock.
static void retry(qkv_learner *learner) {
  if (learner->state.version == 0 || learner->state.trusted || !learner->samples) return;
  atomic_store(&learner->retry, true);
}

void qkvi_learner_retry(qkv_learner *learner) {
  lock_state(learner);
  retry(learner);
  unlock_state(learner);
}

void qkvi_learner_withdraw(qkv_learner *learner, uint32_t version, const char *text) {
  lock_state(learner);
  const bool may = version == learner->state.version && !learner->state.trusted;
  if (may) {
    note_refusal(learner, version, "was withdrawn", text);
    learner->withdrawn = version;
    put_in_force(learner, NULL, QKV_CALIBRATION_NONE, false);
    atomic_store(&learner->retry, false);
    publish(learner);
    atomic_store(&learner->notice, true);
  }
  unlock_state(learner);
  if (!may) return;
  qkvi_learner_settle(learner);
  qkvi_learner_start_over(learner);
}

// ---- Kinds ----

static bool same_kind(const qkv_kind *a, const qkv_kind *b) {
  return a->purpose == b->purpose && qkv_policy_equal(&a->policy, &b->policy);
}

static bool has_kind(const qkv_kind *kinds, size_t count, const qkv_kind *kind) {
  for (size_t i = 0; i < count; i++) {
    if (same_kind(&kinds[i], kind)) return true;
  }
  return false;
}

// The rungs of the model's own policy, those to be fetched by the archive codec, too, and what was noted, each once;
// [KINDS_MAX]. With the state's lock.
static size_t list_kinds(const qkv_learner *learner, qkv_kind *kinds) {
  const size_t noted = learner->kinds_noted < QKV_LEARNER_KINDS ? learner->kinds_noted : QKV_LEARNER_KINDS;
  qkv_kind rungs[QKV_PROBATION_RUNGS];
  size_t count = 0;
  qkv_probation_rungs(&learner->model->policy, rungs);
  for (size_t i = 0; i < QKV_PROBATION_RUNGS; i++) {
    if (!has_kind(kinds, count, &rungs[i])) kinds[count++] = rungs[i];
    qkv_kind archived = rungs[i];
    archived.otherwise = rungs[i].policy.codec;
    if (archived.purpose == QKV_PURPOSE_FETCH && qkv_model_archive(learner->model, &archived.policy) &&
        !has_kind(kinds, count, &archived))
      kinds[count++] = archived;
  }
  for (size_t i = 0; i < noted; i++) kinds[count++] = learner->kinds[i];
  return count;
}

// Whether any layer's codes are made with a calibration.
static bool calibrates(const qkv_model *model, const qkv_policy *policy) {
  bool any = qkv_policy_calibrates(policy, QKV_K);
  for (uint32_t i = 0; i < model->override_count; i++) {
    const qkv_policy *own = &model->overrides[i].policy;
    any |= own->codec != NULL && qkv_policy_calibrates(own, QKV_K);
  }
  return any;
}

void qkv_learner_note_kind(qkv_learner *learner, const qkv_policy *policy, int purpose) {
  const qkv_kind kind = qkv_probation_kind(policy, (qkv_purpose)purpose);
  qkv_kind known[KINDS_MAX];
  if (!calibrates(learner->model, policy)) return;
  lock_state(learner);
  qkv_section_want(&learner->wants, policy);
  const size_t count = list_kinds(learner, known);
  if (!has_kind(known, count, &kind)) {
    learner->kinds[learner->kinds_noted++ % QKV_LEARNER_KINDS] = kind;
    retry(learner);
  }
  unlock_state(learner);
}

// ---- Trials ----

static void hold_layer(void *context, uint32_t layer, bool holds) {
  qkv_learner *learner = context;
  (void)(holds ? pthread_mutex_lock : pthread_mutex_unlock)(&learner->layers[layer].lock);
}

static bool is_ready(const qkv_learner *learner) {
  for (uint32_t i = 0; i < learner->shape.layers; i++) {
    if (learner->layers[i].teaches && !atomic_load_explicit(&learner->layers[i].ready, memory_order_relaxed))
      return false;
  }
  return true;
}

// ---- RoPE ----

// Of a layer's held-out keys, some heads.
static void check_layer(qkv_learner *learner, qkv_rope_check *check, uint32_t layer) {
  const qkv_model *model = learner->model;
  uint64_t positions[QKV_HOLDOUT_PAGES * QKV_PAGE_TOKENS];
  qkv_held held;
  hold_layer(learner, layer, true);
  qkv_holdout_copy(learner->holdout, layer, &held);
  hold_layer(learner, layer, false);
  const size_t rows = held.pages * QKV_PAGE_TOKENS;
  for (size_t i = 0; i < rows; i++) positions[i] = held.positions[i / QKV_PAGE_TOKENS] + i % QKV_PAGE_TOKENS;
  for (uint32_t head = 0; head < model->kv_heads && head < ROPE_HEADS && rows > 0; head++) {
    qkv_rope_check_add(check, held.k + (size_t)head * model->key_dim, (size_t)model->kv_heads * model->key_dim,
                       positions, rows);
  }
  qkv_held_clear(&held);
}

// Once, of up to ROPE_LAYERS layers.
static void look_at_rope(qkv_learner *learner, qkv_learner_outcome *outcome) {
  const uint32_t layers = learner->model->layers, step = (layers + ROPE_LAYERS - 1) / ROPE_LAYERS;
  qkv_rope_check check;
  if (learner->rope_looked || !is_ready(learner)) return;
  learner->rope_looked = true;
  qkv_rope_check_init(&check, &learner->model->rope, learner->model->key_dim);
  for (uint32_t layer = 0; layer < layers; layer += step) check_layer(learner, &check, layer);
  if (!qkv_rope_check_doubts(&check, outcome->rope, sizeof outcome->rope)) return;
  lock_state(learner);
  (void)snprintf(learner->state.rope, sizeof learner->state.rope, "%s", outcome->rope);
  unlock_state(learner);
}

// ---- On the sample ----

// Takes the candidate's reference.
static qkv_status try_on_sample(qkv_learner *learner, const qkv_calibration *candidate, bool in_force,
                                qkv_verdict *verdict, const qkv_calibration **accepted, qkv_error *error) {
  qkv_kind kinds[KINDS_MAX];
  lock_state(learner);
  const size_t count = list_kinds(learner, kinds);
  unlock_state(learner);
  const qkv_probation probation = {.model = learner->model,
                                   .holdout = learner->holdout,
                                   .candidate = candidate,
                                   .in_force = in_force,
                                   .kinds = kinds,
                                   .kind_count = count,
                                   .hold = hold_layer,
                                   .context = learner,
                                   .cancelled = &learner->stopped};
  return qkv_probation_try(&probation, verdict, accepted, error);
}

static void tell(qkv_learner_outcome *outcome, qkv_learner_end end, uint32_t version, uint64_t tokens,
                 const qkv_verdict *verdict) {
  outcome->end = end;
  outcome->version = version;
  outcome->tokens = tokens;
  outcome->parts = verdict->parts;
  outcome->dropped = verdict->dropped;
  outcome->error = verdict->error;
  outcome->data_free = verdict->data_free;
  outcome->archive_error = verdict->archive_error;
  outcome->archive_data_free = verdict->archive_data_free;
  outcome->archive_refused = verdict->archive_refused;
  (void)snprintf(outcome->text, sizeof outcome->text, "%s", verdict->worst);
}

// The calibration that was tried, which may have been freed.
typedef struct tried {
  uint32_t version;
  uint64_t tokens;
} tried;

static tried tried_of(const qkv_calibration *candidate) {
  return (tried){qkv_calibration_version(candidate), qkv_calibration_tokens(candidate)};
}

// Applies the trial's verdict. With the state's lock.
static void conclude(qkv_learner *learner, const tried *candidate, const qkv_calibration *accepted,
                     qkv_calibration_source source, const qkv_verdict *verdict, qkv_learner_outcome *outcome) {
  outcome->source = source;
  if (accepted != NULL) {
    put_in_force(learner, accepted, source, false);
    note_verdict(learner, verdict);
    tell(outcome, QKV_LEARNER_ACCEPTED, qkv_calibration_version(accepted), candidate->tokens, verdict);
  } else {
    note_refusal(learner, candidate->version, "was refused", verdict->worst);
    tell(outcome, QKV_LEARNER_REFUSED, candidate->version, candidate->tokens, verdict);
  }
}

// After a trial, with its status. One that failed is repeated, but not at once.
static void put_off(qkv_learner *learner, qkv_status status, qkv_learner_outcome *outcome) {
  if (status == QKV_OK) {
    learner->failures = 0;
    return;
  }
  outcome->end = QKV_LEARNER_FAILED;
  const uint32_t doublings = learner->failures < TRY_DOUBLINGS ? learner->failures++ : TRY_DOUBLINGS;
  atomic_store(&learner->try_at, atomic_load(&learner->pages) + ((uint64_t)TRY_AFTER << doublings));
}

static void try_brought(qkv_learner *learner, qkv_learner_outcome *outcome) {
  qkv_verdict verdict;
  const qkv_calibration *accepted = NULL, *candidate = qkv_learner_on_trial(learner);
  if (candidate == NULL) return;
  const tried one = tried_of(candidate);
  const qkv_status status =
      try_on_sample(learner, qkv_calibration_ref(candidate), false, &verdict, &accepted, &outcome->error_text);
  lock_state(learner);
  const bool same = learner->candidate == candidate;
  if (status == QKV_OK && same) {
    conclude(learner, &one, accepted, learner->offered_from, &verdict, outcome);
    qkv_calibration_unref(&learner->candidate);
    publish(learner);
  }
  unlock_state(learner);
  put_off(learner, status, outcome);
  qkv_calibration_unref(&accepted);
  qkv_calibration_unref(&candidate);
  qkvi_learner_settle(learner);
}

static void try_again(qkv_learner *learner, qkv_learner_outcome *outcome) {
  qkv_verdict verdict;
  const qkv_calibration *accepted = NULL, *candidate = qkv_calibration_slot_get(learner->slot);
  atomic_store(&learner->trying, true);
  atomic_store(&learner->retry, false);
  if (candidate == NULL) return;
  const tried one = tried_of(candidate);
  const uint32_t version = one.version;
  const qkv_status status =
      try_on_sample(learner, qkv_calibration_ref(candidate), true, &verdict, &accepted, &outcome->error_text);
  lock_state(learner);
  qkv_calibration_state *state = &learner->state;
  const bool same = state->version == version && !state->trusted, left = accepted != NULL;
  outcome->source = state->source;
  bool changed = false;
  if (status != QKV_OK && same) retry(learner);
  if (status == QKV_OK && same && left && qkv_calibration_version(accepted) != version) {
    conclude(learner, &one, accepted, state->source, &verdict, outcome);
    changed = true;
  } else if (status == QKV_OK && same && left) {
    note_verdict(learner, &verdict);
    tell(outcome, QKV_LEARNER_ACCEPTED, version, one.tokens, &verdict);
  } else if (status == QKV_OK && same) {
    note_refusal(learner, version, "was withdrawn", verdict.worst);
    tell(outcome, QKV_LEARNER_WITHDRAWN, version, one.tokens, &verdict);
    put_in_force(learner, NULL, QKV_CALIBRATION_NONE, false);
    publish(learner);
    changed = true;
  }
  unlock_state(learner);
  put_off(learner, status, outcome);
  qkv_calibration_unref(&accepted);
  qkv_calibration_unref(&candidate);
  if (changed) qkvi_learner_settle(learner);
  if (changed && !left) qkvi_learner_start_over(learner);
}

// ---- Learning ----

// Until `done` the moments stay, even if they are forgotten meanwhile; NULL: there are none.
static qkv_moments *study(qkv_learner *learner) {
  qkvi_learner_lock_layers(learner);
  qkv_moments *moments = learner->studied = atomic_load(&learner->moments);
  qkvi_learner_unlock_layers(learner);
  return moments;
}

static void done(qkv_learner *learner) {
  qkvi_learner_lock_layers(learner);
  qkv_moments *moments = learner->studied;
  learner->studied = NULL;
  if (moments == atomic_load(&learner->moments)) moments = NULL;
  qkvi_learner_unlock_layers(learner);
  if (moments == NULL) return;
  qkv_arena_unreserve_elsewhere(learner->arena, qkv_moments_bytes(&learner->shape));
  qkv_moments_destroy(&moments);
}

// After one that was made, or not, of so many tokens. Where learning has started over meanwhile, that stays.
static void plan_next(qkv_learner *learner, uint64_t tokens, uint32_t starts, bool made) {
  const uint32_t runs = made ? atomic_fetch_add(&learner->runs, 1) + 1 : atomic_load(&learner->runs);
  uint64_t next = tokens * QKV_LEARNER_GROWTH;
  if (!made) next = tokens + learner->first;
  if (made && runs >= QKV_LEARNER_RUNS) next = UINT64_MAX;  // until a drift
  lock_state(learner);
  const bool same = learner->starts == starts;
  if (same) atomic_store(&learner->due_at, next);
  if (same && made) atomic_store(&learner->fresh, false);
  unlock_state(learner);
  if (same && next == UINT64_MAX) qkvi_learner_forget(learner);
  qkvi_learner_settle(learner);
}

static uint32_t read_starts(qkv_learner *learner) {
  lock_state(learner);
  const uint32_t starts = learner->starts;
  unlock_state(learner);
  return starts;
}

// Sections for the model's own policies and those of its sessions.
static qkv_section_wants wanted(const qkv_learner *learner) {
  qkv_learner *of = (qkv_learner *)(uintptr_t)learner;  // for its lock
  lock_state(of);
  qkv_section_wants wants = of->wants;
  unlock_state(of);
  for (uint32_t layer = 0; layer < learner->model->layers; layer++) {
    const qkv_policy policy = qkv_model_policy(learner->model, layer, &learner->model->policy);
    qkv_section_want(&wants, &policy);
  }
  return wants;
}

// Takes the calibration's place.
static qkv_status add_sections(const qkv_learner *learner, qkv_calibration **calibration, qkv_error *error) {
  const qkv_section_wants wants = wanted(learner);
  const qkv_calibration *plain = *calibration;
  return qkv_calibration_add_sections(&plain, &wants, &learner->stopped, calibration, error);
}

static void learn(qkv_learner *learner, qkv_learner_outcome *outcome) {
  const uint32_t starts = read_starts(learner);
  const uint64_t tokens = qkv_learner_read(learner).tokens;
  qkv_calibrate_options options = QKV_CALIBRATE_DEFAULTS;
  options.cancelled = &learner->stopped;
  options.hold = hold_layer;
  options.context = learner;
  qkv_calibration *calibration = NULL;
  const qkv_moments *moments = qkvi_learner_wants(learner) ? study(learner) : NULL;
  if (moments == NULL) return;
  qkv_verdict verdict;
  const qkv_calibration *accepted = NULL;
  qkv_status status = qkv_calibrate(moments, &options, &calibration, &outcome->error_text);
  done(learner);
  tried made = {0};
  if (status == QKV_OK) status = add_sections(learner, &calibration, &outcome->error_text);
  if (status == QKV_OK) {
    made = tried_of(calibration);
    status = try_on_sample(learner, calibration, false, &verdict, &accepted, &outcome->error_text);
  }
  lock_state(learner);
  const bool brought = atomic_load(&learner->brought);  // meanwhile
  if (status == QKV_OK && !brought) {
    outcome->made = true;
    conclude(learner, &made, accepted, QKV_CALIBRATION_LEARNT, &verdict, outcome);
    // The one before may be out of date, too.
    if (accepted == NULL) retry(learner);
    publish(learner);
  }
  unlock_state(learner);
  if (status != QKV_OK && !brought) outcome->end = QKV_LEARNER_FAILED;
  qkv_calibration_unref(&accepted);
  plan_next(learner, tokens, starts, status == QKV_OK);
}

// ---- What is due ----

static bool learning_due(const qkv_learner *learner) {
  if (!qkvi_learner_wants(learner) || qkv_learner_read(learner).tokens < atomic_load(&learner->due_at)) return false;
  for (uint32_t i = 0; i < learner->shape.layers; i++) {
    if (learner->layers[i].teaches && atomic_load(&learner->layers[i].learnt) == 0) return false;
  }
  return is_ready(learner);
}

static bool trial_due(const qkv_learner *learner) {
  return (atomic_load(&learner->pending) || atomic_load(&learner->retry)) && !atomic_load(&learner->renew) &&
         atomic_load(&learner->pages) >= atomic_load(&learner->try_at) && is_ready(learner);
}

bool qkv_learner_due(const qkv_learner *learner) {
  if (atomic_load(&learner->stopped) || atomic_load(&learner->running)) return false;
  return atomic_load(&learner->notice) || trial_due(learner) || learning_due(learner);
}

// The accepted rest of a calibration takes its place, and codings of both frames come on top: matrices of the
// archive frame in whole numbers, a quarter of a calibration at most.
uint64_t qkv_learner_cost(const qkv_learner *learner) {
  const qkv_section_wants wants = wanted(learner);
  const uint64_t one = qkv_calibration_cost(&learner->shape) + qkv_calibration_sections_cost(&learner->shape, &wants);
  return one + one / 4;
}

static void tell_withdrawn(qkv_learner *learner, qkv_learner_outcome *outcome) {
  lock_state(learner);
  outcome->end = QKV_LEARNER_WITHDRAWN;
  outcome->version = learner->withdrawn;
  (void)snprintf(outcome->text, sizeof outcome->text, "%s", learner->state.refusal);
  unlock_state(learner);
}

void qkv_learner_run(qkv_learner *learner, qkv_learner_outcome *outcome) {
  bool running = false;
  *outcome = (qkv_learner_outcome){0};
  if (!atomic_compare_exchange_strong(&learner->running, &running, true)) return;
  look_at_rope(learner, outcome);
  if (atomic_exchange(&learner->notice, false)) {
    tell_withdrawn(learner, outcome);
  } else if (atomic_load(&learner->pending) && trial_due(learner)) {
    try_brought(learner, outcome);
  } else if (trial_due(learner)) {
    try_again(learner, outcome);
  } else {
    learn(learner, outcome);
  }
  atomic_store(&learner->trying, false);
  qkvi_learner_drop_sample(learner);
  atomic_store(&learner->running, false);
}

// ---- What is known ----

qkv_learner_stats qkv_learner_read(const qkv_learner *learner) {
  qkv_learner_stats stats = {.tokens = UINT64_MAX, .runs = atomic_load(&learner->runs)};
  for (uint32_t i = 0; i < learner->shape.layers; i++) {
    const uint64_t tokens = atomic_load_explicit(&learner->layers[i].tokens, memory_order_relaxed);
    if (learner->layers[i].teaches && tokens < stats.tokens) stats.tokens = tokens;
  }
  if (atomic_load_explicit(&learner->moments, memory_order_relaxed) != NULL) {
    stats.bytes = qkv_moments_bytes(&learner->shape);
  }
  if (atomic_load(&learner->has_pages)) stats.bytes += qkv_holdout_page_bytes(learner->holdout);
  if (atomic_load(&learner->has_queries)) stats.bytes += qkv_holdout_query_bytes(learner->holdout);
  pthread_mutex_t *lock = (pthread_mutex_t *)(uintptr_t)&learner->error_lock;
  (void)pthread_mutex_lock(lock);
  stats.error = learner->error;
  (void)pthread_mutex_unlock(lock);
  return stats;
}

void qkv_learner_read_state(const qkv_learner *learner, qkv_calibration_state *state) {
  qkv_learner *of = (qkv_learner *)(uintptr_t)learner;  // for its locks
  lock_state(of);
  *state = learner->state;
  unlock_state(of);
  (void)pthread_mutex_lock(&of->error_lock);
  state->watch = learner->watch;
  (void)pthread_mutex_unlock(&of->error_lock);
}
