// storage/segment.h: recovery takes any bytes for a segment; what it says is a record can be read.
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "storage/segment.h"
#include "tests/fuzz/fuzz.h"

enum { STORE = 7, SEGMENT = 1 };

static void read_footer(const uint8_t *bytes, uint64_t size) {
  if (size < 2 * (uint64_t)QKV_STORAGE_BLOCK) return;
  const qkvi_segment_footer *footer = (const qkvi_segment_footer *)(bytes + size - QKV_STORAGE_BLOCK);
  if (qkvi_segment_footer_check(footer, STORE, SEGMENT, size) != NULL) return;
  const qkv_record_header *headers = (const qkv_record_header *)(bytes + footer->end);
  if (qkvi_segment_summary_check(footer, headers) != NULL) return;
  for (uint64_t i = 0; i < footer->records; i++) {
    if (headers[i].offset + qkvi_record_extent(headers[i].stored_bytes) > size) __builtin_trap();
  }
}

static void scan(const uint8_t *bytes, uint64_t size) {
  qkvi_segment_scan state;
  qkvi_segment_scan_init(&state, STORE, SEGMENT, size);
  uint64_t wanted = 0;
  const qkv_record_header *header;
  if (state.offset > size) return;
  while ((header = qkvi_segment_scan_next(&state, bytes + state.offset, size - state.offset, &wanted)) != NULL) {
    if ((const uint8_t *)header < bytes || state.offset > size) __builtin_trap();
    if (header->raw_bytes > UINT64_C(1) << 20) continue;
    void *raw = malloc(header->raw_bytes);
    if (raw == NULL) abort();
    (void)qkvi_record_decode(header, header + 1, raw);
    free(raw);
  }
  if (wanted != 0 && state.file_bytes == size) __builtin_trap();
}

// A fuzzer does not guess checksums: they are put right, in every block that looks like something.
static void seal(uint8_t *bytes, uint64_t size) {
  for (uint64_t at = 0; at + QKV_STORAGE_BLOCK <= size; at += QKV_STORAGE_BLOCK) {
    qkv_record_header *header = (qkv_record_header *)(bytes + at);
    qkvi_segment_footer *footer = (qkvi_segment_footer *)(bytes + at);
    if (header->magic == QKV_RECORD_MAGIC) {
      if (header->stored_bytes <= size - at - sizeof *header) {
        header->payload_hash = XXH3_64bits(header + 1, header->stored_bytes);
      }
      qkvi_record_place(header, STORE, SEGMENT, at, 0);
    } else if (footer->magic == QKVI_FOOTER_MAGIC) {
      footer->store = STORE;
      footer->segment = SEGMENT;
      if (footer->end < at && footer->records <= (at - footer->end) / sizeof(qkv_record_header)) {
        footer->summary_hash = XXH3_64bits(bytes + footer->end, footer->records * sizeof(qkv_record_header));
      }
      footer->hash = XXH3_64bits(footer, offsetof(qkvi_segment_footer, hash));
    }
  }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  const size_t whole = size / QKV_STORAGE_BLOCK * QKV_STORAGE_BLOCK;
  uint8_t *bytes = aligned_alloc(QKV_STORAGE_BLOCK, whole + QKV_STORAGE_BLOCK);
  if (bytes == NULL) abort();
  memcpy(bytes, data, whole);
  read_footer(bytes, whole);
  scan(bytes, whole);
  seal(bytes, whole);
  read_footer(bytes, whole);
  scan(bytes, whole);
  free(bytes);
  return 0;
}
