// Layers that share pages and exact rows, against layers that share nothing: random sequences of appends, forks,
// truncations, demotions, evictions, restores and ends.
#include "engine/cache/layer_internal.h"
#include "engine/cache/layer_retier.h"
#include "engine/cache/layer_spill.h"
#include "engine/codec/narrow.h"
#include "tests/engine/cache/backing_double.h"
#include "tests/engine/cache/retier_fixture.h"

enum { HOLDERS = 6, STEPS = 60, TOKENS_MAX = 8000, PAGES_MAX = 256 };

// An operation that a layer has run, to be replayed on `variant`, a layer that shares nothing.
typedef enum told_kind { TOLD_APPEND, TOLD_TRUNCATE, TOLD_SEAL } told_kind;
typedef struct told {
  told_kind kind;
  uint64_t number;  // tokens, or a position
  uint64_t seed;    // of the rows
} told;

typedef struct expected_page {
  void *bytes;  // of the image
  uint32_t size;
} expected_page;

// A layer that shares, and what it should hold: lengths, exact rows and images as they are coded by a layer that has
// had the same rows and shares nothing, and each image as this layer has last left it.
typedef struct holder {
  bool alive;
  qkv_layer layer, variant;
  expected_page pages[PAGES_MAX];
  size_t count;
  told told[STEPS + 2];
  size_t told_count;
} holder;

typedef struct world {
  qkv_model model;
  qkv_policy policy;
  qkv_arena *arena, *apart;
  const qkv_coder *coder;
  backing_double backing;
  holder holders[HOLDERS];
  uint64_t seed, rows_seed, sessions;
  bool averages, full;
} world;

static void begin(world *w, uint64_t seed) {
  *w = (world){.seed = seed, .rows_seed = 1000 * seed};
  w->averages = seed % 2 == 0;
  w->full = seed % 5 == 0;
  w->model = test_model(2, 1, 16, 8, QKV_FP16);
  w->policy = test_policy(4, 3, (int64_t)(seed % 3) * 40);
  w->arena = qkv_arena_create("memory-budget", 1 << 26);
  w->apart = qkv_arena_create("memory-budget", 1 << 26);
  w->coder = test_coder(&w->model, w->policy);
  double_init(&w->backing);
}

static void init_pair(world *w, holder *h) {
  qkv_layer_config config = test_layer_config(&w->model, w->policy, 5, w->arena);
  config.backing = &w->backing.backing;
  config.session = ++w->sessions;
  config.keep_full = w->full;
  if (w->averages) config.ema = (qkv_ema_options){.alpha = 0.9, .sample_every = 1};
  *h = (holder){.alive = true};
  qkv_layer_init(&h->layer, &config, w->coder);
  config = test_layer_config(&w->model, w->policy, 5, w->apart);
  qkv_layer_init(&h->variant, &config, w->coder);
}

static void drop_expected(holder *h, size_t kept) {
  while (h->count > kept) {
    free(h->pages[--h->count].bytes);
    h->pages[h->count] = (expected_page){0};
  }
}

static void expect(expected_page *page, const void *bytes, uint32_t size) {
  void *copy = malloc(size);
  assert_non_null(copy);
  memcpy(copy, bytes, size);
  free(page->bytes);
  *page = (expected_page){.bytes = copy, .size = size};
}

static void end_holder(holder *h) {
  if (!h->alive) return;
  drop_expected(h, 0);
  qkv_layer_deinit(&h->layer);
  qkv_layer_deinit(&h->variant);
  h->alive = false;
}

static void end(world *w) {
  for (size_t i = 0; i < HOLDERS; i++) end_holder(&w->holders[i]);
  assert_int_equal(qkv_arena_read(w->arena).bytes_used, 0);
  assert_int_equal(qkv_arena_read(w->arena).bytes_reserved, 0);
  coder_destroy(w->coder);
  double_deinit(&w->backing);
  qkv_arena_destroy(&w->arena);
  qkv_arena_destroy(&w->apart);
}

// ---- What is done ----

