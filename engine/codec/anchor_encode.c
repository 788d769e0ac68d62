// Making anchors: rows to section and residual, and the choice between kinds.
#include <assert.h>
#include <stdbool.h>
#include <string.h>

#include "engine/codec/anchor.h"
#include "engine/codec/anchor_scale.h"
#include "engine/codec/row.h"
#include "engine/codec/trial.h"
#include "engine/kernel/kernel.h"

enum { TOKENS = QKV_PAGE_TOKENS, GROUP = QKV_GROUP_TOKENS, GROUPS = QKV_PAGE_GROUPS };

// To the nearest whole number of units, ties away from 0.
static void quantize(const float *row, float unit, size_t dim, int8_t *to) {
  const float inverse = unit > 0 ? 1 / unit : 0, limit = QKVI_ANCHOR_WHOLE_MAX;
  for (size_t c = 0; c < dim; c++) {
    const float x = row[c] * inverse;
    const float bounded = x > limit ? limit : x < -limit ? -limit : x;
    to[c] = (int8_t)(bounded + (bounded < 0 ? -0.5f : 0.5f));
  }
}

static void subtract(const float *a, const float *b, size_t dim, float *difference) {
  for (size_t c = 0; c < dim; c++) difference[c] = a[c] - b[c];
}

// ---- Means ----

// Sums over a page's rows.
typedef struct row_sums {
  float groups[GROUPS * QKV_DIM_MAX];  // [group][dim]
  double squares, steps;               // weighted
} row_sums;

static void sum_rows(const qkv_anchor_input *input, const float *weights, row_sums *sums) {
  qkv_kernels_get()->sums(input->rows, input->tokens, input->schedule->dim, weights, sums->groups, &sums->squares,
                          &sums->steps);
}

static size_t group_tokens(const qkv_anchor_input *input, size_t group) {
  const size_t begin = group * GROUP;
  if (begin >= input->tokens) return 0;
  return input->tokens - begin < GROUP ? input->tokens - begin : GROUP;
}

// The mean of all rows, or those of groups. A group without tokens takes the one before, so that it costs nothing in
// the unit.
static void means(const qkv_anchor_input *input, const row_sums *sums, size_t count, float *rows) {
  const size_t dim = input->schedule->dim;
  for (size_t r = 0; r < count; r++) {
    float *mean = rows + r * dim;
    const size_t tokens = count == 1 ? input->tokens : group_tokens(input, r);
    if (tokens == 0) {
      memcpy(mean, mean - dim, dim * sizeof *mean);
      continue;
    }
    memcpy(mean, sums->groups + r * dim, dim * sizeof *mean);
    for (size_t g = 1; count == 1 && g < GROUPS; g++) qkvi_row_add(mean, sums->groups + g * dim, 1, dim);
    for (size_t c = 0; c < dim; c++) mean[c] /= (float)tokens;
  }
}

static uint8_t encode_means(const qkv_anchor_input *input, const row_sums *sums, qkv_anchor_kind kind,
                            uint8_t *section, size_t *bytes, float *residual) {
  const size_t dim = input->schedule->dim, count = kind == QKV_ANCHOR_MEAN ? 1 : GROUPS;
  float rows[GROUPS * QKV_DIM_MAX];
  means(input, sums, count, rows);
  const unsigned unit = qkvi_anchor_unit_for(qkvi_row_largest(rows, count * dim));
  *bytes = qkv_anchor_bytes(kind, count, dim);
  memset(section, 0, *bytes);
  quantize(rows, qkvi_anchor_unit(unit), count * dim, (int8_t *)section);
  qkvi_row_widen(rows, (const int8_t *)section, qkvi_anchor_unit(unit), count * dim);
  for (size_t g = 0; g < GROUPS; g++) {
    const size_t first = g * GROUP * dim;
    qkv_kernels_get()->subtract(input->rows + first, group_tokens(input, g), dim, rows + g * count / GROUPS * dim,
                                residual + first);
  }
  return (uint8_t)(kind | unit << QKVI_ANCHOR_KIND_BITS);
}

// ---- Chains ----

// A chain under way, row by row.
typedef struct loop {
  const qkv_schedule *schedule;
  const float *weights;
  unsigned tier;
  float last[QKV_DIM_MAX];  // the row before, as it will be decoded
} loop;

// `residual` is to be coded after `last` or an anchor, which is in `last`: moves `last` on.
static void advance(loop *at, const float *residual) {
  float coded[QKV_DIM_MAX];
  qkvi_row_round_trip(at->schedule, at->tier, at->weights, residual, coded);
  qkvi_row_add(at->last, coded, 1, at->schedule->dim);
}

