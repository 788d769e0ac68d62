#include "engine/codec/phases.h"

#include <assert.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "engine/kernel/kernel.h"

enum { CENTRE = QKV_PAGE_TOKENS / 2 };  // slot

// From here on a double counts angles in steps of 5e-7 radians and more: the angle of a page is then no longer that
// of the first page of its span and the way from there. Keys and queries have to be turned by the same one.
static const uint64_t FAR = (uint64_t)1 << 32;

typedef struct turn {
  double c, s;
} turn;

struct qkv_phases {
  qkv_rope rope;
  uint32_t pairs;
  double magnitude;
  double *frequencies;                // [pairs], where steady
  double *page_cosines, *page_sines;  // [page][pair]: of 64 * page positions
  float (*cosines)[QKV_PAGE_TOKENS];  // [pairs][slot]: of its distance to the centre
  float (*sines)[QKV_PAGE_TOKENS];
  float *slot_cosines, *slot_sines;  // the same, [slot][pair]
};

static turn turn_of(double angle) {
  return (turn){cos(angle), sin(angle)};
}

static void *array(size_t count, size_t size) {
  void *made = calloc(count, size);
  if (made == NULL) abort();
  return made;
}

static void fill_pair(qkv_phases *phases, uint32_t pair) {
  const double frequency = phases->frequencies[pair] = qkv_rope_frequency(&phases->rope, 0, pair);
  for (size_t i = 0; i < QKV_PHASES_PAGES; i++) {
    const turn page = turn_of((double)(i * QKV_PAGE_TOKENS) * frequency);
    phases->page_cosines[i * phases->pairs + pair] = page.c;
    phases->page_sines[i * phases->pairs + pair] = page.s;
  }
  for (size_t slot = 0; slot < QKV_PAGE_TOKENS; slot++) {
    const turn at = turn_of(((double)slot - CENTRE) * frequency);
    phases->cosines[pair][slot] = (float)at.c;
    phases->sines[pair][slot] = (float)at.s;
    phases->slot_cosines[slot * phases->pairs + pair] = (float)at.c;
    phases->slot_sines[slot * phases->pairs + pair] = (float)at.s;
  }
}

qkv_phases *qkv_phases_create(const qkv_rope *rope) {
  assert(rope->theta != 0 && rope->width > 0);
  qkv_phases *phases = array(1, sizeof *phases);
  phases->rope = *rope;
  phases->pairs = rope->width / 2;
  phases->magnitude = qkv_rope_magnitude(rope);
  phases->frequencies = array(phases->pairs, sizeof *phases->frequencies);
  phases->page_cosines = array(phases->pairs, QKV_PHASES_PAGES * sizeof *phases->page_cosines);
  phases->page_sines = array(phases->pairs, QKV_PHASES_PAGES * sizeof *phases->page_sines);
  phases->cosines = array(phases->pairs, sizeof *phases->cosines);
  phases->sines = array(phases->pairs, sizeof *phases->sines);
  phases->slot_cosines = array(phases->pairs, QKV_PAGE_TOKENS * sizeof *phases->slot_cosines);
  phases->slot_sines = array(phases->pairs, QKV_PAGE_TOKENS * sizeof *phases->slot_sines);
  for (uint32_t pair = 0; pair < phases->pairs; pair++) fill_pair(phases, pair);
  return phases;
}

void qkv_phases_destroy(qkv_phases **phases) {
  qkv_phases *old = *phases;
  if (old == NULL) return;
  *phases = NULL;
  free(old->frequencies);
  free(old->page_cosines);
  free(old->page_sines);
  free(old->cosines);
  free(old->sines);
  free(old->slot_cosines);
  free(old->slot_sines);
  free(old);
}

// Whether a page's rows all turn with the same frequencies.
static bool steady(const qkv_phases *phases, uint64_t position) {
  return qkv_rope_steady(&phases->rope, position + QKV_PAGE_TOKENS);
}

