#include "engine/codec/turned.h"

#include <assert.h>
#include <complex.h>
#include <math.h>
#include <stdlib.h>

#include "engine/codec/schedule.h"

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

qkvi_turns *qkvi_turns_create(const qkv_rope *rope, size_t dim, const qkvi_span *spans, size_t count) {
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
  double total = 0;
  for (size_t i = 0; i < count; i++) {
    assert(spans[i].end > spans[i].begin && spans[i].weight > 0);
    total += spans[i].weight;
  }
  for (size_t i = 0; i < count; i++) add_span(turns, rope, &spans[i], spans[i].weight / total);
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
static void turn_block(const qkvi_turns *turns, size_t i, size_t j, double *second) {
  const size_t dim = turns->dim, at = i * turns->pairs + j;
  const size_t a = turns->places[i][0], b = turns->places[i][1], c = turns->places[j][0], d = turns->places[j][1];
  const double ac = second[a * dim + c], ad = second[a * dim + d], bc = second[b * dim + c], bd = second[b * dim + d];
  const double size = magnitude_of(turns, i) * magnitude_of(turns, j);
  const double complex against = (ac + bd + I * (bc - ad)) * turns->minus[at] * size;
  const double complex along = (ac - bd + I * (bc + ad)) * turns->plus[at] * size;
  second[a * dim + c] = second[c * dim + a] = (creal(against) + creal(along)) / 2;
  second[b * dim + d] = second[d * dim + b] = (creal(against) - creal(along)) / 2;
  second[b * dim + c] = second[c * dim + b] = (cimag(along) + cimag(against)) / 2;
  second[a * dim + d] = second[d * dim + a] = (cimag(along) - cimag(against)) / 2;
}

void qkvi_turn_second(const qkvi_turns *turns, double *second) {
  for (size_t i = 0; i < turns->pairs; i++) {
    for (size_t j = 0; j <= i; j++) turn_block(turns, i, j, second);
  }
}

double qkvi_turns_kept(const qkvi_turns *turns, uint32_t pair) {
  assert(pair < turns->turning);
  return cabs(turns->single[pair]);
}
