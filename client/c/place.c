#include "client/c/place.h"

#include <assert.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "client/c/health.h"
#include "client/c/socket.h"
#include "engine/base/clock.h"
#include "engine/base/name.h"

enum {
  PARTS_MAX = 256,
  TARGET_BYTES_MAX = 128,  // as in Python
};

struct qkvi_kept_model {
  qkvi_kept_model *next;
  char *name;
  void *request;
  size_t bytes;
};

// ---- weights ----

uint64_t qkvi_place_hash(const char *text) {
  return XXH3_64bits(text, strlen(text));
}

uint64_t qkvi_place_weight(uint64_t target, uint64_t key) {
  uint64_t mixed = target ^ key;
  mixed = (mixed ^ (mixed >> 33)) * 0xC2B2AE3D27D4EB4F;
  mixed = (mixed ^ (mixed >> 29)) * 0x165667B19E3779F9;
  return mixed ^ (mixed >> 32);
}

// ---- the key of calls ----

// A name that no session can have goes without: the daemon refuses it.
static void set_key(qkv_client *client, const char *key) {
  qkv_error invalid = {0};
  grpc_metadata *entry = &client->metadata[client->metadata_count];
  if (key != NULL && qkv_name_check(key, "key", &invalid) != QKV_OK) key = NULL;
  if (client->keyed && key != NULL && grpc_slice_str_cmp(entry->value, key) == 0) return;
  if (client->keyed) grpc_slice_unref(entry->value);
  client->keyed = key != NULL;
  if (key == NULL) return;
  *entry = (grpc_metadata){.key = grpc_slice_from_static_string("x-qkv-session"),
                           .value = grpc_slice_from_copied_string(key)};
}

// ---- parts ----

static void register_kept(const qkv_client *whole, qkv_client *part) {
  for (const qkvi_kept_model *model = whole->models; model != NULL; model = model->next) {
    grpc_byte_buffer *response = NULL;
    qkv_call_error ignored;  // what refuses it will refuse its sessions, too
    (void)qkvi_unary(part, "/qkv.v1.KvCache/RegisterModel", qkvi_request_of_bytes(model->request, model->bytes),
                     &response, &ignored);
    if (response != NULL) grpc_byte_buffer_destroy(response);
  }
}

static bool is_in_use(const qkv_client *part) {
  return !part->suspect && part->channel != NULL && !qkvi_socket_hung_up(part->fd);
}

// One part that is to answer a health check before calls go there.
typedef struct inquiry {
  qkv_client *part;
  int64_t timeout_ms;
  qkv_call_error why;
  bool threaded;
  pthread_t thread;
} inquiry;

static void *ask(void *context) {
  inquiry *one = context;
  (void)qkvi_check_health(one->part, one->timeout_ms, &one->why);
  return NULL;
}

// What its answer means for the part.
static void conclude(const qkv_client *whole, const inquiry *one) {
  qkv_client *part = one->part;
  if (one->why.code == QKV_OK) {
    part->suspect = false;
    part->pause_ms = 0;
    register_kept(whole, part);
    return;
  }
  part->pause_ms = part->pause_ms == 0 ? QKVI_HEALTH_PAUSE_MS : 2 * part->pause_ms;
  if (part->pause_ms > QKVI_HEALTH_PAUSE_MAX_MS) part->pause_ms = QKVI_HEALTH_PAUSE_MAX_MS;
  part->asked_next_ms = qkv_now_ms() + part->pause_ms;
}

// Of a client that is being connected. False: its pause is not over, which `why` says where it has no other reason
// yet.
static bool is_due(const qkv_client *part, qkv_call_error *why) {
  if (qkv_now_ms() >= part->asked_next_ms) return true;
  if (why->code != QKV_OK) return false;
  (void)qkvi_fail(why, QKV_UNAVAILABLE, "%s has not answered a moment ago", part->target);
  return false;
}

