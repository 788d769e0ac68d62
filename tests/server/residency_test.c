// The SSD tier of the daemon in this process, under concurrency: sessions that are evicted while they are restored,
// that are closed and cut while their pages are written, and files that are compacted meanwhile. Rows are compared,
// bit for bit, with those of a session that did the same in memory alone. Runs under ThreadSanitizer.
#include "server/residency/residency.h"
#include "engine/base/clock.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/syscall.h>

#include "engine/codec/calibrate.h"
#include "tests/server/residency_fixture.h"

enum { ROUNDS = 12 };

// ---- Another thread ----

typedef struct other {
  const scene *s;
  qkv_session *session;
  const content *wanted;
  uint64_t seed;
  _Atomic bool stop, wrong;
  pthread_t thread;
} other;

static void begin_other(other *on, void *(*run)(void *)) {
  assert_int_equal(pthread_create(&on->thread, NULL, run, on), 0);
}

static void end_other(other *on) {
  atomic_store(&on->stop, true);
  assert_int_equal(pthread_join(on->thread, NULL), 0);
  assert_false(atomic_load(&on->wrong));
}

static void *evict(void *context) {
  other *on = context;
  while (!atomic_load(&on->stop)) (void)qkv_session_evict(on->session, UINT64_MAX, true);
  return NULL;
}

static void *bring_back(void *context) {
  other *on = context;
  for (int i = 0; i < ROUNDS; i++) {
    if (!same_layer(on->s, on->session, (uint32_t)random_below(&on->seed, LAYERS), on->wanted))
      atomic_store(&on->wrong, true);
  }
  return NULL;
}

static void *read_ahead(void *context) {
  other *on = context;
  while (!atomic_load(&on->stop)) {
    const qkvi_wanted wanted = {.session = on->session, .layer = (uint32_t)random_below(&on->seed, LAYERS)};
    (void)qkvi_restore_ahead(on->s->residency, &wanted, qkvi_budget_limit(on->s->residency));
  }
  return NULL;
}

static void *settle(void *context) {
  other *on = context;
  while (!atomic_load(&on->stop)) (void)qkv_session_settle(on->session);
  return NULL;
}

// Puts the same rows again and again: only new ones are added.
static void *append_on(void *context) {
  other *on = context;
  for (uint64_t at = 0; at < TOKENS && !atomic_load(&on->stop); at += 64)
    (void)append(on->s, on->session, 0, at, at + 64);
  return NULL;
}

static void *compact(void *context) {
  other *on = context;
  uint64_t freed;
  while (!atomic_load(&on->stop)) {
    if (qkvi_upkeep_compact(on->s->residency, 0.99, &freed, NULL) != QKV_OK) atomic_store(&on->wrong, true);
  }
  return NULL;
}

// Takes whatever memory is free, bit by bit, up to a third of it, as threads do that never wait.
static void *take_headroom(void *context) {
  const other *on = context;
  qkv_arena *arena = qkv_store_arena(on->s->store);
  const uint64_t bit = 1024, most = qkvi_budget_limit(on->s->residency) / 3;
  uint64_t taken = 0;
  while (!atomic_load(&on->stop)) {
    if (qkv_arena_reserve(arena, bit, NULL) == QKV_OK) taken += bit;
    if (taken < most) continue;
    qkv_arena_unreserve(arena, taken);
    taken = 0;
  }
  qkv_arena_unreserve(arena, taken);
  return NULL;
}

