// The page that shows the daemon: one file, page.html, which is part of the binary.
#ifndef QKV_SERVER_HTTP_PAGE_H
#define QKV_SERVER_HTTP_PAGE_H

#include <stddef.h>

// The page, which the caller frees, with a random nonce for its own script and style. `policy` gets the content
// security policy by which a browser runs nothing else and contacts no other host.
char *qkvi_page_create(char *policy, size_t bytes);

#endif
