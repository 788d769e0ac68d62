// Low-rank factors: a part U V^T of one head's keys or values of a page, in code space.
//
//   y_t = code_t + sum_i u_ti v_i
//
// Either fitted to the rows and taken off before they are coded (predictor), or fitted to what the coded rows miss
// (correction); a page does not say which, both are read alike. Nothing is rebuilt to attend:
//
//   q.y_t = q.code_t + sum_i (q.v_i) u_ti          sum_t w_t y_t = sum_t w_t code_t + sum_i (sum_t w_t u_ti) v_i
//
// The directory's low-rank byte (page.h) is the rank r, 0 to 16. A section, 16-byte aligned, K's before V's:
//
//   0               r x dim x i8      directions v_i
//   r x dim         r x 64 x i8       u_i, by slot; 0 for slots without a token
//   r x (dim + 64)  r x u8            scales
//   padded with zeros to a multiple of 16
//
// with u_ti v_ic = gain(scale_i) / 127^2 * i8 * i8, gain as in page.h. -128 is not written.
//
// Planes may be dropped and slots may be exchanged (with their u). What is missed then can be fitted anew, to the
// rows as they were decoded before less what the codes decode to now: qkv_low_rank_fit.
//
// Threads: pure functions. Stack: some rows.
#ifndef QKV_ENGINE_CODEC_LOW_RANK_H
#define QKV_ENGINE_CODEC_LOW_RANK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"
#include "engine/codec/page.h"

#define QKV_RANK_MAX 16
#define QKV_RANK_DEFAULT 4

// A section, found. Borrows the page's bytes.
typedef struct qkv_low_rank {
  uint8_t rank;
  uint16_t dim;
  const int8_t *directions;  // [rank][dim]
  const int8_t *factors;     // [rank][64]
  const uint8_t *scales;     // [rank]
} qkv_low_rank;

// ---- Bytes ----

size_t qkv_low_rank_bytes(size_t rank, size_t dim);

// Bytes from outside, of any alignment, that begin with a section (`bytes` is all there are, `tokens` the page's):
// DATA_LOSS with what is wrong, else `*used` is the section's length. Reads nothing beyond.
qkv_status qkv_low_rank_validate(uint8_t rank, const uint8_t *section, size_t bytes, uint32_t tokens, uint16_t dim,
                                 size_t *used, qkv_error *error);

// Finds the parts of a valid section; returns its length.
size_t qkv_low_rank_find(uint8_t rank, const uint8_t *section, uint16_t dim, qkv_low_rank *found);

// ---- Attending and decoding: all add ----

// scores[n][64]
void qkv_low_rank_scores(const qkv_low_rank *factors, const float *queries, size_t n, float *scores);
// sums[n][dim], from weights[n][64]
void qkv_low_rank_accumulate(const qkv_low_rank *factors, const float *weights, size_t n, float *sums);
// rows [64][dim], as decoded
void qkv_low_rank_rows(const qkv_low_rank *factors, float *rows);
// The other way: rows [64][dim] less the factors, one direction after the other.
void qkv_low_rank_subtract(const qkv_low_rank *factors, float *rows);

// ---- Encoding ----

// Fits factors to rows [tokens][dim], weights [dim] of squared errors or NULL, and writes the section of
// qkv_low_rank_bytes. Factors of a lower rank are the first ones of a higher. rank is 1 to QKV_RANK_MAX; `scratch`
// has qkv_low_rank_scratch_bytes(dim), 64-byte aligned.
void qkv_low_rank_fit(const float *rows, const float *weights, uint32_t tokens, uint16_t dim, uint8_t rank,
                      void *scratch, uint8_t *section);
size_t qkv_low_rank_scratch_bytes(size_t dim);

typedef enum qkv_low_rank_mode {
  QKV_LOW_RANK_OFF,
  QKV_LOW_RANK_PREDICTOR,
  QKV_LOW_RANK_CORRECTION,
  QKV_LOW_RANK_AUTO,
} qkv_low_rank_mode;

// "none", "predictor", "correction", "auto"; NULL for other values. And back: false for other names.
const char *qkv_low_rank_name(qkv_low_rank_mode mode);
bool qkv_low_rank_parse(const char *name, qkv_low_rank_mode *mode);

typedef struct qkv_low_rank_options {
  qkv_low_rank_mode mode;
  uint8_t rank;  // AUTO: the highest to try
} qkv_low_rank_options;

// What was chosen.
typedef struct qkv_low_rank_choice {
  qkv_low_rank_mode mode;  // OFF, PREDICTOR or CORRECTION
  uint8_t rank;            // for the directory; 0: none
  uint8_t tier;            // of all four groups
  size_t bytes;            // of the section
  double error;            // weighted, squared, of all rows together
} qkv_low_rank_choice;

// Factors where section and codes together take at most the bytes of the codes of tier `budget` >= 1: what the
// factors cost is paid for by a lower tier, and a rank that leaves none is lowered. AUTO takes the predictor of the
// rank up to options->rank that the singular values of the rows promise most of, if it errs less than no factors. It
// does not try corrections: wherever one paid at equal bytes the predictor of that rank did better (0 to 97 % of the
// energy in rank 1 to 4, 1 to 4 bits, 64 rows of 64: the predictor's error was 0.1 to 0.95 of the correction's).
//
// rows [64][dim], those from `tokens` on zeros, are what is left after anchors (not of a chain: factors for one are
// fitted to what it decodes to); in place, they become what the ordinary kernel has to encode at choice->tier.
void qkv_low_rank_choose(qkv_part part, const qkv_schedule *schedule, const float *weights, uint32_t tokens,
                         const qkv_low_rank_options *options, unsigned budget, void *scratch, float *rows,
                         uint8_t *section, qkv_low_rank_choice *choice);

#endif
