#include "engine/cache/layer_spill.h"

#include <malloc.h>

#include "engine/cache/layer_retier.h"
#include "tests/engine/cache/backing_double.h"

enum { TOKENS = 300, PAGES = 4, FIRST = 7, MISSING = 16 };

typedef struct state {
  qkv_model model;
  qkv_arena *arena;
  qkv_layer layer;
  backing_double backing;
  sequence rows;
  const qkv_coder *coder;
  float *k, *v;  // as decoded before anything left memory
} state;

static void begin(state *s) {
  const qkv_policy policy = test_policy(4, 3, 0);
  s->model = test_model(2, 2, 32, 16, QKV_FP16);
  s->arena = qkv_arena_create("memory-budget", 1 << 20);
  double_init(&s->backing);
  s->coder = test_coder(&s->model, policy);
  qkv_layer_config config = test_layer_config(&s->model, policy, FIRST, s->arena);
  config.backing = &s->backing.backing;
  config.session = 42;
  config.ema = (qkv_ema_options){.alpha = 0.9, .sample_every = 1};
  qkv_layer_init(&s->layer, &config, s->coder);
  s->rows = make_sequence(&s->model, TOKENS, 5);
  s->k = s->v = NULL;
}

static void fill(state *s) {
  must_append(&s->layer, &s->rows, 0, TOKENS);
  assert_int_equal(s->layer.page_count, PAGES);
  s->k = decoded_rows(&s->layer, QKV_K);
  s->v = decoded_rows(&s->layer, QKV_V);
}

static void end(state *s) {
  qkv_layer_deinit(&s->layer);
  coder_destroy(s->coder);
  free_sequence(&s->rows);
  free(s->k);
  free(s->v);
  double_deinit(&s->backing);
  qkv_arena_destroy(&s->arena);
}

// Brings all that is missing back; returns how much that was.
static size_t restore_all(state *s, bool full) {
  qkv_missing_page missing[MISSING];
  const size_t count = qkv_layer_missing(&s->layer, 0, 0, full, missing, MISSING);
  for (size_t i = 0; i < count; i++) {
    const double_record *record = &s->backing.records[missing[i].record];
    assert_int_equal(record->bytes, missing[i].bytes);
    void *image = qkv_arena_alloc_overhead(s->arena, missing[i].bytes);
    memcpy(image, record->page, record->bytes);
    qkv_error error = {0};
    if (restore_image(&s->layer, &missing[i], image, &error) != QKV_OK) fail_msg("%s", error.text);
  }
  return count;
}

static void assert_rows_as_before(const state *s) {
  const size_t rows = (size_t)(s->layer.length - FIRST) * s->model.kv_heads;
  float *k = decoded_rows(&s->layer, QKV_K), *v = decoded_rows(&s->layer, QKV_V);
  assert_memory_equal(k, s->k, rows * s->model.key_dim * sizeof *k);
  assert_memory_equal(v, s->v, rows * s->model.value_dim * sizeof *v);
  free(k);
  free(v);
}

static void test_out_and_back(void **unused) {
  (void)unused;
  state s;
  begin(&s);
  fill(&s);
  assert_true(qkv_layer_save(&s.layer));
  assert_int_equal(s.backing.count, PAGES);
  assert_int_equal(s.backing.records[1].session, 42);
  qkv_layer_settle(&s.layer);
  assert_int_equal(qkv_layer_durable(&s.layer), FIRST + PAGES * 64);
  const uint64_t before = qkv_arena_read(s.arena).bytes_used, coded = qkv_layer_read_usage(&s.layer).bytes_coded;
  assert_int_equal(evict(&s.layer, UINT64_MAX, 0), coded);
  assert_int_equal(qkv_arena_read(s.arena).bytes_used, before - coded);
  assert_valid(&s.layer);
  const qkv_layer_usage usage = qkv_layer_read_usage(&s.layer);
  assert_int_equal(usage.bytes_coded, 0);
  assert_int_equal(usage.tokens_cold, (uint64_t)PAGES * 64);
  assert_int_equal(usage.tokens_coded, (uint64_t)PAGES * 64);
  assert_false(qkv_layer_holds(&s.layer, 0, FIRST + 1));
  assert_true(qkv_layer_holds(&s.layer, FIRST + PAGES * 64, UINT64_MAX));
  assert_int_equal(restore_all(&s, false), PAGES);
  assert_valid(&s.layer);
  assert_int_equal(qkv_arena_read(s.arena).bytes_used, before);
  assert_rows_as_before(&s);
  end(&s);
}

