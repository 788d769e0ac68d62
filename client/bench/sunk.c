// What a session takes of memory that is on the SSD alone: sessions over a real storage, each appended to, written
// and sunk, then folded; and forks of a session that stays in memory.
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/bench/forks.h"
#include "engine/cache/session_fold.h"
#include "engine/cache/session_spill.h"
#include "engine/cache/store.h"
#include "storage/storage.h"

enum {
  SESSIONS = 128,
  LAYERS = 32,
  TOKENS = 1024,
  FORKS = 1000,
  PREFIX = 4096,
  DIM = 64,
  WAIT_US = 1000,
  SYNC_MS = 50,
  QUIET_US = 300000,
  SEGMENT_BYTES = 128 << 20,
  SEGMENTS_MAX = 64,
  KIND_FOLD = 3
};

// A table of the tier that writes what it is given, and reads folded sessions back.
typedef struct sunk_scene {
  qkv_storage *storage;
  qkv_backing backing;
  qkv_store *store;
  const qkv_model *model;
  uint16_t *rows;
  uint32_t *ids;
  char directory[64];
} sunk_scene;

static void must(qkv_status status, const qkv_error *error) {
  if (status == QKV_OK) return;
  fprintf(stderr, "qkv-bench: %s\n", error->text);
  abort();
}

// ---- The tier ----

static void on_written(void *context, uint64_t record, qkv_status status) {
  (void)record;
  if (status != QKV_OK) abort();
  free(context);
}

// A copy, as the page may leave memory before it is written.
static uint64_t put(void *context, uint64_t session, const qkv_model *model, qkv_page_hold *page, uint32_t tokens,
                    const qkv_prefix_hash *hash) {
  const sunk_scene *s = context;
  const qkv_page_header *header = page->image;
  uint64_t record = 0;
  void *copy = malloc(page->bytes);
  (void)model;
  if (copy == NULL) abort();
  memcpy(copy, page->image, page->bytes);
  qkv_storage_put_request request = {
      .meta = {.session = session, .position = header->position, .layer = header->layer, .tokens = tokens},
      .payload = copy,
      .bytes = page->bytes,
      .written = on_written,
      .context = copy};
  if (hash != NULL) memcpy(request.meta.hash, hash, sizeof request.meta.hash);
  qkv_page_let_go(page);
  if (qkv_storage_put(s->storage, &request, &record, NULL) == QKV_OK) return record;
  free(copy);
  return 0;
}

static qkv_record_state state_of(void *context, uint64_t record) {
  qkv_record_info info;
  return qkv_storage_find(((const sunk_scene *)context)->storage, record, &info) == QKV_OK ? QKV_RECORD_DURABLE
                                                                                           : QKV_RECORD_WAITING;
}

static void drop(void *context, uint64_t record) {
  qkv_storage_drop(((const sunk_scene *)context)->storage, record);
}

static qkv_status health(void *context, uint64_t session) {
  (void)context;
  (void)session;
  return QKV_OK;
}

static void cut(void *context, uint64_t session, uint32_t layer, uint64_t position) {
  qkv_storage_session_truncate(((const sunk_scene *)context)->storage, session, layer, position, NULL, NULL);
}

static uint64_t put_fold(void *context, uint64_t session, const void *bytes, uint64_t count,
                         const _Atomic bool *stop) {
  const sunk_scene *s = context;
  qkv_record_info info;
  uint64_t record = 0;
  void *copy = malloc(count);
  if (copy == NULL) abort();
  memcpy(copy, bytes, count);
  const qkv_storage_put_request request = {.meta = {.session = session, .tokens = 1, .kind = KIND_FOLD},
                                           .payload = copy,
                                           .bytes = count,
                                           .written = on_written,
                                           .context = copy};
  must(qkv_storage_put(s->storage, &request, &record, NULL), &(qkv_error){.text = "a record is refused"});
  while (qkv_storage_find(s->storage, record, &info) != QKV_OK && !*stop) (void)usleep(100);
  qkv_storage_session_pack(s->storage, session);
  return record;
}

