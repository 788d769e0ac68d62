#include "client/worker/lm.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "client/format/safetensors.h"

static char directory[] = "/tmp/qkv-lm-XXXXXX";
static char config_path[64], weights_path[64];

static int make_directory(void **state) {
  (void)state;
  if (mkdtemp(directory) == NULL) return -1;
  snprintf(config_path, sizeof config_path, "%s/config.json", directory);
  snprintf(weights_path, sizeof weights_path, "%s/model.safetensors", directory);
  return 0;
}

static int remove_directory(void **state) {
  (void)state;
  unlink(config_path);
  unlink(weights_path);
  return rmdir(directory);
}

#define CONFIG(more)                                                                                     \
  "{\"model_type\":\"llama\",\"hidden_act\":\"silu\",\"vocab_size\":256,\"hidden_size\":8,"              \
  "\"intermediate_size\":4,\"num_hidden_layers\":1,\"num_attention_heads\":2,\"num_key_value_heads\":1," \
  "\"max_position_embeddings\":32,\"rope_theta\":10000.0,\"rms_norm_eps\":1e-5" more "}"

static void write_config(const char *text) {
  FILE *file = fopen(config_path, "wb");
  assert_non_null(file);
  fputs(text, file);
  fclose(file);
}

static const qkv_safetensors_tensor tensors[] = {
    {.name = "model.embed_tokens.weight", .rank = 2, .dims = {256, 8}},
    {.name = "model.layers.0.input_layernorm.weight", .rank = 1, .dims = {8}},
    {.name = "model.layers.0.self_attn.q_proj.weight", .rank = 2, .dims = {8, 8}},
    {.name = "model.layers.0.self_attn.k_proj.weight", .rank = 2, .dims = {4, 8}},
    {.name = "model.layers.0.self_attn.v_proj.weight", .rank = 2, .dims = {4, 8}},
    {.name = "model.layers.0.self_attn.o_proj.weight", .rank = 2, .dims = {8, 8}},
    {.name = "model.layers.0.post_attention_layernorm.weight", .rank = 1, .dims = {8}},
    {.name = "model.layers.0.mlp.gate_proj.weight", .rank = 2, .dims = {4, 8}},
    {.name = "model.layers.0.mlp.up_proj.weight", .rank = 2, .dims = {4, 8}},
    {.name = "model.layers.0.mlp.down_proj.weight", .rank = 2, .dims = {8, 4}},
    {.name = "model.norm.weight", .rank = 1, .dims = {8}},
    {.name = "lm_head.weight", .rank = 2, .dims = {256, 8}},
};
enum { TENSORS = sizeof tensors / sizeof *tensors };

// Every element of tensor i is i + 1; dtypes take turns. `left_out` is not written, `transposed` has its dims
// swapped.
static void write_weights(int left_out, int transposed) {
  static const qkv_dtype dtypes[] = {QKV_FP16, QKV_FP32, QKV_BF16};
  qkv_safetensors_tensor shapes[TENSORS];
  int count = 0;
  for (int i = 0; i < TENSORS; i++) {
    if (i == left_out) continue;
    shapes[count] = tensors[i];
    shapes[count].dtype = dtypes[i % 3];
    if (i == transposed) {
      shapes[count].dims[0] = tensors[i].dims[1];
      shapes[count].dims[1] = tensors[i].dims[0];
    }
    count++;
  }
  qkv_safetensors_writer *writer = NULL;
  qkv_error error = {0};
  assert_int_equal(qkv_safetensors_writer_create(weights_path, shapes, (size_t)count, NULL, 0, &writer, &error), 0);
  for (int i = 0, place = 0; i < TENSORS; i++) {
    if (i == left_out) continue;
    int64_t elements = tensors[i].dims[0] * (tensors[i].rank == 2 ? tensors[i].dims[1] : 1);
    for (int64_t j = 0; j < elements; j++) {
      float value = (float)(i + 1);
      uint8_t raw[4];
      qkv_from_float(dtypes[i % 3], &value, raw, 1);
      assert_int_equal(qkv_safetensors_write(writer, (size_t)place, raw, qkv_dtype_size(dtypes[i % 3]), &error), 0);
    }
    place++;
  }
  assert_int_equal(qkv_safetensors_writer_finish(&writer, &error), QKV_OK);
}

