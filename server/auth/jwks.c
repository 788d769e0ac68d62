#include "server/auth/jwks.h"

#include <assert.h>
#include <jansson.h>
#include <openssl/bn.h>
#include <openssl/core_names.h>
#include <openssl/ec.h>
#include <openssl/param_build.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum { RSA_BYTES_MIN = 256, RSA_BYTES_MAX = 512, EXPONENT_BYTES_MAX = 8, POINT_BYTES = 32 };

struct qkvi_jwks {
  size_t count;
  qkvi_jwk keys[QKVI_JWKS_KEYS_MAX];
};

// ---- base64url ----

// 64: not a base64url character.
static unsigned value_of(char letter) {
  static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
  const char *found = letter == '\0' ? NULL : strchr(letters, letter);
  return found == NULL ? 64 : (unsigned)(found - letters);
}

qkv_status qkvi_base64url_read(const char *text, size_t length, uint8_t *bytes, size_t bytes_max, size_t *count) {
  unsigned bits = 0, held = 0;  // bits that have been read and not written
  *count = 0;
  if (length % 4 == 1) return QKV_INVALID_ARGUMENT;
  for (size_t i = 0; i < length; i++) {
    const unsigned value = value_of(text[i]);
    if (value == 64) return QKV_INVALID_ARGUMENT;
    bits = (bits << 6 | value) & 0xffff;
    held += 6;
    if (held < 8) continue;
    held -= 8;
    if (*count == bytes_max) return QKV_INVALID_ARGUMENT;
    bytes[(*count)++] = (uint8_t)(bits >> held);
  }
  return (bits & ((1U << held) - 1)) == 0 ? QKV_OK : QKV_INVALID_ARGUMENT;
}

// ---- Keys ----

static const char *text_of(const json_t *object, const char *name) {
  const char *text = json_string_value(json_object_get(object, name));
  return text == NULL ? "" : text;
}

// 0: no number, or too many bits.
static size_t bytes_of(const json_t *object, const char *name, uint8_t *bytes, size_t bytes_max) {
  const char *text = text_of(object, name);
  size_t count;
  return qkvi_base64url_read(text, strlen(text), bytes, bytes_max, &count) == QKV_OK ? count : 0;
}

// Takes ownership of the builder.
static EVP_PKEY *build_key(const char *type, OSSL_PARAM_BLD *builder) {
  OSSL_PARAM *parameters = OSSL_PARAM_BLD_to_param(builder);
  EVP_PKEY_CTX *context = EVP_PKEY_CTX_new_from_name(NULL, type, NULL);
  EVP_PKEY *key = NULL;
  if (parameters == NULL || context == NULL || EVP_PKEY_fromdata_init(context) != 1 ||
      EVP_PKEY_fromdata(context, &key, EVP_PKEY_PUBLIC_KEY, parameters) != 1)
    key = NULL;
  EVP_PKEY_CTX_free(context);
  OSSL_PARAM_free(parameters);
  OSSL_PARAM_BLD_free(builder);
  return key;
}

static EVP_PKEY *read_rsa(const json_t *object) {
  uint8_t n[RSA_BYTES_MAX], e[EXPONENT_BYTES_MAX];
  const size_t n_bytes = bytes_of(object, "n", n, sizeof n), e_bytes = bytes_of(object, "e", e, sizeof e);
  if (n_bytes < RSA_BYTES_MIN || n[0] < 0x80 || n[n_bytes - 1] % 2 == 0) return NULL;
  if (e_bytes == 0 || e[e_bytes - 1] % 2 == 0 || (e_bytes == 1 && e[0] == 1)) return NULL;
  OSSL_PARAM_BLD *builder = OSSL_PARAM_BLD_new();
  BIGNUM *modulus = BN_bin2bn(n, (int)n_bytes, NULL), *exponent = BN_bin2bn(e, (int)e_bytes, NULL);
  assert(builder != NULL && modulus != NULL && exponent != NULL);
  (void)OSSL_PARAM_BLD_push_BN(builder, OSSL_PKEY_PARAM_RSA_N, modulus);
  (void)OSSL_PARAM_BLD_push_BN(builder, OSSL_PKEY_PARAM_RSA_E, exponent);
  EVP_PKEY *key = build_key("RSA", builder);
  BN_free(modulus);
  BN_free(exponent);
  return key;
}

