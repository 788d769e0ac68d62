// Pages at other tiers: what is read, what is freed, what comes back, and a model of it all.
#include "engine/cache/layer_retier.h"
#include "engine/codec/narrow.h"

#include "tests/engine/cache/retier_fixture.h"

static const qkv_ema_options every = {.alpha = 0.9, .sample_every = 1};

static void random_tiers(uint64_t *seed, uint32_t heads, unsigned most, qkv_head_tiers *tiers) {
  for (size_t i = 0; i < heads * sizeof *tiers; i++) ((uint8_t *)tiers)[i] = (uint8_t)random_below(seed, most + 1);
}

static void less_is_read_and_answers_are_those_of_the_rows(void **state) {
  (void)state;
  scene s;
  question asked;
  setup_scene(&s, test_model(2, 4, 64, 96, QKV_FP16), test_policy(4, 3, 20), 500, every, false);
  must_append(&s.layer, &s.rows, 0, 500);
  ask(&asked, &s.layer, 3, 497, 3, 2);
  run(NULL, &asked.request);
  check_answers(&asked);
  uint64_t seed = 4, cost = qkv_attend_cost(&asked.request);
  uint64_t used = qkv_arena_read(s.arena).bytes_used, coded = qkv_layer_read_usage(&s.layer).bytes_coded;
  for (unsigned most = 32; most > 0; most -= 8) {
    uint64_t fell = 0;
    for (size_t i = 0; i < s.layer.page_count; i++) {
      qkv_head_tiers tiers[2], now[2], held[2];
      random_tiers(&seed, 2, most, tiers);
      const uint32_t bytes = qkv_layer_page(&s.layer, i)->bytes;
      assert_int_equal(set_tiers(&s.layer, i, tiers, NULL), QKV_OK);
      fell += bytes - qkv_layer_page(&s.layer, i)->bytes;
      qkv_layer_tiers(&s.layer, qkv_layer_page(&s.layer, i), now, held);
      for (size_t g = 0; g < sizeof tiers; g++) {
        assert_true(((uint8_t *)now)[g] <= ((uint8_t *)tiers)[g]);
        assert_int_equal(((uint8_t *)now)[g], ((uint8_t *)held)[g]);
      }
    }
    assert_true(fell > 0);
    assert_valid(&s.layer);
    run(NULL, &asked.request);
    check_answers(&asked);
    // What is not there is not read, and what is not read is not held.
    assert_int_equal(qkv_attend_cost(&asked.request), cost - fell);
    assert_int_equal(qkv_arena_read(s.arena).bytes_used, used - fell);
    assert_int_equal(qkv_layer_read_usage(&s.layer).bytes_coded, coded - fell);
    cost -= fell;
    used -= fell;
    coded -= fell;
  }
  forget(&asked);
  teardown_scene(&s);
}

// Rows that are held at a lower tier still tell the same rows from others.
static void appends_are_repeated_at_any_tier(void **state) {
  (void)state;
  scene s;
  setup_scene(&s, test_model(1, 1, 32, 32, QKV_FP16), test_policy(4, 4, 0), 300, every, false);
  must_append(&s.layer, &s.rows, 0, 256);
  set_even_tier(&s.layer, 1, 9);
  set_even_tier(&s.layer, 2, 0);
  must_append(&s.layer, &s.rows, 30, 300);
  assert_int_equal(s.layer.length, 300);
  s.rows.k[70 * 32] += 8;  // in page 1
  qkv_error error = {0};
  assert_int_equal(append_range(&s.layer, &s.rows, 64, 128, &error), QKV_ALREADY_EXISTS);
  assert_string_equal(error.text, "position 70 holds other rows already");
  teardown_scene(&s);
}

