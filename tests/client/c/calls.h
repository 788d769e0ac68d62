// Calls of libqkv that must succeed, and the smallest model: what the tests of libqkv share.
#ifndef TESTS_CLIENT_C_CALLS_H
#define TESTS_CLIENT_C_CALLS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "client/c/qkv.h"

static inline void ok(qkv_code code, const qkv_call_error *error) {
  if (code != 0) fail_msg("status %d: %s", code, error->text);
}

// "m", with one layer, one head and rows of `width` fp32.
static inline qkv_client_model one_head_model(uint32_t width) {
  return (qkv_client_model){.name = "m",
                            .layers = 1,
                            .kv_heads = 1,
                            .q_heads = 1,
                            .key_dim = width,
                            .value_dim = width,
                            .dtype = QKV_CLIENT_FP32};
}

#endif
