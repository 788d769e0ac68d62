// Rotary position embedding, as models define it: rows before RoPE to rows after it, and back.
//
// Fields and defaults are those of proto/qkv/v1/model.proto's Rope. Source: Su et al. (RoPE), and the scalings
// as Hugging Face transformers computes them (linear, dynamic NTK, YaRN, Llama 3).
//
// Dynamic NTK takes its base from the length. Here every row is rotated with the base of its own position + 1, as a
// decode loop of transformers rotates it; a prompt that goes through transformers in one pass gets one base for all
// of its rows, that of the pass's length. A client that needs those rows sends them rotated.
#ifndef QKV_ENGINE_CODEC_ROPE_H
#define QKV_ENGINE_CODEC_ROPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"
#include "engine/codec/schedule.h"

typedef enum qkv_rope_scaling {
  QKV_ROPE_NONE,
  QKV_ROPE_LINEAR,
  QKV_ROPE_DYNAMIC,
  QKV_ROPE_YARN,
  QKV_ROPE_LLAMA3
} qkv_rope_scaling;

typedef struct qkv_rope {
  double theta;      // 0: no RoPE, rows are left as they are
  uint32_t width;    // coordinates that turn, even; 0 until qkv_rope_resolve
  bool interleaved;  // pairs (2i, 2i+1) instead of (i, i + width/2)
  qkv_rope_scaling scaling;
  double factor;
  uint64_t original_max_position;
  double low_freq_factor, high_freq_factor;
  double beta_fast, beta_slow;
  double attention_factor;
} qkv_rope;

// Every factor lies within these (`factor` itself is at least 1), so that angles and rows stay finite.
#define QKV_ROPE_FACTOR_MIN 1e-6
#define QKV_ROPE_FACTOR_MAX 1e6
#define QKV_ROPE_THETA_MAX 1e12
#define QKV_ROPE_TRAINED_MAX ((uint64_t)1 << 53)  // of original_max_position

// Fills in defaults (width, factors), checks limits and clears what the scaling does not use, so that equal
// ropes are equal in every field; `dim` is the width of the rows. On failure `rope` is undefined.
// INVALID_ARGUMENT "rope.width is 130, at most key_dim 128".
qkv_status qkv_rope_resolve(qkv_rope *rope, uint32_t dim, qkv_error *error);

// Rotates a row of at least rope->width floats to `position`, or back. The rope has been resolved. In double
// inside, so that large positions keep their phase. (YaRN's attention factor multiplies on the way forward and
// divides on the way back.)
void qkv_rope_forward(const qkv_rope *rope, float *row, uint64_t position);
void qkv_rope_inverse(const qkv_rope *rope, float *row, uint64_t position);

// Forward again, for some rows at one position; of a rope with a theta.
typedef struct qkv_rope_turns {
  double cosines[QKV_DIM_MAX / 2], sines[QKV_DIM_MAX / 2];
} qkv_rope_turns;
void qkv_rope_find_turns(const qkv_rope *rope, uint64_t position, qkv_rope_turns *turns);
void qkv_rope_turn(const qkv_rope *rope, const qkv_rope_turns *turns, float *row);

// Radians per position of a pair of coordinates, for rows at `position`; where the rope is steady, the same at all.
double qkv_rope_frequency(const qkv_rope *rope, uint64_t position, uint32_t pair);
// Whether frequencies are the same for all positions below `end`: dynamic NTK changes them beyond the trained length.
bool qkv_rope_steady(const qkv_rope *rope, uint64_t end);
// What rotating forward multiplies a row's length by: 1 but for YaRN.
double qkv_rope_magnitude(const qkv_rope *rope);
// Where the two coordinates of a pair lie in a row.
static inline uint32_t qkv_rope_first(const qkv_rope *rope, uint32_t pair) {
  return rope->interleaved ? 2 * pair : pair;
}
static inline uint32_t qkv_rope_second(const qkv_rope *rope, uint32_t pair) {
  return rope->interleaved ? 2 * pair + 1 : pair + rope->width / 2;
}

#endif