// As many pages as are asked for, the first ones first where attention says nothing; and only those that are durable.
static void test_evicts_what_is_durable(void **unused) {
  (void)unused;
  state s;
  begin(&s);
  s.backing.first = QKV_RECORD_WAITING;
  fill(&s);
  assert_true(qkv_layer_save(&s.layer));
  assert_int_equal(evict(&s.layer, UINT64_MAX, 0), 0);
  qkv_layer_settle(&s.layer);
  assert_int_equal(qkv_layer_durable(&s.layer), FIRST);
  s.backing.records[1].state = QKV_RECORD_WRITTEN;
  s.backing.records[2].state = s.backing.records[3].state = QKV_RECORD_DURABLE;
  assert_true(evict(&s.layer, 1, 0) > 0);
  assert_true(qkv_layer_holds(&s.layer, FIRST, FIRST + 64));
  assert_false(qkv_layer_holds(&s.layer, FIRST + 64, FIRST + 65));
  assert_true(qkv_layer_holds(&s.layer, FIRST + 128, FIRST + 192));
  assert_true(evict(&s.layer, UINT64_MAX, 0) > 0);
  assert_true(qkv_layer_holds(&s.layer, FIRST, FIRST + 64));
  assert_false(qkv_layer_holds(&s.layer, FIRST + 128, FIRST + 192));
  assert_true(qkv_layer_holds(&s.layer, FIRST + 192, UINT64_MAX));
  qkv_layer_settle(&s.layer);
  assert_int_equal(qkv_layer_durable(&s.layer), FIRST);  // the first page is not
  double_all(&s.backing, QKV_RECORD_DURABLE);
  qkv_layer_settle(&s.layer);
  assert_int_equal(qkv_layer_durable(&s.layer), FIRST + PAGES * 64);
  assert_valid(&s.layer);
  end(&s);
}

// What is written and then not made durable is in memory still, and is put again: all of it at the next try.
static void test_a_failed_sync_costs_nothing(void **unused) {
  (void)unused;
  state s;
  begin(&s);
  s.backing.first = QKV_RECORD_WRITTEN;
  fill(&s);
  assert_true(qkv_layer_save(&s.layer));
  assert_int_equal(evict(&s.layer, UINT64_MAX, 0), 0);
  double_all(&s.backing, QKV_RECORD_GONE);
  s.backing.first = QKV_RECORD_DURABLE;
  s.backing.records[1].state = QKV_RECORD_DURABLE;
  s.backing.records[PAGES].state = QKV_RECORD_WRITTEN;
  qkv_layer_settle(&s.layer);
  assert_true(qkv_layer_save(&s.layer));
  assert_int_equal(s.backing.count, PAGES + PAGES - 2);
  assert_int_equal(s.backing.drops, PAGES - 2);
  qkv_layer_settle(&s.layer);
  assert_int_equal(qkv_layer_durable(&s.layer), FIRST + (PAGES - 1) * 64);
  assert_valid(&s.layer);
  s.backing.records[PAGES].state = QKV_RECORD_DURABLE;
  qkv_layer_settle(&s.layer);
  assert_int_equal(qkv_layer_durable(&s.layer), FIRST + PAGES * 64);
  assert_true(evict(&s.layer, UINT64_MAX, 0) > 0);
  assert_int_equal(restore_all(&s, false), PAGES);
  assert_rows_as_before(&s);
  assert_valid(&s.layer);
  end(&s);
}

// Attention to the tokens of one page, as of one query that all heads share.
static void heat(state *s, size_t page, float share) {
  float attention[QKV_PAGE_TOKENS];
  qkv_ema_step step;
  assert_true(qkv_ema_clock_count(s->layer.clock, 1, 1, &step));
  for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) attention[t] = share / QKV_PAGE_TOKENS;
  for (uint32_t head = 0; head < s->model.kv_heads; head++)
    qkv_ema_add(qkv_layer_ema(&s->layer, page), s->layer.clock, head, &step, attention);
}

