// The public keys that JWTs are checked with: a JSON Web Key Set (RFC 7517).
//
//   {"keys": [{"kty": "EC", "crv": "P-256", "kid": "2027-01", "x": "...", "y": "..."}, ...]}
//
// A key is used where it has a kid and is RSA of 2048 to 4096 bits (RS256), EC on P-256 (ES256) or OKP Ed25519
// (EdDSA). It is valid for this one algorithm alone, whatever a token says. Other keys, symmetric ones included, are
// ignored.
//
// Threads: immutable once read.
#ifndef QKV_SERVER_AUTH_JWKS_H
#define QKV_SERVER_AUTH_JWKS_H

#include <openssl/evp.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"

enum { QKVI_JWKS_BYTES_MAX = 1 << 20, QKVI_JWKS_KEYS_MAX = 64, QKVI_KID_MAX = 128 };

typedef enum qkvi_jwt_algorithm { QKVI_RS256, QKVI_ES256, QKVI_EDDSA, QKVI_JWT_ALGORITHMS } qkvi_jwt_algorithm;

typedef struct qkvi_jwk {
  char kid[QKVI_KID_MAX + 1];
  qkvi_jwt_algorithm algorithm;
  EVP_PKEY *key;
} qkvi_jwk;

typedef struct qkvi_jwks qkvi_jwks;

// INVALID_ARGUMENT: it is no key set, has no key that can be used, too many, or two of one kid.
qkv_status qkvi_jwks_read(const char *text, size_t bytes, qkvi_jwks **out, qkv_error *error);
void qkvi_jwks_destroy(qkvi_jwks **keys);
// NULL: there is none. Borrowed.
const qkvi_jwk *qkvi_jwks_find(const qkvi_jwks *keys, const char *kid);

// "RS256", "ES256" or "EdDSA"; QKVI_JWT_ALGORITHMS for all else.
qkvi_jwt_algorithm qkvi_jwt_algorithm_of(const char *name);

// base64url without padding (RFC 4648), of at most `bytes_max` bytes. INVALID_ARGUMENT: it is not that, or longer; a
// text has one form alone.
qkv_status qkvi_base64url_read(const char *text, size_t length, uint8_t *bytes, size_t bytes_max, size_t *count);

#endif
