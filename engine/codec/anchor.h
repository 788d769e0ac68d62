// Anchors: what one head's keys or values of a page are predicted by before they are coded, in code space.
//
//   none    y_t = code_t
//   mean    y_t = a + code_t                       a row for the page
//   group   y_t = a_g + code_t                     a row for each group of 16 slots
//   chain   y_t = y_(t-1) + code_t, or a_s + code_t where t begins a segment (delta anchoring, closed loop)
//
// Everything is linear, so nothing is rebuilt to attend:
//
//   mean, group   q.y_t = q.a + q.code_t           sum_t w_t y_t = (sum_t w_t) a + sum_t w_t code_t
//   chain         q.y_t = q.a_s + prefix sum       the codes get suffix sums of the weights, both within segments
//
// The directory's anchor byte (page.h) holds the kind in its low two bits, above them six bits u: a unit of half an
// octave, gain(4 u + 3) / 127 with gain(g) = 2^((g - 128) / 8) as in page.h. So a mean takes exactly dim bytes, one
// eighth of a bit a coordinate: with a scale in the section it would take two eighths. A section, 16-byte aligned,
// K's before V's, empty for none:
//
//   mean     0       dim x i8          value: int8 * unit
//   group    0   4 x dim x i8          of slots 0..15, 16..31, 32..47, 48..63
//   chain, u > 0: one segment
//            0       dim x i8
//   chain, u = 0: n > 1 segments
//            0       u64 mask          bit t: token t begins a segment; bit 0 is set; n = bits set
//            8       n x u8            scales
//            8 + n   n x dim x i8      value: int8 * gain(scale) / 127, 0 for scale 0
//   padded with zeros to a multiple of 16. An i8 of -128 is not written.
//
// What may be done to a page with an anchor:
//   mean, group   planes may be dropped, for each group apart. A mean also survives a change of slots, groups do not.
//   chain         all groups have the tier that the chain was coded with: an error in a code stays in all rows after
//                 it, which the encoder has allowed for (it coded the difference to what will be decoded), but not
//                 for bits dropped later. A chain goes to another tier by qkv_anchor_recode; what it loses is lost
//                 unless the page is kept in full elsewhere.
//
// Threads: pure functions. Stack: some rows.
#ifndef QKV_ENGINE_CODEC_ANCHOR_H
#define QKV_ENGINE_CODEC_ANCHOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"
#include "engine/codec/page.h"

typedef enum qkv_anchor_kind {
  QKV_ANCHOR_NONE,
  QKV_ANCHOR_MEAN,
  QKV_ANCHOR_GROUP,
  QKV_ANCHOR_CHAIN,
  QKV_ANCHOR_AUTO,  // as a policy: the kind with the least error. Not in pages.
} qkv_anchor_kind;

// The kind in a directory's anchor byte.
static inline qkv_anchor_kind qkv_anchor_kind_of(uint8_t byte) {
  return (qkv_anchor_kind)(byte & 3);
}

// "none", "mean", "group", "chain", "auto"; NULL for other values. And back: false for other names.
const char *qkv_anchor_name(qkv_anchor_kind kind);
bool qkv_anchor_parse(const char *name, qkv_anchor_kind *kind);

// A section, found. Borrows the page's bytes.
typedef struct qkv_anchor {
  qkv_anchor_kind kind;
  uint16_t dim;
  uint64_t starts;        // chain: the mask
  size_t count;           // of rows
  const int8_t *rows;     // [count][dim]
  const uint8_t *scales;  // [count], or NULL:
  float unit;             // the value of 1 in all rows
} qkv_anchor;

// ---- Bytes ----

// Bytes of a section with `count` rows: 1 of a mean, 4 of groups, 1 to 64 of a chain.
size_t qkv_anchor_bytes(qkv_anchor_kind kind, size_t count, size_t dim);
// The most that a section takes.
size_t qkv_anchor_bytes_max(size_t dim);

// Bytes from outside, of any alignment, that begin with a section (`bytes` is all there are, `tokens` the page's):
// DATA_LOSS with what is wrong, else `*used` is the section's length. Reads nothing beyond.
qkv_status qkv_anchor_validate(uint8_t byte, const uint8_t *section, size_t bytes, uint32_t tokens, uint16_t dim,
                               size_t *used, qkv_error *error);

// Finds the parts of a valid section; returns its length.
size_t qkv_anchor_find(uint8_t byte, const uint8_t *section, uint16_t dim, qkv_anchor *anchor);

