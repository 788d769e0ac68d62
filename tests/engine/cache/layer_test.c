#include "tests/engine/cache/fixture.h"

#define BUDGET ((uint64_t)1 << 30)

static qkv_model small_model(void) {
  return test_model(2, 2, 16, 24, QKV_FP16);
}

// ---- Appending ----

static void test_rows_come_back(void **state) {
  (void)state;
  const qkv_dtype dtypes[] = {QKV_FP32, QKV_FP16, QKV_BF16};
  for (size_t d = 0; d < 3; d++) {
    qkv_model model = test_model(2, 2, 64, 32, dtypes[d]);
    qkv_arena *arena = qkv_arena_create("memory-budget", BUDGET);
    sequence rows = make_sequence(&model, 200, 1);
    qkv_layer layer;
    init_layer(&layer, &model, test_policy(4, 2, 10), 0, arena);
    must_append(&layer, &rows, 0, 200);
    assert_valid(&layer);
    assert_int_equal(layer.sealed, 128);

    float *k = decoded_rows(&layer, QKV_K), *v = decoded_rows(&layer, QKV_V);
    size_t k_row = 2 * 64, v_row = 2 * 32;
    assert_memory_equal(k + 128 * k_row, rows.k + 128 * k_row, 72 * k_row * sizeof *k);
    assert_memory_equal(v + 128 * v_row, rows.v + 128 * v_row, 72 * v_row * sizeof *v);
    double k_error = 0, k_norm = 0, v_error = 0, v_norm = 0;
    for (size_t i = 0; i < 128 * k_row; i++) {
      k_error += square((double)k[i] - (double)rows.k[i]);
      k_norm += square((double)rows.k[i]);
    }
    for (size_t i = 0; i < 128 * v_row; i++) {
      v_error += square((double)v[i] - (double)rows.v[i]);
      v_norm += square((double)rows.v[i]);
    }
    const qkv_codec *codec = layer.config.policy.codec;
    assert_true(k_error > 0 && k_error <= codec->error_bound(4) * k_norm);
    assert_true(v_error > 0 && v_error <= codec->error_bound(2) * v_norm);
    free(k);
    free(v);

    deinit_layer(&layer);
    qkv_arena_destroy(&arena);
    free_sequence(&rows);
  }
}

static void test_parts_of_rows(void **state) {
  (void)state;
  qkv_model model = small_model();
  qkv_arena *arena = qkv_arena_create("memory-budget", BUDGET);
  sequence rows = make_sequence(&model, 200, 2);
  qkv_layer layer;
  init_layer(&layer, &model, test_policy(4, 4, 0), 1000, arena);
  must_append(&layer, &rows, 0, 100);
  qkv_layer_truncate(&layer, 1050);
  must_append(&layer, &rows, 50, 200);
  float *all = decoded_rows(&layer, QKV_V), part[70 * 2 * 24];
  for (uint64_t begin = 0; begin <= 200; begin += 7) {
    uint64_t tokens = 200 - begin < 70 ? 200 - begin : 70;
    qkv_layer_rows(&layer, QKV_V, 1000 + begin, tokens, false, part);
    assert_memory_equal(part, all + begin * 2 * 24, tokens * 2 * 24 * sizeof *part);
  }
  free(all);
  deinit_layer(&layer);
  qkv_arena_destroy(&arena);
  free_sequence(&rows);
}

static void test_chunks_do_not_matter(void **state) {
  (void)state;
  const int64_t windows[] = {0, 1, 64, 100};
  qkv_model model = small_model();
  qkv_arena *arena = qkv_arena_create("memory-budget", BUDGET);
  sequence rows = make_sequence(&model, 500, 3);
  uint64_t seed = 7;
  for (int trial = 0; trial < 12; trial++) {
    qkv_layer whole, chunked;
    init_layer(&whole, &model, test_policy(2, 3, windows[trial % 4]), 5, arena);
    init_layer(&chunked, &model, test_policy(2, 3, windows[trial % 4]), 5, arena);
    must_append(&whole, &rows, 0, 500);
    for (uint64_t begin = 0; begin < 500;) {
      uint64_t end = begin + 1 + random_below(&seed, trial < 4 ? 8 : 150);
      if (end > 500) end = 500;
      must_append(&chunked, &rows, begin, end);
      assert_valid(&chunked);
      begin = end;
    }
    assert_valid(&whole);
    assert_same_state(&whole, &chunked);
    deinit_layer(&whole);
    deinit_layer(&chunked);
  }
  qkv_arena_destroy(&arena);
  free_sequence(&rows);
}