static void refuse(qkv_status status, const char *path, const char *text) {
  qkvi_lm *lm = NULL;
  qkv_error error = {0};
  assert_int_equal(qkvi_lm_load(directory, &lm, &error), status);
  assert_null(lm);
  if (strstr(error.text, path) != error.text) fail_msg("\"%s\" does not begin with %s", error.text, path);
  if (strstr(error.text, text) == NULL) fail_msg("\"%s\" has no \"%s\"", error.text, text);
}

static void test_loads_every_dtype(void **state) {
  (void)state;
  write_config(CONFIG(""));
  write_weights(-1, -1);
  char with_slashes[64];
  snprintf(with_slashes, sizeof with_slashes, "%s//", directory);
  qkvi_lm *lm = NULL;
  qkv_error error = {0};
  assert_int_equal(qkvi_lm_load(with_slashes, &lm, &error), QKV_OK);
  assert_string_equal(lm->name, directory + strlen("/tmp/"));
  assert_int_equal(lm->head_dim, 4);
  const float *loaded[TENSORS] = {
      lm->embedding,       lm->layer->attention_norm, lm->layer->wq, lm->layer->wk,   lm->layer->wv, lm->layer->wo,
      lm->layer->mlp_norm, lm->layer->gate,           lm->layer->up, lm->layer->down, lm->norm,      lm->head};
  for (int i = 0; i < TENSORS; i++) {
    int64_t elements = tensors[i].dims[0] * (tensors[i].rank == 2 ? tensors[i].dims[1] : 1);
    for (int64_t j = 0; j < elements; j++) assert_true(loaded[i][j] == (float)(i + 1));
  }
  qkvi_lm_free(&lm);
  assert_null(lm);
}

static void test_refuses_configs(void **state) {
  (void)state;
  static const struct {
    const char *config, *text;
  } cases[] = {
      {"{", "'}'"},
      {"{}", "model_type is \"\""},
      {"{\"model_type\":\"gpt2\"}", "model_type is \"gpt2\", this program runs \"llama\""},
      {CONFIG(",\"hidden_act\":\"gelu\""), "hidden_act is \"gelu\""},
      {CONFIG(",\"attention_bias\":true"), "attention_bias is set"},
      {CONFIG(",\"rope_scaling\":{\"type\":\"linear\"}"), "rope_scaling is set"},
      {CONFIG(",\"tie_word_embeddings\":true"), "tie_word_embeddings is set"},
      {CONFIG(",\"vocab_size\":32000"), "vocab_size is 32000"},
      {CONFIG(",\"num_hidden_layers\":0"), "num_hidden_layers is 0, allowed are 1 to 1024"},
      {CONFIG(",\"num_hidden_layers\":\"6\""), "num_hidden_layers is missing or no integer"},
      {CONFIG(",\"num_key_value_heads\":3"), "3 KV heads"},
      {CONFIG(",\"head_dim\":7"), "head_dim 7 do not go together"},
      {CONFIG(",\"rms_norm_eps\":0"), "rms_norm_eps"},
  };
  for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
    write_config(cases[i].config);
    refuse(QKV_INVALID_ARGUMENT, config_path, cases[i].text);
  }
  unlink(config_path);
  refuse(QKV_NOT_FOUND, config_path, "No such file");
}

static void test_refuses_weights(void **state) {
  (void)state;
  write_config(CONFIG(""));
  for (int i = 0; i < TENSORS; i++) {
    write_weights(i, -1);
    refuse(QKV_INVALID_ARGUMENT, weights_path, "there is no tensor");
    refuse(QKV_INVALID_ARGUMENT, weights_path, tensors[i].name);
  }
  write_weights(-1, 3);
  refuse(QKV_INVALID_ARGUMENT, weights_path,
         "tensor model.layers.0.self_attn.k_proj.weight has not the shape that config.json gives, [4, 8]");
  unlink(weights_path);
  refuse(QKV_NOT_FOUND, weights_path, "No such file");
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_loads_every_dtype), cmocka_unit_test(test_refuses_configs),
                                     cmocka_unit_test(test_refuses_weights)};
  return cmocka_run_group_tests(tests, make_directory, remove_directory);
}