// Those that receive least attention go first.
static void test_evicts_the_coldest(void **unused) {
  (void)unused;
  static const size_t order[] = {2, 0, 3, 1};  // from the coldest on
  state s;
  begin(&s);
  fill(&s);
  assert_int_equal(PAGES, sizeof order / sizeof *order);
  for (size_t i = 1; i < PAGES; i++) heat(&s, order[i], 0.2f * (float)i);
  assert_true(qkv_layer_save(&s.layer));
  for (size_t i = 0; i < PAGES; i++) {
    assert_true(evict(&s.layer, 1, 0) > 0);
    for (size_t p = 0; p < PAGES; p++) {
      bool gone = false;
      for (size_t k = 0; k <= i; k++) gone |= order[k] == p;
      assert_int_equal(qkv_layer_page(&s.layer, p)->page == NULL, gone);
    }
  }
  assert_int_equal(evict(&s.layer, 1, 0), 0);
  assert_valid(&s.layer);
  end(&s);
}

// A full backing takes the rest later; a record that failed is put again.
static void test_puts_again(void **unused) {
  (void)unused;
  state s;
  begin(&s);
  s.backing.capacity = 1;
  fill(&s);
  assert_false(qkv_layer_save(&s.layer));
  assert_int_equal(s.backing.count, 1);
  assert_valid(&s.layer);
  s.backing.capacity = 100;
  assert_true(qkv_layer_save(&s.layer));
  assert_int_equal(s.backing.count, PAGES);
  s.backing.records[2].state = QKV_RECORD_GONE;
  qkv_layer_settle(&s.layer);
  assert_int_equal(qkv_layer_durable(&s.layer), FIRST + 64);
  assert_valid(&s.layer);
  assert_true(qkv_layer_save(&s.layer));
  assert_int_equal(s.backing.count, PAGES + 1);
  assert_int_equal(qkv_layer_page(&s.layer, 1)->record, PAGES + 1);
  qkv_layer_settle(&s.layer);
  assert_int_equal(qkv_layer_durable(&s.layer), FIRST + PAGES * 64);
  assert_valid(&s.layer);
  end(&s);
}

// Planes that were dropped in memory are in the record.
static void test_full_precision_returns(void **unused) {
  (void)unused;
  state s;
  begin(&s);
  fill(&s);
  assert_true(qkv_layer_save(&s.layer));
  qkv_head_tiers tiers[2];
  qkv_cut cut;
  memset(tiers, QKV_TIER_BIT, sizeof tiers);  // one bit
  assert_true(qkv_layer_cut(&s.layer, 1, qkv_layer_page(&s.layer, 1)->serial, tiers, &cut));
  assert_int_equal(qkv_layer_exchange(&s.layer, &cut, NULL), QKV_OK);
  qkv_cut_deinit(&cut);
  assert_int_equal(restore_all(&s, false), 0);
  assert_int_equal(restore_all(&s, true), 1);
  assert_valid(&s.layer);
  assert_rows_as_before(&s);
  assert_int_equal(restore_all(&s, true), 0);
  end(&s);
}

// Planes are dropped once the record has them for good: not before, unless the disk takes nothing any more.
static void test_planes_wait_for_the_record(void **unused) {
  (void)unused;
  state s;
  begin(&s);
  s.backing.first = QKV_RECORD_WAITING;
  fill(&s);
  const uint64_t serial = qkv_layer_page(&s.layer, 1)->serial;
  assert_true(qkv_layer_cut_early(&s.layer, 1, serial));  // not put yet
  assert_true(qkv_layer_save(&s.layer));
  for (qkv_record_state at = QKV_RECORD_GONE; at < QKV_RECORD_DURABLE; at++) {
    double_all(&s.backing, at);
    assert_true(qkv_layer_cut_early(&s.layer, 1, serial));
  }
  s.backing.failed = true;
  assert_false(qkv_layer_cut_early(&s.layer, 1, serial));
  s.backing.failed = false;
  assert_false(qkv_layer_cut_early(&s.layer, 1, serial + 1));  // not there any more
  double_all(&s.backing, QKV_RECORD_DURABLE);
  assert_false(qkv_layer_cut_early(&s.layer, 1, serial));
  end(&s);
}