static void test_dtype_is_converted_once(void **state) {
  (void)state;
  qkv_model model = small_model();
  qkv_arena *arena = qkv_arena_create("memory-budget", BUDGET);
  sequence rows = make_sequence(&model, 100, 4);
  qkv_layer narrow, wide;
  init_layer(&narrow, &model, test_policy(4, 4, 0), 0, arena);
  init_layer(&wide, &model, test_policy(4, 4, 0), 0, arena);
  must_append(&narrow, &rows, 0, 100);
  // The same rows with something below fp16's precision added: fp16 rounds it away.
  for (size_t i = 0; i < (size_t)100 * 2 * 16; i++) rows.k[i] *= 1 + 0x1p-14f;
  row_pair pair;
  make_pair(&pair, &rows, 0, 100, QKV_FP32);
  uint64_t appended;
  assert_int_equal(qkv_layer_append(&wide, 0, &pair.k.tensor, &pair.v.tensor, false, &appended, NULL), QKV_OK);
  assert_same_state(&narrow, &wide);
  assert_int_equal(qkv_layer_append(&narrow, 0, &pair.k.tensor, &pair.v.tensor, false, &appended, NULL), QKV_OK);
  assert_int_equal(appended, 0);
  free_pair(&pair);
  deinit_layer(&narrow);
  deinit_layer(&wide);
  qkv_arena_destroy(&arena);
  free_sequence(&rows);
}

static void test_rows_before_rope(void **state) {
  (void)state;
  qkv_model model = {.name = "turning",
                     .layers = 4,
                     .kv_heads = 2,
                     .q_heads = 4,
                     .key_dim = 16,
                     .value_dim = 24,
                     .dtype = QKV_FP32,
                     .rope = {.theta = 10000},
                     .policy = QKV_POLICY_UNSET};
  assert_int_equal(qkv_model_resolve(&model, NULL), QKV_OK);
  qkv_arena *arena = qkv_arena_create("memory-budget", BUDGET);
  sequence rows = make_sequence(&model, 100, 5);
  row_pair before, after;
  make_pair(&before, &rows, 0, 100, QKV_FP32);
  sequence turned = make_sequence(&model, 100, 5);
  for (uint64_t t = 0; t < 100; t++) {
    for (size_t head = 0; head < 2; head++) qkv_rope_forward(&model.rope, turned.k + (t * 2 + head) * 16, 300 + t);
  }
  make_pair(&after, &turned, 0, 100, QKV_FP32);

  qkv_layer a, b;
  uint64_t appended;
  init_layer(&a, &model, test_policy(8, 8, 20), 300, arena);
  init_layer(&b, &model, test_policy(8, 8, 20), 300, arena);
  assert_int_equal(qkv_layer_append(&a, 300, &before.k.tensor, &before.v.tensor, true, &appended, NULL), QKV_OK);
  assert_int_equal(qkv_layer_append(&b, 300, &after.k.tensor, &after.v.tensor, false, &appended, NULL), QKV_OK);
  assert_same_state(&a, &b);
  assert_int_equal(qkv_layer_append(&b, 300, &before.k.tensor, &before.v.tensor, true, &appended, NULL), QKV_OK);

  float back[100 * 2 * 16];
  qkv_layer_rows(&a, QKV_K, 300, 100, true, back);
  for (size_t i = 0; i < 100 * 2 * 16; i++) {
    assert_true(fabsf(back[i] - rows.k[i]) < (i < 64 * 2 * 16 ? 0.2f : 1e-5f));
  }
  free_pair(&before);
  free_pair(&after);
  deinit_layer(&a);
  deinit_layer(&b);
  qkv_arena_destroy(&arena);
  free_sequence(&rows);
  free_sequence(&turned);
}

// ---- Refusals ----

// A layer with coded and exact rows, and `variant`, a second layer with the same rows: a refusal must change nothing.
typedef struct scene {
  qkv_model model;
  qkv_arena *arena;
  sequence rows;
  qkv_layer layer, variant;
} scene;