static void tell(const world *w, qkv_layer *layer, const told *what) {
  qkv_error error = {0};
  qkv_status status = QKV_OK;
  if (what->kind == TOLD_TRUNCATE) qkv_layer_truncate(layer, what->number);
  if (what->kind == TOLD_SEAL) status = qkv_layer_seal(layer, &error);
  if (what->kind == TOLD_APPEND) {
    sequence rows = make_sequence(&w->model, what->number, what->seed);
    row_pair pair;
    uint64_t appended;
    make_pair(&pair, &rows, 0, what->number, QKV_FP16);
    status = qkv_layer_append(layer, layer->length, &pair.k.tensor, &pair.v.tensor, false, &appended, &error);
    free_pair(&pair);
    free_sequence(&rows);
  }
  if (status != QKV_OK) fail_msg("%s", error.text);
}

static void tell_both(world *w, holder *h, told what) {
  tell(w, &h->layer, &what);
  tell(w, &h->variant, &what);
  assert_true(h->told_count < STEPS + 2);
  h->told[h->told_count++] = what;
  drop_expected(h, h->variant.page_count < h->count ? h->variant.page_count : h->count);
  for (; h->count < h->variant.page_count; h->count++) {
    const qkv_page_entry *made = qkv_layer_page(&h->variant, h->count);
    expect(&h->pages[h->count], made->page, made->bytes);
  }
}

static void append(world *w, holder *h, uint64_t tokens) {
  if (h->layer.length + tokens > TOKENS_MAX || h->layer.page_count + tokens / 64 + 2 > PAGES_MAX) return;
  tell_both(w, h, (told){.kind = TOLD_APPEND, .number = tokens, .seed = w->rows_seed += 2});
}

static void truncate(world *w, holder *h, uint64_t position) {
  tell_both(w, h, (told){.kind = TOLD_TRUNCATE, .number = position});
}

static void fork_holder(world *w, holder *parent, uint64_t position) {
  holder *child = NULL;
  for (size_t i = 0; i < HOLDERS && child == NULL; i++) child = w->holders[i].alive ? NULL : &w->holders[i];
  if (child == NULL) return;
  init_pair(w, child);
  for (; child->told_count < parent->told_count; child->told_count++) {
    child->told[child->told_count] = parent->told[child->told_count];
    tell(w, &child->variant, &child->told[child->told_count]);
  }
  qkv_layer_fork(&child->layer, &parent->layer, position);
  const told cut = {.kind = TOLD_TRUNCATE, .number = position};
  tell(w, &child->variant, &cut);
  child->told[child->told_count++] = cut;
  for (; child->count < child->variant.page_count; child->count++) {
    const expected_page *from = &parent->pages[child->count];
    expect(&child->pages[child->count], from->bytes, from->size);
  }
}

static void demote(holder *h, size_t page, uint8_t tier) {
  if (page >= h->count || qkv_layer_page(&h->layer, page)->page == NULL) return;
  qkv_head_tiers tiers[2], most[2];
  qkv_error error = {0};
  const qkv_page_entry *entry = qkv_layer_page(&h->layer, page);
  const void *held = entry->full != NULL ? entry->full : entry->page;
  memset(tiers, tier, sizeof tiers);
  qkvi_embedded_planes.tiers(held, most);
  for (int head = 0; head < 2; head++) {
    for (int part = 0; part < 2; part++) {
      for (int g = 0; g < QKV_PAGE_GROUPS; g++) {
        uint8_t *wanted = &tiers[head].tiers[part][g];
        const bool cuts = qkvi_embedded_planes.part_drops(held, (uint16_t)head, (qkv_part)part);
        if (!cuts || *wanted > most[head].tiers[part][g]) *wanted = most[head].tiers[part][g];
      }
    }
  }
  void *image = aligned_alloc(64, qkv_arena_cost(((const qkv_page_header *)held)->bytes));
  const size_t bytes = entry->coder->codec->planes->drop(entry->coder, held, tiers, image);
  expect(&h->pages[page], image, (uint32_t)bytes);
  free(image);
  if (set_tiers(&h->layer, page, tiers, &error) != QKV_OK) fail_msg("%s", error.text);
}

