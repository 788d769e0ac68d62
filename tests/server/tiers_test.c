// Demote, Prefetch, GetAttentionStats against the real daemon, and its background tiering.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cache/session_retier.h"
#include "tests/server/kv.h"

#include <cmocka.h>

#define TOKENS 640  // 9 pages and the window

static fixture_daemon *daemon_process;
static fixture_client *client;

static int start(void **state) {
  (void)state;
  kv_start((const char *[]){"--ema-every=1", NULL}, &daemon_process, &client);
  return 0;
}

static int stop(void **state) {
  (void)state;
  kv_stop(&daemon_process, &client);
  return 0;
}

// ---- Sessions ----

static kv_item item_of(const char *session, uint32_t layer, uint64_t position) {
  return (kv_item){.session = session, .layer = layer, .position = position, .seed = 5};
}

static void open_evictable(fixture_client *to, const char *name) {
  Qkv__V1__OpenSessionRequest request = QKV__V1__OPEN_SESSION_REQUEST__INIT;
  request.session = (char *)name;
  request.model = (char *)"m";
  request.retention = QKV__V1__RETENTION__RETENTION_EVICT;
  fixture_result result = kv_call(to, KV_METHOD("OpenSession"), &request.base);
  assert_string_equal(result.text, "");
  fixture_free(&result);
}

static void open_session(fixture_client *to, const char *name, double tier_bits, bool keep_full) {
  Qkv__V1__OpenSessionRequest request = QKV__V1__OPEN_SESSION_REQUEST__INIT;
  request.session = (char *)name;
  request.model = (char *)"m";
  request.keep_full_set_case = QKV__V1__OPEN_SESSION_REQUEST__KEEP_FULL_SET_KEEP_FULL;
  request.keep_full = keep_full;
  if (tier_bits > 0) {
    request.tier_bits_set_case = QKV__V1__OPEN_SESSION_REQUEST__TIER_BITS_SET_TIER_BITS;
    request.tier_bits = tier_bits;
  }
  fixture_result result = kv_call(to, KV_METHOD("OpenSession"), &request.base);
  assert_string_equal(result.text, "");
  fixture_free(&result);
}

static void fill(fixture_client *to, const char *session, size_t tokens) {
  for (uint32_t layer = 0; layer < KV_LAYERS; layer++) {
    kv_item item = item_of(session, layer, 0);
    item.tokens = tokens;
    assert_int_equal(kv_append(to, &item, 1, NULL), QKV_OK);
  }
}

static void attend(fixture_client *to, const char *session, uint32_t layer, size_t queries) {
  kv_item item = item_of(session, layer, TOKENS - queries);
  item.queries = queries;
  Qkv__V1__AttendResponse *response = NULL;
  assert_int_equal(kv_attend(to, &item, 1, &response, NULL), QKV_OK);
  assert_int_equal(response->results[0]->status == NULL ? 0 : response->results[0]->status->code, 0);
  qkv__v1__attend_response__free_unpacked(response, NULL);
}

static void expect_variant(kv_reference *reference, const char *session) {
  for (uint32_t layer = 0; layer < KV_LAYERS; layer++) {
    kv_item item = item_of(session, layer, TOKENS - 3);
    item.queries = 3;
    Qkv__V1__AttendResponse *response = NULL;
    assert_int_equal(kv_attend(client, &item, 1, &response, NULL), QKV_OK);
    kv_same_attend(reference, &item, response->results[0]);
    qkv__v1__attend_response__free_unpacked(response, NULL);
  }
}

static kv_reference variant_of(const char *session) {
  kv_reference reference = kv_reference_open(session);
  for (uint32_t layer = 0; layer < KV_LAYERS; layer++) {
    kv_item item = item_of(session, layer, 0);
    item.tokens = TOKENS;
    kv_reference_append(&reference, &item);
  }
  return reference;
}

static uint64_t bytes_of(fixture_client *of, const char *session, double *bits) {
  Qkv__V1__SessionInfo *info = kv_info(of, session);
  const uint64_t bytes = info->bytes_coded + info->bytes_overhead;
  if (bits != NULL) *bits = info->bits_per_coordinate;
  qkv__v1__session_info__free_unpacked(info, NULL);
  return bytes;
}

// ---- Demote and Prefetch ----