static void full_pages_come_back_bit_for_bit(void **state) {
  (void)state;
  scene s;
  setup_scene(&s, test_model(2, 1, 64, 32, QKV_FP16), test_policy(4, 2.5, 0), 64 * 4, every, true);
  must_append(&s.layer, &s.rows, 0, 64 * 4);
  uint8_t *before[4];
  const uint64_t used = qkv_arena_read(s.arena).bytes_used;
  const qkv_layer_usage usage = qkv_layer_read_usage(&s.layer);
  for (size_t i = 0; i < 4; i++) {
    before[i] = malloc(qkv_layer_page(&s.layer, i)->bytes);
    assert_non_null(before[i]);
    memcpy(before[i], qkv_layer_page(&s.layer, i)->page, qkv_layer_page(&s.layer, i)->bytes);
  }
  for (unsigned round = 0; round < 3; round++) {
    for (size_t i = 0; i < 4; i++) set_even_tier(&s.layer, i, (uint8_t)(4 + 3 * i + round));
    assert_valid(&s.layer);
    const qkv_layer_usage down = qkv_layer_read_usage(&s.layer);
    assert_true(down.bytes_coded < usage.bytes_coded);
    assert_int_equal(down.bytes_overhead, usage.bytes_overhead + usage.bytes_coded);
    assert_int_equal(qkv_arena_read(s.arena).bytes_used, used + down.bytes_coded);
    // Half the way: what the full page gives when it is cut there.
    set_even_tier(&s.layer, 2, 18);
    uint8_t *half = aligned_alloc(64, 1 << 16);
    assert_non_null(half);
    qkv_head_tiers tiers[2];
    memset(tiers, 18, sizeof tiers);
    const qkv_page_entry *entry = qkv_layer_page(&s.layer, 2);
    const size_t bytes = entry->coder->codec->planes->drop(entry->coder, entry->full, tiers, half);
    assert_int_equal(bytes, entry->bytes);
    assert_memory_equal(half, entry->page, bytes);
    assert_memory_equal(entry->full, before[2], entry->full_bytes);
    free(half);
  }
  for (size_t i = 0; i < 4; i++) {
    set_even_tier(&s.layer, i, QKV_TIER_MAX);
    assert_null(qkv_layer_page(&s.layer, i)->full);
    assert_memory_equal(qkv_layer_page(&s.layer, i)->page, before[i], qkv_layer_page(&s.layer, i)->bytes);
    free(before[i]);
  }
  assert_valid(&s.layer);
  assert_int_equal(qkv_arena_read(s.arena).bytes_used, used);
  teardown_scene(&s);
}

// Cutting needs no memory of the arena; keeping the full page, too, does, and so does going up.
static void a_full_arena_can_be_emptied(void **state) {
  (void)state;
  qkv_model model = test_model(2, 1, 64, 64, QKV_FP16);
  for (int keep_full = 0; keep_full < 2; keep_full++) {
    scene s;
    setup_scene(&s, model, test_policy(4, 4, 0), 64 * 6, every, keep_full != 0);
    must_append(&s.layer, &s.rows, 0, 64 * 6);
    const qkv_arena_stats stats = qkv_arena_read(s.arena);
    const uint64_t rest = stats.bytes_max - stats.bytes_used;
    assert_int_equal(qkv_arena_reserve(s.arena, rest, NULL), QKV_OK);
    qkv_head_tiers tiers[2];
    memset(tiers, 8, sizeof tiers);
    qkv_error error = {0};
    if (keep_full) {
      assert_int_equal(set_tiers(&s.layer, 0, tiers, &error), QKV_RESOURCE_EXHAUSTED);
      assert_memory_equal(error.text, "memory-budget is ", 17);
      assert_null(qkv_layer_page(&s.layer, 0)->full);
    } else {
      assert_int_equal(set_tiers(&s.layer, 0, tiers, &error), QKV_OK);
      assert_true(qkv_arena_read(s.arena).bytes_used < stats.bytes_used);
    }
    assert_valid(&s.layer);
    qkv_arena_unreserve(s.arena, rest);
    teardown_scene(&s);
  }
}

