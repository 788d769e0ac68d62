// Bits where they count: how many bits each head's keys and values get more or less than the average.
//
// An error that one head's codes make in its layer's attention output falls by QKV_BIT_FALL with each bit. So the sum
// of all errors, with the bits' average fixed, is least where all are alike:
//
//   bits_i = average + log(error_i) / log(QKV_BIT_FALL) - mean of that over all i
//
// error_i: the squared error of the output that part i alone makes, as a share of the layer's squared output. What a
// layer's error does to the model the daemon cannot see. On SmolLM2-135M it is nearly the same for all: the
// logarithms of these errors and of the KL divergence that each layer's keys or values make alone have a correlation
// of 0.87, and bits by them leave 0.57 of the sum of KL, bits by the KL itself 0.45.
//
// Errors are measured on a small sample (probation.h), so bits move by QKV_BIT_SHARE of that, and within
// QKV_BIT_LOWER and QKV_BIT_HIGHER.
//
// Threads: pure functions.
#ifndef QKV_ENGINE_CODEC_BIT_BUDGET_H
#define QKV_ENGINE_CODEC_BIT_BUDGET_H

#include <stddef.h>
#include <stdint.h>

#define QKV_BIT_FALL 4.6
#define QKV_BIT_SHARE 0.4
#define QKV_BIT_LOWER (-1.0)
#define QKV_BIT_HIGHER 1.5

// One head's keys or values.
typedef struct qkv_bit_part {
  double error;   // squared, as above; 0: not measured, or dead
  double bits;    // that it was measured at
  double offset;  // what it gets, in bits
} qkv_bit_part;

// Fills the offsets, whose mean over all parts is `mean`; parts that were not measured get that.
void qkv_bit_budget(qkv_bit_part *parts, size_t count, double mean);

// What of an offset counts for a budget of `bits`: all of it from 2 bits on, none at 1: there a bit less costs more
// than a bit more gains (tinylm, 1 bit: twice the KL).
double qkv_bit_faded(double offset, double bits);

// To eighths of a bit, in order, so that their sums stay within half an eighth of the offsets'.
void qkv_bit_eighths(const qkv_bit_part *parts, size_t count, int8_t *eighths);

#endif
