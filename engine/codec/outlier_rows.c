#include "engine/codec/outlier_rows.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "engine/codec/heavy.h"
#include "engine/codec/pack.h"
#include "engine/codec/row.h"
#include "engine/codec/trial.h"

// A row whose squared error is so many times the mean of the page's other rows' is an outlier: one that errs twice as
// much. Of rows without outliers, Gaussian ones of 64 with spreads that fall, this keeps (tests/engine/cache/
// outliers_test.c; calibrated, archive frame, keys):
//   times     2 bits   3 bits   4 bits   8 bits
//   3         0.0008   0.0040   0.0108   0.0057
//   4         0.0003   0.0017   0.0048   0.0017
//   6         0        0.0003   0.0010   0.0013
// With outliers the error of outputs is the same with all three to 1 %.
#define OUTLIER_TIMES_USUAL 6

static uint64_t bit_of(size_t slot) {
  return (uint64_t)1 << slot;
}

static void average_others(const qkvi_row_measures *measures, uint32_t tokens, qkvi_outlier_slots *found) {
  double errors = 0, relative = 0, squares = 0;
  for (size_t t = 0; t < tokens; t++) {
    const float error = measures->errors[t], square = measures->squares[t];
    if ((found->longs & bit_of(t)) == 0) squares += (double)square;
    if ((found->all & bit_of(t)) != 0) continue;
    errors += (double)error;
    if (square > 0) relative += (double)(error / square);
  }
  const int usual = (int)tokens - __builtin_popcountll(found->longs);
  found->others = (int)tokens - __builtin_popcountll(found->all);
  found->error = found->others > 0 ? (float)(errors / found->others) : 0;
  found->relative = found->others > 0 ? (float)(relative / found->others) : 0;
  found->square = usual > 0 ? (float)(squares / usual) : 0;
}

// Above all factors: what is kept for other reasons than its error, first tokens before heavy hitters.
#define RANK_SINK INFINITY
#define RANK_HEAVY FLT_MAX

// How far a row's error is beyond the bound, as a factor; 0: it is not. The error of a key adds to its score, however
// long the key is. That of a long value is taken relative to its length, as outputs have both.
static float excess(const qkv_head_coder *head, qkv_part part, const qkvi_outlier_slots *found,
                    const qkvi_row_measures *measures, size_t t) {
  const float square = measures->squares[t], reference = square > found->square ? square : found->square;
  const float own = head->outlier_limits[part] * head->error_scales[part] * square;
  const float usual = OUTLIER_TIMES_USUAL * (part == QKV_K ? found->error : found->relative * reference);
  const float allowed = own < usual || found->others == 0 ? own : usual;
  if (head->outlier_limits[part] == 0) return 0;
  if (!(measures->errors[t] > allowed)) return 0;
  return fminf(measures->errors[t] / (allowed > 0 ? allowed : 1e-30f), RANK_HEAVY / 2);
}

// The worst ones, if there are more than a page may have.
static uint64_t keep_worst(uint64_t slots, const float excesses[QKV_PAGE_TOKENS]) {
  while (__builtin_popcountll(slots) > QKV_OUTLIERS_MAX) {
    size_t least = (size_t)__builtin_ctzll(slots);
    for (uint64_t left = slots; left != 0; left &= left - 1) {
      const size_t slot = (size_t)__builtin_ctzll(left);
      if (excesses[slot] < excesses[least]) least = slot;
    }
    slots &= ~bit_of(least);
  }
  return slots;
}

// A slot's row in code space; `space` [dim] may be what is returned.
static const float *turned_row(const qkvi_part_rows *rows, size_t slot, float *space) {
  const size_t dim = rows->head->schedules[rows->part]->dim;
  if (rows->bring != NULL) rows->bring(rows->bring_context, slot);
  if (rows->turned != NULL) return rows->turned + slot * dim;
  qkv_to_float(rows->source->dtype, rows->source->data + slot * rows->source->stride, space, dim);
  qkv_transform_forward(rows->head->transforms[rows->part], space, 1, dim);
  return space;
}

// A slot's row as its codes have it: decoded [dim].
static void decode_row(const qkvi_part_rows *rows, unsigned tier, size_t slot, float *decoded) {
  const qkv_schedule *schedule = rows->head->schedules[rows->part];
  const uint8_t *group = rows->codes + slot / QKV_GROUP_TOKENS * qkv_schedule_group_bytes(schedule, tier);
  uint8_t codes[QKV_DIM_MAX];
  qkvi_unpack_slot(rows->part, schedule, tier, group, slot % QKV_GROUP_TOKENS, codes);
  qkvi_row_decode(schedule, tier, codes, rows->gains[slot], decoded);
}

