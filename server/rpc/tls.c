#include "server/rpc/tls.h"

#include <assert.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include "server/reread.h"

enum { CERTIFICATE, KEY, CLIENT_CA, FILES };

#define FILE_BYTES_MAX (1 << 20)
#define PORT_NAME "external:qkvd"
// Whose layout of a handler (below) this is.
#define GRPC_KNOWN "29.0.0"

struct qkvi_tls {
  char *paths[FILES];  // of client authorities: NULL where there are none
  struct stat seen[FILES];
  pthread_mutex_t lock;
  char *pem[FILES];
  uint64_t version, given;  // of `pem`; what gRPC has
  _Atomic int64_t expires;  // Unix time, of pem[CERTIFICATE]
};

// ---- Files ----

static X509 *parse_certificate(const char *pem) {
  BIO *memory = BIO_new_mem_buf(pem, -1);
  X509 *parsed = PEM_read_bio_X509(memory, NULL, NULL, NULL);
  BIO_free(memory);
  return parsed;
}

static EVP_PKEY *parse_key(const char *pem) {
  BIO *memory = BIO_new_mem_buf(pem, -1);
  EVP_PKEY *parsed = PEM_read_bio_PrivateKey(memory, NULL, NULL, (void *)"");
  BIO_free(memory);
  return parsed;
}

static int64_t end_of(const char *pem) {
  X509 *certificate = parse_certificate(pem);
  struct tm end = {0};
  const bool known = ASN1_TIME_to_tm(X509_get0_notAfter(certificate), &end) == 1;
  X509_free(certificate);
  return known ? (int64_t)timegm(&end) : 0;
}

// For invalid files gRPC only makes connections fail.
static qkv_status check(const qkvi_tls *tls, char *const *pem, qkv_error *error) {
  X509 *certificate = parse_certificate(pem[CERTIFICATE]);
  EVP_PKEY *key = parse_key(pem[KEY]);
  X509 *authority = tls->paths[CLIENT_CA] != NULL ? parse_certificate(pem[CLIENT_CA]) : NULL;
  qkv_status status = QKV_OK;
  if (certificate == NULL)
    status =
        qkv_fail(error, QKV_INVALID_ARGUMENT, "tls-cert %.300s holds no PEM certificate", tls->paths[CERTIFICATE]);
  else if (key == NULL)
    status = qkv_fail(error, QKV_INVALID_ARGUMENT, "tls-key %.300s holds no PEM private key", tls->paths[KEY]);
  else if (X509_check_private_key(certificate, key) != 1)
    status = qkv_fail(error, QKV_INVALID_ARGUMENT, "tls-key %.150s is not the key of tls-cert %.150s",
                      tls->paths[KEY], tls->paths[CERTIFICATE]);
  else if (tls->paths[CLIENT_CA] != NULL && authority == NULL)
    status =
        qkv_fail(error, QKV_INVALID_ARGUMENT, "tls-client-ca %.300s holds no PEM certificate", tls->paths[CLIENT_CA]);
  X509_free(certificate);
  X509_free(authority);
  EVP_PKEY_free(key);
  return status;
}

static bool is_changed(const qkvi_tls *tls) {
  for (size_t i = 0; i < FILES; i++) {
    if (tls->paths[i] != NULL && qkvi_file_is_changed(tls->paths[i], &tls->seen[i])) return true;
  }
  return false;
}

qkv_status qkvi_tls_reload(qkvi_tls *tls, bool always, bool *changed, qkv_error *error) {
  char *pem[FILES] = {NULL};
  qkv_status status = QKV_OK;
  *changed = always || is_changed(tls);
  if (!*changed) return QKV_OK;
  for (size_t i = 0; i < FILES && status == QKV_OK; i++) {
    if (tls->paths[i] != NULL) status = qkvi_file_read(tls->paths[i], FILE_BYTES_MAX, &pem[i], &tls->seen[i], error);
  }
  if (status == QKV_OK) status = check(tls, pem, error);
  if (status == QKV_OK) {
    pthread_mutex_lock(&tls->lock);
    for (size_t i = 0; i < FILES; i++) {
      char *old = tls->pem[i];
      tls->pem[i] = pem[i];
      pem[i] = old;
    }
    tls->version++;
    tls->expires = end_of(tls->pem[CERTIFICATE]);
    pthread_mutex_unlock(&tls->lock);
  }
  for (size_t i = 0; i < FILES; i++) free(pem[i]);
  return status;
}

