#include "engine/cache/session_spill.h"

#include <pthread.h>
#include <time.h>

#include "engine/cache/session_retier.h"
#include "engine/cache/session_state.h"
#include "tests/engine/cache/backing_double.h"

enum { LAYERS = 4, TOKENS = 200, PAGES = 3, FIRST = 3 };

typedef struct scene {
  qkv_model model;
  qkv_arena *arena;
  sequence rows;
  backing_double backing;
  qkv_session_config config;
  qkv_session *session;
} scene;

static qkv_session *open_session(const scene *s) {
  qkv_session *session = NULL;
  qkv_error error = {0};
  if (qkv_session_create(&s->config, &s->model, s->arena, &session, &error) != QKV_OK) fail_msg("%s", error.text);
  return session;
}

static void setup(scene *s) {
  s->model = test_model(1, 2, 16, 8, QKV_FP16);
  s->arena = qkv_arena_create("memory-budget", (uint64_t)1 << 24);
  s->rows = make_sequence(&s->model, TOKENS, 1);
  double_init(&s->backing);
  s->config = (qkv_session_config){.name = "a",
                                   .tenant = "default",
                                   .purpose = QKV_PURPOSE_ATTEND,
                                   .policy = test_policy(4, 4, 8),
                                   .first_position = FIRST,
                                   .durability = QKV_DURABILITY_ASYNC,
                                   .backing = &s->backing.backing,
                                   .id = 77};
  s->session = open_session(s);
}

static void append_all(scene *s) {
  row_pair pair;
  make_pair(&pair, &s->rows, 0, TOKENS, QKV_FP16);
  for (uint32_t layer = 0; layer < LAYERS; layer++) {
    uint64_t appended, length;
    assert_int_equal(
        qkv_session_append(s->session, layer, FIRST, &pair.k.tensor, &pair.v.tensor, false, &appended, &length, NULL),
        QKV_OK);
  }
  free_pair(&pair);
}

static void teardown(scene *s) {
  qkv_session_unref(&s->session);
  assert_int_equal(qkv_arena_read(s->arena).bytes_used, 0);
  assert_int_equal(s->backing.drops, 0);  // what has been written stays when a session leaves memory
  qkv_arena_destroy(&s->arena);
  free_sequence(&s->rows);
  double_deinit(&s->backing);
}

static uint64_t durable(const scene *s, uint32_t layer) {
  uint64_t all[LAYERS];
  qkv_session_read_durable(s->session, all);
  return all[layer];
}

static void test_appended_pages_are_put(void **unused) {
  (void)unused;
  scene s;
  setup(&s);
  s.backing.first = QKV_RECORD_WAITING;
  append_all(&s);
  assert_int_equal(s.backing.count, LAYERS * PAGES);
  assert_int_equal(s.backing.records[1].session, 77);
  assert_false(qkv_session_settle(s.session));
  assert_int_equal(durable(&s, 1), FIRST);
  assert_true(qkv_session_is_durable(s.session, 1, FIRST));
  assert_false(qkv_session_is_durable(s.session, 1, FIRST + 1));
  s.backing.records[PAGES + 1].state = QKV_RECORD_DURABLE;  // the second layer's first page
  assert_false(qkv_session_settle(s.session));
  assert_true(qkv_session_is_durable(s.session, 1, FIRST + 64));
  assert_false(qkv_session_is_durable(s.session, 1, FIRST + 65));
  assert_false(qkv_session_is_durable(s.session, 0, FIRST + 64));
  double_all(&s.backing, QKV_RECORD_DURABLE);
  assert_true(qkv_session_settle(s.session));
  for (uint32_t layer = 0; layer < LAYERS; layer++) {
    assert_int_equal(durable(&s, layer), FIRST + PAGES * 64);
    assert_true(qkv_session_is_durable(s.session, layer, UINT64_MAX));
  }
  teardown(&s);
}