// Appends within their reservation, and begins anew when the session is full.
static void *append_in_headroom(void *context) {
  other *on = context;
  const scene *s = on->s;
  for (uint64_t i = 0; i < ROUNDS * (uint64_t)LAYERS; i++) {
    const uint32_t layer = (uint32_t)i % LAYERS;
    const uint64_t begin = i / LAYERS * 128 % TOKENS, end = begin + 128;
    const qkvi_wanted wanted = {.session = on->session,
                                .layer = layer,
                                .begin = begin,
                                .end = end,
                                .extra = qkv_session_append_cost(on->session, layer, end)};
    uint64_t headroom = 0, appended, length;
    row_pair pair;
    make_pair(&pair, &s->rows[0], begin, end, QKV_FP16);
    if (qkvi_restore(s->residency, &wanted, &headroom, NULL) != QKV_OK) {
      atomic_store(&on->wrong, true);
    } else {
      if (qkv_session_append_in(on->session, layer, &(qkv_append_use){.headroom = &headroom}, begin, &pair.k.tensor,
                                &pair.v.tensor, false, &appended, &length, NULL) != QKV_OK)
        atomic_store(&on->wrong, true);
      qkvi_budget_release(s->residency, on->session, layer);
      qkvi_budget_unreserve(s->residency, &headroom);
    }
    free_pair(&pair);
  }
  return NULL;
}

// The read-ahead of all concurrent restores keeps to the limit of one.
static void *watch_windows(void *context) {
  other *on = context;
  qkvi_residency *residency = on->s->residency;
  while (!atomic_load(&on->stop)) {
    uint64_t sum = 0;
    qkvi_residency_lock(residency);
    for (const qkvi_restoring *at = residency->restoring; at != NULL; at = at->next) sum += at->window;
    qkvi_residency_unlock(residency);
    if (sum > 2 * qkvi_restore_window(residency, 0)) atomic_store(&on->wrong, true);
  }
  return NULL;
}

// ---- A disk that does not make durable ----

static _Atomic bool failing;

int fdatasync(int file) {  // in place of libc's; not io_uring's
  if (!atomic_load(&failing)) return (int)syscall(SYS_fdatasync, file);
  errno = EIO;
  return -1;
}

// ---- A disk that does not give ----

static uint64_t unreadable;  // the segment; 0: none. No thread of a storage runs while it changes