qkv_status qkvi_tls_create(const char *certificate, const char *key, const char *client_ca, qkvi_tls **out,
                           qkv_error *error) {
  qkvi_tls *tls = calloc(1, sizeof(*tls));
  assert(tls != NULL);
  tls->paths[CERTIFICATE] = strdup(certificate);
  tls->paths[KEY] = strdup(key);
  tls->paths[CLIENT_CA] = client_ca != NULL ? strdup(client_ca) : NULL;
  pthread_mutex_init(&tls->lock, NULL);
  bool changed;
  const qkv_status status = qkvi_tls_reload(tls, true, &changed, error);
  if (status != QKV_OK) qkvi_tls_destroy(&tls);
  *out = tls;
  return status;
}

static char *copy(const char *text) {
  char *made = strdup(text);
  assert(made != NULL);
  return made;
}

void qkvi_tls_copy(qkvi_tls *tls, char **certificate, char **key) {
  pthread_mutex_lock(&tls->lock);
  *certificate = copy(tls->pem[CERTIFICATE]);
  *key = copy(tls->pem[KEY]);
  pthread_mutex_unlock(&tls->lock);
}

int64_t qkvi_tls_expires(const qkvi_tls *tls) {
  return tls->expires;
}

void qkvi_tls_destroy(qkvi_tls **tls) {
  qkvi_tls *old = *tls;
  if (old == NULL) return;
  *tls = NULL;
  pthread_mutex_destroy(&old->lock);
  for (size_t i = 0; i < FILES; i++) {
    free(old->paths[i]);
    free(old->pem[i]);
  }
  free(old);
}

// ---- Credentials ----

// gRPC calls this before each handshake. It wants authorities even where clients show no certificate: then it gets
// the daemon's own certificate, which is not used.
static grpc_ssl_certificate_config_reload_status fetch(void *context, grpc_ssl_server_certificate_config **config) {
  qkvi_tls *tls = context;
  grpc_ssl_certificate_config_reload_status status = GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_UNCHANGED;
  pthread_mutex_lock(&tls->lock);
  if (tls->given != tls->version) {
    const grpc_ssl_pem_key_cert_pair pair = {.private_key = tls->pem[KEY], .cert_chain = tls->pem[CERTIFICATE]};
    const char *authorities = tls->pem[CLIENT_CA] != NULL ? tls->pem[CLIENT_CA] : tls->pem[CERTIFICATE];
    *config = grpc_ssl_server_certificate_config_create(authorities, &pair, 1);
    tls->given = tls->version;
    status = GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_NEW;
  }
  pthread_mutex_unlock(&tls->lock);
  return status;
}

static grpc_server_credentials *credentials_of(qkvi_tls *tls) {
  const grpc_ssl_client_certificate_request_type request =
      tls->paths[CLIENT_CA] != NULL ? GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY
                                    : GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE;
  return grpc_ssl_server_credentials_create_with_options(
      grpc_ssl_server_credentials_create_options_using_config_fetcher(request, fetch, tls));
}

// ---- The port ----

// gRPC's C++ interface has external connections (experimental().AddExternalConnectionAcceptor), its C surface has
// not. The handler that it leaves in the argument is a C++ object; this is what one looks like on Debian's platforms:
// a pointer to its table of virtual functions, two destructors before the one that is wanted.
typedef struct handler_functions {
  void (*destroy)(void *self);
  void (*destroy_and_free)(void *self);
  void (*handle)(void *self, int listener, int connection, grpc_byte_buffer *read_already);
} handler_functions;

typedef struct handler {
  const handler_functions *functions;
} handler;

static void *copy_argument(void *argument) {
  return argument;
}

static void drop_argument(void *argument) {
  (void)argument;
}

static int compare_arguments(void *a, void *b) {
  return (a > b) - (a < b);
}

grpc_arg qkvi_tls_port_argument(qkvi_tls_port *port) {
  static const grpc_arg_pointer_vtable functions = {copy_argument, drop_argument, compare_arguments};
  return (grpc_arg){.type = GRPC_ARG_POINTER,
                    .key = (char *)(uintptr_t)PORT_NAME,
                    .value.pointer = {.p = &port->handler, .vtable = &functions}};
}

qkv_status qkvi_tls_add_port(grpc_server *server, qkvi_tls *tls, qkvi_tls_port *port, qkv_error *error) {
  if (strcmp(grpc_version_string(), GRPC_KNOWN) == 0) {
    grpc_server_credentials *credentials = credentials_of(tls);
    (void)grpc_server_add_http2_port(server, PORT_NAME, credentials);
    grpc_server_credentials_release(credentials);
    if (port->handler != NULL) return QKV_OK;
  }
  return qkv_fail(error, QKV_UNAVAILABLE, "tls-cert needs gRPC-core " GRPC_KNOWN ", this is %s",
                  grpc_version_string());
}

void qkvi_tls_give(const qkvi_tls_port *port, int connection) {
  const handler *taken = port->handler;
  taken->functions->handle(port->handler, -1, connection, NULL);
}