static bool begins_segment(const qkv_anchor_input *input, const qkv_anchor_options *options, size_t t, size_t since,
                           const float *difference) {
  if (t == 0 || (options->every > 0 && since >= options->every)) return true;
  if (!(options->threshold > 0)) return false;
  const size_t dim = input->schedule->dim;
  const double norm = qkvi_row_error(input->rows + t * dim, NULL, input->weights, dim);
  const double step = qkvi_row_error(difference, NULL, input->weights, dim);
  return step > (double)options->threshold * (double)options->threshold * norm;
}

// One that the directory's byte can say, in case that there will be no second segment.
static uint8_t first_scale(const float *row, size_t dim) {
  const unsigned unit = qkvi_anchor_unit_for(qkvi_row_largest(row, dim));
  return qkvi_anchor_unit_scale(unit > 0 ? unit : 1);
}

// Rows that begin segments are written to `rows` one after the other, their scales to `scales`.
static uint64_t run_chain(const qkv_anchor_input *input, const qkv_anchor_options *options, unsigned tier,
                          size_t segments, uint8_t *scales, int8_t *rows, float *residual) {
  const size_t dim = input->schedule->dim;
  loop at = {.schedule = input->schedule, .weights = input->weights, .tier = tier};
  uint64_t starts = 0;
  for (size_t t = 0, count = 0, since = 0; t < input->tokens; t++, since++) {
    const float *row = input->rows + t * dim;
    float *difference = residual + t * dim;
    subtract(row, at.last, dim, difference);
    if (count < segments && begins_segment(input, options, t, since, difference)) {
      scales[count] = count == 0 ? first_scale(row, dim) : qkvi_anchor_scale_for(qkvi_row_largest(row, dim));
      const float unit = qkvi_anchor_scale_unit(scales[count]);
      quantize(row, unit, dim, rows + count * dim);
      qkvi_row_widen(at.last, rows + count * dim, unit, dim);
      subtract(row, at.last, dim, difference);
      starts |= (uint64_t)1 << t;
      count++, since = 0;
    }
    advance(&at, difference);
  }
  return starts;
}

static uint8_t encode_chain(const qkv_anchor_input *input, const qkv_anchor_options *options, unsigned tier,
                            size_t segments, uint8_t *section, size_t *bytes, float *residual) {
  assert(segments >= 1 && segments <= TOKENS);
  const size_t dim = input->schedule->dim;
  uint8_t scales[TOKENS];
  // Their places in the longest section; they move up once their number is known.
  int8_t *rows = (int8_t *)section + qkv_anchor_bytes_max(dim) - TOKENS * dim;
  const uint64_t starts = run_chain(input, options, tier, segments, scales, rows, residual);
  const size_t count = (size_t)__builtin_popcountll(starts), head = count > 1 ? sizeof starts + count : 0;
  *bytes = qkv_anchor_bytes(QKV_ANCHOR_CHAIN, count, dim);
  memmove(section + head, rows, count * dim);
  memset(section + head + count * dim, 0, *bytes - head - count * dim);
  if (count == 1) return (uint8_t)(QKV_ANCHOR_CHAIN | scales[0] / 4u << QKVI_ANCHOR_KIND_BITS);
  memcpy(section, &starts, sizeof starts);
  memcpy(section + sizeof starts, scales, count);
  return QKV_ANCHOR_CHAIN;
}

void qkv_anchor_recode(const qkv_anchor *anchor, const qkv_schedule *schedule, const float *weights, unsigned tier,
                       uint32_t tokens, float *rows) {
  assert(anchor->kind == QKV_ANCHOR_CHAIN && anchor->dim == schedule->dim);
  const size_t dim = schedule->dim;
  loop at = {.schedule = schedule, .weights = weights, .tier = tier};
  for (size_t t = 0, count = 0; t < tokens; t++) {
    float *row = rows + t * dim;
    if (anchor->starts >> t & 1) {
      qkvi_row_widen(at.last, anchor->rows + count * dim, qkvi_anchor_row_unit(anchor, count), dim);
      count++;
    }
    subtract(row, at.last, dim, row);
    advance(&at, row);
  }
  memset(rows + tokens * dim, 0, (TOKENS - tokens) * dim * sizeof *rows);
}

