#include "server/auth/jwt.h"

#include <assert.h>
#include <jansson.h>
#include <openssl/bn.h>
#include <openssl/crypto.h>
#include <openssl/ec.h>
#include <openssl/sha.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/auth/jwks.h"
#include "server/reread.h"

enum { LEEWAY_S = 30, KEPT = 1024, SIGNATURE_MAX = 512, ES256_BYTES = 64, DER_MAX = 80 };
#define TIME_MAX 1e15  // seconds; far beyond what a clock shows

// The claims of a token once its signature, issuer and audience are right.
typedef struct claims {
  int64_t expires, not_before;  // seconds since 1970
  char subject[QKVI_JWT_SUBJECT_MAX + 1];
} claims;

typedef struct kept_token {
  uint8_t digest[SHA256_DIGEST_LENGTH];  // of the whole token
  claims said;                           // no subject: the place is free
} kept_token;

struct qkvi_jwt {
  char *path, *issuer, *audience;
  qkv_metric_value *accepted, *refused;
  struct stat seen;
  pthread_rwlock_t lock;  // of all below
  qkvi_jwks *keys;
  uint64_t version;       // of `keys`
  kept_token kept[KEPT];  // by the first bytes of the digest
};

static qkv_status refuse(qkv_error *error, const char *what) {
  return qkv_fail(error, QKV_UNAUTHENTICATED, "the JWT%s", what);
}

// ---- Parts ----

typedef struct parts {
  const char *header, *claims, *signature;
  size_t header_bytes, claims_bytes, signature_bytes;
} parts;

static bool split(const char *token, size_t bytes, parts *found) {
  const char *first = memchr(token, '.', bytes);
  if (first == NULL) return false;
  const char *end = token + bytes, *second = memchr(first + 1, '.', (size_t)(end - first - 1));
  if (second == NULL || memchr(second + 1, '.', (size_t)(end - second - 1)) != NULL) return false;
  *found = (parts){.header = token,
                   .header_bytes = (size_t)(first - token),
                   .claims = first + 1,
                   .claims_bytes = (size_t)(second - first - 1),
                   .signature = second + 1,
                   .signature_bytes = (size_t)(end - second - 1)};
  return true;
}

bool qkvi_jwt_is_one(const char *token, size_t bytes) {
  parts found;
  return split(token, bytes, &found);
}

// An object, or NULL.
static json_t *read_object(const char *text, size_t length) {
  uint8_t bytes[QKVI_JWT_BYTES_MAX];
  size_t count;
  if (qkvi_base64url_read(text, length, bytes, sizeof bytes, &count) != QKV_OK) return NULL;
  json_t *root = json_loadb((const char *)bytes, count, JSON_REJECT_DUPLICATES, NULL);
  if (json_is_object(root)) return root;
  json_decref(root);
  return NULL;
}

// ---- The signature ----

// A JWT has both numbers in 32 bytes each, OpenSSL wants DER.
static size_t write_der(const uint8_t *both, uint8_t *der) {
  ECDSA_SIG *signature = ECDSA_SIG_new();
  BIGNUM *r = BN_bin2bn(both, ES256_BYTES / 2, NULL), *s = BN_bin2bn(both + ES256_BYTES / 2, ES256_BYTES / 2, NULL);
  assert(signature != NULL && r != NULL && s != NULL);
  (void)ECDSA_SIG_set0(signature, r, s);
  const int bytes = i2d_ECDSA_SIG(signature, &der);
  ECDSA_SIG_free(signature);
  assert(bytes > 0 && bytes <= DER_MAX);
  return (size_t)bytes;
}

static bool is_signed(const qkvi_jwk *key, const parts *token) {
  uint8_t signature[SIGNATURE_MAX], der[DER_MAX];
  const uint8_t *checked = signature;
  const size_t bytes = token->header_bytes + 1 + token->claims_bytes;  // what is signed
  size_t count;
  if (qkvi_base64url_read(token->signature, token->signature_bytes, signature, sizeof signature, &count) != QKV_OK)
    return false;
  if (key->algorithm == QKVI_ES256) {
    if (count != ES256_BYTES) return false;
    count = write_der(signature, der);
    checked = der;
  }
  EVP_MD_CTX *context = EVP_MD_CTX_new();
  assert(context != NULL);
  const EVP_MD *digest = key->algorithm == QKVI_EDDSA ? NULL : EVP_sha256();
  const bool good = EVP_DigestVerifyInit(context, NULL, digest, NULL, key->key) == 1 &&
                    EVP_DigestVerify(context, checked, count, (const uint8_t *)token->header, bytes) == 1;
  EVP_MD_CTX_free(context);
  return good;
}

