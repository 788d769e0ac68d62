// TLS: the daemon's certificate, its key, and the authorities of clients' certificates, read anew when their files
// change. Existing connections keep what they have negotiated.
//
// Threads: any.
#ifndef QKV_SERVER_RPC_TLS_H
#define QKV_SERVER_RPC_TLS_H

#include <grpc/grpc_security.h>
#include <stdbool.h>
#include <stdint.h>

#include "engine/base/status.h"

typedef struct qkvi_tls qkvi_tls;

// PEM files. `client_ca` NULL: clients show no certificate; else each must have one that these have signed.
// UNAVAILABLE: a file cannot be read. INVALID_ARGUMENT: one is no certificate or key, or the two do not belong
// together.
qkv_status qkvi_tls_create(const char *certificate, const char *key, const char *client_ca, qkvi_tls **out,
                           qkv_error *error);
void qkvi_tls_destroy(qkvi_tls **tls);  // after the server

// For new connections. Where that fails the previous files stay in force.
qkv_status qkvi_tls_reload(qkvi_tls *tls, bool always, bool *changed, qkv_error *error);

// Copies of the certificate and its key as PEM, which the caller frees.
void qkvi_tls_copy(qkvi_tls *tls, char **certificate, char **key);

// Unix time at which the daemon's own certificate ends, the first one of its file.
int64_t qkvi_tls_expires(const qkvi_tls *tls);

// ---- Connections that we accept ----

// gRPC's secure ports accept by themselves, and 1.51 stops listening for good when no file descriptor is left. So we
// accept the connections ourselves, as listen.c does, and pass them to a secure port that has no socket.
typedef struct qkvi_tls_port {
  void *handler;  // gRPC's, from qkvi_tls_add_port on
} qkvi_tls_port;

// An argument of the server that will have the port, which must not move.
grpc_arg qkvi_tls_port_argument(qkvi_tls_port *port);
// UNAVAILABLE: this gRPC has no such port.
qkv_status qkvi_tls_add_port(grpc_server *server, qkvi_tls *tls, qkvi_tls_port *port, qkv_error *error);
// Takes a connected socket; once the server has started.
void qkvi_tls_give(const qkvi_tls_port *port, int connection);

#endif
