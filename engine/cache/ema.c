#include "engine/cache/ema.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { WORD_VALUES = 4, WORDS = QKV_PAGE_TOKENS / WORD_VALUES, DROPPED = 23 - 11, LEAST = (127 - 31) << 11 };

qkv_status qkv_ema_check(const qkv_ema_options *options, qkv_error *error) {
  if (options->sample_every == 0 || (options->alpha > 0 && options->alpha <= QKV_EMA_ALPHA_MAX)) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "ema-alpha is %g, allowed are 0 (not included) to %g", options->alpha,
                  QKV_EMA_ALPHA_MAX);
}

// ---- The clock ----

qkv_ema_clock *qkv_ema_clock_create(const qkv_ema_options *options, uint32_t kv_heads) {
  if (options->sample_every == 0) return NULL;
  assert(qkv_ema_check(options, NULL) == QKV_OK);
  qkv_ema_clock *clock = calloc(1, sizeof *clock + kv_heads * sizeof *clock->sizes);
  assert(clock != NULL);
  clock->log_alpha = log2(options->alpha);
  clock->sample_every = options->sample_every;
  clock->kv_heads = kv_heads;
  return clock;
}

void qkv_ema_clock_destroy(qkv_ema_clock **clock) {
  free(*clock);
  *clock = NULL;
}

bool qkv_ema_clock_count(qkv_ema_clock *clock, uint64_t queries, uint64_t blocks, qkv_ema_step *step) {
  const uint64_t before = atomic_fetch_add_explicit(&clock->blocks, blocks, memory_order_relaxed);
  step->now = atomic_fetch_add_explicit(&clock->queries, queries, memory_order_relaxed) + queries;
  if (before / clock->sample_every == (before + blocks) / clock->sample_every) return false;
  const uint64_t last = atomic_exchange_explicit(&clock->sampled, step->now, memory_order_relaxed);
  step->queries = step->now > last ? step->now - last : queries;
  return true;
}

uint64_t qkv_ema_clock_now(const qkv_ema_clock *clock) {
  return atomic_load_explicit(&clock->queries, memory_order_relaxed);
}

// alpha^n
static float faded(const qkv_ema_clock *clock, uint64_t n) {
  return (float)exp2(clock->log_alpha * (double)n);
}

void qkv_ema_clock_average(const qkv_ema_clock *clock, _Atomic uint32_t *average, const qkv_ema_step *step,
                           float value) {
  const float before = qkv_ema_average(average), kept = before == 0 ? 0 : faded(clock, step->queries);
  const float next = kept * before + (1 - kept) * value;
  uint32_t bits;
  memcpy(&bits, &next, sizeof bits);
  atomic_store_explicit(average, bits, memory_order_relaxed);
}

float qkv_ema_average(const _Atomic uint32_t *average) {
  const uint32_t bits = atomic_load_explicit(average, memory_order_relaxed);
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

void qkv_ema_clock_add_size(qkv_ema_clock *clock, uint32_t kv_head, const qkv_ema_step *step, float mean_square) {
  qkv_ema_clock_average(clock, &clock->sizes[kv_head], step, mean_square);
}

float qkv_ema_clock_size(const qkv_ema_clock *clock, uint32_t kv_head) {
  assert(kv_head < clock->kv_heads);
  return qkv_ema_average(&clock->sizes[kv_head]);
}

// ---- Values ----

// Values out of words and back, four tokens a word, in plain loops that become vectors.
static void unpack(const uint64_t words[WORDS], float values[QKV_PAGE_TOKENS]) {
  uint16_t codes[QKV_PAGE_TOKENS];
  memcpy(codes, words, sizeof codes);
  for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) {
    const uint32_t bits = codes[t] == 0 ? 0 : ((uint32_t)codes[t] + LEAST) << DROPPED;
    memcpy(&values[t], &bits, sizeof bits);
  }
}

