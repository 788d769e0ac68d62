// Layers whose coder changes: pages of several frames, transforms and budgets, one after the other.
#include "tests/engine/cache/attend_scene.h"

enum { KINDS = 4, DIM = 16 };

// A scene whose layer takes its pages' coders from here.
typedef struct mixed {
  scene scene;
  qkv_coder *coders[KINDS];  // plain, attend frame, archive frame, plain at another budget
} mixed;

static qkv_model turning_model(uint32_t kv_heads, uint32_t group) {
  qkv_model model = {.name = "turning",
                     .layers = 4,
                     .kv_heads = kv_heads,
                     .q_heads = kv_heads * group,
                     .key_dim = DIM,
                     .value_dim = 8,
                     .dtype = QKV_FP32,
                     .rope = {.theta = 10000, .interleaved = true},
                     .policy = QKV_POLICY_UNSET};
  assert_int_equal(qkv_model_resolve(&model, NULL), QKV_OK);
  return model;
}

static void setup(mixed *m, uint32_t kv_heads, uint32_t group, uint64_t tokens, int64_t window) {
  static const qkv_frame frames[KINDS] = {QKV_FRAME_PLAIN, QKV_FRAME_ATTEND, QKV_FRAME_ARCHIVE, QKV_FRAME_PLAIN};
  const qkv_model model = turning_model(kv_heads, group);
  naive_random random = {81};
  setup_scene(&m->scene, &model, test_policy(3, 3, window), 0);
  for (size_t i = 0; i < KINDS; i++) {
    m->coders[i] = i == 3 ? coder_create((uint16_t)kv_heads, DIM, 8, 8, 1.5, frames[i], &model.rope)
                          : coder_create_dense(&random, (uint16_t)kv_heads, DIM, 8, 3, 3.5, frames[i], &model.rope);
    m->coders[i]->layer = TEST_LAYER;
  }
  coder_own(m->coders[2])->anchors[QKV_K].kind = coder_own(m->coders[1])->anchors[QKV_V].kind = QKV_ANCHOR_AUTO;
  free_sequence(&m->scene.rows);
  m->scene.rows = make_sequence(&m->scene.model, tokens, 82);
  // Values about a constant, so that outputs are not what is left when all cancels out.
  for (size_t i = 0; i < (size_t)tokens * kv_heads * 8; i++) m->scene.rows.v[i] += 1;
}

static void teardown(mixed *m) {
  const qkv_coder *last = m->scene.layer.coder;
  bool ours = false;
  for (size_t i = 0; i < KINDS; i++) ours |= last == m->coders[i];
  // teardown_scene destroys the layer's coder with it.
  teardown_scene(&m->scene);
  for (size_t i = 0; i < KINDS; i++) {
    if (m->coders[i] != last) coder_destroy(m->coders[i]);
  }
  assert_true(ours);
}

// Pages from here on are coded by another coder.
static void change_coder(mixed *m, size_t kind) {
  bool owned = false;
  for (size_t i = 0; i < KINDS; i++) owned |= m->scene.layer.coder == m->coders[i];
  if (!owned) coder_destroy(m->scene.layer.coder);  // that of setup_scene, with which no page was coded
  m->scene.layer.coder = m->coders[kind];
}

static void decode_again(mixed *m) {
  scene *s = &m->scene;
  free(s->k);
  free(s->v);
  assert_valid(&s->layer);
  s->k = decoded_rows(&s->layer, QKV_K);
  s->v = decoded_rows(&s->layer, QKV_V);
}

// Every segment's tokens with a coder of its own.
static void append_segments(mixed *m, const uint64_t (*segments)[2], size_t count) {
  uint64_t at = m->scene.layer.length;
  for (size_t i = 0; i < count; i++) {
    change_coder(m, (size_t)segments[i][0]);
    must_append(&m->scene.layer, &m->scene.rows, at, at + segments[i][1]);
    at += segments[i][1];
  }
  decode_again(m);
}

static void check_options(mixed *m, const qkv_attend_options *options, size_t count) {
  scene *s = &m->scene;
  for (size_t i = 0; i < count; i++) {
    set_queries(s, i % 3 == 1 ? 3 : 1, s->model.q_heads / s->model.kv_heads, 90 + i);
    s->request.options = options[i];
    check_ranges(s);
  }
}

