// Looks at many objects.
#include <stdlib.h>
#include <string.h>
#include <utlist.h>

#include "server/objects/internal.h"

enum { AT_ONCE = 256 };  // objects that are looked at with the lock taken once

static void look_at(qkvi_objects *objects, const char *tenant, const char *name, bool touch, uint64_t *bytes,
                    uint64_t *in_memory) {
  qkvi_object *found = qkvi_objects_look_up(objects, tenant, name);
  *bytes = found == NULL ? 0 : found->config.bytes;
  *in_memory = found == NULL ? 0 : found->in_memory;
  if (found != NULL && touch) qkvi_object_use(objects, found);
}

void qkvi_objects_look(qkvi_objects *objects, const char *tenant, char *const *names, size_t count, bool touch,
                       uint64_t *bytes, uint64_t *in_memory) {
  for (size_t first = 0; first < count; first += AT_ONCE) {
    const size_t end = count - first < AT_ONCE ? count : first + AT_ONCE;
    qkvi_objects_lock(objects);
    for (size_t i = first; i < end; i++) look_at(objects, tenant, names[i], touch, &bytes[i], &in_memory[i]);
    qkvi_objects_unlock(objects);
  }
}

// ---- Lists ----

static int by_name(const void *a, const void *b) {
  const qkvi_object *const *first = a, *const *second = b;
  return strcmp((*first)->config.name, (*second)->config.name);
}

// The first `max` objects of those that have come so far are among these.
typedef struct listing {
  const char *tenant, *prefix, *after;
  size_t max;
  qkvi_object **found;  // references
  size_t count, capacity;
  const char *last;  // `max` of them are not behind this name; NULL: so many have not come yet
} listing;

static bool is_listed(const listing *list, const qkvi_object *object) {
  const char *name = object->config.name;
  return strcmp(object->config.tenant, list->tenant) == 0 && strncmp(name, list->prefix, strlen(list->prefix)) == 0 &&
         strcmp(name, list->after) > 0 && (list->last == NULL || strcmp(name, list->last) < 0);
}

// With the lock.
static void take_some(listing *list, qkvi_objects_walk *walk) {
  for (int i = 0; i < AT_ONCE && walk->next != NULL; i++) {
    qkvi_object *object = walk->next;
    walk->next = --walk->left > 0 ? object->hh.next : NULL;
    if (!is_listed(list, object)) continue;
    if (list->count == list->capacity) {
      list->capacity = 2 * list->capacity + AT_ONCE;
      list->found = realloc((void *)list->found, list->capacity * sizeof(qkvi_object *));
      if (list->found == NULL) abort();
    }
    list->found[list->count++] = object;
    object->references++;
  }
}

// With the lock, in order: releases all but the first ones. Of two that had a name one after the other the one that
// has it now stays.
static void drop_rest(qkvi_objects *objects, listing *list) {
  size_t kept = 0;
  for (size_t i = 0; i < list->count; i++) {
    qkvi_object *object = list->found[i], **last = kept > 0 ? &list->found[kept - 1] : NULL;
    if (last != NULL && strcmp((*last)->config.name, object->config.name) == 0) {
      qkvi_objects_release(objects, object->listed ? *last : object);
      if (object->listed) *last = object;
    } else if (kept < list->max) {
      list->found[kept++] = object;
    } else {
      qkvi_objects_release(objects, object);
    }
  }
  list->count = kept;
  list->last = kept == list->max ? list->found[kept - 1]->config.name : NULL;
}

static void sort(const listing *list) {
  if (list->count > 0) qsort((void *)list->found, list->count, sizeof *list->found, by_name);
}

size_t qkvi_objects_list(qkvi_objects *objects, const char *tenant, const char *prefix, const char *after,
                         qkvi_object **out, size_t max) {
  listing list = {.tenant = tenant, .prefix = prefix, .after = after, .max = max};
  qkvi_objects_walk walk = {.left = 0};
  if (max == 0) return 0;
  qkvi_objects_lock(objects);
  walk.next = objects->table;
  walk.left = HASH_COUNT(objects->table);
  LL_PREPEND2(objects->walks, &walk, further);
  while (walk.next != NULL) {
    take_some(&list, &walk);
    const bool full = list.count / 2 >= max;
    qkvi_objects_unlock(objects);
    if (full) sort(&list);
    qkvi_objects_lock(objects);
    if (full) drop_rest(objects, &list);
  }
  LL_DELETE2(objects->walks, &walk, further);
  qkvi_objects_unlock(objects);
  sort(&list);
  qkvi_objects_lock(objects);
  drop_rest(objects, &list);
  qkvi_objects_unlock(objects);
  if (list.count > 0) memcpy((void *)out, (const void *)list.found, list.count * sizeof(qkvi_object *));
  free((void *)list.found);
  return list.count;
}