// Of one that is connected: no call waits for a part that is watched. `why` as above.
static bool is_left_alone(const qkv_client *part, qkv_call_error *why) {
  if (!qkvi_health_watching(part->health, why)) return false;
  if (why->code == QKV_OK) (void)qkvi_fail(why, QKV_UNAVAILABLE, "%s has not answered a moment ago", part->target);
  return true;
}

// A part that does not answer is watched until it does. Its connection may be one that the daemon knows nothing of.
static void watch_failed(qkv_client *part) {
  if (!part->suspect) return;
  qkvi_cut(part);
  qkvi_health_watch(part->health);
}

// Of a health check that a call makes: no more than the call has.
static int64_t check_ms(const qkv_client *whole) {
  return whole->options.timeout_ms < QKVI_HEALTH_MS ? whole->options.timeout_ms : QKVI_HEALTH_MS;
}

// Whether calls may go there. One that is suspect is asked, unless it is watched; `why` where it is not.
static bool answers(const qkv_client *whole, qkv_client *part, qkv_call_error *why) {
  assert(part != NULL);
  if (is_in_use(part)) return true;
  part->suspect = true;
  if (is_left_alone(part, why)) return false;
  inquiry one = {.part = part, .timeout_ms = check_ms(whole)};
  (void)ask(&one);
  conclude(whole, &one);
  if (one.why.code != QKV_OK) *why = one.why;
  watch_failed(part);
  return !part->suspect;
}

// Asks all parts that are suspect and due (not watched), at the same time: those that do not answer take the time of
// one.
static void ask_all(const qkv_client *whole, bool connecting, int64_t timeout_ms, qkv_call_error *why) {
  inquiry *all = calloc(whole->part_count + 1, sizeof *all);
  assert(all != NULL);
  size_t count = 0;
  for (size_t i = 0; i < whole->part_count; i++) {
    qkv_client *part = whole->parts[i];
    assert(part != NULL);
    if (is_in_use(part)) continue;
    part->suspect = true;
    if (connecting ? is_due(part, why) : !is_left_alone(part, why))
      all[count++] = (inquiry){.part = part, .timeout_ms = timeout_ms};
  }
  // The last one on the calling thread, and those for which there is no thread.
  for (size_t i = 0; i + 1 < count; i++) all[i].threaded = pthread_create(&all[i].thread, NULL, ask, &all[i]) == 0;
  for (size_t i = 0; i < count; i++) {
    if (!all[i].threaded) (void)ask(&all[i]);
  }
  for (size_t i = 0; i < count; i++) {
    if (all[i].threaded && pthread_join(all[i].thread, NULL) != 0) abort();
    conclude(whole, &all[i]);
    if (all[i].why.code != QKV_OK) *why = all[i].why;
    if (!connecting) watch_failed(all[i].part);
  }
  free(all);
}

// The part of the highest weight below that of `after` (NULL: of all); of equal weights the earlier one is higher.
static qkv_client *next_best(const qkv_client *whole, uint64_t key, const qkv_client *after) {
  qkv_client *best = NULL;
  uint64_t best_weight = 0;
  const uint64_t limit = after != NULL ? qkvi_place_weight(after->place, key) : 0;
  for (size_t i = 0; i < whole->part_count; i++) {
    qkv_client *part = whole->parts[i];
    const uint64_t weight = qkvi_place_weight(part->place, key);
    const bool lower = after == NULL || weight < limit || (weight == limit && part->index > after->index);
    if (!lower || (best != NULL && weight <= best_weight)) continue;
    best = part;
    best_weight = weight;
  }
  return best;
}

static qkv_code none_answers(const qkv_client *whole, const qkv_call_error *why, qkv_call_error *error) {
  return qkvi_fail(error, QKV_UNAVAILABLE, "none of the %zu daemons %.200s answers: %.200s", whole->part_count,
                   whole->target, why->text);
}