static void setup_scene(scene *s) {
  s->model = small_model();
  s->arena = qkv_arena_create("memory-budget", BUDGET);
  s->rows = make_sequence(&s->model, 300, 6);
  init_layer(&s->layer, &s->model, test_policy(4, 4, 8), 0, s->arena);
  init_layer(&s->variant, &s->model, test_policy(4, 4, 8), 0, s->arena);
  must_append(&s->layer, &s->rows, 0, 100);
  must_append(&s->variant, &s->rows, 0, 100);
}

static void teardown_scene(scene *s) {
  assert_valid(&s->layer);
  assert_same_state(&s->layer, &s->variant);
  deinit_layer(&s->layer);
  deinit_layer(&s->variant);
  qkv_arena_destroy(&s->arena);
  free_sequence(&s->rows);
}

static void refuse(scene *s, uint64_t position, const qkv_tensor *k, const qkv_tensor *v, qkv_status status,
                   const char *text) {
  qkv_error error = {0};
  uint64_t appended = 99, used = qkv_arena_read(s->arena).bytes_used;
  assert_int_equal(qkv_layer_append(&s->layer, position, k, v, false, &appended, &error), status);
  assert_string_equal(error.text, text);
  assert_int_equal(appended, 0);
  assert_int_equal(qkv_arena_read(s->arena).bytes_used, used);
  assert_int_equal(qkv_arena_read(s->arena).bytes_reserved, 0);
}

static void test_shapes_are_checked(void **state) {
  (void)state;
  scene s;
  setup_scene(&s);
  float *zeros = calloc(4096, sizeof *zeros);
  test_tensor k, v, k3, k8, v1, v8;
  make_tensor(&k, QKV_FP32, zeros, 2, 2, 16);
  make_tensor(&v, QKV_FP32, zeros, 2, 2, 24);
  make_tensor(&k3, QKV_FP32, zeros, 2, 3, 16);
  make_tensor(&k8, QKV_FP32, zeros, 2, 2, 8);
  make_tensor(&v1, QKV_FP32, zeros, 1, 2, 24);
  make_tensor(&v8, QKV_FP32, zeros, 2, 2, 8);
  refuse(&s, 100, &k3.tensor, &v.tensor, QKV_INVALID_ARGUMENT, "k.dims[1] is 3, the model tiny has 2 kv_heads");
  refuse(&s, 100, &k8.tensor, &v.tensor, QKV_INVALID_ARGUMENT, "k.dims[2] is 8, the model tiny has key_dim 16");
  refuse(&s, 100, &k.tensor, &v8.tensor, QKV_INVALID_ARGUMENT, "v.dims[2] is 8, the model tiny has value_dim 24");
  refuse(&s, 100, &k.tensor, &v1.tensor, QKV_INVALID_ARGUMENT, "v.dims[0] is 1, k.dims[0] is 2");
  refuse(&s, UINT64_MAX, &k.tensor, &v.tensor, QKV_INVALID_ARGUMENT,
         "position is 18446744073709551615 for 2 tokens, positions end at 9007199254740992");
  refuse(&s, 101, &k.tensor, &v.tensor, QKV_FAILED_PRECONDITION, "position is 101, the expected position is 100");
  free_tensor(&k);
  free_tensor(&v);
  free_tensor(&k3);
  free_tensor(&k8);
  free_tensor(&v1);
  free_tensor(&v8);
  free(zeros);
  teardown_scene(&s);
}

