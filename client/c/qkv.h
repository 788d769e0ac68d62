// libqkv: a C client of the KV cache server qkvd.
//
// One header, one library. A client is a connection; calls block until the daemon has answered or the deadline
// has passed. Tensors are sent from where they lie and received into memory that the caller frees with
// qkv_free or gives itself. Every call that can fail returns a status and fills an error text that names
// the field, the value and the limit.
//
//   qkv_client *client; qkv_call_error error;
//   qkv_client_connect("unix:/run/qkvd.sock", NULL, &client, &error);
//   qkv_client_open_session(client, &(qkv_session_options){.session = "s", .model = "m"}, &error);
//   qkv_client_append(client, &item, 1, NULL, &error);
//   qkv_client_attend(client, &query, 1, &result, &error);
//   qkv_client_close(&client);
//
// Time: a call that is not answered in time is cancelled and gives DEADLINE_EXCEEDED. Where the daemon has stopped
// reading in the middle of the caller's rows, that alone would not give the memory back, so the connection is cut:
// a decode stream that is open on the same client ends with it (UNAVAILABLE). The next call connects anew.
//
// Memory: the first client has glibc's malloc keep up to 16 MiB of freed memory at the end of each arena, as it does
// by itself once a program has freed a block of 8 MiB. Where M_TRIM_THRESHOLD or M_MMAP_THRESHOLD are set, they
// count.
//
// Versions: until there is a release, structs grow and functions change: a program is built with the header of the
// library that it runs with. From the first release on, what is declared here keeps its form as long as libqkv.so
// keeps its number.
//
// Threads: a client is used by one thread at a time; different clients are independent. A function that a call is
// given, for rows or other parts of an answer, does not use the client of that call. A child of fork() uses no client
// of its parent's, and makes none where the parent has had one: gRPC's threads stay behind.
#ifndef QKV_CLIENT_C_QKV_H
#define QKV_CLIENT_C_QKV_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// gRPC status codes; 0 is ok. Names as in proto/qkv/v1/kv_cache.proto: 3 INVALID_ARGUMENT, 5 NOT_FOUND, ...
typedef int qkv_code;

typedef struct qkv_call_error {
  qkv_code code;
  char text[512];  // "" when ok
} qkv_call_error;

typedef struct qkv_client qkv_client;

typedef struct qkv_client_options {
  // Of every call, and before that of connecting anew; of each step of a decode stream, each response of a fetch.
  // Times longer than INT32_MAX ms, 24 days, are that long.
  int64_t timeout_ms;          // 0: 60000
  int64_t connect_timeout_ms;  // of qkv_client_connect; 0: timeout_ms
  int64_t message_bytes_max;   // of a response; 0: 256 MiB
  const char *tenant;          // whose sessions all calls mean by their names (docs/tenants.md); NULL: "default"
  // TLS to HOST:PORT, not to unix:PATH (docs/security.md). PEM files, read by qkv_client_connect.
  const char *tls_ca;              // authorities of the daemon's certificate; NULL: no TLS
  const char *tls_cert, *tls_key;  // of this client, where the daemon asks for them; NULL: none
  const char *token;               // bearer token of every call; NULL: none
  // The same from a file, which is read by qkv_client_connect, and again by calls within a second of its renewal;
  // NULL: none.
  const char *token_file;
  const char *placement;  // label that replaces the names of sessions where a daemon is chosen; NULL: none
} qkv_client_options;

// Several daemons: where a target is a list ("a:7580,b:7580"), each session and object belongs to one of them, by its
// name (rendezvous hashing; every client must give the targets in the same words). The items of a batch go to their
// owners at once and the answers are merged; a batch's call has failed where all of its daemons have. An owner that
// does not answer a health check with SERVING is left out: the call under way fails (UNAVAILABLE), the next one asks
// it, for a second at most, and then a thread does. Calls of its sessions go to the next daemon, which does not know
// them (NOT_FOUND), until it is back. Sessions that others own stay where they are. Models are registered with all
// daemons, and again with one that comes back. The longest prefix of all is matched. FAILED_PRECONDITION: a fork
// whose name another daemon owns, and what is no session's: watch, calibrations, qkv_client_call. With `placement`
// all calls go to the label's owner, these included.
//
// Every call has its session's name, or the label, as the metadata x-qkv-session, by which proxies place it.

// Connects to "unix:PATH" or "HOST:PORT", or to a list of them with commas, and waits for the daemon, or for one of
// them, until the timeout, in which a host's name is resolved, too. Those of a list are asked at the same time, each
// for a second at most. `options` may be NULL. UNAVAILABLE when nobody answers, INVALID_ARGUMENT for another form of
// target or NULL, for a tenant that is no name, and for files that cannot be read. On failure *client is NULL. A
// client whose daemon went away gives UNAVAILABLE and connects anew at its next call.
qkv_code qkv_client_connect(const char *target, const qkv_client_options *options, qkv_client **client,
                            qkv_call_error *error);