static qkv_client *owner_of(const qkv_client *whole, const char *key, qkv_call_error *error) {
  qkv_call_error why = {0};
  const uint64_t hash = qkvi_place_hash(key);
  qkv_client *part = next_best(whole, hash, NULL);
  while (part != NULL && !answers(whole, part, &why)) part = next_best(whole, hash, part);
  if (part == NULL) (void)none_answers(whole, &why, error);
  return part;
}

qkv_code qkvi_route(qkv_client **client, const char *key, qkv_call_error *error) {
  qkv_client *whole = *client;
  if (whole->placement != NULL) key = whole->placement;
  if (whole->part_count > 0) {
    if (key == NULL)
      return qkvi_fail(error, QKV_FAILED_PRECONDITION,
                       "the call is for one daemon, the client has %zu: connect to the one that is meant, or set "
                       "placement",
                       whole->part_count);
    *client = owner_of(whole, key, error);
    if (*client == NULL) return QKV_UNAVAILABLE;
  }
  if (key != NULL) set_key(*client, key);
  return QKV_OK;
}

qkv_code qkvi_each_part(qkv_client *client, bool (*fn)(qkv_client *part, void *context), void *context,
                        qkv_call_error *error) {
  qkv_call_error why = {0};
  size_t answered = 0;
  if (client->part_count == 0) {
    set_key(client, client->placement);
    (void)fn(client, context);
    return qkvi_ok(error);
  }
  ask_all(client, false, check_ms(client), &why);
  for (size_t i = 0; i < client->part_count; i++) {
    if (client->parts[i]->suspect) continue;
    set_key(client->parts[i], client->placement);
    answered++;
    if (!fn(client->parts[i], context)) break;
  }
  return answered > 0 ? qkvi_ok(error) : none_answers(client, &why, error);
}

void qkvi_keep_model(qkv_client *client, const char *name, const void *request, size_t bytes) {
  qkvi_kept_model *model = client->models;
  while (model != NULL && strcmp(model->name, name) != 0) model = model->next;
  if (model == NULL) {
    model = calloc(1, sizeof *model);
    assert(model != NULL);
    model->name = strdup(name);
    model->next = client->models;
    client->models = model;
  }
  free(model->request);
  model->request = malloc(bytes + 1);
  assert(model->name != NULL && model->request != NULL);
  memcpy(model->request, request, bytes);
  model->bytes = bytes;
}

// ---- groups ----

qkv_code qkvi_split_keys(qkv_client *client, const char *(*key_of)(const void *entries, size_t i),
                         const void *entries, size_t count, qkvi_split *split, qkv_call_error *error) {
  const size_t most = client->part_count > 0 ? client->part_count : 1;
  *split = (qkvi_split){.order = calloc(count + 1, sizeof(size_t)),
                        .begins = calloc(most + 1, sizeof(size_t)),
                        .parts = calloc(most, sizeof(qkv_client *))};
  qkv_client **owners = calloc(count + 1, sizeof *owners);
  assert(split->order != NULL && split->begins != NULL && split->parts != NULL && owners != NULL);
  qkv_code code = QKV_OK;
  // From the last to the first: the key that stays in a client's metadata is that of its first entry.
  for (size_t i = count; i > 0 && code == QKV_OK; i--) {
    const char *key = key_of(entries, i - 1);
    owners[i - 1] = client;
    code = qkvi_route(&owners[i - 1], key != NULL ? key : "", error);
  }
  size_t used = 0;
  for (size_t p = 0; p < most && code == QKV_OK; p++) {
    qkv_client *part = client->part_count > 0 ? client->parts[p] : client;
    const size_t begin = used;
    for (size_t i = 0; i < count; i++) {
      if (owners[i] == part) split->order[used++] = i;
    }
    if (used == begin) continue;
    split->parts[split->groups] = part;
    split->begins[split->groups++] = begin;
    split->begins[split->groups] = used;
  }
  free((void *)owners);
  if (code != QKV_OK) qkvi_split_free(split);
  return code;
}