static uint8_t encode_anchor(const qkv_anchor_input *input, const row_sums *sums, const qkv_anchor_options *options,
                             unsigned tier, size_t segments, uint8_t *section, size_t *bytes, float *residual) {
  assert(input->tokens >= 1 && input->tokens <= TOKENS);
  const size_t dim = input->schedule->dim;
  memset(residual + input->tokens * dim, 0, (TOKENS - input->tokens) * dim * sizeof *residual);
  switch (options->kind) {
    case QKV_ANCHOR_MEAN:
    case QKV_ANCHOR_GROUP:
      return encode_means(input, sums, options->kind, section, bytes, residual);
    case QKV_ANCHOR_CHAIN:
      return encode_chain(input, options, tier, segments, section, bytes, residual);
    case QKV_ANCHOR_NONE:
    case QKV_ANCHOR_AUTO:
      break;
  }
  assert(options->kind == QKV_ANCHOR_NONE);
  memcpy(residual, input->rows, input->tokens * dim * sizeof *residual);
  *bytes = 0;
  return QKV_ANCHOR_NONE;
}

uint8_t qkv_anchor_encode(const qkv_anchor_input *input, const qkv_anchor_options *options, unsigned tier,
                          size_t segments, uint8_t *section, size_t *bytes, float *residual) {
  row_sums sums;
  sum_rows(input, qkvi_weights_alike, &sums);
  return encode_anchor(input, &sums, options, tier, segments, section, bytes, residual);
}

// ---- Choice ----

// A section and residual.
typedef struct candidate {
  uint8_t *section;
  float *residual;  // [64][dim]
  qkvi_trial trial;
  qkv_anchor_choice choice;
} candidate;

static size_t rows_bytes(size_t dim) {
  return TOKENS * dim * sizeof(float);
}

size_t qkv_anchor_scratch_bytes(size_t dim) {
  return rows_bytes(dim) + 2 * qkvi_trial_bytes(dim) + qkv_anchor_bytes_max(dim);
}

// Codes what is left at its tier. A chain's rows are coded as they were in the loop, so of every kind the error is
// that of the codes.
static void measure(qkv_part part, const qkv_anchor_input *input, candidate *made) {
  made->choice.error =
      qkvi_trial_encode(&made->trial, part, input->schedule, made->choice.tier, input->weights, made->residual);
  made->choice.gains = made->trial.gains;
  made->choice.codes = made->trial.codes;
}

// As many segments as the budget pays for with a tier left; 0 if none.
static size_t segments_max(const qkv_schedule *schedule, unsigned budget) {
  size_t count = TOKENS;
  while (count > 0 &&
         qkvi_tier_within(schedule, budget, qkv_anchor_bytes(QKV_ANCHOR_CHAIN, count, schedule->dim)) == 0) {
    count--;
  }
  return count;
}

// How many segments there are depends on the tier and the tier on how many there are: three attempts, of which the
// last may not take more than it pays for.
static bool prepare_chain(const qkv_anchor_input *input, const qkv_anchor_options *options, unsigned budget,
                          candidate *made) {
  enum { ATTEMPTS = 3 };
  const qkv_schedule *schedule = input->schedule;
  const size_t most = segments_max(schedule, budget);
  if (most == 0) return false;
  size_t wanted = options->every > 0 ? (input->tokens + (size_t)options->every - 1) / options->every : 1;
  for (int attempt = 1;; attempt++) {
    const size_t allowed = wanted < most ? wanted : most;
    const bool last = attempt == ATTEMPTS || allowed == most;
    const size_t bytes = qkv_anchor_bytes(QKV_ANCHOR_CHAIN, allowed, schedule->dim);
    made->choice.tier = (uint8_t)qkvi_tier_within(schedule, budget, bytes);
    made->choice.byte = qkv_anchor_encode(input, options, made->choice.tier, last ? allowed : TOKENS, made->section,
                                          &made->choice.bytes, made->residual);
    if (made->choice.bytes <= bytes) return true;
    uint64_t starts;  // more than one segment, so there is a mask
    memcpy(&starts, made->section, sizeof starts);
    wanted = (size_t)__builtin_popcountll(starts);
  }
}

// Section, residual and tier of a kind at the budget's bytes. False where the kind leaves no tier.
static bool prepare(const qkv_anchor_input *input, const row_sums *sums, const qkv_anchor_options *options,
                    unsigned budget, candidate *made) {
  if (options->kind == QKV_ANCHOR_CHAIN) return prepare_chain(input, options, budget, made);
  const size_t count = options->kind == QKV_ANCHOR_GROUP ? GROUPS : 1;
  const size_t bytes = qkv_anchor_bytes(options->kind, count, input->schedule->dim);
  made->choice.tier = (uint8_t)qkvi_tier_within(input->schedule, budget, bytes);
  if (made->choice.tier == 0) return false;
  made->choice.byte =
      encode_anchor(input, sums, options, made->choice.tier, 1, made->section, &made->choice.bytes, made->residual);
  return true;
}