// qkv_client_options.timeout_ms of the calls to come; 0 or less: 60000. Not while a decode stream is open.
void qkv_client_set_timeout(qkv_client *client, int64_t timeout_ms);
// Closes the connection and clears *client. Sessions stay open in the daemon. Where the client has shared or lent
// memory, or has several targets, it waits a second at most for a daemon that does not answer.
void qkv_client_close(qkv_client **client);

// Frees memory that a call of this library has returned.
void qkv_free(void *memory);

enum { QKV_CLIENT_FP32 = 1, QKV_CLIENT_FP16 = 2, QKV_CLIENT_BF16 = 3 };

// A tensor in the caller's memory. `strides` in bytes; all 0 means dense, row-major. A tensor with strides is
// sent as it lies, the bytes between its rows included, unless those would more than double the message: then
// its rows are packed first.
typedef struct qkv_client_tensor {
  int dtype;  // QKV_CLIENT_*
  int rank;   // 0: absent
  int64_t dims[4];
  int64_t strides[4];
  const void *data;
  size_t bytes;  // that `data` has, at least what dims and strides reach
} qkv_client_tensor;

// ---- models ----

typedef struct qkv_client_rope {
  double theta;    // 0: no RoPE
  uint32_t width;  // 0: key_dim
  bool interleaved;
  int scaling;  // qkv.v1.Rope.Scaling
  double factor;
  uint64_t original_max_position;
  double low_freq_factor, high_freq_factor, beta_fast, beta_slow, attention_factor;
} qkv_client_rope;

typedef struct qkv_client_policy {
  const char *codec;      // NULL: the next level's
  double bits_k, bits_v;  // 0: the next level's
  int64_t recent_window;  // -1: the next level's. (A zeroed struct asks for a window of 0.)
  const char *anchor;     // "none", "mean", "group", "chain", "auto"; NULL: the next level's, with its settings
  uint32_t anchor_every;
  double anchor_threshold;
  const char *low_rank;  // "none", "predictor", "correction", "auto"; NULL: the next level's, with its rank
  uint32_t rank;
  int gqa_compensation;  // 0: the next level's, 1: on, -1: off
  int self_calibration;  // the same
  int sink_tokens;       // 0: the next level's, -1: none
  const char *codec_v;   // of values, where that of keys is another one; NULL: the same
  // Parameters of the codecs and stages that they are named after; 0: the default. INVALID_ARGUMENT where neither
  // `codec` nor `codec_v` is that one or has it in it.
  uint32_t kivi_q_group_size;  // 32 or 64
  int turboquant_rotation;     // qkv.v1.Turboquant.Rotation: 1 Hadamard, 2 dense
  int turboquant_ip_rotation;  // the same
  int polarquant_row_norms;    // qkv.v1.Polarquant.RowNorms: 1 stored, 2 none
  uint32_t turboquant_outliers_n_out, turboquant_ip_outliers_n_out;  // channels, a multiple of 8
  uint32_t low_rank_stage_rank;                                      // 1 to 16
  uint32_t delta_stage_anchor_every;                                 // tokens: 8, 16, 32 or 64
  uint32_t delta_stage_anchor_threshold;                             // thousandths
} qkv_client_policy;

typedef struct qkv_client_model {
  const char *name;
  uint32_t layers, kv_heads, q_heads, key_dim, value_dim;
  int dtype;
  qkv_client_rope rope;
  double scale;
  uint64_t sliding_window;
  double soft_cap;
  const qkv_client_policy *policy;  // NULL: the daemon's
  const void *calibration;          // a calibration file's bytes; NULL: the model's stays as it is
  size_t calibration_bytes;
  bool calibration_trusted;  // used at once, neither tried nor withdrawn
  bool calibration_kept;     // kept for pages that are appended, and not the model's
  bool shared;               // with tenants that have none of its name; for a client of the tenant "default" alone
} qkv_client_model;

// Registers for the client's tenant; the same model again is ok. ALREADY_EXISTS: another model has the name.
qkv_code qkv_client_register_model(qkv_client *client, const qkv_client_model *model, qkv_call_error *error);

// ---- sessions ----

