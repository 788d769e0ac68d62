// Batches over layers that share ranges: the same bits as each request alone, which shares nothing; and the groups
// that are found.
#include "engine/cache/attend_internal.h"
#include "engine/cache/layer_spill.h"
#include "engine/kernel/kernel.h"
#include "tests/engine/cache/backing_double.h"
#include "tests/engine/cache/fixture.h"

enum { KINDS = 4, LAYERS = 8, REQUESTS = 12, HEADS = 2, DIM = 16, VALUE_DIM = 8, TOKENS = 9000, QUERIES = 30 };

typedef struct world {
  qkv_model model;
  qkv_policy policy;
  qkv_arena *arena;
  backing_double backing;
  qkv_coder *coders[KINDS];  // plain, attend frame, archive frame, plain at another budget
  sequence rows;
  qkv_layer layers[LAYERS];
  size_t count;
  bool spills;
  uint64_t seed;
} world;

static qkv_model turning_model(uint32_t group) {
  qkv_model model = test_model(HEADS, group, DIM, VALUE_DIM, QKV_FP32);
  model.rope = (qkv_rope){.theta = 10000, .interleaved = true};
  assert_int_equal(qkv_model_resolve(&model, NULL), QKV_OK);
  return model;
}

static void begin(world *w, uint64_t seed, uint32_t group) {
  static const qkv_frame frames[KINDS] = {QKV_FRAME_PLAIN, QKV_FRAME_ATTEND, QKV_FRAME_ARCHIVE, QKV_FRAME_PLAIN};
  naive_random random = {81};
  *w = (world){.model = turning_model(group), .policy = test_policy(3, 3, (int64_t)(seed % 3) * 40), .seed = seed};
  w->spills = seed % 3 == 0;
  w->arena = qkv_arena_create("memory-budget", (uint64_t)1 << 28);
  double_init(&w->backing);
  for (size_t i = 0; i < KINDS; i++) {
    w->coders[i] = i == 3 ? coder_create(HEADS, DIM, VALUE_DIM, 8, 1.5, frames[i], &w->model.rope)
                          : coder_create_dense(&random, HEADS, DIM, VALUE_DIM, 3, 3.5, frames[i], &w->model.rope);
    w->coders[i]->layer = TEST_LAYER;
  }
  coder_own(w->coders[2])->anchors[QKV_K].kind = coder_own(w->coders[1])->anchors[QKV_V].kind = QKV_ANCHOR_AUTO;
  w->rows = make_sequence(&w->model, TOKENS, seed);
}

static void end(world *w) {
  for (size_t i = 0; i < w->count; i++) qkv_layer_deinit(&w->layers[i]);
  for (size_t i = 0; i < KINDS; i++) coder_destroy(w->coders[i]);
  assert_int_equal(qkv_arena_read(w->arena).bytes_used, 0);
  double_deinit(&w->backing);
  qkv_arena_destroy(&w->arena);
  free_sequence(&w->rows);
}

static qkv_layer *add_layer(world *w, const qkv_layer *parent, uint64_t position) {
  qkv_layer *layer = &w->layers[w->count++];
  qkv_layer_config config = test_layer_config(&w->model, w->policy, 0, w->arena);
  if (w->spills) config.backing = &w->backing.backing;
  config.session = w->count;
  qkv_layer_init(layer, &config, w->coders[0]);
  if (parent != NULL) qkv_layer_fork(layer, parent, position);
  return layer;
}

// Rows that no other layer has at this position.
static void append(world *w, qkv_layer *layer, size_t kind, uint64_t tokens) {
  qkv_error error = {0};
  row_pair pair;
  uint64_t appended;
  const uint64_t from = random_below(&w->seed, TOKENS - tokens);
  layer->coder = w->coders[kind];
  make_pair(&pair, &w->rows, from, from + tokens, QKV_FP32);
  if (qkv_layer_append(layer, layer->length, &pair.k.tensor, &pair.v.tensor, false, &appended, &error) != QKV_OK)
    fail_msg("%s", error.text);
  free_pair(&pair);
}

// A layer of some segments, each with a coder of its own: in some worlds more ranges than are attended in turn.
static void grow_trunk(world *w) {
  qkv_layer *trunk = add_layer(w, NULL, 0);
  const bool far = w->seed % 4 == 0;
  const uint64_t segments = far ? 45 : 2 + random_below(&w->seed, 5);
  for (uint64_t i = 0; i < segments; i++)
    append(w, trunk, far ? i % 2 * 3 : random_below(&w->seed, KINDS), 64 + (far ? 0 : random_below(&w->seed, 500)));
  if (!far && !w->spills && random_below(&w->seed, 2) == 0) append(w, trunk, 0, 4500);
}

