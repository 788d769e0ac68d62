// A session's codings: how its pages are coded, and those to come.
#include <stdlib.h>
#include <string.h>

#define uthash_fatal(message) abort()
#include <uthash.h>

#include "engine/cache/session_internal.h"
#include "engine/cache/session_spill.h"
#include "engine/cache/session_state.h"
#include "engine/cache/trunk.h"

// The reference is the list's.
static void add(session_working *working, qkv_coding *coding) {
  working->codings = realloc((void *)working->codings, (working->coding_count + 1) * sizeof *working->codings);
  if (working->codings == NULL) abort();
  working->codings[working->coding_count++] = coding;
}

const qkv_coding *qkvi_working_coding(const qkvi_session_kind *kind, session_working *working,
                                      const qkv_calibration *calibration) {
  qkv_coding *coding = qkv_coding_get(kind->model, &kind->config.policy, kind->config.purpose, calibration);
  (void)pthread_mutex_lock(&working->codings_lock);
  size_t i = 0;
  while (i < working->coding_count && working->codings[i] != coding) i++;
  if (i < working->coding_count) {
    (void)pthread_mutex_unlock(&working->codings_lock);
    qkv_coding *extra = coding;  // the list holds one reference already
    qkv_coding_unref(&extra);
    return coding;
  }
  add(working, coding);
  (void)pthread_mutex_unlock(&working->codings_lock);
  return coding;
}

const qkv_coding *qkvi_session_coding(qkv_session *session, const qkv_calibration *calibration) {
  return qkvi_working_coding(session->kind, qkvi_working(session), calibration);
}

size_t qkv_session_calibrations(qkv_session *session, size_t first, const qkv_calibration **out, size_t max) {
  size_t count = 0, passed = 0;
  session_working *working = qkvi_working(session);
  if (working == NULL) return 0;  // it is durable, and so are the calibrations of its pages
  (void)pthread_mutex_lock(&working->codings_lock);
  for (size_t i = 0; i < working->coding_count && count < max; i++) {
    const qkv_calibration *calibration = qkv_coding_calibration(working->codings[i]);
    if (calibration != NULL && passed++ >= first) out[count++] = qkv_calibration_ref(calibration);
  }
  (void)pthread_mutex_unlock(&working->codings_lock);
  return count;
}

// The coding for pages to come: another one where the model's calibration has changed.
const qkv_coding *qkvi_working_current_coding(const qkvi_session_kind *kind, session_working *working) {
  const qkv_model *model = kind->model;
  const qkv_calibration *calibration =
      model->calibration != NULL ? qkv_calibration_slot_get(model->calibration) : NULL;
  const qkv_coding *coding = qkvi_working_coding(kind, working, calibration);
  qkv_calibration_unref(&calibration);
  return coding;
}

bool qkvi_session_coder_is_old(const qkv_session *session, uint32_t layer) {
  const qkv_calibration_slot *slot = session->kind->model->calibration;
  const qkv_coder *coder = layer_at(session, layer)->layer.coder;
  return slot != NULL && coder->codec->calibrated && qkv_calibration_slot_version(slot) != coder->calibration;
}

void qkvi_session_renew_coder(qkv_session *session, uint32_t layer) {
  qkvi_session_use_codings(session);
  layer_at(session, layer)->layer.coder =
      qkv_coding_layer(qkvi_working_current_coding(session->kind, qkvi_working(session)), layer);
  qkvi_session_codings_used(session);
}

void qkvi_session_use_codings(qkv_session *session) {
  int failed = pthread_rwlock_rdlock(&qkvi_working(session)->codings_use);
  assert(failed == 0);
}

void qkvi_session_codings_used(qkv_session *session) {
  int failed = pthread_rwlock_unlock(&qkvi_working(session)->codings_use);
  assert(failed == 0);
}

static void mark_coder(const session_working *working, const qkv_coder *coder, bool *used) {
  for (size_t i = 0; i < working->coding_count; i++) used[i] |= qkv_coding_has(working->codings[i], coder);
}

static void mark_ranges(const session_working *working, const qkv_layer *layer, bool *used) {
  const qkv_coder *last = NULL;
  for (size_t r = 0; r < layer->range_count; r++) {
    const qkv_coder *coder = layer->ranges[r].range->coder;
    if (coder != last) mark_coder(working, coder, used);
    last = coder;
  }
}

// False where a layer is in use.
static bool mark_used(qkv_session *session, bool *used) {
  for (uint32_t i = 0; i < session->kind->model->layers; i++) {
    locked_layer *locked = layer_at(session, i);
    if (pthread_rwlock_tryrdlock(&locked->lock) != 0) return false;
    mark_coder(qkvi_working(session), locked->layer.coder, used);
    mark_ranges(qkvi_working(session), &locked->layer, used);
    (void)pthread_rwlock_unlock(&locked->lock);
  }
  return true;
}

// Drops codings that no page is coded by any more; a calibration that has been replaced goes with the last session
// that has one of its codings. Now or at a later call: it never waits.
void qkvi_session_drop_unused(qkv_session *session) {
  session_working *working = qkvi_working(session);
  if (pthread_rwlock_trywrlock(&working->codings_use) != 0) return;
  (void)pthread_mutex_lock(&working->codings_lock);
  bool *used = calloc(working->coding_count + 1, sizeof *used);
  if (used == NULL) abort();
  if (working->coding_count > 1 && qkvi_session_has_layers(session) && mark_used(session, used)) {
    size_t kept = 0;
    for (size_t i = 0; i < working->coding_count; i++) {
      if (used[i]) {
        working->codings[kept++] = working->codings[i];
      } else {
        qkv_coding_unref(&working->codings[i]);
      }
    }
    working->coding_count = kept;
  }
  free(used);
  (void)pthread_mutex_unlock(&working->codings_lock);
  qkvi_session_codings_used(session);
}