static void test_values_are_checked(void **state) {
  (void)state;
  static const struct {
    float value;
    const char *k_text, *v_text;
  } cases[] = {
      {NAN, "k[3, 0, 15] is nan", "v[199, 1, 23] is nan"},
      {INFINITY, "k[3, 0, 15] is inf", "v[199, 1, 23] is inf"},
      {-32800, "k[3, 0, 15] is -32800, allowed are -32768 to 32768",
       "v[199, 1, 23] is -32800, allowed are -32768 to 32768"},
  };
  scene s;
  setup_scene(&s);
  for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
    float *k_value = &s.rows.k[((100 + 3) * 2 + 0) * 16 + 15], *v_value = &s.rows.v[((100 + 199) * 2 + 1) * 24 + 23];
    float k_kept = *k_value, v_kept = *v_value;
    row_pair pair;
    *v_value = cases[i].value;
    make_pair(&pair, &s.rows, 100, 300, QKV_FP32);
    refuse(&s, 100, &pair.k.tensor, &pair.v.tensor, QKV_INVALID_ARGUMENT, cases[i].v_text);
    free_pair(&pair);
    *k_value = cases[i].value;
    make_pair(&pair, &s.rows, 100, 300, QKV_FP32);
    refuse(&s, 100, &pair.k.tensor, &pair.v.tensor, QKV_INVALID_ARGUMENT, cases[i].k_text);
    free_pair(&pair);
    *k_value = k_kept;
    *v_value = v_kept;
  }
  teardown_scene(&s);
}

static void test_the_largest_values_are_held(void **state) {
  (void)state;
  scene s;
  setup_scene(&s);
  for (size_t i = 100 * 2 * 16; i < (size_t)300 * 2 * 16; i++) s.rows.k[i] = i % 2 != 0 ? 32768 : -32768;
  must_append(&s.layer, &s.rows, 100, 300);
  must_append(&s.variant, &s.rows, 100, 300);
  teardown_scene(&s);
}

static void test_rotation_beyond_the_limit_is_refused(void **state) {
  (void)state;
  scene s;
  setup_scene(&s);
  s.model.rope = (qkv_rope){.theta = 10000, .width = 16};
  float k[32], v[48] = {0};
  for (size_t i = 0; i < 32; i++) k[i] = 30000;
  test_tensor k_tensor, v_tensor;
  make_tensor(&k_tensor, QKV_FP32, k, 1, 2, 16);
  make_tensor(&v_tensor, QKV_FP32, v, 1, 2, 24);
  qkv_error error = {0};
  uint64_t appended;
  assert_int_equal(qkv_layer_append(&s.layer, 100, &k_tensor.tensor, &v_tensor.tensor, true, &appended, &error),
                   QKV_INVALID_ARGUMENT);
  assert_non_null(strstr(error.text, " after RoPE, allowed are -32768 to 32768"));
  assert_memory_equal(error.text, "k[0, 0, ", 8);
  free_tensor(&k_tensor);
  free_tensor(&v_tensor);
  teardown_scene(&s);
}

static void test_repeats_are_acknowledged(void **state) {
  (void)state;
  scene s;
  setup_scene(&s);
  for (uint64_t begin = 0; begin < 100; begin += 9) must_append(&s.layer, &s.rows, begin, 100);
  must_append(&s.layer, &s.rows, 10, 20);
  assert_int_equal(s.layer.length, 100);
  assert_same_state(&s.layer, &s.variant);
  must_append(&s.layer, &s.rows, 30, 250);
  must_append(&s.variant, &s.rows, 100, 250);
  teardown_scene(&s);
}

static void test_other_rows_are_refused(void **state) {
  (void)state;
  scene s;
  setup_scene(&s);
  assert_int_equal(s.layer.sealed, 64);
  const uint64_t positions[] = {0, 5, 63, 64, 80, 99};
  for (size_t i = 0; i < 6; i++) {
    uint64_t p = positions[i];
    float *values[] = {&s.rows.k[(p * 2 + 1) * 16 + 3], &s.rows.v[(p * 2 + 0) * 24 + 7]};
    for (size_t j = 0; j < 2; j++) {
      float kept = *values[j];
      row_pair pair;
      *values[j] += 4;
      make_pair(&pair, &s.rows, p > 2 ? p - 2 : 0, 200, QKV_FP16);
      char text[64];
      (void)snprintf(text, sizeof text, "position %d holds other rows already", (int)p);
      refuse(&s, p > 2 ? p - 2 : 0, &pair.k.tensor, &pair.v.tensor, QKV_ALREADY_EXISTS, text);
      free_pair(&pair);
      *values[j] = kept;
    }
  }
  teardown_scene(&s);
}

