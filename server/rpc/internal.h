// What the files of the gRPC loop share: server.c accepts and drains, call.c runs one call,
// listen.c binds addresses.
#ifndef QKV_SERVER_RPC_INTERNAL_H
#define QKV_SERVER_RPC_INTERNAL_H

#include <grpc/grpc.h>
#include <pthread.h>
#include <stdatomic.h>

#include "server/auth/identity.h"
#include "server/rpc/connections.h"
#include "server/rpc/delay.h"
#include "server/rpc/limits.h"
#include "server/rpc/rpc.h"
#include "server/rpc/tls.h"

// A tag of a completion queue: what to do when its event comes.
typedef struct qkvi_rpc_op {
  void (*done)(struct qkvi_rpc_op *op, bool ok);
} qkvi_rpc_op;

// ---- Addresses (listen.c) ----

// As many as a name may stand for; more are left out.
#define QKVI_RPC_SOCKETS_MAX 16

typedef struct qkvi_rpc_listener {
  char *address;  // as bound
  grpc_server *server;
  bool local;                // a unix socket
  const qkvi_tls_port *tls;  // that its connections are given to; NULL: they are not encrypted
  qkvi_rpc_connections *connections;
  bool passed;      // by the service manager, which goes on listening (server/service.h)
  char *lock_path;  // of a unix socket that is ours; else NULL
  int lock;         // its file, or -1
  int wake;         // while `accepting`: an eventfd, written to end that
  int sockets[QKVI_RPC_SOCKETS_MAX];
  size_t socket_count;
  pthread_t thread;  // while `accepting`
  bool accepting;
} qkvi_rpc_listener;

typedef struct qkvi_rpc_listen_config {
  unsigned mode;                      // of the files of unix sockets
  const qkvi_tls_port *tls;           // of TCP; NULL: none
  qkvi_rpc_connections *connections;  // that accepted ones are counted in
  bool open;                          // other machines may connect, though no client has to authenticate
} qkvi_rpc_listen_config;

// Adds one address to a server that has not been started. On failure the listener holds nothing.
qkv_status qkvi_rpc_listen(grpc_server *server, const char *address, const qkvi_rpc_listen_config *config,
                           qkvi_rpc_listener *listener, qkv_error *error);
// Connections are accepted between these two: once the server has started, and until it is shut down.
void qkvi_rpc_accept(qkvi_rpc_listener *listener);
void qkvi_rpc_accept_done(qkvi_rpc_listener *listener);  // once or several times
void qkvi_rpc_unlisten(qkvi_rpc_listener *listener);     // after the server is gone

// ---- Calls (call.c) ----

// How many pieces a message may have before their list is allocated; 1 MiB comes in about 20.
#define QKVI_RPC_SEGMENTS 32

// The owner of the call: the loop while an operation is under way, else the handler.
typedef enum qkvi_rpc_phase {
  QKVI_RPC_HANDLER,
  QKVI_RPC_READING,
  QKVI_RPC_SENDING,
  QKVI_RPC_ENDING,  // the status is being sent
  QKVI_RPC_OVER
} qkvi_rpc_phase;

struct qkv_rpc_call {
  qkv_rpc_server *server;
  const qkv_rpc_method *method;
  void *state;
  grpc_call *grpc;
  gpr_timespec deadline;
  uint64_t number;                          // from 1
  uint64_t began_ns;                        // on the monotonic clock
  uint64_t message_ns, quota_ns, queue_ns;  // of a report (rpc.h)
  uint64_t queued_at_ns, delayed_at_ns;     // since when; 0: not now
  int64_t waited_ms[QKV_RPC_WAITS];         // by this request
  uint64_t step_ns;                         // of a stream: since when its message is there; 0: there is none
  _Atomic(qkvi_rpc_phase) phase;            // changed with release before a batch, acquire after its event
  _Atomic uint64_t phase_ns;                // since when, at least; on the clock of qkv_stage_now
  _Atomic bool cancelled;
  _Atomic uint32_t refs;  // 1 for the close event, 1 until the status has been sent
  bool metadata_sent;
  bool spoken;  // its first message has arrived, or none will come
  bool served;  // a message has been given to the handler
  qkvi_rpc_delayed delayed;
  qkvi_rpc_place place;

  // One of each, used by at most one batch at a time.
  qkvi_rpc_op close_op, read_op, send_op, end_op;
  int closed_by_cancel;        // of the close batch
  grpc_byte_buffer *received;  // of the read batch; then the message the handler has
  uint64_t arrived;            // bytes of it, as far as they are counted
  grpc_byte_buffer *outgoing;  // of the send or end batch
  grpc_slice status_text;      // of the end batch
  qkv_segment *segments;       // of `received`; own_segments or allocated
  qkv_segment own_segments[QKVI_RPC_SEGMENTS];
  qkvi_identity identity;
  char session[QKV_NAME_MAX + 1];  // for logs; "": none
};

// Takes the gRPC call, if it may run (qkvi_rpc_limits_enter).
qkv_status qkvi_rpc_call_create(qkv_rpc_server *server, const qkv_rpc_method *method, grpc_call *grpc,
                                const qkvi_identity *identity, gpr_timespec deadline, qkv_rpc_call **out,
                                qkv_error *error);
// Waits for the first message.
void qkvi_rpc_call_start(qkv_rpc_call *call);

// ---- The server, as its calls see it (server.c) ----

qkvi_rpc_limits *qkvi_rpc_server_limits(const qkv_rpc_server *server);
qkvi_rpc_delays *qkvi_rpc_server_delays(const qkv_rpc_server *server);
void *qkvi_rpc_server_context(const qkv_rpc_server *server);
void qkvi_rpc_server_ended(qkv_rpc_server *server, qkv_status status);    // the status is decided
void qkvi_rpc_server_timed(const qkv_rpc_call *call, qkv_status status);  // after ended
void qkvi_rpc_server_report(const qkv_rpc_call *call, qkv_status status, const char *reason);
void qkvi_rpc_server_step(const qkv_rpc_call *call);      // a message of a stream has been served
uint64_t qkvi_rpc_server_number(qkv_rpc_server *server);  // of a new call
void qkvi_rpc_server_call_gone(qkv_rpc_server *server);   // its memory is freed

#endif