static qkv_status check_signature(const qkvi_jwks *keys, const parts *token, qkv_error *error) {
  json_t *header = read_object(token->header, token->header_bytes);
  if (header == NULL) return refuse(error, "'s header is no JSON object in base64url");
  const char *alg = json_string_value(json_object_get(header, "alg"));
  const char *kid = json_string_value(json_object_get(header, "kid"));
  const qkvi_jwt_algorithm algorithm = alg == NULL ? QKVI_JWT_ALGORITHMS : qkvi_jwt_algorithm_of(alg);
  const qkvi_jwk *key = kid == NULL ? NULL : qkvi_jwks_find(keys, kid);
  const char *wrong = NULL;
  if (json_object_get(header, "crit") != NULL) {
    wrong = "'s header has crit, which this daemon does not know";
  } else if (algorithm == QKVI_JWT_ALGORITHMS) {
    wrong = "'s alg is not RS256, ES256 or EdDSA";
  } else if (key == NULL) {
    wrong = "'s kid is of no key that this daemon knows";
  } else if (key->algorithm != algorithm) {
    wrong = "'s alg is not that of its key";
  } else if (!is_signed(key, token)) {
    wrong = "'s signature is wrong";
  }
  json_decref(header);
  return wrong == NULL ? QKV_OK : refuse(error, wrong);
}

// ---- Claims ----

// False: the claim is present and not a time.
static bool read_time(const json_t *object, const char *name, int64_t *seconds) {
  const json_t *value = json_object_get(object, name);
  const double number = json_number_value(value);
  if (value == NULL) return true;
  if (!json_is_number(value) || !(number >= 0 && number <= TIME_MAX)) return false;
  *seconds = (int64_t)number;
  return true;
}

static bool has_audience(const json_t *said, const char *audience) {
  if (!json_is_array(said)) return json_is_string(said) && strcmp(json_string_value(said), audience) == 0;
  for (size_t i = 0; i < json_array_size(said); i++) {
    const char *each = json_string_value(json_array_get(said, i));
    if (each != NULL && strcmp(each, audience) == 0) return true;
  }
  return false;
}

static const char *read_claims(const qkvi_jwt *jwt, const json_t *object, claims *said) {
  const char *issuer = json_string_value(json_object_get(object, "iss"));
  const char *subject = json_string_value(json_object_get(object, "sub"));
  said->expires = -1;
  said->not_before = 0;
  if (issuer == NULL || strcmp(issuer, jwt->issuer) != 0) return "'s iss is not the issuer that this daemon trusts";
  if (!has_audience(json_object_get(object, "aud"), jwt->audience)) return "'s aud does not have this daemon";
  if (!read_time(object, "exp", &said->expires) || said->expires < 0) return "'s exp is missing or no time";
  if (!read_time(object, "nbf", &said->not_before)) return "'s nbf is no time";
  if (subject == NULL || subject[0] == '\0' || strlen(subject) > QKVI_JWT_SUBJECT_MAX)
    return "'s sub is missing or has more than 256 bytes";
  memcpy(said->subject, subject, strlen(subject) + 1);
  return NULL;
}

// With the lock.
static qkv_status verify(const qkvi_jwt *jwt, const char *token, size_t bytes, claims *said, qkv_error *error) {
  parts found;
  if (!split(token, bytes, &found)) return refuse(error, " has not three parts");
  QKV_TRY(check_signature(jwt->keys, &found, error));
  json_t *object = read_object(found.claims, found.claims_bytes);
  const char *wrong = object == NULL ? "'s claims are no JSON object in base64url" : read_claims(jwt, object, said);
  json_decref(object);
  return wrong == NULL ? QKV_OK : refuse(error, wrong);
}

static size_t place_of(const uint8_t *digest) {
  return (digest[0] | (size_t)digest[1] << 8) % KEPT;
}

static bool find_kept(const qkvi_jwt *jwt, const uint8_t *digest, claims *said) {
  const kept_token *kept = &jwt->kept[place_of(digest)];
  if (kept->said.subject[0] == '\0' || CRYPTO_memcmp(kept->digest, digest, sizeof kept->digest) != 0) return false;
  *said = kept->said;
  return true;
}

