// What the files of libqkv share: the connection, one call on it, and messages on their way out and in.
//
// A client has one socket, which it opens itself, one gRPC channel over it and one completion queue. Opening the
// socket ourselves buys three things: exact words when nobody answers, a call path without name resolution and
// load balancing, and a way to end a write that hangs because the daemon has stopped reading (shutdown(2)).
//
// Memory that is sent by reference is *lent* to gRPC. A call returns only when gRPC has given all of it back
// (qkvi_reclaim): usually it has by the time the answer is there; where a dead peer keeps it, the connection is
// cut.
//
// A client of several targets has one of these clients for each target (place.h).
//
// Threads: as qkv.h says, one at a time.
#ifndef QKV_CLIENT_C_CLIENT_H
#define QKV_CLIENT_C_CLIENT_H

#include <grpc/grpc.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <time.h>

#include "client/c/qkv.h"
#include "engine/base/bytes.h"
#include "engine/base/status.h"
#include "engine/base/tensor.h"
#include "proto/wire.h"

typedef struct qkvi_health qkvi_health;          // health.h
typedef struct qkvi_kept_codes qkvi_kept_codes;  // codes.h
typedef struct qkvi_kept_model qkvi_kept_model;  // place.c
typedef struct qkvi_share qkvi_share;            // shared.c

struct qkv_client {
  char *target;  // as the caller gave it
  qkv_client_options options;
  grpc_metadata metadata[3];              // of every call: authorization and tenant, where there are some,
  size_t metadata_count;                  // and behind them the key of place.h
  bool keyed;                             // it has one
  char *token_file;                       // that the authorization comes from, the first of the metadata; NULL: none
  struct timespec token_written;          // when the file was, as last read
  ino_t token_inode;                      // and which one
  int64_t token_next_ms;                  // when it is looked at again
  grpc_channel_credentials *credentials;  // of TLS; NULL: none
  int fd;  // a duplicate of the channel's socket, to watch and cut it; -1: not connected
  grpc_channel *channel;
  grpc_completion_queue *queue;
  atomic_size_t lent;          // pieces of the caller's memory that gRPC holds
  qkv_wire_writer *writer;     // of the request being made
  void **packed;               // copies of tensors whose strides waste too much, until the call is over
  size_t packed_count;         //
  qkv_segment *segments;       // of the response being read
  size_t segment_capacity;     //
  uint8_t *scratch[2];         // rows that arrived in pieces, made whole (fetch.c)
  size_t scratch_capacity[2];  //
  qkvi_kept_codes *codes;      // NULL: none was needed yet
  qkvi_share *shares;          // memory that the daemon maps, a list
  // place.h
  char *placement;          // label that is the key of all calls; NULL: none
  qkv_client **parts;       // of several targets
  size_t part_count;        // 0: it is a connection itself
  qkvi_kept_model *models;  // of several targets: registered by this client
  uint64_t place;           // of a part: its target's hash
  size_t index;             // of a part: in parts
  bool suspect;             // of a part: to be asked before it is used
  int64_t asked_next_ms;    // of a part that did not answer while the client is being connected: not before
  int64_t pause_ms;         //
  qkvi_health *health;      // of a part
};

// ---- errors ----