ssize_t pread(int file, void *bytes, size_t size, off_t offset) {  // in place of libc's; not io_uring's
  char link[64], path[512] = "", segment[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  (void)!readlink(link, path, sizeof path - 1);
  snprintf(segment, sizeof segment, "segment-%016" PRIx64 ".qkv", unreadable);
  if (unreadable == 0 || strstr(path, segment) == NULL) return syscall(SYS_pread64, file, bytes, size, offset);
  errno = EIO;
  return -1;
}

// Records of the session that are not durable, nor in the state `but`.
static size_t count_pending(qkvi_residency *residency, uint64_t session, qkv_record_state but) {
  size_t count = 0;
  qkvi_residency_lock(residency);
  for (const qkvi_pending *at = residency->pending; at != NULL; at = at->hh.next)
    count += at->session == session && at->state != but;
  qkvi_residency_unlock(residency);
  return count;
}

// The same, once there are none or a minute has passed.
static size_t await_pending(qkvi_residency *residency, uint64_t session, qkv_record_state but) {
  const int64_t until = qkv_now_ms() + 60000;
  for (uint64_t seen = qkvi_progress_count(residency);; seen = qkvi_progress_await(residency, seen, QKVI_STEP_MS)) {
    const size_t count = count_pending(residency, session, but);
    if (count == 0 || qkv_now_ms() > until) return count;
  }
}

// ---- Tests ----

static void test_eviction_while_it_comes_back(const char *io) {
  scene s;
  setup(&s, io);
  content wanted = in_memory(&s, TOKENS);
  qkv_session *session = open_session(&s, "a", QKV_DURABILITY_ASYNC);
  assert_int_equal(append(&s, session, 0, 0, TOKENS), QKV_OK);
  sync_all(&s, session);
  other evicting = {.s = &s, .session = session}, ahead = {.s = &s, .session = session, .seed = 3};
  other readers[3];
  begin_other(&evicting, evict);
  begin_other(&ahead, read_ahead);
  for (int i = 0; i < 3; i++) {
    readers[i] = (other){.s = &s, .session = session, .wanted = &wanted, .seed = 100 + (uint64_t)i};
    begin_other(&readers[i], bring_back);
  }
  for (int i = 0; i < 3; i++) end_other(&readers[i]);
  end_other(&evicting);
  end_other(&ahead);
  qkv_session_unref(&session);
  restart(&s);
  assert_same(&s, "a", &wanted);
  free_content(&wanted);
  teardown(&s);
}

// A thread holds the last layer, which therefore does not learn that it has become durable.
static void test_a_range_waits_for_itself(const char *io) {
  scene s;
  const qkv_layer *layer = NULL;
  qkv_error error = {0};
  setup(&s, io);
  qkv_session *session = open_session(&s, "a", QKV_DURABILITY_ASYNC);
  assert_int_equal(append(&s, session, 0, 0, 256), QKV_OK);
  sync_all(&s, session);
  assert_int_equal(append(&s, session, 0, 256, 512), QKV_OK);
  assert_int_equal(qkv_session_read(session, LAYERS - 1, &layer, NULL), QKV_OK);
  const uint32_t first[] = {0, 2};
  if (qkvi_write_back_sync_range(s.residency, NULL, session, first, 2, 0, &error) != QKV_OK)
    fail_msg("%s", error.text);
  if (qkvi_write_back_sync_range(s.residency, NULL, session, NULL, 0, 256, &error) != QKV_OK)
    fail_msg("%s", error.text);
  uint64_t durable[LAYERS];
  qkv_session_read_durable(session, durable);
  assert_int_equal(durable[0], 512);
  assert_int_equal(durable[2], 512);
  qkv_session_read_done(session, LAYERS - 1);
  if (qkvi_write_back_sync_range(s.residency, NULL, session, NULL, 0, 512, &error) != QKV_OK)
    fail_msg("%s", error.text);
  qkv_session_read_durable(session, durable);
  assert_int_equal(durable[LAYERS - 1], 512);
  qkv_session_unref(&session);
  teardown(&s);
}

static void test_closing_while_it_is_written(const char *io) {
  scene s;
  qkv_storage_stats stats;
  setup(&s, io);
  for (int i = 0; i < ROUNDS; i++) {
    qkv_session *session = open_session(&s, "a", i % 2 == 0 ? QKV_DURABILITY_ASYNC : QKV_DURABILITY_SYNC);
    other settling = {.s = &s, .session = session}, appending = settling;
    begin_other(&appending, append_on);
    begin_other(&settling, settle);
    assert_int_equal(append(&s, session, 0, 0, 64 * (uint64_t)(i % 4 + 1)), QKV_OK);
    qkv_session *closing = qkv_session_ref(session);  // both threads go on with it
    close_session(&s, &closing);
    end_other(&appending);
    end_other(&settling);
    qkv_session_unref(&session);
    if (i % 4 == 3) restart(&s);
    assert_int_equal(qkv_store_read_stats(s.store).sessions, 0);
  }
  restart(&s);
  qkv_storage_read_stats(qkvi_residency_storage(s.residency), &stats);
  assert_int_equal(stats.records, 0);
  assert_int_equal(qkv_store_read_stats(s.store).sessions, 0);
  teardown(&s);
}

static void test_truncation_while_it_is_written(const char *io) {
  scene s;
  uint64_t seed = 5;
  setup(&s, io);
  for (int i = 0; i < ROUNDS; i++) {
    const uint64_t cut_at = 1 + random_below(&seed, TOKENS - 1);
    content wanted = in_memory(&s, cut_at);
    qkv_session *session = open_session(&s, "a", QKV_DURABILITY_ASYNC);
    other settling = {.s = &s, .session = session}, evicting = settling;
    begin_other(&settling, settle);
    begin_other(&evicting, evict);
    assert_int_equal(append(&s, session, 0, 0, TOKENS), QKV_OK);
    assert_int_equal(qkv_session_truncate(session, cut_at, NULL, 0, NULL), QKV_OK);
    assert_int_equal(append(&s, session, 1, cut_at, TOKENS), QKV_OK);
    end_other(&settling);
    end_other(&evicting);
    assert_int_equal(qkvi_write_back_truncated(s.residency, NULL, session, NULL), QKV_OK);
    assert_int_equal(qkv_session_seal(session, NULL), QKV_OK);
    for (uint32_t layer = 0; layer < LAYERS; layer++) assert_true(same_layer(&s, session, layer, &wanted));
    qkv_session_unref(&session);
    restart(&s);
    assert_same(&s, "a", &wanted);
    session = find_session(&s, "a");
    close_session(&s, &session);
    free_content(&wanted);
  }
  teardown(&s);
}

static void test_recovery_of_what_was_compacted(const char *io) {
  scene s;
  setup(&s, io);
  content wanted = in_memory(&s, TOKENS);
  for (int i = 0; i < 4; i++) {
    char name[2][16];
    other compacting = {.s = &s};
    for (int k = 0; k < 2; k++) snprintf(name[k], sizeof name[k], "%s-%d", k == 0 ? "kept" : "closed", i);
    qkv_session *kept = open_session(&s, name[0], QKV_DURABILITY_ASYNC);
    qkv_session *closed = open_session(&s, name[1], QKV_DURABILITY_ASYNC);
    begin_other(&compacting, compact);
    for (uint64_t at = 0; at < TOKENS; at += 128) {
      assert_int_equal(append(&s, kept, 0, at, at + 128), QKV_OK);
      assert_int_equal(append(&s, closed, 0, at, at + 128), QKV_OK);
    }
    sync_all(&s, kept);
    close_session(&s, &closed);
    (void)qkv_session_evict(kept, UINT64_MAX, true);
    for (uint32_t layer = 0; layer < LAYERS; layer++) assert_true(same_layer(&s, kept, layer, &wanted));
    end_other(&compacting);
    qkv_session_unref(&kept);
    restart(&s);
    for (int k = 0; k <= i; k++) {
      snprintf(name[0], sizeof name[0], "kept-%d", k);
      assert_same(&s, name[0], &wanted);
    }
  }
  free_content(&wanted);
  teardown(&s);
}

// Memory that is freed goes to the thread that has waited for it.
static void test_headroom_that_others_take(const char *io) {
  enum { READERS = 8, APPENDERS = 2 };
  scene s;
  other readers[READERS], appenders[APPENDERS], taking = {.s = &s}, watching = {.s = &s};
  setup_with(&s, io, "1MiB");
  content wanted = in_memory(&s, TOKENS);
  for (int i = 0; i < READERS; i++) {
    char name[16];
    snprintf(name, sizeof name, "read-%d", i);
    readers[i] = (other){.s = &s,
                         .session = open_session(&s, name, QKV_DURABILITY_ASYNC),
                         .wanted = &wanted,
                         .seed = 200 + (uint64_t)i};
    assert_int_equal(append(&s, readers[i].session, 0, 0, TOKENS), QKV_OK);
    sync_all(&s, readers[i].session);
    (void)qkv_session_evict(readers[i].session, UINT64_MAX, true);
  }
  for (int i = 0; i < APPENDERS; i++) {
    char name[16];
    snprintf(name, sizeof name, "append-%d", i);
    appenders[i] = (other){.s = &s, .session = open_session(&s, name, QKV_DURABILITY_ASYNC)};
  }
  begin_other(&taking, take_headroom);
  begin_other(&watching, watch_windows);
  for (int i = 0; i < APPENDERS; i++) begin_other(&appenders[i], append_in_headroom);
  for (int i = 0; i < READERS; i++) begin_other(&readers[i], bring_back);
  for (int i = 0; i < READERS; i++) end_other(&readers[i]);
  for (int i = 0; i < APPENDERS; i++) end_other(&appenders[i]);
  end_other(&taking);
  end_other(&watching);
  for (int i = 0; i < APPENDERS; i++) qkv_session_unref(&appenders[i].session);
  for (int i = 0; i < READERS; i++) qkv_session_unref(&readers[i].session);
  free_content(&wanted);
  teardown(&s);
}

// Records that fail after their session was closed are forgotten.
static void test_closing_while_the_disk_fails(void **unused) {
  (void)unused;
  scene s;
  setup(&s, "pread");
  qkv_session *session = NULL;
  uint64_t id = 0;
  // Within the second after which they would be durable: a slow machine needs more than one try.
  for (int i = 0; session == NULL || count_pending(s.residency, id, (qkv_record_state)-1) == 0; i++) {
    char name[16];
    if (session != NULL) qkv_session_unref(&session);
    atomic_store(&failing, false);
    assert_true(i < 60);
    snprintf(name, sizeof name, "a%d", i);
    session = open_session(&s, name, QKV_DURABILITY_ASYNC);
    id = qkv_session_id(session);
    assert_int_equal(append(&s, session, 0, 0, TOKENS), QKV_OK);
    assert_int_equal(await_pending(s.residency, id, QKV_RECORD_WRITTEN), 0);
    atomic_store(&failing, true);
  }
  uint64_t freed;
  assert_int_equal(qkv_store_close_session(s.store, session, &freed, NULL), QKV_OK);
  assert_int_equal(qkvi_catalogue_closed(s.residency, session, NULL), QKV_INTERNAL);  // it may come back
  qkv_session_unref(&session);
  assert_int_equal(await_pending(s.residency, id, (qkv_record_state)-1), 0);
  atomic_store(&failing, false);
  teardown(&s);
}

static uint64_t unread_segments(const scene *s) {
  qkv_storage_stats stats;
  qkv_storage_read_stats(s->residency->storage, &stats);
  return stats.unread_segments;
}

static uint64_t shortest(const scene *s, const char *name) {
  qkv_session *session = find_session(s, name);
  qkv_session_info info;
  uint64_t lengths[LAYERS], least = UINT64_MAX;
  qkv_session_read_info(session, &info, lengths);
  for (size_t i = 0; i < LAYERS; i++) least = lengths[i] < least ? lengths[i] : least;
  qkv_session_unref(&session);
  return least;
}

static void assert_all_same(const scene *s, char but, const content *wanted) {
  for (char name[2] = "a"; name[0] < 'g'; name[0]++) {
    if (name[0] != but) assert_same(s, name, wanted);
  }
}

// Some starts cannot read one segment each, and sessions end earlier then. Once the device reads everything again,
// they are whole, except one that was appended to meanwhile: old rows behind its end do not come back behind the new
// ones.
static void test_what_is_not_read_stays(void **unused) {
  (void)unused;
  scene s;
  setup(&s, "pread");
  for (char name[2] = "a"; name[0] < 'g'; name[0]++) {
    qkv_session *session = open_session(&s, name, QKV_DURABILITY_SYNC);
    assert_int_equal(append(&s, session, 0, 0, TOKENS), QKV_OK);
    sync_all(&s, session);
    qkv_session_unref(&session);
  }
  content wanted = in_memory(&s, TOKENS);
  qkv_storage_segment segments[16];
  const size_t count = qkv_storage_list_segments(s.residency->storage, segments, 16);
  assert_in_range(count, 2, 16);
  char cut[2] = "";
  for (size_t i = 0; i <= count; i++) {  // at last everything is read
    stop(&s);
    unreadable = i < count ? segments[i].segment : 0;
    start(&s);
    if (unread_segments(&s) > 0) cut[0] = 'a';
    while (unread_segments(&s) > 0 && shortest(&s, cut) == TOKENS) cut[0]++;
    assert_true(cut[0] < 'g');
  }
  assert_true(cut[0] != '\0');
  assert_all_same(&s, '\0', &wanted);
  stop(&s);
  unreadable = segments[1].segment;
  start(&s);
  for (cut[0] = 'a'; shortest(&s, cut) == TOKENS;) cut[0]++;
  const uint64_t end = shortest(&s, cut);
  qkv_session *session = find_session(&s, cut);
  assert_true(qkvi_catalogue_is_unconfirmed(s.residency, session));
  assert_int_equal(qkvi_catalogue_tie(s.residency, NULL, session, NULL), QKV_OK);
  assert_false(qkvi_catalogue_is_unconfirmed(s.residency, session));
  assert_int_equal(qkv_session_truncate(session, end, NULL, 0, NULL), QKV_OK);
  assert_int_equal(append(&s, session, 1, end, end + 1), QKV_OK);
  qkv_session_unref(&session);
  unreadable = 0;
  restart(&s);
  assert_int_equal(unread_segments(&s), 0);
  assert_int_equal(shortest(&s, cut), end + 1);
  assert_all_same(&s, cut[0], &wanted);
  free_content(&wanted);
  teardown(&s);
}

// Closed by a caller that does not wait for the opening to be journaled: the session does not come back.
static void test_closing_before_it_is_journaled(void **unused) {
  (void)unused;
  scene s;
  qkv_error error = {0};
  uint64_t freed;
  qkv_session *session = NULL;
  qkv_session_config config = {
      .name = "a", .tenant = "default", .purpose = QKV_PURPOSE_ATTEND, .durability = QKV_DURABILITY_ASYNC};
  setup(&s, "auto");
  config.policy = QKV_POLICY_UNSET;
  assert_int_equal(qkvi_catalogue_enlist(s.residency, &config, NULL), QKV_OK);
  assert_int_equal(qkv_store_open(s.store, &config, "tiny", &session, NULL), QKV_OK);
  assert_int_equal(qkv_store_close_session(s.store, session, &freed, NULL), QKV_OK);
  assert_int_equal(qkvi_catalogue_closed(s.residency, session, NULL), QKV_OK);
  assert_int_equal(qkvi_catalogue_opened(s.residency, session, &error), QKV_NOT_FOUND);
  assert_string_equal(error.text, "session a has been closed");
  qkv_session_unref(&session);
  restart(&s);
  assert_int_equal(qkv_store_read_stats(s.store).sessions, 0);
  teardown(&s);
}

typedef struct gate {
  _Atomic bool reached, is_open;
} gate;

static void wait_at(void *context) {
  gate *at = context;
  atomic_store(&at->reached, true);
  while (!atomic_load(&at->is_open)) (void)sched_yield();
}

// A check that finds no thread is refused, rather than reported as clean.
static void test_a_check_that_is_refused(void **unused) {
  (void)unused;
  scene s;
  qkv_pool *pool;
  qkvi_verify verify;
  gate busy = {0};
  setup(&s, "auto");
  qkv_session *session = open_session(&s, "a", QKV_DURABILITY_ASYNC);
  assert_int_equal(append(&s, session, 0, 0, TOKENS), QKV_OK);
  sync_all(&s, session);
  qkv_session_unref(&session);
  assert_int_equal(qkv_pool_create(1, 1, &pool, NULL), QKV_OK);
  // The thread has the first one before the queue is filled.
  assert_int_equal(qkv_pool_submit(pool, wait_at, &busy), QKV_OK);
  while (!atomic_load(&busy.reached)) (void)sched_yield();
  while (qkv_pool_submit(pool, wait_at, &busy) == QKV_OK) (void)sched_yield();
  assert_int_equal(qkvi_upkeep_verify(s.residency, pool, true, &verify), QKV_RESOURCE_EXHAUSTED);
  assert_false(verify.running);
  atomic_store(&busy.is_open, true);
  while (qkvi_upkeep_verify(s.residency, pool, true, &verify) != QKV_OK) (void)sched_yield();
  while (verify.running) assert_int_equal(qkvi_upkeep_verify(s.residency, pool, false, &verify), QKV_OK);
  assert_int_equal(verify.done, LAYERS * TOKENS / 64);
  assert_int_equal(verify.bad, 0);
  qkv_pool_destroy(&pool);
  teardown(&s);
}

// Of 64 tokens of the rows, for pages to come.
static void calibrate(const scene *s, uint64_t first) {
  qkv_error error = {0};
  qkv_calibration *made = NULL;
  const qkv_model *model = NULL;
  const sequence *rows = &s->rows[1];
  assert_int_equal(qkv_store_model(s->store, "default", "tiny", &model, NULL), QKV_OK);
  const qkv_calibration_shape shape = qkv_model_calibration_shape(model);
  qkv_moments *moments = qkv_moments_create(&shape);
  for (uint32_t layer = 0; layer < LAYERS; layer++)
    qkv_moments_add(moments, layer, first, 64, rows->k + first * model->kv_heads * model->key_dim,
                    rows->v + first * model->kv_heads * model->value_dim, false);
  qkv_status status = qkv_calibrate(moments, &QKV_CALIBRATE_DEFAULTS, &made, &error);
  if (status == QKV_OK) status = qkv_model_calibrate(model, made, QKV_CALIBRATION_REGISTERED, true, &error);
  if (status != QKV_OK) fail_msg("%s", error.text);
  const qkv_calibration *reference = made;
  qkv_calibration_unref(&reference);
  qkv_moments_destroy(&moments);
}

// More calibrations in one session than are checked together: all of them are journaled before its pages.
static void test_many_calibrations(void **unused) {
  (void)unused;
  scene s;
  content wanted;
  const qkv_calibration *found[2 * TOKENS / 64];
  setup(&s, "auto");
  qkv_session *session = open_session(&s, "a", QKV_DURABILITY_ASYNC);
  for (uint64_t at = 0; at < TOKENS; at += 64) {
    row_pair pair;
    make_pair(&pair, &s.rows[0], at, at + 64, QKV_FP16);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
      uint64_t appended, length;
      if (layer % 2 == 0) calibrate(&s, at * (TOKENS - 64) / TOKENS + layer);
      assert_int_equal(
          qkv_session_append(session, layer, at, &pair.k.tensor, &pair.v.tensor, false, &appended, &length, NULL),
          QKV_OK);
    }
    free_pair(&pair);
  }
  assert_int_equal(qkv_session_calibrations(session, 0, found, 2 * TOKENS / 64), 2 * TOKENS / 64);
  for (size_t i = 0; i < 2 * TOKENS / 64; i++) qkv_calibration_unref(&found[i]);
  sync_all(&s, session);
  read_content(session, &wanted);
  qkv_session_unref(&session);
  restart(&s);
  assert_same(&s, "a", &wanted);
  free_content(&wanted);
  teardown(&s);
}

