// Making low-rank factors, and the choice of a rank.
#include <assert.h>
#include <math.h>
#include <string.h>

#include "engine/codec/low_rank.h"
#include "engine/codec/low_rank_scale.h"
#include "engine/codec/row.h"
#include "engine/codec/svd.h"
#include "engine/codec/trial.h"

enum { TOKENS = QKV_PAGE_TOKENS, WHOLE_MAX = QKVI_LOW_RANK_WHOLE_MAX };
_Static_assert(QKV_RANK_MAX <= QKVI_SVD_RANK_MAX, "rank");

// ---- Fit ----

static size_t fit_bytes(size_t dim) {
  // Below 64 rows the plain SVD, whose scratch memory is larger than that of a subspace of 64.
  size_t svd = qkvi_svd_scratch_bytes(TOKENS - 1, dim, QKV_RANK_MAX);
  const size_t full = qkvi_svd_scratch_bytes(TOKENS, dim, QKV_RANK_MAX);
  if (full > svd) svd = full;
  return (TOKENS * dim + QKV_RANK_MAX * (TOKENS + dim)) * sizeof(double) + svd;
}

static double largest_of(const double *row, size_t n) {
  double largest = 0;
  for (size_t i = 0; i < n; i++) largest = fabs(row[i]) > largest ? fabs(row[i]) : largest;
  return largest;
}

// To whole numbers of units, ties away from 0.
static void quantize(const double *row, double unit, size_t n, int8_t *to) {
  for (size_t i = 0; i < n; i++) {
    const double x = unit > 0 ? row[i] / unit : 0;
    const double bounded = x > WHOLE_MAX ? WHOLE_MAX : x < -WHOLE_MAX ? -WHOLE_MAX : x;
    to[i] = (int8_t)(bounded + (bounded < 0 ? -0.5 : 0.5));
  }
}

// The least scale whose unit reaches `largest` with the greatest whole number of a factor.
static uint8_t scale_for(double largest) {
  const float factor = (float)(largest * WHOLE_MAX);
  if (!(factor > 0)) return 0;
  uint8_t scale = qkvi_gain_nearest(factor);
  while (scale < UINT8_MAX && qkv_gain_value(scale) < factor) scale++;
  return scale;
}

// The factors [tokens] that fit a direction in whole numbers best to what is left of the rows.
static void best_factors(const double *left, const double *weights, const int8_t *direction, uint32_t tokens,
                         size_t dim, double *factors) {
  double norm = 0;
  for (size_t c = 0; c < dim; c++) norm += weights[c] * direction[c] * direction[c];
  for (size_t t = 0; t < tokens; t++) {
    double sum = 0;
    for (size_t c = 0; c < dim; c++) sum += weights[c] * left[t * dim + c] * direction[c];
    factors[t] = norm > 0 ? sum / norm : 0;
  }
}

// Takes one term off; returns the weighted squares of what is left.
static double take_off(double *left, const double *weights, const int8_t *direction, const int8_t *factors,
                       double unit, uint32_t tokens, size_t dim) {
  double energy = 0;
  for (size_t t = 0; t < tokens; t++) {
    for (size_t c = 0; c < dim; c++) {
      double *x = left + t * dim + c;
      *x -= unit * factors[t] * direction[c];
      energy += weights[c] * *x * *x;
    }
  }
  return energy;
}

