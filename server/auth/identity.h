// The identity of a call: its peer, and its tenant, which the names of sessions belong to (docs/tenants.md).
//
// A client says its tenant in the metadata `qkv-tenant`, which are read once, when the call arrives; some requests
// have a field for it, too. Where the daemon has an auth file (auth.h), a token or certificate says what the client
// may do, and for which tenant: other tenants do not exist for it.
//
// Threads: any, like the call. Nothing is allocated for a tenant; results live as long as the call, or the request.
#ifndef QKV_SERVER_AUTH_IDENTITY_H
#define QKV_SERVER_AUTH_IDENTITY_H

#include <grpc/grpc.h>
#include <stdbool.h>
#include <sys/socket.h>
#include <sys/types.h>

#include "engine/base/name.h"
#include "server/auth/auth.h"

typedef struct qkv_rpc_call qkv_rpc_call;  // rpc.h

typedef struct qkvi_identity {
  char tenant[QKV_NAME_MAX + 1];  // of the grant or the metadata, a valid name; "": neither has one
  bool bound;                     // the grant says it: no other tenant exists for this call
  unsigned roles;                 // of qkvi_role, that the grant has
  char traceparent[56];           // of the metadata, as W3C's Trace Context has it; "": there is none
} qkvi_identity;

typedef struct qkvi_identity_rules {
  qkvi_auth *auth;                 // NULL: every client may do everything
  bool anonymous_unix, anonymous;  // calls without credentials are allowed, those of unix sockets or all
} qkvi_identity_rules;

// The identity of a call of the method `path`. INVALID_ARGUMENT: "the metadata qkv-tenant has byte 0x20 at 3, ...",
// or it is given twice. UNAUTHENTICATED: no token, certificate or user, or an unknown one. PERMISSION_DENIED: the
// method needs another role. NOT_FOUND: qkv-tenant is not the client's own.
qkv_status qkvi_identity_read(const qkvi_identity_rules *rules, grpc_call *call, const char *path,
                              const grpc_metadata_array *metadata, qkvi_identity *identity, qkv_error *error);

// The tenant of a call whose request has no field for it: that of the metadata, else "default".
const char *qkvi_call_tenant(const qkv_rpc_call *call);
// The tenant of a request that has a field for it: that of the metadata, else the field's, else "". INVALID_ARGUMENT
// where both are given and differ, or the field is no name; NOT_FOUND where the client's own differs.
qkv_status qkvi_asked_tenant(const qkv_rpc_call *call, const char *field, const char **tenant, qkv_error *error);
// The same, with "default" for "".
qkv_status qkvi_request_tenant(const qkv_rpc_call *call, const char *field, const char **tenant, qkv_error *error);

// Of a request that does more than its method needs, such as an Attend with rows to append: PERMISSION_DENIED unless
// the call's token or certificate has the role.
qkv_status qkvi_call_check_role(const qkv_rpc_call *call, qkvi_role role, qkv_error *error);

// Whether the call's token or certificate is bound to one tenant: no other tenant exists for it.
bool qkvi_call_is_bound(const qkv_rpc_call *call);

// For the field "tenant" of a log line, in json_pack's format s*: NULL, which leaves the field out, for the default
// one.
const char *qkvi_tenant_to_log(const char *tenant);

// Where a call, or a socket, came from, for logs: "127.0.0.1:41234", "unix, process 17 of user 1000", or "gone".
// Allocates.
void qkvi_peer_write(grpc_call *call, char *text, size_t bytes);
void qkvi_socket_peer_write(int fd, char *text, size_t bytes);
// The user of the process at a unix socket when it connected, by the kernel. False: the call did not come by a unix
// socket.
bool qkvi_call_user(const qkv_rpc_call *call, uid_t *user);

#endif
