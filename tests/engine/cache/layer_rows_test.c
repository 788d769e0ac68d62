// Records of exact rows: which are put, when they go, and who has them.
#include "engine/cache/layer_spill.h"
#include "engine/cache/session_tokens.h"
#include "tests/engine/cache/backing_double.h"

enum { TOKENS = 300 };

// What was put, by the number of its record; pages are left out.
typedef struct put_record {
  uint64_t position;
  uint32_t tokens, layer;
  uint16_t first_k, first_v;  // raw elements
  bool has_ids;
  uint32_t ids[QKV_PAGE_TOKENS];
} put_record;

typedef struct state {
  qkv_model model;
  qkv_arena *arena;
  qkv_layer layer;
  qkv_layer_config config;
  backing_double backing;
  sequence rows;
  const qkv_coder *coder;
} state;

static put_record put_records[DOUBLE_RECORDS];
static uint32_t tokens_max;  // that the double takes at a time

static uint64_t put_rows(void *context, uint64_t session, const qkv_model *model, uint32_t layer, uint64_t position,
                         uint32_t *taken, const void *k, const void *v, const uint32_t *ids) {
  (void)model;
  if (*taken > tokens_max) *taken = tokens_max;
  const uint32_t tokens = *taken;
  uint64_t number = double_take(context, session, k, 2, tokens);
  if (number == 0) return 0;
  put_record *put = &put_records[number];
  *put = (put_record){.position = position, .tokens = tokens, .layer = layer};
  put->has_ids = ids != NULL;
  if (ids != NULL) memcpy(put->ids, ids, tokens * sizeof *ids);
  memcpy(&put->first_k, k, sizeof put->first_k);
  memcpy(&put->first_v, v, sizeof put->first_v);
  return number;
}

static void begin(state *s) {
  const qkv_policy policy = test_policy(4, 3, 0);
  memset(put_records, 0, sizeof put_records);
  tokens_max = QKV_PAGE_TOKENS;
  s->model = test_model(2, 2, 32, 16, QKV_FP16);
  s->arena = qkv_arena_create("memory-budget", 1 << 20);
  double_init(&s->backing);
  s->backing.backing.put_rows = put_rows;
  s->coder = test_coder(&s->model, policy);
  s->config = test_layer_config(&s->model, policy, 0, s->arena);
  s->config.backing = &s->backing.backing;
  s->config.session = 42;
  qkv_layer_init(&s->layer, &s->config, s->coder);
  s->rows = make_sequence(&s->model, TOKENS, 5);
}

static void end(state *s) {
  qkv_layer_deinit(&s->layer);
  coder_destroy(s->coder);
  free_sequence(&s->rows);
  double_deinit(&s->backing);
  qkv_arena_destroy(&s->arena);
}

static void append_with(state *s, uint64_t first, uint64_t last, const qkv_row_ids *coming) {
  must_append(&s->layer, &s->rows, first, last);
  assert_true(qkv_layer_save_with(&s->layer, coming));
  assert_valid(&s->layer);
}

static void append(state *s, uint64_t first, uint64_t last) {
  append_with(s, first, last, NULL);
}

static void assert_put(uint64_t record, uint64_t position, uint32_t tokens) {
  assert_int_equal(put_records[record].position, position);
  assert_int_equal(put_records[record].tokens, tokens);
}

static void test_each_append_is_a_record(void **unused) {
  (void)unused;
  state s;
  begin(&s);
  append(&s, 0, 10);
  append(&s, 10, 11);
  assert_int_equal(s.backing.count, 2);
  assert_put(1, 0, 10);
  assert_put(2, 10, 1);
  uint16_t row[32];
  memcpy(row, qkv_layer_exact_row(&s.layer, QKV_V, 10, 0), sizeof row[0]);
  assert_int_equal(put_records[2].first_v, row[0]);
  memcpy(row, qkv_layer_exact_row(&s.layer, QKV_K, 10, 0), sizeof row[0]);
  assert_int_equal(put_records[2].first_k, row[0]);
  assert_false(qkv_layer_is_settled(&s.layer));
  assert_int_equal(qkv_layer_durable(&s.layer), 0);
  qkv_layer_settle(&s.layer);
  assert_true(qkv_layer_is_settled(&s.layer));
  assert_int_equal(qkv_layer_durable(&s.layer), 11);
  end(&s);
}