// A cut of an image that is not there any more changes nothing, even where another page has its place.
static void late_cuts_are_void(void **state) {
  (void)state;
  scene s;
  setup_scene(&s, test_model(1, 1, 32, 32, QKV_FP16), test_policy(4, 4, 0), 64 * 4, every, false);
  must_append(&s.layer, &s.rows, 0, 64 * 4);
  qkv_head_tiers tiers;
  qkv_cut cuts[3];
  memset(&tiers, 8, sizeof tiers);
  for (size_t i = 0; i < 3; i++) {
    assert_true(qkv_layer_cut(&s.layer, i + 1, qkv_layer_page(&s.layer, i + 1)->serial, &tiers, &cuts[i]));
  }
  set_even_tier(&s.layer, 1, 16);            // exchanged meanwhile
  qkv_layer_truncate(&s.layer, 64 * 2 + 5);  // page 3 is gone, page 2 has fewer tokens but is the same image
  assert_int_equal(qkv_layer_exchange(&s.layer, &cuts[0], NULL), QKV_OK);
  assert_int_equal(qkv_page_entry_of(qkv_layer_page(&s.layer, 1)->page, 0)->tier_k[0], 16);
  assert_int_equal(qkv_layer_exchange(&s.layer, &cuts[1], NULL), QKV_OK);
  assert_int_equal(qkv_page_entry_of(qkv_layer_page(&s.layer, 2)->page, 0)->tier_k[0], 8);
  assert_int_equal(qkv_layer_page(&s.layer, 2)->tokens, 5);
  must_append(&s.layer, &s.rows, 64 * 2 + 5, 64 * 4);
  assert_int_equal(s.layer.page_count, 4);
  assert_int_equal(qkv_layer_exchange(&s.layer, &cuts[2], NULL), QKV_OK);
  assert_int_equal(qkv_page_entry_of(qkv_layer_page(&s.layer, 3)->page, 0)->tier_k[0], 32);
  assert_valid(&s.layer);
  for (size_t i = 0; i < 3; i++) qkv_cut_deinit(&cuts[i]);
  qkv_cut none;
  assert_false(qkv_layer_cut(&s.layer, 9, 0, &tiers, &none));
  assert_false(qkv_layer_cut(&s.layer, 1, qkv_layer_page(&s.layer, 1)->serial + 1, &tiers, &none));
  teardown_scene(&s);
}

// Tokens that are asked for weigh more, keys that hardly matter less, and averages stay with their page.
static void snapshots_show_attention(void **state) {
  (void)state;
  scene s;
  question asked;
  qkv_model model = test_model(2, 2, 64, 64, QKV_FP16);
  setup_scene(&s, model, test_policy(4, 4, 0), 64 * 6, every, false);
  must_append(&s.layer, &s.rows, 0, 64 * 6);
  ask(&asked, &s.layer, 1, 64 * 6, 3, 0);
  // Head 1 asks for token 133: a query along its key.
  for (size_t h = 2; h < 4; h++) {
    for (size_t c = 0; c < 64; c++) asked.q[h * 64 + c] = 4 * s.rows.k[(133 * 2 + 1) * 64 + c];
  }
  free_tensor(&asked.tensor);
  make_tensor(&asked.tensor, QKV_FP32, asked.q, 1, 4, 64);
  asked.request.q = asked.tensor.tensor;
  for (int i = 0; i < 40; i++) run(NULL, &asked.request);

  qkv_retier_snapshot snapshot;
  qkv_layer_snapshot(&s.layer, 0, 0, false, &snapshot);
  assert_true(snapshot.counted);
  assert_int_equal(snapshot.page_count, 6);
  assert_int_equal(snapshot.lane_count, 4);
  const size_t hot = (2 * 2 + 1) * 2 * QKV_PAGE_GROUPS;  // page 2, head 1; token 133 is slot 5
  for (size_t i = 0; i < 6 * 2 * 2 * QKV_PAGE_GROUPS; i++) {
    const qkv_retier_group *group = &snapshot.groups[i];
    assert_int_equal(group->tier, 32);
    assert_int_equal(group->most, 32);
    assert_false(group->fixed);
    assert_true(group->weight >= 0);
    if (i == hot || i == hot + QKV_PAGE_GROUPS) {
      assert_true(group->peak > 0.9f);
    } else {
      assert_true(group->peak < 0.05f);
    }
  }
  // Head 0 asks with nothing: all alike.
  assert_float_equal(snapshot.groups[0].peak, 1.0 / (64 * 6), 1e-4);
  assert_true(snapshot.groups[hot + QKV_PAGE_GROUPS].weight > 4 * snapshot.groups[QKV_PAGE_GROUPS].weight);
  assert_int_equal(snapshot.pages[3].quiet_for, 40);
  qkv_retier_snapshot_deinit(&snapshot);

  set_even_tier(&s.layer, 2, 16);
  qkv_layer_snapshot(&s.layer, 64 * 2 + 1, 64 * 3, false, &snapshot);
  assert_int_equal(snapshot.page_count, 1);
  assert_int_equal(snapshot.pages[0].index, 2);
  assert_int_equal(snapshot.pages[0].quiet_for, 0);
  assert_true(snapshot.pages[0].lost);
  assert_int_equal(snapshot.groups[0].most, 16);
  assert_true(snapshot.groups[2 * QKV_PAGE_GROUPS].peak > 0.9f);
  qkv_retier_snapshot_deinit(&snapshot);
  forget(&asked);
  teardown_scene(&s);
}

