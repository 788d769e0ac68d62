// Bearer tokens that are JSON Web Tokens (RFC 7519), as Kubernetes gives to service accounts.
//
//   HEADER.CLAIMS.SIGNATURE   each base64url; {"alg": "ES256", "kid": "2027-01"}, {"iss": ..., "aud": ..., ...}
//
// Accepted: RS256, ES256 and EdDSA by the key of the key set (jwks.h) that the header names and that is for this
// algorithm; the one issuer, the one audience among the token's; exp, and nbf where present, with 30 s of leeway.
// The result is the token's subject; the auth file says what that may do (auth.h).
//
// A signature costs tens of microseconds to check, so the last 1024 good ones are kept, by a hash of the whole token.
//
// Threads: any; a reload changes the keys from one call to the next.
#ifndef QKV_SERVER_AUTH_JWT_H
#define QKV_SERVER_AUTH_JWT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/metric.h"
#include "engine/base/status.h"

enum { QKVI_JWT_BYTES_MAX = 8192, QKVI_JWT_SUBJECT_MAX = 256 };

typedef struct qkvi_jwt qkvi_jwt;

typedef struct qkvi_jwt_config {
  const char *keys;               // a file
  const char *issuer, *audience;  // copied
  qkv_metric_value *accepted, *refused;
} qkvi_jwt_config;

// UNAVAILABLE: the file cannot be read. INVALID_ARGUMENT: it is no key set.
qkv_status qkvi_jwt_create(const qkvi_jwt_config *config, qkvi_jwt **out, qkv_error *error);
void qkvi_jwt_destroy(qkvi_jwt **jwt);

// Reads the keys again where the file has changed, or with `always`. Where that fails the previous keys stay in
// force. `changed` says whether it was read.
qkv_status qkvi_jwt_reload(qkvi_jwt *jwt, bool always, bool *changed, qkv_error *error);

// Whether a bearer token has the form of one: three parts.
bool qkvi_jwt_is_one(const char *token, size_t bytes);

// The token's subject. UNAUTHENTICATED: "the JWT has expired"; it says what is wrong, and reveals nothing of the
// daemon's keys and names. `now` is in seconds since 1970.
qkv_status qkvi_jwt_check(qkvi_jwt *jwt, const char *token, size_t bytes, int64_t now,
                          char subject[QKVI_JWT_SUBJECT_MAX + 1], qkv_error *error);

#endif