// The tier takes fewer at a time.
static void test_a_record_takes_what_fits(void **unused) {
  (void)unused;
  state s;
  begin(&s);
  tokens_max = 4;
  append(&s, 0, 10);
  assert_int_equal(s.backing.count, 3);
  assert_put(1, 0, 4);
  assert_put(2, 4, 4);
  assert_put(3, 8, 2);
  qkv_layer_settle(&s.layer);
  assert_int_equal(qkv_layer_durable(&s.layer), 10);
  end(&s);
}

static void test_what_is_written_is_not_durable_yet(void **unused) {
  (void)unused;
  state s;
  begin(&s);
  s.backing.first = QKV_RECORD_WRITTEN;
  append(&s, 0, 10);
  qkv_layer_settle(&s.layer);
  assert_false(qkv_layer_is_settled(&s.layer));
  assert_int_equal(qkv_layer_durable(&s.layer), 0);
  double_all(&s.backing, QKV_RECORD_DURABLE);
  qkv_layer_settle(&s.layer);
  assert_true(qkv_layer_is_settled(&s.layer));
  assert_int_equal(qkv_layer_durable(&s.layer), 10);
  end(&s);
}

// Records of rows stay until the pages that the rows went into are durable.
static void test_pages_take_their_place(void **unused) {
  (void)unused;
  state s;
  begin(&s);
  append(&s, 0, 60);
  qkv_layer_settle(&s.layer);
  s.backing.first = QKV_RECORD_WRITTEN;
  append(&s, 60, 70);
  assert_int_equal(s.layer.page_count, 1);
  assert_int_equal(s.backing.count, 3);
  assert_put(3, 64, 6);
  qkv_layer_settle(&s.layer);
  assert_int_equal(s.backing.drops, 0);
  assert_int_equal(qkv_layer_durable(&s.layer), 60);
  double_all(&s.backing, QKV_RECORD_DURABLE);
  qkv_layer_settle(&s.layer);
  assert_int_equal(s.backing.drops, 1);
  assert_int_equal(s.backing.records[1].state, QKV_RECORD_GONE);
  assert_int_equal(qkv_layer_durable(&s.layer), 70);
  assert_true(qkv_layer_is_settled(&s.layer));
  end(&s);
}

static void test_what_is_refused_or_gone_is_put_again(void **unused) {
  (void)unused;
  state s;
  begin(&s);
  s.backing.failed = true;
  must_append(&s.layer, &s.rows, 0, 20);
  assert_false(qkv_layer_save(&s.layer));
  assert_false(qkv_layer_is_settled(&s.layer));
  s.backing.failed = false;
  append(&s, 20, 30);
  assert_put(1, 0, 30);
  append(&s, 30, 40);
  s.backing.records[1].state = QKV_RECORD_GONE;
  qkv_layer_settle(&s.layer);
  assert_false(qkv_layer_is_settled(&s.layer));
  assert_int_equal(qkv_layer_durable(&s.layer), 0);
  assert_true(qkv_layer_save(&s.layer));
  assert_put(3, 0, 40);
  qkv_layer_settle(&s.layer);
  assert_int_equal(qkv_layer_durable(&s.layer), 40);
  end(&s);
}

