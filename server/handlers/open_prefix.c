#include "server/handlers/open_prefix.h"

#include <stdio.h>
#include <stdlib.h>

#include "server/handlers/forks.h"
#include "server/handlers/prefixes.h"

enum { PAGE = QKV_PREFIX_PAGE, TRIES = 3 };

// What is wanted of a holder of a prefix.
typedef struct wanted_holder {
  const qkv_session_config *config;  // of the new session, resolved
  qkv_policy before;                 // its policy, if no calibration were in force
} wanted_holder;

// Whether the holder codes its pages as the new session would, or would have before a calibration was in force.
static bool suits(const void *context, qkv_session *holder) {
  const wanted_holder *all = context;
  const qkv_session_config *wanted = all->config, *held = qkv_session_config_of(holder);
  return held->purpose == wanted->purpose &&
         (qkv_policy_equal(&held->policy, &wanted->policy) || qkv_policy_equal(&held->policy, &all->before)) &&
         held->durability == wanted->durability && held->keep_full == wanted->keep_full &&
         held->max_attention_error == wanted->max_attention_error && held->first_position == 0;
}

// The holder's config except the new session's own fields.
static qkv_session_config config_of_fork(qkv_session *holder, const qkv_session_config *wanted) {
  qkv_session_config config = *qkv_session_config_of(holder);
  config.name = wanted->name;
  config.ttl_ms = wanted->ttl_ms;
  config.tier_bits = wanted->tier_bits;
  config.pinned = false;
  config.evictable = wanted->evictable;
  config.whole = 0;
  config.backing = NULL;
  return config;
}

static qkv_prefix_hash hash_of(const qkv_prefix_hash *root, const uint32_t *ids, uint64_t tokens) {
  qkv_prefix_hash hash = *root;
  for (uint64_t i = 0; i < tokens; i += PAGE) hash = qkv_prefix_next(&hash, ids + i);
  return hash;
}

// Whether the session has exactly these tokens in all layers. It may not: the holder may have been truncated, and
// appended to with other tokens, before it was forked.
static bool has_tokens(qkv_session *session, const qkv_prefix_hash *root, const uint32_t *ids, uint64_t tokens) {
  const uint32_t layers = qkv_session_model(session)->layers;
  const qkv_prefix_hash expected = hash_of(root, ids, tokens);
  uint64_t *lengths = calloc(layers, sizeof *lengths);
  qkv_prefix_hash hash;
  qkv_session_info info;
  if (lengths == NULL) abort();
  qkv_session_read_info(session, &info, lengths);
  bool has = qkv_session_tokens_hash(qkv_session_tokens_of(session), tokens / PAGE - 1, &hash) &&
             qkv_prefix_hash_equal(&hash, &expected);
  for (uint32_t i = 0; i < layers; i++) has &= lengths[i] == tokens;
  free(lengths);
  return has;
}

static bool fork_holder(const qkv_rpc_call *call, const qkvi_held_prefix *held, const qkv_session_config *wanted,
                        const uint32_t *ids, qkv_session **session) {
  const uint32_t layers = qkv_session_model(held->session)->layers;
  qkv_session_config config = config_of_fork(held->session, wanted);
  qkv_error ignored = {0};
  uint64_t *positions = calloc(layers, sizeof *positions);
  if (positions == NULL) abort();
  for (uint32_t i = 0; i < layers; i++) positions[i] = held->tokens;
  const qkv_status status = qkvi_fork(call, held->session, &config, positions, session, &ignored);
  free(positions);
  if (status != QKV_OK) {
    *session = NULL;
    return false;
  }
  if (has_tokens(*session, &wanted->root, ids, held->tokens)) return true;
  qkvi_fork_undo(qkv_rpc_context(call), session);
  return false;
}

uint64_t qkvi_open_prefix(const qkv_rpc_call *call, const qkv_session_config *config, const char *model_name,
                          const uint32_t *ids, size_t count, qkv_session **session) {
  const qkv_daemon *daemon = qkv_rpc_context(call);
  const qkv_model *model;
  qkv_session_config wanted = *config;
  qkv_error ignored = {0};
  *session = NULL;
  if (qkv_store_model(daemon->store, config->tenant, model_name, &model, &ignored) != QKV_OK) return 0;
  wanted_holder of = {.config = &wanted, .before = config->policy};
  qkv_model_merge_policy(model, config->tenant, &of.before);
  qkv_store_resolve(model, config, &wanted.policy);
  for (int i = 0; i < TRIES; i++) {
    qkvi_held_prefix held = qkvi_prefix_find(daemon, &wanted.root, ids, count, suits, &of);
    if (held.session == NULL) return 0;
    const bool forked = fork_holder(call, &held, &wanted, ids, session);
    qkv_session_unref(&held.session);
    if (forked) return held.tokens;
  }
  return 0;
}