// Unless the keys have changed meanwhile.
static void keep(qkvi_jwt *jwt, const uint8_t *digest, const claims *said, uint64_t version) {
  kept_token *place = &jwt->kept[place_of(digest)];
  pthread_rwlock_wrlock(&jwt->lock);
  if (jwt->version == version) {
    memcpy(place->digest, digest, sizeof place->digest);
    place->said = *said;
  }
  pthread_rwlock_unlock(&jwt->lock);
}

static qkv_status check(qkvi_jwt *jwt, const char *token, size_t bytes, int64_t now, char *subject,
                        qkv_error *error) {
  uint8_t digest[SHA256_DIGEST_LENGTH];
  claims said = {0};
  if (bytes > QKVI_JWT_BYTES_MAX) return refuse(error, " has more than 8192 bytes");
  (void)SHA256((const unsigned char *)token, bytes, digest);
  pthread_rwlock_rdlock(&jwt->lock);
  const uint64_t version = jwt->version;
  const bool known = find_kept(jwt, digest, &said);
  const qkv_status status = known ? QKV_OK : verify(jwt, token, bytes, &said, error);
  pthread_rwlock_unlock(&jwt->lock);
  if (status != QKV_OK) return status;
  if (now >= said.expires + LEEWAY_S) return refuse(error, " has expired");
  if (now + LEEWAY_S < said.not_before) return refuse(error, " is not valid yet");
  if (!known) keep(jwt, digest, &said, version);
  memcpy(subject, said.subject, sizeof said.subject);
  return QKV_OK;
}

qkv_status qkvi_jwt_check(qkvi_jwt *jwt, const char *token, size_t bytes, int64_t now,
                          char subject[QKVI_JWT_SUBJECT_MAX + 1], qkv_error *error) {
  const qkv_status status = check(jwt, token, bytes, now, subject, error);
  qkv_metric_add(status == QKV_OK ? jwt->accepted : jwt->refused, 1);
  return status;
}

// ---- Life ----

qkv_status qkvi_jwt_reload(qkvi_jwt *jwt, bool always, bool *changed, qkv_error *error) {
  char *text = NULL;
  qkvi_jwks *keys = NULL;
  *changed = always || qkvi_file_is_changed(jwt->path, &jwt->seen);
  if (!*changed) return QKV_OK;
  QKV_TRY(qkvi_file_read(jwt->path, QKVI_JWKS_BYTES_MAX, &text, &jwt->seen, error));
  const qkv_status status = qkvi_jwks_read(text, strlen(text), &keys, error);
  free(text);
  if (status != QKV_OK) return qkv_error_prefix(error, "%.200s: ", jwt->path);
  pthread_rwlock_wrlock(&jwt->lock);
  qkvi_jwks *old = jwt->keys;
  jwt->keys = keys;
  jwt->version++;
  memset(jwt->kept, 0, sizeof jwt->kept);
  pthread_rwlock_unlock(&jwt->lock);
  qkvi_jwks_destroy(&old);
  return QKV_OK;
}

static char *copy(const char *text) {
  char *made = strdup(text);
  assert(made != NULL);
  return made;
}

qkv_status qkvi_jwt_create(const qkvi_jwt_config *config, qkvi_jwt **out, qkv_error *error) {
  qkvi_jwt *jwt = calloc(1, sizeof *jwt);
  assert(jwt != NULL);
  jwt->path = copy(config->keys);
  jwt->issuer = copy(config->issuer);
  jwt->audience = copy(config->audience);
  jwt->accepted = config->accepted;
  jwt->refused = config->refused;
  pthread_rwlock_init(&jwt->lock, NULL);
  bool changed;
  const qkv_status status = qkvi_jwt_reload(jwt, true, &changed, error);
  if (status != QKV_OK) qkvi_jwt_destroy(&jwt);
  *out = jwt;
  return status;
}

void qkvi_jwt_destroy(qkvi_jwt **jwt) {
  qkvi_jwt *old = *jwt;
  if (old == NULL) return;
  *jwt = NULL;
  pthread_rwlock_destroy(&old->lock);
  qkvi_jwks_destroy(&old->keys);
  free(old->path);
  free(old->issuer);
  free(old->audience);
  free(old);
}