// What was dropped may be found again by the next process, so each truncation is written.
static void test_truncation_cuts(void **unused) {
  (void)unused;
  state s;
  begin(&s);
  append(&s, 0, 30);
  append(&s, 30, 40);
  qkv_layer_settle(&s.layer);
  qkv_layer_truncate(&s.layer, 20);
  assert_valid(&s.layer);
  assert_int_equal(s.backing.cuts, 1);
  assert_int_equal(s.backing.cut_position, 20);
  assert_int_equal(qkv_layer_durable(&s.layer), 20);
  append(&s, 20, 25);
  assert_put(3, 20, 5);
  end(&s);
}

static void test_forks_share_records(void **unused) {
  (void)unused;
  state s;
  qkv_layer fork;
  begin(&s);
  append(&s, 0, 30);
  append(&s, 30, 40);
  qkv_layer_settle(&s.layer);
  s.config.session = 43;
  qkv_layer_init(&fork, &s.config, s.coder);
  qkv_layer_fork(&fork, &s.layer, 35);
  assert_valid(&fork);
  assert_int_equal(qkv_layer_durable(&fork), 35);
  assert_true(qkv_layer_is_settled(&fork));
  append(&s, 40, 130);  // two pages, which are durable: the parent needs its records no more
  qkv_layer_settle(&s.layer);
  assert_int_equal(s.backing.drops, 0);
  must_append(&fork, &s.rows, 35, 36);
  assert_true(qkv_layer_save(&fork));
  assert_put(s.backing.count, 35, 1);
  assert_int_equal(s.backing.records[s.backing.count].session, 43);
  qkv_layer_deinit(&fork);
  end(&s);
}

// Ids that the session holds go with its last layer's rows, and those of the rows that are being appended.
static void test_ids_go_with_the_rows(void **unused) {
  (void)unused;
  state s;
  uint32_t open[QKV_PREFIX_PAGE], ids[100];
  uint64_t reserved = 0;
  qkv_session_tokens tokens;
  begin(&s);
  const qkv_session_tokens_config config = {.arena = s.arena, .owner = 1};
  for (uint32_t i = 0; i < 100; i++) ids[i] = 1000 + i;
  qkv_session_tokens_init(&tokens, &config);
  qkv_session_tokens_give_open(&tokens, open);
  qkv_session_tokens_keep(&tokens, qkv_session_tokens_cuts(&tokens), 0, ids, 10, &reserved);
  append(&s, 0, 5);
  assert_false(put_records[1].has_ids);  // those of another layer do not
  s.layer.config.tokens = &tokens;
  append(&s, 5, 10);
  assert_true(put_records[2].has_ids);
  assert_memory_equal(put_records[2].ids, ids + 5, 5 * sizeof *ids);
  append(&s, 10, 12);
  assert_false(put_records[3].has_ids);
  append_with(&s, 12, 15, &(qkv_row_ids){.position = 9, .count = 6, .ids = ids + 9});
  assert_true(put_records[4].has_ids);
  assert_memory_equal(put_records[4].ids, ids + 12, 3 * sizeof *ids);
  qkv_session_tokens_keep(&tokens, qkv_session_tokens_cuts(&tokens), 10, ids + 10, 5, &reserved);
  append_with(&s, 15, 20, &(qkv_row_ids){.position = 13, .count = 7, .ids = ids + 13});
  assert_true(put_records[5].has_ids);
  assert_memory_equal(put_records[5].ids, ids + 15, 5 * sizeof *ids);
  s.layer.config.tokens = NULL;
  qkv_session_tokens_deinit(&tokens);
  end(&s);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_ids_go_with_the_rows),     cmocka_unit_test(test_each_append_is_a_record),
      cmocka_unit_test(test_a_record_takes_what_fits), cmocka_unit_test(test_what_is_written_is_not_durable_yet),
      cmocka_unit_test(test_pages_take_their_place),   cmocka_unit_test(test_what_is_refused_or_gone_is_put_again),
      cmocka_unit_test(test_truncation_cuts),          cmocka_unit_test(test_forks_share_records)};
  return cmocka_run_group_tests_name("layer_rows", tests, NULL, NULL);
}