// Fills `error` (may be NULL) and returns `code`.
qkv_code qkvi_fail(qkv_call_error *error, qkv_code code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
// Likewise, from an error of the engine.
qkv_code qkvi_fail_with(qkv_call_error *error, const qkv_error *reason);
// Clears `error` and returns 0.
qkv_code qkvi_ok(qkv_call_error *error);

// ---- connection.c ----

// A client that is not connected yet. `options` may be NULL. INVALID_ARGUMENT as of qkv_client_connect.
qkv_code qkvi_client_create(const char *target, const qkv_client_options *options, qkv_client **client_out,
                            qkv_call_error *error);
// Connects where it is not, and asks whether the daemon serves. UNAVAILABLE, within `timeout_ms`: it does not.
qkv_code qkvi_check_health(qkv_client *client, int64_t timeout_ms, qkv_call_error *error);
// Waits; gRPC may work meanwhile.
void qkvi_pause(qkv_client *client, int64_t ms);

// Reads the token file again where it has changed, at most once a second, and after a call that was UNAUTHENTICATED.
// What cannot be read, or is no token, leaves the one before in use.
void qkvi_renew_token(qkv_client *client);
// Makes sure that there is a connection, opening a new one where the old is gone. UNAVAILABLE, at once, where
// that fails.
qkv_code qkvi_ensure_connected(qkv_client *client, qkv_call_error *error);
// Shuts the socket down without asking gRPC, so that all operations that wait for it fail.
void qkvi_cut(qkv_client *client);
// Waits until gRPC has given back everything that was lent to it.
void qkvi_reclaim(qkv_client *client);

// ---- call.c ----

// The client's writer, emptied.
qkv_wire_writer *qkvi_begin_request(qkv_client *client);
// The message in the client's writer. Large references are lent, the rest is copied.
grpc_byte_buffer *qkvi_request(qkv_client *client);
// A message of `bytes` bytes, copied.
grpc_byte_buffer *qkvi_request_of_bytes(const void *data, size_t bytes);
// A view of a response, valid until the next view or the end of the buffer.
qkv_bytes qkvi_view(qkv_client *client, const grpc_byte_buffer *buffer);

// One call. Messages go through qkvi_call_run; `ended` says that `status` and `text` are the call's outcome.
typedef struct qkvi_call {
  qkv_client *client;
  const char *method;
  grpc_call *call;
  bool stream;         // the timeout is each run's
  gpr_timespec until;  // the deadline where it is not
  grpc_metadata_array initial, trailing;
  bool begun, heard;  // the initial metadata are sent, are asked for
} qkvi_call;

// Creates a call whose deadline is the client's timeout. Where it is for a stream, every qkvi_call_run has that
// timeout instead, and the call none.
qkv_code qkvi_call_open(qkv_client *client, const char *method, bool stream, qkvi_call *call, qkv_call_error *error);
// Frees it; cancels it where it has not ended. Nothing may be under way.
void qkvi_call_close(qkvi_call *call);

// One batch: sends `request` if not NULL (and takes it), half-closes where `last`, receives a message where
// `response` is not NULL (NULL into it at the end of the stream), and the call's outcome where `outcome` is not
// NULL. Returns when all that is done, or the deadline has passed and the call was cancelled.
typedef struct qkvi_step {
  grpc_byte_buffer *request;
  bool last;
  grpc_byte_buffer **response;
  qkv_call_error *outcome;
} qkvi_step;
void qkvi_call_run(qkvi_call *call, const qkvi_step *step);

// qkvi_call_run in two halves: what start was given must stay until finish has returned. One at a time on a call;
// calls of several clients may be under way together.
typedef struct qkvi_run {
  qkvi_step step;
  grpc_status_code status;
  grpc_slice details;
} qkvi_run;
void qkvi_call_start(qkvi_call *call, const qkvi_step *step, qkvi_run *run);
void qkvi_call_finish(qkvi_call *call, qkvi_run *run);

// A call with one request and one response, or a client stream of one message. Takes `request`. On success
// *response is not NULL and the caller's.
qkv_code qkvi_unary(qkv_client *client, const char *method, grpc_byte_buffer *request, grpc_byte_buffer **response,
                    qkv_call_error *error);

// qkvi_unary in two halves, so that several daemons work at once. finish must follow start, after an error, too.
typedef struct qkvi_exchange {
  qkvi_call call;
  qkvi_run run;
  grpc_byte_buffer *response;
  qkv_call_error outcome;
} qkvi_exchange;
void qkvi_unary_start(qkv_client *client, const char *method, grpc_byte_buffer *request, qkvi_exchange *exchange);
qkv_code qkvi_unary_finish(qkvi_exchange *exchange, grpc_byte_buffer **response, qkv_call_error *error);

// Given each response of a stream; false ends the call: the caller wants no more, or `reason` says what is wrong with
// the response. DATA_LOSS is the call's status; any other is INTERNAL.
typedef bool (*qkvi_response_fn)(qkv_client *client, const grpc_byte_buffer *response, void *context,
                                 qkv_error *reason);
// A call with one request and a stream of responses. Takes `request`. CANCELLED where `fn` ended it for no reason.
qkv_code qkvi_read_stream(qkv_client *client, const char *method, grpc_byte_buffer *request, qkvi_response_fn fn,
                          void *context, qkv_call_error *error);

// ---- control.c ----

// An OpenSessionRequest, to be freed.
void *qkvi_pack_open(const qkv_session_options *options, size_t *bytes);

// ---- items.c ----

// The caller's tensor as the engine sees it, checked. `segment` holds what the view borrows.
qkv_status qkvi_check_tensor(const qkv_client_tensor *from, const char *name, qkv_segment *segment,
                             qkv_tensor *tensor, qkv_error *error);
// Writes `items` as field 1 of AppendRequest or AttendRequest into the client's writer. `numbers`: what errors call
// them; NULL: 0, 1, ...
qkv_code qkvi_put_items(qkv_client *client, const qkv_client_item *items, size_t count, const size_t *numbers,
                        qkv_call_error *error);
// Frees what qkvi_put_items has packed; after qkvi_reclaim.
void qkvi_release_items(qkv_client *client);
// Reads a Tensor message; it must be dense and of rank `rank`. `name` is for errors.
qkv_status qkvi_read_tensor(qkv_bytes message, const char *name, int rank, qkv_tensor *tensor, qkv_error *error);
// Likewise, of a tensor whose bytes are in shared memory: its data has their number, and cannot be read.
qkv_status qkvi_read_shared_tensor(qkv_bytes message, const char *name, int rank, qkv_tensor *tensor,
                                   qkv_error *error);
// ---- shared.c ----

// Registers what the daemon does not know, as after it was started anew. Before a message is made that names a share.
qkv_code qkvi_shares_ready(qkv_client *client, qkv_call_error *error);
// The connection is a new one: the daemon may be, too.
void qkvi_shares_forget(qkv_client *client);
void qkvi_shares_free(qkv_client *client);
// The share that holds all of the bytes, or NULL.
const qkvi_share *qkvi_share_of(const qkv_client *client, const void *data, size_t bytes);
// Whether any of the bytes lie in lent memory on a GPU, which cannot be read here.
bool qkvi_is_on_gpu(const qkv_client *client, const void *data, size_t bytes);
// The fields shared_memory_region, _offset and _byte_size, numbered from `first` on.
void qkvi_share_put(qkv_wire_writer *writer, uint32_t first, const qkvi_share *share, const void *data, size_t bytes);

// INTERNAL: what the daemon sent is not what the contract says.
qkv_code qkvi_malformed(qkv_call_error *error, const char *method, const qkv_error *reason);

#endif
