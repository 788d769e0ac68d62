// qkvctl's commands and what they share.
#ifndef QKV_CLIENT_CLI_CLI_H
#define QKV_CLIENT_CLI_CLI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "client/c/message.h"
#include "client/c/qkv.h"
#include "client/common/program.h"
#include "engine/base/option.h"
#include "engine/base/tensor.h"
#include "engine/codec/calibration.h"
#include "qkv/v1/model.pb-c.h"

// The values of all commands' options; each command's table says which it has.
typedef struct qkvctl_values {
  qkv_program program;
  bool metrics, options;                          // status
  const char *prefix, *tenant, *model, *session;  // sessions, load
  const char *output, *format;                    // fetch, calibrate
  const char *from;                               // calibrate: a dump
  const char *layers, *dtype;                     // fetch; layers: demote, promote, too
  int64_t begin, end;                             // fetch, demote, promote: positions
  bool heads_first, before_rope;                  // fetch
  const char *purpose;                            // load
  double bits_k, bits_v;                          // load
  double tier_bits;                               // load; below 0: the daemon's
  bool keep_full;                                 // load
  const char *durability;                         // load
  double bits;                                    // demote, promote
  bool even;                                      // demote
  bool map;                                       // session
} qkvctl_values;

// ---- connect.c ----

// Connects, or says why not and returns NULL. A daemon that does not answer is waited for a few seconds at most.
qkv_client *qkvctl_connect(const qkvctl_values *values);

// "12345" within [0, 2^63). INVALID_ARGUMENT names `what`.
qkv_status qkvctl_parse_position(const char *text, const char *what, uint64_t *position, qkv_error *error);

// ---- layers.c ----

// A list such as "0,2-5" of layers below `layers` into `chosen` (room for `layers`), in the order of their numbers
// and each once; NULL means all. INVALID_ARGUMENT for anything else.
qkv_status qkvctl_parse_layers(const char *text, uint32_t layers, uint32_t *chosen, size_t *count, qkv_error *error);

// ---- map.c ----

// Draws a session's tokens, layers x buckets, by their bits; as JSON lines with `--json`. Returns the exit status.
int qkvctl_draw_map(const qkvctl_values *values, qkv_client *client, const char *session);

// ---- learn.c ----

// A calibration of the model from a dump of its rows, with a progress bar; a reference for the caller.
// INVALID_ARGUMENT, NOT_FOUND, with the file's name: what is no dump, or none of this model; else NULL in
// *calibration.
qkv_status qkvctl_learn(const char *path, const Qkv__V1__Model *model, qkv_calibration **calibration,
                        qkv_error *error);

// ---- the commands: status.c, sessions.c, fetch.c, load.c, calibrate.c, tiers.c ----

int qkvctl_status(void *values, const qkv_option_list *arguments);
int qkvctl_models(void *values, const qkv_option_list *arguments);
int qkvctl_sessions(void *values, const qkv_option_list *arguments);
int qkvctl_session(void *values, const qkv_option_list *arguments);
int qkvctl_storage(void *values, const qkv_option_list *arguments);
int qkvctl_sink(void *values, const qkv_option_list *arguments);
int qkvctl_rm(void *values, const qkv_option_list *arguments);
int qkvctl_truncate(void *values, const qkv_option_list *arguments);
int qkvctl_fetch(void *values, const qkv_option_list *arguments);
int qkvctl_load(void *values, const qkv_option_list *arguments);
int qkvctl_demote(void *values, const qkv_option_list *arguments);
int qkvctl_promote(void *values, const qkv_option_list *arguments);
int qkvctl_calibrate(void *values, const qkv_option_list *arguments);

#endif
