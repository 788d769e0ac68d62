// Fuzz targets: one file each, one LLVMFuzzerTestOneInput each, for every parser of bytes from outside.
//
// Built by the preset `fuzz` with clang's libFuzzer, AddressSanitizer and UndefinedBehaviorSanitizer; smoke.sh runs
// them. An input that once crashed is kept in corpus/<target>/regress-* and replayed by every run.
#ifndef QKV_TESTS_FUZZ_FUZZ_H
#define QKV_TESTS_FUZZ_FUZZ_H

#include <stddef.h>
#include <stdint.h>

#include "engine/base/bytes.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

// What a segmented message is cut into: `parts` pieces in memory of their own, so that a read past a piece's
// end is seen.
#define FUZZ_PARTS_MAX 4

typedef struct fuzz_message {
  qkv_segment segments[FUZZ_PARTS_MAX];
  qkv_bytes bytes;
} fuzz_message;

// Cuts the input into pieces; the first byte decides where. The caller frees with fuzz_message_deinit.
void fuzz_message_init(fuzz_message *message, const uint8_t *data, size_t size);
void fuzz_message_deinit(fuzz_message *message);

#endif
