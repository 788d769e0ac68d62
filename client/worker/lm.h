// A byte-level language model of the Llama family: its geometry and its weights in fp32.
//
// Read from a directory as Hugging Face lays one out: config.json and model.safetensors (F32, F16 or BF16,
// matrices row-major [out, in]). A token is a byte.
//
// Threads: read-only once loaded.
#ifndef QKV_CLIENT_WORKER_LM_H
#define QKV_CLIENT_WORKER_LM_H

#include <stdint.h>

#include "engine/base/status.h"

#define QKVI_LM_VOCABULARY 256

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
  char name[129];  // the directory's last part
  int64_t layers, hidden, ffn;
  int64_t q_heads, kv_heads, head_dim;
  int64_t context;  // tokens it was trained on
  double rope_theta, norm_epsilon;
  const float *embedding;  // [256, hidden]
  const float *norm;       // [hidden]
  const float *head;       // [256, hidden]
  qkvi_lm_layer *layer;    // [layers]
  float *weights;          // what the pointers above point into
} qkvi_lm;

// NOT_FOUND for a file that is not there, INVALID_ARGUMENT, naming file and field, for a model of another kind.
// On failure *lm is NULL.
qkv_status qkvi_lm_load(const char *directory, qkvi_lm **lm, qkv_error *error);
// Clears *lm.
void qkvi_lm_free(qkvi_lm **lm);

#endif
