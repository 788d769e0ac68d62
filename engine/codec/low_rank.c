#include "engine/codec/low_rank.h"

#include <string.h>

#include <assert.h>
#include <inttypes.h>

#include "engine/codec/low_rank_scale.h"
#include "engine/codec/row.h"

enum { ALIGN = 16, TOKENS = QKV_PAGE_TOKENS };

static size_t used_bytes(size_t rank, size_t dim) {
  return rank * (dim + TOKENS + 1);
}

static const char *const names[] = {[QKV_LOW_RANK_OFF] = "none",
                                    [QKV_LOW_RANK_PREDICTOR] = "predictor",
                                    [QKV_LOW_RANK_CORRECTION] = "correction",
                                    [QKV_LOW_RANK_AUTO] = "auto"};
enum { NAMES = sizeof names / sizeof *names };

const char *qkv_low_rank_name(qkv_low_rank_mode mode) {
  return (unsigned)mode < NAMES ? names[mode] : NULL;
}

bool qkv_low_rank_parse(const char *name, qkv_low_rank_mode *mode) {
  for (unsigned i = 0; i < NAMES; i++) {
    if (strcmp(name, names[i]) != 0) continue;
    *mode = (qkv_low_rank_mode)i;
    return true;
  }
  return false;
}

size_t qkv_low_rank_bytes(size_t rank, size_t dim) {
  return (used_bytes(rank, dim) + ALIGN - 1) / ALIGN * ALIGN;
}

size_t qkv_low_rank_find(uint8_t rank, const uint8_t *section, uint16_t dim, qkv_low_rank *found) {
  *found = (qkv_low_rank){.rank = rank, .dim = dim, .directions = (const int8_t *)section};
  found->factors = found->directions + (size_t)rank * dim;
  found->scales = (const uint8_t *)found->factors + (size_t)rank * TOKENS;
  return qkv_low_rank_bytes(rank, dim);
}

#define REFUSE(...) return qkv_fail(error, QKV_DATA_LOSS, __VA_ARGS__)

qkv_status qkv_low_rank_validate(uint8_t rank, const uint8_t *section, size_t bytes, uint32_t tokens, uint16_t dim,
                                 size_t *used, qkv_error *error) {
  assert(tokens >= 1 && tokens <= TOKENS);
  *used = 0;
  if (rank > QKV_RANK_MAX) REFUSE("a low-rank byte is %u, at most %d", rank, QKV_RANK_MAX);
  const size_t need = qkv_low_rank_bytes(rank, dim), end = used_bytes(rank, dim);
  if (need > bytes) REFUSE("a low-rank section of rank %u takes %zu bytes, there are %zu", rank, need, bytes);
  const size_t numbers = rank * ((size_t)dim + TOKENS);
  for (size_t i = 0; i < numbers; i++) {
    if (section[i] == 0x80) REFUSE("byte %zu of a low-rank section is -128, at least -127 is allowed", i);
  }
  for (size_t i = rank * (size_t)dim; i < numbers; i++) {
    const size_t slot = (i - rank * (size_t)dim) % TOKENS;
    if (slot >= tokens && section[i] != 0) {
      REFUSE("byte %zu of a low-rank section is for slot %zu, there are %" PRIu32 " tokens", i, slot, tokens);
    }
  }
  for (size_t i = end; i < need; i++) {
    if (section[i] != 0) REFUSE("byte %zu of a low-rank section is padding and not 0", i);
  }
  *used = need;
  return QKV_OK;
}

// ---- Attending and decoding ----

// The numbers of one direction: v as it is, u times the unit.
typedef struct term {
  float direction[QKV_DIM_MAX];
  float factors[TOKENS];
} term;

static void load(const qkv_low_rank *factors, size_t i, term *to) {
  qkvi_row_widen(to->direction, factors->directions + i * factors->dim, 1, factors->dim);
  qkvi_row_widen(to->factors, factors->factors + i * TOKENS, qkvi_low_rank_unit(factors->scales[i]), TOKENS);
}

void qkv_low_rank_scores(const qkv_low_rank *factors, const float *queries, size_t n, float *scores) {
  term one;
  for (size_t r = 0; r < factors->rank; r++) {
    load(factors, r, &one);
    for (size_t i = 0; i < n; i++) {
      const float share = qkvi_row_dot(queries + i * factors->dim, one.direction, factors->dim);
      qkvi_row_add(scores + i * TOKENS, one.factors, share, TOKENS);
    }
  }
}

void qkv_low_rank_accumulate(const qkv_low_rank *factors, const float *weights, size_t n, float *sums) {
  term one;
  for (size_t r = 0; r < factors->rank; r++) {
    load(factors, r, &one);
    for (size_t i = 0; i < n; i++) {
      const float share = qkvi_row_dot(weights + i * TOKENS, one.factors, TOKENS);
      qkvi_row_add(sums + i * factors->dim, one.direction, share, factors->dim);
    }
  }
}

void qkv_low_rank_rows(const qkv_low_rank *factors, float *rows) {
  term one;
  for (size_t r = 0; r < factors->rank; r++) {
    load(factors, r, &one);
    for (size_t t = 0; t < TOKENS; t++) {
      qkvi_row_add(rows + t * factors->dim, one.direction, one.factors[t], factors->dim);
    }
  }
}

void qkv_low_rank_subtract(const qkv_low_rank *factors, float *rows) {
  const size_t n = TOKENS * (size_t)factors->dim;
  for (size_t i = 0; i < n; i++) rows[i] = -rows[i];
  qkv_low_rank_rows(factors, rows);
  for (size_t i = 0; i < n; i++) rows[i] = -rows[i];
}