static Qkv__V1__DemoteResponse demote(Qkv__V1__DemoteRequest *request) {
  fixture_result result = kv_call(client, KV_METHOD("Demote"), &request->base);
  assert_string_equal(result.text, "");
  Qkv__V1__DemoteResponse *response = qkv__v1__demote_response__unpack(NULL, result.length, result.data);
  assert_non_null(response);
  const Qkv__V1__DemoteResponse copy = *response;
  qkv__v1__demote_response__free_unpacked(response, NULL);
  fixture_free(&result);
  return copy;
}

static void evenly_demoted_rows_are_the_engines(void **state) {
  (void)state;
  open_session(client, "even", 0, false);
  fill(client, "even", TOKENS);
  kv_reference reference = variant_of("even");
  expect_variant(&reference, "even");
  const uint64_t before = bytes_of(client, "even", NULL);
  const double changed = kv_metric(client, "qkvd_tier_pages_total");
  const double freed = kv_metric(client, "qkvd_tier_bytes_freed_total");
  uint32_t layers[] = {2, 0};
  Qkv__V1__TokenRange range = QKV__V1__TOKEN_RANGE__INIT;
  range.begin = 64;
  range.end = 320;
  Qkv__V1__DemoteRequest request = QKV__V1__DEMOTE_REQUEST__INIT;
  request.session = (char *)"even";
  request.bits = 2;
  request.even = true;
  request.layers = layers;
  request.n_layers = 2;
  request.range = &range;
  const Qkv__V1__DemoteResponse response = demote(&request);
  const qkv_retier_scope scope = {.begin = 64, .end = 320, .layers = layers, .layer_count = 2};
  qkv_retier_report report = {0};
  assert_int_equal(qkv_session_demote(reference.session, &scope, 2, true, &report, NULL), QKV_OK);
  assert_int_equal(response.pages, 8);
  assert_int_equal(response.pages, report.pages);
  assert_true(response.bytes_freed > 0);
  assert_int_equal(response.bytes_freed, report.bytes_freed);
  assert_int_equal(response.bytes_taken, 0);
  assert_int_equal(bytes_of(client, "even", NULL), before - response.bytes_freed);
  assert_true(kv_metric(client, "qkvd_tier_pages_total") == changed + 8);
  assert_true(kv_metric(client, "qkvd_tier_bytes_freed_total") == freed + (double)response.bytes_freed);
  expect_variant(&reference, "even");
  kv_reference_close(&reference);
  kv_close(client, "even");
}

static void demoting_by_attention_meets_the_average(void **state) {
  (void)state;
  open_session(client, "average", 0, false);
  fill(client, "average", TOKENS);
  for (uint32_t layer = 0; layer < KV_LAYERS; layer++) attend(client, "average", layer, 64);
  double before = 0, after = 0;
  bytes_of(client, "average", &before);
  Qkv__V1__DemoteRequest request = QKV__V1__DEMOTE_REQUEST__INIT;
  request.session = (char *)"average";
  request.bits = 2.5;
  const Qkv__V1__DemoteResponse response = demote(&request);
  assert_true(response.pages > 0 && response.bytes_freed > 0);
  bytes_of(client, "average", &after);
  assert_true(before - after > 1.3);  // 4 bits became 2.5 at most; sizes are rounded up to what the arena gives
  for (uint32_t layer = 0; layer < KV_LAYERS; layer++) attend(client, "average", layer, 3);
  kv_close(client, "average");
}

static void promoting_restores_what_was_kept(void **state) {
  (void)state;
  open_session(client, "kept", 0, true);
  fill(client, "kept", TOKENS);
  kv_reference reference = variant_of("kept");
  const uint64_t before = bytes_of(client, "kept", NULL);
  Qkv__V1__DemoteRequest request = QKV__V1__DEMOTE_REQUEST__INIT;
  request.session = (char *)"kept";
  request.bits = 1.5;
  const Qkv__V1__DemoteResponse down = demote(&request);
  assert_true(down.bytes_taken > 0 && down.bytes_freed == 0);
  Qkv__V1__PrefetchRequest up = QKV__V1__PREFETCH_REQUEST__INIT;
  up.session = (char *)"kept";
  fixture_result result = kv_call(client, KV_METHOD("Prefetch"), &up.base);
  assert_string_equal(result.text, "");
  Qkv__V1__PrefetchResponse *response = qkv__v1__prefetch_response__unpack(NULL, result.length, result.data);
  assert_int_equal(response->pages, down.pages);
  qkv__v1__prefetch_response__free_unpacked(response, NULL);
  fixture_free(&result);
  assert_int_equal(bytes_of(client, "kept", NULL), before);
  expect_variant(&reference, "kept");
  kv_reference_close(&reference);
  kv_close(client, "kept");
}