typedef struct qkv_session_options {
  const char *session, *model;
  int purpose;                      // 0 or 1: attend, 2: fetch
  const qkv_client_policy *policy;  // NULL: the model's
  uint64_t first_position;
  double max_attention_error;  // quality contract, 0 to 1; 0: none
  double tier_bits;   // average bits that the session is brought to in the background; 0: the daemon's, -1: none
  int keep_full;      // pages that lose bits are kept in full as well; 0: the daemon's, 1: on, -1: off
  int durability;     // 0: the daemon's, 1: memory, 2: async, 3: sync; 2 and 3 need a daemon with a data-dir
  const void *salt;   // what its rows depend on other than model and token ids; up to 256 bytes
  size_t salt_bytes;  // 0: none
  // The session begins with as many of these tokens, from position 0 on, as an open session of the same
  // model, salt and coding holds; at most 4194304. NULL: empty. Not with first_position.
  const uint32_t *prefix_token_ids;
  size_t prefix_token_count;
  uint64_t *matched_tokens;  // gets how many that are, a multiple of 64; NULL: not wanted
  // It may be closed where memory, sessions or the SSD are full, the longest unused first; false: the daemon's
  // `retention`.
  bool evict;
} qkv_session_options;

typedef struct qkv_client_session_info {
  char session[129], model[129], tenant[129];
  int purpose;
  double bits_k, bits_v;
  uint64_t recent_window;
  uint64_t first_position;
  uint64_t tokens_coded, tokens_exact;
  uint64_t bytes_coded, bytes_exact, bytes_fp16;
  uint64_t bytes_overhead;  // averages of attention, and pages that are kept in full
  double bits_per_coordinate;
  double tier_bits;  // 0: none
  bool keep_full;
  bool evictable;                      // it may be closed where memory, sessions or the SSD are full
  int durability;                      // as in qkv_session_options
  uint64_t tokens_cold, bytes_stored;  // of tokens_coded, those on the SSD alone; bytes of all pages there
  uint64_t bytes_shared;               // of bytes_coded: of pages that other sessions in use have, too
  // Of the quality contract: asked and achieved, and over how many pages, of which so many missed it.
  double max_attention_error, attention_error;
  uint64_t contract_pages, contract_missed;
  uint32_t calibration;  // version that pages to come are coded with; 0: data-free
  int64_t calibration_since_unix_ms;
  double watched_error, watched_error_data_free;  // of attention, on some pages as they were sealed; 0: not measured
  int64_t created_unix_ms, last_used_unix_ms;
  uint32_t layers;
  uint64_t *lengths;  // [layers]; owned by the caller: qkv_free
  uint64_t *durable;  // [layers], in the same block: positions below are on the SSD; NULL: in memory alone
} qkv_client_session_info;

// Opens a session, empty but for what options->prefix_token_ids finds, which stays until qkv_client_close_session,
// whatever becomes of this client. NOT_FOUND: there is no model of this name. ALREADY_EXISTS: the name is taken.
// INVALID_ARGUMENT: a name or a policy that the daemon does not allow. RESOURCE_EXHAUSTED: the daemon holds as many
// sessions as it may.
qkv_code qkv_client_open_session(qkv_client *client, const qkv_session_options *options, qkv_call_error *error);
// Closes a session and frees what it holds; `*bytes_freed` where not NULL. NOT_FOUND: there is no session of this
// name.
qkv_code qkv_client_close_session(qkv_client *client, const char *session, uint64_t *bytes_freed,
                                  qkv_call_error *error);
// The session leaves memory as a whole, exact rows coded, and stays on the SSD; it comes back when it is next used.
// FAILED_PRECONDITION for one in memory alone.
qkv_code qkv_client_sink_session(qkv_client *client, const char *session, uint64_t *bytes_freed,
                                 qkv_call_error *error);
// What a session is and holds now, into *info, whose `lengths` the caller frees. On failure *info is zeroed.
// NOT_FOUND: there is no session of this name.
qkv_code qkv_client_get_session(qkv_client *client, const char *session, qkv_client_session_info *info,
                                qkv_call_error *error);
// Which of `count` sessions are open, up to 16384 in one call: *presence[i] gets 0: not open; 1: open, all of its
// pages in memory; 2: open, some of its pages on the SSD alone. `tokens`, where not NULL, gets the positions that
// every layer of a session holds. `touch`: counts as a use of those that are open.
qkv_code qkv_client_has_sessions(qkv_client *client, const char *const *sessions, size_t count, bool touch,
                                 uint8_t *presence, uint64_t *tokens, qkv_call_error *error);

// Opens `fork`, a session that begins with what `session` has below `position` (0: all), without a copy of it; from
// there on the two go their own ways. NOT_FOUND: there is no session of this name. ALREADY_EXISTS: the name is taken.
// FAILED_PRECONDITION: a layer ends before `position`. RESOURCE_EXHAUSTED: the daemon holds as many sessions as it
// may.
qkv_code qkv_client_fork(qkv_client *client, const char *session, const char *fork, uint64_t position,
                         qkv_call_error *error);
// Drops positions >= `position` in all layers. NOT_FOUND: there is no session of this name.
qkv_code qkv_client_truncate(qkv_client *client, const char *session, uint64_t position, qkv_call_error *error);

