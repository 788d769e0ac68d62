#include "server/http/page.h"

#include <assert.h>
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

// QKV_PAGE is page.html (server/CMakeLists.txt).
__asm__(
    ".pushsection .rodata\n"
    "qkvi_page_begin: .incbin \"" QKV_PAGE
    "\"\n"
    "qkvi_page_end: .byte 0\n"
    ".popsection\n");
extern const char qkvi_page_begin[] __attribute__((visibility("hidden")));
extern const char qkvi_page_end[] __attribute__((visibility("hidden")));

// The placeholder of the nonce in the file, of the same length.
#define PLACE "00000000000000000000000000000000"

char *qkvi_page_create(char *policy, size_t bytes) {
  uint64_t random[2];
  char nonce[sizeof PLACE];
  const ssize_t got = getrandom(random, sizeof random, 0);
  assert(got == (ssize_t)sizeof random);
  (void)got;
  (void)snprintf(nonce, sizeof nonce, "%016" PRIx64 "%016" PRIx64, random[0], random[1]);
  const int length = snprintf(policy, bytes,
                              "default-src 'none'; script-src 'nonce-%s'; style-src 'nonce-%s'; connect-src 'self'; "
                              "img-src data:; "
                              "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
                              nonce, nonce);
  assert(length > 0 && (size_t)length < bytes);
  (void)length;
  char *page = strndup(qkvi_page_begin, (size_t)(qkvi_page_end - qkvi_page_begin));
  if (page == NULL) abort();
  for (char *at = page; (at = strstr(at, PLACE)) != NULL;) memcpy(at, nonce, sizeof PLACE - 1);
  return page;
}
