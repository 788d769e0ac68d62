#include "client/worker/merges.h"

#include <assert.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#define uthash_fatal(message) abort()
#include <uthash.h>

typedef struct pair_key {
  int32_t left, right;
} pair_key;

typedef struct merge {
  pair_key key;
  int32_t rank, merged;
  UT_hash_handle hh;
} merge;

// A token of the piece that is worked on, in a list of those that are left.
typedef struct node {
  int32_t token;          // -1: it has become part of another one
  int32_t before, after;  // places in the piece; -1 at its ends
} node;

// A pair of neighbours that may be merged. It is out of date where one of them has changed since.
typedef struct candidate {
  int32_t rank, place;  // place of the left one
  pair_key key;
  int32_t merged;
} candidate;

struct qkvi_merges {
  merge *all, *table;
  size_t count, capacity;
  node *nodes;
  size_t nodes_capacity;
  candidate *heap;  // the least rank first, and of equal ones the leftmost
  size_t heap_count, heap_capacity;
};

qkvi_merges *qkvi_merges_create(size_t count) {
  qkvi_merges *merges = calloc(1, sizeof *merges);
  if (merges == NULL) abort();
  merges->all = calloc(count + 1, sizeof *merges->all);
  if (merges->all == NULL) abort();
  merges->capacity = count;
  return merges;
}

void qkvi_merges_destroy(qkvi_merges **merges) {
  if (*merges == NULL) return;
  HASH_CLEAR(hh, (*merges)->table);
  free((*merges)->all);
  free((*merges)->nodes);
  free((*merges)->heap);
  free(*merges);
  *merges = NULL;
}

static const merge *find(const qkvi_merges *merges, pair_key key) {
  merge *found = NULL;
  HASH_FIND(hh, merges->table, &key, sizeof key, found);
  return found;
}

void qkvi_merges_add(qkvi_merges *merges, int32_t left, int32_t right, int32_t merged) {
  assert(merges->count < merges->capacity);
  const pair_key key = {left, right};
  if (find(merges, key) != NULL) return;
  merge *added = &merges->all[merges->count];
  *added = (merge){.key = key, .rank = (int32_t)merges->count, .merged = merged};
  merges->count++;
  HASH_ADD(hh, merges->table, key, sizeof added->key, added);
}

// ---- the heap ----

static bool sooner(const candidate *a, const candidate *b) {
  return a->rank != b->rank ? a->rank < b->rank : a->place < b->place;
}

static void swap(candidate *a, candidate *b) {
  const candidate held = *a;
  *a = *b;
  *b = held;
}

static void push(qkvi_merges *merges, const candidate *added) {
  assert(merges->heap_count < merges->heap_capacity);
  size_t at = merges->heap_count++;
  merges->heap[at] = *added;
  for (; at > 0 && sooner(&merges->heap[at], &merges->heap[(at - 1) / 2]); at = (at - 1) / 2) {
    swap(&merges->heap[at], &merges->heap[(at - 1) / 2]);
  }
}

static candidate pop(qkvi_merges *merges) {
  const candidate first = merges->heap[0];
  merges->heap[0] = merges->heap[--merges->heap_count];
  for (size_t at = 0;;) {
    size_t least = at;
    for (size_t child = 2 * at + 1; child <= 2 * at + 2 && child < merges->heap_count; child++) {
      if (sooner(&merges->heap[child], &merges->heap[least])) least = child;
    }
    if (least == at) return first;
    swap(&merges->heap[at], &merges->heap[least]);
    at = least;
  }
}

// ---- a piece ----

static void reserve(qkvi_merges *merges, size_t count) {
  if (count > merges->nodes_capacity) {
    merges->nodes_capacity = 2 * count;
    merges->heap_capacity = 3 * merges->nodes_capacity;  // each pair once, and two more for each merge
    free(merges->nodes);
    free(merges->heap);
    merges->nodes = calloc(merges->nodes_capacity, sizeof *merges->nodes);
    merges->heap = calloc(merges->heap_capacity, sizeof *merges->heap);
    if (merges->nodes == NULL || merges->heap == NULL) abort();
  }
  merges->heap_count = 0;
}

// Of the token at `place` and the one after it.
static void consider(qkvi_merges *merges, int32_t place) {
  if (place < 0 || merges->nodes[place].after < 0) return;
  const pair_key key = {merges->nodes[place].token, merges->nodes[merges->nodes[place].after].token};
  const merge *found = find(merges, key);
  if (found == NULL) return;
  const candidate added = {.rank = found->rank, .place = place, .key = key, .merged = found->merged};
  push(merges, &added);
}

static void merge_at(qkvi_merges *merges, const candidate *best) {
  node *left = &merges->nodes[best->place];
  if (left->token != best->key.left || left->after < 0) return;
  node *right = &merges->nodes[left->after];
  if (right->token != best->key.right) return;
  left->token = best->merged;
  left->after = right->after;
  right->token = -1;
  if (left->after >= 0) merges->nodes[left->after].before = best->place;
  consider(merges, left->before);
  consider(merges, best->place);
}

size_t qkvi_merges_apply(qkvi_merges *merges, int32_t *tokens, size_t count) {
  assert(count <= INT32_MAX / 6);
  if (count < 2) return count;
  reserve(merges, count);
  for (size_t i = 0; i < count; i++) {
    merges->nodes[i] = (node){tokens[i], (int32_t)i - 1, i + 1 < count ? (int32_t)i + 1 : -1};
  }
  for (size_t i = 0; i < count; i++) consider(merges, (int32_t)i);
  while (merges->heap_count > 0) {
    const candidate best = pop(merges);
    merge_at(merges, &best);
  }
  size_t left = 0;
  for (int32_t at = 0; at >= 0; at = merges->nodes[at].after) tokens[left++] = merges->nodes[at].token;
  return left;
}
