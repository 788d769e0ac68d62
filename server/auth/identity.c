#include "server/auth/identity.h"

#include <grpc/grpc_security.h>
#include <grpc/support/alloc.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "server/rpc/internal.h"

enum { ALL_ROLES = QKVI_ROLE_READ | QKVI_ROLE_WRITE | QKVI_ROLE_ADMIN };

#define TENANT_KEY "qkv-tenant"
#define AUTHORIZATION_KEY "authorization"
#define TRACE_KEY "traceparent"

static bool has_key(const grpc_metadata *pair, const char *key) {
  return GRPC_SLICE_LENGTH(pair->key) == strlen(key) &&
         memcmp(GRPC_SLICE_START_PTR(pair->key), key, strlen(key)) == 0;
}

static qkv_status read_tenant(grpc_slice value, qkvi_identity *identity, qkv_error *error) {
  char text[QKV_NAME_MAX + 2] = "";
  const size_t length = GRPC_SLICE_LENGTH(value), copied = length < sizeof text - 1 ? length : sizeof text - 1;
  if (identity->tenant[0] != '\0')
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "the metadata " TENANT_KEY " is given twice");
  memcpy(text, GRPC_SLICE_START_PTR(value), copied);
  if (memchr(text, '\0', copied) != NULL)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "the metadata " TENANT_KEY " holds a NUL byte");
  QKV_TRY(qkv_name_check(text, "the metadata " TENANT_KEY, error));
  memcpy(identity->tenant, text, copied + 1);
  return QKV_OK;
}

// "00-<32 digits>-<16 digits>-01", for logs alone: anything else is ignored.
static void read_trace(grpc_slice value, qkvi_identity *identity) {
  enum { BYTES = 55 };
  static const char digits[] = "0123456789abcdef";
  const char *text = (const char *)GRPC_SLICE_START_PTR(value);
  if (GRPC_SLICE_LENGTH(value) != BYTES) return;
  for (int i = 0; i < BYTES; i++) {
    const bool dash = i == 2 || i == 35 || i == 52;
    if (dash ? text[i] != '-' : memchr(digits, text[i], sizeof digits - 1) == NULL) return;
  }
  memcpy(identity->traceparent, text, BYTES);
  identity->traceparent[BYTES] = '\0';
}

// ---- Credentials ----

// The descriptor of a connection that server/rpc/listen.c has accepted; -1: it is a TLS connection. gRPC's calls hold
// their connection, and it closes the descriptor when the last of them is gone: no other connection gets the number
// while there is a call (tests/server/rpc_test.c).
static int descriptor_of(grpc_call *call) {
  char *named = grpc_call_get_peer(call);
  const int fd = strncmp(named, "fd:", 3) == 0 ? (int)strtol(named + 3, NULL, 10) : -1;
  gpr_free(named);
  return fd;
}

// The process behind a unix socket.
static bool process_of(int fd, struct ucred *process) {
  struct sockaddr_storage address = {0};
  socklen_t length = sizeof address, size = sizeof *process;
  if (fd < 0 || getsockname(fd, (struct sockaddr *)&address, &length) != 0 || address.ss_family != AF_UNIX)
    return false;
  return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, process, &size) == 0;
}

// Credentials of the process at a unix socket when it connected, by the kernel.
static bool peer_process(grpc_call *call, struct ucred *process) {
  return process_of(descriptor_of(call), process);
}

// The first of the certificate's names of this kind that the file has, expired or not. False: it has none.
static bool find_name(qkvi_auth *auth, const grpc_auth_context *context, const char *property, const char *kind,
                      qkvi_grant *grant, bool *known, qkv_status *status, qkv_error *error) {
  grpc_auth_property_iterator names = grpc_auth_context_find_properties_by_name(context, property);
  bool any = false;
  *status = QKV_UNAUTHENTICATED;
  for (const grpc_auth_property *name = grpc_auth_property_iterator_next(&names); name != NULL && !*known;
       name = grpc_auth_property_iterator_next(&names)) {
    if (strlen(name->value) != name->value_length) continue;  // a zero byte, and something else behind it
    *error = (qkv_error){0};                                  // of the name before it
    *status = qkvi_auth_certificate(auth, kind, name->value, grant, known, error);
    any = true;
  }
  return any;
}