static double angle_at(const qkv_phases *phases, uint64_t position, uint32_t pair) {
  const bool same = qkv_rope_steady(&phases->rope, position + 1);
  return (double)position * (same ? phases->frequencies[pair] : qkv_rope_frequency(&phases->rope, position, pair));
}

// cosines and sines [tokens] of one pair, of what turns a row from the page's centre to its position.
static void fill_slots(const qkv_phases *phases, uint64_t position, size_t tokens, uint32_t pair, float *cosines,
                       float *sines) {
  if (steady(phases, position)) {
    memcpy(cosines, phases->cosines[pair], tokens * sizeof *cosines);
    memcpy(sines, phases->sines[pair], tokens * sizeof *sines);
    return;
  }
  const double centre = angle_at(phases, position + CENTRE, pair);
  for (size_t t = 0; t < tokens; t++) {
    const turn at = turn_of(angle_at(phases, position + t, pair) - centre);
    cosines[t] = (float)at.c;
    sines[t] = (float)at.s;
  }
}

// The pairs of a row, each by its angle: cosines and sines [pairs].
static void turn_row(const qkv_phases *phases, const float *restrict cosines, const float *restrict sines,
                     float *restrict row) {
  const size_t pairs = phases->pairs;
  if (phases->rope.interleaved) {
    for (size_t i = 0; i < pairs; i++) {
      const float a = row[2 * i], b = row[2 * i + 1], c = cosines[i], s = sines[i];
      row[2 * i] = a * c - b * s;
      row[2 * i + 1] = a * s + b * c;
    }
    return;
  }
  for (size_t i = 0; i < pairs; i++) {
    const float a = row[i], b = row[i + pairs], c = cosines[i], s = sines[i];
    row[i] = a * c - b * s;
    row[i + pairs] = a * s + b * c;
  }
}

// ---- Archive frame ----

// direction 1 or -1; `scale` multiplies what turned. Where frequencies change, row by row.
static void turn_unsteady(const qkv_phases *phases, uint64_t position, size_t tokens, size_t dim, float direction,
                          float scale, float *rows) {
  float cosines[QKV_PAGE_TOKENS], sines[QKV_PAGE_TOKENS];
  for (uint32_t pair = 0; pair < phases->pairs; pair++) {
    float *first = rows + qkv_rope_first(&phases->rope, pair), *second = rows + qkv_rope_second(&phases->rope, pair);
    const turn centre = turn_of(angle_at(phases, position + CENTRE, pair));
    const float cc = (float)centre.c * scale, cs = (float)centre.s * scale;
    fill_slots(phases, position, tokens, pair, cosines, sines);
    for (size_t t = 0; t < tokens; t++, first += dim, second += dim) {
      const float c = cc * cosines[t] - cs * sines[t], s = direction * (cc * sines[t] + cs * cosines[t]);
      const float a = *first, b = *second;
      *first = a * c - b * s;
      *second = a * s + b * c;
    }
  }
}

static void turn_rows(const qkv_phases *phases, uint64_t position, size_t tokens, size_t dim, float direction,
                      float scale, float *rows) {
  assert(tokens <= QKV_PAGE_TOKENS && phases->rope.width <= dim);
  if (!steady(phases, position)) return turn_unsteady(phases, position, tokens, dim, direction, scale, rows);
  float centre_c[QKV_DIM_MAX / 2], centre_s[QKV_DIM_MAX / 2], cosines[QKV_DIM_MAX / 2], sines[QKV_DIM_MAX / 2];
  const size_t pairs = phases->pairs;
  for (uint32_t pair = 0; pair < pairs; pair++) {
    const turn centre = turn_of(angle_at(phases, position + CENTRE, pair));
    centre_c[pair] = (float)centre.c * scale;
    centre_s[pair] = (float)centre.s * scale;
  }
  for (size_t t = 0; t < tokens; t++) {
    const float *slot_c = phases->slot_cosines + t * pairs, *slot_s = phases->slot_sines + t * pairs;
    for (size_t i = 0; i < pairs; i++) {
      cosines[i] = centre_c[i] * slot_c[i] - centre_s[i] * slot_s[i];
      sines[i] = direction * (centre_c[i] * slot_s[i] + centre_s[i] * slot_c[i]);
    }
    turn_row(phases, cosines, sines, rows + t * dim);
  }
}

