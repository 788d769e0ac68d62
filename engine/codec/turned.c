#include "engine/codec/turned.h"

#include <assert.h>
#include <complex.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>

#include "engine/codec/page.h"

struct qkvi_turns {
  size_t dim, pairs;  // pairs = dim / 2
  double magnitude;   // of turned coordinates
  size_t turning;     // the first pairs, which turn
  uint16_t (*places)[2];
  double complex *single;  // [pairs], mean of e^{iwt}
  double complex *minus;   // [pairs][pairs], mean of e^{i(w - w')t}
  double complex *plus;    // [pairs][pairs], mean of e^{i(w + w')t}
};

static void *allocate(size_t count, size_t size) {
  void *block = calloc(count, size);
  if (block == NULL) abort();
  return block;
}

// Mean of e^{iwt} over t = begin, ..., end - 1: a sum of a geometric series, written so that small w loses nothing.
static double complex mean_phase(double w, const qkvi_span *span) {
  const double n = (double)(span->end - span->begin), half = sin(w / 2);
  const double size = fabs(half) < 1e-300 ? 1 : sin(n * w / 2) / (n * half);
  return size * cexp(I * w * ((double)span->begin + (n - 1) / 2));
}

static void find_places(qkvi_turns *turns, const qkv_rope *rope) {
  for (size_t pair = 0; pair < turns->turning; pair++) {
    turns->places[pair][0] = (uint16_t)qkv_rope_first(rope, (uint32_t)pair);
    turns->places[pair][1] = (uint16_t)qkv_rope_second(rope, (uint32_t)pair);
  }
  for (size_t pair = turns->turning; pair < turns->pairs; pair++) {
    turns->places[pair][0] = (uint16_t)(2 * pair);
    turns->places[pair][1] = (uint16_t)(2 * pair + 1);
  }
}

static void add_span(qkvi_turns *turns, const qkv_rope *rope, const qkvi_span *span, double weight) {
  double frequencies[QKV_DIM_MAX / 2] = {0};
  const size_t pairs = turns->pairs;
  for (size_t i = 0; i < turns->turning; i++) frequencies[i] = qkv_rope_frequency(rope, 0, (uint32_t)i);
  for (size_t i = 0; i < pairs; i++) {
    turns->single[i] += weight * mean_phase(frequencies[i], span);
    for (size_t j = 0; j <= i; j++) {
      turns->minus[i * pairs + j] += weight * mean_phase(frequencies[i] - frequencies[j], span);
      turns->plus[i * pairs + j] += weight * mean_phase(frequencies[i] + frequencies[j], span);
    }
  }
}

static qkvi_turns *create(const qkv_rope *rope, size_t dim) {
  assert(rope->theta != 0 && rope->width <= dim && dim % 2 == 0 && dim <= QKV_DIM_MAX);
  const size_t pairs = dim / 2;
  qkvi_turns *turns = allocate(1, sizeof *turns);
  turns->dim = dim;
  turns->pairs = pairs;
  turns->turning = rope->width / 2;
  turns->magnitude = qkv_rope_magnitude(rope);
  turns->places = allocate(pairs, sizeof *turns->places);
  turns->single = allocate(pairs, sizeof *turns->single);
  turns->minus = allocate(pairs * pairs, sizeof *turns->minus);
  turns->plus = allocate(pairs * pairs, sizeof *turns->plus);
  find_places(turns, rope);
  return turns;
}

qkvi_turns *qkvi_turns_create(const qkv_rope *rope, size_t dim, const qkvi_span *spans, size_t count) {
  qkvi_turns *turns = create(rope, dim);
  double total = 0;
  for (size_t i = 0; i < count; i++) {
    assert(spans[i].end > spans[i].begin && spans[i].weight > 0);
    total += spans[i].weight;
  }
  for (size_t i = 0; i < count; i++) add_span(turns, rope, &spans[i], spans[i].weight / total);
  return turns;
}

// A pair of coordinates as a plan has it. Coordinates that do not turn are of the longest blocks.
typedef struct planned_pair {
  double frequency;
  unsigned level;
  bool plain;
} planned_pair;

static planned_pair planned(const qkvi_turns *turns, const qkv_rope *rope, const qkv_turn_plan *plan, size_t pair) {
  if (pair >= turns->turning) return (planned_pair){.level = QKV_TURN_LEVELS - 1};
  planned_pair found = {.frequency = qkv_rope_frequency(rope, 0, (uint32_t)pair), .plain = pair < plan->begins[0]};
  while (!found.plain && pair >= plan->begins[found.level + 1]) found.level++;
  return found;
}