// ---- Ranges ----

static void test_a_range_ends_where_the_coder_changes(void **state) {
  (void)state;
  static const uint64_t segments[][2] = {{0, 100}, {1, 64}, {0, 128}, {0, 4300}, {2, 64}};
  mixed m;
  setup(&m, 1, 1, 5000, 0);
  append_segments(&m, segments, sizeof segments / sizeof segments[0]);
  const qkv_layer *layer = &m.scene.layer;
  size_t first, end, pages = 0;
  for (size_t range = 0; pages < layer->page_count; range++) {
    qkv_layer_range(layer, range, &first, &end);
    assert_int_equal(first, pages);
    assert_true(end > first && end - first <= QKV_RANGE_PAGES);
    for (size_t i = first; i < end; i++) {
      assert_int_equal(qkv_layer_range_of(layer, i), range);
      assert_ptr_equal(qkv_layer_page(layer, i)->coder, qkv_layer_page(layer, first)->coder);
    }
    // It goes on for as long as it can.
    if (end < layer->page_count && qkv_layer_page(layer, end)->coder == qkv_layer_page(layer, first)->coder) {
      assert_int_equal(end - first, QKV_RANGE_PAGES);
    }
    pages = end;
  }
  // A page belongs to the coder that there was when it was sealed.
  assert_ptr_equal(qkv_layer_page(layer, 0)->coder, m.coders[0]);
  assert_ptr_equal(qkv_layer_page(layer, 1)->coder, m.coders[1]);
  assert_ptr_equal(qkv_layer_page(layer, 2)->coder, m.coders[0]);
  teardown(&m);
}

// ---- Attention ----

static void test_attention_over_all_kinds(void **state) {
  (void)state;
  static const uint64_t segments[][2] = {{0, 300}, {1, 700}, {2, 200}, {3, 130}, {1, 64}, {2, 500}};
  static const qkv_attend_options options[] = {{.scale = 0},
                                               {.begin = 333, .end = 1500},
                                               {.sliding_window = 700},
                                               {.begin = 300, .end = 1000},
                                               {.end = 290},
                                               {.begin = 1890},
                                               {.causal_offset = -900},
                                               {.scale = 2, .soft_cap = 20},
                                               {.not_causal = true}};
  for (uint32_t heads = 1; heads <= 3; heads += 2) {
    mixed m;
    setup(&m, heads, 3, 2000, 30);
    append_segments(&m, segments, sizeof segments / sizeof segments[0]);
    check_options(&m, options, sizeof options / sizeof options[0]);
    set_queries(&m.scene, 40, 3, 7);  // several blocks
    check_scene(&m.scene);
    teardown(&m);
  }
  print_message("largest relative error %.3g, of lse %.3g\n", worst_error, worst_lse);
}

// Ranges of the attend frame that a request begins in the middle of: turned by their positions alone.
static void test_long_segments_are_split(void **state) {
  (void)state;
  static const uint64_t segments[][2] = {{1, 9000}, {3, 200}, {2, 4500}};
  static const qkv_attend_options options[] = {{.scale = 0},
                                               {.begin = 1000, .end = 9100},
                                               {.begin = 4200, .end = 13000},
                                               {.sliding_window = 9000},
                                               {.begin = 8999}};
  mixed m;
  setup(&m, 1, 4, 14000, 100);
  append_segments(&m, segments, sizeof segments / sizeof segments[0]);
  check_options(&m, options, sizeof options / sizeof options[0]);
  teardown(&m);
}

// A row's result does not depend on the other queries of its request, whatever these see.
static void test_queries_are_independent(void **state) {
  (void)state;
  static const uint64_t segments[][2] = {{1, 5000}, {2, 100}, {0, 100}};
  mixed m;
  setup(&m, 2, 2, 6000, 0);
  append_segments(&m, segments, 3);
  scene *s = &m.scene;
  set_queries(s, 9, 2, 5);
  s->request.position = 4400;
  s->request.options = (qkv_attend_options){.sliding_window = 1000, .causal_offset = 0};
  run(NULL, &s->request);
  float alone[4 * 8], alone_lse[4];
  for (int64_t query = 0; query < 9; query++) {
    test_tensor q;
    make_tensor(&q, QKV_FP32, s->q + query * 4 * DIM, 1, 4, DIM);
    qkv_attend request = s->request;
    request.q = q.tensor;
    request.position += (uint64_t)query;
    request.out = alone;
    request.lse = alone_lse;
    run(NULL, &request);
    assert_memory_equal(alone, s->request.out + query * 4 * 8, sizeof alone);
    assert_memory_equal(alone_lse, s->request.lse + query * 4, sizeof alone_lse);
    free_tensor(&q);
  }
  teardown(&m);
}

