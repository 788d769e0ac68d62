#include "engine/codec/rope.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>

static const double TWO_PI = 6.283185307179586476925286766559;

static qkv_status check_between(const char *field, double value, double least, double most, qkv_error *error) {
  if (value >= least && value <= most) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "rope.%s is %g, allowed are %g to %g", field, value, least, most);
}

static qkv_status check_theta(double theta, qkv_error *error) {
  if (theta > 1 && theta <= QKV_ROPE_THETA_MAX) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "rope.theta is %g, must be above 1 and at most %g", theta,
                  QKV_ROPE_THETA_MAX);
}

static double or_default(double value, double otherwise) {
  return value == 0 ? otherwise : value;
}

static qkv_status resolve_width(qkv_rope *rope, uint32_t dim, qkv_error *error) {
  if (rope->width == 0) rope->width = dim;
  if (rope->width > dim) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "rope.width is %" PRIu32 ", at most key_dim %" PRIu32, rope->width,
                    dim);
  }
  if (rope->width % 2 != 0) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "rope.width is %" PRIu32 ", must be even", rope->width);
  }
  return QKV_OK;
}

static qkv_status resolve_trained(qkv_rope *rope, const qkv_rope *said, qkv_error *error) {
  rope->original_max_position = said->original_max_position;
  if (rope->original_max_position >= 1 && rope->original_max_position <= QKV_ROPE_TRAINED_MAX) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "rope.original_max_position is %" PRIu64 ", allowed are 1 to %" PRIu64,
                  rope->original_max_position, QKV_ROPE_TRAINED_MAX);
}

static qkv_status resolve_llama3(qkv_rope *rope, const qkv_rope *said, qkv_error *error) {
  QKV_TRY(resolve_trained(rope, said, error));
  rope->low_freq_factor = or_default(said->low_freq_factor, 1);
  rope->high_freq_factor = or_default(said->high_freq_factor, 4);
  QKV_TRY(check_between("low_freq_factor", rope->low_freq_factor, QKV_ROPE_FACTOR_MIN, QKV_ROPE_FACTOR_MAX, error));
  QKV_TRY(check_between("high_freq_factor", rope->high_freq_factor, QKV_ROPE_FACTOR_MIN, QKV_ROPE_FACTOR_MAX, error));
  if (rope->high_freq_factor > rope->low_freq_factor) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "rope.high_freq_factor is %g, must be above low_freq_factor %g",
                  rope->high_freq_factor, rope->low_freq_factor);
}

static qkv_status resolve_yarn(qkv_rope *rope, const qkv_rope *said, qkv_error *error) {
  QKV_TRY(resolve_trained(rope, said, error));
  rope->beta_fast = or_default(said->beta_fast, 32);
  rope->beta_slow = or_default(said->beta_slow, 1);
  rope->attention_factor = or_default(said->attention_factor, 0.1 * log(rope->factor) + 1);
  QKV_TRY(check_between("beta_slow", rope->beta_slow, QKV_ROPE_FACTOR_MIN, QKV_ROPE_FACTOR_MAX, error));
  QKV_TRY(check_between("beta_fast", rope->beta_fast, rope->beta_slow, QKV_ROPE_FACTOR_MAX, error));
  return check_between("attention_factor", rope->attention_factor, QKV_ROPE_FACTOR_MIN, QKV_ROPE_FACTOR_MAX, error);
}

// What the scaling uses, from what was said; the rest of `rope` is 0.
static qkv_status resolve_scaling(qkv_rope *rope, const qkv_rope *said, qkv_error *error) {
  if (rope->scaling == QKV_ROPE_NONE) return QKV_OK;
  rope->factor = said->factor;
  QKV_TRY(check_between("factor", rope->factor, 1, QKV_ROPE_FACTOR_MAX, error));
  switch (rope->scaling) {
    case QKV_ROPE_DYNAMIC:
      return resolve_trained(rope, said, error);
    case QKV_ROPE_YARN:
      return resolve_yarn(rope, said, error);
    case QKV_ROPE_LLAMA3:
      return resolve_llama3(rope, said, error);
    default:
      return QKV_OK;
  }
}

qkv_status qkv_rope_resolve(qkv_rope *rope, uint32_t dim, qkv_error *error) {
  const qkv_rope said = *rope;
  *rope = (qkv_rope){0};
  if (said.theta == 0) return QKV_OK;
  if ((unsigned)said.scaling > QKV_ROPE_LLAMA3) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "rope.scaling is %d, known are 0 to %d", (int)said.scaling,
                    QKV_ROPE_LLAMA3);
  }
  *rope =
      (qkv_rope){.theta = said.theta, .width = said.width, .interleaved = said.interleaved, .scaling = said.scaling};
  QKV_TRY(check_theta(rope->theta, error));
  QKV_TRY(resolve_width(rope, dim, error));
  return resolve_scaling(rope, &said, error);
}

