// Lists of the store's sessions, and sums over all of them: in parts, between which others get the store's lock.
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cache/session_spill.h"
#include "engine/cache/store_internal.h"

static const char *tenant_of(const qkv_session *session) {
  return qkv_session_config_of(session)->tenant;
}

static int compare(const qkv_session *first, const qkv_session *second) {
  const int order = strcmp(qkv_session_name(first), qkv_session_name(second));
  return order != 0 ? order : strcmp(tenant_of(first), tenant_of(second));
}

// A session that is published meanwhile may come twice: next to itself.
static int by_name(const void *a, const void *b) {
  const qkv_session *first = *(qkv_session *const *)a, *second = *(qkv_session *const *)b;
  const int order = compare(first, second);
  return order != 0 ? order : (first > second) - (first < second);
}

bool qkv_store_is_behind(const qkv_session *session, const qkv_store_place *after) {
  const int order = strcmp(qkv_session_name(session), after->name);
  if (order != 0 || after->tenant[0] == '\0') return order > 0;
  return strcmp(tenant_of(session), after->tenant) > 0;
}

qkv_store_place qkv_store_place_of(const qkv_session *session) {
  qkv_store_place place;
  (void)snprintf(place.name, sizeof place.name, "%s", qkv_session_name(session));
  (void)snprintf(place.tenant, sizeof place.tenant, "%s", tenant_of(session));
  return place;
}

static bool is_listed(const qkv_session *session, const qkv_store_filter *filter) {
  const char *name = qkv_session_name(session);
  if (filter->tenant != NULL && strcmp(tenant_of(session), filter->tenant) != 0) return false;
  if (filter->prefix != NULL && strncmp(name, filter->prefix, strlen(filter->prefix)) != 0) return false;
  if (filter->after != NULL && !qkv_store_is_behind(session, filter->after)) return false;
  return filter->wanted == NULL || filter->wanted(filter->context, session);
}

// The first `max` sessions of those that have come so far are among these.
typedef struct listing {
  const qkv_store_filter *filter;
  size_t max;
  qkv_session **found;  // references
  size_t count, capacity;
  const qkv_session *last;  // `max` others are not behind it; NULL: so many have not come yet
} listing;

static void take(void *context, qkv_session *session) {
  listing *list = context;
  if (!is_listed(session, list->filter) || (list->last != NULL && compare(session, list->last) > 0)) return;
  if (list->count == list->capacity) {
    list->capacity = list->capacity * 2 + 64;
    list->found = (qkv_session **)realloc((void *)list->found, list->capacity * sizeof *list->found);
    assert(list->found != NULL);
  }
  list->found[list->count++] = qkv_session_ref(session);
}

static void trim(listing *list) {
  size_t kept = 0;
  if (list->count > 0) qsort((void *)list->found, list->count, sizeof *list->found, by_name);
  for (size_t i = 0; i < list->count; i++) {
    const bool again = kept > 0 && list->found[kept - 1] == list->found[i];
    if (again || kept == list->max) {
      qkv_session_unref(&list->found[i]);
    } else {
      list->found[kept++] = list->found[i];
    }
  }
  list->count = kept;
  list->last = kept == list->max ? list->found[kept - 1] : NULL;
}

size_t qkv_store_list(qkv_store *store, const qkv_store_filter *filter, qkv_session **out, size_t max) {
  listing list = {.filter = filter, .max = max};
  uint64_t next = 0;
  if (max == 0) return 0;
  while (qkvi_store_next_part(store, &next, take, &list)) {
    if (list.count / 2 >= max) trim(&list);
  }
  trim(&list);
  if (list.count > 0) memcpy((void *)out, (const void *)list.found, list.count * sizeof *out);
  free((void *)list.found);
  return list.count;
}

// ---- Sums ----

static void add_staying(void *context, qkv_session *session) {
  uint64_t *bytes = context;
  if (qkv_session_config_of(session)->backing == NULL || qkv_session_is_pinned(session))
    *bytes += qkv_session_bytes_kept(session);
}

static void add_evictable(void *context, qkv_session *session) {
  uint64_t *bytes = context;
  if (qkv_session_may_go(session)) *bytes += qkv_session_bytes_kept(session);
}

static uint64_t sum(qkv_store *store, void (*fn)(void *context, qkv_session *session)) {
  uint64_t bytes = 0, next = 0;
  while (qkvi_store_next_part(store, &next, fn, &bytes)) {
  }
  return bytes;
}

uint64_t qkv_store_staying(qkv_store *store) {
  return sum(store, add_staying);
}

uint64_t qkv_store_evictable(qkv_store *store) {
  return sum(store, add_evictable);
}