static void test_first_position(void **state) {
  (void)state;
  qkv_model model = small_model();
  qkv_arena *arena = qkv_arena_create("memory-budget", BUDGET);
  sequence rows = make_sequence(&model, 100, 8);
  qkv_layer layer;
  init_layer(&layer, &model, test_policy(4, 4, 0), 1000, arena);
  must_append(&layer, &rows, 0, 100);
  assert_int_equal(layer.length, 1100);
  row_pair pair;
  make_pair(&pair, &rows, 0, 1, QKV_FP16);
  qkv_error error = {0};
  uint64_t appended;
  assert_int_equal(qkv_layer_append(&layer, 999, &pair.k.tensor, &pair.v.tensor, false, &appended, &error),
                   QKV_FAILED_PRECONDITION);
  assert_string_equal(error.text, "position is 999, the session's first position is 1000");
  free_pair(&pair);
  qkv_layer_truncate(&layer, 3);
  assert_int_equal(layer.length, 1000);
  assert_valid(&layer);
  deinit_layer(&layer);
  qkv_arena_destroy(&arena);
  free_sequence(&rows);
}

// ---- Memory ----

// Appends in three steps under every budget in turn: an append that fails changes nothing, and one that succeeds
// stays within the budget throughout.
static void test_every_budget(void **state) {
  (void)state;
  static const uint64_t steps[][2] = {{0, 40}, {40, 110}, {110, 230}};
  const int64_t windows[] = {0, 50, 140};
  qkv_model model = test_model(1, 1, 8, 8, QKV_FP16);
  sequence rows = make_sequence(&model, 230, 9);
  for (size_t w = 0; w < 3; w++) {
    int refused = 0, budgets = 0;
    for (uint64_t budget = 0; budget < 14000; budget += 64, budgets++) {
      qkv_arena *arena = qkv_arena_create("memory-budget", budget);
      qkv_layer layer;
      bool full = false;
      init_layer(&layer, &model, test_policy(2, 2, windows[w]), 0, arena);
      for (size_t i = 0; i < 3 && !full; i++) {
        qkv_error error = {0};
        uint64_t used = qkv_arena_read(arena).bytes_used;
        full = append_range(&layer, &rows, steps[i][0], steps[i][1], &error) != QKV_OK;
        assert_int_equal(layer.length, steps[i][full ? 0 : 1]);
        assert_int_equal(qkv_arena_read(arena).bytes_reserved, 0);
        if (full) {
          assert_int_equal(error.status, QKV_RESOURCE_EXHAUSTED);
          assert_memory_equal(error.text, "memory-budget is ", 17);
          assert_int_equal(qkv_arena_read(arena).bytes_used, used);
        }
        assert_valid(&layer);
        qkv_layer_usage usage = qkv_layer_read_usage(&layer);
        assert_int_equal(usage.bytes_coded + usage.bytes_exact, qkv_arena_read(arena).bytes_used);
        assert_int_equal(usage.tokens_coded + usage.tokens_exact, layer.length);
      }
      refused += full;
      deinit_layer(&layer);
      qkv_arena_destroy(&arena);
    }
    assert_true(refused > 0 && refused < budgets);
  }
  free_sequence(&rows);
}

static void test_a_large_append_needs_one_exact_block(void **state) {
  (void)state;
  qkv_model model = small_model();
  qkv_coder *coder = test_coder(&model, test_policy(2, 2, 0));
  size_t page = qkv_arena_cost(coder->codec->page_bytes_max(coder));
  coder_destroy(coder);
  size_t block = (size_t)64 * 2 * (16 + 24) * 2;
  sequence rows = make_sequence(&model, 3200, 10);
  for (int enough = 0; enough < 2; enough++) {
    qkv_arena *arena = qkv_arena_create("memory-budget", 50 * page + block - (enough ? 0 : 1));
    qkv_layer layer;
    init_layer(&layer, &model, test_policy(2, 2, 0), 0, arena);
    assert_int_equal(append_range(&layer, &rows, 0, 3200, NULL), enough ? QKV_OK : QKV_RESOURCE_EXHAUSTED);
    assert_int_equal(layer.page_count, enough ? 50 : 0);
    assert_int_equal(qkv_arena_read(arena).bytes_used, qkv_layer_read_usage(&layer).bytes_coded);
    const uint64_t coded = qkv_layer_read_usage(&layer).bytes_coded;
    assert_true(coded <= 50 * page && (coded > 0) == enough);
    deinit_layer(&layer);
    qkv_arena_destroy(&arena);
  }
  free_sequence(&rows);
}

