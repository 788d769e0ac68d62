#include "server/identity.h"

#include <grpc/support/alloc.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "server/rpc_internal.h"

#define TENANT_KEY "qkv-tenant"

static bool is_tenant(const grpc_metadata *pair) {
  return GRPC_SLICE_LENGTH(pair->key) == strlen(TENANT_KEY) &&
         memcmp(GRPC_SLICE_START_PTR(pair->key), TENANT_KEY, strlen(TENANT_KEY)) == 0;
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

qkv_status qkvi_identity_read(const grpc_metadata_array *metadata, qkvi_identity *identity, qkv_error *error) {
  identity->tenant[0] = '\0';
  for (size_t i = 0; i < metadata->count; i++) {
    if (is_tenant(&metadata->metadata[i])) QKV_TRY(read_tenant(metadata->metadata[i].value, identity, error));
  }
  return QKV_OK;
}

const char *qkvi_call_tenant(const qkv_rpc_call *call) {
  return call->identity.tenant[0] != '\0' ? call->identity.tenant : QKV_TENANT_DEFAULT;
}

qkv_status qkvi_asked_tenant(const qkv_rpc_call *call, const char *field, const char **tenant, qkv_error *error) {
  const char *said = call->identity.tenant;
  if (field[0] != '\0') QKV_TRY(qkv_name_check(field, "tenant", error));
  if (said[0] != '\0' && field[0] != '\0' && strcmp(said, field) != 0)
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

static bool write_process(int fd, char *text, size_t bytes) {
  struct ucred peer;
  socklen_t length = sizeof peer;
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) return false;
  (void)snprintf(text, bytes, "unix, process %d of user %u", (int)peer.pid, (unsigned)peer.uid);
  return true;
}

// gRPC knows the descriptor alone of connections that rpc_listen.c has accepted; while the call is not cancelled it
// is that of the connection.
void qkvi_call_peer(const qkv_rpc_call *call, char *text, size_t bytes) {
  struct sockaddr_storage address = {0};
  socklen_t length = sizeof address;
  char *named = grpc_call_get_peer(call->grpc);
  const int fd = strncmp(named, "fd:", 3) == 0 ? (int)strtol(named + 3, NULL, 10) : -1;
  const bool known = getpeername(fd, (struct sockaddr *)&address, &length) == 0;
  gpr_free(named);
  if (known && !qkv_rpc_cancelled(call) &&
      (address.ss_family == AF_UNIX ? write_process(fd, text, bytes) : write_address(&address, length, text, bytes)))
    return;
  (void)snprintf(text, bytes, "gone");
}

const char *qkvi_tenant_to_log(const char *tenant) {
  return strcmp(tenant, QKV_TENANT_DEFAULT) == 0 ? NULL : tenant;
}