// `shown` says whether the client has a certificate that was verified.
static qkv_status read_certificate(qkvi_auth *auth, grpc_call *call, bool *shown, qkvi_grant *grant,
                                   qkv_error *error) {
  grpc_auth_context *context = grpc_call_auth_context(call);
  qkv_status status = QKV_UNAUTHENTICATED;
  bool known = false;
  *shown = context != NULL && grpc_auth_context_peer_is_authenticated(context);
  if (*shown) {
    *shown = find_name(auth, context, GRPC_X509_SAN_PROPERTY_NAME, "SAN", grant, &known, &status, error);
    if (!known) *shown |= find_name(auth, context, GRPC_X509_CN_PROPERTY_NAME, "CN", grant, &known, &status, error);
  }
  if (context != NULL) grpc_auth_context_release(context);
  return status;
}

// A token counts, else a certificate, else the user of a unix socket.
static qkv_status find_grant(const qkvi_identity_rules *rules, grpc_call *call, const grpc_slice *authorization,
                             qkvi_grant *grant, qkv_error *error) {
  struct ucred process;
  bool shown = false;
  if (authorization != NULL)
    return qkvi_auth_bearer(rules->auth, (const char *)GRPC_SLICE_START_PTR(*authorization),
                            GRPC_SLICE_LENGTH(*authorization), grant, error);
  qkv_status status = read_certificate(rules->auth, call, &shown, grant, error);
  if (shown) return status;
  const bool local = peer_process(call, &process);
  bool known = false;
  if (local) status = qkvi_auth_process(rules->auth, process.uid, process.gid, grant, &known, error);
  if (known) return status;
  *error = (qkv_error){0};
  if (rules->anonymous || (rules->anonymous_unix && local)) {
    *grant = (qkvi_grant){.roles = ALL_ROLES};
    return QKV_OK;
  }
  return qkv_fail(error, QKV_UNAUTHENTICATED,
                  "the call has no authorization: this daemon wants a bearer token or a client certificate");
}

static qkv_status lacks_role(unsigned role, qkv_error *error) {
  return qkv_fail(error, QKV_PERMISSION_DENIED,
                  "the call needs the role %s, which its token, certificate or user has not",
                  qkvi_auth_role_name(role));
}

static qkv_status check_grant(const qkvi_grant *grant, const char *path, qkv_error *error) {
  const unsigned role = qkvi_auth_role_of(path);
  if (role != 0 && (grant->roles & role) == 0) return lacks_role(role, error);
  if (grant->tenant[0] == '\0' || !qkvi_auth_is_daemon_wide(path)) return QKV_OK;
  return qkv_fail(error, QKV_PERMISSION_DENIED,
                  "the call is about the whole daemon: it needs the role admin for all tenants (*), and has it for "
                  "%s alone",
                  grant->tenant);
}

static void bind_to(const qkvi_grant *grant, qkvi_identity *identity) {
  identity->bound = grant->tenant[0] != '\0';
  if (identity->bound) memcpy(identity->tenant, grant->tenant, sizeof identity->tenant);
}

// A refusal, too, is one of the grant's tenant, whatever the metadata say: so the audit log has it.
static qkv_status apply(const qkvi_grant *grant, const char *path, qkvi_identity *identity, qkv_error *error) {
  qkv_status status = check_grant(grant, path, error);
  const bool other =
      grant->tenant[0] != '\0' && identity->tenant[0] != '\0' && strcmp(identity->tenant, grant->tenant) != 0;
  if (status == QKV_OK && other) status = qkv_fail(error, QKV_NOT_FOUND, "no tenant %s", identity->tenant);
  bind_to(grant, identity);
  identity->roles = grant->roles;
  return status;
}