static void test_truncates_cold_pages(void **unused) {
  (void)unused;
  state s;
  begin(&s);
  fill(&s);
  assert_true(qkv_layer_save(&s.layer));
  qkv_layer_settle(&s.layer);
  (void)evict(&s.layer, UINT64_MAX, 0);
  qkv_layer_truncate(&s.layer, FIRST + 100);
  assert_valid(&s.layer);
  assert_int_equal(s.backing.cuts, 1);
  assert_int_equal(s.backing.cut_position, FIRST + 100);
  assert_int_equal(s.backing.drops, PAGES - 2);
  assert_int_equal(qkv_layer_durable(&s.layer), FIRST + 100);
  assert_int_equal(restore_all(&s, false), 2);
  assert_rows_as_before(&s);
  must_append(&s.layer, &s.rows, 100, TOKENS);
  assert_true(qkv_layer_save(&s.layer));
  assert_valid(&s.layer);
  end(&s);
}

// What is cut before it was put is put with what is left.
static void test_puts_what_is_left(void **unused) {
  (void)unused;
  state s;
  begin(&s);
  s.backing.capacity = 0;
  fill(&s);
  assert_false(qkv_layer_save(&s.layer));
  qkv_layer_truncate(&s.layer, FIRST + 100);
  s.backing.capacity = 10;
  assert_true(qkv_layer_save(&s.layer));
  assert_int_equal(s.backing.count, 2);
  assert_int_equal(s.backing.records[1].tokens, 64);
  assert_int_equal(s.backing.records[2].tokens, 36);
  end(&s);
}

static void test_refuses_another_page(void **unused) {
  (void)unused;
  state s;
  begin(&s);
  fill(&s);
  assert_true(qkv_layer_save(&s.layer));
  (void)evict(&s.layer, UINT64_MAX, 0);
  qkv_missing_page missing[MISSING];
  assert_int_equal(qkv_layer_missing(&s.layer, FIRST + 64, FIRST + 65, false, missing, MISSING), 1);
  void *image = qkv_arena_alloc_overhead(s.arena, missing[0].bytes);
  memcpy(image, s.backing.records[1].page, s.backing.records[1].bytes);
  qkv_error error = {0};
  assert_int_equal(restore_image(&s.layer, &missing[0], image, &error), QKV_DATA_LOSS);
  assert_string_equal(error.text,
                      "layer 2: position 71 on the SSD is damaged: it is the page at position 7 of layer 2");
  image = qkv_arena_alloc_overhead(s.arena, missing[0].bytes);
  memcpy(image, s.backing.records[2].page, s.backing.records[2].bytes);
  ((qkv_page_header *)image)->layer = 1;
  qkv_page_seal(image);
  assert_int_equal(restore_image(&s.layer, &missing[0], image, &error), QKV_DATA_LOSS);
  image = qkv_arena_alloc_overhead(s.arena, missing[0].bytes);
  memcpy(image, s.backing.records[2].page, s.backing.records[2].bytes);
  ((uint8_t *)image)[200] ^= 4;
  assert_int_equal(restore_image(&s.layer, &missing[0], image, &error), QKV_DATA_LOSS);
  assert_valid(&s.layer);
  end(&s);
}

// Rows that are held in a cold page cannot be compared.
static void test_append_below_a_cold_page(void **unused) {
  (void)unused;
  state s;
  begin(&s);
  fill(&s);
  assert_true(qkv_layer_save(&s.layer));
  (void)evict(&s.layer, UINT64_MAX, 0);
  qkv_error error = {0};
  assert_int_equal(append_range(&s.layer, &s.rows, 70, 80, &error), QKV_UNAVAILABLE);
  assert_string_equal(error.text, "position 77 is on the SSD");
  assert_int_equal(restore_all(&s, false), PAGES);
  assert_int_equal(append_range(&s.layer, &s.rows, 70, 80, &error), QKV_OK);
  end(&s);
}

