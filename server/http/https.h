// TLS of --admin-listen. libmicrohttpd does it by GnuTLS, which asks for the certificate in each handshake, and gets
// the one that server/rpc/tls.h has read last.
//
// GnuTLS hands its callback no context, so all servers of a process show the certificate of one daemon.
//
// Threads: any.
#ifndef QKV_SERVER_HTTP_HTTPS_H
#define QKV_SERVER_HTTP_HTTPS_H

#include <gnutls/abstract.h>

#include "server/rpc/tls.h"

// TLS 1.2 and later.
#define QKVI_HTTPS_PRIORITIES "NORMAL:-VERS-ALL:+VERS-TLS1.3:+VERS-TLS1.2"

// What handshakes show from here on; NULL: none succeeds.
void qkvi_https_show(qkvi_tls *tls);
// For MHD_OPTION_HTTPS_CERT_CALLBACK2.
gnutls_certificate_retrieve_function3 qkvi_https_certificate;

#endif
