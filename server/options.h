// The daemon's options: the values, and the table that fills them (engine/base/option.h).
#ifndef QKV_SERVER_OPTIONS_H
#define QKV_SERVER_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/heap.h"
#include "engine/base/log.h"
#include "engine/base/option.h"
#include "engine/cache/model.h"
#include "engine/cache/retier.h"
#include "engine/cache/session.h"

typedef struct qkv_server_options {
  qkv_option_list listen;                          // "unix:PATH" or "HOST:PORT"
  const char *admin_listen;                        // the same for HTTP, or NULL
  const char *config;                              // YAML file, or NULL
  const char *listen_mode;                         // of the files of unix sockets, octal
  const char *tls_cert, *tls_key, *tls_client_ca;  // PEM files, or NULL
  const char *auth_file;                           // or NULL
  const char *jwks, *jwt_issuer, *jwt_audience;    // all or none
  const char *quota_file;                          // or NULL
  const char *allow_anonymous;                     // "unix", "all" or NULL
  int64_t memory_budget;                           // bytes of KV and of the sessions themselves
  int64_t gpu_memory;                              // bytes; 0: no GPU is used
  qkv_option_list gpu_devices;                     // their numbers or UUIDs, or "all"
  const char *gpu_kernels;                         // or NULL
  const char *huge_pages;
  const char *numa;
  int64_t threads;               // of the compute pool; 0 on the command line becomes the number of cores
  int64_t rpc_threads;           // completion queues
  int64_t limit_message;         // bytes of one request message
  int64_t limit_response_bytes;  // bytes of results and rows that are being sent
  int64_t limit_items;           // of one request
  int64_t limit_sessions;        // open at once
  int64_t limit_objects;         // held
  int64_t limit_object_bytes;    // of one
  int64_t limit_models;          // registered
  int64_t limit_prefixes;        // pages of 64 token ids that are indexed
  int64_t limit_calls;           // running at once
  int64_t limit_control_calls;   // running at once, of health checks and Admin
  int64_t limit_connection_calls;
  int64_t limit_tenant_calls;                        // 0: three times as many as are free
  int64_t limit_first_message;                       // ms; 0: for ever
  int64_t limit_unread_response, limit_idle_stream;  // ms; 0: for ever
  int64_t limit_connections, limit_peer_connections, limit_control_frames;
  int64_t limit_watchers;       // Watch calls
  int64_t limit_client_shm;     // regions of clients' shared memory
  int64_t limit_metric_labels;  // tenants, and models, that metrics name
  int64_t limit_queue;          // jobs that wait for the compute pool
  const char *codec;            // what sessions and models fall back to
  const char *codec_v;          // of values; NULL: codec
  const char *archive_codec;    // of sessions that are fetched (qkv_store_open)
  double bits;                  // per coordinate, the same; 0: the codec's default
  double bits_k, bits_v;        // the same for one of the two; 0: `bits`
  int64_t sink_tokens;          // first tokens kept as outliers, the same
  int64_t recent_window;        // tokens kept exact, the same
  const char *anchor;           // what rows are predicted by, the same
  int64_t anchor_every;         // of chains
  double anchor_threshold;      // of chains
  const char *low_rank;         // low-rank factors that sessions and models fall back to
  int64_t rank;
  qkv_option_list calibration;     // "MODEL=FILE"
  int64_t calibrate_tokens;        // after which models are calibrated from their traffic; 0: never
  qkv_option_list calibrate_skip;  // tenants that do not teach calibrations
  const char *data_dir;            // of the SSD tier, or NULL
  const char *durability;          // of sessions that do not say; NULL: async with a data_dir, else memory
  const char *retention;           // of sessions and objects that do not say: keep or evict
  const char *storage_io;          // auto, uring or pread
  int64_t storage_budget;          // bytes on the disk; 0: what follows from its file system
  int64_t storage_segment;         // bytes of a file
  int64_t storage_dirty;           // bytes that wait to be written
  int64_t fold_after;              // ms; 0: never
  int64_t storage_read_ahead;      // bytes; 0: nothing
  int64_t storage_compact_rate;    // bytes a second; 0: never
  double ema_alpha;                // of the averages of attention
  int64_t ema_every;               // blocks of queries of which one is counted; 0: none is
  double tier_bits;                // average that the background brings sessions to; 0: none
  const char *tier_thresholds;     // "HI,MID,LO", or NULL
  int64_t tier_sinks;              // first tokens that the background leaves alone
  int64_t tier_pages;              // that the background changes at once
  double memory_high, memory_low;  // parts of memory_budget
  int64_t drain_grace;             // ms
  int64_t drain_notice;            // ms
  qkv_option_list cpu_mask;        // processor features that may be used; none given: all
  const char *log_level;
  const char *audit_log;  // or NULL
  int64_t slow_call;      // ms; 0: none is reported
  bool pin_threads;
  bool gqa_compensation;
  bool trust_calibration;  // those of `calibration` are neither tried nor withdrawn
  bool keep_full;          // pages that go to lower tiers stay in full as well
  bool separate_appends;   // pages of tokens that other sessions hold are coded again
  bool allow_client_shm;   // clients of unix sockets may register regions of shared memory
  const char *shm_listen;  // where descriptors of such memory are passed, or NULL
  bool discard;            // appended rows are checked, acknowledged and dropped
  bool admin_auth;         // requests there need a token
  bool admin_tls;          // it is encrypted
  bool admin_anonymous;    // that address may be reachable by other machines
  bool check_health;
  bool print_options, print_metrics, help, version;
} qkv_server_options;

extern const qkv_option qkv_server_option_table[];
extern const size_t qkv_server_option_count;

// Reads arguments, environment and the configuration file into `values` and checks what no row can check by
// itself. On failure *set holds what has been read so far. The set owns the values' strings.
qkv_status qkv_server_options_read(int argc, char **argv, qkv_server_options *values, qkv_options **set,
                                   qkv_error *error);

// The level that `log-level` names. This and the following take options that have been checked.
qkv_log_level qkv_server_options_log_level(const qkv_server_options *values);

// The mode that `listen-mode` says.
unsigned qkv_server_options_listen_mode(const qkv_server_options *values);

// The features that `cpu-mask` names.
uint32_t qkv_server_options_cpu_mask(const qkv_server_options *values);

// The policy of background tiering (server/retier.h). `bits` is `tier-bits`.
qkv_retier_policy qkv_server_options_retier(const qkv_server_options *values);

// What models and sessions fall back to.
qkv_policy qkv_server_options_policy(const qkv_server_options *values);

// Of sessions that are fetched (qkv_store_open); NULL: that of the policy.
const qkv_codec *qkv_server_options_archive_codec(const qkv_server_options *values);

// The heap that keys and values lie in.
qkv_heap_config qkv_server_options_heap(const qkv_server_options *values);

// The durability of sessions that do not set one.
qkv_durability qkv_server_options_durability(const qkv_server_options *values);

// The most that one tenant without a quota may have of what `limit` counts: three quarters, so that one tenant alone
// cannot keep out all others. Without an auth-file any client can call itself any tenant, and all is one tenant's.
int64_t qkv_server_options_tenant_part(const qkv_server_options *values, int64_t limit);

// Whether sessions and objects that set no retention may be evicted.
bool qkv_server_options_evict(const qkv_server_options *values);

// Sessions of tenants that `calibrate-skip` names do not teach.
void qkv_server_options_keep_out(const qkv_server_options *values, const char *tenant, qkv_policy *policy);

#endif
