#include "server/http/usage.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <uthash.h>

#include "engine/base/histogram.h"
#include "engine/cache/session_spill.h"

#define WALK_EVERY_NS UINT64_C(1000000000)
#define WALK_SHARE 20

typedef struct sum {
  qkvi_usage_row row;
  UT_hash_handle hh;
} sum;

void qkvi_usage_cache_init(qkvi_usage_cache *cache) {
  *cache = (qkvi_usage_cache){0};
  const int failed = pthread_mutex_init(&cache->lock, NULL);
  assert(failed == 0);
  (void)failed;
}

void qkvi_usage_free(qkvi_usage *usage) {
  free(usage->tenants);
  free(usage->models);
  *usage = (qkvi_usage){0};
}

void qkvi_usage_cache_deinit(qkvi_usage_cache *cache) {
  qkvi_usage_free(&cache->usage);
  (void)pthread_mutex_destroy(&cache->lock);
}

static qkvi_usage_row *find(sum **sums, const char *name) {
  sum *found = NULL;
  HASH_FIND_STR(*sums, name, found);
  if (found != NULL) return &found->row;
  found = calloc(1, sizeof *found);
  if (found == NULL) abort();
  memcpy(found->row.name, name, strlen(name) + 1);
  HASH_ADD_STR(*sums, row.name, found);
  return &found->row;
}

static void add(qkvi_usage_row *row, const qkvi_usage_row *of) {
  row->sessions++;
  row->tokens += of->tokens;
  row->memory_bytes += of->memory_bytes;
  row->storage_bytes += of->storage_bytes;
}

static uint64_t longest(qkv_session *session, const qkv_session_info *info, const uint64_t *lengths) {
  uint64_t most = 0;
  const uint64_t first = info->config.first_position;
  (void)session;
  for (uint32_t layer = 0; layer < info->model->layers; layer++) {
    if (lengths[layer] - first > most) most = lengths[layer] - first;
  }
  return most;
}

static void add_session(qkv_session *session, sum **tenants, sum **models) {
  enum { LAYERS_MAX = 1024 };  // of a model
  uint64_t lengths[LAYERS_MAX];
  qkv_session_info info;
  if (qkv_session_is_staged(session) || qkv_session_model(session)->layers > LAYERS_MAX) return;
  qkv_session_read_info(session, &info, lengths);
  const qkvi_usage_row of = {
      .tokens = longest(session, &info, lengths),
      .memory_bytes = info.usage.bytes_coded + info.usage.bytes_exact + info.usage.bytes_overhead,
      .storage_bytes = info.usage.bytes_stored};
  add(find(tenants, info.config.tenant), &of);
  char model[QKVI_LABEL_NAME_MAX + 1];
  qkvi_label_of_model(info.model->tenant, info.model->name, model);
  add(find(models, model), &of);
}

static int by_name(const sum *a, const sum *b) {
  return strcmp(a->row.name, b->row.name);
}

static qkvi_usage_row *take(sum *sums, size_t *count) {
  HASH_SORT(sums, by_name);
  *count = 0;
  qkvi_usage_row *rows = calloc(HASH_COUNT(sums) + 1, sizeof *rows);
  if (rows == NULL) abort();
  const sum *first = sums;
  for (const sum *at = first; at != NULL; at = at->hh.next) rows[(*count)++] = at->row;
  HASH_CLEAR(hh, sums);  // the entries and their order stay
  for (sum *at = (sum *)first, *next; at != NULL; at = next) {
    next = at->hh.next;
    free(at);
  }
  return rows;
}

static void walk(qkv_store *store, qkvi_usage *usage) {
  sum *tenants = NULL, *models = NULL;
  const size_t max = qkv_store_sessions(store) + 64;  // some may be opened meanwhile
  qkv_session **sessions = calloc(max, sizeof *sessions);
  if (sessions == NULL) abort();
  const qkv_store_filter all = {0};
  const size_t count = qkv_store_list(store, &all, sessions, max);
  for (size_t i = 0; i < count; i++) {
    add_session(sessions[i], &tenants, &models);
    qkv_session_unref(&sessions[i]);
  }
  free(sessions);
  usage->tenants = take(tenants, &usage->tenant_count);
  usage->models = take(models, &usage->model_count);
}

static qkvi_usage_row *copy(const qkvi_usage_row *rows, size_t count) {
  qkvi_usage_row *made = calloc(count + 1, sizeof *made);
  if (made == NULL) abort();
  if (count > 0) memcpy(made, rows, count * sizeof *made);
  return made;
}

void qkvi_usage_read(qkvi_usage_cache *cache, qkv_store *store, qkvi_usage *out) {
  pthread_mutex_lock(&cache->lock);
  const uint64_t began = qkv_stage_now();
  if (began >= cache->next_ns) {
    qkvi_usage_free(&cache->usage);
    walk(store, &cache->usage);
    const uint64_t pause = WALK_SHARE * (qkv_stage_now() - began);
    cache->next_ns = began + (pause > WALK_EVERY_NS ? pause : WALK_EVERY_NS);
  }
  *out = (qkvi_usage){.tenants = copy(cache->usage.tenants, cache->usage.tenant_count),
                      .models = copy(cache->usage.models, cache->usage.model_count),
                      .tenant_count = cache->usage.tenant_count,
                      .model_count = cache->usage.model_count};
  pthread_mutex_unlock(&cache->lock);
}