static void on_unpacked(void *context, qkv_status status) {
  (void)status;
  atomic_store((_Atomic bool *)context, true);
}

static qkv_status read_fold(void *context, uint64_t session, uint64_t *record, uint8_t **bytes, uint64_t *count,
                            qkv_error *error) {
  const sunk_scene *s = context;
  _Atomic bool unpacked = false;
  qkv_storage_session_unpack(s->storage, session, on_unpacked, &unpacked);
  while (!atomic_load(&unpacked)) (void)usleep(10);
  qkv_record_info info;
  QKV_TRY(qkv_storage_find_last(s->storage, session, KIND_FOLD, &info));
  *record = info.record;
  *count = info.bytes;
  *bytes = malloc(*count);
  if (*bytes == NULL) abort();
  qkv_storage_batch *batch = qkv_storage_batch_create(s->storage, record, 1, *count);
  const qkv_status status = qkv_storage_batch_wait(batch, 0, *bytes, *count, error);
  qkv_storage_batch_destroy(&batch);
  return status;
}

// ---- Sessions ----

static void setup(sunk_scene *s) {
  const qkv_model model = {.name = "sunk",
                           .layers = LAYERS,
                           .kv_heads = 1,
                           .q_heads = 1,
                           .key_dim = DIM,
                           .value_dim = DIM,
                           .dtype = QKV_FP16,
                           .policy = QKV_POLICY_UNSET};
  qkv_error error = {0};
  qkv_storage_config config;
  qkv_storage_config_init(&config);
  (void)snprintf(s->directory, sizeof s->directory, "qkv-bench-sunk.XXXXXX");
  if (mkdtemp(s->directory) == NULL) {
    (void)qkv_fail(&error, QKV_INTERNAL, "cannot make a directory here: %s", strerror(errno));
    must(QKV_INTERNAL, &error);
  }
  config.directory = s->directory;
  config.segment_bytes = SEGMENT_BYTES;
  config.compress = false;
  config.sync_ms = SYNC_MS;
  config.compact_bytes_per_s = 0;
  must(qkv_storage_open(&config, &(qkv_storage_restore){.context = NULL}, &s->storage, &error), &error);
  s->backing = (qkv_backing){.context = s,
                             .put = put,
                             .put_fold = put_fold,
                             .state = state_of,
                             .drop = drop,
                             .health = health,
                             .cut = cut,
                             .read_fold = read_fold};
  s->store = qkv_store_create(&(qkv_store_config){
      .memory_budget = UINT64_C(1) << 33,
      .models_max = 1,
      .sessions_max = SESSIONS + FORKS + 2,
      .prefixes_max = (SESSIONS * TOKENS + PREFIX) / QKV_PREFIX_PAGE + 1,
      .policy = {.codec = qkv_codec_by_id(QKV_CODEC_EMBEDDED), .bits_k = 2, .bits_v = 2, .recent_window = 0}});
  must(qkv_store_register_model(s->store, &model, &s->model, &error), &error);
  s->rows = qkv_bench_rows((size_t)2 * TOKENS * DIM * sizeof *s->rows, 1);
  s->ids = calloc(TOKENS, sizeof *s->ids);
  if (s->ids == NULL) abort();
}

static void teardown(sunk_scene *s) {
  char command[128];
  free(s->rows);
  free(s->ids);
  qkv_store_destroy(&s->store);
  qkv_storage_close(&s->storage);
  (void)snprintf(command, sizeof command, "rm -r '%s'", s->directory);
  if (system(command) != 0) abort();
}

