// A session on its way into a daemon as pages, from another daemon (copy.c) or from a file (session_file.h).
//
// The target has the model registered, or gets it; the session is opened, or goes on where an earlier try has ended.
// Pages are sent as they are. A calibration that the daemon lacks is asked of the source and brought once.
//
// Threads: used by the program's main thread.
#ifndef QKV_CLIENT_CLI_TARGET_H
#define QKV_CLIENT_CLI_TARGET_H

#include <stdbool.h>
#include <stdint.h>

#include "client/c/qkv.h"
#include "qkv/v1/kv_cache.pb-c.h"

typedef struct qkvctl_target qkvctl_target;

// What the session is made of; borrowed as long as the target.
typedef struct qkvctl_target_config {
  qkv_client *client;
  const char *session;               // its name there
  const Qkv__V1__Model *model;       // as GetModel answers it
  const Qkv__V1__SessionInfo *info;  // as GetSession answers it, of the session that it becomes
  int durability;                    // as in qkv_session_options
  const char *salt;                  // of the session where it is opened; NULL: none
  // Token ids of positions 0 to token_count, which go along with pages and rows where the session there has the same
  // prefix_root as `info`: otherwise prompts would find it that did not find the source. NULL: none.
  const uint32_t *token_ids;
  size_t token_count;
  // The bytes of a calibration of the model, malloc'd.
  qkv_code (*calibration)(void *context, uint32_t version, uint8_t **bytes, size_t *count, qkv_call_error *error);
  // Gives what the source has of a layer's positions [begin, end), as qkv_client_fetch_pages does.
  qkv_code (*rows)(void *context, uint32_t layer, uint64_t begin, uint64_t end, const qkv_client_coded_receiver *to,
                   qkv_call_error *error);
  void *context;
} qkvctl_target_config;

// Registers the model and opens the session where they are not there. ALREADY_EXISTS: the target has another model,
// or another session, of the name. FAILED_PRECONDITION: a session of other tokens (held.h). `*out` is NULL on
// failure.
qkv_code qkvctl_target_open(const qkvctl_target_config *config, qkvctl_target **out, qkv_call_error *error);
void qkvctl_target_close(qkvctl_target **target);

// The next position of a layer there.
uint64_t qkvctl_target_length(const qkvctl_target *target, uint32_t layer);
// Takes a page, or exact rows behind the layer's last page. Pages are sent some MiB at a time; flush sends the rest.
qkv_code qkvctl_target_page(qkvctl_target *target, const qkv_client_page *page, qkv_call_error *error);
qkv_code qkvctl_target_rows(qkvctl_target *target, const qkv_client_rows *given, qkv_call_error *error);
qkv_code qkvctl_target_flush(qkvctl_target *target, qkv_call_error *error);

typedef struct qkvctl_target_totals {
  uint64_t tokens;  // over all layers
  uint64_t pages, bytes;
} qkvctl_target_totals;
qkvctl_target_totals qkvctl_target_totals_of(const qkvctl_target *target);  // sent by now

#endif