// What is being written stays as it is and counts, whatever becomes of the session's page meanwhile.
static void test_pages_are_written_from_where_they_lie(void **unused) {
  (void)unused;
  scene s;
  qkv_retier_report report = {0};
  setup(&s);
  s.backing.holding = true;
  append_all(&s);
  assert_int_equal(s.backing.count, LAYERS * PAGES);
  for (uint64_t i = 1; i <= s.backing.count; i++) assert_non_null(s.backing.records[i].hold.image);
  uint64_t held = 0;
  for (uint64_t i = 1; i <= s.backing.count; i++) held += qkv_arena_cost(s.backing.records[i].bytes);
  assert_int_equal(qkv_session_demote(s.session, &(qkv_retier_scope){.layer_count = 0}, 2, true, &report, NULL),
                   QKV_OK);
  assert_int_equal(qkv_session_truncate(s.session, FIRST + 64, NULL, 0, NULL), QKV_OK);
  (void)qkv_session_evict(s.session, UINT64_MAX, true);
  const uint64_t before = qkv_arena_read(s.arena).bytes_used;
  double_let_go(&s.backing);  // the last holder of all of them
  assert_int_equal(before - qkv_arena_read(s.arena).bytes_used, held);
  s.backing.holding = false;
  s.backing.drops = 0;
  teardown(&s);
}

// Pages that the backing had no headroom for are put once it has.
static void test_settle_puts_the_rest(void **unused) {
  (void)unused;
  scene s;
  setup(&s);
  s.backing.capacity = 3;
  append_all(&s);
  assert_int_equal(s.backing.count, 3);
  s.backing.capacity = 100;
  (void)qkv_session_settle(s.session);
  assert_int_equal(s.backing.count, LAYERS * PAGES);
  assert_true(qkv_session_settle(s.session));
  teardown(&s);
}

static void restore_page(scene *s, uint32_t layer, const qkv_missing_page *missing) {
  void *image = qkv_arena_alloc_overhead(s->arena, missing->bytes);
  memcpy(image, s->backing.records[missing->record].page, missing->bytes);
  size_t failed;
  assert_int_equal(qkv_session_restore(s->session, layer, NULL, missing, &image, 1, &failed, NULL), QKV_OK);
  assert_null(image);
}

static void restore_layer(scene *s, uint32_t layer) {
  qkv_missing_page missing[8];
  const size_t count = qkv_session_missing(s->session, layer, 0, 0, false, missing, 8);
  assert_int_equal(count, PAGES);
  for (size_t i = 0; i < count; i++) {
    restore_page(s, layer, &missing[i]);
  }
}

static void test_pins_keep_what_came_back(void **unused) {
  (void)unused;
  scene s;
  qkv_session_info info;
  setup(&s);
  append_all(&s);
  assert_true(qkv_session_evict(s.session, UINT64_MAX, true) > 0);
  qkv_session_read_info(s.session, &info, NULL);
  assert_int_equal(info.usage.bytes_coded, 0);
  assert_int_equal(info.usage.tokens_cold, LAYERS * PAGES * 64);
  qkv_session_pin(s.session, 2);
  restore_layer(&s, 2);
  assert_int_equal(qkv_session_evict(s.session, UINT64_MAX, true), 0);
  qkv_session_unpin(s.session, 2);
  qkv_session_set_pinned(s.session, true);
  assert_int_equal(qkv_session_evict(s.session, UINT64_MAX, true), 0);
  qkv_session_set_pinned(s.session, false);
  assert_true(qkv_session_evict(s.session, UINT64_MAX, true) > 0);
  assert_int_equal(qkv_session_missing(s.session, 2, 0, 0, false, (qkv_missing_page[8]){0}, 8), PAGES);
  teardown(&s);
}

static uint64_t cold(const scene *s, uint32_t layer) {
  uint64_t bytes;
  return qkv_session_cold(s->session, layer, &bytes);
}