// The exact rows become pages, the last one a short one, after which rows go on.
static void test_seals_the_tail(void **unused) {
  (void)unused;
  state s;
  begin(&s);
  fill(&s);
  assert_int_equal(qkv_layer_seal(&s.layer, NULL), QKV_OK);
  assert_int_equal(s.layer.sealed, FIRST + TOKENS);
  assert_int_equal(s.layer.page_count, PAGES + 1);
  assert_int_equal(qkv_layer_page(&s.layer, PAGES)->tokens, TOKENS - PAGES * 64);
  assert_valid(&s.layer);
  assert_true(qkv_layer_save(&s.layer));
  qkv_layer_settle(&s.layer);
  assert_int_equal(qkv_layer_durable(&s.layer), FIRST + TOKENS);
  assert_int_equal(qkv_layer_seal(&s.layer, NULL), QKV_OK);  // there is nothing to do
  assert_int_equal(s.layer.page_count, PAGES + 1);
  (void)evict(&s.layer, UINT64_MAX, 0);
  sequence more = make_sequence(&s.model, 100, 9);
  row_pair pair;
  uint64_t appended;
  make_pair(&pair, &more, 0, 100, s.model.dtype);
  assert_int_equal(qkv_layer_append(&s.layer, FIRST + TOKENS, &pair.k.tensor, &pair.v.tensor, false, &appended, NULL),
                   QKV_OK);
  assert_int_equal(s.layer.page_count, PAGES + 2);
  assert_int_equal(qkv_layer_page(&s.layer, PAGES + 1)->position, FIRST + TOKENS);
  assert_valid(&s.layer);
  free_pair(&pair);
  free_sequence(&more);
  end(&s);
}

// Sealing works with a full budget, where it is needed most.
static void test_seals_without_capacity(void **unused) {
  (void)unused;
  state s;
  begin(&s);
  fill(&s);
  const qkv_arena_stats memory = qkv_arena_read(s.arena);
  const uint64_t taken = memory.bytes_max - memory.bytes_used;
  assert_int_equal(qkv_arena_reserve(s.arena, taken, NULL), QKV_OK);
  assert_int_equal(qkv_layer_seal(&s.layer, NULL), QKV_OK);
  assert_int_equal(s.layer.page_count, PAGES + 1);
  assert_valid(&s.layer);
  assert_true(qkv_arena_read(s.arena).bytes_used < memory.bytes_used);
  qkv_arena_unreserve(s.arena, taken);
  end(&s);
}

// What another process left: the layer is the same, and goes on where its pages end.
static void test_adopts(void **unused) {
  (void)unused;
  state s;
  begin(&s);
  fill(&s);
  assert_true(qkv_layer_save(&s.layer));
  qkv_layer found;
  qkv_layer_init(&found, &s.layer.config, s.coder);
  for (size_t i = 0; i < PAGES; i++) {
    qkv_layer_adopt(&found, s.coder, 64, i + 1, s.backing.records[i + 1].bytes);
  }
  assert_valid(&found);
  assert_int_equal(found.length, FIRST + PAGES * 64);
  assert_int_equal(qkv_layer_durable(&found), found.length);
  state again = {.arena = s.arena, .layer = found, .backing = s.backing, .model = s.model, .k = s.k, .v = s.v};
  assert_int_equal(restore_all(&again, false), PAGES);
  assert_valid(&again.layer);
  assert_rows_as_before(&again);
  must_append(&again.layer, &s.rows, PAGES * 64, TOKENS);
  assert_same_state(&again.layer, &s.layer);
  // A fork of it that is found as well, of a page less: the pages are held once.
  qkv_layer fork;
  qkv_layer_init(&fork, &s.layer.config, s.coder);
  for (size_t i = 0; i + 1 < PAGES; i++) qkv_layer_adopt(&fork, s.coder, 64, i + 1, s.backing.records[i + 1].bytes);
  qkv_layer_adopt_shared(&fork, &again.layer);
  assert_valid(&fork);
  assert_ptr_equal(qkv_layer_page(&fork, 1)->page, qkv_layer_page(&again.layer, 1)->page);
  assert_true(qkv_layer_holds(&fork, FIRST, fork.length));
  assert_int_equal(fork.length, FIRST + (PAGES - 1) * 64);
  qkv_layer_deinit(&fork);
  qkv_layer_deinit(&again.layer);
  end(&s);
}