// ---- What is refused ----

static void expect_refused(const char *method, const ProtobufCMessage *request, int status, const char *text) {
  fixture_result result = kv_call(client, method, request);
  assert_string_equal(result.text, text);
  assert_int_equal(result.status, status);
  fixture_free(&result);
}

static void what_cannot_be_is_refused(void **state) {
  (void)state;
  uint32_t layers[] = {0, 3, 0, 0};
  Qkv__V1__TokenRange range = QKV__V1__TOKEN_RANGE__INIT;
  open_session(client, "bad", 0, false);
  fill(client, "bad", TOKENS);
  const uint64_t before = bytes_of(client, "bad", NULL);
  Qkv__V1__DemoteRequest down = QKV__V1__DEMOTE_REQUEST__INIT;
  down.bits = 2;
  expect_refused(KV_METHOD("Demote"), &down.base, QKV_INVALID_ARGUMENT, "session is empty");
  down.session = (char *)"nobody";
  expect_refused(KV_METHOD("Demote"), &down.base, QKV_NOT_FOUND, "no session nobody");
  down.session = (char *)"bad";
  down.bits = 0;
  expect_refused(KV_METHOD("Demote"), &down.base, QKV_INVALID_ARGUMENT, "bits is 0, at least 0.125");
  down.bits = 0.3;
  expect_refused(KV_METHOD("Demote"), &down.base, QKV_INVALID_ARGUMENT,
                 "bits is 0.3, allowed are multiples of 0.125 up to 8");
  down.bits = NAN;
  expect_refused(KV_METHOD("Demote"), &down.base, QKV_INVALID_ARGUMENT,
                 "bits is nan, allowed are multiples of 0.125 up to 8");
  down.bits = 2;
  down.layers = layers;
  down.n_layers = 2;
  expect_refused(KV_METHOD("Demote"), &down.base, QKV_INVALID_ARGUMENT, "layers[1] is 3, the model m has 3 layers");
  down.n_layers = 4;
  expect_refused(KV_METHOD("Demote"), &down.base, QKV_INVALID_ARGUMENT,
                 "layers has 4 entries, the model m has 3 layers");
  down.n_layers = 1;
  down.range = &range;
  range.begin = 10;
  range.end = 9;
  expect_refused(KV_METHOD("Demote"), &down.base, QKV_INVALID_ARGUMENT, "range.begin is 10, at most range.end 9");
  assert_int_equal(bytes_of(client, "bad", NULL), before);

  Qkv__V1__GetAttentionStatsRequest stats = QKV__V1__GET_ATTENTION_STATS_REQUEST__INIT;
  stats.session = (char *)"bad";
  stats.buckets = 262145;
  expect_refused(KV_METHOD("GetAttentionStats"), &stats.base, QKV_INVALID_ARGUMENT,
                 "buckets is 262145, at most 262144");
  Qkv__V1__OpenSessionRequest open = QKV__V1__OPEN_SESSION_REQUEST__INIT;
  open.session = (char *)"worse";
  open.model = (char *)"m";
  open.tier_bits_set_case = QKV__V1__OPEN_SESSION_REQUEST__TIER_BITS_SET_TIER_BITS;
  open.tier_bits = -1;
  expect_refused(KV_METHOD("OpenSession"), &open.base, QKV_INVALID_ARGUMENT,
                 "tier_bits is -1, allowed are 0 and multiples of 0.125 up to 8");

  down.range = NULL;
  down.even = true;
  (void)demote(&down);
  Qkv__V1__PrefetchRequest up = QKV__V1__PREFETCH_REQUEST__INIT;
  up.session = (char *)"bad";
  expect_refused(KV_METHOD("Prefetch"), &up.base, QKV_FAILED_PRECONDITION,
                 "layer 0: position 0 is held at 2 bits, 8 are asked and were not kept");
  kv_close(client, "bad");
}