static void grow(world *w) {
  grow_trunk(w);
  while (w->count < (w->spills ? 4 : LAYERS)) {
    const qkv_layer *parent = &w->layers[random_below(&w->seed, 3) > 0 ? 0 : random_below(&w->seed, w->count)];
    const bool all = random_below(&w->seed, 2) == 0;
    qkv_layer *layer = add_layer(w, parent, all ? UINT64_MAX : random_below(&w->seed, parent->length + 1));
    append(w, layer, random_below(&w->seed, KINDS), 1 + random_below(&w->seed, 300));
  }
}

// Some of the pages leave memory, for all that share them.
static void chill(world *w) {
  for (size_t i = 0; i < w->count; i++) assert_true(qkv_layer_save(&w->layers[i]));
  double_all(&w->backing, QKV_RECORD_DURABLE);
  for (size_t i = 0; i < w->count; i++) qkv_layer_settle(&w->layers[i]);
  (void)evict(&w->layers[0], 20000, INT64_MAX - 1);
}

// ---- Requests ----

typedef struct asked {
  float *values;
  test_tensor q;
  float *expected, *expected_lse;
  size_t rows;  // of out
  _Atomic long patience;
} asked;

static bool impatient(const void *context) {
  return atomic_fetch_sub((_Atomic long *)context, 1) <= 0;
}

static qkv_attend_options random_options(world *w) {
  qkv_attend_options options = {.precision =
                                    (qkv_precision)(random_below(&w->seed, 3) > 0 ? 0 : random_below(&w->seed, 4))};
  switch (random_below(&w->seed, 12)) {
    case 0:
      options.sliding_window = 1 + random_below(&w->seed, 2500);
      break;
    case 1:
      options.not_causal = true;
      break;
    case 2:
      options.begin = random_below(&w->seed, 900);
      break;
    case 3:
      options.end = 1 + random_below(&w->seed, 3000);
      break;
    case 4:
      options.causal_offset = (int64_t)random_below(&w->seed, 60);
      break;
    default:
      break;
  }
  if (random_below(&w->seed, 4) == 0) options.soft_cap = 1 + (double)random_below(&w->seed, 2);
  if (random_below(&w->seed, 4) == 0) options.scale = 0.5;
  return options;
}

static void skip_cold(qkv_attend *request) {
  uint64_t from, to;
  for (qkv_attend_span(request, &from, &to); from < to && !qkv_layer_holds(request->layer, from, to);
       qkv_attend_span(request, &from, &to))
    request->options.begin = from + 1;
}

static void ask(world *w, qkv_attend *request, asked *all) {
  const qkv_layer *layer = &w->layers[random_below(&w->seed, w->count)];
  const uint64_t dice = random_below(&w->seed, 10), queries = dice == 0 ? QUERIES : dice < 3 ? 2 + dice : 1;
  qkv_error error = {0};
  *all = (asked){.rows = queries * w->model.q_heads};
  all->values = random_floats(random_next(&w->seed), all->rows * DIM);
  make_tensor(&all->q, QKV_FP32, all->values, (int64_t)queries, w->model.q_heads, DIM);
  all->expected = calloc(2 * all->rows, VALUE_DIM * sizeof(float));
  all->expected_lse = calloc(2 * all->rows, sizeof(float));
  *request = (qkv_attend){.layer = layer, .q = all->q.tensor, .options = random_options(w)};
  request->position = layer->length > queries ? layer->length - queries : 0;
  if (random_below(&w->seed, 6) == 0) request->position = random_below(&w->seed, layer->length);
  request->q_before_rope = random_below(&w->seed, 2) == 0;
  skip_cold(request);
  if (qkv_attend_check(request, &error) != QKV_OK) fail_msg("%s", error.text);
  request->out = all->expected;
  request->lse = all->expected_lse;
  qkv_attend_run(NULL, request, 1);
  request->out = all->expected + all->rows * VALUE_DIM;
  request->lse = all->expected_lse + all->rows;
}

static void free_asked(asked *all) {
  free(all->values);
  free(all->expected);
  free(all->expected_lse);
  free_tensor(&all->q);
}

// Some requests are cancelled, before they begin or meanwhile.
static void cancel_some(world *w, qkv_attend *requests, asked *all, size_t count) {
  for (size_t i = 0; i < count; i++) {
    const bool cancelled = random_below(&w->seed, 5) == 0;
    requests[i].stopped = cancelled ? impatient : NULL;
    requests[i].stopped_context = &all[i].patience;
    atomic_store(&all[i].patience, (long)random_below(&w->seed, 12));
  }
}

