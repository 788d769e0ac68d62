#include "client/bench/dump.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "client/bench/quality.h"
#include "client/format/safetensors.h"
#include "tests/server/fixture.h"

enum { TOKENS = 100, QUERIES = 40, KV_HEADS = 2, Q_HEADS = 4, KEY_DIM = 32, VALUE_DIM = 16, FIRST = 1000 };

static char directory[128], path[160];
// Of layers 1 and 3, as attended, tokens first.
static float k[2][TOKENS][KV_HEADS][KEY_DIM], v[2][TOKENS][KV_HEADS][VALUE_DIM], q[2][QUERIES][Q_HEADS][KEY_DIM];

static void fill(float *rows, size_t count, uint64_t seed) {
  for (size_t i = 0; i < count; i++) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    rows[i] = (float)(seed >> 40) * 0x1p-22f - 2;
  }
}

static int setup(void **state) {
  (void)state;
  fixture_make_directory(directory, sizeof directory);
  snprintf(path, sizeof path, "%s/dump.safetensors", directory);
  fill(&k[0][0][0][0], sizeof k / sizeof(float), 1);
  fill(&v[0][0][0][0], sizeof v / sizeof(float), 2);
  fill(&q[0][0][0][0], sizeof q / sizeof(float), 3);
  return 0;
}

static int teardown(void **state) {
  (void)state;
  fixture_remove_directory(directory);
  return 0;
}

static const qkv_rope rope = {.theta = 10000};

typedef struct dump_form {
  bool heads_first, before_rope, queries;
} dump_form;

// Rows of one tensor in the form of the file.
static void write_rows(qkv_safetensors_writer *writer, size_t index, const float *rows, int64_t tokens, int64_t heads,
                       int64_t dim, const dump_form *form, uint64_t position) {
  qkv_rope resolved = rope;
  assert_int_equal(qkv_rope_resolve(&resolved, KEY_DIM, NULL), QKV_OK);
  float *out = calloc((size_t)(tokens * heads), (size_t)dim * sizeof *out);
  assert_non_null(out);
  for (int64_t t = 0; t < tokens; t++) {
    for (int64_t head = 0; head < heads; head++) {
      float *row = out + (form->heads_first ? head * tokens + t : t * heads + head) * dim;
      memcpy(row, rows + (t * heads + head) * dim, (size_t)dim * sizeof *row);
      if (form->before_rope && dim == KEY_DIM) qkv_rope_inverse(&resolved, row, position + (uint64_t)t);
    }
  }
  assert_int_equal(qkv_safetensors_write(writer, index, out, (size_t)(tokens * heads * dim) * sizeof *out, NULL),
                   QKV_OK);
  free(out);
}

static qkv_safetensors_tensor describe(const char *name, int64_t tokens, int64_t heads, int64_t dim,
                                       const dump_form *form) {
  return (qkv_safetensors_tensor){
      .name = name,
      .dtype = QKV_FP32,
      .rank = 3,
      .dims = {form->heads_first ? heads : tokens, form->heads_first ? tokens : heads, dim}};
}

static void write_dump(const dump_form *form) {
  const qkv_safetensors_tensor tensors[] = {
      describe("layers.1.k", TOKENS, KV_HEADS, KEY_DIM, form),
      describe("layers.1.v", TOKENS, KV_HEADS, VALUE_DIM, form),
      describe("layers.3.k", TOKENS, KV_HEADS, KEY_DIM, form),
      describe("layers.3.v", TOKENS, KV_HEADS, VALUE_DIM, form),
      describe("layers.1.q", QUERIES, Q_HEADS, KEY_DIM, form),
      describe("layers.3.q", QUERIES, Q_HEADS, KEY_DIM, form),
  };
  const qkv_safetensors_entry metadata[] = {{"first_position", "1000"},
                                            {"layout", form->heads_first ? "heads_first" : "tokens_first"},
                                            {"rope", form->before_rope ? "before" : "after"}};
  qkv_safetensors_writer *writer = NULL;
  qkv_error error = {0};
  if (qkv_safetensors_writer_create(path, tensors, form->queries ? 6 : 4, metadata, 3, &writer, &error) != QKV_OK) {
    fail_msg("%s", error.text);
  }
  for (size_t i = 0; i < 2; i++) {
    write_rows(writer, 2 * i, &k[i][0][0][0], TOKENS, KV_HEADS, KEY_DIM, form, FIRST);
    write_rows(writer, 2 * i + 1, &v[i][0][0][0], TOKENS, KV_HEADS, VALUE_DIM, form, FIRST);
    if (!form->queries) continue;
    write_rows(writer, 4 + i, &q[i][0][0][0], QUERIES, Q_HEADS, KEY_DIM, form, FIRST + TOKENS - QUERIES);
  }
  assert_int_equal(qkv_safetensors_writer_finish(&writer, &error), QKV_OK);
}