// ---- Truncation ----

static void test_truncation_everywhere(void **state) {
  (void)state;
  qkv_model model = test_model(1, 1, 8, 16, QKV_FP16);
  qkv_arena *arena = qkv_arena_create("memory-budget", BUDGET);
  sequence rows = make_sequence(&model, 260, 11);
  for (uint64_t cut = 0; cut <= 201; cut++) {
    qkv_layer layer;
    init_layer(&layer, &model, test_policy(3, 3, 10), 0, arena);
    must_append(&layer, &rows, 0, 200);
    uint64_t sealed = layer.sealed;
    float *k = decoded_rows(&layer, QKV_K);
    qkv_layer_truncate(&layer, cut);
    assert_valid(&layer);
    uint64_t length = cut < 200 ? cut : 200;
    assert_int_equal(layer.length, length);
    assert_int_equal(layer.sealed, length < sealed ? length : sealed);
    float *left = decoded_rows(&layer, QKV_K);
    assert_memory_equal(k, left, length * 8 * sizeof *k);
    free(left);
    free(k);

    must_append(&layer, &rows, cut > 30 && cut < 200 ? cut - 30 : length, 260);
    assert_valid(&layer);
    assert_int_equal(layer.length, 260);
    deinit_layer(&layer);
    assert_int_equal(qkv_arena_read(arena).bytes_used, 0);
  }
  qkv_arena_destroy(&arena);
  free_sequence(&rows);
}

// ---- A random walk checked against an oracle ----

typedef struct oracle {
  sequence rows;  // what was appended, by position
  uint64_t length;
  uint64_t next_seed;  // rows after a truncation are new ones
} oracle;

static void renew_rows(oracle *o, uint64_t from) {
  sequence fresh = make_sequence(o->rows.model, o->rows.tokens, o->next_seed += 2);
  size_t k_row = o->rows.model->kv_heads * o->rows.model->key_dim;
  size_t v_row = o->rows.model->kv_heads * o->rows.model->value_dim;
  memcpy(o->rows.k + from * k_row, fresh.k + from * k_row, (o->rows.tokens - from) * k_row * sizeof(float));
  memcpy(o->rows.v + from * v_row, fresh.v + from * v_row, (o->rows.tokens - from) * v_row * sizeof(float));
  free_sequence(&fresh);
}

static void compare_with_oracle(const qkv_layer *layer, const oracle *o) {
  assert_valid(layer);
  assert_int_equal(layer->length, o->length);
  const float *held[] = {o->rows.k, o->rows.v};
  const double bits[] = {layer->config.policy.bits_k, layer->config.policy.bits_v};
  for (int part = 0; part < 2; part++) {
    size_t row = layer->config.model->kv_heads *
                 (part == QKV_K ? layer->config.model->key_dim : layer->config.model->value_dim);
    float *rows = decoded_rows(layer, (qkv_part)part);
    double error = 0, norm = 0;
    for (size_t i = 0; i < layer->sealed * row; i++) {
      error += square((double)rows[i] - (double)held[part][i]);
      norm += square((double)held[part][i]);
    }
    assert_true(error <= 1.5 * layer->config.policy.codec->error_bound(bits[part]) * norm);
    assert_memory_equal(rows + layer->sealed * row, held[part] + layer->sealed * row,
                        (layer->length - layer->sealed) * row * sizeof *rows);
    free(rows);
  }
}

static void test_random_walk(void **state) {
  (void)state;
  static const int64_t windows[] = {0, 1, 64, 100};
  qkv_model model = small_model();
  uint64_t seed = 12;
  for (int walk = 0; walk < 8; walk++) {
    qkv_arena *arena = qkv_arena_create("memory-budget", BUDGET);
    oracle o = {.rows = make_sequence(&model, 700, 13), .next_seed = 100 + (uint64_t)walk * 1000};
    qkv_layer layer;
    init_layer(&layer, &model, test_policy(4, 3, windows[walk % 4]), 0, arena);
    for (int step = 0; step < 30; step++) {
      uint64_t begin = o.length;
      switch (random_below(&seed, 4)) {
        case 0:
          o.length = random_below(&seed, o.length + 2);
          if (o.length > begin) o.length = begin;
          qkv_layer_truncate(&layer, o.length);
          renew_rows(&o, o.length);
          break;
        case 1:  // overlapping
          begin = random_below(&seed, o.length + 1);
          // fall through
        default: {
          uint64_t end = begin + 1 + random_below(&seed, 120);
          if (end > 700) break;
          must_append(&layer, &o.rows, begin, end);
          if (end > o.length) o.length = end;
        }
      }
      compare_with_oracle(&layer, &o);
    }
    deinit_layer(&layer);
    qkv_arena_destroy(&arena);
    free_sequence(&o.rows);
  }
}