// The layer before the one that is used goes first, then those before it, the one that is used last.
static void test_layers_leave_in_turn(void **unused) {
  (void)unused;
  static const uint32_t order[LAYERS] = {0, 3, 2, 1};
  scene s;
  const qkv_layer *layer;
  setup(&s);
  append_all(&s);
  assert_int_equal(qkv_session_last_layer(s.session), LAYERS - 1);
  assert_int_equal(qkv_session_turns(s.session), 0);
  for (int i = 0; i < 2; i++) {  // however often the first layer is looked at
    assert_int_equal(qkv_session_read(s.session, 0, &layer, NULL), QKV_OK);
    qkv_session_read_done(s.session, 0);
    assert_int_equal(qkv_session_turns(s.session), 1);
  }
  assert_int_equal(qkv_session_read(s.session, 1, &layer, NULL), QKV_OK);
  qkv_session_read_done(s.session, 1);
  assert_false(qkv_session_has_cold(s.session));
  for (uint32_t i = 0; i < LAYERS; i++) {
    for (int page = 0; page < PAGES; page++) assert_true(qkv_session_evict(s.session, 1, true) > 0);
    for (uint32_t k = 0; k < LAYERS; k++) assert_int_equal(cold(&s, order[k]), k <= i ? PAGES * 64 : 0);
  }
  assert_true(qkv_session_has_cold(s.session));
  for (uint32_t i = 0; i < LAYERS; i++) restore_layer(&s, i);
  assert_false(qkv_session_has_cold(s.session));
  teardown(&s);
}

// A session of the next process, from the records of this one.
static void test_found_again(void **unused) {
  (void)unused;
  scene s;
  setup(&s);
  append_all(&s);
  assert_int_equal(qkv_session_seal(s.session, NULL), QKV_OK);
  const size_t records = s.backing.count;
  assert_true(records > LAYERS * PAGES);
  const qkv_layer *layer;
  assert_int_equal(qkv_session_read(s.session, 1, &layer, NULL), QKV_OK);
  float *before = decoded_rows(layer, QKV_V);
  qkv_session_read_done(s.session, 1);
  qkv_session *first = s.session;
  s.session = open_session(&s);
  for (uint64_t i = 1; i <= records; i++) {
    const qkv_page_header *header = s.backing.records[i].page;
    assert_int_equal(
        qkv_session_adopt(s.session, header->layer, NULL, header->tokens, i, s.backing.records[i].bytes, NULL),
        QKV_OK);
  }
  qkv_missing_page missing[8];
  const size_t count = qkv_session_missing(s.session, 1, 0, 0, false, missing, 8);
  for (size_t i = 0; i < count; i++) {
    restore_page(&s, 1, &missing[i]);
  }
  assert_int_equal(qkv_session_read(s.session, 1, &layer, NULL), QKV_OK);
  assert_int_equal(layer->length, FIRST + TOKENS);
  assert_valid(layer);
  float *after = decoded_rows(layer, QKV_V);
  qkv_session_read_done(s.session, 1);
  assert_memory_equal(before, after, TOKENS * 8 * sizeof *after);
  free(before);
  free(after);
  qkv_session_unref(&first);
  teardown(&s);
}

// What is published of a layer is what it has.
static void assert_published(const scene *s, uint32_t layer) {
  const qkv_layer *now;
  assert_int_equal(qkv_session_read(s->session, layer, &now, NULL), QKV_OK);
  const qkv_layer_usage usage = qkv_layer_read_usage(now);
  assert_valid(now);
  qkv_session_read_done(s->session, layer);
  assert_int_equal(cold(s, layer), usage.tokens_cold);
}

// ---- Threads ----

typedef struct rush {
  scene *scene;
  _Atomic bool stop, failed;
} rush;

static void *evict_all_the_time(void *context) {
  rush *r = context;
  while (!atomic_load(&r->stop)) {
    (void)qkv_session_evict(r->scene->session, UINT64_MAX, true);
    (void)qkv_session_settle(r->scene->session);
  }
  return NULL;
}

static void *pin_and_read(void *context) {
  rush *r = context;
  scene *s = r->scene;
  for (int i = 0; i < 200; i++) {
    const qkv_layer *layer;
    qkv_missing_page missing[8];
    qkv_session_pin(s->session, 0);
    const size_t count = qkv_session_missing(s->session, 0, 0, 0, false, missing, 8);
    for (size_t j = 0; j < count; j++) restore_page(s, 0, &missing[j]);
    if (qkv_session_read(s->session, 0, &layer, NULL) != QKV_OK) break;
    if (!qkv_layer_holds(layer, 0, UINT64_MAX)) atomic_store(&r->failed, true);
    qkv_session_read_done(s->session, 0);
    qkv_session_unpin(s->session, 0);
  }
  return NULL;
}