static void append(const sunk_scene *s, qkv_session *session, uint64_t position) {
  const size_t bytes = (size_t)TOKENS * DIM * sizeof *s->rows;
  const int64_t dims[] = {TOKENS, 1, DIM};
  const qkv_segment k_of = {.data = (const uint8_t *)s->rows, .length = bytes};
  const qkv_segment v_of = {.data = (const uint8_t *)s->rows + bytes, .length = bytes};
  const qkv_tensor k = qkv_tensor_dense(QKV_FP16, 3, dims, &k_of), v = qkv_tensor_dense(QKV_FP16, 3, dims, &v_of);
  qkv_error error = {0};
  for (uint32_t layer = 0; layer < LAYERS; layer++) {
    uint64_t appended, length;
    must(qkv_session_append(session, layer, position, &k, &v, false, &appended, &length, &error), &error);
  }
  qkv_session_tokens *tokens = qkv_session_tokens_of(session);
  qkv_arena *arena = tokens->config.arena;
  uint64_t reserved = qkv_session_tokens_cost(tokens, position, TOKENS);
  must(qkv_arena_reserve(arena, reserved, &error), &error);
  s->ids[0]++;
  qkv_session_tokens_keep(tokens, qkv_session_tokens_cuts(tokens), position, s->ids, TOKENS, &reserved);
  qkv_arena_unreserve(arena, reserved);
}

// Of so many tokens, which are durable and in memory.
static qkv_session *make_durable(sunk_scene *s, int number, uint64_t tokens) {
  qkv_session_config config = {.tenant = "default",
                               .purpose = QKV_PURPOSE_ATTEND,
                               .policy = QKV_POLICY_UNSET,
                               .durability = QKV_DURABILITY_ASYNC,
                               .backing = &s->backing,
                               .id = qkv_storage_session_number(s->storage)};
  qkv_session *session = NULL;
  qkv_error error = {0};
  char name[32];
  (void)snprintf(name, sizeof name, "session-%d", number);
  config.name = name;
  must(qkv_storage_journal(s->storage, QKV_JOURNAL_SESSION_OPEN, config.id, NULL, 0, NULL, NULL, &error), &error);
  must(qkv_store_open(s->store, &config, s->model->name, &session, &error), &error);
  for (uint64_t position = 0; position < tokens; position += TOKENS) append(s, session, position);
  while (!qkv_session_settle(session)) (void)usleep(WAIT_US);
  return session;
}

static qkv_session *make(sunk_scene *s, int number) {
  qkv_session *session = make_durable(s, number, TOKENS);
  (void)qkv_session_evict(session, UINT64_MAX, true);
  return session;
}

static void on_durable(void *context, qkv_status status) {
  if (status != QKV_OK) abort();
  atomic_store((_Atomic bool *)context, true);
}

static void make_forks(sunk_scene *s, qkv_session *parent, qkv_session *forks[FORKS]) {
  uint64_t positions[LAYERS];
  _Atomic bool journaled = false;
  qkv_error error = {0};
  for (uint32_t i = 0; i < LAYERS; i++) positions[i] = PREFIX;
  for (int i = 0; i < FORKS; i++) {
    char name[32];
    qkv_session_config config = *qkv_session_config_of(parent);
    (void)snprintf(name, sizeof name, "fork-%d", i);
    config.name = name;
    config.id = qkv_storage_session_number(s->storage);
    atomic_store(&journaled, i < FORKS - 1);
    must(qkv_storage_session_fork(s->storage, config.id, qkv_session_id(parent), positions, LAYERS, NULL, 0,
                                  i < FORKS - 1 ? NULL : on_durable, &journaled, &error),
         &error);
    must(qkv_store_fork(s->store, parent, &config, positions, &forks[i], &error), &error);
  }
  while (!atomic_load(&journaled)) (void)usleep(WAIT_US);
}

// The headers of all records of the open segment are in memory until it is full: two records that do not fit together
// begin another one.
static void fill_segment(const sunk_scene *s) {
  for (int i = 0; i < 2; i++) {
    const uint64_t bytes = SEGMENT_BYTES / 8 * 5;
    uint64_t record = 0;
    _Atomic bool durable = false;
    void *payload = calloc(1, bytes);
    if (payload == NULL) abort();
    const qkv_storage_put_request request = {.meta = {.session = qkv_storage_session_number(s->storage), .tokens = 1},
                                             .payload = payload,
                                             .bytes = bytes,
                                             .written = on_written,
                                             .context = payload};
    must(qkv_storage_put(s->storage, &request, &record, NULL), &(qkv_error){.text = "a record is refused"});
    qkv_storage_sync(s->storage, on_durable, &durable);
    while (!atomic_load(&durable)) (void)usleep(WAIT_US);
    qkv_storage_drop(s->storage, record);
  }
}