// ---- Attention-weighted bits ----

// sum_t a_t |k_t - what is held of k_t|^2, with the weights of the query `asked` over the exact keys.
static double weighted_distortion(const scene *s, const question *asked) {
  double *weights = calloc(s->layer.length, sizeof *weights), total = 0;
  assert_non_null(weights);
  exact_weights(asked, s->rows.k, 0, 0, weights);
  float *held = decoded_rows(&s->layer, QKV_K);
  const size_t dim = s->model.key_dim;
  for (size_t t = 0; t < s->layer.length; t++) {
    double miss = 0;
    for (size_t c = 0; c < dim; c++) miss += square((double)s->rows.k[t * dim + c] - (double)held[t * dim + c]);
    total += weights[t] * miss;
  }
  free(weights);
  free(held);
  return total;
}

// Every other run of 32 tokens is about what is asked. Tokens that are attended get more bits than the others, at an
// average of 3: published is that this takes 47 to 70 % off the distortion of keys, weighted by attention.
static void bits_by_attention_halve_the_weighted_distortion(void **state) {
  (void)state;
  enum { TOKENS = 64 * 8, DIM = 64, RUN = 32 };
  scene s, even;
  question asked;
  scene *const scenes[] = {&s, &even};
  float topic[DIM];
  uint64_t seed = 11;
  for (size_t c = 0; c < DIM; c++) topic[c] = random_below(&seed, 2) == 0 ? -1 : 1;
  for (size_t i = 0; i < 2; i++) {
    setup_scene(scenes[i], test_model(1, 1, DIM, DIM, QKV_FP32), test_policy(4, 4, 0), TOKENS, every, false);
    for (size_t t = 0; t < TOKENS; t++) {
      for (size_t c = 0; c < DIM && t / RUN % 2 == 1; c++) scenes[i]->rows.k[t * DIM + c] += topic[c];
    }
    must_append(&scenes[i]->layer, &scenes[i]->rows, 0, TOKENS);
  }
  ask(&asked, &s.layer, 1, TOKENS, 3, 1);
  memcpy(asked.q, topic, sizeof topic);
  free_tensor(&asked.tensor);
  make_tensor(&asked.tensor, QKV_FP32, asked.q, 1, 1, DIM);
  asked.request.q = asked.tensor.tensor;
  for (int i = 0; i < 40; i++) run(NULL, &asked.request);
  qkv_retier_policy policy = QKV_RETIER_POLICY;
  qkv_retier_snapshot snapshot;
  qkv_retier_plan plan;
  qkv_error error = {0};
  policy.bits = 3;
  policy.sinks = 0;
  qkv_layer_snapshot(&s.layer, 0, 0, false, &snapshot);
  assert_int_equal(qkv_retier_decide(&snapshot, &policy, &plan, &error), QKV_OK);
  for (size_t i = 0; i < plan.page_count; i++) {
    assert_int_equal(set_tiers(&s.layer, snapshot.pages[plan.pages[i]].index, &plan.tiers[i], &error), QKV_OK);
  }
  for (size_t i = 0; i < even.layer.page_count; i++) set_even_tier(&even.layer, i, 24);
  assert_true(qkv_layer_read_usage(&s.layer).bytes_coded <= qkv_layer_read_usage(&even.layer).bytes_coded * 1.01);
  const double ratio = weighted_distortion(&s, &asked) / weighted_distortion(&even, &asked);
  print_message("weighted distortion at 3 bits: %.2f of that of even bits\n", ratio);
  assert_true(ratio < 0.53);
  qkv_retier_plan_deinit(&plan);
  qkv_retier_snapshot_deinit(&snapshot);
  forget(&asked);
  teardown_scene(&s);
  teardown_scene(&even);
}

