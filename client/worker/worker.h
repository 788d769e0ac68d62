// qkv-worker: its commands' options and what they share.
#ifndef QKV_CLIENT_WORKER_WORKER_H
#define QKV_CLIENT_WORKER_WORKER_H

#include <stdbool.h>
#include <stdint.h>

#include "client/c/qkv.h"
#include "client/common/program.h"
#include "client/worker/lm.h"

typedef struct qkvi_worker {
  qkv_program program;          // first, as client/common/program.h wants it
  const char *model;            // a directory or a .gguf file
  int64_t threads;              // of the model's own arithmetic; 0: one for each processor
  const char *codec, *codec_v;  // NULL: not given
  double bits, bits_k, bits_v, max_attention_error;
  // generate
  const char *prompt;
  bool chat;
  int64_t tokens;  // calibrate, too
  const char *session;
  bool keep, compare;
  const char *durability;
  double temperature;
  int64_t seed;
  // score
  qkv_option_list texts;
  int64_t windows, prefill, length;
  const char *frame, *anchor;
  int64_t demote_after;
  double demote_bits;
  bool demote_even;
  bool untried;             // calibrate
  const char *calibration;  // a file
  // calibrate and dump, which have texts, too
  const char *output;
} qkvi_worker;

// The commands: `values` is a qkvi_worker. Each returns the exit status.
int qkvi_generate(void *values, const qkv_option_list *arguments);
int qkvi_score(void *values, const qkv_option_list *arguments);
int qkvi_calibrate(void *values, const qkv_option_list *arguments);
int qkvi_dump(void *values, const qkv_option_list *arguments);

// Loads the model.
qkv_status qkvi_worker_load(const qkvi_worker *worker, qkvi_lm **lm, qkv_error *error);
// Loads the model and connects to the daemon. From now on signals are caught (client/common/interrupt.h).
qkv_status qkvi_worker_setup(const qkvi_worker *worker, qkvi_lm **lm, qkv_client **client, qkv_error *error);
void qkvi_worker_teardown(qkvi_lm **lm, qkv_client **client);

#endif