static void restore_all(world *w, holder *h) {
  qkv_missing_page missing[PAGES_MAX];
  const size_t count = qkv_layer_missing(&h->layer, 0, 0, false, missing, PAGES_MAX);
  for (size_t i = 0; i < count; i++) {
    const double_record *record = &w->backing.records[missing[i].record];
    assert_int_not_equal(record->state, QKV_RECORD_GONE);
    void *image = qkv_arena_alloc_overhead(w->arena, missing[i].bytes);
    memcpy(image, record->page, record->bytes);
    qkv_error error = {0};
    if (restore_image(&h->layer, &missing[i], image, &error) != QKV_OK) fail_msg("%s", error.text);
  }
  assert_true(qkv_layer_holds(&h->layer, 0, UINT64_MAX));
}

// ---- What is checked ----

// A page that came back from its record is as it was put, which may be more than what left.
static void check_page(const holder *h, size_t i, expected_page *expected) {
  const qkv_page_entry *entry = qkv_layer_page(&h->layer, i), *coded = qkv_layer_page(&h->variant, i);
  assert_int_equal(entry->tokens, coded->tokens);
  if (entry->page == NULL) return;
  if (entry->bytes == expected->size && memcmp(entry->page, expected->bytes, expected->size) == 0) return;
  assert_int_equal(entry->bytes, coded->bytes);
  assert_memory_equal(entry->page, coded->page, coded->bytes);
  expect(expected, entry->page, entry->bytes);
}

static void check_exact_rows(const world *w, const holder *h) {
  for (uint64_t position = h->layer.sealed; position < h->layer.length; position++) {
    for (uint32_t head = 0; head < w->model.kv_heads; head++) {
      for (qkv_part part = QKV_K; part <= QKV_V; part++) {
        const size_t bytes = (part == QKV_K ? w->model.key_dim : w->model.value_dim) * sizeof(uint16_t);
        assert_memory_equal(qkv_layer_exact_row(&h->layer, part, position, head),
                            qkv_layer_exact_row(&h->variant, part, position, head), bytes);
      }
    }
  }
}

static void check(world *w) {
  for (size_t i = 0; i < HOLDERS; i++) {
    holder *h = &w->holders[i];
    if (!h->alive) continue;
    assert_valid(&h->layer);
    assert_int_equal(h->layer.length, h->variant.length);
    assert_int_equal(h->layer.sealed, h->variant.sealed);
    assert_int_equal(h->layer.page_count, h->count);
    for (size_t p = 0; p < h->count; p++) check_page(h, p, &h->pages[p]);
    check_exact_rows(w, h);
  }
}

static void step(world *w) {
  holder *h = &w->holders[random_below(&w->seed, HOLDERS)];
  if (!h->alive) {
    init_pair(w, h);
    append(w, h, 1 + random_below(&w->seed, 300));
    return;
  }
  const uint64_t held = h->layer.length - 5;
  switch (random_below(&w->seed, 12)) {
    case 0:
    case 1:
      append(w, h, 1 + random_below(&w->seed, 400));
      break;
    case 2:
    case 3:
      fork_holder(w, h, random_below(&w->seed, 3) == 0 ? UINT64_MAX : 5 + random_below(&w->seed, held + 1));
      break;
    case 4:
      truncate(w, h, 5 + random_below(&w->seed, held + 1));
      break;
    case 5:
    case 6:
      demote(h, random_below(&w->seed, PAGES_MAX) % (h->count + 1), (uint8_t)(8 * (1 + random_below(&w->seed, 3))));
      break;
    case 7:
    case 8:
      (void)qkv_layer_save(&h->layer);
      qkv_layer_settle(&h->layer);
      (void)evict(&h->layer, random_below(&w->seed, 3) == 0 ? UINT64_MAX : 2000, INT64_MAX - 1);
      break;
    case 9:
      restore_all(w, h);
      break;
    case 10:
      if (random_below(&w->seed, 4) == 0) tell_both(w, h, (told){.kind = TOLD_SEAL});
      break;
    default:
      end_holder(h);
  }
}

static void test_random_walks(void **state) {
  (void)state;
  for (uint64_t seed = 1; seed <= 60; seed++) {
    world w;
    begin(&w, seed);
    for (int i = 0; i < STEPS && w.backing.count + PAGES_MAX / 2 < DOUBLE_RECORDS; i++) {
      step(&w);
      check(&w);
    }
    end(&w);
  }
}

// ---- What it costs ----

