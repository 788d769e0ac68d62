// The gRPC loop: completion-queue threads over gRPC-core's C surface, and calls as handlers see them.
//
// Every call is a stream of messages: a unary call is a stream of one. A method is a row of a table with
// callbacks; the loop accepts calls (whatever their path, so that an unknown method is answered UNIMPLEMENTED),
// reads one message at a time and hands it over in place, in the pieces the network gave:
//
//   message() --> qkv_rpc_next    read the next message        (append stream)
//             --> qkv_rpc_reply   answer and finish with OK    (unary)
//             --> qkv_rpc_send    answer, sent() follows       (streams out)
//             --> qkv_rpc_finish  end with a status
//
// After each callback exactly one of these follows, at once or later, from any thread; the message's bytes live
// until then. Where the client is gone in between, the loop ends the call by itself: the callback that would
// have followed does not come, destroy() does. A call never has two operations of the same kind under way, so a
// client that does not read holds one response, not a queue of them.
//
// Threads: callbacks run on completion-queue threads, for one call never two at a time. They must not block
// for long: work goes to the compute pool.
#ifndef QKV_SERVER_RPC_RPC_H
#define QKV_SERVER_RPC_RPC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/bytes.h"
#include "engine/base/fair.h"
#include "engine/base/status.h"
#include "proto/wire.h"
#include "server/handlers/block.h"
#include "server/tenants/meter.h"

typedef struct qkv_rpc_server qkv_rpc_server;
typedef struct qkvi_tls qkvi_tls;    // tls.h
typedef struct qkvi_auth qkvi_auth;  // auth.h

typedef struct qkv_rpc_method {
  const char *path;  // "/qkv.v1.KvCache/Attend"
  // A message arrived.
  void (*message)(qkv_rpc_call *call, qkv_bytes message);
  // The client has sent its last message. NULL: only one message is expected; none at all is answered
  // INVALID_ARGUMENT by the loop, and nothing more is read after message().
  void (*end)(qkv_rpc_call *call);
  // The message of qkv_rpc_send has been sent. NULL for methods that never send.
  void (*sent)(qkv_rpc_call *call);
  // The client is gone. For handlers that hold a call without working on it (a watch), which would not notice
  // otherwise; NULL for all others. Comes once, maybe while another thread is in another callback of this call.
  void (*cancelled)(qkv_rpc_call *call);
  // The call is over, however it ended; frees what the handler hung on it (qkv_rpc_set_state). May be NULL.
  void (*destroy)(void *state);
} qkv_rpc_method;

// What handlers reach through their call: the daemon (server/daemon.h). Opaque here.
void *qkv_rpc_context(const qkv_rpc_call *call);

// The handler's state for this call; NULL at first.
void *qkv_rpc_state(const qkv_rpc_call *call);
void qkv_rpc_set_state(qkv_rpc_call *call, void *state);

// Whether the client is gone, cancelled or past its deadline: work for it can be skipped. Any thread.
bool qkv_rpc_cancelled(const qkv_rpc_call *call);

// Counts `rows` appended rows for the quota of the call's tenant.
void qkv_rpc_count_rows(const qkv_rpc_call *call, uint64_t rows);
// Counts bytes that were read or written by shared memory, as the quota counts those of messages.
void qkv_rpc_count_bytes(const qkv_rpc_call *call, uint64_t bytes);
// The call's share of the threads: its tenant's flow, and its quota's weight.
qkv_share qkv_rpc_share(const qkv_rpc_call *call);
// The holders that its responses are counted for; alive as long as the call.
qkvi_holders qkvi_rpc_holders(const qkv_rpc_call *call);
// Counts a call that its handler refuses for a quota of the tenant.
void qkv_rpc_count_refusal(const qkv_rpc_call *call);
// The quotas have changed.
void qkv_rpc_server_refresh_quotas(qkv_rpc_server *server);
// The usage of a tenant's calls; all tenants, in no order.
qkvi_call_usage qkv_rpc_server_usage(const qkv_rpc_server *server, const char *tenant);
void qkv_rpc_server_each_tenant(const qkv_rpc_server *server, void (*fn)(void *context, const char *tenant),
                                void *context);

// Counts time that the call's request waits; gives what was counted since its message came, since it last sent one,
// or since it was forgotten, as the request has got on. The thread that has the call.
typedef enum qkv_rpc_wait { QKV_RPC_WAIT_MEMORY, QKV_RPC_WAIT_DISK, QKV_RPC_WAITS } qkv_rpc_wait;
void qkv_rpc_count_wait(const qkv_rpc_call *call, qkv_rpc_wait what, int64_t ms);
int64_t qkv_rpc_waited_ms(const qkv_rpc_call *call, qkv_rpc_wait what);
void qkv_rpc_forget_waits(qkv_rpc_call *call);

// From the first on a job of the call waits for a thread; at the second it has one.
void qkv_rpc_queued(qkv_rpc_call *call);
void qkv_rpc_dequeued(qkv_rpc_call *call);

// Done with this message: read the next one (message() or end() follows).
void qkv_rpc_next(qkv_rpc_call *call);

// Sends the writer's message and finishes with OK. The bytes in the writer are copied, its references are not:
// `release(owner)` is called for each when gRPC is done with the data, also where the call has failed: on any
// thread, maybe inside another call's functions here, so it must not wait for a lock that is held around them.
// The writer itself stays the caller's.
void qkv_rpc_reply(qkv_rpc_call *call, qkv_wire_writer *writer, void (*release)(void *owner));

// The same without finishing: sent() follows.
void qkv_rpc_send(qkv_rpc_call *call, qkv_wire_writer *writer, void (*release)(void *owner));

