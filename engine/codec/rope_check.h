// Checks, from keys after RoPE, whether they were turned by the RoPE that the model declares.
//
// Before RoPE a head's keys lie about a mean and in few directions; turned by anything else they are smeared. What is
// compared is the volume of their covariance, ln det C a coordinate, of keys that are turned back by
//
//   the declared rope, the other pairing, the usual bases in both pairings, and not at all
//
// which is the same for all of them where rows have no structure, since turning preserves it. Measured on 3 pages of
// prose (tests/engine/codec/rope_check_test.c makes similar rows; mean over all heads, half pairs unless "i",
// declared ones marked):
//
//                              1e4      1e5      5e5      1e6      1e4 i    1e5 i    none
//   tinylm                     -3.88 *  -2.08    -1.92    -1.88    -1.13    -1.26    -1.58
//   SmolLM2-135M-Instruct      -2.27    -2.96 *  -2.49    -2.41    -1.60    -1.72    -2.01
//
// So an alternative is reported that is lower by QKV_ROPE_CHECK_MARGIN, and so in QKV_ROPE_CHECK_HEADS of the heads.
// Bases that are not usual are not found, nor is a wrong width; but the declared one is compared whatever it is.
//
// Cost: for each head 13 covariances and Cholesky decompositions of the rope's width.
//
// Threads: one at a time.
#ifndef QKV_ENGINE_CODEC_ROPE_CHECK_H
#define QKV_ENGINE_CODEC_ROPE_CHECK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/codec/rope.h"

#define QKV_ROPE_CHECK_MARGIN 0.25  // of ln det C a coordinate
#define QKV_ROPE_CHECK_HEADS 0.75   // share
#define QKV_ROPE_CHECK_CANDIDATES 15

typedef struct qkv_rope_check {
  uint32_t key_dim;
  size_t count;  // of the next; the first one is as declared
  qkv_rope ropes[QKV_ROPE_CHECK_CANDIDATES];
  double volumes[QKV_ROPE_CHECK_CANDIDATES];  // sums over heads
  size_t lower[QKV_ROPE_CHECK_CANDIDATES];    // heads in which it is below the declared one by the margin
  size_t heads;
} qkv_rope_check;

// The rope is resolved; theta 0: the model has none.
void qkv_rope_check_init(qkv_rope_check *check, const qkv_rope *declared, uint32_t key_dim);
// One head's keys as attended, `rows` of them, `stride` floats from one to the next, at these positions.
void qkv_rope_check_add(qkv_rope_check *check, const float *k, size_t stride, const uint64_t *positions, size_t rows);
// Whether an alternative is clearly better; `text` gets which one.
bool qkv_rope_check_doubts(const qkv_rope_check *check, char *text, size_t size);

#endif
