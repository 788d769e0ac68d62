#include "storage/cuts.h"

#include <stdlib.h>
#include <string.h>

#include "storage/internal.h"

// Another cut that clips all that this one clips takes its place: the next one for forks behind that, the last one
// before it for forks before that.
static void note_cover(qkvi_cut *cut, const qkvi_cut *other) {
  if (other->time < cut->time && other->time > cut->from) cut->from = other->time;
  if (other->time > cut->time && other->time < cut->until) cut->until = other->time;
}

// How many of a stack of ascending positions are at or below this one.
static size_t at_or_below(qkvi_cut *const *stack, size_t count, uint64_t position) {
  size_t low = 0, high = count;
  while (low < high) {
    const size_t middle = low + (high - low) / 2;
    if (stack[middle]->position <= position) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Finds for each cut the nearest one of `layer` on one side of it that covers it. On the stack are those that no
// nearer one replaces.
static void find_covers(qkvi_cut *const *cuts, size_t count, uint32_t layer, bool behind, qkvi_cut **stack) {
  size_t height = 0;
  for (size_t i = 0; i < count; i++) {
    qkvi_cut *cut = cuts[behind ? count - 1 - i : i];
    const size_t below = at_or_below(stack, height, cut->position);
    if (below > 0) note_cover(cut, stack[below - 1]);
    if (cut->layer != layer) continue;
    height = below > 0 && stack[below - 1]->position == cut->position ? below - 1 : below;
    stack[height++] = cut;
  }
}

static int compare_layers(const void *a, const void *b) {
  const qkvi_cut *first = *(qkvi_cut *const *)a, *second = *(qkvi_cut *const *)b;
  if (first->layer != second->layer) return first->layer < second->layer ? -1 : 1;
  return first->time < second->time ? -1 : first->time > second->time;
}

// All cuts of a layer are covered by those of that layer and by those of all layers.
static void find_all_covers(qkvi_cut **cuts, size_t count) {
  qkvi_cut **other = qkvi_checked(malloc(2 * count * sizeof *other)), **stack = other + count;
  memcpy((void *)other, (const void *)cuts, count * sizeof *cuts);
  qsort((void *)other, count, sizeof *other, compare_layers);
  for (int behind = 0; behind < 2; behind++) {
    find_covers(cuts, count, QKV_LAYER_ALL, behind != 0, stack);
    for (size_t first = 0, end; first < count && other[first]->layer != QKV_LAYER_ALL; first = end) {
      for (end = first + 1; end < count && other[end]->layer == other[first]->layer;) end++;
      find_covers(other + first, end - first, other[first]->layer, behind != 0, stack);
    }
  }
  free((void *)other);
}

// How many ascending times are not behind this one.
static size_t not_behind(const uint64_t *times, size_t count, uint64_t time) {
  size_t low = 0, high = count;
  while (low < high) {
    const size_t middle = low + (high - low) / 2;
    if (times[middle] <= time) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

qkvi_cut **qkvi_cuts_decide(qkvi_cut *newest, const uint64_t *times, size_t heirs, bool alone, size_t *count) {
  *count = 0;
  for (const qkvi_cut *cut = newest; cut != NULL; cut = cut->earlier) ++*count;
  qkvi_cut **cuts = qkvi_checked(malloc((*count + 1) * sizeof(qkvi_cut *)));
  size_t at = *count;
  for (qkvi_cut *cut = newest; cut != NULL; cut = cut->earlier) {
    cut->from = 0;
    cut->until = UINT64_MAX;
    cuts[--at] = cut;
  }
  if (*count > 0) find_all_covers(cuts, *count);
  for (size_t i = 0; i < *count; i++) {
    const size_t before = not_behind(times, heirs, cuts[i]->until);
    const bool inherited = before > 0 && times[before - 1] > cuts[i]->from;
    cuts[i]->needed = inherited || (alone && cuts[i]->until == UINT64_MAX);
  }
  return cuts;
}