void qkvi_working_drop_codings(session_working *working) {
  for (size_t i = 0; i < working->coding_count; i++) qkv_coding_unref(&working->codings[i]);
  free((void *)working->codings);
  (void)pthread_mutex_destroy(&working->codings_lock);
  (void)pthread_rwlock_destroy(&working->codings_use);
}

// ---- Of a folded session ----

// What folded sessions keep where that is more than one coding: one for all that keep the same, as forks of one
// parent mostly do. It has a reference to the trunk and to each coding.
typedef struct session_kept {
  UT_hash_handle hh;
  size_t references;  // of sessions, under the lock
  size_t count;       // of codings that their pages are coded by
  // The key.
  qkvi_trunk *trunk;  // what they share with others; NULL: nothing
  qkv_coding *codings[];
} session_kept;

static pthread_mutex_t kept_lock = PTHREAD_MUTEX_INITIALIZER;
static session_kept *all_kept;

static session_kept *kept_of(uintptr_t state) {
  return (session_kept *)(state & ~(uintptr_t)(QKVI_FOLDED | QKVI_FOLD_KEPT));
}

static void let_go(session_kept *kept) {
  qkvi_trunk_unref(&kept->trunk);  // its ranges are coded by the codings, so it goes first
  for (size_t i = 0; i < kept->count; i++) qkv_coding_unref(&kept->codings[i]);
  free(kept);
}

// With the references of `made`, which is freed where there is an equal one.
static session_kept *share_kept(session_kept *made) {
  const unsigned bytes = (unsigned)(sizeof made->trunk + made->count * sizeof *made->codings);
  session_kept *found;
  (void)pthread_mutex_lock(&kept_lock);
  HASH_FIND(hh, all_kept, &made->trunk, bytes, found);
  if (found == NULL) HASH_ADD_KEYPTR(hh, all_kept, &made->trunk, bytes, made);
  session_kept *kept = found == NULL ? made : found;
  kept->references++;
  (void)pthread_mutex_unlock(&kept_lock);
  if (found != NULL) let_go(made);
  return kept;
}

static void leave_kept(session_kept *kept) {
  (void)pthread_mutex_lock(&kept_lock);
  const bool last = --kept->references == 0;
  if (last) HASH_DEL(all_kept, kept);
  (void)pthread_mutex_unlock(&kept_lock);
  if (last) let_go(kept);
}

// `*one` gets the coding where there is one.
static qkv_coding *const *kept_in(uintptr_t state, qkv_coding **one, size_t *count) {
  session_kept *all = kept_of(state);
  *one = (qkv_coding *)all;
  *count = all != NULL;
  if (all == NULL || (state & QKVI_FOLD_KEPT) == 0) return one;
  *count = all->count;
  return all->codings;
}

static uintptr_t keep(const session_working *working, const bool *used, size_t count, qkvi_trunk *trunk) {
  session_kept *all = malloc(sizeof *all + count * sizeof *all->codings);
  if (all == NULL) abort();
  *all = (session_kept){.trunk = trunk};
  for (size_t i = 0; i < working->coding_count; i++) {
    if (used[i]) all->codings[all->count++] = qkv_coding_ref(working->codings[i]);
  }
  if (all->count > 1 || trunk != NULL) return (uintptr_t)share_kept(all) | QKVI_FOLD_KEPT | QKVI_FOLDED;
  const uintptr_t one = all->count == 1 ? (uintptr_t)all->codings[0] : 0;
  free(all);
  return one | QKVI_FOLDED;
}

static size_t count_used(const session_working *working, const bool *used) {
  size_t count = 0;
  for (size_t i = 0; i < working->coding_count; i++) count += used[i];
  return count;
}

uintptr_t qkvi_session_keep_folded(const qkv_session *session, const session_working *working, qkvi_trunk *trunk) {
  bool *used = calloc(working->coding_count + 1, sizeof *used);
  if (used == NULL) abort();
  for (uint32_t i = 0; i < session->kind->model->layers; i++)
    mark_ranges(working, &atomic_load(&working->made)->at[i].layer, used);
  const uintptr_t state = keep(working, used, count_used(working, used), trunk);
  free(used);
  return state;
}

void qkvi_session_take_codings(uintptr_t state, session_working *working) {
  qkv_coding *one;
  size_t count;
  qkv_coding *const *kept = kept_in(state, &one, &count);
  for (size_t i = 0; i < count; i++) add(working, qkv_coding_ref(kept[i]));
}

qkvi_trunk *qkvi_session_trunk(uintptr_t state) {
  if ((state & QKVI_FOLDED) == 0 || (state & QKVI_FOLD_KEPT) == 0) return NULL;
  return kept_of(state)->trunk;
}

void qkvi_session_drop_kept(uintptr_t state) {
  if ((state & QKVI_FOLD_KEPT) != 0) {
    leave_kept(kept_of(state));
  } else {
    qkv_coding *one = (qkv_coding *)kept_of(state);
    qkv_coding_unref(&one);
  }
}
