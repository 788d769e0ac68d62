// A backing in memory, whose records change state when the test says so.
#ifndef QKV_TESTS_ENGINE_CACHE_BACKING_DOUBLE_H
#define QKV_TESTS_ENGINE_CACHE_BACKING_DOUBLE_H

#include "engine/cache/backing.h"
#include "engine/cache/layer_spill.h"
#include "tests/engine/cache/fixture.h"

enum { DOUBLE_RECORDS = 256 };

typedef struct double_record {
  void *page;
  qkv_page_hold hold;  // while `holding`
  uint32_t bytes, tokens;
  uint64_t session;
  qkv_record_state state;
} double_record;

typedef struct backing_double {
  qkv_backing backing;
  double_record records[DOUBLE_RECORDS];  // by number
  uint64_t count;                         // numbers given out, 1 to count
  uint64_t capacity;                      // capacity left, in records
  qkv_record_state first;                 // the state of a new record
  bool failed;                            // takes nothing any more
  bool holding;                           // pages are held until double_let_go
  size_t drops, cuts;
  uint32_t cut_layer;  // of the last cut
  uint64_t cut_position;
  void (*on_cut)(void *context);  // may be NULL
  void *on_cut_context;
} backing_double;

static inline uint64_t double_take(backing_double *made, uint64_t session, const void *page, uint32_t bytes,
                                   uint32_t tokens) {
  if (made->capacity == 0 || made->failed) return 0;
  made->capacity--;
  const uint64_t number = ++made->count;
  assert_true(number < DOUBLE_RECORDS);
  double_record *record = &made->records[number];
  *record = (double_record){
      .page = malloc(bytes), .bytes = bytes, .tokens = tokens, .session = session, .state = made->first};
  assert_non_null(record->page);
  memcpy(record->page, page, bytes);
  return number;
}

static inline uint64_t double_put(void *context, uint64_t session, const qkv_model *model, qkv_page_hold *page,
                                  uint32_t tokens, const qkv_prefix_hash *hash) {
  backing_double *made = context;
  (void)hash;
  (void)model;
  const uint64_t number = double_take(made, session, page->image, page->bytes, tokens);
  if (number != 0 && made->holding) {
    made->records[number].hold = *page;
  } else {
    qkv_page_let_go(page);
  }
  return number;
}

// Checks that held pages are unchanged, and releases them.
static inline void double_let_go(backing_double *made) {
  for (uint64_t i = 1; i <= made->count; i++) {
    double_record *record = &made->records[i];
    if (record->hold.image == NULL) continue;
    assert_memory_equal(record->hold.image, record->page, record->bytes);
    qkv_page_let_go(&record->hold);
  }
}

static inline qkv_record_state double_state(void *context, uint64_t record) {
  const backing_double *made = context;
  return made->records[record].state;
}

static inline void double_drop(void *context, uint64_t record) {
  backing_double *made = context;
  made->records[record].state = QKV_RECORD_GONE;
  made->drops++;
}

static inline qkv_status double_health(void *context, uint64_t session) {
  (void)session;
  return ((const backing_double *)context)->failed ? QKV_INTERNAL : QKV_OK;
}

// In records.
static inline qkv_tier_capacity double_capacity(void *context) {
  const backing_double *made = context;
  uint64_t held = 0;
  for (uint64_t i = 1; i <= made->count; i++) held += made->records[i].state != QKV_RECORD_GONE;
  return (qkv_tier_capacity){.bytes = held, .bytes_max = held + made->capacity};
}

static inline void double_cut(void *context, uint64_t session, uint32_t layer, uint64_t position) {
  backing_double *made = context;
  (void)session;
  made->cuts++;
  made->cut_layer = layer;
  made->cut_position = position;
  if (made->on_cut != NULL) made->on_cut(made->on_cut_context);
}

static inline void double_init(backing_double *made) {
  *made = (backing_double){.capacity = DOUBLE_RECORDS, .first = QKV_RECORD_DURABLE};
  made->backing = (qkv_backing){.context = made,
                                .put = double_put,
                                .state = double_state,
                                .drop = double_drop,
                                .health = double_health,
                                .capacity = double_capacity,
                                .cut = double_cut};
}

static inline void double_all(backing_double *made, qkv_record_state state) {
  for (uint64_t i = 1; i <= made->count; i++) made->records[i].state = state;
}

// Of a layer that no other thread has.
static inline uint64_t evict(const qkv_layer *layer, uint64_t bytes, int64_t unused_since_ms) {
  bool in_use;
  return qkv_layer_evict(layer, bytes, unused_since_ms, &in_use);
}

// As a session does it. The image is freed or the layer's.
static inline qkv_status restore_image(qkv_layer *layer, const qkv_missing_page *page, void *image,
                                       qkv_error *error) {
  uint32_t bytes = page->bytes;
  qkv_status status = qkv_layer_restore(layer, NULL, page, &image, error);
  if (status == QKV_OK && !qkv_page_is_cold(page))
    status = qkv_layer_restore_full(layer, NULL, page, &image, &bytes, error);
  qkv_arena_free_overhead(layer->config.arena, image, bytes);
  return status;
}

static inline void double_deinit(backing_double *made) {
  for (uint64_t i = 1; i <= made->count; i++) free(made->records[i].page);
}

#endif
