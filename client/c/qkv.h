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
// Threads: a client is used by one thread at a time; different clients are independent.
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
  int64_t timeout_ms;          // of every call; of each step of a decode stream, each response of a fetch; 0: 60000
  int64_t connect_timeout_ms;  // of qkv_client_connect; 0: timeout_ms
  int64_t message_bytes_max;   // of a response; 0: 256 MiB
} qkv_client_options;

// Connects to "unix:PATH" or "HOST:PORT" and waits for the daemon until the timeout. `options` may be NULL.
// UNAVAILABLE when nobody answers, INVALID_ARGUMENT for another form of target or NULL. On failure *client is NULL.
// A client whose daemon went away gives UNAVAILABLE and connects anew at its next call.
qkv_code qkv_client_connect(const char *target, const qkv_client_options *options, qkv_client **client,
                            qkv_call_error *error);
// Closes the connection and clears *client. Sessions stay open in the daemon.
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
} qkv_client_model;

// Registers; the same model again is ok. ALREADY_EXISTS: another model has the name.
qkv_code qkv_client_register_model(qkv_client *client, const qkv_client_model *model, qkv_call_error *error);

// ---- sessions ----

typedef struct qkv_session_options {
  const char *session, *model;
  const char *tenant;               // NULL: "default"
  int purpose;                      // 0 or 1: attend, 2: fetch
  const qkv_client_policy *policy;  // NULL: the model's
  uint64_t first_position;
  double max_attention_error;  // quality contract, 0 to 1; 0: none
  double tier_bits;  // average bits that the session is brought to in the background; 0: the daemon's, -1: none
  int keep_full;     // pages that lose bits stay beside in full; 0: the daemon's, 1: on, -1: off
  int durability;    // 0: the daemon's, 1: memory, 2: async, 3: sync; 2 and 3 need a daemon with a data-dir
} qkv_session_options;

typedef struct qkv_client_session_info {
  char session[129], model[129], tenant[129];
  int purpose;
  double bits_k, bits_v;
  uint64_t recent_window;
  uint64_t first_position;
  uint64_t tokens_coded, tokens_exact;
  uint64_t bytes_coded, bytes_exact, bytes_fp16;
  uint64_t bytes_beside;  // averages of attention, and pages that are kept in full
  double bits_per_coordinate;
  double tier_bits;  // 0: none
  bool keep_full;
  int durability;                      // as in qkv_session_options
  uint64_t tokens_cold, bytes_stored;  // of tokens_coded, those on the SSD alone; bytes of all pages there
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

// Opens an empty session, which stays until qkv_client_close_session, whatever becomes of this client. NOT_FOUND:
// no such model. ALREADY_EXISTS: the name is taken. INVALID_ARGUMENT: a name or a policy that the daemon does not
// allow. RESOURCE_EXHAUSTED: the daemon holds as many sessions as it may.
qkv_code qkv_client_open_session(qkv_client *client, const qkv_session_options *options, qkv_call_error *error);
// Closes a session and frees what it holds; `*bytes_freed` where not NULL. NOT_FOUND: there is no such session.
qkv_code qkv_client_close_session(qkv_client *client, const char *session, uint64_t *bytes_freed,
                                  qkv_call_error *error);
// The session leaves memory as a whole, exact rows coded, and stays on the SSD; it comes back when it is next used.
// FAILED_PRECONDITION for one in memory alone.
qkv_code qkv_client_sink_session(qkv_client *client, const char *session, uint64_t *bytes_freed,
                                 qkv_call_error *error);
// What a session is and holds now, into *info, whose `lengths` the caller frees. On failure *info is zeroed.
// NOT_FOUND: there is no such session.
qkv_code qkv_client_get_session(qkv_client *client, const char *session, qkv_client_session_info *info,
                                qkv_call_error *error);
// Drops positions >= `position` in all layers. NOT_FOUND: there is no such session.
qkv_code qkv_client_truncate(qkv_client *client, const char *session, uint64_t position, qkv_call_error *error);

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
  uint64_t bytes_freed;  // of codes and what is kept beside them
  uint64_t bytes_taken;
} qkv_client_tiers;

// Drops planes of coded rows, down to an average of `bits` code bits a coordinate in each layer, by the attention
// that tokens have received, or with `even` to `bits` at most for all. A multiple of 1/8 from 1/8 to 8, else
// INVALID_ARGUMENT. What is dropped is lost, unless the session keeps its pages in full. `*tiers` where not NULL.
qkv_code qkv_client_demote(qkv_client *client, const qkv_client_scope *scope, double bits, bool even,
                           qkv_client_tiers *tiers, qkv_call_error *error);
// Back up to at least `bits`, 0: to all that rows were coded with. FAILED_PRECONDITION, with nothing changed: planes
// have been dropped and not kept. RESOURCE_EXHAUSTED: the daemon's memory has no room.
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
  const float *bits;  // [buckets] mean code bits a coordinate; the dtype's for exact rows
} qkv_client_attention;

// Calls fn for each layer of the scope (its positions are not looked at) and each KV head, in at most `buckets`
// buckets; 0: one a token, as far as the daemon has as many. fn returns false to cancel (the call then returns
// CANCELLED).
qkv_code qkv_client_attention_stats(qkv_client *client, const qkv_client_scope *scope, uint32_t buckets,
                                    bool (*fn)(void *context, const qkv_client_attention *head), void *context,
                                    qkv_call_error *error);

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

// One layer of one session; fields as in proto/qkv/v1/kv_cache.proto's Item.
typedef struct qkv_client_item {
  const char *session;
  uint32_t layer;
  uint64_t position;
  bool k_before_rope, q_before_rope;
  const qkv_client_attend_options *options;  // NULL: the model's
  qkv_client_tensor k, v;                    // rank 3, or both absent
  qkv_client_tensor q;                       // rank 3, or absent
} qkv_client_item;

// Appends the items in one message of one call. Data is not copied. `*appended` where not NULL: new tokens.
qkv_code qkv_client_append(qkv_client *client, const qkv_client_item *items, size_t count, uint64_t *appended,
                           qkv_call_error *error);

typedef struct qkv_client_result {
  qkv_code code;     // of this item
  char text[256];    // why, when code is not 0
  uint64_t length;   // of the layer afterwards
  float *out;        // [queries][q_heads][value_dim]; NULL when the item had no queries
  float *lse;        // [queries][q_heads]
  size_t out_count;  // floats behind out
  size_t lse_count;
} qkv_client_result;

// Appends and attends a batch. `results` has room for `count`; where an item carries queries, its `out` and
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
// NOT_FOUND: there is no such session.
qkv_code qkv_client_fetch_rows(qkv_client *client, const qkv_client_fetch *request,
                               bool (*fn)(void *context, const qkv_client_rows *rows), void *context,
                               qkv_call_error *error);

// ---- calibrations ----

// The model's calibration file, as the daemon was given or has learnt it: calls fn with one piece after the other, of
// no particular size; fn returns false to cancel (the call then returns CANCELLED). NOT_FOUND: no such model, or it
// has none.
qkv_code qkv_client_get_calibration(qkv_client *client, const char *model,
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