void qkv_phases_forward(const qkv_phases *phases, uint64_t position, size_t tokens, size_t dim, float *rows) {
  turn_rows(phases, position, tokens, dim, 1, (float)phases->magnitude, rows);
}

void qkv_phases_inverse(const qkv_phases *phases, uint64_t position, size_t tokens, size_t dim, float *rows) {
  turn_rows(phases, position, tokens, dim, -1, (float)(1 / phases->magnitude), rows);
}

// ---- Attend frame ----

// rows [tokens][dim] += sign * the rotating anchor.
static void add_anchor(const qkv_phases *phases, const qkv_transform *transform, uint64_t position, size_t tokens,
                       float sign, float *rows) {
  float cosines[QKV_PAGE_TOKENS], sines[QKV_PAGE_TOKENS];
  const size_t dim = transform->schedule->dim;
  const float factor = sign * (float)phases->magnitude;
  for (size_t i = 0; i < transform->anchor_pairs; i++) {
    const uint32_t pair = transform->pair_indices[i];
    float *first = rows + qkv_rope_first(&phases->rope, pair), *second = rows + qkv_rope_second(&phases->rope, pair);
    const float x = factor * transform->anchor[2 * i], y = factor * transform->anchor[2 * i + 1];
    fill_slots(phases, position, tokens, pair, cosines, sines);
    for (size_t t = 0; t < tokens; t++, first += dim, second += dim) {
      *first += x * cosines[t] - y * sines[t];
      *second += x * sines[t] + y * cosines[t];
    }
  }
}

static void turn_by_centre(const qkv_phases *phases, uint64_t position, float direction, size_t tokens, size_t dim,
                           float *rows) {
  float cosines[QKV_DIM_MAX / 2], sines[QKV_DIM_MAX / 2];
  for (uint32_t pair = 0; pair < phases->pairs; pair++) {
    const turn centre = turn_of(angle_at(phases, position + CENTRE, pair));
    cosines[pair] = (float)centre.c;
    sines[pair] = direction * (float)centre.s;
  }
  for (size_t t = 0; t < tokens; t++) turn_row(phases, cosines, sines, rows + t * dim);
}

void qkv_phases_to_page(const qkv_phases *phases, const qkv_transform *transform, uint64_t position, size_t tokens,
                        float *rows) {
  turn_by_centre(phases, position, -1, tokens, transform->schedule->dim, rows);
  add_anchor(phases, transform, position, tokens, -1, rows);
}

void qkv_phases_from_page(const qkv_phases *phases, const qkv_transform *transform, uint64_t position, size_t tokens,
                          float *rows) {
  add_anchor(phases, transform, position, tokens, 1, rows);
  turn_by_centre(phases, position, 1, tokens, transform->schedule->dim, rows);
}

void qkv_phases_start(qkv_phases_walk *walk) {
  walk->base = UINT64_MAX;
}

static void rebase(const qkv_phases *phases, qkv_phases_walk *walk, uint64_t base) {
  for (uint32_t pair = 0; pair < phases->pairs; pair++) {
    const turn centre = turn_of(angle_at(phases, base + CENTRE, pair));
    walk->cosines[pair] = centre.c;
    walk->sines[pair] = centre.s;
  }
  walk->base = base;
}