// Nothing is under way any more, but for what is always there: the open segment and the next one.
static void await_quiet(const sunk_scene *s) {
  qkv_storage_segment segments[SEGMENTS_MAX];
  size_t unsealed = SEGMENTS_MAX;
  while (unsealed > 2) {
    (void)usleep(QUIET_US);
    const size_t count = qkv_storage_list_segments(s->storage, segments, SEGMENTS_MAX);
    unsealed = 0;
    for (size_t i = 0; i < count; i++) unsealed += !segments[i].sealed;
  }
}

static uint64_t held(const sunk_scene *s) {
  await_quiet(s);  // what is folded leaves memory meanwhile
  fill_segment(s);
  await_quiet(s);
  return qkv_heap_read(qkv_arena_heap(qkv_store_arena(s->store))).bytes_used + mallinfo2().uordblks;
}

static void fold(const sunk_scene *s, qkv_session *const *sessions, int count) {
  for (int i = 0; i < count; i++) {
    if (!qkv_store_fold(s->store, sessions[i])) abort();
  }
}

// Microseconds, the median. The references are given back.
static double unfold(qkv_session **sessions, int count) {
  qkv_samples us = {0};
  for (int i = 0; i < count; i++) {
    qkv_error error = {0};
    const double began = qkv_bench_now();
    must(qkv_session_unfold(sessions[i], NULL, &error), &error);
    qkv_samples_add(&us, 1e6 * (qkv_bench_now() - began));
    qkv_session_unref(&sessions[i]);
  }
  const double median = qkv_samples_quantile(&us, 0.5);
  qkv_samples_free(&us);
  return median;
}

static void measure_forks(sunk_scene *s, json_t *result) {
  static qkv_session *forks[FORKS];
  qkv_session *parent = make_durable(s, SESSIONS + 1, PREFIX);
  const uint64_t before = held(s);
  make_forks(s, parent, forks);
  const double bytes = (double)(held(s) - before) / FORKS;
  fold(s, forks, FORKS);
  const double folded = (double)(held(s) - before) / FORKS;
  json_object_set_new(result, "idle_fork_bytes", json_real(bytes));
  json_object_set_new(result, "folded_fork_bytes", json_real(folded));
  json_object_set_new(result, "fork_unfold_us_p50", json_real(unfold(forks, FORKS)));
  qkv_session_unref(&parent);
}

void qkvi_bench_sunk(json_t *result) {
  sunk_scene s = {0};
  qkv_session *sessions[SESSIONS];
  setup(&s);
  qkv_session *first = make(&s, SESSIONS);  // what all share
  fold(&s, &first, 1);
  const uint64_t before = held(&s);
  for (int i = 0; i < SESSIONS; i++) sessions[i] = make(&s, i);
  qkv_storage_stats stats;
  qkv_storage_read_stats(s.storage, &stats);
  const double bytes = (double)(held(&s) - before) / SESSIONS;
  fold(&s, sessions, SESSIONS);
  const double folded = (double)(held(&s) - before) / SESSIONS;
  const double unfold_us = unfold(sessions, SESSIONS);
  qkv_session_unref(&first);
  json_object_set_new(result, "sunk_session_bytes", json_real(bytes));
  json_object_set_new(result, "folded_session_bytes", json_real(folded));
  json_object_set_new(result, "unfold_us_p50", json_real(unfold_us));
  json_object_set_new(result, "sunk_session_index_bytes",
                      json_real((double)stats.index_bytes / (double)stats.sessions));
  measure_forks(&s, result);
  teardown(&s);
}