// ---- prefixes ----

typedef struct qkv_client_prompt {
  const char *model;
  const uint32_t *token_ids;
  size_t token_count;
  const void *salt;  // as in qkv_session_options
  size_t salt_bytes;
} qkv_client_prompt;

typedef struct qkv_client_match {
  char session[129];          // "" where no session shares 64 tokens; the rest is 0 then
  uint64_t tokens;            // of the prefix: a multiple of 64 that every layer of the session holds
  uint64_t tokens_in_memory;  // of these, in all layers
  uint64_t tokens_on_ssd;     // the others
  double restore_ms;          // about how long it takes to bring these back
} qkv_client_match;

// The open session of this model and salt that shares the longest prefix with a prompt, into *match, among
// those that were appended to with token ids. NOT_FOUND: there is no model of this name. On failure *match is zeroed.
qkv_code qkv_client_match_prefix(qkv_client *client, const qkv_client_prompt *prompt, qkv_client_match *match,
                                 qkv_call_error *error);

// Which prefixes come and go; fields as in proto/qkv/v1/kv_cache.proto's WatchRequest and PrefixEvent.
typedef struct qkv_client_watch {
  const char *tenant, *model;  // NULL or "": all; where the client has a tenant it is that one
  bool token_ids;
  uint64_t instance, after;  // of the last message of a watch before, to go on there; 0: with a snapshot
} qkv_client_watch;

enum { QKV_CLIENT_ADDED = 1, QKV_CLIENT_REMOVED = 2, QKV_CLIENT_MOVED = 3 };

// Pages of 64 tokens that follow each other.
typedef struct qkv_client_prefix_event {
  int kind;
  const char *tenant, *model;
  const uint8_t *parent;  // 16 bytes: the hash before the first
  const uint8_t *hashes;  // 16 bytes for each page
  size_t pages;
  uint64_t position;          // of the first token
  const uint32_t *token_ids;  // 64 for each page; NULL: not asked for, or not known
  bool on_ssd;                // MOVED: there now; else in memory
} qkv_client_prefix_event;

typedef struct qkv_client_changes {
  bool reset, missed, complete;
  uint64_t instance, sequence;
  const qkv_client_prefix_event *events;
  size_t event_count;  // may be 0: the daemon is there
} qkv_client_changes;

// Calls fn for what is there and then for what changes, until it returns false (CANCELLED) or the daemon ends the
// watch (UNAVAILABLE where it stops). What it is given is valid during the call of fn. A message comes every ten
// seconds at least: the client's timeout is that of each, and should be longer. RESOURCE_EXHAUSTED: `limit-watchers`.
qkv_code qkv_client_watch_prefixes(qkv_client *client, const qkv_client_watch *options,
                                   bool (*fn)(void *context, const qkv_client_changes *changes), void *context,
                                   qkv_call_error *error);

// ---- tiers ----

// Which rows: groups of 16 tokens that lie within positions [begin, end) as a whole.
typedef struct qkv_client_scope {
  const char *session;
  uint64_t begin, end;     // end 0: to the end
  const uint32_t *layers;  // layer_count 0: all
  size_t layer_count;
} qkv_client_scope;

typedef struct qkv_client_tiers {
  uint64_t pages;        // changed
  uint64_t bytes_freed;  // of codes and what is kept with them
  uint64_t bytes_taken;
} qkv_client_tiers;

// Drops planes of coded rows, down to an average of `bits` code bits a coordinate in each layer, by the attention
// that tokens have received, or with `even` to `bits` at most for all. A multiple of 1/8 from 1/8 to 8, else
// INVALID_ARGUMENT. What is dropped is lost, unless the session keeps its pages in full. `*tiers` where not NULL.
qkv_code qkv_client_demote(qkv_client *client, const qkv_client_scope *scope, double bits, bool even,
                           qkv_client_tiers *tiers, qkv_call_error *error);
// Back up to at least `bits`, 0: to all that rows were coded with. FAILED_PRECONDITION, with nothing changed: planes
// have been dropped and not kept. RESOURCE_EXHAUSTED: the daemon's memory is full.
qkv_code qkv_client_promote(qkv_client *client, const qkv_client_scope *scope, double bits, qkv_client_tiers *tiers,
                            qkv_call_error *error);

// What the tokens of one layer and KV head receive and have, in buckets of tokens_per_bucket, the last one maybe of
// fewer. The arrays are valid during the call of the function only.
typedef struct qkv_client_attention {
  uint32_t layer, kv_head;
  bool counted;      // else ema is zeros
  uint64_t queries;  // that the layer has been attended with
  uint64_t position, tokens, tokens_per_bucket;
  size_t buckets;
  const float *ema;   // [buckets] mean running average of attention; 0 for exact rows
  const float *bits;  // [buckets] mean code bits a coordinate; the dtype's for exact rows, 0 for what `cold` counts
  const float *cold;  // [buckets] the part of the tokens that is only on the SSD; NULL: nothing of the layer, or the
                      // daemon is an earlier one, which does not say
} qkv_client_attention;

