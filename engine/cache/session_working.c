// The working state of a session: where it begins, and what is guarded whether there is one or not (session_fold.h).
#include <assert.h>
#include <pthread.h>

#include "engine/cache/session_fold.h"
#include "engine/cache/session_slots.h"
#include "engine/cache/session_state.h"

session_working *qkvi_session_new_working(qkv_session *session) {
  const qkvi_session_kind *kind = session->kind;
  session_working *working = qkv_arena_alloc(kind->arena, qkvi_working_bytes(kind->model));
  *working = (session_working){.codings = NULL};
  const int failed =
      pthread_mutex_init(&working->codings_lock, NULL) | pthread_rwlock_init(&working->codings_use, NULL);
  assert(failed == 0);
  (void)failed;
  atomic_init(&working->next_layer, 0);
  atomic_init(&working->last_layer, 0);
  atomic_init(&working->turns, 0);
  atomic_init(&working->tokens_cold, 0);
  atomic_init(&working->bytes_coded, 0);
  atomic_init(&working->bytes_shared, 0);
  atomic_init(&working->bytes_exact, 0);
  atomic_init(&working->bytes_kept, 0);
  atomic_init(&working->bytes_stored, 0);
  atomic_init(&working->unsettled, 0);
  atomic_init(&working->shares, false);
  atomic_init(&working->fold_tried_ms, 0);
  atomic_init(&working->truncations, 0);
  const qkv_session_config *config = &kind->config;
  working->tiers.aimed = config->max_attention_error == 0 && (config->tier_bits > 0 || config->retier_all);
  working->tiers.demotable = config->max_attention_error == 0 && !config->keep_full && !config->evictable;
  atomic_init(&working->tiers.looked_ms, 0);
  atomic_init(&working->tiers.settled, false);
  atomic_init(&working->tiers.lowest, false);
  qkv_session_tokens_init(&working->tokens, &(qkv_session_tokens_config){.arena = kind->arena,
                                                                         .index = config->prefixes,
                                                                         .root = qkv_session_root(session),
                                                                         .owner = qkv_session_number(session)});
  atomic_init(&working->made, NULL);
  for (uint32_t i = 0; i < kind->model->layers; i++) atomic_init(&working->pins[i], 0);
  return working;
}

uint64_t qkvi_session_working_cost(const qkvi_session_kind *kind) {
  return qkv_arena_cost(qkvi_working_bytes(kind->model));
}

// Locks that take no memory of a session: of many sessions each, and held for some instructions.
enum { STRIPES = 16 };

// Of whether it is being made (qkvi_session_lock_making). No other lock is taken under it.
typedef struct making_stripe {
  pthread_mutex_t lock;
  pthread_cond_t ended;
} making_stripe;

// clang-format off
#define FOUR(stripe) stripe, stripe, stripe, stripe
#define MAKING {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER}
static making_stripe making[STRIPES] = {FOUR(MAKING), FOUR(MAKING), FOUR(MAKING), FOUR(MAKING)};
// clang-format on

// Of its place in the index of prefixes, which is in the working state, or in the session where there is none. Taken
// before the lock of token ids.
static pthread_mutex_t states[STRIPES] = {FOUR(PTHREAD_MUTEX_INITIALIZER), FOUR(PTHREAD_MUTEX_INITIALIZER),
                                          FOUR(PTHREAD_MUTEX_INITIALIZER), FOUR(PTHREAD_MUTEX_INITIALIZER)};

void qkvi_session_lock_making(qkv_session *session) {
  making_stripe *stripe = &making[qkv_session_number(session) % STRIPES];
  (void)pthread_mutex_lock(&stripe->lock);
  while (session->making) (void)pthread_cond_wait(&stripe->ended, &stripe->lock);
  session->making = true;
  (void)pthread_mutex_unlock(&stripe->lock);
}

bool qkvi_session_try_making(qkv_session *session) {
  making_stripe *stripe = &making[qkv_session_number(session) % STRIPES];
  (void)pthread_mutex_lock(&stripe->lock);
  const bool taken = !session->making;
  session->making = true;
  (void)pthread_mutex_unlock(&stripe->lock);
  return taken;
}

void qkvi_session_unlock_making(qkv_session *session) {
  making_stripe *stripe = &making[qkv_session_number(session) % STRIPES];
  (void)pthread_mutex_lock(&stripe->lock);
  session->making = false;
  (void)pthread_cond_broadcast(&stripe->ended);
  (void)pthread_mutex_unlock(&stripe->lock);
}

void qkvi_session_set_working(qkv_session *session, session_working *working) {
  pthread_mutex_t *state = &states[qkv_session_number(session) % STRIPES];
  (void)pthread_mutex_lock(state);
  qkv_session_tokens_attach(&working->tokens, session->folded_holder, session->closed);
  session->folded_holder = 0;
  atomic_store_explicit(&session->state, (uintptr_t)working, memory_order_release);
  (void)pthread_mutex_unlock(state);
}

// While there is a trunk the session is folded: qkvi_session_set_working waits.
const qkvi_trunk *qkvi_session_hold_trunk(const qkv_session *session) {
  if ((atomic_load(&session->state) & (QKVI_FOLDED | QKVI_FOLD_KEPT)) != (QKVI_FOLDED | QKVI_FOLD_KEPT)) return NULL;
  pthread_mutex_t *state = &states[qkv_session_number(session) % STRIPES];
  (void)pthread_mutex_lock(state);
  const qkvi_trunk *trunk = qkvi_session_trunk(atomic_load(&session->state));
  if (trunk == NULL) (void)pthread_mutex_unlock(state);
  return trunk;
}

void qkvi_session_release_trunk(const qkv_session *session) {
  (void)pthread_mutex_unlock(&states[qkv_session_number(session) % STRIPES]);
}

// It gets no place in the index any more.
void qkv_session_close_tokens(qkv_session *session) {
  pthread_mutex_t *state = &states[qkv_session_number(session) % STRIPES];
  (void)pthread_mutex_lock(state);
  session_working *working = qkvi_working(session);
  session->closed = true;
  if (working != NULL) {
    qkv_session_tokens_close(&working->tokens);
  } else {
    qkv_prefix_index_drop(session->kind->config.prefixes, session->folded_holder);
    session->folded_holder = 0;
  }
  (void)pthread_mutex_unlock(state);
}

size_t qkv_session_indexed_hashes(qkv_session *session, qkv_prefix_hash *hashes, size_t max) {
  pthread_mutex_t *state = &states[qkv_session_number(session) % STRIPES];
  (void)pthread_mutex_lock(state);
  session_working *working = qkvi_working(session);
  const size_t count =
      working != NULL ? qkv_session_tokens_indexed(&working->tokens, hashes, max)
                      : qkv_prefix_index_hashes(session->kind->config.prefixes, session->folded_holder, hashes, max);
  (void)pthread_mutex_unlock(state);
  return count;
}