// Encoding measures errors off coordinates that are rounded to 1/64 and end at 4. A row of which many are rounded
// alike (one large coordinate makes that, behind a Hadamard transform) errs more than that says, one that is clipped
// less. To be exact:
static void measure_again(const qkvi_part_rows *rows, size_t slot, qkvi_row_measures *measures,
                          qkvi_outlier_slots *found) {
  const qkv_transform *transform = rows->head->transforms[rows->part];
  const unsigned tier = rows->head->tiers[rows->part];
  float space[QKV_DIM_MAX], decoded[QKV_DIM_MAX];
  if (tier == 0 || (found->exact & bit_of(slot)) != 0) return;
  const float *row = turned_row(rows, slot, space);
  decode_row(rows, tier, slot, decoded);
  measures->errors[slot] = (float)qkvi_row_error(row, decoded, transform->weights, transform->schedule->dim);
  found->exact |= bit_of(slot);
}

// Rows that are much longer than the others so far, whose errors matter most.
static void find_longs(const qkvi_part_rows *rows, qkvi_row_measures *measures, qkvi_outlier_slots *found) {
  for (size_t t = 0; t < rows->tokens; t++) {
    if ((found->longs & bit_of(t)) != 0 || measures->squares[t] <= OUTLIER_TIMES_USUAL * found->square) continue;
    found->longs |= bit_of(t);
    measure_again(rows, t, measures, found);
  }
}

// The more rows are found, the less is the error of the others: until no row is beyond the bound.
qkvi_outlier_slots qkvi_outliers_choose(const qkv_coder *coder, const qkvi_part_rows *rows,
                                        qkvi_row_measures *measures) {
  qkvi_outlier_slots found = {0};
  float excesses[QKV_PAGE_TOKENS] = {0};
  uint64_t before, longs_before, exact_before;
  for (size_t t = 0; t < rows->tokens && rows->position + t < qkv_embedded(coder)->sinks; t++) {
    found.all |= bit_of(t);
    excesses[t] = RANK_SINK;
  }
  for (uint64_t left = rows->head->tiers[rows->part] < QKV_HEAVY_TIER ? rows->heavy : 0; left != 0;
       left &= left - 1) {
    const size_t t = (size_t)__builtin_ctzll(left);
    found.all |= bit_of(t);
    excesses[t] = RANK_HEAVY;
  }
  do {
    before = found.all;
    longs_before = found.longs;
    exact_before = found.exact;
    average_others(measures, rows->tokens, &found);
    find_longs(rows, measures, &found);
    for (size_t t = 0; t < rows->tokens; t++) {
      if (excesses[t] >= RANK_HEAVY) continue;
      excesses[t] = excess(rows->head, rows->part, &found, measures, t);
      if (excesses[t] == 0) continue;
      measure_again(rows, t, measures, &found);
      excesses[t] = excess(rows->head, rows->part, &found, measures, t);
      if (excesses[t] > 0) found.all |= bit_of(t);
    }
  } while (found.all != before || found.longs != longs_before);
  found.all = keep_worst(found.all, excesses);
  if (found.all != before || found.exact != exact_before) average_others(measures, rows->tokens, &found);
  return found;
}

// Whether 8 bits a coordinate would err more than codes do on the other rows. `row` is as it will be stored.
static bool wants_wide(const qkvi_part_rows *rows, const qkvi_outlier_slots *found, const float *row, float square) {
  const float error = qkv_outlier_error(row, rows->head->schedules[rows->part]->dim);
  if (rows->part == QKV_V) return error > found->relative * square;
  return rows->head->error_scales[QKV_K] * error > found->error;
}

// A slot's row [dim] as it is kept: a key as attended, a value in code space and in steps.
static void load_outlier(const qkvi_part_rows *rows, size_t slot, float *row) {
  const size_t dim = rows->head->schedules[rows->part]->dim;
  if (rows->part == QKV_V) return qkv_outlier_units(turned_row(rows, slot, row), rows->head->outlier_steps, dim, row);
  qkv_to_float(rows->source->dtype, rows->source->data + slot * rows->source->stride, row, dim);
}

void qkvi_outliers_store(const qkvi_part_rows *rows, const qkvi_outlier_slots *found,
                         const qkvi_row_measures *measures, uint8_t *gains, qkv_outlier_set *set) {
  const size_t dim = rows->head->schedules[rows->part]->dim;
  float row[QKV_DIM_MAX];
  set->count = 0;
  for (uint64_t left = found->all; left != 0; left &= left - 1) {
    const size_t slot = (size_t)__builtin_ctzll(left);
    load_outlier(rows, slot, row);
    qkv_outlier_set_add(set, (uint8_t)slot, wants_wide(rows, found, row, measures->squares[slot]), row, NULL, dim);
    gains[slot] = 0;
  }
}

void qkvi_outliers_level(uint64_t slots, uint32_t tokens, size_t dim, float *rows) {
  float mean[QKV_DIM_MAX] = {0};
  const size_t others = tokens - (size_t)__builtin_popcountll(slots);
  for (size_t t = 0; t < tokens; t++) {
    if ((slots & bit_of(t)) == 0) qkvi_row_add(mean, rows + t * dim, 1, dim);
  }
  for (size_t c = 0; c < dim && others > 0; c++) mean[c] /= (float)others;
  for (; slots != 0; slots &= slots - 1) {
    memcpy(rows + (size_t)__builtin_ctzll(slots) * dim, mean, dim * sizeof *mean);
  }
}
