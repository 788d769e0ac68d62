// Rotary position embedding, as models define it: rows before RoPE to rows after it, and back.
//
// Fields and defaults are those of proto/qkv/v1/model.proto's Rope. Source: Su et al. (RoPE), and the scalings
// as Hugging Face transformers computes them (linear, dynamic NTK, YaRN, Llama 3).
#ifndef QKV_ENGINE_CODEC_ROPE_H
#define QKV_ENGINE_CODEC_ROPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"

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

// Fills in defaults (width, factors) and checks limits; `dim` is the width of the rows.
// INVALID_ARGUMENT "rope.width is 130, at most key_dim 128".
qkv_status qkv_rope_resolve(qkv_rope *rope, uint32_t dim, qkv_error *error);

// Rotates a row of at least rope->width floats to `position`, or back. The rope has been resolved. In double
// inside, so that large positions keep their phase. (YaRN's attention factor multiplies on the way forward and
// divides on the way back.)
void qkv_rope_forward(const qkv_rope *rope, float *row, uint64_t position);
void qkv_rope_inverse(const qkv_rope *rope, float *row, uint64_t position);

#endif