// ---- Random operations against an oracle that keeps every full page ----

// What a page should be: its rows as they were coded, and the tiers of each group.
typedef struct oracle_page {
  uint8_t *full;
  uint32_t bytes, tokens;
  qkv_head_tiers most[2], now[2];  // most: what is held
} oracle_page;

typedef struct oracle {
  oracle_page pages[64];
  size_t count;
} oracle;

static void oracle_see_new_pages(oracle *o, const qkv_layer *layer) {
  for (; o->count < layer->page_count; o->count++) {
    const qkv_page_entry *entry = qkv_layer_page(layer, o->count);
    oracle_page *page = &o->pages[o->count];
    assert_true(o->count < 64);
    *page = (oracle_page){.full = aligned_alloc(64, entry->bytes), .bytes = entry->bytes, .tokens = entry->tokens};
    assert_non_null(page->full);
    memcpy(page->full, entry->page, entry->bytes);
    qkvi_embedded_planes.tiers(page->full, page->most);
    qkvi_embedded_planes.tiers(page->full, page->now);
  }
}

static void oracle_truncate(oracle *o, const qkv_layer *layer) {
  while (o->count > layer->page_count) free(o->pages[--o->count].full);
  if (o->count > 0) o->pages[o->count - 1].tokens = qkv_layer_page(layer, o->count - 1)->tokens;
}

// Without keep_full the page is all there is to cut from, the next time, too.
static void oracle_set(oracle_page *page, const qkv_coder *coder, const qkv_head_tiers *tiers, bool keep_full) {
  for (size_t i = 0; i < sizeof page->now; i++) {
    const uint8_t want = ((const uint8_t *)tiers)[i], most = ((uint8_t *)page->most)[i];
    ((uint8_t *)page->now)[i] = want < most ? want : most;
  }
  if (keep_full) return;
  uint8_t *cut = aligned_alloc(64, page->bytes);
  assert_non_null(cut);
  coder->codec->planes->drop(coder, page->full, tiers, cut);
  free(page->full);
  page->full = cut;
  memcpy(page->most, page->now, sizeof page->most);
}

// Every page is what its full image gives when it is cut once.
static void oracle_check(const oracle *o, const qkv_layer *layer) {
  uint8_t *image = aligned_alloc(64, 1 << 17);
  assert_non_null(image);
  assert_int_equal(o->count, layer->page_count);
  for (size_t i = 0; i < o->count; i++) {
    const qkv_page_entry *entry = qkv_layer_page(layer, i);
    const size_t bytes = entry->coder->codec->planes->drop(entry->coder, o->pages[i].full, o->pages[i].now, image);
    assert_int_equal(entry->tokens, o->pages[i].tokens);
    assert_int_equal(entry->bytes, bytes);
    assert_memory_equal(entry->page, image, bytes);
  }
  free(image);
}

