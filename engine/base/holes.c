#include "engine/base/holes.h"

#include <assert.h>
#include <stdlib.h>

enum { LARGEST_BITS = 44, PRIORITY_BITS = 20 };

struct qkvi_hole {
  uint64_t at, bytes;
  uint64_t largest : LARGEST_BITS;    // hole of the subtree
  uint64_t priority : PRIORITY_BITS;  // not below its children's
  qkvi_hole *left, *right;
};

_Static_assert(sizeof(qkvi_hole) == 40, "with malloc's header 48 bytes");

static uint64_t largest_of(const qkvi_hole *hole) {
  return hole == NULL ? 0 : hole->largest;
}

static void update(qkvi_hole *hole) {
  const uint64_t left = largest_of(hole->left), right = largest_of(hole->right);
  uint64_t largest = hole->bytes;
  if (left > largest) largest = left;
  if (right > largest) largest = right;
  assert(largest >> LARGEST_BITS == 0);
  hole->largest = largest & (UINT64_MAX >> PRIORITY_BITS);
}

// All of `left` lie before all of `right`.
static qkvi_hole *join(qkvi_hole *left, qkvi_hole *right) {
  if (left == NULL) return right;
  if (right == NULL) return left;
  qkvi_hole *top = left->priority >= right->priority ? left : right;
  if (top == left) {
    left->right = join(left->right, right);
  } else {
    right->left = join(left, right->left);
  }
  update(top);
  return top;
}

// Those that begin before `at`, and the others.
static void divide(qkvi_hole *hole, uint64_t at, qkvi_hole **before, qkvi_hole **after) {
  if (hole == NULL) {
    *before = *after = NULL;
  } else if (hole->at < at) {
    *before = hole;
    divide(hole->right, at, &hole->right, after);
    update(hole);
  } else {
    *after = hole;
    divide(hole->left, at, before, &hole->left);
    update(hole);
  }
}

static void destroy(qkvi_hole *hole) {
  if (hole == NULL) return;
  destroy(hole->left);
  destroy(hole->right);
  free(hole);
}

void qkvi_holes_deinit(qkvi_holes *holes) {
  destroy(holes->root);
  *holes = QKVI_HOLES_NONE;
}

// There is one below *link.
static uint64_t take(qkvi_holes *holes, qkvi_hole **link, uint64_t bytes) {
  qkvi_hole *hole = *link;
  uint64_t at;
  if (largest_of(hole->left) >= bytes) {
    at = take(holes, &hole->left, bytes);
  } else if (hole->bytes >= bytes) {
    at = hole->at;
    hole->at += bytes;
    hole->bytes -= bytes;
    if (hole->bytes == 0) {
      *link = join(hole->left, hole->right);
      free(hole);
      holes->count--;
      return at;
    }
  } else {
    at = take(holes, &hole->right, bytes);
  }
  update(hole);
  return at;
}

bool qkvi_holes_take(qkvi_holes *holes, uint64_t bytes, uint64_t *at) {
  assert(bytes > 0);
  if (largest_of(holes->root) < bytes) return false;
  *at = take(holes, &holes->root, bytes);
  holes->bytes -= bytes;
  return true;
}

static qkvi_hole *last_of(qkvi_hole *hole) {
  while (hole != NULL && hole->right != NULL) hole = hole->right;
  return hole;
}

static qkvi_hole *first_of(qkvi_hole *hole) {
  while (hole != NULL && hole->left != NULL) hole = hole->left;
  return hole;
}

static uint64_t next_random(qkvi_holes *holes) {
  holes->random ^= holes->random << 13;
  holes->random ^= holes->random >> 7;
  holes->random ^= holes->random << 17;
  return holes->random >> LARGEST_BITS;
}

static qkvi_hole *make(qkvi_holes *holes, uint64_t at, uint64_t bytes) {
  qkvi_hole *hole = malloc(sizeof *hole);
  assert(hole != NULL);
  *hole = (qkvi_hole){.at = at, .bytes = bytes, .priority = next_random(holes)};
  update(hole);
  holes->count++;
  return hole;
}

void qkvi_holes_give(qkvi_holes *holes, uint64_t at, uint64_t bytes) {
  qkvi_hole *before, *after, *own = NULL;
  assert(bytes > 0);
  holes->bytes += bytes;
  divide(holes->root, at, &before, &after);
  const qkvi_hole *last = last_of(before), *first = first_of(after);
  assert(last == NULL || last->at + last->bytes <= at);
  assert(first == NULL || at + bytes <= first->at);
  // The neighbours that it touches leave their trees, one for each side, and one of them becomes the hole of all.
  if (first != NULL && first->at == at + bytes) {
    divide(after, first->at + 1, &own, &after);
    own->bytes += bytes;
    own->at = at;
  }
  if (last != NULL && last->at + last->bytes == at) {
    qkvi_hole *left;
    divide(before, last->at, &before, &left);
    left->bytes += own == NULL ? bytes : own->bytes;
    if (own != NULL) holes->count--;
    free(own);
    own = left;
  }
  if (own == NULL) own = make(holes, at, bytes);
  update(own);
  holes->root = join(join(before, own), after);
}

static bool each_back(const qkvi_hole *hole, bool (*fn)(void *context, uint64_t at, uint64_t bytes), void *context) {
  if (hole == NULL) return true;
  return each_back(hole->right, fn, context) && fn(context, hole->at, hole->bytes) &&
         each_back(hole->left, fn, context);
}

bool qkvi_holes_each_back(const qkvi_holes *holes, bool (*fn)(void *context, uint64_t at, uint64_t bytes),
                          void *context) {
  return each_back(holes->root, fn, context);
}

typedef struct sums {
  size_t count;
  uint64_t bytes;
  uint64_t begin;  // of the hole seen last, which is the one that follows
  bool touches, empty;
} sums;

static bool sum(void *context, uint64_t at, uint64_t bytes) {
  sums *s = context;
  s->touches |= s->count > 0 && at + bytes >= s->begin;
  s->empty |= bytes == 0;
  s->begin = at;
  s->bytes += bytes;
  s->count++;
  return true;
}

static bool is_ordered(const qkvi_hole *hole) {
  if (hole == NULL) return true;
  qkvi_hole copy = *hole;
  update(&copy);
  return copy.largest == hole->largest && (hole->left == NULL || hole->left->priority <= hole->priority) &&
         (hole->right == NULL || hole->right->priority <= hole->priority) && is_ordered(hole->left) &&
         is_ordered(hole->right);
}

const char *qkvi_holes_validate(const qkvi_holes *holes) {
  sums s = {0};
  (void)qkvi_holes_each_back(holes, sum, &s);
  if (s.touches) return "two holes touch each other, or their order is wrong";
  if (s.empty) return "a hole is empty";
  if (s.count != holes->count || s.bytes != holes->bytes) return "the holes' sums are wrong";
  return is_ordered(holes->root) ? NULL : "a subtree's largest hole or its priority is wrong";
}
