// The auth file: which bearer tokens, client certificates and local users are known, and what each may do
// (docs/security.md).
//
//   token sha256:HEX team-a read,write expires=2027-01-31T00:00:00Z
//   cert CN=worker-1 team-a read,write
//   unix uid=1000 team-a read,write
//   jwt sub=system:serviceaccount:team-a:worker team-a read,write
//
// Independent of gRPC: it takes a token or a certificate's name, from an HTTP listener as well.
//
// Threads: any; a reload takes effect between two calls.
#ifndef QKV_SERVER_AUTH_AUTH_H
#define QKV_SERVER_AUTH_AUTH_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#include "engine/base/name.h"
#include "engine/base/status.h"
#include "server/auth/jwt.h"

typedef struct qkvi_auth qkvi_auth;

typedef enum qkvi_role { QKVI_ROLE_READ = 1, QKVI_ROLE_WRITE = 2, QKVI_ROLE_ADMIN = 4 } qkvi_role;

typedef struct qkvi_grant {
  char tenant[QKV_NAME_MAX + 1];  // "": any; the call says which
  unsigned roles;                 // of qkvi_role
} qkvi_grant;

// Reads the file. Tokens that are JWTs are checked by `jwt`, borrowed; NULL: there are none. UNAVAILABLE: the file
// cannot be read. INVALID_ARGUMENT: "FILE:3: ...".
qkv_status qkvi_auth_create(const char *path, qkvi_jwt *jwt, qkvi_auth **out, qkv_error *error);
void qkvi_auth_destroy(qkvi_auth **auth);

// Reads the file again where it has changed, or with `always`. Where that fails the previous content stays in force.
// `changed` says whether it was read.
qkv_status qkvi_auth_reload(qkvi_auth *auth, bool always, bool *changed, qkv_error *error);

// What the token, or the subject of the JWT, in the value of an Authorization header may do: "Bearer TOKEN".
// UNAUTHENTICATED: it is not known, or has expired. The time this takes does not depend on how much of a known token
// matches.
qkv_status qkvi_auth_bearer(qkvi_auth *auth, const char *value, size_t bytes, qkvi_grant *grant, qkv_error *error);
// What a client may do whose certificate has been verified and has this name; `kind` is "CN" or "SAN".
// UNAUTHENTICATED: it is not known, or has expired; `known` says which.
qkv_status qkvi_auth_certificate(qkvi_auth *auth, const char *kind, const char *name, qkvi_grant *grant, bool *known,
                                 qkv_error *error);
// What the process of this user and group may do at a unix socket: the line of the user counts, else that of the
// group. UNAUTHENTICATED as above.
qkv_status qkvi_auth_process(qkvi_auth *auth, uid_t user, gid_t group, qkvi_grant *grant, bool *known,
                             qkv_error *error);

// The role that a method needs, 0: none. Methods that this does not know need `write`, those of Admin `admin`.
unsigned qkvi_auth_role_of(const char *path);
// Whether a method of Admin is about the whole daemon. Then it needs a grant of all tenants, too.
bool qkvi_auth_is_daemon_wide(const char *path);
const char *qkvi_auth_role_name(unsigned role);

#endif
