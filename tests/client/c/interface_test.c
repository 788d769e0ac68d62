// What programs and libqkv.so give each other has these sizes (where pointers have 8 bytes). A program that was built
// when they were others does not fit the library. Once there has been a release, a size that changes here needs
// another SOVERSION (client/c/CMakeLists.txt), and with it another name of the package libqkv1 (deploy/debian).
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "client/c/qkv.h"

#define SIZES(X)                   \
  X(qkv_call_error, 516)           \
  X(qkv_client_options, 80)        \
  X(qkv_client_tensor, 88)         \
  X(qkv_client_rope, 80)           \
  X(qkv_client_policy, 128)        \
  X(qkv_client_model, 168)         \
  X(qkv_session_options, 112)      \
  X(qkv_client_session_info, 624)  \
  X(qkv_client_prompt, 40)         \
  X(qkv_client_match, 168)         \
  X(qkv_client_watch, 40)          \
  X(qkv_client_prefix_event, 72)   \
  X(qkv_client_changes, 40)        \
  X(qkv_client_scope, 40)          \
  X(qkv_client_tiers, 24)          \
  X(qkv_client_attention, 80)      \
  X(qkv_client_lent, 80)           \
  X(qkv_client_attend_options, 56) \
  X(qkv_client_page, 48)           \
  X(qkv_client_item, 328)          \
  X(qkv_client_result, 304)        \
  X(qkv_client_fetch, 64)          \
  X(qkv_client_rows, 192)          \
  X(qkv_client_memory, 40)         \
  X(qkv_client_layer_memory, 96)   \
  X(qkv_client_coded_receiver, 24) \
  X(qkv_client_layer_rows, 56)     \
  X(qkv_client_page_rows, 32)      \
  X(qkv_client_rows_to_code, 200)  \
  X(qkv_client_object, 64)         \
  X(qkv_client_objects, 16)

static void sizes_are_those_of_this_version(void **state) {
  (void)state;
#define CHECK(type, bytes) \
  if (sizeof(type) != (bytes)) fail_msg("%s has %zu bytes, before it had %d", #type, sizeof(type), bytes);
  SIZES(CHECK)
  assert_int_equal(QKV_SOVERSION, 1);
}

// Each struct of the header has its row.
static void no_struct_is_left_out(void **state) {
  (void)state;
  char line[512], type[128];
  size_t structs = 0, rows = 0;
  FILE *header = fopen(QKV_SOURCE_DIR "/client/c/qkv.h", "re");
  assert_non_null(header);
  while (fgets(line, sizeof line, header) != NULL) {
    if (sscanf(line, "typedef struct %127s {", type) != 1 || strchr(line, '{') == NULL) continue;
    size_t found = 0;
#define COUNT(name, bytes) found += strcmp(type, #name) == 0;
    SIZES(COUNT)
    if (found != 1) fail_msg("%s has no row", type);
    structs++;
  }
  assert_int_equal(fclose(header), 0);
#define ROW(name, bytes) rows++;
  SIZES(ROW)
  assert_int_equal(structs, rows);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(sizes_are_those_of_this_version),
      cmocka_unit_test(no_struct_is_left_out),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
