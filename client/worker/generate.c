#include "client/worker/generate.h"

#include <assert.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

// Tokens of a forward pass over the prompt.
enum { BATCH = 128 };

struct qkvi_generation {
  qkvi_generation_options options;
  const qkvi_lm *lm;
  qkvi_kv *kv;
  qkvi_forward *forward;
  uint64_t random;
  int64_t position;              // tokens fed
  float *logits, *exact_logits;  // after the latest token
};

static float *floats(int64_t count) {
  float *values = calloc((size_t)count, sizeof(float));
  if (values == NULL) abort();
  return values;
}

qkvi_generation *qkvi_generation_create(const qkvi_lm *lm, qkvi_kv *kv, const qkvi_generation_options *options) {
  qkvi_generation *generation = calloc(1, sizeof(*generation));
  if (generation == NULL) abort();
  generation->options = *options;
  generation->lm = lm;
  generation->kv = kv;
  generation->forward = qkvi_forward_create(lm, BATCH, options->positions_max);
  generation->random = options->seed;
  generation->logits = floats(lm->vocabulary);
  generation->exact_logits = floats(lm->vocabulary);
  return generation;
}

void qkvi_generation_destroy(qkvi_generation **generation) {
  if (*generation == NULL) return;
  qkvi_forward_destroy(&(*generation)->forward);
  free((*generation)->logits);
  free((*generation)->exact_logits);
  free(*generation);
  *generation = NULL;
}

// One batch through one cache; the logits after its last token, the only ones that are wanted, go to `last`.
static qkv_status run(qkvi_generation *generation, const int32_t *tokens, int64_t count, qkvi_kv *kv, bool wanted,
                      float *last, qkv_error *error) {
  return qkvi_forward_run(generation->forward, tokens, count, generation->position, kv, wanted ? 1 : 0, last, error);
}

qkv_status qkvi_generation_feed(qkvi_generation *generation, const int32_t *tokens, int64_t count, qkv_error *error) {
  while (count > 0) {
    const int64_t now = count < BATCH ? count : BATCH;
    const bool wanted = now == count;
    QKV_TRY(run(generation, tokens, now, generation->kv, wanted, generation->logits, error));
    if (generation->options.exact != NULL) {
      qkvi_kv *exact = qkvi_exact_kv(generation->options.exact);
      QKV_TRY(run(generation, tokens, now, exact, wanted, generation->exact_logits, error));
    }
    generation->position += now;
    tokens += now;
    count -= now;
  }
  return QKV_OK;
}

// Uniform in [0, 1): splitmix64.
static double uniform(uint64_t *state) {
  uint64_t z = *state += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return (double)((z ^ z >> 31) >> 11) * 0x1p-53;
}

// By weights that are computed twice rather than kept: a vocabulary is large.
static int32_t sample(const float *logits, int64_t vocabulary, double temperature, uint64_t *random) {
  const int32_t best = qkvi_likeliest(logits, vocabulary);
  const double max = logits[best];
  double sum = 0;
  for (int64_t i = 0; i < vocabulary; i++) sum += exp((logits[i] - max) / temperature);
  double left = uniform(random) * sum;
  for (int64_t i = 0; i < vocabulary; i++) {
    left -= exp((logits[i] - max) / temperature);
    if (left < 0) return (int32_t)i;
  }
  return best;  // rounding has left a rest
}

int32_t qkvi_generation_next(qkvi_generation *generation, qkvi_quality *quality) {
  assert(generation->position > 0);
  const float *logits = generation->logits;
  const int64_t vocabulary = generation->lm->vocabulary;
  const double temperature = generation->options.temperature;
  const int32_t next = temperature > 0 ? sample(logits, vocabulary, temperature, &generation->random)
                                       : qkvi_likeliest(logits, vocabulary);
  if (generation->options.exact != NULL) {
    qkvi_quality_add(quality, generation->exact_logits, logits, vocabulary, next);
  }
  return next;
}