static void test_shared_memory_is_held_once(void **state) {
  (void)state;
  world w;
  begin(&w, 11);  // a recent window of 80 tokens
  holder *h = w.holders;
  init_pair(&w, &h[0]);
  append(&w, &h[0], 64 * 100 + 40);
  assert_int_equal(h[0].count, 99);
  const uint64_t alone = qkv_arena_read(w.arena).bytes_used;
  const qkv_layer_usage own = qkv_layer_read_usage(&h[0].layer);
  assert_int_equal(own.bytes_shared, 0);
  fork_holder(&w, &h[0], UINT64_MAX);
  fork_holder(&w, &h[0], 5 + 64 * 70 + 1);
  assert_int_equal(qkv_arena_read(w.arena).bytes_used, alone);
  assert_int_equal(qkv_layer_read_usage(&h[0].layer).bytes_coded, own.bytes_coded);
  assert_int_equal(qkv_layer_read_usage(&h[1].layer).bytes_shared, own.bytes_coded);
  // The block that both have is coded once, whichever seals it first.
  append(&w, &h[1], 64);
  const uint64_t before = qkv_arena_read(w.arena).bytes_used;
  append(&w, &h[0], 64);
  const uint64_t block = qkv_arena_cost(64 * 2 * (16 + 8) * 2);
  assert_true(qkv_arena_read(w.arena).bytes_used <= before + block);
  assert_int_equal(h[0].count, 100);
  assert_ptr_equal(qkv_layer_page(&h[0].layer, 99)->page, qkv_layer_page(&h[1].layer, 99)->page);
  check(&w);
  // The parent ends first.
  end_holder(&h[0]);
  check(&w);
  append(&w, &h[2], 200);
  check(&w);
  end(&w);
}

// One layer's evictions and restores are those of all that share; pages that another layer has used stay.
static void test_eviction_of_shared_pages(void **state) {
  (void)state;
  world w;
  begin(&w, 1);
  holder *h = w.holders;
  init_pair(&w, &h[0]);
  append(&w, &h[0], 64 * 10);
  assert_true(qkv_layer_save(&h[0].layer));
  qkv_layer_settle(&h[0].layer);
  fork_holder(&w, &h[0], UINT64_MAX);
  assert_true(qkv_layer_save(&h[1].layer));
  assert_int_equal(w.backing.count, h[0].count);  // put once
  qkvi_layer_pin(&h[1].layer, 1000);              // a use, and a reader
  assert_int_equal(evict(&h[0].layer, UINT64_MAX, 999), 0);
  assert_int_equal(evict(&h[0].layer, UINT64_MAX, 1001), 0);
  qkvi_layer_unpin(&h[1].layer);
  // The second layer's own pin, as it is not in a session.
  qkvi_layer_unpin(&h[1].layer);
  assert_int_equal(evict(&h[0].layer, UINT64_MAX, 999), 0);
  const uint64_t coded = qkv_layer_read_usage(&h[0].layer).bytes_coded;
  assert_int_equal(evict(&h[0].layer, UINT64_MAX, 1001), coded);
  qkvi_layer_pin(&h[1].layer, 0);
  assert_false(qkv_layer_holds(&h[1].layer, 0, UINT64_MAX));
  restore_all(&w, &h[1]);
  assert_true(qkv_layer_holds(&h[0].layer, 0, UINT64_MAX));
  check(&w);
  // The parent's records are the child's as well.
  const size_t drops = w.backing.drops;
  truncate(&w, &h[0], 5);
  assert_int_equal(w.backing.drops, drops);
  check(&w);
  end(&w);
}

// A layer of 9 pages, and a fork that sees the first 3 of them. Returns the range of both.
static const qkv_page_range *begin_forked_early(world *w) {
  begin(w, 1);
  init_pair(w, &w->holders[0]);
  append(w, &w->holders[0], 64 * 10);
  fork_holder(w, &w->holders[0], 5 + 64 * 3);
  return w->holders[1].layer.ranges[0].range;
}