// Calls fn for each layer of the scope (its positions are not looked at) and each KV head, in at most `buckets`
// buckets; 0: one a token, as far as the daemon has as many. fn returns false to cancel (the call then returns
// CANCELLED).
qkv_code qkv_client_attention_stats(qkv_client *client, const qkv_client_scope *scope, uint32_t buckets,
                                    bool (*fn)(void *context, const qkv_client_attention *head), void *context,
                                    qkv_call_error *error);

// ---- shared memory ----

// Memory of `bytes` bytes that the daemon maps, too: rows and queries that lie in it as a whole are read by the
// daemon itself (append, attend, decode), and what qkv_client_fetch_into has a place for there is written by it; only
// their places cross the connection. It is zeroed, and the client's until qkv_client_unshare or qkv_client_close. It
// must not be written to while a call is under way that names it; a daemon that is started anew gets to know it
// before the next call. INVALID_ARGUMENT: no bytes, or a client of several targets. UNIMPLEMENTED: the daemon runs
// without --allow-client-shm. PERMISSION_DENIED: the connection is no unix socket, or the daemon may not open the
// memory of this user, 0600. RESOURCE_EXHAUSTED: /dev/shm is full, or the daemon's limit-client-shm. On failure
// *memory is NULL.
qkv_code qkv_client_share(qkv_client *client, size_t bytes, void **memory, qkv_call_error *error);
// Gives it back and clears *memory; memory that was lent stays the caller's.
void qkv_client_unshare(qkv_client *client, void **memory);

// Memory of the caller's that the daemon opens, for the same: on the GPU that it uses, or a memfd with the seal
// F_SEAL_SHRINK. It is named by a handle of cudaIpcGetMemHandle (`cuda_handle`), or by descriptors that are passed by
// the daemon's --shm-listen: one of a memfd, or up to 64 of allocations of cuMemCreate, in their order.
typedef struct qkv_client_lent {
  void *data;                 // where the caller has it; on a GPU an address there, which is not read here
  size_t bytes;               //
  uint64_t offset;            // of `data` in the allocation of the handle, or in what the descriptors stand for
  bool on_gpu;                // else a memfd
  int64_t device_id;          // of the GPU, as the daemon counts
  const void *cuda_handle;    // of 64 bytes; NULL: descriptors
  const int *descriptors;     // duplicated here
  size_t descriptor_count;    //
  uint64_t descriptor_bytes;  // on a GPU, of the allocation behind each
  const char *passing;        // with descriptors: the path of the daemon's socket for them
} qkv_client_lent;

// Lends it until qkv_client_unshare, given `data`, or qkv_client_close. What the caller's streams write there is done
// before a call that names it. A tensor on a GPU, and memory for rows, lies in what is lent as a whole; in
// qkv_client_fetch_into that goes for all parts and layers, where it does for one. After a failure of the GPU calls
// that name it are UNAVAILABLE: unshare it and lend it again. INVALID_ARGUMENT: a field, or the daemon or its driver
// refuses the memory. FAILED_PRECONDITION: the daemon uses no GPU. UNAVAILABLE: nobody is at `passing`. Others as of
// qkv_client_share.
qkv_code qkv_client_lend(qkv_client *client, const qkv_client_lent *memory, qkv_call_error *error);

// ---- append, attend, decode ----

typedef struct qkv_client_attend_options {
  double scale;
  uint64_t sliding_window;
  double soft_cap;
  uint64_t begin, end;
  int64_t causal_offset;
  bool not_causal;
  int precision;  // 0: integers as fine as the codes need; 1: fp32; 2: int16; 3: int8
} qkv_client_attend_options;

// A sealed page of a layer as the daemon holds it, docs/page-format.md.
typedef struct qkv_client_page {
  uint32_t layer;
  uint64_t position;          // of its first token
  uint32_t tokens;            // valid ones, the first of the page
  uint64_t calibration_hash;  // of the calibration that it is coded with; 0: none
  const void *image;          // of any alignment
  size_t bytes;
} qkv_client_page;

// One layer of one session; fields as in proto/qkv/v1/kv_cache.proto's Item.
typedef struct qkv_client_item {
  const char *session;
  uint32_t layer;
  uint64_t position;
  bool k_before_rope, q_before_rope;
  const qkv_client_attend_options *options;  // NULL: the model's
  qkv_client_tensor k, v;                    // rank 3, or both absent
  qkv_client_tensor q;                       // rank 3, or absent
  const uint32_t *token_ids;                 // [k.dims[0]], of the rows' tokens, or of all pages'; NULL: none
  const qkv_client_page *pages;              // append alone, instead of k and v; their `layer` and `position` are not
  size_t page_count;                         // looked at: they follow each other from the item's `position` on
} qkv_client_item;

