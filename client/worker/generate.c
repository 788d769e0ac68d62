#include "client/worker/generate.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

// Tokens of a forward pass over the prompt.
enum { BATCH = 128 };

struct qkvi_generation {
  qkvi_generation_options options;
  qkvi_kv *kv;
  qkvi_forward *forward;
  uint64_t random;
  int64_t position;                                                    // bytes fed
  float logits[QKVI_LM_VOCABULARY], exact_logits[QKVI_LM_VOCABULARY];  // after the latest byte
  float batch[BATCH * QKVI_LM_VOCABULARY];
};

qkvi_generation *qkvi_generation_create(const qkvi_lm *lm, qkvi_kv *kv, const qkvi_generation_options *options) {
  qkvi_generation *generation = calloc(1, sizeof(*generation));
  if (generation == NULL) abort();
  generation->options = *options;
  generation->kv = kv;
  generation->forward = qkvi_forward_create(lm, BATCH, options->positions_max);
  generation->random = options->seed;
  return generation;
}

void qkvi_generation_destroy(qkvi_generation **generation) {
  if (*generation == NULL) return;
  qkvi_forward_destroy(&(*generation)->forward);
  free(*generation);
  *generation = NULL;
}

// One batch through one cache; the logits after its last byte go to `last`.
static qkv_status run(qkvi_generation *generation, const uint8_t *bytes, int64_t count, qkvi_kv *kv, float *last,
                      qkv_error *error) {
  QKV_TRY(qkvi_forward_run(generation->forward, bytes, count, generation->position, kv, generation->batch, error));
  memcpy(last, generation->batch + (count - 1) * QKVI_LM_VOCABULARY, QKVI_LM_VOCABULARY * sizeof(float));
  return QKV_OK;
}

qkv_status qkvi_generation_feed(qkvi_generation *generation, const uint8_t *bytes, int64_t count, qkv_error *error) {
  while (count > 0) {
    int64_t now = count < BATCH ? count : BATCH;
    QKV_TRY(run(generation, bytes, now, generation->kv, generation->logits, error));
    if (generation->options.exact != NULL) {
      qkvi_kv *exact = qkvi_exact_kv(generation->options.exact);
      QKV_TRY(run(generation, bytes, now, exact, generation->exact_logits, error));
    }
    generation->position += now;
    bytes += now;
    count -= now;
  }
  return QKV_OK;
}

static uint8_t likeliest(const float *logits) {
  int best = 0;
  for (int i = 1; i < QKVI_LM_VOCABULARY; i++) {
    if (logits[i] > logits[best]) best = i;
  }
  return (uint8_t)best;
}

// Uniform in [0, 1): splitmix64.
static double uniform(uint64_t *state) {
  uint64_t z = *state += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return (double)((z ^ z >> 31) >> 11) * 0x1p-53;
}

static uint8_t sample(const float *logits, double temperature, uint64_t *random) {
  double weights[QKVI_LM_VOCABULARY], sum = 0;
  double max = logits[likeliest(logits)];
  for (int i = 0; i < QKVI_LM_VOCABULARY; i++) sum += weights[i] = exp((logits[i] - max) / temperature);
  double left = uniform(random) * sum;
  for (int i = 0; i < QKVI_LM_VOCABULARY; i++) {
    left -= weights[i];
    if (left < 0) return (uint8_t)i;
  }
  return likeliest(logits);  // rounding ate the rest
}

uint8_t qkvi_generation_next(qkvi_generation *generation, qkvi_quality *quality) {
  assert(generation->position > 0);
  const float *logits = generation->logits;
  double temperature = generation->options.temperature;
  uint8_t next = temperature > 0 ? sample(logits, temperature, &generation->random) : likeliest(logits);
  if (generation->options.exact != NULL) qkvi_quality_add(quality, generation->exact_logits, logits, next);
  return next;
}
