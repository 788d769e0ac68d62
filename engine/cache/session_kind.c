#include "engine/cache/session_kind.h"

#include <assert.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

#include "engine/cache/coding.h"

// What the coders of kinds take that are coded alike.
typedef struct coders {
  const qkv_model *model;
  qkv_arena *arena;
  qkv_policy policy;
  qkv_purpose purpose;
  uint64_t references, bytes;  // reserved in the arena
  struct coders *next;
} coders;

typedef struct entry {
  qkvi_session_kind kind;  // first, so that a kind is its entry
  uint64_t references;
  coders *coders;
  struct entry *next;
  char tenant[];
} entry;

enum { CHAINS = 1024 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static entry *chains[CHAINS];
static coders *coder_chains[CHAINS];
static size_t count;

static const char *text_of(const char *text) {
  return text == NULL ? "" : text;
}

// What kinds mostly differ by.
static entry **chain_of(const qkv_session_config *config, const qkv_model *model, const qkv_arena *arena) {
  const struct {
    const void *model, *arena;
    uint64_t policy, first_position;
    double tier_bits, max_attention_error;
  } key = {.model = model,
           .arena = arena,
           .policy = qkv_policy_hash(&config->policy),
           .first_position = config->first_position,
           .tier_bits = config->tier_bits + 0,
           .max_attention_error = config->max_attention_error + 0};
  return &chains[XXH3_64bits(&key, sizeof key) % CHAINS];
}

static bool config_equal(const qkv_session_config *a, const qkv_session_config *b) {
  return strcmp(text_of(a->tenant), text_of(b->tenant)) == 0 && a->purpose == b->purpose &&
         qkv_policy_equal(&a->policy, &b->policy) && a->first_position == b->first_position &&
         a->ema.alpha == b->ema.alpha && a->ema.sample_every == b->ema.sample_every && a->keep_full == b->keep_full &&
         a->max_attention_error == b->max_attention_error && a->tier_bits == b->tier_bits &&
         a->durability == b->durability && a->backing == b->backing && a->evictable == b->evictable &&
         a->retier_all == b->retier_all && a->pool == b->pool && a->device == b->device &&
         a->prefixes == b->prefixes && a->recency == b->recency;
}

static size_t entry_bytes(const qkv_session_config *config) {
  return sizeof(entry) + strlen(text_of(config->tenant)) + 1;
}

uint64_t qkvi_session_kind_cost(const qkv_session_config *config) {
  return qkv_arena_cost(entry_bytes(config));
}

// Of reserved memory of the arena.
static entry *create(const qkv_session_config *config, const qkv_model *model, qkv_arena *arena) {
  entry *made = qkv_arena_alloc(arena, entry_bytes(config));
  *made = (entry){.kind = {.config = *config, .model = model, .arena = arena}};
  qkv_session_config *own = &made->kind.config;
  own->tenant = memcpy(made->tenant, text_of(config->tenant), strlen(text_of(config->tenant)) + 1);
  own->name = NULL;
  made->kind.root = qkv_prefix_root(own->tenant, model->name, NULL, 0);
  own->id = own->ttl_ms = own->whole = own->parent_truncations = 0;
  own->pinned = own->staged = own->archived = own->found = false;
  own->root = (qkv_prefix_hash){0};
  own->headroom = NULL;
  return made;
}

// ---- Coders ----

static coders **coder_chain_of(const qkv_session_config *config, const qkv_model *model, const qkv_arena *arena) {
  const struct {
    const void *model, *arena;
    uint64_t coding;
  } key = {model, arena, qkv_coding_hash(&config->policy)};
  return &coder_chains[XXH3_64bits(&key, sizeof key) % CHAINS];
}

uint64_t qkvi_session_coders_cost(const qkv_session_config *config, const qkv_model *model) {
  const qkv_calibration *calibration =
      model->calibration != NULL ? qkv_calibration_slot_get(model->calibration) : NULL;
  const uint64_t plain = qkv_coding_cost(model, &config->policy, config->purpose, NULL);
  const uint64_t calibrated =
      calibration == NULL ? 0 : qkv_coding_cost(model, &config->policy, config->purpose, calibration);
  const uint64_t most = plain > calibrated ? plain : calibrated;
  qkv_calibration_unref(&calibration);
  return most > QKVI_CODERS_FREE ? most - QKVI_CODERS_FREE : 0;
}

static bool has_room(qkv_arena *arena, uint64_t bytes) {
  const qkv_arena_stats memory = qkv_arena_read(qkv_arena_whole(arena));
  const uint64_t taken = memory.bytes_used + memory.bytes_reserved;
  return taken <= memory.bytes_limit && bytes <= memory.bytes_limit - taken;
}

// A session that was found at a start comes back in any case: where little is left, its coders are not counted.
static qkv_status reserve_coders(const qkv_session_config *config, qkv_arena *arena, uint64_t *bytes,
                                 qkv_error *error) {
  if (config->found && !has_room(arena, 2 * *bytes)) *bytes = 0;
  QKV_TRY(qkv_arena_reserve_in(arena, config->headroom, *bytes, error));
  qkv_arena_move_elsewhere(arena, *bytes);
  return QKV_OK;
}

// With the lock. NULL: there are none.
static coders *find_coders(const qkv_session_config *config, const qkv_model *model, const qkv_arena *arena) {
  coders *found = *coder_chain_of(config, model, arena);
  while (found != NULL && (found->model != model || found->arena != arena || found->purpose != config->purpose ||
                           !qkv_coding_alike(&found->policy, &config->policy)))
    found = found->next;
  return found;
}

uint64_t qkvi_session_coders_missing(const qkv_session_config *config, const qkv_model *model,
                                     const qkv_arena *arena) {
  (void)pthread_mutex_lock(&lock);
  const bool there = find_coders(config, model, arena) != NULL;
  (void)pthread_mutex_unlock(&lock);
  return there ? 0 : qkvi_session_coders_cost(config, model);
}

// With the lock, and a reference. NULL: no memory for them.
static coders *join_coders(const qkv_session_config *config, const qkv_model *model, qkv_arena *arena,
                           qkv_error *error) {
  coders **chain = coder_chain_of(config, model, arena), *found = find_coders(config, model, arena);
  if (found == NULL) {
    uint64_t bytes = qkvi_session_coders_cost(config, model);
    if (reserve_coders(config, arena, &bytes, error) != QKV_OK) return NULL;
    found = malloc(sizeof *found);
    if (found == NULL) abort();
    *found = (coders){.model = model,
                      .arena = arena,
                      .policy = config->policy,
                      .purpose = config->purpose,
                      .bytes = bytes,
                      .next = *chain};
    *chain = found;
  }
  found->references++;
  return found;
}

static void leave_coders(const qkv_session_config *config, coders *left) {
  if (--left->references > 0) return;
  coders **link = coder_chain_of(config, left->model, left->arena);
  while (*link != left) link = &(*link)->next;
  *link = left->next;
  qkv_arena_unreserve_elsewhere(left->arena, left->bytes);
  free(left);
}

// ---- Kinds ----

// With the lock. NULL: there is none, and no memory for one.
static entry *find_or_create(const qkv_session_config *config, const qkv_model *model, qkv_arena *arena,
                             qkv_error *error) {
  entry **chain = chain_of(config, model, arena), *found = *chain;
  while (found != NULL &&
         (found->kind.model != model || found->kind.arena != arena || !config_equal(&found->kind.config, config)))
    found = found->next;
  if (found != NULL) return found;
  if (qkv_arena_reserve_in(arena, config->headroom, qkvi_session_kind_cost(config), error) != QKV_OK) return NULL;
  coders *joined = join_coders(config, model, arena, error);
  if (joined == NULL) {
    qkv_arena_unreserve(arena, qkvi_session_kind_cost(config));
    return NULL;
  }
  found = create(config, model, arena);
  found->coders = joined;
  found->next = *chain;
  *chain = found;
  count++;
  return found;
}

qkv_status qkvi_session_kind_get(const qkv_session_config *config, const qkv_model *model, qkv_arena *arena,
                                 const qkvi_session_kind **out, qkv_error *error) {
  (void)pthread_mutex_lock(&lock);
  entry *found = find_or_create(config, model, arena, error);
  if (found != NULL) {
    found->references++;
    *out = &found->kind;
  }
  (void)pthread_mutex_unlock(&lock);
  return found != NULL ? QKV_OK : QKV_RESOURCE_EXHAUSTED;
}

void qkvi_session_kind_unref(const qkvi_session_kind **kind) {
  entry *left = (entry *)*kind;
  *kind = NULL;
  (void)pthread_mutex_lock(&lock);
  assert(left->references > 0);
  if (--left->references == 0) {
    entry **link = chain_of(&left->kind.config, left->kind.model, left->kind.arena);
    while (*link != left) link = &(*link)->next;
    *link = left->next;
    leave_coders(&left->kind.config, left->coders);
    qkv_arena_free(left->kind.arena, left, entry_bytes(&left->kind.config));
    count--;
  }
  (void)pthread_mutex_unlock(&lock);
}

size_t qkvi_session_kinds(void) {
  (void)pthread_mutex_lock(&lock);
  const size_t kinds = count;
  (void)pthread_mutex_unlock(&lock);
  return kinds;
}
