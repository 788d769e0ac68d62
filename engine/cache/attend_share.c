// Which ranges of pages the requests of a batch share.
//
// Every range that a request sees whole and that other layers have, too, is a *use*. Sorted, the uses of one range
// are adjacent: they are cut into groups, and groups of the same requests over consecutive ranges are joined.
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cache/attend_internal.h"

typedef struct range_use {
  size_t index;  // of the range in the layer
  const qkv_page_range *range;
  size_t pages;  // that the layer has of it
  qkv_precision precision;
  float soft_cap;
  size_t place;  // of the request
} range_use;

// What all rows of a request see: [*begin, *end). Both ends move forward from query to query.
static void seen_by_all(const qkv_attend *request, uint64_t *begin, uint64_t *end) {
  uint64_t unused;
  qkvi_attend_visible(request, 0, &unused, end);
  qkvi_attend_visible(request, (uint64_t)request->q.dims[0] - 1, begin, &unused);
}

// Whether a layer's range lies within [begin, end), and other layers have it.
static bool is_candidate(const qkv_layer *layer, size_t range, uint64_t begin, uint64_t end) {
  size_t first, pages_end;
  if (!qkvi_range_is_shared(layer->ranges[range].range)) return false;
  qkv_layer_range(layer, range, &first, &pages_end);
  if (first == pages_end) return false;
  return begin <= qkvi_layer_span(layer, first).begin && qkvi_layer_span(layer, pages_end - 1).end <= end;
}

// The uses of a request, but for the ranges that `taken` has flags for, at `uses` where that is not NULL. Returns how
// many there are, at most `most`.
static size_t list_uses(const qkv_attend *request, size_t place, const bool *taken, size_t most, range_use *uses) {
  const qkv_layer *layer = request->layer;
  size_t range, range_end, count = 0, first, pages_end;
  uint64_t begin, end;
  if (qkvi_attend_rows(request) > QKVI_SHARE_ROWS / 2) return 0;
  seen_by_all(request, &begin, &end);
  qkvi_attend_ranges(request, &range, &range_end);
  for (const size_t from = range; range < range_end && count < most; range++) {
    if (taken != NULL && taken[range - from]) continue;
    if (!is_candidate(layer, range, begin, end)) continue;
    qkv_layer_range(layer, range, &first, &pages_end);
    if (uses != NULL) {
      uses[count] = (range_use){.index = range,
                                .range = layer->ranges[range].range,
                                .pages = pages_end - first,
                                .precision = request->options.precision,
                                .soft_cap = qkvi_attend_task(request, 0).soft_cap,
                                .place = place};
    }
    count++;
  }
  return count;
}

bool qkvi_share_may(const qkv_attend *request) {
  return list_uses(request, 0, NULL, 1, NULL) > 0;
}

#define COMPARE(a, b) ((a) < (b) ? -1 : (a) > (b))

// 0: rows of both may be in one block.
static int compare_kinds(const range_use *a, const range_use *b) {
  if (a->index != b->index) return COMPARE(a->index, b->index);
  if (a->range != b->range) return COMPARE((uintptr_t)a->range, (uintptr_t)b->range);
  if (a->pages != b->pages) return COMPARE(a->pages, b->pages);
  if (a->precision != b->precision) return COMPARE(a->precision, b->precision);
  return COMPARE(a->soft_cap, b->soft_cap);
}

static int compare_uses(const void *a, const void *b) {
  const range_use *left = a, *right = b;
  const int kinds = compare_kinds(left, right);
  return kinds != 0 ? kinds : COMPARE(left->place, right->place);
}

// ---- Groups ----

typedef struct finder {
  const qkv_attend *requests;
  qkvi_sharing *sharing;
  size_t members_max;  // of a group
  size_t member_count;
  size_t *last;  // [requests]: 1 + the last group that a request is the first member of; 0: none
} finder;

static bool continues(const qkvi_share_group *group, size_t range, const size_t *members, size_t count) {
  return group->first + group->count == range && group->member_count == count &&
         memcmp(group->members, members, count * sizeof *members) == 0;
}

static void add_group(finder *f, const range_use *uses, size_t count) {
  qkvi_sharing *sharing = f->sharing;
  size_t *members = sharing->members + f->member_count, *last = &f->last[uses[0].place];
  if (count < 2) return;
  for (size_t i = 0; i < count; i++) members[i] = uses[i].place;
  if (*last > 0 && continues(&sharing->groups[*last - 1], uses[0].index, members, count)) {
    sharing->groups[*last - 1].count++;
    return;
  }
  f->member_count += count;
  sharing->groups[sharing->count++] =
      (qkvi_share_group){.first = uses[0].index, .count = 1, .members = members, .member_count = count};
  *last = sharing->count;
}

// The uses of one range by requests of one kind, in groups of about as many rows each.
static void add_groups(finder *f, const range_use *uses, size_t count) {
  size_t all = 0, rows = 0, first = 0;
  for (size_t i = 0; i < count; i++) all += qkvi_attend_rows(&f->requests[uses[i].place]);
  size_t groups = (all + QKVI_SHARE_ROWS - 1) / QKVI_SHARE_ROWS;
  if (groups < (count - 1) / f->members_max + 1) groups = (count - 1) / f->members_max + 1;
  const size_t enough = (all + groups - 1) / groups;
  for (size_t i = 0; i < count; i++) {
    const size_t more = qkvi_attend_rows(&f->requests[uses[i].place]);
    if (i > first && (rows >= enough || rows + more > QKVI_SHARE_ROWS || i - first == f->members_max)) {
      add_group(f, uses + first, i - first);
      first = i;
      rows = 0;
    }
    rows += more;
  }
  add_group(f, uses + first, count - first);
}

static void group_uses(finder *f, range_use *uses, size_t count) {
  qsort(uses, count, sizeof *uses, compare_uses);
  for (size_t first = 0, end; first < count; first = end) {
    for (end = first + 1; end < count && compare_kinds(&uses[first], &uses[end]) == 0;) end++;
    add_groups(f, uses + first, end - first);
  }
}

void qkvi_share_find(const qkv_attend *requests, size_t count, size_t members_max, const bool *const *taken,
                     qkvi_sharing *sharing) {
  size_t all = 0, filled = 0;
  *sharing = (qkvi_sharing){0};
  for (size_t i = 0; i < count; i++)
    all += list_uses(&requests[i], i, taken == NULL ? NULL : taken[i], SIZE_MAX, NULL);
  if (all < 2 || members_max < 2) return;
  range_use *uses = malloc(all * sizeof *uses);
  finder f = {
      .requests = requests, .sharing = sharing, .members_max = members_max, .last = calloc(count, sizeof *f.last)};
  sharing->groups = malloc(all / 2 * sizeof *sharing->groups);
  sharing->members = malloc(all * sizeof *sharing->members);
  if (uses != NULL && f.last != NULL && sharing->groups != NULL && sharing->members != NULL) {
    // Forks may come and go meanwhile: what was counted is the most.
    for (size_t i = 0; i < count; i++)
      filled += list_uses(&requests[i], i, taken == NULL ? NULL : taken[i], all - filled, uses + filled);
    group_uses(&f, uses, filled);
  }
  free(uses);
  free(f.last);
}

void qkvi_share_clear(qkvi_sharing *sharing) {
  free(sharing->groups);
  free(sharing->members);
  *sharing = (qkvi_sharing){0};
}