static void pack(const float values[QKV_PAGE_TOKENS], uint64_t words[WORDS]) {
  uint16_t codes[QKV_PAGE_TOKENS];
  for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) {
    uint32_t bits;
    memcpy(&bits, &values[t], sizeof bits);
    const int32_t code = (int32_t)((bits + (1u << (DROPPED - 1))) >> DROPPED) - LEAST;
    codes[t] = (uint16_t)(code < 0 ? 0 : code > UINT16_MAX ? UINT16_MAX : code);
  }
  memcpy(words, codes, sizeof codes);
}

static _Atomic uint64_t *right_for(qkv_ema *ema, uint32_t kv_head) {
  assert(kv_head < ema->kv_heads);
  return &ema->words[kv_head];
}

static _Atomic uint64_t *values_of(qkv_ema *ema, uint32_t kv_head) {
  return &ema->words[ema->kv_heads + (uint64_t)kv_head * WORDS];
}

// The values, as of the query that is returned.
static uint64_t load(const qkv_ema *ema, uint32_t kv_head, float values[QKV_PAGE_TOKENS]) {
  uint64_t words[WORDS];
  _Atomic uint64_t *from = values_of((qkv_ema *)ema, kv_head);
  for (size_t i = 0; i < WORDS; i++) words[i] = atomic_load_explicit(&from[i], memory_order_relaxed);
  unpack(words, values);
  return atomic_load_explicit(right_for((qkv_ema *)ema, kv_head), memory_order_relaxed);
}

size_t qkv_ema_bytes(uint32_t kv_heads) {
  return sizeof(qkv_ema) + (size_t)kv_heads * (1 + WORDS) * sizeof(uint64_t);
}

void qkv_ema_init(qkv_ema *ema, uint32_t kv_heads, uint64_t now) {
  ema->born = now;
  ema->kv_heads = kv_heads;
  atomic_init(&ema->changed, 0);
  for (uint32_t h = 0; h < kv_heads; h++) atomic_init(&ema->words[h], now);
  for (size_t i = 0; i < (size_t)kv_heads * WORDS; i++) atomic_init(&ema->words[kv_heads + i], 0);
}

void qkv_ema_add(qkv_ema *ema, const qkv_ema_clock *clock, uint32_t kv_head, const qkv_ema_step *step,
                 const float *attention) {
  float values[QKV_PAGE_TOKENS];
  uint64_t words[WORDS];
  const uint64_t then = load(ema, kv_head, values);
  const uint64_t age = step->now > ema->born ? step->now - ema->born : 0;
  const float kept = step->now > then ? faded(clock, step->now - then) : 1;
  const float share = 1 - faded(clock, step->queries < age ? step->queries : age);
  for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) values[t] = kept * values[t] + share * attention[t];
  pack(values, words);
  _Atomic uint64_t *to = values_of(ema, kv_head);
  for (size_t i = 0; i < WORDS; i++) atomic_store_explicit(&to[i], words[i], memory_order_relaxed);
  // A reader that sees that a query has been counted sees its weights (qkv_ema_seen).
  if (step->now > then) atomic_store_explicit(right_for(ema, kv_head), step->now, memory_order_release);
}

bool qkv_ema_seen(const qkv_ema *ema, uint32_t kv_head) {
  return atomic_load_explicit(right_for((qkv_ema *)ema, kv_head), memory_order_acquire) > ema->born;
}

void qkv_ema_read(const qkv_ema *ema, const qkv_ema_clock *clock, uint32_t kv_head, uint64_t now, float *values) {
  const uint64_t then = load(ema, kv_head, values);
  const float kept = now > then ? faded(clock, now - then) : 1;
  const float life = 1 - faded(clock, now > ema->born ? now - ema->born : 0);
  const float factor = life > 0 ? kept / life : 0;
  for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) {
    const float value = values[t] * factor;
    values[t] = value < 1 ? value : 1;
  }
}