// ---- GetAttentionStats ----

static void statistics_come_by_layer_and_head(void **state) {
  (void)state;
  enum { BUCKETS = 10 };
  uint32_t layers[] = {1, 0};
  open_session(client, "stats", 0, false);
  fill(client, "stats", TOKENS);
  attend(client, "stats", 1, 64);
  Qkv__V1__GetAttentionStatsRequest request = QKV__V1__GET_ATTENTION_STATS_REQUEST__INIT;
  request.session = (char *)"stats";
  request.layers = layers;
  request.n_layers = 2;
  request.buckets = BUCKETS;
  uint8_t packed[256], *bytes = NULL;
  size_t length = qkv__v1__get_attention_stats_request__pack(&request, packed), seen = 0;
  fixture_stream *stream = fixture_open(client, KV_METHOD("GetAttentionStats"), FIXTURE_PATIENCE_MS);
  assert_true(fixture_send(stream, packed, length));
  fixture_half_close(stream);
  for (; fixture_receive(stream, &bytes, &length); seen++) {
    Qkv__V1__GetAttentionStatsResponse *head = qkv__v1__get_attention_stats_response__unpack(NULL, length, bytes);
    assert_non_null(head);
    assert_int_equal(head->layer, layers[seen / KV_HEADS]);
    assert_int_equal(head->kv_head, seen % KV_HEADS);
    assert_int_equal(head->position, 0);
    assert_int_equal(head->tokens, TOKENS);
    assert_int_equal(head->tokens_per_bucket, TOKENS / BUCKETS);
    assert_int_equal(head->n_ema, BUCKETS);
    assert_int_equal(head->n_bits, BUCKETS);
    assert_true(head->counted);
    assert_int_equal(head->queries, head->layer == 1 ? 64 : 0);
    double attention = 0;
    for (size_t i = 0; i < BUCKETS; i++) attention += (double)head->ema[i] * TOKENS / BUCKETS;
    // The queries see all coded tokens, and the exact ones in addition.
    assert_true(head->layer == 1 ? attention > 0.2 && attention <= 1 : attention == 0);
    assert_true(head->bits[0] == 4 && head->bits[BUCKETS - 1] == 16);
    qkv__v1__get_attention_stats_response__free_unpacked(head, NULL);
    free(bytes);
  }
  fixture_result result = fixture_finish(&stream);
  assert_string_equal(result.text, "");
  assert_int_equal(seen, 2 * KV_HEADS);
  kv_close(client, "stats");
}

// ---- In the background ----

// The session is attended during the whole test.
static void wait_below(fixture_client *on, const char *session, double bits) {
  const int64_t until = fixture_now_ms() + FIXTURE_PATIENCE_MS;
  double now = 0;
  for (bytes_of(on, session, &now); now >= bits; bytes_of(on, session, &now)) {
    if (fixture_now_ms() > until) fail_msg("%s is still at %g bits", session, now);
    for (uint32_t layer = 0; layer < KV_LAYERS; layer++) attend(on, session, layer, 16);
  }
}

static void sessions_reach_their_budget(void **state) {
  (void)state;
  fixture_daemon *other = NULL;
  fixture_client *to = NULL;
  kv_start((const char *[]){"--tier-bits=2", "--tier-pages=8", "--ema-every=1", NULL}, &other, &to);
  open_session(to, "default", 0, false);
  open_session(to, "own", 3, false);
  open_session(to, "none", 8, false);
  fill(to, "none", TOKENS);
  fill(to, "own", TOKENS);
  double full = 0, own = 0, none = 0;
  bytes_of(to, "none", &full);
  const double held = kv_metric(to, "qkvd_kv_bytes");
  fill(to, "default", TOKENS);
  wait_below(to, "default", full - 1.9);
  wait_below(to, "own", full - 0.9);
  assert_true(kv_metric(to, "qkvd_tier_bytes_freed_total") > 0);
  assert_true(kv_metric(to, "qkvd_kv_bytes") < 3 * held / 2);
  for (uint32_t layer = 0; layer < KV_LAYERS; layer++) attend(to, "default", layer, 16);
  bytes_of(to, "own", &own);
  bytes_of(to, "none", &none);
  assert_true(own > full - 1.2);
  assert_true(none == full);
  kv_stop(&other, &to);
}