// OpenSSL refuses a point that is not on the curve.
static EVP_PKEY *read_ec(const json_t *object) {
  uint8_t point[1 + 2 * POINT_BYTES] = {POINT_CONVERSION_UNCOMPRESSED};
  if (strcmp(text_of(object, "crv"), "P-256") != 0 || bytes_of(object, "x", point + 1, POINT_BYTES) != POINT_BYTES ||
      bytes_of(object, "y", point + 1 + POINT_BYTES, POINT_BYTES) != POINT_BYTES)
    return NULL;
  OSSL_PARAM_BLD *builder = OSSL_PARAM_BLD_new();
  assert(builder != NULL);
  (void)OSSL_PARAM_BLD_push_utf8_string(builder, OSSL_PKEY_PARAM_GROUP_NAME, "P-256", 0);
  (void)OSSL_PARAM_BLD_push_octet_string(builder, OSSL_PKEY_PARAM_PUB_KEY, point, sizeof point);
  return build_key("EC", builder);
}

static EVP_PKEY *read_okp(const json_t *object) {
  uint8_t point[POINT_BYTES];
  if (strcmp(text_of(object, "crv"), "Ed25519") != 0 || bytes_of(object, "x", point, sizeof point) != POINT_BYTES)
    return NULL;
  return EVP_PKEY_new_raw_public_key(EVP_PKEY_ED25519, NULL, point, sizeof point);
}

static const struct family {
  const char *kty, *alg;
  EVP_PKEY *(*read)(const json_t *object);
} families[QKVI_JWT_ALGORITHMS] = {
    [QKVI_RS256] = {"RSA", "RS256", read_rsa},
    [QKVI_ES256] = {"EC", "ES256", read_ec},
    [QKVI_EDDSA] = {"OKP", "EdDSA", read_okp},
};

qkvi_jwt_algorithm qkvi_jwt_algorithm_of(const char *name) {
  size_t i = 0;
  while (i < QKVI_JWT_ALGORITHMS && strcmp(families[i].alg, name) != 0) i++;
  return (qkvi_jwt_algorithm)i;
}

// False: a key that is not used.
static bool read_key(const json_t *object, qkvi_jwk *key) {
  const char *kid = text_of(object, "kid"), *use = text_of(object, "use"), *alg = text_of(object, "alg");
  const char *kty = text_of(object, "kty");
  if (kid[0] == '\0' || strlen(kid) > QKVI_KID_MAX || (use[0] != '\0' && strcmp(use, "sig") != 0)) return false;
  for (size_t i = 0; i < QKVI_JWT_ALGORITHMS; i++) {
    if (strcmp(kty, families[i].kty) != 0 || (alg[0] != '\0' && strcmp(alg, families[i].alg) != 0)) continue;
    memcpy(key->kid, kid, strlen(kid) + 1);
    key->algorithm = (qkvi_jwt_algorithm)i;
    key->key = families[i].read(object);
    return key->key != NULL;
  }
  return false;
}

// ---- The set ----

const qkvi_jwk *qkvi_jwks_find(const qkvi_jwks *keys, const char *kid) {
  for (size_t i = 0; i < keys->count; i++) {
    if (strcmp(keys->keys[i].kid, kid) == 0) return &keys->keys[i];
  }
  return NULL;
}

static qkv_status read_keys(const json_t *list, qkvi_jwks *into, qkv_error *error) {
  if (!json_is_array(list))
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "it is no JSON Web Key Set: an object with a list \"keys\"");
  for (size_t i = 0; i < json_array_size(list); i++) {
    qkvi_jwk read = {.kid = ""};
    if (!read_key(json_array_get(list, i), &read)) continue;
    const char *wrong = into->count == QKVI_JWKS_KEYS_MAX        ? "more than 64 keys"
                        : qkvi_jwks_find(into, read.kid) != NULL ? "two keys of one kid"
                                                                 : NULL;
    if (wrong != NULL) {
      EVP_PKEY_free(read.key);
      return qkv_fail(error, QKV_INVALID_ARGUMENT, "it has %s", wrong);
    }
    into->keys[into->count++] = read;
  }
  if (into->count > 0) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT,
                  "it has no key for RS256, ES256 or EdDSA with a kid: RSA of 2048 to 4096 bits, P-256, or Ed25519");
}

qkv_status qkvi_jwks_read(const char *text, size_t bytes, qkvi_jwks **out, qkv_error *error) {
  json_error_t reason;
  json_t *root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &reason);
  if (root == NULL) return qkv_fail(error, QKV_INVALID_ARGUMENT, "line %d: %.100s", reason.line, reason.text);
  qkvi_jwks *keys = calloc(1, sizeof *keys);
  assert(keys != NULL);
  const qkv_status status = read_keys(json_object_get(root, "keys"), keys, error);
  json_decref(root);
  if (status != QKV_OK) qkvi_jwks_destroy(&keys);
  *out = keys;
  return status;
}

void qkvi_jwks_destroy(qkvi_jwks **keys) {
  qkvi_jwks *old = *keys;
  if (old == NULL) return;
  *keys = NULL;
  for (size_t i = 0; i < old->count; i++) EVP_PKEY_free(old->keys[i].key);
  free(old);
}