static bool has_unfit(qkvi_residency *residency) {
  bool unfit = false;
  qkvi_residency_lock(residency);
  for (const qkvi_journaled *at = residency->journaled; at != NULL; at = at->next) unfit |= at->unfit;
  qkvi_residency_unlock(residency);
  return unfit;
}

// A calibration that is given is refused where it would be found later to be too large.
static void test_a_given_calibration_fits_into_an_entry(void **unused) {
  (void)unused;
  scene s;
  size_t size;
  qkv_error error = {0};
  const qkv_model *model = NULL;
  setup(&s, "auto");
  calibrate(&s, 0);
  assert_int_equal(qkv_store_model(s.store, "default", "tiny", &model, NULL), QKV_OK);
  const qkv_calibration *given = qkv_calibration_slot_get(model->calibration);
  (void)qkv_calibration_bytes(given, &size);
  assert_int_equal(qkvi_catalogue_check_calibration(NULL, given, &error), QKV_OK);
  assert_int_equal(qkvi_catalogue_check_calibration(s.residency, given, &error), QKV_OK);
  s.residency->entry_max = size;
  assert_int_equal(qkvi_catalogue_check_calibration(s.residency, given, &error), QKV_INVALID_ARGUMENT);
  char text[160];
  (void)snprintf(text, sizeof text, "model.calibration has %zu bytes, at most ", size);
  assert_memory_equal(error.text, text, strlen(text));
  // What is let through is journaled, whatever the names are.
  s.residency->entry_max = size + 2 * QKV_NAME_MAX + 64;
  assert_int_equal(qkvi_catalogue_check_calibration(s.residency, given, NULL), QKV_OK);
  qkv_session *session = open_session(&s, "a", QKV_DURABILITY_ASYNC);
  assert_int_equal(append(&s, session, 0, 0, TOKENS), QKV_OK);
  sync_all(&s, session);
  close_session(&s, &session);
  qkv_calibration_unref(&given);
  teardown(&s);
}