// Mean of e^{iwt} over the tokens of a block of a level, t being their distance to its middle.
static double complex mean_in_block(double w, unsigned level) {
  const int64_t half = (int64_t)QKV_PAGE_TOKENS / 2 << level;
  const qkvi_span block = {-half, half, 1};
  return mean_phase(w, &block);
}

// The same over the middles of a level's blocks in one of a higher level.
static double complex mean_of_middles(double w, unsigned level, unsigned higher) {
  const double step = (double)(QKV_PAGE_TOKENS << level);
  const int64_t count = (int64_t)1 << (higher - level);
  const qkvi_span middles = {0, count, 1};
  return mean_phase(w * step, &middles) * cexp(-I * w * step * ((double)count - 1) / 2);
}

// Mean of e^{i (wt + w't')}, t and t' the distances of one token to the middles of the two pairs' blocks.
static double complex mean_of_both(const planned_pair *a, double w, const planned_pair *b, double other) {
  if (a->plain || b->plain) return 0;
  const bool swap = a->level > b->level;
  const double slow = swap ? w : other;
  const unsigned low = swap ? b->level : a->level, high = swap ? a->level : b->level;
  return mean_in_block(w + other, low) * (high > low ? mean_of_middles(slow, low, high) : 1);
}

qkvi_turns *qkvi_turns_create_planned(const qkv_rope *rope, size_t dim, const qkv_turn_plan *plan) {
  qkvi_turns *turns = create(rope, dim);
  const size_t pairs = turns->pairs;
  for (size_t i = 0; i < pairs; i++) {
    const planned_pair a = planned(turns, rope, plan, i);
    turns->single[i] = a.plain ? 0 : mean_in_block(a.frequency, a.level);
    for (size_t j = 0; j < i; j++) {
      const planned_pair b = planned(turns, rope, plan, j);
      turns->minus[i * pairs + j] = mean_of_both(&a, a.frequency, &b, -b.frequency);
      turns->plus[i * pairs + j] = mean_of_both(&a, a.frequency, &b, b.frequency);
    }
    turns->minus[i * pairs + i] = 1;
    turns->plus[i * pairs + i] = a.plain ? 0 : mean_in_block(2 * a.frequency, a.level);
  }
  return turns;
}

void qkvi_turns_destroy(qkvi_turns **turns) {
  if (*turns == NULL) return;
  free((*turns)->places);
  free((*turns)->single);
  free((*turns)->minus);
  free((*turns)->plus);
  free(*turns);
  *turns = NULL;
}

static double magnitude_of(const qkvi_turns *turns, size_t pair) {
  return pair < turns->turning ? turns->magnitude : 1;
}

void qkvi_turn_mean(const qkvi_turns *turns, double *mean) {
  for (size_t pair = 0; pair < turns->pairs; pair++) {
    double *a = &mean[turns->places[pair][0]], *b = &mean[turns->places[pair][1]];
    const double complex u = (*a + I * *b) * turns->single[pair] * magnitude_of(turns, pair);
    *a = creal(u);
    *b = cimag(u);
  }
}

// The 2 x 2 block of two pairs and its mirror image: with u = a + ib and v = c + id, from E[u v*] and E[u v].
static void turn_block(const qkvi_turns *turns, size_t i, size_t j, double size, double *second) {
  const size_t dim = turns->dim, at = i * turns->pairs + j;
  const size_t a = turns->places[i][0], b = turns->places[i][1], c = turns->places[j][0], d = turns->places[j][1];
  const double ac = second[a * dim + c], ad = second[a * dim + d], bc = second[b * dim + c], bd = second[b * dim + d];
  const double complex against = (ac + bd + I * (bc - ad)) * turns->minus[at] * size;
  const double complex along = (ac - bd + I * (bc + ad)) * turns->plus[at] * size;
  second[a * dim + c] = second[c * dim + a] = (creal(against) + creal(along)) / 2;
  second[b * dim + d] = second[d * dim + b] = (creal(against) - creal(along)) / 2;
  second[b * dim + c] = second[c * dim + b] = (cimag(along) + cimag(against)) / 2;
  second[a * dim + d] = second[d * dim + a] = (cimag(along) - cimag(against)) / 2;
}

void qkvi_turn_second(const qkvi_turns *turns, double *second) {
  for (size_t i = 0; i < turns->pairs; i++) {
    for (size_t j = 0; j <= i; j++) {
      turn_block(turns, i, j, magnitude_of(turns, i) * magnitude_of(turns, j), second);
    }
  }
}

void qkvi_turn_grown(const qkvi_turns *turns, double *second) {
  for (size_t i = 0; i < turns->pairs; i++) {
    for (size_t j = 0; j <= i; j++) turn_block(turns, i, j, 1, second);
  }
}
