#include "engine/codec/bit_budget.h"

#include <math.h>
#include <stdbool.h>

#include "engine/codec/schedule.h"

enum { ROUNDS = 64 };  // of moving a mean that limits have shifted

static double bounded(double bits) {
  return bits < QKV_BIT_LOWER ? QKV_BIT_LOWER : bits > QKV_BIT_HIGHER ? QKV_BIT_HIGHER : bits;
}

// What the error would be without any bits, in bits.
static double demand(const qkv_bit_part *part) {
  return part->bits + log(part->error) / log(QKV_BIT_FALL);
}

void qkv_bit_budget(qkv_bit_part *parts, size_t count, double mean) {
  double sum = 0;
  size_t measured = 0;
  for (size_t i = 0; i < count; i++) {
    parts[i].offset = mean;
    if (!(parts[i].error > 0)) continue;
    sum += demand(&parts[i]);
    measured++;
  }
  if (measured == 0) return;
  double shift = mean;
  for (int round = 0; round < ROUNDS; round++) {
    double offsets = 0;
    for (size_t i = 0; i < count; i++) {
      if (!(parts[i].error > 0)) continue;
      parts[i].offset = bounded(shift + QKV_BIT_SHARE * (demand(&parts[i]) - sum / (double)measured));
      offsets += parts[i].offset;
    }
    const double missing = mean - offsets / (double)measured;
    if (fabs(missing) < 1e-6) return;
    shift += missing;
  }
}

double qkv_bit_faded(double offset, double bits) {
  return offset * (bits < 1 ? 0 : bits > 2 ? 1 : bits - 1);
}

void qkv_bit_eighths(const qkv_bit_part *parts, size_t count, int8_t *eighths) {
  double carried = 0;
  for (size_t i = 0; i < count; i++) {
    const double wanted = parts[i].offset * QKV_TIER_BIT + carried, whole = nearbyint(wanted);
    eighths[i] = (int8_t)whole;
    carried = wanted - whole;
  }
}