qkv_status qkvi_identity_read(const qkvi_identity_rules *rules, grpc_call *call, const char *path,
                              const grpc_metadata_array *metadata, qkvi_identity *identity, qkv_error *error) {
  const grpc_slice *authorization = NULL;
  const unsigned role = qkvi_auth_role_of(path);
  identity->tenant[0] = '\0';
  identity->bound = false;
  identity->roles = ALL_ROLES;
  identity->traceparent[0] = '\0';
  for (size_t i = 0; i < metadata->count; i++) {
    const grpc_metadata *pair = &metadata->metadata[i];
    if (has_key(pair, TRACE_KEY)) read_trace(pair->value, identity);
    if (has_key(pair, TENANT_KEY)) QKV_TRY(read_tenant(pair->value, identity, error));
    if (!has_key(pair, AUTHORIZATION_KEY)) continue;
    if (authorization != NULL && rules->auth != NULL)
      return qkv_fail(error, QKV_UNAUTHENTICATED, "the metadata " AUTHORIZATION_KEY " is given twice");
    authorization = &pair->value;
  }
  if (rules->auth != NULL && role == 0) identity->tenant[0] = '\0';  // the tenant is not authenticated
  if (rules->auth == NULL || role == 0) return QKV_OK;
  qkvi_grant grant = {0};
  QKV_TRY(find_grant(rules, call, authorization, &grant, error));
  return apply(&grant, path, identity, error);
}

const char *qkvi_call_tenant(const qkv_rpc_call *call) {
  return call->identity.tenant[0] != '\0' ? call->identity.tenant : QKV_TENANT_DEFAULT;
}

bool qkvi_call_is_bound(const qkv_rpc_call *call) {
  return call->identity.bound;
}

qkv_status qkvi_call_check_role(const qkv_rpc_call *call, qkvi_role role, qkv_error *error) {
  return (call->identity.roles & role) != 0 ? QKV_OK : lacks_role(role, error);
}

qkv_status qkvi_asked_tenant(const qkv_rpc_call *call, const char *field, const char **tenant, qkv_error *error) {
  const char *said = call->identity.tenant;
  if (field[0] != '\0') QKV_TRY(qkv_name_check(field, "tenant", error));
  const bool differ = said[0] != '\0' && field[0] != '\0' && strcmp(said, field) != 0;
  if (differ && call->identity.bound) return qkv_fail(error, QKV_NOT_FOUND, "no tenant %s", field);
  if (differ)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "tenant is %s, the call's " TENANT_KEY " is %s", field, said);
  *tenant = said[0] != '\0' ? said : field;
  return QKV_OK;
}

qkv_status qkvi_request_tenant(const qkv_rpc_call *call, const char *field, const char **tenant, qkv_error *error) {
  QKV_TRY(qkvi_asked_tenant(call, field, tenant, error));
  if ((*tenant)[0] == '\0') *tenant = QKV_TENANT_DEFAULT;
  return QKV_OK;
}

// ---- The peer ----

static bool write_address(const struct sockaddr_storage *address, socklen_t length, char *text, size_t bytes) {
  char host[INET6_ADDRSTRLEN], port[8];
  if (getnameinfo((const struct sockaddr *)address, length, host, sizeof host, port, sizeof port,
                  NI_NUMERICHOST | NI_NUMERICSERV) != 0)
    return false;
  const bool brackets = address->ss_family == AF_INET6;
  (void)snprintf(text, bytes, "%s%s%s:%s", brackets ? "[" : "", host, brackets ? "]" : "", port);
  return true;
}

void qkvi_socket_peer_write(int fd, char *text, size_t bytes) {
  struct sockaddr_storage address = {0};
  socklen_t length = sizeof address;
  struct ucred process;
  if (process_of(fd, &process)) {
    (void)snprintf(text, bytes, "unix, process %d of user %u", (int)process.pid, (unsigned)process.uid);
  } else if (getpeername(fd, (struct sockaddr *)&address, &length) != 0 ||
             !write_address(&address, length, text, bytes)) {
    (void)snprintf(text, bytes, "gone");
  }
}

void qkvi_peer_write(grpc_call *call, char *text, size_t bytes) {
  char *named = grpc_call_get_peer(call);
  if (strncmp(named, "ipv", 3) == 0) {  // of a TLS connection
    (void)snprintf(text, bytes, "%s", strchr(named, ':') + 1);
  } else {
    qkvi_socket_peer_write(descriptor_of(call), text, bytes);
  }
  gpr_free(named);
}

bool qkvi_call_user(const qkv_rpc_call *call, uid_t *user) {
  struct ucred process;
  if (!peer_process(call->grpc, &process)) return false;
  *user = process.uid;
  return true;
}

const char *qkvi_tenant_to_log(const char *tenant) {
  return strcmp(tenant, QKV_TENANT_DEFAULT) == 0 ? NULL : tenant;
}