static void check_batch(qkv_pool *pool, const qkv_attend *requests, const asked *all, size_t count) {
  for (size_t i = 0; i < count; i++) {
    memset(requests[i].out, 0xff, all[i].rows * VALUE_DIM * sizeof(float));
    memset(requests[i].lse, 0xff, all[i].rows * sizeof(float));
  }
  qkv_attend_run(pool, requests, count);
  for (size_t i = 0; i < count; i++) {
    if (requests[i].stopped != NULL) continue;
    assert_memory_equal(requests[i].out, all[i].expected, all[i].rows * VALUE_DIM * sizeof(float));
    assert_memory_equal(requests[i].lse, all[i].expected_lse, all[i].rows * sizeof(float));
  }
}

static uint64_t queries_of(const qkv_attend *request) {
  return (uint64_t)request->q.dims[0];
}

// The same in turns.
static void check_turns(qkv_pool *pool, const qkv_attend *requests, const asked *all, size_t count, uint64_t cost) {
  qkv_attend left[REQUESTS];
  uint64_t done[REQUESTS] = {0}, queries;
  for (size_t i = 0; i < count; i++) {
    memset(requests[i].out, 0xff, all[i].rows * VALUE_DIM * sizeof(float));
    memset(requests[i].lse, 0xff, all[i].rows * sizeof(float));
  }
  for (size_t first = 0; first < count;) {
    for (size_t i = first; i < count; i++)
      left[i - first] = qkv_attend_slice(&requests[i], done[i], queries_of(&requests[i]) - done[i]);
    const size_t taken = qkv_attend_take(left, count - first, cost, &queries);
    assert_in_range(taken, 1, count - first);
    qkv_attend *last = &left[taken - 1];
    assert_in_range(queries, 1, queries_of(last));
    *last = qkv_attend_slice(last, 0, queries);
    assert_true(last->continues == (done[first + taken - 1] + queries < queries_of(&requests[first + taken - 1])));
    qkv_attend_run(pool, left, taken);
    for (size_t i = 0; i < taken; i++) done[first + i] += queries_of(&left[i]);
    while (first < count && done[first] == queries_of(&requests[first])) first++;
  }
  for (size_t i = 0; i < count; i++) {
    assert_memory_equal(requests[i].out, all[i].expected, all[i].rows * VALUE_DIM * sizeof(float));
    assert_memory_equal(requests[i].lse, all[i].expected_lse, all[i].rows * sizeof(float));
  }
}

// Checks what the header says of groups. Returns how many ranges of requests are in one.
static size_t check_groups(const qkv_attend *requests, size_t count) {
  static bool grouped[REQUESTS][256];
  size_t all = 0;
  qkvi_sharing sharing;
  memset(grouped, 0, sizeof grouped);
  qkvi_share_find(requests, count, SIZE_MAX, NULL, &sharing);
  for (size_t g = 0; g < sharing.count; g++) {
    const qkvi_share_group *group = &sharing.groups[g];
    const qkv_range_slot *slots = requests[group->members[0]].layer->ranges;
    size_t rows = 0;
    assert_true(group->member_count >= 2 && group->count >= 1);
    for (size_t m = 0; m < group->member_count; m++) {
      const size_t place = group->members[m];
      assert_true(place < count && (m == 0 || place > group->members[m - 1]));
      rows += qkvi_attend_rows(&requests[place]);
      for (size_t range = group->first; range < group->first + group->count; range++, all++) {
        assert_ptr_equal(requests[place].layer->ranges[range].range, slots[range].range);
        assert_false(grouped[place][range]);
        grouped[place][range] = true;
      }
    }
    assert_true(rows <= QKV_QUERY_BLOCK);
  }
  qkvi_share_clear(&sharing);
  return all;
}

static size_t check_world(uint64_t seed) {
  static const size_t threads[] = {0, 1, 7};
  qkv_attend requests[REQUESTS];
  asked all[REQUESTS];
  world w;
  begin(&w, seed, 1 + seed % 4);
  grow(&w);
  if (w.spills) chill(&w);
  const size_t count = 2 + random_below(&w.seed, REQUESTS - 1);
  for (size_t i = 0; i < count; i++) ask(&w, &requests[i], &all[i]);
  const size_t shared = check_groups(requests, count);
  for (size_t t = 0; t < sizeof threads / sizeof *threads; t++) {
    qkv_pool *pool = NULL;
    if (threads[t] > 0) assert_int_equal(qkv_pool_create(threads[t], 4, &pool, NULL), QKV_OK);
    for (size_t i = 0; i < count; i++) requests[i].stopped = NULL;
    check_batch(pool, requests, all, count);
    check_turns(pool, requests, all, count, (uint64_t)1 << random_below(&w.seed, 20));
    cancel_some(&w, requests, all, count);
    check_batch(pool, requests, all, count);
    qkv_pool_destroy(&pool);
  }
  for (size_t i = 0; i < count; i++) free_asked(&all[i]);
  end(&w);
  return shared;
}