void qkv_phases_turn_queries(const qkv_phases *phases, qkv_phases_walk *walk, uint64_t position, size_t n, size_t dim,
                             const float *queries, float *turned) {
  // Of the position alone: so are the bits of what is turned, whichever pages came before.
  const bool spans = position < FAR && steady(phases, position);
  const size_t page = spans ? position / QKV_PAGE_TOKENS % QKV_PHASES_PAGES : 0;
  const uint64_t base = position - page * QKV_PAGE_TOKENS;
  memcpy(turned, queries, n * dim * sizeof *turned);
  if (walk->base != base) rebase(phases, walk, base);
  float cosines[QKV_DIM_MAX / 2], sines[QKV_DIM_MAX / 2];
  const double *page_c = phases->page_cosines + page * phases->pairs;
  const double *page_s = phases->page_sines + page * phases->pairs;
  for (uint32_t pair = 0; pair < phases->pairs; pair++) {
    const double c = walk->cosines[pair], s = walk->sines[pair];
    cosines[pair] = (float)(c * page_c[pair] - s * page_s[pair]);
    sines[pair] = -(float)(c * page_s[pair] + s * page_c[pair]);
  }
  for (size_t i = 0; i < n; i++) turn_row(phases, cosines, sines, turned + i * dim);
}

// ---- Scores ----

// Cosines and sines of the slots of a page that is not steady.
typedef struct slot_room {
  float cosines[QKV_DIM_MAX / 2][QKV_PAGE_TOKENS], sines[QKV_DIM_MAX / 2][QKV_PAGE_TOKENS];
} slot_room;

static qkv_slot_turns slot_turns(const qkv_phases *phases, uint64_t position, slot_room *room) {
  qkv_slot_turns turns = {.pairs = phases->pairs,
                          .step = phases->rope.interleaved ? 2 : 1,
                          .apart = phases->rope.interleaved ? 1 : phases->pairs,
                          .cosines = phases->cosines[0],
                          .sines = phases->sines[0]};
  if (steady(phases, position)) return turns;
  for (uint32_t pair = 0; pair < phases->pairs; pair++) {
    fill_slots(phases, position, QKV_PAGE_TOKENS, pair, room->cosines[pair], room->sines[pair]);
  }
  turns.cosines = room->cosines[0];
  turns.sines = room->sines[0];
  return turns;
}

// With query (a, b) and anchor (x, y) in a pair, q . R_u mu = (ax + by) cos(u w) + (bx - ay) sin(u w).
void qkv_phases_add_scores(const qkv_phases *phases, const qkv_transform *transform, uint64_t position, size_t n,
                           const float *turned, float *scores) {
  enum { TOGETHER = 4 };
  float factors[TOGETHER * QKV_ANCHOR_PAIRS_MAX * 2];
  slot_room room;
  const size_t count = transform->anchor_pairs, dim = transform->schedule->dim;
  const qkv_slot_turns turns = slot_turns(phases, position, &room);
  for (size_t first = 0, some; first < n && count > 0; first += some) {
    some = n - first < TOGETHER ? n - first : TOGETHER;
    for (size_t i = 0; i < some; i++) {
      const float *query = turned + (first + i) * dim;
      for (size_t j = 0; j < count; j++) {
        const uint32_t pair = transform->pair_indices[j];
        const float a = query[qkv_rope_first(&phases->rope, pair)], b = query[qkv_rope_second(&phases->rope, pair)];
        const float x = (float)phases->magnitude * transform->anchor[2 * j];
        const float y = (float)phases->magnitude * transform->anchor[2 * j + 1];
        factors[(i * count + j) * 2] = a * x + b * y;
        factors[(i * count + j) * 2 + 1] = b * x - a * y;
      }
    }
    qkv_kernels_get()->add_waves(&turns, transform->pair_indices, count, factors, some,
                                 scores + first * QKV_PAGE_TOKENS);
  }
}

void qkv_phases_score_columns(const qkv_phases *phases, uint64_t position, size_t dim, const float *columns,
                              const float *means, size_t n, float *turned, float *scores) {
  slot_room room;
  const qkv_slot_turns turns = slot_turns(phases, position, &room);
  if (phases->magnitude != 1) {
    for (size_t i = 0; i < n; i++) {
      for (size_t j = 0; j < 2 * (size_t)phases->pairs; j++) turned[i * dim + j] *= (float)phases->magnitude;
    }
  }
  qkv_kernels_get()->score_columns(columns, dim, means, &turns, turned, n, scores);
}