// Writes and measures layer 3, which is the second one.
static qkvi_probe_layer measure(const dump_form *form, const char *setting_text) {
  write_dump(form);
  qkv_dump *dump = NULL;
  qkv_error error = {0};
  if (qkv_dump_open(path, &dump, &error) != QKV_OK) fail_msg("%s", error.text);
  assert_int_equal(qkv_dump_layers(dump), 2);
  assert_true(qkv_dump_has_queries(dump) == form->queries);
  qkv_model model = qkvi_dump_model(dump, NULL, 0);
  assert_int_equal(model.layers, 4);
  assert_int_equal(model.kv_heads, KV_HEADS);
  assert_int_equal(model.q_heads, form->queries ? Q_HEADS : KV_HEADS);
  model.rope = rope;
  assert_int_equal(qkv_model_resolve(&model, &error), QKV_OK);
  qkvi_setting setting;
  assert_int_equal(qkvi_setting_parse(setting_text, false, &setting, &error), QKV_OK);
  qkv_coding *coding = qkvi_setting_coding(&setting, &model, NULL);
  qkvi_probe_layer sums = {0};
  assert_int_equal(qkvi_dump_measure(dump, &model, 1, QKV_FP32, &coding, 1, &sums, &error), QKV_OK);
  qkv_coding_unref(&coding);
  qkv_dump_close(&dump);
  return sums;
}

// Attention of the queries over given rows in double: what sums must say.
static double attention_squares(void) {
  double squares = 0;
  for (size_t i = 0; i < QUERIES; i++) {
    for (size_t head = 0; head < Q_HEADS; head++) {
      const size_t kv_head = head / (Q_HEADS / KV_HEADS), visible = TOKENS - QUERIES + i + 1;
      double out[VALUE_DIM] = {0}, total = 0;
      for (size_t t = 0; t < visible; t++) {
        double score = 0;
        for (size_t c = 0; c < KEY_DIM; c++) score += (double)q[1][i][head][c] * (double)k[1][t][kv_head][c];
        const double weight = exp(score / sqrt(KEY_DIM));
        total += weight;
        for (size_t c = 0; c < VALUE_DIM; c++) out[c] += weight * (double)v[1][t][kv_head][c];
      }
      for (size_t c = 0; c < VALUE_DIM; c++) squares += out[c] / total * (out[c] / total);
    }
  }
  return squares;
}

static void test_attention(void **state) {
  (void)state;
  const qkvi_probe_layer fine = measure(&(dump_form){.queries = true}, "plain:8");
  const qkvi_probe_layer coarse = measure(&(dump_form){.queries = true}, "plain:2");
  const double squares = attention_squares();
  assert_true(fabs(fine.attention_square - squares) < 1e-5 * squares);
  assert_int_equal(fine.attention_rows, QUERIES * Q_HEADS);
  assert_true(fine.attention_error > 0 && fine.attention_error < 1e-3 * squares);
  assert_true(coarse.attention_error > 100 * fine.attention_error);
  assert_int_equal(fine.rows.rows[QKV_K], TOKENS * KV_HEADS);
  const qkvi_probe_layer rows_alone = measure(&(dump_form){0}, "plain:2");
  assert_int_equal(rows_alone.attention_rows, 0);
  assert_true(rows_alone.rows.error[QKV_K] == coarse.rows.error[QKV_K]);
}

static void test_forms(void **state) {
  (void)state;
  const qkvi_probe_layer plain = measure(&(dump_form){.queries = true}, "archive:3");
  const qkvi_probe_layer turned = measure(&(dump_form){.heads_first = true, .queries = true}, "archive:3");
  assert_memory_equal(&plain, &turned, sizeof plain);
  // Rotated back and forth in fp32: the same but for rounding, which moves some codes.
  const qkvi_probe_layer before = measure(&(dump_form){.before_rope = true, .queries = true}, "archive:3");
  assert_int_equal(before.rows.bytes, plain.rows.bytes);
  assert_true(fabs(before.rows.square[QKV_K] - plain.rows.square[QKV_K]) < 1e-5 * plain.rows.square[QKV_K]);
  assert_true(fabs(before.rows.error[QKV_K] - plain.rows.error[QKV_K]) < 1e-3 * plain.rows.error[QKV_K]);
  assert_true(before.rows.error[QKV_V] == plain.rows.error[QKV_V]);
  assert_true(fabs(before.attention_square - plain.attention_square) < 1e-4 * plain.attention_square);
}

static void test_before_rope_needs_a_rope(void **state) {
  (void)state;
  write_dump(&(dump_form){.before_rope = true});
  qkv_dump *dump = NULL;
  qkv_error error = {0};
  assert_int_equal(qkv_dump_open(path, &dump, &error), QKV_OK);
  qkv_model model = qkvi_dump_model(dump, NULL, 0);
  assert_int_equal(qkv_model_resolve(&model, &error), QKV_OK);
  assert_int_equal(qkvi_dump_measure(dump, &model, 0, QKV_FP32, NULL, 0, NULL, &error), QKV_FAILED_PRECONDITION);
  qkv_dump_close(&dump);
}