// Of a kernel variant. ThreadSanitizer looks for races, which are not the variant's.
#ifdef __SANITIZE_THREAD__
enum { WORLDS = 8 };
#else
enum { WORLDS = 24 };
#endif

static void test_bits_are_those_of_requests_alone(void **state) {
  (void)state;
  for (size_t row = 0; qkv_kernels_at(row) != NULL; row++) {
    size_t shared = 0;
    qkv_kernels_setup(qkv_kernels_at(row)->needs);
    for (uint64_t seed = 1; seed <= WORLDS; seed++) shared += check_world(100 * row + seed);
    print_message("%zu ranges of requests were in groups\n", shared);
    assert_true(shared * 24 > 200 * WORLDS);
  }
  qkv_kernels_setup(UINT32_MAX);
}

// ---- Groups ----

static void make_request(world *w, qkv_attend *request, asked *all, size_t layer, int64_t queries) {
  *all = (asked){.rows = (size_t)queries * w->model.q_heads};
  all->values = random_floats(5, all->rows * DIM);
  make_tensor(&all->q, QKV_FP32, all->values, queries, w->model.q_heads, DIM);
  *request = (qkv_attend){.layer = &w->layers[layer], .q = all->q.tensor};
  request->position = w->layers[layer].length - (uint64_t)queries;
}

typedef struct expected_group {
  size_t first, count, member_count;
  size_t members[4];
} expected_group;

static void expect_groups(const qkv_attend *requests, size_t count, size_t members_max, const expected_group *groups,
                          size_t group_count) {
  qkvi_sharing found;
  qkvi_share_find(requests, count, members_max, NULL, &found);
  assert_int_equal(found.count, group_count);
  for (size_t i = 0; i < group_count; i++) {
    assert_int_equal(found.groups[i].first, groups[i].first);
    assert_int_equal(found.groups[i].count, groups[i].count);
    assert_int_equal(found.groups[i].member_count, groups[i].member_count);
    assert_memory_equal(found.groups[i].members, groups[i].members, groups[i].member_count * sizeof(size_t));
  }
  qkvi_share_clear(&found);
}

static void expect_taken(const qkv_attend *requests, size_t count, uint64_t cost, size_t taken, uint64_t queries) {
  uint64_t found = 0;
  assert_int_equal(qkv_attend_take(requests, count, cost, &found), taken);
  assert_int_equal(found, queries);
}

// Two heads a KV head: 16 queries are a block. Layers 1 and 2 share all but 100 tokens with layer 0.
static void test_turns_take_what_is_worth_their_cost(void **state) {
  (void)state;
  world w;
  qkv_attend requests[4], many;
  asked all[4], asked_many;
  begin(&w, 10, 2);
  add_layer(&w, NULL, 0);
  append(&w, &w.layers[0], 0, 8000);
  for (size_t i = 1; i < 3; i++) append(&w, add_layer(&w, &w.layers[0], UINT64_MAX), 0, 100);
  append(&w, add_layer(&w, NULL, 0), 0, 8000);
  for (size_t i = 0; i < 4; i++) make_request(&w, &requests[i], &all[i], i, 1);
  const uint64_t alone = qkv_attend_cost(&requests[0]);
  expect_taken(requests, 4, 1, 1, 1);  // the first one in any case
  expect_taken(requests, 4, alone, 1, 1);
  expect_taken(requests, 4, 3 * alone / 2, 3, 1);  // what the forks share is read once
  expect_taken(requests, 4, 3 * alone, 4, 1);
  make_request(&w, &many, &asked_many, 0, 50);
  many.options.not_causal = true;
  expect_taken(&many, 1, 1, 1, 16);
  expect_taken(&many, 1, 5 * alone / 2, 1, 48);
  expect_taken(&many, 1, 100 * alone, 1, 50);
  for (size_t i = 0; i < 4; i++) free_asked(&all[i]);
  free_asked(&asked_many);
  end(&w);
}