enum { MANY = 100000 };

static uint64_t number_of(size_t i) {
  return (uint64_t)(i / 1000) << 40 | (i + 1);  // of another start every now and then
}

static uint32_t tokens_of(size_t i) {
  return i % 37 == 5 ? 11 : 64;
}

// 0 where the heap is a sanitizer's, which does not count.
static uint64_t heap_bytes(void) {
  const struct mallinfo2 heap = mallinfo2();
  return heap.uordblks + heap.hblkhd;
}

static void cold_pages_take_16_bytes(void **unused) {
  (void)unused;
  state s;
  begin(&s);
  const uint64_t before = heap_bytes();
  for (size_t i = 0; i < MANY; i++)
    qkv_layer_adopt(&s.layer, s.coder, tokens_of(i), number_of(i), 1000 + (uint32_t)i);
  qkv_layer_adopted(&s.layer);
  if (before > 0) assert_in_range(heap_bytes() - before, 12 * MANY, QKV_COLD_PAGE_BYTES * MANY);
  assert_valid(&s.layer);
  // What is asked of cold pages leaves them packed, and tells each one's own.
  qkv_missing_page *missing = malloc(MANY * sizeof *missing);
  assert_non_null(missing);
  assert_int_equal(qkv_layer_missing(&s.layer, 0, 0, true, missing, MANY), MANY);
  uint64_t position = FIRST, bytes = 0;
  for (size_t i = 0; i < MANY; i++) {
    assert_int_equal(missing[i].record, number_of(i));
    assert_int_equal(missing[i].position, position);
    assert_int_equal(missing[i].bytes, 1000 + i);
    if (i % 101 == 0) assert_int_equal(qkv_layer_page_at(&s.layer, position + tokens_of(i) - 1), i);
    position += tokens_of(i);
    bytes += qkv_arena_cost(missing[i].bytes);
  }
  free(missing);
  assert_int_equal(qkv_layer_missing_bytes(&s.layer, 0, 0, false), bytes);
  assert_int_equal(qkv_layer_durable(&s.layer), position);
  assert_false(qkv_layer_holds(&s.layer, FIRST, FIRST + 1));
  assert_int_equal(qkv_layer_read_usage(&s.layer).tokens_cold, position - FIRST);
  if (before > 0) assert_true(heap_bytes() - before <= (uint64_t)QKV_COLD_PAGE_BYTES * MANY);
  // A cut within a packed range.
  qkv_layer_truncate(&s.layer, FIRST + 1000);
  assert_valid(&s.layer);
  assert_int_equal(s.layer.length, FIRST + 1000);
  end(&s);
}

// Pages that leave memory are packed with the last of their range, and unpacked as the first comes back.
static void ranges_are_packed_as_they_leave(void **unused) {
  (void)unused;
  state s;
  begin(&s);
  fill(&s);
  assert_true(qkv_layer_save(&s.layer));
  qkv_layer_settle(&s.layer);
  assert_null(s.layer.ranges[0].range->packed);
  assert_true(evict(&s.layer, 1, 0) > 0);
  assert_null(s.layer.ranges[0].range->packed);
  assert_true(evict(&s.layer, UINT64_MAX, 0) > 0);
  assert_non_null(s.layer.ranges[0].range->packed);
  assert_valid(&s.layer);
  qkv_missing_page missing[MISSING];
  assert_int_equal(qkv_layer_missing(&s.layer, 0, 0, true, missing, MISSING), PAGES);
  assert_int_equal(evict(&s.layer, UINT64_MAX, 0), 0);
  assert_non_null(s.layer.ranges[0].range->packed);
  assert_int_equal(restore_all(&s, true), PAGES);
  assert_null(s.layer.ranges[0].range->packed);
  assert_rows_as_before(&s);
  end(&s);
}

// ---- What stays packed ----

enum { COLD = 100 };  // pages of which nothing is in memory, in two ranges