// ---- Rows ----

static void test_rows_come_back_in_both_forms(void **state) {
  (void)state;
  static const uint64_t segments[][2] = {{0, 150}, {1, 128}, {2, 200}, {3, 100}};
  mixed m;
  setup(&m, 2, 1, 600, 20);
  append_segments(&m, segments, 4);
  const qkv_layer *layer = &m.scene.layer;
  float *before = malloc(578 * 2 * DIM * sizeof *before);
  assert_non_null(before);
  qkv_layer_rows(layer, QKV_K, 0, 578, true, before);
  for (uint64_t t = 0; t < 578; t++) {
    for (size_t h = 0; h < 2; h++) {
      float *row = before + (t * 2 + h) * DIM;
      qkv_rope_forward(&m.scene.model.rope, row, t);
      for (size_t c = 0; c < DIM; c++) {
        assert_true(fabsf(row[c] - m.scene.k[(t * 2 + h) * DIM + c]) <= 1e-5f * (1 + fabsf(row[c])));
      }
    }
  }
  free(before);
  teardown(&m);
}

static void test_repeats_meet_the_coder_of_their_page(void **state) {
  (void)state;
  static const uint64_t segments[][2] = {{0, 150}, {1, 128}, {2, 200}, {3, 100}};
  mixed m;
  setup(&m, 2, 1, 600, 0);
  append_segments(&m, segments, 4);
  for (uint64_t begin = 0; begin < 578; begin += 31) {
    must_append(&m.scene.layer, &m.scene.rows, begin, begin + 100 < 578 ? begin + 100 : 578);
  }
  assert_int_equal(m.scene.layer.length, 578);
  for (uint64_t position = 5; position < 578; position += 57) {
    float *value = &m.scene.rows.v[(position * 2 + 1) * 8 + 3], kept = *value;
    qkv_error error = {0};
    char text[64];
    *value += 50;
    (void)snprintf(text, sizeof text, "position %d holds other rows already", (int)position);
    assert_int_equal(append_range(&m.scene.layer, &m.scene.rows, 0, 578, &error), QKV_ALREADY_EXISTS);
    assert_string_equal(error.text, text);
    *value = kept;
  }
  teardown(&m);
}

// ---- Truncation ----

// To everywhere about the changes of coder, and on with another one.
static void test_truncation_everywhere(void **state) {
  (void)state;
  static const uint64_t segments[][2] = {{0, 128}, {1, 128}, {2, 64}, {3, 90}};
  for (uint64_t cut = 0; cut <= 410; cut += cut % 64 < 62 && cut % 64 > 2 ? 20 : 1) {
    mixed m;
    setup(&m, 1, 2, 700, 10);
    append_segments(&m, segments, 4);
    float *k = decoded_rows(&m.scene.layer, QKV_K);
    qkv_layer_truncate(&m.scene.layer, cut);
    decode_again(&m);
    assert_int_equal(m.scene.layer.length, cut);
    assert_memory_equal(k, m.scene.k, cut * DIM * sizeof *k);
    free(k);
    append_segments(&m, (const uint64_t[][2]){{1, 130}, {2, 70}}, 2);
    assert_int_equal(m.scene.layer.length, cut + 200);
    set_queries(&m.scene, 1, 2, cut);
    check_ranges(&m.scene);
    teardown(&m);
  }
}

int main(void) {
  error_most = CODER_WHOLE_OFF;
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_a_range_ends_where_the_coder_changes),
      cmocka_unit_test(test_attention_over_all_kinds),
      cmocka_unit_test(test_long_segments_are_split),
      cmocka_unit_test(test_queries_are_independent),
      cmocka_unit_test(test_rows_come_back_in_both_forms),
      cmocka_unit_test(test_repeats_meet_the_coder_of_their_page),
      cmocka_unit_test(test_truncation_everywhere),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
