// The memory of messages stays with malloc: after the first client, blocks of some MiB are not mapped one by one.
#include <malloc.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "client/c/qkv.h"

// Blocks that are mapped by themselves; 0 under sanitizers, whose malloc has no such figures.
static size_t mapped(void) {
  return mallinfo2().hblks;
}

static void a_client_keeps_freed_memory(void **state) {
  (void)state;
  const qkv_client_options options = {.connect_timeout_ms = 1};
  qkv_client *nobody = NULL;
  assert_int_not_equal(qkv_client_connect("unix:/nobody", &options, &nobody, NULL), 0);
  const size_t before = mapped();
  void *volatile block = malloc(7 << 20);
  assert_int_equal(mapped(), before);
  free(block);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(a_client_keeps_freed_memory)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