// ---- Attending and decoding ----

// rows [count][dim] in code space: the anchor's own.
void qkv_anchor_values(const qkv_anchor *anchor, float *rows);

// scores[n][64], as the kernels give them (gain_t q.c(code_t)), become q.y_t. Slots without a token get any number.
void qkv_anchor_scores(const qkv_anchor *anchor, const float *queries, size_t n, float *scores);

// Adds what a mean contributes to sums[n][dim], totals[n] the sums of the weights.
void qkv_anchor_add_mean(const qkv_anchor *anchor, const float *totals, size_t n, float *sums);

// Adds what anchors contribute to sums[n][dim] and returns the weights [n][64] for the kernel that adds the codes:
// `weights` themselves, or for a chain `scratch` [n][64]. Weights of slots without a token must be 0.
const float *qkv_anchor_weights(const qkv_anchor *anchor, const float *weights, size_t n, float *scratch,
                                float *sums);

// rows [64][dim], as decoded from the codes, become y_t.
void qkv_anchor_rows(const qkv_anchor *anchor, float *rows);

// ---- Encoding ----

typedef struct qkv_anchor_options {
  qkv_anchor_kind kind;  // or AUTO
  // Of chains: rows after which a segment ends, 0: none but for
  uint32_t every;
  // a row whose difference to the one before is more than this part of its own norm; 0: off.
  float threshold;
} qkv_anchor_options;

// The rows of one head's K or V of one page.
typedef struct qkv_anchor_input {
  const qkv_schedule *schedule;
  const float *weights;  // [dim] of squared errors, or NULL: all 1
  const float *rows;     // [64][dim]; those from `tokens` on are not read
  uint32_t tokens;       // 1 to 64
} qkv_anchor_input;

// Anchors of a given kind, not AUTO. Writes the section (up to qkv_anchor_bytes_max) and `residual` [64][dim]: what
// the ordinary kernel has to encode, at `tier` if it is a chain; zeros for slots without a token. A chain begins at
// most `segments` (1 to 64) segments. Returns the directory's byte, `*bytes` the section's length.
uint8_t qkv_anchor_encode(const qkv_anchor_input *input, const qkv_anchor_options *options, unsigned tier,
                          size_t segments, uint8_t *section, size_t *bytes, float *residual);

// For a chain at another tier, errors weighted [dim] or NULL: decoded rows [64][dim] (qkv_anchor_rows) become the
// residual for the ordinary kernel at `tier`. The section stays as it is.
void qkv_anchor_recode(const qkv_anchor *anchor, const qkv_schedule *schedule, const float *weights, unsigned tier,
                       uint32_t tokens, float *rows);

// What was chosen.
typedef struct qkv_anchor_choice {
  uint8_t byte;  // for the directory
  uint8_t tier;  // of all four groups
  size_t bytes;  // of the section
  double error;  // weighted, squared, of all rows together, about
  // What is left, coded; in the scratch, until that is used for something else.
  const uint8_t *gains, *codes;
} qkv_anchor_choice;

// Anchors of options->kind, or for AUTO of the kind with the least error, where section and codes together take at
// most the bytes of the codes of tier `budget` (1 to QKV_TIER_MAX): what anchors cost is paid for by a lower tier. A
// kind that leaves no tier is replaced by none; a chain begins as many segments as it can pay for. AUTO codes the
// rows as they are and with a mean, and only where sums over the rows say that it may pay with group anchors or a
// chain, which is slow: row by row in the reference. Fills section and residual as qkv_anchor_encode. `scratch` has
// qkv_anchor_scratch_bytes, 64-byte aligned.
//
// On the rows of a small model (6 layers, 2 heads of 64), squared error of AUTO as a part of none's at equal bytes:
//   bits                          0.75  1.1   1.5   2     2.5   3     4
//   keys as attended, Hadamard    0.73  0.70  0.72  0.79  0.72  0.80  0.81   5 of 6 pages; from 2.5 bits chains, too
//   values, Hadamard              1.00  0.99  1.00  1.00  1.00  1.00  1.00
void qkv_anchor_choose(qkv_part part, const qkv_anchor_input *input, const qkv_anchor_options *options,
                       unsigned budget, void *scratch, uint8_t *section, float *residual, qkv_anchor_choice *choice);
size_t qkv_anchor_scratch_bytes(size_t dim);

#endif