// Dynamic NTK: the base that stretches the lowest frequency to the length at hand. Never below theta, whatever
// is rounded: 1 is added to what is not negative.
static double dynamic_theta(const qkv_rope *rope, uint64_t position) {
  const double trained = (double)rope->original_max_position;
  const double length = fmax((double)position + 1, trained);
  const double width = rope->width;
  return rope->theta * pow(1 + rope->factor * (length / trained - 1), width / (width - 2));
}

// Index of the frequency that turns `rotations` times over the trained length, as a real number.
static double yarn_index(const qkv_rope *rope, double rotations) {
  return rope->width * log((double)rope->original_max_position / (rotations * TWO_PI)) / (2 * log(rope->theta));
}

static double yarn_frequency(const qkv_rope *rope, double frequency, uint32_t pair) {
  const double low = fmax(floor(yarn_index(rope, rope->beta_fast)), 0);
  double high = fmin(ceil(yarn_index(rope, rope->beta_slow)), (double)rope->width - 1);
  if (high == low) high += 0.001;
  const double ramp = fmin(fmax((pair - low) / (high - low), 0), 1);
  return frequency / rope->factor * ramp + frequency * (1 - ramp);
}

static double llama3_frequency(const qkv_rope *rope, double frequency) {
  const double turns = (double)rope->original_max_position * frequency / TWO_PI;  // over the trained length
  if (turns > rope->high_freq_factor) return frequency;
  if (turns < rope->low_freq_factor) return frequency / rope->factor;
  const double smooth = (turns - rope->low_freq_factor) / (rope->high_freq_factor - rope->low_freq_factor);
  return (1 - smooth) * frequency / rope->factor + smooth * frequency;
}

// Radians per position of a pair; `theta` is the base at this position.
static double pair_frequency(const qkv_rope *rope, double theta, uint32_t pair) {
  const double frequency = pow(theta, -2.0 * pair / rope->width);
  switch (rope->scaling) {
    case QKV_ROPE_LINEAR:
      return frequency / rope->factor;
    case QKV_ROPE_YARN:
      return yarn_frequency(rope, frequency, pair);
    case QKV_ROPE_LLAMA3:
      return llama3_frequency(rope, frequency);
    default:
      return frequency;
  }
}

static double theta_at(const qkv_rope *rope, uint64_t position) {
  return rope->scaling == QKV_ROPE_DYNAMIC ? dynamic_theta(rope, position) : rope->theta;
}

double qkv_rope_frequency(const qkv_rope *rope, uint64_t position, uint32_t pair) {
  assert(rope->theta != 0 && pair < rope->width / 2);
  return pair_frequency(rope, theta_at(rope, position), pair);
}

bool qkv_rope_steady(const qkv_rope *rope, uint64_t end) {
  return rope->scaling != QKV_ROPE_DYNAMIC || end <= rope->original_max_position;
}

double qkv_rope_magnitude(const qkv_rope *rope) {
  return rope->scaling == QKV_ROPE_YARN ? rope->attention_factor : 1;
}

// direction 1 or -1; `scale` multiplies what turned.
static void find_turns(const qkv_rope *rope, uint64_t position, double direction, double scale,
                       qkv_rope_turns *turns) {
  assert(rope->width % 2 == 0 && rope->theta != 0 && rope->width > 0);
  const double theta = theta_at(rope, position);
  const uint32_t pairs = rope->width / 2;
  for (uint32_t pair = 0; pair < pairs; pair++) {
    const double angle = direction * (double)position * pair_frequency(rope, theta, pair);
    turns->cosines[pair] = cos(angle) * scale;
    turns->sines[pair] = sin(angle) * scale;
  }
}

void qkv_rope_find_turns(const qkv_rope *rope, uint64_t position, qkv_rope_turns *turns) {
  find_turns(rope, position, 1, qkv_rope_magnitude(rope), turns);
}

void qkv_rope_turn(const qkv_rope *rope, const qkv_rope_turns *turns, float *row) {
  const uint32_t pairs = rope->width / 2;
  for (uint32_t pair = 0; pair < pairs; pair++) {
    const double c = turns->cosines[pair], s = turns->sines[pair];
    float *first = row + qkv_rope_first(rope, pair), *second = row + qkv_rope_second(rope, pair);
    const double a = *first, b = *second;
    *first = (float)(a * c - b * s);
    *second = (float)(a * s + b * c);
  }
}

static void rotate(const qkv_rope *rope, float *row, uint64_t position, double direction, double scale) {
  qkv_rope_turns turns;
  if (rope->theta == 0) return;
  find_turns(rope, position, direction, scale, &turns);
  qkv_rope_turn(rope, &turns, row);
}

void qkv_rope_forward(const qkv_rope *rope, float *row, uint64_t position) {
  rotate(rope, row, position, 1, qkv_rope_magnitude(rope));
}

void qkv_rope_inverse(const qkv_rope *rope, float *row, uint64_t position) {
  rotate(rope, row, position, -1, 1 / qkv_rope_magnitude(rope));
}