// Threads that pin, restore and then read find everything, however hard others evict.
static void test_eviction_during_reads(void **unused) {
  (void)unused;
  enum { EACH = 2 };
  scene s;
  setup(&s);
  append_all(&s);
  rush r = {.scene = &s};
  pthread_t evicting[EACH], reading[EACH];
  for (int i = 0; i < EACH; i++) {
    assert_int_equal(pthread_create(&evicting[i], NULL, evict_all_the_time, &r), 0);
    assert_int_equal(pthread_create(&reading[i], NULL, pin_and_read, &r), 0);
  }
  for (int i = 0; i < EACH; i++) assert_int_equal(pthread_join(reading[i], NULL), 0);
  atomic_store(&r.stop, true);
  for (int i = 0; i < EACH; i++) assert_int_equal(pthread_join(evicting[i], NULL), 0);
  assert_false(r.failed);
  for (uint32_t layer = 0; layer < LAYERS; layer++) assert_published(&s, layer);
  teardown(&s);
}

// A slow reader blocks neither restores to its layer nor evictions from other layers, and what it reads stays in
// memory. This hangs where one of them waits for the reader.
static void test_a_reader_holds_up_nobody(void **unused) {
  (void)unused;
  scene s;
  const qkv_layer *layer, *other;
  setup(&s);
  append_all(&s);
  qkv_session_info info;
  qkv_session_read_info(s.session, &info, NULL);
  const uint64_t all = info.usage.bytes_coded;
  assert_int_equal(qkv_session_read(s.session, 2, &layer, NULL), QKV_OK);
  assert_int_equal(qkv_session_read(s.session, 3, &other, NULL),
                   QKV_OK);  // from here on the second is the first to go
  qkv_session_read_done(s.session, 3);
  assert_int_equal(qkv_session_evict(s.session, all / LAYERS * (LAYERS - 1), true), all / LAYERS * (LAYERS - 1));
  assert_int_equal(cold(&s, 2), 0);
  assert_true(qkv_layer_holds(layer, 0, UINT64_MAX));
  assert_int_equal(qkv_session_evict(s.session, UINT64_MAX, false), 0);
  qkv_session_read_done(s.session, 2);
  assert_int_equal(qkv_session_evict(s.session, UINT64_MAX, true), all / LAYERS);
  assert_int_equal(qkv_session_read(s.session, 2, &layer, NULL), QKV_OK);
  restore_layer(&s, 2);
  assert_true(qkv_layer_holds(layer, 0, UINT64_MAX));
  qkv_session_read_done(s.session, 2);
  teardown(&s);
}

typedef struct eviction {
  scene *scene;
  uint64_t freed;
} eviction;

static void *evict_all(void *context) {
  eviction *on = context;
  on->freed = qkv_session_evict(on->scene->session, UINT64_MAX, true);
  return NULL;
}

// An eviction that may wait does so for a reader, once nothing else is left.
static void test_an_eviction_waits_for_a_reader(void **unused) {
  (void)unused;
  scene s;
  const qkv_layer *layer;
  setup(&s);
  append_all(&s);
  qkv_session_info info;
  qkv_session_read_info(s.session, &info, NULL);
  eviction on = {.scene = &s};
  pthread_t thread;
  assert_int_equal(qkv_session_read(s.session, 2, &layer, NULL), QKV_OK);
  assert_int_equal(pthread_create(&thread, NULL, evict_all, &on), 0);
  const _Atomic unsigned *waiting = &layer_at(s.session, 2)->waiting;
  for (int ms = 0; ms < 10000 && atomic_load(waiting) == 0; ms++)
    (void)nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
  assert_true(qkv_layer_holds(layer, 0, UINT64_MAX));
  qkv_session_read_done(s.session, 2);
  assert_int_equal(pthread_join(thread, NULL), 0);
  assert_int_equal(on.freed, info.usage.bytes_coded);
  for (uint32_t i = 0; i < LAYERS; i++) assert_int_equal(cold(&s, i), PAGES * 64);
  teardown(&s);
}

typedef struct pause {
  backing_double *backing;
  pthread_mutex_t lock;
  pthread_cond_t changed;
  bool reached, over;
} pause;

// The first one waits until the test has read.
static qkv_record_state pausing_state(void *context, uint64_t record) {
  pause *at = context;
  (void)pthread_mutex_lock(&at->lock);
  at->reached = true;
  (void)pthread_cond_broadcast(&at->changed);
  while (!at->over) (void)pthread_cond_wait(&at->changed, &at->lock);
  (void)pthread_mutex_unlock(&at->lock);
  return double_state(at->backing, record);
}