// 8 sessions of about 110 KiB are beyond the high mark; three of them at their least are enough for the low one.
static void short_memory_demotes_the_coldest(void **state) {
  (void)state;
  enum { SESSIONS = 8 };
  fixture_daemon *other = NULL;
  fixture_client *to = NULL;
  // Pages that are held out for learning would take a good part of so small a budget.
  kv_start((const char *[]){"--memory-budget=1MiB", "--memory-high=0.8", "--memory-low=0.78", "--calibrate-tokens=0",
                            NULL},
           &other, &to);
  double full = 0, first = 0, last = 0;
  char name[16];
  const int64_t until = fixture_now_ms() + FIXTURE_PATIENCE_MS;
  for (int i = 0; i < SESSIONS; i++) {
    (void)snprintf(name, sizeof name, "s%d", i);
    open_session(to, name, 0, i == 1);
    fill(to, name, TOKENS);
    if (i == 0) bytes_of(to, name, &full);
  }
  while (kv_metric(to, "qkvd_kv_bytes") > 0.78 * 1048576) {
    if (fixture_now_ms() > until) fail_msg("%g bytes are still held", kv_metric(to, "qkvd_kv_bytes"));
    fixture_sleep_ms(20);
  }
  bytes_of(to, "s0", &first);
  bytes_of(to, name, &last);
  assert_true(first < full - 0.9);
  assert_true(last > first);
  bytes_of(to, "s1", &last);
  assert_true(last == full);  // keeps its pages: nothing would be freed
  attend(to, "s0", 0, 16);
  kv_stop(&other, &to);
}

// Sessions of about 110 KiB, more than memory holds: those that may go are closed, no session loses bits. Then there
// are too many that stay, and these do.
static void sessions_that_may_go_are_closed_instead(void **state) {
  (void)state;
  enum { EVICTABLE = 14, KEPT = 8, TICKS_MS = 800 };
  fixture_daemon *other = NULL;
  fixture_client *to = NULL;
  kv_start((const char *[]){"--memory-budget=1MiB", "--memory-high=0.7", "--memory-low=0.68", "--calibrate-tokens=0",
                            NULL},
           &other, &to);
  double full = 0, bits = 0;
  char name[16];
  open_session(to, "k0", 0, false);
  fill(to, "k0", TOKENS);
  bytes_of(to, "k0", &full);
  for (int i = 0; i < EVICTABLE; i++) {
    (void)snprintf(name, sizeof name, "e%d", i);
    open_evictable(to, name);
    fill(to, name, TOKENS);
    if (i == EVICTABLE / 2) fixture_sleep_ms(TICKS_MS);
  }
  fixture_sleep_ms(TICKS_MS);
  assert_true(kv_metric(to, "qkvd_kv_bytes") > 0.7 * 1048576);
  assert_true(kv_metric(to, "qkvd_sessions_evicted_total") > 0);
  assert_true(kv_metric(to, "qkvd_tier_pages_total") == 0);
  bytes_of(to, "k0", &bits);
  assert_true(bits == full);
  bytes_of(to, name, &bits);
  assert_true(bits == full);
  for (int i = 1; i < KEPT; i++) {
    (void)snprintf(name, sizeof name, "k%d", i);
    open_session(to, name, 0, false);
    fill(to, name, TOKENS);
  }
  const int64_t until = fixture_now_ms() + FIXTURE_PATIENCE_MS;
  for (bytes_of(to, "k0", &bits); bits >= full - 0.9; bytes_of(to, "k0", &bits)) {
    if (fixture_now_ms() > until) fail_msg("k0 is still at %g bits", bits);
    fixture_sleep_ms(20);
  }
  kv_stop(&other, &to);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(evenly_demoted_rows_are_the_engines),
      cmocka_unit_test(demoting_by_attention_meets_the_average),
      cmocka_unit_test(promoting_restores_what_was_kept),
      cmocka_unit_test(what_cannot_be_is_refused),
      cmocka_unit_test(statistics_come_by_layer_and_head),
      cmocka_unit_test(sessions_reach_their_budget),
      cmocka_unit_test(short_memory_demotes_the_coldest),
      cmocka_unit_test(sessions_that_may_go_are_closed_instead),
  };
  return cmocka_run_group_tests(tests, start, stop);
}
