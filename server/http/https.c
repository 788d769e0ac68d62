#include "server/http/https.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum { CHAIN_MAX = 16 };

static _Atomic(qkvi_tls *) shown;

void qkvi_https_show(qkvi_tls *tls) {
  atomic_store(&shown, tls);
}

static gnutls_datum_t datum_of(char *text) {
  return (gnutls_datum_t){.data = (unsigned char *)text, .size = (unsigned)strlen(text)};
}

static bool import_chain(char *pem, gnutls_pcert_st **chain, unsigned *count) {
  const gnutls_datum_t text = datum_of(pem);
  *count = CHAIN_MAX;
  *chain = gnutls_calloc(CHAIN_MAX, sizeof **chain);
  if (*chain == NULL) abort();
  if (gnutls_pcert_list_import_x509_raw(*chain, count, &text, GNUTLS_X509_FMT_PEM, 0) == 0) return true;
  gnutls_free(*chain);
  return false;
}

static bool import_key(char *pem, gnutls_privkey_t *key) {
  const gnutls_datum_t text = datum_of(pem);
  if (gnutls_privkey_init(key) != 0) abort();
  if (gnutls_privkey_import_x509_raw(*key, &text, GNUTLS_X509_FMT_PEM, NULL, 0) == 0) return true;
  gnutls_privkey_deinit(*key);
  return false;
}

static bool import_both(char *certificate, char *pem, gnutls_pcert_st **chain, unsigned *count,
                        gnutls_privkey_t *key) {
  if (!import_key(pem, key)) return false;
  if (import_chain(certificate, chain, count)) return true;
  gnutls_privkey_deinit(*key);
  return false;
}

// GnuTLS frees both after the handshake.
int qkvi_https_certificate(gnutls_session_t session, const struct gnutls_cert_retr_st *info, gnutls_pcert_st **chain,
                           unsigned *count, gnutls_ocsp_data_st **ocsp, unsigned *ocsp_count, gnutls_privkey_t *key,
                           unsigned *flags) {
  (void)session;
  (void)info;
  qkvi_tls *tls = atomic_load(&shown);
  char *certificate = NULL, *pem = NULL;
  if (tls == NULL) return -1;
  qkvi_tls_copy(tls, &certificate, &pem);
  const bool good = import_both(certificate, pem, chain, count, key);
  explicit_bzero(pem, strlen(pem));
  free(pem);
  free(certificate);
  *ocsp = NULL;
  *ocsp_count = 0;
  *flags = GNUTLS_CERT_RETR_DEINIT_ALL;
  return good ? 0 : -1;
}