// Appends the items in one message of one call. Data is not copied. `*appended` where not NULL: new tokens.
qkv_code qkv_client_append(qkv_client *client, const qkv_client_item *items, size_t count, uint64_t *appended,
                           qkv_call_error *error);

// Opens a session and appends the items, which name it, in one call: others see it as a whole, or, where the call
// fails for whatever reason, not at all. All in one message. `seal`: exact rows are coded, for a session that is not
// appended to any more. `options` are without a prefix. ALREADY_EXISTS: the name is open.
qkv_code qkv_client_put(qkv_client *client, const qkv_session_options *options, const qkv_client_item *items,
                        size_t count, bool seal, qkv_call_error *error);

// Appends an item's rows as pages that are coded here, on `threads` threads (0: on the caller's) while others are
// sent, and the rows that the daemon would not have sealed (the recent window, and less than a page) as rows: what
// the daemon then holds is what it would have coded itself, unless the session has a quality contract. All rows of
// the layer that are held must be sealed (FAILED_PRECONDITION): it is for whole prompts, into an empty layer as a
// rule. Several messages are sent; where one fails those before it stay. INVALID_ARGUMENT: "k[3, 0, 17] is nan, ...",
// tokens counted from the page's first. `*appended` where not NULL: new tokens.
qkv_code qkv_client_append_encoded(qkv_client *client, const qkv_client_item *item, unsigned threads,
                                   uint64_t *appended, qkv_call_error *error);

typedef struct qkv_client_result {
  qkv_code code;     // of this item
  char text[256];    // why, when code is not 0
  uint64_t length;   // of the layer afterwards
  float *out;        // [queries][q_heads][value_dim]; NULL when the item had no queries
  float *lse;        // [queries][q_heads]
  size_t out_count;  // floats behind out
  size_t lse_count;
} qkv_client_result;

// Appends and attends a batch. `results` holds `count`; where an item carries queries, its `out` and
// `lse` are given memory (qkv_client_results_free). The returned status is that of the call; items have theirs.
// Where the call failed, every result carries its status.
qkv_code qkv_client_attend(qkv_client *client, const qkv_client_item *items, size_t count, qkv_client_result *results,
                           qkv_call_error *error);
// Frees what `count` results hold and zeroes them.
void qkv_client_results_free(qkv_client_result *results, size_t count);

// A decode stream: the same requests on one open call, cheaper for each step. One request is answered before
// the next is sent. A stream is closed before its client.
typedef struct qkv_decode qkv_decode;
// Opens a stream into *stream, which the caller ends with qkv_decode_close; NULL on failure. Nothing is sent yet.
qkv_code qkv_decode_open(qkv_client *client, qkv_decode **stream, qkv_call_error *error);
// One request and its answer, as qkv_client_attend. Items that fail leave the stream as it is; once it was ended by
// the daemon, by a timeout or with its connection, every further step gives that status.
qkv_code qkv_decode_step(qkv_decode *stream, const qkv_client_item *items, size_t count, qkv_client_result *results,
                         qkv_call_error *error);
// Ends the stream and clears *stream; gives the stream's final status.
qkv_code qkv_decode_close(qkv_decode **stream, qkv_call_error *error);

// ---- fetch ----

typedef struct qkv_client_fetch {
  const char *session;
  const uint32_t *layers;  // NULL: all
  size_t layer_count;
  uint64_t begin, end;  // positions; end 0: to the end
  int dtype;            // 0: the model's
  bool heads_first;     // [kv_heads, tokens, dim] instead of [tokens, kv_heads, dim]
  int part;             // 0 both, 1 K, 2 V
  bool before_rope;
  uint32_t chunk_tokens;  // 0: the daemon's choice
} qkv_client_fetch;

// Rows that have arrived. The tensors' data is valid during the call of the function only.
typedef struct qkv_client_rows {
  uint32_t layer;
  uint64_t position;
  qkv_client_tensor k, v;  // dense
} qkv_client_rows;

// Calls fn for runs of tokens, in order of layers and positions, as they lie in what has arrived (of no particular
// alignment); with heads_first once for each response, whose size chunk_tokens sets. fn returns false to cancel (the
// call then returns CANCELLED). The timeout is that of each response: the time that fn takes does not count.
// NOT_FOUND: there is no session of this name.
qkv_code qkv_client_fetch_rows(qkv_client *client, const qkv_client_fetch *request,
                               bool (*fn)(void *context, const qkv_client_rows *rows), void *context,
                               qkv_call_error *error);

