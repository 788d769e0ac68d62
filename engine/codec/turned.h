// What RoPE makes of means and second moments: averages over the positions that rows are turned to.
//
// With rows x whose content does not depend on their position t, and R_t the rotation,
//
//   E[R_t x] = E_t[R_t] E[x]        E[R_t x x^T R_t^T] = E_t[R_t E[x x^T] R_t^T]
//
// A pair of coordinates (a, b) is the complex number u = a + ib, which R_t multiplies by e^{iwt}. So the averages
// only need the means of e^{iwt} (for a mean) and of e^{i(w - w')t} and e^{i(w + w')t} (for each two pairs, of u u'*
// and u u'), which have a closed form for t uniform in a range. Coordinates that do not turn are paired up, too, with
// w = 0.
//
// t may be a position, or its distance from a page's middle or from a query. Where pairs are turned back to blocks of
// several lengths (turn_plan.h), t is the distance to each pair's own middle, and all pages of a block are equally
// likely; of plain pairs, at any position, only what turns with them is left: the mean of their two variances.
// Dynamic NTK has other frequencies at every position beyond the trained length; those within it are taken.
#ifndef QKV_ENGINE_CODEC_TURNED_H
#define QKV_ENGINE_CODEC_TURNED_H

#include <stddef.h>
#include <stdint.h>

#include "engine/codec/turn_plan.h"

// t uniform in [begin, end).
typedef struct qkvi_span {
  int64_t begin, end;
  double weight;  // > 0, relative to the other spans'
} qkvi_span;

typedef struct qkvi_turns qkvi_turns;

// The rope is resolved and has a theta. Cost: dim^2 / 4 times the spans in sines and cosines.
qkvi_turns *qkvi_turns_create(const qkv_rope *rope, size_t dim, const qkvi_span *spans, size_t count);
// t is how far a pair stands from where the plan turns it back to.
qkvi_turns *qkvi_turns_create_planned(const qkv_rope *rope, size_t dim, const qkv_turn_plan *plan);
void qkvi_turns_destroy(qkvi_turns **turns);

// mean [dim] in place.
void qkvi_turn_mean(const qkvi_turns *turns, double *mean);
// second [dim][dim], symmetric, in place.
void qkvi_turn_second(const qkvi_turns *turns, double *second);
// As qkvi_turn_second, where YaRN has scaled the turning coordinates already.
void qkvi_turn_grown(const qkvi_turns *turns, double *second);

#endif