// Its pages are not put, and it does not count as a failure of the disk, which other pages go to.
static void test_a_calibration_larger_than_an_entry(void **unused) {
  (void)unused;
  scene s;
  setup(&s, "auto");
  s.residency->entry_max = 1000;
  qkv_session *session = open_session(&s, "a", QKV_DURABILITY_ASYNC);
  assert_int_equal(append(&s, session, 0, 0, 64), QKV_OK);
  calibrate(&s, 0);
  assert_int_equal(append(&s, session, 0, 64, 128), QKV_OK);
  const int64_t until = qkv_now_ms() + 60000;
  while ((!has_unfit(s.residency) || !qkv_session_is_durable(session, 0, 64)) && qkv_now_ms() < until) {
    (void)qkv_session_settle(session);
    (void)usleep(1000);
  }
  assert_true(has_unfit(s.residency));
  assert_true(qkv_session_is_durable(session, 0, 64));
  assert_false(qkv_session_is_durable(session, 0, 128));
  assert_int_equal(qkv_metric_read(&s.metrics[QKV_METRIC_SPILL_FAILED]), 0);
  close_session(&s, &session);
  teardown(&s);
}

#define BOTH(test)                          \
  static void test##_uring(void **unused) { \
    (void)unused;                           \
    test("auto");                           \
  }                                         \
  static void test##_pread(void **unused) { \
    (void)unused;                           \
    test("pread");                          \
  }