static void random_policy_step(scene *s, oracle *o, uint64_t *seed, bool keep_full) {
  qkv_retier_snapshot snapshot;
  qkv_retier_plan plan;
  qkv_retier_policy policy = QKV_RETIER_POLICY;
  policy.bits = 0.5 * (double)(2 + random_below(seed, 7));
  policy.sinks = random_below(seed, 2) * 20;
  policy.rest = random_below(seed, 4);
  policy.pages_max = random_below(seed, 6);
  qkv_layer_snapshot(&s->layer, 0, 0, false, &snapshot);
  assert_int_equal(qkv_retier_decide(&snapshot, &policy, &plan, NULL), QKV_OK);
  for (size_t i = 0; i < plan.page_count; i++) {
    const size_t index = snapshot.pages[plan.pages[i]].index;
    assert_int_equal(set_tiers(&s->layer, index, plan.tiers + i * snapshot.kv_heads, NULL), QKV_OK);
    oracle_set(&o->pages[index], s->layer.coder, plan.tiers + i * snapshot.kv_heads, keep_full);
  }
  qkv_retier_plan_deinit(&plan);
  qkv_retier_snapshot_deinit(&snapshot);
}

static void random_step(scene *s, oracle *o, uint64_t *seed, bool keep_full) {
  qkv_layer *layer = &s->layer;
  const uint64_t what = random_below(seed, 10);
  if (what < 4) {
    uint64_t end = layer->length + 1 + random_below(seed, 150);
    if (end > s->rows.tokens) end = s->rows.tokens;
    // Some of it again.
    const uint64_t begin = layer->length - random_below(seed, layer->length < 40 ? layer->length + 1 : 40);
    if (end > begin) must_append(layer, &s->rows, begin, end);
    oracle_see_new_pages(o, layer);
  } else if (what == 4) {
    qkv_layer_truncate(layer, random_below(seed, layer->length + 1));
    oracle_truncate(o, layer);
  } else if (what == 5 && layer->length > 0) {
    question asked;
    ask(&asked, layer, 1 + (int64_t)random_below(seed, 3), layer->length, *seed, 3);
    run(NULL, &asked.request);
    check_answers(&asked);
    forget(&asked);
  } else if (what == 6) {
    random_policy_step(s, o, seed, keep_full);
  } else if (layer->page_count > 0) {
    qkv_head_tiers tiers[2];
    const size_t index = random_below(seed, layer->page_count);
    if (random_below(seed, 3) == 0) {
      memset(tiers, (int)random_below(seed, QKV_TIER_MAX + 1), sizeof tiers);
    } else {
      random_tiers(seed, 2, 40, tiers);
    }
    assert_int_equal(set_tiers(layer, index, tiers, NULL), QKV_OK);
    oracle_set(&o->pages[index], layer->coder, tiers, keep_full);
  }
}

static void random_operations_follow_the_oracle(void **state) {
  (void)state;
  for (uint64_t round = 0; round < 8; round++) {
    scene s;
    oracle o = {0};
    uint64_t seed = 100 + round;
    const bool keep_full = round % 2 == 1;
    setup_scene(&s, test_model(2, 2, 40, 24, QKV_BF16), test_policy(4, 3.5, 16), 1600, every, keep_full);
    for (int i = 0; i < 250; i++) {
      random_step(&s, &o, &seed, keep_full);
      if (i % 10 != 0) continue;
      assert_valid(&s.layer);
      oracle_check(&o, &s.layer);
    }
    assert_valid(&s.layer);
    oracle_check(&o, &s.layer);
    qkv_layer_truncate(&s.layer, 0);
    oracle_truncate(&o, &s.layer);
    teardown_scene(&s);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(less_is_read_and_answers_are_those_of_the_rows),
      cmocka_unit_test(appends_are_repeated_at_any_tier),
      cmocka_unit_test(full_pages_come_back_bit_for_bit),
      cmocka_unit_test(a_full_arena_can_be_emptied),
      cmocka_unit_test(late_cuts_are_void),
      cmocka_unit_test(snapshots_show_attention),
      cmocka_unit_test(bits_by_attention_halve_the_weighted_distortion),
      cmocka_unit_test(random_operations_follow_the_oracle),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
