// Sessions in tests that count what they take.
#ifndef QKV_TESTS_ENGINE_CACHE_USED_SESSION_H
#define QKV_TESTS_ENGINE_CACHE_USED_SESSION_H

#include "engine/cache/session.h"
#include "engine/cache/session_kind.h"
#include "tests/engine/cache/fixture.h"

// Gives the session its layers, which it gets with its first use.
static inline void use_session(qkv_session *session) {
  const qkv_layer *layer;
  qkv_error error = {0};
  if (qkv_session_read(session, 0, &layer, &error) != QKV_OK) fail_msg("%s", error.text);
  qkv_session_read_done(session, 0);
}

// What sessions of the tenant that have equal configs take together.
static inline uint64_t kind_cost(void) {
  return qkvi_session_kind_cost(&(qkv_session_config){.tenant = "default"});
}

#endif
