// A language model of the Llama family: its geometry, its weights in fp32 and its tokenizer.
//
// Read from a directory as Hugging Face lays one out, config.json and model.safetensors (F32, F16 or BF16, matrices
// row-major [out, in]), whose tokens are bytes; or from a .gguf file of llama.cpp's with a byte-level BPE. Quantized
// weights become fp32 as they are: what they give is the exact model.
//
// llama.cpp orders the rows of Q and K of each head so that RoPE turns neighbours, 2 i with 2 i + 1. They are brought
// back at load: RoPE turns coordinate i with i + head_dim / 2, whatever the model came from.
//
// Threads: read-only once loaded.
#ifndef QKV_CLIENT_WORKER_LM_H
#define QKV_CLIENT_WORKER_LM_H

#include <stdint.h>

#include "client/worker/tokenizer.h"
#include "engine/base/status.h"

typedef struct qkvi_lm_layer {
  const float *attention_norm;  // [hidden]
  const float *wq;              // [q_heads * head_dim, hidden]
  const float *wk, *wv;         // [kv_heads * head_dim, hidden]
  const float *wo;              // [hidden, q_heads * head_dim]
  const float *mlp_norm;        // [hidden]
  const float *gate, *up;       // [ffn, hidden]
  const float *down;            // [hidden, ffn]
} qkvi_lm_layer;

typedef struct qkvi_lm {
  char name[129];  // the path's last part, without ".gguf"
  int64_t layers, hidden, ffn;
  int64_t q_heads, kv_heads, head_dim;
  int64_t vocabulary;  // tokens are below
  int64_t context;     // tokens it was trained on
  double rope_theta, norm_epsilon;
  const float *embedding;  // [vocabulary, hidden]
  const float *norm;       // [hidden]
  const float *head;       // [vocabulary, hidden]; the embedding itself where the two are tied
  qkvi_lm_layer *layer;    // [layers]
  float *weights;          // what the pointers above point into
  qkvi_tokenizer *tokenizer;
} qkvi_lm;

// A directory, or a file whose name ends in ".gguf". NOT_FOUND for a file that is not there, INVALID_ARGUMENT, naming
// file and field, for a model of another kind. On failure *lm is NULL.
qkv_status qkvi_lm_load(const char *path, qkvi_lm **lm, qkv_error *error);
// Clears *lm.
void qkvi_lm_free(qkvi_lm **lm);

#endif
