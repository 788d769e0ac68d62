// The cache in the daemon: one session, which takes the rows and answers the queries.
//
// Threads: one at a time for each session.
#ifndef QKV_CLIENT_WORKER_REMOTE_H
#define QKV_CLIENT_WORKER_REMOTE_H

#include <stdbool.h>

#include "client/c/qkv.h"
#include "client/worker/figures.h"
#include "client/worker/kv.h"
#include "client/worker/lm.h"

typedef struct qkvi_remote qkvi_remote;

// A session's name that nobody else has, "PROGRAM-4711-9f86d081884c7d65": the process and random bits. Process ids
// alone are not enough: containers share them, and a run that was killed leaves its session open.
enum { QKVI_REMOTE_NAME_MAX = 64 };
void qkvi_remote_name(const char *program, char name[QKVI_REMOTE_NAME_MAX]);

typedef struct qkvi_remote_options {
  const char *session;
  const char *codec, *codec_v;  // NULL: the daemon's
  double bits_k, bits_v;        // 0: the daemon's
  int64_t recent_window;        // tokens; -1: the daemon's
  int purpose;                  // as in qkv_session_options
  double max_attention_error;
  int durability;           // as in qkv_session_options
  const char *anchor;       // its kind; NULL: the daemon's
  const void *calibration;  // a file's bytes for the model; NULL: none
  size_t calibration_bytes;
  int precision;  // of attention, as in qkv_client_attend_options
} qkvi_remote_options;

// Registers the model under its name and opens the session. Client and lm are borrowed.
qkv_status qkvi_remote_open(qkv_client *client, const qkvi_lm *lm, const qkvi_remote_options *options,
                            qkvi_remote **remote, qkv_error *error);
// Closes the session unless it is to be kept, and clears *remote in any case.
qkv_status qkvi_remote_close(qkvi_remote **remote, bool keep, qkv_error *error);

// The cache for a forward pass: step() sends keys, values and queries of a layer in one message of a decode
// stream and waits for the answer.
qkvi_kv *qkvi_remote_kv(qkvi_remote *remote);

// Rows into a layer; rows->q is not looked at.
qkv_status qkvi_remote_append(qkvi_remote *remote, const qkvi_kv_rows *rows, qkv_error *error);
// A partial attention of rows->q over what the session holds: out [tokens, q_heads, head_dim], lse [tokens,
// q_heads]. One unary call.
qkv_status qkvi_remote_attend(qkvi_remote *remote, const qkvi_kv_rows *rows, float *out, float *lse,
                              qkv_error *error);

// How far the rows of a layer that the daemon has are from those given, keys and values: adds squared differences to
// error[2], squares of the given rows to square[2]. rows->q is not looked at; rows->tokens is all that the session
// holds from rows->position on.
qkv_status qkvi_remote_compare(qkvi_remote *remote, const qkvi_kv_rows *rows, double error[2], double square[2],
                               qkv_error *why);

// Drops planes of what is coded: to an average of `bits`, by attention, or with `even` to `bits` at most for all.
qkv_status qkvi_remote_demote(qkvi_remote *remote, double bits, bool even, qkv_error *error);

// `info->lengths` and `info->durable` are left NULL.
qkv_status qkvi_remote_info(qkvi_remote *remote, qkv_client_session_info *info, qkv_error *error);

// Every attend call's time as the worker sees it, in microseconds, goes here from now on; NULL: nowhere.
void qkvi_remote_measure(qkvi_remote *remote, qkvi_samples *attend_us);

// libqkv's error in the words of engine/base/status.h. Returns error->status.
qkv_status qkvi_remote_failed(const qkv_call_error *call, qkv_error *error);

#endif