void qkvi_split_free(qkvi_split *split) {
  free(split->order);
  free(split->begins);
  free((void *)split->parts);
  *split = (qkvi_split){0};
}

// ---- opening and closing ----

static qkv_code add_part(qkv_client *whole, const char *target, const qkv_client_options *options,
                         qkv_call_error *error) {
  qkvi_target parsed;
  qkv_error invalid = {0};
  if (strlen(target) > TARGET_BYTES_MAX)
    return qkvi_fail(error, QKV_INVALID_ARGUMENT, "a target has %zu bytes, of several at most %d are possible",
                     strlen(target), TARGET_BYTES_MAX);
  if (whole->part_count == PARTS_MAX)
    return qkvi_fail(error, QKV_INVALID_ARGUMENT, "there are more than %d targets", PARTS_MAX);
  if (qkvi_target_parse(target, &parsed, &invalid) != QKV_OK) return qkvi_fail_with(error, &invalid);
  for (size_t i = 0; i < whole->part_count; i++) {
    assert(whole->parts[i] != NULL);
    if (strcmp(whole->parts[i]->target, target) == 0)
      return qkvi_fail(error, QKV_INVALID_ARGUMENT, "target %.200s is there twice", target);
  }
  qkv_client *part = NULL;
  const qkv_code code = qkvi_client_create(target, options, &part, error);
  if (code != QKV_OK) return code;
  assert(part != NULL);
  part->suspect = true;
  part->place = qkvi_place_hash(target);
  part->index = whole->part_count;
  whole->parts[whole->part_count++] = part;
  return qkvi_health_create(target, options, &part->health, error);
}

static qkv_code add_parts(qkv_client *whole, const qkv_client_options *options, qkv_call_error *error) {
  char *texts = strdup(whole->target), *at = texts;
  assert(texts != NULL);
  qkv_code code = QKV_OK;
  while (at != NULL && code == QKV_OK) code = add_part(whole, strsep(&at, ","), options, error);
  free(texts);
  return code;
}

// Until one of them answers.
static qkv_code connect_parts(qkv_client *whole, qkv_call_error *error) {
  const int64_t until = qkv_now_ms() + whole->options.connect_timeout_ms;
  qkv_call_error why = {0};
  for (;;) {
    const int64_t left_ms = until - qkv_now_ms();
    ask_all(whole, true, left_ms < 1 ? 1 : left_ms < QKVI_HEALTH_MS ? left_ms : QKVI_HEALTH_MS, &why);
    bool any = false;
    for (size_t i = 0; i < whole->part_count; i++) any |= !whole->parts[i]->suspect;
    for (size_t i = 0; i < whole->part_count && any; i++) watch_failed(whole->parts[i]);
    if (any) return qkvi_ok(error);
    if (qkv_now_ms() >= until) return none_answers(whole, &why, error);
    qkvi_pause(whole, QKVI_HEALTH_PAUSE_MS / 2);
  }
}

qkv_code qkvi_connect_several(const char *targets, const qkv_client_options *options, qkv_client **client_out,
                              qkv_call_error *error) {
  qkv_client *whole = NULL;
  qkv_code code = qkvi_client_create(targets, options, &whole, error);
  if (code != QKV_OK) return code;
  whole->parts = calloc(PARTS_MAX, sizeof(qkv_client *));
  assert(whole->parts != NULL);
  code = add_parts(whole, options, error);
  if (code == QKV_OK) code = connect_parts(whole, error);
  if (code != QKV_OK) qkv_client_close(&whole);
  *client_out = whole;
  return code;
}

void qkvi_close_parts(qkv_client *client) {
  for (size_t i = 0; i < client->part_count; i++) qkv_client_close(&client->parts[i]);
  free((void *)client->parts);
  while (client->models != NULL) {
    qkvi_kept_model *model = client->models;
    client->models = model->next;
    free(model->name);
    free(model->request);
    free(model);
  }
  if (client->keyed) grpc_slice_unref(client->metadata[client->metadata_count].value);
}
