// client/worker/lm_directory.c: a model's config.json; a geometry that is taken is one that the worker can run.
//
// The parser is the file's own, so the file is part of this target.
#include "client/worker/lm_directory.c"
#include "tests/fuzz/fuzz.h"

static void check_lm(const qkvi_lm *lm) {
  if (lm->layers < 1 || lm->hidden < 1 || lm->ffn < 1 || lm->context < 1) __builtin_trap();
  if (lm->kv_heads < 1 || lm->q_heads < lm->kv_heads || lm->q_heads % lm->kv_heads != 0) __builtin_trap();
  if (lm->head_dim < 2 || lm->head_dim % 2 != 0) __builtin_trap();
  if (!(lm->rope_theta > 0 && lm->norm_epsilon > 0)) __builtin_trap();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  json_t *config = json_loadb((const char *)data, size, 0, NULL);
  if (config == NULL) return 0;
  qkvi_lm lm = {0};
  qkv_error error = {0};
  if (read_config(config, &lm, &error) == QKV_OK) {
    check_lm(&lm);
  } else if (error.text[0] == '\0') {
    __builtin_trap();
  }
  json_decref(config);
  return 0;
}