// Fits one direction after the other in whole numbers, each to what those before have left. energies [rank + 1]: the
// weighted squares of the rows, and what is left of them after each direction.
static void fit(const float *rows, const float *weights, uint32_t tokens, size_t dim, size_t rank, void *scratch,
                uint8_t *section, double *energies) {
  assert(rank >= 1 && rank <= QKV_RANK_MAX && tokens >= 1 && tokens <= TOKENS);
  double *left = scratch, *strengths = left + TOKENS * dim, *directions = strengths + QKV_RANK_MAX * TOKENS;
  double weight[QKV_DIM_MAX], root[QKV_DIM_MAX], factors[TOKENS];
  for (size_t c = 0; c < dim; c++) {
    weight[c] = weights ? (double)weights[c] : 1;
    root[c] = sqrt(weight[c]);
  }
  energies[0] = 0;
  for (size_t i = 0; i < tokens * dim; i++) {
    left[i] = (double)rows[i] * root[i % dim];
    energies[0] += left[i] * left[i];
  }
  qkvi_svd(left, tokens, dim, rank, directions + QKV_RANK_MAX * dim, strengths, directions);
  for (size_t i = 0; i < tokens * dim; i++) left[i] = (double)rows[i];
  memset(section, 0, qkv_low_rank_bytes(rank, dim));
  int8_t *whole = (int8_t *)section, *whole_factors = whole + rank * dim;
  uint8_t *scales = (uint8_t *)whole_factors + rank * TOKENS;
  for (size_t r = 0; r < rank; r++, whole += dim, whole_factors += TOKENS) {
    double *direction = directions + r * dim;
    for (size_t c = 0; c < dim; c++) direction[c] = root[c] > 0 ? direction[c] / root[c] : 0;
    quantize(direction, largest_of(direction, dim) / WHOLE_MAX, dim, whole);
    best_factors(left, weight, whole, tokens, dim, factors);
    scales[r] = scale_for(largest_of(factors, tokens));
    const double unit = (double)qkvi_low_rank_unit(scales[r]);
    quantize(factors, unit, tokens, whole_factors);
    energies[r + 1] = take_off(left, weight, whole, whole_factors, unit, tokens, dim);
  }
}

void qkv_low_rank_fit(const float *rows, const float *weights, uint32_t tokens, uint16_t dim, uint8_t rank,
                      void *scratch, uint8_t *section) {
  double energies[QKV_RANK_MAX + 1];
  fit(rows, weights, tokens, dim, rank, scratch, section, energies);
}

// ---- Choice ----

// What a choice works on, and where.
typedef struct work {
  qkv_part part;
  const qkv_schedule *schedule;
  const float *weights;
  uint32_t tokens;
  unsigned budget;
  float *rows;
  qkvi_trial trial;
  float *other;      // [64][dim]
  uint8_t *section;  // of the candidate, of any rank
  void *fit;
  float missed[QKV_DIM_MAX];  // by codes of the budget (trial.h)
} work;

static size_t rows_bytes(size_t dim) {
  return TOKENS * dim * sizeof(float);
}

size_t qkv_low_rank_scratch_bytes(size_t dim) {
  return fit_bytes(dim) + rows_bytes(dim) + qkvi_trial_bytes(dim) + qkv_low_rank_bytes(QKV_RANK_MAX, dim);
}

static unsigned tier_of(const work *w, size_t rank) {
  return qkvi_tier_within(w->schedule, w->budget, qkv_low_rank_bytes(rank, w->schedule->dim));
}

// Rows less the factors of the work's section.
static void subtract_factors(const work *w, uint8_t rank, float *rows) {
  qkv_low_rank factors;
  (void)qkv_low_rank_find(rank, w->section, w->schedule->dim, &factors);
  qkv_low_rank_subtract(&factors, rows);
}

static void run(const work *w, unsigned tier, const float *rows) {
  qkvi_trial_run(&w->trial, w->part, w->schedule, tier, w->weights, rows);
}

static double miss(const work *w, const float *rows, const float *decoded) {
  return qkvi_rows_error(rows, decoded, w->weights, w->tokens, w->schedule->dim);
}

// Factors of a rank before coding, at its tier. They take off what codes would miss.
static qkv_low_rank_choice predict(const work *w, uint8_t rank) {
  const uint16_t dim = w->schedule->dim;
  qkv_low_rank_choice made = {QKV_LOW_RANK_PREDICTOR, rank, (uint8_t)tier_of(w, rank), qkv_low_rank_bytes(rank, dim),
                              0};
  qkv_low_rank_fit(w->rows, w->missed, w->tokens, dim, rank, w->fit, w->section);
  memcpy(w->other, w->rows, rows_bytes(dim));
  subtract_factors(w, rank, w->other);
  run(w, made.tier, w->other);
  made.error = miss(w, w->other, w->trial.decoded);
  return made;
}