static void *evict_once(void *context) {
  scene *s = context;
  (void)qkv_session_evict(s->session, UINT64_MAX, true);
  return NULL;
}

// A slow eviction blocks no reader. This hangs where it does.
static void test_eviction_holds_up_no_reader(void **unused) {
  (void)unused;
  scene s;
  setup(&s);
  append_all(&s);
  pause at = {.backing = &s.backing, .lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
  s.backing.backing.context = &at;
  s.backing.backing.state = pausing_state;
  pthread_t thread;
  assert_int_equal(pthread_create(&thread, NULL, evict_once, &s), 0);
  (void)pthread_mutex_lock(&at.lock);
  while (!at.reached) (void)pthread_cond_wait(&at.changed, &at.lock);
  (void)pthread_mutex_unlock(&at.lock);
  for (uint32_t i = 0; i < LAYERS; i++) {
    const qkv_layer *layer;
    assert_int_equal(qkv_session_read(s.session, i, &layer, NULL), QKV_OK);
    assert_true(qkv_layer_holds(layer, 0, UINT64_MAX));
    free(decoded_rows(layer, QKV_V));
    qkv_session_read_done(s.session, i);
  }
  (void)pthread_mutex_lock(&at.lock);
  at.over = true;
  (void)pthread_cond_broadcast(&at.changed);
  (void)pthread_mutex_unlock(&at.lock);
  assert_int_equal(pthread_join(thread, NULL), 0);
  for (uint32_t i = 0; i < LAYERS; i++) assert_int_equal(cold(&s, i), PAGES * 64);
  s.backing.backing.context = &s.backing;
  s.backing.backing.state = double_state;
  teardown(&s);
}

// Pages of one layer come back together; behind one that is damaged none does.
static void test_pages_come_back_together(void **unused) {
  (void)unused;
  scene s;
  qkv_missing_page missing[8];
  void *images[PAGES];
  size_t failed = 99;
  setup(&s);
  append_all(&s);
  assert_true(qkv_session_evict(s.session, UINT64_MAX, true) > 0);
  const uint64_t used = qkv_arena_read(s.arena).bytes_used;
  assert_int_equal(qkv_session_missing(s.session, 1, 0, 0, false, missing, 8), PAGES);
  uint64_t reservation = PAGES * qkv_arena_cost(missing[0].bytes);
  assert_int_equal(qkv_arena_reserve(s.arena, reservation, NULL), QKV_OK);
  for (size_t i = 0; i < PAGES; i++) {
    images[i] = qkv_arena_alloc_overhead(s.arena, missing[i].bytes);
    memcpy(images[i], s.backing.records[missing[i == 1 ? 0 : i].record].page, missing[i].bytes);
  }
  assert_int_equal(qkv_session_restore(s.session, 1, &reservation, missing, images, PAGES, &failed, NULL),
                   QKV_DATA_LOSS);
  assert_int_equal(failed, 1);
  for (size_t i = 0; i < PAGES; i++) assert_null(images[i]);
  assert_int_equal(cold(&s, 1), (PAGES - 1) * 64);
  assert_int_equal(reservation, (PAGES - 1) * qkv_arena_cost(missing[0].bytes));
  qkv_arena_unreserve(s.arena, reservation);
  assert_int_equal(qkv_arena_read(s.arena).bytes_used, used + qkv_arena_cost(missing[0].bytes));
  assert_published(&s, 1);
  teardown(&s);
}

// Lost planes come back for all pages at once.
static void test_lost_planes_come_back_together(void **unused) {
  (void)unused;
  scene s;
  qkv_missing_page missing[8];
  void *images[PAGES];
  size_t failed;
  qkv_retier_report report = {0};
  setup(&s);
  append_all(&s);
  assert_true(qkv_session_settle(s.session));
  const uint64_t used = qkv_arena_read(s.arena).bytes_used;
  assert_int_equal(qkv_session_demote(s.session, &(qkv_retier_scope){.layer_count = 0}, 2, true, &report, NULL),
                   QKV_OK);
  assert_true(qkv_arena_read(s.arena).bytes_used < used);
  for (uint32_t layer = 0; layer < LAYERS; layer++) {
    assert_int_equal(qkv_session_missing(s.session, layer, 0, 0, false, missing, 8), 0);
    assert_int_equal(qkv_session_missing(s.session, layer, 0, 0, true, missing, 8), PAGES);
    for (size_t i = 0; i < PAGES; i++) {
      images[i] = qkv_arena_alloc_overhead(s.arena, missing[i].bytes);
      memcpy(images[i], s.backing.records[missing[i].record].page, missing[i].bytes);
    }
    assert_int_equal(qkv_session_restore(s.session, layer, NULL, missing, images, PAGES, &failed, NULL), QKV_OK);
    assert_int_equal(qkv_session_missing(s.session, layer, 0, 0, true, missing, 8), 0);
    assert_published(&s, layer);
  }
  assert_int_equal(qkv_arena_read(s.arena).bytes_used, used);
  teardown(&s);
}

static uint64_t shortest(const scene *s) {
  uint64_t lengths[LAYERS], least = UINT64_MAX;
  qkv_session_info info;
  qkv_session_read_info(s->session, &info, lengths);
  for (size_t i = 0; i < LAYERS; i++) least = lengths[i] < least ? lengths[i] : least;
  return least;
}

// Nothing is put for a layer until it is truncated, too: no other thread has its rows, nor reads it.
static void no_layer_is_free(void *context) {
  const scene *s = context;
  for (uint32_t i = 0; i < LAYERS; i++) {
    const qkv_layer *layer;
    assert_int_equal(qkv_session_try_read(s->session, i, &layer, NULL), QKV_UNAVAILABLE);
    assert_int_not_equal(pthread_mutex_trylock(&layer_at(s->session, i)->rows), 0);
    assert_int_equal(layer_at(s->session, i)->layer.length, FIRST + TOKENS);
  }
}

// One cut for all layers, but none where only exact rows go.
static void test_all_layers_are_cut_at_once(void **unused) {
  (void)unused;
  scene s;
  qkv_error error = {0};
  setup(&s);
  append_all(&s);
  assert_int_equal(qkv_session_truncate(s.session, FIRST + TOKENS, NULL, 0, &error), QKV_OK);
  assert_int_equal(s.backing.cuts, 0);
  s.backing.on_cut = no_layer_is_free;
  s.backing.on_cut_context = &s;
  assert_int_equal(qkv_session_truncate(s.session, 100, NULL, 0, &error), QKV_OK);
  assert_int_equal(s.backing.cuts, 1);
  assert_int_equal(s.backing.cut_layer, QKV_BACKING_LAYERS);
  assert_int_equal(s.backing.cut_position, 100);
  assert_int_equal(shortest(&s), 100);
  s.backing.on_cut = NULL;
  const uint32_t some[] = {1, 2};
  assert_int_equal(qkv_session_truncate(s.session, 70, some, 2, &error), QKV_OK);
  assert_int_equal(s.backing.cuts, 3);
  assert_int_equal(s.backing.cut_layer, 2);
  assert_int_equal(qkv_session_truncate(s.session, 0, NULL, 0, &error), QKV_OK);
  assert_int_equal(s.backing.cuts, 4);
  assert_int_equal(s.backing.cut_position, FIRST);
  assert_int_equal(shortest(&s), FIRST);
  assert_int_equal(s.backing.drops, LAYERS * PAGES);
  s.backing.drops = 0;
  teardown(&s);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_appended_pages_are_put),
      cmocka_unit_test(test_settle_puts_the_rest),
      cmocka_unit_test(test_pages_are_written_from_where_they_lie),
      cmocka_unit_test(test_all_layers_are_cut_at_once),
      cmocka_unit_test(test_pins_keep_what_came_back),
      cmocka_unit_test(test_layers_leave_in_turn),
      cmocka_unit_test(test_found_again),
      cmocka_unit_test(test_eviction_during_reads),
      cmocka_unit_test(test_a_reader_holds_up_nobody),
      cmocka_unit_test(test_an_eviction_waits_for_a_reader),
      cmocka_unit_test(test_eviction_holds_up_no_reader),
      cmocka_unit_test(test_pages_come_back_together),
      cmocka_unit_test(test_lost_planes_come_back_together),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