BOTH(test_eviction_while_it_comes_back)
BOTH(test_a_range_waits_for_itself)
BOTH(test_closing_while_it_is_written)
BOTH(test_truncation_while_it_is_written)
BOTH(test_recovery_of_what_was_compacted)
BOTH(test_headroom_that_others_take)

int main(void) {
  qkv_log_setup(stderr, QKV_LOG_ERROR);
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_eviction_while_it_comes_back_uring),
      cmocka_unit_test(test_eviction_while_it_comes_back_pread),
      cmocka_unit_test(test_a_range_waits_for_itself_uring),
      cmocka_unit_test(test_a_range_waits_for_itself_pread),
      cmocka_unit_test(test_closing_while_it_is_written_uring),
      cmocka_unit_test(test_closing_while_it_is_written_pread),
      cmocka_unit_test(test_truncation_while_it_is_written_uring),
      cmocka_unit_test(test_truncation_while_it_is_written_pread),
      cmocka_unit_test(test_recovery_of_what_was_compacted_uring),
      cmocka_unit_test(test_recovery_of_what_was_compacted_pread),
      cmocka_unit_test(test_headroom_that_others_take_uring),
      cmocka_unit_test(test_headroom_that_others_take_pread),
      cmocka_unit_test(test_closing_while_the_disk_fails),
      cmocka_unit_test(test_what_is_not_read_stays),
      cmocka_unit_test(test_closing_before_it_is_journaled),
      cmocka_unit_test(test_a_check_that_is_refused),
      cmocka_unit_test(test_many_calibrations),
      cmocka_unit_test(test_a_given_calibration_fits_into_an_entry),
      cmocka_unit_test(test_a_calibration_larger_than_an_entry),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