static void test_turns_become_as_long_as_they_should(void **state) {
  (void)state;
  enum { MS = 1000000 };
  assert_int_equal(qkv_attend_next_cost(1000, 101 * MS), 500);
  assert_int_equal(qkv_attend_next_cost(1000, 100 * MS), 1000);
  assert_int_equal(qkv_attend_next_cost(1000, 50 * MS), 1000);
  assert_int_equal(qkv_attend_next_cost(1000, 49 * MS), 2000);
  assert_int_equal(qkv_attend_next_cost(1, 101 * MS), 1);
  assert_int_equal(qkv_attend_next_cost((uint64_t)1 << 50, 0), (uint64_t)1 << 50);
}

// As it is drawn: A and B share three ranges of 256 tokens, C two of them.
static void test_groups_are_as_drawn(void **state) {
  (void)state;
  static const expected_group drawn[] = {{0, 2, 3, {0, 1, 2}}, {2, 1, 2, {0, 1}}}, two = {0, 3, 2, {0, 1}},
                              last = {1, 2, 2, {0, 1}};
  world w;
  qkv_attend requests[3];
  asked all[3];
  begin(&w, 9, 1);
  add_layer(&w, NULL, 0);
  for (size_t i = 0; i < 3; i++) append(&w, &w.layers[0], i, 256);
  append(&w, add_layer(&w, &w.layers[0], UINT64_MAX), 0, 100);
  append(&w, add_layer(&w, &w.layers[0], 512), 0, 100);
  for (size_t i = 0; i < 3; i++) make_request(&w, &requests[i], &all[i], i, 1);
  expect_groups(requests, 3, SIZE_MAX, drawn, 2);
  expect_groups(requests, 2, SIZE_MAX, &two, 1);
  expect_groups(requests, 1, SIZE_MAX, NULL, 0);
  expect_groups(requests, 3, 1, NULL, 0);
  expect_groups(requests, 3, 2, (expected_group[]){{0, 3, 2, {0, 1}}}, 1);
  requests[1].options.begin = 1;  // sees less than all of range 0
  expect_groups(requests, 2, SIZE_MAX, &last, 1);
  requests[1].options = (qkv_attend_options){.sliding_window = 600};
  expect_groups(requests, 2, SIZE_MAX, &(expected_group){2, 1, 2, {0, 1}}, 1);
  requests[1].options = (qkv_attend_options){.end = 767};
  expect_groups(requests, 2, SIZE_MAX, &(expected_group){0, 2, 2, {0, 1}}, 1);
  requests[1].options = (qkv_attend_options){.soft_cap = 3};
  expect_groups(requests, 2, SIZE_MAX, NULL, 0);
  requests[1].options = (qkv_attend_options){.precision = QKV_PRECISION_FP32};
  expect_groups(requests, 2, SIZE_MAX, NULL, 0);
  for (size_t i = 0; i < 3; i++) free_asked(&all[i]);
  end(&w);
}

// Rows of a group are a block's at most, and groups are about as large as each other; requests of more rows than half
// a block are in none.
static void test_groups_hold_a_block_of_rows(void **state) {
  (void)state;
  static const expected_group even[] = {{0, 1, 3, {0, 1, 2}}, {0, 1, 3, {3, 4, 5}}}, some[] = {{0, 1, 2, {0, 3}}};
  world w;
  qkv_attend requests[6];
  asked all[6];
  begin(&w, 9, 2);
  append(&w, add_layer(&w, NULL, 0), 0, 256);
  for (size_t i = 1; i < 6; i++) add_layer(&w, &w.layers[0], UINT64_MAX);
  for (size_t i = 0; i < 6; i++) {
    append(&w, &w.layers[i], 1, 100);
    make_request(&w, &requests[i], &all[i], i, 4);  // 8 rows: six are 48
  }
  expect_groups(requests, 6, SIZE_MAX, even, 2);
  for (size_t i = 0; i < 6; i++) free_asked(&all[i]);
  for (size_t i = 0; i < 4; i++) make_request(&w, &requests[i], &all[i], i, i % 3 == 0 ? 8 : 9);  // 16 and 18 rows
  expect_groups(requests, 4, SIZE_MAX, some, 1);
  for (size_t i = 0; i < 4; i++) free_asked(&all[i]);
  end(&w);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_bits_are_those_of_requests_alone),
      cmocka_unit_test(test_turns_take_what_is_worth_their_cost),
      cmocka_unit_test(test_turns_become_as_long_as_they_should),
      cmocka_unit_test(test_groups_are_as_drawn),
      cmocka_unit_test(test_groups_hold_a_block_of_rows),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