// What codes of the budget's tier are expected to miss of what each kind leaves.
typedef struct energies {
  double left[QKV_ANCHOR_AUTO];  // by kind
} energies;

static energies energies_of(const qkv_anchor_input *input, const row_sums *sums, const float *missed) {
  const size_t dim = input->schedule->dim;
  float all[QKV_DIM_MAX] = {0};
  double in_groups = 0;
  for (size_t g = 0; g < GROUPS && group_tokens(input, g) > 0; g++) {
    const float *group = sums->groups + g * dim;
    in_groups += qkvi_row_error(group, NULL, missed, dim) / (double)group_tokens(input, g);
    qkvi_row_add(all, group, 1, dim);
  }
  const double in_all = qkvi_row_error(all, NULL, missed, dim) / input->tokens;
  return (energies){.left = {[QKV_ANCHOR_NONE] = sums->squares,
                             [QKV_ANCHOR_MEAN] = sums->squares - in_all,
                             [QKV_ANCHOR_GROUP] = sums->squares - in_groups,
                             [QKV_ANCHOR_CHAIN] = sums->steps}};
}

// The error expected of a kind at its own tier. A chain also codes the error of the row before.
static double expected_error(const energies *all, qkv_anchor_kind kind, const qkv_anchor_input *input,
                             unsigned budget) {
  const qkv_schedule *schedule = input->schedule;
  const size_t count = kind == QKV_ANCHOR_GROUP ? GROUPS : 1;
  const unsigned tier = qkvi_tier_within(schedule, budget, qkv_anchor_bytes(kind, count, schedule->dim));
  const double distortion = qkvi_tier_distortion(schedule, tier, input->weights);
  const double left = all->left[kind] > 0 ? all->left[kind] : 0;
  const double error = left * distortion / qkvi_tier_distortion(schedule, budget, input->weights);
  return kind == QKV_ANCHOR_CHAIN ? error / (1 - distortion + 1e-3) : error;
}

void qkv_anchor_choose(qkv_part part, const qkv_anchor_input *input, const qkv_anchor_options *options,
                       unsigned budget, void *scratch, uint8_t *section, float *residual, qkv_anchor_choice *choice) {
  assert(budget >= 1 && budget <= QKV_TIER_MAX);
  const size_t dim = input->schedule->dim;
  float *other_residual = scratch;
  uint8_t *trials = (uint8_t *)(other_residual + TOKENS * dim), *other_section = trials + 2 * qkvi_trial_bytes(dim);
  candidate best = {section, residual, qkvi_trial_in(trials, dim), {0}};
  candidate other = {other_section, other_residual, qkvi_trial_in(trials + qkvi_trial_bytes(dim), dim), {0}};
  qkv_anchor_options one = *options;
  const bool automatic = options->kind == QKV_ANCHOR_AUTO;
  float missed[QKV_DIM_MAX];
  row_sums sums;
  qkvi_tier_missed(input->schedule, budget, input->weights, missed);
  sum_rows(input, missed, &sums);
  if (automatic || !prepare(input, &sums, &one, budget, &best)) {
    one.kind = QKV_ANCHOR_NONE;
    (void)prepare(input, &sums, &one, budget, &best);
  }
  measure(part, input, &best);
  *choice = best.choice;
  if (!automatic) return;
  // A kind that is expected to err so much more than the best so far is not tried.
  const double tolerance = 1.1;
  const energies all = energies_of(input, &sums, missed);
  double expected = expected_error(&all, QKV_ANCHOR_NONE, input, budget);
  for (qkv_anchor_kind kind = QKV_ANCHOR_MEAN; kind <= QKV_ANCHOR_CHAIN; kind++) {
    const double hope = expected_error(&all, kind, input, budget);
    one.kind = kind;
    if ((kind != QKV_ANCHOR_MEAN && hope >= tolerance * expected) || !prepare(input, &sums, &one, budget, &other)) {
      continue;
    }
    measure(part, input, &other);
    if (other.choice.error >= choice->error) continue;
    *choice = other.choice;
    expected = hope;
    const qkvi_trial spare = best.trial;
    best.trial = other.trial;
    other.trial = spare;
    memcpy(section, other.section, choice->bytes);
    memcpy(residual, other.residual, rows_bytes(dim));
  }
}
