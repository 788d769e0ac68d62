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
#include "qkv/v1/kv_cache.pb-c.h"

// The values of all commands' options; each command's table says which it has.
typedef struct qkvctl_values {
  qkv_program program;
  const char *prefix, *model, *session;                                        // sessions, load
  const char *output, *format;                                                 // fetch, calibrate
  const char *from;                                                            // calibrate: a dump
  const char *layers, *dtype;                                                  // fetch; layers: demote, promote, too
  const char *purpose, *durability;                                            // load
  const char *tokens, *salt;                                                   // match, with model; copy
  const char *to;                                                              // copy: an address
  int64_t position;                                                            // fork
  int64_t begin, end;                                                          // fetch, demote, promote: positions
  double bits_k, bits_v;                                                       // load
  double tier_bits;                                                            // load; below 0: the daemon's
  double bits;                                                                 // demote, promote, size
  const char *codec;                                                           // size
  int64_t model_layers, kv_heads, q_heads, key_dim, value_dim, recent_window;  // size; -1 and 0: not given
  int64_t token_count, session_count;                                          // size
  double append_rate, step_rate;                                               // size: a second
  const char *roles, *expires;                                                 // token
  int64_t grace, notice;                                                       // drain; ms
  bool wait;                                                                   // drain
  bool metrics, options;                                                       // status
  bool heads_first, before_rope, coded;                                        // fetch
  bool keep_full;                                                              // load
  bool even;                                                                   // demote
  bool touch;                                                                  // has
  bool ids;                                                                    // watch
  bool evict;                                                                  // load, put-object
  bool replace;                                                                // put-object
  bool map;                                                                    // session
} qkvctl_values;

// ---- connect.c ----

// Connects, or says why not and returns NULL. A daemon that does not answer is waited for a few seconds at most.
qkv_client *qkvctl_connect(const qkvctl_values *values);

// The next page of a list: its token takes the place of the one that this page was asked with. QKV_EXIT_OK, or what
// has been said of a token that is too long, or the same again, which would never end.
enum { QKVCTL_PAGE_TOKEN_BYTES = 1024 };
int qkvctl_next_page(const char *next, char token[QKVCTL_PAGE_TOKEN_BYTES]);

// "12345" within [0, 2^63). INVALID_ARGUMENT names `what`.
qkv_status qkvctl_parse_position(const char *text, const char *what, uint64_t *position, qkv_error *error);

// ---- layers.c ----

// A list such as "0,2-5" of layers below `layers` into `chosen` (capacity `layers`), in the order of their numbers
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

// ---- copy.c: a session to be moved (client/c/codes.h) ----

// The token ids that the session has, from position 0 on: `*ids` (at first NULL) and `*count` (0) grow; the caller
// frees `*ids`, on failure, too.
qkv_code qkvctl_source_ids(qkv_client *client, const char *session, uint32_t **ids, size_t *count,
                           qkv_call_error *error);
// The bytes of a calibration of the model, malloc'd.
qkv_code qkvctl_source_calibration(qkv_client *client, const char *model, uint32_t version, uint8_t **bytes,
                                   size_t *count, qkv_call_error *error);

// ---- target.c: what copy and load have in common ----

// CANCELLED where a signal has come (client/common/interrupt.h).
qkv_code qkvctl_interrupted(qkv_call_error *error);
// Says why a session is incomplete, and that the same command goes on; the exit status.
int qkvctl_incomplete(const qkv_call_error *error, const char *session);

// ---- pages.c: parts of fetch and load; the exit status ----

int qkvctl_fetch_coded(const qkvctl_values *values, const char *session);
int qkvctl_load_coded(const qkvctl_values *values, const char *path);

// ---- the commands: status.c, sessions.c, has.c, objects.c, fetch.c, load.c, calibrate.c, tiers.c, match.c ----

int qkvctl_status(void *values, const qkv_option_list *arguments);
int qkvctl_models(void *values, const qkv_option_list *arguments);
int qkvctl_share(void *values, const qkv_option_list *arguments);
int qkvctl_unshare(void *values, const qkv_option_list *arguments);
int qkvctl_sessions(void *values, const qkv_option_list *arguments);
int qkvctl_session(void *values, const qkv_option_list *arguments);
int qkvctl_watch(void *values, const qkv_option_list *arguments);
int qkvctl_has(void *values, const qkv_option_list *arguments);
int qkvctl_objects(void *values, const qkv_option_list *arguments);
int qkvctl_put_object(void *values, const qkv_option_list *arguments);
int qkvctl_get_object(void *values, const qkv_option_list *arguments);
int qkvctl_rm_object(void *values, const qkv_option_list *arguments);
int qkvctl_storage(void *values, const qkv_option_list *arguments);
int qkvctl_sink(void *values, const qkv_option_list *arguments);
int qkvctl_rm(void *values, const qkv_option_list *arguments);
int qkvctl_size(void *values, const qkv_option_list *arguments);
int qkvctl_drain(void *values, const qkv_option_list *arguments);
int qkvctl_quota(void *values, const qkv_option_list *arguments);
int qkvctl_token(void *values, const qkv_option_list *arguments);
int qkvctl_fork(void *values, const qkv_option_list *arguments);
int qkvctl_truncate(void *values, const qkv_option_list *arguments);
int qkvctl_fetch(void *values, const qkv_option_list *arguments);
int qkvctl_load(void *values, const qkv_option_list *arguments);
int qkvctl_copy(void *values, const qkv_option_list *arguments);
int qkvctl_compare(void *values, const qkv_option_list *arguments);
int qkvctl_demote(void *values, const qkv_option_list *arguments);
int qkvctl_promote(void *values, const qkv_option_list *arguments);
int qkvctl_match(void *values, const qkv_option_list *arguments);
int qkvctl_calibrate(void *values, const qkv_option_list *arguments);

#endif
