// The error of attention of some queries to some rows of one head, when other rows take their place.
//
//   error   sum over queries of |out' - out|^2 / sum of |out|^2
//
// Relative errors of rows do not show what a code does to attention: rows that nearly all weight goes to (sinks) are
// few. So a calibration is tried (probation.h) and watched (page_watch.h) by this.
//
// The rows are a sample of a longer sequence. The first `whole` ones are all that there are of their kind (the first
// tokens, where sinks are); each of the others stands for m = (context - whole) / (tokens - whole) rows, where a
// query at position p sees a context of p tokens. With e_t = exp(q . k_t), Z = sum_t m_t e_t, with e' and Z' computed
// from the coded keys, and with independent errors of rows:
//
//   out        = sum_t m_t e_t v_t / Z
//   out' - out = sum_t sqrt(m_t) (e'_t (v'_t - out) - e_t (v_t - out)) / Z'
//
// With m = 1 that is the difference of the two attentions. A sample overestimates |out| where values scatter about
// nothing, of all codes alike.
//
// Where there are no queries, as no client attends here, random ones are taken, of a size at which their scores
// spread by QKV_PROBE_SPREAD.
//
// Threads: one at a time.
#ifndef QKV_ENGINE_CACHE_PROBE_H
#define QKV_ENGINE_CACHE_PROBE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/codec/rope.h"

#define QKV_PROBE_QUERIES 64  // of one KV head
#define QKV_PROBE_SPREAD 2.0  // root of the variance of scores

typedef struct qkv_probe_rows {
  size_t tokens, key_dim, value_dim;
  size_t whole;               // tokens that stand for themselves alone, the first ones
  size_t k_stride, v_stride;  // floats from one token to the next
  const float *k, *v;         // of token 0
} qkv_probe_rows;

// Queries of a KV head: [tokens][group][key_dim], as attended at `stands`, and how they meet keys.
typedef struct qkv_probe_queries {
  size_t tokens, group;
  const float *rows;       // NULL where tokens is 0
  const uint64_t *stands;  // those before `last` are turned to it
  uint64_t last;
  const qkv_rope *rope;  // theta 0: none
  double scale, soft_cap;
} qkv_probe_queries;

typedef struct qkv_probe qkv_probe;

// Rows and queries are copied. Of more than QKV_PROBE_QUERIES tokens times heads, the first heads of each token are
// taken, one at least.
qkv_probe *qkv_probe_create(const qkv_probe_rows *rows, const qkv_probe_queries *queries);
void qkv_probe_destroy(qkv_probe **probe);

// The error with k [tokens][key_dim] and v [tokens][value_dim] in place of the probe's rows; NULL: with its own.
// Where the probe's outputs are all 0: 0 where the others' are, too, else 1.
double qkv_probe_error(qkv_probe *probe, const float *k, const float *v);
// Sum over queries of |out|^2.
double qkv_probe_square(const qkv_probe *probe);
// The part that some rows have in the error of a code that errs alike on all: sum m w^2 over these, by that over all
// but the first `without` rows. `rows` [tokens].
double qkv_probe_share(const qkv_probe *probe, const bool *rows, size_t without);

#endif