static void adopt_cold(state *s, qkv_layer *layer, size_t first_number) {
  for (size_t i = 0; i < COLD; i++)
    qkv_layer_adopt(layer, s->coder, 64, number_of(995 + first_number + i), 1000 + (uint32_t)i);
  qkv_layer_adopted(layer);
}

static void assert_packed(const qkv_layer *layer, size_t ranges) {
  assert_int_equal(layer->range_count, ranges);
  for (size_t i = 0; i < ranges; i++) {
    assert_non_null(layer->ranges[i].range->packed);
    assert_null(atomic_load(&layer->ranges[i].range->pages));
  }
}

static void a_truncation_leaves_cold_ranges_packed(void **unused) {
  (void)unused;
  static const uint64_t ends[] = {98 * 64 + 7, 98 * 64, 80 * 64, 3 * 64 + 1, 3 * 64};
  state s;
  begin(&s);
  adopt_cold(&s, &s.layer, 0);
  assert_packed(&s.layer, 2);
  for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
    qkv_layer_truncate(&s.layer, FIRST + ends[i]);
    assert_packed(&s.layer, ends[i] > 64 * 64 ? 2 : 1);
    assert_int_equal(qkv_layer_read_usage(&s.layer).tokens_cold, ends[i]);
    const size_t pages = (ends[i] + 63) / 64;
    qkv_missing_page missing[COLD];
    assert_int_equal(qkv_layer_missing(&s.layer, 0, 0, true, missing, COLD), pages);
    for (size_t j = 0; j < pages; j++) assert_int_equal(missing[j].record, number_of(995 + j));
    assert_valid(&s.layer);
  }
  end(&s);
}

static void a_copy_of_a_packed_range_is_packed(void **unused) {
  (void)unused;
  state s;
  begin(&s);
  adopt_cold(&s, &s.layer, 0);
  qkv_page_range *range = s.layer.ranges[0].range;
  qkvi_range_pin(range, 0);
  qkv_page_range *copy = qkvi_range_copy(range, 3, 20);
  assert_non_null(range->packed);
  assert_non_null(copy->packed);
  assert_int_equal(copy->count, 17);
  for (uint32_t i = 0; i < copy->count; i++) {
    const qkv_page_entry one = qkvi_range_peek(copy, i), other = qkvi_range_peek(range, 3 + i);
    assert_true(one.record == other.record && one.position == other.position && one.bytes == other.bytes);
  }
  qkvi_range_unpin(range);
  qkvi_range_leave(&copy, s.arena);
  end(&s);
}

// Two layers whose records are others: each keeps its own.
static void comparing_leaves_cold_ranges_packed(void **unused) {
  (void)unused;
  state s, other;
  begin(&s);
  begin(&other);
  adopt_cold(&s, &s.layer, 0);
  adopt_cold(&s, &other.layer, 5000);
  qkv_layer_adopt_shared(&s.layer, &other.layer);
  assert_packed(&s.layer, 2);
  assert_packed(&other.layer, 2);
  end(&other);
  end(&s);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_out_and_back),
      cmocka_unit_test(test_evicts_what_is_durable),
      cmocka_unit_test(test_a_failed_sync_costs_nothing),
      cmocka_unit_test(test_evicts_the_coldest),
      cmocka_unit_test(test_puts_again),
      cmocka_unit_test(test_full_precision_returns),
      cmocka_unit_test(test_planes_wait_for_the_record),
      cmocka_unit_test(test_truncates_cold_pages),
      cmocka_unit_test(test_puts_what_is_left),
      cmocka_unit_test(test_refuses_another_page),
      cmocka_unit_test(test_append_below_a_cold_page),
      cmocka_unit_test(test_adopts),
      cmocka_unit_test(test_seals_the_tail),
      cmocka_unit_test(test_seals_without_capacity),
      cmocka_unit_test(cold_pages_take_16_bytes),
      cmocka_unit_test(ranges_are_packed_as_they_leave),
      cmocka_unit_test(a_truncation_leaves_cold_ranges_packed),
      cmocka_unit_test(a_copy_of_a_packed_range_is_packed),
      cmocka_unit_test(comparing_leaves_cold_ranges_packed),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