// The caller's memory for keys or values of one layer.
typedef struct qkv_client_memory {
  void *data;          // NULL: not wanted
  size_t bytes;        // that it has
  int dtype;           // out, of what came: QKV_CLIENT_*
  int64_t heads, dim;  // out
} qkv_client_memory;

// Where a layer's rows go: token t of the range to row t of `k` and `v`, dense [tokens][heads][dim] of `dtype`.
typedef struct qkv_client_layer_memory {
  qkv_client_memory k, v;
  uint64_t position;  // out: of the first token; 0 where none came
  uint64_t tokens;    // out: how many there are
} qkv_client_layer_memory;

// As qkv_client_fetch_rows, with each row copied once, to its place. `layers` has request->layer_count entries (at
// least 1). INVALID_ARGUMENT: `heads_first`, layers that are not named in rising order, memory that does not hold the
// rows. Rows that have arrived before a failure stay; `tokens` are then 0.
qkv_code qkv_client_fetch_into(qkv_client *client, const qkv_client_fetch *request, qkv_client_layer_memory *layers,
                               qkv_call_error *error);

// ---- coded pages ----

// What a coded fetch gives, in order of layers and positions: sealed rows as pages, the exact rows behind them as in
// qkv_client_fetch_rows. The data is valid during the call of the function only; one that returns false cancels.
typedef struct qkv_client_coded_receiver {
  bool (*page)(void *context, const qkv_client_page *page);
  bool (*rows)(void *context, const qkv_client_rows *rows);
  void *context;
} qkv_client_coded_receiver;

// As qkv_client_fetch_rows, with pages as they are: the first and the last one of the range whole. `dtype`,
// `heads_first` and `before_rope` are those of the exact rows. INVALID_ARGUMENT: a `part`.
qkv_code qkv_client_fetch_pages(qkv_client *client, const qkv_client_fetch *request,
                                const qkv_client_coded_receiver *to, qkv_call_error *error);

// Where a layer's rows go: token t of the range to row t of `k` and `v`, dense [capacity][kv_heads][dim] of the
// request's dtype. The range begins at request->begin, or where the session does.
typedef struct qkv_client_layer_rows {
  void *k, *v;        // the caller's; NULL: not wanted
  uint64_t capacity;  // tokens that they have place for
  uint64_t position;  // out: of the first token
  uint64_t tokens;    // out: how many there are
  // Where not 0, what `k` and `v` have: a session whose rows are wider than the caller thinks is then refused.
  size_t k_bytes, v_bytes;
} qkv_client_layer_rows;

// Fetches layers as pages and decodes them here, on `threads` threads while the calling one receives (0: on that
// one): the same rows as qkv_client_fetch_rows gives, for a part of the bytes on the wire. `layers` has
// request->layer_count entries (at least 1). A calibration crosses once and is kept by the client. INVALID_ARGUMENT:
// `heads_first`, a `part`, a capacity that does not hold the rows, bytes that do not hold the capacity; DATA_LOSS: a
// page that is damaged; NOT_FOUND. Rows that have arrived before a failure stay; `tokens` are then 0.
qkv_code qkv_client_fetch_decoded(qkv_client *client, const qkv_client_fetch *request, unsigned threads,
                                  qkv_client_layer_rows *layers, qkv_call_error *error);

// Pages decoded and coded by the caller, on threads of its own, with the codecs and kernels that the daemon has. A
// page code is what the pages of a session are coded by under one calibration, or without one. It needs its client no
// more once it is there, is immutable, and may be used by any number of threads at the same time.
typedef struct qkv_page_code qkv_page_code;

// Asks the daemon for the code of `page`, which a coded fetch of this session gave; NULL: of pages to come. *code is
// the caller's, to be given back by qkv_page_code_free. A calibration crosses once, as with qkv_client_fetch_decoded.
// NOT_FOUND: there is no session of this name, or no session has pages of the calibration any more. INVALID_ARGUMENT:
// `page` is too short to be one. DATA_LOSS: the daemon's calibration has other content than the page says. On failure
// *code is NULL.
qkv_code qkv_client_get_page_code(qkv_client *client, const char *session, const qkv_client_page *page,
                                  const qkv_page_code **code, qkv_call_error *error);
// Gives it back and clears *code, which may be NULL.
void qkv_page_code_free(const qkv_page_code **code);

// Most bytes of a page of a layer; 0: the model has no such layer, or the layer keeps exact rows and has no pages.
size_t qkv_page_bytes_max(const qkv_page_code *code, uint32_t layer);

// Where rows of a page go: those of its valid tokens [first, first + tokens).
typedef struct qkv_client_page_rows {
  uint32_t first, tokens;
  int dtype;         // QKV_CLIENT_*
  bool before_rope;  // keys as projected; else as attended
  void *k, *v;       // dense [tokens][kv_heads][dim]; NULL: not wanted
} qkv_client_page_rows;