static void expect_refusal(const char *text) {
  qkv_dump *dump = NULL;
  qkv_error error = {0};
  assert_int_equal(qkv_dump_open(path, &dump, &error), QKV_INVALID_ARGUMENT);
  assert_null(dump);
  if (strstr(error.text, text) == NULL) fail_msg("%s, expected %s", error.text, text);
  assert_non_null(strstr(error.text, path));
}

// Opens a file of the tensors and expects that it is refused.
static void refused(const qkv_safetensors_tensor *tensors, size_t count, const char *key, const char *value,
                    const char *text) {
  const qkv_safetensors_entry metadata[] = {{key, value}};
  qkv_safetensors_writer *writer = NULL;
  assert_int_equal(qkv_safetensors_writer_create(path, tensors, count, metadata, 1, &writer, NULL), QKV_OK);
  static const uint8_t zeros[1 << 16];
  for (size_t i = 0; i < count; i++) {
    size_t bytes = 4;
    for (int d = 0; d < tensors[i].rank; d++) bytes *= (size_t)tensors[i].dims[d];
    assert_true(bytes <= sizeof zeros);
    assert_int_equal(qkv_safetensors_write(writer, i, zeros, bytes, NULL), QKV_OK);
  }
  assert_int_equal(qkv_safetensors_writer_finish(&writer, NULL), QKV_OK);
  expect_refusal(text);
}

static void test_refused(void **state) {
  (void)state;
  const dump_form form = {0};
  const qkv_safetensors_tensor key = describe("layers.0.k", 8, 2, 16, &form);
  const qkv_safetensors_tensor value = describe("layers.0.v", 8, 2, 16, &form);
  const qkv_safetensors_tensor good[] = {key, value};
#define REFUSED(text, ...)                               \
  refused((const qkv_safetensors_tensor[]){__VA_ARGS__}, \
          sizeof((const qkv_safetensors_tensor[]){__VA_ARGS__}) / sizeof(qkv_safetensors_tensor), "a", "b", text)
  REFUSED("layers.0.v is missing", key);
  REFUSED("it holds \"layers.0.x\"", key, describe("layers.0.x", 8, 2, 16, &form));
  REFUSED("it holds \"layers.0.\"", key, describe("layers.0.", 8, 2, 16, &form));
  REFUSED("it holds \"layers.1024.k\"", key, describe("layers.1024.k", 8, 2, 16, &form));
  REFUSED("it holds layers.0.k and layers.00.k", key, value, describe("layers.00.k", 8, 2, 16, &form));
  REFUSED("layers.0.k and layers.0.v have other tokens or heads", key, describe("layers.0.v", 9, 2, 16, &form));
  REFUSED("layers.1.k has other heads or another width", key, value, describe("layers.1.k", 8, 4, 16, &form),
          describe("layers.1.v", 8, 4, 16, &form));
  REFUSED("do not both have queries", key, value, describe("layers.1.k", 8, 2, 16, &form),
          describe("layers.1.v", 8, 2, 16, &form), describe("layers.1.q", 8, 2, 16, &form));
  REFUSED("layers.0.q does not go with layers.0.k", key, value, describe("layers.0.q", 9, 2, 16, &form));
  REFUSED("layers.0.q does not go with layers.0.k", key, value, describe("layers.0.q", 8, 3, 16, &form));
  REFUSED("layers.0.q does not go with layers.0.k", key, value, describe("layers.0.q", 8, 2, 8, &form));
#undef REFUSED
  refused(good, 2, "rope", "maybe", "its rope is \"maybe\"");
  refused(good, 2, "layout", "x", "its layout is \"x\"");
  refused(good, 2, "first_position", "-1", "its first_position is \"-1\"");
  refused(good, 2, "first_position", "99999999999999999999", "its first_position is");
}

// A file that is long and has almost nothing in it: 2 more heads than 32 bits can count.
static void test_refused_for_its_heads(void **state) {
  (void)state;
  static const char header[] =
      "{\"layers.0.k\":{\"dtype\":\"F16\",\"shape\":[1,4294967298,1],\"data_offsets\":[0,8589934596]},"
      "\"layers.0.v\":{\"dtype\":\"F16\",\"shape\":[1,4294967298,1],\"data_offsets\":[8589934596,17179869192]}}";
  const uint64_t length = sizeof header - 1;
  FILE *file = fopen(path, "wbe");
  assert_non_null(file);
  assert_int_equal(fwrite(&length, sizeof length, 1, file), 1);
  assert_int_equal(fwrite(header, 1, length, file), length);
  assert_int_equal(fflush(file), 0);
  assert_int_equal(ftruncate(fileno(file), (off_t)(sizeof length + length + 17179869192)), 0);
  assert_int_equal(fclose(file), 0);
  expect_refusal("layers.0.k has 4294967298 heads of 1");
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_attention), cmocka_unit_test(test_forms),
                                     cmocka_unit_test(test_before_rope_needs_a_rope), cmocka_unit_test(test_refused),
                                     cmocka_unit_test(test_refused_for_its_heads)};
  return cmocka_run_group_tests(tests, setup, teardown);
}