// A check that never fails checks nothing: break each invariant in turn.
static void test_validate_sees_damage(void **state) {
  (void)state;
  scene s;
  setup_scene(&s);
  must_append(&s.layer, &s.rows, 100, 250);
  must_append(&s.variant, &s.rows, 100, 250);
  qkv_layer kept = s.layer;
  s.layer.sealed += 1;
  assert_string_equal(qkv_layer_validate(&s.layer), "the pages do not end at sealed");
  s.layer = kept;
  s.layer.length = s.layer.sealed;
  assert_string_equal(qkv_layer_validate(&s.layer), "the tail has not as many blocks as its tokens need");
  s.layer = kept;
  qkv_page_range *range = s.layer.ranges[0].range;
  range->bytes_coded += 64;
  assert_string_equal(qkv_layer_validate(&s.layer), "bytes_coded is not the sum of the pages");
  range->bytes_coded -= 64;
  s.layer.page_count--;
  assert_string_equal(qkv_layer_validate(&s.layer), "the pages do not end at sealed");
  s.layer.page_count += 2;
  assert_string_equal(qkv_layer_validate(&s.layer), "a range has fewer pages than the layer sees");
  s.layer = kept;
  s.layer.config.layer++;
  assert_string_equal(qkv_layer_validate(&s.layer), "a page's image has another layer");
  s.layer = kept;
  qkv_layer_page(&s.layer, 1)->tokens = 65;
  assert_string_equal(qkv_layer_validate(&s.layer), "a page holds fewer tokens than are valid");
  qkv_layer_page(&s.layer, 1)->tokens = 64;
  uint8_t *image = (uint8_t *)qkv_layer_page(&s.layer, 1)->page;
  image[100] ^= 1;
  assert_string_equal(qkv_layer_validate(&s.layer), "a page's image is damaged");
  image[100] ^= 1;
  // Ranges: each of one coder, one after the other.
  assert_int_equal(s.layer.page_count, 3);
  s.layer.ranges[0].first = 1;
  assert_string_equal(qkv_layer_validate(&s.layer), "a range does not begin where the one before ends");
  s.layer.ranges[0].first = 0;
  qkv_coder *other = test_coder(&s.model, test_policy(4, 4, 8));
  const qkv_coder *coder = qkv_layer_page(&s.layer, 1)->coder;
  qkv_layer_page(&s.layer, 1)->coder = other;
  assert_string_equal(qkv_layer_validate(&s.layer), "a range has two coders");
  qkv_layer_page(&s.layer, 1)->coder = coder;
  coder_destroy(other);
  teardown_scene(&s);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_rows_come_back),
      cmocka_unit_test(test_parts_of_rows),
      cmocka_unit_test(test_chunks_do_not_matter),
      cmocka_unit_test(test_dtype_is_converted_once),
      cmocka_unit_test(test_rows_before_rope),
      cmocka_unit_test(test_shapes_are_checked),
      cmocka_unit_test(test_values_are_checked),
      cmocka_unit_test(test_the_largest_values_are_held),
      cmocka_unit_test(test_rotation_beyond_the_limit_is_refused),
      cmocka_unit_test(test_repeats_are_acknowledged),
      cmocka_unit_test(test_other_rows_are_refused),
      cmocka_unit_test(test_first_position),
      cmocka_unit_test(test_every_budget),
      cmocka_unit_test(test_a_large_append_needs_one_exact_block),
      cmocka_unit_test(test_truncation_everywhere),
      cmocka_unit_test(test_random_walk),
      cmocka_unit_test(test_validate_sees_damage),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