// For small messages that protobuf-c has packed: copies.
void qkv_rpc_reply_bytes(qkv_rpc_call *call, const void *data, size_t length);
void qkv_rpc_send_bytes(qkv_rpc_call *call, const void *data, size_t length);

// The same for bytes that lie in memory of `owner`, which is released when they have been sent.
void qkv_rpc_reply_reference(qkv_rpc_call *call, const qkv_wire_piece *piece, void (*release)(void *owner));

// Ends the call with a status; `text` goes to the client. After reply or finish the handler must not touch the
// call again (destroy still comes).
void qkv_rpc_finish(qkv_rpc_call *call, qkv_status status, const char *text);

// The session that the call, or this message of it, is about, for logs: a valid name. Before the call is answered.
void qkv_rpc_name_session(qkv_rpc_call *call, const char *session);

// A call that has ended, or was refused before it began, or a message of a stream that has been served. Lives as long
// as the callback that it is given to.
typedef struct qkv_rpc_report {
  uint64_t number;  // of the call, from 1; 0: it was refused
  const char *method;
  const char *tenant, *traceparent;  // "": none
  qkv_status status;
  const char *reason;
  const char *session;  // the first that it names; "": none
  bool stream;          // of more messages than one
  bool step;            // not the call, but one message of a stream that goes on: since it was there
  uint64_t ns;          // since it was accepted; of these:
  uint64_t message_ns, quota_ns, queue_ns;  // until its message was there, waits for its quota, and for a thread
  void *grpc;
} qkv_rpc_report;
// "127.0.0.1:41234", or as server/auth/identity.h says. 256 bytes are enough.
void qkv_rpc_report_peer(const qkv_rpc_report *report, char *text, size_t bytes);

typedef struct qkv_rpc_config {
  const char *const *listen;  // "unix:PATH" or "HOST:PORT"
  size_t listen_count;
  unsigned socket_mode;            // of the files of unix sockets; 0: 0660
  qkvi_tls *tls;                   // of TCP connections, stays the caller's; NULL: they are not encrypted
  qkvi_auth *auth;                 // authorization, stays the caller's; NULL: any client
  bool anonymous_unix, anonymous;  // with `auth`: calls without token or certificate, of unix sockets, of all
  bool open;                       // without `auth`: addresses that other machines reach may be bound
  size_t threads;                  // completion queues, one thread each
  int64_t message_bytes_max;       // of a request
  size_t calls_max;                // at once; more are answered RESOURCE_EXHAUSTED
  size_t control_calls_max;        // at once, of control calls (server/rpc/limits.h), which have their own limit
  size_t connection_calls_max;     // of one connection
  size_t tenant_calls_max;         // of one tenant; 0: three times as many as it leaves to others
  size_t connections_max;          // at once; more are closed
  size_t peer_connections_max;     // of one peer (server/rpc/connections.h); 0: half of them
  uint64_t control_frames_s;  // of one connection in a second, in points (server/rpc/http2_frames.h); 0: no limit
  qkvi_call_quota_fn *quota;  // of tenants, with `context` (server/rpc/limits.h); NULL: none
  int64_t first_message_ms;   // until a call's first message has arrived as a whole; 0: no limit
  int64_t unread_ms;          // until a message to the client has been read; 0: no limit
  int64_t idle_ms;            // until the next message of a stream has arrived as a whole; 0: no limit
  const qkv_rpc_method *const *methods;  // NULL-terminated tables, each ended by a row with a NULL path
  void *context;
  // For metrics; may be NULL. A call that is refused begins and ends, too. `ended` comes before the client can
  // see the status; CANCELLED where the client was gone first.
  void (*began)(void *context);
  void (*ended)(void *context, qkv_status status);
  // The same for calls that were not refused: `ns` since they were accepted. `tenant` lives as long as the callback.
  void (*timed)(void *context, const qkv_rpc_method *method, const char *tenant, qkv_status status, uint64_t ns);
  // For logs, of all calls; may be NULL. Before the client is answered.
  void (*reported)(void *context, const qkv_rpc_report *report);
} qkv_rpc_config;

// Binds every address or none. INVALID_ARGUMENT: not an address. UNAVAILABLE names the address and why (in use,
// not permitted). A unix socket gets its mode and a lock file next to it, PATH.lock, so that a second server
// cannot take it over; both are removed by destroy. Messages must not be compressed (UNIMPLEMENTED).
// `config` and what it points to, but for the methods' rows and the context, is not needed afterwards.
qkv_status qkv_rpc_server_create(const qkv_rpc_config *config, qkv_rpc_server **out, qkv_error *error);

// The address as bound ("127.0.0.1:41234" where port 0 was asked), alive as long as the server.
const char *qkv_rpc_server_address(const qkv_rpc_server *server, size_t listen);

// New calls are refused from now on (UNAVAILABLE "draining"), running ones may finish; those still there after
// `grace_ms` are cancelled. Returns when no call is left. Called once, not from a callback.
void qkv_rpc_server_drain(qkv_rpc_server *server, int64_t grace_ms);

// Ends calls whose clients do not send or do not read in time. Several times a second, by one thread at a time, not
// after destroy.
void qkv_rpc_server_tend(qkv_rpc_server *server);
// Calls that were ended because their clients had sent no message: in time, or before others needed their places.
uint64_t qkv_rpc_server_silent_ended(qkv_rpc_server *server);
// Calls that were ended because their clients did not read, or sent no further message.
uint64_t qkv_rpc_server_stalled_ended(qkv_rpc_server *server);

// Connections that are open, and those that were closed because there were too many.
size_t qkv_rpc_server_connections(qkv_rpc_server *server);
uint64_t qkv_rpc_server_connections_refused(qkv_rpc_server *server);

void qkv_rpc_server_destroy(qkv_rpc_server **server);  // after drain

#endif