// Decodes a page, which may be anything, to the bits that a fetch gives of its rows. The page's `position` and
// `calibration_hash` are not looked at. INVALID_ARGUMENT: a layer that the model does not have or that has no pages,
// tokens that are not valid, an unknown dtype. DATA_LOSS: it is damaged, or no page of this code. On failure nothing
// is written.
qkv_code qkv_page_decode(const qkv_page_code *code, const qkv_client_page *page, const qkv_client_page_rows *rows,
                         qkv_call_error *error);

// Rows to code: k [tokens, kv_heads, key_dim] and v [tokens, kv_heads, value_dim], 1 to 64 tokens. A page that others
// follow in a session has 64.
typedef struct qkv_client_rows_to_code {
  uint32_t layer;
  uint64_t position;  // of the first token
  bool before_rope;   // keys are as projected; else as attended
  qkv_client_tensor k, v;
} qkv_client_rows_to_code;

// Codes rows as the daemon would (without a quality contract) into `image`, the caller's, of at least
// qkv_page_bytes_max bytes and any alignment, and fills in *page, whose `image` that is: what qkv_client_item.pages
// takes. INVALID_ARGUMENT: `capacity`, a layer, a shape, a position of 2^53 - 64 or more, "k[3, 0, 17] is nan, ...";
// *page is then zeroed, and what is in `image` undefined.
qkv_code qkv_page_encode(const qkv_page_code *code, const qkv_client_rows_to_code *rows, void *image, size_t capacity,
                         qkv_client_page *page, qkv_call_error *error);

// ---- opaque objects ----

// Bytes with a name (docs/objects.md), in the caller's memory.
typedef struct qkv_client_object {
  const char *name;  // 1 to 128 of [A-Za-z0-9._:/@-]
  void *data;        // put: read only
  size_t bytes;      // put: of `data`, at least 1. get, has, out: of the object, 0 where there is none
  size_t capacity;   // get: of `data`; where it is less than `bytes`, `data` stays as it was
  // put, in this order: it may be evicted where memory, limit-objects or the SSD are full (false: the daemon's
  // `retention`); as in qkv_session_options; deleted when unused for so long, 0: never; replaces one of this name
  bool evictable;
  int durability;
  uint64_t ttl_ms;
  bool replace;
  size_t received;  // the library's
} qkv_client_object;

typedef struct qkv_client_objects {
  qkv_client_object *objects;
  size_t count;  // get, has, delete: at most 16384
} qkv_client_objects;

// Puts objects, one after the other, each whole or not at all, with its checksum. The first that fails ends the call,
// and those before it stay. ALREADY_EXISTS: other bytes have the name. RESOURCE_EXHAUSTED: limit-objects, or memory.
qkv_code qkv_client_put_objects(qkv_client *client, const qkv_client_objects *objects, qkv_call_error *error);
// Fetches objects into their `data`. One that is not there is no error: its `bytes` are 0. DATA_LOSS: what came does
// not have the object's checksum.
qkv_code qkv_client_get_objects(qkv_client *client, const qkv_client_objects *objects, qkv_call_error *error);
// Fills in `bytes` alone. `touch`: the objects that are held count as used.
qkv_code qkv_client_has_objects(qkv_client *client, const qkv_client_objects *objects, bool touch,
                                qkv_call_error *error);
// Deletes the objects that are held; `*deleted` (may be NULL) is their number.
qkv_code qkv_client_delete_objects(qkv_client *client, const qkv_client_objects *objects, size_t *deleted,
                                   qkv_call_error *error);

// ---- calibrations ----

// The model's calibration file, as the daemon was given or has learnt it: calls fn with one piece after the other, of
// no particular size; fn returns false to cancel (the call then returns CANCELLED). NOT_FOUND: there is no model of
// this name, or it has none.
qkv_code qkv_client_get_calibration(qkv_client *client, const char *model,
                                    bool (*fn)(void *context, const void *data, size_t bytes), void *context,
                                    qkv_call_error *error);

// Likewise, the calibration of that version, as pages name it, in force or not; 0: as above. NOT_FOUND: no session
// has pages of it any more.
qkv_code qkv_client_get_calibration_version(qkv_client *client, const char *model, uint32_t version,
                                            bool (*fn)(void *context, const void *data, size_t bytes), void *context,
                                            qkv_call_error *error);

// ---- any other method ----

// One unary call with protobuf bytes both ways, for methods without a function here ("/qkv.v1.Admin/GetStatus").
// `*response` is qkv_free'd by the caller.
qkv_code qkv_client_call(qkv_client *client, const char *method, const void *request, size_t request_bytes,
                         void **response, size_t *response_bytes, qkv_call_error *error);

#ifdef __cplusplus
}
#endif

#endif
