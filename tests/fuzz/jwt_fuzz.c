// server/auth/jwt.h and jwks.h: key sets, tokens of any content, and claims of any content that are well signed.
#include "server/auth/jwt.h"

#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "server/auth/jwks.h"
#include "tests/fuzz/fuzz.h"

enum { NOW = 1800000000, POINT = 32, SIGNATURE = 64, CLAIMS_MAX = 4096 };
#define HEADER "{\"alg\":\"EdDSA\",\"kid\":\"k\"}"

static EVP_PKEY *key;
static qkvi_jwt *jwt;
static qkv_metric_value accepted, refused;

static size_t put_base64url(const uint8_t *bytes, size_t count, char *text) {
  static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
  size_t length = 0, held = 0;
  unsigned bits = 0;
  for (size_t i = 0; i < count; i++) {
    bits = (bits << 8 | bytes[i]) & 0xffff;
    for (held += 8; held >= 6; held -= 6) text[length++] = letters[bits >> (held - 6) & 63];
  }
  if (held > 0) text[length++] = letters[bits << (6 - held) & 63];
  text[length] = '\0';
  return length;
}

static void make_keys(void) {
  uint8_t point[POINT];
  char x[POINT * 2], text[256], path[64];
  size_t bytes = sizeof point;
  key = EVP_PKEY_Q_keygen(NULL, NULL, "ED25519");
  if (key == NULL || EVP_PKEY_get_raw_public_key(key, point, &bytes) != 1) abort();
  (void)put_base64url(point, sizeof point, x);
  const int length =
      snprintf(text, sizeof text, "{\"keys\":[{\"kty\":\"OKP\",\"crv\":\"Ed25519\",\"kid\":\"k\",\"x\":\"%s\"}]}", x);
  const int file = memfd_create("jwks", MFD_CLOEXEC);
  if (file < 0 || write(file, text, (size_t)length) != length) abort();
  (void)snprintf(path, sizeof path, "/proc/self/fd/%d", file);
  const qkvi_jwt_config config = {
      .keys = path, .issuer = "i", .audience = "a", .accepted = &accepted, .refused = &refused};
  qkv_error error = {0};
  if (qkvi_jwt_create(&config, &jwt, &error) != QKV_OK) abort();
  close(file);
}

static void check(const char *token, size_t bytes) {
  char subject[QKVI_JWT_SUBJECT_MAX + 1] = "";
  qkv_error error = {0};
  const qkv_status status = qkvi_jwt_check(jwt, token, bytes, NOW, subject, &error);
  if (status == QKV_OK ? subject[0] == '\0' || strlen(subject) > QKVI_JWT_SUBJECT_MAX
                       : status != QKV_UNAUTHENTICATED || error.text[0] == '\0')
    __builtin_trap();
}

static void check_signed(const uint8_t *claims, size_t count) {
  char token[QKVI_JWT_BYTES_MAX];
  uint8_t signature[SIGNATURE];
  size_t bytes = sizeof signature;
  if (count > CLAIMS_MAX) return;
  size_t length = put_base64url((const uint8_t *)HEADER, strlen(HEADER), token);
  token[length++] = '.';
  length += put_base64url(claims, count, token + length);
  EVP_MD_CTX *context = EVP_MD_CTX_new();
  if (context == NULL || EVP_DigestSignInit(context, NULL, NULL, NULL, key) != 1 ||
      EVP_DigestSign(context, signature, &bytes, (const uint8_t *)token, length) != 1)
    abort();
  EVP_MD_CTX_free(context);
  token[length++] = '.';
  length += put_base64url(signature, bytes, token + length);
  check(token, length);
}

static void read_keys(const uint8_t *data, size_t size) {
  qkvi_jwks *keys = NULL;
  qkv_error error = {0};
  if (qkvi_jwks_read((const char *)data, size, &keys, &error) != QKV_OK && error.text[0] == '\0') __builtin_trap();
  qkvi_jwks_destroy(&keys);
}

// The first byte says which.
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  if (jwt == NULL) make_keys();
  if (size == 0) return 0;
  if (data[0] == 'k') read_keys(data + 1, size - 1);
  if (data[0] == 't') check((const char *)data + 1, size - 1);
  if (data[0] == 'c') check_signed(data + 1, size - 1);
  return 0;
}