// Pages behind a fork, of a layer that has ended: the range is the fork's alone, which does not see them.
static void test_eviction_frees_what_no_layer_sees(void **state) {
  (void)state;
  world w;
  const qkv_page_range *range = begin_forked_early(&w);
  holder *h = w.holders;
  const uint64_t coded = qkv_layer_read_usage(&h[0].layer).bytes_coded;
  end_holder(&h[0]);
  assert_int_equal(range->count, 9);
  const uint64_t before = qkv_arena_read(w.arena).bytes_used;
  // Nothing of the fork is durable, so that none of its own pages leaves memory.
  assert_int_equal(evict(&h[1].layer, UINT64_MAX, 1001), 0);
  assert_int_equal(range->count, 3);
  assert_true(before - qkv_arena_read(w.arena).bytes_used >= coded / 9 * 6);
  check(&w);
  end(&w);
}

// The same without eviction, as of a daemon without an SSD.
static void test_an_append_frees_what_no_layer_sees(void **state) {
  (void)state;
  world w;
  const qkv_page_range *range = begin_forked_early(&w);
  holder *h = w.holders;
  append(&w, &h[1], 64 * 2);
  assert_int_equal(range->count, 9);  // the parent sees them
  end_holder(&h[0]);
  append(&w, &h[1], 64);
  assert_int_equal(range->count, 3);
  check(&w);
  end(&w);
}

// A record is the session's that puts it: a page that was shared without one is put by each.
static void test_records_of_pages_that_were_shared_early(void **state) {
  (void)state;
  world w;
  begin(&w, 1);
  holder *h = w.holders;
  init_pair(&w, &h[0]);
  w.backing.capacity = 2;
  append(&w, &h[0], 64 * 5);
  assert_false(qkv_layer_save(&h[0].layer));
  fork_holder(&w, &h[0], UINT64_MAX);
  w.backing.capacity = DOUBLE_RECORDS;
  assert_true(qkv_layer_save(&h[1].layer));
  assert_true(qkv_layer_save(&h[0].layer));
  assert_int_equal(w.backing.count, 2 + 2 * (h[0].count - 2));
  for (size_t i = 0; i < h[0].count; i++) {
    const uint64_t a = qkv_layer_page(&h[0].layer, i)->record, b = qkv_layer_page(&h[1].layer, i)->record;
    assert_true((a == b) == (i < 2));
    assert_ptr_equal(qkv_layer_page(&h[0].layer, i)->page, qkv_layer_page(&h[1].layer, i)->page);
    if (i < 2) continue;
    assert_int_equal(w.backing.records[a].session, h[0].layer.config.session);
    assert_int_equal(w.backing.records[b].session, h[1].layer.config.session);
  }
  check(&w);
  end(&w);
}

// A page that one layer has at fewer bits is the other one's in full.
static void test_demotion_is_ones_own(void **state) {
  (void)state;
  world w;
  begin(&w, 1);
  holder *h = w.holders;
  init_pair(&w, &h[0]);
  append(&w, &h[0], 64 * 6);
  fork_holder(&w, &h[0], UINT64_MAX);
  const uint32_t bytes = qkv_layer_page(&h[0].layer, 2)->bytes;
  demote(&h[1], 2, 8);
  assert_true(qkv_layer_page(&h[1].layer, 2)->bytes < bytes);
  assert_int_equal(qkv_layer_page(&h[0].layer, 2)->bytes, bytes);
  assert_ptr_equal(qkv_layer_page(&h[1].layer, 3)->page, qkv_layer_page(&h[0].layer, 3)->page);
  check(&w);
  // Background steps leave shared pages alone.
  qkv_retier_snapshot snapshot;
  fork_holder(&w, &h[0], UINT64_MAX);
  qkv_layer_snapshot(&h[2].layer, 0, 0, true, &snapshot);
  for (size_t i = 0; i < snapshot.page_count; i++) assert_true(snapshot.pages[i].shared && snapshot.groups[0].fixed);
  qkv_retier_snapshot_deinit(&snapshot);
  end(&w);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_random_walks),
      cmocka_unit_test(test_shared_memory_is_held_once),
      cmocka_unit_test(test_eviction_of_shared_pages),
      cmocka_unit_test(test_eviction_frees_what_no_layer_sees),
      cmocka_unit_test(test_an_append_frees_what_no_layer_sees),
      cmocka_unit_test(test_records_of_pages_that_were_shared_early),
      cmocka_unit_test(test_demotion_is_ones_own),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