// Factors of a rank after coding at its tier.
static qkv_low_rank_choice correct(const work *w, uint8_t rank) {
  const uint16_t dim = w->schedule->dim;
  qkv_low_rank_choice made = {QKV_LOW_RANK_CORRECTION, rank, (uint8_t)tier_of(w, rank), qkv_low_rank_bytes(rank, dim),
                              0};
  run(w, made.tier, w->rows);
  for (size_t i = 0; i < w->tokens * (size_t)dim; i++) w->other[i] = w->rows[i] - w->trial.decoded[i];
  qkv_low_rank_fit(w->other, w->weights, w->tokens, dim, rank, w->fit, w->section);
  qkv_low_rank factors;
  (void)qkv_low_rank_find(rank, w->section, dim, &factors);
  qkv_low_rank_rows(&factors, w->trial.decoded);
  made.error = miss(w, w->rows, w->trial.decoded);
  return made;
}

// The rank up to `most` whose predictor should err least, 0 if none should come near to no factors: energies are what
// the budget's codes would miss of the rows after each direction.
static uint8_t promising_rank(const work *w, size_t most, const double *energies) {
  const double tolerance = 1.1;
  const double at_budget = qkvi_tier_distortion(w->schedule, w->budget, w->weights);
  double least = tolerance * energies[0];
  uint8_t best = 0;
  for (size_t rank = 1; rank <= most; rank++) {
    const double part = qkvi_tier_distortion(w->schedule, tier_of(w, rank), w->weights) / at_budget;
    if (energies[rank] * part >= least) continue;
    least = energies[rank] * part;
    best = (uint8_t)rank;
  }
  return best;
}

static void take(const work *w, const qkv_low_rank_choice *made, uint8_t *section, qkv_low_rank_choice *choice) {
  *choice = *made;
  memcpy(section, w->section, made->bytes);
}

static void choose_rank(const work *w, size_t most, uint8_t *section, qkv_low_rank_choice *choice) {
  double energies[QKV_RANK_MAX + 1];
  fit(w->rows, w->missed, w->tokens, w->schedule->dim, most, w->fit, w->section, energies);
  const uint8_t rank = promising_rank(w, most, energies);
  if (rank == 0) return;
  const qkv_low_rank_choice made = predict(w, rank);
  if (made.error < choice->error) take(w, &made, section, choice);
}

void qkv_low_rank_choose(qkv_part part, const qkv_schedule *schedule, const float *weights, uint32_t tokens,
                         const qkv_low_rank_options *options, unsigned budget, void *scratch, float *rows,
                         uint8_t *section, qkv_low_rank_choice *choice) {
  assert(budget >= 1 && budget <= QKV_TIER_MAX && options->rank <= QKV_RANK_MAX);
  const size_t dim = schedule->dim;
  work w = {part, schedule, weights, tokens, budget, rows, {0}, NULL, NULL, scratch, {0}};
  w.other = (float *)((char *)scratch + fit_bytes(dim));
  w.trial = qkvi_trial_in(w.other + TOKENS * dim, dim);
  w.section = (uint8_t *)(w.other + TOKENS * dim) + qkvi_trial_bytes(dim);
  run(&w, budget, rows);
  *choice = (qkv_low_rank_choice){.tier = (uint8_t)budget, .error = miss(&w, rows, w.trial.decoded)};
  qkvi_tier_missed(schedule, budget, weights, w.missed);
  uint8_t most = options->mode == QKV_LOW_RANK_OFF ? 0 : options->rank;
  while (most > 0 && tier_of(&w, most) == 0) most--;
  if (most == 0) return;
  if (options->mode == QKV_LOW_RANK_AUTO) {
    choose_rank(&w, most, section, choice);
  } else {
    const qkv_low_rank_choice made = options->mode == QKV_LOW_RANK_PREDICTOR ? predict(&w, most) : correct(&w, most);
    take(&w, &made, section, choice);
  }
  if (choice->mode != QKV_LOW_RANK_PREDICTOR) return;
  memcpy(w.section, section, choice->bytes);
  subtract_factors(&w, choice->rank, rows);
}
